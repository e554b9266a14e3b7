/* Attention over page tiles for AVX2. Part of k_avx2.c, whose lanes it uses. */

TILE __m256 load_kv(const uint8_t *p, int64_t i, int32_t format)
{
    return format == PKV_KV_F32   ? _mm256_loadu_ps((const float *)p + i)
           : format == PKV_KV_F16 ? _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)(p + 2 * i)))
                                  : _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i *)(p + i))));
}

static void kv_write_f32(uint8_t *restrict tile, const float *restrict k, const float *restrict v, int64_t slot, int64_t head_dim,
                         int64_t page_tokens)
{
    int64_t head_dim16 = pkv_round_up(head_dim, 16);
    float *kt = (float *)tile + slot, *vt = (float *)(tile + pkv_tile_v(PKV_KV_F32, head_dim, page_tokens)) + slot * head_dim16;
    for (int64_t d = 0; d < head_dim; d++)
        kt[d * page_tokens] = k[d];
    for (int64_t d = 0; d < head_dim16; d += 8)
        _mm256_storeu_ps(vt + d, load(v + d, head_dim - d));
}

static inline __m128i halves(__m256 x) { return _mm256_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT); }

static void kv_write_f16(uint8_t *restrict tile, const float *restrict k, const float *restrict v, int64_t slot, int64_t head_dim,
                         int64_t page_tokens)
{
    int64_t head_dim16 = pkv_round_up(head_dim, 16);
    uint16_t *kt = (uint16_t *)tile + slot;
    uint16_t *vt = (uint16_t *)(tile + pkv_tile_v(PKV_KV_F16, head_dim, page_tokens)) + slot * head_dim16;
    for (int64_t d = 0; d < head_dim; d += 8) {
        uint16_t h[8];
        _mm_storeu_si128((__m128i *)h, halves(load(k + d, head_dim - d)));
        for (int64_t i = 0; i < 8 && d + i < head_dim; i++)
            kt[(d + i) * page_tokens] = h[i];
    }
    for (int64_t d = 0; d < head_dim16; d += 8)
        _mm_storeu_si128((__m128i *)(vt + d), halves(load(v + d, head_dim - d)));
}

static float row_scale_of(float *inverse, const float *x, int64_t n)
{
    __m256i top = _mm256_setzero_si256();
    for (int64_t i = 0; i < n; i += 8)
        top = _mm256_max_epi32(top, _mm256_castps_si256(magnitude(load(x + i, n - i))));
    return row_scale(inverse, largest_lane(top), 127.0f);
}

static inline void quantise8_to(int8_t *q, const float *x, int64_t n, float inverse) /* q [8], zeros from n on */
{
    __m256i i = quantise8(load(x, n), inverse);
    __m128i w = _mm_packs_epi32(_mm256_castsi256_si128(i), _mm256_extracti128_si256(i, 1));
    _mm_storel_epi64((__m128i *)q, _mm_packs_epi16(w, w));
}

static void kv_write_int8(uint8_t *restrict tile, const float *restrict k, const float *restrict v, int64_t slot, int64_t head_dim,
                          int64_t page_tokens)
{
    int64_t head_dim16 = pkv_round_up(head_dim, 16);
    int8_t *kt = (int8_t *)tile + slot, *vt = (int8_t *)(tile + pkv_tile_v(PKV_KV_INT8, head_dim, page_tokens)) + slot * head_dim16;
    float *scales = (float *)(tile + pkv_tile_scales(PKV_KV_INT8, head_dim, page_tokens)), inverse;
    scales[slot] = row_scale_of(&inverse, k, head_dim);
    for (int64_t d = 0; d < head_dim; d += 8) {
        int8_t q[8];
        quantise8_to(q, k + d, head_dim - d, inverse);
        for (int64_t i = 0; i < 8 && d + i < head_dim; i++)
            kt[(d + i) * page_tokens] = q[i];
    }
    scales[page_tokens + slot] = row_scale_of(&inverse, v, head_dim);
    for (int64_t d = 0; d < head_dim16; d += 8)
        quantise8_to(vt + d, v + d, head_dim - d, inverse);
}

TILE float element(const uint8_t *p, int64_t i, int32_t format)
{
    return format == PKV_KV_F32   ? ((const float *)p)[i]
           : format == PKV_KV_F16 ? _cvtsh_ss(((const uint16_t *)p)[i])
                                  : (float)((const int8_t *)p)[i];
}

