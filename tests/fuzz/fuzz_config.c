/* fuzz_config.c - configurations: any text fails with a message or gives a model whose layers have
 * sound sizes and that reads back as itself, options inside their ranges, names of layers that
 * survive being written down. */
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include "model/config.h"
#include "train/options.h"

#define REQUIRE(condition)                                                                         \
    do {                                                                                           \
        if (!(condition)) abort();                                                                 \
    } while (0)

int LLVMFuzzerTestOneInput(const uint8_t *bytes, size_t size);

static void check_layers(const mn_model_config *c) {
    for (int i = 0; i < c->n_layers; i++) {
        mn_layer layer;
        if (i > 0 && strcmp(c->names[i], c->names[i - 1]) == 0) continue;
        if (mn_layer_create(&layer, c->names[i], &c->options[i], c->hidden_size, c->context,
                            c->norm_eps) != MN_OK) {
            continue;
        }
        REQUIRE(layer.n_params > 0 && layer.n_params <= MN_LAYER_PARAMS);
        for (int k = 0; k < layer.n_params; k++) {
            const mn_param_info *p = &layer.params[k];
            int64_t count = 1;
            REQUIRE(p->rank >= 0 && p->rank <= MN_PARAM_RANK);
            for (int r = 0; r < p->rank; r++) {
                REQUIRE(p->shape[r] >= 1);
                REQUIRE(!__builtin_mul_overflow(count, p->shape[r], &count));
            }
            REQUIRE(count == p->count);
        }
    }
}

static void check_model(const mn_json *root) {
    mn_model_config c, again;
    char *text = NULL;
    size_t n = 0;
    mn_json back = { 0 };
    if (mn_model_config_read(&c, root) != MN_OK) {
        REQUIRE(!c.names && !c.options && *mn_last_error());
        return;
    }
    REQUIRE(c.n_layers >= 1 && c.n_layers <= MN_MAX_LAYERS && c.hidden_size >= 1);
    check_layers(&c);
    REQUIRE(mn_model_config_write(&text, &n, &c) == MN_OK);
    REQUIRE(mn_json_parse(&back, text, n, "again", MN_JSON_STANDARD) == MN_OK);
    REQUIRE(mn_model_config_read(&again, &back) == MN_OK);
    REQUIRE(again.n_layers == c.n_layers && again.hidden_size == c.hidden_size);
    for (int i = 0; i < c.n_layers; i++) {
        REQUIRE(strcmp(again.names[i], c.names[i]) == 0);
        REQUIRE(again.options[i].num_heads == c.options[i].num_heads);
    }
    mn_model_config_free(&again);
    mn_json_free(&back);
    free(text);
    mn_model_config_free(&c);
}

static void check_options(const mn_json *root) {
    mn_train_options o;
    if (mn_train_options_read(&o, root) != MN_OK) return;
    REQUIRE(o.steps >= 1 && o.batch >= 1 && o.context >= 1 && o.accumulate >= 1);
    REQUIRE(o.batch <= INT32_MAX / o.context && o.n_train >= 0 && o.n_train <= MN_TRAIN_PATHS);
    REQUIRE(o.lr >= o.min_lr && o.min_lr >= 0.0 && o.beta1 < 1.0 && o.log_every >= 1);
    for (int i = 0; i < o.n_train; i++) REQUIRE(o.train[i]);
    for (int i = 0; i < o.n_valid; i++) REQUIRE(o.valid[i]);
}

static void check_names(const char *text, int64_t n_layers) {
    char(*names)[MN_MIXER_NAME], (*again)[MN_MIXER_NAME], line[MN_MAX_LAYERS * (MN_MIXER_NAME + 8)];
    int n, m;
    if (mn_layers_expand(&names, &n, text, n_layers) != MN_OK) {
        REQUIRE(!names);
        return;
    }
    REQUIRE(n >= 1 && n <= MN_MAX_LAYERS && (n_layers == 0 || n == n_layers));
    const mn_model_config c = { .n_layers = n, .names = names };
    mn_layers_describe(line, sizeof line, &c);
    REQUIRE(mn_layers_expand(&again, &m, line, n) == MN_OK && m == n);
    for (int i = 0; i < n; i++) REQUIRE(strcmp(names[i], again[i]) == 0);
    free(again);
    free(names);
}

int LLVMFuzzerTestOneInput(const uint8_t *bytes, size_t size) {
    mn_json root = { 0 };
    if (mn_json_parse(&root, bytes, size, "fuzz", MN_JSON_PYTHON) == MN_OK) {
        check_model(&root);
        check_options(&root);
        const mn_json model = mn_json_member(&root, "model");
        if (mn_json_given(&model)) check_model(&model);
        mn_json_free(&root);
    }
    char *text = malloc(size + 1);
    if (!text) return 0;
    memcpy(text, bytes, size);
    text[size] = '\0';
    check_names(text, 0);
    check_names(text, (int64_t)(size % 7) * 12);
    REQUIRE(mn_json_parse(&root, "{}", 2, "fuzz", MN_JSON_STANDARD) == MN_OK);
    if (mn_train_set(&root, text) == MN_OK) {
        REQUIRE(mn_json_count(&root) == 1);
        (void)mn_train_set(&root, text);
        check_options(&root);
    }
    mn_json_free(&root);
    free(text);
    return 0;
}
