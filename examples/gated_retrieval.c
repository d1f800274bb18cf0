/* gated_retrieval.c - look up only what the memory is unsure of.
 *
 * A model with beliefs reads stories and is asked at their end where things are: things of the
 * story, and as many that the story never named. An answer can be looked up in the story instead
 * of remembered, which is always right and costs a look-up. The questions that are looked up are
 * picked at random, by the entropy of the prediction, by the belief (variance of the read over its
 * mean over all queries), or by both ranks together: accuracy at equal cost.
 *
 *   mneme demo --out runs/demo
 *   cc gated_retrieval.c $(pkg-config --cflags --libs mneme) -lm -o gated_retrieval
 *   ./gated_retrieval runs/demo/bayes runs/demo/stories.txt */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <mneme.h>

enum { WORD = 32, OBJECTS = 64, LINE = 1 << 16, QUESTIONS = 4096, STORIES = 120, WAYS = 4 };

typedef struct question {
    double doubt[WAYS];      // random, entropy, belief, both
    int right;               // by memory
} question;

typedef struct reader {
    mn_model *model;
    mn_tokenizer *tokenizer;
    mn_session *session;
    char objects[OBJECTS][WORD];                  // of all stories
    char held[OBJECTS][WORD], places[OBJECTS][WORD];    // of this one, and where each is
    int n_objects, n_held;
    question *questions;
    int n;
} reader;

static mn_status feed(reader *r, const char *text) {
    int32_t *ids = NULL;
    int64_t count = 0;
    mn_status st = mn_tokenizer_ids(&ids, &count, r->tokenizer, text, strlen(text), false);
    if (st == MN_OK) st = mn_session_feed(r->session, ids, count);
    free(ids);
    return st;
}

/* The index of a word in a list, to which it is added. */
static int place_of(char (*list)[WORD], int *n, const char *word) {
    for (int i = 0; i < *n; i++) {
        if (strcmp(list[i], word) == 0) return i;
    }
    if (*n == OBJECTS) return OBJECTS - 1;
    snprintf(list[*n], WORD, "%s", word);
    return (*n)++;
}

/* Notes "puts the OBJECT in the PLACE" and "takes the OBJECT to the PLACE" of a story. */
static void look_up(reader *r, const char *story) {
    char object[WORD], place[WORD];
    r->n_held = 0;
    for (const char *at = story; (at = strchr(at, ' ')); at++) {
        if (sscanf(at, " puts the %31s in the %31[a-z]", object, place) != 2 &&
            sscanf(at, " takes the %31s to the %31[a-z]", object, place) != 2) {
            continue;
        }
        const int i = place_of(r->held, &r->n_held, object);
        snprintf(r->places[i], WORD, "%s", place);
        place_of(r->objects, &r->n_objects, object);
    }
}

static double entropy_of(const float *logits, int64_t n, int32_t *likeliest) {
    double sum = 0.0, mean = 0.0;
    *likeliest = 0;
    for (int64_t i = 1; i < n; i++) {
        if (logits[i] > logits[*likeliest]) *likeliest = (int32_t)i;
    }
    for (int64_t i = 0; i < n; i++) {
        const double z = (double)logits[i] - logits[*likeliest];
        sum += exp(z);
        mean += exp(z) * z;
    }
    return log(sum) - mean / sum;
}

/* Of the token fed last: the mean over layers. */
static double belief_of(const mn_session *session) {
    const int n = mn_session_beliefs(session);
    double sum = 0.0;
    for (int i = 0; i < n; i++) {
        const float *relative;
        const int64_t count = mn_session_belief(&relative, session, i);
        sum += count > 0 ? log((double)relative[count - 1]) / n : 0.0;
    }
    return sum;
}

/* Asks where `object` is; `place` is NULL when the story does not say. */
static mn_status ask(reader *r, const mn_snapshot *story, const char *object, const char *place) {
    char text[2 * WORD], *said = NULL;
    size_t size = 0;
    int32_t likeliest;
    question *q = &r->questions[r->n];
    snprintf(text, sizeof text, " where is the %s?", object);
    mn_status st = mn_session_restore(r->session, story);
    if (st == MN_OK) st = feed(r, text);
    if (st != MN_OK) return st;
    q->doubt[0] = (double)rand();
    q->doubt[1] = entropy_of(mn_session_logits(r->session), mn_model_vocabulary(r->model),
                             &likeliest);
    q->doubt[2] = belief_of(r->session);
    st = mn_tokenizer_decode(r->tokenizer, &likeliest, 1, false, &said, &size);
    const char *word = said && *said == ' ' ? said + 1 : said;
    q->right = place && word && strcmp(word, place) == 0;
    free(said);
    r->n++;
    return st;
}

