/* session.c - one sequence that a model reads.
 *
 * Tokens go through the model a chunk at a time, each chunk one forward pass on the session's tape
 * with the session's state; decoding is the same with chunks of one token. Only the last token of a
 * feed gets logits, which are kept with the state, so that copies and files of it can go on. */
#include "infer/session_internal.h"

#include <inttypes.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/checked.h"
#include "base/status.h"
#include "base/util.h"
#include "infer/slots.h"
#include "model/checkpoint.h"
#include "model/pass.h"

struct mn_snapshot {
    const mn_model *model;
    mn_model_state state;
    size_t bytes;              // of one in a file
    char *path;                // of that file, which has the state; NULL: it is here
    bool stays;                // the file, when the snapshot goes
};

enum { MOST_CHUNK = 512, LEAST_CHUNK = 16, DEVICE_CHUNK = 4096 };
static const size_t chunk_bytes = (size_t)256 << 20, device_chunk_bytes = (size_t)4 << 30;

/* ---- models ---------------------------------------------------------------------------------- */

mn_status mn_model_open(mn_model **out, const char *folder) {
    if (out) *out = NULL;
    if (!out || !folder) return mn_fail(MN_ERR_ARGUMENT, "mn_model_open: an argument is NULL");
    return mn_checkpoint_load(out, folder, MN_F32);
}

void mn_model_close(mn_model *model) {
    mn_model_destroy(model);
}

int64_t mn_model_vocabulary(const mn_model *model) {
    return model ? mn_model_describe(model)->vocab_size : 0;
}

/* ---- making ---------------------------------------------------------------------------------- */

static mn_status choose_chunk(mn_session *s) {
    if (s->options.prefill_chunk > 0) return MN_OK;
    if (s->options.prefill_chunk < 0) {
        return mn_fail(MN_ERR_ARGUMENT, "prefill_chunk is %" PRId64 "; take 1 or more, or 0",
                       s->options.prefill_chunk);
    }
    const bool there = s->context->device != NULL;
    const int64_t context = mn_model_describe(s->model)->context;
    const int64_t all = there ? DEVICE_CHUNK : MOST_CHUNK;
    const int64_t most = context > 0 ? mn_min(all, context) : all;
    return mn_pass_tokens(&s->options.prefill_chunk, s->model, s->tape, 1,
                          mn_min(LEAST_CHUNK, most), most,
                          there ? device_chunk_bytes : chunk_bytes);
}

/* The model to where the session computes, and a tape for it there. */
static mn_status open_tape(mn_session *s) {
    const mn_dtype dtype = s->options.dtype;
    if (dtype != MN_F32 && dtype != MN_BF16) {
        return mn_fail(MN_ERR_ARGUMENT, "a session computes in f32 or bf16");
    }
    if (!s->context->device && dtype == MN_BF16) {
        return mn_fail(MN_ERR_UNSUPPORTED, "bf16 runs on GPUs only; use f32 on the CPU");
    }
    const mn_status st = mn_model_place(s->model, s->context, dtype);
    if (st != MN_OK) return st;
    return mn_tape_create(&s->tape, s->context,
                          s->context->device ? dtype : mn_model_dtype(s->model));
}

mn_status mn_session_create(mn_session **out, mn_context *context, mn_model *model,
                            const mn_session_options *options) {
    if (out) *out = NULL;
    if (!out || !context || !model) {
        return mn_fail(MN_ERR_ARGUMENT, "mn_session_create: an argument is NULL");
    }
    mn_session *s = calloc(1, sizeof *s);
    if (!s) return mn_fail(MN_ERR_MEMORY, "no memory for a session");
    s->context = context;
    s->model = model;
    if (options) s->options = *options;
    s->n_beliefs = mn_model_beliefs(model);
    mn_status st = open_tape(s);
    if (st == MN_OK) st = mn_model_state_create(&s->state, model);
    if (st == MN_OK) st = choose_chunk(s);
    if (st != MN_OK) {
        mn_session_destroy(s);
        return st;
    }
    *out = s;
    return MN_OK;
}

