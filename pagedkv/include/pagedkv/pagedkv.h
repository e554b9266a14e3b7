/* pagedkv.h: the page arena for C.
 *
 * Structs are public so that a reader of pages needs no calls: page i of an arena is `storage + i * page_stride`,
 * 64-byte aligned, and never moves. Everything that changes an arena goes through the functions of pkv_api, all of
 * which may be called from any thread without the GIL.
 *
 * Functions return PKV_OK or an index (>= 0) on success and a negated verdict on failure.
 */
#ifndef PAGEDKV_PAGEDKV_H
#define PAGEDKV_PAGEDKV_H

#include <stddef.h>
#include <stdint.h>

#define PKV_ABI_VERSION 1

#define PKV_NO_PAGE 0xFFFFFFFFu           /* "no page" wherever a page index is stored */
#define PKV_MAX_PAGES 0x7FFFFFF0          /* largest max_pages of an arena or a sequence */
#define PKV_MAX_STORAGE ((int64_t)1 << 46) /* largest max_pages * page_stride, in bytes */
#define PKV_PAGE_ALIGN 64
#define PKV_MIN_SOFTCAP 0.0009765625f /* soft caps of attention: beyond these bounds float32 loses the scores */
#define PKV_MAX_SOFTCAP 1000.0f

#define PKV_ARENA_CANARY_PRE 0xA7E9C1D35B8F2E61u
#define PKV_ARENA_CANARY_POST 0x91F4B6E2D8A35C7Du
#define PKV_SEQ_CANARY_PRE 0xC3B19A5ED6F7284Bu
#define PKV_SEQ_CANARY_POST 0xE5D2874FB3A96C1Eu
#define PKV_PREFIX_CANARY_PRE 0xB8D64E93A1C5F72Du
#define PKV_PREFIX_CANARY_POST 0xD49CA2F187E6B35Bu
#define PKV_PAGE_GUARD 0xF1D3B597E9C7A58Bu /* the word behind each page of an arena made with PKV_ARENA_GUARD */

enum pkv_verdict {
    PKV_OK = 0,
    PKV_BAD_INPUT = 1,
    PKV_POOL_EXHAUSTED = 2, /* no page can be had, or the system refused memory; nothing changed */
    PKV_SEQ_FULL = 3,
    PKV_TAMPER = 4, /* a struct fails its checks, or the arena is poisoned or closed */
    PKV_NOT_FOUND = 5,
    PKV_N_VERDICTS = 6
};

enum pkv_page_state {
    PKV_PAGE_FREE = 0,   /* content meaningless, on the free list */
    PKV_PAGE_IN_USE = 1, /* refcount > 0 */
    PKV_PAGE_CACHED = 2  /* refcount 0, content findable by the prefix index, on the LRU list */
};

enum pkv_arena_flag { PKV_ARENA_GUARD = 1 };

/* Why an arena is poisoned: pkv_arena.fault; pkv_arena.fault_page names the page where there is one, else -1. */
enum pkv_fault {
    PKV_FAULT_NONE = 0,
    PKV_FAULT_CANARY = 1,   /* a canary of the arena */
    PKV_FAULT_COUNTS = 2,   /* n_free + n_in_use + n_cached != n_pages */
    PKV_FAULT_LINK = 3,     /* a free list or LRU link */
    PKV_FAULT_GUARD = 4,    /* the guard word behind a page */
    PKV_FAULT_PAGE = 5,     /* refcount or state of a page a sequence holds */
    PKV_FAULT_SEQUENCE = 6, /* a canary, count or table entry of a sequence */
    PKV_FAULT_PREFIX = 7,   /* the prefix index */
    PKV_FAULT_CLOSED = 8,   /* closed by its owner */
    PKV_FAULT_FIELD = 9     /* a field of the arena that no other field contradicts, by a sum kept apart */
};

typedef struct pkv_arena pkv_arena;
typedef struct pkv_seq pkv_seq;
typedef struct pkv_prefix pkv_prefix;

/* Bookkeeping of one page. Links are page indices encoded with the arena's key and the page's own index, so that an
 * overwritten link does not decode to a neighbour that links back. A page on no list links to itself. */
typedef struct pkv_page {
    uint32_t refcount;
    uint32_t next;
    uint32_t prev;
    uint8_t state;
    uint8_t indexed; /* 1: the prefix index knows its content */
    uint16_t reserved;
} pkv_page;

