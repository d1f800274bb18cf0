/* calibration.c - mneme eval --calibration: reliability, and what tells right answers apart. */
#include "cli/calibration.h"

#include <inttypes.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/status.h"
#include "base/util.h"
#include "cli/progress.h"
#include "eval/knowing.h"
#include "io/json_write.h"
#include "tasks/task.h"

enum { BATCH = 8, MOST_KINDS = 16 };

typedef struct measure {
    const mn_calibration_ask *ask;
    mn_model *model;
    mn_tape *tape;
    mn_posterior *posterior;
    mn_doubts halves[2];             // chosen by, and reported
    mn_progress bar;
    int64_t done;
} measure;

static mn_status add_batch(measure *m, int half, const mn_token_batch *batch, const int8_t *kinds) {
    const mn_status st = mn_doubts_add(&m->halves[half], m->model, m->tape, m->posterior, batch,
                                       kinds);
    m->done += batch->rows;
    mn_progress_update(&m->bar, m->done, NULL);
    return st;
}

/* Windows that follow each other, to the halves in turn. */
static mn_status ask_corpus(measure *m) {
    const mn_calibration_ask *ask = m->ask;
    const mn_loader_options how = { .cutting = MN_CUT_WINDOWS, .rows = BATCH,
                                    .length = ask->length, .sequential = true };
    mn_loader *loader = NULL;
    mn_token_batch batch = { 0 };
    mn_status st = mn_loader_create(&loader, ask->corpus, &how);
    if (st == MN_OK) st = mn_token_batch_create(&batch, loader);
    const int64_t wanted = 2 * mn_ceil_div(ask->rows, BATCH);
    const int64_t steps = st == MN_OK ? mn_min(mn_loader_epoch(loader), wanted) : 0;
    mn_progress_start(&m->bar, "calibration", "windows", 0, steps * BATCH, ask->quiet);
    for (int64_t i = 0; st == MN_OK && i < steps; i++) {
        st = mn_loader_fill(&batch, loader, i);
        batch.packed = false;
        if (st == MN_OK) st = add_batch(m, (int)(i % 2), &batch, NULL);
    }
    mn_token_batch_free(&batch);
    mn_loader_destroy(loader);
    return st;
}

static mn_status ask_split(measure *m, mn_task *task, mn_token_batch *batch, int8_t *kinds,
                           int half) {
    const int64_t T = batch->length;
    const mn_split split = half ? MN_SPLIT_TEST : MN_SPLIT_VALID;
    mn_status st = MN_OK;
    for (int64_t first = 0; st == MN_OK && first < m->ask->rows; first += batch->rows) {
        memset(kinds, -1, (size_t)(batch->rows * T));
        for (int64_t r = 0; st == MN_OK && r < batch->rows; r++) {
            int32_t *tokens = batch->tokens + r * T, *targets = batch->targets + r * T;
            st = mn_task_sample(task, m->ask->seed, split, first + r, tokens, targets);
            if (st == MN_OK) mn_task_group(task, tokens, targets, kinds + r * T);
        }
        if (st == MN_OK) st = add_batch(m, half, batch, kinds);
    }
    return st;
}

static mn_status ask_task(measure *m, mn_task *task) {
    mn_token_batch batch = { 0 };
    if (mn_task_shape_of(task).features > 0) {
        return mn_fail(MN_ERR_UNSUPPORTED, "%s: its inputs are numbers, and models read tokens",
                       m->ask->task);
    }
    mn_status st = mn_task_batch_create(&batch, task, mn_min(BATCH, m->ask->rows));
    int8_t *kinds = st == MN_OK ? malloc((size_t)(batch.rows * batch.length)) : NULL;
    if (st == MN_OK && !kinds) st = mn_fail(MN_ERR_MEMORY, "no memory for kinds of questions");
    mn_progress_start(&m->bar, "calibration", "samples", 0, 2 * m->ask->rows, m->ask->quiet);
    for (int half = 0; st == MN_OK && half < 2; half++) {
        st = ask_split(m, task, &batch, kinds, half);
    }
    free(kinds);
    mn_token_batch_free(&batch);
    return st;
}

/* ---- tables ---------------------------------------------------------------------------------- */

static double number_at(const json_t *root, const char *list, const char *name) {
    const json_t *value = json_object_get(json_object_get(root, list), name);
    return json_is_number(value) ? json_number_value(value) : NAN;
}

