/* describe_json.c - a model's configuration as JSON with everything filled in, for bindings. */
#include <stdlib.h>
#include <string.h>

#include "base/status.h"
#include "io/json_write.h"
#include "model/config.h"

static const char *const mlp_names[] = {
#define MLP(id, name, about) [MN_MLP_##id] = name,
#include "model/mlps.def"
#undef MLP
};

static const char *const decoder_names[] = {
#define DECODER(id, name, about) [MN_DECODER_##id] = name,
#include "model/decoders.def"
#undef DECODER
};

/* What other software calls models of one kind of layer. */
static json_t *types_json(void) {
    json_t *types = json_object();
#define MODEL_TYPE(type, layer, architecture) json_object_set_new(types, type, json_string(layer));
#include "layers/all.def"
#define FAMILY(type, layer, class) json_object_set_new(types, type, json_string(layer));
#include "model/families/families.def"
    return types;
}

static mn_status layers_json(json_t *list, const mn_model_config *c) {
    for (int i = 0; i < c->n_layers; i++) {
        mn_layer_kind kind;
        bool ccq;
        mn_status st = mn_layer_kind_find(&kind, &ccq, c->names[i]);
        json_t *options = json_object();
        if (st == MN_OK) st = mn_layer_config_write(options, &c->options[i], kind);
        json_array_append_new(list, json_pack("{s:s, s:o}", "name", c->names[i], "options",
                                              options));
        if (st != MN_OK) return st;
    }
    return MN_OK;
}

static mn_status write(char **json, const mn_model_config *c) {
    char *text = NULL;
    size_t size;
    mn_status st = mn_model_config_write(&text, &size, c);
    json_t *saved = st == MN_OK ? json_loads(text, 0, NULL) : NULL, *layers = json_array();
    if (st == MN_OK) st = layers_json(layers, c);
    const bool plain = mn_block_is_plain(&c->block, c->halves, c->n_layers) && !c->mlp_bias &&
                       !c->norm_plus_one;
    json_t *root = json_pack("{s:I, s:I, s:I, s:I, s:o, s:o, s:o, s:s, s:s, s:b, s:s, s:b, s:b, "
                             "s:b, s:o, s:o, s:o}",
                             "vocab_size", (json_int_t)c->vocab_size, "hidden_size",
                             (json_int_t)c->hidden_size, "intermediate_size",
                             (json_int_t)c->intermediate_size, "context", (json_int_t)c->context,
                             "norm_eps", mn_json_real(c->norm_eps), "initializer_range",
                             mn_json_real(c->initializer_range), "logit_softcap",
                             mn_json_real(c->logit_softcap), "mlp", mlp_names[c->mlp], "decoder",
                             decoder_names[c->decoder], "tied", (int)c->tied, "norm",
                             c->layer_norm ? "layer" : "rms", "norm_bias", (int)c->norm_bias,
                             "norm_first", (int)c->norm_first, "plain", (int)plain, "layers",
                             layers,
                             "model_types", types_json(), "config",
                             saved ? saved : json_null());
    if (st == MN_OK) {
        st = root ? mn_json_text(json, root, MN_JSON_COMPACT)
                  : mn_fail(MN_ERR_MEMORY, "no memory for a description");
    }
    json_decref(root);
    free(text);
    return st;
}

mn_status mn_describe_model(char **json, const char *config) {
    mn_json object = { 0 };
    mn_model_config c = { 0 };
    if (json) *json = NULL;
    if (!json || !config) return mn_fail(MN_ERR_ARGUMENT, "describe: json or config is NULL");
    mn_status st = mn_json_parse(&object, config, strlen(config), "config.json", MN_JSON_PYTHON);
    if (st == MN_OK) st = mn_model_config_read(&c, &object);
    if (st == MN_OK) st = write(json, &c);
    mn_model_config_free(&c);
    mn_json_free(&object);
    return st;
}
