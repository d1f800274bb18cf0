/* delta_scan_wide_keys_sm90.cuh - delta's scans on Hopper for keys of 129 to 256 channels, decays
 * that channels share and w = e: forward, the one that keeps states for the way back, and back. The
 * equations and the order of all sums, and so the bits, are those of delta_state_scan.cuh.
 *
 * Sums have tokens or channels as rows and N value columns: the left operands of all products,
 * keys, T and P, are tiles as TMA brings them, the right ones come from registers of a few threads
 * and pass through shared memory in bf16, where they are as well what TMA stores of states and
 * residuals. So two warpgroups share a block without adding up sums of each other. Both keep the
 * state, 128 channels each, and one has the chain of a chunk besides, X and R, or dR and dX, the
 * other the outputs, or the cotangents that D takes:
 *
 *   forward   first      X = V - Ed S, R = T X            S <- d S + Wd'R
 *             second     O = Qd S, behind X, then + P R    S <- d S + Wd'R
 *   back      first      dR = Wd D + P'dO, dX = T'dR       D <- d D + Qd'dO - Ed'dX
 *             second     scaled dO                         D <- d D + Qd'dO - Ed'dX
 *
 * Blocks have 16, 32 or 64 value columns, as few as processors take. */
#ifndef MN_KERNELS_CUDA_DELTA_DELTA_SCAN_WIDE_KEYS_SM90_CUH
#define MN_KERNELS_CUDA_DELTA_DELTA_SCAN_WIDE_KEYS_SM90_CUH

#include "kernels/cuda/delta/delta_launch.cuh"

namespace mneme::delta {

enum {
    MN_WIDE_KEYS = 256,
    MN_WIDE_WARPGROUP = 128,
    MN_WIDE_THREADS = 3 * MN_WIDE_WARPGROUP,
    MN_WIDE_PRODUCERS = 64,    // threads of the third warpgroup that load; a warp of it stores
    MN_WIDE_TILE = 8192,       // bytes of 64 rows of 64 columns
};

enum mn_wide_mode { MN_WIDE_OUTPUT, MN_WIDE_SAVE, MN_WIDE_BACK };

/* The tensors of a scan, and records of states and of R, N rows of 64 columns a tile. */
struct mn_wide_maps {
    mn_scan_tma_maps scan;
    CUtensorMap state, R;
};

/* What is loaded of a chunk. Results take the place of values once these have been read. */
struct alignas(1024) mn_wide_stage {
    unsigned char keys[4 * MN_WIDE_TILE], queries[4 * MN_WIDE_TILE];
    unsigned char values[MN_WIDE_TILE], T[MN_WIDE_TILE], P[MN_WIDE_TILE];
};

struct mn_wide_decays {
    float gamma[MN_DELTA_CHUNK], write[MN_DELTA_CHUNK];
};

/* Two chunks are under way. Right operands: the state in front of the chunk, four tiles of (N, 64
 * channels); x and y of (N, 64 tokens), x: X, then R, back dR; y: R by weights of writes, back
 * scaled cotangents, (64 tokens, N) in rows of 128 bytes, then what dX writes. */
template <int N>
struct mn_wide_smem {
    mn_wide_stage stage[2];
    alignas(1024) unsigned char state[4 * N * 128];
    unsigned char x[N * 128], y[MN_WIDE_TILE];
    mn_wide_decays decays[2];
    uint64_t full[2], empty[2];
    mn_scan_coord place;
};

#if MN_HAS_WGMMA

/* ---- who waits for whom ---------------------------------------------------------------------- */

/* Named barriers of a chunk, each of which is passed once: the state lies as operands; of the first
 * warpgroup alone, x does, and forward, once more, has been read; nobody reads the state any more;
 * what is written to it lies in y; X is there; scaled cotangents lie in y, and have been read. */
enum {
    MN_WIDE_STATE_SHOWN = 1, MN_WIDE_X_SHOWN, MN_WIDE_STATE_READ, MN_WIDE_WRITE_SHOWN,
    MN_WIDE_X_DONE, MN_WIDE_COT_SHOWN, MN_WIDE_COT_READ
};

/* Both warpgroups. */
enum { MN_WIDE_BOTH = 2 * MN_WIDE_WARPGROUP };

/* With the warp that stores, where there is one, and residuals it stores. */
template <mn_wide_mode MODE>
static constexpr int mn_wide_with_store = MN_WIDE_BOTH + (MODE == MN_WIDE_OUTPUT ? 0 : 32);
template <mn_wide_mode MODE>
static constexpr int mn_wide_with_store_R = MN_WIDE_BOTH + (MODE == MN_WIDE_SAVE ? 32 : 0);

/* ---- products -------------------------------------------------------------------------------- */

/* Where a product finds a tile; `+` bytes. */
struct mn_wide_operand {
    unsigned at;

    __device__ explicit mn_wide_operand(const void *tile)
        : at(mn_shared_u32(tile) >> 4 | 1u << 16) {}

