/* request.c - fields of requests one by one; fields.def names them all. */
#include "server/request.h"

#include <inttypes.h>
#include <stdlib.h>
#include <string.h>
#include <sys/random.h>

#include "base/status.h"
#include "base/util.h"
#include "infer/sample.h"
#include "server/calls.h"

/* ---- names ----------------------------------------------------------------------------------- */

static const char *const known_fields[] = {
#define FIELD(name, type, where, about) #name,
#define NEUTRAL(name, value, about) #name,
#define IGNORED(name) #name,
#include "server/fields.def"
#undef FIELD
#undef NEUTRAL
#undef IGNORED
};

static const struct {
    const char *name, *value, *about;
} neutral[] = {
#define FIELD(name, type, where, about)
#define NEUTRAL(name, value, about) { #name, value, about },
#define IGNORED(name)
#include "server/fields.def"
#undef FIELD
#undef NEUTRAL
#undef IGNORED
};

/* Whether `value` says the same as the text of a row: numbers by value, 0 and null and an empty
 * list alike. */
static bool says(const json_t *value, const char *text) {
    json_t *want = json_loads(text, JSON_DECODE_ANY, NULL);
    bool same = json_is_null(value) || json_equal(value, want);
    if (json_is_number(value) && json_is_number(want)) {
        same = json_number_value(value) == json_number_value(want);
    }
    if (json_is_array(value) && json_array_size(value) == 0) same = true;
    json_decref(want);
    return same;
}

static mn_status check_names(const mn_json *root) {
    mn_status st = mn_json_expect_object(root);
    if (st == MN_OK) st = mn_json_unknown_key(root, known_fields, MN_COUNTOF(known_fields));
    for (size_t i = 0; i < MN_COUNTOF(neutral) && st == MN_OK; i++) {
        const mn_json at = mn_json_member(root, neutral[i].name);
        if (!at.value || says(at.value, neutral[i].value)) continue;
        st = mn_json_fail(&at, "only %s is served: %s", neutral[i].value, neutral[i].about);
    }
    return st;
}

/* ---- prompts --------------------------------------------------------------------------------- */

static mn_status check_length(const mn_json *at, int64_t count, const mn_ask_limits *limits) {
    if (count <= limits->context) return MN_OK;
    return mn_json_fail(at, "%" PRId64 " tokens, and this server reads %" PRId64 " at most", count,
                        limits->context);
}

/* What a sequence of nothing begins with. */
static mn_status begin(mn_token_list *tokens, const mn_json *at, const mn_ask_limits *limits) {
    int32_t id = mn_tokenizer_bos(limits->tokenizer);
    if (id < 0) id = mn_tokenizer_eos(limits->tokenizer);
    if (id >= 0 && id < limits->n_ids) return mn_token_list_add(tokens, id);
    return mn_json_fail(at, "is empty, and the tokenizer names no token that begins a text");
}

static mn_status check_ids(const mn_json *at, const mn_token_list *tokens,
                           const mn_ask_limits *limits) {
    for (int64_t i = 0; i < tokens->count; i++) {
        if (tokens->ids[i] >= 0 && tokens->ids[i] < limits->n_ids) continue;
        return mn_json_fail(at, "token %d at %" PRId64 " is outside the model's vocabulary of "
                            "%" PRId64, (int)tokens->ids[i], i, limits->n_ids);
    }
    return MN_OK;
}

static mn_status read_text(mn_prompt *out, const mn_json *at, const mn_ask_limits *limits,
                           bool special, bool fresh) {
    const char *text = NULL;
    mn_status st = mn_json_read_text(&text, at);
    if (st != MN_OK) return st;
    out->size = strlen(text);
    out->text = malloc(out->size + 1);
    if (!out->text) return mn_fail(MN_ERR_MEMORY, "no memory for a prompt");
    memcpy(out->text, text, out->size + 1);
    st = special ? mn_tokenizer_encode(limits->tokenizer, text, out->size, true, &out->tokens)
                 : mn_tokenizer_encode_bare(limits->tokenizer, text, out->size, &out->tokens);
    if (st == MN_OK && out->tokens.count == 0 && fresh) st = begin(&out->tokens, at, limits);
    if (st == MN_OK) st = check_ids(at, &out->tokens, limits);
    return st == MN_OK ? check_length(at, out->tokens.count, limits) : st;
}

