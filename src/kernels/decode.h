/* decode.h - works on a few rows, such as those of one token, several in one launch of a GPU.
 *
 * On so few elements a launch costs more than what it does, and steps that wait for each other
 * more than their arithmetic. There are three kinds of launches: small works side by side, each
 * block of threads doing one chain of them; products of one input with several weights, which
 * may make their input by a small work first and add to their results last; and megakernels, for
 * what is done again and again with the same memory, one kernel that goes through many stages:
 * products of one row, with what follows from their columns, the recurrence of a matrix state,
 * small works and steps of operators. decode/defer.c chooses. */
#ifndef MN_KERNELS_DECODE_H
#define MN_KERNELS_DECODE_H

#include "kernels/gemm.h"
#include "kernels/elementwise.h"

typedef enum mn_decode_op_kind {
#define KIND_DECODE(id) MN_DECODE_##id,
#define KIND_NO_DECODE(id)
#define JOB(id, name, ins, outs, workspace, decode, about) KIND_##decode(id)
#define DECODE_JOB(id, ins, outs, weights, about) MN_DECODE_##id,
#include "kernels/elementwise.def"
#undef KIND_DECODE
#undef KIND_NO_DECODE
    MN_DECODE_KINDS
} mn_decode_op_kind;

enum {
    MN_DECODE_VIEWS = 6,
    MN_DECODE_OPS = 16,         // of a launch
    MN_DECODE_GEMMS = 8,       // of a launch
    MN_DECODE_EPILOGUES = 12,       // of a stage
    MN_DECODE_QK_NORMS = 2,         // that make queries and keys
    MN_DECODE_MAX_M = 8,        // rows of a product
    MN_DECODE_MAX_NUMEL = 1 << 13,  // of a small work, at most
    MN_DECODE_MAX_MOVE = 1 << 18,    // of a move that is to be a stage's epilogue
    MN_DECODE_COL_TILE = 8,       // columns of a product that epilogues have at once
    MN_DECODE_TAPS = 4,           // of a convolution that follows a product
    MN_DECODE_ATTEND_KEYS = 256,  // keys of a part of attention
    MN_DECODE_ATTEND_WIDEST = 256,    // channels of a head that attends
    MN_DECODE_HYPER_RANKS = 512,      // ranks of a mix of HyperMLP, at most
};

/* Values of mn_decode_op: order and f of a gated norm, f of a norm by its root. */
enum { MN_DECODE_GATE_FIRST = 1, MN_DECODE_SIGMOID = 1, MN_DECODE_ROOT = 1 };

/* Operators as mneme.h has them, works as elementwise.h has them. `f` is the function, the kind
 * of a pair, the kind of a norm, whether a convolution has SiLU; `order` that of a gated norm;
 * scale is also a norm's epsilon. */
typedef struct mn_decode_op {
    mn_decode_op_kind kind;
    int f, order;
    int64_t shape[4];
    mn_view at[MN_DECODE_VIEWS];
    int64_t elements[MN_DECODE_VIEWS];    // from the first to the last of a view
    double scale, shift;
    const int32_t *index;
    /* Of a launch for several sequences: all of the above is one sequence's, and the views of the
     * next one begin so many bytes further on. All 0: each sequence does the same. */
    int64_t advance[MN_DECODE_VIEWS];
} mn_decode_op;

/* Part i, works [first[i], first[i + 1]) one after the other; parts in any order. */
typedef struct mn_decode_chains {
    int64_t sequences;      // each does all of it; 0: there are none to tell apart
    int n_chains, first[MN_DECODE_OPS + 1];
    mn_decode_op work[MN_DECODE_OPS];
} mn_decode_chains;

/* c = a b' + bias, b (N,K) stored by rows, c (M,N); and sum = c + plus where that is there. Where
 * `wide_bias` is, which is for megakernels, `bias` is made of it. */
