/* What the AVX-512 ISAs share: the functions of k_avx512.c by name, for the tables of ISAs that only add a better matmul. */
#ifndef PKV_AVX512_H
#define PKV_AVX512_H

#include "pkv_kernels.h"

pkv_gemm_fn pkv_gemm_f32_avx512, pkv_gemm_f16_avx512, pkv_gemm_bf16_avx512;
void pkv_quant_i8_avx512(int8_t *restrict q, float *restrict scale, float *restrict sum, int32_t *restrict isum,
                         int32_t *restrict half, const float *restrict x, int64_t n);
void pkv_quant_column_avx512(const pkv_act *restrict a, int64_t block, int64_t token0, int64_t n_tokens);
void pkv_quant_i12_avx512(int8_t *restrict q, int8_t *restrict low, float *restrict scale, int32_t *restrict isum,
                          int32_t *restrict half, const float *restrict x, int64_t n);
pkv_kv_write_fn pkv_kv_write_f32_avx512, pkv_kv_write_f16_avx512, pkv_kv_write_int8_avx512;
pkv_kv_read_fn pkv_kv_read_f32_avx512, pkv_kv_read_f16_avx512, pkv_kv_read_int8_avx512;
pkv_qk_fn pkv_qk_f32_avx512, pkv_qk_f16_avx512, pkv_qk_int8_avx512;
pkv_pv_fn pkv_pv_f32_avx512, pkv_pv_f16_avx512, pkv_pv_int8_avx512;
float pkv_softmax_avx512(float *y, const float *x, int64_t n, float m, float inv_t);
void pkv_softcap_avx512(float *x, int64_t n, float cap);
void pkv_merge_avx512(float *restrict o, float *restrict m, float *restrict l, const float *restrict o2, float m2, float l2, int64_t n);
void pkv_rmsnorm_avx512(float *restrict y, const float *restrict x, const float *restrict w, int64_t n, float eps);
void pkv_silu_mul_avx512(float *restrict y, const float *restrict g, const float *restrict u, int64_t n);
void pkv_gelu_mul_avx512(float *restrict y, const float *restrict g, const float *restrict u, int64_t n);
void pkv_rope_avx512(float *restrict x, const float *restrict cs, int64_t half);
void pkv_add_avx512(float *restrict y, const float *restrict x, int64_t n);
void pkv_scale_avx512(float *restrict y, int64_t n, float a);
float pkv_vmax_avx512(const float *restrict x, int64_t n);
int64_t pkv_argmax_avx512(const float *restrict x, int64_t n);

/* The part of a kernel table that follows gemm. */
#define PKV_AVX512_AFTER_GEMM                                                                      \
    .quant_i8 = pkv_quant_i8_avx512,                                                               \
    .quant_column = pkv_quant_column_avx512,                                                       \
    .quant_i12 = pkv_quant_i12_avx512,                                                             \
    .kv_write = {pkv_kv_write_f32_avx512, pkv_kv_write_f16_avx512, pkv_kv_write_int8_avx512},      \
    .kv_read = {pkv_kv_read_f32_avx512, pkv_kv_read_f16_avx512, pkv_kv_read_int8_avx512},          \
    .qk = {pkv_qk_f32_avx512, pkv_qk_f16_avx512, pkv_qk_int8_avx512},                              \
    .pv = {pkv_pv_f32_avx512, pkv_pv_f16_avx512, pkv_pv_int8_avx512},                              \
    .softmax = pkv_softmax_avx512,                                                                 \
    .softcap = pkv_softcap_avx512,                                                                 \
    .merge = pkv_merge_avx512,                                                                     \
    .rmsnorm = pkv_rmsnorm_avx512,                                                                 \
    .silu_mul = pkv_silu_mul_avx512,                                                               \
    .gelu_mul = pkv_gelu_mul_avx512,                                                               \
    .rope = pkv_rope_avx512,                                                                       \
    .add = pkv_add_avx512,                                                                         \
    .scale = pkv_scale_avx512,                                                                     \
    .vmax = pkv_vmax_avx512,                                                                       \
    .argmax = pkv_argmax_avx512

#endif
