"""The arena: address space reserved once and committed in steps, its lifetime, counts and page access.

Page states and transitions are in pages.pyx, page tables in sequence.pyx. Every function checks canaries, counters and
poison (level 1) before it does anything.
"""

cimport cython
from cpython.buffer cimport PyBUF_WRITABLE, PyBuffer_FillInfo
from libc.stdint cimport int64_t, intptr_t, uint8_t, uint32_t

from pagedkv.core.arguments cimport bounded, integer, shown
from pagedkv.core.internal cimport *
from pagedkv.core.memory cimport pkv_drop, pkv_map, pkv_release, pkv_unmap
from pagedkv.core.pages cimport pkv_held_grow
from pagedkv.core.registry cimport enter, pkv_blame_arena, pkv_generation, pkv_registry_add, pkv_registry_alloc, pkv_registry_remove
from pagedkv.core.structs cimport *

from pagedkv.core.errors import ERRORS, BadInput, Verdict


cdef extern from "<sys/random.h>" nogil:
    ssize_t getrandom(void *buf, size_t n, unsigned int flags)
    const unsigned int GRND_NONBLOCK

cdef extern from *:
    int64_t add_fetch "__atomic_add_fetch"(int64_t *p, int64_t by, int order) noexcept nogil
    int64_t load_i64 "__atomic_load_n"(int64_t *p, int order) noexcept nogil


# --- arena ------------------------------------------------------------------------------------------------------------

cdef int64_t pkv_arena_new(pkv_arena **out, int64_t n_pages, int64_t page_bytes, int64_t max_pages,
                           int64_t growth_pages, uint32_t flags) noexcept nogil:
    """Make an arena of n_pages pages that may grow to max_pages (0: fixed) in steps of growth_pages (0: n_pages).

    BAD_INPUT when a size is out of range or out is NULL, POOL_EXHAUSTED when the system refuses memory; *out is NULL
    then.
    """
    cdef pkv_arena *a
    cdef int64_t stride
    cdef int64_t guard_bytes = 8 if flags & PKV_ARENA_GUARD else 0
    cdef uint32_t i
    if out == NULL:
        return -PKV_BAD_INPUT
    out[0] = NULL
    if max_pages == 0:
        max_pages = n_pages
    if growth_pages == 0:
        growth_pages = n_pages
    if not 0 < n_pages <= max_pages <= PKV_MAX_PAGES or not 0 < page_bytes <= PKV_MAX_STORAGE or growth_pages < 0:
        return -PKV_BAD_INPUT
    if flags & ~<uint32_t>PKV_ARENA_GUARD:
        return -PKV_BAD_INPUT
    stride = (page_bytes + guard_bytes + PKV_PAGE_ALIGN - 1) // PKV_PAGE_ALIGN * PKV_PAGE_ALIGN
    if max_pages > PKV_MAX_STORAGE // stride:
        return -PKV_BAD_INPUT
    a = pkv_registry_alloc()
    if a == NULL:
        return -PKV_POOL_EXHAUSTED
    a.canary_pre = PKV_ARENA_CANARY_PRE
    a.canary_post = PKV_ARENA_CANARY_POST
    a.page_bytes = page_bytes
    a.page_stride = stride
    a.max_pages = max_pages
    a.growth_pages = growth_pages
    a.flags = flags
    a.fault_page = -1
    a.storage_bytes = max_pages * stride
    a.pages_bytes = (max_pages + 2) * sizeof(pkv_page)
    if getrandom(&a.link_key, sizeof(a.link_key), GRND_NONBLOCK) != sizeof(a.link_key):
        a.link_key = <uint32_t>(<intptr_t>a >> 4) * <uint32_t>0x85EBCA6B
    a.pages = <pkv_page *>pkv_map(a.pages_bytes, True)
    a.storage = <uint8_t *>pkv_map(a.storage_bytes, False) if a.pages != NULL else NULL
    if a.storage != NULL:
        for i in range(<uint32_t>max_pages, <uint32_t>max_pages + 2):
            link_to_itself(a, i)
        if pkv_held_grow(a, n_pages) == 0:
            a.num_grown = 0
            pkv_registry_add(a)
            out[0] = a
            return 0
    pkv_unmap(a.storage, a.storage_bytes)
    pkv_unmap(a.pages, a.pages_bytes)
    pkv_release(a)
    return -PKV_POOL_EXHAUSTED


