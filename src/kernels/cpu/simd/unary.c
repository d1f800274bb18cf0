/* unary.c - elementwise functions and derivatives: whole vectors, then one masked vector, so that
 * an element's bits do not depend on its place. Equations: kernels/unary.c. */
#include "kernels/cpu/simd/unary.h"

#include <math.h>

#include "kernels/cpu/simd/vec.h"

#define ONE vf_set1(1.0f)

MN_ALWAYS_INLINE vf gelu_tanh(vf x) {
    const vf cube = vf_mul(vf_mul(x, x), x);
    return vf_tanh(vf_mul(vf_set1(0.79788456f), vf_fma(vf_set1(0.044715f), cube, x)));
}

/* (1 + erf(x / sqrt 2)) / 2, lane by lane. erfc keeps the digits of what is small. */
MN_ALWAYS_INLINE vf normal_share(vf x) {
    float lane[MN_VW];
    vf_store(lane, x);
    for (int i = 0; i < MN_VW; i++) lane[i] = 0.5f * erfcf(-0.70710678f * lane[i]);
    return vf_load(lane);
}

MN_ALWAYS_INLINE vf value(mn_unary kind, vf x) {
    switch (kind) {
    case MN_UNARY_SILU: return vf_mul(x, vf_sigmoid(x));
    case MN_UNARY_SIGMOID: return vf_sigmoid(x);
    case MN_UNARY_SOFTPLUS: return vf_softplus(x);
    case MN_UNARY_LOGSIGMOID: return vf_neg(vf_softplus(vf_neg(x)));
    case MN_UNARY_GELU: {
        const vf half = vf_mul(vf_set1(0.5f), x);
        return vf_fma(half, gelu_tanh(x), half);
    }
    case MN_UNARY_GELU_ERF: return vf_mul(x, normal_share(x));
    case MN_UNARY_EXP: return vf_exp(x);
    case MN_UNARY_NEG_EXP: return vf_neg(vf_exp(x));
    case MN_UNARY_TANH: return vf_tanh(x);
    case MN_UNARY_RELU: return vf_select(vf_gt(x, vf_zero()), x, vf_zero());
    case MN_UNARY_RELU_SQUARE: return vf_mul(x, vf_max(x, vf_zero()));
    case MN_UNARY_ELU_ONE: return vf_select(vf_gt(x, vf_zero()), vf_add(x, ONE), vf_exp(x));
    case MN_UNARY_SQUARE: return vf_mul(x, x);
    case MN_UNARY_RECIPROCAL: return vf_div(ONE, x);
    case MN_UNARY_SQRT: return vf_sqrt(x);
    default: return x;
    }
}

MN_ALWAYS_INLINE vf gelu_slope(vf x) {
    const vf t = gelu_tanh(x), half = vf_set1(0.5f);
    const vf inner = vf_mul(vf_set1(0.79788456f),
                            vf_fma(vf_set1(3.0f * 0.044715f), vf_mul(x, x), ONE));
    const vf bend = vf_mul(vf_mul(half, x), vf_mul(vf_fnma(t, t, ONE), inner));
    return vf_add(vf_fma(half, t, half), bend);
}

MN_ALWAYS_INLINE vf slope(mn_unary kind, vf x) {
    switch (kind) {
    case MN_UNARY_SILU: {
        const vf s = vf_sigmoid(x);
        return vf_mul(s, vf_fma(x, vf_sub(ONE, s), ONE));
    }
    case MN_UNARY_SIGMOID: {
        const vf e = vf_exp(vf_neg(vf_abs(x))), both = vf_add(ONE, e);
        return vf_div(e, vf_mul(both, both));    // 1 - s has no digits where s is near 1
    }
    case MN_UNARY_SOFTPLUS: return vf_sigmoid(x);
    case MN_UNARY_LOGSIGMOID: return vf_sigmoid(vf_neg(x));
    case MN_UNARY_GELU: return gelu_slope(x);
    case MN_UNARY_GELU_ERF: {
        const vf e = vf_exp(vf_mul(vf_set1(-0.5f), vf_mul(x, x)));
        return vf_fma(vf_mul(vf_set1(0.39894228f), x), e, normal_share(x));
    }
    case MN_UNARY_EXP: return vf_exp(x);
    case MN_UNARY_NEG_EXP: return vf_neg(vf_exp(x));
    case MN_UNARY_TANH: {
        const vf t = vf_tanh(x);
        return vf_fnma(t, t, ONE);
    }
    case MN_UNARY_RELU: return vf_select(vf_gt(x, vf_zero()), ONE, vf_zero());
    case MN_UNARY_RELU_SQUARE: return vf_mul(vf_set1(2.0f), vf_max(x, vf_zero()));
    case MN_UNARY_ELU_ONE: return vf_select(vf_gt(x, vf_zero()), ONE, vf_exp(x));
    case MN_UNARY_SQUARE: return vf_add(x, x);
    case MN_UNARY_RECIPROCAL: return vf_neg(vf_div(ONE, vf_mul(x, x)));
    case MN_UNARY_SQRT: return vf_div(vf_set1(0.5f), vf_sqrt(x));
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
#include "kernels/unary.def"
#undef UNARY

typedef void unary_loop(const mn_unary_args *p);

void MN_T(mn_unary_forward)(const mn_unary_args *p) {
    static unary_loop *const loops[MN_UNARY_COUNT] = {
#define UNARY(id, name, about) [MN_UNARY_##id] = forward_##id,
#include "kernels/unary.def"
#undef UNARY
    };
    loops[p->kind](p);
}

void MN_T(mn_unary_backward)(const mn_unary_args *p) {
    static unary_loop *const loops[MN_UNARY_COUNT] = {
#define UNARY(id, name, about) [MN_UNARY_##id] = backward_##id,
#include "kernels/unary.def"
#undef UNARY
    };
    loops[p->kind](p);
}
