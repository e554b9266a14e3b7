/* The specification of every kernel: the shortest C that defines the bits. Never optimised. */
#include "pkv_kernels.h"

#include <math.h>
#include <string.h>

/* ---- half precision, by integer arithmetic ---- */

float pkv_f16_to_f32(uint16_t h)
{
    uint32_t sign = (uint32_t)(h & 0x8000u) << 16, exponent = (h >> 10) & 31u, mantissa = h & 1023u, bits;
    float f;
    if (exponent == 31)
        bits = 0x7f800000u | mantissa << 13 | (mantissa ? 0x400000u : 0);
    else if (exponent)
        bits = (exponent + 112u) << 23 | mantissa << 13;
    else {
        f = (float)mantissa * 0x1p-24f;
        memcpy(&bits, &f, 4);
    }
    bits |= sign;
    memcpy(&f, &bits, 4);
    return f;
}

/* round to nearest, ties to even; overflow to infinity */
uint16_t pkv_f32_to_f16(float x)
{
    uint32_t bits, sign;
    memcpy(&bits, &x, 4);
    sign = bits >> 16 & 0x8000u;
    bits &= 0x7fffffffu;
    if (bits > 0x7f800000u)
        return (uint16_t)(sign | 0x7e00u | (bits >> 13 & 0x3ffu));
    if (bits >= 0x477ff000u)
        return (uint16_t)(sign | 0x7c00u);
    if (bits < 0x38800000u) { /* subnormal: adding 0.5 puts the rounding where it belongs */
        float f;
        memcpy(&f, &bits, 4);
        f += 0.5f;
        memcpy(&bits, &f, 4);
        return (uint16_t)(sign | (bits - 0x3f000000u));
    }
    bits += 0xfffu + (bits >> 13 & 1u);
    return (uint16_t)(sign | (bits - 0x38000000u) >> 13);
}

static float bf16_to_f32(uint16_t h)
{
    uint32_t bits = (uint32_t)h << 16;
    float f;
    memcpy(&f, &bits, 4);
    return f;
}

static uint16_t half_at(const uint8_t *p)
{
    uint16_t h;
    memcpy(&h, p, 2);
    return h;
}

/* ---- elementary functions ---- */

/* Cody-Waite reduction to |r| <= ln2/2, degree 6 polynomial, scaling by exponent arithmetic. x is clamped above at 88 and gives 0
 * below -87, so the scale factor is always a normal number. */
float pkv_exp(float x)
{
    float y = x > 88.0f ? 88.0f : x, n = fmaf(y, 1.44269504f, 12582912.0f), r, p, scale;
    uint32_t bits;
    memcpy(&bits, &n, 4);
    n -= 12582912.0f;
    r = fmaf(n, -0.693145752f, y);
    r = fmaf(n, -1.42860677e-6f, r);
    p = 1.38888885e-3f;
    p = fmaf(p, r, 8.33333377e-3f);
    p = fmaf(p, r, 4.16666679e-2f);
    p = fmaf(p, r, 1.66666672e-1f);
    p = fmaf(p, r, 0.5f);
    p = fmaf(p, r, 1.0f);
    p = fmaf(p, r, 1.0f);
    bits = (bits << 23) + 0x3f800000u;
    memcpy(&scale, &bits, 4);
    return x < -87.0f ? 0.0f : p * scale;
}

