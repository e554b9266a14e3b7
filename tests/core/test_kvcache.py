"""Formats of PagedKVCache: what was written comes back as the format keeps it; bad input is refused by name."""

import math
import re
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from isas import assert_one_result, on_every_isa
from kv import contents, fill, make, poison, same, state, stored, values

from pagedkv import Arena, BadInput, PagedKVCache, PoolExhausted, SequenceFull, Tampered
from pagedkv.core.kvcache import FORMATS, PAGE_TOKENS, KVSequence, tile_bytes

# --- writing and reading back -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("page_tokens", PAGE_TOKENS)
@pytest.mark.parametrize("kv_format", FORMATS)
def test_gather_returns_what_was_written(kv_format, page_tokens):
    lengths = [1, 15, 16, 1, 67, 200]
    kv = make(-(-sum(lengths) // page_tokens), format=kv_format, page_tokens=page_tokens)
    poison(kv)
    seq = kv.sequence()
    for i, n in enumerate(lengths):
        assert fill(seq, n, 10 * i) == sum(lengths[:i])
    for layer in range(2):
        expected = np.concatenate([values(n, kv, 10 * i + layer) for i, n in enumerate(lengths)], axis=1)
        k, v = seq.gather(layer)
        assert k.dtype == v.dtype == np.float32
        assert same(k, stored(expected[0], kv_format))
        assert same(v, stored(expected[1], kv_format))
    assert kv.check() == []


@pytest.mark.parametrize("dim", [1, 2, 15, 16, 17, 64, 100, 256])
@pytest.mark.parametrize("kv_format", FORMATS)
def test_head_sizes(kv_format, dim):
    kv = make(3, format=kv_format, dim=dim)
    poison(kv)
    seq = kv.sequence()
    fill(seq, 35)
    k, v = seq.gather(1)
    expected = values(35, kv, 1)
    assert same(k, stored(expected[0], kv_format))
    assert same(v, stored(expected[1], kv_format))


def test_layers_heads_and_tokens_do_not_touch_each_other():
    kv = make(2, format="f16")
    seq = kv.sequence()
    seq.extend(20)
    for layer in range(2):
        seq.write_kv(layer, 0, *np.zeros((2, 20, 3, 20), np.float32))
    one = np.ones((1, 3, 20), np.float32)
    seq.write_kv(1, 17, one, 2 * one)
    for layer in range(2):
        k, v = seq.gather(layer)
        expected = np.zeros((20, 3, 20), np.float32)
        expected[17] = layer
        assert same(k, expected)
        assert same(v, 2 * expected)


def test_halves_round_to_nearest_even_like_numpy():
    rng = np.random.default_rng(1)
    x = np.concatenate([
        rng.standard_normal(1000).astype(np.float32) * np.float32(10) ** rng.integers(-9, 5, 1000).astype(np.float32),
        np.float32([0, -0.0, 65504, 65519.996, 65520, 1e38, np.inf, -np.inf, 2.0**-24, 2.0**-25, 2.9e-8, 3.1e-8]),
        (np.arange(2048, 2080) + 0.5).astype(np.float32),
    ])  # fmt: skip
    x = np.resize(x, (len(x) // 11, 1, 11))
    kv = make(8, layers=1, heads=1, dim=11, format="f16")
    seq = kv.sequence()
    seq.extend(len(x))
    seq.write_kv(0, 0, x, -x)
    k, v = seq.gather(0)
    with np.errstate(over="ignore"):
        assert same(k, x.astype(np.float16).astype(np.float32))
        assert same(v, (-x).astype(np.float16).astype(np.float32))


@pytest.mark.parametrize("kv_format", ["f32", "f16"])
def test_float_formats_keep_inf_and_nan(kv_format):
    kv = make(1, layers=1, heads=1, dim=4, format=kv_format)
    seq = kv.sequence()
    seq.extend(1)
    x = np.float32([[[np.nan, np.inf, -np.inf, 1]]])
    seq.write_kv(0, 0, x, x)
    for found in seq.gather(0):
        np.testing.assert_array_equal(found, x)


def test_inputs_are_converted_and_may_be_strided():
    kv = make(2)
    seq = kv.sequence()
    seq.extend(4)
    k, v = values(8, kv)
    seq.write_kv(0, 0, k[::2].astype(np.float64), np.asfortranarray(v[::2]))
    found = seq.gather(0)
    assert same(found[0], k[::2])
    assert same(found[1], v[::2])
    seq.write_kv(0, 4, k[:0], v[:0])
    seq.write_kv(0, 0, k[:4].tolist(), v[:4].tolist())
    assert same(seq.gather(0)[0], k[:4])


def test_an_empty_sequence():
    kv = make()
    seq = kv.sequence()
    assert len(seq) == 0
    assert [x.shape for x in seq.gather(1)] == [(0, 3, 20)] * 2
    assert seq.extend(0) == 0
    assert seq.page_table == []


@pytest.mark.parametrize("kv_format", FORMATS)
def test_pages_have_the_same_bytes_on_every_isa(kv_format):
    def pages():
        kv = make(3, format=kv_format, dim=37)
        poison(kv)
        seq = kv.sequence()
        fill(seq, 41)
        return b"".join(bytes(kv.page(i)) for i in seq.page_table) + b"".join(x.tobytes() for x in seq.gather(0))

    assert_one_result(on_every_isa(pages))


# --- int8 -------------------------------------------------------------------------------------------------------------


def test_int8_error_is_at_most_half_a_scale():
    """Besides the rounding to an integer: of 127/amax, of the product with it and of the scale, below 127 * 2^-22."""
    kv = make(40, layers=1, heads=2, dim=64, format="int8")
    seq = kv.sequence()
    rng = np.random.default_rng(0)
    x = rng.standard_normal((2, 500, 2, 64)) * 10.0 ** rng.integers(-20, 20, (2, 500, 2, 1))
    x = x.astype(np.float32)
    seq.extend(500)
    seq.write_kv(0, 0, x[0], x[1])
    for found, wanted in zip(seq.gather(0), x, strict=True):
        scale = abs(wanted).astype(np.float64).max(axis=2, keepdims=True) / 127
        assert (abs(found.astype(np.float64) - wanted) <= scale * (0.5 + 127 * 2.0**-22)).all()
        assert (abs(found).max(axis=2) == abs(wanted).max(axis=2)).mean() > 0.3  # the largest value is nearly kept


def test_int8_zero_rows_come_back_as_zeros():
    kv = make(1, format="int8")
    poison(kv)
    seq = kv.sequence()
    seq.extend(2)
    x = np.zeros((2, 3, 20), np.float32)
    x[1, 1, 3] = -5
    seq.write_kv(0, 0, x, -x)
    for found, wanted in zip(seq.gather(0), (x, -x), strict=True):
        np.testing.assert_array_equal(found, wanted)


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("which", ["k", "v"])
def test_int8_refuses_inf_and_nan_and_writes_nothing(which, bad):
    kv = make(4, format="int8")
    seq = kv.sequence()
    fill(seq, 40)
    twin = seq.snapshot()
    before = [seq.gather(layer) for layer in range(2)], kv.stats()
    k, v = values(20, kv, 9)
    (k if which == "k" else v)[7, 2, 19] = bad
    with pytest.raises(BadInput, match=rf"^{which}: token 17, head 2 holds inf or NaN$"):
        seq.write_kv(1, 10, k, v)
    assert same(before[0], [seq.gather(layer) for layer in range(2)])
    assert before[1] == kv.stats()
    assert seq.page_table == twin.page_table


def test_a_tile_is_as_big_as_its_layout_says():
    """Elements of K, of V padded to 16, int8's two scales a token; each part on a 64-byte boundary."""
    for dim in (1, 20, 64, 80, 128):
        for page_tokens in PAGE_TOKENS:
            for kv_format, size in (("f32", 4), ("f16", 2), ("int8", 1)):
                parts = [dim * page_tokens * size, -(-dim // 16) * 16 * page_tokens * size]
                parts += [8 * page_tokens] if kv_format == "int8" else []
                assert tile_bytes(kv_format, dim, page_tokens) == sum(-(-part // 64) * 64 for part in parts)


def test_memory_per_token_of_int8():
    """Against f16, of the whole page as it is kept."""

    def per_token(kv_format, dim, page_tokens):
        kv = make(1, layers=2, heads=3, dim=dim, format=kv_format, page_tokens=page_tokens)
        assert kv.page_bytes == 6 * tile_bytes(kv_format, dim, page_tokens)
        return kv.page_stride / page_tokens

    for page_tokens in PAGE_TOKENS:
        assert per_token("int8", 64, page_tokens) <= 0.5313 * per_token("f16", 64, page_tokens)
        assert per_token("int8", 128, page_tokens) < 0.5157 * per_token("f16", 128, page_tokens)
        assert per_token("f16", 64, page_tokens) == 6 * 64 * 2 * 2


# --- bad input --------------------------------------------------------------------------------------------------------

BAD_CACHES = [
    ({"n_layers": 0}, "n_layers: 0 is outside [1, 65535]"),
    ({"n_layers": 1.0}, "n_layers: 1.0 is not an integer"),
    ({"n_kv_heads": -2}, "n_kv_heads: -2 is outside [1, 65535]"),
    ({"n_kv_heads": True}, "n_kv_heads: True is not an integer"),
    ({"head_dim": 8192}, "head_dim: 8192 is outside [1, 8191]"),
    ({"format": "bf16"}, "format: 'bf16' is not one of f32, f16, int8"),
    ({"format": None}, "format: None is not one of f32, f16, int8"),
    ({"page_tokens": 8}, "page_tokens: 8 is not one of (16, 32, 64, 128, 256)"),
    ({"page_tokens": 24}, "page_tokens: 24 is not one of (16, 32, 64, 128, 256)"),
    ({"n_pages": 0}, "n_pages: 0 is outside [1, 2147483632]"),
    ({"threads": 0}, "threads: 0 is outside [1, 1024]"),
]


@pytest.mark.parametrize(("changes", "message"), BAD_CACHES)
def test_bad_caches(changes, message):
    good = {"n_layers": 1, "n_kv_heads": 1, "head_dim": 16, "n_pages": 1}
    with pytest.raises(ValueError) as error:
        PagedKVCache(**{**good, **changes})
    assert str(error.value) == message


def test_a_cache_is_initialised_once():
    kv = make(2)
    seq = kv.sequence()
    fill(seq, 20)
    expected = contents(seq)
    with pytest.raises(BadInput, match=r"^cache is initialised already$"):
        kv.__init__(7, 7, 7, n_pages=7)
    assert contents(seq) == expected


def zeros(n, heads=3, dim=20):
    return np.zeros((n, heads, dim), np.float32)


BAD_CALLS = [
    (lambda s: s.extend(-1), "extend: -1 is outside [0, 1099511627775]"),
    (lambda s: s.extend(1.5), "extend: 1.5 is not an integer"),
    (lambda s: s.extend(1 << 60), f"extend: {1 << 60} is outside [0, 1099511627775]"),
    (lambda s: s.truncate(21), "truncate: 21 is outside [0, 20]"),
    (lambda s: s.truncate(-1), "truncate: -1 is outside [0, 20]"),
    (lambda s: s.gather(2), "layer: 2 is outside [0, 1]"),
    (lambda s: s.write_kv(-1, 0, zeros(1), zeros(1)), "layer: -1 is outside [0, 1]"),
    (lambda s: s.write_kv(0, 20, zeros(1), zeros(1)), "start: 20 is outside [0, 19]"),
    (lambda s: s.write_kv(0, -1, zeros(1), zeros(1)), "start: -1 is outside [0, 19]"),
    (lambda s: s.write_kv(0, 0, zeros(21), zeros(21)), "k: 21 tokens, the sequence has 20"),
    (lambda s: s.write_kv(0, 0, zeros(2), zeros(1)), "v: 1 tokens, k has 2"),
    (lambda s: s.write_kv(0, 0, zeros(1, 2), zeros(1)), "k: shape (1, 2, 20) is not (n, 3, 20)"),
    (lambda s: s.write_kv(0, 0, zeros(1), zeros(1, dim=19)), "v: shape (1, 3, 19) is not (n, 3, 20)"),
    (lambda s: s.write_kv(0, 0, zeros(1)[0], zeros(1)), "k: shape (3, 20) is not (n, 3, 20)"),
]


@pytest.mark.parametrize(("call", "message"), BAD_CALLS)
def test_bad_calls(call, message):
    kv = make(4)
    seq = kv.sequence()
    fill(seq, 20)
    before = state(kv, seq)
    with pytest.raises(BadInput) as error:
        call(seq)
    assert str(error.value) == message
    assert state(kv, seq) == before


USES = [
    lambda s: s.extend(1), lambda s: s.truncate(0), lambda s: s.truncate_pages(0), lambda s: s.gather(0),
    lambda s: s.snapshot(), lambda s: s.share_prefix([], 0), lambda s: s.write_kv(0, 0, zeros(1), zeros(1)),
    lambda s: s.write_kv(0, 0, zeros(0), zeros(0)), lambda s: s.page_table,
]  # fmt: skip


@pytest.mark.parametrize("use", USES)
def test_every_use_after_close_is_refused(use):
    kv = make(4)
    seq = kv.sequence()
    fill(seq, 20)
    kv.close()
    with pytest.raises(Tampered, match=r"^arena is closed$"):
        use(seq)
    with pytest.raises(Tampered):
        kv.attend(0, zeros(1), [seq], [1])
    with pytest.raises(Tampered):
        kv.sequence()
    seq.free()


@pytest.mark.parametrize("use", USES)
def test_a_sequence_never_initialised_is_refused(use):
    seq = KVSequence.__new__(KVSequence)
    assert len(seq) == 0
    with pytest.raises(Tampered):
        use(seq)


def test_a_kv_sequence_needs_a_kv_cache():
    with pytest.raises(TypeError):
        KVSequence(Arena(4, 64))


def test_int8_scale_of_extreme_rows_is_finite():
    """The largest finite float survives; a row below 2^-100 counts as zeros."""
    kv = make(1, layers=1, heads=1, dim=2, format="int8")
    seq = kv.sequence()
    seq.extend(3)
    x = np.float32([[[3.4e38, -1e38]], [[1e-31, 1e-31]], [[2e-30, -2e-30]]])
    seq.write_kv(0, 0, x, x)
    k, _ = seq.gather(0)
    assert math.isclose(k[0, 0, 0], 3.4e38, rel_tol=1e-6)
    assert not k[1].any()
    np.testing.assert_allclose(k[2], x[2], rtol=1e-6)


class Cutting:
    """An array whose reading cuts a sequence short, as another thread could at that moment."""

    def __init__(self, seq, array):
        self.seq, self.array = seq, array

    def __array__(self, dtype=None, copy=None):
        self.seq.truncate(3)
        return self.array


def test_a_lost_race_is_told_with_its_numbers():
    kv = make(4)
    seq = kv.sequence()
    fill(seq, 40)
    with pytest.raises(BadInput) as caught:
        seq.write_kv(0, 20, Cutting(seq, zeros(20)), zeros(20))
    assert str(caught.value) == (
        "write_kv: 40 tokens exceed the 1 pages of 16 to which another thread cut the sequence meanwhile"
    )
    assert len(seq) == 3 and kv.check() == []


def test_refusals_of_calls_that_race_are_never_empty():
    """extend and truncate on one sequence: whatever is refused says what and by which numbers."""
    kv = make(60)
    seq = kv.sequence()
    told = []

    def call(work):
        for _ in range(300):
            try:
                work()
            except (PoolExhausted, SequenceFull, BadInput) as error:
                told.append(str(error))

    def rewrite():
        twin = seq.snapshot()  # so that pages are shared, and extend has something to copy
        seq.extend(300)
        del twin

    with ThreadPoolExecutor(3) as executor:
        for done in [executor.submit(call, work) for work in (rewrite, rewrite, lambda: seq.truncate(len(seq) // 3))]:
            done.result()
    with pytest.raises(SequenceFull) as caught:
        seq.extend(10_000)
    for text in [*told, str(caught.value)]:
        assert re.search(r"\w{4}.*\d", text), repr(text)
    assert kv.check() == []
