"""Private: floating-point modes, jobs on a pool, feature detection on made-up registers, products of packed matrices. Only tests import it."""

from array import array

from libc.stdint cimport int32_t, int64_t, uint32_t, uint64_t
from libc.string cimport memset

from pagedkv.core._kernels cimport *
from pagedkv.core.matmul cimport *

from pagedkv.core.errors import PoolExhausted

cdef extern from *:
    int64_t atomic_load "__atomic_load_n"(const int64_t *p, int order) noexcept nogil
    int64_t fetch_add "__atomic_fetch_add"(int64_t *p, int64_t by, int order) noexcept nogil
    const int RELAXED "__ATOMIC_RELAXED"


cdef extern from *:
    """
    #if defined(__x86_64__)
    #include <immintrin.h>
    static uint64_t float_mode(void) { return _mm_getcsr() & ~0x3fu; }
    static void set_float_mode(uint64_t mode) { _mm_setcsr((unsigned)mode); }
    enum { FLUSH = 0x8040, TOWARD_ZERO = 0x6000 };
    #elif defined(__aarch64__)
    static uint64_t float_mode(void) { uint64_t m; __asm__ volatile("mrs %0, fpcr" : "=r"(m)); return m; }
    static void set_float_mode(uint64_t mode) { __asm__ volatile("msr fpcr, %0" ::"r"(mode)); }
    enum { FLUSH = 1 << 24, TOWARD_ZERO = 3 << 22 };
    #else
    static uint64_t float_mode(void) { return 0; }
    static void set_float_mode(uint64_t mode) { (void)mode; }
    enum { FLUSH = 0, TOWARD_ZERO = 0 };
    #endif
    """
    uint64_t c_float_mode "float_mode"() noexcept nogil
    void c_set_float_mode "set_float_mode"(uint64_t mode) noexcept nogil
    enum: FLUSH, TOWARD_ZERO

cdef extern from "<sched.h>" nogil:
    void sched_yield()


flush, toward_zero = FLUSH, TOWARD_ZERO  # bits of a mode: subnormals become zero; rounding toward zero


def float_mode() -> int:
    """Rounding and subnormal handling of the calling thread."""
    return c_float_mode()


def set_float_mode(uint64_t mode):
    """Give the calling thread a mode, as returned by float_mode, with bits flipped or not."""
    c_set_float_mode(mode)


cdef struct probe:
    pkv_pool *pool
    uint64_t *modes
    int64_t *visits
    int64_t n_rounds
    int64_t late
    int64_t counter
    int64_t *claims
    int64_t n_claims


cdef void probe_job(void *arg, int thread, int n_threads) noexcept nogil:
    cdef probe *p = <probe *>arg
    cdef int64_t round, other, start
    cdef int64_t stop = 0
    p.modes[thread] = c_float_mode()
    c_set_float_mode(p.modes[thread] ^ FLUSH)
    for round in range(p.n_rounds):
        p.visits[thread] = round + 1
        if (round + thread) % 3 == 0:
            sched_yield()
        pool_barrier(p.pool)
        for other in range(n_threads):
            if p.visits[other] != round + 1:
                p.late += 1
        pool_barrier(p.pool)
    start = claim(&p.counter, p.n_claims, 3, &stop)
    while start < p.n_claims:
        while start < stop:
            p.claims[start] += 1
            start += 1
        start = claim(&p.counter, p.n_claims, 3, &stop)


def run_probe(ThreadPool pool not None, int64_t n_rounds, int64_t n_claims):
    """Run a job of n_rounds barriers, then n_claims units claimed three at a time, without the GIL.

    Each thread notes the float mode it finds and leaves another one behind. Returns (modes of the threads, threads seen late behind a
    barrier, times each unit was claimed).
    """
    import numpy as np

    cdef probe p
    cdef int status
    modes, visits, claims = np.zeros(pool.n_threads, np.uint64), np.zeros(pool.n_threads, np.int64), np.zeros(n_claims, np.int64)
    memset(&p, 0, sizeof(p))
    p.pool, p.n_rounds, p.n_claims = pool.ptr, n_rounds, n_claims
    p.modes = <uint64_t *><size_t>modes.ctypes.data
    p.visits = <int64_t *><size_t>visits.ctypes.data
    p.claims = <int64_t *><size_t>claims.ctypes.data
    with nogil:
        status = pool_run(p.pool, &probe_job, &p)
    if status:
        raise PoolExhausted("the system refused a worker thread")
    return modes.tolist(), p.late, claims.tolist()


