/* hyper.c - HyperMLP and HyperGLU heads, one query row at a time in lag order.
 *
 * Lag j of the row at position t is key t - j; a mixing parameter's entry for it is P-1-j, or t-j
 * in layout position.
 *
 *   z_j = q.k_{t-j}                    x = mix1(z), per branch
 *   relu: base = relu(x)               glu: base = softplus(x2) relu(x1), branches h and H + h
 *   w = mix2(base)                     o = gv sum_j w_j v_{t-j} / n,  n = max(|x1|_2, eps)
 *
 *   mix(z)_j = z_j (1 + d_j) + sum_a c_a (sum_i z_i U_ia) Vt_aj
 *
 * norm l2 divides x1 by n before the activation instead of o; none leaves n out.
 *
 * Backward of a mix, with G the cotangent of its result:
 *
 *   h_a = sum_i z_i U_ia    y_a = sum_j G_j Vt_aj    dc_a = h_a y_a    dVt_aj = c_a h_a G_j
 *   dU_ia = z_i c_a y_a     dd_j = z_j G_j           dz_j = G_j (1 + d_j) + sum_a c_a y_a U_ja
 *
 * One item is one head of one sequence. The parameters' gradients gather per sequence in shared
 * memory and are summed over sequences in a second phase. */
#include <math.h>
#include <string.h>

#include "kernels/ref/ref.h"

enum { OUT_SCALE, L2, NONE };
enum { LAG, POSITION };

/* One mix of one branch or head, its parameters entered by lag. */
typedef struct mix {
    const REAL *U, *Vt, *d, *c;              // (P,R) (R,P) (P) (R); NULL where absent
    int64_t P, R;
    bool by_position;
    double *h, *y;                           // R each
    double *dU, *dVt, *dd;                   // sums over rows, laid out as the parameters
    REAL *dc;
} mix;

/* One head of one sequence, and its work space. */
typedef struct work {
    const mn_hyper_args *p;
    mn_sequence seq;
    int64_t head, n_keys, before, n_branches;
    mix first[2], second;
    double *z[2], *x[2], *g[2];              // n_keys each
    double *base, *w, *gw;
    double *dk[2], *dv, *o;                  // (n_keys,K), (n_keys,V), V
} work;

static int64_t branches(const mn_hyper_args *p) {
    return p->kind == 1 ? 2 : 1;
}

static int64_t longest_keys(const mn_call *c) {
    return c->cu_seqlens ? mn_longest_sequence(c) : c->L;
}

/* Doubles of the parameters' gradients of one mix. */
static int64_t mix_floats(int64_t P, int64_t R) {
    return P * (2 * R + 1);
}

static bool plan_heads(const mn_hyper_args *p, mn_plan *plan, bool backward) {
    const mn_call *c = &p->call;
    const int64_t per_key = 9 + (backward ? 2 * c->K + c->V : 0);
    int64_t count;
    return mn_mul_i64(&count, longest_keys(c), per_key) &&
           mn_add_i64(&count, count, c->V + 4 * c->R + 2 * c->W) &&
           mn_ref_plan(plan, mn_n_sequences(c) * c->H, count);
}

static double *take(double **at, int64_t count) {
    double *here = *at;
    *at += count;
    return here;
}

static mix open_mix(const mn_in *U, const mn_in *Vt, const mn_in *d, int64_t which, int64_t P,
                    int64_t R, bool by_position, double **scratch) {
    mix m = { .P = P, .R = R, .by_position = by_position };
    m.d = MN_ROW(REAL, *d, 0, 0, which);
    m.U = MN_ROW(REAL, *U, 0, 0, which);
    m.Vt = MN_ROW(REAL, *Vt, 0, 0, which);
    m.h = take(scratch, R);
    m.y = take(scratch, R);
    return m;
}

