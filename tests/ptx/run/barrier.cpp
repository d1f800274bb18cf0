/* barrier.cpp - bar.sync, bar.arrive, bar.red and barrier.cluster (PTX ISA: Parallel
 * Synchronization and Communication Instructions). A warp arrives as a whole, its lanes count as
 * 32 threads. */
#include "run/barrier.h"

#include "run/operations.h"
#include "run/registers.h"

namespace ptx {

static int threads_alive(const block &b) {
    int n = 0;
    for (const auto &w : b.warps) n += w->state == waits::ENDED ? 0 : LANES;
    return n;
}

/* Ends the barrier's generation if all have come. */
static void complete(block &b, barrier &bar) {
    const int expected = bar.expected ? bar.expected : threads_alive(b);
    if (bar.arrived > expected) fail("%d threads at a barrier of %d", bar.arrived, expected);
    if (bar.arrived == 0 || bar.arrived < expected) return;
    bar.last = bar.now, bar.now = barrier::votes();
    bar.arrived = bar.expected = 0;
    bar.generation++;
}

void leave_barriers(block &b) {
    for (barrier &bar : b.barriers) {
        if (bar.arrived && bar.expected == 0) complete(b, bar);
    }
}

/* Adds the warp to barrier `id` of `threads`, 0 for all of the block. */
static barrier &arrive(warp &w, u32 id, u32 threads, u32 lanes) {
    if (id >= BARRIERS) fail("barrier %u of %d", id, BARRIERS);
    if (threads % LANES) fail("a barrier of %u threads, which are no whole warps", threads);
    if (lanes != w.alive) fail("a barrier that lanes 0x%08x of 0x%08x reach", lanes, w.alive);
    barrier &bar = w.of->barriers[id];
    if (bar.arrived && bar.expected != (int)threads) {
        fail("a barrier of %u threads for some and of %d for others", threads, bar.expected);
    }
    bar.expected = (int)threads, bar.arrived += LANES;
    w.barrier = (int)id, w.generation = bar.generation;
    return bar;
}

static u32 optional(warp &w, const operand &x, int l) {
    return x.kind ? get32(w, x, l) : 0;
}

void run_bar(warp &w, const instruction &op, u32 lanes) {    // id, threads
    const int l = first_of(lanes);
    barrier &bar = arrive(w, optional(w, op.x[0], l), optional(w, op.x[1], l), lanes);
    complete(*w.of, bar);
    if (op.code == WAIT && !may_go_on(w)) w.state = waits::BARRIER;
}

/* The barrier's result is taken by the instruction behind this one, when all have come. */
void run_bar_red(warp &w, const instruction &op, u32 lanes) {    // id, threads, p
    const int first = first_of(lanes);
    barrier &bar = arrive(w, optional(w, op.x[0], first), optional(w, op.x[1], first), lanes);
    for (const int l : on(lanes)) {
        const bool p = get_predicate(w, op.x[2], l);
        bar.now.any |= p, bar.now.all &= p, bar.now.count += p;
    }
    complete(*w.of, bar);
    if (!may_go_on(w)) w.state = waits::BARRIER;
}

void run_bar_result(warp &w, const instruction &op, u32 lanes) {    // d
    const barrier::votes &of = w.of->barriers[w.barrier].last;
    const u64 y = op.code == OR ? of.any : op.code == AND ? of.all : (u64)of.count;
    for (const int l : on(lanes)) set(w, op.x[0], l, y);
}

static int warps_alive(const cluster &c) {
    int n = 0;
    for (const auto &b : c.blocks) n += threads_alive(*b) / LANES;
    return n;
}

void run_cluster_barrier(warp &w, const instruction &op, u32) {
    cluster &c = *w.of->of;
    if (op.code == WAIT) {
        if (c.generation == w.cluster_generation) w.state = waits::CLUSTER;
        return;
    }
    w.cluster_generation = c.generation;
    if (++c.arrived >= warps_alive(c)) c.arrived = 0, c.generation++;
}

}    // namespace ptx
