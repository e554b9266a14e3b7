/* Runs every kernel of every ISA this machine offers over fixed seeded cases and prints one line per pair:
 *     <isa> <kernel> <sha256 of all outputs>
 * Equal kernels print equal hashes on every ISA and machine. Arguments, if any, name the ISAs to run. With PKV_AMX_EMULATE the amx
 * kernels run their tile operations in plain C and need AVX-512 VNNI only.
 *
 * Every buffer ends at an inaccessible page, so a kernel that touches memory behind its arguments dies. Outputs are hashed with
 * the memory around them, so stray writes show. NaNs are hashed as one value. */
#define _GNU_SOURCE
#include "cpu.h"
#include "pkv_kernels.h"
#include "sha256.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <unistd.h>

/* ---- seeded values; one draw per expression, because C leaves the order of two open ---- */

static uint64_t state;

static uint64_t draw(void) /* splitmix64 */
{
    uint64_t z = state += 0x9e3779b97f4a7c15ull;
    z = (z ^ z >> 30) * 0xbf58476d1ce4e5b9ull;
    z = (z ^ z >> 27) * 0x94d049bb133111ebull;
    return z ^ z >> 31;
}

static int64_t below(int64_t n) { return (int64_t)(draw() >> 11) % n; }

enum style { PLAIN, WIDE, TINY, WILD, ZERO, N_STYLES };

/* PLAIN: [-4, 4); WIDE: 2^-40 to 2^40; TINY: subnormals and zeros of both signs; WILD: also infinities and NaN, rarely */
static float value(int style)
{
    float plain = (float)((int32_t)below(1 << 24) - (1 << 23)) * 0x1p-21f, special;
    int64_t dice = below(64);
    switch (style) {
    case WIDE: return ldexpf(plain, (int)below(80) - 41);
    case TINY: return dice < 8 ? 0.0f : dice < 16 ? -0.0f : ldexpf(plain, -130 - (int)below(20));
    case WILD:
        special = dice == 0 ? INFINITY : dice == 1 ? -INFINITY : NAN;
        return dice < 3 && below(4) == 0 ? special : dice == 3 ? ldexpf(plain, 120) : plain;
    case ZERO: return 0.0f;
    default: return plain;
    }
}

/* ---- buffers that end at a guard page; freed after each case ---- */

enum { MAX_BUFFERS = 64 };
static struct { void *start; size_t bytes; } buffers[MAX_BUFFERS];
static int n_buffers;

