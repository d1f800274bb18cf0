/* trainer_device.c - steps of a run on a GPU.
 *
 *   batch of the host -> what the pass lends    forward and backward: one graph
 *   loss of the batch -> the optimiser's        norm, decision, update: three launches
 *
 * The second pass of a kind is recorded and later ones are played from it, unless its launches
 * depend on the batch (packed documents), on numbers of the host (KLA+, a teacher) or on other
 * ranks (sequences in parts, parameters on request). The host waits once a step, for loss and norm;
 * whether to update has been decided there by then.
 *
 * Batches of tasks have targets at some tokens only, and the loss goes through those alone
 * (tape/loss.c). Their number, rounded up to a share of all, makes a kind of pass: a batch's bits
 * depend on nothing else, so that a run that goes on has those of one that never stopped. */
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "base/status.h"
#include "train/trainer_internal.h"

enum { SHARES = 16 };    // of a batch's rows, that have targets

/* What is known of passes of a kind. */
typedef struct pass_kind {
    mn_device_graph *graph;
    const void *told;    // where its loss is
    int64_t passes;      // so far
} pass_kind;

struct mn_trainer_device {
    mn_device *device;
    mn_device_optimizer *optimizer;
    mn_trainer_gpus *gpus;             // NULL: no other ranks
    mn_tape *aside;                    // evaluations and samples, so that graphs keep their memory
    pass_kind kinds[2][SHARES + 1];    // gradients replace those before, or add; shares of rows
    const void *told;                  // where the loss of the last pass is
    int32_t *order;                    // rows of a task's batch, those with a target first
    int64_t n_ordered;                 // in front, with others up to a share
};

/* ---- rows with targets ----------------------------------------------------------------------- */

/* Puts the rows of t->batch that have a target in front, and returns how many sixteenths of all
 * these take. */
static int order_rows(mn_trainer *t) {
    mn_trainer_device *there = t->there;
    if (!there->order) return SHARES;
    const int64_t rows = t->batch.rows * t->batch.length;
    int64_t front = 0, back = rows;
    for (int64_t row = 0; row < rows; row++) {
        there->order[t->batch.targets[row] >= 0 ? front++ : --back] = (int32_t)row;
    }
    const int64_t share = mn_ceil_div(rows, SHARES), shares = mn_ceil_div(front, share);
    there->n_ordered = mn_min(shares * share, rows);
    return (int)shares;
}

void mn_trainer_order(mn_trainer *t, const mn_token_batch *batch, mn_loss_options *how) {
    if (!t->there || !t->there->order || batch != &t->batch) return;
    order_rows(t);
    how->order = t->there->order;
    how->n_ordered = t->there->n_ordered;
}

/* ---- open and close -------------------------------------------------------------------------- */

mn_status mn_trainer_device_create(mn_trainer *t, const mn_optim_param *params, int64_t n_params,
                                  const mn_adamw_options *how) {
    mn_trainer_device *there = calloc(1, sizeof *there);
    if (!there) return mn_fail(MN_ERR_MEMORY, "no memory for a training run");
    t->there = there;
    there->device = t->context->device;
    if (!t->train) {    // batches of a caller's may leave out targets, those of text do not
        there->n_ordered = t->batch.rows * t->batch.length;
        there->order = calloc((size_t)there->n_ordered, sizeof *there->order);
        if (!there->order) return mn_fail(MN_ERR_MEMORY, "no memory for a training run");
    }
    mn_status st = mn_device_optimizer_create_part(&there->optimizer, t->context, params, n_params,
                                                   how, mn_comm_rank(t->comm),
                                                   mn_comm_world(t->comm));
    if (st == MN_OK && t->comm) st = mn_trainer_gpus_create(&there->gpus, t, params, n_params);
    return st == MN_OK ? mn_tape_create(&there->aside, t->context, t->dtype) : st;
}

void mn_trainer_device_destroy(mn_trainer_device *there) {
    if (!there) return;
    mn_trainer_gpus_destroy(there->gpus);    // first: the stream may wait for other ranks
    for (int i = 0; i <= SHARES; i++) {
        for (int add = 0; add < 2; add++) mn_device_graph_destroy(there->kinds[add][i].graph);
    }
    free(there->order);
    mn_device_optimizer_destroy(there->optimizer);
    mn_tape_destroy(there->aside);
    free(there);
}

mn_trainer_gpus *mn_trainer_gpus_of(const mn_trainer *t) {
    return t->there ? t->there->gpus : NULL;
}

mn_tape *mn_trainer_aside(mn_trainer *t) {
    return t->there ? t->there->aside : t->tape;
}

size_t mn_trainer_device_bytes(const mn_trainer *t) {
    const size_t model = mn_trainer_on_request(t) ? mn_trainer_gpus_paged(t->there->gpus)
                                                  : mn_model_device_bytes(t->model);
    return model + mn_device_optimizer_bytes(t->there->optimizer) +
           mn_trainer_gpus_bytes(t->there->gpus);
}

/* ---- moments for checkpoints ----------------------------------------------------------------- */

static float *moment_of(const mn_trainer *t, int64_t i, bool second) {
    mn_device_optimizer *o = t->there->optimizer;
    return second ? mn_device_optimizer_second(o, i) : mn_device_optimizer_first(o, i);
}

void mn_trainer_owned(const mn_trainer *t, int i, int64_t *begin, int64_t *count) {
    if (t->there) mn_device_optimizer_owned(t->there->optimizer, i, begin, count);
    else mn_optimizer_owned(t->optimizer, i, begin, count);
}

