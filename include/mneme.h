/* mneme.h - the public C interface of mneme: sequence memory as a library.
 *
 * Conventions. Every call that can fail returns mn_status; mn_last_error() then says why, in words
 * a user can act on. The library never prints, exits or aborts on data. Handles are opaque; use one
 * thread at a time per handle, as many handles at once as you like. On failure nothing is written.
 *
 * Link with -lmneme, or use pkg-config mneme, or find_package(mneme). */
#ifndef MNEME_H
#define MNEME_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

#define MN_VERSION_MAJOR 0
#define MN_VERSION_MINOR 1
#define MN_VERSION_PATCH 0
#define MN_VERSION "0.1.0"

#if defined(__GNUC__)
#define MN_API __attribute__((visibility("default")))
#else
#define MN_API
#endif

/* ---- status ---------------------------------------------------------------------------------- */

typedef enum mn_status {
    MN_OK,
    MN_ERR_ARGUMENT,       // a caller's argument is wrong; the message names it
    MN_ERR_MEMORY,         // sizes overflow, or the memory is not there
    MN_ERR_IO,             // a file cannot be opened, read or written
    MN_ERR_FORMAT,         // a file is not what its name says
    MN_ERR_UNSUPPORTED,    // right, but not on this machine or in this build
    MN_ERR_NUMERIC,        // a result is not finite
    MN_ERR_INTERNAL,       // our mistake
    MN_STATUS_COUNT
} mn_status;

MN_API const char *mn_version(void);
MN_API const char *mn_status_name(mn_status status);

/* The sentence of the last failure on this thread; "" if there was none. Valid until the next one.
 */
MN_API const char *mn_last_error(void);

/* ---- context --------------------------------------------------------------------------------- */

typedef enum mn_dtype { MN_F32, MN_F64, MN_BF16, MN_DTYPE_COUNT } mn_dtype;

/* Worker threads, scratch memory and the chosen kernels; or a GPU. */
typedef struct mn_context mn_context;

typedef struct mn_context_options {
    int n_threads;         // 0: one per core this process may run on
    const char *target;    // "ref", "avx2", "avx512"; NULL: MN_TARGET, else the best here
    const char *device;    // NULL or "cpu"; "cuda" or "cuda:N": operators run on that GPU
    void *stream;          // of the GPU, a cudaStream_t that stays yours; NULL: one of its own

    // Of the GPU: where memory for work comes from and goes back to, in the order of the stream.
    // NULL: the driver. `allocate` gives NULL when there is none.
    void *(*allocate)(void *owner, size_t bytes);
    void (*release)(void *owner, void *memory);
    void *owner;
} mn_context_options;

/* `options` may be NULL. Free with mn_context_destroy, which accepts NULL. A device that cannot be
 * used fails with MN_ERR_UNSUPPORTED and the reason. */
MN_API mn_status mn_context_create(mn_context **out, const mn_context_options *options);
MN_API void mn_context_destroy(mn_context *context);
MN_API int mn_context_threads(const mn_context *context);

/* "ref", "avx2", "avx512", or "cuda" where a GPU runs the operators. */
MN_API const char *mn_context_target(const mn_context *context);

/* Waits until the work of all calls is done; what failed in it comes out here. On the CPU calls are
 * done when they return, and so is this one. */
MN_API mn_status mn_context_synchronize(mn_context *context);

/* Later calls go to `stream` of the context's GPU, a cudaStream_t that stays yours and is not NULL
 * (cudaStreamLegacy is the default stream). Calls on two streams share no memory for work. */
MN_API mn_status mn_context_use_stream(mn_context *context, void *stream);

/* Gives back memory for work, which calls keep for the next one. */
MN_API void mn_context_trim(mn_context *context);    // NULL accepted

/* ---- text ------------------------------------------------------------------------------------ */

/* A tokenizer.json. */
typedef struct mn_tokenizer mn_tokenizer;

/* `path` is a tokenizer.json or the folder that holds one. On failure `*out` is NULL. */
MN_API mn_status mn_tokenizer_load(mn_tokenizer **out, const char *path);
MN_API void mn_tokenizer_destroy(mn_tokenizer *tokenizer);    // NULL accepted

/* The tokens of a text, in memory to be freed with free(). With `special` the text of special
 * tokens becomes those tokens, and what the tokenizer puts in front of a text is put there. */
MN_API mn_status mn_tokenizer_ids(int32_t **ids, int64_t *count, const mn_tokenizer *tokenizer,
                                  const char *text, size_t size, bool special);

/* The text of tokens, to be freed with free(); `*size` leaves out the zero byte at its end. Special
 * tokens are left out unless `special`. */
MN_API mn_status mn_tokenizer_decode(const mn_tokenizer *tokenizer, const int32_t *ids,
                                     int64_t count, bool special, char **text, size_t *size);

/* ---- training --------------------------------------------------------------------------------
 *
 * What `mneme train` does, step by step: a model of one JSON configuration ("model", "data",
 * "train", "out", see docs/guide/training.md), its optimiser and its data.
 *
 *   mn_train_create(&train, context, config);
 *   while (mn_train_steps(train) < n) mn_train_step(train, &result);
 *   mn_train_save(train);        OUT/last is a model folder: mn_model_open, mneme generate
 *
 * Data are the files that the configuration names, or batches that a function of the program makes.
 * A run that is resumed goes on with the bits of one that never stopped. */

typedef struct mn_train mn_train;

