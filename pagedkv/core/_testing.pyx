"""Private access for tests and benchmarks: refused memory, damaged structs, and loops in C. Nothing else imports it."""

from libc.stdint cimport int64_t, uint8_t, uint32_t, uint64_t

from pagedkv.core.arena cimport *
from pagedkv.core.files cimport pkv_set_read_hook
from pagedkv.core.internal cimport decode, encode, free_head, lru_head
from pagedkv.core.memory cimport pkv_set_requests_left
from pagedkv.core.sequence cimport *
from pagedkv.core.structs cimport *


cdef extern from *:
    """
    /* Damage must reach memory that AddressSanitizer guards. */
    __attribute__((no_sanitize("address"))) static void pkv_poke(unsigned char *p, unsigned char value) { *p = value; }
    """
    void pkv_poke(unsigned char *p, unsigned char value) noexcept nogil

cdef extern from "<time.h>" nogil:
    struct timespec:
        long tv_sec
        long tv_nsec
    int clock_gettime(int clock, timespec *now)
    const int CLOCK_THREAD_CPUTIME_ID

cdef extern from "pagedkv/pagedkv.h":
    """
    /* name, offset and size of every field, sizes of every struct: what the ABI hash is made of */
    #define PKV_FIELD(type, field) {#type "." #field, offsetof(type, field), sizeof(((type *)0)->field)}
    #define PKV_SIZE(type) {#type, sizeof(type), 0}
    typedef struct { const char *name; size_t offset; size_t size; } pkv_field;
    static const pkv_field pkv_layout[] = {
        PKV_SIZE(pkv_page), PKV_FIELD(pkv_page, refcount), PKV_FIELD(pkv_page, next), PKV_FIELD(pkv_page, prev),
        PKV_FIELD(pkv_page, state), PKV_FIELD(pkv_page, indexed),
        PKV_SIZE(pkv_arena), PKV_FIELD(pkv_arena, canary_pre), PKV_FIELD(pkv_arena, storage),
        PKV_FIELD(pkv_arena, page_bytes), PKV_FIELD(pkv_arena, page_stride), PKV_FIELD(pkv_arena, pages),
        PKV_FIELD(pkv_arena, max_pages), PKV_FIELD(pkv_arena, growth_pages), PKV_FIELD(pkv_arena, flags),
        PKV_FIELD(pkv_arena, link_key), PKV_FIELD(pkv_arena, lock), PKV_FIELD(pkv_arena, fault),
        PKV_FIELD(pkv_arena, fault_page), PKV_FIELD(pkv_arena, n_pages), PKV_FIELD(pkv_arena, n_free),
        PKV_FIELD(pkv_arena, n_in_use), PKV_FIELD(pkv_arena, n_cached), PKV_FIELD(pkv_arena, n_copies),
        PKV_FIELD(pkv_arena, n_seqs), PKV_FIELD(pkv_arena, seqs), PKV_FIELD(pkv_arena, prefix),
        PKV_FIELD(pkv_arena, evict),
        PKV_FIELD(pkv_arena, forget), PKV_FIELD(pkv_arena, num_allocated), PKV_FIELD(pkv_arena, num_copied),
        PKV_FIELD(pkv_arena, num_evicted), PKV_FIELD(pkv_arena, num_grown), PKV_FIELD(pkv_arena, storage_bytes),
        PKV_FIELD(pkv_arena, pages_bytes), PKV_FIELD(pkv_arena, canary_post),
        PKV_SIZE(pkv_seq), PKV_FIELD(pkv_seq, canary_pre), PKV_FIELD(pkv_seq, arena), PKV_FIELD(pkv_seq, seq_id),
        PKV_FIELD(pkv_seq, n_pages_used), PKV_FIELD(pkv_seq, max_pages), PKV_FIELD(pkv_seq, page_indices),
        PKV_FIELD(pkv_seq, n_tokens), PKV_FIELD(pkv_seq, next), PKV_FIELD(pkv_seq, prev), PKV_FIELD(pkv_seq, copy_from),
        PKV_FIELD(pkv_seq, copy_to), PKV_FIELD(pkv_seq, canary_post),
        PKV_SIZE(pkv_prefix), PKV_FIELD(pkv_prefix, canary_pre), PKV_FIELD(pkv_prefix, arena),
        PKV_FIELD(pkv_prefix, page_tokens), PKV_FIELD(pkv_prefix, n_buckets), PKV_FIELD(pkv_prefix, buckets),
        PKV_FIELD(pkv_prefix, entries), PKV_FIELD(pkv_prefix, tokens), PKV_FIELD(pkv_prefix, n_entries),
        PKV_FIELD(pkv_prefix, seed), PKV_FIELD(pkv_prefix, num_queried), PKV_FIELD(pkv_prefix, num_hit),
        PKV_FIELD(pkv_prefix, buckets_bytes), PKV_FIELD(pkv_prefix, entries_bytes), PKV_FIELD(pkv_prefix, tokens_bytes),
        PKV_FIELD(pkv_prefix, canary_post),
        PKV_SIZE(pkv_prefix_entry), PKV_FIELD(pkv_prefix_entry, hash), PKV_FIELD(pkv_prefix_entry, parent),
        PKV_FIELD(pkv_prefix_entry, first_child), PKV_FIELD(pkv_prefix_entry, next_sibling),
        PKV_FIELD(pkv_prefix_entry, prev_sibling), PKV_FIELD(pkv_prefix_entry, next_in_bucket),
        PKV_SIZE(pkv_violation), PKV_FIELD(pkv_violation, what), PKV_FIELD(pkv_violation, where),
        PKV_FIELD(pkv_violation, expected), PKV_FIELD(pkv_violation, found),
        PKV_SIZE(pkv_kv_pages), PKV_FIELD(pkv_kv_pages, storage), PKV_FIELD(pkv_kv_pages, page_stride),
        PKV_FIELD(pkv_kv_pages, n_layers), PKV_FIELD(pkv_kv_pages, n_kv_heads), PKV_FIELD(pkv_kv_pages, head_dim),
        PKV_FIELD(pkv_kv_pages, page_tokens), PKV_FIELD(pkv_kv_pages, format),
        PKV_SIZE(pkv_attention), PKV_FIELD(pkv_attention, n_heads), PKV_FIELD(pkv_attention, window),
        PKV_FIELD(pkv_attention, scale), PKV_FIELD(pkv_attention, softcap),
        PKV_SIZE(pkv_api),
    };
    #define PKV_N_LAYOUT ((int)(sizeof(pkv_layout) / sizeof(pkv_layout[0])))
    """
    struct pkv_field:
        const char *name
        size_t offset
        size_t size
    pkv_field pkv_layout[1]
    const int PKV_N_LAYOUT


