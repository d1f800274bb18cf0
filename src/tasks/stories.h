/* stories.h - small stories about where things are, with questions about their latest place, from a
 * source whose entropy is known exactly.
 *
 *     anna puts the lamp in the barn. clara walks past the mill. ben takes the lamp to the mill.
 *     where is the lamp? mill.
 *
 * A token is a word or a mark. Every choice of the grammar (stories.c) has a stated probability and
 * shows in the next token, so a story has one derivation and
 *
 *     bits[t] = -log2 P(token t | tokens before it in its story)
 *
 * is exact: no predictor has a lower expected loss. Answers are certain, at 0 bits, for whoever
 * remembers the latest place. A story is a function of (config, seed, index). */
#ifndef MN_TASKS_STORIES_H
#define MN_TASKS_STORIES_H

#include <stddef.h>
#include <stdint.h>

#include "tokenizer/tokenizer.h"

/* The source. Words are the first so many of each list in stories.def. */
typedef struct mn_stories_config {
    int64_t n_names, n_objects, n_places;
    int64_t n_cast;           // objects that one story may come to hold, at most n_objects
    int64_t n_sentences;      // the most in one story
    double p_end;             // that a story ends after a sentence; 0: always n_sentences long
    double p_new;             // that an update brings in an object, while the cast is not complete
    double update, filler, question;    // weights of the kinds of sentences, relative to their sum
} mn_stories_config;

/* 16 names, 24 objects, 24 places; casts of 8; 40 sentences a story on average and 200 at most;
 * p_new 0.3; 35 % updates, 30 % fillers, 35 % questions. */
mn_stories_config mn_stories_default(void);

/* MN_ERR_ARGUMENT, naming the field and its range, for a source that cannot be. */
mn_status mn_stories_check(const mn_stories_config *config);

/* A question of the text, for tables of accuracy. */
typedef struct mn_stories_question {
    int64_t at;           // position of the answer among the tokens
    int64_t distance;     // in tokens, since the object's latest place was said
    int64_t n_updates;    // sentences so far that put or took it: 1 when it was never moved
    int32_t object, answer;    // word ids; tokens[at] is the answer
} mn_stories_question;

/* Stories [first, first + count) one after the other. */
typedef struct mn_stories {
    int32_t *tokens;          // n_tokens word ids
    double *bits;             // n_tokens information contents
    int64_t n_tokens;
    int64_t *borders;         // n_stories + 1 offsets of stories, as mn_corpus_from_tokens has them
    int64_t n_stories;
    mn_stories_question *questions;
    int64_t n_questions;
} mn_stories;

/* Writes the stories, each closed by the word "\n". On failure `*out` is all zeros. */
mn_status mn_stories_tokens(mn_stories *out, const mn_stories_config *config, uint64_t seed,
                            int64_t first, int64_t count);

/* Frees what mn_stories_tokens gave and zeroes it. NULL and all zeros are fine. */
void mn_stories_free(mn_stories *stories);

/* The kinds of words. */
typedef enum mn_stories_class {
    MN_STORIES_GLUE, MN_STORIES_NAME, MN_STORIES_OBJECT, MN_STORIES_PLACE,
    MN_STORIES_ALONE, MN_STORIES_PASSING, MN_STORIES_TOGETHER,
    MN_STORIES_CLASSES
} mn_stories_class;

/* Words in all; ids are [0, that), whatever the config. */
int64_t mn_stories_words(void);

/* The text of word `id`, or NULL when there is no such word. */
const char *mn_stories_word(int32_t id);

/* The id of the word with exactly this text, or -1. */
int32_t mn_stories_find(const char *text, size_t size);

/* Words of one class have neighbouring ids: the first, and how many. */
int32_t mn_stories_first(mn_stories_class class);
int64_t mn_stories_count(mn_stories_class class);

/* Tokens as text of lower-case ASCII letters, blank, "." , "?" and newline, one story a line; in
 * memory the caller frees, `*size` excludes the closing zero byte. The text says exactly what the
 * tokens say, so the sum of their bits is also the information in its characters. */
mn_status mn_stories_text(char **out, size_t *size, const int32_t *tokens, int64_t count);

/* The word ids of such text: what mn_stories_text wrote gives its tokens back. `*out` is to be
 * freed. A word outside stories.def fails and is named with its place. */
mn_status mn_stories_encode(int32_t **out, int64_t *count, const char *text, size_t size);

/* A tokenizer of words that gives the same ids for that text, and one id more, mn_stories_words(),
 * for words it does not know: to be saved beside models as their tokenizer.json. */
mn_status mn_stories_tokenizer(mn_tokenizer **out);

/* Means over all stories of the source, in closed form: bits / tokens is its entropy per token. */
typedef struct mn_stories_means {
    double sentences, tokens, questions;    // in one story
    double bits;                            // information of one story
} mn_stories_means;

mn_status mn_stories_expect(mn_stories_means *out, const mn_stories_config *config);

#endif
