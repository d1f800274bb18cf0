/* conv.c - y_t = act(p_t), p_t = bias + sum_i w_i u_{t+i}, depthwise, over u = (tail0, x).
 *
 * u is the sequence behind its last W-1 inputs, so x_s is u_{s+W-1} and the new tail is the last
 * W-1 entries of u. Backward, with d_t = dy_t act'(p_t):
 *
 *   du_j = sum_i w_i d_{j-i}  (+ dtail_{j-length} for j >= length)    dw_i = sum_t d_t u_{t+i}
 *   dbias = sum_t d_t
 *
 * One item is one channel of one sequence. */
#include <math.h>

#include "kernels/ref/ref.h"

/* u of one channel: W - 1 + length numbers */
static void gather(double *u, const mn_conv_args *p, int64_t n, int64_t channel) {
    const int64_t M = p->call.W - 1;
    const mn_sequence seq = mn_sequence_at(&p->call, n);
    const REAL *tail0 = MN_ROW(REAL, p->tail0, n, 0, 0);
    for (int64_t m = 0; m < M; m++) u[m] = tail0 ? tail0[m * p->call.V + channel] : 0.0;
    for (int64_t t = 0; t < seq.length; t++) {
        u[M + t] = MN_ROW(REAL, p->x, seq.b, seq.t0 + t, 0)[channel];
    }
}

static double before_act(const mn_conv_args *p, const double *u, int64_t t, int64_t channel) {
    const REAL *w = (const REAL *)p->w.data + channel * p->call.W;
    double sum = mn_ref_get(p->bias.data, channel);
    for (int64_t i = 0; i < p->call.W; i++) sum += w[i] * u[t + i];
    return sum;
}

bool MN_REF(mn_conv_forward_plan)(const void *args, mn_plan *plan) {
    const mn_call *c = args;
    int64_t items, count;
    return mn_mul_i64(&items, mn_n_sequences(c), c->V) &&
           mn_add_i64(&count, mn_longest_sequence(c), c->W) && mn_ref_plan(plan, items, count);
}

void MN_REF(mn_conv_forward_run)(const void *args, int phase, int64_t item, void *shared,
                                 void *scratch) {
    (void)phase, (void)shared;
    const mn_conv_args *p = args;
    const int64_t V = p->call.V, n = item / V, channel = item % V;
    const mn_sequence seq = mn_sequence_at(&p->call, n);
    double *u = scratch;
    gather(u, p, n, channel);
    for (int64_t t = 0; p->y.data && t < seq.length; t++) {
        const double sum = before_act(p, u, t, channel);
        const double y = p->act == 1 ? sum / (1.0 + exp(-sum)) : sum;
        MN_ROW_OUT(REAL, p->y, seq.b, seq.t0 + t, 0)[channel] = (REAL)y;
    }
    REAL *tail = MN_ROW_OUT(REAL, p->tail, n, 0, 0);
    for (int64_t m = 0; tail && m < p->call.W - 1; m++) {
        tail[m * V + channel] = (REAL)u[seq.length + m];
    }
}

/* Scratch: u and d. Shared: W taps and the bias for each channel of each sequence, which a second
 * phase sums over the sequences. */
bool MN_REF(mn_conv_backward_plan)(const void *args, mn_plan *plan) {
    const mn_call *c = args;
    int64_t items, count, parts;
    const bool ok = mn_mul_i64(&items, mn_n_sequences(c), c->V) &&
                    mn_add_i64(&count, mn_longest_sequence(c), c->W) &&
                    mn_mul_i64(&count, count, 2) && mn_ref_plan(plan, items, count) &&
                    mn_mul_i64(&parts, items, c->W + 1) &&
                    mn_mul_size(&plan->shared_bytes, (size_t)parts, sizeof(double));
    mn_ref_add_phase(plan, c->V);
    return ok;
}

/* d_t for every token of the sequence */
static void cotangent_before_act(double *d, const mn_conv_args *p, const double *u, mn_sequence seq,
                                 int64_t channel) {
    for (int64_t t = 0; t < seq.length; t++) {
        const REAL *dy = MN_ROW(REAL, p->cot.y, seq.b, seq.t0 + t, 0);
        d[t] = mn_ref_get(dy, channel);
        if (p->act == 1) {
            const double sum = before_act(p, u, t, channel), s = 1.0 / (1.0 + exp(-sum));
            d[t] *= s * (1.0 + sum * (1.0 - s));
        }
    }
}

/* du_j */
static double input_gradient(const mn_conv_args *p, const double *d, int64_t length, int64_t j,
                             int64_t n, int64_t channel) {
    const int64_t V = p->call.V;
    const REAL *w = (const REAL *)p->w.data + channel * p->call.W;
    const REAL *dtail = MN_ROW(REAL, p->cot.tail, n, 0, 0);
    double sum = dtail && j >= length ? dtail[(j - length) * V + channel] : 0.0;
    for (int64_t i = 0; i < p->call.W; i++) {
        if (j - i >= 0 && j - i < length) sum += w[i] * d[j - i];
    }
    return sum;
}

static void sum_parts(const mn_conv_args *p, int64_t channel, const double *parts) {
    const int64_t W = p->call.W, n_sequences = mn_n_sequences(&p->call);
    REAL *dw = MN_ROW_OUT(REAL, p->grad.w, 0, 0, 0),
         *dbias = MN_ROW_OUT(REAL, p->grad.bias, 0, 0, 0);
    for (int64_t i = 0; i <= W; i++) {
        double sum = 0.0;
        for (int64_t n = 0; n < n_sequences; n++) {
            sum += parts[(n * p->call.V + channel) * (W + 1) + i];
        }
        if (i < W && dw) dw[channel * W + i] = (REAL)sum;
        if (i == W && dbias) dbias[channel] = (REAL)sum;
    }
}

void MN_REF(mn_conv_backward_run)(const void *args, int phase, int64_t item, void *shared,
                                  void *scratch) {
    const mn_conv_args *p = args;
    if (phase == 1) {
        sum_parts(p, item, shared);
        return;
    }
    const int64_t V = p->call.V, W = p->call.W, n = item / V, channel = item % V;
    const mn_sequence seq = mn_sequence_at(&p->call, n);
    double *u = scratch, *d = u + W - 1 + seq.length, *parts = (double *)shared + item * (W + 1);
    gather(u, p, n, channel);
    cotangent_before_act(d, p, u, seq, channel);
    for (int64_t i = 0; i <= W; i++) {
        parts[i] = 0.0;
        for (int64_t t = 0; t < seq.length; t++) parts[i] += d[t] * (i < W ? u[t + i] : 1.0);
    }
    REAL *dtail0 = MN_ROW_OUT(REAL, p->grad.tail0, n, 0, 0);
    for (int64_t j = 0; dtail0 && j < W - 1; j++) {
        dtail0[j * V + channel] = (REAL)input_gradient(p, d, seq.length, j, n, channel);
    }
    for (int64_t t = 0; p->grad.x.data && t < seq.length; t++) {
        REAL *dx = MN_ROW_OUT(REAL, p->grad.x, seq.b, seq.t0 + t, 0);
        dx[channel] = (REAL)input_gradient(p, d, seq.length, W - 1 + t, n, channel);
    }
}
