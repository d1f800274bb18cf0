/* riccati_args.h - the covariance pass is the Bayesian Layer with no value columns, so that its
 * kernels, reference and vector alike, are the same code. */
#ifndef MN_KERNELS_RICCATI_ARGS_H
#define MN_KERNELS_RICCATI_ARGS_H

#include "mneme.h"

static inline mn_bayes_args mn_riccati_as_bayes(const mn_riccati_args *r) {
    mn_bayes_args p = {
        .call = r->call, .scale = r->scale,
        .q = r->q, .k = r->k, .la = r->la, .theta = r->theta,
        .l2 = r->l2, .r2 = r->r2, .p0 = r->p0, .P0 = r->P0,
        .gain = r->gain, .gainvec = r->gainvec, .kvar = r->kvar, .qvar = r->qvar, .P = r->P,
        .cot = { .gain = r->cot.gain, .gainvec = r->cot.gainvec, .kvar = r->cot.kvar,
                 .qvar = r->cot.qvar, .P = r->cot.P },
        .grad = { .q = r->grad.q, .k = r->grad.k, .la = r->grad.la, .theta = r->grad.theta,
                  .l2 = r->grad.l2, .r2 = r->grad.r2, .p0 = r->grad.p0, .P0 = r->grad.P0 },
    };
    p.call.V = 0;
    return p;
}

#endif
