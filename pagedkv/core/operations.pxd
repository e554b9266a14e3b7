"""The operations of a transformer step: what one works on, and each of them."""

from libc.stdint cimport int32_t, int64_t

from pagedkv.core._kernels cimport *
from pagedkv.core.attention cimport attention_plan, attention_span, attention_view
from pagedkv.core.matmul cimport act_buffer

cdef enum:
    UNIT = 32              # feed-forward rows computed together: one quantisation block of the product
    FFN_TOKENS = 32        # tokens of one pass through such a unit
    MAX_ATTENTIONS = 2     # different windows of one model

cdef enum ffn_gate:
    ACT_SILU, ACT_GELU

# One feed-forward network.
cdef struct expert_weights:
    const pkv_weight *gate
    const pkv_weight *up
    const pkv_weight *down

# Weights of one layer. NULL stands for an operation the architecture does not have.
cdef struct layer_weights:
    const pkv_weight *q
    const pkv_weight *k
    const pkv_weight *v
    const pkv_weight *o
    expert_weights ffn             # the one network of a layer without experts
    const pkv_weight *router       # NULL: no experts
    const expert_weights *experts
    bint quantised_experts         # any matrix of any
    const float *attn_norm         # [hidden] before attention
    const float *post_attn_norm    # [hidden] of what attention adds
    const float *ffn_norm          # [hidden] before the feed-forward network
    const float *post_ffn_norm     # [hidden] of what it adds
    const float *qkv_bias          # [qkv_stride], as a row of batch.qkv
    const float *q_norm            # [qk_norm_size] per head, or [heads * head_dim]
    const float *k_norm
    int64_t rope                   # rotation table, -1: none
    int64_t attention              # index of batch.attentions

# One way to attend, shared by the layers of the same window.
cdef struct attention_kind:
    attention_view view
    attention_plan plan

cdef struct batch:
    # the model
    const layer_weights *layers
    const pkv_weight *embedding
    const pkv_weight *head
    const float *head_norm
    const double *inv_freq         # [n_ropes, rope_half]
    const float *rope_factors      # [n_ropes] of cosines and sines
    int64_t n_layers, hidden, n_heads, n_kv_heads, head_dim, ffn, n_ropes, rope_half
    int64_t qk_norm_size           # head_dim, or 0: all heads together
    float eps, embedding_scale, residual_scale, logit_softcap
    ffn_gate activation
    bint deferred                  # what a layer adds to x is changed first: it goes through `branch`
    # where rows live: [n_rows, stride] each
    float *x                       # residual stream
    float *branch                  # output of attention or feed-forward, not in x yet
    float *qkv                     # query, key, value heads
    float *angles                  # [n_ropes, 2 * rope_half] cosines and sines
    int64_t x_stride, qkv_stride, k_offset, v_offset
    act_buffer normed              # input of qkv, gate/up and head
    act_buffer attended
    act_buffer product             # activation(gate) * up
    # experts
    int64_t n_experts, n_used      # n_used of each row
    bint shares_of_all             # shares are those of a softmax over all experts, not over the chosen ones
    int64_t router_stride
    float *router_logits           # [n_rows, router_stride]
    int32_t *chosen                # [n_rows, n_used] ascending
    float *shares                  # [n_rows, n_used]
    int32_t *slot_of               # [n_rows, n_used] where the row stands among the rows gathered by expert
    int32_t *row_of                # [n_rows * n_used] the row of a slot
    int32_t *first                 # [n_experts + 1] slots of an expert
    int32_t *next_slot             # [n_experts]
    int32_t *active                # [n_active] experts that any row chose
    int64_t n_active
    float *slot_out                # [n_rows * n_used, x_stride] what experts return
    act_buffer gathered            # normed rows by slot
    # the step
    attention_kind attentions[MAX_ATTENTIONS]
    int64_t n_attentions
    const int32_t *tokens
    const int32_t *logit_rows
    float *logits
    int64_t n_rows, n_gathered, n_logits, logits_stride   # n_gathered: of logit_rows, the first n_logits of them for the head
    # work sharing
    pkv_pool *pool
    int64_t *counters       # one for each operation
    int64_t *taken          # n_threads for each matmul
    float *scratch
    int64_t scratch_stride
    int64_t *nanoseconds           # of each operation on thread 0, or NULL

cdef void embed(const batch *b, int64_t *counter, int n_threads) noexcept nogil
cdef void norm(batch *b, bint pending, const float *post, const float *weight, bint gather, int64_t n_rows, bint quantised,
               int64_t *counter, int n_threads) noexcept nogil
cdef void rope_and_store(batch *b, int64_t layer, float *scratch, int64_t *counter, int n_threads) noexcept nogil
cdef void quantise_rows(act_buffer *rows, int64_t n_rows, int64_t *counter, int n_threads) noexcept nogil
cdef void gate_up_unit(batch *b, const act_buffer *x, const expert_weights *w, float *scratch, int64_t unit, int64_t start, int64_t n_rows,
                       bint quantised, bint more) noexcept nogil
cdef void gate_up(batch *b, const layer_weights *w, float *scratch, int64_t *taken, int thread, int n_threads) noexcept nogil
cdef void head(batch *b, int64_t *taken, int thread, int n_threads) noexcept nogil
