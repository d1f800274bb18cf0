/* mesa.c - regression statistics, read by solving for the query.
 *
 *   Hkk_t = e^g_t Hkk_{t-1} + beta_t k_t k_t'     Hkv_t = e^g_t Hkv_{t-1} + beta_t k_t v_t'
 *   M_t = Hkk_t + diag(lam)      x_t = scale M_t^-1 q_t      o_t = Hkv_t'x_t
 *
 * M is symmetric positive definite and factorised after Cholesky. Backward, with y_t = M_t^-1
 * Hkv_t do_t and A, B the adjoints of Hkk, Hkv:
 *
 *   dq_t = scale y_t      dlam = -sum x_t . y_t (elementwise)
 *   A_t += -(x_t y_t' + y_t x_t') / 2            B_t += x_t do_t'
 *   dbeta_t = k'A k + k'B v     dk_t = beta (2 A k + B v)     dv_t = beta B'k
 *   dg_t = e^g (A.Hkk_{t-1} + B.Hkv_{t-1})      A_{t-1} = e^g A_t      B_{t-1} = e^g B_t
 *
 * Hkk is symmetric: of what is given for it and of its adjoint only the symmetric part counts. One
 * item is one head of one sequence. `steps` is for forward: take_steps; backward is of the solution. States of all steps are kept for the way back. */
#include <math.h>
#include <string.h>

#include "kernels/ref/ref.h"

/* Sizes of one state: Hkk, then Hkv. */
typedef struct shape {
    int64_t K, V, kk, state;
} shape;

static shape shape_of(const mn_call *c) {
    return (shape){ c->K, c->V, c->K * c->K, c->K * (c->K + c->V) };
}

static bool count_state(int64_t *count, const mn_call *c) {
    int64_t width;
    return mn_add_i64(&width, c->K, c->V) && mn_mul_i64(count, c->K, width);
}

/* The symmetric part of the first, and the second. */
static void load_pair(double *to, const REAL *kk, const REAL *kv, shape s) {
    for (int64_t i = 0; i < s.kk; i++) {
        to[i] = 0.5 * (mn_ref_get(kk, i) + mn_ref_get(kk, i % s.K * s.K + i / s.K));
    }
    for (int64_t i = s.kk; i < s.state; i++) to[i] = mn_ref_get(kv, i - s.kk);
}

static void store_pair(REAL *kk, REAL *kv, const double *from, shape s) {
    for (int64_t i = 0; kk && i < s.kk; i++) kk[i] = (REAL)from[i];
    for (int64_t i = s.kk; kv && i < s.state; i++) kv[i - s.kk] = (REAL)from[i];
}

/* next = e^g H + beta k (k', v'); next may be H */
static void advance(double *next, const double *H, const mn_mesa_args *p, shape s, int64_t b,
                    int64_t t, int64_t h) {
    const REAL *k = MN_ROW(REAL, p->k, b, t, h), *v = MN_ROW(REAL, p->v, b, t, h);
    const double a = exp(*MN_ROW(REAL, p->g, b, t, h)), beta = *MN_ROW(REAL, p->beta, b, t, h);
    for (int64_t i = 0; i < s.K; i++) {
        const double bk = beta * k[i];
        for (int64_t j = 0; j < s.K; j++) next[i * s.K + j] = a * H[i * s.K + j] + bk * k[j];
        double *kv = next + s.kk + i * s.V;
        for (int64_t j = 0; j < s.V; j++) kv[j] = a * H[s.kk + i * s.V + j] + bk * v[j];
    }
}

/* The lower triangle of L becomes the Cholesky factor of Hkk + diag(lam). */
static void factorise(double *L, const double *Hkk, const REAL *lam, int64_t K) {
    for (int64_t i = 0; i < K; i++) {
        for (int64_t j = 0; j <= i; j++) {
            double sum = Hkk[i * K + j] + (i == j ? (double)lam[i] : 0.0);
            for (int64_t c = 0; c < j; c++) sum -= L[i * K + c] * L[j * K + c];
            L[i * K + j] = i == j ? sqrt(sum) : sum / L[j * K + j];
        }
    }
}

/* x <- (L L')^-1 x */
static void solve(double *x, const double *L, int64_t K) {
    for (int64_t i = 0; i < K; i++) {
        for (int64_t j = 0; j < i; j++) x[i] -= L[i * K + j] * x[j];
        x[i] /= L[i * K + i];
    }
    for (int64_t i = K - 1; i >= 0; i--) {
        for (int64_t j = i + 1; j < K; j++) x[i] -= L[j * K + i] * x[j];
        x[i] /= L[i * K + i];
    }
}

/* x <- what p->steps steps of conjugate gradients from 0 make of M x' = x, with what the published
 * code adds to its denominators; r, d and Md are K numbers each. */
