/* attention_bwd_single_pass_sm90.cuh - softmax attention backward in a single pass, in bf16 by
 * Hopper's products, for heads of 72 to 128 columns where forward left its sums and o
 * (attention_bwd_flash_sm90.cuh has the equations and serves the rest).
 *
 * A block for each processor takes tiles of 128 keys and scans over the queries that see them, the
 * last ones first, 64 at a time:
 *
 *   z = k q'   w = 2^(c z - a)   g = v do'   dz = w (g - b)       with keys as rows
 *   dv += w do                   dk += dz q
 *   sums += k'dz                                                  of all keys: dq transposed
 *
 * Five products. The sums of a tile of queries are of all tiles of keys that it sees. They lie in
 * work space, in float32 and as the threads' registers hold them, and blocks add to them in the
 * order of the keys: each waits for its turn, a semaphore in device memory, so that results have
 * the same bits each time. Tiles of keys are taken in that order too, each by a block that has
 * begun and first ends those it took before, so that the earliest never waits; others are ahead
 * by as much as adding takes, and rarely waited for.
 *
 * b = o.do lacks what rounding o to bf16 left out. It matters where a key has most of a row's
 * weight and g - b must cancel: the pass notes that key and sums dz over all keys, which should be
 * 0; what is left is taken from the cotangent of that key's score afterwards, in dq and in dk.
 *
 * Kernels, in order: attention_bwd_preprocess_kernel (a and b of rows),
 * attention_bwd_single_pass_kernel (dk, dv, sums), its REDO (dk, dv behind cotangents that are not
 * finite), attention_bwd_dq_postprocess_kernel (dq from the sums) and
 * attention_bwd_dk_correction_kernel (dk of dominant keys). */
#ifndef MN_KERNELS_CUDA_ATTENTION_ATTENTION_BWD_SINGLE_PASS_SM90_CUH
#define MN_KERNELS_CUDA_ATTENTION_ATTENTION_BWD_SINGLE_PASS_SM90_CUH

#include "kernels/cuda/attention/attention_bwd_flash_sm90.cuh"
#include "kernels/cuda/prim/sync.cuh"
#include "kernels/cuda/prim/tma.cuh"

namespace mneme::attention {

enum {
    MN_SINGLE_PASS_KEYS = 128,
    MN_SINGLE_PASS_STEP = 64,                              // queries of a tile
    MN_SINGLE_PASS_ACC = 128 * MN_SINGLE_PASS_STEP,              // numbers of dq of a tile
    // and those of each warp's sums of dz
    MN_SINGLE_PASS_CHUNK = MN_SINGLE_PASS_ACC + 8 * MN_SINGLE_PASS_STEP,
    MN_SINGLE_PASS_PRODUCERS = 64,
    MN_SINGLE_PASS_PITCH = 132,
    // registers of the threads that load and of those that multiply
    MN_SINGLE_PASS_LOAD_REGISTERS = 24,
    MN_SINGLE_PASS_REGISTERS = 240,
};

/* Work space. a, b and dominant_key are (B,H,T); semaphores and sums (slots of 64 queries, H), a
 * record of sums having MN_SINGLE_PASS_CHUNK floats; flags (slots of 128 keys, J). */
struct mn_single_pass {
    mn_flash_params f;
    float *a, *b;         // lse log2 e; o.do, later the correction of the dominant key's dz
    int *dominant_key;    // the key with most of a row's weight, or -1 if none has
    int *semaphores, *flags, *ticket;
    float *sums;
    int64_t n_semaphores, n_flags;
    int n_tiles;    // of keys, of all heads
    CUtensorMap q, d_o, keys, values;    // tiles of 64 and of 128 rows
    bool by_tma;
};

__device__ inline int64_t mn_single_pass_row(const mn_call &call, int64_t b, int64_t h, int64_t t) {
    return (b * call.H + h) * call.T + t;
}

/* The slot of the first tile of a sequence. */
__device__ inline int64_t mn_single_pass_slot(const mn_call &call, const mn_tile_span &tile,
                                              int64_t T,
                                       int64_t rows) {
    return call.cu_seqlens ? tile.span.t0 / rows + tile.n : tile.n * ((T + rows - 1) / rows);
}

/* ---- rows ------------------------------------------------------------------------------------ */

enum {
    MN_SINGLE_PASS_ROW_THREADS = 256,
    MN_SINGLE_PASS_ROW_GROUP = 16,    // threads of a row
    MN_SINGLE_PASS_ROW_TOKENS = 4,    // rows of a group
};

/* Numbers in the halves of a word. */
__device__ inline float2 mn_single_pass_unpack(uint32_t word) {
    return make_float2(__uint_as_float(word << 16), __uint_as_float(word & 0xffff0000u));
}

/* sum + x.y of eight numbers each. */
__device__ inline float mn_single_pass_dot(uint4 x, uint4 y, float sum) {
    const uint32_t xs[4] = { x.x, x.y, x.z, x.w }, ys[4] = { y.x, y.y, y.z, y.w };
#pragma unroll
    for (int i = 0; i < 4; i++) {
        const float2 one = mn_single_pass_unpack(xs[i]), other = mn_single_pass_unpack(ys[i]);
        sum = fmaf(one.x, other.x, sum);
        sum = fmaf(one.y, other.y, sum);
    }
    return sum;
}

/* x / y of what is not negative; a quotient in 64 bits takes some hundred instructions. */
__device__ inline int64_t mn_single_pass_quotient(int64_t x, int64_t y) {
    return ((x | y) >> 32) == 0 ? (int64_t)((unsigned)x / (unsigned)y) : x / y;
}

/* Token `token` of all of (B,T), of which there are n_tokens. */
struct mn_single_pass_token {
    int64_t b, t;
    bool there;

