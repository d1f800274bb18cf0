/* measure.c - how a model does on stories it has not seen: bits per token against the floor of
 * the source, and answers to questions, by distance and by number of updates. */
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "base/status.h"
#include "base/util.h"
#include "cli/demo/demo.h"
#include "tape/tape.h"

enum { STORIES_AT_ONCE = 16 };

/* Questions by tokens since the place was said, and by sentences that put or took the object. */
static const struct {
    const char *name;
    int64_t most;
} distances[MN_DEMO_DISTANCES] = {
    { "1-8", 8 }, { "9-16", 16 }, { "17-32", 32 }, { "33-64", 64 }, { "65+", INT64_MAX },
}, updates[MN_DEMO_UPDATES] = {
    { "1", 1 }, { "2", 2 }, { "3+", INT64_MAX },
};

static int distance_group(int64_t distance) {
    int i = 0;
    while (distance > distances[i].most) i++;
    return 1 + i;
}

static int updates_group(int64_t n) {
    int i = 0;
    while (n > updates[i].most) i++;
    return 1 + MN_DEMO_DISTANCES + i;
}

const char *mn_demo_group_name(int group) {
    if (group == 0) return "all";
    if (group <= MN_DEMO_DISTANCES) return distances[group - 1].name;
    return updates[group - 1 - MN_DEMO_DISTANCES].name;
}

const char *mn_demo_group_unit(int group) {
    if (group == 0) return "";
    return group <= MN_DEMO_DISTANCES ? "tokens ago" : "updates";
}

double mn_demo_share(const mn_demo_score *score) {
    return score->asked > 0 ? (double)score->right / (double)score->asked : NAN;
}

/* With one right and one wrong answer more, so that a perfect score is not certain. */
double mn_demo_share_error(const mn_demo_score *score) {
    if (score->asked == 0) return NAN;
    const double n = (double)score->asked + 2.0, p = ((double)score->right + 1.0) / n;
    return sqrt(p * (1.0 - p) / n);
}

double mn_demo_variance(const mn_demo_score *score) {
    return score->asked > 0 ? score->variance / (double)score->asked : NAN;
}

/* ---- a few stories at once ------------------------------------------------------------------- */

/* Stories [first, first + count), each behind the end of the one before. */
typedef struct batch {
    const mn_stories *held;
    int64_t first, count, n_tokens;
    int64_t starts[STORIES_AT_ONCE + 1];
    int32_t *tokens;
    int n_beliefs;
    float *variance;          // (n_beliefs, n_tokens)
} batch;

static mn_status make_batch(batch *b, const mn_stories *held, int64_t first, int n_beliefs) {
    *b = (batch){ .held = held, .first = first, .n_beliefs = n_beliefs };
    b->count = mn_min(STORIES_AT_ONCE, held->n_stories - first);
    const int64_t from = held->borders[first];
    b->n_tokens = held->borders[first + b->count] - from;
    b->tokens = malloc((size_t)b->n_tokens * sizeof *b->tokens);
    b->variance = malloc(((size_t)n_beliefs * (size_t)b->n_tokens + 1) * sizeof *b->variance);
    if (!b->tokens || !b->variance) {
        return mn_fail(MN_ERR_MEMORY, "no memory for %d stories", STORIES_AT_ONCE);
    }
    for (int64_t i = 0; i <= b->count; i++) b->starts[i] = held->borders[first + i] - from;
    for (int64_t i = 0; i < b->count; i++) {
        const int64_t start = b->starts[i], length = b->starts[i + 1] - start;
        b->tokens[start] = mn_stories_first(MN_STORIES_GLUE);
        memcpy(b->tokens + start + 1, held->tokens + from + start,
               (size_t)(length - 1) * sizeof *b->tokens);
    }
    return MN_OK;
}

/* Bits of a token under logits, and the likeliest one. */
static double bits_of(const float *logits, int64_t n, int32_t token, int32_t *likeliest) {
    int32_t top = 0;
    double sum = 0.0;
    for (int32_t i = 1; i < n; i++) {
        if (logits[i] > logits[top]) top = i;
    }
    for (int64_t i = 0; i < n; i++) sum += exp((double)logits[i] - logits[top]);
    *likeliest = top;
    return (log(sum) + logits[top] - logits[token]) / log(2.0);
}

/* ---- sums ------------------------------------------------------------------------------------ */

/* One number per story each, n of them so far. */
typedef struct sums {
    double *loss, *floor, *tokens;
    int64_t n;
} sums;

