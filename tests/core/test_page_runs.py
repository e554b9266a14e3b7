"""Tables in which pages follow each other up or down are counted several pages at a time: nobody may notice."""

import random
from collections import Counter

import pytest

from pagedkv.core._testing import free_list, meta_address, page_address, poke
from pagedkv.core.arena import Arena
from pagedkv.core.errors import BadInput, NotFound, Tampered

N = 64


def runs(rng, n):
    """A table of about n pages of [0, N): runs up, runs down, equal steps, single pages."""
    table = []
    while len(table) < n:
        step, length = rng.choice([1, 1, -1, -1, 2, -3, 0]), rng.randrange(1, 14)
        start = rng.randrange(N)
        table += [i for i in range(start, start + step * length, step or 1) if 0 <= i < N] or [start]
    return table


@pytest.fixture
def full():
    """An arena all of whose pages one sequence holds, in order."""
    arena = Arena(N, 64)
    seq = arena.sequence(max_pages=N)
    seq.append_pages(N)
    return arena, seq


def refcounts(arena):
    return [arena.refcount(i) for i in range(N)]


@pytest.mark.parametrize("seed", range(200))
def test_sharing_and_dropping_count_every_page(full, seed):
    arena, _ = full
    rng = random.Random(seed)
    table = runs(rng, rng.randrange(1, 80))
    other = arena.sequence(max_pages=1000)
    other.share_pages(table)
    held = Counter(table)
    assert refcounts(arena) == [1 + held[i] for i in range(N)]
    assert other.page_table == table
    while table:
        kept = rng.randrange(len(table))
        table = table[:kept]
        other.truncate_pages(kept)
        held = Counter(table)
        assert refcounts(arena) == [1 + held[i] for i in range(N)]
    assert arena.check(3) == []


@pytest.mark.parametrize("order", [1, -1])
@pytest.mark.parametrize("length", [*range(1, 14), N])
@pytest.mark.parametrize("lowest", [0, 1, 50])
def test_runs_of_every_length(full, order, length, lowest):
    arena, _ = full
    table = list(range(lowest, min(lowest + length, N)))[::order]
    other = arena.sequence(max_pages=N)
    other.share_pages(table)
    assert refcounts(arena) == [1 + (i in table) for i in range(N)]
    other.free()
    assert refcounts(arena) == [1] * N


@pytest.mark.parametrize("order", [1, -1])
@pytest.mark.parametrize("bad", range(12))
@pytest.mark.parametrize(("refcount", "error"), [(0, NotFound), (0xFFFFFFFF, BadInput)])
def test_a_page_in_the_run_that_cannot_be_shared(full, order, bad, refcount, error):
    arena, _ = full
    poke(meta_address(arena, 20 + bad), refcount.to_bytes(4, "little"))
    before, other = refcounts(arena), arena.sequence(max_pages=N)
    with pytest.raises(error):
        other.share_pages(list(range(20, 32))[::order])
    assert refcounts(arena) == before and other.page_table == []


@pytest.mark.parametrize("start", range(N - 8, N))
def test_a_run_out_of_the_arena(full, start):
    arena, _ = full
    other = arena.sequence(max_pages=N)
    up = list(range(start, start + 12))
    for table in (up, up[::-1], [3, 2, 1, 0, 0xFFFFFFFF, 0xFFFFFFFE]):
        with pytest.raises(BadInput):
            other.share_pages(table)
        assert refcounts(arena) == [1] * N and other.page_table == []


@pytest.mark.parametrize("order", [1, -1])
@pytest.mark.parametrize("alone", range(12))
def test_one_page_of_a_run_has_no_other_holder(order, alone):
    """It becomes free, the others stay; and the other way round, where only one stays."""
    for keep_one in (False, True):
        arena = Arena(12, 64)
        first, kept = arena.sequence(max_pages=12), arena.sequence(max_pages=12)
        first.append_pages(12)
        table = list(range(12))[::order]
        held = [i for i in table if (i == alone) == keep_one]
        seq = arena.sequence(max_pages=12)
        seq.share_pages(table)
        kept.share_pages(held)
        first.free()
        seq.free()
        freed = [i for i in table[::-1] if i not in held]
        assert free_list(arena)[: len(freed)] == freed
        assert [arena.refcount(i) for i in range(12)] == [int(i in held) for i in range(12)]
        assert arena.check(3) == []


@pytest.mark.parametrize("seed", range(100))
def test_pages_are_taken_in_the_order_of_the_list(seed):
    """Whatever the list looks like: in steps, up, down, at random."""
    rng = random.Random(seed)
    arena = Arena(N, 64, guard=seed % 2 == 1)
    owner = arena.sequence(max_pages=N)
    owner.append_pages(N)
    holders = []
    for i in runs(rng, 60):
        if arena.refcount(i) == 1:
            holders.append(arena.sequence(max_pages=1))
            holders[-1].share_page(i)
    owner.free()
    if seed % 3 == 0:
        rng.shuffle(holders)
    for holder in holders:
        holder.free()
    expected, taken = free_list(arena), []
    assert sorted(expected) == list(range(N))
    while len(taken) < N:
        n = min(rng.randrange(1, 20), N - len(taken))
        taken += owner.append_pages(n)
        assert arena.check(3) == []
    assert taken == expected


@pytest.mark.parametrize("step", [1, -1, 2])
@pytest.mark.parametrize("at", range(8))
@pytest.mark.parametrize(("field", "content"), [(0, b"\1\0\0\0"), (4, b"ABCD"), (8, b"ABCD"), (12, b"\1")])
def test_a_damaged_page_in_a_run_of_free_ones(step, at, field, content):
    """Its refcount, its links and its state are looked at as if it stood alone."""
    arena = Arena(N, 64)
    seq = arena.sequence(max_pages=N)
    seq.append_pages(N)
    one, other = arena.sequence(max_pages=N), arena.sequence(max_pages=N)
    table = list(range(10, 30))[::step]
    one.share_pages(table)
    other.share_pages([i for i in range(N) if i not in table])
    seq.free()
    one.free()
    assert free_list(arena) == table[::-1]
    poke(meta_address(arena, table[::-1][at]) + field, content)
    with pytest.raises(Tampered):
        seq.append_pages(9)
    assert not arena.is_valid()


@pytest.mark.parametrize("at", range(8))
@pytest.mark.parametrize(("field", "content"), [(0, b"\0"), (12, b"\0"), (12, b"\2"), (12, b"\7"), (13, b"\1")])
def test_a_damaged_page_in_a_run_of_held_ones(at, field, content):
    arena = Arena(N, 64)
    seq = arena.sequence(max_pages=N)
    seq.append_pages(8)
    poke(meta_address(arena, at) + field, content)
    with pytest.raises(Tampered, match=f"at page {at}"):
        seq.free()
    assert not arena.is_valid()


@pytest.mark.parametrize("at", range(8))
def test_an_overrun_page_in_a_run_of_held_ones(at):
    arena = Arena(N, 64, guard=True)
    seq = arena.sequence(max_pages=N)
    seq.append_pages(8)
    other = seq.snapshot()
    poke(page_address(arena, at) + 64, b"\0")
    other.free()
    with pytest.raises(Tampered, match=f"guard word overwritten at page {at}"):
        seq.free()
