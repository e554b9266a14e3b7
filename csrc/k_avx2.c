/* AVX2 with FMA and F16C: two registers of 8 lanes stand for the 16 virtual lanes. */
#include "pkv_kernels.h"

#if !defined(__AVX2__) || !defined(__FMA__) || !defined(__F16C__)
#error "k_avx2.c needs -mavx2 -mfma -mf16c"
#endif

#include <immintrin.h>
#include <math.h>
#include <string.h>

#include "avx2_gemm.h"

/* ---- lanes ---- */

static inline __m256i first_lanes(int64_t n) /* all bits set in lanes [0, n) */
{
    return _mm256_cmpgt_epi32(_mm256_set1_epi32((int)n), _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7));
}

static inline __m256 load(const float *p, int64_t n) /* the first n of 8, zeros behind; touches nothing beyond */
{
    return n >= 8 ? _mm256_loadu_ps(p) : _mm256_maskload_ps(p, first_lanes(n));
}

static inline void store(float *p, __m256 x, int64_t n)
{
    if (n >= 8)
        _mm256_storeu_ps(p, x);
    else
        _mm256_maskstore_ps(p, first_lanes(n), x);
}

static inline __m256 negate(__m256 x) { return _mm256_xor_ps(x, _mm256_set1_ps(-0.0f)); }
static inline __m256 magnitude(__m256 x) { return _mm256_andnot_ps(_mm256_set1_ps(-0.0f), x); }

static inline float tree_sum(__m256 low, __m256 high)
{
    __m256 eight = _mm256_add_ps(low, high);
    __m128 four = _mm_add_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
    __m128 two = _mm_add_ps(four, _mm_movehl_ps(four, four));
    return _mm_cvtss_f32(_mm_add_ss(two, _mm_movehdup_ps(two)));
}

/* min and the last comparison are ordered so that NaN stays NaN */
static inline __m256 exp8(__m256 x)
{
    const __m256 magic = _mm256_set1_ps(12582912.0f), one = _mm256_set1_ps(1.0f);
    __m256 y = _mm256_min_ps(_mm256_set1_ps(88.0f), x), n = _mm256_fmadd_ps(y, _mm256_set1_ps(1.44269504f), magic), r, p;
    __m256i scale = _mm256_add_epi32(_mm256_slli_epi32(_mm256_castps_si256(n), 23), _mm256_castps_si256(one));
    n = _mm256_sub_ps(n, magic);
    r = _mm256_fmadd_ps(n, _mm256_set1_ps(-0.693145752f), y);
    r = _mm256_fmadd_ps(n, _mm256_set1_ps(-1.42860677e-6f), r);
    p = _mm256_set1_ps(1.38888885e-3f);
    p = _mm256_fmadd_ps(p, r, _mm256_set1_ps(8.33333377e-3f));
    p = _mm256_fmadd_ps(p, r, _mm256_set1_ps(4.16666679e-2f));
    p = _mm256_fmadd_ps(p, r, _mm256_set1_ps(1.66666672e-1f));
    p = _mm256_fmadd_ps(p, r, _mm256_set1_ps(0.5f));
    p = _mm256_fmadd_ps(p, r, one);
    p = _mm256_fmadd_ps(p, r, one);
    p = _mm256_mul_ps(p, _mm256_castsi256_ps(scale));
    return _mm256_andnot_ps(_mm256_cmp_ps(x, _mm256_set1_ps(-87.0f), _CMP_LT_OQ), p);
}

/* ---- quantisation ---- */

static inline uint32_t largest_lane(__m256i x) /* of bits without sign */
{
    __m128i m = _mm_max_epi32(_mm256_castsi256_si128(x), _mm256_extracti128_si256(x, 1));
    m = _mm_max_epi32(m, _mm_shuffle_epi32(m, 0x4e));
    return (uint32_t)_mm_cvtsi128_si32(_mm_max_epi32(m, _mm_shuffle_epi32(m, 0xb1)));
}

/* The scale of a row whose largest magnitude has these bits and becomes the integer top; *inverse is what values are multiplied by,
 * 0 for a row of zeros. */
static inline float row_scale(float *inverse, uint32_t largest, float top)
{
    float amax;
    memcpy(&amax, &largest, 4);
    *inverse = largest >= 0x7f800000u || amax < 0x1p-100f ? 0.0f : top / amax;
    return largest >= 0x7f800000u ? NAN : amax < 0x1p-100f ? 0.0f : amax * (1.0f / top);
}

