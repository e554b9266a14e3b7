"""The page pool: creation, counts, growth, reserve, trim, views, closing."""

import numpy as np
import pytest

from pagedkv.core.arena import Arena
from pagedkv.core.errors import BadInput, NotFound, PagedKVError, PoolExhausted, SequenceFull, Tampered, Verdict


def test_fresh_pool_is_all_free():
    arena = Arena(5, 100)
    assert (arena.n_pages, arena.n_free, arena.n_in_use, arena.n_cached) == (5, 5, 0, 0)
    assert (arena.page_bytes, arena.page_stride, arena.max_pages, arena.guard) == (100, 128, 5, False)
    assert [arena.refcount(i) for i in range(5)] == [0] * 5
    assert [arena.page_state(i) for i in range(5)] == ["FREE"] * 5
    assert arena.is_valid()


@pytest.mark.parametrize(
    ("page_bytes", "guard", "stride"),
    [
        (1, False, 64),
        (64, False, 64),
        (65, False, 128),
        (56, True, 64),
        (57, True, 128),
        (64, True, 128),
        (4096, False, 4096),
    ],
)
def test_page_stride(page_bytes, guard, stride):
    arena = Arena(2, page_bytes, guard=guard)
    assert arena.page_stride == stride


@pytest.mark.parametrize("guard", [False, True])
def test_pages_are_aligned_and_disjoint(guard):
    arena = Arena(7, 90, guard=guard)
    seq = arena.sequence()
    views = [np.asarray(arena.page(i)) for i in seq.append_pages(7)]
    assert [v.nbytes for v in views] == [90] * 7
    starts = [v.ctypes.data for v in views]
    assert all(s % 64 == 0 for s in starts)
    assert set(np.diff(starts)) == {arena.page_stride}
    for i, v in enumerate(views):
        v[:] = i + 1
    assert [set(v.tolist()) for v in views] == [{i + 1} for i in range(7)]
    assert arena.is_valid()


@pytest.mark.parametrize(
    ("args", "kwargs", "named"),
    [
        ((0, 64), {}, "n_pages: 0"),
        ((-1, 64), {}, "n_pages: -1"),
        ((1 << 40, 64), {}, "n_pages: 1099511627776"),
        ((1, 0), {}, "page_bytes: 0"),
        ((1, -5), {}, "page_bytes: -5"),
        ((1, 1 << 60), {}, "page_bytes"),
        ((8, 64), {"max_pages": 7}, "max_pages: 7"),
        ((8, 64), {"growth_pages": 0}, "growth_pages: 0"),
        ((1 << 20, 1 << 40), {}, "max_pages \\* page_bytes"),
    ],
)
def test_sizes_out_of_range(args, kwargs, named):
    with pytest.raises(BadInput, match=named):
        Arena(*args, **kwargs)


def test_second_init_is_refused():
    arena = Arena(1, 1)
    with pytest.raises(BadInput):
        arena.__init__(2, 2)
    assert arena.n_pages == 1


def test_without_init_nothing_works_and_nothing_crashes():
    arena = Arena.__new__(Arena)
    assert not arena.is_valid()
    assert arena.address == 0
    for call in (
        lambda: arena.n_pages,
        lambda: arena.page(0),
        lambda: arena.refcount(0),
        arena.trim,
        arena.sequence,
        lambda: arena.reserve(1),
        arena.stats,
    ):
        with pytest.raises(Tampered):
            call()


@pytest.mark.parametrize("i", [-1, 4, 1 << 31, 1 << 70, -(1 << 70)])
def test_page_index_out_of_range(i):
    arena = Arena(4, 64)
    for call in (arena.page, arena.refcount, arena.page_state):
        with pytest.raises(BadInput, match=rf"page index {i} is outside \[0, 4\)"):
            call(i)


def test_growth_in_steps_keeps_pages_in_place():
    arena = Arena(2, 64, max_pages=9, growth_pages=3)
    seq = arena.sequence()
    addresses, sizes = [], []
    for _ in range(9):
        i = seq.append_page()
        addresses.append(np.asarray(arena.page(i)).ctypes.data)
        sizes.append(arena.n_pages)
    assert sizes == [2, 2, 5, 5, 5, 8, 8, 8, 9]
    assert [np.asarray(arena.page(i)).ctypes.data for i in seq.page_table] == addresses
    with pytest.raises(PoolExhausted, match="9 of max_pages=9"):
        seq.append_page()
    assert arena.stats()["num_grown"] == 3


def test_free_pages_are_taken_before_growing():
    arena = Arena(2, 64, max_pages=4, growth_pages=1)
    seq = arena.sequence()
    for _ in range(5):
        seq.append_pages(2)
        seq.free()
    assert arena.n_pages == 2


