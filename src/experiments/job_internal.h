/* job_internal.h - what the kinds of jobs have in common. */
#ifndef MN_EXPERIMENTS_JOB_INTERNAL_H
#define MN_EXPERIMENTS_JOB_INTERNAL_H

#include "experiments/job.h"
#include "model/model.h"
#include "tokenizer/tokenizer.h"

/* How a job is run: its own folder for checkpoints (NULL: none), and who wants to hear of it. */
typedef struct mn_job_call {
    const char *keep;
    double keep_seconds;
    const volatile sig_atomic_t *stop;    // may be NULL
    const char *device;          // NULL: the CPU
    mn_job_watch watch;          // may be NULL
    void *context;
} mn_job_call;

bool mn_job_is_to_stop(const mn_job_call *call);

/* Whether it is time for a checkpoint, the last being of the time `last`. */
bool mn_job_keeps_now(const mn_job_call *call, double last);

/* With "keep": true in the job, the model and, if there is one, its tokenizer as a folder models/KEY
 * beside the results; without, nothing. */
mn_status mn_job_keep_model(const mn_job_call *call, const mn_json *job, mn_model *model,
                            const mn_tokenizer *tokenizer);

/* A kind fills in `job`, an object that is its own, and runs a completed one: *result is a new
 * object, or NULL where it kept a checkpoint and ended because it was to stop. */
typedef struct mn_job_kind {
    mn_status (*complete)(mn_json *job);
    mn_status (*run)(json_t **result, const mn_json *job, const mn_job_call *call);
} mn_job_kind;

#define JOB_KIND(name, about) extern const mn_job_kind mn_job_##name;
#include "experiments/job_kinds.def"
#undef JOB_KIND

/* Sets "a.b.c" of `root` to `value` (stolen), making objects on the way. */
mn_status mn_spec_set(json_t *root, const char *path, json_t *value);

/* The value at "a.b.c", borrowed; NULL when there is none. Names may not hold dots, except the last
 * one that is found whole. */
json_t *mn_spec_get(const json_t *root, const char *path);

/* Lays a copy of `over` on `base`: objects member by member, everything else replaced. */
mn_status mn_spec_merge(json_t *base, const json_t *over);

#endif
