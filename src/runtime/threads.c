/* threads.c - a pool of POSIX threads. Workers take the next item from a shared counter.
 *
 * A round is opened and closed at a gate, one number: which round, whether it is open, how many
 * workers are inside. The caller closes the gate when the items run out and waits for the workers
 * inside, never for those that have not come: a round shorter than a wake-up costs no wake-up.
 * Workers and caller look at the gate for a while before they sleep; who sleeps says so first, so
 * that nobody takes a lock or calls the system while all are awake.
 *
 * Own pool instead of OpenMP: thread sanitizers do not see the barriers of OpenMP's runtime, so a
 * clean run under them would prove nothing, and its spinning workers fight the host program's. */
#define _GNU_SOURCE
#include "runtime/threads.h"

#include <pthread.h>
#include <sched.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>

#include "base/clock.h"
#include "base/status.h"

enum { MAX_THREADS = 256 };

/* How long a thread looks before it sleeps: longer than the gap between two phases of an operator
 * or two layers of a model, shorter than anything that shows on a processor's load. */
static const double look_seconds = 50e-6;
enum { LOOKS = 16 };    // between two looks at the clock

typedef struct worker {
    mn_threads *threads;
    int index;
    pthread_t handle;
} worker;

/* The gate: a worker's entry and its leaving add and subtract 1. */
#define INSIDE UINT64_C(0xffff)
#define OPEN UINT64_C(0x10000)
#define ROUND UINT64_C(0x20000)

/* Counts forks on the way from the first process to this one. */
static _Atomic int generation;

static void count_fork(void) {
    atomic_fetch_add(&generation, 1);
}

static void watch_forks(void) {
    pthread_atfork(NULL, NULL, count_fork);
}

struct mn_threads {
    int n_threads;
    int generation;             // of the process that made them
    bool resting;
    worker *workers;            // n_threads - 1 of them; the caller is worker 0
    int n_started;
    mn_item_fn fn;              // of the round: written while nobody is inside
    void *context;
    int64_t n_items;
    int caller_cpu;
    _Atomic bool stop;
    pthread_mutex_t lock;
    pthread_cond_t wake, done;
    _Atomic int n_asleep;       // workers that wait, or are about to wait, for `wake`
    _Atomic int caller_asleep;
    _Alignas(64) _Atomic uint64_t gate;
    _Alignas(64) _Atomic int64_t next;
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
#elif defined(__aarch64__)
    __asm__ volatile("yield");
#endif
}

static uint64_t round_of(uint64_t gate) {
    return gate / ROUND;
}

/* A round that this worker has not been in, or the end. */
static bool is_called(mn_threads *threads, uint64_t seen) {
    const uint64_t gate = atomic_load(&threads->gate);
    return ((gate & OPEN) && round_of(gate) != seen) || atomic_load(&threads->stop);
}

static bool is_empty(mn_threads *threads, uint64_t unused) {
    (void)unused;
    return (atomic_load(&threads->gate) & INSIDE) == 0;
}

/* Looks for `ready` for a while, then sleeps until it holds; true if it slept. The other side
 * changes what `ready` sees first and reads `asleep` next, this side the other way round: one of
 * the two notices. */
static bool wait_until(mn_threads *threads, bool (*ready)(mn_threads *threads, uint64_t seen),
                       uint64_t seen, pthread_cond_t *signal, _Atomic int *asleep) {
    double until = 0.0;
    for (int i = 0;; i++) {
        if (ready(threads, seen)) return false;
        relax();
        if (i % LOOKS != LOOKS - 1) continue;
        const double now = mn_seconds();
        if (until == 0.0) until = now + look_seconds;
        if (now > until) break;
    }
    pthread_mutex_lock(&threads->lock);
    atomic_fetch_add(asleep, 1);
    while (!ready(threads, seen)) pthread_cond_wait(signal, &threads->lock);
    atomic_fetch_sub(asleep, 1);
    pthread_mutex_unlock(&threads->lock);
    return true;
}

/* A worker that wakes up on its caller's processor goes to another one. Systems that pack threads,
 * to save power or to share a host, put it there and may leave it: two threads, half the speed. */
static void step_aside(const mn_threads *threads) {
    cpu_set_t all, others;
    const int cpu = sched_getcpu();
    if (cpu < 0 || cpu != threads->caller_cpu) return;
    if (sched_getaffinity(0, sizeof all, &all) != 0) return;
    others = all;
    CPU_CLR((size_t)cpu, &others);
    if (CPU_COUNT(&others) == 0 || sched_setaffinity(0, sizeof others, &others) != 0) return;
    (void)sched_setaffinity(0, sizeof all, &all);    // free again, from its new place
}

