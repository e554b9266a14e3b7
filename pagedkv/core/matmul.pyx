"""Weight matrices packed into panels of 16 rows, and the loop that multiplies them.

Weights keep the integers and scales of their file; packing only moves them to where a vector load wants them. The layout is
described at pkv_weight in csrc/pkv_kernels.h.
"""

import os

from cpython.buffer cimport PyBUF_SIMPLE, PyBuffer_Release, PyObject_GetBuffer
from libc.stdint cimport int32_t, int64_t, uint8_t, uint32_t, uint64_t
from libc.string cimport memcpy, memset

from pagedkv.core._kernels cimport *
from pagedkv.core.files cimport read_at
from pagedkv.core.memory cimport Slab, WeightMemory, pkv_alloc, pkv_release
from pagedkv.core.quants cimport pack_row

cdef extern from *:
    int64_t atomic_load "__atomic_load_n"(const int64_t *p, int order) noexcept nogil
    int64_t fetch_add "__atomic_fetch_add"(int64_t *p, int64_t by, int order) noexcept nogil
    void atomic_store "__atomic_store_n"(int64_t *p, int64_t value, int order) noexcept nogil
    const int RELAXED "__ATOMIC_RELAXED"


# --- activations -------------------------------------------------------------------------------------------------------

cdef int act_reserve(act_buffer *b, int64_t n_tokens, int64_t n_cols) noexcept nogil:
    """Make room for n_tokens rows of n_cols values; 0, or -1 when memory is refused (the old room stays)."""
    cdef int64_t cols = pkv_round_up(n_cols, 64)
    cdef int64_t blocks = pkv_round_up(n_cols, 32) // 32
    cdef int64_t floats = n_tokens * cols * 4
    cdef int64_t table = pkv_round_up(n_tokens * blocks * 4, 64)
    cdef uint8_t *p
    if b.block != NULL and n_tokens <= b.max_tokens and n_cols == b.n_cols:
        return 0
    p = <uint8_t *>pkv_alloc(floats + 2 * n_tokens * cols + 4 * table)
    if p == NULL:
        return -1
    pkv_release(b.block)
    b.block = p
    b.max_tokens = n_tokens
    b.n_cols = n_cols
    b.x = <float *>p
    b.act.x = b.x
    b.act.q = <signed char *>(p + floats)
    b.act.low = b.act.q + n_tokens * cols
    b.act.scale = <float *>(p + floats + 2 * n_tokens * cols)
    b.act.sum = <float *>(<uint8_t *>b.act.scale + table)
    b.act.isum = <int32_t *>(<uint8_t *>b.act.sum + table)
    b.act.half = <int32_t *>(<uint8_t *>b.act.isum + table)
    b.act.x_stride = b.act.q_stride = cols
    b.act.b_stride = blocks
    return 0


cdef void act_release(act_buffer *b) noexcept nogil:
    cdef bint wide = b.wide
    pkv_release(b.block)
    memset(b, 0, sizeof(act_buffer))
    b.wide = wide


cdef void act_quantise(act_buffer *b, int64_t token, int64_t start, int64_t stop) noexcept nogil:
    """Quantise columns [start, stop) of one token's float row, both multiples of 32; the whole row where the format is wide."""
    cdef int64_t at = token * b.act.b_stride + start // 32
    if b.wide:
        kern.quant_i12(b.act.q + token * b.act.q_stride, b.act.low + token * b.act.q_stride, b.act.scale + at, b.act.isum + at,
                       b.act.half + at, b.x + token * b.act.x_stride, stop)
        return
    kern.quant_i8(b.act.q + token * b.act.q_stride + start, b.act.scale + at, b.act.sum + at, b.act.isum + at,
                  b.act.half + at, b.x + token * b.act.x_stride + start, stop - start)


cdef void act_quantise_column(act_buffer *b, int64_t block, int64_t token0, int64_t n_tokens) noexcept nogil:
    """Quantise block `block`, 32 columns, of tokens [token0, token0 + n_tokens); not for the wide format."""
    kern.quant_column(&b.act, block, token0, n_tokens)


cdef enum:
    FETCHED_BYTES = 1 << 13     # of a thread's run, fetched before it begins
    LOW_HALF = 0xffffffff

# --- the loop ----------------------------------------------------------------------------------------------------------

