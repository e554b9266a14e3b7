/* NEON with dot product and half precision conversion: four registers of 4 lanes stand for the 16 virtual lanes. */
#include "pkv_kernels.h"

#if !defined(__ARM_FEATURE_DOTPROD) || !defined(__ARM_FEATURE_FP16_VECTOR_ARITHMETIC)
#error "k_neon.c needs -march=armv8.2-a+fp16+dotprod"
#endif

#include <arm_neon.h>
#include <math.h>
#include <string.h>

#include "neon_gemm.h"

/* ---- lanes ---- */

static inline float32x4_t load(const float *p, int64_t n) /* the first n of 4, zeros behind; touches nothing beyond */
{
    float few[4] = {0};
    if (n >= 4)
        return vld1q_f32(p);
    for (int64_t i = 0; i < n; i++)
        few[i] = p[i];
    return vld1q_f32(few);
}

static inline void store(float *p, float32x4_t x, int64_t n)
{
    float few[4];
    if (n >= 4)
        vst1q_f32(p, x);
    else {
        vst1q_f32(few, x);
        for (int64_t i = 0; i < n; i++)
            p[i] = few[i];
    }
}

static inline uint32x4_t first_lanes(int64_t n) /* all bits set in lanes [0, n) */
{
    static const int32_t lane[4] = {0, 1, 2, 3};
    return vcgtq_s32(vdupq_n_s32((int32_t)(n < 4 ? n : 4)), vld1q_s32(lane));
}

static inline float tree_sum(const float32x4_t *lane) /* [4] */
{
    float32x4_t four = vaddq_f32(vaddq_f32(lane[0], lane[2]), vaddq_f32(lane[1], lane[3]));
    float32x2_t two = vadd_f32(vget_low_f32(four), vget_high_f32(four));
    return vget_lane_f32(two, 0) + vget_lane_f32(two, 1);
}

/* selects by comparison, so that NaN stays NaN */
static inline float32x4_t exp4(float32x4_t x)
{
    const float32x4_t magic = vdupq_n_f32(12582912.0f), one = vdupq_n_f32(1.0f), top = vdupq_n_f32(88.0f);
    float32x4_t y = vbslq_f32(vcgtq_f32(x, top), top, x), n = vfmaq_f32(magic, y, vdupq_n_f32(1.44269504f)), r, p;
    int32x4_t scale = vaddq_s32(vshlq_n_s32(vreinterpretq_s32_f32(n), 23), vreinterpretq_s32_f32(one));
    n = vsubq_f32(n, magic);
    r = vfmaq_f32(y, n, vdupq_n_f32(-0.693145752f));
    r = vfmaq_f32(r, n, vdupq_n_f32(-1.42860677e-6f));
    p = vdupq_n_f32(1.38888885e-3f);
    p = vfmaq_f32(vdupq_n_f32(8.33333377e-3f), p, r);
    p = vfmaq_f32(vdupq_n_f32(4.16666679e-2f), p, r);
    p = vfmaq_f32(vdupq_n_f32(1.66666672e-1f), p, r);
    p = vfmaq_f32(vdupq_n_f32(0.5f), p, r);
    p = vfmaq_f32(one, p, r);
    p = vfmaq_f32(one, p, r);
    p = vmulq_f32(p, vreinterpretq_f32_s32(scale));
    return vbslq_f32(vcltq_f32(x, vdupq_n_f32(-87.0f)), vdupq_n_f32(0.0f), p);
}

/* ---- quantisation ---- */

static inline uint32x4_t magnitude_bits(float32x4_t x) { return vreinterpretq_u32_f32(vabsq_f32(x)); }

/* The scale of a row whose largest magnitude has these bits and becomes the integer top; *inverse is what values are multiplied by,
 * 0 for a row of zeros. */
static inline float row_scale(float *inverse, uint32_t largest, float top)
{
    float amax;
    memcpy(&amax, &largest, 4);
    *inverse = largest >= 0x7f800000u || amax < 0x1p-100f ? 0.0f : top / amax;
    return largest >= 0x7f800000u ? NAN : amax < 0x1p-100f ? 0.0f : amax * (1.0f / top);
}

/* to nearest, ties to even; inverse 0 gives zeros, because this conversion turns NaN into 0 */
static inline int32x4_t quantise4(float32x4_t x, float inverse) { return vcvtnq_s32_f32(vmulq_n_f32(x, inverse)); }

