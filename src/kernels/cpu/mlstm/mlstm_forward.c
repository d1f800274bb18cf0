/* mlstm_forward.c - outputs and states of mlstm, chunk after chunk, and the decode step. One item
 * is some value columns of one head of one sequence; gates and scores are made by each. */
#include <string.h>

#include "kernels/cpu/mlstm/mlstm.h"

bool MN_T(mn_mlstm_forward_plan)(const void *args, mn_plan *plan) {
    const mn_call *c = args;
    int64_t state, count;
    plan->n_phases = 1;
    plan->items[0] = mn_n_sequences(c) * c->H * mn_column_tiles_of(c).count;
    return MN_T(mn_mlstm_state_floats)(&state, c) && MN_T(mn_mlstm_chunk_floats)(&count, c) &&
           mn_add_i64(&count, count, state) &&
           mn_mul_size(&plan->scratch_bytes, (size_t)count, sizeof(float));
}

static void write_outputs(const mn_mlstm_chunk *c, const mn_mlstm_args *p) {
    const mn_mat o = mn_mat_rows_out(p->o, c->b, c->t0, c->h);
    for (int64_t t = 0; t < c->L; t++) {
        const float *num = c->num + t * p->call.V;
        float *row = mn_row_of(o, t);
        for (int64_t j = 0; j < p->call.V; j++) row[j] = (float)(num[j] * c->over[t]);
    }
}

static void store_state(const mn_mlstm_tile *tile, mn_mlstm_state S, int64_t n, int64_t h) {
    const mn_mlstm_args *p = &tile->args;
    const int64_t K = p->call.K, V = p->call.V;
    float *csum = MN_ROW_OUT(float, p->csum, n, 0, h), *nsum = MN_ROW_OUT(float, p->nsum, n, 0, h);
    float *m = MN_ROW_OUT(float, p->m, n, 0, h);
    const double unit = exp(*S.m);
    MN_T(mn_stat_store_rows)(MN_ROW_OUT(float, p->C, n, 0, h), tile->row, S.C, K, V);
    MN_T(mn_stat_store)(MN_ROW_OUT(float, p->n, n, 0, h), S.n, K);
    for (int64_t i = 0; csum && i < K; i++) {
        for (int64_t j = 0; j < V; j++) csum[i * tile->row + j] = (float)(S.C[i * V + j] * unit);
    }
    for (int64_t i = 0; nsum && i < K; i++) nsum[i] = (float)(S.n[i] * unit);
    if (m) *m = *S.m;
}

typedef struct gates {
    float f, i, m;
} gates;

static gates step_gates(const mn_mlstm_args *p, const mn_sequence *seq, int64_t n, int64_t h) {
    const double fpre = *MN_ROW(float, p->fpre, seq->b, seq->t0, h);
    const double ipre = *MN_ROW(float, p->ipre, seq->b, seq->t0, h);
    const float *m0 = MN_ROW(float, p->m0, n, 0, h);
    const double lf = (fpre < 0.0 ? fpre : 0.0) - log1p(exp(-fabs(fpre)));
    const double decayed = lf + (m0 ? (double)*m0 : -INFINITY);
    const float m = (float)(decayed > ipre ? decayed : ipre);
    return (gates){ (float)mn_relative_exp(decayed, m), (float)mn_relative_exp(ipre, m), m };
}

/* row = f row0 + x v, kept unless `row` is NULL, times `unit` in `sum` if wanted; num += q row */
static void step_row(float *num, float *row, float *sum, const float *row0, const float *v,
                     const gates *g, float k, float q, float unit, int64_t V) {
    const vf f = vf_set1(g->f), x = vf_set1(g->i * k), weight = vf_set1(q), factor = vf_set1(unit);
    for (int64_t j = 0; j < V; j += MN_VW) {
        const int n = vf_lanes(V - j);
        const vf old = row0 ? vf_mul(f, vf_load_row(row0 + j, n)) : vf_zero();
        const vf y = vf_fma(x, vf_load_row(v + j, n), old);
        if (row) vf_store_row(row + j, y, n);
        if (sum) vf_store_row(sum + j, vf_mul(factor, y), n);
        vf_store_row(num + j, vf_fma(weight, y, vf_load_row(num + j, n)), n);
    }
}

