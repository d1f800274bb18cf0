/* importance_cells.c - frames and cells of Palimpsa. Contract in importance.h. */
#include "kernels/cpu/importance/importance.h"

#include <math.h>

#include "base/util.h"

enum { BLOCK = 64 };    // tokens whose exponentials are taken together

static void exponentials(float *y, const float *x, int64_t n) {
    for (int64_t i = 0; i < n; i += MN_VW) {
        const int lanes = vf_lanes(n - i);
        vf_store_row(y + i, vf_exp(vf_load_row(x + i, lanes)), lanes);
    }
}

/* 1 - exp(x) */
static void forgetting(float *y, const float *x, int64_t n) {
    for (int64_t i = 0; i < n; i += MN_VW) {
        const int lanes = vf_lanes(n - i);
        vf_store_row(y + i, vf_neg(vf_expm1(vf_load_row(x + i, lanes))), lanes);
    }
}

/* At most BLOCK tokens, with log decays g. */
static void advance_block(mn_frame *frame, const mn_frame_tokens *out, const float *g, int64_t at,
                          int64_t n) {
    float forget[BLOCK], keep[BLOCK], grow_log[BLOCK], renew_log[BLOCK];
    double before[BLOCK], after[BLOCK];
    forgetting(forget, g, n);
    exponentials(keep, g, n);
    for (int64_t t = 0; t < n; t++) {
        const double fallen = frame->fallen + g[t];
        const bool full = fallen < -MN_FRAME_SPAN;
        renew_log[t] = full ? (float)fallen : 0.0f;
        frame->fallen = full ? 0.0 : fallen;
        grow_log[t] = (float)-frame->fallen;
        before[t] = frame->prior - frame->ip;
        frame->prior -= forget[t] * before[t];
        after[t] = frame->prior;
    }
    exponentials(out->renew + at, renew_log, n);
    exponentials(out->grow + at, grow_log, n);
    for (int64_t t = 0; t < n; t++) out->prior[at + t] = (float)(after[t] * out->grow[at + t]);
    for (int64_t t = 0; out->from_ip && t < n; t++) {
        out->from_ip[at + t] = forget[t] * out->grow[at + t];
        out->drift[at + t] = (float)(keep[t] * out->grow[at + t] * before[t]);
    }
}

void MN_T(mn_frame_advance)(mn_frame *frame, const mn_frame_tokens *out,
                            const mn_importance_args *p, int64_t b, int64_t t0, int64_t h,
                            int64_t n) {
    for (int64_t at = 0; at < n; at += BLOCK) {
        const int64_t count = mn_min(BLOCK, n - at);
        float g[BLOCK];
        for (int64_t t = 0; t < count; t++) g[t] = *MN_ROW(float, p->g, b, t0 + at + t, h);
        advance_block(frame, out, g, at, count);
    }
}

/* The smallest of ip and the first importances of the rectangle */
static float first_prior(const mn_importance_args *p, const mn_cells *t, float ip) {
    vf least = vf_set1(ip);
    for (int64_t i = t->i0; p->imp0.data && i < t->i1; i++) {
        for (int64_t j = t->j0; j < t->j1; j += MN_VW) {
            least = vf_min(mn_first_importance(p, t, i, j, vf_lanes(t->j1 - j), ip), least);
        }
    }
    return -vf_max_lanes(vf_neg(least));
}

void MN_T(mn_cells_load)(float *cells, mn_frame *frame, const mn_importance_args *p,
                         const mn_cells *t) {
    const float ip = *MN_ROW(float, p->ip, 0, 0, t->h), first = first_prior(p, t, ip);
    const float *mu0 = MN_ROW(float, p->mu0, t->n, 0, t->h);
    *frame = (mn_frame){ .ip = ip, .prior = first };
    for (int64_t g = 0; g < t->groups; g++) {
        for (int64_t c = 0; c < t->vectors; c++) {
            float *M = mn_cells_block(cells, t, g, c), *J = M + t->rows * MN_VW;
            const int64_t j = t->j0 + c * MN_VW;
            const int lanes = vf_lanes(t->j1 - j);
            for (int r = 0; r < t->rows; r++) {
                const int64_t i = t->i0 + g * t->rows + r;
                const bool given = mu0 && i < t->i1;
                const vf I = mn_first_importance(p, t, i, j, lanes, ip);
                const vf mu = given ? vf_load_row(mu0 + i * p->call.V + j, lanes) : vf_zero();
                vf_store(M + r * MN_VW, vf_mul(mu, I));
                vf_store(J + r * MN_VW, vf_sub(I, vf_set1(first)));
            }
        }
    }
}

void MN_T(mn_cells_store)(const mn_importance_args *p, const float *cells, const mn_frame *frame,
                          const mn_cells *t) {
    float *mu = MN_ROW_OUT(float, p->mu, t->n, 0, t->h);
    float *imp = MN_ROW_OUT(float, p->imp, t->n, 0, t->h);
    const vf keep = vf_set1((float)exp(frame->fallen)), prior = vf_set1((float)frame->prior);
    for (int64_t i = t->i0; (mu || imp) && i < t->i1; i++) {
        const int64_t g = (i - t->i0) / t->rows, r = (i - t->i0) % t->rows;
        for (int64_t c = 0; c < t->vectors; c++) {
            const float *M = mn_cells_block((float *)cells, t, g, c) + r * MN_VW;
            const float *J = M + t->rows * MN_VW;
            const int64_t at = i * p->call.V + t->j0 + c * MN_VW;
            const int lanes = vf_lanes(t->j1 - t->j0 - c * MN_VW);
            const vf I = vf_fma(keep, vf_load(J), prior), m = vf_mul(keep, vf_load(M));
            if (mu) vf_store_row(mu + at, vf_div(m, I), lanes);
            if (imp) vf_store_row(imp + at, I, lanes);
        }
    }
}
