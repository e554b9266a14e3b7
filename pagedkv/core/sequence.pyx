"""The page table of one sequence: append, share, snapshot, copy on write, truncate, free.

A page held by more than one table entry is shared and read-only to all holders; write_page gives the caller a page of
its own. The copy runs outside the lock: meanwhile the sequence itself holds both pages (copy_from, copy_to), so neither
can be taken away, the checker can account for them, and no other sequence waits.
"""

cimport cython
from libc.stdint cimport int64_t, uint32_t
from libc.string cimport memcpy

from pagedkv.core.arena cimport *
from pagedkv.core.arguments cimport bounded, integer, shown
from pagedkv.core.internal cimport *
from pagedkv.core.memory cimport pkv_alloc, pkv_release
from pagedkv.core.pages cimport pkv_held_can_take, pkv_held_drop, pkv_held_drop_last, pkv_held_take, pkv_held_take_free
from pagedkv.core.registry cimport enter, enter_seq, pkv_blame, pkv_blame_arena
from pagedkv.core.structs cimport *

from pagedkv.core.errors import Tampered


# --- creation and end -------------------------------------------------------------------------------------------------

cdef pkv_seq *allocate(int64_t max_pages) noexcept nogil:
    """Struct and table in one block, on no arena yet; NULL when memory is refused."""
    cdef pkv_seq *s = <pkv_seq *>pkv_alloc(sizeof(SeqBlock) + max_pages * sizeof(uint32_t))
    if s != NULL:
        s.canary_pre = PKV_SEQ_CANARY_PRE
        s.canary_post = PKV_SEQ_CANARY_POST
        s.arena = NULL
        s.seq_id = s.n_pages_used = s.n_tokens = 0
        s.max_pages = max_pages
        s.page_indices = <uint32_t *>(<SeqBlock *>s + 1)
        s.next = s.prev = NULL
        s.copy_from = s.copy_to = PKV_NO_PAGE
    return s


cdef bint register(pkv_arena *a, pkv_seq *s) noexcept nogil:
    """Put s on the arena's list; false, and the arena poisoned, when that is damaged. The lock is held."""
    if not lists_hold(a):
        return False
    if a.seqs != NULL and not (seq_whole(a.seqs) and links_hold(a.seqs)):
        poison(a, PKV_FAULT_SEQUENCE, -1)
        return False
    s.arena = a
    s.next = a.seqs
    (<SeqBlock *>s).seal = seq_seal(s)
    seal_links(s)
    if a.seqs != NULL:
        a.seqs.prev = s
        seal_links(a.seqs)
    a.seqs = s
    a.n_seqs += 1
    seal_roots(a)
    seal_tallies(a)
    return True


cdef bint unregister(pkv_arena *a, pkv_seq *s) noexcept nogil:
    """Take s, which is whole, off the arena's list; false, and the arena poisoned, when s, a neighbour or the list is damaged.
    The lock is held."""
    if not lists_hold(a):
        return False
    if (not links_hold(s) or (s.prev == NULL and a.seqs != s) or (s.prev != NULL and not answers(s.prev, s.prev.next, s))
            or (s.next != NULL and not answers(s.next, s.next.prev, s))):
        poison(a, PKV_FAULT_SEQUENCE, -1)
        return False
    if s.prev != NULL:
        s.prev.next = s.next
        seal_links(s.prev)
    else:
        a.seqs = s.next
    if s.next != NULL:
        s.next.prev = s.prev
        seal_links(s.next)
    a.n_seqs -= 1
    seal_roots(a)
    seal_tallies(a)
    return True


cdef inline bint answers(const pkv_seq *neighbour, const pkv_seq *link, const pkv_seq *s) noexcept nogil:
    return seq_whole(neighbour) and links_hold(neighbour) and link == s


cdef int64_t pkv_seq_new(pkv_seq **out, pkv_arena *arena, int64_t seq_id, int64_t max_pages) noexcept nogil:
    """Make an empty sequence. BAD_INPUT, TAMPER, or POOL_EXHAUSTED when memory is refused; *out is NULL then."""
    cdef pkv_seq *s
    if out == NULL:
        return -PKV_BAD_INPUT
    out[0] = NULL
    if not 0 < max_pages <= PKV_MAX_PAGES:
        return -PKV_BAD_INPUT
    if not pkv_arena_is_valid(arena):
        return -PKV_TAMPER
    s = allocate(max_pages)
    if s == NULL:
        return -PKV_POOL_EXHAUSTED
    s.seq_id = seq_id
    if enter(arena):
        pkv_release(s)
        return -PKV_TAMPER
    if register(arena, s):
        out[0] = s
    unlock(arena)
    if out[0] == NULL:
        pkv_release(s)
        return -PKV_TAMPER
    return 0


