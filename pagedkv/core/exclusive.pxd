"""One caller at a time: a word that one thread takes and others find taken, with or without a GIL.

What may not be used by two threads at once refuses the second one instead of making it wait: that it is there at all is a
mistake of the program.
"""

from libc.stdint cimport int32_t

cdef extern from *:
    int32_t exchange "__atomic_exchange_n"(int32_t *p, int32_t value, int order) noexcept nogil
    void store "__atomic_store_n"(int32_t *p, int32_t value, int order) noexcept nogil
    const int ACQUIRED "__ATOMIC_ACQUIRE"
    const int RELEASED "__ATOMIC_RELEASE"


cdef inline bint take(int32_t *word) noexcept nogil:
    """Whether the word was free; it is the caller's then, until give_back."""
    return exchange(word, 1, ACQUIRED) == 0


cdef inline void give_back(int32_t *word) noexcept nogil:
    store(word, 0, RELEASED)
