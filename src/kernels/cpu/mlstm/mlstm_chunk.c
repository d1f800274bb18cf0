/* mlstm_chunk.c - gates, weights, reads and state of one chunk of mlstm. */
#include "kernels/cpu/mlstm/mlstm.h"

#include <string.h>

bool MN_T(mn_mlstm_chunk_floats)(int64_t *count, const mn_call *call) {
    int64_t rows;
    return mn_add_i64(&rows, call->K, call->V) &&
           mn_mul_i64(count, MN_STAT_CHUNK, rows) &&
           mn_add_i64(count, *count, 2 * MN_STAT_CHUNK * MN_STAT_CHUNK);
}

float *MN_T(mn_mlstm_chunk_place)(mn_mlstm_chunk *c, float *at, const mn_call *call) {
    c->W = at, at += MN_STAT_CHUNK * MN_STAT_CHUNK;
    c->P = at, at += MN_STAT_CHUNK * MN_STAT_CHUNK;
    c->num = at, at += MN_STAT_CHUNK * call->V;
    c->Kw = at, at += MN_STAT_CHUNK * call->K;
    return at;
}

bool MN_T(mn_mlstm_state_floats)(int64_t *count, const mn_call *call) {
    int64_t width;
    return mn_add_i64(&width, call->V, 1) && mn_mul_i64(count, call->K, width) &&
           mn_add_i64(count, *count, 1);
}

mn_mlstm_state MN_T(mn_mlstm_state_at)(float *at, const mn_call *call) {
    float *n = at + call->K * call->V;
    return (mn_mlstm_state){ at, n, n + call->K };
}

mn_mlstm_tile MN_T(mn_mlstm_tile_at)(const mn_mlstm_args *p, int64_t tile) {
    mn_mlstm_tile t = { *p, p->call.V };
    const mn_columns col = mn_columns_at(&p->call, mn_column_tiles_of(&p->call), tile);
    t.args.call.V = col.n;
    t.args.v = mn_in_from(p->v, col.j0), t.args.C0 = mn_in_from(p->C0, col.j0);
    t.args.o = mn_out_from(p->o, col.j0), t.args.C = mn_out_from(p->C, col.j0);
    t.args.csum = mn_out_from(p->csum, col.j0);
    t.args.cot.o = mn_in_from(p->cot.o, col.j0), t.args.cot.csum = mn_in_from(p->cot.csum, col.j0);
    t.args.grad.v = mn_out_from(p->grad.v, col.j0);
    t.args.grad.C0 = mn_out_from(p->grad.C0, col.j0);
    if (tile > 0) {
        t.args.n.data = t.args.m.data = t.args.nsum.data = NULL;
        t.args.cot.nsum.data = NULL;
    }
    return t;
}

void MN_T(mn_mlstm_state_load)(mn_mlstm_state S, const mn_mlstm_tile *tile, int64_t n, int64_t h) {
    const mn_mlstm_args *p = &tile->args;
    const float *m = MN_ROW(float, p->m0, n, 0, h);
    MN_T(mn_stat_load_rows)(S.C, MN_ROW(float, p->C0, n, 0, h), tile->row, p->call.K, p->call.V);
    MN_T(mn_stat_load)(S.n, MN_ROW(float, p->n0, n, 0, h), p->call.K);
    *S.m = m ? *m : -INFINITY;
}

/* The stabilisers of the chunk, and F and ipre - F of its tokens, the exponents of the weights. Any
 * number near m_t serves, so the one that goes on to the next chunk is rounded to what a state
 * holds. */
static void load_gates(mn_mlstm_chunk *c, const mn_mlstm_args *p, double m, double *F, double *in) {
    double sum = 0.0;
    for (int64_t t = 0; t < c->L; t++) {
        const double fpre = *MN_ROW(float, p->fpre, c->b, c->t0 + t, c->h);
        const double ipre = *MN_ROW(float, p->ipre, c->b, c->t0 + t, c->h);
        const double z = exp(-fabs(fpre));
        double lf = (fpre < 0.0 ? fpre : 0.0) - log1p(z);
        if (lf < mn_lowest_log) lf = mn_lowest_log;
        c->slope[t] = (fpre < 0.0 ? 1.0 : z) / (1.0 + z);
        m = lf + m > ipre ? lf + m : ipre;
        if (t == c->L - 1) m = (float)m;
        sum += lf;
        c->m[t] = m;
        F[t] = sum;
        in[t] = ipre - sum;
    }
}