struct pkv_arena {
    uint64_t canary_pre;
    uint8_t *storage;     /* [max_pages][page_stride], the first n_pages committed */
    int64_t page_bytes;   /* usable bytes of a page */
    int64_t page_stride;  /* bytes from one page to the next, a multiple of 64 */
    pkv_page *pages;      /* [max_pages + 2]; the last two are the heads of the free list and of the LRU list */
    int64_t max_pages;
    int64_t growth_pages; /* pages committed per growth step */
    uint32_t flags;
    uint32_t link_key;
    /* all above is constant from creation to close; all below changes under the lock only */
    int32_t lock;
    uint32_t fault;
    int64_t fault_page;
    int64_t n_pages;
    int64_t n_free;
    int64_t n_in_use;
    int64_t n_cached;
    int64_t n_copies; /* page copies running outside the lock right now */
    int64_t n_seqs;
    pkv_seq *seqs; /* all sequences, doubly linked */
    pkv_prefix *prefix;
    /* set by the prefix index: free one CACHED page and return it; drop a page and all that follow it from the index */
    int64_t (*evict)(pkv_arena *);
    void (*forget)(pkv_arena *, uint32_t);
    uint64_t num_allocated; /* lifetime counters */
    uint64_t num_copied;
    uint64_t num_evicted;
    uint64_t num_grown;
    size_t storage_bytes; /* address space reserved at storage */
    size_t pages_bytes;
    uint64_t canary_post;
};

struct pkv_seq {
    uint64_t canary_pre;
    pkv_arena *arena; /* NULL once the arena is destroyed */
    int64_t seq_id;   /* the caller's, not interpreted */
    int64_t n_pages_used;
    int64_t max_pages;
    uint32_t *page_indices; /* [max_pages], the page table; never moves */
    int64_t n_tokens;       /* the typed layer's; 0 for untyped use */
    pkv_seq *next;
    pkv_seq *prev;
    uint32_t copy_from; /* a copy on write in flight holds both pages; else PKV_NO_PAGE */
    uint32_t copy_to;
    uint64_t canary_post;
};

/* One full page known to the prefix index, stored at the page's own index. */
typedef struct pkv_prefix_entry {
    uint64_t hash;   /* of all tokens from the start of the sequence to the end of this page */
    uint32_t parent; /* the page before it, PKV_NO_PAGE for the first page of a sequence */
    uint32_t first_child;
    uint32_t next_sibling; /* among the children of one parent; unused by first pages */
    uint32_t prev_sibling;
    uint32_t next_in_bucket;
    uint32_t reserved;
} pkv_prefix_entry;

struct pkv_prefix {
    uint64_t canary_pre;
    pkv_arena *arena;
    int64_t page_tokens;
    int64_t n_buckets; /* a power of two */
    uint32_t *buckets; /* [n_buckets] first page of each chain */
    pkv_prefix_entry *entries; /* [max_pages] */
    int32_t *tokens;           /* [max_pages][page_tokens] */
    int64_t n_entries;
    uint64_t seed;
    uint64_t num_queried; /* lifetime counters, in tokens */
    uint64_t num_hit;
    size_t buckets_bytes;
    size_t entries_bytes;
    size_t tokens_bytes;
    uint64_t canary_post;
};

/* One broken invariant found by the checker. */
typedef struct pkv_violation {
    const char *what; /* static text */
    int64_t where;    /* page index, sequence number or -1 */
    int64_t expected;
    int64_t found;
} pkv_violation;

/* Element format of K and V; int8 keeps one float32 scale per token and KV head. */
enum pkv_kv_format { PKV_FORMAT_F32 = 0, PKV_FORMAT_F16 = 1, PKV_FORMAT_INT8 = 2 };

/* Pages that hold K and V of all layers for page_tokens tokens: an arena's (storage and page_stride are fields of
 * pkv_arena) or any other memory. What lies where inside a page is the library's. */
typedef struct pkv_kv_pages {
    uint8_t *storage;    /* page i at storage + i * page_stride, 64-byte aligned */
    int64_t page_stride; /* a multiple of 64, not below kv_page_bytes() */
    int64_t n_layers;    /* in [1, 65536) */
    int64_t n_kv_heads;  /* in [1, 65536) */
    int64_t head_dim;    /* in [1, 8192) */
    int64_t page_tokens; /* 16, 32, 64, 128 or 256 */
    int64_t format;      /* a pkv_kv_format */
} pkv_kv_pages;

typedef struct pkv_attention {
    int64_t n_heads; /* query heads, a multiple of n_kv_heads */
    int64_t window;  /* a token sees the last `window` tokens, itself included; 0: all */
    float scale;     /* of the scores, as a rule 1/sqrt(head_dim); 0 or a normal number */
    float softcap;   /* scores become softcap * tanh(score / softcap), in [PKV_MIN_SOFTCAP, PKV_MAX_SOFTCAP]; 0: they do not */
} pkv_attention;

/* Threads that share one call, started at the first and again after a fork. */
typedef struct pkv_pool pkv_pool;

