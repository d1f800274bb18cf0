/* config.c - a model's JSON: sizes, layer names and their options. */
#include "model/config.h"

#include <ctype.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/status.h"
#include "base/util.h"
#include "io/json_write.h"
#include "model/families/dialect.h"

static const char *const mlp_names[MN_MLP_COUNT] = {
#define MLP(id, name, about) [MN_MLP_##id] = name,
#include "model/mlps.def"
#undef MLP
};

static const struct {
    const char *type, *layer, *architecture;
} model_types[] = {
#define MODEL_TYPE(type, layer, architecture) { type, layer, architecture },
#include "layers/all.def"
};

static const char *const own_keys[] = {
#define KEY(name) #name,
#define IGNORED(name)
#define NEUTRAL(name, value, why)
#include "model/config_keys.def"
#undef KEY
#undef IGNORED
#undef NEUTRAL
};

static const char *const foreign_keys[] = {
#define KEY(name)
#define IGNORED(name) #name,
#define NEUTRAL(name, value, why) #name,
#include "model/config_keys.def"
#undef KEY
#undef IGNORED
#undef NEUTRAL
};

/* Keys of other software that are passed over while they say what is so anyway. */
static const struct {
    const char *key, *value, *why;
} neutral_keys[] = {
#define KEY(name)
#define IGNORED(name)
#define NEUTRAL(name, value, why) { #name, value, why },
#include "model/config_keys.def"
#undef KEY
#undef IGNORED
#undef NEUTRAL
};

static const char *const decoder_names[MN_DECODER_COUNT] = {
#define DECODER(id, name, about) [MN_DECODER_##id] = name,
#include "model/decoders.def"
#undef DECODER
};

enum { MAX_KEYS = 512 };

void mn_model_config_free(mn_model_config *config) {
    free(config->names);
    free(config->options);
    free(config->beside);
    free(config->halves);
    free(config->source);
    memset(config, 0, sizeof *config);
}

mn_status mn_model_config_copy(mn_model_config *out, const mn_model_config *from) {
    *out = *from;
    const size_t n = (size_t)from->n_layers;
    out->names = malloc(n * sizeof *out->names);
    out->options = malloc(n * sizeof *out->options);
    out->beside = from->beside ? malloc(n * sizeof *out->beside) : NULL;
    out->halves = malloc(n);
    out->source = from->source ? strdup(from->source) : NULL;
    if (!out->names || !out->options || !out->halves || !out->beside != !from->beside ||
        !out->source != !from->source) {
        mn_model_config_free(out);
        return mn_fail(MN_ERR_MEMORY, "no memory for a model's configuration");
    }
    memcpy(out->names, from->names, n * sizeof *out->names);
    memcpy(out->options, from->options, n * sizeof *out->options);
    if (out->beside) memcpy(out->beside, from->beside, n * sizeof *out->beside);
    memcpy(out->halves, from->halves, n);
    return MN_OK;
}

/* ---- layer names ----------------------------------------------------------------------------- */

/* Takes "gdn*3" off the front of `text`; false at its end. */
static bool take_item(const char **text, char name[MN_MIXER_NAME], int64_t *times, bool *bad) {
    const char *at = *text + strspn(*text, " \t,");
    size_t n = strcspn(at, "*, \t");
    if (n == 0) {
        *bad = *at != '\0';
        return false;
    }
    *bad = n >= MN_MIXER_NAME;
    if (*bad) return false;
    memcpy(name, at, n);
    name[n] = '\0';
    at += n + strspn(at + n, " \t");
    *times = 1;
    if (*at == '*') {
        char *end;
        *times = strtoll(at + 1, &end, 10);
        *bad = end == at + 1 || *times < 1 || *times > MN_MAX_LAYERS;
        at = end;
    }
    *text = at;
    return !*bad;
}

