/* test_layers.c - for every kind of layer and the options that change it: gradients of every
 * parameter and of the input against finite differences, tokens in pieces against all at once,
 * packed sequences against separate ones, no look-ahead, the planned memory against the used. */
#include <math.h>
#include <stdio.h>
#include <string.h>

#include "base/rng.h"
#include "base/util.h"
#include "support/check.h"
#include "support/layer_case.h"

static const struct {
    const char *name, *json;
} cases[] = {
#define LAYER_TEST(name, json) { name, json },
#include "layers/all.def"
};

/* Largest number of entries of one parameter that are tried. */
enum { TRIED = 5, D = 8 };

static bool create(layer_case *c, size_t i, mn_dtype dtype, int64_t B, int64_t T) {
    const mn_status st = layer_case_create(c, cases[i].name, cases[i].json, dtype, B, T, D, 7);
    return CHECK(st == MN_OK, "%s %s: %s", cases[i].name, cases[i].json, mn_last_error());
}

/* A central difference in double: its error is about h^2 of the third derivative plus 1e-16 / h of
 * the value, with h = 1e-5 some 1e-10 of numbers of size 1 to 100. */
static void check_entry(layer_case *c, const char *what, void *data, const void *grad, int64_t at) {
    const double h = 1e-5, before = layer_case_get(c, data, at);
    double sum[2];
    for (int side = 0; side < 2; side++) {
        layer_case_set(c, data, at, before + (side ? h : -h));
        if (!CHECK(layer_case_forward(c) == MN_OK, "%s: %s", what, mn_last_error())) return;
        sum[side] = 0.0;
        for (int64_t i = 0; i < c->B * c->T * c->D; i++) {
            sum[side] += c->y[i] * layer_case_get(c, c->dy, i);
        }
    }
    layer_case_set(c, data, at, before);
    const double want = (sum[1] - sum[0]) / (2 * h), got = layer_case_get(c, grad, at);
    CHECK(fabs(got - want) <= 1e-6 * (1.0 + fabs(want)), "%s entry %lld: gradient %.9g, "
          "differences %.9g", what, (long long)at, got, want);
}

static void gradients(void **state) {
    (void)state;
    for (size_t i = 0; i < MN_COUNTOF(cases); i++) {
        layer_case c;
        double value;
        if (create(&c, i, MN_F64, 2, 6)) {
            CHECK(layer_case_backward(&c, &value) == MN_OK, "%s %s: %s", cases[i].name,
                  cases[i].json, mn_last_error());
            char what[256];
            for (int p = 0; p < c.layer.n_params; p++) {
                const mn_param_info *info = &c.layer.params[p];
                snprintf(what, sizeof what, "%s %s: %s", cases[i].name, cases[i].json, info->name);
                for (int64_t t = 0; info->group == MN_GROUP_FROZEN && t < info->count; t++) {
                    CHECK(layer_case_get(&c, c.grads[p], t) == 0.0, "%s is frozen", what);
                }
                if (info->group == MN_GROUP_FROZEN) continue;
                for (int64_t t = 0; t < mn_min(TRIED, info->count); t++) {
                    const uint64_t at = mn_rng_bits(3, (uint64_t)p, (uint64_t)t);
                    check_entry(&c, what, c.params[p], c.grads[p],
                                (int64_t)(at % (uint64_t)info->count));
                }
            }
            snprintf(what, sizeof what, "%s %s: x", cases[i].name, cases[i].json);
            for (int64_t t = 0; t < 12; t++) {
                check_entry(&c, what, c.x, c.dx, (t * 37) % (2 * 6 * D));
            }
        }
        layer_case_destroy(&c);
    }
    check_done();
}

static double largest(const double *x, int64_t n) {
    double top = 0.0;
    for (int64_t i = 0; i < n; i++) top = fmax(top, fabs(x[i]));
    return top;
}

/* float32 through the kernels of decoding against those of chunks: the 1e-5 of the largest
 * output. */