/* Batches of a program's own. `fill` writes the tokens of every row and the target of each, -100
 * where none is asked for; rows are sequences of their own. It is a function of `step` (from 0) and
 * of nothing else, so that a resumed run sees the batches it would have seen. What it returns other
 * than MN_OK ends the step. `context` is borrowed. */
typedef struct mn_train_batches {
    void *context;
    mn_status (*fill)(void *context, int64_t step, int64_t rows, int64_t length, int32_t *tokens,
                      int32_t *targets);
    int64_t epoch;    // steps after which validation is complete; 0: 1
} mn_train_batches;

typedef struct mn_train_result {
    int64_t step;           // of this update, from 0
    double loss;            // mean over the targets of the step, in nats
    double grad_norm, lr;
    int64_t tokens;         // targets counted
    int skipped;            // a spike: no update was made
} mn_train_result;

/* `config` is the JSON text, copied. The context is borrowed and decides where steps are computed.
 * On failure `*out` is NULL and the message names the key. */
MN_API mn_status mn_train_create(mn_train **out, mn_context *context, const char *config);

/* The same with batches in place of files: "data" then names none, and model.vocab_size,
 * train.batch and train.context are given. `valid` may be NULL: nothing is held out. */
MN_API mn_status mn_train_create_from(mn_train **out, mn_context *context, const char *config,
                                      const mn_train_batches *train, const mn_train_batches *valid);
MN_API void mn_train_destroy(mn_train *train);            // NULL accepted

/* One update. A loss or gradient that is not finite fails with a message that names the first
 * tensor that went wrong, and changes nothing. `result` may be NULL. */
MN_API mn_status mn_train_step(mn_train *train, mn_train_result *result);

/* Mean loss over the validation data, NAN where there are none. */
MN_API mn_status mn_train_evaluate(mn_train *train, double *loss);

/* Writes OUT/checkpoints/step-N, a model folder with the optimiser's state, and points OUT/last at
 * it, and OUT/best where the last evaluation was the best. OUT is made with its parents; the
 * configuration goes to OUT/train.json, so that `mneme train --resume OUT` goes on too. What was
 * there before stays until the new one is complete. */
MN_API mn_status mn_train_save(mn_train *train);

/* Takes up a checkpoint of the same configuration and data: OUT/last, or that at `checkpoint`. */
MN_API mn_status mn_train_resume(mn_train *train, const char *checkpoint);

MN_API int64_t mn_train_steps(const mn_train *train);     // updates made

/* ---- sessions --------------------------------------------------------------------------------
 *
 * A session is one sequence that a model is reading: what its layers remember, and the logits of
 * the token after the last. Feed it tokens, ask for logits or draw a token, feed that, and so on;
 * take a snapshot to come back to, or fork it. Recurrent layers keep the same number of bytes
 * however long the sequence is; attention keeps every token.
 *
 * A model and all sessions on it are one handle: one thread at a time for all of them together. */

typedef struct mn_model mn_model;
typedef struct mn_session mn_session;
typedef struct mn_snapshot mn_snapshot;

/* Reads config.json and the weights of a folder, in float32. On failure `*out` is NULL. */
MN_API mn_status mn_model_open(mn_model **out, const char *folder);
MN_API void mn_model_close(mn_model *model);              // NULL accepted; after its sessions
MN_API int64_t mn_model_vocabulary(const mn_model *model);

typedef struct mn_session_options {
    int64_t prefill_chunk;     // tokens computed at once; 0: what 256 MiB hold, at most 512, and on
                               //   a GPU what 4 GiB hold, at most 4096
    bool belief;               // keep the read variances of the tokens fed last
    mn_dtype dtype;            // of what a GPU computes, MN_F32 or MN_BF16; MN_F32 on the CPU
    bool relative;             // with belief: tell instead what tells known keys from unknown
                               //   ones, above 1 for doubt: bayes and palimpsa the variance over
                               //   its mean over all directions of a query, kla what its memory
                               //   holds in a direction on average over what is read (other
                               //   layers, and steps of mn_batch, tell the variance itself).
                               //   Each token costs about as much again
} mn_session_options;

/* Context and model must outlive the session. `options` may be NULL. On a context with a GPU the
 * model's parameters move there with its first session, and stay: open it once more for the CPU. */
MN_API mn_status mn_session_create(mn_session **out, mn_context *context, mn_model *model,
                                   const mn_session_options *options);
MN_API void mn_session_destroy(mn_session *session);      // NULL accepted

/* Reads any number of tokens. Ids outside the vocabulary fail before anything is read. After any
 * other failure the session has to be reset, restored or loaded. */
MN_API mn_status mn_session_feed(mn_session *session, const int32_t *tokens, int64_t count);
MN_API mn_status mn_session_step(mn_session *session, int32_t token);

/* Tokens that may follow the next one. On a CPU the next step reads them with its own in one pass,
 * and steps that agree cost nothing then; others take back what was read. Results have the same
 * bits whatever is expected (speculative decoding). */
MN_API mn_status mn_session_expect(mn_session *session, const int32_t *tokens, int64_t n);

/* Reads tokens and tells the logarithm of the probability each had when its turn came; 0 for the
 * first token of a sequence, which nothing foretold. `log_probabilities` holds `count` numbers. */
MN_API mn_status mn_session_score(mn_session *session, const int32_t *tokens, int64_t count,
                                  double *log_probabilities);

/* Logits of the next token, mn_model_vocabulary of them, valid until the session changes; NULL
 * before the first token. */
MN_API const float *mn_session_logits(const mn_session *session);

MN_API int64_t mn_session_position(const mn_session *session);    // tokens read
MN_API size_t mn_session_bytes(const mn_session *session);        // what it remembers

