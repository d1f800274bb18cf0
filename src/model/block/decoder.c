/* decoder.c - the head of an autoencoder: every place says its token from the stream at the last
 * place, which has to hold them all (the compression task of MAD).
 *
 *   h_p = z + e_p       z the stream at the last place, e_p = [sin(p w_i), cos(p w_i)]
 *   h = gelu(W_1 rms(h) + b_1)       h = gelu(W_2 rms(h) + b_2)
 *
 * w_i = 10^(-4 i / (n - 1)) for i = 0 .. n - 1, n half the width. */
#include <math.h>
#include <stdlib.h>

#include "base/status.h"
#include "model/model_internal.h"

/* Where row b of (B,T) ends. */
static const int32_t *ends_of(mn_model *model, int64_t B, int64_t T) {
    if (B > model->n_ends) {
        int32_t *grown = realloc(model->ends, (size_t)B * sizeof *grown);
        if (!grown) return NULL;
        model->ends = grown;
        model->n_ends = B;
    }
    for (int64_t b = 0; b < B; b++) model->ends[b] = (int32_t)(b * T + T - 1);
    return model->ends;
}

static double angle(int64_t place, int64_t i, int64_t n) {
    return (double)place * pow(1e4, n > 1 ? -(double)i / (double)(n - 1) : 0.0);
}

/* (1,T,1,D), without gradient. */
static mn_tensor *places(mn_tape *tape, int64_t T, int64_t D) {
    double *values = calloc((size_t)(T * D), sizeof *values);
    const int64_t n = D / 2;
    if (!values) return mn_tape_fail(tape, mn_fail(MN_ERR_MEMORY, "no memory for a decoder"));
    for (int64_t i = 0; !mn_tape_plans(tape) && i < T * D; i++) {
        const int64_t at = i % D;
        values[i] = at < n ? sin(angle(i / D, at, n))
                           : at < 2 * n ? cos(angle(i / D, at - n, n)) : 0.0;
    }
    mn_tensor *e = mn_tape_constant(tape, (int64_t[]){ 1, T, 1, D }, values);
    free(values);
    return e;
}

static mn_tensor *stage(mn_model *model, mn_tape *tape, mn_tensor *h, const int *params) {
    h = mn_model_norm(model, tape, h, params[0]);
    h = mn_tape_linear(tape, h, model->leaves[params[1]], model->leaves[params[2]]);
    return mn_tape_unary(tape, MN_UNARY_GELU, h);
}

mn_tensor *mn_model_decode(mn_model *model, mn_tape *tape, mn_tensor *x, bool from_state) {
    if (model->config.decoder == MN_DECODER_NONE || !x) return x;
    if (from_state || mn_tape_sequences(tape) > 0) {
        return mn_tape_fail(tape, mn_fail(MN_ERR_UNSUPPORTED, "a model with decoder \"places\" "
                                          "reads whole rows: not packed, and not step by step"));
    }
    const int64_t B = x->shape[0], T = x->shape[1], D = x->shape[3];
    const int32_t *ends = ends_of(model, B, T);
    if (!ends) return mn_tape_fail(tape, mn_fail(MN_ERR_MEMORY, "no memory for a decoder"));
    mn_tape_scope(tape, "model.decoder");
    mn_tensor *z = mn_tape_pick(tape, x, ends, B);
    z = mn_tape_shaped(tape, z, (int64_t[]){ B, 1, 1, D });
    z = mn_tape_spread(tape, z, (int64_t[]){ B, T, 1, D });
    mn_tensor *h = mn_tape_add(tape, z, places(tape, T, D));
    for (int i = 0; i < MN_DECODER_STAGES; i++) h = stage(model, tape, h, model->decoder[i]);
    return h;
}
