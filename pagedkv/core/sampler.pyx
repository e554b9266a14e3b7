"""Drawing tokens from rows of logits, bit for bit the same on every machine and in every batch.

A draw depends on its own row of logits, its parameters and (seed, index, position) alone: the random number is block
(position, index) of a Philox 4x32-10 stream keyed by the seed. Candidates are ordered by (logit descending, token id
ascending) and their weights exp((x - max) / temperature) are summed in that order in double precision. Totals over the
whole vocabulary (without top-k and min-p, and for logprobs) are the softmax kernel's float32 sums of 1024 token ids
each, added in double in ascending order. Candidates are found in bands of falling logits, so the vocabulary is sorted
only as far as the draw has to look.

Typical sampling (Meister et al., 2022) comes last: a run of the candidates that the other cuts have left. With weights
w = exp(s) of total Z, a token's surprise is log Z - s and the entropy log Z - E[s], so their distance is |s - E[s]|, and
E[s] is one double sum in the order of the total.
"""

cimport cython
from cpython.buffer cimport (
    PyBUF_C_CONTIGUOUS, PyBUF_FORMAT, PyObject_GetBuffer, PyBuffer_Release,
)
from libc.math cimport INFINITY
from libc.stdint cimport int32_t, int64_t, uint32_t, uint64_t
from libc.stdlib cimport free, malloc
from libc.string cimport memcpy

from pagedkv.core._kernels cimport ThreadPool, claim, float_enter, float_leave, kern, log_double, pool_run
from pagedkv.core.exclusive cimport give_back, take
from pagedkv.core.sampling_state cimport ROW_BANNED, ROW_NOT_FINITE, ROW_OK, Row, SamplingState, allocate

cdef extern from "<float.h>":
    const float FLT_MAX

cdef extern from "pkv_sampling.h" nogil:
    const int PKV_SCAN
    int64_t pkv_gather_band(uint64_t *out, const float *x, const float *block_max, int64_t n, float low, float high) noexcept
    void pkv_sort_candidates(uint64_t *a, uint64_t *swap, int64_t n) noexcept
    int64_t pkv_rank(const float *x, int64_t n, int64_t token) noexcept
    void pkv_philox(uint32_t *counter, uint32_t k0, uint32_t k1) noexcept


cdef enum:
    MAX_THREADS = 8
    SUM_LENGTH = 1024
    N_BANDS = 6

cdef float[N_BANDS] BAND_DEPTH = [3, 6, 9, 13, 20, INFINITY]


cdef double uniform(uint64_t seed, uint32_t index, uint32_t position) noexcept nogil:
    """53 random bits as a double in [0, 1)."""
    cdef uint32_t block[4]
    block[0], block[1], block[2], block[3] = position, index, 0, 0
    pkv_philox(block, <uint32_t>seed, <uint32_t>(seed >> 32))
    return ((block[0] >> 5) * 67108864.0 + (block[1] >> 6)) / 9007199254740992.0


cdef float maximum(Scratch *s, const float *x, int64_t n) noexcept nogil:
    """The largest of x[n], NaN if any is; leaves the maxima of x's blocks in s."""
    cdef int64_t block, n_blocks = (n + PKV_SCAN - 1) // PKV_SCAN
    for block in range(n_blocks):
        s.block_max[block] = kern.vmax(x + block * PKV_SCAN, min(<int64_t>PKV_SCAN, n - block * PKV_SCAN))
    s.blocks_of = x
    return kern.vmax(s.block_max, n_blocks)


