"""The operations of a transformer step over the rows of a batch. All threads call each; every one claims shares until nothing is left.

A row is one token of one sequence. Its bits depend neither on the other rows nor on who computes it.
"""

from libc.stdint cimport int64_t
from libc.string cimport memcpy, memset

from pagedkv.core._kernels cimport *
from pagedkv.core.attention cimport attention_span, attention_view, kv_tile
from pagedkv.core.matmul cimport act_buffer, act_quantise, act_quantise_column, gemm_of, next_share


cdef int64_t row_chunk(const batch *b, int n_threads) noexcept nogil:
    return max(b.n_rows // (4 * n_threads), <int64_t>1)


cdef attention_span *span_of_row(const batch *b, int64_t row) noexcept nogil:
    """The sequence a row belongs to."""
    cdef int64_t low = 0
    cdef int64_t high = b.attentions[0].plan.n_spans - 1
    cdef int64_t middle
    while low < high:
        middle = (low + high + 1) // 2
        if b.attentions[0].plan.spans[middle].row <= row:
            low = middle
        else:
            high = middle - 1
    return &b.attentions[0].plan.spans[low]


cdef void embed(const batch *b, int64_t *counter, int n_threads) noexcept nogil:
    """Token embeddings into x, and each row's rotation angles."""
    cdef int64_t chunk = row_chunk(b, n_threads)
    cdef int64_t stop = 0
    cdef int64_t row, i
    cdef int64_t start = claim(counter, b.n_rows, chunk, &stop)
    cdef attention_span *s
    while start < b.n_rows:
        for row in range(start, stop):
            s = span_of_row(b, row)
            weight_row(b.x + row * b.x_stride, b.embedding, b.tokens[row])
            memset(b.x + row * b.x_stride + b.hidden, 0, (b.x_stride - b.hidden) * sizeof(float))
            if b.embedding_scale != 1:
                kern.scale(b.x + row * b.x_stride, b.hidden, b.embedding_scale)
            for i in range(b.n_ropes):
                rope_angles(b.angles + 2 * (row * b.n_ropes + i) * b.rope_half, b.inv_freq + i * b.rope_half, b.rope_half,
                            s.position + row - s.row, b.rope_factors[i])
        start = claim(counter, b.n_rows, chunk, &stop)


cdef void norm(batch *b, bint pending, const float *post, const float *weight, bint gather, int64_t n_rows, bint quantised,
               int64_t *counter, int n_threads) noexcept nogil:
    """RMSNorm of rows of x (their copy when weight is NULL), quantised in the same pass.

    pending   first take what the last block left in `branch`, normed by `post` unless NULL, scaled, into x
    gather    the rows whose logits are wanted
    """
    cdef int64_t chunk = row_chunk(b, n_threads)
    cdef int64_t stop = 0
    cdef int64_t row, source
    cdef int64_t start = claim(counter, n_rows, chunk, &stop)
    cdef float *x
    cdef float *y
    cdef float *added
    while start < n_rows:
        for row in range(start, stop):
            source = b.logit_rows[row] if gather else row
            x = b.x + source * b.x_stride
            y = b.normed.x + row * b.normed.act.x_stride
            if pending:
                added = b.branch + source * b.x_stride
                if post != NULL:
                    kern.rmsnorm(y, added, post, b.hidden, b.eps)
                    added = y
                if b.residual_scale != 1:
                    kern.scale(added, b.hidden, b.residual_scale)
                kern.add(x, added, b.hidden)
            if weight != NULL:
                kern.rmsnorm(y, x, weight, b.hidden, b.eps)
            else:
                memcpy(y, x, b.hidden * sizeof(float))
            if quantised:
                act_quantise(&b.normed, row, 0, b.hidden)
        start = claim(counter, n_rows, chunk, &stop)


cdef void norm_heads(float *heads, const float *weight, int64_t n, int64_t size, float eps, float *scratch) noexcept nogil:
    """RMSNorm of n values in place, `size` at a time under the same weights."""
    cdef int64_t i = 0
    while i < n:
        kern.rmsnorm(scratch, heads + i, weight, size, eps)
        memcpy(heads + i, scratch, size * sizeof(float))
        i += size


cdef void rope_and_store(batch *b, int64_t layer, float *scratch, int64_t *counter, int n_threads) noexcept nogil:
    """Add biases, norm and rotate queries and keys, write keys and values to their pages."""
    cdef const layer_weights *w = &b.layers[layer]
    cdef const attention_view *kv = &b.attentions[0].view
    cdef int64_t chunk = row_chunk(b, n_threads)
    cdef int64_t q_width = b.n_heads * b.head_dim
    cdef int64_t k_width = b.n_kv_heads * b.head_dim
    cdef int64_t stop = 0
    cdef int64_t row, h, position
    cdef int64_t start = claim(counter, b.n_rows, chunk, &stop)
    cdef attention_span *s
    cdef float *heads
    cdef float *keys
    cdef float *angles
    while start < b.n_rows:
        for row in range(start, stop):
            s = span_of_row(b, row)
            position = s.position + row - s.row
            heads = b.qkv + row * b.qkv_stride
            keys = heads + b.k_offset
            if w.qkv_bias != NULL:
                kern.add(heads, w.qkv_bias, b.qkv_stride)
            if w.q_norm != NULL:
                norm_heads(heads, w.q_norm, q_width, b.qk_norm_size if b.qk_norm_size else q_width, b.eps, scratch)
                norm_heads(keys, w.k_norm, k_width, b.qk_norm_size if b.qk_norm_size else k_width, b.eps, scratch)
            if w.rope >= 0:
                angles = b.angles + 2 * (row * b.n_ropes + w.rope) * b.rope_half
                for h in range(b.n_heads):
                    kern.rope(heads + h * b.head_dim, angles, b.rope_half)
                for h in range(b.n_kv_heads):
                    kern.rope(keys + h * b.head_dim, angles, b.rope_half)
            for h in range(b.n_kv_heads):
                kern.kv_write[kv.format](kv_tile(kv, s.table[position // kv.page_tokens], layer, h), keys + h * b.head_dim,
                                         heads + b.v_offset + h * b.head_dim, position % kv.page_tokens, b.head_dim, kv.page_tokens)
        start = claim(counter, b.n_rows, chunk, &stop)


cdef void quantise_rows(act_buffer *rows, int64_t n_rows, int64_t *counter, int n_threads) noexcept nogil:
    """Whole rows, where the slices they were made in do not end on quantisation blocks."""
    cdef int64_t chunk = max(n_rows // (4 * n_threads), <int64_t>1)
    cdef int64_t stop = 0
    cdef int64_t row
    cdef int64_t start = claim(counter, n_rows, chunk, &stop)
    while start < n_rows:
        for row in range(start, stop):
            act_quantise(rows, row, 0, rows.n_cols)
        start = claim(counter, n_rows, chunk, &stop)


cdef void gate_up_unit(batch *b, const act_buffer *x, const expert_weights *w, float *scratch, int64_t unit, int64_t start, int64_t n_rows,
                       bint quantised, bint more) noexcept nogil:
    """activation(gate) * up for 32 rows of both matrices and rows [start, start + n_rows) of x, quantised while in cache. more: whether the
    next unit follows."""
    cdef int64_t panel = 2 * unit
    cdef int64_t panels = min(<int64_t>2, w.gate.n_panels - panel)
    cdef int64_t token = start, n, t
    cdef float *up = scratch + FFN_TOKENS * UNIT
    cdef float *h
    while token < start + n_rows:
        n = min(<int64_t>FFN_TOKENS, start + n_rows - token)
        gemm_of(x, w.gate)(scratch, w.gate, &x.act, panel, panels, token, n, UNIT, 0, 2 * more)
        gemm_of(x, w.up)(up, w.up, &x.act, panel, panels, token, n, UNIT, 0, 2 * more)
        for t in range(n):
            h = b.product.x + (token + t) * b.product.act.x_stride + UNIT * unit
            if b.activation == ACT_GELU:
                kern.gelu_mul(h, scratch + t * UNIT, up + t * UNIT, 16 * panels)
            else:
                kern.silu_mul(h, scratch + t * UNIT, up + t * UNIT, 16 * panels)
        if quantised:  # all rows at once: a row's products are late, and nothing else would run while their maximum waits
            act_quantise_column(&b.product, unit, token, n)
        token += n


cdef void gate_up(batch *b, const layer_weights *w, float *scratch, int64_t *taken, int thread, int n_threads) noexcept nogil:
    """activation(gate) * up of all rows."""
    cdef int64_t n_units = (w.ffn.gate.n_panels + 1) // 2
    cdef int64_t stop = 0
    cdef int64_t n_next = 0
    cdef int64_t unit
    cdef int64_t start = next_share(taken, n_units, 1, thread, n_threads, &stop, &n_next)
    cdef bint quantised = w.ffn.down.scales != NULL and not b.product.wide  # a wide block is longer than a unit
    while start < n_units:
        for unit in range(start, stop):
            gate_up_unit(b, &b.normed, &w.ffn, scratch, unit, 0, b.n_rows, quantised, unit + 1 < stop + n_next)
        start = next_share(taken, n_units, 1, thread, n_threads, &stop, &n_next)


cdef void head(batch *b, int64_t *taken, int thread, int n_threads) noexcept nogil:
    """Logits of the gathered rows."""
    cdef int64_t stop = 0
    cdef int64_t n_next = 0
    cdef int64_t row
    cdef int64_t start = next_share(taken, b.head.n_panels, 2, thread, n_threads, &stop, &n_next)
    while start < b.head.n_panels:
        gemm_of(&b.normed, b.head)(b.logits + 16 * start, b.head, &b.normed.act, start, stop - start, 0, b.n_logits, b.logits_stride, 0,
                                   n_next)
        if b.logit_softcap > 0:
            for row in range(b.n_logits):
                kern.softcap(b.logits + row * b.logits_stride + 16 * start, 16 * (stop - start), b.logit_softcap)
        start = next_share(taken, b.head.n_panels, 2, thread, n_threads, &stop, &n_next)
