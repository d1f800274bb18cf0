/* cuda_none.c - stands in for the works of a GPU in a build without CUDA, where no device can be
 * opened that would call them. */
#include <stddef.h>

#include "kernels/conv_unit.h"
#include "kernels/delta_gpu.h"
#include "kernels/decay.h"
#include "kernels/decode_image.h"
#include "kernels/norm_adds.h"
#include "kernels/gemm.h"
#include "kernels/elementwise.h"

const mn_elementwise_fn *mn_elementwise_cuda(void) {
    return NULL;
}

mn_gemm_handle *mn_gemm_create(void) {
    return NULL;
}

void mn_gemm_destroy(mn_gemm_handle *gemms) {
    (void)gemms;
}

bool mn_gemm_has_cublaslt(mn_gemm_handle *gemms) {
    (void)gemms;
    return false;
}

int mn_gemm_run(mn_gemm_handle *gemms, const mn_gemm_problem *work, void *space, void *stream) {
    (void)gemms, (void)work, (void)space, (void)stream;
    return 1;
}

bool mn_gemm_rows_supported(const mn_gemm_problem *work) {
    (void)work;
    return false;
}

int mn_gemm_rows(const mn_gemm_problem *works, int n, void *stream) {
    (void)works, (void)n, (void)stream;
    return 1;
}

int mn_gemm_quant_several(const mn_gemm_problem *works, int n, void *stream) {
    (void)works, (void)n, (void)stream;
    return 1;
}

int mn_decode_run_attention(const mn_decode_attention *attention, void *stream) {
    (void)attention, (void)stream;
    return 1;
}

int mn_decode_run_hyper(const mn_decode_hyper *hyper, void *stream) {
    (void)hyper, (void)stream;
    return 1;
}

int mn_decode_likeliest(const float *logits, int64_t rows, int64_t width, int64_t n, int32_t *out,
                        void *stream) {
    (void)logits, (void)rows, (void)width, (void)n, (void)out, (void)stream;
    return 1;
}

int mn_norm_accumulate_cuda(const mn_rms_norm_args *args, mn_norm_accumulate to, void *parts,
                            void *stream) {
    (void)args, (void)to, (void)parts, (void)stream;
    return 1;
}

int mn_norm_gated_accumulate_cuda(const mn_rms_norm_gated_args *args, mn_norm_accumulate to,
                                  void *parts,
                            void *stream) {
    (void)args, (void)to, (void)parts, (void)stream;
    return 1;
}

size_t mn_decay_cuda_bytes(const mn_decay_params *work) {
    (void)work;
    return 0;
}

int mn_decay_cuda(const mn_decay_params *work, void *space, void *stream) {
    (void)work, (void)space, (void)stream;
    return 1;
}

const mn_kernel *mn_conv_unit_kernel(mn_pass pass, const void *args) {
    (void)pass, (void)args;
    return NULL;
}

const mn_kernel *mn_delta_product_kernel(mn_pass pass, const void *args) {
    (void)pass, (void)args;
    return NULL;
}

bool mn_delta_folds_groups(const void *args) {
    (void)args;
    return false;
}

bool mn_decode_gemms_supported(const mn_gemm_problem *work) {
    (void)work;
    return false;
}

int mn_decode_run_chains(const mn_decode_chains *parts, void *stream) {
    (void)parts, (void)stream;
    return 1;
}

int mn_decode_run_gemms(const mn_decode_gemms *gemms, void *stream) {
    (void)gemms, (void)stream;
    return 1;
}

int mn_megakernel_blocks(void) {
    return 0;
}

bool mn_megakernel_takes_step(mn_decode_step_kind step, const void *args) {
    (void)step, (void)args;
    return false;
}

void mn_megakernel_fill_job(void *to, const mn_decode_op *work, int64_t begin, int64_t end,
                            int turn, bool waits) {
    (void)to, (void)work, (void)begin, (void)end, (void)turn, (void)waits;
}

int mn_megakernel_start(const mn_decode_launch_args *given, void *image, void *stream) {
    (void)given, (void)image, (void)stream;
    return 1;
}
