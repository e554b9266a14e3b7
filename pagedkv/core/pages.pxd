"""Page transitions, for code inside the core that holds the arena's lock."""

from libc.stdint cimport int64_t, uint32_t

from pagedkv.core.structs cimport *

cdef int64_t pkv_held_grow(pkv_arena *a, int64_t step) noexcept nogil
cdef int64_t pkv_held_can_take(pkv_arena *a, int64_t n) noexcept nogil
cdef int64_t pkv_held_take_free(pkv_arena *a, int64_t n, uint32_t *out) noexcept nogil
cdef int64_t pkv_held_take(pkv_arena *a) noexcept nogil
cdef int64_t pkv_held_drop(pkv_arena *a, uint32_t i, uint32_t *cursor) noexcept nogil
cdef int64_t pkv_held_drop_last(pkv_arena *a, const uint32_t *table, int64_t *used, int64_t kept) noexcept nogil
cdef int64_t pkv_held_uncache(pkv_arena *a, uint32_t i) noexcept nogil
cdef int64_t pkv_held_revive(pkv_arena *a, uint32_t i) noexcept nogil
