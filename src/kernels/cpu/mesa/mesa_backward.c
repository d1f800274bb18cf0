/* mesa_backward.c - gradients of mesa, from the last chunk to the first.
 *
 * With first, last, W of mesa.h, A and B the adjoints of Hkk and Hkv behind the chunk, X.Y the
 * elementwise product, and x_t, y_t of ref/mesa.c as rows of X, Y (both solved with the same M):
 *
 *   T = dO Hkv_0'       right sides of Y: diag(first) T + (W.(dO V')) diag(beta) K
 *   Px = tril(X K')     Py = tril(Y K')     Pv = tril(dO V')
 *   dK = diag(beta) [ (W.(Pv - Py))'X - (W.Px)'Y + diag(last) (K (A + A') + V B') ]
 *   dV = diag(beta) [ (W.Px)'dO + diag(last) K B ]
 *   dbeta_s = sum_t E[t,s] + last_s k_s.(A k_s + B v_s)      E = W.Px.(Pv - Py)
 *   A <- fall A - Y'diag(first) X       B <- fall B + X'diag(first) dO     dlam = -sum_t x_t.y_t
 *
 * and dg is the flow through the state (stat.h) of E diag(beta), first_t x_t.(T_t - Hkk_0 y_t),
 * beta_s last_s k_s.(A k_s + B v_s) and fall (A.Hkk_0 + B.Hkv_0).
 *
 * X and Y need no adjoint: where sequences are cut (mesa.h) segments are solved first, side by
 * side, and the way back finds them in shared memory. */
#include <string.h>

#include "kernels/cpu/mesa/mesa.h"

/* Work space of one item. */
typedef struct work {
    mn_mesa_solver solver;
    mn_mesa_chunk c;
    float *kept, *states;    // states at segment starts, and at chunk starts of one segment
    int64_t size;            // floats of a state
    float *A, *B;            // (K,K) (K,V)
    float *twice;            // (K,K): A + A'
    float *Px, *Pv, *E;      // (chunk,chunk)
    float *X, *Y, *T, *J;    // (chunk,K)
    float *d_o;              // (chunk,V): do, zeros without one
    double *dlam;            // (K)
    float *given;            // shared, (T,2K) of the sequence: X, then Y of each chunk; NULL: solve
} work;

enum { KEEP, SOLVE, BACK, LAM, PHASES };

/* Shared memory: dlam of every sequence and head, then, where sequences are cut, statistics at the
 * starts of segments, and X and Y of every token and head. */
typedef struct layout {
    int64_t heads, segments, kept, solved;    // heads, and floats
} layout;

static bool layout_of(layout *l, const mn_call *c) {
    const bool cut = mn_mesa_is_cut(c);
    *l = (layout){ .heads = mn_n_sequences(c) * c->H, .segments = mn_mesa_segments(c) };
    return mn_mul_i64(&l->kept, l->heads, l->segments) &&
           MN_T(mn_mesa_state_floats)(&l->solved, c) &&
           mn_mul_i64(&l->kept, l->kept, cut ? l->solved : 0) &&
           mn_mul_i64(&l->solved, c->B * c->T * c->H, cut ? 2 : 0) &&
           mn_mul_i64(&l->solved, l->solved, c->K);
}

static int64_t segments_of(const mn_call *call) {
    return mn_ceil_div(mn_ceil_div(mn_longest_sequence(call), MN_STAT_CHUNK), MN_STAT_SEGMENT);
}

