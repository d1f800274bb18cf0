/* attention.c - attention and relu_attention: every key and value so far is kept.
 *
 *   q = turn(x W_q')   k = turn(x W_k')   v = x W_v'      turn: rotary positions, first half with
 *                                                         second half of a head (use_rope)
 *   attention        w = softmax(q.k / sqrt K)
 *   relu_attention   w = relu(z / |z|), z = q.k / sqrt K over all keys so far
 *   y = (sum_i w_i v_i) W_o'
 *
 * J key-value heads serve H query heads in turns. Keys are turned before they are kept, so a decode
 * step turns one. Unless num_heads or head_dim say otherwise there are D / 64 heads, at least 1. */
#include <math.h>

#include "base/util.h"
#include "layers/family.h"

static mn_status derive(mn_layer *layer, int64_t context) {
    (void)context;
    const mn_layer_config *c = &layer->config;
    mn_layer_sizes *s = &layer->sizes;
    const bool given = c->head_dim != 0;
    mn_status st = mn_derive_heads(layer, c->num_heads, 0, c->head_dim, 1.0, 1.0);
    if (st != MN_OK) return st;
    const int64_t H = MN_SIZE(s, 'H'), J = c->num_kv_heads ? c->num_kv_heads : H;
    MN_SIZE(s, 'J') = J;
    st = mn_layer_require(layer, given || layer->width % H == 0, "num_heads",
                          "does not divide the width; set head_dim as well");
    if (st == MN_OK) {
        st = mn_layer_require(layer, H % J == 0, "num_kv_heads", "does not divide num_heads");
    }
    if (st == MN_OK) {
        st = mn_layer_require(layer, !c->use_rope || MN_SIZE(s, 'K') % 2 == 0, "use_rope",
                              "needs heads of an even width");
    }
    if (st == MN_OK) {
        st = mn_layer_require(layer, !c->use_rope || c->rope_theta > 0.0, "rope_theta",
                              "must be positive");
    }
    return st;
}

/* (B,T,n,K), turned to its position in the sequence if `turns`. */
static mn_tensor *heads_of(mn_forward *f, mn_tensor *x, int64_t n, const char *weight,
                           const char *bias, bool turns) {
    mn_tensor *y = mn_tape_heads(f->tape, mn_project(f, x, weight, bias), n);
    if (!turns || !y) return y;
    mn_run run;
    mn_rope_args *args = mn_run_start(&run, f->tape, MN_OP_rope);
    args->kind = 0;
    args->base = f->layer->config.rope_theta;
    mn_state_position(f->state, &run, &args->pos0, f->position);
    mn_run_in(&run, "x", y);
    mn_tensor *turned = mn_run_out(&run, "y");
    mn_run_now(&run);
    return turned;
}

static mn_tensor *forward(mn_forward *f, mn_tensor *x) {
    const mn_layer_config *c = &f->layer->config;
    const bool softmax = f->layer->kind == MN_LAYER_attention;
    const int64_t J = MN_OF(f, 'J');
    static const char *const first[] = { "q_proj.weight", "k_proj.weight", "v_proj.weight" };
    if (!mn_use(f, "q_proj.bias")) mn_project_ahead(f, x, first, MN_COUNTOF(first));
    mn_tensor *q = heads_of(f, x, MN_OF(f, 'H'), "q_proj.weight", "q_proj.bias", c->use_rope);
    mn_tensor *k = heads_of(f, x, J, "k_proj.weight", "k_proj.bias", c->use_rope);
    mn_tensor *v = heads_of(f, x, J, "v_proj.weight", "v_proj.bias", false);
    k = mn_state_append(f->state, f->tape, k, "k");
    v = mn_state_append(f->state, f->tape, v, "v");
    if (!q || !k || !v) return NULL;
    mn_run run;
    void *args = mn_run_start(&run, f->tape, softmax ? MN_OP_attention : MN_OP_relu_attention);
    const double scale = 1.0 / sqrt((double)MN_OF(f, 'K'));
    if (softmax) ((mn_attention_args *)args)->scale = scale;
    else ((mn_relu_attention_args *)args)->scale = scale;
    mn_state_rows(f->state, &run);
    mn_run_in(&run, "q", q);
    mn_run_in(&run, "k", k);
    mn_run_in(&run, "v", v);
    mn_tensor *o = mn_run_out(&run, "o");
    /* In bf16, on a GPU that is, it saves backward two products of nine. */
    const bool kept = softmax && mn_tape_records(f->tape) && mn_tape_dtype(f->tape) == MN_BF16;
    if (kept) mn_run_out(&run, "lse");
    mn_run_now(&run);
    return mn_project_out(f, mn_tape_flat(f->tape, o), "o_proj.weight", NULL);
}

const mn_layer_family mn_family_attention = { derive, forward };
