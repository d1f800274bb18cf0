/* hgrn2.c - HGRN2: a sum of outer products whose forget gate is also what keys are not.
 *
 *   q = silu(x W_q')      z = lb + (1 - lb) sigmoid(x W_f')      v = x W_i'
 *   S = diag(z) S + (1 - z) v'      o = S'q / sqrt K      y = (rms(o) w) W_o', over all heads
 *
 * lb is that of mn_forward.bound as log odds r = log(lb / (1 - lb)). With f the gate's input, the
 * log odds of z are f + log(1 + e^(r + softplus(-f))), so z and 1 - z are both sigmoids of one
 * number and neither loses digits where the other is near 1.
 *
 * The norm's eps is 1e-5 whatever the model says: published code has it so. Convolutions, where
 * there are some, have no activation. */
#include <math.h>

#include "layers/family.h"

static mn_status derive(mn_layer *layer, int64_t context) {
    (void)context;
    mn_layer_config *c = &layer->config;
    mn_layer_sizes *s = &layer->sizes;
    int64_t heads = c->num_heads;
    if (heads == 0 && c->expand_ratio && layer->width >= c->expand_ratio) {
        heads = layer->width / c->expand_ratio;
    }
    mn_status st = mn_derive_heads(layer, heads, 0, 0, 1.0, 1.0);
    if (st != MN_OK) return st;
    const int64_t H = MN_SIZE(s, 'H');
    if (c->expand_ratio) MN_SIZE(s, 'K') = c->expand_ratio;
    MN_SIZE(s, 'W') = c->conv_size;
    st = mn_layer_require(layer, layer->width % H == 0, "num_heads", "does not divide the width");
    if (st == MN_OK) {
        st = mn_layer_require(layer, !c->use_short_conv || c->conv_size >= 1, "conv_size",
                              "must be at least 1");
    }
    return st;
}

static mn_tensor *input_of(mn_forward *f, mn_tensor *x, const char *weight, const char *conv,
                           const char *piece) {
    mn_tensor *y = mn_project(f, x, weight, NULL);
    return f->layer->config.use_short_conv ? mn_short_conv(f, y, conv, NULL, 0, piece) : y;
}

/* Log odds of the gate. */
static mn_tensor *gate_of(mn_forward *f, mn_tensor *x) {
    mn_tape *tape = f->tape;
    mn_tensor *raw = input_of(f, x, "f_proj.weight", "f_conv1d.weight", "f_conv");
    if (!f->bound || !f->layer->config.use_lower_bound) return raw;
    mn_tensor *not = mn_tape_unary(tape, MN_UNARY_SOFTPLUS, mn_tape_affine(tape, raw, -1.0, 0.0));
    mn_tensor *rise = mn_tape_unary(tape, MN_UNARY_SOFTPLUS, mn_tape_add(tape, not, f->bound));
    return mn_tape_add(tape, raw, rise);
}

static mn_tensor *forward(mn_forward *f, mn_tensor *x) {
    mn_tape *tape = f->tape;
    const int64_t H = MN_OF(f, 'H'), HV = H * MN_OF(f, 'V');
    mn_tensor *q = input_of(f, x, "q_proj.weight", "q_conv1d.weight", "q_conv");
    q = mn_tape_heads(tape, mn_tape_unary(tape, MN_UNARY_SILU, q), H);
    mn_tensor *gate = gate_of(f, x);
    mn_tensor *g = mn_tape_heads(tape, mn_tape_unary(tape, MN_UNARY_LOGSIGMOID, gate), H);
    mn_tensor *k = mn_tape_unary(tape, MN_UNARY_SIGMOID, mn_tape_affine(tape, gate, -1.0, 0.0));
    k = mn_tape_heads(tape, k, H);
    mn_tensor *v = input_of(f, x, "i_proj.weight", "i_conv1d.weight", "i_conv");
    v = mn_tape_heads(tape, v, H);
    q = mn_ccq_query(f, x, q, k);
    mn_tensor *o = mn_sum_read(f, q, k, v, g, MN_DECAY_CHANNEL,
                               pow((double)MN_OF(f, 'K'), -0.5), "memory");
    o = mn_rms_rows(tape, mn_tape_flat(tape, o), 1e-5);
    o = mn_tape_multiply(tape, o, mn_use_as(f, "g_norm.weight", 1, HV));
    return mn_project_out(f, o, "o_proj.weight", NULL);
}

const mn_layer_family mn_family_hgrn2 = { derive, forward };
