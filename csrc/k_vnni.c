/* AVX-512 VNNI: the AVX-512 kernels with a four-way byte dot product in one instruction. */
#if !defined(__AVX512VNNI__) || !defined(__AVX512BW__)
#error "k_vnni.c needs -mavx512bw -mavx512vnni"
#endif
#include "avx512.h"

#include <immintrin.h>

enum { TILE_TOKENS = 6 };

static inline __m512i dot_start(int type, __m512i offset)
{
    (void)type;
    return offset;
}

static inline __m512i dot_step(int type, __m512i sum, __m512i w, __m512i x)
{
    (void)type;
    return _mm512_dpbusd_epi32(sum, w, x);
}

static inline __m512i dot_end(int type, __m512i sum, __m512i offset)
{
    (void)type;
    (void)offset;
    return sum;
}

#include "avx512_gemm.h"

const pkv_kernels pkv_kernels_vnni = {
    .name = "vnni",
    .gemm = {pkv_gemm_f32_avx512, pkv_gemm_f16_avx512, pkv_gemm_bf16_avx512, gemm_q4_0, gemm_q4_1, gemm_q8_0,
             pkv_gemm_blocks_scalar, pkv_gemm_blocks_scalar, pkv_gemm_blocks_scalar, pkv_gemm_blocks_scalar,
             pkv_gemm_blocks_scalar, pkv_gemm_blocks_scalar, pkv_gemm_blocks_scalar},
    .gemm_wide = {pkv_gemm_f32_avx512, pkv_gemm_f16_avx512, pkv_gemm_bf16_avx512, pkv_gemm_wide_scalar, pkv_gemm_wide_scalar, pkv_gemm_wide_scalar,
                  pkv_gemm_wide_scalar, pkv_gemm_wide_scalar, pkv_gemm_wide_scalar, pkv_gemm_wide_scalar, pkv_gemm_wide_scalar,
                  pkv_gemm_wide_scalar, pkv_gemm_wide_scalar},
    PKV_AVX512_AFTER_GEMM,
};
