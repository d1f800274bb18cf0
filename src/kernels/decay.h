/* decay.h - log decays of layers on a GPU, y = -e^a softplus(x + b), and back.
 *
 *   dx (+)= -dy e^a sigmoid(x + b)      db (+)= sum over B and T of that      da (+)= sum of dy y
 *
 * b has a number for each head and channel of x; a too, or one per head. */
#ifndef MN_KERNELS_DECAY_H
#define MN_KERNELS_DECAY_H

#include "kernels/elementwise.h"

#ifdef __cplusplus
extern "C" {
#endif

/* Forward where y is there. Back where dy is: each gradient that is there. */
typedef struct mn_decay_params {
    int64_t shape[4];    // of x and y
    mn_view x, b, a;     // strides of repeated axes are 0
    mn_view y, dy, dx, db, da;
    bool add_x, add_b, add_a;
} mn_decay_params;

/* Bytes of work space that going back takes. */
size_t mn_decay_cuda_bytes(const mn_decay_params *args);

/* Returns 0 or the cudaError_t of a launch. */
int mn_decay_cuda(const mn_decay_params *args, void *workspace, void *stream);

#ifdef __cplusplus
}
#endif
#endif
