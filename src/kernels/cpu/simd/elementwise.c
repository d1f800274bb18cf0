/* elementwise.c - functions of one number with their slopes, and fused functions (elementwise.def):
 * whole vectors, then one masked vector, so that an element's bits do not depend on its place. */
#include "kernels/cpu/simd/elementwise.h"

#include <math.h>

#include "kernels/cpu/simd/vec.h"
#include "kernels/functions_double.h"

#define ONE vf_set1(1.0f)

MN_ALWAYS_INLINE vf gelu_tanh(vf x) {
    const vf cube = vf_mul(vf_mul(x, x), x);
    return vf_tanh(vf_mul(vf_set1(0.79788456f), vf_fma(vf_set1(0.044715f), cube, x)));
}

MN_ALWAYS_INLINE vf gelu(vf x) {
    const vf half = vf_mul(vf_set1(0.5f), x);
    return vf_fma(half, gelu_tanh(x), half);
}

MN_ALWAYS_INLINE vf gelu_slope(vf x) {
    const vf t = gelu_tanh(x), half = vf_set1(0.5f);
    const vf inner = vf_mul(vf_set1(0.79788456f),
                            vf_fma(vf_set1(3.0f * 0.044715f), vf_mul(x, x), ONE));
    const vf bend = vf_mul(vf_mul(half, x), vf_mul(vf_fnma(t, t, ONE), inner));
    return vf_add(vf_fma(half, t, half), bend);
}

/* (1 + erf(x / sqrt 2)) / 2, lane by lane. erfc keeps the digits of what is small. */
MN_ALWAYS_INLINE vf normal_share(vf x) {
    float lane[MN_VW];
    vf_store(lane, x);
    for (int i = 0; i < MN_VW; i++) lane[i] = 0.5f * erfcf(-0.70710678f * lane[i]);
    return vf_load(lane);
}

MN_ALWAYS_INLINE vf gelu_erf_slope(vf x) {
    const vf e = vf_exp(vf_mul(vf_set1(-0.5f), vf_mul(x, x)));
    return vf_fma(vf_mul(vf_set1(0.39894228f), x), e, normal_share(x));
}

typedef double in_double(double a, double b, double c);

/* Lane by lane. */
MN_ALWAYS_INLINE vf rounded(in_double *f, vf a, vf b, vf c) {
    float x[3][MN_VW], y[MN_VW];
    vf_store(x[0], a);
    vf_store(x[1], b);
    vf_store(x[2], c);
    for (int i = 0; i < MN_VW; i++) {
        y[i] = (float)f((double)x[0][i], (double)x[1][i], (double)x[2][i]);
    }
    return vf_load(y);
}

/* The functions are written with C's operators, so they take and give a vn. */
#define NUMBER vn
#define FUNCTION MN_ALWAYS_INLINE
#define F(name) name
#define OF(f, x) vf_as_vn(f(vn_as_vf(x)))
#define C(x) vf_as_vn(vf_set1((float)(x)))
#define EXP(x) OF(vf_exp, x)
#define SIGMOID(x) OF(vf_sigmoid, x)
#define SOFTPLUS(x) OF(vf_softplus, x)
#define TANH(x) OF(vf_tanh, x)
#define SQRT(x) OF(vf_sqrt, x)
#define GELU(x) OF(gelu, x)
#define GELU_SLOPE(x) OF(gelu_slope, x)
#define GELU_ERF(x) ((x) * OF(normal_share, x))
#define GELU_ERF_SLOPE(x) OF(gelu_erf_slope, x)
#define SQUARE_ABOVE_0(x) ((x) * vf_as_vn(vf_max(vn_as_vf(x), vf_zero())))
#define FMA(a, b, c) vf_as_vn(vf_fma(vn_as_vf(a), vn_as_vf(b), vn_as_vf(c)))
#define FNMA(a, b, c) vf_as_vn(vf_fnma(vn_as_vf(a), vn_as_vf(b), vn_as_vf(c)))
#define PLUS_PRODUCT(c, a, b) ((c) + (a) * (b))
#define ABOVE(x, low, a, b)                                                                        \
    vf_as_vn(vf_select(vf_gt(vn_as_vf(x), vn_as_vf(low)), vn_as_vf(a), vn_as_vf(b)))
#define GATE(x) OF(vf_sigmoid, x)
#define TIMES_SLOPE(dy, s) ((dy) * ((s) * (vf_as_vn(ONE) - (s))))
#define IN_DOUBLE(f, a, b, c) vf_as_vn(rounded(f, vn_as_vf(a), vn_as_vf(b), vn_as_vf(c)))
#include "kernels/functions.h"

