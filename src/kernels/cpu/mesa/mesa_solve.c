/* mesa_solve.c - (Hkk_t + diag lam) x_t = b_t for the tokens of a chunk.
 *
 * Wide heads: conjugate gradients for all tokens of the chunk at once, M_t applied through products
 * of the chunk (mesa.h). While decay is weak the preconditioner is the exact inverse of M at the
 * start of the token's half of the chunk: M_t differs from it by the keys of half a chunk at most,
 * and a few steps do whatever the spectrum. Once decay is strong M_t is lam plus the few keys
 * remembered, and 1 / lam serves. Neither knows of any later token, so no token's bits depend on
 * one.
 *
 * Every token's true residual is then checked in the norm in which the iteration converges. Tokens
 * that fail, narrow heads and short chunks are solved by a Cholesky factorisation in double, each
 * with its own M_t, so that any data is solved to the accuracy of its statistics. */
#include "kernels/cpu/mesa/mesa.h"

#include <math.h>
#include <string.h>

/* Below these the factorisation costs less than the iteration. */
enum { NARROW = 32, SHORT = 8 };
/* Steps after which a factorisation would have been cheaper; chunks to leave the iteration alone
 * after it failed most tokens of one. */
enum { MAX_STEPS = 24, REST_CHUNKS = 8 };
/* The factorisation: rows of a panel, and the tile that its products are taken from at once. */
enum { PANEL = 8, TILE_ROWS = 4, TILE_VECTORS = 2, TILE_COLUMNS = TILE_VECTORS * MN_VD };
/* Sum of log decays since the start of its half down to which that start stands for a token. */
static const double weak_decay = -1.0;
/* Relative errors in the norm of M: where a token stops, and what its true residual may show. */
static const float stop_error = 3e-8f, largest_error = 1e-6f;

bool MN_T(mn_mesa_solver_bytes)(size_t *bytes, const mn_call *call) {
    int64_t square, rows;
    return mn_mul_i64(&square, call->K, call->K) && mn_mul_i64(&square, square, 6) &&
           mn_mul_i64(&rows, call->K, 5 * MN_STAT_CHUNK) && mn_add_i64(&square, square, rows) &&
           mn_mul_size(bytes, (size_t)square, sizeof(float));
}

void MN_T(mn_mesa_solver_place)(mn_mesa_solver *s, void *memory, int64_t K, const float *lam) {
    const int64_t rows = MN_STAT_CHUNK * K;
    s->K = K;
    s->lam = lam;
    s->M = memory;
    s->U = s->M + K * K;
    s->B = (float *)(s->U + K * K);
    s->R = s->B + rows;
    s->D = s->R + rows;
    s->Z = s->D + rows;
    s->Y = s->Z + rows;
    s->inverse[0] = s->Y + rows;
    s->inverse[1] = s->inverse[0] + K * K;
    s->direct_chunks = 0;
    s->steps = 0;
}

/* y[j] -= sum of n <= 4 rows x_p[j] times a[p] */
static void subtract_rows(double *restrict y, const double *restrict x, int64_t step,
                          const double *a, int64_t n, int64_t width) {
    const double *x1 = x + step, *x2 = x1 + step, *x3 = x2 + step;
    const double a0 = -a[0], a1 = n > 1 ? -a[1] : 0.0, a2 = n > 2 ? -a[2] : 0.0;
    if (n == 4) {
        const double a3 = -a[3];
        for (int64_t j = 0; j < width; j++) {
            y[j] = fma(a3, x3[j], fma(a2, x2[j], fma(a1, x1[j], fma(a0, x[j], y[j]))));
        }
    } else if (n == 3) {
        for (int64_t j = 0; j < width; j++) {
            y[j] = fma(a2, x2[j], fma(a1, x1[j], fma(a0, x[j], y[j])));
        }
    } else if (n == 2) {
        for (int64_t j = 0; j < width; j++) y[j] = fma(a1, x1[j], fma(a0, x[j], y[j]));
    } else {
        for (int64_t j = 0; j < width; j++) y[j] = fma(a0, x[j], y[j]);
    }
}

/* Columns [j, K) of row i less the products of panel rows [p0, p1). */
static void subtract_panel(double *U, int64_t K, int64_t i, int64_t j, int64_t p0, int64_t p1) {
    for (int64_t p = p0; p < p1; p += 4) {
        const int64_t n = mn_min(4, p1 - p);
        double a[4];
        for (int64_t l = 0; l < n; l++) a[l] = U[(p + l) * K + i];
        subtract_rows(U + i * K + j, U + p * K + j, K, a, n, K - j);
    }
}