/* A sequence of one token: each row of the state is read and written once. */
static void step(const mn_mlstm_args *p, const mn_sequence *seq, int64_t n, int64_t h, float *num) {
    const int64_t K = p->call.K, V = p->call.V, b = seq->b, t = seq->t0;
    const float *q = MN_ROW(float, p->q, b, t, h), *k = MN_ROW(float, p->k, b, t, h);
    const float *v = MN_ROW(float, p->v, b, t, h);
    const float *C0 = MN_ROW(float, p->C0, n, 0, h), *n0 = MN_ROW(float, p->n0, n, 0, h);
    float *C = MN_ROW_OUT(float, p->C, n, 0, h), *csum = MN_ROW_OUT(float, p->csum, n, 0, h);
    float *norm = MN_ROW_OUT(float, p->n, n, 0, h), *nsum = MN_ROW_OUT(float, p->nsum, n, 0, h);
    float *o = MN_ROW_OUT(float, p->o, b, t, h), *m = MN_ROW_OUT(float, p->m, n, 0, h);
    const gates g = step_gates(p, seq, n, h);
    const float unit = (float)exp(g.m);
    double a = 0.0;
    memset(num, 0, (size_t)V * sizeof *num);
    for (int64_t i = 0; i < K; i++) {
        const int64_t at = i * V;
        const float x = g.i * k[i] + (n0 ? g.f * n0[i] : 0.0f);
        step_row(num, C ? C + at : NULL, csum ? csum + at : NULL, C0 ? C0 + at : NULL, v, &g, k[i],
                 q[i], unit, V);
        a += (double)q[i] * x;
        if (norm) norm[i] = x;
        if (nsum) nsum[i] = x * unit;
    }
    if (m) *m = g.m;
    const double bound = exp(-g.m), size = fabs(p->scale * a), den = size > bound ? size : bound;
    const double over = den > 0.0 ? p->scale / den : 0.0;
    for (int64_t j = 0; o && j < V; j++) o[j] = (float)(num[j] * over);
}

void MN_T(mn_mlstm_forward_run)(const void *args, int phase, int64_t item, void *shared,
                                void *scratch) {
    (void)phase, (void)shared;
    const mn_call *call = args;
    const int64_t tiles = mn_column_tiles_of(call).count, head = item / tiles;
    const int64_t n = head / call->H, h = head % call->H;
    const mn_sequence seq = mn_sequence_at(call, n);
    if (seq.length == 1) {
        if (item % tiles == 0) step(args, &seq, n, h, scratch);
        return;
    }
    const mn_mlstm_tile tile = MN_T(mn_mlstm_tile_at)(args, item % tiles);
    const mn_mlstm_args *p = &tile.args;
    mn_mlstm_chunk c;
    const mn_mlstm_state S =
        MN_T(mn_mlstm_state_at)(MN_T(mn_mlstm_chunk_place)(&c, scratch, &p->call), &p->call);
    MN_T(mn_mlstm_state_load)(S, &tile, n, h);
    for (int64_t start = 0; start < seq.length; start += MN_STAT_CHUNK) {
        MN_T(mn_mlstm_prepare)(&c, p, &seq, h, start, S, p->o.data);
        if (p->o.data) {
            MN_T(mn_mlstm_read)(&c, p, S);
            write_outputs(&c, p);
        }
        MN_T(mn_mlstm_advance)(S, &c, p);
    }
    store_state(&tile, S, n, h);
}

/* One token of every sequence: the same work with less room. */
bool MN_T(mn_mlstm_step_plan)(const void *args, mn_plan *plan) {
    const mn_call *c = args;
    plan->n_phases = 1;
    plan->items[0] = c->B * c->H;
    return mn_mul_size(&plan->scratch_bytes, (size_t)c->V, sizeof(float));
}

void MN_T(mn_mlstm_step_run)(const void *args, int phase, int64_t item, void *shared,
                             void *scratch) {
    (void)phase, (void)shared;
    const mn_call *call = args;
    const int64_t n = item / call->H;
    const mn_sequence seq = mn_sequence_at(call, n);
    step(args, &seq, n, item % call->H, scratch);
}
