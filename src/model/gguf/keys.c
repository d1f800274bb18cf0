/* keys.c - what llama.cpp has to know of a model: sizes, norms, positions, states, multipliers. */
#include <stdarg.h>
#include <stdio.h>
#include <string.h>

#include "base/status.h"
#include "base/util.h"
#include "model/folder/roles.h"
#include "model/gguf/gguf.h"

enum { KEY = 96, MOST_LAYERS = MN_MAX_LAYERS };

/* Keys of one architecture. */
typedef struct writer {
    mn_gguf_keys *keys;
    const char *arch;
    const mn_model *model;
    const mn_model_config *c;
    const mn_layer *attention, *mamba, *conv;    // the first of each; NULL: none
    const mn_layer_config *attends;              // options of the attention, also of one beside
    mn_heads heads;                              // of the attention
} writer;

static const char *named(char key[KEY], const writer *w, const char *name) {
    snprintf(key, KEY, "%s.%s", w->arch, name);
    return key;
}

static void put_u32(const writer *w, const char *name, int64_t value) {
    char key[KEY];
    mn_gguf_u32(w->keys, named(key, w, name), value);
}

static void put_f32(const writer *w, const char *name, double value) {
    char key[KEY];
    mn_gguf_f32(w->keys, named(key, w, name), value);
}

/* A number for each layer, told as one where all are the same. */
static void put_each(const writer *w, const char *name, const int32_t *values) {
    char key[KEY];
    bool same = true;
    for (int i = 1; i < w->c->n_layers; i++) same &= values[i] == values[0];
    if (same) put_u32(w, name, values[0]);
    else mn_gguf_i32s(w->keys, named(key, w, name), values, w->c->n_layers);
}

static void look(writer *w) {
    for (int i = 0; i < w->c->n_layers; i++) {
        const mn_layer *layer = mn_model_layer(w->model, i);
        const bool mamba = layer->kind == MN_LAYER_mamba1 || layer->kind == MN_LAYER_mamba2;
        if (layer->kind == MN_LAYER_attention && !w->attention) w->attention = layer;
        if (mamba && !w->mamba) w->mamba = layer;
        if (layer->kind == MN_LAYER_short_conv && !w->conv) w->conv = layer;
    }
    if (w->attention) {
        w->attends = &w->attention->config;
        w->heads = mn_heads_of(w->attention);
    } else if (w->c->beside) {
        const mn_layer_config *o = w->attends = &w->c->beside[0];
        const int64_t J = o->num_kv_heads ? o->num_kv_heads : o->num_heads;
        w->heads = (mn_heads){ o->num_heads, J, J, o->head_dim, o->head_dim };
    }
}

static void put_sizes(const writer *w) {
    int32_t widths[MOST_LAYERS];
    const mn_model_config *c = w->c;
    const bool kimi = strcmp(w->arch, "kimi-linear") == 0;
    const bool endless = !w->attends && !kimi;    // nothing is limited: as converters say
    put_u32(w, "block_count", c->n_layers);
    put_u32(w, "context_length", endless ? 1 << 20 : c->context);
    put_u32(w, "embedding_length", c->hidden_size);
    put_u32(w, "vocab_size", c->vocab_size);
    for (int i = 0; i < c->n_layers; i++) {
        const bool half = c->mlp != MN_MLP_NONE && c->halves[i] == MN_MLP_DENSE;
        widths[i] = half ? (int32_t)c->intermediate_size : 0;
    }
    const bool sparse = c->block.num_experts > 1;
    const bool one = sparse || kimi || c->mlp == MN_MLP_RWKV7;
    if (one) put_u32(w, "feed_forward_length", c->intermediate_size);
    else put_each(w, "feed_forward_length", widths);
    put_f32(w, c->layer_norm ? "attention.layer_norm_epsilon"
                             : "attention.layer_norm_rms_epsilon", c->norm_eps);
    if (strcmp(w->arch, "nemotron_h") == 0) put_f32(w, "attention.layer_norm_epsilon", c->norm_eps);
}

