"""Paged attention for Cython: the view of a typed cache, the plan of one call, its two passes."""

from libc.stdint cimport int32_t, int64_t, uint8_t, uint32_t

from pagedkv.core._kernels cimport *
from pagedkv.core.matmul cimport act_buffer

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

# The queries of one sequence: its last n_tokens tokens.
cdef struct attention_span:
    const uint32_t *table
    int64_t row             # of its first query in the call
    int64_t n_tokens
    int64_t position        # of its first query
    int64_t partial         # offset of its split results; -1: finished in the first pass

# Work of the first pass, once per KV head: up to tile_tokens queries of one span over all their splits, or one split for all its members.
cdef struct attention_unit:
    int64_t split           # -1: a tile
    int64_t first           # tile: the span; split: index into members
    int64_t n               # queries or members
    int64_t token           # tile: its first query within the span

cdef struct attention_plan:
    attention_span *spans
    attention_unit *units
    int32_t *members        # spans of the split units
    int32_t *merged         # spans finished in the second pass
    float *partials
    void *block             # behind spans
    void *unit_block        # behind units, members, merged
    int64_t n_spans, n_units, n_merged
    int64_t max_spans, unit_bytes, partial_floats

# One layer's call on all threads of a pool.
cdef struct attention_job:
    const attention_view *v
    attention_plan plan
    const float *q          # [rows][group * n_kv_heads][head_dim]
    float *out
    float *scratch          # scratch_floats() for each thread
    pkv_pool *pool          # NULL: one thread
    int64_t layer
    int64_t counters[2]     # 0 at the start

cdef int64_t scratch_floats(const attention_view *v) noexcept nogil
cdef uint8_t *kv_tile(const attention_view *v, uint32_t page, int64_t layer, int64_t kv_head) noexcept nogil

cdef int plan_spans(attention_plan *p, int64_t n_spans) noexcept nogil
cdef int plan_units(attention_plan *p, const attention_view *v) noexcept nogil
cdef void plan_release(attention_plan *p) noexcept nogil
cdef void attention_worker(void *arg, int thread, int n_threads) noexcept nogil

cdef void attend(float *out, const float *q, const attention_view *v, const attention_plan *p, int64_t layer, int64_t out_stride,
                 int64_t q_stride, act_buffer *quantised, float *scratch, int64_t *counter, int n_threads) noexcept nogil
cdef void attend_merge(float *out, const attention_view *v, const attention_plan *p, int64_t out_stride, act_buffer *quantised,
                       int64_t *counter) noexcept nogil
