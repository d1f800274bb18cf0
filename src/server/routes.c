/* routes.c - what each route does. Handlers run on the thread of HTTP and only read, check and
 * start; whatever touches the model or stored states is a job of the engine. */
#include "server/http/exchange.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "base/status.h"
#include "base/util.h"
#include "server/engine_internal.h"

extern const unsigned char mn_page_html[];
extern const size_t mn_page_html_size;

#define ROUTE(method, path, handler, body, about) static void handle_##handler(mn_exchange *x);
#include "server/routes.def"
#undef ROUTE

static const mn_route routes[] = {
#define ROUTE(method, path, handler, body, about)                                                  \
    { #method, path, handle_##handler, MN_BODY_##body, about },
#include "server/routes.def"
#undef ROUTE
};

const mn_route *mn_routes(int *count) {
    *count = MN_COUNTOF(routes);
    return routes;
}

/* Whether `path` is one of the pattern's; its {id} goes to `id`. */
static bool matches(const char *pattern, const char *path, char id[MN_STATE_ID]) {
    id[0] = '\0';
    while (*pattern && *path) {
        if (strncmp(pattern, "{id}", 4) == 0) {
            const size_t n = strspn(path, "0123456789abcdef");
            if (n != MN_STATE_ID - 1) return false;
            memcpy(id, path, n);
            id[n] = '\0';
            pattern += 4;
            path += n;
        } else if (*pattern++ != *path++) {
            return false;
        }
    }
    return !*pattern && !*path;
}

const mn_route *mn_route_find(const char *method, const char *path, char id[MN_STATE_ID],
                              int *status) {
    *status = 404;
    if (strcmp(method, "HEAD") == 0) method = "GET";
    for (size_t i = 0; i < MN_COUNTOF(routes); i++) {
        if (!matches(routes[i].path, path, id)) continue;
        if (strcmp(routes[i].method, method) == 0) return &routes[i];
        *status = 405;
    }
    return NULL;
}

/* ---- answers --------------------------------------------------------------------------------- */

void mn_exchange_json(mn_exchange *x, int status, json_t *body) {
    char *text = body ? json_dumps(body, JSON_COMPACT) : NULL;
    json_decref(body);
    x->status = text ? status : 500;
    x->type = "application/json";
    x->answer.size = 0;
    if (text) mn_text_add(&x->answer, text, strlen(text));
    free(text);
}

void mn_exchange_fail(mn_exchange *x, int status, const char *kind, const char *message) {
    mn_exchange_json(x, status, mn_reply_error(status, kind, message));
}

void mn_exchange_fail_last(mn_exchange *x, mn_status st) {
    const char *kind;
    const int status = mn_reply_status(st, &kind);
    mn_exchange_fail(x, status, kind, mn_last_error());
}

void mn_exchange_free(mn_exchange *x) {
    mn_text_free(&x->body);
    mn_text_free(&x->answer);
    if (x->file[0]) unlink(x->file);
    x->file[0] = '\0';
}

/* ---- starting jobs --------------------------------------------------------------------------- */

static void start(mn_exchange *x, mn_job *job) {
    const mn_status st = mn_job_start(job, x->wake, x->waker, x->fd);
    if (st == MN_OK) {
        x->job = job;
        return;
    }
    mn_job_release(job);
    if (st == MN_ERR_MEMORY) mn_exchange_fail(x, 429, "overloaded_error", mn_last_error());
    else mn_exchange_fail(x, 503, "unavailable_error", mn_last_error());
}

static void start_call(mn_exchange *x, mn_job_call call) {
    mn_job *job;
    const mn_status st = mn_job_create_call(&job, x->engine, call, x);
    if (st == MN_OK) start(x, job);
    else mn_exchange_fail_last(x, st);
}

static void start_ask(mn_exchange *x, mn_job_kind kind, mn_ask *ask, const char *into) {
    mn_job *job;
    const mn_status st = mn_job_create(&job, x->engine, kind, ask, into);
    if (st == MN_OK) start(x, job);
    else mn_exchange_fail_last(x, st);
}

/* The body as an object, a prompt of ids beside it; an empty one where `optional`. */
static mn_status read_body(mn_json *root, const mn_exchange *x, bool optional) {
    const bool empty = optional && x->body.size == 0;
    const char *bytes = empty ? "{}" : x->body.bytes ? x->body.bytes : "";
    mn_status st = mn_json_parse_ids(root, bytes, empty ? 2 : x->body.size, "request", "prompt");
    if (st == MN_OK) st = mn_json_expect_object(root);
    return st;
}

static void complete(mn_exchange *x, bool is_chat) {
    const mn_ask_limits *limits = mn_engine_limits(x->engine);
    mn_json root = { 0 };
    mn_ask ask = { 0 };
    mn_status st = read_body(&root, x, false);
    if (st == MN_OK) st = mn_ask_read(&ask, &root, limits, is_chat);
    mn_json_free(&root);
    if (st == MN_OK) start_ask(x, MN_JOB_COMPLETION, &ask, NULL);
    else mn_exchange_fail_last(x, st);
    mn_ask_free(&ask);
}

static void handle_completions(mn_exchange *x) {
    complete(x, false);
}

static void handle_chat(mn_exchange *x) {
    complete(x, true);
}

/* ---- about the model ------------------------------------------------------------------------- */

static void handle_page(mn_exchange *x) {
    x->status = 200;
    x->type = "text/html; charset=utf-8";
    x->static_bytes = mn_page_html;
    x->static_size = mn_page_html_size;
}

static void handle_health(mn_exchange *x) {
    mn_exchange_json(x, 200, json_pack("{s:s}", "status", "ok"));
}

static void handle_openapi(mn_exchange *x) {
    mn_exchange_json(x, 200, mn_openapi());
}

static void handle_models(mn_exchange *x) {
    const mn_engine *e = x->engine;
    const mn_model_config *config = mn_model_describe(e->model);
    json_t *names = json_array();
    for (int i = 0; i < config->n_layers; i++) {
        json_array_append_new(names, json_string(config->names[i]));
    }
    json_t *model = json_pack("{s:s,s:s,s:i,s:s,s:I,s:o}", "id", e->name, "object", "model",
                              "created", 0, "owned_by", "mneme", "max_model_len",
                              (json_int_t)e->limits.context, "layers", names);
    json_object_set_new(model, "parameters", json_integer(mn_model_count(e->model)));
    json_object_set_new(model, "beliefs", json_integer(e->n_beliefs));
    json_object_set_new(model, "chat", json_boolean(!mn_chat_refusal(e->chat)));
    mn_exchange_json(x, 200, json_pack("{s:s,s:[o]}", "object", "list", "data", model));
}

static void handle_metrics(mn_exchange *x) {
    const mn_metrics metrics = mn_engine_metrics(x->engine);
    const mn_status st = mn_metrics_write(&x->answer, &metrics);
    x->status = 200;
    x->type = "text/plain; version=0.0.4; charset=utf-8";
    if (st != MN_OK) mn_exchange_fail_last(x, st);
}

/* ---- tokens ---------------------------------------------------------------------------------- */

static void handle_tokenize(mn_exchange *x) {
    static const char *const known[] = { "model", "prompt", "add_special_tokens",
                                         "return_token_strs" };
    const mn_ask_limits *limits = mn_engine_limits(x->engine);
    mn_token_list tokens = { 0 };
    mn_json root = { 0 };
    const char *text = "";
    bool special = true;
    mn_status st = read_body(&root, x, false);
    if (st == MN_OK) st = mn_json_unknown_key(&root, known, MN_COUNTOF(known));
    if (st == MN_OK) st = mn_json_get_text(&text, &root, "prompt");
    if (st == MN_OK) st = mn_json_opt_bool(&special, &root, "add_special_tokens");
    if (st == MN_OK) {
        st = special ? mn_tokenizer_encode(limits->tokenizer, text, strlen(text), true, &tokens)
                     : mn_tokenizer_encode_bare(limits->tokenizer, text, strlen(text), &tokens);
    }
    json_t *list = json_array();
    for (int64_t i = 0; i < tokens.count; i++) {
        json_array_append_new(list, json_integer(tokens.ids[i]));
    }
    if (st == MN_OK) {
        mn_exchange_json(x, 200, json_pack("{s:O,s:I,s:I}", "tokens", list, "count",
                                           (json_int_t)tokens.count, "max_model_len",
                                           (json_int_t)limits->context));
    } else {
        mn_exchange_fail_last(x, st);
    }
    json_decref(list);
    mn_token_list_free(&tokens);
    mn_json_free(&root);
}

static void handle_detokenize(mn_exchange *x) {
    static const char *const known[] = { "model", "tokens" };
    const mn_ask_limits *limits = mn_engine_limits(x->engine);
    mn_json root = { 0 };
    mn_token_list ids = { 0 };
    mn_text clean = { 0 };
    char *text = NULL;
    size_t size = 0;
    mn_status st = read_body(&root, x, false);
    if (st == MN_OK) st = mn_json_unknown_key(&root, known, MN_COUNTOF(known));
    const mn_json at = mn_json_member(&root, "tokens");
    if (st == MN_OK) st = mn_json_expect_list(&at);
    for (int64_t i = 0; st == MN_OK && i < mn_json_count(&at); i++) {
        const mn_json item = mn_json_item(&at, i);
        int64_t id = -1;
        st = mn_json_read_i64(&id, &item);
        if (st == MN_OK && (id < 0 || id >= mn_tokenizer_size(limits->tokenizer))) {
            st = mn_json_fail(&item, "token %lld is outside the vocabulary", (long long)id);
        }
        if (st == MN_OK) st = mn_token_list_add(&ids, (int32_t)id);
    }
    if (st == MN_OK) {
        st = mn_tokenizer_decode(limits->tokenizer, ids.ids, ids.count, true, &text, &size);
    }
    if (st == MN_OK) st = mn_text_add_utf8(&clean, text, size);
    if (st == MN_OK) {
        mn_exchange_json(x, 200, json_pack("{s:s%}", "prompt", clean.bytes ? clean.bytes : "",
                                           clean.size));
    } else {
        mn_exchange_fail_last(x, st);
    }
    free(text);
    mn_text_free(&clean);
    mn_token_list_free(&ids);
    mn_json_free(&root);
}

static json_t *special_text(const mn_tokenizer *tokenizer, int32_t id) {
    char *text = NULL;
    size_t size = 0;
    json_t *out = NULL;
    if (id >= 0 && mn_tokenizer_decode(tokenizer, &id, 1, true, &text, &size) == MN_OK) {
        out = json_stringn(text, size);
    }
    free(text);
    return out ? out : json_null();
}

static void handle_tokenizer_info(mn_exchange *x) {
    const mn_tokenizer *t = mn_engine_limits(x->engine)->tokenizer;
    const char *template = mn_chat_template(x->engine->chat);
    const int32_t bos = mn_tokenizer_bos(t), eos = mn_tokenizer_eos(t);
    json_t *body = json_pack("{s:o,s:o,s:n,s:o,s:s,s:I}", "eos_token", special_text(t, eos),
                             "bos_token", special_text(t, bos), "pad_token", "chat_template",
                             template ? json_string(template) : json_null(), "tokenizer_class",
                             mn_tokenizer_kind(t), "vocab_size",
                             (json_int_t)mn_tokenizer_size(t));
    json_object_set_new(body, "eos_token_id", eos >= 0 ? json_integer(eos) : json_null());
    json_object_set_new(body, "bos_token_id", bos >= 0 ? json_integer(bos) : json_null());
    mn_exchange_json(x, 200, body);
}

/* ---- states ---------------------------------------------------------------------------------- */

/* The state of the path, or its absence as the answer. */
static mn_stored_state *state_of(mn_job *job, mn_engine *e, const char *id) {
    mn_stored_state *state = mn_states_find(e->states, id);
    if (!state) mn_job_fail(job, 404, "not_found_error", "there is no state of that id");
    return state;
}

static void fail_call(mn_job *job, mn_status st) {
    const char *kind;
    const int status = mn_reply_status(st, &kind);
    mn_job_fail(job, status, kind, mn_last_error());
}

static void answer_state(mn_job *job, mn_status st, const mn_stored_state *state) {
    if (st == MN_OK) mn_job_answer(job, 200, mn_reply_state(state));
    else fail_call(job, st);
}

static void call_list(mn_job *job, mn_engine *e) {
    json_t *data = json_array();
    for (int64_t i = 0; i < mn_states_count(e->states); i++) {
        json_array_append_new(data, mn_reply_state(mn_states_at(e->states, i)));
    }
    mn_job_answer(job, 200, json_pack("{s:s,s:o,s:I}", "object", "list", "data", data, "bytes",
                                      (json_int_t)mn_states_bytes(e->states)));
}

static void call_state(mn_job *job, mn_engine *e) {
    const mn_exchange *x = mn_job_data(job);
    const mn_stored_state *state = state_of(job, e, x->id);
    if (state) answer_state(job, MN_OK, state);
}

static void call_create(mn_job *job, mn_engine *e) {
    mn_stored_state *state;
    const mn_status st = mn_states_add(&state, e->states, NULL, false);
    answer_state(job, st, state);
}

static void call_delete(mn_job *job, mn_engine *e) {
    const mn_exchange *x = mn_job_data(job);
    mn_stored_state *state = state_of(job, e, x->id);
    if (!state) return;
    mn_states_delete(e->states, state);
    mn_job_answer(job, 200, json_pack("{s:s,s:b}", "id", x->id, "deleted", 1));
}

static void copy_state(mn_job *job, mn_engine *e, bool frozen) {
    const mn_exchange *x = mn_job_data(job);
    const mn_stored_state *from = state_of(job, e, x->id);
    mn_stored_state *state = NULL;
    if (!from) return;
    const mn_status st = mn_states_add(&state, e->states, from, frozen);
    answer_state(job, st, state);
}

static void call_snapshot(mn_job *job, mn_engine *e) {
    copy_state(job, e, true);
}

static void call_fork(mn_job *job, mn_engine *e) {
    copy_state(job, e, false);
}

static void call_restore(mn_job *job, mn_engine *e) {
    const mn_exchange *x = mn_job_data(job);
    mn_json root = { 0 };
    char id[MN_STATE_ID] = "";
    mn_stored_state *state = state_of(job, e, x->id);
    if (!state) return;
    mn_status st = read_body(&root, x, false);
    if (st == MN_OK) st = mn_ask_state(id, &root, "snapshot");
    mn_json_free(&root);
    if (st != MN_OK) {
        fail_call(job, st);
        return;
    }
    const mn_stored_state *from = state_of(job, e, id);
    if (!from) return;
    if (state->frozen || state->busy) {
        mn_job_fail(job, 409, "conflict_error", state->busy ? "the state is being fed"
                                                            : "a snapshot stays as it is");
        return;
    }
    st = mn_states_set(e->states, state, from);
    answer_state(job, st, state);
}

static bool file_name(mn_exchange *x) {
    const int n = snprintf(x->file, sizeof x->file, "%s/state-XXXXXX", x->folder);
    const int fd = n > 0 && (size_t)n < sizeof x->file ? mkstemp(x->file) : -1;
    if (fd < 0) x->file[0] = '\0';
    else close(fd);
    return fd >= 0;
}

static void call_download(mn_job *job, mn_engine *e) {
    mn_exchange *x = mn_job_data(job);
    mn_session *session = NULL;
    const mn_stored_state *state = state_of(job, e, x->id);
    if (!state) return;
    if (!state->snapshot) {
        mn_job_fail(job, 409, "conflict_error", "the state has read nothing: there is no file");
        return;
    }
    mn_status st = file_name(x) ? MN_OK : mn_fail(MN_ERR_IO, "no file for the state in %s",
                                                  x->folder);
    const mn_session_options how = { .dtype = e->options.dtype };
    if (st == MN_OK) st = mn_session_create(&session, e->context, e->model, &how);
    if (st == MN_OK) st = mn_session_restore(session, state->snapshot);
    if (st == MN_OK) st = mn_session_save(session, x->file);
    mn_session_destroy(session);
    x->sends_file = st == MN_OK;
    if (st == MN_OK) mn_job_answer(job, 200, json_object());
    else fail_call(job, st);
}

/* A message about the upload, not about our file. */
static void fail_upload(mn_job *job, mn_status st, const char *file) {
    const char *message = mn_last_error();
    const size_t n = strlen(file);
    if (strncmp(message, file, n) == 0) message += n + (message[n] == ':');
    mn_job_fail(job, st == MN_ERR_MEMORY ? 503 : 400, "invalid_request_error",
                message + strspn(message, " "));
}

static void call_upload(mn_job *job, mn_engine *e) {
    const mn_exchange *x = mn_job_data(job);
    mn_session *session = NULL;
    mn_stored_state *state = NULL;
    const mn_session_options how = { .prefill_chunk = e->options.chunk,
                                     .dtype = e->options.dtype };
    mn_status st = mn_session_create(&session, e->context, e->model, &how);
    if (st == MN_OK) st = mn_states_load(&state, e->states, session, x->file);
    if (st != MN_OK) {
        fail_upload(job, st, x->file);
    } else if (state->position > e->limits.context) {
        mn_states_delete(e->states, state);
        mn_job_fail(job, 400, "invalid_request_error", "the state has read more tokens than this "
                    "server's context");
    } else {
        answer_state(job, MN_OK, state);
    }
    mn_session_destroy(session);
}

static void handle_states(mn_exchange *x) {
    start_call(x, call_list);
}

static void handle_state(mn_exchange *x) {
    start_call(x, call_state);
}

static void handle_discard(mn_exchange *x) {
    start_call(x, call_delete);
}

static void handle_snapshot(mn_exchange *x) {
    start_call(x, call_snapshot);
}

static void handle_fork(mn_exchange *x) {
    start_call(x, call_fork);
}

static void handle_restore(mn_exchange *x) {
    start_call(x, call_restore);
}

static void handle_download(mn_exchange *x) {
    start_call(x, call_download);
}

static void handle_upload(mn_exchange *x) {
    if (x->file[0]) start_call(x, call_upload);
    else mn_exchange_fail(x, 400, "invalid_request_error", "the body is empty: send a state");
}

/* One prompt, read into a state. */
static void read_into(mn_exchange *x, const char *into) {
    static const char *const known[] = { "prompt", "add_special_tokens" };
    mn_json root = { 0 };
    mn_ask ask = { .n = 1, .logprobs = -1 };
    bool special = true;
    mn_status st = read_body(&root, x, !into[0]);
    if (st == MN_OK) st = mn_json_unknown_key(&root, known, MN_COUNTOF(known));
    if (st == MN_OK) st = mn_json_opt_bool(&special, &root, "add_special_tokens");
    const mn_json prompt = mn_json_member(&root, "prompt");
    if (st == MN_OK && !into[0] && !mn_json_given(&prompt)) {
        mn_json_free(&root);
        start_call(x, call_create);
        return;
    }
    if (st == MN_OK) {
        st = mn_ask_prompts(&ask, &root, "prompt", mn_engine_limits(x->engine),
                            special && !into[0], !into[0]);
    }
    if (st == MN_OK && ask.n_prompts != 1) st = mn_json_fail(&prompt, "one at a time");
    mn_json_free(&root);
    if (st == MN_OK) start_ask(x, MN_JOB_FEED, &ask, into);
    else mn_exchange_fail_last(x, st);
    mn_ask_free(&ask);
}

static void handle_create(mn_exchange *x) {
    read_into(x, "");
}

static void handle_feed(mn_exchange *x) {
    read_into(x, x->id);
}

/* What is to be told of which tokens. */
static mn_status read_belief(mn_ask *ask, const mn_exchange *x, const mn_json *root) {
    static const char *const known[] = { "prompt", "state", "add_special_tokens", "inside", "rows",
                                         "model" };
    const mn_ask_limits *limits = mn_engine_limits(x->engine);
    const mn_json prompt = mn_json_member(root, "prompt");
    bool special = true;
    mn_status st = mn_json_unknown_key(root, known, MN_COUNTOF(known));
    if (st == MN_OK) st = mn_json_opt_bool(&special, root, "add_special_tokens");
    if (st == MN_OK) st = mn_ask_state(ask->state, root, "state");
    if (st == MN_OK) st = mn_ask_rows(ask, root);
    const bool fresh = !ask->state[0];
    if (st == MN_OK && !limits->belief) {
        st = mn_fail(MN_ERR_UNSUPPORTED, "no layer of this model tells a variance (kla, bayes and "
                     "palimpsa do)");
    }
    if (st != MN_OK) return st;
    if (ask->inside && !fresh && !mn_json_given(&prompt)) return mn_ask_no_prompt(ask);
    st = mn_ask_prompts(ask, root, "prompt", limits, special && fresh, fresh);
    if (st == MN_OK && ask->n_prompts != 1) st = mn_json_fail(root, "prompt: one at a time");
    if (st == MN_OK && ask->inside && ask->prompts[0].tokens.count > MN_INSIDE_TOKENS) {
        st = mn_json_fail(&prompt, "one answer tells of %d tokens", MN_INSIDE_TOKENS);
    }
    return st;
}

static void handle_belief(mn_exchange *x) {
    mn_json root = { 0 };
    mn_ask ask = { .n = 1, .logprobs = -1, .belief = true };
    mn_status st = read_body(&root, x, false);
    if (st == MN_OK) st = read_belief(&ask, x, &root);
    mn_json_free(&root);
    if (st == MN_OK) start_ask(x, MN_JOB_BELIEF, &ask, NULL);
    else mn_exchange_fail_last(x, st);
    mn_ask_free(&ask);
}
