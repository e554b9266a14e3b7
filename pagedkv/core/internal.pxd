"""What arena, sequence, prefix index and checker share under the lock: the lock itself, encoded links, page lists.

Inline only: each extension compiles its own copy, so the hot paths make no call. Nothing here is for consumers.
"""

from libc.stdint cimport int32_t, int64_t, uint8_t, uint16_t, uint32_t, uint64_t, uintptr_t

from pagedkv.core.structs cimport *


cdef extern from *:
    """
    #include <sched.h>
    #include <string.h>
    #if defined(__x86_64__)
    #define pkv_pause() __builtin_ia32_pause()
    #elif defined(__aarch64__)
    #define pkv_pause() __asm__ volatile("yield")
    #else
    #define pkv_pause() ((void)0)
    #endif
    #if defined(__SANITIZE_ADDRESS__)
    #include <sanitizer/asan_interface.h>
    #define pkv_hide(p, n) ASAN_POISON_MEMORY_REGION(p, n)
    #define pkv_show(p, n) ASAN_UNPOISON_MEMORY_REGION(p, n)
    #else
    #define pkv_hide(p, n) ((void)(p), (void)(n))
    #define pkv_show(p, n) ((void)(p), (void)(n))
    #endif
    typedef struct __attribute__((packed)) { uint64_t word; } pkv_unaligned;
    /* Guard words are read also where damaged bookkeeping calls a hidden page visible. */
    __attribute__((no_sanitize("address"))) static inline uint64_t pkv_load(const uint8_t *p) {
        return ((const pkv_unaligned *)p)->word;
    }
    /* Out of line, so that those who find the lock free need no stack frame for it. */
    __attribute__((noinline, cold)) static void pkv_wait(int32_t *lock) {
        int spins = 0;
        do {
            while (__atomic_load_n(lock, __ATOMIC_RELAXED))
                if (++spins & 63) pkv_pause(); else sched_yield();
        } while (__atomic_exchange_n(lock, 1, __ATOMIC_ACQUIRE));
    }
    static inline void pkv_store(uint8_t *p, uint64_t word) { ((pkv_unaligned *)p)->word = word; }
    /* State and indexed of a page in one word: whether it is in that state and not indexed takes one comparison. */
    #if __BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__
    #define PKV_KIND(state) ((uint16_t)(state))
    #else
    #define PKV_KIND(state) ((uint16_t)((state) << 8))
    #endif
    static inline uint16_t pkv_kind(const pkv_page *page) {
        uint16_t kind;
        memcpy(&kind, &page->state, 2);
        return kind;
    }
    static inline void pkv_set_kind(pkv_page *page, uint16_t kind) { memcpy(&page->state, &kind, 2); }
    /* The sum of what is constant from creation to close. */
    __attribute__((no_sanitize("thread"))) static inline uint64_t pkv_arena_seal(const pkv_arena *a) {
        uint64_t max_pages = (uint64_t)a->max_pages, growth_pages = (uint64_t)a->growth_pages;
        uint64_t key = (uint64_t)a->link_key << 32 | a->flags;
        return (uintptr_t)a ^ (uintptr_t)a->storage ^ (uint64_t)a->page_bytes * 3 ^ (uint64_t)a->page_stride * 5
               ^ (uintptr_t)a->pages * 9 ^ (max_pages << 32 | max_pages >> 32) ^ (growth_pages << 16 | growth_pages >> 48)
               ^ (key << 8 | key >> 56);
    }
    __attribute__((no_sanitize("thread"))) static inline uint64_t pkv_peek(const uint64_t *p) { return *p; }
    /* Two entries of a table as they lie in memory. */
    static inline uint64_t pkv_two(const uint32_t *t) {
        uint64_t two;
        memcpy(&two, t, 8);
        return two;
    }
    """
    uint16_t PKV_KIND(int state) noexcept nogil
    uint16_t pkv_kind(const pkv_page *page) noexcept nogil
    void pkv_set_kind(pkv_page *page, uint16_t kind) noexcept nogil
    uint64_t arena_seal "pkv_arena_seal"(const pkv_arena *a) noexcept nogil
    uint64_t pkv_peek(const uint64_t *p) noexcept nogil
    uint64_t pkv_two(const uint32_t *t) noexcept nogil
    uint64_t pkv_load(const uint8_t *p) noexcept nogil
    void pkv_store(uint8_t *p, uint64_t word) noexcept nogil
    void pkv_wait(int32_t *lock) noexcept nogil  # until it is free and taken
    void pkv_hide(void *p, size_t n) noexcept nogil  # AddressSanitizer reports a touch of these bytes, as after free()
    void pkv_show(void *p, size_t n) noexcept nogil
    void sched_yield() noexcept nogil
    int32_t atomic_exchange "__atomic_exchange_n"(int32_t *p, int32_t value, int order) noexcept nogil
    int32_t atomic_load "__atomic_load_n"(int32_t *p, int order) noexcept nogil
    void atomic_store "__atomic_store_n"(int32_t *p, int32_t value, int order) noexcept nogil
    void atomic_store_u32 "__atomic_store_n"(uint32_t *p, uint32_t value, int order) noexcept nogil
    uint32_t atomic_load_u32 "__atomic_load_n"(uint32_t *p, int order) noexcept nogil
    void atomic_store_i64 "__atomic_store_n"(int64_t *p, int64_t value, int order) noexcept nogil
    int64_t atomic_load_i64 "__atomic_load_n"(int64_t *p, int order) noexcept nogil
    const int ACQUIRE "__ATOMIC_ACQUIRE"
    const int RELEASE "__ATOMIC_RELEASE"
    const int RELAXED "__ATOMIC_RELAXED"
    bint unlikely(bint) noexcept nogil


