/* bayes.c - the Bayesian Layer, one token after the other (Prop. 1 of the paper).
 *
 *   Pbar = A P A' + l2 N    u = Pbar k    s = r2 + k'u    w = u / s    P = Pbar - u u' / s
 *   Mbar = A M              e = v - Mbar'k                M = Mbar + w e'       o = scale M'q
 *
 * for each noise group, whose value columns are neighbours. Channel i is row i of the state, or
 * with theta row 2i of a pair that A scales by exp la_i and turns by theta_i; k, q and the noise
 * touch only that row.
 *
 * Backward, with D and E the adjoints of P (symmetric) and M after the token:
 *
 *   D += scale^2 dqvar q q'     dq = scale M do + 2 scale^2 dqvar P q    E += scale q do'
 *   de = E'w = dv               dw = dgainvec + E e                      dMbar = E - k de'
 *   ds = u'D u / s^2 - dw'u / s^2                  du = dw / s - 2 D u / s + dkvar k
 *   dkvar += ds + dgain r2 / s^2                   dr2 = ds - dgain (k'u) / s^2
 *   dk = dkvar u + Pbar du - Mbar de               dPbar = D + (du k' + k du') / 2
 *
 * and through X = A P A' and Y = A M, J turning each pair by a right angle,
 *
 *   dla = 2 rowsum(dPbar . X) + rowsum(dMbar . Y)    dtheta = the same with J X and J Y
 *   dl2 = trace(N dPbar)                             D <- A' dPbar A    E <- A' dMbar
 *
 * One item is one head of one sequence, with all its groups. The way back keeps all states. */
#include <math.h>
#include <string.h>

#include "kernels/ref/ref.h"

typedef struct head {
    const mn_bayes_args *p;
    int64_t K, R, V, G, step;    // channel i is row i * step
    int64_t n, b, h;
} head;

static head head_of(const mn_bayes_args *p, int64_t item) {
    const mn_call *c = &p->call;
    const int64_t step = p->theta.data ? 2 : 1, n = item / c->H;
    return (head){ p, c->K, c->K * step, c->V, c->G, step, n, mn_sequence_at(c, n).b, item % c->H };
}

/* Columns [first_column(g), first_column(g + 1)) are those j with floor(j G / V) = g. */
static int64_t first_column(const head *hd, int64_t g) {
    return mn_ceil_div(g * hd->V, hd->G);
}

/* X = A X, or A'X, for R rows of n columns */
static void move_rows(double *X, int64_t n, const head *hd, int64_t t, bool back) {
    const REAL *la = MN_ROW(REAL, hd->p->la, hd->b, t, hd->h);
    const REAL *theta = MN_ROW(REAL, hd->p->theta, hd->b, t, hd->h);
    for (int64_t i = 0; i < hd->K; i++) {
        const double rho = exp(la[i]);
        double *re = X + i * hd->step * n, *im = re + n;
        if (!theta) {
            for (int64_t j = 0; j < n; j++) re[j] *= rho;
            continue;
        }
        const double c = rho * cos(theta[i]), s = (back ? -rho : rho) * sin(theta[i]);
        for (int64_t j = 0; j < n; j++) {
            const double x = re[j], y = im[j];
            re[j] = c * x - s * y;
            im[j] = s * x + c * y;
        }
    }
}

/* Square blocks, so that the columns read stay in the cache. */
enum { BLOCK = 16 };

static void transpose(double *X, int64_t R) {
    for (int64_t i0 = 0; i0 < R; i0 += BLOCK) {
        for (int64_t j0 = 0; j0 <= i0; j0 += BLOCK) {
            for (int64_t i = i0; i < mn_min(i0 + BLOCK, R); i++) {
                for (int64_t j = j0; j < mn_min(j0 + BLOCK, i); j++) {
                    const double x = X[i * R + j];
                    X[i * R + j] = X[j * R + i];
                    X[j * R + i] = x;
                }
            }
        }
    }
}

/* The triangle below the diagonal, above it too. */
static void mirror(double *X, int64_t R) {
    for (int64_t i0 = 0; i0 < R; i0 += BLOCK) {
        for (int64_t j0 = 0; j0 <= i0; j0 += BLOCK) {
            for (int64_t i = i0; i < mn_min(i0 + BLOCK, R); i++) {
                for (int64_t j = j0; j < mn_min(j0 + BLOCK, i); j++) X[j * R + i] = X[i * R + j];
            }
        }
    }
}

