/* job_addressed.c - a job that trains the small network of address_model.h on collisions or crowded
 * keys, and asks it.
 *
 *   task (name, options), memory, steps, batch, lr, weight_decay, clip, seed
 *   tests     name: {options, test}
 *
 * For each test: accuracy "token", cross entropy "loss" and, where an answer has a rival, "margin":
 * p(target) - p(rival) of the softmax over the two, and "margin_all" over all labels. */
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "base/clock.h"
#include "base/status.h"
#include "base/util.h"
#include "experiments/collision/address_keep.h"
#include "experiments/job_keep.h"
#include "experiments/job_internal.h"
#include "io/json_write.h"

typedef struct settings {
    const char *task;
    mn_address_memory memory;
    int64_t steps, batch, seed;
    double lr, weight_decay, clip;
} settings;

/* ---- reading --------------------------------------------------------------------------------- */

/* A task of `options` over those of the job, in batches of one length. */
static mn_status open_task(mn_task **out, const settings *s, const mn_json *job,
                           const json_t *over) {
    mn_json options = { .value = json_object(), .name = "options" };
    const json_t *common = mn_spec_get(job->value, "task.options");
    mn_status st = options.value ? MN_OK : mn_fail(MN_ERR_MEMORY, "no memory for options");
    if (st == MN_OK && common) st = mn_spec_merge(options.value, common);
    if (st == MN_OK && over) st = mn_spec_merge(options.value, over);
    if (st == MN_OK) st = mn_spec_set(options.value, "batch", json_integer(s->batch));
    if (st == MN_OK) st = mn_task_create(out, s->task, &options);
    json_decref(options.value);
    return st;
}

static mn_status read_settings(settings *s, const mn_json *job) {
    static const char *const keys[] = { "kind", "task", "memory", "steps", "batch", "lr", "seed",
                                        "weight_decay", "clip", "tests", "labels",
                                        "steps_at_most" };
    const char *memory = NULL;
    int64_t most = INT64_MAX;
    *s = (settings){ .steps = 2500, .batch = 256, .lr = 3e-4, .weight_decay = 1e-4, .clip = 1.0 };
    const mn_json task = mn_json_member(job, "task");
    mn_status st = mn_json_unknown_key(job, keys, MN_COUNTOF(keys));
    if (st == MN_OK) st = mn_json_get_text(&s->task, &task, "name");
    if (st == MN_OK) st = mn_json_get_text(&memory, job, "memory");
    if (st == MN_OK) st = mn_json_opt_i64(&s->steps, job, "steps");
    if (st == MN_OK) st = mn_json_opt_i64(&most, job, "steps_at_most");
    if (st == MN_OK) st = mn_json_opt_i64(&s->batch, job, "batch");
    if (st == MN_OK) st = mn_json_opt_i64(&s->seed, job, "seed");
    if (st == MN_OK) st = mn_json_opt_f64(&s->lr, job, "lr");
    if (st == MN_OK) st = mn_json_opt_f64(&s->weight_decay, job, "weight_decay");
    if (st == MN_OK) st = mn_json_opt_f64(&s->clip, job, "clip");
    if (st != MN_OK) return st;
    s->steps = mn_min(s->steps, most);
    if (s->steps < 1 || s->batch < 1) return mn_json_fail(job, "steps and batch count from 1 on");
    if (mn_address_find(&s->memory, memory)) return MN_OK;
    return mn_json_fail(job, "there is no memory \"%s\"; linear, gla, delta, reset, bayes", memory);
}

static mn_status complete(mn_json *job) {
    settings s;
    mn_task *task = NULL;
    mn_status st = read_settings(&s, job);
    if (st == MN_OK) st = open_task(&task, &s, job, NULL);
    if (st == MN_OK && mn_task_shape_of(task).features == 0) {
        st = mn_json_fail(job, "%s: its inputs are tokens; a job of kind train takes it", s.task);
    }
    mn_task_destroy(task);
    if (st == MN_OK) st = mn_spec_set(job->value, "steps", json_integer(s.steps));
    json_object_del(job->value, "steps_at_most");
    return st;
}

/* ---- training -------------------------------------------------------------------------------- */

typedef struct addressed_run {
    settings how;
    mn_task *task;
    mn_context *context;
    mn_tape *tape;
    mn_optimizer *optimizer;
    mn_address_model model;
    mn_address_batch batch;
    mn_job_progress now;
    double kept;
} addressed_run;

