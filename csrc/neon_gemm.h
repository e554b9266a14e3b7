/* Matmul for NEON, part of k_neon.c: lanes are 4 rows of a panel. */
#include "pkv_kernels.h"

#include <arm_neon.h>
#include <string.h>

#define TILE static inline __attribute__((always_inline)) /* its constant arguments must reach the loops they bound */
#define UNROLL _Pragma("GCC unroll 8")

static inline float32x4_t widen(const uint8_t *p) /* 4 half precision numbers */
{
    return vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16((const uint16_t *)p)));
}

static inline float32x4_t load_weight(const uint8_t *p, int64_t i, int32_t type)
{
    return type == PKV_W_F32   ? vld1q_f32((const float *)p + i)
           : type == PKV_W_F16 ? widen(p + 2 * i)
                               : vreinterpretq_f32_u32(vshll_n_u16(vld1_u16((const uint16_t *)p + i), 16));
}

TILE void finish(float *out, float32x4_t acc, int add) { vst1q_f32(out, add ? vaddq_f32(vld1q_f32(out), acc) : acc); }

/* n_t tokens x n_p panels, n_t * n_p <= 4 */
TILE void float_tile(float *out, const pkv_weight *w, const float *x, int64_t x_stride, int64_t panel, int64_t out_stride, int add,
                     int n_t, int n_p, int32_t type)
{
    const uint8_t *data = w->data + panel * w->panel_bytes;
    float32x4_t acc[16];
    for (int i = 0; i < 4 * n_t * n_p; i++)
        acc[i] = vdupq_n_f32(0.0f);
    for (int64_t k = 0; k < w->n_cols; k++)
        for (int i = 0; i < 4 * n_p; i++) {
            float32x4_t v = load_weight(data + i / 4 * w->panel_bytes, 16 * k + 4 * (i % 4), type);
            for (int t = 0; t < n_t; t++)
                acc[4 * t * n_p + i] = vfmaq_n_f32(acc[4 * t * n_p + i], v, x[t * x_stride + k]);
        }
    for (int t = 0; t < n_t; t++)
        for (int i = 0; i < 4 * n_p; i++)
            finish(out + t * out_stride + 4 * i, acc[4 * t * n_p + i], add);
}

TILE void gemm_float(float *out, const pkv_weight *w, const pkv_act *x, int64_t panel0, int64_t n_panels, int64_t token0,
                     int64_t n_tokens, int64_t out_stride, int add, int64_t n_next, int32_t type)
{
    (void)n_next; /* hardware follows one panel by itself */
    const float *a = x->x + token0 * x->x_stride;
    int64_t n_quads = n_tokens / 4 * 4, step;
    for (int64_t p = 0; p < n_panels; p++)
        for (int64_t t = 0; t < n_quads; t += 4)
            float_tile(out + t * out_stride + 16 * p, w, a + t * x->x_stride, x->x_stride, panel0 + p, out_stride, add, 4, 1, type);
    for (int64_t t = n_quads; t < n_tokens; t++)
        for (int64_t p = 0; p < n_panels; p += step) {
            step = n_panels - p >= 4 ? 4 : 1;
            if (step == 4)
                float_tile(out + t * out_stride + 16 * p, w, a + t * x->x_stride, 0, panel0 + p, out_stride, add, 1, 4, type);
            else
                float_tile(out + t * out_stride + 16 * p, w, a + t * x->x_stride, 0, panel0 + p, out_stride, add, 1, 1, type);
        }
}

/* ---- quantised weights: unpacking ---- */

