/* programs.c - see programs.def: the operators and tape functions of the layers that the names
 * stand for, on the tensors of a golden file. */
#include <math.h>
#include <string.h>

#include "cli/check/program.h"
#include "layers/family.h"

static mn_tensor *sum_of(mn_program *p, mn_tensor *q, mn_tensor *k, mn_tensor *v, mn_tensor *g,
                         mn_decay decay, double scale, mn_tensor *state0, mn_tensor **state) {
    *state = NULL;
    if (!q || !k || !v) return NULL;
    mn_run run;
    mn_additive_args *args = mn_run_start(&run, p->tape, MN_OP_additive);
    args->decay = g ? decay : MN_DECAY_NONE;
    args->scale = scale;
    mn_run_in(&run, "q", q);
    mn_run_in(&run, "k", k);
    mn_run_in(&run, "v", v);
    if (g) mn_run_in(&run, "g", g);
    if (state0) mn_run_in(&run, "state0", state0);
    mn_tensor *o = mn_run_out(&run, "o");
    *state = mn_run_out(&run, "state");
    mn_run_now(&run);
    return o;
}

/* Scores of M slots in each of H heads (B,T,H,M), as gsa.c makes them. */
static mn_tensor *slot_scores(mn_program *p, mn_tensor *q, mn_tensor *k, mn_tensor *s,
                              mn_tensor *g, mn_tensor *state0, mn_tensor **state) {
    mn_tape *tape = p->tape;
    const double scale = mn_program_number(p, "scale", 1.0);
    *state = NULL;
    if (!q || !k || !s || !g) return NULL;
    mn_run run;
    mn_additive_column_args *args = mn_run_start(&run, tape, MN_OP_additive_column);
    args->scale = scale;
    mn_run_in(&run, "q", q);
    mn_run_in(&run, "k", k);
    mn_run_in(&run, "v", s);
    mn_run_in(&run, "g", g);
    if (state0) mn_run_in(&run, "state0", state0);
    mn_tensor *o = mn_run_out(&run, "o");
    *state = mn_run_out(&run, "state");
    mn_run_now(&run);
    return o;
}

/* The two memories of gsa.c, J of each for H query heads. */
static void gated_slots(mn_program *p) {
    mn_tape *tape = p->tape;
    const int64_t H = mn_program_size(p, "q", 2), K = mn_program_size(p, "q", 3);
    const int64_t J = mn_program_size(p, "k", 2), M = mn_program_size(p, "s", 3);
    const int64_t V = mn_program_size(p, "v", 3), times = H / J;
    const mn_program_layout keys = { J, K, M, times, true, false, 0 };
    const mn_program_layout values = { J, M, V, times, false, false, 0 };
    mn_tensor *q = mn_program_in(p, "q"), *k = mn_tape_repeat(tape, mn_program_in(p, "k"), times);
    mn_tensor *v = mn_tape_repeat(tape, mn_program_in(p, "v"), times);
    mn_tensor *s = mn_tape_repeat(tape, mn_program_in(p, "s"), times);
    mn_tensor *g = mn_tape_repeat(tape, mn_program_in(p, "g"), times), *hk, *hv;
    mn_tensor *z = slot_scores(p, q, k, s, g, mn_program_state_in(p, "hk0", keys), &hk);
    z = mn_tape_softmax(tape, z);
    mn_tensor *o = sum_of(p, z, s, v, g, MN_DECAY_CHANNEL, 1.0,
                          mn_program_state_in(p, "hv0", values), &hv);
    mn_program_out(p, "o", o);
    mn_program_state_out(p, "hk", hk, keys);
    mn_program_state_out(p, "hv", hv, values);
}

