/* transition_low_rank.c - diagonal plus rank one: S~ = diag(e^g) S + b (S'a)', where a reads the
 * state before it decays and b says where what was read goes. */
#include "definition/axes.h"

#include <math.h>

static void predict(mn_head *head) {
    const int64_t K = head->size->K, V = head->size->V;
    double *S = head->part[0];
    for (int64_t j = 0; j < V; j++) {
        double known = 0.0;
        for (int64_t i = 0; i < K; i++) known += head->in.a[i] * S[i * V + j];
        for (int64_t i = 0; i < K; i++) {
            S[i * V + j] = exp(head->in.g[i]) * S[i * V + j] + head->in.b[i] * known;
        }
    }
}

const mn_transition mn_transition_low_rank = {
    .name = "diagonal plus rank one",
    .equation = "S~ = diag(e^g) S + b (S'a)'",
    .predict = predict,
};
