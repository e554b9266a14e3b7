"""Typed K/V pages of a caller's own: their size, writing to them, attention over them, without Python objects.

What PagedKVCache does with an arena of its own, for programs that bring pages and page tables themselves; same layout, same bits.
"""

from libc.math cimport isfinite
from libc.stdint cimport int64_t, uint8_t, uint32_t, uint64_t, uintptr_t
from libc.string cimport memset

from pagedkv.core._kernels cimport *
from pagedkv.core.attention cimport *
from pagedkv.core.memory cimport pkv_alloc, pkv_release
from pagedkv.core.structs cimport *


cdef extern from "<sys/sysinfo.h>" nogil:
    int get_nprocs()

cdef extern from *:
    """
    _Static_assert((int)PKV_FORMAT_F32 == (int)PKV_KV_F32 && (int)PKV_FORMAT_F16 == (int)PKV_KV_F16
                       && (int)PKV_FORMAT_INT8 == (int)PKV_KV_INT8,
                   "formats of pagedkv.h are those of the kernels");
    """


cdef bint is_sound(const pkv_kv_pages *p) noexcept nogil:
    """Whether the shape is in range, the storage where kernels may reach it, and pages are as far apart as they are large."""
    return p != NULL and has_shape(p) and p.storage != NULL and <uintptr_t>p.storage % 64 == 0 and p.page_stride % 64 == 0 \
        and p.page_stride >= page_bytes(p)


cdef bint has_shape(const pkv_kv_pages *p) noexcept nogil:
    return (0 < p.n_layers < 1 << 16 and 0 < p.n_kv_heads < 1 << 16 and 0 < p.head_dim < 1 << 13 and 0 <= p.format < PKV_N_KVFORMATS
            and 16 <= p.page_tokens <= PKV_SPLIT and p.page_tokens & (p.page_tokens - 1) == 0)


cdef int64_t most_tokens(const pkv_kv_pages *p) noexcept nogil:
    """Tokens of a table as long as there can be pages."""
    return PKV_MAX_PAGES * p.page_tokens


cdef int64_t most_rows(int64_t n_heads, const pkv_kv_pages *p) noexcept nogil:
    """Tokens of an array [n][n_heads][head_dim] of float32 that memory can hold."""
    return (<int64_t>1 << 60) // (n_heads * p.head_dim)


cdef bint is_scale(float x) noexcept nogil:
    """0, or a normal number."""
    return x == 0 or (isfinite(x) and (x >= <float>1.17549435e-38 or x <= -<float>1.17549435e-38))


cdef bint is_softcap(float x) noexcept nogil:
    return x == 0 or PKV_MIN_SOFTCAP <= x <= PKV_MAX_SOFTCAP


cdef int64_t page_bytes(const pkv_kv_pages *p) noexcept nogil:
    return p.n_layers * p.n_kv_heads * pkv_tile_bytes(<int>p.format, p.head_dim, p.page_tokens)


cdef attention_view view_of(const pkv_kv_pages *p) noexcept nogil:
    cdef attention_view v
    memset(&v, 0, sizeof(v))
    v.storage, v.page_stride, v.format = p.storage, p.page_stride, <int>p.format
    v.n_kv_heads, v.head_dim, v.page_tokens = p.n_kv_heads, p.head_dim, p.page_tokens
    v.tile_bytes = pkv_tile_bytes(v.format, v.head_dim, v.page_tokens)
    return v


cdef int64_t pkv_kv_page_bytes(const pkv_kv_pages *p) noexcept nogil:
    """Bytes of a page of this shape, storage and page_stride not looked at; BAD_INPUT."""
    return page_bytes(p) if p != NULL and has_shape(p) else -PKV_BAD_INPUT


