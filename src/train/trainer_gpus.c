/* trainer_gpus.c - a step on the GPUs of several ranks.
 *
 *   batches of this rank -> sums of own numbers (reduce_device.c) -> squares and losses of all
 *   -> norm, decision, update of own numbers -> values of all
 *
 * All of it is on the stream before the host waits, and every rank's GPU decides from the same
 * numbers in the same order. While the host waits it looks after the other ranks: of one that is
 * gone the GPUs would wait for ever. */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "base/clock.h"
#include "base/status.h"
#include "base/util.h"
#include "kernels/adamw_all.h"
#include "train/reduce_device.h"
#include "train/trainer_internal.h"

static const double look_after = 0.02;    // seconds

/* What ranks tell of a step by the host; times are those of the step before. */
typedef struct news {
    double stop, compute;
} news;

enum { BEGIN, COMPUTED, END, POINTS };

struct mn_trainer_gpus {
    mn_trainer *t;
    mn_device *device;
    mn_nccl *nccl;
    mn_device_reduce *reduce;
    int rank, world, sequence;
    bool stepping;                 // passes belong to a step
    int64_t *elements, *pieces;    // (world + 1): which numbers, which pieces are whose
    mn_device_event *points[POINTS];
    double compute, communicate;   // seconds of the step before
    news *news;                    // (world)
};

/* ---- create ---------------------------------------------------------------------------------- */

/* A rank's GPU and machine. */
typedef struct seat {
    unsigned char gpu[16];
    char machine[48];
} seat;

static void find_seat(seat *s, const mn_device *device) {
    memset(s, 0, sizeof *s);
    memcpy(s->gpu, mn_device_facts(device)->uuid, sizeof s->gpu);
    FILE *file = fopen("/proc/sys/kernel/random/boot_id", "r");
    if (file && !fgets(s->machine, sizeof s->machine, file)) s->machine[0] = '\0';
    if (file) fclose(file);
}

/* Whether each rank has a GPU of its own; *local: all are on one machine. */
static mn_status check_seats(const mn_trainer_gpus *g, bool *local) {
    seat *all = calloc((size_t)g->world, sizeof *all);
    if (!all) return mn_fail(MN_ERR_MEMORY, "no memory for %d ranks", g->world);
    seat own;
    find_seat(&own, g->device);
    *local = true;
    mn_status st = mn_comm_all_gather(g->t->comm, all, &own, sizeof own);
    for (int k = 0; st == MN_OK && k < g->world; k++) {
        *local &= own.machine[0] && memcmp(all[k].machine, own.machine, sizeof own.machine) == 0;
        for (int i = 0; st == MN_OK && i < k; i++) {
            if (memcmp(all[i].gpu, all[k].gpu, sizeof own.gpu) != 0) continue;
            st = mn_fail(MN_ERR_ARGUMENT, "ranks %d and %d have the same GPU; every rank needs one "
                         "of its own: start as many ranks on a machine as it has GPUs", i, k);
        }
    }
    free(all);
    return st;
}

static mn_status take_room(mn_trainer_gpus *g) {
    const size_t world = (size_t)g->world;
    g->elements = calloc(2 * (world + 1), sizeof *g->elements);
    g->news = calloc(world, sizeof *g->news);
    if (!g->elements || !g->news) {
        return mn_fail(MN_ERR_MEMORY, "no memory for %d ranks", g->world);
    }
    g->pieces = g->elements + world + 1;
    mn_status st = MN_OK;
    for (int i = 0; st == MN_OK && i < POINTS; i++) {
        st = mn_device_event_create(g->device, &g->points[i]);
    }
    return st;
}

static mn_status check_options(const mn_trainer *t) {
    mn_train_shard shard = MN_SHARD_OPTIMIZER;
    const mn_status st = mn_trainer_find_shard(&shard, t);
    if (st != MN_OK) return st;
    const mn_status fits = mn_trainer_check_ranks(t);
    return fits == MN_OK && shard == MN_SHARD_PARAMETERS ? mn_trainer_check_request(t) : fits;
}

mn_status mn_trainer_gpus_create(mn_trainer_gpus **out, mn_trainer *t,
                                 const mn_optim_param *params, int64_t n_params) {
    mn_status st = check_options(t);
    mn_trainer_gpus *g = st == MN_OK ? calloc(1, sizeof *g) : NULL;
    if (!g) return st == MN_OK ? mn_fail(MN_ERR_MEMORY, "no memory for a training run") : st;
    *out = g;
    g->t = t;
    g->device = t->context->device;
    g->rank = mn_comm_rank(t->comm);
    g->world = mn_comm_world(t->comm);
    g->sequence = (int)t->options.sequence_ranks;
    bool local = true;
    st = take_room(g);
    if (st == MN_OK) mn_optim_shares(params, n_params, g->world, g->elements, g->pieces);
    st = mn_comm_agree(t->comm, st);
    if (st == MN_OK) st = check_seats(g, &local);
    if (st == MN_OK) st = mn_device_use(g->device);
    if (st == MN_OK) st = mn_nccl_create(&g->nccl, t->comm, local);
    if (st == MN_OK) st = mn_trainer_cut_create(t, g->nccl);
    if (st != MN_OK) return st;
    const mn_device_reduce_options sums = {
        .device = g->device, .nccl = g->nccl, .model = t->model, .rank = g->rank,
        .world = g->world, .sequence = g->sequence, .batches = t->options.accumulate,
        .shards_gradients = strcmp(t->options.shard, "gradients") == 0,
        .shards_parameters = strcmp(t->options.shard, "parameters") == 0,
        .elements = g->elements, .pieces = g->pieces };
    return mn_comm_agree(t->comm, mn_device_reduce_create(&g->reduce, &sums));
}

