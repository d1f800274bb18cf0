/* dplr.c - blocks of tokens, forward. Contract in dplr.h. */
#include "kernels/cpu/dplr/dplr.h"

#include "kernels/cpu/simd/map.h"

void MN_T(mn_dplr_prepare)(mn_dplr_block *s) {
    const int64_t K = s->p->call.K;
    for (int64_t t = 0; t < s->n; t++) {
        MN_T(mn_map_exp)(s->w + t * K, MN_ROW(float, s->p->g, s->b, s->t0 + t, s->h), K);
    }
}

void MN_T(mn_dplr_read)(float *u, const float *S, const mn_dplr_args *p, int64_t b, int64_t t,
                        int64_t h, int64_t width) {
    const float *a = MN_ROW(float, p->a, b, t, h);
    for (int64_t j = 0; j < width; j += MN_VW) {
        vf sum = vf_zero();
        for (int64_t i = 0; i < p->call.K; i++) {
            sum = vf_fma(vf_set1(a[i]), vf_load(S + i * width + j), sum);
        }
        vf_store(u + j, sum);
    }
}

/* One token: rows of K, and the next one's a. */
typedef struct token {
    const float *w, *q, *k, *a, *b, *next;    // next NULL: there is none
    int64_t K, width;
} token;

/* One strip of one token; u becomes the next token's. */
MN_ALWAYS_INLINE void advance_strip(const token *t, float *S, float *keep, vf *u, const vf *v,
                                    vf *o, int vectors) {
    vf known[MN_DPLR_STRIP];
    MN_UNROLL
    for (int c = 0; c < vectors; c++) {
        known[c] = u[c];
        u[c] = o[c] = vf_zero();
    }
    for (int64_t i = 0; i < t->K; i++) {
        const vf w = vf_set1(t->w[i]), b = vf_set1(t->b[i]), k = vf_set1(t->k[i]);
        const vf q = vf_set1(t->q[i]), a = vf_set1(t->next ? t->next[i] : 0.0f);
        float *row = S + i * t->width;
        MN_UNROLL
        for (int c = 0; c < vectors; c++) {
            const vf was = vf_load(row + c * MN_VW);
            const vf now = vf_fma(b, known[c], vf_fma(k, v[c], vf_mul(w, was)));
            o[c] = vf_fma(q, now, o[c]);
            u[c] = vf_fma(a, now, u[c]);
            vf_store(row + c * MN_VW, now);
            if (keep) vf_store(keep + i * t->width + c * MN_VW, was);
        }
    }
}

static token token_at(const mn_dplr_block *s, int64_t i, int64_t width) {
    const mn_dplr_args *p = s->p;
    const int64_t t = s->t0 + i;
    const bool more = i + 1 < s->n || s->more;
    return (token){ s->w + i * p->call.K, MN_ROW(float, p->q, s->b, t, s->h),
                    MN_ROW(float, p->k, s->b, t, s->h), MN_ROW(float, p->a, s->b, t, s->h),
                    MN_ROW(float, p->b, s->b, t, s->h),
                    more ? MN_ROW(float, p->a, s->b, t + 1, s->h) : NULL, p->call.K, width };
}

/* The block's tokens over `vectors` vectors of columns from j on, a constant. */
MN_ALWAYS_INLINE void block_strip(const mn_dplr_block *s, const mn_column_tile *tile, float *S,
                                  float *u_at, float *before, float *before_u, int64_t j,
                                  int vectors) {
    const mn_dplr_args *p = s->p;
    const int64_t width = tile->width;
    const vf scale = vf_set1((float)p->scale);
    vf u[MN_DPLR_STRIP], v[MN_DPLR_STRIP], o[MN_DPLR_STRIP];
    MN_UNROLL
    for (int c = 0; c < vectors; c++) u[c] = vf_load(u_at + j + c * MN_VW);
    for (int64_t i = 0; i < s->n; i++) {
        const token t = token_at(s, i, width);
        const float *value = MN_ROW(float, p->v, s->b, s->t0 + i, s->h) + tile->j0;
        float *out = before ? NULL : MN_ROW_OUT(float, p->o, s->b, s->t0 + i, s->h);
        MN_UNROLL
        for (int c = 0; c < vectors; c++) {
            const int64_t at = j + c * MN_VW;
            v[c] = vf_load_row(value + at, vf_lanes(tile->n - at));
            if (before) vf_store(before_u + i * width + at, u[c]);
        }
        if (before) {
            advance_strip(&t, S + j, before + i * t.K * width + j, u, v, o, vectors);
        } else {
            advance_strip(&t, S + j, NULL, u, v, o, vectors);
        }
        MN_UNROLL
        for (int c = 0; out && c < vectors; c++) {
            const int64_t at = j + c * MN_VW;
            vf_store_row(out + tile->j0 + at, vf_mul(scale, o[c]), vf_lanes(tile->n - at));
        }
    }
    MN_UNROLL
    for (int c = 0; c < vectors; c++) vf_store(u_at + j + c * MN_VW, u[c]);
}

void MN_T(mn_dplr_advance)(const mn_dplr_block *s, const mn_column_tile *tile, float *S, float *u,
                           float *before, float *before_u) {
    const int64_t strip = MN_DPLR_STRIP * MN_VW;
    int64_t j = 0;
    for (; j + strip <= tile->width; j += strip) {
        block_strip(s, tile, S, u, before, before_u, j, MN_DPLR_STRIP);
    }
    for (; j < tile->width; j += MN_VW) block_strip(s, tile, S, u, before, before_u, j, 1);
}
