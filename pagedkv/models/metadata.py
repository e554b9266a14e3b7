"""Typed, range-checked reading of GGUF metadata."""

from collections.abc import Mapping
from typing import Any

import numpy as np

from pagedkv.models.errors import ModelError
from pagedkv.models.gguf import StringArray

_BOS_PRE_TOKENIZERS = frozenset({"llama-bpe", "llama3", "llama-v3", "tekken"})
_REQUIRED: Any = object()


class Metadata:
    """Typed, range-checked access to GGUF metadata. Every method raises ModelError naming key, value and range."""

    def __init__(self, entries: Mapping[str, Any]):
        self.entries = entries

    def _get(self, key: str, default: Any) -> Any:
        if key in self.entries:
            return self.entries[key]
        if default is _REQUIRED:
            raise ModelError(f"{key}: missing")
        return default

    def _typed(self, key: str, default: Any, types: tuple[type, ...], wanted: str) -> Any:
        value = self._get(key, default)
        # bool is an int in Python and never one in a file
        if value is not default and (not isinstance(value, types) or (isinstance(value, bool) and bool not in types)):
            raise ModelError(f"{key}: {_shorten(value)} is not {wanted}")
        return value

    def integer(self, key: str, low: int, high: int, default: Any = _REQUIRED) -> Any:
        """Integer in [low, high]; `default`, unchecked, where the key is absent."""
        value = self._typed(key, default, (int,), f"an integer in [{low}, {high}]")
        if key in self.entries and not low <= value <= high:
            raise ModelError(f"{key}: {value} is not in [{low}, {high}]")
        return value

    def per_layer(self, key: str, low: int, high: int, default: Any = _REQUIRED) -> Any:
        """As `integer`, for values files may also give as one number per layer; these must all be equal."""
        value = self.entries.get(key)
        if not isinstance(value, np.ndarray):
            return self.integer(key, low, high, default)
        if value.dtype.kind not in "iu" or len(set(value.tolist())) != 1:
            raise ModelError(f"{key}: {_shorten(value)}: layers that differ are not supported")
        return Metadata({key: int(value[0])}).integer(key, low, high)

    def real(self, key: str, low: float, high: float, default: Any = _REQUIRED) -> Any:
        """Finite number in [low, high] as a float."""
        value = self._typed(key, default, (int, float), f"a number in [{low:g}, {high:g}]")
        if key in self.entries and not low <= value <= high:
            raise ModelError(f"{key}: {value:g} is not in [{low:g}, {high:g}]")
        return float(value) if value is not None else None

    def softcap(self, key: str, default: float) -> float:
        """Soft cap, 0 for none, in the range that float32 computes accurately (docs/numerics.md)."""
        from pagedkv.core.arguments import MAX_SOFTCAP, MIN_SOFTCAP  # the readers of files need nothing built

        value = self.real(key, 0.0, MAX_SOFTCAP, default=default)
        if 0 < value < MIN_SOFTCAP:
            raise ModelError(f"{key}: {value:g} is not 0 and is below {MIN_SOFTCAP:g}")
        return value

    def flag(self, key: str, default: Any = _REQUIRED) -> Any:
        """Boolean."""
        return self._typed(key, default, (bool,), "a boolean")

    def text(self, key: str, default: Any = _REQUIRED) -> Any:
        """String."""
        return self._typed(key, default, (str,), "a string")

    def strings(self, key: str, default: Any = _REQUIRED) -> Any:
        """Sequence of strings, decoded as it is read."""
        return self._typed(key, default, (StringArray,), "an array of strings")

    def numbers(self, key: str, default: Any = _REQUIRED) -> Any:
        """Numpy array of numbers."""
        return self._typed(key, default, (np.ndarray,), "an array of numbers")

    def absent(self, key: str) -> None:
        """ModelError when `key` is there and says more than nothing: zero, false or empty."""
        value = self.entries.get(key)
        if len(value) if isinstance(value, np.ndarray) else value:
            raise ModelError(f"{key}: {_shorten(value)} is not supported for this architecture")

    def add_bos(self) -> bool:
        """Whether text begins with a BOS token: the file's word, else the habit of its tokenizer family."""
        family = self.text("tokenizer.ggml.model", default="")
        pre = self.text("tokenizer.ggml.pre", default="")
        return self.flag("tokenizer.ggml.add_bos_token", default=family == "llama" or pre in _BOS_PRE_TOKENIZERS)


def _shorten(value: Any) -> str:
    text = repr(value) if not isinstance(value, np.ndarray) else f"an array of {len(value)} numbers"
    return text if len(text) <= 60 else f"{text[:57]}..."
