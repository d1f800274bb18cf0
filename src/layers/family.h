/* family.h - what families of layers are made of: the pieces that several share. */
#ifndef MN_LAYERS_FAMILY_H
#define MN_LAYERS_FAMILY_H

#include "base/status.h"
#include "layers/layer.h"

typedef struct mn_layer_family {
    /* Sets the sizes that the kind's parameters and forward use; D is set. */
    mn_status (*derive)(mn_layer *layer, int64_t context);
    mn_tensor *(*forward)(mn_forward *f, mn_tensor *x);
} mn_layer_family;

#define LAYER(kind, family) extern const mn_layer_family mn_family_##family;
#include "layers/all.def"

/* The parameter called `name`; a layer without it (its option is off) gives NULL. */
mn_tensor *mn_use(const mn_forward *f, const char *name);

/* Sizes by letter of the layer at hand. */
#define MN_OF(f, letter) MN_SIZE(&(f)->layer->sizes, letter)

/* The usual sizes: H heads of width K and J value heads of width V. Options left at 0 follow from
 * D: heads of about 64, K = D / heads; the layer's options num_heads and head_dim then say so. */
mn_status mn_derive_heads(mn_layer *layer, int64_t num_heads, int64_t num_v_heads, int64_t head_dim,
                          double expand_k, double expand_v);

/* Fails with the option's name unless `holds`. */
mn_status mn_layer_require(const mn_layer *layer, bool holds, const char *option, const char *why);

/* x W', with the parameter's name; bias may be NULL. */
mn_tensor *mn_project(mn_forward *f, mn_tensor *x, const char *weight, const char *bias);

/* Makes n projections of x in as few products as it takes; mn_project finds them. What uses them
 * need not find them contiguous. */
void mn_project_ahead(mn_forward *f, mn_tensor *x, const char *const *weights, int n);

/* mn_project for what a layer ends with, which is added to f->onto. */
mn_tensor *mn_project_out(mn_forward *f, mn_tensor *x, const char *weight, const char *bias);

/* Causal convolution of (B,T,1,C) by parameter `weight`, act 0 none, 1 SiLU; its tail is the state
 * `piece`. */
mn_tensor *mn_short_conv(mn_forward *f, mn_tensor *x, const char *weight, const char *bias, int act,
                         const char *piece);

/* Keys: silu(conv(x)) of (B,T,1,H K) by parameter `weight`, as H heads of unit length, kind and eps
 * as in mn_unit; the tail is the state `piece`. */
mn_tensor *mn_unit_conv(mn_forward *f, mn_tensor *x, const char *weight, int64_t H, int kind,
                        double eps, const char *piece);

/* Projection, then the short convolution with SiLU if the layer has one, else f(projection), else
 * (f < 0) the projection alone. */
mn_tensor *mn_project_conv(mn_forward *f, mn_tensor *x, const char *weight, const char *conv,
                           int without, const char *piece);

/* Rows scaled to unit length: kind 0 x / max(|x|, eps), 1 x / sqrt(|x|^2 + eps). */
mn_tensor *mn_unit(mn_forward *f, mn_tensor *x, int kind, double eps);

/* rms(x) w over the last axis; with `gate` times act(gate) (0 silu, 1 sigmoid) afterwards. */
mn_tensor *mn_norm_gate(mn_forward *f, mn_tensor *x, mn_tensor *gate, const char *weight, int act);

/* Keys of H heads: the projection, then mn_unit_conv, or without a short convolution mn_unit of its
 * SiLU. */
mn_tensor *mn_project_unit(mn_forward *f, mn_tensor *x, const char *weight, const char *conv,
                           int kind, double eps, const char *piece);

/* x_{t-1} - x_t of (B,T,1,D), 0 in place of x_{-1}; the last input is the state `piece`. */
mn_tensor *mn_token_shift(mn_tape *tape, mn_layer_state *state, mn_tensor *x, const char *piece);

/* Least gates of L layers from their rows, L > 0 tensors of a common shape: lb_l = sum over 1 .. l
 * of e^row / sum over all of e^row, as log odds; that of layer 0 is 0, NULL. */
void mn_gate_bounds(mn_tape *tape, mn_tensor *const *rows, int L, mn_tensor **bounds);

/* relu(key (n + x_k d))^2, d the tokens before less n; the last input is the state `piece`. */
mn_tensor *mn_channel_mixed(mn_tape *tape, mn_layer_state *state, mn_tensor *n, mn_tensor *x_k,
                            mn_tensor *key, const char *piece);

/* Based's features of a contiguous x (B,T,H,d): 1, x_i / d^(1/4), x_i^2 / sqrt(2 d) and
 * x_i x_j / sqrt d for i < j. */
mn_tensor *mn_taylor_features(mn_tape *tape, mn_tensor *x);

/* x less its mean over the last axis, of a contiguous x; and the sum over the last axis. */
mn_tensor *mn_centred(mn_tape *tape, mn_tensor *x);
mn_tensor *mn_row_sums(mn_tape *tape, mn_tensor *x, double scale);

/* x / sqrt(mean x^2 + eps) over the last axis. */
mn_tensor *mn_rms_rows(mn_tape *tape, mn_tensor *x, double eps);

/* Where token t of row b of a pass stands in its sequence; the layer then goes by position. */
int64_t mn_position_of(const mn_forward *f, int64_t b, int64_t t);

/* S = diag(e^g) S + k v';  o = scale S'q, g absent (decay MN_DECAY_NONE) or as `decay` says; the
 * state is `piece`. */
mn_tensor *mn_sum_read(mn_forward *f, mn_tensor *q, mn_tensor *k, mn_tensor *v, mn_tensor *g,
                       int decay, double scale, const char *piece);

/* Number i of a parameter that starts by a law of RWKV-7. */
double mn_rwkv7_start(const mn_param_info *info, int64_t i);

/* Cuts every head of x (B,T,H,X) into n parts of those widths, each contiguous with its heads. */
void mn_split_heads(mn_forward *f, mn_tensor *x, const int64_t *widths, int n, mn_tensor **parts);

/* eps of an operator that layers have no option for. */
double mn_eps_of(mn_op_id op);

/* A constant of all one value, without gradient. */
mn_tensor *mn_filled(mn_forward *f, const int64_t shape[4], double value);

/* x / (sum(x) + eps) over the last axis of a contiguous x (B,T,H,X), for features an activation
 * keeps positive. */
mn_tensor *mn_over_sum(mn_forward *f, mn_tensor *x, double eps);

/* A parameter of n numbers as (1,1,rows,cols), to go with (B,T,rows,cols). */
mn_tensor *mn_use_as(const mn_forward *f, const char *name, int64_t rows, int64_t cols);

/* The query after the curvature-conditioned contraction, where the layer is "+ccq"; else q itself.
 * q, k (B,T,H,K); x the layer's input. */
mn_tensor *mn_ccq_query(mn_forward *f, mn_tensor *x, mn_tensor *q, mn_tensor *k);

/* Lets the pass's tap hear `x`, if there is one. */
void mn_tell(const mn_forward *f, const char *name, const mn_tensor *x);

/* Adds the read variance of this layer, (B,T,H,n), to what the caller asked for. */
void mn_tell_variance(mn_forward *f, mn_tensor *variance);

#endif
