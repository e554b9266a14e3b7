"""Reads files by position, without the GIL."""

from libc.stdint cimport int64_t

# Called before every read of the system, where set. Set by tests only.
ctypedef void (*pkv_read_hook)(int fd, int64_t n, int64_t offset) noexcept nogil

cdef int64_t read_at(int fd, void *out, int64_t n, int64_t offset) noexcept nogil
cdef void pkv_set_read_hook(pkv_read_hook hook) noexcept nogil
