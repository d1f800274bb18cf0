/* compare.cpp - comparisons, and choices by predicates. */
#include "run/operations.h"
#include "run/registers.h"

namespace ptx {

template <class T> static bool compare_integers(int code, T a, T b) {
    typedef std::make_unsigned_t<T> U;
    switch (code) {
    case EQ: return a == b;
    case NE: return a != b;
    case LT: return a < b;
    case LE: return a <= b;
    case GT: return a > b;
    case GE: return a >= b;
    case LO: return (U)a < (U)b;
    case LS: return (U)a <= (U)b;
    case HI: return (U)a > (U)b;
    case HS: return (U)a >= (U)b;
    default: fail("no comparison of integers");
    }
}

/* The plain ones are false of a NaN, those ending in u true. */
static bool compare_floats(int code, double a, double b) {
    const bool nan = std::isnan(a) || std::isnan(b);
    switch (code) {
    case EQ: return !nan && a == b;
    case NE: return !nan && a != b;
    case LT: return !nan && a < b;
    case LE: return !nan && a <= b;
    case GT: return !nan && a > b;
    case GE: return !nan && a >= b;
    case EQU: return nan || a == b;
    case NEU: return nan || a != b;
    case LTU: return nan || a < b;
    case LEU: return nan || a <= b;
    case GTU: return nan || a > b;
    case GEU: return nan || a >= b;
    case NUM: return !nan;
    case NAN_: return nan;
    default: fail("no comparison of floats");
    }
}

/* out = compare(a, b) by lane, of values of type T. */
template <class T, class F>
static void by_lane(warp &w, const instruction &op, u32 lanes, bool *out, F compare) {
    const T *a = values<T>(w, op.x[2]), *b = values<T>(w, op.x[3]);
    for (const int l : on(lanes)) out[l] = compare(a[l], b[l]);
}

static void compare(warp &w, const instruction &op, u32 lanes, bool *out) {
    const int code = op.variant;
    const bool flushes = op.flags & F_FTZ;
    switch (op.t) {
    case T_F32:
        return by_lane<float>(w, op, lanes, out, [=](float a, float b) {
            if (flushes) a = flush(a), b = flush(b);
            return compare_floats(code, a, b);
        });
    case T_F64:
        return by_lane<double>(w, op, lanes, out,
                               [=](double a, double b) { return compare_floats(code, a, b); });
    case T_F16:
    case T_BF16:
        return by_lane<u16>(w, op, lanes, out, [&](u16 a, u16 b) {
            return compare_floats(code, value16(op.t, a), value16(op.t, b));
        });
    default:
        by_integer(op.t, [&](auto zero) {
            typedef decltype(zero) T;
            by_lane<T>(w, op, lanes, out,
                       [=](T a, T b) { return compare_integers<T>(code, a, b); });
        });
    }
}

static bool combined(int how, bool a, bool b) {
    switch (how) {
    case WITH_AND: return a && b;
    case WITH_OR: return a || b;
    case WITH_XOR: return a != b;
    default: return a;
    }
}

/* p = (a ? b) with c, q = !(a ? b) with c. */
void run_setp(warp &w, const instruction &op, u32 lanes) {    // p, q, a, b, c
    bool out[LANES];
    compare(w, op, lanes, out);
    for (const int l : on(lanes)) {
        const bool c = op.code != ALONE && get_predicate(w, op.x[4], l);
        set(w, op.x[0], l, combined(op.code, out[l], c));
        set(w, op.x[1], l, combined(op.code, !out[l], c));
    }
}

template <class T> static void select(warp &w, const instruction &op, u32 lanes) {
    const u8 *p = values<u8>(w, op.x[3]);
    const T *a = values<T>(w, op.x[1]), *b = values<T>(w, op.x[2]);
    T *d = values<T>(w, op.x[0]);
    for (const int l : on(lanes)) d[l] = p[l] ? a[l] : b[l];
}

void run_selp(warp &w, const instruction &op, u32 lanes) {    // d, a, b, p
    switch (op.x[0].size) {
    case 2: select<u16>(w, op, lanes); break;
    case 4: select<u32>(w, op, lanes); break;
    case 8: select<u64>(w, op, lanes); break;
    default: fail("selp of a byte");
    }
}

void run_testp(warp &w, const instruction &op, u32 lanes) {    // p, a
    for (const int l : on(lanes)) {
        const double x = float_value(op.t, get(w, op.x[1], l));
        bool y = std::isnan(x);
        if (op.code == FINITE) y = std::isfinite(x);
        else if (op.code == INFINITE) y = std::isinf(x);
        else if (op.code == NUMBER) y = !std::isnan(x);
        set(w, op.x[0], l, y);
    }
}

}    // namespace ptx
