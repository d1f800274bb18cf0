/* dplr_state_scan.cuh - dplr's states, chunk after chunk of 16 tokens, forward and back.
 *
 *   X = Ad S + Ak V    U = X + (T - I) X      O = Qd S + Pk V + Pb U        S <- d S + Kd'V + Bd'U
 *   dU = Bd D + Pb'dO  dX = T'dU    dV = Kd D + Pk'dO + Ak'dX     D <- d D + Qd'dO + Ad'dX
 *
 * with S and D (K,V), d the decay of the whole chunk and the rest from dplr_intra_chunk.cuh. One
 * block has one head of one sequence. Producer warps take chunks in turn: each loads one, makes
 * its rows and matrices, and shows them by an mbarrier. Four consumer warps with 16 value columns
 * each keep these of the state, transposed, in registers in float32; everything is computed
 * transposed as well, so that sums of one product are the left operand of the next. */
#ifndef MN_KERNELS_CUDA_DPLR_DPLR_STATE_SCAN_CUH
#define MN_KERNELS_CUDA_DPLR_DPLR_STATE_SCAN_CUH

#include "kernels/cuda/dplr/dplr_intra_chunk.cuh"

namespace mneme::dplr {

enum {
    CONSUMERS = WIDTH / 16,    // warps
    PRODUCERS = 8,
    SCAN_THREADS = 32 * (CONSUMERS + PRODUCERS),
    STAGES = 10,               // chunks between producers and consumers
};

struct scan_smem {
    chunk_stage stage[STAGES];
    chunk_rows rows[PRODUCERS];
    chunk_scratch scratch[PRODUCERS];
    uint64_t full[STAGES], empty[STAGES];
    chunk_coord place;
};

#if MN_HAS_WGMMA

/* ---- producer warps -------------------------------------------------------------------------- */

/* Starts to load q, a, k, b and g of a chunk. */
__device__ inline void load_keys(chunk_rows &to, const chunk_params &job, const chunk_coord &at,
                                 int chunk) {
    const mn_dplr_args &p = job.p;
    const int64_t t = (int64_t)chunk * CHUNK, K = p.call.K;
    const int count = at.count(chunk), lane = threadIdx.x % 32;
    load_rows<32>(to.g, p.g, job.packed_keys, at.span, at.h, t, count, K, lane);
    load_rows<32>(to.a, p.a, job.packed_keys, at.span, at.h, t, count, K, lane);
    load_rows<32>(to.q, p.q, job.packed_keys, at.span, at.h, t, count, K, lane);
    load_rows<32>(to.k, p.k, job.packed_keys, at.span, at.h, t, count, K, lane);
    load_rows<32>(to.b, p.b, job.packed_keys, at.span, at.h, t, count, K, lane);
}

/* Copies a tile of 16 rows as it lies. A warp calls. */
__device__ inline void copy_tile(unsigned char *to, const unsigned char *from) {
#pragma unroll
    for (int i = 0; i < ROWS / 512; i++) {
        const int at = i * 512 + threadIdx.x % 32 * 16;
        *(uint4 *)(to + at) = *(const uint4 *)(from + at);
    }
}

/* Starts to load what consumers take as it is: values, and on the way back the matrices. */
template <scan_kind KIND>
__device__ inline void load_values(chunk_stage &to, const chunk_params &job, const chunk_coord &at,
                                   int chunk) {
    const mn_call &call = job.p.call;
    const bool back = KIND == SCAN_BACK;
    load_rows<32>(to.values, back ? job.p.cot.o : job.p.v,
                  back ? job.packed_cot : job.packed_values, at.span, at.h,
                  (int64_t)chunk * CHUNK, at.count(chunk), call.V, threadIdx.x % 32);
    if (!back) return;
    mn_cp_async_raw(to.matrices, job.workspace.matrices + at.record(call, chunk) * ROWS, ROWS, 32,
                    threadIdx.x % 32);
}

/* Makes every PRODUCERS-th chunk of the scan. */
template <scan_kind KIND>
__device__ inline void produce(scan_smem &smem, const chunk_params &job) {
    const chunk_coord at = smem.place;
    const int warp = threadIdx.x / 32 - CONSUMERS;
    chunk_rows &rows = smem.rows[warp];
    const auto chunk_of = [&](int n) { return KIND == SCAN_BACK ? at.n_chunks - 1 - n : n; };
    if (warp < at.n_chunks) load_keys(rows, job, at, chunk_of(warp));
    mn_cp_async_commit();
    for (int n = warp; n < at.n_chunks; n += PRODUCERS) {
        const int slot = n % STAGES, next = n + PRODUCERS;
        chunk_stage &to = smem.stage[slot];
        mn_mbarrier_wait(&smem.empty[slot], (n / STAGES & 1) ^ 1);
        load_values<KIND>(to, job, at, chunk_of(n));
        mn_cp_async_commit();
        mn_cp_async_wait<1>();
        __syncwarp();
        const chunk_rests rest = { to.q, to.matrices, (unsigned char *)&smem.scratch[warp] };
        decay_rows<KIND>(to, rows, rest, job.scale);
        __syncwarp();
        chunk_scores scores;
        if (KIND != SCAN_BACK) make_scores<KIND>(scores, rows, rest);
        __syncwarp();
        if (next < at.n_chunks) load_keys(rows, job, at, chunk_of(next));
        mn_cp_async_commit();
        if (KIND != SCAN_BACK) make_matrices(to.matrices, scores, smem.scratch[warp], job.scale);
        mn_cp_async_wait<1>();
        __syncwarp();
        if (KIND == SCAN_SAVE) {
            copy_tile(job.workspace.matrices + at.record(job.p.call, n) * ROWS, to.matrices);
        }
        mn_mbarrier_arrive(&smem.full[slot]);
    }
}

/* ---- products of a consumer warp ------------------------------------------------------------- */

/* y (16 value columns, 16 tokens) += S' rows', S' (16 value columns, 64 channels). */
__device__ inline void add_read(float (&y)[2][4], const unsigned (&S)[4][4],
                                const unsigned char *rows) {
#pragma unroll
    for (int i = 0; i < 4; i++) {
        unsigned b[4];
        mn_frag_b(b, mn_shared_u32(rows), 16 * i, 0);
        mn_mma(y[0], S[i], b[0], b[1]);
        mn_mma(y[1], S[i], b[2], b[3]);
    }
}

/* y += x matrix', or x matrix where TRANS, for x (16 value columns, 16 tokens). */
template <bool TRANS>
__device__ inline void add_tokens(float (&y)[2][4], const unsigned (&x)[4],
                                  const unsigned char *matrices, int at) {
    unsigned b[4];
    if (TRANS) mn_frag_b_trans(b, mn_shared_u32(matrices), 0, at);
    else mn_frag_b(b, mn_shared_u32(matrices), at, 0);
    mn_mma(y[0], x, b[0], b[1]);
    mn_mma(y[1], x, b[2], b[3]);
}

/* y += S' rows' of what rounding the state left. */
__device__ inline void add_read_of_rest(float (&y)[2][4], const float (&S)[8][4],
                                        const unsigned (&a)[4][4], const unsigned char *rows) {
    unsigned rest[4][4];
#pragma unroll
    for (int i = 0; i < 16; i++) {
        const float *from = &S[i / 4 * 2 + i % 4 / 2][i % 2 * 2];
        const unsigned x = a[i / 4][i % 4];
        rest[i / 4][i % 4] = mn_bf16x2(from[0] - mn_bf16_lo(x), from[1] - mn_bf16_hi(x));
    }
    add_read(y, rest, rows);
}

/* y += y matrix' or y matrix, where rounding y once would weigh: its rest comes behind it. */
template <bool TRANS>
__device__ inline void add_own_tokens(float (&y)[2][4], const unsigned char *matrices, int at) {
    unsigned x[4], rest[4];
    mn_frag_a_of(x, y[0], y[1]);
#pragma unroll
    for (int i = 0; i < 4; i++) {
        const float *from = &y[i / 2][i % 2 * 2];
        rest[i] = mn_bf16x2(from[0] - mn_bf16_lo(x[i]), from[1] - mn_bf16_hi(x[i]));
    }
    add_tokens<TRANS>(y, x, matrices, at);
    add_tokens<TRANS>(y, rest, matrices, at);
}

/* S' += x rows */
__device__ inline void add_write(float (&S)[8][4], const unsigned (&x)[4],
                                 const unsigned char *rows) {
#pragma unroll
    for (int n = 0; n < 4; n++) {
        unsigned b[4];
        mn_frag_b_trans(b, mn_shared_u32(rows), 0, 16 * n);
        mn_mma(S[2 * n], x, b[0], b[1]);
        mn_mma(S[2 * n + 1], x, b[2], b[3]);
    }
}

__device__ inline void decay_state(float (&S)[8][4], const float *decay) {
#pragma unroll
    for (int n = 0; n < 8; n++) {
        const float2 d = *(const float2 *)&decay[8 * n + threadIdx.x % 4 * 2];
        S[n][0] *= d.x, S[n][1] *= d.y, S[n][2] *= d.x, S[n][3] *= d.y;
    }
}

/* The state as left operand; kept in the workspace where there is a place. */
__device__ inline void frags_of_state(unsigned (&a)[4][4], const float (&S)[8][4], uint4 *keep) {
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
#pragma unroll
    for (int i = 0; i < 4; i++) {
        mn_frag_a_of(a[i], S[2 * i], S[2 * i + 1]);
        if (!keep) continue;
        keep[(warp * 4 + i) * 32 + lane] = make_uint4(a[i][0], a[i][1], a[i][2], a[i][3]);
    }
}

/* ---- what consumer warps store --------------------------------------------------------------- */

/* Row t of `rows`, this warp's 16 columns, from an operand (16 value columns, 16 tokens): by twos,
 * or one by one below `width`. */
__device__ inline void store_columns(mn_bf16 *rows, int64_t stride, int count, int64_t width,
                                     bool packed, const unsigned (&x)[4]) {
#pragma unroll
    for (int i = 0; i < 4; i++) {
        const unsigned both = mn_movmatrix_trans(x[i]);
        const int t = threadIdx.x % 32 / 4 + i / 2 * 8;
        const int j = threadIdx.x / 32 * 16 + i % 2 * 8 + threadIdx.x % 4 * 2;
        mn_bf16 *to = rows + t * stride + j;
        if (t >= count || j >= width) continue;
        if (packed) {
            *(unsigned *)to = both;
            continue;
        }
        to[0] = __float2bfloat16_rn(mn_bf16_lo(both));
        if (j + 1 < width) to[1] = __float2bfloat16_rn(mn_bf16_hi(both));
    }
}

/* Rows of a chunk of a view. */
__device__ inline void store_values(const mn_out &view, bool packed, const chunk_params &job,
                                    const chunk_coord &at, int chunk, const unsigned (&x)[4]) {
    mn_bf16 *to = mn_row<mn_bf16>(view, at.span.b, at.span.t0 + (int64_t)chunk * CHUNK, at.h);
    if (to) store_columns(to, view.stride[1], at.count(chunk), job.p.call.V, packed, x);
}

/* The warp's columns of a state (K,V), transposed; each(number, element). */
template <typename Each>
__device__ inline void each_of_state(float (&S)[8][4], const mn_call &call, Each each) {
    const int j0 = threadIdx.x / 32 * 16 + threadIdx.x % 32 / 4;
#pragma unroll
    for (int n = 0; n < 8; n++) {
#pragma unroll
        for (int c = 0; c < 4; c++) {
            const int i = 8 * n + threadIdx.x % 4 * 2 + c % 2, j = j0 + c / 2 * 8;
            if (i < call.K && j < call.V) each(S[n][c], i * call.V + j);
        }
    }
}

__device__ inline void load_state(float (&S)[8][4], const mn_in &view, const chunk_params &job,
                                  const chunk_coord &at) {
    const float *from = mn_row<float>(view, at.n, 0, at.h);
#pragma unroll
    for (int n = 0; n < 8; n++) S[n][0] = S[n][1] = S[n][2] = S[n][3] = 0.0f;
    if (from) each_of_state(S, job.p.call, [&](float &x, int64_t i) { x = from[i]; });
}

__device__ inline void store_state(const mn_out &view, float (&S)[8][4], const chunk_params &job,
                                   const chunk_coord &at) {
    float *to = mn_row<float>(view, at.n, 0, at.h);
    if (to) each_of_state(S, job.p.call, [&](float &x, int64_t i) { to[i] = x; });
}

/* ---- consumer warps -------------------------------------------------------------------------- */

template <scan_kind KIND>
__device__ inline void scan_forward(scan_smem &smem, const chunk_params &job) {
    const chunk_coord at = smem.place;
    float S[8][4];
    load_state(S, job.p.state0, job, at);
    for (int n = 0; n < at.n_chunks; n++) {
        const int slot = n % STAGES;
        const chunk_stage &in = smem.stage[slot];
        const int64_t record = at.record(job.p.call, n);
        float U[2][4] = {}, O[2][4] = {};    // U: at first X
        unsigned a[4][4], v[4], x[4];
        frags_of_state(a, S, KIND == SCAN_SAVE ? job.workspace.S + record * STATE_VECS : nullptr);
        mn_mbarrier_wait(&smem.full[slot], n / STAGES & 1);
        mn_frag_a_trans(v, mn_shared_u32(in.values), threadIdx.x / 32 * 16, 0);
        add_read(U, a, in.a);
        if (KIND == SCAN_SAVE) add_read_of_rest(U, S, a, in.a);
        add_tokens<false>(U, v, in.matrices, AT_AK);
        decay_state(S, in.decay);
        add_own_tokens<false>(U, in.matrices, AT_T);
        add_write(S, v, in.k);
        mn_frag_a_of(x, U[0], U[1]);
        add_write(S, x, in.b);
        if (KIND == SCAN_OUTPUT) {
            add_read(O, a, in.q);
#pragma unroll
            for (int i = 0; i < 8; i++) O[i / 4][i % 4] *= job.scale;
            add_tokens<false>(O, v, in.matrices, AT_PK);
            add_tokens<false>(O, x, in.matrices, AT_PB);
        }
        mn_mbarrier_arrive_warp(&smem.empty[slot]);
        if (KIND == SCAN_OUTPUT) {
            mn_frag_a_of(x, O[0], O[1]);
            store_values(job.p.o, job.packed_o, job, at, n, x);
        } else {
            store_columns(job.workspace.U + record * CHUNK * WIDTH, WIDTH, CHUNK, WIDTH, true, x);
        }
    }
    if (KIND == SCAN_OUTPUT) store_state(job.p.state, S, job, at);
}

__device__ inline void scan_back(scan_smem &smem, const chunk_params &job) {
    const chunk_coord at = smem.place;
    float D[8][4];
    load_state(D, job.p.cot.state, job, at);
    for (int n = 0; n < at.n_chunks; n++) {
        const int slot = n % STAGES, chunk = at.n_chunks - 1 - n;
        const chunk_stage &in = smem.stage[slot];
        const int64_t record = at.record(job.p.call, chunk);
        float dX[2][4] = {}, dV[2][4] = {};    // dX: at first dU
        unsigned a[4][4], y[4], x[4];
        frags_of_state(a, D, job.workspace.D + record * STATE_VECS);
        mn_mbarrier_wait(&smem.full[slot], n / STAGES & 1);
        mn_frag_a_trans(y, mn_shared_u32(in.values), threadIdx.x / 32 * 16, 0);
        add_read(dX, a, in.b);
        add_read_of_rest(dX, D, a, in.b);
        add_tokens<true>(dX, y, in.matrices, AT_PB);
        decay_state(D, in.decay);
        add_own_tokens<true>(dX, in.matrices, AT_T);
        add_write(D, y, in.q);
        mn_frag_a_of(x, dX[0], dX[1]);
        add_write(D, x, in.a);
        add_read(dV, a, in.k);
        add_tokens<true>(dV, y, in.matrices, AT_PK);
        add_tokens<true>(dV, x, in.matrices, AT_AK);
        mn_mbarrier_arrive_warp(&smem.empty[slot]);
        store_columns(job.workspace.dX + record * CHUNK * WIDTH, WIDTH, CHUNK, WIDTH, true, x);
        mn_frag_a_of(x, dV[0], dV[1]);
        store_values(job.p.grad.v, job.packed_dv, job, at, chunk, x);
    }
    store_state(job.p.grad.state0, D, job, at);
}

#endif

/* ---- the kernel ------------------------------------------------------------------------------ */

/* Grid: blocks of SCAN_THREADS, block = n * H + h for sequence n and head h.
 * SCAN_OUTPUT  loads q, a, k, b, g, v and state0; stores o and state where given.
 * SCAN_SAVE    loads the same; stores S, U and matrices of the workspace.
 * SCAN_BACK    loads q, a, k, b, g, cot.o, cot.state and matrices; stores D and dX of the
 *              workspace, grad.v and grad.state0 where given. */
template <scan_kind KIND>
__global__ void __launch_bounds__(SCAN_THREADS, 1)
dplr_state_scan_sm90_kernel(const __grid_constant__ chunk_params job) {
#if MN_HAS_WGMMA
    extern __shared__ __align__(128) unsigned char scan_smem_bytes[];
    scan_smem &smem = *(scan_smem *)scan_smem_bytes;
    if (threadIdx.x == 0) {
        const mn_call &call = job.p.call;
        chunk_coord &at = smem.place;
        at.n = blockIdx.x / call.H, at.h = blockIdx.x % call.H;
        at.span = mn_span_at(call, at.n);
        at.n_chunks = (int)((at.span.length + CHUNK - 1) / CHUNK);
        at.first = call.cu_seqlens ? call.cu_seqlens[at.n] / CHUNK + at.n : at.n * at.n_chunks;
        for (int i = 0; i < STAGES; i++) {
            mn_mbarrier_init(&smem.full[i], 32);
            mn_mbarrier_init(&smem.empty[i], CONSUMERS);
        }
    }
    __syncthreads();
    if (threadIdx.x >= 32 * CONSUMERS) produce<KIND>(smem, job);
    else if (KIND == SCAN_BACK) scan_back(smem, job);
    else scan_forward<KIND>(smem, job);
#endif
}

}    // namespace mneme::dplr

#endif
