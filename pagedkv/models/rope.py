"""Rotary position embedding: the frequencies of each scaling method.

All powers and logarithms are taken in 40-digit decimal arithmetic and rounded once, because C libraries differ between
machines; what follows is float64 addition, multiplication and division.
"""

from __future__ import annotations

from dataclasses import dataclass
from decimal import Decimal, localcontext

import numpy as np

SCALINGS = ("none", "linear", "dynamic", "llama3", "yarn", "longrope", "factors")
_PI = 3.141592653589793


@dataclass(frozen=True, slots=True)
class Rope:
    """One way to rotate: `dim` values of a head, base `theta`, and how the frequencies are scaled.

    none, linear    unscaled; divided by `factor`
    dynamic         the base grows with the context in use beyond `original_context`
    llama3          what turns less than low_freq_factor times in `original_context` is divided by `factor`, what turns
                    more than high_freq_factor times is not, with a smooth change between
    yarn            YaRN (https://arxiv.org/abs/2309.00071): a ramp over the dimensions, from those that turn
                    beta_fast times to those that turn beta_slow times
    longrope        divided by `long` where the context in use exceeds `original_context`, else by `short`
    factors         divided by `long` always: a table a file brings along

    attention_factor scales cosines and sines; None: as the method's authors define it.
    """

    theta: float
    dim: int
    kind: str = "none"
    factor: float = 1.0
    original_context: int = 0
    attention_factor: float | None = None
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    short: tuple[float, ...] = ()
    long: tuple[float, ...] = ()

    def table(self, context: int) -> tuple[np.ndarray, float]:
        """(inverse frequencies float64 [dim / 2], factor of cosines and sines) for sequences of up to `context` tokens.

        The context counts for "dynamic" and "longrope" alone.
        """
        base = inverse_frequencies(self.theta, self.dim)
        plain = 1.0 if self.attention_factor is None else self.attention_factor
        if self.kind == "linear":
            return base / self.factor, plain
        if self.kind == "dynamic":
            return self._dynamic(max(context, self.original_context)), plain
        if self.kind == "llama3":
            return self._llama3(base), plain
        if self.kind == "yarn":
            return self._yarn(base), yarn_attention(self.factor) if self.attention_factor is None else plain
        if self.kind == "longrope":
            factors = np.array(self.long if context > self.original_context else self.short)
            return base / factors, self._longrope_attention() if self.attention_factor is None else plain
        if self.kind == "factors":
            return base / np.array(self.long), plain
        return base, plain

    def _dynamic(self, context: int) -> np.ndarray:
        with localcontext() as digits:
            digits.prec = 40
            stretch = Decimal(self.factor) * context / self.original_context - (Decimal(self.factor) - 1)
            theta = Decimal(self.theta) * (stretch.ln() * self.dim / (self.dim - 2)).exp()
        return inverse_frequencies(theta, self.dim)

    def _llama3(self, base: np.ndarray) -> np.ndarray:
        turns = self.original_context * base / (2 * _PI)  # of the original context
        smooth = (turns - self.low_freq_factor) / (self.high_freq_factor - self.low_freq_factor)
        smooth = np.clip(smooth, 0.0, 1.0)
        return (1 - smooth) * base / self.factor + smooth * base

    def _yarn(self, base: np.ndarray) -> np.ndarray:
        low, high = self._turning_dimension(self.beta_fast), self._turning_dimension(self.beta_slow)
        if self.truncate:
            low, high = np.floor(low), np.ceil(high)
        low, high = max(low, 0.0), min(high, self.dim - 1.0)
        high += 0.001 if low == high else 0.0
        ramp = np.clip((np.arange(self.dim // 2) - low) / (high - low), 0.0, 1.0)
        return base / self.factor * ramp + base * (1 - ramp)

    def _turning_dimension(self, turns: float) -> float:
        """The dimension, as a real number, that turns so many times over the original context."""
        with localcontext() as digits:
            digits.prec = 40
            wavelength = Decimal(self.original_context) / (Decimal(turns) * 2 * Decimal(_PI))
            return float(self.dim * wavelength.ln() / (2 * Decimal(self.theta).ln()))

    def _longrope_attention(self) -> float:
        if self.factor <= 1:
            return 1.0
        with localcontext() as digits:
            digits.prec = 40
            return float((1 + Decimal(self.factor).ln() / Decimal(self.original_context).ln()).sqrt())


def yarn_attention(factor: float, weight: float = 1.0) -> float:
    """Factor of cosines and sines that YaRN's authors give for a scaling by `factor`; `weight` of its logarithm."""
    if factor <= 1:
        return 1.0
    with localcontext() as digits:
        digits.prec = 40
        return float(Decimal("0.1") * Decimal(weight) * Decimal(factor).ln() + 1)


def inverse_frequencies(theta: float | Decimal, dim: int) -> np.ndarray:
    """theta ** (-2i / dim) for i in [0, dim/2), float64, correctly rounded, so the same on every machine."""
    with localcontext() as digits:
        digits.prec = 40
        log = Decimal(theta).ln()
        return np.array([float((-log * 2 * i / dim).exp()) for i in range(dim // 2)], np.float64)


def half_split_order(n_heads: int, head_dim: int, rope_dim: int) -> np.ndarray:
    """Row order that turns a head's adjacent rotation pairs (2i, 2i+1) into (i, i + rope_dim/2).

    int64 [n_heads * head_dim].
    """
    head = np.arange(head_dim)
    head[: rope_dim // 2] = np.arange(0, rope_dim, 2)
    head[rope_dim // 2 : rope_dim] = np.arange(1, rope_dim, 2)
    return (np.arange(n_heads)[:, None] * head_dim + head).ravel().astype(np.int64)
