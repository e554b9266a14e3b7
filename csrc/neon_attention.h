/* Attention over page tiles for NEON. Part of k_neon.c, whose lanes it uses. */

TILE void load_kv16(float32x4_t *v, const uint8_t *p, int64_t i, int32_t format) /* v [4] */
{
    if (format == PKV_KV_INT8) {
        int8x16_t x = vld1q_s8((const int8_t *)p + i);
        int16x8_t low = vmovl_s8(vget_low_s8(x)), high = vmovl_high_s8(x);
        v[0] = vcvtq_f32_s32(vmovl_s16(vget_low_s16(low)));
        v[1] = vcvtq_f32_s32(vmovl_high_s16(low));
        v[2] = vcvtq_f32_s32(vmovl_s16(vget_low_s16(high)));
        v[3] = vcvtq_f32_s32(vmovl_high_s16(high));
    } else
        for (int g = 0; g < 4; g++)
            v[g] = format == PKV_KV_F32 ? vld1q_f32((const float *)p + i + 4 * g) : widen(p + 2 * (i + 4 * g));
}

static void kv_write_f32(uint8_t *restrict tile, const float *restrict k, const float *restrict v, int64_t slot, int64_t head_dim,
                         int64_t page_tokens)
{
    int64_t head_dim16 = pkv_round_up(head_dim, 16);
    float *kt = (float *)tile + slot, *vt = (float *)(tile + pkv_tile_v(PKV_KV_F32, head_dim, page_tokens)) + slot * head_dim16;
    for (int64_t d = 0; d < head_dim; d++)
        kt[d * page_tokens] = k[d];
    for (int64_t d = 0; d < head_dim16; d += 4)
        vst1q_f32(vt + d, load(v + d, head_dim - d));
}

static inline uint16x4_t halves(float32x4_t x) { return vreinterpret_u16_f16(vcvt_f16_f32(x)); }

static void kv_write_f16(uint8_t *restrict tile, const float *restrict k, const float *restrict v, int64_t slot, int64_t head_dim,
                         int64_t page_tokens)
{
    int64_t head_dim16 = pkv_round_up(head_dim, 16);
    uint16_t *kt = (uint16_t *)tile + slot;
    uint16_t *vt = (uint16_t *)(tile + pkv_tile_v(PKV_KV_F16, head_dim, page_tokens)) + slot * head_dim16;
    for (int64_t d = 0; d < head_dim; d += 4) {
        uint16_t h[4];
        vst1_u16(h, halves(load(k + d, head_dim - d)));
        for (int64_t i = 0; i < 4 && d + i < head_dim; i++)
            kt[(d + i) * page_tokens] = h[i];
    }
    for (int64_t d = 0; d < head_dim16; d += 4)
        vst1_u16(vt + d, halves(load(v + d, head_dim - d)));
}

static float row_scale_of(float *inverse, const float *x, int64_t n)
{
    uint32x4_t top = vdupq_n_u32(0);
    for (int64_t i = 0; i < n; i += 4)
        top = vmaxq_u32(top, magnitude_bits(load(x + i, n - i)));
    return row_scale(inverse, vmaxvq_u32(top), 127.0f);
}

static inline void quantise8_to(int8_t *q, const float *x, int64_t n, float inverse) /* q [8], zeros from n on */
{
    int16x4_t low = vmovn_s32(quantise4(load(x, n), inverse)), high = vmovn_s32(quantise4(load(x + 4, n - 4), inverse));
    vst1_s8(q, vmovn_s16(vcombine_s16(low, high)));
}

static void kv_write_int8(uint8_t *restrict tile, const float *restrict k, const float *restrict v, int64_t slot, int64_t head_dim,
                          int64_t page_tokens)
{
    int64_t head_dim16 = pkv_round_up(head_dim, 16);
    int8_t *kt = (int8_t *)tile + slot, *vt = (int8_t *)(tile + pkv_tile_v(PKV_KV_INT8, head_dim, page_tokens)) + slot * head_dim16;
    float *scales = (float *)(tile + pkv_tile_scales(PKV_KV_INT8, head_dim, page_tokens)), inverse;
    scales[slot] = row_scale_of(&inverse, k, head_dim);
    for (int64_t d = 0; d < head_dim; d += 8) {
        int8_t q[8];
        quantise8_to(q, k + d, head_dim - d, inverse);
        for (int64_t i = 0; i < 8 && d + i < head_dim; i++)
            kt[(d + i) * page_tokens] = q[i];
    }
    scales[page_tokens + slot] = row_scale_of(&inverse, v, head_dim);
    for (int64_t d = 0; d < head_dim16; d += 8)
        quantise8_to(vt + d, v + d, head_dim - d, inverse);
}