static void put_attention(const writer *w) {
    int32_t heads[MOST_LAYERS];
    if (strcmp(w->arch, "kimi-linear") == 0) return;    // put_kimi
    if (!w->attends) {
        put_u32(w, "attention.head_count", 0);
        return;
    }
    const mn_layer_config *o = w->attends;
    put_u32(w, "attention.head_count", w->heads.queries);
    for (int i = 0; i < w->c->n_layers; i++) {
        const bool here = w->c->beside || mn_model_layer(w->model, i)->kind == MN_LAYER_attention;
        heads[i] = here ? (int32_t)w->heads.keys : 0;
    }
    const bool next = strcmp(w->arch, "qwen3next") == 0;
    if (next) put_u32(w, "attention.head_count_kv", w->heads.keys);
    else put_each(w, "attention.head_count_kv", heads);
    put_u32(w, "attention.key_length", w->heads.key_width);
    put_u32(w, "attention.value_length", w->heads.value_width);
    if (o->attention_scale != 0.0) put_f32(w, "attention.scale", o->attention_scale);
    if (!o->use_rope) return;
    put_u32(w, "rope.dimension_count",
            (int64_t)(o->partial_rotary_factor * (double)w->heads.key_width));
    put_f32(w, "rope.freq_base", o->rope_theta);
    char key[KEY];
    if (o->rope_type == 1) {
        mn_gguf_text(w->keys, named(key, w, "rope.scaling.type"), "linear");
        put_f32(w, "rope.scaling.factor", o->rope_factor);
    }
}

static void put_mamba(const writer *w) {
    const mn_layer *m = w->mamba;
    if (!m) return;
    const bool second = m->kind == MN_LAYER_mamba2;
    char key[KEY];
    put_u32(w, "ssm.conv_kernel", MN_SIZE(&m->sizes, 'W'));
    put_u32(w, "ssm.inner_size", second ? MN_SIZE(&m->sizes, 'I') : MN_SIZE(&m->sizes, 'V'));
    put_u32(w, "ssm.state_size", MN_SIZE(&m->sizes, 'K'));
    put_u32(w, "ssm.time_step_rank", second ? MN_SIZE(&m->sizes, 'H') : MN_SIZE(&m->sizes, 'R'));
    if (second) put_u32(w, "ssm.group_count", MN_SIZE(&m->sizes, 'G'));
    else if (strcmp(w->arch, "mamba") == 0) {
        mn_gguf_bool(w->keys, named(key, w, "ssm.dt_b_c_rms"), false);
    }
}

/* Granite's multipliers have keys. */
static void put_granite(const writer *w) {
    const mn_block_config *b = &w->c->block;
    char key[KEY];
    if (b->embedding_multiplier != 1.0) put_f32(w, "embedding_scale", b->embedding_multiplier);
    if (b->residual_multiplier != 1.0) put_f32(w, "residual_scale", b->residual_multiplier);
    if (b->logits_multiplier != 1.0) put_f32(w, "logit_scale", 1.0 / b->logits_multiplier);
    if (w->attends && !w->attends->use_rope) {
        mn_gguf_bool(w->keys, named(key, w, "rope.scaling.finetuned"), false);
        put_u32(w, "rope.dimension_count", w->heads.key_width);
    }
}

/* Every so many layers are attention; 0: not so. */
static int64_t interval_of(const writer *w) {
    int64_t every = 0;
    for (int i = 0; i < w->c->n_layers; i++) {
        const bool attends = mn_model_layer(w->model, i)->kind == MN_LAYER_attention;
        if (attends && every == 0) every = i + 1;
        if (attends != (every != 0 && (i + 1) % every == 0)) return 0;
    }
    return every;
}

/* Gated DeltaNet's layers are told as a state space. */
static void put_next(const writer *w) {
    const mn_block_config *b = &w->c->block;
    const mn_layer *g = NULL;
    for (int i = 0; i < w->c->n_layers && !g; i++) {
        if (mn_model_layer(w->model, i)->kind == MN_LAYER_gdn) g = mn_model_layer(w->model, i);
    }
    put_u32(w, "ssm.conv_kernel", MN_SIZE(&g->sizes, 'W'));
    put_u32(w, "ssm.state_size", MN_SIZE(&g->sizes, 'K'));
    put_u32(w, "ssm.group_count", MN_SIZE(&g->sizes, 'H'));
    put_u32(w, "ssm.time_step_rank", MN_SIZE(&g->sizes, 'J'));
    put_u32(w, "ssm.inner_size", MN_SIZE(&g->sizes, 'J') * MN_SIZE(&g->sizes, 'V'));
    put_u32(w, "full_attention_interval", interval_of(w));
    if (b->num_experts <= 1) return;
    put_u32(w, "expert_count", b->num_experts);
    put_u32(w, "expert_used_count", b->num_experts_per_tok);
    put_u32(w, "expert_feed_forward_length", b->moe_intermediate_size);
    put_u32(w, "expert_shared_feed_forward_length", b->shared_expert_intermediate_size);
}

