/* calibration.c - ROC and risk-coverage curves, reliability, and logistic regression. */
#include "eval/calibration.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "base/status.h"
#include "base/util.h"

typedef struct answer {
    float doubt;
    uint8_t wrong;
} answer;

static int by_doubt(const void *a, const void *b) {
    const float x = ((const answer *)a)->doubt, y = ((const answer *)b)->doubt;
    return (x > y) - (x < y);
}

/* The answers from the least doubt on, new; what is no number counts as the most doubt. */
static answer *sorted(const float *doubt, const uint8_t *wrong, int64_t n) {
    answer *list = n > 0 ? malloc((size_t)n * sizeof *list) : NULL;
    for (int64_t i = 0; list && i < n; i++) {
        list[i] = (answer){ isnan(doubt[i]) ? INFINITY : doubt[i], wrong[i] != 0 };
    }
    if (list) qsort(list, (size_t)n, sizeof *list, by_doubt);
    return list;
}

/* Answers of the same doubt as answer `at`, from there on; their wrong ones go to *wrong. */
static int64_t tie_at(const answer *list, int64_t n, int64_t at, int64_t *wrong) {
    int64_t end = at;
    *wrong = 0;
    while (end < n && list[end].doubt == list[at].doubt) *wrong += list[end++].wrong;
    return end - at;
}

double mn_auroc(const float *doubt, const uint8_t *wrong, int64_t n) {
    answer *list = sorted(doubt, wrong, n);
    double won = 0.0;
    int64_t right = 0, bad = 0, wrong_here;
    if (!list) return NAN;
    for (int64_t at = 0; at < n;) {
        const int64_t tied = tie_at(list, n, at, &wrong_here), right_here = tied - wrong_here;
        won += (double)wrong_here * ((double)right + 0.5 * (double)right_here);
        right += right_here;
        bad += wrong_here;
        at += tied;
    }
    free(list);
    return right > 0 && bad > 0 ? won / ((double)right * (double)bad) : NAN;
}

double mn_aurc(const float *doubt, const uint8_t *wrong, int64_t n) {
    answer *list = sorted(doubt, wrong, n);
    double area = 0.0, bad = 0.0;
    int64_t wrong_here;
    if (!list) return NAN;
    for (int64_t at = 0; at < n;) {
        const int64_t tied = tie_at(list, n, at, &wrong_here);
        const double rate = (double)wrong_here / (double)tied;
        for (int64_t i = 0; i < tied; i++) {
            bad += rate;
            area += bad / (double)(at + i + 1);
        }
        at += tied;
    }
    free(list);
    return area / (double)n;
}

double mn_reliability(mn_reliability_bin *out, int bins, const float *confidence,
                      const uint8_t *wrong, int64_t n) {
    double error = 0.0;
    for (int b = 0; b < bins; b++) {
        out[b] = (mn_reliability_bin){ .low = (double)b / bins, .high = (double)(b + 1) / bins };
    }
    for (int64_t i = 0; i < n; i++) {
        const double place = floor((double)confidence[i] * bins);
        mn_reliability_bin *bin = &out[place >= bins ? bins - 1 : place > 0.0 ? (int)place : 0];
        bin->n++;
        bin->confidence += confidence[i];
        bin->accuracy += !wrong[i];
    }
    for (int b = 0; b < bins; b++) {
        error += fabs(out[b].accuracy - out[b].confidence);
        out[b].accuracy /= (double)out[b].n;      // NAN in an empty bin
        out[b].confidence /= (double)out[b].n;
    }
    return n > 0 ? error / (double)n : NAN;
}

/* ---- logistic regression --------------------------------------------------------------------- */

enum { UNKNOWNS = MN_LOGISTIC_FEATURES + 1, MOST_STEPS = 50 };

/* One step of Newton's method: gradient, Hessian, and the log loss. */
typedef struct newton {
    int n;                                   // unknowns: the bias is the last
    double gradient[UNKNOWNS], hessian[UNKNOWNS][UNKNOWNS], step[UNKNOWNS];
    double loss;
} newton;

/* log(1 + e^z) */
static double softplus(double z) {
    return z > 0.0 ? z + log1p(exp(-z)) : log1p(exp(z));
}

static void scale_row(double *to, const mn_logistic *fit, const float *x) {
    for (int i = 0; i < fit->n; i++) {
        const double z = ((double)x[i] - fit->mean[i]) / fit->scale[i];
        to[i] = isfinite(z) ? z : 0.0;
    }
    to[fit->n] = 1.0;
}

static double logit_of(const mn_logistic *fit, const double *row) {
    double z = fit->bias;
    for (int i = 0; i < fit->n; i++) z += fit->weight[i] * row[i];
    return z;
}

