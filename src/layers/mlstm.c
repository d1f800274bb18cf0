/* mlstm.c - mlstm: xLSTM's matrix memory, a sum with exponential gates and a normaliser.
 *
 *   q, k, v = silu(conv(x W'))      i = cap tanh((x W_i' + b_i) / cap)      f the same by W_f, b_f
 *   m = max(log sigmoid(f) + m, i)
 *   C = sigmoid(f) C + e^i k v'     n = sigmoid(f) n + e^i k     (both kept over e^m)
 *   o = C'q / max(|n.q|, 1), q over sqrt K                       y = (rms(o) sigmoid(x W_g')) W_o'
 *
 * The cell, the widths (keys half as wide as values), the soft cap of the gates at 15, the forget
 * biases of 3 to 6 and the sigmoid gate after the norm are the published ones (Beck et al., 2024,
 * and the 7B model). Ours: the scaffold of gdn, that is short convolutions on q, k and v with SiLU
 * where the published block convolves q and k only or nothing, an RMS norm per head, names as the
 * other layers have them, and input biases of 0, with which e^i starts at 1. */
#include <math.h>

#include "layers/family.h"

static mn_status derive(mn_layer *layer, int64_t context) {
    (void)context;
    const mn_layer_config *c = &layer->config;
    mn_status st = mn_derive_heads(layer, c->num_heads, 0, c->head_dim, c->expand_k, c->expand_v);
    MN_SIZE(&layer->sizes, 'W') = c->conv_size;
    if (st == MN_OK) {
        st = mn_layer_require(layer, !c->use_short_conv || c->conv_size >= 1, "conv_size",
                              "must be at least 1");
    }
    if (st == MN_OK) {
        st = mn_layer_require(layer, c->gate_soft_cap >= 0.0, "gate_soft_cap",
                              "must not be negative");
    }
    return st;
}

/* A gate before its nonlinearity, (B,T,1,H), held inside (-cap, cap). */
static mn_tensor *capped(mn_forward *f, mn_tensor *x, const char *weight, const char *bias) {
    mn_tensor *gate = mn_project(f, x, weight, bias);
    const double cap = f->layer->config.gate_soft_cap;
    if (cap == 0.0) return gate;
    gate = mn_tape_unary(f->tape, MN_UNARY_TANH, mn_tape_affine(f->tape, gate, 1.0 / cap, 0.0));
    return mn_tape_affine(f->tape, gate, cap, 0.0);
}

static mn_tensor *cell(mn_forward *f, mn_tensor *x, mn_tensor *q, mn_tensor *k, mn_tensor *v) {
    const int64_t rows = x->shape[0] * MN_OF(f, 'H'), K = MN_OF(f, 'K');
    mn_tensor *ipre = capped(f, x, "i_proj.weight", "i_proj.bias");
    mn_tensor *fpre = capped(f, x, "f_proj.weight", "f_proj.bias");
    mn_run run;
    mn_mlstm_args *args = mn_run_start(&run, f->tape, MN_OP_mlstm);
    args->scale = pow((double)K, -0.5);
    mn_run_in(&run, "q", q);
    mn_run_in(&run, "k", k);
    mn_run_in(&run, "v", v);
    mn_run_in(&run, "ipre", ipre);
    mn_run_in(&run, "fpre", fpre);
    mn_state_bind(f->state, &run, "C0", "C", "memory", rows * K * MN_OF(f, 'V'));
    mn_state_bind(f->state, &run, "n0", "n", "normaliser", rows * K);
    mn_state_bind(f->state, &run, "m0", "m", "unit", rows);
    mn_tensor *o = mn_run_out(&run, "o");
    mn_run_now(&run);
    return o;
}

static mn_tensor *forward(mn_forward *f, mn_tensor *x) {
    mn_tape *tape = f->tape;
    const int64_t H = MN_OF(f, 'H');
    mn_tensor *q = mn_project_conv(f, x, "q_proj.weight", "q_conv1d.weight", -1, "q_conv");
    mn_tensor *k = mn_project_conv(f, x, "k_proj.weight", "k_conv1d.weight", -1, "k_conv");
    mn_tensor *v = mn_project_conv(f, x, "v_proj.weight", "v_conv1d.weight", -1, "v_conv");
    q = mn_tape_heads(tape, q, H);
    k = mn_tape_heads(tape, k, H);
    mn_tensor *o = cell(f, x, mn_ccq_query(f, x, q, k), k, mn_tape_heads(tape, v, H));
    mn_tensor *gate = NULL;
    if (mn_use(f, "g_proj.weight")) {
        gate = mn_tape_heads(tape, mn_project(f, x, "g_proj.weight", NULL), H);
    }
    o = mn_norm_gate(f, o, gate, "o_norm.weight", 1);
    return mn_project_out(f, mn_tape_flat(tape, o), "o_proj.weight", NULL);
}

const mn_layer_family mn_family_mlstm = { derive, forward };
