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

/* Block `block` of rows [token0, token0 + n_tokens). */
static void quant_column(const pkv_act *restrict a, int64_t block, int64_t token0, int64_t n_tokens)
{
    for (int64_t t = token0; t < token0 + n_tokens; t++) {
        int64_t at = t * a->b_stride + block;
        quant_i8(a->q + t * a->q_stride + 32 * block, a->scale + at, a->sum + at, a->isum + at, a->half + at,
                 a->x + t * a->x_stride + 32 * block, 32);
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

#include "avx2_attention.h"

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
    .quant_column = quant_column,
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