TILE int has_nibbles(int32_t type) { return type != PKV_W_Q8_0 && type != PKV_W_Q2_K && type != PKV_W_Q3_K; }
TILE int has_pairs(int32_t type) { return type == PKV_W_Q2_K || type == PKV_W_Q3_K || type == PKV_W_Q6_K; }
TILE int has_bits(int32_t type) { return type == PKV_W_Q5_0 || type == PKV_W_Q5_1 || type == PKV_W_Q3_K || type == PKV_W_Q5_K; }
TILE int is_super(int32_t type) { return type >= PKV_W_Q2_K; }
TILE int has_mins(int32_t type)
{
    return type == PKV_W_Q4_1 || type == PKV_W_Q5_1 || (is_super(type) && type != PKV_W_Q3_K && type != PKV_W_Q6_K);
}
TILE int bias(int32_t type)
{
    return type == PKV_W_Q4_0 ? 8 : type == PKV_W_Q5_0 ? 16 : type == PKV_W_Q3_K ? 4 : type == PKV_W_Q6_K ? 32 : 0;
}
TILE int block_bytes(int32_t type)
{
    return type == PKV_W_Q8_0 ? 512 : 256 * has_nibbles(type) + 128 * has_pairs(type) + 64 * has_bits(type);
}

/* 16 bits to 16 bytes of 0 or value */
TILE uint8x16_t spread(const uint8_t *p, int value)
{
    const uint8x8_t bit_of = vcreate_u8(0x8040201008040201u);
    uint8x16_t bytes = vcombine_u8(vdup_n_u8(p[0]), vdup_n_u8(p[1]));
    return vandq_u8(vtstq_u8(bytes, vcombine_u8(bit_of, bit_of)), vdupq_n_u8((uint8_t)value));
}

/* Line j of 8 of a block for 4 rows: the columns 4j to 4j+3 of each as signed bytes, the bias taken off */
TILE int8x16_t unpack(const uint8_t *data, int group, int j, int32_t type)
{
    const uint8_t *pairs = data + (has_nibbles(type) ? 256 : 0), *bits = pairs + (has_pairs(type) ? 128 : 0);
    uint8x16_t v = vdupq_n_u8(0), two;
    if (type == PKV_W_Q8_0)
        return vreinterpretq_s8_u8(veorq_u8(vld1q_u8(data + 64 * j + 16 * group), vdupq_n_u8(128)));
    if (has_nibbles(type)) {
        v = vld1q_u8(data + 64 * (j % 4) + 16 * group);
        v = j / 4 ? vshrq_n_u8(v, 4) : vandq_u8(v, vdupq_n_u8(15));
    }
    if (has_pairs(type)) {
        two = vshlq_u8(vld1q_u8(pairs + 64 * (j / 4) + 16 * group), vdupq_n_s8((int8_t)(-2 * (j % 4))));
        two = vandq_u8(two, vdupq_n_u8(3));
        v = has_nibbles(type) ? vorrq_u8(v, vshlq_n_u8(two, 4)) : two;
    }
    if (has_bits(type))
        v = vorrq_u8(v, spread(bits + 8 * j + 2 * group, has_nibbles(type) ? 16 : 4));
    return vsubq_s8(vreinterpretq_s8_u8(v), vdupq_n_s8((int8_t)bias(type)));
}

TILE int32x4_t bytes_to_lanes(const uint8_t *p, int with_sign)
{
    uint8x8_t four = vreinterpret_u8_u32(vld1_dup_u32((const uint32_t *)p));
    return with_sign ? vmovl_s16(vget_low_s16(vmovl_s8(vreinterpret_s8_u8(four))))
                     : vreinterpretq_s32_u32(vmovl_u16(vget_low_u16(vmovl_u8(four))));
}

/* Integer factors of the two halves of a block of a K-quant for 4 rows, and those of its minima */
TILE void sub_scales(int32x4_t *factor, int32x4_t *min_factor, const uint8_t *small, int group, int64_t b, int32_t type)
{
    for (int h = 0; h < 2; h++) {
        int64_t at = type == PKV_W_Q4_K || type == PKV_W_Q5_K ? b % 8 * 16 + 4 * group : (b % 8 * 2 + h) * 16 + 4 * group;
        factor[h] = bytes_to_lanes(small + at, !has_mins(type));
        if (type == PKV_W_Q2_K) {
            min_factor[h] = vshrq_n_s32(factor[h], 4);
            factor[h] = vandq_s32(factor[h], vdupq_n_s32(15));
        } else
            min_factor[h] = has_mins(type) ? bytes_to_lanes(small + 128 + at, 0) : factor[h];
    }
}

