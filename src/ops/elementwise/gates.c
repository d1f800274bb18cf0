/* gates.c - gates of heads and their gradients on the CPU's threads (equations in tape/gates.c). */
#include <math.h>

#include "ops/elementwise/elementwise_internal.h"

static double get(const mn_view *v, int64_t i) {
    if (!v->data) return 0.0;
    return v->dtype == MN_F64 ? ((const double *)v->data)[i] : (double)((const float *)v->data)[i];
}

static void put(const mn_view *v, int64_t i, double x, bool add) {
    if (!v->data) return;
    if (add) x += get(v, i);
    if (v->dtype == MN_F64) ((double *)v->data)[i] = x;
    else ((float *)v->data)[i] = (float)x;
}

static double sigmoid(double x) {
    return 1.0 / (1.0 + exp(-x));
}

static double softplus(double x) {
    return fmax(x, 0.0) + log1p(exp(-fabs(x)));
}

/* One item is one head, whose rows are added in their order. */
static void run_head(void *context, int64_t h, int worker) {
    (void)worker;
    const mn_gates_params *p = context;
    const double scale = get(&p->param[0], h), bias = get(&p->param[1], h);
    const double size = softplus(scale), rate = exp(get(&p->param[2], h));
    double sums[3] = { 0.0 };
    for (int64_t row = 0; row < p->rows; row++) {
        const int64_t at = row * p->n + h;
        const double s = sigmoid(get(&p->u, row * p->u.stride[1] + h));
        const double z = get(&p->w, row * p->w.stride[1] + h) + bias;
        if (!p->back) {
            put(&p->outputs[0], at, s, false);
            put(&p->outputs[1], at, s * size, false);
            put(&p->outputs[2], at, -softplus(z) * rate, false);
            continue;
        }
        const double strength = get(&p->cot[1], at), decay = get(&p->cot[2], at);
        const double ds = get(&p->cot[0], at) + strength * size;
        const double dz = -decay * rate * sigmoid(z);
        put(&p->du, row * p->du.stride[1] + h, ds * s * (1.0 - s), p->add_u);
        put(&p->dw, row * p->dw.stride[1] + h, dz, p->add_w);
        sums[0] += strength * s;
        sums[1] += dz;
        sums[2] -= decay * softplus(z) * rate;
    }
    if (!p->back) return;
    put(&p->dparam[0], h, sums[0] * sigmoid(scale), p->add_param[0]);
    put(&p->dparam[1], h, sums[1], p->add_param[1]);
    put(&p->dparam[2], h, sums[2], p->add_param[2]);
}

int mn_elementwise_gates_cpu(void *where, const void *work, void *space) {
    (void)space;
    const mn_gates_params *w = work;
    return mn_elementwise_items(where, w->n, run_head, w);
}
