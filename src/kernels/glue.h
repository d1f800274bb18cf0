/* glue.h - the small steps between the parts of composed operators on a GPU. */
#ifndef MN_KERNELS_GLUE_H
#define MN_KERNELS_GLUE_H

#include "mneme.h"

typedef enum mn_glue_id {
#define GLUE(name, ins, outs, about) MN_GLUE_##name,
#define GLUE_SUM(name, about) MN_GLUE_##name,
#include "kernels/glue.def"
    MN_GLUE_COUNT
} mn_glue_id;

/* Tensors of a step that are float32 whatever its type is. */
enum {
    MN_GLUE_F32_A = 1, MN_GLUE_F32_B = 2, MN_GLUE_F32_C = 4,
    MN_GLUE_F32_X = 8, MN_GLUE_F32_Y = 16, MN_GLUE_F32_Z = 32,
};

/* Rows (b, t, h) of `width` numbers. Views that a step does not use stay zero; an input that is
 * absent counts as zeros, a result that is absent is not wanted. */
typedef struct mn_glue {
    mn_dtype dtype;             // MN_F32 or MN_BF16, of all tensors but the wide ones
    unsigned wide;              // bits of the above
    int64_t B, T, H, width;
    mn_in a, b, c;
    mn_out x, y, z;
} mn_glue;

/* Puts the step on a CUDA stream; returns 0 or the cudaError_t of the launch. */
typedef int (*mn_glue_fn)(const mn_glue *args, void *stream);

/* NULL in a build without CUDA. */
mn_glue_fn mn_glue_cuda(mn_glue_id id);

#endif
