/* rwkv7.c - the time mix of RWKV-7: diagonal plus low rank, of tokens mixed with the one before.
 *
 *   d = x_{t-1} - x_t      x^c = x + d x_c for c = r, w, k, v, a, g
 *   r, k, v = R x^r, K x^k, V x^v      log decay -e^(-1/2) sigmoid(W2 tanh(W1 x^w) + w0)
 *   v = v + (v_first - v) sigmoid(V2 V1 x^v + v0), v_first the values of the first layer; not there
 *   a = sigmoid(A2 A1 x^a + a0)      gate = G2 sigmoid(G1 x^g)
 *   kk = k k_k to unit length per head      k = k (1 + (a - 1) k_a)
 *   o = dplr(r, k, v, -kk, kk a, g), then group norm per head with eps K norm_eps
 *   y = ((o + (sum over the head of r k r_k) v) gate) W_o'
 *
 * fuse_norm: kk / sqrt(|kk|^2 + 1e-6) instead of kk / max(|kk|, 1e-12), as checkpoints of
 * flash-linear-attention have it. */
#include <math.h>

#include "base/util.h"
#include "layers/family.h"

/* Ranks of published models, a multiple of 32. */
static int64_t rank_of(const mn_layer *layer, int64_t given, double factor, bool by_head) {
    if (given) return given;
    const double D = (double)layer->width, K = (double)MN_SIZE(&layer->sizes, 'K');
    return mn_max(32, 32 * (int64_t)lround(factor * sqrt(D) * (by_head ? K / 64.0 : 1.0) / 32.0));
}

static mn_status derive(mn_layer *layer, int64_t context) {
    (void)context;
    mn_layer_config *c = &layer->config;
    mn_layer_sizes *s = &layer->sizes;
    mn_status st = mn_derive_heads(layer, c->num_heads, 0, c->head_dim, 1.0, 1.0);
    if (st != MN_OK) return st;
    const int64_t H = MN_SIZE(s, 'H');
    if (c->value_dim == layer->width) c->value_dim = 0;
    const int64_t values = c->value_dim ? c->value_dim : layer->width;
    st = mn_layer_require(layer, H * MN_SIZE(s, 'K') == layer->width, "num_heads",
                          "times head_dim is not the width");
    if (st == MN_OK) {
        st = mn_layer_require(layer, values % H == 0 && values < (int64_t)1 << 31, "value_dim",
                              "is no multiple of num_heads");
    }
    MN_SIZE(s, 'V') = values / H;
    MN_SIZE(s, 'R') = rank_of(layer, c->decay_low_rank_dim, 2.5, true);
    MN_SIZE(s, 'A') = rank_of(layer, c->a_low_rank_dim, 2.5, true);
    MN_SIZE(s, 'G') = rank_of(layer, c->gate_low_rank_dim, 5.0, false);
    MN_SIZE(s, 'L') = layer->index ? rank_of(layer, c->v_low_rank_dim, 1.7, true) : 0;
    return st;
}

/* ---- initial values -------------------------------------------------------------------------- */