/* Goes in while the gate is open; *seen becomes the round that was there. */
static bool enter(mn_threads *threads, uint64_t *seen) {
    uint64_t gate = atomic_load(&threads->gate);
    do {
        if (!(gate & OPEN)) return false;
    } while (!atomic_compare_exchange_weak(&threads->gate, &gate, gate + 1));
    *seen = round_of(gate);
    return true;
}

static void leave(mn_threads *threads) {
    const uint64_t gate = atomic_fetch_sub(&threads->gate, 1) - 1;
    if ((gate & (INSIDE | OPEN)) != 0 || atomic_load(&threads->caller_asleep) == 0) return;
    pthread_mutex_lock(&threads->lock);
    pthread_cond_signal(&threads->done);
    pthread_mutex_unlock(&threads->lock);
}

static void *work(void *argument) {
    worker *self = argument;
    mn_threads *threads = self->threads;
    for (uint64_t seen = 0;;) {
        const bool slept =
            wait_until(threads, is_called, seen, &threads->wake, &threads->n_asleep);
        if (atomic_load(&threads->stop)) return NULL;
        if (!enter(threads, &seen)) continue;
        if (slept) step_aside(threads);
        take_items(threads, self->index);
        leave(threads);
    }
}

static int available_cores(void) {
    cpu_set_t set;
    if (sched_getaffinity(0, sizeof set, &set) != 0) return 1;
    const int count = CPU_COUNT(&set);
    return count < 1 ? 1 : count;
}

static void wake_all(mn_threads *threads) {
    if (atomic_load(&threads->n_asleep) == 0) return;
    pthread_mutex_lock(&threads->lock);
    pthread_cond_broadcast(&threads->wake);
    pthread_mutex_unlock(&threads->lock);
}

mn_status mn_threads_create(mn_threads **out, int n_threads) {
    if (n_threads < 0 || n_threads > MAX_THREADS) {
        return mn_fail(MN_ERR_ARGUMENT, "threads: %d is not in 0..%d", n_threads, MAX_THREADS);
    }
    if (n_threads == 0) n_threads = available_cores();
    mn_threads *threads = aligned_alloc(_Alignof(mn_threads), sizeof *threads);
    worker *workers = calloc((size_t)n_threads, sizeof *workers);
    if (!threads || !workers) {
        free(threads);
        free(workers);
        return mn_fail(MN_ERR_MEMORY, "no memory for %d threads", n_threads);
    }
    static pthread_once_t once = PTHREAD_ONCE_INIT;
    pthread_once(&once, watch_forks);
    memset(threads, 0, sizeof *threads);
    threads->generation = atomic_load(&generation);
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

bool mn_threads_forked(const mn_threads *threads) {
    return threads && threads->generation != atomic_load(&generation);
}

static void end_workers(mn_threads *threads) {
    atomic_store(&threads->stop, true);
    wake_all(threads);
    for (int i = 0; i < threads->n_started; i++) pthread_join(threads->workers[i].handle, NULL);
    pthread_cond_destroy(&threads->wake);
    pthread_cond_destroy(&threads->done);
    pthread_mutex_destroy(&threads->lock);
}

void mn_threads_destroy(mn_threads *threads) {
    if (!threads) return;
    if (!mn_threads_forked(threads)) end_workers(threads);
    free(threads->workers);
    free(threads);
}

int mn_threads_count(const mn_threads *threads) {
    return threads->n_threads;
}

void mn_threads_rest(mn_threads *threads, bool resting) {
    threads->resting = resting;
}

void mn_threads_run(mn_threads *threads, int64_t n_items, mn_item_fn fn, void *context) {
    if (threads->resting) return;
    if (n_items <= 1 || threads->n_started == 0 || mn_threads_forked(threads)) {
        for (int64_t item = 0; item < n_items; item++) fn(context, item, 0);
        return;
    }
    threads->fn = fn;
    threads->context = context;
    threads->n_items = n_items;
    threads->caller_cpu = sched_getcpu();
    atomic_store(&threads->next, 0);
    atomic_fetch_add(&threads->gate, ROUND | OPEN);
    wake_all(threads);
    take_items(threads, 0);
    atomic_fetch_and(&threads->gate, ~OPEN);
    wait_until(threads, is_empty, 0, &threads->done, &threads->caller_asleep);
}
