/* quant.h - models whose projections, embedding and head are kept in 8 or 4 bits.
 *
 * A parameter of such a model has `quant` in place of `value`. Matrices that serve products alone
 * are quantised, the embedding and the head in 8 bits whatever the others are in; norms, biases,
 * convolutions and what sets how memories fade stay float32. Forward passes only. */
#ifndef MN_MODEL_QUANT_H
#define MN_MODEL_QUANT_H

#include "model/model.h"
#include "ops/quantize.h"

/* What became of one parameter. */
typedef struct mn_quant_report {
    const mn_model_param *param;
    int bits;                  // 32: as it was
    double error;              // root of mean square errors over that of weights
    size_t bytes_before, bytes_after;    // in files of float32, and as it is now
} mn_quant_report;

/* Called with each parameter when it is done; not MN_OK ends the work with that status. */
typedef mn_status (*mn_quant_progress)(void *context, const mn_quant_report *report);

typedef struct mn_quant_options {
    int bits;                  // 8 or 4
    int64_t group;             // inputs that share a scale; 0: 128 in 8 bits, 64 in 4
    /* Text that the model reads first, so that errors count by what inputs are like; NULL: none. */
    const int32_t *tokens;
    int64_t n_tokens, length;  // in sequences of this length
    mn_quant_progress progress;
    void *progress_context;
} mn_quant_options;

/* Reads the model of folder `from` tensor by tensor, quantising each as it comes, and writes it to
 * `to`. Whole in memory is the result, or with tokens the model as well. */
mn_status mn_model_quantize_folder(const char *to, const char *from, mn_context *context,
                                   const mn_quant_options *options);

/* Quantises a float32 model of the host in place. */
mn_status mn_model_quantize(mn_model *model, mn_context *context, const mn_quant_options *options);

/* 8 or 4, and the group: as files of config.json say; 0: not quantised. */
int mn_model_quant_bits(const mn_model *model);

/* Bytes of parameters as they are in memory, on the host or a GPU, copies in bf16 left out. */
size_t mn_model_param_bytes(const mn_model *model);

#endif
