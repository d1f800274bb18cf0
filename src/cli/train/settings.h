/* settings.h - the configuration of mneme train: a file or texts, options and --set over it. */
#ifndef MN_CLI_TRAIN_SETTINGS_H
#define MN_CLI_TRAIN_SETTINGS_H

#include "cli/train/choose.h"
#include "io/json.h"
#include "train/trainer.h"

enum { MN_TRAIN_SETS = 256, MN_TRAIN_PATH = 4096 };

typedef struct mn_train_request {
    const char *inputs[MN_TRAIN_PATHS];    // CONFIG.json, or texts and folders to train on
    int n_inputs;
    const char *resume;          // a run's folder or one of its checkpoints; NULL: a new run
    const char *from;            // a model to begin with; NULL: none
    const char *sets[MN_TRAIN_SETS];
    int n_sets;
    mn_choice choice;
} mn_train_request;

/* Whether the first input is a configuration. */
bool mn_train_has_config(const mn_train_request *request);

/* Whether the size of the model is left to mneme, which goes by the speed of the machine. */
bool mn_train_chooses_size(const mn_train_request *request);

bool mn_train_holds_run(const char *folder);

/* The whole document, with paths from the root of the file system. `checkpoint` is where a resumed
 * run goes on from, "" for its last. */
mn_status mn_train_settings(mn_json *root, mn_train_request *request,
                            char checkpoint[MN_TRAIN_PATH]);

/* OUT/settings.json: every setting as it counts, the model's sizes, version and commit. */
mn_status mn_train_settings_save(mn_trainer *trainer, const char *device, int threads);

#endif
