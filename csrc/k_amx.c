/* AMX int8: the VNNI kernels with matmul on quantised weights by tiles of 16 tokens x 16 rows x 32 columns. The integer products of
 * a block are exact however they are summed; the float step per block is the specification's.
 *
 * Tile state lives inside one call: configured at its start, released at its end. Permission to use tiles is asked for in cpu.c,
 * once per process. */
#if !defined(__AVX512VNNI__) || !defined(__AVX512BW__)
#error "k_amx.c needs -mavx512f -mavx512bw -mavx512dq -mavx512vl -mavx512vnni"
#endif
#ifdef __clang__
#pragma clang attribute push(__attribute__((target("amx-tile,amx-int8"))), apply_to = function)
#endif
#include "amx_tiles.h"
#include "avx512.h"

#include <immintrin.h>
#include <string.h>

#define INLINE static inline __attribute__((always_inline))
#define UNROLL _Pragma("GCC unroll 16")

enum {
    CHUNK = 8,          /* blocks of 32 columns unpacked at a time */
    PANELS = 4,         /* panels that share packed activations */
    TILES = 4,          /* tiles of 16 tokens that share unpacked weights */
    FEW_TOKENS = 12,    /* below this VNNI is faster than a tile with empty rows */
};

/* What one call works on: fits the first-level cache. */
typedef struct workspace {
    _Alignas(64) int8_t b[PANELS][CHUNK][8 * 64];
    int8_t a[CHUNK][16 * 32];
    float scale[CHUNK][16], sum[CHUNK][16]; /* of the activations in a */
    int32_t c[2][16 * 16];
    float acc[TILES][PANELS][16][16];
} workspace;

/* Types without tiles, and too few tokens for them */
static void gemm_vnni(float *restrict out, const pkv_weight *restrict w, const pkv_act *restrict x, int64_t panel0, int64_t n_panels,
                      int64_t token0, int64_t n_tokens, int64_t out_stride, int add, int64_t n_next)
{
    pkv_kernels_vnni.gemm[w->type](out, w, x, panel0, n_panels, token0, n_tokens, out_stride, add, n_next);
}

static void gemm_wide_vnni(float *restrict out, const pkv_weight *restrict w, const pkv_act *restrict x, int64_t panel0,
                           int64_t n_panels, int64_t token0, int64_t n_tokens, int64_t out_stride, int add, int64_t n_next)
{
    pkv_kernels_vnni.gemm_wide[w->type](out, w, x, panel0, n_panels, token0, n_tokens, out_stride, add, n_next);
}

/* Blocks [block, block + n) of a panel as signed bytes, 8 lines of 4 columns each, while as many lines from `next` on are fetched */
INLINE void unpack_weights(int8_t (*b)[8 * 64], const pkv_weight *w, int64_t panel, int64_t block, int64_t n, const uint8_t *next,
                           int32_t type)
{
    const int n_lines = type == PKV_W_Q8_0 ? 8 : 4;
    const uint8_t *line = w->data + panel * w->panel_bytes + block * n_lines * 64;
    const __m512i nibble = _mm512_set1_epi8(15), eight = _mm512_set1_epi8(8), sign = _mm512_set1_epi8(-128);
    for (int64_t i = 0; i < n; i++)
        for (int j = 0; j < n_lines; j++, line += 64, next += 64) {
            __m512i v = _mm512_load_si512(line), high;
            pkv_prefetch(next, 64);
            if (type == PKV_W_Q8_0) {
                _mm512_store_si512(b[i] + 64 * j, _mm512_xor_si512(v, sign));
                continue;
            }
            high = _mm512_and_si512(_mm512_srli_epi16(v, 4), nibble);
            v = _mm512_and_si512(v, nibble);
            _mm512_store_si512(b[i] + 64 * j, type == PKV_W_Q4_0 ? _mm512_sub_epi8(v, eight) : v);
            _mm512_store_si512(b[i] + 64 * (4 + j), type == PKV_W_Q4_0 ? _mm512_sub_epi8(high, eight) : high);
        }
}

/* Blocks [block, block + n) of n_t <= 16 tokens; the rows of missing tokens become zeros. */
INLINE void pack_activations(workspace *s, const pkv_act *x, int64_t token, int64_t n_t, int64_t block, int64_t n)
{
    for (int64_t t = 0; t < 16; t++)
        for (int64_t i = 0; i < n; i++) {
            int64_t at = (token + t) * x->b_stride + block + i;
            int8_t *a = s->a[i] + 32 * t;
            if (t < n_t)
                memcpy(a, x->q + (token + t) * x->q_stride + 32 * (block + i), 32);
            else
                memset(a, 0, 32);
            s->scale[i][t] = t < n_t ? x->scale[at] : 0.0f;
            s->sum[i][t] = t < n_t ? x->sum[at] : 0.0f;
        }
}