static mn_status start(addressed_run *r, const mn_json *job) {
    const mn_context_options one = { .n_threads = 1 };
    mn_status st = read_settings(&r->how, job);
    if (st == MN_OK) st = open_task(&r->task, &r->how, job, NULL);
    if (st == MN_OK) st = mn_context_create(&r->context, &one);
    if (st == MN_OK) st = mn_tape_create(&r->tape, r->context, MN_F32);
    if (st != MN_OK) return st;
    const mn_task_shape shape = mn_task_shape_of(r->task);
    const uint64_t seed = (uint64_t)r->how.seed;
    st = mn_address_model_create(&r->model, r->how.memory, shape.features, shape.classes, seed);
    if (st == MN_OK) st = mn_address_batch_create(&r->batch, r->task, r->how.batch, seed);
    const mn_adamw_options how = { 0.9, 0.999, 1e-8, r->how.weight_decay };
    if (st == MN_OK) {
        st = mn_optimizer_create(&r->optimizer, r->model.params, r->model.n_params, &how);
    }
    r->now = (mn_job_progress){ .steps = r->how.steps, .loss = NAN, .score = NAN };
    return st;
}

static void finish(addressed_run *r) {
    mn_address_batch_free(&r->batch);
    mn_optimizer_destroy(r->optimizer);
    mn_address_model_free(&r->model);
    mn_tape_destroy(r->tape);
    mn_context_destroy(r->context);
    mn_task_destroy(r->task);
}

static mn_status step(addressed_run *r) {
    double loss = 0.0;
    int64_t counted;
    mn_tensor *head;
    const mn_loss_options how = { .weight = 1.0 };
    mn_status st = mn_address_batch_fill(&r->batch, r->task, (uint64_t)r->how.seed, MN_SPLIT_TRAIN,
                                         r->now.step * r->how.batch);
    if (st != MN_OK) return st;
    mn_tape_start(r->tape, MN_TAPE_RECORD);
    mn_tensor *h = mn_address_forward(&r->model, r->tape, &r->batch, &head);
    mn_tape_loss(r->tape, h, head, r->batch.targets, &how, &loss, &counted);
    st = mn_tape_status(r->tape);
    if (st == MN_OK) st = mn_tape_backward(r->tape);
    if (st != MN_OK) return st;
    const double norm = mn_optimizer_grad_norm(r->optimizer, r->context);
    if (!isfinite(loss) || !isfinite(norm)) {
        return mn_fail(MN_ERR_NUMERIC, "step %lld: the loss is %g, the gradient %g",
                       (long long)r->now.step, loss, norm);
    }
    const double scale = r->how.clip > 0.0 && norm > r->how.clip ? r->how.clip / norm : 1.0;
    r->now.loss = isnan(r->now.loss) ? loss : 0.9 * r->now.loss + 0.1 * loss;
    return mn_optimizer_step(r->optimizer, r->context, r->now.step++, r->how.lr, scale);
}

/* ---- asking ---------------------------------------------------------------------------------- */

typedef struct answers {
    int64_t n, right, rivals;
    double loss, margin, margin_all;
} answers;

static void judge(answers *a, const float *logits, int64_t classes, int32_t target, int32_t rival) {
    int64_t best = 0;
    double sum = 0.0;
    for (int64_t i = 1; i < classes; i++) best = logits[i] > logits[best] ? i : best;
    for (int64_t i = 0; i < classes; i++) sum += exp((double)logits[i] - logits[best]);
    const double own = exp((double)logits[target] - logits[best]) / sum;
    a->n++;
    a->right += best == target;
    a->loss -= (double)logits[target] - logits[best] - log(sum);
    if (rival < 0) return;
    const double gap = (double)logits[target] - logits[rival];
    a->rivals++;
    a->margin += tanh(0.5 * gap);    // of a softmax over two: 2 sigmoid(gap) - 1
    a->margin_all += own - exp((double)logits[rival] - logits[best]) / sum;
}

static mn_status ask_batch(answers *a, addressed_run *r, mn_address_batch *b, int32_t *places) {
    mn_tensor *head;
    int64_t n = 0;
    mn_tape_start(r->tape, MN_TAPE_FORWARD);
    mn_tensor *h = mn_address_forward(&r->model, r->tape, b, &head);
    for (int64_t i = 0; i < b->rows * b->length; i++) {
        if (b->targets[i] >= 0) places[n++] = (int32_t)i;
    }
    const mn_tensor *logits = mn_tape_linear(r->tape, mn_tape_pick(r->tape, h, places, n), head,
                                             NULL);
    if (!logits) return mn_tape_status(r->tape);
    for (int64_t i = 0; i < n; i++) {
        judge(a, (const float *)logits->data + i * r->model.classes, r->model.classes,
              b->targets[places[i]], b->rivals[places[i]]);
    }
    return MN_OK;
}

