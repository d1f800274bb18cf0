/* longhorn_diag_step.cuh - one token of longhorn_diag (see column_state.cuh, CELL), the state in
 * place;
 * what it makes has the bits of the scan (column_state_fwd.cuh), of which it is one iter. A block
 * has 64 columns of a memory. A thread has the rows and columns that one of the scan has, but
 * neighbouring threads neighbouring columns, and uses_tma for all of them before it prefetches at
 * the
 * token,
 * which a warp more brings. */
#ifndef MN_KERNELS_CUDA_LONGHORN_LONGHORN_DIAG_STEP_CUH
#define MN_KERNELS_CUDA_LONGHORN_LONGHORN_DIAG_STEP_CUH

#include "kernels/cuda/prim/pdl.cuh"
#include "kernels/cuda/recurrent/column_state_fwd.cuh"

enum { MN_DIAG_STEP_GROUPS = 16, MN_DIAG_STEP_OWNERS = 256 };    // of rows; threads with cells
enum { MN_DIAG_STEP_THREADS = MN_DIAG_STEP_OWNERS + 32 };

/* The cells of a thread: packs of P rows that lie 16 P ws, four columns of each. */
template <int ROWS>
struct mn_diag_step_cells {
    static constexpr int R = ROWS / 4, P = R < 4 ? R : 4;
    float at[R][4];

    __device__ static int group() {
        return (int)threadIdx.x / MN_DIAG_STEP_GROUPS;
    }
    __device__ static int first_row(int m) {
        return P * (group() + MN_DIAG_STEP_GROUPS * m);
    }
    __device__ static int first_column() {
        return (int)threadIdx.x % (MN_COLUMNS_TILE / 4) * 4;
    }

    /* use(number of the row, where its four cells are in the state); V is a multiple of four. */
    template <typename F>
    __device__ static void each(const mn_columns &p, const mn_columns_place &here, F use) {
        const int64_t j = here.tile * MN_COLUMNS_TILE + first_column();
        const int64_t head = here.n * p.call.H + here.h;
        const int V = (int)p.call.V, rows = j < V ? (int)p.call.K - first_row(0) : 0;
        const int64_t first = (head * p.call.K + first_row(0)) * V + j;
#pragma unroll
        for (int r = 0; r < R; r++) {
            const int row = MN_DIAG_STEP_GROUPS * P * (r / P) + r % P;    // from the first
            if (row < rows) use(r, first + (int64_t)row * V);
        }
    }

    /* As mn_block_cells::advance does; `o` becomes this thread's part of S'q. */
    template <typename Smem>
    __device__ void advance(float (&o)[4], const Smem &in) {
        float w[4], u[4], write[4];
        mn_load<4>(w, in.w[0], first_column());
        mn_load<4>(u, in.u[0], first_column());
        mn_load<4>(write, in.v[0], first_column());
#pragma unroll
        for (int c = 0; c < 4; c++) write[c] *= w[c], o[c] = 0.0f;
#pragma unroll
        for (int r = 0; r < R; r += P) {
            float k[P], q[P], x[P];
            mn_load<P>(k, in.k[0], first_row(r / P));
            mn_load<P>(q, in.q[0], first_row(r / P));
            mn_load<P>(x, in.x[0], first_row(r / P));
#pragma unroll
            for (int n = 0; n < 4 * P; n++) {
                const int i = n / 4, c = n % 4;
                float &cell = at[r + i][c];
                cell = fmaf(k[i], write[c], cell * fmaf(w[c], x[i], u[c]));
                o[c] = fmaf(q[i], cell, o[c]);
            }
        }
    }
};

/* By one access: the compiler would make four of it here, each of which writes parts of sectors. */
__device__ inline void mn_diag_step_store(float *to, const float (&x)[4]) {
    asm volatile("st.global.v4.f32 [%0], {%1, %2, %3, %4};"
                 ::"l"(to), "f"(x[0]), "f"(x[1]), "f"(x[2]), "f"(x[3]) : "memory");
}