/* The same of TILE_ROWS rows and TILE_COLUMNS columns, in registers. */
static void subtract_tile(double *U, int64_t K, int64_t i, int64_t j, int64_t p0) {
    vd y[TILE_ROWS][TILE_VECTORS];
    MN_UNROLL
    for (int r = 0; r < TILE_ROWS; r++) {
        MN_UNROLL
        for (int v = 0; v < TILE_VECTORS; v++) y[r][v] = vd_load(U + (i + r) * K + j + v * MN_VD);
    }
    for (int64_t p = p0; p < p0 + PANEL; p++) {
        const double *x = U + p * K;
        MN_UNROLL
        for (int r = 0; r < TILE_ROWS; r++) {
            const vd a = vd_set1(x[i + r]);
            MN_UNROLL
            for (int v = 0; v < TILE_VECTORS; v++) {
                y[r][v] = vd_fnma(a, vd_load(x + j + v * MN_VD), y[r][v]);
            }
        }
    }
    MN_UNROLL
    for (int r = 0; r < TILE_ROWS; r++) {
        MN_UNROLL
        for (int v = 0; v < TILE_VECTORS; v++) vd_store(U + (i + r) * K + j + v * MN_VD, y[r][v]);
    }
}

/* A panel of rows of the factor at a time; then it leaves the rows below, by tiles that may reach
 * into the lower triangle. Each element loses its products in their order, whatever does it. */
void MN_T(mn_mesa_factorise)(double *U, int64_t K) {
    for (int64_t j0 = 0; j0 < K; j0 += PANEL) {
        const int64_t end = mn_min(K, j0 + PANEL);
        for (int64_t j = j0; j < end; j++) {
            double *row = U + j * K;
            subtract_panel(U, K, j, j, j0, j);
            const double root = sqrt(row[j]), over = 1.0 / root;
            row[j] = root;
            for (int64_t i = j + 1; i < K; i++) row[i] *= over;
        }
        int64_t i = end;
        for (; i + TILE_ROWS <= K; i += TILE_ROWS) {
            int64_t j = i - i % TILE_COLUMNS;
            for (; j + TILE_COLUMNS <= K; j += TILE_COLUMNS) subtract_tile(U, K, i, j, j0);
            for (int r = 0; r < TILE_ROWS && j < K; r++) {
                subtract_panel(U, K, i + r, mn_max(j, i + r), j0, end);
            }
        }
        for (; i < K; i++) subtract_panel(U, K, i, i, j0, end);
    }
}

void MN_T(mn_mesa_substitute)(double *x, const double *U, int64_t K) {
    for (int64_t j = 0; j < K; j++) {
        x[j] /= U[j * K + j];
        if (j + 1 < K) subtract_rows(x + j + 1, U + j * K + j + 1, 0, x + j, 1, K - j - 1);
    }
    for (int64_t i = K - 1; i >= 0; i--) {
        const double *row = U + i * K;
        double part[4] = { 0.0, 0.0, 0.0, 0.0 };
        int64_t j = i + 1;
        for (; j + 4 <= K; j += 4) {
            for (int64_t l = 0; l < 4; l++) part[l] = fma(row[j + l], x[j + l], part[l]);
        }
        for (; j < K; j++) part[0] = fma(row[j], x[j], part[0]);
        x[i] = (x[i] - ((part[0] + part[1]) + (part[2] + part[3]))) / row[i];
    }
}

/* V <- U^-T, lower triangular with zeros above; row i is (e_i - sum_{j<i} U[j,i] V[j,:]) /
 * U[i,i]. */
static void invert_factor(double *V, const double *U, int64_t K) {
    memset(V, 0, (size_t)(K * K) * sizeof *V);
    for (int64_t i = 0; i < K; i++) {
        double *row = V + i * K;
        row[i] = 1.0;
        for (int64_t j = 0; j < i; j += 4) {
            const int64_t n = mn_min(4, i - j);
            double a[4];
            for (int64_t p = 0; p < n; p++) a[p] = U[(j + p) * K + i];
            subtract_rows(row, V + j * K, K, a, n, j + n);
        }
        const double over = 1.0 / U[i * K + i];
        for (int64_t j = 0; j <= i; j++) row[j] *= over;
    }
}

/* Rows of the first half. */
static int64_t half_of(int64_t L) {
    return mn_min(L, MN_STAT_CHUNK / 2);
}

