/* product_none.c - stands in for the works of a GPU in a build without CUDA, where no device can be
 * opened that would call them. */
#include <stddef.h>

#include "kernels/few.h"
#include "kernels/norm_adds.h"
#include "kernels/product.h"
#include "kernels/tape_work.h"

const mn_work_fn *mn_works_cuda(void) {
    return NULL;
}

mn_products *mn_products_create(void) {
    return NULL;
}

void mn_products_destroy(mn_products *products) {
    (void)products;
}

bool mn_products_fast(mn_products *products) {
    (void)products;
    return false;
}

int mn_products_run(mn_products *products, const mn_product_work *work, void *space, void *stream) {
    (void)products, (void)work, (void)space, (void)stream;
    return 1;
}

int mn_norm_adds_cuda(const mn_rms_norm_args *args, void *parts, void *stream) {
    (void)args, (void)parts, (void)stream;
    return 1;
}

bool mn_few_multiplies(const mn_product_work *work) {
    (void)work;
    return false;
}

int mn_few_run(const mn_few_parts *parts, void *stream) {
    (void)parts, (void)stream;
    return 1;
}

int mn_few_multiply(const mn_few_products *products, void *stream) {
    (void)products, (void)stream;
    return 1;
}
