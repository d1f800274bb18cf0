/* tape.h - reverse-mode gradients over operators: a step computes forward at once and remembers how
 * to go back.
 *
 *   mn_tape_start(tape, MN_TAPE_RECORD);
 *   mn_tensor *x = mn_tape_embed(tape, table, ids, B, T);
 *   mn_tensor *y = mn_tape_linear(tape, x, weight, NULL);
 *   ...; mn_tape_loss(tape, y, head, targets, &how); mn_tape_backward(tape);
 *
 * All memory of a step comes from one arena that start resets, so that after the first step nothing
 * is allocated. On a context with a device that is the device's memory: the addresses in tensors,
 * leaves, inputs and cotangents are the device's, while tokens, targets, places and cu_seqlens are
 * the host's and are uploaded; nothing between start and mn_tape_results waits for the device.
 *
 * A tape of MN_BF16 (devices only) holds activations in bf16, states and what ops.def calls WIDE in
 * float32, and sums in float32; operators get what they need converted by themselves.
 *
 * Failures stick: a call that is given NULL, or comes after a failure, returns NULL
 * and does nothing, and mn_tape_status tells the first failure. Code that builds a model checks
 * once, at its end. Activations are (B,T,H,X); a tensor is used on the tape that made it only. */
#ifndef MN_TAPE_TAPE_H
#define MN_TAPE_TAPE_H

#include "kernels/quant.h"
#include "kernels/unary.h"
#include "ops/context.h"
#include "ops/describe.h"

typedef struct mn_tape mn_tape;

/* The gradient of one piece of memory, shared by all tensors that view it. */
typedef struct mn_slot {
    void *memory;              // NULL until the first gradient arrives
    mn_dtype dtype;            // of the gradient: float32 of parameters, else that of the tensor
    size_t bytes;
    struct mn_slot *whole;     // the slot this is a part of, `offset` bytes from its start
    size_t offset;
    bool written;              // holds a gradient: what comes next is added
    bool kept;                 // the caller's memory, which outlives the step
    bool held;                 // will be read once more after what made it has gone back
} mn_slot;

/* What the n sequences of a batch keep each in memory of its own: caches. */
typedef struct mn_tensor_rows {
    int64_t n;
    void **data;               // of each
    int64_t *length;           // tokens of each
} mn_tensor_rows;

/* A view of memory. The last axis is contiguous; `stride` holds elements along B, T and H. */
typedef struct mn_tensor {
    int64_t shape[4];          // B, T, H, X
    int64_t stride[3];
    mn_dtype dtype;
    void *data;
    mn_slot *slot;             // NULL: no gradient flows here
    const mn_tensor_rows *rows;    // of a batch's cache, which operators take only; else NULL
    mn_quant *quant;           // weights in 8 or 4 bits, without `data`: for products only
    mn_tape *tape;             // of such a leaf
} mn_tensor;

typedef enum mn_tape_mode {
    MN_TAPE_FORWARD = 0,       // keeps nothing for going back
    MN_TAPE_RECORD = 1,        // remembers how to go back
    MN_TAPE_CHECK = 2,         // looks for numbers that are not finite after each operation
    MN_TAPE_PLAN = 4,          // computes nothing and counts memory: mn_tape_bytes tells how much
    MN_TAPE_DEFER = 8,         // forward on a device: gathers work into few launches (defer.c)
    MN_TAPE_REPEATS = 16,      // the same step again and again: where it gathers, also programs;
                               // ids are in memory of mn_device_host_allocate
    MN_TAPE_ALIKE = 32,        // of mn_tape_start_alike
} mn_tape_mode;

/* `dtype` is that of activations: MN_F32, or MN_F64 on a CPU, or MN_BF16 on a device. The context
 * must outlive the tape. */
mn_status mn_tape_create(mn_tape **out, mn_context *context, mn_dtype dtype);
void mn_tape_destroy(mn_tape *tape);    // NULL accepted

/* Forgets the last step. `modes` is a sum of mn_tape_mode. */
void mn_tape_start(mn_tape *tape, unsigned modes);

/* The same for one token of each of several sequences, a row each, forward: each gets the same bits
 * however many there are. On a tape of MN_TAPE_DEFER launches take all sequences, and tell them
 * apart. */
