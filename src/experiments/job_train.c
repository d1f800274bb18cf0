/* job_train.c - a job that trains a model on a task and asks it.
 *
 *   task      name, options, train and test: examples of the sets (0: fresh ones to train on);
 *             setting: a published one, which brings options and sizes; segments: [{options,
 *             train}], sets to train on one after the other, whose batches do not mix, with fresh:
 *             true new examples of each in every pass
 *   model     as in mneme train; vocab_size comes from the task
 *   train     as in mneme train; batch and context come from the task and `batch`
 *   epochs    passes over the training set, in place of train.steps; steps_at_most cuts either
 *   lr_by_epoch   the learning rate moves once an epoch
 *   evaluate  every (steps; 0: an epoch), metric (token, macro, example, sequence), select (last,
 *             loss: the evaluation of lowest test loss), stop_at (score that ends the run, 0:
 *             none), patience (evaluations without a lower loss; 0: all), batch (rows of a test
 *             batch)
 *   tests     name: {options, test}: further sets to ask the trained model about
 *   keep      true: the trained model is left in models/KEY beside the results
 *   look      name: options: what to look at inside the trained model, see looks.def
 *
 * The seed draws initial values, training batches and the samples of all sets. The selection looks
 * at the test set because the published protocols do. */
#include <inttypes.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/clock.h"
#include "base/status.h"
#include "base/util.h"
#include "experiments/job_keep.h"
#include "experiments/job_internal.h"
#include "experiments/looks/look.h"
#include "experiments/task_run.h"
#include "train/trainer.h"

/* ---- completing ------------------------------------------------------------------------------ */

static mn_status lay_setting(json_t *task, const char *name, const char *setting) {
    for (int i = 0; i < mn_task_setting_count(); i++) {
        const mn_task_setting s = mn_task_setting_row(i);
        if (strcmp(s.task, name) != 0 || strcmp(s.name, setting) != 0) continue;
        mn_json options = { .value = json_object(), .name = "options" };
        mn_status st = mn_task_apply(&options, s.changes);
        const json_t *given = json_object_get(task, "options");
        if (st == MN_OK && given) st = mn_spec_merge(options.value, given);
        json_object_set_new(task, "options", options.value);
        if (!json_object_get(task, "train")) {
            json_object_set_new(task, "train", json_integer(s.train));
        }
        if (s.test > 0 && !json_object_get(task, "test")) {
            json_object_set_new(task, "test", json_integer(s.test));
        }
        json_object_del(task, "setting");
        return st;
    }
    return mn_fail(MN_ERR_ARGUMENT, "%s: there is no setting \"%s\"; mneme task %s lists them",
                   name, setting, name);
}

static mn_status complete_task(mn_json *job) {
    static const char *const keys[] = { "name", "setting", "options", "train", "test",
                                        "segments", "fresh" };
    const mn_json task = mn_json_member(job, "task");
    const char *name = NULL, *setting = NULL;
    mn_status st = mn_json_expect_object(&task);
    if (st == MN_OK) st = mn_json_unknown_key(&task, keys, MN_COUNTOF(keys));
    if (st == MN_OK) st = mn_json_get_text(&name, &task, "name");
    if (st == MN_OK) st = mn_json_opt_text(&setting, &task, "setting");
    if (st != MN_OK || !setting) return st;
    char task_name[64], setting_name[64];    // the texts leave with the members that hold them
    snprintf(task_name, sizeof task_name, "%s", name);
    snprintf(setting_name, sizeof setting_name, "%s", setting);
    return lay_setting(task.value, task_name, setting_name);
}

