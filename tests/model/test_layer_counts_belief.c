/* test_layer_counts_belief.c - layers with published parameter counts have those counts. */
#include <string.h>

#include "base/util.h"
#include "io/json.h"
#include "layers/layer.h"
#include "support/check.h"

static bool create(mn_layer *layer, const char *name, const char *json, int64_t D,
                   int64_t context) {
    mn_layer_kind kind;
    bool ccq;
    mn_layer_config config;
    mn_json options = { 0 };
    mn_status st = mn_layer_kind_find(&kind, &ccq, name);
    if (st == MN_OK) {
        mn_layer_defaults(&config, kind);
        st = mn_json_parse(&options, json, strlen(json), "options", MN_JSON_STANDARD);
    }
    if (st == MN_OK) st = mn_layer_config_read(&config, kind, &options);
    mn_json_free(&options);
    if (st == MN_OK) st = mn_layer_create(layer, name, &config, D, context, 1e-5);
    return CHECK(st == MN_OK, "%s %s: %s", name, json, mn_last_error());
}

static int64_t count_of(const mn_layer *layer) {
    int64_t count = 0;
    for (int i = 0; i < layer->n_params; i++) count += layer->params[i].count;
    return count;
}

/* Of the official implementations and papers. */
static const struct {
    const char *name, *json;
    int64_t D, context, count;
} published[] = {
    { "kla", "{}", 512, 64, 3757057 },
    { "kla", "{\"value_rank\": \"conv\", \"var_rank\": \"dt\"}", 512, 64, 1790977 },
    { "kla", "{\"d_state\": 8}", 64, 64, 63105 },
    { "kla", "{\"d_state\": 8, \"expand\": 1}", 128, 64, 87681 },
    { "hyperglu", "{}", 1024, 4096, 4851040 },
    { "hypermlp", "{}", 1024, 4096, 4547904 },
    { "hyperglu", "{}", 768, 1024, 2495520 },
    { "hypermlp", "{\"block_size\": 1024}", 768, 64, 2403328 },
    { "hyperglu", "{\"num_heads\": 8}", 512, 2048, 2806784 },
};

static void published_counts(void **state) {
    (void)state;
    for (size_t i = 0; i < MN_COUNTOF(published); i++) {
        mn_layer layer;
        if (!create(&layer, published[i].name, published[i].json, published[i].D,
                    published[i].context)) {
            continue;
        }
        CHECK(count_of(&layer) == published[i].count, "%s %s at width %lld: %lld parameters, "
              "published are %lld", published[i].name, published[i].json,
              (long long)published[i].D, (long long)count_of(&layer),
              (long long)published[i].count);
    }
    check_done();
}

/* Language models of the same shape as published ones: two norms, the layer and a gated MLP without
 * biases per block, a last norm, and a token table that is the output head as well. */
static const struct {
    const char *name, *json;
    int64_t D, n_layers, hidden, vocabulary, count;
} models[] = {
    { "palimpsa_code", "{\"num_heads\": 16, \"head_dim\": 48, \"expand_v\": 1, "
      "\"beta_step_rank\": 48}", 768, 19, 2048, 32000, 172337792 },
    { "palimpsa_code", "{\"num_heads\": 16, \"head_dim\": 96, \"expand_v\": 2, "
      "\"beta_step_rank\": 96, \"metaplasticity\": false}", 1536, 19, 4096, 32000, 776248880 },
};

static void published_models(void **state) {
    (void)state;
    for (size_t i = 0; i < MN_COUNTOF(models); i++) {
        mn_layer layer;
        const int64_t D = models[i].D;
        if (!create(&layer, models[i].name, models[i].json, D, 64)) continue;
        const int64_t block = count_of(&layer) + 2 * D + 3 * D * models[i].hidden;
        const int64_t count = models[i].n_layers * block + D + models[i].vocabulary * D;
        CHECK(count == models[i].count, "%s %s: %lld parameters, published are %lld",
              models[i].name, models[i].json, (long long)count, (long long)models[i].count);
    }
    check_done();
}

/* Each is refused, with a message that names the option. */
static const struct {
    const char *name, *json, *option;
} refused[] = {
    { "attention", "{\"num_heads\": 3}", "num_heads" },
    { "attention", "{\"num_heads\": 4, \"num_kv_heads\": 3}", "num_kv_heads" },
    { "attention", "{\"head_dim\": 3}", "use_rope" },
    { "kla", "{\"d_state\": 0}", "d_state" },
    { "kla", "{\"expand\": 0.001}", "expand" },
    { "kla", "{\"expand\": -1e300}", "expand" },
    { "kla", "{\"var_rank\": \"conv\"}", "var_rank" },
    { "kla", "{\"obs_var_min\": 0}", "obs_var_min" },
    { "kla", "{\"obs_var_max\": 1e-9}", "obs_var_max" },
    { "kla", "{\"clip_value\": -1}", "clip_value" },
    { "palimpsa", "{\"conv_size\": 0}", "conv_size" },
    { "palimpsa", "{\"expand_k\": 0.001}", "head_dim" },
    { "palimpsa_paper", "{\"n_init\": 1}", "n_init" },
    { "bayes", "{\"noise_groups\": 0}", "noise_groups" },
    { "bayes_rotation", "{\"noise_groups\": 3}", "noise_groups" },
    { "bayes", "{\"conv_size\": 0}", "conv_size" },
    { "hypermlp", "{\"num_heads\": 0}", "num_heads" },
    { "hypermlp", "{\"num_heads\": 1000000000000000000}", "num_heads" },
    { "hyperglu", "{\"qk_rank\": 6}", "qk_rank" },
    { "hyperglu", "{\"vo_rank\": 7}", "vo_rank" },
    { "hyperglu", "{\"conv_size\": 0}", "conv_size" },
    { "hyperglu", "{\"qk_rank\": 12, \"use_rope\": true}", "use_rope" },
};

static void bad_options_are_named(void **state) {
    (void)state;
    for (size_t i = 0; i < MN_COUNTOF(refused); i++) {
        mn_layer_kind kind;
        bool ccq;
        mn_layer_config config;
        mn_layer layer;
        mn_json options;
        CHECK(mn_layer_kind_find(&kind, &ccq, refused[i].name) == MN_OK, "%s", mn_last_error());
        mn_layer_defaults(&config, kind);
        const char *json = refused[i].json;
        CHECK(mn_json_parse(&options, json, strlen(json), "options", MN_JSON_STANDARD) == MN_OK,
              "%s", mn_last_error());
        mn_status st = mn_layer_config_read(&config, kind, &options);    // outside of its range
        mn_json_free(&options);
        if (st == MN_OK) st = mn_layer_create(&layer, refused[i].name, &config, 64, 16, 1e-5);
        const bool named = st == MN_ERR_ARGUMENT || st == MN_ERR_FORMAT;
        CHECK(named && strstr(mn_last_error(), refused[i].option),
              "%s %s: status %s, \"%s\"", refused[i].name, json, mn_status_name(st),
              mn_last_error());
    }
    check_done();
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(published_counts),
        cmocka_unit_test(published_models),
        cmocka_unit_test(bad_options_are_named),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
