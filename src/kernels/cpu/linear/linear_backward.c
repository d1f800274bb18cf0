/* linear_backward.c - gradients of additive and delta, chunk after chunk from the last.
 *
 * In the terms of linear.h, with D the adjoint of the state behind the chunk and S the state
 * before:
 *
 *   dR = P' dO + wd D          (I + A)' dU = dR          dV = dU
 *   dP = tril(dO R')           dA = -tril(dU R', -1)
 *   D <- diag(fall) D + qd' dO - ed' dU
 *
 *   dq[t] = exp(G_t) . (dP ws + exp(rho) . dO S')      the same for e with dA, -dU
 *   dw[s] = sum over segments of what ws gained there from w, times (dP'qs + dA'es), and of wd, R
 * D'
 *   dG[t] = q dq + e de - w dw;  dG[L] += rowsum(fall S . D) + sum_s wd . (R D')
 *
 * and dg is the sum of dG from t to the end of the chunk. Where a channel of additive nearly
 * forgets (g below SHARP) that sum is small and its terms are not: dg of such a token comes from
 * what crosses it instead, dg = e^g sum_{s < t <= r} q[r] k[s] exp(.) dP[r,s], with S and D at the
 * two ends. States in front of chunks are kept for a span of chunks and recomputed span by span; so
 * are the residuals.
 *
 * One item is some value columns of one head of one sequence. Gradients of keys and decays are sums
 * over columns: each tile writes its own part and a second phase adds the parts in order. */
#include "kernels/cpu/linear/linear.h"

#include <math.h>
#include <string.h>

#include "base/checked.h"
#include "base/util.h"
#include "kernels/cpu/linear/linear_bank.h"
#include "kernels/cpu/linear/linear_state.h"
#include "kernels/cpu/simd/map.h"
#include "kernels/cpu/simd/row.h"

/* Log decay below which dg is summed up by itself: the sum of numbers of order one is off by 1e-7,
 * and what depends on the decay, not on its logarithm, divides by it. */
#define SHARP (-6.0f)

/* Work of one item beside the chunk: D, states and residuals of a span, and the gradients of the
 * chunk's rows: key gradients (L,K), decay gradients (L,width) summed to the end of the chunk. */
typedef struct work {
    mn_chunk c;
    mn_columns col;
    void *bank;                // prepared chunks, or NULL
    int64_t first_slot;        // of this sequence
    int64_t span;              // chunks whose states are kept
    float *D, *states, *marks, *R, *dU, *dP, *dA, *dq, *de, *dw, *acc, *dG;
    float *doS, *RD;           // (L,K) dO S' and R D' of a chunk with sharp decays; NULL: never
} work;

/* Whether decays may be sharp where that counts. */
static bool may_be_sharp(const mn_linear *p) {
    return p->decay == MN_DECAY_CHANNEL && !p->e.data && p->dg.data;
}

static bool is_sharp(const work *w) {
    bool sharp = false;
    const float least = expf(SHARP);
    for (int64_t i = 0; w->doS && i < w->c.K; i++) sharp |= w->c.fall[i] < least;
    return sharp;
}

/* Chunks of the longest sequence are cut into spans; the state before each span is kept as well. */
static int64_t span_of(const mn_call *call, int64_t *n_spans) {
    static const int64_t max_floats = (int64_t)4 << 20;
    const int64_t chunks = mn_max(1, mn_ceil_div(mn_longest_sequence(call), MN_CHUNK));
    int64_t span = chunks;
    if (span * call->K * call->V > max_floats) {
        span = 1;
        while (span * span < chunks) span++;
    }
    *n_spans = mn_ceil_div(chunks, span);
    return span;
}

