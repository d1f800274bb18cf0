/* bits.cpp - instructions on single bits and bytes. */
#include <algorithm>

#include "run/operations.h"
#include "run/registers.h"

namespace ptx {

void run_count(warp &w, const instruction &op, u32 lanes) {    // d, a
    const int bits = 8 * width(op.t);
    for (const int l : on(lanes)) {
        const u64 a = get(w, op.x[1], l);
        if (op.code == POPC) set(w, op.x[0], l, (u64)__builtin_popcountll(a));
        else set(w, op.x[0], l, (u64)(a == 0 ? bits : __builtin_clzll(a) - (64 - bits)));
    }
}

/* The highest bit that differs from the sign; all ones where there is none. .shiftamt: how far
 * it is from the top. */
void run_bfind(warp &w, const instruction &op, u32 lanes) {    // d, a
    const u32 bits = 8 * (u32)width(op.t);
    for (const int l : on(lanes)) {
        const s64 a = extend(get(w, op.x[1], l), op.t);
        u64 v = (u64)(is_signed(op.t) && a < 0 ? ~a : a);
        if (bits == 32) v = (u32)v;
        const u32 at = v ? 63 - (u32)__builtin_clzll(v) : 0;
        const u32 y = op.flags & F_SHIFTAMT ? bits - 1 - at : at;
        set(w, op.x[0], l, v ? y : ~0u);
    }
}

/* n bits of a into b, from bit `at` on. */
void run_bfi(warp &w, const instruction &op, u32 lanes) {    // d, a, b, at, n
    const u32 bits = 8 * (u32)width(op.t);
    for (const int l : on(lanes)) {
        const u64 a = get(w, op.x[1], l);
        const u32 at = get32(w, op.x[3], l) & 255, n = get32(w, op.x[4], l) & 255;
        u64 y = get(w, op.x[2], l);
        for (u32 i = 0; i < n && at + i < bits; i++)
            y = (y & ~(1ull << (at + i))) | (a >> i & 1) << (at + i);
        set(w, op.x[0], l, y);
    }
}

/* n bits of a from bit `at` on; above them the sign of the last where the type has one. */
void run_bfe(warp &w, const instruction &op, u32 lanes) {    // d, a, at, n
    const u32 bits = 8 * (u32)width(op.t);
    for (const int l : on(lanes)) {
        const u64 a = get(w, op.x[1], l);
        const u32 at = get32(w, op.x[2], l) & 255, n = get32(w, op.x[3], l) & 255;
        const u32 last = std::min(at + n, bits) - 1;
        const bool sign = is_signed(op.t) && n > 0 && (a >> last & 1);
        u64 y = 0;
        for (u32 i = 0; i < bits; i++) {
            const bool inside = i < n && at + i < bits;
            y |= (u64)(inside ? a >> (at + i) & 1 : sign) << i;
        }
        set(w, op.x[0], l, y);
    }
}

/* Each byte is one of the eight of b:a, by four bits of c: three say which, the fourth takes its
 * sign eight times. */
void run_prmt(warp &w, const instruction &op, u32 lanes) {    // d, a, b, c
    for (const int l : on(lanes)) {
        const u64 both = get(w, op.x[1], l) | get(w, op.x[2], l) << 32;
        const u32 c = get32(w, op.x[3], l);
        u32 y = 0;
        for (int i = 0; i < 4; i++) {
            const u32 choice = c >> 4 * i & 15;
            u8 byte = (u8)(both >> 8 * (choice & 7));
            if (choice & 8) byte = byte & 0x80 ? 0xff : 0;
            y |= (u32)byte << 8 * i;
        }
        set(w, op.x[0], l, y);
    }
}

/* Bit 4 a + 2 b + c of the table, for each bit. */
void run_lop3(warp &w, const instruction &op, u32 lanes) {    // d, a, b, c, table
    const u32 table = (u32)op.x[4].value;
    for (const int l : on(lanes)) {
        const u32 a = get32(w, op.x[1], l), b = get32(w, op.x[2], l), c = get32(w, op.x[3], l);
        u32 y = 0;
        for (int i = 0; i < 8; i++) {
            if (table >> i & 1) y |= (i & 4 ? a : ~a) & (i & 2 ? b : ~b) & (i & 1 ? c : ~c);
        }
        set(w, op.x[0], l, y);
    }
}

/* 32 bits of b:a, shifted as one; by n modulo 32 (.wrap) or 32 at most (.clamp). */
void run_funnel_shift(warp &w, const instruction &op, u32 lanes) {    // d, a, b, n
    for (const int l : on(lanes)) {
        const u64 v = get(w, op.x[1], l) | get(w, op.x[2], l) << 32;
        u32 n = get32(w, op.x[3], l);
        n = op.flags & F_WRAP ? n & 31 : std::min(n, 32u);
        set(w, op.x[0], l, op.code == RIGHT ? (u32)(v >> n) : (u32)(v << n >> 32));
    }
}

}    // namespace ptx
