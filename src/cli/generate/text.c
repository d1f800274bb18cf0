/* text.c - a model that reads text and writes on.
 *
 * Each written token is read back at once, so that the session always stands behind the last token
 * shown, and the variance of a token is that of the reads it caused. Text that may be the start of
 * a stop is held back until it is known not to be. */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/clock.h"
#include "base/dtype.h"
#include "base/status.h"
#include "base/util.h"
#include "cli/generate/generate.h"
#include "cli/progress.h"
#include "train/run/run_folder.h"

static const char *const stopped_names[MN_STOPPED_COUNT] = {
#define STOPPED(id, name) [MN_STOPPED_##id] = name,
#include "cli/generate/stopped.def"
#undef STOPPED
};

const char *mn_stopped_name(mn_stopped stopped) {
    return stopped_names[stopped];
}

void mn_continuation_free(mn_continuation *c) {
    mn_text_free(&c->text);
    mn_token_list_free(&c->tokens);
    free(c->variance);
    *c = (mn_continuation){ 0 };
}

/* ---- opening --------------------------------------------------------------------------------- */

static mn_status check_belief(const mn_generator *g) {
    if (!g->options->belief || mn_model_beliefs(g->model) > 0) return MN_OK;
    char layers[128];
    mn_layers_describe(layers, sizeof layers, mn_model_describe(g->model));
    return mn_fail(MN_ERR_UNSUPPORTED, "--belief: no layer of %s tells a variance (they are %s; "
                   "kla, bayes and palimpsa do)", g->options->model, layers);
}

static void legend(const mn_generator *g) {
    char layers[256] = "";
    for (int i = 0; i < mn_session_beliefs(g->session); i++) {
        const size_t used = strlen(layers);
        snprintf(layers + used, sizeof layers - used, "%s%d", i ? ", " : "",
                 mn_session_belief_layer(g->session, i));
    }
    mn_show_legend(&g->show, layers);
}

mn_status mn_generator_open(mn_generator *g, const mn_generate_options *options) {
    *g = (mn_generator){ .options = options, .sampling = options->sampling };
    mn_show_start(&g->show, mn_show_choose(options->belief, options->json));
    const mn_context_options how = { .n_threads = options->n_threads, .device = options->device };
    mn_session_options session = { .prefill_chunk = options->chunk, .belief = options->belief,
                                   .relative = options->belief };
    if (options->dtype) mn_dtype_parse(&session.dtype, options->dtype);
    mn_status st = mn_context_create(&g->context, &how);
    if (st == MN_OK) st = mn_run_check_model(options->model, options->verify);
    if (st == MN_OK) st = mn_model_open(&g->model, options->model);
    if (st == MN_OK) st = check_belief(g);
    if (st == MN_OK) st = mn_tokenizer_load(&g->tokenizer, options->model);
    if (st == MN_OK) st = mn_session_create(&g->session, g->context, g->model, &session);
    if (st != MN_OK) return st;
    g->n_ids = mn_min(mn_model_vocabulary(g->model), mn_tokenizer_size(g->tokenizer));
    legend(g);
    return options->load_state ? mn_generator_load(g, options->load_state) : MN_OK;
}

void mn_generator_close(mn_generator *g) {
    mn_session_destroy(g->session);
    mn_tokenizer_destroy(g->tokenizer);
    mn_model_close(g->model);
    mn_context_destroy(g->context);
    mn_token_list_free(&g->seen);
    mn_show_free(&g->show);
}

mn_status mn_generator_reset(mn_generator *g) {
    g->seen.count = 0;
    return mn_session_reset(g->session);
}

mn_status mn_generator_load(mn_generator *g, const char *path) {
    const mn_status st = mn_session_load(g->session, path);
    if (st == MN_OK) g->seen.count = 0;
    return st;
}

/* ---- reading --------------------------------------------------------------------------------- */

/* Mean over the layers that tell one, for token t of the last feed. */
static double variance_at(const mn_session *session, int64_t t) {
    const int n = mn_session_beliefs(session);
    double sum = 0.0;
    for (int i = 0; i < n; i++) {
        const float *variance;
        if (mn_session_belief(&variance, session, i) <= t) return NAN;
        sum += (double)variance[t];
    }
    return n ? sum / n : NAN;
}

/* The tokens of a text; of nothing at the start of a sequence, the one that begins or ends texts.
 */
