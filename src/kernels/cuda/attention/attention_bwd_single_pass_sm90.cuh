/* attention_bwd_single_pass_sm90.cuh - softmax attention backward in one walk, in bf16 by
 * Hopper's products, for heads of 72 to 128 columns where forward left its sums and o
 * (attention_bwd_flash_sm90.cuh has the equations and serves the rest).
 *
 * A block has 128 keys and scans over the queries that see them, the last ones first, 64 at a time:
 *
 *   z = k q'   w = 2^(c z - a)   g = v do'   dz = w (g - b)       with keys as rows
 *   dv += w do                   dk += dz q
 *   sums += k'dz                                                  of all keys: dq turned over
 *
 * Five products. The sums of a tile of queries are of all blocks that walk over it. They lie in
 * work space, in float32 and as the threads' registers hold them, and blocks add to them in the
 * order of their keys: each waits for its turn, a number in memory, so that results have the same
 * bits each time. Blocks take their work in that order too, so those waited for have begun; they
 * are ahead by as much as adding takes, and rarely waited for.
 *
 * b = o.do lacks what rounding o to bf16 left out. It matters where a key has most of a row's
 * weight and g - b must cancel: the walk notes that key and sums dz over all keys, which should be
 * 0; what is left is taken from the cotangent of that key's score afterwards, in dq and in dk.
 *
 * Kernels: the rows' numbers; the walk; dq from the sums; dk of noted keys. */
#ifndef MN_KERNELS_CUDA_ATTENTION_ATTENTION_BWD_SINGLE_PASS_SM90_CUH
#define MN_KERNELS_CUDA_ATTENTION_ATTENTION_BWD_SINGLE_PASS_SM90_CUH

#include "kernels/cuda/attention/attention_bwd_flash_sm90.cuh"

