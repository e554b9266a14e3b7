"""Verdicts and return values of the reference arena (nx_kv_arena), function by function, through the C API.

Where this arena answers differently on purpose, the row says so: errors of accessors are negated verdicts (the
reference knows -1 only), sequence_free negates its verdict like everything else, limits are larger, page states know
CACHED, and a free page is found on a list, last released first, and not by the lowest index.
"""

import pytest
from raw_api import RawApi, field

from pagedkv.core.errors import Verdict

api = RawApi()
OK, BAD_INPUT, POOL_EXHAUSTED, SEQ_FULL, TAMPER, NOT_FOUND = range(6)
TABLE = []


def reference(name):
    """Register a scenario for one reference function: it yields (what, expected, found) rows."""

    def register(scenario):
        TABLE.append(pytest.param(scenario, id=name))
        return scenario

    return register


class Pool:
    """An arena and its sequences, raw."""

    def __init__(self, n_pages=4, page_bytes=100):
        status, self.arena = api.make(api.arena_new, n_pages, page_bytes, 0, 0, 0)
        assert status == OK
        self.seqs = []

    def seq(self, seq_id=1, max_pages=64):
        status, seq = api.make(api.seq_new, self.arena, seq_id, max_pages)
        assert status == OK
        self.seqs.append(seq)
        return seq

    def tamper(self, name):
        field(self.arena, f"pkv_arena.{name}").value ^= 1 << 40

    def counts(self):
        return api.arena_n_pages(self.arena), api.arena_n_in_use(self.arena), api.arena_n_free(self.arena)


@reference("nx_kv_verdict_is_valid")
def verdict_is_valid(_):
    for v in range(-2, 9):
        yield f"verdict {v}", 0 <= v < 6, v in set(Verdict)


@reference("nx_kv_arena_new")
def arena_new(_):
    for n_pages, page_bytes, works in ((0, 4096, 0), (-1, 4096, 0), (4, 0, 0), (4, -1, 0), (1, 1, 1), (256, 4096, 1)):
        status, arena = api.make(api.arena_new, n_pages, page_bytes, 0, 0, 0)
        yield f"{n_pages} pages of {page_bytes}", (bool(works), works), (arena != 0, status == OK)
        yield "verdict", OK if works else -BAD_INPUT, status
        if works:
            yield (
                "pages",
                (n_pages, 0, n_pages),
                (
                    api.arena_n_pages(arena),
                    api.arena_n_in_use(arena),
                    api.arena_n_free(arena),
                ),
            )
            yield "states", {0}, {api.arena_page_state(arena, i) for i in range(n_pages)}
            yield "refcounts", {0}, {api.arena_refcount(arena, i) for i in range(n_pages)}
            api.arena_destroy(arena)
    status, arena = api.make(api.arena_new, 257, 64, 0, 0, 0)
    yield "larger limit: more than 256 pages", OK, status
    api.arena_destroy(arena)


@reference("nx_kv_arena_is_valid")
def arena_is_valid(make):
    yield "null", 0, api.arena_is_valid(None)
    yield "fresh", 1, api.arena_is_valid(make().arena)
    for name in ("canary_pre", "canary_post", "n_pages", "n_in_use", "n_free"):
        pool = make()
        pool.tamper(name)
        yield name, 0, api.arena_is_valid(pool.arena)
    for name in ("n_pages", "n_in_use", "n_free"):
        pool = make()
        field(pool.arena, f"pkv_arena.{name}").value = -1
        yield f"negative {name}", 0, api.arena_is_valid(pool.arena)


@reference("_kv_arena_find_free")
def find_free(make):
    pool = make()
    a, b = pool.seq(), pool.seq()
    yield "fresh pool: ascending", [0, 1], [api.seq_append_page(a) for _ in range(2)]
    api.seq_append_page(b)
    api.seq_free(a)
    yield "released pages are found again, last first", [1, 0, 3], [api.seq_append_page(b) for _ in range(3)]
    yield "none", -POOL_EXHAUSTED, api.seq_append_page(b)


