"""Vocabularies of Hugging Face's tokenizer.json, through the `tokenizers` library that defines the format."""

import itertools
import json
import os
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from pagedkv.models.bytelevel import bytes_of_alphabet
from pagedkv.models.errors import ModelError
from pagedkv.models.files import read_small
from pagedkv.models.metadata import Metadata
from pagedkv.models.safetensors import read_json
from pagedkv.models.vocabulary import (
    BYTE,
    CONTROL,
    INSIDE,
    LATER,
    NORMAL,
    UNKNOWN,
    USER_DEFINED,
    Control,
    Vocabulary,
    library_errors,
    without_stderr,
)

if TYPE_CHECKING:
    import tokenizers

_SPACE = "\u2581"
_BYTE_TOKEN = re.compile("<0x([0-9A-F]{2})>")
_MAX_TOKENS = 1 << 21
_MODELS = ("BPE", "Unigram")
_DECODERS = ("ByteLevel", "Metaspace", "Sequence", "Replace", "Fuse", "Strip", "ByteFallback")
# keys of tokenizer_config.json that name a token; templates get them under these names
SPECIAL_TOKENS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
_FLAGS = ("lstrip", "rstrip", "single_word", "normalized", "special")
_NO_TOKEN = "\ufdd0"  # stands for all text without control tokens


class TokenizerJson(Vocabulary):
    """The vocabulary of a directory with a tokenizer.json; `settings`: what its tokenizer_config.json says."""

    def __init__(self, directory: Path, settings: dict[str, Any]):
        from tokenizers import Tokenizer

        path = directory / "tokenizer.json"
        self._path, table = path, read_json(path)
        # cutting and filling to a fixed length are for training, and so is merging at random
        table |= {"truncation": None, "padding": None}
        if isinstance(model := table.get("model"), dict) and "dropout" in model:
            model["dropout"] = None
        with library_errors(f"{path}: not a tokenizer of the tokenizers library"):
            whole = without_stderr(lambda: Tokenizer.from_str(json.dumps(table)))
        self._table, self._whole = table, whole
        self._refuse()
        with library_errors(f"{path}: not a tokenizer of the tokenizers library"):
            without_stderr(lambda: self._add_tokens(settings))
            ids: dict[str, int] = whole.get_vocab(with_added_tokens=True)
            self._added = whole.get_added_tokens_decoder()
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
        for i, token in self._added.items():
            self.types[i] = CONTROL if token.special else USER_DEFINED
        unknown = (table.get("model") or {}).get("unk_token")
        if unknown in self.tokens:
            self.types[self.tokens.index(unknown)] = UNKNOWN
        unknown = (table.get("model") or {}).get("unk_id")
        if type(unknown) is int and 0 <= unknown < n:
            self.types[unknown] = UNKNOWN
        self.pre_tokenizer = self._whole.pre_tokenizer
        strips = [part for part in _find(table.get("decoder"), "Strip") if part.get("start")]
        spaces = [part for part in _find(table.get("decoder"), "Metaspace") if part.get("prepend_scheme") != "never"]
        self.strips_first_space = bool(strips or spaces)

    def _refuse(self) -> None:
        """ModelError for kinds whose ids would not become text the way the library writes it."""
        kind = type(self._whole.model).__name__
        if kind not in _MODELS:
            raise ModelError(f"{self._path}: model: {kind!r} is not supported; supported: {', '.join(_MODELS)}")
        for key in ("continuing_subword_prefix", "end_of_word_suffix"):
            if affix := getattr(self._whole.model, key, None):
                raise ModelError(f"{self._path}: model: {key} {affix!r} is not supported")
        for step in _steps(self._table.get("decoder")):
            if step.get("type") not in _DECODERS:
                raise ModelError(
                    f"{self._path}: decoder: {step.get('type')!r} is not supported; supported: {', '.join(_DECODERS)}"
                )

    def _add_tokens(self, settings: dict[str, Any]) -> None:
        """Mark the tokens tokenizer_config.json names, of those the file has, with the flags it gives them."""
        from tokenizers import AddedToken

        entries = settings.get("added_tokens_decoder")
        entries = entries if isinstance(entries, dict) else {}
        wanted = [entry for _, entry in sorted(entries.items(), key=lambda item: (len(item[0]), item[0]))]
        named = [settings.get(name) for name in SPECIAL_TOKENS]
        more = settings.get("additional_special_tokens")
        named += more if isinstance(more, list) else []
        special = {content(token) for token in named}
        known: set[str | None] = {token.content for token in self._whole.get_added_tokens_decoder().values()}
        known |= {content(entry) for entry in wanted}
        wanted += [token for token in named if content(token) not in known]
        for entry in wanted:
            text = content(entry)
            if text is None or self._whole.token_to_id(text) is None:
                continue
            flags = {key: entry[key] for key in _FLAGS if isinstance(entry, dict) and isinstance(entry.get(key), bool)}
            flags["special"] = flags.get("special", False) or text in special
            token = AddedToken(text, **{"normalized": not flags["special"], **flags})
            (self._whole.add_special_tokens if token.special else self._whole.add_tokens)([token])

    def model(self) -> "tokenizers.models.BPE":
        return self._whole.model

    def normalizers(self) -> list:
        return [] if self._whole.normalizer is None else [self._whole.normalizer]

    def encoders(self) -> tuple[Callable[[str], list[int]], ...]:
        def variant(place: int) -> Callable[[str], list[int]]:
            pre_tokenizer, steps = self._steps_at(place)
            return self.encoder(pre_tokenizer, steps)

        start = later = inside = self.encoder(self.pre_tokenizer, self.normalizers())
        if any(step.get("prepend_scheme") == "first" for step in _find(self._table.get("pre_tokenizer"), "Metaspace")):
            later = inside = variant(LATER)
        if _find(self._table.get("normalizer"), "Prepend"):
            inside = variant(INSIDE)
        return start, later, inside

    def _steps_at(self, place: int) -> tuple[Any, list]:
        """The pre-tokenizer and the normalizers as they act at `place`."""
        from tokenizers import Tokenizer

        table = json.loads(json.dumps({key: self._table.get(key) for key in ("pre_tokenizer", "normalizer")}))
        for step in _find(table["pre_tokenizer"], "Metaspace"):
            if step.get("prepend_scheme") == "first":
                step["prepend_scheme"] = "never"
        if place == INSIDE:
            for step in _find(table["normalizer"], "Prepend"):
                step["prepend"] = ""
        empty = {"type": "BPE", "vocab": {}, "merges": []}
        with library_errors(f"{self._path}: not a tokenizer of the tokenizers library"):
            library = Tokenizer.from_str(json.dumps({"version": "1.0", **table, "model": empty}))
        return library.pre_tokenizer, [] if library.normalizer is None else [library.normalizer]

    def finder(self) -> Callable[[str], list[Control]]:
        from tokenizers import Tokenizer, models

        # the library's own search, over a model that makes one token of all that lies between
        library = Tokenizer(models.WordLevel({_NO_TOKEN: 0}, _NO_TOKEN))
        tokens = {i: token for i, token in self._added.items() if token.content}
        if any(token.normalized for token in tokens.values()) and self._whole.normalizer is not None:
            library.normalizer = self._whole.normalizer
        control: dict[int | None, tuple[int, int]] = {}
        for i, token in tokens.items():
            (library.add_special_tokens if token.special else library.add_tokens)([token])
            # what is one character long cannot be kept apart from the same character in a message
            if token.special and len(token.content) > 1:
                control[library.token_to_id(token.content)] = (i, INSIDE if token.normalized else LATER)

        def find(text: str) -> list[Control]:
            with library_errors("tokenizer: the tokenizers library refuses this text"):
                found = library.encode(text, add_special_tokens=False)
            return [
                Control(start, stop, *control[i])
                for i, (start, stop) in zip(found.ids, found.offsets, strict=True)
                if i in control
            ]

        return find

    def whole_encoder(self) -> Callable[[str], list[int]]:
        def encode(text: str) -> list[int]:
            with library_errors("tokenizer: the tokenizers library refuses this text"):
                return self._whole.encode(text, add_special_tokens=False).ids

        return encode

    def encoder(
        self, pre_tokenizer: "tokenizers.pre_tokenizers.PreTokenizer | None", steps: list
    ) -> Callable[[str], list[int]]:
        encode = super().encoder(pre_tokenizer, steps)
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

    def added_tokens(self) -> "dict[int, tokenizers.AddedToken]":
        return {i: self._added[i] for i in np.flatnonzero(self.types == USER_DEFINED).tolist()}

    def bytes_of(self, token_id: int) -> bytes:
        # the library writes an added token as its normalizer makes it, and then as any other
        text = self.tokens[token_id]
        if token_id in self._added:
            text = self._whole.id_to_token(token_id) or text
        if self.types[token_id] == BYTE:
            return bytes([int(text[3:5], 16)])
        return bytes_of_alphabet(text) if self._byte_level else text.replace(_SPACE, " ").encode()

    def id_of(self, token: Any) -> int | None:
        """Id of a token of tokenizer_config.json: its text, a table with `content`, or nothing."""
        text = content(token)
        return self.tokens.index(text) if text is not None and text in self.tokens else None

    def ends(self) -> tuple[list[int], list[int]]:
        """Ids that the file's own post-processor puts before and after a text."""
        with library_errors(f"{self._path}: the tokenizers library cannot use it"):
            plain = self._whole.encode("a", add_special_tokens=False).ids
            full = self._whole.encode("a", add_special_tokens=True).ids
        for start in range(len(full) - len(plain) + 1):
            if full[start : start + len(plain)] == plain:
                return full[:start], full[start + len(plain) :]
        return [], []


