/* text_questions.c - perplexity by length, and tasks by budget. */
#include "experiments/text/text_questions.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>

#include "base/status.h"
#include "base/util.h"
#include "eval/perplexity.h"
#include "experiments/task_run.h"
#include "io/json_write.h"
#include "tape/tape.h"

typedef struct questions {
    mn_json lengths, tasks, budgets;
    int64_t tokens, rows, batch;
    const char *essays;              // NULL: none
} questions;

static mn_status read(questions *q, const mn_json *job) {
    static const char *const keys[] = { "lengths", "tokens", "tasks", "budgets", "rows", "batch",
                                        "essays" };
    const mn_json ask = mn_json_member(job, "ask");
    *q = (questions){ .rows = 64, .batch = 8 };
    if (!mn_json_given(&ask)) return MN_OK;
    mn_status st = mn_json_expect_object(&ask);
    if (st == MN_OK) st = mn_json_unknown_key(&ask, keys, MN_COUNTOF(keys));
    if (st == MN_OK) st = mn_json_opt_i64(&q->tokens, &ask, "tokens");
    if (st == MN_OK) st = mn_json_opt_i64(&q->rows, &ask, "rows");
    if (st == MN_OK) st = mn_json_opt_i64(&q->batch, &ask, "batch");
    if (st == MN_OK) st = mn_json_opt_text(&q->essays, &ask, "essays");
    q->lengths = mn_json_member(&ask, "lengths");
    q->tasks = mn_json_member(&ask, "tasks");
    q->budgets = mn_json_member(&ask, "budgets");
    if (st == MN_OK && (q->tokens < 0 || q->rows < 1 || q->batch < 1)) {
        st = mn_json_fail(&ask, "rows and batch are 1 or more, tokens 0 or more");
    }
    q->batch = mn_min(q->batch, q->rows);
    return st;
}

/* ---- in the model's tokens ------------------------------------------------------------------- */

typedef struct wanted {
    bool budget, essays, tokenizer;      // options of a task
} wanted;

static void note_option(void *context, const char *key, const char *value, const char *about) {
    (void)value;
    (void)about;
    wanted *w = context;
    w->budget |= strcmp(key, "budget") == 0;
    w->essays |= strcmp(key, "essays") == 0;
    w->tokenizer |= strcmp(key, "tokenizer") == 0;
}

/* The name by which a task opens the tokenizer of the job's data, NULL where it has none. */
static const char *tokenizer_of(const mn_json *job, char path[4096]) {
    const json_t *data = json_object_get(job->value, "data");
    const json_t *train = json_object_get(data, "train");
    const char *name = json_string_value(json_object_get(data, "tokenizer")), *first;
    struct stat about;
    if (json_object_get(data, "made")) return "bytes";
    if (name && strcmp(name, "chars") != 0) return name;
    first = json_string_value(json_is_array(train) ? json_array_get(train, 0) : train);
    if (!first || snprintf(path, 4096, "%s/tokenizer.json", first) >= 4096) return NULL;
    return stat(path, &about) == 0 ? path : NULL;
}

/* A job of the task alone, new. */
static mn_status make_task(json_t **out, const questions *q, const mn_json *task,
                           const mn_json *budget, const mn_json *job) {
    char path[4096];
    const char *tokenizer = tokenizer_of(job, path);
    wanted w = { 0 };
    mn_task_options_list(mn_task_find(task->name), note_option, &w);
    if (!w.budget || !w.tokenizer) {
        return mn_json_fail(task, "is no task of text with a budget of tokens");
    }
    if (!tokenizer) {
        return mn_fail(MN_ERR_ARGUMENT, "ask.tasks: they are asked in the tokens of the model: "
                       "data.tokenizer has to be bytes or the file of a tokenizer");
    }
    json_t *options = json_deep_copy(task->value);
    json_object_set_new(options, "tokenizer", json_string(tokenizer));
    json_object_set(options, "budget", budget->value);
    if (w.essays && q->essays && !json_object_get(options, "essays")) {
        json_object_set_new(options, "essays", json_string(q->essays));
    }
    *out = json_pack("{s:O, s:{s:s, s:o, s:I}, s:{}, s:{s:s, s:I}}", "seed",
                     json_object_get(job->value, "seed"), "task", "name", task->name, "options",
                     options, "test", (json_int_t)q->rows, "train", "evaluate", "metric",
                     "sequence", "batch", (json_int_t)q->batch);
    return *out ? MN_OK : mn_fail(MN_ERR_MEMORY, "no memory for a task");
}

/* ---- before training ------------------------------------------------------------------------- */

static mn_status check_counts(const mn_json *list, int64_t least) {
    if (!mn_json_given(list)) return MN_OK;
    mn_status st = mn_json_expect_object(list);
    for (mn_json one = { 0 }; st == MN_OK && mn_json_next(&one, list);) {
        int64_t n = 0;
        st = mn_json_read_i64(&n, &one);
        if (st == MN_OK && n < least) st = mn_json_fail(&one, "is too few tokens");
    }
    return st;
}

mn_status mn_text_questions_check(const mn_json *job) {
    questions q;
    mn_status st = read(&q, job);
    if (st == MN_OK) st = check_counts(&q.lengths, 2);
    if (st == MN_OK) st = check_counts(&q.budgets, 1);
    if (st == MN_OK && mn_json_given(&q.tasks)) st = mn_json_expect_object(&q.tasks);
    for (mn_json task = { 0 }; st == MN_OK && mn_json_next(&task, &q.tasks);) {
        st = mn_json_expect_object(&task);
        if (st == MN_OK && mn_task_find(task.name) < 0) {
            st = mn_json_fail(&q.tasks, "there is no task \"%s\"; mneme task lists them",
                              task.name);
        }
    }
    return st;
}

