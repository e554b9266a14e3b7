/* Attention over page tiles: the specification. Part of k_scalar.c, apart for its length.
 * In order: tile access, qk, pv, the tables' functions, then softmax and what follows a split. */

static float element(const uint8_t *p, int64_t i, int32_t format)
{
    return format == PKV_KV_F32   ? ((const float *)p)[i]
           : format == PKV_KV_F16 ? pkv_f16_to_f32(((const uint16_t *)p)[i])
                                  : (float)((const int8_t *)p)[i];
}

static void store(uint8_t *p, int64_t i, float x, int32_t format)
{
    if (format == PKV_KV_F32)
        ((float *)p)[i] = x;
    else
        ((uint16_t *)p)[i] = pkv_f32_to_f16(x);
}

static void kv_write(uint8_t *tile, const float *k, const float *v, int64_t slot, int64_t head_dim, int64_t page_tokens, int32_t format)
{
    uint8_t *vt = tile + pkv_tile_v(format, head_dim, page_tokens);
    int64_t head_dim16 = pkv_round_up(head_dim, 16);
    for (int64_t d = 0; d < head_dim; d++)
        store(tile, d * page_tokens + slot, k[d], format);
    for (int64_t d = 0; d < head_dim16; d++)
        store(vt, slot * head_dim16 + d, d < head_dim ? v[d] : 0.0f, format);
}

static void kv_write_f32(uint8_t *restrict tile, const float *restrict k, const float *restrict v, int64_t slot, int64_t head_dim,
                         int64_t page_tokens)
{
    kv_write(tile, k, v, slot, head_dim, page_tokens, PKV_KV_F32);
}

static void kv_write_f16(uint8_t *restrict tile, const float *restrict k, const float *restrict v, int64_t slot, int64_t head_dim,
                         int64_t page_tokens)
{
    kv_write(tile, k, v, slot, head_dim, page_tokens, PKV_KV_F16);
}

static void kv_write_int8(uint8_t *restrict tile, const float *restrict k, const float *restrict v, int64_t slot, int64_t head_dim,
                          int64_t page_tokens)
{
    int64_t head_dim16 = pkv_round_up(head_dim, 16);
    int8_t *vt = (int8_t *)(tile + pkv_tile_v(PKV_KV_INT8, head_dim, page_tokens)) + slot * head_dim16;
    float *scales = (float *)(tile + pkv_tile_scales(PKV_KV_INT8, head_dim, page_tokens));
    scales[slot] = quantise((int8_t *)tile + slot, page_tokens, k, head_dim);
    scales[page_tokens + slot] = quantise(vt, 1, v, head_dim);
    for (int64_t d = head_dim; d < head_dim16; d++)
        vt[d] = 0;
}

static void kv_read(float *k, float *v, const uint8_t *tile, int64_t slot0, int64_t n, int64_t head_dim, int64_t page_tokens,
                    int64_t out_stride, int32_t format)
{
    const uint8_t *vt = tile + pkv_tile_v(format, head_dim, page_tokens);
    const float *scales = (const float *)(tile + pkv_tile_scales(format, head_dim, page_tokens));
    int64_t head_dim16 = pkv_round_up(head_dim, 16);
    for (int64_t i = 0; i < n; i++)
        for (int64_t d = 0; d < head_dim; d++) {
            int64_t slot = slot0 + i;
            float kd = element(tile, d * page_tokens + slot, format), vd = element(vt, slot * head_dim16 + d, format);
            k[i * out_stride + d] = format == PKV_KV_INT8 ? kd * scales[slot] : kd;
            v[i * out_stride + d] = format == PKV_KV_INT8 ? vd * scales[page_tokens + slot] : vd;
        }
}

static void qk(float *s, const float *q, const uint8_t *const *tiles, int64_t n_q, int64_t n_tiles, int64_t head_dim,
               int64_t page_tokens, int64_t s_stride, int64_t q_stride, float scale, int32_t format)
{
    for (int64_t j = 0; j < n_q; j++)
        for (int64_t i = 0; i < n_tiles; i++)
            for (int64_t c = 0; c < page_tokens; c++) {
                float acc = 0.0f;
                for (int64_t d = 0; d < head_dim; d++)
                    acc = fmaf(q[j * q_stride + d], element(tiles[i], d * page_tokens + c, format), acc);
                if (format == PKV_KV_INT8)
                    acc *= ((const float *)(tiles[i] + pkv_tile_scales(format, head_dim, page_tokens)))[c];
                s[j * s_stride + i * page_tokens + c] = acc * scale;
            }
}