static void score(mn_demo_result *r, const mn_stories_question *q, bool right, double variance) {
    const int groups[] = { 0, distance_group(q->distance), updates_group(q->n_updates) };
    for (size_t i = 0; i < MN_COUNTOF(groups); i++) {
        mn_demo_score *s = &r->groups[groups[i]];
        s->asked++;
        s->right += right;
        s->variance += variance;
    }
}

/* Mean over layers of the variance read with token t; NAN without such layers. */
static double variance_at(const batch *b, int64_t t) {
    double sum = 0.0;
    for (int i = 0; i < b->n_beliefs; i++) sum += b->variance[i * b->n_tokens + t];
    return b->n_beliefs > 0 ? sum / b->n_beliefs : NAN;
}

/* `*question` is the first one of the batch, and after it that of the next. */
static void add_batch(mn_demo_result *r, sums *s, const batch *b, const mn_tensor *logits,
                      int64_t *question) {
    const mn_stories *held = b->held;
    const int64_t from = held->borders[b->first], vocab = logits->shape[3];
    for (int64_t i = 0; i < b->count; i++) {
        double loss = 0.0, least = 0.0;
        for (int64_t t = b->starts[i]; t < b->starts[i + 1]; t++) {
            const float *row = (const float *)logits->data + t * logits->stride[1];
            int32_t likeliest;
            loss += bits_of(row, vocab, held->tokens[from + t], &likeliest);
            least += held->bits[from + t];
            if (*question == held->n_questions) continue;
            const mn_stories_question *q = &held->questions[*question];
            if (q->at != from + t) continue;
            score(r, q, likeliest == q->answer, variance_at(b, t));
            ++*question;
        }
        s->loss[s->n] = loss;
        s->floor[s->n] = least;
        s->tokens[s->n++] = (double)(b->starts[i + 1] - b->starts[i]);
    }
}

/* sum x / sum w over stories, and its standard error. */
static void ratio(double *mean, double *error, const double *x, const double *w, int64_t n) {
    double sum_x = 0.0, sum_w = 0.0, square = 0.0;
    for (int64_t i = 0; i < n; i++) {
        sum_x += x[i];
        sum_w += w[i];
    }
    *mean = sum_x / sum_w;
    for (int64_t i = 0; i < n; i++) {
        const double d = x[i] - *mean * w[i];
        square += d * d;
    }
    *error = sqrt(square * (double)n / (double)mn_max(n - 1, 1)) / sum_w;
}

static void finish(mn_demo_result *r, sums *s) {
    double floor_error;
    ratio(&r->loss, &r->loss_error, s->loss, s->tokens, s->n);
    ratio(&r->floor, &floor_error, s->floor, s->tokens, s->n);
    for (int64_t i = 0; i < s->n; i++) s->loss[i] -= s->floor[i];
    ratio(&r->gap, &r->gap_error, s->loss, s->tokens, s->n);
}

/* ---- public ---------------------------------------------------------------------------------- */

static mn_status run_batch(mn_demo_model *m, mn_tape *tape, const batch *b, sums *s,
                           int64_t *question) {
    mn_model *model = mn_trainer_model(m->trainer);
    const mn_model_input in = { .tokens = b->tokens, .B = 1, .T = b->n_tokens, .starts = b->starts,
                                .n_sequences = b->count,
                                .variance = b->n_beliefs > 0 ? b->variance : NULL };
    mn_tape_start(tape, MN_TAPE_FORWARD);
    mn_tensor *hidden = mn_model_hidden(model, tape, &in);
    const mn_tensor *logits = mn_model_logits(model, tape, hidden);
    if (!logits) return mn_tape_status(tape);
    add_batch(&m->result, s, b, logits, question);
    return MN_OK;
}

mn_status mn_demo_measure(mn_demo_model *m, const mn_demo_data *data) {
    const int64_t n = data->held.n_stories;
    const int n_beliefs = mn_model_beliefs(mn_trainer_model(m->trainer));
    double *memory = calloc(3 * (size_t)n, sizeof *memory);
    if (!memory) return mn_fail(MN_ERR_MEMORY, "no memory to measure");
    sums s = { memory, memory + n, memory + 2 * n, 0 };
    mn_tape *tape = NULL;
    int64_t question = 0;
    m->result = (mn_demo_result){ 0 };
    mn_status st = mn_tape_create(&tape, m->context, MN_F32);
    for (int64_t first = 0; first < n && st == MN_OK; first += STORIES_AT_ONCE) {
        batch b;
        st = make_batch(&b, &data->held, first, n_beliefs);
        if (st == MN_OK) st = run_batch(m, tape, &b, &s, &question);
        free(b.tokens);
        free(b.variance);
    }
    if (st == MN_OK) finish(&m->result, &s);
    mn_tape_destroy(tape);
    free(memory);
    return st;
}