static int64_t place(work *w, float *memory, const mn_linear *p, const mn_column_tiles *tiles) {
    const mn_call *call = p->call;
    const int64_t width = mn_decay_width(p->decay, call->K), state = call->K * tiles->width;
    const int64_t keys = MN_CHUNK * call->K, values = MN_CHUNK * tiles->width;
    const int64_t square = MN_CHUNK * MN_CHUNK;
    int64_t n_spans;
    w->span = span_of(call, &n_spans);
    float *at = MN_T(mn_chunk_place)(&w->c, memory, call->K, width, p->e.data);
    w->D = at, at += state;
    w->marks = at, at += n_spans * state;
    w->states = at, at += w->span * state;
    w->R = at, at += p->e.data ? w->span * values : 0;
    w->dU = at, at += values;
    w->dP = at, at += square;
    w->dA = at, at += square;
    w->dq = at, at += keys;
    w->de = at, at += keys;
    w->dw = at, at += keys;
    w->acc = at, at += keys;
    w->dG = at, at += MN_CHUNK * width + call->K;
    w->doS = may_be_sharp(p) ? at : NULL, at += may_be_sharp(p) ? keys : 0;
    w->RD = may_be_sharp(p) ? at : NULL, at += may_be_sharp(p) ? keys : 0;
    return at - memory;
}

/* Shared memory: with several tiles the prepared chunks and each tile's part of key and decay
 * gradients; then one number per sequence and head for a decay that is per head. */
typedef struct layout {
    int64_t token_floats;      // dq, de, dw, dG of one token and head
    size_t bank_bytes, tile_floats, head_floats;
} layout;

static bool layout_of(layout *l, const mn_linear *p, const mn_column_tiles *tiles) {
    const mn_call *c = p->call;
    int64_t rows, per_tile = 0;
    l->token_floats = (2 + (p->e.data != NULL)) * c->K + mn_decay_width(p->decay, c->K);
    const bool ok = mn_mul_i64(&rows, c->B * c->T, c->H) &&
                    mn_mul_i64(&per_tile, rows, l->token_floats);
    l->bank_bytes = 0;
    l->tile_floats = tiles->count > 1 ? (size_t)per_tile : 0;
    l->head_floats = p->decay == MN_DECAY_HEAD ? (size_t)(mn_n_sequences(c) * c->H) : 0;
    if (tiles->count == 1) return ok;
    return ok &&
           mn_mul_size(&l->bank_bytes, MN_T(mn_bank_stride)(p), (size_t)(mn_bank_slots(c) * c->H));
}

bool MN_T(mn_linear_backward_plan)(const mn_linear *p, mn_plan *plan) {
    const mn_call *c = p->call;
    const mn_column_tiles tiles = mn_column_tiles_of(c);
    const int64_t items = mn_n_sequences(c) * c->H;
    layout l;
    int64_t n_spans, state;
    size_t shared;
    if (!layout_of(&l, p, &tiles) || !mn_mul_i64(&state, c->K, tiles.width) ||
        !mn_mul_i64(&state, state, span_of(c, &n_spans) + n_spans + 1)) {
        return false;
    }
    work w;
    plan->n_phases = 4;
    plan->items[0] = tiles.count > 1 ? mn_bank_slots(c) * c->H : 0;
    plan->items[1] = items * tiles.count;
    plan->items[2] = tiles.count > 1 ? items : 0;
    plan->items[3] = p->decay == MN_DECAY_HEAD && p->dg.data ? c->H : 0;
    float nothing;
    return mn_mul_size(&plan->scratch_bytes, (size_t)place(&w, &nothing, p, &tiles),
                       sizeof(float)) &&
           mn_mul_size(&shared, l.tile_floats, (size_t)tiles.count) &&
           mn_add_size(&shared, shared, l.head_floats) &&
           mn_mul_size(&shared, shared, sizeof(float)) &&
           mn_add_size(&plan->shared_bytes, shared, l.bank_bytes);
}

