"""ForwardModel: one step of a decoder-only transformer over a batch, one call without the GIL, all threads inside.

Every thread runs `step`, the same list of operations with a barrier between dependent ones; inside an operation threads claim work
through a counter. A row of the batch is one token of one sequence, on that sequence's own page table; prefill chunks and single decode
tokens are the same thing here. The bits of a row do not depend on the other rows, on who computes it or when.
"""

import numpy as np

from cpython.buffer cimport PyBUF_C_CONTIGUOUS, PyBUF_WRITABLE, PyBuffer_Release, PyObject_GetBuffer
from libc.stdint cimport int32_t, int64_t, uint32_t
from libc.string cimport memcpy, memset
from libc.time cimport time_t

from pagedkv.core._kernels cimport *
from pagedkv.core.attention cimport *
from pagedkv.core.exclusive cimport give_back, take
from pagedkv.core.experts cimport *
from pagedkv.core.kvcache cimport KVSequence, PagedKVCache
from pagedkv.core.layer cimport Layer, float_array, int32_array, pointer
from pagedkv.core.matmul cimport *
from pagedkv.core.memory cimport pkv_alloc, pkv_release
from pagedkv.core.operations cimport *
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
    COUNTERS_PER_LAYER = 12
    MATMULS_PER_LAYER = 6

ACTIVATIONS = ("int8", "int12")        # of quantised matrices
EXPERT_SHARES = ("chosen", "all")      # what the softmax of experts' shares is over
FFN_ACTIVATIONS = ("silu", "gelu")    # of the feed-forward gate, gelu in its tanh form

# The operations of a step, in order; the first and the last two are outside the layers.
OPERATIONS = ("embed", "attn_norm", "qkv", "rope", "attention", "attn_out", "ffn_norm", "gate_up", "down", "head_norm", "head")
cdef enum:
    OP_EMBED, OP_ATTN_NORM, OP_QKV, OP_ROPE, OP_ATTENTION, OP_ATTN_OUT, OP_FFN_NORM, OP_GATE_UP, OP_DOWN, OP_HEAD_NORM, OP_HEAD, N_OPS