# The lock is held for list and counter updates only, never while a page is copied, so waiting is short: spin, then give
# the processor to the holder. The holder never needs the GIL.

cdef inline void lock(pkv_arena *a) noexcept nogil:
    if unlikely(atomic_exchange(&a.lock, 1, ACQUIRE)):
        pkv_wait(&a.lock)


cdef inline void unlock(pkv_arena *a) noexcept nogil:
    atomic_store(&a.lock, 0, RELEASE)


cdef inline int64_t poison(pkv_arena *a, uint32_t fault, int64_t page) noexcept nogil:
    """Refuse every later call, keeping the first reason; returns -TAMPER. The lock is held."""
    if a.fault == PKV_FAULT_NONE:
        atomic_store_i64(&a.fault_page, page, RELAXED)
        atomic_store_u32(&a.fault, fault, RELAXED)
    return -PKV_TAMPER


cdef inline bint counts_hold(const pkv_arena *a) noexcept nogil:
    return (0 <= a.n_pages <= a.max_pages and a.n_free >= 0 and a.n_in_use >= 0 and a.n_cached >= 0
            and a.n_free + a.n_in_use + a.n_cached == a.n_pages)


cdef inline bint canaries_hold(const pkv_arena *a) noexcept nogil:
    return a.canary_pre == PKV_ARENA_CANARY_PRE and a.canary_post == PKV_ARENA_CANARY_POST


# Canaries say that a struct is one of ours, and nothing of its fields. Behind each struct, in the same block, lie seals: sums
# of the fields that nothing in a list or a table contradicts, and of the struct's own address. A field that was overwritten does not fit
# its seal, whatever it is now, and a copy of a struct is none.

cdef struct ArenaBlock:
    pkv_arena arena
    ArenaBlock *next    # of the registry
    uint64_t check      # of next
    uint64_t seal       # of the fields that are constant from creation to close; of nothing after it
    uint64_t roots      # of seqs, prefix, evict and forget
    uint64_t tallies    # of n_seqs and n_copies
    int64_t n_abandoned # sequences destroyed with pages that a poisoned arena does not take back
    int64_t forking     # the lock was taken for a fork

cdef struct SeqBlock:
    pkv_seq seq
    uint64_t seal       # of arena, max_pages and page_indices
    uint64_t links      # of next, prev, copy_from and copy_to

cdef struct PrefixBlock:
    pkv_prefix prefix
    uint64_t seal       # of all but n_entries and the counters


cdef inline uint64_t turned(uint64_t word, int by) noexcept nogil:
    return word << by | word >> (64 - by)


cdef inline bint constants_hold(const pkv_arena *a) noexcept nogil:
    """Needs no lock: beside a close the answer may be either, and the arena refuses either way."""
    return pkv_peek(&(<const ArenaBlock *>a).seal) == arena_seal(a)


