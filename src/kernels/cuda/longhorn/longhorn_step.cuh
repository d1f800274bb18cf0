/* longhorn_step.cuh - columns of a memory through one token of both forms of Longhorn (see
 * ref/longhorn_diag.c and ref/longhorn_column.c), the state in place; what they make has the bits
 * of the scan cell by cell (recurrent/column_state.cuh, CELL and COLUMN), of which it is one step.
 *
 * Threads that have cells ask for all of them before they look at the token, which a warp brings to
 * shared memory. */
#ifndef MN_KERNELS_CUDA_LONGHORN_LONGHORN_STEP_CUH
#define MN_KERNELS_CUDA_LONGHORN_LONGHORN_STEP_CUH

#include "kernels/cuda/prim/block.cuh"
#include "kernels/cuda/prim/sync.cuh"
#include "kernels/cuda/recurrent/column_state.cuh"

namespace mneme::longhorn {

using namespace recurrent;

__host__ __device__ inline mn_column_params columns_of(const mn_longhorn_diag_args *p) {
    mn_column_params m = {};
    m.call = p->call, m.scale = (float)p->scale, m.columns = p->call.V;
    m.q = p->q, m.k = p->k, m.v = p->v;
    m.state0 = (const float *)p->state0.data;
    return m;
}

__host__ __device__ inline mn_column_params forward_columns_of(const mn_longhorn_diag_args *p) {
    mn_column_params m = columns_of(p);
    m.beta = p->beta, m.out = p->o, m.reads = p->o.data;
    m.state = (float *)p->state.data;
    return m;
}

/* Threads of the step kernel: those with cells, and a warp that brings the token. */
enum { STEP_OWNERS = 256, STEP_THREADS = STEP_OWNERS + 32, STEP_FEEDERS = 8 };

/* Of one kind, by WARPS warps with eight columns each: prefetch() asks the second cache for the
 * cells, run() does the token. */
template <mn_column_kind KIND, int ROWS, typename Block, int WARPS>
struct step_of;

/* ---- longhorn_column ------------------------------------------------------------------------- */

/* Cells as the scan has them; the warp behind the owners brings the token. */
template <int ROWS, typename Block, int WARPS>
struct step_of<MN_COLUMNS_COLUMN, ROWS, Block, WARPS> {
    typedef mn_column_cells<ROWS, WARPS> cells;
    typedef mn_column_step_token<ROWS, WARPS> smem;
    static constexpr int OWNERS = 32 * WARPS;
    static_assert(Block::size > OWNERS, "a warp brings the token");

    __device__ static void prefetch(const mn_column_params &p, const mn_column_coord &at) {
        if ((int)threadIdx.x >= OWNERS || threadIdx.x % 32 >= 4 || !p.state0) return;
        const int64_t first = (at.n * p.call.H + at.h) * p.call.K * p.call.V;
        cells S;
        S.each(p, at, [&](float &, int64_t i, int64_t j, bool inside) {
            if (inside) mn_prefetch_l2(p.state0 + first + i * p.call.V + j);
        });
    }

    template <typename T>
    __device__ static void run(const mn_column_params &p, const mn_column_coord &at,
                               smem &token) {
        const bool owns = (int)threadIdx.x < OWNERS;
        cells S;
        if (owns) S.load(p, at, p.state0, nullptr);
        if (threadIdx.x / 32 == WARPS) {
            mn_column_prefetch<T, ROWS, WARPS, STEP_FEEDERS> brought;
            brought.template fetch<MN_COLUMNS_COLUMN>(p, at, 0);
            brought.template put<MN_COLUMNS_COLUMN>(token);
        }
        Block::sync();
        if (!owns) return;
        float o[1];
        S.template advance<MN_COLUMNS_COLUMN, true>(o, token, 0);
        S.store(p, at, p.state, nullptr);
        const int64_t j = at.tile * (8 * WARPS) + cells::column(0);
        if (threadIdx.x % 4 > 0 || !p.reads || j >= p.call.V) return;
        mn_put(mn_row<T>(p.out, at.n, 0, at.h) + j, p.scale * o[0]);
    }
};

/* ---- longhorn_diag --------------------------------------------------------------------------- */

/* A thread has the rows and columns that one of the scan has, but neighbouring threads neighbouring
 * columns. */
enum { STEP_GROUPS = 16 };    // of rows

/* The cells of a thread: packs of P rows that lie 16 P apart, four columns of each. */
template <int ROWS>
struct step_cells {
    static constexpr int R = ROWS / 4, P = R < 4 ? R : 4;
    float at[R][4];

