/* hyper.c - hypermlp and hyperglu: every key and value is kept, and a row's scores are hidden
 * units of a small network whose weights belong to lags.
 *
 *   q = (x W_q') sigmoid(x W_l' + b)      k = conv1(x) W_k'      v = conv2(x) W_v'
 *   c1, c2 = sigmoid(x W_c' + b)          z_j = q_t.k_(t-j), not scaled
 *   x_j = z_j (1 + d1_j) + sum_a (sum_i z_i U1_ia) c1_a Vt1_aj
 *   hypermlp  b = relu(x)                 hyperglu  b = softplus(x2) relu(x1), of two branches
 *   w_j = b_j (1 + d2_j) + sum_a (sum_i b_i U2_ia) c2_a Vt2_aj
 *   y = ((sum_j w_j v_(t-j)) / |x1| sigmoid(x W_r' + b)) W_o'
 *
 * H heads, Q branches (2 H in hyperglu), K and V widths of a branch and a head, P lags, R and S
 * ranks of the two mixes, without which x = z or w = b. A sequence has at most P tokens. In layout
 * position the mixes' entry of a key is its place, not its lag. */
#include "layers/family.h"

static mn_status check(const mn_layer *layer, int64_t keys, int64_t values) {
    const mn_layer_config *c = &layer->config;
    const mn_layer_sizes *s = &layer->sizes;
    mn_status st = mn_layer_require(layer, MN_SIZE(s, 'H') >= 1, "num_heads",
                                    "must be at least 1");
    if (st == MN_OK) {
        st = mn_layer_require(layer, keys >= 1 && keys % MN_SIZE(s, 'Q') == 0, "qk_rank",
                              "is no multiple of the branches: the heads, twice in hyperglu");
    }
    if (st == MN_OK) {
        st = mn_layer_require(layer, values >= 1 && values % MN_SIZE(s, 'H') == 0, "vo_rank",
                              "is no multiple of num_heads");
    }
    if (st == MN_OK) {
        st = mn_layer_require(layer, MN_SIZE(s, 'P') >= 1, "block_size",
                              "must be at least 1, or 0 for the model's context");
    }
    if (st == MN_OK) {
        st = mn_layer_require(layer, !c->use_kv_conv || c->conv_size >= 1, "conv_size",
                              "must be at least 1");
    }
    if (st == MN_OK) {
        st = mn_layer_require(layer, !c->use_rope || keys / MN_SIZE(s, 'Q') % 2 == 0, "use_rope",
                              "needs branches of an even width");
    }
    return st;
}

/* The largest multiple of n up to width, at least n. */
static int64_t whole_heads(int64_t width, int64_t n) {
    return n < 1 ? 0 : width < n ? n : width / n * n;
}

static mn_status derive(mn_layer *layer, int64_t context) {
    const mn_layer_config *c = &layer->config;
    mn_layer_sizes *s = &layer->sizes;
    const int64_t H = c->num_heads < INT32_MAX ? c->num_heads : 0;
    const int64_t Q = layer->kind == MN_LAYER_hyperglu ? 2 * H : H;
    const int64_t keys = c->qk_rank ? c->qk_rank : whole_heads(layer->width / 4, Q);
    const int64_t values = c->vo_rank ? c->vo_rank : whole_heads(layer->width, H);
    MN_SIZE(s, 'H') = H;
    MN_SIZE(s, 'Q') = Q;
    MN_SIZE(s, 'P') = c->block_size ? c->block_size : context;
    MN_SIZE(s, 'R') = c->op1_rank;
    MN_SIZE(s, 'S') = c->op2_rank;
    MN_SIZE(s, 'W') = c->conv_size;
    const mn_status st = check(layer, keys, values);
    if (st != MN_OK) return st;
    layer->config.qk_rank = keys;
    layer->config.vo_rank = values;
    layer->config.block_size = MN_SIZE(s, 'P');
    MN_SIZE(s, 'K') = keys / MN_SIZE(s, 'Q');
    MN_SIZE(s, 'V') = values / H;
    return MN_OK;
}

/* sigmoid(x W' + b) in n heads; NULL if the layer has none. */
static mn_tensor *open_of(mn_forward *f, mn_tensor *x, const char *weight, const char *bias,
                          int64_t n) {
    if (!mn_use(f, weight)) return NULL;
    mn_tensor *gate = mn_tape_unary(f->tape, MN_UNARY_SIGMOID, mn_project(f, x, weight, bias));
    return mn_tape_heads(f->tape, gate, n);
}

/* Rotary positions, if the layer has them. */
static mn_tensor *turned(mn_forward *f, mn_tensor *x) {
    if (!f->layer->config.use_rope || !x) return x;
    mn_run run;
    mn_rope_args *args = mn_run_start(&run, f->tape, MN_OP_rope);
    args->base = f->layer->config.rope_theta;
    mn_state_position(f->state, &run, &args->pos0, f->position);
    mn_run_in(&run, "x", x);
    mn_tensor *y = mn_run_out(&run, "y");
    mn_run_now(&run);
    return y;
}

static mn_tensor *query(mn_forward *f, mn_tensor *x) {
    const int64_t Q = MN_OF(f, 'Q');
    mn_tensor *q = turned(f, mn_tape_heads(f->tape, mn_project(f, x, "q.weight", NULL), Q));
    mn_tensor *open = open_of(f, x, "left_gate.weight", "left_gate.bias", Q);
    return open ? mn_tape_multiply(f->tape, q, open) : q;
}

