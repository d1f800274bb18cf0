/* mamba.c - mamba2, log_linear_mamba2 and mamba1: a state space whose step depends on the token.
 *
 *   mamba2   z, (u, b, c), d = x W_in'      (u, b, c) = silu(conv(u, b, c) + bias)
 *            d = softplus(d + dt_bias)      clamped to dt_least .. dt_most where these are set
 *                                          g = -d e^A per head
 *            S = e^g S + b (d u)'           o = S'c + D u           H heads of width V, state K
 *            y = rms(o silu(z)) W_out'      over groups of H V / G numbers: the gate comes first,
 *                                           unless norm_before_gate; without rmsnorm o silu(z)
 *   mamba1   u, z = x W_in'                 u = silu(conv(u) + bias)
 *            r, b, c = u W_x'               d = softplus(r W_dt' + dt_bias) per channel
 *            S = e^(d A) S + d u b          A = -e^A_log per channel and state
 *            y = ((S c + D u) silu(z)) W_out'      with bcdt_norms r, b and c are normed
 *
 *   log_linear_mamba2   mamba2 whose o is read from sums over blocks of tokens, by weights
 *            softplus(L l) of each, l being H S more rows of x W_in'. Level 0 is the token p
 *            itself, level n > 0 the 2^(n-1) tokens in front of p's own block of so many, where
 *            bit n - 1 of p is set: all tokens together, nearer ones in smaller blocks (a Fenwick
 *            tree).
 *
 *            o = softplus(L l)_0 (c.b) d u + sum over n of softplus(L l)_n r_n S_n'c + D u
 *            S_n = e^(g + z_n) S_n + w_n b (d u)'
 *
 *            w_n (r_n) is 1 where bit n - 1 of p is clear (set), else 0, and z_n empties S_n where
 *            p is a multiple of 2^n: what is being gathered is not yet read.
 *
 * G groups of b and c serve H / G heads each, in turns (h belongs to group h G / H). mamba1 has one
 * key for all channels: "+ccq" treats it as one head. */
#include <stdlib.h>

#include "base/util.h"
#include "layers/family.h"

enum { LEVELS = 15 };    // of log_linear_mamba2, for 2^14 tokens

static mn_status derive_heads(mn_layer *layer, int64_t inner) {
    const mn_layer_config *c = &layer->config;
    mn_layer_sizes *s = &layer->sizes;
    int64_t P = c->head_dim;
    if (P == 0) P = c->num_heads ? inner / c->num_heads : mn_min(inner, 64);
    while (c->head_dim == 0 && c->num_heads == 0 && P > 1 && inner % P != 0) P--;
    mn_status st = mn_layer_require(layer, P >= 1 && inner % P == 0, "head_dim",
                                    "does not divide expand times the width");
    if (st != MN_OK) return st;
    const int64_t H = inner / P, G = c->n_groups, K = c->state_size;
    st = mn_layer_require(layer, c->num_heads == 0 || c->num_heads == H, "num_heads",
                          "times head_dim is not expand times the width");
    if (st == MN_OK) {
        st = mn_layer_require(layer, G >= 1 && H % G == 0, "n_groups", "does not divide the heads");
    }
    if (st == MN_OK) {
        st = mn_layer_require(layer, !c->norm_before_gate || G == 1, "norm_before_gate",
                              "goes with one group only");
    }
    if (st == MN_OK) {
        st = mn_layer_require(layer, c->dt_least >= 0.0 &&
                              (c->dt_most == 0.0 || c->dt_most >= c->dt_least), "dt_most",
                              "must not lie below dt_least, nor that below 0");
    }
    layer->config.num_heads = H;
    layer->config.head_dim = P;
    MN_SIZE(s, 'H') = H;
    MN_SIZE(s, 'V') = P;
    MN_SIZE(s, 'G') = G;
    MN_SIZE(s, 'I') = inner;
    MN_SIZE(s, 'C') = inner + 2 * G * K;
    MN_SIZE(s, 'E') = 2 * inner + 2 * G * K + H;
    if (layer->kind != MN_LAYER_log_linear_mamba2) return st;
    MN_SIZE(s, 'S') = LEVELS;
    MN_SIZE(s, 'E') += H * LEVELS;
    return st;
}