/* `given`: ids that were read beside the document; NULL: they are in it. */
static mn_status read_ids(mn_prompt *out, const mn_json *at, const mn_json_ids *given,
                          const mn_ask_limits *limits, bool fresh) {
    const int64_t count = given ? given->count : mn_json_count(at);
    mn_status st = check_length(at, count, limits);
    for (int64_t i = 0; i < count && st == MN_OK; i++) {
        const mn_json item = mn_json_item(at, i);
        int64_t id = -1;
        if (given) id = given->of[i];
        else st = mn_json_read_i64(&id, &item);
        if (st == MN_OK && (id < 0 || id >= limits->n_ids)) {
            st = mn_json_fail(&item, "token %" PRId64 " is outside the model's vocabulary of "
                              "%" PRId64, id, limits->n_ids);
        }
        if (st == MN_OK) st = mn_token_list_add(&out->tokens, (int32_t)id);
    }
    if (st == MN_OK && count == 0 && fresh) st = begin(&out->tokens, at, limits);
    if (st != MN_OK || !out->echoes) return st;
    return mn_tokenizer_decode(limits->tokenizer, out->tokens.ids, out->tokens.count, false,
                               &out->text, &out->size);
}

mn_status mn_ask_prompts(mn_ask *out, const mn_json *root, const char *key,
                         const mn_ask_limits *limits, bool special, bool fresh) {
    const mn_json at = mn_json_member(root, key);
    const mn_json first = mn_json_item(&at, 0);
    const bool list = json_is_array(at.value);
    const bool ids = list && (!first.value || json_is_number(first.value));
    const int64_t count = list && !ids ? mn_json_count(&at) : 1;
    const mn_json_ids *given = root->ids.of ? &root->ids : NULL;
    if (!at.value) return mn_json_fail(&at, "is missing");
    if (count > MN_ASK_SEQUENCES) {
        return mn_json_fail(&at, "%" PRId64 " prompts; %d are the most", count, MN_ASK_SEQUENCES);
    }
    out->prompts = calloc((size_t)count, sizeof *out->prompts);
    if (!out->prompts) return mn_fail(MN_ERR_MEMORY, "no memory for %" PRId64 " prompts", count);
    out->n_prompts = count;
    for (int64_t i = 0; i < count; i++) out->prompts[i].echoes = out->echo;
    if (ids) return read_ids(&out->prompts[0], &at, given, limits, fresh);
    if (!list) return read_text(&out->prompts[0], &at, limits, special, fresh);
    mn_status st = MN_OK;
    for (int64_t i = 0; i < count && st == MN_OK; i++) {
        const mn_json item = mn_json_item(&at, i);
        st = json_is_array(item.value)
                 ? read_ids(&out->prompts[i], &item, NULL, limits, fresh)
                 : read_text(&out->prompts[i], &item, limits, special, fresh);
    }
    return st;
}

mn_status mn_ask_no_prompt(mn_ask *out) {
    out->prompts = calloc(1, sizeof *out->prompts);
    if (!out->prompts) return mn_fail(MN_ERR_MEMORY, "no memory for a prompt");
    out->n_prompts = 1;
    return MN_OK;
}