namespace mneme::attention {

enum {
    MN_ONCE_KEYS = 128,
    MN_ONCE_STEP = 64,                              // queries of a tile
    MN_ONCE_SUMS = 128 * MN_ONCE_STEP,              // numbers of dq of a tile
    MN_ONCE_CHUNK = MN_ONCE_SUMS + 8 * MN_ONCE_STEP, // and those of each warp's sums of dz
    MN_ONCE_COPIERS = 64,
    MN_ONCE_PITCH = 132,
};

/* Work space. Planes of rows are (B,H,T), turns and sums (slots of 64 queries, H), flags (slots of
 * 128 keys, J). */
struct mn_once {
    mn_flash f;
    float *a, *b;      // later in b: what the noted key's score lacks
    int *noted;        // a key of the sequence, or -1
    int *turns, *flags, *ticket;
    float *sums;
    int64_t n_turns, n_flags;
};

__device__ inline int64_t mn_once_row(const mn_call &call, int64_t b, int64_t h, int64_t t) {
    return (b * call.H + h) * call.T + t;
}

/* The slot of the first tile of a sequence. */
__device__ inline int64_t mn_once_slot(const mn_call &call, const mn_tile_span &tile, int64_t T,
                                       int64_t rows) {
    return call.cu_seqlens ? tile.span.t0 / rows + tile.n : tile.n * ((T + rows - 1) / rows);
}

/* ---- rows ------------------------------------------------------------------------------------ */

enum { MN_ONCE_ROW_THREADS = 256, MN_ONCE_ROW_GROUP = 16 };

/* a = lse log2 e and b = o.do of every row, by 16 threads; and what the walk finds cleared. */
__global__ static void __launch_bounds__(MN_ONCE_ROW_THREADS)
mn_once_rows_kernel(const __grid_constant__ mn_once k) {
    const mn_reads &p = k.f.p;
    const mn_call &c = p.call;
    const int64_t thread = blockIdx.x * (int64_t)MN_ONCE_ROW_THREADS + threadIdx.x;
    const int64_t all = gridDim.x * (int64_t)MN_ONCE_ROW_THREADS, n_rows = c.B * c.T * c.H;
    const int column = threadIdx.x % MN_ONCE_ROW_GROUP * 8;
    for (int64_t i = thread; i < k.n_turns; i += all) k.turns[i] = 0;
    for (int64_t i = thread; i < k.n_flags; i += all) k.flags[i] = 0;
    if (thread == 0) *k.ticket = 0;
    const int64_t row0 = thread / MN_ONCE_ROW_GROUP;
    for (int64_t row = row0; row - row0 % 2 < n_rows; row += all / MN_ONCE_ROW_GROUP) {
        const int64_t h = row % c.H, t = row / c.H % c.T, b = row / c.H / c.T;
        float sum = 0.0f;
        if (row < n_rows && column < c.V) {
            float x[8], y[8];
            mn_load<8>(x, mn_row<mn_bf16>(p.o, b, t, h), column);
            mn_load<8>(y, mn_row<mn_bf16>(p.d_o, b, t, h), column);
#pragma unroll
            for (int i = 0; i < 8; i++) sum = fmaf(x[i], y[i], sum);
        }
#pragma unroll
        for (int lanes = MN_ONCE_ROW_GROUP / 2; lanes > 0; lanes >>= 1) {
            sum += __shfl_xor_sync(0xffffffffu, sum, lanes);
        }
        if (column > 0 || row >= n_rows) continue;
        const int64_t at = mn_once_row(c, b, h, t);
        k.a[at] = *mn_row<float>(p.lse, b, t, h) * 1.4426950408889634f;
        k.b[at] = sum;
        k.noted[at] = -1;
    }
}

/* ---- the walk -------------------------------------------------------------------------------- */

/* What a block does: `n_keys` keys of a sequence from `key` on, of head h, seen by the sequence's
 * queries from `seen` on (before its first, where that is negative). The walk has n tiles of
 * queries from row `first` on, the last ones first, for each of `all` / n heads. */
struct mn_once_job {
    int64_t b, t0, h, head0;
    int64_t slot;    // of the sequence's first tile of queries
    int key, n_keys, seen, length, first, n, all;
};

struct alignas(1024) mn_once_smem {
    static constexpr int tile = MN_ONCE_STEP * 128 * 2;
    unsigned char a[2 * tile], b[2 * tile], x[2][tile], y[2][tile];    // k, v; q, do
    unsigned char dz[2][tile];                                        // rows are keys
    float dq[MN_ONCE_SUMS];
    float off[4][8 * MN_ONCE_STEP];
    /* Of a stage: numbers of its queries, where to note keys, queries that are there, and queries
     * from the first that sees the block's first key. */
    float rows[2][2][MN_ONCE_STEP];
    int *noted[2];
    int left[2], past[2];
    uint64_t there, stage_device[2], stage_free[2], dz_there[2], dz_free[2], dq_there[2], dq_free;
    mn_once_job job;
};

__device__ inline mn_once_job mn_once_job_of(const mn_once &k, int64_t unit) {
    const mn_call &call = k.f.p.call;
    mn_call keys = call;
    keys.T = keys.L;
    const mn_flash_place at = mn_flash_find(k.f, unit, keys, keys.J, MN_ONCE_KEYS, false);
    const int64_t heads = call.H / call.J;
    mn_once_job job;
    job.b = at.tile.span.b, job.t0 = at.tile.span.t0;
    job.h = at.h, job.head0 = at.h * heads;
    job.slot = mn_once_slot(call, at.tile, call.T, MN_ONCE_STEP);
    job.key = (int)at.tile.first, job.n_keys = (int)at.tile.n_rows;
    job.seen = (int)(at.tile.first - mn_keys_before(call));
    job.length = (int)(call.cu_seqlens ? at.tile.span.length : call.T);
    job.first = max(job.seen, 0) / MN_ONCE_STEP * MN_ONCE_STEP;
    job.n = max((job.length - job.first + MN_ONCE_STEP - 1) / MN_ONCE_STEP, 0);
    job.all = job.n * (int)heads;
    return job;
}

/* The walk: query t of head h is the first of a tile; next() goes to the tile after it. */
struct mn_once_scan {
    int t, last, first;
    int64_t h;

    __device__ explicit mn_once_scan(const mn_once_job &job)
        : t(job.first + (job.n - 1) * MN_ONCE_STEP), last(t), first(job.first), h(job.head0) {}