/* Epochs become steps, a shared learning rate becomes train.lr_hold. */
static mn_status complete_steps(mn_json *job, int64_t epoch) {
    int64_t epochs = 0, most = INT64_MAX, steps = 2000;
    bool by_epoch = false;
    const mn_json train = mn_json_member(job, "train");
    mn_status st = mn_json_opt_i64(&epochs, job, "epochs");
    if (st == MN_OK) st = mn_json_opt_i64(&most, job, "steps_at_most");
    if (st == MN_OK) st = mn_json_opt_bool(&by_epoch, job, "lr_by_epoch");
    if (st == MN_OK) st = mn_json_opt_i64(&steps, &train, "steps");
    if (st != MN_OK) return st;
    if ((epochs > 0 || by_epoch) && epoch == 0) {
        return mn_fail(MN_ERR_ARGUMENT, "job: epochs and lr_by_epoch need a training set of a "
                       "size; give task.train, or train.steps alone");
    }
    if (epochs < 0 || most < 1 || (epochs > 0 && epochs > INT64_MAX / epoch)) {
        return mn_fail(MN_ERR_ARGUMENT, "job: epochs and steps_at_most count from 1 on");
    }
    if (epochs > 0) steps = epochs * epoch;
    st = mn_spec_set(job->value, "train.steps", json_integer(mn_min(steps, most)));
    if (st == MN_OK && by_epoch) st = mn_spec_set(job->value, "train.lr_hold", json_integer(epoch));
    json_object_del(job->value, "epochs");
    json_object_del(job->value, "steps_at_most");
    json_object_del(job->value, "lr_by_epoch");
    return st;
}

/* Rows of `section` that the job leaves out. */
static mn_status fill_in(json_t *job, const char *path, json_t *value) {
    if (!mn_spec_get(job, path)) return mn_spec_set(job, path, value);
    json_decref(value);
    return MN_OK;
}

static mn_status complete_defaults(json_t *job) {
    mn_status st = fill_in(job, "seed", json_integer(0));
    if (st == MN_OK) st = fill_in(job, "task.test", json_integer(1280));
    if (st == MN_OK) st = fill_in(job, "task.train", json_integer(0));
    if (st == MN_OK) st = fill_in(job, "train.batch", json_integer(32));
    if (st == MN_OK) st = fill_in(job, "train.tensorboard", json_false());
    if (st == MN_OK) st = fill_in(job, "evaluate.every", json_integer(0));
    if (st == MN_OK) st = fill_in(job, "evaluate.metric", json_string("token"));
    if (st == MN_OK) st = fill_in(job, "evaluate.select", json_string("last"));
    return st == MN_OK ? fill_in(job, "evaluate.batch", json_integer(128)) : st;
}

/* What the trainer reads: model and train of the job, and what the task and the seed say. */
static mn_status make_config(json_t **out, mn_task_run *task, const mn_json *job) {
    const mn_source source = mn_task_run_source(task);
    json_t *model = json_deep_copy(json_object_get(job->value, "model"));
    json_t *train = json_deep_copy(json_object_get(job->value, "train"));
    json_t *seed = json_copy(json_object_get(job->value, "seed"));
    json_t *root = json_pack("{s:o, s:o}", "model", model ? model : json_object(), "train",
                             train ? train : json_object());
    mn_status st = root ? MN_OK : mn_fail(MN_ERR_MEMORY, "no memory for a job");
    if (st == MN_OK) st = mn_spec_set(root, "train.batch", json_integer(source.rows));
    if (st == MN_OK) st = mn_spec_set(root, "train.context", json_integer(source.length));
    if (st == MN_OK) st = mn_spec_set(root, "train.seed", seed);
    if (st == MN_OK) {
        st = mn_spec_set(root, "model.max_position_embeddings",
                         json_integer(mn_task_run_longest(task)));
    }
    if (st == MN_OK) {
        st = mn_spec_set(root, "model.vocab_size", json_integer(mn_task_run_vocab(task)));
    }
    if (st == MN_OK) *out = root;
    else json_decref(root);
    return st;
}

/* Whether model and options can be read, so that a misspelt key fails before anything runs. */
static mn_status check_config(mn_task_run *task, const mn_json *job) {
    mn_json root = { .name = "job" };
    mn_train_options options;
    mn_model_config config = { 0 };
    mn_status st = make_config(&root.value, task, job);
    const mn_json model = mn_json_member(&root, "model");
    if (st == MN_OK) st = mn_train_options_read(&options, &root);
    if (st == MN_OK) st = mn_model_config_read(&config, &model);
    mn_model_config_free(&config);
    json_decref(root.value);
    return st;
}