mn_status mn_layers_expand(char (**names)[MN_MIXER_NAME], int *count, const char *text,
                           int64_t n_layers) {
    *count = 0;
    *names = calloc(MN_MAX_LAYERS, sizeof **names);
    if (!*names) return mn_fail(MN_ERR_MEMORY, "no memory for the names of layers");
    const char *at = text;
    char name[MN_MIXER_NAME];
    int64_t times;
    int n = 0;
    bool bad = false;
    while (take_item(&at, name, &times, &bad) && !bad) {
        for (int64_t i = 0; i < times && n < MN_MAX_LAYERS; i++) strcpy((*names)[n++], name);
    }
    const char *wrong = bad ? "is not understood" : n == 0 ? "names no layer" : NULL;
    if (!wrong && n_layers > MN_MAX_LAYERS) wrong = "asks for too many layers";
    if (!wrong && n_layers > 0 && n_layers % n != 0) wrong = "does not fill num_hidden_layers";
    if (wrong) {
        free(*names);
        *names = NULL;
        return mn_fail(MN_ERR_ARGUMENT, "layers \"%s\" %s; write them as \"gdn\" or "
                       "\"attention*11, kla\", %d at most", text, wrong, MN_MAX_LAYERS);
    }
    for (int i = n; i < n_layers; i++) strcpy((*names)[i], (*names)[i % n]);
    *count = n_layers > 0 ? (int)n_layers : n;
    return MN_OK;
}

void mn_layers_describe(char *text, size_t size, const mn_model_config *config) {
    size_t used = 0;
    text[0] = '\0';
    for (int i = 0; i < config->n_layers && used + 1 < size;) {
        int same = 1;
        while (i + same < config->n_layers &&
               strcmp(config->names[i], config->names[i + same]) == 0) {
            same++;
        }
        const bool all = same == config->n_layers;
        char times[16] = "";
        if (same > 1 && !all) snprintf(times, sizeof times, "*%d", same);
        const int n = snprintf(text + used, size - used, "%s%s%s", i ? ", " : "",
                               config->names[i], times);
        used += n > 0 ? (size_t)n : 0;
        i += same;
    }
}

/* ---- reading --------------------------------------------------------------------------------- */

/* Its keys are "layers" and the options of attention. */
static mn_status check_hybrid_keys(const mn_json *attn) {
    const char *keys[MAX_KEYS] = { "layers" };
    mn_layer_kind kind;
    bool ccq;
    mn_status st = mn_layer_kind_find(&kind, &ccq, "attention");
    if (st == MN_OK) st = mn_json_expect_object(attn);
    if (st != MN_OK) return st;
    return mn_json_unknown_key(attn, keys, 1 + mn_layer_option_keys(kind, keys + 1, MAX_KEYS - 1));
}

/* Layer i of a flash-linear-attention hybrid is softmax attention if its "attn" says so. */
static mn_status read_hybrid(mn_model_config *c, const mn_json *object) {
    const mn_json attn = mn_json_member(object, "attn");
    if (!mn_json_given(&attn)) return MN_OK;
    const bool several = json_is_array(attn.value);
    const int64_t n = several ? mn_json_count(&attn) : 1;
    for (int64_t i = 0; i < n; i++) {
        const mn_json one = several ? mn_json_item(&attn, i) : attn;
        const mn_json layers = mn_json_member(&one, "layers");
        mn_status st = check_hybrid_keys(&one);
        if (st == MN_OK) st = mn_json_expect_list(&layers);
        for (int64_t k = 0; st == MN_OK && k < mn_json_count(&layers); k++) {
            const mn_json item = mn_json_item(&layers, k);
            int64_t at = -1;
            st = mn_json_read_i64(&at, &item);
            if (st != MN_OK) return st;
            if (at < 0 || at >= c->n_layers) return mn_json_fail(&item, "there is no such layer");
            mn_layer_kind kind;
            bool ccq;
            strcpy(c->names[at], "attention");
            st = mn_layer_kind_find(&kind, &ccq, "attention");
            if (st != MN_OK) return st;
            mn_layer_defaults(&c->options[at], kind);
            st = mn_layer_config_read(&c->options[at], kind, &one);
        }
        if (st != MN_OK) return st;
    }
    return MN_OK;
}

static mn_status read_layers(mn_model_config *c, const mn_json *object) {
    const char *type = NULL, *spec = NULL;
    int64_t n_layers = 0;
    mn_status st = mn_json_opt_text(&type, object, "model_type");
    if (st == MN_OK) st = mn_json_opt_text(&spec, object, "layers");
    if (st == MN_OK) st = mn_json_opt_i64(&n_layers, object, "num_hidden_layers");
    if (st == MN_OK && (n_layers < 0 || n_layers > MN_MAX_LAYERS)) {
        const mn_json at = mn_json_member(object, "num_hidden_layers");
        return mn_json_fail(&at, "must lie between 1 and %d", MN_MAX_LAYERS);
    }
    for (size_t i = 0; i < MN_COUNTOF(model_types) && type && !spec; i++) {
        if (strcmp(model_types[i].type, type) == 0) spec = model_types[i].layer;
    }
    if (c->family && mn_dialect_layer(c->family) && !spec) spec = mn_dialect_layer(c->family);
    if (st != MN_OK) return st;
    if (!spec && type) {
        return mn_json_fail(object, "its model_type \"%s\" has layers that are not built here; "
                            "\"layers\" (such as \"gdn\") says which to take instead", type);
    }
    if (!spec) return mn_json_fail(object, "no \"layers\" (such as \"gdn\") and no model_type");
    return mn_layers_expand(&c->names, &c->n_layers, spec, n_layers);
}

