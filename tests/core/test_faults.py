"""Refused memory and damaged structs: each ends in the documented verdict, without a crash, and writes nothing more."""

import contextlib
import gc
import random

import pytest
from raw_api import LAYOUT

from pagedkv.core._testing import (
    encoded,
    entry_address,
    free_list,
    let_pass,
    lru_list,
    meta_address,
    page_address,
    peek,
    poke,
)
from pagedkv.core.arena import Arena
from pagedkv.core.errors import BadInput, NotFound, PagedKVError, PoolExhausted, Tampered
from pagedkv.core.prefix import PrefixIndex


@pytest.fixture(autouse=True)
def memory_is_granted_again():
    yield
    let_pass(-1)


def offset(name):
    return LAYOUT[name][0]


def refuses_everything(arena, *sequences):
    """Every call raises Tampered and changes no byte of the arena's bookkeeping or pages."""
    a, n = arena.address, LAYOUT["pkv_arena"][0]
    calls = [
        arena.trim,
        arena.sequence,
        arena.stats,
        lambda: arena.reserve(1),
        lambda: arena.refcount(0),
        lambda: arena.page_state(0),
        lambda: arena.page(0),
        lambda: arena.n_pages,
        lambda: arena.n_free,
        lambda: arena.n_in_use,
        lambda: arena.n_cached,
    ]
    for seq in sequences:
        calls += [
            seq.append_page,
            seq.snapshot,
            seq.free,
            lambda s=seq: s.append_pages(2),
            lambda s=seq: s.share_page(0),
            lambda s=seq: s.share_pages([0]),
            lambda s=seq: s.write_page(0),
            lambda s=seq: s.truncate_pages(0),
            lambda s=seq: s.n_pages,
            lambda s=seq: s.page_table,
        ]
    with pytest.raises(Tampered):
        calls[0]()
    before = peek(a, n)
    for call in calls:
        with pytest.raises(Tampered):
            call()
        assert peek(a, n) == before
    assert not arena.is_valid()
    assert arena.check(1) != []


# --- refused memory --------------------------------------------------------------------------------------------------


def scripted_run():
    """A run that asks for memory in every way there is; returns what it computed."""
    arena = Arena(2, 5000, max_pages=40, growth_pages=3, guard=True)
    index = PrefixIndex(arena, 2)
    a, b = arena.sequence(1), arena.sequence(2, max_pages=40)
    for _ in range(4):
        a.append_page()
    b.append_pages(9)
    b.share_pages(a.page_table)
    index.insert(a, range(8))
    c = b.snapshot()
    c.write_page(0)
    arena.reserve(10)
    a.free()
    before = arena.check(3)
    d = arena.sequence(3)
    index.match(d, list(range(8)))
    tables = [s.page_table for s in (a, b, c, d)]
    return tables, arena.stats(), before, arena.check(3)


N_REQUESTS = 19


def test_scripted_run_asks_for_memory_as_often_as_the_test_below_refuses_it():
    expected = scripted_run()
    assert expected[2:] == ([], [])
    let_pass(N_REQUESTS)
    assert scripted_run() == expected
    with pytest.raises(PoolExhausted):
        Arena(1, 1)


@pytest.mark.parametrize("n", range(N_REQUESTS))
def test_refusing_the_nth_request(n):
    expected = scripted_run()
    let_pass(n)
    refused = None
    try:
        result = scripted_run()
    except PoolExhausted as error:
        refused = error
    let_pass(-1)
    if refused is None:
        assert result != expected, "the refused request left no trace"
    else:
        assert str(refused)
    gc.collect()
    assert scripted_run() == expected


