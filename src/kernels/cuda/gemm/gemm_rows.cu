/* gemm_rows.cu - c = a b' (+ c, + onto, + bias) in bf16 for the rows of sequences that decode
 * together: any number of them, each with the same bits whatever that is.
 *
 * A block has 64 rows of the weight b, BM rows of a and a part of K; both come through shared
 * memory, 64 of K a stage, several stages ahead: on Hopper by TMA, for wgmma, elsewhere by
 * cp.async, for mma.sync (a fence between cp.async and wgmma would wait for all stages that are on
 * their way). The weight is the left factor of the tensor cores, so that eight rows of a are a
 * tile. An element is one accumulator for each part of K, which takes its part sixteen at a time,
 * in order; blocks of a cluster have the parts of an element, and one of them adds these in their
 * order. How many parts there are follows from N and K alone: narrow weights need them to keep all
 * processors busy. Weights that are older than the launch in front are asked for before it has
 * ended. Several weights of one a are one launch. The columns of a block are two runs of 32
 * neighbours: those of a gate and those that it opens, where the product ends in such a
 * function. */
#include "kernels/cuda/elementwise/elementwise_fwd.cuh"
#include "kernels/cuda/gemm/gemm_fallback.h"
#include "kernels/cuda/prim/device_props.h"
#include "kernels/cuda/prim/pdl.cuh"
#include "kernels/cuda/prim/sync.cuh"
#include "kernels/cuda/prim/tma.cuh"

namespace mneme::gemm {

enum { ROWS_THREADS = 128, ROWS_N = 64, ROWS_K = 64, ROWS_BYTES = 2 * ROWS_K, ROWS_VEC = 8 };
enum { ROWS_CLUSTER = 8, ROWS_BLOCKS = 180, ROWS_STRIDE = ROWS_N + 4, ROWS_HALF = ROWS_N / 2 };

template <int BM>
struct rows_tile {
    static constexpr int tiles = BM / 8;
    static constexpr int stage = (ROWS_N + BM) * ROWS_BYTES;
    static constexpr int stages = stage <= 12288 ? 6 : stage <= 16384 ? 5 : 4;
    static constexpr int smem = stages * stage;
    static_assert(smem >= BM * ROWS_STRIDE * 4, "sums fit where the factors were");
};

/* Sixteen bytes on their way to shared memory; zeros where `there` is false. */
__device__ static void rows_fetch(uint32_t to, const void *from, bool there) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;\n"
                 :: "r"(to), "l"(from), "r"(there ? 16 : 0) : "memory");
}

/* COUNT rows of ROWS_K elements of K from k on, half of them from row0 on and half from row1 on;
 * 16-byte vectors are swizzled by the row. */
template <int COUNT>
__device__ static void rows_load(uint32_t to, const mn_bf16 *from, int64_t row0, int64_t row1,
                                 int64_t n_rows, int64_t stride, int64_t k, int64_t K) {
    static_assert(COUNT * ROWS_VEC % ROWS_THREADS == 0 || COUNT == 8, "whole rounds");
#pragma unroll
    for (int i = threadIdx.x; i < COUNT * ROWS_VEC; i += ROWS_THREADS) {
        const int row = i / ROWS_VEC, vec = i % ROWS_VEC;
        const int64_t at = row < COUNT / 2 ? row0 + row : row1 + row - COUNT / 2;
        const int64_t element = k + vec * 8;
        const bool there = at < n_rows && element < K;
        rows_fetch(to + row * ROWS_BYTES + (vec ^ (row & 7)) * 16,
                   there ? from + at * stride + element : from, there);
    }
}

__device__ static void rows_ldmatrix(uint32_t (&r)[4], uint32_t at) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]) : "r"(at));
}

