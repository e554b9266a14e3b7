"""Paged attention for Cython: the view of a typed cache and the row function."""

from libc.stdint cimport int64_t, uint8_t, uint32_t

from pagedkv.core._kernels cimport *

# Where the tiles of a typed cache lie, and the arithmetic asked for.
cdef struct attention_view:
    uint8_t *storage       # page i at storage + i * page_stride
    int64_t page_stride
    int64_t tile_bytes     # tile of (layer, KV head) at (layer * n_kv_heads + kv_head) * tile_bytes inside a page
    int64_t n_kv_heads
    int64_t group          # query heads per KV head
    int64_t head_dim
    int64_t page_tokens
    int64_t window         # a query sees the last `window` tokens up to itself; 0: all
    float scale
    float softcap          # 0: none
    int format

cdef int64_t tile_tokens(const attention_view *v) noexcept nogil
cdef int64_t scratch_floats(const attention_view *v) noexcept nogil
cdef uint8_t *kv_tile(const attention_view *v, uint32_t page, int64_t layer, int64_t kv_head) noexcept nogil
cdef void attend_tile(float *out, const float *q, const attention_view *v, const uint32_t *page_table, int64_t layer, int64_t kv_head,
                      int64_t position, int64_t n_tokens, int64_t out_stride, int64_t q_stride, float *scratch) noexcept nogil
