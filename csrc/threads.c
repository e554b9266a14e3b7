#define _GNU_SOURCE
#include "threads.h"

#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#if defined(__x86_64__)
#include <immintrin.h>
#define PAUSE() _mm_pause()
#elif defined(__aarch64__)
#define PAUSE() __asm__ volatile("yield" ::: "memory")
#else
#define PAUSE() ((void)0)
#endif

enum { SPIN_NANOSECONDS = 50000, LINE = 64 };

/* One word that threads wait on: it only ever changes by counting up. Waiters spin, then park on the condition. */
typedef struct event {
    _Alignas(LINE) atomic_uint value;
    _Alignas(LINE) atomic_uint parked;
    pthread_mutex_t mutex;
    pthread_cond_t changed;
} event;

struct pkv_pool {
    event job;     /* counts jobs started */
    event phase;   /* counts barriers passed */
    _Alignas(LINE) atomic_int arrived;
    pkv_job_fn *fn;
    void *arg;
    int n, spins, started, stopping;
    atomic_uint generation; /* of the process the threads belong to; odd while the pool is rebuilt after a fork */
    pthread_t *threads;
    pthread_mutex_t turn;
};

/* Counts forks by two: the only state of this directory, since a fork happens to the process and not to a pool. */
static atomic_uint process_generation;
static pthread_once_t fork_watch = PTHREAD_ONCE_INIT;
static void forked(void) { atomic_fetch_add(&process_generation, 2u); }
static void watch_forks(void) { pthread_atfork(NULL, NULL, forked); }

typedef struct worker_start {
    pkv_pool *pool;
    int thread;
    unsigned seen;
} worker_start;

static void event_init(event *e)
{
    atomic_store(&e->value, 0u);
    atomic_store(&e->parked, 0u);
    pthread_mutex_init(&e->mutex, NULL);
    pthread_cond_init(&e->changed, NULL);
}

static int64_t nanoseconds(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (int64_t)t.tv_sec * 1000000000 + t.tv_nsec;
}

static void event_wait(event *e, unsigned old, int spin)
{
    if (spin) {
        int64_t deadline = 0;
        for (unsigned i = 1;; i++) {
            if (atomic_load_explicit(&e->value, memory_order_acquire) != old)
                return;
            PAUSE();
            if (i % 256 == 0) {
                int64_t now = nanoseconds();
                if (!deadline)
                    deadline = now + SPIN_NANOSECONDS;
                else if (now > deadline)
                    break;
            }
        }
    }
    pthread_mutex_lock(&e->mutex);
    atomic_fetch_add(&e->parked, 1u);
    while (atomic_load(&e->value) == old)
        pthread_cond_wait(&e->changed, &e->mutex);
    atomic_fetch_sub(&e->parked, 1u);
    pthread_mutex_unlock(&e->mutex);
}

/* Either the waiter sees the new value before it parks, or we see it parked: both sides are sequentially consistent. */
static void event_raise(event *e)
{
    atomic_fetch_add(&e->value, 1u);
    if (atomic_load(&e->parked)) {
        pthread_mutex_lock(&e->mutex);
        pthread_cond_broadcast(&e->changed);
        pthread_mutex_unlock(&e->mutex);
    }
}

#if defined(__x86_64__)
uint64_t pkv_float_enter(void)
{
    unsigned mode = _mm_getcsr();
    _mm_setcsr(0x1f80u);
    return mode;
}
void pkv_float_leave(uint64_t mode) { _mm_setcsr((unsigned)mode); }
#elif defined(__aarch64__)
uint64_t pkv_float_enter(void)
{
    uint64_t mode;
    __asm__ volatile("mrs %0, fpcr" : "=r"(mode));
    __asm__ volatile("msr fpcr, %0" ::"r"((uint64_t)0));
    return mode;
}
void pkv_float_leave(uint64_t mode) { __asm__ volatile("msr fpcr, %0" ::"r"(mode)); }
#else
uint64_t pkv_float_enter(void) { return 0; }
void pkv_float_leave(uint64_t mode) { (void)mode; }
#endif

void pkv_pool_barrier(pkv_pool *pool)
{
    unsigned phase;
    if (pool->n == 1)
        return;
    phase = atomic_load(&pool->phase.value);
    if (atomic_fetch_add(&pool->arrived, 1) + 1 == pool->n) {
        atomic_store(&pool->arrived, 0);
        event_raise(&pool->phase);
    } else
        event_wait(&pool->phase, phase, pool->spins);
}

