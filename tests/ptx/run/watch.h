/* watch.h - PTX_WATCH=KERNEL=TEXT: prints instructions as they run whose kernel's name and whose
 * text have these in them, with the values of their operands in the first lanes. */
#ifndef PTX_WATCH_H
#define PTX_WATCH_H

#include "run/state.h"

namespace ptx {

extern bool watching;
void choose_watched();    // by the environment
void watch(warp &w, const instruction &op, u32 lanes);

}    // namespace ptx
#endif
