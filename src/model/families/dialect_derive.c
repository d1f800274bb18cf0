/* dialect_derive.c - what rows of families.def cannot say: lists of layers made from periods and
 * patterns, sizes that follow from others, and settings whose value is not built. */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/bf16.h"
#include "base/status.h"
#include "base/util.h"
#include "io/json_write.h"
#include "model/config.h"
#include "model/families/dialect.h"

/* ---- pieces ---------------------------------------------------------------------------------- */

static mn_status put(json_t *object, const char *key, json_t *value) {
    if (json_object_set_new(object, key, value) == 0) return MN_OK;
    return mn_fail(MN_ERR_MEMORY, "no memory for a configuration");
}

/* Sets option `name` of a kind of layer. */
static mn_status put_mixer(json_t *out, const char *kind, const char *name, json_t *value) {
    json_t *mixers = json_object_get(out, "mixers");
    if (!mixers) {
        mixers = json_object();
        if (put(out, "mixers", mixers) != MN_OK) return MN_ERR_MEMORY;
    }
    json_t *own = json_object_get(mixers, kind);
    if (!own) {
        own = json_object();
        if (put(mixers, kind, own) != MN_OK) return MN_ERR_MEMORY;
    }
    return put(own, name, value);
}

static int64_t whole(const mn_json *object, const char *key, int64_t otherwise) {
    int64_t value = otherwise;
    return mn_json_opt_i64(&value, object, key) == MN_OK ? value : otherwise;
}

static bool is_true(const mn_json *object, const char *key) {
    return json_is_true(json_object_get(object->value, key));
}

static bool given(const mn_json *object, const char *key) {
    const mn_json at = mn_json_member(object, key);
    return mn_json_given(&at);
}

/* Fails unless key is absent, null or `value`. */
static mn_status only(const mn_json *object, const char *key, bool value) {
    const mn_json at = mn_json_member(object, key);
    if (!mn_json_given(&at) || json_is_true(at.value) == value) return MN_OK;
    return mn_json_fail(&at, "only %s is built", value ? "true" : "false");
}

/* The MLP without gate by its activation. */
static mn_status put_mlp(json_t *out, const mn_json *object, const char *key, const char *usual) {
    const char *act = usual, *mlp = NULL;
    const mn_status st = mn_json_opt_text(&act, object, key);
    if (st != MN_OK) return st;
    static const char *const known[][2] = {
        { "gelu", "gelu_erf" }, { "gelu_new", "gelu" }, { "gelu_pytorch_tanh", "gelu" },
        { "gelu_fast", "gelu" }, { "relu2", "relu_square" },
    };
    for (size_t i = 0; i < MN_COUNTOF(known); i++) {
        if (strcmp(known[i][0], act) == 0) mlp = known[i][1];
    }
    const mn_json at = mn_json_member(object, key);
    return mlp ? put(out, "mlp", json_string(mlp)) : mn_json_fail(&at, "\"%s\" is not built", act);
}

/* A list of layers that grows, and what the second halves of their blocks are. */
typedef struct layer_list {
    char *text;
    json_t *halves;
    int n;
} layer_list;

static mn_status begin(layer_list *list, int64_t most) {
    *list = (layer_list){ .halves = json_array() };
    if (most < 1 || most > MN_MAX_LAYERS) {
        return mn_fail(MN_ERR_FORMAT, "a model of %lld layers; 1 to %d are read", (long long)most,
                       MN_MAX_LAYERS);
    }
    list->text = calloc((size_t)most, MN_MIXER_NAME + 2);
    return list->text ? MN_OK : mn_fail(MN_ERR_MEMORY, "no memory for the names of layers");
}

static void add(layer_list *list, const char *kind, const char *half) {
    sprintf(list->text + strlen(list->text), "%s%s", list->n++ ? ", " : "", kind);
    json_array_append_new(list->halves, json_string(half));
}

/* Hands the list over; `kinds` says whether it tells the layers too. */
static mn_status finish(layer_list *list, json_t *out, mn_status st, bool kinds) {
    if (st == MN_OK && kinds) st = put(out, "layers", json_string(list->text));
    if (st == MN_OK) st = put(out, "mlp_layer_types", json_incref(list->halves));
    json_decref(list->halves);
    free(list->text);
    return st;
}

