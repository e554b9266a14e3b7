"""Every kernel of every ISA this machine runs gives the bytes of the scalar specification.

Shapes, tails, alignments and values come from a seed, which is part of the test's id; one seed is new in every run.
Inputs lie between guard pages, strides leave NaN-poisoned slack, outputs start as noise and are compared slack and all.
"""

import os

import numpy as np
import pytest
from memory import Memory, address

from pagedkv.core import _testing_kernels as kernels
from pagedkv.core._kernels import isa_names

FRESH = int.from_bytes(os.urandom(4), "little")
SEEDS = [*range(int(os.environ.get("PAGEDKV_KERNEL_SEEDS", "24"))), FRESH]
pytestmark = [
    pytest.mark.parametrize("seed", SEEDS),
    pytest.mark.parametrize("isa", [isa for isa in isa_names() if isa != "scalar"]),
]

SPECIAL = np.array(
    [0.0, -0.0, 1e-40, -1e-40, 3e38, -3e38, np.inf, -np.inf, np.nan, 2.0**-101, 2.0**-100, -(2.0**-99), 88.0, 88.1,
     -87.0, -87.1, 65504.0, 65519.0, 65520.0, 6e-8, 2.9e-8, 6.1e-5, 0.5, 1.5, 127.0, -127.0],
    dtype=np.float32,
)


class Case:
    """One random case: a generator, guarded memory, and values that are plain (even seeds) or extreme (odd seeds)."""

    def __init__(self, seed, memory):
        self.rng = np.random.default_rng(seed)
        self.extreme = seed % 2 == 1
        self.memory = memory

    def size(self, low, high):
        """An integer in [low, high]."""
        return int(self.rng.integers(low, high + 1))

    def coin(self):
        return bool(self.rng.integers(2))

    def floats(self, *shape):
        x = self.rng.standard_normal(shape, dtype=np.float32) * np.float32(10.0 ** self.size(-2, 2))
        if self.extreme:
            strange = self.rng.random(shape) < 0.04
            x[strange] = self.rng.choice(SPECIAL, int(strange.sum()))
        return x

    def halves(self, *shape):
        if self.extreme:
            return self.rng.integers(0, 1 << 16, shape, dtype=np.uint16).view(np.float16)
        return (self.rng.standard_normal(shape) * 0.1).astype(np.float16)

    def place(self, values, align=None):
        """A copy that touches a guard page with its end, or sometimes with its start."""
        return self.memory.copy(values, align, "end" if self.rng.integers(4) else "start")

    def rows(self, values, stride, align=None):
        """Rows at a stride; what lies between them is 0xff bytes."""
        wide = np.full((len(values), stride * values.itemsize), 0xFF, np.uint8).view(values.dtype)
        wide[:, : values.shape[1]] = values
        return self.place(wide, align)


@pytest.fixture
def case(seed):
    with Memory() as memory:
        yield Case(seed, memory)


def check(seed, got, expected):
    """Equal bytes, every NaN counting as the same."""
    for i, pair in enumerate(zip(got, expected, strict=True)):
        a, b = (np.where(x != x, x.dtype.type(np.nan), x) if x.dtype.kind == "f" else x for x in pair)
        if a.tobytes() != b.tobytes():
            at = np.argwhere(a.view(f"u{a.itemsize}") != b.view(f"u{b.itemsize}"))
            where = tuple(int(j) for j in at[0])
            pytest.fail(f"seed {seed}: output {i} differs in {len(at)} of {a.size}, first at {where}: "
                        f"{a[where]!r}, scalar {b[where]!r}")


def check_kernel(case, seed, isa, outputs, call):
    """call(isa, *addresses of outputs) -> value or None, on equal copies of the outputs, by `isa` and by scalar."""
    results = []
    for name in (isa, "scalar"):
        copies = [case.memory.copy(x) for x in outputs]
        value = call(name, *[address(x) for x in copies])
        results.append(copies if value is None else [*copies, np.array([value], np.float32)])
    check(seed, *results)


