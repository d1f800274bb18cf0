/* reply.c - answers as JSON: completions, conversations, states, variances, failures. */
#include "server/engine_internal.h"

#include <inttypes.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/clock.h"
#include "base/utf8.h"
#include "base/status.h"
#include "base/util.h"
#include "io/json_write.h"
#include "server/calls.h"

/* ---- failures -------------------------------------------------------------------------------- */

json_t *mn_reply_error(int http_status, const char *kind, const char *message) {
    mn_text clean = { 0 };
    mn_text_add_utf8(&clean, message, strlen(message));
    json_t *body = json_pack("{s:{s:s%,s:s,s:n,s:i}}", "error", "message",
                             clean.bytes ? clean.bytes : "", clean.size, "type", kind, "param",
                             "code", http_status);
    mn_text_free(&clean);
    return body;
}

int mn_reply_status(mn_status status, const char **kind) {
    switch (status) {
    case MN_ERR_ARGUMENT:
    case MN_ERR_FORMAT: *kind = "invalid_request_error"; return 400;
    case MN_ERR_UNSUPPORTED: *kind = "not_supported_error"; return 400;
    case MN_ERR_MEMORY: *kind = "overloaded_error"; return 503;
    default: *kind = "server_error"; return 500;
    }
}

json_t *mn_reply_state(const mn_stored_state *s) {
    return json_pack("{s:s,s:s,s:s,s:I,s:I,s:f}", "id", s->id, "object", "state", "kind",
                     s->frozen ? "snapshot" : "state", "position", (json_int_t)s->position,
                     "bytes", (json_int_t)s->bytes, "age_seconds", mn_seconds() - s->created);
}

/* ---- log probabilities ----------------------------------------------------------------------- */

/* The text of one token, or its number where that is no text. */
static json_t *token_text(const mn_engine *e, int32_t id) {
    char *text = NULL, name[32];
    size_t size = 0;
    json_t *out = NULL;
    if (id < e->limits.n_ids &&
        mn_tokenizer_decode(e->tokenizer, &id, 1, true, &text, &size) == MN_OK &&
        mn_utf8_valid(text, size) == size) {
        out = json_stringn(text, size);
    }
    free(text);
    snprintf(name, sizeof name, "token_id:%d", (int)id);
    return out ? out : json_string(name);
}

static int64_t count_points(const char *text, size_t size) {
    int64_t n = 0;
    for (size_t i = 0; i < size; i++) n += ((unsigned char)text[i] & 0xC0) != 0x80;
    return n;
}

/* token_logprob and the largest of top_logprobs are one number with one spelling. */
static json_t *top_object(const mn_engine *e, const mn_told_token *t, int most) {
    if (isnan(t->log_probability)) return json_null();
    json_t *top = json_object();
    for (int i = 0; i < t->n_top && i < (most > 0 ? most : 1); i++) {
        json_t *name = token_text(e, t->top[i]);
        const char *key = json_string_value(name);
        if (!json_object_get(top, key)) {
            json_object_setn_new(top, key, json_string_length(name),
                                 mn_json_real(t->top_log_probability[i]));
        }
        json_decref(name);
    }
    return top;
}

/* Told tokens [from, n_told) in the form of completions. */
static json_t *completion_logprobs(const mn_engine *e, mn_sequence *s, int64_t from) {
    json_t *tokens = json_array(), *values = json_array(), *tops = json_array();
    json_t *offsets = json_array();
    if (from == 0) s->offset = 0;
    for (int64_t i = from; i < s->n_told; i++) {
        const mn_told_token *t = &s->told[i];
        json_t *text = token_text(e, t->id);
        json_array_append(tokens, text);
        json_array_append_new(values, mn_json_real(t->log_probability));
        json_array_append_new(tops, top_object(e, t, s->job->ask.logprobs));
        json_array_append_new(offsets, json_integer(s->offset));
        s->offset += count_points(json_string_value(text), json_string_length(text));
        json_decref(text);
    }
    return json_pack("{s:o,s:o,s:o,s:o}", "tokens", tokens, "token_logprobs", values,
                     "top_logprobs", tops, "text_offset", offsets);
}

static json_t *chat_token(const mn_engine *e, int32_t id, double log_probability) {
    json_t *bytes = json_array();
    char *text = NULL;
    size_t size = 0;
    if (id < e->limits.n_ids) mn_tokenizer_decode(e->tokenizer, &id, 1, true, &text, &size);
    for (size_t i = 0; i < size; i++) {
        json_array_append_new(bytes, json_integer((unsigned char)text[i]));
    }
    free(text);
    return json_pack("{s:o,s:o,s:o}", "token", token_text(e, id), "logprob",
                     mn_json_real(log_probability), "bytes", bytes);
}

