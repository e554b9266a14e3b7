/* Matmul for AVX2, part of k_avx2.c: lanes are 8 rows of a panel. */
#include "pkv_kernels.h"

#include <immintrin.h>
#include <string.h>

#define TILE static inline __attribute__((always_inline)) /* its constant arguments must reach the loops they bound */
#define UNROLL _Pragma("GCC unroll 8")

static inline __m256 load_weight(const uint8_t *p, int64_t i, int32_t type)
{
    __m128i half;
    if (type == PKV_W_F32)
        return _mm256_load_ps((const float *)p + i);
    half = _mm_load_si128((const __m128i *)(p + 2 * i));
    return type == PKV_W_F16 ? _mm256_cvtph_ps(half)
                             : _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(half), 16));
}

TILE void finish(float *out, __m256 acc, int add)
{
    _mm256_storeu_ps(out, add ? _mm256_add_ps(_mm256_loadu_ps(out), acc) : acc);
}

/* n_t tokens x n_p panels; n_t * n_p <= 4, so that eight chains hide the latency of the FMA */
TILE void float_tile(float *out, const pkv_weight *w, const float *x, int64_t x_stride, int64_t panel, int64_t out_stride, int add,
                     int n_t, int n_p, int32_t type)
{
    const uint8_t *data = w->data + panel * w->panel_bytes;
    __m256 acc[8];
    for (int i = 0; i < 2 * n_t * n_p; i++)
        acc[i] = _mm256_setzero_ps();
    for (int64_t k = 0; k < w->n_cols; k++)
        for (int p = 0; p < n_p; p++) {
            __m256 low = load_weight(data + p * w->panel_bytes, 16 * k, type);
            __m256 high = load_weight(data + p * w->panel_bytes, 16 * k + 8, type);
            for (int t = 0; t < n_t; t++) {
                __m256 a = _mm256_broadcast_ss(x + t * x_stride + k);
                acc[2 * (t * n_p + p)] = _mm256_fmadd_ps(low, a, acc[2 * (t * n_p + p)]);
                acc[2 * (t * n_p + p) + 1] = _mm256_fmadd_ps(high, a, acc[2 * (t * n_p + p) + 1]);
            }
        }
    for (int t = 0; t < n_t; t++)
        for (int i = 0; i < 2 * n_p; i++)
            finish(out + t * out_stride + 8 * i, acc[2 * t * n_p + i], add);
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
TILE int log2_bias(int32_t type) /* every bias is a power of two; -1 where there is none */
{
    return type == PKV_W_Q4_0   ? 3
           : type == PKV_W_Q5_0 ? 4
           : type == PKV_W_Q8_0 ? 7
           : type == PKV_W_Q3_K ? 2
           : type == PKV_W_Q6_K ? 5
                                : -1;
}
TILE int block_bytes(int32_t type)
{
    return type == PKV_W_Q8_0 ? 512 : 256 * has_nibbles(type) + 128 * has_pairs(type) + 64 * has_bits(type);
}

/* Lines whose products with int8 add up inside int16: 2 * 127 * value per line */
TILE int safe_lines(int32_t type) { return type == PKV_W_Q6_K ? 2 : has_bits(type) || type == PKV_W_Q2_K ? 4 : 8; }

/* 32 bits to 32 bytes of 0 or value */
TILE __m256i spread(const uint8_t *p, int value)
{
    const __m256i byte_of = _mm256_setr_epi64x(0, 0x0101010101010101, 0x0202020202020202, 0x0303030303030303);
    const __m256i bit_of = _mm256_set1_epi64x((int64_t)0x8040201008040201);
    int32_t bits;
    memcpy(&bits, p, 4);
    __m256i x = _mm256_and_si256(_mm256_shuffle_epi8(_mm256_set1_epi32(bits), byte_of), bit_of);
    return _mm256_and_si256(_mm256_cmpeq_epi8(x, bit_of), _mm256_set1_epi8((char)value));
}

/* Line j of 8 of a block for 8 rows: the columns 4j to 4j+3 of each as unsigned bytes. Q8_0: nibble `plane` of each. */
TILE __m256i unpack(const uint8_t *data, int rows, int j, int plane, int32_t type)
{
    const uint8_t *pairs = data + (has_nibbles(type) ? 256 : 0), *bits = pairs + (has_pairs(type) ? 128 : 0);
    __m256i v = _mm256_setzero_si256(), two;
    if (type == PKV_W_Q8_0 || has_nibbles(type)) {
        int high = type == PKV_W_Q8_0 ? plane : j / 4;
        v = _mm256_load_si256((const __m256i *)(data + 64 * (type == PKV_W_Q8_0 ? j : j % 4) + 32 * rows));
        v = _mm256_and_si256(high ? _mm256_srli_epi16(v, 4) : v, _mm256_set1_epi8(15));
    }
    if (has_pairs(type)) {
        two = _mm256_load_si256((const __m256i *)(pairs + 64 * (j / 4) + 32 * rows));
        two = _mm256_and_si256(_mm256_srli_epi16(two, 2 * (j % 4)), _mm256_set1_epi8(3));
        v = has_nibbles(type) ? _mm256_or_si256(v, _mm256_slli_epi16(two, 4)) : two;
    }
    if (has_bits(type))
        v = _mm256_or_si256(v, spread(bits + 8 * j + 4 * rows, has_nibbles(type) ? 16 : 4));
    return v;
}

/* The same int16 twice in every int32 lane, or low in the lower half and high in the upper one */
TILE __m256i both_halves(__m256i low, __m256i high) { return _mm256_blend_epi16(low, _mm256_slli_epi32(high, 16), 0xaa); }

TILE __m256i bytes_to_lanes(const uint8_t *p, int with_sign)
{
    __m128i x = _mm_loadl_epi64((const __m128i *)p);
    return with_sign ? _mm256_cvtepi8_epi32(x) : _mm256_cvtepu8_epi32(x);
}

/* Integer factors of the two halves of a block of a K-quant for 8 rows, and those of its minima */
TILE void sub_scales(__m256i *factor, __m256i *min_factor, const uint8_t *small, int rows, int64_t b, int32_t type)
{
    for (int h = 0; h < 2; h++) {
        int64_t at = type == PKV_W_Q4_K || type == PKV_W_Q5_K ? b % 8 * 16 + 8 * rows : (b % 8 * 2 + h) * 16 + 8 * rows;
        factor[h] = bytes_to_lanes(small + at, !has_mins(type));
        if (type == PKV_W_Q2_K) {
            min_factor[h] = _mm256_srli_epi32(factor[h], 4);
            factor[h] = _mm256_and_si256(factor[h], _mm256_set1_epi32(15));
        } else
            min_factor[h] = has_mins(type) ? bytes_to_lanes(small + 128 + at, 0) : factor[h];
    }
}

/* ---- quantised weights: products ---- */

/* Keeps a running sum in its register: gcc would reassociate integer sums into trees whose terms it then spills. */
#define IN_REGISTER(x) __asm__("" : "+x"(x))

/* Both halves' sums of integer activations as int16 pairs; at most 16 * 2039 each */
TILE __m256i half_sums(const pkv_act *x, int64_t at)
{
    return _mm256_set1_epi32((int32_t)(((uint32_t)x->half[at] & 0xffffu) | (uint32_t)(x->isum[at] - x->half[at]) << 16));
}

/* n_t tokens x n_h groups of 8 rows from group rows0; with int12 (wide) each token has two digits, and n_t * n_h * digits <= 4.
 * ahead: the next panel's weights, n_ahead lines of them to ask for in every block.
 * Weights run as unsigned bytes against signed digits, pairs of products add up in int16 over as many lines as are safe, then pmaddwd multiplies by the
 * integer factor of the half block (K-quants), by 16 for a high digit or nibble, or by 1, and adds the pairs in int32. */
TILE void block_tile(float *out, const pkv_weight *w, const pkv_act *x, int64_t panel, int rows0, int64_t token, int64_t out_stride,
                     int add, int n_t, int n_h, int wide, int32_t type, const uint8_t *ahead, int64_t n_ahead)
{
    const int digits = wide ? 2 : 1, n_planes = type == PKV_W_Q8_0 ? 2 : 1;
    const int sub_scaled_float = type == PKV_W_Q4_K || type == PKV_W_Q5_K;
    const int factors = is_super(type) && (wide || !sub_scaled_float), whole = factors && sub_scaled_float;
    const int scale_bytes = 32 + 32 * has_mins(type) + 256 * is_super(type);
    const int lines = factors && !whole && safe_lines(type) > 4 ? 4 : safe_lines(type);
    const int64_t n_blocks = w->n_cols / 32;
    const uint8_t *data = w->data + panel * w->panel_bytes, *scales = w->scales + panel * w->scale_bytes;
    const int8_t *q[2] = {x->q + token * x->q_stride, wide ? x->low + token * x->q_stride : NULL};
    __m256 acc[4], inner[4];
    __m256i isum[4], mins[4];
    UNROLL for (int i = 0; i < n_t * n_h; i++) {
        acc[i] = inner[i] = _mm256_setzero_ps();
        isum[i] = mins[i] = _mm256_setzero_si256();
    }
    for (int64_t b = 0; b < n_blocks; b++, data += block_bytes(type)) {
        const uint8_t *s = scales + (is_super(type) ? b / 8 : b) * scale_bytes + 16 * rows0;
        const uint8_t *small = scales + b / 8 * scale_bytes + 32 + 32 * has_mins(type);
        const int ends = !wide || b % 8 == 7 || b + 1 == n_blocks;
        for (int64_t i = 0; i < n_ahead; i++, ahead += 64)
            pkv_prefetch(ahead, 64);
        if (n_ahead)
            pkv_prefetch(is_super(type) ? small + w->scale_bytes + 32 * (b % 8) : s + w->scale_bytes, 64);
        __m256i factor[2][2], min_factor[2][2], sum[8];
        for (int h = 0; h < n_h && is_super(type); h++)
            sub_scales(factor[h], min_factor[h], small, rows0 + h, b, type);
        UNROLL for (int j = 0; j < 8; j++)
            UNROLL for (int i = 0; i < n_h * n_planes; i++) {
                const int h = i / n_planes, plane = i % n_planes;
                __m256i v = unpack(data, rows0 + h, j, plane, type);
                UNROLL for (int c = 0; c < n_t * digits; c++) {
                    int32_t four;
                    memcpy(&four, q[c % digits] + c / digits * x->q_stride + 4 * j, 4);
                    __m256i *to = sum + c * n_h * n_planes + i, product = _mm256_maddubs_epi16(v, _mm256_set1_epi32(four));
                    *to = j % lines ? _mm256_add_epi16(*to, product) : product;
                    IN_REGISTER(*to);
                    if (j % lines == lines - 1) {
                        __m256i by = factors ? both_halves(factor[h][j / 4], factor[h][j / 4]) : _mm256_set1_epi16(1);
                        by = _mm256_slli_epi16(by, 4 * (plane + (wide && c % digits == 0)));
                        isum[c / digits * n_h + h] = _mm256_add_epi32(isum[c / digits * n_h + h], _mm256_madd_epi16(*to, by));
                    }
                }
            }
        UNROLL for (int h = 0; h < n_h; h++) {
            __m256 d = _mm256_cvtph_ps(_mm_load_si128((const __m128i *)(s + 16 * h))), m = d;
            if (has_mins(type))
                m = _mm256_cvtph_ps(_mm_load_si128((const __m128i *)(s + 32 + 16 * h)));
            if (is_super(type) && !factors) {
                d = _mm256_mul_ps(d, _mm256_cvtepi32_ps(factor[h][0]));
                m = _mm256_mul_ps(m, _mm256_cvtepi32_ps(min_factor[h][0]));
            }
            UNROLL for (int t = 0; t < n_t; t++) {
                const int i = t * n_h + h;
                const int64_t at = t * x->b_stride + token * x->b_stride + b;
                const __m256 x_scale = _mm256_broadcast_ss(x->scale + (wide ? at - b + b / 8 : at));
                if (log2_bias(type) >= 0) {
                    __m256i sums = factors ? _mm256_madd_epi16(both_halves(factor[h][0], factor[h][1]), half_sums(x, at))
                                           : _mm256_set1_epi32(x->isum[at]);
                    isum[i] = _mm256_sub_epi32(isum[i], _mm256_slli_epi32(sums, log2_bias(type)));
                }
                if (factors && has_mins(type))
                    mins[i] = _mm256_add_epi32(mins[i], _mm256_madd_epi16(both_halves(min_factor[h][0], min_factor[h][1]),
                                                                           half_sums(x, at)));
                if (wide && !is_super(type)) {
                    inner[i] = _mm256_fmadd_ps(d, _mm256_cvtepi32_ps(isum[i]), inner[i]);
                    if (has_mins(type))
                        inner[i] = _mm256_fmadd_ps(m, _mm256_set1_ps((float)x->isum[at]), inner[i]);
                    isum[i] = _mm256_setzero_si256();
                    if (ends) {
                        acc[i] = _mm256_fmadd_ps(x_scale, inner[i], acc[i]);
                        inner[i] = _mm256_setzero_ps();
                    }
                } else if (ends) {
                    acc[i] = _mm256_fmadd_ps(_mm256_mul_ps(d, x_scale), _mm256_cvtepi32_ps(isum[i]), acc[i]);
                    if (factors && has_mins(type))
                        acc[i] = _mm256_fnmadd_ps(_mm256_mul_ps(m, x_scale), _mm256_cvtepi32_ps(mins[i]), acc[i]);
                    else if (is_super(type) && has_mins(type))
                        acc[i] = _mm256_fnmadd_ps(m, _mm256_broadcast_ss(x->sum + at), acc[i]);
                    else if (has_mins(type))
                        acc[i] = _mm256_fmadd_ps(m, _mm256_broadcast_ss(x->sum + at), acc[i]);
                    isum[i] = mins[i] = _mm256_setzero_si256();
                }
            }
        }
        q[0] += 32;
        q[1] = wide ? q[1] + 32 : NULL;
    }
    UNROLL for (int t = 0; t < n_t; t++)
        UNROLL for (int h = 0; h < n_h; h++)
            finish(out + t * out_stride + 8 * h, acc[t * n_h + h], add);
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
            for (int h = 0; h < 2; h++, ahead += step)
                block_tile(out + t * out_stride + 8 * h, w, x, panel0 + p, h, token0 + t, out_stride, add, 4, 1, 0, type, ahead,
                           ahead < end ? n_ahead : 0);
        if (t + 2 <= n_tokens) {
            block_tile(out + t * out_stride, w, x, panel0 + p, 0, token0 + t, out_stride, add, 2, 2, 0, type, ahead,
                       ahead < end ? n_ahead : 0);
            t += 2, ahead += step;
        }
        if (t < n_tokens)
            block_tile(out + t * out_stride, w, x, panel0 + p, 0, token0 + t, out_stride, add, 1, 2, 0, type, ahead,
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
            for (int h = 0; h < 2; h++, ahead += step)
                block_tile(out + t * out_stride + 8 * h, w, x, panel0 + p, h, token0 + t, out_stride, add, 2, 1, 1, type, ahead,
                           ahead < end ? n_ahead : 0);
        if (t < n_tokens)
            block_tile(out + t * out_stride, w, x, panel0 + p, 0, token0 + t, out_stride, add, 1, 2, 1, type, ahead,
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
