/* describe_json.c - layers as JSON, for bindings: kinds with their options, and one layer of a
 * model with its sizes and parameters. */
#include <stdlib.h>
#include <string.h>

#include "base/status.h"
#include "base/util.h"
#include "io/json_write.h"
#include "layers/layer.h"
#include "ops/describe.h"

static const struct {
    const char *name, *about, *choices;    // choices NULL: a real number; "": a whole one
} options[] = {
#define OPTION_INT(name, choices, about) { #name, about, choices },
#define OPTION_SIZE(name, least, most, about) { #name, about, "" },
#define OPTION_RANK(name, least, most, about) { #name, about, "rank" },
#define OPTION_REAL(name, least, most, about) { #name, about, NULL },
#include "layers/options.def"
};

static mn_status give(char **json, json_t *root) {
    const mn_status st = root ? mn_json_text(json, root, MN_JSON_COMPACT)
                              : mn_fail(MN_ERR_MEMORY, "no memory for a description");
    json_decref(root);
    return st;
}

/* ---- kinds ----------------------------------------------------------------------------------- */

/* [{name, about, choices, default}] of what the kind takes. */
static json_t *options_json(mn_layer_kind kind) {
    mn_layer_config config;
    json_t *list = json_array(), *defaults = json_object();
    mn_layer_defaults(&config, kind);
    if (mn_layer_config_write(defaults, &config, kind) != MN_OK) {
        json_decref(list);
        list = NULL;
    }
    for (size_t i = 0; i < MN_COUNTOF(options) && list; i++) {
        json_t *value = json_object_get(defaults, options[i].name);
        if (!value) continue;
        json_t *choices = options[i].choices ? json_string(options[i].choices) : json_null();
        json_array_append_new(list, json_pack("{s:s, s:s, s:o, s:O}", "name", options[i].name,
                                              "about", options[i].about, "choices", choices,
                                              "default", value));
    }
    json_decref(defaults);
    return list;
}

static json_t *kind_json(mn_layer_kind kind) {
    mn_mixer_info info;
    if (mn_layer_row(&info, kind) != MN_OK) return NULL;
    return json_pack("{s:s, s:s, s:s, s:s, s:s, s:b, s:b, s:b, s:o}", "name",
                     mn_layer_kind_name(kind), "transition", mn_mixer_transition_equation(&info),
                     "belief", mn_mixer_belief_equation(&info), "read",
                     mn_mixer_read_equation(&info), "operator", mn_op_describe(info.op)->name,
                     "variance", (int)mn_mixer_has_variance(&info), "cache",
                     (int)mn_mixer_has_cache(&info), "ccq", (int)mn_layer_takes_ccq(kind),
                     "options", options_json(kind));
}

mn_status mn_describe_layers(char **json) {
    if (!json) return mn_fail(MN_ERR_ARGUMENT, "describe: json is NULL");
    *json = NULL;
    json_t *list = json_array();
    for (int i = 0; i < MN_LAYER_COUNT; i++) {
        json_array_append_new(list, kind_json((mn_layer_kind)i));
    }
    return give(json, json_pack("{s:o}", "layers", list));
}

/* ---- one layer ------------------------------------------------------------------------------- */

enum { most_layers = 65536, most_width = 1 << 24 };    // as a model's configuration has them

/* Which of its model's layers it is: "index" of "n_layers". */
static mn_status read_place(int *index, int *n_layers, const mn_json *root) {
    int64_t at = 0, of = 1;
    mn_status st = mn_json_opt_i64(&at, root, "index");
    if (st == MN_OK) st = mn_json_opt_i64(&of, root, "n_layers");
    if (st == MN_OK && (of < 1 || of > most_layers || at < 0 || at >= of)) {
        st = mn_json_fail(root, "index must lie below n_layers, and that in 1 .. %d", most_layers);
    }
    *index = (int)at;
    *n_layers = (int)of;
    return st;
}

