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
    mn_tape *tape = f->tape;
    mn_tensor *by = mn_tape_shaped(tape, model->leaves[block->mlp_shift],
                                   (int64_t[]){ 1, 1, 1, n->shape[3] });
    mn_tensor *d = mn_token_shift(tape, f->state, n, "channel_shift");
    mn_tensor *k = mn_tape_add(tape, n, mn_tape_multiply(tape, d, by));
    k = mn_tape_linear(tape, k, model->leaves[block->mlp.up], NULL);
    k = mn_tape_unary(tape, MN_UNARY_SQUARE, mn_tape_unary(tape, MN_UNARY_RELU, k));
    return mn_tape_linear_onto(tape, x, k, model->leaves[block->mlp.down], NULL);
}