static void *buffer(int64_t bytes)
{
    size_t page = (size_t)sysconf(_SC_PAGESIZE), body = ((size_t)bytes + page - 1) / page * page;
    uint8_t *start = mmap(NULL, body + page, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (start == MAP_FAILED || n_buffers == MAX_BUFFERS || mprotect(start + body, page, PROT_NONE)) {
        fprintf(stderr, "kernel_hashes: no memory for a buffer of %lld bytes\n", (long long)bytes);
        exit(2);
    }
    buffers[n_buffers].start = start;
    buffers[n_buffers++].bytes = body + page;
    memset(start, 0xa5, body);
    return start + body - bytes;
}

static void release(void)
{
    while (n_buffers)
        n_buffers--, munmap(buffers[n_buffers].start, buffers[n_buffers].bytes);
}

static float *floats(int64_t n, int style)
{
    float *p = buffer(4 * n);
    for (int64_t i = 0; i < n; i++)
        p[i] = value(style);
    return p;
}

/* ---- hashing ---- */

static void hash_floats(sha256 *s, const float *p, int64_t n)
{
    for (int64_t i = 0; i < n; i++) {
        uint32_t bits = 0x7fc00000u;
        if (p[i] == p[i])
            memcpy(&bits, p + i, 4);
        sha256_update(s, &bits, 4);
    }
}

static void hash_halves(sha256 *s, const uint16_t *p, int64_t n)
{
    for (int64_t i = 0; i < n; i++) {
        uint16_t bits = (p[i] & 0x7fffu) > 0x7c00u ? 0x7e00u : p[i];
        sha256_update(s, &bits, 2);
    }
}

/* ---- matmul ---- */

/* columns of a block, its bytes of data and of scales per panel, half precision numbers among those */
static const struct { int32_t block, data_bytes, scale_bytes, halves; } weights[PKV_N_WTYPES] = {
    [PKV_W_F32] = {1, 64, 0, 0},         [PKV_W_F16] = {1, 32, 0, 0},         [PKV_W_BF16] = {1, 32, 0, 0},
    [PKV_W_Q4_0] = {32, 256, 32, 16},    [PKV_W_Q4_1] = {32, 256, 64, 32},    [PKV_W_Q8_0] = {32, 512, 32, 16},
    [PKV_W_Q5_0] = {32, 320, 32, 16},    [PKV_W_Q5_1] = {32, 320, 64, 32},    [PKV_W_Q2_K] = {256, 1024, 320, 32},
    [PKV_W_Q3_K] = {256, 1536, 288, 16}, [PKV_W_Q4_K] = {256, 2048, 320, 32}, [PKV_W_Q5_K] = {256, 2560, 320, 32},
    [PKV_W_Q6_K] = {256, 3072, 288, 16},
};

static uint16_t half(int style) { return style == WILD ? (uint16_t)draw() : pkv_f32_to_f16(value(style) * 0x1p-6f); }

static pkv_weight make_weight(int type, int64_t n_cols, int64_t n_panels, int style, int fill)
{
    pkv_weight w = {.n_rows = 16 * n_panels, .n_cols = n_cols, .n_panels = n_panels, .type = type};
    int64_t n_blocks = n_cols / weights[type].block;
    w.panel_bytes = weights[type].data_bytes * n_blocks;
    w.scale_bytes = weights[type].scale_bytes * n_blocks;
    uint8_t *data = buffer(pkv_round_up(n_panels * w.panel_bytes, 64));
    for (int64_t i = 0; i < n_panels * w.panel_bytes; i++)
        data[i] = fill >= 0 ? (uint8_t)fill : (uint8_t)draw();
    for (int64_t i = 0; i < n_panels * n_cols * 16; i++) {
        float x = value(style);
        uint32_t bits;
        memcpy(&bits, &x, 4);
        if (type == PKV_W_F32)
            ((float *)data)[i] = x;
        else if (type == PKV_W_F16)
            ((uint16_t *)data)[i] = half(style);
        else if (type == PKV_W_BF16)
            ((uint16_t *)data)[i] = (uint16_t)(bits >> 16);
    }
    w.data = data;
    if (w.scale_bytes) {
        uint8_t *scales = buffer(pkv_round_up(n_panels * w.scale_bytes, 64));
        w.scales = scales;
        for (int64_t i = 0; i < n_panels * n_blocks; i++, scales += weights[type].scale_bytes) {
            for (int64_t j = 0; j < weights[type].halves; j++)
                ((uint16_t *)scales)[j] = half(style);
            for (int64_t j = 2 * weights[type].halves; j < weights[type].scale_bytes; j++)
                scales[j] = (uint8_t)draw() & (type == PKV_W_Q4_K || type == PKV_W_Q5_K ? 63 : 255);
        }
    }
    return w;
}

static pkv_act make_act(int64_t n_cols, int64_t n_tokens, int style, int fill)
{
    int64_t n_blocks = n_cols / 32;
    pkv_act a = {.q_stride = pkv_round_up(n_cols, 64)};
    a.x_stride = n_cols + below(5);
    a.b_stride = n_blocks + below(3);
    a.x = floats((n_tokens - 1) * a.x_stride + n_cols, style);
    a.q = buffer(n_tokens * a.q_stride);
    a.scale = floats(n_tokens * a.b_stride, style);
    a.sum = floats(n_tokens * a.b_stride, ZERO);
    a.isum = buffer(4 * n_tokens * a.b_stride);
    a.half = buffer(4 * n_tokens * a.b_stride);
    a.low = buffer(n_tokens * a.q_stride);
    for (int64_t t = 0; t < n_tokens; t++)
        for (int64_t b = 0; b < n_blocks; b++) {
            int8_t *q = a.q + t * a.q_stride + 32 * b;
            int64_t at = t * a.b_stride + b;
            a.isum[at] = a.half[at] = 0;
            for (int k = 0; k < 32; k++) {
                q[k] = fill ? (int8_t)(fill == 1 ? 127 : -127) : (int8_t)(below(255) - 127);
                a.isum[at] += q[k];
                a.half[at] += k < 16 ? q[k] : 0;
            }
            a.sum[at] = a.scale[at] * (float)a.isum[at];
        }
    return a;
}

static void run_gemm(const pkv_kernels *k, int type, sha256 *s)
{
    static const int64_t widths[] = {32, 64, 96, 160, 288};
    for (int c = 0; c < 40; c++, release()) {
        int style = c < 8 ? PLAIN : c % N_STYLES, fill = c < 6 ? (c & 1 ? 0xff : 0) : -1, q_fill = c < 6 ? c % 3 : 0;
        int64_t n_cols = weights[type].block == 256 ? 256 * (1 + c % 2) : widths[c % 5] + (weights[type].block == 1 ? below(19) : 0);
        int64_t n_panels = 1 + c % 6, total = n_panels + below(2), panel0 = total - n_panels;
        int64_t n_tokens = c >= 38 ? 4 * c - 73 : 1 + c % 18, token0 = below(3), out_stride = 16 * n_panels + below(4);
        pkv_weight w = make_weight(type, n_cols, total, style, fill);
        pkv_act a = make_act(n_cols, token0 + n_tokens, style, q_fill);
        float *out = floats(n_tokens * out_stride, style);
        k->gemm[type](out, &w, &a, panel0, n_panels, token0, n_tokens, out_stride, c % 3 == 2, c % 4);
        hash_floats(s, out, n_tokens * out_stride);
    }
}

/* int12: a low digit beside each q, and the sums of both */
static void widen_act(pkv_act *a, int64_t n_cols, int64_t n_tokens)
{
    for (int64_t t = 0; t < n_tokens; t++)
        for (int64_t b = 0; b < n_cols / 32; b++) {
            int64_t at = t * a->b_stride + b;
            a->isum[at] = a->half[at] = 0;
            for (int k = 0; k < 32; k++) {
                int64_t i = t * a->q_stride + 32 * b + k;
                a->low[i] = (int8_t)(below(16) - 8);
                a->isum[at] += 16 * a->q[i] + a->low[i];
                a->half[at] += k < 16 ? 16 * a->q[i] + a->low[i] : 0;
            }
        }
}

/* the same cases on int12 activations */
static void run_gemm_wide(const pkv_kernels *k, int type, sha256 *s)
{
    static const int64_t widths[] = {32, 64, 96, 160, 288};
    for (int c = 0; c < 40; c++, release()) {
        int style = c < 8 ? PLAIN : c % N_STYLES, fill = c < 6 ? (c & 1 ? 0xff : 0) : -1, q_fill = c < 6 ? c % 3 : 0;
        int64_t n_cols = weights[type].block == 256 ? 256 * (1 + c % 2) : widths[c % 5] + (weights[type].block == 1 ? below(19) : 0);
        int64_t n_panels = 1 + c % 6, total = n_panels + below(2), panel0 = total - n_panels;
        int64_t n_tokens = c == 39 ? 37 : 1 + c % 18, token0 = below(3), out_stride = 16 * n_panels + below(4);
        pkv_weight w = make_weight(type, n_cols, total, style, fill);
        pkv_act a = make_act(n_cols, token0 + n_tokens, style, q_fill);
        widen_act(&a, n_cols, token0 + n_tokens);
        float *out = floats(n_tokens * out_stride, style);
        k->gemm_wide[type](out, &w, &a, panel0, n_panels, token0, n_tokens, out_stride, c % 3 == 2, c % 4);
        hash_floats(s, out, n_tokens * out_stride);
    }
}

static void run_quant_i8(const pkv_kernels *k, int variant, sha256 *s)
{
    (void)variant;
    for (int c = 0; c < 50; c++, release()) {
        int64_t n = 32 * (1 + c % 9), n_blocks = n / 32;
        float *x = floats(n, c % N_STYLES), *scale = floats(n_blocks, ZERO), *sum = floats(n_blocks, ZERO);
        int32_t *isum = buffer(4 * n_blocks), *half_sum = buffer(4 * n_blocks);
        int8_t *q = buffer(n);
        if (c % 7 == 3) /* exact ties between two integers */
            for (int64_t i = 0; i < n; i++)
                x[i] = i % 32 ? (float)below(254) * 0.5f - 63.5f : 127.0f;
        k->quant_i8(q, scale, sum, isum, half_sum, x, n);
        sha256_update(s, q, n);
        sha256_update(s, isum, 4 * n_blocks);
        sha256_update(s, half_sum, 4 * n_blocks);
        hash_floats(s, scale, n_blocks);
        hash_floats(s, sum, n_blocks);
    }
}

static void run_quant_column(const pkv_kernels *k, int variant, sha256 *s)
{
    (void)variant;
    for (int c = 0; c < 50; c++, release()) {
        int64_t n_blocks = 1 + c % 3, token0 = c % 4, n_tokens = 1 + c % 9, n = (token0 + n_tokens) * n_blocks;
        pkv_act a = {.x = floats(32 * n, c % N_STYLES), .x_stride = 32 * n_blocks, .q_stride = 32 * n_blocks, .b_stride = n_blocks};
        a.q = buffer(32 * n), a.isum = buffer(4 * n), a.half = buffer(4 * n);
        a.scale = floats(n, ZERO), a.sum = floats(n, ZERO);
        k->quant_column(&a, below(n_blocks), token0, n_tokens);
        sha256_update(s, a.q, 32 * n);
        sha256_update(s, a.isum, 4 * n);
        sha256_update(s, a.half, 4 * n);
        hash_floats(s, a.scale, n);
        hash_floats(s, a.sum, n);
    }
}

static void run_quant_i12(const pkv_kernels *k, int variant, sha256 *s)
{
    (void)variant;
    for (int c = 0; c < 50; c++, release()) {
        int64_t n = 32 * (1 + c % 19), n_blocks = n / 32, n_scales = (n + 255) / 256;
        float *x = floats(n, c % N_STYLES), *scale = floats(n_scales, ZERO);
        int32_t *isum = buffer(4 * n_blocks), *half_sum = buffer(4 * n_blocks);
        int8_t *q = buffer(n), *low = buffer(n);
        k->quant_i12(q, low, scale, isum, half_sum, x, n);
        sha256_update(s, q, n);
        sha256_update(s, low, n);
        sha256_update(s, isum, 4 * n_blocks);
        sha256_update(s, half_sum, 4 * n_blocks);
        hash_floats(s, scale, n_scales);
    }
}

/* ---- attention ---- */

typedef struct tile_shape { int64_t head_dim, page_tokens; } tile_shape;

static tile_shape shape_of(int c)
{
    static const int64_t head_dims[] = {64, 16, 80, 128, 24, 7}, pages[] = {16, 32, 48};
    return (tile_shape){head_dims[c % 6], pages[c % 3]};
}

static uint8_t *make_tile(int format, tile_shape t, int style)
{
    int64_t bytes = pkv_tile_bytes(format, t.head_dim, t.page_tokens), head_dim16 = pkv_round_up(t.head_dim, 16);
    uint8_t *tile = buffer(bytes), *v = tile + pkv_tile_v(format, t.head_dim, t.page_tokens);
    float *scales = (float *)(tile + pkv_tile_scales(format, t.head_dim, t.page_tokens));
    for (int64_t i = 0; i < head_dim16 * t.page_tokens; i++) {
        float a = value(style), b = value(style);
        int in_k = i < t.head_dim * t.page_tokens, in_v = i % head_dim16 < t.head_dim;
        if (format == PKV_KV_F32) {
            if (in_k)
                ((float *)tile)[i] = a;
            ((float *)v)[i] = in_v ? b : 0.0f;
        } else if (format == PKV_KV_F16) {
            if (in_k)
                ((uint16_t *)tile)[i] = pkv_f32_to_f16(a);
            ((uint16_t *)v)[i] = in_v ? pkv_f32_to_f16(b) : 0;
        } else {
            if (in_k)
                ((int8_t *)tile)[i] = (int8_t)(below(255) - 127);
            ((int8_t *)v)[i] = in_v ? (int8_t)(below(255) - 127) : 0;
        }
    }
    for (int64_t i = 0; format == PKV_KV_INT8 && i < 2 * t.page_tokens; i++)
        scales[i] = value(style);
    return tile;
}

static void hash_tile(sha256 *s, const uint8_t *tile, int format, tile_shape t)
{
    int64_t scales = pkv_tile_scales(format, t.head_dim, t.page_tokens), bytes = pkv_tile_bytes(format, t.head_dim, t.page_tokens);
    if (format == PKV_KV_F32)
        hash_floats(s, (const float *)tile, bytes / 4);
    else if (format == PKV_KV_F16)
        hash_halves(s, (const uint16_t *)tile, bytes / 2);
    else {
        sha256_update(s, tile, scales);
        hash_floats(s, (const float *)(tile + scales), (bytes - scales) / 4);
    }
}

static void run_kv_write(const pkv_kernels *k, int format, sha256 *s)
{
    for (int c = 0; c < 36; c++, release()) {
        tile_shape t = shape_of(c);
        uint8_t *tile = buffer(pkv_tile_bytes(format, t.head_dim, t.page_tokens));
        for (int i = 0; i < 5; i++) {
            float *kx = floats(t.head_dim, (c + i) % N_STYLES), *vx = floats(t.head_dim, c / 5 % N_STYLES);
            k->kv_write[format](tile, kx, vx, i ? below(t.page_tokens) : t.page_tokens - 1, t.head_dim, t.page_tokens);
        }
        hash_tile(s, tile, format, t);
    }
}

static void run_kv_read(const pkv_kernels *k, int format, sha256 *s)
{
    for (int c = 0; c < 24; c++, release()) {
        tile_shape t = shape_of(c);
        int64_t slot0 = below(t.page_tokens), n = t.page_tokens - slot0, stride = t.head_dim + below(9);
        uint8_t *tile = make_tile(format, t, c % N_STYLES);
        float *kx = floats((n - 1) * stride + t.head_dim, ZERO), *vx = floats((n - 1) * stride + t.head_dim, ZERO);
        k->kv_read[format](kx, vx, tile, slot0, n, t.head_dim, t.page_tokens, stride);
        hash_floats(s, kx, (n - 1) * stride + t.head_dim);
        hash_floats(s, vx, (n - 1) * stride + t.head_dim);
    }
}

static void run_qk(const pkv_kernels *k, int format, sha256 *s)
{
    for (int c = 0; c < 36; c++, release()) {
        tile_shape t = shape_of(c);
        int64_t n_q = 1 + c % 9, n_tiles = 1 + c % 8, q_stride = t.head_dim + below(5), n = n_tiles * t.page_tokens;
        const uint8_t *tiles[8];
        for (int64_t i = 0; i < n_tiles; i++)
            tiles[i] = make_tile(format, t, c % N_STYLES);
        float *q = floats((n_q - 1) * q_stride + t.head_dim, c / 2 % N_STYLES), *out = floats(n_q * (n + 3) - 3, PLAIN);
        k->qk[format](out, q, tiles, c % 2 ? tiles : NULL, n_q, n_tiles, t.head_dim, t.page_tokens, n + 3, q_stride, 0.125f + (float)c);
        hash_floats(s, out, n_q * (n + 3) - 3);
    }
}

static void run_pv(const pkv_kernels *k, int format, sha256 *s)
{
    for (int c = 0; c < 36; c++, release()) {
        tile_shape t = shape_of(c);
        int64_t n_q = 1 + c % 9, n_tiles = 1 + c % 8, head_dim16 = pkv_round_up(t.head_dim, 16), stride = head_dim16 + below(5);
        int64_t stop = n_tiles * t.page_tokens - below(16), start = below(stop), p_stride = stop + below(3);
        const uint8_t *tiles[8];
        for (int64_t i = 0; i < n_tiles; i++)
            tiles[i] = make_tile(format, t, c % N_STYLES);
        float *p = floats((n_q - 1) * p_stride + stop, c / 2 % N_STYLES), *o = floats((n_q - 1) * stride + head_dim16, PLAIN);
        k->pv[format](o, p, tiles, c % 2 ? tiles : NULL, n_q, start, stop, t.head_dim, t.page_tokens, stride, p_stride);
        hash_floats(s, o, (n_q - 1) * stride + head_dim16);
    }
}

/* ---- rows ---- */

static int64_t length_of(int c) { return c < 70 ? 1 + c : c == 70 ? 576 : 1537; }

enum { N_LENGTHS = 72 };

enum row_kernel { SOFTMAX, SOFTCAP, MERGE, RMSNORM, SILU_MUL, ROPE, ADD, SCALE, VMAX, ARGMAX, GELU_MUL };

static void run_row(const pkv_kernels *k, int kernel, sha256 *s)
{
    for (int c = 0; c < 2 * N_LENGTHS; c++, release()) {
        int64_t n = length_of(c / 2), index;
        int style = c % N_STYLES, other = c % 2 ? style : PLAIN;
        float *y = floats(n, style), *x = floats(n, other), *w = floats(n, PLAIN), result = 0, top[2];
        top[0] = value(PLAIN);
        top[1] = value(PLAIN);
        switch (kernel) {
        case SOFTMAX:
            for (int64_t i = 0; i < n; i++)
                x[i] = below(9) ? x[i] * (c % 3 ? 1.0f : 30.0f) : -INFINITY;
            result = k->softmax(c % 4 ? y : x, x, n, 3.75f, c % 2 ? 1.0f : 0.7f);
            hash_floats(s, x, n);
            break;
        case SOFTCAP: k->softcap(y, n, 30.0f + top[0]); break;
        case MERGE:
            k->merge(y, top, top + 1, x, value(PLAIN) * (float)(c % 40), 1.0f, n);
            hash_floats(s, top, 2);
            break;
        case RMSNORM: k->rmsnorm(y, x, w, n, 1e-5f); break;
        case SILU_MUL:
            for (int64_t i = 0; i < n; i++)
                x[i] *= c % 3 ? 1.0f : 30.0f;
            k->silu_mul(y, x, w, n);
            break;
        case GELU_MUL:
            for (int64_t i = 0; i < n; i++)
                x[i] *= c % 3 ? 1.0f : 30.0f;
            k->gelu_mul(y, x, w, n);
            break;
        case ROPE: {
            float *pairs = floats(2 * n, style), *cs = floats(2 * n, PLAIN);
            k->rope(pairs, cs, n);
            hash_floats(s, pairs, 2 * n);
            break;
        }
        case ADD: k->add(y, x, n); break;
        case SCALE: k->scale(y, n, top[0]); break;
        case VMAX: result = k->vmax(y, n); break;
        case ARGMAX:
            if (c % 3 == 0) /* ties */
                for (int64_t i = 0; i < n; i++)
                    y[i] = (float)below(3) - 2.0f;
            index = k->argmax(y, n);
            sha256_update(s, &index, 8);
            break;
        }
        hash_floats(s, y, n);
        hash_floats(s, &result, 1);
    }
}

/* ---- code that is the same on every machine ---- */

static void run_common(const pkv_kernels *k, int variant, sha256 *s)
{
    (void)k, (void)variant;
    for (int64_t i = 0; i < 1 << 16; i++) {
        uint32_t bits = (uint32_t)draw();
        float x, y[3];
        double d = 1.0 + (double)below(1 << 30) * 0x1p-30;
        uint16_t h[2];
        memcpy(&x, &bits, 4);
        y[0] = pkv_exp(x), y[1] = pkv_f16_to_f32((uint16_t)i), y[2] = pkv_exp((float)((int32_t)bits >> 8) * 0x1p-16f);
        h[0] = pkv_f32_to_f16(x), h[1] = pkv_f32_to_f16(y[1]);
        d = pkv_log(ldexp(d, (int)below(2000) - 1060));
        hash_floats(s, y, 3);
        hash_halves(s, h, 2);
        sha256_update(s, &d, 8);
    }
    for (int64_t position = 0; position < 100000; position += 1 + position / 3) {
        double inv_freq[32];
        float cs[64];
        for (int i = 0; i < 32; i++)
            inv_freq[i] = ldexp(1.0, -i / 2) * (i % 2 ? 0.7 : 1.0);
        pkv_rope_angles(cs, inv_freq, 32, position, 1.0f);
        hash_floats(s, cs, 64);
    }
    for (int type = 0; type < PKV_N_WTYPES; type++, release()) {
        int64_t n_cols = weights[type].block == 256 ? 256 : 96;
        pkv_weight w = make_weight(type, n_cols, 2, PLAIN, -1);
        float *row = floats(n_cols, ZERO);
        for (int64_t i = 0; i < 32; i++) {
            pkv_weight_row(row, &w, i);
            hash_floats(s, row, n_cols);
        }
    }
}

static const struct { const char *name; void (*run)(const pkv_kernels *, int, sha256 *); int variant; } kernels[] = {
    {"gemm_f32", run_gemm, PKV_W_F32}, {"gemm_f16", run_gemm, PKV_W_F16}, {"gemm_bf16", run_gemm, PKV_W_BF16},
    {"gemm_q4_0", run_gemm, PKV_W_Q4_0}, {"gemm_q4_1", run_gemm, PKV_W_Q4_1}, {"gemm_q8_0", run_gemm, PKV_W_Q8_0},
    {"gemm_q5_0", run_gemm, PKV_W_Q5_0}, {"gemm_q5_1", run_gemm, PKV_W_Q5_1}, {"gemm_q2_k", run_gemm, PKV_W_Q2_K},
    {"gemm_q3_k", run_gemm, PKV_W_Q3_K}, {"gemm_q4_k", run_gemm, PKV_W_Q4_K}, {"gemm_q5_k", run_gemm, PKV_W_Q5_K},
    {"gemm_q6_k", run_gemm, PKV_W_Q6_K},
    {"gemm_wide_f32", run_gemm_wide, PKV_W_F32}, {"gemm_wide_f16", run_gemm_wide, PKV_W_F16},
    {"gemm_wide_bf16", run_gemm_wide, PKV_W_BF16}, {"gemm_wide_q4_0", run_gemm_wide, PKV_W_Q4_0},
    {"gemm_wide_q4_1", run_gemm_wide, PKV_W_Q4_1}, {"gemm_wide_q8_0", run_gemm_wide, PKV_W_Q8_0},
    {"gemm_wide_q5_0", run_gemm_wide, PKV_W_Q5_0}, {"gemm_wide_q5_1", run_gemm_wide, PKV_W_Q5_1},
    {"gemm_wide_q2_k", run_gemm_wide, PKV_W_Q2_K}, {"gemm_wide_q3_k", run_gemm_wide, PKV_W_Q3_K},
    {"gemm_wide_q4_k", run_gemm_wide, PKV_W_Q4_K}, {"gemm_wide_q5_k", run_gemm_wide, PKV_W_Q5_K},
    {"gemm_wide_q6_k", run_gemm_wide, PKV_W_Q6_K},
    {"quant_i8", run_quant_i8, 0}, {"quant_i12", run_quant_i12, 0},
    {"kv_write_f32", run_kv_write, PKV_KV_F32}, {"kv_write_f16", run_kv_write, PKV_KV_F16}, {"kv_write_int8", run_kv_write, PKV_KV_INT8},
    {"kv_read_f32", run_kv_read, PKV_KV_F32}, {"kv_read_f16", run_kv_read, PKV_KV_F16}, {"kv_read_int8", run_kv_read, PKV_KV_INT8},
    {"qk_f32", run_qk, PKV_KV_F32}, {"qk_f16", run_qk, PKV_KV_F16}, {"qk_int8", run_qk, PKV_KV_INT8},
    {"pv_f32", run_pv, PKV_KV_F32}, {"pv_f16", run_pv, PKV_KV_F16}, {"pv_int8", run_pv, PKV_KV_INT8},
    {"softmax", run_row, SOFTMAX}, {"softcap", run_row, SOFTCAP}, {"merge", run_row, MERGE}, {"rmsnorm", run_row, RMSNORM},
    {"silu_mul", run_row, SILU_MUL}, {"rope", run_row, ROPE}, {"add", run_row, ADD}, {"scale", run_row, SCALE},
    {"vmax", run_row, VMAX}, {"argmax", run_row, ARGMAX},
    {"common", run_common, 0},
    {"gelu_mul", run_row, GELU_MUL},
    {"quant_column", run_quant_column, 0},
};

enum { N_KERNELS = sizeof kernels / sizeof *kernels };
_Static_assert(N_KERNELS - 1 == sizeof(pkv_kernels) / sizeof(void *) - 1, "every kernel of the list has a line above");

static int wanted(const char *isa, int argc, char **argv)
{
    for (int i = 1; i < argc; i++)
        if (!strcmp(argv[i], isa))
            return 1;
    return argc == 1;
}

int main(int argc, char **argv)
{
    int n_isas;
    const pkv_isa *isas = pkv_isa_table(&n_isas);
    uint64_t features = pkv_cpu_features();
#ifdef PKV_AMX_EMULATE
    features |= PKV_FEATURE_AMX_INT8;
#endif
    for (int i = 0; i < n_isas; i++)
        if ((features & isas[i].required) == isas[i].required && wanted(isas[i].name, argc, argv))
            for (int k = 0; k < N_KERNELS; k++) {
                char hex[65];
                sha256 s;
                sha256_init(&s);
                state = 1000 * (uint64_t)(k + 1);
                kernels[k].run(isas[i].kernels, kernels[k].variant, &s);
                sha256_finish(&s, hex);
                printf("%s %s %s\n", isas[i].name, kernels[k].name, hex);
                fflush(stdout);
            }
    return 0;
}
