/* hyper.h - a strip of HyperMLP / HyperGLU: some query rows against all the keys they see.
 *
 * A strip is kept once and read in two ways. For row r of n_rows and key i of n_keys (the last row
 * is the query of the last key), with `row` floats from row to row,
 *
 *   by key   element (r, i) lies at   at + (n_rows - 1) + r row + i
 *   by lag   element (r, c) lies at   at + r (row + 1) + c,   c = i - r + n_rows - 1
 *
 * so that column c of the lag view has the same lag, n_keys - 1 - c, in every row. There a mixing
 * parameter is one number per column, and mixing is plain matrix products:
 *
 *   H = Z U    X = Z (1 + d) + (H c) Vt        with U (n_keys,R), Vt (R,n_keys), d (n_keys) the
 *                                              last entries of the parameters
 *
 * In layout position the parameters belong to keys, and the same products run over the key view
 * with their first entries.
 *
 * Two corners must be 0 for that: columns of the lag view left of a row's oldest key, and of the
 * key view right of its own key. Products fill them with numbers that mean nothing; hyper_mask
 * clears them. */
#ifndef MN_KERNELS_CPU_HYPER_HYPER_H
#define MN_KERNELS_CPU_HYPER_HYPER_H

#include "base/checked.h"
#include "base/util.h"
#include "kernels/kernel.h"
#include "kernels/tiles.h"
#include "kernels/cpu/simd/target.h"

enum { HYPER_ROWS = 48, HYPER_COLUMNS = 256 };    // of a strip; columns of one product
enum { HYPER_LAG, HYPER_POSITION };               // layouts

/* What the rows of a strip have in common. */
typedef struct hyper_strip {
    const mn_hyper_args *p;
    mn_sequence seq;
    int64_t head, n_branches;
    int64_t first, n_rows, n_keys, row;    // first token; see above
    int64_t key0;                          // first key of the sequence in the views of k and v
    int64_t mix_at, mix_row;               // the view that is mixed: its start, and from row to row
} hyper_strip;

/* One mix of a strip: parameters entered at the strip's oldest lag or key; NULL where absent. */
typedef struct hyper_mix {
    const float *U, *Vt, *d;
    int64_t P, R;
    float *c, *h, *hc;                     // (n_rows,R): controls, H, H c
} hyper_mix;

static inline int64_t hyper_branches(const mn_hyper_args *p) {
    return p->kind == 1 ? 2 : 1;
}

static inline int64_t hyper_longest(const mn_call *call) {
    return call->cu_seqlens ? mn_longest_sequence(call) : call->L;
}

/* Floats of the largest strip of a call; false when they overflow. */
static inline bool hyper_strip_floats(int64_t *out, const mn_call *call) {
    int64_t row;
    return mn_add_i64(&row, hyper_longest(call), HYPER_ROWS) && mn_mul_i64(out, row, HYPER_ROWS);
}

static inline float *hyper_by_key(const hyper_strip *s, float *at) {
    return at + s->n_rows - 1;
}

hyper_strip MN_T(mn_hyper_strip)(const mn_hyper_args *p, int64_t n, int64_t head, int64_t first);

/* The first mix of branch 0 or 1, or for branch 2 the second mix; memory from *scratch. */
hyper_mix MN_T(mn_hyper_mix)(const hyper_strip *s, int branch, float **scratch);

/* Clears the corners of a strip. */
void MN_T(mn_hyper_mask)(const hyper_strip *s, float *at);

/* rows of a view of (B,T,*,width), head or branch `which`, of the strip's tokens; 0 where absent */
void MN_T(mn_hyper_gather)(const hyper_strip *s, float *to, const mn_in *from, int64_t which,
                           int64_t width);

/* z = q k', masked */
void MN_T(mn_hyper_scores)(const hyper_strip *s, float *z, const float *q, const mn_in *k,
                           int64_t which, int64_t width);

/* x = mix(z), masked; x may be z. Leaves h and hc in the mix. */
void MN_T(mn_hyper_apply)(const hyper_strip *s, float *x, const float *z, const hyper_mix *m);

/* base = relu(x1) or softplus(x2) relu(x1), and scale[r] = what the row's output is multiplied by;
 * base may be x1. */
void MN_T(mn_hyper_activate)(const hyper_strip *s, float *base, const float *x1, const float *x2,
                             float *norm, float *scale);

/* y = w x: rows of the strip against key rows x of width `width`, y contiguous */
void MN_T(mn_hyper_read)(const hyper_strip *s, float *y, const float *w, const mn_in *x,
                         int64_t which, int64_t width);

#endif
