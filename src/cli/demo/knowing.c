/* knowing.c - questions that cannot be answered yet: stories held out are broken off behind some
 * sentence, and asked where a thing is that they named, and where one is that they did not. The
 * entropy of the prediction and the belief (the posterior statistic of mn_posterior_doubt,
 * mean of layers and heads) are to tell the one from the other. */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "base/status.h"
#include "base/util.h"
#include "cli/demo/demo.h"
#include "eval/knowing.h"
#include "io/json_write.h"

enum { STORIES = 200, MOST = 1024, SHOWN = 3 };

typedef struct asker {
    mn_demo_knowing *out;
    const mn_stories *held;
    mn_model *model;
    mn_tape *tape;
    mn_posterior *posterior;
    mn_doubts doubts;
    uint8_t unknown[2 * STORIES + 2 * SHOWN];
    int32_t tokens[MOST], targets[MOST];
    int64_t n;                   // tokens of the story so far, behind the end of the one before
} asker;

static int32_t word(const char *text) {
    return mn_stories_find(text, strlen(text));
}

/* Takes the first `sentences` of a story, fewer where it is shorter. */
static void begin_story(asker *a, int64_t story, int64_t sentences) {
    const int32_t *at = a->held->tokens + a->held->borders[story], dot = word(".");
    const int64_t all = a->held->borders[story + 1] - a->held->borders[story] - 1;
    a->tokens[0] = mn_stories_first(MN_STORIES_GLUE);
    a->n = 1;
    for (int64_t i = 0; i < all && i + 10 < MOST && sentences > 0; i++) {
        a->tokens[a->n++] = at[i];
        sentences -= at[i] == dot;
    }
}

static bool is_named(const asker *a, int32_t object) {
    for (int64_t i = 0; i < a->n; i++) {
        if (a->tokens[i] == object) return true;
    }
    return false;
}

/* The k-th object from `first` on, in a circle, that the story named or did not; -1: none. */
static int32_t pick_object(const asker *a, bool named, int64_t first, int64_t k) {
    const int64_t n = mn_stories_count(MN_STORIES_OBJECT);
    for (int64_t i = 0; i < n; i++) {
        const int32_t object = mn_stories_first(MN_STORIES_OBJECT) + (int32_t)((first + i) % n);
        if (is_named(a, object) == named && k-- == 0) return object;
    }
    return -1;
}

/* "where is the OBJECT ?" behind the story, of which any answer may be asked. */
static mn_status ask(asker *a, int32_t object) {
    const int32_t question[] = { word("where"), word("is"), word("the"), object, word("?") };
    const int64_t n = a->n + (int64_t)MN_COUNTOF(question), at = a->doubts.n;
    int64_t starts[2] = { 0, n };
    memcpy(a->tokens + a->n, question, sizeof question);
    for (int64_t t = 0; t < n; t++) a->targets[t] = t + 1 == n ? 0 : -100;
    const mn_token_batch batch = { .rows = 1, .length = n, .tokens = a->tokens,
                                   .targets = a->targets, .starts = starts, .n_sequences = 1 };
    a->unknown[at] = !is_named(a, object);
    a->tokens[a->n + 3] = object;
    return mn_doubts_add(&a->doubts, a->model, a->tape, a->posterior, &batch, NULL);
}

/* Each story asks about a thing it named and about one it did not. */
static mn_status ask_stories(asker *a) {
    const int64_t stories = mn_min(a->held->n_stories, STORIES);
    mn_status st = MN_OK;
    for (int64_t i = 0; st == MN_OK && i < stories; i++) {
        begin_story(a, i, 2 + 5 * i % 17);
        const int32_t named = pick_object(a, true, i, 0), other = pick_object(a, false, i, 0);
        if (named < 0 || other < 0) continue;
        st = ask(a, named);
        if (st == MN_OK) st = ask(a, other);
    }
    return st;
}

/* ---- judging --------------------------------------------------------------------------------- */

/* Entropy and belief of answer i; models without beliefs have the entropy twice. */
static void row_of(float row[2], const asker *a, int64_t i) {
    const mn_doubts *d = &a->doubts;
    row[0] = row[1] = d->entropy[i];
    if (d->features == 0) return;
    const mn_statistic doubt = mn_posterior_doubt(a->posterior, 0);
    row[1] = d->value[i * d->features + mn_posterior_overall(a->posterior, doubt)];
}

