/* job_text.c - a job that trains a model on text and measures it on text held out.
 *
 *   data      as in mneme train; paths are kept from the root of the file system. Or made: bytes of
 *             text that the job makes itself (made_text.h), a tenth held out
 *   model     as in mneme train
 *   train     as in mneme train; train.eval_every asks the text held out, train.patience ends early
 *   seed      of initial values and batches
 *   keep      true: the model is left in models/KEY beside the results
 *   ask       what the trained model is asked, see text_questions.h
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
#include "experiments/text/made_text.h"
#include "experiments/text/text_questions.h"
#include "io/json_write.h"
#include "runtime/device.h"
#include "train/trainer.h"

enum { MOST_MADE = 1 << 28 };

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

/* Bytes of text that the job makes, beside which nothing else can say what to read; 0: it names
 * some. */
static mn_status read_made(int64_t *bytes, const mn_json *job) {
    static const char *const keys[] = { "made" };
    const mn_json data = mn_json_member(job, "data");
    *bytes = 0;
    mn_status st = mn_json_opt_i64(bytes, &data, "made");
    if (st == MN_OK && (*bytes < 0 || *bytes > MOST_MADE)) {
        st = mn_json_fail(&data, "made is bytes of text, %d at most", MOST_MADE);
    }
    if (st == MN_OK && *bytes > 0) st = mn_json_unknown_key(&data, keys, MN_COUNTOF(keys));
    return st;
}

/* What the trainer reads. */
static mn_status make_config(mn_json *out, const mn_json *job, const char *folder) {
    json_t *data = json_copy(json_object_get(job->value, "data"));
    json_t *model = json_object_get(job->value, "model");
    json_t *train = json_deep_copy(json_object_get(job->value, "train"));
    json_object_del(data, "made");
    out->name = "job";
    out->value = json_pack("{s:o?, s:O?, s:o, s:s}", "data", data, "model", model, "train",
                           train ? train : json_object(), "out", folder ? folder : "");
    if (!out->value) return mn_fail(MN_ERR_MEMORY, "no memory for a job");
    return mn_spec_set(out->value, "train.seed", json_copy(json_object_get(job->value, "seed")));
}

