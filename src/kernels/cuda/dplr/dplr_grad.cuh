/* dplr_grad.cuh - gradients of q, a, k, b and g of all chunks at once, from S in front of a chunk,
 * D behind it, U and dX (dplr_state_scan.cuh).
 *
 *   dPk = scale dO V'    dPb = scale dO U'    dAk = dX V'    dAb = dX U'      below the diagonal
 *   dq_t = exp(G_t) scale S dO_t + sum_s (dPk_ts k_s + dPb_ts b_s) exp(G_t - G_s)
 *   da_t = exp(G_{t-1}) S dX_t + sum_s (dAk_ts k_s + dAb_ts b_s) exp(G_{t-1} - G_s)
 *   dk_s = exp(G_15 - G_s) D v_s + sum_t dPk_ts q_t exp(G_t - G_s) + dAk_ts a_t exp(G_{t-1} - G_s)
 *   db_s likewise, with u_s, dPb and dAb
 *   dg_t = rowsum(D . S behind the chunk) + sum over s >= t of q dq - k dk - b db,
 *                                                     over s > t of a da
 *
 * A token's read of its own write, which no decay comes between, is added behind dg. One block of
 * four warps has a chunk of a head; a warp has 16 channels. */
#ifndef MN_KERNELS_CUDA_DPLR_DPLR_GRAD_CUH
#define MN_KERNELS_CUDA_DPLR_DPLR_GRAD_CUH

#include "kernels/cuda/dplr/dplr_intra_chunk.cuh"

