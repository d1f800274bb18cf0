/* run_values.h - what is measured at a step of a run: numbers with names. */
#ifndef MN_TRAIN_RUN_VALUES_H
#define MN_TRAIN_RUN_VALUES_H

#include <stdint.h>

typedef struct mn_run_value {
    const char *name;     // such as "loss"
    double value;
} mn_run_value;

#endif