    __device__ mn_single_pass_token(const mn_call &c, int64_t token, int64_t n_tokens)
        : b(mn_single_pass_quotient(token, c.T)), t(token - b * c.T), there(token < n_tokens) {}
};

/* Loads o and do (B,T,H,V) and lse (B,T,H); stores a = lse log2 e and b = o.do (B,H,T). 16 threads
 * have four tokens of a head, whose rows are all on their way at once. The last tokens go first, as
 * the second cache has their o from forward; the first ones' do then is there for the pass, which
 * begins with them. Clears semaphores, flags, ticket and dominant_key. */
__global__ static void __launch_bounds__(MN_SINGLE_PASS_ROW_THREADS, 4)
attention_bwd_preprocess_kernel(const __grid_constant__ mn_single_pass k) {
    enum { GROUP = MN_SINGLE_PASS_ROW_GROUP, ROWS = MN_SINGLE_PASS_ROW_TOKENS };
    const mn_attn_params &p = k.f.p;
    const mn_call &c = p.call;
    mn_pdl_launch_dependents();
    const int64_t block = gridDim.x - 1 - blockIdx.x;
    const int64_t thread = block * MN_SINGLE_PASS_ROW_THREADS + threadIdx.x;
    const int64_t all = gridDim.x * (int64_t)MN_SINGLE_PASS_ROW_THREADS, n_tokens = c.B * c.T;
    const int lane = threadIdx.x % GROUP, column = lane * 8;
    for (int64_t i = thread; i < k.n_semaphores; i += all) k.semaphores[i] = 0;
    for (int64_t i = thread; i < k.n_flags; i += all) k.flags[i] = 0;
    if (thread == 0) *k.ticket = 0;
    const int64_t group = thread / GROUP, turn = mn_single_pass_quotient(group, c.H);
    const int64_t h = group - turn * c.H, token0 = turn * ROWS;
    uint4 x[ROWS] = {}, y[ROWS] = {};
#pragma unroll
    for (int r = 0; r < ROWS; r++) {
        const mn_single_pass_token at(c, token0 + r, n_tokens);
        if (!at.there || column >= c.V) continue;
        x[r] = *(const uint4 *)(mn_row<mn_bf16>(p.o, at.b, at.t, h) + column);
        y[r] = *(const uint4 *)(mn_row<mn_bf16>(p.d_o, at.b, at.t, h) + column);
    }
    const mn_single_pass_token own_at(c, token0 + lane % ROWS, n_tokens);
    const bool stores = lane < ROWS && own_at.there;
    const float lse = stores ? *mn_row<float>(p.lse, own_at.b, own_at.t, h) : 0.0f;
    float own = 0.0f;
#pragma unroll
    for (int r = 0; r < ROWS; r++) {
        float sum = mn_single_pass_dot(x[r], y[r], 0.0f);
#pragma unroll
        for (int lanes = GROUP / 2; lanes > 0; lanes >>= 1) {
            sum += __shfl_xor_sync(0xffffffffu, sum, lanes);
        }
        own = lane == r ? sum : own;
    }
    if (!stores) return;
    const int64_t at = mn_single_pass_row(c, own_at.b, h, own_at.t);
    k.a[at] = lse * 1.4426950408889634f;
    k.b[at] = own;
    k.dominant_key[at] = -1;
}

/* ---- the pass -------------------------------------------------------------------------------- */

/* A tile of keys: `n_keys` keys of a sequence from `key` on, of head h, seen by the sequence's
 * queries from `seen` on (before its first, where that is negative), as far as a window goes. It
 * has n tiles of queries from row `first` on, the last ones first, for each of `all` / n heads. No
 * keys: no more work. */
struct mn_single_pass_coord {
    int64_t b, t0, h, head0;
    int64_t slot;    // of the sequence's first tile of queries
    int key, n_keys, seen, length, first, n, all;
};

struct alignas(1024) mn_single_pass_smem {
    static constexpr int tile = MN_SINGLE_PASS_STEP * 128 * 2;
    unsigned char a[2 * tile], b[2 * tile], x[2][tile], y[2][tile];    // k, v; q, do
    unsigned char dz[2][tile];                                        // rows are keys
    float dq[MN_SINGLE_PASS_ACC];
    float off[4][8 * MN_SINGLE_PASS_STEP];
    /* Of a stage: numbers of its queries, where to note keys, queries that are there, and queries
     * from the first that sees the block's first key. */
    float rows[2][2][MN_SINGLE_PASS_STEP];
    int *dominant_key[2];
    int left[2], past[2];
    uint64_t kv_full, stage_full[2], stage_empty[2], dz_full[2], dz_empty[2], dq_full[2], dq_empty;
    uint64_t kv_empty, coord_full[2], coord_empty[2];
    mn_single_pass_coord coord[2];
};

/* Of the keys of number `block_id` in the order of work. */
__device__ inline mn_flash_coord mn_single_pass_keys(const mn_single_pass &k, int64_t block_id) {
    mn_call keys = k.f.p.call;
    keys.T = keys.L;
    return mn_flash_coord_of(k.f, block_id, keys, keys.J, MN_SINGLE_PASS_KEYS, false);
}

__device__ inline mn_single_pass_coord mn_single_pass_coord_of(const mn_single_pass &k,
                                                               const mn_flash_coord &at) {
    const mn_call &call = k.f.p.call;
    const int64_t heads = call.H / call.J;
    mn_single_pass_coord coord;
    coord.b = at.tile.span.b, coord.t0 = at.tile.span.t0;
    coord.h = at.h, coord.head0 = at.h * heads;
    coord.slot = mn_single_pass_slot(call, at.tile, call.T, MN_SINGLE_PASS_STEP);
    coord.key = (int)at.tile.first, coord.n_keys = (int)at.tile.n_rows;
    coord.seen = (int)(at.tile.first - mn_keys_before(call));
    coord.length = (int)(call.cu_seqlens ? at.tile.span.length : call.T);
    coord.first = max(coord.seen, 0) / MN_SINGLE_PASS_STEP * MN_SINGLE_PASS_STEP;
    int64_t end = coord.length;
    if (k.f.p.window) end = min(end, coord.seen + coord.n_keys - 1 + k.f.p.window);
    coord.n = (int)max((end - coord.first + MN_SINGLE_PASS_STEP - 1) / MN_SINGLE_PASS_STEP,
                       (int64_t)0);
    coord.all = coord.n * (int)heads;
    return coord;
}

/* The next tile of keys by the ticket. */
__device__ inline mn_single_pass_coord mn_single_pass_next(const mn_single_pass &k) {
    for (;;) {
        const int ticket = atomicAdd(k.ticket, 1);
        if (ticket >= k.n_tiles) return {};
        const mn_flash_coord at = mn_single_pass_keys(k, ticket);
        if (at.tile.n_rows > 0) return mn_single_pass_coord_of(k, at);
    }
}

/* Position: query t of head h is the first of a tile; next() goes to the tile after it. */
struct mn_single_pass_tile_iter {
    int t, last, first;
    int64_t h;

    __device__ explicit mn_single_pass_tile_iter(const mn_single_pass_coord &coord)
        : t(coord.first + (coord.n - 1) * MN_SINGLE_PASS_STEP), last(t), first(coord.first),
            h(coord.head0) {}

