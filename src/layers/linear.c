/* linear.c - linear, gla and retnet: a sum of outer products, with or without decay.
 *
 *   q, k, v = x W'; with use_short_conv silu(conv(x W'))    q, k = phi(q), phi(k)
 *   gla      g = max(log sigmoid(x A' B' + b) / 16, clamp_min) per channel
 *   retnet   q, k turned to their positions (halves, base 10000);  g = log(1 - 2^(-5-h)) of head h
 *   S = diag(e^g) S + k v'      o = S'q / sqrt F, F the width of phi
 *   gla, retnet   y = (rms(o) silu(x W_g')) W_o'
 *   linear        o = o / (q.z / sqrt F + 1e-10), z = sum of k, where norm_feature_map is set
 *                 y = rms(o) W_o'
 *
 * phi of a head, for linear: (x A' + a) . (x B' + b); hedgehog softmax(2y, -2y), y = x A' + a; t2r
 * relu(x A'); dpfp (r r_1, .. r r_4), r = (relu x, -relu x) and r_j turned by j: the published code
 * has -relu(x) where the paper has relu(-x), and checkpoints have learned it; elu + 1, relu or x
 * itself; taylor, Based's, the second-order expansion of e^(q.k / sqrt K) (o = S'q there, without
 * 1 / sqrt F). For gla and retnet: none, or an activation. norm_q, norm_k: x / (sum(x) + 1e-4).
 *
 * Key-value heads G serve H / G query heads in turns. Trained maps start as a projection does by
 * default (uniform within 1 / sqrt K): normal numbers of 0.02 as elsewhere would make products of
 * four small factors, which vanish in the norm's eps at small widths. */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>

#include "layers/family.h"

/* As in the choices of feature_map. */
typedef enum feature_map {
    MAP_NONE, MAP_PRODUCT, MAP_HEDGEHOG, MAP_T2R, MAP_DPFP, MAP_ELU, MAP_RELU, MAP_IDENTITY,
    MAP_SWISH, MAP_SILU, MAP_SIGMOID, MAP_TAYLOR,
} feature_map;

enum { GATE_RANK = 16, DPFP_NU = 4 };

static bool knows_map(mn_layer_kind kind, int64_t map) {
    if (kind == MN_LAYER_linear) {
        return (map >= MAP_PRODUCT && map <= MAP_IDENTITY) || map == MAP_TAYLOR;
    }
    return map == MAP_NONE || map == MAP_RELU || (map >= MAP_SWISH && map <= MAP_SIGMOID);
}

static mn_status check(const mn_layer *layer) {
    const mn_layer_config *c = &layer->config;
    const int64_t H = MN_SIZE(&layer->sizes, 'H');
    mn_status st = mn_layer_require(layer, layer->width % H == 0, "num_heads",
                                    "does not divide the width");
    if (st == MN_OK) {
        st = mn_layer_require(layer, H % MN_SIZE(&layer->sizes, 'G') == 0, "num_kv_heads",
                              "does not divide num_heads");
    }
    if (st == MN_OK) {
        st = mn_layer_require(layer, knows_map(layer->kind, c->feature_map), "feature_map",
                              layer->kind == MN_LAYER_linear
                                  ? "must be elementwise_product, hedgehog, t2r, dpfp, elu, relu, "
                                    "taylor or identity"
                                  : "must be none, relu, swish, silu or sigmoid");
    }
    if (st == MN_OK) {
        st = mn_layer_require(layer, c->clamp_min <= 0.0, "clamp_min",
                              "bounds a log decay and must not be positive");
    }
    if (st == MN_OK) {
        st = mn_layer_require(layer, !c->use_short_conv || c->conv_size >= 1, "conv_size",
                              "must be at least 1");
    }
    if (st == MN_OK && layer->kind == MN_LAYER_retnet) {
        st = mn_layer_require(layer, MN_SIZE(&layer->sizes, 'K') % 2 == 0, "expand_k",
                              "leaves heads of an odd width, which cannot turn");
    }
    return st;
}

