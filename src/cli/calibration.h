/* calibration.h - mneme eval --calibration: does a model know what it knows? */
#ifndef MN_CLI_CALIBRATION_H
#define MN_CLI_CALIBRATION_H

#include "io/json.h"
#include "model/model.h"
#include "data/corpus.h"

/* What is asked: the next tokens of a corpus, or the questions of a task. */
typedef struct mn_calibration_ask {
    const mn_corpus *corpus;         // NULL: a task
    const char *task;
    const mn_json *task_options;
    int64_t rows, length;            // windows or samples of each half; tokens of a window
    uint64_t seed;                   // of the samples
    const char *save;                // file for the calibrator, or NULL
    bool quiet, json;
} mn_calibration_ask;

/* Asks, chooses and fits on one half and reports the other: windows of a corpus in turn, or the
 * validation and test splits of a task. Prints tables unless `json`, and sets "calibration" of
 * `root` (eval/knowing.h). */
mn_status mn_calibration_measure(json_t *root, mn_context *context, mn_model *model,
                                 const mn_calibration_ask *ask);

#endif
