"""What decides the next token of one output besides its logits: parameters, allowed tokens, random stream, penalties."""

cimport cython
from cpython.buffer cimport (
    PyBUF_C_CONTIGUOUS, PyBUF_FORMAT, PyObject_GetBuffer, PyBuffer_Release,
)
from libc.stdint cimport int32_t, int64_t, uint32_t, uint64_t
from libc.stdlib cimport calloc, free, realloc
from libc.string cimport memset

from pagedkv.core.exclusive cimport give_back, take


cdef void *allocate(int64_t n_bytes) except NULL:
    cdef void *memory = calloc(max(n_bytes, 1), 1)
    if memory == NULL:
        raise MemoryError(f"{n_bytes} bytes for the sampler")
    return memory


cdef int64_t mask_words(int64_t vocab_size) noexcept:
    return (vocab_size + 31) // 32


cdef int32_t *id_array(ids, int64_t vocab_size, field) except NULL:
    """The token ids as a fresh C array; ValueError for an id outside the vocabulary."""
    cdef int32_t *out = <int32_t *>allocate(len(ids) * sizeof(int32_t))
    for i, token in enumerate(ids):
        if not 0 <= token < vocab_size:
            free(out)
            raise ValueError(f"{field} must be token ids in [0, {vocab_size}), not {token}")
        out[i] = token
    return out


