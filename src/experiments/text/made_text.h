/* made_text.h - text that a job makes itself, so that an experiment of text runs anywhere: stories
 * of stories.h, and by turns with them needles in repeated noise with their questions, as the task
 * s-niah-1 says them. Tokens are bytes. */
#ifndef MN_EXPERIMENTS_MADE_TEXT_H
#define MN_EXPERIMENTS_MADE_TEXT_H

#include "data/corpus.h"

/* At least `bytes` of it, the same each time: a document is a few stories or one needle, whose
 * haystack is by turns the shortest there is and what fits in `context` tokens. */
mn_status mn_made_text(mn_corpus **out, int64_t bytes, int64_t context);

#endif
