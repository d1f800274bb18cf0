/* experiment.h - the papers' experiments: what each runs at which size, and what its report shows.
 *
 * A plan is JSON: {"grid": see grid.h, "tables": see cells.h, "claims": see claims.h,
 * "notes": [sentences], "pilot": see pilot.h, "needs_text": true where only the user can bring the
 * text to train on}. Rows of experiments.def, one file papers/ID.c each; what papers print is in
 * paper_numbers.def. */
#ifndef MN_EXPERIMENTS_EXPERIMENT_H
#define MN_EXPERIMENTS_EXPERIMENT_H

#include "io/json.h"
#include "mneme.h"

typedef enum mn_preset {
    MN_PRESET_SMOKE,
    MN_PRESET_CPU,
    MN_PRESET_GPU,
    MN_PRESET_FULL,
    MN_PRESETS
} mn_preset;

const char *mn_preset_name(mn_preset preset);
bool mn_preset_find(mn_preset *out, const char *name);

typedef struct mn_experiment {
    const char *name, *about, *paper;
    const char *cost[MN_PRESETS];    // NULL: there is no such preset
} mn_experiment;

int mn_experiment_count(void);
mn_experiment mn_experiment_row(int i);

/* The row of this name, or a failure that suggests one. */
mn_status mn_experiment_find(int *out, const char *name);

/* The plan of row `i`, new. */
mn_status mn_experiment_plan(json_t **plan, int i, mn_preset preset);

/* The text at `path` (a file, or a folder as bench/language makes it) for an experiment that trains
 * on text, in the place of what its jobs would make themselves. NULL: fails where the plan says
 * "needs_text", and says how to make some. */
mn_status mn_experiment_take_data(json_t *plan, const char *name, const char *path);

/* What its papers print: [{"table", "row", "column", "printed", "place"}], new. */
mn_status mn_experiment_paper(json_t **numbers, int i);

/* Everything a report needs, from a plan, its jobs and their records by key, and the command that
 * gives these again: results.json, new. */
mn_status mn_experiment_results(json_t **results, int i, mn_preset preset, const char *command,
                                const json_t *plan, const json_t *jobs, const json_t *records);

#endif
