"""What the tokenizer families have in common: tokens, their types, and what each family must say."""

import contextlib
import ctypes
import os
import re
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, NamedTuple, TypeVar

import numpy as np

from pagedkv.models.errors import ModelError
from pagedkv.models.metadata import Metadata

if TYPE_CHECKING:
    import tokenizers

# values of GGUF's tokenizer.ggml.token_type
NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(1, 7)

# where a stretch of text lies: at the very start, behind a control token, behind one that was found in normalised text
START, LATER, INSIDE = range(3)
_CLONE_FILES = 0x400
_Result = TypeVar("_Result")


class Control(NamedTuple):
    """A control token written out in a text: [start, stop) with the space it takes along, and where text goes on."""

    start: int
    stop: int
    token: int
    next_place: int = LATER


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


def without_stderr(work: Callable[[], _Result]) -> _Result:
    """work(), which opens no files, while what it writes to standard error goes nowhere; where the system allows that.

    A panic of the library writes to file descriptor 2 from below Python before it becomes an exception. The work runs
    in a thread of its own with a table of descriptors of its own, so other threads keep the standard error they have.
    """
    results: list[_Result] = []
    failures: list[BaseException] = []

    def run() -> None:
        try:
            unshare = getattr(ctypes.CDLL(None), "unshare", None)  # Linux has it
            if unshare is not None and unshare(_CLONE_FILES) == 0:
                nowhere = os.open(os.devnull, os.O_WRONLY)
                os.dup2(nowhere, 2)
                os.close(nowhere)
            results.append(work())
        except BaseException as error:
            failures.append(error)

    thread = threading.Thread(target=run, name="tokenizers", daemon=True)
    thread.start()
    thread.join()
    if failures:
        raise failures[0]
    return results[0]


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

    def encoders(self) -> tuple[Callable[[str], list[int]], ...]:
        """What makes ids of text at START, LATER and INSIDE, in which no control token is looked for.

        Raises ModelError as `model`.
        """
        return (self.encoder(self.pre_tokenizer, self.normalizers()),) * 3

    def finder(self) -> Callable[[str], list[Control]]:
        """What finds control tokens written out in text, from left to right, the longest at each place."""
        control = np.flatnonzero(self.types == CONTROL).tolist()
        ids = {text: i for i in reversed(control) if len(text := self.tokens[i]) > 1}
        lengths = sorted({len(text) for text in ids}, reverse=True)
        starts = "".join(sorted({text[0] for text in ids}))
        candidate = re.compile(f"[{re.escape(starts)}]" if starts else "(?!)")

        def find(text: str) -> list[Control]:
            found, done = [], 0
            for match in candidate.finditer(text):
                start = match.start()
                if start >= done:
                    n = next((n for n in lengths if text[start : start + n] in ids), 0)
                    if n:
                        done = start + n
                        found.append(Control(start, done, ids[text[start:done]]))
            return found

        return find

    def whole_encoder(self) -> Callable[[str], list[int]] | None:
        """What makes ids of text and finds control tokens in it on the way, where the library can do both at once."""
        return None

    def encoder(
        self, pre_tokenizer: "tokenizers.pre_tokenizers.PreTokenizer | None", steps: list
    ) -> Callable[[str], list[int]]:
        """What makes ids of text with these steps before the model; control tokens are not looked for."""
        from tokenizers import Tokenizer, normalizers

        with library_errors("tokenizer: no vocabulary for the tokenizers library"):
            model = self.model()
            library = Tokenizer(model)
            if pre_tokenizer is not None:
                library.pre_tokenizer = pre_tokenizer
            if steps:
                library.normalizer = normalizers.Sequence(steps)
            added = self.added_tokens()
            library.add_tokens(list(added.values()))
            # tokens the model does not know get the next free ids, whatever ids the file gives them
            places = [(library.token_to_id(token.content), i) for i, token in added.items()]
            moved = {to: i for to, i in places if to is not None and to != i and model.id_to_token(to) is None}

        def encode(text: str) -> list[int]:
            with library_errors("tokenizer: the tokenizers library refuses this text"):
                ids = library.encode(text, add_special_tokens=False).ids
            return [moved.get(i, i) for i in ids] if moved else ids

        return encode

    def index(self, texts: Iterable[str]) -> dict[str, int]:
        """Text -> id of what merging may arrive at: no control tokens, and of two equal texts the lower id."""
        vocab: dict[str, int] = {}
        control = set(np.flatnonzero(self.types == CONTROL).tolist())
        for i, text in enumerate(texts):
            if i not in control:
                vocab.setdefault(text, i)
        return vocab

    def added_tokens(self) -> "dict[int, tokenizers.AddedToken]":
        """User-defined tokens as the library wants them, by id."""
        from tokenizers import AddedToken

        return {i: AddedToken(text, normalized=False) for i, text in self.matched_texts().items()}

    def matched_texts(self) -> dict[int, str]:
        """Texts of user-defined tokens by id, found in any text before words are cut."""
        return {i: text for i in np.flatnonzero(self.types == USER_DEFINED).tolist() if (text := self.tokens[i])}
