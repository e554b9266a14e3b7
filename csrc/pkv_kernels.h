/* The kernel list: one prototype per operation; every ISA file implements the same list in the same order.
 *
 * k_scalar.c is the specification: each kernel there defines the bits, every other ISA is compared with it by memcmp.
 * Kernels cannot fail, allocate nothing, and keep no state. Arguments come in the order outputs, inputs, sizes, strides;
 * strides count elements. Shapes stand behind each pointer. "lane" is one of 16 virtual lanes: element i belongs to lane i % 16.
 *
 * NaN payloads and NaN signs are not part of the specification; whether a value is NaN is.
 */
#ifndef PKV_KERNELS_H
#define PKV_KERNELS_H

#include <stddef.h>
#include <stdint.h>

#ifdef __FAST_MATH__
#error "pagedkv defines its results bit by bit and cannot be built with -ffast-math"
#endif

enum {
    PKV_PANEL = 16,      /* output rows of one packed weight panel */
    PKV_BLOCK = 32,      /* values sharing one activation scale */
    PKV_SPLIT = 256,     /* tokens of one attention split, anchored at position 0 */
};

/* Weight types that can be packed; the order is the index into pkv_kernels.gemm. */
typedef enum pkv_wtype {
    PKV_W_F32,
    PKV_W_F16,
    PKV_W_BF16,
    PKV_W_Q4_0,
    PKV_W_Q4_1,
    PKV_W_Q8_0,
    PKV_W_Q5_0,
    PKV_W_Q5_1,
    PKV_W_Q2_K,
    PKV_W_Q3_K,
    PKV_W_Q4_K,
    PKV_W_Q5_K,
    PKV_W_Q6_K,
    PKV_N_WTYPES
} pkv_wtype;

/* KV page formats; the order is the index into kv_write, kv_read, qk and pv. */
typedef enum pkv_kvformat { PKV_KV_F32, PKV_KV_F16, PKV_KV_INT8, PKV_N_KVFORMATS } pkv_kvformat;

/* A weight matrix [n_rows, n_cols] packed into panels of 16 rows, rows padded with zeros to whole panels.
 *
 * data, float types: [n_panels][n_cols][16]. Other types: [n_panels][n_cols/32] blocks of these parts, in this order:
 *   nibbles  [4][16][4]  byte i of row r in line j: low nibble column 4j+i, high nibble column 16+4j+i (of the block)
 *   pairs    [2][16][4]  byte i of row r in line h: bits 2c and 2c+1 belong to column 16h+4c+i, c in [0, 4)
 *   bits     [8][16][4]  bit i of row r in the 64-bit word g belongs to column 4g+i (8 bytes a word, bit 4r+i)
 *   bytes    [8][16][4]  byte i of row r in line g: column 4g+i, the file's int8 + 128
 *
 *   Q4_0 Q4_1 Q4_K  nibbles           value = nibble
 *   Q5_0 Q5_1 Q5_K  nibbles, bits     value = nibble + 16 * bit
 *   Q6_K            nibbles, pairs    value = nibble + 16 * pair
 *   Q2_K            pairs             value = pair
 *   Q3_K            pairs, bits       value = pair + 4 * bit
 *   Q8_0            bytes             value = byte
 * The integer weight is value - bias: 8 for Q4_0, 16 for Q5_0, 128 for Q8_0, 4 for Q3_K, 32 for Q6_K, else 0.
 *
 * scales: f16 is half precision, d a scale, m a minimum.
 *   Q4_0 Q5_0 Q8_0  [n_panels][n_cols/32]   f16 d[16]
 *   Q4_1 Q5_1       [n_panels][n_cols/32]   f16 d[16], f16 m[16]
 *   Q4_K Q5_K       [n_panels][n_cols/256]  f16 d[16], f16 m[16], uint8 sc[8][16], uint8 mn[8][16]; of block b: scale d*sc[b],
 *                                           minimum -(m*mn[b]), both exact in float32
 *   Q3_K Q6_K       [n_panels][n_cols/256]  f16 d[16], int8 sc[16][16], one sc per 16 columns
 *   Q2_K            [n_panels][n_cols/256]  f16 d[16], f16 m[16], uint8 sm[16][16], per 16 columns: sc low nibble, mn high nibble */
