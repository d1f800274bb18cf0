/* task_run.h - the task of a job: batches to train on, and questions to a model. */
#ifndef MN_EXPERIMENTS_TASK_RUN_H
#define MN_EXPERIMENTS_TASK_RUN_H

#include "io/json_write.h"
#include "model/model.h"
#include "tasks/metric.h"
#include "tasks/task.h"

typedef struct mn_task_run mn_task_run;

/* Of "evaluate", see job_train.c; `every` in steps, 0: only at the end. */
typedef struct mn_evaluation {
    int64_t every, patience, batch;
    double stop_at;
    const char *metric;
    bool by_loss;
} mn_evaluation;

/* From a job whose task and defaults are complete; borrows it. */
mn_status mn_task_run_open(mn_task_run **out, const mn_json *job);
void mn_task_run_close(mn_task_run *run);    // NULL accepted

int64_t mn_task_run_epoch(const mn_task_run *run);      // steps; 0: fresh examples
int64_t mn_task_run_vocab(const mn_task_run *run);      // of inputs and targets
int64_t mn_task_run_longest(const mn_task_run *run);    // tokens, of all sets
const mn_evaluation *mn_task_run_evaluation(const mn_task_run *run);

/* Example `index` of the test set: mn_task_run_longest tokens and targets at most, *length of them.
 * *text (may be NULL) is the example as text where the task is text; its memory is the run's. */
mn_status mn_task_run_example(mn_task_run *run, int64_t index, int32_t *tokens, int32_t *targets,
                              int64_t *length, mn_task_text *text);

/* The task of the test set, borrowed, and the seed its samples are drawn with. */
mn_task *mn_task_run_asked(mn_task_run *run, uint64_t *seed);

/* Training batches; borrows the run. */
mn_source mn_task_run_source(mn_task_run *run);

/* Answers to the test set: {"loss", "token", "macro", "example", "sequence", "answers", "groups"}.
 * *score is the one that the job's metric names. */
mn_status mn_task_run_ask(json_t **answers, double *loss, double *score, mn_task_run *run,
                          mn_tape *tape, mn_model *model);

/* The same for each of the job's further tests, by name; NULL when it has none. */
mn_status mn_task_run_tests(json_t **answers, mn_task_run *run, mn_tape *tape, mn_model *model);

#endif