typedef struct mn_decode_gemm {
    const void *b, *bias, *plus;
    const float *wide_bias;
    void *c, *sum;
    int64_t N, b_row;
    const mn_quant *quant;     // in place of b; all of a launch in as many bits, or none
} mn_decode_gemm;

/* A small work that is done column by column as soon as a product's columns are there: a function,
 * a pair, a move or a convolution over as many elements as the product has columns, or over one
 * number for each of several groups of MN_DECODE_COL_TILE columns or a multiple. Its inputs are
 * results of the stage's products and earlier epilogues, or were there before. */
typedef struct mn_decode_epilogue_op {
    int product;               // whose columns it goes by
    mn_decode_op work;
} mn_decode_epilogue_op;

/* All of `dtype`. Where `first` is there it makes a, (M,K) and contiguous, which is also stored.
 * `b_is_const`: the weights are older than the launches that this one may overlap with. `shares_a`:
 * others will read what `first` made. Epilogues are of one row, and of megakernels only. */
typedef struct mn_decode_gemms {
    mn_dtype dtype;
    int64_t M, K, a_row;
    const void *a;
    const mn_decode_op *first;
    bool b_is_const, shares_a;
    int n, n_epilogues;
    mn_decode_gemm of[MN_DECODE_GEMMS];
    mn_decode_epilogue_op epilogue[MN_DECODE_EPILOGUES];
} mn_decode_gemms;

/* S' = diag(exp g) S;  S = S' + beta w (v - S'^T e)';  o = scale S'^T q for one token, the state in
 * place. w absent: e; e absent: nothing is erased. `first`: norms that make q and e, whose rows
 * follow each other; or NULL. sum = o + plus where that is there, (H,V). */
typedef struct mn_decode_recurrence {
    mn_call call;
    double scale;
    int decay;
    mn_in q, e, w, v, beta, g, state0;
    mn_out o, state;
    const mn_decode_op *first[MN_DECODE_QK_NORMS];
    const void *plus;
    void *sum;
} mn_decode_recurrence;

/* Attention of one token over a cache, where the position n of the token is read when it
 * runs: a step that is recorded goes on by it.
 *
 *   rows n of the caches = turn(k), v
 *   o_h = sum_t w_t values_t,  w = softmax_t(scale turn(q_h).keys_t)
 *
 * over the newest `window` rows, or all n + 1 where that is 0; or `relu`, for all of them,
 * w = max(z, 0) / max(|z|, eps) of those scores z. Channels i and i + turns / 2 of q
 * and k turn by n inv_freq[i] and are multiplied by turned_scale. H query heads share J key-value
 * heads in turns; a head of q, k or v begins so many elements behind the one before. Parts of 256
 * keys are made for themselves, (H, n_parts, V + 2), and added in their order. */
typedef struct mn_decode_attention {
    mn_dtype dtype;                  // of all but parts
    int64_t H, J, K, V, capacity, window, turns, n_parts;
    bool relu;
    double scale, turned_scale, eps;
    const double *inv_freq;          // turns / 2 of them
    const int64_t *position;
    const void *q, *k, *v;
    int64_t q_step, k_step, v_step;
    void *keys, *values;             // (capacity, J, K) and (capacity, J, V)
    float *parts;
    void *o;                         // (H, V)
} mn_decode_attention;

/* A mix of a row x over lags of rank R: x (1 + d) + ((x U) c) Vt; without U and Vt there is none.
 * Of branch or head h everything begins so many elements behind that of the one before. */
typedef struct mn_decode_mix {
    const void *c, *U, *Vt, *d;          // (R), (P, R), (R, P), (P)
    int64_t R, c_step, U_step, Vt_step, d_step;
    bool wide;                           // d is of float32, and is rounded to the type of others
} mn_decode_mix;