/* All functions. The list only grows at its end; struct_size tells how much of it a build of pagedkv has.
 * int64_t results: >= 0 is success (an index, a count or PKV_OK), < 0 a negated pkv_verdict. Out-pointers are NULL on
 * failure. NULL for a struct of the library, and what is no valid struct of the kind, is TAMPER, and nothing is written; NULL for
 * anything else that is needed is BAD_INPUT. Names ending in _destroy release the struct; one that is not valid is left alone. */
typedef struct pkv_api {
    int64_t abi_version;
    int64_t struct_size;

    /* max_pages 0: fixed at n_pages; growth_pages 0: n_pages; flags: pkv_arena_flag */
    int64_t (*arena_new)(pkv_arena **out, int64_t n_pages, int64_t page_bytes, int64_t max_pages, int64_t growth_pages,
                         uint32_t flags);
    int64_t (*arena_close)(pkv_arena *);   /* memory goes back, every later call answers TAMPER */
    int64_t (*arena_destroy)(pkv_arena *);
    int64_t (*arena_is_valid)(pkv_arena *); /* 1 or 0 */
    int64_t (*arena_refcount)(pkv_arena *, int64_t page);
    int64_t (*arena_page_state)(pkv_arena *, int64_t page); /* a pkv_page_state */
    uint8_t *(*arena_page)(pkv_arena *, int64_t page);      /* NULL when not a page or not valid */
    int64_t (*arena_n_pages)(pkv_arena *);
    int64_t (*arena_n_free)(pkv_arena *);
    int64_t (*arena_n_in_use)(pkv_arena *);
    int64_t (*arena_n_cached)(pkv_arena *);
    int64_t (*arena_reserve)(pkv_arena *, int64_t n_free); /* commit until so many pages are FREE */
    int64_t (*arena_trim)(pkv_arena *);                    /* bytes handed back to the system: that were in memory */

    int64_t (*seq_new)(pkv_seq **out, pkv_arena *, int64_t seq_id, int64_t max_pages);
    int64_t (*seq_destroy)(pkv_seq *);
    int64_t (*seq_is_valid)(pkv_seq *); /* 1 or 0 */
    int64_t (*seq_n_pages)(pkv_seq *);
    int64_t (*seq_append_page)(pkv_seq *);                /* page index */
    int64_t (*seq_append_pages)(pkv_seq *, int64_t n);    /* all or none */
    int64_t (*seq_share_page)(pkv_seq *, int64_t page);   /* page index */
    int64_t (*seq_share_pages)(pkv_seq *, const uint32_t *pages /* [n] */, int64_t n); /* all or none */
    int64_t (*seq_snapshot)(pkv_seq **out, pkv_seq *);
    int64_t (*seq_write_page)(pkv_seq *, int64_t i);      /* i-th of the table; its page index, new after a copy */
    int64_t (*seq_truncate_pages)(pkv_seq *, int64_t n);
    int64_t (*seq_free)(pkv_seq *);                       /* empties; idempotent */

    int64_t (*prefix_new)(pkv_prefix **out, pkv_arena *, int64_t page_tokens, uint64_t seed);
    int64_t (*prefix_destroy)(pkv_prefix *);
    int64_t (*prefix_is_valid)(pkv_prefix *); /* 1 or 0 */
    int64_t (*prefix_lookup)(pkv_prefix *, const int32_t *tokens /* [n] */, int64_t n);            /* pages known */
    int64_t (*prefix_match)(pkv_prefix *, pkv_seq *, const int32_t *tokens /* [n] */, int64_t n);  /* pages shared */
    int64_t (*prefix_insert)(pkv_prefix *, pkv_seq *, const int32_t *tokens /* [n] */, int64_t n); /* pages indexed */
    int64_t (*prefix_clear)(pkv_prefix *);

    /* level 1: O(1), 2: O(pages), 3: all; number of violations, the first `capacity` of them in out, which may be NULL when
     * capacity is 0; what is no arena, and not NULL, is a violation */
    int64_t (*check)(pkv_arena *, int64_t level, pkv_violation *out, int64_t capacity);

    /* Typed pages. Token t of a sequence is on page page_table[t / page_tokens]; a pkv_seq's table is page_indices. What a table
     * says is believed: nothing here knows how many pages there are. Any number of threads may call these at once, as long
     * as none writes a token that another reads or writes. */
    int64_t (*kv_page_bytes)(const pkv_kv_pages *); /* of the shape; storage and page_stride are not looked at */
    /* K and V of tokens [start, start + n) of one layer; inf and NaN are BAD_INPUT under int8; nothing written on failure */
    int64_t (*kv_write)(const pkv_kv_pages *, const uint32_t *page_table, int64_t layer, int64_t start, int64_t n,
                        const float *k /* [n][n_kv_heads][head_dim] */, const float *v);
    /* the last n_queries of n_tokens tokens, each over all tokens up to itself; computed on the calling thread */
    int64_t (*kv_attend)(const pkv_kv_pages *, const uint32_t *page_table, int64_t layer, int64_t n_tokens,
                         int64_t n_queries, const pkv_attention *, const float *q /* [n_queries][n_heads][head_dim] */,
                         float *out);

    /* n_threads in [1, 1024], the caller's included; calls on one pool take turns */
    int64_t (*pool_new)(pkv_pool **out, int64_t n_threads);
    int64_t (*pool_destroy)(pkv_pool *); /* no call may be running on it */
    /* kv_attend on the threads of a pool, with the same bits */
    int64_t (*kv_attend_on)(pkv_pool *, const pkv_kv_pages *, const uint32_t *page_table, int64_t layer, int64_t n_tokens,
                            int64_t n_queries, const pkv_attention *, const float *q, float *out);
    /* K and V of tokens [start, start + n) of one layer as they are kept, widened to float32: what kv_write stored, rounded to f16 or
     * int8 if that is the format. For a consumer without paged attention */
    int64_t (*kv_gather)(const pkv_kv_pages *, const uint32_t *page_table, int64_t layer, int64_t start, int64_t n,
                         float *k /* [n][n_kv_heads][head_dim] */, float *v);
} pkv_api;

