/* belief_statistics.c - the sufficient statistics of a weighted regression of values on keys:
 *
 *   Hkk = Hkk~ + beta k k',   Hkv = Hkv~ + beta k v'
 *
 * Parts: Hkk (K,K), Hkv (K,V). Nothing is solved before a read. */
#include "definition/axes.h"

static void observe(mn_head *head) {
    const int64_t K = head->size->K, V = head->size->V;
    const double *k = head->in.k, beta = head->in.beta[0];
    for (int64_t i = 0; i < K; i++) {
        for (int64_t j = 0; j < K; j++) head->part[0][i * K + j] += beta * (k[i] * k[j]);
        for (int64_t j = 0; j < V; j++) head->part[1][i * V + j] += beta * k[i] * head->in.v[j];
    }
}

const mn_belief mn_belief_statistics = {
    .name = "regression statistics",
    .equation = "Hkk = Hkk~ + beta k k', Hkv = Hkv~ + beta k v'",
    .matrix = true,
    .observe = observe,
};
