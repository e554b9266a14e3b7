/* The ordered table of the ISAs this build contains. setup.py defines PKV_HAVE_<ISA> for each file it compiles. */
#include "cpu.h"
#include "pkv_kernels.h"

static const pkv_isa isas[] = {
#ifdef PKV_HAVE_AMX
    {"amx", PKV_FEATURE_AMX_INT8 | PKV_FEATURE_VNNI | PKV_FEATURE_AVX512 | PKV_FEATURE_AVX2, &pkv_kernels_amx},
#endif
#ifdef PKV_HAVE_VNNI
    {"vnni", PKV_FEATURE_VNNI | PKV_FEATURE_AVX512 | PKV_FEATURE_AVX2, &pkv_kernels_vnni},
#endif
#ifdef PKV_HAVE_AVX512
    {"avx512", PKV_FEATURE_AVX512 | PKV_FEATURE_AVX2, &pkv_kernels_avx512},
#endif
#ifdef PKV_HAVE_AVX2
    {"avx2", PKV_FEATURE_AVX2, &pkv_kernels_avx2},
#endif
#ifdef PKV_HAVE_NEON
    {"neon", PKV_FEATURE_DOTPROD, &pkv_kernels_neon},
#endif
    {"scalar", 0, &pkv_kernels_scalar},
};

const pkv_isa *pkv_isa_table(int *n)
{
    *n = (int)(sizeof isas / sizeof isas[0]);
    return isas;
}
