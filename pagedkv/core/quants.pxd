"""File blocks of the 5-bit types and the K-quants into the panel layout."""

from libc.stdint cimport int64_t, uint8_t

cdef void pack_row(uint8_t *data, uint8_t *scales, const uint8_t *source, int kind, int64_t r, int64_t n_blocks) noexcept nogil
