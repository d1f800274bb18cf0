/* demo.h - mneme demo: small models side by side learn to say where things are in stories.
 *
 *   source    stories of tasks/stories.h from a small source, so that the floor of the loss is known
 *   training  one thread per model, the same batches for each (demo_train.c)
 *   measuring loss against the floor and answers to questions on stories held out (demo_measure.c)
 *   writing   table and sample (demo_text.c), figures (demo_figures.c), results.json (demo_json.c) */
#ifndef MN_CLI_DEMO_H
#define MN_CLI_DEMO_H

#include "tasks/stories.h"
#include "train/trainer.h"

enum { MN_DEMO_MODELS = 4, MN_DEMO_SETS = 64, MN_DEMO_DISTANCES = 5, MN_DEMO_UPDATES = 3 };

typedef struct mn_demo_options {
    const char *out;
    const char *layers;               // models, between commas
    const char *sets[MN_DEMO_SETS];   // --set KEY=VALUE
    int n_sets;
    int steps, seconds;               // seconds of training at most
    int64_t seed;
    bool json, quiet;
} mn_demo_options;

/* What all models are given. */
typedef struct mn_demo_data {
    mn_stories_config source;
    mn_stories_means means;
    double floor;                     // bits per token of the source, exact
    mn_stories held;                  // stories no model is trained on
    mn_corpus *train;
    mn_tokenizer *tokenizer;
} mn_demo_data;

typedef struct mn_demo_point {
    int64_t step, tokens;
    double seconds, loss;             // bits per token, mean since the point before
} mn_demo_point;

typedef struct mn_demo_score {
    int64_t right, asked;
} mn_demo_score;

/* On the stories held out. */
typedef struct mn_demo_result {
    double loss, loss_error;          // bits per token, standard error over stories
    double floor;                     // the same of the source itself on these stories
    double gap, gap_error;            // loss - floor, story by story
    mn_demo_score all, distance[MN_DEMO_DISTANCES], updates[MN_DEMO_UPDATES];
} mn_demo_result;

typedef struct mn_demo_model {
    char layers[128];                 // as the configuration names them
    char name[128];                   // of its folder
    mn_context *context;
    mn_trainer *trainer;
    mn_demo_point *points;
    int64_t n_points;
    double seconds;                   // of training
    mn_demo_result result;
    mn_status status;                 // of its thread, and the message
    char error[512];
} mn_demo_model;

typedef struct mn_demo {
    const mn_demo_options *options;
    mn_demo_data data;
    int64_t steps;                    // of training, as many as the time allows
    mn_demo_model models[MN_DEMO_MODELS];
    int n_models;
} mn_demo;

/* "1-8" .. and the score a question belongs to. */
const char *mn_demo_distance_name(int bucket);
int mn_demo_distance_bucket(int64_t distance);
const char *mn_demo_updates_name(int bucket);
int mn_demo_updates_bucket(int64_t n_updates);

/* Share of right answers, and its standard error; NAN when nothing was asked. */
double mn_demo_share(const mn_demo_score *score);
double mn_demo_share_error(const mn_demo_score *score);

/* Source, corpora and tokenizer. */
mn_status mn_demo_data_make(mn_demo_data *out, uint64_t seed);
void mn_demo_data_free(mn_demo_data *data);

/* Makes the models, sees how many steps the time allows, trains them all at once. */
mn_status mn_demo_train(mn_demo *demo);

/* Fills `result` of a trained model. */
mn_status mn_demo_measure(mn_demo_model *model, const mn_demo_data *data);

#endif
