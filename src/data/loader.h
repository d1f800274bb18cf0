/* loader.h - batches of tokens for training, as a function of (seed, step) and nothing else.
 *
 * A corpus is one long row of tokens in memory or in files, with document borders. The loader cuts
 * it. `windows` takes B windows of T + 1 tokens from anywhere. `documents` goes through all of them
 * in a new order each epoch: a document of L tokens gives L - 1 places (token i, target i + 1),
 * places are filled back to back into rows of T, and what does not fit goes on in the next row.
 * Layers reset where a sequence begins. Nothing has to be carried from step to step, so a resumed
 * run sees the batches it would have seen. */
#ifndef MN_DATA_LOADER_H
#define MN_DATA_LOADER_H

#include "data/corpus.h"

typedef enum mn_cutting {
    MN_CUT_WINDOWS,      // random windows, documents run into each other
    MN_CUT_DOCUMENTS,    // shuffled documents packed into rows, state reset at each border
} mn_cutting;

typedef struct mn_loader_options {
    mn_cutting cutting;
    int64_t rows, length;       // B, T
    uint64_t seed;
    bool sequential;            // no shuffling, every place once an epoch: evaluation
} mn_loader_options;

typedef struct mn_loader mn_loader;

/* One batch. Tokens and targets are (rows, length); a target is -100 where none is asked for, which
 * is so only behind the last place of an epoch, where the token is 0. `starts` are the offsets into
 * the rows * length tokens at which a sequence begins, closed by rows * length: the cu_seqlens of
 * packed operators. A sequence begins at every row, and with `documents` at each document and at
 * what is left empty; a target never belongs to another document than its token. */
typedef struct mn_token_batch {
    int64_t rows, length;
    int32_t *tokens, *targets;
    int64_t *starts, n_sequences;
    bool packed;                // cut by documents: sequences may be other than whole rows
} mn_token_batch;

/* `corpus` must outlive the loader. Fails when the corpus has too few tokens, and says how many are
 * needed. */
mn_status mn_loader_create(mn_loader **out, const mn_corpus *corpus,
                           const mn_loader_options *options);
/* Batches that something else makes: synthetic tasks. `fill` writes tokens and targets (-100: none
 * asked for) of every row for step >= 0, as a function of the step alone; every row is a sequence
 * of its own. `context` is borrowed. */
typedef struct mn_source {
    void *context;
    mn_status (*fill)(void *context, int64_t step, int64_t rows, int64_t length, int32_t *tokens,
                      int32_t *targets);
    int64_t rows, length, epoch;    // epoch: steps
} mn_source;

mn_status mn_loader_from_source(mn_loader **out, const mn_source *source);

void mn_loader_destroy(mn_loader *loader);    // NULL accepted

/* Steps of an epoch: ceil(places / (rows * length)). Sequential windows are the T tokens each that
 * follow one another, a shorter rest left out; these and packed documents offer every place exactly
 * once per epoch. Random windows offer each about once. */
int64_t mn_loader_epoch(const mn_loader *loader);

mn_status mn_token_batch_create(mn_token_batch *out, const mn_loader *loader);
void mn_token_batch_free(mn_token_batch *batch);

/* Fills `batch` (made by mn_token_batch_create for this loader) for step `step` >= 0. Sequential
 * steps begin anew after an epoch. Allocates nothing; the first step of another epoch takes the
 * time to put the documents in order. Fails when a file of the corpus shrank underneath. One
 * thread at a time. */
mn_status mn_loader_fill(mn_token_batch *batch, const mn_loader *loader, int64_t step);

#endif
