/* functions.h - the functions of elementwise.def, each written once for every kind of number.
 *
 * Included once for each kind: double, which defines them, and float (functions_scalar.h), vectors
 * of floats (cpu/simd/elementwise.c), floats of a GPU (cuda/elementwise/elementwise_fwd.cuh). Who
 * includes says how that kind computes:
 *
 *   NUMBER                     the kind                    C(x)     a constant
 *   FUNCTION                   qualifiers of a function    F(name)  its name
 *   EXP SIGMOID SOFTPLUS TANH SQRT GELU GELU_SLOPE GELU_ERF GELU_ERF_SLOPE SQUARE_ABOVE_0 (x)
 *   FMA(a, b, c) FNMA(a, b, c) a b + c, c - a b: rounded once where the kind's unary functions are
 *   PLUS_PRODUCT(c, a, b)      c + a b, rounded once on GPUs
 *   ABOVE(x, low, a, b)        a where x > low, else b
 *   GATE(x)                    sigmoid(x) as fused functions have it
 *   TIMES_SLOPE(dy, s)         dy s (1 - s), in the kind's order
 *   IN_DOUBLE(f, a, b, c)      f of doubles, rounded once
 *
 * FUNCTION, FMA, FNMA, PLUS_PRODUCT, ABOVE and TIMES_SLOPE stay defined, the others do not.
 * Constants are exact in every kind. Where kinds differ in how they spell a function (GELU, GATE,
 * TIMES_SLOPE) that is in the bits of results, which stay. */

/* ---- one number: value and slope ------------------------------------------------------------- */

#define ONE_NUMBER(id, value, slope)                                                               \
    FUNCTION NUMBER F(value_##id)(NUMBER x) {                                                      \
        return value;                                                                              \
    }                                                                                              \
    FUNCTION NUMBER F(slope_##id)(NUMBER x) {                                                      \
        slope                                                                                      \
    }

ONE_NUMBER(SILU, x * SIGMOID(x), {
    const NUMBER s = SIGMOID(x);
    return s * FMA(x, C(1) - s, C(1));
})
ONE_NUMBER(SIGMOID, SIGMOID(x), {    // 1 - s has no digits where s is near 1: from e^-|x|
    const NUMBER e = EXP(ABOVE(x, C(0), -x, x));
    return e / ((C(1) + e) * (C(1) + e));
})
ONE_NUMBER(SOFTPLUS, SOFTPLUS(x), return SIGMOID(x);)
ONE_NUMBER(LOGSIGMOID, -SOFTPLUS(-x), return SIGMOID(-x);)
ONE_NUMBER(GELU, GELU(x), return GELU_SLOPE(x);)
ONE_NUMBER(GELU_ERF, GELU_ERF(x), return GELU_ERF_SLOPE(x);)
ONE_NUMBER(EXP, EXP(x), return EXP(x);)
ONE_NUMBER(NEG_EXP, -EXP(x), return -EXP(x);)
ONE_NUMBER(TANH, TANH(x), {
    const NUMBER t = TANH(x);
    return FNMA(t, t, C(1));
})
ONE_NUMBER(RELU, ABOVE(x, C(0), x, C(0)), return ABOVE(x, C(0), C(1), C(0));)
ONE_NUMBER(RELU_SQUARE, SQUARE_ABOVE_0(x), return ABOVE(x, C(0), C(2) * x, C(0));)
ONE_NUMBER(ELU_ONE, ABOVE(x, C(0), x + C(1), EXP(x)), return ABOVE(x, C(0), C(1), EXP(x));)
ONE_NUMBER(SQUARE, x * x, return C(2) * x;)
ONE_NUMBER(RECIPROCAL, C(1) / x, return C(-1) / (x * x);)
ONE_NUMBER(SQRT, SQRT(x), return C(0.5) / SQRT(x);)

/* ---- pairs: y, and the gradients of a and b from dy ------------------------------------------ */

#define PAIR_PART(name, c, result)                                                                 \
    FUNCTION NUMBER F(name)(NUMBER a, NUMBER b, NUMBER c, NUMBER scale, NUMBER shift) {            \
        (void)a, (void)b, (void)c, (void)scale, (void)shift;                                       \
        return result;                                                                             \
    }
#define OF_PAIR(id, y, da, db)                                                                     \
    PAIR_PART(pair_##id, c, y)                                                                     \
    PAIR_PART(pair_da_##id, dy, da)                                                                \
    PAIR_PART(pair_db_##id, dy, db)

OF_PAIR(ADD, a + b, dy, dy)
OF_PAIR(MULTIPLY, a * b, dy * b, dy * a)
OF_PAIR(AFFINE, PLUS_PRODUCT(shift, scale, a), dy * scale, dy)
OF_PAIR(AT_LEAST, ABOVE(a, shift, a, shift), ABOVE(a, shift, dy, C(0)), dy)
OF_PAIR(SCALED, PLUS_PRODUCT(a, b, c), dy, dy)
OF_PAIR(PRECISION, C(1) / (SOFTPLUS(a) + shift),
        -dy * SIGMOID(a) / ((SOFTPLUS(a) + shift) * (SOFTPLUS(a) + shift)), dy)

/* ---- fused functions ------------------------------------------------------------------------- */

#define FUSE(id, ...)                                                                              \
    FUNCTION void F(fused_##id)(NUMBER *y, NUMBER a, NUMBER b, NUMBER c) {                         \
        (void)a, (void)b, (void)c;                                                                 \
        __VA_ARGS__                                                                                \
    }

FUSE(SIGMOID_SUM, y[0] = GATE(a + b);)
FUSE(SIGMOID_BACK, y[0] = TIMES_SLOPE(a, b);)
FUSE(SWIGLU, y[0] = a * GATE(a) * b;)
FUSE(SWIGLU_BACK, {
    const NUMBER s = GATE(a), silu = a * s;
    y[0] = c * b * (s * PLUS_PRODUCT(C(1), a, C(1) - s));
    y[1] = c * silu;
    y[2] = silu * b;
})
FUSE(DECAY_PAPER, y[0] = IN_DOUBLE(mn_decay_paper, a, b, c);)
FUSE(DECAY_PAPER_BACK, y[0] = IN_DOUBLE(mn_decay_paper_back, a, b, c);)
FUSE(DECAY_CODE, y[0] = -a * b;)
FUSE(DECAY_CODE_BACK, y[0] = -c * b;)

#undef ONE_NUMBER
#undef PAIR_PART
#undef OF_PAIR
#undef FUSE
#undef NUMBER
#undef F
#undef C
#undef EXP
#undef SIGMOID
#undef SOFTPLUS
#undef TANH
#undef SQRT
#undef GELU
#undef GELU_SLOPE
#undef GELU_ERF
#undef GELU_ERF_SLOPE
#undef SQUARE_ABOVE_0
#undef GATE
#undef IN_DOUBLE
