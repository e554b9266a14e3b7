"""Every function of the C API, with NULL for each of its pointers in turn: a refusal, nothing changed, no crash."""

import ctypes

import pytest
from raw_api import RawApi, field, functions

from pagedkv import Verdict

REFUSALS = (-Verdict.BAD_INPUT, -Verdict.TAMPER)
PREFIXES = ("arena_", "seq_", "prefix_")
PAGE_SIDE = [(name, arguments) for name, _, arguments in functions() if name.startswith(PREFIXES)]
NUMBERS = {"n_pages": 4, "page_bytes": 64, "max_pages": 4, "page_tokens": 2, "n": 2}
POINTERS = [(name, at) for name, arguments in PAGE_SIDE for at, argument in enumerate(arguments) if "*" in argument]


class World:
    """An arena with an index, a sequence of two pages, an empty one, and arrays for what functions read."""

    def __init__(self):
        self.api = RawApi()
        _, self.arena = self.api.make(self.api.arena_new, 6, 64, 0, 0, 0)
        _, self.seq = self.api.make(self.api.seq_new, self.arena, 1, 8)
        _, self.empty = self.api.make(self.api.seq_new, self.arena, 2, 8)
        _, self.prefix = self.api.make(self.api.prefix_new, self.arena, 2, 0)
        assert self.api.seq_append_pages(self.seq, 2) == 0
        self.pages = (ctypes.c_uint32 * 2)(0, 1)
        self.tokens = (ctypes.c_int32 * 2)(5, 6)
        self.out = ctypes.c_void_p()

    def value(self, name, argument):
        """Something that the function takes in this place."""
        if "**" in argument:
            return ctypes.addressof(self.out)
        for kind, pointer in (("pkv_arena", self.arena), ("pkv_prefix", self.prefix), ("uint32_t *", self.pages),
                              ("int32_t *", self.tokens)):  # fmt: skip
            if kind in argument and "*" in argument:
                return pointer if isinstance(pointer, int) else ctypes.addressof(pointer)
        if "pkv_seq" in argument:
            return self.empty if name in ("prefix_match", "seq_share_pages") else self.seq
        return NUMBERS.get(argument.split()[-1], 0)

    def counts(self):
        api, arena = self.api, self.arena
        held = [api.arena_refcount(arena, i) for i in range(6)]
        return held, api.seq_n_pages(self.seq), api.seq_n_pages(self.empty), api.check(arena, 3, None, 0)

    def end(self):
        api = self.api
        assert api.seq_destroy(self.seq) == 0 == api.seq_destroy(self.empty)
        assert api.prefix_destroy(self.prefix) == 0 == api.arena_destroy(self.arena)


@pytest.fixture
def world():
    made = World()
    yield made
    made.end()


def test_the_cases_are_all_there():
    assert len(PAGE_SIDE) == 32 and len(POINTERS) >= 38
    assert {name for name, _ in POINTERS} == {name for name, _ in PAGE_SIDE}


@pytest.mark.parametrize(("name", "at"), POINTERS, ids=[f"{name}-{at}" for name, at in POINTERS])
def test_null(world, name, at):
    arguments = [world.value(name, argument) for argument in dict(PAGE_SIDE)[name]]
    arguments[at] = None
    before = world.counts()
    status = getattr(world.api, name)(*arguments)
    assert status in ((0,) if name.endswith("is_valid") else (None,) if name == "arena_page" else REFUSALS)
    assert world.counts() == before and before[-1] == 0


@pytest.mark.parametrize("damaged", [False, True])
@pytest.mark.parametrize("level", [1, 2, 3])
def test_a_checker_without_room_for_violations(world, level, damaged):
    """It counts them; that there is room where there is none is refused, whatever is to be said."""
    arena, api, flaw = world.arena, world.api, field(world.arena, "pkv_arena.n_copies")
    flaw.value += damaged
    assert api.check(arena, level, None, 0) == damaged * (2 if level == 3 else 1)
    for capacity in (1, 5, 1 << 62):
        assert api.check(arena, level, None, capacity) == -Verdict.BAD_INPUT
        assert api.check(None, level, None, capacity) == -Verdict.BAD_INPUT
    assert api.check(arena, level, ctypes.addressof(ctypes.create_string_buffer(32)), -1) == -Verdict.BAD_INPUT
    assert api.check(None, level, None, 0) == -Verdict.TAMPER
    flaw.value -= damaged


@pytest.mark.parametrize("name", ["seq_share_pages", "prefix_lookup", "prefix_match", "prefix_insert"])
def test_nothing_may_be_read_from_null(world, name):
    """No elements, so no array."""
    arguments = [world.value(name, argument) for argument in dict(PAGE_SIDE)[name]]
    arguments[-2:] = None, 0
    assert getattr(world.api, name)(*arguments) == 0