cdef inline bint sizes_hold(const pkv_arena *a) noexcept nogil:
    """Constants too, but those that only closing uses."""
    return (a.storage_bytes == <uint64_t>(a.max_pages * a.page_stride)
            and a.pages_bytes == <uint64_t>(a.max_pages + 2) * sizeof(pkv_page))


cdef inline uint64_t arena_roots(const pkv_arena *a) noexcept nogil:
    return (turned(<uintptr_t>a, 1) ^ <uintptr_t>a.seqs ^ <uintptr_t>a.prefix * 3 ^ <uintptr_t>a.evict * 5
            ^ <uintptr_t>a.forget * 9)


cdef inline uint64_t arena_tallies(const pkv_arena *a) noexcept nogil:
    return turned(<uintptr_t>a, 2) ^ <uint64_t>a.n_seqs ^ turned(<uint64_t>a.n_copies, 32)


cdef inline bint roots_hold(const pkv_arena *a) noexcept nogil:
    return (<const ArenaBlock *>a).roots == arena_roots(a)


cdef inline bint tallies_hold(const pkv_arena *a) noexcept nogil:
    return (<const ArenaBlock *>a).tallies == arena_tallies(a)


cdef inline void seal_roots(pkv_arena *a) noexcept nogil:
    """After a change of what roots are of, which held before it. The lock is held; so for the others."""
    (<ArenaBlock *>a).roots = arena_roots(a)


cdef inline void seal_tallies(pkv_arena *a) noexcept nogil:
    (<ArenaBlock *>a).tallies = arena_tallies(a)


cdef inline bint lists_hold(pkv_arena *a) noexcept nogil:
    """Whether roots and tallies hold; else the arena is poisoned. The lock is held."""
    if roots_hold(a) and tallies_hold(a):
        return True
    poison(a, PKV_FAULT_FIELD, -1)
    return False


cdef inline bint seq_canaries_hold(const pkv_seq *s) noexcept nogil:
    return s != NULL and s.canary_pre == PKV_SEQ_CANARY_PRE and s.canary_post == PKV_SEQ_CANARY_POST


cdef inline uint64_t seq_seal(const pkv_seq *s) noexcept nogil:
    return turned(<uintptr_t>s, 1) ^ <uintptr_t>s.arena ^ turned(<uint64_t>s.max_pages, 32) ^ <uintptr_t>s.page_indices * 3


cdef inline bint seq_whole(const pkv_seq *s) noexcept nogil:
    """Whether s is a sequence and its constant fields can be believed."""
    return seq_canaries_hold(s) and (<const SeqBlock *>s).seal == seq_seal(s)


cdef inline uint64_t seq_links(const pkv_seq *s) noexcept nogil:
    return (turned(<uintptr_t>s, 2) ^ <uintptr_t>s.next * 3 ^ <uintptr_t>s.prev * 5
            ^ turned(<uint64_t>s.copy_from << 32 | s.copy_to, 8))


cdef inline bint links_hold(const pkv_seq *s) noexcept nogil:
    """The same for what changes under the lock, which is held; s is whole."""
    return (<const SeqBlock *>s).links == seq_links(s)


cdef inline void seal_links(pkv_seq *s) noexcept nogil:
    (<SeqBlock *>s).links = seq_links(s)


cdef inline void leave_arena(pkv_seq *s) noexcept nogil:
    """The arena of s is no more."""
    s.arena = NULL
    (<SeqBlock *>s).seal = seq_seal(s)


cdef inline bint prefix_canaries_hold(const pkv_prefix *p) noexcept nogil:
    return p != NULL and p.canary_pre == PKV_PREFIX_CANARY_PRE and p.canary_post == PKV_PREFIX_CANARY_POST


cdef inline uint64_t prefix_seal(const pkv_prefix *p) noexcept nogil:
    return (turned(<uintptr_t>p, 1) ^ <uintptr_t>p.arena ^ <uintptr_t>p.buckets * 3 ^ <uintptr_t>p.entries * 5
            ^ <uintptr_t>p.tokens * 9 ^ turned(<uint64_t>p.page_tokens, 32) ^ turned(<uint64_t>p.n_buckets, 40) ^ turned(p.seed, 8)
            ^ turned(p.buckets_bytes, 16) ^ turned(p.entries_bytes, 24) ^ turned(p.tokens_bytes, 48))


