/* sequence.c - one continuation: its prompt chunk by chunk, then token by token.
 *
 * A token's bits follow from the request: chunks of a prompt begin at multiples of the chunk's
 * length, snapshots in the cache stand at such borders or at the end of a whole prompt, and a step
 * in company has the bits of a step alone. Text that may be the start of a stop is held back. */
#include "server/engine_internal.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "base/status.h"
#include "base/util.h"

enum { TOKEN_ROOM = 1 << 12 };

/* ---- log probabilities and variances --------------------------------------------------------- */

/* log of the sum of exponentials */
static double log_sum(const float *logits, int64_t n, double *top) {
    double sum = 0.0;
    *top = -INFINITY;
    for (int64_t i = 0; i < n; i++) *top = fmax(*top, (double)logits[i]);
    for (int64_t i = 0; i < n; i++) sum += exp((double)logits[i] - *top);
    return *top + log(sum);
}

/* The `most` largest logits, the largest first, of equal ones the lower id. */
static void find_top(mn_told_token *told, const float *logits, int64_t n, int most, double sum) {
    told->n_top = 0;
    for (int64_t i = 0; i < n; i++) {
        const double value = (double)logits[i] - sum;
        int at = told->n_top;
        while (at > 0 && told->top_log_probability[at - 1] < value) at--;
        if (at >= most) continue;
        if (told->n_top < most) told->n_top++;
        for (int k = told->n_top - 1; k > at; k--) {
            told->top[k] = told->top[k - 1];
            told->top_log_probability[k] = told->top_log_probability[k - 1];
        }
        told->top[at] = (int32_t)i;
        told->top_log_probability[at] = value;
    }
}

/* Notes what `logits` said of `id`; NULL: nothing foretold it. */
static mn_status tell(mn_sequence *s, const float *logits, int64_t n, int32_t id) {
    if (s->n_told == s->told_room) {
        const int64_t room = s->told_room ? 2 * s->told_room : 64;
        mn_told_token *grown = realloc(s->told, (size_t)room * sizeof *grown);
        if (!grown) return mn_fail(MN_ERR_MEMORY, "no memory for log probabilities");
        s->told = grown;
        s->told_room = room;
    }
    mn_told_token *told = &s->told[s->n_told++];
    *told = (mn_told_token){ .id = id, .log_probability = NAN };
    if (!logits) return MN_OK;
    double top;
    const double sum = log_sum(logits, n, &top);
    if (!isfinite(sum)) return mn_fail(MN_ERR_NUMERIC, "the model's logits are not finite");
    told->log_probability = (double)logits[id] - sum;
    find_top(told, logits, n, (int)mn_min(mn_max(s->job->ask.logprobs, 1), n), sum);
    return MN_OK;
}

/* Appends the variances of `count` tokens that `session` has just read. */
static mn_status keep_variance(mn_engine *e, mn_sequence *s, const mn_session *session,
                               int64_t count) {
    if (!s->job->ask.belief) return MN_OK;
    const int64_t layers = e->n_beliefs;
    if (s->n_variance + count > s->variance_room) {
        const int64_t room = 2 * (s->n_variance + count) + 64;
        float *grown = realloc(s->variance, (size_t)(room * layers) * sizeof *grown);
        if (!grown) return mn_fail(MN_ERR_MEMORY, "no memory for variances");
        s->variance = grown;
        s->variance_room = room;
    }
    for (int i = 0; i < layers; i++) {
        const float *variance = s->inside ? mn_inside_variance(s->inside, i) : NULL;
        const int64_t n = variance ? count : mn_session_belief(&variance, session, i);
        for (int64_t t = 0; t < count; t++) {
            s->variance[(s->n_variance + t) * layers + i] = t < n ? variance[t] : NAN;
        }
    }
    s->n_variance += count;
    return MN_OK;
}

/* ---- reading --------------------------------------------------------------------------------- */

static bool scores_prompt(const mn_ask *ask) {
    return ask->echo && ask->logprobs >= 0;
}

/* Copies `count` of the ids to the end of a list. */
static mn_status append(mn_token_list *to, const int32_t *ids, int64_t count) {
    mn_status st = MN_OK;
    for (int64_t i = 0; i < count && st == MN_OK; i++) st = mn_token_list_add(to, ids[i]);
    return st;
}

