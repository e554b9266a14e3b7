from libc.stdint cimport int32_t, int64_t, uint32_t, uint64_t

from pagedkv.core._kernels cimport ThreadPool


cdef enum RowStatus:
    ROW_OK = 0
    ROW_NOT_FINITE = 1      # a NaN or +inf among the logits, or every candidate banned


cdef struct Row:
    # What one output asks of the sampler.
    float inv_temperature   # 0: greedy
    float min_p
    double top_p
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
    # What the last draw found.
    int32_t status, token, rank
    float logprob
    int64_t n_logprobs      # -1: neither rank nor best tokens are wanted
    int64_t n_top
    int32_t *top_ids        # [n_logprobs]
    float *top_logprobs     # [n_logprobs]


cdef struct Scratch:
    # Work space of one thread for one row, [vocab] where nothing else is said.
    float *logits           # logits after bias and penalties
    float *block_max        # [ceil(vocab / PKV_SCAN)] maxima of the logits in `blocks_of`
    const float *blocks_of  # NULL: of none
    float *weights          # exp((x - max) / temperature) by token id
    float *sorted_logits
    float *sorted_weights
    double *cumulative
    uint64_t *candidates    # (~ordered logit bits) << 32 | id: ascending is (logit descending, id ascending)
    uint64_t *swap


cdef class SamplingState:
    cdef Row row
    cdef dict slots
    cdef readonly int64_t vocab_size
    cdef int count(self, int32_t token, int32_t times) except -1


cdef struct SampleJob:
    # One call of Sampler.sample for the threads of a pool.
    Row **rows
    const float **logits
    Scratch *scratch        # [n_threads]
    int64_t n_rows, vocab_size
    int64_t next_row        # claimed atomically
    int n_threads


cdef class Sampler:
    cdef ThreadPool pool
    cdef Scratch *scratch   # [n_threads]
    cdef readonly int64_t vocab_size
    cdef readonly int n_threads
    cdef int open(self, logits, Py_buffer *view) except -1