typedef struct pkv_weight {
    const uint8_t *data;     /* 64-byte aligned */
    const uint8_t *scales;   /* 64-byte aligned, NULL for float types */
    int64_t panel_bytes;     /* bytes of data per panel, a multiple of 64 for quantised types */
    int64_t scale_bytes;     /* bytes of scales per panel */
    int64_t n_rows, n_cols, n_panels;
    int32_t type;            /* pkv_wtype */
    int32_t reserved;
} pkv_weight;

/* Activations of n_tokens rows. Float weights read x, quantised weights the rest, in one of two formats:
 *   int8   q in [-127, 127], one scale per 32 columns
 *   int12  16*q + low in [-2039, 2039], one scale per 256 columns, the last group of a row possibly shorter */
typedef struct pkv_act {
    const float *x;          /* [n_tokens, n_cols] */
    int8_t *q;               /* [n_tokens, n_cols] in [-127, 127]; int12: the high digit */
    int8_t *low;             /* [n_tokens, n_cols] int12 only: the low digit, in [-8, 7] */
    float *scale;            /* [n_tokens, n_cols/32]; int12: the first n_cols/256 (rounded up) of a row */
    float *sum;              /* [n_tokens, n_cols/32] scale * (float)isum; int12: not used */
    int32_t *isum;           /* [n_tokens, n_cols/32] sum of the integers of a block */
    int32_t *half;           /* [n_tokens, n_cols/32] sum of the first 16 integers of a block */
    int64_t x_stride;        /* elements between rows of x */
    int64_t q_stride;        /* elements between rows of q and of low, a multiple of 64 */
    int64_t b_stride;        /* elements between rows of scale, sum, isum and half */
} pkv_act;

/* One KV tile: K and V of one layer and KV head for page_tokens tokens (a multiple of 16) inside a page.
 *   K  [head_dim][page_tokens]            element type of the format
 *   V  [page_tokens][head_dim16]          head_dim16: head_dim rounded up to 16, the padding zero
 *   int8 only: k_scale [page_tokens], v_scale [page_tokens] float32
 * Each part starts on a 64-byte boundary. */
static inline int64_t pkv_round_up(int64_t n, int64_t to) { return (n + to - 1) / to * to; }
/* Ask for memory that will be read soon; any address is harmless. */
static inline void pkv_prefetch(const void *p, int64_t n_bytes)
{
    for (int64_t i = 0; i < n_bytes; i += 64)
        __builtin_prefetch((const char *)p + i, 0, 2);
}
/* Of the next n_panels panels: lines of 64 bytes to ask for in each block of 32 columns of each of n_passes passes over the panels before, so
 * that all are asked for once, or nearly. Passes over the same memory hide from the hardware that other memory follows, and a burst of
 * requests between them would hold them up. */
static inline int64_t pkv_lines_ahead(const pkv_weight *w, int64_t n_panels, int64_t n_passes)
{
    const int64_t n_places = n_passes * (w->n_cols / 32);
    return (n_panels * w->panel_bytes / 64 + n_places - 1) / n_places;
}
static inline int64_t pkv_kv_element_bytes(int32_t format) { return format == PKV_KV_F32 ? 4 : format == PKV_KV_F16 ? 2 : 1; }
static inline int64_t pkv_tile_v(int32_t format, int64_t head_dim, int64_t page_tokens)
{
    return pkv_round_up(head_dim * page_tokens * pkv_kv_element_bytes(format), 64);
}
static inline int64_t pkv_tile_scales(int32_t format, int64_t head_dim, int64_t page_tokens)
{
    return pkv_tile_v(format, head_dim, page_tokens)
           + pkv_round_up(pkv_round_up(head_dim, 16) * page_tokens * pkv_kv_element_bytes(format), 64);
}
static inline int64_t pkv_tile_bytes(int32_t format, int64_t head_dim, int64_t page_tokens)
{
    return pkv_tile_scales(format, head_dim, page_tokens)
           + (format == PKV_KV_INT8 ? pkv_round_up(2 * page_tokens * 4, 64) : 0);
}