mn_status mn_ask_rows(mn_ask *out, const mn_json *root) {
    const mn_json at = mn_json_member(root, "rows");
    mn_status st = mn_json_opt_bool(&out->inside, root, "inside");
    if (st != MN_OK || !mn_json_given(&at)) return st;
    st = mn_json_expect_list(&at);
    if (st == MN_OK && mn_json_count(&at) > MN_INSIDE_ROWS) {
        st = mn_json_fail(&at, "%" PRId64 " rows; %d are the most", mn_json_count(&at),
                          MN_INSIDE_ROWS);
    }
    for (int64_t i = 0; st == MN_OK && i < mn_json_count(&at); i++) {
        const mn_json item = mn_json_item(&at, i);
        st = mn_json_read_i64(&out->rows[out->n_rows], &item);
        if (st == MN_OK && (out->rows[i] < -MN_INSIDE_TOKENS || out->rows[i] >= MN_INSIDE_TOKENS)) {
            st = mn_json_fail(&item, "one answer tells of %d tokens", MN_INSIDE_TOKENS);
        }
        if (st == MN_OK) out->n_rows++;
    }
    if (out->n_rows > 0) out->inside = true;
    return st;
}

/* Whether the model is told of tools; calls by command would need constrained decoding. */
static mn_status read_tool_choice(bool *told, const mn_json *root) {
    const mn_json at = mn_json_member(root, "tool_choice");
    const char *choice = json_string_value(at.value);
    *told = !choice || strcmp(choice, "none") != 0;
    if (!mn_json_given(&at) || !*told || (choice && strcmp(choice, "auto") == 0)) return MN_OK;
    return mn_json_fail(&at, "only auto and none are served: the model itself decides, there is no "
                        "constrained decoding");
}

/* What a conversation is rendered with: tools, documents, and variables of the template. */
static mn_status read_chat_options(mn_chat_options *out, const mn_json *root) {
    const mn_json tools = mn_json_member(root, "tools"), documents = mn_json_member(root,
                                                                                    "documents");
    const mn_json more = mn_json_member(root, "chat_template_kwargs");
    *out = (mn_chat_options){ .add_generation_prompt = true };
    bool told = true;
    mn_status st = read_tool_choice(&told, root);
    if (st == MN_OK && mn_json_given(&tools)) st = mn_json_expect_list(&tools);
    if (st == MN_OK && mn_json_given(&documents)) st = mn_json_expect_list(&documents);
    if (st == MN_OK && mn_json_given(&more)) st = mn_json_expect_object(&more);
    if (st == MN_OK) {
        st = mn_json_opt_bool(&out->continue_final_message, root, "continue_final_message");
    }
    if (out->continue_final_message) out->add_generation_prompt = false;
    if (st == MN_OK) {
        st = mn_json_opt_bool(&out->add_generation_prompt, root, "add_generation_prompt");
    }
    if (mn_json_given(&tools) && told && mn_json_count(&tools) > 0) out->tools = tools.value;
    if (mn_json_given(&documents)) out->documents = documents.value;
    if (mn_json_given(&more)) out->variables = more.value;
    return st;
}

static mn_status read_messages(mn_ask *out, const mn_json *root, const mn_ask_limits *limits) {
    const mn_json at = mn_json_member(root, "messages");
    mn_text text = { 0 };
    mn_status st = mn_json_expect_list(&at);
    if (st == MN_OK && mn_json_count(&at) == 0) st = mn_json_fail(&at, "is empty");
    for (int64_t i = 0; i < mn_json_count(&at) && st == MN_OK; i++) {
        const mn_json message = mn_json_item(&at, i);
        const char *role;
        st = mn_json_expect_object(&message);
        if (st == MN_OK) st = mn_json_get_text(&role, &message, "role");
    }
    mn_chat_options how;
    if (st == MN_OK) st = read_chat_options(&how, root);
    json_t *messages = st == MN_OK ? mn_calls_unfold(at.value) : NULL;
    if (st == MN_OK && !messages) st = mn_fail(MN_ERR_MEMORY, "no memory for messages");
    if (st == MN_OK) st = mn_chat_render(&text, limits->chat, messages, &how);
    if (st == MN_OK && how.tools) out->tools = json_incref((json_t *)how.tools);
    json_decref(messages);
    out->prompts = st == MN_OK ? calloc(1, sizeof *out->prompts) : NULL;
    if (st == MN_OK && !out->prompts) st = mn_fail(MN_ERR_MEMORY, "no memory for a prompt");
    if (st == MN_OK) {
        out->n_prompts = 1;
        st = mn_tokenizer_encode_bare(limits->tokenizer, text.bytes ? text.bytes : "", text.size,
                                      &out->prompts[0].tokens);
    }
    if (st == MN_OK) st = check_ids(&at, &out->prompts[0].tokens, limits);
    if (st == MN_OK) st = check_length(&at, out->prompts[0].tokens.count, limits);
    mn_text_free(&text);
    return st;
}