cdef double weigh(Scratch *s, const float *x, int64_t n, float top, float inv_temperature) noexcept nogil:
    """Set s.weights to exp((x[n] - top) * inv_temperature); returns their total."""
    cdef double total = 0
    cdef int64_t block, start
    for block in range((n + SUM_LENGTH - 1) // SUM_LENGTH):
        start = block * SUM_LENGTH
        total += kern.softmax(s.weights + start, x + start, min(<int64_t>SUM_LENGTH, n - start), top, inv_temperature)
    return total


cdef int64_t next_band(Scratch *s, const float *x, int64_t n, int64_t found, int band, float top,
                       float inv_temperature) noexcept nogil:
    """Append the candidates of one band of logits to the `found` ones in order; returns the new count. A band reaches down to the weight
    exp(-BAND_DEPTH), the last one to everything above -inf; where a band ends never changes the order."""
    cdef float high = INFINITY if band == 0 else top - BAND_DEPTH[band - 1] / inv_temperature
    cdef float low = max(top - BAND_DEPTH[band] / inv_temperature, -FLT_MAX)
    cdef int64_t more
    if s.blocks_of != x:
        maximum(s, x, n)
    more = pkv_gather_band(s.candidates + found, x, s.block_max, n, low, high)
    pkv_sort_candidates(s.candidates + found, s.swap, more)
    return found + more


cdef bint more_candidates(Row *row, Scratch *s, const float *x, int64_t n, float top, bint limited) noexcept nogil:
    """Take the next band of candidates into s, as far as min_p and top_k let it; False when all have been taken.
    limited: weights are worked out here; otherwise weigh() has left them in s.weights."""
    cdef int64_t fresh = s.n_found, keep = row.top_k if 0 < row.top_k < n else n, i
    cdef double weight
    if s.band == N_BANDS:
        return False
    s.n_found = next_band(s, x, n, fresh, s.band, top, row.inv_temperature)
    s.band += 1
    if limited and s.n_found > fresh:
        for i in range(fresh, s.n_found):
            s.sorted_logits[i] = x[<uint32_t>s.candidates[i]]
        kern.softmax(s.sorted_weights + fresh, s.sorted_logits + fresh, s.n_found - fresh, top, row.inv_temperature)
    for i in range(fresh, s.n_found):
        weight = s.sorted_weights[i] if limited else s.weights[<uint32_t>s.candidates[i]]
        if s.n_kept == keep or weight < row.min_p or weight == 0:
            s.band = N_BANDS
            break
        s.sum += weight
        s.cumulative[s.n_kept] = s.sum
        s.n_kept += 1
    return True


cdef double score(const Row *row, const float *x, int64_t token, float top) noexcept nogil:
    """Natural logarithm of the token's weight."""
    return (<double>x[token] - <double>top) * <double>row.inv_temperature


cdef double mean_score(Row *row, Scratch *s, const float *x, int64_t n, float top, double total, bint limited,
                       bint whole) noexcept nogil:
    """The mean of score() under the distribution: over the whole vocabulary by token id, or the kept candidates in
    their order. The entropy is log(total) less this, and a token's surprise log(total) less its score."""
    cdef double moment = 0, weight
    cdef int64_t i
    if whole:
        for i in range(n):
            if s.weights[i] > 0:
                moment += s.weights[i] * score(row, x, i, top)
    else:
        for i in range(s.n_kept):
            weight = s.sorted_weights[i] if limited else s.weights[<uint32_t>s.candidates[i]]
            moment += weight * score(row, x, <uint32_t>s.candidates[i], top)
    return moment / total


cdef int64_t typical_window(Row *row, Scratch *s, const float *x, int64_t n, float top, double total, bint limited,
                            bint whole, int64_t *stop) noexcept nogil:
    """The candidates [returned, *stop) whose surprise is nearest the entropy: grown outward from there in the candidate
    order, of two equally far the more likely first, until they hold typical_p of the total.
    whole: candidates are still to be gathered, out of the whole vocabulary."""
    cdef double mean = mean_score(row, s, x, n, top, total, limited, whole)
    cdef double above, below
    cdef int64_t first, last = 0
    while True:
        while last < s.n_kept and score(row, x, <uint32_t>s.candidates[last], top) >= mean:
            last += 1
        if last < s.n_kept or not (whole and more_candidates(row, s, x, n, top, False)):
            break
    first = last
    while first == last or s.cumulative[last - 1] - (s.cumulative[first - 1] if first else 0) < row.typical_p * total:
        while last == s.n_kept and whole and more_candidates(row, s, x, n, top, False):
            pass
        above = score(row, x, <uint32_t>s.candidates[first - 1], top) - mean if first else INFINITY
        below = mean - score(row, x, <uint32_t>s.candidates[last], top) if last < s.n_kept else INFINITY
        if first == 0 and last == s.n_kept:
            break
        if above <= below:
            first -= 1
        else:
            last += 1
    stop[0] = last
    return first


cdef int32_t draw(Row *row, Scratch *s, const float *x, int64_t n, float top, double *full_sum) noexcept nogil:
    """A token id drawn from x[n]. Without top-k and min-p, *full_sum is set to the total of all weights."""
    cdef bint limited = row.min_p > 0 or 0 < row.top_k < n
    cdef bint whole = not limited and not row.top_p < 1
    cdef int64_t first = 0, stop, i
    cdef double u = uniform(row.seed, row.index, row.position)
    cdef double total = 0, enough = INFINITY, before = 0
    s.n_found = s.n_kept = s.band = 0
    s.sum = 0
    if not limited:
        total = weigh(s, x, n, top, row.inv_temperature)
        full_sum[0] = total
        enough = row.top_p * total if row.top_p < 1 else u * total if not row.typical_p < 1 else 0
    while more_candidates(row, s, x, n, top, limited):
        if s.sum > enough:
            break
    if limited:
        total = s.sum
    if row.top_p < 1:
        for i in range(s.n_kept):
            if s.cumulative[i] >= row.top_p * total:
                s.n_kept = i + 1
                break
        total = s.cumulative[s.n_kept - 1]
    stop = s.n_kept
    if row.typical_p < 1:
        first = typical_window(row, s, x, n, top, total, limited, whole, &stop)
        before = s.cumulative[first - 1] if first else 0
        total = s.cumulative[stop - 1] - before
    for i in range(first, stop - 1):
        if s.cumulative[i] > before + u * total:
            return <int32_t>s.candidates[i]
    return <int32_t>s.candidates[stop - 1]


cdef void ban(float *y, const uint32_t *allowed, int64_t n) noexcept nogil:
    """Set y[n] to -inf wherever the bit is not set."""
    cdef int64_t word, i
    cdef uint32_t banned
    for word in range((n + 31) // 32):
        banned = ~allowed[word]
        if banned:
            for i in range(32 * word, min(n, 32 * word + 32)):
                if banned >> (i & 31) & 1:
                    y[i] = -INFINITY


cdef bint adjust(Row *row, Scratch *s, const float *x, int64_t n) noexcept nogil:
    """Copy x to s.logits with bias, penalties and bans applied; False (and no copy) when there is nothing to apply."""
    cdef bint banned = row.n_stops > 0 and row.position < <uint32_t>row.min_tokens
    cdef bint masked = row.allowed != NULL or row.mask != NULL
    cdef float *y = s.logits
    cdef float value
    cdef int64_t i
    if row.n_counts == 0 and row.n_bias == 0 and not banned and not masked:
        return False
    memcpy(y, x, n * sizeof(float))
    for i in range(row.n_bias):
        y[row.bias_ids[i]] += row.bias[i]
    for i in range(row.n_counts):
        value = y[row.count_ids[i]]
        if row.repetition != 1:
            value = value / row.repetition if value > 0 else value * row.repetition
        if row.counts[i] > 0:
            value -= row.frequency * row.counts[i]
            value -= row.presence
        y[row.count_ids[i]] = value
    if banned:
        for i in range(row.n_stops):
            y[row.stops[i]] = -INFINITY
    if row.allowed != NULL:
        ban(y, row.allowed, n)
    if row.mask != NULL:
        ban(y, row.mask, n)
    return True


cdef float finite(double value) noexcept nogil:
    """A log-probability as float32; one too small for it becomes the lowest finite number."""
    return <float>max(value, <double>-FLT_MAX)


cdef void report(Row *row, Scratch *s, const float *x, int64_t n, int32_t token, float top,
                 double weight_sum) noexcept nogil:
    """Set the row's logprob (and rank and best tokens if wanted) of `token` under the raw logits x[n].
    weight_sum: the total of exp(x - top), or 0 if it has not been computed."""
    cdef int64_t found = 0, i
    cdef double base
    cdef int band
    if weight_sum == 0:
        weight_sum = weigh(s, x, n, top, 1)
    base = <double>top + log_double(weight_sum)
    row.token = token
    row.logprob = finite(<double>x[token] - base)
    if row.n_logprobs < 0:
        return
    row.rank = <int32_t>pkv_rank(x, n, token) + 1
    for band in range(N_BANDS):
        if found >= row.n_logprobs:
            break
        found = next_band(s, x, n, found, band, top, 1)
    row.n_top = min(found, row.n_logprobs)
    for i in range(row.n_top):
        row.top_ids[i] = <int32_t>s.candidates[i]
        row.top_logprobs[i] = finite(<double>x[row.top_ids[i]] - base)


cdef void sample_row(Row *row, Scratch *s, const float *x, int64_t n) noexcept nogil:
    """Draw the row's next token from the raw logits x[n] and report it; sets row.status."""
    cdef float top, raw_top = 0
    cdef double weight_sum = 0
    cdef const float *y = x
    cdef int64_t token = 0
    row.status = ROW_NOT_FINITE
    row.n_top = 0
    s.blocks_of = NULL
    if adjust(row, s, x, n):
        y = s.logits
        raw_top = kern.vmax(x, n)
        if not raw_top <= FLT_MAX:
            return
    if row.inv_temperature == 0:
        token = kern.argmax(y, n)
        if token < 0:
            return
        top = y[token]
    else:
        top = maximum(s, y, n)
    if y != x and top == -INFINITY and raw_top >= -FLT_MAX:
        row.status = ROW_BANNED
    if not -FLT_MAX <= top <= FLT_MAX:
        return
    if y == x:
        raw_top = top
    if row.inv_temperature != 0:
        token = draw(row, s, y, n, top, &weight_sum)
        if row.inv_temperature != 1 or y != x:
            weight_sum = 0
    row.status = ROW_OK
    report(row, s, x, n, <int32_t>token, raw_top, weight_sum)


cdef void sample_rows(void *arg, int thread, int n_threads) noexcept nogil:
    """Job of a thread pool: rows one by one, until none is left to claim."""
    cdef SampleJob *job = <SampleJob *>arg
    cdef int64_t stop = 0, i
    if thread >= job.n_threads:
        return
    i = claim(&job.next_row, job.n_rows, 1, &stop)
    while i < job.n_rows:
        sample_row(job.rows[i], job.scratch + thread, job.logits[i], job.vocab_size)
        i = claim(&job.next_row, job.n_rows, 1, &stop)


def philox4x32(counter, key):
    """One block of Philox 4x32-10: four 32-bit words from a counter of four and a key of two (as sequences of int)."""
    cdef uint32_t block[4]
    block[0], block[1], block[2], block[3] = counter
    k0, k1 = key
    pkv_philox(block, k0, k1)
    return block[0], block[1], block[2], block[3]


@cython.final
cdef class Sampler:
    """Draws one token for each of many rows in one call without the GIL. Holds the work space, so one call at a time: a
    second one, of another thread, is refused with RuntimeError.

    pool: a ThreadPool to share rows among (at most 8 of its threads), None: the caller alone. Which thread draws a row
    never changes it. Reserves 40 bytes per vocabulary entry and thread. Raises ValueError for a bad size, MemoryError.
    """

    def __cinit__(self, int64_t vocab_size, ThreadPool pool=None):
        cdef Scratch *s
        if not 1 <= vocab_size < 2**31:
            raise ValueError(f"vocab_size must be in [1, {2**31}), not {vocab_size}")
        self.vocab_size = vocab_size
        self.pool = pool
        self.n_threads = 1 if pool is None else min(MAX_THREADS, pool.n_threads)
        self.scratch = <Scratch *>allocate(self.n_threads * sizeof(Scratch))
        for i in range(self.n_threads):
            s = self.scratch + <int>i
            s.logits = <float *>allocate(vocab_size * sizeof(float))
            s.block_max = <float *>allocate((vocab_size // PKV_SCAN + 1) * sizeof(float))
            s.weights = <float *>allocate(vocab_size * sizeof(float))
            s.sorted_logits = <float *>allocate(vocab_size * sizeof(float))
            s.sorted_weights = <float *>allocate(vocab_size * sizeof(float))
            s.cumulative = <double *>allocate(vocab_size * sizeof(double))
            s.candidates = <uint64_t *>allocate(vocab_size * sizeof(uint64_t))
            s.swap = <uint64_t *>allocate(vocab_size * sizeof(uint64_t))

    def __dealloc__(self):
        cdef Scratch *s
        if self.scratch != NULL:
            for i in range(self.n_threads):
                s = self.scratch + <int>i
                free(s.logits)
                free(s.block_max)
                free(s.weights)
                free(s.sorted_logits)
                free(s.sorted_weights)
                free(s.cumulative)
                free(s.candidates)
                free(s.swap)
            free(self.scratch)

    cdef int open(self, logits, Py_buffer *view) except -1:
        """Acquire a C-contiguous float32 [m, >= vocab_size] buffer."""
        PyObject_GetBuffer(logits, view, PyBUF_C_CONTIGUOUS | PyBUF_FORMAT)
        if view.ndim != 2 or view.format[0] != c'f' or view.shape[1] < self.vocab_size:
            PyBuffer_Release(view)
            raise ValueError(f"logits must be float32 [m, n >= {self.vocab_size}] in C order")
        return 0

    def sample(self, logits, states, rows):
        """Draw a token for each state from its row of logits; results are left in the states (see SamplingState).

        logits: float32 [m, n >= vocab_size], C order, not changed; columns behind vocab_size are not read.
        states: SamplingStates, each at most once; rows: the row of each, repeats allowed. Releases the GIL. RuntimeError,
        with nothing drawn, when the sampler or a state is in use already.
        """
        if not take(&self.drawing):
            raise RuntimeError("sample: the sampler is in use, in another thread")
        try:
            self.sample_alone(logits, list(states), rows)
        finally:
            give_back(&self.drawing)

    cdef int sample_alone(self, logits, states, rows) except -1:
        cdef Py_buffer view
        cdef Row **todo
        cdef const float **sources
        cdef int64_t n = len(states), n_taken = 0, i, row
        cdef SampleJob job
        cdef uint64_t mode
        if len(rows) != n:
            raise ValueError(f"rows must name one row per state, not {len(rows)} for {n}")
        self.open(logits, &view)
        todo = <Row **>malloc((n + 1) * sizeof(Row *))
        sources = <const float **>malloc((n + 1) * sizeof(float *))
        try:
            if todo == NULL or sources == NULL:
                raise MemoryError("sampler rows")
            for i in range(n):
                row = rows[i]
                if not 0 <= row < view.shape[0]:
                    raise ValueError(f"rows must be in [0, {view.shape[0]}), not {row}")
                if (<SamplingState?>states[i]).vocab_size != self.vocab_size:
                    raise ValueError(f"states must be made for vocab_size {self.vocab_size}")
                todo[i] = &(<SamplingState>states[i]).row
                sources[i] = <const float *>view.buf + row * view.shape[1]
            for i in range(n):
                if not take(&(<SamplingState>states[i]).in_use):
                    raise RuntimeError(f"sample: states entry {i} is in use, in another thread or twice in this call")
                n_taken += 1
            job.rows, job.logits, job.scratch, job.n_threads = todo, sources, self.scratch, self.n_threads
            job.n_rows, job.vocab_size, job.next_row = n, self.vocab_size, 0
            with nogil:
                if n < 2 or self.n_threads == 1 or pool_run(self.pool.ptr, &sample_rows, &job):
                    mode = float_enter()
                    sample_rows(&job, 0, 1)
                    float_leave(mode)
        finally:
            for i in range(n_taken):
                give_back(&(<SamplingState>states[i]).in_use)
            free(todo)
            free(sources)
            PyBuffer_Release(&view)
        return 0

    def score(self, logits, rows, targets, int64_t n_logprobs):
        """What each target token's raw logits say: a list of (logprob, rank, [(id, logprob) of the n_logprobs best]),
        or None for a row that holds NaN or +inf and for a target at -inf. Arguments as in sample(); releases the GIL row by row.
        RuntimeError when the sampler is in use already."""
        if not take(&self.drawing):
            raise RuntimeError("score: the sampler is in use, in another thread")
        try:
            return self.score_alone(logits, rows, targets, n_logprobs)
        finally:
            give_back(&self.drawing)

    cdef list score_alone(self, logits, rows, targets, int64_t n_logprobs):
        cdef Py_buffer view
        cdef SamplingState state = SamplingState(self.vocab_size, logprobs=n_logprobs)
        cdef const float *x
        cdef int32_t token
        cdef int64_t row
        cdef bint usable
        cdef float top
        cdef uint64_t mode
        found = []
        self.open(logits, &view)
        try:
            for row, token in zip(rows, targets, strict=True):
                if not 0 <= row < view.shape[0]:
                    raise ValueError(f"rows must be in [0, {view.shape[0]}), not {row}")
                if not 0 <= token < self.vocab_size:
                    raise ValueError(f"targets must be in [0, {self.vocab_size}), not {token}")
                x = <const float *>view.buf + row * view.shape[1]
                with nogil:
                    mode = float_enter()
                    top = kern.vmax(x, self.vocab_size)
                    usable = -FLT_MAX <= top <= FLT_MAX and x[token] >= -FLT_MAX
                    if usable:
                        state.row.n_top = 0
                        self.scratch.blocks_of = NULL
                        report(&state.row, self.scratch, x, self.vocab_size, token, top, 0)
                    float_leave(mode)
                found.append((state.logprob, state.rank, state.top) if usable else None)
        finally:
            PyBuffer_Release(&view)
        return found