/* Channel i as lin = i / (D - 1) - 1/2 and, within its head, zig = z |z|, z from -1 to 1. */
double mn_rwkv7_start(const mn_param_info *info, int64_t i) {
    const int64_t last = info->rank ? info->shape[info->rank - 1] : 1, N = mn_max(info->head, 1);
    const double x = (double)i / (double)mn_max(last - 1, 1), lin = x - 0.5;
    const double z = N > 1 ? 2.0 * (double)(i % N) / (double)(N - 1) - 1.0 : 0.0;
    const double zig = z * fabs(z), L = (double)mn_max(info->n_layers, 1);
    const double depth = L > 1.0 ? (double)info->layer / (L - 1.0) : 0.0;
    const double left = 1.0 - (double)info->layer / L, channel = (double)i / (double)last;
    switch (info->init) {
    case MN_INIT_RWKV_SHIFT_2: return 1.0 - pow(channel, 0.2 * left);
    case MN_INIT_RWKV_SHIFT_7: return 1.0 - pow(channel, 0.7 * left);
    case MN_INIT_RWKV_SHIFT_9: return 1.0 - pow(channel, 0.9 * left);
    case MN_INIT_RWKV_SHIFT_MLP: return 1.0 - pow(channel, pow(left, 4.0));
    case MN_INIT_RWKV_DECAY: return -5.5 + 6.0 * pow(x, 1.0 + pow(depth, 0.3)) + 2.5 * zig;
    case MN_INIT_RWKV_RATE: return -0.19 + 0.3 * zig + 0.4 * lin;
    case MN_INIT_RWKV_RESIDUAL: return 0.73 - 0.4 * lin;
    case MN_INIT_RWKV_KEY: return 0.71 - 0.1 * lin;
    case MN_INIT_RWKV_KEY_RATE: return 1.02;
    case MN_INIT_RWKV_BONUS: return -0.04;
    case MN_INIT_RWKV_NORM: return pow((double)(info->layer + 1) / L, 0.7);
    default: return 0.0;
    }
}

/* ---- forward --------------------------------------------------------------------------------- */

/* x + d x_c */
static mn_tensor *shifted(mn_forward *f, mn_tensor *x, mn_tensor *d, const char *by) {
    mn_tensor *part = mn_tape_multiply(f->tape, d, mn_use_as(f, by, 1, f->layer->width));
    return mn_tape_add(f->tape, x, part);
}

/* B f(A x) + bias, f < 0: none */
static mn_tensor *low_rank(mn_forward *f, mn_tensor *x, const char *const names[3], int act) {
    mn_tensor *y = mn_project(f, x, names[0], NULL);
    if (act >= 0) y = mn_tape_unary(f->tape, (mn_unary)act, y);
    return mn_project(f, y, names[1], names[2]);
}

/* v on its way to the first layer's. */
static mn_tensor *with_residual(mn_forward *f, mn_tensor *v, mn_tensor *xv) {
    static const char *const names[] = { "v_lora.lora.0.weight", "v_lora.lora.2.weight",
                                         "v_lora.lora.2.bias" };
    mn_tape *tape = f->tape;
    mn_tensor *first = f->shared ? f->shared->first_value : NULL;
    if (!first) {
        if (f->shared) f->shared->first_value = v;
        return v;
    }
    if (MN_OF(f, 'L') == 0) return v;
    mn_tensor *part = mn_tape_unary(tape, MN_UNARY_SIGMOID, low_rank(f, xv, names, -1));
    mn_tensor *way = mn_tape_add(tape, first, mn_tape_affine(tape, v, -1.0, 0.0));
    return mn_tape_add(tape, v, mn_tape_multiply(tape, way, part));
}

typedef struct inputs {
    mn_tensor *r, *k, *v, *kk, *rate, *g;    // with heads
} inputs;