__device__ static void rows_mma(float (&acc)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, "
                 "{%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
                 : "+f"(acc[0]), "+f"(acc[1]), "+f"(acc[2]), "+f"(acc[3])
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

/* A stage: this warp's 16 rows of the weight with all tiles of 8 rows of a. */
template <int BM>
__device__ static void rows_multiply(float (&acc)[rows_tile<BM>::tiles][4], uint32_t weights,
                                     uint32_t rows) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    uint32_t a[ROWS_K / 16][4];
    const int row = warp * 16 + lane % 16;
#pragma unroll
    for (int k = 0; k < ROWS_K / 16; k++) {
        rows_ldmatrix(a[k], weights + row * ROWS_BYTES + ((2 * k + lane / 16) ^ (row & 7)) * 16);
    }
#pragma unroll
    for (int half = 0; half < 2; half++) {
#pragma unroll
        for (int i = 0; i < rows_tile<BM>::tiles; i++) {
            const uint32_t at = rows + (i * 8 + lane % 8) * ROWS_BYTES;
            uint32_t b[4];
            rows_ldmatrix(b, at + ((4 * half + lane / 8) ^ (lane % 8)) * 16);
            rows_mma(acc[i], a[2 * half], b[0], b[1]);
            rows_mma(acc[i], a[2 * half + 1], b[2], b[3]);
        }
    }
}

#if MN_HAS_WGMMA

/* The wgmma descriptor of a tile whose groups of eight rows lie 1024 bytes apart. */
__device__ static uint64_t rows_descriptor(uint32_t at) {
    return (uint64_t)((at & 0x3ffff) >> 4) | (uint64_t)1 << 16 | (uint64_t)64 << 32 |
           (uint64_t)1 << 62;
}

#define ROWS_ACC(i) "+f"(acc[i][0]), "+f"(acc[i][1]), "+f"(acc[i][2]), "+f"(acc[i][3])
#define ROWS_ACC2(i) ROWS_ACC(i), ROWS_ACC((i) + 1)
#define ROWS_ACC4(i) ROWS_ACC2(i), ROWS_ACC2((i) + 2)
#define ROWS_ACC8(i) ROWS_ACC4(i), ROWS_ACC4((i) + 4)
#define ROWS_ACC16(i) ROWS_ACC8(i), ROWS_ACC8((i) + 8)
#define ROWS_LIST4 "%0, %1, %2, %3"
#define ROWS_LIST8 ROWS_LIST4 ", %4, %5, %6, %7"
#define ROWS_LIST16 ROWS_LIST8 ", %8, %9, %10, %11, %12, %13, %14, %15"
#define ROWS_LIST32                                                                                \
    ROWS_LIST16 ", %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31"
#define ROWS_LIST64                                                                                \
    ROWS_LIST32 ", %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, "    \
                "%47, %48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, " \
                "%63"
#define ROWS_WGMMA(n, list, a_at, b_at, outs)                                                      \
    asm volatile("wgmma.mma_async.sync.aligned.m64n" #n "k16.f32.bf16.bf16 {" list "}, %" a_at     \
                 ", %" b_at ", 1, 1, 1, 0, 0;\n"                                                   \
                 : outs : "l"(a), "l"(b) : "memory")

/* acc += 64 rows of the weight by BM rows of a, sixteen deep. */
template <int BM>
__device__ static void rows_wgmma(float (&acc)[rows_tile<BM>::tiles][4], uint64_t a, uint64_t b) {
    if constexpr (BM == 8) ROWS_WGMMA(8, ROWS_LIST4, "4", "5", ROWS_ACC(0));
    if constexpr (BM == 16) ROWS_WGMMA(16, ROWS_LIST8, "8", "9", ROWS_ACC2(0));
    if constexpr (BM == 32) ROWS_WGMMA(32, ROWS_LIST16, "16", "17", ROWS_ACC4(0));
    if constexpr (BM == 64) ROWS_WGMMA(64, ROWS_LIST32, "32", "33", ROWS_ACC8(0));
    if constexpr (BM == 128) ROWS_WGMMA(128, ROWS_LIST64, "64", "65", ROWS_ACC16(0));
}