static void take_steps(double *x, double *r, const double *Hkk, const REAL *lam, int64_t K,
                       int64_t steps) {
    double *d = r + K, *Md = d + K, size = 0.0;
    for (int64_t i = 0; i < K; i++) {
        r[i] = d[i] = x[i];
        x[i] = 0.0;
        size += r[i] * r[i];
    }
    for (int64_t n = 0; n < steps; n++) {
        double curvature = 0.0, next = 0.0;
        for (int64_t i = 0; i < K; i++) {
            Md[i] = (double)lam[i] * d[i];
            for (int64_t j = 0; j < K; j++) Md[i] += Hkk[i * K + j] * d[j];
            curvature += d[i] * Md[i];
        }
        const double alpha = size / (curvature + 1e-5);
        for (int64_t i = 0; i < K; i++) {
            x[i] += alpha * d[i];
            r[i] -= alpha * Md[i];
            next += r[i] * r[i];
        }
        const double beta = next / (size + 1e-5);
        for (int64_t i = 0; i < K; i++) d[i] = r[i] + beta * d[i];
        size = next;
    }
}

static void scaled_query(double *x, const mn_mesa_args *p, int64_t b, int64_t t, int64_t h) {
    const REAL *q = MN_ROW(REAL, p->q, b, t, h);
    for (int64_t i = 0; i < p->call.K; i++) x[i] = p->scale * q[i];
}

/* Scratch: the state, L, x and three more vectors. */
bool MN_REF(mn_mesa_forward_plan)(const void *args, mn_plan *plan) {
    const mn_call *c = args;
    int64_t count, square;
    return count_state(&count, c) && mn_mul_i64(&square, c->K, c->K + 4) &&
           mn_add_i64(&count, count, square) && mn_ref_plan(plan, mn_n_sequences(c) * c->H, count);
}

void MN_REF(mn_mesa_forward_run)(const void *args, int phase, int64_t item, void *shared,
                                 void *scratch) {
    (void)phase, (void)shared;
    const mn_mesa_args *p = args;
    const shape s = shape_of(&p->call);
    const int64_t n = item / p->call.H, h = item % p->call.H;
    const mn_sequence seq = mn_sequence_at(&p->call, n);
    double *H = scratch, *L = H + s.state, *x = L + s.kk;
    load_pair(H, MN_ROW(REAL, p->hkk0, n, 0, h), MN_ROW(REAL, p->hkv0, n, 0, h), s);
    for (int64_t t = seq.t0; t < seq.t0 + seq.length; t++) {
        REAL *o = MN_ROW_OUT(REAL, p->o, seq.b, t, h);
        advance(H, H, p, s, seq.b, t, h);
        if (!o) continue;
        const REAL *lam = MN_ROW(REAL, p->lam, 0, 0, h);
        scaled_query(x, p, seq.b, t, h);
        if (p->steps > 0) {
            take_steps(x, x + s.K, H, lam, s.K, p->steps);
        } else {
            factorise(L, H, lam, s.K);
            solve(x, L, s.K);
        }
        for (int64_t j = 0; j < s.V; j++) {
            double sum = 0.0;
            for (int64_t i = 0; i < s.K; i++) sum += H[s.kk + i * s.V + j] * x[i];
            o[j] = (REAL)sum;
        }
    }
    store_pair(MN_ROW_OUT(REAL, p->hkk, n, 0, h), MN_ROW_OUT(REAL, p->hkv, n, 0, h), H, s);
}

/* Scratch: A and B, L, x, y, then the states 0 .. T. Shared: dlam of every sequence and head, which
 * a second phase adds up. */
bool MN_REF(mn_mesa_backward_plan)(const void *args, mn_plan *plan) {
    const mn_call *c = args;
    const int64_t items = mn_n_sequences(c) * c->H;
    int64_t count, square, shared;
    const bool ok = count_state(&count, c) &&
                    mn_mul_i64(&count, count, mn_longest_sequence(c) + 2) &&
                    mn_mul_i64(&square, c->K, c->K + 2) && mn_add_i64(&count, count, square) &&
                    mn_mul_i64(&shared, items, c->K) && mn_ref_plan(plan, items, count);
    mn_ref_add_phase(plan, c->H);
    return ok && mn_mul_size(&plan->shared_bytes, (size_t)shared, sizeof(double));
}

typedef struct token {
    int64_t b, t, h;
} token;

/* x and y of the token at state H; their part of A, B, dlam and dq. */
static void read_backward(double *A, double *dlam, double *L, double *x, double *y,
                          const mn_mesa_args *p, const double *H, shape s, token at) {
    const REAL *d_o = MN_ROW(REAL, p->cot.o, at.b, at.t, at.h);
    REAL *dq = MN_ROW_OUT(REAL, p->grad.q, at.b, at.t, at.h);
    for (int64_t i = 0; i < s.K; i++) {
        y[i] = 0.0;
        for (int64_t j = 0; j < s.V; j++) y[i] += H[s.kk + i * s.V + j] * mn_ref_get(d_o, j);
    }
    factorise(L, H, MN_ROW(REAL, p->lam, 0, 0, at.h), s.K);
    scaled_query(x, p, at.b, at.t, at.h);
    solve(x, L, s.K);
    solve(y, L, s.K);
    for (int64_t i = 0; i < s.K; i++) {
        for (int64_t j = 0; j < s.K; j++) A[i * s.K + j] -= 0.5 * (x[i] * y[j] + y[i] * x[j]);
        for (int64_t j = 0; j < s.V; j++) A[s.kk + i * s.V + j] += x[i] * mn_ref_get(d_o, j);
        dlam[i] -= x[i] * y[i];
        if (dq) dq[i] = (REAL)(p->scale * y[i]);
    }
}

