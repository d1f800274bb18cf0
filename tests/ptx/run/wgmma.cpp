/* wgmma.cpp - products of a warp group: wgmma.mma_async of bf16:
 * D (64, N) = A (64, 16) B (16, N) + D.
 *
 * Warp i of the group has rows 16 i to 16 i + 15 of A and D, as fragments of matrix.h. A matrix
 * in shared memory is told of by a descriptor (PTX ISA: Matrix Descriptor Format), whose
 * addresses and offsets are in 16 bytes:
 *
 *   13..0 start | 29..16 leading offset L | 45..32 stride offset S |
 *   63..62 swizzle: none, 128, 64, 32 bytes
 *
 * Where an element lies, with n its row (of A) or column (of B), k its depth, before swizzling,
 * in bytes from start:
 *
 *   K-major, swizzle of W bytes    (n % 8) W + (n / 8) S + 2 k
 *   K-major, none                  (n % 8) 16 + (n / 8) S + (k / 8) L + 2 (k % 8)
 *   MN-major, swizzle of W bytes   2 (n % (W/2)) + (n / (W/2)) L + (k % 8) W + (k / 8) S
 *   MN-major, none                 2 (n % 8) + (n / 8) S + (k % 8) 16 + (k / 8) L */
#include "run/matrix.h"
#include "run/swizzle.h"

namespace ptx {

constexpr int DEPTH = 16, ROWS = 16;    // of a warp

struct descriptor {
    u32 start, leading, stride, swizzle;

    explicit descriptor(u64 bits) {
        static const u32 spans[] = { 0, 128, 64, 32 };
        start = (u32)(bits & 0x3fff) << 4;
        leading = (u32)(bits >> 16 & 0x3fff) << 4;
        stride = (u32)(bits >> 32 & 0x3fff) << 4;
        swizzle = spans[bits >> 62];
    }

    u32 k_major(u32 n, u32 k) const {
        if (swizzle) return n % 8 * swizzle + n / 8 * stride + k * 2;
        return n % 8 * 16 + n / 8 * stride + k / 8 * leading + k % 8 * 2;
    }

    u32 mn_major(u32 n, u32 k) const {
        const u32 units = swizzle / 2;
        if (swizzle) return n % units * 2 + n / units * leading + k % 8 * swizzle + k / 8 * stride;
        return n % 8 * 2 + n / 8 * stride + k % 8 * 16 + k / 8 * leading;
    }

    float value(const block &b, bool transposed, u32 n, u32 k) const {
        const u32 at = swizzled(start + (transposed ? mn_major(n, k) : k_major(n, k)), swizzle);
        return bf16_value(load_as<u16>(shared_at(b, shared_address(b, at), 2)));
    }
};

typedef float rows_of_a[ROWS][DEPTH];

static void take_fragment(warp &w, const operand &x, rows_of_a &a) {
    for (int l = 0; l < LANES; l++) {
        for (int i = 0; i < 4; i++) {
            const u32 v = get32(w, x.list[(size_t)i], l);
            const element at = operand_element(l, i);
            a[at.row][at.column] = bf16_value((u16)v),
            a[at.row][at.column + 1] = bf16_value((u16)(v >> 16));
        }
    }
}

/* One warp's part of a product. A in registers is taken when the instruction is issued, all else
 * when it happens. */
struct product {
    warp &w;
    const instruction &op;
    bool from_registers, keeps, transposed_a, transposed_b;
    descriptor da, db;
    float scale;
    rows_of_a a;

    product(warp &of, const instruction &by);
    void run();
};

/* x: D, A, B, keep D, signs of A and B, is A transposed (where it is in memory), is B transposed */
product::product(warp &of, const instruction &by)
    : w(of), op(by), from_registers(by.x[1].kind == operand::LIST), da(0), db(get(of, by.x[2], 0)) {
    const operand &keep = op.x[3];
    keeps = keep.kind == operand::IMMEDIATE ? keep.value != 0 : get_predicate(w, keep, 0);
    transposed_a = !from_registers && op.x[6].value != 0;
    transposed_b = op.x[from_registers ? 6 : 7].value != 0;
    scale = (float)(op.x[4].value * op.x[5].value);
    if (from_registers) take_fragment(w, op.x[1], a);
    else da = descriptor(get(w, op.x[1], 0));
    for (int l = 1; l < LANES; l++) {
        if (get(w, op.x[2], l) != get(w, op.x[2], 0)) fail("wgmma: descriptors differ in a warp");
    }
}

void product::run() {
    const block &group = *w.of;
    const int columns = op.shape.n, row0 = w.index % 4 * ROWS;
    if (!from_registers) {
        for (int r = 0; r < ROWS; r++) {
            for (int k = 0; k < DEPTH; k++)
                a[r][k] = da.value(group, transposed_a, (u32)(row0 + r), (u32)k);
        }
    }
    std::vector<float> b((size_t)(DEPTH * columns));
    for (int k = 0; k < DEPTH; k++) {
        for (int n = 0; n < columns; n++) {
            b[(size_t)(k * columns + n)] = db.value(group, transposed_b, (u32)n, (u32)k);
        }
    }
    std::vector<double> sums((size_t)columns);
    for (int r = 0; r < ROWS; r++) {
        std::fill(sums.begin(), sums.end(), 0.0);
        for (int k = 0; k < DEPTH; k++) {
            const float *row = &b[(size_t)(k * columns)];
            for (int n = 0; n < columns; n++) sums[(size_t)n] += (double)a[r][k] * row[n];
        }
        for (int n = 0; n < columns; n++) {    // accumulator_element, solved for lane and register
            const int l = r % 8 * 4 + n % 8 / 2, i = n / 8 * 4 + r / 8 * 2 + n % 2;
            const operand &d = op.x[0].list[(size_t)i];
            const double before = keeps ? float_of(get32(w, d, l)) : 0;
            set(w, d, l, bits_of(canonical((float)(before + scale * sums[(size_t)n]))));
        }
    }
}

void run_wgmma(warp &w, const instruction &op, u32 lanes) {
    need_warp(lanes, "wgmma");
    product p(w, op);
    defer(w.products, w, op, [p]() mutable { p.run(); });
}

void run_wgmma_commit(warp &w, const instruction &, u32) {
    w.products.commit();
}

void run_wgmma_wait(warp &w, const instruction &op, u32) {    // all but so many
    w.products.wait((size_t)op.x[0].value);
}

}    // namespace ptx
