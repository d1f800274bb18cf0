/* task_internal.h - what generators of samples share: options, random draws, and the row to fill.
 * */
#ifndef MN_TASKS_TASK_INTERNAL_H
#define MN_TASKS_TASK_INTERNAL_H

#include "base/rng.h"
#include "tasks/task.h"

enum { MN_TASK_OPTION_TEXT = 1024 };

typedef struct mn_task_values {
#define INT(name, least, most, about) int64_t name;
#define REAL(name, least, most, about) double name;
#define FLAG(name, about) bool name;
#define TEXT(name, about) char name[MN_TASK_OPTION_TEXT];
#include "tasks/task_fields.def"
} mn_task_values;

/* ---- draws ----------------------------------------------------------------------------------- */

/* The random numbers of one sample, or of one batch of samples, in the order they are taken. */
typedef struct mn_draws {
    uint64_t key, stream, next;
} mn_draws;

/* What numbers are drawn for: uses of one seed never meet. */
typedef enum mn_draw_use {
    MN_DRAW_SAMPLE,          // a sample: stream = its index
    MN_DRAW_NEIGHBOURS,      // what neighbouring samples have in common
    MN_DRAW_ORDER,           // the order of an epoch
    MN_DRAW_MAP,             // what all samples of a task have in common
} mn_draw_use;

static inline mn_draws mn_draws_make(uint64_t seed, mn_draw_use use, mn_split split,
                                     int64_t stream) {
    const uint64_t uses = UINT64_C(0x7461736B) << 32;    // "task"
    return (mn_draws){ mn_rng_bits(seed, uses, (uint64_t)use << 8 | (uint64_t)split),
                       (uint64_t)stream, 0 };
}

static inline uint64_t mn_draw_bits(mn_draws *d) {
    return mn_rng_bits(d->key, d->stream, d->next++);
}

/* uniform in 0 .. n-1, n >= 1, off by less than n / 2^64 */
static inline int64_t mn_draw_below(mn_draws *d, int64_t n) {
    return (int64_t)(((unsigned __int128)mn_draw_bits(d) * (uint64_t)n) >> 64);
}

/* uniform in (0, 1) */
static inline double mn_draw_unit(mn_draws *d) {
    return mn_rng_uniform(d->key, d->stream, d->next++);
}

/* Ordered draws without repetition from 0 .. n-1: `deck` holds these in order and is given back in
 * order by mn_deck_restore. Costs nothing for what is not drawn. */
typedef struct mn_deck {
    int32_t *cards, *swapped;    // n each
    int64_t n, drawn;
} mn_deck;

mn_status mn_deck_create(mn_deck *out, int64_t n);
void mn_deck_free(mn_deck *deck);
int32_t mn_deck_draw(mn_deck *deck, mn_draws *d);    // at most n times
void mn_deck_restore(mn_deck *deck);

/* ---- generators ------------------------------------------------------------------------------ */

/* The sample to make. Targets are -100, ids and features 0 when a generator begins; it sets
 * task->used when it fills less than the row. */
typedef struct mn_sample_row {
    uint64_t seed;
    mn_split split;
    int64_t index;
    mn_draws draws;
    int32_t *input, *target;    // input: NULL for tasks with features
    float *features;
} mn_sample_row;

typedef struct mn_generator {
    mn_status (*open)(mn_task *task);     // checks options, sets the shape, makes task->own
    mn_status (*draw)(mn_task *task, mn_sample_row *row);
    void (*close)(mn_task *task);         // frees what hangs on task->own; may be NULL
    void (*group)(const mn_task *task, const int32_t *input, const int32_t *target,
                  int8_t *group);         // may be NULL, as the next
    mn_status (*text)(mn_task *task, mn_sample_row *row, mn_task_text *out);
    void (*rival)(const mn_task *task, const float *input, const int32_t *target, int32_t *rival);
} mn_generator;

#define GENERATOR(name) extern const mn_generator mn_generator_##name;
#include "tasks/generators.def"
#undef GENERATOR

struct mn_task {
    int row;
    mn_task_info info;
    const mn_generator *generator;
    mn_task_values values;
    mn_task_shape shape;
    int64_t used;
    int64_t examples[MN_SPLIT_COUNT];
    const char *const *groups;            // names, n_groups of them
    int n_groups;
    void *own;                            // of the generator; freed with free()
};

/* MN_ERR_ARGUMENT "TASK: KEY is VALUE; WHY" unless `holds`; KEY is one of the INT options. */
mn_status mn_task_require(const mn_task *task, bool holds, const char *key, const char *why);

/* A zeroed task->own of `size` bytes. */
mn_status mn_task_own(mn_task *task, size_t size);

/* `count` zeroed elements of `size` bytes; fails by the task's name. */
mn_status mn_task_memory(void *out, const mn_task *task, int64_t count, size_t size);

/* Whole numbers separated by commas from a TEXT option, each in [least, most]; at most 64. */
enum { MN_TASK_LIST = 64 };
mn_status mn_task_list(int64_t out[MN_TASK_LIST], int *count, const mn_task *task, const char *key,
                       const char *text, int64_t least, int64_t most);

#endif
