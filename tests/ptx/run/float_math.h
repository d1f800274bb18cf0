/* float_math.h - the processor's rounding mode, to nearest but for a scope. */
#ifndef PTX_FLOAT_MATH_H
#define PTX_FLOAT_MATH_H

#include <cfenv>

#include "code.h"

namespace ptx {

struct rounds {
    const bool other;

    explicit rounds(rounding r) : other(r == R_Z || r == R_M || r == R_P) {
        if (other) fesetround(r == R_Z ? FE_TOWARDZERO : r == R_M ? FE_DOWNWARD : FE_UPWARD);
    }
    ~rounds() {
        if (other) fesetround(FE_TONEAREST);
    }
    rounds(const rounds &) = delete;
    rounds &operator=(const rounds &) = delete;
};

}    // namespace ptx
#endif