static void quant_i8(int8_t *restrict q, float *restrict scale, float *restrict sum, int32_t *restrict isum, int32_t *restrict half,
                     const float *restrict x, int64_t n)
{
    for (int64_t b = 0; b < n / 32; b++, q += 32, x += 32) {
        float32x4_t v[8];
        int32x4_t i[8], total = vdupq_n_s32(0);
        uint32x4_t top = vdupq_n_u32(0);
        float inverse;
        for (int k = 0; k < 8; k++) {
            v[k] = vld1q_f32(x + 4 * k);
            top = vmaxq_u32(top, magnitude_bits(v[k]));
        }
        scale[b] = row_scale(&inverse, vmaxvq_u32(top), 127.0f);
        for (int k = 0; k < 8; k++) {
            i[k] = quantise4(v[k], inverse);
            total = vaddq_s32(total, i[k]);
            if (k == 3)
                half[b] = vaddvq_s32(total);
        }
        isum[b] = vaddvq_s32(total);
        sum[b] = scale[b] * (float)isum[b];
        for (int k = 0; k < 8; k += 2)
            vst1_s8(q + 4 * k, vmovn_s16(vcombine_s16(vmovn_s32(i[k]), vmovn_s32(i[k + 1]))));
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
    for (int64_t start = 0; start < n; start += 256) {
        int64_t stop = start + 256 < n ? start + 256 : n;
        uint32x4_t top = vdupq_n_u32(0);
        float inverse;
        for (int64_t i = start; i < stop; i += 4)
            top = vmaxq_u32(top, magnitude_bits(vld1q_f32(x + i)));
        scale[start / 256] = row_scale(&inverse, vmaxvq_u32(top), 2039.0f);
        for (int64_t b = start / 32; b < stop / 32; b++) {
            int32x4_t total = vdupq_n_s32(0);
            for (int k = 0; k < 32; k += 8) {
                int16x8_t v, high;
                int32x4_t v0 = quantise4(vld1q_f32(x + 32 * b + k), inverse), v1 = quantise4(vld1q_f32(x + 32 * b + k + 4), inverse);
                total = vaddq_s32(total, vaddq_s32(v0, v1));
                v = vcombine_s16(vmovn_s32(v0), vmovn_s32(v1));
                high = vshrq_n_s16(vaddq_s16(v, vdupq_n_s16(8)), 4);
                vst1_s8(q + 32 * b + k, vmovn_s16(high));
                vst1_s8(low + 32 * b + k, vmovn_s16(vsubq_s16(v, vshlq_n_s16(high, 4))));
                if (k == 8)
                    half[b] = vaddvq_s32(total);
            }
            isum[b] = vaddvq_s32(total);
        }
    }
}

#include "neon_attention.h"

/* ---- elementwise and reductions ---- */

static void rmsnorm(float *restrict y, const float *restrict x, const float *restrict w, int64_t n, float eps)
{
    float32x4_t lane[4] = {vdupq_n_f32(0.0f), vdupq_n_f32(0.0f), vdupq_n_f32(0.0f), vdupq_n_f32(0.0f)};
    float r;
    for (int64_t i = 0; i < n; i += 16)
        for (int g = 0; g < 4; g++) {
            float32x4_t v = load(x + i + 4 * g, n - i - 4 * g);
            lane[g] = vfmaq_f32(lane[g], v, v);
        }
    r = 1.0f / sqrtf(tree_sum(lane) / (float)n + eps);
    for (int64_t i = 0; i < n; i += 4)
        store(y + i, vmulq_f32(vmulq_n_f32(load(x + i, n - i), r), load(w + i, n - i)), n - i);
}

static void silu_mul(float *restrict y, const float *restrict g, const float *restrict u, int64_t n)
{
    for (int64_t i = 0; i < n; i += 4) {
        float32x4_t a = load(g + i, n - i), s = vdivq_f32(a, vaddq_f32(vdupq_n_f32(1.0f), exp4(vnegq_f32(a))));
        store(y + i, vmulq_f32(s, load(u + i, n - i)), n - i);
    }
}

static void gelu_mul(float *restrict y, const float *restrict g, const float *restrict u, int64_t n)
{
    const float32x4_t a = vdupq_n_f32(1.59576912f), b = vdupq_n_f32(0.0713548163f);
    for (int64_t i = 0; i < n; i += 4) {
        float32x4_t x = load(g + i, n - i), e = exp4(vnegq_f32(vmulq_f32(x, vfmaq_f32(a, b, vmulq_f32(x, x)))));
        store(y + i, vmulq_f32(vdivq_f32(x, vaddq_f32(vdupq_n_f32(1.0f), e)), load(u + i, n - i)), n - i);
    }
}

static void rope(float *restrict x, const float *restrict cs, int64_t half)
{
    for (int64_t i = 0; i < half; i += 4) {
        int64_t n = half - i;
        float32x4_t a = load(x + i, n), b = load(x + half + i, n), c = load(cs + i, n), s = load(cs + half + i, n);
        store(x + i, vfmaq_f32(vnegq_f32(vmulq_f32(b, s)), a, c), n);
        store(x + half + i, vfmaq_f32(vmulq_f32(b, c), a, s), n);
    }
}

static void add(float *restrict y, const float *restrict x, int64_t n)
{
    for (int64_t i = 0; i < n; i += 4)
        store(y + i, vaddq_f32(load(y + i, n - i), load(x + i, n - i)), n - i);
}

static void scale(float *restrict y, int64_t n, float a)
{
    for (int64_t i = 0; i < n; i += 4)
        store(y + i, vmulq_n_f32(load(y + i, n - i), a), n - i);
}

static float vmax(const float *restrict x, int64_t n)
{
    float32x4_t top = vdupq_n_f32(-INFINITY); /* vmaxq keeps NaN */
    float m;
    for (int64_t i = 0; i < n; i += 4)
        top = vmaxq_f32(top, vbslq_f32(first_lanes(n - i), load(x + i, n - i), vdupq_n_f32(-INFINITY)));
    m = vmaxvq_f32(top);
    return m == 0.0f ? 0.0f : m;
}

static int64_t argmax(const float *restrict x, int64_t n)
{
    float m = vmax(x, n);
    int64_t i = 0;
    if (m != m)
        return -1;
    while (i + 4 <= n && !vmaxvq_u32(vceqq_f32(vld1q_f32(x + i), vdupq_n_f32(m))))
        i += 4;
    while (x[i] != m) /* some element equals the maximum */
        i++;
    return i;
}

const pkv_kernels pkv_kernels_neon = {
    .name = "neon",
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
