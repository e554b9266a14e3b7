"""States and refcounts of all pages in one pass."""

import threading

import pytest

from pagedkv.core.arena import Arena
from pagedkv.core.errors import Tampered
from pagedkv.core.page_map import page_map
from pagedkv.core.prefix import PrefixIndex

NUMBERS = {"FREE": 0, "IN_USE": 1, "CACHED": 2}


def one_by_one(arena):
    """The same from the calls that answer for one page."""
    pages = range(arena.n_pages)
    return bytes(NUMBERS[arena.page_state(i)] for i in pages), bytes(min(arena.refcount(i), 255) for i in pages)


def test_every_state_and_count():
    arena = Arena(8, 64)
    index = PrefixIndex(arena, 4)
    a, b = arena.sequence(1), arena.sequence(2)
    held = a.append_pages(3)
    b.share_pages(held[:2])
    idle = arena.sequence(3)
    (cached,) = idle.append_pages(1)
    index.insert(idle, [1, 2, 3, 4])
    idle.free()
    states, refs = page_map(arena)
    assert [states[i] for i in held] == [1, 1, 1] and [refs[i] for i in held] == [2, 2, 1]
    assert (states[cached], refs[cached]) == (2, 0)
    rest = set(range(8)) - {*held, cached}
    assert {(states[i], refs[i]) for i in rest} == {(0, 0)}
    assert (states, refs) == one_by_one(arena)


def test_a_count_beyond_a_byte_stays_at_its_end():
    arena = Arena(2, 64)
    first = arena.sequence(0)
    page = first.append_page()
    holders = [first]
    for wanted in (254, 255, 256, 300):
        holders += [first.snapshot() for _ in range(wanted - len(holders))]
        assert arena.refcount(page) == wanted
        assert page_map(arena)[1][page] == min(wanted, 255)


def test_pages_that_came_by_growth_are_in_it():
    arena = Arena(2, 64, max_pages=7, growth_pages=2)
    assert page_map(arena) == (bytes(2), bytes(2))
    arena.sequence(0).append_pages(3)
    states, refs = page_map(arena)
    assert len(states) == len(refs) == 4 and (states, refs) == one_by_one(arena)


def test_a_growing_pool_gives_whole_pictures():
    """The pool may grow between the count and the pass; what comes back fits one moment."""
    arena = Arena(1, 64, max_pages=4000, growth_pages=1)
    seq = arena.sequence(0, max_pages=4000)
    stop = threading.Event()

    def grow():
        while not stop.is_set() and seq.n_pages < 4000:
            seq.append_page()

    thread = threading.Thread(target=grow)
    thread.start()
    try:
        lengths = []
        for _ in range(300):
            states, refs = page_map(arena)
            assert len(states) == len(refs) and states == refs and states.count(1) + states.count(0) == len(states)
            lengths.append(len(states))
        assert lengths == sorted(lengths)
    finally:
        stop.set()
        thread.join()


def test_a_closed_arena_is_refused():
    arena = Arena(2, 64)
    arena.close()
    with pytest.raises(Tampered, match="closed"):
        page_map(arena)


@pytest.mark.parametrize("wrong", [None, 3, "arena"])
def test_only_an_arena_has_a_map(wrong):
    with pytest.raises(TypeError):
        page_map(wrong)
