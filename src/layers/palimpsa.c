/* palimpsa.c - palimpsa_code and palimpsa_paper: a mean and an importance per cell that fade
 * towards a prior.
 *
 *   q, k, v = silu(conv(x W'))    q, k to unit length per head    ip = exp(Ip_log)
 *   I = a I + (1 - a) ip + k^2 b'    mu = (a I mu + k w') / I    o = mu'q / sqrt K
 *
 *   code   a = exp(-softplus(x W_dt' + dt_bias) exp(A_log))    w = s v, s = sigmoid(x W_bs')
 *          b = s softplus(b_scale) sigmoid(x W_rank' W_b')     o += D v
 *   paper  a = 1 - g / N, g = sigmoid(x W_g'), N = n_init exp(logN)
 *          w = b v, b = g sigmoid(x W_beta')
 *
 *   y = (rms(o) silu(x W_gate')) W_o'
 *
 * Without metaplasticity the code's layer is a sum with decay: S = a S + k w', o = S'q / sqrt K. */
#include <math.h>

#include "base/util.h"
#include "layers/family.h"

static bool is_code(const mn_layer *layer) {
    return layer->kind == MN_LAYER_palimpsa_code;
}

static mn_status derive(mn_layer *layer, int64_t context) {
    (void)context;
    const mn_layer_config *c = &layer->config;
    mn_status st = mn_derive_heads(layer, c->num_heads, 0, c->head_dim, c->expand_k, c->expand_v);
    if (st != MN_OK) return st;
    const int64_t rank = c->beta_step_rank;
    MN_SIZE(&layer->sizes, 'W') = c->conv_size;
    MN_SIZE(&layer->sizes, 'R') = rank ? rank : (layer->width + 15) / 16;
    layer->config.beta_step_rank = MN_SIZE(&layer->sizes, 'R');
    st = mn_layer_require(layer, !c->use_short_conv || c->conv_size >= 1, "conv_size",
                          "must be at least 1");
    if (st == MN_OK && !is_code(layer)) {
        st = mn_layer_require(layer, c->n_init >= 4.0, "n_init",
                              "must be at least 4, so that every token leaves some memory");
    }
    /* what is left without importance is Mamba-2's row: a sum, decayed per token */
    if (st == MN_OK && is_code(layer) && !c->metaplasticity) {
        st = mn_mixer_find(&layer->mixer, "mamba2");
    }
    return st;
}

typedef struct inputs {
    mn_tensor *q, *k, *v;    // v without any gate
    mn_tensor *written;      // v as the memory takes it
} inputs;

static mn_tensor *key_of(mn_forward *f, mn_tensor *x, const char *weight, const char *conv,
                         const char *piece) {
    mn_tape_recompute_more(f->tape, true);
    mn_tensor *k = mn_project_unit(f, x, weight, conv, 0, 1e-12, piece);
    mn_tape_recompute_more(f->tape, false);
    return k;
}

static mn_tensor *sigmoid_of(mn_forward *f, mn_tensor *x, const char *weight) {
    return mn_tape_unary(f->tape, MN_UNARY_SIGMOID, mn_project(f, x, weight, NULL));
}

/* (B,T,1,H) as (B,T,H,1), to go with heads. */
static mn_tensor *per_head(mn_forward *f, mn_tensor *x) {
    return mn_tape_heads(f->tape, x, MN_OF(f, 'H'));
}

/* exp(Ip_log), which is 1 and stays 1 unless learn_prior: then without gradient. */
static mn_tensor *prior_of(mn_forward *f) {
    mn_tensor *log = mn_use(f, "Ip_log");
    if (log && !f->layer->config.learn_prior) {
        log = mn_tape_leaf_of(f->tape, log->data, log->dtype, NULL, log->dtype, 1, MN_OF(f, 'H'),
                              false);
    }
    return mn_tape_unary(f->tape, MN_UNARY_EXP, log);
}

/* Binds what both gatings share, and runs. */
static mn_tensor *run_memory(mn_forward *f, mn_run *run, const inputs *in) {
    const int64_t cells = in->q->shape[0] * MN_OF(f, 'H') * MN_OF(f, 'K') * MN_OF(f, 'V');
    mn_run_in(run, "q", in->q);
    mn_run_in(run, "k", in->k);
    mn_run_in(run, "v", in->written);
    mn_tensor *prior = prior_of(f);
    mn_run_in(run, "ip", prior);
    mn_state_bind(f->state, run, "mu0", "mu", "mean", cells);
    mn_state_bind(f->state, run, "imp0", "imp", "importance", cells);
    mn_tensor *o = mn_run_out(run, "o");
    mn_tensor *variance = f->variance ? mn_run_out(run, "ovar") : NULL;
    mn_run_now(run);
    mn_tell_variance(f, variance);
    mn_tell(f, "q", in->q);
    mn_tell(f, "k", in->k);
    mn_tell(f, "v", in->written);
    mn_tell(f, "ip", prior);
    return o;
}

