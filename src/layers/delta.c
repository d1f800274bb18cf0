/* delta.c - delta, gdn, kda and gdn2: a point memory corrected by the delta rule.
 *
 *   q, k, v = conv(x W')      q, k to unit length per head      beta = sigmoid(x W_b')
 *   log decay g: none; -e^A softplus(x W_a' + dt) per token; the same from two projections per
 *   channel, or bound sigmoid(e^A (..)) where lower_bound is set
 *   o = delta rule(q / sqrt K, k, v, beta, g)      y = (rms(o) act(x W_g')) W_o'
 *
 * projections: qkv has one matrix for q, k and v side by side, qkvz one for those and the gate,
 * head after head of the keys with the values that it serves, and one for beta and a likewise;
 * both have one convolution over q, k and v side by side, and always gates.
 *
 * gdn2 has an erase gate per key channel and a write gate per value channel instead of beta. */
#include <math.h>

#include "base/util.h"
#include "layers/family.h"

/* Published models of gdn have keys of 3/4 of the width and values of twice that, together about
 * 6 D^2 parameters; the others are as wide as the model. */
static int64_t default_head_dim(const mn_layer *layer) {
    const mn_layer_config *c = &layer->config;
    if (layer->kind != MN_LAYER_gdn || c->head_dim != 0) return c->head_dim;
    const int64_t H = c->num_heads ? c->num_heads : mn_max(layer->width / 64, 1);
    return mn_max(3 * layer->width / (4 * H), 1);
}

static mn_status derive(mn_layer *layer, int64_t context) {
    (void)context;
    const mn_layer_config *c = &layer->config;
    const int64_t H = c->num_heads == 0 && c->head_dim == 0 && layer->kind == MN_LAYER_gdn
                          ? mn_max(layer->width / 64, 1) : c->num_heads;
    mn_status st = mn_derive_heads(layer, H, c->num_v_heads, default_head_dim(layer),
                                   layer->kind == MN_LAYER_delta ? c->expand_k : 1.0, c->expand_v);
    MN_SIZE(&layer->sizes, 'W') = c->conv_size;
    if (st == MN_OK) {
        st = mn_layer_require(layer, !c->use_short_conv || c->conv_size >= 1, "conv_size",
                              "must be at least 1");
    }
    mn_layer_sizes *s = &layer->sizes;
    if (c->v_head_dim) MN_SIZE(s, 'V') = c->v_head_dim;
    if (st == MN_OK) {
        st = mn_layer_require(layer, MN_SIZE(s, 'V') <= 65536 && MN_SIZE(s, 'K') <= 65536 &&
                              MN_SIZE(s, 'J') <= 65536, "head_dim", "is far too much");
    }
    if (st != MN_OK) return st;
    const int64_t keys = MN_SIZE(s, 'H') * MN_SIZE(s, 'K');
    const int64_t values = MN_SIZE(s, 'J') * MN_SIZE(s, 'V');
    MN_SIZE(s, 'C') = 2 * keys + values;
    MN_SIZE(s, 'Z') = 2 * keys + 2 * values;
    if (c->projections) {
        st = mn_layer_require(layer, c->use_short_conv && c->use_gate, "projections",
                              "that are shared go with use_short_conv and use_gate");
    }
    if (st == MN_OK) {
        st = mn_layer_require(layer, c->lower_bound >= -5.0 && c->lower_bound <= 0.0,
                              "lower_bound", "must lie in [-5, 0]");
    }
    return st;
}

/* -e^A softplus(f + dt_bias), or bound sigmoid(e^A (f + dt_bias)); A per head. */
static mn_tensor *log_decay(mn_forward *f, mn_tensor *raw, int64_t rows, int64_t cols) {
    mn_tape *tape = f->tape;
    mn_tensor *a = mn_use_as(f, "A_log", rows, cols);
    mn_tensor *bias = mn_use_as(f, "dt_bias", raw ? raw->shape[2] : 1, raw ? raw->shape[3] : 1);
    const double bound = f->layer->config.lower_bound;
    if (bound == 0.0) return mn_tape_decay(tape, raw, bias, a);
    raw = mn_tape_add(tape, raw, bias);
    raw = mn_tape_multiply(tape, raw, mn_tape_unary(tape, MN_UNARY_EXP, a));
    return mn_tape_affine(tape, mn_tape_unary(tape, MN_UNARY_SIGMOID, raw), bound, 0.0);
}

static mn_tensor *decay_of(mn_forward *f, mn_tensor *x) {
    const int64_t J = MN_OF(f, 'J');
    if (f->layer->kind == MN_LAYER_delta) return NULL;
    if (f->layer->kind == MN_LAYER_gdn) {
        return log_decay(f, mn_project(f, x, "a_proj.weight", NULL), 1, J);
    }
    const bool full = f->layer->kind == MN_LAYER_kda && f->layer->config.full_gates;
    mn_tensor *raw = full ? mn_project(f, x, "f_proj.weight", NULL)
                          : mn_project(f, mn_project(f, x, "f_proj.0.weight", NULL),
                                       "f_proj.1.weight", NULL);
    return log_decay(f, mn_tape_heads(f->tape, raw, J), J, 1);
}

