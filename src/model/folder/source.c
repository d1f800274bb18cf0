/* source.c - opens folders for looking, and plans passes of models without memory. */
#include "model/folder/source.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/checked.h"
#include "base/status.h"

enum { PATH = 4096 };

mn_status mn_source_open_config(mn_source *out, const char *given) {
    char path[PATH];
    mn_model_config config = { 0 };
    *out = (mn_source){ 0 };
    mn_status st = mn_folder_of_model(out->folder, given);
    if (st == MN_OK && snprintf(path, PATH, "%s/config.json", out->folder) >= PATH) {
        st = mn_fail(MN_ERR_ARGUMENT, "%s: the path is too long", given);
    }
    if (st == MN_OK) st = mn_json_load(&out->config, path, MN_JSON_PYTHON);
    if (st == MN_OK) st = mn_model_config_read(&config, &out->config);
    if (st == MN_OK) st = mn_model_sketch(&out->model, &config);
    mn_model_config_free(&config);
    if (st != MN_OK) mn_source_close(out);
    return st;
}

mn_status mn_source_open(mn_source *out, const char *given) {
    mn_status st = mn_source_open_config(out, given);
    if (st == MN_OK) st = mn_weights_open(&out->weights, out->folder, out->model);
    if (st != MN_OK) mn_source_close(out);
    return st;
}

void mn_source_close(mn_source *source) {
    mn_weights_close(source->weights);
    mn_model_destroy(source->model);
    mn_json_free(&source->config);
    *source = (mn_source){ 0 };
}

/* ---- plans ----------------------------------------------------------------------------------- */

static void sum_pieces(size_t *fixed, size_t *token, const mn_layer_state *state) {
    *fixed = *token = 0;
    for (int i = 0; i < state->n_pieces; i++) {
        const mn_state_piece *piece = &state->pieces[i];
        *(piece->width ? token : fixed) += (size_t)piece->count * sizeof(float);
    }
}

mn_status mn_sketch_state(size_t *fixed, size_t *token, mn_model *sketch, mn_context *context) {
    mn_model_state state = { 0 };
    mn_tape *tape = NULL;
    mn_status st = mn_model_state_create(&state, sketch);
    if (st == MN_OK) st = mn_tape_create(&tape, context, MN_F32);
    if (st == MN_OK) {
        const int32_t one = 0;
        const mn_model_input in = { .tokens = &one, .B = 1, .T = 1, .state = &state };
        for (int i = 0; i < state.n_layers; i++) state.layers[i].counts = true;
        mn_tape_start(tape, MN_TAPE_PLAN);
        mn_model_hidden(sketch, tape, &in);
        st = mn_tape_status(tape);
    }
    for (int i = 0; i < state.n_layers && st == MN_OK; i++) {
        sum_pieces(&fixed[i], &token[i], &state.layers[i]);
    }
    mn_tape_destroy(tape);
    mn_model_state_free(&state);
    return st;
}

static mn_status plan(mn_model *sketch, mn_tape *tape, const int32_t *tokens, int64_t B, int64_t T,
                      bool train) {
    const mn_model_input in = { .tokens = tokens, .B = B, .T = T };
    double loss;
    int64_t counted;
    mn_tape_start(tape, MN_TAPE_PLAN | (train ? MN_TAPE_RECORD : 0));
    mn_tensor *hidden = mn_model_hidden(sketch, tape, &in);
    if (train) {
        mn_model_loss(sketch, tape, hidden, tokens, (mn_loss_options){ .weight = 1.0 }, &loss,
                      &counted);
        return mn_tape_status(tape) == MN_OK ? mn_tape_backward(tape) : mn_tape_status(tape);
    }
    return mn_tape_status(tape);
}

mn_status mn_sketch_pass(size_t *bytes, mn_model *sketch, mn_context *context, int64_t B, int64_t T,
                         bool train) {
    int64_t count;
    int32_t *tokens = NULL;
    mn_tape *tape = NULL;
    if (mn_mul_i64(&count, B, T) && count > 0) tokens = calloc((size_t)count, sizeof *tokens);
    if (!tokens) {
        return mn_fail(MN_ERR_MEMORY, "no memory for %lld x %lld tokens", (long long)B,
                       (long long)T);
    }
    mn_status st = train ? mn_model_reserve_gradients(sketch) : MN_OK;
    if (st == MN_OK) st = mn_tape_create(&tape, context, MN_F32);
    if (st == MN_OK) st = plan(sketch, tape, tokens, B, T, train);
    if (st == MN_OK) *bytes = mn_tape_bytes(tape) + mn_tape_work_bytes(tape);
    if (st == MN_OK && !train) {
        *bytes += (size_t)(B * mn_model_describe(sketch)->vocab_size) * sizeof(float);
    }
    mn_tape_destroy(tape);
    free(tokens);
    return st;
}