static json_t *chat_logprobs(const mn_engine *e, const mn_sequence *s, int64_t from) {
    json_t *content = json_array();
    for (int64_t i = from; i < s->n_told; i++) {
        const mn_told_token *t = &s->told[i];
        json_t *top = json_array(), *one = chat_token(e, t->id, t->log_probability);
        for (int k = 0; k < t->n_top && k < s->job->ask.logprobs; k++) {
            json_array_append_new(top, chat_token(e, t->top[k], t->top_log_probability[k]));
        }
        json_object_set_new(one, "top_logprobs", top);
        json_array_append_new(content, one);
    }
    return json_pack("{s:o}", "content", content);
}

static json_t *logprobs(const mn_engine *e, mn_sequence *s, int64_t from) {
    if (s->job->ask.logprobs < 0) return json_null();
    return s->job->ask.chat ? chat_logprobs(e, s, from) : completion_logprobs(e, s, from);
}

/* ---- variances ------------------------------------------------------------------------------- */

/* Of tokens [from, n_variance): one list a token, one number a layer that tells. */
static json_t *variances(const mn_engine *e, const mn_sequence *s, int64_t from) {
    json_t *all = json_array();
    for (int64_t t = from; t < s->n_variance; t++) {
        json_t *row = json_array();
        for (int i = 0; i < e->n_beliefs; i++) {
            json_array_append_new(row, mn_json_real(s->variance[t * e->n_beliefs + i]));
        }
        json_array_append_new(all, row);
    }
    return all;
}

static json_t *belief_layers(const mn_engine *e) {
    json_t *layers = json_array();
    for (int i = 0; i < e->n_beliefs; i++) {
        json_array_append_new(layers, json_integer(mn_session_belief_layer(e->probe, i)));
    }
    return layers;
}

/* What token t adds to the text, where those before it were told. */
static json_t *piece(const mn_engine *e, mn_sequence *s, int64_t t) {
    char text[4096];
    size_t size = 0;
    if (t == 0) s->pieces = (mn_stream_decoder){ .started = s->job->ask.state[0] != '\0' };
    const mn_status st = mn_tokenizer_stream(e->tokenizer, &s->pieces, s->seen.ids[t], text,
                                             sizeof text, &size);
    return st == MN_OK ? json_stringn(text, size) : token_text(e, s->seen.ids[t]);
}

/* The tokens that the variances from `from` on are of. */
static json_t *belief(const mn_engine *e, mn_sequence *s, int64_t from) {
    json_t *tokens = json_array(), *ids = json_array(), *pieces = json_array();
    for (int64_t t = from; t < s->n_variance && t < s->seen.count; t++) {
        json_array_append_new(tokens, token_text(e, s->seen.ids[t]));
        json_array_append_new(ids, json_integer(s->seen.ids[t]));
        json_array_append_new(pieces, piece(e, s, t));
    }
    return json_pack("{s:o,s:o,s:o,s:o,s:o}", "layers", belief_layers(e), "tokens", tokens, "ids",
                     ids, "pieces", pieces, "variance", variances(e, s, from));
}

/* ---- completions ----------------------------------------------------------------------------- */

static json_t *usage(const mn_job *job) {
    int64_t prompt = 0, written = 0, cached = 0;
    for (int64_t i = 0; i < job->ask.n_prompts; i++) {
        prompt += job->ask.prompts[i].tokens.count;
        cached += job->sequences[i * job->ask.n].n_cached;
    }
    for (int64_t i = 0; i < job->n_sequences; i++) written += job->sequences[i].n_written;
    return json_pack("{s:I,s:I,s:I,s:{s:I}}", "prompt_tokens", (json_int_t)prompt,
                     "completion_tokens", (json_int_t)written, "total_tokens",
                     (json_int_t)(prompt + written), "prompt_tokens_details", "cached_tokens",
                     (json_int_t)cached);
}

static json_t *frame(const mn_job *job, const char *object) {
    return json_pack("{s:s,s:s,s:I,s:s}", "id", job->id, "object", object, "created",
                     (json_int_t)job->created, "model", job->engine->name);
}

static json_t *choice(const mn_engine *e, mn_sequence *s) {
    const mn_ask *ask = &s->job->ask;
    const char *text = s->text.bytes ? s->text.bytes : "";
    json_t *out = json_pack("{s:I,s:s,s:o}", "index", (json_int_t)s->index, "finish_reason",
                            s->finish ? s->finish : "length", "logprobs", logprobs(e, s, 0));
    if (ask->chat) {
        size_t before = s->text.size;
        json_t *calls = mn_calls_parse(ask->tools, text, s->text.size, s->job->id, &before);
        json_t *message = json_pack("{s:s,s:o}", "role", "assistant", "content",
                                    calls && before == 0 ? json_null()
                                                         : json_stringn(text, before));
        if (calls) json_object_set_new(message, "tool_calls", calls);
        if (calls) json_object_set_new(out, "finish_reason", json_string("tool_calls"));
        json_object_set_new(out, "message", message);
    } else {
        json_object_set_new(out, "text", json_stringn(text, s->text.size));
    }
    if (ask->belief) json_object_set_new(out, "belief", belief(e, s, 0));
    if (s->kept[0]) json_object_set_new(out, "state", json_string(s->kept));
    return out;
}

