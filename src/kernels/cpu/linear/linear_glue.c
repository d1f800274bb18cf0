/* linear_glue.c - additive and delta as the one operator of linear.h. */
#include "kernels/cpu/linear/linear.h"

mn_linear MN_T(mn_linear_from_additive)(const mn_additive_args *args) {
    return (mn_linear){
        .call = &args->call, .scale = (float)args->scale, .decay = args->decay,
        .q = args->q, .w = args->k, .v = args->v, .g = args->g, .state0 = args->state0,
        .o = args->o, .state = args->state, .cot_o = args->cot.o, .cot_state = args->cot.state,
        .dq = args->grad.q, .dw = args->grad.k, .dv = args->grad.v, .dg = args->grad.g,
        .dstate0 = args->grad.state0,
    };
}

mn_linear MN_T(mn_linear_from_delta)(const mn_delta_args *args) {
    return (mn_linear){
        .call = &args->call, .scale = (float)args->scale, .decay = args->decay,
        .w_is_e = !args->w.data, .q = args->q, .e = args->e,
        .w = args->w.data ? args->w : args->e, .v = args->v, .beta = args->beta, .g = args->g,
        .state0 = args->state0, .o = args->o, .state = args->state,
        .cot_o = args->cot.o, .cot_state = args->cot.state,
        .dq = args->grad.q, .de = args->grad.e, .dw = args->grad.w, .dv = args->grad.v,
        .dbeta = args->grad.beta, .dg = args->grad.g, .dstate0 = args->grad.state0,
    };
}

#define LINEAR_PASS(op, pass, ...)                                                                 \
    bool MN_T(mn_##op##_##pass##_plan)(const void *args, mn_plan *plan) {                          \
        const mn_linear p = MN_T(mn_linear_from_##op)(args);                                       \
        return MN_T(mn_linear_##pass##_plan)(&p, plan);                                            \
    }                                                                                              \
    void MN_T(mn_##op##_##pass##_run)(const void *args, int phase, int64_t item, void *shared,     \
                                      void *scratch) {                                             \
        (void)phase, (void)shared;                                                                 \
        const mn_linear p = MN_T(mn_linear_from_##op)(args);                                       \
        MN_T(mn_linear_##pass##_run)(__VA_ARGS__);                                                 \
    }

LINEAR_PASS(additive, forward, &p, phase, item, shared, scratch)
LINEAR_PASS(additive, backward, &p, phase, item, shared, scratch)
LINEAR_PASS(delta, forward, &p, phase, item, shared, scratch)
LINEAR_PASS(delta, backward, &p, phase, item, shared, scratch)
LINEAR_PASS(additive, step, &p, item, scratch)
LINEAR_PASS(delta, step, &p, item, scratch)
