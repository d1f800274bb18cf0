/* control.cpp - the instructions of a warp, one after the other, on one path at a time.
 *
 * A branch that some lanes take ends the path at the branch's immediate post-dominator, `meet`,
 * and lays two paths over it: the lanes that stay and, first to run, those that jump. A path
 * that arrives at its `meet` is taken off, and the path below goes on with all of its lanes. */
#include "run/barrier.h"
#include "run/operations.h"
#include "run/registers.h"
#include "run/schedule.h"
#include "run/watch.h"

namespace ptx {

static const warp *current_warp;
static const instruction *current;

void deferred::run() const {
    const warp *const warp_before = current_warp;
    const instruction *const before = current;
    current_warp = by, current = op;
    work();
    current_warp = warp_before, current = before;
}

/* Lanes end. */
static void leave(warp &w, u32 lanes) {
    w.alive &= ~lanes;
    for (path &p : w.paths) p.mask &= ~lanes;
    while (!w.paths.empty() && w.paths.back().mask == 0) w.paths.pop_back();
    if (w.alive) return;
    w.state = waits::ENDED;
    leave_barriers(*w.of);
}

/* Predicates are bytes of 0 or 1: the product collects eight of them in its upper byte. */
static u32 lanes_where(const u8 *predicate) {
    u32 mask = 0;
    for (int i = 0; i < 4; i++) {
        mask |= (u32)(load_as<u64>(predicate + 8 * i) * 0x0102040810204080ull >> 56) << 8 * i;
    }
    return mask;
}

static void branch(warp &w, const instruction &op, u32 taken) {
    path &here = w.paths.back();
    const u32 stays = here.mask & ~taken;
    const int next = here.pc + 1, meet = op.meet, target = op.target;
    if (!stays || !taken) {
        here.pc = taken ? target : next;
        return;
    }
    if (here.meet == meet) w.paths.pop_back();
    else here.pc = meet;
    if (next != meet) w.paths.push_back({ next, meet, stays });
    if (target != meet) w.paths.push_back({ target, meet, taken });
}

/* A function has one place to return to: all lanes of the path call it, and none calls it again
 * before. */
static void call(warp &w, const instruction &op, u32 lanes) {
    path &here = w.paths.back();
    if (lanes != here.mask) fail("a call of some lanes of a path");
    if (!w.return_to.emplace(op.target, here.pc + 1).second) fail("a function that calls itself");
    here.pc = op.target;
}

static void come_back(warp &w, const instruction &op, u32 lanes) {
    if (op.target == w.kernel->entry) return leave(w, lanes);
    const auto found = w.return_to.find(op.target);
    w.paths.back().pc = found->second;
    w.return_to.erase(found);
}

void run_branch(warp &w, const instruction &op, u32 lanes) {
    branch(w, op, lanes);
}

void run_call(warp &w, const instruction &op, u32 lanes) {
    call(w, op, lanes);
}

void run_return(warp &w, const instruction &op, u32 lanes) {
    come_back(w, op, lanes);
}

void run_nothing(warp &, const instruction &, u32) {
}

/* A thread's registers: the launch shares a processor's among the threads that the kernel's bounds
 * allow, in eights. To raise them by .dec, or lower them by .inc, is an illegal instruction. */
void run_setmaxnreg(warp &w, const instruction &op, u32) {
    const function &of = *w.kernel->of;
    const int launched = 65536 / (of.max_threads * of.min_blocks) / 8 * 8;
    const int held = w.registers_held ? w.registers_held : launched, to = (int)op.x[0].value;
    if (op.code == INC ? to < held : to > held) {
        fail("setmaxnreg.%s of %d registers to %d", op.code == INC ? "inc" : "dec", held, to);
    }
    w.registers_held = to;
}

void run_trap(warp &, const instruction &, u32) {
    fail("trap");
}

void run_unsupported(warp &, const instruction &, u32) {
    fail("an instruction that the interpreter has not");
}

static bool jumps(const instruction &op) {
    return op.run == run_branch || op.run == run_call || op.run == run_return;
}

void run_warp(warp &w, int budget) {
    const instruction *const code = w.kernel->code.data();
    current_warp = &w;
    while (w.state == waits::NOTHING) {
        path &here = w.paths.back();
        if (here.mask == 0 || here.pc == here.meet) {
            w.paths.pop_back();
            continue;
        }
        if (budget-- <= 0) return;    // a turn of one has an instruction
        const instruction &op = code[here.pc];
        current = &op;
        w.executed++;
        u32 lanes = here.mask;
        if (op.guarded) {
            const u32 where = lanes_where(w.registers + op.guard_at);
            lanes &= op.guard_negated ? ~where : where;
        }
        if (jumps(op)) {
            op.run(w, op, lanes);
            continue;
        }
        here.pc++;
        if (watching && lanes) watch(w, op, lanes);
        if (lanes) op.run(w, op, lanes);
        if (w.yields) {
            w.yields = false;
            return;
        }
    }
}

static std::string one_line(std::string_view text) {
    std::string line(text.substr(0, 200));
    for (char &c : line) c = c == '\n' || c == '\t' ? ' ' : c;
    return line;
}

static std::string where(const warp &w, const instruction &op) {
    const u32 *id = w.of->id;
    return sentence("block (%u,%u,%u) warp %d, line %d: %s", id[0], id[1], id[2], w.index, op.line,
                    one_line(op.text).c_str());
}

std::string last_executed() {
    return current_warp && current ? where(*current_warp, *current) : "";
}

std::string standing(const cluster &c) {
    constexpr int MOST = 40;    // lines
    std::string all;
    int n = 0;
    for (const auto &b : c.blocks) {
        for (const auto &w : b->warps) {
            if (w->state == waits::ENDED || n++ >= MOST) continue;
            const size_t pc = w->paths.empty() ? 0 : (size_t)w->paths.back().pc;
            all += "\n  " + where(*w, w->kernel->code[pc]) + waiting_for(*w);
        }
    }
    return all;
}

}    // namespace ptx
