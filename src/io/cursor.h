/* cursor.h - reads from bytes that came from outside, never past their end.
 *
 * Every take either reads a whole field and moves on, or returns false and leaves the cursor and
 * the output as they were. A parser built on these alone cannot read out of bounds. */
#ifndef MN_IO_CURSOR_H
#define MN_IO_CURSOR_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

/* A borrowed run of bytes; `bytes` may be NULL when `size` is 0. */
typedef struct mn_bytes {
    const uint8_t *bytes;
    size_t size;
} mn_bytes;

/* A place in borrowed bytes. Start one with mn_cursor_over; 0 <= at <= size always holds. */
typedef struct mn_cursor {
    const uint8_t *bytes;
    size_t size;
    size_t at;
} mn_cursor;

mn_cursor mn_cursor_over(const void *bytes, size_t size);

/* Bytes not yet taken. */
size_t mn_left(const mn_cursor *in);

/* Unsigned little-endian fields at any alignment. */
bool mn_take_u8(mn_cursor *in, uint8_t *out);
bool mn_take_u16le(mn_cursor *in, uint16_t *out);
bool mn_take_u32le(mn_cursor *in, uint32_t *out);
bool mn_take_u64le(mn_cursor *in, uint64_t *out);

/* The next `n` bytes, borrowed from the cursor's bytes and not copied. */
bool mn_take_bytes(mn_cursor *in, mn_bytes *out, size_t n);

#endif
