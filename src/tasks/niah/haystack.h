/* haystack.h - long English prose as words and sentences, from a file or folder of text. */
#ifndef MN_TASKS_HAYSTACK_H
#define MN_TASKS_HAYSTACK_H

#include <stdbool.h>

#include "io/text.h"
#include "mneme.h"

typedef struct mn_haystack {
    char *text;             // words with one blank between them
    int64_t *start;         // n_words + 1: word i is text[start[i], start[i+1] - 1)
    bool *ends;             // a sentence ends behind word i
    int64_t n_words;
} mn_haystack;

/* Reads text and JSON lines ("text") at `path`, in the order of their names. Sentences end behind a
 * word with . ? or ! at its end, unless it is an abbreviation or initial, or the next word begins
 * in lower case after a full stop. On failure `*out` is all zeros. */
mn_status mn_haystack_load(mn_haystack *out, const char *path);

/* The same of text in memory. */
mn_status mn_haystack_make(mn_haystack *out, const char *text, size_t size);

void mn_haystack_free(mn_haystack *haystack);    // all zeros is fine

/* How many sentences the first `n` words are, the text beginning anew when it is over. */
int64_t mn_haystack_sentences(const mn_haystack *haystack, int64_t n);

/* Appends word i, counted through repetitions of the text. */
mn_status mn_haystack_word(mn_text *out, const mn_haystack *haystack, int64_t i);

static inline bool mn_haystack_ends(const mn_haystack *haystack, int64_t i) {
    return haystack->ends[i % haystack->n_words];
}

#endif
