/* close.c - relative distance of two arrays of samples, as a check. */
#include "support/close.h"

#include <math.h>
#include <stdio.h>

bool check_close(const char *what, const char *target, const mn_sample *x_of, const void *x,
                 const mn_sample *r_of, const void *r, int64_t count, double tolerance) {
    double error2 = 0.0, norm2 = 0.0;
    for (int64_t i = 0; i < count; i++) {
        const double got = mn_sample_get(x_of, x, i), want = mn_sample_get(r_of, r, i);
        error2 += (got - want) * (got - want);
        norm2 += want * want;
    }
    return CHECK(sqrt(error2) <= tolerance * sqrt(norm2),
                 "%s, %s: off by rms %.3g of %.3g, tolerance %.1e", target, what,
                 sqrt(error2 / fmax(1.0, (double)count)), sqrt(norm2 / fmax(1.0, (double)count)),
                 tolerance);
}

bool check_samples_close(const char *what, const char *target, const mn_sample *got,
                         const mn_sample *want, bool gradients, double tolerance) {
    bool close = true;
    for (int i = 0; i < want->n_tensors; i++) {
        const mn_sample_tensor *w = &want->tensors[i], *g = &got->tensors[i];
        const bool input = w->field->role <= MN_ROLE_RAW;
        const void *r = input ? w->partner : w->data, *x = input ? g->partner : g->data;
        if (input != gradients || !r || !x) continue;
        char name[160];
        snprintf(name, sizeof name, "%s: %s%s", what, input ? "d" : "", w->field->name);
        close = check_close(name, target, got, x, want, r, w->count, tolerance) && close;
    }
    return close;
}