static mn_status derive(mn_layer *layer, int64_t context) {
    (void)context;
    const mn_layer_config *c = &layer->config;
    mn_layer_sizes *s = &layer->sizes;
    const bool given_inner = layer->kind == MN_LAYER_mamba2 && c->inner_size > 0;
    const double inner = given_inner ? (double)c->inner_size : c->expand * (double)layer->width;
    mn_status st = mn_layer_require(layer, inner >= 1.0 && inner < 1e9, "expand",
                                    "leaves no channels, or too many");
    if (st == MN_OK) {
        st = mn_layer_require(layer, c->state_size >= 1 && c->state_size <= 65536, "state_size",
                              "must lie in 1 .. 65536");
    }
    if (st == MN_OK) {
        st = mn_layer_require(layer, c->conv_kernel >= 1, "conv_kernel", "must be at least 1");
    }
    if (st == MN_OK) {
        st = mn_layer_require(layer, c->n_groups <= 65536 && c->dt_rank <= 65536, "n_groups",
                              "and dt_rank must lie below 65536");
    }
    if (st == MN_OK && layer->kind == MN_LAYER_mamba2) {
        st = mn_layer_require(layer, !c->use_bias || c->output_multiplier == 1.0,
                              "output_multiplier", "goes without use_bias");
    }
    if (st != MN_OK) return st;
    MN_SIZE(s, 'K') = c->state_size;
    MN_SIZE(s, 'W') = c->conv_kernel;
    if (layer->kind != MN_LAYER_mamba1) return derive_heads(layer, (int64_t)inner);
    MN_SIZE(s, 'H') = 1;
    MN_SIZE(s, 'V') = (int64_t)inner;
    MN_SIZE(s, 'R') = c->dt_rank ? c->dt_rank : mn_ceil_div(layer->width, 16);
    layer->config.dt_rank = MN_SIZE(s, 'R');
    MN_SIZE(s, 'P') = MN_SIZE(s, 'R') + 2 * c->state_size;
    return MN_OK;
}

/* The parameter's name if the layer has it. */
static const char *given(const mn_forward *f, const char *name) {
    return mn_use(f, name) ? name : NULL;
}

/* A part of a split as numbers that lie side by side. */
static mn_tensor *gathered(mn_forward *f, mn_tensor *part) {
    return mn_tape_join(f->tape, &part, 1);
}

/* ---- mamba2 ---------------------------------------------------------------------------------- */

typedef struct scan_inputs {
    mn_tensor *u, *b, *c, *d;    // (B,T,H,V), (B,T,H,K) twice, (B,T,1,H)
    mn_tensor *levels;           // (B,T,H,S) of log_linear_mamba2, else NULL
} scan_inputs;

static mn_tensor *group_heads(mn_forward *f, mn_tensor *x) {
    const int64_t G = MN_OF(f, 'G'), times = MN_OF(f, 'H') / G;
    if (!f->layer->ccq) return mn_tape_heads(f->tape, x, G);    // heads share them in the operator
    x = mn_tape_heads(f->tape, times == 1 ? gathered(f, x) : x, G);
    return mn_tape_repeat(f->tape, x, times);
}

/* Positions of the tokens of B rows, which all rows share where B is 1; to be freed. */
static int64_t *positions_of(mn_forward *f, int64_t B, int64_t T) {
    int64_t *places = malloc((size_t)(B * T) * sizeof *places);
    if (!places) mn_tape_fail(f->tape, mn_fail(MN_ERR_MEMORY, "no memory for positions"));
    for (int64_t i = 0; places && i < B * T; i++) {
        places[i] = mn_position_of(f, i / T, i % T);
        if (places[i] >> (LEVELS - 1) == 0) continue;
        mn_tape_fail(f->tape, mn_fail(MN_ERR_ARGUMENT, "token %lld of a sequence: "
                                      "log_linear_mamba2 has levels for %d",
                                      (long long)places[i] + 1, 1 << (LEVELS - 1)));
        free(places);
        return NULL;
    }
    return places;
}

/* Where a level is written, is read, and what its log decay is less: (B,T,1,1) each. */
typedef struct level_masks {
    mn_tensor *writes, *reads, *empties;
    bool any_read;
} level_masks;

