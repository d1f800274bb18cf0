/* threads.c - a pool of POSIX threads. Workers take the next item from a shared counter.
 *
 * Own pool instead of OpenMP: thread sanitizers do not see the barriers of OpenMP's runtime, so a
 * clean run under them would prove nothing, and its spinning workers fight the host program's. */
#define _GNU_SOURCE
#include "runtime/threads.h"

#include <pthread.h>
#include <sched.h>
#include <stdatomic.h>
#include <stdlib.h>

#include "base/status.h"

enum { MAX_THREADS = 256, SPINS = 2000 };

typedef struct worker {
    mn_threads *threads;
    int index;
    pthread_t handle;
} worker;

struct mn_threads {
    int n_threads;
    worker *workers;            // n_threads - 1 of them; the caller is worker 0
    int n_started;
    pthread_mutex_t lock;
    pthread_cond_t wake, done;
    _Atomic uint64_t round;     // one more for each call of run
    bool stop;
    int n_busy;                 // workers that have not finished this round
    mn_item_fn fn;
    void *context;
    int64_t n_items;
    _Atomic int64_t next;
};

static void take_items(mn_threads *threads, int index) {
    for (;;) {
        const int64_t item = atomic_fetch_add(&threads->next, 1);
        if (item >= threads->n_items) return;
        threads->fn(threads->context, item, index);
    }
}

/* Tells the core that this is a waiting loop. */
static void relax(void) {
#if defined(__x86_64__) || defined(__i386__)
    __builtin_ia32_pause();
#endif
}

/* A short spin first: the next phase of the same operator usually follows within microseconds. */
static void wait_for_round(mn_threads *threads, uint64_t seen) {
    for (int i = 0; i < SPINS && atomic_load(&threads->round) == seen; i++) relax();
    pthread_mutex_lock(&threads->lock);
    while (atomic_load(&threads->round) == seen) pthread_cond_wait(&threads->wake, &threads->lock);
    pthread_mutex_unlock(&threads->lock);
}

static void *work(void *argument) {
    worker *self = argument;
    mn_threads *threads = self->threads;
    for (uint64_t seen = 0;;) {
        wait_for_round(threads, seen);
        seen++;
        if (threads->stop) return NULL;
        take_items(threads, self->index);
        pthread_mutex_lock(&threads->lock);
        if (--threads->n_busy == 0) pthread_cond_signal(&threads->done);
        pthread_mutex_unlock(&threads->lock);
    }
}

static int available_cores(void) {
    cpu_set_t set;
    if (sched_getaffinity(0, sizeof set, &set) != 0) return 1;
    const int count = CPU_COUNT(&set);
    return count < 1 ? 1 : count;
}

/* Starts a new round under the lock; workers see fn, context and n_items through it. */
static void open_round(mn_threads *threads, int64_t n_items, mn_item_fn fn, void *context) {
    pthread_mutex_lock(&threads->lock);
    threads->fn = fn;
    threads->context = context;
    threads->n_items = n_items;
    atomic_store(&threads->next, 0);
    threads->n_busy = threads->n_started;
    atomic_fetch_add(&threads->round, 1);
    pthread_cond_broadcast(&threads->wake);
    pthread_mutex_unlock(&threads->lock);
}

mn_status mn_threads_create(mn_threads **out, int n_threads) {
    if (n_threads < 0 || n_threads > MAX_THREADS) {
        return mn_fail(MN_ERR_ARGUMENT, "threads: %d is not in 0..%d", n_threads, MAX_THREADS);
    }
    if (n_threads == 0) n_threads = available_cores();
    mn_threads *threads = calloc(1, sizeof *threads);
    worker *workers = calloc((size_t)n_threads, sizeof *workers);
    if (!threads || !workers) {
        free(threads);
        free(workers);
        return mn_fail(MN_ERR_MEMORY, "no memory for %d threads", n_threads);
    }
    threads->n_threads = n_threads;
    threads->workers = workers;
    pthread_mutex_init(&threads->lock, NULL);
    pthread_cond_init(&threads->wake, NULL);
    pthread_cond_init(&threads->done, NULL);
    for (int i = 1; i < n_threads; i++) {
        worker *w = &workers[threads->n_started];
        *w = (worker){ .threads = threads, .index = i };
        if (pthread_create(&w->handle, NULL, work, w) != 0) {
            mn_threads_destroy(threads);
            return mn_fail(MN_ERR_MEMORY, "cannot start thread %d of %d", i + 1, n_threads);
        }
        threads->n_started++;
    }
    *out = threads;
    return MN_OK;
}

void mn_threads_destroy(mn_threads *threads) {
    if (!threads) return;
    pthread_mutex_lock(&threads->lock);
    threads->stop = true;
    atomic_fetch_add(&threads->round, 1);
    pthread_cond_broadcast(&threads->wake);
    pthread_mutex_unlock(&threads->lock);
    for (int i = 0; i < threads->n_started; i++) pthread_join(threads->workers[i].handle, NULL);
    pthread_cond_destroy(&threads->wake);
    pthread_cond_destroy(&threads->done);
    pthread_mutex_destroy(&threads->lock);
    free(threads->workers);
    free(threads);
}

int mn_threads_count(const mn_threads *threads) {
    return threads->n_threads;
}

void mn_threads_run(mn_threads *threads, int64_t n_items, mn_item_fn fn, void *context) {
    if (n_items <= 1 || threads->n_started == 0) {
        for (int64_t item = 0; item < n_items; item++) fn(context, item, 0);
        return;
    }
    open_round(threads, n_items, fn, context);
    take_items(threads, 0);
    pthread_mutex_lock(&threads->lock);
    while (threads->n_busy > 0) pthread_cond_wait(&threads->done, &threads->lock);
    pthread_mutex_unlock(&threads->lock);
}
