/* unary.cu - y = f(x), y = f(x) b and their gradients (kernels/functions.h), one thread per pack
 * of numbers (elementwise.cuh), or a row_group of lanes per row where it shares a b (row_gate.cuh).
 * */
#include "kernels/cuda/elementwise/elementwise_fwd.cuh"
#include "kernels/cuda/elementwise/row_gate.cuh"

namespace mneme::elementwise {

/* RECOMPUTE: makes y once more in the same pass. */
template <bool RECOMPUTE>
struct backward {
    static constexpr int INS = 3, OUTS = RECOMPUTE ? 3 : 2;    // x, b, dy; dx, db, y
    mn_unary kind;
    bool gates;

    template <bool BF16, int N>
    __device__ void run(const float (&x)[INS + OUTS][N], float (&y)[OUTS][N]) const {
        mn_fn_value_slope<BF16>(kind, x[0], y[0], y[1]);
#pragma unroll
        for (int j = 0; j < N; j++) {
            if (RECOMPUTE) y[OUTS - 1][j] = gates ? y[1][j] * x[1][j] : y[1][j];
            y[0][j] *= gates ? x[2][j] * x[1][j] : x[2][j];
            y[1][j] *= x[2][j];
        }
    }
};

MN_CUDA_ELEMENTWISE(unary) {
    const mn_unary_params *w = (const mn_unary_params *)args;
    (void)workspace;
    const bool gates = w->b.data;
    if (!w->dy.data) {
        return mn_run_elementwise(mn_unary_forward{ w->f, gates }, w->shape, { &w->x, &w->b },
                                  { &w->y },
                           { false }, backend);
    }
    if (mn_is_row_gate(w->db, w->shape)) {
        return mn_row_gate_bwd_cuda({ w->shape, &w->f, &w->x, &w->b, &w->dy, &w->dx, &w->db, NULL,
                                   NULL, NULL, w->add_x, w->add_b }, backend);
    }
    if (w->y.data) {
        return mn_run_elementwise(backward<true>{ w->f, gates }, w->shape, { &w->x, &w->b, &w->dy },
                           { &w->dx, &w->db, &w->y }, { w->add_x, w->add_b, false }, backend);
    }
    return mn_run_elementwise(backward<false>{ w->f, gates }, w->shape, { &w->x, &w->b, &w->dy },
                       { &w->dx, &w->db }, { w->add_x, w->add_b }, backend);
}

}    // namespace mneme::elementwise
