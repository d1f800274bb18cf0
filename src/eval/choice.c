/* choice.c - multiple choice by scores of continuations.
 *
 * Tokens of a context may differ by what follows (a merge across the border), so what is read once
 * is the start that context and all choices have in common. */
#include "eval/choice.h"

#include <inttypes.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "base/clock.h"
#include "base/status.h"
#include "base/util.h"
#include "io/file.h"
#include "io/json.h"
#include "io/text.h"
#include "tokenizer/tokenizer.h"
#include "model/model.h"

static bool is_blank(char c) {
    return c == ' ' || c == '\n' || c == '\t' || c == '\r';
}

/* ---- reading --------------------------------------------------------------------------------- */

static void free_question(mn_question *q) {
    free(q->context);
    for (int64_t i = 0; i < q->n_choices && q->choices; i++) free(q->choices[i]);
    free(q->choices);
}

void mn_questions_free(mn_questions *questions) {
    for (int64_t i = 0; i < questions->count; i++) free_question(&questions->at[i]);
    free(questions->at);
    free(questions->name);
    *questions = (mn_questions){ 0 };
}

static mn_status copy_text(char **out, const mn_json *at) {
    const char *text;
    const mn_status st = mn_json_read_text(&text, at);
    if (st != MN_OK) return st;
    *out = strdup(text);
    return *out ? MN_OK : mn_fail(MN_ERR_MEMORY, "no memory for questions");
}

/* A whole number, or one as text. */
static mn_status read_answer(int64_t *out, const mn_json *at, int64_t n_choices) {
    mn_status st = MN_OK;
    if (json_is_string(at->value)) {
        const char *text = json_string_value(at->value);
        char *end;
        *out = strtoll(text, &end, 10);
        if (end == text || *end) st = mn_json_fail(at, "\"%s\" is no whole number", text);
    } else {
        st = mn_json_read_i64(out, at);
    }
    if (st == MN_OK && (*out < 0 || *out >= n_choices)) {
        st = mn_json_fail(at, "is %" PRId64 ", and there are choices 0 to %" PRId64, *out,
                          n_choices - 1);
    }
    return st;
}

static mn_status read_question(mn_question *q, const mn_json *root) {
    const mn_json plain = mn_json_member(root, "context");
    const bool swag = !mn_json_given(&plain);
    const mn_json context = swag ? mn_json_member(root, "ctx") : plain;
    const mn_json choices = mn_json_member(root, swag ? "endings" : "choices");
    const mn_json answer = mn_json_member(root, swag ? "label" : "answer");
    if (swag && !mn_json_given(&context)) {
        return mn_json_fail(root, "has neither \"context\", \"choices\", \"answer\" nor \"ctx\", "
                            "\"endings\", \"label\"");
    }
    mn_status st = copy_text(&q->context, &context);
    if (st == MN_OK) st = mn_json_expect_list(&choices);
    const int64_t n = mn_json_count(&choices);
    if (st == MN_OK && n < 2) st = mn_json_fail(&choices, "needs at least two choices");
    if (st == MN_OK && !(q->choices = calloc((size_t)n, sizeof *q->choices))) {
        st = mn_fail(MN_ERR_MEMORY, "no memory for questions");
    }
    for (; st == MN_OK && q->n_choices < n; q->n_choices++) {
        const mn_json item = mn_json_item(&choices, q->n_choices);
        st = copy_text(&q->choices[q->n_choices], &item);
        if (st == MN_OK && !*q->choices[q->n_choices]) st = mn_json_fail(&item, "is empty");
    }
    return st == MN_OK ? read_answer(&q->answer, &answer, n) : st;
}

static mn_status add_line(mn_questions *out, const char *line, size_t size, int64_t number) {
    if (out->count == out->capacity) {
        const int64_t capacity = out->capacity ? 2 * out->capacity : 64;
        mn_question *grown = realloc(out->at, (size_t)capacity * sizeof *grown);
        if (!grown) return mn_fail(MN_ERR_MEMORY, "no memory for %" PRId64 " questions", capacity);
        out->at = grown;
        out->capacity = capacity;
    }
    char name[512];
    snprintf(name, sizeof name, "%.400s line %" PRId64, out->name, number);
    mn_json root = { 0 };
    mn_question *q = &out->at[out->count++];
    *q = (mn_question){ .line = number };
    mn_status st = mn_json_parse(&root, line, size, name, MN_JSON_PYTHON);
    if (st == MN_OK) st = mn_json_expect_object(&root);
    if (st == MN_OK) st = read_question(q, &root);
    mn_json_free(&root);
    return st;
}

