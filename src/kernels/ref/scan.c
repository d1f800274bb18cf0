/* scan.c - Mamba-1's selective scan: a diagonal recurrence per channel v and state s.
 *
 *   d = softplus(dt + dt_bias), or dt + dt_bias itself      h_t = exp(d A) h_{t-1} + d u B
 *   r = sum_s C h + D u                                     y = r silu(z)
 *
 * Backward, with gr = dy silu(z) and g the adjoint of h_t:
 *
 *   g += gr C          dC = sum_v gr h        dB = sum_v g d u      dz = dy r silu'(z)
 *   x = g exp(d A) h_{t-1}    dA = sum_t d x  dd = sum_s g u B + A x
 *   du = gr D + sum_s g d B   dD = sum_t gr u ddt = dd sigmoid(dt + dt_bias), summed for dt_bias
 *   g <- exp(d A) g
 *
 * Forward, an item is one channel of one sequence; backward it is a sequence, because B and C are
 * shared by the channels. */
#include <math.h>
#include <string.h>

#include "kernels/ref/ref.h"

static double sigmoid(double x) {
    return x >= 0.0 ? 1.0 / (1.0 + exp(-x)) : exp(x) / (1.0 + exp(x));
}

/* The numbers of channel m at one token. */
typedef struct token {
    double u, d, slope;          // slope: of d in dt
    double gate, gate_slope;     // silu(z) and its derivative, or 1 and 0
    const REAL *B, *C;
} token;

static token token_at(const mn_scan_args *p, int64_t b, int64_t t, int64_t m) {
    const double bias = p->dt_bias.data ? (double)((const REAL *)p->dt_bias.data)[m] : 0.0;
    const double x = MN_ROW(REAL, p->dt, b, t, 0)[m] + bias;
    const REAL *z = MN_ROW(REAL, p->z, b, t, 0);
    token k = { .u = MN_ROW(REAL, p->u, b, t, 0)[m], .d = x, .slope = 1.0, .gate = 1.0,
                .B = MN_ROW(REAL, p->Bm, b, t, 0), .C = MN_ROW(REAL, p->Cm, b, t, 0) };
    if (p->softplus) {
        k.d = fmax(x, 0.0) + log1p(exp(-fabs(x)));
        k.slope = sigmoid(x);
    }
    if (z) {
        const double s = sigmoid(z[m]);
        k.gate = z[m] * s;
        k.gate_slope = s * (1.0 + z[m] * (1.0 - s));
    }
    return k;
}

static void load_state(double *h, const mn_scan_args *p, int64_t n, int64_t m) {
    const REAL *from = MN_ROW(REAL, p->h0, n, 0, 0);
    for (int64_t s = 0; s < p->call.K; s++) h[s] = from ? (double)from[m * p->call.K + s] : 0.0;
}

/* next may be h */
static void advance(double *next, const double *h, const mn_scan_args *p, const token *k,
                    int64_t m) {
    const REAL *A = (const REAL *)p->A.data + m * p->call.K;
    for (int64_t s = 0; s < p->call.K; s++) {
        next[s] = exp(k->d * A[s]) * h[s] + k->d * k->u * k->B[s];
    }
}

/* sum_s C h + D u */
static double read_out(const double *h, const mn_scan_args *p, const token *k, int64_t m) {
    double sum = p->D.data ? ((const REAL *)p->D.data)[m] * k->u : 0.0;
    for (int64_t s = 0; s < p->call.K; s++) sum += k->C[s] * h[s];
    return sum;
}

bool MN_REF(mn_scan_forward_plan)(const void *args, mn_plan *plan) {
    const mn_call *c = args;
    int64_t items;
    return mn_mul_i64(&items, mn_n_sequences(c), c->V) && mn_ref_plan(plan, items, c->K);
}

void MN_REF(mn_scan_forward_run)(const void *args, int phase, int64_t item, void *shared,
                                 void *scratch) {
    (void)phase, (void)shared;
    const mn_scan_args *p = args;
    const int64_t K = p->call.K, n = item / p->call.V, m = item % p->call.V;
    const mn_sequence seq = mn_sequence_at(&p->call, n);
    double *h = scratch;
    load_state(h, p, n, m);
    for (int64_t t = seq.t0; t < seq.t0 + seq.length; t++) {
        const token k = token_at(p, seq.b, t, m);
        REAL *y = MN_ROW_OUT(REAL, p->y, seq.b, t, 0);
        advance(h, h, p, &k, m);
        if (y) y[m] = (REAL)(k.gate * read_out(h, p, &k, m));
    }
    REAL *last = MN_ROW_OUT(REAL, p->h, n, 0, 0);
    for (int64_t s = 0; last && s < K; s++) last[m * K + s] = (REAL)h[s];
}

/* Scratch: h of all steps of one channel, g, and dB, dC of the sequence. Shared: per sequence dA,
 * dD and the gradient of the bias, V (K + 2) numbers, summed by a second phase. */
bool MN_REF(mn_scan_backward_plan)(const void *args, mn_plan *plan) {
    const mn_call *c = args;
    const int64_t n = mn_n_sequences(c);
    int64_t count, parts;
    bool ok = mn_mul_i64(&count, mn_longest_sequence(c), 3) &&
              mn_mul_i64(&count, count + 2, c->K) && mn_ref_plan(plan, n, count) &&
              mn_mul_i64(&parts, c->V, c->K + 2) && mn_mul_i64(&parts, parts, n);
    mn_ref_add_phase(plan, c->V);
    return ok && mn_mul_size(&plan->shared_bytes, (size_t)parts, sizeof(double));
}