cdef int64_t pkv_arena_close(pkv_arena *a) noexcept nogil:
    """Give all pages back to the system. The struct stays, and refuses every call with TAMPER. Waits for copies in
    flight.

    OK also when closed already or poisoned; TAMPER when the canaries, or the fields that say what to give back, do not
    hold: nothing is given back then.
    """
    if a == NULL:
        return -PKV_TAMPER
    if not canaries_hold(a):
        return pkv_blame_arena(a)
    lock(a)
    return close_and_unlock(a)


cdef int64_t close_and_unlock(pkv_arena *a) noexcept nogil:
    """Refuse every later call, wait for copies in flight, give the pages back: 0, or TAMPER. The lock is held on entry, not
    after."""
    while a.storage != NULL or a.fault != PKV_FAULT_CLOSED:
        if not (constants_hold(a) and sizes_hold(a) and tallies_hold(a)):
            unlock(a)
            return pkv_blame_arena(a)
        atomic_store_i64(&a.fault_page, -1, RELAXED)
        atomic_store_u32(&a.fault, PKV_FAULT_CLOSED, RELAXED)
        if a.n_copies:
            unlock(a)
            sched_yield()
            lock(a)
            continue
        pkv_show(a.storage, a.n_pages * a.page_stride if 0 <= a.n_pages <= a.max_pages else 0)
        pkv_unmap(a.storage, a.storage_bytes)
        pkv_unmap(a.pages, a.pages_bytes)
        a.storage = NULL
        a.pages = NULL
        (<ArenaBlock *>a).seal = ~arena_seal(a)  # so that it stays closed also when fault is overwritten
    unlock(a)
    return 0


cdef int64_t pkv_arena_destroy(pkv_arena *a) noexcept nogil:
    """Close and release the struct itself; sequences that outlive it answer TAMPER. No other thread may be using the
    arena.

    A struct whose canaries do not hold is left alone: TAMPER. So is the struct, closed, when a sequence is damaged:
    those behind it on the list cannot be told.
    """
    cdef pkv_seq *s
    if pkv_arena_close(a) or not roots_hold(a) or not pkv_registry_remove(a):
        return -PKV_TAMPER
    s = a.seqs
    while s != NULL:
        if not seq_whole(s) or not links_hold(s):
            return -PKV_TAMPER
        leave_arena(s)
        s = s.next
    if a.prefix != NULL:
        if not prefix_whole(a.prefix):
            return -PKV_TAMPER
        a.prefix.arena = NULL
        seal_prefix(a.prefix)
    a.canary_pre = a.canary_post = 0
    pkv_release(a)
    return 0


cdef int64_t pkv_arena_is_valid(pkv_arena *a) noexcept nogil:
    """1 when the canaries hold, the counts add up and nothing poisoned the arena, else 0."""
    if enter(a):
        return 0
    unlock(a)
    return 1


cdef void pkv_arena_poison(pkv_arena *a, uint32_t fault, int64_t page) noexcept nogil:
    """Refuse every later call, for a caller that saw damage the arena cannot see."""
    if a != NULL and canaries_hold(a):
        lock(a)
        poison(a, fault, page)
        unlock(a)


cdef int64_t pkv_arena_refcount(pkv_arena *a, int64_t i) noexcept nogil:
    """Number of table entries that hold page i; TAMPER, or BAD_INPUT when out of range."""
    cdef int64_t result = enter(a)
    if result == 0:
        result = <int64_t>a.pages[i].refcount if 0 <= i < a.n_pages else -PKV_BAD_INPUT
        unlock(a)
    return result


cdef int64_t pkv_arena_page_state(pkv_arena *a, int64_t i) noexcept nogil:
    """State of page i, a pkv_page_state; TAMPER, or BAD_INPUT when out of range."""
    cdef int64_t result = enter(a)
    if result == 0:
        result = <int64_t>a.pages[i].state if 0 <= i < a.n_pages else -PKV_BAD_INPUT
        unlock(a)
    return result


cdef uint8_t *pkv_arena_page(pkv_arena *a, int64_t i) noexcept nogil:
    """First of the page_bytes bytes of page i, valid until the arena closes; NULL when the arena is not valid or i is
    out of range.
    """
    cdef uint8_t *result = NULL
    if enter(a) == 0:
        if 0 <= i < a.n_pages:
            result = page_at(a, i)
        unlock(a)
    return result


cdef int64_t pkv_arena_n_pages(pkv_arena *a) noexcept nogil:
    """Pages committed so far, or TAMPER."""
    cdef int64_t result = enter(a)
    if result == 0:
        result = a.n_pages
        unlock(a)
    return result


