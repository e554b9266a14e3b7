"""Feed-forward networks of several experts, of which each row uses a few.

The router's logits of a row choose its experts: the largest, of equal ones the lower index. Rows are then gathered by
expert, so that an expert's matrices are read once for all rows that chose it. A row's place among them changes no bit of
it: kernels compute each row alone, and what its experts return is added up in ascending order of the experts.
"""

from libc.stdint cimport int32_t, int64_t
from libc.string cimport memcpy

from pagedkv.core._kernels cimport *
from pagedkv.core.matmul cimport act_buffer, act_quantise, gemm_of, matmul
from pagedkv.core.operations cimport FFN_TOKENS, UNIT, batch, expert_weights, gate_up_unit, layer_weights, quantise_rows


cdef int64_t aligned(int64_t n_bytes) noexcept nogil:
    return pkv_round_up(n_bytes, 64)


cdef int64_t experts_bytes(const batch *b, int64_t n_rows) noexcept nogil:
    """Bytes of what `experts_place` places for steps of n_rows."""
    cdef int64_t n_slots = n_rows * b.n_used
    return (aligned(n_rows * b.router_stride * sizeof(float)) + aligned(n_slots * sizeof(float))
            + aligned(n_slots * b.x_stride * sizeof(float)) + 3 * aligned(n_slots * sizeof(int32_t))
            + 3 * aligned((b.n_experts + 1) * sizeof(int32_t)))


cdef void experts_place(batch *b, void *block, int64_t n_rows) noexcept nogil:
    """Point the batch at its parts of a block of experts_bytes(b, n_rows), which is 64-byte aligned."""
    cdef int64_t n_slots = n_rows * b.n_used
    cdef int64_t ints = aligned(n_slots * sizeof(int32_t))
    cdef int64_t table = aligned((b.n_experts + 1) * sizeof(int32_t))
    cdef char *p = <char *>block
    b.router_logits = <float *>p
    p += aligned(n_rows * b.router_stride * sizeof(float))
    b.shares = <float *>p
    p += aligned(n_slots * sizeof(float))
    b.slot_out = <float *>p
    p += aligned(n_slots * b.x_stride * sizeof(float))
    b.chosen = <int32_t *>p
    b.slot_of = <int32_t *>(p + ints)
    b.row_of = <int32_t *>(p + 2 * ints)
    p += 3 * ints
    b.first = <int32_t *>p
    b.next_slot = <int32_t *>(p + table)
    b.active = <int32_t *>(p + 2 * table)


cdef void choose(const batch *b, int64_t row) noexcept nogil:
    """The experts of a row in ascending order, and their shares."""
    cdef float *logits = b.router_logits + row * b.router_stride
    cdef int32_t *chosen = b.chosen + row * b.n_used
    cdef float *shares = b.shares + row * b.n_used
    cdef int64_t e, i, n = 0
    cdef float total, share
    cdef int32_t expert
    for e in range(b.n_experts):
        if n == b.n_used and not logits[e] > logits[chosen[n - 1]]:
            continue
        i = n if n < b.n_used else n - 1
        while i > 0 and logits[e] > logits[chosen[i - 1]]:
            if i < b.n_used:
                chosen[i] = chosen[i - 1]
            i -= 1
        chosen[i] = <int32_t>e
        n = min(n + 1, b.n_used)
    for i in range(b.n_used):
        shares[i] = logits[chosen[i]]
    if b.shares_of_all:
        total = kern.softmax(logits, logits, b.n_experts, shares[0], 1)
        for i in range(b.n_used):
            shares[i] = logits[chosen[i]]
    else:
        total = kern.softmax(shares, shares, b.n_used, shares[0], 1)
    for i in range(b.n_used):
        shares[i] /= total
    for e in range(1, b.n_used):
        expert, share, i = chosen[e], shares[e], e
        while i > 0 and chosen[i - 1] > expert:
            chosen[i], shares[i] = chosen[i - 1], shares[i - 1]
            i -= 1
        chosen[i], shares[i] = expert, share