abi_version = PKV_ABI_VERSION


def layout():
    """(name, offset or size of struct, size of field) of every public struct and field, as this build sees them."""
    return [(pkv_layout[k].name.decode(), pkv_layout[k].offset, pkv_layout[k].size) for k in range(PKV_N_LAYOUT)]


# --- faults -----------------------------------------------------------------------------------------------------------

def let_pass(int64_t n):
    """Let n requests for memory pass and refuse the one after; -1 lets all pass."""
    pkv_set_requests_left(n)


cdef object read_hook = None


cdef void call_read_hook(int fd, int64_t n, int64_t offset) noexcept with gil:
    if read_hook is not None:
        read_hook(fd, n, offset)


def before_reads(hook):
    """Call hook(fd, n, offset) before every read of a file, in whatever thread reads; None: nothing."""
    global read_hook
    read_hook = hook
    if hook is None:
        pkv_set_read_hook(NULL)
    else:
        pkv_set_read_hook(&call_read_hook)


def peek(size_t address, size_t n):
    """n bytes of memory."""
    return (<const uint8_t *>address)[:n]


def poke(size_t address, bytes content):
    """Overwrite memory."""
    cdef Py_ssize_t k
    for k in range(len(content)):
        pkv_poke(<unsigned char *>address + k, content[k])


def page_address(Arena arena, int64_t i):
    """Address of page i's bytes."""
    return <size_t>(arena.ptr.storage + i * arena.ptr.page_stride)


def meta_address(Arena arena, int64_t i):
    """Address of page i's pkv_page struct; max_pages names the head of the free list, max_pages + 1 that of the LRU
    list.
    """
    return <size_t>(arena.ptr.pages + i)


def entry_address(Arena arena, int64_t i):
    """Address of page i's pkv_prefix_entry struct."""
    return <size_t>(arena.ptr.prefix.entries + i)


cdef list walk(pkv_arena *a, uint32_t head):
    cdef uint32_t i = decode(a, head, a.pages[head].next)
    cdef list found = []
    while i != head:
        found.append(i)
        i = decode(a, i, a.pages[i].next)
    return found


