/* toy.c - toy: a sum of outer products that fades by a gate of the token, the smallest layer there
 * is.
 *
 *   q, k, v = x W'      g = log sigmoid(x W_g' + b) per head      S = e^g S + k v'      o = S'q /
 * sqrt K
 *   y = rms(o) W_o'
 *
 * tests/add_mixer.sh adds it to a copy of the project: this file, toy.def and a line in
 * layers/all.def. */
#include <math.h>

#include "layers/family.h"

static mn_status derive(mn_layer *layer, int64_t context) {
    (void)context;
    return mn_derive_heads(layer, layer->config.num_heads, 0, 0, 1.0, 1.0);
}

static mn_tensor *heads(mn_forward *f, mn_tensor *x, const char *weight) {
    return mn_tape_heads(f->tape, mn_project(f, x, weight, NULL), MN_OF(f, 'H'));
}

static mn_tensor *forward(mn_forward *f, mn_tensor *x) {
    mn_tape *tape = f->tape;
    const int64_t H = MN_OF(f, 'H'), K = MN_OF(f, 'K'), V = MN_OF(f, 'V');
    mn_tensor *q = heads(f, x, "q_proj.weight"), *k = heads(f, x, "k_proj.weight");
    mn_tensor *g = mn_project(f, x, "f_proj.weight", "f_proj.bias");
    mn_run run;
    mn_additive_args *args = mn_run_start(&run, tape, MN_OP_additive);
    args->scale = 1.0 / sqrt((double)K);
    args->decay = MN_DECAY_TOKEN;
    mn_run_in(&run, "q", mn_ccq_query(f, x, q, k));
    mn_run_in(&run, "k", k);
    mn_run_in(&run, "v", heads(f, x, "v_proj.weight"));
    mn_run_in(&run, "g", mn_tape_unary(tape, MN_UNARY_LOGSIGMOID, g));
    mn_state_bind(f->state, &run, "state0", "state", "state", x->shape[0] * H * K * V);
    mn_tensor *o = mn_run_out(&run, "o");
    mn_run_now(&run);
    o = mn_norm_gate(f, o, NULL, "o_norm.weight", 0);
    return mn_project_out(f, mn_tape_flat(tape, o), "o_proj.weight", NULL);
}

const mn_layer_family mn_family_toy = { derive, forward };
