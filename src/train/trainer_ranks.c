/* trainer_ranks.c - steps in the host's memory, on one rank or shared by several.
 *
 *   batches of this rank -> gradients -> their sum (reduce.c) -> squares and losses of all ranks
 *   -> norm, clipping, spike: the same numbers everywhere -> update of the own part -> all values
 *
 * What is decided from, every rank computes from the same numbers in the same order, so that none
 * has to tell the others. */
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "base/clock.h"
#include "base/status.h"
#include "base/util.h"
#include "train/trainer_internal.h"

/* What ranks tell of a step beside losses and squares. */
typedef struct news {
    double stop, compute;
} news;

struct mn_trainer_ranks {
    mn_reduce *reduce;
    int rank, world, sequence;
    int64_t *elements, *pieces;    // (world + 1): which numbers, which pieces are whose
    /* told[rank]: squares of its pieces, losses and counts of its rounds, news */
    double *told;
    size_t *told_at;               // (world + 1), bytes
    bool stepping;                 // a pass that belongs to a step
    bool on_request;               // values of parameters are with their owners between steps
    double compute;                // seconds of passes in this step
};

/* ---- create ---------------------------------------------------------------------------------- */

mn_status mn_trainer_check_ranks(const mn_trainer *t) {
    const int world = mn_comm_world(t->comm);
    const int64_t sequence = t->options.sequence_ranks, batches = t->options.accumulate;
    if (sequence < 1 || world % sequence != 0) {
        return mn_fail(MN_ERR_ARGUMENT, "train.sequence_ranks: %lld does not divide the %d ranks "
                       "of the run", (long long)sequence, world);
    }
    if (t->options.context % sequence != 0) {
        return mn_fail(MN_ERR_ARGUMENT, "train.context: %lld tokens cannot be cut into %lld equal "
                       "parts (train.sequence_ranks)", (long long)t->options.context,
                       (long long)sequence);
    }
    if (batches < world / sequence) {
        return mn_fail(MN_ERR_ARGUMENT, "train.accumulate: a step of %lld batches cannot be shared "
                       "by %lld ranks; give at least as many batches, and fewer rows to each "
                       "(train.batch) for the same step", (long long)batches,
                       (long long)(world / sequence));
    }
    return MN_OK;
}

/* Doubles that a rank tells in a step. */
static size_t told_by(const mn_trainer_ranks *k, int rank) {
    return (size_t)(k->pieces[rank + 1] - k->pieces[rank]) +
           2 * (size_t)mn_reduce_rounds(k->reduce) + sizeof(news) / sizeof(double);
}

static mn_status make_room(mn_trainer_ranks *k) {
    k->told_at = calloc((size_t)k->world + 1, sizeof *k->told_at);
    if (!k->told_at) return mn_fail(MN_ERR_MEMORY, "no memory for %d ranks", k->world);
    for (int r = 0; r < k->world; r++) {
        k->told_at[r + 1] = k->told_at[r] + told_by(k, r) * sizeof *k->told;
    }
    k->told = calloc(1, k->told_at[k->world]);
    return k->told ? MN_OK : mn_fail(MN_ERR_MEMORY, "no memory for %d ranks", k->world);
}

mn_status mn_trainer_find_shard(mn_train_shard *out, const mn_trainer *t) {
    static const char *const names[] = {
#define SHARD(id, name, about) [MN_SHARD_##id] = name,
#include "train/shards.def"
#undef SHARD
    };
    for (int i = 0; i < (int)MN_COUNTOF(names); i++) {
        if (strcmp(t->options.shard, names[i]) != 0) continue;
        *out = (mn_train_shard)i;
        return MN_OK;
    }
    return mn_fail(MN_ERR_ARGUMENT, "train.shard: \"%s\" is none of optimizer, gradients, "
                   "parameters", t->options.shard);
}

