/* matrix_move.cpp - ldmatrix, stmatrix, movmatrix: tiles of 8 x 8 elements of 16 bits. */
#include "run/matrix.h"

namespace ptx {

typedef u16 tile[8][8];

/* The two elements of lane l; of the transposed tile with .trans. */
static u32 pair_of(const tile &x, int l, bool transposed) {
    const int r = l / 4, c = l % 4 * 2;
    if (transposed) return x[c][r] | (u32)x[c + 1][r] << 16;
    return x[r][c] | (u32)x[r][c + 1] << 16;
}

static void put_pair(tile &x, int l, bool transposed, u32 pair) {
    const int r = l / 4, c = l % 4 * 2;
    (transposed ? x[c][r] : x[r][c]) = (u16)pair;
    (transposed ? x[c + 1][r] : x[r][c + 1]) = (u16)(pair >> 16);
}

/* Row r of matrix i is at the address of lane 8 i + r. */
static u8 *row_address(warp &w, const operand &x, int i, int r) {
    const u64 at = address(w, x, 8 * i + r);
    check_alignment(at, 16);
    return shared_at(*w.of, at, 16);
}

void run_ldmatrix(warp &w, const instruction &op, u32 lanes) {    // {d...}, [a]
    need_warp(lanes, "ldmatrix");
    tile tiles[4];
    for (int i = 0; i < op.count; i++) {
        for (int r = 0; r < 8; r++) memcpy(tiles[i][r], row_address(w, op.x[1], i, r), 16);
    }
    for (int i = 0; i < op.count; i++) {
        const operand &d = op.x[0].part((size_t)i);
        for (int l = 0; l < LANES; l++) set(w, d, l, pair_of(tiles[i], l, op.flags & F_TRANS));
    }
}

void run_stmatrix(warp &w, const instruction &op, u32 lanes) {    // [a], {b...}
    need_warp(lanes, "stmatrix");
    for (int i = 0; i < op.count; i++) {
        tile x;
        const operand &b = op.x[1].part((size_t)i);
        for (int l = 0; l < LANES; l++) put_pair(x, l, op.flags & F_TRANS, get32(w, b, l));
        for (int r = 0; r < 8; r++) memcpy(row_address(w, op.x[0], i, r), x[r], 16);
    }
}

/* The transposed tile, from registers to registers. */
void run_movmatrix(warp &w, const instruction &op, u32 lanes) {    // d, a
    need_warp(lanes, "movmatrix");
    tile x;
    for (int l = 0; l < LANES; l++) put_pair(x, l, false, get32(w, op.x[1], l));
    for (int l = 0; l < LANES; l++) set(w, op.x[0], l, pair_of(x, l, true));
}

}    // namespace ptx
