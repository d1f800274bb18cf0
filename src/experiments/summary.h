/* summary.h - what a sweep found: its runs by setting, means over seeds, the best setting.
 *
 * A setting is all labels of a job but "seed". Settings whose first label is the same (the layer,
 * in most grids) stand for one thing that was tried in several ways: the best of them is marked.
 * Best is the highest mean score over seeds; the lowest mean loss where runs have no score. */
#ifndef MN_EXPERIMENTS_SUMMARY_H
#define MN_EXPERIMENTS_SUMMARY_H

#include <stdbool.h>
#include <stdint.h>

#include "io/json.h"
#include "mneme.h"

enum { MN_SUMMARY_AXES = 16, MN_SUMMARY_LABEL = 64 };

/* Mean and its standard error over n numbers; se NAN for fewer than two, mean for none. */
typedef struct mn_estimate {
    int64_t n;
    double mean, se;
} mn_estimate;

typedef struct mn_setting {
    char labels[MN_SUMMARY_AXES][MN_SUMMARY_LABEL];    // one for each axis
    int64_t n, failed;             // runs done; failed
    mn_estimate score, loss, seconds;
    json_t *runs;                  // list of their records, borrowed in order of the file
    bool best;                     // of those with the same first label
} mn_setting;

typedef struct mn_summary {
    char axes[MN_SUMMARY_AXES][MN_SUMMARY_LABEL];      // in the order of the grid, without seed
    bool varies[MN_SUMMARY_AXES];  // more than one label
    int n_axes;
    mn_setting *settings;          // in the order of the jobs
    int64_t n;
    int64_t best;                  // of all; -1: none
    bool scored;                   // some run has a score
} mn_summary;

mn_estimate mn_estimate_of(const double *values, int64_t n);    // NANs are left out

/* `records` by key as mn_sweep_records gives them; `jobs` in their order, or NULL: in that of the
 * records. */
mn_status mn_summary_make(mn_summary *out, const json_t *records, const json_t *jobs);
void mn_summary_free(mn_summary *summary);

/* The axis of this name; -1: none. */
int mn_summary_axis(const mn_summary *summary, const char *name);

/* "gdn train.lr=0.001": the labels of axes that vary, without axis `but` (-1: with all). */
void mn_setting_title(char *text, size_t size, const mn_summary *summary,
                      const mn_setting *setting, int but);

/* FOLDER/runs.csv: a line a run; FOLDER/summary.csv: a line a setting. */
mn_status mn_summary_write(const mn_summary *summary, const char *folder);

#endif
