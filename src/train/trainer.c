/* trainer.c - steps and evaluations of a training run. */
#include "train/trainer.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/rng.h"
#include "base/status.h"
#include "base/util.h"
#include "runtime/device.h"
#include "train/trainable.h"
#include "train/trainer_internal.h"

/* ---- building -------------------------------------------------------------------------------- */

/* float32, or bf16 where a GPU runs. */
static mn_status choose_dtype(mn_trainer *t) {
    const char *name = t->options.dtype;
    t->dtype = strcmp(name, "bf16") == 0 ? MN_BF16 : MN_F32;
    if (t->dtype == MN_F32 && strcmp(name, "f32") != 0) {
        return mn_fail(MN_ERR_ARGUMENT, "train.dtype: \"%s\" is none of f32, bf16", name);
    }
    if (t->dtype == MN_F32 || t->context->device) return MN_OK;
    return mn_fail(MN_ERR_ARGUMENT, "train.dtype: bf16 runs on GPUs only; give --device cuda, or "
                   "train in f32");
}

/* Whether a GPU can hold the parameters, their gradients and two moments, in bf16 runs a copy, too:
 * asked before time goes into drawing so many numbers. */
static mn_status check_room(const mn_trainer *t) {
    if (!t->context->device) return MN_OK;
    const double count = (double)mn_model_count(t->model);
    const double moments = 8.0 / mn_comm_world(t->comm);
    const double bytes = count * (8.0 + moments + (t->dtype == MN_BF16 ? 2.0 : 0.0));
    const double room = (double)mn_device_facts(t->context->device)->free_bytes;
    if (bytes <= room) return MN_OK;
    return mn_fail(MN_ERR_MEMORY, "%.0f million parameters with gradients and optimiser states "
                   "take %.1f MiB, and the GPU has %.1f free; use a smaller model", count / 1e6,
                   bytes / 1048576.0, room / 1048576.0);
}

/* Who is learned from, and what learns. */
static mn_status open_teacher(mn_trainer *t) {
    bool of[MN_MAX_LAYERS];
    const mn_status st = mn_distill_create(&t->distill, of, &t->options, t->model, t->context,
                                           t->dtype);
    return st == MN_OK ? mn_trainable_apply(t->model, t->options.trainable, of) : st;
}

static mn_status make_model(mn_trainer *t, const mn_json *root, const mn_train_data *given) {
    const mn_json object = mn_json_member(root, "model");
    mn_model_config config = { 0 };
    mn_status st = mn_model_config_read(&config, &object);
    if (st != MN_OK) return st;
    const mn_json context = mn_json_member(&object, "max_position_embeddings");
    if (!mn_json_given(&context)) config.context = t->options.context;
    if (config.context < t->options.context) {
        st = mn_json_fail(&context, "%lld is less than train.context = %lld",
                          (long long)config.context, (long long)t->options.context);
    }
    if (st == MN_OK) st = mn_trainer_open_data(t, given, &config.vocab_size);
    if (st == MN_OK) st = mn_model_create(&t->model, &config, MN_F32);
    mn_model_config_free(&config);
    if (st == MN_OK) st = check_room(t);
    if (st == MN_OK) st = open_teacher(t);
    if (st != MN_OK) return st;
    if (t->dry && !t->context->device) return mn_model_reserve_gradients(t->model);
    mn_model_start(t->model, t->context, (uint64_t)t->options.seed);
    if (mn_comm_world(t->comm) > 1 && strcmp(t->options.shard, "parameters") == 0) {
        mn_model_want_pages(t->model);
    }
    st = mn_model_place(t->model, t->context, t->dtype);
    return st == MN_OK ? mn_model_want_gradients(t->model) : st;
}

