/* read_softmax.c - o = sum_t softmax_t(scale q.k_t) v_t over the cache, rotary positions on q and k
 * first if the row has them. Query head h reads key-value head floor(h J / H). */
#include "definition/axes.h"

#include <math.h>
#include <string.h>

void mn_turn_row(double *x, int64_t K, int64_t position, int kind, double base) {
    for (int64_t i = 0; kind != 0 && i < K / 2; i++) {
        const double angle = (double)position * pow(base, -2.0 * (double)i / (double)K);
        double *re = kind == 1 ? x + i : x + 2 * i;
        double *im = kind == 1 ? x + i + K / 2 : x + 2 * i + 1;
        const double was = *re, c = cos(angle), s = sin(angle);
        *re = was * c - *im * s;
        *im = was * s + *im * c;
    }
}

static void run(double *o, const mn_head *head) {
    const mn_cache *cache = head->cache;
    const int64_t K = head->size->K, V = head->size->V, J = head->size->J;
    const int64_t j = head->h * J / head->size->H;
    double *q = head->scratch, *score = cache->scratch, top = -INFINITY, sum = 0.0;
    for (int64_t i = 0; i < K; i++) q[i] = head->config->scale * head->in.q[i];
    mn_turn_row(q, K, cache->length - 1, head->config->rope_kind, head->config->rope_base);
    for (int64_t t = 0; t < cache->length; t++) {
        const double *k = cache->k + t * cache->k_count + j * K;
        score[t] = 0.0;
        for (int64_t i = 0; i < K; i++) score[t] += q[i] * k[i];
        top = fmax(top, score[t]);
    }
    memset(o, 0, (size_t)V * sizeof *o);
    for (int64_t t = 0; t < cache->length; t++) {
        const double weight = exp(score[t] - top), *v = cache->v + t * cache->v_count + j * V;
        sum += weight;
        for (int64_t i = 0; i < V; i++) o[i] += weight * v[i];
    }
    for (int64_t i = 0; sum > 0.0 && i < V; i++) o[i] /= sum;
}

const mn_read mn_read_softmax = {
    .name = "softmax",
    .equation = "o = sum_t softmax_t(scale q.k_t) v_t",
    .run = run,
};