TILE float element(const uint8_t *p, int64_t i, int32_t format)
{
    return format == PKV_KV_F32   ? ((const float *)p)[i]
           : format == PKV_KV_F16 ? (float)((const float16_t *)p)[i]
                                  : (float)((const int8_t *)p)[i];
}

TILE void kv_read(float *k, float *v, const uint8_t *tile, int64_t slot0, int64_t n, int64_t head_dim, int64_t page_tokens,
                  int64_t out_stride, int32_t format)
{
    const uint8_t *vt = tile + pkv_tile_v(format, head_dim, page_tokens);
    const float *scales = (const float *)(tile + pkv_tile_scales(format, head_dim, page_tokens));
    int64_t head_dim16 = pkv_round_up(head_dim, 16);
    for (int64_t slot = slot0; slot < slot0 + n; slot++, k += out_stride, v += out_stride)
        for (int64_t d = 0; d < head_dim; d++) {
            float kd = element(tile, d * page_tokens + slot, format), vd = element(vt, slot * head_dim16 + d, format);
            k[d] = format == PKV_KV_INT8 ? kd * scales[slot] : kd;
            v[d] = format == PKV_KV_INT8 ? vd * scales[page_tokens + slot] : vd;
        }
}

/* n_q queries x n_g groups of 16 tokens, n_q * n_g <= 4 */
TILE void qk_tile(float *s, const float *q, const uint8_t *const *tiles, int64_t group, int64_t head_dim, int64_t page_tokens,
                  int64_t s_stride, int64_t q_stride, float scale, int n_q, int n_g, int32_t format)
{
    const int64_t per_tile = page_tokens / 16;
    const uint8_t *tile[4];
    int64_t column[4];
    float32x4_t acc[16], v[4];
    for (int g = 0; g < n_g; g++) {
        tile[g] = tiles[(group + g) / per_tile];
        column[g] = (group + g) % per_tile * 16;
    }
    for (int i = 0; i < 4 * n_q * n_g; i++)
        acc[i] = vdupq_n_f32(0.0f);
    for (int64_t d = 0; d < head_dim; d++)
        for (int g = 0; g < n_g; g++) {
            load_kv16(v, tile[g], d * page_tokens + column[g], format);
            for (int j = 0; j < n_q; j++)
                for (int i = 0; i < 4; i++)
                    acc[4 * (j * n_g + g) + i] = vfmaq_n_f32(acc[4 * (j * n_g + g) + i], v[i], q[j * q_stride + d]);
        }
    for (int g = 0; g < n_g; g++) {
        const float *k_scale = (const float *)(tile[g] + pkv_tile_scales(format, head_dim, page_tokens)) + column[g];
        for (int j = 0; j < n_q; j++)
            for (int i = 0; i < 4; i++) {
                float32x4_t x = acc[4 * (j * n_g + g) + i];
                if (format == PKV_KV_INT8)
                    x = vmulq_f32(x, vld1q_f32(k_scale + 4 * i));
                vst1q_f32(s + j * s_stride + 16 * (group + g) + 4 * i, vmulq_n_f32(x, scale));
            }
    }
}

TILE void qk(float *s, const float *q, const uint8_t *const *tiles, int64_t n_q, int64_t n_tiles, int64_t head_dim,
             int64_t page_tokens, int64_t s_stride, int64_t q_stride, float scale, int32_t format)
{
#define QK(n, g) qk_tile(s + j * s_stride, q + j * q_stride, tiles, group, head_dim, page_tokens, s_stride, q_stride, scale, n, g, format)
    const int64_t n_groups = n_tiles * (page_tokens / 16);
    int64_t group = 0, j = 0;
    for (; n_q == 1 && group + 4 <= n_groups; group += 4)
        QK(1, 4);
    for (; n_q == 2 && group + 2 <= n_groups; group += 2)
        QK(2, 2);
    for (; group < n_groups; group++) {
        for (j = 0; j + 4 <= n_q; j += 4)
            QK(4, 1);
        if (n_q - j == 3)
            QK(3, 1);
        else if (n_q - j == 2)
            QK(2, 1);
        else if (n_q - j == 1)
            QK(1, 1);
    }
#undef QK
}