mn_status mn_questions_parse(mn_questions *out, const char *bytes, size_t size, const char *name) {
    *out = (mn_questions){ .name = strdup(name) };
    mn_status st = out->name ? MN_OK : mn_fail(MN_ERR_MEMORY, "no memory for questions");
    int64_t line = 0;
    for (size_t at = 0; at < size && st == MN_OK;) {
        const char *end = memchr(bytes + at, '\n', size - at);
        const size_t n = end ? (size_t)(end - (bytes + at)) : size - at;
        size_t blank = 0;
        while (blank < n && is_blank(bytes[at + blank])) blank++;
        line++;
        if (blank < n) st = add_line(out, bytes + at, n, line);
        at += n + 1;
    }
    if (st == MN_OK && out->count == 0) st = mn_fail(MN_ERR_FORMAT, "%s holds no question", name);
    if (st != MN_OK) mn_questions_free(out);
    return st;
}

mn_status mn_questions_load(mn_questions *out, const char *path) {
    mn_file file = { 0 };
    *out = (mn_questions){ 0 };
    mn_status st = mn_file_map(&file, path);
    if (st == MN_OK) st = mn_questions_parse(out, (const char *)file.bytes, file.size, path);
    mn_file_unmap(&file);
    return st;
}

/* ---- measuring ------------------------------------------------------------------------------- */

/* One question in tokens. */
typedef struct encoded {
    mn_token_list context, *choices;    // a choice: context and choice together
    int64_t n_choices, common;          // tokens that all begin with
} encoded;

static void free_encoded(encoded *e) {
    mn_token_list_free(&e->context);
    for (int64_t i = 0; i < e->n_choices && e->choices; i++) mn_token_list_free(&e->choices[i]);
    free(e->choices);
    *e = (encoded){ 0 };
}

static mn_status encode_choice(mn_token_list *out, const mn_tokenizer *tokenizer,
                               const char *context, const char *choice) {
    mn_text text = { 0 };
    const size_t n = strlen(context);
    const bool gap = n > 0 && !is_blank(context[n - 1]) && !is_blank(choice[0]);
    mn_status st = mn_text_add(&text, context, n);
    if (st == MN_OK && gap) st = mn_text_add(&text, " ", 1);
    if (st == MN_OK) st = mn_text_add(&text, choice, strlen(choice));
    if (st == MN_OK) st = mn_tokenizer_encode(tokenizer, text.bytes, text.size, true, out);
    mn_text_free(&text);
    return st;
}

/* Puts the token that begins a text in front where a context has none at all: something has to
 * foretell the first token of a choice. */
static mn_status begin(encoded *e, const mn_tokenizer *tokenizer, const mn_question *q) {
    if (e->context.count > 0) return MN_OK;
    int32_t token = mn_tokenizer_bos(tokenizer);
    if (token < 0) token = mn_tokenizer_eos(tokenizer);
    if (token < 0) {
        return mn_fail(MN_ERR_ARGUMENT, "the context of line %" PRId64 " is empty, and the "
                       "tokenizer names no token that begins a text", q->line);
    }
    mn_status st = mn_token_list_add(&e->context, token);
    for (int64_t i = 0; i < e->n_choices && st == MN_OK; i++) {
        mn_token_list *list = &e->choices[i];
        st = mn_token_list_add(list, token);
        memmove(list->ids + 1, list->ids, (size_t)(list->count - 1) * sizeof *list->ids);
        list->ids[0] = token;
    }
    return st;
}

static mn_status encode(encoded *e, const mn_tokenizer *tokenizer, const mn_question *q) {
    *e = (encoded){ .n_choices = q->n_choices };
    e->choices = calloc((size_t)q->n_choices, sizeof *e->choices);
    mn_status st = e->choices ? MN_OK : mn_fail(MN_ERR_MEMORY, "no memory for a question");
    if (st == MN_OK) {
        st = mn_tokenizer_encode(tokenizer, q->context, strlen(q->context), true, &e->context);
    }
    for (int64_t i = 0; i < q->n_choices && st == MN_OK; i++) {
        st = encode_choice(&e->choices[i], tokenizer, q->context, q->choices[i]);
    }
    if (st == MN_OK) st = begin(e, tokenizer, q);
    e->common = e->context.count;
    for (int64_t i = 0; i < q->n_choices && st == MN_OK; i++) {
        const mn_token_list *list = &e->choices[i];
        int64_t same = 0;
        while (same < e->common && same < list->count && list->ids[same] == e->context.ids[same]) {
            same++;
        }
        e->common = same;
        if (list->count > e->context.count) continue;
        st = mn_fail(MN_ERR_ARGUMENT, "choice %" PRId64 " of line %" PRId64 " adds no token to its "
                     "context", i, q->line);
    }
    return st;
}

