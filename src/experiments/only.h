/* only.h - some jobs of a grid, by their labels: --only model=gdn --only seed=0. */
#ifndef MN_EXPERIMENTS_ONLY_H
#define MN_EXPERIMENTS_ONLY_H

#include "io/json.h"
#include "mneme.h"

/* As mn_grid_expand, of jobs alone that have, for each axis that `only` names ("AXIS=LABEL", n of
 * them), one of its labels. Changes the grid's member "only". Fails on a label that no job has. */
mn_status mn_only_expand(json_t **jobs, const mn_json *grid, const json_t *also,
                         const char *const *only, int n);

#endif
