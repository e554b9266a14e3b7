"""Feed-forward networks of several experts, of which each row uses a few."""

from libc.stdint cimport int64_t

from pagedkv.core.operations cimport batch, layer_weights

cdef int64_t experts_bytes(const batch *b, int64_t n_rows) noexcept nogil
cdef void experts_place(batch *b, void *block, int64_t n_rows) noexcept nogil
cdef void experts_up(batch *b, const layer_weights *w, float *scratch, int64_t *counters, int64_t *taken, int thread,
                     int n_threads) noexcept nogil
cdef void experts_down(batch *b, const layer_weights *w, float *out, int64_t *counters, int n_threads) noexcept nogil