static mn_status encode(mn_token_list *tokens, const mn_generator *g, const char *text,
                        size_t size) {
    const bool first = mn_session_position(g->session) == 0;
    mn_status st = mn_tokenizer_encode(g->tokenizer, text, size, first, tokens);
    if (st != MN_OK || tokens->count > 0 || !first) return st;
    int32_t begin = mn_tokenizer_bos(g->tokenizer);
    if (begin < 0) begin = mn_tokenizer_eos(g->tokenizer);
    if (begin < 0) {
        return mn_fail(MN_ERR_ARGUMENT, "the prompt is empty, and the tokenizer of %s names no "
                       "token that begins a text; give at least one character",
                       g->options->model);
    }
    return mn_token_list_add(tokens, begin);
}

enum { PIECE_TOKENS = 1024, LONG_PROMPT = 4096, TOKEN_ROOM = 1 << 16 };

/* Feeds in pieces, to tell how far it is; `variance` (per token) may be NULL. */
static mn_status feed(mn_generator *g, const mn_token_list *tokens, double *variance) {
    mn_progress bar;
    const int64_t n = tokens->count, piece = mn_max(mn_session_chunk(g->session), PIECE_TOKENS);
    mn_progress_start(&bar, "reading", "tokens", 0, n, g->options->quiet || n < LONG_PROMPT);
    mn_status st = MN_OK;
    for (int64_t at = 0; at < n && st == MN_OK; at += piece) {
        const int64_t count = mn_min(piece, n - at);
        st = mn_session_feed(g->session, tokens->ids + at, count);
        for (int64_t t = 0; st == MN_OK && variance && t < count; t++) {
            variance[at + t] = variance_at(g->session, t);
        }
        mn_progress_update(&bar, at + count, NULL);
    }
    if (st == MN_OK) mn_progress_finish(&bar, NULL);
    else mn_progress_clear(&bar);
    return st;
}

/* Shows what was read, token by token. */
static mn_status show_read(mn_generator *g, const mn_token_list *tokens, const double *variance) {
    mn_status st = MN_OK;
    for (int64_t t = 0; variance && t < tokens->count && st == MN_OK; t++) {
        st = mn_show_note(&g->show, variance[t]);
    }
    mn_stream_decoder decoder = { 0 };
    mn_text text = { 0 };
    if (st == MN_OK) st = mn_text_reserve(&text, TOKEN_ROOM);
    uint8_t *shades = malloc(TOKEN_ROOM);
    if (st == MN_OK && !shades) st = mn_fail(MN_ERR_MEMORY, "no memory to show a prompt");
    for (int64_t t = 0; t < tokens->count && st == MN_OK; t++) {
        text.size = 0;
        st = mn_tokenizer_stream(g->tokenizer, &decoder, tokens->ids[t], text.bytes, TOKEN_ROOM,
                                 &text.size);
        const double v = variance ? variance[t] : NAN;
        if (st != MN_OK) break;
        memset(shades, variance ? mn_show_shade(&g->show, v) : 0, text.size);
        mn_show_text(&g->show, text.bytes, text.size, shades);
        mn_show_line(&g->show, text.bytes, text.size, v);
    }
    free(shades);
    mn_text_free(&text);
    return st;
}

mn_status mn_generator_read(mn_generator *g, const char *text, size_t size) {
    mn_token_list tokens = { 0 };
    double *variance = NULL;
    mn_status st = encode(&tokens, g, text, size);
    if (st == MN_OK && g->options->belief) {
        variance = malloc((size_t)(tokens.count + 1) * sizeof *variance);
        if (!variance) st = mn_fail(MN_ERR_MEMORY, "no memory for the variances of a prompt");
    }
    const double start = mn_seconds();
    if (st == MN_OK) st = feed(g, &tokens, variance);
    g->read_seconds += mn_seconds() - start;
    if (st == MN_OK) g->n_read += tokens.count;
    for (int64_t t = 0; t < tokens.count && st == MN_OK; t++) {
        st = mn_token_list_add(&g->seen, tokens.ids[t]);
    }
    if (st == MN_OK && (variance || g->options->echo)) st = show_read(g, &tokens, variance);
    free(variance);
    mn_token_list_free(&tokens);
    return st;
}

mn_status mn_generator_read_chat(mn_generator *g, const char *text, size_t size) {
    mn_token_list tokens = { 0 };
    mn_status st = mn_tokenizer_encode_bare(g->tokenizer, text, size, &tokens);
    int64_t same = 0;
    while (st == MN_OK && same < tokens.count && same < g->seen.count &&
           tokens.ids[same] == g->seen.ids[same]) same++;
    /* the last token gives what comes next, so one at least is left to read */
    const bool behind = same == g->seen.count && same < tokens.count &&
                        mn_session_position(g->session) == same;
    if (st == MN_OK && !behind) st = mn_generator_reset(g);
    const int64_t from = behind ? same : 0;
    const mn_token_list rest = { tokens.ids + from, tokens.count - from, 0 };
    const double start = mn_seconds();
    if (st == MN_OK && rest.count == 0) st = mn_fail(MN_ERR_ARGUMENT, "the prompt is empty");
    if (st == MN_OK) st = feed(g, &rest, NULL);
    g->read_seconds += mn_seconds() - start;
    if (st == MN_OK) g->n_read += rest.count;
    for (int64_t t = 0; t < rest.count && st == MN_OK; t++) {
        st = mn_token_list_add(&g->seen, rest.ids[t]);
    }
    if (st == MN_OK && g->options->echo) st = show_read(g, &rest, NULL);
    mn_token_list_free(&tokens);
    return st;
}

