/* plan.c - the tensors of a GGUF file: names, order of rows, types. */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/status.h"
#include "base/util.h"
#include "model/folder/roles.h"
#include "model/folder/transfer.h"
#include "model/gguf/gguf.h"
#include "runtime/reserve.h"

typedef enum change {
    KEEP, NEG_EXP, COLUMN, NEG_EXP_COLUMN, GROUPS, FLAT, STACK_6, EXPERTS, ROLES, SKIP,
    CONV_4, NEG_EXP_4, LATENT_KEYS, LATENT_VALUES,
} change;

static const struct {
    const char *name, *family;
} archs[] = {
#define ARCH(name, family, about) { name, family },
#include "model/gguf/archs.def"
};

static const char *const pairs[] = {
#define ROPE_PAIRS(name) name,
#include "model/gguf/archs.def"
};

static const char *const scaled[] = {
#define SCALED(name) name,
#include "model/gguf/archs.def"
};

static const struct {
    const char *arch, *usual, *there;
} renamed[] = {
#define RENAMED(name, usual, there) { name, usual, there },
#include "model/gguf/archs.def"
};

static const struct {
    const char *kind, *ours, *theirs;
    change change;
} rows[] = {
#define ROW(kind, ours, theirs, change) { #kind, ours, theirs, change },
#include "model/gguf/archs.def"
};

enum { FREQUENCIES = -1, ZEROS = -2 };    // what no parameter is: factors of rotary frequencies

/* One tensor of the file. */
typedef struct item {
    int param;              // of the model, or FREQUENCIES or ZEROS
    int parts, step;        // so many parameters, `step` apart, on an axis before
    int64_t first;          // its first row in the parameter (gate and up that are one matrix)
    const char *roles[3];   // rows of these, one after the other; NULL: as they are
    bool plus_one;          // the file has the weight of a norm and one
    change change;
    int64_t heads, turning; // the first rows of so many heads are put in pairs; 0: as they are
    bool blocks;            // q, k and v head after head become all of each
    double factor[8];       // of sections of rows
    int64_t end[8];         // where these end; n_factors 0: none
    int n_factors;
} item;

struct mn_gguf_plan {
    const mn_source *source;
    const char *arch;
    mn_gguf_keys keys;
    mn_gguf_tensor *tensors;
    item *items;
    int n, capacity;
    char remark[512];
    void *buffer;
    int64_t done, all;
    bool (*progress)(void *context, int64_t bytes, int64_t of);
    void *progress_context;
};

static bool listed(const char *const *names, size_t n, const char *name) {
    for (size_t i = 0; i < n; i++) {
        if (strcmp(names[i], name) == 0) return true;
    }
    return false;
}

/* The first architecture whose family computes what a model of no such family does. */
static const char *arch_like(const mn_model_config *config) {
    const char *found = NULL;
    for (size_t i = 0; i < MN_COUNTOF(archs) && !found; i++) {
        mn_model_config copy = { 0 };
        mn_model *model = NULL;
        if (mn_model_config_copy(&copy, config) != MN_OK) return NULL;
        free(copy.source);
        copy.source = NULL;
        copy.family = mn_model_type_known(archs[i].family);
        const char *written = copy.family ? mn_model_config_family(&copy) : NULL;
        const bool said = written && strcmp(written, archs[i].family) == 0;
        if (said && mn_transfer_target(&model, &copy) == MN_OK) found = archs[i].name;
        mn_model_destroy(model);
        mn_model_config_free(&copy);
    }
    return found;
}

static mn_status find_arch(const char **out, const mn_source *source) {
    const char *family = mn_model_config_family(mn_model_describe(source->model));
    const mn_json type = mn_json_member(&source->config, "model_type");
    if (!family) family = json_string_value(type.value);
    for (size_t i = 0; i < MN_COUNTOF(archs) && family; i++) {
        if (strcmp(archs[i].family, family) != 0) continue;
        *out = archs[i].name;
        return MN_OK;
    }
    *out = arch_like(mn_model_describe(source->model));
    if (*out) return MN_OK;
    return mn_fail(MN_ERR_UNSUPPORTED, "%s: a model of type %s is none that is written as GGUF; "
                   "there are llama, qwen3, gpt2, gpt_neox, mamba, mamba2, jamba, bamba, "
                   "granitemoehybrid, falcon_h1, nemotron_h, lfm2, rwkv7, qwen3_next and "
                   "kimi_linear, and what computes the same", source->folder,
                   family ? family : "mneme");
}