/* log(m * 2^e), m in [sqrt(1/2), sqrt(2)): atanh series in s = (m-1)/(m+1) */
double pkv_log(double x)
{
    uint64_t bits;
    int64_t e = 0;
    double m, s, z, p;
    if (x < 0x1p-1022) {
        x *= 0x1p54;
        e = -54;
    }
    memcpy(&bits, &x, 8);
    e += (int64_t)(bits >> 52) - 1023;
    bits = (bits & 0xfffffffffffffull) | 0x3ff0000000000000ull;
    memcpy(&m, &bits, 8);
    if (m > 1.4142135623730951) {
        m *= 0.5;
        e += 1;
    }
    s = (m - 1.0) / (m + 1.0);
    z = s * s;
    p = 1.0 / 23.0;
    p = fma(p, z, 1.0 / 21.0);
    p = fma(p, z, 1.0 / 19.0);
    p = fma(p, z, 1.0 / 17.0);
    p = fma(p, z, 1.0 / 15.0);
    p = fma(p, z, 1.0 / 13.0);
    p = fma(p, z, 1.0 / 11.0);
    p = fma(p, z, 1.0 / 9.0);
    p = fma(p, z, 1.0 / 7.0);
    p = fma(p, z, 1.0 / 5.0);
    p = fma(p, z, 1.0 / 3.0);
    p = fma(2.0 * s * z, p, 2.0 * s);
    return fma((double)e, 0.69314718055994529, fma((double)e, 2.3190468138462996e-17, p));
}

/* cos and sin of position * inv_freq[i], formed and reduced in double */
void pkv_rope_angles(float *restrict cs, const double *restrict inv_freq, int64_t half, int64_t position, float attn_factor)
{
    for (int64_t i = 0; i < half; i++) {
        double a = (double)position * inv_freq[i], n = rint(a * 0.63661977236758138), r, z, s, c;
        int64_t quadrant = (int64_t)n & 3;
        r = fma(n, -1.5707963267948966, a);
        r = fma(n, -6.123233995736766e-17, r);
        z = r * r;
        s = 1.0 / 6227020800.0;
        s = fma(s, z, -1.0 / 39916800.0);
        s = fma(s, z, 1.0 / 362880.0);
        s = fma(s, z, -1.0 / 5040.0);
        s = fma(s, z, 1.0 / 120.0);
        s = fma(s, z, -1.0 / 6.0);
        s = fma(s * z, r, r);
        c = 1.0 / 479001600.0;
        c = fma(c, z, -1.0 / 3628800.0);
        c = fma(c, z, 1.0 / 40320.0);
        c = fma(c, z, -1.0 / 720.0);
        c = fma(c, z, 1.0 / 24.0);
        c = fma(c, z, -0.5);
        c = fma(c, z, 1.0);
        cs[i] = (float)(quadrant == 0 ? c : quadrant == 1 ? -s : quadrant == 2 ? -c : s) * attn_factor;
        cs[half + i] = (float)(quadrant == 0 ? s : quadrant == 1 ? c : quadrant == 2 ? -s : -c) * attn_factor;
    }
}

static float tree_sum(float *lane) /* [16] */
{
    for (int step = 8; step; step /= 2)
        for (int i = 0; i < step; i++)
            lane[i] += lane[i + step];
    return lane[0];
}

/* ---- matmul ---- */

static float weight_float(const pkv_weight *w, int64_t row, int64_t k)
{
    const uint8_t *data = w->data + row / 16 * w->panel_bytes;
    int64_t at = 16 * k + row % 16;
    return w->type == PKV_W_F32   ? ((const float *)data)[at]
           : w->type == PKV_W_F16 ? pkv_f16_to_f32(((const uint16_t *)data)[at])
                                  : bf16_to_f32(((const uint16_t *)data)[at]);
}

static void gemm_float(float *restrict out, const pkv_weight *restrict w, const pkv_act *restrict x, int64_t panel0, int64_t n_panels,
                       int64_t token0, int64_t n_tokens, int64_t out_stride, int add, int64_t n_next)
{
    (void)n_next;
    for (int64_t t = 0; t < n_tokens; t++)
        for (int64_t row = 0; row < 16 * n_panels; row++) {
            const float *a = x->x + (token0 + t) * x->x_stride;
            float acc = 0.0f, *o = out + t * out_stride + row;
            for (int64_t k = 0; k < w->n_cols; k++)
                acc = fmaf(weight_float(w, 16 * panel0 + row, k), a[k], acc);
            *o = add ? *o + acc : acc;
        }
}

/* One block of 32 columns of one row: integers with the bias taken off, factors of its halves, scale and minimum of the block. */
typedef struct block {
    int32_t q[32];
    int32_t factor[2], min_factor[2];    /* of its halves; 1 and 0 unless the type is a K-quant */
    float scale, min;
} block;