static work open_work(const mn_hyper_args *p, int64_t item, double *scratch) {
    const mn_call *c = &p->call;
    work s = { .p = p, .seq = mn_sequence_at(c, item / c->H), .head = item % c->H };
    s.n_keys = c->cu_seqlens ? s.seq.length : c->L;
    s.before = s.n_keys - s.seq.length;
    s.n_branches = branches(p);
    for (int64_t b = 0; b < s.n_branches; b++) {
        s.first[b] = open_mix(&p->U1, &p->Vt1, &p->d1, s.head + b * c->H, c->P, c->R,
                              p->layout == POSITION, &scratch);
    }
    s.second = open_mix(&p->U2, &p->Vt2, &p->d2, s.head, c->P, c->W, p->layout == POSITION,
                        &scratch);
    for (int b = 0; b < 2; b++) {
        s.z[b] = take(&scratch, s.n_keys);
        s.x[b] = take(&scratch, s.n_keys);
        s.g[b] = take(&scratch, s.n_keys);
    }
    s.base = take(&scratch, s.n_keys);
    s.w = take(&scratch, s.n_keys);
    s.gw = take(&scratch, s.n_keys);
    s.o = take(&scratch, c->V);
    s.dk[0] = take(&scratch, s.n_keys * c->K);
    s.dk[1] = take(&scratch, s.n_keys * c->K);
    s.dv = take(&scratch, s.n_keys * c->V);
    return s;
}

static double control(const mix *m, int64_t a) {
    return m->c ? m->c[a] : 1.0;
}

/* The parameters' entry of lag 0 in a row of n lags. */
static int64_t newest_entry(const mix *m, int64_t n) {
    return (m->by_position ? n : m->P) - 1;
}

/* x = mix(z) over n lags */
static void mix_row(double *x, const double *z, const mix *m, int64_t n) {
    const int64_t last = newest_entry(m, n);
    for (int64_t j = 0; j < n; j++) x[j] = z[j] * (1.0 + mn_ref_get(m->d, last - j));
    if (!m->U || !m->Vt) return;
    for (int64_t a = 0; a < m->R; a++) {
        m->h[a] = 0.0;
        for (int64_t j = 0; j < n; j++) m->h[a] += z[j] * m->U[(last - j) * m->R + a];
        const double scaled = m->h[a] * control(m, a);
        for (int64_t j = 0; j < n; j++) x[j] += scaled * m->Vt[a * m->P + last - j];
    }
}

/* g, the cotangent of mix(z), becomes that of z; m->h is left from mix_row. */
static void mix_row_backward(double *g, const double *z, const mix *m, int64_t n) {
    const int64_t last = newest_entry(m, n);
    const bool low_rank = m->U && m->Vt;
    for (int64_t a = 0; !low_rank && m->dc && a < m->R; a++) m->dc[a] = 0;
    for (int64_t a = 0; low_rank && a < m->R; a++) {
        m->y[a] = 0.0;
        for (int64_t j = 0; j < n; j++) {
            m->y[a] += g[j] * m->Vt[a * m->P + last - j];
            m->dVt[a * m->P + last - j] += control(m, a) * m->h[a] * g[j];
        }
        if (m->dc) m->dc[a] = (REAL)(m->h[a] * m->y[a]);
        m->y[a] *= control(m, a);
    }
    for (int64_t j = 0; j < n; j++) {
        if (m->d) m->dd[last - j] += z[j] * g[j];
        g[j] *= 1.0 + mn_ref_get(m->d, last - j);
        for (int64_t a = 0; low_rank && a < m->R; a++) {
            m->dU[(last - j) * m->R + a] += z[j] * m->y[a];
            g[j] += m->y[a] * m->U[(last - j) * m->R + a];
        }
    }
}

static double softplus(double x) {
    return fmax(x, 0.0) + log1p(exp(-fabs(x)));
}

static double sigmoid(double x) {
    return x >= 0.0 ? 1.0 / (1.0 + exp(-x)) : exp(x) / (1.0 + exp(x));
}

/* Scores, mixes and weights of the row of query t over its n lags; returns |x1|. Leaves x1 divided
 * by its norm where the norm is l2. */
