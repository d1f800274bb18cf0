/* task.h - synthetic tasks: sequences made by a known law, with the answers that a memory has to
 * give.
 *
 *     mn_task *task;
 *     mn_task_create(&task, "mad-recall", &options);            // options: JSON, may be NULL
 *     mn_task_sample(task, seed, MN_SPLIT_TEST, 17, input, target);
 *
 * A sample is a function of (options, seed, split, index) and of nothing else, so any sample can be
 * made without those before it, and splits never share random numbers. A target of -100 asks
 * for
 * nothing. Kinds are rows of tasks.def; docs/guide/tasks.md has the law of each. */
#ifndef MN_TASKS_TASK_H
#define MN_TASKS_TASK_H

#include <stdbool.h>
#include <stdint.h>

#include "data/loader.h"
#include "io/json.h"
#include "mneme.h"

enum { MN_NO_TARGET = -100 };

typedef enum mn_split { MN_SPLIT_TRAIN, MN_SPLIT_VALID, MN_SPLIT_TEST, MN_SPLIT_COUNT } mn_split;

const char *mn_split_name(mn_split split);

/* False when there is no split of this name. */
bool mn_split_find(mn_split *out, const char *name);

/* ---- the table ------------------------------------------------------------------------------- */

typedef struct mn_task_info {
    const char *name, *about;
    const char *metric;          // the number its papers report: tok, macro, ex, seq or text
} mn_task_info;

int mn_task_count(void);
mn_task_info mn_task_row(int i);
int mn_task_find(const char *name);    // -1: none of this name

/* Calls `line` for every option of row `i`: its default as text, and what it means. */
typedef void (*mn_task_option_line)(void *context, const char *key, const char *value,
                                    const char *about);
void mn_task_options_list(int i, mn_task_option_line line, void *context);

/* Published settings of the tasks: options that differ from the defaults, with the sizes of the
 * training and test sets. Rows of task_settings.def. */
typedef struct mn_task_setting {
    const char *suite, *task, *name;
    const char *changes;             // "key=value key=value", "" for the defaults
    int64_t train, test;             // examples; 0: fresh ones without end
} mn_task_setting;

int mn_task_setting_count(void);
mn_task_setting mn_task_setting_row(int i);

/* Sets a key of the object `root` from "key=value"; the value is JSON if it parses as such, text if
 * not. mn_task_apply takes several with blanks between them, as settings are written. */
mn_status mn_task_set(mn_json *root, const char *assignment);
mn_status mn_task_apply(mn_json *root, const char *changes);

/* Row `i` as JSON: options with their defaults, published settings. NULL when out of memory. */
json_t *mn_task_json(int i);

/* ---- one task -------------------------------------------------------------------------------- */

typedef struct mn_task_shape {
    int64_t vocab;           // inputs are [0, vocab); 0: inputs are `features` numbers a token
    int64_t classes;         // targets are [0, classes)
    int64_t features;        // 0: inputs are ids
    int64_t length;          // places of a row; samples may be shorter
} mn_task_shape;

/* Row `name` with the options of the object `options`; NULL and a handle without value are its
 * defaults. Unknown options, wrong types and what no sample can be made of are refused by name.
 * One thread at a time per task: it holds the scratch memory of its samples. */
mn_status mn_task_create(mn_task **out, const char *name, const mn_json *options);
void mn_task_destroy(mn_task *task);    // NULL accepted

mn_task_shape mn_task_shape_of(const mn_task *task);

/* Its row of the table of tasks. */
int mn_task_row_of(const mn_task *task);

/* Different samples of a split, or 0 when there is no end. Indices beyond begin anew. */
int64_t mn_task_examples(const mn_task *task, mn_split split);

/* Writes sample `index` >= 0: `length` ids and targets each. Places behind the end of a shorter
 * sample have token 0 and no target. Fails for tasks with features. */
mn_status mn_task_sample(mn_task *task, uint64_t seed, mn_split split, int64_t index,
                         int32_t *input, int32_t *target);

/* The same for tasks with features: (length, features) numbers. */
mn_status mn_task_vectors(mn_task *task, uint64_t seed, mn_split split, int64_t index,
                          float *input, int32_t *target);

/* Places that the last sample of this task filled. */
int64_t mn_task_used(const mn_task *task);

/* Kinds of answers that are to be told apart, such as those that were updated: the number of
 * groups (0: no such kinds), and their names. */
int mn_task_groups(const mn_task *task);
const char *mn_task_group_name(const mn_task *task, int group);

/* The group of every place of a sample, -1 where none: (length) from its input and target. */
void mn_task_group(const mn_task *task, const int32_t *input, const int32_t *target, int8_t *group);

/* The label that each answer competes with, -100 where there is none: (length) from the features
 * and targets of a sample. In collisions it is the label of the other key of the pair. */
void mn_task_rival(const mn_task *task, const float *input, const int32_t *target, int32_t *rival);

/* ---- text ------------------------------------------------------------------------------------ */

enum { MN_TASK_ANSWERS = 64 };

/* A sample as text, for tasks that are text; borrowed from the task until its next sample. */
typedef struct mn_task_text {
    const char *prompt;                        // up to where the answer is to begin
    const char *answers[MN_TASK_ANSWERS];
    int64_t answer_at[MN_TASK_ANSWERS];        // where in the prompt each stands, in bytes
    int64_t answer_token[MN_TASK_ANSWERS];     // and in tokens, of prompt_tokens
    int n_answers;
    int64_t prompt_tokens;
} mn_task_text;

bool mn_task_has_text(const mn_task *task);
mn_status mn_task_text_of(mn_task *task, uint64_t seed, mn_split split, int64_t index,
                          mn_task_text *out);

/* The part of the answers that `prediction` contains, upper and lower case alike. Control
 * characters end words. */
double mn_task_text_score(const mn_task_text *text, const char *prediction);

/* ---- batches --------------------------------------------------------------------------------- */

typedef struct mn_task_feed {
    mn_split split;
    uint64_t seed;
    int64_t rows;
    int64_t examples;        // a set of so many, each once an epoch; 0: fresh ones at every step,
                             // or all of them where the split has an end
    bool in_order;           // no shuffling: evaluation
} mn_task_feed;

/* Steps of an epoch, the last of which may have empty rows; 0 for fresh examples. */
int64_t mn_task_epoch(const mn_task *task, const mn_task_feed *feed);

/* Makes a batch of `rows` samples; free with mn_token_batch_free. */
mn_status mn_task_batch_create(mn_token_batch *out, const mn_task *task, int64_t rows);

/* Fills `batch` for step `step` >= 0, a function of (feed, step). A set is gone through in a new
 * order each epoch; rows beyond its last example have token 0 and no target. Tasks with features
 * write (rows, length, features) numbers to `features` and leave the tokens 0; for others it may
 * be NULL. */
mn_status mn_task_fill(mn_token_batch *batch, float *features, mn_task *task,
                       const mn_task_feed *feed, int64_t step);

#endif
