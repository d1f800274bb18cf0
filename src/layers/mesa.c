/* mesa.c - mesa: what ridge regression on all pairs so far predicts for the query.
 *
 *   q, k = unit(silu(conv(x W')))      v = x W_v'      beta = sigmoid(x W_b' + b)
 *   g = log sigmoid(x W_a' + a)        lam = softplus(lambda_params) + lambda_lower_bound
 *   Hkk = e^g Hkk + beta k k'          Hkv = e^g Hkv + beta k v'
 *   o = Hkv'(Hkk + diag lam)^-1 q      y = rms(o) W_o', or (rms(o) silu(x W_g')) W_o'
 *
 * Queries and keys always have their convolutions, values never. The solve is exact; the published
 * code takes a fixed number of conjugate-gradient steps. With cg_steps passes without gradient take
 * them too, from 0 as its prefill does. lam starts at 0.75 over its bound, which is 1 for
 * the bound of 0.25. */
#include "layers/family.h"

static mn_status derive(mn_layer *layer, int64_t context) {
    (void)context;
    const mn_layer_config *c = &layer->config;
    mn_status st = mn_derive_heads(layer, c->num_heads, 0, c->head_dim, 1.0, 1.0);
    MN_SIZE(&layer->sizes, 'W') = c->conv_size;
    if (st == MN_OK) {
        st = mn_layer_require(layer, c->conv_size >= 1, "conv_size", "must be at least 1");
    }
    if (st == MN_OK) {
        st = mn_layer_require(layer, c->use_short_conv, "use_short_conv",
                              "cannot be switched off: queries and keys always have theirs");
    }
    if (st == MN_OK) {
        st = mn_layer_require(layer, c->lambda_lower_bound > 0.0, "lambda_lower_bound",
                              "must be positive: it keeps the regression solvable");
    }
    return st;
}

static mn_tensor *key_of(mn_forward *f, mn_tensor *x, const char *weight, const char *conv,
                         const char *piece) {
    return mn_unit_conv(f, mn_project(f, x, weight, NULL), conv, MN_OF(f, 'H'), 1, 1e-6, piece);
}

static mn_tensor *ridge(mn_forward *f) {
    mn_tensor *lam = mn_use_as(f, "lambda_params", MN_OF(f, 'H'), MN_OF(f, 'K'));
    lam = mn_tape_unary(f->tape, MN_UNARY_SOFTPLUS, lam);
    return mn_tape_affine(f->tape, lam, 1.0, f->layer->config.lambda_lower_bound);
}

static mn_tensor *solve(mn_forward *f, mn_tensor *x, mn_tensor *q, mn_tensor *k, mn_tensor *v) {
    mn_tape *tape = f->tape;
    mn_tensor *g = mn_project(f, x, "a_proj.weight", "a_proj.bias");
    mn_tensor *beta = mn_project(f, x, "b_proj.weight", "b_proj.bias");
    mn_run run;
    mn_mesa_args *args = mn_run_start(&run, tape, MN_OP_mesa);
    args->scale = 1.0;
    if (!mn_tape_records(tape)) args->steps = f->layer->config.cg_steps;
    mn_run_in(&run, "q", q);
    mn_run_in(&run, "k", k);
    mn_run_in(&run, "v", v);
    mn_run_in(&run, "g", mn_tape_unary(tape, MN_UNARY_LOGSIGMOID, g));
    mn_run_in(&run, "beta", mn_tape_unary(tape, MN_UNARY_SIGMOID, beta));
    mn_run_in(&run, "lam", ridge(f));
    const int64_t rows = x->shape[0] * MN_OF(f, 'H'), K = MN_OF(f, 'K');
    mn_state_bind(f->state, &run, "hkk0", "hkk", "hkk", rows * K * K);
    mn_state_bind(f->state, &run, "hkv0", "hkv", "hkv", rows * K * MN_OF(f, 'V'));
    mn_tensor *o = mn_run_out(&run, "o");
    mn_run_now(&run);
    return o;
}

static mn_tensor *forward(mn_forward *f, mn_tensor *x) {
    mn_tape *tape = f->tape;
    const int64_t H = MN_OF(f, 'H');
    mn_tensor *k = key_of(f, x, "k_proj.weight", "k_conv1d.weight", "k_conv");
    mn_tensor *q = key_of(f, x, "q_proj.weight", "q_conv1d.weight", "q_conv");
    mn_tensor *v = mn_tape_heads(tape, mn_project(f, x, "v_proj.weight", NULL), H);
    mn_tensor *o = solve(f, x, mn_ccq_query(f, x, q, k), k, v);
    mn_tensor *gate = NULL;
    if (mn_use(f, "g_proj.weight")) {
        gate = mn_tape_heads(tape, mn_project(f, x, "g_proj.weight", NULL), H);
    }
    o = mn_norm_gate(f, o, gate, "o_norm.weight", 0);
    return mn_project_out(f, mn_tape_flat(tape, o), "o_proj.weight", NULL);
}

const mn_layer_family mn_family_mesa = { derive, forward };
