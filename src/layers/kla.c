/* kla.c - kla: Kalman linear attention, a Gaussian per channel and slot that a diffusion
 * widens between tokens.
 *
 *   z, gate = x W_in'    z = silu(conv(z) + b)    code of v, code of log variance, k, q = z W_s'
 *   v = z, or its code, lifted if low-rank        prec = 1 / (softplus(log variance) + obs_var_min)
 *   k, q to unit length over the slots
 *   lam = lam / (a^2 + p lam) + prec k^2          eta = a eta / (a^2 + p lam) + prec v k
 *   y = sum_s q eta / lam                         yvar = sum_s q^2 / lam
 *   out = ((y + skip z) silu(gate)) W_out'        variance of out = (yvar silu(gate)^2) (W_out^2)'
 *
 * a and p come from delta, lambda_log and process_noise alone. V is the inner width, K the slots,
 * R and Q the ranks of v and of the variance (0: not low-rank). */
#include "layers/family.h"

enum { FULL = 0, CONV = -1, DT = -2 };                 // value_rank and var_rank that are no rank
enum { NOISE_LEARNED, NOISE_FIXED, NOISE_ZERO };       // process_noise
enum { SKIP_SCALAR, SKIP_VECTOR, SKIP_NONE };          // skip

/* The rank of a low-rank code; 0 when there is none. */
static int64_t rank_of(const mn_layer *layer, int64_t option) {
    const int64_t dt = layer->config.dt_rank;
    if (option == DT) return dt ? dt : (layer->width + 7) / 8;
    return option > 0 ? option : 0;
}

static int64_t code_width(int64_t option, int64_t rank, int64_t inner) {
    return option == FULL ? inner : option == CONV ? 0 : rank;
}

static mn_status check(const mn_layer *layer) {
    const mn_layer_config *c = &layer->config;
    mn_status st = mn_layer_require(layer, c->d_state >= 1, "d_state", "must be at least 1");
    if (st == MN_OK) {
        st = mn_layer_require(layer, MN_SIZE(&layer->sizes, 'V') >= 1, "expand",
                              "leaves no inner width");
    }
    if (st == MN_OK) {
        st = mn_layer_require(layer, c->var_rank != CONV, "var_rank",
                              "must be full, dt or a number");
    }
    if (st == MN_OK) {
        st = mn_layer_require(layer, c->obs_var_min > 0.0, "obs_var_min", "must be positive");
    }
    if (st == MN_OK) {
        st = mn_layer_require(layer, c->obs_var_max == 0.0 || c->obs_var_max >= c->obs_var_min,
                              "obs_var_max", "must be 0 (none) or at least obs_var_min");
    }
    if (st == MN_OK) {
        st = mn_layer_require(layer, c->clip_value >= 0.0, "clip_value",
                              "must be 0 (none) or positive");
    }
    return st;
}

static mn_status derive(mn_layer *layer, int64_t context) {
    (void)context;
    const mn_layer_config *c = &layer->config;
    mn_layer_sizes *s = &layer->sizes;
    const double inner = c->expand * (double)layer->width;
    const bool fits = inner >= 1.0 && inner < 1e15 && c->d_state < INT32_MAX;
    const int64_t V = fits ? (int64_t)inner : 0;
    MN_SIZE(s, 'V') = V;
    mn_status st = check(layer);
    if (st != MN_OK) return st;
    MN_SIZE(s, 'K') = c->d_state;
    MN_SIZE(s, 'W') = c->conv_size;
    MN_SIZE(s, 'R') = rank_of(layer, c->value_rank);
    MN_SIZE(s, 'Q') = rank_of(layer, c->var_rank);
    MN_SIZE(s, 'I') = c->use_gate ? 2 * V : V;
    MN_SIZE(s, 'O') = code_width(c->value_rank, MN_SIZE(s, 'R'), V) +
                      code_width(c->var_rank, MN_SIZE(s, 'Q'), V) + 2 * c->d_state;
    MN_SIZE(s, 'H') = 1;                                        // what "+ccq" goes by
    MN_SIZE(s, 'X') = c->skip == SKIP_VECTOR ? V : 0;
    MN_SIZE(s, 'Y') = c->skip == SKIP_SCALAR;
    return MN_OK;
}

/* min(x, high), with gradient 0 where high binds. */
static mn_tensor *at_most(mn_tape *tape, mn_tensor *x, double high) {
    x = mn_tape_at_least(tape, mn_tape_affine(tape, x, -1.0, 0.0), -high);
    return mn_tape_affine(tape, x, -1.0, 0.0);
}

