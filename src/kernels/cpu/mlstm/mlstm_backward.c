/* mlstm_backward.c - gradients of mlstm, from the last chunk to the first.
 *
 * With W, S, first, last and fall of mlstm.h, D and d the adjoints of C and n behind the chunk (in
 * units of exp(-m_L)), dnum_t = do_t / den_t, da_t as in ref/mlstm.c and X.Y the elementwise
 * product:
 *
 *   R = tril(dnum V' + da 1')               T = dnum C_0' + da n_0'
 *   J = diag(last) (V D' + 1 d')
 *   dQ = scale (diag(first) T + (W.R) K)    dK = scale (W.R)'Q + J
 *   dV = scale (W.S)'dnum + diag(last) K D
 *   E = scale W.S.R                         dipre_s = sum_t E[t,s] + k_s.J_s
 *   D <- fall D + scale Q'diag(first) dnum  d <- fall d + scale Q'(first.da)
 *
 * and dlf is the flow through the state (stat.h) of E, scale first_t q_t.T_t, k_s.J_s and
 * fall (D.C_0 + d.n_0).
 *
 * One item is some value columns of one head of one sequence; where they are not all, what belongs
 * to all columns is a sum of parts. */
#include <float.h>
#include <string.h>

#include "kernels/cpu/chunk/parts.h"
#include "kernels/cpu/mlstm/mlstm.h"

/* Work space of one item. */
typedef struct work {
    mn_mlstm_chunk c;
    float *kept, *states;    // states at segment starts, and at chunk starts of one segment
    int64_t size;            // floats of a state
    float *D, *d;            // (K,V) (K)
    float *R, *RW;           // (chunk,chunk)
    float *dnum;             // (chunk,V)
    float *T, *J, *Q;        // (chunk,K)
    float da[MN_STAT_CHUNK];
} work;

static int64_t chunks_of(int64_t length) {
    return mn_ceil_div(length, MN_STAT_CHUNK);
}

/* The gradients that are sums over value columns. */
static mn_parts parts_of(mn_mlstm_args *p, const mn_call *c) {
    return (mn_parts){ .call = c, .tiles = mn_column_tiles_of(c).count, .n = 6,
                       .part = { { &p->grad.q, c->K }, { &p->grad.k, c->K }, { &p->grad.ipre, 1 },
                                 { &p->grad.fpre, 1 }, { &p->grad.n0, c->K, true },
                                 { &p->grad.m0, 1, true } } };
}

bool MN_T(mn_mlstm_backward_plan)(const void *args, mn_plan *plan) {
    const mn_call *c = args;
    mn_mlstm_args all = *(const mn_mlstm_args *)args;
    const mn_parts parts = parts_of(&all, c);
    const int64_t segments = mn_ceil_div(chunks_of(mn_longest_sequence(c)), MN_STAT_SEGMENT);
    int64_t states, count, widths, shared;
    plan->n_phases = 2;
    plan->items[0] = mn_n_sequences(c) * c->H * parts.tiles;
    plan->items[1] = mn_parts_items(&parts);
    return mn_parts_floats(&shared, &parts) &&
           mn_mul_size(&plan->shared_bytes, (size_t)shared, sizeof(float)) &&
           MN_T(mn_mlstm_state_floats)(&states, c) &&
           mn_mul_i64(&states, states, segments + MN_STAT_SEGMENT + 1) &&
           MN_T(mn_mlstm_chunk_floats)(&count, c) && mn_add_i64(&count, count, states) &&
           mn_mul_i64(&widths, c->K, 3) && mn_add_i64(&widths, widths, c->V) &&
           mn_mul_i64(&widths, widths, MN_STAT_CHUNK) && mn_add_i64(&count, count, widths) &&
           mn_add_i64(&count, count, 2 * MN_STAT_CHUNK * MN_STAT_CHUNK) &&
           mn_mul_size(&plan->scratch_bytes, (size_t)count, sizeof(float));
}

static void place(work *w, float *at, const mn_call *call) {
    const int64_t segments = mn_ceil_div(chunks_of(mn_longest_sequence(call)), MN_STAT_SEGMENT);
    const int64_t rows = MN_STAT_CHUNK * call->K, square = MN_STAT_CHUNK * MN_STAT_CHUNK;
    at = MN_T(mn_mlstm_chunk_place)(&w->c, at, call);
    (void)MN_T(mn_mlstm_state_floats)(&w->size, call);
    w->kept = at, at += segments * w->size;
    w->states = at, at += MN_STAT_SEGMENT * w->size;
    w->D = at, w->d = at + call->K * call->V, at += w->size;
    w->R = at, at += square;
    w->RW = at, at += square;
    w->dnum = at, at += MN_STAT_CHUNK * call->V;
    w->T = at, at += rows;
    w->J = at, at += rows;
    w->Q = at;
}