static mn_status make(mn_layer *out, const char *name, const char *text, int64_t D,
                      int64_t context) {
    if (!name) return mn_fail(MN_ERR_ARGUMENT, "layer: name is NULL");
    if (D < 1 || context < 1 || D > most_width || context > most_width) {
        return mn_fail(MN_ERR_ARGUMENT, "%s: width and context must lie between 1 and %d", name,
                       most_width);
    }
    mn_layer_kind kind;
    bool ccq;
    mn_layer_config config;
    mn_json root = { 0 };
    mn_status st = mn_layer_kind_find(&kind, &ccq, name);
    if (st != MN_OK) return st;
    mn_layer_defaults(&config, kind);
    const char *keys[MN_COUNTOF(options) + 2];
    int n_keys = mn_layer_option_keys(kind, keys, (int)MN_COUNTOF(options)), index = 0, n = 1;
    keys[n_keys++] = "index";
    keys[n_keys++] = "n_layers";
    if (text) st = mn_json_parse(&root, text, strlen(text), name, MN_JSON_STANDARD);
    if (text && st == MN_OK) st = mn_json_expect_object(&root);
    if (text && st == MN_OK) st = mn_json_unknown_key(&root, keys, n_keys);
    if (text && st == MN_OK) st = mn_layer_config_read(&config, kind, &root);
    if (text && st == MN_OK) st = read_place(&index, &n, &root);
    mn_json_free(&root);
    return st == MN_OK ? mn_layer_create_at(out, name, &config, D, context, 1e-6, index, n) : st;
}

static json_t *sizes_json(const mn_layer *layer) {
    json_t *sizes = json_object();
    for (char letter = 'A'; letter <= 'Z'; letter++) {
        const char key[] = { letter, '\0' };
        const int64_t size = MN_SIZE(&layer->sizes, letter);
        if (size != 0) json_object_set_new(sizes, key, json_integer(size));
    }
    return sizes;
}

static json_t *params_json(const mn_layer *layer) {
    json_t *list = json_array();
    for (int i = 0; i < layer->n_params; i++) {
        const mn_param_info *p = &layer->params[i];
        json_t *shape = json_array();
        for (int k = 0; k < p->rank; k++) json_array_append_new(shape, json_integer(p->shape[k]));
        json_array_append_new(list, json_pack("{s:s, s:o, s:s, s:b}", "name", p->name, "shape",
                                              shape, "group", mn_group_name(p->group), "decays",
                                              (int)mn_group_decays(p->group)));
    }
    return list;
}

mn_status mn_describe_layer(char **json, const char *name, const char *layer_options, int64_t D,
                            int64_t context) {
    mn_layer layer;
    if (!json) return mn_fail(MN_ERR_ARGUMENT, "describe: json is NULL");
    *json = NULL;
    mn_status st = make(&layer, name, layer_options, D, context);
    if (st != MN_OK) return st;
    json_t *config = json_object();
    st = mn_layer_config_write(config, &layer.config, layer.kind);
    if (st != MN_OK) {
        json_decref(config);
        return st;
    }
    return give(json, json_pack("{s:s, s:s, s:b, s:s, s:b, s:o, s:o, s:o}", "name", name, "kind",
                                mn_layer_kind_name(layer.kind), "ccq", (int)layer.ccq, "operator",
                                mn_op_describe(layer.mixer.op)->name, "variance",
                                (int)mn_layer_has_variance(&layer), "sizes", sizes_json(&layer),
                                "options", config, "parameters", params_json(&layer)));
}

mn_status mn_layer_start(float *values, const char *name, const char *layer_options, int64_t D,
                         int64_t context, const char *parameter, double range, uint64_t seed,
                         uint64_t stream) {
    mn_layer layer;
    if (!values || !parameter) {
        return mn_fail(MN_ERR_ARGUMENT, "layer: values or parameter is NULL");
    }
    const mn_status st = make(&layer, name, layer_options, D, context);
    if (st != MN_OK) return st;
    for (int i = 0; i < layer.n_params; i++) {
        const mn_param_info *p = &layer.params[i];
        if (strcmp(p->name, parameter) != 0) continue;
        mn_param_start(values, MN_F32, p, range, seed, stream, 0, p->count);
        return MN_OK;
    }
    return mn_fail(MN_ERR_ARGUMENT, "%s has no parameter \"%s\"", name, parameter);
}
