/* trainer_internal.h - the inside of a training run, shared by the files of this folder. */
#ifndef MN_TRAIN_TRAINER_INTERNAL_H
#define MN_TRAIN_TRAINER_INTERNAL_H

#include "optim/optim.h"
#include "optim/optimizer_device.h"
#include "ranks/nccl.h"
#include "train/distill.h"
#include "train/reduce.h"
#include "train/trainer.h"

enum { MN_SPIKE_WINDOW = 128 };

/* What a run on a GPU has beside (trainer_device.c). */
typedef struct mn_trainer_device mn_trainer_device;

/* What a run on the GPUs of several ranks has beside that (trainer_gpus.c). */
typedef struct mn_trainer_gpus mn_trainer_gpus;

/* What a run whose sequences are cut over ranks has beside (trainer_cut.c). */
typedef struct mn_trainer_cut mn_trainer_cut;

/* What a run in the host's memory has beside (trainer_ranks.c). */
typedef struct mn_trainer_ranks mn_trainer_ranks;

struct mn_trainer {
    mn_train_options options;
    mn_context *context;
    mn_comm *comm;                   // NULL: the only rank
    mn_trainer_ranks *ranks;         // NULL on a GPU
    mn_trainer_cut *cut;             // NULL: every rank has whole sequences
    bool stop;                       // this rank was asked to
    const mn_tokenizer *tokenizer;   // NULL: data are tokens already
    mn_tokenizer *own_tokenizer;     // the same, unless it was given
    bool dry;                        // only asked what it would take
    bool text;                       // some data are text, whose tokens are held in memory
    mn_corpus *train, *valid, *all;  // all: what both are parts of; valid may be NULL, and all
                                     // is when tokens were given
    mn_loader *train_loader, *valid_loader;
    mn_token_batch batch, valid_batch;
    mn_model *model;
    mn_dtype dtype;                  // of passes
    mn_distill *distill;             // NULL: there is no teacher
    mn_optimizer *optimizer;         // NULL on a GPU
    mn_trainer_device *there;         // NULL on the CPU
    mn_schedule schedule;
    mn_tape *tape;
    mn_recompute recompute;

    /* what a checkpoint keeps beside weights and moments */
    int64_t step, tokens;            // steps done, tokens trained on
    double best;                     // NAN: not evaluated yet
    int64_t best_step, worse;        // evaluations since the best one
    double recent[MN_SPIKE_WINDOW];  // losses of the last steps
    int64_t n_recent;

    int64_t saved;                   // step that this process has a checkpoint of; -1: none
    uint64_t draw;                   // number of the batch, for what is drawn in it
};

/* Tokenizer, corpora and loaders, from files or from what is `given` (NULL: files). vocab_size 0:
 * the tokenizer's, which is then set. */
mn_status mn_trainer_open_data(mn_trainer *trainer, const mn_train_data *given,
                               int64_t *vocab_size);
void mn_trainer_close_data(mn_trainer *trainer);

/* Changes with the tokenizer; 0: none. */
uint64_t mn_trainer_tokenizer_mark(const mn_trainer *trainer);

/* One batch forward and, where the modes record, backward. `weight` of its mean loss in the
 * gradient. On a GPU loss and count are there after mn_tape_results. */
mn_status mn_trainer_pass(mn_trainer *trainer, mn_tape *tape, const mn_token_batch *batch,
                          unsigned modes, bool add, double weight, double *loss,
                          int64_t *counted);

/* Makes of the failure of a batch (MN_OK: it went through), or of its loss, a sentence that names
 * what went wrong first. */
mn_status mn_trainer_explain(mn_trainer *trainer, const mn_token_batch *batch, int64_t number,
                             mn_status failure, double loss);

/* Deviations of `loss` above the mean of the last steps; 0 until there are enough. */
double mn_trainer_spike(const mn_trainer *trainer, double loss);

/* Moments to and from a checkpoint's folder, on each rank those it owns. Without `apply` it is only
 * checked that they are there and fit. */
mn_status mn_trainer_save_moments(mn_trainer *trainer, const char *folder);
mn_status mn_trainer_load_moments(mn_trainer *trainer, const char *folder, bool apply);

/* ---- in the host's memory, on one rank or several -------------------------------------------- */

mn_status mn_trainer_ranks_create(mn_trainer *trainer, const mn_optim_param *params,
                                  int64_t n_params, const mn_adamw_options *how);
void mn_trainer_ranks_destroy(mn_trainer_ranks *ranks);    // NULL accepted

/* Whether the run's batches and sequences can be shared out to its ranks. */
mn_status mn_trainer_check_ranks(const mn_trainer *trainer);

/* Whether nothing reads parameters of a block elsewhere than while it is at work
 * (train.shard=parameters). */
mn_status mn_trainer_check_request(const mn_trainer *trainer);

/* Bytes of parameters, gradients, moments and sums of gradients of this rank. */
size_t mn_trainer_ranks_bytes(const mn_trainer *trainer);

/* Where train.sequence_ranks cuts sequences over ranks, whose GPUs talk by `nccl` (NULL: they
 * compute on the host). Then each pass makes of `batch` this rank's part, whose operators the tape
 * runs with the other ranks', and tells what share of the batch's targets it has. */