    __device__ uint64_t operator+(int bytes) const {
        return (uint64_t)(64u | 1u << 30) << 32 | (at + (unsigned)bytes / 16);
    }
};

#define MN_WIDE_TAKES "l"(a), "l"(b), "n"(TRANS_A), "n"(TRANS_B)

/* y += a b, 64 rows and 8 N columns, 16 deep. TRANS_A, TRANS_B: rows of that tile are the depth,
 * else columns. */
template <int TRANS_A, int TRANS_B>
__device__ __forceinline__ void mn_wide_mma(float (&y)[2][4], uint64_t a, uint64_t b) {
    asm volatile("wgmma.mma_async.sync.aligned.m64n16k16.f32.bf16.bf16 "
                 "{%0, %1, %2, %3, %4, %5, %6, %7}, %8, %9, 1, 1, 1, %10, %11;\n"
                 : MN_WGMMA_ACC8(0) : MN_WIDE_TAKES : "memory");
}

template <int TRANS_A, int TRANS_B>
__device__ __forceinline__ void mn_wide_mma(float (&y)[4][4], uint64_t a, uint64_t b) {
    asm volatile("wgmma.mma_async.sync.aligned.m64n32k16.f32.bf16.bf16 "
                 "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15}, "
                 "%16, %17, 1, 1, 1, %18, %19;\n"
                 : MN_WGMMA_ACC8(0), MN_WGMMA_ACC8(2) : MN_WIDE_TAKES : "memory");
}

template <int TRANS_A, int TRANS_B>
__device__ __forceinline__ void mn_wide_mma(float (&y)[8][4], uint64_t a, uint64_t b) {
    asm volatile("wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 " MN_WGMMA_ACC_REGS
                 "%32, %33, 1, 1, 1, %34, %35;\n"
                 : MN_WGMMA_ACC8(0), MN_WGMMA_ACC8(2), MN_WGMMA_ACC8(4), MN_WGMMA_ACC8(6)
                 : MN_WIDE_TAKES : "memory");
}

#undef MN_WIDE_TAKES

/* Sums that products take in have been made here: in between, ptxas would have each wait. */
template <int N>
__device__ __forceinline__ void mn_wide_pin(float (&x)[N][4]) {
#pragma unroll
    for (int i = 0; i < 4 * N; i++) asm volatile("" : "+f"(x[i / 4][i % 4]));
}

/* Bytes of 16 rows, and of 16 columns, of a tile. */
enum { MN_WIDE_ROWS = 2048, MN_WIDE_COLUMNS = 32 };

/* Sums over each half of the channels, or of the tokens, for this lane's rows: token 16 w + l / 4
 * of warp w, and eight tokens on. */
template <int N>
struct mn_wide_sums {
    float at[2][N / 8][4];

    /* Starts += rows of keys by the state. */
    __device__ void read(const unsigned char *rows, const unsigned char *state) {
        const mn_wide_operand left(rows), right(state);
        mn_wide_pin(at[0]), mn_wide_pin(at[1]);
        mn_mma_fence<true>();
#pragma unroll
        for (int k = 0; k < 16; k++) {
            mn_wide_mma<0, 0>(at[k / 8], left + (k / 4 * MN_WIDE_TILE + k % 4 * MN_WIDE_COLUMNS),
                              right + (k / 4 * N * 128 + k % 4 * MN_WIDE_COLUMNS));
        }
        mn_mma_commit<true>();
    }

    /* *= more factor of the token. */
    __device__ void scale(const float *factor, float more) {
        const int token = threadIdx.x / 32 % 4 * 16 + threadIdx.x % 32 / 4;
        const float low = more * factor[token], high = more * factor[token + 8];
#pragma unroll
        for (int j = 0; j < 2 * (N / 8); j++) {
            float(&x)[4] = at[j / (N / 8)][j % (N / 8)];
            x[0] *= low, x[1] *= low, x[2] *= high, x[3] *= high;
        }
    }

    __device__ void join(float (&sums)[N / 8][4]) const {
#pragma unroll
        for (int j = 0; j < N / 8; j++) {
#pragma unroll
            for (int i = 0; i < 4; i++) sums[j][i] = at[0][j][i] + at[1][j][i];
        }
    }
};

/* y = T x, or with TRANS T'x, for x of (N, 64 tokens). */
template <int TRANS, int N>
__device__ inline void mn_wide_apply_T(float (&y)[N / 8][4], const mn_wide_smem<N> &smem,
                                       int slot) {
    const mn_wide_operand T(smem.stage[slot].T), x(smem.x);
    mn_wide_pin(y);
    mn_mma_fence<true>();
#pragma unroll
    for (int k = 0; k < 4; k++) {
        mn_wide_mma<TRANS, 0>(y, T + k * (TRANS ? MN_WIDE_ROWS : MN_WIDE_COLUMNS),
                              x + k * MN_WIDE_COLUMNS);
    }
    mn_mma_commit_wait<true>();
}

/* x *= factor of the token. */
template <int N>
__device__ inline void mn_wide_scale(float (&x)[N][4], const float *factor) {
    const int token = threadIdx.x / 32 % 4 * 16 + threadIdx.x % 32 / 4;
    const float low = factor[token], high = factor[token + 8];
#pragma unroll
    for (int j = 0; j < N; j++) x[j][0] *= low, x[j][1] *= low, x[j][2] *= high, x[j][3] *= high;
}

/* ---- from registers to tiles ----------------------------------------------------------------- */

/* A warp's 16 rows of sums in bf16 to a tile whose rows they are, or TRANS, columns. */
template <bool TRANS, int N>
__device__ inline void mn_wide_put(unsigned char *tile, const float (&x)[N][4]) {
    const int l = threadIdx.x % 32, warp = threadIdx.x / 32 % 4;
    const unsigned to = mn_shared_u32(tile);
#pragma unroll
    for (int j = 0; j < N; j += 2) {
        unsigned a[4];
        mn_frag_a_of(a, x[j], x[j + 1]);
        if (TRANS) {
            const int row = 8 * j + (l >> 4) * 8 + (l & 7), vec16 = 2 * warp + (l >> 3 & 1);
            asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};\n"
                         ::"r"(to + mn_tile_swizzle(row, vec16)), "r"(a[0]), "r"(a[1]), "r"(a[2]),
                         "r"(a[3]) : "memory");
        } else {
            asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};\n"
                         ::"r"(to + mn_tile_swizzle(16 * warp + l % 16, j + l / 16)), "r"(a[0]),
                         "r"(a[1]), "r"(a[2]), "r"(a[3]) : "memory");
        }
    }
}

