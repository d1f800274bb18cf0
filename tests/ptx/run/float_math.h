/* float_math.h - the processor's rounding mode, for a scope. */
#ifndef PTX_FLOAT_MATH_H
#define PTX_FLOAT_MATH_H

#include <cfenv>

#include "code.h"

namespace ptx {

struct rounds {
    int before;

    explicit rounds(rounding r) : before(fegetround()) {
        const int mode = r == R_Z   ? FE_TOWARDZERO
                         : r == R_M ? FE_DOWNWARD
                         : r == R_P ? FE_UPWARD
                                    : FE_TONEAREST;
        if (mode != before) fesetround(mode);
    }
    ~rounds() {
        if (fegetround() != before) fesetround(before);
    }
    rounds(const rounds &) = delete;
    rounds &operator=(const rounds &) = delete;
};

}    // namespace ptx
#endif
