"""Byte-level BPE vocabularies (GGUF's tokenizer model "gpt2"): every byte is a character of a printable alphabet."""

from typing import TYPE_CHECKING

import numpy as np

from pagedkv.models.errors import ModelError
from pagedkv.models.metadata import Metadata
from pagedkv.models.pretokenizers import pre_tokenizer
from pagedkv.models.vocabulary import CONTROL, NORMAL, Vocabulary

if TYPE_CHECKING:
    import tokenizers


class ByteLevel(Vocabulary):
    """Words by a named pre-tokenizer, merged by a list of merges in order of rank."""

    def __init__(self, read: Metadata, types: np.ndarray):
        super().__init__(read, types)
        self._pre = pre_tokenizer(read.text("tokenizer.ggml.pre", default="gpt-2"))
        self.pre_tokenizer = self._pre.build()

    def model(self) -> "tokenizers.models.BPE":
        from tokenizers import models

        vocab = self.index(self.tokens)
        control = {self.tokens[i] for i in np.flatnonzero(self.types == CONTROL).tolist()}
        key = "tokenizer.ggml.merges"
        merges = []
        for i, merge in enumerate(self.read.strings(key)):
            pair = tuple(merge.split(" "))
            if len(pair) == 2 and pair[0] in vocab and pair[1] in vocab and pair[0] + pair[1] in vocab:
                merges.append(pair)
            elif not control.intersection((*pair, "".join(pair))):
                raise ModelError(f"{key}[{i}]: {merge!r} is not two tokens that join to a third")
        return models.BPE(vocab=vocab, merges=merges, ignore_merges=self._pre.whole_words)

    def normalizers(self) -> list:
        from tokenizers import normalizers

        return [normalizers.NFC()] if self._pre.nfc else []

    def bytes_of(self, token_id: int) -> bytes:
        text = self.tokens[token_id]
        return bytes_of_alphabet(text) if self.types[token_id] == NORMAL else text.encode()


def bytes_of_alphabet(text: str) -> bytes:
    """The bytes that characters of the alphabet stand for; of any other text its UTF-8."""
    try:
        return bytes([_BYTE_OF[c] for c in text])
    except KeyError:
        return text.encode()


def _byte_alphabet() -> dict[str, int]:
    """GPT-2's alphabet: printable Latin-1 stands for itself, the other 68 bytes in order for U+0100 and on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(0x100 + i): byte for i, byte in enumerate(others)}


_BYTE_OF = _byte_alphabet()