/* Read variances: how unsure a layer was of what it answered, for each token of the last call that
 * fed any, averaged over heads. Layers that keep none are not counted. */
MN_API int mn_session_beliefs(const mn_session *session);         // layers that tell one
MN_API int mn_session_belief_layer(const mn_session *session, int i);    // place in the model

/* Variances of the i-th such layer; returns how many there are, 0 unless options.belief. */
MN_API int64_t mn_session_belief(const float **variance, const mn_session *session, int i);

/* Forgets everything. */
MN_API mn_status mn_session_reset(mn_session *session);

/* A copy of what a session remembers, to go back to any number of times. Restoring one of another
 * model fails and leaves the session as it is. Going on from a snapshot, a fork or a file gives the
 * bits that going on without would have given. */
MN_API mn_status mn_session_snapshot(mn_snapshot **out, const mn_session *session);
MN_API mn_status mn_session_restore(mn_session *session, const mn_snapshot *snapshot);
MN_API size_t mn_snapshot_bytes(const mn_snapshot *snapshot);
MN_API void mn_snapshot_destroy(mn_snapshot *snapshot);           // NULL accepted

/* A second session that goes on from here by itself. */
MN_API mn_status mn_session_fork(mn_session **out, const mn_session *session);

/* The same through a file (safetensors). The state of another model is refused, and the session is
 * then as it was. */
MN_API mn_status mn_session_save(const mn_session *session, const char *path);
MN_API mn_status mn_session_load(mn_session *session, const char *path);

/* Steps of many sessions at once: products read each weight once for all of them, and a GPU takes
 * all states in one launch where they have a constant size. */
typedef struct mn_batch mn_batch;

/* Context and model must outlive the batch. */
MN_API mn_status mn_batch_create(mn_batch **out, mn_context *context, mn_model *model);
MN_API void mn_batch_destroy(mn_batch *batch);            // NULL accepted

/* Session i reads tokens[i], with the same bits whatever the others are, or whether there are any:
 * on a CPU those that mn_session_step would give it. A GPU steps one session by itself in another
 * order of sums, with other roundings of the same size. The n sessions are of the batch's context
 * and model, and on a GPU of one dtype, each there once, and may be others at each call. A session
 * or token that cannot be fails before anything is read; after any other failure each of them has
 * to be reset, restored or loaded. */
MN_API mn_status mn_batch_step(mn_batch *batch, mn_session *const *sessions,
                               const int32_t *tokens, int64_t n);

/* Session i reads the counts[i] tokens at tokens[i], 2 or more, with the bits that mn_session_feed
 * would give it if it read them in one chunk: prompts of several sessions at once. */
MN_API mn_status mn_batch_feed(mn_batch *batch, mn_session *const *sessions,
                               const int32_t *const *tokens, const int64_t *counts, int64_t n);

/* How the next token is drawn, applied in this order. All zeros: always the most probable. */
typedef struct mn_sampling {
    double repetition_penalty;     // of the logits of recent tokens; 0, 1: off
    int64_t repetition_window;     // of the recent tokens, the last so many; 0: all given
    double temperature;            // divides logits; 0: the largest wins
    int64_t top_k;                 // the k most probable; 0: all
    double top_p;                  // the fewest that hold p of the probability; 0, 1: off
    double min_p;                  // those with min_p times the largest probability or more
    uint64_t seed, stream;         // a token is a function of both and of its position
} mn_sampling;

MN_API void mn_sampling_defaults(mn_sampling *how);    // temperature 1, everything else off

/* Draws the next token without reading it. `recent` are the tokens a repetition penalty looks at,
 * the latest last; NULL when there are none. */
MN_API mn_status mn_session_sample(int32_t *token, mn_session *session, const mn_sampling *how,
                                   const int32_t *recent, int64_t n_recent);

/* ---- tasks ----------------------------------------------------------------------------------
 *
 * Synthetic sequences made by a known law. A sample is a function of (options, seed, split, index)
 * and of nothing else. A target of -100 asks for nothing. One thread at a time per task. */

typedef struct mn_task mn_task;

/* `options` is a JSON object, NULL for the defaults: mn_describe_tasks lists them. */
MN_API mn_status mn_task_open(mn_task **out, const char *name, const char *options);
MN_API void mn_task_close(mn_task *task);    // NULL accepted

/* Tokens of a vocabulary or numbers a token (the other is 0), classes of targets, places of a row.
 * Any of the pointers may be NULL. */
MN_API void mn_task_sizes(const mn_task *task, int64_t *vocabulary, int64_t *features,
                          int64_t *classes, int64_t *length);

/* Writes samples [first, first + count) of split "train", "valid" or "test": targets (count,
 * length), and the inputs, `tokens` (count, length) or `features` (count, length, features); the
 * other is NULL. Places behind the end of a shorter sample have token 0 and no target. */
MN_API mn_status mn_task_draw(mn_task *task, uint64_t seed, const char *split, int64_t first,
                              int64_t count, int32_t *tokens, float *features, int32_t *targets);

/* ---- descriptions ----------------------------------------------------------------------------
 *
 * The tables of the library as JSON, for bindings in other languages; free with free(). */

/* Where the sizes of mn_call and the tensors and numbers of every operator's arguments lie. */
MN_API mn_status mn_describe_operators(char **json);

/* Sequence layers: their axes, operator, and options with defaults. */
MN_API mn_status mn_describe_layers(char **json);