@reference("nx_kv_sequence_new")
def sequence_new(make):
    pool = make()
    seq = pool.seq(77)
    yield "id", 77, field(seq, "pkv_seq.seq_id").value
    yield "limit", 64, field(seq, "pkv_seq.max_pages").value
    yield "empty", 0, api.seq_n_pages(seq)
    yield "null arena", (-TAMPER, 0), api.make(api.seq_new, None, 1, 64)
    pool.tamper("canary_pre")
    yield "tampered arena", (-TAMPER, 0), api.make(api.seq_new, pool.arena, 1, 64)


@reference("nx_kv_sequence_is_valid")
def sequence_is_valid(make):
    pool = make()
    seq = pool.seq()
    yield "null", 0, api.seq_is_valid(None)
    yield "fresh", 1, api.seq_is_valid(seq)
    for name in ("canary_pre", "canary_post"):
        field(seq, f"pkv_seq.{name}").value ^= 1
        yield name, 0, api.seq_is_valid(seq)
        field(seq, f"pkv_seq.{name}").value ^= 1
    for used in (-1, 65):
        pool = make()
        seq = pool.seq()
        field(seq, "pkv_seq.n_pages_used").value = used
        yield f"{used} pages used", 0, api.seq_is_valid(seq)
    pool = make()
    seq = pool.seq()
    pool.tamper("n_free")
    yield "tampered arena", 0, api.seq_is_valid(seq)


@reference("nx_kv_sequence_append_page")
def append_page(make):
    pool = make()
    seq, short = pool.seq(), pool.seq(2, max_pages=1)
    yield "null", -TAMPER, api.seq_append_page(None)
    yield "first", 0, api.seq_append_page(seq)
    yield "counts", (4, 1, 3), pool.counts()
    yield "refcount", 1, api.arena_refcount(pool.arena, 0)
    yield "state IN_USE", 1, api.arena_page_state(pool.arena, 0)
    yield "second", 1, api.seq_append_page(short)
    yield "limit before pool", -SEQ_FULL, api.seq_append_page(short)
    yield "rest", [2, 3], [api.seq_append_page(seq) for _ in range(2)]
    yield "exhausted", -POOL_EXHAUSTED, api.seq_append_page(seq)
    yield "nothing changed", ((4, 4, 0), 3), (pool.counts(), api.seq_n_pages(seq))
    yield "limit, pool empty", -SEQ_FULL, api.seq_append_page(short)
    pool.tamper("canary_post")
    yield "tampered", -TAMPER, api.seq_append_page(seq)


@reference("nx_kv_sequence_share_page")
def share_page(make):
    pool = make()
    a, b, full = pool.seq(1), pool.seq(2), pool.seq(3, max_pages=1)
    api.seq_append_page(a)
    yield "null", -TAMPER, api.seq_share_page(None, 0)
    yield "negative", -BAD_INPUT, api.seq_share_page(b, -1)
    yield "behind the last", -BAD_INPUT, api.seq_share_page(b, 4)
    yield "far behind", -BAD_INPUT, api.seq_share_page(b, 1 << 40)
    yield "free page", -NOT_FOUND, api.seq_share_page(b, 1)
    yield "shared", 0, api.seq_share_page(b, 0)
    yield "refcount", 2, api.arena_refcount(pool.arena, 0)
    yield "in use counts pages once", (4, 1, 3), pool.counts()
    yield "one more", 0, api.seq_share_page(full, 0)
    yield "limit", -SEQ_FULL, api.seq_share_page(full, 0)
    yield "limit before range", -SEQ_FULL, api.seq_share_page(full, -1)
    yield "three holders", 3, api.arena_refcount(pool.arena, 0)
    pool.tamper("canary_pre")
    yield "tampered before limit", -TAMPER, api.seq_share_page(full, -1)


@reference("nx_kv_arena_page_refcount")
def page_refcount(make):
    pool = make()
    yield "free page", 0, api.arena_refcount(pool.arena, 3)
    yield "negative", -1, api.arena_refcount(pool.arena, -1)
    yield "behind the last", -1, api.arena_refcount(pool.arena, 4)
    yield "null (reference: -1)", -TAMPER, api.arena_refcount(None, 0)
    pool.tamper("canary_pre")
    yield "tampered (reference: -1)", -TAMPER, api.arena_refcount(pool.arena, 0)


