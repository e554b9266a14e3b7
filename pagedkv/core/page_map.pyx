"""State and refcount of every page at one moment, for those who draw or log the pool. It observes and changes nothing."""

from cpython.bytes cimport PyBytes_AS_STRING, PyBytes_FromStringAndSize
from libc.stdint cimport int64_t, uint8_t

from pagedkv.core.arena cimport Arena, error, pkv_arena_n_pages
from pagedkv.core.internal cimport unlock
from pagedkv.core.registry cimport enter
from pagedkv.core.structs cimport *


cdef int64_t pkv_arena_page_map(pkv_arena *a, uint8_t *states, uint8_t *refcounts, int64_t capacity) noexcept nogil:
    """Fill in state (a pkv_page_state) and refcount (255: that many or more) of each page.

    Returns the number of pages, which may have grown beyond `capacity`: nothing is filled in then. Or TAMPER. Holds the
    arena's lock for one pass.
    """
    cdef int64_t k
    cdef int64_t n = enter(a)
    if n:
        return n
    n = a.n_pages
    if n <= capacity:
        for k in range(n):
            states[k] = a.pages[k].state
            refcounts[k] = <uint8_t>min(a.pages[k].refcount, <uint32_t>255)
    unlock(a)
    return n


def page_map(Arena arena not None):
    """(states, refcounts): two bytes objects of arena.n_pages bytes, from one moment.

    A state is 0 FREE, 1 IN_USE or 2 CACHED; a refcount of 255 stands for that many or more. Thread-safe, releases the
    GIL. Raises Tampered for an arena that is closed or damaged.
    """
    cdef bytes states, refcounts
    cdef uint8_t *s
    cdef uint8_t *r
    cdef int64_t capacity
    cdef int64_t n = pkv_arena_n_pages(arena.ptr)
    while n >= 0:
        capacity = n
        states = PyBytes_FromStringAndSize(NULL, capacity)
        refcounts = PyBytes_FromStringAndSize(NULL, capacity)
        s = <uint8_t *>PyBytes_AS_STRING(states)
        r = <uint8_t *>PyBytes_AS_STRING(refcounts)
        with nogil:
            n = pkv_arena_page_map(arena.ptr, s, r, capacity)
        if n == capacity:
            return states, refcounts
    raise error(n, arena.ptr, "")
