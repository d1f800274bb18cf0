/* integer_math.cpp - arithmetic of integers, and with carries (PTX ISA: Integer Arithmetic,
 * Extended-Precision Integer Arithmetic, Logic and Shift Instructions). */
#include "run/operations.h"
#include "run/registers.h"

namespace ptx {

/* Division by zero is not defined; it gives all ones here, and the dividend as the rest. */
template <class T> static T quotient(T a, T b) {
    typedef std::make_unsigned_t<T> U;
    if (b == 0) return (T)-1;
    return std::is_signed_v<T> && b == (T)-1 ? (T)(0 - (U)a) : (T)(a / b);
}

template <class T> static T rest(T a, T b) {
    if (b == 0) return a;
    return std::is_signed_v<T> && b == (T)-1 ? (T)0 : (T)(a % b);
}

/* The upper half of a product of two integers of twice their width. */
template <class T> static T high_product(T a, T b) {
    typedef std::conditional_t<std::is_signed_v<T>, __int128, unsigned __int128> wide;
    return (T)((wide)a * (wide)b >> 8 * sizeof(T));
}

void run_integer_binary(warp &w, const instruction &op, u32 lanes) {
    by_integer(op.t, [&](auto zero) {
        typedef decltype(zero) T;
        typedef std::make_unsigned_t<T> U;
        switch (op.code) {
        case ADD: map2<U>(w, op, lanes, [](U a, U b) { return (U)(a + b); }); break;
        case SUB: map2<U>(w, op, lanes, [](U a, U b) { return (U)(a - b); }); break;
        case DIV: map2<T>(w, op, lanes, quotient<T>); break;
        case REM: map2<T>(w, op, lanes, rest<T>); break;
        case MIN: map2<T>(w, op, lanes, [](T a, T b) { return a < b ? a : b; }); break;
        case MAX: map2<T>(w, op, lanes, [](T a, T b) { return a > b ? a : b; }); break;
        case AND: map2<T>(w, op, lanes, [](T a, T b) { return (T)(a & b); }); break;
        case OR: map2<T>(w, op, lanes, [](T a, T b) { return (T)(a | b); }); break;
        case XOR: map2<T>(w, op, lanes, [](T a, T b) { return (T)(a ^ b); }); break;
        default: fail("no operation of integers");
        }
    });
}

template <class T> static T reversed(T a) {
    T y = 0;
    for (size_t i = 0; i < 8 * sizeof(T); i++) y |= (T)((T)(a >> i & 1) << (8 * sizeof(T) - 1 - i));
    return y;
}

void run_integer_unary(warp &w, const instruction &op, u32 lanes) {
    by_integer(op.t, [&](auto zero) {
        typedef decltype(zero) T;
        typedef std::make_unsigned_t<T> U;
        switch (op.code) {
        case NOT: map1<T>(w, op, lanes, [](T a) { return (T)~a; }); break;
        case NEG: map1<T>(w, op, lanes, [](T a) { return (T)(0 - (U)a); }); break;
        case ABS:
            map1<T>(w, op, lanes,
                    [](T a) { return std::is_signed_v<T> && a < 0 ? (T)(0 - (U)a) : a; });
            break;
        case CNOT: map1<T>(w, op, lanes, [](T a) { return (T)(a == 0); }); break;
        case BREV: map1<U>(w, op, lanes, reversed<U>); break;
        default: fail("no operation of integers");
        }
    });
}

void run_predicate_binary(warp &w, const instruction &op, u32 lanes) {
    const int code = op.code;
    for (const int l : on(lanes)) {
        const bool a = get_predicate(w, op.x[1], l), b = get_predicate(w, op.x[2], l);
        values<u8>(w, op.x[0])[l] = code == AND ? a && b : code == OR ? a || b : a != b;
    }
}

void run_predicate_not(warp &w, const instruction &op, u32 lanes) {
    map1<u8>(w, op, lanes, [](u8 a) { return (u8)!a; });
}

/* Shifts by the width or more leave zeros, or the sign. */
void run_shift(warp &w, const instruction &op, u32 lanes) {
    by_integer(op.t, [&](auto zero) {
        typedef decltype(zero) T;
        const u32 bits = 8 * sizeof(T);
        for (const int l : on(lanes)) {
            const T a = values<T>(w, op.x[1])[l];
            const u32 by = get32(w, op.x[2], l);
            T &d = values<T>(w, op.x[0])[l];
            if (op.code == SHL) d = by >= bits ? (T)0 : (T)((std::make_unsigned_t<T>)a << by);
            else d = (T)(a >> (by >= bits ? bits - 1 : by));
            if (op.code == SHR && by >= bits && !std::is_signed_v<T>) d = 0;
        }
    });
}

/* mul and mad: .lo, .hi or .wide. */
void run_multiply(warp &w, const instruction &op, u32 lanes) {
    const bool adds = op.x[3].kind != operand::NONE;
    by_integer(op.t, [&](auto zero) {
        typedef decltype(zero) T;
        const T *a = values<T>(w, op.x[1]), *b = values<T>(w, op.x[2]);
        if (!(op.flags & (F_HI | F_WIDE)) && adds) {
            return map3<T>(w, op, lanes,
                           [](T x, T y, T z) { return (T)((u64)x * (u64)y + (u64)z); });
        }
        for (const int l : on(lanes)) {
            u64 y = (u64)a[l] * (u64)b[l];    // signs are extended: right for .lo and .wide
            if (op.flags & F_HI) y = (u64)high_product(a[l], b[l]);
            set(w, op.x[0], l, adds ? y + get(w, op.x[3], l) : y);
        }
    });
}

/* add.cc and its like leave a carry, addc and its like take one; 32 bits. A borrow is a carry. */
static void with_carry(warp &w, const instruction &op, u32 lanes, bool takes) {
    if (width(op.t) != 4) fail("a carry of .%s", types[op.t].name.data());
    for (const int l : on(lanes)) {
        const u64 a = get32(w, op.x[1], l), b = get32(w, op.x[2], l),
                  carry = takes ? w.carry[l] : 0;
        u64 y;
        if (op.code == ADD) y = a + b + carry;
        else if (op.code == SUB) y = a - b - carry;
        else y = (op.flags & F_HI ? a * b >> 32 : (u32)(a * b)) + get32(w, op.x[3], l) + carry;
        if (op.flags & F_CC) w.carry[l] = y >> 32 & 1;
        set(w, op.x[0], l, (u32)y);
    }
}

void run_carry_out(warp &w, const instruction &op, u32 lanes) {
    with_carry(w, op, lanes, false);
}

void run_carry_in(warp &w, const instruction &op, u32 lanes) {
    with_carry(w, op, lanes, true);
}

}    // namespace ptx
