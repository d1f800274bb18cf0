/* belief_information.c - a Gaussian with one precision per channel and slot, in information form:
 *
 *   lam = lam~ + prec k^2,   eta = eta~ + prec v k;   mean eta / lam, variance 1 / lam
 *
 * With from_prior the next prediction is read instead: mean a eta / lam, variance a^2 / lam + p.
 * Parts: lam (V,K), eta (V,K). Fresh: lam = 1, eta = 0. Floors as in transition_ou.c. */
#include "definition/axes.h"

#include <math.h>

static const double floor_of_all = 1e-12;

static void start(mn_head *head) {
    for (int64_t i = 0; i < head->count[0]; i++) head->part[0][i] = 1.0;
}

static void observe(mn_head *head) {
    const int64_t K = head->size->K;
    for (int64_t j = 0; j < head->size->V; j++) {
        const double prec = head->in.prec[j];
        for (int64_t i = 0; i < K; i++) {
            const double k = head->in.k[i];
            head->part[0][j * K + i] += prec * k * k;
            head->part[1][j * K + i] += prec * head->in.v[j] * k;
        }
    }
}

static double mean(const mn_head *head, int64_t i, int64_t j) {
    const int64_t at = j * head->size->K + i;
    const double now = head->part[1][at] / fmax(head->part[0][at], floor_of_all);
    return head->config->from_prior ? head->in.a[at] * now : now;
}

static double cell_variance(const mn_head *head, int64_t at) {
    const double now = 1.0 / fmax(head->part[0][at], floor_of_all);
    if (!head->config->from_prior) return now;
    const double a = head->in.a[at];
    return fmax(a * a, floor_of_all) * now + fmax(head->in.p[at], floor_of_all);
}

static void variance(double *out, const mn_head *head) {
    const int64_t K = head->size->K;
    for (int64_t j = 0; j < head->size->V; j++) {
        out[j] = 0.0;
        for (int64_t i = 0; i < K; i++) {
            const double q = head->config->scale * head->in.q[i];
            out[j] += q * q * cell_variance(head, j * K + i);
        }
    }
}

const mn_belief mn_belief_information = {
    .name = "diagonal precision, information",
    .equation = "lam = lam~ + prec k^2, eta = eta~ + prec v k",
    .matrix = true,
    .start = start,
    .observe = observe,
    .mean = mean,
    .variance = variance,
};