void mn_trainer_gpus_destroy(mn_trainer_gpus *g) {
    if (!g) return;
    mn_nccl_destroy(g->nccl);
    mn_device_reduce_destroy(g->reduce);
    for (int i = 0; i < POINTS; i++) mn_device_event_destroy(g->points[i]);
    free(g->elements);
    free(g->news);
    free(g);
}

size_t mn_trainer_gpus_bytes(const mn_trainer_gpus *g) {
    return g ? mn_device_reduce_bytes(g->reduce) : 0;
}

/* ---- waiting --------------------------------------------------------------------------------- */

/* Until the stream has come to its end, or a rank is gone; then the end of the run aborts NCCL,
 * after the sentence has been said. */
static mn_status wait_for_all(mn_trainer_gpus *g) {
    const struct timespec moment = { 0, 20000 };
    double looked = mn_seconds();
    bool done = false;
    mn_status st = mn_device_done(g->device, &done);
    while (st == MN_OK && !done) {
        nanosleep(&moment, NULL);
        if (mn_seconds() - looked > look_after) {
            st = mn_nccl_check(g->nccl);
            looked = mn_seconds();
        }
        if (st == MN_OK) st = mn_device_done(g->device, &done);
    }
    return st;
}

/* ---- shards of parameters -------------------------------------------------------------------- */

bool mn_trainer_gpus_on_request(const mn_trainer_gpus *g) {
    return g && mn_device_reduce_on_request(g->reduce);
}

size_t mn_trainer_gpus_paged(const mn_trainer_gpus *g) {
    return mn_device_reduce_paged(g->reduce);
}

void mn_trainer_gpus_enter(mn_trainer_gpus *g, int block) {
    if (g->stepping) mn_device_reduce_enter(g->reduce, block);
}

void mn_trainer_gpus_ready(mn_trainer_gpus *g, int block) {
    if (g->stepping) mn_device_reduce_ready(g->reduce, block);
}

void mn_trainer_gpus_idle(mn_trainer_gpus *g) {
    mn_device_reduce_idle(g->reduce);
}

mn_status mn_trainer_gpus_whole(mn_trainer_gpus *g) {
    if (!mn_trainer_gpus_on_request(g)) return MN_OK;
    const mn_status st = mn_device_reduce_whole(g->reduce);
    return st == MN_OK ? wait_for_all(g) : st;
}

/* ---- a step ---------------------------------------------------------------------------------- */

int64_t mn_trainer_gpus_rounds(const mn_trainer_gpus *g) {
    return mn_device_reduce_rounds(g->reduce);
}

int64_t mn_trainer_gpus_batch(const mn_trainer_gpus *g, int64_t round) {
    return mn_device_reduce_batch(g->reduce, g->rank, round);
}

int64_t mn_trainer_gpus_loss(const mn_trainer_gpus *g, int64_t i) {
    return g->rank % g->sequence * g->t->options.accumulate + i;
}

mn_status mn_trainer_gpus_begin(mn_trainer_gpus *g) {
    g->stepping = true;
    mn_device_reduce_begin(g->reduce);
    const mn_status st = mn_device_reduce_open(g->reduce);
    return st == MN_OK ? mn_device_event_record(g->device, g->points[BEGIN]) : st;
}

mn_status mn_trainer_gpus_put(mn_trainer_gpus *g, int64_t round) {
    return mn_device_reduce_put(g->reduce, round);
}

mn_status mn_trainer_gpus_update(mn_trainer_gpus *g, mn_device_optimizer *o) {
    g->stepping = false;
    mn_status st = mn_device_event_record(g->device, g->points[COMPUTED]);
    if (st == MN_OK) st = mn_device_reduce_sum(g->reduce);
    if (st == MN_OK) st = mn_device_optimizer_measure(o);
    if (st == MN_OK) st = mn_device_reduce_tell(g->reduce, o);
    if (st == MN_OK) {
        st = mn_device_optimizer_decide(o, g->t->options.accumulate, g->sequence);
    }
    if (st == MN_OK) st = mn_device_reduce_values(g->reduce);
    if (st == MN_OK && !mn_trainer_gpus_on_request(g)) st = mn_device_optimizer_shadows(o);
    return st == MN_OK ? mn_device_event_record(g->device, g->points[END]) : st;
}

/* ---- what the hosts tell --------------------------------------------------------------------- */

/* Tells what the host of each rank knows; the GPUs work meanwhile. */
static mn_status hear_news(mn_trainer_gpus *g, mn_step_result *r) {
    const news own = { .stop = g->t->stop, .compute = g->compute };
    const mn_status st = mn_comm_all_gather(g->t->comm, g->news, &own, sizeof own);
    double slowest = -1.0;
    for (int k = 0; st == MN_OK && k < g->world; k++) {
        r->stop |= g->news[k].stop != 0.0;
        if (g->news[k].compute <= slowest) continue;
        slowest = g->news[k].compute;
        r->slowest = k;
    }
    r->compute = g->compute;
    r->wait = fmin(fmax(slowest - g->compute, 0.0), g->communicate);
    r->communicate = g->communicate - r->wait;
    return st;
}

mn_status mn_trainer_gpus_before(mn_trainer_gpus *g) {
    return g->sequence > 1 ? wait_for_all(g) : MN_OK;
}

mn_status mn_trainer_gpus_finish(mn_trainer_gpus *g, mn_step_result *r) {
    mn_status st = hear_news(g, r);
    if (st == MN_OK) st = wait_for_all(g);
    if (st == MN_OK) {
        st = mn_device_seconds(g->device, &g->compute, g->points[BEGIN], g->points[COMPUTED]);
    }
    if (st != MN_OK) return st;
    return mn_device_seconds(g->device, &g->communicate, g->points[COMPUTED], g->points[END]);
}
