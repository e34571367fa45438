/* Threads: they sleep between passes and spin within one. */
#pragma once
#include <pthread.h>
#include <sched.h>
#include <unistd.h>
#include "structures.h"

static struct {
    pthread_mutex_t lock;
    pthread_cond_t wake, done;
    pthread_t threads[MAX_THREADS];
    int started, wanted, finished;
    long round;
    pid_t owner;
    Work *work;
    atomic_long arrived, generation;
} pool = {.lock = PTHREAD_MUTEX_INITIALIZER, .wake = PTHREAD_COND_INITIALIZER, .done = PTHREAD_COND_INITIALIZER};

INLINE void pause_briefly(void) {
#if defined(__x86_64__)
    _mm_pause();
#endif
}

static void barrier(int threads) {
    if (threads == 1) return;
    long generation = atomic_load_explicit(&pool.generation, memory_order_acquire);
    if (atomic_fetch_add_explicit(&pool.arrived, 1, memory_order_acq_rel) == threads - 1) {
        atomic_store_explicit(&pool.arrived, 0, memory_order_relaxed);
        atomic_fetch_add_explicit(&pool.generation, 1, memory_order_release);
        return;
    }
    for (long spins = 0; atomic_load_explicit(&pool.generation, memory_order_acquire) == generation; spins++) {
        pause_briefly();
        if (spins > 4000) sched_yield(); /* someone else computes here as well */
    }
}

static void run_thread(Work *work, int thread, int threads);

static void *sleeper(void *argument) {
    int thread = (int)(intptr_t)argument;
    long seen = 0;
    pthread_mutex_lock(&pool.lock);
    for (;;) {
        while (pool.round == seen) pthread_cond_wait(&pool.wake, &pool.lock);
        seen = pool.round;
        if (thread >= pool.wanted) continue;
        pthread_mutex_unlock(&pool.lock);
        run_thread(pool.work, thread, pool.wanted);
        pthread_mutex_lock(&pool.lock);
        if (++pool.finished == pool.wanted - 1) pthread_cond_signal(&pool.done);
    }
    return NULL;
}

static int start_threads(int wanted) { /* returns how many there are, the caller included */
    if (pool.owner != getpid()) { /* threads do not survive a fork */
        pool.owner = getpid();
        pool.started = 0;
        pool.round = 0;
        pthread_mutex_init(&pool.lock, NULL);
        pthread_cond_init(&pool.wake, NULL);
        pthread_cond_init(&pool.done, NULL);
    }
    if (wanted > MAX_THREADS) wanted = MAX_THREADS;
    while (pool.started < wanted - 1) {
        pthread_attr_t attributes;
        pthread_attr_init(&attributes);
        pthread_attr_setdetachstate(&attributes, PTHREAD_CREATE_DETACHED);
        int failed = pthread_create(&pool.threads[pool.started], &attributes, sleeper, (void *)(intptr_t)(pool.started + 1));
        pthread_attr_destroy(&attributes);
        if (failed) break;
        pool.started++;
    }
    return wanted < pool.started + 1 ? wanted : pool.started + 1;
}

/* Where the process has an OpenMP library already, its threads are taken: they may still be spinning behind the last
 * operator of somebody else, and would keep ours from the cores. */
static struct {
    void (*parallel)(void (*work)(void *), void *argument, unsigned threads, unsigned flags);
    int (*num_threads)(void);
} openmp;

void draftree_use_openmp(void *parallel, void *num_threads) {
    openmp.parallel = (void (*)(void (*)(void *), void *, unsigned, unsigned))parallel;
    openmp.num_threads = (int (*)(void))num_threads;
}

typedef struct {
    Work *work;
    atomic_int next_thread;
} Team;

static void run_in_team(void *argument) {
    Team *team = argument;
    run_thread(team->work, atomic_fetch_add(&team->next_thread, 1), openmp.num_threads());
}

/* calls `work` on every thread of a team, where there is one; else once */
void draftree_in_parallel(void (*work)(void *), void *argument, int threads) {
    if (openmp.parallel != NULL) openmp.parallel(work, argument, (unsigned)threads, 0);
    else work(argument);
}

static void run_threads(Work *work, int threads) {
    if (threads == 1) {
        run_thread(work, 0, 1);
        return;
    }
    atomic_store(&pool.arrived, 0);
    if (openmp.parallel != NULL) {
        Team team = {.work = work};
        openmp.parallel(run_in_team, &team, (unsigned)threads, 0);
        return;
    }
    pthread_mutex_lock(&pool.lock);
    pool.work = work;
    pool.wanted = threads;
    pool.finished = 0;
    pool.round++;
    pthread_cond_broadcast(&pool.wake);
    pthread_mutex_unlock(&pool.lock);
    run_thread(work, 0, threads);
    pthread_mutex_lock(&pool.lock);
    while (pool.finished < threads - 1) pthread_cond_wait(&pool.done, &pool.lock);
    pthread_mutex_unlock(&pool.lock);
}
