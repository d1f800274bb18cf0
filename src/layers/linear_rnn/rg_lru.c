/* rg_lru.c - Griffin's recurrent block: a linear recurrence per channel whose decay and input are
 * gated by the token.
 *
 *   u = conv(x W_x' + b_x) + b_c          without activation
 *   i = sigmoid(u W_i + b_i)   r = sigmoid(u W_r + b_r)        W_i, W_r block-diagonal, (in,out)
 *   log a = -8 r softplus(p)   h = a h + sqrt(1 - a^2) i u     h = i u at a sequence's first token
 *   y = (gelu(x W_y' + b_y) h) W_out' + b_out
 *
 * The gates' blocks are num_heads, those of attention beside it in the published models. */
#include "base/util.h"
#include "layers/family.h"

static mn_status derive(mn_layer *layer, int64_t context) {
    (void)context;
    mn_layer_config *c = &layer->config;
    mn_layer_sizes *s = &layer->sizes;
    const int64_t E = c->lru_width ? c->lru_width : layer->width;
    int64_t H = c->num_heads ? c->num_heads : mn_max(E / 64, 1);
    while (c->num_heads == 0 && E % H != 0) H--;
    mn_status st = mn_layer_require(layer, E % H == 0, "num_heads", "does not divide lru_width");
    if (st == MN_OK) {
        st = mn_layer_require(layer, c->conv_size >= 1, "conv_size", "must be at least 1");
    }
    if (st != MN_OK) return st;
    c->num_heads = H;
    MN_SIZE(s, 'E') = E;
    MN_SIZE(s, 'H') = H;
    MN_SIZE(s, 'K') = E / H;
    MN_SIZE(s, 'W') = c->conv_size;
    return MN_OK;
}

static mn_tensor *gate_of(mn_forward *f, mn_tensor *u, const char *weight, const char *bias) {
    const int64_t H = MN_OF(f, 'H'), K = MN_OF(f, 'K');
    mn_tensor *blocks = mn_use_as(f, weight, H * K, K);
    mn_tensor *y = mn_tape_linear_blocks(f->tape, u, blocks, H);
    return mn_tape_add(f->tape, y, mn_use_as(f, bias, 1, H * K));
}

static mn_tensor *forward(mn_forward *f, mn_tensor *x) {
    mn_tape *tape = f->tape;
    mn_tensor *y = mn_project(f, x, "linear_y.weight", "linear_y.bias");
    mn_tensor *u = mn_project(f, x, "linear_x.weight", "linear_x.bias");
    u = mn_short_conv(f, u, "conv_1d.weight", "conv_1d.bias", 0, "conv");
    mn_tensor *gx = gate_of(f, u, "rg_lru.input_gate_weight", "rg_lru.input_gate_bias");
    mn_tensor *ga = gate_of(f, u, "rg_lru.recurrent_gate_weight", "rg_lru.recurrent_gate_bias");
    if (!u || !gx || !ga) return NULL;
    mn_run run;
    mn_run_start(&run, tape, MN_OP_lru);
    mn_run_in(&run, "x", u);
    mn_run_in(&run, "gx", gx);
    mn_run_in(&run, "ga", ga);
    mn_run_in(&run, "a_param", mn_use(f, "rg_lru.recurrent_param"));
    mn_state_bind(f->state, &run, "h0", "h", "memory", x->shape[0] * MN_OF(f, 'E'));
    mn_tensor *h = mn_run_out(&run, "y");
    mn_run_now(&run);
    h = mn_tape_gate(tape, MN_UNARY_GELU, y, h);
    return mn_project_out(f, h, "linear_out.weight", "linear_out.bias");
}

const mn_layer_family mn_family_rg_lru = { derive, forward };