void mn_tape_start_alike(mn_tape *tape, unsigned modes, int64_t sequences);

/* The first failure since start, as a status; mn_last_error() has its sentence. */
mn_status mn_tape_status(const mn_tape *tape);

/* Says what the following operations belong to ("layers.3.attn"), for messages; copied. */
void mn_tape_scope(mn_tape *tape, const char *format, ...) __attribute__((format(printf, 2, 3)));

/* What follows, until the next call or start, is not gone back over: constants to what comes after,
 * such as the passes of a model that does not learn. Nothing on a tape that does not record. */
void mn_tape_no_gradient(mn_tape *tape, bool none);

/* What follows until the next start works on packed sequences: B = 1, sequence n is the tokens
 * [cu_seqlens[n], cu_seqlens[n+1]). Borrowed. NULL: not packed. */
void mn_tape_pack(mn_tape *tape, const int64_t *cu_seqlens, int64_t n_seqs);
int64_t mn_tape_sequences(const mn_tape *tape);    // 0: not packed
const int64_t *mn_tape_borders(const mn_tape *tape);    // sequences + 1; NULL: not packed

mn_dtype mn_tape_dtype(const mn_tape *tape);
mn_context *mn_tape_context(const mn_tape *tape);
bool mn_tape_records(const mn_tape *tape);
bool mn_tape_plans(const mn_tape *tape);
bool mn_tape_gathers(const mn_tape *tape);    // puts work off, as MN_TAPE_DEFER says

/* Runs operators in place of the tape, such as over sequences that are cut over ranks: forward may
 * change `args`, which backward is given again; with `plan` only memory is taken. Until the next
 * call, NULL: the tape does. Operators that a step computes once more run as they were left. */
typedef struct mn_tape_runner {
    mn_status (*forward)(void *context, mn_op_id op, void *args, bool plan);
    mn_status (*backward)(void *context, mn_op_id op, void *args, bool plan);
    void *context;
} mn_tape_runner;

void mn_tape_run_by(mn_tape *tape, const mn_tape_runner *runner);

/* The part of the step (mn_tape_checkpoint) that is being computed, from 1 on in their order; 0:
 * none. *again: once more, going back. */
int mn_tape_checkpoint_at(const mn_tape *tape, bool *again);

/* Largest number of bytes of tensors and gradients since start; and, from a plan, what operators
 * and uploads take beside. On a device both are of its memory; a plan does not touch it. */
size_t mn_tape_bytes(const mn_tape *tape);
size_t mn_tape_work_bytes(const mn_tape *tape);

/* On a CPU fn(context, weight, x, rows, step) hears of each product x W' before it is made: `rows`
 * rows of x that lie `step` numbers apart. Until the next call; NULL: nobody. */
typedef void (*mn_tape_observer)(void *context, const mn_tensor *weight, const void *x,
                                 int64_t rows, int64_t step);
void mn_tape_observe(mn_tape *tape, mn_tape_observer fn, void *context);

/* Takes that much memory at once, so that growing never holds more than is needed. */
mn_status mn_tape_reserve(mn_tape *tape, size_t bytes);

/* Makes `status` the failure of this step unless there is one; returns NULL, for one-line ends. */
mn_tensor *mn_tape_fail(mn_tape *tape, mn_status status);

/* Step memory for the caller's own use, such as states: `count` numbers of the tape's type,
 * uninitialised, NULL after a failure. In plan mode the address must not be touched. */
void *mn_tape_memory(mn_tape *tape, int64_t count);

/* Memory of the host until the step's end, zeroed, in a plan too. NULL after a failure. */
void *mn_tape_host(mn_tape *tape, size_t bytes);

/* Says that operations of this step work with `bytes` from `data` on, which are the caller's:
 * pieces of state, numbers to send. The tape itself says so of its results, leaves, inputs and ids.
 * On a tape of MN_TAPE_DEFER what nobody has declared is not put off. */
void mn_tape_declare(mn_tape *tape, const void *data, size_t bytes);

/* Asks for everything that a tape of MN_TAPE_DEFER has put off. Reading from a tape does that by
 * itself; it is for who goes on with its memory by other ways. */
