/* text_cut.h - where a text may be cut without changing its tokens; the rule is in text.h. */
#ifndef MN_DATA_TEXT_CUT_H
#define MN_DATA_TEXT_CUT_H

#include <stdbool.h>
#include <stddef.h>

#include "tokenizer/tokenizer.h"

enum { MN_CUT_CONTEXT = 256 };    // bytes looked at on either side of a cut

typedef struct mn_cut_rule {
    bool lines;                      // every line end is a border of documents
    const char *separator;           // NULL: none
    const mn_tokenizer *tokenizer;   // NULL: cut anywhere between characters
    bool borders_only;               // no cuts inside documents
} mn_cut_rule;

/* The first good place in [from, to) of `size` bytes, or -1; *border says whether a document ends
 * there. Bytes outside [from, to) are looked at and need not be good places. */
int64_t mn_cut_find(bool *border, const char *text, int64_t size, int64_t from, int64_t to,
                    const mn_cut_rule *rule);

#endif
