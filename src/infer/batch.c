/* batch.c - one token for each of many sessions in one forward pass.
 *
 * The rows of the pass are the sessions: products read each weight once for all of them, and
 * operators with a state run sequence by sequence on the states where they are (tape/operator.c).
 * A row of a product depends on that row alone (ops/matmul.h), so each session gets the bits of a
 * step by itself. On a GPU sessions step one after the other. */
#include <stdlib.h>
#include <string.h>

#include "base/status.h"
#include "infer/session_internal.h"

struct mn_batch {
    mn_context *context;
    mn_model *model;
    mn_tape *tape;
    mn_model_state state;          // of rows only
    int64_t capacity;              // sessions that the arrays have room for
    mn_layer_state **rows;         // (layers, capacity)
    int64_t *positions;            // (capacity)
    float *logits;                 // (capacity, vocabulary)
    float *variance;               // (beliefs, capacity)
};

mn_status mn_batch_create(mn_batch **out, mn_context *context, mn_model *model) {
    if (!out || !context || !model) {
        return mn_fail(MN_ERR_ARGUMENT, "mn_batch_create: an argument is NULL");
    }
    *out = NULL;
    mn_batch *batch = calloc(1, sizeof *batch);
    if (!batch) return mn_fail(MN_ERR_MEMORY, "no memory for a batch");
    batch->context = context;
    batch->model = model;
    mn_status st = mn_model_state_create(&batch->state, model);
    if (st == MN_OK && !context->device) {
        st = mn_model_place(model, context, MN_F32);
        if (st == MN_OK) st = mn_tape_create(&batch->tape, context, mn_model_dtype(model));
    }
    if (st != MN_OK) {
        mn_batch_destroy(batch);
        return st;
    }
    *out = batch;
    return MN_OK;
}

static void free_arrays(mn_batch *batch) {
    free(batch->rows);
    free(batch->positions);
    free(batch->logits);
    free(batch->variance);
    batch->rows = NULL;
    batch->positions = NULL;
    batch->logits = batch->variance = NULL;
    batch->capacity = 0;
}

void mn_batch_destroy(mn_batch *batch) {
    if (!batch) return;
    free_arrays(batch);
    mn_model_state_free(&batch->state);
    mn_tape_destroy(batch->tape);
    free(batch);
}

static mn_status make_room(mn_batch *batch, int64_t n) {
    if (n <= batch->capacity) return MN_OK;
    free_arrays(batch);
    const size_t layers = (size_t)batch->state.n_layers, most = (size_t)n;
    const size_t beliefs = (size_t)mn_model_beliefs(batch->model);
    batch->rows = calloc(layers * most, sizeof *batch->rows);
    batch->positions = calloc(most, sizeof *batch->positions);
    batch->logits = calloc(most * (size_t)mn_model_vocabulary(batch->model), sizeof(float));
    batch->variance = calloc((beliefs + 1) * most, sizeof *batch->variance);
    if (!batch->rows || !batch->positions || !batch->logits || !batch->variance) {
        free_arrays(batch);
        return mn_fail(MN_ERR_MEMORY, "no memory for a batch of %lld sessions", (long long)n);
    }
    batch->capacity = n;
    return MN_OK;
}

/* Every session is one of this model and context, whole, there once, and may read its token. */
static mn_status check(const mn_batch *batch, mn_session *const *sessions, const int32_t *tokens,
                       int64_t n) {
    mn_status st = MN_OK;
    int64_t marked = 0;
    for (; marked < n && st == MN_OK; marked++) {
        mn_session *s = sessions[marked];
        if (!s || s->model != batch->model || s->context != batch->context) {
            st = mn_fail(MN_ERR_ARGUMENT, "session %lld of the batch is on another model or "
                         "context", (long long)marked);
        } else if (s->in_batch) {
            st = mn_fail(MN_ERR_ARGUMENT, "session %lld is in the batch twice", (long long)marked);
        } else {
            st = mn_session_check_tokens(s, tokens + marked, 1);
        }
        if (st != MN_OK) break;
        s->in_batch = true;
    }
    for (int64_t i = 0; i < marked; i++) sessions[i]->in_batch = false;
    return st;
}

/* The states of the sessions as rows of the batch's. Returns whether any wants its variances. */
static bool bind_rows(mn_batch *batch, mn_session *const *sessions, int64_t n) {
    bool belief = false;
    for (int64_t b = 0; b < n; b++) {
        batch->positions[b] = sessions[b]->state.position;
        belief |= sessions[b]->options.belief && sessions[b]->n_beliefs > 0;
    }
    for (int i = 0; i < batch->state.n_layers; i++) {
        mn_layer_state **rows = batch->rows + i * n;
        for (int64_t b = 0; b < n; b++) rows[b] = &sessions[b]->state.layers[i];
        batch->state.layers[i] = (mn_layer_state){ .rows = rows, .n_rows = n,
                                                   .positions = batch->positions };
    }
    return belief;
}

/* What the pass has made, to each session. */
static void hand_out(mn_batch *batch, mn_session *const *sessions, int64_t n) {
    const int64_t V = mn_model_vocabulary(batch->model);
    for (int64_t b = 0; b < n; b++) {
        mn_session *s = sessions[b];
        memcpy(s->state.logits, batch->logits + b * V, (size_t)V * sizeof(float));
        for (int i = 0; s->options.belief && i < s->n_beliefs; i++) {
            s->variance[i] = batch->variance[i * n + b];
        }
        s->state.position++;
        s->n_variance = 1;
    }
}

static mn_status pass(mn_batch *batch, mn_session *const *sessions, const int32_t *tokens,
                      int64_t n) {
    const bool belief = bind_rows(batch, sessions, n);
    const mn_model_input in = { .tokens = tokens, .B = n, .T = 1, .state = &batch->state,
                                .variance = belief ? batch->variance : NULL };
    mn_tape_start(batch->tape, MN_TAPE_FORWARD);
    mn_tensor *hidden = mn_model_hidden(batch->model, batch->tape, &in);
    mn_tensor *logits = mn_model_logits(batch->model, batch->tape, hidden);
    mn_status st = mn_tape_status(batch->tape);
    if (st == MN_OK) st = mn_tape_read(batch->tape, logits, batch->logits);
    for (int64_t b = 0; b < n; b++) sessions[b]->broken = st != MN_OK;
    if (st == MN_OK) hand_out(batch, sessions, n);
    return st;
}

mn_status mn_batch_step(mn_batch *batch, mn_session *const *sessions, const int32_t *tokens,
                        int64_t n) {
    if (!batch || n < 0 || (n > 0 && (!sessions || !tokens))) {
        return mn_fail(MN_ERR_ARGUMENT, "mn_batch_step: an argument is NULL, or n is negative");
    }
    mn_status st = check(batch, sessions, tokens, n);
    if (st != MN_OK || n == 0) return st;
    if (batch->context->device) {
        for (int64_t i = 0; i < n && st == MN_OK; i++) {
            st = mn_session_step(sessions[i], tokens[i]);
        }
        return st;
    }
    st = make_room(batch, n);
    for (int64_t i = 0; i < n && st == MN_OK; i++) st = mn_session_room(sessions[i], 1, 1);
    return st == MN_OK ? pass(batch, sessions, tokens, n) : st;
}
