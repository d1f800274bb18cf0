/* ahead.c - steps that were expected cost one pass together.
 *
 * Tokens expected behind the next one are read with it: products take all of them as rows, and
 * operators with a state step through them one after the other, keeping the state after each. A
 * step that agrees then only moves on; one that does not takes the layers back to the state after
 * the last that did. Rows of products and steps of operators are those of single steps, so that
 * what is expected never shows in a result. */
#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

#include "base/status.h"
#include "base/util.h"
#include "infer/session_internal.h"

enum { MOST_EXPECTED = 64 };

mn_status mn_session_expect(mn_session *session, const int32_t *tokens, int64_t n) {
    if (!session) return mn_fail(MN_ERR_ARGUMENT, "mn_session_expect: session is NULL");
    const mn_status st = mn_session_check_tokens(session, tokens, n);
    session->n_expected = 0;
    if (st != MN_OK || n == 0 || session->context->device || session->options.belief) return st;
    if (!session->expected) session->expected = malloc(MOST_EXPECTED * sizeof *tokens);
    if (!session->expected) return mn_fail(MN_ERR_MEMORY, "no memory for expected tokens");
    session->n_expected = mn_min(n, MOST_EXPECTED);
    memcpy(session->expected, tokens, (size_t)session->n_expected * sizeof *tokens);
    return MN_OK;
}

void mn_session_forget_ahead(mn_session *s) {
    s->n_ahead = s->n_agreed = s->n_expected = 0;
}

void mn_session_settle(mn_session *s) {
    for (int i = 0; s->n_agreed < s->n_ahead && i < s->state.n_layers; i++) {
        mn_layer_state_back(&s->state.layers[i], s->n_agreed);
    }
    s->n_ahead = s->n_agreed = 0;
}

/* Moves on by one token that the layers have read. */
static void agree(mn_session *s) {
    const int64_t V = mn_model_vocabulary(s->model);
    memcpy(s->state.logits, s->ahead_logits + s->n_agreed * V, (size_t)V * sizeof(float));
    s->n_agreed++;
    s->state.position++;
    s->n_variance = 1;
}

static mn_status make_room(mn_session *s) {
    const size_t V = (size_t)mn_model_vocabulary(s->model), most = MOST_EXPECTED + 1;
    if (!s->ahead) s->ahead = malloc(most * sizeof *s->ahead);
    if (!s->ahead_logits) s->ahead_logits = malloc(most * V * sizeof *s->ahead_logits);
    if (s->ahead && s->ahead_logits) return mn_session_room(s, 1, 1);
    return mn_fail(MN_ERR_MEMORY, "no memory to read ahead");
}

/* One pass over `n` steps of the session. */
static mn_status pass(mn_session *s, int64_t n) {
    const int n_layers = s->state.n_layers;
    mn_layer_state **rows = malloc((size_t)(n_layers * n) * sizeof *rows);
    mn_layer_state *layers = calloc((size_t)n_layers, sizeof *layers);
    int64_t positions[MOST_EXPECTED + 1];
    for (int64_t b = 0; b < n; b++) positions[b] = s->state.position + b;
    for (int i = 0; rows && layers && i < n_layers; i++) {
        for (int64_t b = 0; b < n; b++) rows[i * n + b] = &s->state.layers[i];
        layers[i] = (mn_layer_state){ .rows = rows + i * n, .n_rows = n, .positions = positions,
                                      .steps = true };
    }
    mn_model_state state = { .n_layers = n_layers, .layers = layers };
    const mn_model_input in = { .tokens = s->ahead, .B = n, .T = 1, .state = &state };
    mn_status st = rows && layers ? MN_OK : mn_fail(MN_ERR_MEMORY, "no memory to read ahead");
    if (st == MN_OK) {
        mn_tape_start(s->tape, MN_TAPE_FORWARD);
        mn_tensor *hidden = mn_model_hidden(s->model, s->tape, &in);
        mn_tensor *logits = mn_model_logits(s->model, s->tape, hidden);
        st = mn_tape_status(s->tape);
        if (st == MN_OK) st = mn_tape_read(s->tape, logits, s->ahead_logits);
        s->broken = st != MN_OK;
    }
    free(rows);
    free(layers);
    return st;
}

bool mn_session_step_ahead(mn_session *s, int32_t token, mn_status *status) {
    const int64_t n = 1 + s->n_expected;
    *status = MN_OK;
    if (s->n_agreed < s->n_ahead && s->ahead[s->n_agreed] == token) {
        agree(s);
        return true;
    }
    mn_session_settle(s);
    if (n == 1) return false;
    s->n_expected = 0;
    *status = make_room(s);
    if (*status != MN_OK) return true;
    s->ahead[0] = token;
    memcpy(s->ahead + 1, s->expected, (size_t)(n - 1) * sizeof *s->ahead);
    *status = pass(s, n);
    if (*status != MN_OK) return true;
    s->n_ahead = n;
    agree(s);
    return true;
}

bool mn_session_is_ahead(const mn_session *session) {
    return session->n_agreed < session->n_ahead;
}

bool mn_session_finds(const mn_session *session, int32_t token) {
    return mn_session_is_ahead(session) && session->ahead[session->n_agreed] == token;
}

/* ---- guesses --------------------------------------------------------------------------------- */

int64_t mn_guess_ngram(int32_t *out, int64_t most, const int32_t *seen, int64_t count) {
    enum { LONGEST = 6, SHORTEST = 2 };
    for (int64_t n = LONGEST; n >= SHORTEST; n--) {
        for (int64_t at = count - n - 1; at >= 0; at--) {
            if (memcmp(seen + at, seen + count - n, (size_t)n * sizeof *seen) != 0) continue;
            const int64_t m = mn_min(most, count - at - n);
            memcpy(out, seen + at + n, (size_t)m * sizeof *out);
            return m;
        }
    }
    return 0;
}