static mn_tensor *opened(mn_forward *f, mn_tensor *raw) {
    mn_tensor *gate = mn_tape_unary(f->tape, MN_UNARY_SIGMOID, raw);
    return f->layer->config.allow_neg_eigval ? mn_tape_affine(f->tape, gate, 2.0, 0.0) : gate;
}

static mn_tensor *gate_of(mn_forward *f, mn_tensor *x, const char *weight) {
    return opened(f, mn_project(f, x, weight, NULL));
}

/* Queries or keys of `delta` follow its options, those of the others are SiLU and unit length. */
static mn_tensor *key_of(mn_forward *f, mn_tensor *x, const char *weight, const char *conv,
                         const char *piece) {
    const mn_layer_config *c = &f->layer->config;
    mn_tape *tape = f->tape;
    mn_tensor *k = mn_project(f, x, weight, NULL);
    const bool plain = f->layer->kind == MN_LAYER_delta && c->qk_activation != 0;
    const bool unit = f->layer->kind != MN_LAYER_delta || c->qk_norm == 0;
    if (c->use_short_conv && unit && !plain) {
        return mn_unit_conv(f, k, conv, MN_OF(f, 'H'), 1, 1e-6, piece);
    }
    if (c->use_short_conv) k = mn_short_conv(f, k, conv, NULL, !plain, piece);
    else if (!plain) k = mn_tape_unary(tape, MN_UNARY_SILU, k);
    if (plain && c->qk_activation == 1) k = mn_tape_unary(tape, MN_UNARY_RELU, k);
    if (plain && c->qk_activation == 2) k = mn_tape_unary(tape, MN_UNARY_ELU_ONE, k);
    k = mn_tape_heads(tape, k, MN_OF(f, 'H'));
    if (unit) return mn_unit(f, k, 1, 1e-6);
    return mn_over_sum(f, k, 0.0);
}

typedef struct inputs {
    mn_tensor *q, *k, *v, *g;
    mn_tensor *beta, *z;    // NULL: by projections of their own
} inputs;

static mn_tensor *remember(mn_forward *f, mn_tensor *x, const inputs *in) {
    const bool two_gates = f->layer->kind == MN_LAYER_gdn2;
    const int64_t J = MN_OF(f, 'J'), K = MN_OF(f, 'K');
    mn_run run;
    void *args = mn_run_start(&run, f->tape, two_gates ? MN_OP_gdn2 : MN_OP_delta_net);
    mn_mixer_set_args(&f->layer->mixer, args);
    if (two_gates) ((mn_gdn2_args *)args)->scale = pow((double)K, -0.5);
    else ((mn_delta_net_args *)args)->scale = pow((double)K, -0.5);
    mn_run_in(&run, "q", in->q);
    mn_run_in(&run, "k", in->k);
    mn_run_in(&run, "v", in->v);
    if (in->g) mn_run_in(&run, "g", in->g);
    if (two_gates) {
        mn_run_in(&run, "erase", mn_tape_heads(f->tape, gate_of(f, x, "b_proj.weight"), J));
        mn_run_in(&run, "write", mn_tape_heads(f->tape, gate_of(f, x, "w_proj.weight"), J));
    } else {
        const int64_t every_token[] = { x->shape[0], x->shape[1], 1, J };
        mn_tensor *beta = in->beta;
        if (!beta) beta = mn_use(f, "b_proj.weight") ? gate_of(f, x, "b_proj.weight")
                                                     : mn_filled(f, every_token, 1.0);
        mn_run_in(&run, "beta", beta);
    }
    mn_state_bind(f->state, &run, "state0", "state", "memory",
                  x->shape[0] * J * K * MN_OF(f, 'V'));
    mn_tensor *o = mn_run_out(&run, "o");
    mn_run_now(&run);
    return o;
}

static mn_tensor *output_gate(mn_forward *f, mn_tensor *x) {
    mn_tensor *g = NULL;
    if (mn_use(f, "g_proj.weight")) g = mn_project(f, x, "g_proj.weight", NULL);
    if (mn_use(f, "g_proj.1.weight")) {
        g = mn_project(f, mn_project(f, x, "g_proj.0.weight", NULL), "g_proj.1.weight",
                       "g_proj.1.bias");
    }
    return g ? mn_tape_heads(f->tape, g, MN_OF(f, 'J')) : NULL;
}

