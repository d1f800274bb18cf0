/* bayes.c - bayes and bayes_rotation: a mean and a covariance per head, filtered exactly.
 *
 *   q, k, v = silu(conv(x W'))      q, k to unit length per head
 *   la = -e^A softplus(x W_a' + dt) per head    l2 = softplus(x W_l' + b_l) + 1e-6 per head
 *   r2 = softplus(x W_r' + b_r) + 1e-6 per head and noise group
 *   Pbar = A P A' + l2 N, u = Pbar k, w = u / (r2 + k'u), P = Pbar - w u'
 *   M = A M + w (v - (A M)'k)', o = M'q            P starts at p0 I, M at 0
 *   y = (rms(o) silu(x W_g')) W_o'
 *
 * A is e^la I; bayes_rotation has a pair of rows for every key channel instead, which also turns,
 * by A_angle + x W_angle'. There are G noise groups, each with a covariance and its share of the
 * value columns. Queries are not scaled, so that q'Pq is the variance of what is read. Covariances
 * cost the square of a head's width per token: unless the options say otherwise heads are 64 wide,
 * and 256 in models of width 1024 or more. */
#include "layers/family.h"

static const double least_noise = 1e-6, prior_variance = 3.0;

static bool rotates(const mn_layer *layer) {
    return layer->kind == MN_LAYER_bayes_rotation;
}

static int64_t default_heads(int64_t D) {
    int64_t H = D / (D >= 1024 ? 256 : 64);
    while (H > 1 && D % H != 0) H--;
    return H > 1 ? H : 1;
}

static mn_status derive(mn_layer *layer, int64_t context) {
    (void)context;
    const mn_layer_config *c = &layer->config;
    mn_layer_sizes *s = &layer->sizes;
    const bool chosen = c->num_heads || c->head_dim;
    mn_status st = mn_derive_heads(layer, chosen ? c->num_heads : default_heads(layer->width), 0,
                                   c->head_dim, 1.0, c->expand_v);
    if (st != MN_OK) return st;
    MN_SIZE(s, 'W') = c->conv_size;
    MN_SIZE(s, 'G') = c->noise_groups;
    st = mn_layer_require(layer, !c->use_short_conv || c->conv_size >= 1, "conv_size",
                          "must be at least 1");
    if (st == MN_OK) {
        st = mn_layer_require(layer, c->noise_groups >= 1, "noise_groups", "must be at least 1");
    }
    if (st == MN_OK) {
        st = mn_layer_require(layer, MN_SIZE(s, 'V') % c->noise_groups == 0, "noise_groups",
                              "does not divide the width of a value head");
    }
    return st;
}

static mn_tensor *key_of(mn_forward *f, mn_tensor *x, const char *weight, const char *conv,
                         const char *piece) {
    return mn_project_unit(f, x, weight, conv, 1, 1e-6, piece);
}

/* (B,T,H,n): softplus(x W' + b) + 1e-6 */
static mn_tensor *noise_of(mn_forward *f, mn_tensor *x, const char *weight, const char *bias,
                           bool per_group) {
    mn_tensor *n = mn_tape_unary(f->tape, MN_UNARY_SOFTPLUS, mn_project(f, x, weight, bias));
    n = mn_tape_affine(f->tape, n, 1.0, least_noise);
    return per_group ? mn_tape_heads(f->tape, n, MN_OF(f, 'H')) : n;
}

/* The log radius, (B,T,H,K), the same for all channels of a head. */
static mn_tensor *log_radius(mn_forward *f, mn_tensor *x, const int64_t shape[4]) {
    mn_tape *tape = f->tape;
    const int64_t H = MN_OF(f, 'H');
    if (!mn_use(f, "a_proj.weight")) return mn_filled(f, shape, 0.0);
    mn_tensor *g = mn_tape_decay(tape, mn_project(f, x, "a_proj.weight", NULL),
                                 mn_use_as(f, "dt_bias", 1, H), mn_use_as(f, "A_log", 1, H));
    return mn_tape_spread(tape, mn_tape_heads(tape, g, H), shape);
}

