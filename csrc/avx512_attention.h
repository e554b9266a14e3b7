/* Attention over page tiles for AVX-512. Part of k_avx512.c, whose lanes it uses; the VNNI and AMX tables point to the same functions. */

INLINE __m512 widen(const int format, const uint8_t *p) /* 16 elements */
{
    return format == PKV_KV_F32   ? _mm512_loadu_ps(p)
           : format == PKV_KV_F16 ? _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)p))
                                  : _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i *)p)));
}

INLINE void kv_write_float(const int format, uint8_t *restrict tile, const float *restrict k, const float *restrict v, int64_t slot,
                           int64_t head_dim, int64_t page_tokens)
{
    const int64_t head_dim16 = pkv_round_up(head_dim, 16);
    uint8_t *row = tile + pkv_tile_v(format, head_dim, page_tokens) + slot * head_dim16 * pkv_kv_element_bytes(format);
    for (int64_t d = 0; d < head_dim; d += 16) {
        __m512 kd = load16(k + d, head_dim - d), vd = load16(v + d, head_dim - d);
        int64_t n = head_dim - d < 16 ? head_dim - d : 16;
        if (format == PKV_KV_F32) {
            _mm512_storeu_ps((float *)row + d, vd);
            for (int64_t i = 0; i < n; i++)
                ((float *)tile)[(d + i) * page_tokens + slot] = k[d + i];
        } else {
            uint16_t half[16];
            _mm256_storeu_si256((__m256i *)((uint16_t *)row + d), to_f16(vd));
            _mm256_storeu_si256((__m256i *)half, to_f16(kd));
            for (int64_t i = 0; i < n; i++)
                ((uint16_t *)tile)[(d + i) * page_tokens + slot] = half[i];
        }
    }
}

/* Largest magnitude, as bits, to the scale of a row and what to multiply by (0 for a row of zeros). */
INLINE float row_scale(uint32_t largest, float *inverse)
{
    float amax = _mm_cvtss_f32(_mm_castsi128_ps(_mm_cvtsi32_si128((int)largest)));
    int finite = largest < 0x7f800000u, plain = finite && amax >= 0x1p-100f;
    *inverse = plain ? 127.0f / amax : 0.0f;
    return plain ? amax * (1.0f / 127.0f) : finite ? 0.0f : NAN;
}

/* 16 values as int8, zero where the row is */
INLINE __m128i quantised(__m512 x, float inverse)
{
    __mmask16 k = inverse == 0.0f ? 0 : 0xffff;
    return _mm512_cvtepi32_epi8(_mm512_maskz_cvtps_epi32(k, _mm512_mul_ps(x, _mm512_set1_ps(inverse))));
}

INLINE float head_scale(const float *x, int64_t n, float *inverse)
{
    __m512i largest = _mm512_setzero_si512();
    for (int64_t d = 0; d < n; d += 16)
        largest = _mm512_max_epu32(largest, magnitude(load16(x + d, n - d)));
    return row_scale(_mm512_reduce_max_epu32(largest), inverse);
}

INLINE void kv_read(const int format, float *restrict k, float *restrict v, const uint8_t *restrict tile, int64_t slot0, int64_t n,
                    int64_t head_dim, int64_t page_tokens, int64_t out_stride)
{
    const int64_t size = pkv_kv_element_bytes(format), head_dim16 = pkv_round_up(head_dim, 16);
    const uint8_t *vt = tile + pkv_tile_v(format, head_dim, page_tokens);
    const float *scales = (const float *)(tile + pkv_tile_scales(format, head_dim, page_tokens));
    const __m512i rows = _mm512_mullo_epi32(_mm512_set1_epi32((int)out_stride),
                                            _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15));
    for (int64_t slot = slot0; slot < slot0 + n; slot++) /* V: rows */
        for (int64_t d = 0; d < head_dim; d += 16) {
            __m512 vd = widen(format, vt + (slot * head_dim16 + d) * size);
            if (format == PKV_KV_INT8)
                vd = _mm512_mul_ps(vd, _mm512_set1_ps(scales[page_tokens + slot]));
            _mm512_mask_storeu_ps(v + (slot - slot0) * out_stride + d, first(head_dim - d), vd);
        }
    for (int64_t c = slot0 / 16 * 16; c < slot0 + n; c += 16) { /* K: 16 tokens of one column at a time, scattered to their rows */
        __mmask16 keep = first(slot0 + n - c) & (__mmask16)~first(slot0 > c ? slot0 - c : 0);
        for (int64_t d = 0; d < head_dim; d++) {
            __m512 kd = widen(format, tile + (d * page_tokens + c) * size);
            if (format == PKV_KV_INT8)
                kd = _mm512_mul_ps(kd, _mm512_loadu_ps(scales + c));
            _mm512_mask_i32scatter_ps(k + (c - slot0) * out_stride + d, keep, rows, kd, 4);
        }
    }
}

