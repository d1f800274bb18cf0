/* deltaproduct.c - Gated DeltaProduct: n corrections by the delta rule a token, after one decay.
 *
 *   q, k, v = silu(conv(x W')), k and v of n H heads, step after step      q, k to unit length
 *   beta = sigmoid(x W_b'), twice that with allow_neg_eigval      g = -e^A softplus(x W_a' + dt)
 *   S = e^g S, then n times S = S + beta k (v - S'k)'      o = S'q / sqrt K
 *   y = (rms(o) silu(x W_g')) W_o'
 *
 * With beta in (0,2) a correction may reflect, and two of them turn. */
#include <math.h>

#include "layers/family.h"

static mn_status derive(mn_layer *layer, int64_t context) {
    (void)context;
    const mn_layer_config *c = &layer->config;
    mn_status st = mn_derive_heads(layer, c->num_heads, 0, c->head_dim, 1.0, c->expand_v);
    MN_SIZE(&layer->sizes, 'W') = c->conv_size;
    MN_SIZE(&layer->sizes, 'N') = c->num_householder;
    if (st == MN_OK) {
        st = mn_layer_require(layer, !c->use_short_conv || c->conv_size >= 1, "conv_size",
                              "must be at least 1");
    }
    if (st == MN_OK) {
        st = mn_layer_require(layer, !layer->ccq, "ccq",
                              "has no keys of a token to go by: there are several");
    }
    if (st == MN_OK) {
        st = mn_layer_require(layer, c->num_householder >= 1 && c->num_householder <= 64,
                              "num_householder", "must lie between 1 and 64");
    }
    return st;
}

static mn_tensor *remember(mn_forward *f, mn_tensor *x, mn_tensor *q, mn_tensor *k, mn_tensor *v) {
    mn_tape *tape = f->tape;
    mn_tensor *beta = mn_tape_unary(tape, MN_UNARY_SIGMOID,
                                    mn_project(f, x, "b_proj.weight", NULL));
    if (f->layer->config.allow_neg_eigval) beta = mn_tape_affine(tape, beta, 2.0, 0.0);
    mn_tensor *g = NULL;
    if (f->layer->config.use_forget_gate) {
        const int64_t H = MN_OF(f, 'H');
        g = mn_tape_decay(tape, mn_project(f, x, "a_proj.weight", NULL),
                          mn_use_as(f, "dt_bias", 1, H), mn_use_as(f, "A_log", 1, H));
    }
    if (!q || !k || !v || !beta) return NULL;
    mn_run run;
    mn_delta_product_args *args = mn_run_start(&run, tape, MN_OP_delta_product);
    args->scale = pow((double)q->shape[3], -0.5);
    mn_run_in(&run, "q", q);
    mn_run_in(&run, "k", k);
    mn_run_in(&run, "v", v);
    mn_run_in(&run, "beta", beta);
    if (g) mn_run_in(&run, "g", g);
    mn_state_bind(f->state, &run, "state0", "state", "memory",
                  q->shape[0] * q->shape[2] * q->shape[3] * v->shape[3]);
    mn_tensor *o = mn_run_out(&run, "o");
    mn_run_now(&run);
    return o;
}

static mn_tensor *forward(mn_forward *f, mn_tensor *x) {
    mn_tape *tape = f->tape;
    const int64_t H = MN_OF(f, 'H'), NH = MN_OF(f, 'N') * H;
    mn_tensor *q = mn_project_conv(f, x, "q_proj.weight", "q_conv1d.weight", MN_UNARY_SILU,
                                   "q_conv");
    mn_tensor *k = mn_project_conv(f, x, "k_proj.weight", "k_conv1d.weight", MN_UNARY_SILU,
                                   "k_conv");
    mn_tensor *v = mn_project_conv(f, x, "v_proj.weight", "v_conv1d.weight", MN_UNARY_SILU,
                                   "v_conv");
    q = mn_unit(f, mn_tape_heads(tape, q, H), 1, 1e-6);
    k = mn_unit(f, mn_tape_heads(tape, k, NH), 1, 1e-6);
    mn_tensor *o = remember(f, x, q, k, mn_tape_heads(tape, v, NH));
    mn_tensor *gate = NULL;
    if (mn_use(f, "g_proj.weight")) {
        gate = mn_tape_heads(tape, mn_project(f, x, "g_proj.weight", NULL), H);
    }
    o = mn_norm_gate(f, o, gate, "o_norm.weight", 0);
    return mn_project_out(f, mn_tape_flat(tape, o), "o_proj.weight", NULL);
}

const mn_layer_family mn_family_deltaproduct = { derive, forward };