/* ---- tensors --------------------------------------------------------------------------------- */

static bool ends_in(const char *name, const char *end) {
    const size_t n = strlen(name), m = strlen(end);
    return n >= m && strcmp(name + n - m, end) == 0;
}

/* What converters keep in float32: vectors, norms, convolutions, and what is no weight. */
static bool is_wide(const mn_gguf_tensor *t) {
    return t->rank < 2 || !ends_in(t->name, ".weight") || ends_in(t->name, "_norm.weight") ||
           strstr(t->name, "conv") || strcmp(t->name, "position_embd.weight") == 0 ||
           strstr(t->name, "ffn_gate_inp") || strstr(t->name, "time_mix_w1") ||
           strstr(t->name, "time_mix_w2") || strstr(t->name, "time_mix_lerp_fused");
}

static mn_gguf_type type_of(const mn_gguf_tensor *t, mn_gguf_as as, mn_stored_dtype stored) {
    if (is_wide(t)) {
        const bool in = strstr(t->name, "shortconv.in_proj") || strstr(t->name, "shortconv.out");
        if (!in) return MN_GGUF_F32;
    }
    switch (as) {
    case MN_GGUF_AS_F32: return MN_GGUF_F32;
    case MN_GGUF_AS_F16: return MN_GGUF_F16;
    case MN_GGUF_AS_BF16: return MN_GGUF_BF16;
    case MN_GGUF_AS_Q8_0:
        return t->shape[t->rank - 1] % MN_GGUF_BLOCK == 0 ? MN_GGUF_Q8_0 : MN_GGUF_F16;
    case MN_GGUF_AS_STORED: break;
    }
    if (stored == MN_STORED_BF16) return MN_GGUF_BF16;
    return stored == MN_STORED_F16 ? MN_GGUF_F16 : MN_GGUF_F32;
}

static item *add(mn_gguf_plan *p) {
    if (p->n == p->capacity) {
        const int capacity = p->capacity ? 2 * p->capacity : 256;
        item *items = realloc(p->items, (size_t)capacity * sizeof *items);
        if (items) p->items = items;
        mn_gguf_tensor *tensors = realloc(p->tensors, (size_t)capacity * sizeof *tensors);
        if (tensors) p->tensors = tensors;
        if (!items || !tensors) return NULL;
        p->capacity = capacity;
    }
    p->items[p->n] = (item){ 0 };
    p->tensors[p->n] = (mn_gguf_tensor){ 0 };
    return &p->items[p->n++];
}

/* The layer that a parameter is of, with its kind: "beside" is attention; NULL: of none. */
static const mn_layer *layer_of(const mn_model *model, const char *name, int *index,
                                const char **kind) {
    *kind = "any";
    *index = -1;
    if (sscanf(name, "model.layers.%d.", index) != 1) return NULL;
    const mn_layer *layer = mn_model_layer(model, *index);
    *kind = strstr(name, ".beside.") ? "attention" : mn_layer_kind_name(layer->kind);
    return layer;
}

static const char *name_of(char name[MN_GGUF_NAME], const char *ours, const char *kind, int index,
                           change *how) {
    for (size_t i = 0; i < MN_COUNTOF(rows); i++) {
        const bool any = strcmp(rows[i].kind, "any") == 0;
        if (!ends_in(ours, rows[i].ours) || (!any && strcmp(rows[i].kind, kind) != 0)) continue;
        const bool whole = index < 0 || strncmp(rows[i].theirs, "token_embd", 10) == 0;
        if (whole) snprintf(name, MN_GGUF_NAME, "%s", rows[i].theirs);
        else snprintf(name, MN_GGUF_NAME, "blk.%d.%s", index, rows[i].theirs);
        *how = rows[i].change;
        return name;
    }
    return NULL;
}

