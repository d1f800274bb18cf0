/* prepare.h - text as files of tokens, made once: what mneme prepare does.
 *
 * Writes the folder that prepared.h describes. A run that was stopped goes on where it was when it
 * is started again; the result has the same bytes at any number of threads and after any number of
 * stops. */
#ifndef MN_DATA_PREPARE_H
#define MN_DATA_PREPARE_H

#include "data/corpus.h"

/* Called now and then with bytes of input done and in all, and tokens so far; false stops. */
typedef bool (*mn_prepare_progress)(void *context, int64_t done, int64_t all, int64_t tokens);

typedef struct mn_prepare_options {
    mn_corpus_options input;     // paths, format (AUTO, TEXT, JSONL), text_key, separator,
                                 // document_end
    const char *folder;          // made if it is not there
    double valid;                // share of the input held out, [0, 1)
    int64_t shard_tokens;        // tokens of a file; 0: 2^25
    int n_threads;               // 0: one per core
    mn_prepare_progress progress;    // may be NULL
    void *context;
} mn_prepare_options;

typedef struct mn_prepare_result {
    int64_t tokens[2], documents[2], shards[2];    // train, valid
    int64_t kept;                // shards of an earlier run that were found whole
    bool was_complete;           // there was nothing to do
    int token_bytes;
} mn_prepare_result;

/* Tokenises `input` into `folder`. With `tokenizer` NULL one token is made for each character of
 * the text. Memory: two or four bytes per token of a shard, and some megabytes per thread. A folder
 * that was begun with other settings or another input is refused and left as it is. */
mn_status mn_prepare(mn_prepare_result *out, const mn_prepare_options *options,
                     const mn_tokenizer *tokenizer);

/* Reads everything in a prepared folder again: sizes, hashes, ids, documents, tokenizer. Fails at
 * the first thing that is not as it was written, and names it. `progress` counts tokens. */
mn_status mn_prepare_check(mn_prepare_result *out, const char *folder,
                           mn_prepare_progress progress, void *context);

#endif
