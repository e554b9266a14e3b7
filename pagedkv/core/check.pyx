"""THE checker: every invariant of arena, sequences and prefix index, in one function.

    level 1   O(1)         canaries, poison, counters
    level 2   O(pages)     state against refcount, list and index membership of each page; counters recounted
    level 3   everything   free list and LRU walked, sequences, holders recounted against refcounts, guard words,
                           prefix tree, buckets and hashes

It observes and never repairs, poisons or raises. Every index is checked before it is followed, so damage cannot crash
it; where a structure is too damaged to follow, it reports that and goes on with the next. It holds the arena's lock
throughout.
"""

from typing import NamedTuple

from libc.stdint cimport int32_t, int64_t, uint8_t, uint32_t, uint64_t
from libc.string cimport memset

from pagedkv.core.arena cimport Arena, error
from pagedkv.core.arguments cimport bounded
from pagedkv.core.internal cimport *
from pagedkv.core.memory cimport pkv_alloc, pkv_release
from pagedkv.core.structs cimport *


cdef struct Report:
    pkv_violation *out
    int64_t capacity
    int64_t n


cdef void note(Report *r, const char *what, int64_t where, int64_t expected, int64_t found) noexcept nogil:
    if r.n < r.capacity:
        r.out[r.n].what = what
        r.out[r.n].where = where
        r.out[r.n].expected = expected
        r.out[r.n].found = found
    r.n += 1


cdef inline void expect(Report *r, const char *what, int64_t where, int64_t expected, int64_t found) noexcept nogil:
    if expected != found:
        note(r, what, where, expected, found)


# --- level 1 ----------------------------------------------------------------------------------------------------------

cdef void check_fields(Report *r, pkv_arena *a) noexcept nogil:
    expect(r, b"arena: constant fields hold", -1, 1, constants_hold(a))
    expect(r, b"arena: sizes of its mappings are those of its pages", -1, 1, sizes_hold(a))
    expect(r, b"arena: pointers to its sequences and index hold", -1, 1, roots_hold(a))
    expect(r, b"arena: counts of sequences and copies hold", -1, 1, tallies_hold(a))


cdef void check_counters(Report *r, pkv_arena *a) noexcept nogil:
    expect(r, b"arena: n_free + n_in_use + n_cached is n_pages", -1, a.n_pages, a.n_free + a.n_in_use + a.n_cached)
    expect(r, b"arena: n_pages is in [0, max_pages]", -1, 1, 0 <= a.n_pages <= a.max_pages)
    expect(r, b"arena: n_free is not negative", -1, 1, a.n_free >= 0)
    expect(r, b"arena: n_in_use is not negative", -1, 1, a.n_in_use >= 0)
    expect(r, b"arena: n_cached is not negative", -1, 1, a.n_cached >= 0)


# --- level 2 ----------------------------------------------------------------------------------------------------------

cdef void check_pages(Report *r, pkv_arena *a) noexcept nogil:
    cdef int64_t n_free = 0
    cdef int64_t n_in_use = 0
    cdef int64_t n_cached = 0
    cdef uint32_t i
    cdef pkv_page *page
    cdef bint alone
    for i in range(<uint32_t>a.n_pages):
        page = a.pages + i
        alone = decode(a, i, page.next) == i and decode(a, i, page.prev) == i
        if page.state == PKV_PAGE_FREE:
            n_free += 1
            expect(r, b"page: FREE has refcount 0", i, 0, page.refcount)
            expect(r, b"page: FREE is not indexed", i, 0, page.indexed)
            expect(r, b"page: FREE is on a list", i, 0, alone)
        elif page.state == PKV_PAGE_IN_USE:
            n_in_use += 1
            expect(r, b"page: IN_USE has refcount > 0", i, 1, page.refcount > 0)
            expect(r, b"page: indexed is 0 or 1", i, page.indexed != 0, page.indexed)
            expect(r, b"page: IN_USE is on no list", i, 1, alone)
        elif page.state == PKV_PAGE_CACHED:
            n_cached += 1
            expect(r, b"page: CACHED has refcount 0", i, 0, page.refcount)
            expect(r, b"page: CACHED is indexed", i, 1, page.indexed)
            expect(r, b"page: CACHED is on a list", i, 0, alone)
        else:
            note(r, b"page: state is one of three", i, 0, page.state)
    expect(r, b"arena: n_free is the number of FREE pages", -1, n_free, a.n_free)
    expect(r, b"arena: n_in_use is the number of IN_USE pages", -1, n_in_use, a.n_in_use)
    expect(r, b"arena: n_cached is the number of CACHED pages", -1, n_cached, a.n_cached)


# --- level 3 ----------------------------------------------------------------------------------------------------------

