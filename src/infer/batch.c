/* batch.c - one token, or a few, for each of many sessions in one forward pass.
 *
 * The rows of the pass are the tokens of all sessions: products read each weight once for all of
 * them, and operators with a state run sequence by sequence on the states where they are
 * (tape/operator.c). A row of a product depends on that row alone (ops/matmul.h), so each session
 * gets the bits that it would have by itself. On a GPU sessions whose states keep their size step
 * in slots (slots.h), others and prompts one after the other. */
#include <stdlib.h>
#include <string.h>

#include "base/dtype.h"
#include "base/status.h"
#include "base/util.h"
#include "infer/session_internal.h"
#include "infer/slots.h"

struct mn_batch {
    mn_context *context;
    mn_model *model;
    mn_tape *tape;
    mn_model_state state;          // of rows only
    int64_t capacity, most_tokens; // sessions and tokens that the arrays have room for
    mn_layer_state **rows;         // (layers, capacity)
    int64_t *positions;            // (capacity)
    float *logits;                 // (capacity, vocabulary)
    float *variance;               // (beliefs, most_tokens)
    int32_t *ends;                 // (capacity): last tokens of sessions
    mn_slots *slots;               // on a GPU; NULL before the first step
    mn_session **split;            // (capacity): those with a slot in front, the others behind
    int32_t *split_tokens;         // (capacity)
    bool waits;                    // a step has begun
};

mn_status mn_batch_create(mn_batch **out, mn_context *context, mn_model *model) {
    if (out) *out = NULL;
    if (!out || !context || !model) {
        return mn_fail(MN_ERR_ARGUMENT, "mn_batch_create: an argument is NULL");
    }
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
    free(batch->ends);
    free(batch->split);
    free(batch->split_tokens);
    batch->ends = batch->split_tokens = NULL;
    batch->split = NULL;
    batch->rows = NULL;
    batch->positions = NULL;
    batch->logits = batch->variance = NULL;
    batch->capacity = batch->most_tokens = 0;
}

void mn_batch_destroy(mn_batch *batch) {
    if (!batch) return;
    mn_slots_destroy(batch->slots);
    free_arrays(batch);
    mn_model_state_free(&batch->state);
    mn_tape_destroy(batch->tape);
    free(batch);
}

/* For n sessions that read `total` tokens. */
static mn_status make_room(mn_batch *batch, int64_t n, int64_t total) {
    if (n <= batch->capacity && total <= batch->most_tokens) return MN_OK;
    n = mn_max(n, batch->capacity);
    total = mn_max(total, batch->most_tokens);
    free_arrays(batch);
    const size_t layers = (size_t)batch->state.n_layers, most = (size_t)n;
    const size_t beliefs = (size_t)mn_model_beliefs(batch->model);
    batch->rows = calloc(layers * most, sizeof *batch->rows);
    batch->positions = calloc(most, sizeof *batch->positions);
    batch->logits = calloc(most * (size_t)mn_model_vocabulary(batch->model), sizeof(float));
    batch->variance = calloc((beliefs + 1) * (size_t)total, sizeof *batch->variance);
    batch->ends = calloc(most, sizeof *batch->ends);
    batch->split = calloc(most, sizeof *batch->split);
    batch->split_tokens = calloc(most, sizeof *batch->split_tokens);
    const bool there = batch->rows && batch->positions && batch->logits && batch->variance &&
                       batch->ends && batch->split && batch->split_tokens;
    if (!there) {
        free_arrays(batch);
        return mn_fail(MN_ERR_MEMORY, "no memory for a batch of %lld sessions", (long long)n);
    }
    batch->capacity = n;
    batch->most_tokens = total;
    return MN_OK;
}

/* Tokens of one pass: sessions[b] reads counts[b] of them, which follow those of session b - 1. */
typedef struct company {
    mn_session *const *sessions;
    const int32_t *tokens;
    const int64_t *starts;             // n + 1, NULL: one token each
    int64_t n, total;
    const mn_logits_hearer *const *hearers;    // of each; NULL: none
} company;

static int64_t start_of(const company *c, int64_t b) {
    return c->starts ? c->starts[b] : b;
}