/* One 64-byte line of the tiles that come next. A few per step keep memory busy while the step computes; a burst would stall it. */
INLINE void prefetch(const uint8_t *p) { _mm_prefetch((const char *)p, _MM_HINT_T1); }

/* Q rows of q against C groups of 16 tokens, from group g on. */
INLINE void qk_block(const int format, const int Q, const int C, float *restrict s, const float *restrict q,
                     const uint8_t *const *restrict tiles, const uint8_t *const *restrict ahead, int64_t g, int64_t head_dim,
                     int64_t page_tokens, int64_t s_stride, int64_t q_stride, float scale)
{
    const int64_t size = pkv_kv_element_bytes(format), row_bytes = page_tokens * size, per_tile = page_tokens / 16;
    const int64_t scales_at = pkv_tile_scales(format, head_dim, page_tokens);
    const int per_line = format == PKV_KV_F32 ? 1 : format == PKV_KV_F16 ? 2 : 4; /* groups of one row, or rows of one group */
    const uint8_t *group[8], *next[8];
    const float *k_scale[8];
    __m512 acc[6][8];
    UNROLL for (int c = 0; c < C; c++) {
        int64_t i = (g + c) / per_tile, column = (g + c) % per_tile * 16;
        group[c] = tiles[i] + column * size;
        next[c] = ahead ? ahead[i] + column * size : NULL;
        k_scale[c] = (const float *)(tiles[i] + scales_at) + column;
        UNROLL for (int j = 0; j < Q; j++)
            acc[j][c] = _mm512_setzero_ps();
    }
    for (int64_t d = 0; d < head_dim; d++) {
        __m512 k[8];
        UNROLL for (int c = 0; c < C; c++) {
            k[c] = widen(format, group[c] + d * row_bytes);
            if (ahead && (d + c) % per_line == 0)
                prefetch(next[c] + d * row_bytes);
        }
        UNROLL for (int j = 0; j < Q; j++) {
            __m512 x = _mm512_set1_ps(q[j * q_stride + d]);
            UNROLL for (int c = 0; c < C; c++)
                acc[j][c] = _mm512_fmadd_ps(x, k[c], acc[j][c]);
        }
    }
    UNROLL for (int j = 0; j < Q; j++)
        UNROLL for (int c = 0; c < C; c++) {
            if (format == PKV_KV_INT8)
                acc[j][c] = _mm512_mul_ps(acc[j][c], _mm512_loadu_ps(k_scale[c]));
            _mm512_storeu_ps(s + j * s_stride + 16 * (g + c), _mm512_mul_ps(acc[j][c], _mm512_set1_ps(scale)));
        }
}

/* Q rows of q against every tile. */
INLINE void qk_rows(const int format, const int Q, float *restrict s, const float *restrict q, const uint8_t *const *restrict tiles,
                    const uint8_t *const *restrict ahead, int64_t n_tiles, int64_t head_dim, int64_t page_tokens, int64_t s_stride,
                    int64_t q_stride, float scale)
{
#define GROUPS(C) qk_block(format, Q, C, s, q, tiles, ahead, g, head_dim, page_tokens, s_stride, q_stride, scale)
    const int64_t n_groups = n_tiles * (page_tokens / 16);
    int64_t g = 0;
    if (Q <= 2)
        for (; g + 8 <= n_groups; g += 8)
            GROUPS(8);
    for (; g + 4 <= n_groups; g += 4)
        GROUPS(4);
    switch (n_groups - g) {
    case 1: GROUPS(1); break;
    case 2: GROUPS(2); break;
    case 3: GROUPS(3); break;
    }
#undef GROUPS
}

