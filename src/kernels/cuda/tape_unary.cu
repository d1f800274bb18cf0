/* tape_unary.cu - y = f(x), y = f(x) b and their gradients (kernels/unary.def), one thread per pack
 * of numbers (each.cuh). */
#include "kernels/cuda/each.cuh"

/* ---- the functions: value and slope at x ----------------------------------------------------- */

__device__ static float sigmoid(float x) {
    return 1.0f / (1.0f + expf(-x));
}

/* log(1 + e^x) without overflow, and with all digits where e^x is small */
__device__ static float softplus(float x) {
    return fmaxf(x, 0.0f) + log1pf(expf(-fabsf(x)));
}

static __device__ const float gelu_slope = 0.79788456080286536f, gelu_cubic = 0.044715f;

__device__ static float gelu_tanh(float x) {
    return tanhf(gelu_slope * fmaf(gelu_cubic * x * x, x, x));
}

#define FUNCTION(id, at_x, slope_at_x)                                                             \
    struct fn_##id {                                                                               \
        __device__ static float value(float x) {                                                   \
            return at_x;                                                                           \
        }                                                                                          \
        __device__ static float slope(float x) {                                                   \
            slope_at_x                                                                             \
        }                                                                                          \
    };

FUNCTION(SILU, x *sigmoid(x), {
    const float s = sigmoid(x);
    return s * fmaf(x, 1.0f - s, 1.0f);
})
FUNCTION(SIGMOID, sigmoid(x), {
    const float s = sigmoid(x);
    return s * (1.0f - s);
})
FUNCTION(SOFTPLUS, softplus(x), { return sigmoid(x); })
FUNCTION(LOGSIGMOID, -softplus(-x), { return sigmoid(-x); })
FUNCTION(GELU, 0.5f * x * (1.0f + gelu_tanh(x)), {
    const float t = gelu_tanh(x);
    const float inner = gelu_slope * fmaf(3.0f * gelu_cubic * x, x, 1.0f);
    return 0.5f * (1.0f + t) + 0.5f * x * (1.0f - t * t) * inner;
})
FUNCTION(EXP, expf(x), { return expf(x); })
FUNCTION(NEG_EXP, -expf(x), { return -expf(x); })
FUNCTION(TANH, tanhf(x), {
    const float t = tanhf(x);
    return 1.0f - t * t;
})
FUNCTION(RELU, x > 0.0f ? x : 0.0f, { return x > 0.0f ? 1.0f : 0.0f; })
FUNCTION(ELU_ONE, x > 0.0f ? x + 1.0f : expf(x), { return x > 0.0f ? 1.0f : expf(x); })
FUNCTION(SQUARE, x *x, { return 2.0f * x; })
FUNCTION(RECIPROCAL, 1.0f / x, { return -1.0f / (x * x); })
FUNCTION(SQRT, sqrtf(x), { return 0.5f / sqrtf(x); })

/* ---- over tensors ---------------------------------------------------------------------------- */

template <typename FN, int N>
__device__ static void value_of(const float (&x)[N], float (&y)[N]) {
#pragma unroll
    for (int j = 0; j < N; j++) y[j] = FN::value(x[j]);
}

template <typename FN, int N>
__device__ static void slope_of(const float (&x)[N], float (&y)[N]) {
#pragma unroll
    for (int j = 0; j < N; j++) y[j] = FN::slope(x[j]);
}

template <int N>
__device__ static void any_value(mn_unary kind, const float (&x)[N], float (&y)[N]) {
    switch (kind) {
#define UNARY(id, name, about)                                                                     \
    case MN_UNARY_##id: value_of<fn_##id>(x, y); return;
#include "kernels/unary.def"
#undef UNARY
    default: return;
    }
}

template <int N>
__device__ static void any_slope(mn_unary kind, const float (&x)[N], float (&y)[N]) {
    switch (kind) {
#define UNARY(id, name, about)                                                                     \
    case MN_UNARY_##id: slope_of<fn_##id>(x, y); return;
#include "kernels/unary.def"
#undef UNARY
    default: return;
    }
}

struct forward {
    static constexpr int INS = 2, OUTS = 1;    // x, b; y
    mn_unary kind;
    bool gates;

    template <int N>
    __device__ void operator()(const float (&x)[3][N], float (&y)[1][N]) const {
        any_value(kind, x[0], y[0]);
#pragma unroll
        for (int j = 0; j < N; j++) y[0][j] *= gates ? x[1][j] : 1.0f;
    }
};

struct backward {
    static constexpr int INS = 3, OUTS = 2;    // x, b, dy; dx, db
    mn_unary kind;
    bool gates, wants_x, wants_b;

    template <int N>
    __device__ void operator()(const float (&x)[5][N], float (&y)[2][N]) const {
        if (wants_x) any_slope(kind, x[0], y[0]);
        if (wants_b) any_value(kind, x[0], y[1]);
#pragma unroll
        for (int j = 0; j < N; j++) {
            y[0][j] *= gates ? x[2][j] * x[1][j] : x[2][j];
            y[1][j] *= x[2][j];
        }
    }
};

MN_CUDA_WORK(unary) {
    const mn_unary_work *w = (const mn_unary_work *)work;
    (void)space;
    const bool gates = w->b.data;
    if (w->y.data) {
        return mn_run_each(forward{ w->f, gates }, w->shape, { &w->x, &w->b }, { &w->y },
                           { false }, where);
    }
    const backward f = { w->f, gates, w->dx.data != NULL, w->db.data != NULL };
    return mn_run_each(f, w->shape, { &w->x, &w->b, &w->dy }, { &w->dx, &w->db },
                       { w->add_x, w->add_b }, where);
}