static double read_row(work *s, int64_t t, int64_t n) {
    const mn_hyper_args *p = s->p;
    const int64_t at = s->seq.t0 + t, newest = s->seq.t0 + s->before + t;
    for (int64_t b = 0; b < s->n_branches; b++) {
        const int64_t branch = s->head + b * p->call.H;
        const REAL *q = MN_ROW(REAL, p->q, s->seq.b, at, branch);
        s->first[b].c = MN_ROW(REAL, p->c1, s->seq.b, at, branch);
        s->first[b].dc = MN_ROW_OUT(REAL, p->grad.c1, s->seq.b, at, branch);
        for (int64_t j = 0; j < n; j++) {
            const REAL *k = MN_ROW(REAL, p->k, s->seq.b, newest - j, branch);
            s->z[b][j] = 0.0;
            for (int64_t i = 0; i < p->call.K; i++) s->z[b][j] += (double)q[i] * k[i];
        }
        mix_row(s->x[b], s->z[b], &s->first[b], n);
    }
    s->second.c = MN_ROW(REAL, p->c2, s->seq.b, at, s->head);
    s->second.dc = MN_ROW_OUT(REAL, p->grad.c2, s->seq.b, at, s->head);
    double norm = 0.0;
    for (int64_t j = 0; j < n; j++) norm += s->x[0][j] * s->x[0][j];
    norm = sqrt(norm);
    for (int64_t j = 0; j < n; j++) {
        if (p->norm == L2) s->x[0][j] /= fmax(norm, p->eps);
        s->base[j] = mn_ref_relu(s->x[0][j]);
        if (s->n_branches == 2) s->base[j] *= softplus(s->x[1][j]);
    }
    mix_row(s->w, s->base, &s->second, n);
    return norm;
}

/* o = sum_j w_j v_{t-j}, before its scale and gate */
static void read_values(const work *s, int64_t t, int64_t n) {
    const int64_t V = s->p->call.V, newest = s->seq.t0 + s->before + t;
    memset(s->o, 0, (size_t)V * sizeof *s->o);
    for (int64_t j = 0; j < n; j++) {
        const REAL *v = MN_ROW(REAL, s->p->v, s->seq.b, newest - j, s->head);
        for (int64_t i = 0; i < V; i++) s->o[i] += s->w[j] * v[i];
    }
}

/* What o is multiplied by before the gate. */
static double output_scale(const mn_hyper_args *p, double norm) {
    return p->norm == OUT_SCALE ? 1.0 / fmax(norm, p->eps) : 1.0;
}

static double gate(const REAL *gv, int64_t i) {
    return gv ? gv[i] : 1.0;
}

static void forward_row(work *s, int64_t t) {
    const mn_hyper_args *p = s->p;
    const int64_t n = s->before + t + 1, at = s->seq.t0 + t;
    const double scale = output_scale(p, read_row(s, t, n));
    const REAL *gv = MN_ROW(REAL, p->gv, s->seq.b, at, s->head);
    REAL *o = MN_ROW_OUT(REAL, p->o, s->seq.b, at, s->head);
    read_values(s, t, n);
    for (int64_t i = 0; o && i < p->call.V; i++) o[i] = (REAL)(s->o[i] * scale * gate(gv, i));
}

/* gw, dv and dgv from the cotangent of the output; returns the cotangent of the scale. */
static double values_backward(work *s, int64_t t, int64_t n, double scale) {
    const mn_hyper_args *p = s->p;
    const int64_t V = p->call.V, at = s->seq.t0 + t, newest = s->before + t;
    const REAL *d_o = MN_ROW(REAL, p->cot.o, s->seq.b, at, s->head);
    const REAL *gv = MN_ROW(REAL, p->gv, s->seq.b, at, s->head);
    REAL *dgv = MN_ROW_OUT(REAL, p->grad.gv, s->seq.b, at, s->head);
    double to_scale = 0.0;
    read_values(s, t, n);
    for (int64_t i = 0; i < V; i++) {
        const double g = mn_ref_get(d_o, i);
        if (dgv) dgv[i] = (REAL)(g * s->o[i] * scale);
        to_scale += g * gate(gv, i) * s->o[i];
    }
    for (int64_t j = 0; j < n; j++) {
        const REAL *v = MN_ROW(REAL, p->v, s->seq.b, s->seq.t0 + newest - j, s->head);
        s->gw[j] = 0.0;
        for (int64_t i = 0; i < V; i++) {
            const double g = mn_ref_get(d_o, i) * gate(gv, i) * scale;
            s->gw[j] += g * v[i];
            s->dv[(newest - j) * V + i] += g * s->w[j];
        }
    }
    return to_scale;
}

