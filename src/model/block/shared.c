/* shared.c - blocks of attention and MLP that take turns before mixers, as Zamba2 has them.
 *
 *   h = attention(norm (x, e))    h = (gelu(g) u) W_d', g and u from norm(h) (W_gu + B_i A_i)'
 *   what mixer i reads: x + h W_i'
 *
 * e are the embeddings. shared_blocks of them serve their mixers in turn; A_i, B_i and W_i are
 * of the mixer alone. The first blocks that they serve hold their parameters, the adapters of all
 * turns too. */
#include <stdio.h>

#include "base/status.h"
#include "model/model_internal.h"

/* How many shared blocks come before that of block i, and the first block that has the same. */
static int turns_before(const mn_model *model, int i) {
    int n = 0;
    for (int k = 0; k < i; k++) n += model->config.halves[k] == MN_MLP_SHARED;
    return n;
}

static int owner_of(const mn_model *model, int i) {
    const int which = turns_before(model, i) % (int)model->config.block.shared_blocks;
    int k = 0;
    for (int n = 0;; k++) {
        if (model->config.halves[k] != MN_MLP_SHARED) continue;
        if (n++ == which) return k;
    }
}

/* The parameters that the owner holds for all. */
static mn_status add_own(mn_model *model, int i) {
    const mn_model_config *c = &model->config;
    mn_block *block = &model->blocks[i];
    const int64_t D = c->hidden_size, F = c->intermediate_size;
    char name[MN_PARAM_NAME];
#define NAMED(suffix) (snprintf(name, sizeof name, "model.layers.%d.shared." suffix, i), name)
    mn_status st = mn_model_add_vector(model, &block->turn.norm, NAMED("attn_norm.weight"), 2 * D,
                                       MN_INIT_ONES, MN_GROUP_VECTOR);
    if (st == MN_OK) {
        st = mn_model_add_layer(model, &block->beside, &block->turn.attention, "shared.attn", i);
    }
    if (st == MN_OK) {
        st = mn_model_add_vector(model, &block->turn.mlp_norm, NAMED("mlp_norm.weight"), D,
                                 MN_INIT_ONES, MN_GROUP_VECTOR);
    }
    if (st == MN_OK) {
        st = mn_model_add_matrix(model, &block->turn.gate_up, NAMED("mlp.gate_up_proj.weight"),
                                 2 * F, D, MN_GROUP_MATRIX);
    }
    if (st == MN_OK) {
        st = mn_model_add_matrix(model, &block->turn.down, NAMED("mlp.down_proj.weight"), D, F,
                                 MN_GROUP_MATRIX);
    }
    return st;
#undef NAMED
}

mn_status mn_model_add_shared(mn_model *model, int i) {
    mn_model_config *c = &model->config;
    mn_block *block = &model->blocks[i];
    const int owner = owner_of(model, i);
    const int64_t D = c->hidden_size, F = c->intermediate_size, R = c->block.adapter_rank;
    c->beside[i].input_width = 2 * D;
    mn_status st = mn_layer_create(&block->beside, "attention", &c->beside[i], D, c->context,
                                   c->norm_eps);
    if (st == MN_OK && owner == i) st = add_own(model, i);
    if (st != MN_OK) return st;
    block->turn = model->blocks[owner].turn;
    char name[MN_PARAM_NAME];
    for (int k = 0; k < 2 && st == MN_OK; k++) {
        snprintf(name, sizeof name, "model.layers.%d.shared.mlp.adapter.%d.%d.weight", owner,
                 turns_before(model, i), k);
        st = mn_model_add_matrix(model, &block->turn.adapter[k], name, k ? 2 * F : R, k ? R : D,
                                 MN_GROUP_MATRIX);
    }
    snprintf(name, sizeof name, "model.layers.%d.linear.weight", i);
    return st == MN_OK ? mn_model_add_matrix(model, &block->turn.out, name, D, D, MN_GROUP_MATRIX)
                       : st;
}

/* The norm by weight w, of whatever width. */
static mn_tensor *normed(mn_model *model, mn_tape *tape, mn_tensor *x, int weight) {
    if (!x) return NULL;
    mn_run run;
    mn_rms_norm_args *args = mn_run_start(&run, tape, MN_OP_rms_norm);
    args->eps = model->config.norm_eps;
    mn_run_in(&run, "x", x);
    mn_run_in(&run, "w", model->leaves[weight]);
    mn_tensor *y = mn_run_out(&run, "y");
    mn_run_now(&run);
    return y;
}

mn_tensor *mn_shared_block(mn_model *model, int i, mn_forward *f, mn_tensor *x) {
    const mn_block *block = &model->blocks[i];
    const mn_shared_at *at = &block->turn;
    mn_tape *tape = f->tape;
    mn_tensor **leaves = model->leaves, *part[2] = { x, f->first };
    mn_forward g = *f;
    g.layer = &block->beside;
    g.params = leaves + at->attention;
    g.onto = NULL;
    g.variance = NULL;
    mn_tensor *h = mn_tape_join(tape, part, 2);
    h = mn_layer_forward(&g, normed(model, tape, h, at->norm));
    h = normed(model, tape, h, at->mlp_norm);
    mn_tensor *more = mn_tape_linear(tape, h, leaves[at->adapter[0]], NULL);
    mn_tensor *wide = mn_tape_linear(tape, h, leaves[at->gate_up], NULL);
    wide = mn_tape_add(tape, wide, mn_tape_linear(tape, more, leaves[at->adapter[1]], NULL));
    if (!wide) return NULL;
    const int64_t F = wide->shape[3] / 2;
    mn_tape_split(tape, wide, (int64_t[]){ F, F }, 2, part);
    h = mn_tape_gate(tape, MN_UNARY_GELU_ERF, part[0], part[1]);
    h = mn_tape_linear(tape, h, leaves[at->down], NULL);
    return mn_tape_linear(tape, h, leaves[at->out], NULL);
}
