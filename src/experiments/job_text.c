/* job_text.c - a job that trains a model on text and measures it on text held out.
 *
 *   data      as in mneme train; paths are kept from the root of the file system
 *   model     as in mneme train
 *   train     as in mneme train; train.eval_every asks the text held out, train.patience ends early
 *   seed      of initial values and batches
 *   keep      true: the model is left in models/KEY beside the results
 *
 * The result is that of the evaluation of lowest loss, in nats per token. "speed" has the tokens
 * per second of this process's steps but the first ten, and on a GPU its memory in MiB: the one
 * part of a result that another run does not repeat. */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/clock.h"
#include "base/status.h"
#include "base/util.h"
#include "experiments/job_internal.h"
#include "experiments/job_keep.h"
#include "io/json_write.h"
#include "runtime/device.h"
#include "train/trainer.h"

/* ---- completing ------------------------------------------------------------------------------ */

static void make_absolute(json_t *data, const char *key) {
    json_t *at = json_object_get(data, key);
    const size_t n = json_is_array(at) ? json_array_size(at) : 1;
    for (size_t i = 0; at && i < n; i++) {
        const json_t *path = json_is_array(at) ? json_array_get(at, i) : at;
        char *real = json_is_string(path) ? realpath(json_string_value(path), NULL) : NULL;
        json_t *fresh = real ? json_string(real) : NULL;
        free(real);
        if (!fresh) continue;
        if (json_is_array(at)) json_array_set_new(at, i, fresh);
        else json_object_set_new(data, key, fresh);
    }
}

static mn_status fill_in(mn_json *job, const char *path, json_t *value) {
    if (!mn_spec_get(job->value, path)) return mn_spec_set(job->value, path, value);
    json_decref(value);
    return MN_OK;
}

/* What the trainer reads. */
static mn_status make_config(mn_json *out, const mn_json *job, const char *folder) {
    json_t *data = json_object_get(job->value, "data"), *model = json_object_get(job->value,
                                                                                 "model");
    json_t *train = json_deep_copy(json_object_get(job->value, "train"));
    out->name = "job";
    out->value = json_pack("{s:O?, s:O?, s:o, s:s}", "data", data, "model", model, "train",
                           train ? train : json_object(), "out", folder ? folder : "");
    if (!out->value) return mn_fail(MN_ERR_MEMORY, "no memory for a job");
    return mn_spec_set(out->value, "train.seed", json_copy(json_object_get(job->value, "seed")));
}

static mn_status complete(mn_json *job) {
    static const char *const keys[] = { "kind", "data", "model", "train", "seed", "keep", "labels",
                                        "steps_at_most" };
    mn_json root = { 0 };
    mn_train_options options;
    mn_model_config config = { 0 };
    int64_t seed = 0, most = 0;
    bool keep = false;
    mn_status st = mn_json_unknown_key(job, keys, MN_COUNTOF(keys));
    if (st == MN_OK) st = mn_json_opt_i64(&seed, job, "seed");
    if (st == MN_OK) st = mn_json_opt_i64(&most, job, "steps_at_most");
    if (st == MN_OK) st = mn_json_opt_bool(&keep, job, "keep");
    if (st == MN_OK) st = fill_in(job, "seed", json_integer(0));
    if (st == MN_OK) st = fill_in(job, "train.tensorboard", json_false());
    if (st != MN_OK) return st;
    json_object_del(job->value, "steps_at_most");
    json_t *data = json_object_get(job->value, "data");
    make_absolute(data, "train");
    make_absolute(data, "valid");
    st = make_config(&root, job, NULL);
    if (st == MN_OK) st = mn_train_options_read(&options, &root);
    if (st == MN_OK && most > 0 && options.steps > most) {
        st = mn_spec_set(job->value, "train.steps", json_integer(most));
    }
    const mn_json model = mn_json_member(&root, "model");
    if (st == MN_OK) st = mn_model_config_read(&config, &model);
    if (st == MN_OK && options.n_train == 0) {
        st = mn_fail(MN_ERR_ARGUMENT, "job: data.train names no text");
    }
    mn_model_config_free(&config);
    json_decref(root.value);
    return st;
}

/* ---- running --------------------------------------------------------------------------------- */

typedef struct text_run {
    mn_json config;
    mn_context *context;
    mn_trainer *trainer;
    json_t *curve;
    mn_job_progress now;
    double valid, told, kept;
    double seconds;              // of the steps timed
    int64_t done, timed;         // steps of this process; tokens of those timed
    bool asked;                  // to end, with a checkpoint
} text_run;

enum { UNTIMED = 10 };           // steps