# Each thread has an equal run of panels for itself: it reads it from memory in order, so that what comes next can be fetched meanwhile, and
# before its turn comes, too. Who is done takes from the ends of the others' runs. Numbers of panels are even wherever they can be, since
# kernels take them in pairs.

cdef int64_t run_start(int64_t n, int thread, int n_threads) noexcept nogil:
    """Where the thread's run of [0, n) begins; that of thread n_threads would begin at n."""
    return n * thread // n_threads


cdef int64_t take(int64_t *taken, int64_t n, bint behind, int64_t *stop) noexcept nogil:
    """Start of a piece of a run of n, n if nothing is left; *stop: where it ends.

    Its owner takes half of what is left, from the front; others a quarter, from behind. *taken counts both, in its low and its high half.
    """
    cdef int64_t before = atomic_load(taken, RELAXED)
    cdef int64_t left = n - (before & LOW_HALF) - (before >> 32)
    cdef int64_t piece = max(left // (4 if behind else 2), <int64_t>1)
    cdef int64_t start
    if left <= 0:
        return n
    before = fetch_add(taken, piece << 32 if behind else piece, RELAXED)
    left = n - (before & LOW_HALF) - (before >> 32)
    if left <= 0:
        return n
    piece = min(piece, left)
    start = n - (before >> 32) - piece if behind else before & LOW_HALF
    stop[0] = start + piece
    return start


cdef int64_t next_share(int64_t *taken, int64_t n, int64_t step, int thread, int n_threads, int64_t *stop, int64_t *n_next) noexcept nogil:
    """Start, a multiple of step, of what the thread computes next of [0, n), n if nothing is left; *stop: where it ends; *n_next: how many
    behind them will, as it seems, come next. taken: one for each thread, zero at first."""
    cdef int64_t n_steps = (n + step - 1) // step
    cdef int64_t first, size, start
    cdef int other = thread
    cdef int i
    for i in range(n_threads):
        first = run_start(n_steps, other, n_threads)
        size = run_start(n_steps, other + 1, n_threads) - first
        start = take(taken + other, size, i > 0, stop)
        if start < size:
            stop[0] = min((first + stop[0]) * step, n)
            n_next[0] = min((first + size) * step, n) - stop[0] if i == 0 else 0
            return (first + start) * step
        other = other + 1 if other + 1 < n_threads else 0
    return n


cdef void fetch_run(const pkv_weight *w, int thread, int n_threads) noexcept nogil:
    """Ask for the beginning of what the thread will read of these weights, so that it is there after the barrier between."""
    cdef int64_t panel = 2 * run_start((w.n_panels + 1) // 2, thread, n_threads)
    pkv_prefetch(w.data + panel * w.panel_bytes, min(<int64_t>FETCHED_BYTES, w.n_panels * w.panel_bytes))
    if w.scales != NULL:
        pkv_prefetch(w.scales + panel * w.scale_bytes, min(<int64_t>FETCHED_BYTES // 4, w.n_panels * w.scale_bytes))


cdef pkv_gemm_fn *gemm_of(const act_buffer *b, const pkv_weight *w) noexcept nogil:
    """The kernel for these weights and this activation format."""
    return kern.gemm_wide[w.type] if b.wide else kern.gemm[w.type]


cdef void matmul(float *out, const pkv_weight *w, const act_buffer *x, int64_t n_tokens, int64_t out_stride, bint add,
                 int64_t *taken, int thread, int n_threads) noexcept nogil:
    """out[n_tokens, 16*n_panels] (+)= x times w transposed, shared by the threads that call it with the same zeroed `taken`, one of each.

    Who computes a panel never changes its bits.
    """
    cdef int64_t stop = 0
    cdef int64_t n_next = 0
    cdef int64_t start = next_share(taken, w.n_panels, 2, thread, n_threads, &stop, &n_next)
    while start < w.n_panels:
        gemm_of(x, w)(out + 16 * start, w, &x.act, start, stop - start, 0, n_tokens, out_stride, add, n_next)
        start = next_share(taken, w.n_panels, 2, thread, n_threads, &stop, &n_next)


# --- packing -----------------------------------------------------------------------------------------------------------

cdef enum:
    SLICE_BYTES = 1 << 18   # that a thread reads of a file before it packs them, while its cache has them

cdef struct pack_job:
    uint8_t *data
    uint8_t *scales
    const int64_t *row_order
    const pkv_weight *w
    int64_t row_bytes
    int64_t counter
    int64_t step        # panels claimed at once
    const uint8_t *source   # all rows, or NULL where they are read:
    int fd
    int64_t offset      # of row 0 in the file
    uint8_t *slices     # of each thread, slice_bytes apart
    int64_t slice_bytes
    int64_t refusal     # errno of a read that was refused
    int64_t end         # of the file where a read came short; -1: none did


cdef inline int64_t row_of_source(const pack_job *job, int64_t row) noexcept nogil:
    return job.row_order[row] if job.row_order != NULL else row


cdef void pack_panel(const pack_job *job, int64_t panel, const uint8_t *rows, int64_t first) noexcept nogil:
    """Pack a panel from rows of the source, the first of which is row `first`."""
    cdef const pkv_weight *w = job.w
    cdef uint8_t *data = job.data + panel * w.panel_bytes
    cdef uint8_t *scales = job.scales + panel * w.scale_bytes
    cdef int64_t n_blocks = w.n_cols // 32
    cdef int64_t r, row, k, b, g
    cdef int32_t kind = w.type
    cdef const uint8_t *source
    cdef uint32_t word
    for r in range(16):
        row = 16 * panel + r
        if row >= w.n_rows:
            continue
        source = rows + (row_of_source(job, row) - first) * job.row_bytes
        if kind == PKV_W_F32:
            for k in range(w.n_cols):
                memcpy(data + (16 * k + r) * 4, source + 4 * k, 4)
        elif kind == PKV_W_F16 or kind == PKV_W_BF16:
            for k in range(w.n_cols):
                memcpy(data + (16 * k + r) * 2, source + 2 * k, 2)
        elif kind == PKV_W_Q8_0:
            for b in range(n_blocks):
                memcpy(scales + 32 * b + 2 * r, source, 2)
                for g in range(8):
                    memcpy(&word, source + 2 + 4 * g, 4)
                    word ^= <uint32_t>0x80808080
                    memcpy(data + (8 * b + g) * 64 + 4 * r, &word, 4)
                source += 34
        elif kind == PKV_W_Q4_0:
            for b in range(n_blocks):
                memcpy(scales + 32 * b + 2 * r, source, 2)
                for g in range(4):
                    memcpy(data + (4 * b + g) * 64 + 4 * r, source + 2 + 4 * g, 4)
                source += 18
        elif kind == PKV_W_Q4_1:
            for b in range(n_blocks):
                memcpy(scales + 64 * b + 2 * r, source, 2)
                memcpy(scales + 64 * b + 32 + 2 * r, source + 2, 2)
                for g in range(4):
                    memcpy(data + (4 * b + g) * 64 + 4 * r, source + 4 + 4 * g, 4)
                source += 20
        else:
            pack_row(data, scales, source, kind, r, n_blocks)


cdef int64_t row_span(const pack_job *job, int64_t panel, int64_t n_panels, int64_t *first) noexcept nogil:
    """How many rows of the source lie from the first to the last that these panels take, and which is the first."""
    cdef int64_t stop = min(16 * (panel + n_panels), job.w.n_rows)
    cdef int64_t last = -1
    cdef int64_t row, r
    first[0] = job.w.n_rows
    for r in range(16 * panel, stop):
        row = row_of_source(job, r)
        first[0] = min(first[0], row)
        last = max(last, row)
    return last + 1 - first[0]


cdef bint read_slice(pack_job *job, uint8_t *out, int64_t first, int64_t n) noexcept nogil:
    """Rows [first, first + n) of the source from the file; False where that fails, which the job then tells."""
    cdef int64_t offset = job.offset + first * job.row_bytes
    cdef int64_t done = read_at(job.fd, out, n * job.row_bytes, offset)
    if done < 0:
        atomic_store(&job.refusal, -done, RELAXED)
    elif done < n * job.row_bytes:
        atomic_store(&job.end, offset + done, RELAXED)
    return done == n * job.row_bytes


cdef void pack_worker(void *arg, int thread, int n_threads) noexcept nogil:
    cdef pack_job *job = <pack_job *>arg
    cdef int64_t n_panels = job.w.n_panels
    cdef const uint8_t *rows = job.source
    cdef int64_t panel, n
    cdef int64_t first = 0
    cdef int64_t stop = 0
    cdef int64_t start = claim(&job.counter, n_panels, job.step, &stop)
    while start < n_panels:
        if job.source == NULL:
            rows = job.slices + thread * job.slice_bytes
            n = row_span(job, start, stop - start, &first)
            if not read_slice(job, <uint8_t *>rows, first, n):
                # nobody needs what is left
                claim(&job.counter, n_panels, n_panels, &stop)
                return
        for panel in range(start, stop):
            pack_panel(job, panel, rows, first)
        start = claim(&job.counter, n_panels, job.step, &stop)


# name: (index into the kernel table, columns of a block, bytes of a block in the file, its bytes of data and of scales per 16 rows)
cdef dict TYPES = {
    "F32": (PKV_W_F32, 1, 4, 64, 0),
    "F16": (PKV_W_F16, 1, 2, 32, 0),
    "BF16": (PKV_W_BF16, 1, 2, 32, 0),
    "Q4_0": (PKV_W_Q4_0, 32, 18, 256, 32),
    "Q4_1": (PKV_W_Q4_1, 32, 20, 256, 64),
    "Q8_0": (PKV_W_Q8_0, 32, 34, 512, 32),
    "Q5_0": (PKV_W_Q5_0, 32, 22, 320, 32),
    "Q5_1": (PKV_W_Q5_1, 32, 24, 320, 64),
    "Q2_K": (PKV_W_Q2_K, 256, 84, 8 * 128, 320),
    "Q3_K": (PKV_W_Q3_K, 256, 110, 8 * 192, 288),
    "Q4_K": (PKV_W_Q4_K, 256, 144, 8 * 256, 320),
    "Q5_K": (PKV_W_Q5_K, 256, 176, 8 * 320, 320),
    "Q6_K": (PKV_W_Q6_K, 256, 210, 8 * 384, 288),
}
WEIGHT_TYPES = tuple(TYPES)  # names of the types that can be packed, in the order of pkv_wtype
# name: (columns of a block, its bytes of data and of scales per 16 rows)
PANEL_LAYOUT = {name: (block, data, scales) for name, (_, block, _, data, scales) in TYPES.items()}


cdef PackedMatrix empty_matrix(pack_job *job, str type_name, int64_t n_rows, int64_t n_cols):
    """A matrix of these sizes without memory, and a job with all of its sizes but no source."""
    cdef PackedMatrix m
    if type_name not in TYPES:
        raise ValueError(f"weight type: {type_name} cannot be packed; supported: {', '.join(TYPES)}")
    kind, block, block_bytes, data_bytes, scale_bytes = TYPES[type_name]
    if not (0 < n_rows < 1 << 31 and 0 < n_cols < 1 << 31):
        raise ValueError(f"weight shape: ({n_rows}, {n_cols}) is outside [1, {1 << 31})")
    if n_cols % block:
        raise ValueError(f"weight columns: {n_cols} is no multiple of {type_name}'s block of {block}")
    m = PackedMatrix.__new__(PackedMatrix)
    m.w.type = kind
    m.w.n_rows, m.w.n_cols, m.w.n_panels = n_rows, n_cols, (n_rows + 15) // 16
    m.w.panel_bytes = n_cols // block * data_bytes
    m.w.scale_bytes = n_cols // block * scale_bytes
    memset(job, 0, sizeof(pack_job))
    job.row_bytes = n_cols // block * block_bytes
    job.step, job.end = 4, -1
    return m


cdef int pack_rows(PackedMatrix m, pack_job *job, ThreadPool pool, row_order, WeightMemory memory) except -1:
    """Take the matrix's memory and fill it, from job.source or else from the file."""
    cdef Py_buffer order
    cdef int64_t i, first, status
    cdef int64_t span = 0
    cdef int64_t n_rows = m.w.n_rows
    if row_order is not None:
        PyObject_GetBuffer(row_order, &order, PyBUF_SIMPLE)
        job.row_order = <const int64_t *>order.buf
    try:
        if row_order is not None:
            if order.len != 8 * n_rows:
                raise ValueError(f"row_order: {order.len} bytes, must be {8 * n_rows}")
            for i in range(n_rows):
                if not 0 <= job.row_order[i] < n_rows:
                    raise ValueError(f"row_order: {job.row_order[i]} at {i} is outside [0, {n_rows})")
        m.n_bytes = pkv_round_up(m.w.n_panels * m.w.panel_bytes, 64) + m.w.n_panels * m.w.scale_bytes
        m.slab = Slab(m.n_bytes) if memory is None else memory.room(m.n_bytes)
        job.data = <uint8_t *>m.slab.take(m.n_bytes)
        job.scales = job.data + pkv_round_up(m.w.n_panels * m.w.panel_bytes, 64)
        m.w.data = job.data
        m.w.scales = job.scales if m.w.scale_bytes else NULL
        job.w = &m.w
        if job.source == NULL:
            job.step = max(min(job.step, SLICE_BYTES // (16 * job.row_bytes)), <int64_t>1)
            for i in range(0, m.w.n_panels, job.step):
                span = max(span, row_span(job, i, job.step, &first))
            job.slice_bytes = pkv_round_up(span * job.row_bytes, 64)
            job.slices = <uint8_t *>pkv_alloc(pool.n_threads * job.slice_bytes)
            if job.slices == NULL:
                raise MemoryError(f"the system refused {pool.n_threads * job.slice_bytes} bytes to read a weight matrix through")
        with nogil:
            status = pool_run(pool.ptr, &pack_worker, job)
        if status:
            raise MemoryError("the system refused a worker thread")
    finally:
        pkv_release(job.slices)
        if row_order is not None:
            PyBuffer_Release(&order)
    return 0


cdef class PackedMatrix:
    """A weight matrix [n_rows, n_cols] in the panel layout, immutable, freed when it dies. Made by `pack`."""

    def __cinit__(self):
        memset(&self.w, 0, sizeof(pkv_weight))

    @staticmethod
    def pack(ThreadPool pool not None, str type_name, source, int64_t n_rows, int64_t n_cols, row_order=None,
             WeightMemory memory=None):
        """Pack the rows of `source`, a contiguous buffer in the file layout of `type_name` (WEIGHT_TYPES), by the pool's threads.

        row_order: int64 buffer [n_rows]; row i of the result is row row_order[i] of the source. memory: where the model's matrices
        lie, None: this one alone in memory of its own. Raises ValueError for a type that
        cannot be packed and for sizes that do not fit each other, MemoryError when the system refuses. Releases the GIL.
        """
        cdef Py_buffer data
        cdef pack_job job
        cdef PackedMatrix m = empty_matrix(&job, type_name, n_rows, n_cols)
        PyObject_GetBuffer(source, &data, PyBUF_SIMPLE)
        try:
            if data.len != n_rows * job.row_bytes:
                raise ValueError(f"weight bytes: {data.len}, a {type_name} matrix ({n_rows}, {n_cols}) has {n_rows * job.row_bytes}")
            job.source = <const uint8_t *>data.buf
            pack_rows(m, &job, pool, row_order, memory)
        finally:
            PyBuffer_Release(&data)
        return m

    @staticmethod
    def read(ThreadPool pool not None, str type_name, int fd, int64_t offset, int64_t n_rows, int64_t n_cols, row_order=None,
             WeightMemory memory=None):
        """As `pack`, of rows that lie from `offset` on in an open file: each thread reads what it packs, a few hundred KiB at a
        time. Raises EOFError(position of the end) where the file ends before the last row, and OSError.
        """
        cdef pack_job job
        cdef PackedMatrix m = empty_matrix(&job, type_name, n_rows, n_cols)
        if offset < 0:
            raise ValueError(f"offset: {offset} is negative")
        job.fd, job.offset = fd, offset
        pack_rows(m, &job, pool, row_order, memory)
        if job.refusal:
            raise OSError(job.refusal, os.strerror(job.refusal))
        if job.end >= 0:
            raise EOFError(job.end)
        return m

    @property
    def shape(self) -> tuple[int, int]:
        """(n_rows, n_cols)"""
        return self.w.n_rows, self.w.n_cols

    @property
    def type_name(self) -> str:
        """Name of the weight type."""
        return WEIGHT_TYPES[self.w.type]

    @property
    def nbytes(self) -> int:
        """Bytes held."""
        return self.n_bytes

    def row(self, int64_t i):
        """Row i dequantised: bytes of n_cols float32. IndexError outside [0, n_rows)."""
        cdef bytearray out
        cdef uint64_t mode
        if not 0 <= i < self.w.n_rows:
            raise IndexError(f"row {i} is outside [0, {self.w.n_rows})")
        out = bytearray(4 * self.w.n_cols)
        mode = float_enter()
        weight_row(<float *><char *>out, &self.w, i)
        float_leave(mode)
        return out