/* States: kept, of a segment, and the adjoints. Shared: dlam of every sequence and head. */
bool MN_T(mn_mesa_backward_plan)(const void *args, mn_plan *plan) {
    const mn_call *c = args;
    int64_t states, count, widths, square, shared;
    size_t solver, others, sums;
    layout l;
    if (!layout_of(&l, c)) return false;
    plan->n_phases = PHASES;
    plan->items[KEEP] = mn_mesa_is_cut(c) ? l.heads : 0;
    plan->items[SOLVE] = mn_mesa_is_cut(c) ? l.heads * l.segments : 0;
    plan->items[BACK] = l.heads;
    plan->items[LAM] = c->H;
    return MN_T(mn_mesa_state_floats)(&states, c) &&
           mn_mul_i64(&states, states, segments_of(c) + MN_STAT_SEGMENT + 1) &&
           MN_T(mn_mesa_chunk_floats)(&count, c) && mn_add_i64(&count, count, states) &&
           mn_mul_i64(&widths, c->K, 4) && mn_add_i64(&widths, widths, c->V) &&
           mn_mul_i64(&widths, widths, MN_STAT_CHUNK) && mn_add_i64(&count, count, widths) &&
           mn_mul_i64(&square, c->K, c->K) && mn_add_i64(&count, count, square) &&
           mn_add_i64(&count, count, 3 * MN_STAT_CHUNK * MN_STAT_CHUNK) &&
           mn_mul_size(&others, (size_t)count, sizeof(float)) &&
           MN_T(mn_mesa_solver_bytes)(&solver, c) &&
           mn_add_size(&plan->scratch_bytes, solver, others) &&
           mn_mul_i64(&shared, l.heads, c->K) &&
           mn_mul_size(&sums, (size_t)shared, sizeof(double)) &&
           mn_add_i64(&shared, l.kept, l.solved) &&
           mn_mul_size(&plan->shared_bytes, (size_t)shared, sizeof(float)) &&
           mn_add_size(&plan->shared_bytes, plan->shared_bytes, sums);
}

static void place(work *w, void *scratch, const mn_mesa_args *p, int64_t h) {
    const mn_call *call = &p->call;
    const int64_t K = call->K, rows = MN_STAT_CHUNK * K, square = MN_STAT_CHUNK * MN_STAT_CHUNK;
    size_t solver_bytes;
    (void)MN_T(mn_mesa_solver_bytes)(&solver_bytes, call);
    (void)MN_T(mn_mesa_state_floats)(&w->size, call);
    MN_T(mn_mesa_solver_place)(&w->solver, scratch, K, MN_ROW(float, p->lam, 0, 0, h));
    float *at = (float *)(void *)((unsigned char *)scratch + solver_bytes);
    at = MN_T(mn_mesa_chunk_place)(&w->c, at, call);
    w->kept = at, at += segments_of(call) * w->size;
    w->states = at, at += MN_STAT_SEGMENT * w->size;
    w->A = at, w->B = at + K * K, at += w->size;
    w->twice = at, at += K * K;
    w->Px = at, at += square;
    w->Pv = at, at += square;
    w->E = at, at += square;
    w->X = at, at += rows;
    w->Y = at, at += rows;
    w->T = at, at += rows;
    w->J = at, at += rows;
    w->d_o = at;
}

/* X and Y of the chunk that is at hand, start tokens into the sequence. */
static float *given_at(const work *w, int64_t start, int64_t K) {
    return w->given + 2 * start * K;
}

/* Y's right sides diag(first) T + (W.Pv) diag(beta) K, and X and Y */
static void solve_rows(work *w, const mn_mesa_args *p, mn_mesa_state S) {
    mn_mesa_chunk *c = &w->c;
    const int64_t K = p->call.K;
    MN_T(mn_stat_weigh)(w->E, w->Pv, c->Wb, c->L);
    MN_T(mn_stat_store)(w->Y, w->T, c->L * K);
    mn_gemm_args g = mn_product(mn_mat_of(w->Y, K), mn_mat_of(w->E, MN_STAT_CHUNK), c->k,
                                (mn_dims){ c->L, K, c->L });
    g.base = MN_GEMM_SCALE;
    g.c_scale = c->first;
    g.shape = MN_GEMM_A_LOWER;
    MN_T(mn_gemm)(&g);
    float *const sides[MN_MESA_SIDES] = { w->X, w->Y };
    MN_T(mn_mesa_solve)(sides, 2, &w->solver, c, S.kk);
}

