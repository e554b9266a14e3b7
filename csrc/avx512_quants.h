/* Matmul on every block type and both activation formats for the AVX-512 ISAs: what avx512_gemm.h, which is tuned for the types small
 * models use most, does not cover. The including file first defines dot4(type, sum, w, x), which adds to int32 [16] the products of 16 rows
 * x 4 columns, w unsigned bytes as stored, and dot_bias(type), what is still to be taken off each weight afterwards. */

#define IS_SUPER(type) ((type) >= PKV_W_Q2_K)
#define HAS_HALVES(type) ((type) == PKV_W_Q2_K || (type) == PKV_W_Q3_K || (type) == PKV_W_Q6_K)
#define HAS_NIBBLES(type) ((type) != PKV_W_Q8_0 && (type) != PKV_W_Q2_K && (type) != PKV_W_Q3_K)
#define HAS_PAIRS(type) HAS_HALVES(type)
#define HAS_BITS(type) ((type) == PKV_W_Q5_0 || (type) == PKV_W_Q5_1 || (type) == PKV_W_Q5_K || (type) == PKV_W_Q3_K)
#define HAS_MIN(type) ((type) == PKV_W_Q4_1 || (type) == PKV_W_Q5_1)
#define DATA_BYTES(type) ((type) == PKV_W_Q8_0 ? 512 : 256 * HAS_NIBBLES(type) + 128 * HAS_PAIRS(type) + 64 * HAS_BITS(type))
#define SCALE_BYTES(type) ((type) == PKV_W_Q3_K || (type) == PKV_W_Q6_K ? 288 : IS_SUPER(type) ? 320 : HAS_MIN(type) ? 64 : 32)

/* Unsigned weights of columns 4j..4j+3 (lo) and 16+4j..16+4j+3 (hi) of a block, 16 rows each. */
INLINE void expand(const int type, const uint8_t *data, const int j, __m512i *lo, __m512i *hi)
{
    const __m512i four = _mm512_set1_epi8(15), two = _mm512_set1_epi8(3);
    const uint8_t *pairs = data + 256 * HAS_NIBBLES(type), *bits = pairs + 128 * HAS_PAIRS(type);
    if (type == PKV_W_Q8_0) {
        *lo = _mm512_load_si512(data + 64 * j);
        *hi = _mm512_load_si512(data + 64 * (j + 4));
        return;
    }
    *lo = *hi = _mm512_setzero_si512();
    if (HAS_NIBBLES(type)) {
        __m512i line = _mm512_load_si512(data + 64 * j);
        *lo = _mm512_and_si512(line, four);
        *hi = _mm512_and_si512(_mm512_srli_epi16(line, 4), four);
    }
    if (HAS_PAIRS(type)) {
        __m512i a = _mm512_and_si512(_mm512_srli_epi16(_mm512_load_si512(pairs), 2 * j), two);
        __m512i b = _mm512_and_si512(_mm512_srli_epi16(_mm512_load_si512(pairs + 64), 2 * j), two);
        *lo = HAS_NIBBLES(type) ? _mm512_or_si512(*lo, _mm512_slli_epi16(a, 4)) : a;
        *hi = HAS_NIBBLES(type) ? _mm512_or_si512(*hi, _mm512_slli_epi16(b, 4)) : b;
    }
    if (HAS_BITS(type)) {
        const __m512i bit = _mm512_set1_epi8(HAS_NIBBLES(type) ? 16 : 4);
        __mmask64 a, b;
        memcpy(&a, bits + 8 * j, 8);
        memcpy(&b, bits + 8 * (j + 4), 8);
        *lo = _mm512_mask_add_epi8(*lo, a, *lo, bit);
        *hi = _mm512_mask_add_epi8(*hi, b, *hi, bit);
    }
}

INLINE __m512 half16(const uint8_t *p) { return _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)p)); }
INLINE __m512i unsigned16(const uint8_t *p) { return _mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i *)p)); }
INLINE __m512i signed16(const uint8_t *p) { return _mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i *)p)); }
INLINE __m512 negated(__m512 x) { return _mm512_xor_ps(x, _mm512_set1_ps(-0.0f)); }

