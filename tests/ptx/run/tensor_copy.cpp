/* tensor_copy.cpp - cp.async.bulk.tensor: boxes of a tensor between global and shared memory
 * (TMA), by tiles.
 *
 * A box lies in shared memory with its first dimension fastest, swizzled. Elements outside of
 * the tensor are read as zeros and not written; those of a load count among the bytes that
 * complete. */
#include <array>

#include "run/barrier.h"
#include "run/operations.h"
#include "run/registers.h"
#include "run/swizzle.h"

namespace ptx {

typedef std::array<s32, 5> coordinates;

static const ptx_tensor_map &map_at(u64 at, const instruction &op) {
    const ptx_tensor_map *map = at % 64 ? nullptr : (const ptx_tensor_map *)global_at(at, 128, op);
    if (!map || map->magic != PTX_TENSOR_MAP)
        fail("no tensor map at 0x%llx", (unsigned long long)at);
    return *map;
}

static u32 box_bytes(const ptx_tensor_map &map) {
    u32 n = map.element_bytes;
    for (int d = 0; d < map.rank; d++) n *= map.box[d];
    return n;
}

/* Where element i of the box that begins at c lies in global memory; 0 where it lies outside. */
static u64 element_address(const ptx_tensor_map &map, const coordinates &c, const u32 *i) {
    u64 at = map.address;
    for (int d = 0; d < map.rank; d++) {
        const s64 x = (s64)c[(size_t)d] + i[d];
        if (x < 0 || x >= (s64)map.dims[d]) return 0;
        at += (u64)x * (d == 0 ? map.element_bytes : map.strides[d - 1]);
    }
    return at;
}

/* Calls f(offset in shared memory before swizzling, global address or 0) for each element of a
 * box. */
template <class F> static void each_element(const ptx_tensor_map &map, const coordinates &c, F f) {
    u32 i[5] = {}, offset = 0;
    for (int d = 0; d < map.rank;) {
        f(offset, element_address(map, c, i));
        offset += map.element_bytes;
        for (d = 0; d < map.rank && ++i[d] == map.box[d]; d++) i[d] = 0;
        if (d < map.rank) d = 0;
    }
}

/* CUtensorMapSwizzle: 0 none, then 32, 64 and 128 bytes. */
static u32 swizzle_bytes(const ptx_tensor_map &map) {
    if (map.swizzle > 3) fail("a tensor map of swizzle %d", map.swizzle);
    return map.swizzle ? 16u << map.swizzle : 0;
}

static coordinates coordinates_of(warp &w, const ptx_tensor_map &map, const operand &mapped,
                                  int l) {
    const std::vector<operand> &list = mapped.list.back().list;
    if ((int)list.size() != map.rank)
        fail("%zu coordinates of %d dimensions", list.size(), map.rank);
    coordinates c = {};
    for (size_t d = 0; d < list.size(); d++) c[d] = (s32)get32(w, list[d], l);
    return c;
}

/* The tile's address, whose whole box must be shared memory. */
static u32 tile_address(warp &w, const operand &tile, int l, const ptx_tensor_map &map) {
    const u32 at = (u32)address(w, tile, l);
    if (at % 128)
        fail("a tile at %u of shared memory: not by 128", shared_offset(at) - SHARED_FIRST);
    shared_at(*w.of, at, box_bytes(map));
    return at;
}

/* A box and its tile, as lane l names them. */
struct copied_box {
    const block &b;
    ptx_tensor_map map;
    coordinates c;
    u32 tile, swizzle;

    copied_box(warp &w, const instruction &op, const operand &mapped, const operand &to, int l)
        : b(*w.of), map(map_at(address(w, mapped, l), op)), c(coordinates_of(w, map, mapped, l)),
          tile(tile_address(w, to, l, map)), swizzle(swizzle_bytes(map)) {
    }

    /* f(place in the tile, global address or 0, bytes) for each element. */
    template <class F> void each(F f) const {
        const u32 size = map.element_bytes;
        each_element(map, c, [&](u32 offset, u64 at) {
            f(shared_at(b, swizzled(tile + offset, swizzle), size), at, size);
        });
    }
};

void run_tensor_load(warp &w, const instruction &op,
                     u32 lanes) {    // [tile], [map, {c}], [mbarrier]
    for (const int l : on(lanes)) {
        const copied_box box(w, op, op.x[1], op.x[0], l);
        u8 *const mbarrier = shared_operand(w, op.x[2], l, 8);
        defer_to_mbarrier(w, op, [=, &op] {
            box.each([&](u8 *to, u64 from, u32 size) {
                if (from) memcpy(to, global_at(from, size, op), size);
                else memset(to, 0, size);
            });
            change_mbarrier(mbarrier, 0, 0, box_bytes(box.map));
        });
    }
}

void run_tensor_store(warp &w, const instruction &op, u32 lanes) {    // [map, {c}], [tile]
    for (const int l : on(lanes)) {
        const copied_box box(w, op, op.x[0], op.x[1], l);
        defer(w.bulk[l], w, op, [=, &op] {
            box.each([&](const u8 *from, u64 to, u32 size) {
                if (to) memcpy(global_at(to, size, op), from, size);
            });
        });
    }
}

}    // namespace ptx
