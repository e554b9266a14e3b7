"""Typed pages through the C table: any memory of the caller's, the bits of PagedKVCache, every bad argument refused."""

import ctypes
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import numpy as np
import pytest
from kv import same
from raw_api import RawApi

from pagedkv import PagedKVCache, Verdict
from pagedkv.core import _testing_threads as modes
from pagedkv.core._testing import let_pass
from pagedkv.core.kvcache import FORMATS, PAGE_TOKENS, tile_bytes

HEADS, KV_HEADS, DIM, LAYERS = 6, 2, 20, 3
BAD = -Verdict.BAD_INPUT


class Pages(ctypes.Structure):
    _fields_ = [
        ("storage", ctypes.c_void_p),
        *[(n, ctypes.c_int64) for n in ("page_stride", "n_layers", "n_kv_heads", "head_dim", "page_tokens", "format")],
    ]  # fmt: skip


class Attention(ctypes.Structure):
    _fields_ = [
        ("n_heads", ctypes.c_int64), ("window", ctypes.c_int64), ("scale", ctypes.c_float), ("softcap", ctypes.c_float)
    ]  # fmt: skip


@pytest.fixture(scope="module")
def api():
    return RawApi()


@pytest.fixture(scope="module")
def pools(api):
    """Pools of 1 and 3 threads."""
    made = [api.make(api.pool_new, n) for n in (1, 3)]
    assert [status for status, _ in made] == [0, 0]
    yield [pool for _, pool in made]
    assert [api.pool_destroy(pool) for _, pool in made] == [0, 0]


def address(x):
    return x.ctypes.data if isinstance(x, np.ndarray) else ctypes.addressof(x)