/* X = A X A', or A'X A, of a symmetric X */
static void move_both(double *X, const head *hd, int64_t t, bool back) {
    move_rows(X, hd->R, hd, t, back);
    transpose(X, hd->R);
    move_rows(X, hd->R, hd, t, back);
}

static void add_noise(double *X, const head *hd, int64_t t) {
    const double l2 = *MN_ROW(REAL, hd->p->l2, hd->b, t, hd->h);
    for (int64_t i = 0; i < hd->K; i++) X[i * hd->step * (hd->R + 1)] += l2;
}

/* y = X x for x on the real rows */
static void times_real(double *y, const double *X, const REAL *x, const head *hd) {
    for (int64_t r = 0; r < hd->R; r++) {
        y[r] = 0.0;
        for (int64_t i = 0; i < hd->K; i++) y[r] += X[r * hd->R + i * hd->step] * x[i];
    }
}

/* x'y for x on the real rows */
static double dot_real(const REAL *x, const double *y, const head *hd) {
    double sum = 0.0;
    for (int64_t i = 0; i < hd->K; i++) sum += x[i] * y[i * hd->step];
    return sum;
}

static double dot(const double *x, const double *y, int64_t n) {
    double sum = 0.0;
    for (int64_t i = 0; i < n; i++) sum += x[i] * y[i];
    return sum;
}

/* P_0 of all groups, then M_0 */
static void load_states(double *P, double *M, const head *hd) {
    const REAL *given = MN_ROW(REAL, hd->p->P0, hd->n, 0, hd->h);
    const REAL *p0 = MN_ROW(REAL, hd->p->p0, 0, 0, hd->h);
    const REAL *mean = MN_ROW(REAL, hd->p->M0, hd->n, 0, hd->h);
    const int64_t R = hd->R;
    for (int64_t i = 0; i < hd->G * R * R; i++) {
        const bool diagonal = i % (R * R) % (R + 1) == 0;
        P[i] = given ? (double)given[i] : diagonal ? (p0 ? (double)*p0 : 1.0) : 0.0;
    }
    for (int64_t i = 0; i < R * hd->V; i++) M[i] = mn_ref_get(mean, i);
}

/* P <- Pbar, u = Pbar k; returns k'u.
 *
 * A P that was rounded, to float32 when a caller hands it in and to double all the time, may be
 * indefinite by as much. Where the variance of a key or the noise of its write is within a few such
 * roundings of k, and the process noise does not hide them, the diagonal is raised by a few: the
 * least process noise that makes P a covariance again. Nowhere else does it touch a result. */
static double predict(double *P, double *u, const head *hd, int64_t t, int64_t g) {
    const REAL *k = MN_ROW(REAL, hd->p->k, hd->b, t, hd->h);
    const double l2 = *MN_ROW(REAL, hd->p->l2, hd->b, t, hd->h);
    const double r2 = MN_ROW(REAL, hd->p->r2, hd->b, t, hd->h)[g];
    const bool handed_in = hd->p->P0.data && t == mn_sequence_at(&hd->p->call, hd->n).t0;
    const double few = 8.0 * (handed_in && sizeof(REAL) == sizeof(float) ? 0x1p-24 : 0x1p-53);
    double scale = 0.0, hidden = 0.0;
    move_both(P, hd, t, false);
    add_noise(P, hd, t);
    times_real(u, P, k, hd);
    for (int64_t i = 0; i < hd->K; i++) {
        scale += (double)k[i] * k[i] * P[i * hd->step * (hd->R + 1)];
        hidden += (double)k[i] * k[i] * l2;
    }
    const double variance = dot_real(k, u, hd), shows = few * scale;
    if (fmin(variance, r2) >= shows || hidden >= shows) return variance;
    for (int64_t r = 0; r < hd->R; r++) P[r * (hd->R + 1)] *= 1.0 + few;
    times_real(u, P, k, hd);
    const double raised = dot_real(k, u, hd);
    return raised < 0.0 ? 0.0 : raised;
}

