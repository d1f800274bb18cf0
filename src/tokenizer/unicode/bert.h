/* bert.h - the text rules of BERT: cleaning, blanks around Chinese characters, accents, lower
 * case, and where punctuation is cut. */
#ifndef MN_TOKENIZER_UNICODE_BERT_H
#define MN_TOKENIZER_UNICODE_BERT_H

#include <stdbool.h>
#include <stdint.h>

#include "io/text.h"

typedef struct mn_bert_rules {
    bool clean;          // drop controls, make every blank U+0020
    bool chinese;        // blanks around Chinese characters
    bool accents;        // decompose, drop non-spacing marks
    bool lower;
} mn_bert_rules;

/* Appends `text` (UTF-8) by these rules; `between` is scratch. */
mn_status mn_bert_normalise(mn_text *out, mn_text *between, const char *text, size_t size,
                            const mn_bert_rules *rules);

/* Appends `text` without combining marks, as StripAccents does. */
mn_status mn_strip_accents(mn_text *out, const char *text, size_t size);

/* Appends a class of a regular expression, "[...]", with the punctuation that stands alone. */
mn_status mn_bert_punctuation(mn_text *out);

#endif