/* out[t][16*p + r] = sum over columns of weight row 16*(panel0+p)+r times activation row token0+t;
 * add != 0 adds the finished sum to what is there. n_next: panels behind these that the caller multiplies next by the same rows, which may be
 * fetched meanwhile; what nobody reads soon is better not fetched, since it takes memory's time. */
typedef void pkv_gemm_fn(float *restrict out,             /* [n_tokens, 16*n_panels] */
                         const pkv_weight *restrict w, const pkv_act *restrict x,
                         int64_t panel0, int64_t n_panels, int64_t token0, int64_t n_tokens,
                         int64_t out_stride, int add, int64_t n_next);

/* Store one token's K and V into slot of a tile. */
typedef void pkv_kv_write_fn(uint8_t *restrict tile,
                             const float *restrict k,     /* [head_dim] */
                             const float *restrict v,     /* [head_dim] */
                             int64_t slot, int64_t head_dim, int64_t page_tokens);

/* Read slots [slot0, slot0 + n) of a tile back as float32. */
typedef void pkv_kv_read_fn(float *restrict k,            /* [n, head_dim] */
                            float *restrict v,            /* [n, head_dim] */
                            const uint8_t *restrict tile,
                            int64_t slot0, int64_t n, int64_t head_dim, int64_t page_tokens, int64_t out_stride);

/* s[j][page_tokens*i + c] = scale * (q[j] . K[:, c] of tile i); slots never written give values to be masked.
 * ahead, here and in pv: NULL, or as many tiles as there are in tiles, which the caller reads next: they may be prefetched meanwhile. */
typedef void pkv_qk_fn(float *restrict s,                 /* [n_q, n_tiles*page_tokens] */
                       const float *restrict q,           /* [n_q, head_dim] */
                       const uint8_t *const *restrict tiles, /* [n_tiles] */
                       const uint8_t *const *restrict ahead,
                       int64_t n_q, int64_t n_tiles, int64_t head_dim, int64_t page_tokens,
                       int64_t s_stride, int64_t q_stride, float scale);

/* o[j][d] = fma chain over tokens [start, stop) in ascending order of p[j][t] * V[t][d], t counted from the first slot of tiles[0]. */
typedef void pkv_pv_fn(float *restrict o,                 /* [n_q, head_dim16], accumulated into */
                       const float *restrict p,           /* [n_q, >= stop] */
                       const uint8_t *const *restrict tiles,
                       const uint8_t *const *restrict ahead,
                       int64_t n_q, int64_t start, int64_t stop, int64_t head_dim, int64_t page_tokens,
                       int64_t o_stride, int64_t p_stride);

