from libc.stdint cimport int32_t, int64_t, uint32_t, uint64_t


cdef enum RowStatus:
    ROW_OK = 0
    ROW_NOT_FINITE = 1      # a NaN or +inf among the logits, or nothing but -inf
    ROW_BANNED = 2          # no token is left


cdef struct Row:
    # What one output asks of the sampler.
    float inv_temperature   # 0: greedy
    float min_p
    double top_p, typical_p
    int32_t top_k           # 0: all
    int32_t min_tokens
    float presence, frequency, repetition
    uint64_t seed
    uint32_t index          # which of the request's n outputs
    uint32_t position       # tokens accepted so far
    int64_t n_bias, n_stops, n_counts, cap_counts
    int32_t *bias_ids       # [n_bias]
    float *bias             # [n_bias]
    int32_t *stops          # [n_stops]
    int32_t *count_ids      # [n_counts] tokens of prompt and output, each once
    int32_t *counts         # [n_counts] times in the output, 0: only in the prompt
    uint32_t *allowed       # [ceil(vocab / 32)] tokens that may be drawn, a bit each; NULL: all
    const uint32_t *mask    # the same for the next draw alone, lent by the state's mask_view
    # What the last draw found.
    int32_t status, token, rank
    float logprob
    int64_t n_logprobs      # -1: neither rank nor best tokens are wanted
    int64_t n_top
    int32_t *top_ids        # [n_logprobs]
    float *top_logprobs     # [n_logprobs]


cdef class SamplingState:
    cdef Row row
    cdef dict slots
    cdef Py_buffer mask_view  # of what set_mask() was given; buf NULL: nothing
    cdef readonly int64_t vocab_size
    cdef int32_t in_use       # by one call at a time: a draw, accept or set_mask
    cdef int enter(self, str call) except -1
    cdef void drop_mask(self) noexcept
    cdef int count(self, int32_t token, int32_t times) except -1


cdef void *allocate(int64_t n_bytes) except NULL
