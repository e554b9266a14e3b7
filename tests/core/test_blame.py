"""From C, too, a damaged sequence or prefix index poisons the arena that lists it, and no other."""

import ctypes
import os
import signal
import threading

import pytest
from raw_api import LAYOUT, RawApi, field, functions
from test_null_arguments import World

from pagedkv import Verdict

TAMPER = -Verdict.TAMPER
SEQUENCE, PREFIX = 6, 7  # pkv_fault
CASES = [
    (name, kind, argument)
    for name, _, arguments in functions()
    for argument in arguments
    for kind in ("pkv_seq", "pkv_prefix")
    if argument.startswith(f"{kind} *") and "**" not in argument
]


@pytest.fixture
def api():
    return RawApi()


@pytest.fixture
def worlds():
    """Three arenas with an index and two sequences each; the one in the middle is to be damaged."""
    made = [World() for _ in range(3)]
    yield made
    made[0].end()
    made[2].end()


def flip(address):
    ctypes.c_uint8.from_address(address).value ^= 0x20


def call(world, name):
    arguments = dict((n, a) for n, _, a in functions())[name]
    return getattr(world.api, name)(*[world.value(name, argument) for argument in arguments])


def fault(world):
    return field(world.arena, "pkv_arena.fault", ctypes.c_uint32).value


def test_the_cases_are_all_there():
    assert len(CASES) == 19
    assert {name for name, _, _ in CASES} == {n for n, _, _ in functions() if n.startswith(("seq_", "prefix_"))} - {
        "seq_new", "prefix_new"}  # fmt: skip


@pytest.mark.parametrize("end", ["canary_pre", "canary_post"])
@pytest.mark.parametrize(("name", "kind", "argument"), CASES, ids=[f"{name}-{kind}" for name, kind, _ in CASES])
def test_every_call_on_a_damaged_struct_poisons_its_arena(worlds, name, kind, argument, end):
    left, world, right = worlds
    pointer = world.value(name, argument)
    at = pointer + LAYOUT[f"{kind}.{end}"][0]
    flip(at)
    status = call(world, name)
    assert status == (0 if name.endswith("is_valid") else TAMPER)
    assert fault(world) == (SEQUENCE if kind == "pkv_seq" else PREFIX)
    flip(at)
    before = ctypes.string_at(world.arena, LAYOUT["pkv_arena"][0])
    assert world.api.arena_n_pages(world.arena) == TAMPER
    assert world.api.seq_append_page(world.seq) == TAMPER == world.api.seq_append_page(world.empty)
    assert world.api.prefix_lookup(world.prefix, world.tokens, 2) == TAMPER
    assert ctypes.string_at(world.arena, LAYOUT["pkv_arena"][0]) == before
    assert [fault(w) for w in (left, right)] == [0, 0]
    assert left.api.seq_append_page(left.seq) >= 0 <= right.api.seq_append_page(right.seq)


def test_the_damaged_struct_need_not_name_its_arena(worlds):
    """Everything in it is overwritten, as by a write that ran over it."""
    left, world, right = worlds
    ctypes.memset(world.seq, 0xA5, LAYOUT["pkv_seq"][0])
    assert world.api.seq_n_pages(world.seq) == TAMPER
    assert [fault(w) for w in (left, world, right)] == [0, SEQUENCE, 0]


def test_the_damaged_struct_cannot_name_another_arena(worlds):
    left, world, _ = worlds
    field(world.seq, "pkv_seq.arena").value = left.arena
    flip(world.seq)
    assert world.api.seq_free(world.seq) == TAMPER
    assert fault(left) == 0 and fault(world) == SEQUENCE


@pytest.mark.parametrize("place", range(5))
def test_wherever_in_the_list_it_is(api, place):
    _, arena = api.make(api.arena_new, 4, 64, 0, 0, 0)
    seqs = [api.make(api.seq_new, arena, k, 2)[1] for k in range(5)]
    flip(seqs[place])
    assert api.seq_free(seqs[place]) == TAMPER
    assert all(api.seq_append_page(seq) == TAMPER for seq in seqs)
    assert field(arena, "pkv_arena.fault", ctypes.c_uint32).value == SEQUENCE