/* ---- as the code gates it -------------------------------------------------------------------- */

/* softplus(x W_dt' + dt_bias) and exp(A_log). */
static mn_tensor *step_of(mn_forward *f, mn_tensor *x) {
    mn_tensor *dt = mn_project(f, x, "dt_proj.weight", NULL);
    dt = mn_tape_add(f->tape, dt, mn_use_as(f, "dt_bias", 1, MN_OF(f, 'H')));
    return mn_tape_unary(f->tape, MN_UNARY_SOFTPLUS, dt);
}

/* sigmoid(b) by the strength that a head and token has in common. */
static mn_tensor *importance_gate(mn_forward *f, mn_tensor *x, mn_tensor *strength) {
    mn_tape *tape = f->tape;
    mn_tensor *b = mn_project(f, x, "b_rank_proj.weight", NULL);
    mn_tape_recompute_more(tape, true);
    b = per_head(f, mn_project(f, b, "b_proj.weight", NULL));
    b = mn_tape_gate(tape, MN_UNARY_SIGMOID, b, strength);
    mn_tape_recompute_more(tape, false);
    return b;
}

/* The memory without importance. */
static mn_tensor *run_plain(mn_forward *f, mn_tensor *x, const inputs *in) {
    const int64_t H = MN_OF(f, 'H');
    mn_tensor *rate = mn_tape_unary(f->tape, MN_UNARY_NEG_EXP, mn_use_as(f, "A_log", 1, H));
    mn_tensor *g = mn_tape_multiply(f->tape, step_of(f, x), rate);
    mn_run run;
    mn_additive_args *args = mn_run_start(&run, f->tape, MN_OP_additive);
    mn_mixer_set_args(&f->layer->mixer, args);
    args->scale = pow((double)MN_OF(f, 'K'), -0.5);
    mn_run_in(&run, "q", in->q);
    mn_run_in(&run, "k", in->k);
    mn_run_in(&run, "v", in->written);
    mn_run_in(&run, "g", g);
    mn_state_bind(f->state, &run, "state0", "state", "memory",
                  x->shape[0] * H * MN_OF(f, 'K') * MN_OF(f, 'V'));
    mn_tensor *o = mn_run_out(&run, "o");
    mn_run_now(&run);
    return o;
}

/* v by its gate, of which a head and token has one. */
static void gate_values(mn_forward *f, inputs *in, mn_tensor *write) {
    mn_tape_recompute_more(f->tape, true);
    in->written = mn_tape_multiply(f->tape, in->v, write);
    mn_tape_recompute_more(f->tape, false);
}

/* All gates of heads at once, and the log decay among them. */
static mn_tensor *run_at_once(mn_forward *f, mn_tensor *x, inputs *in) {
    mn_tensor *w = mn_project(f, x, "dt_proj.weight", NULL);
    mn_tensor *u = mn_project(f, x, "bs_proj.weight", NULL);
    const mn_head_gates gates = mn_tape_head_gates(f->tape, u, w, mn_use(f, "b_scale"),
                                                   mn_use(f, "dt_bias"), mn_use(f, "A_log"));
    gate_values(f, in, gates.write);
    mn_run run;
    mn_importance_args *args = mn_run_start(&run, f->tape, MN_OP_importance);
    args->scale = pow((double)MN_OF(f, 'K'), -0.5);
    mn_tensor *b = importance_gate(f, x, gates.strength);
    mn_run_in(&run, "b", b);
    mn_run_in(&run, "g", gates.decay);
    mn_tell(f, "b", b);
    mn_tell(f, "g", gates.decay);
    return run_memory(f, &run, in);
}

/* The same by single operations, which decoding gathers with others. The log decay is float32,
 * as the operator takes it. */
static mn_tensor *run_singly(mn_forward *f, mn_tensor *x, inputs *in, mn_tensor *write) {
    mn_tape *tape = f->tape;
    gate_values(f, in, write);
    mn_tensor *size = mn_tape_unary(tape, MN_UNARY_SOFTPLUS,
                                    mn_use_as(f, "b_scale", MN_OF(f, 'H'), 1));
    mn_tensor *rate = mn_use_as(f, "A_log", 1, MN_OF(f, 'H'));
    rate = mn_tape_unary(tape, MN_UNARY_NEG_EXP, rate);
    mn_run run;
    mn_importance_args *args = mn_run_start(&run, tape, MN_OP_importance);
    args->scale = pow((double)MN_OF(f, 'K'), -0.5);
    mn_run_in(&run, "b", importance_gate(f, x, mn_tape_multiply(tape, write, size)));
    mn_run_in(&run, "g", mn_tape_multiply(tape, mn_tape_cast(tape, step_of(f, x), MN_F32),
                                          mn_tape_cast(tape, rate, MN_F32)));
    return run_memory(f, &run, in);
}