TILE void kv_read(float *k, float *v, const uint8_t *tile, int64_t slot0, int64_t n, int64_t head_dim, int64_t page_tokens,
                  int64_t out_stride, int32_t format)
{
    const uint8_t *vt = tile + pkv_tile_v(format, head_dim, page_tokens);
    const float *scales = (const float *)(tile + pkv_tile_scales(format, head_dim, page_tokens));
    int64_t head_dim16 = pkv_round_up(head_dim, 16);
    for (int64_t slot = slot0; slot < slot0 + n; slot++, k += out_stride, v += out_stride) {
        for (int64_t d = 0; d < head_dim; d++) {
            float x = element(tile, d * page_tokens + slot, format);
            k[d] = format == PKV_KV_INT8 ? x * scales[slot] : x;
        }
        for (int64_t d = 0; d < head_dim; d += 8) {
            __m256 x = load_kv(vt, slot * head_dim16 + d, format);
            if (format == PKV_KV_INT8)
                x = _mm256_mul_ps(x, _mm256_broadcast_ss(scales + page_tokens + slot));
            store(v + d, x, head_dim - d);
        }
    }
}

/* One 64-byte line of the tiles that come next. A few per step keep memory busy while the step computes; a burst would stall it. */
TILE void prefetch(const uint8_t *p) { _mm_prefetch((const char *)p, _MM_HINT_T1); }

/* n_q queries x n_g groups of 16 tokens from `group` on: n_q * n_g <= 6, n_g = 1 from 4 queries on */
TILE void qk_tile(float *s, const float *q, const uint8_t *const *tiles, const uint8_t *const *ahead, int64_t group, int64_t head_dim,
                  int64_t page_tokens, int64_t s_stride, int64_t q_stride, float scale, int n_q, int n_g, int32_t format)
{
    const int64_t per_tile = page_tokens / 16, size = pkv_kv_element_bytes(format);
    const int per_line = format == PKV_KV_F32 ? 1 : format == PKV_KV_F16 ? 2 : 4; /* groups of one row, or rows of one group */
    const uint8_t *tile[4], *next[4];
    int64_t column[4];
    __m256 acc[12];
    for (int g = 0; g < n_g; g++) {
        tile[g] = tiles[(group + g) / per_tile];
        column[g] = (group + g) % per_tile * 16;
        next[g] = ahead ? ahead[(group + g) / per_tile] + column[g] * size : NULL;
    }
    for (int i = 0; i < 2 * n_q * n_g; i++)
        acc[i] = _mm256_setzero_ps();
    for (int64_t d = 0; d < head_dim; d++) {
        __m256 a[3];
        for (int j = 0; n_q <= 3 && j < n_q; j++)
            a[j] = _mm256_broadcast_ss(q + j * q_stride + d);
        for (int g = 0; g < n_g; g++) {
            __m256 k[2];
            if (ahead && (d + group + g) % per_line == 0)
                prefetch(next[g] + d * page_tokens * size);
            if (n_q <= 3) /* few rows of many groups: q stays in registers and K passes through */
                for (int i = 0; i < 2; i++) {
                    k[i] = load_kv(tile[g], d * page_tokens + column[g] + 8 * i, format);
                    for (int j = 0; j < n_q; j++)
                        acc[2 * (j * n_g + g) + i] = _mm256_fmadd_ps(a[j], k[i], acc[2 * (j * n_g + g) + i]);
                }
            else {
                for (int i = 0; i < 2; i++)
                    k[i] = load_kv(tile[g], d * page_tokens + column[g] + 8 * i, format);
                for (int j = 0; j < n_q; j++)
                    for (int i = 0; i < 2; i++)
                        acc[2 * j + i] = _mm256_fmadd_ps(_mm256_broadcast_ss(q + j * q_stride + d), k[i], acc[2 * j + i]);
            }
        }
    }
    for (int g = 0; g < n_g; g++) {
        const float *k_scale = (const float *)(tile[g] + pkv_tile_scales(format, head_dim, page_tokens)) + column[g];
        for (int j = 0; j < n_q; j++)
            for (int i = 0; i < 2; i++) {
                __m256 x = acc[2 * (j * n_g + g) + i];
                if (format == PKV_KV_INT8)
                    x = _mm256_mul_ps(x, _mm256_loadu_ps(k_scale + 8 * i));
                _mm256_storeu_ps(s + j * s_stride + 16 * (group + g) + 8 * i, _mm256_mul_ps(x, _mm256_set1_ps(scale)));
            }
    }
}