/* dnum and da of the chunk, zero without a cotangent. */
static void quotient_backward(work *w, const mn_mlstm_args *p) {
    mn_mlstm_chunk *c = &w->c;
    const int64_t V = p->call.V;
    const mn_mat d_o = mn_mat_rows(p->cot.o, c->b, c->t0, c->h);
    for (int64_t t = 0; t < c->L; t++) {
        float *dnum = w->dnum + t * V;
        const float *from = d_o.at ? mn_row_of(d_o, t) : NULL, *num = c->num + t * V;
        const double over = c->over[t] < FLT_MAX ? c->over[t] : FLT_MAX;
        double inner = 0.0;
        for (int64_t j = 0; j < V; j++) {
            const double x = from ? from[j] : 0.0f;
            dnum[j] = (float)(x * over);
            inner += x * num[j];
        }
        w->da[t] = c->bounded[t] ? 0.0f : (float)(-inner * c->over[t] / c->a[t]);
    }
}

/* R, W.R in RW, and E in the place of P: what P still serves for, dV, comes first. */
static void pair_products(work *w, const mn_mlstm_args *p) {
    mn_mlstm_chunk *c = &w->c;
    MN_T(mn_stat_scores)(w->R, mn_mat_of(w->dnum, p->call.V), c->v, c->L, p->call.V);
    for (int64_t t = 0; t < c->L; t++) {
        for (int64_t s = 0; s <= t; s++) w->R[t * MN_STAT_CHUNK + s] += w->da[t];
    }
    MN_T(mn_stat_weigh)(w->RW, w->R, c->W, c->L);
}

/* dv = scale P'dnum + Kw D */
static void value_backward(work *w, const mn_mlstm_args *p) {
    mn_mlstm_chunk *c = &w->c;
    const int64_t K = p->call.K, V = p->call.V;
    const mn_mat dv = mn_mat_rows_out(p->grad.v, c->b, c->t0, c->h);
    if (!dv.at) return;
    mn_gemm_args g = mn_product(dv, mn_mat_of(c->Kw, K), mn_mat_of(w->D, V),
                                (mn_dims){ c->L, V, K });
    MN_T(mn_gemm)(&g);
    g = mn_product(dv, mn_transposed(mn_mat_of(c->P, MN_STAT_CHUNK)), mn_mat_of(w->dnum, V),
                   (mn_dims){ c->L, V, c->L });
    g.alpha = (float)p->scale;
    g.base = MN_GEMM_ADD;
    g.shape = MN_GEMM_A_UPPER;
    MN_T(mn_gemm)(&g);
}

/* dq, and late[t] = scale first_t q_t.T_t */
static void query_backward(double *late, work *w, const mn_mlstm_args *p, mn_mlstm_state S) {
    mn_mlstm_chunk *c = &w->c;
    const int64_t K = p->call.K, V = p->call.V;
    const float scale = (float)p->scale;
    mn_gemm_args g = mn_product(mn_mat_of(w->T, K), mn_mat_of(w->dnum, V), mn_mat_of(S.C, V),
                                (mn_dims){ c->L, K, V });
    MN_T(mn_gemm_nt)(&g);
    for (int64_t t = 0; t < c->L; t++) {
        float *T = w->T + t * K;
        mn_axpy(T, w->da[t], S.n, K);
        mn_scale(T, scale * c->first[t], T, K);
        late[t] = vf_dot_row(mn_row_of(c->q, t), T, K);
    }
    const mn_mat dq = mn_mat_rows_out(p->grad.q, c->b, c->t0, c->h);
    if (!dq.at) return;
    g = mn_product(dq, mn_mat_of(w->RW, MN_STAT_CHUNK), c->k, (mn_dims){ c->L, K, c->L });
    g.alpha = scale;
    g.shape = MN_GEMM_A_LOWER;
    MN_T(mn_gemm)(&g);
    for (int64_t t = 0; t < c->L; t++) mn_axpy(mn_row_of(dq, t), 1.0f, w->T + t * K, K);
}

