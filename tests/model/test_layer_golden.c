/* test_layer_golden.c - layers against golden files of whole layers (tests/golden/layers, made by
 * tools/golden): output, and gradients of the input and of every parameter, in float64 and float32.
 * Files of the same kind elsewhere are looked at where MNEME_GOLDEN names their folder. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <math.h>

#include "base/util.h"
#include "io/safetensors.h"
#include "support/check.h"
#include "support/layer_case.h"

/* `folder`: 0 that of the tests, 1 MNEME_GOLDEN; `names`: theirs and ours of parameters that are
 * called otherwise, in pairs. */
static const struct {
    int folder;
    const char *file, *layer, *options;
    int index;
    double eps;
    const char *names[8];
} cases[] = {
    { 0, "diff_layer", "diff_attention", "{\"num_heads\": 2, \"head_dim\": 4}", 0, 1e-5, { 0 } },
    { 0, "diff_layer_gqa", "diff_attention", "{\"num_heads\": 4, \"num_kv_heads\": 2, "
      "\"head_dim\": 4, \"use_rope\": false}", 3, 1e-5, { 0 } },
    { 0, "diff_layer_token", "diff_attention", "{\"num_heads\": 4, \"num_kv_heads\": 2, "
      "\"head_dim\": 4, \"diff_lambda\": \"token\"}", 0, 1e-5, { 0 } },
    { 0, "based_layer", "linear", "{\"num_heads\": 2, \"feature_map\": \"taylor\", "
      "\"norm_feature_map\": true}", 0, 1e-5, { 0 } },
    { 0, "hawk_layer", "rg_lru", "{\"num_heads\": 3, \"lru_width\": 12}", 0, 1e-5, { 0 } },
    { 1, "diff_layer", "diff_attention", "{\"num_heads\": 2, \"num_kv_heads\": 1, "
      "\"head_dim\": 4}", 3, 1e-5, { 0 } },
    { 1, "gated_attention", "attention", "{\"num_heads\": 4, \"num_kv_heads\": 2, \"head_dim\": 8, "
      "\"use_output_gate\": true, \"qk_rms_norm\": true, \"norm_plus_one\": true, "
      "\"rope_theta\": 1e7, \"partial_rotary_factor\": 0.25}", 0, 1e-6, { 0 } },
    { 1, "kda_block", "kda", "{\"num_heads\": 2, \"head_dim\": 4, \"expand_v\": 1.5}", 0, 1e-5,
      { 0 } },
    { 1, "qwen_gdn_qwen3_5", "gdn", "{\"projections\": \"qkv\", \"num_heads\": 2, "
      "\"num_v_heads\": 4, \"head_dim\": 4, \"v_head_dim\": 6}", 0, 1e-6,
      { "norm.weight", "o_norm.weight" } },
    { 1, "qwen_gdn_qwen3_next", "gdn", "{\"projections\": \"qkvz\", \"num_heads\": 2, "
      "\"num_v_heads\": 4, \"head_dim\": 4, \"v_head_dim\": 6}", 0, 1e-6,
      { "norm.weight", "o_norm.weight" } },
};

typedef struct golden {
    mn_safetensors *file;
    const char *name;
    const char *const *names;
    bool gradients;    // of y alone
} golden;

/* Numbers of tensor `prefix` + `name`; NULL if the file has none. */
static double *numbers(const golden *g, const char *prefix, const char *name, int64_t *count) {
    char full[128];
    for (int i = 0; i < 8 && g->names[i]; i += 2) {
        if (strcmp(g->names[i + 1], name) == 0) name = g->names[i];
    }
    snprintf(full, sizeof full, "%s%s", prefix, name);
    const mn_stored_tensor *t = mn_safetensors_find(g->file, full);
    if (!t) return NULL;
    *count = mn_stored_elements(t);
    double *x = malloc((size_t)(*count + 1) * sizeof *x);
    CHECK(x && mn_safetensors_read_f64(x, t) == MN_OK, "%s: %s", g->name, full);
    return x;
}

static void fill(const golden *g, layer_case *c, void *to, int64_t count, const char *name) {
    int64_t n = 0;
    double *x = numbers(g, "", name, &n);
    if (CHECK(x && n == count, "%s: %s is %lld numbers, not %lld", g->name, name, (long long)n,
              (long long)count)) {
        for (int64_t i = 0; i < n; i++) layer_case_set(c, to, i, x[i]);
    }
    free(x);
}

