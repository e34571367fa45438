/* A thread pool without a fixed assignment of work: threads take pieces of a phase, and the caller
 * waits only for threads that have started.
 *
 * On a busy machine a thread may get its core milliseconds late, several times the duration of a
 * small pass. The caller starts at once and takes all pieces that no other thread has taken.
 */
#pragma once
#include <pthread.h>
#include <sched.h>
#include <unistd.h>
#include "structures.h"

typedef void (*Task)(void *argument, int thread);

enum {
    /* some tenths of a millisecond: after a yield to another program a thread may wait milliseconds
     */
    SPINS_BEFORE_YIELD = 20000,
    SPINS_BEFORE_SLEEP = 60000, /* between two tasks */
    SPINS_BEFORE_OTHERS = 1000, /* at the end of a phase of a team */
};

static struct {
    pthread_mutex_t busy, lock;
    pthread_cond_t wake;
    int started;
    pid_t owner;
    Task task;
    void *argument;
    int wanted;
    atomic_long round; /* odd while threads may join */
    atomic_int inside, sleeping;
} pool = {.busy = PTHREAD_MUTEX_INITIALIZER,
          .lock = PTHREAD_MUTEX_INITIALIZER,
          .wake = PTHREAD_COND_INITIALIZER};

INLINE void spin_once(void) {
#if defined(__x86_64__)
    _mm_pause();
#endif
}

INLINE void spin_or_yield(long spins) {
    spin_once();
    if (spins > SPINS_BEFORE_YIELD) sched_yield();
}

static int is_new_round(long round, long seen) { return round % 2 && round != seen; }

static long next_round(long seen) {
    long round;
    for (long spins = 0; spins < SPINS_BEFORE_SLEEP; spins++) {
        if (is_new_round(round = atomic_load(&pool.round), seen)) return round;
        spin_once();
    }
    pthread_mutex_lock(&pool.lock);
    atomic_fetch_add(&pool.sleeping, 1);
    while (!is_new_round(round = atomic_load(&pool.round), seen))
        pthread_cond_wait(&pool.wake, &pool.lock);
    atomic_fetch_sub(&pool.sleeping, 1);
    pthread_mutex_unlock(&pool.lock);
    return round;
}

static void *worker(void *argument) {
    const int thread = (int)(intptr_t)argument;
    for (long seen = 0;;) {
        seen = next_round(seen);
        atomic_fetch_add(&pool.inside, 1);
        /* the round is still open, so the caller waits for this thread */
        if (atomic_load(&pool.round) == seen && thread < pool.wanted)
            pool.task(pool.argument, thread);
        atomic_fetch_sub(&pool.inside, 1);
    }
    return NULL;
}

static int start_threads(int wanted) { /* returns their number with the caller */
    if (pool.owner != getpid()) {      /* threads do not survive a fork */
        pool.owner = getpid();
        pool.started = 0;
        atomic_store(&pool.inside, 0);
        atomic_store(&pool.sleeping, 0);
        pthread_mutex_init(&pool.lock, NULL);
        pthread_cond_init(&pool.wake, NULL);
    }
    if (wanted > MAX_THREADS) wanted = MAX_THREADS;
    while (pool.started < wanted - 1) {
        pthread_t thread;
        pthread_attr_t attributes;
        pthread_attr_init(&attributes);
        pthread_attr_setdetachstate(&attributes, PTHREAD_CREATE_DETACHED);
        int failed = pthread_create(&thread, &attributes, worker,
                                    (void *)(intptr_t)(pool.started + 1));
        pthread_attr_destroy(&attributes);
        if (failed) break;
        pool.started++;
    }
    return wanted < pool.started + 1 ? wanted : pool.started + 1;
}

/* Calls `task` on this thread and on every thread that joins before that call ends. */
void draftree_in_parallel(Task task, void *argument, int threads) {
    if (threads <= 1) {
        task(argument, 0);
        return;
    }
    pthread_mutex_lock(&pool.busy);
    pool.task = task;
    pool.argument = argument;
    pool.wanted = start_threads(threads);
    atomic_fetch_add(&pool.round, 1);
    if (atomic_load(&pool.sleeping)) {
        pthread_mutex_lock(&pool.lock);
        pthread_cond_broadcast(&pool.wake);
        pthread_mutex_unlock(&pool.lock);
    }
    task(argument, 0);
    atomic_fetch_add(&pool.round, 1);
    for (long spins = 0; atomic_load(&pool.inside); spins++) spin_or_yield(spins);
    pthread_mutex_unlock(&pool.busy);
}

INLINE int64_t take_piece(const Work *work, int phase) {
    return atomic_fetch_add_explicit(&work->phases[phase].taken, 1, memory_order_relaxed);
}

/* Waits until all pieces of a phase are done. */
static int wait_for_phase(const Work *work, int phase, int64_t own, int64_t pieces) {
    atomic_long *done = &work->phases[phase].done;
    if (own) atomic_fetch_add_explicit(done, own, memory_order_release);
    for (long spins = 0; atomic_load_explicit(done, memory_order_acquire) < pieces; spins++)
        spin_or_yield(spins);
    return 0;
}

static _Thread_local long meetings; /* of this thread's team, those of earlier passes included */

/* Waits until all processes of a team have done a phase. Each thread comes here after the phase's
 * pieces of its own process are done; without a team it goes on. */
INLINE void meet(const Work *work, int phase) {
    Team *team = work->pass->team;
    if (team == NULL) return;
    const long wanted = ++meetings * work->pass->team_size;
    if (atomic_fetch_add_explicit(&work->phases[phase].met, 1, memory_order_acq_rel) == 0)
        atomic_fetch_add_explicit(&team->arrived, 1, memory_order_acq_rel);
    for (long spins = 0; atomic_load_explicit(&team->arrived, memory_order_acquire) < wanted;
         spins++) {
        spin_once();
        if (spins > SPINS_BEFORE_OTHERS) sched_yield(); /* the others may need this core */
    }
}

/* Rows that this process of a team computes for all: its number of them, and the row of each. */
INLINE int64_t num_own_rows(const Work *work, int64_t rows) {
    const Pass *pass = work->pass;
    return pass->team == NULL ? rows : (rows - pass->team_rank + pass->team_size - 1) / pass->team_size;
}
INLINE int64_t own_row(const Work *work, int64_t index) {
    const Pass *pass = work->pass;
    return pass->team == NULL ? index : index * pass->team_size + pass->team_rank;
}

/* Runs every piece of a phase once, on any thread; after the loop all are done. */
#define EACH(index, pieces, phase) \
    for (int64_t own = 0, index; \
         (index = take_piece(work, phase)) < (pieces) || wait_for_phase(work, phase, own, pieces); \
         own++)