/* dk, and early[s] = k_s.J_s */
static void key_backward(double *early, work *w, const mn_mlstm_args *p) {
    mn_mlstm_chunk *c = &w->c;
    const int64_t K = p->call.K, V = p->call.V;
    mn_gemm_args g = mn_product(mn_mat_of(w->J, K), c->v, mn_mat_of(w->D, V),
                                (mn_dims){ c->L, K, V });
    MN_T(mn_gemm_nt)(&g);
    for (int64_t s = 0; s < c->L; s++) {
        float *J = w->J + s * K;
        mn_axpy(J, 1.0f, w->d, K);
        mn_scale(J, c->last[s], J, K);
        early[s] = vf_dot_row(mn_row_of(c->k, s), J, K);
    }
    const mn_mat dk = mn_mat_rows_out(p->grad.k, c->b, c->t0, c->h);
    if (!dk.at) return;
    g = mn_product(dk, mn_transposed(mn_mat_of(w->RW, MN_STAT_CHUNK)), c->q,
                   (mn_dims){ c->L, K, c->L });
    g.alpha = (float)p->scale;
    g.shape = MN_GEMM_A_UPPER;
    MN_T(mn_gemm)(&g);
    for (int64_t s = 0; s < c->L; s++) mn_axpy(mn_row_of(dk, s), 1.0f, w->J + s * K, K);
}

/* D.C + d.n */
static double inner_product(const work *w, mn_mlstm_state S, const mn_call *call) {
    double sum = vf_dot_row(w->d, S.n, call->K);
    for (int64_t i = 0; i < call->K; i++) {
        sum += vf_dot_row(w->D + i * call->V, S.C + i * call->V, call->V);
    }
    return sum;
}

/* dipre and dfpre; E is scale P.R, in the place of P. */
static void gate_backward(work *w, const mn_mlstm_args *p, mn_mlstm_state S, const double *late,
                          const double *early) {
    mn_mlstm_chunk *c = &w->c;
    double flow[MN_STAT_CHUNK], all = c->first[c->L - 1] * inner_product(w, S, &p->call);
    MN_T(mn_stat_weigh)(c->P, c->P, w->R, c->L);
    for (int64_t t = 0; t < c->L; t++) mn_scale(c->P + t * MN_STAT_CHUNK, (float)p->scale,
                                                c->P + t * MN_STAT_CHUNK, t + 1);
    MN_T(mn_stat_flow)(flow, all, late, early, c->P, c->L);
    for (int64_t t = 0; t < c->L; t++) {
        float *dipre = MN_ROW_OUT(float, p->grad.ipre, c->b, c->t0 + t, c->h);
        float *dfpre = MN_ROW_OUT(float, p->grad.fpre, c->b, c->t0 + t, c->h);
        if (dipre) *dipre = (float)(MN_T(mn_stat_column_sum)(c->P, t, c->L) + early[t]);
        if (dfpre) *dfpre = (float)(flow[t] * c->slope[t]);
    }
}

/* D and d of the chunk before. */
static void adjoint_back(work *w, const mn_mlstm_args *p) {
    mn_mlstm_chunk *c = &w->c;
    const int64_t K = p->call.K, V = p->call.V;
    const float fall = c->first[c->L - 1];
    mn_scale(w->d, fall, w->d, K);
    for (int64_t t = 0; t < c->L; t++) {
        mn_scale(w->Q + t * K, (float)p->scale * c->first[t], mn_row_of(c->q, t), K);
        mn_axpy(w->d, w->da[t], w->Q + t * K, K);
    }
    MN_T(mn_stat_add_products)(mn_mat_of(w->D, V), fall, 1.0f, mn_mat_of(w->Q, K),
                               mn_mat_of(w->dnum, V), (mn_dims){ K, V, c->L });
}

static void chunk_backward(work *w, const mn_mlstm_args *p, const mn_sequence *seq, int64_t h,
                           int64_t start, mn_mlstm_state S) {
    double late[MN_STAT_CHUNK], early[MN_STAT_CHUNK];
    MN_T(mn_mlstm_prepare)(&w->c, p, seq, h, start, S, true);
    MN_T(mn_mlstm_read)(&w->c, p, S);
    quotient_backward(w, p);
    pair_products(w, p);
    value_backward(w, p);
    query_backward(late, w, p, S);
    key_backward(early, w, p);
    gate_backward(w, p, S, late, early);
    adjoint_back(w, p);
}

/* Carries the state in `from` over the chunks [first, end); `to` + i size is the one after chunk
 * first + i, where `step` is the size, or all in one place for step 0. */
static void advance_over(work *w, const mn_mlstm_args *p, const mn_sequence *seq, int64_t h,
                         float *at, int64_t step, int64_t first, int64_t end) {
    for (int64_t i = first; i < end; i++) {
        const mn_mlstm_state S = MN_T(mn_mlstm_state_at)(at + step, &p->call);
        if (step) memcpy(at + step, at, (size_t)w->size * sizeof *at);
        MN_T(mn_mlstm_prepare)(&w->c, p, seq, h, i * MN_STAT_CHUNK, S, false);
        MN_T(mn_mlstm_advance)(S, &w->c, p);
        at += step;
    }
}