static mn_tensor *run_code(mn_forward *f, mn_tensor *x, inputs *in) {
    mn_tape *tape = f->tape;
    const int64_t H = MN_OF(f, 'H');
    const bool cells = f->layer->config.metaplasticity;
    mn_tensor *o;
    if (cells && !mn_tape_gathers(tape)) {
        o = run_at_once(f, x, in);
    } else {
        mn_tensor *write = per_head(f, sigmoid_of(f, x, "bs_proj.weight"));
        if (!cells) gate_values(f, in, write);
        o = cells ? run_singly(f, x, in, write) : run_plain(f, x, in);
    }
    if (!f->layer->config.use_residual) return o;
    return mn_tape_add_scaled(tape, o, in->v, mn_use_as(f, "D", H, 1), in->written);
}

/* ---- as the paper gates it ------------------------------------------------------------------- */

static mn_tensor *run_paper(mn_forward *f, mn_tensor *x, inputs *in) {
    mn_tape *tape = f->tape;
    mn_tensor *gamma = sigmoid_of(f, x, "gamma_proj.weight");
    mn_tensor *beta = per_head(f, sigmoid_of(f, x, "beta_proj.weight"));
    beta = mn_tape_multiply(tape, beta, per_head(f, gamma));
    mn_tensor *memory = mn_tape_unary(tape, MN_UNARY_EXP, mn_use(f, "logN"));
    memory = mn_tape_affine(tape, memory, f->layer->config.n_init, 0.0);
    mn_run run;
    mn_palimpsa_paper_args *args = mn_run_start(&run, tape, MN_OP_palimpsa_paper);
    args->scale = pow((double)MN_OF(f, 'K'), -0.5);
    mn_run_in(&run, "beta", beta);
    mn_run_in(&run, "gamma", gamma);
    mn_run_in(&run, "n_mem", memory);
    mn_tell(f, "beta", beta);
    mn_tell(f, "gamma", gamma);
    mn_tell(f, "n_mem", memory);
    in->written = in->v;
    return run_memory(f, &run, in);
}

/* All that x is projected to but the output gate, whose weights lie in this order. */
static void project_first(mn_forward *f, mn_tensor *x) {
    static const char *const paper[] = { "q_proj.weight", "k_proj.weight", "v_proj.weight",
                                         "gamma_proj.weight", "beta_proj.weight" };
    static const char *const code[] = { "q_proj.weight",  "k_proj.weight",  "v_proj.weight",
                                        "dt_proj.weight", "bs_proj.weight", "b_rank_proj.weight" };
    const int n_code = (int)MN_COUNTOF(code) - !f->layer->config.metaplasticity;
    if (is_code(f->layer)) mn_project_ahead(f, x, code, n_code);
    else mn_project_ahead(f, x, paper, MN_COUNTOF(paper));
}

static mn_tensor *forward(mn_forward *f, mn_tensor *x) {
    mn_tape *tape = f->tape;
    const int64_t H = MN_OF(f, 'H');
    project_first(f, x);
    inputs in = { .k = key_of(f, x, "k_proj.weight", "k_conv1d.weight", "k_conv") };
    in.q = key_of(f, x, "q_proj.weight", "q_conv1d.weight", "q_conv");
    in.q = mn_ccq_query(f, x, in.q, in.k);
    in.v = mn_tape_heads(tape, mn_project_conv(f, x, "v_proj.weight", "v_conv1d.weight",
                                               MN_UNARY_SILU, "v_conv"), H);
    if (!in.q || !in.k || !in.v) return NULL;
    mn_tensor *o = is_code(f->layer) ? run_code(f, x, &in) : run_paper(f, x, &in);
    mn_tensor *gate = NULL;
    if (f->layer->config.use_gate) {
        gate = mn_tape_heads(tape, mn_project(f, x, "g_proj.weight", NULL), H);
    }
    mn_tell(f, "read", o);
    mn_tell(f, "gate", gate);
    o = mn_norm_gate(f, o, gate, "o_norm.weight", 0);
    return mn_project_out(f, mn_tape_flat(tape, o), "o_proj.weight", NULL);
}

const mn_layer_family mn_family_palimpsa = { derive, forward };
