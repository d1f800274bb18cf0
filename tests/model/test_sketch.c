/* test_sketch.c - models without memory: the states that a plan tells are those that a pass leaves,
 * for every layer and option that changes it; every row of a parameter has a role. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/util.h"
#include "model/folder/roles.h"
#include "model/folder/same.h"
#include "model/folder/source.h"
#include "support/check.h"

static const struct {
    const char *layer, *options;
} cases[] = {
#define LAYER_TEST(layer, options) { layer, options },
#include "layers/all.def"
};

enum { TOKENS = 5, LAYERS = 2 };

static bool config_of(mn_model_config *out, const char *layer, const char *options) {
    char text[2048];
    snprintf(text, sizeof text, "{\"layers\": \"%s\", \"hidden_size\": 24, \"vocab_size\": 11, "
             "\"num_hidden_layers\": %d, \"max_position_embeddings\": 16%s%s", layer, LAYERS,
             strlen(options) > 2 ? ", " : "", options + 1);
    mn_json root = { 0 };
    mn_status st = mn_json_parse(&root, text, strlen(text), "config.json", MN_JSON_PYTHON);
    if (st == MN_OK) st = mn_model_config_read(out, &root);
    mn_json_free(&root);
    return CHECK(st == MN_OK, "%s: %s", text, mn_last_error());
}

/* Bytes of the state after a pass of a model that is there. */
static mn_status state_after(size_t *bytes, const mn_model_config *config, mn_context *context) {
    static const int32_t tokens[TOKENS] = { 1, 2, 3, 4, 5 };
    mn_model *model = NULL;
    mn_tape *tape = NULL;
    mn_model_state state = { 0 };
    mn_status st = mn_model_create(&model, config, MN_F32);
    if (st == MN_OK) st = mn_tape_create(&tape, context, MN_F32);
    if (st == MN_OK) st = mn_model_state_create(&state, model);
    if (st == MN_OK) {
        const mn_model_input in = { .tokens = tokens, .B = 1, .T = TOKENS, .state = &state };
        mn_model_start(model, context, 1);
        mn_tape_start(tape, 0);
        mn_model_hidden(model, tape, &in);
        st = mn_tape_status(tape);
        *bytes = mn_model_state_bytes(&state);
    }
    mn_model_state_free(&state);
    mn_tape_destroy(tape);
    mn_model_destroy(model);
    return st;
}

static void states_of_a_plan_are_those_of_a_pass(void **state) {
    (void)state;
    mn_context *context = NULL;
    if (!CHECK(mn_context_create(&context, NULL) == MN_OK, "%s", mn_last_error())) return;
    for (size_t i = 0; i < MN_COUNTOF(cases); i++) {
        mn_model_config config;
        if (!config_of(&config, cases[i].layer, cases[i].options)) continue;
        size_t fixed[LAYERS], token[LAYERS], bytes = 0, pass = 0, step = 0;
        mn_model *sketch = NULL;
        mn_status st = mn_model_sketch(&sketch, &config);
        if (st == MN_OK) st = mn_sketch_state(fixed, token, sketch, context);
        if (st == MN_OK) st = state_after(&bytes, &config, context);
        const char *what = cases[i].options;
        if (CHECK(st == MN_OK, "%s %s: %s", cases[i].layer, what, mn_last_error())) {
            const size_t told = fixed[0] + fixed[1] + TOKENS * (token[0] + token[1]);
            CHECK(told == bytes && bytes > 0, "%s %s: a plan says %zu bytes, a pass leaves %zu",
                  cases[i].layer, what, told, bytes);
        }
        st = mn_sketch_pass(&pass, sketch, context, 2, TOKENS, false);
        if (st == MN_OK) st = mn_sketch_pass(&step, sketch, context, 2, TOKENS, true);
        CHECK(st == MN_OK && pass > 0 && step > pass, "%s %s: %s", cases[i].layer, what,
              mn_last_error());
        mn_model_destroy(sketch);
        mn_model_config_free(&config);
    }
    mn_context_destroy(context);
    check_done();
}

/* Every row of every parameter once, and every role without holes. */
static void check_roles(const mn_layer *layer, const char *what) {
    mn_roles roles;
    int64_t rows = 0, spanned = 0;
    if (!CHECK(mn_roles_make(&roles, layer) == MN_OK, "%s", mn_last_error())) return;
    for (int p = 0; p < layer->n_params; p++) {
        rows += layer->params[p].rank ? layer->params[p].shape[0] : 1;
    }
    for (int i = 0; i < roles.n; i++) {
        const mn_role_span *s = &roles.spans[i];
        int64_t width;
        spanned += s->n;
        const int64_t n = mn_role_rows(&roles, s->role, &width);
        for (int64_t r = 0; r < n; r++) {
            CHECK(mn_role_find(&roles, s->role, r), "%s: %s has no row %lld", what, s->role,
                  (long long)r);
        }
    }
    CHECK(rows == spanned, "%s: %lld rows, %lld of them in roles", what, (long long)rows,
          (long long)spanned);
    mn_roles_free(&roles);
}

static void roles_cover_every_layer(void **state) {
    (void)state;
    for (size_t i = 0; i < MN_COUNTOF(cases); i++) {
        mn_model_config config;
        mn_model *sketch = NULL;
        if (!config_of(&config, cases[i].layer, cases[i].options)) continue;
        if (CHECK(mn_model_sketch(&sketch, &config) == MN_OK, "%s", mn_last_error())) {
            check_roles(mn_model_layer(sketch, 0), cases[i].layer);
        }
        mn_model_destroy(sketch);
        mn_model_config_free(&config);
    }
    check_done();
}

static void configurations_differ_by_name(void **state) {
    (void)state;
    mn_model_config a, b;
    char why[MN_SAME_WHY] = "";
    if (!config_of(&a, "gdn", "{\"num_heads\": 2}")) return;
    if (!config_of(&b, "gdn", "{\"num_heads\": 3}")) return;
    CHECK(mn_model_config_same(why, &a, &a), "%s", why);
    CHECK(!mn_model_config_same(why, &a, &b) && strstr(why, "num_heads"), "\"%s\"", why);
    strcpy(b.names[1], "gdn+ccq");
    b.options[0] = b.options[1] = a.options[0];
    CHECK(!mn_model_config_same(why, &a, &b) && strstr(why, "gdn+ccq"), "\"%s\"", why);
    mn_model_config_free(&a);
    mn_model_config_free(&b);
    check_done();
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(states_of_a_plan_are_those_of_a_pass),
        cmocka_unit_test(roles_cover_every_layer),
        cmocka_unit_test(configurations_differ_by_name),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