    __device__ void next() {
        t -= MN_SINGLE_PASS_STEP;
        if (t >= first) return;
        t = last;
        h++;
    }
};

#if MN_HAS_WGMMA

/* 64 rows of up to 128 columns to a tile, the top of one of TILE_ROWS rows; thread i of 64 brings
 * piece i % 16 of every fourth row. SKIPS: from row `skipped` on. */
template <int TILE_ROWS, bool SKIPS = false, int UNROLL = MN_SINGLE_PASS_STEP / 8>
__device__ inline void mn_single_pass_load_rows(uint32_t to, const mn_bf16 *from, int64_t stride,
                                                int n_rows, int width, int i, int skipped = 0) {
    const int vec = i % 16, row = i / 16;
    const uint32_t even = to + mn_swizzle_byte(TILE_ROWS, row, vec * 8);
    const uint32_t odd = to + mn_swizzle_byte(TILE_ROWS, row + 4, vec * 8);
    const mn_bf16 *at = from + row * stride + vec * 8;
    const int left = vec * 8 < width ? n_rows - row : 0;
#pragma unroll(UNROLL)
    for (int r = 0; r < MN_SINGLE_PASS_STEP; r += 8) {
        // else nothing is read
        mn_cp_async_16(even + r * 128, at, r < left && (!SKIPS || row + r >= skipped));
        at += 4 * stride;
        mn_cp_async_16(odd + r * 128, at, r + 4 < left && (!SKIPS || row + r + 4 >= skipped));
        at += 4 * stride;
    }
}

/* Asks for a whole tile, 64 columns at a time; `at` is its first row. One thread calls. */
template <int ROWS>
__device__ inline void mn_single_pass_load_tile(unsigned char *to, const CUtensorMap &map,
                                                uint64_t *full, int64_t b, int64_t at,
                                                int64_t h) {
    for (int column = 0; column < 128; column += 64) {
        mn_tma_load(to + column * ROWS * 2, map, full, column, (int)h, (int)at, (int)b);
    }
}

/* Keys and values: true where copies of this thread are under way, which it has to wait for. */
template <int UNROLL>
__device__ inline bool mn_single_pass_load_keys(mn_single_pass_smem &smem,
                                                const mn_single_pass &k,
                                                const mn_single_pass_coord &coord, bool by_tma) {
    const mn_attn_params &p = k.f.p;
    const int i = threadIdx.x, K = (int)p.call.K, V = (int)p.call.V;
    if (by_tma && coord.n_keys == MN_SINGLE_PASS_KEYS) {
        const int64_t t = coord.t0 + coord.key;
        if (i > 0) {
            mn_mbarrier_arrive(&smem.kv_full);
            return false;
        }
        mn_mbarrier_arrive_expect_tx(&smem.kv_full, (int)(sizeof smem.a + sizeof smem.b));
        mn_single_pass_load_tile<128>(smem.a, k.keys, &smem.kv_full, coord.b, t, coord.h);
        mn_single_pass_load_tile<128>(smem.b, k.values, &smem.kv_full, coord.b, t, coord.h);
        return false;
    }
#pragma unroll 1
    for (int r = 0; r < MN_SINGLE_PASS_KEYS; r += MN_SINGLE_PASS_STEP) {
        const int left = coord.n_keys - r;
        const int64_t t = coord.t0 + coord.key + (left > 0 ? r : 0);
        mn_single_pass_load_rows<128, false, UNROLL>(
            mn_smem_addr(smem.a) + r * 128, mn_row<mn_bf16>(p.k, coord.b, t, coord.h),
            p.k.stride[1], left, K, i);
        mn_single_pass_load_rows<128, false, UNROLL>(
            mn_smem_addr(smem.b) + r * 128, mn_row<mn_bf16>(p.v, coord.b, t, coord.h),
            p.v.stride[1], left, V, i);
    }
    return true;
}

/* Two producer warps load keys and values, then queries and cotangents with their rows' numbers;
 * cotangents of queries up to `wild` are left out by a redo. Whole tiles come by TMA, which thread
 * 0 asks for; the last rows of a sequence by cp.async, with zeros behind them. `before` tiles of
 * queries, and `turn` of keys, have been loaded before. */
template <bool REDO>
__device__ inline void mn_single_pass_load(mn_single_pass_smem &smem, const mn_single_pass &k,
                                           const mn_single_pass_coord &coord, int wild, int turn,
                                           int before) {
    constexpr int unroll = !REDO ? 1 : MN_SINGLE_PASS_STEP / 8;
    const mn_attn_params &p = k.f.p;
    const int i = threadIdx.x, K = (int)p.call.K, V = (int)p.call.V;
    const bool by_tma = !REDO && k.by_tma;
    mn_mbarrier_wait(&smem.kv_empty, (turn & 1) ^ 1);
    if (coord.all == 0) {    // no query sees them: zeros leave through their place at once
        mn_mbarrier_arrive(&smem.kv_full);
        return;
    }
    bool owes = mn_single_pass_load_keys<unroll>(smem, k, coord, by_tma);
    mn_single_pass_tile_iter tile_iter(coord);
    const int end = before + coord.all;
#pragma unroll 1
    for (int n = before; n < end; n++, tile_iter.next()) {
        const int stage = n % 2, left = coord.length - tile_iter.t;
        const int64_t t = coord.t0 + tile_iter.t,
            row = mn_single_pass_row(p.call, coord.b, tile_iter.h, t);
        const bool meets = i < left && !(REDO && tile_iter.t + i <= wild);
        const bool whole = by_tma && left >= MN_SINGLE_PASS_STEP;
        const float a = i < left ? k.a[row + i] : 0.0f, b = meets ? k.b[row + i] : 0.0f;
        uint64_t *const full = &smem.stage_full[stage];
        mn_mbarrier_wait(&smem.stage_empty[stage], (n / 2 & 1) ^ 1);
        if (i == 0) {
            smem.dominant_key[stage] = k.dominant_key + row;
            smem.left[stage] = left;
            smem.past[stage] = tile_iter.t - coord.seen;
        }
        smem.rows[stage][0][i] = a;
        smem.rows[stage][1][i] = b;
        if (!whole) {
            mn_single_pass_load_rows<64, false, unroll>(
                mn_smem_addr(smem.x[stage]), mn_row<mn_bf16>(p.q, coord.b, t, tile_iter.h),
                p.q.stride[1], left, K, i);
            mn_single_pass_load_rows<64, REDO, unroll>(
                mn_smem_addr(smem.y[stage]), mn_row<mn_bf16>(p.d_o, coord.b, t, tile_iter.h),
                p.d_o.stride[1], left, V, i, wild + 1 - tile_iter.t);
        }
        if (!whole || owes) mn_cp_async_wait_fence();
        if (owes) mn_mbarrier_arrive(&smem.kv_full);
        owes = false;
        if (whole && i == 0) {
            mn_mbarrier_arrive_expect_tx(full, 2 * mn_single_pass_smem::tile);
            mn_single_pass_load_tile<64>(smem.x[stage], k.q, full, coord.b, t, tile_iter.h);
            mn_single_pass_load_tile<64>(smem.y[stage], k.d_o, full, coord.b, t, tile_iter.h);
        } else {
            mn_mbarrier_arrive(full);
        }
    }
}

/* Loads one tile of keys after the other; thread 0 takes the next when the last loads of one are
 * under way, so that it is there when the products end. */
template <bool REDO>
__device__ inline void mn_single_pass_producer(mn_single_pass_smem &smem, const mn_single_pass &k,
                                               int wild) {
    int before = 0;
#pragma unroll 1
    for (int turn = 0;; turn++) {
        const int slot = turn & 1, next = turn + 1;
        const mn_single_pass_coord &coord = smem.coord[slot];
        mn_mbarrier_wait(&smem.coord_full[slot], turn / 2 & 1);
        if (coord.n_keys == 0) return;
        mn_single_pass_load<REDO>(smem, k, coord, wild, turn, before);
        if (REDO) return;
        before += coord.all;
        mn_mbarrier_arrive(&smem.coord_empty[slot]);
        if (threadIdx.x == 0) {
            mn_mbarrier_wait(&smem.coord_empty[next & 1], (next / 2 & 1) ^ 1);
            smem.coord[next & 1] = mn_single_pass_next(k);
            mn_mbarrier_arrive(&smem.coord_full[next & 1]);
        }
        __syncwarp();
    }
}

/* `bytes` of shared memory onto or over as many of device memory, by TMA. */
__device__ inline void mn_tma_accumulate_1d(float *to, const float *from, int bytes, bool add) {
    if (add) {
        asm volatile("cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32 [%0], [%1], %2;"
                     ::"l"(to), "r"(mn_smem_addr(from)), "r"(bytes) : "memory");
    } else {
        asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;"
                     ::"l"(to), "r"(mn_smem_addr(from)), "r"(bytes) : "memory");
    }
}

/* One thread of two: adds every second dq to the sums of all tiles of keys when it is their turn,
 * which is after those with earlier keys that the tile's queries see. The next block's wait
 * is all of what lies between its turn and the semaphore, so there is one fence of device memory:
 * sums are read and written by TMA alone, in the second cache, whose completion shows them to this
 * thread, and the release to the next. */