def test_refused_growth_changes_nothing():
    arena = Arena(2, 64, max_pages=8)
    seq = arena.sequence()
    seq.append_pages(2)
    for call in (seq.append_page, lambda: seq.append_pages(3), lambda: arena.reserve(2)):
        let_pass(0)
        with pytest.raises(PoolExhausted):
            call()
        let_pass(-1)
        assert (seq.page_table, arena.n_pages, arena.n_free) == ([0, 1], 2, 0)
        assert arena.check(3) == []
    assert seq.append_pages(6) == [2, 3, 4, 5, 6, 7]


def test_refused_growth_falls_back_to_eviction():
    arena = Arena(2, 64, max_pages=8)
    index = PrefixIndex(arena, 1)
    seq = arena.sequence()
    seq.append_pages(2)
    index.insert(seq, [1, 2])
    seq.free()
    let_pass(0)
    assert seq.append_page() == 1
    assert arena.n_pages == 2


def test_refused_snapshot_and_sequence_change_nothing():
    arena = Arena(2, 64)
    seq = arena.sequence()
    seq.append_pages(2)
    for call in (seq.snapshot, arena.sequence, lambda: seq.share_pages([0])):
        let_pass(0)
        with pytest.raises(PoolExhausted, match="refused memory"):
            call()
        let_pass(-1)
        assert arena.refcount(0) == 1
        assert arena.stats()["n_sequences"] == 1
        assert arena.check(3) == []


def test_checker_without_memory_says_so():
    arena = Arena(2, 64)
    let_pass(0)
    assert [v.what for v in arena.check(3)] == ["checker: memory for level 3"]


# --- canaries --------------------------------------------------------------------------------------------------------

BYTES = [(end, byte) for end in ("canary_pre", "canary_post") for byte in range(8)]


@pytest.mark.parametrize(("end", "byte"), BYTES)
@pytest.mark.parametrize("flip", [0x01, 0x80, 0xFF])
def test_every_byte_of_the_arena_canaries(end, byte, flip):
    arena = Arena(3, 64)
    seq = arena.sequence()
    seq.append_page()
    address = arena.address + offset(f"pkv_arena.{end}") + byte
    original = peek(address, 1)
    poke(address, bytes([original[0] ^ flip]))
    refuses_everything(arena, seq)
    poke(address, original)
    refuses_everything(arena, seq)
    with pytest.raises(Tampered, match="canary of the arena"):
        seq.append_page()


@pytest.mark.parametrize(("end", "byte"), BYTES)
def test_every_byte_of_the_sequence_canaries(end, byte):
    arena = Arena(3, 64)
    seq, other = arena.sequence(), arena.sequence()
    seq.append_page()
    address = seq.address + offset(f"pkv_seq.{end}") + byte
    original = peek(address, 1)
    poke(address, bytes([original[0] ^ 0x10]))
    assert not seq.is_valid()
    assert "sequence: canaries hold" in [v.what for v in arena.check(3)]
    with pytest.raises(Tampered, match="sequence struct"):
        seq.append_page()
    refuses_everything(arena, other)
    poke(address, original)
    refuses_everything(arena, seq, other)


@pytest.mark.parametrize(("end", "byte"), BYTES)
def test_every_byte_of_the_prefix_canaries(end, byte):
    arena = Arena(3, 64)
    index, seq = PrefixIndex(arena, 1), arena.sequence()
    address = index.address + offset(f"pkv_prefix.{end}") + byte
    original = peek(address, 1)
    poke(address, bytes([original[0] ^ 0x10]))
    assert not index.is_valid()
    assert "prefix: canaries hold" in [v.what for v in arena.check(3)]
    with pytest.raises(Tampered, match="prefix index"):
        index.lookup([1])
    poke(address, original)
    for call in (lambda: index.lookup([1]), lambda: index.match(seq, [1]), lambda: index.insert(seq, []), index.clear):
        with pytest.raises(Tampered):
            call()
    refuses_everything(arena, seq)


