/* channel_mix.c - what the second half of a block of RWKV-7 makes of tokens mixed with the one
 * before:
 *
 *   k = n_t + x_k (n_{t-1} - n_t)      relu(key k)^2 */
#include "layers/family.h"

mn_tensor *mn_channel_mixed(mn_tape *tape, mn_layer_state *state, mn_tensor *n, mn_tensor *x_k,
                            mn_tensor *key, const char *piece) {
    if (!n || !x_k || !key) return NULL;
    mn_tensor *by = mn_tape_shaped(tape, x_k, (int64_t[]){ 1, 1, 1, n->shape[3] });
    mn_tensor *d = mn_token_shift(tape, state, n, piece);
    mn_tensor *k = mn_tape_add(tape, n, mn_tape_multiply(tape, d, by));
    k = mn_tape_linear(tape, k, key, NULL);
    return mn_tape_unary(tape, MN_UNARY_SQUARE, mn_tape_unary(tape, MN_UNARY_RELU, k));
}