cdef int64_t pkv_kv_write(const pkv_kv_pages *p, const uint32_t *page_table, int64_t layer, int64_t start, int64_t n, const float *k,
                          const float *v) noexcept nogil:
    """Store K and V [n, n_kv_heads, head_dim] of tokens [start, start + n) of one layer; 0.

    BAD_INPUT with nothing written for what is out of range, and for inf or NaN under int8. The pages must be the caller's to write.
    """
    cdef attention_view view
    cdef int64_t i, h, t
    cdef uint64_t mode
    if not is_sound(p) or not 0 <= layer < p.n_layers or not 0 <= n <= most_rows(p.n_kv_heads, p) or not 0 <= start <= most_tokens(p) - n:
        return -PKV_BAD_INPUT
    if n and (page_table == NULL or k == NULL or v == NULL):
        return -PKV_BAD_INPUT
    if p.format == PKV_KV_INT8:
        for i in range(n * p.n_kv_heads * p.head_dim):
            if not (isfinite(k[i]) and isfinite(v[i])):
                return -PKV_BAD_INPUT
    view = view_of(p)
    mode = float_enter()
    for i in range(n):
        t = start + i
        for h in range(p.n_kv_heads):
            kern.kv_write[view.format](kv_tile(&view, page_table[t // p.page_tokens], layer, h), k + (i * p.n_kv_heads + h) * p.head_dim,
                                       v + (i * p.n_kv_heads + h) * p.head_dim, t % p.page_tokens, p.head_dim, p.page_tokens)
    float_leave(mode)
    return 0


cdef int64_t pkv_kv_gather(const pkv_kv_pages *p, const uint32_t *page_table, int64_t layer, int64_t start, int64_t n, float *k,
                           float *v) noexcept nogil:
    """K and V [n, n_kv_heads, head_dim] of tokens [start, start + n) of one layer, as the format keeps them; 0, or BAD_INPUT with
    nothing written.
    """
    cdef attention_view view
    cdef int64_t width, t, h, slot, at_once
    cdef int64_t i = 0
    cdef uint64_t mode
    if not is_sound(p) or not 0 <= layer < p.n_layers or not 0 <= n <= most_rows(p.n_kv_heads, p) or not 0 <= start <= most_tokens(p) - n:
        return -PKV_BAD_INPUT
    if n and (page_table == NULL or k == NULL or v == NULL):
        return -PKV_BAD_INPUT
    view = view_of(p)
    width = p.n_kv_heads * p.head_dim
    mode = float_enter()
    while i < n:
        t = start + i
        slot = t % p.page_tokens
        at_once = min(n - i, p.page_tokens - slot)
        for h in range(p.n_kv_heads):
            kern.kv_read[view.format](k + i * width + h * p.head_dim, v + i * width + h * p.head_dim,
                                      kv_tile(&view, page_table[t // p.page_tokens], layer, h), slot, at_once, p.head_dim, p.page_tokens,
                                      width)
        i += at_once
    float_leave(mode)
    return 0


cdef int64_t pkv_kv_attend(const pkv_kv_pages *p, const uint32_t *page_table, int64_t layer, int64_t n_tokens, int64_t n_queries,
                           const pkv_attention *how, const float *q, float *out) noexcept nogil:
    """Causal attention of the last n_queries of n_tokens tokens over their pages: out, q [n_queries, n_heads, head_dim]; 0.

    Runs on the calling thread; the bits of a row depend on its position and pages alone. BAD_INPUT; POOL_EXHAUSTED when memory for
    scratch is refused.
    """
    return attend_with(NULL, p, page_table, layer, n_tokens, n_queries, how, q, out)


cdef int64_t pkv_kv_attend_on(pkv_pool *pool, const pkv_kv_pages *p, const uint32_t *page_table, int64_t layer, int64_t n_tokens,
                              int64_t n_queries, const pkv_attention *how, const float *q, float *out) noexcept nogil:
    """pkv_kv_attend on the threads of a pool, with the same bits; POOL_EXHAUSTED also when a thread cannot be started."""
    return attend_with(pool, p, page_table, layer, n_tokens, n_queries, how, q, out) if pool != NULL else -PKV_TAMPER


cdef int64_t attend_with(pkv_pool *pool, const pkv_kv_pages *p, const uint32_t *page_table, int64_t layer, int64_t n_tokens,
                         int64_t n_queries, const pkv_attention *how, const float *q, float *out) noexcept nogil:
    cdef attention_view view
    cdef attention_job job
    cdef int64_t n_threads = pool_threads(pool) if pool != NULL else 1
    cdef int64_t status = -PKV_POOL_EXHAUSTED
    cdef uint64_t mode
    if (not is_sound(p) or how == NULL or not 0 <= layer < p.n_layers or not 0 <= n_queries <= n_tokens <= most_tokens(p)
            or (n_queries and (page_table == NULL or q == NULL or out == NULL)) or not 0 < how.n_heads < 1 << 16
            or how.n_heads % p.n_kv_heads or n_queries > most_rows(how.n_heads, p) or how.window < 0 or not is_scale(how.scale)
            or not is_softcap(how.softcap)):
        return -PKV_BAD_INPUT
    view = view_of(p)
    view.group = how.n_heads // p.n_kv_heads
    view.window, view.scale, view.softcap = how.window, how.scale, how.softcap
    memset(&job, 0, sizeof(job))
    job.v, job.layer, job.q, job.out, job.pool = &view, layer, q, out, pool
    job.scratch = <float *>pkv_alloc(n_threads * scratch_floats(&view) * sizeof(float))
    if job.scratch != NULL and plan_spans(&job.plan, 1) == 0:
        job.plan.spans[0] = attention_span(page_table, 0, n_queries, n_tokens - n_queries, -1)
        if plan_units(&job.plan, &view) == 0:
            if pool != NULL:
                status = 0 if pool_run(pool, attention_worker, &job) == 0 else -PKV_POOL_EXHAUSTED
            else:
                mode = float_enter()
                attention_worker(&job, 0, 1)
                float_leave(mode)
                status = 0
    plan_release(&job.plan)
    pkv_release(job.scratch)
    return status


cdef int64_t pkv_pool_new(pkv_pool **out, int64_t n_threads) noexcept nogil:
    """A pool of n_threads threads, the caller's included, started at the first call that uses it. BAD_INPUT outside [1, 1024],
    POOL_EXHAUSTED when memory is refused; *out is NULL then.
    """
    if out == NULL:
        return -PKV_BAD_INPUT
    out[0] = NULL
    if not 1 <= n_threads <= 1024:
        return -PKV_BAD_INPUT
    out[0] = pool_new(<int>n_threads, get_nprocs())
    return 0 if out[0] != NULL else -PKV_POOL_EXHAUSTED


cdef int64_t pkv_pool_destroy(pkv_pool *pool) noexcept nogil:
    """End the threads. No call may be running on the pool. TAMPER for NULL."""
    if pool == NULL:
        return -PKV_TAMPER
    pool_free(pool)
    return 0
