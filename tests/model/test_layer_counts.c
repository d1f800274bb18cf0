/* test_layer_counts.c - parameters of layers as published configurations have them: how many, and
 * under which names and shapes. The numbers are worked out by hand from the published shapes. */
#include <stdio.h>
#include <string.h>

#include "base/util.h"
#include "model/config.h"
#include "support/check.h"

/* Layer 0 of a configuration; `name` NULL: the layer the configuration names. */
static bool layer_of(mn_layer *layer, const char *json, const char *name) {
    mn_json root = { 0 };
    mn_model_config config = { 0 };
    mn_status st = mn_json_parse(&root, json, strlen(json), "config.json", MN_JSON_PYTHON);
    if (st == MN_OK) st = mn_model_config_read(&config, &root);
    mn_json_free(&root);
    if (st == MN_OK) {
        st = mn_layer_create(layer, name ? name : config.names[0], &config.options[0],
                             config.hidden_size, config.context, config.norm_eps);
    }
    mn_model_config_free(&config);
    return CHECK(st == MN_OK, "%s: %s", json, mn_last_error());
}

static int64_t count_of(const mn_layer *layer) {
    int64_t sum = 0;
    for (int i = 0; i < layer->n_params; i++) sum += layer->params[i].count;
    return sum;
}

static const struct {
    const char *json, *name;    // name: with "+ccq", where it is asked for
    int64_t count;
} published[] = {
    /* q, k 2 (1536 D); v, g, o 3 (3072 D); a, b 2 (6 D); A_log, dt_bias 12; taps 4 (2 1536 + 3072);
     * norm 512: 6291456 + 18874368 + 24576 + 12 + 24576 + 512, that is 6.01 D^2 */
    { "{\"model_type\": \"gated_deltanet\", \"hidden_size\": 2048, \"num_heads\": 6, "
      "\"head_dim\": 256, \"num_v_heads\": null, \"expand_v\": 2.0, \"conv_size\": 4}",
      NULL, 25215500 },
    /* q, k, v, o 4 D^2; b 16 D; taps 4 (3 D); norm 128: 16777216 + 32768 + 24576 + 128 */
    { "{\"model_type\": \"delta_net\", \"hidden_size\": 2048, \"num_heads\": 16}", NULL, 16834688 },
    /* q, k, v, o 4 D^2; taps 24576; f, g each 128 D + 128 D, g with D biases; b 16 D; A_log 16;
     * dt_bias D; norm 128: 16777216 + 24576 + 1048576 + 2048 + 32768 + 16 + 2048 + 128 */
    { "{\"model_type\": \"kda\", \"hidden_size\": 2048, \"num_heads\": 16, \"head_dim\": 128}",
      NULL, 17887376 },
    /* q, k 2 (D/2 D); v, g, o 3 D^2; gk 16 D, then 1024 16 + 1024; norm 512:
     * 4194304 + 12582912 + 32768 + 17408 + 512, that is 4.01 D^2 */
    { "{\"model_type\": \"gla\", \"hidden_size\": 2048, \"num_heads\": 4, \"num_kv_heads\": null, "
      "\"expand_k\": 0.5, \"expand_v\": 1.0, \"clamp_min\": null, \"feature_map\": null, "
      "\"use_short_conv\": false, \"use_gk\": true, \"use_gv\": false, \"fuse_norm\": true}",
      NULL, 16827904 },
    /* and gamma: 4 D + 4 */
    { "{\"model_type\": \"gla\", \"hidden_size\": 2048, \"num_heads\": 4}", "gla+ccq", 16836100 },
    /* one key-value head of four: k 256 D, v 512 D, gk 256 16 + 256 instead: 16827904 - 768 D
     * - 1536 D - 13056 */
    { "{\"model_type\": \"gla\", \"hidden_size\": 2048, \"num_heads\": 4, \"num_kv_heads\": 1}",
      NULL, 12096256 },
    /* q, k 2 D^2; v, g, o 3 (2 D^2); norm 512 */
    { "{\"model_type\": \"retnet\", \"hidden_size\": 2048, \"num_heads\": 8, \"expand_k\": 1, "
      "\"expand_v\": 2, \"use_short_conv\": false, \"conv_size\": 4, \"feature_map\": null}",
      NULL, 33554944 },
    /* q, k, v, o 4 D^2; four maps 512^2 + 512; norm 512: 16777216 + 1050624 + 512 */
    { "{\"model_type\": \"linear_attn\", \"hidden_size\": 2048, \"num_heads\": 4, "
      "\"feature_map\": \"elementwise_product\", \"tie_feature_map_qk\": false, "
      "\"norm_feature_map\": false, \"norm_q\": false, \"norm_k\": false}", NULL, 17828352 },
    /* tied: two maps fewer */
    { "{\"model_type\": \"linear_attn\", \"hidden_size\": 2048, \"num_heads\": 4, "
      "\"tie_feature_map_qk\": true}", NULL, 17303040 },
    /* q, k, v, o 4 D^2; a, b 2 (16 D + 16); lambda D; taps 4 (2 D); norm 128:
     * 16777216 + 65568 + 2048 + 16384 + 128 */
    { "{\"model_type\": \"mesa_net\", \"hidden_size\": 2048, \"num_heads\": 16, "
      "\"head_dim\": 128, \"use_short_conv\": true, \"use_output_gate\": false, "
      "\"lambda_lower_bound\": 0.25, \"max_cg_step_training\": 30}", NULL, 16861344 },
    /* in 8512 D (2 4096 + 2 128 + 64 rows); conv 4352 (4 + 1); A_log, D, dt_bias 192; norm 4096;
     * out 4096 D: 17432576 + 21760 + 192 + 4096 + 8388608 */
    { "{\"model_type\": \"mamba2\", \"hidden_size\": 2048, \"num_heads\": 64, \"head_dim\": 64, "
      "\"state_size\": 128, \"n_groups\": 1, \"expand\": 2, \"conv_kernel\": 4, "
      "\"use_conv_bias\": true, \"use_bias\": false, \"rmsnorm\": true, "
      "\"norm_before_gate\": false, \"D_has_hdim\": false, \"dt_limit\": [0.0, Infinity], "
      "\"A_init_range\": [1, 16], \"hidden_act\": \"silu\"}", NULL, 25847232 },
    /* in 8192 D; conv 4096 (4 + 1); x 160 4096; dt 4096 (128 + 1); A_log 4096 16; D 4096; out
     * 4096 D: 16777216 + 20480 + 655360 + 528384 + 65536 + 4096 + 8388608. 48 of these, each with
     * a norm of D, an embedding of 50280 rows and a last norm make 1,372,178,432: Mamba 1.4B. */
    { "{\"layers\": \"mamba1\", \"mlp\": \"none\", \"hidden_size\": 2048}", NULL, 26439680 },
    /* D = 4096 without convolutions: q, k 2 (2048 D); v, g, o 3 D^2; i, f 2 (8 D + 8); norm 512:
     * 16777216 + 50331648 + 65552 + 512 */
    { "{\"layers\": \"mlstm\", \"hidden_size\": 4096, \"num_heads\": 8, "
      "\"use_short_conv\": false}", NULL, 67174928 },
    /* D = 1024: in 4096 D; conv 2048 5; x (64 + 32) 2048; dt 2048 (64 + 1); D 2048; out 2048 D:
     * 4194304 + 10240 + 196608 + 133120 + 2048 + 2097152 */
    { "{\"layers\": \"longhorn\", \"hidden_size\": 1024}", NULL, 6633472 },
    { "{\"layers\": \"longhorn_column\", \"hidden_size\": 1024}", NULL, 6633472 },
};