cdef inline bint prefix_whole(const pkv_prefix *p) noexcept nogil:
    """Whether p is a prefix index and its constant fields can be believed."""
    return prefix_canaries_hold(p) and (<const PrefixBlock *>p).seal == prefix_seal(p)


cdef inline void seal_prefix(pkv_prefix *p) noexcept nogil:
    (<PrefixBlock *>p).seal = prefix_seal(p)


# Lists are circular and doubly linked through a fake page each, so insertion and removal need no special case.

cdef inline uint32_t free_head(const pkv_arena *a) noexcept nogil:
    return <uint32_t>a.max_pages


cdef inline uint32_t lru_head(const pkv_arena *a) noexcept nogil:
    return <uint32_t>a.max_pages + 1


cdef inline uint32_t salt(uint32_t at) noexcept nogil:
    return at * <uint32_t>0x9E3779B1


cdef inline uint32_t encode(const pkv_arena *a, uint32_t at, uint32_t to) noexcept nogil:
    return (to ^ a.link_key) + salt(at)


cdef inline uint32_t decode(const pkv_arena *a, uint32_t at, uint32_t link) noexcept nogil:
    return (link - salt(at)) ^ a.link_key


cdef inline void link_to_itself(pkv_arena *a, uint32_t i) noexcept nogil:
    a.pages[i].next = a.pages[i].prev = encode(a, i, i)


cdef inline bint linked(const pkv_arena *a, uint32_t i) noexcept nogil:
    """Whether both neighbours of i exist and link back to it."""
    cdef uint32_t n = decode(a, i, a.pages[i].next)
    cdef uint32_t p = decode(a, i, a.pages[i].prev)
    return (n <= lru_head(a) and p <= lru_head(a)
            and decode(a, n, a.pages[n].prev) == i and decode(a, p, a.pages[p].next) == i)


cdef inline bint insert_after(pkv_arena *a, uint32_t at, uint32_t i) noexcept nogil:
    """Link i behind `at`; false, and nothing changed, when a link there was overwritten."""
    cdef uint32_t n
    if at > lru_head(a):
        return False
    n = decode(a, at, a.pages[at].next)
    if n > lru_head(a) or decode(a, n, a.pages[n].prev) != at:
        return False
    a.pages[i].prev = encode(a, i, at)
    a.pages[i].next = encode(a, i, n)
    a.pages[at].next = encode(a, at, i)
    a.pages[n].prev = encode(a, n, i)
    return True


cdef inline bint unlink(pkv_arena *a, uint32_t i) noexcept nogil:
    """Take i off its list; false, and nothing changed, when a link there was overwritten."""
    cdef uint32_t n, p
    if not linked(a, i):
        return False
    n = decode(a, i, a.pages[i].next)
    p = decode(a, i, a.pages[i].prev)
    a.pages[p].next = encode(a, p, n)
    a.pages[n].prev = encode(a, n, p)
    link_to_itself(a, i)
    return True


cdef inline uint8_t *page_at(const pkv_arena *a, int64_t i) noexcept nogil:
    return a.storage + i * a.page_stride


cdef inline void write_guard(pkv_arena *a, uint32_t i) noexcept nogil:
    if a.flags & PKV_ARENA_GUARD:
        pkv_store(page_at(a, i) + a.page_bytes, PKV_PAGE_GUARD)


cdef inline bint guard_holds(const pkv_arena *a, uint32_t i) noexcept nogil:
    return not a.flags & PKV_ARENA_GUARD or pkv_load(page_at(a, i) + a.page_bytes) == PKV_PAGE_GUARD


# One page taken and one given back are what most calls do: inline, with the checks of the general functions of pages.pyx.

