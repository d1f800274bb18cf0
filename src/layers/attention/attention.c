/* attention.c - attention and relu_attention: every key and value so far is kept.
 *
 *   q = turn(x W_q')   k = turn(x W_k')   v = x W_v'      turn: rotary positions, first half with
 *                                                         second half of a head (use_rope)
 *   attention        w = softmax(q.k / sqrt K), over the newest window_size keys where that is set
 *   relu_attention   w = relu(z / |z|), z = q.k / sqrt K over all keys so far
 *   y = (sum_i w_i v_i) W_o'
 *
 * use_output_gate multiplies what is read by the sigmoid of a gate beside the query.
 * fused_qkv: one projection for q, k and v. qk_norm_whole norms the heads of q, and those of k, as
 * one vector. The multipliers are those of published models.
 *
 * qk_rms_norm norms every head of q and k before they turn, by weights of a head. A head turns
 * in its first partial_rotary_factor channels. Frequencies of rope_type:
 *
 *   linear   w / factor
 *   llama3   w where it turns more than high times in the original context, w / factor where less
 *            than low times, between them s w + (1 - s) w / factor,
 *            s = (turns - low) / (high - low)
 *   yarn     likewise between pairs: w up to the one of beta_fast turns, w / factor from that of
 *            beta_slow turns on; turned heads times log(factor) / 10 + 1
 *
 * J key-value heads serve H query heads in turns. Keys are turned before they are kept, so a decode
 * step turns one. Unless num_heads or head_dim say otherwise there are D / 64 heads, at least 1. */
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "base/util.h"
#include "layers/family.h"
#include "ops/describe.h"

enum { ROPE_DEFAULT, ROPE_LINEAR, ROPE_LLAMA3, ROPE_YARN };

/* Channels of a head that turn. */
static int64_t turning(const mn_layer *layer) {
    const double share = layer->kind == MN_LAYER_attention ? layer->config.partial_rotary_factor
                                                           : 1.0;
    return (int64_t)(share * (double)MN_SIZE(&layer->sizes, 'K'));
}

static mn_status check_turning(const mn_layer *layer) {
    const mn_layer_config *c = &layer->config;
    if (!c->use_rope) return MN_OK;
    const int64_t R = turning(layer);
    mn_status st = mn_layer_require(layer, R >= 2 && R % 2 == 0 && R <= MN_SIZE(&layer->sizes, 'K'),
                          "partial_rotary_factor", "leaves no even part of a head to turn");
    if (st == MN_OK) {
        st = mn_layer_require(layer, c->rope_type == ROPE_DEFAULT || c->rope_factor > 0.0,
                              "rope_factor", "must be positive");
    }
    if (st != MN_OK || c->rope_type == ROPE_DEFAULT || c->rope_type == ROPE_LINEAR) return st;
    st = mn_layer_require(layer, c->rope_original_context >= 1, "rope_original_context",
                          "must be at least 1");
    if (st != MN_OK) return st;
    if (c->rope_type == ROPE_YARN) {
        st = mn_layer_require(layer, c->rope_theta > 1.0, "rope_theta", "must be above 1 for yarn");
        if (st != MN_OK) return st;
        return mn_layer_require(layer, c->rope_beta_fast > c->rope_beta_slow, "rope_beta_fast",
                                "must lie above rope_beta_slow");
    }
    return mn_layer_require(layer, c->rope_high_freq_factor > c->rope_low_freq_factor,
                            "rope_high_freq_factor", "must lie above rope_low_freq_factor");
}

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
    MN_SIZE(s, 'C') = (H + 2 * J) * MN_SIZE(s, 'K');
    MN_SIZE(s, 'U') = layer->kind == MN_LAYER_attention && c->input_width ? c->input_width
                                                                          : layer->width;
    if (st != MN_OK || layer->kind != MN_LAYER_attention) return st;
    if (st == MN_OK) {
        st = mn_layer_require(layer, !c->fused_qkv || !(c->qk_rms_norm || c->qk_norm_whole ||
                                                        c->use_output_gate), "fused_qkv",
                              "goes without norms of queries and keys and without a gate");
    }
    if (st == MN_OK) {
        st = mn_layer_require(layer, c->fused_qkv != 2 || J == H, "fused_qkv",
                              "head after head needs as many key-value heads as heads");
    }
    if (st == MN_OK) {
        st = mn_layer_require(layer, !c->o_bias || c->output_multiplier == 1.0,
                              "output_multiplier", "goes without o_bias");
    }
    return st == MN_OK ? check_turning(layer) : st;
}