/* P panels x T tokens. Wide activations take two passes over a block's weights, high digits first. ahead: as in avx512_gemm.h */
INLINE void quant_tile(const int type, const int wide, const int P, const int T, float *restrict out, const pkv_weight *restrict w,
                       const pkv_act *restrict x, int64_t panel, int64_t token, int64_t out_stride, int add, const uint8_t *ahead,
                       int64_t n_ahead)
{
    const int second = HAS_HALVES(type) ? 1 : 0;
    const int64_t n_blocks = w->n_cols / 32;
    __m512 acc[4][6], inner[4][6];
    __m512i total[4][6], mins[4][6];
    UNROLL for (int p = 0; p < P; p++)
        UNROLL for (int t = 0; t < T; t++) {
            acc[p][t] = inner[p][t] = _mm512_setzero_ps();
            total[p][t] = mins[p][t] = _mm512_setzero_si512();
        }
    for (int64_t b = 0; b < n_blocks; b++) {
        const uint8_t *data = w->data + panel * w->panel_bytes + b * DATA_BYTES(type);
        const uint8_t *scales = w->scales + panel * w->scale_bytes + (IS_SUPER(type) ? b / 8 : b) * SCALE_BYTES(type);
        const int64_t last = b % 8 == 7 || b + 1 == n_blocks;
        __m512i sum[2][4][6];
        for (int64_t i = 0; i < n_ahead; i++, ahead += 64)
            pkv_prefetch(ahead, 64);
        if (n_ahead && 64 * (b % 8) < SCALE_BYTES(type))
            UNROLL for (int p = 0; p < P; p++)
                pkv_prefetch(scales + (P + p) * w->scale_bytes + (IS_SUPER(type) ? 64 * (b % 8) : 0), 64);
        UNROLL for (int p = 0; p < P; p++)
            UNROLL for (int t = 0; t < T; t++)
                sum[0][p][t] = sum[1][p][t] = _mm512_setzero_si512();
        UNROLL for (int pass = 0; pass <= wide; pass++) {
            const int8_t *q = (pass ? x->low : x->q) + token * x->q_stride + 32 * b;
            UNROLL for (int j = 0; j < 4; j++) {
                __m512i lo[4], hi[4];
                UNROLL for (int p = 0; p < P; p++) {
                    expand(type, data + p * w->panel_bytes, j, &lo[p], &hi[p]);
                }
                UNROLL for (int t = 0; t < T; t++) {
                    __m512i a = broadcast4(q + t * x->q_stride + 4 * j), c = broadcast4(q + t * x->q_stride + 16 + 4 * j);
                    UNROLL for (int p = 0; p < P; p++) {
                        sum[0][p][t] = dot4(type, sum[0][p][t], lo[p], a);
                        sum[second][p][t] = dot4(type, sum[second][p][t], hi[p], c);
                    }
                }
            }
            if (wide && pass == 0)
                UNROLL for (int p = 0; p < P; p++)
                    UNROLL for (int t = 0; t < T; t++) {
                        sum[0][p][t] = _mm512_slli_epi32(sum[0][p][t], 4);
                        sum[1][p][t] = _mm512_slli_epi32(sum[1][p][t], 4);
                    }
        }
        UNROLL for (int t = 0; t < T; t++) {
            const int64_t at = (token + t) * x->b_stride;
            const int32_t whole = x->isum[at + b], half = x->half[at + b], bias = dot_bias(type);
            const __m512 x_scale = _mm512_set1_ps(x->scale[at + (wide ? b / 8 : b)]);
            UNROLL for (int p = 0; p < P; p++) {
                const uint8_t *s = scales + p * w->scale_bytes, *small = s + (type == PKV_W_Q3_K || type == PKV_W_Q6_K ? 32 : 64);
                const int64_t k = b % 8;
                __m512i i = sum[0][p][t], m = _mm512_setzero_si512();
                if (bias)
                    i = _mm512_sub_epi32(i, _mm512_set1_epi32(bias * (HAS_HALVES(type) ? half : whole)));
                if (HAS_HALVES(type)) {
                    __m512i i1 = sum[1][p][t], f0, f1;
                    if (bias)
                        i1 = _mm512_sub_epi32(i1, _mm512_set1_epi32(bias * (whole - half)));
                    if (type == PKV_W_Q2_K) {
                        const __m512i four = _mm512_set1_epi32(15);
                        __m512i a = unsigned16(small + 32 * k), c = unsigned16(small + 32 * k + 16);
                        f0 = _mm512_and_si512(a, four), f1 = _mm512_and_si512(c, four);
                        m = _mm512_add_epi32(_mm512_mullo_epi32(_mm512_srli_epi32(a, 4), _mm512_set1_epi32(half)),
                                             _mm512_mullo_epi32(_mm512_srli_epi32(c, 4), _mm512_set1_epi32(whole - half)));
                    } else
                        f0 = signed16(small + 32 * k), f1 = signed16(small + 32 * k + 16);
                    i = _mm512_add_epi32(_mm512_mullo_epi32(f0, i), _mm512_mullo_epi32(f1, i1));
                }
                if (wide && IS_SUPER(type)) {
                    if (!HAS_HALVES(type)) {
                        i = _mm512_mullo_epi32(unsigned16(small + 16 * k), i);
                        m = _mm512_mullo_epi32(unsigned16(small + 128 + 16 * k), _mm512_set1_epi32(whole));
                    }
                    total[p][t] = _mm512_add_epi32(total[p][t], i);
                    mins[p][t] = _mm512_add_epi32(mins[p][t], m);
                    if (!last)
                        continue;
                    acc[p][t] = _mm512_fmadd_ps(_mm512_mul_ps(half16(s), x_scale), _mm512_cvtepi32_ps(total[p][t]), acc[p][t]);
                    if (type != PKV_W_Q3_K && type != PKV_W_Q6_K)
                        acc[p][t] = _mm512_fmadd_ps(negated(_mm512_mul_ps(half16(s + 32), x_scale)), _mm512_cvtepi32_ps(mins[p][t]),
                                                    acc[p][t]);
                    total[p][t] = mins[p][t] = _mm512_setzero_si512();
                } else if (wide) {
                    inner[p][t] = _mm512_fmadd_ps(half16(s), _mm512_cvtepi32_ps(i), inner[p][t]);
                    if (HAS_MIN(type))
                        inner[p][t] = _mm512_fmadd_ps(half16(s + 32), _mm512_set1_ps((float)whole), inner[p][t]);
                    if (!last)
                        continue;
                    acc[p][t] = _mm512_fmadd_ps(x_scale, inner[p][t], acc[p][t]);
                    inner[p][t] = _mm512_setzero_ps();
                } else {
                    __m512 d = half16(s), x_sum = _mm512_set1_ps(x->sum[at + b]);
                    if (type == PKV_W_Q4_K || type == PKV_W_Q5_K)
                        d = _mm512_mul_ps(d, _mm512_cvtepi32_ps(unsigned16(small + 16 * k)));
                    acc[p][t] = _mm512_fmadd_ps(_mm512_mul_ps(d, x_scale), _mm512_cvtepi32_ps(i), acc[p][t]);
                    if (type == PKV_W_Q2_K)
                        acc[p][t] = _mm512_fmadd_ps(negated(_mm512_mul_ps(half16(s + 32), x_scale)), _mm512_cvtepi32_ps(m), acc[p][t]);
                    if (HAS_MIN(type))
                        acc[p][t] = _mm512_fmadd_ps(half16(s + 32), x_sum, acc[p][t]);
                    if (type == PKV_W_Q4_K || type == PKV_W_Q5_K) {
                        __m512 mn = _mm512_cvtepi32_ps(unsigned16(small + 128 + 16 * k));
                        acc[p][t] = _mm512_fmadd_ps(negated(_mm512_mul_ps(half16(s + 32), mn)), x_sum, acc[p][t]);
                    }
                }
            }
        }
    }
    UNROLL for (int t = 0; t < T; t++)
        UNROLL for (int p = 0; p < P; p++) {
            float *o = out + t * out_stride + 16 * p;
            _mm512_storeu_ps(o, add ? _mm512_add_ps(_mm512_loadu_ps(o), acc[p][t]) : acc[p][t]);
        }
}