/* From P_{t-1} to P_t of group g, and from Mbar's columns to M's. u and work hold R numbers. */
static void update(double *P, double *M, double *u, double *work, const head *hd, int64_t t,
                   int64_t g) {
    const mn_bayes_args *p = hd->p;
    const int64_t R = hd->R, V = hd->V;
    const REAL *k = MN_ROW(REAL, p->k, hd->b, t, hd->h), *q = MN_ROW(REAL, p->q, hd->b, t, hd->h);
    const REAL *v = MN_ROW(REAL, p->v, hd->b, t, hd->h);
    REAL *gain = MN_ROW_OUT(REAL, p->gain, hd->b, t, hd->h);
    REAL *gainvec = MN_ROW_OUT(REAL, p->gainvec, hd->b, t, hd->h);
    REAL *kvar = MN_ROW_OUT(REAL, p->kvar, hd->b, t, hd->h);
    REAL *qvar = MN_ROW_OUT(REAL, p->qvar, hd->b, t, hd->h);
    const double variance = predict(P, u, hd, t, g);
    const double s = MN_ROW(REAL, p->r2, hd->b, t, hd->h)[g] + variance;
    if (gain) gain[g] = (REAL)(variance / s);
    if (kvar) kvar[g] = (REAL)variance;
    for (int64_t r = 0; gainvec && r < R; r++) gainvec[g * R + r] = (REAL)(u[r] / s);
    for (int64_t i = 0; i < R; i++) {
        for (int64_t j = 0; j <= i; j++) P[i * R + j] -= u[i] * u[j] / s;
    }
    mirror(P, R);
    if (q) times_real(work, P, q, hd);
    if (qvar) qvar[g] = (REAL)(q ? p->scale * p->scale * dot_real(q, work, hd) : 0.0);
    for (int64_t j = first_column(hd, g); j < first_column(hd, g + 1); j++) {
        double e = v[j];
        for (int64_t i = 0; i < hd->K; i++) e -= k[i] * M[i * hd->step * V + j];
        for (int64_t r = 0; r < R; r++) M[r * V + j] += u[r] / s * e;
    }
}

/* One token: the states of all groups and the mean, in place. */
static void advance(double *P, double *M, double *u, double *work, const head *hd, int64_t t) {
    move_rows(M, hd->V, hd, t, false);
    for (int64_t g = 0; g < hd->G; g++) {
        update(P + g * hd->R * hd->R, M, u, work, hd, t, g);
    }
}

bool MN_REF(mn_bayes_forward_plan)(const void *args, mn_plan *plan) {
    const mn_call *c = args;
    int64_t P, M;
    return mn_mul_i64(&P, c->R, c->R) && mn_mul_i64(&P, P, c->G) && mn_mul_i64(&M, c->R, c->V) &&
           P < INT64_MAX - M - 2 * c->R &&
           mn_ref_plan(plan, mn_n_sequences(c) * c->H, P + M + 2 * c->R);
}

void MN_REF(mn_bayes_forward_run)(const void *args, int phase, int64_t item, void *shared,
                                  void *scratch) {
    (void)phase, (void)shared;
    const mn_bayes_args *p = args;
    const head hd = head_of(p, item);
    const mn_sequence seq = mn_sequence_at(&p->call, hd.n);
    const int64_t R = hd.R, V = hd.V, covariances = hd.G * R * R;
    double *P = scratch, *M = P + covariances, *u = M + R * V, *work = u + R;
    load_states(P, M, &hd);
    for (int64_t t = seq.t0; t < seq.t0 + seq.length; t++) {
        advance(P, M, u, work, &hd, t);
        const REAL *q = MN_ROW(REAL, p->q, hd.b, t, hd.h);
        REAL *o = MN_ROW_OUT(REAL, p->o, hd.b, t, hd.h);
        for (int64_t j = 0; o && j < V; j++) {
            double sum = 0.0;
            for (int64_t i = 0; i < hd.K; i++) sum += q[i] * M[i * hd.step * V + j];
            o[j] = (REAL)(p->scale * sum);
        }
    }
    REAL *last_P = MN_ROW_OUT(REAL, p->P, hd.n, 0, hd.h);
    REAL *last_M = MN_ROW_OUT(REAL, p->M, hd.n, 0, hd.h);
    for (int64_t i = 0; last_P && i < covariances; i++) last_P[i] = (REAL)P[i];
    for (int64_t i = 0; last_M && i < R * V; i++) last_M[i] = (REAL)M[i];
}

/* What the way back works with: adjoints, the states of all tokens (P of every group, then M, a
 * block of `state` numbers per token), work space, and the gradients of one token. */
typedef struct way_back {
    double *D, *E, *states;
    double *X, *Y;                // A P A' of a group, then Pbar; A M
    double *u, *w, *du, *work;
    double *q, *k, *la, *theta, l2;
    int64_t state;
} way_back;

