/* read_dot.c - o = scale S'q, S the expected memory. */
#include "definition/axes.h"

void mn_read_mean(double *o, const mn_head *head) {
    for (int64_t j = 0; j < head->size->V; j++) {
        double sum = 0.0;
        for (int64_t i = 0; i < head->size->K; i++) {
            sum += head->in.q[i] * head->belief->mean(head, i, j);
        }
        o[j] = head->config->scale * sum;
    }
}

const mn_read mn_read_dot = { .name = "dot", .equation = "o = scale S'q", .run = mn_read_mean };