/* ---- what is observed ------------------------------------------------------------------------ */

typedef struct sensed {
    mn_tensor *v, *prec, *k, *q;
} sensed;

/* The part is copied out of its projection first: norms work on whole rows side by side. */
static mn_tensor *key_of(mn_forward *f, mn_tensor *part) {
    const mn_layer_config *c = &f->layer->config;
    mn_tensor *k = mn_tape_join(f->tape, &part, 1);
    if (c->use_qk_norm) k = mn_unit(f, k, 0, 1e-12);
    if (c->clip_value == 0.0) return k;
    return at_most(f->tape, mn_tape_at_least(f->tape, k, -c->clip_value), c->clip_value);
}

/* Whether functions that follow each other are one: not where a session goes token by token, whose
 * decoding puts them together by itself. */
static bool goes_at_once(const mn_forward *f) {
    return !f->state;
}

/* 1 / (softplus(log variance) + obs_var_min), the variance at most obs_var_max. */
static mn_tensor *precision_of(mn_forward *f, mn_tensor *raw) {
    const mn_layer_config *c = &f->layer->config;
    mn_tape *tape = f->tape;
    if (goes_at_once(f) && c->obs_var_max == 0.0) {
        return mn_tape_precision(tape, raw, c->obs_var_min);
    }
    mn_tensor *variance = mn_tape_unary(tape, MN_UNARY_SOFTPLUS, raw);
    variance = mn_tape_affine(tape, variance, 1.0, c->obs_var_min);
    if (c->obs_var_max > 0.0) variance = at_most(tape, variance, c->obs_var_max);
    return mn_tape_unary(tape, MN_UNARY_RECIPROCAL, variance);
}

static sensed sense(mn_forward *f, mn_tensor *z) {
    const mn_layer_config *c = &f->layer->config;
    const int64_t V = MN_OF(f, 'V'), K = MN_OF(f, 'K');
    const int64_t all[4] = { code_width(c->value_rank, MN_OF(f, 'R'), V),
                             code_width(c->var_rank, MN_OF(f, 'Q'), V), K, K };
    const int first = all[0] == 0;                     // v may have no code
    mn_tensor *parts[4] = { NULL };
    mn_tape_split(f->tape, mn_project(f, z, "sensor_proj.weight", NULL), all + first, 4 - first,
                  parts + first);
    sensed s = { .v = first ? z : parts[0], .prec = parts[1] };
    if (mn_use(f, "value_expand.weight")) s.v = mn_project(f, s.v, "value_expand.weight", NULL);
    if (mn_use(f, "var_expand.weight")) s.prec = mn_project(f, s.prec, "var_expand.weight", NULL);
    s.prec = precision_of(f, s.prec);
    s.k = key_of(f, parts[2]);
    s.q = key_of(f, parts[3]);
    return s;
}

/* ---- dynamics -------------------------------------------------------------------------------- */

/* The same noise for every cell. */
static mn_tensor *constant_noise(mn_forward *f, double value) {
    return mn_filled(f, (int64_t[]){ 1, 1, MN_OF(f, 'V'), MN_OF(f, 'K') }, value);
}

/* Without noise p is 1e-12 while the operator keeps it at 1e-7 or more; the result is linear in p,
 * so it is scaled. */
static void dynamics(mn_forward *f, mn_tensor **a, mn_tensor **p) {
    const mn_layer_config *c = &f->layer->config;
    mn_tensor *noise = mn_use(f, "process_noise");
    if (!noise) noise = constant_noise(f, c->process_noise == NOISE_ZERO ? 1e-7 : 0.01);
    if (noise && c->clip_value > 0.0) noise = at_most(f->tape, noise, c->clip_value);
    if (!noise) return;
    mn_run run;
    mn_kla_discretise_args *args = mn_run_start(&run, f->tape, MN_OP_kla_discretise);
    args->mode = (int)c->discretisation;
    run.call->V = MN_OF(f, 'V');
    run.call->K = MN_OF(f, 'K');
    mn_run_in(&run, "delta", mn_use(f, "delta"));
    mn_run_in(&run, "lambda_log", mn_use(f, "lambda_log"));
    mn_run_in(&run, "process_noise", noise);
    *a = mn_run_out(&run, "abar");
    *p = mn_run_out(&run, "pbar");
    mn_run_now(&run);
    if (c->process_noise == NOISE_ZERO) *p = mn_tape_affine(f->tape, *p, 1e-5, 0.0);
}

