/* roles.c - takes the parameters of layers apart by what their rows are for. */
#include "model/folder/roles.h"

#include <stddef.h>
#include <stdlib.h>
#include <string.h>

#include "base/status.h"
#include "base/util.h"

static const struct {
    mn_layer_kind kind;
    const char *param, *role;
} rows[] = {
#define ROLE_OF(kind, param, role) { MN_LAYER_##kind, param, role },
#include "model/folder/roles.def"
#undef ROLE_OF
};

static mn_status add(mn_roles *roles, const char *role, int param, int64_t at, int64_t row,
                     int64_t n) {
    if (n == 0) return MN_OK;
    if (roles->n == roles->capacity) {
        const int capacity = roles->capacity ? 2 * roles->capacity : 64;
        mn_role_span *grown = realloc(roles->spans, (size_t)capacity * sizeof *grown);
        if (!grown) return mn_fail(MN_ERR_MEMORY, "no memory for the parts of a layer");
        roles->spans = grown;
        roles->capacity = capacity;
    }
    roles->spans[roles->n++] = (mn_role_span){ role, param, at, row, n };
    return MN_OK;
}

/* Part i of a packed matrix: `n` rows a group of role `role`. */
typedef struct packed {
    const char *role;
    int64_t n;
} packed;

/* `groups` groups of the parts one after the other. */
static mn_status add_packed(mn_roles *roles, int param, const packed *parts, int n_parts,
                            int64_t groups) {
    mn_status st = MN_OK;
    int64_t at = 0;
    for (int64_t g = 0; g < groups && st == MN_OK; g++) {
        for (int i = 0; i < n_parts && st == MN_OK; i++) {
            st = add(roles, parts[i].role, param, at, g * parts[i].n, parts[i].n);
            at += parts[i].n;
        }
    }
    return st;
}

#define S(letter) MN_SIZE(&layer->sizes, letter)

static mn_status add_gdn(mn_roles *roles, int p, bool *done) {
    const mn_layer *layer = roles->layer;
    const char *name = layer->params[p].name;
    const int64_t HK = S('H') * S('K'), JV = S('J') * S('V'), n = S('J') / S('H');
    const packed qkv[] = { { "q_proj.weight", HK }, { "k_proj.weight", HK },
                           { "v_proj.weight", JV } };
    const packed conv[] = { { "q_conv1d.weight", HK }, { "k_conv1d.weight", HK },
                            { "v_conv1d.weight", JV } };
    const packed qkvz[] = { { "q_proj.weight", S('K') }, { "k_proj.weight", S('K') },
                            { "v_proj.weight", n * S('V') }, { "g_proj.weight", n * S('V') } };
    const packed ba[] = { { "b_proj.weight", n }, { "a_proj.weight", n } };
    *done = true;
    if (strcmp(name, "in_proj_qkv.weight") == 0) return add_packed(roles, p, qkv, 3, 1);
    if (strcmp(name, "conv1d.weight") == 0) return add_packed(roles, p, conv, 3, 1);
    if (strcmp(name, "in_proj_qkvz.weight") == 0) return add_packed(roles, p, qkvz, 4, S('H'));
    if (strcmp(name, "in_proj_ba.weight") == 0) return add_packed(roles, p, ba, 2, S('H'));
    *done = false;
    return MN_OK;
}

static mn_status add_attention(mn_roles *roles, int p, bool *done) {
    const mn_layer *layer = roles->layer;
    const char *name = layer->params[p].name;
    const int64_t K = S('K'), JK = S('J') * K;
    const bool heads = layer->config.fused_qkv == 2, bias = strstr(name, ".bias") != NULL;
    const packed qkv[] = { { bias ? "q_proj.bias" : "q_proj.weight", heads ? K : S('H') * K },
                           { bias ? "k_proj.bias" : "k_proj.weight", heads ? K : JK },
                           { bias ? "v_proj.bias" : "v_proj.weight", heads ? K : JK } };
    const packed gated[] = { { bias ? "q_proj.bias" : "q_proj.weight", K },
                             { bias ? "attention gate bias" : "attention gate", K } };
    *done = true;
    if (strncmp(name, "qkv_proj.", 9) == 0) return add_packed(roles, p, qkv, 3, heads ? S('H') : 1);
    if (strncmp(name, "q_proj.", 7) == 0 && layer->config.use_output_gate) {
        return add_packed(roles, p, gated, 2, S('H'));
    }
    *done = false;
    return MN_OK;
}

