/* elementwise_fwd.cuh - what the works of a tape compute from each number, going forward: functions
 * with their slopes, pairs, copies, constants. Each is an F of elementwise.cuh.
 *
 * Where all numbers are bf16 exponentials, logarithms and quotients are the hardware's approximate
 * ones, off by some 1e-6 of a result, which is rounded to 4e-3 of itself. */
#ifndef MN_KERNELS_CUDA_ELEMENTWISE_ELEMENTWISE_FWD_CUH
#define MN_KERNELS_CUDA_ELEMENTWISE_ELEMENTWISE_FWD_CUH

#include "kernels/cuda/elementwise/elementwise.cuh"
#include "kernels/cuda/prim/activation.cuh"
#include "kernels/functions_double.h"

namespace mneme::elementwise {

/* ---- the functions (kernels/functions.h) ----------------------------------------------------- */

template <bool BF16>
__device__ inline float mn_fn_exp(float x) {
    return BF16 ? __expf(x) : expf(x);
}

/* The approximate one counts denormal numbers as 0, which saves what would scale them: most of its
 * instructions. */
template <bool BF16>
__device__ inline float mn_fn_sigmoid(float x) {
    return BF16 ? mn_sigmoid(x) : mn_sigmoid_exact(x);
}

/* log(1 + e^x) without overflow, and with all digits where e^x is small */
template <bool BF16>
__device__ inline float mn_fn_softplus(float x) {
    if (!BF16) return mn_softplus(x);
    const float e = __expf(-fabsf(x)), series = fmaf(-0.5f * e, e, e);
    return fmaxf(x, 0.0f) + (e < 0.01f ? series : __logf(1.0f + e));
}

template <bool BF16>
__device__ inline float mn_fn_tanh(float x) {
    if (!BF16) return tanhf(x);
    const float series = fmaf(-x * x * x, 1.0f / 3.0f, x);
    return fabsf(x) < 0.0625f ? series : 1.0f - 2.0f * mn_fn_sigmoid<true>(-2.0f * x);
}

/* The tanh form of GELU is x mn_fn_sigmoid(2 u), u its inner polynomial; and u's slope. */
__device__ inline float mn_fn_gelu_inner(float x) {
    const float slope = 0.79788456080286536f, cubic = 0.044715f;
    return slope * fmaf(cubic * x * x, x, x);
}

__device__ inline float mn_fn_gelu_inner_slope(float x) {
    const float slope = 0.79788456080286536f, cubic = 0.044715f;
    return slope * fmaf(3.0f * cubic * x, x, 1.0f);
}

template <bool BF16>
__device__ inline float mn_fn_gelu(float x) {
    return x * mn_fn_sigmoid<BF16>(2.0f * mn_fn_gelu_inner(x));
}

template <bool BF16>
__device__ inline float mn_fn_gelu_slope(float x) {
    const float s = mn_fn_sigmoid<BF16>(2.0f * mn_fn_gelu_inner(x));
    return s * fmaf(2.0f * x * (1.0f - s), mn_fn_gelu_inner_slope(x), 1.0f);
}

template <bool BF16>
__device__ inline float mn_fn_gelu_erf_slope(float x) {
    return fmaf(0.39894228f * x, mn_fn_exp<BF16>(-0.5f * x * x), 0.5f * erfcf(-0.70710678f * x));
}

/* value_SILU, slope_SILU, pair_ADD, fused_SWIGLU, ... */
template <bool BF16>
struct mn_functions {
#define NUMBER float
#define FUNCTION __device__ static inline
#define F(name) name
#define C(x) ((float)(x))
#define EXP(x) mn_fn_exp<BF16>(x)
#define SIGMOID(x) mn_fn_sigmoid<BF16>(x)
#define SOFTPLUS(x) mn_fn_softplus<BF16>(x)
#define TANH(x) mn_fn_tanh<BF16>(x)
#define SQRT(x) sqrtf(x)
#define GELU(x) mn_fn_gelu<BF16>(x)
#define GELU_SLOPE(x) mn_fn_gelu_slope<BF16>(x)
#define GELU_ERF(x) (0.5f * (x) * erfcf(-0.70710678f * (x)))
#define GELU_ERF_SLOPE(x) mn_fn_gelu_erf_slope<BF16>(x)
#define SQUARE_ABOVE_0(x) ((x) > 0.0f ? (x) * (x) : 0.0f)
#define FMA(a, b, c) fmaf(a, b, c)
#define FNMA(a, b, c) ((c) - (a) * (b))
#define PLUS_PRODUCT(c, a, b) fmaf(a, b, c)
#define ABOVE(x, low, a, b) ((x) > (low) ? (a) : (b))
#define GATE(x) mn_sigmoid_tail(x)
#define TIMES_SLOPE(dy, s) ((dy) * (s) * (C(1) - (s)))
#define IN_DOUBLE(f, a, b, c) ((float)f((double)(a), (double)(b), (double)(c)))
#include "kernels/functions.h"
#undef FUNCTION
#undef FMA
#undef FNMA
#undef PLUS_PRODUCT
#undef ABOVE
#undef TIMES_SLOPE
};

/* ---- over tensors ---------------------------------------------------------------------------- */

/* Slopes and values side by side, so that what they share is computed once. */
template <bool BF16, int N>
__device__ inline void mn_fn_value_slope(mn_unary kind, const float (&x)[N], float (&slope)[N],
                                  float (&value)[N]) {
    switch (kind) {
#define UNARY(id, name, about)                                                                     \
    case MN_UNARY_##id:                                                                            \
        _Pragma("unroll")                                                                          \
        for (int j = 0; j < N; j++) {                                                              \
            slope[j] = mn_functions<BF16>::slope_##id(x[j]);                                       \
            value[j] = mn_functions<BF16>::value_##id(x[j]);                                       \
        }                                                                                          \
        break;
#include "kernels/elementwise.def"
    default: break;
    }
}

struct mn_unary_forward {
    static constexpr int INS = 2, OUTS = 1;    // x, b; y
    mn_unary kind;
    bool gates;