/* Layer `name` ("gdn", "gla+ccq") of a model of width D, whose sequences have at most `context`
 * tokens: its sizes by letter, its options filled in, its parameters as checkpoints have them.
 * `options`: a JSON object or NULL; "index" of "n_layers" in it: which of its model's layers. */
MN_API mn_status mn_describe_layer(char **json, const char *name, const char *options, int64_t D,
                                   int64_t context);

/* The model that a config.json means: sizes, and the name and options of every layer with all
 * defaults filled in; under "config" the same as a config.json to be saved. */
MN_API mn_status mn_describe_model(char **json, const char *config);

/* Tasks with their options and published settings. */
MN_API mn_status mn_describe_tasks(char **json);

/* The numbers that a parameter of such a layer starts with, a function of (seed, stream); `range`
 * is the standard deviation of projections. `values` holds all of them. */
MN_API mn_status mn_layer_start(float *values, const char *name, const char *options, int64_t D,
                                int64_t context, const char *parameter, double range,
                                uint64_t seed, uint64_t stream);

/* ---- operators -------------------------------------------------------------------------------
 *
 * Each operator NAME has mn_op_NAME (forward) and mn_op_NAME_backward over one struct of plain
 * pointers. Forward reads the inputs and writes the outputs that are not NULL. Backward reads the
 * inputs and the cotangents in `cot` (NULL means zero) and writes the gradients in `grad` that are
 * not NULL; it needs no result of the forward call.
 *
 * Sizes are in `call`; each operator reads the letters its comments name. A view's `stride` holds
 * the distance in elements between neighbours along B (or N), T (or L) and H (or J, Q); three zeros
 * mean contiguous in the order written. The last axis is always contiguous. States are float64 for
 * MN_F64 and float32 otherwise, and contiguous.
 *
 * Packed sequences: B = 1, cu_seqlens holds n_seqs + 1 offsets into T, sequence n is the tokens
 * [cu_seqlens[n], cu_seqlens[n+1]). Initial and final states then have N = n_seqs rows, else N = B.
 * A packed run gives the same bits as separate runs.
 *
 * Decoding: a call with T = 1 whose final states are the same memory as its initial states updates
 * them in place, reading and writing them once.
 *
 * On a GPU every tensor lies in that GPU's memory; `args` itself, cu_seqlens and counts0 stay in
 * host memory and may be changed when the call returns. The call puts its work on the context's
 * stream and does not wait. MN_BF16 is of GPUs only: activations, weights, log decays and their
 * gradients are then bf16, sums are float32, and states, targets, losses, moebius' a and p, and an
 * optimiser's numbers are float32. Values inside tensors are not looked at: a log decay above 0
 * grows the state, and a target that is no class makes the loss NaN. */

typedef struct mn_in {
    const void *data;
    int64_t stride[3];
} mn_in;

typedef struct mn_out {
    void *data;
    int64_t stride[3];
} mn_out;

typedef struct mn_call {
    mn_dtype dtype;               // of activations and, for MN_F64, of everything
    int64_t B, T, H, K, V;        // batch, time, heads, key width, value width
    int64_t G;                    // noise groups (bayes, riccati)
    int64_t J;                    // key-value heads (attention), heads of queries and keys
                                  //   (additive, delta, delta_net: head h uses h J / H); 0: H
    int64_t L;                    // keys that queries may see, the T queries being the last; 0: T
    int64_t Q, P, R, W;    // hyper: branches, block size, ranks of the two mixes; conv: W taps
    int64_t D, S;                 // model width; samples or steps
    const int64_t *cu_seqlens;    // NULL: not packed
    int64_t n_seqs;
} mn_call;

/* How the log decay g is given: absent, (H), (B,T,H) or (B,T,H,K). */
typedef enum mn_decay { MN_DECAY_NONE, MN_DECAY_HEAD, MN_DECAY_TOKEN, MN_DECAY_CHANNEL } mn_decay;

/* S = diag(exp g) S + k v';  o = scale S'q.   Linear attention, RetNet, Mamba-2, GLA. */
typedef struct mn_additive_args {
    mn_call call;                         // B T H K V J
    double scale;
    int decay;                            // mn_decay
    mn_in q, k, v, g, state0;             // (B,T,J,K) (B,T,J,K) (B,T,H,V) log decay (N,H,K,V)
    mn_out o, state;                      // (B,T,H,V) (N,H,K,V)
    struct { mn_in o, state; } cot;
    struct { mn_out q, k, v, g, state0; } grad;
} mn_additive_args;

/* A sum whose value channels forget: S = diag(exp g) S + v k'; o = scale S q. S (V,K) is that of
 * additive the other way round. Gated slot attention. */
typedef struct mn_additive_column_args {
    mn_call call;                         // B T H K V
    double scale;
    mn_in q, k, v, g, state0;             // (B,T,H,K) twice, (B,T,H,V) twice, (N,H,V,K)
    mn_out o, state;                      // (B,T,H,V) (N,H,V,K)
    struct { mn_in o, state; } cot;
    struct { mn_out q, k, v, g, state0; } grad;
} mn_additive_column_args;

/* S' = diag(exp g) S;  S = S' + beta w (v - S'^T e)';  o = scale S'q.
 * w absent: w = e; beta absent: 1. */
typedef struct mn_delta_args {
    mn_call call;                         // B T H K V J
    double scale;
    int decay;
    const struct mn_curvature_args *query;    // NULL; on a GPU, T > 1: makes q on the way
    mn_in q, e, w, v, beta, g, state0;    // q, e, w (B,T,J,K); beta (B,T,H)
    mn_out o, state;
    struct { mn_in o, state; } cot;
    struct { mn_out q, e, w, v, beta, g, state0; } grad;
} mn_delta_args;