/* ---- families -------------------------------------------------------------------------------- */

static mn_status mn_derive_gpt2(json_t *out, const mn_json *object) {
    mn_status st = put_mlp(out, object, "activation_function", "gelu_new");
    if (st == MN_OK) st = only(object, "scale_attn_weights", true);
    if (st == MN_OK) st = only(object, "scale_attn_by_inverse_layer_idx", false);
    return st;
}

static mn_status mn_derive_gpt_neox(json_t *out, const mn_json *object) {
    const mn_json scaling = mn_json_member(object, "rope_scaling");
    if (mn_json_given(&scaling)) return mn_json_fail(&scaling, "is not built");
    json_object_del(out, "hidden_act");
    return put_mlp(out, object, "hidden_act", "gelu");
}

/* The number of layers that see a window of keys: those listed so, or before they were listed those
 * from max_window_layers on. */
static int64_t windowed_layers(const mn_json *object, int64_t n) {
    const mn_json types = mn_json_member(object, "layer_types");
    if (!is_true(object, "use_sliding_window")) return 0;
    if (!mn_json_given(&types)) {
        return mn_max(n - mn_max(whole(object, "max_window_layers", 28), 0), 0);
    }
    int64_t count = 0;
    for (int64_t i = 0; i < mn_json_count(&types); i++) {
        const mn_json item = mn_json_item(&types, i);
        const char *name = "";
        const bool known = mn_json_read_text(&name, &item) == MN_OK;
        count += known && strcmp(name, "sliding_attention") == 0;
    }
    return count;
}

static mn_status mn_derive_qwen3(json_t *out, const mn_json *object) {
    const int64_t n = whole(object, "num_hidden_layers", 0), some = windowed_layers(object, n);
    if (some == 0) json_object_del(out, "window_size");
    if (some == 0 || some == n) return MN_OK;
    const mn_json at = mn_json_member(object, "use_sliding_window");
    return mn_json_fail(&at, "a window in some layers and not in others is not built");
}

/* Experts in every decoder_sparse_step-th block but those of mlp_only_layers. */
static mn_status mn_derive_qwen_moe(json_t *out, const mn_json *object) {
    const int64_t n = whole(object, "num_hidden_layers", 0), E = whole(object, "num_experts", 0);
    const int64_t step = mn_max(whole(object, "decoder_sparse_step", 1), 1);
    const mn_json dense = mn_json_member(object, "mlp_only_layers");
    layer_list list;
    mn_status st = only(object, "attn_output_gate", true);
    if (st == MN_OK) st = begin(&list, n);
    if (st != MN_OK) return st;
    for (int64_t i = 0; i < n && st == MN_OK; i++) {
        bool sparse = E > 0 && (i + 1) % step == 0;
        for (int64_t k = 0; mn_json_given(&dense) && k < mn_json_count(&dense); k++) {
            const mn_json item = mn_json_item(&dense, k);
            int64_t at = -1;
            if (mn_json_read_i64(&at, &item) == MN_OK && at == i) sparse = false;
        }
        add(&list, "", sparse ? "sparse" : "dense");
    }
    st = finish(&list, out, st, false);
    if (st != MN_OK || given(object, "layer_types")) return st;
    /* before they were listed, every fourth layer was attention */
    const int64_t every = whole(object, "full_attention_interval", 4);
    st = begin(&list, n);
    for (int64_t i = 0; i < n && st == MN_OK; i++) {
        add(&list, (i + 1) % every ? "gdn" : "attention", "");
    }
    if (st == MN_OK) st = put(out, "layers", json_string(list.text));
    json_decref(list.halves);
    free(list.text);
    return st;
}

