/* functions_scalar.h - the functions of functions.h for single numbers: name_f64 in double, and
 * name_f32 in float, where exponentials and what is made of them are double, rounded once. */
#ifndef MN_KERNELS_FUNCTIONS_SCALAR_H
#define MN_KERNELS_FUNCTIONS_SCALAR_H

#include <math.h>

#include "kernels/functions_double.h"

static inline double mn_sigmoid_f64(double x) {
    return x >= 0.0 ? 1.0 / (1.0 + exp(-x)) : exp(x) / (1.0 + exp(x));
}

static inline double mn_softplus_f64(double x) {
    return x > 0.0 ? x + log1p(exp(-x)) : log1p(exp(x));
}

static inline double mn_gate_f64(double x) {
    return 1.0 / (1.0 + exp(-x));
}

/* sqrt(2/pi) and the cubic term of the tanh form of GELU */
static const double mn_gelu_scale = 0.79788456080286536, mn_gelu_cubic = 0.044715;

/* sqrt(1/2), and sqrt(1/(2 pi)): the slope of the error function's form */
static const double mn_root_half = 0.70710678118654752, mn_normal_peak = 0.39894228040143268;

static inline double mn_gelu_tanh_f64(double x) {
    return tanh(mn_gelu_scale * (x + mn_gelu_cubic * x * x * x));
}

static inline double mn_gelu_f64(double x) {
    return 0.5 * x * (1.0 + mn_gelu_tanh_f64(x));
}

static inline double mn_gelu_slope_f64(double x) {
    const double t = mn_gelu_tanh_f64(x);
    const double inner = mn_gelu_scale * (1.0 + 3.0 * mn_gelu_cubic * x * x);
    return 0.5 * (1.0 + t) + 0.5 * x * (1.0 - t * t) * inner;
}

static inline double mn_gelu_erf_f64(double x) {
    return 0.5 * x * erfc(-x * mn_root_half);
}

static inline double mn_gelu_erf_slope_f64(double x) {
    return 0.5 * erfc(-x * mn_root_half) + x * mn_normal_peak * exp(-0.5 * x * x);
}

static inline double mn_square_above_0_f64(double x) {
    return x > 0.0 ? x * x : 0.0;
}

#define FUNCTION static inline
#define FMA(a, b, c) ((a) * (b) + (c))
#define FNMA(a, b, c) ((c) - (a) * (b))
#define PLUS_PRODUCT(c, a, b) ((c) + (a) * (b))
#define ABOVE(x, low, a, b) ((x) > (low) ? (a) : (b))
#define TIMES_SLOPE(dy, s) ((dy) * ((s) * (C(1) - (s))))
#define NUMBER double
#define F(name) name##_f64
#define C(x) ((double)(x))
#define EXP(x) exp(x)
#define SIGMOID(x) mn_sigmoid_f64(x)
#define SOFTPLUS(x) mn_softplus_f64(x)
#define TANH(x) tanh(x)
#define SQRT(x) sqrt(x)
#define GELU(x) mn_gelu_f64(x)
#define GELU_SLOPE(x) mn_gelu_slope_f64(x)
#define GELU_ERF(x) mn_gelu_erf_f64(x)
#define GELU_ERF_SLOPE(x) mn_gelu_erf_slope_f64(x)
#define SQUARE_ABOVE_0(x) mn_square_above_0_f64(x)
#define GATE(x) mn_gate_f64(x)
#define IN_DOUBLE(f, a, b, c) f(a, b, c)
#include "kernels/functions.h"

#define NUMBER float
#define F(name) name##_f32
#define C(x) ((float)(x))
#define EXP(x) (float)exp((double)(x))
#define SIGMOID(x) (float)mn_sigmoid_f64((double)(x))
#define SOFTPLUS(x) (float)mn_softplus_f64((double)(x))
#define TANH(x) (float)tanh((double)(x))
#define SQRT(x) sqrtf(x)
#define GELU(x) (float)mn_gelu_f64((double)(x))
#define GELU_SLOPE(x) (float)mn_gelu_slope_f64((double)(x))
#define GELU_ERF(x) (float)mn_gelu_erf_f64((double)(x))
#define GELU_ERF_SLOPE(x) (float)mn_gelu_erf_slope_f64((double)(x))
#define SQUARE_ABOVE_0(x) (float)mn_square_above_0_f64((double)(x))
#define GATE(x) (float)mn_gate_f64((double)(x))
#define IN_DOUBLE(f, a, b, c) (float)f((double)(a), (double)(b), (double)(c))
#include "kernels/functions.h"

#undef FUNCTION
#undef FMA
#undef FNMA
#undef PLUS_PRODUCT
#undef ABOVE
#undef TIMES_SLOPE

#endif
