/* test_ops_gradient.c - every gradient against finite differences, in float64.
 *
 * With L = sum of cotangent x result and D(h) = (L(x + h d) - L(x - h d)) / 2h, the extrapolated
 * (4 D(h) - D(2h)) / 3 must be <dL/dx, d> for a random direction d of each input alone. d is scaled
 * by |x| where the sign of x means something, and symmetric where x is.
 *
 * Tolerance: with h = 1e-5 that is off by h^4 times a fifth derivative, 1e-20 of it, and by
 * rounding, 2^-53 |L| / h, about 1e-11 of |L|; L and its derivatives are of the size of the
 * gradient up to a factor of some thousands per order for the sharpest of our functions (a row of
 * scores that nearly vanishes and is divided by its norm). 1e-6 of |gradient| |d| leaves room for
 * that, and a missing or wrong term is of order 1. */
#include "support/op_walk.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "base/rng.h"
#include "base/util.h"

static const double step = 1e-5, tolerance = 1e-6;

static double loss(mn_context *context, mn_sample *s, const op_case *c) {
    double sum = 0.0;
    op_run(context, s, MN_FORWARD, c);
    for (int i = 0; i < s->n_tensors; i++) {
        const mn_sample_tensor *t = &s->tensors[i];
        if (t->field->role != MN_ROLE_OUT || !t->data) continue;
        for (int64_t at = 0; at < t->count; at++) {
            sum += ((const double *)t->data)[at] * ((const double *)t->partner)[at];
        }
    }
    return sum;
}

/* Values whose sign must stay move by a fraction of themselves. */
static bool sign_matters(mn_law law) {
    return law == MN_LAW_GATE || law == MN_LAW_POSITIVE || law == MN_LAW_NOISE ||
           law == MN_LAW_MEMORY || law == MN_LAW_DECAY;
}

static void draw_direction(double *d, const mn_sample *s, const mn_sample_tensor *t,
                           uint64_t seed) {
    const double *x = t->data;
    int64_t size;
    for (int64_t i = 0; i < t->count; i++) {
        d[i] = mn_rng_normal(seed, 1000, (uint64_t)i);
        if (sign_matters(t->field->law)) d[i] *= fabs(x[i]);
    }
    if (!op_is_symmetric(s, t, &size)) return;
    for (int64_t i = 0; i < t->count; i++) {
        const int64_t row = i / size % size, col = i % size, block = i - row * size - col;
        if (row < col) d[i] = d[block + col * size + row];
    }
}

static void move(mn_sample_tensor *t, const double *x, const double *d, double by) {
    for (int64_t i = 0; i < t->count; i++) ((double *)t->data)[i] = x[i] + by * d[i];
}

static double quotient(mn_context *context, mn_sample *s, mn_sample_tensor *t, const double *x,
                       const double *d, double h, const op_case *c) {
    move(t, x, d, h);
    const double above = loss(context, s, c);
    move(t, x, d, -h);
    const double below = loss(context, s, c);
    memcpy(t->data, x, (size_t)t->count * sizeof *x);
    return (above - below) / (2.0 * h);
}

static void check_input(mn_context *context, mn_sample *s, mn_sample_tensor *t, const op_case *c) {
    double *x = malloc((size_t)(t->count + 1) * sizeof *x);
    double *d = malloc((size_t)(t->count + 1) * sizeof *d);
    const double *gradient = t->partner;
    double want = 0.0, size2 = 0.0;
    memcpy(x, t->data, (size_t)t->count * sizeof *x);
    draw_direction(d, s, t, c->seed);
    for (int64_t i = 0; i < t->count; i++) {
        want += gradient[i] * d[i];
        size2 += gradient[i] * gradient[i] * d[i] * d[i];
    }
    const double size = fabs(loss(context, s, c));
    const double got = (4.0 * quotient(context, s, t, x, d, step, c) -
                        quotient(context, s, t, x, d, 2.0 * step, c)) / 3.0;
    const double allowed = tolerance * (sqrt(size2) + 1e-3 * size + 1e-6);
    CHECK(fabs(got - want) <= allowed, "%s: d%s along a direction is %.10g, differences give %.10g",
          op_case_text(c), t->field->name, want, got);
    free(x);
    free(d);
}

/* False when this build lacks the operator. */
static bool check_case(const op_case *c) {
    mn_context *context = op_context("ref", 1);
    mn_sample s;
    op_open(&s, c);
    const bool present = op_run_both(context, &s, c);
    for (int i = 0; present && i < s.n_tensors; i++) {
        mn_sample_tensor *t = &s.tensors[i];
        const bool input = t->field->role == MN_ROLE_IN || t->field->role == MN_ROLE_OPT;
        if (input && t->data) check_input(context, &s, t, c);
    }
    mn_sample_free(&s);
    return present;
}

static void gradients_are_differences(mn_op_id op) {
    static const int64_t packing[] = { 0, 0, 3, 4, 9 };
    static const struct {
        int64_t B, T, H, K, V, more_keys;
    } sizes[] = { { 2, 5, 2, 4, 3, 0 }, { 1, 1, 1, 1, 1, 2 }, { 1, 7, 1, 3, 6, 1 } };
    op_case forms[OP_MAX_FORMS];
    const int n_forms = op_forms(op, forms);
    if (!op_has_backward(op)) return;
    for (int f = 0; f < n_forms; f++) {
        op_case c = forms[f];
        c.dtype = MN_F64;
        for (size_t i = 0; i < MN_COUNTOF(sizes); i++) {
            c.B = sizes[i].B, c.T = sizes[i].T, c.H = sizes[i].H;
            c.K = sizes[i].K, c.V = sizes[i].V, c.more_keys = sizes[i].more_keys;
            c.seed = 17 * i + (uint64_t)f + 1;
            if (!check_case(&c)) return;
        }
        if (!op_has_time(op)) continue;
        c.B = 1, c.T = 9, c.more_keys = 0;
        c.cu_seqlens = packing, c.n_seqs = MN_COUNTOF(packing) - 1;
        check_case(&c);
    }
}

int main(int argc, char **argv) {
    return op_walk("gradients are differences", gradients_are_differences, argc, argv);
}