/* acc[t][r] of one tile of tokens and one panel, advanced by n blocks in ascending order */
INLINE void block_tile(workspace *s, float (*acc)[16], int8_t (*b)[8 * 64], const uint8_t *scales, int64_t n, int32_t type)
{
    __m512 sum[16];
    UNROLL for (int t = 0; t < 16; t++)
        sum[t] = _mm512_load_ps(acc[t]);
    tiles_multiply(0, s->c[0], s->a[0], b[0]);
    for (int64_t i = 0; i < n; i++, scales += type == PKV_W_Q4_1 ? 64 : 32) {
        const int32_t *c = s->c[i % 2];
        __m512 scale = _mm512_cvtph_ps(_mm256_load_si256((const __m256i *)scales)), min = scale;
        if (i + 1 < n) {
            if (i % 2)
                tiles_multiply(0, s->c[0], s->a[i + 1], b[i + 1]);
            else
                tiles_multiply(1, s->c[1], s->a[i + 1], b[i + 1]);
        }
        if (type == PKV_W_Q4_1)
            min = _mm512_cvtph_ps(_mm256_load_si256((const __m256i *)(scales + 32)));
        UNROLL for (int t = 0; t < 16; t++) {
            __m512 both = _mm512_mul_ps(scale, _mm512_set1_ps(s->scale[i][t]));
            sum[t] = _mm512_fmadd_ps(both, _mm512_cvtepi32_ps(_mm512_load_si512(c + 16 * t)), sum[t]);
            if (type == PKV_W_Q4_1)
                sum[t] = _mm512_fmadd_ps(min, _mm512_set1_ps(s->sum[i][t]), sum[t]);
        }
    }
    UNROLL for (int t = 0; t < 16; t++)
        _mm512_store_ps(acc[t], sum[t]);
}

/* Up to PANELS panels x TILES tiles of tokens, while weights are fetched: the next chunk of a panel or, if there are more, its successor */
INLINE void group_tile(workspace *s, float *out, const pkv_weight *w, const pkv_act *x, int64_t panel, int64_t n_p, int64_t token,
                       int64_t n_t, int64_t out_stride, int add, int more, int32_t type)
{
    const int64_t n_blocks = w->n_cols / 32, scale_bytes = type == PKV_W_Q4_1 ? 64 : 32, block_bytes = w->panel_bytes / n_blocks;
    memset(s->acc, 0, sizeof s->acc);
    for (int64_t block = 0; block < n_blocks; block += CHUNK) {
        int64_t n = n_blocks - block < CHUNK ? n_blocks - block : CHUNK;
        for (int64_t p = 0; p < n_p; p++) {
            const uint8_t *data = w->data + (panel + p) * w->panel_bytes;
            unpack_weights(s->b[p], w, panel + p, block, n,
                           block + n < n_blocks ? data + (block + n) * block_bytes : more ? data + n_p * w->panel_bytes : data, type);
        }
        for (int64_t t = 0; t < n_t; t += 16) {
            pack_activations(s, x, token + t, n_t - t < 16 ? n_t - t : 16, block, n);
            for (int64_t p = 0; p < n_p; p++)
                block_tile(s, s->acc[t / 16][p], s->b[p], w->scales + (panel + p) * w->scale_bytes + block * scale_bytes, n, type);
        }
    }
    for (int64_t t = 0; t < n_t; t++)
        for (int64_t p = 0; p < n_p; p++) {
            float *o = out + t * out_stride + 16 * p;
            __m512 sum = _mm512_load_ps(s->acc[t / 16][p][t % 16]);
            _mm512_storeu_ps(o, add ? _mm512_add_ps(_mm512_loadu_ps(o), sum) : sum);
        }
}

/* Whole tiles, and a last one that is nearly full; the tokens left over go to VNNI. */
INLINE void gemm_blocks(float *out, const pkv_weight *w, const pkv_act *x, int64_t panel0, int64_t n_panels, int64_t token0,
                        int64_t n_tokens, int64_t out_stride, int add, int64_t n_next, int32_t type)
{
    const int64_t n_tiled = n_tokens % 16 < FEW_TOKENS ? n_tokens - n_tokens % 16 : n_tokens, n_left = n_tokens - n_tiled;
    workspace s;
    if (n_tiled) {
        tiles_configure();
        for (int64_t p = 0; p < n_panels; p += PANELS)
            for (int64_t t = 0; t < n_tiled; t += 16 * TILES)
                group_tile(&s, out + t * out_stride + 16 * p, w, x, panel0 + p, n_panels - p < PANELS ? n_panels - p : PANELS,
                           token0 + t, n_tiled - t < 16 * TILES ? n_tiled - t : 16 * TILES, out_stride, add,
                           t + 16 * TILES >= n_tiled && p + PANELS < n_panels + (n_left ? 0 : n_next), type);
        tiles_release();
    }
    if (n_left)
        gemm_vnni(out + n_tiled * out_stride, w, x, panel0, n_panels, token0 + n_tiled, n_left, out_stride, add, n_next);
}

#define GEMM(name, type)                                                                                                            \
    static void gemm_##name(float *restrict out, const pkv_weight *restrict w, const pkv_act *restrict x, int64_t panel0,           \
                            int64_t n_panels, int64_t token0, int64_t n_tokens, int64_t out_stride, int add, int64_t n_next)        \
    {                                                                                                                               \
        gemm_blocks(out, w, x, panel0, n_panels, token0, n_tokens, out_stride, add, n_next, type);                                  \
    }
GEMM(q4_0, PKV_W_Q4_0)
GEMM(q4_1, PKV_W_Q4_1)
GEMM(q8_0, PKV_W_Q8_0)

const pkv_kernels pkv_kernels_amx = {
    .name = "amx",
    .gemm = {gemm_vnni, gemm_vnni, gemm_vnni, gemm_q4_0, gemm_q4_1, gemm_q8_0, gemm_vnni, gemm_vnni, gemm_vnni, gemm_vnni, gemm_vnni,
             gemm_vnni, gemm_vnni},
    .gemm_wide = {gemm_wide_vnni, gemm_wide_vnni, gemm_wide_vnni, gemm_wide_vnni, gemm_wide_vnni, gemm_wide_vnni, gemm_wide_vnni,
                  gemm_wide_vnni, gemm_wide_vnni, gemm_wide_vnni, gemm_wide_vnni, gemm_wide_vnni, gemm_wide_vnni},
    PKV_AVX512_AFTER_GEMM,
};

#ifdef __clang__
#pragma clang attribute pop
#endif
