/* riccati_args.h - the covariance pass is the Bayesian Layer with no value columns, so that its
 * kernels, reference and vector alike, are the same code. */
#ifndef MN_KERNELS_RICCATI_ARGS_H
#define MN_KERNELS_RICCATI_ARGS_H

#include <string.h>

#include "mneme.h"

static inline mn_bayes_args mn_riccati_as_bayes(const mn_riccati_args *r) {
    mn_bayes_args p;
    memset(&p, 0, sizeof p);
    p.call = r->call;
    p.scale = r->scale;
    p.q = r->q, p.k = r->k, p.la = r->la, p.theta = r->theta;
    p.l2 = r->l2, p.r2 = r->r2, p.p0 = r->p0, p.P0 = r->P0;
    p.gain = r->gain, p.gainvec = r->gainvec, p.kvar = r->kvar, p.qvar = r->qvar, p.P = r->P;
    p.cot.gain = r->cot.gain, p.cot.gainvec = r->cot.gainvec, p.cot.kvar = r->cot.kvar;
    p.cot.qvar = r->cot.qvar, p.cot.P = r->cot.P;
    p.grad.q = r->grad.q, p.grad.k = r->grad.k, p.grad.la = r->grad.la;
    p.grad.theta = r->grad.theta, p.grad.l2 = r->grad.l2, p.grad.r2 = r->grad.r2;
    p.grad.p0 = r->grad.p0, p.grad.P0 = r->grad.P0;
    p.call.V = 0;
    return p;
}

#endif
