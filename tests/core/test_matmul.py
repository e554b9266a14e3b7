"""Packed weights against the gguf package, products against float64, and one result on every ISA and thread count."""

import itertools
import os

import gguf
import numpy as np
import pytest
from isas import assert_one_result, on_every_isa

from pagedkv.core._kernels import ThreadPool
from pagedkv.core._testing_threads import multiply, shares
from pagedkv.core.files import read_bytes
from pagedkv.core.matmul import WEIGHT_TYPES, PackedMatrix
from pagedkv.core.memory import WeightMemory

FLOATS = ("F32", "F16", "BF16")
BLOCKED = tuple(name for name in WEIGHT_TYPES if name not in FLOATS)
HALVES = {  # byte offsets of the scale, and of the minimum where there is one, in a block of the file
    "Q4_0": [0], "Q5_0": [0], "Q8_0": [0], "Q4_1": [0, 2], "Q5_1": [0, 2],
    "Q2_K": [80, 82], "Q3_K": [108], "Q4_K": [0, 2], "Q5_K": [0, 2], "Q6_K": [208],
}  # fmt: skip
EPS = 2.0**-24  # rounding of one float32 operation, relative


def block_of(type_name):
    """Columns and bytes of a block."""
    return gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[type_name]]


def shapes(type_name):
    block = block_of(type_name)[0]
    return [(1, block), (15, 2 * block), (16, block), (33, 3 * block)] if block > 1 else [(1, 1), (15, 7), (33, 50)]


CASES = [(name, *shape) for name in WEIGHT_TYPES for shape in shapes(name)]


@pytest.fixture(scope="module")
def pool():
    return ThreadPool(2)


def random_floats(n_rows, n_cols, seed=0):
    rng = np.random.default_rng(seed)
    return (rng.standard_normal((n_rows, n_cols)) * 10.0 ** rng.integers(-3, 3, (n_rows, 1))).astype(np.float32)