static mn_status complete(mn_json *job) {
    static const char *const keys[] = { "kind", "task", "model", "train", "seed", "epochs",
                                        "steps_at_most", "lr_by_epoch", "evaluate", "tests",
                                        "look", "keep", "labels" };
    const mn_json looks = mn_json_member(job, "look");
    mn_status st = mn_json_unknown_key(job, keys, MN_COUNTOF(keys));
    if (st == MN_OK) st = complete_task(job);
    if (st == MN_OK) st = complete_defaults(job->value);
    if (st == MN_OK && looks.value) st = mn_look_check(&looks);
    mn_task_run *run = NULL;
    if (st == MN_OK) st = mn_task_run_open(&run, job);
    if (st == MN_OK) st = complete_steps(job, mn_task_run_epoch(run));
    if (st == MN_OK) st = check_config(run, job);
    mn_task_run_close(run);
    return st;
}

/* ---- running --------------------------------------------------------------------------------- */

typedef enum stop_reason { STOP_STEPS, STOP_TARGET, STOP_PATIENCE, STOP_ASKED } stop_reason;

static const char *const stop_names[] = { "steps", "target", "patience" };

typedef struct train_run {
    mn_task_run *task;
    mn_context *context;
    mn_trainer *trainer;
    mn_tape *tape;
    mn_json config;
    mn_job_progress now;
    json_t *curve, *best;             // best: the answers of the selected evaluation
    double lowest, told, kept;
    int64_t worse;
    stop_reason stopped;
} train_run;

/* What a checkpoint of the trainer does not know. */
static json_t *state_of(const train_run *r) {
    return json_pack("{s:O, s:O*, s:o, s:I, s:o}", "curve", r->curve, "best", r->best, "lowest",
                     mn_json_real(r->lowest), "worse", (json_int_t)r->worse, "loss",
                     mn_json_real(r->now.loss));
}

static double number_or(const json_t *value, double otherwise) {
    return json_is_number(value) ? json_number_value(value) : otherwise;
}

/* Goes on with what the job left behind, if it did. */
static void take_up(train_run *r, const char *keep) {
    json_t *state = NULL;
    mn_keep_take(&state, keep, r->trainer);
    if (!state) return;
    json_t *curve = json_object_get(state, "curve"), *best = json_object_get(state, "best");
    if (json_is_array(curve)) json_array_extend(r->curve, curve);
    if (json_is_object(best)) r->best = json_incref(best);
    r->lowest = number_or(json_object_get(state, "lowest"), INFINITY);
    r->worse = json_integer_value(json_object_get(state, "worse"));
    r->now.loss = number_or(json_object_get(state, "loss"), NAN);
    r->now.step = mn_trainer_step_number(r->trainer);
    json_decref(state);
}

static mn_status keep_now_and_then(train_run *r, const mn_job_call *call) {
    if (mn_job_is_to_stop(call)) r->stopped = STOP_ASKED;
    if (!mn_job_keeps_now(call, r->kept)) return MN_OK;
    const mn_status st = mn_keep_save(call->keep, r->trainer, state_of(r));
    r->kept = mn_seconds();
    return st;
}

static mn_status start(train_run *r, const mn_json *job, const mn_job_call *call) {
    const mn_context_options one = { .n_threads = 1, .device = call->device };
    mn_status st = mn_task_run_open(&r->task, job);
    r->config.name = "job";
    if (st == MN_OK) st = make_config(&r->config.value, r->task, job);
    if (st == MN_OK && call->keep) {
        st = mn_spec_set(r->config.value, "out", json_string(call->keep));
    }
    if (st == MN_OK) st = mn_context_create(&r->context, &one);
    if (st != MN_OK) return st;
    const mn_source source = mn_task_run_source(r->task);
    const mn_train_data data = { .train_source = &source };
    st = mn_trainer_create_from(&r->trainer, &r->config, &data, r->context);
    if (st == MN_OK) {
        const mn_dtype dtype = mn_model_pass_dtype(mn_trainer_model(r->trainer));
        st = mn_tape_create(&r->tape, r->context, dtype);
    }
    r->now = (mn_job_progress){ .loss = NAN, .score = NAN };
    r->lowest = INFINITY;
    r->curve = json_array();
    if (st != MN_OK) return st;
    r->now.steps = mn_trainer_options(r->trainer)->steps;
    r->kept = mn_seconds();
    if (call->keep) take_up(r, call->keep);
    return MN_OK;
}