cdef void check_list(Report *r, pkv_arena *a, uint32_t head, uint8_t state, int64_t length, const char *back,
                     const char *member, const char *whole) noexcept nogil:
    """Walk a list from its head: each link answered by the neighbour, each member in `state`, `length` members."""
    cdef uint32_t i = head
    cdef uint32_t n
    cdef int64_t steps = 0
    while steps <= a.n_pages:
        n = decode(a, i, a.pages[i].next)
        if (n != head and n >= a.n_pages) or decode(a, n, a.pages[n].prev) != i:
            note(r, back, i if i != head else -1, i, n)
            return
        if n == head:
            break
        expect(r, member, n, state, a.pages[n].state)
        i = n
        steps += 1
    expect(r, whole, -1, length, steps)


cdef void check_table(Report *r, pkv_arena *a, pkv_seq *s, int64_t n, uint32_t *holders) noexcept nogil:
    """The pages that sequence number n holds."""
    cdef int64_t k
    cdef uint32_t i
    for k in range(s.n_pages_used):
        i = s.page_indices[k]
        if i < a.n_pages:
            holders[i] += 1
        else:
            note(r, b"sequence: table entry is a page", n, a.n_pages - 1, i)
    expect(r, b"sequence: both pages of a copy or neither", n, s.copy_from == PKV_NO_PAGE, s.copy_to == PKV_NO_PAGE)
    if s.copy_to != PKV_NO_PAGE:
        if s.copy_from < a.n_pages and s.copy_to < a.n_pages:
            holders[s.copy_from] += 1
            holders[s.copy_to] += 1
        else:
            note(r, b"sequence: copy is between pages", n, s.copy_from, s.copy_to)


cdef void check_sequences(Report *r, pkv_arena *a, uint32_t *holders) noexcept nogil:
    """Every sequence as far as the list can be followed, and the number of holders of every page."""
    cdef pkv_seq *s = a.seqs
    cdef pkv_seq *before = NULL
    cdef int64_t n = 0
    cdef int64_t n_copies = 0
    cdef uint32_t i
    cdef bint whole = True
    while s != NULL:
        if not seq_canaries_hold(s):
            note(r, b"sequence: canaries hold", n, 1, 0)
            whole = False
            break
        expect(r, b"sequence: arena is the one it is listed in", n, <int64_t>a, <int64_t>s.arena)
        expect(r, b"sequence: the list links back", n, <int64_t>before, <int64_t>s.prev)
        if not 0 <= s.n_pages_used <= s.max_pages:
            note(r, b"sequence: n_pages is in [0, max_pages]", n, s.max_pages, s.n_pages_used)
            whole = False
        elif seq_whole(s):
            check_table(r, a, s, n, holders)
        if not seq_whole(s):
            note(r, b"sequence: constant fields hold", n, 1, 0)
            whole = False
        n_copies += s.copy_to != PKV_NO_PAGE
        n += 1
        if not links_hold(s) or s.prev != before:
            note(r, b"sequence: links and copy hold", n - 1, 1, 0)
            whole = False
            break
        before = s
        s = s.next
    if whole:
        expect(r, b"arena: n_seqs is the number of sequences", -1, n, a.n_seqs)
        expect(r, b"arena: n_copies is the number of copies", -1, n_copies, a.n_copies)
        for i in range(<uint32_t>a.n_pages):
            if not (<ArenaBlock *>a).n_abandoned or holders[i] > a.pages[i].refcount:
                expect(r, b"page: refcount is the number of holders", i, holders[i], a.pages[i].refcount)


cdef void check_guards(Report *r, pkv_arena *a) noexcept nogil:
    cdef uint32_t i
    for i in range(<uint32_t>a.n_pages):
        if a.pages[i].state != PKV_PAGE_FREE:
            expect(r, b"page: guard word holds", i, 1, guard_holds(a, i))


cdef inline bint is_entry(pkv_prefix *p, uint32_t i) noexcept nogil:
    return i < p.arena.n_pages and p.arena.pages[i].indexed == 1


