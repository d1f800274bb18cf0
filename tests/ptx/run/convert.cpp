/* convert.cpp - cvt (PTX ISA: Data Movement and Conversion Instructions: cvt). */
#include <algorithm>

#include "run/float_math.h"
#include "run/operations.h"
#include "run/registers.h"

namespace ptx {

static double to_integral(double x, rounding r) {
    switch (r) {
    case R_NI: return std::nearbyint(x);
    case R_MI: return std::floor(x);
    case R_PI: return std::ceil(x);
    default: return std::trunc(x);
    }
}

/* The least and the greatest value of an integer type of less than 64 bits. */
static s64 least_of(type t) {
    return is_signed(t) ? -(1ll << (8 * width(t) - 1)) : 0;
}

static s64 greatest_of(type t) {
    return (1ll << (8 * width(t) - (is_signed(t) ? 1 : 0))) - 1;
}

/* A float beyond an integer type is its nearest value; NaN is 0, of 64 bits 2^63. */
static u64 integer_of(double x, type t) {
    if (std::isnan(x)) return width(t) == 8 ? 1ull << 63 : 0;
    if (width(t) < 8) return (u64)(s64)std::clamp(x, (double)least_of(t), (double)greatest_of(t));
    if (is_signed(t)) {
        if (x >= 0x1p63) return (u64)INT64_MAX;
        return x < -0x1p63 ? (u64)INT64_MIN : (u64)(s64)x;
    }
    if (x >= 0x1p64) return ~0ull;
    return x < 0 ? 0 : (u64)x;
}

/* x by the mode that is set. volatile: the conversion is not to be moved to where another is. */
static u64 float_bits(double x, type t, rounding r) {
    switch (t) {
    case T_F32: {
        volatile float y = (float)x;
        return std::isnan(x) ? 0x7fffffff : bits_of((float)y);
    }
    case T_F64: return bits_of(x);
    case T_F16: return f16_rounded(x);
    case T_BF16: return r == R_Z ? bf16_towards_zero((float)x) : bf16_nearest((float)x);
    default: fail("cvt to .%s", types[t].name.data());
    }
}

static u64 float_to_float(double x, const instruction &op) {
    if (op.round >= R_NI && op.round <= R_PI) x = to_integral(x, op.round);
    if (op.flags & F_SAT) x = std::isnan(x) ? 0.0 : std::clamp(x, 0.0, 1.0);
    const rounds mode(op.round);
    return float_bits(x, op.t, op.round);
}

static u64 integer_to_float(s64 x, const instruction &op) {
    const rounds mode(op.round);
    if (op.t == T_F32) {
        volatile float y = is_signed(op.source) ? (float)x : (float)(u64)x;
        return bits_of((float)y);
    }
    volatile double y = is_signed(op.source) ? (double)x : (double)(u64)x;
    return float_bits(y, op.t, op.round);
}

static u64 integer_to_integer(s64 x, const instruction &op) {
    if (op.flags & F_SAT && width(op.t) < 8) x = std::clamp(x, least_of(op.t), greatest_of(op.t));
    return (u64)extend((u64)x, op.t);
}

static u64 converted(u64 v, const instruction &op) {
    if (op.t == T_TF32) return tf32_bits(float_of((u32)v));
    if (!is_float(op.source)) {
        const s64 x = extend(v, op.source);
        return is_float(op.t) ? integer_to_float(x, op) : integer_to_integer(x, op);
    }
    double x = float_value(op.source, v);
    if (op.flags & F_FTZ && op.source == T_F32) x = flush((float)x);
    return is_float(op.t) ? float_to_float(x, op) : integer_of(to_integral(x, op.round), op.t);
}

void run_cvt(warp &w, const instruction &op, u32 lanes) {    // d, a
    for (const int l : on(lanes)) set(w, op.x[0], l, converted(get(w, op.x[1], l), op));
}

/* Two floats to a pair: the first is the upper half. */
void run_cvt_pair(warp &w, const instruction &op, u32 lanes) {    // d, a, b
    for (const int l : on(lanes)) {
        u32 y = 0;
        for (int i = 1; i <= 2; i++) {
            float x = float_of(get32(w, op.x[i], l));
            if (op.flags & F_RELU) x = std::fmax(x, 0.0f);
            const bool cut = op.t == T_BF16X2 && op.round == R_Z;
            y = y << 16 | (cut ? bf16_towards_zero(x) : bits16(op.t, x));
        }
        set(w, op.x[0], l, y);
    }
}

}    // namespace ptx
