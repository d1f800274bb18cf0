/* safetensors_read.c - stored elements to float and double.
 *
 * Every stored real type of at most 64 bits except I64 and U64 is a subset of double, so one
 * decoder to double serves both outputs; float then rounds once. */
#include "io/safetensors.h"

#include <math.h>
#include <stdbool.h>
#include <stdint.h>
#include <string.h>

#include "base/status.h"

#if defined(__BYTE_ORDER__) && __BYTE_ORDER__ != __ORDER_LITTLE_ENDIAN__
#error "stored tensors are read in place and need a little-endian machine"
#endif

typedef enum element_kind { FLOAT, FINITE, POWER, WHOLE, COUNT, OTHER } element_kind;

static const element_kind kinds[] = {
#define STORED_DTYPE(id, name, bytes, kind, exponent, fraction) [MN_STORED_##id] = kind,
#include "io/safetensors_dtype.def"
#undef STORED_DTYPE
};

typedef struct element_format {
    element_kind kind;
    int bytes, exponent, fraction;      // the last two in bits
} element_format;

/* The decoder is inlined once per row of the table, where the format is a constant: what remains
 * is a few shifts an element, which matters for checkpoints of 1e9 of them. */
#if defined(__GNUC__)
#define INLINE static inline __attribute__((always_inline))
#else
#define INLINE static inline
#endif

INLINE double double_of(uint64_t bits) {
    double value;
    memcpy(&value, &bits, sizeof value);
    return value;
}

/* (-1)^s * 1.f * 2^(e - bias), or 0.f * 2^(1 - bias) when e = 0; bias = 2^(exponent - 1) - 1. */
INLINE double decode_float(uint64_t bits, element_format format) {
    const uint64_t ones = ((uint64_t)1 << format.exponent) - 1;
    const uint64_t sign = bits >> (format.exponent + format.fraction) << 63;
    const uint64_t e = bits >> format.fraction & ones;
    const uint64_t f = bits & (((uint64_t)1 << format.fraction) - 1);
    const uint64_t bias = ones >> 1;
    if (e == ones && (format.kind == FLOAT || f == ((uint64_t)1 << format.fraction) - 1)) {
        return double_of(sign | (uint64_t)(f ? 0x7ff8 : 0x7ff0) << 48);     // NaN or infinity
    }
    if (e == 0) {
        const double value = ldexp((double)f, 1 - (int)bias - format.fraction);
        return sign ? -value : value;
    }
    return double_of(sign | (e - bias + 1023) << 52 | f << (52 - format.fraction));
}

/* Two's complement of `bytes` bytes. */
INLINE double decode_whole(uint64_t bits, int bytes) {
    const uint64_t sign = (uint64_t)1 << (8 * bytes - 1);
    return (double)(int64_t)((bits ^ sign) - sign);
}

INLINE double decode(const uint8_t *at, element_format format) {
    uint64_t bits = 0;
    memcpy(&bits, at, (size_t)format.bytes);
    switch (format.kind) {
    case FLOAT:
    case FINITE: return decode_float(bits, format);
    case POWER: return bits == 255 ? (double)NAN : ldexp(1.0, (int)bits - 127);
    case WHOLE: return decode_whole(bits, format.bytes);
    case COUNT: return (double)bits;
    case OTHER: break;
    }
    return (double)NAN;
}

static mn_status refuse_unless_real(const mn_stored_tensor *tensor) {
    if (kinds[tensor->dtype] != OTHER) return MN_OK;
    return mn_fail(MN_ERR_UNSUPPORTED, "tensor \"%s\": %s elements are not real numbers",
                   tensor->name, mn_stored_dtype_name(tensor->dtype));
}

/* One loop per row of the table. */
#define STORED_DTYPE(id, name, bytes, kind, exponent, fraction)                                    \
    case MN_STORED_##id:                                                                           \
        for (int64_t i = 0; i < n; i++) {                                                          \
            const element_format format = {kind, bytes, exponent, fraction};                       \
            out[i] = (ELEMENT)decode(at + i * (bytes), format);                                    \
        }                                                                                          \
        break;

mn_status mn_safetensors_read_f64(double *out, const mn_stored_tensor *tensor) {
    const mn_status st = refuse_unless_real(tensor);
    if (st != MN_OK || tensor->bytes == 0) return st;
    if (tensor->dtype == MN_STORED_F64) {
        memcpy(out, tensor->data, tensor->bytes);
        return MN_OK;
    }
    const uint8_t *at = tensor->data;
    const int64_t n = mn_stored_elements(tensor);
    switch (tensor->dtype) {
#define ELEMENT double
#include "io/safetensors_dtype.def"
#undef ELEMENT
    case MN_STORED_COUNT: break;
    }
    return MN_OK;
}

mn_status mn_safetensors_read_f32(float *out, const mn_stored_tensor *tensor) {
    const mn_status st = refuse_unless_real(tensor);
    if (st != MN_OK || tensor->bytes == 0) return st;
    if (tensor->dtype == MN_STORED_F32) {
        memcpy(out, tensor->data, tensor->bytes);
        return MN_OK;
    }
    const uint8_t *at = tensor->data;
    const int64_t n = mn_stored_elements(tensor);
    switch (tensor->dtype) {
#define ELEMENT float
#include "io/safetensors_dtype.def"
#undef ELEMENT
    case MN_STORED_COUNT: break;
    }
    return MN_OK;
}