/* P panels for all tokens, as many at a time as registers hold. */
INLINE void quant_panels(const int type, const int wide, const int P, float *restrict out, const pkv_weight *restrict w,
                         const pkv_act *restrict x, int64_t panel, int64_t token0, int64_t n_tokens, int64_t out_stride, int add, int more)
{
    const int most = !wide && !HAS_HALVES(type) ? 6 : IS_SUPER(type) && wide ? 2 : 3;
    const int64_t n_blocks = w->n_cols / 32, n_ahead = more ? pkv_lines_ahead(w, P, (n_tokens + most - 1) / most) : 0;
    const uint8_t *ahead = w->data + (panel + P) * w->panel_bytes, *end = ahead + P * w->panel_bytes;
    for (int64_t t = 0; t < n_tokens; ahead += 64 * n_ahead * n_blocks) {
        int64_t n = n_tokens - t < most ? n_tokens - t : most, lines = ahead < end ? n_ahead : 0;
        float *o = out + t * out_stride;
        if (most == 6 && n == 6)
            quant_tile(type, wide, P, 6, o, w, x, panel, token0 + t, out_stride, add, ahead, lines);
        else if (most == 6 && n >= 4)
            n = 4, quant_tile(type, wide, P, 4, o, w, x, panel, token0 + t, out_stride, add, ahead, lines);
        else if (most >= 3 && n >= 3)
            n = 3, quant_tile(type, wide, P, 3, o, w, x, panel, token0 + t, out_stride, add, ahead, lines);
        else if (n >= 2)
            n = 2, quant_tile(type, wide, P, 2, o, w, x, panel, token0 + t, out_stride, add, ahead, lines);
        else
            quant_tile(type, wide, P, 1, o, w, x, panel, token0 + t, out_stride, add, ahead, lines);
        t += n;
    }
}