/* Whether the cache may serve: not where every token has to be looked at. */
static bool may_cache(const mn_engine *e, const mn_sequence *s) {
    const mn_job *job = s->job;
    return job->kind == MN_JOB_COMPLETION && job->ask.cache && !job->ask.belief &&
           !job->ask.state[0] && !scores_prompt(&job->ask) && e->options.cache_bytes > 0;
}

static mn_status from_state(mn_engine *e, mn_sequence *s, const char *id) {
    mn_stored_state *state = mn_states_find(e->states, id);
    const bool feeds = s->job->kind == MN_JOB_FEED;
    if (feeds && state && (state->frozen || state->busy)) {
        return mn_fail(MN_ERR_ARGUMENT, state->busy ? "state %s is being fed already"
                       : "%s is a snapshot, which stays as it is: fork it first", id);
    }
    if (state && feeds) s->feeds = state->busy = true;
    if (!state) return mn_fail(MN_ERR_ARGUMENT, "there is no state %s", id);
    if (state->position + s->prompt->tokens.count + s->job->ask.max_tokens > e->limits.context) {
        return mn_fail(MN_ERR_ARGUMENT, "state %s has read %lld tokens: with those of the request "
                       "that is more than the %lld of this server", id,
                       (long long)state->position, (long long)e->limits.context);
    }
    if (!state->snapshot) return MN_OK;
    const mn_status st = state->read ? append(&s->before, state->read->ids, state->read->count)
                                     : MN_OK;
    return st == MN_OK ? mn_session_restore(s->session, state->snapshot) : st;
}

/* A look at a state goes over what it has read: nothing is restored, and that is read once more. */
static mn_status from_history(mn_engine *e, mn_sequence *s, const char *id) {
    mn_ask *ask = &s->job->ask;
    mn_token_list *prompt = &ask->prompts[0].tokens, all = { 0 };
    const mn_stored_state *state = mn_states_find(e->states, id);
    if (!state || !state->read) {
        if (state && prompt->count == 0) {
            return mn_fail(MN_ERR_ARGUMENT, "nobody knows what state %s has read: give a prompt to "
                           "be read behind it", id);
        }
        return from_state(e, s, id);
    }
    if (state->position + prompt->count > MN_INSIDE_TOKENS) {
        return mn_fail(MN_ERR_ARGUMENT, "state %s has read %lld tokens, and one answer tells of %d",
                       id, (long long)state->position, MN_INSIDE_TOKENS);
    }
    mn_status st = append(&all, state->read->ids, state->read->count);
    if (st == MN_OK) st = append(&all, prompt->ids, prompt->count);
    if (st != MN_OK) {
        mn_token_list_free(&all);
        return st;
    }
    mn_token_list_free(prompt);
    *prompt = all;
    return MN_OK;
}

static mn_status from_cache(mn_engine *e, mn_sequence *s) {
    const mn_token_list *tokens = &s->prompt->tokens;
    int64_t length = 0;
    const mn_snapshot *snapshot = mn_cache_find(e->cache, tokens->ids, tokens->count,
                                                e->options.chunk, &length);
    if (!snapshot) return MN_OK;
    const bool away = mn_snapshot_is_away(snapshot, e->context);
    mn_status st = mn_session_restore(s->session, snapshot);
    mn_snapshot *near = NULL;
    if (st != MN_OK && away) {    // a file that somebody has taken away or cut: read the prompt
        mn_cache_forget(e->cache, tokens->ids, length);
        return MN_OK;
    }
    if (st == MN_OK) s->n_read = s->n_cached = length;
    if (st == MN_OK && away) st = mn_session_snapshot(&near, s->session);    // it may come again
    if (near) mn_cache_put(e->cache, tokens->ids, length, near, mn_snapshot_bytes(near));
    return st;
}

