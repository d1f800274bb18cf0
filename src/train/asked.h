/* asked.h - the tokens of a batch that have a target, side by side: where a source asks for few of
 * them, a GPU makes logits of these alone, in the same launches at every step. */
#ifndef MN_TRAIN_ASKED_H
#define MN_TRAIN_ASKED_H

#include "data/loader.h"

typedef struct mn_asked {
    int64_t n;              // places listed of each batch; 0: logits of all are made
    int32_t *places;        // (n) those with a target first, then others, in order each
    int32_t *targets;       // (n) their targets, -100 where none is asked for
} mn_asked;

/* For batches of rows x length tokens of which at most `most` have a target (0: not known). Lists
 * nothing where that saves less than half. */
mn_status mn_asked_create(mn_asked *out, int64_t most, int64_t rows, int64_t length);
void mn_asked_free(mn_asked *asked);

/* Lists the places of `batch`; fails where it asks for more than was said. */
mn_status mn_asked_list(mn_asked *asked, const mn_token_batch *batch);

#endif
