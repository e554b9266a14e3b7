"""Text to token ids and back, built from GGUF metadata on the `tokenizers` library."""

import functools
import re
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from pagedkv.models.errors import ModelError
from pagedkv.models.metadata import Metadata

if TYPE_CHECKING:
    import tokenizers

    from pagedkv.models.chat_template import ChatTemplate

_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED, _UNUSED, _BYTE = range(1, 7)
# A code point that Unicode sets aside for internal use. Between the first two characters of a control token's text it
# keeps that text from being read as the token; it is taken out before words are looked up.
_BREAK = "\ufdd0"
_SURROGATE = re.compile("[\ud800-\udfff]")
_TEXT_MODELS = ("gpt2",)


class Tokenizer:
    """Tokenizer of one model. Immutable after construction and safe to use from several threads.

    .vocab_size     number of tokens in the file
    .special_ids    frozenset of control and unknown tokens: never made from user text, never shown
    .bos_token_id, .eos_token_id    int or None
    .add_bos, .add_eos              whether `encode` adds them
    .has_chat_template
    """

    def __init__(self, metadata: Mapping[str, Any]):
        """Build from the metadata of a GGUFFile. Raises ModelError naming key, value and bound."""
        read = Metadata(metadata)
        family = read.text("tokenizer.ggml.model")
        if family not in _TEXT_MODELS:
            raise ModelError(f"tokenizer.ggml.model: {family!r} is not supported; supported: {', '.join(_TEXT_MODELS)}")
        self._tokens = read.strings("tokenizer.ggml.tokens")
        self.vocab_size = len(self._tokens)
        if not self.vocab_size:
            raise ModelError("tokenizer.ggml.tokens: empty")
        self._types = self._read_types(read)
        self.special_ids = frozenset(np.flatnonzero((self._types == _CONTROL) | (self._types == _UNKNOWN)).tolist())
        last = self.vocab_size - 1
        self.bos_token_id = read.integer("tokenizer.ggml.bos_token_id", 0, last, default=None)
        self.eos_token_id = read.integer("tokenizer.ggml.eos_token_id", 0, last, default=None)
        self.add_bos = self.bos_token_id is not None and read.add_bos()
        self.add_eos = self.eos_token_id is not None and read.flag("tokenizer.ggml.add_eos_token", default=False)
        self._template_source = read.text("tokenizer.chat_template", default=None)
        self._build_byte_level(read)

    def _read_types(self, read: Metadata) -> np.ndarray:
        key = "tokenizer.ggml.token_type"
        types = read.numbers(key, default=None)
        if types is None:
            return np.full(self.vocab_size, _NORMAL, np.int8)
        if types.dtype.kind not in "iu" or len(types) != self.vocab_size:
            raise ModelError(f"{key}: {len(types)} values of {types.dtype}, must be {self.vocab_size} integers")
        if types.min() < 0 or types.max() > _BYTE:
            bad = int(types[(types < 0) | (types > _BYTE)][0])
            raise ModelError(f"{key}: {bad} is not in [0, {_BYTE}]")
        return types.astype(np.int8)

    # Building

    def _build_byte_level(self, read: Metadata) -> None:
        from tokenizers import models, normalizers

        from pagedkv.models.pretokenizers import pre_tokenizer

        pre = pre_tokenizer(read.text("tokenizer.ggml.pre", default="gpt-2"))
        vocab: dict[str, int] = {}
        for i, text in enumerate(self._tokens):
            vocab.setdefault(text, i)
        key = "tokenizer.ggml.merges"
        merges = []
        for i, merge in enumerate(read.strings(key)):
            pair = tuple(merge.split(" "))
            if len(pair) != 2 or pair[0] not in vocab or pair[1] not in vocab or pair[0] + pair[1] not in vocab:
                raise ModelError(f"{key}[{i}]: {merge!r} is not two tokens that join to a third")
            merges.append(pair)
        model = models.BPE(vocab=vocab, merges=merges, ignore_merges=pre.whole_words)
        self._assemble(model, vocab, pre.build(), [normalizers.NFC()] if pre.nfc else [])

    def _assemble(self, model, vocab: Mapping[str, int], pre_tokenizer, steps: list) -> None:
        """Two tokenizers over one shared model: `_plain` knows no control tokens, `_special` finds them in the text."""
        from tokenizers import AddedToken, Tokenizer, normalizers

        def added(kinds: Iterable[int], special: bool) -> list:
            ids = np.flatnonzero(np.isin(self._types, list(kinds))).tolist()
            texts = [self._tokens[i] for i in ids]
            return [AddedToken(t, special=special, normalized=False) for t in texts if t]

        def build(steps: list) -> "tokenizers.Tokenizer":
            tokenizer = Tokenizer(model)
            tokenizer.pre_tokenizer = pre_tokenizer
            if steps:
                tokenizer.normalizer = normalizers.Sequence(steps)
            tokenizer.add_tokens(added([_USER_DEFINED], special=False))
            return tokenizer

        self._plain = build(steps)
        self._special = build([normalizers.Replace(_BREAK, ""), *steps])
        control = [self._tokens[i] for i in np.flatnonzero(self._types == _CONTROL).tolist()]
        self._control_texts = frozenset(t for t in control if len(t) > 1)
        self._special.add_special_tokens([AddedToken(t, special=True, normalized=False) for t in self._control_texts])
        self._control_lengths = sorted({len(t) for t in self._control_texts})
        starts = {t[0] for t in self._control_texts}
        self._control_start = re.compile(f"[{re.escape(''.join(sorted(starts)))}]") if starts else None

    # Text to ids

    def encode(self, text: str, add_special_tokens: bool = True, allow_special: bool = False) -> list[int]:
        """Token ids of `text`.

        add_special_tokens   begin with BOS and end with EOS where the model wants them, each exactly once
        allow_special        read control tokens written out in the text as such; never do this with text of users

        Raises TypeError for what is not a str and ValueError for lone surrogates.
        """
        tokenizer = self._special if allow_special else self._plain
        if not isinstance(text, str):
            raise TypeError(f"text: must be a str, not {type(text).__name__}")
        if surrogate := _SURROGATE.search(text):
            raise ValueError(f"text: lone surrogate U+{ord(surrogate[0]):04X} at index {surrogate.start()}")
        ids = tokenizer.encode(text, add_special_tokens=False).ids
        if add_special_tokens:
            if self.add_bos and ids[:1] != [self.bos_token_id]:
                ids.insert(0, self.bos_token_id)
            if self.add_eos and ids[-1:] != [self.eos_token_id]:
                ids.append(self.eos_token_id)
        return ids

    def encode_chat(self, messages: list, add_generation_prompt: bool = True, **variables) -> list[int]:
        """Token ids of a conversation after the chat template. Arguments and errors as `apply_chat_template`.

        The template's control tokens are control tokens; the same characters inside a message stay plain text.
        """
        messages, variables = self._shield(messages), self._shield(variables)
        return self.encode(self.apply_chat_template(messages, add_generation_prompt, **variables), allow_special=True)

    def apply_chat_template(self, messages: list, add_generation_prompt: bool = True, **variables) -> str:
        """The text the chat template makes of `messages` (dicts with role and content).

        `variables` (tools, enable_thinking ...) are passed on to the template. Raises ChatTemplateError, a ValueError,
        when the model has no template, or the template is broken, refuses the messages or runs too long.
        """
        names = {"bos_token": self.bos_token_id, "eos_token": self.eos_token_id}
        texts = {name: "" if i is None else self._tokens[i] for name, i in names.items()}
        return self._template.render(messages, add_generation_prompt, **texts, **variables)

    @property
    def has_chat_template(self) -> bool:
        """Whether the file has a chat template; it may still turn out to be broken when used."""
        return self._template_source is not None

    @functools.cached_property
    def _template(self) -> "ChatTemplate":
        from pagedkv.models.chat_template import ChatTemplate, ChatTemplateError

        if self._template_source is None:
            raise ChatTemplateError("the model has no chat template")
        return ChatTemplate(self._template_source)

    def _shield(self, value: Any) -> Any:
        """A copy of nested messages in which no string contains a control token any more once `_BREAK` is seen."""
        if isinstance(value, str):
            return self._shield_text(value)
        if isinstance(value, Mapping):
            return {self._shield(key): self._shield(item) for key, item in value.items()}
        if isinstance(value, list | tuple):
            return [self._shield(item) for item in value]
        return value

    def _shield_text(self, text: str) -> str:
        if self._control_start is None:
            return text
        pieces, done = [], 0
        for match in self._control_start.finditer(text):
            start = match.start()
            if any(text[start : start + n] in self._control_texts for n in self._control_lengths):
                pieces += [text[done : start + 1], _BREAK]
                done = start + 1
        return "".join([*pieces, text[done:]])

    # Ids to text

    def decode(self, ids: Iterable[int], skip_special_tokens: bool = True) -> str:
        """Text of `ids`; bytes that are not UTF-8 become U+FFFD. Raises ValueError for a negative id."""
        return b"".join([self.token_bytes(i, skip_special_tokens) for i in ids]).decode("utf-8", "replace")

    def token_bytes(self, token_id: int, skip_special_tokens: bool = True) -> bytes:
        """The bytes a token adds to the text; b"" for a skipped special token and for ids the file has no token for."""
        if token_id < 0:
            raise ValueError(f"token id: {token_id} is negative")
        if token_id >= self.vocab_size or (skip_special_tokens and token_id in self.special_ids):
            return b""
        text = self._tokens[token_id]
        if self._types[token_id] != _NORMAL:
            return text.encode()
        try:
            return bytes([_BYTE_OF[c] for c in text])
        except KeyError:
            return text.encode()


def _byte_alphabet() -> dict[str, int]:
    """The byte-level alphabet of GPT-2: printable Latin-1 stands for itself, the other 68 bytes for U+0100 and on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(0x100 + i): byte for i, byte in enumerate(others)}


_BYTE_OF = _byte_alphabet()
