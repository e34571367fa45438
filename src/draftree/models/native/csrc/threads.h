/* Threads that come when they can: they take pieces of the work, and only those that have come are
 * waited for.
 *
 * On a machine that does something else as well, a thread may get its core milliseconds late,
 * several times as long as a small pass. Whoever calls begins at once and does all that nobody else
 * has taken.
 */
#pragma once
#include <pthread.h>
#include <sched.h>
#include <unistd.h>
#include "structures.h"

typedef void (*Task)(void *argument, int thread);

enum {
    PATIENCE = 20000, /* spins, some tenths of a millisecond: who yields to another program may wait
                         for milliseconds */
    WAKEFUL = 60000   /* spins between two works before a thread sleeps */
};

static struct {
    pthread_mutex_t busy, lock;
    pthread_cond_t wake;
    int started;
    pid_t owner;
    Task task;
    void *argument;
    int wanted;
    atomic_long round; /* odd: who comes may enter */
    atomic_int inside, sleeping;
} pool = {.busy = PTHREAD_MUTEX_INITIALIZER,
          .lock = PTHREAD_MUTEX_INITIALIZER,
          .wake = PTHREAD_COND_INITIALIZER};

INLINE void pause_briefly(void) {
#if defined(__x86_64__)
    _mm_pause();
#endif
}

INLINE void wait_a_little(long spins) {
    pause_briefly();
    if (spins > PATIENCE) sched_yield();
}

static int is_new(long round, long seen) { return round % 2 && round != seen; }

static long next_round(long seen) {
    long round;
    for (long spins = 0; spins < WAKEFUL; spins++) {
        if (is_new(round = atomic_load(&pool.round), seen)) return round;
        pause_briefly();
    }
    pthread_mutex_lock(&pool.lock);
    atomic_fetch_add(&pool.sleeping, 1);
    while (!is_new(round = atomic_load(&pool.round), seen))
        pthread_cond_wait(&pool.wake, &pool.lock);
    atomic_fetch_sub(&pool.sleeping, 1);
    pthread_mutex_unlock(&pool.lock);
    return round;
}

static void *member(void *argument) {
    const int thread = (int)(intptr_t)argument;
    for (long seen = 0;;) {
        seen = next_round(seen);
        atomic_fetch_add(&pool.inside, 1);
        /* still open: the caller cannot leave before this thread does */
        if (atomic_load(&pool.round) == seen && thread < pool.wanted)
            pool.task(pool.argument, thread);
        atomic_fetch_sub(&pool.inside, 1);
    }
    return NULL;
}

static int start_threads(int wanted) { /* returns how many there are, the caller included */
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
        int failed = pthread_create(&thread, &attributes, member,
                                    (void *)(intptr_t)(pool.started + 1));
        pthread_attr_destroy(&attributes);
        if (failed) break;
        pool.started++;
    }
    return wanted < pool.started + 1 ? wanted : pool.started + 1;
}

/* Calls `task` here and on every thread that comes before the caller's own call ends. */
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
    for (long spins = 0; atomic_load(&pool.inside); spins++) wait_a_little(spins);
    pthread_mutex_unlock(&pool.busy);
}

INLINE int64_t take(const Work *work, int phase) {
    return atomic_fetch_add_explicit(&work->phases[phase].taken, 1, memory_order_relaxed);
}

/* Behind the last piece that a thread could take: until all are done. */
static int complete(const Work *work, int phase, int64_t own, int64_t pieces) {
    atomic_long *done = &work->phases[phase].done;
    if (own) atomic_fetch_add_explicit(done, own, memory_order_release);
    for (long spins = 0; atomic_load_explicit(done, memory_order_acquire) < pieces; spins++)
        wait_a_little(spins);
    return 0;
}

/* every piece of a phase once, by whichever thread comes for it; behind the loop all are done */
#define EACH(index, pieces, phase) \
    for (int64_t own = 0, index; \
         (index = take(work, phase)) < (pieces) || complete(work, phase, own, pieces); own++)
