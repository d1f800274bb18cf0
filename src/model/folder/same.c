/* same.c - compares two configurations setting by setting. */
#include "model/folder/same.h"

#include <stddef.h>
#include <stdio.h>
#include <string.h>

#include "base/util.h"

typedef struct setting {
    const char *name;
    size_t at;
    enum { WHOLE, REAL, TRUTH, CHOICE } type;
} setting;

static const setting of_model[] = {
#define WHOLE_OF(name) { #name, offsetof(mn_model_config, name), WHOLE }
#define TRUTH_OF(name) { #name, offsetof(mn_model_config, name), TRUTH }
#define REAL_OF(name) { #name, offsetof(mn_model_config, name), REAL }
    WHOLE_OF(vocab_size), WHOLE_OF(hidden_size), WHOLE_OF(context), REAL_OF(norm_eps),
    REAL_OF(logit_softcap), TRUTH_OF(tied), TRUTH_OF(mlp_bias), TRUTH_OF(norm_plus_one),
    TRUTH_OF(layer_norm), TRUTH_OF(norm_bias), TRUTH_OF(norm_first),
    { "mlp", offsetof(mn_model_config, mlp), CHOICE },
    { "decoder", offsetof(mn_model_config, decoder), CHOICE },
#undef WHOLE_OF
#undef TRUTH_OF
#undef REAL_OF
};

static const setting of_block[] = {
#define BLOCK_INT(name, choices, value, about) { #name, offsetof(mn_block_config, name), WHOLE },
#define BLOCK_REAL(name, value, about) { #name, offsetof(mn_block_config, name), REAL },
#include "model/blocks.def"
#undef BLOCK_INT
#undef BLOCK_REAL
};

static const setting of_layer[] = {
#define OPTION_INT(name, choices, about) { #name, offsetof(mn_layer_config, name), WHOLE },
#define OPTION_SIZE(name, least, most, about) { #name, offsetof(mn_layer_config, name), WHOLE },
#define OPTION_RANK(name, least, most, about) { #name, offsetof(mn_layer_config, name), WHOLE },
#define OPTION_REAL(name, least, most, about) { #name, offsetof(mn_layer_config, name), REAL },
#include "layers/options.def"
};

static double value_of(const setting *s, const void *of) {
    const void *at = (const char *)of + s->at;
    switch (s->type) {
    case WHOLE: return (double)*(const int64_t *)at;
    case REAL: return *(const double *)at;
    case TRUTH: return *(const bool *)at;
    case CHOICE: return *(const int *)at;
    }
    return 0.0;
}

/* `where` opens the sentence: "layer 3: ". */
static bool same_setting(char why[MN_SAME_WHY], const char *where, const setting *s, const void *a,
                         const void *b) {
    const double x = value_of(s, a), y = value_of(s, b);
    if (x == y) return true;
    snprintf(why, MN_SAME_WHY, "%s%s is %g in one and %g in the other", where, s->name, x, y);
    return false;
}

static bool takes(mn_layer_kind kind, const char *option) {
    const char *keys[128];
    const int n = mn_layer_option_keys(kind, keys, MN_COUNTOF(keys));
    for (int i = 0; i < n; i++) {
        if (strcmp(keys[i], option) == 0) return true;
    }
    return false;
}

/* `fuse_norm` is a matter of names for all but rwkv7. */
static bool matters(mn_layer_kind kind, const char *option) {
    return takes(kind, option) &&
           (strcmp(option, "fuse_norm") != 0 || kind == MN_LAYER_rwkv7);
}

static bool same_options(char why[MN_SAME_WHY], int i, mn_layer_kind kind,
                         const mn_layer_config *a, const mn_layer_config *b) {
    char where[64];
    snprintf(where, sizeof where, "layer %d: ", i);
    for (size_t k = 0; k < MN_COUNTOF(of_layer); k++) {
        if (!matters(kind, of_layer[k].name)) continue;
        if (!same_setting(why, where, &of_layer[k], a, b)) return false;
    }
    return true;
}

static bool same_layer(char why[MN_SAME_WHY], int i, const mn_model_config *a,
                       const mn_model_config *b) {
    mn_layer_kind kind, other;
    bool ccq, ccq_other;
    if (mn_layer_kind_find(&kind, &ccq, a->names[i]) != MN_OK ||
        mn_layer_kind_find(&other, &ccq_other, b->names[i]) != MN_OK || kind != other ||
        ccq != ccq_other) {
        snprintf(why, MN_SAME_WHY, "layer %d is %s in one and %s in the other", i, a->names[i],
                 b->names[i]);
        return false;
    }
    if (a->halves[i] != b->halves[i]) {
        snprintf(why, MN_SAME_WHY, "the second half of block %d is another", i);
        return false;
    }
    if (!same_options(why, i, kind, &a->options[i], &b->options[i])) return false;
    if (!a->beside && !b->beside) return true;
    if (!a->beside != !b->beside) {
        snprintf(why, MN_SAME_WHY, "one has attention beside its mixers");
        return false;
    }
    return same_options(why, i, MN_LAYER_attention, &a->beside[i], &b->beside[i]);
}

bool mn_model_config_same(char why[MN_SAME_WHY], const mn_model_config *a,
                          const mn_model_config *b) {
    for (size_t i = 0; i < MN_COUNTOF(of_model); i++) {
        if (!same_setting(why, "", &of_model[i], a, b)) return false;
    }
    if (a->mlp != MN_MLP_NONE && a->intermediate_size != b->intermediate_size) {
        snprintf(why, MN_SAME_WHY, "intermediate_size is another");
        return false;
    }
    for (size_t i = 0; i < MN_COUNTOF(of_block); i++) {
        if (!same_setting(why, "", &of_block[i], &a->block, &b->block)) return false;
    }
    if (a->n_layers != b->n_layers) {
        snprintf(why, MN_SAME_WHY, "one has %d layers and the other %d", a->n_layers, b->n_layers);
        return false;
    }
    for (int i = 0; i < a->n_layers; i++) {
        if (!same_layer(why, i, a, b)) return false;
    }
    return true;
}