/* n_q queries x n_d groups of 16 output lanes from lane d, n_q * n_d <= 4 */
TILE void pv_tile(float *o, const float *p, const uint8_t *const *tiles, int64_t d, int64_t start, int64_t stop, int64_t head_dim,
                  int64_t page_tokens, int64_t o_stride, int64_t p_stride, int n_q, int n_d, int32_t format)
{
    const int64_t head_dim16 = pkv_round_up(head_dim, 16), v_offset = pkv_tile_v(format, head_dim, page_tokens);
    const int64_t scale_offset = pkv_tile_scales(format, head_dim, page_tokens) + 4 * page_tokens;
    float32x4_t acc[16], v[4];
    for (int j = 0; j < n_q; j++)
        for (int i = 0; i < 4 * n_d; i++)
            acc[4 * j * n_d + i] = vld1q_f32(o + j * o_stride + d + 4 * i);
    for (int64_t t = start; t < stop;) {
        int64_t slot = t % page_tokens, n = stop - t < page_tokens - slot ? stop - t : page_tokens - slot;
        const uint8_t *tile = tiles[t / page_tokens], *vt = tile + v_offset;
        const float *v_scale = (const float *)(tile + scale_offset);
        for (; n > 0; n--, t++, slot++)
            for (int g = 0; g < n_d; g++) {
                load_kv16(v, vt, slot * head_dim16 + d + 16 * g, format);
                for (int j = 0; j < n_q; j++) {
                    float a = format == PKV_KV_INT8 ? p[j * p_stride + t] * v_scale[slot] : p[j * p_stride + t];
                    for (int i = 0; i < 4; i++)
                        acc[4 * (j * n_d + g) + i] = vfmaq_n_f32(acc[4 * (j * n_d + g) + i], v[i], a);
                }
            }
    }
    for (int j = 0; j < n_q; j++)
        for (int i = 0; i < 4 * n_d; i++)
            vst1q_f32(o + j * o_stride + d + 4 * i, acc[4 * j * n_d + i]);
}

TILE void pv(float *o, const float *p, const uint8_t *const *tiles, int64_t n_q, int64_t start, int64_t stop, int64_t head_dim,
             int64_t page_tokens, int64_t o_stride, int64_t p_stride, int32_t format)
{
#define PV(n, g) \
    pv_tile(o + j * o_stride, p + j * p_stride, tiles, d, start, stop, head_dim, page_tokens, o_stride, p_stride, n, g, format)
    const int64_t head_dim16 = pkv_round_up(head_dim, 16);
    int64_t j = 0, d = 0;
    for (; n_q == 1 && d + 64 <= head_dim16; d += 64)
        PV(1, 4);
    for (; n_q == 2 && d + 32 <= head_dim16; d += 32)
        PV(2, 2);
    for (; d < head_dim16; d += 16) {
        for (j = 0; j + 4 <= n_q; j += 4)
            PV(4, 1);
        if (n_q - j == 3)
            PV(3, 1);
        else if (n_q - j == 2)
            PV(2, 1);
        else if (n_q - j == 1)
            PV(1, 1);
    }
#undef PV
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
    float32x4_t lane[4] = {vdupq_n_f32(0.0f), vdupq_n_f32(0.0f), vdupq_n_f32(0.0f), vdupq_n_f32(0.0f)};
    for (int64_t i = 0; i < n; i += 16)
        for (int g = 0; g < 4; g++) {
            int64_t at = i + 4 * g;
            float32x4_t e = exp4(vmulq_n_f32(vsubq_f32(load(x + at, n - at), vdupq_n_f32(m)), inv_t));
            store(y + at, e, n - at);
            if (n - at < 4)
                e = vreinterpretq_f32_u32(vandq_u32(vreinterpretq_u32_f32(e), first_lanes(n - at)));
            lane[g] = vaddq_f32(lane[g], e);
        }
    return tree_sum(lane);
}

static void softcap(float *x, int64_t n, float cap)
{
    const float32x4_t one = vdupq_n_f32(1.0f), two = vdupq_n_f32(2.0f);
    for (int64_t i = 0; i < n; i += 4) {
        float32x4_t z = vdivq_f32(load(x + i, n - i), vdupq_n_f32(cap)), t = exp4(vmulq_f32(two, vabsq_f32(z)));
        t = vsubq_f32(one, vdivq_f32(two, vaddq_f32(t, one)));
        t = vbslq_f32(vdupq_n_u32(0x80000000u), z, t);
        store(x + i, vmulq_n_f32(t, cap), n - i);
    }
}

static void merge(float *restrict o, float *restrict m, float *restrict l, const float *restrict o2, float m2, float l2, int64_t n)
{
    float top = *m > m2 ? *m : m2;
    float32x4_t a = exp4(vdupq_n_f32(*m - top)), b = exp4(vdupq_n_f32(m2 - top));
    for (int64_t d = 0; d < n; d += 4)
        store(o + d, vfmaq_f32(vmulq_f32(load(o + d, n - d), a), load(o2 + d, n - d), b), n - d);
    *l = fmaf(l2, vgetq_lane_f32(b, 0), *l * vgetq_lane_f32(a, 0));
    *m = top;
}
