/* unary.c - the elementwise functions and their derivatives in plain C, computed in double. */
#include "kernels/unary.h"

#include <math.h>

static double sigmoid(double x) {
    return x >= 0.0 ? 1.0 / (1.0 + exp(-x)) : exp(x) / (1.0 + exp(x));
}

static double softplus(double x) {
    return x > 0.0 ? x + log1p(exp(-x)) : log1p(exp(x));
}

/* sqrt(2/pi) and the cubic term of the tanh form of GELU */
static const double gelu_slope = 0.79788456080286536, gelu_cubic = 0.044715;

/* sqrt(1/2), and sqrt(1/(2 pi)): the slope of the error function's form */
static const double root_half = 0.70710678118654752, normal_peak = 0.39894228040143268;

static double gelu_tanh(double x) {
    return tanh(gelu_slope * (x + gelu_cubic * x * x * x));
}

static double value(mn_unary kind, double x) {
    switch (kind) {
    case MN_UNARY_SILU: return x * sigmoid(x);
    case MN_UNARY_SIGMOID: return sigmoid(x);
    case MN_UNARY_SOFTPLUS: return softplus(x);
    case MN_UNARY_LOGSIGMOID: return -softplus(-x);
    case MN_UNARY_GELU: return 0.5 * x * (1.0 + gelu_tanh(x));
    case MN_UNARY_GELU_ERF: return 0.5 * x * erfc(-x * root_half);
    case MN_UNARY_EXP: return exp(x);
    case MN_UNARY_NEG_EXP: return -exp(x);
    case MN_UNARY_TANH: return tanh(x);
    case MN_UNARY_RELU: return x > 0.0 ? x : 0.0;
    case MN_UNARY_RELU_SQUARE: return x > 0.0 ? x * x : 0.0;
    case MN_UNARY_ELU_ONE: return x > 0.0 ? x + 1.0 : exp(x);
    case MN_UNARY_SQUARE: return x * x;
    case MN_UNARY_RECIPROCAL: return 1.0 / x;
    case MN_UNARY_SQRT: return sqrt(x);
    default: return NAN;
    }
}

static double slope(mn_unary kind, double x) {
    const double s = sigmoid(x);
    switch (kind) {
    case MN_UNARY_SILU: return s * (1.0 + x * (1.0 - s));
    case MN_UNARY_SIGMOID: {
        const double e = exp(-fabs(x));    // 1 - s has no digits where s is near 1
        return e / ((1.0 + e) * (1.0 + e));
    }
    case MN_UNARY_SOFTPLUS: return s;
    case MN_UNARY_LOGSIGMOID: return sigmoid(-x);
    case MN_UNARY_GELU: {
        const double t = gelu_tanh(x);
        const double inner = gelu_slope * (1.0 + 3.0 * gelu_cubic * x * x);
        return 0.5 * (1.0 + t) + 0.5 * x * (1.0 - t * t) * inner;
    }
    case MN_UNARY_GELU_ERF:
        return 0.5 * erfc(-x * root_half) + x * normal_peak * exp(-0.5 * x * x);
    case MN_UNARY_EXP: return exp(x);
    case MN_UNARY_NEG_EXP: return -exp(x);
    case MN_UNARY_TANH: return 1.0 - tanh(x) * tanh(x);
    case MN_UNARY_RELU: return x > 0.0 ? 1.0 : 0.0;
    case MN_UNARY_RELU_SQUARE: return x > 0.0 ? 2.0 * x : 0.0;
    case MN_UNARY_ELU_ONE: return x > 0.0 ? 1.0 : exp(x);
    case MN_UNARY_SQUARE: return 2.0 * x;
    case MN_UNARY_RECIPROCAL: return -1.0 / (x * x);
    case MN_UNARY_SQRT: return 0.5 / sqrt(x);
    default: return NAN;
    }
}

#define LOOPS(suffix, TYPE)                                                                        \
    void mn_unary_forward_##suffix(const mn_unary_args *p) {                                       \
        const TYPE *x = p->x, *b = p->b;                                                           \
        TYPE *y = p->y;                                                                            \
        for (int64_t i = 0; i < p->n; i++) {                                                       \
            y[i] = (TYPE)(value(p->kind, (double)x[i]) * (b ? (double)b[i] : 1.0));                \
        }                                                                                          \
    }                                                                                              \
    void mn_unary_backward_##suffix(const mn_unary_args *p) {                                      \
        const TYPE *x = p->x, *b = p->b, *dy = p->dy;                                              \
        TYPE *dx = p->dx, *db = p->db;                                                             \
        for (int64_t i = 0; i < p->n; i++) {                                                       \
            const double g = (double)dy[i], from = b ? g * (double)b[i] : g;                       \
            const double to_x = slope(p->kind, (double)x[i]) * from;                               \
            if (db) {                                                                              \
                const double to_b = value(p->kind, (double)x[i]) * g;                              \
                db[i] = (TYPE)(p->add_b ? db[i] + to_b : to_b);                                    \
            }                                                                                      \
            if (dx) dx[i] = (TYPE)(p->add_x ? dx[i] + to_x : to_x);                                \
        }                                                                                          \
    }
LOOPS(f32, float)
LOOPS(f64, double)

static const char *const names[MN_UNARY_COUNT] = {
#define UNARY(id, name, about) [MN_UNARY_##id] = name,
#include "kernels/unary.def"
#undef UNARY
};

const char *mn_unary_name(mn_unary kind) {
    return (unsigned)kind < MN_UNARY_COUNT ? names[kind] : "?";
}