/* X, and T, Pv, Y from the cotangents in d_o; X and Y are solved for unless they are `given`. */
static void solve_both(work *w, const mn_mesa_args *p, mn_mesa_state S, const float *given) {
    mn_mesa_chunk *c = &w->c;
    const int64_t K = p->call.K, V = p->call.V;
    const mn_mat d_o = mn_mat_of(w->d_o, V);
    for (int64_t t = 0; t < c->L; t++) {
        const float *q = MN_ROW(float, p->q, c->b, c->t0 + t, c->h);
        mn_scale(w->X + t * K, (float)p->scale, q, K);
        MN_T(mn_stat_load)(w->d_o + t * V, MN_ROW(float, p->cot.o, c->b, c->t0 + t, c->h), V);
    }
    mn_gemm_args g = mn_product(mn_mat_of(w->T, K), d_o, mn_mat_of(S.kv, V),
                                (mn_dims){ c->L, K, V });
    MN_T(mn_gemm_nt)(&g);
    MN_T(mn_stat_scores)(w->Pv, d_o, c->v, c->L, V);
    if (!given) {
        solve_rows(w, p, S);
        return;
    }
    MN_T(mn_stat_load)(w->X, given, c->L * K);
    MN_T(mn_stat_load)(w->Y, given + c->L * K, c->L * K);
}

/* dq, dlam, and late[t] = first_t x_t.(T_t - Hkk_0 y_t) */
static void query_backward(double *late, work *w, const mn_mesa_args *p, mn_mesa_state S) {
    const mn_mesa_chunk *c = &w->c;
    const int64_t K = p->call.K;
    mn_gemm_args g = mn_product(mn_mat_of(w->T, K), mn_mat_of(w->Y, K), mn_mat_of(S.kk, K),
                                (mn_dims){ c->L, K, K });
    g.alpha = -1.0f;
    g.base = MN_GEMM_ADD;
    MN_T(mn_gemm)(&g);
    for (int64_t t = 0; t < c->L; t++) {
        const float *x = w->X + t * K, *y = w->Y + t * K;
        float *dq = MN_ROW_OUT(float, p->grad.q, c->b, c->t0 + t, c->h);
        late[t] = (double)c->first[t] * vf_dot_row(x, w->T + t * K, K);
        for (int64_t i = 0; i < K; i++) w->dlam[i] -= (double)x[i] * y[i];
        if (dq) mn_scale(dq, (float)p->scale, y, K);
    }
}

/* Px and Pv - Py, each times W, in Px and Pv; their scores multiplied, in E. */
static void pair_products(work *w, const mn_mesa_args *p) {
    mn_mesa_chunk *c = &w->c;
    const int64_t K = p->call.K;
    MN_T(mn_stat_scores)(w->Px, mn_mat_of(w->X, K), c->k, c->L, K);
    MN_T(mn_stat_scores)(c->P, mn_mat_of(w->Y, K), c->k, c->L, K);
    for (int64_t t = 0; t < c->L; t++) {
        mn_axpy(w->Pv + t * MN_STAT_CHUNK, -1.0f, c->P + t * MN_STAT_CHUNK, t + 1);
    }
    MN_T(mn_stat_weigh)(w->Pv, w->Pv, c->W, c->L);
    MN_T(mn_stat_weigh)(w->E, w->Px, w->Pv, c->L);
    MN_T(mn_stat_weigh)(w->Px, w->Px, c->W, c->L);
}

/* dv = beta [ (W.Px)'dO + last K B ] */
static void value_backward(work *w, const mn_mesa_args *p) {
    mn_mesa_chunk *c = &w->c;
    const int64_t K = p->call.K, V = p->call.V;
    const mn_mat dv = mn_mat_rows_out(p->grad.v, c->b, c->t0, c->h);
    if (!dv.at) return;
    mn_gemm_args g = mn_product(dv, c->k, mn_mat_of(w->B, V), (mn_dims){ c->L, V, K });
    MN_T(mn_gemm)(&g);
    g = mn_product(dv, mn_transposed(mn_mat_of(w->Px, MN_STAT_CHUNK)), mn_mat_of(w->d_o, V),
                   (mn_dims){ c->L, V, c->L });
    g.base = MN_GEMM_SCALE;
    g.c_scale = c->last;
    g.shape = MN_GEMM_A_UPPER;
    MN_T(mn_gemm)(&g);
    for (int64_t s = 0; s < c->L; s++) mn_scale(mn_row_of(dv, s), c->beta[s], mn_row_of(dv, s), V);
}