def test_a_second_damaged_sequence_hides_none(worlds):
    """Of two damaged arenas each is found, though the first is met on the way to the second."""
    left, world, right = worlds
    for damaged in (right, world):
        flip(damaged.empty)
    assert world.api.seq_free(world.empty) == TAMPER
    assert fault(world) == SEQUENCE and fault(left) == 0
    flip(right.empty)
    field(right.arena, "pkv_arena.fault", ctypes.c_uint32).value = 0


def test_what_no_arena_lists_poisons_none(worlds):
    """A struct that never was a sequence, and NULL."""
    never = ctypes.create_string_buffer(256)
    for pointer in (ctypes.addressof(never), None):
        assert worlds[0].api.seq_append_page(pointer) == TAMPER
        assert worlds[0].api.prefix_clear(pointer) == TAMPER
    assert [fault(w) for w in worlds] == [0, 0, 0]


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0), (1, 0, 2), (1, 2, 0)])
def test_arenas_are_found_while_others_come_and_go(api, order):
    arenas = [api.make(api.arena_new, 2, 64, 0, 0, 0)[1] for _ in range(3)]
    seqs = [api.make(api.seq_new, arena, 0, 2)[1] for arena in arenas]
    *gone, last = order
    for k in gone:
        assert api.seq_destroy(seqs[k]) == 0 == api.arena_destroy(arenas[k])
    _, later = api.make(api.arena_new, 2, 64, 0, 0, 0)
    flip(seqs[last])
    assert api.seq_free(seqs[last]) == TAMPER
    assert field(arenas[last], "pkv_arena.fault", ctypes.c_uint32).value == SEQUENCE
    assert api.arena_is_valid(later) == 1
    assert api.arena_destroy(later) == 0


def test_a_struct_off_the_list_is_not_released(api):
    """The link behind the struct of the newer arena is damaged: the older is not found behind it, and stays."""
    _, older = api.make(api.arena_new, 1, 64, 0, 0, 0)
    _, newer = api.make(api.arena_new, 1, 64, 0, 0, 0)
    link = newer + LAYOUT["pkv_arena"][0]
    flip(link)
    assert api.arena_destroy(older) == TAMPER
    assert api.arena_n_pages(older) == TAMPER
    flip(link)
    assert api.arena_destroy(older) == 0 == api.arena_destroy(newer)


def hammer(api, stop):
    """Look for the owner of a struct that has none until told to stop: the longest that the list is locked."""
    never = ctypes.create_string_buffer(256)
    while not stop.is_set():
        assert api.seq_n_pages(ctypes.addressof(never)) == TAMPER


def test_threads_that_look_beside_threads_that_make_and_destroy(api):
    """Calls through ctypes run without the GIL."""
    stop, faults = threading.Event(), []

    def come_and_go():
        for _ in range(300):
            _, arena = api.make(api.arena_new, 2, 64, 0, 0, 0)
            seqs = [api.make(api.seq_new, arena, k, 2)[1] for k in range(3)]
            faults.append(api.seq_append_page(seqs[1]))
            faults.extend(api.seq_destroy(seq) for seq in seqs)
            faults.append(api.arena_destroy(arena))

    workers = [threading.Thread(target=come_and_go) for _ in range(3)]
    looker = threading.Thread(target=hammer, args=(api, stop))
    for thread in (looker, *workers):
        thread.start()
    for thread in workers:
        thread.join()
    stop.set()
    looker.join()
    assert faults == [0] * len(faults)


def test_a_fork_may_happen_while_another_thread_looks(api):
    """The child has no such thread, and must not wait for it."""
    _, arena = api.make(api.arena_new, 2, 64, 0, 0, 0)
    seqs = [api.make(api.seq_new, arena, k, 1)[1] for k in range(2000)]
    stop = threading.Event()
    looker = threading.Thread(target=hammer, args=(api, stop))
    looker.start()
    try:
        for _ in range(20):
            child = os.fork()
            if child == 0:
                signal.alarm(20)
                _, made = api.make(api.arena_new, 1, 64, 0, 0, 0)
                os._exit(0 if made and api.arena_destroy(made) == 0 else 1)
            assert os.waitpid(child, 0)[1] == 0
    finally:
        stop.set()
        looker.join()
    assert all(api.seq_destroy(seq) == 0 for seq in seqs) and api.arena_destroy(arena) == 0