cdef int64_t pkv_arena_n_free(pkv_arena *a) noexcept nogil:
    """FREE pages, or TAMPER."""
    cdef int64_t result = enter(a)
    if result == 0:
        result = a.n_free
        unlock(a)
    return result


cdef int64_t pkv_arena_n_in_use(pkv_arena *a) noexcept nogil:
    """IN_USE pages, each counted once however many sequences hold it, or TAMPER."""
    cdef int64_t result = enter(a)
    if result == 0:
        result = a.n_in_use
        unlock(a)
    return result


cdef int64_t pkv_arena_n_cached(pkv_arena *a) noexcept nogil:
    """CACHED pages, or TAMPER."""
    cdef int64_t result = enter(a)
    if result == 0:
        result = a.n_cached
        unlock(a)
    return result


cdef int64_t pkv_arena_reserve(pkv_arena *a, int64_t n) noexcept nogil:
    """Commit ahead until n pages are FREE, evicting nothing; POOL_EXHAUSTED with nothing changed when max_pages or the
    system forbids.
    """
    cdef int64_t result
    if n < 0:
        return -PKV_BAD_INPUT
    result = enter(a)
    if result == 0:
        if n > a.n_free:
            result = pkv_held_grow(a, n - a.n_free)
        unlock(a)
    return result


cdef int64_t pkv_arena_trim(pkv_arena *a) noexcept nogil:
    """Hand the memory behind runs of FREE pages back to the system; they read as zeros when taken again. Bytes handed
    back, which are those that were in memory: 0 when nothing was written to since the last time.
    """
    cdef int64_t i = 0
    cdef int64_t start
    cdef int64_t result = enter(a)
    if result:
        return result
    while i < a.n_pages:
        start = i
        while i < a.n_pages and a.pages[i].state == PKV_PAGE_FREE:
            i += 1
        if i > start:
            result += pkv_drop(a.storage, start * a.page_stride, i * a.page_stride)
        else:
            i += 1
    unlock(a)
    return result


# --- Python edge ------------------------------------------------------------------------------------------------------

cdef tuple FAULTS = (
    "", "canary of the arena overwritten", "page counts of the arena do not add up", "page list link overwritten",
    "guard word overwritten", "page refcount or state impossible", "sequence struct overwritten",
    "prefix index overwritten", "arena is closed", "field of the arena overwritten",
)


cdef object error(int64_t code, pkv_arena *a, str message):
    """The exception for a negated verdict; TAMPER says what the arena knows instead of `message`. Takes no lock, which may be
    overwritten."""
    cdef uint32_t fault
    cdef int64_t page
    if code == -PKV_TAMPER:
        fault = PKV_FAULT_NONE if a == NULL else atomic_load_u32(&a.fault, RELAXED)
        page = -1 if a == NULL else atomic_load_i64(&a.fault_page, RELAXED)
        if a == NULL:
            message = "arena is not open"
        elif fault == PKV_FAULT_NONE:
            message = "a struct is overwritten or was never initialised"
        else:
            where = f" at page {page}" if page >= 0 else ""
            message = f"{FAULTS[fault]}{where}" if fault < len(FAULTS) else "arena struct overwritten"
    return ERRORS[Verdict(-code)](message)


@cython.final
@cython.no_gc_clear
cdef class PageView:
    """Buffer of one page's bytes; keeps the arena open while exported."""
    cdef Arena arena
    cdef uint8_t *start

    def __getbuffer__(self, Py_buffer *buffer, int flags):
        if enter(self.arena.ptr):
            raise error(-PKV_TAMPER, self.arena.ptr, "")
        add_fetch(&self.arena.n_views, 1, RELAXED)
        unlock(self.arena.ptr)
        try:
            PyBuffer_FillInfo(buffer, self, self.start, self.arena.ptr.page_bytes, 0, flags)
        except BaseException:
            add_fetch(&self.arena.n_views, -1, RELEASE)
            raise

    def __releasebuffer__(self, Py_buffer *buffer):
        add_fetch(&self.arena.n_views, -1, RELEASE)


