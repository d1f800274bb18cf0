/* inside.c - see inside.h. Each pass has two listeners: the posterior of every head
 * (model/posterior.h) and the rows of kla layers (model/kalman.h). */
#include "server/inside.h"

#include <stdlib.h>

#include "base/status.h"
#include "base/util.h"
#include "infer/session_internal.h"
#include "io/json_write.h"
#include "model/kalman.h"

enum {
    MOST_BYTES = 1 << 28,      // of what kla layers told
    MOST_WORK = 1 << 27,       // cells times tokens of the rows of an answer: about a second
};

struct mn_inside {
    mn_session *session;
    mn_posterior *posterior;
    mn_kalman *kalman;         // NULL: no rows
    const mn_tap *of_posterior, *of_kalman;
    int n_heads, n_rows;
    int64_t count, room;       // tokens fed
    float *variance, *gain;    // (room, heads)
    float *layers;             // (beliefs, tokens of the last pass)
    int64_t last;
};

/* ---- bounds ---------------------------------------------------------------------------------- */

/* Numbers that kla layers tell of a token, and their cells, of all layers. */
static void measure(const mn_inside *in, double *told, double *cells) {
    *told = *cells = 0.0;
    for (int i = 0; i < mn_kalman_layers(in->kalman); i++) {
        const int at = mn_kalman_layer(in->kalman, i);
        const mn_layer_sizes *s = &mn_model_layer(in->session->model, at)->sizes;
        *told += (double)(3 * MN_SIZE(s, 'V') + 2 * MN_SIZE(s, 'K'));
        *cells += (double)(MN_SIZE(s, 'V') * MN_SIZE(s, 'K'));
    }
}

static mn_status check_bounds(const mn_inside *in, int64_t count) {
    double told, cells;
    if (!in->kalman) return MN_OK;
    measure(in, &told, &cells);
    if (cells * (double)count * in->n_rows > MOST_WORK) {
        return mn_fail(MN_ERR_ARGUMENT, "rows: %d of %lld tokens are more than one answer works "
                       "for: ask for fewer, or of fewer tokens", in->n_rows, (long long)count);
    }
    if (told * (double)count * sizeof(float) > MOST_BYTES) {
        return mn_fail(MN_ERR_ARGUMENT, "rows: %lld tokens are more than one answer keeps: ask of "
                       "fewer tokens", (long long)count);
    }
    return MN_OK;
}

/* ---- reading --------------------------------------------------------------------------------- */

mn_status mn_inside_create(mn_inside **out, mn_session *session, int64_t count, int n_rows) {
    mn_inside *in = calloc(1, sizeof *in);
    *out = NULL;
    if (!in) return mn_fail(MN_ERR_MEMORY, "no memory to look inside");
    in->session = session;
    in->n_rows = n_rows;
    mn_status st = mn_posterior_create(&in->posterior, session->model);
    if (st == MN_OK && n_rows > 0) st = mn_kalman_create(&in->kalman, session->model);
    if (st == MN_OK) st = check_bounds(in, count);
    if (st == MN_OK && in->kalman) st = mn_kalman_from(in->kalman, &session->state);
    if (st == MN_OK) in->n_heads = mn_posterior_heads(in->posterior);
    if (st != MN_OK) {
        mn_inside_destroy(in);
        return st;
    }
    *out = in;
    return MN_OK;
}

void mn_inside_destroy(mn_inside *in) {
    if (!in) return;
    mn_posterior_destroy(in->posterior);
    mn_kalman_destroy(in->kalman);
    free(in->variance);
    free(in->gain);
    free(in->layers);
    free(in);
}

static mn_status grow(mn_inside *in, int64_t count) {
    const size_t heads = (size_t)mn_max(in->n_heads, 1);
    if (in->count + count > in->room) {
        const size_t room = 2 * (size_t)(in->count + count);
        float *variance = realloc(in->variance, room * heads * sizeof *variance);
        if (variance) in->variance = variance;
        float *gain = realloc(in->gain, room * heads * sizeof *gain);
        if (gain) in->gain = gain;
        if (!variance || !gain) return mn_fail(MN_ERR_MEMORY, "no memory for beliefs");
        in->room = (int64_t)room;
    }
    const size_t layers = (size_t)mn_max(in->session->n_beliefs, 1);
    float *fresh = realloc(in->layers, layers * (size_t)count * sizeof *fresh);
    if (!fresh) return mn_fail(MN_ERR_MEMORY, "no memory for beliefs");
    in->layers = fresh;
    in->last = count;
    return MN_OK;
}

