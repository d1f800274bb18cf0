/* curvature.c - the query contracted along the directions in which the keys so far vary, chunk
 * form.
 *
 * Definition and gradients in ref/curvature.c. With R, s the sums before the chunk, rows being
 * tokens:
 *
 *   Y = Q R + tril(Q K') K      qt_t = q_t - gamma_t / n_t (y_t - (s_t.q_t) / n_t s_t)
 *   R <- R + K'K
 *
 * Backward, with Z = diag(-gamma / n) dQt and D the adjoint of R behind the chunk:
 *
 *   there   Y = dQt R + tril(dQt K') K, dq_t and dgamma_t from y_t
 *   back    dK = K (D + D') + tril(Q K')'Z + tril(Z K')'Q + e      D <- D + Z'Q
 *
 * R is symmetric; what is given for it counts by its symmetric part, and so does its gradient.
 *
 * Few heads are cut: forward into columns of R and Y, and backward the two ways are two items, once
 * a phase before them has formed s_t.q_t and s_t.d_t of all tokens. */
#include <string.h>

#include "kernels/cpu/chunk/stat.h"
#include "kernels/cpu/chunk/tiles.h"

/* How the columns of R are cut: by H and K alone. */
static mn_column_tiles tiles_of(const mn_call *call) {
    const mn_call columns = { .H = call->H, .V = call->K };
    return mn_column_tiles_of(&columns);
}

/* The tokens of one chunk. */
typedef struct chunk {
    int64_t b, t0, h, L;
    double count;    // keys seen before
    mn_mat q, k, d;
} chunk;

static chunk chunk_at(const mn_curvature_args *p, const mn_sequence *seq, int64_t n, int64_t h,
                      int64_t start) {
    const int64_t b = seq->b, t0 = seq->t0 + start;
    return (chunk){ b, t0, h, mn_min(seq->length - start, MN_STAT_CHUNK),
                    (double)(p->counts0 ? p->counts0[n] : p->n0) + (double)start,
                    mn_mat_rows(p->q, b, t0, h), mn_mat_rows(p->k, b, t0, h),
                    mn_mat_rows(p->cot.qt, b, t0, h) };
}

/* s = sums + within, after k has joined `within`; returns s.q. Two levels keep the sum of a long
 * sequence accurate: `within` starts at 0 in each chunk. */
static float sum_key(float *s, float *within, const float *sums, const float *k, const float *q,
                     int64_t K) {
    vf product = vf_zero();
    for (int64_t i = 0; i < K; i += MN_VW) {
        const int n = vf_lanes(K - i);
        const vf w = vf_add(vf_load_row(within + i, n), vf_load_row(k + i, n));
        const vf sum = vf_add(vf_load_row(sums + i, n), w);
        vf_store_row(within + i, w, n);
        vf_store_row(s + i, sum, n);
        product = vf_fma(sum, vf_load_row(q + i, n), product);
    }
    return vf_sum(product);
}

/* y = x - f (y - mean s) */
static void contract(float *y, const float *x, const float *s, float f, float mean, int64_t K) {
    const vf factor = vf_set1(f), times = vf_set1(mean);
    for (int64_t i = 0; i < K; i += MN_VW) {
        const int n = vf_lanes(K - i);
        const vf centred = vf_fnma(times, vf_load_row(s + i, n), vf_load_row(y + i, n));
        vf_store_row(y + i, vf_fnma(factor, centred, vf_load_row(x + i, n)), n);
    }
}

/* Rows of `m` that the neighbour of chunk c needs, `step` tokens on. */
static void prefetch(mn_mat m, const chunk *c, const mn_sequence *seq, int64_t step, int64_t K) {
    const int64_t first = c->t0 - seq->t0 + step, last = mn_min(first + MN_STAT_CHUNK, seq->length);
    if (!m.at || first < 0) return;
    m.at += step * m.row;
    mn_prefetch_rows(m, last - first, K);
}

/* Columns of Y = X R + tril(X K') K; R has those columns only, Y begins with them. */
static void apply_moment(mn_mat Y, mn_mat X, const float *R, float *P, const chunk *c, int64_t K,
                         mn_columns col) {
    const mn_mat k = { c->k.at + col.j0, c->k.row, c->k.col };
    mn_gemm_args g = mn_product(Y, X, mn_mat_of(R, col.n), (mn_dims){ c->L, col.n, K });
    MN_T(mn_gemm)(&g);
    MN_T(mn_stat_scores)(P, X, c->k, c->L, K);
    g = mn_product(Y, mn_mat_of(P, MN_STAT_CHUNK), k, (mn_dims){ c->L, col.n, c->L });
    g.base = MN_GEMM_ADD;
    g.shape = MN_GEMM_A_LOWER;
    MN_T(mn_gemm)(&g);
}

