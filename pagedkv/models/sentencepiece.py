"""SentencePiece BPE vocabularies (GGUF's tokenizer model "llama"): a score for each token, spaces written as U+2581.

Merges are not in the file. As in Hugging Face's converters, every way to cut a token into two others is a merge, ranked
by the score of the whole, then by the lengths of the left and of the right part.
"""

import re
from typing import TYPE_CHECKING

import numpy as np

from pagedkv.models.errors import ModelError
from pagedkv.models.metadata import Metadata
from pagedkv.models.vocabulary import BYTE, CONTROL, NORMAL, UNKNOWN, USER_DEFINED, Vocabulary

if TYPE_CHECKING:
    import tokenizers

_SPACE = "\u2581"
_BYTE_TOKEN = re.compile("<0x([0-9A-F]{2})>")
# Cutting a token of n characters in every place reads n * n of them; real ones have at most about a hundred.
_MAX_TOKEN_CHARS = 512
_P = 0x9E3779B97F4A7C15
_POWERS = np.array([pow(_P, i, 1 << 64) for i in range(_MAX_TOKEN_CHARS)], np.uint64)
_INVERSE_POWERS = np.array([pow(_P, -i, 1 << 64) for i in range(_MAX_TOKEN_CHARS)], np.uint64)


class SentencePiece(Vocabulary):
    """Merges over whole stretches of text, with single bytes for what has no token."""

    def __init__(self, read: Metadata, types: np.ndarray):
        super().__init__(read, types)
        self._adds_space = read.flag("tokenizer.ggml.add_space_prefix", default=True)
        self.strips_first_space = self._adds_space
        for i in np.flatnonzero(types == BYTE).tolist():
            if not _BYTE_TOKEN.fullmatch(self.tokens[i]):
                raise ModelError(f"tokenizer.ggml.tokens[{i}]: {self.tokens[i]!r} is not a byte token <0xNN>")

    def model(self) -> "tokenizers.models.BPE":
        from tokenizers import models

        texts = list(self.tokens)
        # converters write user-defined runs of spaces as they look, all other tokens with the marker
        for i in np.flatnonzero(self.types == USER_DEFINED).tolist():
            texts[i] = texts[i].replace(" ", _SPACE)
        vocab = self.index(texts)
        unknown = self.read.integer("tokenizer.ggml.unknown_token_id", 0, len(texts) - 1, default=None)
        # text without tokens must not become a control token, whatever the file calls unknown
        if unknown is not None and self.types[unknown] == CONTROL:
            unknown = None
        return models.BPE(
            vocab=vocab,
            merges=self._merges(texts, vocab),
            unk_token=None if unknown is None else texts[unknown],
            fuse_unk=True,
            byte_fallback=True,
        )

    def normalizers(self) -> list:
        from tokenizers import normalizers

        replace = normalizers.Replace(" ", _SPACE)
        return [normalizers.Prepend(_SPACE), replace] if self._adds_space else [replace]

    def bytes_of(self, token_id: int) -> bytes:
        text = self.tokens[token_id]
        kind = self.types[token_id]
        if kind == BYTE:
            return bytes([int(text[3:5], 16)])
        return (text if kind in (CONTROL, UNKNOWN) else text.replace(_SPACE, " ")).encode()

    def matched_texts(self) -> dict[int, str]:
        return {i: text.replace(" ", _SPACE) for i, text in super().matched_texts().items()}

    def _scores(self) -> np.ndarray:
        key = "tokenizer.ggml.scores"
        scores = self.read.numbers(key)
        if scores.dtype.kind != "f" or len(scores) != len(self.tokens) or not np.isfinite(scores).all():
            raise ModelError(
                f"{key}: {len(scores)} values of {scores.dtype}, must be {len(self.tokens)} finite numbers"
            )
        # SentencePiece gives its user-defined pieces the score 0, above all learned ones; converters drop that
        return np.where(self.types == USER_DEFINED, 0, scores)

    def _merges(self, texts: list[str], vocab: dict[str, int]) -> list[tuple[str, str]]:
        wholes = np.flatnonzero((self.types == NORMAL) | (self.types == USER_DEFINED))
        lefts, rights, wholes = _cuts(texts, vocab, wholes)
        length = np.fromiter(map(len, texts), np.int32, len(texts))
        order = np.lexsort((rights, lefts, wholes, -length[rights], -length[lefts], -self._scores()[wholes]))
        pairs = zip(lefts[order].tolist(), rights[order].tolist(), strict=True)
        return [(texts[left], texts[right]) for left, right in pairs]


def _cuts(texts: list[str], vocab: dict[str, int], wholes: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Every (left, right, whole) of ids with texts[left] + texts[right] == texts[whole].

    Texts are compared by 64-bit hashes: the sum of (c + 1) * P**i over characters, so that those of all parts of a text
    come from one running sum. Millions of cuts in Python strings would take seconds.
    """
    hashes = np.empty(len(texts), np.uint64)
    groups = {}
    for n in np.unique(lengths := np.fromiter(map(len, texts), np.int64, len(texts))).tolist():
        ids = np.flatnonzero(lengths == n)
        if n > _MAX_TOKEN_CHARS:
            raise ModelError(f"tokenizer.ggml.tokens[{ids[0]}]: {n} characters, at most {_MAX_TOKEN_CHARS} are allowed")
        if n:
            characters = np.array([texts[i] for i in ids.tolist()], f"<U{n}").view(np.uint32).reshape(-1, n)
            groups[n] = ids, np.cumsum((characters + np.uint64(1)) * _POWERS[:n], axis=1, dtype=np.uint64)
            hashes[ids] = groups[n][1][:, -1]
        else:
            hashes[ids] = 0

    known = np.fromiter(vocab.values(), np.int64, len(vocab))
    known = known[np.argsort(hashes[known])]
    table = hashes[known]

    def find(wanted: np.ndarray) -> np.ndarray:
        """Position in `known` of each hash, -1 where there is none."""
        at = np.searchsorted(table, wanted)
        at[at == len(table)] = 0
        return np.where(table[at] == wanted, at, -1)

    found = []
    is_whole = np.zeros(len(texts), bool)
    is_whole[wholes] = True
    for n, (ids, sums) in groups.items():
        rows = is_whole[ids]
        ids, sums = ids[rows], sums[rows]
        for k in range(1, n):
            left = find(sums[:, k - 1])
            rows = np.flatnonzero(left >= 0)
            right = find((sums[rows, -1] - sums[rows, k - 1]) * _INVERSE_POWERS[k])
            both = right >= 0
            found.append(np.stack([known[left[rows[both]]], known[right[both]], ids[rows[both]]]))
    lefts, rights, whole_ids = np.concatenate(found, axis=1) if found else np.empty((3, 0), np.int64)
    return lefts, rights, whole_ids
