/* lightning.c - lightning: linear attention whose heads forget at fixed rates, as MiniMax-01 has it.
 *
 *   q, k, v = silu(x W_qkv'), head after head      S = e^-s S + k v'      o = S'q
 *   y = (sigmoid(x W_g') rms(o) w) W_o'            rms over all heads together
 *
 * s = slope_rate of a head is read from the file: 2^(-8 (h + 1) / H) times what falls from about 1
 * in the first layer to about 0 in the last. With decay_block the file also holds the decays within
 * blocks of that many tokens, which follow from the slopes and are only handed on. */
#include "base/util.h"
#include "layers/family.h"

/* The norm's, whatever the model's is. */
static const double norm_eps = 1e-6;

static mn_status derive(mn_layer *layer, int64_t context) {
    (void)context;
    const mn_layer_config *c = &layer->config;
    const mn_status st = mn_derive_heads(layer, c->num_heads, 0, c->head_dim, 1.0, 1.0);
    MN_SIZE(&layer->sizes, 'P') = c->decay_block;
    return st;
}

/* -s, (1,1,1,H), which no gradient reaches. */
static mn_tensor *log_decay(mn_forward *f) {
    const mn_tensor *slope = mn_use(f, "slope_rate");
    if (!slope) return NULL;
    mn_tensor *fixed = mn_tape_leaf_of(f->tape, slope->data, slope->dtype, NULL, slope->dtype, 1,
                                       MN_OF(f, 'H'), false);
    return mn_tape_affine(f->tape, fixed, -1.0, 0.0);
}

static mn_tensor *normed(mn_forward *f, mn_tensor *o) {
    if (!o) return NULL;
    mn_run run;
    mn_rms_norm_args *args = mn_run_start(&run, f->tape, MN_OP_rms_norm);
    args->eps = norm_eps;
    mn_run_in(&run, "x", o);
    mn_run_in(&run, "w", mn_use(f, "norm.weight"));
    mn_tensor *y = mn_run_out(&run, "y");
    mn_run_now(&run);
    return y;
}

static mn_tensor *forward(mn_forward *f, mn_tensor *x) {
    mn_tape *tape = f->tape;
    const int64_t H = MN_OF(f, 'H'), K = MN_OF(f, 'K');
    mn_tensor *part[3], *decay = log_decay(f);
    mn_tensor *wide = mn_tape_unary(tape, MN_UNARY_SILU, mn_project(f, x, "qkv_proj.weight", NULL));
    mn_split_heads(f, mn_tape_heads(tape, wide, H), (int64_t[]){ K, K, K }, 3, part);
    if (!part[2] || !decay) return NULL;
    mn_run run;
    mn_additive_args *args = mn_run_start(&run, tape, MN_OP_additive);
    mn_mixer_set_args(&f->layer->mixer, args);
    args->scale = 1.0;
    mn_run_in(&run, "q", part[0]);
    mn_run_in(&run, "k", part[1]);
    mn_run_in(&run, "v", part[2]);
    mn_run_in(&run, "g", decay);
    mn_state_bind(f->state, &run, "state0", "state", "memory", x->shape[0] * H * K * K);
    mn_tensor *o = mn_run_out(&run, "o");
    mn_run_now(&run);
    o = normed(f, mn_tape_flat(tape, o));
    o = mn_tape_gate(tape, MN_UNARY_SIGMOID, mn_project(f, x, "output_gate.weight", NULL), o);
    return mn_project_out(f, o, "out_proj.weight", NULL);
}

const mn_layer_family mn_family_lightning = { derive, forward };