/* ---- writing --------------------------------------------------------------------------------- */

typedef struct writer {
    mn_generator *g;
    mn_continuation *out;
    mn_stream_decoder decoder;
    mn_text held;                // decoded, not yet shown
    uint8_t *shades;             // of its bytes
    size_t shades_capacity;
} writer;

/* How much of `held` is settled: up to the first stop (`*found`), or up to what may become one
 * unless this is the end. */
static size_t settled(const writer *w, bool at_end, bool *found) {
    const mn_generate_options *o = w->g->options;
    const char *text = w->held.bytes;
    const size_t size = w->held.size;
    for (size_t at = 0; at < size; at++) {
        bool starts = false;
        for (int i = 0; i < o->n_stops; i++) {
            const size_t n = strlen(o->stops[i]), here = size - at < n ? size - at : n;
            if (memcmp(text + at, o->stops[i], here) != 0) continue;
            if (here == n) {
                *found = true;
                return at;
            }
            starts = !at_end;
        }
        if (starts) return at;
    }
    return size;
}

/* Shows the first `n` bytes held and drops them. */
static mn_status release(writer *w, size_t n) {
    mn_show_text(&w->g->show, w->held.bytes, n, w->shades);
    const mn_status st = mn_text_add_utf8(&w->out->text, w->held.bytes, n);
    memmove(w->held.bytes, w->held.bytes + n, w->held.size - n);
    memmove(w->shades, w->shades + n, w->held.size - n);
    w->held.size -= n;
    return st;
}

/* Decodes `id` (-1: the end) behind what is held. */
static mn_status decode(writer *w, int32_t id, double variance) {
    const size_t before = w->held.size;
    mn_status st = mn_text_reserve(&w->held, TOKEN_ROOM);
    if (st == MN_OK && w->shades_capacity < before + TOKEN_ROOM) {
        uint8_t *grown = realloc(w->shades, before + TOKEN_ROOM);
        if (!grown) return mn_fail(MN_ERR_MEMORY, "no memory for a token's text");
        w->shades = grown;
        w->shades_capacity = before + TOKEN_ROOM;
    }
    if (st == MN_OK) {
        st = mn_tokenizer_stream(w->g->tokenizer, &w->decoder, id, w->held.bytes,
                                 before + TOKEN_ROOM, &w->held.size);
    }
    if (st != MN_OK) return st;
    memset(w->shades + before, mn_show_shade(&w->g->show, variance), w->held.size - before);
    if (id >= 0) {
        mn_show_line(&w->g->show, w->held.bytes + before, w->held.size - before, variance);
    }
    return MN_OK;
}

static mn_status keep_variance(mn_continuation *out, double variance) {
    if (out->tokens.count > out->variance_capacity) {
        const int64_t capacity = 2 * out->tokens.count + 64;
        double *grown = realloc(out->variance, (size_t)capacity * sizeof *grown);
        if (!grown) return mn_fail(MN_ERR_MEMORY, "no memory for the variances of tokens");
        out->variance = grown;
        out->variance_capacity = capacity;
    }
    out->variance[out->tokens.count - 1] = variance;
    return MN_OK;
}

/* More guesses after guesses that all came true, fewer after others, and a rest after none did: a
 * pass costs more the more it reads. */
static void learn(mn_generator *g) {
    const int64_t most = g->options->draft;
    if (g->guessed == 0) return;
    if (g->agreed == 0) g->rest = mn_min(2 * g->rest_after + 1, 32);
    g->rest_after = g->agreed == 0 ? g->rest : 0;
    g->draft = g->agreed == g->guessed ? mn_min(2 * g->draft, most) : mn_max(g->agreed, 1);
    g->guessed = 0;
}