namespace mneme::dplr {

enum { GRAD_THREADS = 128, GRAD_WARPS = GRAD_THREADS / 32 };

/* What products with states take: these [value column][channel], rows of value columns. */
struct alignas(128) grad_states {
    unsigned char S[WIDTH * WIDTH * 2], D[WIDTH * WIDTH * 2];
    unsigned char v[ROWS], u[ROWS], d_o[ROWS], dx[ROWS];
};

/* What is made behind them: rows with the origins' decays, sums of decays. */
struct alignas(128) grad_rows {
    chunk_rows scores;
    float2 G[CHUNK][WIDTH / 2];         // from the start,
    float2 cut[CHUNK][WIDTH / 2];       // the same cut off,
    float2 behind[CHUNK][WIDTH / 2];    // and from behind the token to the end
};

struct alignas(128) grad_smem {
    union {
        grad_states states;
        grad_rows rows;
    };
    chunk_rows in;
    unsigned char matrices[ROWS], rests[ROWS];    // rests: what rounding left of them
    float ends[GRAD_WARPS][WIDTH];    // sums of D . S in front of the chunk
    float own[2][CHUNK];              // diagonals of dPk and dPb
};

#if MN_HAS_WGMMA

/* ---- loads ----------------------------------------------------------------------------------- */

/* States of the workspace, of which this warp has 16 value columns, to a tile. */
__device__ inline void unpack_state(unsigned char *tile, const uint4 *from) {
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, j = warp * 16 + lane / 4;
#pragma unroll
    for (int n = 0; n < 4; n++) {
        const uint4 x = from[(warp * 4 + n) * 32 + lane];
        const int i = 16 * n + lane % 4 * 2;
        *row_pair(tile, j, i) = x.x, *row_pair(tile, j + 8, i) = x.y;
        *row_pair(tile, j, i + 8) = x.z, *row_pair(tile, j + 8, i + 8) = x.w;
    }
}

__device__ inline void load_chunk(grad_smem &smem, const chunk_params &job,
                                  const mn_tile_span &tile, int64_t h) {
    const mn_dplr_args &p = job.p;
    const mn_span &span = tile.span;
    const int64_t record = blockIdx.x, t = tile.first, K = p.call.K, V = p.call.V;
    const int count = (int)tile.n_rows, tid = threadIdx.x, vec = tid * 8;
    load_rows<GRAD_THREADS>(smem.in.g, p.g, job.packed_keys, span, h, t, count, K, tid);
    load_rows<GRAD_THREADS>(smem.in.q, p.q, job.packed_keys, span, h, t, count, K, tid);
    load_rows<GRAD_THREADS>(smem.in.a, p.a, job.packed_keys, span, h, t, count, K, tid);
    load_rows<GRAD_THREADS>(smem.in.k, p.k, job.packed_keys, span, h, t, count, K, tid);
    load_rows<GRAD_THREADS>(smem.in.b, p.b, job.packed_keys, span, h, t, count, K, tid);
    load_rows<GRAD_THREADS>(smem.states.v, p.v, job.packed_values, span, h, t, count, V, tid);
    load_rows<GRAD_THREADS>(smem.states.d_o, p.cot.o, job.packed_cot, span, h, t, count, V, tid);
    const unsigned at = mn_tile_swizzle(tid / 8, tid % 8);
    mn_cp_async_vec16(mn_shared_u32(smem.states.u) + at,
                      job.workspace.U + record * CHUNK * WIDTH + vec, 16);
    mn_cp_async_vec16(mn_shared_u32(smem.states.dx) + at,
                      job.workspace.dX + record * CHUNK * WIDTH + vec, 16);
    mn_cp_async_commit();
    unpack_state(smem.states.S, job.workspace.S + record * STATE_VECS);
    unpack_state(smem.states.D, job.workspace.D + record * STATE_VECS);
}

/* ---- rows of scores, sums of decays ---------------------------------------------------------- */

/* Tokens 4 w to 4 w + 3 by warp w; a lane has two channels. */
__device__ inline void make_rows(grad_smem &smem) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, i = 2 * lane;
    float2 c[CHUNK], G = {}, behind = {};
#pragma unroll
    for (int t = 0; t < CHUNK; t++) {
        const float2 g = load_decay(smem.in.g, t, i);
        c[t] = cut_decay(g) + (t > 0 ? c[t - 1] : make_float2(0.0f, 0.0f));
        G = G + g;
        if (t / 4 == warp) smem.rows.G[t][lane] = G, smem.rows.cut[t][lane] = c[t];
    }
#pragma unroll
    for (int t = CHUNK - 1; t >= 0; t--) {
        if (t / 4 == warp) smem.rows.behind[t][lane] = behind;
        behind = behind + load_decay(smem.in.g, t, i);
    }
#pragma unroll
    for (int t = 0; t < CHUNK; t++) {
        if (t / 4 != warp) continue;
        const float2 before = t > 0 ? c[t - 1] : make_float2(0.0f, 0.0f);
        const float2 near = c[origin_of(0)], late = c[origin_of(8)];
        const float2 q = load_pair(smem.in.q, t, i), a = load_pair(smem.in.a, t, i);
        const float2 back = exp2_of(c[origin_of(t)] - c[t]);
        store_pair(smem.rows.scores.q, t, i, exp2_of(c[t] - near) * q);
        store_pair(smem.rows.scores.a, t, i, exp2_of(before - near) * a);
        store_pair(smem.rows.scores.k, t, i, back * load_pair(smem.in.k, t, i));
        store_pair(smem.rows.scores.b, t, i, back * load_pair(smem.in.b, t, i));
        if (t < CHUNK / 2) continue;
        store_pair(smem.rows.scores.g, t - CHUNK / 2, i, exp2_of(c[t] - late) * q);
        store_pair(smem.rows.scores.g, t, i, exp2_of(before - late) * a);
    }
}

/* Sums of D . S over this warp's value columns. */
__device__ inline void sum_states(grad_smem &smem) {
    const int warp = threadIdx.x / 32, i = threadIdx.x % 32 * 2;
    float2 sum = {};
#pragma unroll
    for (int j = 16 * warp; j < 16 * warp + 16; j++) {
        sum = fma_of(load_pair(smem.states.S, j, i), load_pair(smem.states.D, j, i), sum);
    }
    *(float2 *)&smem.ends[warp][i] = sum;
}

/* ---- products -------------------------------------------------------------------------------- */

/* Gradients of this warp's 16 channels: rows of sums as those of tensor cores, two tiles of eight
 * channels. */
struct grad_sums {
    float q[2][4], a[2][4], k[2][4], b[2][4];
};

/* y (16 tokens, 16 channels) += x b */
__device__ inline void add_channels(float (&y)[2][4], const unsigned (&x)[4],
                                    const unsigned (&b)[4]) {
    mn_mma(y[0], x, b[0], b[1]);
    mn_mma(y[1], x, b[2], b[3]);
}