/* By the name that this one architecture has for it, behind "blk.N." or alone. */
static void special_name(char name[MN_GGUF_NAME], const char *arch) {
    int layer, used = 0;
    if (sscanf(name, "blk.%d.%n", &layer, &used) != 1) used = 0;
    for (size_t i = 0; i < MN_COUNTOF(renamed); i++) {
        if (strcmp(renamed[i].arch, arch) != 0) continue;
        if (strcmp(renamed[i].usual, name + used) != 0) continue;
        snprintf(name + used, (size_t)(MN_GGUF_NAME - used), "%s", renamed[i].there);
        return;
    }
}

/* The shape in the file: convolutions without their middle axis of 1. */
static void shape_of(mn_gguf_tensor *t, const mn_param_info *info, change how, int64_t groups) {
    t->rank = 0;
    for (int i = 0; i < info->rank; i++) {
        if (i > 0 && i + 1 < info->rank && info->shape[i] == 1) continue;
        t->shape[t->rank++] = info->shape[i];
    }
    if (how == GROUPS) {
        t->rank = 2;
        t->shape[1] = t->shape[0] / groups;
        t->shape[0] = groups;
    } else if (t->rank == 1 && (how == COLUMN || how == NEG_EXP_COLUMN)) {
        t->rank = 2;
        t->shape[1] = 1;
    } else if (how == FLAT || how == STACK_6) {
        t->rank = how == FLAT ? 1 : 4;
        for (int i = 0; i < 4; i++) t->shape[i] = 1;
        t->shape[t->rank - 1] = info->count;
        if (how == STACK_6) t->shape[0] = 6;
    }
}

/* Of what reads the latent of attention: (heads, latent, keys) and (heads, values, latent). */
static void shape_latent(mn_gguf_tensor *t, change how, const mn_layer *layer) {
    const int64_t V = MN_SIZE(&layer->sizes, 'V');
    const int64_t N = MN_SIZE(&layer->sizes, 'E') - V, R = MN_SIZE(&layer->sizes, 'R');
    t->rank = 3;
    t->shape[0] = MN_SIZE(&layer->sizes, 'H');
    t->shape[1] = how == LATENT_KEYS ? R : V;
    t->shape[2] = how == LATENT_KEYS ? N : R;
}

/* Shapes of KDA's convolutions and decays: (1, C, 1, W) and (1, 1, H, 1). */
static void shape_wide(mn_gguf_tensor *t, change how) {
    const int64_t n = t->shape[0], taps = t->shape[1];
    t->rank = 4;
    t->shape[0] = t->shape[2] = 1;
    t->shape[1] = how == CONV_4 ? n : 1;
    t->shape[2] = how == CONV_4 ? 1 : n;
    t->shape[3] = how == CONV_4 ? taps : 1;
}

/* Several parameters of one shape on an axis before. */
static void stack(mn_gguf_tensor *t, item *it, int n, int step) {
    it->parts = n;
    it->step = step;
    if (t->rank == 4) return;    // has the axis
    for (int i = t->rank; i > 0; i--) t->shape[i] = t->shape[i - 1];
    t->shape[0] = n;
    t->rank++;
}

static void set_factor(item *it, int64_t rows_end, double factor) {
    it->factor[it->n_factors] = factor;
    it->end[it->n_factors++] = rows_end;
}