static mn_status derive(mn_layer *layer, int64_t context) {
    (void)context;
    const mn_layer_config *c = &layer->config;
    mn_layer_sizes *s = &layer->sizes;
    const mn_status st = mn_derive_heads(layer, c->num_heads, 0, 0, c->expand_k, c->expand_v);
    if (st != MN_OK) return st;
    MN_SIZE(s, 'G') = c->num_kv_heads ? c->num_kv_heads : MN_SIZE(s, 'H');
    MN_SIZE(s, 'W') = c->conv_size;
    MN_SIZE(s, 'R') = GATE_RANK;
    return check(layer);
}

/* ---- features -------------------------------------------------------------------------------- */

/* x A' + a of every head, by the parameters feature_map_{q,k}.{part}; tied maps are those of q. */
static mn_tensor *map_layer(mn_forward *f, mn_tensor *x, char which, const char *part) {
    if (!x) return NULL;
    char weight[48], bias[48];
    if (f->layer->config.tie_feature_map_qk) which = 'q';
    snprintf(weight, sizeof weight, "feature_map_%c.%s.weight", which, part);
    snprintf(bias, sizeof bias, "feature_map_%c.%s.bias", which, part);
    const int64_t *n = x->shape;
    mn_tensor *rows = mn_tape_shaped(f->tape, x, (int64_t[]){ 1, n[0] * n[1] * n[2], 1, n[3] });
    return mn_tape_shaped(f->tape, mn_project(f, rows, weight, bias), n);
}

static mn_tensor *hedgehog(mn_forward *f, mn_tensor *x, char which) {
    mn_tensor *y = map_layer(f, x, which, "layer");
    mn_tensor *const both[] = { mn_tape_affine(f->tape, y, 2.0, 0.0),
                                mn_tape_affine(f->tape, y, -2.0, 0.0) };
    return mn_tape_softmax(f->tape, mn_tape_join(f->tape, both, 2));
}

static mn_tensor *dpfp(mn_forward *f, mn_tensor *x) {
    mn_tensor *r = mn_tape_unary(f->tape, MN_UNARY_RELU, x);
    mn_tensor *const both[] = { r, mn_tape_affine(f->tape, r, -1.0, 0.0) };
    r = mn_tape_join(f->tape, both, 2);
    mn_tensor *turned[DPFP_NU];
    for (int j = 0; j < DPFP_NU; j++) {
        turned[j] = mn_tape_multiply(f->tape, r, mn_tape_roll(f->tape, r, j + 1));
    }
    return mn_tape_join(f->tape, turned, DPFP_NU);
}

/* Squares of d channels, then their products in pairs: each as one of `left` times one of `right`,
 * which pick channels, times `by`. */
static void pick_pairs(int64_t d, double *left, double *right, double *by) {
    int64_t at = 0;
    for (int64_t i = 0; i < d; i++, at++) {
        left[at * d + i] = right[at * d + i] = 1.0;
        by[at] = 1.0 / sqrt(2.0 * (double)d);
    }
    for (int64_t i = 0; i < d; i++) {
        for (int64_t j = i + 1; j < d; j++, at++) {
            left[at * d + i] = right[at * d + j] = 1.0;
            by[at] = 1.0 / sqrt((double)d);
        }
    }
}

/* (1, x / d^(1/4), x_i^2 / sqrt(2 d), x_i x_j / sqrt d), whose products are 1 + s + s^2 / 2 with
 * s = q.k / sqrt d. */
mn_tensor *mn_taylor_features(mn_tape *tape, mn_tensor *x) {
    if (!x) return NULL;
    const int64_t *n = x->shape, d = n[3], P = d * (d + 1) / 2, rows = n[0] * n[1] * n[2];
    double *left = calloc((size_t)(2 * P * d + P), sizeof *left);
    if (!left) return mn_tape_fail(tape, mn_fail(MN_ERR_MEMORY, "no memory for a feature map"));
    double *right = left + P * d, *by = right + P * d;
    pick_pairs(d, left, right, by);
    mn_tensor *a = mn_tape_constant(tape, (int64_t[]){ 1, 1, P, d }, left);
    mn_tensor *b = mn_tape_constant(tape, (int64_t[]){ 1, 1, P, d }, right);
    mn_tensor *scale = mn_tape_constant(tape, (int64_t[]){ 1, 1, 1, P }, by);
    free(left);
    mn_tensor *flat = mn_tape_shaped(tape, x, (int64_t[]){ 1, rows, 1, d });
    mn_tensor *pairs = mn_tape_multiply(tape, mn_tape_linear(tape, flat, a, NULL),
                                        mn_tape_linear(tape, flat, b, NULL));
    mn_tensor *const parts[] = { mn_tape_filled(tape, (int64_t[]){ 1, rows, 1, 1 }, 1.0),
                                 mn_tape_affine(tape, flat, pow((double)d, -0.25), 0.0),
                                 mn_tape_multiply(tape, pairs, scale) };
    mn_tensor *y = mn_tape_join(tape, parts, 3);
    return mn_tape_shaped(tape, y, (int64_t[]){ n[0], n[1], n[2], 1 + d + P });
}

