/* forward.c - from tokens to the residual stream, logits and losses. */
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "base/status.h"
#include "layers/family.h"
#include "model/model_internal.h"

/* Passes in bf16 read weights in bf16: matrices, norms and biases, which multiply activations or
 * are added to them. What says how fast a memory fades, such as a logarithm or the bias of a step,
 * stays float32: a few numbers, whose roundings would add up over all tokens. */
static bool in_bf16(const mn_model_param *p) {
    const bool plain = p->info.init == MN_INIT_ZEROS || p->info.init == MN_INIT_ONES;
    if (p->info.group == MN_GROUP_STATE || p->info.init == MN_INIT_SLOPES) return false;
    return p->shadow && (p->info.group != MN_GROUP_VECTOR || plain);
}

/* The tape computes where the parameters are, and in a type that they have. */
static mn_status check_place(const mn_model *model, const mn_tape *tape) {
    const mn_device *device = mn_tape_context(tape)->device;
    if (!device != !model->device) {
        return mn_fail(MN_ERR_ARGUMENT, "the parameters are on the %s and the pass is on the %s",
                       model->device ? "GPU" : "CPU", device ? "GPU" : "CPU");
    }
    if (model->config.quant_bits && mn_tape_records(tape)) {
        return mn_fail(MN_ERR_UNSUPPORTED, "no gradients go through weights of %d bits; take the "
                       "model that was quantised", model->config.quant_bits);
    }
    if (mn_tape_dtype(tape) != MN_BF16 || model->shadows) return MN_OK;
    return mn_fail(MN_ERR_ARGUMENT, "a pass in bf16 over parameters that were placed for f32");
}

void mn_model_bind(mn_model *model, mn_tape *tape, bool add_gradients) {
    const bool records = mn_tape_records(tape), bf16 = mn_tape_dtype(tape) == MN_BF16;
    const mn_status st = check_place(model, tape);
    if (st != MN_OK) mn_tape_fail(tape, st);
    model->tape = tape;
    for (int i = 0; i < model->n_params; i++) {
        const mn_model_param *p = &model->params[i];
        if (p->quant) {
            model->leaves[i] = mn_tape_leaf_quant(tape, p->quant);
            continue;
        }
        const int64_t rows = p->info.rank == 1 ? 1 : p->info.shape[0];
        const bool shadow = bf16 && in_bf16(p);
        void *grad = records && p->rate != 0.0 ? p->grad : NULL;
        model->leaves[i] = mn_tape_leaf_of(tape, shadow ? p->shadow : p->value,
                                           shadow ? MN_BF16 : model->dtype, grad, model->dtype,
                                           rows, p->info.count / rows, add_gradients);
    }
}

bool mn_recompute_parse(mn_recompute *out, const char *name) {
    static const char *const names[] = {
#define RECOMPUTE(id, name, about) [MN_RECOMPUTE_##id] = name,
#include "model/recomputes.def"
#undef RECOMPUTE
    };
    for (int i = 0; i < MN_RECOMPUTE_COUNT; i++) {
        if (strcmp(names[i], name) != 0) continue;
        *out = (mn_recompute)i;
        return true;
    }
    return false;
}

/* A block as a part of which only the result is kept. */
typedef struct block_job {
    mn_model *model;
    int i;
    mn_forward f;
} block_job;

static mn_tensor *run_block(mn_tape *tape, mn_tensor *x, const void *job) {
    const block_job *b = job;
    mn_forward f = b->f;
    f.tape = tape;
    return mn_block_mlp(b->model, b->i, &f, mn_block_mixer(b->model, b->i, &f, x), x);
}

static mn_tensor *run_mlp(mn_tape *tape, mn_tensor *x, const void *job) {
    const block_job *b = job;
    mn_forward f = b->f;
    f.tape = tape;
    return mn_block_mlp(b->model, b->i, &f, x, NULL);
}

/* Whether a layer takes or gives what others share (mn_shared). */
static bool block_shares(const mn_model *model, int i) {
    const mn_layer_kind kind = model->blocks[i].layer.kind;
    return kind == MN_LAYER_rwkv7 || kind == MN_LAYER_hgrn2;
}

/* A whole block, or its MLP, as such a part; light results of a mixer beside are not kept. Nothing
 * but a block's result is kept where nothing goes back. */
