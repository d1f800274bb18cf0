/* state.h - what a launch has in flight: clusters of blocks of warps. */
#ifndef PTX_STATE_H
#define PTX_STATE_H

#include <functional>
#include <map>
#include <memory>
#include <utility>
#include <vector>

#include "code.h"

namespace ptx {

struct block;
struct cluster;

/* Something asynchronous that has been asked for and not done yet. */
struct deferred {
    warp *by;
    const instruction *op;
    std::function<void()> work;

    void run() const;    // a failure is reported at op
};

/* Groups of asynchronous operations: what is open joins a group at commit, and a wait for all
 * but n groups does the oldest. */
struct deferred_groups {
    std::vector<deferred> open;
    std::vector<std::vector<deferred>> groups;

    void commit();
    void wait(size_t all_but);
    void finish();
};

/* A part of a warp's lanes on its way to `meet`, where the entry below goes on. */
struct path {
    int pc, meet;
    u32 mask;
};

enum class waits : u8 { NOTHING, MBARRIER, BARRIER, CLUSTER, ENDED };

struct warp {
    block *of = nullptr;
    ptx_kernel *kernel = nullptr;
    int index = 0;
    u32 alive = 0;
    std::vector<u8> register_bytes, local;
    u8 *registers = nullptr;
    std::vector<path> paths;         // the last is the one that runs
    std::map<int, int> return_to;    // by function

    waits state = waits::NOTHING;
    const u8 *mbarrier = nullptr;
    u32 mbarrier_at = 0, parity = 0;
    int barrier = 0;
    int registers_held = 0;    // by setmaxnreg; 0: as launched
    u32 generation = 0, cluster_generation = 0;    // of the barrier when it arrived
    bool yields = false;
    u8 carry[LANES] = {};    // CC.CF of add.cc and its like
    u64 executed = 0;

    deferred_groups products, copies[LANES], bulk[LANES];
};

/* A barrier of a block (bar.sync, barrier.red): a generation ends when all that are expected
 * have come. */
struct barrier {
    int arrived = 0, expected = 0;    // expected 0: all threads
    u32 generation = 0;
    struct votes {
        bool any = false, all = true;
        int count = 0;
    } now, last;
};

constexpr int BARRIERS = 16;

struct block {
    const ptx_launch *launch = nullptr;
    cluster *of = nullptr;
    u32 id[3] = {}, rank = 0;    // in the grid; in its cluster
    std::vector<u8> shared_bytes;
    u8 *shared = nullptr;
    u32 shared_end = 0;
    std::vector<std::unique_ptr<warp>> warps;
    barrier barriers[BARRIERS];
};

struct cluster {
    std::vector<std::unique_ptr<block>> blocks;
    int arrived = 0;
    u32 generation = 0;
    u64 polls = 0;    // loads and atomics that may wait for another block
    std::vector<deferred> in_flight;
};

/* PTX_LATE and PTX_SEED. */
struct choices {
    bool late = false;        // asynchronous work is done as late as it may be
    bool shuffled = false;    // the order and the length of turns are drawn
    u32 seed = 0;
};
extern choices chosen;
u32 draw();    // pseudo-random, of 24 bits

/* Does work now, or adds it to what is open. */
template <class F> void defer(deferred_groups &to, warp &w, const instruction &op, F work) {
    if (chosen.late) to.open.push_back({ &w, &op, std::move(work) });
    else work();
}

/* Does work now, or some time before the cluster could not go on without it. */
template <class F> void defer_to_mbarrier(warp &w, const instruction &op, F work) {
    if (chosen.late) w.of->of->in_flight.push_back({ &w, &op, std::move(work) });
    else work();
}

}    // namespace ptx
#endif