@reference("nx_kv_sequence_free")
def sequence_free(make):
    pool = make()
    a, b = pool.seq(1), pool.seq(2)
    api.seq_append_page(a)
    api.seq_append_page(a)
    api.seq_share_page(b, 1)
    yield "free", OK, api.seq_free(a)
    yield (
        "shared page stays",
        ((4, 1, 3), 1, 1),
        (
            pool.counts(),
            api.arena_refcount(pool.arena, 1),
            api.arena_page_state(pool.arena, 1),
        ),
    )
    yield "empty", 0, api.seq_n_pages(a)
    yield "twice", OK, api.seq_free(a)
    yield "last holder", OK, api.seq_free(b)
    yield (
        "all back",
        ((4, 0, 4), 0, 0),
        (
            pool.counts(),
            api.arena_refcount(pool.arena, 1),
            api.arena_page_state(pool.arena, 1),
        ),
    )
    yield "usable again", True, api.seq_append_page(a) >= 0
    yield "null (reference: +TAMPER)", -TAMPER, api.seq_free(None)
    pool.tamper("canary_post")
    yield "tampered (reference: +TAMPER)", -TAMPER, api.seq_free(a)


@reference("nx_kv_arena_page_bytes")
def page_bytes(make):
    pool = make()
    start = api.arena_page(pool.arena, 0)
    stride = field(pool.arena, "pkv_arena.page_stride").value
    yield "storage", field(pool.arena, "pkv_arena.storage").value, start
    yield "stride (reference: page_bytes)", 128, stride
    yield "page i", [start + i * stride for i in range(4)], [api.arena_page(pool.arena, i) for i in range(4)]
    yield "negative", None, api.arena_page(pool.arena, -1)
    yield "behind the last", None, api.arena_page(pool.arena, 4)
    yield "null", None, api.arena_page(None, 0)
    pool.tamper("canary_pre")
    yield "tampered", None, api.arena_page(pool.arena, 0)


def counter(function, expected):
    def scenario(make):
        pool = make()
        seq = pool.seq()
        api.seq_append_page(seq)
        yield "one page used", expected, function(pool.arena)
        yield "null (reference: -1)", -TAMPER, function(None)
        pool.tamper("canary_pre")
        yield "tampered (reference: -1)", -TAMPER, function(pool.arena)

    return scenario


reference("nx_kv_arena_n_in_use")(counter(api.arena_n_in_use, 1))
reference("nx_kv_arena_n_free")(counter(api.arena_n_free, 3))
reference("nx_kv_arena_n_pages")(counter(api.arena_n_pages, 4))


@reference("nx_kv_sequence_n_pages")
def sequence_n_pages(make):
    pool = make()
    seq = pool.seq()
    yield "empty", 0, api.seq_n_pages(seq)
    api.seq_append_page(seq)
    api.seq_share_page(seq, 0)
    yield "two", 2, api.seq_n_pages(seq)
    yield "null (reference: -1)", -TAMPER, api.seq_n_pages(None)
    pool.tamper("canary_pre")
    yield "tampered (reference: -1)", -TAMPER, api.seq_n_pages(seq)


@pytest.mark.parametrize("scenario", TABLE)
def test_reference_function(scenario):
    pools = []

    def make():
        pools.append(Pool())
        return pools[-1]

    n = 0
    for what, expected, found in scenario(make):
        assert found == expected, what
        n += 1
    assert n > 0
    for pool in pools:
        intact = api.arena_is_valid(pool.arena)
        for seq in pool.seqs:
            api.seq_destroy(seq)
        assert api.arena_destroy(pool.arena) == OK or not intact


def test_every_reference_function_has_its_row():
    names = """nx_kv_verdict_is_valid nx_kv_arena_new nx_kv_arena_is_valid _kv_arena_find_free nx_kv_sequence_new
        nx_kv_sequence_is_valid nx_kv_sequence_append_page nx_kv_sequence_share_page nx_kv_arena_page_refcount
        nx_kv_sequence_free nx_kv_arena_page_bytes nx_kv_arena_n_in_use nx_kv_arena_n_free nx_kv_arena_n_pages
        nx_kv_sequence_n_pages"""
    assert sorted(p.id for p in TABLE) == sorted(names.split())