/* ---- forward --------------------------------------------------------------------------------- */

static mn_tensor *filter(mn_forward *f, const sensed *s, mn_tensor **yvar) {
    mn_tensor *a = NULL, *p = NULL;
    dynamics(f, &a, &p);
    if (!a || !p || !s->v || !s->prec || !s->k || !s->q) return NULL;
    const int64_t cells = s->v->shape[0] * MN_OF(f, 'V') * MN_OF(f, 'K');
    mn_run run;
    mn_moebius_args *args = mn_run_start(&run, f->tape, MN_OP_moebius);
    args->from_prior = (int)f->layer->config.decode_from_prior;
    mn_run_in(&run, "v", s->v);
    mn_run_in(&run, "prec", s->prec);
    mn_run_in(&run, "k", s->k);
    mn_run_in(&run, "q", s->q);
    mn_run_in(&run, "a", a);
    mn_run_in(&run, "p", p);
    mn_state_bind(f->state, &run, "lam0", "lam", "precision", cells);
    mn_state_bind(f->state, &run, "eta0", "eta", "information", cells);
    mn_tensor *y = mn_run_out(&run, "y");
    if (f->variance || f->wants_output_variance) *yvar = mn_run_out(&run, "yvar");
    mn_run_now(&run);
    mn_tell(f, "v", s->v);
    mn_tell(f, "prec", s->prec);
    mn_tell(f, "k", s->k);
    mn_tell(f, "q", s->q);
    mn_tell(f, "a", a);
    mn_tell(f, "p", p);
    mn_tell(f, "y", y);
    return y;
}

static mn_tensor *add_skip(mn_forward *f, mn_tensor *y, mn_tensor *z) {
    const int64_t skip = f->layer->config.skip;
    if (skip == SKIP_NONE) return y;
    mn_tensor *weight = mn_use_as(f, "lambda_skip", 1, skip == SKIP_VECTOR ? MN_OF(f, 'V') : 1);
    if (goes_at_once(f)) return mn_tape_add_scaled(f->tape, y, z, weight, NULL);
    return mn_tape_add(f->tape, y, mn_tape_multiply(f->tape, z, weight));
}

/* (B,T,1,D): yvar through the squares of gate and output projection. */
static mn_tensor *output_variance(mn_forward *f, mn_tensor *yvar, mn_tensor *open) {
    mn_tape *tape = f->tape;
    if (open) yvar = mn_tape_multiply(tape, mn_tape_multiply(tape, yvar, open), open);
    mn_tensor *squares = mn_tape_unary(tape, MN_UNARY_SQUARE, mn_use(f, "out_proj.weight"));
    return mn_tape_linear(tape, yvar, squares, NULL);
}

static mn_tensor *forward(mn_forward *f, mn_tensor *x) {
    const mn_layer_config *c = &f->layer->config;
    const int64_t V = MN_OF(f, 'V');
    mn_tape *tape = f->tape;
    mn_tensor *parts[2] = { mn_project(f, x, "in_proj.weight", NULL), NULL };
    if (c->use_gate) mn_tape_split(tape, parts[0], (int64_t[]){ V, V }, 2, parts);
    mn_tensor *z = parts[0], *open = NULL, *yvar = NULL;
    z = c->conv_size ? mn_short_conv(f, z, "conv.weight", "conv.bias", 1, "conv")
                     : mn_tape_unary(tape, MN_UNARY_SILU, z);
    sensed s = sense(f, z);
    s.q = mn_ccq_query(f, x, s.q, s.k);
    mn_tensor *y = add_skip(f, filter(f, &s, &yvar), z);
    mn_tell_variance(f, yvar);
    const bool apart = f->wants_output_variance || !goes_at_once(f);
    if (c->use_gate && apart) open = mn_tape_unary(tape, MN_UNARY_SILU, parts[1]);
    if (c->use_gate) mn_tell(f, "gate", parts[1]);
    if (open) y = mn_tape_multiply(tape, y, open);
    else if (c->use_gate) y = mn_tape_gate(tape, MN_UNARY_SILU, parts[1], y);
    if (f->wants_output_variance) f->output_variance = output_variance(f, yvar, open);
    return mn_project_out(f, y, "out_proj.weight", NULL);
}

const mn_layer_family mn_family_kla = { derive, forward };
