/* check.c - what an operator refuses that no column of its row says. */
#include "ops/check.h"

#include <inttypes.h>

#include "base/status.h"
#include "kernels/access.h"

/* A mix of hyper's scores has all its factors or none. */
static mn_status check_mix(const char *names, const mn_in *c, const mn_in *U, const mn_in *Vt,
                           const mn_in *d) {
    const int n_given = (c->data != NULL) + (U->data != NULL) + (Vt->data != NULL) +
                        (d->data != NULL);
    if (n_given == 0 || n_given == 4) return MN_OK;
    return mn_fail(MN_ERR_ARGUMENT, "hyper: %s come together; give all four or none", names);
}

mn_status mn_check_hyper(const void *args) {
    const mn_hyper_args *p = args;
    const mn_call *call = args;
    const int64_t branches = p->kind == 1 ? 2 : 1;
    if (call->H < 1 || call->Q % call->H != 0 || call->Q / call->H != branches) {
        return mn_fail(MN_ERR_ARGUMENT, "hyper: Q = %" PRId64 " branches for H = %" PRId64
                       " heads; kind %s needs %s", call->Q, call->H,
                       branches == 2 ? "glu" : "relu", branches == 2 ? "Q = 2 H" : "Q = H");
    }
    mn_status st = check_mix("c1, U1, Vt1 and d1", &p->c1, &p->U1, &p->Vt1, &p->d1);
    if (st == MN_OK) st = check_mix("c2, U2, Vt2 and d2", &p->c2, &p->U2, &p->Vt2, &p->d2);
    if (st != MN_OK) return st;
    const bool mixed = p->U1.data || p->U2.data;
    const int64_t lags = call->cu_seqlens ? mn_longest_sequence(call) : call->L;
    if (mixed && call->P < lags) {
        return mn_fail(MN_ERR_ARGUMENT,
                       "hyper: %" PRId64 " keys, and mixing parameters for P = %" PRId64
                       "; use a larger block size or shorter sequences",
                       lags, call->P);
    }
    return MN_OK;
}

mn_status mn_check_rms_norm_gated(const void *args) {
    const mn_rms_norm_gated_args *p = args;
    if (p->groups >= 1 && p->call.V % p->groups == 0) return MN_OK;
    return mn_fail(MN_ERR_ARGUMENT,
                   "rms_norm_gated: groups is %" PRId64 ", it must divide V = %" PRId64, p->groups,
                   p->call.V);
}

mn_status mn_check_delta_product(const void *args) {
    const mn_call *call = args;
    if (call->H >= 1 && call->Q >= call->H && call->Q % call->H == 0) return MN_OK;
    return mn_fail(MN_ERR_ARGUMENT, "delta_product: Q = %" PRId64 " rows of keys for H = %" PRId64
                   " heads; it takes n H of them, n steps a token", call->Q, call->H);
}

mn_status mn_check_delta_gva(const void *args) {
    const mn_call *call = args;
    if (call->J >= 1 && call->H % call->J == 0) return MN_OK;
    return mn_fail(MN_ERR_ARGUMENT, "delta_gva: H = %" PRId64 " value heads for J = %" PRId64
                   " key heads; H must be a multiple of J", call->H, call->J);
}
