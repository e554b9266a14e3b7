"""Vocabularies of Hugging Face's tokenizer.json, through the `tokenizers` library that defines the format."""

import itertools
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from pagedkv.models.bytelevel import bytes_of_alphabet
from pagedkv.models.errors import ModelError
from pagedkv.models.metadata import Metadata
from pagedkv.models.safetensors import read_json
from pagedkv.models.vocabulary import BYTE, CONTROL, NORMAL, UNKNOWN, USER_DEFINED, Vocabulary, library_errors

if TYPE_CHECKING:
    import tokenizers

_SPACE = "\u2581"
_BYTE_TOKEN = re.compile("<0x([0-9A-F]{2})>")
_MAX_TOKENS = 1 << 21


class TokenizerJson(Vocabulary):
    """The vocabulary of a directory with a tokenizer.json."""

    def __init__(self, directory: Path):
        from tokenizers import Tokenizer

        path = directory / "tokenizer.json"
        self._path, table = path, read_json(path)
        with library_errors(f"{path}: not a tokenizer of the tokenizers library"):
            self._whole = Tokenizer.from_str(json.dumps(table))
            ids: dict[str, int] = self._whole.get_vocab(with_added_tokens=True)
        texts = {i: text for text, i in ids.items()}
        if len(texts) < len(ids):
            text, i = next(item for item in ids.items() if texts[item[1]] != item[0])
            raise ModelError(f"{path}: id {i} has two tokens, {text!r} and {texts[i]!r}")
        n = max(texts, default=-1) + 1
        if not 0 < n <= _MAX_TOKENS:
            raise ModelError(f"{path}: {n} tokens, must be 1 to {_MAX_TOKENS}")
        self.read = Metadata({})
        self.tokens = [texts.get(i, "") for i in range(n)]
        self.types = np.full(n, NORMAL, np.int8)
        parts = [table.get(part) for part in ("pre_tokenizer", "decoder")]
        self._byte_level = any(_find(part, "ByteLevel") for part in parts)
        if _find(table.get("decoder"), "ByteFallback"):
            self.types[[i for i, text in texts.items() if _BYTE_TOKEN.fullmatch(text)]] = BYTE
        for i, token in self._whole.get_added_tokens_decoder().items():
            self.types[i] = CONTROL if token.special else USER_DEFINED
        unknown = (table.get("model") or {}).get("unk_token")
        if unknown in self.tokens:
            self.types[self.tokens.index(unknown)] = UNKNOWN
        self.pre_tokenizer = self._whole.pre_tokenizer
        strips = [part for part in _find(table.get("decoder"), "Strip") if part.get("start")]
        spaces = [part for part in _find(table.get("decoder"), "Metaspace") if part.get("prepend_scheme") != "never"]
        self.strips_first_space = bool(strips or spaces)

    def model(self) -> "tokenizers.models.BPE":
        return self._whole.model

    def normalizers(self) -> list:
        return [] if self._whole.normalizer is None else [self._whole.normalizer]

    def encoder(self) -> Callable[[str], list[int]]:
        encode = super().encoder()
        control = frozenset(np.flatnonzero(self.types == CONTROL).tolist())
        texts = sorted({self.tokens[i] for i in control} - {""}, key=len, reverse=True)
        written_out = re.compile("|".join(map(re.escape, texts)) if texts else "(?!)")

        def plain(text: str) -> list[int]:
            ids = encode(text)
            if control.isdisjoint(ids):
                return ids
            # models that know whole words may know control tokens as words: these are cut after their first character
            cuts = [0, *(match.start() + 1 for match in written_out.finditer(text)), len(text)]
            ids = [i for start, stop in itertools.pairwise(cuts) for i in encode(text[start:stop])]
            if not control.isdisjoint(ids):
                raise ModelError(f"{self._path}: its model makes control tokens of plain text")
            return ids

        return plain

    def added_tokens(self) -> list:
        found = self._whole.get_added_tokens_decoder()
        return [found[i] for i in np.flatnonzero(self.types == USER_DEFINED).tolist()]

    def bytes_of(self, token_id: int) -> bytes:
        text, kind = self.tokens[token_id], self.types[token_id]
        if kind == BYTE:
            return bytes([int(text[3:5], 16)])
        if kind != NORMAL:
            return text.encode()
        return bytes_of_alphabet(text) if self._byte_level else text.replace(_SPACE, " ").encode()

    def id_of(self, token: Any) -> int | None:
        """Id of a token of tokenizer_config.json: its text, a table with `content`, or nothing."""
        text = token.get("content") if isinstance(token, dict) else token
        return self.tokens.index(text) if isinstance(text, str) and text in self.tokens else None

    def ends(self) -> tuple[list[int], list[int]]:
        """Ids that the file's own post-processor puts before and after a text."""
        with library_errors(f"{self._path}: the tokenizers library cannot use it"):
            plain = self._whole.encode("a", add_special_tokens=False).ids
            full = self._whole.encode("a", add_special_tokens=True).ids
        for start in range(len(full) - len(plain) + 1):
            if full[start : start + len(plain)] == plain:
                return full[:start], full[start + len(plain) :]
        return [], []


def read_template(directory: Path, settings: dict[str, Any]) -> str | None:
    """The chat template: chat_template.jinja, else that of tokenizer_config.json, of several the one called default."""
    path = directory / "chat_template.jinja"
    try:
        if path.exists():
            return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ModelError(f"{path}: {error}") from None
    template = settings.get("chat_template")
    if isinstance(template, list):
        named = {entry.get("name"): entry.get("template") for entry in template if isinstance(entry, dict)}
        template = named.get("default")
    return template if isinstance(template, str) else None


def _find(part: Any, kind: str) -> list[dict]:
    """Steps of `kind` in a step or a sequence of them."""
    if not isinstance(part, dict):
        return []
    steps = [part] if part.get("type") == kind else []
    for key in ("pretokenizers", "decoders"):
        for step in part.get(key) or []:
            steps += _find(step, kind)
    return steps