    __device__ void next() {
        t -= MN_ONCE_STEP;
        if (t >= first) return;
        t = last;
        h++;
    }
};

#if MN_HAS_WGMMA

/* 64 rows of up to 128 columns to a tile, the top of one of SMEM_TILE rows; thread i of 64 brings
 * piece i % 16 of every fourth row. */
template <int SMEM_TILE>
__device__ inline void mn_once_copy_rows(uint32_t to, const mn_bf16 *from, int64_t stride,
                                         int n_rows, int width, int i) {
    const int piece = i % 16, row = i / 16;
    const uint32_t even = to + mn_tile_byte(SMEM_TILE, row, piece * 8);
    const uint32_t odd = to + mn_tile_byte(SMEM_TILE, row + 4, piece * 8);
    const mn_bf16 *at = from + row * stride + piece * 8;
    const int left = piece * 8 < width ? n_rows - row : 0;
#pragma unroll
    for (int r = 0; r < MN_ONCE_STEP; r += 4) {
        mn_copy_16((r % 8 ? odd : even) + r / 8 * 1024, at, r < left);    // else nothing is read
        at += 4 * stride;
    }
}

/* Two warps bring keys and values, then queries and cotangents with their rows' numbers. */
__device__ inline void mn_once_copy(mn_once_smem &room, const mn_once &k) {
    const mn_once_job &job = room.job;
    const mn_reads &p = k.f.p;
    const int i = threadIdx.x, K = (int)p.call.K, V = (int)p.call.V;
    for (int r = 0; r < MN_ONCE_KEYS; r += MN_ONCE_STEP) {
        const int left = job.n_keys - r;
        const int64_t t = job.t0 + job.key + (left > 0 ? r : 0);
        mn_once_copy_rows<128>(mn_smem_addr(room.a) + r * 128,
                               mn_row<mn_bf16>(p.k, job.b, t, job.h), p.k.stride[1], left, K, i);
        mn_once_copy_rows<128>(mn_smem_addr(room.b) + r * 128,
                               mn_row<mn_bf16>(p.v, job.b, t, job.h), p.v.stride[1], left, V, i);
    }
    mn_once_scan walk(job);
    for (int n = 0; n < job.all; n++, walk.next()) {
        const int stage = n % 2, left = job.length - walk.t;
        const int64_t t = job.t0 + walk.t, row = mn_once_row(p.call, job.b, walk.h, t);
        const float a = i < left ? k.a[row + i] : 0.0f, b = i < left ? k.b[row + i] : 0.0f;
        mn_mbarrier_wait(&room.stage_free[stage], (n / 2 & 1) ^ 1);
        mn_once_copy_rows<64>(mn_smem_addr(room.x[stage]),
                              mn_row<mn_bf16>(p.q, job.b, t, walk.h),
                              p.q.stride[1], left, K, i);
        mn_once_copy_rows<64>(mn_smem_addr(room.y[stage]),
                              mn_row<mn_bf16>(p.d_o, job.b, t, walk.h),
                              p.d_o.stride[1], left, V, i);
        if (i == 0) {
            room.noted[stage] = k.noted + row;
            room.left[stage] = left;
            room.past[stage] = walk.t - job.seen;
        }
        room.rows[stage][0][i] = a;
        room.rows[stage][1][i] = b;
        mn_copies_done();
        if (n == 0) mn_mbarrier_arrive(&room.there);
        mn_mbarrier_arrive(&room.stage_device[stage]);
    }
}

/* `bytes` of shared memory onto or over as many of device memory, by the copy engine. */
__device__ inline void mn_once_tma(float *to, const float *from, int bytes, bool add) {
    if (add) {
        asm volatile("cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32 [%0], [%1], %2;"
                     ::"l"(to), "r"(mn_smem_addr(from)), "r"(bytes) : "memory");
    } else {
        asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;"
                     ::"l"(to), "r"(mn_smem_addr(from)), "r"(bytes) : "memory");
    }
}

/* One thread of two: adds every second tile of dq to the sums of all blocks when it is the block's
 * turn, which is after those with earlier keys. */
__device__ inline void mn_once_add(mn_once_smem &room, const mn_once &k, int which) {
    const mn_once_job &job = room.job;
    const int rank = job.key / MN_ONCE_KEYS;
    mn_once_scan walk(job);
    for (int n = 0; n < job.all; n++, walk.next()) {
        if (n % 2 != which) continue;
        const int64_t chunk = (job.slot + walk.t / MN_ONCE_STEP) * k.f.p.call.H + walk.h;
        int *turn = k.turns + chunk;
        float *to = k.sums + chunk * MN_ONCE_CHUNK;
        int now = 0;
        while (rank > 0 && now != rank) {
            asm volatile("ld.acquire.gpu.global.b32 %0, [%1];" : "=r"(now) : "l"(turn) : "memory");
        }
        mn_mbarrier_wait(&room.dq_there[which], n / 2 & 1);
        asm volatile("fence.proxy.async;" ::: "memory");
        mn_once_tma(to, room.dq, MN_ONCE_SUMS * 4, rank > 0);
        mn_once_tma(to + MN_ONCE_SUMS, room.off[n % 4], 8 * MN_ONCE_STEP * 4, rank > 0);
        asm volatile("cp.async.bulk.commit_group;" ::: "memory");
        asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory");
        mn_mbarrier_arrive(&room.dq_free);
        asm volatile("cp.async.bulk.wait_group 0;\n\tfence.proxy.async;" ::: "memory");
        asm volatile("fence.acq_rel.gpu;\n\tst.release.gpu.global.b32 [%0], %1;"
                     ::"l"(turn), "r"(rank + 1) : "memory");
    }
}