/* Latent attention as one key-value head that all queries share, and KDA. */
static void put_kimi(const writer *w) {
    const mn_block_config *b = &w->c->block;
    const mn_layer *latent = NULL, *kda = NULL;
    int32_t heads[MOST_LAYERS];
    int64_t dense = 0;
    for (int i = 0; i < w->c->n_layers; i++) {
        const mn_layer *layer = mn_model_layer(w->model, i);
        heads[i] = layer->kind == MN_LAYER_mla;
        if (layer->kind == MN_LAYER_mla && !latent) latent = layer;
        if (layer->kind == MN_LAYER_kda && !kda) kda = layer;
        dense += w->c->halves[i] == MN_MLP_DENSE;
    }
    const int64_t R = MN_SIZE(&latent->sizes, 'R'), P = MN_SIZE(&latent->sizes, 'P');
    put_u32(w, "attention.head_count", MN_SIZE(&latent->sizes, 'H'));
    put_each(w, "attention.head_count_kv", heads);
    const int64_t Q = MN_SIZE(&latent->sizes, 'Q');
    if (Q) put_u32(w, "attention.q_lora_rank", Q);
    put_u32(w, "attention.kv_lora_rank", R);
    put_u32(w, "rope.dimension_count", P);
    put_u32(w, "attention.key_length", R + P);
    put_u32(w, "attention.value_length", R);
    put_u32(w, "attention.key_length_mla", MN_SIZE(&latent->sizes, 'K'));
    put_u32(w, "attention.value_length_mla", MN_SIZE(&latent->sizes, 'V'));
    put_u32(w, "ssm.conv_kernel", MN_SIZE(&kda->sizes, 'W'));
    put_u32(w, "kda.head_dim", MN_SIZE(&kda->sizes, 'K'));
    put_u32(w, "leading_dense_block_count", dense);
    put_u32(w, "expert_feed_forward_length", b->moe_intermediate_size);
    put_u32(w, "expert_shared_count", b->shared_expert_intermediate_size > 0);
    put_f32(w, "expert_weights_scale", b->routed_scaling_factor);
    if (b->num_experts <= 1) return;
    char key[KEY];
    put_u32(w, "expert_count", b->num_experts);
    put_u32(w, "expert_used_count", b->num_experts_per_tok);
    put_u32(w, "expert_gating_func", b->router == 1 ? 2 : 1);
    mn_gguf_bool(w->keys, named(key, w, "expert_weights_norm"), b->norm_topk_prob != 0);
}

static void put_rwkv(const writer *w) {
    const mn_layer *l = mn_model_layer(w->model, w->c->n_layers - 1);
    put_u32(w, "wkv.head_size", MN_SIZE(&l->sizes, 'K'));
    put_u32(w, "attention.decay_lora_rank", MN_SIZE(&l->sizes, 'R'));
    put_u32(w, "attention.iclr_lora_rank", MN_SIZE(&l->sizes, 'A'));
    put_u32(w, "attention.value_residual_mix_lora_rank", MN_SIZE(&l->sizes, 'L'));
    put_u32(w, "attention.gate_lora_rank", MN_SIZE(&l->sizes, 'G'));
}

/* ---- what an architecture has not ------------------------------------------------------------ */

static mn_status refuse(const writer *w, const char *what) {
    return mn_fail(MN_ERR_UNSUPPORTED, "llama.cpp's %s has no %s", w->arch, what);
}

static mn_status check_kimi(const writer *w) {
    bool sparse = false, latent = false, kda = false;
    for (int i = 0; i < w->c->n_layers; i++) {
        const mn_layer *layer = mn_model_layer(w->model, i);
        const mn_layer_config *o = &layer->config;
        if (layer->kind == MN_LAYER_mla && o->use_rope) return refuse(w, "positions in attention");
        if (sparse && w->c->halves[i] == MN_MLP_DENSE) return refuse(w, "MLP behind experts");
        if (layer->kind == MN_LAYER_kda && (o->lower_bound != 0.0 || o->full_gates)) {
            return refuse(w, "other decay than KDA's first");
        }
        sparse |= w->c->halves[i] == MN_MLP_SPARSE;
        latent |= layer->kind == MN_LAYER_mla;
        kda |= layer->kind == MN_LAYER_kda;
    }
    if (w->c->block.n_group > 1) return refuse(w, "groups of experts");
    return latent && kda ? MN_OK : refuse(w, "model without both of its layers");
}