static void run_one(pkv_pool *pool, int thread)
{
    uint64_t mode = pkv_float_enter();
    pool->fn(pool->arg, thread, pool->n);
    pkv_float_leave(mode);
    pkv_pool_barrier(pool);
}

static void *work(void *p)
{
    worker_start start = *(worker_start *)p;
    pkv_pool *pool = start.pool;
    free(p);
    for (;;) {
        event_wait(&pool->job, start.seen, pool->spins);
        start.seen++;
        if (pool->stopping)
            return NULL;
        run_one(pool, start.thread);
    }
}

static void reset(pkv_pool *pool)
{
    event_init(&pool->job);
    event_init(&pool->phase);
    atomic_store(&pool->arrived, 0);
    pool->started = 0;
    pool->stopping = 0;
}

pkv_pool *pkv_pool_new(int n_threads, int n_processors)
{
    pkv_pool *pool = aligned_alloc(LINE, (sizeof(pkv_pool) + LINE - 1) / LINE * LINE);
    if (!pool)
        return NULL;
    memset(pool, 0, sizeof *pool);
    pool->threads = calloc((size_t)n_threads, sizeof(pthread_t));
    if (!pool->threads) {
        free(pool);
        return NULL;
    }
    pool->n = n_threads;
    pool->spins = n_threads <= n_processors;
    pthread_once(&fork_watch, watch_forks);
    atomic_store(&pool->generation, atomic_load(&process_generation));
    pthread_mutex_init(&pool->turn, NULL);
    reset(pool);
    return pool;
}

static void stop(pkv_pool *pool)
{
    pool->stopping = 1;
    event_raise(&pool->job);
    for (int i = 1; i <= pool->started; i++)
        pthread_join(pool->threads[i], NULL);
    reset(pool);
}

void pkv_pool_free(pkv_pool *pool)
{
    if (!pool)
        return;
    if (atomic_load(&pool->generation) == atomic_load(&process_generation) && pool->started)
        stop(pool);
    free(pool->threads);
    free(pool);
}

int pkv_pool_threads(const pkv_pool *pool) { return pool->n; }

/* Workers take no signals but those of their own faults: handlers run on the application's threads. */
static int start(pkv_pool *pool)
{
    static const int faults[] = {SIGSEGV, SIGBUS, SIGFPE, SIGILL};
    sigset_t mask, before;
    sigfillset(&mask);
    for (int i = 0; i < 4; i++)
        sigdelset(&mask, faults[i]);
    pthread_sigmask(SIG_SETMASK, &mask, &before);
    while (pool->started < pool->n - 1) {
        int thread = pool->started + 1;
        worker_start *w = malloc(sizeof *w);
        if (!w)
            break;
        *w = (worker_start){pool, thread, atomic_load(&pool->job.value)};
        if (pthread_create(&pool->threads[thread], NULL, work, w)) {
            free(w);
            break;
        }
        pool->started = thread;
    }
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    if (pool->started == pool->n - 1)
        return 0;
    stop(pool);
    return -1;
}

/* In the child of a fork the workers, and whoever held the turn, stayed behind: one caller rebuilds, the others wait for it. */
static void adopt(pkv_pool *pool)
{
    unsigned now = atomic_load(&process_generation), seen;
    while ((seen = atomic_load(&pool->generation)) != now) {
        if (seen != now + 1 && atomic_compare_exchange_strong(&pool->generation, &seen, now + 1)) {
            pthread_mutex_init(&pool->turn, NULL);
            reset(pool);
            atomic_store(&pool->generation, now);
            return;
        }
        sched_yield();
    }
}

int pkv_pool_run(pkv_pool *pool, pkv_job_fn *job, void *arg)
{
    int status = 0;
    adopt(pool);
    pthread_mutex_lock(&pool->turn);
    if (pool->started < pool->n - 1)
        status = start(pool);
    if (status == 0) {
        pool->fn = job;
        pool->arg = arg;
        if (pool->n > 1)
            event_raise(&pool->job);
        run_one(pool, 0);
    }
    pthread_mutex_unlock(&pool->turn);
    return status;
}

int64_t pkv_claim(int64_t *counter, int64_t n, int64_t chunk, int64_t *stop)
{
    int64_t start = __atomic_fetch_add(counter, chunk, __ATOMIC_RELAXED);
    *stop = start + chunk < n ? start + chunk : n;
    return start;
}
