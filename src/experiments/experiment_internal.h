/* experiment_internal.h - how an experiment's file writes its plan: as JSON, its base, the common
 * part
 * and that of the preset laid over each other in this order. */
#ifndef MN_EXPERIMENTS_EXPERIMENT_INTERNAL_H
#define MN_EXPERIMENTS_EXPERIMENT_INTERNAL_H

#include "experiments/experiment.h"

#define MN_JSON_TEXT(...) #__VA_ARGS__

typedef struct mn_experiment_text {
    const struct mn_experiment_text *base;      // what several experiments share, or NULL
    const char *common, *preset[MN_PRESETS];    // NULL: nothing
    const char *notes[8];                       // sentences for the report, NULL behind the last
    mn_status (*add)(json_t *plan);             // what text cannot say, or NULL
    mn_status (*add_paper)(json_t *numbers);    // numbers kept elsewhere, or NULL
} mn_experiment_text;

#define EXPERIMENT(id, name, about, paper, smoke, cpu, gpu, full)                                  \
    extern const mn_experiment_text mn_experiment_##id;
#include "experiments/experiments.def"
#undef EXPERIMENT

/* Bases: base_NAME.c each. */
extern const mn_experiment_text mn_base_mqar;          // models and training of the MQAR family
extern const mn_experiment_text mn_base_mad_tasks;     // the six tasks of MAD, by preset
extern const mn_experiment_text mn_base_mad;           // one block, and its training, on these

#endif