void mn_session_destroy(mn_session *session) {
    if (!session) return;
    mn_slots_drop(session);
    mn_device_graph_destroy(session->graph);
    mn_model_state_free(&session->state);
    if (session->context->device) {
        mn_device_host_free(session->context->device, session->logits);
        mn_device_host_free(session->context->device, session->token);
    }
    mn_tape_destroy(session->tape);
    mn_sampler_destroy(session->sampler);
    mn_posterior_destroy(session->posterior);
    free(session->variance);
    free(session->expected);
    free(session->ahead);
    free(session->ahead_logits);
    free(session);
}

int64_t mn_session_chunk(const mn_session *session) {
    return session->options.prefill_chunk;
}

/* ---- reading tokens -------------------------------------------------------------------------- */

/* Memory of one call that feeds. */
typedef struct reading {
    const int32_t *tokens;
    int64_t count;
    double *scores;             // log probability of each token; NULL: not wanted
    const mn_logits_hearer *hearer;    // of the logits after each token; NULL: nobody
    int32_t *targets;           // of one chunk
    float *nll;
} reading;

/* Copies the logits of the last of T hidden rows. */
static mn_status keep_logits(mn_session *s, mn_tensor *hidden, int64_t T) {
    mn_tensor *row = mn_pass_row(s->tape, hidden, T - 1);
    mn_tensor *logits = mn_model_logits(s->model, s->tape, row);
    return s->recording ? mn_tape_send(s->tape, logits, s->logits)
                        : mn_tape_read(s->tape, logits, s->state.logits);
}

/* Log probabilities of the tokens that follow each of this chunk's, the next chunk's first among
 * them. */
static mn_status keep_scores(mn_session *s, mn_tensor *hidden, const reading *in, int64_t at,
                             int64_t T) {
    for (int64_t t = 0; t < T; t++) {
        const int64_t next = at + t + 1;
        in->targets[t] = next < in->count ? in->tokens[next] : -100;
    }
    double mean;
    int64_t counted;
    const mn_loss_options how = { .nll = in->nll };
    mn_model_loss(s->model, s->tape, hidden, in->targets, how, &mean, &counted);
    const mn_status st = mn_tape_results(s->tape);
    if (st != MN_OK) return st;
    for (int64_t t = 0; t < T && at + t + 1 < in->count; t++) {
        in->scores[at + t + 1] = -(double)in->nll[t];
    }
    return MN_OK;
}

/* Tells the logits behind each token of the chunk. */
static mn_status tell_logits(mn_session *s, mn_tensor *hidden, const reading *in, int64_t at,
                             int64_t T) {
    const int64_t V = s->state.n_logits;
    mn_tensor *logits = mn_model_logits(s->model, s->tape, hidden);
    mn_status st = mn_tape_status(s->tape);
    float *rows = st == MN_OK ? malloc((size_t)(T * V) * sizeof *rows) : NULL;
    if (st == MN_OK && !rows) st = mn_fail(MN_ERR_MEMORY, "no memory for the logits of a chunk");
    if (st == MN_OK) st = mn_tape_read(s->tape, logits, rows);
    for (int64_t t = 0; t < T && st == MN_OK; t++) {
        st = in->hearer->hear(in->hearer->context, at + t, rows + t * V);
    }
    free(rows);
    return st;
}

/* Whether a token on a GPU is read and nothing else is asked, by a model whose steps repeat. */
static bool is_step(const mn_session *s, const reading *in) {
    return s->context->device && in->count == 1 && !in->scores && !in->hearer &&
           !s->options.belief && mn_model_repeats_steps(s->model);
}

/* Whether the next token can be played. */
static bool repeats(const mn_session *s, const reading *in) {
    return is_step(s, in) && s->repeats == MN_REPEATS;
}

/* Whether layers are told where a token stands, to read it when they run. */
static bool places(const mn_session *s, const reading *in) {
    return repeats(s, in) && s->placed;
}

/* The tap of a pass whose variances are to be relative, into *tap; NULL where they are not. */
static mn_status listen(const mn_tap **tap, mn_session *s) {
    *tap = NULL;
    if (!s->options.belief || !s->options.relative || s->n_beliefs == 0) return MN_OK;
    mn_status st = s->posterior ? MN_OK : mn_posterior_create(&s->posterior, s->model);
    if (st == MN_OK) st = mn_posterior_from(s->posterior, &s->state);
    if (st == MN_OK) *tap = mn_posterior_tap(s->posterior, s->tape);
    return st;
}

