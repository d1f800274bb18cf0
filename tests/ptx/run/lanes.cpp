/* lanes.cpp - lanes of a warp among themselves (PTX ISA: shfl.sync, vote.sync, match.sync,
 * redux.sync, elect.sync, bar.warp.sync). Lanes that a mask names and that are on another path
 * are reported: on a GPU they would be waited for, which this interpreter, whose warps take one
 * path after the other, cannot do. */
#include "run/operations.h"
#include "run/registers.h"

namespace ptx {

static void need_members(warp &w, const operand &mask, u32 lanes, const char *what) {
    const u32 members = get32(w, mask, first_of(lanes)), missing = members & w.alive & ~lanes;
    if (missing) fail("%s of lanes 0x%08x, of which 0x%08x are elsewhere", what, members, missing);
}

/* All lanes, each with the one of index l ^ b: the steps of a reduction. */
static bool run_butterfly(warp &w, const instruction &op, u32 lanes) {
    const operand &b = op.x[3], &c = op.x[4];
    const bool usual = b.kind == operand::IMMEDIATE && c.kind == operand::IMMEDIATE &&
                       c.value == 31;
    if (lanes != FULL || op.code != BFLY || !usual) return false;
    u32 y[LANES];
    const u32 *a = values<u32>(w, op.x[2]);
    for (int l = 0; l < LANES; l++) y[l] = a[l ^ (int)(b.value & 31)];
    for (int l = 0; l < LANES; l++) set(w, op.x[0], l, y[l]), set(w, op.x[1], l, 1);
    return true;
}

/* The lane that lane l reads from; l itself and false where that would be out of its segment.
 * c: bits 0 to 4 clamp, bits 8 to 12 which bits of the index tell segments apart. */
static bool source_lane(int code, int l, u32 b, u32 c, int *from) {
    const u32 segment = c >> 8 & 31, clamp = c & 31, low = (u32)l & segment;
    const int limit = (int)(low | (clamp & ~segment));
    int j;
    if (code == UP) j = l - (int)b;
    else if (code == DOWN) j = l + (int)b;
    else if (code == BFLY) j = l ^ (int)b;
    else j = (int)(low | (b & ~segment));
    const bool inside = code == UP ? j >= limit : j <= limit;
    *from = inside ? j : l;
    return inside;
}

void run_shfl(warp &w, const instruction &op, u32 lanes) {    // d, p, a, b, c, mask
    if (run_butterfly(w, op, lanes)) return;
    need_members(w, op.x[5], lanes, "shfl");
    const u32 *a = values<u32>(w, op.x[2]);
    u32 y[LANES];
    bool inside[LANES];
    for (const int l : on(lanes)) {
        int from;
        inside[l] = source_lane(op.code, l, get32(w, op.x[3], l) & 31, get32(w, op.x[4], l), &from);
        if (!(lanes >> from & 1)) fail("shfl from lane %d, which is elsewhere", from);
        y[l] = a[from];
    }
    for (const int l : on(lanes)) set(w, op.x[0], l, y[l]), set(w, op.x[1], l, inside[l]);
}

void run_vote(warp &w, const instruction &op, u32 lanes) {    // d, p, mask
    need_members(w, op.x[2], lanes, "vote");
    u32 ballot = 0;
    for (const int l : on(lanes)) ballot |= (u32)get_predicate(w, op.x[1], l) << l;
    u32 y = ballot;
    if (op.code == ANY) y = ballot != 0;
    else if (op.code == ALL) y = ballot == lanes;
    else if (op.code == UNI) y = ballot == 0 || ballot == lanes;
    for (const int l : on(lanes)) set(w, op.x[0], l, y);
}

/* match.any: the lanes that have the same value. */
void run_match(warp &w, const instruction &op, u32 lanes) {    // d, a, mask
    u32 same[LANES] = {};
    for (const int l : on(lanes)) {
        for (const int j : on(lanes))
            same[l] |= (u32)(get(w, op.x[1], j) == get(w, op.x[1], l)) << j;
    }
    for (const int l : on(lanes)) set(w, op.x[0], l, same[l]);
}

void run_redux(warp &w, const instruction &op, u32 lanes) {    // d, a, mask
    need_members(w, op.x[2], lanes, "redux");
    const int first = first_of(lanes);
    u64 y = get(w, op.x[1], first);
    for (const int l : on(lanes & (lanes - 1)))
        y = combine(op.code, op.t, y, get(w, op.x[1], l), 0);
    for (const int l : on(lanes)) set(w, op.x[0], l, y);
}

void run_elect(warp &w, const instruction &op, u32 lanes) {    // d, p, mask
    const int first = first_of(lanes);
    for (const int l : on(lanes)) set(w, op.x[0], l, (u64)first), set(w, op.x[1], l, l == first);
}

void run_activemask(warp &w, const instruction &op, u32 lanes) {    // d
    for (const int l : on(lanes)) set(w, op.x[0], l, lanes);
}

void run_warp_barrier(warp &w, const instruction &op, u32 lanes) {    // mask
    need_members(w, op.x[0], lanes, "bar.warp.sync");
}

}    // namespace ptx