/* g[] = cotangents of the branches' x from gw, that of base; x1 is as read_row left it. */
static void activation_backward(work *s, int64_t n, double norm, double to_scale) {
    const mn_hyper_args *p = s->p;
    const double size = fmax(norm, p->eps);
    double along = 0.0;
    for (int64_t j = 0; j < n; j++) {
        const double open = s->x[0][j] > 0.0 ? s->gw[j] : 0.0;
        s->g[0][j] = open;
        if (s->n_branches == 2) {
            s->g[0][j] = open * softplus(s->x[1][j]);
            s->g[1][j] = open * s->x[0][j] * sigmoid(s->x[1][j]);
        }
        along += s->g[0][j] * s->x[0][j];
    }
    for (int64_t j = 0; j < n; j++) {
        if (p->norm == OUT_SCALE && norm > p->eps) {
            s->g[0][j] -= to_scale * s->x[0][j] / (size * size * size);
        }
        if (p->norm == L2) {
            s->g[0][j] = (s->g[0][j] - (norm > p->eps ? along * s->x[0][j] : 0.0)) / size;
        }
    }
}

static void backward_row(work *s, int64_t t) {
    const mn_hyper_args *p = s->p;
    const int64_t n = s->before + t + 1, K = p->call.K, at = s->seq.t0 + t;
    const double norm = read_row(s, t, n);
    const double to_scale = values_backward(s, t, n, output_scale(p, norm));
    mix_row_backward(s->gw, s->base, &s->second, n);
    activation_backward(s, n, norm, to_scale);
    for (int64_t b = 0; b < s->n_branches; b++) {
        const int64_t branch = s->head + b * p->call.H;
        const REAL *q = MN_ROW(REAL, p->q, s->seq.b, at, branch);
        REAL *dq = MN_ROW_OUT(REAL, p->grad.q, s->seq.b, at, branch);
        mix_row_backward(s->g[b], s->z[b], &s->first[b], n);
        for (int64_t i = 0; i < K; i++) {
            double sum = 0.0;
            for (int64_t j = 0; j < n; j++) {
                const int64_t key = s->before + t - j;
                const REAL *k = MN_ROW(REAL, p->k, s->seq.b, s->seq.t0 + key, branch);
                sum += s->g[b][j] * k[i];
                s->dk[b][key * K + i] += s->g[b][j] * q[i];
            }
            if (dq) dq[i] = (REAL)sum;
        }
    }
}

bool MN_REF(mn_hyper_forward_plan)(const void *args, mn_plan *plan) {
    return plan_heads(args, plan, false);
}

void MN_REF(mn_hyper_forward_run)(const void *args, int phase, int64_t item, void *shared,
                                  void *scratch) {
    (void)phase, (void)shared;
    work s = open_work(args, item, scratch);
    for (int64_t t = 0; t < s.seq.length; t++) forward_row(&s, t);
}

/* Shared memory: per sequence the gradients of the first mix of each branch, then of the second of
 * each head. */
static int64_t partial_floats(const mn_call *c) {
    return c->Q * mix_floats(c->P, c->R) + c->H * mix_floats(c->P, c->W);
}