/* The rule of tests/golden/README.md. */
static void compare(const golden *g, const layer_case *c, const char *prefix, const char *name,
                    const void *got, bool is_double, int64_t count) {
    char key[128];
    int64_t n = 0;
    double *want = numbers(g, prefix, name, &n), rms = 0.0, off = 0.0, most = 0.0, worst = 0.0;
    const char *called = name;
    for (int i = 0; i < 8 && g->names[i]; i += 2) {
        if (strcmp(g->names[i + 1], name) == 0) called = g->names[i];
    }
    snprintf(key, sizeof key, "tol%d.%s%s", c->dtype == MN_F64 ? 64 : 32, prefix, called);
    const char *text = mn_safetensors_metadata(g->file, key);
    const double tolerance = text ? atof(text) : 0.0;
    if (!CHECK(want && n == count && text, "%s: no %s%s", g->name, prefix, called)) {
        free(want);
        return;
    }
    for (int64_t i = 0; i < n; i++) {
        const double x = is_double ? ((const double *)got)[i] : layer_case_get(c, got, i);
        off += (x - want[i]) * (x - want[i]);
        rms += want[i] * want[i];
        worst = fmax(worst, fabs(x - want[i]));
        most = fmax(most, fabs(want[i]));
    }
    CHECK(sqrt(off) <= tolerance * sqrt(rms) && worst <= 16.0 * tolerance * most,
          "%s %s: %s%s is off by %.2e of %.2e, tolerance %.2e", g->name,
          c->dtype == MN_F64 ? "f64" : "f32", prefix, called, sqrt(off), sqrt(rms), tolerance);
    free(want);
}

static void check_case(size_t i, mn_safetensors *file, mn_dtype dtype) {
    layer_case c;
    const mn_stored_tensor *x = mn_safetensors_find(file, "x");
    const char *cotangents = mn_safetensors_metadata(file, "cotangents");
    const golden g = { file, cases[i].file, cases[i].names,
                       cotangents && strcmp(cotangents, "dy") == 0 };
    if (!CHECK(x && x->rank == 3, "%s: no x", g.name)) return;
    const mn_status st = layer_case_create(&c, cases[i].layer, cases[i].options, dtype,
                                           x->shape[0], x->shape[1], x->shape[2], 1);
    if (!CHECK(st == MN_OK, "%s: %s", g.name, mn_last_error())) return;
    c.layer.index = cases[i].index;
    c.layer.norm_eps = cases[i].eps;
    const int64_t n = c.B * c.T * c.D;
    fill(&g, &c, c.x, n, "x");
    fill(&g, &c, c.dy, n, "dy");
    for (int p = 0; p < c.layer.n_params; p++) {
        fill(&g, &c, c.params[p], c.layer.params[p].count, c.layer.params[p].name);
    }
    double value;
    CHECK(layer_case_backward(&c, &value) == MN_OK, "%s: %s", g.name, mn_last_error());
    compare(&g, &c, "", "y", c.y, true, n);
    if (g.gradients) compare(&g, &c, "d", "x", c.dx, false, n);
    for (int p = 0; p < c.layer.n_params && g.gradients; p++) {
        compare(&g, &c, "d", c.layer.params[p].name, c.grads[p], false, c.layer.params[p].count);
    }
    layer_case_destroy(&c);
}

static void layers_match(void **state) {
    (void)state;
    const char *const folders[] = { MN_SOURCE_DIR "/tests/golden/layers", getenv("MNEME_GOLDEN") };
    int checked = 0;
    for (size_t i = 0; i < MN_COUNTOF(cases); i++) {
        char path[4096];
        mn_safetensors *file = NULL;
        if (!folders[cases[i].folder]) continue;
        snprintf(path, sizeof path, "%s/%s.safetensors", folders[cases[i].folder], cases[i].file);
        if (!CHECK(mn_safetensors_open(&file, path) == MN_OK, "%s", mn_last_error())) continue;
        check_case(i, file, MN_F64);
        check_case(i, file, MN_F32);
        checked++;
        mn_safetensors_close(file);
    }
    CHECK(checked >= 5, "only %d files of layers", checked);
    check_done();
}

int main(void) {
    const struct CMUnitTest tests[] = { cmocka_unit_test(layers_match) };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