static void product(float *C, int64_t c_row, const float *a, int64_t a_row, int64_t a_col,
                    const float *b, int64_t b_row, int64_t M, int64_t N, int64_t K, float alpha,
                    mn_gemm_base base, mn_gemm_shape shape) {
    const mn_gemm_args args = { .c = C, .c_row = c_row, .a = a, .a_row = a_row, .a_col = a_col,
                                .b = b, .b_row = b_row, .M = M, .N = N, .K = K, .alpha = alpha,
                                .base = base, .shape = shape };
    MN_T(mn_gemm)(&args);
}

/* C (M,K) += A b for rows of a triangle that begin or end at its column `diagonal`. */
static void add_triangle(float *C, const float *a, int64_t a_row, int64_t a_col, const float *b,
                         int64_t M, int64_t n, int64_t K, mn_gemm_shape shape, int64_t diagonal) {
    const mn_gemm_args args = { .c = C, .c_row = K, .a = a, .a_row = a_row, .a_col = a_col, .b = b,
                                .b_row = K, .M = M, .N = K, .K = n, .alpha = 1.0f,
                                .base = MN_GEMM_ADD, .shape = shape, .diagonal = diagonal };
    MN_T(mn_gemm)(&args);
}

static void product_nt(float *C, int64_t c_row, const float *a, int64_t a_row, const float *b,
                       int64_t b_row, int64_t M, int64_t N, int64_t K, float alpha,
                       mn_gemm_shape shape) {
    const mn_gemm_args args = { .c = C, .c_row = c_row, .a = a, .a_row = a_row, .a_col = 1, .b = b,
                                .b_row = b_row, .M = M, .N = N, .K = K, .alpha = alpha,
                                .base = MN_GEMM_SET, .shape = shape };
    MN_T(mn_gemm_nt)(&args);
}

/* Zeros above the diagonal, and on it when strict. */
static void mask_lower(float *P, int64_t L, bool strict) {
    for (int64_t t = 0; t < L; t++) {
        const int64_t from = t + !strict;
        memset(P + t * L + from, 0, (size_t)(L - from) * sizeof *P);
    }
}

/* row *= exp(a - b) */
static void scale_by_fall(float *row, mn_chunk *c, const float *a, const float *b) {
    mn_exp_row(c->factor, a, b, c->width);
    mn_scale_row(row, row, c->factor, c->width, 1.0f, c->K);
}

/* y += x */
static void add_row(float *y, const float *x, int64_t K) {
    for (int64_t i = 0; i < K; i += MN_VW) {
        const int n = vf_lanes(K - i);
        vf_store_row(y + i, vf_add(vf_load_row(y + i, n), vf_load_row(x + i, n)), n);
    }
}

/* Gradients of the rows of one segment: dx = scale exp(G) (dP ws + exp(rho) part), where part
 * (L,K) is what came through the state. ws must be that of the segment. */
static void segment_rows(float *dx, const float *dP, work *w, int segment, float scale) {
    mn_chunk *c = &w->c;
    const int64_t t0 = c->first[segment], end = c->first[segment + 1], K = c->K;
    const bool at_zero = segment == 0 && !c->late;
    for (int64_t t = t0; !at_zero && t < end; t++) {
        scale_by_fall(dx + t * K, c, c->rho + segment * c->width, NULL);
    }
    add_triangle(dx + t0 * K, dP + t0 * c->L, c->L, 1, c->ws, end - t0, end, K, MN_GEMM_A_LOWER,
                 t0);
    for (int64_t t = t0; t < end; t++) {
        if (c->width) scale_by_fall(dx + t * K, c, c->G + t * c->width, NULL);
        mn_scale_row(dx + t * K, dx + t * K, NULL, 0, scale, K);
    }
}