/* From a tile of tokens as rows, a warp's 16, to a tensor. */
template <int N>
__device__ inline void mn_wide_store_rows(const unsigned char *tile, const mn_out &view,
                                          const mn_scan_coord &at, int64_t V, int chunk) {
    constexpr int packs = N / 8, step = 32 / packs;
    const int lane = threadIdx.x % 32, pack = lane % packs;
    const int row0 = threadIdx.x / 32 % 4 * 16 + lane / packs, count = mn_scan_chunk_len(at, chunk);
    const int64_t j = at.column0 + 8 * pack;
    mn_bf16 *to = mn_row<mn_bf16>(view, at.span.b,
                                  at.span.t0 + (int64_t)chunk * MN_DELTA_CHUNK + row0, at.h);
    if (!to || j >= V) return;
#pragma unroll
    for (int i = 0; i < 16 / step; i++) {
        const int row = row0 + i * step;
        if (row < count) {
            *(uint4 *)(to + j + i * step * view.stride[1]) =
                *(const uint4 *)(tile + mn_tile_swizzle(row, pack));
        }
    }
}

/* ---- the state in registers ------------------------------------------------------------------ */

/* Channels 128 HALF + 64 tile + 16 w + l / 4 of warp w, and eight on; columns 8 j + 2 (l % 4). */
template <int N, int HALF>
struct mn_wide_state : mn_scan_state_of_call<mn_wide_state<N, HALF>> {
    float at[2][N / 8][4];

    /* use(x, row, column) for this lane's numbers */
    template <typename F>
    __device__ void each(int64_t column0, F use) {
        const int lane = threadIdx.x % 32, warp = threadIdx.x / 32 % 4;
        const int row = 128 * HALF + 16 * warp + lane / 4;
#pragma unroll
        for (int i = 0; i < 2 * (N / 8); i++) {
            const int tile = i / (N / 8), j = i % (N / 8);
#pragma unroll
            for (int c = 0; c < 4; c++) {
                use(at[tile][j][c], row + 64 * tile + c / 2 * 8,
                    column0 + 8 * j + lane % 4 * 2 + c % 2);
            }
        }
    }

    __device__ void decay(const mn_wide_decays &decays) {
        const float by = decays.gamma[MN_DELTA_CHUNK - 1];
#pragma unroll
        for (int i = 0; i < 8 * (N / 8); i++) at[i / 4 / (N / 8)][i / 4 % (N / 8)][i % 4] *= by;
    }

    /* To where products and TMA read it. */
    __device__ void show(mn_wide_smem<N> &smem) const {
#pragma unroll
        for (int tile = 0; tile < 2; tile++) {
            mn_wide_put<true>(smem.state + (2 * HALF + tile) * N * 128, at[tile]);
        }
        mn_fence_proxy_async();
    }

    /* Starts += rows' y, for rows of keys; TRANS: y has tokens as rows. */
    template <int TRANS>
    __device__ void add(const unsigned char *rows, const unsigned char *y) {
        const mn_wide_operand left(rows), right(y);
        mn_wide_pin(at[0]), mn_wide_pin(at[1]);
        mn_mma_fence<true>();
#pragma unroll
        for (int tile = 0; tile < 2; tile++) {
#pragma unroll
            for (int k = 0; k < 4; k++) {
                mn_wide_mma<1, TRANS>(at[tile],
                                      left + ((2 * HALF + tile) * MN_WIDE_TILE + k * MN_WIDE_ROWS),
                                      right + k * (TRANS ? MN_WIDE_ROWS : MN_WIDE_COLUMNS));
            }
        }
        mn_mma_commit<true>();
    }
};

/* What either warpgroup does: its half of the state through all chunks, of which advance(state,
 * slot, n) does the n-th once it is there. */
template <int HALF, int N, typename F>
__device__ inline void mn_wide_scan(mn_wide_smem<N> &smem, const mn_delta_params &job, F advance) {
    const mn_scan_coord &at = smem.place;
    const int n_chunks = at.n_chunks;
    mn_wide_state<N, HALF> state;
    state.load(job, at);
    if (n_chunks > 0) state.show(smem);
    for (int n = 0; n < n_chunks; n++) {
        const int slot = n % 2;
        mn_mbarrier_wait(&smem.full[slot], n / 2 & 1);
        advance(state, slot, n);
        state.show(smem);
    }
    state.store(job, at);
}

