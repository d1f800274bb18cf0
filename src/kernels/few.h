/* few.h - works on a few rows, such as those of one token, as one program of a GPU.
 *
 * On so few numbers a launch costs more than what it does, and steps that wait for each other more
 * than their arithmetic. A program is a list of stages that one kernel goes through, all processors
 * together: a barrier of the grid stands between two stages, and a processor asks for the weights
 * of the next one before it waits there. There are three kinds of stages: small works side by side,
 * each block of threads doing one chain of them; products of one input with several weights, which
 * may make their input by a small work first, and end with what follows from their columns alone;
 * and the recurrence of a matrix memory, which may make its queries and keys first.
 * ops/tape_delay.c chooses. */
#ifndef MN_KERNELS_FEW_H
#define MN_KERNELS_FEW_H

#include "kernels/product.h"
#include "kernels/tape_work.h"

typedef enum mn_few_kind {
#define FEW(id, inputs, results) MN_FEW_##id,
#include "kernels/few.def"
#undef FEW
    MN_FEW_KINDS
} mn_few_kind;

enum {
    MN_FEW_VIEWS = 6,
    MN_FEW_WORKS = 8,          // of a stage
    MN_FEW_PRODUCTS = 8,       // of a stage
    MN_FEW_ENDINGS = 12,       // of a stage
    MN_FEW_FRONTS = 2,         // that make queries and keys
    MN_FEW_DEEPEST = 8,        // rows of a product
    MN_FEW_NUMBERS = 1 << 13,  // of a small work, at most
};

/* Operators as mneme.h has them, works as tape_work.h has them. `f` is the function, the kind of a
 * pair, the kind of a norm, whether a convolution has SiLU; `order` that of a gated norm; scale is
 * also a norm's epsilon. */
typedef struct mn_few {
    mn_few_kind kind;
    int f, order;
    int64_t shape[4];
    mn_view at[MN_FEW_VIEWS];
    double scale, shift;
    const int32_t *index;
} mn_few;

/* Part i, works [first[i], first[i + 1]) one after the other; parts in any order. */
typedef struct mn_few_parts {
    int n_parts, first[MN_FEW_WORKS + 1];
    mn_few work[MN_FEW_WORKS];
} mn_few_parts;

/* c = a b' + bias, b (N,K) stored by rows, c (M,N); and sum = c + plus where that is there. */
typedef struct mn_few_product {
    const void *b, *bias, *plus;
    void *c, *sum;
    int64_t N, b_row;
} mn_few_product;

/* A small work that is done column by column as soon as a product's columns are there: a function,
 * a pair, a move or a convolution over as many numbers as the product has columns. Its inputs are
 * results of the stage's products and earlier endings, or were there before. */
typedef struct mn_few_ending {
    int product;               // whose columns it goes by
    mn_few work;
} mn_few_ending;

/* All of `dtype`. Where `first` is there it makes a, (M,K) and contiguous, which is also stored.
 * `settled`: the weights are older than the program. Endings are of one row. */
typedef struct mn_few_products {
    mn_dtype dtype;
    int64_t M, K, a_row;
    const void *a;
    const mn_few *first;
    bool settled;
    int n, n_endings;
    mn_few_product of[MN_FEW_PRODUCTS];
    mn_few_ending ending[MN_FEW_ENDINGS];
} mn_few_products;

/* S' = diag(exp g) S;  S = S' + beta w (v - S'^T e)';  o = scale S'q for one token, the state in
 * place. w absent: e; e absent: nothing is erased. `first`: norms that make q and e, whose rows
 * follow each other; or NULL. `settled`: the state is older than the program. */
typedef struct mn_few_memory {
    mn_call call;
    double scale;
    int decay;
    mn_in q, e, w, v, beta, g, state0;
    mn_out o, state;
    const mn_few *first[MN_FEW_FRONTS];
    bool settled;
} mn_few_memory;

/* A stage as the kernel reads it. */
enum { MN_FEW_STAGE_BYTES = 3584, MN_FEW_HEAD_BYTES = 256 };
typedef struct mn_few_stage {
    unsigned char at[MN_FEW_STAGE_BYTES];
} mn_few_stage;

#ifdef __cplusplus
extern "C" {
#endif

/* Whether the machine in use runs programs. */
bool mn_few_serves(void);

/* Whether a stage can do that. Products: alone, and with the endings noted. */
bool mn_few_multiplies(const mn_product_work *work);
int64_t mn_few_most_columns(void);    // of all products of a stage
bool mn_few_ends(const mn_few_products *products);
bool mn_few_remembers(const mn_few_memory *memory);

/* Stages from what is asked for. */
void mn_few_parts_stage(mn_few_stage *to, const mn_few_parts *parts);
void mn_few_products_stage(mn_few_stage *to, const mn_few_products *products);
void mn_few_memory_stage(mn_few_stage *to, const mn_few_memory *memory);

/* Puts a program on `stream` and returns 0 or a cudaError_t. `program`: the device's memory, a head
 * of MN_FEW_HEAD_BYTES that were zero when it was new, and the stages behind it. */
int mn_few_launch(void *program, int n_stages, void *stream);

#ifdef __cplusplus
}
#endif

#endif
