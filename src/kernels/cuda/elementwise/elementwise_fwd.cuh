/* elementwise_fwd.cuh - what the works of a tape compute from each number, going forward: functions
 * with their slopes, pairs, copies, constants. Each is an F of elementwise.cuh.
 *
 * Where all numbers are bf16 exponentials, logarithms and quotients are the hardware's approximate
 * ones, off by some 1e-6 of a result, which is rounded to 4e-3 of itself. */
#ifndef MN_KERNELS_CUDA_ELEMENTWISE_ELEMENTWISE_FWD_CUH
#define MN_KERNELS_CUDA_ELEMENTWISE_ELEMENTWISE_FWD_CUH

#include "kernels/cuda/elementwise/elementwise.cuh"

namespace mneme::elementwise {

/* ---- the functions: value and slope at x ----------------------------------------------------- */

template <bool BF16>
__device__ inline float mn_fn_exp(float x) {
    return BF16 ? __expf(x) : expf(x);
}

/* The approximate one counts denormal numbers as 0, which saves what would scale them: most of its
 * instructions. */
template <bool BF16>
__device__ inline float mn_fn_sigmoid(float x) {
    if (!BF16) return 1.0f / (1.0f + expf(-x));
    float e, s;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(e) : "f"(x * -1.44269504088896341f));
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(s) : "f"(1.0f + e));
    return s;
}

/* log(1 + e^x) without overflow, and with all digits where e^x is small */
template <bool BF16>
__device__ inline float mn_fn_softplus(float x) {
    const float e = mn_fn_exp<BF16>(-fabsf(x));
    const float series = fmaf(-0.5f * e, e, e);
    const float rest = !BF16 ? log1pf(e) : e < 0.01f ? series : __logf(1.0f + e);
    return fmaxf(x, 0.0f) + rest;
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

#define MN_ACTIVATION(id, at_x, slope_at_x)                                                        \
    template <bool BF16>                                                                         \
    struct mn_fn_##id {                                                                            \
        __device__ static float value(float x) {                                                   \
            return at_x;                                                                           \
        }                                                                                          \
        __device__ static float slope(float x) {                                                   \
            slope_at_x                                                                             \
        }                                                                                          \
    };

MN_ACTIVATION(SILU, x * mn_fn_sigmoid<BF16>(x), {
    const float s = mn_fn_sigmoid<BF16>(x);
    return s * fmaf(x, 1.0f - s, 1.0f);
})
MN_ACTIVATION(SIGMOID, mn_fn_sigmoid<BF16>(x), {
    const float s = mn_fn_sigmoid<BF16>(x);
    return s * (1.0f - s);
})
MN_ACTIVATION(SOFTPLUS, mn_fn_softplus<BF16>(x), { return mn_fn_sigmoid<BF16>(x); })
MN_ACTIVATION(LOGSIGMOID, -mn_fn_softplus<BF16>(-x), { return mn_fn_sigmoid<BF16>(-x); })
MN_ACTIVATION(GELU, x * mn_fn_sigmoid<BF16>(2.0f * mn_fn_gelu_inner(x)), {
    const float s = mn_fn_sigmoid<BF16>(2.0f * mn_fn_gelu_inner(x));
    return s * fmaf(2.0f * x * (1.0f - s), mn_fn_gelu_inner_slope(x), 1.0f);
})
MN_ACTIVATION(GELU_ERF, 0.5f * x * erfcf(-0.70710678f * x), {
    return fmaf(0.39894228f * x, mn_fn_exp<BF16>(-0.5f * x * x), 0.5f * erfcf(-0.70710678f * x));
})
MN_ACTIVATION(EXP, mn_fn_exp<BF16>(x), { return mn_fn_exp<BF16>(x); })
MN_ACTIVATION(NEG_EXP, -mn_fn_exp<BF16>(x), { return -mn_fn_exp<BF16>(x); })
MN_ACTIVATION(TANH, mn_fn_tanh<BF16>(x), {
    const float t = mn_fn_tanh<BF16>(x);
    return 1.0f - t * t;
})
MN_ACTIVATION(RELU, x > 0.0f ? x : 0.0f, { return x > 0.0f ? 1.0f : 0.0f; })
MN_ACTIVATION(RELU_SQUARE, x > 0.0f ? x * x : 0.0f, { return x > 0.0f ? 2.0f * x : 0.0f; })
MN_ACTIVATION(ELU_ONE, x > 0.0f ? x + 1.0f : mn_fn_exp<BF16>(x),
         { return x > 0.0f ? 1.0f : mn_fn_exp<BF16>(x); })
MN_ACTIVATION(SQUARE, x * x, { return 2.0f * x; })
MN_ACTIVATION(RECIPROCAL, 1.0f / x, { return -1.0f / (x * x); })
MN_ACTIVATION(SQRT, sqrtf(x), { return 0.5f / sqrtf(x); })

#undef MN_ACTIVATION

/* ---- over tensors ---------------------------------------------------------------------------- */

template <typename FN, int N>
__device__ inline void mn_fn_value_of(const float (&x)[N], float (&y)[N]) {
#pragma unroll
    for (int j = 0; j < N; j++) y[j] = FN::value(x[j]);
}

/* Slopes and values side by side, so that what they share is computed once. */
template <typename FN, int N>
__device__ inline void mn_fn_value_slope_of(const float (&x)[N], float (&slope)[N],
                                            float (&value)[N]) {
#pragma unroll
    for (int j = 0; j < N; j++) {
        slope[j] = FN::slope(x[j]);
        value[j] = FN::value(x[j]);
    }
}

template <bool BF16, int N>
__device__ inline void mn_fn_value_slope(mn_unary kind, const float (&x)[N], float (&slope)[N],
                                  float (&value)[N]) {
    switch (kind) {
#define UNARY(id, name, about)                                                                     \
    case MN_UNARY_##id: mn_fn_value_slope_of<mn_fn_##id<BF16>>(x, slope, value); break;
#include "kernels/unary.def"
#undef UNARY
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
    case MN_UNARY_##id: mn_fn_value_of<mn_fn_##id<BF16>>(x[0], y[0]); break;
#include "kernels/unary.def"
#undef UNARY
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
        case MN_PAIR_ADD: each([](float a, float b) { return a + b; }); break;
        case MN_PAIR_MULTIPLY: each([](float a, float b) { return a * b; }); break;
        case MN_PAIR_AFFINE: each([this](float a, float) { return fmaf(scale, a, shift); }); break;
        default: each([this](float a, float) { return a > shift ? a : shift; }); break;
        }
    }
};

}    // namespace mneme::elementwise

#endif