mn_status mn_ask_state(char out[MN_STATE_ID], const mn_json *root, const char *key) {
    const mn_json at = mn_json_member(root, key);
    const char *text = "";
    out[0] = '\0';
    if (!mn_json_given(&at)) return MN_OK;
    const mn_status st = mn_json_read_text(&text, &at);
    if (st != MN_OK) return st;
    if (strlen(text) != MN_STATE_ID - 1 || strspn(text, "0123456789abcdef") != MN_STATE_ID - 1) {
        return mn_json_fail(&at, "is no id of a state");
    }
    memcpy(out, text, MN_STATE_ID);
    return MN_OK;
}

/* ---- numbers --------------------------------------------------------------------------------- */

static mn_status take_i64(int64_t *out, const mn_json *root, const char *key, int64_t low,
                          int64_t high) {
    int64_t value = *out;
    const mn_status st = mn_json_opt_i64(&value, root, key);
    if (st != MN_OK) return st;
    const mn_json at = mn_json_member(root, key);
    if (mn_json_given(&at) && (value < low || value > high)) {
        return mn_json_fail(&at, "%" PRId64 " is outside %" PRId64 " to %" PRId64, value, low,
                            high);
    }
    *out = value;
    return MN_OK;
}

/* Counts of which -1 says what 0 says here. */
static mn_status take_count(int64_t *out, const mn_json *root, const char *key) {
    const mn_status st = take_i64(out, root, key, -1, 1000000000);
    if (*out < 0) *out = 0;
    return st;
}

static mn_status read_sampling(mn_ask *out, const mn_json *root) {
    mn_sampling *how = &out->sampling;
    mn_sampling_defaults(how);
    uint64_t drawn = 0;
    if (getrandom(&drawn, sizeof drawn, 0) != (ssize_t)sizeof drawn) drawn = 1;
    int64_t seed = (int64_t)(drawn >> 1);
    mn_status st = mn_json_opt_f64(&how->temperature, root, "temperature");
    if (st == MN_OK) st = mn_json_opt_f64(&how->top_p, root, "top_p");
    if (st == MN_OK) st = mn_json_opt_f64(&how->min_p, root, "min_p");
    if (st == MN_OK) st = mn_json_opt_f64(&how->repetition_penalty, root, "repetition_penalty");
    if (st == MN_OK) st = mn_json_opt_f64(&how->repetition_penalty, root, "repeat_penalty");
    if (st == MN_OK) st = take_count(&how->top_k, root, "top_k");
    if (st == MN_OK) st = take_count(&how->repetition_window, root, "repeat_last_n");
    if (st == MN_OK) st = mn_json_opt_i64(&seed, root, "seed");
    how->seed = (uint64_t)seed;
    return st == MN_OK ? mn_sampling_check(how) : st;
}

static mn_status read_stop_ids(mn_ask *out, const mn_json *root) {
    const mn_json at = mn_json_member(root, "stop_token_ids");
    if (!mn_json_given(&at)) return MN_OK;
    mn_status st = mn_json_expect_list(&at);
    const int64_t count = st == MN_OK ? mn_json_count(&at) : 0;
    if (count > MN_ASK_STOPS) return mn_json_fail(&at, "%d tokens are the most", MN_ASK_STOPS);
    for (int64_t i = 0; i < count && st == MN_OK; i++) {
        const mn_json item = mn_json_item(&at, i);
        int64_t id = -1;
        st = mn_json_read_i64(&id, &item);
        if (st == MN_OK && (id < 0 || id > INT32_MAX)) st = mn_json_fail(&item, "is no token");
        if (st == MN_OK) out->stop_ids[out->n_stop_ids++] = (int32_t)id;
    }
    return st;
}

