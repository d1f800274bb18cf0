/* run_log.h - what a run measures, written down as it goes: metrics.jsonl for programs and people,
 * and an event file for TensorBoard. Both only ever grow, and each line is in the file before the
 * call returns, so a run that dies keeps what it had. */
#ifndef MN_TRAIN_RUN_LOG_H
#define MN_TRAIN_RUN_LOG_H

#include <stdbool.h>

#include "mneme.h"
#include "train/run/run_values.h"

typedef struct mn_run_log mn_run_log;

#define MN_RUN_METRICS "metrics.jsonl"

enum { MN_RUN_NEW = -1 };    // as `resumed_step`: nothing was there before

/* Opens the logs in `folder`, which has to exist; `events` asks for the file for TensorBoard
 * too.
 *
 * A new run refuses a folder whose metrics.jsonl holds lines. A resumed one cuts metrics.jsonl
 * behind the last line of steps up to `resumed_step`, together with a line left half written, so
 * that repeated steps are there once; lines before are not touched. When that file is malformed
 * before the cut, nothing is changed. On failure `*out` is NULL. */
mn_status mn_run_log_open(mn_run_log **out, const char *folder, int64_t resumed_step, bool events);

/* Appends {"step":STEP,"NAME":VALUE,...} and the same to the event file. Whole numbers are written
 * without fraction; NaN and infinities as null. Steps must not go back, names must differ. */
mn_status mn_run_log_write(mn_run_log *log, int64_t step, const mn_run_value *values,
                           int64_t n_values);

/* Brings everything to the disk and closes; NULL is fine. */
mn_status mn_run_log_close(mn_run_log *log);

#endif