static void find_scales(mn_logistic *fit, const float *x, int64_t n) {
    for (int i = 0; i < fit->n; i++) {
        double sum = 0.0, squares = 0.0;
        for (int64_t r = 0; r < n; r++) sum += isfinite(x[r * fit->n + i]) ? x[r * fit->n + i] : 0;
        fit->mean[i] = sum / (double)n;
        for (int64_t r = 0; r < n; r++) {
            const double d = x[r * fit->n + i] - fit->mean[i];
            squares += isfinite(d) ? d * d : 0.0;
        }
        fit->scale[i] = sqrt(squares / (double)n);
        if (!(fit->scale[i] > 0.0)) fit->scale[i] = 1.0;
    }
}

static void add_up(newton *s, const mn_logistic *fit, const float *x, const uint8_t *wrong,
                   int64_t n, double ridge) {
    double row[UNKNOWNS];
    memset(s, 0, sizeof *s);
    s->n = fit->n + 1;
    for (int64_t r = 0; r < n; r++) {
        scale_row(row, fit, x + r * fit->n);
        const double z = logit_of(fit, row), p = 1.0 / (1.0 + exp(-z));
        s->loss += (softplus(z) - (wrong[r] ? z : 0.0)) / (double)n;
        const double slope = (p - (wrong[r] != 0)) / (double)n, bend = p * (1.0 - p) / (double)n;
        for (int i = 0; i < s->n; i++) {
            s->gradient[i] += slope * row[i];
            for (int j = 0; j <= i; j++) s->hessian[i][j] += bend * row[i] * row[j];
        }
    }
    for (int i = 0; i < fit->n; i++) {
        s->loss += 0.5 * ridge * fit->weight[i] * fit->weight[i];
        s->gradient[i] += ridge * fit->weight[i];
        s->hessian[i][i] += ridge;
    }
    s->hessian[fit->n][fit->n] += 1e-9;
}

/* step = hessian^-1 gradient, by Cholesky in place. */
static void solve(newton *s) {
    for (int i = 0; i < s->n; i++) {
        for (int j = 0; j <= i; j++) {
            double sum = s->hessian[i][j];
            for (int k = 0; k < j; k++) sum -= s->hessian[i][k] * s->hessian[j][k];
            s->hessian[i][j] = i == j ? sqrt(fmax(sum, 1e-12)) : sum / s->hessian[j][j];
        }
    }
    for (int i = 0; i < s->n; i++) {
        double sum = s->gradient[i];
        for (int k = 0; k < i; k++) sum -= s->hessian[i][k] * s->step[k];
        s->step[i] = sum / s->hessian[i][i];
    }
    for (int i = s->n - 1; i >= 0; i--) {
        double sum = s->step[i];
        for (int k = i + 1; k < s->n; k++) sum -= s->hessian[k][i] * s->step[k];
        s->step[i] = sum / s->hessian[i][i];
    }
}

static void go(mn_logistic *fit, const newton *s, double part) {
    for (int i = 0; i < fit->n; i++) fit->weight[i] -= part * s->step[i];
    fit->bias -= part * s->step[fit->n];
}

mn_status mn_logistic_fit(mn_logistic *out, const float *x, int features, const uint8_t *wrong,
                          int64_t n, double ridge) {
    *out = (mn_logistic){ .n = features };
    if (features < 1 || features > MN_LOGISTIC_FEATURES || n < 1) {
        return mn_fail(MN_ERR_ARGUMENT, "logistic regression takes 1 to %d features and an answer "
                       "or more", (int)MN_LOGISTIC_FEATURES);
    }
    newton *s = malloc(sizeof *s), *next = malloc(sizeof *next);
    if (!s || !next) {
        free(s);
        free(next);
        return mn_fail(MN_ERR_MEMORY, "no memory for a logistic regression");
    }
    find_scales(out, x, n);
    add_up(s, out, x, wrong, n, ridge);
    for (int i = 0; i < MOST_STEPS; i++) {
        mn_logistic try = *out;
        double part = 1.0;
        solve(s);
        for (go(&try, s, part), add_up(next, &try, x, wrong, n, ridge);
             !(next->loss <= s->loss) && part > 1e-4;) {
            part *= 0.5;
            try = *out;
            go(&try, s, part);
            add_up(next, &try, x, wrong, n, ridge);
        }
        if (!(next->loss <= s->loss)) break;
        const bool settled = s->loss - next->loss < 1e-10;
        *out = try;
        *s = *next;
        if (settled) break;
    }
    free(s);
    free(next);
    return MN_OK;
}

double mn_logistic_doubt(const mn_logistic *fit, const float *x) {
    double row[UNKNOWNS];
    scale_row(row, fit, x);
    return 1.0 / (1.0 + exp(-logit_of(fit, row)));
}

double mn_doubt_limit(const float *doubt, const uint8_t *wrong, int64_t n, double share) {
    answer *list = sorted(doubt, wrong, n);
    double limit = -INFINITY;
    int64_t right = 0, wrong_here;
    for (int64_t at = 0; list && at < n;) {
        const int64_t tied = tie_at(list, n, at, &wrong_here);
        const double last = list[at].doubt;
        right += tied - wrong_here;
        at += tied;
        if ((double)right >= share * (double)at) limit = last;
    }
    free(list);
    return limit;
}