/* delta with e = k and w = beta k: DeltaNet, Gated DeltaNet, Kimi Delta Attention. */
typedef struct mn_delta_net_args {
    mn_call call;
    double scale;
    int decay;
    mn_in q, k, v, beta, g, state0;
    mn_out o, state;
    struct { mn_in o, state; } cot;
    struct { mn_out q, k, v, beta, g, state0; } grad;
} mn_delta_net_args;

/* Gated DeltaNet-2: delta with e = erase k, w = k, v = write v. */
typedef struct mn_gdn2_args {
    mn_call call;
    double scale;
    int decay;
    mn_in q, k, v, erase, write, g, state0;    // erase (B,T,H,K); write (B,T,H,V)
    mn_out o, state;
    struct { mn_in o, state; } cot;
    struct { mn_out q, k, v, erase, write, g, state0; } grad;
} mn_gdn2_args;

/* Diagonal plus low rank: S = diag(exp g) S + b (S'a)' + k v';  o = scale S'q. The read by a is of
 * the state before its decay. RWKV-7: a = -kk, b = kk times the in-context learning rate. */
typedef struct mn_dplr_args {
    mn_call call;                         // B T H K V
    double scale;
    mn_in q, k, v, a, b, g, state0;       // a, b, g (B,T,H,K), g <= 0
    mn_out o, state;
    struct { mn_in o, state; } cot;
    struct { mn_out q, k, v, a, b, g, state0; } grad;
} mn_dplr_args;

/* DeltaProduct: one decay, then Q / H steps of delta_net a token, o from the state behind the last.
 * Row j H + h of a token's keys, values and strengths is step j of head h. */
typedef struct mn_delta_product_args {
    mn_call call;                         // B T H K V Q
    double scale;
    mn_in q, k, v, beta, g, state0;       // k (B,T,Q,K); v (B,T,Q,V); beta (B,T,Q); g (B,T,H)
    mn_out o, state;
    struct { mn_in o, state; } cot;
    struct { mn_out q, k, v, beta, g, state0; } grad;
} mn_delta_product_args;

/* delta_net with J query and key heads: value head h uses head floor(h J / H) of them. */
typedef struct mn_delta_gva_args {
    mn_call call;                         // B T H J K V
    double scale;
    int decay;
    mn_in q, k, v, beta, g, state0;       // q, k (B,T,J,K)
    mn_out o, state;
    struct { mn_in o, state; } cot;
    struct { mn_out q, k, v, beta, g, state0; } grad;
} mn_delta_gva_args;

/* RG-LRU, each channel a state of its own: log a = -8 sigmoid(ga) softplus(a_param); h = a h +
 * sqrt(1 - a^2) sigmoid(gx) x; y = h. Without h0 the first token of a sequence enters unscaled:
 * h = sigmoid(gx) x. The root's slope is at most 1000. */
typedef struct mn_lru_args {
    mn_call call;                         // B T V
    mn_in x, gx, ga, a_param, h0;         // (B,T,V); a_param (V); h0 (N,V)
    mn_out y, h;
    struct { mn_in y, h; } cot;
    struct { mn_out x, gx, ga, a_param, h0; } grad;
} mn_lru_args;

/* Longhorn, diagonal: n = 1 + beta_j |k|^2; S_ij = (1 - beta_j k_i^2 / n) S_ij + beta_j v_j
 * k_i / n. */
typedef struct mn_longhorn_diag_args {
    mn_call call;
    double scale;
    mn_in q, k, v, beta, state0;          // v, beta (B,T,H,V), beta > 0
    mn_out o, state;
    struct { mn_in o, state; } cot;
    struct { mn_out q, k, v, beta, state0; } grad;
} mn_longhorn_diag_args;

/* Longhorn, per column: eta_j = beta_j / (1 + beta_j |k|^2); S_:j += eta_j k (v_j - k'S_:j). */
typedef mn_longhorn_diag_args mn_longhorn_column_args;

/* Covariance pass of the Bayesian Layer: Pbar = A P A' + l2 N; u = Pbar k;
 * P = Pbar - u u'/(r2 + k'u).
 *
 * gain = k'u / (r2 + k'u); gainvec = u / (r2 + k'u); kvar = k'u; qvar = scale^2 q'Pq. With theta
 * the state has R = 2K rows, pair j being turned by theta_j; otherwise R = K. P is symmetric, and
 * so are dP0 and the dP that counts. P starts from P0, without it from p0 I, without both from I.
 */
typedef struct mn_riccati_args {
    mn_call call;                            // B T H K G
    double scale;
    mn_in q, k, la, theta;                   // la, theta (B,T,H,K)
    mn_in l2, r2, p0, P0;                    // l2 (B,T,H); r2 (B,T,H,G); p0 (H)
    mn_out gain, gainvec, kvar, qvar, P;     // (B,T,H,G) (B,T,H,G,R) .. ..; P, P0 (N,H,G,R,R)
    struct { mn_in gain, gainvec, kvar, qvar, P; } cot;
    struct { mn_out q, k, la, theta, l2, r2, p0, P0; } grad;
} mn_riccati_args;

/* The Bayesian Layer: riccati, then the mean M = A M + gainvec (v - (A M)'k)'; o = scale M'q. Value
 * column j belongs to noise group floor(j G / V). */