def features_x86(uint32_t max_leaf, uint32_t leaf1_ecx, uint32_t leaf7_ebx, uint32_t leaf7_ecx, uint32_t leaf7_edx, uint64_t xcr0) -> int:
    """Feature bits detected on these registers."""
    return features_of_x86(max_leaf, leaf1_ecx, leaf7_ebx, leaf7_ecx, leaf7_edx, xcr0)


def features_arm(uint64_t hwcap, uint64_t hwcap2) -> int:
    """Feature bits detected on these words."""
    return features_of_arm(hwcap, hwcap2)


def required_features() -> dict:
    """Feature bits each ISA of this build needs, by name, best first."""
    cdef int n, i
    cdef const pkv_isa *table = isa_table(&n)
    return {table[i].name.decode(): table[i].required for i in range(n)}


cdef struct product:
    float *out
    const pkv_weight *w
    const act_buffer *x
    int64_t n_tokens
    int64_t out_stride
    bint add
    int64_t *taken


cdef void product_job(void *arg, int thread, int n_threads) noexcept nogil:
    cdef product *p = <product *>arg
    matmul(p.out, p.w, p.x, p.n_tokens, p.out_stride, p.add, p.taken, thread, n_threads)


def multiply(ThreadPool pool not None, PackedMatrix m not None, x, out, bint add, bint wide):
    """out [n, 16 * panels] (+)= x [n, n_cols] times m transposed, x quantised as the model step does it; wide: int12, else int8."""
    cdef product p
    cdef act_buffer b
    cdef int64_t t
    cdef int status
    cdef int64_t[::1] taken = array("q", [0] * pool.n_threads)
    memset(&b, 0, sizeof(b))
    b.wide = wide
    if act_reserve(&b, x.shape[0], m.w.n_cols):
        raise PoolExhausted("the system refused memory")
    try:
        for t in range(x.shape[0]):
            for k, value in enumerate(x[t].tolist()):
                b.x[t * b.act.x_stride + <int64_t>k] = value
            if m.w.scales != NULL:
                act_quantise(&b, t, 0, m.w.n_cols)
        p.out, p.w, p.x = <float *><size_t>out.ctypes.data, &m.w, &b
        p.n_tokens, p.out_stride, p.add, p.taken = x.shape[0], out.shape[1], add, &taken[0]
        with nogil:
            status = pool_run(pool.ptr, &product_job, &p)
    finally:
        act_release(&b)
    if status:
        raise PoolExhausted("the system refused a worker thread")


cdef struct sharing:
    int64_t *taken
    int64_t n, step
    int64_t *pieces         # [n_threads, n, 3]
    int64_t *n_pieces       # [n_threads]
    int64_t n_done
    int held


cdef void share_job(void *arg, int thread, int n_threads) noexcept nogil:
    cdef sharing *s = <sharing *>arg
    cdef int64_t stop = 0
    cdef int64_t n_next = 0
    cdef int64_t start = next_share(s.taken, s.n, s.step, thread, n_threads, &stop, &n_next)
    cdef int64_t *piece = s.pieces + thread * s.n * 3
    while start < s.n:
        piece[0], piece[1], piece[2] = start, stop, n_next
        piece += 3
        s.n_pieces[thread] += 1
        while thread == s.held and atomic_load(&s.n_done, RELAXED) < n_threads - 1:
            pass
        start = next_share(s.taken, s.n, s.step, thread, n_threads, &stop, &n_next)
    fetch_add(&s.n_done, 1, RELAXED)


def shares(ThreadPool pool not None, int64_t n, int64_t step, int held=-1) -> list[list[tuple[int, int, int]]]:
    """Of each thread, the (start, stop, n_next) that next_share gave it, in order. held: a thread that computes its first piece until the
    others have nothing left, -1: none."""
    cdef int64_t[::1] taken = array("q", [0] * pool.n_threads)
    cdef int64_t[::1] n_pieces = array("q", [0] * pool.n_threads)
    cdef int64_t[::1] pieces = array("q", [0] * (3 * n * pool.n_threads))
    cdef sharing s
    cdef int status
    cdef int64_t t, i
    s.taken, s.n, s.step, s.pieces, s.n_pieces, s.n_done, s.held = &taken[0], n, step, &pieces[0], &n_pieces[0], 0, held
    with nogil:
        status = pool_run(pool.ptr, &share_job, &s)
    if status:
        raise PoolExhausted("the system refused a worker thread")
    return [[(pieces[3 * (t * n + i)], pieces[3 * (t * n + i) + 1], pieces[3 * (t * n + i) + 2]) for i in range(n_pieces[t])]
            for t in range(pool.n_threads)]
