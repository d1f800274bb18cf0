/* reproduce_internal.h - what the figures of an experiment are put together from. */
#ifndef MN_CLI_REPRODUCE_REPRODUCE_INTERNAL_H
#define MN_CLI_REPRODUCE_REPRODUCE_INTERNAL_H

#include <stdbool.h>

#include "io/json.h"
#include "mneme.h"

/* Writes KIND-N.csv for whatever runs of `results` saw inside their models and, with `draw`,
 * KIND-N.gp with its pictures, whose names it adds to `figures`. Fails with MN_ERR_UNSUPPORTED when
 * gnuplot is not installed. */
mn_status mn_reproduce_pictures(json_t *figures, const mn_json *results, const char *folder,
                                bool draw);

#endif
