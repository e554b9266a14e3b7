"""Measures the machine: how fast all threads together read memory, and multiply what lies in their caches."""

from libc.stdint cimport int64_t, uint64_t
from libc.string cimport memset

from pagedkv.core._kernels cimport *
from pagedkv.core.matmul cimport PackedMatrix, act_buffer, act_quantise, act_release, act_reserve, gemm_of
from pagedkv.core.memory cimport pkv_alloc, pkv_map, pkv_release, pkv_unmap

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


cdef struct gemm_job:
    const pkv_weight *w
    act_buffer *x
    float *out              # [n_threads, n_tokens, 16 * n_panels]
    int64_t n_tokens
    int64_t repeats


cdef void gemm_worker(void *arg, int thread, int n_threads) noexcept nogil:
    cdef gemm_job *job = <gemm_job *>arg
    cdef int64_t stride = 16 * job.w.n_panels
    cdef float *out = job.out + thread * job.n_tokens * stride
    cdef int64_t i
    for i in range(job.repeats):
        gemm_of(job.x, job.w)(out, job.w, &job.x.act, 0, job.w.n_panels, 0, job.n_tokens, stride, 0, 0)


def kernel_macs(ThreadPool pool not None, PackedMatrix weights not None, int64_t n_tokens=32, int64_t repeats=64) -> float:
    """Multiply-accumulates per second of the pool's threads together in the int8 matrix kernel, the best of 5 runs.

    Every thread multiplies the whole of `weights` with n_tokens rows of ones, `repeats` times; choose a matrix that fits its cache, and
    the result is what the kernel can do when memory does not hold it up. Blocks; releases the GIL. ValueError for counts outside
    [1, 2^16), MemoryError.
    """
    cdef gemm_job job
    cdef act_buffer x
    cdef int64_t token, i
    cdef int status
    if not 0 < n_tokens < 1 << 16 or not 0 < repeats < 1 << 16:
        raise ValueError(f"n_tokens, repeats: {n_tokens, repeats} are not in [1, {1 << 16})")
    memset(&x, 0, sizeof(act_buffer))
    job.w, job.x, job.n_tokens, job.repeats = &weights.w, &x, n_tokens, repeats
    job.out = <float *>pkv_alloc(pool.n_threads * n_tokens * 16 * weights.w.n_panels * sizeof(float))
    best = float("inf")
    try:
        if job.out == NULL or act_reserve(&x, n_tokens, weights.w.n_cols):
            raise MemoryError("the system refused the activations of a measurement")
        for token in range(n_tokens):
            for i in range(x.act.x_stride):
                x.x[token * x.act.x_stride + i] = 1.0
            if weights.w.scales != NULL:
                act_quantise(&x, token, 0, weights.w.n_cols)
        for _ in range(5):
            start = time.perf_counter()
            with nogil:
                status = pool_run(pool.ptr, &gemm_worker, &job)
            if status:
                raise MemoryError("the system refused a worker thread")
            best = min(best, time.perf_counter() - start)
    finally:
        pkv_release(job.out)
        act_release(&x)
    return pool.n_threads * repeats * n_tokens * weights.w.n_rows * weights.w.n_cols / best
