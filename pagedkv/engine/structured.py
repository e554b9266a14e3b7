"""Structured output: text that follows a JSON schema, a regular expression or a grammar, by the llguidance library.

A grammar is compiled where its request is made, on the caller's thread. What may come next is a function of the
output's tokens alone: each output has a matcher of its own, which nothing else advances.
"""

import json as json_library
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from .checks import check_bool, refuse, shown

FIELD = "structured_outputs"  # begins every message about one, also amid an output
KINDS = ("json", "regex", "choice", "grammar", "json_object")
MAX_TEXT = 1 << 17  # characters of a schema, an expression or a grammar: the worst take seconds to compile
WHITESPACE = r"[ \t\n\r]{1,20}"  # bounded, so that no model can go on in blanks for ever
EXTRA = "structured outputs need the llguidance library: pip install 'pagedkv[structured]'"


@dataclass(frozen=True)
class StructuredOutputsParams:
    """What form the output must have; exactly one of the first five. Immutable, checked when made.

    json: a JSON schema, as a mapping or a text. regex: a regular expression for the whole output, in the syntax of
    Rust's regex crate. choice: texts, one of which is the output. grammar: a grammar in Lark's or GBNF's syntax, from
    the rule `start` or `root`. json_object: any JSON object.
    disable_any_whitespace: no blanks between the parts of JSON. whitespace_pattern: an expression for what may stand
    there, None: up to 20 blanks, tabs and line ends.

    Raises ValueError naming field, value and range. What the library cannot follow is refused when a request is made.
    """

    json: str | Mapping[str, Any] | None = None
    regex: str | None = None
    choice: Sequence[str] | None = None
    grammar: str | None = None
    json_object: bool = False
    disable_any_whitespace: bool = False
    whitespace_pattern: str | None = None

    def __post_init__(self) -> None:
        put = object.__setattr__
        for field in ("json_object", "disable_any_whitespace"):
            check_bool(f"structured_outputs.{field}", getattr(self, field))
        given = [kind for kind in KINDS if getattr(self, kind) not in (None, False)]
        if len(given) != 1:
            raise refuse("structured_outputs", given, f"exactly one of {', '.join(KINDS)}")
        if self.json is not None:
            put(self, "json", _schema_text(self.json))
        for field in ("regex", "grammar", "whitespace_pattern"):
            if getattr(self, field) is not None:
                _check_text(field, getattr(self, field))
        is_json = self.kind in ("json", "json_object")
        if self.disable_any_whitespace and not is_json:
            raise refuse("structured_outputs.disable_any_whitespace", True, "False where the output is not JSON")
        if self.whitespace_pattern is not None and (self.disable_any_whitespace or not is_json):
            raise refuse("structured_outputs.whitespace_pattern", self.whitespace_pattern, "None where no blanks are")
        if self.choice is not None:
            put(self, "choice", _checked_choice(self.choice))

    @property
    def kind(self) -> str:
        """Which of the five it is."""
        return next(kind for kind in KINDS if getattr(self, kind) not in (None, False))


def _check_text(field: str, text: Any) -> None:
    allowed = f"a text of 1 to {MAX_TEXT} characters that UTF-8 can hold"
    if not isinstance(text, str) or not 1 <= len(text) <= MAX_TEXT:
        raise refuse(f"structured_outputs.{field}", text, allowed)
    try:
        text.encode()
    except UnicodeEncodeError:
        raise refuse(f"structured_outputs.{field}", text, allowed) from None


def _checked_choice(choice: Any) -> tuple[str, ...]:
    if isinstance(choice, (str, bytes, Mapping)) or not isinstance(choice, Sequence) or not choice:
        raise refuse("structured_outputs.choice", choice, "a list of at least one text")
    for text in choice:
        _check_text("choice", text)
    if sum(map(len, choice)) > MAX_TEXT:
        raise refuse("structured_outputs.choice", choice, f"texts of at most {MAX_TEXT} characters together")
    return tuple(choice)


def _schema_text(schema: Any) -> str:
    """The schema as JSON text, order kept."""
    allowed = "a JSON schema: an object, or JSON text of one"
    try:
        table = json_library.loads(schema) if isinstance(schema, str) else schema
        if not isinstance(table, Mapping):
            raise refuse("structured_outputs.json", schema, allowed)
        text = schema if isinstance(schema, str) else json_library.dumps(table, allow_nan=False)
    except (TypeError, ValueError, RecursionError) as error:
        if str(error).startswith("structured_outputs"):
            raise
        raise ValueError(f"structured_outputs.json must be {allowed}: {error}, not {shown(schema)}") from None
    _check_text("json", text)
    return text


