/* sweep.h - a sweep in front of a user: signals, a table of what runs, and lines of what ended. */
#ifndef MN_CLI_SWEEP_H
#define MN_CLI_SWEEP_H

#include <stdbool.h>

#include "experiments/sweep.h"

enum { MN_SWEEP_PATH = 4096 };

/* Makes `folder` and runs the jobs into FOLDER/results.jsonl, or as shard `shard` of `shards` (0:
 * none) into FOLDER/results-SHARD-of-SHARDS.jsonl; models on `device` (NULL: the CPU).
 * The first Ctrl-C ends it in order. The exit status: 0, 1 when a job failed or the sweep did (told
 * on standard error), 130 when stopped. */
int mn_sweep_show(const char *verb, const char *folder, const json_t *jobs, int processes,
                  const char *device, int shard, int shards, bool quiet);

/* Ends the sweeps of this process in order after so many minutes, as the first Ctrl-C does. */
void mn_sweep_stop_after(int minutes);

/* The table of what a sweep found on standard output, unless `quiet`, and FOLDER/runs.csv and
 * summary.csv. The exit status. */
int mn_sweep_table(const char *folder, const json_t *jobs, bool quiet);

#endif