mn_status mn_sequence_begin(mn_engine *e, mn_sequence *s) {
    const mn_ask *ask = &s->job->ask;
    const mn_session_options how = { .prefill_chunk = e->options.chunk, .belief = ask->belief,
                                     .dtype = e->options.dtype };
    mn_status st = mn_session_create(&s->session, e->context, e->model, &how);
    const char *id = s->job->kind == MN_JOB_FEED ? s->job->into : ask->state;
    if (st == MN_OK && id[0]) st = ask->inside ? from_history(e, s, id) : from_state(e, s, id);
    if (st == MN_OK) st = append(&s->seen, s->prompt->tokens.ids, s->prompt->tokens.count);
    if (st == MN_OK && ask->inside) {
        st = mn_inside_create(&s->inside, s->session, s->seen.count, ask->n_rows);
    }
    if (st == MN_OK && ask->echo && s->prompt->text) {
        st = mn_text_add_utf8(&s->text, s->prompt->text, s->prompt->size);
    }
    s->stage = MN_STAGE_READING;
    s->decoder.started = true;
    return st;
}

/* Logits behind token t of a chunk say what token t + 1 was expected to be. */
static mn_status hear(void *context, int64_t t, const float *logits) {
    mn_sequence *s = context;
    const mn_token_list *tokens = &s->prompt->tokens;
    const int64_t next = s->n_read + t + 1;
    const int64_t n = mn_model_vocabulary(s->job->engine->model);
    return next < tokens->count ? tell(s, logits, n, tokens->ids[next]) : MN_OK;
}

/* Snapshots: at the border behind 1, 2, 4, 8 ... chunks, at the last border, and at the end. */
static bool worth_keeping(const mn_engine *e, const mn_sequence *s) {
    const int64_t chunk = e->options.chunk, n = s->prompt->tokens.count, k = s->n_read / chunk;
    if (s->n_read == n) return true;
    return s->n_read % chunk == 0 && ((k & (k - 1)) == 0 || n - s->n_read < chunk);
}

static mn_status keep_snapshot(mn_engine *e, const mn_sequence *s) {
    const int32_t *ids = s->prompt->tokens.ids;
    if (!may_cache(e, s) || !worth_keeping(e, s) || mn_cache_has(e->cache, ids, s->n_read)) {
        return MN_OK;
    }
    mn_snapshot *snapshot;
    const mn_status st = mn_session_snapshot(&snapshot, s->session);
    if (st == MN_OK) {
        mn_cache_put(e->cache, ids, s->n_read, snapshot, mn_snapshot_bytes(snapshot));
    }
    return st;
}

mn_status mn_sequence_look(mn_engine *e, mn_sequence *s) {
    if (s->looked) return MN_OK;
    const mn_ask *ask = &s->job->ask;
    const mn_token_list *tokens = &s->prompt->tokens;
    mn_status st = MN_OK;
    s->looked = true;
    if (may_cache(e, s)) st = from_cache(e, s);
    if (st == MN_OK && scores_prompt(ask) && tokens->count > 0) {
        st = tell(s, mn_session_logits(s->session), mn_model_vocabulary(e->model), tokens->ids[0]);
    }
    s->hearer = (mn_logits_hearer){ hear, s };
    return st;
}

int64_t mn_sequence_chunk(const mn_engine *e, const mn_sequence *s) {
    const int64_t chunk = e->options.chunk;
    return mn_min(chunk - s->n_read % chunk, s->prompt->tokens.count - s->n_read);
}

const mn_logits_hearer *mn_sequence_hearer(const mn_sequence *s) {
    return scores_prompt(&s->job->ask) ? &s->hearer : NULL;
}

mn_status mn_sequence_fed(mn_engine *e, mn_sequence *s, int64_t count) {
    mn_status st = count > 0 ? keep_variance(e, s, s->session, count) : MN_OK;
    s->n_read += count;
    if (st == MN_OK && count > 0) st = keep_snapshot(e, s);
    s->served = ++e->ticks;
    if (s->n_read == s->prompt->tokens.count) s->stage = MN_STAGE_WRITING;
    return st;
}

/* ---- text ------------------------------------------------------------------------------------ */

/* How much of what is held is settled: up to the first stop (`*found`), or up to what may become
 * one unless this is the end. */