static level_masks masks_of(mn_forward *f, const int64_t *places, int64_t B, int64_t T, int level) {
    enum { EMPTY = -64 };    // e^-64 of what was there is left, 1e-28
    level_masks m = { 0 };
    double *values = malloc((size_t)(3 * B * T) * sizeof *values);
    if (!values) mn_tape_fail(f->tape, mn_fail(MN_ERR_MEMORY, "no memory for levels"));
    if (!values) return m;
    double *reads = values + B * T, *empties = reads + B * T;
    for (int64_t i = 0; i < B * T; i++) {
        const bool read = places[i] >> (level - 1) & 1;
        values[i] = !read;
        reads[i] = read;
        empties[i] = places[i] & (((int64_t)1 << level) - 1) ? 0 : EMPTY;
        m.any_read |= read;
    }
    const int64_t shape[4] = { B, T, 1, 1 };
    m.writes = mn_tape_constant(f->tape, shape, values);
    m.reads = mn_tape_constant(f->tape, shape, reads);
    m.empties = mn_tape_constant(f->tape, shape, empties);
    free(values);
    return m;
}

/* The weights of each level, (B,T,H,1), from those of all. */
static void split_levels(mn_forward *f, mn_tensor *all, mn_tensor **weight) {
    enum { HALF = 8 };
    int64_t ones[HALF];
    mn_tensor *half[2];
    for (int n = 0; n < HALF; n++) ones[n] = 1;
    mn_split_heads(f, all, (int64_t[]){ HALF, LEVELS - HALF }, 2, half);
    mn_split_heads(f, half[0], ones, HALF, weight);
    mn_split_heads(f, half[1], ones, LEVELS - HALF, weight + HALF);
}

/* o of log_linear_mamba2 from b, c, values v (B,T,H,V) and log decays g (B,T,1,H). */
static mn_tensor *read_levels(mn_forward *f, const scan_inputs *in, mn_tensor *v, mn_tensor *g) {
    static const char *const pieces[LEVELS] = {
        NULL, "level1", "level2", "level3", "level4", "level5", "level6", "level7", "level8",
        "level9", "level10", "level11", "level12", "level13", "level14" };
    mn_tape *tape = f->tape;
    const int64_t H = MN_OF(f, 'H'), T = v->shape[1];
    const int64_t B = f->state && f->state->rows ? v->shape[0] : 1;
    mn_tensor *weight[LEVELS];
    int64_t *places = positions_of(f, B, T);
    if (!places || !in->levels || !in->b || !in->c) return free(places), NULL;
    split_levels(f, in->levels, weight);
    mn_tensor *own = mn_row_sums(tape, mn_tape_multiply(tape, gathered(f, in->c), in->b), 1.0);
    if (own && own->shape[2] != H) own = mn_tape_repeat(tape, own, H / own->shape[2]);
    own = mn_tape_multiply(tape, own, weight[0]);
    mn_tensor *o = mn_tape_multiply(tape, v, own);
    for (int n = 1; n < LEVELS && o; n++) {
        const level_masks m = masks_of(f, places, B, T, n);
        if (!m.any_read && !f->state) break;    // nor is a higher one
        mn_tensor *level = mn_sum_read(f, in->c, in->b, mn_tape_multiply(tape, v, m.writes),
                                       mn_tape_add(tape, g, m.empties), MN_DECAY_TOKEN, 1.0,
                                       pieces[n]);
        mn_tensor *by = mn_tape_multiply(tape, weight[n], m.reads);
        o = mn_tape_add(tape, o, mn_tape_multiply(tape, level, by));
    }
    free(places);
    return o;
}

