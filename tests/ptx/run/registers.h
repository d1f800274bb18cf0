/* registers.h - operands by lane, and operations applied to the lanes that are on. */
#ifndef PTX_REGISTERS_H
#define PTX_REGISTERS_H

#include <type_traits>

#include "run/handlers.h"
#include "run/memory.h"

namespace ptx {

/* The lanes of a mask, from the lowest: for (const int l : on(mask)). */
struct on {
    u32 mask;

    explicit on(u32 of) : mask(of) {
    }
    struct lane {
        u32 left;
        int operator*() const {
            return __builtin_ctz(left);
        }
        void operator++() {
            left &= left - 1;
        }
        bool operator!=(const lane &other) const {
            return left != other.left;
        }
    };
    lane begin() const {
        return { mask };
    }
    lane end() const {
        return { 0 };
    }
};

inline int first_of(u32 mask) {
    return __builtin_ctz(mask);
}

inline u8 *lanes_of(warp &w, const operand &x) {
    return (x.kind == operand::IMMEDIATE ? w.kernel->pool.data() : w.registers) + x.at;
}

template <class T> inline T *values(warp &w, const operand &x) {
    return (T *)lanes_of(w, x);
}

inline u64 get(warp &w, const operand &x, int l) {
    const u8 *p = lanes_of(w, x);
    switch (x.size) {
    case 1: return p[l];
    case 2: return ((const u16 *)p)[l];
    case 4: return ((const u32 *)p)[l];
    default: return ((const u64 *)p)[l];
    }
}

inline u32 get32(warp &w, const operand &x, int l) {
    return (u32)get(w, x, l);
}

/* To an operand that is not there (_) nothing is written. */
inline void set(warp &w, const operand &x, int l, u64 v) {
    if (x.kind == operand::NONE) return;
    u8 *p = lanes_of(w, x);
    switch (x.size) {
    case 1: p[l] = (u8)v; break;
    case 2: ((u16 *)p)[l] = (u16)v; break;
    case 4: ((u32 *)p)[l] = (u32)v; break;
    default: ((u64 *)p)[l] = v;
    }
}

inline bool get_predicate(warp &w, const operand &x, int l) {
    return (values<u8>(w, x)[l] != 0) != x.negated;
}

inline u64 address(warp &w, const operand &x, int l) {
    switch (x.from) {
    case B_REGISTER: return get(w, x.list[0], l) + (u64)x.value;
    case B_SHARED: return shared_address(*w.of, (u64)x.value);
    case B_PARAMETER: return (u64)parameters + (u64)x.value;
    default: return (u64)x.value;
    }
}

/* Shared memory at the address that operand x has in lane l. */
inline u8 *shared_operand(warp &w, const operand &x, int l, u32 bytes) {
    return shared_at(*w.of, address(w, x, l), bytes);
}

/* d = f(a), f(a, b), f(a, b, c) by lane. All lanes: loops that compilers make vectors of. */
template <class T, class F> inline void map1(warp &w, const instruction &op, u32 lanes, F f) {
    T *d = values<T>(w, op.x[0]);
    const T *a = values<T>(w, op.x[1]);
    if (lanes == FULL) {
        for (int l = 0; l < LANES; l++) d[l] = f(a[l]);
    } else {
        for (const int l : on(lanes)) d[l] = f(a[l]);
    }
}

template <class T, class F> inline void map2(warp &w, const instruction &op, u32 lanes, F f) {
    T *d = values<T>(w, op.x[0]);
    const T *a = values<T>(w, op.x[1]), *b = values<T>(w, op.x[2]);
    if (lanes == FULL) {
        for (int l = 0; l < LANES; l++) d[l] = f(a[l], b[l]);
    } else {
        for (const int l : on(lanes)) d[l] = f(a[l], b[l]);
    }
}

template <class T, class F> inline void map3(warp &w, const instruction &op, u32 lanes, F f) {
    T *d = values<T>(w, op.x[0]);
    const T *a = values<T>(w, op.x[1]), *b = values<T>(w, op.x[2]), *c = values<T>(w, op.x[3]);
    if (lanes == FULL) {
        for (int l = 0; l < LANES; l++) d[l] = f(a[l], b[l], c[l]);
    } else {
        for (const int l : on(lanes)) d[l] = f(a[l], b[l], c[l]);
    }
}

/* Calls f with a zero of the C type of an integer type. */
template <class F> void by_integer(type t, F f) {
    switch (t) {
    case T_U16:
    case T_B16: f(u16()); break;
    case T_S16: f(s16()); break;
    case T_U32:
    case T_B32: f(u32()); break;
    case T_S32: f(s32()); break;
    case T_U64:
    case T_B64: f(u64()); break;
    case T_S64: f(s64()); break;
    default: fail("an operation of integers on .%s", types[t].name.data());
    }
}

}    // namespace ptx
#endif
