/* AVX-512 F, BW, DQ, VL. Lanes are outputs: 16 weight rows, 16 tokens of a tile, 16 values of head_dim; tails are masks. */
#if !defined(__AVX512BW__) || !defined(__AVX512DQ__) || !defined(__AVX512VL__)
#error "k_avx512.c needs -mavx512f -mavx512bw -mavx512dq -mavx512vl"
#endif
#include "avx512.h"

#include <immintrin.h>
#include <math.h>

/* Nibbles: 8 products of 15 * 127 * 2 at most fit int16, so a whole block adds up there. Bytes: |w| times x with the sign of w stays
 * within int16 where the unsigned storage would saturate, so no offset is needed. */
enum { TILE_TOKENS = 4 };

static inline __m512i dot_start(int type, __m512i offset)
{
    (void)type;
    (void)offset;
    return _mm512_setzero_si512();
}

static inline __m512i dot_step(int type, __m512i sum, __m512i w, __m512i x)
{
    if (type == PKV_W_Q8_0) {
        __m512i value = _mm512_xor_si512(w, _mm512_set1_epi8(-128));
        __m512i signed_x = _mm512_mask_sub_epi8(x, _mm512_movepi8_mask(value), _mm512_setzero_si512(), x);
        __m512i pairs = _mm512_maddubs_epi16(_mm512_abs_epi8(value), signed_x);
        return _mm512_add_epi32(sum, _mm512_madd_epi16(pairs, _mm512_set1_epi16(1)));
    }
    return _mm512_add_epi16(sum, _mm512_maddubs_epi16(w, x));
}

static inline __m512i dot_end(int type, __m512i sum, __m512i offset)
{
    if (type == PKV_W_Q8_0)
        return sum;
    return _mm512_add_epi32(_mm512_madd_epi16(sum, _mm512_set1_epi16(1)), offset);
}

/* values below 64 leave room in int16 for a pair of products; bytes go by magnitude and sign as above, so without a bias */
static inline __m512i dot4(int type, __m512i sum, __m512i w, __m512i x)
{
    if (type == PKV_W_Q8_0)
        return dot_step(type, sum, w, x);
    return _mm512_add_epi32(sum, _mm512_madd_epi16(_mm512_maddubs_epi16(w, x), _mm512_set1_epi16(1)));
}

static inline int dot_bias(int type)
{
    return type == PKV_W_Q6_K ? 32 : type == PKV_W_Q5_0 ? 16 : type == PKV_W_Q4_0 ? 8 : type == PKV_W_Q3_K ? 4 : 0;
}

#include "avx512_gemm.h"
#include "avx512_quants.h"

INLINE __mmask16 first(int64_t n) /* the first n lanes, all for n >= 16 */
{
    return n >= 16 ? 0xffff : (__mmask16)((1u << n) - 1);
}

/* The next 16 of n values; lanes past the end read as zero and are not written. Masked stores are slow: only tails use them. */
INLINE __m512 load16(const float *p, int64_t n)
{
    return n >= 16 ? _mm512_loadu_ps(p) : _mm512_maskz_loadu_ps(first(n), p);
}

INLINE void store16(float *p, int64_t n, __m512 x)
{
    if (n >= 16)
        _mm512_storeu_ps(p, x);
    else
        _mm512_mask_storeu_ps(p, first(n), x);
}

INLINE float tree_sum(__m512 lane)
{
    __m256 a = _mm256_add_ps(_mm512_castps512_ps256(lane), _mm512_extractf32x8_ps(lane, 1));
    __m128 b = _mm_add_ps(_mm256_castps256_ps128(a), _mm256_extractf128_ps(a, 1));
    b = _mm_add_ps(b, _mm_movehl_ps(b, b));
    return _mm_cvtss_f32(_mm_add_ss(b, _mm_movehdup_ps(b)));
}

INLINE __m512 exp16(__m512 x) /* pkv_exp */
{
    const __m512 magic = _mm512_set1_ps(12582912.0f), one = _mm512_set1_ps(1.0f);
    __m512 y = _mm512_min_ps(_mm512_set1_ps(88.0f), x), n = _mm512_fmadd_ps(y, _mm512_set1_ps(1.44269504f), magic), r, p;
    __m512i scale = _mm512_add_epi32(_mm512_slli_epi32(_mm512_castps_si512(n), 23), _mm512_castps_si512(one));
    n = _mm512_sub_ps(n, magic);
    r = _mm512_fmadd_ps(n, _mm512_set1_ps(-0.693145752f), y);
    r = _mm512_fmadd_ps(n, _mm512_set1_ps(-1.42860677e-6f), r);
    p = _mm512_fmadd_ps(_mm512_set1_ps(1.38888885e-3f), r, _mm512_set1_ps(8.33333377e-3f));
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(4.16666679e-2f));
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(1.66666672e-1f));
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(0.5f));
    p = _mm512_fmadd_ps(p, r, one);
    p = _mm512_fmadd_ps(p, r, one);
    return _mm512_maskz_mul_ps(_mm512_cmp_ps_mask(x, _mm512_set1_ps(-87.0f), _CMP_NLT_UQ), p, _mm512_castsi512_ps(scale));
}