INLINE void qk(const int format, float *restrict s, const float *restrict q, const uint8_t *const *restrict tiles,
               const uint8_t *const *restrict ahead, int64_t n_q, int64_t n_tiles, int64_t head_dim, int64_t page_tokens,
               int64_t s_stride, int64_t q_stride, float scale)
{
    for (int64_t n_blocks = (n_q + 5) / 6; n_blocks; n_blocks--) {
        int64_t n = (n_q + n_blocks - 1) / n_blocks;
        switch (n) {
        case 1: qk_rows(format, 1, s, q, tiles, ahead, n_tiles, head_dim, page_tokens, s_stride, q_stride, scale); break;
        case 2: qk_rows(format, 2, s, q, tiles, ahead, n_tiles, head_dim, page_tokens, s_stride, q_stride, scale); break;
        case 3: qk_rows(format, 3, s, q, tiles, ahead, n_tiles, head_dim, page_tokens, s_stride, q_stride, scale); break;
        case 4: qk_rows(format, 4, s, q, tiles, ahead, n_tiles, head_dim, page_tokens, s_stride, q_stride, scale); break;
        case 5: qk_rows(format, 5, s, q, tiles, ahead, n_tiles, head_dim, page_tokens, s_stride, q_stride, scale); break;
        case 6: qk_rows(format, 6, s, q, tiles, ahead, n_tiles, head_dim, page_tokens, s_stride, q_stride, scale); break;
        }
        s += n * s_stride, q += n * q_stride, n_q -= n, ahead = NULL;
    }
}

/* Q rows of p against D groups of 16 values of head_dim, in registers over all tokens. */
INLINE void pv_block(const int format, const int Q, const int D, float *restrict o, const float *restrict p,
                     const uint8_t *const *restrict tiles, const uint8_t *const *restrict ahead, int64_t start, int64_t stop,
                     int64_t head_dim, int64_t page_tokens, int64_t o_stride, int64_t p_stride, int64_t d0)
{
    const int64_t size = pkv_kv_element_bytes(format), row_bytes = pkv_round_up(head_dim, 16) * size;
    const int64_t v_at = pkv_tile_v(format, head_dim, page_tokens) + d0 * size;
    const int64_t scales_at = pkv_tile_scales(format, head_dim, page_tokens) + 4 * page_tokens;
    __m512 acc[6][8], v[8];
    UNROLL for (int j = 0; j < Q; j++)
        UNROLL for (int d = 0; d < D; d++)
            acc[j][d] = _mm512_loadu_ps(o + j * o_stride + d0 + 16 * d);
    for (int64_t t = start; t < stop;) {
        int64_t i = t / page_tokens, slot = t - i * page_tokens, end = stop - t + slot < page_tokens ? stop - t + slot : page_tokens;
        const uint8_t *row = tiles[i] + v_at + slot * row_bytes;
        const uint8_t *next = ahead ? ahead[i] + v_at + slot * row_bytes : row;
        const float *v_scale = (const float *)(tiles[i] + scales_at);
        for (; slot < end; slot++, t++, row += row_bytes) {
            UNROLL for (int d = 0; d < D; d++) {
                v[d] = widen(format, row + 16 * d * size);
                if (ahead && 16 * d * size % 64 == 0)
                    prefetch(next + 16 * d * size);
            }
            next += row_bytes;
            UNROLL for (int j = 0; j < Q; j++) {
                float pt = p[j * p_stride + t];
                __m512 x = _mm512_set1_ps(format == PKV_KV_INT8 ? pt * v_scale[slot] : pt);
                UNROLL for (int d = 0; d < D; d++)
                    acc[j][d] = _mm512_fmadd_ps(x, v[d], acc[j][d]);
            }
        }
    }
    UNROLL for (int j = 0; j < Q; j++)
        UNROLL for (int d = 0; d < D; d++)
            _mm512_storeu_ps(o + j * o_stride + d0 + 16 * d, acc[j][d]);
}

