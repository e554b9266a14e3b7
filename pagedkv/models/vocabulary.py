"""What the tokenizer families have in common: tokens, their types, and what each family must say."""

import contextlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING

import numpy as np

from pagedkv.models.errors import ModelError
from pagedkv.models.metadata import Metadata

if TYPE_CHECKING:
    import tokenizers

# values of GGUF's tokenizer.ggml.token_type
NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(1, 7)


@contextlib.contextmanager
def library_errors(what: str) -> Iterator[None]:
    """ModelError for what the `tokenizers` library raises: plain Exceptions, and panics, which are no Exceptions."""
    try:
        yield
    except (ModelError, MemoryError):
        raise
    except BaseException as error:
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise
        raise ModelError(f"{what}: {error}") from None


class Vocabulary(ABC):
    """The tokens of one file and how text becomes tokens and tokens become bytes.

    .tokens, .types       text and type of each id
    .pre_tokenizer        how text is cut into words, or None
    .strips_first_space   whether a space at the very start of decoded text is the tokenizer's own and taken off again
    """

    pre_tokenizer: "tokenizers.pre_tokenizers.PreTokenizer | None" = None
    strips_first_space = False

    def __init__(self, read: Metadata, types: np.ndarray):
        self.read = read
        self.tokens: Sequence[str] = read.strings("tokenizer.ggml.tokens")
        self.types = types

    @abstractmethod
    def model(self) -> "tokenizers.models.BPE":
        """The merging model. Raises ModelError for merges or scores that do not fit the tokens."""

    @abstractmethod
    def normalizers(self) -> list:
        """Steps that change text before words are cut."""

    @abstractmethod
    def bytes_of(self, token_id: int) -> bytes:
        """The bytes token `token_id` stands for."""

    def encoder(self) -> Callable[[str], list[int]]:
        """What makes ids of text, in which no control token is looked for. Raises ModelError as `model`."""
        from tokenizers import Tokenizer, normalizers

        with library_errors("tokenizer: no vocabulary for the tokenizers library"):
            library = Tokenizer(self.model())
            if self.pre_tokenizer is not None:
                library.pre_tokenizer = self.pre_tokenizer
            if steps := self.normalizers():
                library.normalizer = normalizers.Sequence(steps)
            library.add_tokens(self.added_tokens())

        def encode(text: str) -> list[int]:
            with library_errors("tokenizer: the tokenizers library refuses this text"):
                return library.encode(text, add_special_tokens=False).ids

        return encode

    def index(self, texts: Iterable[str]) -> dict[str, int]:
        """Text -> id of what merging may arrive at: no control tokens, and of two equal texts the lower id."""
        vocab: dict[str, int] = {}
        control = set(np.flatnonzero(self.types == CONTROL).tolist())
        for i, text in enumerate(texts):
            if i not in control:
                vocab.setdefault(text, i)
        return vocab

    def added_tokens(self) -> list:
        """User-defined tokens as the library wants them."""
        from tokenizers import AddedToken

        return [AddedToken(text, normalized=False) for text in self.matched_texts()]

    def matched_texts(self) -> list[str]:
        """Texts of user-defined tokens, found in any text before words are cut."""
        return [text for i in np.flatnonzero(self.types == USER_DEFINED).tolist() if (text := self.tokens[i])]
