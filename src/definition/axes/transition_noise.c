/* transition_noise.c - decay with process noise: M~ = A M, P~ = A P A' + l2 I, A = diag(exp la).
 *
 * Belief parts: mean (K,V), covariance of each noise group (G,K,K). */
#include "definition/axes.h"

#include <math.h>

static void predict(mn_head *head) {
    const int64_t K = head->size->K, V = head->size->V, G = head->size->G;
    double *M = head->part[0], *P = head->part[1];
    for (int64_t i = 0; i < K; i++) {
        const double a = exp(head->in.la[i]);
        for (int64_t j = 0; j < V; j++) M[i * V + j] *= a;
        for (int64_t g = 0; g < G; g++) {
            double *row = P + (g * K + i) * K;
            for (int64_t j = 0; j < K; j++) row[j] *= exp(head->in.la[i] + head->in.la[j]);
            row[i] += head->in.l2[0];
        }
    }
}

const mn_transition mn_transition_decay_noise = {
    .name = "decay, process noise",
    .equation = "M~ = A M, P~ = A P A' + l2 I",
    .predict = predict,
};
