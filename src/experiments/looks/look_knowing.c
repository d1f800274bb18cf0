/* look_knowing.c - whether a model knows what it knows: how well the entropy of its predictions and
 * statistics of its posteriors (eval/posterior.h) tell right answers from wrong ones.
 *
 * Options: rows (256), samples of a split; batch (32), rows of a pass. The validation split chooses
 * and fits, the test split is reported. Adds "knowing":
 *
 *   asked, error, loss     answers of the test split, the part of them that is wrong, and the mean
 *                          negative log probability of the target
 *   auroc, aurc            by name: entropy, confidence; where a layer keeps a posterior each
 *                          statistic (mean over units and layers), chosen: the feature of the
 *                          largest AUROC on the validation split, its sign as there; both: logistic
 *                          regression on entropy and chosen; all: on entropy and the mean of
 *                          every layer and statistic
 *   gain, gain_both        AUROC of chosen and of both less that of entropy
 *   chosen, carried        what was chosen, and 1 for its statistic, 0 for the others
 *   unit                   AUROC of each statistic's best feature, chosen in the same way
 *   calibration            expected calibration error over 15 bins, bins of the reliability diagram
 *   kinds                  of each kind of question: asked, right, doubt: AUROC of telling them
 *                          from right answers to the other kinds */
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "base/status.h"
#include "base/util.h"
#include "eval/calibration.h"
#include "eval/doubt.h"
#include "experiments/looks/look.h"

enum { BINS = 15, NAME = 64 };
static const double ridge = 1e-4;

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
    int chosen;                      // feature, -1: there is none
    float *score;                    // room for those of either split
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

/* ---- judging --------------------------------------------------------------------------------- */

/* A column of the features times `sign`. */
static void take(float *out, const mn_doubts *d, int feature, float sign) {
    for (int64_t i = 0; i < d->n; i++) out[i] = sign * d->value[i * d->features + feature];
}

typedef struct choice {
    int feature;                     // -1: none
    float sign;
    double auroc;                    // on the validation split
} choice;

/* The feature of `statistic` (or of any, for MN_STATISTICS) that tells most on the validation
 * split. */
static choice choose(const knowing *k, float *column, int statistic) {
    choice best = { .feature = -1, .sign = 1.0f, .auroc = 0.0 };
    char name[NAME];
    for (int f = 0; f < k->valid.features; f++) {
        mn_statistic of;
        mn_posterior_feature(k->posterior, f, &of, name, sizeof name);
        if (statistic != MN_STATISTICS && of != (mn_statistic)statistic) continue;
        take(column, &k->valid, f, 1.0f);
        const double up = mn_auroc(column, k->valid.wrong, k->valid.n);
        const double auroc = fmax(up, 1.0 - up);
        if (!(auroc > best.auroc)) continue;
        best = (choice){ f, up < 0.5 ? -1.0f : 1.0f, auroc };
    }
    return best;
}

typedef struct report {
    json_t *auroc, *aurc;
} report;

static double put_score(const report *r, const char *name, const float *score,
                        const mn_doubts *d) {
    const double auroc = mn_auroc(score, d->wrong, d->n);
    json_object_set_new(r->auroc, name, mn_json_real(auroc));
    json_object_set_new(r->aurc, name, mn_json_real(mn_aurc(score, d->wrong, d->n)));
    return auroc;
}

/* Entropy and `n` features, row by row. */
static float *columns_of(const mn_doubts *d, const int *features, int n) {
    float *x = malloc((size_t)(d->n * (n + 1) + 1) * sizeof *x);
    for (int64_t i = 0; x && i < d->n; i++) {
        x[i * (n + 1)] = d->entropy[i];
        for (int f = 0; f < n; f++) {
            x[i * (n + 1) + 1 + f] = d->value[i * d->features + features[f]];
        }
    }
    return x;
}