INLINE void quant_gemm(const int type, const int wide, float *restrict out, const pkv_weight *restrict w, const pkv_act *restrict x,
                       int64_t panel0, int64_t n_panels, int64_t token0, int64_t n_tokens, int64_t out_stride, int add, int64_t n_next)
{
    int64_t p = 0;
    for (; p + 2 <= n_panels; p += 2)
        quant_panels(type, wide, 2, out + 16 * p, w, x, panel0 + p, token0, n_tokens, out_stride, add, p + 2 < n_panels + n_next);
    if (p < n_panels)
        quant_panels(type, wide, 1, out + 16 * p, w, x, panel0 + p, token0, n_tokens, out_stride, add, n_next > 0);
}

#define QUANT_GEMM(name, type, wide)                                                                                                \
    static void name(float *restrict out, const pkv_weight *restrict w, const pkv_act *restrict x, int64_t panel0,                 \
                     int64_t n_panels, int64_t token0, int64_t n_tokens, int64_t out_stride, int add, int64_t n_next)              \
    {                                                                                                                              \
        quant_gemm(type, wide, out, w, x, panel0, n_panels, token0, n_tokens, out_stride, add, n_next);                            \
    }
QUANT_GEMM(gemm_q5_0, PKV_W_Q5_0, 0)
QUANT_GEMM(gemm_q5_1, PKV_W_Q5_1, 0)
QUANT_GEMM(gemm_q2_k, PKV_W_Q2_K, 0)
QUANT_GEMM(gemm_q3_k, PKV_W_Q3_K, 0)
QUANT_GEMM(gemm_q4_k, PKV_W_Q4_K, 0)
QUANT_GEMM(gemm_q5_k, PKV_W_Q5_K, 0)
QUANT_GEMM(gemm_q6_k, PKV_W_Q6_K, 0)
QUANT_GEMM(gemm_wide_q4_0, PKV_W_Q4_0, 1)
QUANT_GEMM(gemm_wide_q4_1, PKV_W_Q4_1, 1)
QUANT_GEMM(gemm_wide_q8_0, PKV_W_Q8_0, 1)
QUANT_GEMM(gemm_wide_q5_0, PKV_W_Q5_0, 1)
QUANT_GEMM(gemm_wide_q5_1, PKV_W_Q5_1, 1)
QUANT_GEMM(gemm_wide_q2_k, PKV_W_Q2_K, 1)
QUANT_GEMM(gemm_wide_q3_k, PKV_W_Q3_K, 1)
QUANT_GEMM(gemm_wide_q4_k, PKV_W_Q4_K, 1)
QUANT_GEMM(gemm_wide_q5_k, PKV_W_Q5_K, 1)
QUANT_GEMM(gemm_wide_q6_k, PKV_W_Q6_K, 1)

/* The matmul part of a kernel table. */
#define PKV_AVX512_GEMM                                                                                                            \
    .gemm = {pkv_gemm_f32_avx512, pkv_gemm_f16_avx512, pkv_gemm_bf16_avx512, gemm_q4_0, gemm_q4_1, gemm_q8_0, gemm_q5_0,           \
             gemm_q5_1, gemm_q2_k, gemm_q3_k, gemm_q4_k, gemm_q5_k, gemm_q6_k},                                                    \
    .gemm_wide = {pkv_gemm_f32_avx512, pkv_gemm_f16_avx512, pkv_gemm_bf16_avx512, gemm_wide_q4_0, gemm_wide_q4_1, gemm_wide_q8_0,  \
                  gemm_wide_q5_0, gemm_wide_q5_1, gemm_wide_q2_k, gemm_wide_q3_k, gemm_wide_q4_k, gemm_wide_q5_k, gemm_wide_q6_k}
