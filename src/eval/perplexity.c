/* perplexity.c - windows of a text through a model, many at a time. */
#include "eval/perplexity.h"

#include <inttypes.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "base/checked.h"
#include "base/clock.h"
#include "base/status.h"
#include "base/util.h"
#include "model/pass.h"

enum { PASS_TOKENS = 4096, MOST_CHUNK = 2048, LEAST_CHUNK = 16 };
static const size_t default_budget = (size_t)512 << 20;

typedef struct measure {
    mn_context *context;
    mn_model *model;
    mn_tape *tape;
    const mn_corpus *corpus;
    int64_t length, rows, chunk;     // tokens of a window; windows and tokens of a pass
    int32_t *windows;                // (rows, length)
    int32_t *tokens, *targets;       // (rows, chunk) of one pass
    float *nll;
    double *sums;                    // (rows) of the windows in hand
} measure;

mn_status mn_perplexity_windows(int64_t *windows, const mn_corpus *corpus,
                                const mn_perplexity_options *options) {
    const int64_t all = mn_corpus_tokens(corpus), L = options->length;
    const int64_t n = options->max_tokens > 0 ? mn_min(all, options->max_tokens) : all;
    if (L < 2) {
        return mn_fail(MN_ERR_ARGUMENT, "a window of %" PRId64 " tokens foretells none; take 2 or "
                       "more", L);
    }
    *windows = n / L;
    if (*windows > 0) return MN_OK;
    return mn_fail(MN_ERR_ARGUMENT, "%" PRId64 " tokens%s hold no window of %" PRId64 "; take a "
                   "shorter length or more text", n, n < all ? " (the most asked for)" : "", L);
}

/* Tokens of a pass by what the budget holds, then windows side by side. */
static mn_status choose_sizes(measure *m, int64_t windows, size_t budget) {
    const int64_t read = m->length - 1, most = mn_min(read, MOST_CHUNK);
    mn_status st = mn_pass_tokens(&m->chunk, m->model, m->tape, 1, mn_min(LEAST_CHUNK, most), most,
                                  budget);
    m->rows = mn_max(1, mn_min(windows, PASS_TOKENS / m->chunk));
    for (; st == MN_OK && m->rows > 1; m->rows /= 2) {
        size_t bytes = 0;
        st = mn_pass_bytes(&bytes, m->model, m->tape, m->rows, m->chunk);
        if (bytes <= budget) break;
    }
    return st;
}

static mn_status make_room(measure *m) {
    int64_t window, pass;
    const bool fits = mn_mul_i64(&window, m->rows, m->length) &&
                      mn_mul_i64(&pass, m->rows, m->chunk) &&
                      window < (int64_t)(PTRDIFF_MAX / sizeof *m->windows);
    if (fits) {
        m->windows = malloc((size_t)window * sizeof *m->windows);
        m->tokens = malloc((size_t)pass * sizeof *m->tokens);
        m->targets = malloc((size_t)pass * sizeof *m->targets);
        m->nll = malloc((size_t)pass * sizeof *m->nll);
        m->sums = malloc((size_t)m->rows * sizeof *m->sums);
    }
    if (m->windows && m->tokens && m->targets && m->nll && m->sums) return MN_OK;
    return mn_fail(MN_ERR_MEMORY, "no memory for %" PRId64 " windows of %" PRId64 " tokens",
                   m->rows, m->length);
}

