/* mesa_step.c - one token of mesa, the statistics in place: each row is read and written once, Hkk
 * first, then Hkv with x.
 *
 * Between the two lie the K^3 / 6 multiply-adds that find x and ask nothing of memory; meanwhile
 * Hkv of the head and Hkk of the next one are brought near. */
#include <string.h>

#include "kernels/cpu/mesa/mesa.h"
#include "kernels/cpu/simd/ahead.h"

/* Narrower heads are solved in double: there the factor is little work. */
enum { NARROW = 32 };
/* Heads that an item takes one after the other, where there are many. */
enum { MOST_HEADS = 8, MANY_ITEMS = 64 };

static int64_t heads_of_item(const mn_call *c) {
    return mn_max(1, mn_min(MOST_HEADS, c->B * c->H / MANY_ITEMS));
}

/* row = a row0 + x from; kept in row and copy where they are not NULL. */
static void step_row(float *row, float *copy, const float *row0, const float *from, float a,
                     float x, int64_t width) {
    const vf fall = vf_set1(a), factor = vf_set1(x);
    for (int64_t j = 0; j < width; j += MN_VW) {
        const int n = vf_lanes(width - j);
        const vf old = row0 ? vf_mul(fall, vf_load_row(row0 + j, n)) : vf_zero();
        const vf y = vf_fma(factor, vf_load_row(from + j, n), old);
        if (row) vf_store_row(row + j, y, n);
        if (copy) vf_store(copy + j, y);
    }
}

/* row as above; sum += w row */
static void step_read_row(float *row, float *sum, const float *row0, const float *from, float a,
                          float x, float w, int64_t width) {
    const vf fall = vf_set1(a), factor = vf_set1(x), weight = vf_set1(w);
    for (int64_t j = 0; j < width; j += MN_VW) {
        const int n = vf_lanes(width - j);
        const vf old = row0 ? vf_mul(fall, vf_load_row(row0 + j, n)) : vf_zero();
        const vf y = vf_fma(factor, vf_load_row(from + j, n), old);
        if (row) vf_store_row(row + j, y, n);
        vf_store_row(sum + j, vf_fma(weight, y, vf_load_row(sum + j, n)), n);
    }
}

/* x = (H + diag lam)^-1 b by a factor in double */
static void solve_wide(mn_mesa_refiner *s, double *U, const float *lam) {
    for (int64_t i = 0; i < s->K; i++) {
        for (int64_t j = 0; j < s->K; j++) U[i * s->K + j] = s->H[i * s->N + j];
        U[i * s->K + i] += lam[i];
        s->x[i] = s->b[i];
    }
    MN_T(mn_mesa_factorise)(U, s->K);
    MN_T(mn_mesa_substitute)(s->x, U, s->K);
}

/* Room for the refiner, a factor in double, and o. */
bool MN_T(mn_mesa_token_plan)(const void *args, mn_plan *plan) {
    const mn_call *c = args;
    int64_t square;
    size_t refiner, wide, row;
    plan->n_phases = 1;
    plan->items[0] = mn_ceil_div(c->B * c->H, heads_of_item(c));
    return MN_T(mn_mesa_refiner_bytes)(&refiner, c->K) && mn_mul_i64(&square, c->K, c->K) &&
           mn_mul_size(&wide, (size_t)square, sizeof(double)) &&
           mn_mul_size(&row, (size_t)c->V, sizeof(float)) && mn_add_size(&row, row, refiner) &&
           mn_add_size(&plan->scratch_bytes, wide, row);
}

void MN_T(mn_mesa_token)(const mn_mesa_args *p, const mn_sequence *seq, int64_t n, int64_t h,
                         const float *next, void *scratch) {
    const int64_t K = p->call.K, V = p->call.V, b = seq->b, t = seq->t0;
    const float *q = MN_ROW(float, p->q, b, t, h), *k = MN_ROW(float, p->k, b, t, h);
    const float *v = MN_ROW(float, p->v, b, t, h), *lam = MN_ROW(float, p->lam, 0, 0, h);
    const float *kk0 = MN_ROW(float, p->hkk0, n, 0, h), *kv0 = MN_ROW(float, p->hkv0, n, 0, h);
    float *kk = MN_ROW_OUT(float, p->hkk, n, 0, h), *kv = MN_ROW_OUT(float, p->hkv, n, 0, h);
    float *o = MN_ROW_OUT(float, p->o, b, t, h);
    const float *g = p->g.data, *beta_of = p->beta.data;
    const float a = (float)exp((double)g[MN_OFFSET(p->g, b, t, h)]);
    const float beta = beta_of[MN_OFFSET(p->beta, b, t, h)];
    mn_mesa_refiner s;
    double *U = scratch;
    MN_T(mn_mesa_refiner_place)(&s, U + K * K, K);
    float *sum = s.d + s.N;
    const mn_mesa_ahead ahead = {
        kv0 ? kv0 : q, next ? next : q,
        kv0 ? mn_ceil_div(K * V, MN_LINE) : 0, next ? mn_ceil_div(K * K, MN_LINE) : 0,
    };
    for (int64_t i = 0; i < K; i++) {
        step_row(kk ? kk + i * K : NULL, o ? s.H + i * s.N : NULL, kk0 ? kk0 + i * K : NULL, k, a,
                 beta * k[i], K);
        s.b[i] = p->scale * q[i];
    }
    if (o) {
        if (K <= NARROW || !MN_T(mn_mesa_refine)(&s, lam, ahead)) solve_wide(&s, U, lam);
        memset(sum, 0, (size_t)V * sizeof *sum);
    }
    for (int64_t i = 0; i < K; i++) {
        const float *row0 = kv0 ? kv0 + i * V : NULL;
        float *row = kv ? kv + i * V : NULL;
        if (o) step_read_row(row, sum, row0, v, a, beta * k[i], (float)s.x[i], V);
        else if (row) step_row(row, NULL, row0, v, a, beta * k[i], V);
    }
    MN_T(mn_stat_store)(o, sum, V);
}

bool MN_T(mn_mesa_step_plan)(const void *args, mn_plan *plan) {
    const mn_mesa_args *p = args;
    if (p->steps == 0) return MN_T(mn_mesa_token_plan)(args, plan);
    if (!MN_T(mn_mesa_forward_plan)(args, plan)) return false;
    plan->n_phases = 1;    // one token is not cut
    plan->items[0] = plan->items[1];
    return true;
}

void MN_T(mn_mesa_step_run)(const void *args, int phase, int64_t item, void *shared,
                            void *scratch) {
    (void)phase;
    const mn_mesa_args *p = args;
    if (p->steps > 0) {
        MN_T(mn_mesa_forward_run)(args, 1, item, shared, scratch);
        return;
    }
    const int64_t H = p->call.H, all = p->call.B * H, first = item * heads_of_item(&p->call);
    const int64_t end = mn_min(all, first + heads_of_item(&p->call));
    for (int64_t at = first; at < end; at++) {
        const mn_sequence seq = mn_sequence_at(&p->call, at / H);
        const int64_t after = at + 1;
        const float *next = after < end ? MN_ROW(float, p->hkk0, after / H, 0, after % H) : NULL;
        MN_T(mn_mesa_token)(p, &seq, at / H, at % H, next, scratch);
    }
}
