/* mbarrier.cpp - mbarrier objects (PTX ISA: mbarrier). 64 bits of shared memory, whose layout
 * the ISA leaves open:
 *
 *   63 phase | 62..43 pending arrivals | 42..23 arrivals a phase | 22..0 transaction bytes, signed
 *
 * A phase ends when no arrival is pending and the bytes that completed are those that were
 * expected. */
#include "run/barrier.h"
#include "run/operations.h"
#include "run/registers.h"

namespace ptx {

struct mbarrier {
    u32 phase;
    s64 pending, expected, bytes;
};

static mbarrier unpacked(u64 x) {
    return { (u32)(x >> 63), (s64)(x >> 43 & 0xfffff), (s64)(x >> 23 & 0xfffff),
             (s64)(x << 41) >> 41 };
}

static u64 packed(const mbarrier &b) {
    return (u64)b.phase << 63 | (u64)b.pending << 43 | (u64)b.expected << 23 |
           ((u64)b.bytes & 0x7fffff);
}

static mbarrier read_mbarrier(const u8 *at) {
    const mbarrier b = unpacked(load_as<u64>(at));
    if (b.expected == 0) fail("an mbarrier that is not initialised");
    return b;
}

void change_mbarrier(u8 *at, s64 arrivals, s64 expected_bytes, s64 completed_bytes) {
    mbarrier b = read_mbarrier(at);
    if (arrivals > b.pending) {
        fail("mbarrier: %lld arrivals of %lld pending", (long long)arrivals, (long long)b.pending);
    }
    b.bytes += expected_bytes - completed_bytes;
    b.pending -= arrivals;
    if (b.pending == 0 && b.bytes < 0) fail("mbarrier: more bytes than expected");
    if (b.pending == 0 && b.bytes == 0) b.phase ^= 1, b.pending = b.expected;
    store_as(at, packed(b));
}

void run_mbarrier_init(warp &w, const instruction &op, u32 lanes) {    // [a], arrivals
    for (const int l : on(lanes)) {
        const s64 n = get32(w, op.x[1], l);
        if (n <= 0 || n > 0xfffff) fail("mbarrier of %lld arrivals", (long long)n);
        store_as(shared_operand(w, op.x[0], l, 8), packed({ 0, n, n, 0 }));
    }
}

void run_mbarrier_inval(warp &w, const instruction &op, u32 lanes) {    // [a]
    for (const int l : on(lanes)) store_as(shared_operand(w, op.x[0], l, 8), (u64)0);
}

void run_mbarrier_arrive(warp &w, const instruction &op,
                         u32 lanes) {    // state, [a], count or bytes
    for (const int l : on(lanes)) {
        u8 *at = shared_operand(w, op.x[1], l, 8);
        const u64 before = load_as<u64>(at);
        const s64 n = op.x[2].kind ? (s64)get32(w, op.x[2], l) : 1;
        switch (op.code) {
        case ARRIVES: change_mbarrier(at, n, 0, 0); break;
        case ARRIVES_EXPECTING: change_mbarrier(at, 1, n, 0); break;
        case EXPECTS: change_mbarrier(at, 0, n, 0); break;
        default: change_mbarrier(at, 0, 0, n);
        }
        set(w, op.x[0], l, before);
    }
}

/* try_wait blocks the warp until the phase is over: nothing else makes it poll more often. */
void run_mbarrier_wait(warp &w, const instruction &op, u32 lanes) {    // p, [a], parity or state
    for (const int l : on(lanes)) {
        const u8 *at = shared_operand(w, op.x[1], l, 8);
        const u64 asked = get(w, op.x[2], l);
        const u32 parity = (u32)(op.flags & F_PARITY ? asked & 1 : asked >> 63);
        const bool over = read_mbarrier(at).phase != parity;
        if (!over && op.code == TRY) {
            w.state = waits::MBARRIER, w.mbarrier = at, w.parity = parity;
            w.mbarrier_at = shared_offset(address(w, op.x[1], l)) - SHARED_FIRST;
            w.paths.back().pc--;    // once more then
            return;
        }
        set(w, op.x[0], l, over);
    }
    if (op.code == TEST) w.yields = true;
}

bool may_go_on(const warp &w) {
    switch (w.state) {
    case waits::MBARRIER: return unpacked(load_as<u64>(w.mbarrier)).phase != w.parity;
    case waits::CLUSTER: return w.of->of->generation != w.cluster_generation;
    default: return w.of->barriers[w.barrier].generation != w.generation;
    }
}

std::string waiting_for(const warp &w) {
    if (w.state == waits::CLUSTER) return ", waits for its cluster";
    if (w.state == waits::BARRIER) {
        const barrier &b = w.of->barriers[w.barrier];
        const std::string all = b.expected ? std::to_string(b.expected) : "all";
        return sentence(", waits at barrier %d (%d of %s)", w.barrier, b.arrived, all.c_str());
    }
    if (w.state != waits::MBARRIER) return "";
    const mbarrier b = unpacked(load_as<u64>(w.mbarrier));
    return sentence(
        ", waits for parity %u of the mbarrier at %u (phase %u, %lld of %lld pending, %lld bytes)",
        w.parity, w.mbarrier_at, b.phase, (long long)b.pending, (long long)b.expected,
        (long long)b.bytes);
}

}    // namespace ptx