static bool way_back_size(int64_t *count, const mn_call *c) {
    int64_t P, M, both;
    return mn_mul_i64(&P, c->R, c->R) && mn_mul_i64(&P, P, c->G) && mn_mul_i64(&M, c->R, c->V) &&
           P < INT64_MAX - M && mn_mul_i64(&both, P + M, mn_longest_sequence(c) + 3) &&
           both < INT64_MAX - 8 * c->R && (*count = both + 8 * c->R, true);
}

static way_back way_back_in(double *at, const head *hd) {
    const int64_t P = hd->G * hd->R * hd->R, M = hd->R * hd->V, R = hd->R;
    way_back b = { .D = at, .E = at + P, .X = at + P + M, .Y = at + 2 * P + M, .state = P + M };
    b.u = at + 2 * (P + M);
    b.w = b.u + R, b.du = b.w + R, b.work = b.du + R;
    b.q = b.work + R, b.k = b.q + R, b.la = b.k + R, b.theta = b.la + R;
    b.states = b.theta + R;
    return b;
}

/* D and the query's part of the gradients: qvar = scale^2 q'P q of group g */
static void read_backward(way_back *b, const double *P, const head *hd, int64_t t, int64_t g) {
    const mn_bayes_args *p = hd->p;
    const REAL *q = MN_ROW(REAL, p->q, hd->b, t, hd->h);
    const REAL *dqvar = MN_ROW(REAL, p->cot.qvar, hd->b, t, hd->h);
    if (!q || !dqvar) return;
    const double weight = p->scale * p->scale * dqvar[g];
    times_real(b->work, P, q, hd);
    double *D = b->D + g * hd->R * hd->R;
    for (int64_t i = 0; i < hd->K; i++) {
        b->q[i] += 2.0 * weight * b->work[i * hd->step];
        for (int64_t j = 0; j < hd->K; j++) {
            D[i * hd->step * hd->R + j * hd->step] += weight * q[i] * q[j];
        }
    }
}

/* The mean's columns of group g: E becomes the adjoint of Mbar, dw goes to b->work, and dk, dv. Y
 * is Mbar. */
static void mean_backward(way_back *b, const head *hd, int64_t t, int64_t g) {
    const mn_bayes_args *p = hd->p;
    const int64_t R = hd->R, V = hd->V;
    const REAL *k = MN_ROW(REAL, p->k, hd->b, t, hd->h), *v = MN_ROW(REAL, p->v, hd->b, t, hd->h);
    const REAL *dgainvec = MN_ROW(REAL, p->cot.gainvec, hd->b, t, hd->h);
    REAL *dv = MN_ROW_OUT(REAL, p->grad.v, hd->b, t, hd->h);
    for (int64_t r = 0; r < R; r++) b->work[r] = mn_ref_get(dgainvec, g * R + r);
    for (int64_t j = first_column(hd, g); j < first_column(hd, g + 1); j++) {
        double e = v[j], de = 0.0;
        for (int64_t i = 0; i < hd->K; i++) e -= k[i] * b->Y[i * hd->step * V + j];
        for (int64_t r = 0; r < R; r++) {
            de += b->E[r * V + j] * b->w[r];
            b->work[r] += b->E[r * V + j] * e;
        }
        if (dv) dv[j] = (REAL)de;
        for (int64_t i = 0; i < hd->K; i++) {
            b->k[i] -= b->Y[i * hd->step * V + j] * de;
            b->E[i * hd->step * V + j] -= k[i] * de;
        }
    }
}

/* From dw in b->work: the gains of group g, and D becomes the adjoint of Pbar, which is X. */
static void gain_backward(way_back *b, const head *hd, int64_t t, int64_t g, double kvar,
                          double s) {
    const mn_bayes_args *p = hd->p;
    const int64_t R = hd->R;
    const REAL *k = MN_ROW(REAL, p->k, hd->b, t, hd->h), *r2 = MN_ROW(REAL, p->r2, hd->b, t, hd->h);
    const REAL *cot_gain = MN_ROW(REAL, p->cot.gain, hd->b, t, hd->h);
    const REAL *cot_kvar = MN_ROW(REAL, p->cot.kvar, hd->b, t, hd->h);
    REAL *dr2 = MN_ROW_OUT(REAL, p->grad.r2, hd->b, t, hd->h);
    double *D = b->D + g * R * R, uDu = 0.0;
    for (int64_t r = 0; r < R; r++) {
        const double Dw = dot(D + r * R, b->w, R);
        b->du[r] = b->work[r] / s - 2.0 * Dw;
        uDu += b->w[r] * Dw;
    }
    const double dgain = mn_ref_get(cot_gain, g), ds = uDu - dot(b->work, b->w, R) / s;
    const double dkvar = mn_ref_get(cot_kvar, g) + ds + dgain * r2[g] / (s * s);
    if (dr2) dr2[g] = (REAL)(ds - dgain * kvar / (s * s));
    for (int64_t i = 0; i < hd->K; i++) {
        b->k[i] += dkvar * b->u[i * hd->step];
        b->du[i * hd->step] += dkvar * k[i];
    }
    for (int64_t i = 0; i < hd->K; i++) {
        b->k[i] += dot(b->X + i * hd->step * R, b->du, R);
        for (int64_t r = 0; r < R; r++) {
            D[r * R + i * hd->step] += 0.5 * b->du[r] * k[i];
            D[i * hd->step * R + r] += 0.5 * b->du[r] * k[i];
        }
    }
}