class GrammarMask:
    """What may follow an output's tokens under one matcher; a LogitsMask that also knows when the text is complete.
    Not thread-safe: the engine asks for one thing at a time."""

    def __init__(self, matcher: Any, n_words: int) -> None:
        self._matcher = matcher
        self._n_words = n_words
        self._n_taken = 0
        self._first: np.ndarray | None = self._mask()

    def allowed(self, token_ids: Sequence[int]) -> np.ndarray:
        """The mask behind `token_ids`, which go on from those of the call before. RuntimeError if there is none."""
        if not token_ids and self._first is not None:
            return self._first
        self._take(token_ids)
        return self._mask()

    def complete(self, token_ids: Sequence[int]) -> bool:
        """Whether nothing can follow `token_ids`. RuntimeError for those that do not follow the grammar."""
        self._take(token_ids)
        return self._matcher.is_stopped()

    def _take(self, token_ids: Sequence[int]) -> None:
        if len(token_ids) > self._n_taken:
            self._first = None
            ok = self._matcher.consume_tokens(list(token_ids[self._n_taken :]))
            self._n_taken = len(token_ids)
            if not ok:
                raise RuntimeError(f"{FIELD}: {_one_line(self._matcher.get_error())}")

    def _mask(self) -> np.ndarray:
        mask = np.zeros(self._n_words, np.uint32)
        self._matcher.unsafe_compute_mask_ptr(mask.ctypes.data, mask.nbytes)
        if self._matcher.is_error():
            raise RuntimeError(f"{FIELD}: {_one_line(self._matcher.get_error())}")
        if not mask.any():
            raise RuntimeError(f"{FIELD}: no token of the model goes on")
        return mask


class Grammars:
    """Compiles what requests ask for into masks for one model's tokenizer. Thread-safe; takes its time, without a step
    waiting for it."""

    def __init__(self, model: Any) -> None:
        self._model = model
        self._lock = threading.Lock()
        self._tokenizer: Any = None

    def masks(self, params: StructuredOutputsParams, n: int) -> list[GrammarMask]:
        """A mask for each of n outputs; compiles once, without the GIL. Raises ValueError for what cannot be followed,
        and without the library."""
        library = _library()
        tokenizer = self.tokenizer()
        try:
            grammar = _grammar(library, params)
            limits = library.LLParserLimits(verbose_errors=False)
            matcher = library.LLMatcher(tokenizer, grammar, log_level=0, limits=limits)
            if matcher.is_error():
                raise ValueError(matcher.get_error())
            copies = [matcher.deep_copy() for _ in range(n - 1)]
            found = [GrammarMask(each, -(-tokenizer.vocab_size // 32)) for each in (matcher, *copies)]
        except (ValueError, RuntimeError) as error:
            why = _one_line(str(error))
            raise ValueError(f"structured_outputs.{params.kind} cannot be followed: {why}") from None
        return found

    def tokenizer(self) -> Any:
        """The tokenizer as the library wants it; made at the first call, which takes seconds and holds the GIL."""
        with self._lock:
            if self._tokenizer is None:
                self._tokenizer = _tokenizer(_library(), self._model)
            return self._tokenizer


def _library() -> Any:
    try:
        import llguidance
    except ImportError:
        raise ValueError(EXTRA) from None
    return llguidance


def _grammar(library: Any, params: StructuredOutputsParams) -> str:
    """The grammar in the library's own form."""
    if params.regex is not None:
        return library.LLMatcher.grammar_from_regex(params.regex)
    if params.choice is not None:
        return library.grammar_from("choice", json_library.dumps(params.choice))
    if params.grammar is not None:
        return library.grammar_from("grammar", params.grammar)
    blanks = {"whitespace_pattern": params.whitespace_pattern or WHITESPACE}
    options = {"whitespace_flexible": False} if params.disable_any_whitespace else blanks
    return library.LLMatcher.grammar_from_json_schema(params.json or '{"type": "object"}', overrides=options)


class _Vocabulary:
    """The model's tokenizer as llguidance reads it: the bytes of each token, and which of them are no text."""

    bos_token_id = None

    def __init__(self, model: Any) -> None:
        self._encode = model.tokenizer.encode
        self._bytes = model.tokenizer.token_bytes
        n = model.forward.vocab_size
        stop_ids = sorted(set(model.config.stop_token_ids))
        self.tokens = [self._bytes(token, False) for token in range(n)]
        self.special_token_ids = sorted({*model.tokenizer.special_ids, *stop_ids})
        self.stop_ids = stop_ids or [n]
        self.eos_token_id = self.stop_ids[0]
        if not stop_ids:  # the library wants an end; one behind the vocabulary is never drawn
            self.tokens.append(b"<end>")
            self.special_token_ids.append(n)
        self._ids: dict[bytes, int] = {}

    def __call__(self, text: str) -> list[int]:
        """Ids whose bytes are exactly those of `text`: the tokenizer's, unless it adds something of its own."""
        ids = self._encode(text, add_special_tokens=False)
        whole = text.encode()
        return ids if b"".join([self._bytes(token, False) for token in ids]) == whole else self._longest_first(whole)

    def _longest_first(self, rest: bytes) -> list[int]:
        if not self._ids:
            special = set(self.special_token_ids)
            self._ids = {text: i for i, text in enumerate(self.tokens) if text and i not in special}
        found = []
        while rest:
            n = next(n for n in range(len(rest), -1, -1) if not n or rest[:n] in self._ids)
            if not n:
                break
            found.append(self._ids[rest[:n]])
            rest = rest[n:]
        return found


def _tokenizer(library: Any, model: Any) -> Any:
    vocabulary = _Vocabulary(model)
    return library.LLTokenizer(library.TokenizerWrapper(vocabulary), eos_token=vocabulary.stop_ids)


def _one_line(text: str) -> str:
    if text.startswith("NoExtension"):
        return "no text does"
    line = " ".join(text.replace("<non-verbose/>", "").split())
    return line if len(line) <= 300 else line[:297] + "..."
