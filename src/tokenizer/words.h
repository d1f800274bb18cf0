/* words.h - the distinct pieces of the training texts and how often each occurs. */
#ifndef MN_TOKENIZER_WORDS_H
#define MN_TOKENIZER_WORDS_H

#include "tokenizer/tokenizer_internal.h"

typedef struct mn_word {
    mn_span text;
    int64_t count;
} mn_word;

/* All zeros is empty; words stay in the order they were first met. */
typedef struct mn_words {
    mn_word *rows;
    int64_t count, capacity;
    int64_t *slots;          // indices of rows by hash; -1: empty
    uint64_t *hashes;
    size_t mask;             // slots - 1
    mn_vocab memory;         // of texts
} mn_words;

void mn_words_free(mn_words *words);

/* Counts the pieces of `text` as `how` cuts it. Special tokens and bytes that are not UTF-8 are
 * left out. */
mn_status mn_words_count(mn_words *words, const mn_tokenizer_training *how,
                         const mn_training_pattern *pattern, mn_span text);

#endif
