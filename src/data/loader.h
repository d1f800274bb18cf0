/* loader.h - batches of tokens for training, as a function of (seed, step) and nothing else.
 *
 * A corpus is one long row of tokens in memory or mapped from files, with document borders. The
 * loader cuts it: `windows` takes B windows of T + 1 tokens, `documents` packs whole documents one
 * after the other and says where each begins, so that layers reset there. Nothing has to be carried
 * from step to step, so a resumed run sees the batches it would have seen. */
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
    bool sequential;            // no shuffling: evaluation
} mn_loader_options;

typedef struct mn_loader mn_loader;

/* One batch. Tokens and targets are (rows, length); a target is -100 where none is asked for.
 * `starts` are the offsets into the rows * length tokens at which a sequence begins, closed by
 * rows * length: the cu_seqlens of packed operators. Windows begin at every row. */
typedef struct mn_batch {
    int64_t rows, length;
    int32_t *tokens, *targets;
    int64_t *starts, n_sequences;
    bool packed;                // sequences other than whole rows
} mn_batch;

/* `corpus` must outlive the loader. Fails when the corpus has too few tokens, and says how many are
 * needed. */
mn_status mn_loader_create(mn_loader **out, const mn_corpus *corpus,
                           const mn_loader_options *options);
void mn_loader_destroy(mn_loader *loader);    // NULL accepted

/* Steps after which every token was offered about once. */
int64_t mn_loader_epoch(const mn_loader *loader);

mn_status mn_batch_create(mn_batch *out, const mn_loader *loader);
void mn_batch_free(mn_batch *batch);

/* Fills `batch` (made by mn_batch_create for this loader) for step `step`. Allocates nothing. Fails
 * when a file of the corpus shrank underneath. */
mn_status mn_loader_fill(mn_batch *batch, const mn_loader *loader, int64_t step);

#endif
