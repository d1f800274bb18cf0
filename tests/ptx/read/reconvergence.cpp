/* reconvergence.cpp - where the lanes of a branch meet again: the immediate post-dominator of
 * its block, the first block through which every way from it to the end leads.
 *
 * Post-dominators are dominators of the graph turned round. They are found by K. Cooper, T.
 * Harvey, K. Kennedy: A Simple, Fast Dominance Algorithm (2001): intersect those of a block's
 * successors until nothing changes. */
#include "read/reader.h"
#include "run/handlers.h"

namespace ptx {

class flow_graph {
  public:
    flow_graph(std::vector<instruction> &all, size_t from);
    void mark_branches();

  private:
    std::vector<instruction> &code;
    size_t base, n;    // first instruction of the function, number of them
    std::vector<size_t> first, block_of;
    std::vector<std::vector<size_t>> next, before;
    std::vector<size_t> order, number,
        meet;    // post-order from the end; place in it; immediate post-dominator
    size_t end = 0;

    static constexpr size_t NONE = (size_t)-1;

    instruction &at(size_t i) {
        return code[base + i];
    }
    size_t last_of(size_t block) const {
        return (block + 1 < first.size() ? first[block + 1] : n) - 1;
    }
    void find_blocks();
    void connect(size_t from, size_t to);
    void find_edges();
    void number_blocks();
    size_t common(size_t a, size_t b) const;
    void find_meetings();
};

flow_graph::flow_graph(std::vector<instruction> &all, size_t from)
    : code(all), base(from), n(all.size() - from) {
    find_blocks();
    find_edges();
    number_blocks();
    find_meetings();
}

/* Blocks begin at the start, at targets of branches and behind what does not go on to the next
 * instruction. */
void flow_graph::find_blocks() {
    std::vector<bool> leads(n + 1, false);
    leads[0] = true;
    for (size_t i = 0; i < n; i++) {
        if (at(i).run == run_branch) leads[(size_t)at(i).target - base] = leads[i + 1] = true;
        if (at(i).run == run_return || at(i).run == run_trap) leads[i] = leads[i + 1] = true;
    }
    for (size_t i = 0; i < n; i++) {
        if (leads[i]) first.push_back(i);
        block_of.push_back(first.size() - 1);
    }
    end = block_of[n - 1];
    next.resize(first.size()), before.resize(first.size());
}

void flow_graph::connect(size_t from, size_t to) {
    next[from].push_back(to);
    before[to].push_back(from);
}

void flow_graph::find_edges() {
    for (size_t b = 0; b < first.size(); b++) {
        const instruction &last = at(last_of(b));
        if (b == end) continue;
        if (last.run == run_trap) {
            connect(b, end);
            continue;
        }
        if (last.run == run_branch) connect(b, block_of[(size_t)last.target - base]);
        const bool falls_through = last.run != run_branch || last.guarded;
        if (falls_through && b + 1 < first.size()) connect(b, b + 1);
    }
}

/* Depth first from the end, against the edges; blocks from which the end is not reached get no
 * number. */
void flow_graph::number_blocks() {
    std::vector<size_t> path{ end }, tried(first.size(), 0);
    std::vector<bool> seen(first.size(), false);
    number.assign(first.size(), NONE);
    seen[end] = true;
    while (!path.empty()) {
        const size_t b = path.back();
        if (tried[b] == before[b].size()) {
            number[b] = order.size();
            order.push_back(b);
            path.pop_back();
            continue;
        }
        const size_t c = before[b][tried[b]++];
        if (!seen[c]) path.push_back(c);
        seen[c] = true;
    }
}

/* The first that post-dominates both. */
size_t flow_graph::common(size_t a, size_t b) const {
    while (a != b) {
        while (number[a] < number[b]) a = meet[a];
        while (number[b] < number[a]) b = meet[b];
    }
    return a;
}

void flow_graph::find_meetings() {
    meet.assign(first.size(), NONE);
    meet[end] = end;
    for (bool changed = true; changed;) {
        changed = false;
        for (size_t i = order.size(); i-- > 0;) {
            const size_t b = order[i];
            size_t found = NONE;
            for (size_t c : next[b]) {
                if (meet[c] == NONE) continue;
                found = found == NONE ? c : common(c, found);
            }
            if (b == end || found == NONE || meet[b] == found) continue;
            meet[b] = found;
            changed = true;
        }
    }
}

void flow_graph::mark_branches() {
    for (size_t b = 0; b < first.size(); b++) {
        instruction &last = at(last_of(b));
        if (last.run == run_branch)
            last.meet = (int)(base + (meet[b] == NONE ? n - 1 : first[meet[b]]));
    }
}

void find_reconvergence(std::vector<instruction> &code, size_t first) {
    flow_graph(code, first).mark_branches();
}

}    // namespace ptx
