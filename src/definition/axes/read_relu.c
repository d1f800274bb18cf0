/* read_relu.c - o = sum_t relu(z_t / max(|z|, eps)) v_t, z_t = scale q.k_t over the cache. */
#include "definition/axes.h"

#include <math.h>
#include <string.h>

static void run(double *o, const mn_head *head) {
    const mn_cache *cache = head->cache;
    const int64_t K = head->size->K, V = head->size->V;
    const int64_t j = head->h * head->size->J / head->size->H;
    double *z = cache->scratch, norm2 = 0.0;
    for (int64_t t = 0; t < cache->length; t++) {
        const double *k = cache->k + t * cache->k_count + j * K;
        z[t] = 0.0;
        for (int64_t i = 0; i < K; i++) z[t] += head->config->scale * head->in.q[i] * k[i];
        norm2 += z[t] * z[t];
    }
    const double length = fmax(sqrt(norm2), head->config->eps);
    memset(o, 0, (size_t)V * sizeof *o);
    for (int64_t t = 0; t < cache->length; t++) {
        const double weight = fmax(z[t] / length, 0.0), *v = cache->v + t * cache->v_count + j * V;
        for (int64_t i = 0; i < V; i++) o[i] += weight * v[i];
    }
}

const mn_read mn_read_relu = {
    .name = "relu",
    .equation = "o = sum_t relu(z_t / |z|) v_t, z_t = scale q.k_t",
    .run = run,
};