/* R, P, then s, within, sums */
static bool forward_floats(int64_t *count, int64_t K) {
    return mn_mul_i64(count, K, K + 3) && mn_add_i64(count, *count, MN_STAT_CHUNK * MN_STAT_CHUNK);
}

bool MN_T(mn_curvature_forward_plan)(const void *args, mn_plan *plan) {
    const mn_call *c = args;
    int64_t count;
    plan->n_phases = 1;
    plan->items[0] = mn_n_sequences(c) * c->H * tiles_of(c).count;
    return forward_floats(&count, c->K) &&
           mn_mul_size(&plan->scratch_bytes, (size_t)count, sizeof(float));
}

/* within joins sums at the border of a chunk. */
static void close_sums(float *sums, float *within, int64_t K) {
    mn_axpy(sums, 1.0f, within, K);
    memset(within, 0, (size_t)K * sizeof *within);
}

/* row = row0 + ki k, kept unless `row` is NULL; returns its product with q. */
static float step_row(float *row, const float *row0, float ki, const float *k, const float *q,
                      int64_t K) {
    const vf factor = vf_set1(ki);
    vf product = vf_zero();
    for (int64_t j = 0; j < K; j += MN_VW) {
        const int n = vf_lanes(K - j);
        const vf old = row0 ? vf_load_row(row0 + j, n) : vf_zero();
        const vf x = vf_fma(factor, vf_load_row(k + j, n), old);
        if (row) vf_store_row(row + j, x, n);
        product = vf_fma(x, vf_load_row(q + j, n), product);
    }
    return vf_sum(product);
}

/* A sequence of one token: each row of the state is read and written once. */
static void step(const mn_curvature_args *p, const mn_sequence *seq, int64_t n, int64_t h,
                 void *scratch) {
    const int64_t K = p->call.K, b = seq->b, t = seq->t0;
    const float *kk0 = MN_ROW(float, p->kk0, n, 0, h), *k = MN_ROW(float, p->k, b, t, h);
    const float *q = MN_ROW(float, p->q, b, t, h), gamma = *MN_ROW(float, p->gamma, b, t, h);
    float *kk = MN_ROW_OUT(float, p->kk, n, 0, h), *qt = MN_ROW_OUT(float, p->qt, b, t, h);
    float *y = scratch, *s = y + K, *sums = s + K;
    const float each = (float)(1.0 / ((double)(p->counts0 ? p->counts0[n] : p->n0) + 1.0));
    for (int64_t i = 0; i < K; i++) {
        y[i] = step_row(kk ? kk + i * K : NULL, kk0 ? kk0 + i * K : NULL, k[i], k, q, K);
    }
    MN_T(mn_stat_load)(sums, MN_ROW(float, p->ks0, n, 0, h), K);
    memset(s, 0, (size_t)K * sizeof *s);
    const float mean = each * sum_key(sums, s, sums, k, q, K);
    if (qt) {
        contract(y, q, sums, gamma * each, mean, K);
        MN_T(mn_stat_store)(qt, y, K);
    }
    MN_T(mn_stat_store)(MN_ROW_OUT(float, p->ks, n, 0, h), sums, K);
}

/* Columns of (R + R') / 2; zeros without R. */
static void load_columns_of(float *S, const float *R, int64_t K, mn_columns col) {
    for (int64_t i = 0; i < K; i++) {
        for (int64_t j = 0; j < col.n; j++) {
            const int64_t at = col.j0 + j;
            S[i * col.n + j] = R ? 0.5f * (R[i * K + at] + R[at * K + i]) : 0.0f;
        }
    }
}

/* R <- R + K'K, all of its columns or some. */
static void add_keys(float *R, const chunk *c, int64_t K, mn_columns col) {
    const mn_mat k = { c->k.at + col.j0, c->k.row, c->k.col };
    if (col.n == K) MN_T(mn_stat_add_symmetric)(R, 1.0f, c->k, c->k, c->L, K);
    else MN_T(mn_stat_add_products)(mn_mat_of(R, col.n), 1.0f, 1.0f, c->k, k,
                                    (mn_dims){ K, col.n, c->L });
}