/* Multipliers that have no key go into rows of weights. */
static void scale(item *it, const mn_model *model, const mn_layer *layer, const char *name,
                  const mn_param_info *info) {
    const mn_model_config *c = mn_model_describe(model);
    const int64_t n = info->shape[0];
    int index;
    const char *kind;
    layer_of(model, name, &index, &kind);
    const mn_layer_config *beside = c->beside && index >= 0 ? &c->beside[index] : NULL;
    if (strstr(name, "embeddings")) set_factor(it, n, c->block.embedding_multiplier);
    else if (strstr(name, "lm_head")) set_factor(it, n, c->block.logits_multiplier);
    else if (strstr(name, "gate_proj")) set_factor(it, n, c->block.mlp_gate_multiplier);
    else if (strstr(name, "mlp.down_proj")) set_factor(it, n, c->block.mlp_down_multiplier);
    else if (beside && strstr(name, ".beside.")) {
        double factor = beside->input_multiplier;
        if (strstr(name, "k_proj")) factor *= beside->key_multiplier;
        if (strstr(name, "o_proj")) factor = beside->output_multiplier;
        set_factor(it, n, factor);
    } else if (layer && layer->kind == MN_LAYER_mamba2 && strstr(name, "out_proj")) {
        set_factor(it, n, layer->config.output_multiplier);
    } else if (layer && layer->kind == MN_LAYER_mamba2 && strstr(name, "in_proj")) {
        const mn_layer_config *o = &layer->config;
        const int64_t I = MN_SIZE(&layer->sizes, 'I');
        const int64_t GK = MN_SIZE(&layer->sizes, 'G') * MN_SIZE(&layer->sizes, 'K');
        set_factor(it, I, o->input_multiplier * o->z_multiplier);
        set_factor(it, 2 * I, o->input_multiplier * o->x_multiplier);
        set_factor(it, 2 * I + GK, o->input_multiplier * o->b_multiplier);
        set_factor(it, 2 * I + 2 * GK, o->input_multiplier * o->c_multiplier);
        set_factor(it, n, o->input_multiplier * o->dt_multiplier);
    }
}

/* How the rows of queries and keys lie in the file. */
static void order_rows(item *it, const mn_gguf_plan *p, const mn_layer *layer, const char *name) {
    const mn_heads heads = mn_heads_of(layer);
    const bool turns = listed(pairs, MN_COUNTOF(pairs), p->arch);
    if (strstr(name, "qkv_proj")) it->blocks = layer->config.fused_qkv == 2;
    if (turns && strstr(name, ".q_proj.")) it->heads = heads.queries;
    if (turns && strstr(name, ".k_proj.")) it->heads = heads.keys;
    const double share = layer->config.use_rope ? layer->config.partial_rotary_factor : 1.0;
    it->turning = (int64_t)(share * (double)heads.key_width);
}

/* q, k and v of Gated DeltaNet's shared projection, or its output gate. */
static void gather(mn_gguf_tensor *t, item *it, const mn_layer *layer, bool gate) {
    const int64_t HK = MN_SIZE(&layer->sizes, 'H') * MN_SIZE(&layer->sizes, 'K');
    const int64_t JV = MN_SIZE(&layer->sizes, 'J') * MN_SIZE(&layer->sizes, 'V');
    t->shape[0] = gate ? JV : 2 * HK + JV;
    it->roles[0] = gate ? "g_proj.weight" : "q_proj.weight";
    if (gate) return;
    it->roles[1] = "k_proj.weight";
    it->roles[2] = "v_proj.weight";
}

static mn_status add_tensor(mn_gguf_plan *p, int param, mn_gguf_as as, const char *suffix,
                            int64_t first, int64_t n_rows) {
    const mn_model *model = p->source->model;
    const mn_model_param *m = mn_model_param_at(p->source->model, param);
    const char *kind;
    char ours[2 * MN_PARAM_NAME];
    int index;
    const mn_layer *layer = layer_of(model, m->name, &index, &kind);
    item *it = add(p);
    if (!it) return mn_fail(MN_ERR_MEMORY, "no memory for the tensors of a GGUF file");
    mn_gguf_tensor *t = &p->tensors[p->n - 1];
    it->param = param;
    it->parts = 1;
    it->first = first;
    snprintf(ours, sizeof ours, "%s%s", m->name, suffix);
    if (suffix[0]) snprintf(ours, sizeof ours, "%s", suffix);
    if (!name_of(t->name, ours, kind, index, &it->change)) {
        return mn_fail(MN_ERR_UNSUPPORTED, "%s has no name in llama.cpp's %s", m->name, p->arch);
    }
    special_name(t->name, p->arch);
    shape_of(t, &m->info, it->change, layer ? mn_max(MN_SIZE(&layer->sizes, 'G'), 1) : 1);
    if (n_rows) t->shape[0] = n_rows;
    if (it->change == CONV_4 || it->change == NEG_EXP_4) shape_wide(t, it->change);
    if (it->change == LATENT_KEYS || it->change == LATENT_VALUES) {
        shape_latent(t, it->change, layer);
    }
    if (it->change == STACK_6) stack(t, it, 6, 1);
    if (it->change == EXPERTS) {
        stack(t, it, (int)mn_model_describe(model)->block.num_experts, 3);
    }
    if (it->change == ROLES) gather(t, it, layer, suffix[0] != '\0');
    const bool norm = ends_in(m->name, "_norm.weight") || ends_in(m->name, "model.norm.weight");
    it->plus_one = norm && !strstr(m->name, "o_norm") && mn_model_describe(model)->norm_plus_one;
    if (layer && layer->kind == MN_LAYER_attention) order_rows(it, p, layer, m->name);
    if (listed(scaled, MN_COUNTOF(scaled), p->arch)) scale(it, model, layer, m->name, &m->info);
    const mn_stored_dtype stored = mn_weights_dtype(p->source->weights, model, m->name);
    t->type = type_of(t, as, stored);
    p->all += (int64_t)mn_gguf_bytes(t);
    return MN_OK;
}