/* inverse = (M at the start of the half + diag lam)^-1 = V'V with V the inverse of the factor's
 * transpose: positive definite however it is rounded. R serves as room for the weighted keys. */
static void invert_start(mn_mesa_solver *s, const mn_mesa_chunk *c, const float *kk, int half) {
    const int64_t K = s->K;
    float *inverse = s->inverse[half];
    memcpy(inverse, kk, (size_t)(K * K) * sizeof *kk);
    if (half) {
        const int64_t n = half_of(c->L), last = n - 1;
        const float *w = c->Wb + last * MN_STAT_CHUNK;
        for (int64_t i = 0; i < n; i++) mn_scale(s->R + i * K, w[i], mn_row_of(c->k, i), K);
        MN_T(mn_stat_add_symmetric)(inverse, c->first[last], mn_mat_of(s->R, K), c->k, n, K);
    }
    for (int64_t i = 0; i < K * K; i++) s->U[i] = inverse[i];
    for (int64_t i = 0; i < K; i++) s->U[i * K + i] += s->lam[i];
    MN_T(mn_mesa_factorise)(s->U, K);
    invert_factor(s->M, s->U, K);
    float *V = (float *)s->U;
    for (int64_t i = 0; i < K * K; i++) V[i] = (float)s->M[i];
    mn_gemm_args g = mn_product(mn_mat_of(inverse, K), mn_transposed(mn_mat_of(V, K)),
                                mn_mat_of(V, K), (mn_dims){ K, K, K });
    g.shape = MN_GEMM_A_UPPER;
    MN_T(mn_gemm)(&g);
}

/* Row t of Z = M_t times row t of X */
static void apply(float *Z, const float *X, mn_mesa_solver *s, mn_mesa_chunk *c, const float *kk) {
    const int64_t K = s->K;
    const mn_mat z = mn_mat_of(Z, K), x = mn_mat_of(X, K);
    mn_gemm_args g = mn_product(z, x, mn_mat_of(kk, K), (mn_dims){ c->L, K, K });
    MN_T(mn_gemm)(&g);
    MN_T(mn_stat_scores)(c->P, x, c->k, c->L, K);
    MN_T(mn_stat_weigh)(c->P, c->P, c->Wb, c->L);
    g = mn_product(z, mn_mat_of(c->P, MN_STAT_CHUNK), c->k, (mn_dims){ c->L, K, c->L });
    g.base = MN_GEMM_SCALE;
    g.c_scale = c->first;
    g.shape = MN_GEMM_A_LOWER;
    MN_T(mn_gemm)(&g);
    for (int64_t t = 0; t < c->L; t++) {
        for (int64_t i = 0; i < K; i += MN_VW) {
            const int n = vf_lanes(K - i);
            const vf ridge = vf_mul(vf_load_n(s->lam + i, n), vf_load_n(X + t * K + i, n));
            vf_store_n(Z + t * K + i, vf_add(ridge, vf_load_n(Z + t * K + i, n)), n);
        }
    }
}

/* Rows [from, end) of Y = R times the preconditioner, whose inverse serves `dense` of them. */
static void precondition_rows(float *Y, const float *R, const mn_mesa_solver *s,
                              const float *inverse, int64_t dense, int64_t from, int64_t end) {
    const int64_t K = s->K;
    const mn_gemm_args g = mn_product(mn_mat_of(Y + from * K, K), mn_mat_of(R + from * K, K),
                                      mn_mat_of(inverse, K), (mn_dims){ dense, K, K });
    if (dense > 0) MN_T(mn_gemm)(&g);
    for (int64_t t = from + dense; t < end; t++) {
        for (int64_t i = 0; i < K; i += MN_VW) {
            const int n = vf_lanes(K - i);
            const vf lam = vf_select(vm_first(n), vf_load_n(s->lam + i, n), vf_set1(1.0f));
            vf_store_n(Y + t * K + i, vf_div(vf_load_n(R + t * K + i, n), lam), n);
        }
    }
}

static void precondition(float *Y, const float *R, const mn_mesa_solver *s, int64_t L) {
    const int64_t middle = half_of(L);
    precondition_rows(Y, R, s, s->inverse[0], s->dense[0], 0, middle);
    precondition_rows(Y, R, s, s->inverse[1], s->dense[1], middle, L);
}

/* Tokens [from, end) whose decays since before `from` are weak. */
static int64_t count_dense(const mn_mesa_chunk *c, int64_t from, int64_t end) {
    const double before = from ? c->G[from - 1] : 0.0;
    int64_t t = from;
    while (t < end && c->G[t] - before > weak_decay) t++;
    return t - from;
}

