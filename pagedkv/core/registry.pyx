"""Which arena a damaged sequence or prefix index belongs to, without believing a word of the damaged struct.

A failed check poisons the arena. A struct whose canaries do not hold cannot be trusted to name its arena, so the live
arenas are asked who lists it. They are linked to each other when they are made and unlinked when they are destroyed;
nobody else pays. The list has a lock of its own, taken before an arena's.
"""

from libc.stdint cimport int64_t, uint64_t, uintptr_t
from libc.string cimport memset

from pagedkv.core.internal cimport *
from pagedkv.core.memory cimport pkv_alloc
from pagedkv.core.structs cimport *

cdef extern from "<pthread.h>" nogil:
    int pthread_atfork(void (*prepare)() noexcept nogil, void (*parent)() noexcept nogil, void (*child)() noexcept nogil)


# An arena as it is allocated. The link is behind what the header promises, and guarded as the structs are.
cdef struct Listed:
    pkv_arena arena
    Listed *next
    uint64_t check

cdef Listed *first = NULL
cdef int32_t registry_lock = 0


cdef void forked() noexcept nogil:
    """The list is whole at every moment, so a child only has to open what a thread that stayed behind had locked."""
    atomic_store(&registry_lock, 0, RELEASE)


pthread_atfork(NULL, NULL, forked)


cdef inline void enter_registry() noexcept nogil:
    if atomic_exchange(&registry_lock, 1, ACQUIRE):
        pkv_wait(&registry_lock)


cdef inline void leave_registry() noexcept nogil:
    atomic_store(&registry_lock, 0, RELEASE)


cdef inline void set_next(Listed *a, Listed *to) noexcept nogil:
    a.next = to
    a.check = <uintptr_t>a ^ <uintptr_t>to ^ PKV_ARENA_CANARY_POST


cdef inline Listed *next_of(const Listed *a) noexcept nogil:
    """The arena behind a; none when the link was overwritten."""
    return a.next if a.check == (<uintptr_t>a ^ <uintptr_t>a.next ^ PKV_ARENA_CANARY_POST) else NULL


cdef pkv_arena *pkv_registry_alloc() noexcept nogil:
    """An arena struct of zeros that is not listed yet; NULL when memory is refused. Release with pkv_release."""
    cdef Listed *a = <Listed *>pkv_alloc(sizeof(Listed))
    if a == NULL:
        return NULL
    memset(a, 0, sizeof(Listed))
    return &a.arena


cdef void pkv_registry_add(pkv_arena *a) noexcept nogil:
    """List an arena of pkv_registry_alloc."""
    global first
    enter_registry()
    set_next(<Listed *>a, first)
    first = <Listed *>a
    leave_registry()


cdef bint pkv_registry_remove(pkv_arena *a) noexcept nogil:
    """Take an arena off the list: nobody reaches it from here any more, and its struct may be released. False when it is
    not found, which is damage.
    """
    global first
    cdef Listed *before
    cdef bint found
    enter_registry()
    found = first == <Listed *>a
    if found:
        first = next_of(first)
    else:
        before = first
        while before != NULL and next_of(before) != <Listed *>a:
            before = next_of(before)
        found = before != NULL
        if found:
            set_next(before, next_of(<Listed *>a))
    leave_registry()
    return found


cdef void blame(pkv_arena *a, const void *damaged) noexcept nogil:
    """Poison a if it lists the damaged struct, or another that is damaged in front of it. The lock is held."""
    cdef pkv_seq *s = a.seqs
    cdef int64_t k = 0
    if a.prefix == damaged:
        poison(a, PKV_FAULT_PREFIX, -1)
        return
    while s != NULL and k < a.n_seqs:
        if s == damaged or not seq_canaries_hold(s):
            poison(a, PKV_FAULT_SEQUENCE, -1)
            return
        s = s.next
        k += 1


cdef int64_t pkv_blame(const void *damaged) noexcept nogil:
    """Poison the arena of a sequence or prefix index whose canaries do not hold; nobody, when no arena lists it. Takes
    time in proportion to the arenas and sequences there are. Returns -TAMPER. No lock may be held.
    """
    cdef Listed *a
    if damaged != NULL:
        enter_registry()
        a = first
        while a != NULL:
            if canaries_hold(&a.arena):
                lock(&a.arena)
                if a.arena.fault == PKV_FAULT_NONE:
                    blame(&a.arena, damaged)
                unlock(&a.arena)
            a = next_of(a)
        leave_registry()
    return -PKV_TAMPER
