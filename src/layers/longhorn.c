/* longhorn.c - longhorn and longhorn_column: each channel solves its own regression online.
 *
 *   u, z = x W_in'      u = silu(conv(u) + bias)      r, k, q = u W_x'
 *   beta = sigmoid(r W_dt' + b) per channel, shared keys of width K for the channels of a head
 *   w_j = beta_j / (1 + beta_j |k|^2)
 *   longhorn          S_ij = (1 - w_j k_i^2) S_ij + w_j k_i u_j
 *   longhorn_column   S_:j = S_:j + w_j k (u_j - k'S_:j), the same before it was cut to a diagonal
 *   y = ((S'q + D u) silu(z)) W_out'
 *
 * The scaffold and the names are those of the published Longhorn, which is Mamba's block with the
 * state space exchanged: no A, no step, the forgetting follows from beta and the key. One head is
 * what was published; num_heads gives blocks of channels keys of their own and is ours. */
#include "base/util.h"
#include "layers/family.h"

static mn_status derive(mn_layer *layer, int64_t context) {
    (void)context;
    const mn_layer_config *c = &layer->config;
    mn_layer_sizes *s = &layer->sizes;
    const double inner = c->expand * (double)layer->width;
    mn_status st = mn_layer_require(layer, inner >= 1.0 && inner < 1e9, "expand",
                                    "leaves no channels, or too many");
    const int64_t I = st == MN_OK ? (int64_t)inner : 1, H = mn_max(c->num_heads, 1);
    if (st == MN_OK) {
        st = mn_layer_require(layer, I % H == 0, "num_heads",
                              "does not divide expand times the width");
    }
    if (st == MN_OK) {
        st = mn_layer_require(layer, c->state_size >= 1 && c->state_size <= 65536, "state_size",
                              "must lie in 1 .. 65536");
    }
    if (st == MN_OK) {
        st = mn_layer_require(layer, c->dt_rank <= 65536, "dt_rank", "must lie below 65536");
    }
    if (st == MN_OK) {
        st = mn_layer_require(layer, c->conv_kernel >= 1, "conv_kernel", "must be at least 1");
    }
    MN_SIZE(s, 'H') = H;
    MN_SIZE(s, 'K') = c->state_size;
    MN_SIZE(s, 'V') = I / H;
    MN_SIZE(s, 'I') = I;
    MN_SIZE(s, 'W') = c->conv_kernel;
    MN_SIZE(s, 'R') = c->dt_rank ? c->dt_rank : mn_ceil_div(layer->width, 16);
    layer->config.dt_rank = MN_SIZE(s, 'R');
    MN_SIZE(s, 'P') = MN_SIZE(s, 'R') + 2 * H * c->state_size;
    return st;
}

/* Arguments of both operators are the same type. */
static mn_tensor *remember(mn_forward *f, mn_tensor *q, mn_tensor *k, mn_tensor *v,
                           mn_tensor *beta) {
    if (!q || !k || !v || !beta) return NULL;
    mn_run run;
    mn_longhorn_diag_args *args = mn_run_start(&run, f->tape, f->layer->mixer.op);
    args->scale = 1.0;
    mn_run_in(&run, "q", q);
    mn_run_in(&run, "k", k);
    mn_run_in(&run, "v", v);
    mn_run_in(&run, "beta", beta);
    mn_state_bind(f->state, &run, "state0", "state", "memory",
                  q->shape[0] * MN_OF(f, 'H') * MN_OF(f, 'K') * MN_OF(f, 'V'));
    mn_tensor *o = mn_run_out(&run, "o");
    mn_run_now(&run);
    return o;
}

static const char *given(const mn_forward *f, const char *name) {
    return mn_use(f, name) ? name : NULL;
}

static mn_tensor *forward(mn_forward *f, mn_tensor *x) {
    mn_tape *tape = f->tape;
    const int64_t H = MN_OF(f, 'H'), I = MN_OF(f, 'I'), HK = H * MN_OF(f, 'K');
    mn_tensor *wide = mn_project(f, x, "in_proj.weight", given(f, "in_proj.bias"));
    mn_tensor *uz[2], *rkq[3];
    mn_tape_split(tape, wide, (int64_t[]){ I, I }, 2, uz);
    mn_tensor *u = mn_short_conv(f, uz[0], "conv1d.weight", given(f, "conv1d.bias"), 1, "conv");
    mn_tensor *narrow = mn_project(f, u, "x_proj.weight", NULL);
    mn_tape_split(tape, narrow, (int64_t[]){ MN_OF(f, 'R'), HK, HK }, 3, rkq);
    mn_tensor *k = f->layer->ccq ? mn_tape_join(tape, &rkq[1], 1) : rkq[1];
    k = mn_tape_heads(tape, k, H);
    mn_tensor *q = mn_ccq_query(f, x, mn_tape_heads(tape, rkq[2], H), k);
    mn_tensor *beta = mn_project(f, rkq[0], "dt_head.weight", "dt_head.bias");
    beta = mn_tape_heads(tape, mn_tape_unary(tape, MN_UNARY_SIGMOID, beta), H);
    mn_tensor *o = mn_tape_flat(tape, remember(f, q, k, mn_tape_heads(tape, u, H), beta));
    o = mn_tape_add(tape, o, mn_tape_multiply(tape, u, mn_use(f, "D")));
    return mn_project_out(f, mn_tape_gate(tape, MN_UNARY_SILU, uz[1], o), "out_proj.weight",
                      given(f, "out_proj.bias"));
}

const mn_layer_family mn_family_longhorn = { derive, forward };