/* Of 2 N sums a thread keeps N, the upper ones in every second 2 N lanes, and adds those of the
 * thread that is 2 N lanes away. */
template <int N>
__device__ inline void mn_once_halve(float (&sum)[16]) {
    const bool upper = threadIdx.x & (2 * N);
#pragma unroll
    for (int i = 0; i < N; i++) {
        const float x = sum[i], y = sum[i + N];
        sum[i] = (upper ? y : x) + __shfl_xor_sync(0xffffffffu, upper ? x : y, 2 * N);
    }
}

/* Numbers in the halves of a word. */
__device__ inline float2 mn_once_pair(uint32_t word) {
    return make_float2(__uint_as_float(word << 16), __uint_as_float(word & 0xffff0000u));
}

/* Sums of a thread's two rows of dz over the eight threads of the warp that have the same columns;
 * thread i of the warp gets those of columns 2 i and 2 i + 1. */
__device__ inline float2 mn_once_sum_rows(const uint32_t (&dz)[16]) {
    float sum[16];
#pragma unroll
    for (int i = 0; i < 16; i += 2) {
        const float2 x = mn_once_pair(dz[i]), y = mn_once_pair(dz[i + 1]);
        sum[i] = x.x + y.x;
        sum[i + 1] = x.y + y.y;
    }
    mn_once_halve<8>(sum);
    mn_once_halve<4>(sum);
    mn_once_halve<2>(sum);
    return make_float2(sum[0], sum[1]);
}

/* 64 sums of rows and columns to where the engine finds them, as registers lie. */
__device__ inline void mn_once_put(mn_once_smem &room, const float (&dq)[32], int n) {
    const int thread = threadIdx.x - MN_GROUP;
    mn_mbarrier_wait(&room.dq_free, (n & 1) ^ 1);
#pragma unroll
    for (int i = 0; i < 32; i += 4) {
        *(float4 *)&room.dq[i * 256 + thread * 4] = make_float4(dq[i], dq[i + 1], dq[i + 2],
                                                                dq[i + 3]);
    }
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
    __syncwarp();
    if (thread % 32 == 0) mn_mbarrier_arrive(&room.dq_there[n & 1]);
}

/* Starts dq = k'dz for 64 columns of the keys: rows of dq are columns of a head. */
__device__ inline void mn_once_dq_start(float (&dq)[32], uint32_t keys, uint32_t dz) {
#pragma unroll
    for (int i = 0; i < MN_ONCE_KEYS; i += 16) {
        mn_product<1, 1>(dq, mn_tile_seen(keys + i * 128, 16), mn_tile_seen(dz + i * 128, 16),
                         i > 0);
    }
}

/* Notes keys that have more than half of the weight of a query. */
__device__ inline void mn_once_note(const mn_once_smem &room, const uint32_t (&w)[16], int stage,
                                    int row, int column) {
    uint32_t most = w[0];
#pragma unroll
    for (int i = 1; i < 16; i++) {
        asm("max.bf16x2 %0, %0, %1;" : "+r"(most) : "r"(w[i]));
    }
    const float2 pair = mn_once_pair(most);
    if (!(fmaxf(pair.x, pair.y) > 0.5f)) return;
    int *noted = room.noted[stage] + column;
    const int left = room.left[stage] - column, key = room.job.key + row;
#pragma unroll
    for (int i = 0; i < 16; i++) {
        const float2 x = mn_once_pair(w[i]);
        const int query = i / 2 * 8;
        if (x.x > 0.5f && query < left) noted[query] = key + i % 2 * 8;
        if (x.y > 0.5f && query + 1 < left) noted[query + 1] = key + i % 2 * 8;
    }
}

/* Multiplies a group's 64 keys. Products of a tile are waited for when the next tile's have begun;
 * dq of a tile is made one tile later, when both groups have written their dz. */
