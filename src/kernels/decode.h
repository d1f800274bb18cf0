/* decode.h - works on a few rows, such as those of one token, several in one launch of a GPU.
 *
 * On so few numbers a launch costs more than what it does, and steps that wait for each other more
 * than their arithmetic. There are three kinds of launches: small works side by side, each block of
 * threads doing one chain of them; products of one input with several weights, which may make their
 * input by a small work first and add to their results last; and programs, for what is done again
 * and again with the same memory, one kernel that goes through many stages: products of one row,
 * with what follows from their columns, and the recurrence of a matrix memory.
 * decode/defer.c chooses. */
#ifndef MN_KERNELS_DECODE_H
#define MN_KERNELS_DECODE_H

#include "kernels/gemm.h"
#include "kernels/elementwise.h"

typedef enum mn_few_kind {
#define FEW(id, inputs, results) MN_FEW_##id,
#include "kernels/decode_jobs.def"
#undef FEW
    MN_FEW_KINDS
} mn_few_kind;

enum {
    MN_FEW_VIEWS = 6,
    MN_FEW_WORKS = 16,         // of a launch
    MN_FEW_PRODUCTS = 8,       // of a launch
    MN_FEW_ENDINGS = 12,       // of a stage
    MN_FEW_FRONTS = 2,         // that make queries and keys
    MN_FEW_DEEPEST = 8,        // rows of a product
    MN_FEW_NUMBERS = 1 << 13,  // of a small work, at most
    MN_FEW_MOVED = 1 << 18,    // of a move that is to be a stage's ending
    MN_FEW_TOGETHER = 8,       // columns of a product that endings have at once
};

/* Operators as mneme.h has them, works as elementwise.h has them. `f` is the function, the kind of
 * a
 * pair, the kind of a norm, whether a convolution has SiLU; `order` that of a gated norm; scale is
 * also a norm's epsilon. */
typedef struct mn_few {
    mn_few_kind kind;
    int f, order;
    int64_t shape[4];
    mn_view at[MN_FEW_VIEWS];
    int64_t numbers[MN_FEW_VIEWS];    // from the first to the last of a view
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
 * a pair, a move or a convolution over as many numbers as the product has columns, or over one
 * number for each of several groups of MN_FEW_TOGETHER columns or a multiple. Its inputs are
 * results of the stage's products and earlier endings, or were there before. */
typedef struct mn_few_ending {
    int product;               // whose columns it goes by
    mn_few work;
} mn_few_ending;

/* All of `dtype`. Where `first` is there it makes a, (M,K) and contiguous, which is also stored.
 * `settled`: the weights are older than the launches that this one may overlap with. Endings are of
 * one row, and of programs only. */
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

/* S' = diag(exp g) S;  S = S' + beta w (v - S'^T e)';  o = scale S'^T q for one token, the state in
 * place. w absent: e; e absent: nothing is erased. `first`: norms that make q and e, whose rows
 * follow each other; or NULL. */
typedef struct mn_few_memory {
    mn_call call;
    double scale;
    int decay;
    mn_in q, e, w, v, beta, g, state0;
    mn_out o, state;
    const mn_few *first[MN_FEW_FRONTS];
} mn_few_memory;

/* What is to be launched as one kernel, stage by stage. */
typedef struct mn_few_program mn_few_program;

#ifdef __cplusplus
extern "C" {
#endif

/* Whether such a launch can do the product. */
bool mn_few_multiplies(const mn_product_work *work);

/* Put work on `stream` and return 0 or a cudaError_t. */
int mn_few_run(const mn_few_parts *parts, void *stream);
int mn_few_multiply(const mn_few_products *products, void *stream);

/* Whether the machine in use runs programs. */
bool mn_few_programs_serve(void);

/* An empty program; NULL when memory is out. */
mn_few_program *mn_few_program_create(void);
void mn_few_program_destroy(mn_few_program *program);    // NULL accepted
void mn_few_program_clear(mn_few_program *program);

/* Adds a stage. False, and nothing changed, where no stage does that, or none behind what is there
 * already: something is read or written that earlier stages write in another way. */
bool mn_few_program_multiply(mn_few_program *program, const mn_few_products *products);
bool mn_few_program_remember(mn_few_program *program, const mn_few_memory *memory);
bool mn_few_program_pick(mn_few_program *program, const mn_few *row);    // one row of a table

/* The program as its kernel reads it: its size, 0 where there is no stage; its bytes; and a launch
 * of what was copied to the device's memory, `there`, which other launches may follow. Returns 0 or
 * a cudaError_t. */
size_t mn_few_program_bytes(const mn_few_program *program);
void mn_few_program_write(const mn_few_program *program, void *to);
int mn_few_program_launch(const mn_few_program *program, void *there, void *stream);

#ifdef __cplusplus
}
#endif

#endif
