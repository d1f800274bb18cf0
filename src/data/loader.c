/* loader.c - batches of tokens for training, as a function of (seed, step) and nothing else.
 *
 * Random windows: row r of step s starts at floor(bits(seed, s, r) * (n - T) / 2^64).
 *
 * Documents: epoch e has the order shuffle(seed, e); the places of its documents in a row are
 * numbered, and step s of the epoch takes places [s B T, (s + 1) B T). Where a document lies in
 * that row of places is found from the sums at every 64th document and a walk from there. */
#include "data/loader.h"

#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

#include "base/checked.h"
#include "base/rng.h"
#include "base/status.h"
#include "base/util.h"
#include "data/shuffle.h"

enum { STRIDE = 64, NO_TARGET = -100 };

/* What a seed is used for, so that uses do not meet in the same random numbers. */
enum { USE_WINDOWS = 1, USE_ORDER = 2 };

struct mn_loader {
    const mn_corpus *corpus;    // NULL: batches come from `source`
    mn_source source;
    mn_loader_options options;
    int64_t batch_tokens;    // rows * length
    int64_t places;          // of an epoch
    int64_t epoch_steps;
    uint64_t window_seed, order_seed;
    int32_t *row;            // length + 1 tokens
    int64_t epoch;           // whose order `sums` describes; -1: none yet
    mn_shuffle order;
    int64_t *sums;           // places in front of every 64th document of the epoch, and of its end
    int64_t n_sums;
};

/* ---- documents ------------------------------------------------------------------------------- */

static int64_t document_at(const mn_loader *loader, int64_t place) {
    return loader->options.sequential ? place : mn_shuffle_at(&loader->order, place);
}

static int64_t places_of(const mn_corpus *corpus, int64_t document) {
    return mn_corpus_document_start(corpus, document + 1) -
           mn_corpus_document_start(corpus, document) - 1;
}

/* Sets up the order of an epoch. */
static void open_epoch(mn_loader *loader, int64_t epoch) {
    const int64_t n = mn_corpus_documents(loader->corpus);
    if (loader->epoch == epoch || (loader->options.sequential && loader->epoch >= 0)) return;
    loader->order = mn_shuffle_make(n, loader->order_seed, (uint64_t)epoch);
    int64_t sum = 0;
    for (int64_t i = 0; i < n; i++) {
        if (i % STRIDE == 0) loader->sums[i / STRIDE] = sum;
        sum += places_of(loader->corpus, document_at(loader, i));
    }
    loader->sums[loader->n_sums - 1] = sum;
    loader->epoch = epoch;
}

/* A place of an epoch: the n-th document in its order, and how far inside it. */
typedef struct spot {
    int64_t nth, document, inside;
} spot;

static spot find_place(const mn_loader *loader, int64_t place) {
    int64_t low = 0, high = loader->n_sums - 2;
    while (low < high) {
        const int64_t middle = low + (high - low + 1) / 2;
        if (loader->sums[middle] <= place) low = middle;
        else high = middle - 1;
    }
    spot at = { .nth = low * STRIDE, .inside = place - loader->sums[low] };
    for (;; at.nth++) {
        at.document = document_at(loader, at.nth);
        const int64_t places = places_of(loader->corpus, at.document);
        if (at.inside < places) return at;
        at.inside -= places;
    }
}

static void move_on(spot *at, const mn_loader *loader, int64_t count) {
    at->inside += count;
    while (at->inside >= places_of(loader->corpus, at->document)) {
        if (at->nth + 1 >= mn_corpus_documents(loader->corpus)) return;
        at->document = document_at(loader, ++at->nth);
        at->inside = 0;
    }
}

/* Reads `count` tokens and the one behind them into tokens and targets. */
static mn_status take(const mn_loader *loader, int64_t at, int64_t count, int32_t *tokens,
                      int32_t *targets) {
    const mn_status st = mn_corpus_read(loader->corpus, at, count + 1, loader->row);
    if (st != MN_OK) return st;
    memcpy(tokens, loader->row, (size_t)count * sizeof *tokens);
    memcpy(targets, loader->row + 1, (size_t)count * sizeof *targets);
    return MN_OK;
}

static void blank(mn_token_batch *batch, int64_t from, int64_t to) {
    for (int64_t i = from; i < to; i++) {
        batch->tokens[i] = 0;
        batch->targets[i] = NO_TARGET;
    }
}