/* The gates of hgrn2.c and its sum. */
static void forget_gates(mn_program *p) {
    mn_tape *tape = p->tape;
    mn_tensor *q = mn_program_in(p, "q"), *gate = mn_program_in(p, "f"), *state;
    mn_tensor *v = mn_program_in(p, "v"), *bound = mn_program_odds_in(p, "lb");
    const mn_program_layout plain = { 1, 1, 1, 1, false, false, 0 };
    if (bound) {
        mn_tensor *not = mn_tape_unary(tape, MN_UNARY_SOFTPLUS, mn_tape_affine(tape, gate, -1, 0));
        mn_tensor *rise = mn_tape_unary(tape, MN_UNARY_SOFTPLUS, mn_tape_add(tape, not, bound));
        gate = mn_tape_add(tape, gate, rise);
    }
    mn_tensor *g = mn_tape_unary(tape, MN_UNARY_LOGSIGMOID, gate);
    mn_tensor *k = mn_tape_unary(tape, MN_UNARY_SIGMOID, mn_tape_affine(tape, gate, -1.0, 0.0));
    mn_tensor *o = sum_of(p, q, k, v, g, MN_DECAY_CHANNEL, mn_program_number(p, "scale", 1.0),
                          mn_program_state_in(p, "state0", plain), &state);
    mn_program_out(p, "o", o);
    mn_program_state_out(p, "state", state, plain);
}

static mn_tensor *attend(mn_program *p, mn_tensor *q, mn_tensor *k, mn_tensor *v) {
    if (!q || !k || !v) return NULL;
    mn_run run;
    mn_attention_args *args = mn_run_start(&run, p->tape, MN_OP_attention);
    args->scale = mn_program_number(p, "scale", 1.0);
    args->window = (int64_t)mn_program_number(p, "window", 0.0);
    mn_run_in(&run, "q", q);
    mn_run_in(&run, "k", k);
    mn_run_in(&run, "v", v);
    mn_tensor *o = mn_run_out(&run, "o");
    mn_run_now(&run);
    return o;
}

/* Cuts the last axis of contiguous heads in two parts of their own. */
static void cut(mn_program *p, mn_tensor *x, int64_t first, int64_t second, mn_tensor *part[2]) {
    mn_forward f = { .tape = p->tape };
    mn_split_heads(&f, x, (int64_t[]){ first, second }, 2, part);
}

/* Both maps of diff_attention.c. */
static void differential(mn_program *p) {
    mn_tape *tape = p->tape;
    const int64_t H = mn_program_size(p, "o", 2), V = mn_program_size(p, "v", 3);
    const int64_t J = mn_program_size(p, "k", 2), times = J / mn_program_size(p, "v", 2);
    mn_tensor *q = mn_program_in(p, "q"), *k = mn_program_in(p, "k"), *map[2] = { NULL, NULL };
    mn_tensor *v = mn_tape_repeat(tape, mn_program_in(p, "v"), times);
    mn_tensor *less = mn_tape_affine(tape, mn_program_in_heads(p, "lam"), -1.0, 0.0);
    mn_tensor *o = attend(p, q, k, v);
    if (o) cut(p, mn_tape_heads(tape, mn_tape_flat(tape, o), H), V, V, map);
    mn_program_out(p, "o", mn_tape_add(tape, map[0], mn_tape_multiply(tape, map[1], less)));
}

static mn_tensor *normed(mn_program *p, mn_tensor *x, const char *weight) {
    mn_tensor *w = mn_program_in(p, weight);
    if (!x || !w) return x;
    mn_run run;
    mn_rms_norm_args *args = mn_run_start(&run, p->tape, MN_OP_rms_norm);
    args->eps = mn_program_number(p, "norm_eps", 1e-6);
    mn_run_in(&run, "x", x);
    mn_run_in(&run, "w", w);
    mn_tensor *y = mn_run_out(&run, "y");
    mn_run_now(&run);
    return y;
}

static mn_tensor *turned(mn_program *p, mn_tensor *x) {
    const char *kind = mn_safetensors_metadata(p->file, "rope_kind");
    const int64_t width = x ? x->shape[3] : 0;
    const int64_t turns = (int64_t)mn_program_number(p, "rope_dim", 0.0);
    mn_tensor *part[2] = { x, NULL };
    if (!kind || !x) return x;
    if (turns > 0 && turns < width) cut(p, x, turns, width - turns, part);
    mn_run run;
    mn_rope_args *args = mn_run_start(&run, p->tape, MN_OP_rope);
    args->kind = strcmp(kind, "pairs") == 0;
    args->base = mn_program_number(p, "rope_base", 10000.0);
    mn_run_in(&run, "x", part[0]);
    part[0] = mn_run_out(&run, "y");
    mn_run_now(&run);
    return part[1] ? mn_tape_join(p->tape, part, 2) : part[0];
}