static void hear(void *context, int layer, const char *name, const mn_tensor *x) {
    const mn_inside *in = context;
    in->of_posterior->hear(in->of_posterior->context, layer, name, x);
    if (in->of_kalman) in->of_kalman->hear(in->of_kalman->context, layer, name, x);
}

mn_status mn_inside_feed(mn_inside *in, const int32_t *tokens, int64_t count) {
    mn_session *s = in->session;
    const mn_tap tap = { hear, in };
    mn_status st = mn_session_check_tokens(s, tokens, count);
    if (st == MN_OK) st = grow(in, count);
    if (st == MN_OK) st = mn_posterior_from(in->posterior, &s->state);
    if (st != MN_OK) return st;
    in->of_posterior = mn_posterior_tap(in->posterior, s->tape);
    in->of_kalman = in->kalman ? mn_kalman_tap(in->kalman, s->tape) : NULL;
    const mn_model_input input = { .tokens = tokens, .B = 1, .T = count, .state = &s->state,
                                   .variance = s->n_beliefs ? in->layers : NULL, .tap = &tap };
    mn_tape_start(s->tape, MN_TAPE_FORWARD);
    mn_model_hidden(s->model, s->tape, &input);
    st = mn_tape_status(s->tape);
    s->broken = st != MN_OK;
    if (st == MN_OK && in->n_heads > 0) {
        st = mn_posterior_by_head(in->posterior, count, in->variance + in->count * in->n_heads,
                                  in->gain + in->count * in->n_heads);
    }
    if (st == MN_OK && in->kalman) st = mn_kalman_status(in->kalman);
    in->count += count;
    return st;
}

const float *mn_inside_variance(const mn_inside *in, int i) {
    return in->layers + i * in->last;
}

/* ---- telling --------------------------------------------------------------------------------- */

static json_t *matrix(const float *at, int64_t rows, int64_t columns) {
    json_t *all = json_array();
    for (int64_t r = 0; r < rows; r++) {
        json_t *row = json_array();
        for (int64_t c = 0; c < columns; c++) {
            json_array_append_new(row, mn_json_real(at[r * columns + c]));
        }
        json_array_append_new(all, row);
    }
    return all;
}

static mn_status add_row(json_t *list, const mn_inside *in, int i, int64_t t) {
    mn_kalman_row row = { .weights = calloc((size_t)t + 1, sizeof *row.weights) };
    if (!row.weights) return mn_fail(MN_ERR_MEMORY, "no memory for a row");
    const mn_status st = mn_kalman_read(&row, in->kalman, i, t);
    json_t *weights = json_array();
    for (int64_t s = 0; s <= t; s++) json_array_append_new(weights, mn_json_real(row.weights[s]));
    json_array_append_new(list, json_pack("{s:i,s:I,s:o,s:o,s:o}", "layer",
                                          mn_kalman_layer(in->kalman, i), "token", (json_int_t)t,
                                          "weights", weights, "before", mn_json_real(row.before),
                                          "digits", mn_json_real(row.digits)));
    free(row.weights);
    return st;
}

mn_status mn_inside_tell(json_t *body, const mn_inside *in, const int64_t *rows, int n_rows) {
    json_t *heads = json_array(), *list = json_array();
    mn_status st = MN_OK;
    for (int i = 0; i < in->n_heads; i++) {
        int layer, head;
        mn_posterior_head(in->posterior, i, &layer, &head);
        json_array_append_new(heads, json_pack("[i,i]", layer, head));
    }
    json_object_set_new(body, "heads", heads);
    json_object_set_new(body, "head_variance", matrix(in->variance, in->count, in->n_heads));
    json_object_set_new(body, "gain", matrix(in->gain, in->count, in->n_heads));
    json_object_set_new(body, "attention", list);
    for (int r = 0; r < n_rows && st == MN_OK; r++) {
        const int64_t t = rows[r] < 0 ? in->count + rows[r] : rows[r];
        if (t < 0 || t >= in->count) {
            return mn_fail(MN_ERR_ARGUMENT, "rows: there is no token %lld among %lld",
                           (long long)rows[r], (long long)in->count);
        }
        for (int i = 0; st == MN_OK && i < mn_kalman_layers(in->kalman); i++) {
            st = add_row(list, in, i, t);
        }
    }
    return st;
}