/* dw of the write keys (times beta) from acc = R D', segments from the last. */
static void column_gradients(work *w, const mn_linear *p) {
    mn_chunk *c = &w->c;
    const int64_t K = c->K, L = c->L;
    const int last = c->n_segments - 1;
    memset(w->dw, 0, (size_t)(L * K) * sizeof(float));
    for (int I = last; I >= 0; I--) {
        const int64_t t0 = c->first[I], end = c->first[I + 1];
        const float *from = I == last ? c->G + (L - 1) * c->width : c->step + (I + 1) * c->width;
        for (int64_t s = 0; s < end; s++) {
            if (I == last || s < t0) {
                if (c->width) scale_by_fall(w->acc + s * K, c, from, NULL);
                continue;
            }
            scale_by_fall(w->acc + s * K, c, from, c->G + s * c->width);
            add_row(w->dw + s * K, w->acc + s * K, K);
            memset(w->acc + s * K, 0, (size_t)K * sizeof(float));
        }
        add_triangle(w->acc, w->dP + t0 * L, 1, L, c->qs + t0 * K, end, end - t0, K,
                     MN_GEMM_A_UPPER, t0);
        if (p->e.data) {
            add_triangle(w->acc, w->dA + t0 * L, 1, L, c->es + t0 * K, end, end - t0, K,
                         MN_GEMM_A_UPPER, t0);
        }
        for (int64_t s = t0; s < end; s++) {
            if (c->width) scale_by_fall(w->acc + s * K, c, NULL, c->G + s * c->width);
            add_row(w->dw + s * K, w->acc + s * K, K);
        }
    }
}

/* dG of the chunk's end, per channel, into last (K): rowsum(fall S . D) + sum_s wd . acc. */
static void end_decay_gradient(float *last, const work *w, const float *S) {
    const mn_chunk *c = &w->c;
    const int64_t K = c->K, n = w->col.n;
    for (int64_t i = 0; i < K; i++) last[i] = c->fall[i] * vf_dot_row(S + i * n, w->D + i * n, n);
    for (int64_t s = 0; s < c->L; s++) {
        for (int64_t i = 0; i < K; i += MN_VW) {
            const int lanes = vf_lanes(K - i);
            const vf sum = vf_load_row(last + i, lanes);
            vf_store_row(last + i, vf_fma(vf_load_row(c->wd + s * K + i, lanes),
                                        vf_load_row(w->acc + s * K + i, lanes), sum), lanes);
        }
    }
}

/* run += a b, or run -= a b */
static void add_products(float *run, const float *a, const float *b, int64_t K, float sign) {
    const vf s = vf_set1(sign);
    for (int64_t i = 0; i < K; i += MN_VW) {
        const int n = vf_lanes(K - i);
        const vf x = vf_mul(s, vf_load_row(a + i, n));
        vf_store_row(run + i, vf_fma(x, vf_load_row(b + i, n), vf_load_row(run + i, n)), n);
    }
}

/* Log decay of channel k at token t of the chunk. */
static float log_decay(const work *w, const mn_linear *p, int64_t t, int64_t k) {
    return MN_ROW(float, p->g, w->c.b, w->c.t0 + t, w->c.h)[k];
}

/* dg of channel k at token t by what crosses the token. S is the state before the chunk. */
static float crossing(const work *w, const mn_linear *p, const float *S, int64_t t, int64_t k) {
    const mn_chunk *c = &w->c;
    const int64_t L = c->L, K = c->K, n = w->col.n;
    float x[MN_CHUNK], fall[MN_CHUNK], older = 0.0f, newer = 0.0f;
    for (int64_t s = t - 1; s >= 0; s--) x[s] = older, older += log_decay(w, p, s, k);
    for (int64_t r = t; r < L; r++) {
        if (r > t) newer += log_decay(w, p, r, k);
        x[r] = newer;
    }
    mn_exp_row(fall, x, NULL, L);
    const float first = expf(older);
    for (int64_t s = 0; s < t; s++) fall[s] *= MN_ROW(float, p->w, c->b, c->t0 + s, c->j)[k];
    float all = first * vf_dot_row(S + k * n, w->D + k * n, n);
    for (int64_t s = 0; s < t; s++) all += fall[s] * w->RD[s * K + k];
    all *= expf(newer);
    for (int64_t r = t; r < L; r++) {
        const float q = p->scale * MN_ROW(float, p->q, c->b, c->t0 + r, c->j)[k];
        float sum = first * w->doS[r * K + k];
        for (int64_t s = 0; s < t; s++) sum += fall[s] * w->dP[r * L + s];
        all += q * fall[r] * sum;
    }
    return all * expf(log_decay(w, p, t, k));
}

