/* block.c - a block of the network: norm, mixer, residual; norm, MLP, residual.
 *
 *   usual               h = x + mixer(norm x)                 y = h + mlp(norm h)
 *   norms_after         h = x + norm(mixer x)                 y = h + norm(mlp h)
 *   residual "norm"     h = alpha n + beta mixer(n), n = norm x, and likewise y
 *   parallel_residual   y = x + mixer(norm x) + mlp(norm' x)
 *
 * Zamba2's blocks of attention and MLP before some mixers are in shared.c. Attention may stand
 * beside the mixer: what both give is added. A second half that is sparse is in experts.c; one that
 * is absent leaves its block without. */
#include "base/status.h"
#include "layers/family.h"
#include "model/model_internal.h"

mn_tensor *mn_model_norm(mn_model *model, mn_tape *tape, mn_tensor *x, int weight) {
    if (!x) return NULL;
    mn_tensor *w = model->leaves[weight];
    if (model->config.norm_plus_one) w = mn_tape_affine(tape, w, 1.0, 1.0);
    if (model->config.layer_norm) x = mn_centred(tape, x);
    mn_run run;
    mn_rms_norm_args *args = mn_run_start(&run, tape, MN_OP_rms_norm);
    args->eps = model->config.norm_eps;
    mn_run_in(&run, "x", x);
    mn_run_in(&run, "w", w);
    mn_tensor *y = mn_run_out(&run, "y");
    mn_run_now(&run);
    return model->config.norm_bias ? mn_tape_add(tape, y, model->leaves[weight + 1]) : y;
}

/* ---- residuals ------------------------------------------------------------------------------- */

static mn_tensor *times(mn_tape *tape, mn_tensor *x, double by) {
    return by == 1.0 ? x : mn_tape_affine(tape, x, by, 0.0);
}

/* How a half joins what it is added to. */
typedef struct joint {
    double alpha, beta;
    bool plain;    // alpha = beta = 1, nothing but a sum
} joint;

static joint joint_of(const mn_model *model, const mn_block *block, bool second) {
    const mn_block_config *c = &model->config.block;
    const bool attention = mn_mixer_has_cache(&block->layer.mixer);
    joint j = { second ? c->mlp_alpha : attention ? c->attention_alpha : c->mixer_alpha,
                second ? c->mlp_beta : attention ? c->attention_beta : c->mixer_beta, false };
    j.beta *= c->residual_multiplier;
    j.plain = j.alpha == 1.0 && j.beta == 1.0 && !block->norms_after && c->residual == 0 &&
              !c->parallel_residual;
    return j;
}

/* alpha base + beta y, y made of base. */
static mn_tensor *joined(mn_tape *tape, const joint *j, mn_tensor *base, mn_tensor *y) {
    y = times(tape, y, j->beta);
    if (j->alpha == 1.0) return mn_tape_residual(tape, base, y);
    return mn_tape_add(tape, times(tape, base, j->alpha), y);
}

/* ---- first half ------------------------------------------------------------------------------ */

/* What the mixer makes of n, with that of the attention beside it. */
static mn_tensor *mixed(mn_model *model, const mn_block *block, mn_forward *f, mn_tensor *n) {
    f->layer = &block->layer;
    f->params = model->leaves + block->mixer;
    if (block->aside < 0) return mn_layer_forward(f, n);
    mn_tensor *onto = f->onto;
    f->onto = NULL;
    mn_tensor *y = mn_layer_forward(f, n);
    mn_forward g = *f;
    g.layer = &block->beside;
    g.params = model->leaves + block->aside;
    g.variance = NULL;
    y = mn_tape_add(f->tape, y, mn_layer_forward(&g, n));
    return onto ? mn_tape_residual(f->tape, onto, y) : y;
}

mn_tensor *mn_block_mixer(mn_model *model, int i, mn_forward *f, mn_tensor *x) {
    const mn_block *block = &model->blocks[i];
    const mn_block_config *c = &model->config.block;
    const joint j = joint_of(model, block, false);
    mn_tape_scope(f->tape, "model.layers.%d.attn", i);
    if (block->layer.kind == MN_LAYER_none) return x;
    mn_tensor *from = x;
    if (block->turn.out >= 0) from = mn_tape_add(f->tape, x, mn_shared_block(model, i, f, x));
    mn_tensor *n = block->norms_after ? x : mn_model_norm(model, f->tape, from, block->attn_norm);
    f->onto = j.plain ? x : NULL;
    mn_tensor *y = mixed(model, block, f, n);
    if (j.plain) return y;
    if (block->norms_after) y = mn_model_norm(model, f->tape, y, block->attn_norm);
    if (c->parallel_residual) return times(f->tape, y, j.beta);
    return joined(f->tape, &j, c->residual == 1 ? n : x, y);
}