static void windowed(mn_program *p) {
    mn_tensor *q = turned(p, normed(p, mn_program_in(p, "q"), "q_norm"));
    mn_tensor *k = turned(p, normed(p, mn_program_in(p, "k"), "k_norm"));
    mn_program_out(p, "o", attend(p, q, k, mn_program_in(p, "v")));
}

/* o = scale S'q / (scale z.q + eps): z is the sum of the keys, as values of one column. */
static void normalised(mn_program *p) {
    mn_tape *tape = p->tape;
    const double scale = mn_program_number(p, "scale", 1.0);
    const mn_program_layout plain = { 1, 1, 1, 1, false, false, 0 };
    mn_tensor *q = mn_program_in(p, "q"), *k = mn_program_in(p, "k"), *v = mn_program_in(p, "v");
    if (!q || !k || !v) return;
    mn_tensor *ones = mn_tape_filled(tape, (int64_t[]){ q->shape[0], q->shape[1], q->shape[2], 1 },
                                     1.0);
    mn_tensor *state, *z;
    mn_tensor *o = sum_of(p, q, k, v, NULL, MN_DECAY_NONE, scale,
                          mn_program_state_in(p, "state0", plain), &state);
    mn_tensor *below = sum_of(p, q, k, ones, NULL, MN_DECAY_NONE, scale,
                              mn_program_state_in(p, "z0", plain), &z);
    below = mn_tape_affine(tape, below, 1.0, mn_program_number(p, "eps", 1e-6));
    mn_program_out(p, "o", mn_tape_multiply(tape, o,
                                            mn_tape_unary(tape, MN_UNARY_RECIPROCAL, below)));
    mn_program_state_out(p, "state", state, plain);
    mn_program_state_out(p, "z", z, plain);
}

static void hedgehog(mn_program *p) {
    mn_tape *tape = p->tape;
    mn_tensor *x = mn_program_in(p, "x");
    if (!x) return;
    const int64_t *n = x->shape, rows = n[0] * n[1] * n[2];
    mn_tensor *u = mn_tape_linear(tape, mn_tape_shaped(tape, x, (int64_t[]){ 1, rows, 1, n[3] }),
                                  mn_program_in(p, "w"), mn_program_in(p, "bias"));
    mn_tensor *const both[] = { mn_tape_affine(tape, u, 2.0, 0.0),
                                mn_tape_affine(tape, u, -2.0, 0.0) };
    mn_program_out(p, "y", mn_tape_softmax(tape, mn_tape_join(tape, both, 2)));
}

static void taylor(mn_program *p) {
    mn_program_out(p, "y", mn_taylor_features(p->tape, mn_program_in(p, "x")));
}

static void group_norm(mn_program *p) {
    mn_tape *tape = p->tape;
    const int64_t groups = (int64_t)mn_program_number(p, "groups", 1.0);
    const int64_t width = mn_program_size(p, "x", 2) / groups;
    const int64_t as[4] = { 1, 1, groups, width };
    mn_tensor *x = mn_tape_heads(tape, mn_program_in(p, "x"), groups);
    x = mn_rms_rows(tape, mn_centred(tape, x), mn_program_number(p, "eps", 1e-5));
    x = mn_tape_multiply(tape, x, mn_tape_shaped(tape, mn_program_in(p, "w"), as));
    x = mn_tape_add(tape, x, mn_tape_shaped(tape, mn_program_in(p, "bias"), as));
    mn_program_out(p, "y", mn_tape_flat(tape, x));
}