cdef int64_t pkv_seq_destroy(pkv_seq *s) noexcept nogil:
    """Free the pages and release the struct, also after its arena was closed, poisoned or destroyed.

    A struct that is not whole, or whose neighbours on the arena's list do not know it, is left alone: TAMPER.
    No other thread may be using the sequence.
    """
    cdef pkv_arena *a
    cdef bint listed
    if not seq_whole(s):
        return pkv_blame(s)
    pkv_seq_free(s)
    a = s.arena
    if a != NULL:
        if not canaries_hold(a):
            return pkv_blame_arena(a)
        lock(a)
        listed = unregister(a, s)
        (<ArenaBlock *>a).n_abandoned += listed and s.n_pages_used > 0
        unlock(a)
        if not listed:
            return -PKV_TAMPER
    s.canary_pre = s.canary_post = 0
    pkv_release(s)
    return 0


cdef int64_t pkv_seq_is_valid(pkv_seq *s) noexcept nogil:
    """1 when the sequence and its arena pass the level 1 check, else 0."""
    if enter_seq(s):
        return 0
    unlock(s.arena)
    return 1


cdef int64_t pkv_seq_n_pages(pkv_seq *s) noexcept nogil:
    """Number of table entries, or TAMPER."""
    cdef int64_t result = enter_seq(s)
    if result == 0:
        result = s.n_pages_used
        unlock(s.arena)
    return result


# --- the table --------------------------------------------------------------------------------------------------------

cdef int64_t append(pkv_seq *s, int64_t n) noexcept nogil:
    """n pages more, all or none: a page index (of the last one when n is 1), or a negated verdict."""
    cdef pkv_arena *a = s.arena
    cdef int64_t page = 0
    cdef int64_t at_once
    if n > s.max_pages - s.n_pages_used:
        return -PKV_SEQ_FULL
    if n > 1:
        page = pkv_held_can_take(a, n)
        at_once = min(n, a.n_free)
        if page == 0 and at_once:
            page = pkv_held_take_free(a, at_once, s.page_indices + s.n_pages_used)
            if page == 0:
                s.n_pages_used += at_once
                n -= at_once
    while n > 0 and page >= 0:
        page = pkv_held_take(a)
        if page >= 0:
            s.page_indices[s.n_pages_used] = <uint32_t>page
            s.n_pages_used += 1
            n -= 1
    return page


cdef int64_t pkv_seq_append_page(pkv_seq *s) noexcept nogil:
    """Take a page and put it at the end of the table; its index, or SEQ_FULL, POOL_EXHAUSTED, TAMPER. Its bytes are not
    cleared.
    """
    cdef int64_t result = enter_seq(s)
    if result == 0:
        if s.arena.n_free and s.n_pages_used < s.max_pages:
            result = take_first(s.arena)
            if result >= 0:
                s.page_indices[s.n_pages_used] = <uint32_t>result
                s.n_pages_used += 1
        else:
            result = append(s, 1)
        unlock(s.arena)
    return result


cdef int64_t pkv_seq_append_pages(pkv_seq *s, int64_t n) noexcept nogil:
    """Append n pages or none: 0, or BAD_INPUT (n < 0), SEQ_FULL, POOL_EXHAUSTED, TAMPER."""
    cdef int64_t result
    if n < 0:
        return -PKV_BAD_INPUT
    result = enter_seq(s)
    if result == 0:
        result = min(append(s, n), <int64_t>0)
        unlock(s.arena)
    return result


cdef int64_t pkv_seq_share_page(pkv_seq *s, int64_t i) noexcept nogil:
    """Put page i, held by some sequence, at the end of the table too; i, or SEQ_FULL, BAD_INPUT (no such page),
    NOT_FOUND (free).
    """
    cdef uint32_t page = <uint32_t>i if 0 <= i <= PKV_MAX_PAGES else PKV_NO_PAGE
    cdef int64_t result = pkv_seq_share_pages(s, &page, 1)
    return result if result else i