/* Experts in every block beside the MLP that serves all tokens. */
static mn_status granite_experts(json_t *out, const mn_json *object) {
    static const char *const sizes[][2] = {
        { "num_local_experts", "num_experts" },
        { "num_experts_per_tok", "num_experts_per_tok" },
        { "intermediate_size", "moe_intermediate_size" },
        { "shared_intermediate_size", "shared_expert_intermediate_size" },
    };
    const int64_t n = whole(object, "num_hidden_layers", 0);
    layer_list list;
    mn_status st = begin(&list, n);
    for (int64_t i = 0; i < n && st == MN_OK; i++) add(&list, "", "sparse");
    st = finish(&list, out, st, false);
    for (size_t i = 0; i < MN_COUNTOF(sizes) && st == MN_OK; i++) {
        const mn_json at = mn_json_member(object, sizes[i][0]);
        if (mn_json_given(&at)) st = put(out, sizes[i][1], json_incref(at.value));
    }
    return st == MN_OK ? put(out, "norm_topk_prob", json_true()) : st;
}

static mn_status mn_derive_granite(json_t *out, const mn_json *object) {
    const char *positions = "";
    double scaling = 1.0;
    mn_status st = mn_json_opt_text(&positions, object, "position_embedding_type");
    if (st == MN_OK) st = mn_json_opt_f64(&scaling, object, "logits_scaling");
    if (st == MN_OK && whole(object, "num_local_experts", 0) > 0) {
        st = granite_experts(out, object);
    }
    if (st == MN_OK) st = put(out, "logits_multiplier", json_real(1.0 / scaling));
    const bool rope = strcmp(positions, "rope") == 0;
    if (st == MN_OK) st = put_mixer(out, "attention", "use_rope", json_boolean(rope));
    return st;
}

static mn_status mn_derive_jamba(json_t *out, const mn_json *object) {
    const int64_t n = whole(object, "num_hidden_layers", 0), E = whole(object, "num_experts", 16);
    const int64_t period = mn_max(whole(object, "attn_layer_period", 8), 1);
    const int64_t offset = whole(object, "attn_layer_offset", 4);
    const int64_t e_period = mn_max(whole(object, "expert_layer_period", 2), 1);
    const int64_t e_offset = whole(object, "expert_layer_offset", 1);
    layer_list list;
    mn_status st = begin(&list, n);
    for (int64_t i = 0; i < n && st == MN_OK; i++) {
        add(&list, i % period == offset ? "attention" : "mamba1",
            E > 1 && i % e_period == e_offset ? "sparse" : "dense");
    }
    st = finish(&list, out, st, true);
    const mn_json rank = mn_json_member(object, "mamba_dt_rank");
    if (st == MN_OK && mn_json_given(&rank) && !json_is_string(rank.value)) {
        st = put_mixer(out, "mamba1", "dt_rank", json_incref(rank.value));
    }
    if (st == MN_OK) st = put(out, "num_experts", json_integer(E > 1 ? E : 0));
    json_t *width = json_object_get(out, "intermediate_size");
    if (st == MN_OK && width) st = put(out, "moe_intermediate_size", json_incref(width));
    return st;
}

static mn_status mn_derive_lfm2(json_t *out, const mn_json *object) {
    double width = (double)whole(object, "block_ff_dim", whole(object, "intermediate_size", 12288));
    double multiplier = 1.0;
    mn_status st = mn_json_opt_f64(&multiplier, object, "block_ffn_dim_multiplier");
    const json_t *adjust = json_object_get(object->value, "block_auto_adjust_ff_dim");
    if (!adjust || json_is_true(adjust)) {
        const double step = (double)mn_max(whole(object, "block_multiple_of", 256), 1);
        width = floor(multiplier * floor(2.0 * width / 3.0));
        width = step * ceil(width / step);
    }
    if (st == MN_OK) st = put(out, "intermediate_size", json_integer((int64_t)width));
    const mn_json attention = mn_json_member(object, "full_attn_idxs");
    if (st != MN_OK || given(object, "layer_types")) return st;
    const int64_t n = whole(object, "num_hidden_layers", 0);
    layer_list list;
    st = begin(&list, n);
    for (int64_t i = 0; i < n && st == MN_OK; i++) {
        bool listed = !mn_json_given(&attention);
        for (int64_t k = 0; !listed && k < mn_json_count(&attention); k++) {
            const mn_json item = mn_json_item(&attention, k);
            int64_t at = -1;
            listed = mn_json_read_i64(&at, &item) == MN_OK && at == i;
        }
        add(&list, listed ? "attention" : "short_conv", "dense");
    }
    return finish(&list, out, st, true);
}

