"""Weight matrices packed into panels of 16 rows, and the loop that multiplies them.

Weights keep the integers and scales of their file; packing only moves them to where a vector load wants them. The layout is
described at pkv_weight in csrc/pkv_kernels.h.
"""

from cpython.buffer cimport PyBUF_SIMPLE, PyBuffer_Release, PyObject_GetBuffer
from libc.stdint cimport int32_t, int64_t, uint8_t, uint32_t, uint64_t
from libc.string cimport memcpy, memset

from pagedkv.core._kernels cimport *
from pagedkv.core.memory cimport pkv_alloc, pkv_map, pkv_release, pkv_unmap
from pagedkv.core.quants cimport pack_row


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


# --- the loop ----------------------------------------------------------------------------------------------------------

cdef int64_t panel_chunk(int64_t n_panels, int n_threads) noexcept nogil:
    """Panels a thread claims at once: even, so that kernels can pair them, and small enough to level the threads out."""
    if n_threads == 1:
        return n_panels
    return min(max(n_panels // (8 * n_threads) // 2 * 2, <int64_t>2), <int64_t>16)


cdef pkv_gemm_fn *gemm_of(const act_buffer *b, const pkv_weight *w) noexcept nogil:
    """The kernel for these weights and this activation format."""
    return kern.gemm_wide[w.type] if b.wide else kern.gemm[w.type]


cdef void matmul(float *out, const pkv_weight *w, const act_buffer *x, int64_t n_tokens, int64_t out_stride, bint add,
                 int64_t *counter, int n_threads) noexcept nogil:
    """out[n_tokens, 16*n_panels] (+)= x times w transposed, shared by the threads that call it with one zeroed counter.

    Who computes a panel never changes its bits.
    """
    cdef int64_t chunk = panel_chunk(w.n_panels, n_threads)
    cdef int64_t stop = 0
    cdef int64_t start = claim(counter, w.n_panels, chunk, &stop)
    while start < w.n_panels:
        gemm_of(x, w)(out + 16 * start, w, &x.act, start, stop - start, 0, n_tokens, out_stride, add)
        start = claim(counter, w.n_panels, chunk, &stop)


# --- packing -----------------------------------------------------------------------------------------------------------

cdef enum:
    PIECE_BYTES = 1 << 24   # of a source between two calls of `release`

cdef struct pack_job:
    uint8_t *data
    uint8_t *scales
    const uint8_t *source
    const int64_t *row_order
    const pkv_weight *w
    int64_t row_bytes
    int64_t counter
    int64_t end         # of the panels of this piece


cdef void pack_panel(const pack_job *job, int64_t panel) noexcept nogil:
    cdef const pkv_weight *w = job.w
    cdef uint8_t *data = job.data + panel * w.panel_bytes
    cdef uint8_t *scales = job.scales + panel * w.scale_bytes
    cdef int64_t n_blocks = w.n_cols // 32
    cdef int64_t r, row, k, b, g, element
    cdef int32_t kind = w.type
    cdef const uint8_t *source
    cdef uint32_t word
    for r in range(16):
        row = 16 * panel + r
        if row >= w.n_rows:
            continue
        source = job.source + (job.row_order[row] if job.row_order != NULL else row) * job.row_bytes
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


cdef void pack_worker(void *arg, int thread, int n_threads) noexcept nogil:
    cdef pack_job *job = <pack_job *>arg
    cdef int64_t panel
    cdef int64_t stop = 0
    cdef int64_t start = claim(&job.counter, job.end, 4, &stop)
    while start < job.end:
        for panel in range(start, stop):
            pack_panel(job, panel)
        start = claim(&job.counter, job.end, 4, &stop)


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


cdef class PackedMatrix:
    """A weight matrix [n_rows, n_cols] in the panel layout, immutable, freed when it dies. Made by `pack`."""

    def __cinit__(self):
        memset(&self.w, 0, sizeof(pkv_weight))
        self.memory = NULL

    def __dealloc__(self):
        pkv_unmap(self.memory, self.n_bytes)

    @staticmethod
    def pack(ThreadPool pool not None, str type_name, source, int64_t n_rows, int64_t n_cols, row_order=None,
             release=None):
        """Pack the rows of `source`, a contiguous buffer in the file layout of `type_name` (WEIGHT_TYPES), by the pool's threads.

        row_order: int64 buffer [n_rows]; row i of the result is row row_order[i] of the source. release: without row_order called
        as release(start, stop) for each few MiB of the source's bytes that will not be read again, from its start to its end.
        Raises ValueError for a type that cannot be packed and for sizes that do not fit each other, MemoryError when the system
        refuses. Releases the GIL.
        """
        cdef PackedMatrix m
        cdef Py_buffer data, order
        cdef pack_job job
        cdef int64_t i, status, start
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
        job.row_bytes = n_cols // block * block_bytes
        PyObject_GetBuffer(source, &data, PyBUF_SIMPLE)
        try:
            if data.len != n_rows * job.row_bytes:
                raise ValueError(f"weight bytes: {data.len}, a {type_name} matrix ({n_rows}, {n_cols}) has {n_rows * job.row_bytes}")
            job.row_order = NULL
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
                m.memory = pkv_map(m.n_bytes, True)
                if m.memory == NULL:
                    raise MemoryError(f"the system refused {m.n_bytes} bytes for a weight matrix ({n_rows}, {n_cols})")
                job.data = <uint8_t *>m.memory
                job.scales = job.data + pkv_round_up(m.w.n_panels * m.w.panel_bytes, 64)
                m.w.data = job.data
                m.w.scales = job.scales if scale_bytes else NULL
                job.source = <const uint8_t *>data.buf
                job.w = &m.w
                job.end = 0
                while job.end < m.w.n_panels:
                    start = job.counter = job.end
                    job.end = m.w.n_panels
                    if release is not None and row_order is None:
                        job.end = min(job.end, start + max(PIECE_BYTES // (16 * job.row_bytes), <int64_t>1))
                    with nogil:
                        status = pool_run(pool.ptr, &pack_worker, &job)
                    if status:
                        raise MemoryError("the system refused a worker thread")
                    if release is not None and row_order is None:
                        release(16 * start * job.row_bytes, min(16 * job.end, n_rows) * job.row_bytes)
            finally:
                if row_order is not None:
                    PyBuffer_Release(&order)
        finally:
            PyBuffer_Release(&data)
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
