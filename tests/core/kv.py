"""Small caches, values for them, and what a format makes of values, by NumPy."""

import numpy as np

from pagedkv import PagedKVCache
from pagedkv.core._testing import page_address, poke


def make(n_pages=8, *, layers=2, heads=3, dim=20, **options):
    return PagedKVCache(layers, heads, dim, n_pages=n_pages, **{"format": "f32", "threads": 1, **options})


def values(n, kv, seed=0):
    """K and V for n tokens."""
    rng = np.random.default_rng(seed)
    return rng.standard_normal((2, n, kv.n_kv_heads, kv.head_dim), dtype=np.float32) * np.float32(3)


def fill(seq, n, seed=0):
    """Extend by n tokens and write all layers; (K, V) of layer l is values(..., seed + l)."""
    start = seq.extend(n)
    for layer in range(seq.arena.n_layers):
        seq.write_kv(layer, start, *values(n, seq.arena, seed + layer))
    return start


def stored(x, kv_format):
    """What a format makes of float32 values [..., head_dim], by NumPy."""
    if kv_format == "f32":
        return x
    if kv_format == "f16":
        return x.astype(np.float16).astype(np.float32)
    amax = abs(x).max(axis=-1, keepdims=True)
    with np.errstate(divide="ignore", invalid="ignore"):
        q = np.where(amax == 0, np.float32(0), np.rint(x * (np.float32(127) / amax)))
    return q * (amax * (np.float32(1) / np.float32(127))) + np.float32(0)  # an integer 0 has no sign


def same(a, b):
    return np.asarray(a).tobytes() == np.asarray(b).tobytes()


def poison(kv):
    """Every byte of every page 0xff: NaN in each float format and scale."""
    for i in range(kv.n_pages):
        poke(page_address(kv, i), b"\xff" * kv.page_bytes)


def contents(seq):
    return [x.tobytes() for layer in range(seq.arena.n_layers) for x in seq.gather(layer)]


def state(kv, *seqs):
    return [
        kv.n_free, kv.n_in_use, kv.stats()["num_copied"], [kv.refcount(i) for i in range(kv.n_pages)],
        [(len(seq), seq.page_table, contents(seq)) for seq in seqs],
    ]  # fmt: skip