/* ---- forward --------------------------------------------------------------------------------- */

/* X of the rows of this warp, from the sums of Ed S, which gamma has scaled. */
template <int N>
__device__ inline void mn_wide_residuals(float (&X)[N / 8][4], const unsigned char *values) {
    const int token = threadIdx.x / 32 % 4 * 16;
#pragma unroll
    for (int j = 0; j < N / 8; j += 2) {
        unsigned v[4];
        mn_frag_a(v, mn_shared_u32(values), token, 8 * j);
#pragma unroll
        for (int half = 0; half < 2; half++) {
            float(&x)[4] = X[j + half];
            const unsigned low = v[2 * half], high = v[2 * half + 1];
            x[0] = mn_bf16_lo(low) - x[0], x[1] = mn_bf16_hi(low) - x[1];
            x[2] = mn_bf16_lo(high) - x[2], x[3] = mn_bf16_hi(high) - x[3];
        }
    }
}

/* R to smem.x, in the place of X, which all warps have to have read, and by weights to smem.y. */
template <int N>
__device__ inline void mn_wide_show_residuals(mn_wide_smem<N> &smem, const float (&R)[N / 8][4],
                                              const mn_wide_decays &decays) {
    float written[N / 8][4];
    memcpy(written, R, sizeof written);
    mn_wide_scale(written, decays.write);
    mn_wide_put<true>(smem.y, written);
    mn_named_barrier_sync(MN_WIDE_X_SHOWN, MN_WIDE_WARPGROUP);
    mn_wide_put<true>(smem.x, R);
    mn_fence_proxy_async();
}

/* What the first warpgroup does. */
template <int N, mn_wide_mode MODE>
__device__ inline void mn_wide_forward_chain(mn_wide_smem<N> &smem, const mn_delta_params &job) {
    mn_wide_scan<0>(smem, job, [&](mn_wide_state<N, 0> &S, int slot, int) {
        const mn_wide_stage &in = smem.stage[slot];
        const mn_wide_decays &decays = smem.decays[slot];
        mn_wide_sums<N> sums = {};
        float X[N / 8][4], R[N / 8][4] = {};
        mn_named_barrier_sync(MN_WIDE_STATE_SHOWN, mn_wide_with_store<MODE>);
        sums.read(in.keys, smem.state);
        S.decay(decays);
        mn_mma_wait<true>();
        if (MODE == MN_WIDE_OUTPUT) mn_named_barrier_arrive(MN_WIDE_X_DONE, MN_WIDE_BOTH);
        sums.join(X);
        mn_wide_scale(X, decays.gamma);
        mn_wide_residuals<N>(X, in.values);
        mn_wide_put<true>(smem.x, X);
        mn_fence_proxy_async();
        mn_named_barrier_sync(MN_WIDE_X_SHOWN, MN_WIDE_WARPGROUP);
        mn_wide_apply_T<0, N>(R, smem, slot);
        mn_wide_show_residuals<N>(smem, R, decays);
        mn_named_barrier_sync(MN_WIDE_WRITE_SHOWN, mn_wide_with_store_R<MODE>);
        S.template add<0>(in.keys, smem.y);
        mn_mma_wait<true>();
        mn_mbarrier_arrive(&smem.empty[slot]);
        mn_named_barrier_sync(MN_WIDE_STATE_READ, mn_wide_with_store<MODE>);
    });
}

/* Starts O += P R. */
template <int N>
__device__ inline void mn_wide_outputs_add(mn_wide_sums<N> &O, const mn_wide_smem<N> &smem,
                                           const mn_wide_stage &in) {
    const mn_wide_operand P(in.P), R(smem.x);
    mn_wide_pin(O.at[0]), mn_wide_pin(O.at[1]);
    mn_mma_fence<true>();
#pragma unroll
    for (int k = 0; k < 4; k++) {
        mn_wide_mma<0, 0>(O.at[k / 2], P + k * MN_WIDE_COLUMNS, R + k * MN_WIDE_COLUMNS);
    }
    mn_mma_commit<true>();
}

/* What the second warpgroup does. */
template <int N>
__device__ inline void mn_wide_outputs(mn_wide_smem<N> &smem, const mn_delta_params &job) {
    mn_wide_scan<1>(smem, job, [&](mn_wide_state<N, 1> &S, int slot, int chunk) {
        mn_wide_stage &in = smem.stage[slot];
        const mn_wide_decays &decays = smem.decays[slot];
        mn_wide_sums<N> O = {};
        float out[N / 8][4];
        mn_named_barrier_sync(MN_WIDE_STATE_SHOWN, MN_WIDE_BOTH);
        S.decay(decays);
        mn_named_barrier_sync(MN_WIDE_X_DONE, MN_WIDE_BOTH);    // nothing is to delay X
        O.read(in.queries, smem.state);
        mn_mma_wait<true>();
        mn_named_barrier_arrive(MN_WIDE_STATE_READ, MN_WIDE_BOTH);
        O.scale(decays.gamma, job.scale);
        mn_named_barrier_sync(MN_WIDE_WRITE_SHOWN, MN_WIDE_BOTH);
        mn_wide_outputs_add<N>(O, smem, in);
        S.template add<0>(in.keys, smem.y);
        mn_mma_wait<true, 1>();
        O.join(out);
        mn_wide_put<false>(in.values, out);
        __syncwarp();
        mn_wide_store_rows<N>(in.values, job.p.o, smem.place, job.p.call.V, chunk);
        mn_mma_wait<true>();
        mn_fence_proxy_async();
        mn_mbarrier_arrive(&smem.empty[slot]);
    });
}

