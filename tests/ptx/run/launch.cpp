/* launch.cpp - a launch from its first cluster to its last (ptx.h). */
#include <cstdio>
#include <cstdlib>

#include <cxxabi.h>

#include "run/memory.h"
#include "run/schedule.h"
#include "run/watch.h"

namespace ptx {

/* Clusters begin one after the other, each when those that began can do no more: when they have
 * ended, or have asked for another's progress so often. A cluster that waits for ever with
 * nobody to wait for is reported. */
constexpr u64 POLLS = 512;          // of a block, before other clusters get their turn
constexpr u64 PATIENCE = 200000;    // rounds in which no cluster ends

struct grid {
    ptx_kernel &kernel;
    const ptx_launch &launch;
    std::vector<std::unique_ptr<cluster>> open;
    u64 begun = 0, all;

    grid(ptx_kernel &k, const ptx_launch &l)
        : kernel(k), launch(l), all((u64)l.grid[0] * l.grid[1] * l.grid[2] /
                                    (l.cluster[0] * l.cluster[1] * l.cluster[2])) {
    }

    void begin() {
        open.push_back(open_cluster(kernel, launch, begun++));
    }
    bool round();
    void run();
};

/* The cluster's turns until it ends or polls too often. */
static bool advance(cluster &c) {
    const u64 polls = c.polls;
    outcome what;
    do what = take_turns(c);
    while (what == outcome::PROGRESS && c.polls - polls < POLLS * c.blocks.size());
    if (what == outcome::BLOCKED) fail("threads that wait for ever:%s", standing(c).c_str());
    return what == outcome::ENDED;
}

/* A turn for each open cluster; whether one ended. */
bool grid::round() {
    bool ended = false;
    for (size_t i = 0; i < open.size();) {
        if (!advance(*open[i])) {
            i++;
            continue;
        }
        close_cluster(*open[i]);
        open.erase(open.begin() + (std::ptrdiff_t)i);
        ended = true;
    }
    return ended;
}

void grid::run() {
    u64 idle = 0;
    while (begun < all || !open.empty()) {
        if (open.empty()) begin();
        const bool ended = round();
        idle = ended ? 0 : idle + 1;
        if (!ended && begun < all && open.size() < PTX_PROCESSORS) begin();
        if (idle <= PATIENCE) continue;
        std::string all_standing;
        for (const auto &c : open) all_standing += standing(*c);
        fail("threads that ask for ever:%s", all_standing.c_str());
    }
}

static int number_of(const char *variable) {
    const char *said = getenv(variable);
    return said ? atoi(said) : 0;
}

static void choose() {
    static const bool once = [] {
        chosen.late = number_of("PTX_LATE") != 0;
        chosen.seed = (u32)number_of("PTX_SEED");
        chosen.shuffled = chosen.seed != 0;
        choose_watched();
        ptx_memory_add(grid_barrier, sizeof grid_barrier);
        return true;
    }();
    (void)once;
}

static void report(const char *kernel, const failure &f) {
    int status = 0;
    char *name = abi::__cxa_demangle(kernel, nullptr, nullptr, &status);
    fprintf(stderr, "ptx: %s: %s\n", name ? name : kernel, f.what.c_str());
    if (!f.where.empty()) fprintf(stderr, "  %s\n", f.where.c_str());
    free(name);
}

static void run(ptx_kernel &k, const ptx_launch &launch) {
    constexpr size_t ALIGNMENT = 128;    // of a CUtensorMap
    prepare(k);
    memset(grid_barrier, 0, sizeof grid_barrier);
    std::vector<u8> bytes(k.param_bytes + ALIGNMENT);
    parameters = aligned(bytes, ALIGNMENT);
    parameter_bytes = k.param_bytes;
    for (size_t i = 0; i < k.param_at.size(); i++) {
        memcpy(parameters + k.param_at[i], launch.args[i], k.of->params[i].bytes);
    }
    grid g(k, launch);
    try {
        g.run();
    } catch (failure &f) {    // while the warps are there
        f.where = last_executed();
        throw;
    }
}

}    // namespace ptx

extern "C" int ptx_run(ptx_kernel *kernel, const ptx_launch *launch) {
    ptx::choose();
    try {
        ptx::run(*kernel, *launch);
        return 0;
    } catch (const ptx::failure &f) {
        ptx::report(kernel->of->name.c_str(), f);
        return 1;
    }
}