static mn_status read_stops(mn_ask *out, const mn_json *root) {
    const mn_json at = mn_json_member(root, "stop");
    if (!mn_json_given(&at)) return MN_OK;
    const bool list = json_is_array(at.value);
    const int64_t count = list ? mn_json_count(&at) : 1;
    if (count > MN_ASK_STOPS) return mn_json_fail(&at, "%d texts are the most", MN_ASK_STOPS);
    mn_status st = MN_OK;
    for (int64_t i = 0; i < count && st == MN_OK; i++) {
        const mn_json item = list ? mn_json_item(&at, i) : at;
        const char *text = NULL;
        st = mn_json_read_text(&text, &item);
        if (st != MN_OK || !*text) continue;    // an empty text would end everything at once
        out->stops[out->n_stops] = strdup(text);
        if (!out->stops[out->n_stops++]) st = mn_fail(MN_ERR_MEMORY, "no memory for a stop");
    }
    return st;
}

/* logprobs is a count in completions; in a conversation a flag, with top_logprobs beside it. */
static mn_status read_logprobs(mn_ask *out, const mn_json *root) {
    const mn_json at = mn_json_member(root, "logprobs");
    int64_t count = out->chat ? 0 : -1;
    bool wanted = false;
    mn_status st = MN_OK;
    if (json_is_boolean(at.value)) {
        wanted = json_is_true(at.value);
        if (!out->chat) count = wanted ? 1 : -1;
    } else if (out->chat && mn_json_given(&at)) {
        st = mn_json_fail(&at, "expected true or false");
    } else {
        st = take_i64(&count, root, "logprobs", 0, MN_ASK_LOGPROBS);
    }
    if (out->chat && st == MN_OK) {
        st = take_i64(&count, root, "top_logprobs", 0, MN_ASK_LOGPROBS);
    }
    out->logprobs = out->chat && !wanted ? -1 : (int)count;
    return st;
}

static mn_status read_amounts(mn_ask *out, const mn_json *root, const mn_ask_limits *limits) {
    const bool chat = out->chat;
    int64_t best = 0;
    out->n = 1;
    out->max_tokens = chat ? limits->most_tokens : 16;
    mn_status st = take_i64(&out->n, root, "n", 1, MN_ASK_SEQUENCES);
    if (st == MN_OK) st = take_i64(&best, root, "best_of", 1, MN_ASK_SEQUENCES);
    if (st == MN_OK && best && best != out->n) {
        const mn_json at = mn_json_member(root, "best_of");
        st = mn_json_fail(&at, "continuations are not ranked: leave it out, or say what n says");
    }
    if (st == MN_OK) st = take_i64(&out->max_tokens, root, "max_tokens", 0, limits->context);
    if (st == MN_OK && chat) {
        st = take_i64(&out->max_tokens, root, "max_completion_tokens", 0, limits->context);
    }
    if (st == MN_OK) st = take_i64(&out->max_tokens, root, "n_predict", -1, limits->context);
    return st;
}

static mn_status read_flags(mn_ask *out, const mn_json *root) {
    const mn_json options = mn_json_member(root, "stream_options");
    out->cache = true;
    mn_status st = mn_json_opt_bool(&out->echo, root, "echo");
    if (st == MN_OK) st = mn_json_opt_bool(&out->stream, root, "stream");
    if (st == MN_OK) st = mn_json_opt_bool(&out->ignore_eos, root, "ignore_eos");
    if (st == MN_OK) st = mn_json_opt_bool(&out->cache, root, "cache_prompt");
    if (st == MN_OK) st = mn_json_opt_bool(&out->belief, root, "belief");
    if (st == MN_OK) st = mn_json_opt_bool(&out->keep, root, "keep");
    if (st == MN_OK) st = mn_json_opt_bool(&out->keep_stop, root, "include_stop_str_in_output");
    if (st == MN_OK && mn_json_given(&options)) {
        st = mn_json_expect_object(&options);
        if (st == MN_OK) st = mn_json_opt_bool(&out->usage, &options, "include_usage");
    }
    return st;
}

