/* grid.h - a list of jobs written as the product of a few axes.
 *
 *   {"job": {...},                          what all have in common
 *    "grid": {"model": {"gdn": {...}, "kla": {...}},    laid over the job; the name is the label
 *             "train.lr": [0.001, 0.003],               set at that place; the value is the label
 *             "seed": [0, 1, 2]},
 *    "only": {"model": ["gdn"]},            leaves out the others
 *    "parts": [{"job": ..., "grid": ...}]}  several such products over the same beginning
 *
 * or {"jobs": [{...}, ...]}. Labels of every job go to its member "labels". */
#ifndef MN_EXPERIMENTS_GRID_H
#define MN_EXPERIMENTS_GRID_H

#include "io/json.h"
#include "mneme.h"

/* Completed jobs as a list, new. Fails on jobs that cannot be run, by their title. `also` (may be
 * NULL) is laid over every job. */
mn_status mn_grid_expand(json_t **jobs, const mn_json *grid, const json_t *also);

/* The same, of jobs alone that have, for each axis that `only` names ("AXIS=LABEL", n of them), one
 * of its labels. Changes the grid's member "only". Fails on a label that no job has. */
mn_status mn_grid_expand_only(json_t **jobs, const mn_json *grid, const json_t *also,
                              const char *const *only, int n);

#endif
