/* value.h - the types of PTX and the bits of their values. */
#ifndef PTX_VALUE_H
#define PTX_VALUE_H

#include <cmath>
#include <cstdint>
#include <cstring>
#include <string_view>

namespace ptx {

typedef uint8_t u8;
typedef uint16_t u16;
typedef uint32_t u32;
typedef uint64_t u64;
typedef int8_t s8;
typedef int16_t s16;
typedef int32_t s32;
typedef int64_t s64;

enum type : u8 {
    T_NONE,
#define TYPE(id, name, bytes, kind) T_##id,
#include "types.def"
#undef TYPE
    T_COUNT
};

enum type_kind : u8 { K_NONE, K_PREDICATE, K_BITS, K_SIGNED, K_FLOAT, K_PAIR };

struct type_info {
    std::string_view name;
    int bytes;
    type_kind kind;
};

constexpr type_info types[T_COUNT] = {
    { "", 0, K_NONE },
#define TYPE(id, name, bytes, kind) { name, bytes, K_##kind },
#include "types.def"
#undef TYPE
};

constexpr int width(type t) {
    return types[t].bytes;
}

constexpr bool is_signed(type t) {
    return types[t].kind == K_SIGNED;
}

constexpr bool is_float(type t) {
    return types[t].kind == K_FLOAT;
}

constexpr bool is_pair(type t) {
    return types[t].kind == K_PAIR;
}

/* Of the two 16-bit floats, bf16, or a pair of it. */
constexpr bool is_bf16(type t) {
    return t == T_BF16 || t == T_BF16X2;
}

/* The next multiple of `to`. */
constexpr u64 rounded_up(u64 x, u64 to) {
    return (x + to - 1) / to * to;
}

/* T_NONE where the word is no type. */
type type_named(std::string_view word);

/* What a register of a wider type holds of a value of type t: sign-extended or zero-extended. */
inline s64 extend(u64 v, type t) {
    switch (t) {
    case T_PRED: return v & 1;
    case T_S8: return (s8)v;
    case T_S16: return (s16)v;
    case T_S32: return (s32)v;
    default: break;
    }
    switch (width(t)) {
    case 1: return (u8)v;
    case 2: return (u16)v;
    case 4: return (u32)v;
    default: return (s64)v;
    }
}

template <class To, class From> inline To bits_as(From x) {
    static_assert(sizeof(To) == sizeof(From), "the same bits");
    To y;
    memcpy(&y, &x, sizeof y);
    return y;
}

inline float float_of(u32 bits) {
    return bits_as<float>(bits);
}

inline u32 bits_of(float x) {
    return bits_as<u32>(x);
}

inline double double_of(u64 bits) {
    return bits_as<double>(bits);
}

inline u64 bits_of(double x) {
    return bits_as<u64>(x);
}

inline float bf16_value(u16 bits) {
    return float_of((u32)bits << 16);
}

/* To nearest, ties to even. NaN becomes the canonical 0x7fff. */
inline u16 bf16_nearest(float x) {
    const u32 y = bits_of(x);
    if (std::isnan(x)) return 0x7fff;
    return (u16)((y + 0x7fff + (y >> 16 & 1)) >> 16);
}

inline u16 bf16_towards_zero(float x) {
    return std::isnan(x) ? 0x7fff : (u16)(bits_of(x) >> 16);
}

float f16_value(u16 bits);

/* By the rounding mode that is set; NaN becomes the canonical 0x7fff. */
u16 f16_rounded(double x);

/* cvt.rna.tf32: to nearest, ties away from zero; 10 bits of mantissa are left. */
inline u32 tf32_bits(float x) {
    const u32 y = bits_of(x);
    if ((y & 0x7f800000) == 0x7f800000) return y;
    return (y + 0x1000) & ~0x1fffu;
}

/* How matrix instructions read a tf32 operand: the 13 low bits do not count. */
inline float tf32_value(u32 bits) {
    return float_of(bits & ~0x1fffu);
}

/* One of the two 16-bit floats: t is F16 or BF16, or their pair. */
inline float value16(type t, u32 bits) {
    return is_bf16(t) ? bf16_value((u16)bits) : f16_value((u16)bits);
}

inline double float_value(type t, u64 bits) {
    switch (t) {
    case T_F32: return float_of((u32)bits);
    case T_F64: return double_of(bits);
    default: return value16(t, (u32)bits);
    }
}

inline u16 bits16(type t, float x) {
    return is_bf16(t) ? bf16_nearest(x) : f16_rounded(x);
}

/* NaN that arithmetic makes is positive and all ones, whatever NaN went in (PTX ISA: add, and on;
 * of double the ISA leaves it open): the host's has the sign of an operand, or its own. */
inline float canonical(float x) {
    return x != x ? float_of(0x7fffffff) : x;
}

inline double canonical(double x) {
    return x != x ? double_of(0x7fffffffffffffffull) : x;
}

/* .ftz: a subnormal number is a zero of its sign. */
inline float flush(float x) {
    return std::fpclassify(x) == FP_SUBNORMAL ? std::copysign(0.0f, x) : x;
}

}    // namespace ptx
#endif
