/* mlp_params.c - the parameters of the second halves of blocks: dense MLPs, experts, routers. */
#include <stdio.h>

#include "model/model_internal.h"

static bool gates(const mn_model_config *c) {
    return c->mlp == MN_MLP_SWIGLU || c->mlp == MN_MLP_GEGLU;
}

static const mn_mlp_at absent = { -1, -1, -1, -1, -1, -1 };

/* An MLP of width F whose names begin with `prefix`. */
static mn_status add_mlp(mn_model *model, mn_mlp_at *at, const char *prefix, int64_t F,
                         bool fused) {
    const mn_model_config *c = &model->config;
    const int64_t D = c->hidden_size;
    char name[MN_PARAM_NAME];
    mn_status st = MN_OK;
    *at = absent;
#define NAMED(suffix) (snprintf(name, sizeof name, "%.70s." suffix, prefix), name)
    if (gates(c) && fused) {
        st = mn_model_add_matrix(model, &at->gate, NAMED("gate_up_proj.weight"), 2 * F, D,
                                 MN_GROUP_MATRIX);
    } else if (gates(c)) {
        st = mn_model_add_matrix(model, &at->gate, NAMED("gate_proj.weight"), F, D,
                                 MN_GROUP_MATRIX);
    }
    if (st == MN_OK && !(gates(c) && fused)) {
        st = mn_model_add_matrix(model, &at->up, NAMED("up_proj.weight"), F, D, MN_GROUP_MATRIX);
    }
    if (st == MN_OK) {
        st = mn_model_add_matrix(model, &at->down, NAMED("down_proj.weight"), D, F,
                                 MN_GROUP_MATRIX);
    }
    if (!c->mlp_bias || st != MN_OK) return st;
#define BIAS(index, suffix, n)                                                                     \
    mn_model_add_vector(model, index, NAMED(suffix), n, MN_INIT_ZEROS, MN_GROUP_VECTOR)
    if (gates(c) && fused) st = BIAS(&at->gate_bias, "gate_up_proj.bias", 2 * F);
    else if (gates(c)) st = BIAS(&at->gate_bias, "gate_proj.bias", F);
    if (st == MN_OK && !(gates(c) && fused)) st = BIAS(&at->up_bias, "up_proj.bias", F);
    return st == MN_OK ? BIAS(&at->down_bias, "down_proj.bias", D) : st;
#undef BIAS
#undef NAMED
}

/* Experts one after the other, each gate (w1), down (w2), up (w3). */
static mn_status add_experts(mn_model *model, mn_block *block, int i) {
    const mn_model_config *c = &model->config;
    const int64_t D = c->hidden_size, F = c->block.moe_intermediate_size;
    mn_status st = MN_OK;
    block->experts = model->n_params;
    block->expert_params = gates(c) ? 3 : 2;
    for (int64_t e = 0; e < c->block.num_experts && st == MN_OK; e++) {
        for (int which = 1; which <= 3 && st == MN_OK; which++) {
            char name[MN_PARAM_NAME];
            int index;
            if (which == 1 && !gates(c)) continue;
            snprintf(name, sizeof name, "model.layers.%d.mlp.experts.%d.w%d.weight", i, (int)e,
                     which);
            st = mn_model_add_matrix(model, &index, name, which == 2 ? D : F, which == 2 ? F : D,
                                     MN_GROUP_MATRIX);
        }
    }
    return st;
}

static mn_status add_sparse(mn_model *model, mn_block *block, int i) {
    const mn_block_config *c = &model->config.block;
    const int64_t D = model->config.hidden_size;
    char name[MN_PARAM_NAME];
#define NAMED(suffix) (snprintf(name, sizeof name, "model.layers.%d.mlp." suffix, i), name)
    mn_status st = mn_model_add_matrix(model, &block->router, NAMED("gate.weight"), c->num_experts,
                                       D, MN_GROUP_MATRIX);
    if (st == MN_OK && c->router_bias) {
        st = mn_model_add_vector(model, &block->router_bias, NAMED("gate.e_score_correction_bias"),
                                 c->num_experts, MN_INIT_ZEROS, MN_GROUP_FROZEN);
    }
    if (st == MN_OK) st = add_experts(model, block, i);
    if (st != MN_OK || c->shared_expert_intermediate_size == 0) return st;
    st = add_mlp(model, &block->shared, NAMED("shared_expert"),
                 c->shared_expert_intermediate_size, c->mlp_fused != 0);
    if (st == MN_OK && c->shared_expert_gate) {
        st = mn_model_add_matrix(model, &block->shared_gate, NAMED("shared_expert_gate.weight"), 1,
                                 D, MN_GROUP_MATRIX);
    }
    return st;
#undef NAMED
}

/* x_k, key and value of a channel mix. */
static mn_status add_channel_mix(mn_model *model, mn_block *block, int i) {
    const int64_t D = model->config.hidden_size, F = model->config.intermediate_size;
    const mn_param_info shift = { .rank = 1, .shape = { D }, .count = D, .layer = i,
                                  .n_layers = model->config.n_layers,
                                  .init = MN_INIT_RWKV_SHIFT_MLP, .group = MN_GROUP_VECTOR };
    char name[MN_PARAM_NAME];
    snprintf(name, sizeof name, "model.layers.%d.mlp.x_k", i);
    mn_status st = mn_model_add(model, &block->mlp_shift, name, &shift);
    snprintf(name, sizeof name, "model.layers.%d.mlp.key.weight", i);
    if (st == MN_OK) st = mn_model_add_matrix(model, &block->mlp.up, name, F, D, MN_GROUP_MATRIX);
    snprintf(name, sizeof name, "model.layers.%d.mlp.value.weight", i);
    if (st != MN_OK) return st;
    return mn_model_add_matrix(model, &block->mlp.down, name, D, F, MN_GROUP_MATRIX);
}

mn_status mn_model_add_half(mn_model *model, mn_block *block, int i) {
    const mn_model_config *c = &model->config;
    char name[MN_PARAM_NAME];
    block->mlp_norm = block->router = block->router_bias = block->shared_gate = -1;
    block->experts = block->mlp_shift = -1;
    block->mlp = block->shared = absent;
    if (c->mlp == MN_MLP_NONE || c->halves[i] >= MN_MLP_ABSENT) return MN_OK;
    snprintf(name, sizeof name, "model.layers.%d.mlp_norm", i);
    const mn_status st = mn_model_add_norm(model, &block->mlp_norm, name);
    if (st != MN_OK) return st;
    if (c->mlp == MN_MLP_RWKV7) return add_channel_mix(model, block, i);
    if (c->halves[i] == MN_MLP_SPARSE) return add_sparse(model, block, i);
    snprintf(name, sizeof name, "model.layers.%d.mlp", i);
    return add_mlp(model, &block->mlp, name, c->intermediate_size, c->block.mlp_fused != 0);
}