static mn_status open_run(text_run *r, const mn_json *job, const mn_job_call *call) {
    const mn_context_options one = { .n_threads = 1, .device = call->device };
    json_t *state = NULL;
    mn_status st = make_config(&r->config, job, call->keep);
    if (st == MN_OK) st = mn_context_create(&r->context, &one);
    if (st == MN_OK) st = mn_trainer_create(&r->trainer, &r->config, r->context);
    r->curve = json_array();
    if (st != MN_OK) return st;
    r->now = (mn_job_progress){ .loss = NAN, .score = NAN };
    r->kept = mn_seconds();
    if (call->keep) mn_keep_take(&state, call->keep, r->trainer);
    json_array_extend(r->curve, json_object_get(state, "curve"));
    json_decref(state);
    r->now.step = mn_trainer_step_number(r->trainer);
    r->now.steps = mn_trainer_options(r->trainer)->steps;
    return r->now.step == 0 ? mn_trainer_begin(r->trainer) : MN_OK;
}

static mn_status evaluate(text_run *r) {
    bool best;
    const mn_status st = mn_trainer_evaluate(r->trainer, &r->valid, &best);
    if (st == MN_OK && !isnan(r->valid)) {
        json_array_append_new(r->curve, json_pack("[I, o]", (json_int_t)r->now.step,
                                                  mn_json_real(r->valid)));
    }
    return st;
}

static mn_status take_step(text_run *r) {
    mn_step_result s;
    const double began = mn_seconds();
    const mn_status st = mn_trainer_step(r->trainer, &s);
    if (st != MN_OK) return st;
    if (++r->done > UNTIMED) {
        r->seconds += mn_seconds() - began;
        r->timed += s.tokens;
    }
    r->now.step = s.step + 1;
    r->now.loss = isnan(r->now.loss) ? s.loss : 0.9 * r->now.loss + 0.1 * s.loss;
    return MN_OK;
}

static mn_status train(text_run *r, const mn_job_call *call) {
    const int64_t every = mn_trainer_options(r->trainer)->eval_every;
    mn_status st = MN_OK;
    while (st == MN_OK && r->now.step < r->now.steps && !r->asked &&
           !mn_trainer_exhausted(r->trainer)) {
        st = take_step(r);
        if (st != MN_OK) break;
        const bool asks = (every > 0 && r->now.step % every == 0) || r->now.step == r->now.steps;
        if (asks) st = evaluate(r);
        if (call->watch && (asks || mn_seconds() - r->told > 0.25)) {
            call->watch(call->context, &r->now);
            r->told = mn_seconds();
        }
        if (st != MN_OK || r->now.step == r->now.steps) continue;
        r->asked = mn_job_is_to_stop(call);
        if (!mn_job_keeps_now(call, r->kept)) continue;
        st = mn_keep_save(call->keep, r->trainer, json_pack("{s:O}", "curve", r->curve));
        r->kept = mn_seconds();
    }
    return st;
}

static json_t *speed_of(const text_run *r) {
    const double rate = r->seconds > 0.0 ? (double)r->timed / r->seconds : NAN;
    const mn_device *device = r->context->device;
    size_t bytes = 0;
    if (device && mn_device_used(device, &bytes) != MN_OK) bytes = 0;
    return json_pack("{s:o, s:o}", "tokens_per_second", mn_json_real(rate), "mebibytes",
                     mn_json_real(device ? (double)bytes / 1048576.0 : NAN));
}

static json_t *tell(const text_run *r) {
    double lowest = NAN;
    int64_t step = r->now.step;
    size_t i;
    json_t *row;
    json_array_foreach(r->curve, i, row) {
        const double loss = json_number_value(json_array_get(row, 1));
        if (!(isnan(lowest) || loss < lowest)) continue;
        lowest = loss;
        step = json_integer_value(json_array_get(row, 0));
    }
    return json_pack("{s:o, s:o, s:I, s:I, s:I, s:o, s:I, s:o, s:O}", "loss", mn_json_real(lowest),
                     "last", mn_json_real(r->valid), "step", (json_int_t)step, "steps",
                     (json_int_t)r->now.step, "tokens", (json_int_t)mn_trainer_seen(r->trainer),
                     "train_loss", mn_json_real(r->now.loss), "parameters",
                     (json_int_t)mn_model_count(mn_trainer_model(r->trainer)), "speed", speed_of(r),
                     "curve", r->curve);
}

static mn_status run(json_t **result, const mn_json *job, const mn_job_call *call) {
    text_run r = { .valid = NAN };
    mn_status st = open_run(&r, job, call);
    if (st == MN_OK) st = train(&r, call);
    const bool ended = st == MN_OK && !r.asked;
    if (ended) *result = tell(&r);
    if (ended && !*result) st = mn_fail(MN_ERR_MEMORY, "no memory for a result");
    if (ended && st == MN_OK) {
        st = mn_job_keep_model(call, job, mn_trainer_model(r.trainer),
                               mn_trainer_tokenizer(r.trainer));
    }
    mn_trainer_destroy(r.trainer);
    mn_context_destroy(r.context);
    json_decref(r.config.value);
    json_decref(r.curve);
    if (ended && st == MN_OK && call->keep) mn_keep_drop(call->keep);
    return st;
}

const mn_job_kind mn_job_text = { complete, run };
