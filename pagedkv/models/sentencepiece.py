"""SentencePiece BPE vocabularies (GGUF's tokenizer model "llama"): a score for each token, spaces written as U+2581.

Merges are not in the file. As in Hugging Face's converters, every way to cut a token into two others is a merge, ranked
by the score of the whole, then by the lengths of the left and of the right part; `ScoredMerges` finds them by need.
"""

import re
from collections.abc import Callable

import numpy as np

from pagedkv.core.merges import MATCHED, PART, WHOLE, ScoredMerges
from pagedkv.models.errors import ModelError
from pagedkv.models.metadata import Metadata
from pagedkv.models.vocabulary import BYTE, CONTROL, NORMAL, UNKNOWN, USER_DEFINED, Vocabulary

_SPACE = "\u2581"
_BYTE_TOKEN = re.compile("<0x([0-9A-F]{2})>")


class SentencePiece(Vocabulary):
    """Merges over whole stretches of text, with single bytes for what has no token."""

    def __init__(self, read: Metadata, types: np.ndarray):
        super().__init__(read, types)
        self._adds_space = read.flag("tokenizer.ggml.add_space_prefix", default=True)
        self.strips_first_space = self._adds_space
        for i in np.flatnonzero(types == BYTE).tolist():
            if not _BYTE_TOKEN.fullmatch(self.tokens[i]):
                raise ModelError(f"tokenizer.ggml.tokens[{i}]: {self.tokens[i]!r} is not a byte token <0xNN>")

    def encoder(self) -> Callable[[str], list[int]]:
        text, ends = self._utf8()
        # the place of each score, the highest first
        ranks = np.unique(-self._scores(), return_inverse=True)[1]
        user_defined = self.types == USER_DEFINED
        roles = np.where(self.types == CONTROL, 0, PART)
        roles[(self.types == NORMAL) | user_defined] |= WHOLE
        roles[user_defined] |= MATCHED
        unknown = self.read.integer("tokenizer.ggml.unknown_token_id", 0, len(ends) - 1, default=-1)
        if unknown >= 0:
            roles[unknown] |= PART
        try:
            merges = ScoredMerges(text, ends, ranks, roles, unknown)
        except ValueError as error:
            raise ModelError(f"tokenizer.ggml.{error}") from None
        return lambda text: merges.encode(text, self._adds_space)

    def bytes_of(self, token_id: int) -> bytes:
        text = self.tokens[token_id]
        kind = self.types[token_id]
        if kind == BYTE:
            return bytes([int(text[3:5], 16)])
        return (text if kind in (CONTROL, UNKNOWN) else text.replace(_SPACE, " ")).encode()

    def _utf8(self) -> tuple[bytes, np.ndarray]:
        """The tokens' texts, one after the other, and where each ends; user-defined ones with the marker.

        Converters write user-defined runs of spaces as they look, all other tokens with the marker.
        """
        text, ends = self.read.strings("tokenizer.ggml.tokens").utf8()
        pieces, done, growth = [], 0, np.zeros(len(ends), np.int64)
        for i in np.flatnonzero(self.types == USER_DEFINED).tolist():
            start, end = int(ends[i - 1]) if i else 0, int(ends[i])
            marked = text[start:end].replace(b" ", _SPACE.encode())
            if len(marked) != end - start:
                pieces += [text[done:start], marked]
                done, growth[i] = end, len(marked) - (end - start)
        return b"".join([*pieces, text[done:]]), ends + np.cumsum(growth)

    def _scores(self) -> np.ndarray:
        key = "tokenizer.ggml.scores"
        scores = self.read.numbers(key)
        if scores.dtype.kind != "f" or len(scores) != len(self.tokens) or not np.isfinite(scores).all():
            raise ModelError(
                f"{key}: {len(scores)} values of {scores.dtype}, must be {len(self.tokens)} finite numbers"
            )
        # SentencePiece gives its user-defined pieces the score 0, above all learned ones; converters drop that
        return np.where(self.types == USER_DEFINED, 0, scores)