static block weight_block(const pkv_weight *w, int64_t row, int64_t b)
{
    static const struct { uint8_t nibbles, pairs, bits, bytes, bias, super, mins; } types[PKV_N_WTYPES] = {
        [PKV_W_Q4_0] = {1, 0, 0, 0, 8, 0, 0},  [PKV_W_Q4_1] = {1, 0, 0, 0, 0, 0, 1},  [PKV_W_Q8_0] = {0, 0, 0, 1, 128, 0, 0},
        [PKV_W_Q5_0] = {1, 0, 1, 0, 16, 0, 0}, [PKV_W_Q5_1] = {1, 0, 1, 0, 0, 0, 1},  [PKV_W_Q2_K] = {0, 1, 0, 0, 0, 1, 1},
        [PKV_W_Q3_K] = {0, 1, 1, 0, 4, 1, 0},  [PKV_W_Q4_K] = {1, 0, 0, 0, 0, 1, 1},  [PKV_W_Q5_K] = {1, 0, 1, 0, 0, 1, 1},
        [PKV_W_Q6_K] = {1, 1, 0, 0, 32, 1, 0},
    };
    int64_t r = row % 16, n_blocks = w->n_cols / 32, n_scales = types[w->type].super ? n_blocks / 8 : n_blocks;
    const uint8_t *data = w->data + row / 16 * w->panel_bytes + b * (w->panel_bytes / n_blocks);
    const uint8_t *pairs = data + (types[w->type].nibbles ? 256 : 0), *bits = pairs + (types[w->type].pairs ? 128 : 0);
    const uint8_t *s = w->scales + row / 16 * w->scale_bytes + (types[w->type].super ? b / 8 : b) * (w->scale_bytes / n_scales);
    const uint8_t *small = s + (types[w->type].mins ? 64 : 32);
    block x = {.factor = {1, 1}, .scale = pkv_f16_to_f32(half_at(s + 2 * r))};
    for (int k = 0; k < 32; k++) {
        int32_t v = -(int32_t)types[w->type].bias;
        if (types[w->type].nibbles)
            v += data[k % 16 / 4 * 64 + 4 * r + k % 4] >> (k < 16 ? 0 : 4) & 15;
        if (types[w->type].pairs)
            v += (pairs[k / 16 * 64 + 4 * r + k % 4] >> k % 16 / 4 * 2 & 3) << (types[w->type].nibbles ? 4 : 0);
        if (types[w->type].bits)
            v += (bits[k / 4 * 8 + r / 2] >> (r % 2 * 4 + k % 4) & 1) << (types[w->type].nibbles ? 4 : 2);
        if (types[w->type].bytes)
            v += data[k / 4 * 64 + 4 * r + k % 4];
        x.q[k] = v;
    }
    if (types[w->type].mins)
        x.min = pkv_f16_to_f32(half_at(s + 32 + 2 * r));
    if (w->type == PKV_W_Q4_K || w->type == PKV_W_Q5_K)
        for (int h = 0; h < 2; h++) {
            x.factor[h] = small[b % 8 * 16 + r];
            x.min_factor[h] = small[128 + b % 8 * 16 + r];
        }
    for (int h = 0; h < 2; h++) {
        int64_t at = (b % 8 * 2 + h) * 16 + r;
        if (w->type == PKV_W_Q3_K || w->type == PKV_W_Q6_K)
            x.factor[h] = (int8_t)small[at];
        if (w->type == PKV_W_Q2_K) {
            x.factor[h] = small[at] & 15;
            x.min_factor[h] = small[at] >> 4;
        }
    }
    return x;
}

static int is_super(int32_t type) { return type >= PKV_W_Q2_K; }

/* int8. Integers are exact, and every integer that becomes a float is below 2^24: at most 2 * 128 * 16 * 32 * 127 for Q6_K. Q4_K and
 * Q5_K, with one sub-scale for the whole block, scale in float: d*sc and m*mn are exact. */
