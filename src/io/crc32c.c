/* crc32c.c - CRC-32C, eight bits of a byte one after the other.
 *
 *   crc <- (crc >> 1) ^ (0x82F63B78 if the bit shifted out is set), polynomial bit-reversed
 *
 * What is checked here are records of a hundred bytes now and then: no table is worth its lines. */
#include "io/crc32c.h"

uint32_t mn_crc32c(const void *bytes, size_t size) {
    const uint8_t *at = bytes;
    uint32_t crc = UINT32_MAX;
    for (size_t i = 0; i < size; i++) {
        crc ^= at[i];
        for (int bit = 0; bit < 8; bit++) crc = crc >> 1 ^ (crc & 1 ? 0x82F63B78u : 0);
    }
    return ~crc;
}

uint32_t mn_crc32c_masked(const void *bytes, size_t size) {
    const uint32_t crc = mn_crc32c(bytes, size);
    return (crc >> 15 | crc << 17) + 0xA282EAD8u;
}
