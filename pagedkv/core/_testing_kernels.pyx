"""Private: every ISA's kernels by name, for tests and micro benchmarks. Nothing else imports this.

Pointers are integer addresses (`array.ctypes.data`) and nothing is checked: shapes and alignments are the caller's to get right.
`isa` is a name of `_kernels.isa_names()`; `n_calls` repeats the call, for timing. Functions keep the GIL.
"""

from libc.stdint cimport int8_t, int32_t, int64_t, uint8_t, uint64_t

from pagedkv.core._kernels cimport *

from pagedkv.core.matmul import PANEL_LAYOUT, WEIGHT_TYPES

KV_FORMATS = ("f32", "f16", "int8")


cdef const pkv_kernels *find(str isa) except NULL:
    cdef int n, i
    cdef const pkv_isa *table = isa_table(&n)
    for i in range(n):
        if table[i].name.decode() == isa and table[i].required & cpu_features() == table[i].required:
            return table[i].kernels
    raise ImportError(f"isa: {isa!r} does not run on this machine")


cdef pkv_weight weight(str type, size_t data, size_t scales, int64_t n_cols, int64_t n_panels):
    cdef pkv_weight w
    block, data_bytes, scale_bytes = PANEL_LAYOUT[type]
    w.type = WEIGHT_TYPES.index(type)
    w.data = <const uint8_t *>data
    w.scales = <const uint8_t *>scales
    w.n_rows, w.n_cols, w.n_panels = 16 * n_panels, n_cols, n_panels
    w.panel_bytes = n_cols // block * data_bytes
    w.scale_bytes = n_cols // block * scale_bytes
    return w


def gemm(str isa, str type, size_t out, size_t data, size_t scales, int64_t n_cols, int64_t w_panels,
         size_t x, int64_t x_stride, size_t q, int64_t q_stride, size_t scale, size_t sum, size_t isum, size_t half, int64_t b_stride,
         int64_t panel0, int64_t n_panels, int64_t token0, int64_t n_tokens, int64_t out_stride, bint add, int64_t n_calls=1, size_t low=0,
         int64_t n_next=0):
    """pkv_kernels.gemm of a weight of `w_panels` panels; quantised types read q, scale, sum, isum and half, float types x.

    `low`: the low digits of int12 activations, then pkv_kernels.gemm_wide."""
    cdef const pkv_kernels *k = find(isa)
    cdef pkv_weight w = weight(type, data, scales, n_cols, w_panels)
    cdef pkv_act a
    cdef int64_t i
    cdef pkv_gemm_fn *run = k.gemm_wide[w.type] if low else k.gemm[w.type]
    a.low = <signed char *>low
    a.x, a.x_stride, a.q, a.q_stride = <const float *>x, x_stride, <signed char *>q, q_stride
    a.scale, a.sum, a.isum, a.half, a.b_stride = <float *>scale, <float *>sum, <int32_t *>isum, <int32_t *>half, b_stride
    for i in range(n_calls):
        run(<float *>out, &w, &a, panel0, n_panels, token0, n_tokens, out_stride, add, n_next)


def quant_i8(str isa, size_t q, size_t scale, size_t sum, size_t isum, size_t half, size_t x, int64_t n, int64_t n_calls=1):
    cdef const pkv_kernels *k = find(isa)
    cdef int64_t i
    for i in range(n_calls):
        k.quant_i8(<signed char *>q, <float *>scale, <float *>sum, <int32_t *>isum, <int32_t *>half, <const float *>x, n)


def quant_column(str isa, size_t q, size_t scale, size_t sum, size_t isum, size_t half, size_t x, int64_t x_stride, int64_t q_stride,
                 int64_t b_stride, int64_t block, int64_t token0, int64_t n_tokens, int64_t n_calls=1):
    cdef const pkv_kernels *k = find(isa)
    cdef pkv_act a
    cdef int64_t i
    a.x, a.x_stride, a.q, a.q_stride, a.b_stride = <const float *>x, x_stride, <signed char *>q, q_stride, b_stride
    a.scale, a.sum, a.isum, a.half = <float *>scale, <float *>sum, <int32_t *>isum, <int32_t *>half
    for i in range(n_calls):
        k.quant_column(&a, block, token0, n_tokens)


def quant_i12(str isa, size_t q, size_t low, size_t scale, size_t isum, size_t half, size_t x, int64_t n, int64_t n_calls=1):
    cdef const pkv_kernels *k = find(isa)
    cdef int64_t i
    for i in range(n_calls):
        k.quant_i12(<signed char *>q, <signed char *>low, <float *>scale, <int32_t *>isum, <int32_t *>half, <const float *>x, n)


def tile_layout(str format, int64_t head_dim, int64_t page_tokens):
    """Byte offset of V, of the scales, and the size of a tile."""
    f = KV_FORMATS.index(format)
    return pkv_tile_v(f, head_dim, page_tokens), pkv_tile_scales(f, head_dim, page_tokens), pkv_tile_bytes(f, head_dim, page_tokens)


def kv_write(str isa, str format, size_t tile, size_t k, size_t v, int64_t slot, int64_t head_dim, int64_t page_tokens,
             int64_t n_calls=1):
    cdef pkv_kv_write_fn *write = find(isa).kv_write[<int>KV_FORMATS.index(format)]
    cdef int64_t i
    for i in range(n_calls):
        write(<uint8_t *>tile, <const float *>k, <const float *>v, slot, head_dim, page_tokens)