INLINE void pv_rows(const int format, const int Q, float *restrict o, const float *restrict p, const uint8_t *const *restrict tiles,
                    const uint8_t *const *restrict ahead, int64_t start, int64_t stop, int64_t head_dim, int64_t page_tokens,
                    int64_t o_stride, int64_t p_stride)
{
    int64_t d = 0;
    if (Q <= 2)
        for (; d + 128 <= head_dim + 15; d += 128)
            pv_block(format, Q, 8, o, p, tiles, ahead, start, stop, head_dim, page_tokens, o_stride, p_stride, d);
    for (; d + 64 <= head_dim + 15; d += 64)
        pv_block(format, Q, 4, o, p, tiles, ahead, start, stop, head_dim, page_tokens, o_stride, p_stride, d);
    for (; d + 32 <= head_dim + 15; d += 32)
        pv_block(format, Q, 2, o, p, tiles, ahead, start, stop, head_dim, page_tokens, o_stride, p_stride, d);
    if (d < head_dim)
        pv_block(format, Q, 1, o, p, tiles, ahead, start, stop, head_dim, page_tokens, o_stride, p_stride, d);
}

INLINE void pv(const int format, float *restrict o, const float *restrict p, const uint8_t *const *restrict tiles,
               const uint8_t *const *restrict ahead, int64_t n_q, int64_t start, int64_t stop, int64_t head_dim, int64_t page_tokens,
               int64_t o_stride, int64_t p_stride)
{
    for (int64_t n_blocks = (n_q + 5) / 6; n_blocks; n_blocks--) {
        int64_t n = (n_q + n_blocks - 1) / n_blocks;
        switch (n) {
        case 1: pv_rows(format, 1, o, p, tiles, ahead, start, stop, head_dim, page_tokens, o_stride, p_stride); break;
        case 2: pv_rows(format, 2, o, p, tiles, ahead, start, stop, head_dim, page_tokens, o_stride, p_stride); break;
        case 3: pv_rows(format, 3, o, p, tiles, ahead, start, stop, head_dim, page_tokens, o_stride, p_stride); break;
        case 4: pv_rows(format, 4, o, p, tiles, ahead, start, stop, head_dim, page_tokens, o_stride, p_stride); break;
        case 5: pv_rows(format, 5, o, p, tiles, ahead, start, stop, head_dim, page_tokens, o_stride, p_stride); break;
        case 6: pv_rows(format, 6, o, p, tiles, ahead, start, stop, head_dim, page_tokens, o_stride, p_stride); break;
        }
        o += n * o_stride, p += n * p_stride, n_q -= n, ahead = NULL;
    }
}

#define FORMAT(name, format)                                                                                                       \
    void pkv_kv_read_##name##_avx512(float *restrict k, float *restrict v, const uint8_t *restrict tile, int64_t slot0, int64_t n, \
                                     int64_t head_dim, int64_t page_tokens, int64_t out_stride)                                    \
    {                                                                                                                              \
        kv_read(format, k, v, tile, slot0, n, head_dim, page_tokens, out_stride);                                                  \
    }                                                                                                                              \
    void pkv_qk_##name##_avx512(float *restrict s, const float *restrict q, const uint8_t *const *restrict tiles,                  \
                                const uint8_t *const *restrict ahead, int64_t n_q, int64_t n_tiles, int64_t head_dim,              \
                                int64_t page_tokens, int64_t s_stride, int64_t q_stride, float scale)                              \
    {                                                                                                                              \
        qk(format, s, q, tiles, ahead, n_q, n_tiles, head_dim, page_tokens, s_stride, q_stride, scale);                            \
    }                                                                                                                              \
    void pkv_pv_##name##_avx512(float *restrict o, const float *restrict p, const uint8_t *const *restrict tiles,                  \
                                const uint8_t *const *restrict ahead, int64_t n_q, int64_t start, int64_t stop, int64_t head_dim,  \
                                int64_t page_tokens, int64_t o_stride, int64_t p_stride)                                           \
    {                                                                                                                              \
        pv(format, o, p, tiles, ahead, n_q, start, stop, head_dim, page_tokens, o_stride, p_stride);                               \
    }