/* llama3 scales rotary frequencies by a tensor of what each is divided by. */
static double frequency_factor(const mn_layer_config *c, int64_t i, int64_t R) {
    const double w = pow(c->rope_theta, -2.0 * (double)i / (double)R);
    const double turns = (double)c->rope_original_context * w / (2.0 * acos(-1.0));
    const double low = c->rope_low_freq_factor, high = c->rope_high_freq_factor;
    const double s = fmin(fmax((turns - low) / (high - low), 0.0), 1.0);
    return 1.0 / (s + (1.0 - s) / c->rope_factor);
}

enum { ROPE_LLAMA3 = 2 };    // of rope_type

static const mn_layer *scaled_layer(const mn_model *model) {
    for (int i = 0; i < mn_model_describe(model)->n_layers; i++) {
        const mn_layer *layer = mn_model_layer(model, i);
        const bool turns = layer->kind == MN_LAYER_attention && layer->config.use_rope;
        if (turns && layer->config.rope_type == ROPE_LLAMA3) return layer;
    }
    return NULL;
}

/* A vector that is no parameter. */
static mn_status add_vector(mn_gguf_plan *p, int what, const char *name, int64_t n) {
    item *it = add(p);
    if (!it) return mn_fail(MN_ERR_MEMORY, "no memory for the tensors of a GGUF file");
    mn_gguf_tensor *t = &p->tensors[p->n - 1];
    it->param = what;
    snprintf(t->name, sizeof t->name, "%s", name);
    t->rank = 1;
    t->shape[0] = n;
    t->type = MN_GGUF_F32;
    p->all += (int64_t)mn_gguf_bytes(t);
    return MN_OK;
}

/* Factors of frequencies, and zeros for the biases that llama.cpp wants of each convolution. */
static mn_status add_others(mn_gguf_plan *p) {
    const mn_model *model = p->source->model;
    const mn_layer *turns = scaled_layer(model);
    mn_status st = MN_OK;
    if (turns) {
        st = add_vector(p, FREQUENCIES, "rope_freqs.weight", MN_SIZE(&turns->sizes, 'K') / 2);
    }
    for (int i = 0; i < mn_model_describe(model)->n_layers && st == MN_OK; i++) {
        const mn_layer *layer = mn_model_layer(model, i);
        const bool second = layer->kind == MN_LAYER_mamba2;
        char name[MN_GGUF_NAME];
        if ((!second && layer->kind != MN_LAYER_mamba1) || layer->config.use_conv_bias) continue;
        snprintf(name, sizeof name, "blk.%d.ssm_conv1d.bias", i);
        st = add_vector(p, ZEROS, name, MN_SIZE(&layer->sizes, second ? 'C' : 'V'));
    }
    return st;
}

/* The gate of the values of RWKV-7, which its first layer has not: llama.cpp wants some there. */
static mn_status add_dummy(mn_gguf_plan *p, int i, mn_gguf_as as) {
    static const char *const names[][2] = {
        { "model.layers.0.attn.a_lora.lora.0.weight", "v_lora.lora.0.weight" },
        { "model.layers.0.attn.a_lora.lora.2.weight", "v_lora.lora.2.weight" },
        { "model.layers.0.attn.a_lora.lora.2.bias", "v_lora.lora.2.bias" },
    };
    const char *name = mn_model_param_at(p->source->model, i)->name;
    for (size_t k = 0; k < MN_COUNTOF(names); k++) {
        if (strcmp(name, names[k][0]) == 0) return add_tensor(p, i, as, names[k][1], 0, 0);
    }
    return MN_OK;
}

