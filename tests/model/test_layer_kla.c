/* test_layer_kla.c - the variance that kla gives with its output, from which KLA+ draws: what it
 * is, and its gradients. */
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "base/util.h"
#include "support/check.h"
#include "support/layer_case.h"

enum { B = 2, T = 5, D = 6, N = B * T * D };

static const char *const options[] = {
    "{\"d_state\": 3, \"expand\": 1.5}",
    "{\"d_state\": 3, \"value_rank\": \"conv\", \"var_rank\": \"dt\", \"use_gate\": false}",
    "{\"d_state\": 2, \"decode_from_prior\": true}",
};

/* Mean and variance of the output; with `back` the gradients of sum(dy variance). */
static mn_status run(layer_case *c, double *mean, double *variance, bool back) {
    mn_tensor *leaves[MN_LAYER_PARAMS];
    mn_tape_start(c->tape, back ? MN_TAPE_RECORD : MN_TAPE_FORWARD);
    for (int i = 0; i < c->layer.n_params; i++) {
        const mn_param_info *info = &c->layer.params[i];
        const int64_t rows = info->rank == 1 ? 1 : info->shape[0];
        leaves[i] = mn_tape_leaf(c->tape, c->params[i], back ? c->grads[i] : NULL, rows,
                                 info->count / rows, false);
    }
    mn_tensor *x = mn_tape_input(c->tape, c->x, back ? c->dx : NULL, (int64_t[]){ B, T, 1, D });
    mn_forward f = { .tape = c->tape, .layer = &c->layer, .params = leaves, .state = NULL,
                     .position = 0, .variance = NULL, .wants_output_variance = true };
    mn_tensor *y = mn_layer_forward(&f, x);
    if (!y || !f.output_variance) return mn_tape_status(c->tape);
    for (int i = 0; i < N; i++) {
        mean[i] = ((double *)y->data)[i];
        variance[i] = ((double *)f.output_variance->data)[i];
    }
    if (!back) return mn_tape_status(c->tape);
    mn_tape_seed(c->tape, f.output_variance, c->dy);
    return mn_tape_backward(c->tape);
}

static double value_of(layer_case *c) {
    double mean[N], variance[N], sum = 0.0;
    CHECK(run(c, mean, variance, false) == MN_OK, "%s", mn_last_error());
    for (int i = 0; i < N; i++) sum += variance[i] * ((double *)c->dy)[i];
    return sum;
}

/* As in test_layers.c: a central difference in double is good for about 1e-10. */
static void check_entry(layer_case *c, const char *what, double *data, const double *grad,
                        int64_t at) {
    const double h = 1e-5, before = data[at];
    data[at] = before + h;
    const double above = value_of(c);
    data[at] = before - h;
    const double below = value_of(c);
    data[at] = before;
    const double want = (above - below) / (2 * h);
    CHECK(fabs(grad[at] - want) <= 1e-6 * (1.0 + fabs(want)), "%s entry %lld: %.9g, differences "
          "%.9g", what, (long long)at, grad[at], want);
}

static void gradients_of_the_variance(void **state) {
    (void)state;
    for (size_t i = 0; i < MN_COUNTOF(options); i++) {
        layer_case c;
        double mean[N], variance[N];
        const mn_status st = layer_case_create(&c, "kla", options[i], MN_F64, B, T, D, 5);
        if (CHECK(st == MN_OK, "%s", mn_last_error())) {
            CHECK(run(&c, mean, variance, true) == MN_OK, "%s", mn_last_error());
            for (int k = 0; k < N; k++) CHECK(variance[k] > 0.0, "variance %g", variance[k]);
            for (int p = 0; p < c.layer.n_params; p++) {
                const int64_t n = c.layer.params[p].count;
                for (int64_t k = 0; k < mn_min(n, 7); k++) {
                    check_entry(&c, c.layer.params[p].name, c.params[p], c.grads[p], k * 11 % n);
                }
            }
            for (int64_t k = 0; k < 12; k++) check_entry(&c, "x", c.x, c.dx, k * 7 % N);
        }
        layer_case_destroy(&c);
    }
    check_done();
}

/* Halving the output projection halves the mean and quarters the variance: it passes through the
 * squares of the weights. Rounding alone separates the two. */
static void variance_goes_with_the_square(void **state) {
    (void)state;
    layer_case c;
    double mean[N], variance[N], half_mean[N], quarter[N];
    const mn_status st = layer_case_create(&c, "kla", options[0], MN_F64, B, T, D, 6);
    if (CHECK(st == MN_OK, "%s", mn_last_error())) {
        CHECK(run(&c, mean, variance, false) == MN_OK, "%s", mn_last_error());
        const int last = c.layer.n_params - 1;
        CHECK(strcmp(c.layer.params[last].name, "out_proj.weight") == 0, "the last parameter");
        double *weight = c.params[last];
        for (int64_t k = 0; k < c.layer.params[last].count; k++) weight[k] *= 0.5;
        CHECK(run(&c, half_mean, quarter, false) == MN_OK, "%s", mn_last_error());
        for (int k = 0; k < N; k++) {
            CHECK(fabs(half_mean[k] - 0.5 * mean[k]) <= 1e-14 * (1.0 + fabs(mean[k])), "mean");
            CHECK(fabs(quarter[k] - 0.25 * variance[k]) <= 1e-14 * (1.0 + variance[k]), "variance");
        }
    }
    layer_case_destroy(&c);
    check_done();
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(gradients_of_the_variance),
        cmocka_unit_test(variance_goes_with_the_square),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
