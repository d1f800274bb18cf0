/* model.h - embeddings, blocks of mixer and MLP, final norm, head: parameters and forward.
 *
 *   h = x + mixer(rms(x))      y = h + mlp(rms(h))      logits = cap(rms(y_last) head')
 *
 * A model owns its parameters and, once asked for, their gradients. It holds no activations: those
 * are the tape's. */
#ifndef MN_MODEL_MODEL_H
#define MN_MODEL_MODEL_H

#include "model/config.h"
#include "runtime/device_pages.h"

typedef struct mn_model mn_model;

/* One parameter of a model: `name` as in checkpoints. */
typedef struct mn_model_param {
    char name[MN_PARAM_NAME];
    mn_param_info info;        // shape, group, initial values
    void *value, *grad;        // count numbers; grad NULL until mn_model_want_gradients
    struct mn_quant *quant;    // in 8 or 4 bits, in place of value (quant.h); NULL: value
    void *shadow;              // of a model on a GPU: the value in bf16, or NULL
    double rate;               // of learning, times its group's (1); 0: no gradient reaches it
    int stored;                // type of the file it was read from (io/safetensors.h); -1: none
    int stored_rank;           // its axes there, where they are others: -1: as here
    int64_t stored_shape[4];
} mn_model_param;

/* `config` is copied. Parameters are allocated, not set: mn_model_start or a checkpoint does. */
mn_status mn_model_create(mn_model **out, const mn_model_config *config, mn_dtype dtype);
void mn_model_destroy(mn_model *model);    // NULL accepted

/* A model in float32 whose parameters have names, shapes and addresses but no memory: for looking
 * at and for plans of passes. Touching a number ends the program. */
mn_status mn_model_sketch(mn_model **out, const mn_model_config *config);

const mn_model_config *mn_model_describe(const mn_model *model);
mn_dtype mn_model_dtype(const mn_model *model);

/* Parameters in the order of the network; tied heads are not listed. */
int mn_model_params(const mn_model *model);
mn_model_param *mn_model_param_at(mn_model *model, int i);
mn_model_param *mn_model_param_named(mn_model *model, const char *name);    // NULL: none

int64_t mn_model_count(const mn_model *model);              // numbers in all parameters
int64_t mn_model_count_without_embeddings(const mn_model *model);
int64_t mn_model_count_active(const mn_model *model);       // without experts that a token skips

/* Initial values as a function of `seed`: each parameter by its own law, drawn by the context's
 * threads (NULL: by the calling one), with the same numbers however many there are. */
void mn_model_start(mn_model *model, mn_context *context, uint64_t seed);

mn_status mn_model_want_gradients(mn_model *model);

/* Room for them that nothing is written to: for plans of passes, on the host. */
mn_status mn_model_reserve_gradients(mn_model *model);

/* ---- where parameters are --------------------------------------------------------------------
 *
 * A model begins in the host's memory. On a GPU it has float32 values and gradients, and where
 * passes are in bf16 a copy of the values in bf16 beside, which those passes read. */

/* Moves the parameters, and gradients if there are any, to the context's GPU for passes of `dtype`,
 * MN_F32 or MN_BF16; the host's memory is freed. What is there already stays. Of a context of the
 * CPU it only checks that the model is there too. */
mn_status mn_model_place(mn_model *model, const mn_context *context, mn_dtype dtype);

/* Before it is placed: on a GPU all values, all gradients and all shadows will lie in pages. */
void mn_model_want_pages(mn_model *model);

/* The pages of one of these; NULL: it lies in none. */
typedef enum mn_model_piece {
    MN_MODEL_VALUES, MN_MODEL_GRADIENTS, MN_MODEL_SHADOWS, MN_MODEL_PIECES
} mn_model_piece;
mn_device_pages *mn_model_pages(const mn_model *model, mn_model_piece piece);

/* The type that passes are in: MN_BF16 once it has been placed for that, else the model's own. */
mn_dtype mn_model_pass_dtype(const mn_model *model);

/* The numbers of parameter `i` to and from memory of the host, wherever they are, in the model's
 * type; work that changes or reads them has to be done. */
mn_status mn_model_get(mn_model *model, int i, void *numbers);
mn_status mn_model_put(mn_model *model, int i, const void *numbers);

/* Bytes of a GPU's memory that the model holds; 0 on the host. */
size_t mn_model_device_bytes(const mn_model *model);

/* Floating-point operations of one training step per token (forward and backward) in its matrix
 * products and attention, for sequences of `length`. */
double mn_model_flops(const mn_model *model, int64_t length);

/* The layer of block i. */
const mn_layer *mn_model_layer(const mn_model *model, int i);

/* Layers that tell a read variance. */
int mn_model_beliefs(const mn_model *model);

/* ---- state of sequences ---------------------------------------------------------------------- */

/* What B sequences of one length have left behind in every layer. */
typedef struct mn_model_state {
    int n_layers;
    mn_layer_state *layers;
    int64_t position;          // tokens read
    /* Logits of the next token, for callers that keep them: malloc'ed, copied, saved and freed with
     * the state. The forward pass leaves them alone. */
    float *logits;
    int64_t n_logits;
} mn_model_state;

/* Whether passes of one token are the same work whatever the token and its place. They are not with
 * learned positions, which are looked up by the host, and with experts, which it chooses. */
