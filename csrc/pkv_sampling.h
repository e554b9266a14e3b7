/* Loops of the sampler over one row of logits; every result is exact, so plain C serves all ISAs. */
#ifndef PKV_SAMPLING_H
#define PKV_SAMPLING_H

#include <float.h>
#include <stdint.h>
#include <string.h>

/* 64-bit sort key: ascending keys are (logit descending, id ascending); -0 and +0 tie. */
static inline uint64_t pkv_candidate(float x, int64_t id)
{
    uint32_t bits;
    x += 0.0f;
    memcpy(&bits, &x, 4);
    bits ^= (bits >> 31) ? 0xffffffffu : 0x80000000u;
    return ((uint64_t)(uint32_t)~bits << 32) | (uint32_t)id;
}

enum { PKV_SCAN = 128 }; /* logits per block whose maximum is kept */

/* Writes the candidates with low <= x < high in ascending id order, looking only into blocks whose maximum reaches low;
 * returns how many. block_max: [ceil(n / PKV_SCAN)]. */
static inline int64_t pkv_gather_band(uint64_t *out, const float *x, const float *block_max, int64_t n, float low, float high)
{
    int64_t found = 0;
    for (int64_t start = 0; start < n; start += PKV_SCAN) {
        int64_t stop = start + PKV_SCAN < n ? start + PKV_SCAN : n;
        if (block_max[start / PKV_SCAN] >= low)
            for (int64_t i = start; i < stop; i++)
                if (x[i] >= low && x[i] < high)
                    out[found++] = pkv_candidate(x[i], i);
    }
    return found;
}

/* Sorts keys that are in ascending id order: insertion for few, stable radix over the logit half for many. */
static inline void pkv_sort_candidates(uint64_t *a, uint64_t *swap, int64_t n)
{
    if (n <= 48) {
        for (int64_t i = 1; i < n; i++) {
            uint64_t key = a[i];
            int64_t j = i;
            for (; j > 0 && a[j - 1] > key; j--)
                a[j] = a[j - 1];
            a[j] = key;
        }
        return;
    }
    for (int shift = 32; shift < 64; shift += 8) {
        int64_t starts[257] = {0};
        for (int64_t i = 0; i < n; i++)
            starts[((a[i] >> shift) & 255) + 1]++;
        if (starts[((a[0] >> shift) & 255) + 1] < n) {
            for (int b = 0; b < 256; b++)
                starts[b + 1] += starts[b];
            for (int64_t i = 0; i < n; i++)
                swap[starts[(a[i] >> shift) & 255]++] = a[i];
            memcpy(a, swap, (size_t)n * sizeof *a);
        }
    }
}

/* How many of x[n] come before token in the order (logit descending, id ascending). */
static inline int64_t pkv_rank(const float *x, int64_t n, int64_t token)
{
    float own = x[token];
    int64_t before = 0;
    for (int64_t i = 0; i < token; i++)
        before += x[i] >= own;
    for (int64_t i = token + 1; i < n; i++)
        before += x[i] > own;
    return before;
}

/* Philox 4x32-10 (Salmon et al., SC11): one block of the stream `key` at `counter`, in place. */
static inline void pkv_philox(uint32_t c[4], uint32_t k0, uint32_t k1)
{
    for (int round = 0; round < 10; round++) {
        uint64_t p0 = (uint64_t)0xD2511F53u * c[0], p1 = (uint64_t)0xCD9E8D57u * c[2];
        uint32_t c1 = c[1], c3 = c[3];
        c[0] = (uint32_t)(p1 >> 32) ^ c1 ^ k0;
        c[1] = (uint32_t)p1;
        c[2] = (uint32_t)(p0 >> 32) ^ c3 ^ k1;
        c[3] = (uint32_t)p0;
        k0 += 0x9E3779B9u;
        k1 += 0xBB67AE85u;
    }
}

#endif
