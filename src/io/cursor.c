/* cursor.c - bounded little-endian reads; the only place where file bytes become integers. */
#include "io/cursor.h"

/* Reads `width` <= 8 bytes as one little-endian number. */
static bool take_le(mn_cursor *in, uint64_t *out, size_t width) {
    if (width > mn_left(in)) return false;
    uint64_t value = 0;
    for (size_t i = 0; i < width; i++) value |= (uint64_t)in->bytes[in->at + i] << (8 * i);
    in->at += width;
    *out = value;
    return true;
}

mn_cursor mn_cursor_over(const void *bytes, size_t size) {
    return (mn_cursor){.bytes = bytes, .size = size, .at = 0};
}

size_t mn_left(const mn_cursor *in) {
    return in->size - in->at;
}

bool mn_take_u8(mn_cursor *in, uint8_t *out) {
    uint64_t value;
    if (!take_le(in, &value, sizeof *out)) return false;
    *out = (uint8_t)value;
    return true;
}

bool mn_take_u16le(mn_cursor *in, uint16_t *out) {
    uint64_t value;
    if (!take_le(in, &value, sizeof *out)) return false;
    *out = (uint16_t)value;
    return true;
}

bool mn_take_u32le(mn_cursor *in, uint32_t *out) {
    uint64_t value;
    if (!take_le(in, &value, sizeof *out)) return false;
    *out = (uint32_t)value;
    return true;
}

bool mn_take_u64le(mn_cursor *in, uint64_t *out) {
    return take_le(in, out, sizeof *out);
}

bool mn_take_bytes(mn_cursor *in, mn_bytes *out, size_t n) {
    if (n > mn_left(in)) return false;
    /* An empty run of NULL bytes stays NULL: NULL + 0 is undefined in C. */
    *out = (mn_bytes){.bytes = n > 0 ? in->bytes + in->at : in->bytes, .size = n};
    in->at += n;
    return true;
}
