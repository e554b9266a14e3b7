"""A call that finds no struct of the kind it was written for refuses, and writes neither there nor anywhere else."""

import ctypes

import pytest
from raw_api import LAYOUT, field, functions
from test_null_arguments import World

from pagedkv import Verdict

KINDS = ("pkv_arena", "pkv_seq", "pkv_prefix")
CASES = [
    (name, at, kind)
    for name, _, arguments in functions()
    for at, argument in enumerate(arguments)
    for kind in KINDS
    if argument.startswith(f"{kind} *") and "**" not in argument
]
ROOM = 512  # more than any struct


@pytest.fixture
def world():
    made = World()
    yield made
    made.end()


def content(world):
    """Every byte that a call could have changed."""
    structs = [
        (world.arena, "pkv_arena"),
        (world.seq, "pkv_seq"),
        (world.empty, "pkv_seq"),
        (world.prefix, "pkv_prefix"),
    ]
    pages = field(world.arena, "pkv_arena.pages").value
    return [
        *(ctypes.string_at(p, LAYOUT[kind][0]) for p, kind in structs),
        ctypes.string_at(pages, 8 * LAYOUT["pkv_page"][0]),
    ]


def pretenders(world, kind):
    """What is no struct of this kind: bytes, the two other kinds, and a copy of one that is."""
    real = {"pkv_arena": world.arena, "pkv_seq": world.seq, "pkv_prefix": world.prefix}
    for byte in (0, 7, 255):
        yield f"bytes of {byte}", ctypes.create_string_buffer(bytes([byte]) * ROOM, ROOM)
    copy = ctypes.create_string_buffer(ROOM)
    ctypes.memmove(copy, real[kind], LAYOUT[kind][0])
    yield f"copy of a {kind}", copy
    for other in KINDS:
        if other != kind:
            yield other, real[other]


def test_the_cases_are_all_there():
    found = [f"{name} {argument}" for name, _, arguments in functions() for argument in arguments]
    assert len(CASES) == sum(f"{kind} *" in one and "**" not in one for one in found for kind in KINDS) > 30


@pytest.mark.parametrize(("name", "at", "kind"), CASES, ids=[f"{name}-{kind}" for name, _, kind in CASES])
def test_nothing_is_written(world, name, at, kind):
    declared = dict((n, a) for n, _, a in functions())[name]
    for what, pretender in pretenders(world, kind):
        address = pretender if isinstance(pretender, int) else ctypes.addressof(pretender)
        arguments = [world.value(name, argument) for argument in declared]
        arguments[at] = address
        if name == "check":
            arguments[1:] = 3, None, 0
        before, given = content(world), ctypes.string_at(address, 64)
        whole = bytes(pretender) if not isinstance(pretender, int) else None
        status = getattr(world.api, name)(*arguments)
        expected = {"check": range(1, 99), "arena_page": (None,)}.get(name, (-Verdict.TAMPER,))
        assert status in ((0,) if name.endswith("is_valid") else expected), what
        assert content(world) == before and ctypes.string_at(address, 64) == given, what
        assert whole is None or bytes(pretender) == whole, what
    assert world.api.check(world.arena, 3, None, 0) == 0