/* Starts the products of a stage: the weight's 64 rows with all rows of a. */
template <int BM>
__device__ static void rows_multiply_sm90(float (&acc)[rows_tile<BM>::tiles][4], uint32_t weights,
                                     uint32_t rows) {
    asm volatile("wgmma.fence.sync.aligned;\n" ::: "memory");
#pragma unroll
    for (int k = 0; k < ROWS_K / 16; k++) {
        rows_wgmma<BM>(acc, rows_descriptor(weights + k * 32), rows_descriptor(rows + k * 32));
    }
    asm volatile("wgmma.commit_group.sync.aligned;\n" ::: "memory");
}

__device__ static void rows_multiplied(void) {
    asm volatile("wgmma.wait_group.sync.aligned 0;\n" ::: "memory");
}

#endif

/* The block's sums to shared memory, a row of a in each line. */
template <int BM>
__device__ static void rows_keep(float *sums, const float (&acc)[rows_tile<BM>::tiles][4]) {
    const int lane = threadIdx.x % 32, n = threadIdx.x / 32 * 16 + lane / 4;
#pragma unroll
    for (int i = 0; i < rows_tile<BM>::tiles; i++) {
        float *to = sums + (i * 8 + lane % 4 * 2) * ROWS_STRIDE + n;
        to[0] = acc[i][0], to[ROWS_STRIDE] = acc[i][1];
        to[8] = acc[i][2], to[ROWS_STRIDE + 8] = acc[i][3];
    }
}

__device__ static void rows_remote(float (&x)[4], uint32_t here, unsigned rank) {
#if __CUDA_ARCH__ >= 900
    asm volatile("ld.shared::cluster.v4.f32 {%0, %1, %2, %3}, [%4];"
                 : "=f"(x[0]), "=f"(x[1]), "=f"(x[2]), "=f"(x[3])
                 : "r"(mn_cluster_address(here, rank)) : "memory");
#endif
}

__device__ static void rows_cluster_sync(void) {
#if __CUDA_ARCH__ >= 900
    mn_cluster_arrive();
    mn_cluster_wait();
#endif
}

/* Where a block is: its rows of a from m0 on, half of its columns from n0 on and half from n1 on,
 * its part of K of `split`, and the first block of the cluster that has the same elements. */
struct rows_place {
    int64_t m0, n0, n1;
    int split, part, rank0;
};

/* Four neighbouring columns: the parts of K of each, in their order. */
__device__ static void rows_sum(float (&sum)[4], const float *sums, int place,
                                const rows_place &at) {
    if (at.split == 1) {
        mn_load<4>(sum, sums, place);
        return;
    }
    const uint32_t here = (uint32_t)__cvta_generic_to_shared(sums + place);
    float parts[ROWS_CLUSTER][4] = {};
#pragma unroll
    for (int k = 0; k < ROWS_CLUSTER; k++) {
        if (k < at.split) rows_remote(parts[k], here, at.rank0 + k);
    }
#pragma unroll
    for (int c = 0; c < 4; c++) {
        sum[c] = parts[0][c];
#pragma unroll
        for (int k = 1; k < ROWS_CLUSTER; k++) {
            if (k < at.split) sum[c] += parts[k][c];
        }
    }
}

/* What the sums of four columns from (m, n) on are added to, and a bias; zeros outside of c. */
struct rows_base {
    float base[4], bias[4];

    template <typename C>
    __device__ void load(const mn_gemm_problem &w, int64_t m, int64_t n, bool vecs) {
        const C *from = (const C *)(w.accumulate ? w.c : w.onto), *row = (const C *)w.bias;
        if (vecs && n < w.N) {
            mn_load<4>(base, from, m * w.c_row + n);
            mn_load<4>(bias, row, n);
            return;
        }
#pragma unroll
        for (int c = 0; c < 4; c++) {
            base[c] = n + c < w.N ? mn_get(from, m * w.c_row + n + c) : 0.0f;
            bias[c] = n + c < w.N ? mn_get(row, n + c) : 0.0f;
        }
    }
};