/* dk, dv, dbeta and dg of the token from A_t, B_t and the state before it; A, B go to t - 1. */
static void write_backward(double *A, const double *before, const mn_mesa_args *p, shape s,
                           token at) {
    const REAL *k = MN_ROW(REAL, p->k, at.b, at.t, at.h), *v = MN_ROW(REAL, p->v, at.b, at.t, at.h);
    REAL *dk = MN_ROW_OUT(REAL, p->grad.k, at.b, at.t, at.h);
    REAL *dv = MN_ROW_OUT(REAL, p->grad.v, at.b, at.t, at.h);
    REAL *dbeta = MN_ROW_OUT(REAL, p->grad.beta, at.b, at.t, at.h);
    REAL *dg = MN_ROW_OUT(REAL, p->grad.g, at.b, at.t, at.h);
    const double beta = *MN_ROW(REAL, p->beta, at.b, at.t, at.h);
    const double a = exp(*MN_ROW(REAL, p->g, at.b, at.t, at.h));
    double to_beta = 0.0, to_g = 0.0;
    for (int64_t i = 0; i < s.K; i++) {
        double Ak = 0.0, Bv = 0.0;
        for (int64_t j = 0; j < s.K; j++) Ak += A[i * s.K + j] * k[j];
        for (int64_t j = 0; j < s.V; j++) Bv += A[s.kk + i * s.V + j] * v[j];
        if (dk) dk[i] = (REAL)(beta * (2.0 * Ak + Bv));
        to_beta += k[i] * (Ak + Bv);
    }
    for (int64_t j = 0; dv && j < s.V; j++) {
        double sum = 0.0;
        for (int64_t i = 0; i < s.K; i++) sum += A[s.kk + i * s.V + j] * k[i];
        dv[j] = (REAL)(beta * sum);
    }
    for (int64_t i = 0; i < s.state; i++) {
        A[i] *= a;
        to_g += A[i] * before[i];
    }
    if (dbeta) *dbeta = (REAL)to_beta;
    if (dg) *dg = (REAL)to_g;
}

static void sum_lam(const mn_mesa_args *p, int64_t h, const double *parts) {
    REAL *dlam = MN_ROW_OUT(REAL, p->grad.lam, 0, 0, h);
    const int64_t K = p->call.K;
    for (int64_t i = 0; dlam && i < K; i++) {
        double sum = 0.0;
        for (int64_t n = 0; n < mn_n_sequences(&p->call); n++) {
            sum += parts[(n * p->call.H + h) * K + i];
        }
        dlam[i] = (REAL)sum;
    }
}

void MN_REF(mn_mesa_backward_run)(const void *args, int phase, int64_t item, void *shared,
                                  void *scratch) {
    const mn_mesa_args *p = args;
    if (phase == 1) {
        sum_lam(p, item, shared);
        return;
    }
    const shape s = shape_of(&p->call);
    const int64_t n = item / p->call.H, h = item % p->call.H;
    const mn_sequence seq = mn_sequence_at(&p->call, n);
    double *A = scratch, *L = A + s.state, *x = L + s.kk, *y = x + s.K, *H = y + s.K;
    double *dlam = (double *)shared + item * s.K;
    memset(dlam, 0, (size_t)s.K * sizeof *dlam);
    load_pair(H, MN_ROW(REAL, p->hkk0, n, 0, h), MN_ROW(REAL, p->hkv0, n, 0, h), s);
    for (int64_t t = 0; t < seq.length; t++) {
        advance(H + (t + 1) * s.state, H + t * s.state, p, s, seq.b, seq.t0 + t, h);
    }
    load_pair(A, MN_ROW(REAL, p->cot.hkk, n, 0, h), MN_ROW(REAL, p->cot.hkv, n, 0, h), s);
    for (int64_t t = seq.length - 1; t >= 0; t--) {
        const token at = { seq.b, seq.t0 + t, h };
        read_backward(A, dlam, L, x, y, p, H + (t + 1) * s.state, s, at);
        write_backward(A, H + t * s.state, p, s, at);
    }
    store_pair(MN_ROW_OUT(REAL, p->grad.hkk0, n, 0, h), MN_ROW_OUT(REAL, p->grad.hkv0, n, 0, h), A,
               s);
}