/* Options of a layer: the kind's defaults, then keys of the model, then those of mixers.KIND. */
static mn_status read_options(mn_model_config *c, const mn_json *object) {
    c->options = calloc((size_t)c->n_layers, sizeof *c->options);
    if (!c->options) return mn_fail(MN_ERR_MEMORY, "no memory for the options of layers");
    const mn_json mixers = mn_json_member(object, "mixers");
    for (int i = 0; i < c->n_layers; i++) {
        mn_layer_kind kind;
        bool ccq;
        mn_status st = mn_layer_kind_find(&kind, &ccq, c->names[i]);
        if (st != MN_OK) return mn_json_fail(object, "layers: %s", mn_last_error());
        mn_layer_defaults(&c->options[i], kind);
        st = mn_layer_config_read(&c->options[i], kind, object);
        if (st != MN_OK) return st;
        const mn_json own = mn_json_member(&mixers, mn_layer_kind_name(kind));
        if (!mn_json_given(&own)) continue;
        const char *keys[MAX_KEYS];
        const int n_keys = mn_layer_option_keys(kind, keys, MAX_KEYS);
        st = mn_json_unknown_key(&own, keys, n_keys);
        if (st == MN_OK) st = mn_layer_config_read(&c->options[i], kind, &own);
        if (st != MN_OK) return st;
    }
    return MN_OK;
}

/* Options of the attention beside the mixers are those of mixers.attention. */
static mn_status read_beside(mn_model_config *c, const mn_json *object) {
    const mn_json mixers = mn_json_member(object, "mixers");
    const mn_json own = mn_json_member(&mixers, "attention");
    if (!c->block.beside_attention && c->block.shared_blocks == 0) return MN_OK;
    c->beside = calloc((size_t)c->n_layers, sizeof *c->beside);
    if (!c->beside) return mn_fail(MN_ERR_MEMORY, "no memory for the options of layers");
    mn_status st = MN_OK;
    for (int i = 0; i < c->n_layers && st == MN_OK; i++) {
        mn_layer_defaults(&c->beside[i], MN_LAYER_attention);
        if (mn_json_given(&own)) st = mn_layer_config_read(&c->beside[i], MN_LAYER_attention, &own);
    }
    return st;
}

static mn_status read_halves(mn_model_config *c, const mn_json *object) {
    c->halves = calloc((size_t)c->n_layers, 1);
    if (!c->halves) return mn_fail(MN_ERR_MEMORY, "no memory for a configuration");
    return mn_block_read_halves(c->halves, c->n_layers, &c->block, object);
}

static mn_status check_neutral(const mn_json *object) {
    for (size_t i = 0; i < MN_COUNTOF(neutral_keys); i++) {
        const mn_json at = mn_json_member(object, neutral_keys[i].key);
        if (!mn_json_given(&at)) continue;
        json_t *value = json_loads(neutral_keys[i].value, JSON_DECODE_ANY, NULL);
        const bool same = value && json_equal(value, at.value);
        json_decref(value);
        if (!same) {
            return mn_json_fail(&at, "only %s is built: %s", neutral_keys[i].value,
                                neutral_keys[i].why);
        }
    }
    return MN_OK;
}

