"""The named pre-tokenizers of byte-level BPE models: how text is cut into words before merging.

The names are the values of GGUF's `tokenizer.ggml.pre`. The patterns are the published ones of each tokenizer.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING

from pagedkv.models.errors import ModelError

if TYPE_CHECKING:
    import tokenizers

_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_TAIL = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_LLAMA3 = rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{{1,3}}|{_TAIL}"
_QWEN2 = rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}|{_TAIL}"
# GPT-4o and Tekken split words where lower case turns to upper case; letters without case count as either.
_UPPER, _LOWER = r"\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}", r"\p{Ll}\p{Lm}\p{Lo}\p{M}"
_BEFORE = r"[^\r\n\p{L}\p{N}]?"
_CASED_TAIL = r" ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_TEKKEN = rf"{_BEFORE}[{_UPPER}]*[{_LOWER}]+|{_BEFORE}[{_UPPER}]+[{_LOWER}]*|\p{{N}}|{_CASED_TAIL}"
_GPT4O = (
    rf"{_BEFORE}[{_UPPER}]*[{_LOWER}]+{_CONTRACTIONS}?|{_BEFORE}[{_UPPER}]+[{_LOWER}]*{_CONTRACTIONS}?"
    rf"|\p{{N}}{{1,3}}|{_CASED_TAIL}"
)


@dataclass(frozen=True, slots=True)
class PreTokenizer:
    """pattern: words, everything between them is a word too; digits: each digit is cut off first;
    nfc: text is normalised to NFC before; whole_words: a word that is a token is not merged from parts."""

    pattern: str
    digits: bool = False
    nfc: bool = False
    whole_words: bool = False

    def build(self) -> "tokenizers.pre_tokenizers.PreTokenizer":
        """The `tokenizers` object, which also maps bytes to the byte-level alphabet."""
        from tokenizers import Regex, pre_tokenizers

        steps = [pre_tokenizers.Digits(individual_digits=True)] if self.digits else []
        if self.pattern == _GPT2:
            return pre_tokenizers.Sequence([*steps, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)])
        split = pre_tokenizers.Split(Regex(self.pattern), "isolated")
        return pre_tokenizers.Sequence(
            [*steps, split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
        )


_gpt2 = PreTokenizer(_GPT2)
_digits = PreTokenizer(_GPT2, digits=True)
_llama3 = PreTokenizer(_LLAMA3, whole_words=True)
_cl100k = PreTokenizer(_LLAMA3)
_qwen2 = PreTokenizer(_QWEN2, nfc=True)

PRE_TOKENIZERS = {
    "gpt-2": _gpt2, "gpt2": _gpt2, "phi-2": _gpt2, "olmo": _gpt2, "mpt": _gpt2, "jina-es": _gpt2, "jina-de": _gpt2,
    "smollm": _digits, "starcoder": _digits, "refact": _digits, "command-r": _digits, "codeshell": _digits,
    "llama-bpe": _llama3, "llama3": _llama3, "llama-v3": _llama3, "smaug-bpe": _llama3,
    "dbrx": _cl100k,
    "qwen2": _qwen2, "deepseek-r1-qwen": _qwen2,
    "gpt-4o": PreTokenizer(_GPT4O), "tekken": PreTokenizer(_TEKKEN, whole_words=True),
}  # fmt: skip


def pre_tokenizer(name: str) -> PreTokenizer:
    """The entry for a value of `tokenizer.ggml.pre`. An unknown one is a ModelError: a guess would give wrong ids."""
    if name not in PRE_TOKENIZERS:
        known = ", ".join(PRE_TOKENIZERS)
        raise ModelError(f"tokenizer.ggml.pre: pre-tokenizer {name!r} is not known; known: {known}")
    return PRE_TOKENIZERS[name]
