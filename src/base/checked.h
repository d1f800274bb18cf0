/* checked.h - arithmetic on sizes that says when it does not fit. */
#ifndef MN_BASE_CHECKED_H
#define MN_BASE_CHECKED_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

/* Each returns true when the result fits; *out is then the result. */
static inline bool mn_mul_size(size_t *out, size_t a, size_t b) {
    return !__builtin_mul_overflow(a, b, out);
}

static inline bool mn_add_size(size_t *out, size_t a, size_t b) {
    return !__builtin_add_overflow(a, b, out);
}

static inline bool mn_mul_i64(int64_t *out, int64_t a, int64_t b) {
    return !__builtin_mul_overflow(a, b, out);
}

static inline bool mn_add_i64(int64_t *out, int64_t a, int64_t b) {
    return !__builtin_add_overflow(a, b, out);
}

#endif
