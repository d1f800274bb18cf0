/* belief_sum.c - a sum of outer products: S = S~ + k v'. A selective scan weighs value column j
 * with its step size. */
#include "definition/axes.h"

static void observe(mn_head *head) {
    for (int64_t j = 0; j < head->size->V; j++) {
        const double v = head->in.v[j] * (head->in.dt ? mn_scan_step(head, j) : 1.0);
        double *column = head->part[0] + j * head->value_step;
        for (int64_t i = 0; i < head->size->K; i++) column[i * head->key_step] += head->in.k[i] * v;
    }
}

static double mean(const mn_head *head, int64_t i, int64_t j) {
    return head->part[0][i * head->key_step + j * head->value_step];
}

const mn_belief mn_belief_sum = {
    .name = "sum",
    .equation = "S = S~ + k v'",
    .matrix = true,
    .observe = observe,
    .mean = mean,
};