cdef int64_t pkv_seq_share_pages(pkv_seq *s, const uint32_t *pages, int64_t n) noexcept nogil:
    """Put n held pages at the end of the table, all or none: 0, or SEQ_FULL, BAD_INPUT, NOT_FOUND, TAMPER."""
    cdef pkv_page *meta
    cdef uint32_t n_pages, i, refcount
    cdef int64_t k = 0
    cdef int64_t result
    if n < 0 or (n and pages == NULL):
        return -PKV_BAD_INPUT
    result = enter_seq(s)
    if result:
        return result
    if n > s.max_pages - s.n_pages_used:
        unlock(s.arena)
        return -PKV_SEQ_FULL
    meta = s.arena.pages
    n_pages = <uint32_t>s.arena.n_pages
    while k < n:
        k += count_run(meta, n_pages, pages + k, n - k, False, 1, 1)
        if k == n:
            break
        i = pages[k]
        if unlikely(i >= n_pages):
            result = -PKV_BAD_INPUT
            break
        refcount = meta[i].refcount
        # 0 wraps around, so one comparison refuses a page nobody holds and one that cannot be counted any higher.
        if unlikely(refcount - <uint32_t>1 >= <uint32_t>0xFFFFFFFE):
            result = -PKV_BAD_INPUT if refcount else -PKV_NOT_FOUND
            break
        meta[i].refcount = refcount + 1
        k += 1
    if result == 0 and n:  # no memcpy from NULL, even of nothing
        memcpy(s.page_indices + s.n_pages_used, pages, n * sizeof(uint32_t))
        s.n_pages_used += n
    while result and k > 0:
        k -= 1
        meta[pages[k]].refcount -= 1
    unlock(s.arena)
    return result


cdef int64_t pkv_seq_snapshot(pkv_seq **out, pkv_seq *s) noexcept nogil:
    """A new sequence that shares every page of s, with its id, limit and n_tokens; POOL_EXHAUSTED when memory is
    refused.
    """
    cdef pkv_seq *copy
    cdef int64_t k, result
    cdef pkv_arena *a
    if out == NULL:
        return -PKV_BAD_INPUT
    out[0] = NULL
    if not pkv_seq_is_valid(s):
        return -PKV_TAMPER
    copy = allocate(s.max_pages)
    if copy == NULL:
        return -PKV_POOL_EXHAUSTED
    result = enter_seq(s)
    if result:
        pkv_release(copy)
        return result
    a = s.arena
    for k in range(s.n_pages_used):
        if not holdable(a, s.page_indices[k]) or a.pages[s.page_indices[k]].refcount == <uint32_t>0xFFFFFFFF:
            result = poison(a, PKV_FAULT_PAGE, s.page_indices[k])
            break
        a.pages[s.page_indices[k]].refcount += 1
    else:
        k = s.n_pages_used
    if result or not register(a, copy):
        while k > 0:
            k -= 1
            a.pages[s.page_indices[k]].refcount -= 1
        unlock(a)
        pkv_release(copy)
        return -PKV_TAMPER
    memcpy(copy.page_indices, s.page_indices, s.n_pages_used * sizeof(uint32_t))
    copy.seq_id = s.seq_id
    copy.n_pages_used = s.n_pages_used
    copy.n_tokens = s.n_tokens
    unlock(a)
    out[0] = copy
    return 0


cdef int64_t pkv_seq_can_write(pkv_seq *s, int64_t n_new, int64_t first, int64_t stop) noexcept nogil:
    """Whether n_new appends and write_page of the entries [first, stop) would succeed one after another, committing memory
    for those that need growth: 0, or BAD_INPUT (not in the table), SEQ_FULL, POOL_EXHAUSTED, TAMPER.
    """
    cdef pkv_arena *a
    cdef int64_t n_copies = 0
    cdef int64_t k, played
    cdef int64_t result = enter_seq(s)
    if result:
        return result
    a = s.arena
    if n_new < 0 or first < 0 or stop > s.n_pages_used:
        result = -PKV_BAD_INPUT
    elif n_new > s.max_pages - s.n_pages_used:
        result = -PKV_SEQ_FULL
    played = first
    # Every entry lets go of its page, so that of several entries with one page the last finds it unshared; then back.
    while result == 0 and played < stop:
        if not holdable(a, s.page_indices[played]):
            result = poison(a, PKV_FAULT_PAGE, s.page_indices[played])
            break
        n_copies += a.pages[s.page_indices[played]].refcount > 1
        a.pages[s.page_indices[played]].refcount -= 1
        played += 1
    for k in range(first, played):
        a.pages[s.page_indices[k]].refcount += 1
    if result == 0:
        result = pkv_held_can_take(a, n_new + n_copies)
    unlock(a)
    return result