cdef inline int64_t take_first(pkv_arena *a) noexcept nogil:
    """The first page of the free list, which is not empty, with refcount 1 now; or TAMPER with nothing changed."""
    cdef uint32_t head = free_head(a)
    cdef uint32_t i = decode(a, head, a.pages[head].next)
    cdef uint32_t following
    cdef pkv_page *page
    if unlikely(i >= a.n_pages):
        return poison(a, PKV_FAULT_LINK, -1)
    page = a.pages + i
    following = decode(a, i, page.next)
    if unlikely(page.state != PKV_PAGE_FREE or page.refcount or decode(a, i, page.prev) != head or following > head
                or decode(a, following, a.pages[following].prev) != i):
        return poison(a, PKV_FAULT_LINK, i)
    a.pages[head].next = encode(a, head, following)
    a.pages[following].prev = encode(a, following, head)
    link_to_itself(a, i)
    page.state = PKV_PAGE_IN_USE
    page.refcount = 1
    pkv_show(page_at(a, i), a.page_bytes + (8 if a.flags & PKV_ARENA_GUARD else 0))
    write_guard(a, i)
    a.n_free -= 1
    a.n_in_use += 1
    a.num_allocated += 1
    return i


cdef inline int64_t free_only(pkv_arena *a, uint32_t i) noexcept nogil:
    """Page i goes to the front of the free list when one holder is left and the prefix index does not know it: 1. Else
    0 and nothing changed, or TAMPER.
    """
    cdef uint32_t head = free_head(a)
    cdef uint32_t after = decode(a, head, a.pages[head].next)
    cdef pkv_page *page = a.pages + i
    if unlikely(after > head or decode(a, after, a.pages[after].prev) != head):
        return poison(a, PKV_FAULT_LINK, -1)
    if i >= a.n_pages or page.refcount != 1 or page.state != PKV_PAGE_IN_USE or page.indexed or not guard_holds(a, i):
        return 0
    page.refcount = 0
    page.state = PKV_PAGE_FREE
    page.prev = encode(a, i, head)
    page.next = encode(a, i, after)
    a.pages[head].next = encode(a, head, i)
    a.pages[after].prev = encode(a, after, i)
    a.n_free += 1
    a.n_in_use -= 1
    pkv_hide(page_at(a, i), a.page_stride)
    return 1


cdef inline bint holdable(const pkv_arena *a, uint32_t i) noexcept nogil:
    """Whether page i is what a sequence may hold: inside the arena, in use and counted."""
    return i < a.n_pages and a.pages[i].state == PKV_PAGE_IN_USE and a.pages[i].refcount != 0


cdef inline int64_t count_run(pkv_page *pages, uint32_t n_pages, const uint32_t *table, int64_t n, bint from_end, uint32_t least,
                              uint32_t change) noexcept nogil:
    """Add `change` to the refcounts of the pages at the start, or the end, of a table of n entries, four neighbours at a
    time; how many. Stops where the next four entries are no neighbours in the order of the first, or one of their
    refcounts is not in [least, least + 0xFFFFFFFE), or not enough are left.
    """
    cdef int64_t done = 0
    cdef const uint32_t *t = table + n - 4 if from_end else table
    cdef int64_t forward = -4 if from_end else 4
    cdef int64_t run
    cdef uint64_t expected, step
    cdef pkv_page *page
    if n < 4 or (t[1] - t[0] != 1 and t[0] - t[1] != 1):
        return 0
    run = <int32_t>(t[1] - t[0])
    step = <uint64_t>run * <uint64_t>0x0000000200000002
    expected = pkv_two(t)
    page = pages + (t[0] if run > 0 else t[3])
    run *= forward
    # Both ends inside the table of pages: those between are so, too.
    while (done + 4 <= n and pkv_two(t) == expected and pkv_two(t + 2) == expected + step and t[0] < n_pages and t[3] < n_pages
           and page[0].refcount - least < <uint32_t>0xFFFFFFFE and page[1].refcount - least < <uint32_t>0xFFFFFFFE
           and page[2].refcount - least < <uint32_t>0xFFFFFFFE and page[3].refcount - least < <uint32_t>0xFFFFFFFE):
        page[0].refcount += change
        page[1].refcount += change
        page[2].refcount += change
        page[3].refcount += change
        page += run
        expected += <uint64_t>(forward // 2) * step
        t += forward
        done += 4
    return done


cdef inline uint64_t chain_hash(uint64_t parent_hash, const int32_t *tokens, int64_t n) noexcept nogil:
    """Hash of a prefix that ends in these n tokens, from the hash of the prefix before them."""
    cdef uint64_t h = parent_hash ^ <uint64_t>0x2545F4914F6CDD1D
    cdef int64_t k
    for k in range(n):
        h = (h ^ <uint32_t>tokens[k]) * <uint64_t>0x9E3779B97F4A7C15
        h ^= h >> 29
    return h
