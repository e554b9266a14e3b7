"""Argument checks shared by everything a person can set: one clear ValueError naming field, value and range."""

import math
import numbers
import re
from typing import Any

INT32_MAX = 2**31 - 1


def shown(value: Any) -> str:
    """`repr(value)`, short and never failing (an int of thousands of digits has no repr)."""
    try:
        text = repr(value)
    except Exception:
        text = f"<{type(value).__name__}>"
    text = " ".join(text.split())
    return text if len(text) <= 60 else text[:57] + "..."


def explained(error: BaseException) -> str:
    """Type and text of an exception in one short printable line; never fails, whatever its class does."""
    try:
        text = str(error)
    except Exception:
        return type(error).__name__
    text = "".join(each if each.isprintable() else "\ufffd" for each in " ".join(text.split()))
    return f"{type(error).__name__}: {text if len(text) <= 300 else text[:297] + '...'}"


def refuse(field: str, value: Any, allowed: str) -> ValueError:
    """The error to raise for a value outside its range."""
    return ValueError(f"{field} must be {allowed}, not {shown(value)}")


def check_int(field: str, value: Any, low: int, high: int = INT32_MAX) -> int:
    """`value` as an int in [low, high]; bool and float are refused."""
    if isinstance(value, bool) or not isinstance(value, numbers.Integral) or not low <= int(value) <= high:
        raise refuse(field, value, f"an integer in [{low}, {high}]")
    return int(value)


def check_real(field: str, value: Any, low: float, high: float, *, open_low: bool = False) -> float:
    """`value` as a finite float in [low, high] (or (low, high]); bool, NaN and complex are refused."""
    allowed = f"a number in {'(' if open_low else '['}{low:g}, {high:g}]"
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        raise refuse(field, value, allowed)
    try:
        number = float(value)
    except OverflowError:
        raise refuse(field, value, allowed) from None
    if math.isnan(number) or not low <= number <= high or (open_low and number == low):
        raise refuse(field, value, allowed)
    return number


def is_text(value: Any) -> bool:
    """Whether it is a str that UTF-8 can hold: without lone surrogates."""
    return isinstance(value, str) and not any("\ud800" <= each <= "\udfff" for each in value)


def check_bool(field: str, value: Any) -> bool:
    """`value` if it is a bool."""
    if not isinstance(value, bool):
        raise refuse(field, value, "True or False")
    return value


def check_choice(field: str, value: Any, choices: tuple[str, ...]) -> str:
    """`value` if it is one of `choices`."""
    if not isinstance(value, str) or value not in choices:
        raise refuse(field, value, "one of " + ", ".join(repr(choice) for choice in choices))
    return value


_UNITS = {"": 1, "b": 1} | {
    prefix + suffix: base**power
    for power, prefix in enumerate("kmgt", 1)
    for suffix, base in (("", 1024), ("ib", 1024), ("b", 1000))
}


def parse_bytes(field: str, value: Any) -> int:
    """A memory size in bytes from an int or a text such as "512MiB", "1.5 GB" (1000s) or "2g" (1024s); at least 1."""
    allowed = 'bytes as a positive integer below 2**62, or a text such as "512MiB" or "2GB"'
    if isinstance(value, str):
        match = re.fullmatch(r"\s*(\d{1,18}(?:\.\d{1,9})?)\s*([a-zA-Z]*)\s*", value)
        if not match or match[2].lower() not in _UNITS:
            raise refuse(field, value, allowed)
        size = int(float(match[1]) * _UNITS[match[2].lower()]) if "." in match[1] else (
            int(match[1]) * _UNITS[match[2].lower()]
        )
    elif isinstance(value, bool) or not isinstance(value, numbers.Integral):
        raise refuse(field, value, allowed)
    else:
        size = int(value)
    if not 1 <= size < 2**62:
        raise refuse(field, value, allowed)
    return size
