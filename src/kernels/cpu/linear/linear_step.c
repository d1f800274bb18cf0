/* linear_step.c - one token of additive and delta, the state in place.
 *
 *   pred = (diag a S)'e,  read = (diag a S)'q,  r = v - pred      first pass, memory streams once
 *   S <- diag a S + w r',  o = scale (read + (w.q) r)             second pass, from the cache
 *
 * Additive needs no prediction: one pass does S <- diag a S + k v' and o = scale S'q. One item is
 * one head of one batch row. Columns go in blocks of vectors whose sums stay in registers. */
#include "kernels/cpu/linear/linear.h"
#include "kernels/cpu/simd/row.h"

#include "base/checked.h"

enum { BLOCK = MN_VW == 16 ? 8 : 4 };    // vectors of a block of columns

bool MN_T(mn_linear_step_plan)(const mn_linear *p, mn_plan *plan) {
    const mn_call *c = p->call;
    plan->n_phases = 1;
    plan->items[0] = c->B * c->H;
    return mn_mul_size(&plan->scratch_bytes, 4 * (size_t)c->K, sizeof(float));
}

static void token_decays(float *a, const mn_linear *p, int64_t b, int64_t h) {
    const float *g = MN_ROW(float, p->g, b, 0, h);
    const int64_t K = p->call->K;
    for (int64_t i = 0; i < K; i += MN_VW) {
        const int n = vf_lanes(K - i);
        const vf x = !g                             ? vf_zero()
                     : p->decay == MN_DECAY_CHANNEL ? vf_load_n(g + i, n)
                                                    : vf_set1(*g);
        vf_store_n(a + i, vf_exp(x), n);
    }
}

/* Columns j .. j + n of a state of K rows: where they are read (NULL: zeros) and written (or NULL).
 */
typedef struct block {
    const float *from;
    float *to;
    int64_t K, V;
    int last;              // lanes of the last vector
} block;

MN_ALWAYS_INLINE vf load_lane(const float *x, int j, int vectors, int last) {
    return j + 1 < vectors || last == MN_VW ? vf_load(x + j * MN_VW)
                                            : vf_load_n(x + j * MN_VW, last);
}

MN_ALWAYS_INLINE void store_lane(float *x, vf y, int j, int vectors, int last) {
    if (j + 1 < vectors || last == MN_VW) vf_store(x + j * MN_VW, y);
    else vf_store_n(x + j * MN_VW, y, last);
}

/* x[0] = sum_i ae_i S_i and x[1] = sum_i aq_i S_i; e and q carry the decay. */
MN_ALWAYS_INLINE void predict(vf *pred, vf *read, const block *p, const float *ae, const float *aq,
                              int vectors) {
    MN_UNROLL
    for (int j = 0; j < vectors; j++) pred[j] = read[j] = vf_zero();
    for (int64_t i = 0; p->from && i < p->K; i++) {
        const vf e = vf_set1(ae[i]), q = vf_set1(aq[i]);
        MN_UNROLL
        for (int j = 0; j < vectors; j++) {
            const vf s = load_lane(p->from + i * p->V, j, vectors, p->last);
            pred[j] = vf_fma(e, s, pred[j]);
            read[j] = vf_fma(q, s, read[j]);
        }
    }
}

/* S_i = a_i S_i + w_i r; read, where wanted, gains q_i S_i. */
MN_ALWAYS_INLINE void write(vf *read, const vf *r, const block *p, const float *a, const float *w,
                            const float *q, int vectors) {
    for (int64_t i = 0; i < p->K; i++) {
        const vf va = vf_set1(a[i]), vw = vf_set1(w[i]), vq = vf_set1(q ? q[i] : 0.0f);
        MN_UNROLL
        for (int j = 0; j < vectors; j++) {
            vf s = vf_mul(vw, r[j]);
            if (p->from) s = vf_fma(va, load_lane(p->from + i * p->V, j, vectors, p->last), s);
            if (p->to) store_lane(p->to + i * p->V, s, j, vectors, p->last);
            if (q) read[j] = vf_fma(vq, s, read[j]);
        }
    }
}

/* What one token brings to a head: rows of K scaled and ready, rows of V as they are. */
typedef struct token {
    const float *a, *ae, *aq, *w, *q, *v;
    float *o;
    float wq, scale;
    bool corrects;         // delta: the prediction is taken off the value
} token;

MN_ALWAYS_INLINE void step_block(const token *t, const block *p, int vectors) {
    vf r[BLOCK], read[BLOCK], pred[BLOCK];
    MN_UNROLL
    for (int j = 0; j < vectors; j++) {
        r[j] = load_lane(t->v, j, vectors, p->last);
        read[j] = vf_zero();
    }
    if (t->corrects) {
        predict(pred, read, p, t->ae, t->aq, vectors);
        MN_UNROLL
        for (int j = 0; j < vectors; j++) {
            r[j] = vf_sub(r[j], pred[j]);
            read[j] = vf_fma(vf_set1(t->wq), r[j], read[j]);
        }
    }
    write(read, r, p, t->a, t->w, t->corrects ? NULL : t->q, vectors);
    if (!t->o) return;
    MN_UNROLL
    for (int j = 0; j < vectors; j++) {
        store_lane(t->o, vf_mul(vf_set1(t->scale), read[j]), j, vectors, p->last);
    }
}

/* y = a x over a row of K, or y = gate x when a is NULL */
static void weigh(float *y, const float *a, const float *x, float gate, int64_t K) {
    for (int64_t i = 0; i < K; i += MN_VW) {
        const int n = vf_lanes(K - i);
        const vf factor = a ? vf_load_n(a + i, n) : vf_set1(gate);
        vf_store_n(y + i, vf_mul(factor, vf_load_n(x + i, n)), n);
    }
}

void MN_T(mn_linear_step_run)(const mn_linear *p, int64_t item, void *scratch) {
    const int64_t K = p->call->K, V = p->call->V, b = item / p->call->H, h = item % p->call->H;
    const int64_t key = mn_key_head(p->call, h);
    const float *q = MN_ROW(float, p->q, b, 0, key), *e = MN_ROW(float, p->e, b, 0, key);
    const float *beta = MN_ROW(float, p->beta, b, 0, h), *v = MN_ROW(float, p->v, b, 0, h);
    const float *S = MN_ROW(float, p->state0, b, 0, h);
    float *a = scratch, *ae = a + K, *aq = ae + K, *w = aq + K,
          *o = MN_ROW_OUT(float, p->o, b, 0, h);
    float *to = MN_ROW_OUT(float, p->state, b, 0, h);
    token_decays(a, p, b, h);
    weigh(w, NULL, MN_ROW(float, p->w, b, 0, key), beta ? *beta : 1.0f, K);
    if (e) weigh(ae, a, e, 0.0f, K);
    weigh(aq, a, q, 0.0f, K);
    const float wq = vf_dot_row(w, q, K);
    for (int64_t j = 0; j < V;) {
        const int64_t left = (V - j) / MN_VW;
        const int vectors = left >= BLOCK ? BLOCK : left >= BLOCK / 2 ? BLOCK / 2 : 1;
        const token t = { a, ae, aq, w, q, v + j, o ? o + j : NULL, wq, p->scale, e != NULL };
        const block at = { S ? S + j : NULL, to ? to + j : NULL, K, V,
                           left ? MN_VW : vf_lanes(V - j) };
        if (vectors == BLOCK) step_block(&t, &at, BLOCK);
        else if (vectors > 1) step_block(&t, &at, BLOCK / 2);
        else step_block(&t, &at, 1);
        j += vectors * MN_VW;
    }
}