/* Every key is one of the model, of a layer it has, or one that other software writes. */
static mn_status check_keys(const mn_model_config *c, const mn_json *object) {
    const char *keys[MAX_KEYS];
    int n = 0;
    for (size_t i = 0; i < MN_COUNTOF(own_keys); i++) keys[n++] = own_keys[i];
    n += mn_block_keys(keys + n, MAX_KEYS - n);
    for (int i = 0; i < c->n_layers; i++) {
        mn_layer_kind kind;
        bool ccq, seen = false;
        const mn_status st = mn_layer_kind_find(&kind, &ccq, c->names[i]);
        if (st != MN_OK) return st;
        for (int k = 0; k < i; k++) seen |= strcmp(c->names[k], c->names[i]) == 0;
        if (!seen) n += mn_layer_option_keys(kind, keys + n, MAX_KEYS - n);
    }
    const int n_meant = n;
    for (size_t i = 0; i < MN_COUNTOF(foreign_keys); i++) keys[n++] = foreign_keys[i];
    const mn_status st = mn_json_unknown_key_among(object, keys, n, n_meant);
    return st == MN_OK ? check_neutral(object) : st;
}

/* Largest width of anything a configuration names. */
static const int64_t most_width = INT64_C(1) << 24;

static mn_status require(const mn_json *object, const char *key, bool holds, const char *why) {
    if (holds) return MN_OK;
    const mn_json at = mn_json_member(object, key);
    return mn_json_fail(&at, "%s", why);
}

static mn_status read_mlp(mn_model_config *c, const mn_json *object) {
    const char *name = mlp_names[c->mlp], *type = "", *act = "swish";
    double ratio = 4.0;
    mn_status st = mn_json_opt_text(&type, object, "model_type");
    if (strcmp(type, "retnet") == 0) ratio = 2.0;
    if (st == MN_OK) st = mn_json_opt_text(&name, object, "mlp");
    if (st == MN_OK) st = mn_json_opt_text(&act, object, "hidden_act");
    if (st == MN_OK) st = mn_json_opt_bool(&c->mlp_bias, object, "mlp_bias");
    if (st == MN_OK) st = mn_json_opt_f64(&ratio, object, "hidden_ratio");
    if (st == MN_OK) st = mn_json_opt_i64(&c->intermediate_size, object, "intermediate_size");
    if (st == MN_OK) {
        st = require(object, "hidden_ratio", ratio >= 1.0 / 1024 && ratio <= 1024.0,
                     "must lie between 1/1024 and 1024");
    }
    if (st == MN_OK) {
        st = require(object, "intermediate_size",
                     c->intermediate_size >= 0 && c->intermediate_size <= most_width,
                     "must lie between 1 and 16777216");
    }
    if (st != MN_OK) return st;
    const mn_json at = mn_json_member(object, "mlp");
    c->mlp = MN_MLP_COUNT;
    for (int i = 0; i < MN_MLP_COUNT; i++) {
        if (strcmp(mlp_names[i], name) == 0) c->mlp = (mn_mlp)i;
    }
    if (c->mlp == MN_MLP_COUNT) {
        return mn_json_fail(&at, "none of swiglu, geglu, gelu, gelu_erf, relu_square, rwkv7, none");
    }
    if (strcmp(act, "swish") != 0 && strcmp(act, "silu") != 0 && c->mlp == MN_MLP_SWIGLU) {
        const mn_json hidden_act = mn_json_member(object, "hidden_act");
        return mn_json_fail(&hidden_act, "only swish is built; use \"mlp\": \"gelu\" or "
                            "\"geglu\" for GELU");
    }
    if (c->intermediate_size == 0 && (c->mlp == MN_MLP_SWIGLU || c->mlp == MN_MLP_GEGLU)) {
        const int64_t wide = (int64_t)((double)c->hidden_size * ratio * 2.0 / 3.0);
        /* multiples of 256 as published; small models would be rounded to several times that */
        const int64_t step = c->hidden_size >= 512 || type[0] ? 256 : 32;
        c->intermediate_size = mn_ceil_div(wide, step) * step;
    }
    if (c->intermediate_size == 0) {
        c->intermediate_size = (int64_t)((double)c->hidden_size * ratio);
        if (c->mlp == MN_MLP_RWKV7) {
            c->intermediate_size = mn_ceil_div(c->intermediate_size, 32) * 32;
        }
    }
    const bool fits = c->mlp == MN_MLP_NONE ||
                      (c->intermediate_size >= 1 && c->intermediate_size <= most_width);
    return require(object, "hidden_ratio", fits, "leaves the MLP no width, or far too much");
}

/* Of the delta rule's layers; KDA has sigmoid and no key for it. */
static mn_status check_output_gate(const mn_json *object) {
    const char *act = "swish";
    const mn_status st = mn_json_opt_text(&act, object, "output_gate_activation");
    if (st != MN_OK || strcmp(act, "swish") == 0 || strcmp(act, "silu") == 0) return st;
    const mn_json at = mn_json_member(object, "output_gate_activation");
    return mn_json_fail(&at, "only swish is built");
}