/* Likewise where states are kept: nothing but its half of them. */
template <int N>
__device__ inline void mn_wide_half_of_states(mn_wide_smem<N> &smem, const mn_delta_params &job) {
    mn_wide_scan<1>(smem, job, [&](mn_wide_state<N, 1> &S, int slot, int) {
        mn_named_barrier_sync(MN_WIDE_STATE_SHOWN, mn_wide_with_store<MN_WIDE_SAVE>);
        S.decay(smem.decays[slot]);
        mn_named_barrier_sync(MN_WIDE_WRITE_SHOWN, mn_wide_with_store_R<MN_WIDE_SAVE>);
        S.template add<0>(smem.stage[slot].keys, smem.y);
        mn_mma_wait<true>();
        mn_mbarrier_arrive(&smem.empty[slot]);
        mn_named_barrier_sync(MN_WIDE_STATE_READ, mn_wide_with_store<MN_WIDE_SAVE>);
    });
}

/* ---- back ------------------------------------------------------------------------------------ */

/* Starts dR += P'dO, earlier and later tokens apart. */
template <int N>
__device__ inline void mn_wide_add_outputs(mn_wide_sums<N> &dR, const mn_wide_stage &in) {
    const mn_wide_operand P(in.P), cot(in.values);
    mn_wide_pin(dR.at[0]), mn_wide_pin(dR.at[1]);
    mn_mma_fence<true>();
#pragma unroll
    for (int k = 0; k < 4; k++) {
        mn_wide_mma<1, 1>(dR.at[k / 2], P + k * MN_WIDE_ROWS, cot + k * MN_WIDE_ROWS);
    }
    mn_mma_commit<true>();
}

/* dR of a chunk to smem.x. */
template <int N>
__device__ inline void mn_wide_residual_grads(mn_wide_smem<N> &smem, mn_wide_state<N, 0> &D,
                                              int slot) {
    const mn_wide_stage &in = smem.stage[slot];
    const mn_wide_decays &decays = smem.decays[slot];
    mn_wide_sums<N> sums = {};
    float dR[N / 8][4];
    sums.read(in.keys, smem.state);
    D.decay(decays);
    mn_named_barrier_sync(MN_WIDE_COT_SHOWN, MN_WIDE_BOTH);
    D.template add<1>(in.queries, smem.y);
    mn_mma_wait<true, 1>();
    sums.scale(decays.write, 1.0f);
    mn_wide_add_outputs<N>(sums, in);
    mn_mma_wait<true>();
    sums.join(dR);
    mn_wide_put<true>(smem.x, dR);
    mn_fence_proxy_async();
    mn_named_barrier_sync(MN_WIDE_X_SHOWN, MN_WIDE_WARPGROUP);
}

/* What the first warpgroup does. */
template <int N>
__device__ inline void mn_wide_back_chain(mn_wide_smem<N> &smem, const mn_delta_params &job) {
    mn_wide_scan<0>(smem, job, [&](mn_wide_state<N, 0> &D, int slot, int) {
        mn_wide_stage &in = smem.stage[slot];
        const mn_wide_decays &decays = smem.decays[slot];
        float dX[N / 8][4] = {};
        mn_named_barrier_sync(MN_WIDE_STATE_SHOWN, mn_wide_with_store<MN_WIDE_BACK>);
        mn_wide_residual_grads<N>(smem, D, slot);
        mn_wide_apply_T<1, N>(dX, smem, slot);
        mn_wide_put<false>(in.values, dX);
#pragma unroll
        for (int i = 0; i < 4 * (N / 8); i++) dX[i / 4][i % 4] = -dX[i / 4][i % 4];
        mn_wide_scale(dX, decays.gamma);
        mn_named_barrier_sync(MN_WIDE_COT_READ, MN_WIDE_BOTH);
        mn_wide_put<true>(smem.y, dX);
        mn_fence_proxy_async();
        mn_named_barrier_sync(MN_WIDE_WRITE_SHOWN, MN_WIDE_BOTH);
        D.template add<0>(in.keys, smem.y);
        mn_mma_wait<true>();
        mn_fence_proxy_async();
        mn_mbarrier_arrive(&smem.empty[slot]);
        mn_named_barrier_sync(MN_WIDE_STATE_READ, mn_wide_with_store<MN_WIDE_BACK>);
    });
}

/* Cotangents by their tokens' decays to smem.y, where they lie as they came. The second warpgroup
 * calls. */
template <int N>
__device__ inline void mn_wide_scale_cotangents(mn_wide_smem<N> &smem, int slot, float scale) {
    constexpr int packs = N / 8;
    const float *gamma = smem.decays[slot].gamma;
#pragma unroll
    for (int i = 0; i < packs / 2; i++) {
        const int item = i * MN_WIDE_WARPGROUP + threadIdx.x % MN_WIDE_WARPGROUP;
        const unsigned at = mn_tile_swizzle(item / packs, item % packs);
        const float by = scale * gamma[item / packs];
        uint4 x = *(const uint4 *)(smem.stage[slot].values + at);
        unsigned *pairs = &x.x;
#pragma unroll
        for (int k = 0; k < 4; k++) {
            pairs[k] = mn_bf16x2(by * mn_bf16_lo(pairs[k]), by * mn_bf16_hi(pairs[k]));
        }
        *(uint4 *)(smem.y + at) = x;
    }
    mn_fence_proxy_async();
}

