"""The checker: sound structures pass at every level, each kind of damage is named at the level that promises it."""

import re
from pathlib import Path

import pytest
from raw_api import LAYOUT, field

import pagedkv
from pagedkv.core._testing import encoded, entry_address, meta_address, page_address, peek, poke
from pagedkv.core.arena import Arena
from pagedkv.core.check import Violation, check
from pagedkv.core.errors import BadInput
from pagedkv.core.prefix import PrefixIndex


class World:
    """Pages 0, 1 in use and indexed (1 shared), 2 and 3 CACHED below page 0, 4 in use and not indexed, 5 to 7 FREE."""

    def __init__(self):
        self.arena = Arena(8, 64, guard=True)
        self.index = PrefixIndex(self.arena, 2)
        self.a = self.arena.sequence(1)
        self.a.append_pages(2)
        self.index.insert(self.a, [1, 1, 2, 2])
        cached = self.arena.sequence(2)
        self.index.match(cached, [1, 1])
        cached.append_pages(2)
        self.index.insert(cached, [1, 1, 3, 3, 4, 4])
        cached.free()
        self.b = self.arena.sequence(3)
        self.b.share_page(1)
        self.b.append_page()
        assert [self.arena.page_state(i)[0] for i in range(8)] == list("IICCIFFF")
        assert (self.a.page_table, self.b.page_table) == ([0, 1], [1, 4])

    def page(self, i, name, value):
        width = LAYOUT[f"pkv_page.{name}"][1]
        poke(meta_address(self.arena, i) + LAYOUT[f"pkv_page.{name}"][0], value.to_bytes(width, "little"))

    def entry(self, i, name, value):
        width = LAYOUT[f"pkv_prefix_entry.{name}"][1]
        poke(entry_address(self.arena, i) + LAYOUT[f"pkv_prefix_entry.{name}"][0], value.to_bytes(width, "little"))

    def arena_field(self, name):
        return field(self.arena.address, f"pkv_arena.{name}")

    def table(self, seq):
        return int.from_bytes(peek(seq.address + LAYOUT["pkv_seq.page_indices"][0], 8), "little")

    def found(self, level):
        return {v.what for v in check(self.arena, level)}


@pytest.mark.parametrize("level", [1, 2, 3])
def test_sound(level):
    assert check(World().arena, level) == []
    assert World().arena.check(level) == []


@pytest.mark.parametrize("level", [0, 4, -1, 1 << 70])
def test_level_out_of_range(level):
    with pytest.raises(BadInput, match=f"level: {level}"):
        check(World().arena, level)


def test_violation_fields():
    world = World()
    world.page(4, "refcount", 9)
    violations = check(world.arena, 3)
    assert violations == [Violation("page: refcount is the number of holders", 4, 1, 9)]
    assert pagedkv.Violation is Violation


def damage_counts(w):
    w.arena_field("n_free").value += 1


def damage_balance(w):
    w.arena_field("n_free").value += 1
    w.arena_field("n_in_use").value -= 1


def damage_list_length(w):
    """Page 7 leaves the free list and the counters do not know."""
    w.page(6, "next", encoded(w.arena, 6, 8))
    w.page(8, "prev", encoded(w.arena, 8, 6))


def damage_seq_list(w):
    w.arena_field("n_seqs").value += 1


def damage_copies(w):
    w.arena_field("n_copies").value = 1


def damage_back_link(w):
    field(w.a.address, "pkv_seq.prev").value ^= 64


def damage_tokens(w):
    tokens = field(w.index.address, "pkv_prefix.tokens").value
    poke(tokens + 3 * 8, b"\x07")


def damage_bucket(w):
    """The bucket of page 3 is emptied."""
    hash_ = int.from_bytes(peek(entry_address(w.arena, 3), 8), "little")
    buckets = field(w.index.address, "pkv_prefix.buckets").value
    poke(buckets + 4 * (hash_ % field(w.index.address, "pkv_prefix.n_buckets").value), b"\xff" * 4)