static size_t settled(const mn_sequence *s, bool at_end, bool *found) {
    const mn_ask *ask = &s->job->ask;
    const char *text = s->held.bytes;
    const size_t size = s->held.size;
    for (size_t at = 0; at < size && ask->n_stops; at++) {
        bool starts = false;
        for (int i = 0; i < ask->n_stops; i++) {
            const size_t n = strlen(ask->stops[i]), here = size - at < n ? size - at : n;
            if (memcmp(text + at, ask->stops[i], here) != 0) continue;
            if (here == n) {
                *found = true;
                return ask->keep_stop ? at + n : at;
            }
            starts = !at_end;
        }
        if (starts) return at;
    }
    return size;
}

static mn_status release(mn_sequence *s, bool at_end, bool *found) {
    const size_t n = settled(s, at_end, found);
    if (n == 0) return MN_OK;
    const mn_status st = mn_text_add_utf8(&s->text, s->held.bytes, n);
    memmove(s->held.bytes, s->held.bytes + n, s->held.size - n);
    s->held.size -= n;
    return st;
}

/* Decodes `id` (-1: the end) behind what is held. */
static mn_status decode(const mn_engine *e, mn_sequence *s, int32_t id) {
    mn_status st = MN_OK;
    for (size_t room = TOKEN_ROOM; room <= (size_t)TOKEN_ROOM << 8; room *= 16) {
        st = mn_text_reserve(&s->held, room);
        if (st != MN_OK) return st;
        st = mn_tokenizer_stream(e->tokenizer, &s->decoder, id, s->held.bytes,
                                 s->held.size + room, &s->held.size);
        if (st == MN_OK) return MN_OK;
    }
    return st;
}

/* ---- writing --------------------------------------------------------------------------------- */

/* The next token; where only the largest logit counts, a batch may know it without logits. */
static mn_status pick(mn_engine *e, mn_sequence *s) {
    const mn_ask *ask = &s->job->ask;
    const double penalty = ask->sampling.repetition_penalty;
    const bool greedy = ask->sampling.temperature == 0.0 && (penalty == 0.0 || penalty == 1.0);
    if (greedy && ask->logprobs < 0 &&
        mn_session_likeliest(&s->drawn, s->session, e->limits.n_ids)) {
        return MN_OK;
    }
    const float *logits = mn_session_logits(s->session);
    if (!logits) return mn_fail(MN_ERR_ARGUMENT, "there is nothing to continue: the prompt and "
                                "the state are empty");
    mn_sampling how = ask->sampling;
    how.stream = (uint64_t)s->stream;
    const mn_draw from = { .logits = logits, .n = e->limits.n_ids, .recent = s->seen.ids,
                           .n_recent = s->seen.count,
                           .position = (uint64_t)mn_session_position(s->session) };
    mn_status st = mn_sampler_pick(&s->drawn, e->sampler, &how, &from);
    if (st == MN_OK && ask->logprobs >= 0) {
        st = tell(s, logits, mn_model_vocabulary(e->model), s->drawn);
    }
    return st;
}

mn_status mn_sequence_draw(mn_engine *e, mn_sequence *s, bool *steps) {
    const mn_ask *ask = &s->job->ask;
    *steps = false;
    if (s->n_written >= ask->max_tokens) {
        s->finish = "length";
        return MN_OK;
    }
    mn_status st = pick(e, s);
    if (st != MN_OK) return st;
    s->n_written++;
    bool ends = mn_tokenizer_ends(e->tokenizer, s->drawn) && !ask->ignore_eos;
    for (int i = 0; i < ask->n_stop_ids; i++) ends |= s->drawn == ask->stop_ids[i];
    if (ends) {
        s->finish = "stop";
        return MN_OK;
    }
    if (s->n_written >= ask->max_tokens) s->finish = "length";
    *steps = !s->finish || ask->belief || ask->keep;
    s->tells = true;
    return MN_OK;
}

mn_status mn_sequence_write(mn_engine *e, mn_sequence *s, bool *steps) {
    const mn_ask *ask = &s->job->ask;
    bool found = false;
    if (!s->tells) return MN_OK;
    s->tells = false;
    mn_status st = mn_token_list_add(&s->seen, s->drawn);
    if (st == MN_OK) st = decode(e, s, s->drawn);
    if (st == MN_OK) st = release(s, false, &found);
    s->cut = found;
    if (found) s->finish = "stop";
    *steps = !s->finish || ask->belief || ask->keep;
    return st;
}