mn_status mn_trainer_check_request(const mn_trainer *t) {
    if (t->options.mc_samples > 0 || t->distill) {
        return mn_fail(MN_ERR_UNSUPPORTED, "train.shard=parameters: not with a teacher or with "
                       "train.mc_samples; take train.shard=gradients");
    }
    if (mn_model_describe(t->model)->block.shared_blocks == 0) return MN_OK;
    return mn_fail(MN_ERR_UNSUPPORTED, "train.shard=parameters: blocks of this model share "
                   "parameters; take train.shard=gradients");
}

mn_status mn_trainer_ranks_create(mn_trainer *t, const mn_optim_param *params, int64_t n_params,
                                  const mn_adamw_options *how) {
    mn_train_shard shard = MN_SHARD_OPTIMIZER;
    mn_status st = mn_trainer_find_shard(&shard, t);
    if (st == MN_OK) st = mn_trainer_check_ranks(t);
    if (st == MN_OK && shard == MN_SHARD_PARAMETERS) st = mn_trainer_check_request(t);
    mn_trainer_ranks *k = st == MN_OK ? calloc(1, sizeof *k) : NULL;
    if (!k) return st == MN_OK ? mn_fail(MN_ERR_MEMORY, "no memory for a training run") : st;
    t->ranks = k;
    k->rank = mn_comm_rank(t->comm);
    k->world = mn_comm_world(t->comm);
    k->sequence = (int)t->options.sequence_ranks;
    k->elements = calloc(2 * ((size_t)k->world + 1), sizeof *k->elements);
    if (!k->elements) return mn_fail(MN_ERR_MEMORY, "no memory for %d ranks", k->world);
    k->pieces = k->elements + k->world + 1;
    mn_optim_shares(params, n_params, k->world, k->elements, k->pieces);
    const mn_reduce_options sums = { .comm = t->comm, .model = t->model,
                                     .batches = t->options.accumulate, .sequence = k->sequence,
                                     .shards_gradients = shard == MN_SHARD_GRADIENTS,
                                     .shards_parameters = shard == MN_SHARD_PARAMETERS,
                                     .elements = k->elements };
    k->on_request = shard == MN_SHARD_PARAMETERS && k->world > 1;
    st = mn_optimizer_create_part(&t->optimizer, params, n_params, how, k->rank, k->world);
    if (st == MN_OK) st = mn_reduce_create(&k->reduce, &sums);
    if (st == MN_OK) st = mn_trainer_cut_create(t, NULL);
    return st == MN_OK ? make_room(k) : st;
}

void mn_trainer_ranks_destroy(mn_trainer_ranks *k) {
    if (!k) return;
    mn_reduce_destroy(k->reduce);
    free(k->elements);
    free(k->told);
    free(k->told_at);
    free(k);
}

size_t mn_trainer_ranks_bytes(const mn_trainer *t) {
    const mn_trainer_ranks *k = t->ranks;
    const int64_t own = k->elements[k->rank + 1] - k->elements[k->rank];
    int64_t held = mn_model_count(t->model), outside, block;
    if (k->on_request) {
        mn_model_parts(t->model, &outside, &block);
        held = mn_min(held, own + outside + block);
    }
    return (size_t)(2 * held + 2 * own) * sizeof(float) + mn_reduce_bytes(k->reduce);
}

/* ---- batches --------------------------------------------------------------------------------- */

void mn_trainer_enter(void *trainer, int block) {
    mn_trainer *t = trainer;
    if (!t->ranks) mn_trainer_gpus_enter(mn_trainer_gpus_of(t), block);
    else if (t->ranks->stepping) mn_reduce_enter(t->ranks->reduce, block);
}

void mn_trainer_ready(void *trainer, int block) {
    mn_trainer *t = trainer;
    if (!t->ranks) mn_trainer_gpus_ready(mn_trainer_gpus_of(t), block);
    else if (t->ranks->stepping) mn_reduce_ready(t->ranks->reduce, block);
    else {
        int first, end;
        mn_model_block_params(t->model, block, &first, &end);
        mn_model_settle_some(t->model, first, end);
    }
}

