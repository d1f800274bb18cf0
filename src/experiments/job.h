/* job.h - one run of an experiment: a JSON object that says all that defines it, and the record
 * that comes back.
 *
 *   job      {"kind": "train", "task": {...}, "model": {...}, "train": {...}, "seed": 0, ...}
 *   record   {"key", "job", "status": "ok" or "failed", "error", "result", "seconds", "commit",
 *             "version"}
 *
 * The key is a hash of the completed job without its labels, which only name its place in a
 * report: the same job has the same key in whatever order it is written. Kinds: job_kinds.def. */
#ifndef MN_EXPERIMENTS_JOB_H
#define MN_EXPERIMENTS_JOB_H

#include <signal.h>
#include <stdbool.h>
#include <stdint.h>

#include "io/json.h"
#include "mneme.h"

enum { MN_JOB_KEY = 17 };    // 16 hexadecimal digits

/* How far a running job is; loss and score are NAN until there is one. */
typedef struct mn_job_progress {
    int64_t step, steps;
    double loss, score;
} mn_job_progress;

typedef void (*mn_job_watch)(void *context, const mn_job_progress *now);

/* `spec` with everything spelt out: a published setting becomes its options, epochs become steps.
 * Fails on unknown keys, tasks and settings, and on what cannot be trained. *job is new. */
mn_status mn_job_complete(json_t **job, const mn_json *spec);

/* Of a completed job. */
mn_status mn_job_key(char key[MN_JOB_KEY], const json_t *job);

/* Where jobs that train put checkpoints and how often, so that they go on there after a kill. Each
 * job has folder/KEY, which is gone when the job is done. */
typedef struct mn_job_keeping {
    const char *folder;          // NULL: nowhere
    double seconds;              // from one to the next
    const volatile sig_atomic_t *stop;    // NULL, or set to keep what there is and end
} mn_job_keeping;

/* Runs a completed job on one thread. `watch` (may be NULL) is called now and then. A failed run
 * gives a record too, with "status" "failed"; the status says whether there is a record, and a job
 * that ended because it was to stop has none. Models are trained on `device` ("cuda"; NULL: the
 * CPU), which the record then names; its key does not, as results differ by roundings only. Kinds
 * that train no model run on the CPU. */
mn_status mn_job_run(json_t **record, const json_t *job, const mn_job_keeping *keeping,
                     const char *device, mn_job_watch watch, void *context);

/* "mqar-update 64-4-4 gdn seed=0": from the labels, or from the task and the layers. */
void mn_job_title(char *text, size_t size, const json_t *job);

/* Twelve digits, "-changed" behind them when the checkout was not clean, or "unknown". */
const char *mn_build_commit(void);

#endif
