/* eval_task.c - mneme eval --task: answers of a model to the questions of a task, each the
 * likeliest token after the right ones before it, which is what greedy generation says as long as
 * it is right. */
#include "cli/eval/eval_task.h"

#include <inttypes.h>
#include <math.h>
#include <stdio.h>
#include <string.h>

#include "base/status.h"
#include "base/util.h"
#include "experiments/task_run.h"
#include "io/json_write.h"

enum { BATCH = 8 };

static void note_tokenizer(void *context, const char *key, const char *value, const char *about) {
    (void)value;
    (void)about;
    if (strcmp(key, "tokenizer") == 0) *(bool *)context = true;
}

/* Tasks of text are asked in the tokens of the model, unless the options say others. */
static mn_status add_tokenizer(json_t *options, const mn_eval_task_ask *ask) {
    const int row = mn_task_find(ask->task);
    bool takes = false;
    if (row >= 0) mn_task_options_list(row, note_tokenizer, &takes);
    if (!takes || json_object_get(options, "tokenizer")) return MN_OK;
    return json_object_set_new(options, "tokenizer", json_string(ask->model)) == 0
               ? MN_OK : mn_fail(MN_ERR_MEMORY, "no memory for the options of a task");
}

static mn_status open_run(mn_task_run **run, mn_json *job, const mn_eval_task_ask *ask,
                          const mn_model *model) {
    json_t *options = ask->options ? json_deep_copy(ask->options) : json_object();
    mn_status st = add_tokenizer(options, ask);
    *job = (mn_json){ .name = "task" };
    job->value = json_pack("{s:{s:s, s:o, s:I}, s:{}, s:{s:s, s:I}}", "task", "name", ask->task,
                           "options", options, "test", (json_int_t)ask->rows, "train", "evaluate",
                           "metric", "sequence", "batch", (json_int_t)mn_min(BATCH, ask->rows));
    if (!job->value) return mn_fail(MN_ERR_MEMORY, "no memory for a task");
    if (st == MN_OK) st = mn_task_run_open(run, job);
    const int64_t own = mn_model_describe(model)->vocab_size;
    if (st == MN_OK && mn_task_run_vocab(*run) > own) {
        st = mn_fail(MN_ERR_ARGUMENT, "%s has tokens up to %" PRId64 ", and the model knows %"
                     PRId64 "; give the options that it was trained with, by --set", ask->task,
                     mn_task_run_vocab(*run), own);
    }
    return st;
}

static double number_of(const json_t *answers, const char *key) {
    const json_t *value = json_object_get(answers, key);
    return json_is_number(value) ? json_number_value(value) : NAN;
}

static void print_table(const json_t *out, const mn_eval_task_ask *ask) {
    const char *name;
    json_t *value;
    printf("%s: %" PRId64 " samples, %" PRId64 " answers; loss %.4f\n\n", ask->task, ask->rows,
           (int64_t)json_integer_value(json_object_get(out, "answers")), number_of(out, "loss"));
    printf("%-22s %8.4f +- %.4f\n", "samples all right", number_of(out, "sequence"),
           number_of(out, "sequence_error"));
    printf("%-22s %8.4f\n", "answers right", number_of(out, "token"));
    printf("%-22s %8.4f\n", "mean over samples", number_of(out, "example"));
    printf("%-22s %8.4f\n", "mean over classes", number_of(out, "macro"));
    json_object_foreach(json_object_get(out, "groups"), name, value) {
        printf("  %-20s %8.4f\n", name, json_is_number(value) ? json_number_value(value) : NAN);
    }
}

mn_status mn_eval_task(json_t *root, mn_context *context, mn_model *model,
                       const mn_eval_task_ask *ask) {
    mn_task_run *run = NULL;
    mn_tape *tape = NULL;
    mn_json job;
    json_t *answers = NULL;
    double loss = NAN, right = NAN;
    mn_status st = open_run(&run, &job, ask, model);
    if (st == MN_OK) st = mn_tape_create(&tape, context, mn_model_pass_dtype(model));
    if (st == MN_OK) st = mn_task_run_ask(&answers, &loss, &right, run, tape, model);
    if (st == MN_OK) {
        const double se = sqrt(right * (1.0 - right) / (double)ask->rows);
        json_object_del(answers, "score");
        json_object_set_new(answers, "sequence_error", mn_json_real(se));
        json_object_set_new(answers, "name", json_string(ask->task));
        json_object_set_new(answers, "samples", json_integer(ask->rows));
        if (!ask->json) print_table(answers, ask);
        json_object_set(root, "task", answers);
    }
    json_decref(answers);
    json_decref(job.value);
    mn_task_run_close(run);
    mn_tape_destroy(tape);
    return st;
}
