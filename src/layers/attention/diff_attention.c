/* diff_attention.c - differential attention: the difference of two softmax maps.
 *
 *   q = x W_q'   k = x W_k'   v = x W_v'      2 H queries; q, k turned by neighbouring channels
 *   o_h = (softmax(q_2h k' / sqrt d) - l softmax(q_2h+1 k' / sqrt d)) v
 *
 *   diff_lambda layer   2 J keys of width d, J values of width 2 d, d = D / 2H
 *       l = e^(l_q1.l_k1) - e^(l_q2.l_k2) + l_0,  l_0 = 0.8 - 0.6 e^(-0.3 i) in layer i from 0
 *       y = (rms(o) w (1 - l_0)) W_out'           rms of each head, eps 1e-5
 *   diff_lambda token   J keys and values of width d = D / H:  l = sigmoid(x W_l'), y = o W_out'
 *
 * Map j of 2 H reads key head floor(j n / 2H) of n. One call of softmax attention makes all maps:
 * values that two keys share are listed twice. */
#include <math.h>

#include "base/util.h"
#include "layers/family.h"

static mn_status derive(mn_layer *layer, int64_t context) {
    (void)context;
    const mn_layer_config *c = &layer->config;
    mn_layer_sizes *s = &layer->sizes;
    const bool token = c->diff_lambda != 0;
    const int64_t D = layer->width;
    int64_t H = c->num_heads;
    if (H == 0) H = c->head_dim ? D / (c->head_dim * (token ? 1 : 2)) : D / (token ? 64 : 128);
    if (H == 0) H = 1;
    const int64_t J = c->num_kv_heads ? c->num_kv_heads : H;
    const int64_t d = c->head_dim ? c->head_dim : D / (token ? H : 2 * H);
    mn_status st = mn_layer_require(layer, d >= 1 && (c->head_dim || D % (token ? H : 2 * H) == 0),
                                    "num_heads", "(twice that of maps) does not divide the width; "
                                    "set head_dim as well");
    if (st == MN_OK) {
        st = mn_layer_require(layer, H % J == 0, "num_kv_heads", "does not divide num_heads");
    }
    if (st == MN_OK) {
        st = mn_layer_require(layer, !c->use_rope || d % 2 == 0, "use_rope",
                              "needs heads of an even width");
    }
    if (st == MN_OK) {
        st = mn_layer_require(layer, !c->use_rope || c->rope_theta > 0.0, "rope_theta",
                              "must be positive");
    }
    layer->config.num_heads = H;
    layer->config.head_dim = d;
    MN_SIZE(s, 'H') = H;
    MN_SIZE(s, 'J') = J;
    MN_SIZE(s, 'G') = token ? J : 2 * J;
    MN_SIZE(s, 'K') = d;
    MN_SIZE(s, 'V') = token ? d : 2 * d;
    return st;
}

/* Heads of a projection, turned to their positions in the sequence. */
static mn_tensor *turned(mn_forward *f, mn_tensor *x, const char *weight, int64_t n) {
    x = mn_tape_heads(f->tape, mn_project(f, x, weight, NULL), n);
    if (!x || !f->layer->config.use_rope) return x;
    mn_run run;
    mn_rope_args *args = mn_run_start(&run, f->tape, MN_OP_rope);
    args->kind = 1;
    args->base = f->layer->config.rope_theta;
    mn_state_position(f->state, &run, &args->pos0, f->position);
    mn_run_in(&run, "x", x);
    mn_tensor *y = mn_run_out(&run, "y");
    mn_run_now(&run);
    return y;
}

static double lambda_start(const mn_forward *f) {
    return 0.8 - 0.6 * exp(-0.3 * (double)f->layer->index);
}

/* e^(a.b), a single number. */
static mn_tensor *exp_dot(mn_forward *f, const char *a, const char *b) {
    mn_tensor *sum = mn_tape_multiply(f->tape, mn_use(f, a), mn_use(f, b));
    return mn_tape_unary(f->tape, MN_UNARY_EXP, mn_row_sums(f->tape, sum, 1.0));
}

