/* linear_chunk.c - what keys and decays of a chunk determine: segments, scaled rows, P and A. */
#include "kernels/vec/linear.h"

#include <math.h>
#include <string.h>

#include "kernels/vec/map.h"

int64_t MN_T(mn_chunk_floats)(int64_t K, int64_t width, bool has_e) {
    const int64_t rows = MN_CHUNK * K;
    const int64_t copies = width ? 2 : 1;    // qd, wd, ed are copies of their own under a decay
    return 2 * MN_CHUNK * (width ? width : 1) + copies * (2 + has_e) * rows + K + (1 + has_e) * MN_CHUNK * MN_CHUNK;
}

float *MN_T(mn_chunk_place)(mn_chunk *c, float *memory, int64_t K, int64_t width, bool has_e) {
    const int64_t rows = MN_CHUNK * K, square = MN_CHUNK * MN_CHUNK;
    float *at = memory;
    c->K = K;
    c->width = width;
    c->P = at, at += square;
    c->A = has_e ? at : NULL, at += has_e * square;
    c->qs = at, at += rows;
    c->ws = at, at += rows;
    c->es = has_e ? at : NULL, at += has_e * rows;
    c->qd = c->qs, c->wd = c->ws, c->ed = c->es;
    if (width) {
        c->qd = at, at += rows;
        c->wd = at, at += rows;
        c->ed = has_e ? at : NULL, at += has_e * rows;
    }
    c->G = at, at += MN_CHUNK * (width ? width : 1);
    c->fall = at, at += K;
    c->factor = at, at += MN_CHUNK * (width ? width : 1);
    return at;
}

/* Whether G has fallen from row a to row b by more than a segment may. */
static bool falls_too_far(const float *a, const float *b, int64_t width) {
    const vf limit = vf_set1(MN_SEGMENT_FALL);
    for (int64_t i = 0; i < width; i += MN_VW) {
        const int n = vf_lanes(width - i);
        if (vm_any(vf_gt(vf_sub(vf_load_n(a + i, n), vf_load_n(b + i, n)), limit))) return true;
    }
    return false;
}

/* One number per token: rows of G are neighbours, and sums run in scalars. */
static void sum_token_decays(mn_chunk *c, const mn_linear *p) {
    float sum = 0.0f, top = 0.0f;
    for (int64_t t = 0; t < c->L; t++) {
        sum += *MN_ROW(float, p->g, c->b, c->t0 + t, c->h);
        sum = sum > -1e30f ? sum : -1e30f;
        if (t == 0) top = sum;
        if (top - sum > MN_SEGMENT_FALL) {
            c->first[c->n_segments++] = t;
            top = sum;
        }
        c->G[t] = sum;
    }
}

static void sum_channel_decays(mn_chunk *c, const mn_linear *p) {
    const vf lowest = vf_set1(-1e30f);
    for (int64_t t = 0; t < c->L; t++) {
        const float *g = MN_ROW(float, p->g, c->b, c->t0 + t, c->h);
        float *G = c->G + t * c->width;
        for (int64_t i = 0; i < c->width; i += MN_VW) {
            const int n = vf_lanes(c->width - i);
            const vf before = t ? vf_load_n(G - c->width + i, n) : vf_zero();
            vf_store_n(G + i, vf_max(lowest, vf_add(before, vf_load_n(g + i, n))), n);
        }
        if (falls_too_far(c->G + c->first[c->n_segments - 1] * c->width, G, c->width)) {
            c->first[c->n_segments++] = t;
        }
    }
}

/* Running sums of the log decay and the cut into segments. A fall beyond the float range would make
 * infinities; -1e30 is as far below any exponent that matters. */
static void sum_decays(mn_chunk *c, const mn_linear *p) {
    c->n_segments = 1;
    c->first[0] = 0;
    if (c->width == 1) sum_token_decays(c, p);
    if (c->width > 1) sum_channel_decays(c, p);
    c->first[c->n_segments] = c->L;
}

static const float *rho(const mn_chunk *c, int segment) {
    return c->G + c->first[segment] * c->width;
}

/* Rows t0 .. end-1 of factor: exp(G_t - at), or exp(at - G_t) when `inverse` */
static void row_factors(mn_chunk *c, int64_t t0, int64_t end, const float *at, bool inverse) {
    const float *G = c->G;
    if (c->width == 1) {
        const vf origin = vf_set1(*at);
        for (int64_t t = t0; t < end; t += MN_VW) {
            const int n = vf_lanes(end - t);
            const vf x = vf_sub(vf_load_n(G + t, n), origin);
            vf_store_n(c->factor + t, vf_exp(inverse ? vf_neg(x) : x), n);
        }
        return;
    }
    for (int64_t t = t0; t < end; t++) {
        const float *row = G + t * c->width;
        mn_exp_row(c->factor + t * c->width, inverse ? at : row, inverse ? row : at, c->width);
    }
}

/* Rows of ws = beta w exp(at - G_t), afresh */
static void columns_afresh(mn_chunk *c, const mn_linear *p, int64_t t0, int64_t end, const float *at) {
    if (c->width) row_factors(c, t0, end, at, true);
    for (int64_t t = t0; t < end; t++) {
        mn_scale_row(c->ws + t * c->K, MN_ROW(float, p->w, c->b, c->t0 + t, c->h),
                     c->factor + t * c->width, c->width, c->beta[t], c->K);
    }
}

