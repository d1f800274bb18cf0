/* cuda_none.c - stands in for the works of a GPU in a build without CUDA, where no device can be
 * opened that would call them. */
#include <stddef.h>

#include "kernels/conv_unit.h"
#include "kernels/decay.h"
#include "kernels/decode.h"
#include "kernels/norm_adds.h"
#include "kernels/gemm.h"
#include "kernels/elementwise.h"

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

int mn_norm_adds_cuda(const mn_rms_norm_args *args, mn_norm_adds to, void *parts, void *stream) {
    (void)args, (void)to, (void)parts, (void)stream;
    return 1;
}

int mn_norm_gated_adds_cuda(const mn_rms_norm_gated_args *args, mn_norm_adds to, void *parts,
                            void *stream) {
    (void)args, (void)to, (void)parts, (void)stream;
    return 1;
}

size_t mn_decay_cuda_bytes(const mn_decay_work *work) {
    (void)work;
    return 0;
}

int mn_decay_cuda(const mn_decay_work *work, void *space, void *stream) {
    (void)work, (void)space, (void)stream;
    return 1;
}

const mn_kernel *mn_conv_unit_kernel(mn_pass pass, const void *args) {
    (void)pass, (void)args;
    return NULL;
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

bool mn_few_programs_serve(void) {
    return false;
}

mn_few_program *mn_few_program_create(void) {
    return NULL;
}

void mn_few_program_destroy(mn_few_program *program) {
    (void)program;
}

void mn_few_program_clear(mn_few_program *program) {
    (void)program;
}

bool mn_few_program_multiply(mn_few_program *program, const mn_few_products *products) {
    (void)program, (void)products;
    return false;
}

bool mn_few_program_remember(mn_few_program *program, const mn_few_memory *memory) {
    (void)program, (void)memory;
    return false;
}

bool mn_few_program_pick(mn_few_program *program, const mn_few *row) {
    (void)program, (void)row;
    return false;
}

size_t mn_few_program_bytes(const mn_few_program *program) {
    (void)program;
    return 0;
}

void mn_few_program_write(const mn_few_program *program, void *to) {
    (void)program, (void)to;
}

int mn_few_program_launch(const mn_few_program *program, void *there, void *stream) {
    (void)program, (void)there, (void)stream;
    return 1;
}
