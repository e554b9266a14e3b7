"""The scalar specification against oracles that share nothing with it: the gguf package, NumPy in double, mpmath.

Elementary functions are held to ulps; everything else to the rounding of a chain of n float32 operations, n * 2^-24 of
the sum of magnitudes.
"""

import gguf
import mpmath
import numpy as np
import pytest
from memory import address

from pagedkv.core import _testing_kernels as kernels

EPSILON = 2.0**-24
F32 = np.float32


@pytest.fixture
def rng(request):
    """A generator seeded by the test's own name."""
    return np.random.default_rng(list(request.node.name.encode()))


def aligned(values):
    """A copy on a 64-byte boundary."""
    buffer = np.zeros(values.nbytes + 64, np.uint8)
    start = -buffer.ctypes.data % 64
    array = buffer[start : start + values.nbytes].view(values.dtype).reshape(values.shape)
    array[...] = values
    return array


def assert_close(got, exact, magnitude, n):
    """|got - exact| within n roundings of a sum whose terms add up to `magnitude`."""
    assert np.all(np.abs(got - exact) <= n * EPSILON * magnitude + 1e-38)


def ulp(x):
    """Spacing of float32 at |x|, as a float64 array."""
    return np.spacing(np.abs(np.asarray(x, np.float64)).astype(F32)).astype(np.float64)


# ---- weights ----