static mn_status read_decoder(mn_model_config *c, const mn_json *object) {
    const char *name = decoder_names[MN_DECODER_NONE];
    const mn_status st = mn_json_opt_text(&name, object, "decoder");
    const mn_json at = mn_json_member(object, "decoder");
    c->decoder = MN_DECODER_COUNT;
    for (int i = 0; i < MN_DECODER_COUNT && st == MN_OK; i++) {
        if (strcmp(decoder_names[i], name) == 0) c->decoder = (mn_decoder)i;
    }
    if (st == MN_OK && c->decoder == MN_DECODER_COUNT) return mn_json_fail(&at, "none or places");
    return st;
}

static mn_status read_sizes(mn_model_config *c, const mn_json *object) {
    mn_status st = mn_json_get_i64(&c->hidden_size, object, "hidden_size");
    if (st == MN_OK) st = mn_json_opt_i64(&c->vocab_size, object, "vocab_size");
    if (st == MN_OK) st = mn_json_opt_i64(&c->context, object, "max_position_embeddings");
    if (st == MN_OK) st = mn_json_opt_f64(&c->norm_eps, object, "norm_eps");
    if (st == MN_OK) st = mn_json_opt_f64(&c->initializer_range, object, "initializer_range");
    if (st == MN_OK) st = mn_json_opt_f64(&c->logit_softcap, object, "logit_softcap");
    if (st == MN_OK) st = mn_json_opt_bool(&c->norm_plus_one, object, "norm_plus_one");
    if (st == MN_OK) st = mn_json_opt_bool(&c->tied, object, "tie_word_embeddings");
    const int64_t most = most_width;
    if (st == MN_OK) {
        st = require(object, "hidden_size", c->hidden_size >= 1 && c->hidden_size <= most,
                     "must lie between 1 and 16777216");
    }
    if (st == MN_OK) {
        st = require(object, "vocab_size", c->vocab_size >= 0 && c->vocab_size <= most,
                     "must lie between 1 and 16777216");
    }
    if (st == MN_OK) {
        st = require(object, "max_position_embeddings", c->context >= 1 && c->context <= most,
                     "must lie between 1 and 16777216");
    }
    if (st == MN_OK) {
        st = require(object, "norm_eps", c->norm_eps > 0.0 && c->norm_eps < 1.0,
                     "must lie between 0 and 1");
    }
    if (st == MN_OK) {
        st = require(object, "initializer_range",
                     c->initializer_range >= 0.0 && c->initializer_range <= 1e3,
                     "must lie between 0 and 1000");
    }
    if (st == MN_OK) {
        st = require(object, "logit_softcap", c->logit_softcap >= 0.0 && c->logit_softcap <= 1e9,
                     "must lie between 0 and 1e9; 0 is none");
    }
    return st;
}

/* "norm": rms, or layer, whose bias norm_bias leaves out. */
static mn_status read_norm(mn_model_config *c, const mn_json *object) {
    const char *name = "rms";
    mn_status st = mn_json_opt_text(&name, object, "norm");
    const mn_json at = mn_json_member(object, "norm");
    if (st == MN_OK && strcmp(name, "rms") != 0 && strcmp(name, "layer") != 0) {
        return mn_json_fail(&at, "rms or layer");
    }
    c->layer_norm = c->norm_bias = strcmp(name, "layer") == 0;
    if (st == MN_OK) st = mn_json_opt_bool(&c->norm_bias, object, "norm_bias");
    if (st == MN_OK) st = mn_json_opt_bool(&c->norm_first, object, "norm_first");
    if (st != MN_OK || c->layer_norm || !c->norm_bias) return st;
    const mn_json bias = mn_json_member(object, "norm_bias");
    return mn_json_fail(&bias, "goes with \"norm\": \"layer\"");
}