bool MN_REF(mn_hyper_backward_plan)(const void *args, mn_plan *plan) {
    const mn_hyper_args *p = args;
    const mn_call *c = &p->call;
    int64_t width, count;
    size_t bytes;
    if (!plan_heads(p, plan, true)) return false;
    mn_ref_add_phase(plan, c->Q + c->H);
    return mn_mul_i64(&width, 2 * (c->R + c->W) + 2, c->Q + c->H) &&
           mn_mul_i64(&count, width, c->P) && mn_mul_i64(&count, count, mn_n_sequences(c)) &&
           mn_mul_size(&bytes, (size_t)(mn_n_sequences(c) * partial_floats(c)), sizeof(double)) &&
           (plan->shared_bytes = bytes, true);
}

static void open_partials(mix *m, double *at) {
    m->dU = at;
    m->dVt = m->dU + m->P * m->R;
    m->dd = m->dVt + m->P * m->R;
    memset(at, 0, (size_t)mix_floats(m->P, m->R) * sizeof *at);
}

static void head_backward(const mn_hyper_args *p, int64_t item, double *shared, double *scratch) {
    const mn_call *c = &p->call;
    work s = open_work(p, item, scratch);
    double *partials = shared + item / c->H * partial_floats(c);
    for (int64_t b = 0; b < s.n_branches; b++) {
        open_partials(&s.first[b], partials + (s.head + b * c->H) * mix_floats(c->P, c->R));
    }
    open_partials(&s.second, partials + c->Q * mix_floats(c->P, c->R) +
                             s.head * mix_floats(c->P, c->W));
    memset(s.dk[0], 0, (size_t)(s.n_keys * (2 * c->K + c->V)) * sizeof *s.dk[0]);
    for (int64_t t = 0; t < s.seq.length; t++) backward_row(&s, t);
    for (int64_t i = 0; i < s.n_keys; i++) {
        for (int64_t b = 0; b < s.n_branches; b++) {
            REAL *dk = MN_ROW_OUT(REAL, p->grad.k, s.seq.b, s.seq.t0 + i, s.head + b * c->H);
            for (int64_t a = 0; dk && a < c->K; a++) dk[a] = (REAL)s.dk[b][i * c->K + a];
        }
        REAL *dv = MN_ROW_OUT(REAL, p->grad.v, s.seq.b, s.seq.t0 + i, s.head);
        for (int64_t a = 0; dv && a < c->V; a++) dv[a] = (REAL)s.dv[i * c->V + a];
    }
}

static void sum_partials(REAL *to, const double *from, int64_t count, int64_t n, int64_t step) {
    for (int64_t i = 0; to && i < count; i++) {
        double sum = 0.0;
        for (int64_t m = 0; m < n; m++) sum += from[m * step + i];
        to[i] = (REAL)sum;
    }
}

static void sum_mix(const mn_out *U, const mn_out *Vt, const mn_out *d, int64_t which,
                    const mn_call *c, int64_t R, const double *from) {
    const int64_t n = mn_n_sequences(c), step = partial_floats(c);
    sum_partials(MN_ROW_OUT(REAL, *U, 0, 0, which), from, c->P * R, n, step);
    sum_partials(MN_ROW_OUT(REAL, *Vt, 0, 0, which), from + c->P * R, c->P * R, n, step);
    sum_partials(MN_ROW_OUT(REAL, *d, 0, 0, which), from + 2 * c->P * R, c->P, n, step);
}

void MN_REF(mn_hyper_backward_run)(const void *args, int phase, int64_t item, void *shared,
                                   void *scratch) {
    const mn_hyper_args *p = args;
    const mn_call *c = &p->call;
    const double *partials = shared;
    if (phase == 0) {
        head_backward(p, item, shared, scratch);
    } else if (item < c->Q) {
        sum_mix(&p->grad.U1, &p->grad.Vt1, &p->grad.d1, item, c, c->R,
                partials + item * mix_floats(c->P, c->R));
    } else {
        const int64_t head = item - c->Q;
        sum_mix(&p->grad.U2, &p->grad.Vt2, &p->grad.d2, head, c, c->W,
                partials + c->Q * mix_floats(c->P, c->R) + head * mix_floats(c->P, c->W));
    }
}
