/* model_internal.h - the inside of a model, shared by the files of this folder. */
#ifndef MN_MODEL_MODEL_INTERNAL_H
#define MN_MODEL_MODEL_INTERNAL_H

#include "model/model.h"
#include "ops/quantize.h"
#include "runtime/device_pages.h"

/* Where an MLP's parameters are among the model's; -1: it has none. gate is both where they are
 * fused. */
typedef struct mn_mlp_at {
    int gate, up, down;
    int gate_bias, up_bias, down_bias;
} mn_mlp_at;

/* Attention and MLP that several blocks share, each with a projection and an adapter of its own. */
typedef struct mn_shared_at {
    int norm, attention, mlp_norm;    // norm over the stream and the embeddings side by side
    int gate_up, down;
    int adapter[2], out;              // of the block alone
} mn_shared_at;

/* Where a block's parameters are; -1: it has none. */
typedef struct mn_block {
    mn_layer layer, beside;
    int first, end;                  // its parameters: of the model's list, [first, end)
    int attn_norm, mixer;            // mixer: the first of layer.n_params
    int aside;                       // the first of those beside
    int mlp_norm;
    mn_mlp_at mlp, shared;           // dense, and what serves all tokens beside the experts
    int router, router_bias, shared_gate;
    int experts, expert_params;      // the first expert's, and how many each has: gate, down, up
    mn_shared_at turn;               // out < 0: none
    int mlp_shift;                   // x_k of a channel mix, whose key is mlp.up and value mlp.down
    int pre_norm;                    // of the embeddings, in front of the first block
    bool norms_after;                // norms take what the halves give
} mn_block;

enum { MN_DECODER_STAGES = 2, MN_DECODER_PARTS = 3 };    // norm, weight, bias

struct mn_model {
    mn_model_config config;
    mn_dtype dtype;
    bool sketch;                     // parameters are addresses without memory
    mn_block *blocks;
    mn_model_param *params;
    mn_tensor **leaves;              // of the current pass, by parameter
    int n_params, capacity;
    int embed, positions, norm, head;    // head = embed when tied; positions -1: none
    int bounds;                      // (L,D), least gates of the layers; -1: none
    int32_t rows[MN_MAX_LAYERS];     // 0, 1, 2, ..: which row of it is whose
    int decoder[MN_DECODER_STAGES][MN_DECODER_PARTS];
    int32_t *ends;                   // n_ends of them, see decoder.c
    int64_t n_ends;
    mn_tape *tape;                   // of the current pass
    struct mn_weights *beside;       // files with tensors that are written back; NULL: none

    /* On a GPU (place.c): a handle of the model's own, and one piece of memory for all values, for
     * all gradients and for all shadows. */
    mn_device *device;               // NULL: the host
    unsigned char *values, *grads, *shadows;
    size_t device_bytes;             // without pages
    bool wants_pages;
    mn_device_pages *pages[MN_MODEL_PIECES];    // of values, gradients, shadows; NULL: no pages
};

/* Gives back the numbers of a parameter that are no longer needed. */
void mn_model_drop_value(const mn_model *model, mn_model_param *p);

/* Memory of the GPU for the gradients of a model that is there, zeroed. */
mn_status mn_model_place_gradients(mn_model *model);

/* Frees what a model has on a GPU. */
void mn_model_unplace(mn_model *model);

/* Makes leaves of all parameters on the tape. */
void mn_model_bind(mn_model *model, mn_tape *tape, bool add_gradients);

/* One block's halves: x + mixer(rms(x)) and x + mlp(rms(x)), or as blocks.def says. `f` carries
 * what the mixer is asked for and brings back. `input` is what the block read; with a parallel
 * residual the first half leaves out x, which the second adds. */
mn_tensor *mn_block_mixer(mn_model *model, int i, mn_forward *f, mn_tensor *x);
mn_tensor *mn_block_mlp(mn_model *model, int i, const mn_forward *f, mn_tensor *x,
                        mn_tensor *input);

/* onto + mlp(n), or without onto mlp(n). */
mn_tensor *mn_mlp_of(mn_model *model, mn_tape *tape, const mn_mlp_at *at, mn_tensor *onto,
                  mn_tensor *n);

/* What the experts of a sparse block make of n, and the shared one. */
mn_tensor *mn_mlp_experts(mn_model *model, const mn_block *block, mn_tape *tape, mn_tensor *n);

/* What a shared block makes of x and the embeddings, for block i, which has one; shared.c. */
mn_tensor *mn_shared_block(mn_model *model, int i, mn_forward *f, mn_tensor *x);
mn_status mn_model_add_shared(mn_model *model, int i);

/* Embeddings of the tokens, with their positions' where the model has a table of these. */
mn_tensor *mn_model_embed(mn_model *model, mn_tape *tape, const mn_model_input *in);

/* The matrix (rows, cols) and the vector of n zeros called `name`, at *index. */
mn_status mn_model_add_matrix(mn_model *model, int *index, const char *name, int64_t rows,
                              int64_t cols, mn_group group);
mn_status mn_model_add_vector(mn_model *model, int *index, const char *name, int64_t n,
                              mn_init init, mn_group group);

/* The second half of block i, mlp_params.c. */
mn_status mn_model_add_half(mn_model *model, mn_block *block, int i);
mn_status mn_model_add_norm(mn_model *model, int *index, const char *name);
mn_status mn_model_add_layer(mn_model *model, const mn_layer *layer, int *first,
                             const char *prefix, int i);

/* The second half of a block of RWKV-7, of the normed stream n (channel_mix.c). */
mn_tensor *mn_channel_mix(mn_model *model, int i, const mn_forward *f, mn_tensor *x, mn_tensor *n);
/* Parameters of the same; returns where the first is. */
mn_status mn_model_add(mn_model *model, int *index, const char *name, const mn_param_info *info);
/* Log odds of the least gates of each layer, NULL where there is none; see bounds.c. */
void mn_model_bounds(mn_model *model, mn_tape *tape, mn_tensor **bounds);
/* What the configuration's decoder makes of the stream behind the last block. */
mn_tensor *mn_model_decode(mn_model *model, mn_tape *tape, mn_tensor *x, bool from_state);
mn_tensor *mn_model_norm(mn_model *model, mn_tape *tape, mn_tensor *x, int weight);

#endif