static mn_status read_model(mn_model_config *out, const mn_json *object, const char *family) {
    mn_model_config c = { .context = 2048, .norm_eps = 1e-6, .initializer_range = 0.02,
                          .family = family };
    mn_block_defaults(&c.block);
    mn_status st = mn_json_expect_object(object);
    if (st == MN_OK) st = read_sizes(&c, object);
    if (st == MN_OK) st = mn_block_read(&c.block, object);
    if (st == MN_OK) st = read_norm(&c, object);
    if (st == MN_OK) st = read_mlp(&c, object);
    if (st == MN_OK) st = check_output_gate(object);
    if (st == MN_OK) st = read_decoder(&c, object);
    if (st == MN_OK) st = read_layers(&c, object);
    if (st == MN_OK) st = check_keys(&c, object);
    if (st == MN_OK) st = read_options(&c, object);
    if (st == MN_OK) st = read_hybrid(&c, object);
    if (st == MN_OK) st = read_beside(&c, object);
    if (st == MN_OK) st = read_halves(&c, object);
    const mn_json mixing = mn_json_member(object, "attnres_block_size");
    if (st == MN_OK && mn_json_given(&mixing)) {
        st = mn_json_fail(&mixing, "attention over earlier blocks is not built");
    }
    if (st != MN_OK) mn_model_config_free(&c);
    *out = c;
    return st;
}

/* {"bits": 4, "group_size": 64}, and what other software says of weights of its own formats. */
static mn_status read_quantization(mn_model_config *c, const mn_json *object) {
    static const char *const keys[] = { "bits", "group_size" };
    const mn_json at = mn_json_member(object, "quantization");
    const mn_json other = mn_json_member(object, "quantization_config");
    if (mn_json_given(&other)) {
        const char *method = "another way";
        if (mn_json_opt_text(&method, &other, "quant_method") != MN_OK) method = "another way";
        return mn_json_fail(&other, "weights quantised by %s are not read; take the model they "
                            "were made from, and mneme quantize", method);
    }
    if (!mn_json_given(&at)) return MN_OK;
    int64_t bits = 0, group = 0;
    mn_status st = mn_json_expect_object(&at);
    if (st == MN_OK) st = mn_json_unknown_key(&at, keys, MN_COUNTOF(keys));
    if (st == MN_OK) st = mn_json_opt_i64(&bits, &at, "bits");
    if (st == MN_OK) st = mn_json_opt_i64(&group, &at, "group_size");
    if (st == MN_OK) st = require(&at, "bits", bits == 8 || bits == 4, "must be 8 or 4");
    if (st == MN_OK) {
        st = require(&at, "group_size", group == 32 || group == 64 || group == 128 || group == 256,
                     "must be 32, 64, 128 or 256");
    }
    c->quant_bits = (int)bits;
    c->quant_group = group;
    return st;
}

/* What is written back is what was read, with the keys that mean nothing here. */
static mn_status keep_source(mn_model_config *c, const mn_json *object) {
    const mn_status st = mn_json_text(&c->source, object->value, MN_JSON_PRETTY);
    if (st != MN_OK) mn_model_config_free(c);
    return st;
}

/* Configurations of a family are read in our words. */
mn_status mn_model_config_read(mn_model_config *out, const mn_json *object) {
    const char *type = NULL;
    const mn_json whole = *object;
    *out = (mn_model_config){ 0 };
    mn_status st = mn_json_expect_object(object);
    if (st == MN_OK) st = mn_json_opt_text(&type, object, "model_type");
    if (st != MN_OK) return st;
    const char *family = type ? mn_dialect_find(type) : NULL;
    const char *inner = family ? mn_dialect_nested(family) : NULL;
    const mn_json nested = mn_json_member(object, inner ? inner : "");
    if (inner) {
        st = mn_json_expect_object(&nested);
        object = &nested;
    }
    if (st != MN_OK) return st;
    mn_json ours = *object;
    ours.value = NULL;
    if (family) st = mn_dialect_read(&ours.value, family, object);
    if (st == MN_OK) st = read_model(out, family ? &ours : object, family);
    json_decref(ours.value);
    if (st == MN_OK && (st = read_quantization(out, &whole)) != MN_OK) mn_model_config_free(out);
    if (st == MN_OK && type && strcmp(type, "mneme") != 0) st = keep_source(out, &whole);
    return st;
}

/* ---- writing --------------------------------------------------------------------------------- */