template <bool has_window>
__device__ inline void mn_single_pass_accumulate_dq(mn_single_pass_smem &smem,
                                                    const mn_single_pass &k,
                                                    const mn_single_pass_coord &coord, int which,
                                                    int before) {
    const int rank = coord.key / MN_SINGLE_PASS_KEYS, end = before + coord.all;
    mn_single_pass_tile_iter tile_iter(coord);
    for (int n = before; n < end; n++, tile_iter.next()) {
        if (n % 2 != which) continue;
        const int64_t chunk = (coord.slot + tile_iter.t / MN_SINGLE_PASS_STEP) * k.f.p.call.H
            + tile_iter.h;
        int *semaphore = k.semaphores + chunk;
        float *to = k.sums + chunk * MN_SINGLE_PASS_CHUNK;
        const int64_t sees = tile_iter.t + coord.key - coord.seen + 1;    // of the first query
        const bool adds = has_window ? rank > mn_window_first(sees, k.f.p.window)
                                                  / MN_SINGLE_PASS_KEYS
                                     : rank > 0;
        int now = 0;
        while (adds && now != rank) {
            now = mn_load_acquire(semaphore);
        }
        mn_mbarrier_wait(&smem.dq_full[which], n / 2 & 1);
        mn_fence_proxy_async();
        mn_tma_accumulate_1d(to, smem.dq, MN_SINGLE_PASS_ACC * 4, adds);
        mn_tma_accumulate_1d(to + MN_SINGLE_PASS_ACC, smem.off[n % 4],
                             8 * MN_SINGLE_PASS_STEP * 4, adds);
        cuda::ptx::cp_async_bulk_commit_group();
        mn_tma_store_wait_read();
        mn_mbarrier_arrive(&smem.dq_empty);
        mn_tma_store_wait();
        mn_store_release(semaphore, rank + 1);
    }
}

template <bool has_window>
__device__ inline void mn_single_pass_accumulate(mn_single_pass_smem &smem,
                                                 const mn_single_pass &k, int which) {
    int before = 0;
#pragma unroll 1
    for (int turn = 0;; turn++) {
        const mn_single_pass_coord &coord = smem.coord[turn & 1];
        mn_mbarrier_wait(&smem.coord_full[turn & 1], turn / 2 & 1);
        if (coord.n_keys == 0) return;
        mn_single_pass_accumulate_dq<has_window>(smem, k, coord, which, before);
        before += coord.all;
        mn_mbarrier_arrive(&smem.coord_empty[turn & 1]);
    }
}

/* Of 2 N sums a thread keeps N, the upper ones in every second 2 N lanes, and adds those of the
 * thread that is 2 N lanes away. */
template <int N>
__device__ inline void mn_single_pass_reduce_half(float (&sum)[16]) {
    const bool upper = threadIdx.x & (2 * N);
#pragma unroll
    for (int i = 0; i < N; i++) {
        const float x = sum[i], y = sum[i + N];
        sum[i] = (upper ? y : x) + __shfl_xor_sync(0xffffffffu, upper ? x : y, 2 * N);
    }
}

/* Sums of a thread's two rows of dz over the eight threads of the warp that have the same columns;
 * thread i of the warp gets those of columns 2 i and 2 i + 1. */
__device__ inline float2 mn_single_pass_sum_rows(const uint32_t (&dz)[16]) {
    float sum[16];
#pragma unroll
    for (int i = 0; i < 16; i += 2) {
        const float2 x = mn_single_pass_unpack(dz[i]), y = mn_single_pass_unpack(dz[i + 1]);
        sum[i] = x.x + y.x;
        sum[i + 1] = x.y + y.y;
    }
    mn_single_pass_reduce_half<8>(sum);
    mn_single_pass_reduce_half<4>(sum);
    mn_single_pass_reduce_half<2>(sum);
    return make_float2(sum[0], sum[1]);
}

/* Where a lane's row of dz begins, of the first of its matrices of 8 by 8: lanes 8 i to 8 i + 7
 * name the rows of matrix i, of which four are rows `first` to `first` + 15 of 16 columns. */
__device__ inline uint32_t mn_single_pass_dz_addr(const unsigned char *dz, int first) {
    const int matrix = threadIdx.x % 32 / 8;
    const int row = first + matrix % 2 * 8 + threadIdx.x % 8;
    return mn_smem_addr(dz) + mn_swizzle_byte(MN_SINGLE_PASS_KEYS, row, matrix / 2 * 8);
}

/* A warp's 16 rows of 64 columns. */
__device__ inline void mn_single_pass_store_dz(uint32_t to, const uint32_t (&dz)[16]) {
#pragma unroll
    for (int i = 0; i < 16; i += 4) {    // columns 4 i to 4 i + 15, each eight 16 bytes
        asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};"
                     ::"r"(to ^ (i * 8)), "r"(dz[i]), "r"(dz[i + 1]), "r"(dz[i + 2]),
                     "r"(dz[i + 3]) : "memory");
    }
}

/* 64 sums of rows and columns to where the engine finds them, as registers lie. The thread that
 * asks it shows them to it. */
__device__ inline void mn_single_pass_stage_dq(mn_single_pass_smem &smem, const float (&dq)[32],
                                               int n) {
    const int thread = threadIdx.x - MN_WARPGROUP;
    mn_mbarrier_wait(&smem.dq_empty, (n & 1) ^ 1);
#pragma unroll
    for (int i = 0; i < 32; i += 4) {
        *(float4 *)&smem.dq[i * 256 + thread * 4] = make_float4(dq[i], dq[i + 1], dq[i + 2],
                                                                dq[i + 3]);
    }
    __syncwarp();
    if (thread % 32 == 0) mn_mbarrier_arrive(&smem.dq_full[n & 1]);
}

/* Numbers of the thread's queries, columns `column` and the one behind it of each eight. */
__device__ inline void mn_single_pass_load_numbers(float2 (&to)[MN_SINGLE_PASS_STEP / 8],
                                                   const float (&from)[MN_SINGLE_PASS_STEP],
                                                   int column) {
#pragma unroll
    for (int i = 0; i < MN_SINGLE_PASS_STEP / 8; i++) {
        to[i] = *(const float2 *)&from[i * 8 + column];
    }
}

/* Starts dq = k'dz for 64 columns of the keys: rows of dq are columns of a head. */
__device__ inline void mn_single_pass_wgmma_dq(float (&dq)[32], uint32_t keys, uint32_t dz) {
    const uint64_t a = mn_smem_desc(keys, 16), b = mn_smem_desc(dz, 16);
#pragma unroll
    for (int i = 0; i < MN_SINGLE_PASS_KEYS; i += 16) {
        mn_wgmma<1, 1>(dq, mn_smem_desc_at(a, i * 128), mn_smem_desc_at(b, i * 128), i > 0);
    }
}

/* Notes keys that have more than half of the weight of a query. */
__device__ inline void mn_single_pass_note_dominant(const mn_single_pass_smem &smem,
                                                    const uint32_t (&w)[16], int stage,
                                                    int first_key, int row, int column) {
    uint32_t most = w[0];
#pragma unroll
    for (int i = 1; i < 16; i++) {
        asm("max.bf16x2 %0, %0, %1;" : "+r"(most) : "r"(w[i]));
    }
    const float2 pair = mn_single_pass_unpack(most);
    if (!(fmaxf(pair.x, pair.y) > 0.5f)) return;
    int *dominant_key = smem.dominant_key[stage] + column;
    const int left = smem.left[stage] - column, key = first_key + row;
#pragma unroll
    for (int i = 0; i < 16; i++) {
        const float2 x = mn_single_pass_unpack(w[i]);
        const int query = i / 2 * 8;
        if (x.x > 0.5f && query < left) dominant_key[query] = key + i % 2 * 8;
        if (x.y > 0.5f && query + 1 < left) dominant_key[query + 1] = key + i % 2 * 8;
    }
}