typedef struct pkv_kernels {
    const char *name;

    /* matmul */
    pkv_gemm_fn *gemm[PKV_N_WTYPES];          /* int8 activations; float types: float activations */
    pkv_gemm_fn *gemm_wide[PKV_N_WTYPES];     /* int12 activations; float types as in gemm */
    /* int8 quantisation of one row, n a multiple of 32: one scale per 32 values, see pkv_act */
    void (*quant_i8)(int8_t *restrict q, float *restrict scale, float *restrict sum, int32_t *restrict isum, int32_t *restrict half,
                     const float *restrict x, int64_t n);
    /* the same of block `block` of rows [token0, token0 + n_tokens) of a->x */
    void (*quant_column)(const pkv_act *restrict a, int64_t block, int64_t token0, int64_t n_tokens);

    /* int12 quantisation of one row, n a multiple of 32: one scale per 256 values */
    void (*quant_i12)(int8_t *restrict q, int8_t *restrict low, float *restrict scale, int32_t *restrict isum, int32_t *restrict half,
                      const float *restrict x, int64_t n);

    /* attention over page tiles */
    pkv_kv_write_fn *kv_write[PKV_N_KVFORMATS];
    pkv_kv_read_fn *kv_read[PKV_N_KVFORMATS];
    pkv_qk_fn *qk[PKV_N_KVFORMATS];
    pkv_pv_fn *pv[PKV_N_KVFORMATS];
    /* y[i] = exp((x[i] - m) * inv_t), returns the lane sum; y may be x. x[i] = -inf gives 0. n >= 1. */
    float (*softmax)(float *y, const float *x, int64_t n, float m, float inv_t);
    /* x[i] = cap * tanh(x[i] / cap) */
    void (*softcap)(float *x, int64_t n, float cap);
    /* merge a later split (o2, m2, l2) into a row (o, m, l); l2 > 0 */
    void (*merge)(float *restrict o, float *restrict m, float *restrict l,
                  const float *restrict o2, float m2, float l2, int64_t n);

    /* elementwise and reductions; any n >= 1 */
    void (*rmsnorm)(float *restrict y, const float *restrict x, const float *restrict w, int64_t n, float eps);
    void (*silu_mul)(float *restrict y, const float *restrict g, const float *restrict u, int64_t n); /* y = silu(g) * u */
    void (*gelu_mul)(float *restrict y, const float *restrict g, const float *restrict u, int64_t n); /* y = gelu(g) * u, tanh form */
    /* rotate pairs (x[i], x[i + half]) of one head: cs holds half cosines, then half sines */
    void (*rope)(float *restrict x, const float *restrict cs, int64_t half);
    void (*add)(float *restrict y, const float *restrict x, int64_t n);       /* y += x */
    void (*scale)(float *restrict y, int64_t n, float a);                     /* y *= a */
    float (*vmax)(const float *restrict x, int64_t n);                        /* NaN if any x is NaN; zero is +0 */
    int64_t (*argmax)(const float *restrict x, int64_t n);                    /* lowest index of the maximum, -1 if any x is NaN */
} pkv_kernels;

/* Same code on every machine, called outside the hot loops (k_scalar.c). */
void pkv_rope_angles(float *restrict cs, const double *restrict inv_freq, int64_t half, int64_t position, float attn_factor);
void pkv_weight_row(float *restrict y, const pkv_weight *restrict w, int64_t row); /* dequantise one row, [n_cols] */
double pkv_log(double x);   /* x > 0 and finite */
float pkv_exp(float x);     /* the exp of every kernel: 0 below -87, x clamped above at 88 */
uint16_t pkv_f32_to_f16(float x);
float pkv_f16_to_f32(uint16_t h);

pkv_gemm_fn pkv_gemm_blocks_scalar, pkv_gemm_wide_scalar; /* every block type, int8 and int12; what an ISA uses for a type it has no kernel of its own for */
void pkv_quant_i12_scalar(int8_t *restrict q, int8_t *restrict low, float *restrict scale, int32_t *restrict isum,
                          int32_t *restrict half, const float *restrict x, int64_t n);

/* dispatch.c: the ISAs of this build, best first, scalar last. */
typedef struct pkv_isa {
    const char *name;
    uint64_t required;          /* feature bits, cpu.h */
    const pkv_kernels *kernels;
} pkv_isa;
const pkv_isa *pkv_isa_table(int *n);

extern const pkv_kernels pkv_kernels_scalar, pkv_kernels_avx2, pkv_kernels_avx512, pkv_kernels_vnni, pkv_kernels_amx,
    pkv_kernels_neon;

#endif
