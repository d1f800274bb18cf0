/* test_ops_gradient.c - every gradient against finite differences, in float64.
 *
 * With L = sum of cotangent x result, (L(x + h d) - L(x - h d)) / 2h must be <dL/dx, d> for a
 * random direction d of each input alone. d is scaled by |x| where the sign of x means something,
 * and symmetric where x is.
 *
 * Tolerance: the difference quotient is off by a sixth of h^2 times the third derivative and by the
 * rounding of L over h, some 2^-50 of the sum of all |terms| of L. With h = 1e-6 both are far below
 * 1e-6 of the gradient; a missing or wrong term is of order 1. Where L has a kink between x - h d
 * and x + h d, as relu has, L(x + h d) + L(x - h d) - 2 L(x) is of order h and not h^2: then the
 * step is a hundredth. */
#include "support/op_walk.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "base/rng.h"
#include "base/util.h"

static const double tolerance = 1e-6;

typedef struct sum {
    double value, size;    // of L, and of its terms without their signs
} sum;

static sum loss(mn_context *context, mn_sample *s, const op_case *c) {
    sum L = { 0.0, 0.0 };
    op_run(context, s, MN_FORWARD, c);
    for (int i = 0; i < s->n_tensors; i++) {
        const mn_sample_tensor *t = &s->tensors[i];
        if (t->field->role != MN_ROLE_OUT || !t->data) continue;
        for (int64_t at = 0; at < t->count; at++) {
            const double term = ((const double *)t->data)[at] * ((const double *)t->partner)[at];
            L.value += term;
            L.size += fabs(term);
        }
    }
    return L;
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

typedef struct quotient {
    double slope;      // (L(x + h d) - L(x - h d)) / 2h
    double bend;       // |L(x + h d) + L(x - h d) - 2 L(x)| / h
    double rounding;
} quotient;

static quotient difference(mn_context *context, mn_sample *s, mn_sample_tensor *t, const double *x,
                           const double *d, double h, const op_case *c) {
    move(t, x, d, h);
    const sum above = loss(context, s, c);
    move(t, x, d, -h);
    const sum below = loss(context, s, c);
    move(t, x, d, 0.0);
    const sum here = loss(context, s, c);
    return (quotient){ (above.value - below.value) / (2.0 * h),
                       fabs(above.value + below.value - 2.0 * here.value) / h,
                       0x1p-50 * here.size / h };
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
    quotient q = difference(context, s, t, x, d, 1e-6, c);
    if (q.bend > 1e-4 * sqrt(size2) + 4.0 * q.rounding)
        q = difference(context, s, t, x, d, 1e-8, c);
    CHECK(fabs(q.slope - want) <= tolerance * sqrt(size2) + q.rounding,
          "%s: d%s along a direction is %.10g, differences give %.10g", op_case_text(c),
          t->field->name, want, q.slope);
    free(x);
    free(d);
}

static void check_case(const op_case *c) {
    mn_context *context = op_context("ref", 1);
    mn_sample s;
    op_open(&s, c);
    op_run_both(context, &s, c);
    for (int i = 0; i < s.n_tensors; i++) {
        mn_sample_tensor *t = &s.tensors[i];
        const bool input = t->field->role == MN_ROLE_IN || t->field->role == MN_ROLE_OPT;
        if (input && t->data) check_input(context, &s, t, c);
    }
    mn_sample_free(&s);
}

/* A whole number in [low, high], a function of its arguments. */
static int64_t draw_size(uint64_t seed, uint64_t which, int64_t low, int64_t high) {
    return low + (int64_t)(mn_rng_bits(seed, 2000, which) % (uint64_t)(high - low + 1));
}

static void draw_sizes(op_case *c, uint64_t seed) {
    c->seed = seed;
    c->B = draw_size(seed, 0, 1, 2);
    c->T = draw_size(seed, 1, 1, 8);
    c->H = draw_size(seed, 2, 1, 3);
    c->K = draw_size(seed, 3, 1, 6);
    c->V = draw_size(seed, 4, 1, 6);
    c->more_keys = draw_size(seed, 5, 0, 2);
}

static void gradients_are_differences(mn_op_id op) {
    static const int64_t packing[] = { 0, 0, 3, 4, 9 };
    enum { N_SHAPES = 6 };
    op_case forms[OP_MAX_FORMS];
    const int n_forms = op_forms(op, forms);
    if (!op_has_backward(op)) return;
    for (int f = 0; f < n_forms; f++) {
        op_case c = forms[f];
        c.dtype = MN_F64;
        for (uint64_t i = 0; i < N_SHAPES; i++) {
            draw_sizes(&c, 100 * i + (uint64_t)f + 1);
            check_case(&c);
        }
        if (!op_has_time(op)) continue;
        c.B = 1, c.T = 9, c.more_keys = 0;
        c.cu_seqlens = packing, c.n_seqs = MN_COUNTOF(packing) - 1;
        check_case(&c);
    }
}

int main(int argc, char **argv) {
    return op_visit("gradients are differences", gradients_are_differences, argc, argv);
}