/* HyperMLP or, with two branches a head, HyperGLU of one token over a cache (equations in
 * kernels/ref/hyper.c), where the position n of the token is read when it runs: rows n of the
 * caches become k and v, and n + 1 <= P keys are seen. Where there is no position, `n_keys` are
 * there already. In parts of 256 keys, which are added in their order:
 *
 *   scores (Q, n_parts, 256 + R)       mixed (H, n_parts, 256 + W + 1)      parts (H, n_parts, V)
 *
 * Phases go one after the other; each reads what all of the one before has made. */
typedef enum mn_hyper_phase {
    MN_HYPER_SCORES,                     // and the token's key and value; of a branch
    MN_HYPER_MIX,                        // what follows: of a head
    MN_HYPER_VALUES,
    MN_HYPER_OUTPUT,
    MN_HYPER_PHASES
} mn_hyper_phase;

typedef struct mn_decode_hyper {
    mn_dtype dtype;                      // of all but scores, mixed and parts
    int64_t H, Q, K, V, P, capacity, n_parts, n_keys;
    bool by_place, normed;               // entries go by keys' places; o is divided by |x1|
    double eps;
    const int64_t *position;
    const void *q, *k, *v, *gv;          // gv: or NULL
    int64_t q_step, k_step, v_step, gv_step, o_step;
    mn_decode_mix mix[2];                // of branches; of heads
    void *keys, *values;                 // (capacity, Q, K), (capacity, H, V)
    int64_t key_row, key_step, value_row, value_step;
    float *scores, *mixed, *parts;
    void *o;                             // (H, V)
} mn_decode_hyper;

/* What is to be launched as one kernel, stage by stage. */
typedef struct mn_megakernel mn_megakernel;

#ifdef __cplusplus
extern "C" {
#endif

/* Whether such a launch can do the product. */
bool mn_decode_gemms_supported(const mn_gemm_problem *work);

/* Put work on `stream` and return 0 or a cudaError_t. */
int mn_decode_run_chains(const mn_decode_chains *parts, void *stream);
int mn_decode_run_gemms(const mn_decode_gemms *gemms, void *stream);
int mn_decode_run_attention(const mn_decode_attention *attention, void *stream);
int mn_decode_run_hyper(const mn_decode_hyper *hyper, void *stream);

/* out[i] = the place of the largest of the first n of row i of logits, the first of equal ones; -1
 * where one is NaN or infinite, or all are -infinity. `out` may be the host's, of
 * mn_device_host_allocate. */
int mn_decode_likeliest(const float *logits, int64_t rows, int64_t width, int64_t n, int32_t *out,
                        void *stream);

/* Whether the machine in use runs megakernels. */
bool mn_megakernel_supported(void);

/* An empty megakernel; NULL when memory is out. */
mn_megakernel *mn_megakernel_create(void);
void mn_megakernel_destroy(mn_megakernel *megakernel);    // NULL accepted
void mn_megakernel_clear(mn_megakernel *megakernel);

/* Adds a stage. False, and nothing changed, where no stage does that, or none behind what is there
 * already: something is read or written that earlier stages write in another way. */
bool mn_megakernel_add_gemms(mn_megakernel *megakernel, const mn_decode_gemms *gemms);
bool mn_megakernel_add_recurrence(mn_megakernel *megakernel, const mn_decode_recurrence *memory);
bool mn_megakernel_add_attention(mn_megakernel *megakernel, const mn_decode_attention *attention);
bool mn_megakernel_add_hyper(mn_megakernel *megakernel, const mn_decode_hyper *hyper);
// one row of a table
bool mn_megakernel_add_gather(mn_megakernel *megakernel, const mn_decode_op *row);

/* The megakernel as its kernel reads it: its size, 0 where there is no stage; its bytes; and a
 * launch of what was copied to the device's memory, `there`, which other launches may follow.
 * Returns 0 or a cudaError_t. */
size_t mn_megakernel_bytes(const mn_megakernel *megakernel);
void mn_megakernel_encode(const mn_megakernel *megakernel, void *to);
int mn_megakernel_launch(const mn_megakernel *megakernel, void *there, void *stream);

#ifdef __cplusplus
}
#endif

#endif