def random_file(type_name, n_rows, n_cols, seed=0):
    """Rows in the file's layout: floats converted by the gguf package, or blocks of random bits under finite scales."""
    if type_name in FLOATS:
        return gguf.quants.quantize(random_floats(n_rows, n_cols, seed), gguf.GGMLQuantizationType[type_name])
    rng = np.random.default_rng(seed)
    block, size = block_of(type_name)
    raw = rng.integers(0, 256, (n_rows, n_cols // block, size), dtype=np.uint8)
    for at in HALVES[type_name]:
        raw[:, :, at : at + 2] = (rng.standard_normal((*raw.shape[:2], 1)) * 0.1).astype(np.float16).view(np.uint8)
    return raw.reshape(n_rows, -1)


def parts(type_name, raw):
    """The products whose sum, rounded once, is the weight: scale * integer, minus the minimum; exact in float64."""
    kind = gguf.GGMLQuantizationType[type_name]
    if len(HALVES.get(type_name, [])) < 2:
        return gguf.quants.dequantize(raw, kind).astype(np.float64), 0.0
    found = []
    for at in reversed(HALVES[type_name]):
        blocks = raw.reshape(len(raw), -1, block_of(type_name)[1]).copy()
        blocks[:, :, at : at + 2] = 0
        found.append(gguf.quants.dequantize(blocks.reshape(raw.shape), kind).astype(np.float64))
    return found


def weights(type_name, raw):
    scaled, minimum = parts(type_name, raw)
    return (scaled + minimum).astype(np.float32)


def rows_of(matrix):
    return np.array([np.frombuffer(matrix.row(i), np.float32) for i in range(matrix.shape[0])])


@pytest.mark.parametrize(("type_name", "n_rows", "n_cols"), CASES)
def test_rows_are_those_of_the_file(pool, type_name, n_rows, n_cols):
    for seed in range(4):
        raw = random_file(type_name, n_rows, n_cols, seed)
        matrix = PackedMatrix.pack(pool, type_name, raw, n_rows, n_cols)
        assert matrix.shape == (n_rows, n_cols)
        assert matrix.type_name == type_name
        found, expected = rows_of(matrix), weights(type_name, raw)
        np.testing.assert_array_equal(found, expected, strict=True)
        assert type_name in BLOCKED or found.tobytes() == expected.tobytes()  # floats keep the sign of zero


@pytest.mark.parametrize("type_name", ["F32", "F16", "BF16", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0"])
def test_quantised_weights_come_back_near_the_original(pool, type_name):
    """Through the gguf package's quantiser: within a step of 2 / levels for values in [-1, 1]."""
    levels = {"F32": 2**30, "F16": 1024, "BF16": 256, "Q4_0": 15, "Q4_1": 15, "Q5_0": 31, "Q5_1": 31, "Q8_0": 254}
    original = np.random.default_rng(2).uniform(-1, 1, (20, 64)).astype(np.float32)
    raw = gguf.quants.quantize(original, gguf.GGMLQuantizationType[type_name])
    assert abs(rows_of(PackedMatrix.pack(pool, type_name, raw, 20, 64)) - original).max() <= 2 / levels[type_name]


@pytest.mark.parametrize("type_name", WEIGHT_TYPES)
def test_row_order(pool, type_name):
    n_rows, n_cols = 50, 256
    raw = random_file(type_name, n_rows, n_cols)
    straight = rows_of(PackedMatrix.pack(pool, type_name, raw, n_rows, n_cols))
    order = np.random.default_rng(1).permutation(n_rows)
    order[3] = order[4]  # a row may come twice
    shuffled = rows_of(PackedMatrix.pack(pool, type_name, raw, n_rows, n_cols, order))
    assert shuffled.tobytes() == straight[order].tobytes()


@pytest.mark.parametrize("type_name", WEIGHT_TYPES)
def test_who_packs_does_not_matter(type_name):
    raw = random_file(type_name, 200, 256)
    assert_one_result(
        {n: rows_of(PackedMatrix.pack(ThreadPool(n), type_name, raw, 200, 256)).tobytes() for n in (1, 2, 5)}
    )


def test_the_source_is_copied_and_may_be_read_only(pool):
    raw = bytearray(random_file("Q8_0", 16, 32).tobytes())
    matrix = PackedMatrix.pack(pool, "Q8_0", memoryview(bytes(raw)), 16, 32)
    expected = rows_of(matrix).copy()
    other = PackedMatrix.pack(pool, "Q8_0", raw, 16, 32)
    raw[:] = bytes(len(raw))
    assert rows_of(other).tobytes() == expected.tobytes()


def mapped_bytes():
    """Bytes of address space of this process."""
    with open("/proc/self/statm") as f:
        return int(f.read().split()[0]) * os.sysconf("SC_PAGE_SIZE")


def test_matrices_that_share_memory_hold_what_they_hold_alone(pool):
    """Small ones, one of a size of its own, and more than a slab of them; the rest keeps its rows when others die."""
    memory = WeightMemory()
    shapes = [(100 + i, 512) for i in range(1000)] + [(10_000, 512)] + [(17, 512)] * 3
    rows = [random_file("Q8_0", *shape, seed=i % 7) for i, shape in enumerate(shapes)]
    matrices = [
        PackedMatrix.pack(pool, "Q8_0", raw, *shape, memory=memory) for raw, shape in zip(rows, shapes, strict=True)
    ]
    assert sum(m.nbytes for m in matrices) > 3 * (16 << 20)
    del memory, matrices[::2], rows[::2], shapes[::2]
    for matrix, raw, shape in zip(matrices, rows, shapes, strict=True):
        assert rows_of(matrix).tobytes() == rows_of(PackedMatrix.pack(pool, "Q8_0", raw, *shape)).tobytes()


def test_shared_memory_is_released_with_the_last_matrix(pool):
    raw = random_file("Q8_0", 1000, 512)
    grown = []
    for _ in range(20):
        before, memory = mapped_bytes(), WeightMemory()
        matrices = [PackedMatrix.pack(pool, "Q8_0", raw, 1000, 512, memory=memory) for _ in range(100)]
        assert mapped_bytes() - before >= sum(m.nbytes for m in matrices)
        last = matrices[-1]
        del memory, matrices
        assert mapped_bytes() - before < 3 * (16 << 20)
        del last
        grown.append(mapped_bytes() - before)
    assert sum(grown) < 2 * (16 << 20)


def test_nbytes_is_what_the_types_take(pool):
    """Bits per weight of the panel layout, rows padded to 16."""
    bits = {
        "F32": 32, "F16": 16, "BF16": 16, "Q4_0": 4.5, "Q4_1": 5, "Q5_0": 5.5, "Q5_1": 6, "Q8_0": 8.5,
        "Q2_K": 2.625, "Q3_K": 3.5625, "Q4_K": 4.625, "Q5_K": 5.625, "Q6_K": 6.5625,
    }  # fmt: skip
    for type_name in WEIGHT_TYPES:
        matrix = PackedMatrix.pack(pool, type_name, random_file(type_name, 100, 512), 100, 512)
        assert matrix.nbytes == 112 * 512 * bits[type_name] / 8


BAD = [
    (("Q8_K", b"", 16, 256), f"weight type: Q8_K cannot be packed; supported: {', '.join(WEIGHT_TYPES)}"),
    (("Q4_1", b"", 0, 32), "weight shape: (0, 32) is outside [1, 2147483648)"),
    (("Q4_1", b"", 1, 0), "weight shape: (1, 0) is outside [1, 2147483648)"),
    (("F32", b"", 1 << 31, 1), "weight shape: (2147483648, 1) is outside [1, 2147483648)"),
    (("F32", b"", -1, 1), "weight shape: (-1, 1) is outside [1, 2147483648)"),
    (("Q8_0", bytes(34), 1, 33), "weight columns: 33 is no multiple of Q8_0's block of 32"),
    (("Q4_K", bytes(144), 1, 128), "weight columns: 128 is no multiple of Q4_K's block of 256"),
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

TOKENS = (1, 2, 3, 7, 16, 37)
FORMATS = ("int8", "int12")


def product(pool, matrix, x, out=None, activations="int8"):
    n_padded = -(-matrix.shape[0] // 16) * 16
    result = np.full((len(x), n_padded), np.nan, np.float32) if out is None else out.copy()
    multiply(pool, matrix, x, result, out is not None, activations == "int12")
    return result[:, : matrix.shape[0]]


def quantised(x, activations):
    """What an activation format makes of rows: one scale per group, amax/127 or amax/2039, round to nearest even."""
    group, levels = {"int8": (32, np.float32(127)), "int12": (256, np.float32(2039))}[activations]
    result = np.empty(x.shape)
    for start in range(0, x.shape[1], group):
        part = x[:, start : start + group]
        amax = abs(part).max(axis=1, keepdims=True)
        with np.errstate(divide="ignore", invalid="ignore"):
            q = np.where(amax == 0, np.float32(0), np.rint(part * (levels / amax)))
        scale = (amax * (1 / levels)).astype(np.float64)
        result[:, start : start + group] = q * scale
        assert (abs(result[:, start : start + group] - part) <= scale * (0.5 + levels * 2.0**-22)).all()
    return result


@pytest.mark.parametrize("activations", FORMATS)
@pytest.mark.parametrize("type_name", WEIGHT_TYPES)
def test_product_against_float64(pool, type_name, activations):
    """Error of a chain of k fused steps: at most k roundings of partial sums, each below the sum of magnitudes."""
    for n, n_cols in itertools.product(TOKENS, (71, 5) if type_name in FLOATS else (block_of(type_name)[0], 512)):
        n_rows = 40
        raw = random_file(type_name, n_rows, n_cols, n)
        scaled, minimum = parts(type_name, raw)
        x = random_floats(n, n_cols, seed=100 + n)
        x[0, : min(n_cols // 2, 256)] = 0
        effective = quantised(x, activations) if type_name in BLOCKED else x.astype(np.float64)
        bound = (n_cols + 8) * EPS * abs(effective) @ (abs(scaled) + abs(minimum)).T
        matrix = PackedMatrix.pack(pool, type_name, raw, n_rows, n_cols)
        found = product(pool, matrix, x, activations=activations)
        assert (abs(found - effective @ (scaled + minimum).T) <= bound).all()
        before = random_floats(n, -(-n_rows // 16) * 16, seed=7)
        added = product(pool, matrix, x, before, activations)
        assert added.tobytes() == (before[:, :n_rows] + found).tobytes()


@pytest.mark.parametrize("activations", FORMATS)
@pytest.mark.parametrize("type_name", WEIGHT_TYPES)
def test_one_result_whatever_computes_it(type_name, activations):
    """Every ISA, thread count and number of tokens per call gives the same bytes."""
    n_rows, n_cols, n = 200, 256, 37
    matrix = PackedMatrix.pack(ThreadPool(1), type_name, random_file(type_name, n_rows, n_cols), n_rows, n_cols)
    x = random_floats(n, n_cols, seed=1)

    def compute(rows=x, n_threads=1):
        return product(ThreadPool(n_threads), matrix, rows, activations=activations).tobytes()

    whole = on_every_isa(compute)
    threads = {n_threads: compute(n_threads=n_threads) for n_threads in (2, 3, 8)}
    chunks = {
        f"chunks of {size}": b"".join(compute(x[i : i + size], 2) for i in range(0, n, size))
        for size in (1, 2, 3, 5, 16)
    }
    assert_one_result({**whole, **threads, **chunks})


@pytest.mark.parametrize("activations", FORMATS)
@pytest.mark.parametrize("type_name", BLOCKED)
def test_infinite_activations_stay_in_their_row(pool, type_name, activations):
    matrix = PackedMatrix.pack(pool, type_name, random_file(type_name, 20, 256), 20, 256)
    x = random_floats(3, 256)
    expected = product(pool, matrix, x, activations=activations)
    x[1, 5] = np.inf
    found = product(pool, matrix, x, activations=activations)
    assert np.isnan(found[1]).all()
    assert found[[0, 2]].tobytes() == expected[[0, 2]].tobytes()


# --- from a file ------------------------------------------------------------------------------------------------------


@pytest.fixture
def file_of(tmp_path):
    """A function that writes bytes behind some others and gives (file descriptor, offset)."""
    opened = []

    def write(raw, before=77):
        path = tmp_path / f"{len(opened)}"
        path.write_bytes(b"?" * before + raw.tobytes() + b"?" * 40)
        opened.append(os.open(path, os.O_RDWR))
        return opened[-1], before

    yield write
    for fd in opened:
        os.close(fd)


@pytest.mark.parametrize("n_threads", [1, 2, 5])
@pytest.mark.parametrize("type_name", WEIGHT_TYPES)
def test_a_matrix_read_is_the_matrix_packed(file_of, type_name, n_threads):
    """Wide ones take more than a slice for a panel, the last panel is not full, rows come in any order."""
    pool, block = ThreadPool(n_threads), block_of(type_name)[0]
    reverse, runs = np.arange(35)[::-1].copy(), np.roll(np.arange(35), 9)
    for n_cols, orders in ((5 * block, [None, reverse, runs]), (1 << 15, [None])):
        raw = random_file(type_name, 35, n_cols)
        fd, offset = file_of(raw)
        for order in orders:
            expected = rows_of(PackedMatrix.pack(pool, type_name, raw, 35, n_cols, order))
            found = PackedMatrix.read(pool, type_name, fd, offset, 35, n_cols, order)
            assert rows_of(found).tobytes() == expected.tobytes()


def test_a_matrix_cut_short_says_where_the_file_ends(pool, file_of):
    raw = random_file("Q8_0", 200, 64)
    fd, offset = file_of(raw)
    for end in (offset + raw.nbytes - 1, offset + raw.nbytes // 2, offset + 1, offset, 10, 0):
        os.ftruncate(fd, end)
        for order in (None, np.arange(200)):
            with pytest.raises(EOFError) as caught:
                PackedMatrix.read(ThreadPool(1), "Q8_0", fd, offset, 200, 64, order)
            # a read that begins behind the end finds nothing there
            assert caught.value.args == (max(end, offset),)
            with pytest.raises(EOFError):
                PackedMatrix.read(pool, "Q8_0", fd, offset, 200, 64, order)


def test_reads_that_the_system_refuses(pool, tmp_path):
    folder = os.open(tmp_path, os.O_RDONLY)
    try:
        with pytest.raises(IsADirectoryError):
            PackedMatrix.read(pool, "F32", folder, 0, 20, 4)
        with pytest.raises(IsADirectoryError):
            read_bytes(folder, 10, 0)
    finally:
        os.close(folder)
    with pytest.raises(OSError, match="Bad file descriptor"):
        PackedMatrix.read(pool, "F32", -1, 0, 20, 4)
    with pytest.raises(ValueError, match="offset: -1 is negative"):
        PackedMatrix.read(pool, "F32", 0, -1, 20, 4)
    with pytest.raises(ValueError, match="read: -1 bytes at offset 0"):
        read_bytes(0, -1, 0)


def test_bytes_are_read_at_their_place(file_of):
    raw = random_file("Q8_0", 20, 64)
    fd, offset = file_of(raw)
    assert read_bytes(fd, raw.nbytes, offset) == raw.tobytes() and read_bytes(fd, 0, 5) == b""
    end = offset + raw.nbytes + 40
    for at, n in ((end - 1, 2), (end, 1), (0, end + 1)):
        with pytest.raises(EOFError) as caught:
            read_bytes(fd, n, at)
        assert caught.value.args == (end,)


# --- who computes what ---------------------------------------------------------------------------------------------

SIZES = (1, 2, 3, 7, 12, 36, 48, 97, 512, 3072)


def covered(pieces, n):
    """How often each of [0, n) is in a piece of any thread."""
    counts = np.zeros(n, np.int64)
    for start, stop, _ in itertools.chain.from_iterable(pieces):
        assert 0 <= start < stop <= n
        counts[start:stop] += 1
    return counts


@pytest.mark.parametrize("n_threads", [1, 2, 3, 8])
@pytest.mark.parametrize("step", [1, 2])
def test_threads_share_everything_once(n_threads, step):
    pool = ThreadPool(n_threads)
    for n in SIZES:
        for _ in range(20):
            pieces = shares(pool, n, step)
            assert (covered(pieces, n) == 1).all()
            for start, stop, n_next in itertools.chain.from_iterable(pieces):
                assert start % step == 0 and (stop % step == 0 or stop == n)
                assert 0 <= n_next <= n - stop


@pytest.mark.parametrize("n_threads", [2, 3, 8])
@pytest.mark.parametrize("held", [0, 1])
def test_others_take_what_a_slow_thread_leaves(n_threads, held):
    pool = ThreadPool(n_threads)
    for n in SIZES:
        pieces = shares(pool, n, 2, held)
        assert (covered(pieces, n) == 1).all()
        assert len(pieces[held]) <= 1, "all that it had left is taken"


def test_a_thread_is_told_what_it_reads_next():
    """One alone goes through everything in order, half of the rest at a time."""
    assert shares(ThreadPool(1), 20, 2) == [[(0, 10, 10), (10, 14, 6), (14, 16, 4), (16, 18, 2), (18, 20, 0)]]