/* Whether a parameter is part of another's tensor. */
static bool is_part(const mn_model *model, const char *name) {
    char theirs[MN_GGUF_NAME];
    const char *kind;
    int index;
    change how;
    layer_of(model, name, &index, &kind);
    return name_of(theirs, name, kind, index, &how) && how == SKIP;
}

static mn_status add_param(mn_gguf_plan *p, int i, mn_gguf_as as) {
    const mn_model_param *m = mn_model_param_at(p->source->model, i);
    if (is_part(p->source->model, m->name)) return MN_OK;
    if (ends_in(m->name, "in_proj_qkvz.weight")) {
        const mn_status st = add_tensor(p, i, as, "", 0, 0);
        return st == MN_OK ? add_tensor(p, i, as, "in_proj_z.weight", 0, 0) : st;
    }
    if (ends_in(m->name, "kv_proj.2.weight")) {
        const mn_status st = add_tensor(p, i, as, "kv_proj.2.values", 0, 0);
        if (st != MN_OK) return st;
    }
    if (strcmp(p->arch, "rwkv7") == 0) {
        const mn_status st = add_dummy(p, i, as);
        if (st != MN_OK) return st;
    }
    if (!ends_in(m->name, "gate_up_proj.weight")) return add_tensor(p, i, as, "", 0, 0);
    const int64_t F = m->info.shape[0] / 2;
    const mn_status st = add_tensor(p, i, as, "mlp.gate_proj.weight", 0, F);
    return st == MN_OK ? add_tensor(p, i, as, "mlp.up_proj.weight", F, F) : st;
}

mn_status mn_gguf_plan_create(mn_gguf_plan **out, const mn_source *source, mn_gguf_as as) {
    static const int types[] = { [MN_GGUF_AS_F32] = 0, [MN_GGUF_AS_F16] = 1,
                                 [MN_GGUF_AS_Q8_0] = 7, [MN_GGUF_AS_BF16] = 32 };
    mn_gguf_plan *p = calloc(1, sizeof *p);
    *out = NULL;
    if (!p) return mn_fail(MN_ERR_MEMORY, "no memory to plan a GGUF file");
    p->source = source;
    const mn_model_config *c = mn_model_describe(source->model);
    mn_status st = find_arch(&p->arch, source);
    if (st == MN_OK) {
        const char *slash = strrchr(source->folder, '/');
        mn_gguf_text(&p->keys, "general.architecture", p->arch);
        mn_gguf_text(&p->keys, "general.type", "model");
        mn_gguf_text(&p->keys, "general.name", slash && slash[1] ? slash + 1 : source->folder);
        st = mn_gguf_put_keys(&p->keys, p->remark, p->arch, source->model);
    }
    for (int i = 0; i < mn_model_params(source->model) && st == MN_OK; i++) {
        st = add_param(p, i, as);
    }
    if (st == MN_OK) st = add_others(p);
    if (st == MN_OK) {
        int64_t file_type = types[MN_GGUF_AS_F32];
        for (int i = 0; i < p->n; i++) {
            const bool table = p->tensors[i].type == MN_GGUF_BF16;
            if (as == MN_GGUF_AS_STORED && table) file_type = types[MN_GGUF_AS_BF16];
            if (as == MN_GGUF_AS_STORED && p->tensors[i].type == MN_GGUF_F16) file_type = 1;
        }
        if (as != MN_GGUF_AS_STORED) file_type = types[as];
        mn_gguf_u32(&p->keys, "general.file_type", file_type);
        mn_gguf_u32(&p->keys, "general.quantization_version", 2);
        st = mn_gguf_put_tokens(&p->keys, p->remark, source->folder, c->vocab_size);
    }
    if (st == MN_OK) *out = p;
    else mn_gguf_plan_destroy(p);
    return st;
}

void mn_gguf_plan_destroy(mn_gguf_plan *p) {
    if (!p) return;
    mn_gguf_keys_free(&p->keys);
    free(p->tensors);
    free(p->items);
    free(p->buffer);
    free(p);
}