INLINE __m256i to_f16(__m512 x)
{
    return _mm512_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
}

/* ---- matmul ---- */

INLINE __m512 weights16(const int type, const uint8_t *data, int64_t k)
{
    if (type == PKV_W_F32)
        return _mm512_loadu_ps((const float *)data + 16 * k);
    __m256i half = _mm256_loadu_si256((const __m256i *)data + k);
    return type == PKV_W_F16 ? _mm512_cvtph_ps(half)
                             : _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(half), 16));
}

/* P panels x T tokens in registers, while the next P panels are fetched if there are more */
INLINE void float_tile(const int type, const int P, const int T, float *restrict out, const pkv_weight *restrict w,
                       const pkv_act *restrict x, int64_t panel, int64_t token, int64_t out_stride, int add, int more)
{
    const uint8_t *data = w->data + panel * w->panel_bytes, *next = data + (more ? P * w->panel_bytes : 0);
    const float *a = x->x + token * x->x_stride;
    __m512 acc[4][6], row[4];
    UNROLL for (int p = 0; p < P; p++)
        UNROLL for (int t = 0; t < T; t++)
            acc[p][t] = _mm512_setzero_ps();
    for (int64_t k = 0; k < w->n_cols; k++) {
        UNROLL for (int p = 0; p < P; p++) {
            row[p] = weights16(type, data + p * w->panel_bytes, k);
            if (T <= 3)
                _mm_prefetch((const char *)next + p * w->panel_bytes + k * (type == PKV_W_F32 ? 64 : 32), _MM_HINT_T1);
        }
        UNROLL for (int t = 0; t < T; t++)
            UNROLL for (int p = 0; p < P; p++)
                acc[p][t] = _mm512_fmadd_ps(row[p], _mm512_set1_ps(a[t * x->x_stride + k]), acc[p][t]);
    }
    UNROLL for (int t = 0; t < T; t++)
        UNROLL for (int p = 0; p < P; p++) {
            float *o = out + t * out_stride + 16 * p;
            _mm512_storeu_ps(o, add ? _mm512_add_ps(_mm512_loadu_ps(o), acc[p][t]) : acc[p][t]);
        }
}

INLINE void gemm_float(const int type, float *restrict out, const pkv_weight *restrict w, const pkv_act *restrict x, int64_t panel0,
                       int64_t n_panels, int64_t token0, int64_t n_tokens, int64_t out_stride, int add, int64_t n_next)
{
    for (int64_t p = 0, P; p < n_panels; p += P) {
        P = n_panels - p >= 4 ? 4 : 1;
        int more = p + P < n_panels + n_next;
        for (int64_t t = 0, T; t < n_tokens; t += T) {
            float *o = out + t * out_stride + 16 * p;
            T = n_tokens - t >= 6 ? 6 : n_tokens - t >= 3 ? 3 : 1;
            switch (16 * P + T) {
            case 16 * 4 + 6: float_tile(type, 4, 6, o, w, x, panel0 + p, token0 + t, out_stride, add, more); break;
            case 16 * 4 + 3: float_tile(type, 4, 3, o, w, x, panel0 + p, token0 + t, out_stride, add, more); break;
            case 16 * 4 + 1: float_tile(type, 4, 1, o, w, x, panel0 + p, token0 + t, out_stride, add, more); break;
            case 16 * 1 + 6: float_tile(type, 1, 6, o, w, x, panel0 + p, token0 + t, out_stride, add, more); break;
            case 16 * 1 + 3: float_tile(type, 1, 3, o, w, x, panel0 + p, token0 + t, out_stride, add, more); break;
            case 16 * 1 + 1: float_tile(type, 1, 1, o, w, x, panel0 + p, token0 + t, out_stride, add, more); break;
            }
        }
    }
}