static mn_status fill_documents(mn_token_batch *batch, mn_loader *loader, int64_t step) {
    const int64_t n = loader->batch_tokens, length = loader->options.length;
    open_epoch(loader, step / loader->epoch_steps);
    const int64_t first = step % loader->epoch_steps * n, used = mn_min(n, loader->places - first);
    spot at = find_place(loader, first);
    batch->n_sequences = 0;
    for (int64_t i = 0; i < used;) {
        const int64_t left = places_of(loader->corpus, at.document) - at.inside;
        const int64_t count = mn_min(mn_min(left, length - i % length), used - i);
        const int64_t begin = mn_corpus_document_start(loader->corpus, at.document) + at.inside;
        const mn_status st = take(loader, begin, count, batch->tokens + i, batch->targets + i);
        if (st != MN_OK) return st;
        batch->starts[batch->n_sequences++] = i;
        i += count;
        move_on(&at, loader, count);
    }
    for (int64_t i = used; i < n; i = (i / length + 1) * length) {
        batch->starts[batch->n_sequences++] = i;
    }
    blank(batch, used, n);
    batch->starts[batch->n_sequences] = n;
    return MN_OK;
}

/* ---- windows --------------------------------------------------------------------------------- */

/* Where a row begins in the corpus; -1 when the epoch is over. */
static int64_t window_start(const mn_loader *loader, int64_t step, int64_t row) {
    const int64_t length = loader->options.length;
    if (loader->options.sequential) {
        const int64_t window = step % loader->epoch_steps * loader->options.rows + row;
        return window < loader->places / length ? window * length : -1;
    }
    const uint64_t choices = (uint64_t)(mn_corpus_tokens(loader->corpus) - length);
    const uint64_t bits = mn_rng_bits(loader->window_seed, (uint64_t)step, (uint64_t)row);
    return (int64_t)(((unsigned __int128)bits * choices) >> 64);
}

static mn_status fill_windows(mn_token_batch *batch, const mn_loader *loader, int64_t step) {
    const int64_t length = loader->options.length;
    for (int64_t row = 0; row < loader->options.rows; row++) {
        const int64_t start = window_start(loader, step, row), i = row * length;
        mn_status st = MN_OK;
        if (start < 0) blank(batch, i, i + length);
        else st = take(loader, start, length, batch->tokens + i, batch->targets + i);
        if (st != MN_OK) return st;
        batch->starts[row] = i;
    }
    batch->n_sequences = loader->options.rows;
    batch->starts[batch->n_sequences] = loader->batch_tokens;
    return MN_OK;
}

/* ---- public ---------------------------------------------------------------------------------- */

static mn_status count_places(mn_loader *loader) {
    const int64_t tokens = mn_corpus_tokens(loader->corpus), length = loader->options.length;
    const int64_t documents = mn_corpus_documents(loader->corpus);
    if (loader->options.cutting == MN_CUT_DOCUMENTS) {
        loader->places = tokens - documents;
        loader->n_sums = mn_ceil_div(documents, STRIDE) + 1;
        if (loader->places > 0) return MN_OK;
        return mn_fail(MN_ERR_ARGUMENT,
                       "none of the %" PRId64 " documents has the two tokens that training needs",
                       documents);
    }
    if (tokens <= length) {
        return mn_fail(MN_ERR_ARGUMENT,
                       "the corpus has %" PRId64 " tokens, windows of %" PRId64
                       " need %" PRId64 " or more; give more text or a smaller length",
                       tokens, length, length + 1);
    }
    loader->places = loader->options.sequential ? (tokens - 1) / length * length : tokens;
    return MN_OK;
}

static mn_status check_options(int64_t *batch_tokens, const mn_loader_options *options) {
    size_t bytes;
    if (options->rows < 1 || options->length < 1) {
        return mn_fail(MN_ERR_ARGUMENT,
                       "a batch of %" PRId64 " rows of %" PRId64 " tokens; both must be 1 or more",
                       options->rows, options->length);
    }
    if (!mn_mul_i64(batch_tokens, options->rows, options->length) ||
        !mn_mul_size(&bytes, (size_t)*batch_tokens, 4 * sizeof(int64_t))) {
        return mn_fail(MN_ERR_MEMORY, "a batch of %" PRId64 " x %" PRId64 " tokens is too large",
                       options->rows, options->length);
    }
    return MN_OK;
}

