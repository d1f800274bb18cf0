/* engines.c - see engines.h. A list of engines, the newest first, each with the requests it has. */
#include "server/engines.h"

#include <pthread.h>
#include <stdlib.h>

#include "base/clock.h"
#include "base/status.h"
#include "base/util.h"

typedef struct generation {
    mn_engine *engine;
    int64_t users;
    mn_metrics handed;             // what its successor began to count with
    struct generation *before;
} generation;

struct mn_engines {
    const mn_engine_options *options;
    pthread_mutex_t lock;
    generation *now;               // under the lock, and so are all users
};

static mn_status add_generation(mn_engines *all) {
    generation *g = calloc(1, sizeof *g);
    if (!g) return mn_fail(MN_ERR_MEMORY, "no memory for a model");
    const mn_status st = mn_engine_open(&g->engine, all->options);
    if (st != MN_OK) {
        free(g);
        return st;
    }
    pthread_mutex_lock(&all->lock);
    g->before = all->now;
    if (g->before) {
        static const mn_metrics nothing;
        mn_metrics counted = mn_engine_metrics(g->before->engine);
        counted.reloads++;
        mn_engine_count(g->engine, &counted, &nothing);
        counted.reloads--;
        g->before->handed = counted;
    }
    all->now = g;
    pthread_mutex_unlock(&all->lock);
    return MN_OK;
}

mn_status mn_engines_open(mn_engines **out, const mn_engine_options *options) {
    *out = NULL;
    mn_engines *all = calloc(1, sizeof *all);
    if (!all) return mn_fail(MN_ERR_MEMORY, "no memory for a server");
    all->options = options;
    pthread_mutex_init(&all->lock, NULL);
    const mn_status st = add_generation(all);
    if (st == MN_OK) *out = all;
    else mn_engines_close(all);
    return st;
}

void mn_engines_close(mn_engines *all) {
    if (!all) return;
    while (all->now) {
        generation *g = all->now;
        all->now = g->before;
        mn_engine_close(g->engine);
        free(g);
    }
    pthread_mutex_destroy(&all->lock);
    free(all);
}

mn_engine *mn_engines_take(mn_engines *all) {
    pthread_mutex_lock(&all->lock);
    all->now->users++;
    mn_engine *engine = all->now->engine;
    pthread_mutex_unlock(&all->lock);
    return engine;
}

void mn_engines_give(mn_engines *all, mn_engine *engine) {
    pthread_mutex_lock(&all->lock);
    generation *g = all->now;
    while (g && g->engine != engine) g = g->before;
    if (g) g->users--;
    pthread_mutex_unlock(&all->lock);
}

mn_status mn_engines_reload(mn_engines *all) {
    return add_generation(all);
}

void mn_engines_sweep(mn_engines *all) {
    pthread_mutex_lock(&all->lock);
    generation **at = &all->now->before, *done = NULL;
    while (*at) {
        generation *g = *at;
        if (g->users > 0) {
            at = &g->before;
            continue;
        }
        *at = g->before;
        g->before = done;
        done = g;
    }
    pthread_mutex_unlock(&all->lock);
    while (done) {
        generation *g = done;
        done = g->before;
        const mn_metrics counted = mn_engine_metrics(g->engine);
        mn_engine_count(all->now->engine, &counted, &g->handed);
        mn_engine_close(g->engine);
        free(g);
    }
}

void mn_engines_drain(mn_engines *all, double seconds) {
    const double end = mn_seconds() + seconds;
    for (generation *g = all->now; g; g = g->before) {
        mn_engine_drain(g->engine, mn_max(end - mn_seconds(), 0.0));
    }
}
