/* async_copy.cpp - cp.async, cp.async.bulk and st.async, in their groups or for an mbarrier. */
#include "run/barrier.h"
#include "run/operations.h"
#include "run/registers.h"

namespace ptx {

void deferred_groups::commit() {
    if (!chosen.late) return;    // all is done
    groups.push_back(std::move(open));
    open.clear();
}

void deferred_groups::wait(size_t all_but) {
    while (groups.size() > all_but) {
        const std::vector<deferred> group = std::move(groups.front());
        groups.erase(groups.begin());
        for (const deferred &d : group) d.run();
    }
}

void deferred_groups::finish() {
    commit();
    wait(0);
}

/* `size` bytes of shared memory, of which the last size - have become zeros. */
void run_cp_async(warp &w, const instruction &op, u32 lanes) {    // [to], [from], size, have
    const u32 n = (u32)op.x[2].value;
    for (const int l : on(lanes)) {
        const u32 have = op.x[3].kind ? get32(w, op.x[3], l) : n;
        if (have > n) fail("cp.async of %u of %u bytes", have, n);
        const u64 to = address(w, op.x[0], l), from = address(w, op.x[1], l);
        check_alignment(to, n);
        check_alignment(from, n);
        u8 *d = shared_at(*w.of, to, n);
        const u8 *s = have ? global_at(from, have, op) : nullptr;
        defer(w.copies[l], w, op, [=] {
            if (have) memcpy(d, s, have);
            memset(d + have, 0, n - have);
        });
    }
}

void run_cp_commit(warp &w, const instruction &, u32 lanes) {
    for (const int l : on(lanes)) w.copies[l].commit();
}

void run_cp_wait(warp &w, const instruction &op, u32 lanes) {    // all but so many
    for (const int l : on(lanes)) w.copies[l].wait((size_t)op.x[0].value);
}

void run_cp_wait_all(warp &w, const instruction &, u32 lanes) {
    for (const int l : on(lanes)) w.copies[l].finish();
}

/* Arrives when the lane's copies are done: they are done here. Without .noinc the arrival is one
 * more than the barrier was made for, so that nothing changes. */
void run_cp_mbarrier(warp &w, const instruction &op, u32 lanes) {    // [mbarrier]
    for (const int l : on(lanes)) {
        w.copies[l].finish();
        u8 *at = shared_operand(w, op.x[0], l, 8);
        if (op.flags & F_NOINC) change_mbarrier(at, 1, 0, 0);
    }
}

static void check_bulk(u32 bytes, u64 to, u64 from) {
    if (bytes % 16 == 0 && to % 16 == 0 && from % 16 == 0) return;
    fail("cp.async.bulk of %u bytes from 0x%llx to 0x%llx: not by 16", bytes,
         (unsigned long long)from, (unsigned long long)to);
}

void run_bulk_load(warp &w, const instruction &op,
                   u32 lanes) {    // [to], [from], bytes, [mbarrier]
    for (const int l : on(lanes)) {
        const u32 n = get32(w, op.x[2], l);
        const u64 to = address(w, op.x[0], l), from = address(w, op.x[1], l);
        check_bulk(n, to, from);
        u8 *d = shared_at(*w.of, to, n), *mbarrier = shared_operand(w, op.x[3], l, 8);
        const u8 *s = global_at(from, n, op);
        defer_to_mbarrier(w, op, [=] {
            memcpy(d, s, n);
            change_mbarrier(mbarrier, 0, 0, n);
        });
    }
}

static void add_floats(u8 *to, const u8 *from, u32 bytes) {
    for (u32 i = 0; i < bytes; i += 4)
        store_as(to + i, load_as<float>(to + i) + load_as<float>(from + i));
}

void run_bulk_store(warp &w, const instruction &op, u32 lanes) {    // [to], [from], bytes
    if (op.code == ADDS && op.t != T_F32) fail("a bulk reduction of .%s", types[op.t].name.data());
    for (const int l : on(lanes)) {
        const u32 n = get32(w, op.x[2], l);
        const u64 to = address(w, op.x[0], l), from = address(w, op.x[1], l);
        check_bulk(n, to, from);
        u8 *d = global_at(to, n, op);
        const u8 *s = shared_at(*w.of, from, n);
        const bool adds = op.code == ADDS;
        defer(w.bulk[l], w, op, [=] {
            if (adds) add_floats(d, s, n);
            else memcpy(d, s, n);
        });
    }
}

void run_bulk_commit(warp &w, const instruction &, u32 lanes) {
    for (const int l : on(lanes)) w.bulk[l].commit();
}

void run_bulk_wait(warp &w, const instruction &op, u32 lanes) {    // all but so many
    for (const int l : on(lanes)) w.bulk[l].wait((size_t)op.x[0].value);
}

/* Values to shared memory of another block, whose mbarrier counts their bytes. */
void run_st_async(warp &w, const instruction &op, u32 lanes) {    // [to], b or {b...}, [mbarrier]
    const u32 bytes = (u32)width(op.t), all = bytes * (u32)op.count;
    for (const int l : on(lanes)) {
        u8 *d = shared_operand(w, op.x[0], l, all), *mbarrier = shared_operand(w, op.x[2], l, 8);
        for (u32 i = 0; i < (u32)op.count; i++) {
            store_bits(d + i * bytes, (int)bytes, get(w, op.x[1].part(i), l));
        }
        change_mbarrier(mbarrier, 0, 0, all);
    }
}

}    // namespace ptx
