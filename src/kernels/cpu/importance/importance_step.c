/* importance_step.c - one token of Palimpsa, the state in place: each number read and written once.
 *
 *   aI = a I      M = mu aI + k v'      I <- aI + (1 - a) ip + k^2 b'      mu <- M / I
 *   o = scale mu'q      ovar_j = scale^2 sum_i q_i^2 / I_ij
 *
 * a I is I - (1 - a) I for weak decays, so that a decay close to 1 applied a million times does not
 * carry its rounding error a million times. One item is some columns of one head, walked row by
 * row in the order of memory; the sums of the columns live in the first cache. (Several rows at a
 * time would spare loads of the sums, but halves the speed once states come from beyond the
 * caches.) */
#include <math.h>

#include "base/checked.h"
#include "base/util.h"
#include "kernels/cpu/importance/importance.h"

/* Vectors of a row whose sums fit the registers; columns of an item when there are few heads */
enum { STRIP = MN_VW == 16 ? 8 : 4, NARROW = 32 };

/* Columns of an item: all of them, unless there are few heads to share out. */
static int64_t width_of(const mn_call *c) {
    return c->B * c->H >= 4 ? c->V : mn_min(c->V, NARROW);
}

bool MN_T(mn_importance_step_plan)(const void *args, mn_plan *plan) {
    const mn_call *c = args;
    if (!mn_cells_fit(c)) return false;
    const int64_t width = width_of(c);
    plan->n_phases = 1;
    plan->items[0] = c->B * c->H * mn_ceil_div(c->V, width);
    return mn_mul_size(&plan->scratch_bytes, (size_t)(width + MN_VW), 2 * sizeof(float));
}

/* One head's token, from the first column of the item on. */
typedef struct token {
    const float *q, *k, *v, *b;
    const float *mu0, *imp0;       // NULL: fresh
    float *mu, *imp;               // NULL: not wanted
    float *o, *ovar;               // sums
    float factor, ip, gain;        // gain = (1 - a) ip
    bool weak;                     // a I is I + factor I, else factor I
    int64_t row;
} token;

MN_ALWAYS_INLINE vf load_lanes(const float *p, int lanes, bool masked) {
    return masked ? vf_load_n(p, lanes) : vf_load(p);
}

MN_ALWAYS_INLINE void store_lanes(float *p, vf x, int lanes, bool masked) {
    if (masked) vf_store_n(p, x, lanes);
    else vf_store(p, x);
}

/* What all cells share, in registers. */
typedef struct common {
    vf factor, gain, prior, keep;    // keep: all bits where a I is I + factor I
} common;

/* q, k and k^2 of one key row */
typedef struct key {
    vf q, k, k2;
} key;

static inline key key_at(const token *p, int64_t i) {
    return (key){ vf_set1(p->q[i]), vf_set1(p->k[i]), vf_set1(p->k[i] * p->k[i]) };
}

/* One row of cells, one vector of columns from j on; adds to o and ovar. partial: some pointers of
 * the state may be NULL. It, spread and masked are constants where this is expanded. */
MN_ALWAYS_INLINE void cell(vf *o, vf *ovar, const token *p, const common *s, const key *row,
                           int64_t i, int64_t j, bool partial, bool spread, int lanes,
                           bool masked) {
    const bool imp0 = !partial || p->imp0, mu0 = !partial || p->mu0;
    const int64_t at = i * p->row + j;
    const vf I0 = imp0 ? load_lanes(p->imp0 + at, lanes, masked) : s->prior;
    const vf mu = mu0 ? load_lanes(p->mu0 + at, lanes, masked) : vf_zero();
    const vf aI = vf_fma(s->factor, I0, vi_as_vf(vi_and(vf_as_vi(s->keep), vf_as_vi(I0))));
    const vf M = vf_fma(row->k, load_lanes(p->v + j, lanes, masked), vf_mul(mu, aI));
    vf I = vf_add(aI, vf_fma(row->k2, load_lanes(p->b + j, lanes, masked), s->gain)), next;
    if (masked) I = vf_select(vm_first(lanes), I, vf_set1(1.0f));
    if (spread) {
        const vf r = vf_div(vf_set1(1.0f), I);
        next = vf_mul(M, r);
        *ovar = vf_fma(vf_mul(row->q, row->q), r, *ovar);
    } else {
        next = vf_div(M, I);
    }
    *o = vf_fma(row->q, next, *o);
    if (!partial || p->mu) store_lanes(p->mu + at, next, lanes, masked);
    if (!partial || p->imp) store_lanes(p->imp + at, I, lanes, masked);
}