/* dla and dtheta of Z = A z, R rows of n columns, with dZ its adjoint, `times` over */
static void transition_backward(way_back *b, const double *dZ, const double *Z, int64_t n,
                                double times, const head *hd) {
    for (int64_t i = 0; i < hd->K; i++) {
        const double *d_re = dZ + i * hd->step * n, *re = Z + i * hd->step * n;
        b->la[i] += times * dot(d_re, re, n);
        if (hd->step == 1) continue;
        b->la[i] += times * dot(d_re + n, re + n, n);
        b->theta[i] += times * (dot(d_re + n, re, n) - dot(d_re, re + n, n));
    }
}

/* Group g of one token, from P_{t-1} in `before` and P_t in `after`. */
static void group_backward(way_back *b, const double *before, const double *after, const head *hd,
                           int64_t t, int64_t g) {
    const int64_t R = hd->R;
    double *D = b->D + g * R * R;
    read_backward(b, after, hd, t, g);
    memcpy(b->X, before, (size_t)(R * R) * sizeof *b->X);
    const double kvar = predict(b->X, b->u, hd, t, g);
    const double s = MN_ROW(REAL, hd->p->r2, hd->b, t, hd->h)[g] + kvar;
    for (int64_t r = 0; r < R; r++) b->w[r] = b->u[r] / s;
    mean_backward(b, hd, t, g);
    gain_backward(b, hd, t, g, kvar, s);
    memcpy(b->X, before, (size_t)(R * R) * sizeof *b->X);
    move_both(b->X, hd, t, false);
    transition_backward(b, D, b->X, R, 2.0, hd);
    for (int64_t i = 0; i < hd->K; i++) b->l2 += D[i * hd->step * (R + 1)];
    move_both(D, hd, t, true);
}

static void write_token(const way_back *b, const head *hd, int64_t t) {
    const mn_bayes_args *p = hd->p;
    REAL *dq = MN_ROW_OUT(REAL, p->grad.q, hd->b, t, hd->h);
    REAL *dk = MN_ROW_OUT(REAL, p->grad.k, hd->b, t, hd->h);
    REAL *dla = MN_ROW_OUT(REAL, p->grad.la, hd->b, t, hd->h);
    REAL *dtheta = MN_ROW_OUT(REAL, p->grad.theta, hd->b, t, hd->h);
    REAL *dl2 = MN_ROW_OUT(REAL, p->grad.l2, hd->b, t, hd->h);
    for (int64_t i = 0; i < hd->K; i++) {
        if (dq) dq[i] = (REAL)b->q[i];
        if (dk) dk[i] = (REAL)b->k[i];
        if (dla) dla[i] = (REAL)b->la[i];
        if (dtheta) dtheta[i] = (REAL)b->theta[i];
    }
    if (dl2) *dl2 = (REAL)b->l2;
}

/* `before` and `after` are the states around the token. */
static void token_backward(way_back *b, const double *before, const double *after, const head *hd,
                           int64_t t) {
    const mn_bayes_args *p = hd->p;
    const int64_t R = hd->R, V = hd->V, mean = hd->G * R * R;
    const REAL *q = MN_ROW(REAL, p->q, hd->b, t, hd->h);
    const REAL *d_o = MN_ROW(REAL, p->cot.o, hd->b, t, hd->h);
    memset(b->q, 0, (size_t)(4 * R) * sizeof *b->q);
    b->l2 = 0.0;
    for (int64_t i = 0; d_o && i < hd->K; i++) {
        for (int64_t j = 0; j < V; j++) {
            b->q[i] += p->scale * after[mean + i * hd->step * V + j] * d_o[j];
            b->E[i * hd->step * V + j] += p->scale * q[i] * d_o[j];
        }
    }
    memcpy(b->Y, before + mean, (size_t)(R * V) * sizeof *b->Y);
    move_rows(b->Y, V, hd, t, false);
    for (int64_t g = 0; g < hd->G; g++) {
        group_backward(b, before + g * R * R, after + g * R * R, hd, t, g);
    }
    transition_backward(b, b->E, b->Y, V, 1.0, hd);
    move_rows(b->E, V, hd, t, true);
    write_token(b, hd, t);
}

