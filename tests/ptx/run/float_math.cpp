/* float_math.cpp - arithmetic of floats (PTX ISA: Floating Point, Half Precision and Mixed
 * Precision Instructions).
 *
 * Approximations (ex2.approx, lg2, rsqrt, rcp, tanh, sin, cos) give the host's result, which is
 * nearer than a GPU's. 16-bit floats are computed in float and rounded: exact for one sum,
 * product or quotient of two of them. */
#include "run/float_math.h"
#include "run/operations.h"
#include "run/registers.h"

namespace ptx {

/* min and max of a number and a NaN are the number, or NaN with .NaN; -0 is less than +0. */
template <class T> static T least(T a, T b, bool keeps_nan) {
    if (std::isnan(a) || std::isnan(b)) return keeps_nan ? (T)NAN : std::isnan(a) ? b : a;
    if (a == b) return std::signbit(a) ? a : b;
    return a < b ? a : b;
}

template <class T> static T greatest(T a, T b, bool keeps_nan) {
    if (std::isnan(a) || std::isnan(b)) return keeps_nan ? (T)NAN : std::isnan(a) ? b : a;
    if (a == b) return std::signbit(a) ? b : a;
    return a > b ? a : b;
}

template <class T> static T binary(int code, T a, T b, u32 flags) {
    switch (code) {
    case ADD: return a + b;
    case SUB: return a - b;
    case MUL: return a * b;
    case DIV: return a / b;
    case MIN: return least(a, b, flags & F_NAN);
    case MAX: return greatest(a, b, flags & F_NAN);
    case COPYSIGN: return std::copysign(b, a);    // the sign is the first operand's
    default: fail("no operation of floats");
    }
}

template <class T> static T unary(int code, T a) {
    switch (code) {
    case EX2: return std::exp2(a);
    case LG2: return std::log2(a);
    case RSQRT: return (T)(1 / std::sqrt((double)a));
    case SQRT: return std::sqrt(a);
    case RCP: return 1 / a;
    case TANH: return std::tanh(a);
    case SIN: return std::sin(a);
    case COS: return std::cos(a);
    default: fail("no operation of floats");
    }
}

/* .sat: to [0, 1], NaN to 0. */
static float saturated(float x) {
    if (std::isnan(x) || x < 0) return 0.0f;
    return x > 1 ? 1.0f : x;
}

/* A float's operation with .ftz on operands and result, and .sat. */
template <class F, class... X> static float modified(u32 flags, F f, X... x) {
    float y = flags & F_FTZ ? flush(f(flush(x)...)) : f(x...);
    return flags & F_SAT ? saturated(y) : y;
}

/* f on each half of a pair of 16-bit floats, or on the one there is. */
template <class F, class... X> static u32 each_half(type t, F f, X... x) {
    u32 out = 0;
    for (int i = 0; i < (is_pair(t) ? 2 : 1); i++) {
        out |= (u32)bits16(t, f(value16(t, (u32)x >> 16 * i)...)) << 16 * i;
    }
    return out;
}

static bool plain(const instruction &op) {
    return op.round == R_N && !(op.flags & (F_FTZ | F_SAT));
}

/* The commonest by far: sums and products rounded to nearest. */
template <class T> static bool run_plain(warp &w, const instruction &op, u32 lanes) {
    switch (op.code) {
    case ADD: map2<T>(w, op, lanes, [](T a, T b) { return canonical(a + b); }); return true;
    case SUB: map2<T>(w, op, lanes, [](T a, T b) { return canonical(a - b); }); return true;
    case MUL: map2<T>(w, op, lanes, [](T a, T b) { return canonical(a * b); }); return true;
    default: return false;
    }
}

void run_float_binary(warp &w, const instruction &op, u32 lanes) {
    if (op.t == T_F32 && plain(op) && run_plain<float>(w, op, lanes)) return;
    if (op.t == T_F64 && plain(op) && run_plain<double>(w, op, lanes)) return;
    const int code = op.code;
    const u32 flags = op.flags;
    const auto f = [=](auto a, auto b) { return canonical(binary(code, a, b, flags)); };
    const auto half = [&](auto a, auto b) { return each_half(op.t, f, a, b); };
    const rounds mode(op.round);
    switch (op.t) {
    case T_F32:
        map2<float>(w, op, lanes, [&](float a, float b) { return modified(flags, f, a, b); });
        break;
    case T_F64: map2<double>(w, op, lanes, f); break;
    case T_BF16:
    case T_F16: map2<u16>(w, op, lanes, [&](u16 a, u16 b) { return (u16)half(a, b); }); break;
    default: map2<u32>(w, op, lanes, half);
    }
}

/* neg and abs are of the sign's bit alone: NaN keeps its bits. */
void run_float_sign(warp &w, const instruction &op, u32 lanes) {
    u64 sign = 1ull << (8 * width(op.t) - 1);
    if (is_pair(op.t)) sign |= 0x8000;
    for (const int l : on(lanes)) {
        const u64 a = get(w, op.x[1], l);
        set(w, op.x[0], l, op.code == NEG ? a ^ sign : a & ~sign);
    }
}

void run_float_unary(warp &w, const instruction &op, u32 lanes) {
    const int code = op.code;
    const u32 flags = op.flags;
    const auto f = [=](auto a) { return canonical(unary(code, a)); };
    const auto half = [&](auto a) { return each_half(op.t, f, a); };
    const rounds mode(op.round);
    switch (op.t) {
    case T_F32: map1<float>(w, op, lanes, [&](float a) { return modified(flags, f, a); }); break;
    case T_F64:
        map1<double>(w, op, lanes, [&](double a) {
            const double y = f(a);    // rcp.approx.ftz.f64: the low 32 bits are zero
            return code == RCP && flags & F_APPROX ? double_of(bits_of(y) & ~0xffffffffull) : y;
        });
        break;
    case T_BF16:
    case T_F16: map1<u16>(w, op, lanes, [&](u16 a) { return (u16)half(a); }); break;
    default: map1<u32>(w, op, lanes, half);
    }
}

/* y to float towards odd: a second rounding, to fewer bits, then gives what one would have
 * given. */
static float towards_odd(double y) {
    const float f = (float)y;
    if ((double)f == y || std::isnan(y) || std::isinf(f)) return f;
    u32 bits = bits_of(f);
    if (std::fabs((double)f) > std::fabs(y)) bits--;
    return float_of(bits | 1);
}

/* a b + c of 16-bit floats is exact in double, but for a last bit that no rounding to 16 bits
 * can see. */
static u16 fma16(type t, u32 a, u32 b, u32 c) {
    const double y = (double)value16(t, a) * value16(t, b) + value16(t, c);
    return is_bf16(t) ? bf16_nearest(towards_odd(y)) : f16_rounded(y);
}

static void run_fma16(warp &w, const instruction &op, u32 lanes) {
    for (const int l : on(lanes)) {
        const u32 a = get32(w, op.x[1], l), b = get32(w, op.x[2], l), c = get32(w, op.x[3], l);
        u32 y = fma16(op.t, a, b, c);
        if (is_pair(op.t)) y |= (u32)fma16(op.t, a >> 16, b >> 16, c >> 16) << 16;
        set(w, op.x[0], l, y);
    }
}

void run_fma(warp &w, const instruction &op, u32 lanes) {
    const u32 flags = op.flags;
    if (op.t != T_F32 && op.t != T_F64) return run_fma16(w, op, lanes);
    if (op.t == T_F32 && plain(op)) {
        map3<float>(w, op, lanes,
                    [](float a, float b, float c) { return canonical(__builtin_fmaf(a, b, c)); });
        return;
    }
    const auto f = [](auto a, auto b, auto c) { return canonical(std::fma(a, b, c)); };
    const rounds mode(op.round);
    if (op.t == T_F64) map3<double>(w, op, lanes, f);
    else
        map3<float>(w, op, lanes,
                    [&](float a, float b, float c) { return modified(flags, f, a, b, c); });
}

}    // namespace ptx