/* Gradients of one token of channel m; h is the state before it, h + K the one after. `part`
 * gathers dA, dD and the gradient of the bias. */
static void token_backward(double *g, double *dB, double *dC, double *part, const double *h,
                           const mn_scan_args *p, int64_t b, int64_t t, int64_t m) {
    const int64_t K = p->call.K;
    const token k = token_at(p, b, t, m);
    const REAL *A = (const REAL *)p->A.data + m * K;
    const double dy = mn_ref_get(MN_ROW(REAL, p->cot.y, b, t, 0), m), gr = dy * k.gate;
    const double D = p->D.data ? (double)((const REAL *)p->D.data)[m] : 0.0;
    REAL *du = MN_ROW_OUT(REAL, p->grad.u, b, t, 0), *ddt = MN_ROW_OUT(REAL, p->grad.dt, b, t, 0);
    REAL *dz = MN_ROW_OUT(REAL, p->grad.z, b, t, 0);
    double to_u = gr * D, to_d = 0.0;
    for (int64_t s = 0; s < K; s++) {
        const double decay = exp(k.d * A[s]);
        g[s] += gr * k.C[s];
        dC[s] += gr * h[K + s];
        dB[s] += g[s] * k.d * k.u;
        const double x = g[s] * decay * h[s];
        part[s] += k.d * x;
        to_d += g[s] * k.u * k.B[s] + A[s] * x;
        to_u += g[s] * k.d * k.B[s];
        g[s] *= decay;
    }
    part[K] += gr * k.u;
    part[K + 1] += to_d * k.slope;
    if (du) du[m] = (REAL)to_u;
    if (ddt) ddt[m] = (REAL)(to_d * k.slope);
    if (dz) dz[m] = (REAL)(dy * k.gate_slope * read_out(h + K, p, &k, m));
}

static void channel_backward(double *g, double *h, double *dB, double *dC, double *part,
                             const mn_scan_args *p, int64_t n, int64_t m) {
    const int64_t K = p->call.K;
    const mn_sequence seq = mn_sequence_at(&p->call, n);
    load_state(h, p, n, m);
    for (int64_t t = 0; t < seq.length; t++) {
        const token k = token_at(p, seq.b, seq.t0 + t, m);
        advance(h + (t + 1) * K, h + t * K, p, &k, m);
    }
    const REAL *last = MN_ROW(REAL, p->cot.h, n, 0, 0);
    for (int64_t s = 0; s < K; s++) g[s] = last ? (double)last[m * K + s] : 0.0;
    memset(part, 0, (size_t)(K + 2) * sizeof *part);
    for (int64_t t = seq.length - 1; t >= 0; t--) {
        token_backward(g, dB + t * K, dC + t * K, part, h + t * K, p, seq.b, seq.t0 + t, m);
    }
    REAL *first = MN_ROW_OUT(REAL, p->grad.h0, n, 0, 0);
    for (int64_t s = 0; first && s < K; s++) first[m * K + s] = (REAL)g[s];
}

/* dA, dD and dt_bias of channel m, summed over sequences */
static void sum_parts(const mn_scan_args *p, int64_t m, const double *parts) {
    const int64_t K = p->call.K, stride = p->call.V * (K + 2);
    for (int64_t s = 0; s < K + 2; s++) {
        double sum = 0.0;
        for (int64_t n = 0; n < mn_n_sequences(&p->call); n++) {
            sum += parts[n * stride + m * (K + 2) + s];
        }
        if (s < K && p->grad.A.data) ((REAL *)p->grad.A.data)[m * K + s] = (REAL)sum;
        if (s == K && p->grad.D.data) ((REAL *)p->grad.D.data)[m] = (REAL)sum;
        if (s == K + 1 && p->grad.dt_bias.data) ((REAL *)p->grad.dt_bias.data)[m] = (REAL)sum;
    }
}

void MN_REF(mn_scan_backward_run)(const void *args, int phase, int64_t item, void *shared,
                                  void *scratch) {
    const mn_scan_args *p = args;
    if (phase == 1) {
        sum_parts(p, item, shared);
        return;
    }
    const int64_t K = p->call.K, V = p->call.V;
    const mn_sequence seq = mn_sequence_at(&p->call, item);
    double *dB = scratch, *dC = dB + seq.length * K, *g = dC + seq.length * K, *h = g + K;
    memset(dB, 0, (size_t)(2 * seq.length * K) * sizeof *dB);
    for (int64_t m = 0; m < V; m++) {
        double *part = (double *)shared + (item * V + m) * (K + 2);
        channel_backward(g, h, dB, dC, part, p, item, m);
    }
    for (int64_t t = 0; t < seq.length; t++) {
        REAL *dB_row = MN_ROW_OUT(REAL, p->grad.Bm, seq.b, seq.t0 + t, 0);
        REAL *dC_row = MN_ROW_OUT(REAL, p->grad.Cm, seq.b, seq.t0 + t, 0);
        for (int64_t s = 0; s < K; s++) {
            if (dB_row) dB_row[s] = (REAL)dB[t * K + s];
            if (dC_row) dC_row[s] = (REAL)dC[t * K + s];
        }
    }
}