typedef struct mn_bayes_args {
    mn_call call;                                   // B T H K V G
    double scale;
    mn_in q, k, v, la, theta, l2, r2, p0, M0, P0;   // M0 (N,H,R,V)
    mn_out o, gain, gainvec, kvar, qvar, M, P;
    struct { mn_in o, gain, gainvec, kvar, qvar, M, P; } cot;
    struct { mn_out q, k, v, la, theta, l2, r2, p0, M0, P0; } grad;
} mn_bayes_args;

/* Palimpsa's recurrence: I = a I + (1-a) ip + k^2 b'; mu = (a I- mu + k v') / I, a = exp g;
 * o = scale mu'q; ovar_j = scale^2 sum_i q_i^2 / I_ij. */
typedef struct mn_importance_args {
    mn_call call;                               // B T H K V
    double scale;
    mn_in q, k, v, b, g, ip, mu0, imp0;         // b (B,T,H,V); g (B,T,H); ip (H); (N,H,K,V)
    mn_out o, ovar, mu, imp;
    struct { mn_in o, ovar, mu, imp; } cot;
    struct { mn_out q, k, v, b, g, ip, mu0, imp0; } grad;
} mn_importance_args;

/* Palimpsa as the paper gates it: a = 1 - gamma / n_mem, value beta v, importance gate beta. */
typedef struct mn_palimpsa_paper_args {
    mn_call call;
    double scale;
    mn_in q, k, v, beta, gamma, n_mem, ip, mu0, imp0;    // gamma (B,T,H); n_mem (H)
    mn_out o, ovar, mu, imp;
    struct { mn_in o, ovar, mu, imp; } cot;
    struct { mn_out q, k, v, beta, gamma, n_mem, ip, mu0, imp0; } grad;
} mn_palimpsa_paper_args;

/* Palimpsa as its code gates it: a = exp(-dt decay_rate). */
typedef struct mn_palimpsa_code_args {
    mn_call call;
    double scale;
    mn_in q, k, v, b, dt, decay_rate, ip, mu0, imp0;     // dt (B,T,H); decay_rate (H)
    mn_out o, ovar, mu, imp;
    struct { mn_in o, ovar, mu, imp; } cot;
    struct { mn_out q, k, v, b, dt, decay_rate, ip, mu0, imp0; } grad;
} mn_palimpsa_code_args;

/* Kalman Linear Attention: den = a^2 + p lam; lam = lam / den + prec k^2; eta = a / den eta + prec
 * v k; y = sum_s q eta / lam; yvar = sum_s q^2 / lam. V channels, K slots, k and q shared by all
 * channels. */
typedef struct mn_moebius_args {
    mn_call call;                             // B T V K
    int from_prior;                           // read one prediction ahead
    mn_in v, prec, k, q, a, p, lam0, eta0;    // v, prec (B,T,V); k, q (B,T,K); a, p (V,K); (N,V,K)
    mn_out y, yvar, lam, eta;
    struct { mn_in y, yvar, lam, eta; } cot;
    struct { mn_out v, prec, k, q, a, p, lam0, eta0; } grad;
} mn_moebius_args;

/* KLA's dynamics: dt = softplus(delta) + 1e-7; abar = exp(-exp(lambda_log) dt); pbar by mode. */
typedef struct mn_kla_discretise_args {
    mn_call call;                             // V K
    int mode;                                 // 0 Ornstein-Uhlenbeck, 1 zero-order hold
    mn_in delta, lambda_log, process_noise;   // (V,K)
    mn_out abar, pbar;
    struct { mn_in abar, pbar; } cot;
    struct { mn_out delta, lambda_log, process_noise; } grad;
} mn_kla_discretise_args;

/* KLA+ loss: nll = log S - logsumexp_s log_softmax(head norm(mu + sqrt(var) noise_s))[target]. */
typedef struct mn_kla_mc_args {
    mn_call call;                             // B T D V S
    double norm_eps;
    mn_in mu, var, noise, target, head, norm; // (B,T,D) .. (S,B,T,D) (B,T) (V,D) (D)
    mn_out nll, logprob;                      // (B,T) (B,T,V)
    struct { mn_in nll; } cot;
    struct { mn_out mu, var, noise, head, norm; } grad;
} mn_kla_mc_args;

/* MesaNet: Hkk = e^g Hkk + beta k k'; Hkv = e^g Hkv + beta k v'; o = Hkv'(Hkk + diag lam)^-1 scale
 * q. With `steps` forward takes that many steps of conjugate gradients from 0 instead of the
 * solution (ref/mesa.c; CPU only); backward is that of the solution. */
typedef struct mn_mesa_args {
    mn_call call;                             // B T H K V
    double scale;
    int64_t steps;                            // 0: the solution
    mn_in q, k, v, g, beta, lam, hkk0, hkv0;  // g, beta (B,T,H); lam (H,K); (N,H,K,K) (N,H,K,V)
    mn_out o, hkk, hkv;
    struct { mn_in o, hkk, hkv; } cot;
    struct { mn_out q, k, v, g, beta, lam, hkk0, hkv0; } grad;
} mn_mesa_args;

/* Curvature-conditioned query: C = covariance of the keys so far; qt = q - gamma C q.
 *
 * State: raw sums kk, ks and the count, which starts at n0 (or counts0[n] per sequence). */
typedef struct mn_curvature_args {
    mn_call call;                             // B T H K
    int64_t n0;
    int adds_k;                               // backward adds to what grad.k holds
    const int64_t *counts0;                   // (N) or NULL
    mn_in q, k, gamma, kk0, ks0;              // gamma (B,T,H); (N,H,K,K) (N,H,K)
    mn_out qt, kk, ks;
    struct { mn_in qt, kk, ks; } cot;
    struct { mn_out q, k, gamma, kk0, ks0; } grad;
} mn_curvature_args;