static mn_tensor *state_space(mn_forward *f, const scan_inputs *in) {
    mn_tape *tape = f->tape;
    const int64_t H = MN_OF(f, 'H');
    mn_tensor *rate = mn_tape_unary(tape, MN_UNARY_NEG_EXP, mn_use(f, "A_log"));
    mn_tensor *v = mn_tape_multiply(tape, in->u, mn_tape_heads(tape, in->d, H));
    mn_tensor *g = mn_tape_multiply(tape, in->d, rate), *o;
    if (!v || !g) return NULL;
    if (in->levels) o = read_levels(f, in, v, g);
    else o = mn_sum_read(f, in->c, in->b, v, g, MN_DECAY_TOKEN, 1.0, "memory");
    mn_tensor *D = mn_use_as(f, "D", H, f->layer->config.D_has_hdim ? MN_OF(f, 'V') : 1);
    /* a session's decoding puts the product and the sum together by itself */
    if (!f->state && !in->levels) return mn_tape_add_scaled(tape, o, in->u, D, v);
    return mn_tape_add(tape, o, mn_tape_multiply(tape, in->u, D));
}

static mn_tensor *gate_and_norm(mn_forward *f, mn_tensor *o, mn_tensor *z) {
    if (!f->layer->config.rmsnorm) return mn_tape_gate(f->tape, MN_UNARY_SILU, z, o);
    z = gathered(f, z);
    if (!o || !z) return NULL;
    mn_run run;
    mn_rms_norm_gated_args *args = mn_run_start(&run, f->tape, MN_OP_rms_norm_gated);
    args->eps = f->layer->norm_eps;
    args->order = !f->layer->config.norm_before_gate;
    args->groups = MN_OF(f, 'G');
    mn_run_in(&run, "x", o);
    mn_run_in(&run, "z", z);
    mn_run_in(&run, "w", mn_use(f, "norm.weight"));
    mn_tensor *y = mn_run_out(&run, "y");
    mn_run_now(&run);
    return y;
}

static mn_tensor *clamped(mn_forward *f, mn_tensor *d) {
    const double low = f->layer->config.dt_least, high = f->layer->config.dt_most;
    if (low > 0.0) d = mn_tape_at_least(f->tape, d, low);
    if (high == 0.0) return d;
    d = mn_tape_at_least(f->tape, mn_tape_affine(f->tape, d, -1.0, 0.0), -high);
    return mn_tape_affine(f->tape, d, -1.0, 0.0);
}

/* The parts of the projection times their multipliers. */
static mn_tensor *multiplied(mn_forward *f, mn_tensor *wide) {
    const mn_layer_config *c = &f->layer->config;
    const int64_t I = MN_OF(f, 'I'), GK = MN_OF(f, 'G') * MN_OF(f, 'K'), E = MN_OF(f, 'E');
    const double by[] = { c->z_multiplier, c->x_multiplier, c->b_multiplier, c->c_multiplier,
                          c->dt_multiplier };
    const int64_t end[] = { I, 2 * I, 2 * I + GK, 2 * I + 2 * GK, E };
    bool any = false;
    for (size_t i = 0; i < MN_COUNTOF(by); i++) any |= by[i] != 1.0;
    if (!any) return wide;
    double *values = malloc((size_t)E * sizeof *values);
    if (!values) return mn_tape_fail(f->tape, mn_fail(MN_ERR_MEMORY, "no memory for multipliers"));
    for (int64_t at = 0, part = 0; at < E; at++) {
        while (at >= end[part]) part++;
        values[at] = by[part];
    }
    mn_tensor *factors = mn_tape_constant(f->tape, (int64_t[]){ 1, 1, 1, E }, values);
    free(values);
    return mn_tape_multiply(f->tape, wide, factors);
}