/* Tokens [at, at + T) of `rows` windows; adds what they cost to the windows' sums. */
static mn_status pass(measure *m, mn_model_state *state, int64_t rows, int64_t at, int64_t T) {
    for (int64_t b = 0; b < rows; b++) {
        const int32_t *window = m->windows + b * m->length + at;
        memcpy(m->tokens + b * T, window, (size_t)T * sizeof *window);
        memcpy(m->targets + b * T, window + 1, (size_t)T * sizeof *window);
    }
    const mn_model_input in = { .tokens = m->tokens, .B = rows, .T = T, .state = state,
                                .recompute = mn_pass_recompute(m->context) };
    const mn_loss_options how = { .nll = m->nll };
    double mean;
    int64_t counted;
    mn_tape_start(m->tape, MN_TAPE_FORWARD);
    mn_tensor *hidden = mn_model_hidden(m->model, m->tape, &in);
    mn_model_loss(m->model, m->tape, hidden, m->targets, how, &mean, &counted);
    const mn_status st = mn_tape_results(m->tape);
    if (st != MN_OK) return st;
    for (int64_t b = 0; b < rows; b++) {
        for (int64_t t = 0; t < T; t++) m->sums[b] += (double)m->nll[b * T + t];
    }
    return MN_OK;
}

/* Windows first .. first + rows - 1, each from nothing. */
static mn_status measure_rows(measure *m, int64_t first, int64_t rows) {
    mn_model_state state = { 0 };
    const int64_t read = m->length - 1;
    const bool pieces = m->chunk < read;
    mn_status st = mn_corpus_read(m->corpus, first * m->length, rows * m->length, m->windows);
    if (st == MN_OK && pieces) st = mn_model_state_create(&state, m->model);
    memset(m->sums, 0, (size_t)rows * sizeof *m->sums);
    for (int64_t at = 0; at < read && st == MN_OK; at += m->chunk) {
        st = pass(m, pieces ? &state : NULL, rows, at, mn_min(m->chunk, read - at));
    }
    mn_model_state_free(&state);
    return st;
}

static mn_status measure_all(measure *m, mn_perplexity *out, const mn_perplexity_options *options) {
    const double per_window = (double)(m->length - 1);
    double sum = 0.0, squares = 0.0;
    mn_status st = MN_OK;
    for (int64_t at = 0; at < out->windows && st == MN_OK; at += m->rows) {
        const int64_t rows = mn_min(m->rows, out->windows - at);
        st = measure_rows(m, at, rows);
        for (int64_t b = 0; b < rows && st == MN_OK; b++) {
            const double mean = m->sums[b] / per_window;
            sum += mean;
            squares += mean * mean;
        }
        const bool go_on = !options->progress || st != MN_OK ||
                           options->progress(options->context, (at + rows) * (m->length - 1),
                                             out->tokens);
        if (!go_on) st = mn_fail(MN_ERR_ARGUMENT, "stopped");
    }
    const double n = (double)out->windows;
    out->loss = sum / n;
    out->perplexity = exp(out->loss);
    out->loss_error = n > 1.0 ? sqrt(fmax(squares / n - out->loss * out->loss, 0.0) / (n - 1.0))
                              : NAN;
    return st;
}

mn_status mn_perplexity_measure(mn_perplexity *out, mn_context *context, mn_model *model,
                                const mn_corpus *corpus, const mn_perplexity_options *options) {
    measure m = { .context = context, .model = model, .corpus = corpus,
                  .length = options->length };
    const double start = mn_seconds();
    *out = (mn_perplexity){ .length = options->length };
    mn_status st = mn_perplexity_windows(&out->windows, corpus, options);
    out->tokens = out->windows * (options->length - 1);
    if (st == MN_OK) st = mn_model_place(model, context, mn_model_pass_dtype(model));
    if (st == MN_OK) st = mn_tape_create(&m.tape, context, mn_model_pass_dtype(model));
    if (st == MN_OK) {
        st = choose_sizes(&m, out->windows, options->budget ? options->budget : default_budget);
    }
    if (st == MN_OK) st = make_room(&m);
    if (st == MN_OK) st = measure_all(&m, out, options);
    out->seconds = mn_seconds() - start;
    free(m.windows);
    free(m.tokens);
    free(m.targets);
    free(m.nll);
    free(m.sums);
    mn_tape_destroy(m.tape);
    return st;
}
