/* watch.cpp - instructions and their values, as they are before they run. */
#include "run/watch.h"

#include <cstdio>
#include <cstdlib>

#include "run/registers.h"

namespace ptx {

bool watching;
static std::string kernel_part, text_part;

void choose_watched() {
    const char *said = getenv("PTX_WATCH"), *equals = said ? strchr(said, '=') : nullptr;
    if (!equals) return;
    kernel_part = std::string(said, equals), text_part = equals + 1;
    watching = true;
}

static void print(warp &w, const operand &x, u32 lanes) {
    constexpr int MOST = 3;    // lanes
    if (x.kind == operand::LIST) {
        for (const operand &part : x.list) print(w, part, lanes);
    }
    if (x.kind != operand::REGISTER && x.kind != operand::IMMEDIATE) return;
    int n = 0;
    for (const int l : on(lanes)) {
        if (n == MOST) break;
        fprintf(stderr, "%s%llx", n++ ? "," : " ", (unsigned long long)get(w, x, l));
    }
}

void watch(warp &w, const instruction &op, u32 lanes) {
    if (w.kernel->of->name.find(kernel_part) == std::string::npos) return;
    if (op.text.find(text_part) == std::string_view::npos) return;
    const u32 *id = w.of->id;
    fprintf(stderr, "(%u,%u,%u) warp %d lanes %08x line %d: %.*s:", id[0], id[1], id[2], w.index,
            lanes, op.line, (int)op.text.size(), op.text.data());
    for (const operand &x : op.x) print(w, x, lanes);
    fputc('\n', stderr);
}

}    // namespace ptx
