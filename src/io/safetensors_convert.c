/* safetensors_convert.c - numbers of one stored type as another. */
#include <math.h>
#include <string.h>

#include "base/bf16.h"
#include "base/f16.h"
#include "base/status.h"
#include "base/util.h"
#include "io/safetensors.h"

enum { PIECE = 4096 };    // numbers at a time

/* Of doubles only to float64 and float32, which they can reach without being rounded twice. */
static mn_status to_wide(void *out, mn_stored_dtype to, const mn_stored_tensor *t) {
    return to == MN_STORED_F64 ? mn_safetensors_read_f64(out, t) : mn_safetensors_read_f32(out, t);
}

static int64_t not_finite(const float *x, int64_t n) {
    int64_t count = 0;
    for (int64_t i = 0; i < n; i++) count += !isfinite(x[i]);
    return count;
}

static int64_t narrow(uint16_t *out, mn_stored_dtype to, const float *x, int64_t n) {
    int64_t lost = 0;
    for (int64_t i = 0; i < n; i++) {
        const bool bf16 = to == MN_STORED_BF16;
        out[i] = bf16 ? mn_bf16_from_float(x[i]) : mn_f16_from_float(x[i]);
        const float back = bf16 ? mn_bf16_to_float(out[i]) : mn_f16_to_float(out[i]);
        lost += isfinite(x[i]) && !isfinite(back);
    }
    return lost;
}

mn_status mn_stored_convert(void *out, mn_stored_dtype to, const void *in, mn_stored_dtype from,
                            int64_t count, int64_t *lost) {
    const size_t wide = mn_stored_dtype_bytes(from), item = mn_stored_dtype_bytes(to);
    *lost = 0;
    if (to == from) {
        memcpy(out, in, (size_t)count * item);
        return MN_OK;
    }
    if (to != MN_STORED_F64 && to != MN_STORED_F32 && to != MN_STORED_F16 &&
        to != MN_STORED_BF16) {
        return mn_fail(MN_ERR_UNSUPPORTED, "numbers are not converted to %s",
                       mn_stored_dtype_name(to));
    }
    for (int64_t at = 0; at < count; at += PIECE) {
        const int64_t n = mn_min(PIECE, count - at);
        const mn_stored_tensor t = { .name = "numbers", .dtype = from, .rank = 1, .shape = { n },
                                     .data = (const char *)in + (size_t)at * wide,
                                     .bytes = (size_t)n * wide };
        char *end = (char *)out + (size_t)at * item;
        float numbers[PIECE];
        const bool direct = item >= sizeof(float);
        const mn_status st = to_wide(direct ? (void *)end : numbers, to, &t);
        if (st != MN_OK) return st;
        if (!direct) *lost += narrow((uint16_t *)end, to, numbers, n);
        else if (to == MN_STORED_F32 && from == MN_STORED_F64) {
            memcpy(numbers, end, (size_t)n * item);
            int64_t before = 0;
            for (int64_t i = 0; i < n; i++) {
                double x;
                memcpy(&x, (const char *)t.data + (size_t)i * wide, sizeof x);
                before += !isfinite(x);
            }
            *lost += not_finite(numbers, n) - before;
        }
    }
    return MN_OK;
}
