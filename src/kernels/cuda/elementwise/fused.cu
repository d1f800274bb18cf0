/* fused.cu - functions between the parts of composed operators (FUSED rows of elementwise.def), one
 * thread per pack of numbers (elementwise.cuh). */
#include "kernels/cuda/elementwise/elementwise_fwd.cuh"

namespace mneme::elementwise {

/* The same function of float32 whatever types the views have: approximations are the tape's. */
#define FUSED(id, ins, outs, about)                                                                \
    struct fused_##id {                                                                            \
        static constexpr int INS = ins, OUTS = outs;                                               \
                                                                                                   \
        template <bool BF16, int N>                                                                \
        __device__ void run(const float (&x)[ins + outs][N], float (&y)[outs][N]) const {          \
            _Pragma("unroll")                                                                      \
            for (int j = 0; j < N; j++) {                                                          \
                float result[3];                                                                   \
                mn_functions<false>::fused_##id(result, x[0][j], x[1][j],                          \
                                                ins > 2 ? x[2][j] : 0.0f);                         \
                _Pragma("unroll")                                                                  \
                for (int k = 0; k < outs; k++) y[k][j] = result[k];                                \
            }                                                                                      \
        }                                                                                          \
    };
#include "kernels/elementwise.def"

template <typename F>
static int run(const mn_fused_params *w, void *stream) {
    mn_elementwise<F> e = {};
    for (int i = 0; i < F::INS; i++) e.operand[i] = mn_operand_of(w->in[i]);
    for (int i = 0; i < F::OUTS; i++) e.operand[F::INS + i] = mn_operand_of(w->out[i]);
    return mn_launch_elementwise(e, w->shape, (cudaStream_t)stream);
}

MN_CUDA_ELEMENTWISE(fused) {
    const mn_fused_params *w = (const mn_fused_params *)args;
    (void)workspace;
    switch (w->f) {
#define FUSED(id, ins, outs, about)                                                                \
    case MN_FUSED_##id: return run<fused_##id>(w, backend);
#include "kernels/elementwise.def"
    default: return cudaErrorInvalidValue;
    }
}

}    // namespace mneme::elementwise