@pytest.mark.parametrize("field", ["n_pages", "n_free", "n_in_use", "n_cached"])
@pytest.mark.parametrize("value", [-1, 2, 1 << 40])
def test_counts_that_do_not_add_up(field, value):
    arena = Arena(3, 64)
    seq = arena.sequence()
    poke(arena.address + offset(f"pkv_arena.{field}"), value.to_bytes(8, "little", signed=True))
    refuses_everything(arena, seq)
    with pytest.raises(Tampered, match="counts"):
        seq.append_page()


@pytest.mark.parametrize("value", [-1, 65, 1 << 40])
def test_sequence_count_out_of_range(value):
    arena = Arena(3, 64)
    seq = arena.sequence()
    poke(seq.address + offset("pkv_seq.n_pages_used"), value.to_bytes(8, "little", signed=True))
    with pytest.raises(Tampered, match="sequence struct"):
        seq.append_page()
    refuses_everything(arena, seq)


# --- page lists ------------------------------------------------------------------------------------------------------


def links(arena, i):
    return [(meta_address(arena, i) + offset(f"pkv_page.{name}")) for name in ("next", "prev")]


@pytest.mark.parametrize("which", [0, 1])
@pytest.mark.parametrize("page", [0, 1, 4, 5])
@pytest.mark.parametrize("content", [b"\0" * 4, b"\xff" * 4, b"\x02\0\0\0", b"ABCD"])
def test_overwritten_free_list_link(which, page, content):
    """Pages 0 to 4 and the list's head (5): the damage is found no later than when the list is used up."""
    arena = Arena(5, 64)
    seq = arena.sequence()
    poke(links(arena, page)[which], content)
    assert "free list: links answer each other" in [v.what for v in arena.check(3)]
    with pytest.raises(Tampered, match="link"):
        for _ in range(6):
            seq.append_page()
    refuses_everything(arena, seq)


def test_link_redirected_with_the_right_code_is_still_found():
    """A well-encoded link to the wrong page: the page it skips does not link back."""
    arena = Arena(5, 64)
    seq = arena.sequence()
    poke(links(arena, 0)[0], encoded(arena, 0, 3).to_bytes(4, "little"))
    with pytest.raises(Tampered, match="link"):
        seq.append_page()


@pytest.mark.parametrize("which", [0, 1])
def test_overwritten_lru_link(which):
    arena = Arena(3, 64)
    index, seq = PrefixIndex(arena, 1), arena.sequence()
    seq.append_pages(3)
    index.insert(seq, [1, 2, 3])
    seq.free()
    assert lru_list(arena) == [2, 1, 0]
    poke(links(arena, 2)[which], b"\x01\0\0\0")
    assert "LRU list: links answer each other" in [v.what for v in arena.check(3)]
    with pytest.raises(Tampered, match="link"):
        seq.append_page()
    refuses_everything(arena, seq)


def test_random_damage_to_page_bookkeeping_never_crashes():
    rng = random.Random(5)
    for _ in range(2000):
        arena = Arena(6, 64, guard=True)
        index = PrefixIndex(arena, 1)
        a, b = arena.sequence(), arena.sequence()
        a.append_pages(3)
        index.insert(a, [1, 2, 3])
        b.share_page(1)
        if rng.random() < 0.5:
            a.free()
        page = rng.randrange(8)
        start, size = meta_address(arena, page), LAYOUT["pkv_page"][0]
        if page < 6 and rng.random() < 0.3:
            start, size = entry_address(arena, page), LAYOUT["pkv_prefix_entry"][0]
        poke(start + rng.randrange(size), bytes([rng.randrange(256)]))
        arena.check(3)
        for call in (
            a.append_page,
            lambda s=b: s.append_pages(2),
            lambda s=b: s.write_page(0),
            b.free,
            a.snapshot,
            lambda s=a, x=index: x.match(s, [1, 2, 3]),
            lambda s=b, x=index: x.insert(s, [1, 2]),
            a.free,
            index.clear,
            arena.trim,
        ):
            with contextlib.suppress(PagedKVError):
                call()
        arena.check(3)


