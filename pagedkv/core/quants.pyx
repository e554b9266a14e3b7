"""File blocks of the 5-bit types and the K-quants (ggml's formats) into the panel layout of csrc/pkv_kernels.h.

A row is taken apart block by block: `read_*` gives the values of a file block, without scale or bias, and its scales; `place` spreads 32
values over the parts a type is made of. Memory is zero before, so parts that hold several rows in a byte are or-ed in.
"""

from libc.stdint cimport int64_t, uint8_t, uint32_t
from libc.string cimport memcpy

from pagedkv.core._kernels cimport *


cdef int64_t place(uint8_t *data, const uint8_t *v, int64_t r, int nibbles, int pairs, int bits) noexcept nogil:
    """Put 32 values of row r into the parts of a block, low bits first; returns the bytes of a block of 16 rows."""
    cdef int64_t i, j
    cdef int64_t size = 0
    cdef int shift = 0
    if nibbles:
        for j in range(4):
            for i in range(4):
                data[64 * j + 4 * r + i] = (v[4 * j + i] & 15) | (v[16 + 4 * j + i] & 15) << 4
        size += 256
        shift = 4
    if pairs:
        for j in range(8):
            for i in range(4):
                data[size + 64 * (j // 4) + 4 * r + i] |= (v[4 * j + i] >> shift & 3) << 2 * (j % 4)
        size += 128
        shift += 2
    if bits:
        for j in range(8):
            for i in range(4):
                data[size + 8 * j + r // 2] |= (v[4 * j + i] >> shift & 1) << (4 * (r % 2) + i)
        size += 64
    return size


cdef void read_nibbles(uint8_t *v, const uint8_t *qs) noexcept nogil:
    """16 bytes: low nibbles, then high nibbles."""
    cdef int i
    for i in range(16):
        v[i] = qs[i] & 15
        v[16 + i] = qs[i] >> 4


cdef void read_six_bit_scales(uint8_t *sc, uint8_t *mn, const uint8_t *packed) noexcept nogil:
    """The 12 bytes that hold 8 scales and 8 minima of 6 bits in Q4_K and Q5_K."""
    cdef int j
    for j in range(4):
        sc[j] = packed[j] & 63
        mn[j] = packed[j + 4] & 63
        sc[j + 4] = (packed[j + 8] & 15) | (packed[j] >> 6) << 4
        mn[j + 4] = packed[j + 8] >> 4 | (packed[j + 4] >> 6) << 4


cdef void pack_halves(uint8_t *scales, int64_t r, const uint8_t *d, const uint8_t *m) noexcept nogil:
    memcpy(scales + 2 * r, d, 2)
    if m != NULL:
        memcpy(scales + 32 + 2 * r, m, 2)


cdef void pack_5bit(uint8_t *data, uint8_t *scales, const uint8_t *source, bint minimum, int64_t r, int64_t n_blocks) noexcept nogil:
    """Q5_0: d, 32 high bits, nibbles; Q5_1: d, m, the same."""
    cdef uint8_t v[32]
    cdef uint32_t high
    cdef int64_t b, k
    for b in range(n_blocks):
        pack_halves(scales, r, source, source + 2 if minimum else NULL)
        source += 4 if minimum else 2
        memcpy(&high, source, 4)
        read_nibbles(v, source + 4)
        for k in range(32):
            v[k] |= (high >> k & 1) << 4
        data += place(data, v, r, 1, 0, 1)
        scales += 64 if minimum else 32
        source += 20


cdef void pack_4k(uint8_t *data, uint8_t *scales, const uint8_t *source, bint fifth_bit, int64_t r, int64_t n_blocks) noexcept nogil:
    """Q4_K: d, m, 12 bytes of scales, nibbles of pairs of blocks; Q5_K: 32 bytes of high bits before the nibbles."""
    cdef uint8_t v[32]
    cdef uint8_t sc[8]
    cdef uint8_t mn[8]
    cdef const uint8_t *high = source + 16
    cdef const uint8_t *qs
    cdef int64_t s, b, k
    for s in range(n_blocks // 8):
        pack_halves(scales, r, source, source + 2)
        read_six_bit_scales(sc, mn, source + 4)
        high = source + 16
        qs = high + (32 if fifth_bit else 0)
        for b in range(8):
            scales[64 + 16 * b + r] = sc[b]
            scales[192 + 16 * b + r] = mn[b]
            for k in range(32):
                v[k] = qs[b // 2 * 32 + k] >> 4 * (b % 2) & 15
                if fifth_bit:
                    v[k] |= (high[k] >> b & 1) << 4
            data += place(data, v, r, 1, 0, fifth_bit)
        scales += 320
        source = qs + 128


cdef void pack_6k(uint8_t *data, uint8_t *scales, const uint8_t *source, int64_t r, int64_t n_blocks) noexcept nogil:
    """Q6_K: 128 bytes of low nibbles, 64 of high pairs, 16 int8 scales, d."""
    cdef uint8_t v[32]
    cdef const uint8_t *low
    cdef const uint8_t *high
    cdef int64_t s, b, k, c
    for s in range(n_blocks // 8):
        pack_halves(scales, r, source + 208, NULL)
        for k in range(16):
            scales[32 + 16 * k + r] = source[192 + k]
        for b in range(8):
            c = b % 4
            low = source + b // 4 * 64 + c % 2 * 32
            high = source + 128 + b // 4 * 32
            for k in range(32):
                v[k] = (low[k] >> 4 * (c // 2) & 15) | (high[k] >> 2 * c & 3) << 4
            data += place(data, v, r, 1, 1, 0)
        scales += 288
        source += 210


cdef void pack_3k(uint8_t *data, uint8_t *scales, const uint8_t *source, int64_t r, int64_t n_blocks) noexcept nogil:
    """Q3_K: 32 bytes of high bits, 64 of low pairs, 12 bytes that hold 16 scales of 6 bits less 32, d."""
    cdef uint8_t v[32]
    cdef const uint8_t *packed
    cdef int64_t s, b, k, low
    for s in range(n_blocks // 8):
        pack_halves(scales, r, source + 108, NULL)
        packed = source + 96
        for k in range(16):
            low = packed[k] & 15 if k < 8 else packed[k - 8] >> 4
            scales[32 + 16 * k + r] = <uint8_t>((low | (packed[8 + k % 4] >> 2 * (k // 4) & 3) << 4) - 32)
        for b in range(8):
            for k in range(32):
                v[k] = (source[32 + b // 4 * 32 + k] >> 2 * (b % 4) & 3) | (source[k] >> b & 1) << 2
            data += place(data, v, r, 0, 1, 1)
        scales += 288
        source += 110


cdef void pack_2k(uint8_t *data, uint8_t *scales, const uint8_t *source, int64_t r, int64_t n_blocks) noexcept nogil:
    """Q2_K: 16 bytes of scale and minimum nibbles, 64 of pairs, d, m."""
    cdef uint8_t v[32]
    cdef int64_t s, b, k
    for s in range(n_blocks // 8):
        pack_halves(scales, r, source + 80, source + 82)
        for k in range(16):
            scales[64 + 16 * k + r] = source[k]
        for b in range(8):
            for k in range(32):
                v[k] = source[16 + b // 4 * 32 + k] >> 2 * (b % 4) & 3
            data += place(data, v, r, 0, 1, 0)
        scales += 320
        source += 84


cdef void pack_row(uint8_t *data, uint8_t *scales, const uint8_t *source, int kind, int64_t r, int64_t n_blocks) noexcept nogil:
    """Pack one file row into row r of a zeroed panel. `kind` is a 5-bit type or a K-quant; n_blocks counts 32 columns each."""
    if kind == PKV_W_Q5_0 or kind == PKV_W_Q5_1:
        pack_5bit(data, scales, source, kind == PKV_W_Q5_1, r, n_blocks)
    elif kind == PKV_W_Q4_K or kind == PKV_W_Q5_K:
        pack_4k(data, scales, source, kind == PKV_W_Q5_K, r, n_blocks)
    elif kind == PKV_W_Q6_K:
        pack_6k(data, scales, source, r, n_blocks)
    elif kind == PKV_W_Q3_K:
        pack_3k(data, scales, source, r, n_blocks)
    else:
        pack_2k(data, scales, source, r, n_blocks)
