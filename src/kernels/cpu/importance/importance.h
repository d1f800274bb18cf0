/* importance.h - what forward and backward of Palimpsa share: the frame and the cells.
 *
 * Frame. A decay common to all cells need not touch them. With C_t the sum of log decays since the
 * frame began and f_t = exp(-C_t), the cells hold M f and J f, and a token does
 *
 *   M f += k (f v)'        J f += k^2 (f b)'        I f = J f + prior_t        mu = (M f) / (I f)
 *
 * which is one multiply-add each for M and J, and no rounded decay is ever applied T times. Before
 * -C_t would pass MN_FRAME_SPAN a new frame begins: the cells are multiplied by exp(C), so f stays
 * small, and a decay of exp(-40) is a frame of its own.
 *
 * Importance. I is kept as J + p_t with p_t one number per head: p_0 = min(ip, smallest I_0),
 * p_t = a p_{t-1} + (1 - a) ip, J_0 = I_0 - p_0, J_t = a J_{t-1} + k^2 b. All terms are >= 0, so
 * nothing cancels whatever I_0, and a huge prior does not swallow small gains. At a fresh start
 * J_0 = 0 and p_t = ip. In the frame, prior_t = p_t f_t.
 *
 * Cells lie in blocks of `rows` key rows by one vector of value columns: `rows` vectors of M, then
 * as many of J. */
#ifndef MN_KERNELS_CPU_IMPORTANCE_IMPORTANCE_H
#define MN_KERNELS_CPU_IMPORTANCE_IMPORTANCE_H

#include "kernels/access.h"
#include "kernels/kernel.h"
#include "kernels/cpu/chunk/cells.h"
#include "kernels/cpu/simd/vec.h"

#define MN_FRAME_SPAN 4.0

/* Where a sequence is between two blocks of tokens. */
typedef struct mn_frame {
    double ip;       // prior of the head
    double fallen;   // C
    double prior;    // p
} mn_frame;

/* What tokens need of the frame, one number each. */
typedef struct mn_frame_tokens {
    float *grow;     // f
    float *renew;    // factor on the cells before the token: 1 inside a frame
    float *prior;    // p f
    float *from_ip;  // (1 - a) f: how ip enters I f. NULL: not wanted
    float *drift;    // a f (p_{t-1} - ip): how a moves p f. With from_ip
} mn_frame_tokens;

/* Fills `out` for n tokens from t0 on and moves `frame` behind them. */
void MN_T(mn_frame_advance)(mn_frame *frame, const mn_frame_tokens *out,
                            const mn_importance_args *p, int64_t b, int64_t t0, int64_t h,
                            int64_t n);

/* A rectangle of cells of one head of one sequence. */
typedef struct mn_cells {
    int64_t n, h;          // sequence, head
    int64_t i0, i1;        // key rows
    int64_t j0, j1;        // value columns
    int rows;              // of a block
    int64_t groups;        // ceil((i1 - i0) / rows)
    int64_t vectors;       // ceil((j1 - j0) / MN_VW)
} mn_cells;

static inline mn_cells mn_cells_of(int64_t n, int64_t h, int64_t i0, int64_t i1, int64_t j0,
                                   int64_t j1, int rows) {
    return (mn_cells){ n, h, i0, i1, j0, j1, rows, (i1 - i0 + rows - 1) / rows,
                       (j1 - j0 + MN_VW - 1) / MN_VW };
}

/* Floats of the whole rectangle, and the block of group g and vector c. */
static inline int64_t mn_cells_floats(const mn_cells *t) {
    return t->groups * t->vectors * 2 * t->rows * MN_VW;
}

static inline float *mn_cells_block(float *cells, const mn_cells *t, int64_t g, int64_t c) {
    return cells + (g * t->vectors + c) * 2 * t->rows * MN_VW;
}

/* M and J of the first state; starts `frame`. Rows and lanes outside the rectangle get M = 0 and a
 * harmless importance. */
void MN_T(mn_cells_load)(float *cells, mn_frame *frame, const mn_importance_args *p,
                         const mn_cells *t);

/* The final mu and imp, where wanted. */
void MN_T(mn_cells_store)(const mn_importance_args *p, const float *cells, const mn_frame *frame,
                          const mn_cells *t);

/* I of the first state, row (i, j): `lanes` columns from j on, ip where there is none. */
static inline vf mn_first_importance(const mn_importance_args *p, const mn_cells *t, int64_t i,
                                     int64_t j, int lanes, float ip) {
    const float *imp0 = MN_ROW(float, p->imp0, t->n, 0, t->h);
    const vf prior = vf_set1(ip);
    if (!imp0 || i >= t->i1) return prior;
    return vf_select(vm_first(lanes), vf_load_row(imp0 + i * p->call.V + j, lanes), prior);
}

#endif