/* ---- quantised weights: products ---- */

/* Keeps gcc from unpacking every line first and spilling what does not fit the registers. */
#define IN_ORDER(x) __asm__ volatile("" : "+w"(x))

TILE int32x4_t dot_group(int32x4_t acc, int8x16_t w, int8x16_t x, int group) /* 4 rows x 4 columns times x[4*group ...] */
{
    switch (group) {
    case 0: return vdotq_laneq_s32(acc, w, x, 0);
    case 1: return vdotq_laneq_s32(acc, w, x, 1);
    case 2: return vdotq_laneq_s32(acc, w, x, 2);
    default: return vdotq_laneq_s32(acc, w, x, 3);
    }
}

/* n_t tokens x n_r groups of 4 rows from group group0; with int12 (wide) each token has two digits, and n_t * n_r * digits <= 8.
 * ahead: the next panel's weights, n_ahead lines of them to ask for in every block.
 * Products add up in int32 over half a block of a K-quant, whose integer factor comes next, or a whole block of other types. */
TILE void block_tile(float *out, const pkv_weight *w, const pkv_act *x, int64_t panel, int group0, int64_t token, int64_t out_stride,
                     int add, int n_t, int n_r, int wide, int32_t type, const uint8_t *ahead, int64_t n_ahead)
{
    const int digits = wide ? 2 : 1, sub_scaled_float = type == PKV_W_Q4_K || type == PKV_W_Q5_K;
    const int factors = is_super(type) && (wide || !sub_scaled_float);
    const int scale_bytes = 32 + 32 * has_mins(type) + 256 * is_super(type);
    const int64_t n_blocks = w->n_cols / 32;
    const uint8_t *data = w->data + panel * w->panel_bytes, *scales = w->scales + panel * w->scale_bytes;
    const int8_t *q[2] = {x->q + token * x->q_stride, wide ? x->low + token * x->q_stride : NULL};
    float32x4_t acc[8], inner[8];
    int32x4_t isum[8], mins[8];
    UNROLL for (int i = 0; i < n_t * n_r; i++) {
        acc[i] = inner[i] = vdupq_n_f32(0.0f);
        isum[i] = mins[i] = vdupq_n_s32(0);
    }
    for (int64_t b = 0; b < n_blocks; b++, data += block_bytes(type)) {
        const uint8_t *s = scales + (is_super(type) ? b / 8 : b) * scale_bytes + 8 * group0;
        const uint8_t *small = scales + b / 8 * scale_bytes + 32 + 32 * has_mins(type);
        const int ends = !wide || b % 8 == 7 || b + 1 == n_blocks;
        for (int64_t i = 0; i < n_ahead; i++, ahead += 64)
            pkv_prefetch(ahead, 64);
        if (n_ahead)
            pkv_prefetch(is_super(type) ? small + w->scale_bytes + 32 * (b % 8) : s + w->scale_bytes, 64);
        int32x4_t factor[4][2], min_factor[4][2], sum[8];
        for (int r = 0; r < n_r && is_super(type); r++)
            sub_scales(factor[r], min_factor[r], small, group0 + r, b, type);
        UNROLL for (int h = 0; h < 2; h++) {
            int8x16_t a[8];
            UNROLL for (int c = 0; c < n_t * digits; c++)
                a[c] = vld1q_s8(q[c % digits] + c / digits * x->q_stride + 32 * b + 16 * h);
            UNROLL for (int i = 0; i < n_t * digits * n_r; i++)
                sum[i] = h == 0 || factors ? vdupq_n_s32(0) : sum[i];
            UNROLL for (int j = 0; j < 4; j++)
                UNROLL for (int r = 0; r < n_r; r++) {
                    int8x16_t v = unpack(data, group0 + r, 4 * h + j, type);
                    IN_ORDER(v);
                    UNROLL for (int c = 0; c < n_t * digits; c++)
                        sum[c * n_r + r] = dot_group(sum[c * n_r + r], v, a[c], j);
                }
            if (h == 0 && !factors)
                continue;
            UNROLL for (int t = 0; t < n_t; t++)
                UNROLL for (int r = 0; r < n_r; r++) {
                    int32x4_t part = sum[t * digits * n_r + r];
                    if (wide)
                        part = vaddq_s32(vshlq_n_s32(part, 4), sum[(t * digits + 1) * n_r + r]);
                    isum[t * n_r + r] = factors ? vmlaq_s32(isum[t * n_r + r], part, factor[r][h])
                                                : vaddq_s32(isum[t * n_r + r], part);
                }
        }
        UNROLL for (int r = 0; r < n_r; r++) {
            float32x4_t d = widen(s + 8 * r), m = has_mins(type) ? widen(s + 32 + 8 * r) : d;
            if (is_super(type) && !factors) {
                d = vmulq_f32(d, vcvtq_f32_s32(factor[r][0]));
                m = vmulq_f32(m, vcvtq_f32_s32(min_factor[r][0]));
            }
            UNROLL for (int t = 0; t < n_t; t++) {
                const int i = t * n_r + r;
                const int64_t at = (token + t) * x->b_stride + b;
                const float x_scale = x->scale[wide ? at - b + b / 8 : at];
                if (factors && has_mins(type)) {
                    mins[i] = vmlaq_n_s32(mins[i], min_factor[r][0], x->half[at]);
                    mins[i] = vmlaq_n_s32(mins[i], min_factor[r][1], x->isum[at] - x->half[at]);
                }
                if (wide && !is_super(type)) {
                    inner[i] = vfmaq_f32(inner[i], d, vcvtq_f32_s32(isum[i]));
                    if (has_mins(type))
                        inner[i] = vfmaq_n_f32(inner[i], m, (float)x->isum[at]);
                    isum[i] = vdupq_n_s32(0);
                    if (ends) {
                        acc[i] = vfmaq_n_f32(acc[i], inner[i], x_scale);
                        inner[i] = vdupq_n_f32(0.0f);
                    }
                } else if (ends) {
                    acc[i] = vfmaq_f32(acc[i], vmulq_n_f32(d, x_scale), vcvtq_f32_s32(isum[i]));
                    if (factors && has_mins(type))
                        acc[i] = vfmsq_f32(acc[i], vmulq_n_f32(m, x_scale), vcvtq_f32_s32(mins[i]));
                    else if (is_super(type) && has_mins(type))
                        acc[i] = vfmsq_f32(acc[i], m, vdupq_n_f32(x->sum[at]));
                    else if (has_mins(type))
                        acc[i] = vfmaq_n_f32(acc[i], m, x->sum[at]);
                    isum[i] = mins[i] = vdupq_n_s32(0);
                }
            }
        }
    }
    for (int t = 0; t < n_t; t++)
        for (int r = 0; r < n_r; r++)
            finish(out + t * out_stride + 4 * r, acc[t * n_r + r], add);
}