/* D and E start from the cotangents of the final states; only dP's symmetric part counts. */
static void load_cotangents(way_back *b, const head *hd) {
    const REAL *dP = MN_ROW(REAL, hd->p->cot.P, hd->n, 0, hd->h);
    const REAL *dM = MN_ROW(REAL, hd->p->cot.M, hd->n, 0, hd->h);
    const int64_t R = hd->R;
    for (int64_t i = 0; i < hd->G * R * R; i++) {
        const int64_t block = i / (R * R) * R * R, row = (i - block) / R, col = (i - block) % R;
        b->D[i] = 0.5 * (mn_ref_get(dP, i) + mn_ref_get(dP, block + col * R + row));
    }
    for (int64_t i = 0; i < R * hd->V; i++) b->E[i] = mn_ref_get(dM, i);
}

/* A P_0 that was given has its gradient, and p0 none; else p0 gathers the traces of all sequences
 * in a second phase. */
bool MN_REF(mn_bayes_backward_plan)(const void *args, mn_plan *plan) {
    const mn_bayes_args *p = args;
    const mn_call *c = args;
    const int64_t items = mn_n_sequences(c) * c->H;
    int64_t count;
    const bool ok = way_back_size(&count, c) && mn_ref_plan(plan, items, count);
    if (p->grad.p0.data) mn_ref_add_phase(plan, c->H);
    return ok && mn_mul_size(&plan->shared_bytes, (size_t)items, sizeof(double));
}

static void write_first(const way_back *b, const head *hd, double *trace) {
    const mn_bayes_args *p = hd->p;
    const int64_t R = hd->R;
    REAL *dP0 = MN_ROW_OUT(REAL, p->grad.P0, hd->n, 0, hd->h);
    REAL *dM0 = MN_ROW_OUT(REAL, p->grad.M0, hd->n, 0, hd->h);
    for (int64_t i = 0; dP0 && i < hd->G * R * R; i++) dP0[i] = (REAL)b->D[i];
    for (int64_t i = 0; dM0 && i < R * hd->V; i++) dM0[i] = (REAL)b->E[i];
    *trace = 0.0;
    for (int64_t r = 0; !p->P0.data && r < hd->G * R; r++) *trace += b->D[r * R + r % R];
}

/* The same call with no result wanted, for going forward once more. */
static mn_bayes_args without_results(const mn_bayes_args *p) {
    mn_bayes_args quiet = *p;
    quiet.gain.data = quiet.gainvec.data = quiet.kvar.data = quiet.qvar.data = NULL;
    return quiet;
}

void MN_REF(mn_bayes_backward_run)(const void *args, int phase, int64_t item, void *shared,
                                   void *scratch) {
    const mn_bayes_args *p = args;
    double *traces = shared;
    if (phase == 1) {
        double sum = 0.0;
        for (int64_t n = 0; n < mn_n_sequences(&p->call); n++) sum += traces[n * p->call.H + item];
        *MN_ROW_OUT(REAL, p->grad.p0, 0, 0, item) = (REAL)sum;
        return;
    }
    const head hd = head_of(p, item);
    const mn_sequence seq = mn_sequence_at(&p->call, hd.n);
    const int64_t mean = hd.G * hd.R * hd.R;
    const mn_bayes_args quiet = without_results(p);
    const head silent = head_of(&quiet, item);
    way_back b = way_back_in(scratch, &hd);
    load_states(b.states, b.states + mean, &hd);
    for (int64_t t = 0; t < seq.length; t++) {
        double *next = b.states + (t + 1) * b.state;
        memcpy(next, next - b.state, (size_t)b.state * sizeof *next);
        advance(next, next + mean, b.u, b.work, &silent, seq.t0 + t);
    }
    load_cotangents(&b, &hd);
    for (int64_t t = seq.length - 1; t >= 0; t--) {
        const double *before = b.states + t * b.state;
        token_backward(&b, before, before + b.state, &hd, seq.t0 + t);
    }
    write_first(&b, &hd, &traces[item]);
}
