"""Packed weights against the gguf package, products against float64, and one result on every ISA and thread count."""

import gguf
import numpy as np
import pytest
from isas import assert_one_result, on_every_isa

from pagedkv.core._kernels import ThreadPool
from pagedkv.core._testing_threads import multiply
from pagedkv.core.matmul import WEIGHT_TYPES, PackedMatrix

BLOCKED = ("Q4_0", "Q4_1", "Q8_0")
BLOCK_SHAPES = [(1, 32), (15, 64), (16, 32), (17, 96), (100, 320)]
FLOAT_SHAPES = [(1, 1), (15, 7), (16, 16), (33, 50)]
CASES = [(name, *shape) for name in WEIGHT_TYPES for shape in (BLOCK_SHAPES if name in BLOCKED else FLOAT_SHAPES)]
EPS = 2.0**-24  # rounding of one float32 operation, relative


@pytest.fixture(scope="module")
def pool():
    return ThreadPool(2)


def file_bytes(type_name, weights):
    """Rows in the file's layout, made by the gguf package."""
    return gguf.quants.quantize(weights, gguf.GGMLQuantizationType[type_name])


def dequantised(type_name, raw):
    return gguf.quants.dequantize(raw, gguf.GGMLQuantizationType[type_name])


def random_weights(n_rows, n_cols, seed=0):
    rng = np.random.default_rng(seed)
    return (rng.standard_normal((n_rows, n_cols)) * 10.0 ** rng.integers(-3, 3, (n_rows, 1))).astype(np.float32)


def rows_of(matrix):
    return np.array([np.frombuffer(matrix.row(i), np.float32) for i in range(matrix.shape[0])])


def assert_equals_gguf(type_name, rows, raw):
    expected = dequantised(type_name, raw).astype(np.float32)
    if type_name in BLOCKED:
        expected += np.float32(0)  # a negative scale times 0 is +0 here
    if type_name != "Q4_1":
        assert rows.tobytes() == expected.tobytes()
        return
    # scale * q + minimum is rounded once here and twice there
    blocks = np.ascontiguousarray(raw).reshape(len(rows), -1, 20)
    halves = blocks[:, :, :4].copy().view(np.float16).astype(np.float64)
    nibbles = np.concatenate([blocks[:, :, 4:] & 15, blocks[:, :, 4:] >> 4], axis=2)
    exact = (halves[:, :, :1] * nibbles + halves[:, :, 1:]).astype(np.float32).reshape(rows.shape)
    assert rows.tobytes() == exact.tobytes()
    np.testing.assert_allclose(rows, expected, rtol=0, atol=2 * EPS * float(abs(expected).max()) * 4)


@pytest.mark.parametrize(("type_name", "n_rows", "n_cols"), CASES)
def test_rows_are_those_of_the_file(pool, type_name, n_rows, n_cols):
    raw = file_bytes(type_name, random_weights(n_rows, n_cols))
    matrix = PackedMatrix.pack(pool, type_name, raw, n_rows, n_cols)
    assert matrix.shape == (n_rows, n_cols)
    assert matrix.type_name == type_name
    assert_equals_gguf(type_name, rows_of(matrix), raw)