static void forward_columns(const mn_curvature_args *p, int64_t n, int64_t h, mn_columns col,
                            float *scratch) {
    const int64_t K = p->call.K, j0 = col.j0;
    const mn_sequence seq = mn_sequence_at(&p->call, n);
    float *R = scratch, *P = R + K * K, *s = P + MN_STAT_CHUNK * MN_STAT_CHUNK;
    float *within = s + K, *sums = within + K;
    if (col.n == K) MN_T(mn_stat_load_symmetric)(R, MN_ROW(float, p->kk0, n, 0, h), K);
    else load_columns_of(R, MN_ROW(float, p->kk0, n, 0, h), K, col);
    MN_T(mn_stat_load)(sums, MN_ROW(float, p->ks0, n, 0, h), K);
    memset(within, 0, (size_t)K * sizeof *within);
    for (int64_t start = 0; start < seq.length; start += MN_STAT_CHUNK) {
        const chunk c = chunk_at(p, &seq, n, h, start);
        const mn_mat qt = mn_mat_rows_out(mn_out_from(p->qt, j0), c.b, c.t0, h);
        mn_prefetch_written_rows(qt, c.L, col.n);
        prefetch(c.q, &c, &seq, MN_STAT_CHUNK, K);
        if (qt.at) apply_moment(qt, c.q, R, P, &c, K, col);
        for (int64_t t = 0; t < c.L; t++) {
            const float *q = mn_row_of(c.q, t), gamma = *MN_ROW(float, p->gamma, c.b, c.t0 + t, h);
            const float each = (float)(1.0 / (c.count + (double)t + 1.0));
            const float mean = each * sum_key(s, within, sums, mn_row_of(c.k, t), q, K);
            if (qt.at) contract(mn_row_of(qt, t), q + j0, s + j0, gamma * each, mean, col.n);
        }
        close_sums(sums, within, K);
        prefetch(c.k, &c, &seq, MN_STAT_CHUNK, K);
        add_keys(R, &c, K, col);
    }
    MN_T(mn_stat_store_rows)(MN_ROW_OUT(float, mn_out_from(p->kk, j0), n, 0, h), K, R, K, col.n);
    if (j0 == 0) MN_T(mn_stat_store)(MN_ROW_OUT(float, p->ks, n, 0, h), sums, K);
}

void MN_T(mn_curvature_forward_run)(const void *args, int phase, int64_t item, void *shared,
                                    void *scratch) {
    (void)phase, (void)shared;
    const mn_curvature_args *p = args;
    const mn_column_tiles tiles = tiles_of(&p->call);
    const mn_call columns = { .V = p->call.K };
    const int64_t head = item / tiles.count, n = head / p->call.H, h = head % p->call.H;
    const mn_sequence seq = mn_sequence_at(&p->call, n);
    const mn_columns col = mn_columns_at(&columns, tiles, item % tiles.count);
    if (seq.length != 1) forward_columns(p, n, h, col, scratch);
    else if (col.j0 == 0) step(p, &seq, n, h, scratch);
}

/* Work space of an item of backward. M, m are R, s there and D, e on the way back. */
typedef struct work {
    float *M, *m, *twice;       // (K,K) (K) (K,K): D + D'
    float *P, *Y, *Z;           // (chunk,chunk), (chunk,K), (chunk,K)
    float *s, *within;          // (K) (K): a sum, and its part inside the chunk
    float *products;            // shared, (T,2): s.q and s.d of every token of the sequence
} work;

enum { WAYS = 2 };    // there and back

bool MN_T(mn_curvature_backward_plan)(const void *args, mn_plan *plan) {
    const mn_call *c = args;
    int64_t count, extra, tokens;
    plan->n_phases = 2;
    plan->items[0] = mn_n_sequences(c) * c->H;
    plan->items[1] = plan->items[0] * WAYS;
    return forward_floats(&count, c->K) && mn_mul_i64(&extra, c->K, c->K + 2 * MN_STAT_CHUNK) &&
           mn_mul_i64(&tokens, c->B * c->T, c->H) && mn_add_i64(&count, count, extra) &&
           mn_mul_size(&plan->shared_bytes, (size_t)tokens, 2 * sizeof(float)) &&
           mn_mul_size(&plan->scratch_bytes, (size_t)count, sizeof(float));
}

static work place(float *at, int64_t K) {
    const int64_t rows = MN_STAT_CHUNK * K;
    work w = { .M = at };
    w.twice = w.M + K * K;
    w.P = w.twice + K * K;
    w.Y = w.P + MN_STAT_CHUNK * MN_STAT_CHUNK;
    w.Z = w.Y + rows;
    w.m = w.Z + rows;
    w.s = w.m + K;
    w.within = w.s + K;
    return w;
}

