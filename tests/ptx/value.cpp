/* value.cpp - names of types, and 16-bit floats, for which C++17 has no type. */
#include "value.h"

#include <algorithm>
#include <unordered_map>

namespace ptx {

type type_named(std::string_view word) {
    static const std::unordered_map<std::string_view, type> names = [] {
        std::unordered_map<std::string_view, type> all;
        for (int t = T_NONE + 1; t < T_COUNT; t++) all[types[t].name] = (type)t;
        return all;
    }();
    const auto found = names.find(word);
    return found == names.end() ? T_NONE : found->second;
}

/* 1 sign, 5 exponent (bias 15), 10 mantissa bits. */
float f16_value(u16 bits) {
    const int exponent = bits >> 10 & 31, mantissa = bits & 0x3ff;
    float y;
    if (exponent == 31) y = mantissa ? NAN : INFINITY;
    else if (exponent == 0) y = std::ldexp((float)mantissa, -24);
    else y = std::ldexp((float)(mantissa | 0x400), exponent - 25);
    return bits & 0x8000 ? -y : y;
}

/* |x| = n * 2^(e - 10) with n rounded to an integer: n < 2^11, and below 2^10 where e is the
 * least, -14. */
u16 f16_rounded(double x) {
    if (std::isnan(x)) return 0x7fff;
    const u16 sign = std::signbit(x) ? 0x8000 : 0;
    if (x == 0 || std::isinf(x)) return (u16)(sign | (x == 0 ? 0 : 0x7c00));
    const int e = std::max(std::ilogb(x), -14);
    if (e > 15) return (u16)(sign | 0x7c00);
    const int n = (int)std::fabs(std::nearbyint(std::ldexp(x, 10 - e)));
    return (u16)(sign | ((e + 14) * 1024 + n));    // a carry out of n raises the exponent
}

}    // namespace ptx
