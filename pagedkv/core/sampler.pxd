from libc.stdint cimport int32_t, int64_t, uint32_t, uint64_t

from pagedkv.core._kernels cimport ThreadPool
from pagedkv.core.sampling_state cimport Row


cdef struct Scratch:
    # Work space of one thread for one row, [vocab] where nothing else is said.
    float *logits           # logits after bias, penalties and bans
    float *block_max        # [ceil(vocab / PKV_SCAN)] maxima of the logits in `blocks_of`
    const float *blocks_of  # NULL: of none
    float *weights          # exp((x - max) / temperature) by token id
    float *sorted_logits
    float *sorted_weights
    double *cumulative      # [n_kept] sums of the candidates' weights
    uint64_t *candidates    # (~ordered logit bits) << 32 | id: ascending is (logit descending, id ascending)
    uint64_t *swap
    # Candidates of the row being drawn from.
    int64_t n_found         # gathered into `candidates`, in order
    int64_t n_kept          # of them within min_p and top_k
    int band                # the next one to gather
    double sum              # weight of the kept ones


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
    cdef int32_t drawing    # one call at a time has the scratch
    cdef int sample_alone(self, logits, states, rows) except -1
    cdef list score_alone(self, logits, rows, targets, int64_t n_logprobs)
    cdef int open(self, logits, Py_buffer *view) except -1