/* Stores the statistic of mn_posterior_doubt of each layer over the variances of T tokens. */
static mn_status make_relative(const mn_session *s, float *variance, int64_t T) {
    const int n = mn_posterior_features(s->posterior);
    float *features = malloc((size_t)(T * n + 1) * sizeof *features);
    int32_t *places = malloc((size_t)T * sizeof *places);
    mn_status st = features && places ? MN_OK : mn_fail(MN_ERR_MEMORY, "no memory for beliefs");
    for (int64_t t = 0; st == MN_OK && t < T; t++) places[t] = (int32_t)t;
    if (st == MN_OK) st = mn_posterior_read(s->posterior, 1, T, places, T, features);
    for (int i = 0; st == MN_OK && i < s->n_beliefs; i++) {
        const int layer = mn_session_belief_layer(s, i);
        const int f = mn_posterior_of_layer(s->posterior, layer,
                                            mn_posterior_doubt(s->posterior, layer));
        for (int64_t t = 0; f >= 0 && t < T; t++) variance[i * T + t] = expf(features[t * n + f]);
    }
    free(features);
    free(places);
    return st;
}

static mn_status pass(mn_session *s, const reading *in, int64_t at, int64_t T) {
    float *fresh = s->options.belief && s->n_beliefs ? s->variance + s->n_beliefs * in->count
                                                     : NULL;
    mn_model_input input = { .tokens = in->tokens + at, .B = 1, .T = T, .state = &s->state,
                             .variance = fresh };
    if (T > 1) input.recompute = mn_pass_recompute(s->context);
    mn_status st = listen(&input.tap, s);
    if (st != MN_OK) return st;
    const unsigned delay = MN_TAPE_DEFER | (repeats(s, in) ? MN_TAPE_REPEATS : 0);
    mn_tape_start(s->tape, T == 1 && !in->scores && !input.tap ? delay : MN_TAPE_FORWARD);
    if (places(s, in)) mn_tape_set_position(s->tape, &s->position);
    mn_tensor *hidden = mn_model_hidden(s->model, s->tape, &input);
    st = mn_tape_status(s->tape);
    if (st == MN_OK && input.tap) st = make_relative(s, fresh, T);
    if (st == MN_OK && in->scores) st = keep_scores(s, hidden, in, at, T);
    if (st == MN_OK && in->hearer) st = tell_logits(s, hidden, in, at, T);
    if (st == MN_OK && at + T == in->count) st = keep_logits(s, hidden, T);
    s->played = false;
    for (int i = 0; fresh && st == MN_OK && i < s->n_beliefs; i++) {
        memcpy(s->variance + i * in->count + at, fresh + i * T, (size_t)T * sizeof *fresh);
    }
    return st;
}

/* ---- one token at a time on a GPU ------------------------------------------------------------ */

/* A pass of another kind has used the memory that the graph is about. */
void mn_session_forget_graph(mn_session *s) {
    mn_device_graph_destroy(s->graph);
    s->graph = NULL;
    s->steps = 0;
}

/* After a pass of one token: whether that is the same for all positions, and which layers are told
 * where it stands. */
static void find_repeats(mn_session *s) {
    s->repeats = MN_REPEATS;
    for (int i = 0; i < s->state.n_layers; i++) {
        const mn_layer_state *layer = &s->state.layers[i];
        if (layer->by_position) s->repeats = MN_REPEATS_NOT;
        s->placed |= layer->reads_position;
        for (int k = 0; k < layer->n_pieces; k++) s->placed |= layer->pieces[k].width > 0;
    }
}

/* A token to where the device reads it. */
static mn_status place_token(mn_session *s, int32_t token) {
    mn_status st = MN_OK;
    if (!s->token) {
        st = mn_device_host_allocate(s->context->device, (void **)&s->token, sizeof *s->token);
    }
    if (st == MN_OK) *s->token = token;
    return st;
}

/* The first one, by which that is found: it goes as one that is the same does, so that its bits are
 * those of the others and of steps in company. */
static mn_status first_step(mn_session *s, const reading *in) {
    mn_status st = place_token(s, in->tokens[0]);
    if (st != MN_OK) return st;
    const reading one = { .tokens = s->token, .count = 1 };
    for (int i = 0; i < s->state.n_layers; i++) {
        s->state.layers[i].by_position = s->state.layers[i].reads_position = false;
    }
    s->repeats = MN_REPEATS;
    s->placed = true;
    st = pass(s, &one, 0, 1);
    s->repeats = MN_REPEATS_UNKNOWN;
    s->placed = false;
    if (st == MN_OK) find_repeats(s);
    return st;
}

