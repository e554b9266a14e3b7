"""Names of the structs and constants of pagedkv.h, which alone defines them."""

from libc.stdint cimport int32_t, int64_t, uint8_t, uint32_t, uint64_t


cdef extern from "pagedkv/pagedkv.h" nogil:
    const uint32_t PKV_NO_PAGE
    const int64_t PKV_MAX_PAGES, PKV_MAX_STORAGE, PKV_PAGE_ALIGN
    const int64_t PKV_ABI_VERSION
    const float PKV_MIN_SOFTCAP, PKV_MAX_SOFTCAP
    const uint64_t PKV_ARENA_CANARY_PRE, PKV_ARENA_CANARY_POST
    const uint64_t PKV_SEQ_CANARY_PRE, PKV_SEQ_CANARY_POST
    const uint64_t PKV_PREFIX_CANARY_PRE, PKV_PREFIX_CANARY_POST
    const uint64_t PKV_PAGE_GUARD

    enum: PKV_OK, PKV_BAD_INPUT, PKV_POOL_EXHAUSTED, PKV_SEQ_FULL, PKV_TAMPER, PKV_NOT_FOUND
    enum: PKV_PAGE_FREE, PKV_PAGE_IN_USE, PKV_PAGE_CACHED
    enum: PKV_ARENA_GUARD
    enum: PKV_FAULT_NONE, PKV_FAULT_CANARY, PKV_FAULT_COUNTS, PKV_FAULT_LINK, PKV_FAULT_GUARD, PKV_FAULT_PAGE
    enum: PKV_FAULT_SEQUENCE, PKV_FAULT_PREFIX, PKV_FAULT_CLOSED, PKV_FAULT_FIELD

    ctypedef struct pkv_page:
        uint32_t refcount
        uint32_t next
        uint32_t prev
        uint8_t state
        uint8_t indexed

    ctypedef struct pkv_arena:
        uint64_t canary_pre
        uint8_t *storage
        int64_t page_bytes
        int64_t page_stride
        pkv_page *pages
        int64_t max_pages
        int64_t growth_pages
        uint32_t flags
        uint32_t link_key
        int32_t lock
        uint32_t fault
        int64_t fault_page
        int64_t n_pages
        int64_t n_free
        int64_t n_in_use
        int64_t n_cached
        int64_t n_copies
        int64_t n_seqs
        pkv_seq *seqs
        pkv_prefix *prefix
        int64_t (*evict)(pkv_arena *) noexcept nogil
        void (*forget)(pkv_arena *, uint32_t) noexcept nogil
        uint64_t num_allocated
        uint64_t num_copied
        uint64_t num_evicted
        uint64_t num_grown
        size_t storage_bytes
        size_t pages_bytes
        uint64_t canary_post

    ctypedef struct pkv_seq:
        uint64_t canary_pre
        pkv_arena *arena
        int64_t seq_id
        int64_t n_pages_used
        int64_t max_pages
        uint32_t *page_indices
        int64_t n_tokens
        pkv_seq *next
        pkv_seq *prev
        uint32_t copy_from
        uint32_t copy_to
        uint64_t canary_post

    ctypedef struct pkv_prefix_entry:
        uint64_t hash
        uint32_t parent
        uint32_t first_child
        uint32_t next_sibling
        uint32_t prev_sibling
        uint32_t next_in_bucket

    ctypedef struct pkv_prefix:
        uint64_t canary_pre
        pkv_arena *arena
        int64_t page_tokens
        int64_t n_buckets
        uint32_t *buckets
        pkv_prefix_entry *entries
        int32_t *tokens
        int64_t n_entries
        uint64_t seed
        uint64_t num_queried
        uint64_t num_hit
        size_t buckets_bytes
        size_t entries_bytes
        size_t tokens_bytes
        uint64_t canary_post

    ctypedef struct pkv_violation:
        const char *what
        int64_t where
        int64_t expected
        int64_t found

    enum: PKV_FORMAT_F32, PKV_FORMAT_F16, PKV_FORMAT_INT8

    ctypedef struct pkv_kv_pages:
        uint8_t *storage
        int64_t page_stride
        int64_t n_layers
        int64_t n_kv_heads
        int64_t head_dim
        int64_t page_tokens
        int64_t format

    ctypedef struct pkv_attention:
        int64_t n_heads
        int64_t window
        float scale
        float softcap

    ctypedef struct pkv_pool:
        pass

    ctypedef struct pkv_api:
        int64_t abi_version
        int64_t struct_size
        int64_t (*arena_new)(pkv_arena **out, int64_t n_pages, int64_t page_bytes, int64_t max_pages,
                             int64_t growth_pages, uint32_t flags) noexcept nogil
        int64_t (*arena_close)(pkv_arena *) noexcept nogil
        int64_t (*arena_destroy)(pkv_arena *) noexcept nogil
        int64_t (*arena_is_valid)(pkv_arena *) noexcept nogil
        int64_t (*arena_refcount)(pkv_arena *, int64_t page) noexcept nogil
        int64_t (*arena_page_state)(pkv_arena *, int64_t page) noexcept nogil
        uint8_t *(*arena_page)(pkv_arena *, int64_t page) noexcept nogil
        int64_t (*arena_n_pages)(pkv_arena *) noexcept nogil
        int64_t (*arena_n_free)(pkv_arena *) noexcept nogil
        int64_t (*arena_n_in_use)(pkv_arena *) noexcept nogil
        int64_t (*arena_n_cached)(pkv_arena *) noexcept nogil
        int64_t (*arena_reserve)(pkv_arena *, int64_t n_free) noexcept nogil
        int64_t (*arena_trim)(pkv_arena *) noexcept nogil
        int64_t (*seq_new)(pkv_seq **out, pkv_arena *, int64_t seq_id, int64_t max_pages) noexcept nogil
        int64_t (*seq_destroy)(pkv_seq *) noexcept nogil
        int64_t (*seq_is_valid)(pkv_seq *) noexcept nogil
        int64_t (*seq_n_pages)(pkv_seq *) noexcept nogil
        int64_t (*seq_append_page)(pkv_seq *) noexcept nogil
        int64_t (*seq_append_pages)(pkv_seq *, int64_t n) noexcept nogil
        int64_t (*seq_share_page)(pkv_seq *, int64_t page) noexcept nogil
        int64_t (*seq_share_pages)(pkv_seq *, const uint32_t *pages, int64_t n) noexcept nogil
        int64_t (*seq_snapshot)(pkv_seq **out, pkv_seq *) noexcept nogil
        int64_t (*seq_write_page)(pkv_seq *, int64_t i) noexcept nogil
        int64_t (*seq_truncate_pages)(pkv_seq *, int64_t n) noexcept nogil
        int64_t (*seq_free)(pkv_seq *) noexcept nogil
        int64_t (*prefix_new)(pkv_prefix **out, pkv_arena *, int64_t page_tokens, uint64_t seed) noexcept nogil
        int64_t (*prefix_destroy)(pkv_prefix *) noexcept nogil
        int64_t (*prefix_is_valid)(pkv_prefix *) noexcept nogil
        int64_t (*prefix_lookup)(pkv_prefix *, const int32_t *tokens, int64_t n) noexcept nogil
        int64_t (*prefix_match)(pkv_prefix *, pkv_seq *, const int32_t *tokens, int64_t n) noexcept nogil
        int64_t (*prefix_insert)(pkv_prefix *, pkv_seq *, const int32_t *tokens, int64_t n) noexcept nogil
        int64_t (*prefix_clear)(pkv_prefix *) noexcept nogil
        int64_t (*check)(pkv_arena *, int64_t level, pkv_violation *out, int64_t capacity) noexcept nogil
        int64_t (*kv_page_bytes)(const pkv_kv_pages *) noexcept nogil
        int64_t (*kv_write)(const pkv_kv_pages *, const uint32_t *page_table, int64_t layer, int64_t start, int64_t n, const float *k,
                            const float *v) noexcept nogil
        int64_t (*kv_attend)(const pkv_kv_pages *, const uint32_t *page_table, int64_t layer, int64_t n_tokens, int64_t n_queries,
                             const pkv_attention *, const float *q, float *out) noexcept nogil
        int64_t (*pool_new)(pkv_pool **out, int64_t n_threads) noexcept nogil
        int64_t (*pool_destroy)(pkv_pool *) noexcept nogil
        int64_t (*kv_attend_on)(pkv_pool *, const pkv_kv_pages *, const uint32_t *page_table, int64_t layer, int64_t n_tokens,
                                int64_t n_queries, const pkv_attention *, const float *q, float *out) noexcept nogil
        int64_t (*kv_gather)(const pkv_kv_pages *, const uint32_t *page_table, int64_t layer, int64_t start, int64_t n, float *k,
                             float *v) noexcept nogil

    const char *PKV_CAPSULE_NAME
