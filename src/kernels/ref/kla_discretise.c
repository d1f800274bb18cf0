/* kla_discretise.c - KLA's dynamics from its parameters, cell by cell.
 *
 *   dt = softplus(delta) + 1e-7    c = exp(lambda_log)    p = max(process_noise, 1e-7)
 *   abar = exp(-c dt)              pbar = p dt w(2 c dt)  or, as a zero-order hold, p dt
 *
 * with w(x) = (1 - e^-x) / x, which tends to 1, so that c = 0 is no special case. The Ornstein-
 * Uhlenbeck form is the usual p / (2c) (1 - exp(-2 c dt)). Backward, with x = 2 c dt:
 *
 *   dc = -dabar dt abar + 2 dpbar p dt^2 w'(x)      ddt = -dabar c abar + dpbar p e^-x
 *   dlambda_log = c dc    ddelta = sigmoid(delta) ddt
 *   dprocess_noise = dpbar dt w(x), 0 where the noise is below 1e-7
 *
 * since d(dt w(2 c dt)) / d dt = e^-x. */
#include <math.h>

#include "kernels/ref/ref.h"

static double softplus(double x) {
    return fmax(x, 0.0) + log1p(exp(-fabs(x)));
}

static double sigmoid(double x) {
    return x >= 0.0 ? 1.0 / (1.0 + exp(-x)) : exp(x) / (1.0 + exp(x));
}

/* (1 - e^-x) / x and its slope (e^-x (1 + x) - 1) / x^2, by series where the differences cancel */
static double weight(double *slope, double x) {
    if (x < 0.05) {
        double term = 1.0, sum = 0.0, slope_sum = 0.0;
        for (int i = 1; i <= 14; i++) {            // w = sum_i (-x)^(i-1) / i!
            term /= i;
            sum += term * pow(-x, i - 1);
            if (i > 1) slope_sum -= term * (i - 1) * pow(-x, i - 2);
        }
        *slope = slope_sum;
        return sum;
    }
    *slope = (exp(-x) * (1.0 + x) - 1.0) / (x * x);
    return -expm1(-x) / x;
}

bool MN_REF(mn_kla_discretise_forward_plan)(const void *args, mn_plan *plan) {
    const mn_call *c = args;
    return mn_ref_plan(plan, c->V, 0);
}

void MN_REF(mn_kla_discretise_forward_run)(const void *args, int phase, int64_t item, void *shared,
                                           void *scratch) {
    (void)phase, (void)shared, (void)scratch;
    const mn_kla_discretise_args *p = args;
    const REAL *delta = p->delta.data, *lambda_log = p->lambda_log.data;
    const REAL *noise = p->process_noise.data;
    REAL *abar = p->abar.data, *pbar = p->pbar.data;
    for (int64_t i = item * p->call.K; i < (item + 1) * p->call.K; i++) {
        const double dt = softplus(delta[i]) + 1e-7, c = exp(lambda_log[i]);
        double slope;
        const double w = p->mode == 0 ? weight(&slope, 2.0 * c * dt) : 1.0;
        if (abar) abar[i] = (REAL)exp(-c * dt);
        if (pbar) pbar[i] = (REAL)(fmax(noise[i], 1e-7) * dt * w);
    }
}

bool MN_REF(mn_kla_discretise_backward_plan)(const void *args, mn_plan *plan) {
    return MN_REF(mn_kla_discretise_forward_plan)(args, plan);
}

void MN_REF(mn_kla_discretise_backward_run)(const void *args, int phase, int64_t item, void *shared,
                                            void *scratch) {
    (void)phase, (void)shared, (void)scratch;
    const mn_kla_discretise_args *p = args;
    const REAL *delta = p->delta.data, *lambda_log = p->lambda_log.data;
    const REAL *noise = p->process_noise.data;
    const REAL *cot_a = p->cot.abar.data, *cot_p = p->cot.pbar.data;
    REAL *ddelta = p->grad.delta.data, *dlambda = p->grad.lambda_log.data;
    REAL *dnoise = p->grad.process_noise.data;
    for (int64_t i = item * p->call.K; i < (item + 1) * p->call.K; i++) {
        const double dt = softplus(delta[i]) + 1e-7, c = exp(lambda_log[i]);
        const double q = fmax(noise[i], 1e-7), abar = exp(-c * dt), x = 2.0 * c * dt;
        const double ga = mn_ref_get(cot_a, i), gp = mn_ref_get(cot_p, i);
        double slope = 0.0, w = 1.0, fade = 1.0;
        if (p->mode == 0) {
            w = weight(&slope, x);
            fade = exp(-x);
        }
        const double dc = -ga * dt * abar + 2.0 * gp * q * dt * dt * slope;
        const double ddt = -ga * c * abar + gp * q * fade;
        if (dlambda) dlambda[i] = (REAL)(c * dc);
        if (ddelta) ddelta[i] = (REAL)(sigmoid(delta[i]) * ddt);
        if (dnoise) dnoise[i] = (REAL)(noise[i] >= 1e-7 ? gp * dt * w : 0.0);
    }
}
