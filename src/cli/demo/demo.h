/* demo.h - mneme demo: small models side by side learn to say where things are in stories.
 *
 *   data.c      stories from a small source, whose entropy is the floor of the loss
 *   train.c     one thread per model, the same batches for each
 *   measure.c   loss against the floor, and answers to questions, on stories held out
 *   sample.c    how a model goes on with a story, and how sure its memory was
 *   knowing.c   questions that cannot be answered yet, told from others
 *   text.c      the table and the sample, for people
 *   files.c     models, curves, results.json
 *   figures.c   loss and recall as SVG and PNG */
#ifndef MN_CLI_DEMO_DEMO_H
#define MN_CLI_DEMO_DEMO_H

#include <jansson.h>

#include "tasks/stories.h"
#include "train/trainer.h"

enum {
    MN_DEMO_MODELS = 4, MN_DEMO_SETS = 64, MN_DEMO_NAME = 128,
    MN_DEMO_DISTANCES = 5, MN_DEMO_UPDATES = 3,
    MN_DEMO_GROUPS = 1 + MN_DEMO_DISTANCES + MN_DEMO_UPDATES,
};

typedef struct mn_demo_options {
    const char *out, *layers;
    const char *sets[MN_DEMO_SETS];   // KEY=VALUE, for the configuration of every model
    int n_sets;
    int steps, seed;
    int seconds;                      // of training, at most
    bool json, quiet;
} mn_demo_options;

/* What all models are given. */
typedef struct mn_demo_data {
    mn_stories_config source;
    double floor;                     // bits per token of the source, exact
    mn_stories held;                  // stories no model is trained on
    mn_corpus *train;
    mn_tokenizer *tokenizer;
} mn_demo_data;

typedef struct mn_demo_point {
    int64_t step, tokens;
    double seconds, loss;             // bits per token, mean since the point before
} mn_demo_point;

/* Questions of one kind: how many, how many answered rightly, and the sum of the variances that
 * were read at them. */
typedef struct mn_demo_score {
    int64_t asked, right;
    double variance;
} mn_demo_score;

/* On the stories held out. Group 0 is all questions, then come distances, then updates. */
typedef struct mn_demo_result {
    double loss, loss_error;          // bits per token, standard error over stories
    double floor;                     // the same of the source itself on these stories
    double gap, gap_error;            // loss - floor, story by story
    mn_demo_score groups[MN_DEMO_GROUPS];
} mn_demo_result;

typedef struct mn_demo_model {
    char layers[MN_DEMO_NAME];        // as a configuration says it
    char name[MN_DEMO_NAME];          // in tables, and of its folder
    mn_context *context;
    mn_trainer *trainer;
    mn_demo_point *points;
    int64_t n_points;
    double seconds;                   // of training
    mn_demo_result result;
    mn_status status;                 // of its thread, and the message
    char error[512];
} mn_demo_model;

/* A story begun by the source and continued by a model. */
typedef struct mn_demo_sample {
    const mn_demo_model *model;
    int32_t *tokens;
    double *variance;                 // of what was read with each token; NAN: the model tells none
    int64_t n_tokens, n_given;        // the first n_given are the source's
    int64_t asked, right;             // questions of its own, answered as its own story has it
} mn_demo_sample;

/* A question in the middle of a story, and how much it seems that it cannot be answered yet. */
typedef struct mn_demo_doubt {
    int32_t object;                   // word id
    bool unknown;                     // the story has not named it
    double doubt;                     // 0 to 1
} mn_demo_doubt;

/* Whether a model tells questions that cannot be answered yet from others. */
typedef struct mn_demo_knowing {
    const mn_demo_model *model;
    int64_t asked;
    bool believes;                    // it has layers that keep a posterior
    double auroc[3];                  // by entropy, by belief, by both
    int32_t story[64];                // an example: a story broken off, and questions
    int64_t n_story;
    mn_demo_doubt questions[8];
    int n_questions;
} mn_demo_knowing;

typedef struct mn_demo {
    const mn_demo_options *options;
    mn_demo_data data;
    int64_t steps;                    // of training, as many as the time allows
    mn_demo_model models[MN_DEMO_MODELS];
    int n_models;
    mn_demo_sample sample;
    mn_demo_knowing knowing;
    bool figures;                     // were drawn
} mn_demo;

/* ---- data ------------------------------------------------------------------------------------ */

mn_status mn_demo_data_make(mn_demo_data *out, uint64_t seed);
void mn_demo_data_free(mn_demo_data *data);

/* The share of answers that are right by naming any place. */
double mn_demo_chance(const mn_demo_data *data);

/* ---- training and measuring ------------------------------------------------------------------ */

/* Makes the models, sees how many steps the time allows, trains and measures all at once. */
mn_status mn_demo_train(mn_demo *demo);

/* Fills `result` of a trained model. */
mn_status mn_demo_measure(mn_demo_model *model, const mn_demo_data *data);

/* "all", "9-16", "3+", and what it counts: "", "tokens ago", "updates". */
const char *mn_demo_group_name(int group);
const char *mn_demo_group_unit(int group);

/* Share of right answers, its standard error, and the mean variance; NAN when nothing was asked. */
double mn_demo_share(const mn_demo_score *score);
double mn_demo_share_error(const mn_demo_score *score);
double mn_demo_variance(const mn_demo_score *score);

/* The first model that tells variances (else the first) goes on with a story. */
mn_status mn_demo_sample_make(mn_demo *demo);
void mn_demo_sample_free(mn_demo_sample *sample);

/* The same model is asked what stories have not said; behind mn_demo_sample_make. */
mn_status mn_demo_knowing_make(mn_demo *demo);
json_t *mn_demo_knowing_json(const mn_demo_knowing *knowing);
void mn_demo_knowing_print(const mn_demo_knowing *knowing);

/* ---- results --------------------------------------------------------------------------------- */

/* Prints words of a story, in lines. */
mn_status mn_demo_words(const int32_t *tokens, int64_t n);

/* What the stories are, before training. */
mn_status mn_demo_introduce(const mn_demo *demo);

mn_status mn_demo_print(const mn_demo *demo);

/* Models as folders, the held-out stories as text, curves and scores as CSV. */
mn_status mn_demo_write(const mn_demo *demo);

/* The document of results.json; NULL when out of memory. */
json_t *mn_demo_results(const mn_demo *demo);

/* Draws loss and recall from the CSV files. */
mn_status mn_demo_draw(const mn_demo *demo);

#endif
