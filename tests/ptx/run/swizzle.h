/* swizzle.h - the swizzles of shared memory that TMA writes and wgmma reads (PTX ISA: Swizzling
 * Modes).
 *
 * Within a pattern of 128 bytes times 8, the 16-byte unit of an address (bits 4 and up) is
 * exclusive-ored with its 128-byte line (bits 7 and up): one bit of it for 32 bytes, two for 64,
 * three for 128. */
#ifndef PTX_SWIZZLE_H
#define PTX_SWIZZLE_H

#include "value.h"

namespace ptx {

/* bytes: 32, 64 or 128; 0 for none. */
inline u32 swizzled(u32 at, u32 bytes) {
    const u32 units = bytes ? bytes - 16 : 0;    // 0x10, 0x30, 0x70
    return at ^ (at >> 3 & units);
}

}    // namespace ptx
#endif
