/* memory.h - what an address means, and whether it may be touched.
 *
 *   global    an address of the host; it must lie in a range of ptx_memory_add
 *   shared    (rank in the cluster + 1) << 24 | offset, as a 32-bit address of the windows of
 *             .shared and .shared::cluster (PTX ISA: State Spaces); bit 60 is set beside it where
 *             the address is generic
 *   local     offset in the lane's memory; bit 61 is set beside it where the address is generic
 *
 * A block's shared memory begins at offset 1024, so that 0 is no address of a variable. */
#ifndef PTX_MEMORY_H
#define PTX_MEMORY_H

#include "failure.h"
#include "run/state.h"

namespace ptx {

constexpr u64 SHARED_WINDOW = 1ull << 60, LOCAL_WINDOW = 1ull << 61;
constexpr u32 SHARED_FIRST = 1024;

/* Parameters of the launch, which is a range while it runs. */
extern u8 *parameters;
extern size_t parameter_bytes;

/* Where cooperative groups count the blocks of a grid (%envreg1, %envreg2). */
extern u8 grid_barrier[64];

/* The first place of that alignment, of bytes with so many to spare. */
inline u8 *aligned(std::vector<u8> &bytes, size_t alignment) {
    return (u8 *)rounded_up((u64)bytes.data(), alignment);
}

extern u64 ranges_version;    // changes with every range that comes or goes
u8 *find_global(u64 at, u32 bytes, seen_range &seen);
u8 *find_shared(const block &b, u32 at, u32 bytes);
u8 *parameter_at(u64 at, u32 bytes);
u8 *local_at(warp &w, int lane, u64 at, u32 bytes);

inline u8 *global_at(u64 at, u32 bytes, const instruction &op) {
    const seen_range &seen = op.seen;
    const bool known = at >= seen.begin && at + bytes <= seen.end && seen.version == ranges_version;
    return known ? (u8 *)at : find_global(at, bytes, op.seen);
}

inline u32 shared_address(const block &b, u64 offset) {
    return (b.rank + 1) << 24 | (u32)offset;
}

inline u32 shared_offset(u64 at) {
    return (u32)at & 0xffffff;
}

inline u8 *shared_at(const block &b, u64 address, u32 bytes) {
    const u32 at = (u32)address, offset = shared_offset(at);
    const bool own = at >> 24 == b.rank + 1 && offset >= SHARED_FIRST &&
                     offset + bytes <= b.shared_end;
    return own ? b.shared + offset : find_shared(b, at, bytes);
}

inline void check_alignment(u64 at, u32 bytes) {
    const u32 unit = bytes >= 16 ? 16 : bytes;
    if (at & (unit - 1))
        fail("address 0x%llx is not aligned for %u bytes", (unsigned long long)at, bytes);
}

/* `bytes`, a power of two, at an address of a lane. */
inline u8 *place(warp &w, const instruction &op, space in, u64 at, int lane, u32 bytes) {
    check_alignment(at, bytes);
    const bool generic = in == S_GENERIC;
    if (in == S_SHARED || (generic && at & SHARED_WINDOW)) return shared_at(*w.of, at, bytes);
    if (in == S_LOCAL || (generic && at & LOCAL_WINDOW))
        return local_at(w, lane, at & (LOCAL_WINDOW - 1), bytes);
    return in == S_PARAM ? parameter_at(at, bytes) : global_at(at, bytes, op);
}

template <class T> inline T load_as(const u8 *at) {
    T x;
    memcpy(&x, at, sizeof x);
    return x;
}

template <class T> inline void store_as(u8 *at, T x) {
    memcpy(at, &x, sizeof x);
}

/* 1, 2, 4 or 8 bytes, zeros above. */
inline u64 load_bits(const u8 *at, int bytes) {
    switch (bytes) {
    case 1: return *at;
    case 2: return load_as<u16>(at);
    case 4: return load_as<u32>(at);
    default: return load_as<u64>(at);
    }
}

inline void store_bits(u8 *at, int bytes, u64 v) {
    switch (bytes) {
    case 1: *at = (u8)v; break;
    case 2: store_as(at, (u16)v); break;
    case 4: store_as(at, (u32)v); break;
    default: store_as(at, v);
    }
}

}    // namespace ptx
#endif
