/* attack_options.c - every option of every layer, and every number of a model, with values that no
 * one should give: attack_options [COUNT].
 *
 * Each makes a configuration. It is refused in words, or gives a model, which if it is small reads
 * three tokens. Generated from the tables of layers; COUNT bounds how many are tried, evenly spread
 * (0: all). */
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "attack/batch.h"
#include "base/util.h"
#include "model/config.h"
#include "model/model.h"

static const char *const values[] = {
    "0", "1", "-1", "2", "3", "7", "16777217", "2147483648", "4611686018427387904",
    "9223372036854775807", "-9223372036854775808", "1e300", "-1e300", "1e-300", "0.5", "-0.5",
    "\"\"", "\"full\"", "null", "true", "[]", "{}",
};

static const char *const model_keys[] = {
    "vocab_size", "hidden_size", "num_hidden_layers", "intermediate_size", "hidden_ratio",
    "norm_eps", "initializer_range", "logit_softcap", "max_position_embeddings", "mlp", "decoder",
    "tie_word_embeddings", "attn", "mixers", "layers", "hidden_act", "mlp_bias",
};

enum { MOST_KEYS = 64, MOST_CASES = 20000, SMALL = 1 << 20 };

static struct {
    const char *kind, *key;    // kind NULL: a key of the model
    int value;
} cases[MOST_CASES];
static int64_t n_cases, step_cases = 1;

static void list_cases(void) {
    const char *keys[MOST_KEYS];
    for (int kind = -1; kind < MN_LAYER_COUNT; kind++) {
        int n = MN_COUNTOF(model_keys);
        if (kind >= 0) n = mn_layer_option_keys((mn_layer_kind)kind, keys, MOST_KEYS);
        for (int k = 0; k < n; k++) {
            for (int v = 0; v < (int)MN_COUNTOF(values) && n_cases < MOST_CASES; v++) {
                cases[n_cases].kind = kind < 0 ? NULL : mn_layer_kind_name((mn_layer_kind)kind);
                cases[n_cases].key = kind < 0 ? model_keys[k] : keys[k];
                cases[n_cases++].value = v;
            }
        }
    }
}

static void write_case(char *text, size_t size, int64_t i) {
    const char *kind = cases[i].kind, *key = cases[i].key, *value = values[cases[i].value];
    if (kind) {
        snprintf(text, size, "{\"layers\": \"%s\", \"hidden_size\": 16, \"vocab_size\": 11, "
                 "\"max_position_embeddings\": 16, \"mixers\": {\"%s\": {\"%s\": %s}}}", kind, kind,
                 key, value);
        return;
    }
    const bool width = strcmp(key, "hidden_size") == 0, layers = strcmp(key, "layers") == 0;
    const bool vocabulary = strcmp(key, "vocab_size") == 0;
    snprintf(text, size, "{%s%s%s\"%s\": %s}", layers ? "" : "\"layers\": \"gdn\", ",
             width ? "" : "\"hidden_size\": 16, ", vocabulary ? "" : "\"vocab_size\": 11, ", key,
             value);
}

/* A model whose configuration reads; three tokens go through it. */
static void read_tokens(mn_model *model) {
    static const int32_t tokens[] = { 1, 2, 3 };
    mn_context *context = NULL;
    mn_session *session = NULL;
    const mn_context_options options = { .n_threads = 1 };
    if (mn_context_create(&context, &options) != MN_OK) abort();
    if (mn_session_create(&session, context, model, NULL) == MN_OK) {
        (void)mn_session_feed(session, tokens, 2);
        (void)mn_session_step(session, tokens[2]);
    }
    mn_session_destroy(session);
    mn_context_destroy(context);
}

static void try(int64_t at) {
    const int64_t i = at * step_cases;
    char text[512];
    mn_json root;
    mn_model_config config;
    write_case(text, sizeof text, i);
    if (mn_json_parse(&root, text, strlen(text), "case", MN_JSON_STANDARD) != MN_OK) abort();
    mn_model *model = NULL;
    mn_status st = mn_model_config_read(&config, &root);
    int64_t numbers = 0;
    for (int k = 0; st == MN_OK && k < config.n_layers; k++) {
        mn_layer layer;
        st = mn_layer_create(&layer, config.names[k], &config.options[k], config.hidden_size,
                             config.context, config.norm_eps);
        for (int p = 0; st == MN_OK && p < layer.n_params; p++) numbers += layer.params[p].count;
    }
    if (st != MN_OK && !*mn_last_error()) abort();    // refused without a word
    const bool small = numbers < SMALL && config.hidden_size * config.vocab_size < SMALL &&
                       config.hidden_size * config.intermediate_size < SMALL &&
                       config.n_layers <= 64;
    if (st == MN_OK && small && mn_model_create(&model, &config, MN_F32) == MN_OK) {
        read_tokens(model);
    }
    mn_model_destroy(model);
    mn_model_config_free(&config);
    mn_json_free(&root);
}

static void tell(int64_t at) {
    char text[512];
    write_case(text, sizeof text, at * step_cases);
    puts(text);
}

int main(int argc, char **argv) {
    const int64_t asked = argc > 1 ? strtoll(argv[1], NULL, 10) : 0;
    list_cases();
    if (asked > 0 && asked < n_cases) step_cases = n_cases / asked;
    const int64_t n = (n_cases + step_cases - 1) / step_cases;
    const int64_t broken = attack_all(n, 100, try, tell);
    printf("%" PRId64 " values of options, %" PRId64 " broke something\n", n, broken);
    return broken > 0;
}