void mn_tape_flush(mn_tape *tape);

/* What the device reads for `bytes` of the host: uploaded now, to an address that is the same in
 * each step that lends as much in the same order. On a CPU `host` itself. NULL after a failure. */
const void *mn_tape_lend(mn_tape *tape, const void *host, size_t bytes);

/* Uploads once more what this step has lent, tokens, targets and borders among it, from the same
 * host memory: for a step that was recorded as a graph and is launched again. They are checked
 * again. Nothing on a CPU. */
mn_status mn_tape_feed(mn_tape *tape);

/* Where the one token of a step of MN_TAPE_REPEATS stands in its sequence. It is uploaded from
 * `host` in front of each run of the step, and read when that runs: operations by it are the same
 * for all positions. Call first. mn_tape_goes_by_position: whether that has been called.
 * mn_tape_position: `host`, NULL where it has not been; where an operator takes a host array of the
 * tokens seen before (counts0), it may be that. */
void mn_tape_set_position(mn_tape *tape, const int64_t *host);
bool mn_tape_goes_by_position(const mn_tape *tape);
const int64_t *mn_tape_position(const mn_tape *tape);

/* Waits for the device and writes what losses tell to where they were asked to. On a CPU it is
 * there already, and after a plan there is nothing. */
mn_status mn_tape_results(mn_tape *tape);

/* Where the loss of this step is on a device, for work that goes on there: a double, its mean, and
 * an int64, over how many targets; NULL on a CPU and before there is one. */
const void *mn_tape_told(const mn_tape *tape);

/* Waits, and copies the numbers of x, in the order of its axes, to host memory as float32. */
mn_status mn_tape_read(mn_tape *tape, const mn_tensor *x, float *out);

/* The same without waiting, to memory of mn_device_host_allocate: part of a step on a device that
 * may be recorded. */
mn_status mn_tape_send(mn_tape *tape, mn_tensor *x, float *out);

/* ---- leaves ---------------------------------------------------------------------------------- */

/* A parameter (or any constant) of the caller: shape (1,1,rows,cols), vectors as (1,1,1,n).
 * `grad` may be NULL; with `add` the gradient is added to what is there, else it replaces it. A
 * parameter no gradient reaches is left alone: see mn_tape_untouched. */
mn_tensor *mn_tape_leaf(mn_tape *tape, void *data, void *grad, int64_t rows, int64_t cols,
                        bool add);

/* The same with types of its own, on devices: values of MN_BF16 (the shadow of a float32 master) or
 * MN_F32, the gradient MN_F32 or that of the values. mn_tape_leaf takes values of the tape's type,
 * and float32 gradients on a tape of bf16. */
mn_tensor *mn_tape_leaf_of(mn_tape *tape, void *data, mn_dtype data_dtype, void *grad,
                           mn_dtype grad_dtype, int64_t rows, int64_t cols, bool add);

/* Weights (rows, cols) in 8 or 4 bits, on the tape's side; projections, heads and embeddings take
 * them. Whatever else does fails, or where the tape plans sets quant->misused. */
mn_tensor *mn_tape_leaf_quant(mn_tape *tape, mn_quant *quant);

/* True when this leaf asks for a gradient and none has reached it. */
bool mn_tape_untouched(const mn_tensor *leaf);

/* An input (B,T,H,X) of the caller, contiguous, in the tape's type. `grad` may be NULL. */
mn_tensor *mn_tape_input(mn_tape *tape, void *data, void *grad, const int64_t shape[4]);

/* One number after the other in the order of the axes. */
bool mn_is_contiguous(const mn_tensor *x);

/* Of step memory, for `n` sequences, to be filled and put into an input. NULL after a failure. */
mn_tensor_rows *mn_tape_rows(mn_tape *tape, int64_t n);

/* An uninitialised activation that gets a gradient: what operations below make. Of the tape's type,
 * or of another. */
mn_tensor *mn_tape_new(mn_tape *tape, const int64_t shape[4]);
mn_tensor *mn_tape_new_of(mn_tape *tape, mn_dtype dtype, const int64_t shape[4]);

