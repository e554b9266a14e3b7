"""Owns the dispatch pointer `kern` and the thread pool. The only extension that links csrc."""

import os

from libc.stdint cimport int64_t, uint32_t, uint64_t

from pagedkv.core.arguments cimport bounded

from pagedkv.core.cpus import available_processors, default_threads


cdef extern from "pkv_kernels.h" nogil:
    const pkv_isa *pkv_isa_table(int *n)
    void pkv_rope_angles(float *cs, const double *inv_freq, int64_t half, int64_t position, float attn_factor)
    void pkv_weight_row(float *y, const pkv_weight *w, int64_t row)
    double pkv_log(double x)
    float pkv_exp(float x)

cdef extern from "cpu.h" nogil:
    ctypedef struct pkv_x86_registers:
        uint32_t max_leaf
        uint32_t leaf1_ecx
        uint32_t leaf7_ebx
        uint32_t leaf7_ecx
        uint32_t leaf7_edx
        uint64_t xcr0
    uint64_t pkv_cpu_features()
    uint64_t pkv_features_x86(const pkv_x86_registers *r)
    uint64_t pkv_features_arm(uint64_t hwcap, uint64_t hwcap2)

cdef extern from "threads.h" nogil:
    pkv_pool *pkv_pool_new(int n_threads, int n_processors)
    void pkv_pool_free(pkv_pool *pool)
    int pkv_pool_threads(const pkv_pool *pool)
    int pkv_pool_run(pkv_pool *pool, pkv_job_fn *job, void *arg)
    void pkv_pool_barrier(pkv_pool *pool)
    int64_t pkv_claim(int64_t *counter, int64_t n, int64_t chunk, int64_t *stop)
    uint64_t pkv_float_enter()
    void pkv_float_leave(uint64_t mode)


cdef const pkv_isa *isa_table(int *n) noexcept nogil:
    return pkv_isa_table(n)


cdef uint64_t cpu_features() noexcept nogil:
    return pkv_cpu_features()


cdef uint64_t features_of_x86(uint32_t max_leaf, uint32_t leaf1_ecx, uint32_t leaf7_ebx, uint32_t leaf7_ecx, uint32_t leaf7_edx,
                              uint64_t xcr0) noexcept nogil:
    cdef pkv_x86_registers r = [max_leaf, leaf1_ecx, leaf7_ebx, leaf7_ecx, leaf7_edx, xcr0]
    return pkv_features_x86(&r)


cdef uint64_t features_of_arm(uint64_t hwcap, uint64_t hwcap2) noexcept nogil:
    return pkv_features_arm(hwcap, hwcap2)


cdef void rope_angles(float *cs, const double *inv_freq, int64_t half, int64_t position, float attn_factor) noexcept nogil:
    pkv_rope_angles(cs, inv_freq, half, position, attn_factor)


cdef void weight_row(float *y, const pkv_weight *w, int64_t row) noexcept nogil:
    pkv_weight_row(y, w, row)


cdef double log_double(double x) noexcept nogil:
    return pkv_log(x)


cdef float exp_float(float x) noexcept nogil:
    return pkv_exp(x)


cdef pkv_pool *pool_new(int n_threads, int n_processors) noexcept nogil:
    return pkv_pool_new(n_threads, n_processors)


cdef void pool_free(pkv_pool *pool) noexcept nogil:
    pkv_pool_free(pool)


cdef int pool_threads(const pkv_pool *pool) noexcept nogil:
    return pkv_pool_threads(pool)


cdef int pool_run(pkv_pool *pool, pkv_job_fn *job, void *arg) noexcept nogil:
    return pkv_pool_run(pool, job, arg)


cdef void pool_barrier(pkv_pool *pool) noexcept nogil:
    pkv_pool_barrier(pool)


cdef int64_t claim(int64_t *counter, int64_t n, int64_t chunk, int64_t *stop) noexcept nogil:
    return pkv_claim(counter, n, chunk, stop)


cdef uint64_t float_enter() noexcept nogil:
    return pkv_float_enter()


cdef void float_leave(uint64_t mode) noexcept nogil:
    pkv_float_leave(mode)


cdef class ThreadPool:
    """ThreadPool(n_threads=None)\n--\n
    A pool of `n_threads` threads (None: `default_threads()`), started at the first job. BadInput names a bad count.
    """

    def __cinit__(self, n_threads=None):
        if n_threads is None:
            n_threads = default_threads()
        cdef int64_t count = bounded("threads", n_threads, 1, 1024)
        self.ptr = pkv_pool_new(<int>count, available_processors())
        if self.ptr == NULL:
            raise MemoryError(f"threads: no memory for a pool of {count}")

    def __dealloc__(self):
        pkv_pool_free(self.ptr)

    @property
    def n_threads(self) -> int:
        """Threads of a job, the caller's included."""
        return pkv_pool_threads(self.ptr)


def isa_names() -> list[str]:
    """ISAs of this build that this machine runs, best first; "scalar" is always there."""
    cdef int n, i
    cdef const pkv_isa *table = pkv_isa_table(&n)
    cdef uint64_t features = pkv_cpu_features()
    return [table[i].name.decode() for i in range(n) if table[i].required & features == table[i].required]


def isa() -> str:
    """The ISA in use."""
    return kern.name.decode()


def _use_isa(str name):
    """Switch to a named ISA. For start-up and tests: no job may be running."""
    global kern
    cdef int n, i
    cdef const pkv_isa *table = pkv_isa_table(&n)
    if name not in isa_names():
        raise ImportError(f"PAGEDKV_ISA: {name!r} is not available here; available: {', '.join(isa_names())}")
    for i in range(n):
        if table[i].name.decode() == name:
            kern = table[i].kernels


_use_isa(os.environ.get("PAGEDKV_ISA") or isa_names()[0])