/* Stores four columns of c from (m, n) on, and leaves them in x as they are stored. */
template <typename C>
__device__ static void rows_put(float (&x)[4], const mn_gemm_problem &w, int64_t m, int64_t n,
                                const float (&sum)[4], const rows_base &add, bool vecs) {
#pragma unroll
    for (int c = 0; c < 4; c++) {
        C stored;
        mn_put(&stored, add.base[c] + sum[c] + add.bias[c]);
        x[c] = mn_float(stored);
    }
    C *to = (C *)w.c + m * w.c_row + n;
    if (vecs && n < w.N) {
        mn_store<4>(to, 0, x);
        return;
    }
#pragma unroll
    for (int c = 0; c < 4; c++) {
        if (n + c < w.N) mn_put(to + c, x[c]);
    }
}

/* This block's share of the rows of the tile, four columns of each half at a time. `vecs`: all that
 * is accessed can be so. */
template <int BM, typename C>
__device__ static void rows_store(const mn_gemm_problem &w, const float *sums,
                                  const rows_place &at, bool vecs) {
    constexpr int VECS = ROWS_HALF / 4;
    const int share = BM / at.split, first = at.part * share;
#pragma unroll 2
    for (int i = threadIdx.x; i < share * VECS; i += ROWS_THREADS) {
        const int row = first + i / VECS, column = i % VECS * 4;
        const int64_t m = at.m0 + row, n0 = at.n0 + column, n1 = at.n1 + column;
        if (m >= w.M || at.n0 >= w.N) continue;
        rows_base add0, add1;
        add0.load<C>(w, m, n0, vecs);
        add1.load<C>(w, m, n1, vecs);
        const int place = row * ROWS_STRIDE + column;
        float x[3][4] = {}, y[1][4], sum0[4], sum1[4];
        rows_sum(sum0, sums, place, at);
        rows_sum(sum1, sums, place + ROWS_HALF, at);
        rows_put<C>(x[0], w, m, n0, sum0, add0, vecs);
        rows_put<C>(x[1], w, m, n1, sum1, add1, vecs);
        if (!w.gated) continue;
        const elementwise::mn_unary_forward f{ (mn_unary)w.gate, true };
        f.template run<sizeof(C) == 2>(x, y);
        C *to = (C *)w.gated + m * w.gated_row + n0;
        if (vecs) {
            mn_store<4>(to, 0, y[0]);
            continue;
        }
#pragma unroll
        for (int c = 0; c < 4; c++) mn_put(to + c, y[0][c]);
    }
}

/* Problem i has the clusters [begins[i], begins[i + 1]), and split[i] parts of K. */
struct rows_params {
    int n, begins[MN_GEMM_ROWS + 1], split[MN_GEMM_ROWS];
    bool vecs[MN_GEMM_ROWS];    // c and what belongs to it can be accessed four columns at a time
    mn_gemm_problem of[MN_GEMM_ROWS];
};

/* What a block does: its place in problem `which`, and stages [first, last) of K. */
struct rows_task {
    int which, first, last;
    rows_place at;
};

template <int BM>
__device__ static rows_task rows_task_of(const rows_params &p) {
    const int cluster = (int)blockIdx.x / ROWS_CLUSTER, rank = (int)blockIdx.x % ROWS_CLUSTER;
    int which = 0;
    while (cluster >= p.begins[which + 1]) which++;
    const mn_gemm_problem &w = p.of[which];
    const int split = p.split[which];
    const int64_t column_tile = (cluster - p.begins[which]) * (int64_t)(ROWS_CLUSTER / split);
    const int64_t columns = (column_tile + rank / split) * (w.gated ? ROWS_HALF : ROWS_N);
    const rows_place at = { blockIdx.y * (int64_t)BM, w.gated && columns >= w.N / 2 ? w.N : columns,
                            columns + (w.gated ? w.N / 2 : ROWS_HALF), split, rank % split,
                            rank - rank % split };
    const int all = (int)((w.K + ROWS_K - 1) / ROWS_K), each = (all + split - 1) / split;
    const int first = min(at.part * each, all);
    return { which, first, at.n0 < w.N ? min(first + each, all) : first, at };
}