def gguf_blocks(rng, type_name, n_rows, n_cols):
    """Random rows in GGUF's own block layout."""
    type_size = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[type_name]][1]
    raw = rng.integers(0, 256, (n_rows, n_cols // 32, type_size), dtype=np.uint8)
    n_halves = 2 if type_name == "Q4_1" else 1
    halves = (rng.standard_normal((n_rows, n_cols // 32, n_halves)) * 0.1).astype(np.float16)
    raw[..., : 2 * n_halves] = halves.view(np.uint8)
    return raw


def pack(type_name, raw):
    """GGUF blocks [n_rows, n_blocks, size] to the panel layout documented in pkv_kernels.h; n_rows a multiple of 16."""
    n_rows, n_blocks, _ = raw.shape
    n_halves = 2 if type_name == "Q4_1" else 1
    halves = raw[..., : 2 * n_halves].copy().view(np.uint16).reshape(n_rows // 16, 16, n_blocks, n_halves)
    scales = halves.transpose(0, 2, 3, 1)
    body = raw[..., 2 * n_halves :]
    if type_name == "Q8_0":
        body = (body.view(np.int8).astype(np.int16) + 128).astype(np.uint8)
    lines = body.reshape(n_rows // 16, 16, n_blocks, -1, 4).transpose(0, 2, 3, 1, 4)
    return aligned(np.ascontiguousarray(lines)), aligned(np.ascontiguousarray(scales))


def float_panels(rng, type_name, n_rows, n_cols):
    """(packed, values as float64 [n_rows, n_cols])"""
    x = rng.standard_normal((n_rows, n_cols)).astype(F32)
    if type_name == "F32":
        stored, values = x, x
    elif type_name == "F16":
        stored = x.astype(np.float16)
        values = stored
    else:
        stored = (x.view(np.uint32) >> 16).astype(np.uint16)
        values = (stored.astype(np.uint32) << 16).view(F32)
    panels = stored.reshape(n_rows // 16, 16, n_cols).transpose(0, 2, 1)
    return aligned(np.ascontiguousarray(panels)), values.astype(np.float64)


def dequantised(type_name, data, scales, n_rows, n_cols):
    y = np.empty((n_rows, n_cols), F32)
    for row in range(n_rows):
        kernels.row(type_name, address(y[row]), address(data), address(scales), n_cols, n_rows // 16, row)
    return y


@pytest.mark.parametrize("type_name", ["Q4_0", "Q4_1", "Q8_0"])
def test_weight_row_is_what_gguf_dequantises(rng, type_name):
    raw = gguf_blocks(rng, type_name, 48, 96)
    expected = gguf.quants.dequantize(raw.reshape(48, -1), gguf.GGMLQuantizationType[type_name])
    got = dequantised(type_name, *pack(type_name, raw), 48, 96)
    if type_name == "Q4_1":  # gguf rounds the product before it adds the minimum
        assert_close(got, expected.astype(np.float64), np.abs(expected) + 1.5, 2)
    else:
        assert np.array_equal(got, expected)


@pytest.mark.parametrize("type_name", ["F32", "F16", "BF16"])
def test_weight_row_of_floats_is_exact(rng, type_name):
    data, values = float_panels(rng, type_name, 32, 7)
    assert np.array_equal(dequantised(type_name, data, None, 32, 7), values)


def quantise(x):
    """quant_i8 of rows: (q, scale, sum, isum, half)"""
    n_tokens, n_cols = x.shape
    n_blocks = n_cols // 32
    q, scale = np.empty((n_tokens, n_cols), np.int8), np.empty((n_tokens, n_blocks), F32)
    total, (isum, half) = np.empty_like(scale), np.empty((2, n_tokens, n_blocks), np.int32)
    for t in range(n_tokens):
        outputs = [address(part[t]) for part in (q, scale, total, isum, half)]
        kernels.quant_i8("scalar", *outputs, address(x[t]), n_cols)
    return q, scale, total, isum, half


def quantise_wide(x):
    """quant_i12 of rows: (high digits, low digits, scale, isum, half)"""
    n_tokens, n_cols = x.shape
    n_blocks = n_cols // 32
    q, low = np.empty((2, n_tokens, n_cols), np.int8)
    scale, (isum, half) = np.empty((n_tokens, n_blocks), F32), np.empty((2, n_tokens, n_blocks), np.int32)
    for t in range(n_tokens):
        outputs = [address(part[t]) for part in (q, low, scale, isum, half)]
        kernels.quant_i12("scalar", *outputs, address(x[t]), n_cols)
    return q, low, scale, isum, half


@pytest.mark.parametrize("wide", [False, True], ids=["int8", "int12"])
@pytest.mark.parametrize("add", [False, True])
@pytest.mark.parametrize("type_name", ["Q4_0", "Q4_1", "Q8_0"])
def test_gemm_of_blocks_is_the_product_of_what_they_stand_for(rng, type_name, add, wide):
    n_rows, n_cols, n_tokens = 48, 320, 5
    raw = gguf_blocks(rng, type_name, n_rows, n_cols)
    data, scales = pack(type_name, raw)
    x, low, total = rng.standard_normal((n_tokens, n_cols)).astype(F32), None, None
    if wide:
        q, low, scale, isum, half = quantise_wide(x)
        x = (16.0 * q + low) * np.repeat(scale[:, :2], 256, axis=1)[:, :n_cols]
    else:
        q, scale, total, isum, half = quantise(x)
        x = q.astype(np.float64) * np.repeat(scale, 32, axis=1)
    w = gguf.quants.dequantize(raw.reshape(n_rows, -1), gguf.GGMLQuantizationType[type_name]).astype(np.float64)
    before = rng.standard_normal((n_tokens, 32)).astype(F32)
    out = before.copy()
    kernels.gemm("scalar", type_name, address(out), address(data), address(scales), n_cols, 3, 0, 0, address(q), n_cols,
                 address(scale), address(total), address(isum), address(half), n_cols // 32, 1, 2, 1, n_tokens - 1, 32,
                 add, low=address(low))
    exact = x[1:] @ w[16:].T + add * before[: n_tokens - 1]
    assert_close(out[:-1], exact, np.abs(x[1:]) @ (np.abs(w[16:]) + 1.5).T + np.abs(before[:-1]), 3 * n_cols // 32 + 8)
    assert np.array_equal(out[-1], before[-1])


@pytest.mark.parametrize("type_name", ["F32", "F16", "BF16"])
def test_gemm_of_floats_is_the_product(rng, type_name):
    n_cols, n_tokens = 77, 3
    data, w = float_panels(rng, type_name, 32, n_cols)
    x = rng.standard_normal((n_tokens, n_cols)).astype(F32)
    out = np.full((n_tokens, 32), np.nan, F32)
    kernels.gemm("scalar", type_name, address(out), address(data), 0, n_cols, 2, address(x), n_cols, 0, 0, 0, 0, 0, 0,
                 0, 0, 2, 0, n_tokens, 32, False)
    assert_close(out, x.astype(np.float64) @ w.T, np.abs(x).astype(np.float64) @ np.abs(w).T, n_cols)


# ---- quantised activations ----

def test_quant_i8_rounds_to_the_nearest_of_255_levels(rng):
    x = rng.standard_normal((6, 64)).astype(F32)
    q, scale, total, isum, half = quantise(x)
    amax = np.abs(x.astype(np.float64).reshape(6, 2, 32)).max(axis=2)
    assert np.allclose(scale, amax / 127, rtol=2**-22, atol=0)
    levels = x.reshape(6, 2, 32) * (127 / amax)[..., None]
    assert np.all(np.abs(q.reshape(6, 2, 32) - levels) <= 0.5 + 1e-4)
    assert np.abs(q).max() == 127
    assert np.array_equal(isum, q.reshape(6, 2, 32).sum(axis=2, dtype=np.int32))
    assert np.array_equal(half, q.reshape(6, 2, 32)[..., :16].sum(axis=2, dtype=np.int32))
    assert np.array_equal(total, scale * isum.astype(F32))


def test_quant_i8_rounds_ties_to_even():
    x = np.zeros((1, 32), F32)
    x[0, :7] = [127, 0.5, 1.5, 2.5, -0.5, -1.5, -2.5]
    assert quantise(x)[0][0, :7].tolist() == [127, 0, 2, 2, 0, -2, -2]


@pytest.mark.parametrize(
    ("special", "scale"), [(0.0, 0.0), (2.0**-101, 0.0), (np.nan, np.nan), (np.inf, np.nan), (-np.inf, np.nan)])
def test_quant_i8_of_blocks_without_a_scale(special, scale):
    x = np.zeros((1, 64), F32)
    x[0, 5], x[0, 40] = special, 1
    q, got, total, isum, _ = quantise(x)
    assert not q[0, :32].any() and isum[0, 0] == 0
    assert np.array_equal([got[0, 0], total[0, 0]], [scale, scale], equal_nan=True)
    assert q[0, 40] == 127  # the next block is not touched by it


def test_quant_column_is_one_block_of_rows_of_quant_i8(rng):
    x = rng.standard_normal((5, 96)).astype(F32)
    whole = quantise(x)
    parts = [np.full_like(part, 7) for part in whole]
    kernels.quant_column("scalar", *(address(part) for part in parts), address(x), 96, 96, 3, 1, 2, 3)
    for part, expected in zip(parts, whole, strict=True):
        width = part.shape[1] // 3
        assert np.array_equal(part[2:, width : 2 * width], expected[2:, width : 2 * width])
        part[2:, width : 2 * width] = 7
        assert (part == 7).all()  # nothing else was written


def test_quant_i12_rounds_to_the_nearest_of_4079_levels(rng):
    x = rng.standard_normal((4, 320)).astype(F32)
    q, low, scale, isum, half = quantise_wide(x)
    integers = 16 * q.astype(np.int32) + low
    assert np.abs(q.astype(np.int32)).max() <= 127 and low.min() >= -8 and low.max() <= 7
    for columns, group in ((slice(0, 256), 0), (slice(256, 320), 1)):
        amax = np.abs(x[:, columns].astype(np.float64)).max(axis=1, keepdims=True)
        assert np.allclose(scale[:, [group]], amax / 2039, rtol=2**-22, atol=0)
        assert np.all(np.abs(integers[:, columns] - x[:, columns] * (2039 / amax)) <= 0.5 + 1e-3)
        assert np.array_equal(np.abs(integers[:, columns]).max(axis=1), [2039] * 4)
    assert np.array_equal(isum, integers.reshape(4, 10, 32).sum(axis=2, dtype=np.int32))
    assert np.array_equal(half, integers.reshape(4, 10, 32)[..., :16].sum(axis=2, dtype=np.int32))


# ---- attention over page tiles ----

def write_tiles(format_name, k, v, page_tokens):
    """Tiles holding k and v [n, head_dim], unwritten slots NaN; (tiles, array of their addresses)"""
    n, shape = len(k), (k.shape[1], page_tokens)
    size = kernels.tile_layout(format_name, *shape)[2]
    tiles = [aligned(np.full(size, 0xFF, np.uint8)) for _ in range(-(-n // page_tokens))]
    for t in range(n):
        i, slot = divmod(t, page_tokens)
        kernels.kv_write("scalar", format_name, address(tiles[i]), address(k[t]), address(v[t]), slot, *shape)
    return tiles, np.array([address(tile) for tile in tiles], np.uintp)


def read_tile(format_name, tile, slot0, n, head_dim, page_tokens):
    k, v = np.empty((n, head_dim), F32), np.empty((n, head_dim), F32)
    kernels.kv_read("scalar", format_name, address(k), address(v), address(tile), slot0, n, head_dim, page_tokens,
                    head_dim)
    return k, v


def test_tile_layout_is_the_documented_one(rng):
    head_dim, page_tokens, slot = 20, 16, 5
    k, v = rng.standard_normal((2, head_dim)).astype(F32)
    v_at, _, size = kernels.tile_layout("f32", head_dim, page_tokens)
    tile = aligned(np.full(size, 0xFF, np.uint8))
    kernels.kv_write("scalar", "f32", address(tile), address(k), address(v), slot, head_dim, page_tokens)
    floats = tile.view(F32)
    assert np.array_equal(floats[: head_dim * page_tokens].reshape(head_dim, page_tokens)[:, slot], k)
    row = floats[v_at // 4 :].reshape(page_tokens, 32)[slot]
    assert np.array_equal(row[:head_dim], v) and not row[head_dim:].any()
    assert np.isnan(floats).sum() == floats.size - head_dim - 32


@pytest.mark.parametrize("page_tokens", [16, 32])
def test_f32_and_f16_tiles_give_back_what_was_written(rng, page_tokens):
    k, v = (rng.standard_normal((2, page_tokens, 20)) * 3).astype(F32)
    for format_name, stored in (("f32", F32), ("f16", np.float16)):
        tiles, _ = write_tiles(format_name, k, v, page_tokens)
        got = read_tile(format_name, tiles[0], 3, 9, 20, page_tokens)
        assert np.array_equal(got, [x[3:12].astype(stored).astype(F32) for x in (k, v)])


def test_half_precision_is_ieee(rng):
    """Every half widened, and rounding of floats around every boundary, against NumPy's float16."""
    halves = np.arange(1 << 16, dtype=np.uint16)
    widened = halves.view(np.float16).astype(F32)
    finite = np.sort(widened[np.isfinite(widened)])
    middle = ((finite[1:].astype(np.float64) + finite[:-1]) / 2).astype(F32)
    below, above = np.nextafter(middle, F32(-np.inf)), np.nextafter(middle, F32(np.inf))
    extreme = np.array([65519.996, 65520, 65536, 3e38, np.inf, 2.0**-25, 2.0**-25 * 1.0001, 1e-40, np.nan], F32)
    x = np.concatenate([finite, middle, below, above, extreme, -extreme])
    x = x[: len(x) // 4 * 4].reshape(1, -1)
    tiles, _ = write_tiles("f16", x, x, 16)
    with np.errstate(over="ignore"):
        expected = x.astype(np.float16)
    stored = tiles[0][: x.size * 32].view(np.float16).reshape(-1, 16)[:, 0]
    assert np.array_equal(stored, expected[0], equal_nan=True)
    assert np.array_equal(np.signbit(stored), np.signbit(expected[0]) | np.isnan(stored) & np.signbit(stored))
    k, _ = read_tile("f16", tiles[0], 0, 1, x.size, 16)
    assert np.array_equal(k[0], stored.astype(F32), equal_nan=True)


def test_int8_tiles_round_to_the_nearest_level(rng):
    k, v = (rng.standard_normal((2, 16, 80)) * [[[4.0]], [[0.1]]]).astype(F32)
    k[3] = 0
    tiles, _ = write_tiles("int8", k, v, 16)
    for x, got in zip((k, v), read_tile("int8", tiles[0], 0, 16, 80, 16), strict=True):
        half_level = np.abs(x).max(axis=1, keepdims=True) / 254
        assert np.all(np.abs(got - x) <= half_level * 1.0001)
    assert not read_tile("int8", tiles[0], 3, 1, 80, 16)[0].any()


@pytest.mark.parametrize("format_name", kernels.KV_FORMATS)
def test_qk_and_pv_are_products_with_what_the_tiles_hold(rng, format_name):
    head_dim, page_tokens, n_q, n = 40, 16, 3, 45
    k, v = rng.standard_normal((2, n, head_dim)).astype(F32)
    tiles, pointers = write_tiles(format_name, k, v, page_tokens)
    held = [read_tile(format_name, tile, 0, page_tokens, head_dim, page_tokens) for tile in tiles]
    k, v = (np.concatenate(x)[:n].astype(np.float64) for x in zip(*held, strict=True))

    q, s = rng.standard_normal((n_q, head_dim)).astype(F32), np.empty((n_q, 48), F32)
    kernels.qk("scalar", format_name, address(s), address(q), address(pointers), n_q, 3, head_dim, page_tokens, 48,
               head_dim, 0.25)
    assert_close(s[:, :n], q @ k.T * 0.25, np.abs(q) @ np.abs(k).T * 0.25, head_dim + 3)

    p, o = rng.random((n_q, n)).astype(F32), np.ones((n_q, 48), F32)
    kernels.pv("scalar", format_name, address(o), address(p), address(pointers), n_q, 7, 41, head_dim, page_tokens, 48,
               n)
    assert_close(o[:, :head_dim], 1 + p[:, 7:41] @ v[7:41], 1 + p[:, 7:41] @ np.abs(v[7:41]), 34 * 2)
    assert np.all(o[:, head_dim:] == 1)


def test_softmax_is_exp_and_its_sum(rng):
    x = (rng.standard_normal(100) * 4).astype(F32)
    x[[3, 50]] = -np.inf
    y = np.empty_like(x)
    total = kernels.softmax("scalar", address(y), address(x), x.size, float(x.max()), 0.5)
    exact = np.exp((x.astype(np.float64) - x.max()) * 0.5)
    assert np.allclose(y, exact, rtol=2e-6, atol=1e-37) and y[3] == y[50] == 0
    assert abs(total - exact.sum()) <= 2e-6 * exact.sum()


def test_merged_splits_are_one_softmax(rng):
    s, v = (rng.standard_normal(60) * 3).astype(F32), rng.standard_normal((60, 24)).astype(F32)
    m, total, o = np.empty(1, F32), np.empty(1, F32), None
    for start, stop in ((0, 20), (20, 37), (37, 60)):
        part, top = np.empty(stop - start, F32), float(s[start:stop].max())
        part_total = kernels.softmax("scalar", address(part), address(s[start:stop]), stop - start, top, 1.0)
        weighted = (part[:, None] * v[start:stop]).sum(axis=0, dtype=F32)
        if o is None:
            m[0], total[0], o = top, part_total, weighted
        else:
            kernels.merge("scalar", address(o), address(m), address(total), address(weighted), top, part_total, 24)
    weights = np.exp(s.astype(np.float64) - s.max())
    assert m[0] == s.max()
    assert np.allclose(o / total[0], weights @ v / weights.sum(), rtol=0, atol=3e-6)


# ---- elementwise and reductions ----

def test_softcap_is_a_scaled_tanh(rng):
    x = np.concatenate([rng.standard_normal(200) * 40, [0.0, -0.0, 1e30, -1e30]]).astype(F32)
    y = x.copy()
    kernels.softcap("scalar", address(y), y.size, 30.0)
    assert np.allclose(y, 30 * np.tanh(x.astype(np.float64) / 30), rtol=0, atol=30 * 4 * 2 * EPSILON)
    assert np.array_equal(np.signbit(y), np.signbit(x))


@pytest.mark.parametrize("cap", [2.0**-10, 0.3, 1, 30, 50, 300, 1000])
def test_the_error_of_a_soft_cap_is_bounded_over_the_caps_that_are_taken(rng, cap):
    x = (rng.uniform(-1, 1, (8, 4096)) * 10.0 ** np.arange(-5, 3)[:, None] * cap).astype(F32).ravel()
    y = x.copy()
    kernels.softcap("scalar", address(y), y.size, cap)
    assert np.abs(y - cap * np.tanh(x.astype(np.float64) / cap)).max() < cap * 2.0**-22 <= 2.4e-4


@pytest.mark.parametrize("n", [1, 15, 16, 576, 577])
def test_rmsnorm(rng, n):
    x, w = (rng.standard_normal((2, n)) * [[9], [1]]).astype(F32)
    y = np.empty_like(x)
    kernels.rmsnorm("scalar", address(y), address(x), address(w), n, 1e-5)
    exact = x / np.sqrt((x.astype(np.float64) ** 2).mean() + 1e-5) * w
    assert_close(y, exact, np.abs(exact), n / 16 + 12)


def test_silu_mul(rng):
    g, u = (rng.standard_normal((2, 300)) * [[8], [2]]).astype(F32)
    y = np.empty_like(g)
    kernels.silu_mul("scalar", address(y), address(g), address(u), g.size)
    exact = g / (1 + np.exp(-g.astype(np.float64))) * u
    assert_close(y, exact, np.abs(exact), 8)


def test_gelu_mul_is_the_tanh_form(rng):
    g, u = (rng.standard_normal((2, 300)) * [[3], [2]]).astype(F32)
    g[:4] = [0, -0.0, 1e30, -40]
    y = np.empty_like(g)
    kernels.gelu_mul("scalar", address(y), address(g), address(u), g.size)
    x = g.astype(np.float64)
    exact = x / 2 * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3))) * u
    assert np.allclose(y, exact, rtol=2e-5, atol=1e-9)
    near = np.abs(x) < 2
    assert near.sum() > 50
    assert_close(y[near], exact[near], np.abs(exact[near]), 24)


def test_rope_rotates_pairs_half_a_head_apart(rng):
    half = 24
    x, angle = rng.standard_normal(2 * half).astype(F32), rng.uniform(-3, 3, half)
    cs = np.concatenate([np.cos(angle), np.sin(angle)]).astype(F32)
    z = (x[:half] + 1j * x[half:].astype(np.float64)) * np.exp(1j * angle)
    kernels.rope("scalar", address(x), address(cs), half)
    assert np.allclose(x, np.concatenate([z.real, z.imag]), rtol=0, atol=2e-6)


def test_add_and_scale(rng):
    x, y = rng.standard_normal((2, 37)).astype(F32)
    got = y.copy()
    kernels.add("scalar", address(got), address(x), 37)
    assert np.array_equal(got, y + x)
    kernels.scale("scalar", address(got), 37, 0.3)
    assert np.array_equal(got, (y + x) * F32(0.3))


@pytest.mark.parametrize(
    ("values", "maximum", "index"),
    [([3], 3, 0), ([1, 5, 5, 2], 5, 1), ([-0.0, 0.0], 0.0, 0), ([-np.inf, -np.inf], -np.inf, 0),
     ([1, np.nan, 9], np.nan, -1), ([np.nan], np.nan, -1), ([-3, -1, np.inf], np.inf, 2)],
)
def test_vmax_and_argmax(values, maximum, index):
    x = np.array(values, F32)
    got = kernels.vmax("scalar", address(x), x.size)
    assert np.array_equal(got, maximum, equal_nan=True) and not (got == 0 and np.signbit(got))
    assert kernels.argmax("scalar", address(x), x.size) == index


# ---- elementary functions, errors in ulp ----

def test_exp_is_within_two_and_three_quarters_ulp(rng):
    """The polynomial is worst half way between multiples of ln 2, and the last two values are the worst known."""
    between = ((np.arange(-125, 126) + 0.5) * np.log(2))[:, None] + rng.uniform(-0.01, 0.01, (251, 12))
    x = np.concatenate([rng.uniform(-87, 88, 3000), rng.uniform(-1, 1, 1000), [-87, 88, 0, -0.0, 1e-30],
                        between.ravel(), [-27.379167556762695, -48.866641998291016]]).astype(F32)
    got = np.array([kernels.exp(float(v)) for v in x])
    exact = np.array([float(mpmath.exp(mpmath.mpf(float(v)))) for v in x])
    assert (np.abs(got - exact) / ulp(exact)).max() <= 2.75
    assert kernels.exp(0.0) == 1


@pytest.mark.parametrize(
    ("x", "value"), [(-87.01, 0), (-np.inf, 0), (89.0, "clamped"), (np.inf, "clamped"), (np.nan, np.nan)])
def test_exp_outside_its_range(x, value):
    expected = kernels.exp(88.0) if value == "clamped" else value
    assert np.array_equal(kernels.exp(x), expected, equal_nan=True)


def test_log_is_within_two_ulp(rng):
    x = np.concatenate([rng.uniform(0, 1, 1500), 10 ** rng.uniform(-300, 300, 1500), 1 + rng.uniform(-1e-3, 1e-3, 1000),
                        [1.0, 5e-324, 2.3e-308, 1.7e308, 2**0.5, 0.5**0.5]])
    mpmath.mp.prec = 200
    for v in map(float, x):
        exact = mpmath.log(mpmath.mpf(v))
        assert abs(kernels.log(v) - exact) <= 2 * np.spacing(abs(float(exact)))
    assert kernels.log(1.0) == 0


@pytest.mark.parametrize("position", [0, 1, 355, 2047, 131071, 5_419_351])  # 355, 5419351: nearly multiples of pi
def test_rope_angles_are_within_one_ulp(position):
    half = 32
    inv_freq = 10000.0 ** (-np.arange(half) / half)
    cs = np.empty(2 * half, F32)
    kernels.angles(address(cs), address(inv_freq), half, position, 1.0)
    mpmath.mp.prec = 200
    angles = [mpmath.mpf(position * float(f)) for f in inv_freq]  # the angle is formed in double
    exact = np.array([float(f(a)) for f in (mpmath.cos, mpmath.sin) for a in angles])
    assert (np.abs(cs - exact) / np.maximum(ulp(exact), 2.0**-46)).max() <= 1


def test_rope_angles_scale_by_the_attention_factor():
    inv_freq, plain, scaled = np.array([1.0, 0.1]), np.empty(4, F32), np.empty(4, F32)
    kernels.angles(address(plain), address(inv_freq), 2, 5, 1.0)
    kernels.angles(address(scaled), address(inv_freq), 2, 5, 1.25)
    assert np.array_equal(scaled, plain * F32(1.25))
