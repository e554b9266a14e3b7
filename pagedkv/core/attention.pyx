"""Paged attention: loops over page pointers around kern.qk, kern.softmax and kern.pv.

The arithmetic of a query row is fixed by absolute positions alone: tokens fall into splits of 256 anchored at position 0; inside a
split come scores, maximum, exponentials, their sum and the weighted sum of V, one chain over tokens in ascending order; splits are
merged in ascending order. Batching, threads, page size and shared prefixes choose who computes a row and when, never how.

A call is planned once and then runs in two passes with a barrier between. Chunks of a prompt go tile by tile, all splits of a few
queries at once. A single query over several splits goes split by split instead, so that threads share a long context, and a split whose
pages several sequences hold is read once for all of them.
"""

from libc.math cimport INFINITY
from libc.stdint cimport int32_t, int64_t, uint8_t, uint32_t
from libc.string cimport memcmp, memcpy, memset

from pagedkv.core._kernels cimport *
from pagedkv.core.matmul cimport act_buffer, act_quantise
from pagedkv.core.memory cimport pkv_alloc, pkv_release

cdef enum:
    ROWS = 24          # query rows (tokens times heads) of one pass, where the head group allows
    SPLIT = 256        # PKV_SPLIT
    MAX_TILES = 16     # pages of one split at the smallest page size


# --- rows --------------------------------------------------------------------------------------------------------------