/* Of the state of all layers: whether its caches have room; that these have more tokens, which
 * other ways of reading count by themselves; and where it is. */
static bool has_room(const mn_session *s) {
    bool room = true;
    for (int i = 0; i < s->state.n_layers; i++) {
        room = room && mn_layer_state_has_room(&s->state.layers[i]);
    }
    return room;
}

static void count_tokens(mn_session *s, int64_t tokens) {
    for (int i = 0; i < s->state.n_layers; i++) {
        mn_layer_state_count(&s->state.layers[i], tokens);
    }
}

static uint64_t place_of_state(const mn_session *s) {
    uint64_t place = 0;
    for (int i = 0; i < s->state.n_layers; i++) {
        place = place * 31 + mn_layer_state_place(&s->state.layers[i]);
    }
    return place;
}

static mn_status record(mn_session *s) {
    mn_device *device = s->context->device;
    const reading one = { .tokens = s->token, .count = 1 };
    const size_t bytes = (size_t)s->state.n_logits * sizeof *s->logits;
    mn_status st = MN_OK;
    if (!s->logits) st = mn_device_host_allocate(device, (void **)&s->logits, bytes);
    if (st == MN_OK) st = mn_device_graph_begin(device);
    if (st != MN_OK) return st;
    s->recording = true;
    st = pass(s, &one, 0, 1);
    s->recording = false;
    s->state.position -= st == MN_OK;    // recorded, not run
    if (st == MN_OK) count_tokens(s, -1);
    s->place = place_of_state(s);
    const mn_status ended = mn_device_graph_end(device, &s->graph);
    return st == MN_OK ? ended : st;
}

/* The third pass of one token is recorded. The first one may have begun without a state; the second
 * one has taken what memory such a pass needs. */
static mn_status step(mn_session *s, const reading *in) {
    s->position = s->state.position;
    if (is_step(s, in) && s->repeats == MN_REPEATS_UNKNOWN) return first_step(s, in);
    if (!repeats(s, in)) {
        mn_session_forget_graph(s);
        return pass(s, in, 0, 1);
    }
    mn_status st = place_token(s, in->tokens[0]);
    const bool stands = s->graph && s->place == place_of_state(s);
    if ((s->graph && !stands) || !has_room(s)) mn_session_forget_graph(s);
    if (st == MN_OK && s->steps < 2) {
        const reading one = { .tokens = s->token, .count = 1 };
        s->steps++;
        return pass(s, &one, 0, 1);
    }
    if (st == MN_OK && !s->graph) st = record(s);
    if (st == MN_OK) st = mn_tape_feed(s->tape);
    if (st == MN_OK) st = mn_device_graph_launch(s->graph);
    if (st == MN_OK) st = mn_device_synchronize(s->context->device);
    if (st != MN_OK) return st;
    s->played = true;
    s->state.position++;
    count_tokens(s, 1);
    return MN_OK;
}

mn_status mn_session_room(mn_session *s, int64_t count, int64_t chunk) {
    const int64_t V = mn_model_vocabulary(s->model);
    int64_t rows, room = 0;
    s->n_variance = 0;
    if (s->options.belief && s->n_beliefs) {
        const bool fits = mn_add_i64(&rows, count, chunk) &&
                          mn_mul_i64(&room, rows, s->n_beliefs) &&
                          room < (int64_t)(PTRDIFF_MAX / sizeof(float));
        if (!fits) return mn_fail(MN_ERR_MEMORY, "%" PRId64 " tokens overflow", count);
    }
    if (room > s->variance_room) {
        float *grown = realloc(s->variance, (size_t)room * sizeof *grown);
        if (!grown) return mn_fail(MN_ERR_MEMORY, "no memory for %" PRId64 " variances", room);
        s->variance = grown;
        s->variance_room = room;
    }
    if (s->state.logits) return MN_OK;
    s->state.logits = malloc((size_t)V * sizeof *s->state.logits);
    if (!s->state.logits) return mn_fail(MN_ERR_MEMORY, "no memory for %" PRId64 " logits", V);
    s->state.n_logits = V;
    return MN_OK;
}

