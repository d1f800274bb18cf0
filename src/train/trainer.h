/* trainer.h - one training run: model, optimiser, data, and what must be kept to go on with it.
 *
 *   mn_trainer_create(&t, &root, context);  or  mn_trainer_resume(&t, folder, ...);
 *   while (mn_trainer_step_number(t) < steps) mn_trainer_step(t, &result);
 *   mn_trainer_save(t, ...); mn_trainer_destroy(t);
 *
 * A resumed run goes on with the bits of one that never stopped. */
#ifndef MN_TRAIN_TRAINER_H
#define MN_TRAIN_TRAINER_H

#include "data/loader.h"
#include "tokenizer/tokenizer.h"
#include "model/model.h"
#include "ranks/comm.h"
#include "train/options.h"

typedef struct mn_trainer mn_trainer;

/* What a run will hold at most, in bytes. */
typedef struct mn_train_memory {
    size_t parameters;      // values, gradients and two moments
    size_t activations;     // the step arena
    size_t work;            // work space of operators
    size_t data;            // tokens and batches
    size_t total;
} mn_train_memory;

typedef struct mn_step_result {
    int64_t step;           // of this update, from 0
    double loss;            // mean over the batches of the step, in nats per token
    double grad_norm, lr;
    int64_t tokens;         // targets counted
    bool skipped;           // a spike: no update was made
    bool stop;              // some rank was asked to stop (mn_trainer_ask_stop)
    /* seconds of this rank: computing, in messages, waiting for the slowest rank, which is named */
    double compute, communicate, wait;
    int slowest;
} mn_step_result;

/* Everything from the document: reads the data, makes the tokenizer and the model. Borrows `root`
 * and `context`. */
mn_status mn_trainer_create(mn_trainer **out, const mn_json *root, mn_context *context);

/* The same to ask mn_trainer_predict and no more: on the CPU no number of the model is touched, so
 * that none takes memory. */
mn_status mn_trainer_create_dry(mn_trainer **out, const mn_json *root, mn_context *context);

/* Tokens that are in memory already, or batches that something makes (tasks): then model.vocab_size
 * has to be given, and train.batch and train.context are those of the source. What contexts and
 * pointers lead to is borrowed by the runs made from it. */
typedef struct mn_train_data {
    const mn_corpus *train, *valid;    // valid NULL: nothing is held out
    const mn_source *train_source, *valid_source;    // in their place, where train is NULL
    const mn_tokenizer *tokenizer;     // saved with the model; NULL: none
} mn_train_data;

/* The same with `data` in place of the files of the document, which then has to name none. */
mn_status mn_trainer_create_from(mn_trainer **out, const mn_json *root, const mn_train_data *data,
                                 mn_context *context);

/* One rank's part of a run on several: batches and optimiser are shared out, and every call below
 * is made by all ranks together. The same document gives the same bits on any number of ranks.
 * `comm` is borrowed; NULL: one rank. `data` may be NULL. */
mn_status mn_trainer_create_rank(mn_trainer **out, const mn_json *root, const mn_train_data *data,
                                 mn_comm *comm, mn_context *context);
void mn_trainer_destroy(mn_trainer *trainer);    // NULL accepted

mn_status mn_trainer_predict(mn_trainer *trainer, mn_train_memory *memory);

/* One optimiser step. A loss or gradient that is not finite fails with a message that names the
 * first tensor that went wrong, and changes nothing. */
mn_status mn_trainer_step(mn_trainer *trainer, mn_step_result *result);

/* After the next step every rank's result says stop. */
void mn_trainer_ask_stop(mn_trainer *trainer);

/* Mean loss over the validation data (or the first eval_batches), NAN when there is none. *best: it
 * is finite and better than all before. Counts towards patience. */
mn_status mn_trainer_evaluate(mn_trainer *trainer, double *loss, bool *best);

/* Stopped early: patience is used up. */
bool mn_trainer_exhausted(const mn_trainer *trainer);

/* Writes OUT/checkpoints/step-N as a model folder with the state of the optimiser, points OUT/last
 * (and OUT/best) at it, and removes the ones that neither needs. What was there before stays until
 * the new one is complete. */
mn_status mn_trainer_save(mn_trainer *trainer, bool best);

/* Takes up the state of a checkpoint: OUT/last, or the checkpoint at `path`. Refused are bytes that
 * changed since they were written, and another model, tokenizer, seed or training data than the run
 * had; the other options count from here on. Checkpoints of later steps in OUT are removed. */
mn_status mn_trainer_resume(mn_trainer *trainer, const char *path);

/* Puts the weights of train.from, where it names a model, in the place of those a run that has done
 * no step yet begins with. */
mn_status mn_trainer_begin(mn_trainer *trainer);

/* Of a dry run whose sequences are cut over ranks: tells each operator that looks beyond one token,
 * and how it crosses them ("maps", "tails", "keys", "pipeline"). Nothing for whole sequences. */
typedef void (*mn_way_fn)(void *context, const char *op, const char *way);
mn_status mn_trainer_sequence_ways(mn_trainer *trainer, mn_way_fn tell, void *context);

/* Where parameters are sharded, all ranks get all values until the next step; evaluations and
 * checkpoints do so themselves. */
mn_status mn_trainer_whole(mn_trainer *trainer);

/* Text written by the model as it is, to be freed. Values are whole (mn_trainer_whole). */
mn_status mn_trainer_sample(mn_trainer *trainer, char **text);

int64_t mn_trainer_step_number(const mn_trainer *trainer);     // steps done
int64_t mn_trainer_seen(const mn_trainer *trainer);            // targets trained on
double mn_trainer_best(const mn_trainer *trainer);             // NAN: none yet
const mn_train_options *mn_trainer_options(const mn_trainer *trainer);
mn_model *mn_trainer_model(mn_trainer *trainer);
const mn_corpus *mn_trainer_held_out(const mn_trainer *trainer);    // NULL: nothing is
const mn_tokenizer *mn_trainer_tokenizer(const mn_trainer *trainer);
int64_t mn_trainer_tokens(const mn_trainer *trainer, bool valid);
uint64_t mn_trainer_data_mark(const mn_trainer *trainer);      // changes with data and tokenizer

#endif
