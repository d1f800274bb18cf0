/* pilot.h - settings such as learning rates chosen on seeds that are not reported.
 *
 *   pilot   {"seeds": [100], "axes": ["train.lr"], "value": way into a result, "least": true,
 *            "steps": at most in these runs}
 *
 * Jobs that differ in `axes` and the seed alone are settings of one row: each runs with the pilot's
 * seeds first, and those of the largest mean value ("least": the smallest) run with the seeds that
 * are reported. Runs of the pilot have the label "pilot" and stand in no table. */
#ifndef MN_EXPERIMENTS_PILOT_H
#define MN_EXPERIMENTS_PILOT_H

#include "io/json.h"
#include "mneme.h"

/* What to run first, new: no jobs where there is no choice. `pilot` may be NULL. */
mn_status mn_pilot_jobs(json_t **out, const json_t *jobs, const json_t *pilot);

/* The jobs of the chosen settings, new; `first` and their records by key. Settings that failed or
 * were not run are not chosen; where none was, all jobs of the row are left out. */
mn_status mn_pilot_choose(json_t **out, const json_t *jobs, const json_t *pilot,
                          const json_t *first, const json_t *records);

/* Whether every row of `jobs` has a setting among `chosen`: a pilot whose runs failed, as those of
 * too high a learning rate do, still chooses where another setting of the row went through. */
bool mn_pilot_covers(const json_t *jobs, const json_t *chosen, const json_t *pilot);

/* The jobs that run after the pilot, new: those of `chosen`, and of rows whose setting is open yet
 * the first setting. */
mn_status mn_pilot_expected(json_t **out, const json_t *jobs, const json_t *chosen,
                            const json_t *pilot);

#endif