mn_status mn_session_check_tokens(const mn_session *s, const int32_t *tokens, int64_t count) {
    if (!s) return mn_fail(MN_ERR_ARGUMENT, "tokens for a session that is NULL");
    if (count < 0 || (count > 0 && !tokens)) {
        return mn_fail(MN_ERR_ARGUMENT, "a session was given %" PRId64 " tokens", count);
    }
    if (s->broken) {
        return mn_fail(MN_ERR_ARGUMENT, "the session failed in the middle of a feed; reset, "
                       "restore or load it first");
    }
    const int64_t V = mn_model_vocabulary(s->model);
    for (int64_t i = 0; i < count; i++) {
        if (tokens[i] >= 0 && tokens[i] < V) continue;
        return mn_fail(MN_ERR_ARGUMENT, "token %d at %" PRId64 " is outside the model's vocabulary "
                       "of %" PRId64, (int)tokens[i], i, V);
    }
    return MN_OK;
}

static mn_status read_tokens(mn_session *s, const reading *in, int64_t chunk) {
    const bool fresh = !s->state.logits;
    mn_status st = mn_slots_leave(s);
    if (st == MN_OK) st = mn_session_room(s, in->count, chunk);
    if (in->count > 1) mn_session_forget_graph(s);
    for (int64_t at = 0; at < in->count && st == MN_OK; at += chunk) {
        const int64_t T = mn_min(chunk, in->count - at);
        st = in->count == 1 ? step(s, in) : pass(s, in, at, T);
        s->broken = st != MN_OK;
    }
    if (st == MN_OK) s->n_variance = in->count;
    else if (fresh) {    // no logits before the first token
        free(s->state.logits);
        s->state.logits = NULL;
        s->state.n_logits = 0;
    }
    return st;
}

static mn_status feed(mn_session *session, const int32_t *tokens, int64_t count) {
    mn_status st = MN_OK;
    if (count == 1 && mn_session_step_ahead(session, tokens[0], &st)) return st;
    mn_session_settle(session);
    const reading in = { .tokens = tokens, .count = count };
    return read_tokens(session, &in, mn_min(session->options.prefill_chunk, count));
}

mn_status mn_session_feed(mn_session *session, const int32_t *tokens, int64_t count) {
    mn_status st = mn_session_check_tokens(session, tokens, count);
    if (st != MN_OK || count == 0) return st;
    st = mn_context_enter(session->context);
    if (st != MN_OK) return st;
    st = feed(session, tokens, count);
    mn_context_leave(session->context);
    return st;
}

enum { HEARD_LOGITS = 1 << 24 };    // numbers of a chunk's logits at most

mn_status mn_session_feed_heard(mn_session *session, const int32_t *tokens, int64_t count,
                                const mn_logits_hearer *hearer) {
    const mn_status st = mn_session_check_tokens(session, tokens, count);
    if (st != MN_OK || count == 0) return st;
    mn_session_settle(session);
    const reading in = { .tokens = tokens, .count = count, .hearer = hearer };
    const int64_t rows = mn_max(HEARD_LOGITS / mn_model_vocabulary(session->model), 1);
    return read_tokens(session, &in, mn_min(mn_min(session->options.prefill_chunk, count), rows));
}

mn_status mn_session_step(mn_session *session, int32_t token) {
    return mn_session_feed(session, &token, 1);
}

/* NULL before the first token. */
static const float *newest_logits(const mn_session *s) {
    if (s->in_slot) return mn_slots_logits((mn_session *)s);    // reading does not change it
    return s->played ? s->logits : s->state.logits;
}

/* log softmax(logits)[token] */
static double log_probability(const float *logits, int64_t n, int32_t token) {
    double top = -INFINITY, sum = 0.0;
    for (int64_t i = 0; i < n; i++) top = fmax(top, logits[i]);
    for (int64_t i = 0; i < n; i++) sum += exp(logits[i] - top);
    return logits[token] - top - log(sum);
}