static mn_status add_mamba2(mn_roles *roles, int p, bool *done) {
    const mn_layer *layer = roles->layer;
    const char *name = layer->params[p].name;
    const bool bias = strstr(name, ".bias") != NULL;
    const int64_t I = S('I'), GK = S('G') * S('K');
    const packed in[] = { { bias ? "g_proj.bias" : "g_proj.weight", I },
                          { bias ? "v_proj.bias" : "v_proj.weight", I },
                          { bias ? "k_proj.bias" : "k_proj.weight", GK },
                          { bias ? "q_proj.bias" : "q_proj.weight", GK },
                          { bias ? "a_proj.bias" : "a_proj.weight", S('H') } };
    const packed conv[] = { { bias ? "v_conv1d.bias" : "v_conv1d.weight", I },
                            { bias ? "k_conv1d.bias" : "k_conv1d.weight", GK },
                            { bias ? "q_conv1d.bias" : "q_conv1d.weight", GK } };
    *done = true;
    if (strncmp(name, "in_proj.", 8) == 0) return add_packed(roles, p, in, 5, 1);
    if (strncmp(name, "conv1d.", 7) == 0) return add_packed(roles, p, conv, 3, 1);
    *done = false;
    return MN_OK;
}

/* kla and mamba1: what the memory takes and the output gate, side by side. */
static mn_status add_in_proj(mn_roles *roles, int p, bool *done) {
    const mn_layer *layer = roles->layer;
    const char *name = layer->params[p].name;
    const bool bias = strstr(name, ".bias") != NULL;
    const int64_t V = S('V'), all = layer->params[p].shape[0];
    const packed in[] = { { bias ? "v_proj.bias" : "v_proj.weight", V },
                          { bias ? "g_proj.bias" : "g_proj.weight", all - V } };
    *done = strncmp(name, "in_proj.", 8) == 0;
    return *done ? add_packed(roles, p, in, 2, 1) : MN_OK;
}

static mn_status add_param(mn_roles *roles, int p) {
    const mn_layer *layer = roles->layer;
    const mn_param_info *info = &layer->params[p];
    const char *role = info->name;
    bool done = false;
    mn_status st = MN_OK;
    switch (layer->kind) {
    case MN_LAYER_gdn: st = add_gdn(roles, p, &done); break;
    case MN_LAYER_attention: st = add_attention(roles, p, &done); break;
    case MN_LAYER_mamba2: st = add_mamba2(roles, p, &done); break;
    case MN_LAYER_mamba1:
    case MN_LAYER_kla: st = add_in_proj(roles, p, &done); break;
    default: break;
    }
    if (st != MN_OK || done) return st;
    for (size_t i = 0; i < MN_COUNTOF(rows); i++) {
        if (rows[i].kind == layer->kind && strcmp(rows[i].param, info->name) == 0) {
            role = rows[i].role;
        }
    }
    return add(roles, role, p, 0, 0, info->rank ? info->shape[0] : 1);
}

mn_status mn_roles_make(mn_roles *out, const mn_layer *layer) {
    *out = (mn_roles){ .layer = layer };
    mn_status st = MN_OK;
    for (int p = 0; p < layer->n_params && st == MN_OK; p++) st = add_param(out, p);
    if (st != MN_OK) mn_roles_free(out);
    return st;
}

void mn_roles_free(mn_roles *roles) {
    free(roles->spans);
    *roles = (mn_roles){ 0 };
}

int64_t mn_role_rows(const mn_roles *roles, const char *role, int64_t *width) {
    int64_t n = 0;
    *width = 0;
    for (int i = 0; i < roles->n; i++) {
        const mn_role_span *s = &roles->spans[i];
        if (strcmp(s->role, role) != 0) continue;
        const mn_param_info *info = &roles->layer->params[s->param];
        *width = info->count / (info->rank ? info->shape[0] : 1);
        n = mn_max(n, s->row + s->n);
    }
    return n;
}

const mn_role_span *mn_role_find(const mn_roles *roles, const char *role, int64_t row) {
    for (int i = 0; i < roles->n; i++) {
        const mn_role_span *s = &roles->spans[i];
        if (strcmp(s->role, role) == 0 && row >= s->row && row < s->row + s->n) return s;
    }
    return NULL;
}

/* ---- heads ----------------------------------------------------------------------------------- */

mn_heads mn_heads_of(const mn_layer *layer) {
    const int64_t H = mn_max(S('H'), 1), J = S('J'), G = S('G');
    mn_heads h = { H, H, H, S('K'), S('V') };
    switch (layer->kind) {
    case MN_LAYER_attention:
    case MN_LAYER_relu_attention: h.keys = h.values = J ? J : H; break;
    case MN_LAYER_gla:
    case MN_LAYER_retnet:
    case MN_LAYER_linear: h.keys = h.values = G ? G : H; break;
    case MN_LAYER_mamba2: h.queries = h.keys = G ? G : 1; break;
    case MN_LAYER_gdn:
    case MN_LAYER_kda: h.values = J ? J : H; break;
    case MN_LAYER_mamba1:
    case MN_LAYER_kla: h.queries = h.keys = h.values = 0; break;    // channels
    default: break;
    }
    return h;
}