static mn_status make_optimizer(mn_trainer *t) {
    const mn_train_options *o = &t->options;
    t->schedule = (mn_schedule){ .peak = o->lr, .floor = o->min_lr, .warmup = o->warmup,
                                 .steps = o->steps, .decay_part = o->decay_part,
                                 .hold = o->lr_hold };
    if (!mn_schedule_parse(&t->schedule.kind, o->schedule)) {
        return mn_fail(MN_ERR_ARGUMENT, "train.schedule: \"%s\" is none of constant, linear, "
                       "cosine, warmup-stable-decay", o->schedule);
    }
    if (!mn_recompute_parse(&t->recompute, o->recompute)) {
        return mn_fail(MN_ERR_ARGUMENT, "train.recompute: \"%s\" is none of none, light, mlp, "
                       "layer", o->recompute);
    }
    if (t->dry && !t->context->device) return MN_OK;
    const int n = mn_model_params(t->model);
    mn_optim_param *params = calloc((size_t)n, sizeof *params);
    if (!params) return mn_fail(MN_ERR_MEMORY, "no memory for an optimiser");
    for (int i = 0; i < n; i++) {
        mn_model_param *p = mn_model_param_at(t->model, i);
        const mn_train_group *group = &o->groups[p->info.group];
        params[i] = (mn_optim_param){ p->name, p->value, p->grad, p->info.count,
                                      group->lr * p->rate, group->decays, p->shadow };
    }
    const mn_adamw_options how = { o->beta1, o->beta2, o->eps, o->weight_decay };
    const mn_status st = t->context->device ? mn_trainer_device_create(t, params, n, &how)
                                            : mn_trainer_ranks_create(t, params, n, &how);
    free(params);
    return st;
}

static mn_status create(mn_trainer **out, const mn_json *root, const mn_train_data *data,
                        mn_comm *comm, mn_context *context, bool dry) {
    *out = NULL;
    mn_trainer *t = calloc(1, sizeof *t);
    if (!t) return mn_fail(MN_ERR_MEMORY, "no memory for a training run");
    t->context = context;
    t->dry = dry;
    t->comm = comm;
    t->best = NAN;
    t->saved = -1;
    mn_status st = mn_train_options_read(&t->options, root);
    if (st == MN_OK) st = choose_dtype(t);
    if (st == MN_OK) st = make_model(t, root, data);
    if (st == MN_OK) st = make_optimizer(t);
    if (st == MN_OK) st = mn_tape_create(&t->tape, context, t->dtype);
    if (st != MN_OK) {
        mn_trainer_destroy(t);
        return st;
    }
    *out = t;
    return MN_OK;
}

mn_status mn_trainer_create_rank(mn_trainer **out, const mn_json *root, const mn_train_data *data,
                                 mn_comm *comm, mn_context *context) {
    return create(out, root, data, comm, context, false);
}

mn_status mn_trainer_create_from(mn_trainer **out, const mn_json *root, const mn_train_data *data,
                                 mn_context *context) {
    return create(out, root, data, NULL, context, false);
}

mn_status mn_trainer_create(mn_trainer **out, const mn_json *root, mn_context *context) {
    return create(out, root, NULL, NULL, context, false);
}

mn_status mn_trainer_create_dry(mn_trainer **out, const mn_json *root, mn_context *context) {
    return create(out, root, NULL, NULL, context, true);
}

void mn_trainer_destroy(mn_trainer *t) {
    if (!t) return;
    mn_trainer_device_destroy(t->there);
    mn_trainer_cut_destroy(t->cut);
    mn_trainer_ranks_destroy(t->ranks);
    mn_tape_destroy(t->tape);
    mn_optimizer_destroy(t->optimizer);
    mn_distill_destroy(t->distill);
    mn_model_destroy(t->model);
    mn_trainer_close_data(t);
    free(t);
}

int64_t mn_trainer_step_number(const mn_trainer *t) {
    return t->step;
}

int64_t mn_trainer_seen(const mn_trainer *t) {
    return t->tokens;
}

double mn_trainer_best(const mn_trainer *t) {
    return t->best;
}

const mn_train_options *mn_trainer_options(const mn_trainer *t) {
    return &t->options;
}

mn_model *mn_trainer_model(mn_trainer *t) {
    return t->model;
}

const mn_corpus *mn_trainer_held_out(const mn_trainer *t) {
    return t->valid;
}

const mn_tokenizer *mn_trainer_tokenizer(const mn_trainer *t) {
    return t->tokenizer;
}

