/* hyper.c - the steps of a strip that forward and backward share. */
#include "kernels/cpu/hyper/hyper.h"

#include <math.h>
#include <string.h>

#include "kernels/cpu/gemm/gemm.h"
#include "kernels/cpu/attention/past.h"
#include "kernels/cpu/simd/vec.h"

hyper_strip MN_T(mn_hyper_strip)(const mn_hyper_args *p, int64_t n, int64_t head, int64_t first) {
    const mn_call *c = &p->call;
    hyper_strip s = { .p = p, .seq = mn_sequence_at(c, n), .head = head, .first = first };
    const int64_t before = c->cu_seqlens ? 0 : c->L - c->T;
    s.n_branches = hyper_branches(p);
    s.n_rows = mn_min(HYPER_ROWS, s.seq.length - first);
    s.n_keys = before + first + s.n_rows;
    s.row = s.n_keys + s.n_rows - 1;
    s.key0 = s.seq.t0;
    const bool by_key = p->layout == HYPER_POSITION;
    s.mix_at = by_key ? s.n_rows - 1 : 0;
    s.mix_row = by_key ? s.row : s.row + 1;
    return s;
}

hyper_mix MN_T(mn_hyper_mix)(const hyper_strip *s, int branch, float **scratch) {
    const mn_hyper_args *p = s->p;
    const mn_call *c = &p->call;
    const bool second = branch == 2;
    const int64_t which = second ? s->head : s->head + branch * c->H;
    const int64_t oldest = p->layout == HYPER_POSITION ? 0 : c->P - s->n_keys;
    hyper_mix m = { .P = c->P, .R = second ? c->W : c->R };
    m.U = MN_ROW(float, second ? p->U2 : p->U1, 0, 0, which);
    m.Vt = MN_ROW(float, second ? p->Vt2 : p->Vt1, 0, 0, which);
    m.d = MN_ROW(float, second ? p->d2 : p->d1, 0, 0, which);
    if (!m.U || !m.Vt) m.U = m.Vt = NULL;
    if (m.U) m.U += oldest * m.R;
    if (m.Vt) m.Vt += oldest;
    if (m.d) m.d += oldest;
    m.c = *scratch;
    m.h = m.c + HYPER_ROWS * m.R;
    m.hc = m.h + HYPER_ROWS * m.R;
    *scratch = m.hc + HYPER_ROWS * m.R;
    const mn_in *controls = second ? &p->c2 : &p->c1;
    if (controls->data) MN_T(mn_hyper_gather)(s, m.c, controls, which, m.R);
    else for (int64_t i = 0; i < s->n_rows * m.R; i++) m.c[i] = 1.0f;
    return m;
}

void MN_T(mn_hyper_mask)(const hyper_strip *s, float *at) {
    for (int64_t r = 0; r < s->n_rows; r++) {
        const size_t bytes = (size_t)(s->n_rows - 1 - r) * sizeof *at;
        float *lags = at + r * (s->row + 1);
        memset(lags, 0, bytes);
        memset(lags + s->n_keys, 0, bytes);    // by key: right of the row's own
    }
}

void MN_T(mn_hyper_gather)(const hyper_strip *s, float *to, const mn_in *from, int64_t which,
                           int64_t width) {
    const size_t bytes = (size_t)width * sizeof *to;
    for (int64_t r = 0; r < s->n_rows; r++) {
        const float *row = MN_ROW(float, *from, s->seq.b, s->seq.t0 + s->first + r, which);
        if (row) memcpy(to + r * width, row, bytes);
        else memset(to + r * width, 0, bytes);
    }
}

void MN_T(mn_hyper_scores)(const hyper_strip *s, float *z, const float *q, const mn_in *k,
                           int64_t which, int64_t width) {
    float *by_key = hyper_by_key(s, z);
    for (int64_t i = 0; i < s->n_keys; i += HYPER_COLUMNS) {
        const float *k_i = MN_ROW(float, *k, s->seq.b, s->key0 + i, which);
        MN_T(mn_past_scores)(by_key + i, s->row, q, s->n_rows, k_i, k->stride[1],
                             mn_min(HYPER_COLUMNS, s->n_keys - i), width, 1.0f);
    }
    MN_T(mn_hyper_mask)(s, z);
}

