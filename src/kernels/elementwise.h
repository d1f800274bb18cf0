/* elementwise.h - what the operations of a tape and composed operators ask of the machine: plain
 * structs, one for each job of elementwise.def, and the table of functions that does them.
 *
 * A work names its tensors as views, with the type of each: those of a CPU are all of one type,
 * float32 or float64, those of a GPU float32 or bf16 in any mixture, and every sum there is
 * float32. Two backends do works: ops/elementwise with loops on threads, kernels/cuda/elementwise
 * with launches that only put work on a stream. Rows are counted over B, T and H. */
#ifndef MN_KERNELS_ELEMENTWISE_H
#define MN_KERNELS_ELEMENTWISE_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "kernels/quant.h"
#include "kernels/unary.h"
#include "mneme.h"

/* Where a tensor (B,T,H,X) lies: elements from neighbour to neighbour along each axis, 0 where one
 * number serves all of it. data NULL: absent. */
typedef struct mn_view {
    void *data;
    mn_dtype dtype;
    int64_t stride[4];
} mn_view;

/* to = from, or to += from. With `times` heads of `to` per head of `from`; where it `folds`, `from`
 * has `times` heads per head of `to`, and they are added up, first copy first. */
typedef struct mn_move_params {
    int64_t shape[4];    // of `to`
    mn_view to, from;
    int64_t times;
    bool folds, add;
} mn_move_params;

/* to = value */
typedef struct mn_fill_params {
    int64_t shape[4];
    mn_view to;
    double value;
} mn_fill_params;

/* Number i of `to`, n neighbours, is the i-th normal number of (seed, stream) (base/rng.h). */
typedef struct mn_normal_params {
    mn_view to;
    int64_t n;
    uint64_t seed, stream;
} mn_normal_params;

/* y = f(x) [b] where y is there; dx (+)= f'(x) dy [b] and db (+)= f(x) dy where dy is. On GPUs
 * strides of a repeated b may be 0, and a db whose stride along X is 0 gets sums over rows. */
typedef struct mn_unary_params {
    mn_unary f;
    int64_t shape[4];
    mn_view x, b, y, dy, dx, db;
    bool add_x, add_b;
} mn_unary_params;

typedef enum mn_pair_kind {
#define PAIR(id, ins, about) MN_PAIR_##id,
#include "kernels/elementwise.def"
    MN_N_PAIR
} mn_pair_kind;

/* y of a and b; or, where y is absent, da and db from dy, each if it is there. On GPUs the db of a
 * product may have a stride of 0 along X, and gets sums over rows; then a may have had another
 * product, with c, one number for a row too, whose cotangent is e: da gets e c as well, and dc, if
 * it is there, sums of e a over rows. */
typedef struct mn_pair_params {
    mn_pair_kind kind;
    int64_t shape[4];    // of a and y; strides of a repeated b or c are 0
    mn_view a, b, c, y, dy, da, db, e, dc;
    double scale, shift;
    bool add_a, add_b;
} mn_pair_params;

/* sum (+)= dy, or dy a where a is there, added up over the axes that are 1 in `kept` and not in
 * `shape`, in an order that depends on sizes alone. On GPUs f(a) may take the place of a where the
 * last axis is summed. */
typedef struct mn_sum_params {
    int64_t shape[4], kept[4];
    mn_view a, dy, sum;    // strides of `sum` along its axes of 1 do not count
    bool add, shaped;      // shaped: by f
    mn_unary f;
} mn_sum_params;

/* y = softmax(x) over X; or, where dx is there, dx (+)= y (dy - sum_j y_j dy_j). */
typedef struct mn_softmax_params {
    int64_t shape[4];
    mn_view x, y, dy, dx;
    bool add;
} mn_softmax_params;

/* to_i (+)= from_(i - by) along X, 0 <= by < X. */
typedef struct mn_roll_params {
    int64_t shape[4], by;
    mn_view to, from;
    bool add;
} mn_roll_params;

/* Gates of n heads in each of `rows` rows:
 *
 *   write = sigmoid(u)    strength = write softplus(scale)    decay = -softplus(w + bias) e^rate
 *
 * or, where it goes `back`, du and dw (+)= their gradients, and those of scale, bias and rate sums
 * over rows. Cotangents that are absent are 0, gradients that are absent are not wanted. Results
 * and cotangents are contiguous, u and w and their gradients lie stride[1] from row to row. */
typedef struct mn_gates_params {
    int64_t rows, n;
    mn_view u, w, param[3];    // scale, bias, rate
    mn_view outputs[3], cot[3];    // write, strength, decay
    mn_view du, dw, dparam[3];
    bool back, add_u, add_w, add_param[3];
} mn_gates_params;

