"""Live arenas, and the level 1 checks of the structs that belong to one. Nothing here is for consumers."""

from libc.stdint cimport int64_t

from pagedkv.core.internal cimport *
from pagedkv.core.structs cimport *

cdef int64_t pkv_generation

cdef pkv_arena *pkv_registry_alloc() noexcept nogil
cdef void pkv_registry_add(pkv_arena *a) noexcept nogil
cdef bint pkv_registry_remove(pkv_arena *a) noexcept nogil
cdef int64_t pkv_blame(const void *damaged) noexcept nogil
cdef int64_t pkv_blame_arena(const pkv_arena *damaged) noexcept nogil


cdef inline int64_t enter(pkv_arena *a) noexcept nogil:
    """Level 1 check, then the lock: 0 with the lock held, or -TAMPER without it. What is no arena is not written to."""
    if unlikely(a == NULL):
        return -PKV_TAMPER
    if unlikely(not canaries_hold(a) or not constants_hold(a)):
        return pkv_blame_arena(a)
    lock(a)
    if unlikely(a.fault != PKV_FAULT_NONE or not counts_hold(a)):
        unlock(a)
        return pkv_blame_arena(a)
    return 0


cdef inline int64_t enter_seq(pkv_seq *s) noexcept nogil:
    """Level 1 check of a sequence and its arena, then the lock: 0 with the arena's lock held, or -TAMPER without it."""
    if unlikely(not seq_whole(s)):
        return pkv_blame(s)
    if unlikely(enter(s.arena)):
        return -PKV_TAMPER
    if unlikely(not 0 <= s.n_pages_used <= s.max_pages):
        poison(s.arena, PKV_FAULT_SEQUENCE, -1)
        unlock(s.arena)
        return -PKV_TAMPER
    return 0


cdef inline int64_t enter_prefix(pkv_prefix *p) noexcept nogil:
    """The same for a prefix index."""
    return enter(p.arena) if prefix_whole(p) else pkv_blame(p)


cdef inline int64_t enter_both(pkv_prefix *p, pkv_seq *s) noexcept nogil:
    """The same for an index and a sequence, which must be of the same arena, else BAD_INPUT."""
    if not prefix_whole(p):
        return pkv_blame(p)
    if not seq_whole(s):
        return pkv_blame(s)
    return enter_seq(s) if s.arena == p.arena else -PKV_BAD_INPUT