cdef int64_t now() noexcept nogil:
    cdef timespec t
    clock_gettime(CLOCK_MONOTONIC, &t)
    return <int64_t>t.tv_sec * 1000000000 + t.tv_nsec


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
    cdef attention_kind *a
    cdef float *scratch = b.scratch + thread * b.scratch_stride
    cdef float *out = b.branch if b.deferred else b.x
    cdef const float *post = NULL
    cdef int64_t *counter = b.counters
    cdef int64_t *taken = b.taken
    cdef int64_t width = b.n_heads // b.n_kv_heads * b.head_dim
    cdef int64_t layer
    cdef int64_t since = now() if thread == 0 and b.nanoseconds != NULL else 0
    cdef act_buffer *slices
    embed(b, counter, n_threads)
    done(b, OP_EMBED, thread, &since)
    counter += 1
    for layer in range(b.n_layers):
        w = &b.layers[layer]
        a = &b.attentions[w.attention]
        norm(b, b.deferred and layer > 0, post, w.attn_norm, False, b.n_rows,
             is_quantised(w.q) or is_quantised(w.k) or is_quantised(w.v), counter, n_threads)
        fetch_run(w.q, thread, n_threads)
        fetch_run(w.k, thread, n_threads)
        fetch_run(w.v, thread, n_threads)
        done(b, OP_ATTN_NORM, thread, &since)
        matmul(b.qkv, w.q, &b.normed, b.n_rows, b.qkv_stride, False, taken, thread, n_threads)
        matmul(b.qkv + b.k_offset, w.k, &b.normed, b.n_rows, b.qkv_stride, False, taken + n_threads, thread, n_threads)
        matmul(b.qkv + b.v_offset, w.v, &b.normed, b.n_rows, b.qkv_stride, False, taken + 2 * n_threads, thread, n_threads)
        done(b, OP_QKV, thread, &since)
        rope_and_store(b, layer, scratch, counter + 1, n_threads)
        fetch_run(w.o, thread, n_threads)
        done(b, OP_ROPE, thread, &since)
        slices = &b.attended if is_quantised(w.o) and width % 32 == 0 and not b.attended.wide else NULL
        attend(b.attended.x, b.qkv, &a.view, &a.plan, layer, b.attended.act.x_stride, b.qkv_stride, slices, scratch, counter + 2,
               n_threads)
        if a.plan.n_merged:
            pool_barrier(b.pool)
            attend_merge(b.attended.x, &a.view, &a.plan, b.attended.act.x_stride, slices, counter + 3)
        if is_quantised(w.o) and slices == NULL:
            pool_barrier(b.pool)
            quantise_rows(&b.attended, b.n_rows, counter + 4, n_threads)
        done(b, OP_ATTENTION, thread, &since)
        matmul(out, w.o, &b.attended, b.n_rows, b.x_stride, not b.deferred, taken + 3 * n_threads, thread, n_threads)
        if w.router == NULL:
            fetch_run(w.ffn.gate, thread, n_threads)
            fetch_run(w.ffn.up, thread, n_threads)
        done(b, OP_ATTN_OUT, thread, &since)
        norm(b, b.deferred, w.post_attn_norm, w.ffn_norm, False, b.n_rows,
             is_quantised(w.router) if w.router != NULL else is_quantised(w.ffn.gate) or is_quantised(w.ffn.up), counter + 5, n_threads)
        done(b, OP_FFN_NORM, thread, &since)
        if w.router != NULL:
            experts_up(b, w, scratch, counter + 6, taken + 4 * n_threads, thread, n_threads)
            done(b, OP_GATE_UP, thread, &since)
            experts_down(b, w, out, counter + 10, n_threads)
        else:
            gate_up(b, w, scratch, taken + 4 * n_threads, thread, n_threads)
            if is_quantised(w.ffn.down) and b.product.wide:
                pool_barrier(b.pool)
                quantise_rows(&b.product, b.n_rows, counter + 6, n_threads)
            fetch_run(w.ffn.down, thread, n_threads)
            done(b, OP_GATE_UP, thread, &since)
            matmul(out, w.ffn.down, &b.product, b.n_rows, b.x_stride, not b.deferred, taken + 5 * n_threads, thread, n_threads)
        done(b, OP_DOWN, thread, &since)
        post = w.post_ffn_norm
        counter += COUNTERS_PER_LAYER
        taken += MATMULS_PER_LAYER * n_threads
    if b.n_gathered:
        norm(b, b.deferred, post, b.head_norm, True, b.n_gathered, is_quantised(b.head), counter, n_threads)
        done(b, OP_HEAD_NORM, thread, &since)
        if b.n_logits:
            head(b, taken, thread, n_threads)
            done(b, OP_HEAD, thread, &since)


# --- Python edge -------------------------------------------------------------------------------------------------------

