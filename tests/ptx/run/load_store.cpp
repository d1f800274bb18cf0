/* load_store.cpp - loads, stores and atomics. Each happens at once and in order: memory is
 * stronger here than the PTX memory model promises. */
#include "run/operations.h"
#include "run/registers.h"

namespace ptx {

/* Parameters of functions are slots of local memory. */
static space space_of(const instruction &op, const operand &x) {
    if (op.in != S_PARAM) return op.in;
    return x.from == B_LOCAL ? S_LOCAL : S_PARAM;
}

/* The warp may wait for what another one writes: others get their turn. */
void run_poll(warp &w, const instruction &, u32) {
    w.of->of->polls++;
    w.yields = true;
}

/* Where each lane's bytes are. */
struct places {
    u8 *at[LANES];

    places(warp &w, const instruction &op, const operand &x, u32 lanes) {
        const u32 bytes = (u32)(op.count * width(op.t));
        const space in = space_of(op, x);
        if (x.from == B_REGISTER && x.list[0].size == 8) {    // most
            const u64 *a = values<u64>(w, x.list[0]);
            for (const int l : on(lanes)) at[l] = place(w, op, in, a[l] + (u64)x.value, l, bytes);
        } else {
            for (const int l : on(lanes)) at[l] = place(w, op, in, address(w, x, l), l, bytes);
        }
    }
};

/* Registers as wide as what they hold; a load may leave some out. */
static bool as_wide(const instruction &op, const operand &x) {
    for (int i = 0; i < op.count; i++) {
        if (x.part((size_t)i).size != width(op.t)) return false;
    }
    return true;
}

template <class T>
static void load_lanes(warp &w, const instruction &op, u32 lanes, const places &p) {
    for (int i = 0; i < op.count; i++) {
        T *d = values<T>(w, op.x[0].part((size_t)i));
        for (const int l : on(lanes)) d[l] = load_as<T>(p.at[l] + (size_t)i * sizeof(T));
    }
}

template <class T>
static void store_lanes(warp &w, const instruction &op, u32 lanes, const places &p) {
    for (int i = 0; i < op.count; i++) {
        const T *a = values<T>(w, op.x[1].part((size_t)i));
        for (const int l : on(lanes)) store_as(p.at[l] + (size_t)i * sizeof(T), a[l]);
    }
}

/* A destination that is an address register of the same load is read before it is written:
 * `places` has all. */
void run_ld(warp &w, const instruction &op, u32 lanes) {    // d or {d...}, [a]
    if (op.flags & F_ORDERED) run_poll(w, op, lanes);
    const places p(w, op, op.x[1], lanes);
    const int bytes = width(op.t);
    if (bytes == 4 && as_wide(op, op.x[0])) return load_lanes<u32>(w, op, lanes, p);
    if (bytes == 8 && as_wide(op, op.x[0])) return load_lanes<u64>(w, op, lanes, p);
    if (bytes == 2 && as_wide(op, op.x[0])) return load_lanes<u16>(w, op, lanes, p);
    for (int i = 0; i < op.count; i++) {
        const operand &d = op.x[0].part((size_t)i);
        for (const int l : on(lanes))
            set(w, d, l, (u64)extend(load_bits(p.at[l] + i * bytes, bytes), op.t));
    }
}

/* Where lanes store to the same place the highest wins; the ISA says that one does. */
void run_st(warp &w, const instruction &op, u32 lanes) {    // [a], b or {b...}
    const places p(w, op, op.x[0], lanes);
    const int bytes = width(op.t);
    if (bytes == 4 && as_wide(op, op.x[1])) return store_lanes<u32>(w, op, lanes, p);
    if (bytes == 8 && as_wide(op, op.x[1])) return store_lanes<u64>(w, op, lanes, p);
    for (int i = 0; i < op.count; i++) {
        const operand &b = op.x[1].part((size_t)i);
        for (const int l : on(lanes)) store_bits(p.at[l] + i * bytes, bytes, get(w, b, l));
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
    const int bytes = width(op.t);
    if (op.count != 1) fail("an atomic of a vector");
    run_poll(w, op, lanes);
    for (const int l : on(lanes)) {
        u8 *p = place(w, op, op.in, address(w, op.x[1], l), l, (u32)bytes);
        const u64 old = load_bits(p, bytes);
        const u64 c = op.x[3].kind ? get(w, op.x[3], l) : 0;
        store_bits(p, bytes, combine(op.code, op.t, old, get(w, op.x[2], l), c));
        set(w, op.x[0], l, old);
    }
}

}    // namespace ptx
