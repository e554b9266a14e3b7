#define _GNU_SOURCE
#include "cpu.h"

#include <stddef.h>

static int has(uint64_t word, int bit) { return (int)(word >> bit & 1u); }

uint64_t pkv_features_x86(const pkv_x86_registers *r)
{
    uint64_t features = 0;
    int ymm, zmm, tiles;
    if (r->max_leaf < 7 || !has(r->leaf1_ecx, 27))
        return 0;
    ymm = (r->xcr0 & 0x6u) == 0x6u;
    zmm = ymm && (r->xcr0 & 0xe0u) == 0xe0u;
    tiles = (r->xcr0 & 0x60000u) == 0x60000u;
    /* AVX, FMA, F16C of leaf 1; AVX2 of leaf 7 */
    if (ymm && has(r->leaf1_ecx, 28) && has(r->leaf1_ecx, 12) && has(r->leaf1_ecx, 29) && has(r->leaf7_ebx, 5))
        features |= PKV_FEATURE_AVX2;
    /* F, DQ, BW, VL */
    if (zmm && (features & PKV_FEATURE_AVX2) && has(r->leaf7_ebx, 16) && has(r->leaf7_ebx, 17) && has(r->leaf7_ebx, 30)
        && has(r->leaf7_ebx, 31))
        features |= PKV_FEATURE_AVX512;
    if ((features & PKV_FEATURE_AVX512) && has(r->leaf7_ecx, 11))
        features |= PKV_FEATURE_VNNI;
    /* AMX-TILE, AMX-INT8 */
    if ((features & PKV_FEATURE_VNNI) && tiles && has(r->leaf7_edx, 24) && has(r->leaf7_edx, 25))
        features |= PKV_FEATURE_AMX_INT8;
    return features;
}

/* Linux: HWCAP_FPHP 9, HWCAP_ASIMDHP 10, HWCAP_ASIMDDP 20; HWCAP2_I8MM 13 */
uint64_t pkv_features_arm(uint64_t hwcap, uint64_t hwcap2)
{
    uint64_t features = 0;
    if (has(hwcap, 9) && has(hwcap, 10) && has(hwcap, 20))
        features |= PKV_FEATURE_DOTPROD;
    if (features && has(hwcap2, 13))
        features |= PKV_FEATURE_I8MM;
    return features;
}

#if defined(__x86_64__)
#include <cpuid.h>
#include <sys/syscall.h>
#include <unistd.h>

static int tiles_permitted(void)
{
    enum { ARCH_REQ_XCOMP_PERM = 0x1023, XFEATURE_XTILEDATA = 18 };
    return syscall(SYS_arch_prctl, ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA) == 0;
}

/* features without those that Linux refuses: asks only for what the processor has */
static uint64_t permitted(uint64_t features)
{
    if ((features & PKV_FEATURE_AMX_INT8) && !tiles_permitted())
        features &= ~(uint64_t)PKV_FEATURE_AMX_INT8;
    return features;
}

uint64_t pkv_cpu_features(void)
{
    pkv_x86_registers r = {0};
    uint32_t a, b, c, d;
    __cpuid(0, r.max_leaf, b, c, d);
    __cpuid(1, a, b, r.leaf1_ecx, d);
    if (r.max_leaf >= 7)
        __cpuid_count(7, 0, a, r.leaf7_ebx, r.leaf7_ecx, r.leaf7_edx);
    if (has(r.leaf1_ecx, 27)) {
        uint32_t low, high;
        __asm__ volatile("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
        r.xcr0 = (uint64_t)high << 32 | low;
    }
    return permitted(pkv_features_x86(&r));
}
#elif defined(__aarch64__) && defined(__linux__)
#include <sys/auxv.h>

uint64_t pkv_cpu_features(void) { return pkv_features_arm(getauxval(AT_HWCAP), getauxval(AT_HWCAP2)); }
#else
uint64_t pkv_cpu_features(void) { return 0; }
#endif