/* States at the starts of all segments; `states` ends up holding the final one. */
static void keep_states(work *w, const mn_mlstm_tile *tile, const mn_sequence *seq, int64_t n,
                        int64_t h) {
    const mn_mlstm_args *p = &tile->args;
    const int64_t n_chunks = chunks_of(seq->length);
    MN_T(mn_mlstm_state_load)(MN_T(mn_mlstm_state_at)(w->states, &p->call), tile, n, h);
    for (int64_t i = 0; i < n_chunks; i += MN_STAT_SEGMENT) {
        memcpy(w->kept + i / MN_STAT_SEGMENT * w->size, w->states,
               (size_t)w->size * sizeof *w->kept);
        advance_over(w, p, seq, h, w->states, 0, i, mn_min(n_chunks, i + MN_STAT_SEGMENT));
    }
}

/* The cotangents of csum and nsum in units of exp(-m). */
static void load_adjoint(work *w, const mn_mlstm_tile *tile, double m, int64_t n, int64_t h) {
    const mn_mlstm_args *p = &tile->args;
    const int64_t K = p->call.K, V = p->call.V;
    const float *dcsum = MN_ROW(float, p->cot.csum, n, 0, h);
    const float *dnsum = MN_ROW(float, p->cot.nsum, n, 0, h);
    const double unit = exp(m);
    for (int64_t i = 0; i < K * V; i++) {
        const int64_t at = i / V * tile->row + i % V;
        w->D[i] = dcsum ? mn_zero_safe(dcsum[at], unit) : 0.0f;
    }
    for (int64_t i = 0; i < K; i++) w->d[i] = dnsum ? mn_zero_safe(dnsum[i], unit) : 0.0f;
}

static void store_initial(work *w, const mn_mlstm_tile *tile, int64_t n, int64_t h) {
    const mn_mlstm_args *p = &tile->args;
    const mn_mlstm_state S = MN_T(mn_mlstm_state_at)(w->states, &p->call);
    float *dm0 = MN_ROW_OUT(float, p->grad.m0, n, 0, h);
    MN_T(mn_mlstm_state_load)(S, tile, n, h);
    MN_T(mn_stat_store_rows)(MN_ROW_OUT(float, p->grad.C0, n, 0, h), tile->row, w->D, p->call.K,
                             p->call.V);
    MN_T(mn_stat_store)(MN_ROW_OUT(float, p->grad.n0, n, 0, h), w->d, p->call.K);
    if (dm0) *dm0 = (float)inner_product(w, S, &p->call);
}

void MN_T(mn_mlstm_backward_run)(const void *args, int phase, int64_t item, void *shared,
                                 void *scratch) {
    const mn_call *whole = args;
    const int64_t tiles = mn_column_tiles_of(whole).count;
    const int64_t n = item / tiles / whole->H, h = item / tiles % whole->H;
    mn_mlstm_tile tile = MN_T(mn_mlstm_tile_at)(args, phase == 0 ? item % tiles : 0);
    const mn_mlstm_args *p = &tile.args;
    const mn_parts parts = parts_of(&tile.args, whole);
    if (phase == 1) {
        mn_parts_add(&parts, shared, item);
        return;
    }
    mn_parts_redirect(&parts, shared, item % tiles);
    const mn_sequence seq = mn_sequence_at(whole, n);
    const int64_t n_chunks = chunks_of(seq.length);
    work w;
    place(&w, scratch, &p->call);
    keep_states(&w, &tile, &seq, n, h);
    load_adjoint(&w, &tile, *MN_T(mn_mlstm_state_at)(w.states, &p->call).m, n, h);
    for (int64_t segment = mn_ceil_div(n_chunks, MN_STAT_SEGMENT) - 1; segment >= 0; segment--) {
        const int64_t first = segment * MN_STAT_SEGMENT;
        const int64_t end = mn_min(n_chunks, first + MN_STAT_SEGMENT);
        memcpy(w.states, w.kept + segment * w.size, (size_t)w.size * sizeof *w.states);
        advance_over(&w, p, &seq, h, w.states, w.size, first, end - 1);
        for (int64_t i = end - 1; i >= first; i--) {
            const mn_mlstm_state S = MN_T(mn_mlstm_state_at)(w.states + (i - first) * w.size,
                                                             &p->call);
            chunk_backward(&w, p, &seq, h, i * MN_STAT_CHUNK, S);
        }
    }
    store_initial(&w, &tile, n, h);
}
