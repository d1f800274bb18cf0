/* kalman.h - Kalman attention: what a kla layer reads at a token, as weights of the values before.
 *
 *   lam_t = lam_(t-1) / d_t + k_t^2 prec_t      d_t = a^2 + p lam_(t-1)      f_t = a / d_t
 *   M_ts  = sum_n q_tn / lam_tn (f_(s+1) ... f_t)_n k_sn prec_s
 *   y_t   = sum_s M_ts v_s + rest_t             rest_t = sum_n q_tn / lam_tn (f_1 ... f_t eta_0)_n
 *
 * per channel, n over slots; eta_0 and lam_0 are what the state held before the first token that
 * was heard. In double precision, from what passes tell. */
#ifndef MN_MODEL_KALMAN_H
#define MN_MODEL_KALMAN_H

#include "model/model.h"

typedef struct mn_kalman mn_kalman;

/* The kla layers of a model; those that read the prediction (decode_from_prior) are left out. */
mn_status mn_kalman_create(mn_kalman **out, const mn_model *model);
void mn_kalman_destroy(mn_kalman *kalman);    // NULL accepted

int mn_kalman_layers(const mn_kalman *kalman);
int mn_kalman_layer(const mn_kalman *kalman, int i);    // its place in the model

/* What was heard is forgotten; the next pass goes on from `state`, of one sequence. */
mn_status mn_kalman_from(mn_kalman *kalman, const mn_model_state *state);

/* Hears a pass of one sequence, whose tokens follow those of the passes heard before. */
const mn_tap *mn_kalman_tap(mn_kalman *kalman, mn_tape *tape);

/* Whether everything was heard; the failure, if not. */
mn_status mn_kalman_status(const mn_kalman *kalman);

/* The row of token t of layer i: into weights[s], s = 0 .. t, the mean of |M_ts| over the channels.
 * `before` is the mean of |rest_t| over that of |y_t|, `digits` those to which both sides of the
 * equation for y_t agree. */
typedef struct mn_kalman_row {
    double *weights;           // of t + 1 numbers, the caller's
    double before, digits;
} mn_kalman_row;

mn_status mn_kalman_read(mn_kalman_row *row, const mn_kalman *kalman, int i, int64_t t);

#endif