def kv_read(str isa, str format, size_t k, size_t v, size_t tile, int64_t slot0, int64_t n, int64_t head_dim, int64_t page_tokens,
            int64_t out_stride, int64_t n_calls=1):
    cdef pkv_kv_read_fn *read = find(isa).kv_read[<int>KV_FORMATS.index(format)]
    cdef int64_t i
    for i in range(n_calls):
        read(<float *>k, <float *>v, <const uint8_t *>tile, slot0, n, head_dim, page_tokens, out_stride)


def qk(str isa, str format, size_t s, size_t q, size_t tiles, int64_t n_q, int64_t n_tiles, int64_t head_dim, int64_t page_tokens,
       int64_t s_stride, int64_t q_stride, float scale, int64_t n_calls=1, size_t ahead=0):
    """`tiles`, `ahead`: addresses of arrays of tile addresses, here and in pv; no `ahead` when 0."""
    cdef pkv_qk_fn *fn = find(isa).qk[<int>KV_FORMATS.index(format)]
    cdef int64_t i
    for i in range(n_calls):
        fn(<float *>s, <const float *>q, <const uint8_t *const *>tiles, <const uint8_t *const *>ahead, n_q, n_tiles, head_dim,
           page_tokens, s_stride, q_stride, scale)


def pv(str isa, str format, size_t o, size_t p, size_t tiles, int64_t n_q, int64_t start, int64_t stop, int64_t head_dim,
       int64_t page_tokens, int64_t o_stride, int64_t p_stride, int64_t n_calls=1, size_t ahead=0):
    cdef pkv_pv_fn *fn = find(isa).pv[<int>KV_FORMATS.index(format)]
    cdef int64_t i
    for i in range(n_calls):
        fn(<float *>o, <const float *>p, <const uint8_t *const *>tiles, <const uint8_t *const *>ahead, n_q, start, stop, head_dim,
           page_tokens, o_stride, p_stride)


def softmax(str isa, size_t y, size_t x, int64_t n, float m, float inv_t, int64_t n_calls=1) -> float:
    cdef const pkv_kernels *k = find(isa)
    cdef float lane_sum = 0
    cdef int64_t i
    for i in range(n_calls):
        lane_sum = k.softmax(<float *>y, <const float *>x, n, m, inv_t)
    return lane_sum


def softcap(str isa, size_t x, int64_t n, float cap, int64_t n_calls=1):
    cdef const pkv_kernels *k = find(isa)
    cdef int64_t i
    for i in range(n_calls):
        k.softcap(<float *>x, n, cap)


def merge(str isa, size_t o, size_t m, size_t l, size_t o2, float m2, float l2, int64_t n, int64_t n_calls=1):
    cdef const pkv_kernels *k = find(isa)
    cdef int64_t i
    for i in range(n_calls):
        k.merge(<float *>o, <float *>m, <float *>l, <const float *>o2, m2, l2, n)


def rmsnorm(str isa, size_t y, size_t x, size_t w, int64_t n, float eps, int64_t n_calls=1):
    cdef const pkv_kernels *k = find(isa)
    cdef int64_t i
    for i in range(n_calls):
        k.rmsnorm(<float *>y, <const float *>x, <const float *>w, n, eps)


def silu_mul(str isa, size_t y, size_t g, size_t u, int64_t n, int64_t n_calls=1):
    cdef const pkv_kernels *k = find(isa)
    cdef int64_t i
    for i in range(n_calls):
        k.silu_mul(<float *>y, <const float *>g, <const float *>u, n)


def gelu_mul(str isa, size_t y, size_t g, size_t u, int64_t n, int64_t n_calls=1):
    cdef const pkv_kernels *k = find(isa)
    cdef int64_t i
    for i in range(n_calls):
        k.gelu_mul(<float *>y, <const float *>g, <const float *>u, n)


def rope(str isa, size_t x, size_t cs, int64_t half, int64_t n_calls=1):
    cdef const pkv_kernels *k = find(isa)
    cdef int64_t i
    for i in range(n_calls):
        k.rope(<float *>x, <const float *>cs, half)


def add(str isa, size_t y, size_t x, int64_t n, int64_t n_calls=1):
    cdef const pkv_kernels *k = find(isa)
    cdef int64_t i
    for i in range(n_calls):
        k.add(<float *>y, <const float *>x, n)


def scale(str isa, size_t y, int64_t n, float a, int64_t n_calls=1):
    cdef const pkv_kernels *k = find(isa)
    cdef int64_t i
    for i in range(n_calls):
        k.scale(<float *>y, n, a)


def vmax(str isa, size_t x, int64_t n, int64_t n_calls=1) -> float:
    cdef const pkv_kernels *k = find(isa)
    cdef float m = 0
    cdef int64_t i
    for i in range(n_calls):
        m = k.vmax(<const float *>x, n)
    return m


def argmax(str isa, size_t x, int64_t n, int64_t n_calls=1) -> int:
    cdef const pkv_kernels *k = find(isa)
    cdef int64_t best = 0
    cdef int64_t i
    for i in range(n_calls):
        best = k.argmax(<const float *>x, n)
    return best


# What is the same code on every machine.

def angles(size_t cs, size_t inv_freq, int64_t half, int64_t position, float attn_factor):
    """pkv_rope_angles"""
    rope_angles(<float *>cs, <const double *>inv_freq, half, position, attn_factor)


def row(str type, size_t y, size_t data, size_t scales, int64_t n_cols, int64_t n_panels, int64_t row):
    """pkv_weight_row"""
    cdef pkv_weight w = weight(type, data, scales, n_cols, n_panels)
    weight_row(<float *>y, &w, row)


def log(double x) -> float:
    """pkv_log"""
    return log_double(x)


def exp(float x) -> float:
    """pkv_exp"""
    return exp_float(x)