static mn_status mn_derive_minimax(json_t *out, const mn_json *object) {
    const mn_json types = mn_json_member(object, "attn_type_list");    // of the first files: 1, 0
    if (given(object, "layer_types") || !mn_json_given(&types)) return MN_OK;
    layer_list list;
    mn_status st = begin(&list, mn_json_count(&types));
    for (int64_t i = 0; i < mn_json_count(&types) && st == MN_OK; i++) {
        const mn_json item = mn_json_item(&types, i);
        int64_t full = 0;
        st = mn_json_read_i64(&full, &item);
        add(&list, full ? "attention" : "lightning", "sparse");
    }
    return finish(&list, out, st, true);
}

/* A block of nemotron_h is a mixer or an MLP. */
static mn_status add_nemotron(layer_list *list, const char *type, const mn_json *at) {
    static const char *const known[][3] = {
        { "linear_attention", "mamba2", "none" }, { "mamba", "mamba2", "none" },
        { "M", "mamba2", "none" }, { "full_attention", "attention", "none" },
        { "attention", "attention", "none" }, { "*", "attention", "none" },
        { "mlp", "none", "dense" }, { "-", "none", "dense" }, { "moe", "none", "sparse" },
        { "E", "none", "sparse" },
    };
    for (size_t i = 0; i < MN_COUNTOF(known); i++) {
        if (strcmp(known[i][0], type) != 0) continue;
        add(list, known[i][1], known[i][2]);
        return MN_OK;
    }
    return mn_json_fail(at, "\"%s\" is no layer of nemotron_h", type);
}

static mn_status nemotron_layers(json_t *out, const mn_json *object) {
    const mn_json types = mn_json_member(object, "layers_block_type");
    const mn_json pattern = mn_json_member(object, "hybrid_override_pattern");
    const char *letters = "";
    const bool listed = mn_json_given(&types);
    mn_status st = listed ? mn_json_expect_list(&types) : mn_json_read_text(&letters, &pattern);
    if (st != MN_OK) return st;
    const int64_t n = listed ? mn_json_count(&types) : (int64_t)strlen(letters);
    layer_list list;
    st = begin(&list, n);
    for (int64_t i = 0; i < n && st == MN_OK; i++) {
        const char letter[2] = { listed ? '\0' : letters[i], '\0' }, *type = letter;
        const mn_json item = mn_json_item(&types, i);
        if (listed) st = mn_json_read_text(&type, &item);
        if (st == MN_OK) st = add_nemotron(&list, type, listed ? &item : &pattern);
    }
    return finish(&list, out, st, true);
}

static mn_status mn_derive_nemotron(json_t *out, const mn_json *object) {
    mn_status st = nemotron_layers(out, object);
    if (st == MN_OK) st = put_mlp(out, object, "mlp_hidden_act", "relu2");
    const int64_t inner = whole(object, "mamba_num_heads", 128) *
                          whole(object, "mamba_head_dim", 64);
    if (st == MN_OK) st = put_mixer(out, "mamba2", "inner_size", json_integer(inner));
    const json_t *halves = json_object_get(out, "mlp_layer_types");
    bool sparse = false;
    for (size_t i = 0; i < json_array_size(halves); i++) {
        sparse |= strcmp(json_string_value(json_array_get(halves, i)), "sparse") == 0;
    }
    const mn_json latent = mn_json_member(object, "moe_latent_size");
    if (st == MN_OK && sparse && mn_json_given(&latent)) {
        st = mn_json_fail(&latent, "is not built");
    }
    if (st == MN_OK && !sparse) st = put(out, "num_experts", json_integer(0));
    const int64_t shared = whole(object, "n_shared_experts", 1) *
                           whole(object, "moe_shared_expert_intermediate_size", 0);
    if (st == MN_OK) st = put(out, "shared_expert_intermediate_size", json_integer(shared));
    return st;
}

static mn_status mn_derive_olmo(json_t *out, const mn_json *object) {
    const mn_json rope = mn_json_member(object, "rope_parameters");
    const bool turns = mn_json_given(&rope) || given(object, "rope_theta");
    return put_mixer(out, "attention", "use_rope", json_boolean(turns));
}