/* Multiplies a group's 64 keys. g is made beside the weights, dv beside dz, the next scores while
 * dq is stored; dq of a tile is made one tile later, when both groups have written their dz. REDO:
 * dk and dv alone, of keys that the query `wild` does not see. Tiles of queries are numbered from
 * `before` on. */
template <bool has_window, bool REDO>
__device__ inline void mn_single_pass_multiply(mn_single_pass_smem &smem, const mn_single_pass &k,
                                               const mn_single_pass_coord &coord, int wild,
                                               int turn, int before) {
    const mn_attn_params &p = k.f.p;
    const int half = __shfl_sync(0xffffffffu, threadIdx.x / MN_WARPGROUP - 1, 0);
    const int thread = threadIdx.x % MN_WARPGROUP;
    const int row = half * 64 + thread / 32 * 16 + thread % 32 / 4, column = thread % 4 * 2;
    const float scale = p.scale * 1.4426950408889634f;
    const uint32_t keys = mn_smem_addr(smem.a) + half * 8192;
    const uint32_t values = mn_smem_addr(smem.b) + half * 8192;
    const uint32_t keys_trans = mn_smem_addr(smem.a) + half * 16384;    // 64 columns of all keys
    const uint32_t dz_at = mn_single_pass_dz_addr(smem.dz[0], row - row % 16);
    float z[32], g[32], dq[32] = {}, dk[64] = {}, dv[64] = {};
    uint32_t w[16], dz[16];
    constexpr bool early_dv = !REDO;    // dv += w do begins before dz is made
    const auto start_scores = [&](int n) {
        mn_mbarrier_wait(&smem.stage_full[n & 1], n / 2 & 1);
        mn_wgmma_fence();
        mn_wgmma_abt<128, 128, 64>(z, keys, mn_smem_addr(smem.x[n & 1]));
        mn_wgmma_commit();
    };
    const auto start_dv = [&](int stage) {
        mn_fence_operand(w);
        mn_wgmma_fence();
        mn_wgmma_ab<64, 128>(dv, w, mn_smem_addr(smem.y[stage]), true);
    };
    /* From scores to weights and cotangents, and what these add to dk. Rows' numbers are loaded in
     * front of products, behind which they would wait for shared memory. */
    const auto softmax_tile = [&](int n) {
        const int stage = n & 1;
        float2 numbers[MN_SINGLE_PASS_STEP / 8];
        mn_single_pass_load_numbers(numbers, smem.rows[stage][0], column);
        const int unseen = row - smem.past[stage] - column;    // queries before the first to see
        mn_wgmma_fence();
        mn_wgmma_abt<128, 128, 64>(g, values, mn_smem_addr(smem.y[stage]));
        mn_wgmma_commit();
        mn_wgmma_wait<1>();
        mn_fence_operand(z);
        if (unseen > -8) {
#pragma unroll
            for (int i = 0; i < 32; i++) {
                if (i / 4 * 8 + i % 2 < unseen + i % 4 / 2 * 8) z[i] = -INFINITY;
            }
        }
        if (has_window && unseen + p.window < MN_SINGLE_PASS_STEP) {
#pragma unroll
            for (int i = 0; i < 32; i++) {
                if (i / 4 * 8 + i % 2 >= unseen + p.window + i % 4 / 2 * 8) z[i] = -INFINITY;
            }
        }
#pragma unroll
        for (int i = 0; i < 32; i += 4) {
            const float2 a = numbers[i / 4];
#pragma unroll
            for (int j = i; j < i + 4; j++) {
                z[j] = mn_exp2(fmaf(z[j], scale, j % 2 ? -a.y : -a.x));
            }
        }
#pragma unroll
        for (int i = 0; i < 16; i++) w[i] = mn_bf16x2(z[2 * i], z[2 * i + 1]);
        mn_single_pass_load_numbers(numbers, smem.rows[stage][1], column);
        if (early_dv) {
            start_dv(stage);
            mn_wgmma_commit();
            mn_wgmma_wait<1>();
        } else {
            mn_wgmma_wait<0>();
        }
        mn_fence_operand(g);
#pragma unroll
        for (int i = 0; i < 32; i += 4) {
            const float2 b = numbers[i / 4];
#pragma unroll
            for (int j = i; j < i + 4; j++) g[j] = z[j] * (g[j] - (j % 2 ? b.y : b.x));
        }
#pragma unroll
        for (int i = 0; i < 16; i++) dz[i] = mn_bf16x2(g[2 * i], g[2 * i + 1]);
        mn_fence_operand(dz);
        if (!early_dv) start_dv(stage);
        else mn_wgmma_fence();
        mn_wgmma_ab<64, 128>(dk, dz, mn_smem_addr(smem.x[stage]), true);
        mn_wgmma_commit();
    };
    /* dq of the tile before, and what else of this one's weights is kept: dz, for dq. Those who
     * multiply by it show it to the products; to wait here for one's own would take as long as half
     * of them. Sums stand behind a branch, so that ptxas does not put them between products. */
    const auto start_dq = [&](int n) {
        if (REDO) return;
        const int stage = n & 1;
        if (n > before) mn_mbarrier_wait(&smem.dz_full[stage ^ 1], (n - 1) / 2 & 1);
        mn_fence_proxy_async();
        mn_wgmma_fence();
        // of none at first
        mn_single_pass_wgmma_dq(dq, keys_trans, mn_smem_addr(smem.dz[stage ^ 1]));
        mn_wgmma_commit();
        mn_mbarrier_wait(&smem.dz_empty[stage], (n / 2 & 1) ^ 1);
        mn_single_pass_store_dz(dz_at + stage * mn_single_pass_smem::tile, dz);
        __syncwarp();
        if (thread % 32 == 0) mn_mbarrier_arrive(&smem.dz_full[stage]);
        mn_single_pass_note_dominant(smem, w, stage, coord.key, row, column);
        const float2 off = mn_single_pass_sum_rows(dz);
        *(float2 *)&smem.off[n & 3][(half * 4 + thread / 32) * 64 + thread % 32 * 2] = off;
    };
    const auto end_grads = [&](int n) {
        if (thread % 32 == 0) mn_mbarrier_arrive(&smem.stage_empty[n & 1]);
        if (REDO || n == before) return;
        if (thread % 32 == 0) mn_mbarrier_arrive(&smem.dz_empty[n & 1 ^ 1]);
        mn_single_pass_stage_dq(smem, dq, n - 1);
    };
    mn_mbarrier_wait(&smem.kv_full, turn & 1);
    const int last = before + coord.all - 1;
    if (last >= before) {
#pragma unroll 1
        for (int n = before; n <= last; n++) {
            /* No product is under way where the loop turns. To say so at its top, too, keeps ptxas
             * from waiting for the scores before dq is stored (C7517). */
            mn_wgmma_wait<0>();
            mn_fence_operand(dq), mn_fence_operand(dk), mn_fence_operand(dv);
            start_scores(n);
            if (n > before) end_grads(n - 1);
            softmax_tile(n);
            start_dq(n);
            mn_wgmma_wait<0>();
            mn_fence_operand(dq), mn_fence_operand(dk), mn_fence_operand(dv);
        }
        end_grads(last);
        if (!REDO) {
            mn_mbarrier_wait(&smem.dz_full[last & 1], last / 2 & 1);
            mn_fence_proxy_async();
            mn_wgmma_fence();
            mn_single_pass_wgmma_dq(dq, keys_trans, mn_smem_addr(smem.dz[last & 1]));
            mn_wgmma_commit();
            mn_wgmma_wait<0>();
            mn_fence_operand(dq);
            if (thread % 32 == 0) mn_mbarrier_arrive(&smem.dz_empty[last & 1]);
        }
    }
    mn_fence_operand(dk), mn_fence_operand(dv);
    const int64_t first = coord.t0 + coord.key;
    const int skipped = wild + 1 - coord.seen;
    /* A group's half of v is its own; dv leaves through it while dq before the last is added. */
    mn_bwd_store_tile<128, REDO>(smem.b, dv, 1.0f, p.dv, coord.b, first, coord.h, coord.n_keys,
                                 (int)p.call.V, skipped);
    if (!REDO && last >= before) mn_single_pass_stage_dq(smem, dq, last);
    mn_named_barrier_sync(3, 256);    // both groups are done with k
    mn_bwd_store_tile<128, REDO>(smem.a, dk, p.scale, p.dk, coord.b, first, coord.h, coord.n_keys,
                                 (int)p.call.K, skipped);
}