/* Right sides scaled to a largest entry of 1, so that their squares stay in range. */
static void start_rows(float *X, float *size, mn_mesa_solver *s, int64_t L) {
    const int64_t K = s->K;
    for (int64_t t = 0; t < L; t++) {
        float *x = X + t * K, *b = s->B + t * K;
        float most = 0.0f;
        for (int64_t i = 0; i < K; i++) most = fabsf(x[i]) > most ? fabsf(x[i]) : most;
        size[t] = most;
        for (int64_t i = 0; i < K; i++) b[i] = most > 0.0f ? x[i] / most : x[i];
        MN_T(mn_stat_store)(s->R + t * K, b, K);
        memset(x, 0, (size_t)K * sizeof *x);
    }
}

/* One step of a token: along D with the product Z = M D at hand. False where D has no curvature. */
static bool step_row(float *X, mn_mesa_solver *s, int64_t t, float rz) {
    const int64_t K = s->K, at = t * K;
    const float curvature = vf_dot_row(s->D + at, s->Z + at, K);
    if (!(curvature > 0.0f) || !(rz < INFINITY)) return false;
    const float alpha = rz / curvature;
    mn_axpy(X + at, alpha, s->D + at, K);
    mn_axpy(s->R + at, -alpha, s->Z + at, K);
    return true;
}

/* D = Y + beta D */
static void turn_row(mn_mesa_solver *s, int64_t t, float beta) {
    float *d = s->D + t * s->K;
    mn_scale(d, beta, d, s->K);
    mn_axpy(d, 1.0f, s->Y + t * s->K, s->K);
}

/* Conjugate gradients from X = 0 for right sides in B and R; a token stops when its error, measured
 * by r'y with y the preconditioned residual, has fallen to stop_error of where it began. */
static void conjugate_gradients(float *X, mn_mesa_solver *s, mn_mesa_chunk *c, const float *kk) {
    const int64_t K = s->K, L = c->L;
    float rz[MN_STAT_CHUNK], goal[MN_STAT_CHUNK];
    bool active[MN_STAT_CHUNK];
    int64_t n_active = 0;
    precondition(s->Y, s->R, s, L);
    MN_T(mn_stat_store)(s->D, s->Y, L * K);
    for (int64_t t = 0; t < L; t++) {
        rz[t] = vf_dot_row(s->R + t * K, s->Y + t * K, K);
        goal[t] = stop_error * stop_error * rz[t];
        active[t] = rz[t] > 0.0f;
        n_active += active[t];
    }
    for (int step = 0; step < MAX_STEPS && n_active > 0; step++) {
        apply(s->Z, s->D, s, c, kk);
        for (int64_t t = 0; t < L; t++) {
            if (active[t] && !step_row(X, s, t, rz[t])) active[t] = false, n_active--;
        }
        precondition(s->Y, s->R, s, L);
        for (int64_t t = 0; t < L; t++) {
            if (!active[t]) continue;
            const float next = vf_dot_row(s->R + t * K, s->Y + t * K, K);
            if (next > goal[t]) turn_row(s, t, next / rz[t]);
            else active[t] = false, n_active--;
            rz[t] = next;
        }
    }
}

/* Marks the tokens whose residual b - M x is too large; returns how many. */
static int64_t check(bool *failed, const float *X, mn_mesa_solver *s, mn_mesa_chunk *c,
                     const float *kk) {
    const int64_t K = s->K;
    int64_t n_failed = 0;
    apply(s->Z, X, s, c, kk);
    for (int64_t at = 0; at < c->L * K; at++) s->R[at] = s->B[at] - s->Z[at];
    precondition(s->Y, s->R, s, c->L);
    for (int64_t t = 0; t < c->L; t++) {
        const float error = vf_dot_row(s->R + t * K, s->Y + t * K, K);
        const float energy = vf_dot_row(X + t * K, s->B + t * K, K);
        failed[t] = !(error <= largest_error * largest_error * energy);
        n_failed += failed[t];
    }
    return n_failed;
}

/* M in double goes on from token to token, in the room of R; right sides wanted of a token share
 * its factor. */