/* More guesses after guesses that all came true, fewer after others, and a rest after none did: a
 * pass costs more the more it reads. */
static void learn(mn_guesser *g, int64_t most) {
    if (g->guessed == 0) return;
    if (g->agreed == 0) g->rest = mn_min(2 * g->rest_after + 1, 32);
    g->rest_after = g->agreed == 0 ? g->rest : 0;
    g->draft = g->agreed == g->guessed ? mn_min(2 * g->draft, most) : mn_max(g->agreed, 1);
    g->guessed = 0;
}

enum { MOST_GUESSES = 64 };

mn_status mn_sequence_expect(mn_engine *e, mn_sequence *s, int64_t most) {
    mn_guesser *g = &s->guesser;
    int32_t guesses[MOST_GUESSES];
    most = mn_min(most, MOST_GUESSES);
    if (mn_session_finds(s->session, s->drawn)) {
        g->agreed++;
        mn_engine_lock(e);
        e->metrics.agreed++;
        mn_engine_unlock(e);
        return MN_OK;
    }
    learn(g, most);
    if (g->rest > 0) {
        g->rest--;
        return MN_OK;
    }
    g->draft = mn_max(g->draft, 1);
    g->guessed = mn_guess_ngram(guesses, mn_min(g->draft, most), s->seen.ids, s->seen.count);
    g->agreed = 0;
    mn_engine_lock(e);
    e->metrics.guessed += (uint64_t)g->guessed;
    mn_engine_unlock(e);
    return mn_session_expect(s->session, guesses, g->guessed);
}

mn_status mn_sequence_after(mn_engine *e, mn_sequence *s) {
    return keep_variance(e, s, s->session, 1);
}

void mn_sequence_let_go(mn_engine *e, mn_sequence *s) {
    mn_stored_state *state = s->feeds ? mn_states_find(e->states, s->job->into) : NULL;
    if (state) state->busy = false;
    s->feeds = false;
    mn_session_destroy(s->session);
    s->session = NULL;
}

/* The state behind the sequence, under an id of its own or that of the job. */
static mn_status store(mn_engine *e, mn_sequence *s) {
    mn_job *job = s->job;
    mn_stored_state *state = NULL;
    mn_status st = MN_OK;
    const bool fresh = job->kind != MN_JOB_FEED || !job->into[0];
    if (fresh) st = mn_states_add(&state, e->states, NULL, false);
    else state = mn_states_find(e->states, job->into);
    if (st == MN_OK && !state) {
        st = mn_fail(MN_ERR_ARGUMENT, "state %s was deleted while it was fed", job->into);
    }
    const int64_t read = mn_session_position(s->session);
    if (st == MN_OK && read > 0) {
        st = append(&s->before, s->seen.ids, mn_min(s->seen.count, read - s->before.count));
        if (st == MN_OK) st = mn_states_take(e->states, state, s->session, &s->before);
        if (st != MN_OK && fresh) mn_states_delete(e->states, state);
    }
    if (st == MN_OK) memcpy(s->kept, state->id, sizeof s->kept);
    return st;
}

mn_status mn_sequence_end(mn_engine *e, mn_sequence *s) {
    bool found = false;
    mn_status st = MN_OK;
    if (s->n_written > 0 && !s->cut) {
        st = decode(e, s, -1);
        if (st == MN_OK) st = release(s, true, &found);
        if (found) s->finish = "stop";
    }
    if (st == MN_OK && (s->job->kind == MN_JOB_FEED || s->job->ask.keep)) st = store(e, s);
    mn_sequence_let_go(e, s);
    return st;
}

void mn_sequence_free(mn_sequence *s) {
    mn_session_destroy(s->session);
    mn_inside_destroy(s->inside);
    mn_token_list_free(&s->before);
    mn_token_list_free(&s->seen);
    mn_text_free(&s->held);
    mn_text_free(&s->text);
    free(s->told);
    free(s->variance);
}