/* Score of a choice, from a session that has read what is common. */
static mn_status score(double *out, mn_session *session, const encoded *e, int64_t choice) {
    const mn_token_list *list = &e->choices[choice];
    const int64_t rest = list->count - e->common;
    double *each = malloc((size_t)rest * sizeof *each);
    if (!each) return mn_fail(MN_ERR_MEMORY, "no memory for %" PRId64 " scores", rest);
    const mn_status st = mn_session_score(session, list->ids + e->common, rest, each);
    *out = 0.0;
    for (int64_t t = e->context.count - e->common; t < rest && st == MN_OK; t++) *out += each[t];
    free(each);
    return st;
}

/* Which choice the model takes, by score and by score per byte. */
static mn_status answer(int64_t picked[2], int64_t *tokens, mn_session *session, const encoded *e,
                        const mn_question *q) {
    mn_snapshot *snapshot = NULL;
    double best[2] = { -INFINITY, -INFINITY };
    picked[0] = picked[1] = 0;
    *tokens += e->common;
    mn_status st = mn_session_reset(session);
    if (st == MN_OK) st = mn_session_feed(session, e->context.ids, e->common);
    if (st == MN_OK) st = mn_session_snapshot(&snapshot, session);
    for (int64_t i = 0; i < q->n_choices && st == MN_OK; i++) {
        double sum = 0.0;
        if (i > 0) st = mn_session_restore(session, snapshot);
        if (st == MN_OK) st = score(&sum, session, e, i);
        const double values[2] = { sum, sum / (double)strlen(q->choices[i]) };
        for (int way = 0; way < 2 && st == MN_OK; way++) {
            if (values[way] <= best[way]) continue;
            best[way] = values[way];
            picked[way] = i;
        }
        *tokens += e->choices[i].count - e->common;
    }
    mn_snapshot_destroy(snapshot);
    return st;
}

static double standard_error(double p, int64_t n) {
    return n > 1 ? sqrt(p * (1.0 - p) / (double)(n - 1)) : NAN;
}

static mn_status measure(mn_choice_result *out, mn_session *session, const mn_tokenizer *tokenizer,
                         const mn_questions *questions, const mn_choice_options *options) {
    int64_t right[2] = { 0, 0 };
    mn_status st = MN_OK;
    for (int64_t i = 0; i < out->questions && st == MN_OK; i++) {
        const mn_question *q = &questions->at[i];
        encoded e;
        int64_t picked[2] = { -1, -1 };
        st = encode(&e, tokenizer, q);
        if (st == MN_OK) st = answer(picked, &out->tokens, session, &e, q);
        for (int way = 0; way < 2; way++) right[way] += picked[way] == q->answer;
        out->chance += 1.0 / (double)q->n_choices / (double)out->questions;
        free_encoded(&e);
        if (st == MN_OK && options->progress &&
            !options->progress(options->context, i + 1, out->questions)) {
            st = mn_fail(MN_ERR_ARGUMENT, "stopped");
        }
    }
    out->accuracy = (double)right[0] / (double)out->questions;
    out->normalised = (double)right[1] / (double)out->questions;
    out->accuracy_error = standard_error(out->accuracy, out->questions);
    out->normalised_error = standard_error(out->normalised, out->questions);
    return st;
}

mn_status mn_choice_measure(mn_choice_result *out, mn_context *context, mn_model *model,
                            const mn_tokenizer *tokenizer, const mn_questions *questions,
                            const mn_choice_options *options) {
    const int64_t most = options->max_questions;
    const double start = mn_seconds();
    *out = (mn_choice_result){ .questions = questions->count };
    if (most > 0) out->questions = mn_min(most, questions->count);
    mn_session *session = NULL;
    const bool bf16 = mn_model_pass_dtype(model) == MN_BF16;
    const mn_session_options how = { .dtype = bf16 ? MN_BF16 : MN_F32 };
    mn_status st = mn_session_create(&session, context, model, &how);
    if (st == MN_OK) st = measure(out, session, tokenizer, questions, options);
    mn_session_destroy(session);
    out->seconds = mn_seconds() - start;
    return st;
}