/* What the second warpgroup does. */
template <int N>
__device__ inline void mn_wide_back_cotangents(mn_wide_smem<N> &smem, const mn_delta_params &job) {
    const int last = smem.place.n_chunks - 1;
    mn_wide_scan<1>(smem, job, [&](mn_wide_state<N, 1> &D, int slot, int iter) {
        const mn_wide_stage &in = smem.stage[slot];
        mn_named_barrier_sync(MN_WIDE_STATE_SHOWN, mn_wide_with_store<MN_WIDE_BACK>);
        mn_wide_scale_cotangents<N>(smem, slot, job.scale);
        mn_named_barrier_sync(MN_WIDE_COT_SHOWN, MN_WIDE_BOTH);
        D.decay(smem.decays[slot]);
        D.template add<1>(in.queries, smem.y);
        mn_mma_wait<true>();
        mn_named_barrier_arrive(MN_WIDE_COT_READ, MN_WIDE_BOTH);
        mn_named_barrier_sync(MN_WIDE_WRITE_SHOWN, MN_WIDE_BOTH);
        D.template add<0>(in.keys, smem.y);
        mn_wide_store_rows<N>(in.values, job.p.grad.v, smem.place, job.p.call.V, last - iter);
        mn_mma_wait<true>();
        mn_fence_proxy_async();
        mn_mbarrier_arrive(&smem.empty[slot]);
        mn_named_barrier_sync(MN_WIDE_STATE_READ, mn_wide_with_store<MN_WIDE_BACK>);
    });
}

/* ---- the third warpgroup --------------------------------------------------------------------- */

/* Threads of the third warpgroup. */
__device__ inline int mn_wide_producer_tid(void) {
    return (int)threadIdx.x - 2 * MN_WIDE_WARPGROUP;
}

/* Asks TMA for a chunk, the n-th of the scan. One lane calls. */
template <int N, mn_wide_mode MODE>
__device__ inline void mn_wide_tma_load(mn_wide_smem<N> &smem, const mn_delta_params &job,
                                        const mn_scan_tma_maps &maps, const mn_scan_coord &at,
                                        int n, int chunk) {
    constexpr bool all = MODE != MN_WIDE_SAVE;
    mn_wide_stage &to = smem.stage[n % 2];
    uint64_t *full = &smem.full[n % 2];
    const int64_t index = (at.first + chunk) * job.p.call.H + at.h, row = index * MN_DELTA_CHUNK;
    const int64_t t = at.span.t0 + (int64_t)chunk * MN_DELTA_CHUNK;
    mn_mbarrier_arrive_expect_tx(full, (all ? 11 : 6) * MN_WIDE_TILE
                                 + (int)sizeof(mn_wide_decays));
    mn_scan_tma_load<MN_WIDE_KEYS>(to.keys, maps.keys, full, 0, at.key, t, at.span.b);
    mn_scan_tma_load<64>(to.values, maps.values, full, at.column0, at.h, t, at.span.b);
    mn_tma_load_1d(&smem.decays[n % 2], job.workspace.log_decays[index].gamma,
                   (int)sizeof(mn_wide_decays), full);
    mn_scan_tma_load<64>(to.T, maps.T, full, 0, 0, row, 0);
    if (!all) return;
    mn_scan_tma_load<64>(to.P, maps.P, full, 0, 0, row, 0);
    mn_scan_tma_load<MN_WIDE_KEYS>(to.queries, maps.first, full, 0, at.key, t, at.span.b);
}

/* The same by the threads that load, with zeros behind the sequence's last token. */
template <int N, mn_wide_mode MODE>
__device__ __noinline__ void mn_wide_copy(mn_wide_smem<N> &smem, const mn_delta_params &job,
                                          const mn_scan_coord &at, int n, int chunk) {
    constexpr int n_threads = MN_WIDE_PRODUCERS;
    const mn_delta_args &p = job.p;
    const mn_delta_workspace &workspace = job.workspace;
    mn_wide_stage &to = smem.stage[n % 2];
    const int tid = mn_wide_producer_tid(), count = mn_scan_chunk_len(at, chunk);
    const int64_t index = (at.first + chunk) * p.call.H + at.h, matrix = index * MN_DELTA_MATRIX;
    const int64_t first = (int64_t)chunk * MN_DELTA_CHUNK;
    mn_tile_load<MN_WIDE_KEYS, n_threads>(to.keys, p.e, true, at.span, at.key, first, count, 0,
                                          p.call.K, tid);
    mn_tile_load<64, n_threads>(to.values, MODE == MN_WIDE_BACK ? p.cot.o : p.v, true, at.span,
                                at.h, first, count, at.column0,
                                min(p.call.V, at.column0 + at.columns), tid);
    mn_tile_reload<64, n_threads>(to.T, workspace.T + matrix, 64, tid);
    if (MODE != MN_WIDE_SAVE) {
        mn_tile_load<MN_WIDE_KEYS, n_threads>(to.queries, p.q, true, at.span, at.key, first, count,
                                              0, p.call.K, tid);
        mn_tile_reload<64, n_threads>(to.P, workspace.P + matrix, 64, tid);
    }
    mn_cp_async_raw(&smem.decays[n % 2], workspace.log_decays[index].gamma,
                    (int)sizeof(mn_wide_decays), n_threads, tid);
    mn_cp_async_commit();
    mn_cp_async_wait<0>();
    mn_fence_proxy_async();
}