void pkv_gemm_blocks_scalar(float *restrict out, const pkv_weight *restrict w, const pkv_act *restrict x, int64_t panel0,
                            int64_t n_panels, int64_t token0, int64_t n_tokens, int64_t out_stride, int add, int64_t n_next)
{
    (void)n_next;
    for (int64_t row = 0; row < 16 * n_panels; row++)
        for (int64_t t = 0; t < n_tokens; t++) {
            float acc = 0.0f, *o = out + t * out_stride + row;
            for (int64_t b = 0; b < w->n_cols / 32; b++) {
                const int8_t *a = x->q + (token0 + t) * x->q_stride + 32 * b;
                int64_t at = (token0 + t) * x->b_stride + b;
                block wb = weight_block(w, 16 * panel0 + row, b);
                int32_t half[2] = {0, 0};
                for (int k = 0; k < 32; k++)
                    half[k / 16] += wb.q[k] * a[k];
                if (w->type == PKV_W_Q4_K || w->type == PKV_W_Q5_K) {
                    acc = fmaf(wb.scale * (float)wb.factor[0] * x->scale[at], (float)(half[0] + half[1]), acc);
                    acc = fmaf(-(wb.min * (float)wb.min_factor[0]), x->sum[at], acc);
                    continue;
                }
                acc = fmaf(wb.scale * x->scale[at], (float)(wb.factor[0] * half[0] + wb.factor[1] * half[1]), acc);
                if (w->type == PKV_W_Q2_K) {
                    int32_t mins = wb.min_factor[0] * x->half[at] + wb.min_factor[1] * (x->isum[at] - x->half[at]);
                    acc = fmaf(-(wb.min * x->scale[at]), (float)mins, acc);
                } else if (w->type == PKV_W_Q4_1 || w->type == PKV_W_Q5_1)
                    acc = fmaf(wb.min, x->sum[at], acc);
            }
            *o = add ? *o + acc : acc;
        }
}

/* int12. Types without sub-scales take one float step per block and one per 256 columns:
 *     inner = fma(scale_w, isum, inner), inner = fma(min_w, sum of x, inner); acc = fma(scale_x, inner, acc)
 * K-quants keep sub-scales and minima integer to the end of the 256 columns: at most 16 * 128 * 16 * 32 * 2039 = 2.14e9 < 2^31 for Q6_K. */
void pkv_gemm_wide_scalar(float *restrict out, const pkv_weight *restrict w, const pkv_act *restrict x, int64_t panel0,
                          int64_t n_panels, int64_t token0, int64_t n_tokens, int64_t out_stride, int add, int64_t n_next)
{
    (void)n_next;
    for (int64_t row = 0; row < 16 * n_panels; row++)
        for (int64_t t = 0; t < n_tokens; t++) {
            float acc = 0.0f, inner = 0.0f, *o = out + t * out_stride + row;
            int32_t total = 0, mins = 0;
            int64_t n_blocks = w->n_cols / 32;
            for (int64_t b = 0; b < n_blocks; b++) {
                const int8_t *high = x->q + (token0 + t) * x->q_stride + 32 * b, *low = x->low + (token0 + t) * x->q_stride + 32 * b;
                int64_t at = (token0 + t) * x->b_stride + b;
                float scale_x = x->scale[(token0 + t) * x->b_stride + b / 8];
                block wb = weight_block(w, 16 * panel0 + row, b);
                int32_t half[2] = {0, 0};
                for (int k = 0; k < 32; k++)
                    half[k / 16] += wb.q[k] * (16 * high[k] + low[k]);
                if (is_super(w->type)) {
                    total += wb.factor[0] * half[0] + wb.factor[1] * half[1];
                    mins += wb.min_factor[0] * x->half[at] + wb.min_factor[1] * (x->isum[at] - x->half[at]);
                } else {
                    inner = fmaf(wb.scale, (float)(half[0] + half[1]), inner);
                    if (w->type == PKV_W_Q4_1 || w->type == PKV_W_Q5_1)
                        inner = fmaf(wb.min, (float)x->isum[at], inner);
                }
                if (b % 8 < 7 && b + 1 < n_blocks)
                    continue;
                if (is_super(w->type)) {
                    acc = fmaf(wb.scale * scale_x, (float)total, acc);
                    if (w->type != PKV_W_Q3_K && w->type != PKV_W_Q6_K)
                        acc = fmaf(-(wb.min * scale_x), (float)mins, acc);
                } else
                    acc = fmaf(scale_x, inner, acc);
                inner = 0.0f;
                total = mins = 0;
            }
            *o = add ? *o + acc : acc;
        }
}