/* The pair of R / 2, counted on between pairs, that turns so often over the original context. */
static double pair_of(const mn_layer_config *c, double turns, int64_t R) {
    const double least = (double)c->rope_original_context / (2.0 * acos(-1.0) * turns);
    return (double)R * log(least) / (2.0 * log(c->rope_theta));
}

/* Yarn: pairs up to that of beta_fast turns stay, those from beta_slow on turn slower by the
 * factor, and between them it fades in. */
static double yarn_frequency(const mn_layer_config *c, double w, int64_t i, int64_t R) {
    const double low = fmax(floor(pair_of(c, c->rope_beta_fast, R)), 0.0);
    const double high = fmin(ceil(pair_of(c, c->rope_beta_slow, R)), (double)(R - 1));
    const double width = high > low ? high - low : 0.001;
    const double s = fmin(fmax(((double)i - low) / width, 0.0), 1.0);
    return (1.0 - s) * w + s * w / c->rope_factor;
}

/* What turned queries and keys are multiplied by. */
static double turned_scale(const mn_layer_config *c) {
    if (c->rope_type != ROPE_YARN) return 1.0;
    if (c->rope_attention_factor > 0.0) return c->rope_attention_factor;
    return c->rope_factor > 1.0 ? 0.1 * log(c->rope_factor) + 1.0 : 1.0;
}

/* Radians a token that pair i of R / 2 turns by. */
static double frequency(const mn_layer_config *c, int64_t i, int64_t R) {
    const double w = pow(c->rope_theta, -2.0 * (double)i / (double)R);
    if (c->rope_type == ROPE_DEFAULT) return w;
    if (c->rope_type == ROPE_LINEAR) return w / c->rope_factor;
    if (c->rope_type == ROPE_YARN) return yarn_frequency(c, w, i, R);
    const double turns = (double)c->rope_original_context * w / (2.0 * acos(-1.0));
    const double low = c->rope_low_freq_factor, high = c->rope_high_freq_factor;
    const double s = fmin(fmax((turns - low) / (high - low), 0.0), 1.0);
    return s * w + (1.0 - s) * w / c->rope_factor;
}

/* x cos + (second half, first half) (-sin, sin), by tables of the tokens at hand. */
static mn_tensor *turned_by_table(mn_forward *f, mn_tensor *x) {
    const bool apart = f->state && f->state->rows;    // else all rows have the same positions
    const int64_t B = apart ? x->shape[0] : 1, T = x->shape[1], R = x->shape[3], n = B * T * R;
    double *table = malloc((size_t)(2 * n) * sizeof *table);
    if (!table) return mn_tape_fail(f->tape, mn_fail(MN_ERR_MEMORY, "no memory for positions"));
    const double scale = turned_scale(&f->layer->config);
    for (int64_t i = 0; i < n; i++) {
        const int64_t pair = i % R % (R / 2), pos = mn_position_of(f, i / (T * R), i / R % T);
        const double angle = (double)pos * frequency(&f->layer->config, pair, R);
        table[i] = scale * cos(angle);
        table[n + i] = i % R < R / 2 ? -scale * sin(angle) : scale * sin(angle);
    }
    const int64_t shape[4] = { B, T, 1, R };
    mn_tensor *c = mn_tape_constant(f->tape, shape, table);
    mn_tensor *s = mn_tape_constant(f->tape, shape, table + n);
    free(table);
    mn_tensor *other = mn_tape_roll(f->tape, x, R / 2);
    return mn_tape_add(f->tape, mn_tape_multiply(f->tape, x, c),
                       mn_tape_multiply(f->tape, other, s));
}