/* Curvature-conditioned read of a sum (beta absent) or of a delta-rule memory (beta given). */
typedef struct mn_ccq_read_args {
    mn_call call;
    int64_t n0;
    double scale;
    int decay;
    mn_in q, k, gamma, v, g, beta, kk0, ks0, state0;
    mn_out o, state, kk, ks;
    struct { mn_in o, state, kk, ks; } cot;
    struct { mn_out q, k, gamma, v, g, beta, kk0, ks0, state0; } grad;
} mn_ccq_read_args;

/* Causal softmax attention, RoPE on q and k first if asked; query head h reads kv head h J / H.
 * With a window a query sees the newest `window` keys, its own among them. lse is the log of the
 * sum of the exponentials of a row's scores, float32 on a GPU. Backward takes fewer products there
 * if `lse` and `o` still hold what forward wrote; with lse.data NULL it reads neither. */
typedef struct mn_attention_args {
    mn_call call;                             // B T H K V J L
    double scale, rope_base;
    int rope_kind;                            // 0 none, 1 half, 2 pairs
    int64_t window;                           // 0: all keys so far
    mn_in q, k, v;                            // (B,T,H,K) (B,L,J,K) (B,L,J,V)
    mn_out o, lse;                            // (B,T,H,V) (B,T,H)
    struct { mn_in o; } cot;
    struct { mn_out q, k, v; } grad;
} mn_attention_args;

/* o = sum_i relu(z_i / max(|z|, eps)) v_i, z_i = scale q.k_i. */
typedef struct mn_relu_attention_args {
    mn_call call;                             // B T H K V J L
    double scale, eps;
    mn_in q, k, v;
    mn_out o;
    struct { mn_in o; } cot;
    struct { mn_out q, k, v; } grad;
} mn_relu_attention_args;

/* HyperMLP / HyperGLU head: scores in lag order, mixed, activated, mixed again, read.
 *
 * Lag j of a row uses entry P-1-j of the mixing parameters; U1 or U2 absent: no such mix. In layout
 * position the key of place i uses entry i instead, so that a lag meets other parameters in every
 * row: the ablation that shows what lags are good for. Backward on a GPU writes o again where it is
 * given. */
typedef struct mn_hyper_args {
    mn_call call;                             // B T H K V L Q P R W
    double eps;
    int kind;                                 // 0 relu (Q = H), 1 glu (Q = 2H)
    int norm;                                 // 0 out_scale, 1 l2, 2 none
    int layout;                               // 0 lag, 1 position
    mn_in q, k, v, gv;                        // (B,T,Q,K) (B,L,Q,K) (B,L,H,V) (B,T,H,V)
    mn_in c1, U1, Vt1, d1;                    // (B,T,Q,R) (Q,P,R) (Q,R,P) (Q,P)
    mn_in c2, U2, Vt2, d2;                    // (B,T,H,W) (H,P,W) (H,W,P) (H,P)
    mn_out o;
    struct { mn_in o; } cot;
    struct { mn_out q, k, v, gv, c1, U1, Vt1, d1, c2, U2, Vt2, d2; } grad;
} mn_hyper_args;

/* The whole HyperMLP / HyperGLU module on x (B,T,D); weights under the published names. */
typedef struct mn_hyper_layer_args {
    mn_call call;    // B T D; K, V ranks; H heads; Q branches; P block; W taps; R, S ranks
    double eps;      //   of the mixes; J = Q R and L = H S rows of the controls
    int kind, norm;
    mn_in x, q_weight, k_weight, v_weight, c_proj_weight;
    mn_in left_gate_weight, left_gate_bias, right_gate_weight, right_gate_bias;
    mn_in control1_weight, control1_bias, control2_weight, control2_bias;
    mn_in conv1_conv_weight, conv2_conv_weight;
    mn_in op_mix_U, op_mix_Vt, op_mix_d, op2_mix_U, op2_mix_Vt, op2_mix_d;
    mn_out y;
    struct { mn_in y; } cot;
    struct {
        mn_out x, q_weight, k_weight, v_weight, c_proj_weight;
        mn_out left_gate_weight, left_gate_bias, right_gate_weight, right_gate_bias;
        mn_out control1_weight, control1_bias, control2_weight, control2_bias;
        mn_out conv1_conv_weight, conv2_conv_weight;
        mn_out op_mix_U, op_mix_Vt, op_mix_d, op2_mix_U, op2_mix_Vt, op2_mix_d;
    } grad;
} mn_hyper_layer_args;

/* Mamba-1: d = softplus(dt + dt_bias); h = exp(d A) h + d u Bm'; y = (h Cm + D u) silu(z). */
typedef struct mn_scan_args {
    mn_call call;                             // B T V K: V channels, K states
    int softplus;
    mn_in u, dt, A, Bm, Cm, D, z, dt_bias, h0;
    mn_out y, h;                              // (B,T,V) (N,V,K)
    struct { mn_in y, h; } cot;
    struct { mn_out u, dt, A, Bm, Cm, D, z, dt_bias, h0; } grad;
} mn_scan_args;

/* mLSTM: m = max(logsigmoid(fpre) + m, ipre); C, n in units of exp(m); csum = C e^m, nsum = n e^m.
 */
typedef struct mn_mlstm_args {
    mn_call call;                             // B T H K V
    double scale;
    mn_in q, k, v, ipre, fpre, C0, n0, m0;    // (N,H,K,V) (N,H,K) (N,H)
    mn_out o, C, n, m, csum, nsum;
    struct { mn_in o, csum, nsum; } cot;
    struct { mn_out q, k, v, ipre, fpre, C0, n0, m0; } grad;
} mn_mlstm_args;

