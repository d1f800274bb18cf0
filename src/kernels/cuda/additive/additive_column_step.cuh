/* additive_column_step.cuh - columns of the additive memory that forgets by columns through one
 * token (see ref/additive_column.c), states in place: S = diag(exp g) S + v k'; o = scale S q.
 *
 * LANES lanes have a column, which is a row of K numbers of the state, each of them PACKS times
 * four neighbours: K is at most 4 PACKS LANES. A group of lanes has ROWS columns. */
#ifndef MN_KERNELS_CUDA_ADDITIVE_ADDITIVE_COLUMN_STEP_CUH
#define MN_KERNELS_CUDA_ADDITIVE_ADDITIVE_COLUMN_STEP_CUH

#include "kernels/cuda/prim/block.cuh"
#include "kernels/cuda/prim/sync.cuh"
#include "kernels/cuda/recurrent/matrix_state.cuh"

namespace mneme::additive {

enum { STEP_THREADS = 256, STEP_COLUMNS = 16, STEP_WIDEST = 512 };

template <int LANES, int PACKS, int ROWS>
struct step_tile {
    static constexpr int GROUPS = STEP_THREADS / LANES, columns = GROUPS * ROWS;

    /* use(row of the thread, pack of it, column, first of four numbers of the column) */
    template <typename F>
    __device__ static void each(int64_t first, F use) {
        const int lane = threadIdx.x % LANES, group = threadIdx.x / LANES;
#pragma unroll
        for (int x = 0; x < ROWS * PACKS; x++) {
            use(x / PACKS, x % PACKS, first + group + x / PACKS * GROUPS,
                (int64_t)4 * (lane + LANES * (x % PACKS)));
        }
    }

    __device__ static void prefetch(const mn_additive_column_args &p, int64_t n, int64_t h,
                                    int64_t first) {
        const float *from = mn_row<float>(p.state0, n, 0, h);
        each(first, [&](int, int, int64_t j, int64_t i) {
            if (from && j < p.call.V && i < p.call.K) mn_prefetch_l2(from + j * p.call.K + i);
        });
    }

    /* Columns from `first` on of head h of sequence n. */
    template <typename T>
    __device__ static void step(const mn_additive_column_args &p, int64_t n, int64_t h,
                                int64_t first) {
        using namespace recurrent;
        const int64_t K = p.call.K, V = p.call.V;
        const int lane = threadIdx.x % LANES;
        const float *from = mn_row<float>(p.state0, n, 0, h);
        float *to = mn_row<float>(p.state, n, 0, h);
        const T *q = mn_row<T>(p.q, n, 0, h), *k = mn_row<T>(p.k, n, 0, h);
        const T *v = mn_row<T>(p.v, n, 0, h), *g = mn_row<T>(p.g, n, 0, h);
        T *o = mn_row<T>(p.o, n, 0, h);
        float S[ROWS][PACKS][4], query[PACKS][4], key[PACKS][4];
        each(first, [&](int r, int m, int64_t j, int64_t i) {
            mn_load<4>(S[r][m], j < V && i < K ? from : nullptr, j * K + i);
        });
#pragma unroll
        for (int m = 0; m < PACKS; m++) {
            const int64_t i = 4 * (lane + LANES * m);
            mn_load<4>(query[m], i < K ? q : nullptr, i);
            mn_load<4>(key[m], i < K ? k : nullptr, i);
        }
#pragma unroll
        for (int r = 0; r < ROWS; r++) {
            const int64_t j = first + threadIdx.x / LANES + r * GROUPS;
            const float decay = j < V ? mn_matrix_decay(mn_float(g[j])) : 0.0f;
            const float value = j < V ? mn_float(v[j]) : 0.0f;
            float sum = 0.0f;
#pragma unroll
            for (int m = 0; m < PACKS; m++) {
                const int64_t i = 4 * (lane + LANES * m);
#pragma unroll
                for (int c = 0; c < 4; c++) {
                    float &cell = S[r][m][c];
                    cell = fmaf(value, key[m][c], mn_matrix_apply_decay(cell, decay));
                    sum = fmaf(query[m][c], cell, sum);
                }
                if (to && j < V && i < K) mn_store<4>(to, j * K + i, S[r][m]);
            }
#pragma unroll
            for (int lanes = LANES / 2; lanes > 0; lanes >>= 1) {
                sum += __shfl_xor_sync(0xffffffffu, sum, lanes);
            }
            if (o && lane == 0 && j < V) mn_put(o + j, (float)p.scale * sum);
        }
    }
};

/* The stage of a megakernel: as many columns whatever the width of keys. */
template <typename T, typename Block>
__device__ inline void additive_column_step(const mn_additive_column_args &p, int64_t n, int64_t h,
                                            int64_t column, unsigned char *) {
    static_assert(Block::size == STEP_THREADS, "a step's threads");
    if (p.call.K <= 64) step_tile<16, 1, 1>::step<T>(p, n, h, column);
    else if (p.call.K <= 128) step_tile<32, 1, 2>::step<T>(p, n, h, column);
    else if (p.call.K <= 256) step_tile<32, 2, 2>::step<T>(p, n, h, column);
    else step_tile<32, 4, 2>::step<T>(p, n, h, column);
}

inline bool additive_column_step_supported(const mn_additive_column_args *p) {
    const size_t each = p->call.dtype == MN_BF16 ? sizeof(mn_bf16) : sizeof(float);
    const auto by_fours = [](const void *data, const int64_t *stride, size_t bytes) {
        bool even = (uintptr_t)data % (4 * bytes) == 0;
        for (int i = 0; i < 3; i++) even = even && stride[i] % 4 == 0;
        return even;
    };
    return p->call.K % 4 == 0 && p->call.K <= STEP_WIDEST &&
           by_fours(p->q.data, p->q.stride, each) && by_fours(p->k.data, p->k.stride, each) &&
           by_fours(p->state0.data, p->state0.stride, sizeof(float)) &&
           by_fours(p->state.data, p->state.stride, sizeof(float));
}

}    // namespace mneme::additive

#endif