static inputs inputs_of(mn_forward *f, mn_tensor *x, mn_tensor *d) {
    static const char *const w[] = { "w_lora.lora.0.weight", "w_lora.lora.2.weight",
                                     "w_lora.lora.2.bias" };
    static const char *const a[] = { "a_lora.lora.0.weight", "a_lora.lora.2.weight",
                                     "a_lora.lora.2.bias" };
    mn_tape *tape = f->tape;
    const int64_t H = MN_OF(f, 'H'), HK = f->layer->width;
    inputs in = { .r = mn_project(f, shifted(f, x, d, "x_r"), "r_proj.weight", NULL) };
    mn_tensor *g = low_rank(f, shifted(f, x, d, "x_w"), w, MN_UNARY_TANH);
    g = mn_tape_affine(tape, mn_tape_unary(tape, MN_UNARY_SIGMOID, g), -exp(-0.5), 0.0);
    mn_tensor *k = mn_project(f, shifted(f, x, d, "x_k"), "k_proj.weight", NULL);
    mn_tensor *xv = shifted(f, x, d, "x_v");
    in.v = mn_tape_heads(tape, with_residual(f, mn_project(f, xv, "v_proj.weight", NULL), xv), H);
    mn_tensor *rate = low_rank(f, shifted(f, x, d, "x_a"), a, -1);
    rate = mn_tape_unary(tape, MN_UNARY_SIGMOID, rate);
    mn_tensor *kk = mn_tape_multiply(tape, k, mn_use_as(f, "k_k", 1, HK));
    const bool root = f->layer->config.fuse_norm;
    in.kk = mn_unit(f, mn_tape_heads(tape, kk, H), root, root ? 1e-6 : 1e-12);
    mn_tensor *grow = mn_tape_multiply(tape, mn_tape_affine(tape, rate, 1.0, -1.0),
                                       mn_use_as(f, "k_a", 1, HK));
    k = mn_tape_multiply(tape, k, mn_tape_affine(tape, grow, 1.0, 1.0));
    in.k = mn_tape_heads(tape, k, H);
    in.r = mn_tape_heads(tape, in.r, H);
    in.rate = mn_tape_heads(tape, rate, H);
    in.g = mn_tape_heads(tape, g, H);
    return in;
}

static mn_tensor *remember(mn_forward *f, const inputs *in, mn_tensor *query) {
    if (!in->k || !in->v || !query) return NULL;
    mn_run run;
    mn_dplr_args *args = mn_run_start(&run, f->tape, MN_OP_dplr);
    args->scale = 1.0;
    mn_run_in(&run, "q", query);
    mn_run_in(&run, "k", in->k);
    mn_run_in(&run, "v", in->v);
    mn_run_in(&run, "a", mn_tape_affine(f->tape, in->kk, -1.0, 0.0));
    mn_run_in(&run, "b", mn_tape_multiply(f->tape, in->kk, in->rate));
    mn_run_in(&run, "g", in->g);
    mn_state_bind(f->state, &run, "state0", "state", "memory",
                  in->k->shape[0] * in->k->shape[2] * in->k->shape[3] * in->v->shape[3]);
    mn_tensor *o = mn_run_out(&run, "o");
    mn_run_now(&run);
    return o;
}

static mn_tensor *forward(mn_forward *f, mn_tensor *x) {
    static const char *const gate_names[] = { "g_lora.lora.0.weight", "g_lora.lora.2.weight", "" };
    mn_tape *tape = f->tape;
    const int64_t H = MN_OF(f, 'H'), K = MN_OF(f, 'K'), V = MN_OF(f, 'V');
    mn_tensor *d = mn_token_shift(tape, f->state, x, "time_shift");
    const inputs in = inputs_of(f, x, d);
    mn_tensor *gate = low_rank(f, shifted(f, x, d, "x_g"), gate_names, MN_UNARY_SIGMOID);
    mn_tensor *o = remember(f, &in, mn_ccq_query(f, x, in.r, in.k));
    o = mn_rms_rows(tape, mn_centred(tape, o), (double)K * f->layer->norm_eps);
    o = mn_tape_multiply(tape, o, mn_use_as(f, "g_norm.weight", H, V));
    o = mn_tape_add(tape, o, mn_use_as(f, "g_norm.bias", H, V));
    mn_tensor *match = mn_tape_multiply(tape, mn_tape_multiply(tape, in.r, in.k),
                                        mn_use_as(f, "r_k", H, K));
    o = mn_tape_add(tape, o, mn_tape_multiply(tape, in.v, mn_row_sums(tape, match, 1.0)));
    o = mn_tape_multiply(tape, mn_tape_flat(tape, o), gate);
    return mn_project_out(f, o, "o_proj.weight", NULL);
}

const mn_layer_family mn_family_rwkv7 = { derive, forward };