static mn_status mn_derive_falcon_h1(json_t *out, const mn_json *object) {
    (void)out;
    const mn_json scaling = mn_json_member(object, "rope_scaling");
    if (mn_json_given(&scaling)) return mn_json_fail(&scaling, "is not built");
    return only(object, "projectors_bias", false);
}

/* Which blocks of kimi_linear and bailing_hybrid have experts, and how wide the shared one is. */
static mn_status ladder_halves(json_t *out, const mn_json *object) {
    const int64_t n = whole(object, "num_hidden_layers", 0), E = whole(object, "num_experts", 0);
    const int64_t first = whole(object, "first_k_dense_replace", 1);
    const int64_t step = mn_max(whole(object, "moe_layer_freq", 1), 1);
    layer_list list;
    mn_status st = MN_OK;
    if (!given(object, "mlp_layer_types")) {
        st = begin(&list, n);
        for (int64_t i = 0; i < n && st == MN_OK; i++) {
            add(&list, "", E > 0 && i >= first && i % step == 0 ? "sparse" : "dense");
        }
        st = finish(&list, out, st, false);
    }
    const int64_t shared = whole(object, "num_shared_experts", 1) *
                           whole(object, "moe_intermediate_size", 0);
    if (st == MN_OK) st = put(out, "shared_expert_intermediate_size", json_integer(shared));
    return st == MN_OK ? only(object, "attention_bias", false) : st;
}

/* Published files of Kimi Linear say what its layers are in linear_attn_config, counted from 1. */
static mn_status kimi_layers(json_t *out, const mn_json *object, const mn_json *config) {
    const int64_t n = whole(object, "num_hidden_layers", 0);
    const mn_json full = mn_json_member(config, "full_attn_layers");
    layer_list list;
    mn_status st = begin(&list, n);
    for (int64_t i = 0; i < n && st == MN_OK; i++) {
        bool listed = false;
        for (int64_t k = 0; k < mn_json_count(&full); k++) {
            const mn_json item = mn_json_item(&full, k);
            int64_t at = 0;
            listed |= mn_json_read_i64(&at, &item) == MN_OK && at == i + 1;
        }
        add(&list, listed ? "mla" : "kda", "");
    }
    if (st == MN_OK) st = put(out, "layers", json_string(list.text));
    json_decref(list.halves);
    free(list.text);
    static const char *const sizes[][2] = {
        { "num_heads", "num_heads" }, { "head_dim", "head_dim" },
        { "short_conv_kernel_size", "conv_size" },
    };
    for (size_t i = 0; i < MN_COUNTOF(sizes) && st == MN_OK; i++) {
        const mn_json at = mn_json_member(config, sizes[i][0]);
        if (mn_json_given(&at)) st = put_mixer(out, "kda", sizes[i][1], json_incref(at.value));
    }
    return st;
}

static mn_status mn_derive_kimi(json_t *out, const mn_json *object) {
    const mn_json config = mn_json_member(object, "linear_attn_config");
    mn_status st = ladder_halves(out, object);
    if (st == MN_OK && mn_json_given(&config) && !given(object, "layer_types")) {
        st = kimi_layers(out, object, &config);
    }
    return st;
}

static mn_status mn_derive_bailing(json_t *out, const mn_json *object) {
    mn_status st = ladder_halves(out, object);
    double bound = -5.0;
    if (st == MN_OK) st = mn_json_opt_f64(&bound, object, "kda_lower_bound");
    if (!is_true(object, "kda_safe_gate")) bound = 0.0;
    if (st == MN_OK) st = put_mixer(out, "kda", "lower_bound", json_real(bound));
    if (st != MN_OK || given(object, "layer_types")) return st;
    const int64_t n = whole(object, "num_hidden_layers", 0);
    const int64_t group = mn_max(whole(object, "layer_group_size", 6), 1);
    layer_list list;
    st = begin(&list, n);
    for (int64_t i = 0; i < n && st == MN_OK; i++) {
        add(&list, (i + 1) % group == 0 ? "mla" : "kda", "");
    }
    if (st == MN_OK) st = put(out, "layers", json_string(list.text));
    json_decref(list.halves);
    free(list.text);
    return st;
}