cdef int64_t pkv_seq_write_page(pkv_seq *s, int64_t i) noexcept nogil:
    """Make the i-th page of the table the caller's own, to be written: its page index, which is a new one when it was
    shared.

    One copy when the page is shared, none when this table alone holds it; a page known to the prefix index is dropped
    from it with all that follow. BAD_INPUT when i is not in the table (also when another thread cut it short
    meanwhile), POOL_EXHAUSTED with nothing changed. Copies page_bytes outside the lock.
    """
    cdef pkv_arena *a
    cdef uint32_t old, cursor
    cdef int64_t taken
    cdef int64_t result = enter_seq(s)
    while result == 0 and s.copy_to != PKV_NO_PAGE and links_hold(s):
        unlock(s.arena)
        sched_yield()
        result = enter_seq(s)
    if result:
        return result
    a = s.arena
    if not links_hold(s):
        poison(a, PKV_FAULT_SEQUENCE, -1)
    if a.fault or not lists_hold(a):
        unlock(a)
        return -PKV_TAMPER
    old = s.page_indices[i] if 0 <= i < s.n_pages_used else PKV_NO_PAGE
    if old == PKV_NO_PAGE:
        result = -PKV_BAD_INPUT
    elif not holdable(a, old):
        result = poison(a, PKV_FAULT_PAGE, old)
    elif a.pages[old].refcount == 1:
        if a.pages[old].indexed:
            if a.forget != NULL:
                a.forget(a, old)
            else:
                poison(a, PKV_FAULT_PAGE, old)
        result = <int64_t>old if a.fault == PKV_FAULT_NONE else -PKV_TAMPER
    elif a.pages[old].refcount == <uint32_t>0xFFFFFFFF:
        result = -PKV_BAD_INPUT
    else:
        result = pkv_held_take(a)
    if result < 0 or result == old:
        unlock(a)
        return result

    taken = result
    a.pages[old].refcount += 1
    s.copy_from = old
    s.copy_to = <uint32_t>taken
    a.n_copies += 1
    seal_links(s)
    seal_tallies(a)
    unlock(a)
    memcpy(page_at(a, taken), page_at(a, old), a.page_bytes)
    lock(a)
    if tallies_hold(a):
        a.n_copies -= 1
        seal_tallies(a)
    else:
        poison(a, PKV_FAULT_FIELD, -1)
    if links_hold(s):
        s.copy_from = s.copy_to = PKV_NO_PAGE
        seal_links(s)
    else:
        poison(a, PKV_FAULT_SEQUENCE, -1)
    if a.fault:
        unlock(a)
        return -PKV_TAMPER
    cursor = free_head(a)
    if i < s.n_pages_used and s.page_indices[i] == old:
        s.page_indices[i] = <uint32_t>taken
        a.num_copied += 1
        pkv_held_drop(a, old, &cursor)
    else:
        pkv_held_drop(a, <uint32_t>taken, &cursor)
        result = -PKV_BAD_INPUT
    pkv_held_drop(a, old, &cursor)
    if a.fault:
        result = -PKV_TAMPER
    unlock(a)
    return result


cdef int64_t pkv_seq_truncate_pages(pkv_seq *s, int64_t n) noexcept nogil:
    """Keep the first n table entries and drop the rest, last first; BAD_INPUT when n is not in [0, n_pages], TAMPER."""
    cdef int64_t result = enter_seq(s)
    if result:
        return result
    if not 0 <= n <= s.n_pages_used:
        result = -PKV_BAD_INPUT
    else:
        if n == s.n_pages_used - 1:
            result = free_only(s.arena, s.page_indices[n])
        if result > 0:
            s.n_pages_used = n
            result = 0
        elif result == 0:
            result = pkv_held_drop_last(s.arena, s.page_indices, &s.n_pages_used, n)
    unlock(s.arena)
    return result


cdef int64_t pkv_seq_free(pkv_seq *s) noexcept nogil:
    """Drop all pages, last first. Idempotent, and OK after the arena was closed, which freed them; TAMPER."""
    cdef int64_t result = pkv_seq_truncate_pages(s, 0)
    if result == -PKV_TAMPER and seq_whole(s) and s.arena != NULL and canaries_hold(s.arena):
        lock(s.arena)
        if s.arena.fault == PKV_FAULT_CLOSED:
            s.n_pages_used = 0
            result = 0
        unlock(s.arena)
    if result == 0:
        s.n_tokens = 0
    return result


