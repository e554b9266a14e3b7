"""Measures the machine: how fast all threads together read memory."""

from libc.stdint cimport int64_t, uint64_t
from libc.string cimport memset

from pagedkv.core._kernels cimport *
from pagedkv.core.memory cimport pkv_map, pkv_unmap

import time

cdef extern from *:
    uint64_t add_fetch "__atomic_add_fetch"(uint64_t *p, uint64_t by, int order) noexcept nogil
    const int RELAXED "__ATOMIC_RELAXED"

cdef enum:
    CHUNK = 1 << 20     # bytes claimed at a time

cdef struct read_job:
    const uint64_t *data
    int64_t n_chunks
    int64_t counter
    uint64_t sum


cdef void read_worker(void *arg, int thread, int n_threads) noexcept nogil:
    cdef read_job *job = <read_job *>arg
    cdef int64_t stop = 0
    cdef int64_t chunk, i
    cdef uint64_t sum = 0
    cdef const uint64_t *data
    cdef int64_t start = claim(&job.counter, job.n_chunks, 1, &stop)
    while start < job.n_chunks:
        for chunk in range(start, stop):
            data = job.data + chunk * (CHUNK // 8)
            for i in range(CHUNK // 8):
                sum += data[i]
        start = claim(&job.counter, job.n_chunks, 1, &stop)
    add_fetch(&job.sum, sum, RELAXED)  # so that the reads are not optimised away; what it holds does not matter


def read_bandwidth(ThreadPool pool not None, int64_t n_bytes=1 << 28, int repeats=5) -> float:
    """Bytes per second at which the pool's threads together read a block of n_bytes, the best of `repeats` passes.

    Allocates n_bytes and touches all of it; blocks for a fraction of a second; releases the GIL while reading. n_bytes must exceed the
    caches to tell about memory. ValueError for n_bytes outside [1 MiB, 2^40) or repeats below 1, MemoryError.
    """
    cdef read_job job
    cdef int status
    cdef void *block
    if not CHUNK <= n_bytes < 1 << 40:
        raise ValueError(f"n_bytes: {n_bytes} is not in [{CHUNK}, {1 << 40})")
    if repeats < 1:
        raise ValueError(f"repeats: {repeats} is below 1")
    job.n_chunks = n_bytes // CHUNK
    block = pkv_map(n_bytes, True)
    if block == NULL:
        raise MemoryError(f"the system refused {n_bytes} bytes to read from")
    best = float("inf")
    try:
        with nogil:
            memset(block, 1, n_bytes)
        job.data = <const uint64_t *>block
        job.sum = 0
        for _ in range(repeats):
            job.counter = 0
            start = time.perf_counter()
            with nogil:
                status = pool_run(pool.ptr, &read_worker, &job)
            if status:
                raise MemoryError("the system refused a worker thread")
            best = min(best, time.perf_counter() - start)
    finally:
        pkv_unmap(block, n_bytes)
    return job.n_chunks * CHUNK / best