static mn_status read_story(reader *r, const char *story) {
    mn_snapshot *snapshot = NULL;
    look_up(r, story);
    mn_status st = mn_session_reset(r->session);
    if (st == MN_OK) st = feed(r, "\n");
    if (st == MN_OK) st = feed(r, story);
    if (st == MN_OK) st = mn_session_snapshot(&snapshot, r->session);
    for (int i = 0; st == MN_OK && i < r->n_held && r->n < QUESTIONS; i++) {
        st = ask(r, snapshot, r->held[i], r->places[i]);
    }
    for (int i = 0, more = r->n_held; st == MN_OK && i < r->n_objects && more > 0; i++) {
        int held = 0;
        for (int k = 0; k < r->n_held; k++) held |= strcmp(r->held[k], r->objects[i]) == 0;
        if (held || r->n == QUESTIONS) continue;
        st = ask(r, snapshot, r->objects[i], NULL);
        more--;
    }
    mn_snapshot_destroy(snapshot);
    return st;
}

/* ---- accuracy at equal cost ------------------------------------------------------------------ */

static int way;

static int by_doubt(const void *a, const void *b) {
    const double x = ((const question *)a)->doubt[way], y = ((const question *)b)->doubt[way];
    return (x < y) - (x > y);
}

/* The fourth way: sums of the ranks that the second and the third give. */
static void add_ranks(reader *r) {
    for (int i = 0; i < r->n; i++) r->questions[i].doubt[3] = 0.0;
    for (way = 1; way <= 2; way++) {
        qsort(r->questions, (size_t)r->n, sizeof *r->questions, by_doubt);
        for (int i = 0; i < r->n; i++) r->questions[i].doubt[3] -= i;
    }
}

static void print_table(reader *r) {
    static const int shares[] = { 0, 10, 25, 50, 75, 100 };
    static const char *const names[WAYS] = { "random", "entropy", "belief", "both" };
    add_ranks(r);
    printf("%d questions, half of them about things never named\n\nlooked up", r->n);
    for (size_t k = 0; k < sizeof shares / sizeof *shares; k++) printf("%7d %%", shares[k]);
    for (way = 0; way < WAYS; way++) {
        printf("\n%-9s", names[way]);
        qsort(r->questions, (size_t)r->n, sizeof *r->questions, by_doubt);
        for (size_t k = 0; k < sizeof shares / sizeof *shares; k++) {
            const int looked = r->n * shares[k] / 100;
            int right = looked;
            for (int i = looked; i < r->n; i++) right += r->questions[i].right;
            printf("%9.1f", 100.0 * right / r->n);
        }
    }
    printf("\n\npercent right, by how many of the questions were looked up\n");
}

static mn_status run(reader *r, mn_context *context, const char *folder, FILE *stories) {
    const mn_session_options how = { .belief = true, .relative = true };
    static char line[LINE];
    mn_status st = mn_model_open(&r->model, folder);
    if (st == MN_OK) st = mn_tokenizer_load(&r->tokenizer, folder);
    if (st == MN_OK) st = mn_session_create(&r->session, context, r->model, &how);
    for (int i = 0; st == MN_OK && i < STORIES && fgets(line, sizeof line, stories); i++) {
        line[strcspn(line, "\n")] = '\0';
        st = read_story(r, line);
    }
    if (st == MN_OK && r->n > 0) print_table(r);
    return st;
}

int main(int argc, char **argv) {
    if (argc != 3) {
        fprintf(stderr, "usage: gated_retrieval MODEL STORIES, both of mneme demo\n");
        return 2;
    }
    FILE *stories = fopen(argv[2], "r");
    reader r = { .questions = calloc(QUESTIONS, sizeof *r.questions) };
    mn_context *context = NULL;
    mn_status st = stories && r.questions ? mn_context_create(&context, NULL) : MN_ERR_IO;
    if (st == MN_OK) st = run(&r, context, argv[1], stories);
    if (!stories) fprintf(stderr, "gated_retrieval: %s cannot be read\n", argv[2]);
    else if (st != MN_OK) fprintf(stderr, "gated_retrieval: %s\n", mn_last_error());
    mn_session_destroy(r.session);
    mn_tokenizer_destroy(r.tokenizer);
    mn_model_close(r.model);
    mn_context_destroy(context);
    if (stories) fclose(stories);
    free(r.questions);
    return st == MN_OK ? 0 : 1;
}