int64_t mn_trainer_tokens(const mn_trainer *t, bool valid) {
    const mn_corpus *corpus = valid ? t->valid : t->train;
    return corpus ? mn_corpus_tokens(corpus) : 0;
}

uint64_t mn_trainer_data_mark(const mn_trainer *t) {
    const uint64_t train = t->train ? mn_corpus_fingerprint(t->train) : 0;
    const uint64_t valid = t->valid ? mn_corpus_fingerprint(t->valid) : 0;
    return (train * 31 + valid) * 31 + mn_trainer_tokenizer_mark(t);
}

/* ---- one batch ------------------------------------------------------------------------------- */

/* Gradients that no token reached, of those parameters that the ranks were not told of yet. */
static void settle(mn_trainer *t, bool told) {
    int first = 0, end = 0;
    if (told) mn_model_block_params(t->model, 0, &first, &end);
    mn_model_settle_some(t->model, 0, told ? first : mn_model_params(t->model));
    if (!told) return;
    mn_model_block_params(t->model, mn_model_describe(t->model)->n_layers - 1, &first, &end);
    mn_model_settle_some(t->model, end, mn_model_params(t->model));
}

mn_status mn_trainer_pass(mn_trainer *t, mn_tape *tape, const mn_token_batch *batch, unsigned modes,
                          bool add, double weight, double *loss, int64_t *counted) {
    double share = 1.0;
    const bool trains = modes & MN_TAPE_RECORD;
    if (trains) mn_trainer_cut_pass(t, tape, &batch, &share);
    mn_model_input in = { .tokens = batch->tokens, .B = batch->rows, .T = batch->length,
                          .add_gradients = add, .recompute = t->recompute };
    if (batch->packed) {
        in.B = 1;
        in.T = batch->rows * batch->length;
        in.starts = batch->starts;
        in.n_sequences = batch->n_sequences;
    }
    if (!trains && (t->there || t->recompute == MN_RECOMPUTE_LIGHT)) {
        in.recompute = MN_RECOMPUTE_LAYER;    // what goes back by parts keeps all going forward
    }
    const bool told = t->ranks || mn_trainer_on_request(t);    // blocks tell when they work
    if (trains && told) {
        in.enter = mn_trainer_enter;
        in.ready = mn_trainer_ready;
        in.ready_context = t;
    }
    const double z_loss = trains ? t->options.z_loss : 0.0;
    mn_loss_options how = { .weight = weight * share, .z_loss = z_loss };
    if (trains) mn_trainer_order(t, batch, &how);
    mn_tape_start(tape, modes);
    if (trains && t->distill) {
        mn_distill_forward(t->distill, tape, t->model, &in, batch->targets, t->step, how.weight,
                           loss, counted);
    } else if (t->options.mc_samples > 0) {
        mn_model_marginal_loss(t->model, tape, &in, batch->targets, how,
                               (int)t->options.mc_samples, (uint64_t)t->options.seed,
                               t->draw, loss, counted);
    } else {
        mn_tensor *hidden = mn_model_hidden(t->model, tape, &in);
        mn_model_loss(t->model, tape, hidden, batch->targets, how, loss, counted);
    }
    if (mn_tape_status(tape) != MN_OK || !trains) {
        mn_tape_run_by(tape, NULL);
        return mn_tape_status(tape);
    }
    const mn_status st = mn_tape_backward(tape);
    mn_tape_run_by(tape, NULL);
    if (share != 1.0 && st == MN_OK && !mn_tape_plans(tape)) *loss *= share;
    if (!mn_tape_plans(tape)) settle(t, told);
    return st;
}

/* A batch that begins with one sequence of `first` tokens (0: none) and then has as many others as
 * there can be: the shortest documents, of whose places `counts` tells how many have 1, 2 .. n. */
static void cut_batch(mn_token_batch *batch, const int64_t *counts, int64_t first) {
    const int64_t n = batch->rows * batch->length;
    int64_t used = 0, row = 0, at = first;
    if (first > 0) batch->starts[used++] = 0;
    while (row < at) row += batch->length;
    for (int64_t places = 1; places <= n && at < n; places++) {
        for (int64_t i = 0; i < counts[places] && at < n; i++, at += places) {
            for (; row < at; row += batch->length) batch->starts[used++] = row;    // a row's
            if (row == at) row += batch->length;
            batch->starts[used++] = at;
        }
    }
    for (; row < n; row += batch->length) batch->starts[used++] = row;
    batch->starts[used] = n;
    batch->n_sequences = used;
}