/* dg from the last token to the first, `run` (K) starting as dG of the chunk's end. */
static void decay_gradients(work *w, const mn_linear *p, float *run, const float *S) {
    const mn_chunk *c = &w->c;
    const int64_t K = c->K;
    const bool sharp = is_sharp(w);
    for (int64_t t = c->L - 1; t >= 0; t--) {
        const int64_t at = c->t0 + t;
        const float *write = MN_ROW(float, p->w, c->b, at, c->j);
        add_products(run, MN_ROW(float, p->q, c->b, at, c->j), w->dq + t * K, K, 1.0f);
        if (p->e.data) {
            add_products(run, MN_ROW(float, p->e, c->b, at, c->j), w->de + t * K, K, 1.0f);
        }
        add_products(run, write, w->dw + t * K, K, -c->beta[t]);
        for (int64_t k = 0; sharp && k < K; k++) {
            if (log_decay(w, p, t, k) < SHARP) run[k] = crossing(w, p, S, t, k);
        }
        if (c->width == 1) {
            w->dG[t] = MN_T(mn_map_sum)(run, K);
        } else {
            memcpy(w->dG + t * K, run, (size_t)K * sizeof *run);
        }
    }
}

/* Adjoints of residuals and values; the values' gradient leaves here. */
static void residual_adjoints(work *w, const mn_linear *p, const float *d_o) {
    mn_chunk *c = &w->c;
    const int64_t n = w->col.n, L = c->L;
    product(w->dU, n, c->wd, c->K, 1, w->D, n, L, n, c->K, 1.0f, MN_GEMM_SET, MN_GEMM_FULL);
    if (d_o) {
        product(w->dU, n, c->P, 1, L, d_o, p->cot_o.stride[1], L, n, L, 1.0f, MN_GEMM_ADD,
                MN_GEMM_A_UPPER);
    }
    if (p->e.data) MN_T(mn_solve_upper)(w->dU, c->A, L, n);
    float *dv = MN_ROW_OUT(float, p->dv, c->b, c->t0, c->h);
    for (int64_t t = 0; dv && t < L; t++) {
        memcpy(dv + t * p->dv.stride[1] + w->col.j0, w->dU + t * n, (size_t)n * sizeof *dv);
    }
}

/* The three gradients that have the keys' shape, in w->dq, w->de, w->dw, and dG. S is the state
 * before the chunk, R its residuals. */
static void key_gradients(work *w, const mn_linear *p, const float *S, const float *R,
                          int64_t r_row, const float *d_o) {
    mn_chunk *c = &w->c;
    const int64_t n = w->col.n, L = c->L, K = c->K;
    const size_t square = (size_t)(L * L) * sizeof(float), keys = (size_t)(L * K) * sizeof(float);
    float *last = w->dG + MN_CHUNK * c->width;
    memset(w->dP, 0, square);
    memset(w->dq, 0, keys);
    if (d_o) {
        product_nt(w->dP, L, d_o, p->cot_o.stride[1], R, r_row, L, L, n, 1.0f, MN_GEMM_C_LOWER);
        mask_lower(w->dP, L, false);
        product_nt(w->dq, K, d_o, p->cot_o.stride[1], S, n, L, K, n, 1.0f, MN_GEMM_FULL);
    }
    if (p->e.data) {
        product_nt(w->dA, L, w->dU, n, R, r_row, L, L, n, -1.0f, MN_GEMM_C_LOWER);
        mask_lower(w->dA, L, true);
        product_nt(w->de, K, w->dU, n, S, n, L, K, n, -1.0f, MN_GEMM_FULL);
    }
    product_nt(w->acc, K, R, r_row, w->D, n, L, K, n, 1.0f, MN_GEMM_FULL);
    if (c->width) end_decay_gradient(last, w, S);
    if (is_sharp(w)) {
        memcpy(w->doS, w->dq, keys);
        memcpy(w->RD, w->acc, keys);
    }
    for (int I = 0; I < c->n_segments; I++) {
        if (c->n_segments > 1) MN_T(mn_chunk_columns)(c, p, I);
        segment_rows(w->dq, w->dP, w, I, p->scale);
        if (p->e.data) segment_rows(w->de, w->dA, w, I, 1.0f);
    }
    column_gradients(w, p);
    if (c->width) decay_gradients(w, p, last, S);
}

