"""Typed K/V pages for Cython."""

from libc.stdint cimport int64_t

from pagedkv.core._kernels cimport ThreadPool
from pagedkv.core.arena cimport Arena
from pagedkv.core.attention cimport attention_view
from pagedkv.core.sequence cimport Sequence


cdef class PagedKVCache(Arena):
    cdef attention_view view
    cdef readonly int64_t n_layers
    cdef readonly ThreadPool pool


cdef class KVSequence(Sequence):
    cdef PagedKVCache cache(self)
    cdef str cut_short(self, str call, int64_t tokens)