static void pv(float *o, const float *p, const uint8_t *const *tiles, int64_t n_q, int64_t start, int64_t stop, int64_t head_dim,
               int64_t page_tokens, int64_t o_stride, int64_t p_stride, int32_t format)
{
    int64_t head_dim16 = pkv_round_up(head_dim, 16);
    for (int64_t j = 0; j < n_q; j++)
        for (int64_t t = start; t < stop; t++) {
            const uint8_t *tile = tiles[t / page_tokens], *vt = tile + pkv_tile_v(format, head_dim, page_tokens);
            int64_t slot = t % page_tokens;
            float pt = p[j * p_stride + t];
            if (format == PKV_KV_INT8)
                pt *= ((const float *)(tile + pkv_tile_scales(format, head_dim, page_tokens)))[page_tokens + slot];
            for (int64_t d = 0; d < head_dim16; d++)
                o[j * o_stride + d] = fmaf(pt, element(vt, slot * head_dim16 + d, format), o[j * o_stride + d]);
        }
}

#define FORMAT(name, format)                                                                                                        \
    static void kv_read_##name(float *restrict k, float *restrict v, const uint8_t *restrict tile, int64_t slot0, int64_t n,        \
                               int64_t head_dim, int64_t page_tokens, int64_t out_stride)                                           \
    {                                                                                                                               \
        kv_read(k, v, tile, slot0, n, head_dim, page_tokens, out_stride, format);                                                   \
    }                                                                                                                               \
    static void qk_##name(float *restrict s, const float *restrict q, const uint8_t *const *restrict tiles,                         \
                          const uint8_t *const *restrict ahead, int64_t n_q, int64_t n_tiles, int64_t head_dim,                     \
                          int64_t page_tokens, int64_t s_stride, int64_t q_stride, float scale)                                     \
    {                                                                                                                               \
        (void)ahead;                                                                                                                \
        qk(s, q, tiles, n_q, n_tiles, head_dim, page_tokens, s_stride, q_stride, scale, format);                                    \
    }                                                                                                                               \
    static void pv_##name(float *restrict o, const float *restrict p, const uint8_t *const *restrict tiles,                         \
                          const uint8_t *const *restrict ahead, int64_t n_q, int64_t start, int64_t stop, int64_t head_dim,         \
                          int64_t page_tokens, int64_t o_stride, int64_t p_stride)                                                  \
    {                                                                                                                               \
        (void)ahead;                                                                                                                \
        pv(o, p, tiles, n_q, start, stop, head_dim, page_tokens, o_stride, p_stride, format);                                       \
    }
FORMAT(f32, PKV_KV_F32)
FORMAT(f16, PKV_KV_F16)
FORMAT(int8, PKV_KV_INT8)

static float softmax(float *y, const float *x, int64_t n, float m, float inv_t)
{
    float lane[16] = {0};
    for (int64_t i = 0; i < n; i++) {
        y[i] = pkv_exp((x[i] - m) * inv_t);
        lane[i % 16] += y[i];
    }
    return tree_sum(lane);
}

/* tanh(|z|) = 1 - 2 / (exp(2|z|) + 1) */
static void softcap(float *x, int64_t n, float cap)
{
    for (int64_t i = 0; i < n; i++) {
        float z = x[i] / cap, t = 1.0f - 2.0f / (pkv_exp(2.0f * fabsf(z)) + 1.0f);
        x[i] = cap * copysignf(t, z);
    }
}

static void merge(float *restrict o, float *restrict m, float *restrict l, const float *restrict o2, float m2, float l2, int64_t n)
{
    float top = *m > m2 ? *m : m2, a = pkv_exp(*m - top), b = pkv_exp(m2 - top);
    for (int64_t d = 0; d < n; d++)
        o[d] = fmaf(o2[d], b, o[d] * a);
    *l = fmaf(l2, b, *l * a);
    *m = top;
}