/* scale * factor * q is exact in float32 for every type, so the order of the products does not matter. */
void pkv_weight_row(float *restrict y, const pkv_weight *restrict w, int64_t row)
{
    if (!w->scales)
        for (int64_t k = 0; k < w->n_cols; k++)
            y[k] = weight_float(w, row, k);
    else
        for (int64_t b = 0; b < w->n_cols / 32; b++) {
            block x = weight_block(w, row, b);
            for (int k = 0; k < 32; k++) {
                float min = is_super(w->type) ? -(x.min * (float)x.min_factor[k / 16]) : x.min;
                y[32 * b + k] = fmaf(x.scale * (float)x.factor[k / 16], (float)x.q[k], min);
            }
        }
}

/* bits of the largest magnitude; NaN and infinity order above every finite value */
static uint32_t largest_magnitude(const float *x, int64_t n)
{
    uint32_t largest = 0, bits;
    for (int64_t i = 0; i < n; i++) {
        memcpy(&bits, x + i, 4);
        bits &= 0x7fffffffu;
        largest = bits > largest ? bits : largest;
    }
    return largest;
}

/* One int8 row under one scale: amax/127, zero when amax is below 2^-100; a row that holds NaN or infinity becomes zeros under a
 * NaN scale. */
static float quantise(int8_t *q, int64_t stride, const float *x, int64_t n)
{
    uint32_t largest = largest_magnitude(x, n);
    float amax, inverse;
    memcpy(&amax, &largest, 4);
    inverse = largest >= 0x7f800000u || amax < 0x1p-100f ? 0.0f : 127.0f / amax;
    for (int64_t i = 0; i < n; i++)
        q[i * stride] = inverse == 0.0f ? 0 : (int8_t)rintf(x[i] * inverse);
    return largest >= 0x7f800000u ? NAN : amax < 0x1p-100f ? 0.0f : amax * (1.0f / 127.0f);
}