#define GEMM_FLOAT(name, type)                                                                                                     \
    void pkv_gemm_##name##_avx512(float *restrict out, const pkv_weight *restrict w, const pkv_act *restrict x, int64_t panel0,    \
                                  int64_t n_panels, int64_t token0, int64_t n_tokens, int64_t out_stride, int add, int64_t n_next) \
    {                                                                                                                              \
        gemm_float(type, out, w, x, panel0, n_panels, token0, n_tokens, out_stride, add, n_next);                                  \
    }
GEMM_FLOAT(f32, PKV_W_F32)
GEMM_FLOAT(f16, PKV_W_F16)
GEMM_FLOAT(bf16, PKV_W_BF16)

INLINE __m512i magnitude(__m512 x)
{
    return _mm512_and_si512(_mm512_castps_si512(x), _mm512_set1_epi32(0x7fffffff));
}

/* Reduce four registers at once: lane i of the result is the op of all lanes of r[i]. */
#define FOLD4(name, op512, op256, op128)                                                                                           \
    INLINE __m128i name(const __m512i r[4])                                                                                        \
    {                                                                                                                              \
        __m512i a = op512(_mm512_unpacklo_epi32(r[0], r[1]), _mm512_unpackhi_epi32(r[0], r[1]));                                   \
        __m512i b = op512(_mm512_unpacklo_epi32(r[2], r[3]), _mm512_unpackhi_epi32(r[2], r[3]));                                   \
        __m512i c = op512(_mm512_unpacklo_epi64(a, b), _mm512_unpackhi_epi64(a, b));                                               \
        __m256i d = op256(_mm512_castsi512_si256(c), _mm512_extracti64x4_epi64(c, 1));                                             \
        return op128(_mm256_castsi256_si128(d), _mm256_extracti128_si256(d, 1));                                                   \
    }
FOLD4(fold4_max, _mm512_max_epu32, _mm256_max_epu32, _mm_max_epu32)
FOLD4(fold4_add, _mm512_add_epi32, _mm256_add_epi32, _mm_add_epi32)

/* The first n of four lanes to places `step` apart. */
INLINE void store4(float *p, int64_t step, int64_t n, __m128 x)
{
    if (n == 4 && step == 1)
        _mm_storeu_ps(p, x);
    else
        UNROLL for (int i = 0; i < 4; i++)
            if (i < n)
                p[i * step] = x[i];
}

/* Blocks [0, n) of four, n <= 4; the others read as zeros and are not stored. Steps are elements from one block to the next. */
INLINE void quant_blocks(int64_t n, int8_t *restrict q, float *restrict scale, float *restrict sum, int32_t *restrict isum,
                         int32_t *restrict half, const float *restrict x, int64_t x_step, int64_t q_step, int64_t step)
{
    __m512 x0[4], x1[4];
    __m512i r[4], low[4];
    UNROLL for (int i = 0; i < 4; i++) {
        x0[i] = i < n ? _mm512_loadu_ps(x + i * x_step) : _mm512_setzero_ps();
        x1[i] = i < n ? _mm512_loadu_ps(x + i * x_step + 16) : _mm512_setzero_ps();
        r[i] = _mm512_max_epu32(magnitude(x0[i]), magnitude(x1[i]));
    }
    __m128i largest = fold4_max(r), sums;
    __m128 amax = _mm_castsi128_ps(largest), scales;
    __mmask8 strange = _mm_cmpge_epu32_mask(largest, _mm_set1_epi32(0x7f800000));
    __mmask8 plain = _mm_mask_cmp_ps_mask((__mmask8)~strange, amax, _mm_set1_ps(0x1p-100f), _CMP_GE_OQ);
    __m512 inverses = _mm512_castps128_ps512(_mm_maskz_div_ps(plain, _mm_set1_ps(127.0f), amax));
    scales = _mm_mask_mov_ps(_mm_maskz_mul_ps(plain, amax, _mm_set1_ps(1.0f / 127.0f)), strange, _mm_set1_ps(NAN));
    UNROLL for (int i = 0; i < 4; i += 2) {
        __m512i v[4];
        UNROLL for (int j = 0; j < 2; j++) {
            __m512 inverse = _mm512_permutexvar_ps(_mm512_set1_epi32(i + j), inverses);
            __mmask16 k = _mm512_cmp_ps_mask(inverse, _mm512_setzero_ps(), _CMP_GT_OQ); /* 0 times infinity is not 0 */
            v[2 * j] = _mm512_maskz_cvtps_epi32(k, _mm512_mul_ps(x0[i + j], inverse));
            v[2 * j + 1] = _mm512_maskz_cvtps_epi32(k, _mm512_mul_ps(x1[i + j], inverse));
            r[i + j] = _mm512_add_epi32(v[2 * j], v[2 * j + 1]);
            low[i + j] = v[2 * j];
        }
        __m512i bytes = _mm512_packs_epi16(_mm512_packs_epi32(v[0], v[1]), _mm512_packs_epi32(v[2], v[3]));
        bytes = _mm512_permutexvar_epi32(_mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15), bytes);
        if (i < n)
            _mm256_storeu_si256((__m256i *)(q + i * q_step), _mm512_castsi512_si256(bytes));
        if (i + 1 < n)
            _mm256_storeu_si256((__m256i *)(q + (i + 1) * q_step), _mm512_extracti64x4_epi64(bytes, 1));
    }
    sums = fold4_add(r);
    store4(scale, step, n, scales);
    store4((float *)isum, step, n, _mm_castsi128_ps(sums));
    store4((float *)half, step, n, _mm_castsi128_ps(fold4_add(low)));
    store4(sum, step, n, _mm_mul_ps(scales, _mm_cvtepi32_ps(sums)));
}