/* D <- diag(fall) D + qd' dO - ed' dU */
static void retreat(work *w, const mn_linear *p, const float *d_o) {
    mn_chunk *c = &w->c;
    const int64_t n = w->col.n, K = c->K;
    for (int64_t i = 0; c->width && i < K; i++) {
        mn_scale_row(w->D + i * n, w->D + i * n, c->fall + i, 1, 1.0f, n);
    }
    if (d_o) {
        product(w->D, n, c->qd, 1, K, d_o, p->cot_o.stride[1], K, n, c->L, 1.0f, MN_GEMM_ADD,
                MN_GEMM_FULL);
    }
    if (p->e.data) {
        product(w->D, n, c->ed, 1, K, w->dU, n, K, n, c->L, -1.0f, MN_GEMM_ADD, MN_GEMM_FULL);
    }
}

/* Final gradients of token t of the chunk from rows dq, de, dw (of beta w) and dG. */
static void emit_token(const mn_linear *p, int64_t b, int64_t t, int64_t h, const float *dq,
                       const float *de, const float *dw, const float *dG, int64_t width) {
    const int64_t K = p->call->K;
    const float *beta = MN_ROW(float, p->beta, b, t, h);
    float *out = MN_ROW_OUT(float, p->dq, b, t, h);
    if (out) memcpy(out, dq, (size_t)K * sizeof *out);
    const float scale = beta ? *beta : 1.0f;
    if ((out = MN_ROW_OUT(float, p->dw, b, t, h))) mn_scale_row(out, dw, NULL, 0, scale, K);
    if ((out = MN_ROW_OUT(float, p->dbeta, b, t, h)))
        *out = vf_dot_row(dw, MN_ROW(float, p->w, b, t, mn_key_head(p->call, h)), K);
    if ((out = MN_ROW_OUT(float, p->de, b, t, h))) {
        if (p->w_is_e) {
            mn_scale_row(out, dw, NULL, 0, scale, K);
            add_row(out, de, K);
        } else {
            memcpy(out, de, (size_t)K * sizeof *out);
        }
    }
    if (p->decay != MN_DECAY_HEAD && (out = MN_ROW_OUT(float, p->dg, b, t, h))) {
        memcpy(out, dG, (size_t)width * sizeof *out);
    }
}

/* Rows of the chunk: out, or to this tile's part of shared memory. */
static void emit_chunk(const work *w, const mn_linear *p, int64_t tile, int64_t n_tiles,
                       float *parts, const layout *l) {
    const mn_chunk *c = &w->c;
    const int64_t K = c->K, H = p->call->H;
    for (int64_t t = 0; t < c->L; t++) {
        const float *de = p->e.data ? w->de + t * K : NULL;
        const float *dq = w->dq + t * K, *dw = w->dw + t * K, *dG = w->dG + t * c->width;
        if (n_tiles == 1) {
            emit_token(p, c->b, c->t0 + t, c->h, dq, de, dw, dG, c->width);
            continue;
        }
        const int64_t row = (c->b * p->call->T + c->t0 + t) * H + c->h;
        float *at = parts + (size_t)tile * l->tile_floats + (size_t)(row * l->token_floats);
        memcpy(at, dq, (size_t)K * sizeof *at), at += K;
        memcpy(at, dw, (size_t)K * sizeof *at), at += K;
        if (de) memcpy(at, de, (size_t)K * sizeof *at), at += K;
        memcpy(at, dG, (size_t)c->width * sizeof *at);
    }
}

