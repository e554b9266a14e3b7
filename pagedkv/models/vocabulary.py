"""What the tokenizer families have in common: tokens, their types, and what each family must say."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING

import numpy as np

from pagedkv.models.errors import ModelError
from pagedkv.models.metadata import Metadata

if TYPE_CHECKING:
    import tokenizers

# values of GGUF's tokenizer.ggml.token_type
NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(1, 7)


class Vocabulary(ABC):
    """The tokens of one file and how text becomes tokens and tokens become bytes.

    .tokens, .types       text and type of each id
    .strips_first_space   whether a space at the very start of decoded text is the tokenizer's own and taken off again
    """

    strips_first_space = False

    def __init__(self, read: Metadata, types: np.ndarray):
        self.read = read
        self.tokens: Sequence[str] = read.strings("tokenizer.ggml.tokens")
        self.types = types

    @abstractmethod
    def encoder(self) -> Callable[[str], list[int]]:
        """What makes ids of text, which holds no control tokens. Raises ModelError for what does not fit the tokens."""

    @abstractmethod
    def bytes_of(self, token_id: int) -> bytes:
        """The bytes token `token_id` stands for."""


class LibraryVocabulary(Vocabulary):
    """A vocabulary whose text goes through the `tokenizers` library.

    .pre_tokenizer   how text is cut into words, or None
    """

    pre_tokenizer: "tokenizers.pre_tokenizers.PreTokenizer | None" = None

    @abstractmethod
    def model(self) -> "tokenizers.models.BPE":
        """The merging model. Raises ModelError for merges that do not fit the tokens."""

    @abstractmethod
    def normalizers(self) -> list:
        """Steps that change text before words are cut."""

    def encoder(self) -> Callable[[str], list[int]]:
        from tokenizers import Tokenizer, normalizers

        try:
            library = Tokenizer(self.model())
        except ModelError:
            raise
        except Exception as error:
            # the library raises plain Exception for what it refuses
            raise ModelError(f"tokenizer.ggml.tokens: no vocabulary for the tokenizers library: {error}") from None
        if self.pre_tokenizer is not None:
            library.pre_tokenizer = self.pre_tokenizer
        if steps := self.normalizers():
            library.normalizer = normalizers.Sequence(steps)
        library.add_tokens(self.added_tokens())
        return lambda text: library.encode(text, add_special_tokens=False).ids

    def index(self, texts: Iterable[str]) -> dict[str, int]:
        """Text -> id of what merging may arrive at: no control tokens, and of two equal texts the lower id."""
        vocab: dict[str, int] = {}
        control = set(np.flatnonzero(self.types == CONTROL).tolist())
        for i, text in enumerate(texts):
            if i not in control:
                vocab.setdefault(text, i)
        return vocab

    def added_tokens(self) -> list:
        """User-defined tokens as the library wants them: found in any text before words are cut."""
        from tokenizers import AddedToken

        found = [self.tokens[i] for i in np.flatnonzero(self.types == USER_DEFINED).tolist()]
        return [AddedToken(text, normalized=False) for text in found if text]
