/* adamw_all.h - AdamW over all parameters of a model on a GPU: a norm, a decision, an update.
 *
 *   squares   sums of squares of each chunk of the gradients
 *   decide    norm, clipping and whether to update at all, on the device
 *   update    every chunk at once, in float32; `shadow` gets the new value in bf16
 *
 * Of several owners each has the chunks [first, first + own): it makes their squares and updates
 * their numbers; squares and losses of the others are brought before the decision.
 *
 * All pointers are the device's. Calls put work on the stream and return its cudaError_t; nothing
 * waits, so that a step can be recorded and played again with other numbers in mn_adamw_hparams. */
#ifndef MN_KERNELS_ADAMW_ALL_H
#define MN_KERNELS_ADAMW_ALL_H

#include <stdint.h>

enum { MN_ADAMW_CHUNK = 1 << 14 };    // numbers of a chunk

/* One parameter. Arrays begin on lines of 256 bytes. */
typedef struct mn_adamw_param {
    float *p, *m, *v;
    const float *g;
    void *shadow;                  // bf16; NULL: none
    float lr_scale, weight_decay;
} mn_adamw_param;

/* Numbers [first, first + count) of a parameter. */
typedef struct mn_adamw_chunk {
    int32_t param, count;
    int64_t first;
} mn_adamw_chunk;

/* What the host says about a step. */
typedef struct mn_adamw_hparams {
    double clip;                   // largest norm; 0: no limit
    double loss_limit;             // no update where the loss lies above
    float lr, eps;
    float beta1, rest1, bias1;     // rest: 1 - beta; bias: 1 - beta^s of this step
    float beta2, rest2, bias2;
} mn_adamw_hparams;

/* What the device finds. */
typedef struct mn_adamw_result {
    double norm, loss;             // loss: the mean over batches
    int64_t counted;
    float scale;                   // of the gradients
    int32_t update;                // 1: the parameters change
} mn_adamw_result;

/* What a batch of the step had: its mean loss, and over how many targets. */
typedef struct mn_adamw_loss {
    double loss;
    int64_t counted;
} mn_adamw_loss;

typedef struct mn_adamw_all {
    const mn_adamw_param *params;
    const mn_adamw_chunk *chunks;
    int64_t n_chunks, first, own;
    double *squares;               // (n_chunks)
    const mn_adamw_hparams *hparams;
    mn_adamw_result *result;
    const mn_adamw_loss *losses;   // (n_parts, n_losses): batches of equal weight, whose parts
    int64_t n_losses, n_parts;     // count by their targets
} mn_adamw_all;

#ifdef __cplusplus
extern "C" {
#endif

int mn_adamw_squares_cuda(const mn_adamw_all *all, void *stream);
int mn_adamw_decide_cuda(const mn_adamw_all *all, void *stream);
int mn_adamw_update_cuda(const mn_adamw_all *all, void *stream);

/* The shadows of the chunks of other owners, from values that were brought. */
int mn_adamw_shadows_cuda(const mn_adamw_all *all, void *stream);

/* out = a + b, n numbers at addresses of 16 bytes; out may be a or b. */
int mn_add_cuda(float *out, const float *a, const float *b, int64_t n, void *stream);

/* to = from in bf16, n numbers. */
int mn_cast_bf16_cuda(void *to, const float *from, int64_t n, void *stream);

#ifdef __cplusplus
}
#endif
#endif
