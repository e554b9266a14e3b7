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

static inline __m512i dot4(int type, __m512i sum, __m512i w, __m512i x)
{
    (void)type;
    return _mm512_dpbusd_epi32(sum, w, x);
}

static inline int dot_bias(int type)
{
    return type == PKV_W_Q8_0 ? 128 : type == PKV_W_Q6_K ? 32 : type == PKV_W_Q5_0 ? 16 : type == PKV_W_Q4_0 ? 8 : type == PKV_W_Q3_K ? 4 : 0;
}

#include "avx512_gemm.h"
#include "avx512_quants.h"

const pkv_kernels pkv_kernels_vnni = {
    .name = "vnni",
    PKV_AVX512_GEMM,
    PKV_AVX512_AFTER_GEMM,
};