def test_reserve_commits_ahead_or_changes_nothing():
    arena = Arena(2, 64, max_pages=10)
    seq = arena.sequence()
    seq.append_page()
    arena.reserve(1)
    assert arena.n_pages == 2
    arena.reserve(6)
    assert (arena.n_pages, arena.n_free) == (7, 6)
    with pytest.raises(PoolExhausted, match="reserve: 10"):
        arena.reserve(10)
    assert (arena.n_pages, arena.n_free) == (7, 6)
    with pytest.raises(BadInput, match="reserve: -1"):
        arena.reserve(-1)


def resident_bytes():
    with open("/proc/self/statm") as f:
        return int(f.read().split()[1]) * 4096


def test_trim_gives_memory_back_and_spares_pages_in_use():
    arena = Arena(64, 1 << 20)
    seq, kept = arena.sequence(max_pages=64), arena.sequence()
    kept.append_page()
    for i in seq.append_pages(63):
        arena.page(i)[:] = b"\x55" * (1 << 20)
    arena.page(kept.page_table[0])[:] = b"\x66" * (1 << 20)
    seq.free()
    before = resident_bytes()
    handed_back = arena.trim()
    assert handed_back == 63 << 20
    assert before - resident_bytes() > 50 << 20
    assert bytes(arena.page(kept.page_table[0])) == b"\x66" * (1 << 20)
    assert bytes(arena.page(seq.append_page())) == bytes(1 << 20)


def test_trim_counts_what_was_in_memory():
    arena = Arena(64, 1 << 20, max_pages=65)
    assert arena.trim() == 0  # committed, and nothing of it touched
    seq = arena.sequence(max_pages=65)
    arena.page(seq.append_pages(3)[1])[: 1 << 19] = b"\x55" * (1 << 19)
    assert arena.trim() == 0
    seq.free()
    handed_back = arena.trim()
    assert 1 << 19 <= handed_back <= 4 << 20  # more where the system gave a huge page
    assert [arena.trim(), arena.trim()] == [0, 0]
    seq.append_pages(65)
    assert arena.trim() == 0 and arena.check() == []


def test_reserved_address_space_costs_no_memory():
    before = resident_bytes()
    arena = Arena(1, 1 << 20, max_pages=1 << 20)
    assert arena.max_pages == 1 << 20
    assert resident_bytes() - before < 8 << 20


def test_page_view_is_writable_and_holds_the_arena_open():
    arena = Arena(1, 10)
    i = arena.sequence().append_page()
    view = arena.page(i)
    assert (view.nbytes, view.readonly, view.format) == (10, False, "B")
    view[3] = 7
    assert arena.page(i)[3] == 7
    with pytest.raises(BadInput, match="1 page views"):
        arena.close()
    assert arena.is_valid()
    view.release()
    arena.close()


def test_view_outlives_the_name_of_the_arena():
    arena = Arena(1, 8)
    seq = arena.sequence()
    view = arena.page(seq.append_page())
    del arena
    view[:] = b"abcdefgh"
    assert bytes(view) == b"abcdefgh"


def test_close_is_idempotent_and_final():
    arena = Arena(3, 64)
    seq = arena.sequence()
    seq.append_page()
    arena.close()
    arena.close()
    assert not arena.is_valid()
    for call in (
        lambda: arena.n_pages,
        lambda: arena.n_free,
        lambda: arena.page(0),
        lambda: arena.refcount(0),
        lambda: arena.reserve(1),
        arena.trim,
        arena.sequence,
        arena.stats,
    ):
        with pytest.raises(Tampered, match="arena is closed"):
            call()


def test_context_manager_closes():
    with Arena(1, 1) as arena:
        assert arena.is_valid()
    assert not arena.is_valid()


def test_verdict_numbers_and_exception_classes():
    assert [v.name for v in sorted(Verdict)] == ["OK", "BAD_INPUT", "POOL_EXHAUSTED", "SEQ_FULL", "TAMPER", "NOT_FOUND"]
    assert [int(v) for v in sorted(Verdict)] == list(range(6))
    for cls, number in ((BadInput, 1), (PoolExhausted, 2), (SequenceFull, 3), (Tampered, 4), (NotFound, 5)):
        assert issubclass(cls, PagedKVError)
        assert cls.verdict == number
    assert issubclass(BadInput, ValueError)


def test_subclassing():
    class Counting(Arena):
        def __init__(self, n):
            super().__init__(n, 32)
            self.made = 0

    arena = Counting(3)
    assert (arena.n_pages, arena.made) == (3, 0)