@pytest.mark.parametrize("type_name", WEIGHT_TYPES)
def test_every_bit_pattern_of_a_block_survives(pool, type_name):
    """Random bytes instead of quantised weights; scales kept finite."""
    n_rows, n_cols = 40, 256
    raw = file_bytes(type_name, random_weights(n_rows, n_cols))
    noise = np.random.default_rng(5).integers(0, 256, raw.shape, dtype=np.uint8)
    if type_name in BLOCKED:
        head = {"Q4_0": 2, "Q4_1": 4, "Q8_0": 2}[type_name]
        blocks, kept = noise.reshape(n_rows, n_cols // 32, -1), raw.reshape(n_rows, n_cols // 32, -1)
        blocks[:, :, :head] = kept[:, :, :head]
        raw = noise
    assert_equals_gguf(type_name, rows_of(PackedMatrix.pack(pool, type_name, raw, n_rows, n_cols)), raw)


@pytest.mark.parametrize("type_name", WEIGHT_TYPES)
def test_row_order(pool, type_name):
    n_rows, n_cols = 50, 64
    raw = file_bytes(type_name, random_weights(n_rows, n_cols))
    straight = rows_of(PackedMatrix.pack(pool, type_name, raw, n_rows, n_cols))
    order = np.random.default_rng(1).permutation(n_rows)
    order[3] = order[4]  # a row may come twice
    shuffled = rows_of(PackedMatrix.pack(pool, type_name, raw, n_rows, n_cols, order))
    assert shuffled.tobytes() == straight[order].tobytes()


@pytest.mark.parametrize("type_name", WEIGHT_TYPES)
def test_who_packs_does_not_matter(type_name):
    raw = file_bytes(type_name, random_weights(200, 64))
    assert_one_result(
        {n: rows_of(PackedMatrix.pack(ThreadPool(n), type_name, raw, 200, 64)).tobytes() for n in (1, 2, 5)}
    )


def test_the_source_is_copied_and_may_be_read_only(pool):
    raw = bytearray(file_bytes("Q8_0", random_weights(16, 32)).tobytes())
    matrix = PackedMatrix.pack(pool, "Q8_0", memoryview(bytes(raw)), 16, 32)
    expected = rows_of(matrix).copy()
    other = PackedMatrix.pack(pool, "Q8_0", raw, 16, 32)
    raw[:] = bytes(len(raw))
    assert rows_of(other).tobytes() == expected.tobytes()


def test_nbytes_is_what_the_types_take(pool):
    """Bits per weight of the panel layout, rows padded to 16."""
    bits = {"F32": 32, "F16": 16, "BF16": 16, "Q4_0": 4.5, "Q4_1": 5, "Q8_0": 8.5}
    for type_name in WEIGHT_TYPES:
        matrix = PackedMatrix.pack(pool, type_name, file_bytes(type_name, random_weights(100, 320)), 100, 320)
        assert matrix.nbytes == 112 * 320 * bits[type_name] / 8


BAD = [
    (("Q2_K", b"", 16, 256), "weight type: Q2_K cannot be packed; supported: F32, F16, BF16, Q4_0, Q4_1, Q8_0"),
    (("Q4_1", b"", 0, 32), "weight shape: (0, 32) is outside [1, 2147483648)"),
    (("Q4_1", b"", 1, 0), "weight shape: (1, 0) is outside [1, 2147483648)"),
    (("F32", b"", 1 << 31, 1), "weight shape: (2147483648, 1) is outside [1, 2147483648)"),
    (("F32", b"", -1, 1), "weight shape: (-1, 1) is outside [1, 2147483648)"),
    (("Q8_0", bytes(34), 1, 33), "weight columns: 33 is no multiple of Q8_0's block of 32"),
    (("Q8_0", bytes(33), 1, 32), "weight bytes: 33, a Q8_0 matrix (1, 32) has 34"),
    (("F16", bytes(66), 2, 16), "weight bytes: 66, a F16 matrix (2, 16) has 64"),
    (("F32", bytes(8), 2, 1, np.zeros(1, np.int64)), "row_order: 8 bytes, must be 16"),
    (("F32", bytes(8), 2, 1, np.array([0, 2])), "row_order: 2 at 1 is outside [0, 2)"),
    (("F32", bytes(8), 2, 1, np.array([-1, 0])), "row_order: -1 at 0 is outside [0, 2)"),
]


@pytest.mark.parametrize(("args", "message"), BAD)
def test_what_does_not_fit_is_named(pool, args, message):
    with pytest.raises(ValueError) as error:
        PackedMatrix.pack(pool, *args)
    assert str(error.value) == message


def test_what_is_no_buffer_is_refused(pool):
    with pytest.raises(TypeError):
        PackedMatrix.pack(pool, "F32", None, 1, 1)
    with pytest.raises(TypeError):
        PackedMatrix.pack(None, "F32", bytes(4), 1, 1)
    with pytest.raises(BufferError):
        PackedMatrix.pack(pool, "F32", memoryview(bytes(16))[::2], 2, 1)


@pytest.mark.parametrize("i", [-1, 2, 1 << 40])
def test_row_outside_is_an_index_error(pool, i):
    matrix = PackedMatrix.pack(pool, "F32", bytes(8), 2, 1)
    with pytest.raises(IndexError, match=rf"^row {i} is outside \[0, 2\)$"):
        matrix.row(i)


# --- products ---------------------------------------------------------------------------------------------------------

PRODUCTS = [(name, 40, 96 if name in BLOCKED else 71, n) for name in WEIGHT_TYPES for n in (1, 2, 3, 7, 16, 37)]


def product(pool, matrix, x, out=None):
    n_padded = -(-matrix.shape[0] // 16) * 16
    result = np.full((len(x), n_padded), np.nan, np.float32) if out is None else out.copy()
    multiply(pool, matrix, x, result, out is not None)
    return result[:, : matrix.shape[0]]


def quantised(x):
    """One scale per 32 values, amax/127, round to nearest even: (integers, scales) in float64."""
    blocks = x.reshape(len(x), -1, 32)
    amax = abs(blocks).max(axis=2, keepdims=True)
    with np.errstate(divide="ignore", invalid="ignore"):
        inverse = np.where(amax < np.float32(2.0**-100), np.float32(0), np.float32(127) / amax)
        q = np.where(inverse == 0, np.float32(0), np.rint(blocks * inverse))
    scale = np.where(inverse == 0, np.float32(0), amax * (np.float32(1) / np.float32(127)))
    return q.astype(np.float64), scale.astype(np.float64)


@pytest.mark.parametrize(("type_name", "n_rows", "n_cols", "n"), PRODUCTS)
def test_product_against_float64(pool, type_name, n_rows, n_cols, n):
    """Error of a chain of k fused steps: at most k roundings of partial sums, each below the sum of magnitudes."""
    raw = file_bytes(type_name, random_weights(n_rows, n_cols, seed=n))
    w = dequantised(type_name, raw).astype(np.float64)
    x = random_weights(n, n_cols, seed=100 + n)
    x[0, :32] = 0
    if type_name in BLOCKED:
        q, scale = quantised(x)
        effective = (q * scale).reshape(x.shape)
        assert (abs(effective - x) <= 0.50002 * scale.repeat(32, axis=2).reshape(x.shape)).all()
    else:
        effective = x.astype(np.float64)
    # per block: scale product, its fused step, the minimum's fused step and product; float types one step per column
    magnitudes = abs(effective) @ abs(w).T
    if type_name == "Q4_1":  # scale * q and minimum may be larger than their sum
        halves = np.ascontiguousarray(raw).reshape(n_rows, -1, 20)[:, :, :4].copy().view(np.float16).astype(np.float64)
        largest = (15 * abs(halves[:, :, 0]) + abs(halves[:, :, 1])).repeat(32, axis=1)
        magnitudes = abs(effective) @ largest.T
    bound = (n_cols + 8) * EPS * magnitudes
    found = product(pool, PackedMatrix.pack(pool, type_name, raw, n_rows, n_cols), x)
    assert (abs(found - effective @ w.T) <= bound).all()

    before = random_weights(n, -(-n_rows // 16) * 16, seed=7)
    added = product(pool, PackedMatrix.pack(pool, type_name, raw, n_rows, n_cols), x, before)
    assert added.tobytes() == (before[:, :n_rows] + found).tobytes()


@pytest.mark.parametrize("type_name", WEIGHT_TYPES)
def test_one_result_whatever_computes_it(type_name):
    """Every ISA, thread count and number of tokens per call gives the same bytes."""
    n_rows, n_cols, n = 200, 160, 37
    raw = file_bytes(type_name, random_weights(n_rows, n_cols))
    matrix = PackedMatrix.pack(ThreadPool(1), type_name, raw, n_rows, n_cols)
    x = random_weights(n, n_cols, seed=1)
    whole = on_every_isa(lambda: product(ThreadPool(1), matrix, x).tobytes())
    threads = {n: product(ThreadPool(n), matrix, x).tobytes() for n in (2, 3, 8)}
    pool = ThreadPool(2)
    chunks = {
        f"chunks of {size}": b"".join(product(pool, matrix, x[i : i + size]).tobytes() for i in range(0, n, size))
        for size in (1, 2, 3, 5, 16)
    }
    assert_one_result({**whole, **threads, **chunks})


@pytest.mark.parametrize("type_name", BLOCKED)
def test_infinite_activations_stay_in_their_row(pool, type_name):
    raw = file_bytes(type_name, random_weights(20, 64))
    matrix = PackedMatrix.pack(pool, type_name, raw, 20, 64)
    x = random_weights(3, 64)
    expected = product(pool, matrix, x)
    x[1, 5] = np.inf
    found = product(pool, matrix, x)
    assert np.isnan(found[1]).all()
    assert found[[0, 2]].tobytes() == expected[[0, 2]].tobytes()
