"""Memory from the system: small blocks from the C heap, big ones reserved as address space and committed in steps."""

from libc.stdint cimport int64_t, uintptr_t
from libc.stdlib cimport free


cdef extern from "<stdlib.h>" nogil:
    void *aligned_alloc(size_t alignment, size_t size)

cdef extern from "<unistd.h>" nogil:
    long sysconf(int name)
    const int _SC_PAGESIZE

cdef extern from "<sys/mman.h>" nogil:
    void *mmap(void *addr, size_t length, int prot, int flags, int fd, long offset)
    int munmap(void *addr, size_t length)
    int mprotect(void *addr, size_t length, int prot)
    int madvise(void *addr, size_t length, int advice)
    int mincore(void *addr, size_t length, unsigned char *vec)
    const int PROT_NONE, PROT_READ, PROT_WRITE, MAP_PRIVATE, MAP_ANONYMOUS, MAP_NORESERVE
    const int MADV_DONTNEED, MADV_HUGEPAGE
    void *MAP_FAILED

cdef extern from *:
    int64_t atomic_load "__atomic_load_n"(int64_t *p, int order) noexcept nogil
    int64_t atomic_fetch_sub "__atomic_fetch_sub"(int64_t *p, int64_t by, int order) noexcept nogil
    void atomic_store "__atomic_store_n"(int64_t *p, int64_t value, int order) noexcept nogil
    const int RELAXED "__ATOMIC_RELAXED"

cdef size_t HUGE_PAGE = 2 << 20
cdef size_t SLAB = 16 << 20
cdef int64_t pkv_requests_left = -1


cdef inline bint refused() noexcept nogil:
    """Whether a test wants this request to fail."""
    return atomic_load(&pkv_requests_left, RELAXED) >= 0 and atomic_fetch_sub(&pkv_requests_left, 1, RELAXED) == 0


cdef void pkv_set_requests_left(int64_t n) noexcept nogil:
    """Let n requests for memory pass and refuse the next; negative lets all pass."""
    atomic_store(&pkv_requests_left, n, RELAXED)


cdef void *pkv_alloc(size_t n_bytes) noexcept nogil:
    """A 64-byte aligned block, content undefined; NULL when memory is refused. Release with pkv_release."""
    return NULL if refused() else aligned_alloc(64, (n_bytes + 63) & ~<size_t>63)


cdef void pkv_release(void *block) noexcept nogil:
    free(block)


cdef void *pkv_map(size_t n_bytes, bint committed) noexcept nogil:
    """Zeroed OS pages, touched lazily, or bare address space to commit later. From 2 MiB on, aligned to 2 MiB and huge
    where granted. NULL when refused. Release with pkv_unmap and the same n_bytes."""
    cdef int prot = PROT_READ | PROT_WRITE if committed else PROT_NONE
    cdef size_t slack = HUGE_PAGE if n_bytes >= HUGE_PAGE else 0
    cdef size_t os_page = <size_t>sysconf(_SC_PAGESIZE)
    cdef size_t rounded = (n_bytes + os_page - 1) & ~(os_page - 1)
    cdef char *base
    cdef size_t lead
    if refused():
        return NULL
    base = <char *>mmap(NULL, rounded + slack, prot, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0)
    if <void *>base == MAP_FAILED:
        return NULL
    if slack:
        lead = (HUGE_PAGE - (<uintptr_t>base & (HUGE_PAGE - 1))) & (HUGE_PAGE - 1)
        if lead:
            munmap(base, lead)
        if slack > lead:
            munmap(base + lead + rounded, slack - lead)
        base += lead
        madvise(base, rounded, MADV_HUGEPAGE)
    return base


cdef void pkv_unmap(void *base, size_t n_bytes) noexcept nogil:
    cdef size_t os_page = <size_t>sysconf(_SC_PAGESIZE)
    if base != NULL:
        munmap(base, (n_bytes + os_page - 1) & ~(os_page - 1))


cdef int pkv_commit(void *base, size_t start, size_t stop) noexcept nogil:
    """Make bytes [start, stop) of a mapping usable; 0, or -1 when the system refuses. Committing twice is harmless."""
    cdef size_t os_page = <size_t>sysconf(_SC_PAGESIZE)
    start &= ~(os_page - 1)
    stop = (stop + os_page - 1) & ~(os_page - 1)
    if refused():
        return -1
    return -1 if mprotect(<char *>base + start, stop - start, PROT_READ | PROT_WRITE) else 0


cdef int64_t pkv_drop(void *base, size_t start, size_t stop) noexcept nogil:
    """Hand the OS pages that lie wholly inside [start, stop) back; they read as zeros when touched again. Bytes of those
    that were in memory.
    """
    cdef size_t os_page = <size_t>sysconf(_SC_PAGESIZE)
    cdef int64_t result
    start = (start + os_page - 1) & ~(os_page - 1)
    stop &= ~(os_page - 1)
    if stop <= start:
        return 0
    result = resident(<char *>base + start, stop - start, os_page)
    return 0 if madvise(<char *>base + start, stop - start, MADV_DONTNEED) else result


cdef int64_t resident(char *base, size_t n_bytes, size_t os_page) noexcept nogil:
    """Bytes of n_bytes, all committed, that are in memory; all where the system does not tell."""
    cdef unsigned char vec[4096]
    cdef size_t at = 0
    cdef size_t k, step
    cdef int64_t n = 0
    while at < n_bytes:
        step = min(n_bytes - at, sizeof(vec) * os_page)
        if mincore(base + at, step, vec):
            return <int64_t>n_bytes
        for k in range(step // os_page):
            n += vec[k] & 1
        at += step
    return n * <int64_t>os_page


cdef class Slab:
    """A mapping whose first `used` bytes are given away, unmapped when the last who holds it dies."""

    def __cinit__(self, size_t n_bytes):
        self.memory = <char *>pkv_map(n_bytes, True)
        self.n_bytes = n_bytes
        self.used = 0
        if self.memory == NULL:
            raise MemoryError(f"the system refused {n_bytes} bytes for weights")

    def __dealloc__(self):
        pkv_unmap(self.memory, self.n_bytes)

    cdef char *take(self, size_t n_bytes):
        """The next n_bytes, from a multiple of 64 on; there must be as many."""
        cdef char *p = self.memory + self.used
        self.used += (n_bytes + 63) & ~<size_t>63
        return p


cdef class WeightMemory:
    """Where the matrices of one model lie: side by side in slabs of 16 MiB, so that matrices of a few hundred KiB are on huge pages,
    too. One thread at a time."""

    cdef Slab room(self, size_t n_bytes):
        """A slab with n_bytes left; one of its own for what is too big to share. MemoryError."""
        if n_bytes > SLAB // 4:
            return Slab(n_bytes)
        if self.slab is None or self.slab.n_bytes - self.slab.used < ((n_bytes + 63) & ~<size_t>63):
            self.slab = Slab(SLAB)
        return self.slab