void pkv_quant_i8_avx512(int8_t *restrict q, float *restrict scale, float *restrict sum, int32_t *restrict isum,
                         int32_t *restrict half, const float *restrict x, int64_t n)
{
    int64_t b = 0;
    for (; b + 4 <= n / 32; b += 4)
        quant_blocks(4, q + 32 * b, scale + b, sum + b, isum + b, half + b, x + 32 * b, 32, 32, 1);
    if (b < n / 32)
        quant_blocks(n / 32 - b, q + 32 * b, scale + b, sum + b, isum + b, half + b, x + 32 * b, 32, 32, 1);
}

void pkv_quant_column_avx512(const pkv_act *restrict a, int64_t block, int64_t token0, int64_t n_tokens)
{
    for (int64_t t = token0, n; t < token0 + n_tokens; t += n) {
        int64_t at = t * a->b_stride + block;
        int8_t *q = a->q + t * a->q_stride + 32 * block;
        const float *x = a->x + t * a->x_stride + 32 * block;
        n = token0 + n_tokens - t < 4 ? token0 + n_tokens - t : 4;
        if (n == 4)
            quant_blocks(4, q, a->scale + at, a->sum + at, a->isum + at, a->half + at, x, a->x_stride, a->q_stride, a->b_stride);
        else if (n == 1)
            quant_blocks(1, q, a->scale + at, a->sum + at, a->isum + at, a->half + at, x, 0, 0, 0);
        else
            quant_blocks(n, q, a->scale + at, a->sum + at, a->isum + at, a->half + at, x, a->x_stride, a->q_stride, a->b_stride);
    }
}

void pkv_quant_i12_avx512(int8_t *restrict q, int8_t *restrict low, float *restrict scale, int32_t *restrict isum,
                          int32_t *restrict half, const float *restrict x, int64_t n)
{
    for (int64_t start = 0; start < n; start += 256) {
        int64_t stop = start + 256 < n ? start + 256 : n;
        __m512i top = _mm512_setzero_si512();
        for (int64_t k = start; k < stop; k += 16)
            top = _mm512_max_epu32(top, magnitude(_mm512_loadu_ps(x + k)));
        uint32_t largest = _mm512_reduce_max_epu32(top);
        float amax = _mm_cvtss_f32(_mm_castsi128_ps(_mm_cvtsi32_si128((int)largest)));
        int plain = largest < 0x7f800000u && amax >= 0x1p-100f;
        __m512 inverse = _mm512_set1_ps(plain ? 2039.0f / amax : 0.0f);
        scale[start / 256] = largest >= 0x7f800000u ? NAN : plain ? amax * (1.0f / 2039.0f) : 0.0f;
        for (int64_t k = start; k < stop; k += 16) {
            __m512i v = _mm512_maskz_cvtps_epi32(plain ? 0xffff : 0, _mm512_mul_ps(_mm512_loadu_ps(x + k), inverse));
            __m512i high = _mm512_srai_epi32(_mm512_add_epi32(v, _mm512_set1_epi32(8)), 4);
            int32_t sum = _mm512_reduce_add_epi32(v);
            _mm_storeu_si128((__m128i *)(q + k), _mm512_cvtepi32_epi8(high));
            _mm_storeu_si128((__m128i *)(low + k), _mm512_cvtepi32_epi8(_mm512_sub_epi32(v, _mm512_slli_epi32(high, 4))));
            if (k % 32 == 0)
                half[k / 32] = isum[k / 32] = sum;
            else
                isum[k / 32] += sum;
        }
    }
}

#include "avx512_attention.h"

/* ---- elementwise and reductions ---- */