/* S dO, S dX, D v and D u, decays left out; and one of the four matrices to smem.matrices. */
__device__ inline void through_states(grad_sums &sum, grad_smem &smem, float scale) {
    const int warp = threadIdx.x / 32, t = threadIdx.x % 32 / 4, s = threadIdx.x % 4 * 2;
    const bool reads = warp >= 2;    // matrices AT_PK, AT_PB
    float matrix[2][4] = {};
    sum = {};
#pragma unroll
    for (int j = 0; j < WIDTH; j += 16) {
        unsigned S[4], D[4], d_o[4], dx[4], v[4], u[4], w[4];
        mn_frag_b_trans(S, mn_shared_u32(smem.states.S), j, 16 * warp);
        mn_frag_b_trans(D, mn_shared_u32(smem.states.D), j, 16 * warp);
        mn_frag_a(d_o, mn_shared_u32(smem.states.d_o), 0, j);
        mn_frag_a(dx, mn_shared_u32(smem.states.dx), 0, j);
        mn_frag_a(v, mn_shared_u32(smem.states.v), 0, j);
        mn_frag_a(u, mn_shared_u32(smem.states.u), 0, j);
        mn_frag_b(w, mn_shared_u32(warp % 2 ? smem.states.u : smem.states.v), j, 0);
        add_channels(sum.q, d_o, S);
        add_channels(sum.a, dx, S);
        add_channels(sum.k, v, D);
        add_channels(sum.b, u, D);
        if (reads) add_channels(matrix, d_o, w);
        else add_channels(matrix, dx, w);
    }
#pragma unroll
    for (int c = 0; c < 4; c++) {
        const int row = t + c / 2 * 8, col = s + c % 2;
        const float x = reads ? scale : 1.0f;
        matrix[0][c] *= x, matrix[1][c] *= x;
        if (reads && row == col) smem.own[warp - 2][row] = matrix[0][c];
        if (reads && row == col + 8) smem.own[warp - 2][row] = matrix[1][c];
        if (col >= row) matrix[0][c] = 0.0f;
        if (col + 8 >= row) matrix[1][c] = 0.0f;
    }
#pragma unroll
    for (int n = 0; n < 2; n++) {
        const int at = 16 * warp + 8 * n + s;
#pragma unroll
        for (int half = 0; half < 2; half++) {
            const float2 x = make_float2(matrix[n][2 * half], matrix[n][2 * half + 1]);
            store_pair(smem.matrices, t + 8 * half, at, x);
            store_rest(smem.rests, t + 8 * half, at, x,
                       *row_pair(smem.matrices, t + 8 * half, at));
        }
    }
}

/* Sums over tokens of the chunk, decays to or from origins left out: of q and a with columns s < 8
 * of the matrices, and with the others, which rows t < 8 have none of; of k and, from [2] on, b,
 * tokens s < 8 and the others. */
struct grad_inside {
    float q[2][2][4], a[2][2][4], kb[2][2][4];
};

__device__ inline void inside_chunk(grad_inside &sum, const grad_smem &smem) {
    const int i = threadIdx.x / 32 * 16;
    const unsigned matrices = mn_shared_u32(smem.matrices), rests = mn_shared_u32(smem.rests);
    unsigned k[4], b[4], q[4], a[4], late[4], x[4], y[4];
    sum = {};
    mn_frag_b_trans(k, mn_shared_u32(smem.rows.scores.k), 0, i);
    mn_frag_b_trans(b, mn_shared_u32(smem.rows.scores.b), 0, i);
    const unsigned near_kb[4] = { k[0], b[0], k[2], b[2] }, far_kb[4] = { k[1], b[1], k[3], b[3] };
    const auto reads = [&](float (&to)[2][2][4], unsigned from, int at_k, int at_b) {
        mn_frag_a(x, from, 0, at_k);
        mn_frag_a(y, from, 0, at_b);
        const unsigned near[4] = { x[0], x[1], y[0], y[1] }, far[4] = { x[2], x[3], y[2], y[3] };
        add_channels(to[0], near, near_kb);
        add_channels(to[1], far, far_kb);
    };
    reads(sum.q, matrices, AT_PK, AT_PB);
    reads(sum.a, matrices, AT_AK, AT_AB);
    reads(sum.a, rests, AT_AK, AT_AB);
    mn_frag_b_trans(q, mn_shared_u32(smem.rows.scores.q), 0, i);
    mn_frag_b_trans(a, mn_shared_u32(smem.rows.scores.a), 0, i);
    mn_frag_b_trans(late, mn_shared_u32(smem.rows.scores.g), 0, i);
    unsigned far[4];    // tokens s >= 8, read by t >= 8: of q, then of a
    const auto writes = [&](const unsigned (&rows)[4], unsigned from, int at_k, int at_b, int n) {
        mn_frag_a_trans(x, from, at_k, 0);
        mn_frag_a_trans(y, from, at_b, 0);
        const unsigned near[4] = { x[0], y[0], x[2], y[2] };
        add_channels(sum.kb[0], near, rows);
        far[2 * n] = x[3], far[2 * n + 1] = y[3];
    };
#pragma unroll
    for (int rest = 0; rest < 2; rest++) {
        const unsigned from = rest ? rests : matrices;
        writes(q, from, AT_PK, AT_PB, 0);
        writes(a, from, AT_AK, AT_AB, 1);
        add_channels(sum.kb[1], far, late);
    }
}

