/* family.c - pieces that several families of layers share. */
#include "layers/family.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "base/util.h"

mn_tensor *mn_use(const mn_forward *f, const char *name) {
    for (int i = 0; i < f->layer->n_params; i++) {
        if (strcmp(f->layer->params[i].name, name) == 0) return f->params[i];
    }
    return NULL;
}

double mn_eps_of(mn_op_id op) {
    int n;
    const mn_param *params = mn_op_params(op, &n);
    for (int i = 0; i < n; i++) {
        if (strcmp(params[i].name, "eps") == 0) return params[i].value;
    }
    return 0.0;
}

mn_tensor *mn_use_as(const mn_forward *f, const char *name, int64_t rows, int64_t cols) {
    return mn_tape_shaped(f->tape, mn_use(f, name), (int64_t[]){ 1, 1, rows, cols });
}

mn_status mn_layer_require(const mn_layer *layer, bool holds, const char *option, const char *why) {
    if (holds) return MN_OK;
    return mn_fail(MN_ERR_ARGUMENT, "%s at width %lld: %s %s", layer->mixer.name,
                   (long long)layer->width, option, why);
}

mn_status mn_derive_heads(mn_layer *layer, int64_t num_heads, int64_t num_v_heads, int64_t head_dim,
                          double expand_k, double expand_v) {
    const int64_t D = layer->width;
    int64_t H = num_heads;
    if (H == 0) H = head_dim ? mn_max(D / head_dim, 1) : mn_max(D / 64, 1);
    while (num_heads == 0 && head_dim == 0 && D % H != 0) H--;
    const int64_t J = num_v_heads ? num_v_heads : H;
    if (head_dim == 0) head_dim = D / H;
    mn_layer_sizes *s = &layer->sizes;
    const double most = 1e9, k = (double)head_dim * expand_k, v = (double)head_dim * expand_v;
    layer->config.num_heads = H;    // what was chosen, for the model's configuration
    layer->config.head_dim = head_dim;
    MN_SIZE(s, 'H') = H;
    MN_SIZE(s, 'J') = J;
    MN_SIZE(s, 'K') = k >= 1.0 && k < most ? (int64_t)k : 0;
    MN_SIZE(s, 'V') = v >= 1.0 && v < most ? (int64_t)v : 0;
    mn_status st = mn_layer_require(layer, MN_SIZE(s, 'K') >= 1, "head_dim",
                                    "leaves no width for the keys, or far too much");
    if (st == MN_OK) {
        st = mn_layer_require(layer, MN_SIZE(s, 'V') >= 1, "expand_v",
                              "leaves no width for the values, or far too much");
    }
    if (st == MN_OK) {
        st = mn_layer_require(layer, J % H == 0, "num_v_heads", "is no multiple of num_heads");
    }
    return st;
}

void mn_tell(const mn_forward *f, const char *name, const mn_tensor *x) {
    if (f->tap && x && !mn_tape_plans(f->tape)) f->tap->hear(f->tap->context, f->index, name, x);
}

void mn_project_ahead(mn_forward *f, mn_tensor *x, const char *const *weights, int n) {
    mn_tensor *found[MN_COUNTOF(f->ahead.names)];
    mn_ahead *ahead = &f->ahead;
    ahead->of = x;
    for (int i = 0; i < n && ahead->n < (int)MN_COUNTOF(found); i++) {
        found[ahead->n] = mn_use(f, weights[i]);
        if (found[ahead->n]) ahead->names[ahead->n++] = weights[i];
    }
    mn_tape_linears(f->tape, x, found, ahead->n, ahead->results);
}

/* What mn_project_ahead has made. */
static mn_tensor *made_ahead(const mn_forward *f, const mn_tensor *x, const char *weight) {
    for (int i = 0; i < f->ahead.n; i++) {
        if (f->ahead.of == x && strcmp(f->ahead.names[i], weight) == 0) return f->ahead.results[i];
    }
    return NULL;
}

mn_tensor *mn_project(mn_forward *f, mn_tensor *x, const char *weight, const char *bias) {
    mn_tensor *shift = bias ? mn_use(f, bias) : NULL;
    mn_tensor *y = shift ? NULL : made_ahead(f, x, weight);
    if (!y) y = mn_tape_linear(f->tape, x, mn_use(f, weight), shift);
    mn_tell(f, weight, y);
    return y;
}