/* Whether the class of other software for models of this layer can be as this one is. */
static bool fits(const mn_model_config *c, const char *layer) {
    const mn_layer_config *o = &c->options[0];
    const bool attention = strcmp(layer, "attention") == 0;
    if (c->mlp_bias || c->norm_plus_one || o->projections) return false;
    if (!mn_block_is_plain(&c->block, c->halves, c->n_layers)) return false;
    if (o->fused_qkv || o->qk_norm_whole || o->attention_scale != 0.0) return false;
    if (c->layer_norm || c->norm_first) return false;
    if (!attention && strcmp(layer, "delta") != 0) return true;
    if (o->num_heads && o->head_dim && o->num_heads * o->head_dim != c->hidden_size) return false;
    return !attention || (o->use_rope && !o->o_bias && !o->use_output_gate &&
                          o->partial_rotary_factor == 1.0 &&
                          o->rope_type == 0 && (!o->qk_rms_norm || o->qk_norm_eps == 1e-5));
}

/* The type of other software whose models are all layers like these; NULL if there is none. */
static const char *type_of(const mn_model_config *c, const char **architecture) {
    if (c->family && mn_dialect_class(c->family)) {
        *architecture = mn_dialect_class(c->family);
        return c->family;
    }
    for (size_t i = 0; i < MN_COUNTOF(model_types); i++) {
        bool all = c->mlp == (strcmp(model_types[i].layer, "mamba2") ? MN_MLP_SWIGLU : MN_MLP_NONE);
        for (int k = 0; k < c->n_layers; k++) {
            all &= strcmp(c->names[k], model_types[i].layer) == 0;
            all &= memcmp(&c->options[k], &c->options[0], sizeof *c->options) == 0;
        }
        all &= !c->family || strcmp(c->family, model_types[i].type) == 0;
        all = all && fits(c, model_types[i].layer);
        if (!all || c->logit_softcap != 0.0 || c->decoder != MN_DECODER_NONE) continue;
        *architecture = model_types[i].architecture;
        return model_types[i].type;
    }
    return NULL;
}

const char *mn_model_type_known(const char *type) {
    for (size_t i = 0; i < MN_COUNTOF(model_types); i++) {
        if (strcmp(model_types[i].type, type) == 0) return model_types[i].type;
    }
    const char *family = mn_dialect_find(type);
    return family ? family : strcmp(type, "mneme") == 0 ? "mneme" : NULL;
}

const char *mn_model_config_family(const mn_model_config *config) {
    const char *architecture, *type;
    if (config->source) return config->family;
    type = type_of(config, &architecture);
    return type ? mn_dialect_find(type) : NULL;
}

static void set(json_t *object, const char *key, json_t *value, bool *failed) {
    if (json_object_set_new(object, key, value) != 0) *failed = true;
}

static void set_quantization(json_t *object, const mn_model_config *c, bool *failed) {
    if (c->quant_bits == 0) return;
    set(object, "quantization",
        json_pack("{s:i, s:I}", "bits", c->quant_bits, "group_size", (json_int_t)c->quant_group),
        failed);
}

/* Options per kind; the layers of one kind share them. */
static mn_status write_options(json_t *object, const mn_model_config *c, bool flat) {
    json_t *mixers = flat ? NULL : json_object();
    mn_status st = MN_OK;
    for (int i = 0; i < c->n_layers && st == MN_OK; i++) {
        mn_layer_kind kind;
        bool ccq, failed = false;
        st = mn_layer_kind_find(&kind, &ccq, c->names[i]);
        if (st != MN_OK) break;
        const char *name = mn_layer_kind_name(kind);
        if (flat && i == 0) st = mn_layer_config_write(object, &c->options[i], kind);
        if (flat || json_object_get(mixers, name)) continue;
        json_t *own = json_object();
        st = own ? mn_layer_config_write(own, &c->options[i], kind) : MN_ERR_MEMORY;
        set(mixers, name, own, &failed);
        if (failed) st = mn_fail(MN_ERR_MEMORY, "no memory for a configuration");
    }
    if (st == MN_OK && mixers && c->beside && !json_object_get(mixers, "attention")) {
        json_t *own = json_object();
        bool failed = !own;
        st = mn_layer_config_write(own, &c->beside[0], MN_LAYER_attention);
        set(mixers, "attention", own, &failed);
        if (failed) st = mn_fail(MN_ERR_MEMORY, "no memory for a configuration");
    }
    if (st == MN_OK && mixers) json_object_set(object, "mixers", mixers);
    json_decref(mixers);
    return st;
}