static mn_tensor *forward2(mn_forward *f, mn_tensor *x) {
    mn_tape *tape = f->tape;
    const int64_t H = MN_OF(f, 'H'), I = MN_OF(f, 'I'), GK = MN_OF(f, 'G') * MN_OF(f, 'K');
    const mn_layer_config *config = &f->layer->config;
    const bool levels = f->layer->kind == MN_LAYER_log_linear_mamba2;
    const double input = levels ? 1.0 : config->input_multiplier;
    const double output = levels ? 1.0 : config->output_multiplier;
    if (input != 1.0) x = mn_tape_affine(tape, x, input, 0.0);
    mn_tensor *wide = mn_project(f, x, "in_proj.weight", given(f, "in_proj.bias"));
    if (!levels) wide = multiplied(f, wide);
    mn_tensor *part[4], *ubc[3];
    mn_tape_split(tape, wide, (int64_t[]){ I, I + 2 * GK, H, H * LEVELS }, levels ? 4 : 3, part);
    mn_tensor *mixed = mn_short_conv(f, part[1], "conv1d.weight", given(f, "conv1d.bias"), 1,
                                     "conv");
    mn_tape_split(tape, mixed, (int64_t[]){ I, GK, GK }, 3, ubc);
    scan_inputs in = { .u = mn_tape_heads(tape, ubc[0], H), .b = group_heads(f, ubc[1]) };
    in.c = mn_ccq_query(f, x, group_heads(f, ubc[2]), in.b);
    in.d = mn_tape_add(tape, part[2], mn_use(f, "dt_bias"));
    in.d = clamped(f, mn_tape_unary(tape, MN_UNARY_SOFTPLUS, in.d));
    if (levels) {
        mn_tensor *l = mn_tape_heads(tape, gathered(f, part[3]), H);
        l = mn_tape_multiply(tape, l, mn_use_as(f, "L", H, LEVELS));
        in.levels = mn_tape_unary(tape, MN_UNARY_SOFTPLUS, l);
    }
    mn_tensor *o = mn_tape_flat(tape, state_space(f, &in));
    o = gate_and_norm(f, o, part[0]);
    if (output != 1.0) o = mn_tape_affine(tape, o, output, 0.0);
    return mn_project_out(f, o, "out_proj.weight", given(f, "out_proj.bias"));
}

/* ---- mamba1 ---------------------------------------------------------------------------------- */

static mn_tensor *forward1(mn_forward *f, mn_tensor *x) {
    mn_tape *tape = f->tape;
    const int64_t V = MN_OF(f, 'V'), K = MN_OF(f, 'K'), R = MN_OF(f, 'R');
    mn_tensor *wide = mn_project(f, x, "in_proj.weight", given(f, "in_proj.bias"));
    mn_tensor *uz[2], *rbc[3];
    mn_tape_split(tape, wide, (int64_t[]){ V, V }, 2, uz);
    mn_tensor *u = mn_short_conv(f, uz[0], "conv1d.weight", given(f, "conv1d.bias"), 1, "conv");
    mn_tensor *narrow = mn_project(f, u, "x_proj.weight", NULL);
    mn_tape_split(tape, narrow, (int64_t[]){ R, K, K }, 3, rbc);
    if (f->layer->config.bcdt_norms) {
        static const char *const norms[] = { "dt_norm.weight", "b_norm.weight", "c_norm.weight" };
        for (int i = 0; i < 3; i++) {
            rbc[i] = mn_norm_gate(f, gathered(f, rbc[i]), NULL, norms[i], 0);
        }
    }
    mn_tensor *b = f->layer->ccq ? gathered(f, rbc[1]) : rbc[1];
    mn_tensor *c = mn_ccq_query(f, x, rbc[2], b);
    mn_tensor *d = mn_project(f, rbc[0], "dt_proj.weight", NULL);
    if (!c || !d) return NULL;
    mn_run run;
    mn_scan_args *args = mn_run_start(&run, tape, MN_OP_scan);
    args->softplus = 1;
    mn_run_in(&run, "u", u);
    mn_run_in(&run, "dt", d);
    mn_run_in(&run, "A", mn_tape_unary(tape, MN_UNARY_NEG_EXP, mn_use(f, "A_log")));
    mn_run_in(&run, "Bm", b);
    mn_run_in(&run, "Cm", c);
    mn_run_in(&run, "D", mn_use(f, "D"));
    mn_run_in(&run, "z", uz[1]);
    mn_run_in(&run, "dt_bias", mn_use(f, "dt_proj.bias"));
    mn_state_bind(f->state, &run, "h0", "h", "memory", x->shape[0] * V * K);
    mn_tensor *y = mn_run_out(&run, "y");
    mn_run_now(&run);
    return mn_project_out(f, y, "out_proj.weight", given(f, "out_proj.bias"));
}

static mn_tensor *forward(mn_forward *f, mn_tensor *x) {
    return f->layer->kind == MN_LAYER_mamba1 ? forward1(f, x) : forward2(f, x);
}

const mn_layer_family mn_family_mamba = { derive, forward };
