/* Matmul on 4- and 8-bit weights for the AVX-512 ISAs. The including file first defines how a register of 16 rows x 4 columns is
 * multiplied: the accumulator starts at dot_start, takes dot_step per line and ends as int32 in dot_end.
 *
 *   dot_start(type, offset)     offset: what to add to the sum because weights are stored unsigned, int32 [16]
 *   dot_step(type, sum, w, x)   w: unsigned bytes of one line, x: the same 4 activations 16 times
 *   dot_end(type, sum, offset)  int32 [16], the sum with the offset in it
 *   TILE_TOKENS                 the most tokens, up to 6, that a tile of two panels holds in registers */
#include <immintrin.h>
#include <string.h>

#define INLINE static inline __attribute__((always_inline))
#define UNROLL _Pragma("GCC unroll 8")

INLINE __m512i broadcast4(const int8_t *p)
{
    int32_t four;
    memcpy(&four, p, 4);
    return _mm512_set1_epi32(four);
}

/* P panels x T tokens in registers: per block of 32 columns every line is loaded and unpacked once, then the float step follows.
 * ahead: weights that come next, n_ahead lines of them to ask for in every block. */
INLINE void block_tile(const int type, const int P, const int T, float *restrict out, const pkv_weight *restrict w,
                       const pkv_act *restrict x, int64_t panel, int64_t token, int64_t out_stride, int add, const uint8_t *ahead,
                       int64_t n_ahead)
{
    const int nibbles = type != PKV_W_Q8_0, n_lines = nibbles ? 4 : 8, scale_bytes = type == PKV_W_Q4_1 ? 64 : 32;
    const uint8_t *data = w->data + panel * w->panel_bytes, *scales = w->scales + panel * w->scale_bytes;
    const int8_t *q = x->q + token * x->q_stride;
    const float *x_scale = x->scale + token * x->b_stride, *x_sum = x->sum + token * x->b_stride;
    const int32_t *x_isum = x->isum + token * x->b_stride;
    const __m512i low = _mm512_set1_epi8(15);
    __m512 acc[2][6];
    UNROLL for (int p = 0; p < P; p++)
        UNROLL for (int t = 0; t < T; t++)
            acc[p][t] = _mm512_setzero_ps();

    for (int64_t b = 0; b < w->n_cols / 32; b++, data += 64 * n_lines, scales += scale_bytes, q += 32) {
        __m512i sum[2][6], offset[6];
        UNROLL for (int t = 0; t < T; t++) {
            offset[t] = type == PKV_W_Q4_1 ? _mm512_setzero_si512()
                                           : _mm512_set1_epi32(x_isum[t * x->b_stride + b] * (nibbles ? -8 : -128));
            UNROLL for (int p = 0; p < P; p++)
                sum[p][t] = dot_start(type, offset[t]);
        }
        UNROLL for (int j = 0; j < n_lines; j++) {
            __m512i line[2], high[2];
            UNROLL for (int p = 0; p < P; p++) {
                line[p] = _mm512_load_si512(data + p * w->panel_bytes + 64 * j);
                if (nibbles) {
                    high[p] = _mm512_and_si512(_mm512_srli_epi16(line[p], 4), low);
                    line[p] = _mm512_and_si512(line[p], low);
                }
            }
            UNROLL for (int t = 0; t < T; t++) {
                __m512i four = broadcast4(q + t * x->q_stride + 4 * j);
                UNROLL for (int p = 0; p < P; p++)
                    sum[p][t] = dot_step(type, sum[p][t], line[p], four);
                if (nibbles) {
                    four = broadcast4(q + t * x->q_stride + 16 + 4 * j);
                    UNROLL for (int p = 0; p < P; p++)
                        sum[p][t] = dot_step(type, sum[p][t], high[p], four);
                }
            }
        }
        for (int64_t i = 0; i < n_ahead; i++, ahead += 64)
            pkv_prefetch(ahead, 64);
        UNROLL for (int p = 0; p < P; p++) {
            const uint8_t *at = scales + p * w->scale_bytes;
            __m512 scale = _mm512_cvtph_ps(_mm256_load_si256((const __m256i *)at)), min = scale;
            if (n_ahead)
                pkv_prefetch(at + P * w->scale_bytes, 64);
            if (type == PKV_W_Q4_1)
                min = _mm512_cvtph_ps(_mm256_load_si256((const __m256i *)(at + 32)));
            UNROLL for (int t = 0; t < T; t++) {
                __m512 both = _mm512_mul_ps(scale, _mm512_set1_ps(x_scale[t * x->b_stride + b]));
                acc[p][t] = _mm512_fmadd_ps(both, _mm512_cvtepi32_ps(dot_end(type, sum[p][t], offset[t])), acc[p][t]);
                if (type == PKV_W_Q4_1)
                    acc[p][t] = _mm512_fmadd_ps(min, _mm512_set1_ps(x_sum[t * x->b_stride + b]), acc[p][t]);
            }
        }
    }
    UNROLL for (int t = 0; t < T; t++)
        UNROLL for (int p = 0; p < P; p++) {
            float *o = out + t * out_stride + 16 * p;
            _mm512_storeu_ps(o, add ? _mm512_add_ps(_mm512_loadu_ps(o), acc[p][t]) : acc[p][t]);
        }
}