static mn_status run_batch(mn_trainer *t, int64_t i, double *loss, int64_t *counted) {
    const int64_t n = t->options.accumulate, number = t->step * n + i;
    mn_status st = mn_loader_fill(&t->batch, t->train_loader, number);
    t->draw = (uint64_t)number;
    if (st != MN_OK) return st;
    st = mn_trainer_pass(t, t->tape, &t->batch, MN_TAPE_RECORD, false, 1.0 / (double)n, loss,
                         counted);
    if (t->ranks->on_request) return st;    // mn_reduce_end tells first what messages came to
    if (st != MN_OK) return mn_trainer_explain(t, &t->batch, number, st, NAN);
    return isfinite(*loss) ? MN_OK : mn_trainer_explain(t, &t->batch, number, MN_OK, *loss);
}

/* The batches of this rank; told: losses and counts of its rounds. */
static mn_status run_batches(mn_trainer *t, double *told) {
    mn_trainer_ranks *k = t->ranks;
    mn_status st = MN_OK;
    for (int64_t round = 0; st == MN_OK && round < mn_reduce_rounds(k->reduce); round++) {
        const int64_t i = mn_reduce_batch(k->reduce, round);
        int64_t counted = 0;
        told[2 * round] = 0.0;
        mn_reduce_begin(k->reduce, round);
        const double started = mn_seconds();
        k->stepping = true;
        if (i >= 0) st = run_batch(t, i, &told[2 * round], &counted);
        else mn_reduce_idle(k->reduce);
        k->stepping = false;
        told[2 * round + 1] = (double)counted;
        k->compute += mn_seconds() - started;
        if (st == MN_OK) st = mn_reduce_end(k->reduce);
    }
    return st;
}

/* ---- a step ---------------------------------------------------------------------------------- */

static const double *told_of(const mn_trainer_ranks *k, int rank) {
    return (const double *)((const char *)k->told + k->told_at[rank]);
}

/* Losses and norm from what all ranks told, added in the order of batches and of pieces. */
static void add_up(const mn_trainer *t, mn_step_result *r) {
    const mn_trainer_ranks *k = t->ranks;
    const int64_t n = t->options.accumulate, rounds = mn_reduce_rounds(k->reduce);
    double squares = 0.0;
    for (int64_t i = 0; i < n; i++) {
        double mean = 0.0, counted = 0.0;
        for (int rank = 0; rank < k->world; rank++) {
            const double *losses = told_of(k, rank) + (k->pieces[rank + 1] - k->pieces[rank]);
            for (int64_t round = 0; round < rounds; round++) {
                if (mn_reduce_batch_of(k->reduce, rank, round) != i) continue;
                /* of a sequence in parts, losses are shares of the batch's mean */
                mean += losses[2 * round];
                counted += losses[2 * round + 1];
            }
        }
        r->loss += mean / (double)n;
        r->tokens += (int64_t)counted;
    }
    for (int rank = 0; rank < k->world; rank++) {
        const int64_t own = k->pieces[rank + 1] - k->pieces[rank];
        for (int64_t i = 0; i < own; i++) squares += told_of(k, rank)[i];
    }
    r->grad_norm = sqrt(squares);
}

/* Who was slowest, how long this rank waited for it, and whether any was asked to stop. */
static void hear_news(const mn_trainer *t, mn_step_result *r, double exposed) {
    const mn_trainer_ranks *k = t->ranks;
    double slowest = -1.0;
    for (int rank = 0; rank < k->world; rank++) {
        const double *end = told_of(k, rank) + told_by(k, rank);
        const news *of = (const news *)end - 1;
        r->stop |= of->stop != 0.0;
        if (of->compute <= slowest) continue;
        slowest = of->compute;
        r->slowest = rank;
    }
    r->compute = k->compute;
    r->wait = fmin(slowest - k->compute, exposed);
    r->communicate = exposed - r->wait;
}

