/* embed.c - from tokens to the stream that the first block reads. */
#include "base/status.h"
#include "model/model_internal.h"

/* Where the tokens of row b begin in their sequence: a batch has positions of its own. */
static int64_t first_of(const mn_model_input *in, int64_t b) {
    if (!in->state) return 0;
    mn_layer_state *state = &in->state->layers[0];
    state->by_position = true;
    return state->rows ? state->positions[b] : in->state->position;
}

/* Positions of all tokens, in memory of the tape's step: one that was recorded uploads them again
 * in front of each launch, whatever other tapes have read since. NULL after a failure. */
static const int32_t *places_of(const mn_model *model, mn_tape *tape, const mn_model_input *in) {
    const int64_t n = in->B * in->T, most = model->config.block.learned_positions;
    int32_t *places = mn_tape_host(tape, (size_t)n * sizeof *places);
    if (!places) return NULL;
    const mn_layer_state *state = in->state ? &in->state->layers[0] : NULL;
    const int64_t *starts = in->starts ? in->starts : state ? state->starts : NULL;
    int64_t row = 0;
    for (int64_t i = 0; i < n; i++) {
        while (starts && i >= starts[row + 1]) row++;
        const int64_t within = starts ? i - starts[row] : i % in->T;
        const int64_t place = within + first_of(in, starts ? row : i / in->T);
        if (place >= most) {
            mn_tape_fail(tape, mn_fail(MN_ERR_ARGUMENT, "token %lld of a sequence: the model has "
                                       "%lld positions", (long long)place + 1, (long long)most));
            return NULL;
        }
        places[i] = (int32_t)place;
    }
    return places;
}

bool mn_model_repeats_steps(const mn_model *model) {
    bool repeats = model->positions < 0;
    for (int i = 0; i < model->config.n_layers; i++) {
        repeats = repeats && model->blocks[i].router < 0;
    }
    return repeats;
}

mn_tensor *mn_model_embed(mn_model *model, mn_tape *tape, const mn_model_input *in) {
    const double by = model->config.block.embedding_multiplier;
    mn_tensor *x = mn_tape_embed(tape, model->leaves[model->embed], in->tokens, in->B, in->T);
    if (by != 1.0) x = mn_tape_affine(tape, x, by, 0.0);
    if (model->positions < 0 || !x) return x;
    const int32_t *places = places_of(model, tape, in);
    if (!places) return NULL;
    mn_tensor *p = mn_tape_embed(tape, model->leaves[model->positions], places, in->B, in->T);
    return mn_tape_add(tape, x, p);
}