/* Documents of the training data by their places, those with more than a batch has among its. */
static mn_status count_documents(int64_t **counts, const mn_trainer *t) {
    const int64_t n = t->batch.rows * t->batch.length;
    *counts = calloc((size_t)n + 1, sizeof **counts);
    if (!*counts) return mn_fail(MN_ERR_MEMORY, "no memory to plan %lld tokens", (long long)n);
    for (int64_t i = 0; i < mn_corpus_documents(t->train); i++) {
        const int64_t places = mn_corpus_document_start(t->train, i + 1) -
                               mn_corpus_document_start(t->train, i) - 1;
        (*counts)[mn_min(places, n)]++;
    }
    return MN_OK;
}

static mn_status plan(mn_trainer *t, const mn_token_batch *batch, bool add,
                      mn_train_memory *memory) {
    double loss;
    int64_t counted;
    const mn_status st = mn_trainer_pass(t, t->tape, batch, MN_TAPE_RECORD | MN_TAPE_PLAN, add, 1.0,
                                         &loss, &counted);
    memory->activations = mn_max(memory->activations, mn_tape_bytes(t->tape));
    memory->work = mn_max(memory->work, mn_tape_work_bytes(t->tape));
    return st;
}

static size_t corpus_bytes(const mn_corpus *corpus, bool text) {
    if (!corpus) return 0;    // the caller's
    return (size_t)mn_corpus_documents(corpus) * sizeof(int64_t) +
           (text ? (size_t)mn_corpus_tokens(corpus) * sizeof(int32_t) : 0);
}

/* Tokens of text, which are held in memory, borders of documents, and two batches. */
static size_t data_bytes(const mn_trainer *t) {
    const size_t batch = (size_t)(t->batch.rows * t->batch.length);
    size_t bytes = corpus_bytes(t->all, t->text);
    if (t->options.n_valid > 0) bytes += corpus_bytes(t->valid, t->text);
    return bytes + 2 * batch * (2 * sizeof(int32_t) + sizeof(int64_t));
}

/* Whether the context now has so many bytes of work space. */
static bool take_work(mn_context *context, size_t bytes) {
    if (bytes == 0) return true;
    if (context->device) {
        const mn_mark mark = mn_device_mark(context->device);
        const bool there = mn_device_bytes(context->device, bytes);
        mn_device_release(context->device, mark);
        return there;
    }
    const mn_mark mark = mn_arena_mark(context->arena);
    const bool there = mn_arena_bytes(context->arena, bytes);
    mn_arena_release(context->arena, mark);
    return there;
}

/* Takes the memory of a step at once, so that growing never holds more than is needed. */
static mn_status reserve(mn_trainer *t, const mn_train_memory *memory, size_t aside) {
    if (aside > 0) {
        const mn_status st = mn_tape_reserve(mn_trainer_aside(t), aside);
        if (st != MN_OK) return st;
    }
    if (take_work(t->context, memory->work)) {
        return mn_tape_reserve(t->tape, memory->activations - aside);
    }
    return mn_fail(MN_ERR_MEMORY, "no memory for %.1f MiB of work space; use a smaller train.batch "
                   "or train.context", (double)memory->work / 1048576.0);
}

/* Work space grows with the number of sequences, with the longest, or with their product: batches
 * of every kind between one sequence a row and as many as there can be. */
static mn_status plan_packed(mn_trainer *t, bool add, mn_train_memory *memory) {
    int64_t *counts;
    mn_status st = count_documents(&counts, t);
    for (int part = 0; st == MN_OK && part <= 8; part++) {
        cut_batch(&t->batch, counts, t->batch.length * part / 8);
        st = plan(t, &t->batch, add, memory);
    }
    free(counts);
    t->batch.n_sequences = t->batch.rows;
    for (int64_t i = 0; i <= t->batch.rows; i++) t->batch.starts[i] = i * t->batch.length;
    return st == MN_OK ? plan(t, &t->batch, add, memory) : st;
}