static void solve_directly(float *const *X, bool wanted[][MN_STAT_CHUNK], int n, mn_mesa_solver *s,
                           const mn_mesa_chunk *c, const float *kk) {
    const int64_t K = s->K;
    double *x = (double *)(void *)s->R, before = 0.0;
    for (int64_t i = 0; i < K * K; i++) s->M[i] = kk[i];
    for (int64_t t = 0; t < c->L; t++) {
        const double a = exp(c->G[t] - before);
        const float *k = mn_row_of(c->k, t);
        before = c->G[t];
        for (int64_t i = 0; i < K; i++) {
            const double bk = (double)c->beta[t] * k[i];
            for (int64_t j = i; j < K; j++) s->M[i * K + j] = fma(bk, k[j], a * s->M[i * K + j]);
        }
        if (!wanted[0][t] && !wanted[n - 1][t]) continue;
        memcpy(s->U, s->M, (size_t)(K * K) * sizeof *s->U);
        for (int64_t i = 0; i < K; i++) s->U[i * K + i] += s->lam[i];
        MN_T(mn_mesa_factorise)(s->U, K);
        for (int r = 0; r < n; r++) {
            float *row = X[r] + t * K;
            if (!wanted[r][t]) continue;
            for (int64_t i = 0; i < K; i++) x[i] = row[i];
            MN_T(mn_mesa_substitute)(x, s->U, K);
            for (int64_t i = 0; i < K; i++) row[i] = (float)x[i];
        }
    }
}

/* Solves what the iteration can; marks the other rows, which keep their right sides. */
static int64_t iterate(float *X, bool *failed, mn_mesa_solver *s, mn_mesa_chunk *c,
                       const float *kk) {
    const int64_t K = s->K;
    float size[MN_STAT_CHUNK];
    start_rows(X, size, s, c->L);
    conjugate_gradients(X, s, c, kk);
    const int64_t n_failed = check(failed, X, s, c, kk);
    for (int64_t t = 0; t < c->L; t++) {
        mn_scale(X + t * K, size[t], failed[t] ? s->B + t * K : X + t * K, K);
    }
    if (2 * n_failed > c->L) s->direct_chunks = REST_CHUNKS;
    return n_failed;
}

/* Conjugate gradients as published models run them: s->steps from X = 0, nothing preconditioned,
 * 1e-5 in each denominator. */
static void take_steps(float *X, mn_mesa_solver *s, mn_mesa_chunk *c, const float *kk) {
    const int64_t K = s->K, L = c->L;
    float size[MN_STAT_CHUNK];
    MN_T(mn_stat_store)(s->R, X, L * K);
    MN_T(mn_stat_store)(s->D, X, L * K);
    memset(X, 0, (size_t)(L * K) * sizeof *X);
    for (int64_t t = 0; t < L; t++) size[t] = vf_dot_row(s->R + t * K, s->R + t * K, K);
    for (int64_t step = 0; step < s->steps; step++) {
        apply(s->Z, s->D, s, c, kk);
        for (int64_t t = 0; t < L; t++) {
            float *r = s->R + t * K, *d = s->D + t * K;
            const float alpha = size[t] / (vf_dot_row(d, s->Z + t * K, K) + 1e-5f);
            mn_axpy(X + t * K, alpha, d, K);
            mn_axpy(r, -alpha, s->Z + t * K, K);
            const float next = vf_dot_row(r, r, K);
            mn_scale(d, next / (size[t] + 1e-5f), d, K);
            mn_axpy(d, 1.0f, r, K);
            size[t] = next;
        }
    }
}

void MN_T(mn_mesa_solve)(float *const *X, int n, mn_mesa_solver *s, mn_mesa_chunk *c,
                         const float *kk) {
    bool wanted[MN_MESA_SIDES][MN_STAT_CHUNK];
    int64_t n_wanted = 0;
    if (s->steps > 0) {
        for (int r = 0; r < n; r++) take_steps(X[r], s, c, kk);
        return;
    }
    s->dense[0] = count_dense(c, 0, half_of(c->L));
    s->dense[1] = count_dense(c, half_of(c->L), c->L);
    const bool iterates = s->K > NARROW && c->L >= SHORT && s->direct_chunks == 0;
    if (s->direct_chunks > 0) s->direct_chunks--;
    for (int half = 0; half < 2; half++) {
        if (iterates && s->dense[half] > 0) invert_start(s, c, kk, half);
    }
    for (int r = 0; r < n; r++) {
        memset(wanted[r], true, sizeof wanted[r]);
        n_wanted += iterates ? iterate(X[r], wanted[r], s, c, kk) : c->L;
    }
    if (n_wanted > 0) solve_directly(X, wanted, n, s, c, kk);
}