TILE void qk(float *s, const float *q, const uint8_t *const *tiles, const uint8_t *const *ahead, int64_t n_q, int64_t n_tiles,
             int64_t head_dim, int64_t page_tokens, int64_t s_stride, int64_t q_stride, float scale, int32_t format)
{
#define QK(n, g) qk_tile(s, q, tiles, ahead, group, head_dim, page_tokens, s_stride, q_stride, scale, n, g, format)
    const int64_t n_groups = n_tiles * (page_tokens / 16);
    for (int64_t n_blocks = (n_q + 5) / 6; n_blocks; n_blocks--) {
        int64_t n = (n_q + n_blocks - 1) / n_blocks, group = 0;
        for (; n == 1 && group + 4 <= n_groups; group += 4)
            QK(1, 4);
        for (; n == 2 && group + 3 <= n_groups; group += 3)
            QK(2, 3);
        for (; n == 3 && group + 2 <= n_groups; group += 2)
            QK(3, 2);
        for (; group < n_groups; group++)
            switch (n) {
            case 1: QK(1, 1); break;
            case 2: QK(2, 1); break;
            case 3: QK(3, 1); break;
            case 4: QK(4, 1); break;
            case 5: QK(5, 1); break;
            case 6: QK(6, 1); break;
            }
        s += n * s_stride, q += n * q_stride, n_q -= n, ahead = NULL;
    }
#undef QK
}

/* n_q queries x n_d groups of 16 output lanes from lane d, n_q * n_d <= 6 */
TILE void pv_tile(float *o, const float *p, const uint8_t *const *tiles, const uint8_t *const *ahead, int64_t d, int64_t start,
                  int64_t stop, int64_t head_dim, int64_t page_tokens, int64_t o_stride, int64_t p_stride, int n_q, int n_d,
                  int32_t format)
{
    const int64_t head_dim16 = pkv_round_up(head_dim, 16), v_offset = pkv_tile_v(format, head_dim, page_tokens);
    const int64_t scale_offset = pkv_tile_scales(format, head_dim, page_tokens) + 4 * page_tokens;
    const int64_t size = pkv_kv_element_bytes(format);
    __m256 acc[12];
    for (int j = 0; j < n_q; j++)
        for (int i = 0; i < 2 * n_d; i++)
            acc[2 * j * n_d + i] = _mm256_loadu_ps(o + j * o_stride + d + 8 * i);
    for (int64_t t = start; t < stop;) {
        int64_t slot = t % page_tokens, n = stop - t < page_tokens - slot ? stop - t : page_tokens - slot;
        const uint8_t *tile = tiles[t / page_tokens], *vt = tile + v_offset;
        const uint8_t *next = ahead ? ahead[t / page_tokens] + v_offset : vt;
        const float *v_scale = (const float *)(tile + scale_offset);
        for (; n > 0; n--, t++, slot++) {
            __m256 a[6], v[8];
            for (int i = 0; ahead && i < 2 * n_d; i++)
                if (8 * i * size % 64 == 0)
                    prefetch(next + (slot * head_dim16 + d + 8 * i) * size);
            for (int i = 0; n_q != 3 && i < 2 * n_d; i++)
                v[i] = load_kv(vt, slot * head_dim16 + d + 8 * i, format);
            for (int j = 0; j < n_q; j++) {
                a[j] = _mm256_broadcast_ss(p + j * p_stride + t);
                if (format == PKV_KV_INT8)
                    a[j] = _mm256_mul_ps(a[j], _mm256_broadcast_ss(v_scale + slot));
                for (int i = 0; n_q != 3 && i < 2 * n_d; i++)
                    acc[2 * j * n_d + i] = _mm256_fmadd_ps(a[j], v[i], acc[2 * j * n_d + i]);
            }
            for (int i = 0; n_q == 3 && i < 2 * n_d; i++) { /* three rows leave no register for V: it passes through */
                v[i] = load_kv(vt, slot * head_dim16 + d + 8 * i, format);
                for (int j = 0; j < n_q; j++)
                    acc[2 * j * n_d + i] = _mm256_fmadd_ps(a[j], v[i], acc[2 * j * n_d + i]);
            }
        }
    }
    for (int j = 0; j < n_q; j++)
        for (int i = 0; i < 2 * n_d; i++)
            _mm256_storeu_ps(o + j * o_stride + d + 8 * i, acc[2 * j * n_d + i]);
}