def free_list(Arena arena):
    """Page indices in the order they will be taken."""
    return walk(arena.ptr, free_head(arena.ptr))


def lru_list(Arena arena):
    """CACHED page indices, oldest first."""
    return walk(arena.ptr, lru_head(arena.ptr))


def encoded(Arena arena, uint32_t at, uint32_t to):
    """The raw value a link field of page `at` has when it names page `to`."""
    return encode(arena.ptr, at, to)


# --- loops in C, for benchmarks: processor seconds for the whole loop ------------------------------------------------

cdef double now() noexcept nogil:
    cdef timespec t
    clock_gettime(CLOCK_THREAD_CPUTIME_ID, &t)
    return t.tv_sec + 1e-9 * t.tv_nsec


def time_append_truncate(Sequence seq, int64_t n):
    """n times: append a page to an empty sequence, give it back."""
    cdef double start
    cdef int64_t k
    with nogil:
        start = now()
        for k in range(n):
            pkv_seq_append_page(seq.ptr)
            pkv_seq_truncate_pages(seq.ptr, 0)
        start = now() - start
    return start


def time_append_free(Sequence seq, int64_t n_pages, int64_t n):
    """n times: append n_pages pages to an empty sequence, free it."""
    cdef double start
    cdef int64_t k
    with nogil:
        start = now()
        for k in range(n):
            pkv_seq_append_pages(seq.ptr, n_pages)
            pkv_seq_free(seq.ptr)
        start = now() - start
    return start


def time_share_release(Sequence source, Sequence target, int64_t n):
    """n times: share every page of source into the empty target, release them."""
    cdef double start
    cdef int64_t k
    with nogil:
        start = now()
        for k in range(n):
            pkv_seq_share_pages(target.ptr, source.ptr.page_indices, source.ptr.n_pages_used)
            pkv_seq_free(target.ptr)
        start = now() - start
    return start


def time_snapshot(Sequence seq, int64_t n):
    """n times: snapshot and destroy."""
    cdef double start
    cdef int64_t k
    cdef pkv_seq *copy
    with nogil:
        start = now()
        for k in range(n):
            pkv_seq_snapshot(&copy, seq.ptr)
            pkv_seq_destroy(copy)
        start = now() - start
    return start


def random_operations(Arena arena, int64_t n_seqs, int64_t n, uint64_t seed):
    """n random appends, shares, snapshots, writes, truncates and frees over n_seqs sequences; (seconds, refusals by
    verdict).
    """
    cdef double start
    cdef int64_t k, status, pick
    cdef uint64_t x = seed | 1
    cdef pkv_seq *seqs[64]
    cdef pkv_seq *copy
    cdef pkv_seq *s
    cdef int64_t refusals[6]
    if not 0 < n_seqs <= 64:
        raise ValueError(f"n_seqs: {n_seqs} is outside [1, 64]")
    for k in range(6):
        refusals[k] = 0
    for k in range(n_seqs):
        if pkv_seq_new(&seqs[k], arena.ptr, k, 256):
            raise MemoryError
    with nogil:
        start = now()
        for k in range(n):
            x ^= x << 13
            x ^= x >> 7
            x ^= x << 17
            pick = <int64_t>((x >> 8) % <uint64_t>n_seqs)
            s = seqs[pick]
            status = 0
            if x & 7 < 4:
                status = pkv_seq_append_page(s)
            elif x & 7 == 4:
                status = pkv_seq_share_page(s, <int64_t>((x >> 20) % <uint64_t>arena.ptr.max_pages))
            elif x & 7 == 5:
                if s.n_pages_used:
                    status = pkv_seq_write_page(s, <int64_t>((x >> 20) % <uint64_t>s.n_pages_used))
            elif x & 7 == 6:
                status = pkv_seq_truncate_pages(s, s.n_pages_used - s.n_pages_used // 4)
            elif x & 0xF00000:
                status = pkv_seq_truncate_pages(s, s.n_pages_used // 2)
            else:
                status = pkv_seq_snapshot(&copy, s)
                if status == 0:
                    pkv_seq_destroy(s)
                    seqs[pick] = copy
            if status < 0:
                refusals[-status] += 1
        start = now() - start
        for k in range(n_seqs):
            pkv_seq_destroy(seqs[k])
    return start, [refusals[k] for k in range(6)]
