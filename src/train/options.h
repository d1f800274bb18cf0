/* options.h - the configuration of a training run: one JSON object with "model", "data", "train"
 * and "out", and changes laid over it from the command line. */
#ifndef MN_TRAIN_OPTIONS_H
#define MN_TRAIN_OPTIONS_H

#include "io/json.h"
#include "layers/layer.h"

enum { MN_TRAIN_TEXT = 1024, MN_TRAIN_PATHS = 64 };

/* The largest numbers of steps, and of rows of a batch or tokens of a row. */
#define MN_TRAIN_STEPS 1099511627776
#define MN_TRAIN_ROW 16777216

typedef struct mn_train_group {
    double lr;         // times the schedule's learning rate
    bool decays;
} mn_train_group;

typedef struct mn_train_options {
#define INT(section, name, value, least, most, about) int64_t name;
#define REAL(section, name, value, least, most, about) double name;
#define FLAG(section, name, value, about) bool name;
#define TEXT(section, name, value, about) char name[MN_TRAIN_TEXT];
#include "train/train_options.def"
    char out[MN_TRAIN_TEXT];
    const char *train[MN_TRAIN_PATHS], *valid[MN_TRAIN_PATHS];    // borrowed from the document
    int n_train, n_valid;
    mn_train_group groups[MN_GROUP_COUNT];
} mn_train_options;

/* Lays "section.key=value" over the document, making objects on the way. The value is JSON if it
 * parses as such, text if not. */
mn_status mn_train_set(mn_json *root, const char *assignment);

/* Reads everything but "model", checking keys, types and ranges. */
mn_status mn_train_options_read(mn_train_options *out, const mn_json *root);

/* Every option as it counts, in sections as they are read, new; "model" is left out. */
mn_status mn_train_options_json(json_t **out, const mn_train_options *options);

/* One line per option: "train.lr  0.001  peak learning rate". */
typedef void (*mn_option_line)(void *context, const char *key, const char *value,
                               const char *about);
void mn_train_options_list(mn_option_line line, void *context);

/* Keys whose value names a file or folder, or a list of them. */
void mn_train_options_paths(void (*path)(void *context, const char *section, const char *name),
                            void *context);

#endif
