/* The tile operations of k_amx.c: one shape, C [16][16] int32 = A [16][32] int8 times B [8][16][4] int8 (lines of 4 columns each).
 *
 * Inline assembly with whole arrays as operands, because gcc 12's intrinsics misdeclare the memory they touch. With
 * PKV_AMX_EMULATE the same operations run as plain C, so that the file can be tested on a machine without tiles. */
#ifndef PKV_AMX_TILES_H
#define PKV_AMX_TILES_H

#include <stdint.h>

#ifdef PKV_AMX_EMULATE
#include <stdlib.h>
#include <string.h>

static _Thread_local int tiles_configured;

/* As strict as the processor and more: tiles of another thread, or left configured by an earlier call, end the process. */
static inline void tiles_set(int configured)
{
    if (tiles_configured == configured)
        abort();
    tiles_configured = configured;
}

static inline void tiles_configure(void) { tiles_set(1); }
static inline void tiles_release(void) { tiles_set(0); }

static inline void tiles_multiply(int set, int32_t *c, const int8_t *a, const int8_t *b)
{
    if (!tiles_configured || set >> 1)
        abort();
    memset(c, 0, 16 * 16 * sizeof *c);
    for (int t = 0; t < 16; t++)
        for (int k = 0; k < 32; k++)
            for (int r = 0; r < 16; r++)
                c[16 * t + r] += a[32 * t + k] * b[k / 4 * 64 + 4 * r + k % 4];
}
#else
/* Palette 1; tiles 0 and 1 are C, 2 and 3 are A, 4 and 5 are B. */
typedef struct tile_config {
    uint8_t palette, start_row, reserved[14];
    uint16_t row_bytes[16];
    uint8_t n_rows[16];
} tile_config;
_Static_assert(sizeof(tile_config) == 64, "the layout is the processor's");

static inline void tiles_configure(void)
{
    static const tile_config config = {
        .palette = 1, .row_bytes = {64, 64, 32, 32, 64, 64}, .n_rows = {16, 16, 16, 16, 8, 8}};
    __asm__ volatile("ldtilecfg %0" : : "m"(config));
}

static inline void tiles_release(void) { __asm__ volatile("tilerelease"); }

#define MULTIPLY(tile_c, tile_a, tile_b)                                                             \
    __asm__ volatile("tileloadd (%[a], %[a_stride], 1), %%" tile_a "\n\t"                            \
                     "tileloadd (%[b], %[b_stride], 1), %%" tile_b "\n\t"                            \
                     "tilezero %%" tile_c "\n\t"                                                     \
                     "tdpbssd %%" tile_b ", %%" tile_a ", %%" tile_c "\n\t"                          \
                     "tilestored %%" tile_c ", (%[c], %[b_stride], 1)"                               \
                     : "=m"(*(int32_t(*)[16 * 16])c)                                                 \
                     : [a] "r"(a), [b] "r"(b), [c] "r"(c), [a_stride] "r"((int64_t)32),              \
                       [b_stride] "r"((int64_t)64), "m"(*(const int8_t(*)[16 * 32])a), "m"(*(const int8_t(*)[8 * 64])b))

/* Two sets of tiles, so that one product can start before the last one is stored. */
static inline void tiles_multiply(int set, int32_t *c, const int8_t *a, const int8_t *b)
{
    if (set)
        MULTIPLY("tmm1", "tmm3", "tmm5");
    else
        MULTIPLY("tmm0", "tmm2", "tmm4");
}
#undef MULTIPLY
#endif

#endif
