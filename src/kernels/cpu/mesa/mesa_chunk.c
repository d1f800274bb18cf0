/* mesa_chunk.c - weights and statistics of one chunk of mesa. */
#include "kernels/cpu/mesa/mesa.h"

bool MN_T(mn_mesa_chunk_floats)(int64_t *count, const mn_call *call) {
    return mn_mul_i64(count, MN_STAT_CHUNK, call->K) &&
           mn_add_i64(count, *count, 3 * MN_STAT_CHUNK * MN_STAT_CHUNK);
}

float *MN_T(mn_mesa_chunk_place)(mn_mesa_chunk *c, float *at, const mn_call *call) {
    c->W = at, at += MN_STAT_CHUNK * MN_STAT_CHUNK;
    c->Wb = at, at += MN_STAT_CHUNK * MN_STAT_CHUNK;
    c->P = at, at += MN_STAT_CHUNK * MN_STAT_CHUNK;
    c->Kw = at, at += MN_STAT_CHUNK * call->K;
    return at;
}

bool MN_T(mn_mesa_state_floats)(int64_t *count, const mn_call *call) {
    int64_t width;
    return mn_add_i64(&width, call->K, call->V) && mn_mul_i64(count, call->K, width);
}

mn_mesa_state MN_T(mn_mesa_state_at)(float *at, const mn_call *call) {
    return (mn_mesa_state){ at, at + call->K * call->K };
}

void MN_T(mn_mesa_state_load)(mn_mesa_state S, const mn_mesa_args *p, int64_t n, int64_t h) {
    MN_T(mn_stat_load_symmetric)(S.kk, MN_ROW(float, p->hkk0, n, 0, h), p->call.K);
    MN_T(mn_stat_load)(S.kv, MN_ROW(float, p->hkv0, n, 0, h), p->call.K * p->call.V);
}

void MN_T(mn_mesa_prepare)(mn_mesa_chunk *c, const mn_mesa_args *p, const mn_sequence *seq,
                           int64_t h, int64_t start, bool reads) {
    const int64_t K = p->call.K;
    double minus[MN_STAT_CHUNK], sum = 0.0;
    c->b = seq->b;
    c->t0 = seq->t0 + start;
    c->h = h;
    c->L = mn_min(seq->length - start, MN_STAT_CHUNK);
    c->k = mn_mat_rows(p->k, c->b, c->t0, h);
    c->v = mn_mat_rows(p->v, c->b, c->t0, h);
    mn_prefetch_rows(c->k, c->L, K);
    mn_prefetch_rows(c->v, c->L, p->call.V);
    for (int64_t t = 0; t < c->L; t++) {
        const double g = *MN_ROW(float, p->g, c->b, c->t0 + t, h);
        sum += g < mn_lowest_log ? mn_lowest_log : g;
        c->G[t] = sum;
        minus[t] = -sum;
        c->first[t] = (float)exp(sum);
        c->beta[t] = *MN_ROW(float, p->beta, c->b, c->t0 + t, h);
    }
    MN_T(mn_stat_weights)(c->W, c->G, minus, reads ? 0 : c->L - 1, c->L);
    for (int64_t t = 0; t < c->L; t++) {
        const float *w = c->W + t * MN_STAT_CHUNK;
        for (int64_t s = 0; reads && s < c->L; s++) {
            c->Wb[t * MN_STAT_CHUNK + s] = w[s] * c->beta[s];
        }
        c->last[t] = c->W[(c->L - 1) * MN_STAT_CHUNK + t];
        mn_scale(c->Kw + t * K, c->last[t] * c->beta[t], mn_row_of(c->k, t), K);
    }
}

void MN_T(mn_mesa_advance)(mn_mesa_state S, const mn_mesa_chunk *c, const mn_call *call) {
    const int64_t K = call->K, V = call->V;
    const float fall = c->first[c->L - 1];
    MN_T(mn_stat_add_symmetric)(S.kk, fall, mn_mat_of(c->Kw, K), c->k, c->L, K);
    MN_T(mn_stat_add_products)(mn_mat_of(S.kv, V), fall, 1.0f, mn_mat_of(c->Kw, K), c->v,
                               (mn_dims){ K, V, c->L });
}
