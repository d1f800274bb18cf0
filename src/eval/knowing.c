/* knowing.c - which of entropy and the posteriors' statistics tells right answers from wrong. */
#include "eval/knowing.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/status.h"
#include "base/util.h"
#include "eval/calibration.h"
#include "io/json_write.h"

enum { BINS = 15, NAME = 64 };
static const double ridge = 1e-4;

/* What is judged, and room for it. */
typedef struct knowing {
    const mn_posterior *posterior;
    const mn_doubts *valid, *test;
    int chosen;                      // feature, -1: there is none
    float *score;                    // room for those of either split
} knowing;

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
    for (int f = 0; f < k->valid->features; f++) {
        mn_statistic of;
        mn_posterior_feature(k->posterior, f, &of, name, sizeof name);
        if (statistic != MN_STATISTICS && of != (mn_statistic)statistic) continue;
        take(column, k->valid, f, 1.0f);
        const double up = mn_auroc(column, k->valid->wrong, k->valid->n);
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
static mn_status combine(const knowing *k, mn_logistic *fit, const int *features, int n) {
    float *x = columns_of(k->valid, features, n), *y = columns_of(k->test, features, n);
    mn_status st = x && y ? MN_OK : mn_fail(MN_ERR_MEMORY, "no memory for a regression");
    if (st == MN_OK) st = mn_logistic_fit(fit, x, n + 1, k->valid->wrong, k->valid->n, ridge);
    for (int64_t i = 0; st == MN_OK && i < k->test->n; i++) {
        k->score[i] = (float)mn_logistic_doubt(fit, y + i * (n + 1));
    }
    free(x);
    free(y);
    return st;
}

/* The mean of every layer and statistic, as many as a regression takes. */
static int layer_means(const knowing *k, int *features) {
    int n = 0;
    for (int f = 0; f < k->test->features && n + 1 < MN_LOGISTIC_FEATURES; f++) {
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
        take(k->score, k->test, c.feature, c.sign);
        json_object_set_new(unit, mn_statistic_name((mn_statistic)s),
                            mn_json_real(mn_auroc(k->score, k->test->wrong, k->test->n)));
    }
    json_object_set_new(out, "unit", unit);
}

static json_t *numbers(const double *x, int n) {
    json_t *list = json_array();
    for (int i = 0; i < n; i++) json_array_append_new(list, mn_json_real(x[i]));
    return list;
}

/* The regression on entropy and `feature` (-1: on entropy alone), for mn_calibrator_read. */
static void tell_calibrator(json_t *out, const knowing *k, const mn_logistic *fit, int feature) {
    json_t *one = json_pack("{s:o, s:o, s:o, s:o}", "bias", mn_json_real(fit->bias), "weight",
                            numbers(fit->weight, fit->n), "mean", numbers(fit->mean, fit->n),
                            "scale", numbers(fit->scale, fit->n));
    if (feature >= 0) {
        char name[NAME];
        mn_statistic of;
        mn_posterior_feature(k->posterior, feature, &of, name, sizeof name);
        json_object_set_new(one, "statistic", json_string(mn_statistic_name(of)));
        json_object_set_new(one, "of", json_string(name));
    }
    json_object_set_new(out, "calibrator", one);
}

/* What the posteriors tell, beside entropy's AUROC. */
static mn_status tell_posterior(json_t *out, const report *r, knowing *k, double entropy) {
    int means[MN_LOGISTIC_FEATURES];
    mn_logistic fit;
    char name[NAME], text[2 * NAME];
    mn_statistic of;
    json_t *carried = json_object();
    for (int s = 0; s < MN_STATISTICS; s++) {
        take(k->score, k->test, mn_posterior_overall(k->posterior, (mn_statistic)s), 1.0f);
        put_score(r, mn_statistic_name((mn_statistic)s), k->score, k->test);
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
    take(k->score, k->test, c.feature, c.sign);
    const double chosen = put_score(r, "chosen", k->score, k->test);
    json_object_set_new(out, "gain", mn_json_real(chosen - entropy));
    mn_status st = combine(k, &fit, means, layer_means(k, means));
    if (st == MN_OK) put_score(r, "all", k->score, k->test);
    if (st == MN_OK) st = combine(k, &fit, &c.feature, 1);
    if (st != MN_OK) return st;
    const double both = put_score(r, "both", k->score, k->test);
    json_object_set_new(out, "gain_both", mn_json_real(both - entropy));
    tell_calibrator(out, k, &fit, c.feature);
    take(k->score, k->test, c.feature, c.sign);
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

static json_t *tell_kinds(const knowing *k, const char *const *names, int n) {
    const mn_doubts *d = k->test;
    json_t *out = json_object();
    for (int g = 0; g < n; g++) {
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
        json_object_set_new(out, names[g], one);
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

/* The calibrator of a model without posteriors. */
static mn_status tell_entropy(json_t *out, const knowing *k) {
    mn_logistic fit;
    const mn_status st = combine(k, &fit, NULL, 0);
    if (st == MN_OK) tell_calibrator(out, k, &fit, -1);
    return st;
}

static mn_status tell(json_t *out, knowing *k, const char *const *kinds, int n_kinds) {
    const mn_doubts *d = k->test;
    const report r = { json_object(), json_object() };
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
    const mn_status st = d->features > 0 ? tell_posterior(out, &r, k, entropy)
                                         : tell_entropy(out, k);
    json_object_set_new(out, "auroc", r.auroc);
    json_object_set_new(out, "aurc", r.aurc);
    json_object_set_new(out, "calibration", tell_calibration(d));
    if (n_kinds > 0) json_object_set_new(out, "kinds", tell_kinds(k, kinds, n_kinds));
    return st;
}

mn_status mn_knowing_tell(json_t **out, const mn_posterior *posterior, const mn_doubts *valid,
                          const mn_doubts *test, const char *const *kinds, int n_kinds) {
    knowing k = { .posterior = posterior, .valid = valid, .test = test, .chosen = -1 };
    *out = NULL;
    if (valid->n == 0 || test->n == 0) {
        return mn_fail(MN_ERR_ARGUMENT, "there are no answers to fit on, or none to report; give "
                       "more text or more rows");
    }
    json_t *all = json_object();
    k.score = malloc((size_t)(mn_max(test->n, valid->n) + 1) * sizeof *k.score);
    const mn_status st = k.score && all ? tell(all, &k, kinds, n_kinds)
                                        : mn_fail(MN_ERR_MEMORY, "no memory for scores");
    free(k.score);
    if (st == MN_OK) *out = all;
    else json_decref(all);
    return st;
}

/* ---- calibrators ----------------------------------------------------------------------------- */

static mn_status read_numbers(double *out, int n, const mn_json *root, const char *key) {
    const mn_json list = mn_json_member(root, key);
    mn_status st = mn_json_expect_list(&list);
    if (st == MN_OK && mn_json_count(&list) != n) {
        st = mn_json_fail(&list, "a calibrator with this statistic has %d numbers here", n);
    }
    for (int i = 0; st == MN_OK && i < n; i++) {
        const mn_json one = mn_json_item(&list, i);
        st = mn_json_read_f64(&out[i], &one);
    }
    return st;
}

static mn_status find_feature(mn_calibrator *c, const mn_posterior *p, const mn_json *root,
                              const char *statistic, const char *of) {
    for (int f = 0; f < mn_posterior_features(p); f++) {
        char name[NAME];
        mn_statistic own;
        mn_posterior_feature(p, f, &own, name, sizeof name);
        if (strcmp(mn_statistic_name(own), statistic) != 0 || strcmp(name, of) != 0) continue;
        c->feature = f;
        return MN_OK;
    }
    return mn_json_fail(root, "the model has no %s of %s: the calibrator is another model's",
                        statistic, of);
}

mn_status mn_calibrator_read(mn_calibrator *out, const mn_posterior *posterior,
                             const mn_json *root) {
    const char *statistic = NULL, *of = "mean";
    *out = (mn_calibrator){ .feature = -1 };
    mn_status st = mn_json_expect_object(root);
    if (st == MN_OK) st = mn_json_opt_text(&statistic, root, "statistic");
    if (st == MN_OK) st = mn_json_opt_text(&of, root, "of");
    if (st == MN_OK && statistic) st = find_feature(out, posterior, root, statistic, of);
    out->fit.n = statistic ? 2 : 1;
    if (st == MN_OK) st = read_numbers(out->fit.weight, out->fit.n, root, "weight");
    if (st == MN_OK) st = read_numbers(out->fit.mean, out->fit.n, root, "mean");
    if (st == MN_OK) st = read_numbers(out->fit.scale, out->fit.n, root, "scale");
    return st == MN_OK ? mn_json_get_f64(&out->fit.bias, root, "bias") : st;
}

double mn_calibrator_doubt(const mn_calibrator *c, float entropy, const float *features) {
    const float x[2] = { entropy, c->feature >= 0 ? features[c->feature] : 0.0f };
    return mn_logistic_doubt(&c->fit, x);
}
