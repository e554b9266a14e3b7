"""The checker for Cython; thread-safe, needs no GIL."""

from libc.stdint cimport int64_t

from pagedkv.core.structs cimport *

cdef int64_t pkv_check(pkv_arena *a, int64_t level, pkv_violation *out, int64_t capacity) noexcept nogil
