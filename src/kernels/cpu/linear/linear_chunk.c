/* linear_chunk.c - what keys and decays of a chunk determine: segments, scaled rows, P and A. */
#include "kernels/cpu/linear/linear.h"

#include <math.h>
#include <string.h>

#include "kernels/cpu/simd/map.h"

int64_t MN_T(mn_chunk_floats)(int64_t K, int64_t width, bool has_e) {
    const int64_t rows = MN_CHUNK * K;
    const int64_t copies = width ? 2 : 1;    // qd, wd, ed may be copies of their own under a decay
    return 4 * MN_CHUNK * (width ? width : 1) + copies * (2 + has_e) * rows + K +
           (1 + has_e) * MN_CHUNK * MN_CHUNK;
}

float *MN_T(mn_chunk_place)(mn_chunk *c, float *memory, int64_t K, int64_t width, bool has_e) {
    const int64_t rows = MN_CHUNK * K, square = MN_CHUNK * MN_CHUNK;
    float *at = memory;
    c->K = K;
    c->width = width;
    c->P = at, at += square;
    c->A = has_e ? at : NULL, at += has_e * square;
    c->qs = at, at += rows;
    c->ws = c->ws_memory = at, at += rows;
    c->es = has_e ? at : NULL, at += has_e * rows;
    c->qd = c->qs, c->wd = c->ws, c->ed = c->es;
    c->qd_memory = at, at += width ? rows : 0;
    c->ed_memory = at, at += width && has_e ? rows : 0;
    if (width) c->wd = at, at += rows;
    const int64_t decays = MN_CHUNK * (width ? width : 1);
    c->G = at, at += decays;
    c->step = at, at += decays;
    c->rho = at, at += decays;
    c->fall = at, at += K;
    c->factor = at, at += decays;
    return at;
}

/* Begins a segment at token t, whose level is row t of G above the last. */
static void begin_segment(mn_chunk *c, int64_t t) {
    const size_t bytes = (size_t)c->width * sizeof *c->G;
    float *G = c->G + t * c->width;
    if (t == 0) c->late = true;
    else c->first[c->n_segments++] = t;
    const int64_t at = (c->n_segments - 1) * c->width;
    memcpy(c->step + at, G, bytes);
    for (int64_t i = 0; i < c->width; i++) {
        c->rho[at + i] = G[i] + (at ? c->rho[at - c->width + i] : 0.0f);
    }
    memset(G, 0, bytes);
}

/* One number per token: rows of G are neighbours, and sums run in scalars. */
static void sum_token_decays(mn_chunk *c, const mn_linear *p) {
    float sum = 0.0f;
    for (int64_t t = 0; t < c->L; t++) {
        c->G[t] = sum += *MN_ROW(float, p->g, c->b, c->t0 + t, c->h);
        if (sum < -MN_SEGMENT_FALL) {
            begin_segment(c, t);
            sum = 0.0f;
        }
    }
}

static void sum_channel_decays(mn_chunk *c, const mn_linear *p) {
    const vf limit = vf_set1(-MN_SEGMENT_FALL);
    for (int64_t t = 0; t < c->L; t++) {
        const float *g = MN_ROW(float, p->g, c->b, c->t0 + t, c->h);
        float *G = c->G + t * c->width;
        bool too_far = false;
        for (int64_t i = 0; i < c->width; i += MN_VW) {
            const int n = vf_lanes(c->width - i);
            const vf before = t ? vf_load_row(G - c->width + i, n) : vf_zero();
            const vf sum = vf_add(before, vf_load_row(g + i, n));
            vf_store_row(G + i, sum, n);
            too_far |= vm_any(vf_lt(sum, limit));
        }
        if (too_far) begin_segment(c, t);
    }
}

/* Running sums of the log decay and the cut into segments. */
static void sum_decays(mn_chunk *c, const mn_linear *p) {
    c->n_segments = 1;
    c->first[0] = 0;
    c->late = false;
    memset(c->step, 0, (size_t)c->width * sizeof *c->step);
    memset(c->rho, 0, (size_t)c->width * sizeof *c->rho);
    if (c->width == 1) sum_token_decays(c, p);
    if (c->width > 1) sum_channel_decays(c, p);
    c->first[c->n_segments] = c->L;
}

/* Rows t0 .. end-1 of factor: exp(G_t), or exp(step - G_t) when `step` is given */
static void row_factors(mn_chunk *c, int64_t t0, int64_t end, const float *step) {
    if (c->width == 1) {
        const vf origin = vf_set1(step ? *step : 0.0f);
        for (int64_t t = t0; t < end; t += MN_VW) {
            const int n = vf_lanes(end - t);
            const vf x = vf_load_row(c->G + t, n);
            vf_store_row(c->factor + t, vf_exp(step ? vf_sub(origin, x) : x), n);
        }
        return;
    }
    for (int64_t t = t0; t < end; t++) {
        const float *row = c->G + t * c->width;
        mn_exp_row(c->factor + t * c->width, step ? step : row, step ? row : NULL, c->width);
    }
}

