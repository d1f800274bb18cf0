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

bool mn_few_serves(void) {
    return false;
}

bool mn_few_multiplies(const mn_product_work *work) {
    (void)work;
    return false;
}

int64_t mn_few_most_columns(void) {
    return 0;
}

bool mn_few_ends(const mn_few_products *products) {
    (void)products;
    return false;
}

bool mn_few_remembers(const mn_few_memory *memory) {
    (void)memory;
    return false;
}

void mn_few_parts_stage(mn_few_stage *to, const mn_few_parts *parts) {
    (void)to, (void)parts;
}

void mn_few_products_stage(mn_few_stage *to, const mn_few_products *products) {
    (void)to, (void)products;
}

void mn_few_memory_stage(mn_few_stage *to, const mn_few_memory *memory) {
    (void)to, (void)memory;
}

int mn_few_launch(void *program, int n_stages, void *stream) {
    (void)program, (void)n_stages, (void)stream;
    return 1;
}
