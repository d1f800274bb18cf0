/* sweep.h - runs a list of jobs, several at once, one process and one thread for each.
 *
 * Records are lines of a file that only grows; each is on the disk before the next job starts in
 * its place. A job whose key the file has as done is not run again, a failed one is. Long jobs that
 * train save themselves in "unfinished" beside the file, several times a minute: a sweep that was
 * killed goes on from there.
 *
 * Several sweeps on several machines share a folder, each with a file of its own: jobs are taken by
 * leases (lease.h) in a folder "leases" beside, first those of the own shard, then what is left. */
#ifndef MN_EXPERIMENTS_SWEEP_H
#define MN_EXPERIMENTS_SWEEP_H

#include <signal.h>

#include "experiments/job.h"

enum { MN_SWEEP_LANES = 256 };

typedef struct mn_sweep_lane {
    const json_t *job;           // NULL: idle
    double started;              // seconds of mn_seconds
    mn_job_progress now;
} mn_sweep_lane;

typedef struct mn_sweep_state {
    int64_t jobs, found, done, failed;     // found: done already before; done includes them
    int n_lanes;
    mn_sweep_lane lanes[MN_SWEEP_LANES];
    const json_t *ended;         // the record of a job that just ended, or NULL
} mn_sweep_state;

/* Called when something changed, and a few times a second. */
typedef void (*mn_sweep_tell)(void *context, const mn_sweep_state *state);

typedef struct mn_sweep_options {
    const char *path;            // the file of records
    int processes;               // 0: as many as there are cores; with a device one
    const char *device;          // where models are trained, "cuda"; NULL: the CPU
    int shard, shards;           // this sweep is one of `shards` over one folder; 0: the only one
    const volatile sig_atomic_t *stop;    // not 0: end what runs, start no more; may be NULL
    mn_sweep_tell tell;          // may be NULL
    void *context;
} mn_sweep_options;

/* `jobs` are completed. *state holds the counts at the end; failed jobs are no failure of the
 * sweep, their records tell why. Processes are forked: the caller's other threads must not hold
 * locks that jobs need. */
mn_status mn_sweep_run(mn_sweep_state *state, const json_t *jobs, const mn_sweep_options *options);

/* The last record of each key in the file, by key, new; an object without members when there is no
 * file. A line that was cut off at the end is passed over. */
mn_status mn_sweep_records(json_t **records, const char *path);

#endif