/* dk without beta in J, and early[s] = last_s k_s.(A k_s + B v_s) */
static void key_backward(double *early, work *w, const mn_mesa_args *p) {
    mn_mesa_chunk *c = &w->c;
    const int64_t K = p->call.K, V = p->call.V;
    const mn_mat J = mn_mat_of(w->J, K), T = mn_mat_of(w->T, K);
    MN_T(mn_stat_twice_symmetric)(w->twice, w->A, K);
    mn_gemm_args g = mn_product(J, c->k, mn_mat_of(w->twice, K), (mn_dims){ c->L, K, K });
    MN_T(mn_gemm)(&g);
    g = mn_product(T, c->v, mn_mat_of(w->B, V), (mn_dims){ c->L, K, V });
    MN_T(mn_gemm_nt)(&g);
    for (int64_t s = 0; s < c->L; s++) {
        const float *k = mn_row_of(c->k, s);
        float *Ak = mn_row_of(J, s), *Bv = mn_row_of(T, s);
        early[s] = c->last[s] * (0.5 * vf_dot_row(k, Ak, K) + vf_dot_row(k, Bv, K));
        mn_axpy(Ak, 1.0f, Bv, K);
    }
    g = mn_product(J, mn_transposed(mn_mat_of(w->Pv, MN_STAT_CHUNK)), mn_mat_of(w->X, K),
                   (mn_dims){ c->L, K, c->L });
    g.base = MN_GEMM_SCALE;
    g.c_scale = c->last;
    g.shape = MN_GEMM_A_UPPER;
    MN_T(mn_gemm)(&g);
    g.a = w->Px;
    g.b = w->Y;
    g.base = MN_GEMM_ADD;
    g.alpha = -1.0f;
    MN_T(mn_gemm)(&g);
    for (int64_t s = 0; s < c->L; s++) {
        float *dk = MN_ROW_OUT(float, p->grad.k, c->b, c->t0 + s, c->h);
        if (dk) mn_scale(dk, c->beta[s], mn_row_of(J, s), K);
    }
}

/* A.Hkk + B.Hkv */
static double inner_product(const work *w, mn_mesa_state S, const mn_call *call) {
    double sum = 0.0;
    for (int64_t i = 0; i < call->K; i++) {
        sum += vf_dot_row(w->A + i * call->K, S.kk + i * call->K, call->K);
        sum += vf_dot_row(w->B + i * call->V, S.kv + i * call->V, call->V);
    }
    return sum;
}

/* dbeta and dg; early takes its beta on the way. */
static void gate_backward(work *w, const mn_mesa_args *p, mn_mesa_state S, const double *late,
                          double *early) {
    mn_mesa_chunk *c = &w->c;
    double flow[MN_STAT_CHUNK];
    const double all = c->first[c->L - 1] * inner_product(w, S, &p->call);
    for (int64_t s = 0; s < c->L; s++) {
        float *dbeta = MN_ROW_OUT(float, p->grad.beta, c->b, c->t0 + s, c->h);
        if (dbeta) *dbeta = (float)(MN_T(mn_stat_column_sum)(w->E, s, c->L) + early[s]);
        early[s] *= c->beta[s];
    }
    for (int64_t t = 0; t < c->L; t++) {
        float *row = w->E + t * MN_STAT_CHUNK;
        for (int64_t s = 0; s <= t; s++) row[s] *= c->beta[s];
    }
    MN_T(mn_stat_flow)(flow, all, late, early, w->E, c->L);
    for (int64_t t = 0; t < c->L; t++) {
        float *dg = MN_ROW_OUT(float, p->grad.g, c->b, c->t0 + t, c->h);
        if (dg) *dg = (float)flow[t];
    }
}