def quantised_inputs(case, type_name, w_panels, n_cols, n_tokens, wide):
    """(data, scales, q, low, q_stride, scale, sum, isum, half, b_stride); low is None unless wide"""
    block, data_bytes, scale_bytes = kernels.PANEL_LAYOUT[type_name]
    data = case.rng.integers(0, 256, (w_panels, n_cols // block * data_bytes), dtype=np.uint8)
    values = case.rng.integers(-127, 128, (n_tokens, n_cols), dtype=np.int8)
    if case.extreme:
        data[case.rng.random(data.shape) < 0.5] = case.rng.choice([0, 255])
        if case.coin():
            values = case.rng.choice(np.array([-127, 127], np.int8), values.shape)
    n_halves = 16 * (2 if type_name in ("Q4_1", "Q5_1", "Q2_K", "Q4_K", "Q5_K") else 1)
    small = case.rng.integers(0, 256, (w_panels, n_cols // block, scale_bytes - 2 * n_halves), dtype=np.uint8)
    if case.extreme:
        small[case.rng.random(small.shape) < 0.5] = case.rng.choice([127, 128, 255])
    if type_name in ("Q4_K", "Q5_K"):
        small &= 63
    scales = np.concatenate([case.halves(w_panels, n_cols // block, n_halves).view(np.uint8), small], axis=2)
    low = case.rng.integers(-8, 8, values.shape, dtype=np.int8) if wide else None
    integers = (16 * values.astype(np.int32) + low if wide else values).reshape(n_tokens, -1, 32)
    isum, half = integers.sum(axis=2, dtype=np.int32), integers[..., :16].sum(axis=2, dtype=np.int32)
    scale = case.floats(n_tokens, n_cols // 32)
    with np.errstate(all="ignore"):
        total = scale * isum.astype(np.float32)
    q_stride, b_stride = -(-n_cols // 64) * 64, n_cols // 32 + case.size(0, 2)
    return (case.place(data, 64), case.place(scales, 64), case.rows(values, q_stride, 64),
            case.rows(low, q_stride, 64) if wide else None, q_stride,
            case.rows(scale, b_stride), case.rows(total, b_stride), case.rows(isum, b_stride),
            case.rows(half, b_stride), b_stride)


def float_weights(case, type_name, *shape):
    if type_name == "F32":
        return case.place(case.floats(*shape), 64)
    if type_name == "F16":
        return case.place(case.halves(*shape), 64)
    return case.place((case.floats(*shape).view(np.uint32) >> 16).astype(np.uint16), 64)


@pytest.mark.parametrize("wide", [False, True], ids=["int8", "int12"])
@pytest.mark.parametrize("type_name", kernels.WEIGHT_TYPES)
def test_gemm(case, seed, isa, type_name, wide):
    quantised = type_name.startswith("Q")
    w_panels, block = case.size(1, 9), kernels.PANEL_LAYOUT[type_name][0]
    n_cols = block * case.size(1, 3 if block == 256 else 7) if quantised else case.size(1, 90)
    token0, n_tokens, panel0 = case.size(0, 3), case.size(1, 26), case.size(0, w_panels - 1)
    n_panels, all_tokens = case.size(1, w_panels - panel0), token0 + n_tokens
    scales = x = q = low = scale = total = isum = half = None
    x_stride = q_stride = b_stride = 0
    if quantised:
        data, scales, q, low, q_stride, scale, total, isum, half, b_stride = quantised_inputs(
            case, type_name, w_panels, n_cols, all_tokens, wide)
    else:
        data, x_stride = float_weights(case, type_name, w_panels, n_cols, 16), n_cols + case.size(0, 3)
        x = case.rows(case.floats(all_tokens, n_cols), x_stride)
    out_stride, add = 16 * n_panels + case.size(0, 5), case.coin()
    check_kernel(
        case, seed, isa, [case.floats(n_tokens, out_stride)],
        lambda name, out: kernels.gemm(
            name, type_name, out, address(data), address(scales), n_cols, w_panels, address(x), x_stride,
            address(q), q_stride, address(scale), address(total), address(isum), address(half), b_stride,
            panel0, n_panels, token0, n_tokens, out_stride, add, low=address(low), n_next=w_panels - panel0 - n_panels),
    )


def test_quant_i8(case, seed, isa):
    n_blocks = case.size(1, 50)
    x = case.floats(n_blocks, 32)
    if case.extreme:
        x[case.rng.random(n_blocks) < 0.2] *= np.float32(2.0**-100)
        x[case.rng.random(n_blocks) < 0.1] = 0
        ties = case.rng.random(n_blocks) < 0.2
        x[ties] = case.rng.integers(-253, 254, (int(ties.sum()), 32)) / np.float32(2)
        x[ties, 7] = 127
    x = case.place(x)
    outputs = [np.zeros(x.shape, np.int8), case.floats(n_blocks), case.floats(n_blocks), np.zeros(n_blocks, np.int32),
               np.zeros(n_blocks, np.int32)]
    check_kernel(case, seed, isa, outputs, lambda name, *out: kernels.quant_i8(name, *out, address(x), 32 * n_blocks))


def test_quant_column(case, seed, isa):
    n_blocks, token0, n_tokens = case.size(1, 6), case.size(0, 3), case.size(1, 11)
    shape, block = (token0 + n_tokens, n_blocks), case.size(0, n_blocks - 1)
    x = case.floats(*shape, 32)
    if case.extreme:
        x[case.rng.random(shape) < 0.2] *= np.float32(2.0**-100)
        x[case.rng.random(shape) < 0.2] = 0
    x_stride, q_stride, b_stride = (width + case.size(0, 40) for width in (32 * n_blocks, 32 * n_blocks, n_blocks))
    x = case.rows(x.reshape(len(x), -1), x_stride)
    outputs = [np.zeros((len(x), q_stride), np.int8), *(case.floats(len(x), b_stride) for _ in range(2)),
               *(np.zeros((len(x), b_stride), np.int32) for _ in range(2))]
    check_kernel(case, seed, isa, outputs, lambda name, *out: kernels.quant_column(
        name, *out, address(x), x_stride, q_stride, b_stride, block, token0, n_tokens))


def test_quant_i12(case, seed, isa):
    n_blocks = case.size(1, 50)
    x = case.floats(n_blocks, 32)
    if case.extreme:
        x[case.rng.random(n_blocks) < 0.2] *= np.float32(2.0**-100)
        x[: case.size(0, n_blocks)] = 0
    x, sums = case.place(x), np.zeros(n_blocks, np.int32)
    outputs = [np.zeros(x.shape, np.int8), np.zeros(x.shape, np.int8), case.floats(-(-n_blocks // 8)), sums, sums]
    check_kernel(case, seed, isa, outputs, lambda name, *out: kernels.quant_i12(name, *out, address(x), 32 * n_blocks))


class Tiles:
    """KV tiles written by the scalar kernel, the last one partly; slots never written hold 0xff bytes."""

    def __init__(self, case, format_name):
        self.head_dim = case.size(1, 200) if case.coin() else int(case.rng.choice([32, 64, 80, 96, 128, 256]))
        self.head_dim16 = -(-self.head_dim // 16) * 16
        self.page_tokens, self.n_tiles = 16 * case.size(1, 3), case.size(1, 14)
        self.shape = (self.head_dim, self.page_tokens)
        self.n_slots = self.n_tiles * self.page_tokens
        self.n_written = self.n_slots - case.size(0, self.page_tokens - 1)
        empty = np.full(kernels.tile_layout(format_name, *self.shape)[2], 0xFF, np.uint8)
        self.tiles = [case.place(empty, 64) for _ in range(self.n_tiles)]
        self.pointers = np.array([address(tile) for tile in self.tiles], np.uintp)
        self.coming = self.pointers[::-1].copy()
        self.ahead = address(self.coming) if case.size(0, 1) else 0
        for t in range(self.n_written):
            k, v = case.floats(self.head_dim), case.floats(self.head_dim)
            i, slot = divmod(t, self.page_tokens)
            kernels.kv_write("scalar", format_name, address(self.tiles[i]), address(k), address(v), slot, *self.shape)


@pytest.mark.parametrize("format_name", kernels.KV_FORMATS)
def test_kv_write(case, seed, isa, format_name):
    shape = case.size(1, 150), 16 * case.size(1, 3)
    _, scales_at, size = kernels.tile_layout(format_name, *shape)
    element = {"f32": np.float32, "f16": np.float16, "int8": np.int8}[format_name]
    noise = case.rng.integers(0, 256, size, dtype=np.uint8)
    vectors = [(case.place(case.floats(shape[0])), case.place(case.floats(shape[0])), case.size(0, shape[1] - 1))
               for _ in range(4)]
    results = []
    for name in (isa, "scalar"):
        tile = case.memory.copy(noise, 64)
        for k, v, slot in vectors:
            kernels.kv_write(name, format_name, address(tile), address(k), address(v), slot, *shape)
        results.append([tile[:scales_at].view(element), tile[scales_at:].view(np.float32)])
    check(seed, *results)


@pytest.mark.parametrize("format_name", kernels.KV_FORMATS)
def test_kv_read(case, seed, isa, format_name):
    tiles = Tiles(case, format_name)
    slot0 = case.size(0, tiles.page_tokens - 1)
    n, stride = case.size(1, tiles.page_tokens - slot0), tiles.head_dim + case.size(0, 3)
    tile = address(tiles.tiles[-1])
    check_kernel(
        case, seed, isa, [case.floats(n, stride), case.floats(n, stride)],
        lambda name, k, v: kernels.kv_read(name, format_name, k, v, tile, slot0, n, *tiles.shape, stride),
    )


@pytest.mark.parametrize("format_name", kernels.KV_FORMATS)
def test_qk(case, seed, isa, format_name):
    tiles = Tiles(case, format_name)
    n_q, q_stride, s_stride = case.size(1, 34), tiles.head_dim + case.size(0, 3), tiles.n_slots + case.size(0, 3)
    q = case.rows(case.floats(n_q, tiles.head_dim), q_stride)
    check_kernel(
        case, seed, isa, [case.floats(n_q, s_stride)],
        lambda name, s: kernels.qk(name, format_name, s, address(q), address(tiles.pointers), n_q, tiles.n_tiles,
                                   *tiles.shape, s_stride, q_stride, 0.17, ahead=tiles.ahead),
    )


@pytest.mark.parametrize("format_name", kernels.KV_FORMATS)
def test_pv(case, seed, isa, format_name):
    tiles = Tiles(case, format_name)
    start = case.size(0, tiles.n_written)
    stop = case.size(start, tiles.n_written)
    n_q, o_stride, p_stride = case.size(1, 34), tiles.head_dim16 + case.size(0, 3), stop + case.size(1, 4)
    p = case.rows(case.floats(n_q, stop), p_stride)
    check_kernel(
        case, seed, isa, [case.floats(n_q, o_stride)],
        lambda name, o: kernels.pv(name, format_name, o, address(p), address(tiles.pointers), n_q, start, stop,
                                   *tiles.shape, o_stride, p_stride, ahead=tiles.ahead),
    )


def test_softmax(case, seed, isa):
    n, m, inv_t = case.size(1, 600), float(case.floats(1)[0]), float(case.rng.uniform(0.1, 3))
    x = case.place(case.floats(n))
    check_kernel(case, seed, isa, [case.floats(n)], lambda name, y: kernels.softmax(name, y, address(x), n, m, inv_t))
    check_kernel(case, seed, isa, [x], lambda name, y: kernels.softmax(name, y, y, n, m, inv_t))


def test_softcap(case, seed, isa):
    n = case.size(1, 300)
    check_kernel(case, seed, isa, [case.floats(n)], lambda name, x: kernels.softcap(name, x, n, 30.0))


def test_merge(case, seed, isa):
    n, m2, l2 = case.size(1, 300), float(case.floats(1)[0]), float(abs(case.floats(1)[0]))
    o2 = case.place(case.floats(n))
    check_kernel(case, seed, isa, [case.floats(n), case.floats(1), abs(case.floats(1))],
                 lambda name, *row: kernels.merge(name, *row, address(o2), m2, l2, n))


def test_rmsnorm(case, seed, isa):
    n = case.size(1, 700)
    x, w = case.place(case.floats(n)), case.place(case.floats(n))
    check_kernel(case, seed, isa, [case.floats(n)],
                 lambda name, y: kernels.rmsnorm(name, y, address(x), address(w), n, 1e-5))


def test_silu_mul(case, seed, isa):
    n = case.size(1, 700)
    g, u = case.place(case.floats(n)), case.place(case.floats(n))
    check_kernel(case, seed, isa, [case.floats(n)],
                 lambda name, y: kernels.silu_mul(name, y, address(g), address(u), n))


def test_gelu_mul(case, seed, isa):
    n = case.size(1, 700)
    g, u = case.place(case.floats(n)), case.place(case.floats(n))
    check_kernel(case, seed, isa, [case.floats(n)],
                 lambda name, y: kernels.gelu_mul(name, y, address(g), address(u), n))


def test_rope(case, seed, isa):
    half = case.size(1, 130)
    cs = case.place(case.floats(2 * half))
    check_kernel(case, seed, isa, [case.floats(2 * half)], lambda name, x: kernels.rope(name, x, address(cs), half))


def test_add(case, seed, isa):
    n = case.size(1, 700)
    x = case.place(case.floats(n))
    check_kernel(case, seed, isa, [case.floats(n)], lambda name, y: kernels.add(name, y, address(x), n))


def test_scale(case, seed, isa):
    n, a = case.size(1, 700), float(case.floats(1)[0])
    check_kernel(case, seed, isa, [case.floats(n)], lambda name, y: kernels.scale(name, y, n, a))


def for_maximum(case):
    """Rows for vmax and argmax: any values, many equal ones, zeros of both signs, all -inf."""
    n = case.size(1, 700)
    yield case.place(case.floats(n))
    yield case.place(case.rng.integers(-3, 3, n).astype(np.float32))
    yield case.place(np.where(case.rng.random(n) < 0.5, np.float32(-0.0), np.float32(0.0)))
    yield case.place(np.full(n, -np.inf, np.float32))


def test_vmax(case, seed, isa):
    for x in for_maximum(case):
        check_kernel(case, seed, isa, [], lambda name, x=x: kernels.vmax(name, address(x), len(x)))


def test_argmax(case, seed, isa):
    for x in for_maximum(case):
        check_kernel(case, seed, isa, [], lambda name, x=x: kernels.argmax(name, address(x), len(x)))