/* k->score becomes the regression on entropy and these features, fitted on the validation split. */
static mn_status combine(const knowing *k, const int *features, int n) {
    mn_logistic fit;
    float *x = columns_of(&k->valid, features, n), *y = columns_of(&k->test, features, n);
    mn_status st = x && y ? MN_OK : mn_fail(MN_ERR_MEMORY, "no memory for a regression");
    if (st == MN_OK) st = mn_logistic_fit(&fit, x, n + 1, k->valid.wrong, k->valid.n, ridge);
    for (int64_t i = 0; st == MN_OK && i < k->test.n; i++) {
        k->score[i] = (float)mn_logistic_doubt(&fit, y + i * (n + 1));
    }
    free(x);
    free(y);
    return st;
}

/* The mean of every layer and statistic, as many as a regression takes. */
static int layer_means(const knowing *k, int *features) {
    int n = 0;
    for (int f = 0; f < k->test.features && n + 1 < MN_LOGISTIC_FEATURES; f++) {
        char name[NAME];
        mn_statistic of;
        mn_posterior_feature(k->posterior, f, &of, name, sizeof name);
        const char *last = strrchr(name, ' ');
        if (last && strcmp(last, " mean") == 0) features[n++] = f;
    }
    return n;
}

static void tell_units(json_t *out, const knowing *k) {
    json_t *unit = json_object();
    for (int s = 0; s < MN_STATISTICS; s++) {
        const choice c = choose(k, k->score, s);
        if (c.feature < 0) continue;
        take(k->score, &k->test, c.feature, c.sign);
        json_object_set_new(unit, mn_statistic_name((mn_statistic)s),
                            mn_json_real(mn_auroc(k->score, k->test.wrong, k->test.n)));
    }
    json_object_set_new(out, "unit", unit);
}

/* What the posteriors tell, beside entropy's AUROC. */
static mn_status tell_posterior(json_t *out, const report *r, knowing *k, double entropy) {
    int means[MN_LOGISTIC_FEATURES];
    char name[NAME], text[2 * NAME];
    mn_statistic of;
    json_t *carried = json_object();
    for (int s = 0; s < MN_STATISTICS; s++) {
        take(k->score, &k->test, mn_posterior_overall(k->posterior, (mn_statistic)s), 1.0f);
        put_score(r, mn_statistic_name((mn_statistic)s), k->score, &k->test);
    }
    tell_units(out, k);
    const choice c = choose(k, k->score, MN_STATISTICS);
    k->chosen = c.feature;
    mn_posterior_feature(k->posterior, mn_max(c.feature, 0), &of, name, sizeof name);
    snprintf(text, sizeof text, "%s%s, %s", c.sign < 0 ? "less " : "", mn_statistic_name(of), name);
    for (int s = 0; s < MN_STATISTICS; s++) {
        json_object_set_new(carried, mn_statistic_name((mn_statistic)s),
                            json_real(c.feature >= 0 && s == (int)of));
    }
    json_object_set_new(out, "chosen", json_string(text));
    json_object_set_new(out, "carried", carried);
    if (c.feature < 0) return MN_OK;
    take(k->score, &k->test, c.feature, c.sign);
    const double chosen = put_score(r, "chosen", k->score, &k->test);
    json_object_set_new(out, "gain", mn_json_real(chosen - entropy));
    mn_status st = combine(k, means, layer_means(k, means));
    if (st == MN_OK) put_score(r, "all", k->score, &k->test);
    if (st == MN_OK) st = combine(k, &c.feature, 1);
    if (st != MN_OK) return st;
    const double both = put_score(r, "both", k->score, &k->test);
    json_object_set_new(out, "gain_both", mn_json_real(both - entropy));
    take(k->score, &k->test, c.feature, c.sign);
    return MN_OK;
}

/* How well `score` tells the questions of a kind from right answers to other kinds. */
static double tell_kind(const mn_doubts *d, const float *score, int kind) {
    float *part = malloc((size_t)(d->n + 1) * sizeof *part);
    uint8_t *is = malloc((size_t)(d->n + 1));
    int64_t n = 0;
    double auroc = NAN;
    if (part && is) {
        for (int64_t i = 0; i < d->n; i++) {
            if (d->kind[i] != kind && d->wrong[i]) continue;
            part[n] = score[i];
            is[n++] = d->kind[i] == kind;
        }
        auroc = mn_auroc(part, is, n);
    }
    free(part);
    free(is);
    return auroc;
}