void pkv_rmsnorm_avx512(float *restrict y, const float *restrict x, const float *restrict w, int64_t n, float eps)
{
    __m512 lane = _mm512_setzero_ps(), r;
    for (int64_t i = 0; i < n; i += 16) {
        __m512 xi = load16(x + i, n - i);
        lane = _mm512_fmadd_ps(xi, xi, lane);
    }
    r = _mm512_set1_ps(1.0f / sqrtf(tree_sum(lane) / (float)n + eps));
    for (int64_t i = 0; i < n; i += 16) {
        __m512 xi = load16(x + i, n - i), wi = load16(w + i, n - i);
        store16(y + i, n - i, _mm512_mul_ps(_mm512_mul_ps(xi, r), wi));
    }
}

void pkv_silu_mul_avx512(float *restrict y, const float *restrict g, const float *restrict u, int64_t n)
{
    for (int64_t i = 0; i < n; i += 16) {
        __m512 gi = load16(g + i, n - i), ui = load16(u + i, n - i);
        __m512 e = exp16(_mm512_xor_ps(gi, _mm512_set1_ps(-0.0f)));
        gi = _mm512_div_ps(gi, _mm512_add_ps(_mm512_set1_ps(1.0f), e));
        store16(y + i, n - i, _mm512_mul_ps(gi, ui));
    }
}

void pkv_gelu_mul_avx512(float *restrict y, const float *restrict g, const float *restrict u, int64_t n)
{
    const __m512 a = _mm512_set1_ps(1.59576912f), b = _mm512_set1_ps(0.0713548163f);
    for (int64_t i = 0; i < n; i += 16) {
        __m512 x = load16(g + i, n - i), z = _mm512_mul_ps(x, _mm512_fmadd_ps(b, _mm512_mul_ps(x, x), a));
        __m512 e = exp16(_mm512_xor_ps(z, _mm512_set1_ps(-0.0f)));
        x = _mm512_div_ps(x, _mm512_add_ps(_mm512_set1_ps(1.0f), e));
        store16(y + i, n - i, _mm512_mul_ps(x, load16(u + i, n - i)));
    }
}

void pkv_rope_avx512(float *restrict x, const float *restrict cs, int64_t half)
{
    for (int64_t i = 0; i < half; i += 16) {
        __m512 a = load16(x + i, half - i), b = load16(x + half + i, half - i);
        __m512 c = load16(cs + i, half - i), s = load16(cs + half + i, half - i);
        store16(x + i, half - i, _mm512_fmsub_ps(a, c, _mm512_mul_ps(b, s)));
        store16(x + half + i, half - i, _mm512_fmadd_ps(a, s, _mm512_mul_ps(b, c)));
    }
}

void pkv_add_avx512(float *restrict y, const float *restrict x, int64_t n)
{
    for (int64_t i = 0; i < n; i += 16) {
        store16(y + i, n - i, _mm512_add_ps(load16(y + i, n - i), load16(x + i, n - i)));
    }
}

void pkv_scale_avx512(float *restrict y, int64_t n, float a)
{
    for (int64_t i = 0; i < n; i += 16) {
        store16(y + i, n - i, _mm512_mul_ps(load16(y + i, n - i), _mm512_set1_ps(a)));
    }
}

float pkv_vmax_avx512(const float *restrict x, int64_t n)
{
    __m512 top = _mm512_set1_ps(x[0]);
    __mmask16 nan = 0;
    float m;
    for (int64_t i = 0; i < n; i += 16) {
        __m512 xi = n - i >= 16 ? _mm512_loadu_ps(x + i) : _mm512_mask_loadu_ps(top, first(n - i), x + i);
        nan |= _mm512_cmp_ps_mask(xi, xi, _CMP_UNORD_Q);
        top = _mm512_max_ps(top, xi);
    }
    m = _mm512_reduce_max_ps(top);
    return nan ? NAN : m == 0.0f ? 0.0f : m;
}

int64_t pkv_argmax_avx512(const float *restrict x, int64_t n)
{
    float m = pkv_vmax_avx512(x, n);
    for (int64_t i = 0; i < n; i += 16) {
        __mmask16 hit = first(n - i) & _mm512_cmp_ps_mask(load16(x + i, n - i), _mm512_set1_ps(m), _CMP_EQ_OQ);
        if (hit)
            return i + __builtin_ctz(hit);
    }
    return -1;
}

const pkv_kernels pkv_kernels_avx512 = {
    .name = "avx512",
    PKV_AVX512_GEMM,
    PKV_AVX512_AFTER_GEMM,
};
