/* loss.c - losses and gradients of rows of logits, on the CPU's threads (equations in
 * tape/loss.c). A row of logits has room for as many numbers again behind it, and its gradient
 * takes its place. */
#include <math.h>

#include "base/util.h"
#include "kernels/cpu/simd/vector_targets.h"
#include "ops/elementwise/elementwise_internal.h"

#define MN_PER_TARGET "kernels/cpu/simd/map.h"
#include "kernels/cpu/simd/per_target.h"

typedef struct row_math {
    void (*exp)(float *y, const float *x, int64_t n);
    void (*tanh)(float *y, const float *x, int64_t n);
    float (*sum)(const float *x, int64_t n);
    float (*max)(const float *x, int64_t n);
} row_math;

static void plain_exp(float *y, const float *x, int64_t n) {
    for (int64_t i = 0; i < n; i++) y[i] = expf(x[i]);
}

static void plain_tanh(float *y, const float *x, int64_t n) {
    for (int64_t i = 0; i < n; i++) y[i] = tanhf(x[i]);
}

static float plain_sum(const float *x, int64_t n) {
    double sum = 0.0;
    for (int64_t i = 0; i < n; i++) sum += x[i];
    return (float)sum;
}

static float plain_max(const float *x, int64_t n) {
    float top = -INFINITY;
    for (int64_t i = 0; i < n; i++) top = x[i] > top ? x[i] : top;
    return top;
}

static row_math math_of(const mn_context *context) {
#define MATH(id, name)                                                                             \
    if (context->target == MN_TARGET_##id) {                                                       \
        return (row_math){ mn_map_exp_##name, mn_map_tanh_##name, mn_map_sum_##name,               \
                           mn_map_max_##name };                                                    \
    }
    MN_VECTOR_TARGETS(MATH)
#undef MATH
    (void)context;
    return (row_math){ plain_exp, plain_tanh, plain_sum, plain_max };
}

typedef struct loss_job {
    const mn_loss_params *w;
    row_math math;
    double scale;    // weight / rows that count
} loss_job;

/* One row of logits becomes its gradient in place. */
static void row_f32(const loss_job *j, float *z, int64_t row) {
    const mn_loss_params *w = j->w;
    const int32_t target = w->targets[row];
    const float cap = (float)w->cap;
    if (cap > 0.0f) {
        for (int64_t i = 0; i < w->V; i++) z[i] /= cap;
        j->math.tanh(z, z, w->V);
        for (int64_t i = 0; i < w->V; i++) z[i] *= cap;
    }
    float *e = z + w->V;    // second half of the row's memory
    const float top = j->math.max(z, w->V), at = z[target];
    for (int64_t i = 0; i < w->V; i++) e[i] = z[i] - top;
    j->math.exp(e, e, w->V);
    const float sum = j->math.sum(e, w->V);
    const double lse = log((double)sum) + top;
    w->nll[row] = lse - at;
    w->lse2[row] = lse * lse;
    if (!w->dlogits.data) return;
    const double scale = w->share ? j->scale * w->share[row] : j->scale;
    const float to_p = (float)(scale * (1.0 + 2.0 * w->z_loss * lse) / sum);
    for (int64_t i = 0; i < w->V; i++) e[i] *= to_p;
    e[target] -= (float)scale;
    for (int64_t i = 0; i < w->V; i++) {
        const float bend = cap > 0.0f ? 1.0f - (z[i] / cap) * (z[i] / cap) : 1.0f;
        z[i] = e[i] * bend;
    }
}

static void row_f64(const loss_job *j, double *z, int64_t row) {
    const mn_loss_params *w = j->w;
    const int32_t target = w->targets[row];
    for (int64_t i = 0; w->cap > 0.0 && i < w->V; i++) z[i] = w->cap * tanh(z[i] / w->cap);
    double top = z[0], sum = 0.0;
    for (int64_t i = 1; i < w->V; i++) top = fmax(top, z[i]);
    for (int64_t i = 0; i < w->V; i++) sum += exp(z[i] - top);
    const double lse = log(sum) + top;
    w->nll[row] = lse - z[target];
    w->lse2[row] = lse * lse;
    if (!w->dlogits.data) return;
    const double scale = w->share ? j->scale * w->share[row] : j->scale;
    const double to_p = scale * (1.0 + 2.0 * w->z_loss * lse);
    for (int64_t i = 0; i < w->V; i++) {
        const double bend = w->cap > 0.0 ? 1.0 - (z[i] / w->cap) * (z[i] / w->cap) : 1.0;
        const double hit = i == target ? scale : 0.0;
        z[i] = (exp(z[i] - lse) * to_p - hit) * bend;
    }
}

static void run_row(void *context, int64_t item, int worker) {
    (void)worker;
    const loss_job *j = context;
    const mn_loss_params *w = j->w;
    const int64_t row = w->kept ? w->kept[w->first + item] : w->first + item;
    const int64_t at = item * w->logits.stride[1];
    if (w->logits.dtype == MN_F64) row_f64(j, (double *)w->logits.data + at, row);
    else row_f32(j, (float *)w->logits.data + at, row);
}

int mn_elementwise_loss_cpu(void *where, const void *work, void *space) {
    (void)space;
    const mn_loss_params *w = work;
    const loss_job job = { w, math_of(where),
                           w->weight / (double)mn_max(w->result->counted, 1) };
    return mn_elementwise_items(where, w->n, run_row, &job);
}

int mn_elementwise_count_cpu(void *where, const void *work, void *space) {
    (void)where, (void)space;
    const mn_count_params *w = work;
    w->result->counted = 0;
    for (int64_t i = 0; i < w->n; i++) w->result->counted += w->targets[i] >= 0;
    return 0;
}

int mn_elementwise_mix_cpu(void *where, const void *work, void *space) {
    (void)where, (void)space;
    const mn_mix_params *w = work;
    double *nll = w->nll;
    for (int64_t row = 0; row < w->rows; row++) {
        double least = nll[row], sum = 0.0;
        for (int s = 1; s < w->n; s++) least = fmin(least, nll[s * w->rows + row]);
        for (int s = 0; s < w->n; s++) sum += exp(least - nll[s * w->rows + row]);
        for (int s = 0; s < w->n; s++) {
            double *at = &nll[s * w->rows + row];
            *at = exp(least - *at) / sum;
        }
        w->mixed[row] = w->targets[row] < 0 ? 0.0 : least - log(sum) + log((double)w->n);
    }
    return 0;
}

int mn_elementwise_total_cpu(void *where, const void *work, void *space) {
    (void)where, (void)space;
    const mn_total_params *w = work;
    double nll = 0.0, lse2 = 0.0;
    for (int64_t row = 0; row < w->rows; row++) {
        nll += w->nll[row];
        if (w->lse2) lse2 += w->lse2[row];
        if (w->given) w->given[row] = (float)w->nll[row];
    }
    const int64_t counted = w->result->counted;
    w->result->loss = counted ? (nll + w->z_loss * lse2) / (double)counted : 0.0;
    return 0;
}
