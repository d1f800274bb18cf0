/* metric.h - how many answers are right, counted in the ways the papers count.
 *
 *   token      right answers / answers
 *   macro      mean over batches of the mean recall of a class, over the classes that are an answer
 *              or a wrong prediction in that batch: tp / (tp + fn), 0 where only predicted
 *   example    mean over sequences of the part of right answers
 *   sequence   part of the sequences whose answers are all right
 *
 * Only places with a target count; sequences and batches without one are left out. */
#ifndef MN_TASKS_METRIC_H
#define MN_TASKS_METRIC_H

#include <stdint.h>

#include "mneme.h"

typedef struct mn_metric mn_metric;

typedef struct mn_metric_result {
    double token, macro, example, sequence;    // NAN when nothing was asked
    int64_t answers, right, sequences, batches;
} mn_metric_result;

/* `n_classes`: targets and predictions are below it. `n_groups` kinds of answers are counted apart,
 * 0 for none. */
mn_status mn_metric_create(mn_metric **out, int64_t n_classes, int n_groups);
void mn_metric_destroy(mn_metric *metric);    // NULL accepted

/* Counts a batch of `rows` sequences of `length`. `groups` (as mn_task_group has it) may be NULL.
 * On failure nothing is counted. */
mn_status mn_metric_add(mn_metric *metric, const int32_t *predictions, const int32_t *targets,
                        const int8_t *groups, int64_t rows, int64_t length);

/* Of everything since the beginning, or since mn_metric_reset. */
mn_metric_result mn_metric_read(const mn_metric *metric);
void mn_metric_reset(mn_metric *metric);

/* Right answers / answers of a group; NAN when there was none. */
double mn_metric_group(const mn_metric *metric, int group);

#endif