def content(token: Any) -> str | None:
    """The text of a token of tokenizer_config.json: itself, or `content` of a table. None for anything else."""
    text = token.get("content") if isinstance(token, dict) else token
    return text if isinstance(text, str) else None


def read_template(directory: Path, settings: dict[str, Any]) -> "str | ModelError | None":
    """The chat template: chat_template.jinja, else that of tokenizer_config.json, of several the one called default.

    What is wrong with the file is returned: only a conversation needs it.
    """
    path = directory / "chat_template.jinja"
    try:
        if os.path.lexists(path):
            return read_small(path).decode("utf-8")
    except (ModelError, UnicodeDecodeError) as error:
        return error if isinstance(error, ModelError) else ModelError(f"{path}: not UTF-8: {error}")
    template = settings.get("chat_template")
    if isinstance(template, list):
        named = {entry.get("name"): entry.get("template") for entry in template if isinstance(entry, dict)}
        template = named.get("default")
    return template if isinstance(template, str) else None


def _find(part: Any, kind: str) -> list[dict]:
    """Steps of `kind` in a step or a sequence of them."""
    return [step for step in _steps(part) if step.get("type") == kind]


def _steps(part: Any) -> Iterator[dict]:
    """A step, and those within it."""
    if isinstance(part, dict):
        yield part
        for key in ("normalizers", "pretokenizers", "decoders"):
            for step in part.get(key) or []:
                yield from _steps(step)
