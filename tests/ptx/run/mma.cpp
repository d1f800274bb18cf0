/* mma.cpp - products of a warp: mma.sync and wmma. D = A B + C with A (M, K), B (K, N) and N =
 * 8.
 *
 * Sums are taken in double and rounded once: tensor cores round, or cut, after every few
 * products. */
#include "run/matrix.h"
#include "run/operations.h"

namespace ptx {

/* Registers of float64: A of 8 x 4 is element (g, t), larger ones (g + 8 (i % 2), t + 4 (i /
 * 2)); B is (t + 4 i, g); C and D are accumulators. */
static void run_mma_f64(warp &w, const instruction &op) {
    const auto &s = op.shape;
    double a[16][16], b[16][8];
    for (int l = 0; l < LANES; l++) {
        const int g = l / 4, t = l % 4;
        for (int i = 0; i < s.m * s.k / LANES; i++) {
            const int row = s.m == 8 ? g : g + 8 * (i % 2), k = s.m == 8 ? t : t + 4 * (i / 2);
            a[row][k] = double_of(get(w, op.x[1].part((size_t)i), l));
        }
        for (int i = 0; i < s.k / 4; i++)
            b[t + 4 * i][g] = double_of(get(w, op.x[2].part((size_t)i), l));
    }
    for (int l = 0; l < LANES; l++) {
        for (int i = 0; i < s.m / 4; i++) {
            const element at = accumulator_element(l, i);
            double sum = double_of(get(w, op.x[3].part((size_t)i), l));
            for (int k = 0; k < s.k; k++) sum = std::fma(a[at.row][k], b[k][at.column], sum);
            set(w, op.x[0].part((size_t)i), l, bits_of(canonical(sum)));
        }
    }
}

/* tf32: A is element (g + 8 (i % 2), t + 4 (i / 2)), B is (t + 4 i, g). */
static void take_tf32(warp &w, const instruction &op, float a[16][16], float b[16][8]) {
    const auto &s = op.shape;
    for (int l = 0; l < LANES; l++) {
        const int g = l / 4, t = l % 4;
        for (int i = 0; i < s.k / 2; i++) {
            a[g + 8 * (i % 2)][t + 4 * (i / 2)] = tf32_value(get32(w, op.x[1].part((size_t)i), l));
        }
        for (int i = 0; i < s.k / 4; i++)
            b[t + 4 * i][g] = tf32_value(get32(w, op.x[2].part((size_t)i), l));
    }
}

/* 16 bits: two elements a register, of A along a row, of B (2t + 8 i and the next, g) along a
 * column. */
static void take_16(warp &w, const instruction &op, float a[16][16], float b[16][8]) {
    const auto &s = op.shape;
    for (int l = 0; l < LANES; l++) {
        const int g = l / 4, t = l % 4;
        for (int i = 0; i < s.k / 4; i++) {
            const u32 v = get32(w, op.x[1].part((size_t)i), l);
            const element at = operand_element(l, i);
            a[at.row][at.column] = value16(op.source, v),
            a[at.row][at.column + 1] = value16(op.source, v >> 16);
        }
        for (int i = 0; i < s.k / 8; i++) {
            const u32 v = get32(w, op.x[2].part((size_t)i), l);
            b[2 * t + 8 * i][g] = value16(op.source, v),
                          b[2 * t + 8 * i + 1][g] = value16(op.source, v >> 16);
        }
    }
}

void run_mma(warp &w, const instruction &op,
             u32 lanes) {    // D, A, B, C; source: the type of A and B
    need_warp(lanes, "mma");
    if (op.t == T_F64) return run_mma_f64(w, op);
    float a[16][16], b[16][8];
    if (op.source == T_TF32) take_tf32(w, op, a, b);
    else take_16(w, op, a, b);
    const int depth = op.shape.k;
    for (int l = 0; l < LANES; l++) {
        for (int i = 0; i < 4; i++) {
            const element at = accumulator_element(l, i);
            double sum = float_of(get32(w, op.x[3].part((size_t)i), l));
            for (int k = 0; k < depth; k++) sum += (double)a[at.row][k] * b[k][at.column];
            set(w, op.x[0].part((size_t)i), l, bits_of(canonical((float)sum)));
        }
    }
}

/* The ISA leaves fragments of wmma open. Here lane l has eight elements of a 16 x 16 matrix: row
 * l / 2, columns from 8 (l % 2) on; those of 16 bits two a register. */
static element wmma_element(int l, int i) {
    return { l / 2, l % 2 * 8 + i };
}

static u64 wmma_address(const instruction &op, u64 base, u32 stride, element at, u32 bytes) {
    const bool columns = op.flags & F_COLUMNS;
    const u64 major = (u64)(columns ? at.column : at.row),
              minor = (u64)(columns ? at.row : at.column);
    return base + (major * stride + minor) * bytes;
}

static u16 half_of(warp &w, const operand &x, int l, int i) {
    return (u16)(get32(w, x.list[(size_t)i / 2], l) >> 16 * (i % 2));
}

static void put_half(warp &w, const operand &x, int l, int i, u32 v) {
    const operand &d = x.list[(size_t)i / 2];
    const u32 before = get32(w, d, l);
    set(w, d, l, i % 2 ? (before & 0xffff) | v << 16 : v);
}

void run_wmma_load(warp &w, const instruction &op,
                   u32 lanes) {    // {d...}, [a], stride; code: which matrix
    need_warp(lanes, "wmma.load");
    const u64 base = address(w, op.x[1], 0);
    const u32 stride = get32(w, op.x[2], 0), bytes = op.code == ACCUMULATOR ? 4 : 2;
    for (int l = 0; l < LANES; l++) {
        for (int i = 0; i < 8; i++) {
            const u64 at = wmma_address(op, base, stride, wmma_element(l, i), bytes);
            u32 v = 0;
            memcpy(&v, place(w, op, op.in, at, 0, bytes), bytes);
            if (op.code == ACCUMULATOR) set(w, op.x[0].list[(size_t)i], l, v);
            else put_half(w, op.x[0], l, i, v);
        }
    }
}

void run_wmma_store(warp &w, const instruction &op, u32 lanes) {    // [a], {b...}, stride
    need_warp(lanes, "wmma.store");
    const u64 base = address(w, op.x[0], 0);
    const u32 stride = get32(w, op.x[2], 0);
    for (int l = 0; l < LANES; l++) {
        for (int i = 0; i < 8; i++) {
            const u64 at = wmma_address(op, base, stride, wmma_element(l, i), 4);
            store_as(place(w, op, op.in, at, 0, 4), get32(w, op.x[1].list[(size_t)i], l));
        }
    }
}

void run_wmma(warp &w, const instruction &op,
              u32 lanes) {    // D, A, B, C of 16 x 16, bf16 and float
    need_warp(lanes, "wmma.mma");
    float a[16][16], b[16][16];
    for (int l = 0; l < LANES; l++) {
        for (int i = 0; i < 8; i++) {
            const element at = wmma_element(l, i);
            a[at.row][at.column] = bf16_value(half_of(w, op.x[1], l, i));
            b[at.row][at.column] = bf16_value(half_of(w, op.x[2], l, i));
        }
    }
    for (int l = 0; l < LANES; l++) {
        for (int i = 0; i < 8; i++) {
            const element at = wmma_element(l, i);
            double sum = float_of(get32(w, op.x[3].list[(size_t)i], l));
            for (int k = 0; k < 16; k++) sum += (double)a[at.row][k] * b[k][at.column];
            set(w, op.x[0].list[(size_t)i], l, bits_of(canonical((float)sum)));
        }
    }
}

}    // namespace ptx