/* A column's sum over all splits, added as the scan's lanes do (mn_block_cells::leave). */
__device__ inline float mn_diag_step_sum(const float (*parts)[MN_COLUMNS_TILE], int column) {
    float x[MN_DIAG_STEP_GROUPS];
#pragma unroll
    for (int i = 0; i < MN_DIAG_STEP_GROUPS; i++) x[i] = parts[i][column];
#pragma unroll
    for (int half = MN_DIAG_STEP_GROUPS / 2; half > 0; half /= 2) {
#pragma unroll
        for (int i = 0; i < half; i++) x[i] += x[i + half];
    }
    return x[0];
}

template <typename T, int ROWS>
__global__ void __launch_bounds__(MN_DIAG_STEP_THREADS)
longhorn_diag_step_recurrent(const __grid_constant__ mn_columns p, unsigned tiles) {
    constexpr int WARPS = MN_DIAG_STEP_OWNERS / 32, FEEDERS = MN_COLUMNS_TILE / 8;
    __shared__ mn_slab_smem<ROWS, WARPS> smem;
    __shared__ alignas(16) float parts[MN_DIAG_STEP_GROUPS][MN_COLUMNS_TILE];
    const unsigned head = blockIdx.x / tiles, n = head / (unsigned)p.call.H;
    const mn_columns_place here = { n, head - n * (unsigned)p.call.H, blockIdx.x - head * tiles,
                                    blockIdx.x, { n, 0, 1 } };
    const bool owns_state = threadIdx.x < MN_DIAG_STEP_OWNERS;
    mn_diag_step_cells<ROWS> S = {};
    mn_pdl_launch_dependents();
    if (owns_state && p.state0) {
        S.each(p, here, [&](int, int64_t cell) {
            asm volatile("prefetch.global.L2 [%0];" :: "l"(p.state0 + cell));
        });
    }
    mn_pdl_wait();
    if (owns_state && p.state0) {
        S.each(p, here, [&](int r, int64_t cell) { mn_load<4>(S.at[r], p.state0, cell); });
    }
    if (!owns_state) {
        mn_slab_ahead<T, ROWS, WARPS, FEEDERS> token;
        token.template fetch<MN_COLUMNS_CELL>(p, here, 0);
        token.template put<MN_COLUMNS_CELL>(smem);
    }
    __syncthreads();
    if (owns_state) {
        float o[4];
        S.advance(o, smem);
        mn_store<4>(parts[S.group()], S.first_column(), o);
        if (p.state) {
            S.each(p, here, [&](int r, int64_t cell) {
                mn_diag_step_store(p.state + cell, S.at[r]);
            });
        }
    }
    __syncthreads();
    const int64_t j = here.tile * MN_COLUMNS_TILE + threadIdx.x;
    if (threadIdx.x >= MN_COLUMNS_TILE || !p.reads || j >= p.call.V) return;
    mn_put(mn_row<T>(p.out, n, 0, here.h) + j, p.scale * mn_diag_step_sum(parts, threadIdx.x));
}

template <typename T, int ROWS>
static int mn_diag_step_launch(const mn_columns &p, cudaStream_t on) {
    const int64_t tiles = mn_ceil_div(p.call.V, MN_COLUMNS_TILE);
    const int64_t blocks = tiles * p.call.H * p.call.B;
    if (blocks == 0) return cudaSuccess;
    if (blocks > INT32_MAX) return cudaErrorNotSupported;
    return mn_launch_pdl(longhorn_diag_step_recurrent<T, ROWS>, dim3((unsigned)blocks),
                           MN_DIAG_STEP_THREADS, 0, on, p, (unsigned)tiles);
}

/* What the scan serves, where states do not come in packs. */
template <typename T>
static int mn_diag_step(mn_columns p, cudaStream_t on) {
    const int64_t K = p.call.K;
    const bool packs = p.call.V % 4 == 0 && p.call.V <= INT32_MAX &&
                       (uintptr_t)p.state0 % 16 == 0 && (uintptr_t)p.state % 16 == 0;
    if (!packs || K > MN_COLUMNS_WIDEST) return mn_columns_forward<T, MN_COLUMNS_CELL>(p, on);
    p.whole = mn_columns_are_whole<T>(p, mn_columns_rows(p.call) / 32);
    if (K <= 32) return mn_diag_step_launch<T, 8>(p, on);
    if (K <= 64) return mn_diag_step_launch<T, 16>(p, on);
    if (K <= 128) return mn_diag_step_launch<T, 32>(p, on);
    return mn_diag_step_launch<T, 64>(p, on);
}

#endif