static mn_status ask(json_t **out, addressed_run *r, const mn_json *job, const json_t *options,
                     int64_t test) {
    mn_task *task = NULL;
    mn_address_batch batch = { 0 };
    answers a = { 0 };
    int32_t *places = NULL;
    mn_status st = open_task(&task, &r->how, job, options);
    if (st == MN_OK) {
        st = mn_address_batch_create(&batch, task, r->how.batch, (uint64_t)r->how.seed);
    }
    if (st == MN_OK) {
        places = calloc((size_t)(batch.rows * batch.most) + 1, sizeof *places);
        if (!places) st = mn_fail(MN_ERR_MEMORY, "no memory for answers");
    }
    for (int64_t first = 0; st == MN_OK && first < test; first += batch.rows) {
        st = mn_address_batch_fill(&batch, task, (uint64_t)r->how.seed, MN_SPLIT_TEST, first);
        if (st == MN_OK) st = ask_batch(&a, r, &batch, places);
    }
    if (st == MN_OK) {
        const double n = (double)a.n, rivals = a.rivals > 0 ? (double)a.rivals : NAN;
        *out = json_pack("{s:o, s:o, s:o, s:o}", "token", mn_json_real((double)a.right / n),
                         "loss", mn_json_real(a.loss / n), "margin",
                         mn_json_real(a.margin / rivals), "margin_all",
                         mn_json_real(a.margin_all / rivals));
    }
    free(places);
    mn_address_batch_free(&batch);
    mn_task_destroy(task);
    return st;
}

static mn_status ask_all(json_t *tests, addressed_run *r, const mn_json *job) {
    const mn_json list = mn_json_member(job, "tests");
    mn_status st = MN_OK;
    for (mn_json m = { 0 }; st == MN_OK && mn_json_next(&m, &list);) {
        int64_t test = 2048;
        json_t *one = NULL;
        st = mn_json_opt_i64(&test, &m, "test");
        if (st == MN_OK) st = ask(&one, r, job, json_object_get(m.value, "options"), test);
        if (one) json_object_set_new(tests, m.name, one);
    }
    return st;
}

/* Goes on with what the job left behind, if it did. */
static void take_up(addressed_run *r, const mn_job_call *call) {
    mn_address_progress at;
    r->kept = mn_seconds();
    if (!call->keep || !mn_address_take(call->keep, &r->model, r->optimizer, &at)) return;
    r->now.step = at.step;
    r->now.loss = at.loss;
}

static mn_status keep_now_and_then(addressed_run *r, const mn_job_call *call) {
    if (!mn_job_keeps_now(call, r->kept)) return MN_OK;
    const mn_address_progress at = { r->now.step, r->now.loss };
    const mn_status st = mn_address_save(call->keep, &r->model, r->optimizer, &at);
    r->kept = mn_seconds();
    return st;
}

static mn_status run(json_t **result, const mn_json *job, const mn_job_call *call) {
    addressed_run r = { 0 };
    double told = 0.0;
    bool stops = false;
    mn_status st = start(&r, job);
    if (st == MN_OK) take_up(&r, call);
    while (st == MN_OK && !stops && r.now.step < r.now.steps) {
        st = step(&r);
        stops = r.now.step < r.now.steps && mn_job_is_to_stop(call);
        if (st == MN_OK && r.now.step < r.now.steps) st = keep_now_and_then(&r, call);
        if (call->watch && mn_seconds() - told > 0.25) {
            call->watch(call->context, &r.now);
            told = mn_seconds();
        }
    }
    json_t *tests = json_object();
    if (st == MN_OK && !stops) st = ask_all(tests, &r, job);
    if (st == MN_OK && !stops) {
        *result = json_pack("{s:O, s:I, s:o}", "tests", tests, "steps", (json_int_t)r.now.step,
                            "train_loss", mn_json_real(r.now.loss));
    }
    json_decref(tests);
    finish(&r);
    if (st == MN_OK && !stops && call->keep) mn_keep_drop(call->keep);
    return st;
}

const mn_job_kind mn_job_addressed = { complete, run };