/* Row i of `rows`, which are n and contiguous, is row index[i] of `table` (shape (B,T,1,X)), or of
 * `quant` in its place; or, where it scatters, is added to that row, which no other i names. */
typedef struct mn_rows_params {
    int64_t shape[4];    // of `table`
    mn_view table, rows;
    const int32_t *index;
    int64_t n;
    bool scatters;
    const mn_quant *quant;
} mn_rows_params;

/* Row v of `table` (V, X) becomes the sum, or gets it added, of the rows of `dy` (n, X) whose token
 * is v, in their order. */
typedef struct mn_embed_params {
    int64_t V, X, n;
    mn_view table, dy;
    const int32_t *tokens;
    bool add;
} mn_embed_params;

/* What a loss tells: where it is depends on the backend. */
typedef struct mn_loss_result {
    double loss;
    int64_t counted;
} mn_loss_result;

/* How many of the targets are not negative. */
typedef struct mn_count_params {
    const int32_t *targets;
    int64_t n;
    mn_loss_result *result;
} mn_count_params;

/* Rows [first, first + n) of logits become losses and gradients (equations in tape/loss.c).
 * Row i is row kept[first + i] of the batch, or first + i where `kept` is NULL. */
typedef struct mn_loss_params {
    int64_t n, first, V;
    mn_view logits, dlogits;    // stride[1]: from row to row; dlogits absent: no gradients
    const int32_t *targets, *kept;
    double *nll, *lse2;             // by row of the batch
    const double *share;            // of each row's gradient; NULL: 1
    const mn_loss_result *result;   // its `counted`
    double weight, z_loss, cap;
} mn_loss_params;

/* Losses of each of n samples, nll[s * rows + row], become its share in the mixture, whose loss
 * goes to mixed[row]: 0 where the target is ignored. */
typedef struct mn_mix_params {
    int64_t rows;
    int n;
    double *nll, *mixed;
    const int32_t *targets;
} mn_mix_params;

/* result->loss = sum over rows of (nll + z_loss lse2) / counted, in order; `given` (NULL: not
 * wanted) gets the rows' losses. */
typedef struct mn_total_params {
    int64_t rows;
    const double *nll, *lse2;    // lse2 NULL: none
    double z_loss;
    mn_loss_result *result;
    float *given;
} mn_total_params;

/* *first = place of the first of n neighbours that is not finite, n if all are. */
typedef struct mn_finite_params {
    mn_view x;
    int64_t n, *first;
} mn_finite_params;

typedef enum mn_fused_kind {
#define FUSED(id, ins, outs, about) MN_FUSED_##id,
#include "kernels/elementwise.def"
    MN_N_FUSED
} mn_fused_kind;

/* out = f(in) element by element. Absent inputs are zeros, absent results are not wanted; a result
 * may lie over an input of the same strides. On CPUs elements of a row are neighbours. */
typedef struct mn_fused_params {
    mn_fused_kind f;
    int64_t shape[4];
    mn_view in[3], out[3];
} mn_fused_params;

/* A loop of that over n neighbours, of a CPU. Pointers may be NULL. */
typedef struct mn_fused_args {
    mn_fused_kind kind;
    int64_t n;
    const void *in[3];
    void *out[3];
} mn_fused_args;

typedef enum mn_token_sum_kind {
#define TOKEN_SUM(id, about) MN_TOKEN_SUM_##id,
#include "kernels/elementwise.def"
    MN_N_TOKEN_SUM
} mn_token_sum_kind;

/* sum (1,1,H,X) = terms of `in`, which are all of one type, as the sum is; rows are neighbours.
 * Absent inputs are zeros. */
typedef struct mn_token_sum_params {
    mn_token_sum_kind f;
    int64_t shape[4];    // of the inputs
    mn_view in[3], sum;
} mn_token_sum_params;

typedef enum mn_elementwise_id {
#define JOB(id, name, ins, outs, workspace, decode, about) MN_ELEMENTWISE_##id,
#include "kernels/elementwise.def"
    MN_N_ELEMENTWISE
} mn_elementwise_id;

/* How a backend does one kind of work. `where` is the backend's own: the context of a CPU, the
 * stream of a GPU. `space` is memory for the call of as many bytes as `bytes` says, which looks at
 * sizes and whether tensors are there; NULL: none is needed. Returns 0, or the cudaError_t of a
 * launch. */
typedef struct mn_elementwise_fn {
    int (*run)(void *backend, const void *args, void *workspace);
    size_t (*bytes)(const void *args);
} mn_elementwise_fn;

/* Without CUDA in the build: NULL functions, which no context comes to call. */
const mn_elementwise_fn *mn_elementwise_cuda(void);

#endif