/* What the second map is multiplied by, less than 0. */
static mn_tensor *minus_lambda(mn_forward *f, mn_tensor *x) {
    mn_tape *tape = f->tape;
    if (f->layer->config.diff_lambda) {
        mn_tensor *l = mn_tape_unary(tape, MN_UNARY_SIGMOID,
                                     mn_project(f, x, "lambda_proj.weight", NULL));
        return mn_tape_affine(tape, mn_tape_heads(tape, l, MN_OF(f, 'H')), -1.0, 0.0);
    }
    mn_tensor *first = exp_dot(f, "lambda_q1", "lambda_k1");
    mn_tensor *second = exp_dot(f, "lambda_q2", "lambda_k2");
    return mn_tape_add(tape, second, mn_tape_affine(tape, first, -1.0, -lambda_start(f)));
}

/* All 2 H maps of the values. */
static mn_tensor *maps_of(mn_forward *f, mn_tensor *x) {
    mn_tape *tape = f->tape;
    mn_tensor *q = turned(f, x, "q_proj.weight", 2 * MN_OF(f, 'H'));
    mn_tensor *k = turned(f, x, "k_proj.weight", MN_OF(f, 'G'));
    mn_tensor *v = mn_tape_heads(tape, mn_project(f, x, "v_proj.weight", NULL), MN_OF(f, 'J'));
    if (!f->layer->config.diff_lambda) v = mn_tape_repeat(tape, v, 2);
    k = mn_state_append(f->state, tape, k, "k");
    v = mn_state_append(f->state, tape, v, "v");
    if (!q || !k || !v) return NULL;
    mn_run run;
    mn_attention_args *args = mn_run_start(&run, tape, MN_OP_attention);
    args->scale = 1.0 / sqrt((double)MN_OF(f, 'K'));
    mn_state_rows(f->state, &run);
    mn_run_in(&run, "q", q);
    mn_run_in(&run, "k", k);
    mn_run_in(&run, "v", v);
    mn_tensor *o = mn_run_out(&run, "o");
    if (mn_tape_records(tape) && mn_tape_dtype(tape) == MN_BF16) mn_run_out(&run, "lse");
    mn_run_now(&run);
    return o;
}

static mn_tensor *normed(mn_forward *f, mn_tensor *o) {
    mn_tensor *w = mn_use(f, "subln.weight");
    if (!w || !o) return o;
    mn_run run;
    mn_rms_norm_args *args = mn_run_start(&run, f->tape, MN_OP_rms_norm);
    args->eps = 1e-5;
    mn_run_in(&run, "x", o);
    mn_run_in(&run, "w", w);
    mn_tensor *y = mn_run_out(&run, "y");
    mn_run_now(&run);
    return mn_tape_affine(f->tape, y, 1.0 - lambda_start(f), 0.0);
}

static mn_tensor *forward(mn_forward *f, mn_tensor *x) {
    mn_tape *tape = f->tape;
    const int64_t V = MN_OF(f, 'V');
    static const char *const first[] = { "q_proj.weight", "k_proj.weight", "v_proj.weight" };
    mn_project_ahead(f, x, first, MN_COUNTOF(first));
    mn_tensor *o = maps_of(f, x), *map[2];
    if (!o) return NULL;
    mn_split_heads(f, mn_tape_heads(tape, mn_tape_flat(tape, o), MN_OF(f, 'H')),
                   (int64_t[]){ V, V }, 2, map);
    o = mn_tape_add(tape, map[0], mn_tape_multiply(tape, map[1], minus_lambda(f, x)));
    return mn_project_out(f, mn_tape_flat(tape, normed(f, o)), "out_proj.weight", NULL);
}

const mn_layer_family mn_family_diff_attention = { derive, forward };