#define PKV_CAPSULE_MODULE "pagedkv.core.capi"
#define PKV_CAPSULE_ATTRIBUTE "_C_API"
#define PKV_CAPSULE_NAME PKV_CAPSULE_MODULE "." PKV_CAPSULE_ATTRIBUTE

#ifdef Py_PYTHON_H
/* The functions of the installed pagedkv; include Python.h first. Call with the GIL, once; the result lives as long as
 * the interpreter. NULL with ImportError set when pagedkv is missing, has another ABI version, or fewer functions than
 * this header. */
static inline const pkv_api *pkv_import(void) {
    const pkv_api *api;
    PyObject *capsule;
    PyObject *module = PyImport_ImportModule(PKV_CAPSULE_MODULE);
    if (module == NULL) return NULL;
    capsule = PyObject_GetAttrString(module, PKV_CAPSULE_ATTRIBUTE);
    Py_DECREF(module);
    if (capsule == NULL) return NULL;
    api = (const pkv_api *)PyCapsule_GetPointer(capsule, PKV_CAPSULE_NAME);
    Py_DECREF(capsule);
    if (api == NULL) return NULL;
    if (api->abi_version != PKV_ABI_VERSION || api->struct_size < (int64_t)sizeof(pkv_api)) {
        PyErr_Format(PyExc_ImportError,
                     "pagedkv has C ABI version %lld with %lld bytes of functions; needed: version %d with %lld",
                     (long long)api->abi_version, (long long)api->struct_size, PKV_ABI_VERSION,
                     (long long)sizeof(pkv_api));
        return NULL;
    }
    return api;
}
#endif

#if UINTPTR_MAX != 0xFFFFFFFFFFFFFFFFu
#error "pagedkv needs 64-bit pointers"
#endif
#ifdef __cplusplus
#define PKV_STATIC_ASSERT static_assert
#else
#define PKV_STATIC_ASSERT _Static_assert
#endif
PKV_STATIC_ASSERT(sizeof(pkv_page) == 16, "pkv_page");
PKV_STATIC_ASSERT(sizeof(pkv_arena) == 216, "pkv_arena");
PKV_STATIC_ASSERT(offsetof(pkv_arena, storage) == 8 && offsetof(pkv_arena, page_bytes) == 16 &&
                   offsetof(pkv_arena, page_stride) == 24 && offsetof(pkv_arena, pages) == 32 &&
                   offsetof(pkv_arena, lock) == 64 && offsetof(pkv_arena, n_pages) == 80 &&
                   offsetof(pkv_arena, canary_post) == 208,
               "pkv_arena");
PKV_STATIC_ASSERT(sizeof(pkv_seq) == 88, "pkv_seq");
PKV_STATIC_ASSERT(offsetof(pkv_seq, arena) == 8 && offsetof(pkv_seq, n_pages_used) == 24 &&
                   offsetof(pkv_seq, page_indices) == 40 && offsetof(pkv_seq, n_tokens) == 48 &&
                   offsetof(pkv_seq, canary_post) == 80,
               "pkv_seq");
PKV_STATIC_ASSERT(sizeof(pkv_prefix_entry) == 32, "pkv_prefix_entry");
PKV_STATIC_ASSERT(sizeof(pkv_prefix) == 120 && offsetof(pkv_prefix, canary_post) == 112, "pkv_prefix");
PKV_STATIC_ASSERT(sizeof(pkv_violation) == 32, "pkv_violation");
PKV_STATIC_ASSERT(sizeof(pkv_kv_pages) == 56 && sizeof(pkv_attention) == 24, "typed pages");

#endif
