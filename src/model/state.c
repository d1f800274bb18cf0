/* state.c - what sequences have left behind in every layer, in memory and in files. */
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/dtype.h"
#include "base/status.h"
#include "io/safetensors.h"
#include "model/model_internal.h"

mn_status mn_model_state_create(mn_model_state *out, const mn_model *model) {
    *out = (mn_model_state){ .n_layers = model->config.n_layers };
    out->layers = calloc((size_t)out->n_layers, sizeof *out->layers);
    return out->layers ? MN_OK : mn_fail(MN_ERR_MEMORY, "no memory for a state");
}

void mn_model_state_free(mn_model_state *state) {
    for (int i = 0; i < state->n_layers && state->layers; i++) {
        mn_layer_state_free(&state->layers[i]);
    }
    free(state->layers);
    free(state->logits);
    memset(state, 0, sizeof *state);
}

/* Replaces the logits by a copy of `n` numbers. */
static mn_status put_logits(mn_model_state *state, const float *logits, int64_t n) {
    float *copy = malloc((size_t)n * sizeof *copy);
    if (!copy) return mn_fail(MN_ERR_MEMORY, "no memory for %" PRId64 " logits", n);
    memcpy(copy, logits, (size_t)n * sizeof *copy);
    free(state->logits);
    state->logits = copy;
    state->n_logits = n;
    return MN_OK;
}

/* Where a copy is to be. */
typedef enum copy_way { IN_PLACE, TO_HOST, TO_DEVICE } copy_way;

static mn_status copy_layer(mn_layer_state *to, const mn_layer_state *from, copy_way way,
                            mn_device *device, mn_dtype dtype) {
    if (way == TO_HOST) return mn_layer_state_fetch(to, from);
    return way == TO_DEVICE ? mn_layer_state_send(to, from, device, dtype)
                            : mn_layer_state_copy(to, from);
}

static mn_status copy_state(mn_model_state *out, const mn_model_state *from, copy_way way,
                            mn_device *device, mn_dtype dtype) {
    *out = (mn_model_state){ .n_layers = from->n_layers, .position = from->position };
    out->layers = calloc((size_t)from->n_layers, sizeof *out->layers);
    mn_status st = out->layers ? MN_OK : mn_fail(MN_ERR_MEMORY, "no memory for a state");
    for (int i = 0; i < from->n_layers && st == MN_OK; i++) {
        st = copy_layer(&out->layers[i], &from->layers[i], way, device, dtype);
    }
    if (st == MN_OK && from->logits) st = put_logits(out, from->logits, from->n_logits);
    if (st != MN_OK) mn_model_state_free(out);
    return st;
}

mn_status mn_model_state_copy(mn_model_state *out, const mn_model_state *from) {
    return copy_state(out, from, IN_PLACE, NULL, MN_F32);
}

mn_status mn_model_state_fetch(mn_model_state *out, const mn_model_state *from) {
    return copy_state(out, from, TO_HOST, NULL, MN_F32);
}

mn_status mn_model_state_send(mn_model_state *state, mn_device *device, mn_dtype dtype) {
    mn_model_state there;
    const mn_status st = copy_state(&there, state, TO_DEVICE, device, dtype);
    if (st != MN_OK) return st;
    mn_model_state_free(state);
    *state = there;
    return MN_OK;
}

size_t mn_model_state_bytes(const mn_model_state *state) {
    size_t bytes = 0;
    for (int i = 0; i < state->n_layers; i++) bytes += mn_layer_state_bytes(&state->layers[i]);
    return bytes + (size_t)state->n_logits * sizeof *state->logits;
}

/* ---- files ----------------------------------------------------------------------------------- */

enum { TENSOR_NAME = 64 };

static const char tokens_name[] = "tokens";    // that the sequence has read; no part of the state

/* FNV-1a over names and shapes: which model a state belongs to. Weights are not part of it, so that
 * a state may go on with a model that was trained further. */
static uint64_t model_mark(const mn_model *model) {
    uint64_t hash = UINT64_C(0xcbf29ce484222325);
    for (int i = 0; i < model->n_params; i++) {
        const mn_model_param *p = &model->params[i];
        for (const char *at = p->name; *at; at++) hash = (hash ^ (uint8_t)*at) * 0x100000001b3u;
        for (int k = 0; k < p->info.rank; k++) {
            hash = (hash ^ (uint64_t)p->info.shape[k]) * 0x100000001b3u;
        }
    }
    return hash;
}