template <bool has_window, bool REDO>
__device__ inline void mn_single_pass_consumer(mn_single_pass_smem &smem, const mn_single_pass &k,
                                               int wild) {
    int before = 0;
#pragma unroll 1
    for (int turn = 0;; turn++) {
        const mn_single_pass_coord &coord = smem.coord[turn & 1];
        mn_mbarrier_wait(&smem.coord_full[turn & 1], turn / 2 & 1);
        if (coord.n_keys == 0) return;
        mn_single_pass_multiply<has_window, REDO>(smem, k, coord, wild, turn, before);
        if (REDO) return;
        before += coord.all;
        mn_fence_proxy_async();    // the next keys come by TMA
        __syncwarp();
        if (threadIdx.x % 32 == 0) {
            mn_mbarrier_arrive(&smem.kv_empty);
            mn_mbarrier_arrive(&smem.coord_empty[turn & 1]);
        }
        __syncwarp();
    }
}

#endif

/* A block takes tiles of 128 keys of a key head j by the ticket, one after the other: the next tile
 * is known when the products end, and its loads begin when the last results have left.
 * Loads   k, v (128,K or V) once; then, last queries first, q, do (64,K or V), a and b (64) for
 *         every tile of queries that see the keys, of each query head that shares the key head.
 * Stores  dk, dv (128,K or V) at the end; adds its k'dz (128,64) and sums of dz to `sums` of each
 *         tile, in the order of the keys. REDO: dk, dv alone, of the keys of mn_bwd_redo_coord. */
template <bool has_window, bool REDO>
__global__ static void __launch_bounds__(MN_FLASH_THREADS, 1)
attention_bwd_single_pass_kernel(const __grid_constant__ mn_single_pass k) {
#if MN_HAS_WGMMA
    extern __shared__ __align__(1024) unsigned char bytes[];
    mn_single_pass_smem &smem = *(mn_single_pass_smem *)bytes;
    mn_flash_coord redone = {};
    int wild = -1;
    mn_pdl_launch_dependents();
    if (!REDO) mn_pdl_wait();
    else {
        redone = mn_bwd_redo_coord((int *)bytes, wild, k.f.p.call, k.b);
        if (redone.tile.n_rows == 0) return;
    }
    if (threadIdx.x == 0) {
        smem.coord[0] = REDO ? mn_single_pass_coord_of(k, redone) : mn_single_pass_next(k);
        mn_mbarrier_init(&smem.kv_full, MN_SINGLE_PASS_PRODUCERS);
        mn_mbarrier_init(&smem.kv_empty, 8);
        mn_mbarrier_init(&smem.dq_empty, 1);
        for (int i = 0; i < 2; i++) {
            mn_mbarrier_init(&smem.stage_full[i], MN_SINGLE_PASS_PRODUCERS);
            mn_mbarrier_init(&smem.stage_empty[i], 8);
            mn_mbarrier_init(&smem.dz_full[i], 8);
            mn_mbarrier_init(&smem.dz_empty[i], 8);
            mn_mbarrier_init(&smem.dq_full[i], 8);
            mn_mbarrier_init(&smem.coord_full[i], 1);
            // by loading threads, those that add and warps that multiply
            mn_mbarrier_init(&smem.coord_empty[i], MN_SINGLE_PASS_PRODUCERS + 2 + 8);
        }
        mn_mbarrier_arrive(&smem.coord_full[0]);
    }
    __syncthreads();
    if (threadIdx.x < MN_WARPGROUP) {
        mn_setmaxnreg_dec<REDO ? 40 : MN_SINGLE_PASS_LOAD_REGISTERS>();
        const int warp = threadIdx.x / 32;
        if (threadIdx.x < MN_SINGLE_PASS_PRODUCERS) mn_single_pass_producer<REDO>(smem, k, wild);
        else if (!REDO && threadIdx.x % 32 == 0) {
            mn_single_pass_accumulate<has_window>(smem, k, warp & 1);
        }
    } else {
        mn_setmaxnreg_inc<REDO ? 232 : MN_SINGLE_PASS_REGISTERS>();
        mn_single_pass_consumer<has_window, REDO>(smem, k, wild);
    }
#endif
}

/* ---- dq -------------------------------------------------------------------------------------- */

/* Grid: H times slots of 64 queries, the heads of a slot beside each other and the last slots
 * first, whose sums the second cache still has. Loads the record of sums, transposes it and stores
 * dq (64,K) in bf16. Where a row has a dominant key, the residual -(sum of dz) is added times that
 * key, stored in k.b for dk, and the flag of the key's tile set. */
__global__ static void __launch_bounds__(256)
    attention_bwd_dq_postprocess_kernel(const __grid_constant__ mn_single_pass k) {
    enum { ROWS = 256 / 16, ROUNDS = MN_SINGLE_PASS_STEP / ROWS };    // of a round; of a thread
    __shared__ __align__(16) float smem[MN_SINGLE_PASS_STEP][MN_SINGLE_PASS_PITCH];
    const mn_attn_params &p = k.f.p;
    const mn_call &c = p.call;
    const uint32_t turn = blockIdx.x / (uint32_t)c.H;
    const int64_t h = blockIdx.x - turn * (uint32_t)c.H;
    const int64_t slot = gridDim.x / (uint32_t)c.H - 1 - turn;
    const int64_t j = mn_single_pass_quotient(h, mn_single_pass_quotient(c.H, c.J));
    mn_pdl_launch_dependents();
    mn_pdl_wait();
    const mn_tile_span tile = mn_tile_at(c, MN_SINGLE_PASS_STEP, slot);
    if (tile.n_rows == 0) return;
    const float *sums = k.sums + (slot * c.H + h) * MN_SINGLE_PASS_CHUNK;
    const int thread = threadIdx.x, lane = thread % 32;
    const int column = thread / 32 * 16 + lane / 4;
    const int64_t b = tile.span.b, t = tile.span.t0 + tile.first;
    int dominant_keys[ROUNDS];    // on their way beside the sums
#pragma unroll
    for (int i = 0; i < ROUNDS; i++) {
        const int row = thread / 16 + i * ROWS;
        const bool there = row < tile.n_rows;
        dominant_keys[i] = there ? k.dominant_key[mn_single_pass_row(c, b, h, t + row)] : -1;
    }
#pragma unroll
    for (int i = 0; i < 8; i++) {
        const float4 x = *(const float4 *)(sums + i * 1024 + thread * 4);
        const int row = i * 8 + lane % 4 * 2;
        smem[row][column] = x.x, smem[row + 1][column] = x.y;
        smem[row][column + 8] = x.z, smem[row + 1][column + 8] = x.w;
    }
    __syncthreads();
    const int64_t slot0 = mn_single_pass_slot(c, tile, c.L, MN_SINGLE_PASS_KEYS);
    const int first = thread % 16 * 8;
#pragma unroll
    for (int round = 0; round < ROUNDS; round++) {
        const int row = thread / 16 + round * ROWS, dominant_key = dominant_keys[round];
        if (row >= tile.n_rows) break;
        float x[8];
#pragma unroll
        for (int i = 0; i < 8; i++) x[i] = smem[row][first + i];
        if (dominant_key >= 0) {
            const int64_t at = mn_single_pass_row(c, b, h, t + row);
            float residual = 0.0f, key[8];
            for (int i = 0; i < 8; i++) residual -=
                sums[MN_SINGLE_PASS_ACC + i * MN_SINGLE_PASS_STEP + row];
            if (first < c.K) {
                mn_load<8>(key, mn_row<mn_bf16>(p.k, b, tile.span.t0 + dominant_key, j), first);
#pragma unroll
                for (int i = 0; i < 8; i++) x[i] = fmaf(residual, key[i], x[i]);
            }
            if (first == 0) {
                k.b[at] = residual;
                k.flags[(slot0 + dominant_key / MN_SINGLE_PASS_KEYS) * c.J + j] = 1;
            }
        }
        if (!p.dq.data || first >= c.K) continue;
#pragma unroll
        for (int i = 0; i < 8; i++) x[i] *= p.scale;
        mn_store<8>(mn_row<mn_bf16>(p.dq, b, t + row, h), first, x);
    }
}