int64_t mn_role_heads(const mn_roles *roles, const char *role) {
    const mn_heads h = mn_heads_of(roles->layer);
    if (strncmp(role, "q_", 2) == 0) return h.queries;
    if (strncmp(role, "k_", 2) == 0) return h.keys;
    return strncmp(role, "v_", 2) == 0 ? h.values : 0;
}

/* ---- options --------------------------------------------------------------------------------- */

static const struct {
    const char *name;
    size_t at;
    bool real;
} options[] = {
#define OPTION_INT(name, choices, about) { #name, offsetof(mn_layer_config, name), false },
#define OPTION_SIZE(name, least, most, about) { #name, offsetof(mn_layer_config, name), false },
#define OPTION_RANK(name, least, most, about) { #name, offsetof(mn_layer_config, name), false },
#define OPTION_REAL(name, least, most, about) { #name, offsetof(mn_layer_config, name), true },
#include "layers/options.def"
};

static bool takes(mn_layer_kind kind, const char *option) {
    const char *keys[128];
    const int n = mn_layer_option_keys(kind, keys, MN_COUNTOF(keys));
    for (int i = 0; i < n; i++) {
        if (strcmp(keys[i], option) == 0) return true;
    }
    return false;
}

/* Widths that mean another thing in each kind, which mn_heads says for all; and how matrices are
 * packed. */
static bool is_own(const char *option) {
    static const char *const names[] = { "num_heads", "num_kv_heads", "num_v_heads", "head_dim",
                                         "v_head_dim", "expand_k", "expand_v", "expand",
                                         "state_size", "inner_size", "n_groups", "projections",
                                         "fused_qkv", "dt_rank", "output_multiplier",
                                         "input_multiplier" };
    for (size_t i = 0; i < MN_COUNTOF(names); i++) {
        if (strcmp(names[i], option) == 0) return true;
    }
    return false;
}

/* Options of heads and widths, for a layer of `queries` heads or as many as values have. */
static void set_heads(mn_layer_config *c, mn_layer_kind kind, const mn_heads *h, int64_t D) {
    const int64_t most = mn_max(h->queries, mn_max(h->keys, h->values));
    const int64_t inner = h->values < most && kind != MN_LAYER_mamba2 ? most : h->values;
    const double share = (double)D / (double)most;
    c->num_heads = most;
    if (takes(kind, "head_dim")) {
        c->head_dim = h->key_width;
        c->expand_k = 1.0;
        c->expand_v = (double)h->value_width / (double)h->key_width;
    } else {
        c->expand_k = (double)h->key_width / share;
        c->expand_v = (double)h->value_width / share;
    }
    if (takes(kind, "num_kv_heads")) c->num_kv_heads = h->values;
    if (takes(kind, "num_v_heads") && h->queries < h->values && h->queries == h->keys) {
        c->num_heads = h->queries;
        c->num_v_heads = h->values;
    }
    c->expand = (double)(inner * h->value_width) / (double)D;
    if (kind != MN_LAYER_mamba2) return;
    c->head_dim = h->value_width;
    c->state_size = h->key_width;
    c->n_groups = most % h->keys == 0 && h->keys == h->queries ? h->keys : most;
}

void mn_options_after(mn_layer_config *out, mn_layer_kind kind, const mn_layer *from) {
    const mn_layer_config *c = &from->config;
    const mn_heads h = mn_heads_of(from);
    mn_layer_defaults(out, kind);
    if (kind == from->kind) {
        *out = *c;
        return;
    }
    for (size_t i = 0; i < MN_COUNTOF(options); i++) {
        const bool both = takes(kind, options[i].name) && takes(from->kind, options[i].name);
        if (!both || is_own(options[i].name)) continue;
        const size_t size = options[i].real ? sizeof(double) : sizeof(int64_t);
        memcpy((char *)out + options[i].at, (const char *)c + options[i].at, size);
    }
    if (from->kind == MN_LAYER_kla || from->kind == MN_LAYER_mamba1) {
        out->expand = c->expand;
    } else if (h.key_width > 0 && h.value_width > 0) {
        set_heads(out, kind, &h, from->width);
    }
    if (takes(from->kind, "conv_kernel") && takes(kind, "conv_size")) {
        out->conv_size = c->conv_kernel;
        out->use_short_conv = 1;
    }
    if (takes(from->kind, "conv_size") && takes(kind, "conv_kernel") && c->conv_size > 0) {
        out->conv_kernel = c->conv_size;
    }
    const bool gated = takes(from->kind, "use_gate") ? c->use_gate
                       : takes(from->kind, "use_output_gate") && from->kind != MN_LAYER_attention
                           ? c->use_output_gate : 1;
    if (takes(kind, "use_gate")) out->use_gate = gated;
    if (takes(kind, "use_output_gate") && kind != MN_LAYER_attention) out->use_output_gate = gated;
    while (out->noise_groups > 1 && h.value_width % out->noise_groups != 0) out->noise_groups--;
}