static mn_tensor *run_again(mn_model *model, int i, mn_forward *f, mn_tensor *x,
                            mn_recompute what) {
    const block_job job = { model, i, *f };
    /* values that later layers take would be made twice, and get no gradient */
    const bool shares = block_shares(model, i);
    const bool whole = what == MN_RECOMPUTE_LAYER || !mn_tape_records(f->tape);
    if (whole && !shares) {
        return mn_tape_checkpoint(f->tape, x, run_block, &job, sizeof job);
    }
    mn_tensor *input = x;
    mn_tape_recompute(f->tape, true);
    x = mn_block_mixer(model, i, f, x);
    mn_tape_recompute(f->tape, false);
    if (model->blocks[i].mlp_norm < 0 || model->config.block.parallel_residual) {
        return mn_block_mlp(model, i, f, x, input);
    }
    return mn_tape_checkpoint(f->tape, x, run_mlp, &job, sizeof job);
}

/* Whether block i, which reads x, tells what its mixer adds. */
static bool watch(mn_model_branches *to, int i, mn_forward *f, mn_tensor *x) {
    if (!to || !to->of[i]) return false;
    to->read[i] = x;
    to->added[i] = NULL;
    f->branch = &to->added[i];
    return true;
}

/* Blocks [0, n) from tokens, and with `last` the mixer of block n as well. */
static mn_tensor *trunk(mn_model *model, mn_tape *tape, const mn_model_input *in, int n,
                        mn_forward *last) {
    mn_tensor *bounds[MN_MAX_LAYERS];
    mn_model_bind(model, tape, in->add_gradients);
    mn_model_bounds(model, tape, bounds);
    if (in->starts) mn_tape_pack(tape, in->starts, in->n_sequences);
    mn_tape_scope(tape, "model.embeddings");
    mn_tensor *x = mn_model_embed(model, tape, in);
    if (model->config.norm_first) x = mn_model_norm(model, tape, x, model->blocks[0].pre_norm);
    /* a copy: the residual of the first block shares its gradient with what it is added to */
    mn_tensor *first = model->config.block.shared_blocks ? mn_tape_affine(tape, x, 1.0, 0.0) : x;
    int belief = 0;
    mn_shared shared = { 0 };
    /* what a block leaves behind beside its result it would leave twice */
    const bool shares = model->config.block.shared_blocks > 0;    // every block reads the first
    const bool once = !mn_tape_records(tape) || (!in->state && !in->variance && !in->tap);
    for (int i = 0; i < n + (last != NULL) && x; i++) {
        if (in->ready) mn_tape_notify(tape, in->ready, in->ready_context, i);
        if (in->enter && !mn_tape_plans(tape)) in->enter(in->ready_context, i);
        mn_forward one = { .tape = tape, .position = in->state ? in->state->position : 0 };
        mn_forward *f = i == n ? last : &one;
        f->tape = tape;
        f->state = in->state ? &in->state->layers[i] : NULL;
        f->variance = NULL;
        f->tap = in->tap;
        f->first = first;
        f->shared = &shared;
        f->bound = bounds[i];
        f->index = i;
        if (in->variance && mn_layer_has_variance(&model->blocks[i].layer)) {
            f->variance = in->variance + belief++ * in->B * in->T;
        }
        const bool light = in->recompute == MN_RECOMPUTE_LIGHT && once;
        const bool told = watch(in->branches, i, f, x);
        if (in->recompute > MN_RECOMPUTE_LIGHT && once && i < n && !shares && !told) {
            x = run_again(model, i, f, x, in->recompute);
            continue;
        }
        mn_tensor *input = x;
        mn_tape_recompute(tape, light);
        x = mn_block_mixer(model, i, f, x);
        mn_tape_recompute(tape, light);
        if (i < n) x = mn_block_mlp(model, i, f, x, input);
    }
    mn_tape_recompute(tape, false);
    if (in->state && mn_tape_status(tape) == MN_OK) in->state->position += in->T;
    return x;
}

void mn_model_run_branches(mn_model *model, mn_tape *tape, mn_model_branches *branches,
                           bool add_gradients) {
    mn_tensor *bounds[MN_MAX_LAYERS];
    mn_shared shared = { 0 };
    mn_model_bind(model, tape, add_gradients);
    mn_model_bounds(model, tape, bounds);
    for (int i = 0; i < model->config.n_layers && mn_tape_status(tape) == MN_OK; i++) {
        if (!branches->of[i]) continue;
        mn_tensor *x = branches->read[i];
        mn_forward f = { .tape = tape, .shared = &shared, .bound = bounds[i], .index = i };
        watch(branches, i, &f, x);
        mn_block_mixer(model, i, &f, x);
        if (branches->added[i] || mn_tape_status(tape) != MN_OK) continue;
        mn_tape_fail(tape, mn_fail(MN_ERR_UNSUPPORTED, "layer %d, %s, does not end with a "
                                   "projection onto the stream", i, model->config.names[i]));
    }
}