/* ---- sums of both, dg, and stores ------------------------------------------------------------ */

/* Numbers of two neighbouring channels in rows of a chunk. */
struct grad_pair {
    float2 q, a, k, b, inclusive, exclusive;
};

/* Gradients at row t, and what they add to dg, without the diagonals; `ends` += D behind the chunk
 * times what the row writes. */
__device__ inline grad_pair grad_of_row(const grad_sums &sum, const grad_inside &inside,
                                        grad_smem &smem, float scale, int n, int half, int t,
                                        int i, float2 &ends) {
    const float2 zero = make_float2(0.0f, 0.0f);
    const auto of = [&](const float (&x)[4]) {
        return half ? make_float2(x[2], x[3]) : make_float2(x[0], x[1]);
    };
    const float2 G = smem.rows.G[t][i / 2], G_read = t > 0 ? smem.rows.G[t - 1][i / 2] : zero;
    const float2 c = smem.rows.cut[t][i / 2], c_read = t > 0 ? smem.rows.cut[t - 1][i / 2] : zero;
    const float2 near = smem.rows.cut[origin_of(0)][i / 2];
    const float2 far = smem.rows.cut[origin_of(8)][i / 2];
    const float2 write = exp2_of(smem.rows.behind[t][i / 2]);
    const float2 back = exp2_of((half ? far : near) - c);
    const float2 k = load_pair(smem.in.k, t, i), b = load_pair(smem.in.b, t, i);
    const float2 dk = write * of(sum.k[n]), db = write * of(sum.b[n]);
    const float (&kb)[4] = inside.kb[half][n];
    grad_pair grad;
    grad.q = fma_of(exp2_of(c - near), of(inside.q[0][n]), scale * (exp2_of(G) * of(sum.q[n])));
    grad.a = fma_of(exp2_of(c_read - near), of(inside.a[0][n]), exp2_of(G_read) * of(sum.a[n]));
    if (half) {
        grad.q = fma_of(exp2_of(c - far), of(inside.q[1][n]), grad.q);
        grad.a = fma_of(exp2_of(c_read - far), of(inside.a[1][n]), grad.a);
    }
    grad.k = fma_of(back, make_float2(kb[0], kb[1]), dk);
    grad.b = fma_of(back, make_float2(kb[2], kb[3]), db);
    ends = fma_of(k, dk, fma_of(b, db, ends));
    grad.exclusive = load_pair(smem.in.a, t, i) * grad.a;
    grad.inclusive = load_pair(smem.in.q, t, i) * grad.q - fma_of(k, grad.k, b * grad.b);
    return grad;
}

/* Adds what the token reads of its own write. */
__device__ inline void add_own(grad_pair &grad, grad_smem &smem, int t, int i) {
    const float own_k = smem.own[0][t], own_b = smem.own[1][t];
    const float2 q = load_pair(smem.in.q, t, i);
    grad.q = grad.q + own_k * load_pair(smem.in.k, t, i) + own_b * load_pair(smem.in.b, t, i);
    grad.k = grad.k + own_k * q;
    grad.b = grad.b + own_b * q;
}

