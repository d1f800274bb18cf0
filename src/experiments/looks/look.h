/* look.h - what an experiment sees inside a trained model: rows of looks.def, asked for by "look"
 * of a job that trains, one file look_NAME.c each. */
#ifndef MN_EXPERIMENTS_LOOKS_LOOK_H
#define MN_EXPERIMENTS_LOOKS_LOOK_H

#include "experiments/task_run.h"
#include "tokenizer/tokenizer.h"

/* A model that is there to be looked at, and where its examples come from. */
typedef struct mn_look_at {
    mn_context *context;
    mn_model *model;
    mn_task_run *task;
} mn_look_at;

/* Adds what it found to `result` under its name; `options` is the object of the job. */
typedef struct mn_look {
    mn_status (*check)(const mn_json *options);
    mn_status (*look)(json_t *result, const mn_look_at *at, const mn_json *options);
} mn_look;

#define LOOK(name, about) extern const mn_look mn_look_##name;
#include "experiments/looks/looks.def"
#undef LOOK

/* Whether "look" of a job names looks with options they know. */
mn_status mn_look_check(const mn_json *looks);

/* All looks of a job. */
mn_status mn_look_all(json_t *result, const mn_look_at *at, const mn_json *looks);

/* ---- needles --------------------------------------------------------------------------------- */

/* A prompt with a needle in it: tokens first .. end - 1 are its sentence, `asked` where the
 * question begins. */
typedef struct mn_needle {
    mn_token_list tokens;
    int64_t first, end, asked;
} mn_needle;

/* How far the keys of needles lie off the directions in which keys vary most, by layer: adds
 * "layers" and their means to `result`. Frees nothing. */
mn_status mn_align(json_t *result, mn_context *context, mn_model *model, const mn_needle *needles,
                   int64_t n_needles, int64_t top);

/* The prompt of variant `index` of the diagnostic's own text, about `fillers` sentences long. */
mn_status mn_needle_prompt(mn_needle *out, const mn_tokenizer *tokenizer, int64_t index,
                           int64_t fillers);
int64_t mn_needle_variants(void);

#endif
