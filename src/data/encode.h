/* encode.h - the tokens of a planned text, piece after piece, worked out on several threads. */
#ifndef MN_DATA_ENCODE_H
#define MN_DATA_ENCODE_H

#include "data/text.h"
#include "runtime/threads.h"

/* Takes tokens in the order of the text, whatever the number of threads. */
typedef struct mn_token_sink {
    void *context;
    mn_status (*put)(void *context, const int32_t *ids, int64_t count);
    mn_status (*close)(void *context);                 // a document ends here
    mn_status (*piece_begins)(void *context, int64_t piece);    // may be NULL
} mn_token_sink;

/* Encodes pieces from `first` to the last on `threads` (NULL: here) and hands them to `sink`, which
 * is called from this thread only. Special tokens in the text are plain text. Stops at the first
 * failure in the order of the text. */
mn_status mn_encode_pieces(const mn_text_plan *plan, const mn_tokenizer *tokenizer, int64_t first,
                           mn_threads *threads, const mn_token_sink *sink);

/* The status and message of a failure, to carry them from one thread to another. */
typedef struct mn_carried {
    mn_status status;
    char message[600];
} mn_carried;

void mn_carry(mn_carried *out, mn_status status);     // this thread's failure, or MN_OK
mn_status mn_carried_fail(const mn_carried *carried);

#endif