static mn_perplexity_options windows_of(const questions *q, const mn_json *length) {
    return (mn_perplexity_options){ .length = json_integer_value(length->value),
                                    .max_tokens = q->tokens };
}

/* Each task at its largest budget: a smaller one may be too short for it. */
static mn_status open_tasks(const questions *q, const mn_json *job) {
    mn_json most = { 0 };
    mn_status st = MN_OK;
    for (mn_json one = { 0 }; mn_json_next(&one, &q->budgets);) {
        if (json_integer_value(one.value) > json_integer_value(most.value)) most = one;
    }
    if (!most.value) return MN_OK;
    for (mn_json task = { 0 }; st == MN_OK && mn_json_next(&task, &q->tasks);) {
        mn_json alone = { .name = "ask" };
        mn_task_run *run = NULL;
        st = make_task(&alone.value, q, &task, &most, job);
        if (st == MN_OK) st = mn_task_run_open(&run, &alone);
        mn_task_run_close(run);
        json_decref(alone.value);
    }
    return st;
}

mn_status mn_text_questions_open(const mn_text_asked *at, const mn_json *job) {
    questions q;
    mn_status st = read(&q, job);
    for (mn_json length = { 0 }; st == MN_OK && mn_json_next(&length, &q.lengths);) {
        const mn_perplexity_options how = windows_of(&q, &length);
        int64_t windows;
        if (at->held_out) st = mn_perplexity_windows(&windows, at->held_out, &how);
        else st = mn_fail(MN_ERR_ARGUMENT, "ask.lengths: no text is held out; give data.valid");
    }
    return st == MN_OK ? open_tasks(&q, job) : st;
}

/* ---- asking ---------------------------------------------------------------------------------- */

static mn_status ask_lengths(json_t *out, const questions *q, const mn_text_asked *at) {
    mn_status st = MN_OK;
    for (mn_json length = { 0 }; st == MN_OK && mn_json_next(&length, &q->lengths);) {
        const mn_perplexity_options how = windows_of(q, &length);
        mn_perplexity p;
        if (mn_job_is_to_stop(at->call)) return MN_OK;
        st = mn_perplexity_measure(&p, at->context, at->model, at->held_out, &how);
        if (st != MN_OK) continue;
        json_object_set_new(out, length.name,
                            json_pack("{s:I, s:I, s:o, s:o, s:o}", "length", (json_int_t)p.length,
                                      "tokens", (json_int_t)p.tokens, "loss",
                                      mn_json_real(p.loss), "loss_error",
                                      mn_json_real(p.loss_error), "perplexity",
                                      mn_json_real(p.perplexity)));
    }
    return st;
}

static mn_status ask_task(json_t *out, const questions *q, const mn_json *task,
                          const mn_json *budget, const mn_text_asked *at, const mn_json *job) {
    mn_json alone = { .name = "ask" };
    mn_task_run *run = NULL;
    mn_tape *tape = NULL;
    json_t *answers = NULL;
    double loss, score;
    mn_status st = make_task(&alone.value, q, task, budget, job);
    if (st == MN_OK && mn_task_run_open(&run, &alone) != MN_OK) {
        json_object_set_new(out, budget->name,
                            json_pack("{s:s}", "left_out", mn_last_error()));
        json_decref(alone.value);
        return MN_OK;
    }
    if (st == MN_OK) st = mn_tape_create(&tape, at->context, mn_model_pass_dtype(at->model));
    if (st == MN_OK) st = mn_task_run_ask(&answers, &loss, &score, run, tape, at->model);
    if (st == MN_OK) json_object_set(out, budget->name, answers);
    json_decref(answers);
    mn_tape_destroy(tape);
    mn_task_run_close(run);
    json_decref(alone.value);
    return st;
}

static mn_status ask_tasks(json_t *out, const questions *q, const mn_text_asked *at,
                           const mn_json *job) {
    mn_status st = MN_OK;
    for (mn_json task = { 0 }; st == MN_OK && mn_json_next(&task, &q->tasks);) {
        json_t *own = json_object();
        json_object_set_new(out, task.name, own);
        for (mn_json budget = { 0 }; st == MN_OK && mn_json_next(&budget, &q->budgets);) {
            if (mn_job_is_to_stop(at->call)) return MN_OK;
            st = ask_task(own, q, &task, &budget, at, job);
        }
    }
    return st;
}

mn_status mn_text_questions_ask(json_t *result, bool *stopped, const mn_text_asked *at,
                                const mn_json *job) {
    questions q;
    json_t *lengths = json_object(), *tasks = json_object();
    mn_status st = read(&q, job);
    if (st == MN_OK) st = ask_lengths(lengths, &q, at);
    if (st == MN_OK) st = ask_tasks(tasks, &q, at, job);
    if (st == MN_OK && mn_json_given(&q.lengths)) json_object_set(result, "perplexity", lengths);
    if (st == MN_OK && mn_json_given(&q.tasks)) json_object_set(result, "tasks", tasks);
    *stopped = mn_job_is_to_stop(at->call);
    json_decref(lengths);
    json_decref(tasks);
    return st;
}