/* ---- dk of dominant keys --------------------------------------------------------------------- */

// rows looked at together; threads; rows of q, and of dk, that a thread has on their way
enum {
    MN_SINGLE_PASS_SEARCH = 4096,
    MN_SINGLE_PASS_SEARCH_THREADS = 128,
    MN_SINGLE_PASS_AT_ONCE = 16,
    MN_SINGLE_PASS_ROWS_AT_ONCE = 64,
};

/* Finds rows t + [0, n) of head h whose dominant key is one of the tile's, in order; returns how
 * many. Each thread looks at neighbouring rows. */
__device__ inline int mn_single_pass_compact(int2 *found, int *counts, const int *dominant_key,
                                             int n,
                                   int64_t first_key) {
    constexpr int each = MN_SINGLE_PASS_SEARCH / MN_SINGLE_PASS_SEARCH_THREADS;
    const int thread = threadIdx.x;
    int keys[each], count = 0;
#pragma unroll
    for (int i = 0; i < each; i++) {
        const int row = thread * each + i;
        const int64_t key = row < n ? dominant_key[row] - first_key : -1;
        keys[i] = key >= 0 && key < MN_SINGLE_PASS_KEYS ? (int)key : -1;
        count += keys[i] >= 0;
    }
    int before = count;
    for (int lanes = 1; lanes < 32; lanes *= 2) {
        const int kv_full = __shfl_up_sync(0xffffffffu, before, lanes);
        if (thread % 32 >= lanes) before += kv_full;
    }
    __syncthreads();
    if (thread % 32 == 31) counts[thread / 32] = before;
    __syncthreads();
    int all = 0;
    before -= count;
    for (int warp = 0; warp < MN_SINGLE_PASS_SEARCH_THREADS / 32; warp++) {
        if (warp < thread / 32) before += counts[warp];
        all += counts[warp];
    }
#pragma unroll
    for (int i = 0; i < each; i++) {
        if (keys[i] >= 0) found[before++] = make_int2(thread * each + i, keys[i]);
    }
    __syncthreads();
    return all;
}

/* Adds residual q of the rows that were found to their keys' sums, in order, a column a thread. */
__device__ inline void mn_single_pass_add_found(float *sum, const int2 *found, int n,
                                                const float *residual, const mn_bf16 *q,
                                                int64_t stride, int column) {
    for (int first = 0; first < n; first += MN_SINGLE_PASS_AT_ONCE) {
        float x[MN_SINGLE_PASS_AT_ONCE], by[MN_SINGLE_PASS_AT_ONCE];
#pragma unroll
        for (int i = 0; i < MN_SINGLE_PASS_AT_ONCE; i++) {
            const int row = found[min(first + i, n - 1)].x;
            x[i] = mn_float(q[row * stride + column]), by[i] = residual[row];
        }
#pragma unroll
        for (int i = 0; i < MN_SINGLE_PASS_AT_ONCE; i++) {
            if (first + i >= n) break;
            float *to = &sum[found[first + i].y * 128 + column];
            *to = fmaf(by[i], x[i], *to);
        }
    }
}

/* dk += scale sum over `n` rows of a column. */
__device__ inline void mn_single_pass_add_rows(mn_bf16 *dk, int64_t stride, const float *sum,
                                               int n, float scale) {
    for (int first = 0; first < n; first += MN_SINGLE_PASS_ROWS_AT_ONCE) {
        float x[MN_SINGLE_PASS_ROWS_AT_ONCE];
#pragma unroll
        for (int i = 0; i < MN_SINGLE_PASS_ROWS_AT_ONCE; i++) {
            x[i] = mn_float(dk[min(first + i, n - 1) * stride]);
        }
#pragma unroll
        for (int i = 0; i < MN_SINGLE_PASS_ROWS_AT_ONCE; i++) {
            if (first + i >= n) break;
            mn_put(dk + (first + i) * stride, fmaf(scale, sum[(first + i) * 128], x[i]));
        }
    }
}

/* Grid: (slots of 128 keys, J). dk (128,K) += scale residual q over the rows whose dominant key is
 * one of the 128, a thread for each column; blocks whose flag is not set return at once. */
__global__ static void __launch_bounds__(MN_SINGLE_PASS_SEARCH_THREADS)
attention_bwd_dk_correction_kernel(const __grid_constant__ mn_single_pass k) {
    extern __shared__ float sum[];    // (keys, columns)
    __shared__ int2 found[MN_SINGLE_PASS_SEARCH];
    __shared__ int counts[MN_SINGLE_PASS_SEARCH_THREADS / 32];
    const mn_attn_params &p = k.f.p;
    mn_call keys = p.call;
    keys.T = keys.L;
    const int64_t j = blockIdx.y, H = p.call.H, heads = H / keys.J;
    mn_pdl_wait();
    if (!k.flags[blockIdx.x * keys.J + j]) return;
    const mn_tile_span tile = mn_tile_at(keys, MN_SINGLE_PASS_KEYS, blockIdx.x);
    const int64_t b = tile.span.b, t0 = tile.span.t0, K = keys.K;
    const int64_t length = keys.cu_seqlens ? tile.span.length : p.call.T;
    const int64_t first = max(tile.first - mn_keys_before(p.call), (int64_t)0);
    const int column = threadIdx.x;
    for (int i = 0; i < MN_SINGLE_PASS_KEYS; i++) sum[i * 128 + column] = 0.0f;
    for (int64_t h = j * heads; h < (j + 1) * heads; h++) {
        for (int64_t t = first; t < length; t += MN_SINGLE_PASS_SEARCH) {
            const int64_t at = mn_single_pass_row(p.call, b, h, t0 + t);
            const int n = (int)min((int64_t)MN_SINGLE_PASS_SEARCH, length - t);
            const int n_found = mn_single_pass_compact(found, counts, k.dominant_key + at, n,
                                                       tile.first);
            if (column >= K) continue;
            mn_single_pass_add_found(sum, found, n_found, k.b + at,
                                     mn_row<mn_bf16>(p.q, b, t0 + t, h), p.q.stride[1], column);
        }
    }
    if (column >= K) return;
    mn_single_pass_add_rows(mn_row<mn_bf16>(p.dk, b, t0 + tile.first, j) + column,
                            p.dk.stride[1], sum + column, (int)tile.n_rows, p.scale);
}