static void finish(train_run *r) {
    mn_tape_destroy(r->tape);
    mn_trainer_destroy(r->trainer);
    mn_context_destroy(r->context);
    mn_task_run_close(r->task);
    json_decref(r->config.value);
    json_decref(r->curve);
    json_decref(r->best);
}

/* Asks the test set, keeps the answers if they are the ones to report. */
static mn_status evaluate(train_run *r) {
    const mn_evaluation *how = mn_task_run_evaluation(r->task);
    json_t *answers = NULL;
    double loss = NAN;
    const mn_status st = mn_task_run_ask(&answers, &loss, &r->now.score, r->task, r->tape,
                                         mn_trainer_model(r->trainer));
    if (st != MN_OK) return st;
    json_object_set_new(answers, "step", json_integer(r->now.step));
    json_array_append_new(r->curve, json_pack("[I, o, o]", (json_int_t)r->now.step,
                                              mn_json_real(loss), mn_json_real(r->now.score)));
    const bool lower = loss < r->lowest;
    r->worse = lower ? 0 : r->worse + 1;
    if (lower) r->lowest = loss;
    if (lower || !how->by_loss || !r->best) {
        json_decref(r->best);
        r->best = answers;
    } else {
        json_decref(answers);
    }
    if (how->stop_at > 0.0 && r->now.score > how->stop_at) r->stopped = STOP_TARGET;
    else if (how->patience > 0 && r->worse >= how->patience) r->stopped = STOP_PATIENCE;
    return MN_OK;
}

static mn_status train(train_run *r, const mn_job_call *call) {
    const mn_evaluation *how = mn_task_run_evaluation(r->task);
    mn_status st = MN_OK;
    while (st == MN_OK && r->now.step < r->now.steps && r->stopped == STOP_STEPS) {
        mn_step_result s;
        st = mn_trainer_step(r->trainer, &s);
        if (st != MN_OK) break;
        r->now.step = s.step + 1;
        r->now.loss = isnan(r->now.loss) ? s.loss : 0.9 * r->now.loss + 0.1 * s.loss;
        const bool asks = (how->every > 0 && r->now.step % how->every == 0) ||
                          r->now.step == r->now.steps;
        if (asks) st = evaluate(r);
        if (call->watch && (asks || mn_seconds() - r->told > 0.25)) {
            call->watch(call->context, &r->now);
            r->told = mn_seconds();
        }
        const bool more = r->now.step < r->now.steps && r->stopped == STOP_STEPS;
        if (st == MN_OK && more) st = keep_now_and_then(r, call);
    }
    return st;
}

static mn_status look(train_run *r, const mn_json *job) {
    const mn_json looks = mn_json_member(job, "look");
    const mn_look_at at = { r->context, mn_trainer_model(r->trainer), r->task };
    return looks.value ? mn_look_all(r->best, &at, &looks) : MN_OK;
}

static mn_status run(json_t **result, const mn_json *job, const mn_job_call *call) {
    train_run r = { 0 };
    mn_status st = start(&r, job, call);
    if (st == MN_OK) st = train(&r, call);
    const bool ended = st == MN_OK && r.stopped != STOP_ASKED;
    json_t *tests = NULL;
    if (ended) {
        st = mn_task_run_tests(&tests, r.task, r.tape, mn_trainer_model(r.trainer));
    }
    if (ended && st == MN_OK && r.best) {
        json_object_set_new(r.best, "steps", json_integer(r.now.step));
        json_object_set_new(r.best, "stopped", json_string(stop_names[r.stopped]));
        json_object_set_new(r.best, "train_loss", mn_json_real(r.now.loss));
        json_object_set_new(r.best, "parameters",
                            json_integer(mn_model_count(mn_trainer_model(r.trainer))));
        if (tests) json_object_set(r.best, "tests", tests);
        json_object_set(r.best, "curve", r.curve);
        st = look(&r, job);
        if (st == MN_OK) {
            st = mn_job_keep_model(call, job, mn_trainer_model(r.trainer), NULL);
        }
        if (st == MN_OK) *result = json_incref(r.best);
    }
    json_decref(tests);
    finish(&r);
    if (ended && st == MN_OK && call->keep) mn_keep_drop(call->keep);
    return st;
}

const mn_job_kind mn_job_train = { complete, run };
