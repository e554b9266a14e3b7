"""Request bodies: JSON as RFC 8259 means it, and nothing that could surprise what comes later."""

import json
import math
from typing import Any

from .errors import APIError, bad_request, printable

MAX_DEPTH = 64
MAX_DIGITS = 40


def parse_json(raw: bytes) -> Any:
    """The value of a request body.

    Raises APIError 400 for what is not UTF-8 or not JSON, for NaN and Infinity, numbers too large or too near zero for
    a float, integers of more than MAX_DIGITS digits, duplicate keys, lone surrogates, NUL, and nesting deeper than
    MAX_DEPTH.
    """
    try:
        text = raw.decode("utf-8")
    except UnicodeDecodeError as error:
        raise bad_request(f"body: not UTF-8 at byte {error.start}") from None
    try:
        value = json.loads(
            text, parse_constant=_refuse_constant, parse_int=_int, parse_float=_float, object_pairs_hook=_object
        )
    except RecursionError:
        raise _too_deep() from None
    except json.JSONDecodeError as error:
        raise bad_request(f"body: not JSON: {error.msg} at line {error.lineno} column {error.colno}") from None
    if raw.count(b"[") + raw.count(b"{") > MAX_DEPTH or b"\\u" in raw:
        _walk(value)
    return value


def parse_object(raw: bytes) -> dict[str, Any]:
    """parse_json() of a body that must be an object."""
    value = parse_json(raw)
    if not isinstance(value, dict):
        raise bad_request("body: must be a JSON object")
    return value


def _refuse_constant(name: str) -> Any:
    raise bad_request(f"body: {name} is no JSON number")


def _int(digits: str) -> int:
    if len(digits) > MAX_DIGITS:
        raise bad_request(f"body: a number of {len(digits)} digits, at most {MAX_DIGITS} are allowed")
    return int(digits)


def _float(digits: str) -> float:
    value = float(digits)
    if math.isinf(value):
        raise bad_request(f"body: the number {digits[:MAX_DIGITS]} is too large")
    if value == 0 and any(digit in "123456789" for digit in digits.lower().partition("e")[0]):
        raise bad_request(f"body: the number {digits[:MAX_DIGITS]} is too near zero")
    return value


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        known: set[str] = set()
        twice = next(name for name, _ in pairs if name in known or known.add(name))  # type: ignore[func-returns-value]
        raise bad_request(f"body: the key {twice[:60]!r} comes twice in one object", param=printable(twice[:60]))
    return found


def _walk(value: Any) -> None:
    """Refuse deep nesting and strings that are no text, keys included."""
    stack = [(value, 1)]
    while stack:
        item, depth = stack.pop()
        if isinstance(item, str):
            _check_text(item)
        elif isinstance(item, dict | list):
            if depth > MAX_DEPTH:
                raise _too_deep()
            if isinstance(item, dict):
                stack += [(key, depth) for key in item]
                stack += [(entry, depth + 1) for entry in item.values()]
            else:
                stack += [(entry, depth + 1) for entry in item]


def _check_text(text: str) -> None:
    if "\0" in text:
        raise bad_request(f"body: a string holds NUL (U+0000) at index {text.index(chr(0))}")
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        found = ord(text[error.start])
        raise bad_request(f"body: a string holds the lone surrogate U+{found:04X} at index {error.start}") from None


def _too_deep() -> APIError:
    return bad_request(f"body: nested deeper than {MAX_DEPTH} levels")
