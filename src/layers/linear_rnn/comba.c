/* comba.c - Comba: a delta rule in closed loop, whose state is read before it decays.
 *
 *   q, k, v = conv(x W')      p = sigmoid(decay_h) k      q = q - D_h p      q, k, p to unit length
 *   beta = sigmoid(x W_b')      g = -e^A softplus(x W_a' + dt), per value head
 *   S = e^g S + beta k (v - S'p)'      o = S'q / sqrt K      y = (rms(o) sigmoid(x W_g')) W_o'
 *
 * S'p is of the state before its decay, so this is dplr with a = p and b = -beta k. Value heads J
 * share key heads H in turns. correction_factor says where D starts in other software; here it
 * starts at 1, and is read from checkpoints. */
#include <math.h>

#include "layers/family.h"

static mn_status derive(mn_layer *layer, int64_t context) {
    (void)context;
    const mn_layer_config *c = &layer->config;
    mn_status st = mn_derive_heads(layer, c->num_heads, c->num_v_heads, c->head_dim, 1.0,
                                   c->expand_v);
    MN_SIZE(&layer->sizes, 'W') = c->conv_size;
    if (st == MN_OK) {
        st = mn_layer_require(layer, !c->use_short_conv || c->conv_size >= 1, "conv_size",
                              "must be at least 1");
    }
    return st;
}

static mn_tensor *remember(mn_forward *f, mn_tensor *x, mn_tensor *q, mn_tensor *k, mn_tensor *p,
                           mn_tensor *v) {
    mn_tape *tape = f->tape;
    const int64_t J = MN_OF(f, 'J');
    mn_tensor *beta = mn_project(f, x, "b_proj.weight", NULL);
    beta = mn_tape_heads(tape, mn_tape_unary(tape, MN_UNARY_SIGMOID, beta), J);
    mn_tensor *g = mn_tape_decay(tape, mn_project(f, x, "a_proj.weight", NULL),
                                 mn_use_as(f, "dt_bias", 1, J), mn_use_as(f, "A_log", 1, J));
    if (!q || !k || !p || !v || !beta || !g) return NULL;
    k = mn_tape_multiply(tape, k, beta);
    g = mn_tape_spread(tape, mn_tape_heads(tape, g, J), q->shape);
    mn_run run;
    mn_dplr_args *args = mn_run_start(&run, tape, MN_OP_dplr);
    args->scale = pow((double)q->shape[3], -0.5);
    mn_run_in(&run, "q", q);
    mn_run_in(&run, "k", k);
    mn_run_in(&run, "v", v);
    mn_run_in(&run, "a", p);
    mn_run_in(&run, "b", mn_tape_affine(tape, k, -1.0, 0.0));
    mn_run_in(&run, "g", g);
    mn_state_bind(f->state, &run, "state0", "state", "memory",
                  q->shape[0] * q->shape[2] * q->shape[3] * v->shape[3]);
    mn_tensor *o = mn_run_out(&run, "o");
    mn_run_now(&run);
    return o;
}

static mn_tensor *forward(mn_forward *f, mn_tensor *x) {
    mn_tape *tape = f->tape;
    const int64_t H = MN_OF(f, 'H'), J = MN_OF(f, 'J');
    mn_tensor *q = mn_project_conv(f, x, "q_proj.weight", "q_conv1d.weight", MN_UNARY_SILU,
                                   "q_conv");
    mn_tensor *k = mn_project_conv(f, x, "k_proj.weight", "k_conv1d.weight", MN_UNARY_SILU,
                                   "k_conv");
    mn_tensor *v = mn_project_conv(f, x, "v_proj.weight", "v_conv1d.weight", MN_UNARY_SILU,
                                   "v_conv");
    q = mn_tape_heads(tape, q, H);
    k = mn_tape_heads(tape, k, H);
    mn_tensor *p = k;
    if (mn_use(f, "decay")) {
        p = mn_tape_multiply(tape, k, mn_tape_unary(tape, MN_UNARY_SIGMOID,
                                                    mn_use_as(f, "decay", H, 1)));
    }
    if (mn_use(f, "D")) {
        mn_tensor *part = mn_tape_multiply(tape, p, mn_use_as(f, "D", H, 1));
        q = mn_tape_add(tape, q, mn_tape_affine(tape, part, -1.0, 0.0));
    }
    p = p == k ? NULL : mn_unit(f, p, 1, 1e-6);
    k = mn_unit(f, k, 1, 1e-6);
    q = mn_ccq_query(f, x, mn_unit(f, q, 1, 1e-6), k);
    p = mn_tape_repeat(tape, p ? p : k, J / H);
    mn_tensor *o = remember(f, x, mn_tape_repeat(tape, q, J / H), mn_tape_repeat(tape, k, J / H), p,
                            mn_tape_heads(tape, v, J));
    mn_tensor *gate = NULL;
    if (mn_use(f, "g_proj.weight")) {
        gate = mn_tape_heads(tape, mn_project(f, x, "g_proj.weight", NULL), J);
    }
    o = mn_norm_gate(f, o, gate, "o_norm.weight", 1);
    return mn_project_out(f, mn_tape_flat(tape, o), "o_proj.weight", NULL);
}

const mn_layer_family mn_family_comba = { derive, forward };
