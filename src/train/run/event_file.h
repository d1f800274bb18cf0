/* event_file.h - curves for TensorBoard: a file of records that grows while a run goes on. */
#ifndef MN_TRAIN_EVENT_FILE_H
#define MN_TRAIN_EVENT_FILE_H

#include "mneme.h"
#include "train/run/run_values.h"

typedef struct mn_event_file mn_event_file;

/* Makes a new file in `folder`, events.out.tfevents.<unix time>.<host>, with a number behind it if
 * that name is taken. With `resumed_step` >= 0 a mark tells TensorBoard to forget what other files
 * of the folder say about later steps. On failure `*out` is NULL. */
mn_status mn_event_file_create(mn_event_file **out, const char *folder, int64_t resumed_step);

/* Appends one record with all values, as of now. They are float32 there; NaN stays NaN. */
mn_status mn_event_file_write(mn_event_file *file, int64_t step, const mn_run_value *values,
                              int64_t n_values);

/* Where it is written. */
const char *mn_event_file_path(const mn_event_file *file);

/* Closes it; NULL is fine. */
mn_status mn_event_file_close(mn_event_file *file);

#endif