static inline __m256i quantise8(__m256 x, float inverse)
{
    return inverse == 0.0f ? _mm256_setzero_si256() : _mm256_cvtps_epi32(_mm256_mul_ps(x, _mm256_set1_ps(inverse)));
}

static inline int32_t sum8(__m256i x)
{
    __m128i four = _mm_add_epi32(_mm256_castsi256_si128(x), _mm256_extracti128_si256(x, 1));
    four = _mm_add_epi32(four, _mm_shuffle_epi32(four, 0x4e));
    return _mm_cvtsi128_si32(_mm_add_epi32(four, _mm_shuffle_epi32(four, 0xb1)));
}

static void quant_i8(int8_t *restrict q, float *restrict scale, float *restrict sum, int32_t *restrict isum, int32_t *restrict half,
                     const float *restrict x, int64_t n)
{
    const __m256i order = _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7);
    for (int64_t b = 0; b < n / 32; b++) {
        __m256 v[4];
        __m256i i[4], top, total;
        float inverse;
        for (int k = 0; k < 4; k++) {
            v[k] = _mm256_loadu_ps(x + 32 * b + 8 * k);
            i[k] = _mm256_castps_si256(magnitude(v[k]));
        }
        top = _mm256_max_epi32(_mm256_max_epi32(i[0], i[1]), _mm256_max_epi32(i[2], i[3]));
        scale[b] = row_scale(&inverse, largest_lane(top), 127.0f);
        for (int k = 0; k < 4; k++)
            i[k] = quantise8(v[k], inverse);
        half[b] = sum8(_mm256_add_epi32(i[0], i[1]));
        isum[b] = half[b] + sum8(_mm256_add_epi32(i[2], i[3]));
        sum[b] = scale[b] * (float)isum[b];
        total = _mm256_packs_epi16(_mm256_packs_epi32(i[0], i[1]), _mm256_packs_epi32(i[2], i[3]));
        _mm256_storeu_si256((__m256i *)(q + 32 * b), _mm256_permutevar8x32_epi32(total, order));
    }
}

/* Each value is 16 * q + low. */
static void quant_i12(int8_t *restrict q, int8_t *restrict low, float *restrict scale, int32_t *restrict isum, int32_t *restrict half,
                      const float *restrict x, int64_t n)
{
    const __m256i order = _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7);
    for (int64_t start = 0; start < n; start += 256) {
        int64_t stop = start + 256 < n ? start + 256 : n;
        __m256i top = _mm256_setzero_si256();
        float inverse;
        for (int64_t i = start; i < stop; i += 8)
            top = _mm256_max_epi32(top, _mm256_castps_si256(magnitude(_mm256_loadu_ps(x + i))));
        scale[start / 256] = row_scale(&inverse, largest_lane(top), 2039.0f);
        for (int64_t b = start / 32; b < stop / 32; b++) {
            __m256i v[4], high[4], packed;
            for (int k = 0; k < 4; k++) {
                v[k] = quantise8(_mm256_loadu_ps(x + 32 * b + 8 * k), inverse);
                high[k] = _mm256_srai_epi32(_mm256_add_epi32(v[k], _mm256_set1_epi32(8)), 4);
            }
            half[b] = sum8(_mm256_add_epi32(v[0], v[1]));
            isum[b] = half[b] + sum8(_mm256_add_epi32(v[2], v[3]));
            packed = _mm256_packs_epi16(_mm256_packs_epi32(high[0], high[1]), _mm256_packs_epi32(high[2], high[3]));
            _mm256_storeu_si256((__m256i *)(q + 32 * b), _mm256_permutevar8x32_epi32(packed, order));
            for (int k = 0; k < 4; k++)
                v[k] = _mm256_sub_epi32(v[k], _mm256_slli_epi32(high[k], 4));
            packed = _mm256_packs_epi16(_mm256_packs_epi32(v[0], v[1]), _mm256_packs_epi32(v[2], v[3]));
            _mm256_storeu_si256((__m256i *)(low + 32 * b), _mm256_permutevar8x32_epi32(packed, order));
        }
    }
}

/* ---- attention over page tiles ---- */

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

