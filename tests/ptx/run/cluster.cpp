/* cluster.cpp - blocks that are launched together, and the turns of their warps. */
#include <algorithm>

#include "run/barrier.h"
#include "run/memory.h"
#include "run/schedule.h"

namespace ptx {

constexpr size_t REGISTER_ALIGNMENT = 256, SHARED_ALIGNMENT = 1024;
constexpr int TURN = 1000;    // instructions
/* What registers and memory hold before anybody writes: floats of all ones are NaN; predicates
 * must be 0 or 1. */
constexpr u8 UNWRITTEN = 0xff, UNWRITTEN_REGISTER = 0x01;

choices chosen;

u32 draw() {
    chosen.seed = chosen.seed * 1664525u + 1013904223u;
    return chosen.seed >> 8;
}

/* Register files of warps that have ended, to be used again. */
static std::vector<std::vector<u8>> &spare_registers() {
    static std::vector<std::vector<u8>> *const all = new std::vector<std::vector<u8>>;
    return *all;
}

static std::unique_ptr<warp> open_warp(block &b, ptx_kernel &k, u32 first_thread, u32 threads) {
    auto w = std::make_unique<warp>();
    const u32 left = threads - first_thread;
    w->of = &b, w->kernel = &k, w->index = (int)(first_thread / LANES);
    w->alive = left >= (u32)LANES ? FULL : (1u << left) - 1;
    w->paths.push_back({ k.entry, -1, w->alive });
    auto &spare = spare_registers();
    if (!spare.empty()) {
        w->register_bytes = std::move(spare.back());
        spare.pop_back();
    }
    w->register_bytes.assign(k.register_bytes + REGISTER_ALIGNMENT, UNWRITTEN_REGISTER);
    w->registers = aligned(w->register_bytes, REGISTER_ALIGNMENT);
    w->local.assign((size_t)k.local_bytes * LANES, UNWRITTEN);
    return w;
}

/* Shared memory: what is static, then what is dynamic. Offset 0 is never used (memory.h). */
static void open_shared(block &b, const ptx_kernel &k) {
    b.shared_end = k.static_end;
    if (b.launch->shared) {
        b.shared_end = (u32)(rounded_up(k.static_end, k.dynamic_align) + b.launch->shared);
    }
    b.shared_bytes.assign(b.shared_end + SHARED_ALIGNMENT, UNWRITTEN);
    b.shared = aligned(b.shared_bytes, SHARED_ALIGNMENT);
}

/* Clusters are numbered along x, then y, then z; so are the blocks of one, by their rank. */
std::unique_ptr<cluster> open_cluster(ptx_kernel &k, const ptx_launch &launch, u64 index) {
    auto c = std::make_unique<cluster>();
    const unsigned *size = launch.cluster, *n = launch.block;
    const u64 gx = launch.grid[0] / size[0], gy = launch.grid[1] / size[1];
    const u32 first[3] = { (u32)(index % gx) * size[0], (u32)(index / gx % gy) * size[1],
                           (u32)(index / gx / gy) * size[2] };
    const u32 threads = n[0] * n[1] * n[2];
    for (u32 r = 0; r < size[0] * size[1] * size[2]; r++) {
        auto b = std::make_unique<block>();
        b->launch = &launch, b->of = c.get(), b->rank = r;
        b->id[0] = first[0] + r % size[0];
        b->id[1] = first[1] + r / size[0] % size[1];
        b->id[2] = first[2] + r / size[0] / size[1];
        open_shared(*b, k);
        for (u32 t = 0; t < threads; t += LANES) b->warps.push_back(open_warp(*b, k, t, threads));
        c->blocks.push_back(std::move(b));
    }
    return c;
}

void close_cluster(cluster &c) {
    for (const deferred &d : c.in_flight) d.run();
    for (auto &b : c.blocks) {
        for (auto &w : b->warps) {
            w->products.finish();
            for (int l = 0; l < LANES; l++) w->copies[l].finish(), w->bulk[l].finish();
            spare_registers().push_back(std::move(w->register_bytes));
        }
    }
}

/* One of the copies in flight, which may be any: they have no order among themselves. */
static void land_one(cluster &c) {
    const size_t i = draw() % c.in_flight.size();
    const deferred d = std::move(c.in_flight[i]);
    c.in_flight.erase(c.in_flight.begin() + (std::ptrdiff_t)i);
    d.run();
}

/* Whether the warp did anything. */
static bool take_turn(warp &w) {
    if (w.state == waits::ENDED) return false;
    if (w.state != waits::NOTHING && may_go_on(w)) w.state = waits::NOTHING;
    if (w.state != waits::NOTHING) return false;
    const u64 before = w.executed;
    run_warp(w, chosen.shuffled ? 1 + (int)(draw() % 400) : TURN);
    return w.executed != before || w.state == waits::ENDED;
}

static bool has_ended(const block &b) {
    return std::all_of(b.warps.begin(), b.warps.end(),
                       [](const auto &w) { return w->state == waits::ENDED; });
}

outcome take_turns(cluster &c) {
    bool progress = false, ended = true;
    for (auto &b : c.blocks) {
        const size_t n = b->warps.size(), first = chosen.shuffled ? draw() % n : 0;
        ended = ended && has_ended(*b);
        for (size_t i = 0; i < n; i++) progress |= take_turn(*b->warps[(i + first) % n]);
    }
    if (ended) return outcome::ENDED;
    if (!c.in_flight.empty() && (!progress || draw() % 8 == 0)) {
        land_one(c);
        progress = true;
    }
    return progress ? outcome::PROGRESS : outcome::BLOCKED;
}

}    // namespace ptx