/* Loads all chunks, two ahead. In packed calls others' rows follow a sequence's last. */
template <int N, mn_wide_mode MODE>
__device__ inline void mn_wide_load(mn_wide_smem<N> &smem, const mn_delta_params &job,
                                    const mn_scan_tma_maps &maps) {
    const mn_scan_coord at = smem.place;
    if (MODE != MN_WIDE_BACK) mn_pdl_wait();    // T, P and decays of the launch in front
    for (int n = 0; n < at.n_chunks; n++) {
        const int chunk = MODE == MN_WIDE_BACK ? at.n_chunks - 1 - n : n;
        const bool whole = mn_scan_chunk_len(at, chunk) == MN_DELTA_CHUNK;
        mn_mbarrier_wait(&smem.empty[n % 2], (n / 2 & 1) ^ 1);
        if (job.p.call.cu_seqlens && !whole) {
            mn_wide_copy<N, MODE>(smem, job, at, n, chunk);
            mn_mbarrier_arrive(&smem.full[n % 2]);
        } else if (mn_wide_producer_tid() < 32 && mn_elect_one()) {
            mn_wide_tma_load<N, MODE>(smem, job, maps, at, n, chunk);
        } else {
            mn_mbarrier_arrive(&smem.full[n % 2]);
        }
    }
}

/* Stores the state in front of all chunks, back behind them, and R. A warp calls. */
template <int N, mn_wide_mode MODE>
__device__ inline void mn_wide_store(mn_wide_smem<N> &smem, const mn_delta_params &job,
                                     const mn_wide_maps &maps) {
    const mn_scan_coord at = smem.place;
    const bool stores = mn_elect_one();
    for (int n = 0; n < at.n_chunks; n++) {
        const int chunk = MODE == MN_WIDE_BACK ? at.n_chunks - 1 - n : n;
        const int64_t index = (at.first + chunk) * job.p.call.H + at.h;
        const int row = (int)(index * job.padded_v + at.column0);
        mn_named_barrier_sync(MN_WIDE_STATE_SHOWN, mn_wide_with_store<MODE>);
        if (stores) {
#pragma unroll
            for (int i = 0; i < 4; i++) {
                mn_tma_store(maps.state, smem.state + i * N * 128, 64 * i, 0, row, 0);
            }
        }
        if (MODE == MN_WIDE_SAVE) {
            __syncwarp();
            mn_named_barrier_sync(MN_WIDE_WRITE_SHOWN, mn_wide_with_store_R<MODE>);
            if (stores) mn_tma_store(maps.R, smem.x, 0, 0, row, 0);
        }
        if (stores) mn_tma_store_wait_read();
        __syncwarp();
        mn_named_barrier_arrive(MN_WIDE_STATE_READ, mn_wide_with_store<MODE>);
    }
    if (stores) mn_tma_store_wait();
}

template <int N, mn_wide_mode MODE>
__device__ inline void mn_wide_begin(mn_wide_smem<N> &smem, const mn_delta_params &job,
                                     int64_t n_slices) {
    constexpr bool BACK = MODE == MN_WIDE_BACK;
    if (threadIdx.x > 0) return;
    for (int i = 0; i < 2; i++) {
        mn_mbarrier_init(&smem.full[i], MN_WIDE_PRODUCERS);
        mn_mbarrier_init(&smem.empty[i], MN_WIDE_BOTH);
    }
    mn_mbarrier_init_fence();
    mn_scan_find_coord<BACK, false>(smem.place, job, n_slices, N,
                                    BACK ? job.p.cot.state : job.p.state0,
                                    BACK                     ? job.p.grad.state0
                                    : MODE == MN_WIDE_OUTPUT ? job.p.state
                                                             : mn_out{});
}

#endif

/* Grid: block = (n * H + h) * n_slices + slice, a slice being N value columns; it goes through the
 * chunks of sequence n in order, back from the last to the first.
 * Loads   e, q (64,K), v (64, 64 columns), back do, T and P (64,64) and the decays of each chunk,
 *         to keep states no q and P; the state (K, N columns) at the start.
 * Stores  o (64, N columns) of each chunk and the state at the end. SAVE: instead S (N, KP) in
 *         front of each chunk and R (N, 64) of each, in the workspace. BACK: D likewise behind
 *         each, dv (64, N columns), and D at the end.
 * Forward it may begin while the launch in front, which makes T, P and decays, still runs. */
