"""Arguments as Python gives them: one rule for integers and one for numbers, everywhere in the core."""

from libc.stdint cimport int64_t

cdef object integer(str name, value)
cdef int64_t bounded(str name, value, int64_t low, int64_t high) except? -1
cdef str shown(value)