/* Rows of the segment just left may be large, so they start afresh; those before are at most 1. */
void MN_T(mn_chunk_columns)(mn_chunk *c, const mn_linear *p, int to) {
    const float *at = rho(c, to);
    if (to > 0) {
        columns_afresh(c, p, c->first[to - 1], c->first[to], at);
        mn_exp_row(c->factor, at, rho(c, to - 1), c->width);
        for (int64_t s = 0; s < c->first[to - 1]; s++) {
            float *row = c->ws + s * c->K;
            mn_scale_row(row, row, c->factor, c->width, 1.0f, c->K);
        }
    }
    columns_afresh(c, p, c->first[to], c->first[to + 1], at);
}

/* xs = x scale factor and xd = xs exp(rho) for the rows of a segment; `fall` holds exp(rho) */
static void scale_rows(float *xs, float *xd, const mn_chunk *c, mn_in x, float scale, int segment) {
    const int64_t K = c->K;
    for (int64_t t = c->first[segment]; t < c->first[segment + 1]; t++) {
        mn_scale_row(xs + t * K, MN_ROW(float, x, c->b, c->t0 + t, c->h), c->factor + t * c->width,
                     c->width, scale, K);
        if (c->width) mn_scale_row(xd + t * K, xs + t * K, c->fall, c->width, 1.0f, K);
    }
}

/* Rows of a segment of P or A: xs ws', then zeros beyond column t, or from it when `strict`. */
static void scores(float *P, const float *xs, const mn_chunk *c, int segment, bool strict) {
    const int64_t t0 = c->first[segment], end = c->first[segment + 1];
    const mn_gemm_args product = {
        .c = P + t0 * c->L, .c_row = c->L, .a = xs + t0 * c->K, .a_row = c->K, .a_col = 1,
        .b = c->ws, .b_row = c->K, .M = end - t0, .N = end, .K = c->K, .alpha = 1.0f,
        .base = MN_GEMM_SET, .shape = segment == 0 ? MN_GEMM_C_LOWER : MN_GEMM_FULL,
    };
    MN_T(mn_gemm_nt)(&product);
    for (int64_t t = t0; t < end; t++) {
        const int64_t from = t + !strict;
        memset(P + t * c->L + from, 0, (size_t)(c->L - from) * sizeof *P);
    }
}

static void load_beta(mn_chunk *c, const mn_linear *p) {
    for (int64_t t = 0; t < c->L; t++) {
        const float *beta = MN_ROW(float, p->beta, c->b, c->t0 + t, c->h);
        c->beta[t] = beta ? *beta : 1.0f;
    }
}

/* wd = ws exp(G_L - rho of the last segment), and fall = exp G_L */
static void finish(mn_chunk *c) {
    const float *last = c->G + (c->L - 1) * c->width;
    if (c->width) {
        mn_exp_row(c->factor, last, rho(c, c->n_segments - 1), c->width);
        for (int64_t s = 0; s < c->L; s++) {
            mn_scale_row(c->wd + s * c->K, c->ws + s * c->K, c->factor, c->width, 1.0f, c->K);
        }
        mn_exp_row(c->fall, last, NULL, c->width);
    }
    for (int64_t i = c->width == 1; c->width < 2 && i < c->K; i++) c->fall[i] = c->width ? c->fall[0] : 1.0f;
}

/* Which tokens are at hand and which come next in the walk. */
static void locate(mn_chunk *c, const mn_sequence *seq, int64_t h, int64_t start, mn_walk walk) {
    const int64_t left = seq->length - start;
    c->b = seq->b;
    c->t0 = seq->t0 + start;
    c->h = h;
    c->L = left < MN_CHUNK ? left : MN_CHUNK;
    c->ahead = walk == MN_WALK_BACKWARD ? c->t0 - MN_CHUNK : c->t0 + c->L;
    c->n_ahead = left - c->L < MN_CHUNK ? left - c->L : MN_CHUNK;
    if (walk == MN_WALK_BACKWARD) c->n_ahead = start > 0 ? MN_CHUNK : 0;
}

void MN_T(mn_chunk_prepare)(mn_chunk *c, const mn_linear *p, const mn_sequence *seq, int64_t h,
                            int64_t start, mn_walk walk) {
    const bool reads = walk != MN_WALK_REPLAY;
    locate(c, seq, h, start, walk);
    load_beta(c, p);
    sum_decays(c, p);
    mn_prefetch_next(p->g, c, c->width);
    mn_prefetch_next(p->w, c, c->K);
    for (int I = 0; I < c->n_segments; I++) {
        MN_T(mn_chunk_columns)(c, p, I);
        if (c->width) row_factors(c, c->first[I], c->first[I + 1], rho(c, I), false);
        mn_exp_row(c->fall, rho(c, I), NULL, c->width);
        if (reads) {
            scale_rows(c->qs, c->qd, c, p->q, p->scale, I);
            scores(c->P, c->qs, c, I, false);
        }
        if (p->e.data) {
            scale_rows(c->es, c->ed, c, p->e, 1.0f, I);
            scores(c->A, c->es, c, I, true);
        }
    }
    if (reads) mn_prefetch_next(p->q, c, c->K);
    if (!p->w_is_e) mn_prefetch_next(p->e, c, c->K);
    finish(c);
}
