/* run_folder.h - where a run's files lie: OUT/checkpoints/step-N, and links OUT/last, OUT/best.
 *
 * A checkpoint is complete once its file "done" is there, which holds the hash of every other. */
#ifndef MN_TRAIN_RUN_FOLDER_H
#define MN_TRAIN_RUN_FOLDER_H

#include <stdbool.h>
#include <stdint.h>

#include "mneme.h"

enum { MN_RUN_PATH = 4096, MN_RUN_STEP = 32 };

/* FOLDER/NAME; fails when that is too long. */
mn_status mn_run_join(char path[MN_RUN_PATH], const char *folder, const char *name);

mn_status mn_run_make_folder(const char *path);     // being there already is fine
mn_status mn_run_make_folders(const char *out);     // the same, with its parents
mn_status mn_run_sync_folder(const char *path);     // brings the names in it to the disk
void mn_run_remove_folder(const char *path);        // with the files in it; missing is fine

/* MN_ERR_IO: "PATH: cannot WHAT: " and the system's reason. */
mn_status mn_run_io_fail(const char *what, const char *path);

/* "step-00000250" of a step, and the step of such a name; -1 for other names. */
void mn_run_step_name(char name[MN_RUN_STEP], int64_t step);
int64_t mn_run_step_of(const char *name);

/* OUT/LINK becomes a link to the checkpoint of `step`, in one move. */
mn_status mn_run_point(const char *out, const char *link, int64_t step);

/* The step OUT/LINK points to, -1 if none. */
int64_t mn_run_pointed(const char *out, const char *link);

/* The folder of the checkpoint of `step`, whether it is complete, and the latest step of a complete
 * one, -1 if there is none. */
mn_status mn_run_checkpoint(char path[MN_RUN_PATH], const char *out, int64_t step);
bool mn_run_has(const char *out, int64_t step);
int64_t mn_run_latest(const char *out);

/* Removes checkpoints behind `step` after pointing `last` at it, and `best` at `best_step` or
 * nothing, where they point behind it. Does nothing when OUT has no checkpoint of `step`. */
mn_status mn_run_go_back(const char *out, int64_t step, int64_t best_step);

/* Removes what is neither last nor best nor of a step that `keep_every` divides (0: none), and
 * what was left half written. */
void mn_run_prune(const char *out, int64_t keep_every);

/* Removes all that a run has written to OUT: checkpoints, links, metrics and event files. */
mn_status mn_run_clear(const char *out);

/* Writes FOLDER/done over the files in it, and fails unless they are as it says. */
mn_status mn_run_seal(const char *folder);
mn_status mn_run_check_seal(const char *folder, bool quick);    // quick: sizes and heads of files

/* The seal of a folder that a model is about to be read from, if it has one: quickly, or with `all`
 * every byte, which then needs a seal. */
mn_status mn_run_check_model(const char *folder, bool all);

#endif