cdef void group(batch *b) noexcept nogil:
    """Slots of the rows, by expert and then by row. For one thread."""
    cdef int64_t i, e, n_slots = b.n_rows * b.n_used
    for e in range(b.n_experts + 1):
        b.first[e] = 0
    for i in range(n_slots):
        b.first[b.chosen[i] + 1] += 1
    b.n_active = 0
    for e in range(b.n_experts):
        if b.first[e + 1]:
            b.active[b.n_active] = <int32_t>e
            b.n_active += 1
        b.first[e + 1] += b.first[e]
        b.next_slot[e] = b.first[e]
    for i in range(n_slots):
        e = b.chosen[i]
        b.slot_of[i] = b.next_slot[e]
        b.row_of[b.next_slot[e]] = <int32_t>(i // b.n_used)
        b.next_slot[e] += 1


cdef void experts_up(batch *b, const layer_weights *w, float *scratch, int64_t *counters, int64_t *taken, int thread,
                     int n_threads) noexcept nogil:
    """From normed rows to activation(gate) * up of each row and expert. Four zeroed counters and a zeroed `taken` of each thread."""
    cdef int64_t n_slots = b.n_rows * b.n_used
    cdef int64_t chunk = max(b.n_rows // (4 * n_threads), <int64_t>1)
    cdef int64_t stop = 0
    cdef int64_t start, i, n_units, e
    cdef const expert_weights *x
    cdef bint quantised
    matmul(b.router_logits, w.router, &b.normed, b.n_rows, b.router_stride, False, taken, thread, n_threads)
    pool_barrier(b.pool)
    start = claim(counters, b.n_rows, chunk, &stop)
    while start < b.n_rows:
        for i in range(start, stop):
            choose(b, i)
        start = claim(counters, b.n_rows, chunk, &stop)
    pool_barrier(b.pool)
    if thread == 0:
        group(b)
    pool_barrier(b.pool)
    start = claim(counters + 1, n_slots, chunk, &stop)
    while start < n_slots:
        for i in range(start, stop):
            memcpy(b.gathered.x + i * b.gathered.act.x_stride, b.normed.x + b.row_of[i] * b.normed.act.x_stride, b.hidden * sizeof(float))
            if w.quantised_experts:
                act_quantise(&b.gathered, i, 0, b.hidden)
        start = claim(counters + 1, n_slots, chunk, &stop)
    pool_barrier(b.pool)
    n_units = (w.experts[0].gate.n_panels + 1) // 2
    chunk = max(b.n_active * n_units // (8 * n_threads), <int64_t>1)
    start = claim(counters + 2, b.n_active * n_units, chunk, &stop)
    while start < b.n_active * n_units:
        for i in range(start, stop):
            e = b.active[i // n_units]
            x = &w.experts[e]
            quantised = x.down.scales != NULL and not b.product.wide
            gate_up_unit(b, &b.gathered, x, scratch, i % n_units, b.first[e], b.first[e + 1] - b.first[e], quantised,
                         i + 1 < stop and (i + 1) % n_units != 0)
        start = claim(counters + 2, b.n_active * n_units, chunk, &stop)
    if w.quantised_experts and b.product.wide:
        pool_barrier(b.pool)
        quantise_rows(&b.product, n_slots, counters + 3, n_threads)


cdef void experts_down(batch *b, const layer_weights *w, float *out, int64_t *counters, int n_threads) noexcept nogil:
    """From there into `out`: the residual stream, which it is added to, or the branch. Two zeroed counters."""
    cdef int64_t n_panels = w.experts[0].down.n_panels
    cdef int64_t n = b.n_active * n_panels
    cdef int64_t chunk = min(max(n // (8 * n_threads) // 2 * 2, <int64_t>2), <int64_t>16)
    cdef int64_t stop = 0
    cdef int64_t start = claim(counters, n, chunk, &stop)
    cdef int64_t e, panel, panels, row, i
    cdef const pkv_weight *down
    cdef float *total
    cdef float *one
    while start < n:
        while start < stop:
            e, panel = b.active[start // n_panels], start % n_panels
            panels = min(stop - start, n_panels - panel)
            down = w.experts[e].down
            gemm_of(&b.product, down)(b.slot_out + b.first[e] * b.x_stride + 16 * panel, down, &b.product.act, panel, panels,
                                      b.first[e], b.first[e + 1] - b.first[e], b.x_stride, 0, 0)
            start += panels
        start = claim(counters, n, chunk, &stop)
    pool_barrier(b.pool)
    chunk = max(b.n_rows // (4 * n_threads), <int64_t>1)
    start = claim(counters + 1, b.n_rows, chunk, &stop)
    while start < b.n_rows:
        for row in range(start, stop):
            total = b.slot_out + b.slot_of[row * b.n_used] * b.x_stride
            kern.scale(total, b.hidden, b.shares[row * b.n_used])
            for i in range(row * b.n_used + 1, (row + 1) * b.n_used):
                one = b.slot_out + b.slot_of[i] * b.x_stride
                kern.scale(one, b.hidden, b.shares[i])
                kern.add(total, one, b.hidden)
            if b.deferred:
                memcpy(out + row * b.x_stride, total, b.hidden * sizeof(float))
            else:
                kern.add(out + row * b.x_stride, total, b.hidden)
        start = claim(counters + 1, b.n_rows, chunk, &stop)
