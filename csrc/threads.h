/* A small thread pool for jobs whose threads all run the same list of operations with barriers between dependent ones.
 *
 * The caller of pkv_pool_run is thread 0; n - 1 workers are started at the first run, and again after a fork (the child finds
 * them gone). Waiting spins for a short time, then parks; a pool with more threads than processors parks at once. Workers block
 * every signal but those of faults.
 * Each thread runs its job with rounding to nearest and subnormals kept, and gets its own mode back afterwards.
 */
#ifndef PKV_THREADS_H
#define PKV_THREADS_H

#include <stdint.h>

typedef struct pkv_pool pkv_pool;
typedef void pkv_job_fn(void *arg, int thread, int n_threads);

pkv_pool *pkv_pool_new(int n_threads, int n_processors); /* NULL: no memory */
void pkv_pool_free(pkv_pool *pool);                      /* no job may be running */
int pkv_pool_threads(const pkv_pool *pool);

/* Run job on all threads and return when all are done. 0, or -1 when a thread cannot be started (then nothing ran).
 * Calls from several threads on one pool take turns. */
int pkv_pool_run(pkv_pool *pool, pkv_job_fn *job, void *arg);

/* Inside a job, called by every thread: all have arrived when it returns, and see each other's writes. */
void pkv_pool_barrier(pkv_pool *pool);

/* Inside a job: claim the next range of at most `chunk` of n units through a counter that starts at 0. Returns the start and
 * sets *stop; a start >= n means nothing is left. */
int64_t pkv_claim(int64_t *counter, int64_t n, int64_t chunk, int64_t *stop);

/* Rounding to nearest and subnormals kept on the calling thread, for arithmetic outside a job; leave takes what enter returned. */
uint64_t pkv_float_enter(void);
void pkv_float_leave(uint64_t mode);

#endif