static void quant_i8(int8_t *restrict q, float *restrict scale, float *restrict sum, int32_t *restrict isum, int32_t *restrict half,
                     const float *restrict x, int64_t n)
{
    for (int64_t b = 0; b < n / 32; b++) {
        scale[b] = quantise(q + 32 * b, 1, x + 32 * b, 32);
        isum[b] = half[b] = 0;
        for (int k = 0; k < 32; k++) {
            isum[b] += q[32 * b + k];
            half[b] += k < 16 ? q[32 * b + k] : 0;
        }
        sum[b] = scale[b] * (float)isum[b];
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

/* q = 16*high + low; the rules for zero, infinity and NaN are those of quantise */
void pkv_quant_i12_scalar(int8_t *restrict q, int8_t *restrict low, float *restrict scale, int32_t *restrict isum,
                          int32_t *restrict half, const float *restrict x, int64_t n)
{
    for (int64_t start = 0; start < n; start += 256) {
        int64_t stop = start + 256 < n ? start + 256 : n;
        uint32_t largest = largest_magnitude(x + start, stop - start);
        float amax, inverse;
        memcpy(&amax, &largest, 4);
        inverse = largest >= 0x7f800000u || amax < 0x1p-100f ? 0.0f : 2039.0f / amax;
        scale[start / 256] = largest >= 0x7f800000u ? NAN : amax < 0x1p-100f ? 0.0f : amax * (1.0f / 2039.0f);
        for (int64_t b = start / 32; b < stop / 32; b++) {
            isum[b] = half[b] = 0;
            for (int k = 0; k < 32; k++) {
                int32_t v = inverse == 0.0f ? 0 : (int32_t)rintf(x[32 * b + k] * inverse), high = (v + 8) >> 4;
                q[32 * b + k] = (int8_t)high;
                low[32 * b + k] = (int8_t)(v - 16 * high);
                isum[b] += v;
                half[b] += k < 16 ? v : 0;
            }
        }
    }
}

#include "scalar_attention.h"

/* ---- elementwise and reductions ---- */

static void rmsnorm(float *restrict y, const float *restrict x, const float *restrict w, int64_t n, float eps)
{
    float lane[16] = {0}, r;
    for (int64_t i = 0; i < n; i++)
        lane[i % 16] = fmaf(x[i], x[i], lane[i % 16]);
    r = 1.0f / sqrtf(tree_sum(lane) / (float)n + eps);
    for (int64_t i = 0; i < n; i++)
        y[i] = x[i] * r * w[i];
}

static void silu_mul(float *restrict y, const float *restrict g, const float *restrict u, int64_t n)
{
    for (int64_t i = 0; i < n; i++)
        y[i] = g[i] / (1.0f + pkv_exp(-g[i])) * u[i];
}

/* g/2 * (1 + tanh(sqrt(2/pi) * (g + 0.044715 g^3))) = g / (1 + exp(-g * (a + b g^2))) */
static void gelu_mul(float *restrict y, const float *restrict g, const float *restrict u, int64_t n)
{
    for (int64_t i = 0; i < n; i++)
        y[i] = g[i] / (1.0f + pkv_exp(-(g[i] * fmaf(0.0713548163f, g[i] * g[i], 1.59576912f)))) * u[i];
}

static void rope(float *restrict x, const float *restrict cs, int64_t half)
{
    for (int64_t i = 0; i < half; i++) {
        float a = x[i], b = x[half + i], c = cs[i], s = cs[half + i];
        x[i] = fmaf(a, c, -(b * s));
        x[half + i] = fmaf(a, s, b * c);
    }
}

static void add(float *restrict y, const float *restrict x, int64_t n)
{
    for (int64_t i = 0; i < n; i++)
        y[i] += x[i];
}

static void scale(float *restrict y, int64_t n, float a)
{
    for (int64_t i = 0; i < n; i++)
        y[i] *= a;
}

static float vmax(const float *restrict x, int64_t n)
{
    float m = x[0];
    for (int64_t i = 0; i < n; i++) {
        if (x[i] != x[i])
            return x[i];
        m = x[i] > m ? x[i] : m;
    }
    return m == 0.0f ? 0.0f : m; /* -0 and +0 compare equal: +0 whichever came first */
}

static int64_t argmax(const float *restrict x, int64_t n)
{
    int64_t best = 0;
    for (int64_t i = 0; i < n; i++) {
        if (x[i] != x[i])
            return -1;
        best = x[i] > x[best] ? i : best;
    }
    return best;
}

const pkv_kernels pkv_kernels_scalar = {
    .name = "scalar",
    .gemm = {gemm_float, gemm_float, gemm_float, pkv_gemm_blocks_scalar, pkv_gemm_blocks_scalar, pkv_gemm_blocks_scalar,
             pkv_gemm_blocks_scalar, pkv_gemm_blocks_scalar, pkv_gemm_blocks_scalar, pkv_gemm_blocks_scalar, pkv_gemm_blocks_scalar,
             pkv_gemm_blocks_scalar, pkv_gemm_blocks_scalar},
    .gemm_wide = {gemm_float, gemm_float, gemm_float, pkv_gemm_wide_scalar, pkv_gemm_wide_scalar, pkv_gemm_wide_scalar,
                  pkv_gemm_wide_scalar, pkv_gemm_wide_scalar, pkv_gemm_wide_scalar, pkv_gemm_wide_scalar, pkv_gemm_wide_scalar,
                  pkv_gemm_wide_scalar, pkv_gemm_wide_scalar},
    .quant_i8 = quant_i8,
    .quant_column = quant_column,
    .quant_i12 = pkv_quant_i12_scalar,
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
