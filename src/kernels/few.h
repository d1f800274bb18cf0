/* few.h - works on a few rows, such as those of one token, several in one launch of a GPU.
 *
 * On so few numbers a launch costs more than what it does, and steps that wait for each other more
 * than their arithmetic. There are two kinds of launches: small works side by side, each block of
 * threads doing one chain of them, and products of one input with several weights, which may make
 * their input by a small work first and add to their results last. ops/tape_delay.c chooses. */
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
    MN_FEW_WORKS = 16,         // of a launch
    MN_FEW_PRODUCTS = 8,       // of a launch
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

/* All of `dtype`. Where `first` is there it makes a, (M,K) and contiguous, which is also stored.
 * `settled`: the weights are older than the launches that this one may overlap with. */
typedef struct mn_few_products {
    mn_dtype dtype;
    int64_t M, K, a_row;
    const void *a;
    const mn_few *first;
    bool settled;
    int n;
    mn_few_product of[MN_FEW_PRODUCTS];
} mn_few_products;

#ifdef __cplusplus
extern "C" {
#endif

/* Whether such a launch can do the product. */
bool mn_few_multiplies(const mn_product_work *work);

/* Put work on `stream` and return 0 or a cudaError_t. */
int mn_few_run(const mn_few_parts *parts, void *stream);
int mn_few_multiply(const mn_few_products *products, void *stream);

#ifdef __cplusplus
}
#endif

#endif