mn_tensor *mn_project_out(mn_forward *f, mn_tensor *x, const char *weight, const char *bias) {
    if (f->onto && !f->tap && !f->branch) {
        return mn_tape_linear_onto(f->tape, f->onto, x, mn_use(f, weight),
                                   bias ? mn_use(f, bias) : NULL);
    }
    mn_tensor *y = mn_project(f, x, weight, bias);
    /* a residual would share its gradient with the branch, which gets one of its own */
    if (f->branch) *f->branch = y;
    if (f->branch && f->onto) return mn_tape_add(f->tape, f->onto, y);
    return f->onto ? mn_tape_residual(f->tape, f->onto, y) : y;
}

/* What a convolution by w reads, x with or without heads, and its tail in the state `piece`. */
static void take_inputs(mn_forward *f, mn_run *run, mn_tensor *x, mn_tensor *w, const char *piece) {
    run->call->W = w->shape[3];
    mn_run_in(run, "x", x);
    mn_run_in(run, "w", w);
    mn_state_bind(f->state, run, "tail0", "tail", piece,
                  x->shape[0] * (run->call->W - 1) * x->shape[2] * x->shape[3]);
}

mn_tensor *mn_short_conv(mn_forward *f, mn_tensor *x, const char *weight, const char *bias, int act,
                         const char *piece) {
    mn_tensor *w = mn_use(f, weight);
    if (!x || !w) return NULL;
    mn_run run;
    mn_conv_args *args = mn_run_start(&run, f->tape, MN_OP_conv);
    args->act = act;
    take_inputs(f, &run, x, w, piece);
    if (bias) mn_run_in(&run, "bias", mn_use(f, bias));
    mn_tensor *y = mn_run_out(&run, "y");
    mn_run_now(&run);
    return y;
}

mn_tensor *mn_project_conv(mn_forward *f, mn_tensor *x, const char *weight, const char *conv,
                           int without, const char *piece) {
    mn_tensor *y = mn_project(f, x, weight, NULL);
    if (f->layer->config.use_short_conv) return mn_short_conv(f, y, conv, NULL, 1, piece);
    return without < 0 ? y : mn_tape_unary(f->tape, (mn_unary)without, y);
}

mn_tensor *mn_unit(mn_forward *f, mn_tensor *x, int kind, double eps) {
    if (!x) return NULL;
    mn_run run;
    mn_l2_norm_args *args = mn_run_start(&run, f->tape, MN_OP_l2_norm);
    args->kind = kind;
    args->eps = eps;
    mn_run_in(&run, "x", x);
    mn_tensor *y = mn_run_out(&run, "y");
    mn_run_now(&run);
    return y;
}

mn_tensor *mn_unit_conv(mn_forward *f, mn_tensor *x, const char *weight, int64_t H, int kind,
                        double eps, const char *piece) {
    mn_tensor *w = mn_use(f, weight);
    if (!x || !w) return NULL;
    if (f->state && x->shape[1] == 1) {    // a decode step has other company for each of the two
        x = mn_short_conv(f, x, weight, NULL, 1, piece);
        return mn_unit(f, mn_tape_heads(f->tape, x, H), kind, eps);
    }
    x = mn_tape_heads(f->tape, x, H);
    if (!x) return NULL;
    mn_run run;
    mn_conv_unit_args *args = mn_run_start(&run, f->tape, MN_OP_conv_unit);
    args->kind = kind;
    args->eps = eps;
    take_inputs(f, &run, x, w, piece);
    mn_tensor *y = mn_run_out(&run, "y");
    mn_run_now(&run);
    return y;
}

mn_tensor *mn_project_unit(mn_forward *f, mn_tensor *x, const char *weight, const char *conv,
                           int kind, double eps, const char *piece) {
    mn_tensor *k = mn_project(f, x, weight, NULL);
    const int64_t H = MN_OF(f, 'H');
    if (f->layer->config.use_short_conv) return mn_unit_conv(f, k, conv, H, kind, eps, piece);
    k = mn_tape_unary(f->tape, MN_UNARY_SILU, k);
    return mn_unit(f, mn_tape_heads(f->tape, k, H), kind, eps);
}