/* h = z U over the view that is mixed, and hc = h c */
static void contract(const hyper_strip *s, const float *z, const hyper_mix *m) {
    for (int64_t i = 0; i < s->n_keys; i += HYPER_COLUMNS) {
        const int64_t n = mn_min(HYPER_COLUMNS, s->n_keys - i);
        const mn_gemm_args g = { .c = m->h, .c_row = m->R, .a = z + s->mix_at + i,
                                 .a_row = s->mix_row, .a_col = 1, .b = m->U + i * m->R,
                                 .b_row = m->R, .M = s->n_rows, .N = m->R, .K = n, .alpha = 1.0f,
                                 .base = i == 0 ? MN_GEMM_SET : MN_GEMM_ADD };
        MN_T(mn_gemm)(&g);
    }
    for (int64_t i = 0; i < s->n_rows * m->R; i++) m->hc[i] = m->h[i] * m->c[i];
}

/* x = z (1 + d), columns i .. i + n - 1 of the view that is mixed */
static void scale_columns(const hyper_strip *s, float *x, const float *z, const float *d, int64_t i,
                          int64_t n) {
    const vf one = vf_set1(1.0f);
    for (int64_t r = 0; r < s->n_rows; r++) {
        const float *from = z + s->mix_at + r * s->mix_row + i;
        float *to = x + s->mix_at + r * s->mix_row + i;
        int64_t a = 0;
        for (; a + MN_VW <= n; a += MN_VW) {
            const vf factor = d ? vf_add(one, vf_load(d + i + a)) : one;
            vf_store(to + a, vf_mul(vf_load(from + a), factor));
        }
        if (a == n) continue;
        const int lanes = (int)(n - a);
        const vf factor = d ? vf_add(one, vf_load_n(d + i + a, lanes)) : one;
        vf_store_n(to + a, vf_mul(vf_load_n(from + a, lanes), factor), lanes);
    }
}

void MN_T(mn_hyper_apply)(const hyper_strip *s, float *x, const float *z, const hyper_mix *m) {
    if (m->U) contract(s, z, m);
    for (int64_t i = 0; i < s->n_keys; i += HYPER_COLUMNS) {
        const int64_t n = mn_min(HYPER_COLUMNS, s->n_keys - i);
        if (x != z || m->d) scale_columns(s, x, z, m->d, i, n);
        if (!m->U) continue;
        const mn_gemm_args g = { .c = x + s->mix_at + i, .c_row = s->mix_row, .a = m->hc,
                                 .a_row = m->R, .a_col = 1, .b = m->Vt + i, .b_row = m->P,
                                 .M = s->n_rows, .N = n, .K = m->R, .alpha = 1.0f,
                                 .base = MN_GEMM_ADD };
        MN_T(mn_gemm)(&g);
    }
    MN_T(mn_hyper_mask)(s, x);
}

/* One row; returns the sum of x1^2. */
static float activate_row(float *base, const float *x1, const float *x2, int64_t n) {
    vf square = vf_zero();
    for (int64_t i = 0; i < n; i += MN_VW) {
        const int lanes = vf_lanes(n - i);
        const vf x = vf_load_n(x1 + i, lanes);
        square = vf_fma(x, x, square);
        vf y = vf_max(vf_zero(), x);
        if (x2) y = vf_mul(y, vf_softplus(vf_load_n(x2 + i, lanes)));
        vf_store_n(base + i, y, lanes);
    }
    return vf_sum(square);
}

void MN_T(mn_hyper_activate)(const hyper_strip *s, float *base, const float *x1, const float *x2,
                             float *norm, float *scale) {
    enum { NONE = 2 };
    for (int64_t r = 0; r < s->n_rows; r++) {
        const int64_t at = r * (s->row + 1);
        const float sum = activate_row(base + at, x1 + at, x2 ? x2 + at : NULL, s->n_keys);
        norm[r] = sqrtf(sum);
        scale[r] = s->p->norm == NONE ? 1.0f : 1.0f / fmaxf(norm[r], (float)s->p->eps);
    }
}

void MN_T(mn_hyper_read)(const hyper_strip *s, float *y, const float *w, const mn_in *x,
                         int64_t which, int64_t width) {
    const float *by_key = w + s->n_rows - 1;
    for (int64_t i = 0; i < s->n_keys; i += HYPER_COLUMNS) {
        const mn_gemm_args g = {
            .c = y, .c_row = width, .a = by_key + i, .a_row = s->row, .a_col = 1,
            .b = MN_ROW(float, *x, s->seq.b, s->key0 + i, which), .b_row = x->stride[1],
            .M = s->n_rows, .N = width, .K = mn_min(HYPER_COLUMNS, s->n_keys - i), .alpha = 1.0f,
            .base = i == 0 ? MN_GEMM_SET : MN_GEMM_ADD, .shape = MN_GEMM_A_LOWER,
            .diagonal = s->n_keys - s->n_rows - i,
        };
        MN_T(mn_gemm)(&g);
    }
}