static json_t *tell_kinds(const knowing *k, const mn_task *task) {
    const mn_doubts *d = &k->test;
    json_t *out = json_object();
    for (int g = 0; g < mn_task_groups(task); g++) {
        int64_t asked = 0, right = 0;
        double entropy = 0.0;
        for (int64_t i = 0; i < d->n; i++) {
            if (d->kind[i] != g) continue;
            asked++;
            right += !d->wrong[i];
            entropy += d->entropy[i];
        }
        json_t *one = json_pack("{s:I, s:o, s:o, s:{s:o}}", "asked", (json_int_t)asked, "right",
                                mn_json_real((double)right / (double)asked), "entropy",
                                mn_json_real(entropy / (double)asked), "doubt", "entropy",
                                mn_json_real(tell_kind(d, d->entropy, g)));
        if (k->chosen >= 0) {
            json_object_set_new(json_object_get(one, "doubt"), "chosen",
                                mn_json_real(tell_kind(d, k->score, g)));
        }
        json_object_set_new(out, mn_task_group_name(task, g), one);
    }
    return out;
}

static json_t *tell_calibration(const mn_doubts *d) {
    mn_reliability_bin bins[BINS];
    const double ece = mn_reliability(bins, BINS, d->confidence, d->wrong, d->n);
    json_t *list = json_array();
    for (int b = 0; b < BINS; b++) {
        if (bins[b].n == 0) continue;
        json_array_append_new(list, json_pack("{s:f, s:f, s:f, s:f, s:I}", "low", bins[b].low,
                                              "high", bins[b].high, "confidence",
                                              bins[b].confidence, "accuracy", bins[b].accuracy, "n",
                                              (json_int_t)bins[b].n));
    }
    return json_pack("{s:o, s:o}", "ece", mn_json_real(ece), "bins", list);
}

static mn_status tell(json_t *result, knowing *k, const mn_task *task) {
    const mn_doubts *d = &k->test;
    const report r = { json_object(), json_object() };
    json_t *out = json_object();
    double wrong = 0.0, loss = 0.0;
    for (int64_t i = 0; i < d->n; i++) {
        wrong += d->wrong[i];
        loss -= log(fmax(d->chance[i], 1e-30));
    }
    json_object_set_new(out, "asked", json_integer(d->n));
    json_object_set_new(out, "error", mn_json_real(wrong / (double)d->n));
    json_object_set_new(out, "loss", mn_json_real(loss / (double)d->n));
    const double entropy = put_score(&r, "entropy", d->entropy, d);
    for (int64_t i = 0; i < d->n; i++) k->score[i] = -d->confidence[i];
    put_score(&r, "confidence", k->score, d);
    k->chosen = -1;
    const mn_status st = d->features > 0 ? tell_posterior(out, &r, k, entropy) : MN_OK;
    json_object_set_new(out, "auroc", r.auroc);
    json_object_set_new(out, "aurc", r.aurc);
    json_object_set_new(out, "calibration", tell_calibration(d));
    json_object_set_new(out, "kinds", tell_kinds(k, task));
    return json_object_set_new(result, "knowing", out) == 0 || st != MN_OK
               ? st : mn_fail(MN_ERR_MEMORY, "no memory for what a model knows");
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
    if (st == MN_OK) {
        k.score = malloc((size_t)(mn_max(k.test.n, k.valid.n) + 1) * sizeof *k.score);
        st = k.score ? tell(result, &k, task) : mn_fail(MN_ERR_MEMORY, "no memory for scores");
    }
    mn_tape_destroy(tape);
    mn_doubts_free(&k.valid);
    mn_doubts_free(&k.test);
    mn_posterior_destroy(k.posterior);
    free(k.score);
    return st;
}

const mn_look mn_look_knowing = { check, look };