cdef int64_t tile_tokens(const attention_view *v) noexcept nogil:
    """Queries of one pass."""
    return max(ROWS // v.group, <int64_t>1)


cdef int64_t rows_of(const attention_view *v) noexcept nogil:
    return tile_tokens(v) * v.group


cdef int64_t scratch_floats(const attention_view *v) noexcept nogil:
    """Floats of scratch each thread needs: queries, scores, two outputs, maxima and sums of the rows of a pass."""
    return rows_of(v) * (pkv_round_up(v.head_dim, 16) * 3 + SPLIT + 4) + 16


cdef uint8_t *kv_tile(const attention_view *v, uint32_t page, int64_t layer, int64_t kv_head) noexcept nogil:
    return v.storage + page * v.page_stride + (layer * v.n_kv_heads + kv_head) * v.tile_bytes


cdef int64_t first_visible(const attention_view *v, int64_t position) noexcept nogil:
    return max(position - v.window + 1, <int64_t>0) if v.window > 0 else 0


cdef int64_t first_split(const attention_view *v, int64_t position) noexcept nogil:
    return first_visible(v, position) // SPLIT


cdef void find_tiles(const uint8_t **tiles, const attention_view *v, const uint32_t *table, int64_t base, int64_t n_tokens, int64_t layer,
                     int64_t kv_head) noexcept nogil:
    cdef int64_t i
    for i in range((n_tokens + v.page_tokens - 1) // v.page_tokens):
        tiles[i] = kv_tile(v, table[base // v.page_tokens + i], layer, kv_head)


cdef void scores(float *s, const float *queries, const attention_view *v, const uint8_t **tiles, const uint8_t **ahead, int64_t rows,
                 int64_t start, int64_t stop) noexcept nogil:
    """Raw scores of the tokens [start, stop) of a split, and of whatever else lies on their pages."""
    cdef int64_t first = start // v.page_tokens
    kern.qk[v.format](s + first * v.page_tokens, queries, tiles + first, ahead + first if ahead != NULL else NULL, rows,
                      (stop + v.page_tokens - 1) // v.page_tokens - first, v.head_dim, v.page_tokens, SPLIT, v.head_dim, v.scale)


cdef void weigh(float *s, float *m, float *l, const attention_view *v, int64_t start, int64_t stop) noexcept nogil:
    """Scores of one row become weights in [start, stop), with their maximum and sum."""
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


cdef void finish(float *out, float *o, float l, const attention_view *v) noexcept nogil:
    kern.scale(o, pkv_round_up(v.head_dim, 16), <float>1.0 / l)
    memcpy(out, o, v.head_dim * sizeof(float))


cdef void attend_tile(float *out, const float *q, const attention_view *v, const uint32_t *table, int64_t layer, int64_t kv_head,
                      int64_t position, int64_t n_tokens, int64_t out_stride, int64_t q_stride, const uint8_t **ahead,
                      float *scratch) noexcept nogil:
    """All query heads of one KV head for n_tokens consecutive tokens, the first at `position`; out and q point at the first one's."""
    cdef int64_t group = v.group
    cdef int64_t dim = v.head_dim
    cdef int64_t dim16 = pkv_round_up(dim, 16)
    cdef int64_t rows = n_tokens * group
    cdef float *queries = scratch
    cdef float *s = queries + rows_of(v) * dim16
    cdef float *o = s + rows_of(v) * SPLIT
    cdef float *o2 = o + rows_of(v) * dim16
    cdef float *m = o2 + rows_of(v) * dim16
    cdef float *l = m + rows_of(v)
    cdef float *m2 = l + rows_of(v)
    cdef float *l2 = m2 + rows_of(v)
    cdef float *target = o
    cdef const uint8_t *tiles[MAX_TILES]
    cdef int64_t t, j, start, stop, common_start, common_stop
    cdef int64_t last = position + n_tokens - 1
    cdef int64_t base = first_split(v, position) * SPLIT
    for t in range(n_tokens):
        memcpy(queries + t * group * dim, q + t * q_stride, group * dim * sizeof(float))
    for j in range(rows):
        l[j] = 0
    while base <= last:
        stop = min(last + 1 - base, <int64_t>SPLIT)
        find_tiles(tiles, v, table, base, stop, layer, kv_head)
        scores(s, queries, v, tiles, ahead, rows, max(first_visible(v, position) - base, <int64_t>0), stop)
        # V of the tokens every row sees is read once for all rows; what a row sees before and after goes row by row, in order.
        common_start = max(first_visible(v, last) - base, <int64_t>0)
        common_stop = min(position + 1 - base, <int64_t>SPLIT)
        if common_stop <= common_start:
            common_start = common_stop = 0
        memset(target, 0, rows * dim16 * sizeof(float))
        for t in range(n_tokens):
            start = max(first_visible(v, position + t) - base, <int64_t>0)
            stop = min(position + t + 1 - base, <int64_t>SPLIT)
            if start < stop:
                for j in range(t * group, (t + 1) * group):
                    weigh(s + j * SPLIT, m2 + j, l2 + j, v, start, stop)
                if start < common_start:
                    kern.pv[v.format](target + t * group * dim16, s + t * group * SPLIT, tiles, NULL, group, start, common_start, dim,
                                      v.page_tokens, dim16, SPLIT)
        if common_start < common_stop:
            kern.pv[v.format](target, s, tiles, ahead, rows, common_start, common_stop, dim, v.page_tokens, dim16, SPLIT)
        for t in range(n_tokens):
            start = max(first_visible(v, position + t) - base, <int64_t>0)
            stop = min(position + t + 1 - base, <int64_t>SPLIT)
            if start >= stop:
                continue
            start = common_stop if common_start < common_stop else start
            if start < stop:
                kern.pv[v.format](target + t * group * dim16, s + t * group * SPLIT, tiles, NULL, group, start, stop, dim, v.page_tokens,
                                  dim16, SPLIT)
            for j in range(t * group, (t + 1) * group):
                if l[j] != 0:
                    kern.merge(o + j * dim16, m + j, l + j, target + j * dim16, m2[j], l2[j], dim16)
                else:
                    if target != o:
                        memcpy(o + j * dim16, target + j * dim16, dim16 * sizeof(float))
                    m[j], l[j] = m2[j], l2[j]
        target = o2
        base += SPLIT
    for t in range(n_tokens):
        for j in range(group):
            finish(out + t * out_stride + j * dim, o + (t * group + j) * dim16, l[t * group + j], v)


# --- splits of single queries ------------------------------------------------------------------------------------------

cdef int64_t partial_stride(const attention_view *v) noexcept nogil:
    """Floats of one head's result on one split: output, maximum, sum."""
    return pkv_round_up(v.head_dim, 16) + 16


cdef float *partial(const attention_plan *p, const attention_view *v, const attention_span *s, int64_t split, int64_t kv_head) noexcept nogil:
    return p.partials + s.partial + ((split - first_split(v, s.position)) * v.n_kv_heads + kv_head) * v.group * partial_stride(v)


cdef void attend_split(const float *q, const attention_view *v, const attention_plan *p, const attention_unit *u, int64_t layer,
                       int64_t kv_head, int64_t q_stride, const uint8_t **ahead, float *scratch) noexcept nogil:
    """One split of one KV head for the queries of all members, whose pages there are the same."""
    cdef int64_t group = v.group
    cdef int64_t dim = v.head_dim
    cdef int64_t dim16 = pkv_round_up(dim, 16)
    cdef float *queries = scratch
    cdef float *s = queries + rows_of(v) * dim16
    cdef float *o = s + rows_of(v) * SPLIT
    cdef float *m = o + 2 * rows_of(v) * dim16
    cdef float *l = m + rows_of(v)
    cdef float *result
    cdef const uint8_t *tiles[MAX_TILES]
    cdef const attention_span *span = &p.spans[p.members[u.first]]
    cdef int64_t base = u.split * SPLIT
    cdef int64_t start = max(first_visible(v, span.position) - base, <int64_t>0)
    cdef int64_t stop = min(span.position + 1 - base, <int64_t>SPLIT)
    cdef int64_t done = 0
    cdef int64_t n, i, j
    find_tiles(tiles, v, span.table, base, stop, layer, kv_head)
    while done < u.n:
        n = min(tile_tokens(v), u.n - done)
        for i in range(n):
            span = &p.spans[p.members[u.first + done + i]]
            memcpy(queries + i * group * dim, q + span.row * q_stride + kv_head * group * dim, group * dim * sizeof(float))
        scores(s, queries, v, tiles, ahead, n * group, start, stop)
        memset(o, 0, n * group * dim16 * sizeof(float))
        for j in range(n * group):
            weigh(s + j * SPLIT, m + j, l + j, v, start, stop)
        kern.pv[v.format](o, s, tiles, ahead, n * group, start, stop, dim, v.page_tokens, dim16, SPLIT)
        ahead = NULL
        for i in range(n):
            result = partial(p, v, &p.spans[p.members[u.first + done + i]], u.split, kv_head)
            for j in range(i * group, (i + 1) * group):
                memcpy(result, o + j * dim16, dim16 * sizeof(float))
                result[dim16] = m[j]
                result[dim16 + 1] = l[j]
                result += partial_stride(v)
        done += n


# --- the plan ----------------------------------------------------------------------------------------------------------

cdef int plan_spans(attention_plan *p, int64_t n_spans) noexcept nogil:
    """Room for n_spans spans, to be filled by the caller; 0, or -1 when memory is refused."""
    if n_spans > p.max_spans:
        pkv_release(p.block)
        p.max_spans = 0
        p.block = pkv_alloc(n_spans * sizeof(attention_span))
        if p.block == NULL:
            return -1
        p.max_spans = n_spans
        p.spans = <attention_span *>p.block
    p.n_spans = n_spans
    return 0


cdef bint is_split(const attention_view *v, const attention_span *s) noexcept nogil:
    return s.n_tokens == 1 and s.position // SPLIT > first_split(v, s.position)


cdef bint share(const attention_view *v, const attention_span *a, const attention_span *b, int64_t split) noexcept nogil:
    """Whether both see all of this split, on the same pages."""
    cdef int64_t pages = SPLIT // v.page_tokens
    cdef int64_t base = split * SPLIT
    return (first_visible(v, a.position) <= base and first_visible(v, b.position) <= base
            and a.position + 1 >= base + SPLIT and b.position + 1 >= base + SPLIT
            and memcmp(a.table + split * pages, b.table + split * pages, pages * sizeof(uint32_t)) == 0)


cdef int plan_units(attention_plan *p, const attention_view *v) noexcept nogil:
    """Cut the spans into units, longest first; 0, or -1 when memory is refused. Page tables must stay as they are until the passes ran."""
    cdef int64_t tile = tile_tokens(v)
    cdef int64_t n_units = 0
    cdef int64_t n_partials = 0
    cdef int64_t n_splits = 0
    cdef int64_t i, k, split, n, needed, first
    cdef attention_span *s
    cdef attention_unit *u
    for i in range(p.n_spans):
        s = &p.spans[i]
        s.partial = -1
        if is_split(v, s):
            n = s.position // SPLIT - first_split(v, s.position) + 1
            s.partial = n_partials
            n_partials += n * v.n_kv_heads * v.group * partial_stride(v)
            n_splits = max(n_splits, s.position // SPLIT + 1)
            n_units += n
        else:
            n_units += (s.n_tokens + tile - 1) // tile
    needed = n_units * (sizeof(attention_unit) + sizeof(int32_t)) + p.n_spans * sizeof(int32_t)
    if needed > p.unit_bytes:
        pkv_release(p.unit_block)
        p.unit_bytes = 0
        p.unit_block = pkv_alloc(2 * needed)
        if p.unit_block == NULL:
            return -1
        p.unit_bytes = 2 * needed
    if n_partials > p.partial_floats:
        pkv_release(p.partials)
        p.partial_floats = 0
        p.partials = <float *>pkv_alloc(2 * n_partials * sizeof(float))
        if p.partials == NULL:
            return -1
        p.partial_floats = 2 * n_partials
    p.units = <attention_unit *>p.unit_block
    p.members = <int32_t *>(p.units + n_units)
    p.merged = p.members + n_units
    p.n_units = p.n_merged = 0
    for i in range(p.n_spans):
        s = &p.spans[i]
        if s.partial >= 0:
            p.merged[p.n_merged] = <int32_t>i
            p.n_merged += 1
            continue
        n = (s.n_tokens + tile - 1) // tile
        while n > 0:  # the last tokens of a prompt see most
            n -= 1
            p.units[p.n_units] = attention_unit(-1, i, min(tile, s.n_tokens - n * tile), n * tile)
            p.n_units += 1
    n = 0
    for split in range(n_splits):
        first = p.n_units  # units of this split, each named by its first member
        for i in range(p.n_merged):
            s = &p.spans[p.merged[i]]
            if not first_split(v, s.position) <= split <= s.position // SPLIT:
                continue
            k = first
            while k < p.n_units and not share(v, &p.spans[p.units[k].token], s, split):
                k += 1
            if k == p.n_units:
                p.units[k] = attention_unit(split, 0, 0, p.merged[i])
                p.n_units += 1
            p.units[k].n += 1
        for k in range(first, p.n_units):
            p.units[k].first = n
            n += p.units[k].n
            p.units[k].n = 0
        for i in range(p.n_merged):
            s = &p.spans[p.merged[i]]
            if not first_split(v, s.position) <= split <= s.position // SPLIT:
                continue
            k = first
            while p.units[k].token != p.merged[i] and not share(v, &p.spans[p.units[k].token], s, split):
                k += 1
            u = &p.units[k]
            p.members[u.first + u.n] = p.merged[i]
            u.n += 1
    return 0


cdef void plan_release(attention_plan *p) noexcept nogil:
    pkv_release(p.block)
    pkv_release(p.unit_block)
    pkv_release(p.partials)
    memset(p, 0, sizeof(attention_plan))


# --- the passes --------------------------------------------------------------------------------------------------------

cdef const uint8_t **tiles_of_unit(const uint8_t **tiles, const attention_view *v, const attention_plan *p, int64_t layer,
                                   int64_t i) noexcept nogil:
    """The MAX_TILES tiles, the last one repeated, of head i % n_kv_heads in the first split of unit i // n_kv_heads; NULL past the end."""
    if i >= p.n_units * v.n_kv_heads:
        return NULL
    cdef const attention_unit *u = &p.units[i // v.n_kv_heads]
    cdef const attention_span *s = &p.spans[u.first if u.split < 0 else p.members[u.first]]
    cdef int64_t base = (first_split(v, s.position + u.token) if u.split < 0 else u.split) * SPLIT
    cdef int64_t last = s.position + (u.token + u.n - 1 if u.split < 0 else 0)
    cdef int64_t n_tokens = min(last + 1 - base, <int64_t>SPLIT)
    cdef int64_t n = (n_tokens + v.page_tokens - 1) // v.page_tokens
    find_tiles(tiles, v, s.table, base, n_tokens, layer, i % v.n_kv_heads)
    while n < MAX_TILES:
        tiles[n] = tiles[n - 1]
        n += 1
    return tiles


cdef void attend(float *out, const float *q, const attention_view *v, const attention_plan *p, int64_t layer, int64_t out_stride,
                 int64_t q_stride, act_buffer *quantised, float *scratch, int64_t *counter, int n_threads) noexcept nogil:
    """First pass, shared by the n_threads threads that call it with one zeroed counter.

    A single query reads more than it computes, so while a unit is worked on, the pages of the one this thread claims next (if all are as
    fast as it is) are prefetched.

    out, q       row r at r * stride: [n_kv_heads * group, head_dim]
    quantised    NULL, or the buffer `out` lies in: a finished slice of heads, a multiple of 32 wide, is quantised at once
    scratch      scratch_floats(v) floats of this thread's own
    """
    cdef int64_t width = v.group * v.head_dim
    cdef int64_t n_units = p.n_units * v.n_kv_heads
    cdef int64_t stop = 0
    cdef int64_t i = claim(counter, n_units, 1, &stop)
    cdef int64_t kv_head, row, t
    cdef const attention_unit *u
    cdef const attention_span *s
    cdef const uint8_t *tiles[MAX_TILES]
    cdef const uint8_t **ahead
    while i < n_units:
        u = &p.units[i // v.n_kv_heads]
        kv_head = i % v.n_kv_heads
        ahead = tiles_of_unit(tiles, v, p, layer, i + n_threads) if u.split >= 0 or u.n == 1 else NULL
        if u.split >= 0:
            attend_split(q, v, p, u, layer, kv_head, q_stride, ahead, scratch)
        else:
            s = &p.spans[u.first]
            row = s.row + u.token
            attend_tile(out + row * out_stride + kv_head * width, q + row * q_stride + kv_head * width, v, s.table, layer, kv_head,
                        s.position + u.token, u.n, out_stride, q_stride, ahead, scratch)
            if quantised != NULL:
                for t in range(row, row + u.n):
                    act_quantise(quantised, t, kv_head * width, (kv_head + 1) * width)
        i = claim(counter, n_units, 1, &stop)


cdef void attend_merge(float *out, const attention_view *v, const attention_plan *p, int64_t out_stride, act_buffer *quantised,
                       int64_t *counter) noexcept nogil:
    """Second pass, after a barrier, when p.n_merged > 0: splits merged in ascending order."""
    cdef int64_t width = v.group * v.head_dim
    cdef int64_t dim16 = pkv_round_up(v.head_dim, 16)
    cdef int64_t n_units = p.n_merged * v.n_kv_heads
    cdef int64_t stop = 0
    cdef int64_t i = claim(counter, n_units, 1, &stop)
    cdef int64_t kv_head, split, j
    cdef const attention_span *s
    cdef float *o
    cdef float *later
    while i < n_units:
        s = &p.spans[p.merged[i // v.n_kv_heads]]
        kv_head = i % v.n_kv_heads
        for j in range(v.group):
            o = partial(p, v, s, first_split(v, s.position), kv_head) + j * partial_stride(v)
            for split in range(first_split(v, s.position) + 1, s.position // SPLIT + 1):
                later = partial(p, v, s, split, kv_head) + j * partial_stride(v)
                kern.merge(o, o + dim16, o + dim16 + 1, later, later[dim16], later[dim16 + 1], dim16)
            finish(out + s.row * out_stride + kv_head * width + j * v.head_dim, o, o[dim16 + 1], v)
        if quantised != NULL:
            act_quantise(quantised, s.row, kv_head * width, (kv_head + 1) * width)
        i = claim(counter, n_units, 1, &stop)


cdef void attention_worker(void *arg, int thread, int n_threads) noexcept nogil:
    """Both passes of an attention_job, the plan made."""
    cdef attention_job *job = <attention_job *>arg
    cdef int64_t stride = job.v.n_kv_heads * job.v.group * job.v.head_dim
    attend(job.out, job.q, job.v, &job.plan, job.layer, stride, stride, NULL, job.scratch + thread * scratch_floats(job.v),
           &job.counters[0], n_threads)
    if job.plan.n_merged:
        if n_threads > 1:
            pool_barrier(job.pool)
        attend_merge(job.out, job.v, &job.plan, stride, NULL, &job.counters[1])
