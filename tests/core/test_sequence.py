"""One sequence's page table: append, share, snapshot, copy on write, truncate, free."""

import gc

import pytest

from pagedkv.core.arena import Arena
from pagedkv.core.errors import BadInput, NotFound, PoolExhausted, SequenceFull, Tampered
from pagedkv.core.sequence import Sequence


def fill(arena, i, byte):
    arena.page(i)[:] = bytes([byte]) * arena.page_bytes


def test_append_hands_out_pages_in_order():
    arena = Arena(4, 64)
    seq = arena.sequence(7)
    assert [seq.append_page() for _ in range(3)] == [0, 1, 2]
    assert (seq.seq_id, seq.n_pages, seq.page_table, seq.max_pages) == (7, 3, [0, 1, 2], 64)
    assert (arena.n_free, arena.n_in_use) == (1, 3)
    assert [arena.page_state(i) for i in range(4)] == ["IN_USE"] * 3 + ["FREE"]


def test_pool_exhausted_changes_nothing():
    arena = Arena(2, 64)
    seq = arena.sequence()
    seq.append_pages(2)
    with pytest.raises(PoolExhausted, match="2 of max_pages=2 in use"):
        seq.append_page()
    assert (seq.page_table, arena.n_free, arena.n_in_use) == ([0, 1], 0, 2)


def test_sequence_full_comes_before_pool_exhausted():
    arena = Arena(2, 64)
    seq = arena.sequence(3, max_pages=2)
    seq.append_pages(2)
    with pytest.raises(SequenceFull, match=r"sequence 3.*max_pages=2"):
        seq.append_page()
    with pytest.raises(SequenceFull):
        seq.share_page(0)
    with pytest.raises(SequenceFull):
        seq.share_page(99)


@pytest.mark.parametrize(
    ("n", "error"), [(-1, BadInput), (5, PoolExhausted), (7, SequenceFull), (1 << 70, SequenceFull)]
)
def test_append_pages_is_all_or_nothing(n, error):
    arena = Arena(4, 64)
    seq = arena.sequence(max_pages=6)
    with pytest.raises(error):
        seq.append_pages(n)
    assert (seq.n_pages, arena.n_free) == (0, 4)
    assert seq.append_pages(0) == []
    assert seq.append_pages(4) == [0, 1, 2, 3]


def test_append_pages_grows_by_what_is_needed():
    arena = Arena(1, 64, max_pages=20, growth_pages=2)
    seq = arena.sequence()
    assert seq.append_pages(9) == list(range(9))
    assert arena.n_pages == 9
    with pytest.raises(PoolExhausted):
        seq.append_pages(12)
    assert (seq.n_pages, arena.n_in_use) == (9, 9)


@pytest.mark.parametrize(("max_pages", "seq_id"), [(0, 0), (-1, 0), (1 << 40, 0), (1, 1 << 63), (1, -(1 << 63) - 1)])
def test_creation_out_of_range(max_pages, seq_id):
    with pytest.raises(BadInput):
        Arena(1, 64).sequence(seq_id, max_pages)


def test_share_counts_holders_and_returns_the_index():
    arena = Arena(3, 64)
    a, b = arena.sequence(1), arena.sequence(2)
    a.append_pages(2)
    assert b.share_page(1) == 1
    assert b.share_page(1) == 1
    assert (b.page_table, arena.refcount(1), arena.refcount(0)) == ([1, 1], 3, 1)
    assert (arena.n_in_use, arena.n_free) == (2, 1)


@pytest.mark.parametrize(("i", "error"), [(-1, BadInput), (3, BadInput), (1 << 80, BadInput), (2, NotFound)])
def test_share_refuses(i, error):
    arena = Arena(3, 64)
    seq = arena.sequence()
    seq.append_pages(2)
    with pytest.raises(error, match=str(i)):
        seq.share_page(i)
    assert seq.page_table == [0, 1]


@pytest.mark.parametrize(
    ("pages", "error"), [([0, 1, 2], NotFound), ([0, 9], BadInput), ([0, -1], BadInput), ([0] * 5, SequenceFull)]
)
def test_share_pages_is_all_or_nothing(pages, error):
    arena = Arena(4, 64)
    a, b = arena.sequence(), arena.sequence(max_pages=4)
    a.append_pages(2)
    with pytest.raises(error):
        b.share_pages(pages)
    assert (b.n_pages, arena.refcount(0), arena.refcount(1)) == (0, 1, 1)
    b.share_pages(iter([1, 0]))
    assert b.page_table == [1, 0]
    b.share_pages([])
    assert b.n_pages == 2


def test_page_returns_to_the_pool_with_its_last_holder():
    arena = Arena(2, 64)
    a, b = arena.sequence(), arena.sequence()
    a.append_page()
    b.share_page(0)
    a.free()
    assert (arena.refcount(0), arena.n_in_use) == (1, 1)
    b.free()
    assert (arena.refcount(0), arena.n_in_use, arena.page_state(0)) == (0, 0, "FREE")


def test_free_is_idempotent_and_the_sequence_usable_again():
    arena = Arena(2, 64)
    seq = arena.sequence()
    seq.append_pages(2)
    seq.free()
    seq.free()
    assert (seq.n_pages, arena.n_free) == (0, 2)
    seq.append_pages(2)
    assert arena.n_free == 0