# --- pages -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("page_bytes", [64, 61, 56, 1])
@pytest.mark.parametrize("distance", range(8))
def test_overrun_by_one_byte_names_the_page(page_bytes, distance):
    arena = Arena(4, page_bytes, guard=True)
    seq = arena.sequence()
    seq.append_pages(3)
    poke(page_address(arena, 1) + page_bytes + distance, b"\0")
    assert [(v.what, v.where) for v in arena.check(3)] == [("page: guard word holds", 1)]
    seq.truncate_pages(2)
    with pytest.raises(Tampered, match="guard word overwritten at page 1"):
        seq.truncate_pages(1)
    refuses_everything(arena, seq)


def test_overrun_is_found_when_a_cached_page_is_evicted():
    arena = Arena(2, 64, guard=True)
    index, seq = PrefixIndex(arena, 1), arena.sequence()
    seq.append_pages(2)
    index.insert(seq, [1, 2])
    seq.free()
    poke(page_address(arena, 1) + 64, b"\0")
    with pytest.raises(Tampered, match="guard word overwritten at page 1"):
        seq.append_page()


OVERRUNS = {
    "dropped last of several": (1, lambda w: w.a.free()),
    "dropped first of several": (3, lambda w: w.a.free()),
    "dropped alone": (3, lambda w: w.a.truncate_pages(3)),
    "truncated": (2, lambda w: w.a.truncate_pages(1)),
    "destroyed": (1, lambda w: w.destroy()),
    "exchanged for a known page": (5, lambda w: w.index.insert(w.b, [7])),
    "forgotten": (4, lambda w: w.index.clear()),
    "evicted": (4, lambda w: w.b.append_pages(3)),
}


class Overrun:
    """Pages 0 to 3 in one table, 4 CACHED, 5 in another table with the same content, 6 and 7 FREE."""

    def __init__(self):
        self.arena = Arena(8, 64, guard=True)
        self.index = PrefixIndex(self.arena, 1)
        self.a, self.b, cached = self.arena.sequence(), self.arena.sequence(), self.arena.sequence()
        self.a.append_pages(4)
        cached.append_page()
        self.index.insert(cached, [7])
        self.b.append_page()
        cached.free()
        assert (self.a.page_table, self.b.page_table, lru_list(self.arena)) == ([0, 1, 2, 3], [5], [4])

    def destroy(self):
        """The table that fails to give its pages back is gone afterwards."""
        with pytest.raises(Tampered) as caught:
            self.a.free()
        del self.a
        gc.collect()
        raise caught.value


@pytest.mark.parametrize("case", OVERRUNS)
def test_an_overrun_leaves_no_other_page_looking_damaged(case):
    page, call = OVERRUNS[case]
    world = Overrun()
    poke(page_address(world.arena, page) + 64, b"!")
    with pytest.raises(Tampered, match=f"guard word overwritten at page {page}"):
        call(world)
    assert [(v.what, v.where) for v in world.arena.check(3)] == [
        ("arena: not poisoned", page), ("page: guard word holds", page)
    ]  # fmt: skip


@pytest.mark.parametrize("n", [2, 3, 5])
@pytest.mark.parametrize("damaged", [1, 2, 4])
def test_a_take_that_meets_damage_takes_nothing(damaged, n):
    """Of pages 0 to 5 on the free list one is marked as held: those in front of it look as before."""
    arena = Arena(6, 64)
    seq = arena.sequence()
    poke(meta_address(arena, damaged), b"\x01")
    before = arena.check(3)
    if n > damaged:
        with pytest.raises(Tampered, match=f"at page {damaged}"):
            seq.append_pages(n)
        found = arena.check(3)
        assert [v.what for v in found[:1]] == ["arena: not poisoned"] and found[1:] == before != []


