/* choice.h - multiple choice: which continuation of a context does a model find most probable?
 *
 *   score of a choice = sum of log p(token | context, tokens before it) over its tokens
 *   accuracy            the right choice has the largest score
 *   normalised          ... the largest score per byte of its text
 *
 * A choice is its text behind the context, with a blank between the two unless either side has one
 * there or the context is empty. Its tokens are those of context and choice together, from the
 * number of tokens on that the context alone has. Among equals the first counts as chosen. */
#ifndef MN_EVAL_CHOICE_H
#define MN_EVAL_CHOICE_H

#include <stddef.h>
#include <stdint.h>

#include "mneme.h"

typedef struct mn_question {
    char *context;
    char **choices;
    int64_t n_choices, answer;
    int64_t line;              // of the file
} mn_question;

typedef struct mn_questions {
    mn_question *at;
    int64_t count, capacity;
    char *name;                // of the file, for messages
} mn_questions;

/* Reads JSON lines: {"context", "choices": [..], "answer": index}, or as in HellaSwag {"ctx",
 * "endings", "label"}, the label a number or a number as text. Other keys are passed over. Messages
 * name file and line. On failure `*out` is all zeros. */
mn_status mn_questions_load(mn_questions *out, const char *path);
mn_status mn_questions_parse(mn_questions *out, const char *bytes, size_t size, const char *name);
void mn_questions_free(mn_questions *questions);

typedef struct mn_choice_options {
    int64_t max_questions;     // 0: all
    bool (*progress)(void *context, int64_t done, int64_t all);    // false stops; may be NULL
    void *context;
} mn_choice_options;

typedef struct mn_choice_result {
    int64_t questions, tokens;                 // tokens that went through the model
    double accuracy, accuracy_error;           // standard errors sqrt(p (1 - p) / (n - 1)); NAN
    double normalised, normalised_error;       // with one question
    double chance;                             // accuracy of choosing blindly
    double seconds;
} mn_choice_result;

/* A context goes through the model once, whatever the number of its choices. */
mn_status mn_choice_measure(mn_choice_result *out, mn_context *context, mn_model *model,
                            const mn_tokenizer *tokenizer, const mn_questions *questions,
                            const mn_choice_options *options);

#endif