FORMAT(f32, PKV_KV_F32)
FORMAT(f16, PKV_KV_F16)
FORMAT(int8, PKV_KV_INT8)

void pkv_kv_write_f32_avx512(uint8_t *restrict tile, const float *restrict k, const float *restrict v, int64_t slot, int64_t head_dim,
                             int64_t page_tokens)
{
    kv_write_float(PKV_KV_F32, tile, k, v, slot, head_dim, page_tokens);
}

void pkv_kv_write_f16_avx512(uint8_t *restrict tile, const float *restrict k, const float *restrict v, int64_t slot, int64_t head_dim,
                             int64_t page_tokens)
{
    kv_write_float(PKV_KV_F16, tile, k, v, slot, head_dim, page_tokens);
}

void pkv_kv_write_int8_avx512(uint8_t *restrict tile, const float *restrict k, const float *restrict v, int64_t slot, int64_t head_dim,
                              int64_t page_tokens)
{
    int8_t *vt = (int8_t *)tile + pkv_tile_v(PKV_KV_INT8, head_dim, page_tokens) + slot * pkv_round_up(head_dim, 16);
    float *scales = (float *)(tile + pkv_tile_scales(PKV_KV_INT8, head_dim, page_tokens)), k_inverse, v_inverse;
    scales[slot] = head_scale(k, head_dim, &k_inverse);
    scales[page_tokens + slot] = head_scale(v, head_dim, &v_inverse);
    for (int64_t d = 0; d < head_dim; d += 16) {
        int8_t column[16];
        _mm_storeu_si128((__m128i *)(vt + d), quantised(load16(v + d, head_dim - d), v_inverse));
        _mm_storeu_si128((__m128i *)column, quantised(load16(k + d, head_dim - d), k_inverse));
        for (int64_t i = 0; i < 16 && d + i < head_dim; i++)
            ((int8_t *)tile)[(d + i) * page_tokens + slot] = column[i];
    }
}

float pkv_softmax_avx512(float *y, const float *x, int64_t n, float m, float inv_t)
{
    __m512 lane = _mm512_setzero_ps();
    for (int64_t i = 0; i < n; i += 16) {
        __m512 e = exp16(_mm512_mul_ps(_mm512_sub_ps(load16(x + i, n - i), _mm512_set1_ps(m)), _mm512_set1_ps(inv_t)));
        store16(y + i, n - i, e);
        lane = _mm512_add_ps(lane, n - i >= 16 ? e : _mm512_maskz_mov_ps(first(n - i), e));
    }
    return tree_sum(lane);
}

void pkv_softcap_avx512(float *x, int64_t n, float cap)
{
    const __m512 one = _mm512_set1_ps(1.0f), two = _mm512_set1_ps(2.0f), sign = _mm512_set1_ps(-0.0f);
    for (int64_t i = 0; i < n; i += 16) {
        __m512 z = _mm512_div_ps(load16(x + i, n - i), _mm512_set1_ps(cap));
        __m512 e = exp16(_mm512_mul_ps(two, _mm512_andnot_ps(sign, z)));
        __m512 t = _mm512_sub_ps(one, _mm512_div_ps(two, _mm512_add_ps(e, one)));
        t = _mm512_or_ps(_mm512_andnot_ps(sign, t), _mm512_and_ps(sign, z));
        store16(x + i, n - i, _mm512_mul_ps(_mm512_set1_ps(cap), t));
    }
}

void pkv_merge_avx512(float *restrict o, float *restrict m, float *restrict l, const float *restrict o2, float m2, float l2, int64_t n)
{
    float top = *m > m2 ? *m : m2;
    __m512 a = exp16(_mm512_set1_ps(*m - top)), b = exp16(_mm512_set1_ps(m2 - top));
    for (int64_t d = 0; d < n; d += 16) {
        __m512 old = _mm512_mul_ps(load16(o + d, n - d), a);
        store16(o + d, n - d, _mm512_fmadd_ps(load16(o2 + d, n - d), b, old));
    }
    *l = fmaf(l2, _mm512_cvtss_f32(b), *l * _mm512_cvtss_f32(a));
    *m = top;
}