/* Every session is one of this model and context, whole, there once, and may read its tokens. */
static mn_status check(const mn_batch *batch, const company *c) {
    mn_status st = MN_OK;
    int64_t marked = 0;
    for (; marked < c->n && st == MN_OK; marked++) {
        mn_session *s = c->sessions[marked];
        const int64_t at = start_of(c, marked), count = start_of(c, marked + 1) - at;
        if (!s || s->model != batch->model || s->context != batch->context) {
            st = mn_fail(MN_ERR_ARGUMENT, "session %lld of the batch is on another model or "
                         "context", (long long)marked);
        } else if (s->in_batch) {
            st = mn_fail(MN_ERR_ARGUMENT, "session %lld is in the batch twice", (long long)marked);
        } else {
            st = mn_session_check_tokens(s, c->tokens + at, count);
        }
        if (st != MN_OK) break;
        s->in_batch = true;
        mn_session_settle(s);
    }
    for (int64_t i = 0; i < marked; i++) c->sessions[i]->in_batch = false;
    return st;
}

/* The states of the sessions as rows of the batch's. Returns whether any wants its variances. */
static bool bind_rows(mn_batch *batch, const company *c) {
    bool belief = false;
    for (int64_t b = 0; b < c->n; b++) {
        const mn_session *s = c->sessions[b];
        batch->positions[b] = s->state.position;
        belief |= s->options.belief && s->n_beliefs > 0;
    }
    for (int i = 0; i < batch->state.n_layers; i++) {
        mn_layer_state **rows = batch->rows + i * c->n;
        for (int64_t b = 0; b < c->n; b++) rows[b] = &c->sessions[b]->state.layers[i];
        batch->state.layers[i] = (mn_layer_state){ .rows = rows, .n_rows = c->n,
                                                   .starts = c->starts,
                                                   .positions = batch->positions };
    }
    return belief;
}

/* What the pass has made, to each session. */
static void hand_out(mn_batch *batch, const company *c) {
    const int64_t V = mn_model_vocabulary(batch->model);
    for (int64_t b = 0; b < c->n; b++) {
        mn_session *s = c->sessions[b];
        const int64_t at = start_of(c, b), count = start_of(c, b + 1) - at;
        memcpy(s->state.logits, batch->logits + b * V, (size_t)V * sizeof(float));
        for (int i = 0; s->options.belief && i < s->n_beliefs; i++) {
            memcpy(s->variance + i * count, batch->variance + i * c->total + at,
                   (size_t)count * sizeof(float));
        }
        s->state.position += count;
        s->n_variance = count;
        s->played = false;
    }
}

/* Logits behind the last token of each session. */
static mn_status last_logits(mn_batch *batch, const company *c, mn_tensor *hidden) {
    for (int64_t b = 0; c->starts && b < c->n; b++) {
        batch->ends[b] = (int32_t)(c->starts[b + 1] - 1);
    }
    if (c->starts) hidden = mn_tape_pick(batch->tape, hidden, batch->ends, c->n);
    mn_tensor *logits = mn_model_logits(batch->model, batch->tape, hidden);
    const mn_status st = mn_tape_status(batch->tape);
    return st == MN_OK ? mn_tape_read(batch->tape, logits, batch->logits) : st;
}

/* Logits behind every token, to those who hear them. */
static mn_status tell_logits(mn_batch *batch, const company *c, mn_tensor *hidden) {
    const int64_t V = mn_model_vocabulary(batch->model);
    bool heard = false;
    for (int64_t b = 0; c->hearers && b < c->n; b++) heard |= c->hearers[b] != NULL;
    if (!heard) return MN_OK;
    mn_tensor *logits = mn_model_logits(batch->model, batch->tape, hidden);
    mn_status st = mn_tape_status(batch->tape);
    float *rows = st == MN_OK ? malloc((size_t)(c->total * V) * sizeof *rows) : NULL;
    if (st == MN_OK && !rows) st = mn_fail(MN_ERR_MEMORY, "no memory for the logits of a batch");
    if (st == MN_OK) st = mn_tape_read(batch->tape, logits, rows);
    for (int64_t b = 0; b < c->n && st == MN_OK; b++) {
        const mn_logits_hearer *h = c->hearers[b];
        const int64_t at = start_of(c, b), count = start_of(c, b + 1) - at;
        for (int64_t t = 0; h && t < count && st == MN_OK; t++) {
            st = h->hear(h->context, t, rows + (at + t) * V);
        }
    }
    free(rows);
    return st;
}

