"""ForwardModel: one step of a decoder-only transformer over a batch, one call without the GIL, all threads inside.

Every thread runs `step`, the same list of operations with a barrier between dependent ones; inside an operation threads claim work
through a counter. A row of the batch is one token of one sequence, on that sequence's own page table; prefill chunks and single decode
tokens are the same thing here. The bits of a row do not depend on the other rows, on who computes it or when.
"""

import numpy as np

from cpython.buffer cimport PyBUF_C_CONTIGUOUS, PyBUF_WRITABLE, PyBuffer_Release, PyObject_GetBuffer
from libc.stdint cimport int32_t, int64_t, uint32_t
from libc.string cimport memset
from libc.time cimport time_t

from pagedkv.core._kernels cimport *
from pagedkv.core.attention cimport *
from pagedkv.core.kvcache cimport KVSequence, PagedKVCache
from pagedkv.core.matmul cimport *
from pagedkv.core.memory cimport pkv_alloc, pkv_release
from pagedkv.core.structs cimport PKV_TAMPER

from pagedkv.core._kernels import isa
from pagedkv.core.errors import BadInput

cdef extern from "time.h" nogil:
    cdef struct timespec:
        time_t tv_sec
        long tv_nsec
    const int CLOCK_MONOTONIC
    int clock_gettime(int clock, timespec *t)

cdef enum:
    UNIT = 32           # feed-forward rows computed together: one quantisation block of the product
    FFN_TOKENS = 32     # tokens of one pass through such a unit
    COUNTERS_PER_LAYER = 13

# The operations of a step, in order; the first and the last two are outside the layers.
ACTIVATIONS = ("int8", "int12")
OPERATIONS = ("embed", "attn_norm", "qkv", "rope", "attention", "attn_out", "ffn_norm", "gate_up", "down", "head_norm", "head")
cdef enum:
    OP_EMBED, OP_ATTN_NORM, OP_QKV, OP_ROPE, OP_ATTENTION, OP_ATTN_OUT, OP_FFN_NORM, OP_GATE_UP, OP_DOWN, OP_HEAD_NORM, OP_HEAD, N_OPS

cdef struct layer_weights:
    const pkv_weight *q
    const pkv_weight *k
    const pkv_weight *v
    const pkv_weight *o
    const pkv_weight *gate
    const pkv_weight *up
    const pkv_weight *down
    const float *attn_norm
    const float *ffn_norm

cdef struct batch:
    # the model
    const layer_weights *layers
    const pkv_weight *embedding
    const pkv_weight *head
    const float *head_norm
    const double *inv_freq
    int64_t n_layers, hidden, n_heads, n_kv_heads, head_dim, ffn, rope_half
    float eps
    # where rows live: [n_rows, stride] each
    float *x                # residual stream
    float *qkv              # query, key, value heads
    float *angles           # cosines and sines
    int64_t x_stride, qkv_stride, k_offset, v_offset
    act_buffer normed       # input of qkv, gate/up and head
    act_buffer attended
    act_buffer product      # silu(gate) * up
    # the step
    attention_view kv
    attention_plan plan
    const int32_t *tokens
    const int32_t *logit_rows
    float *logits
    int64_t n_rows, n_logits, logits_stride
    # work sharing
    pkv_pool *pool
    int64_t *counters
    float *scratch
    int64_t scratch_stride
    int64_t *nanoseconds    # [N_OPS] of thread 0, or NULL


cdef int64_t now() noexcept nogil:
    cdef timespec t
    clock_gettime(CLOCK_MONOTONIC, &t)
    return <int64_t>t.tv_sec * 1000000000 + t.tv_nsec


# --- operations: each claims its share until nothing is left -------------------------------------------------------------

