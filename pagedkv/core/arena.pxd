"""The arena for Cython. Functions return 0, a count or a page index, or a negated verdict; all are thread-safe and need
no GIL.
"""

from libc.stdint cimport int64_t, uint8_t, uint32_t

from pagedkv.core.structs cimport *

cdef int64_t pkv_arena_new(pkv_arena **out, int64_t n_pages, int64_t page_bytes, int64_t max_pages,
                           int64_t growth_pages, uint32_t flags) noexcept nogil
cdef int64_t pkv_arena_close(pkv_arena *a) noexcept nogil
cdef int64_t pkv_arena_destroy(pkv_arena *a) noexcept nogil
cdef int64_t pkv_arena_is_valid(pkv_arena *a) noexcept nogil
cdef int64_t pkv_arena_refcount(pkv_arena *a, int64_t i) noexcept nogil
cdef int64_t pkv_arena_page_state(pkv_arena *a, int64_t i) noexcept nogil
cdef uint8_t *pkv_arena_page(pkv_arena *a, int64_t i) noexcept nogil
cdef int64_t pkv_arena_n_pages(pkv_arena *a) noexcept nogil
cdef int64_t pkv_arena_n_free(pkv_arena *a) noexcept nogil
cdef int64_t pkv_arena_n_in_use(pkv_arena *a) noexcept nogil
cdef int64_t pkv_arena_n_cached(pkv_arena *a) noexcept nogil
cdef int64_t pkv_arena_reserve(pkv_arena *a, int64_t n) noexcept nogil
cdef int64_t pkv_arena_trim(pkv_arena *a) noexcept nogil
cdef void pkv_arena_poison(pkv_arena *a, uint32_t fault, int64_t page) noexcept nogil

cdef object error(int64_t code, pkv_arena *a, str message)


cdef class Arena:
    cdef pkv_arena *ptr
    cdef int64_t n_views        # exported page views
    cdef int64_t n_calls        # holds of calls, all of threads of this process: of `generation`
    cdef int64_t generation
    cdef int hold(self) except -1
    cdef void let_go(self) noexcept
    cdef void count_anew(self) noexcept nogil
