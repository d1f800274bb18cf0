/* eval_task.h - mneme eval --task: what part of a task's questions a model answers. */
#ifndef MN_CLI_EVAL_EVAL_TASK_H
#define MN_CLI_EVAL_EVAL_TASK_H

#include "io/json.h"
#include "model/model.h"

typedef struct mn_eval_task_ask {
    const char *task, *model;        // the model's folder: its tokenizer, where the task takes one
    json_t *options;                 // of the task; borrowed
    int64_t rows;                    // samples of the test split
    bool json;
} mn_eval_task_ask;

/* Asks the test split and sets "task" of `root`; prints a table unless `json`. */
mn_status mn_eval_task(json_t *root, mn_context *context, mn_model *model,
                       const mn_eval_task_ask *ask);

#endif