/* The products of one chunk; then its keys join the sums. */
static void sum_products(work *w, const chunk *c, float *products, int64_t K) {
    for (int64_t t = 0; t < c->L; t++) {
        const float *q = mn_row_of(c->q, t), *d = c->d.at ? mn_row_of(c->d, t) : NULL;
        products[2 * t] = sum_key(w->s, w->within, w->m, mn_row_of(c->k, t), q, K);
        products[2 * t + 1] = d ? vf_dot_row(w->s, d, K) : 0.0f;
    }
    close_sums(w->m, w->within, K);
}

/* dq and dgamma of one chunk; then its keys join the sums. */
static void query_backward(const mn_curvature_args *p, work *w, const chunk *c,
                           const float *products) {
    const int64_t K = p->call.K;
    const mn_mat dq = mn_mat_rows_out(p->grad.q, c->b, c->t0, c->h);
    const bool wanted = c->d.at && (dq.at || p->grad.gamma.data);
    if (wanted) {
        apply_moment(mn_mat_of(w->Y, K), c->d, w->M, w->P, c, K, (mn_columns){ 0, K });
    }
    for (int64_t t = 0; t < c->L; t++) {
        const float *q = mn_row_of(c->q, t), *d = c->d.at ? mn_row_of(c->d, t) : NULL;
        const float gamma = *MN_ROW(float, p->gamma, c->b, c->t0 + t, c->h);
        float *y = w->Y + t * K, *dgamma = MN_ROW_OUT(float, p->grad.gamma, c->b, c->t0 + t, c->h);
        const float each = (float)(1.0 / (c->count + (double)t + 1.0));
        const float sq = products[2 * t], sd = products[2 * t + 1];
        sum_key(w->s, w->within, w->m, mn_row_of(c->k, t), q, K);
        if (dgamma) *dgamma = wanted ? -each * (vf_dot_row(y, q, K) - each * sd * sq) : 0.0f;
        if (wanted) contract(y, d, w->s, gamma * each, each * sd, K);
        if (dq.at) MN_T(mn_stat_load)(mn_row_of(dq, t), wanted ? y : NULL, K);
    }
    close_sums(w->m, w->within, K);
    MN_T(mn_stat_add_symmetric)(w->M, 1.0f, c->k, c->k, c->L, K);
}

/* Rows of Z = -gamma / n d. */
static void scale_cotangents(const mn_curvature_args *p, work *w, const chunk *c) {
    const int64_t K = p->call.K;
    for (int64_t t = 0; t < c->L; t++) {
        const float gamma = *MN_ROW(float, p->gamma, c->b, c->t0 + t, c->h);
        const float a = (float)(-gamma / (c->count + (double)t + 1.0));
        if (c->d.at) mn_scale(w->Z + t * K, a, mn_row_of(c->d, t), K);
        else memset(w->Z + t * K, 0, (size_t)K * sizeof *w->Z);
    }
}

/* dK = K (D + D') + tril(Q K')'Z + tril(Z K')'Q, or added to dK */
static void key_products(mn_mat dk, work *w, const chunk *c, int64_t K, bool adds) {
    const mn_mat Z = mn_mat_of(w->Z, K), P = mn_transposed(mn_mat_of(w->P, MN_STAT_CHUNK));
    MN_T(mn_stat_twice_symmetric)(w->twice, w->M, K);
    mn_gemm_args g = mn_product(dk, c->k, mn_mat_of(w->twice, K), (mn_dims){ c->L, K, K });
    if (adds) g.base = MN_GEMM_ADD;
    MN_T(mn_gemm)(&g);
    MN_T(mn_stat_scores)(w->P, c->q, c->k, c->L, K);
    g = mn_product(dk, P, Z, (mn_dims){ c->L, K, c->L });
    g.base = MN_GEMM_ADD;
    g.shape = MN_GEMM_A_UPPER;
    MN_T(mn_gemm)(&g);
    MN_T(mn_stat_scores)(w->P, Z, c->k, c->L, K);
    g.b = c->q.at;
    g.b_row = c->q.row;
    MN_T(mn_gemm)(&g);
}

