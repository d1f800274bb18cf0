/* move.cpp - moves, special registers and addresses. */
#include "run/operations.h"
#include "run/registers.h"

namespace ptx {

template <class T> static void move(warp &w, const instruction &op, u32 lanes) {
    T *d = values<T>(w, op.x[0]);
    const T *a = values<T>(w, op.x[1]);
    if (lanes == FULL) memmove(d, a, LANES * sizeof *d);
    else
        for (const int l : on(lanes)) d[l] = a[l];
}

/* mov {a, b}, c: from the lowest bits on; _ stands for as many as its fellows have. */
static void unpack(warp &w, const instruction &op, u32 lanes) {
    const std::vector<operand> &to = op.x[0].list;
    for (const int l : on(lanes)) {
        u64 v = get(w, op.x[1], l);
        for (const operand &part : to) {
            set(w, part, l, v);
            const int bits = part.kind ? 8 * part.size : 8 * op.x[1].size / (int)to.size();
            v = bits >= 64 ? 0 : v >> bits;
        }
    }
}

static void pack(warp &w, const instruction &op, u32 lanes) {
    for (const int l : on(lanes)) {
        u64 v = 0;
        int at = 0;
        for (const operand &part : op.x[1].list) v |= get(w, part, l) << at, at += 8 * part.size;
        set(w, op.x[0], l, v);
    }
}

void run_mov(warp &w, const instruction &op, u32 lanes) {    // d, a
    const operand &d = op.x[0], &a = op.x[1];
    if (d.kind == operand::LIST) return unpack(w, op, lanes);
    if (a.kind == operand::LIST) return pack(w, op, lanes);
    if (d.size == 4 && a.size == 4) return move<u32>(w, op, lanes);
    if (d.size == 8 && a.size == 8) return move<u64>(w, op, lanes);
    for (const int l : on(lanes)) set(w, d, l, get(w, a, l));
}

/* Block sizes are at most 1024 in all, so 32 bits do. */
static u32 thread_index(const warp &w, int l, int axis) {
    const unsigned *n = w.of->launch->block;
    const u32 t = (u32)w.index * LANES + (u32)l;
    if (axis == 0) return t % n[0];
    return axis == 1 ? t / n[0] % n[1] : t / n[0] / n[1];
}

static u64 special_value(const warp &w, int which, int axis, int l) {
    const block &b = *w.of;
    const ptx_launch &launch = *b.launch;
    const unsigned *c = launch.cluster;
    switch (which) {
    case TID: return thread_index(w, l, axis);
    case NTID: return launch.block[axis];
    case CTAID: return b.id[axis];
    case NCTAID: return launch.grid[axis];
    case LANEID: return (u64)l;
    case WARPID: return (u64)w.index;
    case NWARPID: return b.warps.size();
    case CLUSTERID: return b.id[axis] / c[axis];
    case NCLUSTERID: return launch.grid[axis] / c[axis];
    case CLUSTER_CTAID: return b.id[axis] % c[axis];
    case CLUSTER_NCTAID: return c[axis];
    case CLUSTER_RANK: return b.rank;
    case CLUSTER_SIZE: return c[0] * c[1] * c[2];
    case SMID: return b.id[0] % PTX_PROCESSORS;
    case NSMID: return PTX_PROCESSORS;
    case CLOCK: return w.executed;
    case MASK_EQ: return 1u << l;
    case MASK_LT: return (1u << l) - 1;
    case MASK_LE: return (2u << l) - 1;
    case MASK_GT: return ~((2u << l) - 1);
    case MASK_GE: return ~((1u << l) - 1);
    case DYNAMIC_SHARED: return launch.shared;
    case TOTAL_SHARED: return b.shared_end - SHARED_FIRST;
    case ENVREG1: return (u64)grid_barrier >> 32;
    case ENVREG2: return (u32)(u64)grid_barrier;
    default: return 0;    // %gridid
    }
}

void run_special(warp &w, const instruction &op, u32 lanes) {    // d; code: which, variant: axis
    for (const int l : on(lanes)) set(w, op.x[0], l, special_value(w, op.code, op.variant, l));
}

/* The address of a variable. */
void run_symbol(warp &w, const instruction &op, u32 lanes) {    // d, name
    for (const int l : on(lanes)) set(w, op.x[0], l, address(w, op.x[1], l));
}

/* From a state space to generic, or back with .to. Global addresses are generic as they are. */
void run_cvta(warp &w, const instruction &op, u32 lanes) {    // d, a
    const bool back = op.flags & F_TO;
    for (const int l : on(lanes)) {
        u64 a = get(w, op.x[1], l);
        if (op.in == S_SHARED) a = back ? (u32)a : a | SHARED_WINDOW;
        if (op.in == S_LOCAL) a = back ? a & ~LOCAL_WINDOW : a | LOCAL_WINDOW;
        set(w, op.x[0], l, a);
    }
}

void run_isspacep(warp &w, const instruction &op, u32 lanes) {    // p, a
    for (const int l : on(lanes)) {
        const u64 a = get(w, op.x[1], l), window = a & (SHARED_WINDOW | LOCAL_WINDOW);
        const u64 asked = op.in == S_SHARED ? SHARED_WINDOW : op.in == S_LOCAL ? LOCAL_WINDOW : 0;
        set(w, op.x[0], l, window == asked);
    }
}

/* The same variable in the block of that rank. */
void run_mapa(warp &w, const instruction &op, u32 lanes) {    // d, a, rank
    for (const int l : on(lanes)) {
        const u64 a = get(w, op.x[1], l), rank = get(w, op.x[2], l);
        set(w, op.x[0], l, (a & ~0xff000000ull) | (rank + 1) << 24);
    }
}

/* An argument or a result of a call: count bytes between slots of local memory. */
void run_copy_local(warp &w, const instruction &op, u32 lanes) {    // to, from
    const u32 n = (u32)op.count;
    for (const int l : on(lanes)) {
        memmove(local_at(w, l, (u64)op.x[0].value, n), local_at(w, l, (u64)op.x[1].value, n), n);
    }
}

}    // namespace ptx