/* Rows of exactly `vectors` whole vectors, a constant: their sums stay in registers. */
MN_ALWAYS_INLINE void narrow_rows(const token *p, const common *s, int64_t K, int vectors,
                                  bool spread) {
    vf o[STRIP], ovar[STRIP];
    MN_UNROLL
    for (int c = 0; c < vectors; c++) o[c] = ovar[c] = vf_zero();
    for (int64_t i = 0; i < K; i++) {
        const key row = key_at(p, i);
        MN_UNROLL
        for (int c = 0; c < vectors; c++) {
            cell(&o[c], &ovar[c], p, s, &row, i, c * MN_VW, false, spread, MN_VW, false);
        }
    }
    MN_UNROLL
    for (int c = 0; c < vectors; c++) {
        vf_store(p->o + c * MN_VW, o[c]);
        vf_store(p->ovar + c * MN_VW, ovar[c]);
    }
}

/* Rows of any width: sums in memory. */
MN_ALWAYS_INLINE void wide_rows(const token *p, const common *s, int64_t K, int64_t columns,
                                bool partial, bool spread) {
    for (int64_t j = 0; j < columns; j += MN_VW) {
        vf_store(p->o + j, vf_zero());
        vf_store(p->ovar + j, vf_zero());
    }
    for (int64_t i = 0; i < K; i++) {
        const key row = key_at(p, i);
        for (int64_t j = 0; j < columns; j += MN_VW) {
            const int lanes = vf_lanes(columns - j);
            vf o = vf_load(p->o + j), ovar = spread ? vf_load(p->ovar + j) : vf_zero();
            if (lanes == MN_VW) cell(&o, &ovar, p, s, &row, i, j, partial, spread, lanes, false);
            else cell(&o, &ovar, p, s, &row, i, j, partial, spread, lanes, true);
            vf_store(p->o + j, o);
            if (spread) vf_store(p->ovar + j, ovar);
        }
    }
}

/* A whole state, the common call, is walked without questions. */
MN_ALWAYS_INLINE void all_cells(const token *p, int64_t K, int64_t columns, bool spread) {
    const common s = { vf_set1(p->factor), vf_set1(p->gain), vf_set1(p->ip),
                       vi_as_vf(vi_set1(p->weak ? -1 : 0)) };
    const bool whole = p->mu0 && p->imp0 && p->mu && p->imp;
    if (!whole) wide_rows(p, &s, K, columns, true, spread);
    else if (columns == STRIP * MN_VW) narrow_rows(p, &s, K, STRIP, spread);
    else if (columns == STRIP / 2 * MN_VW) narrow_rows(p, &s, K, STRIP / 2, spread);
    else wide_rows(p, &s, K, columns, false, spread);
}

static void write_sums(float *to, const float *sums, double scale, int64_t n) {
    const vf factor = vf_set1((float)scale);
    for (int64_t j = 0; to && j < n; j += MN_VW) {
        vf_store_row(to + j, vf_mul(factor, vf_load(sums + j)), vf_lanes(n - j));
    }
}

void MN_T(mn_importance_step_run)(const void *args, int phase, int64_t item, void *shared,
                                  void *scratch) {
    (void)phase, (void)shared;
    const mn_importance_args *p = args;
    const mn_call *c = &p->call;
    const int64_t width = width_of(c), tiles = mn_ceil_div(c->V, width), j0 = item % tiles * width;
    const int64_t b = item / tiles / c->H, h = item / tiles % c->H;
    const int64_t columns = mn_min(width, c->V - j0), padded = mn_ceil_div(columns, MN_VW) * MN_VW;
    const double g = *MN_ROW(float, p->g, b, 0, h), ip = *MN_ROW(float, p->ip, 0, 0, h);
    const double forget = -expm1(g);
    token t = {
        .q = MN_ROW(float, p->q, b, 0, h), .k = MN_ROW(float, p->k, b, 0, h),
        .v = MN_ROW(float, p->v, b, 0, h) + j0, .b = MN_ROW(float, p->b, b, 0, h) + j0,
        .mu0 = MN_ROW(float, p->mu0, b, 0, h), .imp0 = MN_ROW(float, p->imp0, b, 0, h),
        .mu = MN_ROW_OUT(float, p->mu, b, 0, h), .imp = MN_ROW_OUT(float, p->imp, b, 0, h),
        .o = scratch, .ovar = (float *)scratch + padded, .row = c->V,
        .ip = (float)ip, .gain = (float)(forget * ip),
        .weak = forget < 0.5, .factor = (float)(forget < 0.5 ? -forget : exp(g)),
    };
    if (t.mu0) t.mu0 += j0;
    if (t.imp0) t.imp0 += j0;
    if (t.mu) t.mu += j0;
    if (t.imp) t.imp += j0;
    if (p->ovar.data) all_cells(&t, c->K, columns, true);
    else all_cells(&t, c->K, columns, false);
    float *o = MN_ROW_OUT(float, p->o, b, 0, h), *ovar = MN_ROW_OUT(float, p->ovar, b, 0, h);
    write_sums(o ? o + j0 : NULL, t.o, p->scale, columns);
    write_sums(ovar ? ovar + j0 : NULL, t.ovar, p->scale * p->scale, columns);
}
