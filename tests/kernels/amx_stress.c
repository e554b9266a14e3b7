/* The tiled matmul on all threads of a pool at once, under a storm of signals whose handlers use tiles too, and on the same pool in
 * children of forks; every result must be the scalar kernel's. Prints "calls <n> signals <n>"; status 1 and a line for a difference.
 *
 * With PKV_AMX_EMULATE the tiles are plain C, which no system saves around a handler: handlers then only count. */
#define _GNU_SOURCE
#include "cpu.h"
#include "pkv_kernels.h"
#include "threads.h"

#include <pthread.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/time.h>
#include <sys/wait.h>
#include <unistd.h>

enum { COLS = 288, PANELS = 5, TOKENS = 83, THREADS = 3, ROUNDS = 40, CHILDREN = 4, ROWS = 16 * PANELS, BLOCKS = COLS / 32 };

typedef struct outputs { float rows[TOKENS][ROWS]; } outputs;

static _Alignas(64) uint8_t data[PANELS * BLOCKS * 512], scales[PANELS * BLOCKS * 64];
static _Alignas(64) int8_t q[TOKENS * 320];
static float act_scale[TOKENS * BLOCKS], act_sum[TOKENS * BLOCKS];
static int32_t isum[TOKENS * BLOCKS], half_sum[TOKENS * BLOCKS];
static const int types[] = {PKV_W_Q4_0, PKV_W_Q4_1, PKV_W_Q8_0};
static outputs expected[3], found[THREADS];
static pkv_weight weights[3];
static pkv_act act = {.q = q, .scale = act_scale, .sum = act_sum, .isum = isum, .half = half_sum, .q_stride = 320, .b_stride = BLOCKS};
static atomic_int n_calls, n_signals;
static const pkv_kernels *tiled;

static void fill(void)
{
    uint32_t x = 1;
    for (size_t i = 0; i < sizeof data; i++)
        data[i] = (uint8_t)((x = x * 1664525u + 1013904223u) >> 24);
    for (size_t i = 0; i < sizeof scales / 2; i++)
        ((uint16_t *)scales)[i] = pkv_f32_to_f16(0.001f * (float)((x = x * 1664525u + 1013904223u) >> 24));
    for (int t = 0; t < TOKENS; t++)
        for (int b = 0; b < BLOCKS; b++) {
            int at = t * BLOCKS + b;
            for (int k = 0; k < 32; k++) {
                int8_t v = (int8_t)((int)((x = x * 1664525u + 1013904223u) >> 8) % 255 - 127);
                q[t * 320 + 32 * b + k] = v;
                isum[at] += v;
                half_sum[at] += k < 16 ? v : 0;
            }
            act_scale[at] = 0.01f * (float)(1 + at % 97);
            act_sum[at] = act_scale[at] * (float)isum[at];
        }
    for (int i = 0; i < 3; i++) {
        weights[i] = (pkv_weight){.data = data, .scales = scales, .n_rows = ROWS, .n_cols = COLS, .n_panels = PANELS, .type = types[i]};
        weights[i].panel_bytes = BLOCKS * (types[i] == PKV_W_Q8_0 ? 512 : 256);
        weights[i].scale_bytes = BLOCKS * (types[i] == PKV_W_Q4_1 ? 64 : 32);
        pkv_kernels_scalar.gemm[types[i]](expected[i].rows[0], &weights[i], &act, 0, PANELS, 0, TOKENS, ROWS, 0, 0);
    }
}

/* One call; 1 where it gives what the scalar kernel gave. */
static int equal(outputs *out, int i, int n_tokens)
{
    memset(out, 0xff, sizeof *out);
    tiled->gemm[types[i]](out->rows[0], &weights[i], &act, 0, PANELS, 0, n_tokens, ROWS, 0, 0);
    n_calls++;
    return !memcmp(out, &expected[i], sizeof out->rows[0] * (size_t)n_tokens);
}

static void fail(const char *where)
{
    static const char text[] = ": not the scalar kernel's result\n";
    if (write(2, where, strlen(where)) + write(2, text, sizeof text - 1))
        _exit(1);
}

static void handle(int number)
{
    (void)number;
    n_signals++;
#ifndef PKV_AMX_EMULATE
    static atomic_int busy;
    static outputs out;
    if (!atomic_exchange(&busy, 1)) {
        if (!equal(&out, 1, 17))
            fail("handler");
        busy = 0;
    }
#endif
}

static void job(void *arg, int thread, int n_threads)
{
    sigset_t all; /* workers block signals; here they take them */
    (void)n_threads;
    sigfillset(&all);
    pthread_sigmask(SIG_UNBLOCK, &all, NULL);
    for (int round = 0; round < ROUNDS; round++)
        if (!equal(&found[thread], (round + thread) % 3, 1 + (round * 7 + thread) % TOKENS))
            fail(arg);
}

int main(void)
{
    struct itimerval every = {{0, 2000}, {0, 2000}};
    int n_isas, status;
    const pkv_isa *isas = pkv_isa_table(&n_isas);
    uint64_t features = pkv_cpu_features();
#ifdef PKV_AMX_EMULATE
    features |= PKV_FEATURE_AMX_INT8;
#endif
    for (int i = 0; i < n_isas; i++)
        if (!strcmp(isas[i].name, "amx") && (features & isas[i].required) == isas[i].required)
            tiled = isas[i].kernels;
    if (!tiled)
        return fprintf(stderr, "amx_stress: no amx kernels on this machine\n"), 2;
    fill();
    pkv_pool *pool = pkv_pool_new(THREADS, 1);
    signal(SIGALRM, handle);
    setitimer(ITIMER_REAL, &every, NULL);
    if (!pool || pkv_pool_run(pool, job, "parent"))
        return 2;
    for (int i = 0; i < CHILDREN; i++) {
        pid_t child = fork();
        if (child == 0)
            _exit(pkv_pool_run(pool, job, "child") != 0);
        if (pkv_pool_run(pool, job, "parent beside a child"))
            return 2;
        while (waitpid(child, &status, 0) < 0)
            ;
        if (!WIFEXITED(status) || WEXITSTATUS(status))
            return fprintf(stderr, "amx_stress: a child ended with status %x\n", status), 1;
    }
    pkv_pool_free(pool);
    printf("calls %d signals %d\n", n_calls, n_signals);
    return 0;
}