const char *mn_gguf_plan_arch(const mn_gguf_plan *p) {
    return p->arch;
}

int mn_gguf_plan_tensors(const mn_gguf_plan *p) {
    return p->n;
}

int64_t mn_gguf_plan_bytes(const mn_gguf_plan *p) {
    return p->all;
}

const char *mn_gguf_plan_remark(const mn_gguf_plan *p) {
    return p->remark;
}

/* ---- numbers --------------------------------------------------------------------------------- */

/* The row of the parameter that is row `r` of `n` in the file. */
static int64_t row_at(const item *it, int64_t r, int64_t n) {
    if (it->heads) {
        const int64_t K = n / it->heads, h = r / K, i = r % K;
        const int64_t R = it->turning;
        return h * K + (i < R ? (i % 2) * (R / 2) + i / 2 : i);
    }
    return it->first + r;
}

/* Rows of q, k and v of head h, which the file has as all of each. */
static int64_t block_row(int64_t r, int64_t n, int64_t H) {
    const int64_t part = n / 3, K = part / H, which = r / part, within = r % part;
    return (within / K * 3 + which) * K + within % K;
}

static void transform(float *x, const item *it, int64_t n_rows, int64_t width) {
    const bool decays = it->change == NEG_EXP || it->change == NEG_EXP_4 ||
                        it->change == NEG_EXP_COLUMN;
    for (int64_t i = 0; decays && i < n_rows * width; i++) x[i] = -expf(x[i]);
    for (int64_t i = 0; it->plus_one && i < n_rows * width; i++) x[i] += 1.0f;
    for (int64_t r = 0, k = 0; it->n_factors && r < n_rows; r++) {
        while (k + 1 < it->n_factors && r >= it->end[k]) k++;
        if (it->factor[k] == 1.0) continue;
        for (int64_t i = 0; i < width; i++) {
            x[r * width + i] = (float)((double)x[r * width + i] * it->factor[k]);
        }
    }
}

static mn_status narrow(void *out, const mn_gguf_tensor *t, const float *x, int64_t count) {
    int64_t lost = 0;
    if (t->type == MN_GGUF_Q8_0) {
        mn_gguf_q8_0(out, x, count);
        return MN_OK;
    }
    const mn_stored_dtype to = t->type == MN_GGUF_F32 ? MN_STORED_F32
                               : t->type == MN_GGUF_F16 ? MN_STORED_F16 : MN_STORED_BF16;
    const mn_status st = mn_stored_convert(out, to, x, MN_STORED_F32, count, &lost);
    if (st != MN_OK || lost == 0) return st;
    return mn_fail(MN_ERR_ARGUMENT, "%s: %lld numbers are out of the range of f16; bf16 has that "
                   "of f32", t->name, (long long)lost);
}

/* The rows of roles one after the other. */
static mn_status rows_of_roles(float *out, const float *x, const item *it, const mn_layer *layer,
                               int64_t width) {
    mn_roles roles;
    mn_status st = mn_roles_make(&roles, layer);
    for (int i = 0; i < 3 && it->roles[i] && st == MN_OK; i++) {
        int64_t wide;
        const int64_t n = mn_role_rows(&roles, it->roles[i], &wide);
        for (int64_t r = 0; r < n; r++, out += width) {
            const mn_role_span *s = mn_role_find(&roles, it->roles[i], r);
            memcpy(out, x + (s->at + r - s->row) * width, (size_t)width * sizeof *x);
        }
    }
    if (st == MN_OK) mn_roles_free(&roles);
    return st;
}

/* Keys of a head, the other way round, or its values. */
static void read_latent(float *out, const float *x, change how, const mn_layer *layer) {
    const int64_t H = MN_SIZE(&layer->sizes, 'H'), E = MN_SIZE(&layer->sizes, 'E');
    const int64_t V = MN_SIZE(&layer->sizes, 'V'), N = E - V, R = MN_SIZE(&layer->sizes, 'R');
    for (int64_t h = 0; h < H; h++) {
        const float *from = x + (h * E + (how == LATENT_VALUES ? N : 0)) * R;
        if (how == LATENT_VALUES) {
            memcpy(out + h * V * R, from, (size_t)(V * R) * sizeof *x);
            continue;
        }
        for (int64_t r = 0; r < R; r++) {
            for (int64_t i = 0; i < N; i++) out[(h * R + r) * N + i] = from[i * R + r];
        }
    }
}