/* ---- launches -------------------------------------------------------------------------------- */

/* Heads of a section: as many as lie in the second cache, but at least 16, so that of 132 blocks
 * that begin at the same tile 9 wait for each other, not all; and sections are even, as the last
 * one has no other's blocks beside its longest. 64 heads are 4 times 16, not 6 times 10 and 4. */
static const int64_t mn_single_pass_l2_bytes = (int64_t)64 << 20, mn_single_pass_heads = 16;

inline int64_t mn_single_pass_section(int64_t heads, int64_t head_bytes) {
    const int64_t most = mn_max(mn_single_pass_l2_bytes / head_bytes, mn_single_pass_heads);
    const int64_t sections = mn_max((heads + most - 1) / most, (int64_t)1);
    return mn_max((heads + sections - 1) / sections, (int64_t)1);
}

/* By its kind and sizes, never by its length. */
inline bool mn_single_pass_supported(const mn_attn_params &p) {
    return p.softmax && p.lse.data && p.o.data && mn_max(p.call.K, p.call.V) > 64 &&
           mn_flash_bwd_supported(p);
}

/* Offsets of the parts of the work space, in numbers of four bytes; the last is its size. */
struct mn_single_pass_layout {
    int64_t rows, semaphores, flags, n_semaphores, n_flags, sums, all;
};

inline bool mn_single_pass_layout_of(mn_single_pass_layout *to, const mn_call &c) {
    mn_call keys = c;
    keys.T = keys.L;
    int64_t sums;
    const bool ok = mn_mul_i64(&to->rows, c.B * c.T, c.H) && to->rows < INT64_MAX / 8 &&
                    mn_mul_i64(&to->n_semaphores, mn_tile_slots(c, MN_SINGLE_PASS_STEP), c.H) &&
                    mn_mul_i64(&to->n_flags, mn_tile_slots(keys, MN_SINGLE_PASS_KEYS), c.J) &&
                    mn_mul_i64(&sums, to->n_semaphores, MN_SINGLE_PASS_CHUNK);
    if (!ok) return false;
    to->semaphores = 3 * to->rows;
    to->flags = to->semaphores + to->n_semaphores;
    to->sums = (to->flags + to->n_flags + 1 + 63) / 64 * 64;    // the ticket behind the flags
    return mn_add_i64(&to->all, to->sums, sums);
}

inline bool mn_single_pass_plan(mn_plan *plan, const mn_attn_params &p) {
    mn_single_pass_layout layout;
    return mn_single_pass_layout_of(&layout, p.call) &&
           mn_mul_size(&plan->shared_bytes, (size_t)layout.all, sizeof(float));
}

inline mn_single_pass mn_single_pass_of(const mn_attn_params &p,
                                        const mn_single_pass_layout &layout, float *shared,
                          int64_t *blocks) {
    const mn_call &c = p.call;
    mn_call keys = c;
    keys.T = keys.L;
    mn_single_pass k = {};
    k.f = mn_flash_params_of(p, keys, c.J, MN_SINGLE_PASS_KEYS, 1, blocks);
    const int64_t each = c.L * (c.K + c.V) * 2 + c.H / c.J * c.T * (c.K * 6 + c.V * 2) + 1;
    const int64_t heads = c.cu_seqlens ? c.J : c.J * c.B;
    k.f.section = mn_single_pass_section(heads, each);
    k.a = shared;
    k.b = shared + layout.rows;
    k.dominant_key = (int *)(shared + 2 * layout.rows);
    k.semaphores = (int *)(shared + layout.semaphores);
    k.flags = (int *)(shared + layout.flags);
    k.ticket = k.flags + layout.n_flags;
    k.sums = shared + layout.sums;
    k.n_semaphores = layout.n_semaphores, k.n_flags = layout.n_flags;
    k.n_tiles = (int)*blocks;
    keys.H = c.J;
    k.by_tma = mn_tma_map(&k.q, p.q, c, c.K, MN_SINGLE_PASS_STEP) &&
               mn_tma_map(&k.d_o, p.d_o, c, c.V, MN_SINGLE_PASS_STEP) &&
               mn_tma_map(&k.keys, p.k, keys, c.K, MN_SINGLE_PASS_KEYS) &&
               mn_tma_map(&k.values, p.v, keys, c.V, MN_SINGLE_PASS_KEYS);
    return k;
}

inline int mn_single_pass_bwd(const mn_attn_params &p, float *shared, cudaStream_t stream) {
    const mn_call &c = p.call;
    mn_single_pass_layout layout;
    int64_t blocks;
    if (!mn_single_pass_layout_of(&layout, c)) return cudaErrorInvalidValue;
    const mn_single_pass k = mn_single_pass_of(p, layout, shared, &blocks);
    if (c.J > 65535 || blocks > INT32_MAX || layout.n_semaphores > INT32_MAX) {
        return cudaErrorNotSupported;
    }
    const int64_t groups = mn_ceil_div(c.B * c.T, (int64_t)MN_SINGLE_PASS_ROW_TOKENS) * c.H;
    const int64_t row_blocks = mn_ceil_div(groups * MN_SINGLE_PASS_ROW_GROUP,
                                           (int64_t)MN_SINGLE_PASS_ROW_THREADS);
    if (row_blocks > INT32_MAX) return cudaErrorNotSupported;
    attention_bwd_preprocess_kernel<<<(unsigned)mn_max(row_blocks, 1), MN_SINGLE_PASS_ROW_THREADS,
                                      0, stream>>>(k);
    if (blocks == 0) return mn_launch_status();
    const auto kernel = p.window ? attention_bwd_single_pass_kernel<true, false>
                                 : attention_bwd_single_pass_kernel<false, false>;
    const auto redo = p.window ? attention_bwd_single_pass_kernel<true, true>
                               : attention_bwd_single_pass_kernel<false, true>;
    const int64_t redone = mn_n_spans(c) * c.J * 2;
    /* Each launch begins while the one before ends, and waits for it (prim/pdl.cuh). */
    const int64_t begun = mn_min(blocks, (int64_t)mn_device_props_current().processors);
    int code = mn_launch_smem_behind(true, kernel, dim3((unsigned)begun), MN_FLASH_THREADS,
                                     sizeof(mn_single_pass_smem), stream, k);
    if (code == cudaSuccess && redoes_gradients && redone <= INT32_MAX) {
        code = mn_launch_smem_behind(true, redo, dim3((unsigned)redone), MN_FLASH_THREADS,
                                     sizeof(mn_single_pass_smem), stream, k);
    }
    if (code != cudaSuccess) return code;
    if (layout.n_semaphores > 0) {
        code = mn_launch_pdl(attention_bwd_dq_postprocess_kernel,
                             dim3((unsigned)layout.n_semaphores), 256, 0, stream, k);
    }
    if (code != cudaSuccess) return code;
    if (!p.dk.data) return mn_launch_status();
    return mn_launch_smem_behind(true, attention_bwd_dk_correction_kernel,
                                 dim3((unsigned)(layout.n_flags / c.J), (unsigned)c.J),
                                 MN_SINGLE_PASS_SEARCH_THREADS,
                                 MN_SINGLE_PASS_KEYS * 128 * sizeof(float), stream, k);
}

}    // namespace mneme::attention

#endif
