"""Sequences for Cython. Functions return 0, a count or a page index, or a negated verdict; all are thread-safe and need
no GIL.
"""

from libc.stdint cimport int64_t, uint32_t

from pagedkv.core.arena cimport Arena
from pagedkv.core.structs cimport *

cdef int64_t pkv_seq_new(pkv_seq **out, pkv_arena *arena, int64_t seq_id, int64_t max_pages) noexcept nogil
cdef int64_t pkv_seq_destroy(pkv_seq *s) noexcept nogil
cdef int64_t pkv_seq_is_valid(pkv_seq *s) noexcept nogil
cdef int64_t pkv_seq_n_pages(pkv_seq *s) noexcept nogil
cdef int64_t pkv_seq_append_page(pkv_seq *s) noexcept nogil
cdef int64_t pkv_seq_append_pages(pkv_seq *s, int64_t n) noexcept nogil
cdef int64_t pkv_seq_share_page(pkv_seq *s, int64_t i) noexcept nogil
cdef int64_t pkv_seq_share_pages(pkv_seq *s, const uint32_t *pages, int64_t n) noexcept nogil
cdef int64_t pkv_seq_snapshot(pkv_seq **out, pkv_seq *s) noexcept nogil
cdef int64_t pkv_seq_can_write(pkv_seq *s, int64_t n_new, int64_t first, int64_t stop) noexcept nogil
cdef int64_t pkv_seq_write_page(pkv_seq *s, int64_t i) noexcept nogil
cdef int64_t pkv_seq_truncate_pages(pkv_seq *s, int64_t n) noexcept nogil
cdef int64_t pkv_seq_free(pkv_seq *s) noexcept nogil


cdef class Sequence:
    cdef pkv_seq *ptr
    cdef readonly Arena arena
    cdef object refuse(self, int64_t code, str message)