# --- Python edge ------------------------------------------------------------------------------------------------------

cdef str flaw(Sequence seq, int64_t code):
    """Why a page index cannot be shared."""
    if code == -PKV_NOT_FOUND:
        return "is held by no sequence"
    return f"is outside [0, {pkv_arena_n_pages(seq.ptr.arena) if seq.ptr != NULL else 0})"


@cython.no_gc_clear
cdef class Sequence:
    """Sequence(arena, seq_id=0, max_pages=64)\n--\n
    The page table of one sequence. Made by Arena.sequence; freed when it dies.

    Methods may be called from any thread; they hold the arena's lock for a number of steps at most proportional to the
    pages named, and keep the GIL, except write_page, which copies a page without either. Without a GIL, those on one
    sequence take turns. Every method but free and is_valid raises Tampered once the arena is closed or poisoned.
    """

    def __init__(self, Arena arena not None, seq_id=0, max_pages=64):
        cdef int64_t code
        if self.ptr != NULL:
            raise error(-PKV_BAD_INPUT, NULL, "sequence is initialised already")
        max_pages = bounded("max_pages", max_pages, 1, PKV_MAX_PAGES)
        seq_id = bounded("seq_id", seq_id, -(<int64_t>1 << 62) * 2, ((<int64_t>1 << 62) - 1) * 2 + 1)
        code = pkv_seq_new(&self.ptr, arena.ptr, seq_id, max_pages)
        self.arena = arena
        if code:
            raise self.refuse(code, f"the system refused memory for a table of {max_pages} pages")

    def __dealloc__(self):
        if self.ptr != NULL and self.ptr.arena == (self.arena.ptr if self.arena is not None else NULL):
            pkv_seq_destroy(self.ptr)

    def __enter__(self):
        return self

    def __exit__(self, kind, value, trace):
        """free(), but an exception on its way out is not replaced by what damage makes of that."""
        try:
            self.free()
        except Tampered:
            if kind is None:
                raise

    cdef object refuse(self, int64_t code, str message):
        """The exception for a negated verdict. A damaged sequence cannot be trusted to name its arena, so poison that
        from here.
        """
        cdef pkv_arena *a = self.arena.ptr if self.arena is not None else NULL
        if code == -PKV_TAMPER and self.ptr != NULL and pkv_arena_is_valid(a):
            pkv_arena_poison(a, PKV_FAULT_SEQUENCE, -1)
        if code == -PKV_SEQ_FULL:
            message = f"sequence {self.ptr.seq_id}: {message} exceeds max_pages={self.ptr.max_pages}"
        elif code == -PKV_POOL_EXHAUSTED and not message:
            message = f"no page to be had: {a.n_in_use} of max_pages={a.max_pages} in use"
        return error(code, a, message)

    @property
    def seq_id(self):
        """The caller's number for this sequence."""
        return self.ptr.seq_id if self.ptr != NULL else 0

    @property
    def max_pages(self):
        """Limit of the table."""
        return self.ptr.max_pages if self.ptr != NULL else 0

    @property
    def n_pages(self):
        """Number of table entries."""
        cdef int64_t code = pkv_seq_n_pages(self.ptr)
        if code < 0:
            raise self.refuse(code, "")
        return code

    @property
    def address(self):
        """Address of the pkv_seq struct, for debugging and embedding; 0 before __init__."""
        return <size_t>self.ptr

    @property
    def page_table(self):
        """The page indices, first page first, as a list."""
        cdef int64_t k, n
        with cython.critical_section(self):
            n = pkv_seq_n_pages(self.ptr)
            if n < 0:
                raise self.refuse(n, "")
            return [self.ptr.page_indices[k] for k in range(n)]

    def is_valid(self):
        """Level 1 check of the sequence and its arena. Never raises."""
        return pkv_seq_is_valid(self.ptr) == 1

    @cython.critical_section
    def append_page(self):
        """Take a page and put it at the end of the table; returns its index. Its bytes are not cleared.

        Raises SequenceFull at max_pages, PoolExhausted when no page is free, can be committed or evicted; nothing
        changed then.
        """
        cdef int64_t code = pkv_seq_append_page(self.ptr)
        if code < 0:
            raise self.refuse(code, "one more page" if code == -PKV_SEQ_FULL else "")
        return code

    @cython.critical_section
    def append_pages(self, n):
        """Append n pages, all or none; returns the list of their indices. Raises as append_page, BadInput for n < 0."""
        cdef int64_t k, code, count, stop
        n = integer("append_pages", n)
        if n < 0:
            raise error(-PKV_BAD_INPUT, NULL, f"append_pages: {shown(n)} is negative")
        count = min(n, PKV_MAX_PAGES)
        code = pkv_seq_append_pages(self.ptr, count)
        if code < 0:
            raise self.refuse(code, f"append_pages: {shown(n)} pages" if code == -PKV_SEQ_FULL else "")
        stop = self.ptr.n_pages_used  # less than count when another thread cut the table short from C meanwhile
        return [self.ptr.page_indices[k] for k in range(max(stop - count, <int64_t>0), stop)]

    @cython.critical_section
    def share_page(self, i):
        """Put page i, held by some sequence, at the end of this table too; returns i. Its refcount rises by one.

        Raises SequenceFull, BadInput when i is not a page of the arena, NotFound when nobody holds it; nothing changed
        then.
        """
        cdef int64_t code
        i = integer("page index", i)
        code = pkv_seq_share_page(self.ptr, i if 0 <= i < PKV_MAX_PAGES else -1)
        if code < 0:
            raise self.refuse(code, "one more page" if code == -PKV_SEQ_FULL else f"page index {shown(i)} {flaw(self, code)}")
        return code

    @cython.critical_section
    def share_pages(self, pages):
        """Share each page of an iterable of indices, in order, all or none. Raises as share_page."""
        cdef list wanted = [integer("page index", i) for i in pages]
        cdef Py_ssize_t k
        cdef Py_ssize_t n = len(wanted)
        cdef int64_t code = -PKV_POOL_EXHAUSTED
        cdef uint32_t *indices = <uint32_t *>pkv_alloc(max(n, 1) * sizeof(uint32_t))
        if indices != NULL:
            try:
                for k in range(n):
                    indices[k] = wanted[k] if 0 <= wanted[k] < PKV_MAX_PAGES else PKV_NO_PAGE
                code = pkv_seq_share_pages(self.ptr, indices, n)
            finally:
                pkv_release(indices)
        if code == -PKV_POOL_EXHAUSTED:
            raise self.refuse(code, f"the system refused memory for {n} page indices")
        if code < 0:
            raise self.refuse(code, f"share_pages: {n} pages" if code == -PKV_SEQ_FULL else
                              f"one of page indices {shown(wanted)} {flaw(self, code)}")

    def snapshot(self):
        """A new sequence of the same class that shares every page; a write_page on either copies the page first."""
        cdef Sequence copy = type(self).__new__(type(self))
        cdef int64_t code = pkv_seq_snapshot(&copy.ptr, self.ptr)
        copy.arena = self.arena
        if code:
            raise self.refuse(code, "the system refused memory for a page table")
        return copy

    def write_page(self, i):
        """Make the i-th page of the table this sequence's own, to be written; returns its page index, a new one after a
        copy.

        Copies exactly once when the page is shared, never when it is not. Raises BadInput when i is not in the table,
        PoolExhausted with nothing changed. The prefix index forgets the page and all that follow it.
        """
        cdef int64_t code, k
        i = integer("write_page", i)
        k = i if -1 <= i <= PKV_MAX_PAGES else -1
        with nogil:
            code = pkv_seq_write_page(self.ptr, k)
        if code < 0:
            raise self.refuse(code, f"write_page: {shown(i)} is outside [0, {pkv_seq_n_pages(self.ptr)})"
                              if code == -PKV_BAD_INPUT else "")
        return code

    @cython.critical_section
    def truncate_pages(self, n):
        """Keep the first n pages. The last page is dropped first and the first to be reused. BadInput when n is not in
        [0, n_pages].
        """
        cdef int64_t code
        n = integer("truncate_pages", n)
        code = pkv_seq_truncate_pages(self.ptr, n if -1 <= n <= PKV_MAX_PAGES else -1)
        if code:
            raise self.refuse(code, f"truncate_pages: {shown(n)} is outside [0, {pkv_seq_n_pages(self.ptr)}]")

    @cython.critical_section
    def free(self):
        """Drop all pages; the sequence is empty and usable again. Idempotent, and silent after the arena was closed."""
        cdef int64_t code = pkv_seq_free(self.ptr)
        if code:
            raise self.refuse(code, "")
