/* job_keep.h - what a long training job leaves on the disk so that it can go on after a kill.
 *
 * A folder of its own for each job: checkpoints of the trainer, and state-N.json with what the job
 * knew at step N. A run that goes on ends with the numbers of one that never stopped. */
#ifndef MN_EXPERIMENTS_JOB_KEEP_H
#define MN_EXPERIMENTS_JOB_KEEP_H

#include "io/json.h"
#include "train/trainer.h"

/* Saves the trainer, whose "out" is `folder`, with `state` (stolen), and drops what was before. */
mn_status mn_keep_save(const char *folder, mn_trainer *trainer, json_t *state);

/* Takes up what was saved last: *state is new, or NULL when there is nothing to go on with. What
 * cannot be read is removed: the job then starts anew. */
void mn_keep_take(json_t **state, const char *folder, mn_trainer *trainer);

/* Removes the folder. */
void mn_keep_drop(const char *folder);

#endif
