/* unary.cu - y = f(x), y = f(x) b and their gradients (kernels/unary.def), one thread per pack
 * of numbers (elementwise.cuh), or a team of lanes per row where it shares a b (row_gate.cuh). */
#include "kernels/cuda/elementwise/elementwise_fwd.cuh"
#include "kernels/cuda/elementwise/row_gate.cuh"

/* AGAIN: makes y once more in the same pass. */
template <bool AGAIN>
struct backward {
    static constexpr int INS = 3, OUTS = AGAIN ? 3 : 2;    // x, b, dy; dx, db, y
    mn_unary kind;
    bool gates;

    template <bool NARROW, int N>
    __device__ void run(const float (&x)[INS + OUTS][N], float (&y)[OUTS][N]) const {
        mn_fn_both<NARROW>(kind, x[0], y[0], y[1]);
#pragma unroll
        for (int j = 0; j < N; j++) {
            if (AGAIN) y[OUTS - 1][j] = gates ? y[1][j] * x[1][j] : y[1][j];
            y[0][j] *= gates ? x[2][j] * x[1][j] : x[2][j];
            y[1][j] *= x[2][j];
        }
    }
};

MN_CUDA_WORK(unary) {
    const mn_unary_work *w = (const mn_unary_work *)work;
    (void)space;
    const bool gates = w->b.data;
    if (!w->dy.data) {
        return mn_run_each(mn_unary_forward{ w->f, gates }, w->shape, { &w->x, &w->b }, { &w->y },
                           { false }, where);
    }
    if (mn_is_row_gate(w->db, w->shape)) {
        return mn_gate_back_cuda({ w->shape, &w->f, &w->x, &w->b, &w->dy, &w->dx, &w->db, NULL,
                                   NULL, NULL, w->add_x, w->add_b }, where);
    }
    if (w->y.data) {
        return mn_run_each(backward<true>{ w->f, gates }, w->shape, { &w->x, &w->b, &w->dy },
                           { &w->dx, &w->db, &w->y }, { w->add_x, w->add_b, false }, where);
    }
    return mn_run_each(backward<false>{ w->f, gates }, w->shape, { &w->x, &w->b, &w->dy },
                       { &w->dx, &w->db }, { w->add_x, w->add_b }, where);
}
