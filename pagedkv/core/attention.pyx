"""Paged attention: loops over page pointers around kern.qk, kern.softmax and kern.pv.

The arithmetic of a query row is fixed by absolute positions alone: tokens fall into splits of 256 anchored at position 0; inside a
split come scores, maximum, exponentials, their sum and the weighted sum of V, one chain over tokens in ascending order; splits are
merged in ascending order. Batching, threads and page size choose who computes a row and when, never how.
"""

from libc.math cimport INFINITY
from libc.stdint cimport int64_t, uint8_t, uint32_t
from libc.string cimport memcpy, memset

from pagedkv.core._kernels cimport *

cdef enum:
    ROWS = 24          # query rows (tokens times heads) of one pass, where the head group allows
    SPLIT = 256        # PKV_SPLIT
    MAX_TILES = 16     # pages of one split at the smallest page size


cdef int64_t tile_tokens(const attention_view *v) noexcept nogil:
    """Query tokens one call of attend_tile may take."""
    return max(ROWS // v.group, <int64_t>1)


cdef int64_t rows_of(const attention_view *v) noexcept nogil:
    return tile_tokens(v) * v.group


cdef int64_t scratch_floats(const attention_view *v) noexcept nogil:
    """Floats of scratch attend_tile needs: queries, scores, two outputs, maximum and sum of each row."""
    cdef int64_t rows = rows_of(v)
    return rows * (pkv_round_up(v.head_dim, 16) * 3 + SPLIT + 16) + 64


cdef uint8_t *kv_tile(const attention_view *v, uint32_t page, int64_t layer, int64_t kv_head) noexcept nogil:
    return v.storage + page * v.page_stride + (layer * v.n_kv_heads + kv_head) * v.tile_bytes


cdef int64_t first_visible(const attention_view *v, int64_t position) noexcept nogil:
    return max(position - v.window + 1, <int64_t>0) if v.window > 0 else 0


cdef void split_scores(float *s, float *m, float *l, const attention_view *v, int64_t start, int64_t stop) noexcept nogil:
    """Scores of one row become weights; tokens outside [start, stop) of the split get weight 0."""
    cdef int64_t first = start // 16 * 16
    cdef int64_t last = pkv_round_up(stop, 16)
    cdef int64_t i
    if v.softcap > 0:
        kern.softcap(s + start, stop - start, v.softcap)
    for i in range(first, start):
        s[i] = -INFINITY
    for i in range(stop, last):
        s[i] = -INFINITY
    m[0] = kern.vmax(s + start, stop - start)
    l[0] = kern.softmax(s + first, s + first, last - first, m[0], 1.0)


cdef void attend_tile(float *out, const float *q, const attention_view *v, const uint32_t *page_table, int64_t layer, int64_t kv_head,
                      int64_t position, int64_t n_tokens, int64_t out_stride, int64_t q_stride, float *scratch) noexcept nogil:
    """All query heads of one KV head for n_tokens <= tile_tokens consecutive tokens, the first at `position`.

    out, q      float32, row t at t * stride: [group, head_dim] of this KV head
    page_table  pages of the sequence; tokens up to position + n_tokens - 1 are written
    scratch     scratch_floats(v) floats
    """
    cdef int64_t group = v.group
    cdef int64_t dim = v.head_dim
    cdef int64_t dim16 = pkv_round_up(dim, 16)
    cdef int64_t rows = n_tokens * group
    cdef int64_t page_tokens = v.page_tokens
    cdef float *queries = scratch
    cdef float *s = queries + rows_of(v) * dim16
    cdef float *o = s + rows_of(v) * SPLIT
    cdef float *o2 = o + rows_of(v) * dim16
    cdef float *m = o2 + rows_of(v) * dim16
    cdef float *l = m + rows_of(v)
    cdef float m2, l2
    cdef const uint8_t *tiles[MAX_TILES]
    cdef int64_t t, j, i, base, n_tiles, start, stop, common_start, common_stop
    cdef int64_t last = position + n_tokens - 1
    cdef float *target
    for t in range(n_tokens):
        for j in range(group):
            memcpy(queries + (t * group + j) * dim, q + t * q_stride + j * dim, dim * sizeof(float))
    for j in range(rows):
        l[j] = 0
    base = first_visible(v, position) // SPLIT * SPLIT
    while base <= last:
        n_tiles = (min(last + 1 - base, <int64_t>SPLIT) + page_tokens - 1) // page_tokens
        for i in range(n_tiles):
            tiles[i] = kv_tile(v, page_table[base // page_tokens + i], layer, kv_head)
        i = max(first_visible(v, position) - base, <int64_t>0) // page_tokens  # whole pages that no row of the tile sees
        kern.qk[v.format](s + i * page_tokens, queries, tiles + i, rows, n_tiles - i, dim, page_tokens, SPLIT, dim, v.scale)
        # V of the tokens every row sees is read once for all rows; what a row sees before and after goes row by row, in order.
        common_start = max(first_visible(v, last) - base, <int64_t>0)
        common_stop = min(position + 1 - base, <int64_t>SPLIT)
        if common_stop <= common_start:
            common_start = common_stop = 0
        target = o if base == first_visible(v, position) // SPLIT * SPLIT else o2
        memset(target, 0, rows * dim16 * sizeof(float))
        for t in range(n_tokens):
            start = max(first_visible(v, position + t) - base, <int64_t>0)
            stop = min(position + t + 1 - base, <int64_t>SPLIT)
            if stop <= start:
                continue
            for j in range(t * group, (t + 1) * group):
                split_scores(s + j * SPLIT, m + rows_of(v) * 2 + j, m + rows_of(v) * 3 + j, v, start, stop)
            if common_start < common_stop and start < common_start:
                kern.pv[v.format](target + t * group * dim16, s + t * group * SPLIT, tiles, group, start, common_start, dim, page_tokens,
                                  dim16, SPLIT)
        if common_start < common_stop:
            kern.pv[v.format](target, s, tiles, rows, common_start, common_stop, dim, page_tokens, dim16, SPLIT)
        for t in range(n_tokens):
            start = max(first_visible(v, position + t) - base, <int64_t>0)
            stop = min(position + t + 1 - base, <int64_t>SPLIT)
            if stop <= start:
                continue
            if common_start < common_stop:
                start = common_stop
            if start < stop:
                kern.pv[v.format](target + t * group * dim16, s + t * group * SPLIT, tiles, group, start, stop, dim, page_tokens,
                                  dim16, SPLIT)
            for j in range(t * group, (t + 1) * group):
                m2, l2 = m[rows_of(v) * 2 + j], m[rows_of(v) * 3 + j]
                if l[j] == 0:
                    if target != o:
                        memcpy(o + j * dim16, target + j * dim16, dim16 * sizeof(float))
                    m[j], l[j] = m2, l2
                else:
                    kern.merge(o + j * dim16, m + j, l + j, target + j * dim16, m2, l2, dim16)
        base += SPLIT
    for t in range(n_tokens):
        for j in range(group):
            i = t * group + j
            kern.scale(o + i * dim16, dim16, <float>1.0 / l[i])
            memcpy(out + t * out_stride + j * dim, o + i * dim16, dim * sizeof(float))
