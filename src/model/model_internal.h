/* model_internal.h - the inside of a model, shared by the files of this folder. */
#ifndef MN_MODEL_MODEL_INTERNAL_H
#define MN_MODEL_MODEL_INTERNAL_H

#include "model/model.h"
#include "runtime/device.h"

/* Where a block's parameters are among the model's; -1: it has none. */
typedef struct mn_block {
    mn_layer layer;
    int attn_norm, mixer;            // mixer: the first of layer.n_params
    int mlp_norm, gate, up, down;
    int gate_bias, up_bias, down_bias;
    int mlp_shift;                   // x_k of a channel mix, whose key is `up` and value `down`
    int pre_norm;                    // of the embeddings, in front of the first block
} mn_block;

enum { MN_DECODER_STAGES = 2, MN_DECODER_PARTS = 3 };    // norm, weight, bias

struct mn_model {
    mn_model_config config;
    mn_dtype dtype;
    mn_block *blocks;
    mn_model_param *params;
    mn_tensor **leaves;              // of the current pass, by parameter
    int n_params, capacity;
    int embed, norm, head;           // head = embed when tied
    int bounds;                      // (L,D), least gates of the layers; -1: none
    int32_t rows[MN_MAX_LAYERS];     // 0, 1, 2, ..: which row of it is whose
    int decoder[MN_DECODER_STAGES][MN_DECODER_PARTS];
    int32_t *ends;                   // n_ends of them, see decoder.c
    int64_t n_ends;
    mn_tape *tape;                   // of the current pass

    /* On a GPU (place.c): a handle of the model's own, and one piece of memory for all values, for
     * all gradients and for all shadows. */
    mn_device *device;               // NULL: the host
    unsigned char *values, *grads, *shadows;
    size_t device_bytes;
};

/* Memory of the GPU for the gradients of a model that is there, zeroed. */
mn_status mn_model_place_gradients(mn_model *model);

/* Frees what a model has on a GPU. */
void mn_model_unplace(mn_model *model);

/* Makes leaves of all parameters on the tape. */
void mn_model_bind(mn_model *model, mn_tape *tape, bool add_gradients);

/* One block's halves: x + mixer(rms(x)) and x + mlp(rms(x)). `f` carries what the mixer is asked
 * for and brings back. */
mn_tensor *mn_block_mixer(mn_model *model, int i, mn_forward *f, mn_tensor *x);
mn_tensor *mn_block_mlp(mn_model *model, int i, const mn_forward *f, mn_tensor *x);
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