/* The sum over this row of eight and those behind it, and over all eight. */
__device__ inline float sum_behind(float x, float &all) {
    const int row = threadIdx.x % 32 / 4;
#pragma unroll
    for (int step = 1; step < 8; step *= 2) {
        const float next = __shfl_down_sync(0xffffffffu, x, 4 * step);
        if (row + step < 8) x += next;
    }
    all = __shfl_sync(0xffffffffu, x, threadIdx.x % 4);
    return x;
}

__device__ inline float2 sum_behind(float2 x, float2 &all) {
    return make_float2(sum_behind(x.x, all.x), sum_behind(x.y, all.y));
}

__device__ inline void store_grad(const mn_out &view, const chunk_params &job, const mn_span &span,
                                  int64_t h, int64_t t, int i, float2 x) {
    mn_bf16 *to = mn_row<mn_bf16>(view, span.b, span.t0 + t, h);
    if (!to || i >= job.p.call.K) return;
    if (job.packed_grads) {
        *(unsigned *)(to + i) = mn_bf16x2(x.x, x.y);
        return;
    }
    mn_put(to + i, x.x);
    if (i + 1 < job.p.call.K) mn_put(to + i + 1, x.y);
}

__device__ inline void store_grads(const grad_sums &sum, const grad_inside &inside,
                                   grad_smem &smem, const chunk_params &job,
                                   const mn_tile_span &tile, int64_t h) {
    const int row = threadIdx.x % 32 / 4;
#pragma unroll
    for (int n = 0; n < 2; n++) {
        const int i = threadIdx.x / 32 * 16 + 8 * n + threadIdx.x % 4 * 2;
        float2 written = {}, behind = {}, all, end = {}, dg[2];
        grad_pair grad[2];
#pragma unroll
        for (int half = 1; half >= 0; half--) {
            const int t = row + 8 * half;
            grad[half] = grad_of_row(sum, inside, smem, job.scale, n, half, t, i, written);
            dg[half] = sum_behind(grad[half].inclusive + grad[half].exclusive, all) + behind -
                       grad[half].exclusive;
            behind = behind + all;
        }
#pragma unroll
        for (int warp = 0; warp < GRAD_WARPS; warp++) {
            end = end + *(const float2 *)&smem.ends[warp][i];
        }
        end = exp2_of(smem.rows.G[CHUNK - 1][i / 2]) * end +
              make_float2(mn_col_sum(written.x), mn_col_sum(written.y));
#pragma unroll
        for (int half = 0; half < 2; half++) {
            const int t = row + 8 * half;
            const int64_t when = tile.first + t;
            if (t >= tile.n_rows) continue;
            add_own(grad[half], smem, t, i);
            store_grad(job.p.grad.q, job, tile.span, h, when, i, grad[half].q);
            store_grad(job.p.grad.a, job, tile.span, h, when, i, grad[half].a);
            store_grad(job.p.grad.k, job, tile.span, h, when, i, grad[half].k);
            store_grad(job.p.grad.b, job, tile.span, h, when, i, grad[half].b);
            store_grad(job.p.grad.g, job, tile.span, h, when, i, end + dg[half]);
        }
    }
}

#endif

/* Grid: chunk slots * H blocks of GRAD_THREADS, block = slot * H + h.
 * Loads   q, a, k, b, g, v and cot.o of the chunk; S, D, U and dX of the workspace.
 * Stores  grad.q, grad.a, grad.k, grad.b and grad.g where given. */
__global__ void __launch_bounds__(GRAD_THREADS, 4)
dplr_grad_sm90_kernel(const __grid_constant__ chunk_params job) {
#if MN_HAS_WGMMA
    extern __shared__ __align__(128) unsigned char grad_smem_bytes[];
    grad_smem &smem = *(grad_smem *)grad_smem_bytes;
    const int64_t h = blockIdx.x % job.p.call.H;
    const mn_tile_span tile = mn_tile_at(job.p.call, CHUNK, blockIdx.x / job.p.call.H);
    if (tile.n_rows == 0) return;
    grad_sums sum;
    grad_inside inside;
    load_chunk(smem, job, tile, h);
    mn_cp_async_wait<0>();
    __syncthreads();
    sum_states(smem);
    through_states(sum, smem, job.scale);
    __syncthreads();
    make_rows(smem);
    __syncthreads();
    inside_chunk(inside, smem);
    store_grads(sum, inside, smem, job, tile, h);
#endif
}

}    // namespace mneme::dplr

#endif