bool mn_model_repeats_steps(const mn_model *model);

mn_status mn_model_state_create(mn_model_state *out, const mn_model *model);
void mn_model_state_free(mn_model_state *state);
mn_status mn_model_state_copy(mn_model_state *out, const mn_model_state *from);
size_t mn_model_state_bytes(const mn_model_state *state);

/* Moves a state from the host's memory to a GPU's, where caches get `dtype`. The device must
 * outlive the state. Copies of what is on a GPU are there too. */
mn_status mn_model_state_send(mn_model_state *state, mn_device *device, mn_dtype dtype);

/* A copy in the host's memory, in float32 there. */
mn_status mn_model_state_fetch(mn_model_state *out, const mn_model_state *from);

/* What a file of a state says of it: the tokens it has read, and words of its owner. NULL: not
 * said. */
typedef struct mn_state_notes {
    const int32_t *tokens;
    int64_t n_tokens;
    const char *words;
} mn_state_notes;

/* Writes and reads a state as safetensors, with what it belongs to in the metadata; reading fails
 * when it is another model's. What is on a GPU is written in float32; what is read is on the
 * host. `notes` may be NULL. */
mn_status mn_model_state_save(const mn_model_state *state, const mn_model *model,
                              const mn_state_notes *notes, const char *path);
mn_status mn_model_state_load(mn_model_state *out, const mn_model *model, const char *path);

/* The notes of a file: tokens and words are to be freed. What is not a state of the model fails. */
mn_status mn_model_state_notes(int32_t **tokens, int64_t *n_tokens, char **words,
                               const mn_model *model, const char *path);

/* ---- forward --------------------------------------------------------------------------------- */

/* What is computed once more going back: recomputes.def. */
typedef enum mn_recompute {
#define RECOMPUTE(id, name, about) MN_RECOMPUTE_##id,
#include "model/recomputes.def"
#undef RECOMPUTE
    MN_RECOMPUTE_COUNT
} mn_recompute;

bool mn_recompute_parse(mn_recompute *out, const char *name);

/* What the mixers of chosen blocks read and add to the residual stream: (B,T,1,D) each. */
typedef struct mn_model_branches {
    bool of[MN_MAX_LAYERS];
    mn_tensor *read[MN_MAX_LAYERS], *added[MN_MAX_LAYERS];
} mn_model_branches;

typedef struct mn_model_input {
    const int32_t *tokens;         // (B,T)
    int64_t B, T;
    const int64_t *starts;         // packed sequences (B = 1): n_sequences + 1 offsets; or NULL
    int64_t n_sequences;
    mn_model_state *state;         // NULL: sequences begin and end here
    float *variance;               // (beliefs, B, T): read variances; NULL: not wanted
    const mn_tap *tap;             // hears what layers make; NULL: nobody
    mn_model_branches *branches;   // filled in for the blocks it chooses; NULL: not wanted
    bool add_gradients;            // to what the parameters' gradients hold
    mn_recompute recompute;        // instead of keeping it; the same bits for less memory
    /* Called before block i reads its parameters going forward; and going back when their gradients
     * are complete and what comes next is of block i - 1. NULL: nobody. */
    void (*enter)(void *context, int block);
    void (*ready)(void *context, int block);
    void *ready_context;
} mn_model_input;

/* The residual stream after the final norm, (B,T,1,D). Call between mn_tape_start and the end of
 * the tape; in a state, the position moves on by T. */
mn_tensor *mn_model_hidden(mn_model *model, mn_tape *tape, const mn_model_input *in);

/* The mixers of the chosen blocks alone: branches->added of what branches->read holds already.
 * Fails for blocks that are more than x + mixer(norm x). */
void mn_model_run_branches(mn_model *model, mn_tape *tape, mn_model_branches *branches,
                           bool add_gradients);

/* Logits (B,T,1,vocabulary) of such a stream, softcap included. */
mn_tensor *mn_model_logits(mn_model *model, mn_tape *tape, mn_tensor *hidden);

/* Cross entropy against targets, see mn_tape_loss; softcap is the model's. */
void mn_model_loss(mn_model *model, mn_tape *tape, mn_tensor *hidden, const int32_t *targets,
                   mn_loss_options how, double *loss, int64_t *counted);

/* KLA+: the loss -log mean_s p(target | sample s) over `samples` draws of the last block's mixer
 * output, mean + sqrt(variance) noise, noise a function of (seed, step). Needs kla as the last
 * layer. Goes from tokens to loss, in place of mn_model_hidden and mn_model_loss. */
void mn_model_marginal_loss(mn_model *model, mn_tape *tape, const mn_model_input *in,
                            const int32_t *targets, mn_loss_options how, int samples,
                            uint64_t seed, uint64_t step, double *loss, int64_t *counted);

/* Sets gradients that no token reached to zero; after mn_tape_backward, or those of parameters
 * [first, end) when they are complete. */
void mn_model_settle_gradients(mn_model *model);
void mn_model_settle_some(mn_model *model, int first, int end);

/* Block i has parameters [*first, *end). */
void mn_model_block_params(const mn_model *model, int i, int *first, int *end);

/* How many numbers belong to no block, and how many the largest block has. */
void mn_model_parts(const mn_model *model, int64_t *outside, int64_t *block);

#endif