/* What fields say together. */
static mn_status check_together(const mn_ask *ask, const mn_json *root,
                                const mn_ask_limits *limits) {
    if (ask->n * ask->n_prompts > MN_ASK_SEQUENCES) {
        return mn_json_fail(root, "%" PRId64 " continuations of %" PRId64 " prompts; %d sequences "
                            "are the most", ask->n, ask->n_prompts, MN_ASK_SEQUENCES);
    }
    if (ask->belief && !limits->belief) {
        return mn_json_fail(root, "belief: no layer of this model tells a variance (kla, bayes "
                            "and palimpsa do)");
    }
    for (int64_t i = 0; i < ask->n_prompts; i++) {
        const int64_t all = ask->prompts[i].tokens.count + ask->max_tokens;
        if (all <= limits->context) continue;
        return mn_json_fail(root, "a prompt of %" PRId64 " tokens and %" PRId64 " to write are "
                            "more than the %" PRId64 " of this server",
                            ask->prompts[i].tokens.count, ask->max_tokens, limits->context);
    }
    return MN_OK;
}

/* What the context leaves, where a conversation says nothing or n_predict -1. */
static void bound_amount(mn_ask *out, const mn_json *root, const mn_ask_limits *limits) {
    static const char *const amounts[] = { "max_tokens", "max_completion_tokens", "n_predict" };
    int64_t left = limits->context;
    bool said = false;
    for (int64_t i = 0; i < out->n_prompts; i++) {
        left = mn_min(left, limits->context - out->prompts[i].tokens.count);
    }
    for (size_t i = 0; i < MN_COUNTOF(amounts); i++) {
        const mn_json at = mn_json_member(root, amounts[i]);
        said |= mn_json_given(&at);
    }
    if (out->max_tokens < 0) out->max_tokens = left;
    else if (out->chat && !said) out->max_tokens = mn_min(out->max_tokens, left);
}

mn_status mn_ask_read(mn_ask *out, const mn_json *root, const mn_ask_limits *limits, bool chat) {
    bool special = true;
    const char *model = NULL;
    *out = (mn_ask){ .chat = chat };
    mn_status st = check_names(root);
    if (st == MN_OK) st = mn_json_opt_text(&model, root, "model");
    if (st == MN_OK) st = read_sampling(out, root);
    if (st == MN_OK) st = read_amounts(out, root, limits);
    if (st == MN_OK) st = read_flags(out, root);
    if (st == MN_OK) st = read_logprobs(out, root);
    if (st == MN_OK) st = read_stops(out, root);
    if (st == MN_OK) st = read_stop_ids(out, root);
    if (st == MN_OK) st = mn_json_opt_bool(&special, root, "add_special_tokens");
    if (st == MN_OK && !chat) st = mn_ask_state(out->state, root, "state");
    if (st != MN_OK) return st;
    const bool fresh = !out->state[0];
    st = chat ? read_messages(out, root, limits)
              : mn_ask_prompts(out, root, "prompt", limits, special && fresh, fresh);
    if (st == MN_OK) bound_amount(out, root, limits);
    return st == MN_OK ? check_together(out, root, limits) : st;
}

void mn_ask_free(mn_ask *ask) {
    for (int64_t i = 0; i < ask->n_prompts; i++) {
        mn_token_list_free(&ask->prompts[i].tokens);
        free(ask->prompts[i].text);
    }
    free(ask->prompts);
    for (int i = 0; i < ask->n_stops; i++) free(ask->stops[i]);
    json_decref(ask->tools);
    *ask = (mn_ask){ 0 };
}