/* What passes aside take on a GPU, where steps keep their memory: evaluations. */
static mn_status plan_aside(mn_trainer *t, mn_train_memory *memory, size_t *bytes) {
    double loss;
    int64_t counted;
    *bytes = 0;
    if (!t->there || !t->valid_loader) return MN_OK;
    mn_tape *tape = mn_trainer_aside(t);
    const mn_status st = mn_trainer_pass(t, tape, &t->valid_batch, MN_TAPE_PLAN, false, 1.0, &loss,
                                         &counted);
    *bytes = mn_tape_bytes(tape);
    memory->work = mn_max(memory->work, mn_tape_work_bytes(tape));
    return st;
}

mn_status mn_trainer_predict(mn_trainer *t, mn_train_memory *memory) {
    size_t aside = 0;
    memset(memory, 0, sizeof *memory);
    mn_status st = MN_OK;
    for (int add = 0; st == MN_OK && add <= (t->there && t->options.accumulate > 1); add++) {
        st = t->batch.packed ? plan_packed(t, add, memory) : plan(t, &t->batch, add, memory);
    }
    if (st == MN_OK) st = plan_aside(t, memory, &aside);
    if (st != MN_OK) return st;
    memory->activations += aside;
    memory->parameters = t->there ? mn_trainer_device_bytes(t)
                         : t->ranks ? mn_trainer_ranks_bytes(t)
                                    : (size_t)mn_model_count(t->model) * 4 * sizeof(float);
    if (t->distill) memory->parameters += mn_distill_bytes(t->distill);
    memory->data = t->there ? 0 : data_bytes(t);    // the host's
    memory->total = memory->parameters + memory->activations + memory->work + memory->data;
    return t->dry ? MN_OK : reserve(t, memory, aside);
}

/* ---- steps ----------------------------------------------------------------------------------- */

/* Whether all numbers of a parameter are finite; of one that cannot be read, too. */
static bool is_finite(mn_trainer *t, int i) {
    const mn_model_param *p = mn_model_param_at(t->model, i);
    float *copy = t->there ? malloc((size_t)p->info.count * sizeof *copy) : NULL;
    const float *value = t->there ? copy : p->value;
    bool finite = true;
    if (copy && mn_model_get(t->model, i, copy) != MN_OK) value = NULL;
    for (int64_t k = 0; value && finite && k < p->info.count; k++) finite = isfinite(value[k]);
    free(copy);
    return finite;
}

/* The first number that is not finite: in a parameter, else in a result of running the batch once
 * more. */
static bool find_first(char what[512], mn_trainer *t, const mn_token_batch *batch) {
    for (int i = 0; i < mn_model_params(t->model); i++) {
        if (is_finite(t, i)) continue;
        snprintf(what, 512, "parameter %s is not finite", mn_model_param_at(t->model, i)->name);
        return true;
    }
    double loss;
    int64_t counted;
    const mn_status st = mn_trainer_pass(t, mn_trainer_aside(t), batch, MN_TAPE_CHECK, false, 1.0,
                                         &loss, &counted);
    if (st != MN_ERR_NUMERIC) return false;
    snprintf(what, 512, "%s", mn_last_error());
    return true;
}

mn_status mn_trainer_explain(mn_trainer *t, const mn_token_batch *batch, int64_t number,
                             mn_status failure, double loss) {
    char why[512], what[512];
    snprintf(why, sizeof why, "%s", mn_last_error());
    if (mn_trainer_on_request(t)) {
        if (failure != MN_OK) return mn_fail(failure, "%s", why);
        snprintf(what, sizeof what, "no rank has all parameters to look for where that begins "
                 "(train.shard)");
    } else if (!find_first(what, t, batch)) {
        if (failure != MN_OK) return mn_fail(failure, "%s", why);
        snprintf(what, sizeof what, "%s overflowed, though every result before is finite",
                 isfinite(loss) ? "the gradient" : "the logits of lm_head");
    }
    return mn_fail(MN_ERR_NUMERIC, "step %lld, batch %lld: the loss is %g; %s. Go on from the last "
                   "checkpoint with a lower train.lr or train.clip", (long long)t->step,
                   (long long)number, isnan(loss) ? (double)NAN : loss, what);
}