static mn_status check(const writer *w) {
    const mn_block_config *b = &w->c->block;
    const mn_layer_config *o = w->attends;
    const bool granite = strcmp(w->arch, "granitehybrid") == 0;
    const bool next = strcmp(w->arch, "qwen3next") == 0;
    const bool kimi = strcmp(w->arch, "kimi-linear") == 0;
    const bool scales = granite || strcmp(w->arch, "falcon-h1") == 0;
    if (o && o->window_size) return refuse(w, "attention over a window");
    if (o && o->use_output_gate && !next) return refuse(w, "output gate of attention");
    if (o && o->attention_scale != 0.0 && !granite) return refuse(w, "scale of attention");
    const bool qwen3 = strcmp(w->arch, "qwen3") == 0;
    if (o && o->o_bias && qwen3) return refuse(w, "bias behind attention");
    if (w->c->logit_softcap != 0.0) return refuse(w, "cap of logits");
    if (w->c->norm_plus_one && !next) return refuse(w, "norm that adds one to its weight");
    if (kimi) return check_kimi(w);
    if (b->num_experts > 1 && !next) return refuse(w, "experts that mneme writes yet");
    for (int i = 0; next && i < w->c->n_layers; i++) {
        if (w->c->halves[i] != MN_MLP_SPARSE) return refuse(w, "MLP without experts");
    }
    if (next && interval_of(w) == 0) return refuse(w, "attention but at every n-th layer");
    if (next && b->num_experts > 1 && !b->norm_topk_prob) return refuse(w, "other expert weights");
    if (b->norms_after || b->residual) return refuse(w, "norm behind its layer");
    if (!scales && (b->embedding_multiplier != 1.0 || b->logits_multiplier != 1.0 ||
                    b->residual_multiplier != 1.0)) {
        return refuse(w, "multipliers of the stream");
    }
    if (strcmp(w->arch, "falcon-h1") == 0 && w->c->tied &&
        b->embedding_multiplier != b->logits_multiplier) {
        return refuse(w, "multiplier of the embeddings that the tied head has not");
    }
    if (w->mamba && w->mamba->kind == MN_LAYER_mamba2) {
        const mn_layer_config *m = &w->mamba->config;
        if (m->norm_before_gate && m->rmsnorm) return refuse(w, "norm before the gate");
        if (m->dt_least > 1e-3 || m->dt_most > 0.0) return refuse(w, "bounds of the step");
        if (m->D_has_hdim) return refuse(w, "skip for each channel");
    }
    return MN_OK;
}

void mn_gguf_remark(char remark[MN_GGUF_REMARK], const char *format, ...) {
    const size_t used = strlen(remark);
    va_list arguments;
    va_start(arguments, format);
    if (used) snprintf(remark + used, MN_GGUF_REMARK - used, "; ");
    vsnprintf(remark + strlen(remark), MN_GGUF_REMARK - strlen(remark), format, arguments);
    va_end(arguments);
}

/* Where llama.cpp is a little otherwise, as for every file of such a model. */
static void tell(const writer *w, char remark[MN_GGUF_REMARK]) {
    if (w->mamba && w->mamba->kind == MN_LAYER_mamba2 && w->mamba->config.dt_least > 0.0) {
        mn_gguf_remark(remark, "llama.cpp does not raise the steps of Mamba-2 to %g",
                       w->mamba->config.dt_least);
    }
    const mn_layer *first = mn_model_layer(w->model, 0);
    const double eps = (double)MN_SIZE(&first->sizes, 'K') * w->c->norm_eps;
    if (first->kind == MN_LAYER_rwkv7 && (eps < 63e-5 || eps > 65e-5)) {
        mn_gguf_remark(remark, "llama.cpp's norm of heads has an eps of 64e-5, not of %g", eps);
    }
    for (int i = 0; i < w->c->n_layers; i++) {
        const mn_layer *layer = mn_model_layer(w->model, i);
        if (layer->kind != MN_LAYER_mla) continue;
        if (layer->config.latent_norm_eps == w->c->norm_eps) continue;
        mn_gguf_remark(remark, "llama.cpp's norm of latents has the eps of the others, not %g",
                       layer->config.latent_norm_eps);
        break;
    }
    if (w->c->mlp == MN_MLP_GELU_ERF) {
        mn_gguf_remark(remark, "llama.cpp's GELU is the approximation by tanh");
    }
}

mn_status mn_gguf_put_keys(mn_gguf_keys *keys, char remark[MN_GGUF_REMARK], const char *arch,
                           const mn_model *model) {
    writer w = { .keys = keys, .arch = arch, .model = model, .c = mn_model_describe(model) };
    char key[KEY];
    look(&w);
    const mn_status st = check(&w);
    if (st != MN_OK) return st;
    tell(&w, remark);
    put_sizes(&w);
    put_attention(&w);
    put_mamba(&w);
    if (w.conv) put_u32(&w, "shortconv.l_cache", MN_SIZE(&w.conv->sizes, 'W'));
    if (strcmp(arch, "gptneox") == 0) {
        mn_gguf_bool(keys, named(key, &w, "use_parallel_residual"),
                     w.c->block.parallel_residual != 0);
    }
    if (strcmp(arch, "granitehybrid") == 0) put_granite(&w);
    if (strcmp(arch, "qwen3next") == 0) put_next(&w);
    if (strcmp(arch, "rwkv7") == 0) put_rwkv(&w);
    if (strcmp(arch, "kimi-linear") == 0) put_kimi(&w);
    return keys->status;
}
