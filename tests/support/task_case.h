/* task_case.h - tasks for tests: open by name, take samples, count, and judge the counts. */
#ifndef TESTS_SUPPORT_TASK_CASE_H
#define TESTS_SUPPORT_TASK_CASE_H

#include "support/check.h"
#include "tasks/task.h"

/* One task with room for a sample of it. */
typedef struct task_case {
    mn_task *task;
    mn_task_shape shape;
    int64_t n;                       // length
    int32_t *input, *target;
    float *x;                        // features, NULL for tokens
} task_case;

/* Options are written "key=value key=value". Fails the test when the task cannot be made. */
task_case task_open(const char *name, const char *changes);
void task_close(task_case *c);

/* The status of making such a task, which is destroyed again. */
mn_status task_try(const char *name, const char *changes);

/* Fills input (or x) and target. */
void task_take(task_case *c, uint64_t seed, mn_split split, int64_t index);

/* Targets of the sample. */
int64_t task_scored(const task_case *c);

/* ---- counts ---------------------------------------------------------------------------------- */

enum { TALLY_CELLS = 512 };

typedef struct tally {
    const char *what;
    int64_t n, count[TALLY_CELLS];
    double p[TALLY_CELLS];           // of each cell
} tally;

tally tally_even(const char *what, int64_t n);

/* The chi-square statistic with k = n - 1 degrees lies below k + 2 sqrt(k x) + 2 x, x = 14, which
 * chance passes with a probability below e^-14 = 8e-7 (Laurent and Massart, 2000, lemma 1). Every
 * cell has to expect 10. */
void tally_check(const tally *t);

/* Sum, squares and number of draws of a quantity; its mean lies within five standard errors of
 * `want`, and not further than `most` from it. */
typedef struct moments {
    double n, sum, squares;
} moments;

void moments_add(moments *m, double x);
double moments_mean(const moments *m);
double moments_variance(const moments *m);
void moments_check(const moments *m, const char *what, double want, double most);

#endif