@pytest.mark.parametrize("damaged", [1, 3])
def test_a_snapshot_that_meets_damage_holds_nothing(damaged):
    arena = Arena(6, 64)
    seq = arena.sequence()
    seq.append_pages(4)
    poke(meta_address(arena, damaged) + offset("pkv_page.state"), b"\x00")
    before = arena.check(3)
    with pytest.raises(Tampered, match=f"at page {damaged}"):
        seq.snapshot()
    assert arena.check(3)[1:] == before != []


def test_without_guard_an_overrun_into_the_padding_goes_unseen():
    arena = Arena(4, 61)
    seq = arena.sequence()
    seq.append_page()
    poke(page_address(arena, 0) + 61, b"\0")
    seq.free()
    assert arena.check(3) == []


def test_guard_survives_trim_and_reuse():
    arena = Arena(8, 4096, guard=True)
    seq = arena.sequence()
    for _ in range(3):
        seq.append_pages(8)
        seq.free()
        arena.trim()
    seq.append_pages(8)
    assert arena.check(3) == []


@pytest.mark.parametrize(("field", "value"), [("refcount", 0), ("state", 0), ("state", 2), ("state", 9)])
def test_damaged_page_state_is_found_on_release(field, value):
    arena = Arena(2, 64)
    seq = arena.sequence()
    seq.append_page()
    poke(meta_address(arena, 0) + offset(f"pkv_page.{field}"), bytes([value]))
    assert arena.check(2) != []
    with pytest.raises(Tampered, match="refcount or state impossible at page 0"):
        seq.free()
    refuses_everything(arena, seq)


@pytest.mark.parametrize("entry", [1, 7, 0xFFFFFFFF])
def test_damaged_table_entry_is_found_on_release(entry):
    arena = Arena(2, 64)
    seq = arena.sequence()
    seq.append_page()
    table = int.from_bytes(peek(seq.address + offset("pkv_seq.page_indices"), 8), "little")
    poke(table, entry.to_bytes(4, "little"))
    assert arena.check(3) != []
    with pytest.raises(Tampered):
        seq.free()
    refuses_everything(arena, seq)


def test_free_page_on_the_list_that_is_counted_is_not_handed_out():
    arena = Arena(2, 64)
    seq = arena.sequence()
    poke(meta_address(arena, free_list(arena)[0]), b"\x01\0\0\0")
    with pytest.raises(Tampered):
        seq.append_page()


# --- misuse ----------------------------------------------------------------------------------------------------------


def test_double_free_is_a_no_op():
    arena = Arena(2, 64)
    seq, other = arena.sequence(), arena.sequence()
    seq.append_page()
    seq.free()
    other.append_page()
    seq.free()
    assert (arena.n_in_use, arena.refcount(0)) == (1, 1)
    assert arena.check(3) == []


def test_refcount_cannot_overflow():
    arena = Arena(2, 64)
    a, b = arena.sequence(), arena.sequence()
    a.append_page()
    poke(meta_address(arena, 0), b"\xff" * 4)
    with pytest.raises(BadInput):
        b.share_page(0)
    with pytest.raises(Tampered):
        a.snapshot()


def test_sequences_outlive_a_closed_arena():
    arena = Arena(2, 64)
    index = PrefixIndex(arena, 1)
    a = arena.sequence()
    a.append_pages(2)
    index.insert(a, [1, 2])
    b = a.snapshot()
    arena.close()
    del arena
    gc.collect()
    for call in (a.append_page, b.snapshot, index.clear):
        with pytest.raises(Tampered, match="closed"):
            call()
    a.free()
    del call, a, b, index
    gc.collect()


def test_poisoned_arena_can_be_dropped_and_another_made():
    for _ in range(20):
        arena = Arena(2, 1 << 16)
        seq = arena.sequence()
        seq.append_page()
        poke(meta_address(arena, 0), b"\0" * 4)
        with pytest.raises(Tampered):
            seq.free()
        del seq, arena
        gc.collect()
    with pytest.raises(NotFound):
        Arena(1, 1).sequence().share_page(0)