__device__ inline void mn_once_multiply(mn_once_smem &room, const mn_once &k) {
    const mn_once_job &job = room.job;
    const mn_reads &p = k.f.p;
    const int half = __shfl_sync(0xffffffffu, threadIdx.x / MN_GROUP - 1, 0);
    const int thread = threadIdx.x % MN_GROUP;
    const int row = half * 64 + thread / 32 * 16 + thread % 32 / 4, column = thread % 4 * 2;
    const float scale = p.scale * 1.4426950408889634f;
    const uint32_t keys = mn_smem_addr(room.a) + half * 8192;
    const uint32_t values = mn_smem_addr(room.b) + half * 8192;
    const uint32_t turned = mn_smem_addr(room.a) + half * 16384;    // 64 columns of all keys
    float z[32], g[32], dq[32] = {}, dk[64] = {}, dv[64] = {};
    uint32_t w[16], dz[16];
    const auto start_scores = [&](int n) {
        mn_mbarrier_wait(&room.stage_device[n & 1], n / 2 & 1);
        mn_products_start();
        mn_scores_start<128, 128, 64>(z, keys, mn_smem_addr(room.x[n & 1]));
        mn_products_end();
    };
    /* From scores to weights and cotangents. */
    const auto weigh = [&](int n) {
        const int stage = n & 1;
        mn_products_start();
        mn_scores_start<128, 128, 64>(g, values, mn_smem_addr(room.y[stage]));
        mn_products_end();
        mn_products_wait<1>();
        mn_keep(z);
        const int unseen = row - room.past[stage] - column;    // queries before the first to see
        if (unseen > -8) {
#pragma unroll
            for (int i = 0; i < 32; i++) {
                if (i / 4 * 8 + i % 2 < unseen + i % 4 / 2 * 8) z[i] = -INFINITY;
            }
        }
#pragma unroll
        for (int i = 0; i < 32; i += 4) {
            const float2 a = *(const float2 *)&room.rows[stage][0][i / 4 * 8 + column];
#pragma unroll
            for (int j = i; j < i + 4; j++) {
                z[j] = mn_exp2(fmaf(z[j], scale, j % 2 ? -a.y : -a.x));
            }
        }
#pragma unroll
        for (int i = 0; i < 16; i++) w[i] = mn_pair(z[2 * i], z[2 * i + 1]);
        mn_products_wait<0>();
        mn_keep(g);
#pragma unroll
        for (int i = 0; i < 32; i += 4) {
            const float2 b = *(const float2 *)&room.rows[stage][1][i / 4 * 8 + column];
#pragma unroll
            for (int j = i; j < i + 4; j++) g[j] = z[j] * (g[j] - (j % 2 ? b.y : b.x));
        }
#pragma unroll
        for (int i = 0; i < 16; i++) dz[i] = mn_pair(g[2 * i], g[2 * i + 1]);
        mn_mbarrier_wait(&room.dz_free[stage], (n / 2 & 1) ^ 1);
#pragma unroll
        for (int i = 0; i < 16; i++) {
            const uint32_t to = mn_tile_byte(128, row + i % 2 * 8, i / 2 * 8 + column);
            *(uint32_t *)(room.dz[stage] + to) = dz[i];
        }
        asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
        __syncwarp();
        if (thread % 32 == 0) mn_mbarrier_arrive(&room.dz_there[stage]);
    };
    /* What a tile adds, and dq of the one before. */
    const auto start_sums = [&](int n) {
        if (n > 0) mn_mbarrier_wait(&room.dz_there[n & 1 ^ 1], (n - 1) / 2 & 1);
        mn_keep(w), mn_keep(dz);
        mn_products_start();
        mn_read_start<64, 128>(dv, w, mn_smem_addr(room.y[n & 1]), true);
        mn_read_start<64, 128>(dk, dz, mn_smem_addr(room.x[n & 1]), true);
        mn_once_dq_start(dq, turned, mn_smem_addr(room.dz[n & 1 ^ 1]));    // of none at first
        mn_products_end();
        const float2 off = mn_once_sum_rows(dz);
        *(float2 *)&room.off[n & 3][(half * 4 + thread / 32) * 64 + thread % 32 * 2] = off;
        mn_once_note(room, w, n & 1, row, column);
    };
    const auto end_sums = [&](int n) {
        if (thread % 32 == 0) mn_mbarrier_arrive(&room.stage_free[n & 1]);
        if (n == 0) return;
        if (thread % 32 == 0) mn_mbarrier_arrive(&room.dz_free[n & 1 ^ 1]);
        mn_once_put(room, dq, n - 1);
    };
    const int all = job.all;
    if (all > 0) {
        mn_mbarrier_wait(&room.there, 0);
        start_scores(0);
        weigh(0);
        const int last = all - 1;
        for (int n = 1; n < all; n++) {
            start_sums(n - 1);
            mn_products_wait<0>();
            mn_keep(dq), mn_keep(dk), mn_keep(dv);
            start_scores(n);
            end_sums(n - 1);
            weigh(n);
        }
        start_sums(last);
        mn_products_wait<0>();
        mn_keep(dq);
        end_sums(last);
        mn_mbarrier_wait(&room.dz_there[last & 1], last / 2 & 1);
        mn_products_start();
        mn_once_dq_start(dq, turned, mn_smem_addr(room.dz[last & 1]));
        mn_products_end();
        mn_products_wait<0>();
        mn_keep(dq);
        mn_once_put(room, dq, last);
    }
    mn_keep(dk), mn_keep(dv);
    asm volatile("bar.sync 3, 256;" ::: "memory");    // both groups are done with k
    const int64_t first = job.t0 + job.key;
    mn_back_put<128>(room.a, dk, p.scale, p.dk, job.b, first, job.h, job.n_keys, (int)p.call.K);
    mn_back_put<128>(room.b, dv, 1.0f, p.dv, job.b, first, job.h, job.n_keys, (int)p.call.V);
}

