/* bayes_state.c - memory of the Bayesian Layer's chunks, and its states in and out. */
#include "kernels/cpu/bayes/bayes_chunk.h"

#include <string.h>

#include "base/checked.h"
#include "base/util.h"

float *MN_T(mn_take)(mn_space *space, int64_t rows, int64_t cols) {
    size_t count, end;
    const size_t line = 16, at = space->used;
    const bool fits = rows >= 0 && cols >= 0 && mn_mul_size(&count, (size_t)rows, (size_t)cols) &&
                      mn_add_size(&end, count, at + line) && end <= SIZE_MAX / sizeof(float);
    if (!fits) {
        space->ok = false;
        return NULL;
    }
    space->used = (end - 1) / line * line;
    return space->memory ? space->memory + at : NULL;
}

static int64_t padded(int64_t n) {
    return mn_ceil_div(n, MN_VW) * MN_VW;
}

void MN_T(mn_bayes_place)(mn_bayes_chunk *c, mn_space *space, const mn_bayes_args *p) {
    const int64_t L = MN_BAYES_CHUNK, K = p->call.K, most = INT64_MAX / 64;
    memset(c, 0, sizeof *c);
    c->p = p;
    if (K > most || p->call.V > most) {
        space->ok = false;
        return;
    }
    c->turns = p->theta.data != NULL;
    c->reads_variance = p->q.data && p->qvar.data;
    c->Kp = padded(K);
    c->R = c->turns ? 2 * c->Kp : c->Kp;
    c->Vp = padded(mn_ceil_div(p->call.V, p->call.G));
    c->noise_width = c->turns ? 3 * c->Kp : c->Kp;
    c->k = MN_T(mn_take)(space, L, c->Kp);
    c->q = MN_T(mn_take)(space, L, c->Kp);
    float **const rows[] = { &c->a, &c->phi, &c->kt, &c->qt, &c->kP, &c->qP, &c->u, &c->z, &c->w };
    for (size_t i = 0; i < MN_COUNTOF(rows); i++) *rows[i] = MN_T(mn_take)(space, L, c->R);
    c->noise = MN_T(mn_take)(space, L, c->noise_width);
    c->eps = MN_T(mn_take)(space, L, c->Vp);
    c->out = MN_T(mn_take)(space, L, c->Vp);
    c->ell = MN_T(mn_take)(space, L, L);
    c->g_sigma = MN_T(mn_take)(space, L, L);
    c->diagonal = MN_T(mn_take)(space, 1, c->R);
    c->wide = (double *)(void *)MN_T(mn_take)(space, 2, MN_T(mn_bayes_careful_doubles)(c));
}

void MN_T(mn_bayes_select)(mn_bayes_chunk *c, int64_t n, int64_t h, int64_t g) {
    const int64_t V = c->p->call.V, G = c->p->call.G;
    c->n = n;
    c->h = h;
    c->g = g;
    c->b = mn_sequence_at(&c->p->call, n).b;
    c->j0 = mn_ceil_div(g * V, G);
    c->columns = mn_ceil_div((g + 1) * V, G) - c->j0;
}

/* Row of the caller's state that is row i of part 0 (real) or 1 (imaginary) here */
static int64_t outer_row(const mn_bayes_chunk *c, int64_t i, int part) {
    return c->turns ? 2 * i + part : i;
}

void MN_T(mn_bayes_load_square)(float *P, const mn_bayes_chunk *c, mn_in from) {
    const int64_t K = c->p->call.K, n_rows = c->turns ? 2 * K : K;
    const float *block = MN_ROW(float, from, c->n, 0, c->h);
    memset(P, 0, (size_t)(c->R * c->R) * sizeof *P);
    if (!block) return;
    block += c->g * n_rows * n_rows;
    for (int64_t r = 0; r < n_rows; r++) {
        const int64_t i = r % K;
        float *row = P + (r / K * c->Kp + i) * c->R;
        const float *outer = block + outer_row(c, i, (int)(r / K)) * n_rows;
        if (!c->turns) {
            memcpy(row, outer, (size_t)K * sizeof *row);
            continue;
        }
        for (int64_t j = 0; j < K; j++) {
            row[j] = outer[2 * j];
            row[c->Kp + j] = outer[2 * j + 1];
        }
    }
}

void MN_T(mn_bayes_store_square)(mn_out to, const mn_bayes_chunk *c, const float *P) {
    const int64_t K = c->p->call.K, n_rows = c->turns ? 2 * K : K;
    float *block = MN_ROW_OUT(float, to, c->n, 0, c->h);
    if (!block) return;
    block += c->g * n_rows * n_rows;
    for (int64_t r = 0; r < n_rows; r++) {
        const int64_t i = r % K;
        const float *row = P + (r / K * c->Kp + i) * c->R;
        float *outer = block + outer_row(c, i, (int)(r / K)) * n_rows;
        if (!c->turns) {
            memcpy(outer, row, (size_t)K * sizeof *row);
            continue;
        }
        for (int64_t j = 0; j < K; j++) {
            outer[2 * j] = row[j];
            outer[2 * j + 1] = row[c->Kp + j];
        }
    }
}

void MN_T(mn_bayes_load_columns)(float *M, const mn_bayes_chunk *c, mn_in from) {
    const int64_t K = c->p->call.K, V = c->p->call.V;
    const float *block = MN_ROW(float, from, c->n, 0, c->h);
    memset(M, 0, (size_t)(c->R * c->Vp) * sizeof *M);
    for (int64_t r = 0; block && r < (c->turns ? 2 * K : K); r++) {
        const float *outer = block + outer_row(c, r % K, (int)(r / K)) * V + c->j0;
        memcpy(M + (r / K * c->Kp + r % K) * c->Vp, outer, (size_t)c->columns * sizeof *M);
    }
}

void MN_T(mn_bayes_store_columns)(mn_out to, const mn_bayes_chunk *c, const float *M) {
    const int64_t K = c->p->call.K, V = c->p->call.V;
    float *block = MN_ROW_OUT(float, to, c->n, 0, c->h);
    for (int64_t r = 0; block && r < (c->turns ? 2 * K : K); r++) {
        float *outer = block + outer_row(c, r % K, (int)(r / K)) * V + c->j0;
        memcpy(outer, M + (r / K * c->Kp + r % K) * c->Vp, (size_t)c->columns * sizeof *M);
    }
}

void MN_T(mn_bayes_first)(float *P, float *M, const mn_bayes_chunk *c) {
    const mn_bayes_args *p = c->p;
    MN_T(mn_bayes_load_square)(P, c, p->P0);
    MN_T(mn_bayes_load_columns)(M, c, p->M0);
    if (p->P0.data) return;
    const float *given = MN_ROW(float, p->p0, 0, 0, c->h), p0 = given ? *given : 1.0f;
    for (int64_t r = 0; r < c->R; r++) {
        if (r % c->Kp < p->call.K) P[r * (c->R + 1)] = p0;
    }
}

void MN_T(mn_bayes_load_values)(float *rows, const mn_bayes_chunk *c, mn_in view) {
    for (int64_t t = 0; t < c->L; t++) {
        const float *row = MN_ROW(float, view, c->b, c->t0 + t, c->h);
        float *to = rows + t * c->Vp;
        const size_t count = row ? (size_t)c->columns : 0;
        if (count) memcpy(to, row + c->j0, count * sizeof *to);
        memset(to + count, 0, ((size_t)c->Vp - count) * sizeof *to);
    }
}