json_t *mn_reply_whole(mn_job *job) {
    mn_engine *e = job->engine;
    if (job->kind == MN_JOB_FEED) {
        const mn_stored_state *state = mn_states_find(e->states, job->sequences[0].kept);
        json_t *body = state ? mn_reply_state(state) : json_object();
        json_object_set_new(body, "usage", usage(job));
        return body;
    }
    if (job->kind == MN_JOB_BELIEF) {
        json_t *body = belief(e, &job->sequences[0], 0);
        json_object_set_new(body, "object", json_string("belief"));
        return body;
    }
    json_t *body = frame(job, job->ask.chat ? "chat.completion" : "text_completion");
    json_t *choices = json_array();
    for (int64_t i = 0; i < job->n_sequences; i++) {
        json_array_append_new(choices, choice(e, &job->sequences[i]));
    }
    json_object_set_new(body, "choices", choices);
    json_object_set_new(body, "usage", usage(job));
    return body;
}

/* ---- events ---------------------------------------------------------------------------------- */

static mn_status add_event(mn_text *out, json_t *body) {
    char *text = json_dumps(body, JSON_COMPACT);
    json_decref(body);
    mn_status st = text ? MN_OK : mn_fail(MN_ERR_MEMORY, "no memory for an event");
    if (st == MN_OK) st = mn_text_add(out, "data: ", 6);
    if (st == MN_OK) st = mn_text_add(out, text, strlen(text));
    if (st == MN_OK) st = mn_text_add(out, "\n\n", 2);
    free(text);
    return st;
}

static json_t *event(const mn_job *job, json_t *choices) {
    json_t *body = frame(job, job->ask.chat ? "chat.completion.chunk" : "text_completion");
    json_object_set_new(body, "choices", choices);
    if (job->ask.usage) json_object_set_new(body, "usage", json_null());
    return body;
}

/* Bytes of the text that events may tell: not those that may become a call of a tool. */
static size_t tellable(const mn_sequence *s) {
    if (!s->job->ask.tools || s->stage == MN_STAGE_DONE) return s->text.size;
    return mn_calls_settled(s->text.bytes, s->text.size);
}

/* One choice of an event: what is new of the sequence. */
static json_t *delta(mn_sequence *s, bool first) {
    mn_job *job = s->job;
    const bool ends = s->stage == MN_STAGE_DONE;
    const char *all = s->text.bytes ? s->text.bytes : "", *text = all + s->n_sent;
    size_t told = tellable(s);
    json_t *calls = NULL;
    if (ends) calls = mn_calls_parse(job->ask.tools, all, s->text.size, job->id, &told);
    const size_t size = mn_max(told, s->n_sent) - s->n_sent;
    const char *finish = calls ? "tool_calls" : s->finish ? s->finish : "length";
    json_t *out = json_pack("{s:I}", "index", (json_int_t)s->index);
    if (job->ask.chat) {
        json_t *message = json_object();
        if (first) json_object_set_new(message, "role", json_string("assistant"));
        if (size > 0 || first) json_object_set_new(message, "content", json_stringn(text, size));
        if (calls) json_object_set_new(message, "tool_calls", calls);
        json_object_set_new(out, "delta", message);
    } else {
        json_object_set_new(out, "text", json_stringn(text, size));
    }
    json_object_set_new(out, "logprobs", s->told_sent < s->n_told
                                             ? logprobs(job->engine, s, s->told_sent)
                                             : json_null());
    json_object_set_new(out, "finish_reason", ends ? json_string(finish) : json_null());
    if (job->ask.belief && s->variance_sent < s->n_variance) {
        json_object_set_new(out, "belief", belief(job->engine, s, s->variance_sent));
    }
    if (ends && s->kept[0]) json_object_set_new(out, "state", json_string(s->kept));
    s->n_sent += size;
    s->told_sent = s->n_told;
    s->variance_sent = s->n_variance;
    return out;
}

mn_status mn_reply_events(mn_text *out, mn_job *job, mn_sequence *s) {
    const bool ends = s->stage == MN_STAGE_DONE;
    const bool first = !s->opened && job->ask.chat;
    const bool news = tellable(s) > s->n_sent || s->n_variance > s->variance_sent;
    if (!ends && !news && !first) return MN_OK;
    s->opened = job->opened = true;
    json_t *choices = json_array();
    json_array_append_new(choices, delta(s, first));
    return add_event(out, event(job, choices));
}

mn_status mn_reply_last(mn_text *out, mn_job *job) {
    mn_status st = MN_OK;
    if (job->ask.usage) {
        json_t *body = event(job, json_array());
        json_object_set_new(body, "usage", usage(job));
        st = add_event(out, body);
    }
    return st == MN_OK ? mn_text_add(out, "data: [DONE]\n\n", 14) : st;
}