static mn_tensor *convolved(mn_forward *f, mn_tensor *x, const char *weight, const char *piece) {
    return mn_use(f, weight) ? mn_short_conv(f, x, weight, NULL, 0, piece) : x;
}

/* One of the two mixes; without its control there is none. */
static void bind_mix(mn_forward *f, mn_run *run, mn_tensor *control, const char *const fields[4],
                     const char *const names[3]) {
    if (!control) return;
    mn_run_in(run, fields[0], control);
    for (int i = 0; i < 3; i++) mn_run_in(run, fields[i + 1], mn_use(f, names[i]));
}

/* What a row is read by: a query of each branch, the controls of both mixes, and the gate of what
 * is read; each of the latter NULL where the layer has none. */
typedef struct asked {
    mn_tensor *q, *c1, *c2, *gv;
} asked;

/* Whether a token is read by one operation, which reads its position when it runs. */
static bool by_position(const mn_forward *f) {
    const mn_layer_state *state = f->state;
    return state && !state->rows && !state->ends && !f->layer->config.use_rope &&
           mn_tape_attends(f->tape, MN_OF(f, 'K'), MN_OF(f, 'V'));
}

static mn_hyper_mix mix_of(const mn_forward *f, int64_t R, mn_tensor *control,
                           const char *const names[3]) {
    if (!control) return (mn_hyper_mix){ 0 };
    return (mn_hyper_mix){ R, control, mn_use(f, names[0]), mn_use(f, names[1]),
                           mn_use(f, names[2]) };
}

static const char *const first_mix[] = { "op.mix.U", "op.mix.Vt", "op.mix.d" };
static const char *const second_mix[] = { "op2.mix.U", "op2.mix.Vt", "op2.mix.d" };

/* One token, whose key and value the operation puts into the caches. */
static mn_tensor *one_token(mn_forward *f, const asked *a, mn_tensor *k, mn_tensor *v) {
    const mn_layer_config *c = &f->layer->config;
    const int64_t P = MN_OF(f, 'P'), most = a->c1 || a->c2 ? P : 0;    // mixes have so many lags
    const mn_state_piece *keys = mn_state_extend(f->state, f->tape, "k",
                                                 MN_OF(f, 'Q') * MN_OF(f, 'K'), most);
    const mn_state_piece *values = mn_state_extend(f->state, f->tape, "v",
                                                   MN_OF(f, 'H') * MN_OF(f, 'V'), most);
    if (!keys || !values) return NULL;
    const mn_hyper how = { keys->now, values->now, mn_min(keys->capacity, values->capacity), P,
                           c->layout == 1, c->attn_norm != 2, mn_eps_of(MN_OP_hyper),
                           { mix_of(f, MN_OF(f, 'R'), a->c1, first_mix),
                             mix_of(f, MN_OF(f, 'S'), a->c2, second_mix) } };
    return mn_tape_hyper(f->tape, &how, a->q, k, v, a->gv);
}

/* By the operator, over all keys so far. */
static mn_tensor *all_at_once(mn_forward *f, const asked *a, mn_tensor *k, mn_tensor *v) {
    mn_tape *tape = f->tape;
    k = mn_state_append(f->state, tape, k, "k");
    v = mn_state_append(f->state, tape, v, "v");
    mn_run run;
    mn_hyper_args *args = mn_run_start(&run, tape, MN_OP_hyper);
    mn_mixer_set_args(&f->layer->mixer, args);
    args->norm = (int)f->layer->config.attn_norm;
    args->layout = (int)f->layer->config.layout;
    run.call->P = MN_OF(f, 'P');
    run.call->R = MN_OF(f, 'R');
    run.call->W = MN_OF(f, 'S');
    mn_state_rows(f->state, &run);
    mn_run_in(&run, "q", a->q);
    mn_run_in(&run, "k", k);
    mn_run_in(&run, "v", v);
    if (a->gv) mn_run_in(&run, "gv", a->gv);
    bind_mix(f, &run, a->c1, (const char *const[]){ "c1", "U1", "Vt1", "d1" }, first_mix);
    bind_mix(f, &run, a->c2, (const char *const[]){ "c2", "U2", "Vt2", "d2" }, second_mix);
    mn_tensor *o = mn_run_out(&run, "o");
    mn_run_now(&run);
    return o;
}

static mn_tensor *forward(mn_forward *f, mn_tensor *x) {
    mn_tape *tape = f->tape;
    const int64_t H = MN_OF(f, 'H'), Q = MN_OF(f, 'Q');
    mn_tensor *k = convolved(f, x, "conv1.conv.weight", "conv1");
    k = turned(f, mn_tape_heads(tape, mn_project(f, k, "k.weight", NULL), Q));
    mn_tensor *v = convolved(f, x, "conv2.conv.weight", "conv2");
    v = mn_tape_heads(tape, mn_project(f, v, "v.weight", NULL), H);
    asked a;
    a.c1 = open_of(f, x, "control1.weight", "control1.bias", Q);
    a.c2 = open_of(f, x, "control2.weight", "control2.bias", H);
    a.gv = open_of(f, x, "right_gate.weight", "right_gate.bias", H);
    a.q = query(f, x);
    mn_tensor *o = by_position(f) ? one_token(f, &a, k, v) : all_at_once(f, &a, k, v);
    return mn_project_out(f, mn_tape_flat(tape, o), "c_proj.weight", NULL);
}

const mn_layer_family mn_family_hyper = { derive, forward };