mn_status mn_trainer_fetch_moment(float *to, mn_trainer *t, int i, bool second) {
    int64_t begin, count;
    mn_trainer_owned(t, i, &begin, &count);
    return mn_device_download(t->there->device, to, moment_of(t, i, second),
                              (size_t)count * sizeof *to);
}

mn_status mn_trainer_send_moment(mn_trainer *t, int i, bool second, const float *from,
                                 int64_t begin, int64_t count) {
    int64_t own, owned;
    mn_trainer_owned(t, i, &own, &owned);
    float *to = moment_of(t, i, second) + (begin - own);
    const mn_status st = mn_device_upload(t->there->device, to, from,
                                          (size_t)count * sizeof *from);
    return st == MN_OK ? mn_device_synchronize(t->there->device) : st;
}

/* ---- a pass ---------------------------------------------------------------------------------- */

/* Forward and backward of t->batch, launched or recorded. */
static mn_status pass(mn_trainer *t, bool add, pass_kind *kind) {
    double loss;    // told later, by the optimiser
    int64_t counted;
    const double weight = 1.0 / (double)t->options.accumulate;
    const mn_status st = mn_trainer_pass(t, t->tape, &t->batch, MN_TAPE_RECORD, add, weight, &loss,
                                         &counted);
    kind->told = t->distill ? mn_distill_told(t->distill) : mn_tape_told(t->tape);
    return st;
}

/* Records a pass; what it lends is uploaded before it is played. */
static mn_status record(mn_trainer *t, bool add, pass_kind *kind) {
    mn_device *device = t->there->device;
    mn_device_graph *graph = NULL;
    mn_status st = mn_device_graph_begin(device);
    if (st != MN_OK) return st;
    st = pass(t, add, kind);
    const mn_status ended = mn_device_graph_end(device, &graph);
    if (st == MN_OK) st = ended;
    if (st == MN_OK) kind->graph = graph;
    else mn_device_graph_destroy(graph);
    return st;
}

static mn_status play(mn_trainer *t, const pass_kind *kind) {
    mn_status st = mn_tape_feed(t->tape);
    return st == MN_OK ? mn_device_graph_launch(kind->graph) : st;
}

/* Batch `i` of the step; with `add` its gradient goes onto those before. */
static mn_status run_batch(mn_trainer *t, int64_t i, bool add) {
    mn_trainer_device *there = t->there;
    const bool repeats = !t->batch.packed && t->options.mc_samples == 0 && !t->cut &&
                         !t->distill && !mn_trainer_on_request(t);
    const int64_t number = t->step * t->options.accumulate + i;
    mn_status st = mn_loader_fill(&t->batch, t->train_loader, number);
    t->draw = (uint64_t)number;
    pass_kind *kind = &there->kinds[add][st == MN_OK ? order_rows(t) : 0];
    if (st == MN_OK && repeats && kind->passes == 1) st = record(t, add, kind);
    if (st == MN_OK) st = kind->graph ? play(t, kind) : pass(t, add, kind);
    there->told = kind->told;
    kind->passes++;
    return st;
}

/* ---- a step ---------------------------------------------------------------------------------- */

/* All batches of a step, whose gradients one graph adds up, and the update. */
static mn_status run_alone(mn_trainer *t) {
    mn_trainer_device *there = t->there;
    const int64_t n = t->options.accumulate;
    mn_status st = MN_OK;
    for (int64_t i = 0; st == MN_OK && i < n; i++) {
        st = run_batch(t, i, i > 0);
        if (st == MN_OK) {
            st = mn_device_optimizer_loss(there->optimizer, i, there->told);
        }
    }
    return st == MN_OK ? mn_device_optimizer_step(there->optimizer, n) : st;
}

/* The same of several ranks, where each gradient is by itself and the tree adds them up. */
static mn_status run_together(mn_trainer *t, mn_step_result *r) {
    mn_trainer_device *there = t->there;
    mn_status st = mn_trainer_gpus_begin(there->gpus);
    for (int64_t k = 0; st == MN_OK && k < mn_trainer_gpus_rounds(there->gpus); k++) {
        const int64_t i = mn_trainer_gpus_batch(there->gpus, k);
        if (i >= 0) st = mn_trainer_gpus_before(there->gpus);
        if (st == MN_OK && i >= 0) st = run_batch(t, i, false);
        if (st == MN_OK && i < 0) mn_trainer_gpus_idle(there->gpus);
        if (st == MN_OK && i >= 0) {
            st = mn_device_optimizer_loss(there->optimizer, mn_trainer_gpus_loss(there->gpus, i),
                                          there->told);
        }
        if (st == MN_OK) st = mn_trainer_gpus_put(there->gpus, k);
    }
    if (st == MN_OK) st = mn_trainer_gpus_update(there->gpus, there->optimizer);
    return st == MN_OK ? mn_trainer_gpus_finish(there->gpus, r) : st;
}

mn_status mn_trainer_step_device(mn_trainer *t, mn_step_result *r, double limit) {
    mn_device_optimizer *o = t->there->optimizer;
    mn_optim_outcome outcome;
    mn_status st = mn_device_optimizer_tell(o, t->step, r->lr, t->options.clip, limit);
    if (st == MN_OK) st = t->there->gpus ? run_together(t, r) : run_alone(t);
    if (st == MN_OK) st = mn_device_optimizer_ask(o, &outcome);
    if (st != MN_OK) return st;
    r->loss = outcome.loss;
    r->grad_norm = outcome.norm;
    r->tokens = outcome.counted;
    r->skipped = !outcome.updated;
    return MN_OK;
}
