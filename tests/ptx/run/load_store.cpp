/* load_store.cpp - loads, stores and atomics. Each happens at once and in order: memory is
 * stronger here than the PTX memory model promises. */
#include "run/operations.h"
#include "run/registers.h"

namespace ptx {

/* Parameters of the kernel are global memory here, those of functions slots of local memory. */
static space space_of(const instruction &op, const operand &x) {
    if (op.in != S_PARAM) return op.in;
    return x.from == B_LOCAL ? S_LOCAL : S_GLOBAL;
}

/* The warp may wait for what another one writes: others get their turn. */
void run_poll(warp &w, const instruction &, u32) {
    w.of->of->polls++;
    w.yields = true;
}

/* One value of four bytes from a register's address: most loads. */
template <class A> static void load_words(warp &w, const instruction &op, space in, u32 lanes) {
    u32 *d = values<u32>(w, op.x[0]);
    const A *a = values<A>(w, op.x[1].list[0]);
    const A step = (A)op.x[1].value;
    for (const int l : on(lanes)) d[l] = load_as<u32>(place(w, op, in, a[l] + step, l, 4));
}

void run_ld(warp &w, const instruction &op, u32 lanes) {    // d or {d...}, [a]
    const int n = op.count, bytes = width(op.t);
    const operand &from = op.x[1];
    const space in = space_of(op, from);
    if (op.flags & F_ORDERED) run_poll(w, op, lanes);
    if (n == 1 && bytes == 4 && op.x[0].size == 4 && from.from == B_REGISTER) {
        if (from.list[0].size == 4) return load_words<u32>(w, op, in, lanes);
        return load_words<u64>(w, op, in, lanes);
    }
    for (const int l : on(lanes)) {
        const u8 *p = place(w, op, in, address(w, from, l), l, (u32)(n * bytes));
        for (int i = 0; i < n; i++) {
            u64 v = 0;
            memcpy(&v, p + i * bytes, (size_t)bytes);
            set(w, op.x[0].part((size_t)i), l, (u64)extend(v, op.t));
        }
    }
}

void run_st(warp &w, const instruction &op, u32 lanes) {    // [a], b or {b...}
    const int n = op.count, bytes = width(op.t);
    const space in = space_of(op, op.x[0]);
    for (const int l : on(lanes)) {
        u8 *p = place(w, op, in, address(w, op.x[0], l), l, (u32)(n * bytes));
        for (int i = 0; i < n; i++) {
            const u64 v = get(w, op.x[1].part((size_t)i), l);
            memcpy(p + i * bytes, &v, (size_t)bytes);
        }
    }
}

static u64 combine_floats(int code, type t, u64 old, u64 b) {
    if (code == EXCH) return b;
    if (code != ADD) fail("no atomic operation of floats");
    if (t == T_F32) return bits_of(float_of((u32)old) + float_of((u32)b));
    return bits_of(double_of(old) + double_of(b));
}

u64 combine(int code, type t, u64 old, u64 b, u64 c) {
    if (t == T_F32 || t == T_F64) return combine_floats(code, t, old, b);
    const s64 x = extend(old, t), y = extend(b, t);
    const bool below = is_signed(t) ? x < y : (u64)x < (u64)y;
    switch (code) {
    case ADD: return (u64)(x + y);
    case MIN: return (u64)(below ? x : y);
    case MAX: return (u64)(below ? y : x);
    case AND: return old & b;
    case OR: return old | b;
    case XOR: return old ^ b;
    case EXCH: return b;
    case CAS: return x == y ? c : old;
    case INC: return below ? (u64)x + 1 : 0;
    case DEC: return x == 0 || (u64)x > (u64)y ? b : (u64)x - 1;
    default: fail("no atomic operation of integers");
    }
}

void run_atom(warp &w, const instruction &op, u32 lanes) {    // d, [a], b, c
    const u32 bytes = (u32)width(op.t);
    if (op.count != 1) fail("an atomic of a vector");
    run_poll(w, op, lanes);
    for (const int l : on(lanes)) {
        u8 *p = place(w, op, op.in, address(w, op.x[1], l), l, bytes);
        u64 old = 0;
        memcpy(&old, p, bytes);
        const u64 c = op.x[3].kind ? get(w, op.x[3], l) : 0;
        const u64 y = combine(op.code, op.t, old, get(w, op.x[2], l), c);
        memcpy(p, &y, bytes);
        set(w, op.x[0], l, old);
    }
}

}    // namespace ptx