static void pieces_equal_whole(void **state) {
    (void)state;
    static const int64_t ones[] = { 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1 };
    static const int64_t mixed[] = { 5, 1, 1, 2, 3 };
    for (size_t i = 0; i < MN_COUNTOF(cases); i++) {
        for (int dtype = MN_F32; dtype <= MN_F64; dtype++) {
            layer_case c;
            double whole[2 * 12 * D];
            float variance[2 * 12];
            if (create(&c, i, (mn_dtype)dtype, 2, 12)) {
                CHECK(layer_case_forward(&c) == MN_OK, "%s", mn_last_error());
                memcpy(whole, c.y, sizeof whole);
                memcpy(variance, c.variance, sizeof variance);
                const double near = (dtype == MN_F64 ? 1e-11 : 1e-5) * largest(whole, 2 * 12 * D);
                for (int way = 0; way < 2; way++) {
                    const mn_status st = way ? layer_case_pieces(&c, mixed, 5)
                                             : layer_case_pieces(&c, ones, 12);
                    CHECK(st == MN_OK, "%s: %s", cases[i].name, mn_last_error());
                    for (int64_t k = 0; k < 2 * 12 * D; k++) {
                        CHECK(fabs(c.y[k] - whole[k]) <= near, "%s %s %s way %d: %g for %g at %lld",
                              cases[i].name, cases[i].json, dtype == MN_F64 ? "f64" : "f32", way,
                              c.y[k], whole[k], (long long)k);
                    }
                    for (int k = 0; k < 24 && mn_layer_has_variance(&c.layer); k++) {
                        CHECK(fabs(c.variance[k] - variance[k]) <= 1e-4 * fabs(variance[k]) &&
                                  variance[k] > 0.0f,
                              "%s %s: variance %g for %g", cases[i].name, cases[i].json,
                              (double)c.variance[k], (double)variance[k]);
                    }
                }
            }
            layer_case_destroy(&c);
        }
    }
    check_done();
}

/* Sequences of 3, 1 and 8 tokens in one row: the bits of each alone. */
static void packed_equals_separate(void **state) {
    (void)state;
    static const int64_t starts[] = { 0, 3, 4, 12 };
    for (size_t i = 0; i < MN_COUNTOF(cases); i++) {
        layer_case c, one;
        if (create(&c, i, MN_F32, 1, 12)) {
            c.starts = starts;
            c.n_starts = 3;
            CHECK(layer_case_forward(&c) == MN_OK, "%s: %s", cases[i].name, mn_last_error());
            for (int n = 0; n < 3; n++) {
                const int64_t T = starts[n + 1] - starts[n];
                if (!create(&one, i, MN_F32, 1, T)) continue;
                memcpy(one.x, (float *)c.x + starts[n] * D, (size_t)(T * D) * sizeof(float));
                one.layer = c.layer;    // caches of mixing parameters have the longer context
                for (int p = 0; p < c.layer.n_params; p++) {
                    void *mine = one.params[p];
                    one.params[p] = c.params[p];
                    c.params[p] = mine;
                }
                CHECK(layer_case_forward(&one) == MN_OK, "%s: %s", cases[i].name, mn_last_error());
                CHECK(memcmp(one.y, c.y + starts[n] * D, (size_t)(T * D) * sizeof *one.y) == 0,
                      "%s %s: packed sequence %d differs from a separate one", cases[i].name,
                      cases[i].json, n);
                for (int p = 0; p < c.layer.n_params; p++) {
                    void *mine = one.params[p];
                    one.params[p] = c.params[p];
                    c.params[p] = mine;
                }
                layer_case_destroy(&one);
            }
        }
        layer_case_destroy(&c);
    }
    check_done();
}

/* A later token changes nothing before it. */
static void no_look_ahead(void **state) {
    (void)state;
    for (size_t i = 0; i < MN_COUNTOF(cases); i++) {
        layer_case c;
        double before[7 * D];
        if (create(&c, i, MN_F64, 1, 9)) {
            CHECK(layer_case_forward(&c) == MN_OK, "%s", mn_last_error());
            memcpy(before, c.y, sizeof before);
            for (int64_t k = 7 * D; k < 9 * D; k++) layer_case_set(&c, c.x, k, 5.0);
            CHECK(layer_case_forward(&c) == MN_OK, "%s", mn_last_error());
            CHECK(largest(c.y + 7 * D, 2 * D) > 0.0, "%s: no output", cases[i].name);
            for (int64_t k = 0; k < 7 * D; k++) {
                CHECK(fabs(c.y[k] - before[k]) <= 1e-12 * (1.0 + fabs(before[k])),
                      "%s %s: token %lld sees what comes later", cases[i].name, cases[i].json,
                      (long long)(k / D));
            }
        }
        layer_case_destroy(&c);
    }
    check_done();
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(gradients),
        cmocka_unit_test(pieces_equal_whole),
        cmocka_unit_test(packed_equals_separate),
        cmocka_unit_test(no_look_ahead),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