static mn_status pass(mn_batch *batch, const company *c) {
    const bool belief = bind_rows(batch, c);
    const mn_model_input in = { .tokens = c->tokens, .B = c->starts ? 1 : c->n,
                                .T = c->starts ? c->total : 1, .state = &batch->state,
                                .variance = belief ? batch->variance : NULL };
    mn_tape_start(batch->tape, MN_TAPE_FORWARD);
    mn_tensor *hidden = mn_model_hidden(batch->model, batch->tape, &in);
    mn_status st = mn_tape_status(batch->tape);
    if (st == MN_OK) st = tell_logits(batch, c, hidden);
    if (st == MN_OK) st = last_logits(batch, c, hidden);
    for (int64_t b = 0; b < c->n; b++) c->sessions[b]->broken = st != MN_OK;
    if (st == MN_OK) hand_out(batch, c);
    return st;
}

static mn_status run(mn_batch *batch, const company *c) {
    mn_status st = make_room(batch, c->n, c->total);
    for (int64_t b = 0; b < c->n && st == MN_OK; b++) {
        const int64_t count = start_of(c, b + 1) - start_of(c, b);
        st = mn_session_room(c->sessions[b], count, count);
    }
    return st == MN_OK ? pass(batch, c) : st;
}

/* ---- on a GPU -------------------------------------------------------------------------------- */

/* What computes in the type of the sessions, which is that of all. */
static mn_status open_device(mn_batch *batch, mn_session *const *sessions, int64_t n) {
    const mn_dtype dtype = batch->tape ? mn_tape_dtype(batch->tape) : sessions[0]->options.dtype;
    for (int64_t b = 0; b < n; b++) {
        if (sessions[b]->options.dtype == dtype) continue;
        return mn_fail(MN_ERR_ARGUMENT, "session %lld computes in %s and the batch in %s",
                       (long long)b, mn_dtype_name(sessions[b]->options.dtype),
                       mn_dtype_name(dtype));
    }
    mn_status st = MN_OK;
    if (!batch->tape) st = mn_tape_create(&batch->tape, batch->context, dtype);
    if (st == MN_OK && !batch->slots) {
        st = mn_slots_create(&batch->slots, batch->context, batch->model, dtype);
    }
    return st;
}

static mn_status step_in_turn(const company *c) {
    mn_status st = MN_OK;
    for (int64_t b = 0; b < c->n && st == MN_OK; b++) {
        st = mn_session_step(c->sessions[b], c->tokens[b]);
    }
    return st;
}

/* Which of the two ways a session goes follows from itself alone: together in slots, or one after
 * the other where layers go by position, as those with caches do. */
static mn_status begin_on_device(mn_batch *batch, const company *c) {
    mn_status st = open_device(batch, c->sessions, c->n);
    if (st == MN_OK) st = make_room(batch, c->n, c->total);
    if (st != MN_OK) return st;
    int64_t n = 0, others = 0;
    for (int64_t b = 0; b < c->n; b++) {
        const bool served = mn_slots_serve(batch->slots, c->sessions[b]);
        const int64_t at = served ? n++ : c->n - ++others;
        batch->split[at] = c->sessions[b];
        batch->split_tokens[at] = c->tokens[b];
    }
    const company rest = { .sessions = batch->split + n, .tokens = batch->split_tokens + n,
                           .n = others, .total = others };
    if (others > 0) st = step_in_turn(&rest);
    if (st == MN_OK && n > 0) {
        st = mn_slots_start(batch->slots, batch->split, batch->split_tokens, n);
        batch->waits = st == MN_OK;
    }
    for (int64_t b = 0; b < c->n && st != MN_OK; b++) c->sessions[b]->broken = true;
    return st;
}

/* ---- steps ----------------------------------------------------------------------------------- */

mn_status mn_batch_begin(mn_batch *batch, mn_session *const *sessions, const int32_t *tokens,
                         int64_t n) {
    if (!batch || n < 0 || (n > 0 && (!sessions || !tokens))) {
        return mn_fail(MN_ERR_ARGUMENT, "mn_batch_step: an argument is NULL, or n is negative");
    }
    const company c = { .sessions = sessions, .tokens = tokens, .n = n, .total = n };
    mn_status st = check(batch, &c);
    if (st != MN_OK || n == 0) return st;
    st = mn_context_enter(batch->context);
    if (st != MN_OK) return st;
    st = batch->context->device ? begin_on_device(batch, &c) : run(batch, &c);
    mn_context_leave(batch->context);
    return st;
}