/* Fits on the first half of the questions and judges the second. */
static mn_status judge(asker *a, mn_logistic *fit) {
    const int64_t n = a->doubts.n, half = n / 2;
    float *rows = malloc((size_t)(2 * n + 1) * sizeof *rows);
    float *column = malloc((size_t)(n + 1) * sizeof *column);
    mn_status st = rows && column ? MN_OK : mn_fail(MN_ERR_MEMORY, "no memory for questions");
    for (int64_t i = 0; st == MN_OK && i < n; i++) row_of(rows + 2 * i, a, i);
    if (st == MN_OK) st = mn_logistic_fit(fit, rows, 2, a->unknown, half, 1e-4);
    for (int way = 0; st == MN_OK && way < 3; way++) {
        for (int64_t i = half; i < n; i++) {
            column[i] = way < 2 ? rows[2 * i + way] : (float)mn_logistic_doubt(fit, rows + 2 * i);
        }
        a->out->auroc[way] = mn_auroc(column + half, a->unknown + half, n - half);
    }
    a->out->asked = n - half;
    a->out->believes = a->doubts.features > 0;
    free(rows);
    free(column);
    return st;
}

/* Questions in the middle of one more story, for people. */
static mn_status show(asker *a, const mn_logistic *fit, int64_t story) {
    mn_demo_knowing *out = a->out;
    mn_status st = MN_OK;
    begin_story(a, story, 3);
    out->n_story = mn_min(a->n - 1, (int64_t)MN_COUNTOF(out->story));
    memcpy(out->story, a->tokens + 1, (size_t)out->n_story * sizeof *out->story);
    for (int i = 0; st == MN_OK && i < 2 * SHOWN; i++) {
        const int32_t object = pick_object(a, i % 2 == 0, story, i / 2);
        float row[2];
        if (object < 0) continue;
        st = ask(a, object);
        if (st != MN_OK) break;
        row_of(row, a, a->doubts.n - 1);
        out->questions[out->n_questions++] = (mn_demo_doubt){
            object, a->unknown[a->doubts.n - 1], mn_logistic_doubt(fit, row) };
    }
    return st;
}

mn_status mn_demo_knowing_make(mn_demo *demo) {
    const mn_demo_model *m = demo->sample.model;
    mn_logistic fit;
    asker *a = calloc(1, sizeof *a);
    if (!a) return mn_fail(MN_ERR_MEMORY, "no memory for questions");
    demo->knowing = (mn_demo_knowing){ .model = m };
    a->out = &demo->knowing;
    a->held = &demo->data.held;
    a->model = mn_trainer_model(m->trainer);
    mn_status st = mn_posterior_create(&a->posterior, a->model);
    if (st == MN_OK) st = mn_tape_create(&a->tape, m->context, MN_F32);
    if (st == MN_OK) st = ask_stories(a);
    if (st == MN_OK) st = judge(a, &fit);
    if (st == MN_OK) st = show(a, &fit, mn_min(STORIES, a->held->n_stories - 1));
    mn_doubts_free(&a->doubts);
    mn_tape_destroy(a->tape);
    mn_posterior_destroy(a->posterior);
    free(a);
    return st;
}

/* ---- telling --------------------------------------------------------------------------------- */

json_t *mn_demo_knowing_json(const mn_demo_knowing *k) {
    json_t *list = json_array();
    for (int i = 0; i < k->n_questions; i++) {
        const mn_demo_doubt *q = &k->questions[i];
        json_array_append_new(list, json_pack("{s:s, s:b, s:f}", "about",
                                              mn_stories_word(q->object), "unknown", q->unknown,
                                              "doubt", q->doubt));
    }
    return json_pack("{s:s, s:I, s:o, s:o, s:o, s:o}", "model", k->model->name, "asked",
                     (json_int_t)k->asked, "auroc_entropy",
                     mn_json_real(k->auroc[0]), "auroc_belief", mn_json_real(k->auroc[1]),
                     "auroc_both", mn_json_real(k->auroc[2]), "questions", list);
}

void mn_demo_knowing_print(const mn_demo_knowing *k) {
    const bool colours = isatty(STDOUT_FILENO) && !getenv("NO_COLOR");
    printf("\nquestions that cannot be answered yet, told from others by %s\n"
           "  AUROC %.3f by entropy", k->model->name, k->auroc[0]);
    if (k->believes) printf(", %.3f by belief, %.3f by both", k->auroc[1], k->auroc[2]);
    printf(" (%lld questions)\n", (long long)k->asked);
    (void)mn_demo_words(k->story, k->n_story);
    for (int i = 0; i < k->n_questions; i++) {
        const mn_demo_doubt *q = &k->questions[i];
        const bool doubts = q->doubt > 0.5;
        printf("    %swhere is the %s?%s%*s doubt %.2f%s\n", colours && doubts ? "\033[41;97m" : "",
               mn_stories_word(q->object), colours && doubts ? "\033[0m" : "",
               (int)mn_max(1, 12 - (int64_t)strlen(mn_stories_word(q->object))), "", q->doubt,
               doubts == q->unknown ? "" : "  (mistaken)");
    }
}
