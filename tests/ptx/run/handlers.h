/* handlers.h - what instructions.def names, and handlers of forms that are no row of it. */
#ifndef PTX_HANDLERS_H
#define PTX_HANDLERS_H

#include "code.h"

namespace ptx {

#define INSTRUCTION(words, types, run, operands, code)                                             \
    void run(warp &w, const instruction &op, u32 lanes);
#include "read/instructions.def"
#undef INSTRUCTION

void run_special(warp &w, const instruction &op, u32 lanes);
void run_symbol(warp &w, const instruction &op, u32 lanes);
void run_copy_local(warp &w, const instruction &op, u32 lanes);
void run_bar_red(warp &w, const instruction &op, u32 lanes);
void run_bar_result(warp &w, const instruction &op, u32 lanes);

}    // namespace ptx
#endif