    __device__ static int group() {
        return (int)threadIdx.x / STEP_GROUPS;
    }
    __device__ static int first_row(int m) {
        return P * (group() + STEP_GROUPS * m);
    }
    __device__ static int first_column() {
        return (int)threadIdx.x % (MN_COLUMNS_TILE / 4) * 4;
    }

    /* use(number of the row, where its four cells are in the state); V is a multiple of four. */
    template <typename F>
    __device__ static void each(const mn_column_params &p, const mn_column_coord &here, F use) {
        const int64_t j = here.tile * MN_COLUMNS_TILE + first_column();
        const int64_t head = here.n * p.call.H + here.h;
        const int V = (int)p.call.V, rows = j < V ? (int)p.call.K - first_row(0) : 0;
        const int64_t first = (head * p.call.K + first_row(0)) * V + j;
#pragma unroll
        for (int r = 0; r < R; r++) {
            const int row = STEP_GROUPS * P * (r / P) + r % P;    // from the first
            if (row < rows) use(r, first + (int64_t)row * V);
        }
    }

    /* As mn_column_cells4::advance does; `o` becomes this thread's part of S'q. */
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
__device__ inline void step_store(float *to, const float (&x)[4]) {
    asm volatile("st.global.v4.f32 [%0], {%1, %2, %3, %4};"
                 ::"l"(to), "f"(x[0]), "f"(x[1]), "f"(x[2]), "f"(x[3]) : "memory");
}

/* A column's sum over all groups of rows, added as the scan's lanes do
 * (mn_column_cells4::leave). */
__device__ inline float step_sum(const float (*partials)[MN_COLUMNS_TILE], int column) {
    float x[STEP_GROUPS];
#pragma unroll
    for (int i = 0; i < STEP_GROUPS; i++) x[i] = partials[i][column];
#pragma unroll
    for (int half = STEP_GROUPS / 2; half > 0; half /= 2) {
#pragma unroll
        for (int i = 0; i < half; i++) x[i] += x[i + half];
    }
    return x[0];
}

/* Where the block has no thread without cells, its first warp brings the token as well. */
template <int ROWS, typename Block, int WARPS>
struct step_of<MN_COLUMNS_CELL, ROWS, Block, WARPS> {
    static constexpr int FEEDERS = Block::size > STEP_OWNERS ? STEP_FEEDERS : 0;
    static_assert(WARPS == STEP_OWNERS / 32 && Block::size >= STEP_OWNERS, "a step's threads");

    struct smem {
        mn_column_step_token<ROWS, WARPS> token;
        alignas(16) float partials[STEP_GROUPS][MN_COLUMNS_TILE];
    };

    __device__ static void prefetch(const mn_column_params &p, const mn_column_coord &at) {
        if ((int)threadIdx.x >= STEP_OWNERS || !p.state0) return;
        step_cells<ROWS>::each(p, at, [&](int, int64_t cell) {
            mn_prefetch_l2(p.state0 + cell);
        });
    }