static mn_tensor *turned_all(mn_forward *f, mn_tensor *y) {
    if (!y) return NULL;
    if (f->layer->config.rope_type != ROPE_DEFAULT) return turned_by_table(f, y);
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

static mn_tensor *turned(mn_forward *f, mn_tensor *x) {
    const int64_t K = MN_OF(f, 'K'), R = turning(f->layer);
    if (R == K) return turned_all(f, x);
    mn_tensor *part[2];
    mn_split_heads(f, x, (int64_t[]){ R, K - R }, 2, part);
    part[0] = turned_all(f, part[0]);
    return mn_tape_join(f->tape, part, 2);
}

/* The norm of every head by parameter `norm`. */
static mn_tensor *normed(mn_forward *f, mn_tensor *x, const char *norm) {
    mn_tensor *w = mn_use(f, norm);
    if (!w || !x) return x;
    if (!mn_is_contiguous(x)) x = mn_tape_join(f->tape, &x, 1);    // a part of a joint projection
    if (f->layer->config.norm_plus_one) w = mn_tape_affine(f->tape, w, 1.0, 1.0);
    const double eps = f->layer->config.qk_norm_eps;
    mn_run run;
    mn_rms_norm_args *args = mn_run_start(&run, f->tape, MN_OP_rms_norm);
    args->eps = eps != 0.0 ? eps : f->layer->norm_eps;
    mn_run_in(&run, "x", x);
    mn_run_in(&run, "w", w);
    mn_tensor *y = mn_run_out(&run, "y");
    mn_run_now(&run);
    return y;
}

/* The same norm over all heads at once. */
static mn_tensor *normed_whole(mn_forward *f, mn_tensor *x, const char *norm) {
    return f->layer->config.qk_norm_whole ? normed(f, x, norm) : x;
}

/* Whether a token is attended to by one operation, which reads its position when it runs: queries
 * and keys are given to it as they are. */
static bool by_position(const mn_forward *f) {
    const mn_layer_state *state = f->state;
    const int64_t K = MN_OF(f, 'K');
    return state && !state->rows && !state->ends && mn_tape_attends(f->tape, K, K);
}

static bool turns_first(const mn_forward *f) {
    return f->layer->config.use_rope && !by_position(f);
}

/* Heads one after the other, as far apart as they like. */
static mn_tensor *attended(mn_forward *f, double scale, mn_tensor *q, mn_tensor *k, mn_tensor *v) {
    const mn_layer_config *c = &f->layer->config;
    const int64_t R = c->use_rope ? turning(f->layer) : 0, width = MN_OF(f, 'J') * MN_OF(f, 'K');
    const mn_state_piece *keys = mn_state_extend(f->state, f->tape, "k", width, 0);
    const mn_state_piece *values = mn_state_extend(f->state, f->tape, "v", width, 0);
    double *inv_freq = malloc((size_t)(R / 2 + 1) * sizeof *inv_freq);
    if (!inv_freq) mn_tape_fail(f->tape, mn_fail(MN_ERR_MEMORY, "no memory for positions"));
    mn_tensor *o = NULL;
    if (keys && values && inv_freq) {
        for (int64_t i = 0; i < R / 2; i++) inv_freq[i] = frequency(c, i, R);
        const bool relu = f->layer->kind != MN_LAYER_attention;
        const mn_attend how = { keys->now, values->now, mn_min(keys->capacity, values->capacity),
                                relu ? 0 : c->window_size, R, scale, turned_scale(c), inv_freq,
                                relu, relu ? mn_eps_of(MN_OP_relu_attention) : 0.0 };
        o = mn_tape_attend(f->tape, &how, q, k, v);
    }
    free(inv_freq);
    return o;
}

/* (B,T,n,K), turned to its position in the sequence if `turns`. */
static mn_tensor *heads_of(mn_forward *f, mn_tensor *x, int64_t n, const char *weight,
                           const char *bias, const char *norm, bool turns) {
    mn_tensor *y = normed_whole(f, mn_project(f, x, weight, bias), norm);
    y = mn_tape_heads(f->tape, y, n);
    if (!f->layer->config.qk_norm_whole) y = normed(f, y, norm);
    return turns ? turned(f, y) : y;
}

/* With fused_qkv one projection makes all three, which are neither normed nor gated. */
static void split_fused(mn_forward *f, mn_tensor *x, mn_tensor **q, mn_tensor **k, mn_tensor **v) {
    mn_tape *tape = f->tape;
    const int64_t H = MN_OF(f, 'H'), J = MN_OF(f, 'J'), K = MN_OF(f, 'K');
    mn_tensor *wide = mn_project(f, x, "qkv_proj.weight", "qkv_proj.bias"), *part[3];
    const bool heads = f->layer->config.fused_qkv == 2;
    if (heads) {
        mn_split_heads(f, mn_tape_heads(tape, wide, H), (int64_t[]){ K, K, K }, 3, part);
    } else {
        mn_tape_split(tape, wide, (int64_t[]){ H * K, J * K, J * K }, 3, part);
        for (int i = 0; i < 3; i++) {
            part[i] = mn_tape_heads(tape, mn_tape_join(tape, part + i, 1), i ? J : H);
        }
    }
    const bool turns = turns_first(f);
    *q = turns ? turned(f, part[0]) : part[0];
    *k = turns ? turned(f, part[1]) : part[1];
    *v = part[2];
}

/* With use_output_gate q_proj makes a head's query and its gate, one after the other. */
static mn_tensor *query_of(mn_forward *f, mn_tensor *x, mn_tensor **gate) {
    const mn_layer_config *c = &f->layer->config;
    const int64_t H = MN_OF(f, 'H'), K = MN_OF(f, 'K');
    const bool gates = f->layer->kind == MN_LAYER_attention && c->use_output_gate;
    if (!gates) {
        return heads_of(f, x, H, "q_proj.weight", "q_proj.bias", "q_norm.weight", turns_first(f));
    }
    mn_tensor *part[2];
    mn_tensor *wide = mn_tape_heads(f->tape, mn_project(f, x, "q_proj.weight", "q_proj.bias"), H);
    mn_split_heads(f, wide, (int64_t[]){ K, K }, 2, part);
    *gate = part[1];
    mn_tensor *q = normed(f, part[0], "q_norm.weight");
    return turns_first(f) ? turned(f, q) : q;
}

static double scale_of(const mn_forward *f) {
    const mn_layer_config *c = &f->layer->config;
    const double scale = 1.0 / sqrt((double)MN_OF(f, 'K'));
    if (f->layer->kind != MN_LAYER_attention) return scale;
    return (c->attention_scale != 0.0 ? c->attention_scale : scale) *
           c->key_multiplier;    // of the scores: keys turn the same
}

/* By the operator, over all keys so far. */
static mn_tensor *all_at_once(mn_forward *f, double scale, mn_tensor *q, mn_tensor *k,
                              mn_tensor *v) {
    const bool softmax = f->layer->kind == MN_LAYER_attention;
    k = mn_state_append(f->state, f->tape, k, "k");
    v = mn_state_append(f->state, f->tape, v, "v");
    if (!k || !v) return NULL;
    mn_run run;
    void *args = mn_run_start(&run, f->tape, softmax ? MN_OP_attention : MN_OP_relu_attention);
    if (softmax) ((mn_attention_args *)args)->scale = scale;
    if (softmax) ((mn_attention_args *)args)->window = f->layer->config.window_size;
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
    return o;
}

static mn_tensor *forward(mn_forward *f, mn_tensor *x) {
    const mn_layer_config *c = &f->layer->config;
    const bool softmax = f->layer->kind == MN_LAYER_attention;
    const int64_t J = MN_OF(f, 'J');
    static const char *const first[] = { "q_proj.weight", "k_proj.weight", "v_proj.weight" };
    if (softmax && c->input_multiplier != 1.0) {
        x = mn_tape_affine(f->tape, x, c->input_multiplier, 0.0);
    }
    const bool fused = softmax && c->fused_qkv;
    if (!fused && !mn_use(f, "q_proj.bias")) mn_project_ahead(f, x, first, MN_COUNTOF(first));
    mn_tensor *gate = NULL, *q = NULL, *k = NULL, *v = NULL;
    if (fused) {
        split_fused(f, x, &q, &k, &v);
    } else {
        q = query_of(f, x, &gate);
        k = heads_of(f, x, J, "k_proj.weight", "k_proj.bias", "k_norm.weight", turns_first(f));
        v = heads_of(f, x, J, "v_proj.weight", "v_proj.bias", "", false);
    }
    if (!q || !k || !v) return NULL;
    const double scale = scale_of(f);
    mn_tensor *o = by_position(f) ? attended(f, scale, q, k, v) : all_at_once(f, scale, q, k, v);
    if (gate) o = mn_tape_gate(f->tape, MN_UNARY_SIGMOID, gate, o);
    if (softmax && c->output_multiplier != 1.0) {
        o = mn_tape_affine(f->tape, o, c->output_multiplier, 0.0);
    }
    return mn_project_out(f, mn_tape_flat(f->tape, o), "o_proj.weight", "o_proj.bias");
}

const mn_layer_family mn_family_attention = { derive, forward };