mn_status mn_session_score(mn_session *session, const int32_t *tokens, int64_t count,
                           double *log_probabilities) {
    mn_status st = mn_session_check_tokens(session, tokens, count);
    if (st != MN_OK || count == 0) return st;
    if (!log_probabilities) {
        return mn_fail(MN_ERR_ARGUMENT, "mn_session_score: log_probabilities is NULL");
    }
    mn_session_settle(session);
    const int64_t chunk = mn_min(session->options.prefill_chunk, count);
    reading in = { .tokens = tokens, .count = count, .scores = log_probabilities };
    in.targets = malloc((size_t)chunk * sizeof *in.targets);
    in.nll = malloc((size_t)chunk * sizeof *in.nll);
    const mn_model_state *state = &session->state;
    const float *logits = newest_logits(session);
    log_probabilities[0] = logits ? log_probability(logits, state->n_logits, tokens[0]) : 0.0;
    st = in.targets && in.nll ? read_tokens(session, &in, chunk)
                              : mn_fail(MN_ERR_MEMORY, "no memory to score %" PRId64 " tokens",
                                        count);
    free(in.targets);
    free(in.nll);
    return st;
}

/* ---- what there is to see -------------------------------------------------------------------- */

const float *mn_session_logits(const mn_session *session) {
    return !session || session->broken ? NULL : newest_logits(session);
}

int64_t mn_session_position(const mn_session *session) {
    return session ? session->state.position : 0;
}

size_t mn_session_bytes(const mn_session *session) {
    if (!session) return 0;
    mn_session_settle((mn_session *)session);    // a cache is as long as what was stepped
    return mn_model_state_bytes(&session->state);
}

int mn_session_beliefs(const mn_session *session) {
    return session ? session->n_beliefs : 0;
}

int mn_session_belief_layer(const mn_session *session, int i) {
    if (!session || i < 0) return -1;
    const int n_layers = mn_model_describe(session->model)->n_layers;
    for (int layer = 0; layer < n_layers; layer++) {
        if (mn_layer_has_variance(mn_model_layer(session->model, layer)) && i-- == 0) return layer;
    }
    return -1;
}

int64_t mn_session_belief(const float **variance, const mn_session *session, int i) {
    if (variance) *variance = NULL;
    if (!session || !variance) return 0;
    const bool there = session->options.belief && i >= 0 && i < session->n_beliefs;
    *variance = there ? session->variance + i * session->n_variance : NULL;
    return there ? session->n_variance : 0;
}

mn_status mn_session_sample_below(int32_t *token, mn_session *session, const mn_sampling *how,
                                  const int32_t *recent, int64_t n_recent, int64_t n) {
    if (!token || !session || !how || n_recent < 0) {
        return mn_fail(MN_ERR_ARGUMENT, "mn_session_sample: an argument is NULL, or n_recent is "
                       "negative");
    }
    const float *logits = mn_session_logits(session);
    const int64_t V = mn_model_vocabulary(session->model);
    if (!logits) {
        return mn_fail(MN_ERR_ARGUMENT, "there is nothing to sample from: feed at least one token "
                       "first");
    }
    mn_status st = MN_OK;
    if (!session->sampler) st = mn_sampler_create(&session->sampler, V);
    const mn_draw from = { .logits = logits, .n = mn_min(n, V), .recent = recent,
                           .n_recent = recent ? n_recent : 0,
                           .position = (uint64_t)session->state.position };
    return st == MN_OK ? mn_sampler_pick(token, session->sampler, how, &from) : st;
}

mn_status mn_session_sample(int32_t *token, mn_session *session, const mn_sampling *how,
                            const int32_t *recent, int64_t n_recent) {
    return mn_session_sample_below(token, session, how, recent, n_recent,
                                   session ? mn_model_vocabulary(session->model) : 0);
}

/* Caches of a file say how many sequences they are of, and how long those are: as long as what was
 * read. */
static mn_status check_caches(const mn_model_state *state, const char *path) {
    for (int i = 0; i < state->n_layers; i++) {
        for (int k = 0; k < state->layers[i].n_pieces; k++) {
            const mn_state_piece *piece = &state->layers[i].pieces[k];
            if (piece->width == 0 || (piece->B == 1 && piece->length == state->position)) continue;
            if (piece->B == 1) {
                return mn_fail(MN_ERR_FORMAT, "%s: layer %d keeps %" PRId64 " tokens of %" PRId64
                               " that were read", path, i, piece->length, state->position);
            }
            return mn_fail(MN_ERR_ARGUMENT, "%s is the state of %" PRId64 " sequences at once; a "
                           "session is one", path, piece->B);
        }
    }
    return MN_OK;
}

/* ---- copies ---------------------------------------------------------------------------------- */