static void counts(void **state) {
    (void)state;
    for (size_t i = 0; i < MN_COUNTOF(published); i++) {
        mn_layer layer;
        if (!layer_of(&layer, published[i].json, published[i].name)) continue;
        CHECK(count_of(&layer) == published[i].count, "%s: %lld parameters, %lld published",
              published[i].json, (long long)count_of(&layer), (long long)published[i].count);
    }
    check_done();
}

/* "name rows x cols" of a parameter; rank 1 has rows only, a convolution its channels and taps. */
static const struct {
    const char *json, *name;
    int64_t shape[3];
} tensors[] = {
    { "{\"model_type\": \"gla\", \"hidden_size\": 2048, \"num_heads\": 4}",
      "gk_proj.0.weight", { 16, 2048, 0 } },
    { "{\"model_type\": \"gla\", \"hidden_size\": 2048, \"num_heads\": 4}",
      "gk_proj.1.weight", { 1024, 16, 0 } },
    { "{\"model_type\": \"gla\", \"hidden_size\": 2048, \"num_heads\": 4}",
      "gk_proj.1.bias", { 1024, 0, 0 } },
    { "{\"model_type\": \"gla\", \"hidden_size\": 2048, \"num_heads\": 4}",
      "g_norm_swish_gate.weight", { 512, 0, 0 } },
    { "{\"model_type\": \"gla\", \"hidden_size\": 2048, \"num_heads\": 4, \"fuse_norm\": false}",
      "g_norm.weight", { 512, 0, 0 } },
    { "{\"model_type\": \"retnet\", \"hidden_size\": 2048, \"num_heads\": 8, "
      "\"use_output_gate\": false}", "g_norm.weight", { 512, 0, 0 } },
    { "{\"model_type\": \"linear_attn\", \"hidden_size\": 2048, \"num_heads\": 4}",
      "feature_map_k.layer2.weight", { 512, 512, 0 } },
    { "{\"model_type\": \"linear_attn\", \"hidden_size\": 2048, \"num_heads\": 4, "
      "\"feature_map\": \"hedgehog\"}", "feature_map_q.layer.bias", { 512, 0, 0 } },
    { "{\"model_type\": \"mesa_net\", \"hidden_size\": 2048, \"num_heads\": 16}",
      "lambda_params", { 2048, 0, 0 } },
    { "{\"model_type\": \"mesa_net\", \"hidden_size\": 2048, \"num_heads\": 16}",
      "a_proj.bias", { 16, 0, 0 } },
    { "{\"model_type\": \"mamba2\", \"hidden_size\": 2048}", "in_proj.weight", { 8512, 2048, 0 } },
    { "{\"model_type\": \"mamba2\", \"hidden_size\": 2048}", "conv1d.weight", { 4352, 1, 4 } },
    { "{\"model_type\": \"mamba2\", \"hidden_size\": 2048, \"n_groups\": 8}", "conv1d.bias",
      { 6144, 0, 0 } },
    { "{\"model_type\": \"mamba2\", \"hidden_size\": 2048, \"D_has_hdim\": true}", "D",
      { 4096, 0, 0 } },
    { "{\"model_type\": \"log_linear_mamba2\", \"hidden_size\": 2048}", "in_proj.weight",
      { 9472, 2048, 0 } },
    { "{\"model_type\": \"log_linear_mamba2\", \"hidden_size\": 2048}", "L", { 64, 15, 0 } },
    { "{\"layers\": \"mamba1\", \"hidden_size\": 2048}", "x_proj.weight", { 160, 4096, 0 } },
    { "{\"layers\": \"mamba1\", \"hidden_size\": 100}", "dt_proj.weight", { 200, 7, 0 } },
};

