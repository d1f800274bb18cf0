/* test_look.c - what experiments see inside models: Kalman maps against the layer's own output (in
 * the command-line tests too), the alignment diagnostic where its answer is known, its prompts. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "base/util.h"
#include "experiments/job_internal.h"
#include "experiments/looks/look.h"
#include "support/check.h"
#include "support/model_case.h"

enum { T = 60, FIRST = 20, END = 26, ASKED = 50 };

static double number_at(const json_t *root, const char *way) {
    const json_t *value = mn_spec_get(root, way);
    return json_is_number(value) ? json_number_value(value) : NAN;
}

static void align(json_t **result, int64_t top, const int32_t *tokens) {
    static const char json[] = "{\"layers\": \"gdn\", \"hidden_size\": 16, \"vocab_size\": 40, "
                               "\"num_hidden_layers\": 2, \"num_heads\": 2, \"head_dim\": 8}";
    const mn_context_options one = { .n_threads = 1 };
    mn_context *context = NULL;
    mn_model *model = NULL;
    const mn_needle needle = { { (int32_t *)(uintptr_t)tokens, T, T }, FIRST, END, ASKED };
    *result = json_object();
    mn_status st = mn_context_create(&context, &one);
    if (st == MN_OK) st = model_case_create(&model, json, MN_F32, 0.3, 5);
    if (st == MN_OK) st = mn_align(*result, context, model, &needle, 1, top);
    if (st != MN_OK) check_fatal("%s", mn_last_error());
    mn_model_destroy(model);
    mn_context_destroy(context);
}

/* With as many directions as a head is wide every key lies along them. With fewer a part does, and
 * a token whose key no other token has, written once, is not among the main directions. */
static void alignment_of_known_keys(void **state) {
    (void)state;
    int32_t tokens[T];
    json_t *all = NULL, *some = NULL;
    for (int i = 0; i < T; i++) tokens[i] = i % 5;
    for (int i = FIRST; i < END; i++) tokens[i] = 10 + i;
    align(&all, 8, tokens);
    align(&some, 4, tokens);
    CHECK(fabs(number_at(all, "alignment.gap")) < 1e-9, "a gap of %g along all directions",
          number_at(all, "alignment.gap"));
    const json_t *layers = mn_spec_get(some, "alignment.layers");
    assert_int_equal(json_array_size(layers), 2);
    const json_t *first = json_array_get(layers, 0);
    const double needle = number_at(first, "needle"), rest = number_at(first, "rest");
    CHECK(rest > 0.99, "five keys span four directions, but only %g lies along them", rest);
    CHECK(needle < rest && number_at(first, "gap") == needle - rest, "needle %g, rest %g", needle,
          rest);
    json_decref(all);
    json_decref(some);
    check_done();
}

static void prompts_hold_their_needle(void **state) {
    (void)state;
    mn_tokenizer *bytes = NULL;
    assert_int_equal(mn_tokenizer_bytes(&bytes), MN_OK);
    for (int64_t i = 0; i < mn_needle_variants() + 1; i++) {
        mn_needle n;
        char sentence[256];
        assert_int_equal(mn_needle_prompt(&n, bytes, i, 40), MN_OK);
        CHECK(0 < n.first && n.first < n.end && n.end < n.asked && n.asked < n.tokens.count,
              "variant %d", (int)i);
        const int64_t size = n.end - n.first;
        for (int64_t k = 0; k < size; k++) sentence[k] = (char)n.tokens.ids[n.first + k];
        sentence[size] = '\0';
        CHECK(sentence[size - 1] == '.' && strpbrk(sentence, ":"), "\"%s\"", sentence);
        CHECK(n.tokens.ids[n.asked] == 'Q', "the question begins with %d",
              (int)n.tokens.ids[n.asked]);
        mn_token_list_free(&n.tokens);
    }
    mn_tokenizer_destroy(bytes);
    check_done();
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(alignment_of_known_keys),
        cmocka_unit_test(prompts_hold_their_needle),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