/* ---- second half ----------------------------------------------------------------------------- */

static mn_unary activation(const mn_model_config *c) {
    switch (c->mlp) {
    case MN_MLP_GEGLU:
    case MN_MLP_GELU: return MN_UNARY_GELU;
    case MN_MLP_GELU_ERF: return MN_UNARY_GELU_ERF;
    case MN_MLP_RELU_SQUARE: return MN_UNARY_RELU_SQUARE;
    default: return MN_UNARY_SILU;
    }
}

/* What the last matrix is multiplied with, each product by itself. */
static mn_tensor *inner(mn_model *model, mn_tape *tape, const mn_mlp_at *at, mn_tensor *n) {
    mn_tensor **leaves = model->leaves, *part[2];
    const mn_unary f = activation(&model->config);
    mn_tensor *gate_bias = at->gate_bias < 0 ? NULL : leaves[at->gate_bias];
    mn_tensor *up_bias = at->up_bias < 0 ? NULL : leaves[at->up_bias];
    if (at->gate < 0) {
        return mn_tape_unary(tape, f, mn_tape_linear(tape, n, leaves[at->up], up_bias));
    }
    part[0] = mn_tape_linear(tape, n, leaves[at->gate], gate_bias);
    if (at->up < 0 && part[0]) {
        const int64_t F = part[0]->shape[3] / 2;
        mn_tape_split(tape, part[0], (int64_t[]){ F, F }, 2, part);
    } else {
        part[1] = mn_tape_linear(tape, n, leaves[at->up], up_bias);
    }
    part[0] = times(tape, part[0], model->config.block.mlp_gate_multiplier);
    return mn_tape_gate(tape, f, part[0], part[1]);
}

mn_tensor *mn_mlp_of(mn_model *model, mn_tape *tape, const mn_mlp_at *at, mn_tensor *onto,
                  mn_tensor *n) {
    const mn_block_config *c = &model->config.block;
    mn_tensor **leaves = model->leaves, *down = leaves[at->down];
    const bool alone = at->gate_bias >= 0 || at->up_bias >= 0 || at->down_bias >= 0 ||
                       (at->gate >= 0 && at->up < 0) || c->mlp_gate_multiplier != 1.0 ||
                       c->mlp_down_multiplier != 1.0 || !onto;
    if (alone) {
        mn_tensor *h = times(tape, inner(model, tape, at, n), c->mlp_down_multiplier);
        mn_tensor *bias = at->down_bias < 0 ? NULL : leaves[at->down_bias];
        if (onto) mn_tape_ends_part(tape);
        return mn_tape_linear_onto(tape, onto, h, down, bias);
    }
    const mn_unary f = activation(&model->config);
    if (at->gate < 0) {
        mn_tensor *up = mn_tape_linear(tape, n, leaves[at->up], NULL);
        mn_tape_ends_part(tape);
        return mn_tape_gated_onto(tape, onto, f, up, NULL, down);
    }
    mn_tensor *const both[2] = { leaves[at->gate], leaves[at->up] };
    mn_tensor *h[2];
    mn_tape_linears(tape, n, both, 2, h);
    mn_tape_ends_part(tape);
    return h[1] ? mn_tape_gated_onto(tape, onto, f, h[0], h[1], down) : NULL;
}

mn_tensor *mn_block_mlp(mn_model *model, int i, const mn_forward *f, mn_tensor *x,
                        mn_tensor *input) {
    mn_tape *tape = f->tape;
    const mn_block *block = &model->blocks[i];
    const mn_block_config *c = &model->config.block;
    const bool parallel = c->parallel_residual != 0;
    const joint j = joint_of(model, block, true);
    if (block->mlp_norm < 0) return parallel ? mn_tape_residual(tape, input, x) : x;
    mn_tape_scope(tape, "model.layers.%d.mlp", i);
    mn_tensor *from = parallel ? input : x;
    mn_tensor *n = block->norms_after ? from : mn_model_norm(model, tape, from, block->mlp_norm);
    if (model->config.mlp == MN_MLP_RWKV7) return mn_channel_mix(model, i, f, x, n);
    mn_tensor *y = block->router < 0 ? mn_mlp_of(model, tape, &block->mlp, j.plain ? x : NULL, n)
                                     : mn_mlp_experts(model, block, tape, n);
    if (j.plain) return block->router < 0 ? y : mn_tape_residual(tape, x, y);
    if (block->norms_after) y = mn_model_norm(model, tape, y, block->mlp_norm);
    if (parallel) {
        return mn_tape_residual(tape, input, mn_tape_add(tape, x, times(tape, y, j.beta)));
    }
    return joined(tape, &j, c->residual == 1 ? n : x, y);
}