static void print_scores(const json_t *out) {
    const char *name;
    json_t *value;
    printf("%-12s %7s %7s\n", "", "AUROC", "AURC");
    json_object_foreach(json_object_get(out, "auroc"), name, value) {
        printf("%-12s %7.4f %7.4f\n", name, number_at(out, "auroc", name),
               number_at(out, "aurc", name));
    }
    const char *chosen = json_string_value(json_object_get(out, "chosen"));
    if (chosen) printf("chosen: %s\n", chosen);
}

static void print_kinds(const json_t *out) {
    const char *name;
    json_t *kind;
    if (!json_object_get(out, "kinds")) return;
    printf("\n%-12s %7s %7s %9s\n", "kind", "asked", "right", "entropy");
    json_object_foreach(json_object_get(out, "kinds"), name, kind) {
        const json_t *right = json_object_get(kind, "right");
        const json_t *entropy = json_object_get(kind, "entropy");
        printf("%-12s %7" PRId64 " %7.4f %9.4f\n", name,
               (int64_t)json_integer_value(json_object_get(kind, "asked")),
               json_is_number(right) ? json_number_value(right) : NAN,
               json_is_number(entropy) ? json_number_value(entropy) : NAN);
    }
}

static void print_tables(const json_t *out) {
    const json_t *reliability = json_object_get(out, "calibration");
    const json_t *bins = json_object_get(reliability, "bins");
    printf("%" PRId64 " answers, %.4f of them wrong; loss %.4f\n\n",
           (int64_t)json_integer_value(json_object_get(out, "asked")),
           json_number_value(json_object_get(out, "error")),
           json_number_value(json_object_get(out, "loss")));
    print_scores(out);
    print_kinds(out);
    printf("\n%-13s %10s %9s %8s\n", "confidence", "mean", "accuracy", "answers");
    for (size_t i = 0; i < json_array_size(bins); i++) {
        const json_t *bin = json_array_get(bins, i);
        printf("%.3f - %.3f %10.4f %9.4f %8" PRId64 "\n",
               json_number_value(json_object_get(bin, "low")),
               json_number_value(json_object_get(bin, "high")),
               json_number_value(json_object_get(bin, "confidence")),
               json_number_value(json_object_get(bin, "accuracy")),
               (int64_t)json_integer_value(json_object_get(bin, "n")));
    }
    printf("expected calibration error %.4f\n",
           json_number_value(json_object_get(reliability, "ece")));
}

/* ---- the measurement ------------------------------------------------------------------------- */

static mn_status tell(json_t *root, const measure *m, const mn_task *task) {
    const char *names[MOST_KINDS];
    const int n = task ? (int)mn_min(mn_task_groups(task), MOST_KINDS) : 0;
    json_t *out = NULL;
    for (int i = 0; i < n; i++) names[i] = mn_task_group_name(task, i);
    mn_status st = mn_knowing_tell(&out, m->posterior, &m->halves[0], &m->halves[1], names, n);
    if (st == MN_OK && !m->ask->json) print_tables(out);
    if (st == MN_OK && m->ask->save) {
        st = mn_json_save(m->ask->save, json_object_get(out, "calibrator"));
    }
    if (st == MN_OK) json_object_set(root, "calibration", out);
    json_decref(out);
    return st;
}

mn_status mn_calibration_measure(json_t *root, mn_context *context, mn_model *model,
                                 const mn_calibration_ask *ask) {
    measure m = { .ask = ask, .model = model };
    mn_task *task = NULL;
    mn_status st = mn_posterior_create(&m.posterior, model);
    if (st == MN_OK) st = mn_tape_create(&m.tape, context, mn_model_pass_dtype(model));
    if (st == MN_OK && !ask->corpus) st = mn_task_create(&task, ask->task, ask->task_options);
    if (st == MN_OK) st = ask->corpus ? ask_corpus(&m) : ask_task(&m, task);
    if (st == MN_OK) mn_progress_finish(&m.bar, NULL);
    else if (m.done > 0) mn_progress_clear(&m.bar);
    if (st == MN_OK) st = tell(root, &m, task);
    for (int half = 0; half < 2; half++) mn_doubts_free(&m.halves[half]);
    mn_task_destroy(task);
    mn_tape_destroy(m.tape);
    mn_posterior_destroy(m.posterior);
    return st;
}
