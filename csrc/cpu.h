/* What the processor and the operating system offer, as one word of feature bits. */
#ifndef PKV_CPU_H
#define PKV_CPU_H

#include <stdint.h>

#define PKV_FEATURE_AVX2 (1u << 0)        /* AVX2, FMA, F16C and the system saves YMM state */
#define PKV_FEATURE_AVX512 (1u << 1)      /* AVX-512 F, BW, DQ, VL and the system saves ZMM state */
#define PKV_FEATURE_VNNI (1u << 2)        /* AVX-512 VNNI */
#define PKV_FEATURE_AMX_INT8 (1u << 3)    /* AMX tiles and int8, and the system saves tile state */
#define PKV_FEATURE_DOTPROD (1u << 4)     /* Arm: FP16 arithmetic and dot product */
#define PKV_FEATURE_I8MM (1u << 5)        /* Arm: int8 matrix multiply */

/* The registers detection looks at, so that it can be tested on made-up values. */
typedef struct pkv_x86_registers {
    uint32_t max_leaf;
    uint32_t leaf1_ecx;
    uint32_t leaf7_ebx, leaf7_ecx, leaf7_edx;
    uint64_t xcr0;    /* 0 where OSXSAVE is not set */
} pkv_x86_registers;

uint64_t pkv_features_x86(const pkv_x86_registers *r);
uint64_t pkv_features_arm(uint64_t hwcap, uint64_t hwcap2);

/* Features of this machine. Asks Linux for AMX tile permission where the processor has AMX; where that is refused the bit is 0. */
uint64_t pkv_cpu_features(void);

#endif