@cython.final
cdef class SamplingState:
    """Everything that decides the next token of one output besides its logits: parameters, random stream, penalties.

    It advances only by accept(), so batching, waiting and recomputing cannot disturb it. After Sampler.sample():
    `ok` (False: nothing
    could be drawn; `error` says why), `token`, `logprob` (float32 value under the raw logits), and if logprobs
    is not None `rank` (from 1) and `top` (best tokens as (id, logprob), best first). Calls of two threads at once are
    refused with RuntimeError.

    stop_ids are banned while fewer than min_tokens tokens are accepted. Penalties count prompt_ids and accepted tokens.
    allowed_token_ids: nothing else is ever drawn, None: no limit. set_mask() limits the next draws further.
    Raises ValueError for ids outside [0, vocab_size). Values are otherwise taken as checked.
    """

    def __cinit__(self, int64_t vocab_size, *, double temperature=1.0, int32_t top_k=0, double top_p=1.0,
                  double min_p=0.0, uint64_t seed=0, uint32_t index=0, int32_t min_tokens=0, stop_ids=(),
                  logit_bias=None, float presence_penalty=0.0, float frequency_penalty=0.0,
                  float repetition_penalty=1.0, prompt_ids=(), logprobs=None, double typical_p=1.0,
                  allowed_token_ids=None):
        cdef Row *row = &self.row
        memset(row, 0, sizeof(Row))
        self.vocab_size = vocab_size
        row.inv_temperature = 0 if temperature == 0 else <float>(1.0 / temperature)
        row.top_k, row.top_p, row.typical_p, row.min_p = top_k, top_p, typical_p, <float>min_p
        row.seed, row.index, row.min_tokens = seed, index, min_tokens
        row.presence, row.frequency, row.repetition = presence_penalty, frequency_penalty, repetition_penalty
        row.n_logprobs = -1 if logprobs is None else min(<int64_t>logprobs, vocab_size)
        if row.n_logprobs > 0:
            row.top_ids = <int32_t *>allocate(row.n_logprobs * sizeof(int32_t))
            row.top_logprobs = <float *>allocate(row.n_logprobs * sizeof(float))
        row.stops = id_array(stop_ids, vocab_size, "stop_token_ids")
        row.n_stops = len(stop_ids)
        bias = logit_bias or {}
        row.bias_ids = id_array(bias, vocab_size, "logit_bias keys")
        row.bias = <float *>allocate(len(bias) * sizeof(float))
        for i, value in enumerate(bias.values()):
            row.bias[i] = value
        row.n_bias = len(bias)
        if allowed_token_ids is not None:
            allowed = id_array(allowed_token_ids, vocab_size, "allowed_token_ids")
            try:
                row.allowed = <uint32_t *>allocate(mask_words(vocab_size) * sizeof(uint32_t))
                for i in range(<int64_t>len(allowed_token_ids)):
                    row.allowed[allowed[i] >> 5] |= <uint32_t>1 << (allowed[i] & 31)
            finally:
                free(allowed)
        self.slots = None
        if presence_penalty != 0 or frequency_penalty != 0 or repetition_penalty != 1:
            self.slots = {}
            if repetition_penalty != 1:
                for token in prompt_ids:
                    self.count(token, 0)

    def __dealloc__(self):
        self.drop_mask()
        free(self.row.allowed)
        free(self.row.bias_ids)
        free(self.row.bias)
        free(self.row.stops)
        free(self.row.count_ids)
        free(self.row.counts)
        free(self.row.top_ids)
        free(self.row.top_logprobs)

    cdef int enter(self, str call) except -1:
        """Have the state alone, until it is given back."""
        if not take(&self.in_use):
            raise RuntimeError(f"{call}: the state is in use, in another thread")
        return 0

    cdef void drop_mask(self) noexcept:
        self.row.mask = NULL
        if self.mask_view.buf != NULL:
            PyBuffer_Release(&self.mask_view)
            self.mask_view.buf = NULL

    cdef int count(self, int32_t token, int32_t times) except -1:
        """Add `times` to the token's count, making an entry for a new token."""
        cdef Row *row = &self.row
        cdef int64_t slot, cap
        cdef int32_t *grown
        known = self.slots.get(token)
        if known is not None:
            slot = known
            row.counts[slot] += times
            return 0
        if row.n_counts == row.cap_counts:
            cap = max(64, 2 * row.cap_counts)
            grown = <int32_t *>realloc(row.count_ids, cap * sizeof(int32_t))
            if grown == NULL:
                raise MemoryError("token counts")
            row.count_ids = grown
            grown = <int32_t *>realloc(row.counts, cap * sizeof(int32_t))
            if grown == NULL:
                raise MemoryError("token counts")
            row.counts = grown
            row.cap_counts = cap
        slot = row.n_counts
        row.count_ids[slot] = token
        row.counts[slot] = times
        self.slots[token] = slot
        row.n_counts = slot + 1
        return 0

    def accept(self, int32_t token):
        """Take `token` as the output's next: the random stream moves on and penalties count it."""
        if not 0 <= token < self.vocab_size:
            raise ValueError(f"token must be in [0, {self.vocab_size}), not {token}")
        self.enter("accept")
        try:
            if self.slots is not None:
                self.count(token, 1)
            self.row.position += 1
        finally:
            give_back(&self.in_use)

    def set_mask(self, mask):
        """Let the next draws take only tokens whose bit is set, until the next call; None: any token.

        mask: uint32 [>= ceil(vocab_size / 32)], C order; token i is bit i % 32 of word i // 32, bits behind the vocabulary
        are not read. It is borrowed, not copied: do not write to it before the next call. Raises ValueError.
        """
        cdef Py_buffer view
        cdef int64_t n_words = mask_words(self.vocab_size)
        if mask is None:
            self.enter("set_mask")
            self.drop_mask()
            give_back(&self.in_use)
            return
        PyObject_GetBuffer(mask, &view, PyBUF_C_CONTIGUOUS | PyBUF_FORMAT)
        if view.ndim != 1 or view.format != b"I" or view.itemsize != 4 or view.shape[0] < n_words:
            PyBuffer_Release(&view)
            raise ValueError(f"mask must be uint32 [n >= {n_words}], a bit for each of {self.vocab_size} tokens")
        try:
            self.enter("set_mask")
        except RuntimeError:
            PyBuffer_Release(&view)
            raise
        self.drop_mask()
        self.mask_view = view
        self.row.mask = <const uint32_t *>self.mask_view.buf
        give_back(&self.in_use)

    @property
    def position(self):
        return self.row.position

    @property
    def ok(self):
        return self.row.status == ROW_OK

    @property
    def error(self):
        if self.row.status == ROW_BANNED:
            return "every token is banned"
        return None if self.row.status == ROW_OK else "the logits hold NaN or infinity"

    @property
    def token(self):
        return self.row.token

    @property
    def logprob(self):
        return self.row.logprob

    @property
    def rank(self):
        return self.row.rank

    @property
    def top(self):
        return [(self.row.top_ids[i], self.row.top_logprobs[i]) for i in range(self.row.n_top)]