/* The end: parts of K meet, and c is stored. */
template <int BM, typename C>
__device__ static void rows_end(const rows_params &p, const rows_task &task, float *sums,
                                const float (&acc)[rows_tile<BM>::tiles][4]) {
    rows_keep<BM>(sums, acc);
    if (task.at.split > 1) rows_cluster_sync();
    else __syncthreads();
    rows_store<BM, C>(p.of[task.which], sums, task.at, p.vecs[task.which]);
    if (task.at.split > 1) rows_cluster_sync();    // others still read this block's sums
}

template <int BM, typename C>
__global__ void __launch_bounds__(ROWS_THREADS)
gemm_rows(const __grid_constant__ rows_params p) {
    using tile = rows_tile<BM>;
    extern __shared__ __align__(1024) unsigned char bytes[];
    const uint32_t smem = (uint32_t)__cvta_generic_to_shared(bytes);
    const rows_task task = rows_task_of<BM>(p);
    const mn_gemm_problem &w = p.of[task.which];
    const int first = task.first, last = task.last;
    const mn_bf16 *a = (const mn_bf16 *)w.a, *b = (const mn_bf16 *)w.b;
    const auto stage_of = [&](int step) {
        return smem + (step - first) % tile::stages * tile::stage;
    };
    const auto weights = [&](int step) {
        rows_load<ROWS_N>(stage_of(step), b, task.at.n0, task.at.n1, w.N, w.b_row,
                          (int64_t)step * ROWS_K, w.K);
    };
    const auto rows = [&](int step) {
        rows_load<BM>(stage_of(step) + ROWS_N * ROWS_BYTES, a, task.at.m0,
                      task.at.m0 + BM / 2, w.M, w.a_row, (int64_t)step * ROWS_K, w.K);
        asm volatile("cp.async.commit_group;\n" ::: "memory");
    };
    mn_pdl_launch_dependents();
    const int ahead = first + tile::stages - 1;
    for (int s = first; w.b_is_old && s < ahead && s < last; s++) weights(s);
    mn_pdl_wait();
    for (int s = first; s < ahead; s++) {
        if (s < last && !w.b_is_old) weights(s);
        if (s < last) rows(s);
        else asm volatile("cp.async.commit_group;\n" ::: "memory");
    }
    float acc[tile::tiles][4] = {};
#pragma unroll 1
    for (int s = first; s < last; s++) {
        asm volatile("cp.async.wait_group %0;\n" :: "n"(tile::stages - 2) : "memory");
        __syncthreads();
        const int next = s + tile::stages - 1;
        if (next < last) {
            weights(next);
            rows(next);
        } else {
            asm volatile("cp.async.commit_group;\n" ::: "memory");
        }
        rows_multiply<BM>(acc, stage_of(s), stage_of(s) + ROWS_N * ROWS_BYTES);
    }
    asm volatile("cp.async.wait_all;\n" ::: "memory");
    __syncthreads();
    rows_end<BM, C>(p, task, (float *)bytes, acc);
}

/* Tensor maps of a, and of the weights of each problem. */
struct rows_maps {
    CUtensorMap a, b[MN_GEMM_ROWS];
};