static mn_tensor *features(mn_forward *f, mn_tensor *x, char which) {
    mn_tape *tape = f->tape;
    switch ((feature_map)f->layer->config.feature_map) {
    case MAP_PRODUCT:
        return mn_tape_multiply(tape, map_layer(f, x, which, "layer1"),
                                map_layer(f, x, which, "layer2"));
    case MAP_HEDGEHOG: return hedgehog(f, x, which);
    case MAP_T2R: return mn_tape_unary(tape, MN_UNARY_RELU, map_layer(f, x, which, "layer"));
    case MAP_DPFP: return dpfp(f, x);
    case MAP_TAYLOR: return mn_taylor_features(tape, x);
    case MAP_ELU: return mn_tape_unary(tape, MN_UNARY_ELU_ONE, x);
    case MAP_RELU: return mn_tape_unary(tape, MN_UNARY_RELU, x);
    case MAP_SWISH:
    case MAP_SILU: return mn_tape_unary(tape, MN_UNARY_SILU, x);
    case MAP_SIGMOID: return mn_tape_unary(tape, MN_UNARY_SIGMOID, x);
    default: return x;
    }
}

/* ---- decay ----------------------------------------------------------------------------------- */

/* gla's, (B,T,H,K) */
static mn_tensor *learned_decay(mn_forward *f, mn_tensor *x) {
    mn_tape *tape = f->tape;
    mn_tensor *g = mn_project(f, mn_project(f, x, "gk_proj.0.weight", NULL), "gk_proj.1.weight",
                              "gk_proj.1.bias");
    g = mn_tape_affine(tape, mn_tape_unary(tape, MN_UNARY_LOGSIGMOID, g), 1.0 / 16.0, 0.0);
    const double low = f->layer->config.clamp_min;
    if (low < 0.0) g = mn_tape_at_least(tape, g, low);
    g = mn_tape_heads(tape, g, MN_OF(f, 'G'));
    return mn_tape_repeat(tape, g, MN_OF(f, 'H') / MN_OF(f, 'G'));
}

/* retnet's, (H) */
static mn_tensor *fixed_decay(mn_forward *f) {
    enum { MOST_HEADS = 1024 };
    double log_gamma[MOST_HEADS];
    const int64_t H = MN_OF(f, 'H');
    if (H > MOST_HEADS) {
        return mn_tape_fail(f->tape, mn_fail(MN_ERR_ARGUMENT, "%lld heads; retnet takes %d at most",
                                             (long long)H, MOST_HEADS));
    }
    for (int64_t h = 0; h < H; h++) log_gamma[h] = log1p(-pow(2.0, -5.0 - (double)h));
    return mn_tape_constant(f->tape, (int64_t[]){ 1, 1, 1, H }, log_gamma);
}

static mn_tensor *turned(mn_forward *f, mn_tensor *x) {
    if (f->layer->kind != MN_LAYER_retnet || !x) return x;
    mn_run run;
    mn_rope_args *args = mn_run_start(&run, f->tape, MN_OP_rope);
    mn_state_position(f->state, &run, &args->pos0, f->position);
    mn_run_in(&run, "x", x);
    mn_tensor *y = mn_run_out(&run, "y");
    mn_run_now(&run);
    return y;
}

/* ---- forward --------------------------------------------------------------------------------- */