/* Constants without gradient: one number everywhere, or those of a host array, which is copied. */
mn_tensor *mn_tape_filled(mn_tape *tape, const int64_t shape[4], double value);
mn_tensor *mn_tape_constant(mn_tape *tape, const int64_t shape[4], const double *values);

/* Normal numbers without gradient, a function of (seed, stream, place). */
mn_tensor *mn_tape_normal(mn_tape *tape, const int64_t shape[4], uint64_t seed, uint64_t stream);

/* The same numbers in another type; x itself if it has it. */
mn_tensor *mn_tape_cast(mn_tape *tape, mn_tensor *x, mn_dtype dtype);

/* ---- shapes: views that compute nothing ------------------------------------------------------ */

/* The same numbers with X cut into heads, (B,T,1,HX) -> (B,T,H,X), and back. */
mn_tensor *mn_tape_heads(mn_tape *tape, mn_tensor *x, int64_t n_heads);
mn_tensor *mn_tape_flat(mn_tape *tape, mn_tensor *x);

/* Any shape of as many numbers, of a contiguous tensor: parameters mostly. */
mn_tensor *mn_tape_shaped(mn_tape *tape, mn_tensor *x, const int64_t shape[4]);

/* Cuts the last axis into n parts, which cover it. `x` itself is used for nothing else. */
void mn_tape_split(mn_tape *tape, mn_tensor *x, const int64_t *widths, int n, mn_tensor **parts);

/* ---- operations ------------------------------------------------------------------------------ */

/* What a token attends to, on a tape that goes by position (mn_decode_attention in
 * kernels/decode.h). Caches are (capacity, J, K) and (capacity, J, V) of the tape's type, declared,
 * and hold the tokens before this one; `inv_freq` is the host's, and need not outlive the call. */
typedef struct mn_attend {
    void *keys, *values;
    int64_t capacity, window, turns;    // channels that turn, 0: none
    double scale, turned_scale;
    const double *inv_freq;
    bool relu;                          // in place of the softmax
    double eps;                         // of relu
} mn_attend;

/* Whether heads of K and V channels can be attended to so. */
bool mn_tape_attends(const mn_tape *tape, int64_t K, int64_t V);

/* o (1,1,H,V) of q (1,1,H,K), k (1,1,J,K) and v (1,1,J,V), which are put behind the caches. */
mn_tensor *mn_tape_attend(mn_tape *tape, const mn_attend *how, mn_tensor *q, mn_tensor *k,
                          mn_tensor *v);

/* The same of HyperMLP or, where q has two branches a head, HyperGLU: caches are (capacity, Q, K)
 * and (capacity, H, V), and hold fewer than P tokens. A mix is absent, or has a rank and all its
 * factors: c (1,1,Q,R) or (1,1,H,R), and parameters U (Q,P,R), Vt (Q,R,P), d (Q,P). */
typedef struct mn_hyper_mix {
    int64_t R;
    mn_tensor *c, *U, *Vt, *d;          // NULL: absent
} mn_hyper_mix;

typedef struct mn_hyper {
    void *keys, *values;
    int64_t capacity, P;
    bool by_place, normed;              // as mn_decode_hyper has them
    double eps;
    mn_hyper_mix mix[2];
} mn_hyper;

/* o (1,1,H,V) of q and k (1,1,Q,K), v (1,1,H,V) and the gate gv (1,1,H,V) or NULL. */
mn_tensor *mn_tape_hyper(mn_tape *tape, const mn_hyper *how, mn_tensor *q, mn_tensor *k,
                         mn_tensor *v, mn_tensor *gv);

/* x W' + b for every row of x (B,T,1,in); W is (out,in), b (out) or NULL. */
mn_tensor *mn_tape_linear(mn_tape *tape, mn_tensor *x, mn_tensor *weight, mn_tensor *bias);

/* y_i = x W_i' for n weights, up to 8. Where weights follow each other in memory, and their
 * gradients too, as those of a model on a GPU do, one product makes their results, which are then
 * parts of its rows: not contiguous. */
void mn_tape_linears(mn_tape *tape, mn_tensor *x, mn_tensor *const *weights, int n,
                     mn_tensor **results);

