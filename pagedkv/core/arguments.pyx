"""Arguments as Python gives them: one rule for integers and one for numbers, everywhere in the core.

An integer is what has __index__ and is no bool: int, NumPy's integers and their arrays without dimensions. A number is also a float, NumPy's
or Python's. Strings, bytes and complex numbers are neither. What is refused is refused with BadInput by name, value and bound.
"""

import math
import numbers

from cpython.number cimport PyNumber_Index
from libc.math cimport isfinite
from libc.stdint cimport int64_t

from pagedkv.core.errors import BadInput

# Soft caps for which cap * tanh(x / cap) in float32 keeps its accuracy (docs/numerics.md); also 0, for none.
MIN_SOFTCAP = 2.0**-10
MAX_SOFTCAP = 1000.0


cdef str shown(value):
    """repr(value), short and never failing: an int of thousands of digits has none."""
    try:
        text = repr(value)
    except Exception:
        text = f"<{type(value).__name__}>"
    return text if len(text) <= 60 else text[:57] + "..."


cdef object integer(str name, value):
    """value as an int; BadInput for what is no integer."""
    if type(value) is int:
        return value
    if not isinstance(value, bool):
        try:
            return PyNumber_Index(value)
        except TypeError:
            pass
    raise BadInput(f"{name}: {shown(value)} is not an integer")


cdef int64_t bounded(str name, value, int64_t low, int64_t high) except? -1:
    """value as int64 when it is an integer in [low, high]; else BadInput."""
    value = integer(name, value)
    if not low <= value <= high:
        raise BadInput(f"{name}: {shown(value)} is outside [{low}, {high}]")
    return value


def check_integer(name: str, value, low: int, high: int) -> int:
    """value as an int when it is an integer in [low, high], 64-bit bounds; else BadInput."""
    return bounded(name, value, low, high)


def check_real(name: str, value) -> float:
    """value as a float when it is a number in the range of float; NaN and infinity are numbers here. Else BadInput."""
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        raise BadInput(f"{name}: {shown(value)} is not a number")
    try:
        return float(value)
    except OverflowError:
        return math.inf if value > 0 else -math.inf


def check_scale(name: str, value) -> float:
    """A factor of float32 scores: 0, or normal in float32. Else BadInput."""
    number = check_real(name, value)
    cdef float rounded = number
    if not isfinite(rounded) or 0 < abs(number) < 2.0**-126:
        raise BadInput(f"{name}: {shown(value)} is not 0 and has no magnitude in [2**-126, 2**128)")
    return number


def check_softcap(name: str, value) -> float:
    """A soft cap: 0 for none, or in [2**-10, 1000]. Else BadInput."""
    number = check_real(name, value)
    if number != 0 and not MIN_SOFTCAP <= number <= MAX_SOFTCAP:
        raise BadInput(f"{name}: {shown(value)} is not 0 and is outside [2**-10, {MAX_SOFTCAP:g}]")
    return number
