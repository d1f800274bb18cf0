/* memory.cpp - the ranges of global memory, and what lies outside of the usual. */
#include "run/memory.h"

#include <iterator>

namespace ptx {

u8 *parameters;
size_t parameter_bytes;
alignas(64) u8 grid_barrier[64];
u64 ranges_version = 1;

/* Begin to end. Made at first use: constructors of other files add ranges. */
static std::map<u64, u64> &ranges() {
    static std::map<u64, u64> *const all = new std::map<u64, u64>;
    return *all;
}

static bool is_parameter(u64 at, u32 bytes) {
    const u64 first = (u64)parameters;
    return at >= first && at + bytes <= first + parameter_bytes;
}

u8 *find_global(u64 at, u32 bytes, seen_range &seen) {
    const auto next = ranges().upper_bound(at);
    if (next != ranges().begin()) {
        const auto &[begin, end] = *std::prev(next);
        if (at + bytes <= end) {
            seen = { begin, end, ranges_version };
            return (u8 *)at;
        }
    }
    if (is_parameter(at, bytes)) return (u8 *)at;    // by a pointer
    fail("access of %u bytes at 0x%llx, which is no memory", bytes, (unsigned long long)at);
}

u8 *find_shared(const block &b, u32 at, u32 bytes) {
    const u32 rank = at >> 24, offset = shared_offset(at);
    if (rank == 0 || rank > b.of->blocks.size()) fail("0x%x is no address of shared memory", at);
    const block &owner = *b.of->blocks[rank - 1];
    if (offset < SHARED_FIRST || offset + bytes > owner.shared_end) {
        fail("access of %u bytes at %d of shared memory, which ends at %u", bytes,
             (int)(offset - SHARED_FIRST), owner.shared_end - SHARED_FIRST);
    }
    return owner.shared + offset;
}

u8 *parameter_at(u64 at, u32 bytes) {
    if (is_parameter(at, bytes)) return (u8 *)at;
    fail("access of %u bytes at %lld of parameters, which end at %zu", bytes,
         (long long)(at - (u64)parameters), parameter_bytes);
}

u8 *local_at(warp &w, int lane, u64 at, u32 bytes) {
    const u32 all = w.kernel->local_bytes;
    if (at + bytes > all) {
        fail("access of %u bytes at %llu of local memory, which ends at %u", bytes,
             (unsigned long long)at, all);
    }
    return w.local.data() + (size_t)lane * all + at;
}

}    // namespace ptx

extern "C" void ptx_memory_add(const void *at, size_t bytes) {
    ptx::ranges()[(ptx::u64)at] = (ptx::u64)at + bytes;
    ptx::ranges_version++;
}

extern "C" void ptx_memory_remove(const void *at) {
    ptx::ranges().erase((ptx::u64)at);
    ptx::ranges_version++;
}