mn_tensor *mn_norm_gate(mn_forward *f, mn_tensor *x, mn_tensor *gate, const char *weight, int act) {
    if (!x) return NULL;
    const double own = f->layer->config.o_norm_eps;    // 0 where the kind does not take it
    const double eps = own != 0.0 ? own : f->layer->norm_eps;
    mn_run run;
    if (gate) {
        mn_rms_norm_gated_args *args = mn_run_start(&run, f->tape, MN_OP_rms_norm_gated);
        args->eps = eps;
        args->act = act;
        mn_run_in(&run, "x", x);
        mn_run_in(&run, "z", gate);
    } else {
        mn_rms_norm_args *args = mn_run_start(&run, f->tape, MN_OP_rms_norm);
        args->eps = eps;
        mn_run_in(&run, "x", x);
    }
    mn_run_in(&run, "w", mn_use(f, weight));
    mn_tensor *y = mn_run_out(&run, "y");
    mn_run_now(&run);
    return y;
}

void mn_split_heads(mn_forward *f, mn_tensor *x, const int64_t *widths, int n, mn_tensor **parts) {
    for (int i = 0; i < n; i++) parts[i] = NULL;
    if (!x) return;
    const int64_t B = x->shape[0], T = x->shape[1], H = x->shape[2], X = x->shape[3];
    const bool whole = x->stride[2] == X && x->stride[1] == H * X && x->stride[0] == T * H * X;
    if (!whole) x = mn_tape_join(f->tape, &x, 1);
    x = mn_tape_shaped(f->tape, x, (int64_t[]){ 1, B * T * H, 1, X });
    mn_tape_split(f->tape, x, widths, n, parts);
    for (int i = 0; i < n; i++) {
        parts[i] = mn_tape_join(f->tape, parts + i, 1);
        parts[i] = mn_tape_shaped(f->tape, parts[i], (int64_t[]){ B, T, H, widths[i] });
    }
}

mn_tensor *mn_filled(mn_forward *f, const int64_t shape[4], double value) {
    return mn_tape_filled(f->tape, shape, value);
}

mn_tensor *mn_over_sum(mn_forward *f, mn_tensor *x, double eps) {
    if (!x) return NULL;
    const int64_t *n = x->shape;
    mn_tensor *ones = mn_filled(f, (int64_t[]){ 1, 1, 1, n[3] }, 1.0);
    mn_tensor *sum = mn_tape_shaped(f->tape, x, (int64_t[]){ 1, n[0] * n[1] * n[2], 1, n[3] });
    sum = mn_tape_linear(f->tape, sum, ones, NULL);
    if (eps != 0.0) sum = mn_tape_affine(f->tape, sum, 1.0, eps);
    sum = mn_tape_unary(f->tape, MN_UNARY_RECIPROCAL, sum);
    sum = mn_tape_shaped(f->tape, sum, (int64_t[]){ n[0], n[1], n[2], 1 });
    return mn_tape_multiply(f->tape, x, sum);
}

mn_tensor *mn_ccq_query(mn_forward *f, mn_tensor *x, mn_tensor *q, mn_tensor *k) {
    if (!f->layer->ccq || !q || !k) return q;
    mn_tensor *gamma = mn_project(f, x, "ccq_gamma.weight", "ccq_gamma.bias");
    gamma = mn_tape_unary(f->tape, MN_UNARY_SIGMOID, gamma);
    mn_tensor *unit = mn_unit(f, k, 0, 1e-12);
    if (!gamma || !unit) return NULL;
    mn_run run;
    mn_curvature_args *args = mn_run_start(&run, f->tape, MN_OP_curvature);
    mn_state_count(f->state, &run, &args->n0, &args->counts0, f->position);
    mn_run_in(&run, "q", q);
    mn_run_in(&run, "k", unit);
    mn_run_in(&run, "gamma", gamma);
    const int64_t rows = q->shape[0] * q->shape[2], K = q->shape[3];
    mn_state_bind(f->state, &run, "kk0", "kk", "ccq_kk", rows * K * K);
    mn_state_bind(f->state, &run, "ks0", "ks", "ccq_ks", rows * K);
    mn_tensor *cleaned = mn_run_out(&run, "qt");
    mn_run_now(&run);
    return cleaned;
}

void mn_tell_variance(mn_forward *f, mn_tensor *variance) {
    if (!f->variance || !variance || mn_tape_plans(f->tape)) return;
    if (mn_tape_status(f->tape) != MN_OK) return;
    const int64_t *n = variance->shape, rows = n[0] * n[1], width = n[2] * n[3];
    float *numbers = calloc((size_t)(rows * width), sizeof *numbers);
    mn_status st = numbers ? mn_tape_read(f->tape, variance, numbers)
                           : mn_fail(MN_ERR_MEMORY, "no memory for the variances of a step");
    for (int64_t row = 0; row < rows && st == MN_OK; row++) {
        double sum = 0.0;
        for (int64_t i = row * width; i < (row + 1) * width; i++) sum += numbers[i];
        f->variance[row] = (float)(sum / (double)width);
    }
    if (st != MN_OK) mn_tape_fail(f->tape, st);
    free(numbers);
}