cdef void check_prefix(Report *r, pkv_arena *a, uint32_t *seen) noexcept nogil:
    """The prefix tree: links both ways, hashes recomputed, every entry in its bucket once and below its parent once."""
    cdef pkv_prefix *p = a.prefix
    cdef pkv_prefix_entry *entry
    cdef uint32_t i, child, before
    cdef int64_t b, n, total, n_indexed
    cdef uint64_t hash
    if not prefix_canaries_hold(p):
        note(r, b"prefix: canaries hold", -1, 1, 0)
        return
    if not prefix_whole(p) or p.arena != a:
        note(r, b"prefix: constant fields hold", -1, 1, 0)
        return
    # Each entry is met once as a child of its parent (first pages: counted here) and once in the bucket its hash names.
    memset(seen, 0, a.n_pages * sizeof(uint32_t))
    n_indexed = 0
    for i in range(<uint32_t>a.n_pages):
        if a.pages[i].indexed:
            n_indexed += 1
            entry = p.entries + i
            if entry.parent == PKV_NO_PAGE:
                seen[i] += 1
            elif not is_entry(p, entry.parent):
                note(r, b"prefix: parent is indexed", i, 1, 0)
                continue
            hash = p.seed if entry.parent == PKV_NO_PAGE else p.entries[entry.parent].hash
            hash = chain_hash(hash, p.tokens + i * p.page_tokens, p.page_tokens)
            expect(r, b"prefix: hash is that of the tokens", i, <int64_t>hash, <int64_t>entry.hash)
            before = PKV_NO_PAGE
            n = 0
            child = entry.first_child
            while child != PKV_NO_PAGE and n <= p.n_entries:
                if not is_entry(p, child):
                    note(r, b"prefix: child is indexed", i, 1, 0)
                    break
                expect(r, b"prefix: child names its parent", child, i, p.entries[child].parent)
                expect(r, b"prefix: siblings link back", child, before, p.entries[child].prev_sibling)
                seen[child] += 1
                before = child
                child = p.entries[child].next_sibling
                n += 1
    expect(r, b"prefix: n_entries is the number of indexed pages", -1, n_indexed, p.n_entries)
    total = 0
    for b in range(p.n_buckets):
        i = p.buckets[b]
        while i != PKV_NO_PAGE and total <= p.n_entries:
            if not is_entry(p, i):
                note(r, b"prefix: page in a bucket is indexed", b, 1, 0)
                break
            hash = p.entries[i].hash & <uint64_t>(p.n_buckets - 1)
            expect(r, b"prefix: bucket is the one of the hash", i, <int64_t>hash, b)
            seen[i] += 1
            total += 1
            i = p.entries[i].next_in_bucket
    for i in range(<uint32_t>a.n_pages):
        expect(r, b"prefix: page is once in the tree and once in a bucket", i, 2 if a.pages[i].indexed else 0, seen[i])


cdef int64_t pkv_check(pkv_arena *a, int64_t level, pkv_violation *out, int64_t capacity) noexcept nogil:
    """Write the first `capacity` violations of the invariants up to `level` (1, 2, 3) to out; returns how many there
    are.

    BAD_INPUT for another level, a negative capacity, or a capacity without out; TAMPER for NULL. A closed or poisoned arena is a
    violation, and so is what is no arena. Level 3 allocates 4 bytes a page while it runs; that being refused is a violation too.
    """
    cdef Report report
    cdef uint32_t *scratch
    if not 1 <= level <= 3 or capacity < 0 or (capacity and out == NULL):
        return -PKV_BAD_INPUT
    if a == NULL:
        return -PKV_TAMPER
    report.out = out
    report.capacity = capacity
    report.n = 0
    if not canaries_hold(a):
        note(&report, b"arena: canaries hold", -1, 1, 0)
        return report.n
    lock(a)
    expect(&report, b"arena: not poisoned", a.fault_page, PKV_FAULT_NONE, a.fault)
    if a.fault != PKV_FAULT_CLOSED:
        check_fields(&report, a)
        check_counters(&report, a)
        # Levels 2 and 3 follow the constant fields and index by n_pages: they must be believable.
        if level >= 2 and constants_hold(a) and 0 <= a.n_pages <= a.max_pages:
            check_pages(&report, a)
            if level == 3:
                check_list(&report, a, free_head(a), PKV_PAGE_FREE, a.n_free, b"free list: links answer each other",
                           b"free list: member is FREE", b"free list: length is n_free")
                check_list(&report, a, lru_head(a), PKV_PAGE_CACHED, a.n_cached, b"LRU list: links answer each other",
                           b"LRU list: member is CACHED", b"LRU list: length is n_cached")
                check_guards(&report, a)
                scratch = <uint32_t *>pkv_alloc((a.n_pages + 1) * sizeof(uint32_t))
                if scratch == NULL:
                    note(&report, b"checker: memory for level 3", -1, 1, 0)
                elif roots_hold(a):
                    memset(scratch, 0, a.n_pages * sizeof(uint32_t))
                    check_sequences(&report, a, scratch)
                    if a.prefix != NULL:
                        check_prefix(&report, a, scratch)
                pkv_release(scratch)
    unlock(a)
    return report.n


# --- Python edge ------------------------------------------------------------------------------------------------------

class Violation(NamedTuple):
    """One broken invariant: the rule, the page or sequence it is about (-1: none), the value it should have and has."""

    what: str
    where: int
    expected: int
    found: int


def check(Arena arena not None, level=3):
    """Violations of the arena's invariants up to `level` (1, 2, 3), at most 1000; empty when sound.

    Never raises for damage, only BadInput for a level that does not exist, and Tampered for an arena that was never initialised. Holds
    the arena's lock and not the GIL.
    """
    cdef pkv_violation found[1000]
    cdef int64_t k, n, wanted
    wanted = bounded("level", level, 1, 3)
    with nogil:
        n = pkv_check(arena.ptr, wanted, found, 1000)
    if n < 0:
        raise error(n, arena.ptr, "")
    return [Violation(found[k].what.decode(), found[k].where, found[k].expected, found[k].found)
            for k in range(min(n, 1000))]