template <int N, mn_wide_mode MODE>
__global__ void __launch_bounds__(MN_WIDE_THREADS, 1)
delta_scan_wide_keys_kernel(const __grid_constant__ mn_delta_params job,
                            const __grid_constant__ mn_wide_maps maps, int64_t n_slices) {
#if MN_HAS_WGMMA
    extern __shared__ __align__(1024) unsigned char wide_smem_bytes[];
    mn_wide_smem<N> &smem = *(mn_wide_smem<N> *)wide_smem_bytes;
    mn_wide_begin<N, MODE>(smem, job, n_slices);
    __syncthreads();
    if (threadIdx.x < MN_WIDE_WARPGROUP) {
        mn_setmaxnreg_inc<208>();
        if constexpr (MODE == MN_WIDE_BACK) mn_wide_back_chain<N>(smem, job);
        else mn_wide_forward_chain<N, MODE>(smem, job);
    } else if (threadIdx.x < 2 * MN_WIDE_WARPGROUP) {
        mn_setmaxnreg_inc<208>();
        if constexpr (MODE == MN_WIDE_BACK) mn_wide_back_cotangents<N>(smem, job);
        else if constexpr (MODE == MN_WIDE_SAVE) mn_wide_half_of_states<N>(smem, job);
        else mn_wide_outputs<N>(smem, job);
    } else {
        mn_setmaxnreg_dec<88>();
        if (mn_wide_producer_tid() < MN_WIDE_PRODUCERS) {
            mn_wide_load<N, MODE>(smem, job, maps.scan);
        } else if (MODE != MN_WIDE_OUTPUT && mn_wide_producer_tid() < MN_WIDE_PRODUCERS + 32) {
            mn_wide_store<N, MODE>(smem, job, maps);
        }
    }
#endif
}

/* ---- on the host ----------------------------------------------------------------------------- */

/* Records in the workspace, tiles of `tile` rows. */
inline bool mn_wide_map_records(CUtensorMap *map, const mn_delta_params &job, const mn_bf16 *from,
                                int64_t width, int tile) {
    mn_call all = {};
    all.B = all.H = 1, all.T = mn_delta_records(job) * job.padded_v;
    const mn_in view = { from, { all.T * width, width, width } };
    return all.T <= INT32_MAX && mn_tma_map(map, view, all, width, tile);
}

/* Whether the scan serves a call; fills in the maps for blocks of N columns. A redo is for others,
 * which make the same bits. */
template <mn_wide_mode MODE>
inline bool mn_wide_scan_supported(mn_wide_maps *maps, const mn_delta_params &job, int N) {
    const mn_delta_args &p = job.p;
    const bool back = MODE == MN_WIDE_BACK, out = MODE == MN_WIDE_OUTPUT;
    *maps = {};
    if (!mn_device_is_sm90() || job.cuts || job.pairs || p.decay == MN_DECAY_CHANNEL || p.w.data ||
        p.call.K <= 128 || !job.packed[MN_DELTA_Q] || !job.packed[MN_DELTA_E] ||
        (out && p.o.data && !job.packed[MN_DELTA_O]) ||
        (back && (!job.dX_is_dv || !job.packed[MN_DELTA_DV]))) {
        return false;
    }
    mn_delta_tma_maps(&maps->scan, job, back);
    if (!maps->scan.serve || out) return maps->scan.serve;
    const mn_delta_workspace &workspace = job.workspace;
    return mn_wide_map_records(&maps->state, job, back ? workspace.D : workspace.S, MN_WIDE_KEYS,
                               N) &&
           mn_wide_map_records(&maps->R, job, workspace.R, MN_DELTA_CHUNK, N);
}

template <int N, mn_wide_mode MODE>
inline int mn_wide_scan_by(const mn_delta_params &job, const mn_wide_maps &maps, int64_t columns,
                           cudaStream_t stream) {
    const int64_t n_slices = mn_ceil_div(columns, N);
    const int64_t blocks = n_slices * job.p.call.H * mn_n_spans(job.p.call);
    if (blocks == 0) return cudaSuccess;
    if (blocks > INT32_MAX) return cudaErrorNotSupported;
    static_assert(sizeof(mn_wide_smem<N>) <= 227 * 1024, "what a block gets");
    return mn_launch_smem_behind(MODE != MN_WIDE_BACK, delta_scan_wide_keys_kernel<N, MODE>,
                                 dim3((unsigned)blocks), MN_WIDE_THREADS, sizeof(mn_wide_smem<N>),
                                 stream, job, maps, n_slices);
}

/* The scan over `columns` value columns of all heads of all sequences, by blocks as
 * narrow as processors have room for at once; false in `served` where others have to. */
template <mn_wide_mode MODE>
inline int mn_delta_scan_wide_keys(const mn_delta_params &job, int64_t columns, bool *served,
                                   cudaStream_t stream) {
    const int64_t heads = job.p.call.H * mn_n_spans(job.p.call);
    const int64_t processors = mn_device_props_current().processors;
    const int N = mn_ceil_div(columns, 16) * heads <= processors   ? 16
                  : mn_ceil_div(columns, 32) * heads <= processors ? 32
                                                                   : 64;
    mn_wide_maps maps;
    *served = mn_wide_scan_supported<MODE>(&maps, job, N);
    if (!*served) return cudaSuccess;
    if (N == 16) return mn_wide_scan_by<16, MODE>(job, maps, columns, stream);
    if (N == 32) return mn_wide_scan_by<32, MODE>(job, maps, columns, stream);
    return mn_wide_scan_by<64, MODE>(job, maps, columns, stream);
}

}    // namespace mneme::delta

#endif