    template <typename T>
    __device__ static void run(const mn_column_params &p, const mn_column_coord &at, smem &to) {
        const bool owns = (int)threadIdx.x < STEP_OWNERS;
        step_cells<ROWS> S = {};
        if (owns && p.state0) {
            S.each(p, at, [&](int r, int64_t cell) { mn_load<4>(S.at[r], p.state0, cell); });
        }
        if (FEEDERS ? !owns : threadIdx.x < 32) {
            mn_column_prefetch<T, ROWS, WARPS, FEEDERS> brought;
            brought.template fetch<MN_COLUMNS_CELL>(p, at, 0);
            brought.template put<MN_COLUMNS_CELL>(to.token);
        }
        Block::sync();
        if (owns) {
            float o[4];
            S.advance(o, to.token);
            mn_store<4>(to.partials[S.group()], S.first_column(), o);
            if (p.state) {
                S.each(p, at, [&](int r, int64_t cell) { step_store(p.state + cell, S.at[r]); });
            }
        }
        Block::sync();
        const int64_t j = at.tile * MN_COLUMNS_TILE + threadIdx.x;
        if (threadIdx.x >= MN_COLUMNS_TILE || !p.reads || j >= p.call.V) return;
        mn_put(mn_row<T>(p.out, at.n, 0, at.h) + j, p.scale * step_sum(to.partials, threadIdx.x));
    }
};

/* ---- stages of a megakernel ------------------------------------------------------------------ */

enum { STAGE_WARPS = 2 };    // of longhorn_column: 16 columns

template <typename T, typename Block, mn_column_kind KIND, int WARPS>
__device__ inline void step_any(const mn_longhorn_diag_args &args, int64_t n, int64_t h,
                                int64_t column, unsigned char *bytes) {
    mn_column_params p = forward_columns_of(&args);
    p.vec_aligned = true;
    const mn_column_coord at = { n, h, column / (8 * WARPS), 0, { n, 0, 1 } };
    const int64_t K = p.call.K;
    if (K <= 32) {
        typedef step_of<KIND, 8, Block, WARPS> step;
        step::template run<T>(p, at, *(typename step::smem *)bytes);
    } else if (K <= 64) {
        typedef step_of<KIND, 16, Block, WARPS> step;
        step::template run<T>(p, at, *(typename step::smem *)bytes);
    } else if (K <= 128) {
        typedef step_of<KIND, 32, Block, WARPS> step;
        step::template run<T>(p, at, *(typename step::smem *)bytes);
    } else {
        typedef step_of<KIND, 64, Block, WARPS> step;
        step::template run<T>(p, at, *(typename step::smem *)bytes);
    }
}

template <typename T, typename Block>
__device__ inline void longhorn_column_step(const mn_longhorn_column_args &p, int64_t n, int64_t h,
                                            int64_t column, unsigned char *bytes) {
    step_any<T, Block, MN_COLUMNS_COLUMN, STAGE_WARPS>(p, n, h, column, bytes);
}

template <typename T, typename Block>
__device__ inline void longhorn_diag_step(const mn_longhorn_diag_args &p, int64_t n, int64_t h,
                                          int64_t column, unsigned char *bytes) {
    step_any<T, Block, MN_COLUMNS_CELL, STEP_OWNERS / 32>(p, n, h, column, bytes);
}

/* Whether states come in packs of four. */
inline bool step_serves(const mn_longhorn_diag_args *p) {
    return p->call.V % 4 == 0 && p->call.V <= INT32_MAX && p->call.K <= MN_COLUMNS_MAX_K &&
           (uintptr_t)p->state0.data % 16 == 0 && (uintptr_t)p->state.data % 16 == 0;
}

/* And tokens in words. */
inline bool longhorn_diag_step_supported(const mn_longhorn_diag_args *p) {
    const int rows = mn_columns_rows(p->call) / 32;
    return step_serves(p) &&
           (p->call.dtype == MN_BF16 ? mn_columns_vec_aligned<mn_bf16>(forward_columns_of(p), rows)
                                     : mn_columns_vec_aligned<float>(forward_columns_of(p), rows));
}

inline bool longhorn_column_step_supported(const mn_longhorn_column_args *p) {
    return longhorn_diag_step_supported(p);
}

}    // namespace mneme::longhorn

#endif
