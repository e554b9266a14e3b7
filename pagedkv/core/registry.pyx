"""Which arena a damaged struct is or belongs to, without believing a word of the damaged struct.

A failed check poisons the arena. A struct that is not whole cannot be trusted to be an arena, or to name its arena, so
the live arenas are asked who is it or lists it. They are linked to each other when they are made and unlinked when they
are destroyed; nobody else pays. The list has a lock of its own, taken before an arena's.
"""

from libc.stdint cimport int64_t, uint64_t, uintptr_t
from libc.string cimport memset

from pagedkv.core.internal cimport *
from pagedkv.core.memory cimport pkv_alloc
from pagedkv.core.pages cimport pkv_held_drop
from pagedkv.core.structs cimport *

cdef extern from "<pthread.h>" nogil:
    int pthread_atfork(void (*prepare)() noexcept nogil, void (*parent)() noexcept nogil, void (*child)() noexcept nogil)


cdef ArenaBlock *first = NULL
cdef int32_t registry_lock = 0
pkv_generation = 0  # of the process: how many forks it is away from the first


cdef inline void enter_registry() noexcept nogil:
    if atomic_exchange(&registry_lock, 1, ACQUIRE):
        pkv_wait(&registry_lock)


cdef inline void leave_registry() noexcept nogil:
    atomic_store(&registry_lock, 0, RELEASE)


cdef inline void set_next(ArenaBlock *a, ArenaBlock *to) noexcept nogil:
    a.next = to
    a.check = <uintptr_t>a ^ <uintptr_t>to ^ PKV_ARENA_CANARY_POST


cdef inline ArenaBlock *next_of(const ArenaBlock *a) noexcept nogil:
    """The arena behind a; none when the link was overwritten."""
    return a.next if a.check == (<uintptr_t>a ^ <uintptr_t>a.next ^ PKV_ARENA_CANARY_POST) else NULL


cdef pkv_arena *pkv_registry_alloc() noexcept nogil:
    """An arena struct of zeros that is not listed yet; NULL when memory is refused. Release with pkv_release."""
    cdef ArenaBlock *a = <ArenaBlock *>pkv_alloc(sizeof(ArenaBlock))
    if a == NULL:
        return NULL
    memset(a, 0, sizeof(ArenaBlock))
    return &a.arena


cdef void pkv_registry_add(pkv_arena *a) noexcept nogil:
    """List an arena of pkv_registry_alloc, whose constant fields are those of its life, and seal it."""
    global first
    (<ArenaBlock *>a).seal = arena_seal(a)
    seal_roots(a)
    seal_tallies(a)
    enter_registry()
    set_next(<ArenaBlock *>a, first)
    first = <ArenaBlock *>a
    leave_registry()


cdef bint pkv_registry_remove(pkv_arena *a) noexcept nogil:
    """Take an arena off the list: nobody reaches it from here any more, and its struct may be released. False when it is
    not found, which is damage.
    """
    global first
    cdef ArenaBlock *before
    cdef bint found
    enter_registry()
    found = first == <ArenaBlock *>a
    if found:
        first = next_of(first)
    else:
        before = first
        while before != NULL and next_of(before) != <ArenaBlock *>a:
            before = next_of(before)
        found = before != NULL
        if found:
            set_next(before, next_of(<ArenaBlock *>a))
    leave_registry()
    return found


cdef bint lists_damaged(pkv_arena *a, const void *damaged) noexcept nogil:
    """Whether the damaged struct is the prefix index of a, or a sequence of its list, or behind a damaged sequence there. The
    lock is held."""
    cdef pkv_seq *s = a.seqs
    cdef pkv_seq *before = NULL
    if a.prefix == damaged and not prefix_whole(a.prefix):
        poison(a, PKV_FAULT_PREFIX, -1)
        return True
    while s != NULL:
        if not seq_whole(s) or not links_hold(s) or s.prev != before:
            poison(a, PKV_FAULT_SEQUENCE, -1)
            return True
        before = s
        s = s.next
    return False


cdef int64_t pkv_blame(const void *damaged) noexcept nogil:
    """Poison the arena of a sequence or prefix index that is not whole; nobody, when no arena lists it. Takes time in
    proportion to the arenas and sequences there are. Returns -TAMPER. No lock may be held.
    """
    cdef ArenaBlock *a
    if damaged != NULL:
        enter_registry()
        a = first
        while a != NULL:
            if canaries_hold(&a.arena):
                lock(&a.arena)
                if a.arena.fault == PKV_FAULT_NONE and lists_hold(&a.arena):
                    lists_damaged(&a.arena, damaged)
                unlock(&a.arena)
            a = next_of(a)
        leave_registry()
    return -PKV_TAMPER


cdef int64_t pkv_blame_arena(const pkv_arena *damaged) noexcept nogil:
    """Poison an arena that is not whole; not what never was one, which is left as it is. Returns -TAMPER. No lock may be
    held.
    """
    cdef ArenaBlock *block
    cdef pkv_arena *a
    enter_registry()
    block = first
    while block != NULL and &block.arena != damaged:
        block = next_of(block)
    if block != NULL:
        a = &block.arena
        if not canaries_hold(a):
            # Without the lock, which is as likely to be damaged, and then never comes free.
            if a.fault == PKV_FAULT_NONE:
                atomic_store_u32(&a.fault, PKV_FAULT_CANARY, RELAXED)
        else:
            lock(a)
            if not constants_hold(a) or not sizes_hold(a) or not tallies_hold(a):
                poison(a, PKV_FAULT_FIELD, -1)
            elif not counts_hold(a):
                poison(a, PKV_FAULT_COUNTS, -1)
            unlock(a)
    leave_registry()
    return -PKV_TAMPER


# --- fork -------------------------------------------------------------------------------------------------------------

cdef void before_fork() noexcept nogil:
    """Every list is whole while its lock is held from here: a child finds none half changed, and none locked for ever."""
    cdef ArenaBlock *a
    enter_registry()
    a = first
    while a != NULL:
        a.forking = canaries_hold(&a.arena)
        if a.forking:
            lock(&a.arena)
        a = next_of(a)


cdef void after_fork_in_parent() noexcept nogil:
    cdef ArenaBlock *a = first
    while a != NULL:
        if a.forking:
            unlock(&a.arena)
        a = next_of(a)
    leave_registry()


cdef void after_fork_in_child() noexcept nogil:
    """Copies in flight belonged to threads that are not here: their pages go back."""
    global pkv_generation
    cdef ArenaBlock *a = first
    pkv_generation += 1
    while a != NULL:
        if a.forking:
            if a.arena.n_copies and a.arena.fault == PKV_FAULT_NONE and constants_hold(&a.arena) and lists_hold(&a.arena):
                end_copies(&a.arena)
            unlock(&a.arena)
        a = next_of(a)
    leave_registry()


cdef void end_copies(pkv_arena *a) noexcept nogil:
    cdef pkv_seq *s = a.seqs
    cdef uint32_t cursor = free_head(a)
    while s != NULL and seq_whole(s) and links_hold(s):
        if s.copy_to != PKV_NO_PAGE:
            pkv_held_drop(a, s.copy_to, &cursor)
            pkv_held_drop(a, s.copy_from, &cursor)
            s.copy_from = s.copy_to = PKV_NO_PAGE
            seal_links(s)
        s = s.next
    a.n_copies = 0
    seal_tallies(a)


pthread_atfork(before_fork, after_fork_in_parent, after_fork_in_child)