/* A and B of the chunk before; X becomes diag(first) X. */
static void adjoint_back(work *w, const mn_mesa_args *p) {
    const mn_mesa_chunk *c = &w->c;
    const int64_t K = p->call.K, V = p->call.V;
    const float fall = c->first[c->L - 1];
    const mn_mat X = mn_mat_of(w->X, K);
    for (int64_t t = 0; t < c->L; t++) mn_scale(w->X + t * K, c->first[t], w->X + t * K, K);
    MN_T(mn_stat_add_products)(mn_mat_of(w->A, K), fall, -1.0f, mn_mat_of(w->Y, K), X,
                               (mn_dims){ K, K, c->L });
    MN_T(mn_stat_add_products)(mn_mat_of(w->B, V), fall, 1.0f, X, mn_mat_of(w->d_o, V),
                               (mn_dims){ K, V, c->L });
}

static void chunk_backward(work *w, const mn_mesa_args *p, const mn_sequence *seq, int64_t h,
                           int64_t start, mn_mesa_state S) {
    double late[MN_STAT_CHUNK], early[MN_STAT_CHUNK];
    MN_T(mn_mesa_prepare)(&w->c, p, seq, h, start, true);
    solve_both(w, p, S, w->given ? given_at(w, start, p->call.K) : NULL);
    query_backward(late, w, p, S);
    pair_products(w, p);
    value_backward(w, p);
    key_backward(early, w, p);
    gate_backward(w, p, S, late, early);
    adjoint_back(w, p);
}

/* Carries the state at `at` over the chunks [first, end), each into the place `step` further on. */
static void advance_over(work *w, const mn_mesa_args *p, const mn_sequence *seq, int64_t h,
                         float *at, int64_t step, int64_t first, int64_t end) {
    for (int64_t i = first; i < end; i++) {
        if (step) memcpy(at + step, at, (size_t)w->size * sizeof *at);
        at += step;
        MN_T(mn_mesa_prepare)(&w->c, p, seq, h, i * MN_STAT_CHUNK, false);
        MN_T(mn_mesa_advance)(MN_T(mn_mesa_state_at)(at, &p->call), &w->c, &p->call);
    }
}

/* States at the starts of all segments. */
static void keep_states(work *w, const mn_mesa_args *p, const mn_sequence *seq, int64_t n,
                        int64_t h) {
    const int64_t n_chunks = mn_ceil_div(seq->length, MN_STAT_CHUNK);
    MN_T(mn_mesa_state_load)(MN_T(mn_mesa_state_at)(w->states, &p->call), p, n, h);
    for (int64_t i = 0; i < n_chunks; i += MN_STAT_SEGMENT) {
        memcpy(w->kept + i / MN_STAT_SEGMENT * w->size, w->states,
               (size_t)w->size * sizeof *w->kept);
        if (i + MN_STAT_SEGMENT < n_chunks) {
            advance_over(w, p, seq, h, w->states, 0, i, i + MN_STAT_SEGMENT);
        }
    }
}

static void sum_lam(const mn_mesa_args *p, int64_t h, const double *parts) {
    const int64_t K = p->call.K;
    float *dlam = MN_ROW_OUT(float, p->grad.lam, 0, 0, h);
    for (int64_t i = 0; dlam && i < K; i++) {
        double sum = 0.0;
        for (int64_t n = 0; n < mn_n_sequences(&p->call); n++) {
            sum += parts[(n * p->call.H + h) * K + i];
        }
        dlam[i] = (float)sum;
    }
}

/* Solves the chunks of one segment, from the last one as the way back does. */
static void solve_segment(work *w, const mn_mesa_args *p, const mn_sequence *seq, int64_t h,
                          const float *kept, int64_t segment) {
    const int64_t K = p->call.K, n_chunks = mn_ceil_div(seq->length, MN_STAT_CHUNK);
    const int64_t first = segment * MN_MESA_SEGMENT;
    const int64_t end = mn_min(n_chunks, first + MN_MESA_SEGMENT);
    if (first >= end) return;
    memcpy(w->states, kept + segment * w->size, (size_t)w->size * sizeof *w->states);
    advance_over(w, p, seq, h, w->states, w->size, first, end - 1);
    for (int64_t i = end - 1; i >= first; i--) {
        float *to = given_at(w, i * MN_STAT_CHUNK, K);
        MN_T(mn_mesa_prepare)(&w->c, p, seq, h, i * MN_STAT_CHUNK, true);
        solve_both(w, p, MN_T(mn_mesa_state_at)(w->states + (i - first) * w->size, &p->call), NULL);
        MN_T(mn_stat_store)(to, w->X, w->c.L * K);
        MN_T(mn_stat_store)(to + w->c.L * K, w->Y, w->c.L * K);
    }
}