/* Mamba-2 in every block, a shared block before it in some. */
static mn_status mn_derive_zamba2(json_t *out, const mn_json *object) {
    const mn_json types = mn_json_member(object, "layers_block_type");
    const char *act = "gelu";
    mn_status st = mn_json_opt_text(&act, object, "hidden_act");
    const mn_json at = mn_json_member(object, "hidden_act");
    if (st == MN_OK && strcmp(act, "gelu") != 0) st = mn_json_fail(&at, "only gelu is built");
    if (st == MN_OK) st = only(object, "use_shared_attention_adapter", false);
    if (st == MN_OK) st = only(object, "use_long_context", false);
    if (st == MN_OK) st = only(object, "add_bias_linear", false);
    if (st == MN_OK) st = mn_json_expect_list(&types);
    if (st != MN_OK) return st;
    layer_list list;
    st = begin(&list, mn_json_count(&types));
    for (int64_t i = 0; i < mn_json_count(&types) && st == MN_OK; i++) {
        const mn_json item = mn_json_item(&types, i);
        const char *type = "";
        st = mn_json_read_text(&type, &item);
        add(&list, "mamba2", strcmp(type, "hybrid") == 0 ? "shared" : "none");
    }
    st = finish(&list, out, st, true);
    const int64_t D = whole(object, "hidden_size", 0), H = whole(object, "num_attention_heads", 1);
    const int64_t width = whole(object, "attention_head_dim", 2 * D / mn_max(H, 1));
    if (st == MN_OK) st = put_mixer(out, "attention", "head_dim", json_integer(width));
    if (st == MN_OK) {
        st = put_mixer(out, "attention", "attention_scale", json_real(sqrt(2.0 / (double)width)));
    }
    return st == MN_OK ? put(out, "hidden_act", json_string("swish")) : st;
}

/* Blocks by a pattern that repeats, and an MLP of half the width that is said. */
static mn_status mn_derive_recurrent_gemma(json_t *out, const mn_json *object) {
    const int64_t n = whole(object, "num_hidden_layers", 26);
    const int64_t D = whole(object, "hidden_size", 2560);
    const int64_t F = whole(object, "intermediate_size", 3 * D);
    const mn_json types = mn_json_member(object, "block_types");
    const bool listed = mn_json_given(&types);
    const int64_t period = listed ? mn_json_count(&types) : 3;
    mn_status st = MN_OK;
    if (listed) st = mn_json_expect_list(&types);
    if (st == MN_OK && period < 1) st = mn_json_fail(&types, "names no block");
    const char *act = "gelu_pytorch_tanh";
    const mn_json at = mn_json_member(object, "hidden_activation");
    if (st == MN_OK) st = mn_json_opt_text(&act, object, "hidden_activation");
    if (st == MN_OK && strcmp(act, "gelu_pytorch_tanh") != 0) {
        st = mn_json_fail(&at, "only gelu_pytorch_tanh is built");
    }
    if (st != MN_OK) return st;
    layer_list list;
    st = begin(&list, n);
    for (int64_t i = 0; i < n && st == MN_OK; i++) {
        const char *type = i % period == 2 ? "attention" : "recurrent";
        const mn_json item = mn_json_item(&types, i % period);
        if (listed) st = mn_json_read_text(&type, &item);
        const bool attention = strcmp(type, "attention") == 0;
        if (st == MN_OK && !attention && strcmp(type, "recurrent") != 0) {
            st = mn_json_fail(&item, "recurrent or attention");
        }
        add(&list, attention ? "attention" : "rg_lru", "dense");
    }
    st = finish(&list, out, st, true);
    if (st == MN_OK) st = put(out, "intermediate_size", json_integer(F / 2));
    /* their root of the width is a number of bf16 */
    if (st == MN_OK) {
        const double root = (double)mn_bf16_round(sqrt((double)D));
        st = put(out, "embedding_multiplier", json_real(root));
    }
    return st;
}

mn_derive_fn mn_dialect_derive(const char *family) {
    static const struct {
        const char *type;
        mn_derive_fn fn;
    } rows[] = {
#define DERIVED(type, function) { type, mn_derive_##function },
#include "model/families/families.def"
    };
    for (size_t i = 0; i < MN_COUNTOF(rows); i++) {
        if (strcmp(rows[i].type, family) == 0) return rows[i].fn;
    }
    return NULL;
}
