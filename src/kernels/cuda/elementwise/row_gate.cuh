/* row_gate.cuh - the way back over y = f(x) b, or x b, where a row of x has one number of b:
 *
 *   dx (+)= f'(x) dy b      db (+)= sum over the row of f(x) dy
 *
 * in one pass over x and dy (row_gate_bwd.cu), which unary.cu and elementwise.cu ask for. Of x
 * itself there may be a second product x c, with cotangent e: dx gets e c too, dc = sum of x e. */
#ifndef MN_KERNELS_CUDA_ELEMENTWISE_ROW_GATE_CUH
#define MN_KERNELS_CUDA_ELEMENTWISE_ROW_GATE_CUH

#include "kernels/cuda/elementwise/elementwise.cuh"

namespace mneme::elementwise {

/* dx, db or dc absent: not wanted; e absent: no second product. Strides of b, c, db and dc along X
 * do not count. */
struct mn_row_gate_bwd {
    const int64_t *shape;
    const mn_unary *f;    // NULL: x itself
    const mn_view *x, *b, *dy, *dx, *db, *e, *c, *dc;    // the last three may be NULL
    bool add_x, add_b;
};

int mn_row_gate_bwd_cuda(const mn_row_gate_bwd &w, void *stream);

/* Whether the gradient of b is one number to a row. */
inline bool mn_is_row_gate(const mn_view &db, const int64_t shape[4]) {
    return db.data && db.stride[3] == 0 && shape[3] > 1;
}

}    // namespace mneme::elementwise

#endif