static mn_status complete(mn_json *job) {
    static const char *const keys[] = { "kind", "data", "model", "train", "seed", "keep", "labels",
                                        "ask", "steps_at_most" };
    mn_json root = { 0 };
    mn_train_options options;
    mn_model_config config = { 0 };
    int64_t seed = 0, most = 0, made = 0;
    bool keep = false;
    mn_status st = mn_json_unknown_key(job, keys, MN_COUNTOF(keys));
    if (st == MN_OK) st = mn_json_opt_i64(&seed, job, "seed");
    if (st == MN_OK) st = mn_json_opt_i64(&most, job, "steps_at_most");
    if (st == MN_OK) st = mn_json_opt_bool(&keep, job, "keep");
    if (st == MN_OK) st = read_made(&made, job);
    if (st == MN_OK) st = mn_text_questions_check(job);
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
    if (st == MN_OK && options.n_train == 0 && made == 0) {
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
    mn_corpus *made, *made_train, *made_valid;    // text of its own
    mn_tokenizer *bytes;
    json_t *curve;
    mn_job_progress now;
    double valid, told, kept;
    double seconds;              // of the steps timed
    int64_t done, timed;         // steps of this process; tokens of those timed
    bool asked;                  // to end, with a checkpoint
} text_run;

enum { UNTIMED = 10 };           // steps

static mn_status make_text(text_run *r, int64_t bytes) {
    const json_t *context = mn_spec_get(r->config.value, "train.context");
    mn_status st = mn_made_text(&r->made, bytes, json_integer_value(context));
    if (st == MN_OK) st = mn_corpus_part(&r->made_train, r->made, 0.0, 0.9);
    if (st == MN_OK) st = mn_corpus_part(&r->made_valid, r->made, 0.9, 1.0);
    return st == MN_OK ? mn_tokenizer_bytes(&r->bytes) : st;
}

static mn_status open_trainer(text_run *r, const mn_json *job) {
    int64_t made = 0;
    mn_status st = read_made(&made, job);
    if (st == MN_OK && made == 0) return mn_trainer_create(&r->trainer, &r->config, r->context);
    if (st == MN_OK) st = make_text(r, made);
    const mn_train_data data = { .train = r->made_train, .valid = r->made_valid,
                                 .tokenizer = r->bytes };
    return st == MN_OK ? mn_trainer_create_from(&r->trainer, &r->config, &data, r->context) : st;
}

/* Goes on with what the job left behind, if it did. */
static void take_up(text_run *r, const char *keep) {
    json_t *state = NULL;
    if (keep) mn_keep_take(&state, keep, r->trainer);
    json_array_extend(r->curve, json_object_get(state, "curve"));
    const json_t *last = json_array_get(r->curve, json_array_size(r->curve) - 1);
    const json_t *valid = json_array_get(last, 1), *loss = json_object_get(state, "loss");
    if (json_is_number(valid)) r->valid = json_number_value(valid);
    if (json_is_number(loss)) r->now.loss = json_number_value(loss);
    json_decref(state);
}

static mn_status keep_now(text_run *r, const mn_job_call *call) {
    r->kept = mn_seconds();
    return mn_keep_save(call->keep, r->trainer, json_pack("{s:O, s:o}", "curve", r->curve, "loss",
                                                          mn_json_real(r->now.loss)));
}

static mn_text_asked asked_of(const text_run *r, const mn_job_call *call) {
    return (mn_text_asked){ r->context, mn_trainer_model(r->trainer),
                            mn_trainer_held_out(r->trainer), call };
}

static mn_status open_run(text_run *r, const mn_json *job, const mn_job_call *call) {
    const mn_context_options one = { .n_threads = 1, .device = call->device };
    mn_status st = make_config(&r->config, job, call->keep);
    if (st == MN_OK) st = mn_context_create(&r->context, &one);
    if (st == MN_OK) st = open_trainer(r, job);
    r->curve = json_array();
    if (st != MN_OK) return st;
    const mn_text_asked asked = asked_of(r, call);
    st = mn_text_questions_open(&asked, job);
    if (st != MN_OK) return st;
    r->now = (mn_job_progress){ .loss = NAN, .score = NAN };
    r->kept = mn_seconds();
    take_up(r, call->keep);
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
        if (mn_job_keeps_now(call, r->kept)) st = keep_now(r, call);
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

/* What came out, with the answers; a job that is to stop meanwhile asks all of it again. */
static mn_status finish(json_t **result, text_run *r, const mn_json *job,
                        const mn_job_call *call) {
    const mn_text_asked asked = asked_of(r, call);
    json_t *told = tell(r);
    mn_status st = told ? MN_OK : mn_fail(MN_ERR_MEMORY, "no memory for a result");
    if (st == MN_OK && json_object_get(job->value, "ask")) {
        if (call->keep) st = keep_now(r, call);
        if (call->watch) call->watch(call->context, &r->now);
        if (st == MN_OK) st = mn_text_questions_ask(told, &r->asked, &asked, job);
    }
    if (st == MN_OK && !r->asked) {
        st = mn_job_keep_model(call, job, asked.model, mn_trainer_tokenizer(r->trainer));
    }
    if (st == MN_OK && !r->asked) *result = json_incref(told);
    json_decref(told);
    return st;
}

static mn_status run(json_t **result, const mn_json *job, const mn_job_call *call) {
    text_run r = { .valid = NAN };
    mn_status st = open_run(&r, job, call);
    if (st == MN_OK) st = train(&r, call);
    if (st == MN_OK && !r.asked) st = finish(result, &r, job, call);
    const bool ended = st == MN_OK && !r.asked;
    mn_trainer_destroy(r.trainer);
    mn_corpus_destroy(r.made_train);
    mn_corpus_destroy(r.made_valid);
    mn_corpus_destroy(r.made);
    mn_tokenizer_destroy(r.bytes);
    mn_context_destroy(r.context);
    json_decref(r.config.value);
    json_decref(r.curve);
    if (ended && st == MN_OK && call->keep) mn_keep_drop(call->keep);
    return st;
}

const mn_job_kind mn_job_text = { complete, run };