mn_status mn_loader_create(mn_loader **out, const mn_corpus *corpus,
                           const mn_loader_options *options) {
    int64_t batch_tokens = 0;
    *out = NULL;
    mn_status st = check_options(&batch_tokens, options);
    if (st != MN_OK) return st;
    mn_loader *loader = calloc(1, sizeof *loader);
    if (!loader) return mn_fail(MN_ERR_MEMORY, "no memory for a loader");
    *loader = (mn_loader){ .corpus = corpus, .options = *options, .batch_tokens = batch_tokens,
                           .window_seed = mn_rng_bits(options->seed, USE_WINDOWS, 0),
                           .order_seed = mn_rng_bits(options->seed, USE_ORDER, 0), .epoch = -1 };
    st = count_places(loader);
    loader->epoch_steps = mn_ceil_div(loader->places, batch_tokens);
    if (st == MN_OK) {
        loader->row = malloc(((size_t)options->length + 1) * sizeof *loader->row);
        loader->sums = calloc((size_t)loader->n_sums + 1, sizeof *loader->sums);
        if (!loader->row || !loader->sums) {
            st = mn_fail(MN_ERR_MEMORY, "no memory to cut rows of %" PRId64 " tokens",
                         options->length);
        }
    }
    if (st == MN_OK) *out = loader;
    else mn_loader_destroy(loader);
    return st;
}

mn_status mn_loader_from_source(mn_loader **out, const mn_source *source) {
    *out = NULL;
    int64_t tokens;
    if (source->rows < 1 || source->length < 1 || source->epoch < 1 ||
        !mn_mul_i64(&tokens, source->rows, source->length) || tokens > INT32_MAX) {
        return mn_fail(MN_ERR_ARGUMENT, "a source of %" PRId64 " x %" PRId64 " tokens and epochs "
                       "of %" PRId64 " steps", source->rows, source->length, source->epoch);
    }
    mn_loader *loader = calloc(1, sizeof *loader);
    if (!loader) return mn_fail(MN_ERR_MEMORY, "no memory for a loader");
    loader->source = *source;
    loader->options = (mn_loader_options){ .rows = source->rows, .length = source->length };
    loader->batch_tokens = tokens;
    loader->epoch_steps = source->epoch;
    *out = loader;
    return MN_OK;
}

static mn_status fill_from_source(mn_token_batch *batch, const mn_source *source, int64_t step) {
    batch->n_sequences = source->rows;
    for (int64_t row = 0; row <= source->rows; row++) batch->starts[row] = row * source->length;
    return source->fill(source->context, step, source->rows, source->length, batch->tokens,
                        batch->targets);
}

void mn_loader_destroy(mn_loader *loader) {
    if (!loader) return;
    free(loader->row);
    free(loader->sums);
    free(loader);
}

int64_t mn_loader_epoch(const mn_loader *loader) {
    return loader->epoch_steps;
}

mn_status mn_token_batch_create(mn_token_batch *out, const mn_loader *loader) {
    const size_t n = (size_t)loader->batch_tokens;
    *out = (mn_token_batch){ .rows = loader->options.rows, .length = loader->options.length,
                       .tokens = malloc(n * sizeof *out->tokens),
                       .targets = calloc(n, sizeof *out->targets),
                       .starts = malloc((n + 1) * sizeof *out->starts),
                       .packed = loader->options.cutting == MN_CUT_DOCUMENTS };
    if (out->tokens && out->targets && out->starts) return MN_OK;
    mn_token_batch_free(out);
    return mn_fail(MN_ERR_MEMORY, "no memory for a batch of %zu tokens", n);
}

void mn_token_batch_free(mn_token_batch *batch) {
    free(batch->tokens);
    free(batch->targets);
    free(batch->starts);
    *batch = (mn_token_batch){ 0 };
}

mn_status mn_loader_fill(mn_token_batch *batch, const mn_loader *loader, int64_t step) {
    if (step < 0) return mn_fail(MN_ERR_ARGUMENT, "step %" PRId64 " is negative", step);
    if (!loader->corpus) return fill_from_source(batch, &loader->source, step);
    if (loader->options.cutting == MN_CUT_WINDOWS) return fill_windows(batch, loader, step);
    /* The order of an epoch is kept in the loader; it changes nothing that a caller sees. */
    return fill_documents(batch, (mn_loader *)(uintptr_t)loader, step);
}
