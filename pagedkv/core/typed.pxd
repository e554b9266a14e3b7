"""Typed K/V pages of a caller's own, for C and Cython: 0 or a size, or a negated verdict; thread-safe, no GIL."""

from libc.stdint cimport int64_t, uint32_t

from pagedkv.core.structs cimport *

cdef int64_t pkv_kv_page_bytes(const pkv_kv_pages *p) noexcept nogil
cdef int64_t pkv_kv_write(const pkv_kv_pages *p, const uint32_t *page_table, int64_t layer, int64_t start, int64_t n, const float *k,
                          const float *v) noexcept nogil
cdef int64_t pkv_kv_attend(const pkv_kv_pages *p, const uint32_t *page_table, int64_t layer, int64_t n_tokens, int64_t n_queries,
                           const pkv_attention *how, const float *q, float *out) noexcept nogil
cdef int64_t pkv_pool_new(pkv_pool **out, int64_t n_threads) noexcept nogil
cdef int64_t pkv_pool_destroy(pkv_pool *pool) noexcept nogil
cdef int64_t pkv_kv_attend_on(pkv_pool *pool, const pkv_kv_pages *p, const uint32_t *page_table, int64_t layer, int64_t n_tokens,
                              int64_t n_queries, const pkv_attention *how, const float *q, float *out) noexcept nogil
cdef int64_t pkv_kv_gather(const pkv_kv_pages *p, const uint32_t *page_table, int64_t layer, int64_t start, int64_t n, float *k,
                           float *v) noexcept nogil