    template <bool BF16, int N>
    __device__ void run(const float (&x)[3][N], float (&y)[1][N]) const {
        switch (kind) {
#define UNARY(id, name, about)                                                                     \
    case MN_UNARY_##id:                                                                            \
        _Pragma("unroll")                                                                          \
        for (int j = 0; j < N; j++) y[0][j] = mn_functions<BF16>::value_##id(x[0][j]);             \
        break;
#include "kernels/elementwise.def"
        default: break;
        }
        if (!gates) return;
#pragma unroll
        for (int j = 0; j < N; j++) y[0][j] *= x[1][j];
    }
};

struct mn_identity {
    static constexpr int INS = 1, OUTS = 1;

    template <bool BF16, int N>
    __device__ void run(const float (&x)[2][N], float (&y)[1][N]) const {
#pragma unroll
        for (int j = 0; j < N; j++) y[0][j] = x[0][j];
    }
};

struct mn_constant {
    static constexpr int INS = 0, OUTS = 1;
    float value;

    template <bool BF16, int N>
    __device__ void run(const float (&)[1][N], float (&y)[1][N]) const {
#pragma unroll
        for (int j = 0; j < N; j++) y[0][j] = value;
    }
};

/* Pairs of two inputs at most. */
struct mn_pair_forward {
    static constexpr int INS = 2, OUTS = 1;
    mn_pair_kind kind;
    float scale, shift;

    /* `kind` is asked once for all numbers: asking for each takes longer than memory. */
    template <bool BF16, int N>
    __device__ void run(const float (&x)[3][N], float (&y)[1][N]) const {
        const auto each = [&](auto of) {
#pragma unroll
            for (int j = 0; j < N; j++) y[0][j] = of(x[0][j], x[1][j]);
        };
        switch (kind) {
#define FORWARD_1(id) FORWARD_2(id)
#define FORWARD_2(id)                                                                              \
    case MN_PAIR_##id:                                                                             \
        each([this](float a, float b) {                                                            \
            return mn_functions<BF16>::pair_##id(a, b, 0.0f, scale, shift);                        \
        });                                                                                        \
        break;
#define FORWARD_3(id)
#define FORWARD_TAPE(id)
#define PAIR(id, ins, about) FORWARD_##ins(id)
#include "kernels/elementwise.def"
#undef FORWARD_1
#undef FORWARD_2
#undef FORWARD_3
#undef FORWARD_TAPE
        default: __builtin_unreachable();
        }
    }
};

}    // namespace mneme::elementwise

#endif