/* onto + x W' + b, where x was computed from `onto` as in mn_tape_residual: the product adds, and
 * the sum is all that is kept. onto NULL: mn_tape_linear. */
mn_tensor *mn_tape_linear_onto(mn_tape *tape, mn_tensor *onto, mn_tensor *x, mn_tensor *weight,
                               mn_tensor *bias);

/* The same for x = f(u) v, or f(u) where v is NULL: the end of an MLP. x is not kept: going back it
 * is made again in the pass that makes the gradients of u and v. */
mn_tensor *mn_tape_gated_onto(mn_tape *tape, mn_tensor *onto, mn_unary f, mn_tensor *u,
                              mn_tensor *v, mn_tensor *weight);

/* Block h of n of every row of x (B,T,1,n in) times matrix h of `weight` (n in, out), which are
 * (in,out): (B,T,1,n out). */
mn_tensor *mn_tape_linear_blocks(mn_tape *tape, mn_tensor *x, mn_tensor *weight, int64_t n);

/* f(x), and f(x) b. Any axis of b may be 1: it then counts for all of that axis of x. */
mn_tensor *mn_tape_unary(mn_tape *tape, mn_unary f, mn_tensor *x);
mn_tensor *mn_tape_gate(mn_tape *tape, mn_unary f, mn_tensor *x, mn_tensor *b);

/* -e^a softplus(x + b), axes of a and b repeated as those of b above: a log decay. */
mn_tensor *mn_tape_decay(mn_tape *tape, mn_tensor *x, mn_tensor *b, mn_tensor *a);

/* scale x + shift */
mn_tensor *mn_tape_affine(mn_tape *tape, mn_tensor *x, double scale, double shift);

/* a + b, a b. Any axis of b may be 1: it then counts for all of that axis of a. */
mn_tensor *mn_tape_add(mn_tape *tape, mn_tensor *a, mn_tensor *b);
mn_tensor *mn_tape_multiply(mn_tape *tape, mn_tensor *a, mn_tensor *b);

/* Sums of x over the axes that are 1 in `shape`, whose others are those of x; in float32, without
 * gradient. */
mn_tensor *mn_tape_sum(mn_tape *tape, mn_tensor *x, const int64_t shape[4]);

/* a + b c, a and b of one shape; any axis of c may be 1. The result may take the place of `a`,
 * which is not light and used for nothing else, going back over what made it neither. `product`:
 * NULL, or a product of b by a gate of each row, of which `a` was made, b being used for nothing
 * else: a device makes the gradient of b from both at once. */
mn_tensor *mn_tape_add_scaled(mn_tape *tape, mn_tensor *a, mn_tensor *b, mn_tensor *c,
                              const mn_tensor *product);

/* x with axes of 1 repeated up to `shape`. */
mn_tensor *mn_tape_spread(mn_tape *tape, mn_tensor *x, const int64_t shape[4]);

/* Gates of heads from u and w (B,T,1,H) and three parameters of H numbers, at once:
 *
 *   write = sigmoid(u)    strength = write softplus(scale)    decay = -softplus(w + bias) e^rate
 *
 * write and strength (B,T,H,1), the log decay (B,T,1,H) in float32 on a tape of bf16. */
typedef struct mn_head_gates {
    mn_tensor *write, *strength, *decay;    // NULL after a failure
} mn_head_gates;

mn_head_gates mn_tape_head_gates(mn_tape *tape, mn_tensor *u, mn_tensor *w, mn_tensor *scale,
                                 mn_tensor *bias, mn_tensor *rate);

/* x + b where b was computed from x by operations that all came after every other use of x: the
 * shape of a residual block. The three share one gradient, and nothing is copied going back. */
mn_tensor *mn_tape_residual(mn_tape *tape, mn_tensor *x, mn_tensor *b);

/* Head j of the result is head j / times of x: value heads that share a key head. */
mn_tensor *mn_tape_repeat(mn_tape *tape, mn_tensor *x, int64_t times);

/* Parts side by side along the last axis. */
mn_tensor *mn_tape_join(mn_tape *tape, mn_tensor *const *parts, int n);