# what happens, the lowest level that finds it, what it is called
DAMAGE = {
    "arena canary": (lambda w: poke(w.arena.address, b"?"), 1, "arena: canaries hold"),
    "poisoned": (lambda w: setattr(w.arena_field("fault"), "value", 4), 1, "arena: not poisoned"),
    "counts": (damage_counts, 1, "arena: n_free + n_in_use + n_cached is n_pages"),
    "too many pages": (
        lambda w: setattr(w.arena_field("n_pages"), "value", 99),
        1,
        "arena: n_pages is in [0, max_pages]",
    ),
    "largest number of pages": (
        lambda w: setattr(w.arena_field("max_pages"), "value", 9),
        1,
        "arena: constant fields hold",
    ),
    "bytes mapped": (
        lambda w: setattr(w.arena_field("storage_bytes"), "value", 4096),
        1,
        "arena: sizes of its mappings are those of its pages",
    ),
    "pointer to the sequences": (
        lambda w: setattr(w.arena_field("seqs"), "value", 64),
        1,
        "arena: pointers to its sequences and index hold",
    ),
    "number of copies, by its sum": (damage_copies, 1, "arena: counts of sequences and copies hold"),
    "number of copies": (damage_copies, 3, "arena: n_copies is the number of copies"),
    "sequence limit": (
        lambda w: setattr(field(w.a.address, "pkv_seq.max_pages"), "value", 1 << 40),
        3,
        "sequence: constant fields hold",
    ),
    "sequence link": (
        lambda w: setattr(field(w.a.address, "pkv_seq.next"), "value", 64),
        3,
        "sequence: links and copy hold",
    ),
    "index limit": (
        lambda w: setattr(field(w.index.address, "pkv_prefix.n_buckets"), "value", 1 << 40),
        3,
        "prefix: constant fields hold",
    ),
    "negative n_free": (lambda w: setattr(w.arena_field("n_free"), "value", -1), 1, "arena: n_free is not negative"),
    "negative n_in_use": (
        lambda w: setattr(w.arena_field("n_in_use"), "value", -1),
        1,
        "arena: n_in_use is not negative",
    ),
    "negative n_cached": (
        lambda w: setattr(w.arena_field("n_cached"), "value", -1),
        1,
        "arena: n_cached is not negative",
    ),
    "counts that add up": (damage_balance, 2, "arena: n_free is the number of FREE pages"),
    "counts that add up, in use": (damage_balance, 2, "arena: n_in_use is the number of IN_USE pages"),
    "FREE page made CACHED": (lambda w: w.page(6, "state", 2), 2, "arena: n_cached is the number of CACHED pages"),
    "FREE page counted": (lambda w: w.page(6, "refcount", 1), 2, "page: FREE has refcount 0"),
    "FREE page indexed": (lambda w: w.page(6, "indexed", 1), 2, "page: FREE is not indexed"),
    "IN_USE page made FREE": (lambda w: w.page(4, "state", 0), 2, "page: FREE is on a list"),
    "IN_USE page not counted": (lambda w: w.page(4, "refcount", 0), 2, "page: IN_USE has refcount > 0"),
    "indexed twice": (lambda w: w.page(1, "indexed", 2), 2, "page: indexed is 0 or 1"),
    "FREE page made IN_USE": (lambda w: w.page(6, "state", 1), 2, "page: IN_USE is on no list"),
    "CACHED page counted": (lambda w: w.page(2, "refcount", 1), 2, "page: CACHED has refcount 0"),
    "CACHED page not indexed": (lambda w: w.page(2, "indexed", 0), 2, "page: CACHED is indexed"),
    "IN_USE page made CACHED": (lambda w: w.page(1, "state", 2), 2, "page: CACHED is on a list"),
    "no such state": (lambda w: w.page(4, "state", 3), 2, "page: state is one of three"),
    "free list link": (lambda w: w.page(5, "next", 5), 3, "free list: links answer each other"),
    "free list member": (lambda w: w.page(6, "state", 1), 3, "free list: member is FREE"),
    "free list shortened": (damage_list_length, 3, "free list: length is n_free"),
    "LRU link": (lambda w: w.page(3, "prev", 5), 3, "LRU list: links answer each other"),
    "LRU member": (lambda w: w.page(3, "state", 1), 3, "LRU list: member is CACHED"),
    "LRU length": (lambda w: setattr(w.arena_field("n_cached"), "value", 1), 3, "LRU list: length is n_cached"),
    "guard, in use": (lambda w: poke(page_address(w.arena, 4) + 64, b"?"), 3, "page: guard word holds"),
    "guard, cached": (lambda w: poke(page_address(w.arena, 2) + 71, b"?"), 3, "page: guard word holds"),
    "refcount": (lambda w: w.page(1, "refcount", 3), 3, "page: refcount is the number of holders"),
    "sequence canary": (lambda w: poke(w.a.address, b"?"), 3, "sequence: canaries hold"),
    "sequence arena": (lambda w: poke(w.a.address + 8, b"?"), 3, "sequence: arena is the one it is listed in"),
    "sequence back link": (damage_back_link, 3, "sequence: the list links back"),
    "half a copy": (
        lambda w: poke(w.a.address + LAYOUT["pkv_seq.copy_from"][0], b"\1\0\0\0"),
        3,
        "sequence: both pages of a copy or neither",
    ),
    "copy of nothing": (
        lambda w: poke(w.a.address + LAYOUT["pkv_seq.copy_from"][0], b"\x63\0\0\0\x63\0\0\0"),
        3,
        "sequence: copy is between pages",
    ),
    "sequence count": (
        lambda w: poke(w.a.address + LAYOUT["pkv_seq.n_pages_used"][0], b"\x63"),
        3,
        "sequence: n_pages is in [0, max_pages]",
    ),
    "table entry": (lambda w: poke(w.table(w.a), b"\x63"), 3, "sequence: table entry is a page"),
    "number of sequences": (damage_seq_list, 3, "arena: n_seqs is the number of sequences"),
    "prefix canary": (lambda w: poke(w.index.address, b"?"), 3, "prefix: canaries hold"),
    "tokens": (damage_tokens, 3, "prefix: hash is that of the tokens"),
    "hash": (lambda w: w.entry(3, "hash", 5), 3, "prefix: hash is that of the tokens"),
    "bucket": (damage_bucket, 3, "prefix: page is once in the tree and once in a bucket"),
    "bucket link": (lambda w: w.entry(3, "next_in_bucket", 6), 3, "prefix: page in a bucket is indexed"),
    "wrong bucket": (lambda w: w.entry(3, "hash", 1 << 63), 3, "prefix: bucket is the one of the hash"),
    "parent": (lambda w: w.entry(3, "parent", 6), 3, "prefix: parent is indexed"),
    "other parent": (lambda w: w.entry(3, "parent", 1), 3, "prefix: child names its parent"),
    "child": (lambda w: w.entry(2, "first_child", 6), 3, "prefix: child is indexed"),
    "sibling": (lambda w: w.entry(1, "prev_sibling", 0xFFFFFFFF), 3, "prefix: siblings link back"),
    "count of entries": (
        lambda w: poke(w.index.address + LAYOUT["pkv_prefix.n_entries"][0], b"\x05"),
        3,
        "prefix: n_entries is the number of indexed pages",
    ),
}


@pytest.mark.parametrize("name", DAMAGE)
def test_damage_is_named_at_its_level(name):
    damage, level, what = DAMAGE[name]
    world = World()
    sequence = peek(world.a.address, LAYOUT["pkv_seq"][0])
    damage(world)
    assert what in world.found(level)
    if level > 1:
        assert what not in world.found(level - 1)
    poke(world.a.address, sequence)  # a wild pointer in it would be followed when it dies


def test_the_checker_does_not_poison():
    world = World()
    poke(page_address(world.arena, 4) + 64, b"?")
    assert world.found(3) == {"page: guard word holds"}
    assert world.arena.is_valid()


def test_closed_arena_is_a_violation():
    world = World()
    world.arena.close()
    for level in (1, 2, 3):
        assert world.found(level) == {"arena: not poisoned"}


def test_every_invariant_has_a_case_here():
    source = (Path(__file__).parents[2] / "pagedkv/core/check.pyx").read_text()
    named = set(re.findall(r'b"([a-zA-Z ]+: [^"]+)"', source))
    assert named - {what for _, _, what in DAMAGE.values()} == {"checker: memory for level 3"}