/* `state` becomes the session's. */
static void take_state(mn_session *s, mn_model_state *state) {
    mn_slots_drop(s);
    mn_session_forget_graph(s);
    mn_session_forget_ahead(s);
    mn_model_state_free(&s->state);
    s->state = *state;
    s->n_variance = 0;
    s->broken = s->played = false;
}

/* Whether the state may be copied; the last logits are in it then. */
static mn_status check_whole(const mn_session *s) {
    if (!s) return mn_fail(MN_ERR_ARGUMENT, "a copy of a session that is NULL");
    if (s->broken) {
        return mn_fail(MN_ERR_ARGUMENT, "the session failed in the middle of a feed: what it "
                       "remembers is not to be kept");
    }
    mn_session_settle((mn_session *)s);    // what it remembers is what was stepped
    const float *logits = s->played || s->in_slot ? newest_logits(s) : NULL;
    if (logits) memcpy(s->state.logits, logits, (size_t)s->state.n_logits * sizeof *logits);
    if (logits || !s->in_slot) return MN_OK;
    return mn_fail(MN_ERR_INTERNAL, "the logits of a step cannot be read");
}

mn_status mn_session_reset(mn_session *session) {
    mn_model_state state;
    if (!session) return mn_fail(MN_ERR_ARGUMENT, "mn_session_reset: session is NULL");
    const mn_status st = mn_model_state_create(&state, session->model);
    if (st == MN_OK) take_state(session, &state);
    return st;
}

mn_status mn_session_snapshot(mn_snapshot **out, const mn_session *session) {
    if (out) *out = NULL;
    if (!out || !session) {
        return mn_fail(MN_ERR_ARGUMENT, "mn_session_snapshot: an argument is NULL");
    }
    mn_status st = check_whole(session);
    mn_snapshot *snapshot = st == MN_OK ? calloc(1, sizeof *snapshot) : NULL;
    if (st == MN_OK && !snapshot) st = mn_fail(MN_ERR_MEMORY, "no memory for a snapshot");
    if (st == MN_OK) st = mn_model_state_copy(&snapshot->state, &session->state);
    if (st != MN_OK) {
        free(snapshot);
        return st;
    }
    snapshot->model = session->model;
    *out = snapshot;
    return MN_OK;
}

mn_status mn_session_restore(mn_session *session, const mn_snapshot *snapshot) {
    if (!session || !snapshot) {
        return mn_fail(MN_ERR_ARGUMENT, "mn_session_restore: an argument is NULL");
    }
    if (snapshot->model != session->model) {
        return mn_fail(MN_ERR_ARGUMENT, "the snapshot is of a session on another model");
    }
    mn_model_state state;
    mn_device *device = session->context->device;
    mn_status st = snapshot->path
                       ? mn_model_state_load(&state, session->model, snapshot->path)
                       : mn_model_state_copy(&state, &snapshot->state);
    if (st != MN_OK) return st;
    if (snapshot->path) st = check_caches(&state, snapshot->path);
    if (st == MN_OK && device && mn_snapshot_is_away(snapshot, session->context)) {
        st = mn_model_state_send(&state, device, session->options.dtype);
    }
    if (st == MN_OK) take_state(session, &state);
    else mn_model_state_free(&state);
    return st;
}

size_t mn_snapshot_bytes(const mn_snapshot *snapshot) {
    if (!snapshot) return 0;
    return snapshot->path ? snapshot->bytes : mn_model_state_bytes(&snapshot->state);
}

void mn_snapshot_destroy(mn_snapshot *snapshot) {
    if (!snapshot) return;
    if (snapshot->path && !snapshot->stays) remove(snapshot->path);
    free(snapshot->path);
    mn_model_state_free(&snapshot->state);
    free(snapshot);
}

/* Whether it has to be brought to where the context computes. */
bool mn_snapshot_is_away(const mn_snapshot *snapshot, const mn_context *context) {
    const mn_model_state *state = &snapshot->state;
    if (snapshot->path) return true;
    return context->device && state->n_layers > 0 && !state->layers[0].device;
}

mn_status mn_snapshot_to_host(mn_snapshot *snapshot) {
    mn_model_state here;
    if (snapshot->path || snapshot->state.n_layers == 0 || !snapshot->state.layers[0].device) {
        return MN_OK;
    }
    const mn_status st = mn_model_state_fetch(&here, &snapshot->state);
    if (st != MN_OK) return st;
    mn_model_state_free(&snapshot->state);
    snapshot->state = here;
    return MN_OK;
}