/* max(x, low), with gradient 0 where low binds. */
mn_tensor *mn_tape_at_least(mn_tape *tape, mn_tensor *x, double low);

/* 1 / (softplus(x) + low). */
mn_tensor *mn_tape_precision(mn_tape *tape, mn_tensor *x, double low);

/* softmax over the last axis; the last axis turned, y_i = x_(i - by) with what falls off the end at
 * the front. */
mn_tensor *mn_tape_softmax(mn_tape *tape, mn_tensor *x);
mn_tensor *mn_tape_roll(mn_tape *tape, mn_tensor *x, int64_t by);

/* Tokens `places` (counted over B and T) of x (B,T,1,X) side by side: (1,n,1,X). `places` is
 * borrowed until the step's end and names no token twice. */
mn_tensor *mn_tape_pick(mn_tape *tape, mn_tensor *x, const int32_t *places, int64_t n);

/* The other way: zeros of `shape` (B,T,1,X), to which the counts[i] rows of parts[i], (1,n,1,X),
 * are added at their places, which are borrowed too and within one part name no token twice. */
mn_tensor *mn_tape_place(mn_tape *tape, mn_tensor *const *parts, const int32_t *const *places,
                         const int64_t *counts, int64_t n, const int64_t shape[4]);

/* Rows of `table` (vocabulary, D) by token: (B,T,1,D). Tokens are checked against the table. */
mn_tensor *mn_tape_embed(mn_tape *tape, mn_tensor *table, const int32_t *tokens, int64_t B,
                         int64_t T);

/* ---- loss ------------------------------------------------------------------------------------ */

typedef struct mn_loss_options {
    double weight;         // of the mean loss: 1 / accumulated batches; 0: 1
    double z_loss;         // times the mean of logsumexp^2, added to the loss
    double softcap;        // logits = cap tanh(logits / cap); 0: none
    float *nll;            // (B,T) of each token, 0 where the target is ignored; NULL: not wanted
    const int32_t *order;  // of a device: all rows, those with a target first; NULL: as they come
    int64_t n_ordered;     // the first so many of them are gone through; the others have no target
} mn_loss_options;

/* Cross entropy of logits x head' against `targets` (B,T), -100 ignored, in nats: the mean over
 * the others is returned through *loss, their number through *counted; at once on a CPU, by
 * mn_tape_results on a device, until when these and how->nll must stay. Logits exist for a few rows
 * at a time. Gradients are those of weight (mean + z_loss term). */
void mn_tape_loss(mn_tape *tape, mn_tensor *x, mn_tensor *head, const int32_t *targets,
                  const mn_loss_options *how, double *loss, int64_t *counted);

/* The same for a mixture: the probability of a target is the mean of those from n tensors, of one
 * shape. nll = log n - logsumexp_s(-nll_s); z_loss is left out. */
void mn_tape_mixture_loss(mn_tape *tape, mn_tensor *const *x, int n, mn_tensor *head,
                          const int32_t *targets, const mn_loss_options *how, double *loss,
                          int64_t *counted);

/* Starts the gradient of `x` at `cotangent` (contiguous, in the type of x), for tests and losses
 * computed elsewhere. */
void mn_tape_seed(mn_tape *tape, mn_tensor *x, const void *cotangent);

/* ---- memory for time ------------------------------------------------------------------------- */

/* Part of a model: what it makes of x, of the shape of x, by operations on the tape. */
typedef mn_tensor *(*mn_part_fn)(mn_tape *tape, mn_tensor *x, const void *job);

/* fn(tape, x, job), of which only the result is kept: going back, the part is computed once more,
 * with the same bits, and gone back over at once. `job` is copied; x is used by nothing else that
 * comes after. On a tape that does not record, too, only the result is kept. */
mn_tensor *mn_tape_checkpoint(mn_tape *tape, mn_tensor *x, mn_part_fn fn, const void *job,
                         size_t job_bytes);

/* Called by a part in front of the product onto a tensor that is its result. That product goes to
 * where the part's result is kept, and is left out where the part is computed once more: nobody
 * reads its numbers then. Nothing outside of parts. */
void mn_tape_ends_part(mn_tape *tape);