/* A part of a split as numbers that lie side by side, without heads. */
static mn_tensor *gathered(mn_forward *f, mn_tensor *part) {
    return mn_tape_flat(f->tape, mn_tape_join(f->tape, &part, 1));
}

/* q, k and v side by side before their convolution, z and the raw a and beta. */
static void project_shared(mn_forward *f, mn_tensor *x, mn_tensor **qkv, mn_tensor **z,
                           mn_tensor **a, mn_tensor **b) {
    mn_tape *tape = f->tape;
    if (f->layer->config.projections == 1) {
        *qkv = mn_project(f, x, "in_proj_qkv.weight", NULL);
        *z = mn_project(f, x, "in_proj_z.weight", NULL);
        *a = mn_project(f, x, "in_proj_a.weight", NULL);
        *b = mn_project(f, x, "in_proj_b.weight", NULL);
        return;
    }
    const int64_t H = MN_OF(f, 'H'), K = MN_OF(f, 'K'), n = MN_OF(f, 'J') / H;
    const int64_t V = n * MN_OF(f, 'V');
    mn_tensor *part[4], *two[2];
    mn_tensor *wide = mn_tape_heads(tape, mn_project(f, x, "in_proj_qkvz.weight", NULL), H);
    mn_split_heads(f, wide, (int64_t[]){ K, K, V, V }, 4, part);
    for (int i = 0; i < 4; i++) part[i] = mn_tape_flat(tape, part[i]);
    *qkv = mn_tape_join(tape, part, 3);
    *z = part[3];
    mn_tensor *narrow = mn_tape_heads(tape, mn_project(f, x, "in_proj_ba.weight", NULL), H);
    mn_split_heads(f, narrow, (int64_t[]){ n, n }, 2, two);
    *b = mn_tape_flat(tape, two[0]);
    *a = mn_tape_flat(tape, two[1]);
}

static inputs shared_inputs(mn_forward *f, mn_tensor *x) {
    mn_tape *tape = f->tape;
    const int64_t H = MN_OF(f, 'H'), J = MN_OF(f, 'J'), HK = H * MN_OF(f, 'K');
    mn_tensor *qkv = NULL, *z = NULL, *a = NULL, *b = NULL, *part[3];
    project_shared(f, x, &qkv, &z, &a, &b);
    qkv = mn_short_conv(f, qkv, "conv1d.weight", NULL, 1, "qkv_conv");
    mn_tape_split(tape, qkv, (int64_t[]){ HK, HK, J * MN_OF(f, 'V') }, 3, part);
    inputs in = { .beta = opened(f, b), .z = mn_tape_heads(tape, z, J) };
    in.g = log_decay(f, a, 1, J);
    in.q = mn_unit(f, mn_tape_heads(tape, gathered(f, part[0]), H), 1, 1e-6);
    in.k = mn_unit(f, mn_tape_heads(tape, gathered(f, part[1]), H), 1, 1e-6);
    in.v = mn_tape_heads(tape, gathered(f, part[2]), J);
    in.q = mn_ccq_query(f, x, in.q, in.k);
    return in;
}

static mn_tensor *forward_shared(mn_forward *f, mn_tensor *x) {
    const inputs in = shared_inputs(f, x);
    mn_tensor *o = mn_norm_gate(f, remember(f, x, &in), in.z, "o_norm.weight", 0);
    return mn_project_out(f, mn_tape_flat(f->tape, o), "out_proj.weight", NULL);
}

static mn_tensor *forward(mn_forward *f, mn_tensor *x) {
    if (f->layer->config.projections) return forward_shared(f, x);
    mn_tape *tape = f->tape;
    const int64_t J = MN_OF(f, 'J');
    static const char *const first[] = { "q_proj.weight", "k_proj.weight", "v_proj.weight",
                                         "a_proj.weight", "b_proj.weight" };
    if (f->layer->config.use_short_conv) mn_project_ahead(f, x, first, MN_COUNTOF(first));
    inputs in = { .k = key_of(f, x, "k_proj.weight", "k_conv1d.weight", "k_conv") };
    in.q = key_of(f, x, "q_proj.weight", "q_conv1d.weight", "q_conv");
    in.q = mn_ccq_query(f, x, in.q, in.k);
    in.v = mn_tape_heads(tape, mn_project_conv(f, x, "v_proj.weight", "v_conv1d.weight",
                                               MN_UNARY_SILU, "v_conv"), J);
    in.g = decay_of(f, x);
    mn_tensor *o = remember(f, x, &in);
    const bool sigmoid_gate = f->layer->kind == MN_LAYER_kda || f->layer->kind == MN_LAYER_gdn2;
    o = mn_norm_gate(f, o, output_gate(f, x), "o_norm.weight", sigmoid_gate);
    return mn_project_out(f, mn_tape_flat(tape, o), "o_proj.weight", NULL);
}

const mn_layer_family mn_family_delta = { derive, forward };
