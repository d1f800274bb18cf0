/* gsa.c - gated slot attention: two memories of M slots, read one after the other.
 *
 *   q, k = phi(x W'), phi silu or relu      v = silu(x W_v')
 *   g = logsigmoid(x W_f') / normalizer      s = 1 - e^g
 *   Kt = Kt diag(e^g) + k s'      p = softmax(Kt'q)      Vt = diag(e^g) Vt + s v'      o = Vt'p
 *   y = (rms(silu(o)) w) W_o', over all heads
 *
 * The first memory fades by slot, which is along its values: additive_column. Key-value heads G
 * serve H / G query heads in turns. The norm's eps is 1e-5 whatever the model says: published code
 * has it so. */
#include <math.h>

#include "layers/family.h"

enum { MAP_RELU = 6, MAP_SWISH = 8 };    // as in the choices of feature_map

static mn_status derive(mn_layer *layer, int64_t context) {
    (void)context;
    const mn_layer_config *c = &layer->config;
    mn_layer_sizes *s = &layer->sizes;
    mn_status st = mn_derive_heads(layer, c->num_heads, 0, 0, c->expand_k, c->expand_v);
    if (st != MN_OK) return st;
    MN_SIZE(s, 'G') = c->num_kv_heads ? c->num_kv_heads : MN_SIZE(s, 'H');
    MN_SIZE(s, 'M') = c->num_slots;
    MN_SIZE(s, 'W') = c->conv_size;
    st = mn_layer_require(layer, layer->width % MN_SIZE(s, 'H') == 0, "num_heads",
                          "does not divide the width");
    if (st == MN_OK) {
        st = mn_layer_require(layer, MN_SIZE(s, 'H') % MN_SIZE(s, 'G') == 0, "num_kv_heads",
                              "does not divide num_heads");
    }
    if (st == MN_OK) {
        st = mn_layer_require(layer, c->num_slots >= 1 && c->num_slots <= 65536, "num_slots",
                              "must lie between 1 and 65536");
    }
    if (st == MN_OK) {
        st = mn_layer_require(layer, c->feature_map == MAP_SWISH || c->feature_map == MAP_RELU,
                              "feature_map", "must be swish or relu");
    }
    if (st == MN_OK) {
        st = mn_layer_require(layer, c->gate_logit_normalizer > 0.0, "gate_logit_normalizer",
                              "must be above 0");
    }
    if (st == MN_OK) {
        st = mn_layer_require(layer, !c->use_short_conv || c->conv_size >= 1, "conv_size",
                              "must be at least 1");
    }
    return st;
}

static mn_tensor *mapped(mn_forward *f, mn_tensor *x, int64_t heads) {
    const bool relu = f->layer->config.feature_map == MAP_RELU;
    x = mn_tape_unary(f->tape, relu ? MN_UNARY_RELU : MN_UNARY_SILU, x);
    return mn_tape_heads(f->tape, x, heads);
}

/* Scores of slots (B,T,H,M). */
static mn_tensor *scores(mn_forward *f, mn_tensor *q, mn_tensor *k, mn_tensor *s, mn_tensor *g) {
    if (!q || !k || !s || !g) return NULL;
    mn_run run;
    mn_additive_column_args *args = mn_run_start(&run, f->tape, MN_OP_additive_column);
    args->scale = 1.0;
    mn_run_in(&run, "q", q);
    mn_run_in(&run, "k", k);
    mn_run_in(&run, "v", s);
    mn_run_in(&run, "g", g);
    mn_state_bind(f->state, &run, "state0", "state", "slot_keys",
                  q->shape[0] * q->shape[2] * q->shape[3] * s->shape[3]);
    mn_tensor *o = mn_run_out(&run, "o");
    mn_run_now(&run);
    return o;
}

static mn_tensor *forward(mn_forward *f, mn_tensor *x) {
    mn_tape *tape = f->tape;
    const int64_t H = MN_OF(f, 'H'), G = MN_OF(f, 'G'), HV = H * MN_OF(f, 'V');
    mn_tensor *q = mn_project_conv(f, x, "q_proj.weight", "q_conv1d.weight", -1, "q_conv");
    mn_tensor *k = mn_project_conv(f, x, "k_proj.weight", "k_conv1d.weight", -1, "k_conv");
    mn_tensor *v = mn_project_conv(f, x, "v_proj.weight", "v_conv1d.weight", -1, "v_conv");
    q = mapped(f, q, H);
    k = mn_tape_repeat(tape, mapped(f, k, G), H / G);
    v = mn_tape_heads(tape, mn_tape_unary(tape, MN_UNARY_SILU, v), G);
    v = mn_tape_repeat(tape, v, H / G);
    mn_tensor *g = mn_tape_unary(tape, MN_UNARY_LOGSIGMOID,
                                 mn_project(f, x, "f_proj.weight", NULL));
    g = mn_tape_affine(tape, g, 1.0 / f->layer->config.gate_logit_normalizer, 0.0);
    g = mn_tape_repeat(tape, mn_tape_heads(tape, g, G), H / G);
    mn_tensor *s = mn_tape_affine(tape, mn_tape_unary(tape, MN_UNARY_EXP, g), -1.0, 1.0);
    q = mn_ccq_query(f, x, q, k);
    mn_tensor *p = mn_tape_softmax(tape, scores(f, q, k, s, g));
    mn_tensor *o = mn_sum_read(f, p, s, v, g, MN_DECAY_CHANNEL, 1.0, "slot_values");
    o = mn_tape_unary(tape, MN_UNARY_SILU, mn_tape_flat(tape, o));
    o = mn_tape_multiply(tape, mn_rms_rows(tape, o, 1e-5), mn_use_as(f, "g_norm.weight", 1, HV));
    return mn_project_out(f, o, "o_proj.weight", NULL);
}

const mn_layer_family mn_family_gsa = { derive, forward };