/* The configuration that was read, with the sizes that training may have set since. */
static mn_status write_source(char **text, size_t *size, const mn_model_config *c) {
    json_t *object = json_loads(c->source, 0, NULL);
    const char *member = c->family ? mn_dialect_nested(c->family) : NULL;
    const char *class = c->family ? mn_dialect_class(c->family) : NULL;
    json_t *inner = member ? json_object_get(object, member) : object;
    bool failed = !inner;
    if (inner) set(inner, "vocab_size", json_integer(c->vocab_size), &failed);
    if (object && class && !json_object_get(object, "architectures")) {
        set(object, "architectures", json_pack("[s]", class), &failed);
    }
    if (object) set(object, "mneme_version", json_string(MN_VERSION), &failed);
    if (object) set_quantization(object, c, &failed);
    mn_status st = failed ? mn_fail(MN_ERR_MEMORY, "no memory for a configuration")
                          : mn_json_text(text, object, MN_JSON_PRETTY);
    if (st == MN_OK) *size = strlen(*text);
    json_decref(object);
    return st;
}

/* A factor that is a whole number as one: classes of transformers take nothing else. */
static void make_whole(json_t *object, const char *key, bool *failed) {
    const json_t *value = json_object_get(object, key);
    const double x = json_is_real(value) ? json_real_value(value) : 0.5;
    if (x == (double)(int64_t)x) set(object, key, json_integer((json_int_t)x), failed);
}

mn_status mn_model_config_write(char **text, size_t *size, const mn_model_config *c) {
    if (c->source) return write_source(text, size, c);
    const char *architecture = NULL, *type = type_of(c, &architecture);
    char layers[MN_MAX_LAYERS * (MN_MIXER_NAME + 2)];
    mn_layers_describe(layers, sizeof layers, c);
    bool failed = false;
    json_t *object = json_object();
    set(object, "model_type", json_string(type ? type : "mneme"), &failed);
    if (type) set(object, "architectures", json_pack("[s]", architecture), &failed);
    else set(object, "layers", json_string(layers), &failed);
    set(object, "mneme_version", json_string(MN_VERSION), &failed);
    set(object, "vocab_size", json_integer(c->vocab_size), &failed);
    set(object, "hidden_size", json_integer(c->hidden_size), &failed);
    set(object, "num_hidden_layers", json_integer(c->n_layers), &failed);
    if (!type || c->mlp != MN_MLP_NONE) {    // elsewhere it is the width of the mixer
        set(object, "intermediate_size", json_integer(c->intermediate_size), &failed);
    }
    if (!type) set(object, "mlp", json_string(mlp_names[c->mlp]), &failed);
    if (c->decoder != MN_DECODER_NONE) {
        set(object, "decoder", json_string(decoder_names[c->decoder]), &failed);
    }
    if (c->norm_plus_one) set(object, "norm_plus_one", json_true(), &failed);
    if (c->layer_norm) {
        set(object, "norm", json_string("layer"), &failed);
        set(object, "norm_bias", json_boolean(c->norm_bias), &failed);
    }
    if (c->norm_first) set(object, "norm_first", json_true(), &failed);
    if (c->mlp_bias) set(object, "mlp_bias", json_true(), &failed);
    set(object, "tie_word_embeddings", json_boolean(c->tied), &failed);
    set(object, "norm_eps", mn_json_real(c->norm_eps), &failed);
    set(object, "initializer_range", mn_json_real(c->initializer_range), &failed);
    if (c->logit_softcap != 0.0) {
        set(object, "logit_softcap", mn_json_real(c->logit_softcap), &failed);
    }
    set(object, "max_position_embeddings", json_integer(c->context), &failed);
    set_quantization(object, c, &failed);
    if (mn_block_write(object, &c->block, c->halves, c->n_layers) != MN_OK) failed = true;
    const bool mixes = c->family && mn_dialect_mixes(c->family);
    mn_status st = failed ? mn_fail(MN_ERR_MEMORY, "no memory for a configuration")
                          : write_options(object, c, type && !mixes);
    const char *family = type ? mn_dialect_find(type) : NULL;
    if (st == MN_OK && family) st = mn_dialect_write(object, family, c->names, c->n_layers);
    if (st == MN_OK && type) make_whole(object, "expand", &failed);
    if (failed) st = mn_fail(MN_ERR_MEMORY, "no memory for a configuration");
    *text = NULL;
    if (st == MN_OK) st = mn_json_text(text, object, MN_JSON_PRETTY);
    *size = *text ? strlen(*text) : 0;
    json_decref(object);
    return st;
}