/* P panels for all tokens, in tiles of nearly equal size, while the next P are fetched if there are more. */
INLINE void block_panels(const int type, const int P, float *restrict out, const pkv_weight *restrict w, const pkv_act *restrict x,
                         int64_t panel, int64_t token0, int64_t n_tokens, int64_t out_stride, int add, int more)
{
    const int64_t n_tiles = (n_tokens + TILE_TOKENS - 1) / TILE_TOKENS, n_blocks = w->n_cols / 32;
    const int64_t n_ahead = more ? pkv_lines_ahead(w, P, n_tiles) : 0;
    const uint8_t *ahead = w->data + (panel + P) * w->panel_bytes, *end = ahead + P * w->panel_bytes;
    for (int64_t t = 0, n, tile = 0; tile < n_tiles; tile++, t += n, ahead += 64 * n_ahead * n_blocks) {
        float *o = out + t * out_stride;
        int64_t lines = ahead < end ? n_ahead : 0;
        n = (n_tokens - t + n_tiles - tile - 1) / (n_tiles - tile);
        switch (n) {
        case 1: block_tile(type, P, 1, o, w, x, panel, token0 + t, out_stride, add, ahead, lines); break;
        case 2: block_tile(type, P, 2, o, w, x, panel, token0 + t, out_stride, add, ahead, lines); break;
        case 3: block_tile(type, P, 3, o, w, x, panel, token0 + t, out_stride, add, ahead, lines); break;
        case 4: block_tile(type, P, 4, o, w, x, panel, token0 + t, out_stride, add, ahead, lines); break;
        case 5: block_tile(type, P, 5, o, w, x, panel, token0 + t, out_stride, add, ahead, lines); break;
        case 6: block_tile(type, P, 6, o, w, x, panel, token0 + t, out_stride, add, ahead, lines); break;
        }
    }
}

/* Pairs of panels */
INLINE void gemm_blocks(const int type, float *restrict out, const pkv_weight *restrict w, const pkv_act *restrict x, int64_t panel0,
                        int64_t n_panels, int64_t token0, int64_t n_tokens, int64_t out_stride, int add, int64_t n_next)
{
    int64_t p = 0;
    for (; p + 2 <= n_panels; p += 2)
        block_panels(type, 2, out + 16 * p, w, x, panel0 + p, token0, n_tokens, out_stride, add, p + 2 < n_panels + n_next);
    if (p < n_panels)
        block_panels(type, 1, out + 16 * p, w, x, panel0 + p, token0, n_tokens, out_stride, add, n_next > 0);
}

#define GEMM_BLOCKS(name, type)                                                                                                    \
    static void name(float *restrict out, const pkv_weight *restrict w, const pkv_act *restrict x, int64_t panel0,                 \
                     int64_t n_panels, int64_t token0, int64_t n_tokens, int64_t out_stride, int add, int64_t n_next)              \
    {                                                                                                                              \
        gemm_blocks(type, out, w, x, panel0, n_panels, token0, n_tokens, out_stride, add, n_next);                                 \
    }
GEMM_BLOCKS(gemm_q4_0, PKV_W_Q4_0)
GEMM_BLOCKS(gemm_q4_1, PKV_W_Q4_1)
GEMM_BLOCKS(gemm_q8_0, PKV_W_Q8_0)
