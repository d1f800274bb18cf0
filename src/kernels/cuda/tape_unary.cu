/* tape_unary.cu - y = f(x), y = f(x) b and their gradients (kernels/unary.def), one thread per pack
 * of numbers (each.cuh).
 *
 * Where all numbers are bf16 exponentials, logarithms and quotients are the hardware's approximate
 * ones, off by some 1e-6 of a result, which is rounded to 4e-3 of itself. */
#include "kernels/cuda/each.cuh"

/* ---- the functions: value and slope at x ----------------------------------------------------- */

template <bool NARROW>
__device__ static float exponential(float x) {
    return NARROW ? __expf(x) : expf(x);
}

template <bool NARROW>
__device__ static float inverse(float x) {
    return NARROW ? __fdividef(1.0f, x) : 1.0f / x;
}

template <bool NARROW>
__device__ static float sigmoid(float x) {
    /* the quotient by more than 2^126 may be taken for 0 */
    return inverse<NARROW>(1.0f + exponential<NARROW>(-x));
}

/* log(1 + e^x) without overflow, and with all digits where e^x is small */
template <bool NARROW>
__device__ static float softplus(float x) {
    const float e = exponential<NARROW>(-fabsf(x));
    const float small = fmaf(-0.5f * e, e, e);
    const float rest = !NARROW ? log1pf(e) : e < 0.01f ? small : __logf(1.0f + e);
    return fmaxf(x, 0.0f) + rest;
}

template <bool NARROW>
__device__ static float tangent(float x) {
    if (!NARROW) return tanhf(x);
    const float small = fmaf(-x * x * x, 1.0f / 3.0f, x);
    return fabsf(x) < 0.0625f ? small : 1.0f - 2.0f * sigmoid<true>(-2.0f * x);
}

/* The tanh form of GELU is x sigmoid(2 u), u its inner polynomial; and u's slope. */
__device__ static float gelu_inner(float x) {
    const float slope = 0.79788456080286536f, cubic = 0.044715f;
    return slope * fmaf(cubic * x * x, x, x);
}

__device__ static float gelu_inner_slope(float x) {
    const float slope = 0.79788456080286536f, cubic = 0.044715f;
    return slope * fmaf(3.0f * cubic * x, x, 1.0f);
}

#define FUNCTION(id, at_x, slope_at_x)                                                             \
    template <bool NARROW>                                                                         \
    struct fn_##id {                                                                               \
        __device__ static float value(float x) {                                                   \
            return at_x;                                                                           \
        }                                                                                          \
        __device__ static float slope(float x) {                                                   \
            slope_at_x                                                                             \
        }                                                                                          \
    };

FUNCTION(SILU, x * sigmoid<NARROW>(x), {
    const float s = sigmoid<NARROW>(x);
    return s * fmaf(x, 1.0f - s, 1.0f);
})
FUNCTION(SIGMOID, sigmoid<NARROW>(x), {
    const float s = sigmoid<NARROW>(x);
    return s * (1.0f - s);
})
FUNCTION(SOFTPLUS, softplus<NARROW>(x), { return sigmoid<NARROW>(x); })
FUNCTION(LOGSIGMOID, -softplus<NARROW>(-x), { return sigmoid<NARROW>(-x); })
FUNCTION(GELU, x * sigmoid<NARROW>(2.0f * gelu_inner(x)), {
    const float s = sigmoid<NARROW>(2.0f * gelu_inner(x));
    return s * fmaf(2.0f * x * (1.0f - s), gelu_inner_slope(x), 1.0f);
})
FUNCTION(EXP, exponential<NARROW>(x), { return exponential<NARROW>(x); })
FUNCTION(NEG_EXP, -exponential<NARROW>(x), { return -exponential<NARROW>(x); })
FUNCTION(TANH, tangent<NARROW>(x), {
    const float t = tangent<NARROW>(x);
    return 1.0f - t * t;
})
FUNCTION(RELU, x > 0.0f ? x : 0.0f, { return x > 0.0f ? 1.0f : 0.0f; })
FUNCTION(ELU_ONE, x > 0.0f ? x + 1.0f : exponential<NARROW>(x),
         { return x > 0.0f ? 1.0f : exponential<NARROW>(x); })
FUNCTION(SQUARE, x * x, { return 2.0f * x; })
FUNCTION(RECIPROCAL, 1.0f / x, { return -1.0f / (x * x); })
FUNCTION(SQRT, sqrtf(x), { return 0.5f / sqrtf(x); })

/* ---- over tensors ---------------------------------------------------------------------------- */

template <typename FN, int N>
__device__ static void value_of(const float (&x)[N], float (&y)[N]) {
#pragma unroll
    for (int j = 0; j < N; j++) y[j] = FN::value(x[j]);
}

/* Side by side, so that what they share is computed once. */
template <typename FN, int N>
__device__ static void both_of(const float (&x)[N], float (&slope)[N], float (&value)[N]) {
#pragma unroll
    for (int j = 0; j < N; j++) {
        slope[j] = FN::slope(x[j]);
        value[j] = FN::value(x[j]);
    }
}

struct forward {
    static constexpr int INS = 2, OUTS = 1;    // x, b; y
    mn_unary kind;
    bool gates;

    template <bool NARROW, int N>
    __device__ void run(const float (&x)[3][N], float (&y)[1][N]) const {
        switch (kind) {
#define UNARY(id, name, about)                                                                     \
    case MN_UNARY_##id: value_of<fn_##id<NARROW>>(x[0], y[0]); break;
#include "kernels/unary.def"
#undef UNARY
        default: break;
        }
        if (!gates) return;
#pragma unroll
        for (int j = 0; j < N; j++) y[0][j] *= x[1][j];
    }
};

/* AGAIN: makes y once more in the same pass. */
template <bool AGAIN>
struct backward {
    static constexpr int INS = 3, OUTS = AGAIN ? 3 : 2;    // x, b, dy; dx, db, y
    mn_unary kind;
    bool gates;

    template <bool NARROW, int N>
    __device__ void run(const float (&x)[INS + OUTS][N], float (&y)[OUTS][N]) const {
        switch (kind) {
#define UNARY(id, name, about)                                                                     \
    case MN_UNARY_##id: both_of<fn_##id<NARROW>>(x[0], y[0], y[1]); break;
#include "kernels/unary.def"
#undef UNARY
        default: break;
        }
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
        return mn_run_each(forward{ w->f, gates }, w->shape, { &w->x, &w->b }, { &w->y },
                           { false }, where);
    }
    if (w->y.data) {
        return mn_run_each(backward<true>{ w->f, gates }, w->shape, { &w->x, &w->b, &w->dy },
                           { &w->dx, &w->db, &w->y }, { w->add_x, w->add_b, false }, where);
    }
    return mn_run_each(backward<false>{ w->f, gates }, w->shape, { &w->x, &w->b, &w->dy },
                       { &w->dx, &w->db }, { w->add_x, w->add_b }, where);
}