TILE void gemm_blocks(float *out, const pkv_weight *w, const pkv_act *x, int64_t panel0, int64_t n_panels, int64_t token0,
                      int64_t n_tokens, int64_t out_stride, int add, int64_t n_next, int32_t type)
{
    const int64_t n_ahead = pkv_lines_ahead(w, 1, 2 * (n_tokens / 4) + n_tokens % 4 / 2 + n_tokens % 2), step = 2 * w->n_cols * n_ahead;
    for (int64_t p = 0; p < n_panels; p++, out += 16) {
        const int more = p + 1 < n_panels + n_next;
        const uint8_t *ahead = w->data + (panel0 + p + 1) * w->panel_bytes, *end = more ? ahead + w->panel_bytes : ahead;
        int64_t t = 0;
        for (; t + 4 <= n_tokens; t += 4)
            for (int g = 0; g < 4; g += 2, ahead += step)
                block_tile(out + t * out_stride + 4 * g, w, x, panel0 + p, g, token0 + t, out_stride, add, 4, 2, 0, type, ahead,
                           ahead < end ? n_ahead : 0);
        if (t + 2 <= n_tokens) {
            block_tile(out + t * out_stride, w, x, panel0 + p, 0, token0 + t, out_stride, add, 2, 4, 0, type, ahead,
                       ahead < end ? n_ahead : 0);
            t += 2, ahead += step;
        }
        if (t < n_tokens)
            block_tile(out + t * out_stride, w, x, panel0 + p, 0, token0 + t, out_stride, add, 1, 4, 0, type, ahead,
                       ahead < end ? n_ahead : 0);
    }
}