/* n_q queries x n_g groups of 16 tokens, n_q * n_g <= 4 */
TILE void qk_tile(float *s, const float *q, const uint8_t *const *tiles, int64_t group, int64_t head_dim, int64_t page_tokens,
                  int64_t s_stride, int64_t q_stride, float scale, int n_q, int n_g, int32_t format)
{
    const int64_t per_tile = page_tokens / 16;
    const uint8_t *tile[4];
    int64_t column[4];
    __m256 acc[8];
    for (int g = 0; g < n_g; g++) {
        tile[g] = tiles[(group + g) / per_tile];
        column[g] = (group + g) % per_tile * 16;
    }
    for (int i = 0; i < 2 * n_q * n_g; i++)
        acc[i] = _mm256_setzero_ps();
    for (int64_t d = 0; d < head_dim; d++)
        for (int g = 0; g < n_g; g++) {
            __m256 low = load_kv(tile[g], d * page_tokens + column[g], format);
            __m256 high = load_kv(tile[g], d * page_tokens + column[g] + 8, format);
            for (int j = 0; j < n_q; j++) {
                __m256 a = _mm256_broadcast_ss(q + j * q_stride + d);
                acc[2 * (j * n_g + g)] = _mm256_fmadd_ps(a, low, acc[2 * (j * n_g + g)]);
                acc[2 * (j * n_g + g) + 1] = _mm256_fmadd_ps(a, high, acc[2 * (j * n_g + g) + 1]);
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

TILE void qk(float *s, const float *q, const uint8_t *const *tiles, int64_t n_q, int64_t n_tiles, int64_t head_dim,
             int64_t page_tokens, int64_t s_stride, int64_t q_stride, float scale, int32_t format)
{
#define QK(n, g) qk_tile(s + j * s_stride, q + j * q_stride, tiles, group, head_dim, page_tokens, s_stride, q_stride, scale, n, g, format)
    const int64_t n_groups = n_tiles * (page_tokens / 16);
    int64_t group = 0, j = 0;
    for (; n_q == 1 && group + 4 <= n_groups; group += 4)
        QK(1, 4);
    for (; n_q == 2 && group + 2 <= n_groups; group += 2)
        QK(2, 2);
    for (; group < n_groups; group++) {
        for (j = 0; j + 4 <= n_q; j += 4)
            QK(4, 1);
        if (n_q - j == 3)
            QK(3, 1);
        else if (n_q - j == 2)
            QK(2, 1);
        else if (n_q - j == 1)
            QK(1, 1);
    }
#undef QK
}

/* n_q queries x n_d groups of 16 output lanes from lane d, n_q * n_d <= 4 */
TILE void pv_tile(float *o, const float *p, const uint8_t *const *tiles, int64_t d, int64_t start, int64_t stop, int64_t head_dim,
                  int64_t page_tokens, int64_t o_stride, int64_t p_stride, int n_q, int n_d, int32_t format)
{
    const int64_t head_dim16 = pkv_round_up(head_dim, 16), v_offset = pkv_tile_v(format, head_dim, page_tokens);
    const int64_t scale_offset = pkv_tile_scales(format, head_dim, page_tokens) + 4 * page_tokens;
    __m256 acc[8];
    for (int j = 0; j < n_q; j++)
        for (int i = 0; i < 2 * n_d; i++)
            acc[2 * j * n_d + i] = _mm256_loadu_ps(o + j * o_stride + d + 8 * i);
    for (int64_t t = start; t < stop;) {
        int64_t slot = t % page_tokens, n = stop - t < page_tokens - slot ? stop - t : page_tokens - slot;
        const uint8_t *tile = tiles[t / page_tokens], *vt = tile + v_offset;
        const float *v_scale = (const float *)(tile + scale_offset);
        for (; n > 0; n--, t++, slot++) {
            __m256 v[8];
            for (int i = 0; i < 2 * n_d; i++)
                v[i] = load_kv(vt, slot * head_dim16 + d + 8 * i, format);
            for (int j = 0; j < n_q; j++) {
                __m256 a = _mm256_broadcast_ss(p + j * p_stride + t);
                if (format == PKV_KV_INT8)
                    a = _mm256_mul_ps(a, _mm256_broadcast_ss(v_scale + slot));
                for (int i = 0; i < 2 * n_d; i++)
                    acc[2 * j * n_d + i] = _mm256_fmadd_ps(a, v[i], acc[2 * j * n_d + i]);
            }
        }
    }
    for (int j = 0; j < n_q; j++)
        for (int i = 0; i < 2 * n_d; i++)
            _mm256_storeu_ps(o + j * o_stride + d + 8 * i, acc[2 * j * n_d + i]);
}

TILE void pv(float *o, const float *p, const uint8_t *const *tiles, int64_t n_q, int64_t start, int64_t stop, int64_t head_dim,
             int64_t page_tokens, int64_t o_stride, int64_t p_stride, int32_t format)
{
#define PV(n, g) \
    pv_tile(o + j * o_stride, p + j * p_stride, tiles, d, start, stop, head_dim, page_tokens, o_stride, p_stride, n, g, format)
    const int64_t head_dim16 = pkv_round_up(head_dim, 16);
    int64_t j = 0, d = 0;
    for (; n_q == 1 && d + 64 <= head_dim16; d += 64)
        PV(1, 4);
    for (; n_q == 2 && d + 32 <= head_dim16; d += 32)
        PV(2, 2);
    for (; d < head_dim16; d += 16) {
        for (j = 0; j + 4 <= n_q; j += 4)
            PV(4, 1);
        if (n_q - j == 3)
            PV(3, 1);
        else if (n_q - j == 2)
            PV(2, 1);
        else if (n_q - j == 1)
            PV(1, 1);
    }
#undef PV
}

#define FORMAT(name, format)                                                                                                        \
    static void kv_read_##name(float *restrict k, float *restrict v, const uint8_t *restrict tile, int64_t slot0, int64_t n,        \
                               int64_t head_dim, int64_t page_tokens, int64_t out_stride)                                           \
    {                                                                                                                               \
        kv_read(k, v, tile, slot0, n, head_dim, page_tokens, out_stride, format);                                                   \
    }                                                                                                                               \
    static void qk_##name(float *restrict s, const float *restrict q, const uint8_t *const *restrict tiles, int64_t n_q,            \
                          int64_t n_tiles, int64_t head_dim, int64_t page_tokens, int64_t s_stride, int64_t q_stride, float scale)  \
    {                                                                                                                               \
        qk(s, q, tiles, n_q, n_tiles, head_dim, page_tokens, s_stride, q_stride, scale, format);                                    \
    }                                                                                                                               \
    static void pv_##name(float *restrict o, const float *restrict p, const uint8_t *const *restrict tiles, int64_t n_q,            \
                          int64_t start, int64_t stop, int64_t head_dim, int64_t page_tokens, int64_t o_stride, int64_t p_stride)   \
    {                                                                                                                               \
        pv(o, p, tiles, n_q, start, stop, head_dim, page_tokens, o_stride, p_stride, format);                                       \
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

/* ---- elementwise and reductions ---- */

static void rmsnorm(float *restrict y, const float *restrict x, const float *restrict w, int64_t n, float eps)
{
    __m256 low = _mm256_setzero_ps(), high = low, r;
    for (int64_t i = 0; i < n; i += 16) {
        __m256 a = load(x + i, n - i), b = load(x + i + 8, n - i - 8);
        low = _mm256_fmadd_ps(a, a, low);
        high = _mm256_fmadd_ps(b, b, high);
    }
    r = _mm256_set1_ps(1.0f / sqrtf(tree_sum(low, high) / (float)n + eps));
    for (int64_t i = 0; i < n; i += 8)
        store(y + i, _mm256_mul_ps(_mm256_mul_ps(load(x + i, n - i), r), load(w + i, n - i)), n - i);
}

static void silu_mul(float *restrict y, const float *restrict g, const float *restrict u, int64_t n)
{
    for (int64_t i = 0; i < n; i += 8) {
        __m256 a = load(g + i, n - i), s = _mm256_div_ps(a, _mm256_add_ps(_mm256_set1_ps(1.0f), exp8(negate(a))));
        store(y + i, _mm256_mul_ps(s, load(u + i, n - i)), n - i);
    }
}

static void gelu_mul(float *restrict y, const float *restrict g, const float *restrict u, int64_t n)
{
    const __m256 a = _mm256_set1_ps(1.59576912f), b = _mm256_set1_ps(0.0713548163f);
    for (int64_t i = 0; i < n; i += 8) {
        __m256 x = load(g + i, n - i), e = exp8(negate(_mm256_mul_ps(x, _mm256_fmadd_ps(b, _mm256_mul_ps(x, x), a))));
        store(y + i, _mm256_mul_ps(_mm256_div_ps(x, _mm256_add_ps(_mm256_set1_ps(1.0f), e)), load(u + i, n - i)), n - i);
    }
}

static void rope(float *restrict x, const float *restrict cs, int64_t half)
{
    for (int64_t i = 0; i < half; i += 8) {
        int64_t n = half - i;
        __m256 a = load(x + i, n), b = load(x + half + i, n), c = load(cs + i, n), s = load(cs + half + i, n);
        store(x + i, _mm256_fmsub_ps(a, c, _mm256_mul_ps(b, s)), n);
        store(x + half + i, _mm256_fmadd_ps(a, s, _mm256_mul_ps(b, c)), n);
    }
}

static void add(float *restrict y, const float *restrict x, int64_t n)
{
    for (int64_t i = 0; i < n; i += 8)
        store(y + i, _mm256_add_ps(load(y + i, n - i), load(x + i, n - i)), n - i);
}

static void scale(float *restrict y, int64_t n, float a)
{
    for (int64_t i = 0; i < n; i += 8)
        store(y + i, _mm256_mul_ps(load(y + i, n - i), _mm256_set1_ps(a)), n - i);
}

static float vmax(const float *restrict x, int64_t n)
{
    __m256 top = _mm256_set1_ps(-INFINITY), unordered = _mm256_setzero_ps();
    float lane[8], m;
    for (int64_t i = 0; i < n; i += 8) {
        __m256 v = load(x + i, n - i);
        if (n - i < 8)
            v = _mm256_blendv_ps(_mm256_set1_ps(-INFINITY), v, _mm256_castsi256_ps(first_lanes(n - i)));
        unordered = _mm256_or_ps(unordered, _mm256_cmp_ps(v, v, _CMP_UNORD_Q));
        top = _mm256_max_ps(top, v);
    }
    if (_mm256_movemask_ps(unordered))
        return NAN;
    _mm256_storeu_ps(lane, top);
    m = lane[0];
    for (int i = 1; i < 8; i++)
        m = lane[i] > m ? lane[i] : m;
    return m == 0.0f ? 0.0f : m;
}

static int64_t argmax(const float *restrict x, int64_t n)
{
    float m = vmax(x, n);
    if (m != m)
        return -1;
    for (int64_t i = 0;; i += 8) { /* some element equals the maximum */
        __m256 equal = _mm256_cmp_ps(load(x + i, n - i), _mm256_set1_ps(m), _CMP_EQ_OQ);
        int found = _mm256_movemask_ps(_mm256_and_ps(equal, _mm256_castsi256_ps(first_lanes(n - i < 8 ? n - i : 8))));
        if (found)
            return i + __builtin_ctz((unsigned)found);
    }
}

const pkv_kernels pkv_kernels_avx2 = {
    .name = "avx2",
    .gemm = {gemm_f32, gemm_f16, gemm_bf16, gemm_q4_0, gemm_q4_1, gemm_q8_0, gemm_q5_0, gemm_q5_1, gemm_q2_k, gemm_q3_k, gemm_q4_k,
             gemm_q5_k, gemm_q6_k},
    .gemm_wide = {gemm_f32, gemm_f16, gemm_bf16, gemm_wide_q4_0, gemm_wide_q4_1, gemm_wide_q8_0, gemm_wide_q5_0, gemm_wide_q5_1,
                  gemm_wide_q2_k, gemm_wide_q3_k, gemm_wide_q4_k, gemm_wide_q5_k, gemm_wide_q6_k},
    .quant_i8 = quant_i8,
    .quant_i12 = quant_i12,
    .kv_write = {kv_write_f32, kv_write_f16, kv_write_int8},
    .kv_read = {kv_read_f32, kv_read_f16, kv_read_int8},
    .qk = {qk_f32, qk_f16, qk_int8},
    .pv = {pv_f32, pv_f16, pv_int8},
    .softmax = softmax,
    .softcap = softcap,
    .merge = merge,
    .rmsnorm = rmsnorm,
    .silu_mul = silu_mul,
    .gelu_mul = gelu_mul,
    .rope = rope,
    .add = add,
    .scale = scale,
    .vmax = vmax,
    .argmax = argmax,
};