cdef int64_t row_chunk(const batch *b, int n_threads) noexcept nogil:
    return max(b.n_rows // (4 * n_threads), <int64_t>1)


cdef attention_span *span_of_row(const batch *b, int64_t row) noexcept nogil:
    """The sequence a row belongs to."""
    cdef int64_t low = 0
    cdef int64_t high = b.plan.n_spans - 1
    cdef int64_t middle
    while low < high:
        middle = (low + high + 1) // 2
        if b.plan.spans[middle].row <= row:
            low = middle
        else:
            high = middle - 1
    return &b.plan.spans[low]


cdef void embed(const batch *b, int64_t *counter, int n_threads) noexcept nogil:
    """Token embeddings into x, and each row's rotation angles."""
    cdef int64_t chunk = row_chunk(b, n_threads)
    cdef int64_t stop = 0
    cdef int64_t row
    cdef int64_t start = claim(counter, b.n_rows, chunk, &stop)
    cdef attention_span *s
    while start < b.n_rows:
        for row in range(start, stop):
            s = span_of_row(b, row)
            weight_row(b.x + row * b.x_stride, b.embedding, b.tokens[row])
            memset(b.x + row * b.x_stride + b.hidden, 0, (b.x_stride - b.hidden) * sizeof(float))
            rope_angles(b.angles + 2 * row * b.rope_half, b.inv_freq, b.rope_half, s.position + row - s.row, 1.0)
        start = claim(counter, b.n_rows, chunk, &stop)


cdef void norm(batch *b, const float *weight, bint gather, int64_t n_rows, bint quantised, int64_t *counter, int n_threads) noexcept nogil:
    """RMSNorm of rows of x, quantised in the same pass; gather: of the rows whose logits are wanted."""
    cdef int64_t chunk = row_chunk(b, n_threads)
    cdef int64_t stop = 0
    cdef int64_t row, source
    cdef int64_t start = claim(counter, n_rows, chunk, &stop)
    while start < n_rows:
        for row in range(start, stop):
            source = b.logit_rows[row] if gather else row
            kern.rmsnorm(b.normed.x + row * b.normed.act.x_stride, b.x + source * b.x_stride, weight, b.hidden, b.eps)
            if quantised:
                act_quantise(&b.normed, row, 0, b.hidden)
        start = claim(counter, n_rows, chunk, &stop)


cdef void rope_and_store(batch *b, int64_t layer, int64_t *counter, int n_threads) noexcept nogil:
    """Rotate queries and keys, write keys and values to their pages."""
    cdef int64_t chunk = row_chunk(b, n_threads)
    cdef int64_t stop = 0
    cdef int64_t row, h, position
    cdef int64_t page_tokens = b.kv.page_tokens
    cdef int64_t start = claim(counter, b.n_rows, chunk, &stop)
    cdef attention_span *s
    cdef float *heads
    cdef float *angles
    while start < b.n_rows:
        for row in range(start, stop):
            s = span_of_row(b, row)
            position = s.position + row - s.row
            heads = b.qkv + row * b.qkv_stride
            angles = b.angles + 2 * row * b.rope_half
            for h in range(b.n_heads):
                kern.rope(heads + h * b.head_dim, angles, b.rope_half)
            for h in range(b.n_kv_heads):
                kern.rope(heads + b.k_offset + h * b.head_dim, angles, b.rope_half)
                kern.kv_write[b.kv.format](kv_tile(&b.kv, s.table[position // page_tokens], layer, h),
                                           heads + b.k_offset + h * b.head_dim, heads + b.v_offset + h * b.head_dim,
                                           position % page_tokens, b.head_dim, page_tokens)
        start = claim(counter, b.n_rows, chunk, &stop)


cdef void quantise_rows(batch *b, act_buffer *rows, int64_t *counter, int n_threads) noexcept nogil:
    """Whole rows, where the slices they were made in do not end on quantisation blocks."""
    cdef int64_t chunk = row_chunk(b, n_threads)
    cdef int64_t stop = 0
    cdef int64_t row
    cdef int64_t start = claim(counter, b.n_rows, chunk, &stop)
    while start < b.n_rows:
        for row in range(start, stop):
            act_quantise(rows, row, 0, rows.n_cols)
        start = claim(counter, b.n_rows, chunk, &stop)


cdef void gate_up(batch *b, const layer_weights *w, float *scratch, int64_t *counter, int n_threads) noexcept nogil:
    """silu(gate) * up for 32 rows of both at a time, quantised while in cache."""
    cdef int64_t n_units = (w.gate.n_panels + 1) // 2
    cdef int64_t chunk = max(n_units // (8 * n_threads), <int64_t>1)
    cdef int64_t stop = 0
    cdef int64_t unit, panel, panels, token, n, t
    cdef int64_t start = claim(counter, n_units, chunk, &stop)
    cdef float *up = scratch + FFN_TOKENS * UNIT
    cdef float *h
    cdef bint quantised = is_quantised(w.down) and not b.product.wide  # a wide block is longer than a unit
    while start < n_units:
        for unit in range(start, stop):
            panel = 2 * unit
            panels = min(<int64_t>2, w.gate.n_panels - panel)
            token = 0
            while token < b.n_rows:
                n = min(<int64_t>FFN_TOKENS, b.n_rows - token)
                gemm_of(&b.normed, w.gate)(scratch, w.gate, &b.normed.act, panel, panels, token, n, UNIT, 0)
                gemm_of(&b.normed, w.up)(up, w.up, &b.normed.act, panel, panels, token, n, UNIT, 0)
                for t in range(n):
                    h = b.product.x + (token + t) * b.product.act.x_stride + UNIT * unit
                    kern.silu_mul(h, scratch + t * UNIT, up + t * UNIT, 16 * panels)
                    if quantised:
                        act_quantise(&b.product, token + t, UNIT * unit, UNIT * (unit + 1))
                token += n
        start = claim(counter, n_units, chunk, &stop)


# --- the step ----------------------------------------------------------------------------------------------------------

cdef inline void done(batch *b, int op, int thread, int64_t *since) noexcept nogil:
    """All threads have finished an operation."""
    cdef int64_t t
    pool_barrier(b.pool)
    if thread == 0 and b.nanoseconds != NULL:
        t = now()
        b.nanoseconds[op] += t - since[0]
        since[0] = t


cdef bint is_quantised(const pkv_weight *w) noexcept nogil:
    return w.scales != NULL


cdef void step(void *arg, int thread, int n_threads) noexcept nogil:
    cdef batch *b = <batch *>arg
    cdef const layer_weights *w
    cdef float *scratch = b.scratch + thread * b.scratch_stride
    cdef int64_t *counter = b.counters
    cdef int64_t width = b.kv.group * b.head_dim
    cdef int64_t layer
    cdef int64_t since = now() if thread == 0 and b.nanoseconds != NULL else 0
    cdef act_buffer *slices
    embed(b, counter, n_threads)
    done(b, OP_EMBED, thread, &since)
    counter += 1
    for layer in range(b.n_layers):
        w = &b.layers[layer]
        norm(b, w.attn_norm, False, b.n_rows, is_quantised(w.q) or is_quantised(w.k) or is_quantised(w.v), counter, n_threads)
        done(b, OP_ATTN_NORM, thread, &since)
        matmul(b.qkv, w.q, &b.normed, b.n_rows, b.qkv_stride, False, counter + 1, n_threads)
        matmul(b.qkv + b.k_offset, w.k, &b.normed, b.n_rows, b.qkv_stride, False, counter + 2, n_threads)
        matmul(b.qkv + b.v_offset, w.v, &b.normed, b.n_rows, b.qkv_stride, False, counter + 3, n_threads)
        done(b, OP_QKV, thread, &since)
        rope_and_store(b, layer, counter + 4, n_threads)
        done(b, OP_ROPE, thread, &since)
        slices = &b.attended if is_quantised(w.o) and width % 32 == 0 and not b.attended.wide else NULL
        attend(b.attended.x, b.qkv, &b.kv, &b.plan, layer, b.attended.act.x_stride, b.qkv_stride, slices, scratch, counter + 5)
        if b.plan.n_merged:
            pool_barrier(b.pool)
            attend_merge(b.attended.x, &b.kv, &b.plan, b.attended.act.x_stride, slices, counter + 6)
        if is_quantised(w.o) and slices == NULL:
            pool_barrier(b.pool)
            quantise_rows(b, &b.attended, counter + 7, n_threads)
        done(b, OP_ATTENTION, thread, &since)
        matmul(b.x, w.o, &b.attended, b.n_rows, b.x_stride, True, counter + 8, n_threads)
        done(b, OP_ATTN_OUT, thread, &since)
        norm(b, w.ffn_norm, False, b.n_rows, is_quantised(w.gate) or is_quantised(w.up), counter + 9, n_threads)
        done(b, OP_FFN_NORM, thread, &since)
        gate_up(b, w, scratch, counter + 10, n_threads)
        if is_quantised(w.down) and b.product.wide:
            pool_barrier(b.pool)
            quantise_rows(b, &b.product, counter + 12, n_threads)
        done(b, OP_GATE_UP, thread, &since)
        matmul(b.x, w.down, &b.product, b.n_rows, b.x_stride, True, counter + 11, n_threads)
        done(b, OP_DOWN, thread, &since)
        counter += COUNTERS_PER_LAYER
    if b.n_logits:
        norm(b, b.head_norm, True, b.n_logits, is_quantised(b.head), counter, n_threads)
        done(b, OP_HEAD_NORM, thread, &since)
        matmul(b.logits, b.head, &b.normed, b.n_logits, b.logits_stride, False, counter + 1, n_threads)
        done(b, OP_HEAD, thread, &since)


# --- Python edge -------------------------------------------------------------------------------------------------------

cdef object int32_array(str field, values):
    """values as a contiguous int32 array; BadInput when they are not integers or do not fit."""
    array = np.asarray(values)
    if array.size and (array.dtype.kind not in "iu" or array.min() < -(1 << 31) or array.max() >= 1 << 31):
        raise BadInput(f"{field}: {array.dtype} values that are not integers of 32 bits")
    return np.ascontiguousarray(array, np.int32)


cdef class Layer:
    """Weights of one layer: PackedMatrix q, k, v, o, gate, up, down; float32 arrays attn_norm, ffn_norm."""

    cdef readonly PackedMatrix q, k, v, o, gate, up, down
    cdef readonly object attn_norm, ffn_norm

    def __init__(self, *, PackedMatrix q not None, PackedMatrix k not None, PackedMatrix v not None, PackedMatrix o not None,
                 PackedMatrix gate not None, PackedMatrix up not None, PackedMatrix down not None, attn_norm, ffn_norm):
        self.q, self.k, self.v, self.o, self.gate, self.up, self.down = q, k, v, o, gate, up, down
        self.attn_norm = np.ascontiguousarray(attn_norm, np.float32)
        self.ffn_norm = np.ascontiguousarray(ffn_norm, np.float32)


cdef class ForwardModel:
    """The packed weights of a model and the workspace of its steps.

    layers       list of Layer, one at least; rows of q and k ordered so that rotation pairs are (i, i + rope_dim/2) inside a head
    embedding    PackedMatrix [vocab, hidden]; head the same, or the same object when tied
    head_norm    float32 [hidden]
    inv_freq     float64 [rope_dim / 2]
    pool         ThreadPool of the steps
    activations  "int8" or "int12" (docs/numerics.md)

    Raises ValueError for shapes that do not fit each other.
    """

    cdef list layers
    cdef PackedMatrix embedding, head
    cdef object head_norm, inv_freq
    cdef readonly ThreadPool pool
    cdef readonly int64_t vocab_size, n_heads, n_kv_heads, head_dim
    cdef batch b
    cdef layer_weights *weights
    cdef int64_t *counters
    cdef int64_t max_rows, scratch_bytes
    cdef int64_t profile_ns[N_OPS]
    cdef public bint profile
    cdef bint running

    def __cinit__(self):
        memset(&self.b, 0, sizeof(batch))
        memset(self.profile_ns, 0, sizeof(self.profile_ns))
        self.weights = NULL
        self.counters = NULL

    def __init__(self, *, layers, PackedMatrix embedding not None, PackedMatrix head not None, head_norm, inv_freq, n_heads, n_kv_heads,
                 head_dim, rms_eps, ThreadPool pool not None, activations="int8"):
        cdef Layer layer
        cdef PackedMatrix m
        cdef int64_t i
        cdef batch *b = &self.b
        self.layers, self.embedding, self.head, self.pool = list(layers), embedding, head, pool
        self.head_norm = np.ascontiguousarray(head_norm, np.float32)
        self.inv_freq = np.ascontiguousarray(inv_freq, np.float64)
        self.n_heads, self.n_kv_heads, self.head_dim = n_heads, n_kv_heads, head_dim
        self.vocab_size = self.embedding.w.n_rows
        if not self.layers or min(n_heads, n_kv_heads, head_dim) < 1:
            raise ValueError(f"model: {len(self.layers)} layers, {n_heads} query heads, {n_kv_heads} KV heads, head_dim {head_dim}, "
                             "must be at least 1 each")
        b.n_layers, b.hidden, b.n_heads, b.n_kv_heads, b.head_dim = len(self.layers), self.embedding.w.n_cols, n_heads, n_kv_heads, head_dim
        b.ffn = self.layers[0].gate.shape[0]
        b.rope_half = len(self.inv_freq)
        b.eps = rms_eps
        if activations not in ACTIVATIONS:
            raise ValueError(f"activations: {activations!r} is not one of {', '.join(ACTIVATIONS)}")
        b.normed.wide = b.attended.wide = b.product.wide = activations == "int12"
        expected = {"q": (n_heads * head_dim, b.hidden), "k": (n_kv_heads * head_dim, b.hidden), "v": (n_kv_heads * head_dim, b.hidden),
                    "o": (b.hidden, n_heads * head_dim), "gate": (b.ffn, b.hidden), "up": (b.ffn, b.hidden), "down": (b.hidden, b.ffn)}
        if n_heads % n_kv_heads or 2 * b.rope_half > head_dim:
            raise ValueError(f"heads: {n_heads} query heads, {n_kv_heads} KV heads, head_dim {head_dim}, rotated {2 * b.rope_half}")
        if self.head.shape != (self.vocab_size, b.hidden) or self.head_norm.shape != (b.hidden,):
            raise ValueError(f"head: shape {self.head.shape} with norm {self.head_norm.shape}, must be ({self.vocab_size}, {b.hidden})")
        self.weights = <layer_weights *>pkv_alloc(b.n_layers * sizeof(layer_weights))
        self.counters = <int64_t *>pkv_alloc((b.n_layers * COUNTERS_PER_LAYER + 4) * sizeof(int64_t))
        if self.weights == NULL or self.counters == NULL:
            raise MemoryError("the system refused memory for a model")
        for i in range(b.n_layers):
            layer = self.layers[i]
            for name, shape in expected.items():
                m = getattr(layer, name)
                if m.shape != shape:
                    raise ValueError(f"layer {i} {name}: shape {m.shape}, must be {shape}")
            if layer.attn_norm.shape != (b.hidden,) or layer.ffn_norm.shape != (b.hidden,):
                raise ValueError(f"layer {i}: norm shapes {layer.attn_norm.shape}, {layer.ffn_norm.shape}, must be ({b.hidden},)")
            self.weights[i].q, self.weights[i].k, self.weights[i].v = &layer.q.w, &layer.k.w, &layer.v.w
            self.weights[i].o, self.weights[i].gate, self.weights[i].up = &layer.o.w, &layer.gate.w, &layer.up.w
            self.weights[i].down = &layer.down.w
            self.weights[i].attn_norm = <const float *><size_t>layer.attn_norm.ctypes.data
            self.weights[i].ffn_norm = <const float *><size_t>layer.ffn_norm.ctypes.data
        b.layers, b.embedding, b.head = self.weights, &self.embedding.w, &self.head.w
        b.head_norm = <const float *><size_t>self.head_norm.ctypes.data
        b.inv_freq = <const double *><size_t>self.inv_freq.ctypes.data
        b.pool = self.pool.ptr
        b.counters = self.counters
        b.x_stride = pkv_round_up(b.hidden, 16)
        b.k_offset = pkv_round_up(n_heads * head_dim, 16)
        b.v_offset = b.k_offset + pkv_round_up(n_kv_heads * head_dim, 16)
        b.qkv_stride = b.v_offset + pkv_round_up(n_kv_heads * head_dim, 16)

    def __dealloc__(self):
        self.release_workspace()
        pkv_release(self.weights)
        pkv_release(self.counters)

    cdef void release_workspace(self):
        pkv_release(self.b.x)
        pkv_release(self.b.scratch)
        self.b.x, self.b.scratch = NULL, NULL
        act_release(&self.b.normed)
        act_release(&self.b.attended)
        act_release(&self.b.product)
        plan_release(&self.b.plan)
        self.max_rows = self.scratch_bytes = 0

    def close(self) -> None:
        """Free the workspace; it comes back at the next run. The weights go when the object dies. RuntimeError while running."""
        if self.running:
            raise RuntimeError("close: the model is running, in another thread")
        self.release_workspace()

    @property
    def vocab_padded(self) -> int:
        """Columns of a logits row: vocab_size rounded up to 16."""
        return self.head.w.n_panels * 16

    @property
    def n_layers(self) -> int:
        """Layers, as the KV cache must have them."""
        return self.b.n_layers

    @property
    def n_threads(self) -> int:
        """Threads of a step."""
        return self.pool.n_threads

    @property
    def isa(self) -> str:
        """The instruction set in use."""
        return isa()

    @property
    def nbytes(self) -> int:
        """Bytes of packed weights, a tied head counted once."""
        matrices = {id(m): m.nbytes for layer in self.layers
                    for m in (layer.q, layer.k, layer.v, layer.o, layer.gate, layer.up, layer.down)}
        return sum({**matrices, id(self.embedding): self.embedding.nbytes, id(self.head): self.head.nbytes}.values())

    def profile_seconds(self) -> dict:
        """Seconds of each operation since the last call, while `profile` was on; the clock runs on thread 0 from barrier to barrier."""
        result = {OPERATIONS[i]: self.profile_ns[i] / 1e9 for i in range(N_OPS)}
        memset(self.profile_ns, 0, sizeof(self.profile_ns))
        return result

    cdef int reserve(self, int64_t n_rows, int64_t n_spans, const attention_view *v) except -1:
        """Workspace for a step; grows, never shrinks."""
        cdef batch *b = &self.b
        cdef int64_t floats = n_rows * (b.x_stride + b.qkv_stride + 2 * b.rope_half)
        cdef int64_t scratch = pkv_round_up(max(scratch_floats(v), <int64_t>2 * FFN_TOKENS * UNIT), 16) + 16
        if n_rows > self.max_rows:
            self.release_workspace()
            b.x = <float *>pkv_alloc(floats * sizeof(float))
            if (b.x == NULL or act_reserve(&b.normed, n_rows, b.hidden)
                    or act_reserve(&b.attended, n_rows, b.n_heads * b.head_dim) or act_reserve(&b.product, n_rows, pkv_round_up(b.ffn, 32))):
                self.release_workspace()
                raise MemoryError(f"the system refused the workspace of a step of {n_rows} tokens")
            b.qkv = b.x + n_rows * b.x_stride
            b.angles = b.qkv + n_rows * b.qkv_stride
            self.max_rows = n_rows
        if plan_spans(&b.plan, n_spans):
            raise MemoryError(f"the system refused the workspace of a step of {n_spans} sequences")
        if scratch * self.pool.n_threads > self.scratch_bytes:
            pkv_release(b.scratch)
            self.scratch_bytes = 0
            b.scratch = <float *>pkv_alloc(scratch * self.pool.n_threads * sizeof(float))
            if b.scratch == NULL:
                raise MemoryError("the system refused the scratch memory of a step")
            self.scratch_bytes = scratch * self.pool.n_threads
        b.scratch_stride = self.scratch_bytes // self.pool.n_threads
        return 0

    def run(self, PagedKVCache kv not None, seqs, token_ids, q_lens, logit_rows, logits) -> None:
        """Compute the last q_lens[i] tokens of each sequence: write their K and V, and logits of the rows asked for.

        kv          cache of this model's n_layers, n_kv_heads and head_dim
        seqs        list of distinct KVSequence of kv, each extended already by its q_lens[i] tokens, on pages no other sequence holds
        token_ids   int32 [sum(q_lens)], concatenated in order of seqs, in [0, vocab_size)
        q_lens      int32 [len(seqs)], each at least 1
        logit_rows  int32 [m], rows of token_ids, strictly ascending
        logits      float32 [m, vocab_padded], written; columns from vocab_size on are meaningless

        Releases the GIL; other threads must leave the sequences alone meanwhile. Raises BadInput naming what does not fit, with no K/V
        written, MemoryError, and RuntimeError when the model is running already.
        """
        if self.running:
            raise RuntimeError("run: the model is running already, in another thread")
        self.running = True
        try:
            self.run_alone(kv, list(seqs), int32_array("token_ids", token_ids), int32_array("q_lens", q_lens),
                           int32_array("logit_rows", logit_rows), logits)
        finally:
            self.running = False

    cdef int run_alone(self, PagedKVCache kv, list seqs, ids, lens, rows, logits) except -1:
        cdef batch *b = &self.b
        cdef int64_t i, row, page, status
        cdef KVSequence seq
        cdef attention_span *s
        cdef Py_buffer buffer
        if (kv.n_layers, kv.n_kv_heads, kv.head_dim) != (b.n_layers, b.n_kv_heads, b.head_dim):
            raise BadInput(f"kv: layers, heads, head_dim {kv.n_layers, kv.n_kv_heads, kv.head_dim}, the model has "
                           f"{b.n_layers, b.n_kv_heads, b.head_dim}")
        if lens.shape != (len(seqs),) or len(seqs) == 0 or lens.min() < 1 or ids.shape != (lens.sum(),):
            raise BadInput(f"q_lens: {lens.tolist()} for {len(seqs)} sequences and {ids.shape} token ids")
        if ids.min() < 0 or ids.max() >= self.vocab_size:
            raise BadInput(f"token_ids: {int(ids.min() if ids.min() < 0 else ids.max())} is outside [0, {self.vocab_size})")
        if rows.ndim != 1 or (len(rows) and (rows.min() < 0 or rows.max() >= len(ids) or (np.diff(rows) <= 0).any())):
            raise BadInput(f"logit_rows: {rows.tolist()} do not ascend in [0, {len(ids)})")
        if len({id(entry) for entry in seqs}) != len(seqs):
            raise BadInput("seqs: the same sequence twice")
        if logits.dtype != np.float32 or logits.shape != (len(rows), self.vocab_padded):
            raise BadInput(f"logits: {logits.dtype} {logits.shape} is not float32 ({len(rows)}, {self.vocab_padded})")
        b.kv = kv.view
        b.kv.group = b.n_heads // b.n_kv_heads
        b.kv.scale = 1.0 / float(np.sqrt(np.float64(b.head_dim)))
        self.reserve(len(ids), len(seqs), &b.kv)
        row = 0
        for i in range(len(seqs)):
            if not isinstance(seqs[i], KVSequence) or (<KVSequence>seqs[i]).arena is not kv:
                raise BadInput(f"seqs: entry {i} is no sequence of this cache")
            seq = seqs[i]
            seq.cache()
            s = &b.plan.spans[i]
            s.n_tokens = lens[i]
            s.position = seq.ptr.n_tokens - s.n_tokens
            s.table = seq.ptr.page_indices
            s.row = row
            if s.position < 0:
                raise BadInput(f"q_lens: {lens[i]} tokens for entry {i}, a sequence of {seq.ptr.n_tokens}")
            for page in range(s.position // b.kv.page_tokens, (s.position + s.n_tokens - 1) // b.kv.page_tokens + 1):
                if kv.ptr.pages[s.table[page]].refcount != 1 or kv.ptr.pages[s.table[page]].indexed:
                    raise BadInput(f"seqs: entry {i} shares page {s.table[page]}, which this step writes; extend after sharing")
            row += s.n_tokens
        if plan_units(&b.plan, &b.kv):
            raise MemoryError(f"the system refused the workspace of a step of {row} tokens")
        b.n_rows, b.n_logits = row, len(rows)
        b.logits_stride = self.vocab_padded
        b.nanoseconds = self.profile_ns if self.profile else NULL
        memset(self.counters, 0, (b.n_layers * COUNTERS_PER_LAYER + 4) * sizeof(int64_t))
        PyObject_GetBuffer(logits, &buffer, PyBUF_C_CONTIGUOUS | PyBUF_WRITABLE)
        try:
            b.tokens = <const int32_t *><size_t>ids.ctypes.data
            b.logit_rows = <const int32_t *><size_t>rows.ctypes.data
            b.logits = <float *>buffer.buf
            with nogil:
                status = pool_run(b.pool, &step, b)
        finally:
            PyBuffer_Release(&buffer)
        if status:
            raise MemoryError("the system refused a worker thread")
        return 0