void MN_T(mn_mlstm_prepare)(mn_mlstm_chunk *c, const mn_mlstm_args *p, const mn_sequence *seq,
                            int64_t h, int64_t start, mn_mlstm_state S, bool reads) {
    const int64_t K = p->call.K;
    double F[MN_STAT_CHUNK], in[MN_STAT_CHUNK], out[MN_STAT_CHUNK];
    c->b = seq->b;
    c->t0 = seq->t0 + start;
    c->h = h;
    c->L = mn_min(seq->length - start, MN_STAT_CHUNK);
    c->q = mn_mat_rows(p->q, c->b, c->t0, h);
    c->k = mn_mat_rows(p->k, c->b, c->t0, h);
    c->v = mn_mat_rows(p->v, c->b, c->t0, h);
    mn_prefetch_rows(c->k, c->L, K);
    mn_prefetch_rows(c->v, c->L, p->call.V);
    if (reads) mn_prefetch_rows(c->q, c->L, K);
    load_gates(c, p, *S.m, F, in);
    for (int64_t t = 0; t < c->L; t++) {
        const bool stored = c->m[t] > -INFINITY;    // else all there is has weight 0
        out[t] = stored ? F[t] - c->m[t] : 0.0;
        c->first[t] = (float)mn_relative_exp(F[t] + *S.m, c->m[t]);
    }
    MN_T(mn_stat_weights)(c->W, out, in, reads ? 0 : c->L - 1, c->L);
    for (int64_t s = 0; s < c->L; s++) {
        c->last[s] = c->W[(c->L - 1) * MN_STAT_CHUNK + s];
        mn_scale(c->Kw + s * K, c->last[s], mn_row_of(c->k, s), K);
    }
}

/* The quotient's parts of token t, from row t of P and num. */
static void read_token(mn_mlstm_chunk *c, const mn_mlstm_args *p, mn_mlstm_state S, int64_t t) {
    const float *row = c->P + t * MN_STAT_CHUNK;
    double a = c->first[t] * vf_dot_row(mn_row_of(c->q, t), S.n, p->call.K);
    for (int64_t s = 0; s <= t; s++) a += row[s];
    a *= p->scale;
    const double bound = exp(-c->m[t]), size = fabs(a);
    const double den = size > bound ? size : bound;
    c->a[t] = a;
    c->bounded[t] = !(size > bound);
    c->over[t] = den > 0.0 ? 1.0 / den : 0.0;
}

void MN_T(mn_mlstm_read)(mn_mlstm_chunk *c, const mn_mlstm_args *p, mn_mlstm_state S) {
    const int64_t K = p->call.K, V = p->call.V;
    const float scale = (float)p->scale;
    float first[MN_STAT_CHUNK];
    for (int64_t t = 0; t < c->L; t++) first[t] = scale * c->first[t];
    MN_T(mn_stat_scores)(c->P, c->q, c->k, c->L, K);
    MN_T(mn_stat_weigh)(c->P, c->P, c->W, c->L);
    const mn_mat num = mn_mat_of(c->num, V);
    mn_gemm_args g = mn_product(num, c->q, mn_mat_of(S.C, V), (mn_dims){ c->L, V, K });
    MN_T(mn_gemm)(&g);
    g = mn_product(num, mn_mat_of(c->P, MN_STAT_CHUNK), c->v, (mn_dims){ c->L, V, c->L });
    g.base = MN_GEMM_SCALE;
    g.c_scale = first;
    g.alpha = scale;
    g.shape = MN_GEMM_A_LOWER;
    MN_T(mn_gemm)(&g);
    for (int64_t t = 0; t < c->L; t++) read_token(c, p, S, t);
}

void MN_T(mn_mlstm_advance)(mn_mlstm_state S, const mn_mlstm_chunk *c, const mn_mlstm_args *p) {
    const int64_t K = p->call.K, V = p->call.V;
    const float fall = c->first[c->L - 1];
    mn_scale(S.n, fall, S.n, K);
    for (int64_t s = 0; s < c->L; s++) mn_axpy(S.n, 1.0f, c->Kw + s * K, K);
    MN_T(mn_stat_add_products)(mn_mat_of(S.C, V), fall, 1.0f, mn_mat_of(c->Kw, K), c->v,
                               (mn_dims){ K, V, c->L });
    *S.m = (float)c->m[c->L - 1];
}