/* One parameter's part of a tensor: its rows in the file's order, changed. */
static mn_status read_part(float *out, const mn_gguf_plan *p, const item *it, int part,
                           int64_t count) {
    const mn_source *s = p->source;
    const int param = it->param + part * it->step;
    const mn_model_param *m = mn_model_param_at(s->model, param);
    const int64_t all = m->info.rank ? m->info.shape[0] : 1, width = m->info.count / all;
    const int64_t n_rows = count / width;
    const char *kind;
    int index;
    const mn_layer *layer = layer_of(s->model, m->name, &index, &kind);
    float *x = malloc((size_t)m->info.count * sizeof *x + 1);
    if (!x) return mn_fail(MN_ERR_MEMORY, "no memory to write %s", m->name);
    mn_status st = mn_weights_read(x, MN_F32, s->model, s->weights, param);
    const bool latent = it->change == LATENT_KEYS || it->change == LATENT_VALUES;
    const bool by_rows = !it->roles[0] && !latent;
    if (st == MN_OK && it->roles[0]) st = rows_of_roles(out, x, it, layer, width);
    if (st == MN_OK && latent) read_latent(out, x, it->change, layer);
    for (int64_t r = 0; r < n_rows && st == MN_OK && by_rows; r++) {
        const int64_t from = it->blocks ? block_row(r, n_rows, mn_heads_of(layer).queries)
                                        : row_at(it, r, n_rows);
        memcpy(out + r * width, x + from * width, (size_t)width * sizeof *x);
    }
    if (st == MN_OK) transform(out, it, n_rows, width);
    free(x);
    return st;
}

static void fill_frequencies(float *out, const mn_model *model, int64_t n) {
    const mn_layer *layer = scaled_layer(model);
    for (int64_t i = 0; i < n; i++) out[i] = (float)frequency_factor(&layer->config, i, 2 * n);
}

static mn_status give(const void **data, void *context, int64_t i) {
    mn_gguf_plan *p = context;
    const item *it = &p->items[i];
    const mn_gguf_tensor *t = &p->tensors[i];
    const int64_t count = mn_gguf_elements(t);
    *data = p->buffer;
    if (it->param == ZEROS) {
        memset(p->buffer, 0, mn_gguf_bytes(t));
        return MN_OK;
    }
    if (it->param == FREQUENCIES) {
        fill_frequencies(p->buffer, p->source->model, t->shape[0]);
        return MN_OK;
    }
    float *x = malloc((size_t)count * sizeof *x + 1);
    mn_status st = x ? MN_OK : mn_fail(MN_ERR_MEMORY, "no memory to write %s", t->name);
    for (int part = 0; part < it->parts && st == MN_OK; part++) {
        st = read_part(x + part * (count / it->parts), p, it, part, count / it->parts);
    }
    if (st == MN_OK) st = narrow(p->buffer, t, x, count);
    free(x);
    p->done += (int64_t)mn_gguf_bytes(t);
    if (st == MN_OK && p->progress) p->progress(p->progress_context, p->done, p->all);
    return st;
}

mn_status mn_gguf_plan_write(mn_gguf_plan *p, const char *path,
                             bool (*progress)(void *context, int64_t bytes, int64_t of),
                             void *context) {
    size_t largest = 1;
    for (int i = 0; i < p->n; i++) {
        largest = mn_max(largest, 4 * (size_t)mn_gguf_elements(&p->tensors[i]));
    }
    mn_status st = mn_memory_check(3 * largest, "writing the largest tensor");
    free(p->buffer);
    p->buffer = st == MN_OK ? malloc(largest) : NULL;
    if (st == MN_OK && !p->buffer) st = mn_fail(MN_ERR_MEMORY, "no memory for the largest tensor");
    p->progress = progress;
    p->progress_context = context;
    p->done = 0;
    return st == MN_OK ? mn_gguf_write(path, &p->keys, p->tensors, p->n, give, p) : st;
}