static void names_and_shapes(void **state) {
    (void)state;
    for (size_t i = 0; i < MN_COUNTOF(tensors); i++) {
        mn_layer layer;
        if (!layer_of(&layer, tensors[i].json, NULL)) continue;
        bool found = false;
        for (int p = 0; p < layer.n_params; p++) {
            const mn_param_info *info = &layer.params[p];
            if (strcmp(info->name, tensors[i].name) != 0) continue;
            CHECK(!found, "%s twice", info->name);
            found = true;
            for (int axis = 0; axis < 3; axis++) {
                const int64_t size = axis < info->rank ? info->shape[axis] : 0;
                CHECK(size == tensors[i].shape[axis], "%s: axis %d of %s is %lld, not %lld",
                      tensors[i].json, axis, info->name, (long long)size,
                      (long long)tensors[i].shape[axis]);
            }
        }
        CHECK(found, "%s has no %s", tensors[i].json, tensors[i].name);
    }
    check_done();
}

/* Sizes that do not fit together are refused by the option's name. */
static void refused(void **state) {
    (void)state;
    static const struct {
        const char *json, *says;
    } wrong[] = {
        { "{\"layers\": \"gla\", \"hidden_size\": 10, \"num_heads\": 4}", "num_heads" },
        { "{\"layers\": \"gla\", \"hidden_size\": 8, \"num_heads\": 4, \"num_kv_heads\": 3}",
          "num_kv_heads" },
        { "{\"layers\": \"gla\", \"hidden_size\": 8, \"feature_map\": \"dpfp\"}", "feature_map" },
        { "{\"layers\": \"linear\", \"hidden_size\": 8, \"feature_map\": \"none\"}",
          "feature_map" },
        { "{\"layers\": \"gla\", \"hidden_size\": 8, \"clamp_min\": 0.5}", "clamp_min" },
        { "{\"layers\": \"gla\", \"hidden_size\": 8, \"expand_k\": -1}", "expand_k" },
        { "{\"layers\": \"gla\", \"hidden_size\": 8, \"expand_v\": 1e300}", "expand_v" },
        { "{\"layers\": \"retnet\", \"hidden_size\": 9, \"num_heads\": 3}", "expand_k" },
        { "{\"layers\": \"mesa\", \"hidden_size\": 8, \"lambda_lower_bound\": 0}",
          "lambda_lower_bound" },
        { "{\"layers\": \"mesa\", \"hidden_size\": 8, \"use_short_conv\": false}",
          "use_short_conv" },
        { "{\"layers\": \"mamba2\", \"hidden_size\": 8, \"head_dim\": 3}", "head_dim" },
        { "{\"layers\": \"mamba2\", \"hidden_size\": 8, \"head_dim\": 4, \"num_heads\": 3}",
          "num_heads" },
        { "{\"layers\": \"mamba2\", \"hidden_size\": 8, \"head_dim\": 4, \"n_groups\": 3}",
          "n_groups" },
        { "{\"layers\": \"mamba2\", \"hidden_size\": 8, \"head_dim\": 4, \"n_groups\": 2, "
          "\"norm_before_gate\": true}", "norm_before_gate" },
        { "{\"layers\": \"mamba2\", \"hidden_size\": 8, \"dt_limit\": [0.01, 1]}", "dt_limit" },
        { "{\"layers\": \"mamba1\", \"hidden_size\": 8, \"state_size\": 0}", "state_size" },
        { "{\"layers\": \"mamba1\", \"hidden_size\": 8, \"expand\": 0}", "expand" },
        { "{\"layers\": \"longhorn\", \"hidden_size\": 8, \"num_heads\": 3}", "num_heads" },
        { "{\"layers\": \"mlstm\", \"hidden_size\": 8, \"gate_soft_cap\": -1}", "gate_soft_cap" },
    };
    for (size_t i = 0; i < MN_COUNTOF(wrong); i++) {
        mn_json root = { 0 };
        mn_layer layer;
        mn_model_config config = { 0 };
        mn_status st = mn_json_parse(&root, wrong[i].json, strlen(wrong[i].json), "config.json",
                                     MN_JSON_PYTHON);
        CHECK(st == MN_OK, "%s: %s", wrong[i].json, mn_last_error());
        st = mn_model_config_read(&config, &root);
        if (st == MN_OK) {
            st = mn_layer_create(&layer, config.names[0], &config.options[0], config.hidden_size,
                                 config.context, config.norm_eps);
        }
        CHECK(st == MN_ERR_ARGUMENT || st == MN_ERR_FORMAT, "%s was taken", wrong[i].json);
        CHECK(strstr(mn_last_error(), wrong[i].says), "%s: %s", wrong[i].json, mn_last_error());
        mn_model_config_free(&config);
        mn_json_free(&root);
    }
    check_done();
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(counts),
        cmocka_unit_test(names_and_shapes),
        cmocka_unit_test(refused),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