#endif

__global__ static void __launch_bounds__(MN_FLASH_THREADS, 1)
mn_once_scan_kernel(const __grid_constant__ mn_once k) {
#if MN_HAS_WGMMA
    extern __shared__ __align__(1024) unsigned char bytes[];
    mn_once_smem &room = *(mn_once_smem *)bytes;
    if (threadIdx.x == 0) {
        room.job = mn_once_job_of(k, atomicAdd(k.ticket, 1));
        mn_mbarrier_init(&room.there, MN_ONCE_COPIERS);
        mn_mbarrier_init(&room.dq_free, 1);
        for (int i = 0; i < 2; i++) {
            mn_mbarrier_init(&room.stage_device[i], MN_ONCE_COPIERS);
            mn_mbarrier_init(&room.stage_free[i], 8);
            mn_mbarrier_init(&room.dz_there[i], 8);
            mn_mbarrier_init(&room.dz_free[i], 8);
            mn_mbarrier_init(&room.dq_there[i], 8);
        }
    }
    __syncthreads();
    if (room.job.n_keys == 0) return;
    if (threadIdx.x < MN_GROUP) {
        asm volatile("setmaxnreg.dec.sync.aligned.u32 40;");
        const int warp = threadIdx.x / 32;
        if (threadIdx.x < MN_ONCE_COPIERS) mn_once_copy(room, k);
        else if (threadIdx.x % 32 == 0) mn_once_add(room, k, warp & 1);
    } else {
        asm volatile("setmaxnreg.inc.sync.aligned.u32 232;");
        mn_once_multiply(room, k);
    }
#endif
}

/* ---- dq -------------------------------------------------------------------------------------- */

/* dq of 64 queries of a head from the sums. What the key of a row's note lacks is put right, kept
 * for dk, and its tile of keys marked. */
__global__ static void __launch_bounds__(256) mn_once_dq_kernel(const __grid_constant__ mn_once k) {
    __shared__ __align__(16) float room[MN_ONCE_STEP][MN_ONCE_PITCH];
    const mn_reads &p = k.f.p;
    const mn_call &c = p.call;
    const int64_t slot = blockIdx.x, h = blockIdx.y, j = h / (c.H / c.J);
    const mn_tile_span tile = mn_tile_at(c, MN_ONCE_STEP, slot);
    if (tile.n_rows == 0) return;
    const float *sums = k.sums + (slot * c.H + h) * MN_ONCE_CHUNK;
    const int thread = threadIdx.x, lane = thread % 32;
    const int column = thread / 32 * 16 + lane / 4;
#pragma unroll
    for (int i = 0; i < 8; i++) {
        const float4 x = *(const float4 *)(sums + i * 1024 + thread * 4);
        const int row = i * 8 + lane % 4 * 2;
        room[row][column] = x.x, room[row + 1][column] = x.y;
        room[row][column + 8] = x.z, room[row + 1][column + 8] = x.w;
    }
    __syncthreads();
    const int64_t b = tile.span.b, t = tile.span.t0 + tile.first;
    const int64_t slot0 = mn_once_slot(c, tile, c.L, MN_ONCE_KEYS);
    const int first = thread % 16 * 8;
    for (int row = thread / 16; row < tile.n_rows; row += 16) {
        float x[8];
#pragma unroll
        for (int i = 0; i < 8; i++) x[i] = room[row][first + i];
        const int64_t at = mn_once_row(c, b, h, t + row);
        const int noted = k.noted[at];
        if (noted >= 0) {
            float lacks = 0.0f, key[8];
            for (int i = 0; i < 8; i++) lacks -= sums[MN_ONCE_SUMS + i * MN_ONCE_STEP + row];
            if (first < c.K) {
                mn_load<8>(key, mn_row<mn_bf16>(p.k, b, tile.span.t0 + noted, j), first);
#pragma unroll
                for (int i = 0; i < 8; i++) x[i] = fmaf(lacks, key[i], x[i]);
            }
            if (first == 0) {
                k.b[at] = lacks;
                k.flags[(slot0 + noted / MN_ONCE_KEYS) * c.J + j] = 1;
            }
        }
        if (!p.dq.data || first >= c.K) continue;
#pragma unroll
        for (int i = 0; i < 8; i++) x[i] *= p.scale;
        mn_store<8>(mn_row<mn_bf16>(p.dq, b, t + row, h), first, x);
    }
}