TILE void gemm_wide(float *out, const pkv_weight *w, const pkv_act *x, int64_t panel0, int64_t n_panels, int64_t token0,
                    int64_t n_tokens, int64_t out_stride, int add, int64_t n_next, int32_t type)
{
    const int64_t n_ahead = pkv_lines_ahead(w, 1, 2 * (n_tokens / 2) + n_tokens % 2), step = 2 * w->n_cols * n_ahead;
    for (int64_t p = 0; p < n_panels; p++, out += 16) {
        const int more = p + 1 < n_panels + n_next;
        const uint8_t *ahead = w->data + (panel0 + p + 1) * w->panel_bytes, *end = more ? ahead + w->panel_bytes : ahead;
        int64_t t = 0;
        for (; t + 2 <= n_tokens; t += 2)
            for (int g = 0; g < 4; g += 2, ahead += step)
                block_tile(out + t * out_stride + 4 * g, w, x, panel0 + p, g, token0 + t, out_stride, add, 2, 2, 1, type, ahead,
                           ahead < end ? n_ahead : 0);
        if (t < n_tokens)
            block_tile(out + t * out_stride, w, x, panel0 + p, 0, token0 + t, out_stride, add, 1, 4, 1, type, ahead,
                       ahead < end ? n_ahead : 0);
    }
}

#define GEMM(name, kind, type)                                                                                                      \
    static void gemm_##name(float *restrict out, const pkv_weight *restrict w, const pkv_act *restrict x, int64_t panel0,           \
                            int64_t n_panels, int64_t token0, int64_t n_tokens, int64_t out_stride, int add, int64_t n_next)        \
    {                                                                                                                               \
        gemm_##kind(out, w, x, panel0, n_panels, token0, n_tokens, out_stride, add, n_next, type);                                  \
    }
#define GEMM_BLOCKS(name, type) GEMM(name, blocks, type) GEMM(wide_##name, wide, type)
GEMM(f32, float, PKV_W_F32)
GEMM(f16, float, PKV_W_F16)
GEMM(bf16, float, PKV_W_BF16)
GEMM_BLOCKS(q4_0, PKV_W_Q4_0)
GEMM_BLOCKS(q4_1, PKV_W_Q4_1)
GEMM_BLOCKS(q8_0, PKV_W_Q8_0)
GEMM_BLOCKS(q5_0, PKV_W_Q5_0)
GEMM_BLOCKS(q5_1, PKV_W_Q5_1)
GEMM_BLOCKS(q2_k, PKV_W_Q2_K)
GEMM_BLOCKS(q3_k, PKV_W_Q3_K)
GEMM_BLOCKS(q4_k, PKV_W_Q4_K)
GEMM_BLOCKS(q5_k, PKV_W_Q5_K)
GEMM_BLOCKS(q6_k, PKV_W_Q6_K)