cdef class ForwardModel:
    """The packed weights of a model and the workspace of its steps.

    layers            list of Layer, one at least; all with post norms at the same places
    embedding         PackedMatrix [vocab, hidden]; head the same, or the same object when tied
    head_norm         float32 [hidden]
    inv_freq          float64 [rope_dim / 2], or [tables, rope_dim / 2]; rope_factors: [tables], of their cosines and sines
    activations       "int8" or "int12" (docs/numerics.md)
    ffn_activation    "silu" or "gelu" (tanh form), of the gate
    attention_scale   of scores, None: 1/sqrt(head_dim); attention_softcap, logit_softcap: cap * tanh(x / cap), 0: none
    embedding_scale, residual_scale    factors of embeddings and of all that layers add
    experts_used      experts of each row, in [1, experts of a layer], 0 without experts; expert_shares: "chosen", of a softmax over
                      those, or "all", over all experts
    pool              ThreadPool of the steps

    Raises ValueError for shapes that do not fit each other.
    """

    cdef list layers, biases
    cdef PackedMatrix embedding, head
    cdef object head_norm, inv_freq, rope_factors
    cdef readonly ThreadPool pool
    cdef readonly int64_t vocab_size, n_heads, n_kv_heads, head_dim
    cdef batch b
    cdef layer_weights *weights
    cdef expert_weights *experts
    cdef void *routes
    cdef int64_t *counters
    cdef int64_t n_counters     # with those of matmuls
    cdef int64_t max_rows, scratch_bytes
    cdef int64_t profile_ns[N_OPS]
    cdef public bint profile
    cdef int32_t running

    def __cinit__(self):
        memset(&self.b, 0, sizeof(batch))
        memset(self.profile_ns, 0, sizeof(self.profile_ns))
        self.weights, self.experts, self.routes, self.counters = NULL, NULL, NULL, NULL

    def __init__(self, *, layers, PackedMatrix embedding not None, PackedMatrix head not None, head_norm, inv_freq, n_heads, n_kv_heads,
                 head_dim, rms_eps, ThreadPool pool not None, activations="int8", rope_factors=None, ffn_activation="silu",
                 attention_scale=None, attention_softcap=0.0, logit_softcap=0.0, embedding_scale=1.0, residual_scale=1.0,
                 experts_used=0, expert_shares="chosen"):
        cdef batch *b = &self.b
        cdef int64_t i
        cdef Layer layer
        self.layers, self.biases, self.embedding, self.head, self.pool = list(layers), [], embedding, head, pool
        self.head_norm = float_array(head_norm)
        self.inv_freq = np.atleast_2d(np.ascontiguousarray(inv_freq, np.float64))
        self.rope_factors = float_array(np.ones(len(self.inv_freq)) if rope_factors is None else rope_factors)
        self.n_heads, self.n_kv_heads, self.head_dim = n_heads, n_kv_heads, head_dim
        self.vocab_size = self.embedding.w.n_rows
        if not self.layers or min(n_heads, n_kv_heads, head_dim) < 1:
            raise ValueError(f"model: {len(self.layers)} layers, {n_heads} query heads, {n_kv_heads} KV heads, head_dim {head_dim}, "
                             "must be at least 1 each")
        if activations not in ACTIVATIONS:
            raise ValueError(f"activations: {activations!r} is not one of {', '.join(ACTIVATIONS)}")
        if ffn_activation not in FFN_ACTIVATIONS:
            raise ValueError(f"ffn_activation: {ffn_activation!r} is not one of {', '.join(FFN_ACTIVATIONS)}")
        b.normed.wide = b.gathered.wide = b.attended.wide = b.product.wide = activations == "int12"
        b.n_layers, b.hidden, b.n_heads, b.n_kv_heads, b.head_dim = len(self.layers), self.embedding.w.n_cols, n_heads, n_kv_heads, head_dim
        first = self.layers[0]
        b.ffn = (first.experts[0][0] if first.experts else first.gate).shape[0]
        b.n_experts, b.n_used, b.shares_of_all = len(first.experts), experts_used, expert_shares == "all"
        b.router_stride = pkv_round_up(b.n_experts, 16)
        if expert_shares not in EXPERT_SHARES:
            raise ValueError(f"expert_shares: {expert_shares!r} is not one of {', '.join(EXPERT_SHARES)}")
        if not min(b.n_experts, 1) <= experts_used <= b.n_experts:
            raise ValueError(f"experts_used: {experts_used} of {b.n_experts} experts")
        b.n_ropes, b.rope_half = self.inv_freq.shape
        b.eps, b.embedding_scale, b.residual_scale, b.logit_softcap = rms_eps, embedding_scale, residual_scale, logit_softcap
        b.activation = ACT_GELU if ffn_activation == "gelu" else ACT_SILU
        if n_heads % n_kv_heads or 2 * b.rope_half > head_dim:
            raise ValueError(f"heads: {n_heads} query heads, {n_kv_heads} KV heads, head_dim {head_dim}, rotated {2 * b.rope_half}")
        if self.rope_factors.shape != (b.n_ropes,):
            raise ValueError(f"rope_factors: shape {self.rope_factors.shape}, must be ({b.n_ropes},)")
        if self.head.shape != (self.vocab_size, b.hidden) or self.head_norm.shape != (b.hidden,):
            raise ValueError(f"head: shape {self.head.shape} with norm {self.head_norm.shape}, must be ({self.vocab_size}, {b.hidden})")
        self.weights = <layer_weights *>pkv_alloc(b.n_layers * sizeof(layer_weights))
        n_plain = b.n_layers * COUNTERS_PER_LAYER + 2
        self.n_counters = n_plain + (b.n_layers * MATMULS_PER_LAYER + 1) * self.pool.n_threads
        self.counters = <int64_t *>pkv_alloc(self.n_counters * sizeof(int64_t))
        self.experts = <expert_weights *>pkv_alloc(max(b.n_layers * b.n_experts, <int64_t>1) * sizeof(expert_weights))
        if self.weights == NULL or self.counters == NULL or self.experts == NULL:
            raise MemoryError("the system refused memory for a model")
        b.layers, b.embedding, b.head = self.weights, &self.embedding.w, &self.head.w
        b.head_norm, b.rope_factors = pointer(self.head_norm), pointer(self.rope_factors)
        b.inv_freq = <const double *><size_t>self.inv_freq.ctypes.data
        b.pool = self.pool.ptr
        b.counters, b.taken = self.counters, self.counters + <int64_t>n_plain
        b.x_stride = pkv_round_up(b.hidden, 16)
        b.k_offset = pkv_round_up(n_heads * head_dim, 16)
        b.v_offset = b.k_offset + pkv_round_up(n_kv_heads * head_dim, 16)
        b.qkv_stride = b.v_offset + pkv_round_up(n_kv_heads * head_dim, 16)
        b.qk_norm_size = -1
        for i in range(b.n_layers):
            layer = self.layers[i]
            self.check_layer(i, layer)
            self.set_layer(i, layer)
            self.weights[i].attention = self.attention_of(i, layer.window)
        b.deferred = residual_scale != 1 or any(
            norm is not None for layer in self.layers for norm in (layer.post_attn_norm, layer.post_ffn_norm))
        for i in range(b.n_attentions):
            b.attentions[i].view.group = n_heads // n_kv_heads
            b.attentions[i].view.scale = 1.0 / float(np.sqrt(np.float64(head_dim))) if attention_scale is None else attention_scale
            b.attentions[i].view.softcap = attention_softcap

    cdef int check_layer(self, int64_t i, Layer layer) except -1:
        """ValueError unless the shapes of layer i are those of the model."""
        cdef batch *b = &self.b
        cdef int64_t q = b.n_heads * b.head_dim
        cdef int64_t kv = b.n_kv_heads * b.head_dim
        ffn = {"gate": (b.ffn, b.hidden), "up": (b.ffn, b.hidden), "down": (b.hidden, b.ffn)}
        matrices = {"q": (q, b.hidden), "k": (kv, b.hidden), "v": (kv, b.hidden), "o": (b.hidden, q)}
        matrices |= {"router": (b.n_experts, b.hidden)} if b.n_experts else ffn
        vectors = {"attn_norm": b.hidden, "ffn_norm": b.hidden, "post_attn_norm": b.hidden, "post_ffn_norm": b.hidden, "q_bias": q,
                   "k_bias": kv, "v_bias": kv}
        if layer.q_norm is not None:
            size = b.head_dim if layer.q_norm.shape == (b.head_dim,) else 0
            if b.qk_norm_size >= 0 and size != b.qk_norm_size:
                raise ValueError(f"layer {i} q_norm: shape {layer.q_norm.shape}, layers must be alike")
            b.qk_norm_size = size
            vectors |= {"q_norm": size or q, "k_norm": size or kv}
        if len(layer.experts) != b.n_experts:
            raise ValueError(f"layer {i} experts: {len(layer.experts)}, must be {b.n_experts}")
        for n, expert in enumerate(layer.experts):
            for (name, shape), matrix in zip(ffn.items(), expert):
                if matrix.shape != shape:
                    raise ValueError(f"layer {i} expert {n} {name}: shape {matrix.shape}, must be {shape}")
        for name, shape in matrices.items():
            if getattr(layer, name).shape != shape:
                raise ValueError(f"layer {i} {name}: shape {getattr(layer, name).shape}, must be {shape}")
        for name, size in vectors.items():
            vector = getattr(layer, name)
            if vector is not None and vector.shape != (size,):
                raise ValueError(f"layer {i} {name}: shape {vector.shape}, must be ({size},)")
        if len({bias is None for bias in (layer.q_bias, layer.k_bias, layer.v_bias)}) > 1 or (layer.q_norm is None) != (layer.k_norm is None):
            raise ValueError(f"layer {i}: biases of q, k and v, and norms of q and k, come together")
        if layer.rope is not None and not 0 <= layer.rope < b.n_ropes:
            raise ValueError(f"layer {i} rope: {layer.rope} is not in [0, {b.n_ropes})")
        if layer.window < 0:
            raise ValueError(f"layer {i} window: {layer.window} is negative")
        return 0

    cdef int set_layer(self, int64_t i, Layer layer) except -1:
        """Point at the weights of layer i, checked."""
        cdef layer_weights *w = &self.weights[i]
        cdef expert_weights *expert
        cdef PackedMatrix gate, up, down
        w.q, w.k, w.v, w.o = &layer.q.w, &layer.k.w, &layer.v.w, &layer.o.w
        w.router, w.quantised_experts = NULL, False
        if layer.router is None:
            w.ffn.gate, w.ffn.up, w.ffn.down = &layer.gate.w, &layer.up.w, &layer.down.w
        else:
            w.router, w.experts = &layer.router.w, self.experts + i * self.b.n_experts
            expert = self.experts + i * self.b.n_experts
            for matrices in layer.experts:
                gate, up, down = matrices
                expert.gate, expert.up, expert.down = &gate.w, &up.w, &down.w
                w.quantised_experts |= is_quantised(expert.gate) or is_quantised(expert.up) or is_quantised(expert.down)
                expert += 1
        w.attn_norm, w.post_attn_norm = pointer(layer.attn_norm), pointer(layer.post_attn_norm)
        w.ffn_norm, w.post_ffn_norm = pointer(layer.ffn_norm), pointer(layer.post_ffn_norm)
        w.q_norm, w.k_norm = pointer(layer.q_norm), pointer(layer.k_norm)
        w.rope = -1 if layer.rope is None else layer.rope
        w.qkv_bias = NULL
        if layer.q_bias is not None:
            bias = np.zeros(self.b.qkv_stride, np.float32)
            for start, part in ((0, layer.q_bias), (self.b.k_offset, layer.k_bias), (self.b.v_offset, layer.v_bias)):
                bias[start : start + len(part)] = part
            self.biases.append(bias)
            w.qkv_bias = pointer(bias)
        return 0

    cdef int64_t attention_of(self, int64_t i, int64_t window) except -1:
        """Index of the attention with this window, layer i's."""
        cdef int64_t kind
        for kind in range(self.b.n_attentions):
            if self.b.attentions[kind].view.window == window:
                return kind
        if self.b.n_attentions == MAX_ATTENTIONS:
            raise ValueError(f"layer {i} window: {window} is one more than the {MAX_ATTENTIONS} different windows of a model")
        self.b.attentions[self.b.n_attentions].view.window = window
        self.b.n_attentions += 1
        return self.b.n_attentions - 1

    def __dealloc__(self):
        self.release_workspace()
        pkv_release(self.weights)
        pkv_release(self.experts)
        pkv_release(self.counters)

    cdef void release_workspace(self):
        cdef int64_t i
        pkv_release(self.b.x)
        pkv_release(self.b.scratch)
        pkv_release(self.routes)
        self.b.x, self.b.scratch, self.routes = NULL, NULL, NULL
        act_release(&self.b.gathered)
        act_release(&self.b.normed)
        act_release(&self.b.attended)
        act_release(&self.b.product)
        for i in range(self.b.n_attentions):
            plan_release(&self.b.attentions[i].plan)
        self.max_rows = self.scratch_bytes = 0

    def close(self) -> None:
        """Free the workspace; it comes back at the next run. The weights go when the object dies. RuntimeError while running."""
        if not take(&self.running):
            raise RuntimeError("close: the model is running, in another thread")
        self.release_workspace()
        give_back(&self.running)

    @property
    def vocab_padded(self) -> int:
        """Columns of a logits row: vocab_size rounded up to 16."""
        return self.head.w.n_panels * 16

    @property
    def hidden_size(self) -> int:
        """Columns of a hidden state."""
        return self.b.hidden

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
        matrices = {id(m): m.nbytes for layer in self.layers for m in layer.matrices}
        return sum({**matrices, id(self.embedding): self.embedding.nbytes, id(self.head): self.head.nbytes}.values())

    def profile_seconds(self) -> dict:
        """Seconds of each operation since the last call, while `profile` was on; the clock runs on thread 0 from barrier to barrier."""
        result = {OPERATIONS[i]: self.profile_ns[i] / 1e9 for i in range(N_OPS)}
        memset(self.profile_ns, 0, sizeof(self.profile_ns))
        return result

    cdef int reserve(self, int64_t n_rows, int64_t n_spans) except -1:
        """Workspace for a step; grows, never shrinks."""
        cdef batch *b = &self.b
        cdef int64_t n_slots = n_rows * max(b.n_used, <int64_t>1)
        cdef int64_t floats = n_rows * ((2 if b.deferred else 1) * b.x_stride + b.qkv_stride + 2 * b.n_ropes * b.rope_half)
        cdef int64_t scratch = max(scratch_floats(&b.attentions[0].view), <int64_t>2 * FFN_TOKENS * UNIT, b.n_heads * b.head_dim)
        cdef int64_t i
        scratch = pkv_round_up(scratch, 16) + 16
        if n_rows > self.max_rows:
            self.release_workspace()
            b.x = <float *>pkv_alloc(floats * sizeof(float))
            if b.n_experts:
                self.routes = pkv_alloc(experts_bytes(b, n_rows))
            if (b.x == NULL or (b.n_experts and (self.routes == NULL or act_reserve(&b.gathered, n_slots, b.hidden)))
                    or act_reserve(&b.normed, n_rows, b.hidden) or act_reserve(&b.attended, n_rows, b.n_heads * b.head_dim)
                    or act_reserve(&b.product, n_slots, pkv_round_up(b.ffn, 32))):
                self.release_workspace()
                raise MemoryError(f"the system refused the workspace of a step of {n_rows} tokens")
            if b.n_experts:
                experts_place(b, self.routes, n_rows)
            b.qkv = b.x + n_rows * b.x_stride
            b.angles = b.qkv + n_rows * b.qkv_stride
            b.branch = b.angles + 2 * n_rows * b.n_ropes * b.rope_half if b.deferred else NULL
            self.max_rows = n_rows
        for i in range(b.n_attentions):
            if plan_spans(&b.attentions[i].plan, n_spans):
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

    def run(self, PagedKVCache kv not None, seqs, token_ids, q_lens, logit_rows, logits, hidden=None) -> None:
        """Compute the last q_lens[i] tokens of each sequence: write their K and V, and logits of the rows asked for.

        kv          cache of this model's n_layers, n_kv_heads and head_dim
        seqs        list of distinct KVSequence of kv, each extended already by its q_lens[i] tokens, on pages no other sequence holds
        token_ids   int32 [sum(q_lens)], concatenated in order of seqs, in [0, vocab_size)
        q_lens      int32 [len(seqs)], each at least 1
        logit_rows  int32 [m], rows of token_ids, strictly ascending
        logits      float32 [m, vocab_padded], written; columns from vocab_size on are meaningless; None: not wanted. Beside `hidden` it
                    may have fewer rows: the logits of the first of logit_rows alone are computed then
        hidden      float32 [m, hidden_size], written with what the output head reads of those rows, behind the last norm; None: not wanted

        Releases the GIL; other threads must leave the sequences alone meanwhile. Raises BadInput naming what does not fit, with no K/V
        written, Tampered, MemoryError, and RuntimeError when the model is running already. The cache cannot be closed meanwhile.
        """
        if not take(&self.running):
            raise RuntimeError("run: the model is running already, in another thread")
        try:
            kv.hold()
            try:
                self.run_alone(kv, list(seqs), int32_array("token_ids", token_ids), int32_array("q_lens", q_lens),
                               int32_array("logit_rows", logit_rows), logits, hidden)
            finally:
                kv.let_go()
        finally:
            give_back(&self.running)

    cdef void attach(self, attention_view *v, const attention_view *cache):
        """Take the place of tiles from a cache, keep the arithmetic."""
        v.storage, v.page_stride, v.tile_bytes, v.format = cache.storage, cache.page_stride, cache.tile_bytes, cache.format
        v.n_kv_heads, v.head_dim, v.page_tokens = cache.n_kv_heads, cache.head_dim, cache.page_tokens

    cdef int run_alone(self, PagedKVCache kv, list seqs, ids, lens, rows, logits, hidden) except -1:
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
        b.n_gathered = len(rows)
        b.n_logits = 0 if logits is None else len(rows) if hidden is None else min(len(rows), len(logits))
        for name, out, n, width in (("logits", logits, b.n_logits, self.vocab_padded), ("hidden", hidden, b.n_gathered, b.hidden)):
            if out is not None and (out.dtype != np.float32 or out.shape != (n, width)):
                raise BadInput(f"{name}: {out.dtype} {out.shape} is not float32 ({n}, {width})")
        if hidden is not None and not hidden.flags.carray:
            raise BadInput("hidden: not contiguous, or not writable")
        for i in range(b.n_attentions):
            self.attach(&b.attentions[i].view, &kv.view)
        self.reserve(len(ids), len(seqs))
        row = 0
        for i in range(len(seqs)):
            if not isinstance(seqs[i], KVSequence) or (<KVSequence>seqs[i]).arena is not kv:
                raise BadInput(f"seqs: entry {i} is no sequence of this cache")
            seq = seqs[i]
            seq.cache()
            s = &b.attentions[0].plan.spans[i]
            s.n_tokens = lens[i]
            s.position = seq.ptr.n_tokens - s.n_tokens
            s.table = seq.ptr.page_indices
            s.row = row
            if s.position < 0:
                raise BadInput(f"q_lens: {lens[i]} tokens for entry {i}, a sequence of {seq.ptr.n_tokens}")
            for page in range(s.position // kv.view.page_tokens, (s.position + s.n_tokens - 1) // kv.view.page_tokens + 1):
                if kv.ptr.pages[s.table[page]].refcount != 1 or kv.ptr.pages[s.table[page]].indexed:
                    raise BadInput(f"seqs: entry {i} shares page {s.table[page]}, which this step writes; extend after sharing")
            row += s.n_tokens
        for i in range(b.n_attentions):
            if i > 0:
                memcpy(b.attentions[i].plan.spans, b.attentions[0].plan.spans, len(seqs) * sizeof(attention_span))
            if plan_units(&b.attentions[i].plan, &b.attentions[i].view):
                raise MemoryError(f"the system refused the workspace of a step of {row} tokens")
        b.n_rows = row
        b.logits_stride = self.vocab_padded
        b.nanoseconds = self.profile_ns if self.profile else NULL
        memset(self.counters, 0, self.n_counters * sizeof(int64_t))
        none = np.empty(1, np.float32)
        PyObject_GetBuffer(none if logits is None else logits, &buffer, PyBUF_C_CONTIGUOUS | PyBUF_WRITABLE)
        try:
            b.tokens = <const int32_t *><size_t>ids.ctypes.data
            b.logit_rows = <const int32_t *><size_t>rows.ctypes.data
            b.logits = NULL if logits is None else <float *>buffer.buf
            with nogil:
                status = pool_run(b.pool, &step, b)
        finally:
            PyBuffer_Release(&buffer)
        if status:
            raise MemoryError("the system refused a worker thread")
        if hidden is not None:
            for i in range(len(rows)):
                memcpy(<float *><size_t>hidden.ctypes.data + i * b.hidden, b.normed.x + i * b.normed.act.x_stride, b.hidden * sizeof(float))
        return 0
