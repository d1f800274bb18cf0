/* made_text.c - stories and needles by turns, as bytes. */
#include "experiments/text/made_text.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/status.h"
#include "base/util.h"
#include "io/json.h"
#include "io/text.h"
#include "tasks/stories.h"
#include "tasks/task.h"

enum { SEED = 20, STORIES = 2, KINDS = 2, LEAST = 700 };    // LEAST: tokens of a short haystack

typedef struct made {
    mn_text text;
    int64_t *borders;
    int64_t documents, border_room;
} made;

static mn_status end_document(made *m) {
    if (m->documents + 2 > m->border_room) {
        const int64_t room = 2 * m->documents + 64;
        int64_t *more = realloc(m->borders, (size_t)room * sizeof *more);
        if (!more) return mn_fail(MN_ERR_MEMORY, "no memory for a text");
        m->borders = more;
        m->border_room = room;
        m->borders[0] = 0;
    }
    m->borders[++m->documents] = (int64_t)m->text.size;
    return MN_OK;
}

static mn_status add_stories(made *m, int64_t first) {
    const mn_stories_config how = mn_stories_default();
    mn_stories stories;
    char *text = NULL;
    size_t size = 0;
    mn_status st = mn_stories_tokens(&stories, &how, SEED, first, STORIES);
    if (st != MN_OK) return st;
    st = mn_stories_text(&text, &size, stories.tokens, stories.n_tokens);
    if (st == MN_OK) st = mn_text_add(&m->text, text, size);
    if (st == MN_OK) st = end_document(m);
    free(text);
    mn_stories_free(&stories);
    return st;
}

static mn_status add_needle(made *m, mn_task *task, int64_t index) {
    mn_task_text text = { 0 };
    mn_status st = mn_task_text_of(task, SEED, MN_SPLIT_TRAIN, index, &text);
    if (st == MN_OK) st = mn_text_add(&m->text, text.prompt, strlen(text.prompt));
    if (st == MN_OK) st = mn_text_add(&m->text, " ", 1);
    if (st == MN_OK) st = mn_text_add(&m->text, text.answers[0], strlen(text.answers[0]));
    if (st == MN_OK) st = mn_text_add(&m->text, "\n", 1);
    return st == MN_OK ? end_document(m) : st;
}

static mn_status open_needles(mn_task *tasks[KINDS], int64_t context) {
    mn_status st = MN_OK;
    for (int i = 0; st == MN_OK && i < KINDS; i++) {
        mn_json options = { .name = "data.made" };
        const int64_t budget = i == 0 ? LEAST : mn_max(context, (int64_t)LEAST);
        options.value = json_pack("{s:I, s:s}", "budget", (json_int_t)budget, "tokenizer", "bytes");
        st = mn_task_create(&tasks[i], "s-niah-1", &options);
        json_decref(options.value);
    }
    return st;
}

/* A token is a byte. */
static mn_status as_tokens(mn_corpus **out, const made *m) {
    int32_t *tokens = malloc(m->text.size * sizeof *tokens);
    if (!tokens) return mn_fail(MN_ERR_MEMORY, "no memory for a text");
    for (size_t i = 0; i < m->text.size; i++) tokens[i] = (unsigned char)m->text.bytes[i];
    const mn_status st = mn_corpus_from_tokens(out, tokens, (int64_t)m->text.size, m->borders,
                                               m->documents);
    free(tokens);
    return st;
}

mn_status mn_made_text(mn_corpus **out, int64_t bytes, int64_t context) {
    mn_task *tasks[KINDS] = { NULL };
    made m = { 0 };
    *out = NULL;
    mn_status st = open_needles(tasks, context);
    for (int64_t i = 0; st == MN_OK && (int64_t)m.text.size < bytes; i++) {
        st = add_stories(&m, STORIES * i);
        if (st == MN_OK) st = add_needle(&m, tasks[i % KINDS], i);
    }
    if (st == MN_OK) st = as_tokens(out, &m);
    for (int i = 0; i < KINDS; i++) mn_task_destroy(tasks[i]);
    mn_text_free(&m.text);
    free(m.borders);
    return st;
}