/* The same on a GPU, which tells of a whole step: the batches are made once more, and the first of
 * them with a number that is not finite is named. */
static mn_status explain_device(mn_trainer *t, double loss) {
    const int64_t n = t->options.accumulate;
    char what[512];
    for (int64_t i = 0; i < n; i++) {
        const mn_status st = mn_loader_fill(&t->batch, t->train_loader, t->step * n + i);
        if (st != MN_OK) return st;
        if (i == n - 1 || mn_trainer_on_request(t) || find_first(what, t, &t->batch)) {
            return mn_trainer_explain(t, &t->batch, t->step * n + i, MN_OK, loss);
        }
    }
    return MN_OK;
}

/* Mean and deviation of the losses of the last steps; false until there are enough. */
static bool recent_losses(const mn_trainer *t, double *of, double *deviation) {
    if (t->n_recent < MN_SPIKE_WINDOW) return false;
    double mean = 0.0, square = 0.0;
    for (int i = 0; i < MN_SPIKE_WINDOW; i++) mean += t->recent[i] / MN_SPIKE_WINDOW;
    for (int i = 0; i < MN_SPIKE_WINDOW; i++) {
        square += (t->recent[i] - mean) * (t->recent[i] - mean) / MN_SPIKE_WINDOW;
    }
    *of = mean;
    *deviation = sqrt(square);
    return square > 0.0;
}

double mn_trainer_spike(const mn_trainer *t, double loss) {
    double mean, deviation;
    return recent_losses(t, &mean, &deviation) ? (loss - mean) / deviation : 0.0;
}

/* The loss above which a step is skipped. */
static double highest_loss(const mn_trainer *t) {
    double mean, deviation;
    if (!(t->options.spike_skip > 0.0)) return INFINITY;
    const bool known = recent_losses(t, &mean, &deviation);
    return known ? mean + t->options.spike_skip * deviation : INFINITY;
}

static mn_status step_on_device(mn_trainer *t, mn_step_result *r) {
    const mn_status st = mn_trainer_step_device(t, r, highest_loss(t));
    if (st != MN_OK) return st;
    return isfinite(r->loss) && isfinite(r->grad_norm) ? MN_OK : explain_device(t, r->loss);
}

mn_status mn_trainer_step(mn_trainer *t, mn_step_result *result) {
    mn_step_result r = { .step = t->step, .lr = mn_schedule_rate(&t->schedule, t->step) };
    r.stop = t->stop;
    const mn_status st = t->there ? step_on_device(t, &r) : mn_trainer_step_host(t, &r);
    if (st != MN_OK) return st;
    t->recent[t->n_recent++ % MN_SPIKE_WINDOW] = r.loss;
    t->step++;
    t->tokens += r.tokens;
    *result = r;
    return MN_OK;
}

void mn_trainer_ask_stop(mn_trainer *t) {
    t->stop = true;
}

/* Mean losses and counts of `n` batches, each computed by one of the ranks. */
static mn_status evaluate_batches(mn_trainer *t, double *losses, int64_t *counts, int64_t n) {
    mn_tape *tape = mn_trainer_aside(t);
    mn_status st = MN_OK;
    for (int64_t i = 0; st == MN_OK && i < n; i++) {
        if (!mn_trainer_evaluates(t, i)) continue;
        st = mn_loader_fill(&t->valid_batch, t->valid_loader, i);
        t->draw = (uint64_t)i;
        if (st == MN_OK) {
            st = mn_trainer_pass(t, tape, &t->valid_batch, MN_TAPE_FORWARD, false, 1.0, &losses[i],
                                 &counts[i]);
        }
        if (st == MN_OK) st = mn_tape_results(tape);
    }
    return st == MN_OK ? mn_trainer_gather(t, losses, counts, n) : st;
}

