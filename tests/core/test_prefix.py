"""The prefix index: matching, insertion, caching, eviction order, copy on write of indexed pages."""

from array import array

import numpy as np
import pytest

from pagedkv.core._testing import entry_address, free_list, lru_list, peek
from pagedkv.core.arena import Arena
from pagedkv.core.errors import BadInput, PoolExhausted, Tampered
from pagedkv.core.prefix import PrefixIndex


def make(n_pages=16, page_tokens=4, **kwargs):
    arena = Arena(n_pages, 64, **kwargs)
    return arena, PrefixIndex(arena, page_tokens)


def admit(arena, index, tokens, seq_id=0):
    """What an engine does: match, append what is missing, insert. Returns the sequence and the pages matched."""
    seq = arena.sequence(seq_id)
    hit = index.match(seq, tokens)
    need = -(-len(tokens) // index.page_tokens) - hit
    seq.append_pages(need)
    index.insert(seq, tokens)
    return seq, hit


@pytest.fixture
def sound():
    """Arenas handed to it are sound at the end of the test."""
    made = []
    yield made.append
    assert made
    for arena in made:
        assert arena.check(3) == []


def test_only_full_pages_count(sound):
    arena, index = make()
    sound(arena)
    seq = arena.sequence()
    seq.append_pages(3)
    assert index.insert(seq, range(11)) == 2
    assert index.n_pages == 2
    assert [index.lookup(range(n)) for n in (0, 3, 4, 7, 8, 11, 12, 20)] == [0, 0, 1, 1, 2, 2, 2, 2]


def test_match_shares_pages_of_a_living_sequence(sound):
    arena, index = make()
    sound(arena)
    seq, hit = admit(arena, index, list(range(10)))
    assert hit == 0
    other = arena.sequence()
    assert index.match(other, [*list(range(8)), 99, 98]) == 2
    assert other.page_table == seq.page_table[:2]
    assert [arena.refcount(i) for i in seq.page_table] == [2, 2, 1]
    assert index.stats() == {"n_pages": 2, "num_queried": 20, "num_hit": 8}


@pytest.mark.parametrize("position", range(8))
def test_one_different_token_ends_the_match_at_its_page(sound, position):
    arena, index = make()
    sound(arena)
    admit(arena, index, list(range(8)))
    tokens = list(range(8))
    tokens[position] = 1000
    assert index.lookup(tokens) == position // 4


def test_same_page_tokens_after_another_prefix_do_not_match(sound):
    arena, index = make()
    sound(arena)
    admit(arena, index, [1, 1, 1, 1, 5, 6, 7, 8])
    assert index.lookup([5, 6, 7, 8]) == 0
    assert index.lookup([2, 2, 2, 2, 5, 6, 7, 8]) == 0
    assert index.lookup([1, 1, 1, 1, 5, 6, 7, 8]) == 2


def test_released_pages_are_cached_and_found(sound):
    arena, index = make(n_pages=4)
    sound(arena)
    seq, _ = admit(arena, index, range(12))
    table = seq.page_table
    arena.page(table[1])[:] = b"k" * 64
    seq.free()
    assert (arena.n_cached, arena.n_in_use, arena.n_free) == (3, 0, 1)
    assert [arena.page_state(i) for i in table] == ["CACHED"] * 3
    assert lru_list(arena) == table[::-1]
    again, hit = admit(arena, index, range(12))
    assert (hit, again.page_table, arena.n_cached) == (3, table, 0)
    assert bytes(arena.page(table[1])) == b"k" * 64


def test_partial_last_page_is_freed_not_cached(sound):
    arena, index = make(n_pages=4)
    sound(arena)
    seq, _ = admit(arena, index, range(10))
    tail = seq.page_table[2]
    seq.free()
    assert (arena.n_cached, arena.n_free) == (2, 2)
    assert free_list(arena)[0] == tail


def test_eviction_takes_free_pages_first_then_oldest_leaf_first(sound):
    arena, index = make(n_pages=8)
    sound(arena)
    a, _ = admit(arena, index, [0] * 8 + [1] * 4, 1)  # pages 0 1 2
    b, _ = admit(arena, index, [0] * 8 + [2] * 4, 2)  # pages 0 1 3
    c, _ = admit(arena, index, [3] * 8, 3)  # pages 4 5
    assert (a.page_table, b.page_table, c.page_table) == ([0, 1, 2], [0, 1, 3], [4, 5])
    a.free()
    c.free()
    b.free()
    assert lru_list(arena) == [2, 5, 4, 3, 1, 0]
    taker = arena.sequence()
    assert taker.append_pages(2) == [6, 7]
    assert [taker.append_page() for _ in range(6)] == [2, 5, 4, 3, 1, 0]
    assert (index.n_pages, arena.stats()["num_evicted"]) == (0, 6)
    with pytest.raises(PoolExhausted):
        taker.append_page()


def test_a_hit_makes_young_again(sound):
    arena, index = make(n_pages=4)
    sound(arena)
    for k in (1, 2, 3):
        admit(arena, index, [k] * 4)[0].free()
    first, second, third = lru_list(arena)
    admit(arena, index, [1] * 4)[0].free()
    assert lru_list(arena) == [second, third, first]
    assert index.lookup([1] * 4) == 1
    taker = arena.sequence()
    taker.append_pages(2)
    assert index.lookup([2] * 4) == 0
    assert index.lookup([1] * 4) == index.lookup([3] * 4) == 1


def test_lookup_changes_nothing(sound):
    arena, index = make(n_pages=4)
    sound(arena)
    for k in (1, 2):
        admit(arena, index, [k] * 4)[0].free()
    before = lru_list(arena)
    index.lookup([1] * 4)
    assert lru_list(arena) == before
    assert index.stats()["num_queried"] == 8


def test_growth_comes_before_eviction(sound):
    arena, index = make(n_pages=2, max_pages=3, growth_pages=1)
    sound(arena)
    admit(arena, index, [1] * 8)[0].free()
    taker = arena.sequence()
    assert taker.append_page() == 2
    assert arena.n_cached == 2
    taker.append_page()
    assert (arena.n_cached, arena.n_pages) == (1, 3)


def test_reserve_evicts_nothing(sound):
    arena, index = make(n_pages=3)
    sound(arena)
    admit(arena, index, [1] * 8)[0].free()
    with pytest.raises(PoolExhausted):
        arena.reserve(2)
    assert arena.n_cached == 2
    assert arena.sequence().append_pages(3) and index.n_pages == 0


def test_parent_with_a_child_in_use_is_spared_until_nothing_else_is_left(sound):
    arena, index = make(n_pages=3)
    sound(arena)
    a, _ = admit(arena, index, [1] * 8)  # pages 0 1
    holder = arena.sequence()
    holder.share_page(1)  # the child alone, which no table by match would do
    a.free()
    b, _ = admit(arena, index, [2] * 4)  # page 2
    b.free()
    assert lru_list(arena) == [0, 2]
    taker = arena.sequence()
    assert taker.append_page() == 2
    assert taker.append_page() == 0
    assert (index.n_pages, arena.refcount(1), arena.page_state(1)) == (0, 1, "IN_USE")
    holder.free()
    assert arena.page_state(1) == "FREE"


def test_duplicate_content_is_exchanged_on_insert(sound):
    arena, index = make()
    sound(arena)
    a, b = arena.sequence(1), arena.sequence(2)
    a.append_pages(2)
    b.append_pages(3)
    assert index.insert(a, [7] * 8) == 2
    assert index.insert(b, [7] * 8 + [8] * 4) == 3
    assert b.page_table == [0, 1, 4]
    assert (arena.n_in_use, arena.refcount(0), arena.n_free) == (3, 2, 13)
    a.free()
    b.free()
    assert index.lookup([7] * 8 + [8] * 4) == 3


def test_duplicate_of_cached_content_revives_it(sound):
    arena, index = make()
    sound(arena)
    a, b = arena.sequence(1), arena.sequence(2)
    b.append_pages(1)
    a.append_pages(1)
    index.insert(a, [7] * 4)
    a.free()
    assert index.insert(b, [7] * 4) == 1
    assert (b.page_table, arena.n_cached, arena.page_state(0)) == ([1], 0, "FREE")


def test_insert_again_is_cheap_and_changes_nothing(sound):
    arena, index = make()
    sound(arena)
    seq = arena.sequence()
    seq.append_pages(4)
    for n in range(17):
        assert index.insert(seq, range(n)) == n // 4
    assert (index.n_pages, seq.page_table) == (4, [0, 1, 2, 3])


def test_page_indexed_under_other_tokens_stops_the_insert(sound):
    arena, index = make()
    sound(arena)
    seq = arena.sequence()
    seq.append_pages(2)
    index.insert(seq, [1] * 8)
    assert index.insert(seq, [1] * 4 + [2] * 4) == 1
    assert index.insert(seq, [3] * 8) == 0
    assert index.n_pages == 2


def test_writing_an_indexed_page_takes_it_and_its_followers_out(sound):
    arena, index = make()
    sound(arena)
    seq, _ = admit(arena, index, range(16))
    index.lookup(range(16))
    assert seq.write_page(1) == 1
    assert index.lookup(range(16)) == 1
    assert index.n_pages == 1
    assert arena.stats()["num_copied"] == 0
    seq.free()
    assert (arena.n_cached, arena.n_free) == (1, 15)


def test_writing_an_indexed_page_frees_cached_followers(sound):
    arena, index = make()
    sound(arena)
    a, _ = admit(arena, index, [1] * 8)
    b, _ = admit(arena, index, [1] * 4 + [2] * 4)
    c, _ = admit(arena, index, [1] * 4 + [3] * 8)
    b.free()
    c.free()
    assert arena.n_cached == 3
    a.write_page(0)
    assert (arena.n_cached, arena.n_in_use, index.n_pages) == (0, 2, 0)


def test_writing_a_shared_indexed_page_copies_and_keeps_the_index(sound):
    arena, index = make()
    sound(arena)
    a, _ = admit(arena, index, [1] * 8)
    b = a.snapshot()
    assert b.write_page(1) == 2
    assert index.lookup([1] * 8) == 2
    b.free()
    assert arena.page_state(2) == "FREE"


def test_match_needs_an_empty_sequence_of_the_same_arena(sound):
    arena, index = make()
    sound(arena)
    seq = arena.sequence()
    seq.append_page()
    with pytest.raises(BadInput):
        index.match(seq, [1] * 4)
    with pytest.raises(BadInput):
        index.match(Arena(1, 64).sequence(), [1] * 4)
    with pytest.raises(BadInput):
        index.insert(Arena(1, 64).sequence(), [])
    with pytest.raises(BadInput, match="8 tokens"):
        index.insert(seq, [1] * 8)


def test_match_stops_at_max_pages(sound):
    arena, index = make()
    sound(arena)
    admit(arena, index, [1] * 16)
    seq = arena.sequence(0, max_pages=2)
    assert index.match(seq, [1] * 16) == 2
    assert seq.n_pages == 2


def test_clear(sound):
    arena, index = make()
    sound(arena)
    a, _ = admit(arena, index, [1] * 12)
    admit(arena, index, [2] * 12)[0].free()
    index.clear()
    assert (index.n_pages, arena.n_cached, arena.n_in_use) == (0, 0, 3)
    a.free()
    assert arena.n_free == 16


def test_death_of_the_index_frees_cached_pages(sound):
    arena, index = make()
    sound(arena)
    admit(arena, index, [1] * 12)[0].free()
    del index
    assert (arena.n_cached, arena.n_free) == (0, 16)
    PrefixIndex(arena, 2)


@pytest.mark.parametrize(("page_tokens", "seed"), [(0, 0), (-1, 0), (1 << 40, 0), (4, -1), (4, 1 << 64)])
def test_creation_out_of_range(page_tokens, seed):
    with pytest.raises(BadInput):
        PrefixIndex(Arena(1, 64), page_tokens, seed=seed)


def test_one_index_per_arena():
    arena, index = make()
    with pytest.raises(BadInput, match="index already"):
        PrefixIndex(arena, 4)
    assert index.is_valid()


def test_token_types(sound):
    arena, index = make()
    sound(arena)
    seq = arena.sequence()
    seq.append_pages(2)
    index.insert(seq, [-1, 2**31 - 1, -(2**31), 0, 5, 6, 7, 8])
    same = [
        (-1, 2**31 - 1, -(2**31), 0, 5, 6, 7, 8),
        array("i", [-1, 2**31 - 1, -(2**31), 0, 5, 6, 7, 8]),
        np.array([-1, 2**31 - 1, -(2**31), 0, 5, 6, 7, 8], np.int32),
        memoryview(array("i", [-1, 2**31 - 1, -(2**31), 0, 5, 6, 7, 8])),
    ]
    assert [index.lookup(t) for t in same] == [2] * 4


def collide():
    """Two different strings of three tokens with the same 64-bit hash under seed 0. After two tokens the states must
    agree in their upper half (a birthday search); the third token then cancels the difference of the lower halves."""
    pairs = np.random.default_rng(1).integers(0, 1 << 31, (1 << 18, 2)).astype(np.uint64)
    state = np.full(1 << 18, 0x2545F4914F6CDD1D, np.uint64)
    for tokens in pairs.T:
        state = (state ^ tokens) * np.uint64(0x9E3779B97F4A7C15)
        state ^= state >> np.uint64(29)
    order = np.argsort(state >> np.uint64(32), kind="stable")
    upper = (state >> np.uint64(32))[order]
    k = int(np.flatnonzero(upper[1:] == upper[:-1])[0])
    a, b = order[k], order[k + 1]
    difference = int(state[a] ^ state[b])
    assert 0 < difference < 1 << 32
    return [*pairs[a].tolist(), 0], [*pairs[b].tolist(), int(np.uint32(difference).view(np.int32))]


def test_equal_hashes_do_not_make_equal_pages(sound):
    one, two = collide()
    arena, index = make(page_tokens=3)
    sound(arena)
    a, hit = admit(arena, index, one)
    assert hit == 0
    assert index.lookup(two) == 0
    b, hit = admit(arena, index, two)
    assert hit == 0
    assert peek(entry_address(arena, a.page_table[0]), 8) == peek(entry_address(arena, b.page_table[0]), 8)
    assert index.match(arena.sequence(), one) == index.match(arena.sequence(), two) == 1
    first, second = admit(arena, index, one)[0], admit(arena, index, two)[0]
    assert (first.page_table, second.page_table) == (a.page_table, b.page_table)


def test_equal_tokens_after_equal_hashes_do_not_make_equal_pages(sound):
    """The same page after two prefixes with the same hash: only the parent tells them apart."""
    one, two = collide()
    arena, index = make(page_tokens=3)
    sound(arena)
    admit(arena, index, [*one, 7, 7, 7])
    admit(arena, index, two)
    assert index.lookup([*two, 7, 7, 7]) == 1
    assert index.lookup([*one, 7, 7, 7]) == 2


def test_two_hundred_prefixes_keep_apart(sound):
    arena, index = make(n_pages=200, page_tokens=1)
    sound(arena)
    for k in range(200):
        admit(arena, index, [k])[0].free()
    assert [index.lookup([k]) for k in range(201)] == [1] * 200 + [0]
    pages = set()
    for k in range(200):
        with arena.sequence() as seq:
            index.match(seq, [k])
            pages.update(seq.page_table)
    assert pages == set(range(200))


def test_after_arena_closed():
    arena, index = make()
    seq = arena.sequence()
    arena.close()
    assert not index.is_valid()
    for call in (lambda: index.lookup([1]), lambda: index.match(seq, [1]), lambda: index.insert(seq, []), index.clear):
        with pytest.raises(Tampered, match="closed"):
            call()


def test_without_init_nothing_works_and_nothing_crashes():
    index = PrefixIndex.__new__(PrefixIndex)
    seq = Arena(1, 1).sequence()
    assert not index.is_valid()
    assert (index.address, index.n_pages, index.page_tokens) == (0, 0, 0)
    for call in (
        lambda: index.lookup([1]),
        lambda: index.match(seq, [1]),
        lambda: index.insert(seq, []),
        index.clear,
        index.stats,
    ):
        with pytest.raises(Tampered):
            call()


TOKENS = [5, 6, -7, 2**31 - 1, -(2**31), 8]
KNOWN = {
    "list": list,
    "tuple": tuple,
    "iterator": iter,
    "int32 array": lambda t: array("i", t),
    "int64 array": lambda t: array("q", t),
    "int32": lambda t: np.array(t, np.int32),
    "int64": lambda t: np.array(t, np.int64),
    "big-endian int32": lambda t: np.array(t, ">i4"),
    "every other": lambda t: np.repeat(np.array(t, np.int32), 2)[::2],
    "read-only": lambda t: memoryview(np.array(t, np.int32)).toreadonly(),
    "memoryview of int64": lambda t: memoryview(array("q", t)),
    "NumPy integers": lambda t: [np.int64(x) for x in t],
    "range": lambda t: t,
}


@pytest.mark.parametrize("kind", KNOWN)
def test_integers_of_any_kind_are_the_same_tokens(kind):
    arena = Arena(8, 64)
    index, seq = PrefixIndex(arena, 2), arena.sequence()
    seq.append_pages(3)
    tokens = range(10, 16) if kind == "range" else TOKENS
    assert index.insert(seq, list(tokens)) == 3
    assert index.lookup(KNOWN[kind](tokens)) == 3
    assert index.match(arena.sequence(), KNOWN[kind](tokens)) == 3
    assert index.insert(seq, KNOWN[kind](tokens)) == 3


@pytest.mark.parametrize(
    ("tokens", "message"),
    [
        (b"\5\0\0\0\6\0\0\0", r"token_ids: b'.*' is bytes, not integers"),
        (bytearray(8), r"token_ids: bytearray\(.*\) is bytearray, not integers"),
        ("56", "token_ids: '56' is str, not integers"),
        (7, "token_ids: 7 is no sequence of integers"),
        (None, "token_ids: None is no sequence of integers"),
        ([1, 2.0], "token_ids: entry 1: 2.0 is not an integer"),
        ([1, 2, True], "token_ids: entry 2: True is not an integer"),
        ([1, None], "token_ids: entry 1: None is not an integer"),
        (np.zeros(3), "token_ids: entry 0: 0.0 is not an integer"),
        (np.zeros(3, np.float32), "token_ids: entry 0: 0.0 is not an integer"),
        (memoryview(array("f", [1, 2])), "token_ids: entry 0: 1.0 is not an integer"),
        (np.zeros((2, 2), np.int32), r"token_ids: entry 0: \[0, 0\] is not an integer"),
        (np.array(3, np.int32), r"token_ids: array\(3.*\) is no sequence of integers"),
        ([1, 2**31], r"token_ids: entry 1: 2147483648 is outside \[-2147483648, 2147483647\]"),
        (np.array([0, 0, -(2**31) - 1]), r"token_ids: entry 2: -2147483649 is outside \[-2147483648, 2147483647\]"),
        (np.array([2**32 - 1], np.uint32), r"token_ids: entry 0: 4294967295 is outside \[-2147483648, 2147483647\]"),
        ([10**5000], r"token_ids: entry 0: <int> is outside \[-2147483648, 2147483647\]"),
    ],
)
def test_what_is_no_token_is_named_with_its_place(tokens, message):
    arena = Arena(8, 64)
    index, seq = PrefixIndex(arena, 2), arena.sequence()
    seq.append_pages(3)
    for call in (index.lookup, lambda t: index.match(arena.sequence(), t), lambda t: index.insert(seq, t)):
        with pytest.raises(BadInput, match=f"^({message})$"):
            call(tokens)
    assert index.stats()["n_pages"] == 0
