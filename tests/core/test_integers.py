"""Where pages, counts and ids are asked for, only integers are taken; what else comes is refused by name."""

import numpy as np
import pytest

from pagedkv import Arena, BadInput, PagedKVCache, PrefixIndex, SequenceFull
from pagedkv.core._kernels import ThreadPool
from pagedkv.core.check import check
from pagedkv.core.kvcache import tile_bytes

CALLS = {
    "n_pages": lambda w, x: Arena(x, 64),
    "page_bytes": lambda w, x: Arena(4, x),
    "max_pages of an arena": lambda w, x: Arena(1, 64, max_pages=x),
    "growth_pages": lambda w, x: Arena(1, 64, max_pages=4, growth_pages=x),
    "refcount": lambda w, x: w.arena.refcount(x),
    "page_state": lambda w, x: w.arena.page_state(x),
    "page": lambda w, x: w.arena.page(x),
    "reserve": lambda w, x: w.arena.reserve(x),
    "level": lambda w, x: w.arena.check(x),
    "level of check": lambda w, x: check(w.arena, x),
    "max_pages of a sequence": lambda w, x: w.arena.sequence(1, max_pages=x),
    "seq_id": lambda w, x: w.arena.sequence(x),
    "append_pages": lambda w, x: w.seq.append_pages(x),
    "share_page": lambda w, x: w.seq.share_page(x),
    "share_pages": lambda w, x: w.seq.share_pages([0, x]),
    "write_page": lambda w, x: w.seq.write_page(x),
    "truncate_pages": lambda w, x: w.seq.truncate_pages(x),
    "page_tokens": lambda w, x: PrefixIndex(w.arena, x),
    "seed": lambda w, x: PrefixIndex(w.arena, 4, seed=x),
    "entry of lookup": lambda w, x: PrefixIndex(w.arena, 4).lookup([0, x]),
    "entry of insert": lambda w, x: PrefixIndex(w.arena, 4).insert(w.seq, (0, x)),
    "entry of match": lambda w, x: PrefixIndex(w.arena, 4).match(w.arena.sequence(), iter([0, x])),
    "n_layers": lambda w, x: PagedKVCache(x, 1, 8, n_pages=1),
    "n_kv_heads": lambda w, x: PagedKVCache(1, x, 8, n_pages=1),
    "head_dim": lambda w, x: PagedKVCache(1, 1, x, n_pages=1),
    "n_pages of a cache": lambda w, x: PagedKVCache(1, 1, 8, n_pages=x),
    "max_pages of a cache": lambda w, x: PagedKVCache(1, 1, 8, n_pages=1, max_pages=x),
    "growth_pages of a cache": lambda w, x: PagedKVCache(1, 1, 8, n_pages=1, growth_pages=x),
    "threads": lambda w, x: PagedKVCache(1, 1, 8, n_pages=1, threads=x),
    "n_threads": lambda w, x: ThreadPool(x),
    "head_dim of a tile": lambda w, x: tile_bytes("f16", x, 16),
    "seq_id of a cache": lambda w, x: w.kv.sequence(x),
    "max_pages of a KVSequence": lambda w, x: w.kv.sequence(0, x),
    "extend": lambda w, x: w.tokens.extend(x),
    "truncate": lambda w, x: w.tokens.truncate(x),
    "truncate_pages of tokens": lambda w, x: w.tokens.truncate_pages(x),
    "share_prefix": lambda w, x: w.kv.sequence().share_prefix(w.tokens.page_table[:1], x),
    "layer of write_kv": lambda w, x: w.tokens.write_kv(x, 0, ROW, ROW),
    "start": lambda w, x: w.tokens.write_kv(0, x, ROW, ROW),
    "layer of gather": lambda w, x: w.tokens.gather(x),
    "layer of attend": lambda w, x: w.kv.attend(x, ROW, [w.tokens], [1]),
    "q_lens": lambda w, x: w.kv.attend(0, ROW, [w.tokens], [x]),
    "window": lambda w, x: w.kv.attend(0, ROW, [w.tokens], [1], window=x),
}
# Where None stands for something, and what 1 is not enough for.
OPTIONAL = {
    "max_pages of an arena", "growth_pages", "max_pages of a cache", "growth_pages of a cache", "threads", "n_threads",
    "max_pages of a KVSequence", "window",
}  # fmt: skip
SIXTEEN = {
    "page_tokens of a cache": lambda w, x: PagedKVCache(1, 1, 8, n_pages=1, page_tokens=x),
    "page_tokens of a tile": lambda w, x: tile_bytes("f16", 8, x),
}
ROW = np.zeros((1, 1, 8), np.float32)


def label(value):
    """What pytest calls a case: short, also for an int that has no repr."""
    return repr(value)[:20] if not isinstance(value, int) or abs(value) < 1 << 70 else f"{value.bit_length()} bits"


class Index:
    """An integer that is no int."""

    def __init__(self, value):
        self.value = value

    def __index__(self):
        return self.value