class Memory:
    """Pages in a NumPy array, in a scattered order, full of NaN."""

    def __init__(self, api, kv_format, page_tokens, n_pages=60):
        self.pages = Pages(None, 0, LAYERS, KV_HEADS, DIM, page_tokens, kv_format)
        self.page_bytes = api.kv_page_bytes(address(self.pages))
        self.stride = -(-self.page_bytes // 64) * 64 + 128
        self.block = np.full(n_pages * self.stride + 64, 0xFF, np.uint8)
        self.pages.storage = address(self.block) + -address(self.block) % 64
        self.pages.page_stride = self.stride
        self.table = np.random.default_rng(0).permutation(n_pages).astype(np.uint32)


def random_kv(n, seed=0):
    return np.random.default_rng(seed).standard_normal((2, n, KV_HEADS, DIM), dtype=np.float32)


def random_q(n, seed=1):
    return np.random.default_rng(seed).standard_normal((n, HEADS, DIM), dtype=np.float32)


def cache_with(kv_format, page_tokens, k, v):
    kv = PagedKVCache(LAYERS, KV_HEADS, DIM, n_pages=60, format=FORMATS[kv_format], page_tokens=page_tokens, threads=2)
    seq = kv.sequence()
    seq.extend(len(k))
    seq.write_kv(1, 0, k, v)
    return kv, seq


@pytest.mark.parametrize("page_tokens", PAGE_TOKENS)
@pytest.mark.parametrize("kv_format", range(3))
def test_attention_over_own_memory_has_the_bits_of_the_cache(api, pools, kv_format, page_tokens):
    memory = Memory(api, kv_format, page_tokens)
    assert memory.page_bytes == LAYERS * KV_HEADS * tile_bytes(FORMATS[kv_format], DIM, page_tokens)
    k, v = random_kv(700)
    for start in range(0, 700, 37):
        part = [np.ascontiguousarray(x[start : start + 37]) for x in (k, v)]
        status = api.kv_write(
            address(memory.pages), address(memory.table), 1, start, len(part[0]), address(part[0]), address(part[1])
        )
        assert status == 0
    kv, seq = cache_with(kv_format, page_tokens, k, v)
    for n, window, softcap in ((1, 0, 0.0), (700, 0, 0.0), (40, 100, 5.0), (1, 300, 0.0), (0, 0, 0.0)):
        q, out = random_q(n), np.zeros((n, HEADS, DIM), np.float32)
        how = Attention(HEADS, window, 0.25, softcap)
        assert (
            api.kv_attend(
                address(memory.pages), address(memory.table), 1, 700, n, address(how), address(q), address(out)
            )
            == 0
        )
        expected = kv.attend(1, q, [seq], [n], scale=0.25, window=window or None, softcap=softcap or None)
        assert same(out, expected)
        for pool in pools:
            out[:] = 7
            assert (
                api.kv_attend_on(
                    pool,
                    address(memory.pages),
                    address(memory.table),
                    1,
                    700,
                    n,
                    address(how),
                    address(q),
                    address(out),
                )
                == 0
            )
            assert same(out, expected)


@pytest.mark.parametrize("page_tokens", [16, 256])
@pytest.mark.parametrize("kv_format", range(3))
def test_gather_returns_what_a_cache_returns(api, kv_format, page_tokens):
    memory = Memory(api, kv_format, page_tokens)
    k, v = random_kv(700)
    where = address(memory.pages), address(memory.table), 1
    assert api.kv_write(*where, 0, 700, address(k), address(v)) == 0
    kv = PagedKVCache(LAYERS, KV_HEADS, DIM, n_pages=64, format=FORMATS[kv_format], page_tokens=page_tokens, threads=1)
    seq = kv.sequence()
    seq.extend(700)
    seq.write_kv(1, 0, k, v)
    expected = seq.gather(1)
    for start, n in ((0, 700), (0, 1), (3, 2), (15, 2), (5, 16), (100, 333), (255, 258), (699, 1), (700, 0), (0, 0)):
        got = [np.full((n + 2, KV_HEADS, DIM), 7, np.float32) for _ in range(2)]
        inside = [address(x) + 4 * KV_HEADS * DIM for x in got]
        assert api.kv_gather(*where, start, n, *inside) == 0
        for found, wanted in zip(got, expected, strict=True):
            assert same(found[1:-1], wanted[start : start + n]) and (found[[0, -1]] == 7).all()


def test_nothing_but_the_tokens_is_written(api):
    """Other slots, other layers and the space behind pages keep their bytes."""
    memory = Memory(api, 1, 16)
    k, v = random_kv(16)
    before = memory.block.copy()
    assert api.kv_write(address(memory.pages), address(memory.table), 1, 16, 0, address(k), address(v)) == 0
    assert same(memory.block, before)
    assert api.kv_write(address(memory.pages), address(memory.table), 1, 16, 16, address(k), address(v)) == 0
    changed = np.flatnonzero(memory.block != before) + address(memory.block)
    page = memory.pages.storage + int(memory.table[1]) * memory.stride
    tiles = KV_HEADS * tile_bytes("f16", DIM, 16)
    assert page + tiles <= changed.min() and changed.max() < page + 2 * tiles


def test_the_callers_float_mode_is_kept_and_does_not_matter(api):
    k, v = random_kv(300)
    q, how = random_q(3), Attention(HEADS, 0, 0.25, 0.0)

    def run(bits):
        memory, out = Memory(api, 2, 16), np.zeros((3, HEADS, DIM), np.float32)
        before = modes.float_mode()
        modes.set_float_mode(before ^ bits)
        try:
            api.kv_write(address(memory.pages), address(memory.table), 0, 0, 300, address(k), address(v))
            attend = address(memory.pages), address(memory.table), 0, 300, 3, address(how), address(q), address(out)
            api.kv_attend(*attend)
            after = modes.float_mode()
        finally:
            modes.set_float_mode(before)
        assert after == before ^ bits
        return out.tobytes()

    assert run(0) == run(modes.flush) == run(modes.toward_zero)


SHAPES = [
    ("n_layers", 0), ("n_layers", 1 << 16), ("n_kv_heads", 0), ("n_kv_heads", -1), ("head_dim", 0),
    ("head_dim", 1 << 13), ("page_tokens", 0), ("page_tokens", 8), ("page_tokens", 24), ("page_tokens", 512),
    ("format", -1), ("format", 3),
]  # fmt: skip
PLACES = [("storage", None), ("storage", 1), ("page_stride", 64), ("page_stride", 1 << 20 | 8), ("page_stride", -64)]
HOWS = [
    ("n_heads", 0), ("n_heads", 5), ("n_heads", -2), ("n_heads", 1 << 16), ("window", -1), ("scale", float("nan")),
    ("scale", float("inf")), ("softcap", -1.0), ("softcap", float("nan")), ("softcap", float("inf")),
    ("scale", 1e-39), ("scale", -1e-45), ("softcap", 1e-4), ("softcap", 1000.5), ("softcap", 1e8), ("softcap", 1e-45),
]  # fmt: skip


def calls(api, memory, how=None, layer=1, start=0, n=20, n_tokens=20):
    """Status of a write of n tokens and of attention of n queries, which is the same without and with threads."""
    k, v = random_kv(20)
    q, out = random_q(20), np.zeros((20, HEADS, DIM), np.float32)
    how = Attention(HEADS, 0, 1.0, 0.0) if how is None else how
    pages, table = address(memory.pages), address(memory.table)
    attend = pages, table, layer, n_tokens, n, address(how), address(q), address(out)
    status, pool = api.make(api.pool_new, 2)
    assert status == 0
    alone, shared = api.kv_attend(*attend), api.kv_attend_on(pool, *attend)
    assert (alone, api.pool_destroy(pool)) == (shared, 0)
    stored = api.kv_write(pages, table, layer, start, n, address(k), address(v))
    assert api.kv_gather(pages, table, layer, start, n, address(k), address(v)) == stored
    return stored, alone


@pytest.mark.parametrize(("field", "value"), SHAPES + PLACES)
def test_bad_pages(api, field, value):
    memory = Memory(api, 0, 16)
    assert calls(api, memory) == (0, 0)
    before = memory.block.copy()
    setattr(memory.pages, field, memory.pages.storage + 8 if value == 1 and field == "storage" else value)
    assert calls(api, memory) == (BAD, BAD)
    expected = BAD if (field, value) in SHAPES else memory.page_bytes
    assert api.kv_page_bytes(address(memory.pages)) == expected
    assert same(memory.block, before)


@pytest.mark.parametrize(("field", "value"), HOWS)
def test_bad_attention(api, field, value):
    how = Attention(HEADS, 0, 1.0, 0.0)
    setattr(how, field, value)
    assert calls(api, Memory(api, 0, 16), how) == (0, BAD)


def test_bad_ranges_and_null(api, pools):
    memory = Memory(api, 0, 16)
    for layer in (-1, LAYERS):
        assert calls(api, memory, layer=layer) == (BAD, BAD)
    assert calls(api, memory, n=-1) == (BAD, BAD)
    assert calls(api, memory, start=-1)[0] == BAD
    assert calls(api, memory, n_tokens=19)[1] == BAD
    k, v = random_kv(1)
    q, how = random_q(1), Attention(HEADS, 0, 1.0, 0.0)
    pages, table = address(memory.pages), address(memory.table)
    write = [pages, table, 0, 0, 1, address(k), address(v)]
    attend = [pages, table, 0, 1, 1, address(how), address(q), address(q)]
    attend_on = [pools[1], *attend]
    every = [(api.kv_write, write), (api.kv_gather, write), (api.kv_attend, attend), (api.kv_attend_on, attend_on)]
    for function, arguments in every:
        for i, argument in enumerate(arguments):
            if argument > 1000:
                missing = -Verdict.TAMPER if argument == pools[1] else BAD
                assert function(*arguments[:i], None, *arguments[i + 1 :]) == missing
    assert api.kv_page_bytes(None) == BAD and api.pool_new(None, 1) == BAD
    assert api.kv_write(pages, None, 0, 0, 0, None, None) == 0
    last = 0x7FFFFFF0 * 16  # tokens of as many pages as there can be
    for start in (last, last + 1, (1 << 63) - 1):
        assert api.kv_write(pages, table, 0, start, 1, address(k), address(v)) == BAD
        assert api.kv_attend(pages, table, 0, start + 1 if start < 1 << 62 else start, 1, *attend[5:]) == BAD
    for n in (1 << 39, 1 << 62, (1 << 63) - 1, -1):  # whose arrays no memory can hold, and whose sizes overflow
        large = Pages(pages and memory.pages.storage, 1 << 40, 1, (1 << 16) - 1, (1 << 13) - 1, 256, 2)
        assert api.kv_write(address(large), table, 0, 0, n, address(k), address(v)) == BAD
        assert api.kv_gather(address(large), table, 0, 0, n, address(k), address(v)) == BAD
        wide = Attention((1 << 16) - 1, 0, 1.0, 0.0)
        assert api.kv_attend(address(large), table, 0, n, n, address(wide), address(q), address(q)) == BAD
    for n_threads in (0, -1, 1025, 1 << 40):
        assert api.make(api.pool_new, n_threads) == (BAD, 0)
    assert api.pool_destroy(None) == -Verdict.TAMPER


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("which", [0, 1])
def test_int8_refuses_inf_and_nan(api, which, bad):
    memory, kv = Memory(api, 2, 16), random_kv(20)
    before = memory.block.copy()
    kv[which, 19, 1, 7] = bad
    k, v = kv
    assert api.kv_write(address(memory.pages), address(memory.table), 0, 0, 20, address(k), address(v)) == BAD
    assert same(memory.block, before)


@pytest.mark.parametrize("n_threads", [0, 2])
def test_refused_memory(api, n_threads):
    memory = Memory(api, 0, 16, n_pages=40)
    k, v = random_kv(600)
    assert api.kv_write(address(memory.pages), address(memory.table), 0, 0, 600, address(k), address(v)) == 0
    q, how, n = random_q(1), Attention(HEADS, 0, 1.0, 0.0), 0
    out = np.zeros((1, HEADS, DIM), np.float32)
    pool = api.make(api.pool_new, n_threads)[1]
    attend = (lambda *args: api.kv_attend_on(pool, *args)) if pool else api.kv_attend
    while True:
        let_pass(n)
        try:
            status = attend(
                address(memory.pages), address(memory.table), 0, 600, 1, address(how), address(q), address(out)
            )
        finally:
            let_pass(-1)
        if status == 0:
            break
        assert status == -Verdict.POOL_EXHAUSTED
        assert not out.any()
        n += 1
    assert n == 4  # scratch, span, units, partial results
    if pool:
        assert api.pool_destroy(pool) == 0


def test_several_threads_on_one_pool(api, pools):
    """ctypes lets go of the GIL: calls on one pool take turns and each has its own result."""
    memory, (k, v) = Memory(api, 1, 16), random_kv(300)
    assert api.kv_write(address(memory.pages), address(memory.table), 0, 0, 300, address(k), address(v)) == 0
    how = Attention(HEADS, 0, 0.25, 0.0)

    def attend(function, seed):
        q, out = random_q(20, seed), np.zeros((20, HEADS, DIM), np.float32)
        arguments = address(memory.pages), address(memory.table), 0, 300, 20, address(how), address(q), address(out)
        assert function(*arguments) == 0
        return out.tobytes()

    expected = [attend(api.kv_attend, seed) for seed in range(40)]
    with ThreadPoolExecutor(4) as executor:
        found = list(executor.map(lambda seed: attend(partial(api.kv_attend_on, pools[1]), seed), range(40)))
    assert found == expected