/* The way back. `kept` has the statistics at the starts of segments of mesa.h, or is NULL. */
static void go_back(work *w, const mn_mesa_args *p, const mn_sequence *seq, int64_t n, int64_t h,
                    const float *kept) {
    const int64_t K = p->call.K, V = p->call.V;
    const int64_t n_chunks = mn_ceil_div(seq->length, MN_STAT_CHUNK);
    if (!kept) keep_states(w, p, seq, n, h);
    MN_T(mn_stat_load)(w->A, MN_ROW(float, p->cot.hkk, n, 0, h), K * K);
    MN_T(mn_stat_load)(w->B, MN_ROW(float, p->cot.hkv, n, 0, h), K * V);
    for (int64_t segment = mn_ceil_div(n_chunks, MN_STAT_SEGMENT) - 1; segment >= 0; segment--) {
        const int64_t first = segment * MN_STAT_SEGMENT;
        const int64_t end = mn_min(n_chunks, first + MN_STAT_SEGMENT);
        const float *start = kept ? kept + first / MN_MESA_SEGMENT * w->size
                                  : w->kept + segment * w->size;
        memcpy(w->states, start, (size_t)w->size * sizeof *w->states);
        advance_over(w, p, seq, h, w->states, w->size, first, end - 1);
        for (int64_t i = end - 1; i >= first; i--) {
            const mn_mesa_state S = MN_T(mn_mesa_state_at)(w->states + (i - first) * w->size,
                                                           &p->call);
            chunk_backward(w, p, seq, h, i * MN_STAT_CHUNK, S);
        }
    }
    float *dkk0 = MN_ROW_OUT(float, p->grad.hkk0, n, 0, h);
    if (dkk0) MN_T(mn_stat_load_symmetric)(dkk0, w->A, K);
    MN_T(mn_stat_store)(MN_ROW_OUT(float, p->grad.hkv0, n, 0, h), w->B, K * V);
}

_Static_assert(MN_STAT_SEGMENT % MN_MESA_SEGMENT == 0, "segments end together");

void MN_T(mn_mesa_backward_run)(const void *args, int phase, int64_t item, void *shared,
                                void *scratch) {
    const mn_mesa_args *p = args;
    const int64_t K = p->call.K, H = p->call.H;
    layout l;
    (void)layout_of(&l, &p->call);
    if (phase == LAM) {
        sum_lam(p, item, shared);
        return;
    }
    const int64_t head = phase == SOLVE ? item / l.segments : item, n = head / H, h = head % H;
    const mn_sequence seq = mn_sequence_at(&p->call, n);
    const bool cut = mn_mesa_is_cut(&p->call);
    work w;
    place(&w, scratch, p, h);
    w.dlam = (double *)shared + head * K;
    float *kept = (float *)(void *)((double *)shared + l.heads * K);
    w.given = cut ? kept + l.kept + 2 * K * ((seq.b * H + h) * p->call.T + seq.t0) : NULL;
    kept = cut ? kept + head * l.segments * w.size : NULL;
    if (phase == KEEP) {
        const mn_mesa_state S = MN_T(mn_mesa_state_at)(w.states, &p->call);
        MN_T(mn_mesa_keep)(kept, S, &w.c, p, &seq, n, h, MN_MESA_SEGMENT);
    } else if (phase == SOLVE) {
        solve_segment(&w, p, &seq, h, kept, item % l.segments);
    } else {
        memset(w.dlam, 0, (size_t)K * sizeof *w.dlam);
        go_back(&w, p, &seq, n, h, kept);
    }
}