mn_status mn_trainer_cut_create(mn_trainer *trainer, mn_nccl *nccl);
void mn_trainer_cut_destroy(mn_trainer_cut *cut);    // NULL accepted
void mn_trainer_cut_pass(mn_trainer *trainer, mn_tape *tape, const mn_token_batch **batch,
                         double *share);

/* Which of moments, gradients and values ranks share out: train.shard. */
typedef enum mn_train_shard {
#define SHARD(id, name, about) MN_SHARD_##id,
#include "train/shards.def"
#undef SHARD
} mn_train_shard;
mn_status mn_trainer_find_shard(mn_train_shard *out, const mn_trainer *trainer);

/* Of mn_model_input, with the trainer: block `block` wants its values, has its gradients. */
void mn_trainer_enter(void *trainer, int block);
void mn_trainer_ready(void *trainer, int block);

/* Whether values are somewhere else than here between steps. */
bool mn_trainer_on_request(const mn_trainer *trainer);

/* The batches of a step and the update. */
mn_status mn_trainer_step_host(mn_trainer *trainer, mn_step_result *result);

/* Batch i of an evaluation is this rank's. */
bool mn_trainer_evaluates(const mn_trainer *trainer, int64_t i);

/* Losses and counts (n) of all ranks, each from whose batch it is. */
mn_status mn_trainer_gather(mn_trainer *trainer, double *losses, int64_t *counts, int64_t n);

/* ---- on a GPU -------------------------------------------------------------------------------- */

mn_status mn_trainer_device_create(mn_trainer *trainer, const mn_optim_param *params,
                                  int64_t n_params, const mn_adamw_options *how);
void mn_trainer_device_destroy(mn_trainer_device *there);    // NULL accepted
/* Which rows of the trainer's batch the loss has to go through, on a device; of others all. */
void mn_trainer_order(mn_trainer *trainer, const mn_token_batch *batch, mn_loss_options *how);

/* The tape of passes that are no steps; the only one of a run on the CPU. */
mn_tape *mn_trainer_aside(mn_trainer *trainer);

/* Bytes of parameters, gradients and moments. */
size_t mn_trainer_device_bytes(const mn_trainer *trainer);

/* Which numbers of parameter `i` this rank has the moments of: [*begin, *begin + *count). */
void mn_trainer_owned(const mn_trainer *trainer, int i, int64_t *begin, int64_t *count);

/* Of these, a moment to the host's memory, and `count` numbers from number `begin` of the parameter
 * on from there. */
mn_status mn_trainer_fetch_moment(float *to, mn_trainer *trainer, int i, bool second);
mn_status mn_trainer_send_moment(mn_trainer *trainer, int i, bool second, const float *from,
                                 int64_t begin, int64_t count);

/* The batches of a step and, where its loss does not lie above `limit`, the update. Fills in loss,
 * norm, tokens and whether it was skipped; all of them may be not finite, and then it was. */
mn_status mn_trainer_step_device(mn_trainer *trainer, mn_step_result *result, double limit);

/* ---- on the GPUs of several ranks ------------------------------------------------------------ */

/* Finds that each rank has a GPU of its own, and lets them meet. */
mn_status mn_trainer_gpus_create(mn_trainer_gpus **out, mn_trainer *trainer,
                                 const mn_optim_param *params, int64_t n_params);
void mn_trainer_gpus_destroy(mn_trainer_gpus *gpus);    // NULL accepted
size_t mn_trainer_gpus_bytes(const mn_trainer_gpus *gpus);

/* Those of a run; NULL: it has none. */
mn_trainer_gpus *mn_trainer_gpus_of(const mn_trainer *trainer);

/* Where parameters are sharded: block `block` is about to work, or has its gradients; all values
 * come. NULL accepted. */
bool mn_trainer_gpus_on_request(const mn_trainer_gpus *gpus);
size_t mn_trainer_gpus_paged(const mn_trainer_gpus *gpus);    // bytes of the model's pages in steps
void mn_trainer_gpus_enter(mn_trainer_gpus *gpus, int block);
void mn_trainer_gpus_ready(mn_trainer_gpus *gpus, int block);
mn_status mn_trainer_gpus_whole(mn_trainer_gpus *gpus);

/* Rounds of a step, the batch of this rank in one (-1: none), and where the loss of batch i
 * goes. */
int64_t mn_trainer_gpus_rounds(const mn_trainer_gpus *gpus);
int64_t mn_trainer_gpus_batch(const mn_trainer_gpus *gpus, int64_t round);
int64_t mn_trainer_gpus_loss(const mn_trainer_gpus *gpus, int64_t i);

/* A step: begin, then in each round put, with a batch or without one, then the update, all without
 * waiting; then finish, which waits with an eye on the other ranks, and fills in times and whether
 * any is to stop. */
mn_status mn_trainer_gpus_begin(mn_trainer_gpus *gpus);
void mn_trainer_gpus_idle(mn_trainer_gpus *gpus);    // a round without a batch
mn_status mn_trainer_gpus_before(mn_trainer_gpus *gpus);    // a batch of sequences in parts: waits
mn_status mn_trainer_gpus_put(mn_trainer_gpus *gpus, int64_t round);
mn_status mn_trainer_gpus_update(mn_trainer_gpus *gpus, mn_device_optimizer *optimizer);
mn_status mn_trainer_gpus_finish(mn_trainer_gpus *gpus, mn_step_result *result);

#endif
