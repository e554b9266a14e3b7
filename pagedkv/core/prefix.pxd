"""The prefix index for Cython. Functions return 0 or a count, or a negated verdict; all are thread-safe and need no
GIL.
"""

from libc.stdint cimport int32_t, int64_t, uint64_t

from pagedkv.core.arena cimport Arena
from pagedkv.core.structs cimport *

cdef int64_t pkv_prefix_new(pkv_prefix **out, pkv_arena *arena, int64_t page_tokens, uint64_t seed) noexcept nogil
cdef int64_t pkv_prefix_destroy(pkv_prefix *p) noexcept nogil
cdef int64_t pkv_prefix_is_valid(pkv_prefix *p) noexcept nogil
cdef int64_t pkv_prefix_lookup(pkv_prefix *p, const int32_t *tokens, int64_t n_tokens) noexcept nogil
cdef int64_t pkv_prefix_match(pkv_prefix *p, pkv_seq *s, const int32_t *tokens, int64_t n_tokens) noexcept nogil
cdef int64_t pkv_prefix_insert(pkv_prefix *p, pkv_seq *s, const int32_t *tokens, int64_t n_tokens) noexcept nogil
cdef int64_t pkv_prefix_clear(pkv_prefix *p) noexcept nogil


cdef class PrefixIndex:
    cdef pkv_prefix *ptr
    cdef readonly Arena arena