/* ---- dk of noted keys ------------------------------------------------------------------------ */

enum { MN_ONCE_LOOK = 1024, MN_ONCE_LOOKERS = 128 };    // rows looked at together; threads

/* Rows t + [0, n) of head h that noted one of the tile's keys, in order; how many they are. Each
 * thread looks at neighbouring rows. */
__device__ inline int mn_once_find(int2 *found, int *counts, const int *noted, int n,
                                   int64_t first_key) {
    constexpr int each = MN_ONCE_LOOK / MN_ONCE_LOOKERS;
    const int thread = threadIdx.x;
    int keys[each], count = 0;
#pragma unroll
    for (int i = 0; i < each; i++) {
        const int row = thread * each + i;
        const int64_t key = row < n ? noted[row] - first_key : -1;
        keys[i] = key >= 0 && key < MN_ONCE_KEYS ? (int)key : -1;
        count += keys[i] >= 0;
    }
    int before = count;
    for (int lanes = 1; lanes < 32; lanes *= 2) {
        const int there = __shfl_up_sync(0xffffffffu, before, lanes);
        if (thread % 32 >= lanes) before += there;
    }
    __syncthreads();
    if (thread % 32 == 31) counts[thread / 32] = before;
    __syncthreads();
    int all = 0;
    before -= count;
    for (int warp = 0; warp < MN_ONCE_LOOKERS / 32; warp++) {
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

/* dk += scale lacks q over the rows that noted one of 128 keys, a thread for each column. */
__global__ static void __launch_bounds__(MN_ONCE_LOOKERS)
mn_once_dk_kernel(const __grid_constant__ mn_once k) {
    extern __shared__ float sum[];    // (keys, columns)
    __shared__ int2 found[MN_ONCE_LOOK];
    __shared__ int counts[MN_ONCE_LOOKERS / 32];
    const mn_reads &p = k.f.p;
    mn_call keys = p.call;
    keys.T = keys.L;
    const int64_t j = blockIdx.y, H = p.call.H, heads = H / keys.J;
    if (!k.flags[blockIdx.x * keys.J + j]) return;
    const mn_tile_span tile = mn_tile_at(keys, MN_ONCE_KEYS, blockIdx.x);
    const int64_t b = tile.span.b, t0 = tile.span.t0, K = keys.K;
    const int64_t length = keys.cu_seqlens ? tile.span.length : p.call.T;
    const int64_t first = max(tile.first - mn_keys_before(p.call), (int64_t)0);
    const int column = threadIdx.x;
    for (int i = 0; i < MN_ONCE_KEYS; i++) sum[i * 128 + column] = 0.0f;
    for (int64_t h = j * heads; h < (j + 1) * heads; h++) {
        for (int64_t t = first; t < length; t += MN_ONCE_LOOK) {
            const int64_t at = mn_once_row(p.call, b, h, t0 + t);
            const int n = (int)min((int64_t)MN_ONCE_LOOK, length - t);
            const int n_found = mn_once_find(found, counts, k.noted + at, n, tile.first);
            for (int i = 0; i < n_found && column < K; i++) {
                const int row = found[i].x;
                const mn_bf16 *q = mn_row<mn_bf16>(p.q, b, t0 + t + row, h);
                float *to = &sum[found[i].y * 128 + column];
                *to = fmaf(k.b[at + row], mn_float(q[column]), *to);
            }
        }
    }
    for (int i = 0; i < tile.n_rows && column < K; i++) {
        mn_bf16 *to = mn_row<mn_bf16>(p.dk, b, t0 + tile.first + i, j) + column;
        mn_put(to, fmaf(p.scale, sum[i * 128 + column], mn_float(*to)));
    }
}

/* ---- launches -------------------------------------------------------------------------------- */

static const int64_t mn_once_cache = (int64_t)64 << 20;    // bytes that a section goes over

/* By its kind and sizes, never by its length. */
inline bool mn_once_serves(const mn_reads &p) {
    return p.softmax && p.lse.data && p.o.data && mn_max(p.call.K, p.call.V) > 64 &&
           mn_flash_serves_back(p);
}

/* Offsets of the parts of the work space, in numbers of four bytes; the last is its size. */
struct mn_once_parts {
    int64_t rows, turns, flags, n_turns, n_flags, sums, all;
};

inline bool mn_once_parts_of(mn_once_parts *to, const mn_call &c) {
    mn_call keys = c;
    keys.T = keys.L;
    int64_t sums;
    const bool ok = mn_mul_i64(&to->rows, c.B * c.T, c.H) && to->rows < INT64_MAX / 8 &&
                    mn_mul_i64(&to->n_turns, mn_tile_slots(c, MN_ONCE_STEP), c.H) &&
                    mn_mul_i64(&to->n_flags, mn_tile_slots(keys, MN_ONCE_KEYS), c.J) &&
                    mn_mul_i64(&sums, to->n_turns, MN_ONCE_CHUNK);
    if (!ok) return false;
    to->turns = 3 * to->rows;
    to->flags = to->turns + to->n_turns;
    to->sums = (to->flags + to->n_flags + 1 + 63) / 64 * 64;    // the ticket behind the flags
    return mn_add_i64(&to->all, to->sums, sums);
}

inline bool mn_once_plan(mn_plan *plan, const mn_reads &p) {
    mn_once_parts parts;
    return mn_once_parts_of(&parts, p.call) &&
           mn_mul_size(&plan->shared_bytes, (size_t)parts.all, sizeof(float));
}

inline mn_once mn_once_of(const mn_reads &p, const mn_once_parts &parts, float *shared,
                          int64_t *blocks) {
    const mn_call &c = p.call;
    mn_call keys = c;
    keys.T = keys.L;
    mn_once k = {};
    k.f = mn_flash_of(p, keys, c.J, MN_ONCE_KEYS, 1, blocks);
    const int64_t each = c.L * (c.K + c.V) * 2 + c.H / c.J * c.T * (c.K * 6 + c.V * 2) + 1;
    const int64_t heads = c.cu_seqlens ? c.J : c.J * c.B;
    k.f.section = mn_min(mn_max(mn_once_cache / each, 1), heads);
    k.a = shared;
    k.b = shared + parts.rows;
    k.noted = (int *)(shared + 2 * parts.rows);
    k.turns = (int *)(shared + parts.turns);
    k.flags = (int *)(shared + parts.flags);
    k.ticket = k.flags + parts.n_flags;
    k.sums = shared + parts.sums;
    k.n_turns = parts.n_turns, k.n_flags = parts.n_flags;
    return k;
}

inline int mn_once_backward(const mn_reads &p, float *shared, cudaStream_t stream) {
    const mn_call &c = p.call;
    mn_once_parts parts;
    int64_t blocks;
    if (!mn_once_parts_of(&parts, c)) return cudaErrorInvalidValue;
    const mn_once k = mn_once_of(p, parts, shared, &blocks);
    if (c.H > 65535 || blocks > INT32_MAX) return cudaErrorNotSupported;
    const int64_t groups = MN_ONCE_ROW_THREADS / MN_ONCE_ROW_GROUP;
    mn_once_rows_kernel<<<mn_blocks(parts.rows, groups), MN_ONCE_ROW_THREADS, 0, stream>>>(k);
    if (blocks == 0) return mn_launch_status();
    const int code = mn_launch_smem(mn_once_scan_kernel, dim3((unsigned)blocks),
                                         MN_FLASH_THREADS, sizeof(mn_once_smem), stream, k);
    if (code != cudaSuccess) return code;
    const dim3 queries((unsigned)(parts.n_turns / c.H), (unsigned)c.H);
    if (parts.n_turns > 0) mn_once_dq_kernel<<<queries, 256, 0, stream>>>(k);
    const dim3 tiles((unsigned)(parts.n_flags / c.J), (unsigned)c.J);
    if (!p.dk.data) return mn_launch_status();
    return mn_launch_smem(mn_once_dk_kernel, tiles, 128, MN_ONCE_KEYS * 128 * sizeof(float),
                               stream, k);
}

}    // namespace mneme::attention

#endif