/* Tensor of one piece: caches as (B, tokens, width), others as (count). */
static void describe_piece(mn_stored_tensor *t, const mn_state_piece *piece) {
    t->dtype = piece->dtype == MN_F64 ? MN_STORED_F64 : MN_STORED_F32;
    t->data = piece->now;
    t->bytes = (size_t)piece->count * mn_dtype_bytes(piece->dtype);
    t->rank = piece->width ? 3 : 1;
    t->shape[0] = piece->width ? piece->B : piece->count;
    t->shape[1] = piece->length;
    t->shape[2] = piece->width;
}

/* Logits and tokens behind the pieces; how many tensors there are then. */
static int64_t describe_rest(mn_stored_tensor *tensors, int64_t n, const mn_model_state *state,
                             const mn_state_notes *notes) {
    if (state->logits) {
        tensors[n++] = (mn_stored_tensor){
            .name = "logits", .dtype = MN_STORED_F32, .rank = 1, .shape = { state->n_logits },
            .data = state->logits, .bytes = (size_t)state->n_logits * sizeof *state->logits };
    }
    if (notes && notes->tokens) {
        tensors[n++] = (mn_stored_tensor){
            .name = tokens_name, .dtype = MN_STORED_I32, .rank = 1, .shape = { notes->n_tokens },
            .data = notes->tokens, .bytes = (size_t)notes->n_tokens * sizeof *notes->tokens };
    }
    return n;
}

mn_status mn_model_state_save(const mn_model_state *from, const mn_model *model,
                              const mn_state_notes *notes, const char *path) {
    mn_model_state packed;    // a copy has no room to spare between the rows of its caches
    mn_status st = copy_state(&packed, from, TO_HOST, NULL, MN_F32);
    if (st != MN_OK) return st;
    const size_t most = (size_t)packed.n_layers * MN_STATE_PIECES + 2;
    mn_stored_tensor *tensors = calloc(most, sizeof *tensors);
    char(*names)[TENSOR_NAME] = calloc(most, sizeof *names);
    int64_t n = 0;
    for (int i = 0; tensors && names && i < packed.n_layers; i++) {
        const mn_layer_state *layer = &packed.layers[i];
        for (int k = 0; k < layer->n_pieces; k++, n++) {
            snprintf(names[n], TENSOR_NAME, "%d.%s", i, layer->pieces[k].name);
            tensors[n].name = names[n];
            describe_piece(&tensors[n], &layer->pieces[k]);
        }
    }
    if (tensors) n = describe_rest(tensors, n, &packed, notes);
    char position[32], mark[32];
    snprintf(position, sizeof position, "%" PRId64, packed.position);
    snprintf(mark, sizeof mark, "%016" PRIx64, model_mark(model));
    const mn_stored_text about[] = { { "mneme", "state" }, { "position", position },
                                     { "model", mark },
                                     { "notes", notes && notes->words ? notes->words : "" } };
    const int n_about = notes && notes->words ? 4 : 3;
    st = tensors && names ? mn_safetensors_write(path, tensors, n, about, n_about)
                          : mn_fail(MN_ERR_MEMORY, "no memory to write %s", path);
    free(tensors);
    free(names);
    mn_model_state_free(&packed);
    return st;
}

static mn_status read_piece(mn_model_state *state, const mn_model *model,
                            const mn_stored_tensor *t, const char *path) {
    char *name;
    const long layer = strtol(t->name, &name, 10);
    const bool named = name != t->name && *name == '.' && layer >= 0 && layer < state->n_layers &&
                       strlen(name + 1) < MN_STATE_NAME && name[1];
    const bool shaped = t->rank == 1 || t->rank == 3;
    if (!named || !shaped) {
        return mn_fail(MN_ERR_FORMAT, "%s: %s is no part of a state", path, t->name);
    }
    const int64_t count = mn_stored_elements(t);
    void *numbers = malloc((size_t)count * mn_dtype_bytes(model->dtype) + 1);
    if (!numbers) return mn_fail(MN_ERR_MEMORY, "no memory for %s of %s", t->name, path);
    mn_status st = model->dtype == MN_F64 ? mn_safetensors_read_f64(numbers, t)
                                          : mn_safetensors_read_f32(numbers, t);
    if (st == MN_OK) {
        const bool cache = t->rank == 3;
        st = mn_state_put(&state->layers[layer], name + 1, model->dtype, numbers, count,
                          cache ? t->shape[0] : 0, cache ? t->shape[1] : 0,
                          cache ? t->shape[2] : 0);
    }
    free(numbers);
    return st;
}