cdef class Arena:
    """Arena(n_pages, page_bytes, *, max_pages=None, growth_pages=None, guard=False)\n--\n
    A pool of equal pages of raw bytes, shared by sequences.

    n_pages      pages committed at once, 1 or more
    page_bytes   usable bytes of a page; pages lie 64-byte aligned, page_bytes rounded up to 64 apart
    max_pages    limit of growth; address space for it is reserved at once, so a page never moves. Default: n_pages
    growth_pages pages committed per step; default n_pages
    guard        put a guard word behind each page and check it when the page is released

    Raises BadInput for a size out of range and PoolExhausted when the system refuses memory. All methods may be called
    from any thread. They hold the lock for a bounded number of list steps and keep the GIL, except reserve and trim.
    """

    def __init__(self, n_pages, page_bytes, *, max_pages=None, growth_pages=None, guard=False):
        cdef int64_t code, n, size, limit, step
        cdef uint32_t flags = PKV_ARENA_GUARD if guard else 0
        if self.ptr != NULL:
            raise error(-PKV_BAD_INPUT, NULL, "arena is initialised already")
        n = bounded("n_pages", n_pages, 1, PKV_MAX_PAGES)
        size = bounded("page_bytes", page_bytes, 1, PKV_MAX_STORAGE)
        limit = n if max_pages is None else bounded("max_pages", max_pages, n, PKV_MAX_PAGES)
        step = n if growth_pages is None else bounded("growth_pages", growth_pages, 1, PKV_MAX_PAGES)
        with nogil:
            code = pkv_arena_new(&self.ptr, n, size, limit, step, flags)
        if code == -PKV_BAD_INPUT:
            raise error(code, NULL, f"max_pages * page_bytes: {limit} * {size} exceeds {PKV_MAX_STORAGE} bytes")
        if code:
            raise error(code, NULL, f"the system refused memory for {limit} pages of {size} bytes")

    def __dealloc__(self):
        if self.ptr != NULL:
            pkv_arena_destroy(self.ptr)

    cdef int hold(self) except -1:
        """Keep the pages mapped until let_go, for what touches them without the GIL; Tampered when the arena is closed or
        damaged. Counted under the lock, where close looks: either close sees the holder or the holder sees it closed. After a fork
        the child counts anew: the threads that held here are not there.
        """
        if enter(self.ptr):
            raise error(-PKV_TAMPER, self.ptr, "")
        self.count_anew()
        add_fetch(&self.n_calls, 1, RELAXED)
        unlock(self.ptr)
        return 0

    cdef void let_go(self) noexcept:
        """Undo one hold; all that was done with the pages happens before a close. Needs nothing of a damaged arena."""
        if self.generation == pkv_generation:
            add_fetch(&self.n_calls, -1, RELEASE)

    cdef void count_anew(self) noexcept nogil:
        """Forget the calls of threads that stayed behind at a fork. The lock is held."""
        if self.generation != pkv_generation:
            self.n_calls = 0
            self.generation = pkv_generation

    def close(self):
        """Give all pages back to the system; every later call raises Tampered. Idempotent.

        Raises BadInput, and closes nothing, while a view from page() is alive or another thread is inside a call that
        reads or writes pages. Waits for copies of write_page. In a forked child the calls of threads that stayed behind do not count.
        """
        cdef int64_t n_views = 0
        cdef int64_t n_calls = 0
        if self.ptr == NULL or not canaries_hold(self.ptr):
            return
        with nogil:
            lock(self.ptr)
            self.count_anew()
            n_views = load_i64(&self.n_views, ACQUIRE)
            n_calls = load_i64(&self.n_calls, ACQUIRE)
            if n_views or n_calls:
                unlock(self.ptr)
            else:
                close_and_unlock(self.ptr)
        if n_views or n_calls:
            raise error(-PKV_BAD_INPUT, NULL, f"close: {n_views} page views and {n_calls} calls are still in use, 0 may be")

    def __enter__(self):
        return self

    def __exit__(self, kind, value, trace):
        """close(), but an exception on its way out is not replaced: then what is in use stays open, to be closed later."""
        try:
            self.close()
        except BadInput:
            if kind is None:
                raise

    @property
    def n_pages(self):
        """Pages committed so far."""
        return accepted(self.ptr, pkv_arena_n_pages(self.ptr))

    @property
    def n_free(self):
        """Committed pages nobody holds and no prefix names; growth and eviction can yield more."""
        return accepted(self.ptr, pkv_arena_n_free(self.ptr))

    @property
    def n_in_use(self):
        """Pages held by sequences, shared ones counted once."""
        return accepted(self.ptr, pkv_arena_n_in_use(self.ptr))

    @property
    def n_cached(self):
        """Pages nobody holds whose content the prefix index can find."""
        return accepted(self.ptr, pkv_arena_n_cached(self.ptr))

    @property
    def max_pages(self):
        """Limit of growth."""
        accepted(self.ptr, pkv_arena_n_pages(self.ptr))
        return self.ptr.max_pages

    @property
    def growth_pages(self):
        """Pages committed per growth step."""
        accepted(self.ptr, pkv_arena_n_pages(self.ptr))
        return self.ptr.growth_pages

    @property
    def page_bytes(self):
        """Usable bytes of a page."""
        accepted(self.ptr, pkv_arena_n_pages(self.ptr))
        return self.ptr.page_bytes

    @property
    def page_stride(self):
        """Bytes from one page to the next."""
        accepted(self.ptr, pkv_arena_n_pages(self.ptr))
        return self.ptr.page_stride

    @property
    def guard(self):
        """Whether pages carry guard words."""
        accepted(self.ptr, pkv_arena_n_pages(self.ptr))
        return bool(self.ptr.flags & PKV_ARENA_GUARD)

    @property
    def address(self):
        """Address of the pkv_arena struct, for debugging and embedding; 0 before __init__."""
        return <size_t>self.ptr

    def refcount(self, i):
        """Number of table entries that hold page i. BadInput when i is not a page."""
        cdef int64_t code = pkv_arena_refcount(self.ptr, index(i))
        if code < 0:
            raise no_page(self.ptr, code, i)
        return code

    def page_state(self, i):
        """'FREE', 'IN_USE' or 'CACHED'. BadInput when i is not a page."""
        cdef int64_t code = pkv_arena_page_state(self.ptr, index(i))
        if code < 0:
            raise no_page(self.ptr, code, i)
        return ("FREE", "IN_USE", "CACHED")[code]

    def page(self, i):
        """Writable memoryview of the page_bytes bytes of page i, without a copy. BadInput when i is not a page.

        The bytes are the page's for as long as a sequence holds it. While the view lives the arena cannot be closed.
        """
        cdef PageView view = PageView.__new__(PageView)
        view.arena = self
        view.start = pkv_arena_page(self.ptr, index(i))
        if view.start == NULL:
            raise no_page(self.ptr, -PKV_BAD_INPUT if pkv_arena_is_valid(self.ptr) else -PKV_TAMPER, i)
        return memoryview(view)

    def reserve(self, n):
        """Commit memory ahead until n pages are free, evicting nothing. PoolExhausted with nothing changed if that
        cannot be.
        """
        cdef int64_t code
        cdef int64_t count = bounded("reserve", n, 0, PKV_MAX_PAGES)
        with nogil:
            code = pkv_arena_reserve(self.ptr, count)
        if code:
            raise error(code, self.ptr, f"reserve: {count} free pages need more than max_pages or the system allow")

    def trim(self):
        """Hand the memory behind free pages back to the system; returns the number of bytes that were in memory and are
        no more. Pages and counts stay as they are.
        """
        cdef int64_t code
        with nogil:
            code = pkv_arena_trim(self.ptr)
        return accepted(self.ptr, code)

    def is_valid(self):
        """Level 1 check: canaries, counts, not poisoned, not closed. Never raises."""
        return pkv_arena_is_valid(self.ptr) == 1

    def check(self, level=3):
        """Violations of the arena's invariants up to `level` (1: O(1), 2: O(pages), 3: all structures); empty when
        sound.
        """
        from pagedkv.core.check import check

        return check(self, level)

    def sequence(self, seq_id=0, max_pages=64):
        """A new empty sequence that may hold up to max_pages pages. seq_id is the caller's and not interpreted."""
        from pagedkv.core.sequence import Sequence

        return Sequence(self, seq_id, max_pages)

    def stats(self):
        """Counts and lifetime counters as a dict."""
        accepted(self.ptr, pkv_arena_n_pages(self.ptr))
        cdef pkv_arena *a = self.ptr
        return {
            "n_pages": a.n_pages, "max_pages": a.max_pages, "n_free": a.n_free, "n_in_use": a.n_in_use,
            "n_cached": a.n_cached, "n_sequences": a.n_seqs, "num_allocated": a.num_allocated,
            "num_copied": a.num_copied, "num_evicted": a.num_evicted, "num_grown": a.num_grown,
        }


cdef int64_t accepted(pkv_arena *a, int64_t code) except -1:
    """code when it is a result; else the exception for it."""
    if code < 0:
        raise error(code, a, "")
    return code


cdef object no_page(pkv_arena *a, int64_t code, i):
    return error(code, a, f"page index {shown(i)} is outside [0, {a.n_pages if a != NULL else 0})")


cdef int64_t index(value) except? -2:
    """A page index as int64; what does not fit is out of every range. BadInput for what is no integer."""
    value = integer("page index", value)
    return value if -1 <= value < PKV_MAX_PAGES else -1