/* The same on Hopper: one thread loads the factors by TMA, and wgmma reads them. */
template <int BM, typename C>
__global__ void __launch_bounds__(ROWS_THREADS)
gemm_rows_sm90(const __grid_constant__ rows_params p, const __grid_constant__ rows_maps maps) {
#if MN_HAS_WGMMA
    using tile = rows_tile<BM>;
    extern __shared__ __align__(1024) unsigned char bytes[];
    __shared__ uint64_t full[tile::stages];
    const rows_task task = rows_task_of<BM>(p);
    const mn_gemm_problem &w = p.of[task.which];
    const int first = task.first, last = task.last, ahead = min(first + tile::stages, last);
    const bool loads = threadIdx.x == 0;
    const auto slot_of = [&](int step) { return (step - first) % tile::stages; };
    const auto weights = [&](int step) {
        unsigned char *to = bytes + slot_of(step) * tile::stage;
        mn_mbarrier_arrive_expect_tx(&full[slot_of(step)], tile::stage);
        mn_tma_load(to, maps.b[task.which], &full[slot_of(step)], step * ROWS_K, 0,
                    (int)task.at.n0, 0);
        mn_tma_load(to + ROWS_HALF * ROWS_BYTES, maps.b[task.which], &full[slot_of(step)],
                    step * ROWS_K, 0, (int)task.at.n1, 0);
    };
    const auto rows = [&](int step) {
        mn_tma_load(bytes + slot_of(step) * tile::stage + ROWS_N * ROWS_BYTES, maps.a,
                    &full[slot_of(step)], step * ROWS_K, 0, (int)task.at.m0, 0);
    };
    if (loads) {
        for (int i = 0; i < tile::stages; i++) mn_mbarrier_init(&full[i], 1);
        mn_mbarrier_init_fence();
    }
    __syncthreads();
    mn_pdl_launch_dependents();
    for (int s = first; loads && w.b_is_old && s < ahead; s++) weights(s);
    mn_pdl_wait();
    for (int s = first; loads && s < ahead; s++) {
        if (!w.b_is_old) weights(s);
        rows(s);
    }
    __syncwarp();
    float acc[tile::tiles][4] = {};
#pragma unroll 1
    for (int s = first; s < last; s++) {
        const uint32_t at = mn_smem_addr(bytes) + slot_of(s) * tile::stage;
        mn_mbarrier_wait(&full[slot_of(s)], (s - first) / tile::stages & 1);
        rows_multiply_sm90<BM>(acc, at, at + ROWS_N * ROWS_BYTES);
        rows_multiplied();
        __syncthreads();    // all have read the stage
        if (loads && s + tile::stages < last) {
            weights(s + tile::stages);
            rows(s + tile::stages);
        }
        __syncwarp();
    }
    rows_end<BM, C>(p, task, (float *)bytes, acc);
#endif
}

/* Parts of K: as many as leave no processor without a block, of at least two stages each. */
static int rows_split(const mn_gemm_problem &w) {
    const int64_t tiles = mn_ceil_div(w.N, ROWS_N), steps = mn_ceil_div(w.K, ROWS_K);
    int split = 1;
    if (mn_device_props_current().major < 9) return split;
    while (split < ROWS_CLUSTER && 2 * split * tiles <= ROWS_BLOCKS && 4 * split <= steps) {
        split *= 2;
    }
    return split;
}

/* Whether rows of c and of all that is laid out like it begin at vectors of four, and N is so. */
static bool rows_vecs(const mn_gemm_problem &w) {
    const uintptr_t bytes = w.c_dtype == MN_BF16 ? 8 : 16;
    const uintptr_t all = (uintptr_t)w.c | (uintptr_t)w.onto | (uintptr_t)w.bias |
                          (uintptr_t)w.gated;
    return all % bytes == 0 && (w.N | w.c_row | w.gated_row) % 4 == 0;
}

/* `count` rows of K as tiles of `rows` by 64; false where TMA cannot have them. */
static bool rows_map(CUtensorMap *to, const void *data, int64_t count, int64_t K, int64_t stride,
                     int rows) {
    mn_in view = {};
    mn_call call = {};
    view.data = data;
    view.stride[0] = count * stride, view.stride[1] = view.stride[2] = stride;
    call.B = call.H = 1, call.T = count;
    return mn_tma_map(to, view, call, K, rows);
}

static bool rows_maps_of(rows_maps *maps, const mn_gemm_problem *works, int n, int rows) {
    bool ok = mn_device_is_sm90() &&
              rows_map(&maps->a, works[0].a, works[0].M, works[0].K, works[0].a_row, rows);
    for (int i = 0; i < n && ok; i++) {
        ok = rows_map(&maps->b[i], works[i].b, works[i].N, works[i].K, works[i].b_row, ROWS_HALF);
    }
    return ok;
}

