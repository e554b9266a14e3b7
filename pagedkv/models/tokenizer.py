"""Text to token ids and back, built from GGUF metadata or tokenizer.json on the `tokenizers` library."""

import functools
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from pagedkv.models.bytelevel import ByteLevel
from pagedkv.models.errors import ModelError
from pagedkv.models.metadata import Metadata
from pagedkv.models.safetensors import read_optional_json
from pagedkv.models.sentencepiece import SentencePiece
from pagedkv.models.tokenizer_json import SPECIAL_TOKENS, TokenizerJson, content, read_template
from pagedkv.models.vocabulary import BYTE, CONTROL, NORMAL, START, UNKNOWN, Vocabulary

if TYPE_CHECKING:
    from pagedkv.models.chat_template import ChatTemplate

# A code point that Unicode sets aside for internal use. Between the characters of a control token it keeps that text
# from being read as the token; it is taken out once control tokens have been found.
_BREAK = "\ufdd0"
_MAX_ROUNDS = 16
_SURROGATE = re.compile("[\ud800-\udfff]")
_FAMILIES: dict[str, type[Vocabulary]] = {"gpt2": ByteLevel, "llama": SentencePiece}


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
        if family not in _FAMILIES:
            raise ModelError(f"tokenizer.ggml.model: {family!r} is not supported; supported: {', '.join(_FAMILIES)}")
        vocab_size = len(read.strings("tokenizer.ggml.tokens"))
        if not vocab_size:
            raise ModelError("tokenizer.ggml.tokens: empty")
        self.bos_token_id = read.integer("tokenizer.ggml.bos_token_id", 0, vocab_size - 1, default=None)
        self.eos_token_id = read.integer("tokenizer.ggml.eos_token_id", 0, vocab_size - 1, default=None)
        self.add_bos = self.bos_token_id is not None and read.add_bos()
        self.add_eos = self.eos_token_id is not None and read.flag("tokenizer.ggml.add_eos_token", default=False)
        self._template_source = read.text("tokenizer.chat_template", default=None)
        self._template_error: ModelError | None = None
        self._special_texts: dict[str, str] = {}
        for name, kind in (("unk", "unknown"), ("pad", "padding"), ("sep", "seperator"), ("mask", "mask")):
            i = read.integer(f"tokenizer.ggml.{kind}_token_id", 0, vocab_size - 1, default=None)
            if i is not None:
                self._special_texts[f"{name}_token"] = read.strings("tokenizer.ggml.tokens")[i]
        self._build(_FAMILIES[family](read, _read_types(read, vocab_size)))

    @classmethod
    def from_directory(cls, directory: Path) -> "Tokenizer":
        """The tokenizer of a Hugging Face directory: tokenizer.json, tokenizer_config.json and chat_template.jinja.

        Raises ModelError naming file and value.
        """
        self = cls.__new__(cls)
        settings = read_optional_json(directory / "tokenizer_config.json")
        vocabulary = TokenizerJson(directory, settings)
        self.bos_token_id, self.eos_token_id = (vocabulary.id_of(settings.get(f"{x}_token")) for x in ("bos", "eos"))
        before, after = vocabulary.ends()
        self.add_bos, self.add_eos = bool(before), bool(after)
        if before not in ([], [self.bos_token_id]) or after not in ([], [self.eos_token_id]):
            raise ModelError(
                f"{directory / 'tokenizer.json'}: its post_processor puts {before} before and {after} after a text; "
                f"only bos_token and eos_token are supported"
            )
        template = read_template(directory, settings)
        self._template_error = template if isinstance(template, ModelError) else None
        self._template_source = None if isinstance(template, ModelError) else template
        named = {name: content(settings.get(name)) for name in SPECIAL_TOKENS}
        self._special_texts = {name: text for name, text in named.items() if text is not None}
        self._build(vocabulary)
        return self

    def _build(self, vocabulary: Vocabulary) -> None:
        self._vocabulary = vocabulary
        self._bytes_of = functools.lru_cache(1 << 13)(vocabulary.bytes_of)
        self._n_rows: int | None = None
        self.vocab_size = len(vocabulary.tokens)
        special = (vocabulary.types == CONTROL) | (vocabulary.types == UNKNOWN)
        self.special_ids = frozenset(np.flatnonzero(special).tolist())
        self._encoders = vocabulary.encoders()
        self._find_control = vocabulary.finder()
        self._encode_whole = vocabulary.whole_encoder()

    # Text to ids

    def encode(self, text: str, add_special_tokens: bool = True, allow_special: bool = False) -> list[int]:
        """Token ids of `text`.

        add_special_tokens   begin with BOS and end with EOS where the model wants them, each exactly once
        allow_special        read control tokens written out in the text as such; never do this with text of users

        Raises TypeError for what is not a str and ValueError for lone surrogates.
        """
        if not isinstance(text, str):
            raise TypeError(f"text: must be a str, not {type(text).__name__}")
        _refuse_surrogates("text", text)
        if not allow_special:
            ids = self._encoders[START](text)
        else:
            ids = self._encode_stretches(text) if self._encode_whole is None else self._encode_whole(text)
        return self._with_ends(ids, add_special_tokens)

    def encode_chat(self, messages: list, add_generation_prompt: bool = True, **variables) -> list[int]:
        """Token ids of a conversation after the chat template. Arguments and errors as `apply_chat_template`.

        The template's control tokens are control tokens; the same characters inside a message stay plain text.
        """
        messages, variables = self._shield(messages), self._shield(variables)
        text = self.apply_chat_template(messages, add_generation_prompt, **variables)
        _refuse_surrogates("messages", text)
        return self._with_ends(self._encode_shielded(text))

    def _encode_shielded(self, text: str) -> list[int]:
        """Ids of a text in which control tokens that are none have `_BREAK` in them."""
        if self._encode_whole is not None and _BREAK not in text:
            ids = self._encode_whole(text)
            # all of them are the template's, unless the model makes some of other text
            if sum(i in self.special_ids for i in ids) == len(self._find_control(text)):
                return ids
        return self._encode_stretches(text)

    def _encode_stretches(self, text: str) -> list[int]:
        """Ids of text with control tokens in it; `_BREAK` is taken out of what lies between them."""
        ids: list[int] = []
        done, place = 0, START
        for control in self._find_control(text):
            ids += self._encoders[place](text[done : control.start].replace(_BREAK, ""))
            ids.append(control.token)
            done, place = control.stop, control.next_place
        return ids + self._encoders[place](text[done:].replace(_BREAK, ""))

    def check_rows(self, n_rows: int) -> None:
        """Say how many rows the embedding has; ModelError where tokens that begin or end a text have none.

        A file may have more tokens than that, for other inputs than text: a text that holds one is a ValueError.
        """
        for name, i, used in (("bos", self.bos_token_id, self.add_bos), ("eos", self.eos_token_id, self.add_eos)):
            if used and i is not None and i >= n_rows:
                raise ModelError(f"tokenizer.json: {name}_token is id {i}, the model has {n_rows} tokens")
        self._n_rows = n_rows if n_rows < self.vocab_size else None

    def _with_ends(self, ids: list[int], add_special_tokens: bool = True) -> list[int]:
        if self._n_rows is not None and max(ids, default=0) >= self._n_rows:
            i = next(i for i in ids if i >= self._n_rows)
            raise ValueError(
                f"text: holds {self._vocabulary.tokens[i]!r}, token {i}, which the model of {self._n_rows} tokens lacks"
            )
        if not add_special_tokens:
            return ids
        if self.add_bos and ids[:1] != [self.bos_token_id]:
            ids.insert(0, self.bos_token_id)
        if self.add_eos and ids[-1:] != [self.eos_token_id]:
            ids.append(self.eos_token_id)
        return ids

    def apply_chat_template(self, messages: list, add_generation_prompt: bool = True, **variables) -> str:
        """The text the chat template makes of `messages` (dicts with role and content).

        `variables` (tools, enable_thinking ...) are passed on to the template, as are the texts of the model's special
        tokens (bos_token, unk_token ...). Raises ChatTemplateError, a ValueError,
        when the model has no template, or the template is broken, refuses the messages or runs too long.
        """
        names = {"bos_token": self.bos_token_id, "eos_token": self.eos_token_id}
        texts = {name: "" if i is None else self._vocabulary.tokens[i] for name, i in names.items()}
        return self._template.render(messages, add_generation_prompt, **{**texts, **self._special_texts, **variables})

    @property
    def strips_first_space(self) -> bool:
        """Whether text begins with a space of the tokenizer's own, which `decode` takes off again."""
        return self._vocabulary.strips_first_space

    @property
    def has_chat_template(self) -> bool:
        """Whether the file has a chat template; it may still turn out to be broken when used."""
        return self._template_source is not None or self._template_error is not None

    @property
    def chat_template(self) -> str | None:
        """Source of the chat template, None without one."""
        return self._template_source

    @functools.cached_property
    def _template(self) -> "ChatTemplate":
        from pagedkv.models.chat_template import ChatTemplate, ChatTemplateError

        if self._template_error is not None:
            raise ChatTemplateError(str(self._template_error))
        if self._template_source is None:
            raise ChatTemplateError("the model has no chat template")
        return ChatTemplate(self._template_source)

    def _shield(self, value: Any) -> Any:
        """A copy of nested messages in which no string contains a control token any more."""
        if isinstance(value, str):
            return self._shield_text(value)
        if isinstance(value, Mapping):
            return {self._shield(key): self._shield(item) for key, item in value.items()}
        if isinstance(value, list | tuple):
            return [self._shield(item) for item in value]
        return value

    def _shield_text(self, text: str) -> str:
        text = text.replace(_BREAK, "")
        # breaking one token can show another that overlaps it
        for _ in range(_MAX_ROUNDS):
            found = self._find_control(text)
            if not found:
                return text
            pieces, done = [], 0
            for control in found:
                token = text[control.start : control.stop]
                # the space a token takes along stays as it is
                bare = token.strip() or token
                start = control.start + token.index(bare)
                pieces += [text[done:start], _BREAK.join(bare)]
                done = start + len(bare)
            text = "".join([*pieces, text[done:]])
        raise ValueError("messages: a control token in them cannot be kept apart from the template's")

    # Ids to text

    def decode(self, ids: Iterable[int], skip_special_tokens: bool = True) -> str:
        """Text of `ids`; bytes that are not UTF-8 become U+FFFD. Raises ValueError for a negative id."""
        raw = b"".join([self.token_bytes(i, skip_special_tokens) for i in ids])
        return (raw[1:] if self.strips_first_space and raw[:1] == b" " else raw).decode("utf-8", "replace")

    @functools.cached_property
    def max_token_chars(self) -> int:
        """Characters of the longest token, at least 1. The first call looks at all tokens."""
        return max(1, max(len(token) for token in self._vocabulary.tokens))

    def special_texts(self) -> dict[int, str]:
        """Text of each of `special_ids`, as the file writes it."""
        return {i: self._vocabulary.tokens[i] for i in self.special_ids}

    def token_bytes(self, token_id: int, skip_special_tokens: bool = True) -> bytes:
        """The bytes a token adds to the text; b"" for a skipped special token and for ids the file has no token for."""
        if token_id < 0:
            raise ValueError(f"token id: {token_id} is negative")
        if token_id >= self.vocab_size or (skip_special_tokens and token_id in self.special_ids):
            return b""
        return self._bytes_of(token_id)


def _refuse_surrogates(field: str, text: str) -> None:
    if surrogate := _SURROGATE.search(text):
        raise ValueError(f"{field}: lone surrogate U+{ord(surrogate[0]):04X} at index {surrogate.start()}")


def _read_types(read: Metadata, n: int) -> np.ndarray:
    key = "tokenizer.ggml.token_type"
    types = read.numbers(key, default=None)
    if types is None:
        return np.full(n, NORMAL, np.int8)
    if types.dtype.kind not in "iu" or len(types) != n:
        raise ModelError(f"{key}: {len(types)} values of {types.dtype}, must be {n} integers")
    if types.min() < 0 or types.max() > BYTE:
        bad = int(types[(types < 0) | (types > BYTE)][0])
        raise ModelError(f"{key}: {bad} is not in [0, {BYTE}]")
    return types.astype(np.int8)
