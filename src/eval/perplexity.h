/* perplexity.h - how well a model foretells a text, in windows of a given length.
 *
 *   perplexity = exp(sum of -log p(token | tokens before it in its window) / tokens foretold)
 *
 * The text is one row of tokens, cut into windows of exactly `length` that do not overlap; what is
 * left at its end is dropped. Each window starts from nothing, so its first token is given and
 * length - 1 are foretold. */
#ifndef MN_EVAL_PERPLEXITY_H
#define MN_EVAL_PERPLEXITY_H

#include "data/corpus.h"
#include "model/model.h"

typedef struct mn_perplexity_options {
    int64_t length;            // tokens of a window, at least 2
    int64_t max_tokens;        // of the text at most so many; 0: all
    size_t budget;             // bytes a pass may take; 0: 512 MiB
    /* Called after each batch of windows with tokens done and all; false stops. May be NULL. */
    bool (*progress)(void *context, int64_t done, int64_t all);
    void *context;
} mn_perplexity_options;

typedef struct mn_perplexity {
    int64_t length, windows, tokens;    // tokens: foretold
    double loss;               // mean, in nats
    double loss_error;         // standard error of it over windows; NAN with one window
    double perplexity;
    double seconds;
} mn_perplexity;

/* Windows of `length` in a corpus, `max_tokens` considered; fails when there is none. */
mn_status mn_perplexity_windows(int64_t *windows, const mn_corpus *corpus,
                                const mn_perplexity_options *options);

/* Several windows go through the model at once, and windows that take more than the budget in
 * pieces that follow each other in a state; the result does not depend on it beyond rounding. */
mn_status mn_perplexity_measure(mn_perplexity *out, mn_context *context, mn_model *model,
                                const mn_corpus *corpus, const mn_perplexity_options *options);

#endif
