"""The one dispatch pointer and the thread pool; the only door to csrc."""

from libc.stdint cimport int32_t, int64_t, uint8_t, uint16_t, uint32_t, uint64_t

from pagedkv.core.structs cimport pkv_pool


cdef extern from "pkv_kernels.h" nogil:
    const int PKV_PANEL, PKV_BLOCK, PKV_SPLIT
    enum: PKV_W_F32, PKV_W_F16, PKV_W_BF16, PKV_W_Q4_0, PKV_W_Q4_1, PKV_W_Q8_0, PKV_W_Q5_0, PKV_W_Q5_1
    enum: PKV_W_Q2_K, PKV_W_Q3_K, PKV_W_Q4_K, PKV_W_Q5_K, PKV_W_Q6_K, PKV_N_WTYPES
    enum: PKV_KV_F32, PKV_KV_F16, PKV_KV_INT8, PKV_N_KVFORMATS

    ctypedef struct pkv_weight:
        const uint8_t *data
        const uint8_t *scales
        int64_t panel_bytes
        int64_t scale_bytes
        int64_t n_rows
        int64_t n_cols
        int64_t n_panels
        int32_t type

    ctypedef struct pkv_act:
        const float *x
        signed char *q
        signed char *low
        float *scale
        float *sum
        int32_t *isum
        int32_t *half
        int64_t x_stride
        int64_t q_stride
        int64_t b_stride

    int64_t pkv_round_up(int64_t n, int64_t to)
    void pkv_prefetch(const void *p, int64_t n_bytes)
    int64_t pkv_tile_v(int32_t format, int64_t head_dim, int64_t page_tokens)
    int64_t pkv_tile_scales(int32_t format, int64_t head_dim, int64_t page_tokens)
    int64_t pkv_tile_bytes(int32_t format, int64_t head_dim, int64_t page_tokens)

    ctypedef void pkv_gemm_fn(float *out, const pkv_weight *w, const pkv_act *x, int64_t panel0, int64_t n_panels, int64_t token0,
                              int64_t n_tokens, int64_t out_stride, int add, int64_t n_next) noexcept nogil
    ctypedef void pkv_kv_write_fn(uint8_t *tile, const float *k, const float *v, int64_t slot, int64_t head_dim,
                                  int64_t page_tokens) noexcept nogil
    ctypedef void pkv_kv_read_fn(float *k, float *v, const uint8_t *tile, int64_t slot0, int64_t n, int64_t head_dim,
                                 int64_t page_tokens, int64_t out_stride) noexcept nogil
    ctypedef void pkv_qk_fn(float *s, const float *q, const uint8_t *const *tiles, const uint8_t *const *ahead, int64_t n_q,
                            int64_t n_tiles, int64_t head_dim, int64_t page_tokens, int64_t s_stride, int64_t q_stride,
                            float scale) noexcept nogil
    ctypedef void pkv_pv_fn(float *o, const float *p, const uint8_t *const *tiles, const uint8_t *const *ahead, int64_t n_q,
                            int64_t start, int64_t stop, int64_t head_dim, int64_t page_tokens, int64_t o_stride,
                            int64_t p_stride) noexcept nogil

    ctypedef struct pkv_kernels:
        const char *name
        pkv_gemm_fn **gemm
        pkv_gemm_fn **gemm_wide
        void (*quant_i8)(signed char *q, float *scale, float *sum, int32_t *isum, int32_t *half, const float *x,
                         int64_t n) noexcept nogil
        void (*quant_column)(const pkv_act *a, int64_t block, int64_t token0, int64_t n_tokens) noexcept nogil
        void (*quant_i12)(signed char *q, signed char *low, float *scale, int32_t *isum, int32_t *half, const float *x,
                          int64_t n) noexcept nogil
        pkv_kv_write_fn **kv_write
        pkv_kv_read_fn **kv_read
        pkv_qk_fn **qk
        pkv_pv_fn **pv
        float (*softmax)(float *y, const float *x, int64_t n, float m, float inv_t) noexcept nogil
        void (*softcap)(float *x, int64_t n, float cap) noexcept nogil
        void (*merge)(float *o, float *m, float *l, const float *o2, float m2, float l2, int64_t n) noexcept nogil
        void (*rmsnorm)(float *y, const float *x, const float *w, int64_t n, float eps) noexcept nogil
        void (*silu_mul)(float *y, const float *g, const float *u, int64_t n) noexcept nogil
        void (*gelu_mul)(float *y, const float *g, const float *u, int64_t n) noexcept nogil
        void (*rope)(float *x, const float *cs, int64_t half) noexcept nogil
        void (*add)(float *y, const float *x, int64_t n) noexcept nogil
        void (*scale)(float *y, int64_t n, float a) noexcept nogil
        float (*vmax)(const float *x, int64_t n) noexcept nogil
        int64_t (*argmax)(const float *x, int64_t n) noexcept nogil

    ctypedef struct pkv_isa:
        const char *name
        uint64_t required
        const pkv_kernels *kernels


cdef extern from "threads.h" nogil:
    ctypedef void pkv_job_fn(void *arg, int thread, int n_threads) noexcept nogil


cdef const pkv_kernels *kern

cdef const pkv_isa *isa_table(int *n) noexcept nogil
cdef uint64_t cpu_features() noexcept nogil
cdef uint64_t features_of_x86(uint32_t max_leaf, uint32_t leaf1_ecx, uint32_t leaf7_ebx, uint32_t leaf7_ecx, uint32_t leaf7_edx,
                              uint64_t xcr0) noexcept nogil
cdef uint64_t features_of_arm(uint64_t hwcap, uint64_t hwcap2) noexcept nogil
cdef void rope_angles(float *cs, const double *inv_freq, int64_t half, int64_t position, float attn_factor) noexcept nogil
cdef void weight_row(float *y, const pkv_weight *w, int64_t row) noexcept nogil
cdef double log_double(double x) noexcept nogil
cdef float exp_float(float x) noexcept nogil

cdef pkv_pool *pool_new(int n_threads, int n_processors) noexcept nogil
cdef void pool_free(pkv_pool *pool) noexcept nogil
cdef int pool_threads(const pkv_pool *pool) noexcept nogil
cdef int pool_run(pkv_pool *pool, pkv_job_fn *job, void *arg) noexcept nogil
cdef void pool_barrier(pkv_pool *pool) noexcept nogil
cdef int64_t claim(int64_t *counter, int64_t n, int64_t chunk, int64_t *stop) noexcept nogil
cdef uint64_t float_enter() noexcept nogil
cdef void float_leave(uint64_t mode) noexcept nogil


cdef class ThreadPool:
    cdef pkv_pool *ptr
