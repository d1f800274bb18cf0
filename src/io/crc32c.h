/* crc32c.h - the checksum of TFRecord files (Castagnoli's polynomial). */
#ifndef MN_IO_CRC32C_H
#define MN_IO_CRC32C_H

#include <stddef.h>
#include <stdint.h>

/* CRC-32C of the bytes. */
uint32_t mn_crc32c(const void *bytes, size_t size);

/* CRC-32C as TFRecord files store it, rotated and shifted so that a checksum over data that holds
 * checksums stays a good one. */
uint32_t mn_crc32c_masked(const void *bytes, size_t size);

#endif
