/* look_alignment.c - the alignment diagnostic (align.c) of a model trained on a needle task, with
 * that task's own test prompts. Options: top (16), prompts (6). */
#include <stdlib.h>
#include <string.h>

#include "base/status.h"
#include "base/util.h"
#include "experiments/looks/look.h"

enum { MOST_PROMPTS = 256 };

typedef struct options {
    int64_t top, prompts;
} options;

static mn_status read_options(options *o, const mn_json *at) {
    static const char *const keys[] = { "top", "prompts" };
    *o = (options){ .top = 16, .prompts = 6 };
    mn_status st = mn_json_expect_object(at);
    if (st == MN_OK) st = mn_json_unknown_key(at, keys, MN_COUNTOF(keys));
    if (st == MN_OK) st = mn_json_opt_i64(&o->top, at, "top");
    if (st == MN_OK) st = mn_json_opt_i64(&o->prompts, at, "prompts");
    if (st != MN_OK) return st;
    const bool fine = o->top >= 1 && o->prompts >= 1 && o->prompts <= MOST_PROMPTS;
    return fine ? MN_OK : mn_json_fail(at, "top counts from 1, prompts from 1 to %d", MOST_PROMPTS);
}

static mn_status check(const mn_json *at) {
    options o;
    return read_options(&o, at);
}

/* Where the last `piece` before byte `end` of a text begins, or `end`. */
static int64_t last_before(const char *text, int64_t end, const char *piece) {
    const int64_t size = (int64_t)strlen(piece);
    for (int64_t i = end - size; i >= 0; i--) {
        if (strncmp(text + i, piece, (size_t)size) == 0) return i;
    }
    return end;
}

/* The prompt of example `index`, without its answer. In bytes the whole sentence of the needle is
 * found, with other tokens its answer alone. */
static mn_status take_prompt(mn_needle *out, mn_task_run *task, int64_t index, int32_t *targets) {
    mn_task_text text = { 0 };
    const int64_t most = mn_task_run_longest(task);
    int64_t length, answer = 0;
    *out = (mn_needle){ .tokens = { .ids = calloc((size_t)most, sizeof(int32_t)),
                                    .capacity = most } };
    if (!out->tokens.ids) return mn_fail(MN_ERR_MEMORY, "no memory for a prompt");
    const mn_status st = mn_task_run_example(task, index, out->tokens.ids, targets, &length, &text);
    if (st != MN_OK) return st;
    if (text.n_answers != 1) {
        return mn_fail(MN_ERR_ARGUMENT, "the diagnostic needs a task with one needle in a text");
    }
    for (int64_t i = 0; i < length; i++) answer += targets[i] >= 0;
    out->tokens.count = mn_min(text.prompt_tokens, length);
    const bool bytes = text.prompt_tokens == (int64_t)strlen(text.prompt);
    const int64_t at = text.answer_at[0];
    out->first = bytes ? last_before(text.prompt, at, "One of the special") : text.answer_token[0];
    out->end = mn_min(text.answer_token[0] + answer, out->tokens.count);
    out->asked = bytes ? last_before(text.prompt, text.prompt_tokens, "\n") : text.prompt_tokens;
    return MN_OK;
}

static mn_status look(json_t *result, const mn_look_at *at, const mn_json *given) {
    options o;
    mn_status st = read_options(&o, given);
    if (st != MN_OK) return st;
    mn_needle *needles = calloc((size_t)o.prompts, sizeof *needles);
    int32_t *targets = calloc((size_t)mn_task_run_longest(at->task), sizeof *targets);
    if (!needles || !targets) st = mn_fail(MN_ERR_MEMORY, "no memory for prompts");
    for (int64_t i = 0; st == MN_OK && i < o.prompts; i++) {
        st = take_prompt(&needles[i], at->task, i, targets);
    }
    if (st == MN_OK) st = mn_align(result, at->context, at->model, needles, o.prompts, o.top);
    for (int64_t i = 0; needles && i < o.prompts; i++) mn_token_list_free(&needles[i].tokens);
    free(needles);
    free(targets);
    return st;
}

const mn_look mn_look_alignment = { check, look };