TILE void pv(float *o, const float *p, const uint8_t *const *tiles, const uint8_t *const *ahead, int64_t n_q, int64_t start,
             int64_t stop, int64_t head_dim, int64_t page_tokens, int64_t o_stride, int64_t p_stride, int32_t format)
{
#define PV(n, g) pv_tile(o, p, tiles, ahead, d, start, stop, head_dim, page_tokens, o_stride, p_stride, n, g, format)
    const int64_t head_dim16 = pkv_round_up(head_dim, 16);
    for (int64_t n_blocks = (n_q + 5) / 6; n_blocks; n_blocks--) {
        int64_t n = (n_q + n_blocks - 1) / n_blocks, d = 0;
        for (; n == 1 && d + 64 <= head_dim16; d += 64)
            PV(1, 4);
        for (; n == 2 && d + 32 <= head_dim16; d += 32)
            PV(2, 2);
        for (; n == 3 && d + 32 <= head_dim16; d += 32)
            PV(3, 2);
        for (; d < head_dim16; d += 16)
            switch (n) {
            case 1: PV(1, 1); break;
            case 2: PV(2, 1); break;
            case 3: PV(3, 1); break;
            case 4: PV(4, 1); break;
            case 5: PV(5, 1); break;
            case 6: PV(6, 1); break;
            }
        o += n * o_stride, p += n * p_stride, n_q -= n, ahead = NULL;
    }
#undef PV
}

#define FORMAT(name, format)                                                                                                        \
    static void kv_read_##name(float *restrict k, float *restrict v, const uint8_t *restrict tile, int64_t slot0, int64_t n,        \
                               int64_t head_dim, int64_t page_tokens, int64_t out_stride)                                           \
    {                                                                                                                               \
        kv_read(k, v, tile, slot0, n, head_dim, page_tokens, out_stride, format);                                                   \
    }                                                                                                                               \
    static void qk_##name(float *restrict s, const float *restrict q, const uint8_t *const *restrict tiles,                         \
                          const uint8_t *const *restrict ahead, int64_t n_q, int64_t n_tiles, int64_t head_dim,                     \
                          int64_t page_tokens, int64_t s_stride, int64_t q_stride, float scale)                                     \
    {                                                                                                                               \
        qk(s, q, tiles, ahead, n_q, n_tiles, head_dim, page_tokens, s_stride, q_stride, scale, format);                                    \
    }                                                                                                                               \
    static void pv_##name(float *restrict o, const float *restrict p, const uint8_t *const *restrict tiles,                         \
                          const uint8_t *const *restrict ahead, int64_t n_q, int64_t start, int64_t stop, int64_t head_dim,         \
                          int64_t page_tokens, int64_t o_stride, int64_t p_stride)                                                  \
    {                                                                                                                               \
        pv(o, p, tiles, ahead, n_q, start, stop, head_dim, page_tokens, o_stride, p_stride, format);                                       \
    }
FORMAT(f32, PKV_KV_F32)
FORMAT(f16, PKV_KV_F16)
FORMAT(int8, PKV_KV_INT8)

static float softmax(float *y, const float *x, int64_t n, float m, float inv_t)
{
    __m256 lane[2] = {_mm256_setzero_ps(), _mm256_setzero_ps()};
    for (int64_t i = 0; i < n; i += 8) {
        __m256 e = _mm256_sub_ps(load(x + i, n - i), _mm256_set1_ps(m));
        e = exp8(_mm256_mul_ps(e, _mm256_set1_ps(inv_t)));
        store(y + i, e, n - i);
        if (n - i < 8)
            e = _mm256_and_ps(e, _mm256_castsi256_ps(first_lanes(n - i)));
        lane[i / 8 % 2] = _mm256_add_ps(lane[i / 8 % 2], e);
    }
    return tree_sum(lane[0], lane[1]);
}

static void softcap(float *x, int64_t n, float cap)
{
    const __m256 one = _mm256_set1_ps(1.0f), two = _mm256_set1_ps(2.0f), sign = _mm256_set1_ps(-0.0f);
    for (int64_t i = 0; i < n; i += 8) {
        __m256 z = _mm256_div_ps(load(x + i, n - i), _mm256_set1_ps(cap)), t = exp8(_mm256_mul_ps(two, magnitude(z)));
        t = _mm256_sub_ps(one, _mm256_div_ps(two, _mm256_add_ps(t, one)));
        t = _mm256_or_ps(magnitude(t), _mm256_and_ps(z, sign));
        store(x + i, _mm256_mul_ps(_mm256_set1_ps(cap), t), n - i);
    }
}

static void merge(float *restrict o, float *restrict m, float *restrict l, const float *restrict o2, float m2, float l2, int64_t n)
{
    float top = *m > m2 ? *m : m2;
    __m256 a = exp8(_mm256_set1_ps(*m - top)), b = exp8(_mm256_set1_ps(m2 - top));
    for (int64_t d = 0; d < n; d += 8)
        store(o + d, _mm256_fmadd_ps(load(o2 + d, n - d), b, _mm256_mul_ps(load(o + d, n - d), a)), n - d);
    *l = fmaf(l2, _mm256_cvtss_f32(b), *l * _mm256_cvtss_f32(a));
    *m = top;
}