static mn_status read_logits(mn_model_state *state, const mn_model *model,
                             const mn_stored_tensor *t, const char *path) {
    const int64_t n = model->config.vocab_size;
    if (t->dtype != MN_STORED_F32 || t->rank != 1 || t->shape[0] != n) {
        return mn_fail(MN_ERR_FORMAT, "%s: logits are not %" PRId64 " numbers of F32", path, n);
    }
    return put_logits(state, t->data, n);
}

/* A whole number without sign, of at most 18 digits. */
static bool read_position(int64_t *out, const char *text) {
    const size_t n = strspn(text, "0123456789");
    *out = strtoll(text, NULL, 10);
    return n > 0 && n <= 18 && text[n] == '\0';
}

/* Opens a state of the model. */
static mn_status open_state(mn_safetensors **file, const char **position, const mn_model *model,
                            const char *path) {
    mn_status st = mn_safetensors_open(file, path);
    if (st != MN_OK) return st;
    char mark[32];
    snprintf(mark, sizeof mark, "%016" PRIx64, model_mark(model));
    const char *kind = mn_safetensors_metadata(*file, "mneme");
    const char *of = mn_safetensors_metadata(*file, "model");
    *position = mn_safetensors_metadata(*file, "position");
    if (!kind || strcmp(kind, "state") != 0 || !of || !*position) {
        st = mn_fail(MN_ERR_FORMAT, "%s is no saved state", path);
    } else if (strcmp(of, mark) != 0) {
        st = mn_fail(MN_ERR_ARGUMENT, "%s is the state of another model", path);
    }
    if (st != MN_OK) mn_safetensors_close(*file);
    return st;
}

mn_status mn_model_state_load(mn_model_state *out, const mn_model *model, const char *path) {
    memset(out, 0, sizeof *out);
    mn_safetensors *file;
    const char *position;
    mn_status st = open_state(&file, &position, model, path);
    if (st != MN_OK) return st;
    st = mn_model_state_create(out, model);
    for (int64_t i = 0; st == MN_OK && i < mn_safetensors_count(file); i++) {
        const mn_stored_tensor *t = mn_safetensors_at(file, i);
        if (strcmp(t->name, tokens_name) == 0) continue;
        st = strcmp(t->name, "logits") == 0 ? read_logits(out, model, t, path)
                                            : read_piece(out, model, t, path);
    }
    if (st == MN_OK && !read_position(&out->position, position)) {
        st = mn_fail(MN_ERR_FORMAT, "%s: \"%s\" is no position of a state", path, position);
    }
    mn_safetensors_close(file);
    if (st != MN_OK) mn_model_state_free(out);
    return st;
}

/* The tokens of a file: as many as the state has read. */
static mn_status read_tokens(int32_t **tokens, int64_t *n_tokens, const mn_stored_tensor *t,
                             const mn_model *model, const char *path) {
    const bool fits = t->dtype == MN_STORED_I32 && t->rank == 1;
    *tokens = fits ? malloc(t->bytes + 1) : NULL;
    if (!*tokens) return mn_fail(MN_ERR_FORMAT, "%s: its tokens cannot be read", path);
    memcpy(*tokens, t->data, t->bytes);
    *n_tokens = t->shape[0];
    for (int64_t i = 0; i < *n_tokens; i++) {
        if ((*tokens)[i] >= 0 && (*tokens)[i] < model->config.vocab_size) continue;
        return mn_fail(MN_ERR_FORMAT, "%s: token %d is outside the vocabulary", path,
                       (int)(*tokens)[i]);
    }
    return MN_OK;
}

mn_status mn_model_state_notes(int32_t **tokens, int64_t *n_tokens, char **words,
                               const mn_model *model, const char *path) {
    mn_safetensors *file;
    const char *position;
    int64_t read = 0;
    *tokens = NULL;
    *words = NULL;
    *n_tokens = 0;
    mn_status st = open_state(&file, &position, model, path);
    if (st != MN_OK) return st;
    const mn_stored_tensor *t = mn_safetensors_find(file, tokens_name);
    const char *said = mn_safetensors_metadata(file, "notes");
    if (t) st = read_tokens(tokens, n_tokens, t, model, path);
    if (st == MN_OK && (!read_position(&read, position) || (t && read != *n_tokens))) {
        st = mn_fail(MN_ERR_FORMAT, "%s: its tokens are not those that it has read", path);
    }
    if (st == MN_OK && said) *words = strdup(said);
    mn_safetensors_close(file);
    if (st == MN_OK) return MN_OK;
    free(*tokens);
    *tokens = NULL;
    return st;
}
