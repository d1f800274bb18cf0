/* channel_mix.c - the second half of a block of RWKV-7: an MLP of tokens mixed with the one before.
 *
 *   n = norm(x)      k = n_t + x_k (n_{t-1} - n_t)      x + value relu(key k)^2
 *
 * Its last input is a piece of the layer's state. */
#include "layers/family.h"
#include "model/model_internal.h"

mn_tensor *mn_channel_mix(mn_model *model, int i, const mn_forward *f, mn_tensor *x, mn_tensor *n) {
    if (!x || !n) return NULL;
    const mn_block *block = &model->blocks[i];
    mn_tensor **leaves = model->leaves;
    mn_tensor *k = mn_channel_mixed(f->tape, f->state, n, leaves[block->mlp_shift],
                                    leaves[block->mlp.up], "channel_shift");
    return mn_tape_linear_onto(f->tape, x, k, leaves[block->mlp.down], NULL);
}