/* dst = beta w / factor over a row of K */
static void divide_row(float *dst, const float *w, const float *factor, int64_t width, float beta,
                       int64_t K) {
    if (width < 2) {
        mn_scale_row(dst, w, NULL, 0, width ? beta / *factor : beta, K);
        return;
    }
    for (int64_t i = 0; i < K; i += MN_VW) {
        const int n = vf_lanes(K - i);
        const vf x = vf_mul(vf_set1(beta), vf_load_row(w + i, n));
        vf_store_row(dst + i, vf_div(x, vf_load_row(factor + i, n)), n);
    }
}

/* Rows of the segment just left may be large, so they start afresh; those before are at most 1. The
 * rows of the new segment are divided by what its q and e will be multiplied by. */
void MN_T(mn_chunk_columns)(mn_chunk *c, const mn_linear *p, int to) {
    const float *step = c->step + to * c->width;
    const int64_t K = c->K, t0 = c->first[to], left = to > 0 ? c->first[to - 1] : 0;
    if (to > 0) {
        row_factors(c, left, t0, step);
        for (int64_t s = left; s < t0; s++) {
            mn_scale_row(c->ws + s * K, MN_ROW(float, p->w, c->b, c->t0 + s, c->j),
                         c->factor + s * c->width, c->width, c->beta[s], K);
        }
        mn_exp_row(c->factor, step, NULL, c->width);
        for (int64_t s = 0; s < left; s++) {
            mn_scale_row(c->ws + s * K, c->ws + s * K, c->factor, c->width, 1.0f, K);
        }
    }
    if (c->width) row_factors(c, t0, c->first[to + 1], NULL);
    for (int64_t t = t0; t < c->first[to + 1]; t++) {
        divide_row(c->ws + t * K, MN_ROW(float, p->w, c->b, c->t0 + t, c->j),
                   c->factor + t * c->width, c->width, c->beta[t], K);
    }
}

/* xs = x scale factor and xd = xs exp(rho) for the rows of a segment; `fall` holds exp(rho) */
static void scale_rows(float *xs, float *xd, const mn_chunk *c, mn_in x, float scale, int segment) {
    const int64_t K = c->K;
    for (int64_t t = c->first[segment]; t < c->first[segment + 1]; t++) {
        mn_scale_row(xs + t * K, MN_ROW(float, x, c->b, c->t0 + t, c->j), c->factor + t * c->width,
                     c->width, scale, K);
        if (xd != xs) mn_scale_row(xd + t * K, xs + t * K, c->fall, c->width, 1.0f, K);
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

/* wd = ws exp(G_L), and fall = exp(rho + G_L) with the level of the last segment */
static void finish(mn_chunk *c) {
    const float *last = c->G + (c->L - 1) * c->width;
    const float *rho = c->rho + (c->n_segments - 1) * c->width;
    if (c->width) {
        mn_exp_row(c->factor, last, NULL, c->width);
        for (int64_t s = 0; s < c->L; s++) {
            mn_scale_row(c->wd + s * c->K, c->ws + s * c->K, c->factor, c->width, 1.0f, c->K);
        }
        mn_exp_row(c->fall, rho, NULL, c->width);
        for (int64_t i = 0; i < c->width; i++) c->fall[i] *= c->factor[i];
    }
    for (int64_t i = c->width == 1; c->width < 2 && i < c->K; i++)
        c->fall[i] = c->width ? c->fall[0] : 1.0f;
}

/* Which tokens are at hand and which come next in the scan. */
static void locate(mn_chunk *c, const mn_sequence *seq, int64_t h, int64_t start,
                   mn_scan_mode mode) {
    const int64_t left = seq->length - start;
    c->b = seq->b;
    c->t0 = seq->t0 + start;
    c->h = h;
    c->L = left < MN_CHUNK ? left : MN_CHUNK;
    c->ahead = mode == MN_SCAN_BACKWARD ? c->t0 - MN_CHUNK : c->t0 + c->L;
    c->n_ahead = left - c->L < MN_CHUNK ? left - c->L : MN_CHUNK;
    if (mode == MN_SCAN_BACKWARD) c->n_ahead = start > 0 ? MN_CHUNK : 0;
}

void MN_T(mn_chunk_prepare)(mn_chunk *c, const mn_linear *p, const mn_sequence *seq, int64_t h,
                            int64_t start, mn_scan_mode mode) {
    const bool reads = mode != MN_SCAN_REPLAY;
    locate(c, seq, h, start, mode);
    c->j = mn_key_head(p->call, h);
    load_beta(c, p);
    sum_decays(c, p);
    mn_prefetch_next(p->g, c, c->h, c->width);
    mn_prefetch_next(p->w, c, c->j, c->K);
    const bool simple = c->width == 0 || mn_chunk_simple(c);
    c->qd = simple ? c->qs : c->qd_memory;
    c->ed = simple ? c->es : c->ed_memory;
    for (int I = 0; I < c->n_segments; I++) {
        MN_T(mn_chunk_columns)(c, p, I);
        if (!simple) mn_exp_row(c->fall, c->rho + I * c->width, NULL, c->width);
        if (reads) {
            scale_rows(c->qs, c->qd, c, p->q, p->scale, I);
            scores(c->P, c->qs, c, I, false);
        }
        if (p->e.data) {
            scale_rows(c->es, c->ed, c, p->e, 1.0f, I);
            scores(c->A, c->es, c, I, true);
        }
    }
    if (reads) mn_prefetch_next(p->q, c, c->j, c->K);
    if (!p->w_is_e) mn_prefetch_next(p->e, c, c->j, c->K);
    finish(c);
}