/* Runs the batches and makes all ranks know what came of them. */
static mn_status run_all(mn_trainer *t, mn_step_result *r) {
    mn_trainer_ranks *k = t->ranks;
    double *own = (double *)((char *)k->told + k->told_at[k->rank]);
    const int64_t pieces = k->pieces[k->rank + 1] - k->pieces[k->rank];
    const double started = mn_seconds();
    k->compute = 0.0;
    mn_status st = mn_reduce_open(k->reduce);
    if (st == MN_OK) st = run_batches(t, own + pieces);
    if (st != MN_OK) return st;
    const double *squares;
    mn_optimizer_squares(&squares, t->optimizer, t->context);
    memcpy(own, squares, (size_t)pieces * sizeof *own);
    const news of = { .stop = t->stop, .compute = k->compute };
    memcpy(own + told_by(k, k->rank) - sizeof of / sizeof *own, &of, sizeof of);
    if (k->world > 1) st = mn_comm_gather_parts(t->comm, k->told, k->told_at);
    if (st != MN_OK) return st;
    add_up(t, r);
    hear_news(t, r, mn_seconds() - started - k->compute);
    return MN_OK;
}

mn_status mn_trainer_step_host(mn_trainer *t, mn_step_result *r) {
    mn_status st = run_all(t, r);
    if (st != MN_OK) return st;
    const int64_t n = t->options.accumulate;
    if (!isfinite(r->grad_norm)) {
        return mn_trainer_explain(t, &t->batch, t->step * n + n - 1, MN_OK, r->loss);
    }
    const double limit = t->options.spike_skip, clip = t->options.clip;
    r->skipped = limit > 0.0 && mn_trainer_spike(t, r->loss) > limit;
    if (r->skipped) return MN_OK;
    const double scale = clip > 0.0 && r->grad_norm > clip ? clip / r->grad_norm : 1.0;
    st = mn_optimizer_step(t->optimizer, t->context, t->step, r->lr, scale);
    const double started = mn_seconds();
    if (st == MN_OK) st = mn_reduce_share_values(t->ranks->reduce);
    if (t->ranks->world > 1) r->communicate += mn_seconds() - started;
    return st;
}

bool mn_trainer_on_request(const mn_trainer *t) {
    return t->ranks ? t->ranks->on_request : mn_trainer_gpus_on_request(mn_trainer_gpus_of(t));
}

mn_status mn_trainer_whole(mn_trainer *t) {
    return t->ranks ? mn_reduce_whole(t->ranks->reduce)
                    : mn_trainer_gpus_whole(mn_trainer_gpus_of(t));
}

/* ---- evaluations ----------------------------------------------------------------------------- */

bool mn_trainer_evaluates(const mn_trainer *t, int64_t i) {
    return i % mn_comm_world(t->comm) == mn_comm_rank(t->comm);
}

typedef struct outcome {
    double loss;
    int64_t count;
} outcome;

mn_status mn_trainer_gather(mn_trainer *t, double *losses, int64_t *counts, int64_t n) {
    const int world = mn_comm_world(t->comm), rank = mn_comm_rank(t->comm);
    if (world == 1) return MN_OK;
    const int64_t most = mn_ceil_div(n, world);
    outcome *all = calloc((size_t)(most * world) + 1, sizeof *all);
    if (!all) return mn_fail(MN_ERR_MEMORY, "no memory for %lld losses", (long long)n);
    outcome *own = all + most * rank;
    for (int64_t i = rank; i < n; i += world) own[i / world] = (outcome){ losses[i], counts[i] };
    const mn_status st = mn_comm_all_gather(t->comm, all, own, (size_t)most * sizeof *all);
    for (int64_t i = 0; st == MN_OK && i < n; i++) {
        const outcome *of = &all[most * (i % world) + i / world];
        losses[i] = of->loss;
        counts[i] = of->count;
    }
    free(all);
    return st;
}
