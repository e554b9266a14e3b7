"""Every field of the public structs, overwritten from C: a refusal or a violation, never a crash, never a hang.

Each case runs in a child: what damage does to this process is the question.
"""

import ctypes
import os
import signal
import traceback

import pytest
from raw_api import LAYOUT, RawApi, field

from pagedkv import Verdict

TAMPER = -Verdict.TAMPER
# What nothing depends on, or what is the caller's. A lock that is overwritten cannot be told from one that is held.
FREE_TO_CHANGE = {
    "pkv_arena": {"lock", "fault_page", "num_allocated", "num_copied", "num_evicted", "num_grown"},
    "pkv_seq": {"seq_id", "n_tokens"},
    "pkv_prefix": {"num_queried", "num_hit"},
}
FIELDS = [
    (kind, name.partition(".")[2])
    for kind in FREE_TO_CHANGE
    for name in LAYOUT
    if name.startswith(f"{kind}.") and name.partition(".")[2] not in FREE_TO_CHANGE[kind]
]
CHANGES = {
    "one more": lambda value: value + 1,
    "one less": lambda value: value - 1,
    "zero": lambda value: 0,
    "one": lambda value: 1,
    "doubled": lambda value: value * 2,
    "a page of the system more": lambda value: value + 4096,
    "large": lambda value: 1 << 40,
    "all ones": lambda value: -1,
    "text": lambda value: 0x4141414141414141,
}


def in_child(work):
    """How a child ended that ran work(): what it returned, in [0, 100), or a negative signal; SIGALRM for a hang."""
    child = os.fork()
    if child == 0:
        signal.alarm(20)
        try:
            os._exit(work())
        except BaseException:
            traceback.print_exc()
            os._exit(100)
    status = os.waitpid(child, 0)[1]
    return -os.WTERMSIG(status) if os.WIFSIGNALED(status) else os.WEXITSTATUS(status)


class Busy:
    """Pages shared, indexed, cached and free in an arena that can grow, and tokens of the index."""

    def __init__(self):
        api = self.api = RawApi()
        _, self.arena = api.make(api.arena_new, 8, 4096, 16, 3, 1)
        _, self.prefix = api.make(api.prefix_new, self.arena, 2, 0)
        self.tokens = (ctypes.c_int32 * 8)(*range(8))
        seqs = [api.make(api.seq_new, self.arena, k, 12)[1] for k in range(4)]
        self.empty, self.other, self.seq, gone = seqs
        assert api.seq_append_pages(gone, 2) == 0
        assert api.prefix_insert(self.prefix, gone, ctypes.addressof(self.tokens) + 8, 4) == 2
        assert api.seq_free(gone) == 0
        assert api.seq_append_pages(self.seq, 3) == 0
        assert api.prefix_insert(self.prefix, self.seq, ctypes.addressof(self.tokens), 4) == 2
        status, self.twin = api.make(api.seq_snapshot, self.seq)
        assert status == 0 == api.check(self.arena, 3, None, 0)
        assert [api.arena_n_free(self.arena), api.arena_n_in_use(self.arena), api.arena_n_cached(self.arena)] == [
            3,
            3,
            2,
        ]

    def pointer(self, kind):
        return {"pkv_arena": self.arena, "pkv_seq": self.seq, "pkv_prefix": self.prefix}[kind]

    def work(self):
        """Calls of every kind; the answers."""
        api, tokens = self.api, ctypes.addressof(self.tokens)
        return [
            api.arena_trim(self.arena),
            api.seq_write_page(self.seq, 0),
            api.seq_write_page(self.twin, 2),
            api.prefix_lookup(self.prefix, tokens, 8),
            api.prefix_match(self.prefix, self.empty, tokens, 8),
            api.seq_append_pages(self.other, 6),
            api.seq_append_page(self.other),
            api.arena_reserve(self.arena, 1),
            api.seq_truncate_pages(self.seq, 1),
            api.prefix_insert(self.prefix, self.seq, tokens, 2),
            api.make(api.seq_new, self.arena, 9, 2)[0],
            api.check(self.arena, 3, None, 0),
            api.seq_free(self.twin),
            api.prefix_clear(self.prefix),
        ]

    def end(self):
        """Everything destroyed; the answers."""
        api = self.api
        answers = [api.seq_destroy(seq) for seq in (self.twin, self.seq, self.other, self.empty)]
        return [*answers, api.prefix_destroy(self.prefix), api.arena_destroy(self.arena)]

    def arena_first(self):
        """The same the other way round."""
        answers = [self.api.arena_destroy(self.arena), self.api.prefix_destroy(self.prefix)]
        return [*answers, *[self.api.seq_destroy(seq) for seq in (self.empty, self.other, self.seq, self.twin)]]


def changed(kind, name, change, *calls):
    """Damage one field, call, and say whether an answer told of it: 1 or 0; 2 when the value was that already."""
    world = Busy()
    width = LAYOUT[f"{kind}.{name}"][1]
    cell = field(world.pointer(kind), f"{kind}.{name}", {4: ctypes.c_int32, 8: ctypes.c_int64}[width])
    before = cell.value
    cell.value = CHANGES[change](before)
    if cell.value == before:
        return 2
    found = world.api.check(world.arena, 3, None, 0) > 0
    for call in calls:
        found |= TAMPER in getattr(world, call)()
    return int(found)


def test_without_damage_everything_is_granted():
    world = Busy()
    answers = world.work()
    assert min(answers) >= 0 and answers[-3] == 0, answers
    assert world.end() == [0] * 6
    assert Busy().arena_first() == [0] * 6


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize(("kind", "name"), FIELDS, ids=[f"{kind}.{name}" for kind, name in FIELDS])
def test_an_overwritten_field_is_found_and_breaks_nothing(kind, name, change):
    for calls in (["work", "end"], ["end"], ["arena_first"]):
        assert in_child(lambda calls=calls: changed(kind, name, change, *calls)) in (1, 2), calls


@pytest.mark.parametrize(("kind", "name"), [(kind, name) for kind in FREE_TO_CHANGE for name in FREE_TO_CHANGE[kind]])
def test_what_nothing_depends_on(kind, name):
    """These may be damaged and nobody need notice; a lock is not tried: it would be waited for."""
    if name != "lock":
        assert in_child(lambda: changed(kind, name, "large", "work", "end")) in (0, 1)


def reopened():
    """A closed arena that is told it is open: its pages are gone."""
    world = Busy()
    assert world.api.arena_close(world.arena) == 0
    field(world.arena, "pkv_arena.fault", ctypes.c_uint32).value = 0
    assert set(world.work()[:10]) == {TAMPER}
    return int(world.api.arena_n_pages(world.arena) == TAMPER)


def test_a_closed_arena_stays_closed():
    assert in_child(reopened) == 1
