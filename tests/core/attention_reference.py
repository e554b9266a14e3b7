"""Causal attention in float64 from plain arrays, and a bound on what float32 arithmetic may lose."""

import numpy as np


def attend(q, k, v, *, scale=None, window=None, softcap=None):
    """q [n, n_heads, dim] are the last n tokens of k, v [t, n_kv_heads, dim]; returns (output like q, bound).

    Bound: with u = 2^-24, a score of d fused steps is off by e = (d + 4) u times the sum of its magnitudes; a weight by
    the factor e^(2e) and a few u for exp; sums over t tokens by t u more, twice; all times the largest |v|.
    """
    q, k, v = (np.asarray(x, np.float64) for x in (q, k, v))
    (n, n_heads, dim), t = q.shape, len(k)
    group = n_heads // k.shape[1]
    scale = dim**-0.5 if scale is None else scale
    k, v = k.repeat(group, axis=1), v.repeat(group, axis=1)
    scores = np.einsum("nhd,thd->hnt", q, k) * scale
    magnitude = np.einsum("nhd,thd->hnt", abs(q), abs(k)).max(initial=0) * abs(scale)
    if softcap is not None:
        scores = softcap * np.tanh(scores / softcap)
        magnitude += 8 * softcap
    positions, tokens = np.arange(t - n, t)[:, None], np.arange(t)[None, :]
    seen = tokens <= positions
    if window is not None:
        seen &= tokens > positions - window
    scores = np.where(seen, scores, -np.inf)
    weights = np.exp(scores - scores.max(axis=2, keepdims=True))
    out = np.einsum("hnt,thd->nhd", weights / weights.sum(axis=2, keepdims=True), v)
    u = 2.0**-24
    return out, (2 * (dim + 4) * u * magnitude + 2 * (t + 40) * u) * abs(v).max()