static mn_tensor *angle_of(mn_forward *f, mn_tensor *x, const int64_t shape[4]) {
    mn_tensor *angle = mn_use_as(f, "A_angle", MN_OF(f, 'H'), MN_OF(f, 'K'));
    if (!mn_use(f, "angle_proj.weight")) return mn_tape_spread(f->tape, angle, shape);
    mn_tensor *more = mn_project(f, x, "angle_proj.weight", NULL);
    return mn_tape_add(f->tape, mn_tape_heads(f->tape, more, MN_OF(f, 'H')), angle);
}

/* The variance before the first token, per head: 3, or 3 e^p0_log. */
static mn_tensor *prior_of(mn_forward *f) {
    const int64_t H = MN_OF(f, 'H');
    mn_tensor *learned = mn_use(f, "p0_log");
    if (learned) {
        learned = mn_tape_unary(f->tape, MN_UNARY_EXP, learned);
        return mn_tape_affine(f->tape, learned, prior_variance, 0.0);
    }
    return mn_filled(f, (int64_t[]){ 1, 1, 1, H }, prior_variance);
}

/* x, which the tap hears of. */
static mn_tensor *told(const mn_forward *f, const char *name, mn_tensor *x) {
    mn_tell(f, name, x);
    return x;
}

static mn_tensor *remember(mn_forward *f, mn_tensor *x, mn_tensor *q, mn_tensor *k, mn_tensor *v) {
    if (!q || !k || !v) return NULL;
    const int64_t heads = q->shape[0] * MN_OF(f, 'H');
    const int64_t R = rotates(f->layer) ? 2 * MN_OF(f, 'K') : MN_OF(f, 'K');
    mn_run run;
    mn_bayes_args *args = mn_run_start(&run, f->tape, MN_OP_bayes);
    args->scale = 1.0;
    mn_run_in(&run, "q", q);
    mn_run_in(&run, "k", k);
    mn_run_in(&run, "v", v);
    mn_run_in(&run, "la", told(f, "la", log_radius(f, x, k->shape)));
    if (rotates(f->layer)) mn_run_in(&run, "theta", angle_of(f, x, k->shape));
    mn_run_in(&run, "l2", told(f, "l2", noise_of(f, x, "l_proj.weight", "l_proj.bias", false)));
    mn_run_in(&run, "r2", told(f, "r2", noise_of(f, x, "r_proj.weight", "r_proj.bias", true)));
    mn_run_in(&run, "p0", told(f, "p0", prior_of(f)));
    mn_state_bind(f->state, &run, "M0", "M", "mean", heads * R * MN_OF(f, 'V'));
    mn_state_bind(f->state, &run, "P0", "P", "covariance", heads * MN_OF(f, 'G') * R * R);
    mn_tensor *o = mn_run_out(&run, "o");
    mn_tensor *variance = f->variance ? mn_run_out(&run, "qvar") : NULL;
    mn_run_now(&run);
    mn_tell_variance(f, variance);
    mn_tell(f, "q", q);
    mn_tell(f, "k", k);
    mn_tell(f, "v", v);
    mn_tell(f, "read", o);
    return o;
}

static mn_tensor *forward(mn_forward *f, mn_tensor *x) {
    mn_tape *tape = f->tape;
    const int64_t H = MN_OF(f, 'H');
    mn_tensor *k = key_of(f, x, "k_proj.weight", "k_conv1d.weight", "k_conv");
    mn_tensor *q = key_of(f, x, "q_proj.weight", "q_conv1d.weight", "q_conv");
    q = mn_ccq_query(f, x, q, k);
    mn_tensor *v = mn_tape_heads(tape, mn_project_conv(f, x, "v_proj.weight", "v_conv1d.weight",
                                                       MN_UNARY_SILU, "v_conv"), H);
    mn_tensor *o = remember(f, x, q, k, v), *gate = NULL;
    if (f->layer->config.use_gate) {
        gate = mn_tape_heads(tape, mn_project(f, x, "g_proj.weight", NULL), H);
    }
    mn_tell(f, "gate", gate);
    o = mn_norm_gate(f, o, gate, "o_norm.weight", 0);
    return mn_project_out(f, mn_tape_flat(tape, o), "o_proj.weight", NULL);
}

const mn_layer_family mn_family_bayes = { derive, forward };