mn_status mn_trainer_evaluate(mn_trainer *t, double *loss, bool *best) {
    *loss = NAN;
    *best = false;
    if (!t->valid_loader) return MN_OK;
    mn_status st = mn_trainer_whole(t);
    if (st != MN_OK) return st;
    int64_t batches = mn_loader_epoch(t->valid_loader), tokens = 0;
    if (t->options.eval_batches > 0) batches = mn_min(batches, t->options.eval_batches);
    double *losses = calloc((size_t)batches + 1, sizeof *losses), sum = 0.0;
    int64_t *counts = calloc((size_t)batches + 1, sizeof *counts);
    st = losses && counts ? evaluate_batches(t, losses, counts, batches)
                          : mn_fail(MN_ERR_MEMORY, "no memory to evaluate");
    for (int64_t i = 0; st == MN_OK && i < batches; i++) {
        sum += losses[i] * (double)counts[i];
        tokens += counts[i];
    }
    free(losses);
    free(counts);
    if (st != MN_OK) return st;
    *loss = sum / (double)mn_max(tokens, 1);
    *best = isfinite(*loss) && !(*loss >= t->best);    // also when there is none yet
    t->worse = *best ? 0 : t->worse + 1;
    if (!*best) return MN_OK;
    t->best = *loss;
    t->best_step = t->step;
    return MN_OK;
}

bool mn_trainer_exhausted(const mn_trainer *t) {
    return t->options.patience > 0 && t->worse >= t->options.patience;
}

/* ---- samples --------------------------------------------------------------------------------- */

/* A token by the model's probabilities, as a function of (seed, step, place). */
static int32_t draw(const float *logits, int64_t n, double u) {
    double top = logits[0], sum = 0.0;
    for (int64_t i = 1; i < n; i++) top = fmax(top, logits[i]);
    for (int64_t i = 0; i < n; i++) sum += exp(logits[i] - top);
    double left = u * sum;
    for (int64_t i = 0; i < n; i++) {
        left -= exp(logits[i] - top);
        if (left <= 0.0) return (int32_t)i;
    }
    return (int32_t)(n - 1);
}

static mn_status write_tokens(mn_trainer *t, int32_t *tokens, int64_t n, mn_model_state *state,
                              float *logits) {
    const int64_t size = mn_tokenizer_size(t->tokenizer);
    mn_tape *tape = mn_trainer_aside(t);
    for (int64_t i = 0; i + 1 < n; i++) {
        const mn_model_input in = { .tokens = tokens + i, .B = 1, .T = 1, .state = state };
        mn_tape_start(tape, MN_TAPE_FORWARD);
        mn_tensor *hidden = mn_model_hidden(t->model, tape, &in);
        const mn_status st = mn_tape_read(tape, mn_model_logits(t->model, tape, hidden), logits);
        if (st != MN_OK) return st;
        const double u = mn_rng_uniform((uint64_t)t->options.seed, (uint64_t)t->step + 7777,
                                        (uint64_t)i);
        tokens[i + 1] = draw(logits, size, u);
    }
    return MN_OK;
}

mn_status mn_trainer_sample(mn_trainer *t, char **text) {
    *text = NULL;
    if (!t->tokenizer || !t->train) {
        return mn_fail(MN_ERR_UNSUPPORTED, "samples need a tokenizer and text to begin with");
    }
    const int64_t n = mn_min(t->options.sample_tokens, t->options.context);
    int32_t *tokens = calloc((size_t)n + 1, sizeof *tokens);
    float *logits = malloc((size_t)mn_model_describe(t->model)->vocab_size * sizeof *logits);
    mn_model_state state = { 0 };
    size_t size;
    mn_status st = tokens && logits ? mn_corpus_read(t->train, 0, 1, tokens)
                                    : mn_fail(MN_ERR_MEMORY, "no memory for a sample");
    if (st == MN_OK) st = mn_model_state_create(&state, t->model);
    if (st == MN_OK) st = write_tokens(t, tokens, n, &state, logits);
    if (st == MN_OK) st = mn_tokenizer_decode(t->tokenizer, tokens, n, false, text, &size);
    mn_model_state_free(&state);
    free(logits);
    free(tokens);
    return st;
}