/* Depthwise causal convolution: y_t = act(bias + sum_i w_i x_{t-W+1+i}); tail = the last W-1
 * inputs. */
typedef struct mn_conv_args {
    mn_call call;                             // B T V W
    int act;                                  // 0 none, 1 silu
    mn_in x, w, bias, tail0;                  // (B,T,V) (V,W) (V) (N,W-1,V)
    mn_out y, tail;
    struct { mn_in y, tail; } cot;
    struct { mn_out x, w, bias, tail0; } grad;
} mn_conv_args;

/* Queries and keys: y_t = unit(a_t) head by head, a_t = silu(bias + sum_i w_i x_{t-W+1+i}); max:
 * unit(a) = a / max(|a|, eps), root: a / sqrt(|a|^2 + eps). conv, then l2_norm, in one. */
typedef struct mn_conv_unit_args {
    mn_call call;                             // B T H K W
    double eps;
    int kind;                                 // 0 max, 1 root
    mn_in x, w, bias, tail0;                  // (B,T,H,K) (H,K,W) (H,K) (N,W-1,H,K)
    mn_out y, tail;
    struct { mn_in y, tail; } cot;
    struct { mn_out x, w, bias, tail0; } grad;
} mn_conv_unit_args;

/* y = x / sqrt(mean(x^2) + eps) w over the last axis; B rows of V. */
typedef struct mn_rms_norm_args {
    mn_call call;
    double eps;
    mn_in x, w;
    mn_out y;
    struct { mn_in y; } cot;
    struct { mn_out x, w; } grad;
} mn_rms_norm_args;

/* norm_first: rms(x) w act(z).  gate_first: rms(x act(z)) w, over groups of V / groups. */
typedef struct mn_rms_norm_gated_args {
    mn_call call;
    double eps;
    int order, act;                           // 0 norm_first, 1 gate_first; 0 silu, 1 sigmoid
    int64_t groups;
    mn_in x, z, w;
    mn_out y;
    struct { mn_in y; } cot;
    struct { mn_out x, z, w; } grad;
} mn_rms_norm_gated_args;

/* max: x / max(|x|, eps).  root: x / sqrt(|x|^2 + eps). */
typedef struct mn_l2_norm_args {
    mn_call call;
    double eps;
    int kind;                                 // 0 max, 1 root
    mn_in x;
    mn_out y;
    struct { mn_in y; } cot;
    struct { mn_out x; } grad;
} mn_l2_norm_args;

/* y = (silu(x gate') (x up')) down'.  B rows of K, hidden width V. */
typedef struct mn_swiglu_args {
    mn_call call;
    mn_in x, gate, up, down;                  // (B,K) (V,K) (V,K) (K,V)
    mn_out y;
    struct { mn_in y; } cot;
    struct { mn_out x, gate, up, down; } grad;
} mn_swiglu_args;

/* Rotary positions on (B,T,H,K): pair j turns by (pos0 + t) base^(-2j/K). Packed positions restart.
 */
typedef struct mn_rope_args {
    mn_call call;
    int kind;                                 // 0 half, 1 pairs
    double base;
    int64_t pos0;
    mn_in x;
    mn_out y;
    struct { mn_in y; } cot;
    struct { mn_out x; } grad;
} mn_rope_args;

/* nll = logsumexp(logits) - logits[target], 0 where target is `ignore`; loss = mean over the kept.
 * Targets are whole numbers stored in the activations' type. */
typedef struct mn_cross_entropy_args {
    mn_call call;                             // B rows of V
    int64_t ignore;
    mn_in logits, target;
    mn_out nll, loss;
    struct { mn_in loss; } cot;
    struct { mn_out logits; } grad;
} mn_cross_entropy_args;

/* AdamW: S steps after step0 on B numbers; *_out (S,B) may be the inputs themselves when S = 1. */
typedef struct mn_adamw_args {
    mn_call call;
    int64_t step0;
    double lr, beta1, beta2, eps, weight_decay;
    mn_in p, m, v, grads;
    mn_out p_out, m_out, v_out;
} mn_adamw_args;

/* The operators, in the order of the tables. */
#define MN_OPS(OP)                                                                                 \
    OP(additive) OP(delta) OP(delta_net) OP(gdn2) OP(dplr) OP(delta_product) OP(delta_gva)         \
    OP(additive_column) OP(longhorn_diag) OP(longhorn_column)                                      \
    OP(riccati) OP(bayes) OP(importance) OP(palimpsa_paper) OP(palimpsa_code)                      \
    OP(moebius) OP(kla_discretise) OP(kla_mc) OP(mesa) OP(curvature) OP(ccq_read)                  \
    OP(attention) OP(relu_attention) OP(hyper) OP(hyper_layer)                                     \
    OP(scan) OP(lru) OP(mlstm) OP(conv) OP(conv_unit) OP(rms_norm) OP(rms_norm_gated)              \
    OP(l2_norm) OP(swiglu) OP(rope) OP(cross_entropy) OP(adamw)

#define MN_OP_PROTOTYPES(name)                                                                     \
    MN_API mn_status mn_op_##name(mn_context *context, const mn_##name##_args *args);              \
    MN_API mn_status mn_op_##name##_backward(mn_context *context, const mn_##name##_args *args);
MN_OPS(MN_OP_PROTOTYPES)
#undef MN_OP_PROTOTYPES

#ifdef __cplusplus
}
#endif
#endif
