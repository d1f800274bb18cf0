/* look_knowing.c - whether a model knows what it knows: how well the entropy of its predictions and
 * statistics of its posteriors (model/posterior.h) tell right answers from wrong ones.
 *
 * Options: rows (256), samples of a split; batch (32), rows of a pass. The validation split chooses
 * and fits, the test split is reported. Adds "knowing", see eval/knowing.h; kinds are the groups of
 * the task. */
#include <stdlib.h>
#include <string.h>

#include "base/status.h"
#include "base/util.h"
#include "eval/knowing.h"
#include "experiments/looks/look.h"

enum { MOST_KINDS = 16 };

typedef struct options {
    int64_t rows, batch;
} options;

static mn_status read_options(options *o, const mn_json *at) {
    static const char *const keys[] = { "rows", "batch" };
    *o = (options){ .rows = 256, .batch = 32 };
    mn_status st = mn_json_expect_object(at);
    if (st == MN_OK) st = mn_json_unknown_key(at, keys, MN_COUNTOF(keys));
    if (st == MN_OK) st = mn_json_opt_i64(&o->rows, at, "rows");
    if (st == MN_OK) st = mn_json_opt_i64(&o->batch, at, "batch");
    if (st == MN_OK && (o->rows < 1 || o->batch < 1)) {
        st = mn_json_fail(at, "rows and batch are 1 or more");
    }
    return st;
}

static mn_status check(const mn_json *at) {
    options o;
    return read_options(&o, at);
}

/* ---- asking ---------------------------------------------------------------------------------- */

typedef struct knowing {
    mn_posterior *posterior;
    mn_doubts valid, test;
} knowing;

static mn_status ask_split(mn_doubts *d, const knowing *k, const mn_look_at *at, mn_tape *tape,
                           mn_split split, const options *o) {
    mn_token_batch batch = { 0 };
    uint64_t seed;
    mn_task *task = mn_task_run_asked(at->task, &seed);
    mn_status st = mn_task_batch_create(&batch, task, mn_min(o->batch, o->rows));
    const int64_t T = batch.length;
    int8_t *kinds = st == MN_OK ? malloc((size_t)(batch.rows * T)) : NULL;
    if (st == MN_OK && !kinds) st = mn_fail(MN_ERR_MEMORY, "no memory for kinds of questions");
    for (int64_t first = 0; st == MN_OK && first < o->rows; first += batch.rows) {
        memset(kinds, -1, (size_t)(batch.rows * T));
        for (int64_t r = 0; st == MN_OK && r < batch.rows; r++) {
            int32_t *tokens = batch.tokens + r * T, *targets = batch.targets + r * T;
            st = mn_task_sample(task, seed, split, first + r, tokens, targets);
            if (st == MN_OK) mn_task_group(task, tokens, targets, kinds + r * T);
        }
        if (st == MN_OK) st = mn_doubts_add(d, at->model, tape, k->posterior, &batch, kinds);
    }
    free(kinds);
    mn_token_batch_free(&batch);
    return st;
}

static mn_status look(json_t *result, const mn_look_at *at, const mn_json *given) {
    options o;
    knowing k = { 0 };
    mn_tape *tape = NULL;
    uint64_t seed;
    const mn_task *task = mn_task_run_asked(at->task, &seed);
    mn_status st = read_options(&o, given);
    if (st == MN_OK) st = mn_posterior_create(&k.posterior, at->model);
    if (st == MN_OK) st = mn_tape_create(&tape, at->context, mn_model_pass_dtype(at->model));
    if (st == MN_OK) st = ask_split(&k.valid, &k, at, tape, MN_SPLIT_VALID, &o);
    if (st == MN_OK) st = ask_split(&k.test, &k, at, tape, MN_SPLIT_TEST, &o);
    const char *names[MOST_KINDS];
    const int n_kinds = (int)mn_min(mn_task_groups(task), MOST_KINDS);
    for (int i = 0; i < n_kinds; i++) names[i] = mn_task_group_name(task, i);
    json_t *out = NULL;
    if (st == MN_OK) st = mn_knowing_tell(&out, k.posterior, &k.valid, &k.test, names, n_kinds);
    if (st == MN_OK && json_object_set(result, "knowing", out) != 0) {
        st = mn_fail(MN_ERR_MEMORY, "no memory for what a model knows");
    }
    json_decref(out);
    mn_tape_destroy(tape);
    mn_doubts_free(&k.valid);
    mn_doubts_free(&k.test);
    mn_posterior_destroy(k.posterior);
    return st;
}

const mn_look mn_look_knowing = { check, look };
