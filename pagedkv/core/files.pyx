"""Reads files by position. Nothing of a file is ever mapped: a file that others cut short is a short read, not a fault."""

from cpython.bytes cimport PyBytes_AS_STRING, PyBytes_FromStringAndSize
from libc.errno cimport EINTR, errno
from libc.stdint cimport int64_t

import os


cdef extern from "<unistd.h>" nogil:
    ssize_t pread(int fd, void *buffer, size_t n, long offset)

cdef enum:
    MOST_AT_ONCE = 1 << 30   # the system reads no 2 GiB in one call

cdef pkv_read_hook before_read = NULL


cdef void pkv_set_read_hook(pkv_read_hook hook) noexcept nogil:
    """Call `hook` before every read; NULL: nothing."""
    global before_read
    before_read = hook


cdef int64_t read_at(int fd, void *out, int64_t n, int64_t offset) noexcept nogil:
    """Read n bytes from `offset` on. Bytes read, fewer than n where the file ends before; -errno when the system refuses."""
    cdef int64_t done = 0
    cdef ssize_t got
    while done < n:
        if before_read != NULL:
            before_read(fd, n - done, offset + done)
        got = pread(fd, <char *>out + done, min(n - done, <int64_t>MOST_AT_ONCE), offset + done)
        if got > 0:
            done += got
        elif got == 0:
            break
        elif errno != EINTR:
            return -errno
    return done


def read_bytes(int fd, int64_t n, int64_t offset):
    """The n bytes of a file from `offset` on. Raises EOFError(position of the end) where the file ends before, OSError,
    MemoryError. Releases the GIL.
    """
    cdef object out
    cdef char *start
    cdef int64_t done
    if n < 0 or offset < 0:
        raise ValueError(f"read: {n} bytes at offset {offset}, both must be 0 or more")
    out = PyBytes_FromStringAndSize(NULL, n)
    start = PyBytes_AS_STRING(out)
    with nogil:
        done = read_at(fd, start, n, offset)
    if done < 0:
        raise OSError(-done, os.strerror(-done))
    if done < n:
        raise EOFError(offset + done)
    return out