/* Makes w->c the chunk at `start`. */
static void take_chunk(work *w, const mn_linear *p, const mn_sequence *seq, int64_t h,
                       int64_t start, mn_scan_mode mode) {
    if (w->bank) MN_T(mn_bank_take)(&w->c, w->bank, p, w->first_slot + start / MN_CHUNK, h);
    else MN_T(mn_chunk_prepare)(&w->c, p, seq, h, start, mode);
}

static void backward_chunk(work *w, const mn_linear *p, const mn_sequence *seq, int64_t h,
                           int64_t start, const float *S, float *R) {
    mn_chunk *c = &w->c;
    take_chunk(w, p, seq, h, start, MN_SCAN_BACKWARD);
    mn_prefetch_next(p->cot_o, c, c->h, p->call->V);
    mn_prefetch_written(p->dv, c, p->call->V);
    mn_prefetch_written(p->dq, c, c->K);
    mn_prefetch_written(p->dw, c, c->K);
    mn_prefetch_written(p->de, c, c->K);
    const float *d_o = MN_ROW(float, p->cot_o, c->b, c->t0, h);
    const float *residual = R;
    int64_t r_row = w->col.n;
    if (!p->e.data) residual = MN_T(mn_chunk_residual)(R, &r_row, p, c, &w->col, S);
    if (d_o) d_o += w->col.j0;
    residual_adjoints(w, p, d_o);
    key_gradients(w, p, S, residual, r_row, d_o);
    retreat(w, p, d_o);
}

/* States before each chunk of [from, end) from the state in states[0], residuals with them; the
 * state behind the last chunk goes to `next` unless it is NULL. */
static void replay(work *w, const mn_linear *p, const mn_sequence *seq, int64_t h, int64_t from,
                   int64_t end, int64_t state, int64_t values, float *next) {
    for (int64_t i = from; i < end; i++) {
        float *S = w->states + (i - from) * state, *after = i + 1 < end ? S + state : next;
        if (!after && !p->e.data) return;
        take_chunk(w, p, seq, h, i * MN_CHUNK, MN_SCAN_REPLAY);
        int64_t r_row;
        float *R = p->e.data ? w->R + (i - from) * values : NULL;
        const float *residual = MN_T(mn_chunk_residual)(R, &r_row, p, &w->c, &w->col, S);
        if (!after) return;
        memcpy(after, S, (size_t)(p->call->K * w->col.n) * sizeof *S);
        MN_T(mn_state_advance)(after, &w->c, &w->col, residual, r_row);
    }
}

/* One tile of one head of one sequence. Returns the sum of dG over its tokens when dG is one
 * number. */