mn_status mn_snapshot_to_file(mn_snapshot *snapshot, const mn_state_notes *notes,
                              const char *path) {
    if (snapshot->path) return MN_OK;
    char *copy = strdup(path);
    mn_status st = copy ? mn_model_state_save(&snapshot->state, snapshot->model, notes, path)
                        : mn_fail(MN_ERR_MEMORY, "no memory for a path");
    if (st != MN_OK) {
        if (copy) remove(path);
        free(copy);
        return st;
    }
    snapshot->bytes = mn_model_state_bytes(&snapshot->state);
    snapshot->path = copy;
    mn_model_state_free(&snapshot->state);
    return MN_OK;
}

void mn_snapshot_stay(mn_snapshot *snapshot) {
    snapshot->stays = true;
}

mn_status mn_snapshot_save(const mn_snapshot *snapshot, const mn_model *model,
                           const mn_state_notes *notes, const char *path) {
    if (snapshot) return mn_model_state_save(&snapshot->state, model, notes, path);
    mn_model_state nothing;
    mn_status st = mn_model_state_create(&nothing, model);
    if (st == MN_OK) st = mn_model_state_save(&nothing, model, notes, path);
    mn_model_state_free(&nothing);
    return st;
}

mn_status mn_snapshot_open(mn_snapshot **out, const mn_model *model, size_t bytes,
                           const char *path) {
    *out = calloc(1, sizeof **out);
    char *copy = strdup(path);
    if (!*out || !copy) {
        free(*out);
        free(copy);
        *out = NULL;
        return mn_fail(MN_ERR_MEMORY, "no memory for a snapshot");
    }
    **out = (mn_snapshot){ .model = model, .bytes = bytes, .path = copy };
    return MN_OK;
}

mn_status mn_snapshot_load(mn_snapshot **out, const mn_model *model, const char *path) {
    *out = calloc(1, sizeof **out);
    if (!*out) return mn_fail(MN_ERR_MEMORY, "no memory for a snapshot");
    (*out)->model = model;
    mn_status st = mn_model_state_load(&(*out)->state, model, path);
    if (st == MN_OK) st = check_caches(&(*out)->state, path);
    if (st != MN_OK) {
        mn_snapshot_destroy(*out);
        *out = NULL;
    }
    return st;
}

int64_t mn_snapshot_position(const mn_snapshot *snapshot) {
    return snapshot->state.position;
}

mn_status mn_session_fork(mn_session **out, const mn_session *session) {
    if (out) *out = NULL;
    if (!out || !session) return mn_fail(MN_ERR_ARGUMENT, "mn_session_fork: an argument is NULL");
    mn_status st = check_whole(session);
    mn_session *fork = NULL;
    mn_model_state state;
    if (st == MN_OK) {
        st = mn_session_create(&fork, session->context, session->model, &session->options);
    }
    if (st == MN_OK) st = mn_model_state_copy(&state, &session->state);
    if (st != MN_OK) {
        mn_session_destroy(fork);
        return st;
    }
    take_state(fork, &state);
    fork->repeats = session->repeats;
    fork->placed = session->placed;
    *out = fork;
    return MN_OK;
}

/* ---- files ----------------------------------------------------------------------------------- */

mn_status mn_session_save(const mn_session *session, const char *path) {
    if (!path) return mn_fail(MN_ERR_ARGUMENT, "mn_session_save: path is NULL");
    const mn_status st = check_whole(session);
    return st == MN_OK ? mn_model_state_save(&session->state, session->model, NULL, path) : st;
}

mn_status mn_session_load(mn_session *session, const char *path) {
    mn_model_state state;
    if (!session || !path) {
        return mn_fail(MN_ERR_ARGUMENT, "mn_session_load: an argument is NULL");
    }
    mn_status st = mn_model_state_load(&state, session->model, path);
    if (st != MN_OK) return st;
    st = check_caches(&state, path);
    if (st == MN_OK && session->context->device) {
        st = mn_model_state_send(&state, session->context->device, session->options.dtype);
    }
    if (st == MN_OK) take_state(session, &state);
    else mn_model_state_free(&state);
    return st;
}