mn_status mn_batch_wait(mn_batch *batch) {
    if (!batch->waits) return MN_OK;
    batch->waits = false;
    return mn_slots_wait(batch->slots);
}

bool mn_session_likeliest(int32_t *token, const mn_session *session, int64_t n) {
    return !session->broken && mn_slots_likeliest(token, session, n);
}

mn_status mn_batch_step(mn_batch *batch, mn_session *const *sessions, const int32_t *tokens,
                        int64_t n) {
    const mn_status st = mn_batch_begin(batch, sessions, tokens, n);
    return st == MN_OK && batch ? mn_batch_wait(batch) : st;
}

/* The tokens of all one behind the other, with their borders. */
static mn_status gather(const int32_t *const *tokens, const int64_t *counts, company *c,
                        int32_t **all, int64_t **starts) {
    *starts = malloc((size_t)(c->n + 1) * sizeof **starts);
    if (!*starts) return mn_fail(MN_ERR_MEMORY, "no memory for a batch");
    (*starts)[0] = 0;
    for (int64_t b = 0; b < c->n; b++) {
        if (!tokens[b]) {
            return mn_fail(MN_ERR_ARGUMENT, "the tokens of session %lld are NULL", (long long)b);
        }
        if (counts[b] < 2 || counts[b] > INT32_MAX - (*starts)[b]) {
            return mn_fail(MN_ERR_ARGUMENT, "%lld tokens for session %lld; a batch feeds 2 or "
                           "more to each", (long long)counts[b], (long long)b);
        }
        (*starts)[b + 1] = (*starts)[b] + counts[b];
    }
    c->total = (*starts)[c->n];
    *all = malloc((size_t)(c->total + 1) * sizeof **all);
    if (!*all) return mn_fail(MN_ERR_MEMORY, "no memory for %lld tokens", (long long)c->total);
    for (int64_t b = 0; b < c->n; b++) {
        memcpy(*all + (*starts)[b], tokens[b], (size_t)counts[b] * sizeof **all);
    }
    c->starts = *starts;
    c->tokens = *all;
    return MN_OK;
}

/* One session after the other, each on the tape of the batch: one of its own would take memory of
 * the GPU for it, and give that back, which waits for all that the GPU does. */
static mn_status feed_in_turn(mn_batch *batch, const company *c, const int32_t *const *tokens) {
    mn_status st = mn_context_enter(batch->context);
    if (st != MN_OK) return st;
    st = open_device(batch, c->sessions, c->n);
    mn_context_leave(batch->context);
    for (int64_t b = 0; b < c->n && st == MN_OK; b++) {
        mn_session *s = c->sessions[b];
        mn_tape *own = s->tape;
        s->tape = batch->tape;
        st = mn_session_feed_heard(s, tokens[b], start_of(c, b + 1) - start_of(c, b),
                                   c->hearers ? c->hearers[b] : NULL);
        s->tape = own;
    }
    return st;
}

mn_status mn_batch_feed_heard(mn_batch *batch, mn_session *const *sessions,
                              const int32_t *const *tokens, const int64_t *counts, int64_t n,
                              const mn_logits_hearer *const *hearers) {
    if (!batch || n < 0 || (n > 0 && (!sessions || !tokens || !counts))) {
        return mn_fail(MN_ERR_ARGUMENT, "mn_batch_feed: an argument is NULL, or n is negative");
    }
    int32_t *all = NULL;
    int64_t *starts = NULL;
    company c = { .sessions = sessions, .n = n, .hearers = hearers };
    mn_status st = n > 0 ? gather(tokens, counts, &c, &all, &starts) : MN_OK;
    if (st == MN_OK && n > 0) st = check(batch, &c);
    if (st == MN_OK && n > 0 && !batch->context->device) st = run(batch, &c);
    if (st == MN_OK && n > 0 && batch->context->device) st = feed_in_turn(batch, &c, tokens);
    free(all);
    free(starts);
    return st;
}

mn_status mn_batch_feed(mn_batch *batch, mn_session *const *sessions, const int32_t *const *tokens,
                        const int64_t *counts, int64_t n) {
    return mn_batch_feed_heard(batch, sessions, tokens, counts, n, NULL);
}
