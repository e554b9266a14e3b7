"""Packed weights and the loop over their panels."""

from libc.stdint cimport int64_t

from pagedkv.core._kernels cimport *
from pagedkv.core.memory cimport Slab

# Activations of one operation, in memory that grows and is reused.
cdef struct act_buffer:
    pkv_act act
    float *x               # act.x, writable
    void *block            # one allocation behind all of it
    int64_t max_tokens
    int64_t n_cols
    bint wide              # int12 instead of int8

cdef int act_reserve(act_buffer *b, int64_t n_tokens, int64_t n_cols) noexcept nogil
cdef void act_release(act_buffer *b) noexcept nogil
cdef void act_quantise(act_buffer *b, int64_t token, int64_t start, int64_t stop) noexcept nogil
cdef void act_quantise_column(act_buffer *b, int64_t block, int64_t token0, int64_t n_tokens) noexcept nogil
cdef int64_t next_share(int64_t *taken, int64_t n, int64_t step, int thread, int n_threads, int64_t *stop, int64_t *n_next) noexcept nogil
cdef void fetch_run(const pkv_weight *w, int thread, int n_threads) noexcept nogil
cdef pkv_gemm_fn *gemm_of(const act_buffer *b, const pkv_weight *w) noexcept nogil
cdef void matmul(float *out, const pkv_weight *w, const act_buffer *x, int64_t n_tokens, int64_t out_stride, bint add,
                 int64_t *taken, int thread, int n_threads) noexcept nogil


cdef class PackedMatrix:
    cdef pkv_weight w
    cdef Slab slab         # the data and scales of w lie in it
    cdef size_t n_bytes
