"""Memory from the system, for arena, sequence and prefix alike: the one place that allocates, so the one place that can
be made to fail.
"""

from libc.stdint cimport int64_t

# Counts down at every request for memory; the one that finds 0 is refused. Negative: off. Set by tests only.
cdef int64_t pkv_requests_left

cdef void *pkv_alloc(size_t n_bytes) noexcept nogil
cdef void pkv_release(void *block) noexcept nogil
cdef void *pkv_map(size_t n_bytes, bint committed) noexcept nogil
cdef void pkv_unmap(void *base, size_t n_bytes) noexcept nogil
cdef int pkv_commit(void *base, size_t start, size_t stop) noexcept nogil
cdef int64_t pkv_drop(void *base, size_t start, size_t stop) noexcept nogil
cdef void pkv_set_requests_left(int64_t n) noexcept nogil


cdef class Slab:
    cdef char *memory
    cdef size_t n_bytes
    cdef size_t used
    cdef char *take(self, size_t n_bytes)


cdef class WeightMemory:
    cdef Slab slab
    cdef Slab room(self, size_t n_bytes)