/* dk of one chunk, then D and e of the chunk before it. */
static void key_backward(const mn_curvature_args *p, work *w, const chunk *c,
                         const float *products) {
    const int64_t K = p->call.K;
    const mn_mat dk = mn_mat_rows_out(p->grad.k, c->b, c->t0, c->h);
    scale_cotangents(p, w, c);
    if (dk.at) key_products(dk, w, c, K, p->adds_k);
    for (int64_t t = c->L - 1; t >= 0; t--) {
        const float each = (float)(1.0 / (c->count + (double)t + 1.0));
        const float gamma = *MN_ROW(float, p->gamma, c->b, c->t0 + t, c->h);
        mn_axpy(w->within, -each * products[2 * t], w->Z + t * K, K);
        mn_axpy(w->within, gamma * each * each * products[2 * t + 1], mn_row_of(c->q, t), K);
        if (!dk.at) continue;
        mn_axpy(mn_row_of(dk, t), 1.0f, w->m, K);
        mn_axpy(mn_row_of(dk, t), 1.0f, w->within, K);
    }
    close_sums(w->m, w->within, K);
    mn_gemm_args g = mn_product(mn_mat_of(w->M, K), mn_transposed(mn_mat_of(w->Z, K)), c->q,
                                (mn_dims){ K, K, c->L });
    g.base = MN_GEMM_ADD;
    MN_T(mn_gemm)(&g);
}

/* There: products in phase 0, dq and dgamma in phase 1. */
static void go_forward(const mn_curvature_args *p, work *w, int64_t n, int64_t h, bool first) {
    const int64_t K = p->call.K;
    const mn_sequence seq = mn_sequence_at(&p->call, n);
    if (!first) MN_T(mn_stat_load_symmetric)(w->M, MN_ROW(float, p->kk0, n, 0, h), K);
    MN_T(mn_stat_load)(w->m, MN_ROW(float, p->ks0, n, 0, h), K);
    for (int64_t start = 0; start < seq.length; start += MN_STAT_CHUNK) {
        const chunk c = chunk_at(p, &seq, n, h, start);
        if (first) sum_products(w, &c, w->products + 2 * start, K);
        else query_backward(p, w, &c, w->products + 2 * start);
    }
}

static void go_back(const mn_curvature_args *p, work *w, int64_t n, int64_t h) {
    const int64_t K = p->call.K;
    const mn_sequence seq = mn_sequence_at(&p->call, n);
    MN_T(mn_stat_load)(w->M, MN_ROW(float, p->cot.kk, n, 0, h), K * K);
    MN_T(mn_stat_load)(w->m, MN_ROW(float, p->cot.ks, n, 0, h), K);
    const int64_t n_chunks = mn_ceil_div(seq.length, MN_STAT_CHUNK);
    for (int64_t i = n_chunks - 1; i >= 0; i--) {
        const chunk c = chunk_at(p, &seq, n, h, i * MN_STAT_CHUNK);
        key_backward(p, w, &c, w->products + 2 * i * MN_STAT_CHUNK);
    }
    float *dkk0 = MN_ROW_OUT(float, p->grad.kk0, n, 0, h);
    if (dkk0) MN_T(mn_stat_load_symmetric)(dkk0, w->M, K);
    MN_T(mn_stat_store)(MN_ROW_OUT(float, p->grad.ks0, n, 0, h), w->m, K);
}

void MN_T(mn_curvature_backward_run)(const void *args, int phase, int64_t item, void *shared,
                                     void *scratch) {
    const mn_curvature_args *p = args;
    const int64_t head = phase == 0 ? item : item / WAYS, n = head / p->call.H;
    const int64_t h = head % p->call.H;
    const mn_sequence seq = mn_sequence_at(&p->call, n);
    work w = place(scratch, p->call.K);
    w.products = (float *)shared + 2 * ((seq.b * p->call.H + h) * p->call.T + seq.t0);
    memset(w.within, 0, (size_t)p->call.K * sizeof *w.within);
    if (phase == 1 && item % WAYS) go_back(p, &w, n, h);
    else go_forward(p, &w, n, h, phase == 0);
}

/* One token of every sequence: the same work with less room. */
bool MN_T(mn_curvature_step_plan)(const void *args, mn_plan *plan) {
    const mn_call *c = args;
    plan->n_phases = 1;
    plan->items[0] = c->B * c->H;
    return mn_mul_size(&plan->scratch_bytes, (size_t)c->K, 3 * sizeof(float));
}

void MN_T(mn_curvature_step_run)(const void *args, int phase, int64_t item, void *shared,
                                 void *scratch) {
    (void)phase, (void)shared;
    const mn_curvature_args *p = args;
    const mn_sequence seq = mn_sequence_at(&p->call, item / p->call.H);
    step(p, &seq, item / p->call.H, item % p->call.H, scratch);
}