class World:
    def __init__(self):
        self.arena = Arena(8, 64)
        self.seq = self.arena.sequence(7)
        self.seq.append_pages(2)
        self.kv = PagedKVCache(2, 1, 8, n_pages=4, threads=1)
        self.tokens = self.kv.sequence()
        self.tokens.extend(20)

    def state(self):
        counts = [self.arena.refcount(i) for i in range(8)], self.arena.n_free, self.kv.n_free
        return self.seq.page_table, self.tokens.page_table, len(self.tokens), *counts


NONE = [
    1.0,
    0.5,
    "1",
    b"1",
    None,
    [1],
    float("nan"),
    True,
    False,
    1j,
    np.float32(1),
    np.array([1]),
    np.bool_(True),
    "x" * 999,
]


@pytest.mark.parametrize("value", NONE, ids=label)
@pytest.mark.parametrize("call", [*CALLS, *SIXTEEN])
def test_what_is_no_integer_is_refused(call, value):
    if value is None and call in OPTIONAL:
        return  # which mean: as many as there are
    world = World()
    before = world.state()
    with pytest.raises(BadInput, match=r"^\w[\w ]*: (entry 1: )?.* is not an integer$") as caught:
        (CALLS | SIXTEEN)[call](world, value)
    assert len(str(caught.value)) < 120
    assert world.state() == before and world.arena.check() == [] == world.kv.check()


@pytest.mark.parametrize("kind", [int, np.int64, np.uint8, np.array, Index], ids=lambda kind: kind.__name__)
@pytest.mark.parametrize("call", [*CALLS, *SIXTEEN])
def test_integers_of_all_kinds_are_taken(call, kind):
    (CALLS | SIXTEEN)[call](World(), kind(16 if call in SIXTEEN else 1))


@pytest.mark.parametrize("value", [-(1 << 63) - 1, 1 << 63, 1 << 64, -(10**5000), 10**5000], ids=label)
@pytest.mark.parametrize("call", [*CALLS, *SIXTEEN])
def test_what_fits_nowhere_is_refused_by_value_and_bound(call, value):
    if call == "seed" and 0 <= value < 1 << 64:
        return
    world = World()
    before = world.state()
    with pytest.raises((BadInput, SequenceFull)) as caught:
        (CALLS | SIXTEEN)[call](world, value)
    assert 10 < len(str(caught.value)) < 160
    assert world.state() == before


def test_a_failing_index_is_not_hidden():
    class Failing:
        def __index__(self):
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        Arena(1, 64).reserve(Failing())


REALS = {
    "scale": lambda w, x: w.kv.attend(0, ROW, [w.tokens], [1], scale=x),
    "softcap": lambda w, x: w.kv.attend(0, ROW, [w.tokens], [1], softcap=x),
}


@pytest.mark.parametrize("value", ["0.5", b"0.5", 1j, True, [0.5], np.array([0.5]), object()], ids=label)
@pytest.mark.parametrize("call", REALS)
def test_what_is_no_number_is_refused(call, value):
    with pytest.raises(BadInput, match=f"^{call}: .* is not a number$"):
        REALS[call](World(), value)


@pytest.mark.parametrize(
    "value", [1e39, -1e39, 10**400, 1e-50, -1e-39, float("inf"), float("nan"), 3.4028236e38], ids=label
)
def test_scales_that_float32_does_not_hold(value):
    with pytest.raises(BadInput, match=r"^scale: .* in \[2\*\*-126, 2\*\*128\)$"):
        REALS["scale"](World(), value)


@pytest.mark.parametrize(
    "value", [-1, -1e-9, 2.0**-11, 1000.1, 1e4, 1e8, -(10**400), float("inf"), float("nan")], ids=label
)
def test_soft_caps_that_lose_the_scores(value):
    with pytest.raises(BadInput, match=r"^softcap: .* outside \[2\*\*-10, 1000\]$"):
        REALS["softcap"](World(), value)


@pytest.mark.parametrize("value", [0, 1, np.float32(0.5), np.float64(30), np.int64(7), 2.0**-10, 1000, None])
def test_numbers_of_all_kinds_are_taken(value):
    for call in REALS.values():
        call(World(), value)
    REALS["scale"](World(), -1 if value is None else -value)


ARRAYS = {
    "k": lambda w, x: w.tokens.write_kv(0, 0, x, ROW),
    "v": lambda w, x: w.tokens.write_kv(0, 0, ROW, x),
    "q": lambda w, x: w.kv.attend(0, x, [w.tokens], [1]),
}


@pytest.mark.parametrize("dtype", ["complex64", "complex128", "bool", "U3", "S3", "object", "datetime64[s]"])
@pytest.mark.parametrize("call", ARRAYS)
def test_arrays_of_no_real_numbers_are_refused(call, dtype):
    with pytest.raises(BadInput, match=f"^{call}: an array of .* is not one of real numbers$"):
        ARRAYS[call](World(), np.zeros(ROW.shape, dtype))


@pytest.mark.parametrize("dtype", ["float16", "float64", "longdouble", "int8", "uint64", ">f4"])
@pytest.mark.parametrize("call", ARRAYS)
def test_arrays_of_real_numbers_are_taken(call, dtype):
    ARRAYS[call](World(), np.zeros(ROW.shape, dtype))
    ARRAYS[call](World(), np.zeros(ROW.shape, dtype).tolist())
