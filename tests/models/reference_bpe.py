"""Byte-level BPE the slow and obvious way, sharing no code with the product or the tokenizers library."""

import itertools
import unicodedata

CONTRACTIONS = ("'s", "'t", "'re", "'ve", "'m", "'ll", "'d")


def _kind(c: str) -> str:
    if c.isspace() and c not in "\x1c\x1d\x1e\x1f":
        return "space"
    category = unicodedata.category(c)
    return {"L": "letter", "N": "number"}.get(category[0], "other")


def split_digits(text: str) -> list[str]:
    """Every numeric character alone, what lies between them whole."""
    parts: list[str] = []
    fresh = True
    for c in text:
        if unicodedata.category(c)[0] == "N":
            parts.append(c)
            fresh = True
        elif fresh:
            parts.append(c)
            fresh = False
        else:
            parts[-1] += c
    return parts


def gpt2_words(text: str) -> list[str]:
    """GPT-2's words: contractions, runs of letters, numbers or other marks after at most one space, white space."""
    words, i = [], 0
    while i < len(text):
        contraction = next((c for c in CONTRACTIONS if text.startswith(c, i)), None)
        if contraction:
            words.append(contraction)
            i += len(contraction)
            continue
        start = i + 1 if text[i] == " " and i + 1 < len(text) and _kind(text[i + 1]) != "space" else i
        kind = _kind(text[start])
        end = start
        while end < len(text) and _kind(text[end]) == kind:
            end += 1
        if kind == "space" and end < len(text) and end - start > 1:
            end -= 1  # the last white space before a word belongs to what follows
        words.append(text[i:end])
        i = end
    return words


def alphabet() -> list[str]:
    """Character of each byte."""
    plain = [b for b in range(256) if 33 <= b <= 126 or 161 <= b <= 172 or 174 <= b <= 255]
    shifted = iter(range(256, 512))
    return [chr(b) if b in plain else chr(next(shifted)) for b in range(256)]


class ReferenceBPE:
    def __init__(self, tokens: list[str], merges: list[str], digits: bool):
        self.ids = {token: i for i, token in enumerate(tokens)}
        self.ranks = {tuple(merge.split(" ")): rank for rank, merge in enumerate(merges)}
        self.digits = digits
        self.alphabet = alphabet()

    def encode(self, text: str) -> list[int]:
        stretches = split_digits(text) if self.digits else [text]
        return [i for stretch in stretches for word in gpt2_words(stretch) for i in self.merge(word)]

    def merge(self, word: str) -> list[int]:
        # a byte without a token of its own is dropped before merging
        parts = [c for c in (self.alphabet[b] for b in word.encode()) if c in self.ids]
        while True:
            pairs = [(self.ranks[pair], i) for i, pair in enumerate(itertools.pairwise(parts)) if pair in self.ranks]
            if not pairs:
                return [self.ids[part] for part in parts]
            _, i = min(pairs)
            parts[i : i + 2] = [parts[i] + parts[i + 1]]