/* What follows, until the next call, is a part of which light results (tape/recompute.def) are
 * not kept: parts share memory for them, and going back a part first makes its own again, with
 * the same bits. `light` false: all results are kept. For what has no state; nothing on a tape
 * that does not record. */
void mn_tape_recompute(mn_tape *tape, bool light);

/* Within such a part, until the next call: results of sums, products and functions of numbers, of
 * projections (meant for those of few inputs) and of the operators that tape/recompute.def marks
 * so, are light as well. What the part ends with must not be one of them. */
void mn_tape_recompute_more(mn_tape *tape, bool lighter);

/* Going back, calls fn(context, number) once all that comes after has gone back: gradients of
 * leaves that nothing before uses are complete by then. Nothing on a tape that does not record. */
void mn_tape_notify(mn_tape *tape, void (*fn)(void *context, int number), void *context,
                    int number);

/* Goes back from all losses and seeds. Afterwards the tape holds no tensor that may be used. */
mn_status mn_tape_backward(mn_tape *tape);

/* ---- any operator of mneme.h ----------------------------------------------------------------- */

enum { MN_RUN_FIELDS = 32 };

/* One call of an operator on tensors:
 *
 *   mn_run run;
 *   mn_delta_net_args *args = mn_run_start(&run, tape, MN_OP_delta_net);
 *   args->decay = MN_DECAY_TOKEN; args->scale = scale;
 *   mn_run_in(&run, "q", q); ...
 *   mn_tensor *o = mn_run_out(&run, "o");
 *   mn_run_now(&run);
 *
 * Sizes of the call (B, T, H, K, V ...) follow from the tensors bound. An activation with field
 * axes BTHK is (B,T,H,K), with BTV or BTH (B,T,1,V) and (B,T,1,H), with * any whose rows are X
 * wide. Other fields (weights, states) bind contiguous tensors of as many numbers; sizes only they
 * name (G, P, R, S, W ...) are set by the caller in run.call before. A tensor of another type than
 * the field's is converted. */
typedef struct mn_run_rows mn_run_rows;

typedef struct mn_run {
    mn_tape *tape;
    mn_op_id op;
    mn_call *call;
    const mn_field *fields;
    int n_fields;
    mn_tensor *bound[MN_RUN_FIELDS];    // by field
    mn_run_rows *rows;                  // what differs by sequence; NULL: nothing does
    _Alignas(16) unsigned char args[MN_MAX_ARGS_BYTES];
} mn_run;

void *mn_run_start(mn_run *run, mn_tape *tape, mn_op_id op);

/* Binds an input; `x` may be NULL for an optional one only if `optional` says it is absent. */
void mn_run_in(mn_run *run, const char *field, mn_tensor *x);

/* Asks for a result; its memory is there at once, its numbers after mn_run_now. Bind inputs
 * first. States come as (1,1,1,count). */
mn_tensor *mn_run_out(mn_run *run, const char *field);

/* Binds a result to memory of the caller in the field's type, without gradient (states of a
 * session). */
void mn_run_out_at(mn_run *run, const char *field, void *data);

/* Binds an input to memory of the caller in the field's type, without gradient. */
void mn_run_in_at(mn_run *run, const char *field, const void *data);

/* Forward on a CPU only: the operator runs as n calls of one sequence each, whose bits are those of
 * such calls. Sequence b is row b of B, or with `starts` (borrowed until mn_run_now) the tokens
 * [starts[b], starts[b+1]) of B = 1. Say this before the fields. */
void mn_run_by_rows(mn_run *run, int64_t n, const int64_t *starts);

/* The calls are steps of one sequence: they run one after the other, and after step b the `bytes`
 * at `from` are copied to the b-th place at `to`. Up to 8 of these. */
void mn_run_row_save(mn_run *run, const void *from, void *to, size_t bytes);

/* Memory of the caller for field `field` of sequence `b` alone. */
void mn_run_row_at(mn_run *run, const char *field, int64_t b, void *data);

/* values[b] of sequence b for a number of the operator, `slot` in what mn_run_start gave. Borrowed
 * until mn_run_now. */
void mn_run_row_numbers(mn_run *run, int64_t *slot, const int64_t *values);

void mn_run_now(mn_run *run);

#endif