static mn_tensor *key_of(mn_forward *f, mn_tensor *x, char which, int64_t n_heads) {
    const bool is_q = which == 'q';
    mn_tensor *k = mn_project_conv(f, x, is_q ? "q_proj.weight" : "k_proj.weight",
                                   is_q ? "q_conv1d.weight" : "k_conv1d.weight", -1,
                                   is_q ? "q_conv" : "k_conv");
    k = features(f, mn_tape_heads(f->tape, k, n_heads), which);
    const mn_layer_config *c = &f->layer->config;
    if (is_q ? c->norm_q : c->norm_k) k = mn_over_sum(f, k, 1e-4);
    return turned(f, k);
}

static mn_tensor *sum_read(mn_forward *f, mn_tensor *q, mn_tensor *k, mn_tensor *v, mn_tensor *g,
                           const char *piece) {
    if (!q || !k || !v) return NULL;
    mn_run run;
    mn_additive_args *args = mn_run_start(&run, f->tape, MN_OP_additive);
    mn_mixer_set_args(&f->layer->mixer, args);
    const bool scaled = f->layer->config.feature_map == MAP_TAYLOR;    // by the map itself
    args->scale = scaled ? 1.0 : pow((double)q->shape[3], -0.5);
    mn_run_in(&run, "q", q);
    mn_run_in(&run, "k", k);
    mn_run_in(&run, "v", v);
    if (g) mn_run_in(&run, "g", g);
    mn_state_bind(f->state, &run, "state0", "state", piece,
                  q->shape[0] * q->shape[2] * q->shape[3] * v->shape[3]);
    mn_tensor *o = mn_run_out(&run, "o");
    mn_run_now(&run);
    return o;
}

/* o / (q.z / sqrt F + 1e-10): z is the sum of the keys, kept as values of width 1. */
static mn_tensor *normalised(mn_forward *f, mn_tensor *o, mn_tensor *q, mn_tensor *k) {
    if (!o || !f->layer->config.norm_feature_map) return o;
    const int64_t shape[4] = { q->shape[0], q->shape[1], q->shape[2], 1 };
    mn_tensor *below = sum_read(f, q, k, mn_filled(f, shape, 1.0), NULL, "key_sum");
    below = mn_tape_affine(f->tape, below, 1.0, 1e-10);
    return mn_tape_multiply(f->tape, o, mn_tape_unary(f->tape, MN_UNARY_RECIPROCAL, below));
}

static mn_tensor *normed(mn_forward *f, mn_tensor *x, mn_tensor *o) {
    static const char *const names[] = { "g_norm_swish_gate.weight", "g_norm.weight",
                                         "norm.weight" };
    mn_tensor *gate = NULL;
    if (mn_use(f, "g_proj.weight")) {
        gate = mn_tape_heads(f->tape, mn_project(f, x, "g_proj.weight", NULL), MN_OF(f, 'H'));
    }
    int i = 0;
    while (i < 2 && !mn_use(f, names[i])) i++;
    return mn_norm_gate(f, o, gate, names[i], 0);
}

static mn_tensor *forward(mn_forward *f, mn_tensor *x) {
    mn_tape *tape = f->tape;
    const int64_t H = MN_OF(f, 'H'), G = MN_OF(f, 'G');
    mn_tensor *q = key_of(f, x, 'q', H);
    mn_tensor *k = mn_tape_repeat(tape, key_of(f, x, 'k', G), H / G);
    mn_tensor *v = mn_tape_heads(tape, mn_project_conv(f, x, "v_proj.weight", "v_conv1d.weight",
                                                       -1, "v_conv"), G);
    v = mn_tape_repeat(tape, v, H / G);
    q = mn_ccq_query(f, x, q, k);
    mn_tensor *g = NULL;
    if (f->layer->kind == MN_LAYER_gla) g = learned_decay(f, x);
    if (f->layer->kind == MN_LAYER_retnet) g = fixed_decay(f);
    mn_tensor *o = normalised(f, sum_read(f, q, k, v, g, "memory"), q, k);
    return mn_project_out(f, mn_tape_flat(tape, normed(f, x, o)), "o_proj.weight", NULL);
}

const mn_layer_family mn_family_linear = { derive, forward };