/* What followed such tokens before may follow them again. */
static mn_status expect(mn_generator *g, mn_session *session, int32_t token) {
    int32_t guesses[64];
    if (g->options->draft == 0) return MN_OK;
    if (mn_session_finds(session, token)) {
        g->agreed++;
        return MN_OK;
    }
    learn(g);
    if (g->rest > 0) {
        g->rest--;
        return MN_OK;
    }
    const int64_t most = mn_min(mn_max(g->draft, 1), (int64_t)MN_COUNTOF(guesses));
    mn_status st = mn_token_list_add(&g->seen, token);
    if (st != MN_OK) return st;
    const int64_t n = mn_guess_ngram(guesses, most, g->seen.ids, g->seen.count);
    g->seen.count--;
    g->guessed = n;
    g->agreed = 0;
    return mn_session_expect(session, guesses, n);
}

/* Takes in one drawn token: into the session, the lists and the text. */
static mn_status take(writer *w, mn_session *session, int32_t token) {
    mn_generator *g = w->g;
    double variance = NAN;
    mn_status st = expect(g, session, token);
    if (st == MN_OK) st = mn_session_step(session, token);
    if (st == MN_OK) st = mn_token_list_add(&w->out->tokens, token);
    if (st == MN_OK) st = mn_token_list_add(&g->seen, token);
    if (st == MN_OK && g->options->belief) {
        variance = variance_at(session, 0);
        st = keep_variance(w->out, variance);
        if (st == MN_OK) st = mn_show_note(&g->show, variance);
    }
    return st == MN_OK ? decode(w, token, variance) : st;
}

static mn_status write_tokens(writer *w, mn_session *session, const mn_sampling *how) {
    mn_generator *g = w->g;
    const bool ends = !g->options->ignore_eos;
    mn_status st = MN_OK;
    w->out->stopped = MN_STOPPED_LENGTH;
    for (int i = 0; i < g->options->n_tokens && st == MN_OK; i++) {
        int32_t token = -1;
        bool found = false;
        st = mn_session_sample_below(&token, session, how, g->seen.ids, g->seen.count, g->n_ids);
        if (st == MN_OK && ends && mn_tokenizer_ends(g->tokenizer, token)) {
            w->out->stopped = MN_STOPPED_END;
            break;
        }
        if (st == MN_OK) st = take(w, session, token);
        if (st == MN_OK) st = release(w, settled(w, false, &found));
        if (found) w->out->stopped = MN_STOPPED_STOP;
        else if (g->interrupted && *g->interrupted) w->out->stopped = MN_STOPPED_INTERRUPT;
        if (w->out->stopped != MN_STOPPED_LENGTH) break;
    }
    if (st == MN_OK && w->out->stopped != MN_STOPPED_STOP) {
        bool found = false;
        st = decode(w, -1, NAN);
        if (st == MN_OK) st = release(w, settled(w, true, &found));
        if (found) w->out->stopped = MN_STOPPED_STOP;
    }
    return st;
}

/* With --abstain: whether the model is not sure enough to say anything; then it says so. */
static mn_status abstain(mn_continuation *out, mn_generator *g, bool *abstains) {
    const double least = g->options->abstain;
    *abstains = false;
    if (least == 0.0) return MN_OK;
    mn_status st = mn_generator_confidence(&out->confidence, g);
    if (st != MN_OK || out->confidence >= least) return st;
    static const char text[] = MN_ABSTENTION;
    const uint8_t shades[sizeof text] = { 0 };
    *abstains = true;
    out->stopped = MN_STOPPED_ABSTAINED;
    mn_show_text(&g->show, text, sizeof text - 1, shades);
    return mn_text_add(&out->text, text, sizeof text - 1);
}

mn_status mn_generator_write(mn_continuation *out, mn_generator *g, mn_session *session,
                             uint64_t stream) {
    *out = (mn_continuation){ .confidence = -1.0 };
    bool abstains;
    mn_status st = abstain(out, g, &abstains);
    if (st != MN_OK || abstains) return st;
    writer w = { .g = g, .out = out, .decoder = { .started = true } };
    mn_sampling how = g->sampling;
    how.stream = stream;
    const double start = mn_seconds();
    st = write_tokens(&w, session, &how);
    g->write_seconds += mn_seconds() - start;
    g->n_written += out->tokens.count;
    mn_text_free(&w.held);
    free(w.shades);
    return st;
}

mn_status mn_generator_fork(mn_continuation *out, mn_generator *g, int n, bool headers) {
    const int64_t n_seen = g->seen.count;
    mn_status st = MN_OK;
    for (int i = 0; i < n && st == MN_OK; i++) {
        mn_session *fork = NULL;
        st = mn_session_fork(&fork, g->session);
        if (st == MN_OK && headers) printf("%s--- %d of %d\n", i ? "\n" : "", i + 1, n);
        if (st == MN_OK) st = mn_generator_write(&out[i], g, fork, (uint64_t)i);
        g->seen.count = n_seen;
        mn_session_destroy(fork);
    }
    return st;
}