static float backward_item(const mn_linear *p, int64_t n, int64_t h, int64_t tile, void *bank,
                           float *parts, float *scratch) {
    const mn_call *call = p->call;
    const mn_column_tiles tiles = mn_column_tiles_of(call);
    const mn_sequence seq = mn_sequence_at(call, n);
    const int64_t state = call->K * tiles.width, values = MN_CHUNK * tiles.width;
    const int64_t n_chunks = mn_ceil_div(seq.length, MN_CHUNK);
    float head_sum = 0.0f;
    work w;
    layout l;
    place(&w, scratch, p, &tiles);
    layout_of(&l, p, &tiles);
    w.col = mn_columns_at(call, tiles, tile);
    w.bank = tiles.count > 1 ? bank : NULL;
    w.first_slot = mn_bank_first(call, n);
    const int64_t n_spans = mn_ceil_div(n_chunks, w.span);
    const size_t state_bytes = (size_t)(call->K * w.col.n) * sizeof(float);
    MN_T(mn_state_load)(w.marks, p->state0, call, n, h, &w.col);
    for (int64_t s = 0; s + 1 < n_spans; s++) {
        memcpy(w.states, w.marks + s * state, state_bytes);
        replay(&w, p, &seq, h, s * w.span, (s + 1) * w.span, state, values,
               w.marks + (s + 1) * state);
    }
    MN_T(mn_state_load)(w.D, p->cot_state, call, n, h, &w.col);
    for (int64_t s = n_spans - 1; s >= 0; s--) {
        const int64_t from = s * w.span, end = mn_min(from + w.span, n_chunks);
        memcpy(w.states, w.marks + s * state, state_bytes);
        replay(&w, p, &seq, h, from, end, state, values, NULL);
        for (int64_t i = end - 1; i >= from; i--) {
            backward_chunk(&w, p, &seq, h, i * MN_CHUNK, w.states + (i - from) * state,
                           w.R + (i - from) * values);
            emit_chunk(&w, p, tile, tiles.count, parts, &l);
            if (w.c.width == 1) head_sum += MN_T(mn_map_sum)(w.dG, w.c.L);
        }
    }
    MN_T(mn_state_store)(p->dstate0, w.D, call, n, h, &w.col);
    return head_sum;
}

/* Adds the tiles' parts of all tokens of one head of one sequence, tile after tile. */
static float join_item(const mn_linear *p, int64_t n, int64_t h, const float *parts, float *row) {
    const mn_column_tiles tiles = mn_column_tiles_of(p->call);
    const mn_sequence seq = mn_sequence_at(p->call, n);
    const int64_t K = p->call->K, width = mn_decay_width(p->decay, K);
    float head_sum = 0.0f;
    layout l;
    layout_of(&l, p, &tiles);
    for (int64_t t = seq.t0; t < seq.t0 + seq.length; t++) {
        const float *at = parts + ((seq.b * p->call->T + t) * p->call->H + h) * l.token_floats;
        memcpy(row, at, (size_t)l.token_floats * sizeof *row);
        for (int64_t tile = 1; tile < tiles.count; tile++) {
            add_row(row, at + (size_t)tile * l.tile_floats, l.token_floats);
        }
        const float *dG = row + l.token_floats - width;
        emit_token(p, seq.b, t, h, row, p->e.data ? row + 2 * K : NULL, row + K, dG, width);
        if (width == 1) head_sum += *dG;
    }
    return head_sum;
}

void MN_T(mn_linear_backward_run)(const mn_linear *p, int phase, int64_t item, void *shared,
                                  void *scratch) {
    const int64_t H = p->call->H;
    const mn_column_tiles tiles = mn_column_tiles_of(p->call);
    layout l;
    layout_of(&l, p, &tiles);
    float *parts = (float *)((char *)shared + l.bank_bytes), sum;
    float *heads = parts + (size_t)tiles.count * l.tile_floats;
    if (phase == 0) {
        MN_T(mn_bank_fill)(shared, p, item);
    } else if (phase == 1) {
        const int64_t head = item / tiles.count;
        sum = backward_item(p, head / H, head % H, item % tiles.count, shared, parts, scratch);
        if (l.head_floats && tiles.count == 1) heads[head] = sum;
    } else if (phase == 2) {
        sum = join_item(p, item / H, item % H, parts, scratch);
        if (l.head_floats) heads[item] = sum;
    } else {
        double total = 0.0;
        for (int64_t n = 0; n < mn_n_sequences(p->call); n++) total += heads[n * H + item];
        *MN_ROW_OUT(float, p->dg, 0, 0, item) = (float)total;
    }
}
