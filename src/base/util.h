/* util.h - the few helpers every file may use. */
#ifndef MN_BASE_UTIL_H
#define MN_BASE_UTIL_H

#include <stddef.h>
#include <stdint.h>

#define MN_COUNTOF(array) (sizeof(array) / sizeof((array)[0]))

static inline int64_t mn_min(int64_t a, int64_t b) {
    return a < b ? a : b;
}

static inline int64_t mn_max(int64_t a, int64_t b) {
    return a > b ? a : b;
}

/* ceil(a / b) for a >= 0, b > 0 */
static inline int64_t mn_ceil_div(int64_t a, int64_t b) {
    return a / b + (a % b != 0);
}

#endif