/* The norm behind the last block. What multiplies the logits multiplies the stream as well. */
static mn_tensor *final_norm(mn_model *model, mn_tape *tape, mn_tensor *x) {
    const double by = model->config.block.logits_multiplier;
    mn_tape_scope(tape, "model.norm");
    x = mn_model_norm(model, tape, x, model->norm);
    return by == 1.0 ? x : mn_tape_affine(tape, x, by, 0.0);
}

mn_tensor *mn_model_hidden(mn_model *model, mn_tape *tape, const mn_model_input *in) {
    mn_tensor *x = trunk(model, tape, in, model->config.n_layers, NULL);
    x = mn_model_decode(model, tape, x, in->state != NULL);
    return final_norm(model, tape, x);
}

mn_tensor *mn_model_logits(mn_model *model, mn_tape *tape, mn_tensor *hidden) {
    mn_tape_scope(tape, "lm_head");
    mn_tensor *logits = mn_tape_linear(tape, hidden, model->leaves[model->head], NULL);
    const double cap = model->config.logit_softcap;
    if (cap == 0.0) return logits;
    logits = mn_tape_unary(tape, MN_UNARY_TANH, mn_tape_affine(tape, logits, 1.0 / cap, 0.0));
    return mn_tape_affine(tape, logits, cap, 0.0);
}

void mn_model_loss(mn_model *model, mn_tape *tape, mn_tensor *hidden, const int32_t *targets,
                   mn_loss_options how, double *loss, int64_t *counted) {
    mn_tape_scope(tape, "lm_head");
    how.softcap = model->config.logit_softcap;
    mn_tape_loss(tape, hidden, model->leaves[model->head], targets, &how, loss, counted);
}

/* ---- KLA+ ------------------------------------------------------------------------------------ */

/* mean + sqrt(variance) e, e drawn for this (seed, step, sample). */
static mn_tensor *sample_of(mn_tape *tape, mn_tensor *mean, mn_tensor *deviation, uint64_t seed,
                            uint64_t stream) {
    if (!mean || !deviation) return NULL;
    mn_tensor *noise = mn_tape_normal(tape, mean->shape, seed, stream);
    return mn_tape_add(tape, mean, mn_tape_multiply(tape, deviation, noise));
}

enum { MOST_SAMPLES = 64 };

void mn_model_marginal_loss(mn_model *model, mn_tape *tape, const mn_model_input *in,
                            const int32_t *targets, mn_loss_options how, int samples,
                            uint64_t seed, uint64_t step, double *loss, int64_t *counted) {
    *loss = 0.0;
    *counted = 0;
    if (samples < 1 || samples > MOST_SAMPLES) {
        mn_tape_fail(tape, mn_fail(MN_ERR_ARGUMENT, "mc_samples is %d; take 1 to %d", samples,
                                   MOST_SAMPLES));
        return;
    }
    const int last = model->config.n_layers - 1;
    if (model->config.block.parallel_residual) {
        mn_tape_fail(tape, mn_fail(MN_ERR_UNSUPPORTED, "mc_samples and parallel_residual do not go "
                                   "together"));
        return;
    }
    mn_forward f = { .position = in->state ? in->state->position : 0,
                     .wants_output_variance = true };
    mn_tensor *mean = trunk(model, tape, in, last, &f);
    if (mean && !f.output_variance) {
        mn_tape_fail(tape, mn_fail(MN_ERR_ARGUMENT, "mc_samples needs a last layer that knows the "
                                   "variance of its output, such as kla; it is %s",
                                   model->config.names[last]));
    }
    mn_tensor *deviation = mn_tape_unary(tape, MN_UNARY_SQRT,
                                         mn_tape_at_least(tape, f.output_variance, 1e-12));
    mn_tensor *hidden[MOST_SAMPLES];
    for (int s = 0; s < samples; s++) {
        const uint64_t stream = step * MOST_SAMPLES + (uint64_t)s;
        mn_tensor *x = sample_of(tape, mean, deviation, seed, stream);
        x = mn_block_mlp(model, last, &f, x, NULL);
        x = mn_model_decode(model, tape, x, in->state != NULL);
        hidden[s] = final_norm(model, tape, x);
    }
    mn_tape_scope(tape, "lm_head");
    how.softcap = model->config.logit_softcap;
    if (mn_tape_status(tape) != MN_OK) return;
    mn_tape_mixture_loss(tape, hidden, samples, model->leaves[model->head], targets, &how, loss,
                         counted);
}