static rows_params rows_params_of(const mn_gemm_problem *works, int n) {
    rows_params p = {};
    p.n = n;
    for (int i = 0; i < n; i++) {
        p.of[i] = works[i];
        p.split[i] = rows_split(works[i]);
        p.vecs[i] = rows_vecs(works[i]);
        const int64_t blocks = mn_ceil_div(works[i].N, ROWS_N) * p.split[i];
        p.begins[i + 1] = p.begins[i] + (int)mn_ceil_div(blocks, ROWS_CLUSTER);
    }
    for (int i = n; i < MN_GEMM_ROWS; i++) p.begins[i + 1] = p.begins[n];
    return p;
}

template <int BM, typename C>
static int rows_launch(const mn_gemm_problem *works, int n, cudaStream_t on) {
    const rows_params p = rows_params_of(works, n);
    constexpr int smem = rows_tile<BM>::smem;
    const auto any = gemm_rows<BM, C>;
    const auto sm90 = gemm_rows_sm90<BM, C>;
    rows_maps maps;
    const bool tma = rows_maps_of(&maps, works, n, BM);
    const cudaError_t code = cudaFuncSetAttribute(
        tma ? (const void *)sm90 : (const void *)any, cudaFuncAttributeMaxDynamicSharedMemorySize,
        smem);
    if (code != cudaSuccess) return (int)code;
    cudaLaunchAttribute attrs[2] = {};
    attrs[0].id = cudaLaunchAttributeProgrammaticStreamSerialization;
    attrs[0].val.programmaticStreamSerializationAllowed = 1;
    attrs[1].id = cudaLaunchAttributeClusterDimension;
    attrs[1].val.clusterDim.x = ROWS_CLUSTER;
    attrs[1].val.clusterDim.y = attrs[1].val.clusterDim.z = 1;
    cudaLaunchConfig_t config = {};
    config.gridDim = dim3((unsigned)(p.begins[n] * ROWS_CLUSTER),
                          (unsigned)mn_ceil_div(works[0].M, BM));
    config.blockDim = dim3(ROWS_THREADS), config.dynamicSmemBytes = smem;
    config.stream = on, config.attrs = attrs;
    config.numAttrs = mn_device_props_current().major < 9 ? 1 : 2;
    return (int)(tma ? cudaLaunchKernelEx(&config, sm90, p, maps)
                     : cudaLaunchKernelEx(&config, any, p));
}

template <typename C>
static int rows_launch_m(const mn_gemm_problem *works, int n, cudaStream_t on) {
    if (works[0].M <= 8) return rows_launch<8, C>(works, n, on);
    if (works[0].M <= 16) return rows_launch<16, C>(works, n, on);
    if (works[0].M <= 32) return rows_launch<32, C>(works, n, on);
    if (works[0].M <= 64) return rows_launch<64, C>(works, n, on);
    return rows_launch<128, C>(works, n, on);
}

extern "C" bool mn_gemm_rows_supported(const mn_gemm_problem *w) {
    return w->alike && w->dtype == MN_BF16 && !w->quant && w->b_transposed && !w->a_transposed &&
           w->K > 0 && w->K % 8 == 0 && w->a_row % 8 == 0 && w->b_row % 8 == 0 &&
           w->M <= (1 << 20) && w->N <= (1 << 24) && (uintptr_t)w->a % 16 == 0 &&
           (uintptr_t)w->b % 16 == 0;
}

extern "C" int mn_gemm_rows(const mn_gemm_problem *works, int n, void *stream) {
    const cudaStream_t on = (cudaStream_t)stream;
    return works[0].c_dtype == MN_BF16 ? rows_launch_m<mn_bf16>(works, n, on)
                                       : rows_launch_m<float>(works, n, on);
}

}    // namespace mneme::gemm