/* The convolution of mn_token_shift with its tail in sight. */
static void token_shift(mn_program *p) {
    mn_tape *tape = p->tape;
    mn_tensor *x = mn_program_in(p, "x");
    if (!x) return;
    const int64_t width = x->shape[3];
    const mn_program_layout plain = { 1, 1, 1, 1, false, false, 0 };
    mn_tensor *const taps[] = { mn_tape_filled(tape, (int64_t[]){ 1, 1, width, 1 }, 1.0),
                                mn_tape_filled(tape, (int64_t[]){ 1, 1, width, 1 }, 0.0) };
    mn_tensor *last0 = mn_program_state_in(p, "last0", plain);
    mn_run run;
    mn_conv_args *args = mn_run_start(&run, tape, MN_OP_conv);
    args->act = 0;
    run.call->W = 2;
    mn_run_in(&run, "x", x);
    mn_run_in(&run, "w", mn_tape_join(tape, taps, 2));
    if (last0) mn_run_in(&run, "tail0", last0);
    mn_tensor *before = mn_run_out(&run, "y"), *last = mn_run_out(&run, "tail");
    mn_run_now(&run);
    mn_program_out(p, "y", mn_tape_add(tape, before, mn_tape_affine(tape, x, -1.0, 0.0)));
    mn_program_state_out(p, "last", last, plain);
}

/* The bounds of bounds.c, from the parameter of all layers. */
static void gate_bounds(mn_program *p) {
    enum { MOST = 8 };
    static const int32_t row[MOST] = { 0, 1, 2, 3, 4, 5, 6, 7 };
    mn_tape *tape = p->tape;
    mn_tensor *w = mn_program_in(p, "lower_bounds"), *rows[MOST], *bounds[MOST], *y[MOST];
    const int64_t L = w ? w->shape[2] : 0, n = w ? w->shape[3] : 0;
    if (L > MOST) mn_tape_fail(tape, mn_fail(MN_ERR_UNSUPPORTED, "bounds of %d layers at most",
                                             MOST));
    if (L < 1 || L > MOST) return;
    w = mn_tape_shaped(tape, w, (int64_t[]){ 1, L, 1, n });
    for (int64_t l = 0; l < L; l++) rows[l] = mn_tape_pick(tape, w, row + l, 1);
    mn_gate_bounds(tape, rows, (int)L, bounds);
    for (int64_t l = 0; l < L; l++) {
        y[l] = bounds[l] ? mn_tape_unary(tape, MN_UNARY_SIGMOID, bounds[l])
                         : mn_tape_filled(tape, (int64_t[]){ 1, 1, 1, n }, 0.0);
    }
    mn_program_out(p, "y", mn_tape_join(tape, y, (int)L));
}

/* Hyena's operator of order 2: a convolution as long as the sequence between two gates. */
static void long_conv(mn_program *p) {
    mn_tape *tape = p->tape;
    mn_tensor *v = mn_program_in(p, "v"), *x0 = mn_program_in(p, "x0");
    mn_tensor *x1 = mn_program_in(p, "x1"), *D = mn_program_in(p, "D");
    if (!v || !x0 || !x1 || !D) return;
    const int64_t T = v->shape[1], C = v->shape[3];
    const mn_program_layout taps = { 1, 1, C, 1, false, false, T };
    mn_tensor *h = mn_program_param_in(p, "h", C, T, taps), *u = mn_tape_multiply(tape, x1, v);
    mn_run run;
    mn_conv_args *args = mn_run_start(&run, tape, MN_OP_conv);
    args->act = 0;
    run.call->W = T;
    mn_run_in(&run, "x", u);
    mn_run_in(&run, "w", h);
    mn_tensor *y = mn_run_out(&run, "y");
    mn_run_now(&run);
    y = mn_tape_add(tape, y, mn_tape_multiply(tape, u, D));
    mn_program_out(p, "y", mn_tape_multiply(tape, x0, y));
}

static const struct {
    const char *op;
    mn_program_fn make;
} programs[] = {
#define PROGRAM(op, function) { op, function },
#include "cli/check/programs.def"
};

mn_program_fn mn_program_find(const char *op) {
    for (size_t i = 0; op && i < sizeof programs / sizeof *programs; i++) {
        if (strcmp(programs[i].op, op) == 0) return programs[i].make;
    }
    return NULL;
}