mn_tensor *mn_row_sums(mn_tape *tape, mn_tensor *x, double scale) {
    if (!x) return NULL;
    const int64_t *n = x->shape;
    mn_tensor *ones = mn_tape_filled(tape, (int64_t[]){ 1, 1, 1, n[3] }, scale);
    mn_tensor *rows = mn_tape_shaped(tape, x, (int64_t[]){ 1, n[0] * n[1] * n[2], 1, n[3] });
    mn_tensor *sums = mn_tape_linear(tape, rows, ones, NULL);
    return mn_tape_shaped(tape, sums, (int64_t[]){ n[0], n[1], n[2], 1 });
}

mn_tensor *mn_centred(mn_tape *tape, mn_tensor *x) {
    if (!x) return NULL;
    return mn_tape_add(tape, x, mn_row_sums(tape, x, -1.0 / (double)x->shape[3]));
}

mn_tensor *mn_rms_rows(mn_tape *tape, mn_tensor *x, double eps) {
    if (!x) return NULL;
    mn_run run;
    mn_rms_norm_args *args = mn_run_start(&run, tape, MN_OP_rms_norm);
    args->eps = eps;
    mn_run_in(&run, "x", x);
    mn_run_in(&run, "w", mn_tape_filled(tape, (int64_t[]){ 1, 1, 1, x->shape[3] }, 1.0));
    mn_tensor *y = mn_run_out(&run, "y");
    mn_run_now(&run);
    return y;
}

/* A convolution of two taps, of which the one on the token itself is 0. */
mn_tensor *mn_token_shift(mn_tape *tape, mn_layer_state *state, mn_tensor *x, const char *piece) {
    if (!x) return NULL;
    const int64_t D = x->shape[3];
    mn_tensor *const taps[] = { mn_tape_filled(tape, (int64_t[]){ 1, 1, D, 1 }, 1.0),
                                mn_tape_filled(tape, (int64_t[]){ 1, 1, D, 1 }, 0.0) };
    mn_run run;
    mn_conv_args *args = mn_run_start(&run, tape, MN_OP_conv);
    args->act = 0;
    run.call->W = 2;
    mn_run_in(&run, "x", x);
    mn_run_in(&run, "w", mn_tape_join(tape, taps, 2));
    mn_state_bind(state, &run, "tail0", "tail", piece, x->shape[0] * D);
    mn_tensor *before = mn_run_out(&run, "y");
    mn_run_now(&run);
    return mn_tape_add(tape, before, mn_tape_affine(tape, x, -1.0, 0.0));
}

/* Where token t of a pass stands in its sequence. */
static int64_t place_of(const mn_forward *f, int64_t t, int64_t pos0) {
    const int64_t n = mn_tape_sequences(f->tape), *starts = mn_tape_borders(f->tape);
    int64_t from = 0;
    for (int64_t i = 0; i < n && starts[i] <= t; i++) from = starts[i];
    return pos0 + t - from;
}

/* Those of a batch have positions of their own, and may lie one after the other in one row. */
int64_t mn_position_of(const mn_forward *f, int64_t b, int64_t t) {
    mn_layer_state *state = f->state;
    if (state) state->by_position = true;
    if (!state || !state->rows) return place_of(f, t, f->position);
    int64_t from = 0;
    for (; state->starts && t >= state->starts[b + 1]; b++) from = state->starts[b + 1];
    return state->positions[b] + t - from;
}

mn_tensor *mn_sum_read(mn_forward *f, mn_tensor *q, mn_tensor *k, mn_tensor *v, mn_tensor *g,
                       int decay, double scale, const char *piece) {
    if (!q || !k || !v) return NULL;
    mn_run run;
    mn_additive_args *args = mn_run_start(&run, f->tape, MN_OP_additive);
    args->decay = decay;
    args->scale = scale;
    mn_run_in(&run, "q", q);
    mn_run_in(&run, "k", k);
    mn_run_in(&run, "v", v);
    if (g) mn_run_in(&run, "g", g);
    mn_state_bind(f->state, &run, "state0", "state", piece,
                  q->shape[0] * v->shape[2] * q->shape[3] * v->shape[3]);
    mn_tensor *o = mn_run_out(&run, "o");
    mn_run_now(&run);
    return o;
}
