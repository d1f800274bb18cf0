/* belief_normalised.c - sums of values and of keys under an exponential input gate, both in
 * units of exp(m) so that no gate overflows:
 *
 *   m = max(m~, ipre);  C = e^(m~-m) C~ + e^(ipre-m) k v';  n = e^(m~-m) n~ + e^(ipre-m) k
 *
 * Parts: C (K,V), n (K), m. Empty: m = -infinity. */
#include "definition/axes.h"

#include <math.h>

static void start(mn_head *head) {
    head->part[2][0] = -INFINITY;
}

static void observe(mn_head *head) {
    const int64_t K = head->size->K, V = head->size->V;
    double *C = head->part[0], *n = head->part[1], *m = head->part[2];
    const double top = fmax(*m, head->in.ipre[0]);
    const double kept = isinf(*m) ? 0.0 : exp(*m - top), entering = exp(head->in.ipre[0] - top);
    for (int64_t i = 0; i < K; i++) {
        const double k = entering * head->in.k[i];
        for (int64_t j = 0; j < V; j++) C[i * V + j] = kept * C[i * V + j] + k * head->in.v[j];
        n[i] = kept * n[i] + k;
    }
    *m = top;
}

static double mean(const mn_head *head, int64_t i, int64_t j) {
    return head->part[0][i * head->size->V + j];
}

const mn_belief mn_belief_normalised = {
    .name = "sum with normaliser",
    .equation = "C = C~ + e^ipre k v', n = n~ + e^ipre k",
    .matrix = true,
    .start = start,
    .observe = observe,
    .mean = mean,
};