def test_last_page_is_the_first_to_be_reused():
    arena = Arena(6, 64)
    a, b = arena.sequence(), arena.sequence()
    a.append_pages(4)
    a.free()
    assert b.append_pages(6) == [3, 2, 1, 0, 4, 5]
    b.truncate_pages(2)
    assert a.append_pages(4) == [5, 4, 0, 1]


def test_truncate():
    arena = Arena(4, 64)
    seq = arena.sequence()
    seq.append_pages(4)
    for n in (-1, 5, 1 << 80):
        with pytest.raises(BadInput, match=rf"{n} is outside \[0, 4\]"):
            seq.truncate_pages(n)
    seq.truncate_pages(4)
    assert seq.n_pages == 4
    seq.truncate_pages(1)
    assert (seq.page_table, arena.n_free) == ([0], 3)


def test_snapshot_shares_every_page_and_lives_alone():
    arena = Arena(4, 64)
    seq = arena.sequence(5, max_pages=9)
    seq.append_pages(3)
    snap = seq.snapshot()
    assert (snap.page_table, snap.seq_id, snap.max_pages) == ([0, 1, 2], 5, 9)
    assert [arena.refcount(i) for i in range(4)] == [2, 2, 2, 0]
    seq.free()
    assert (snap.page_table, arena.n_in_use) == ([0, 1, 2], 3)
    assert snap.append_page() == 3


def test_write_page_alone_copies_nothing():
    arena = Arena(2, 64)
    seq = arena.sequence()
    seq.append_page()
    assert seq.write_page(0) == 0
    assert (arena.stats()["num_copied"], arena.n_in_use) == (0, 1)


def test_write_page_copies_once_per_diverging_holder():
    arena = Arena(6, 100)
    a = arena.sequence()
    a.append_pages(2)
    fill(arena, 0, 1)
    fill(arena, 1, 2)
    b, c = a.snapshot(), a.snapshot()
    new = b.write_page(1)
    assert new == 2
    assert bytes(arena.page(2)) == b"\x02" * 100
    fill(arena, 2, 9)
    assert bytes(arena.page(1)) == b"\x02" * 100
    assert (a.page_table, b.page_table, c.page_table) == ([0, 1], [0, 2], [0, 1])
    assert b.write_page(1) == 2
    assert c.write_page(1) == 3
    assert a.write_page(1) == 1
    assert arena.stats()["num_copied"] == 2
    assert [arena.refcount(i) for i in range(4)] == [3, 1, 1, 1]


def test_write_page_without_a_free_page_changes_nothing():
    arena = Arena(2, 64)
    a = arena.sequence()
    a.append_pages(2)
    b = a.snapshot()
    with pytest.raises(PoolExhausted):
        b.write_page(0)
    assert (b.page_table, [arena.refcount(i) for i in range(2)]) == ([0, 1], [2, 2])
    a.free()
    assert b.write_page(0) == 0


def test_write_page_out_of_range():
    arena = Arena(2, 64)
    seq = arena.sequence()
    seq.append_page()
    for i in (-1, 1, 1 << 80):
        with pytest.raises(BadInput, match=rf"{i} is outside \[0, 1\)"):
            seq.write_page(i)


def test_same_page_twice_in_one_table_is_shared():
    arena = Arena(2, 64)
    seq = arena.sequence()
    seq.append_page()
    seq.share_page(0)
    assert seq.write_page(0) == 1
    assert seq.page_table == [1, 0]
    assert seq.write_page(1) == 0


def test_death_of_the_owner_frees():
    arena = Arena(3, 64)
    seq = arena.sequence()
    seq.append_pages(3)
    snap = seq.snapshot()
    del seq
    gc.collect()
    assert arena.n_in_use == 3
    del snap
    gc.collect()
    assert (arena.n_in_use, arena.stats()["n_sequences"]) == (0, 0)


def test_context_manager_frees():
    arena = Arena(1, 64)
    with arena.sequence() as seq:
        seq.append_page()
    assert arena.n_free == 1


def test_after_close_free_is_silent_and_all_else_refuses():
    arena = Arena(2, 64)
    seq = arena.sequence()
    seq.append_page()
    arena.close()
    assert not seq.is_valid()
    for call in (
        seq.append_page,
        seq.snapshot,
        lambda: seq.share_page(0),
        lambda: seq.write_page(0),
        lambda: seq.n_pages,
        lambda: seq.truncate_pages(0),
        lambda: seq.append_pages(1),
        lambda: seq.page_table,
    ):
        with pytest.raises(Tampered, match="arena is closed"):
            call()
    seq.free()
    seq.free()


def test_without_init_nothing_works_and_nothing_crashes():
    seq = Sequence.__new__(Sequence)
    assert not seq.is_valid()
    assert seq.address == 0
    for call in (
        seq.append_page,
        seq.snapshot,
        lambda: seq.share_page(0),
        lambda: seq.write_page(0),
        lambda: seq.page_table,
    ):
        with pytest.raises(Tampered):
            call()


def test_snapshot_keeps_the_class():
    class Named(Sequence):
        pass

    arena = Arena(1, 64)
    seq = Named(arena, 1, 4)
    seq.append_page()
    snap = seq.snapshot()
    assert type(snap) is Named
    assert snap.page_table == [0]
