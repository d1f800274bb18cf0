/* reproduce.h - the figures of an experiment's report, and what it would cost. */
#ifndef MN_CLI_REPRODUCE_REPRODUCE_H
#define MN_CLI_REPRODUCE_REPRODUCE_H

#include "io/json.h"
#include "mneme.h"

/* Draws the tables of `results` that want a figure into `folder` as table-N.svg and .png, from
 * scripts table-N.gp that hold their data, and sets "figures", the names, or "no_figures", why
 * there are none. Missing gnuplot is no failure. */
mn_status mn_reproduce_figures(const mn_json *results, const char *folder);

/* What `jobs` would cost, new: {"rows": [{"row", "runs", "done", "steps_left", "seconds_a_step",
 * "seconds_left"}], "seconds_left"}. Seconds are null where no run like these is among `records`
 * (by key); those of runs that shared a device with others hold for as many again. */
mn_status mn_reproduce_plan(json_t **plan, const json_t *jobs, const json_t *pilot,
                            const json_t *records);
void mn_reproduce_plan_show(const json_t *plan);

#endif
