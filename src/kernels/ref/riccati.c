/* riccati.c - the covariance pass alone: the Bayesian Layer of bayes.c with no value columns. */
#include "kernels/riccati_args.h"
#include "kernels/ref/ref.h"

bool MN_REF(mn_bayes_forward_plan)(const void *args, mn_plan *plan);
void MN_REF(mn_bayes_forward_run)(const void *args, int phase, int64_t item, void *shared,
                                  void *scratch);
bool MN_REF(mn_bayes_backward_plan)(const void *args, mn_plan *plan);
void MN_REF(mn_bayes_backward_run)(const void *args, int phase, int64_t item, void *shared,
                                   void *scratch);

bool MN_REF(mn_riccati_forward_plan)(const void *args, mn_plan *plan) {
    const mn_bayes_args p = mn_riccati_as_bayes(args);
    return MN_REF(mn_bayes_forward_plan)(&p, plan);
}

void MN_REF(mn_riccati_forward_run)(const void *args, int phase, int64_t item, void *shared,
                                    void *scratch) {
    const mn_bayes_args p = mn_riccati_as_bayes(args);
    MN_REF(mn_bayes_forward_run)(&p, phase, item, shared, scratch);
}

bool MN_REF(mn_riccati_backward_plan)(const void *args, mn_plan *plan) {
    const mn_bayes_args p = mn_riccati_as_bayes(args);
    return MN_REF(mn_bayes_backward_plan)(&p, plan);
}

void MN_REF(mn_riccati_backward_run)(const void *args, int phase, int64_t item, void *shared,
                                     void *scratch) {
    const mn_bayes_args p = mn_riccati_as_bayes(args);
    MN_REF(mn_bayes_backward_run)(&p, phase, item, shared, scratch);
}