MN_ALWAYS_INLINE vf value(mn_unary kind, vf x) {
    switch (kind) {
#define UNARY(id, name, about)                                                                     \
    case MN_UNARY_##id: return vn_as_vf(value_##id(vf_as_vn(x)));
#include "kernels/elementwise.def"
    default: return x;
    }
}

MN_ALWAYS_INLINE vf slope(mn_unary kind, vf x) {
    switch (kind) {
#define UNARY(id, name, about)                                                                     \
    case MN_UNARY_##id: return vn_as_vf(slope_##id(vf_as_vn(x)));
#include "kernels/elementwise.def"
    default: return x;
    }
}

/* One loop per function: the switch is over a constant and vanishes. */
MN_ALWAYS_INLINE void forward(mn_unary kind, const mn_unary_args *p) {
    const float *x = p->x, *b = p->b;
    float *y = p->y;
    for (int64_t i = 0; i < p->n; i += MN_VW) {
        const int lanes = vf_lanes(p->n - i);
        vf f = value(kind, vf_load_n(x + i, lanes));
        if (b) f = vf_mul(f, vf_load_n(b + i, lanes));
        vf_store_n(y + i, f, lanes);
    }
}

MN_ALWAYS_INLINE void give(float *at, vf x, int lanes, bool add) {
    vf_store_n(at, add ? vf_add(vf_load_n(at, lanes), x) : x, lanes);
}

MN_ALWAYS_INLINE void backward(mn_unary kind, const mn_unary_args *p) {
    const float *x = p->x, *b = p->b, *dy = p->dy;
    float *dx = p->dx, *db = p->db;
    for (int64_t i = 0; i < p->n; i += MN_VW) {
        const int lanes = vf_lanes(p->n - i);
        const vf at = vf_load_n(x + i, lanes), g = vf_load_n(dy + i, lanes);
        const vf from = b ? vf_mul(g, vf_load_n(b + i, lanes)) : g;
        const vf to_b = db ? vf_mul(value(kind, at), g) : g;
        if (dx) give(dx + i, vf_mul(slope(kind, at), from), lanes, p->add_x);
        if (db) give(db + i, to_b, lanes, p->add_b);
    }
}

#define UNARY(id, name, about)                                                                     \
    static void forward_##id(const mn_unary_args *p) { forward(MN_UNARY_##id, p); }                \
    static void backward_##id(const mn_unary_args *p) { backward(MN_UNARY_##id, p); }
#include "kernels/elementwise.def"

typedef void unary_loop(const mn_unary_args *p);

void MN_T(mn_unary_forward)(const mn_unary_args *p) {
    static unary_loop *const loops[MN_UNARY_COUNT] = {
#define UNARY(id, name, about) [MN_UNARY_##id] = forward_##id,
#include "kernels/elementwise.def"
    };
    loops[p->kind](p);
}

void MN_T(mn_unary_backward)(const mn_unary_args *p) {
    static unary_loop *const loops[MN_UNARY_COUNT] = {
#define UNARY(id, name, about) [MN_UNARY_##id] = backward_##id,
#include "kernels/elementwise.def"
    };
    loops[p->kind](p);
}

/* ---- fused functions ------------------------------------------------------------------------- */

MN_ALWAYS_INLINE vf load_or_zero(const float *x, int64_t i, int lanes) {
    return x ? vf_load_n(x + i, lanes) : vf_zero();
}

#define FUSED(id, ins, outs, about)                                                                \
    static void run_##id(const mn_fused_args *p) {                                                 \
        for (int64_t i = 0; i < p->n; i += MN_VW) {                                                \
            const int lanes = vf_lanes(p->n - i);                                                  \
            const vf a = load_or_zero(p->in[0], i, lanes), b = load_or_zero(p->in[1], i, lanes);   \
            const vf c = ins > 2 ? load_or_zero(p->in[2], i, lanes) : vf_zero();                   \
            vn y[3];                                                                               \
            fused_##id(y, vf_as_vn(a), vf_as_vn(b), vf_as_vn(c));                                  \
            for (int k = 0; k < outs; k++) {                                                       \
                if (p->out[k]) vf_store_n((float *)p->out[k] + i, vn_as_vf(y[k]), lanes);          \
            }                                                                                      \
        }                                                                                          \
    }
#include "kernels/elementwise.def"

void MN_T(mn_fused)(const mn_fused_args *p) {
    static void (*const loops[MN_N_FUSED])(const mn_fused_args *) = {
#define FUSED(id, ins, outs, about) [MN_FUSED_##id] = run_##id,
#include "kernels/elementwise.def"
    };
    loops[p->kind](p);
}
