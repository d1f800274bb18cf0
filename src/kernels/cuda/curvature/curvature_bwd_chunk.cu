/* curvature_bwd_chunk.cu - curvature backward: the products of smem_tiles, and which calls go to
 * those
 * of Hopper. */
#include "kernels/cuda/curvature/curvature_bwd_keys_sm90.cuh"
#include "kernels/cuda/curvature/curvature_bwd_queries_sm90.cuh"
#include "kernels/cuda/curvature/curvature_smem.cuh"

/* ---- there ----------------------------------------------------------------------------------- */

template <typename T, int KP>
struct queries_smem {
    using z = mn_curve_sizes<T, KP>;
    alignas(16) T q[z::chunk * z::pitch];
    alignas(16) T k[z::chunk * z::pitch];
    alignas(16) T d[z::chunk * z::pitch];
    alignas(16) T R[KP * MN_CURVE_PITCH];
    alignas(16) T P[z::chunk * z::score_pitch];
    /* What bf16 rounds away of R and P: y.q, which dgamma is, would show it. */
    static constexpr bool is_narrow = sizeof(T) == 2;
    alignas(16) T R_low[is_narrow ? KP * MN_CURVE_PITCH : 1];
    alignas(16) T P_low[is_narrow ? z::chunk * z::score_pitch : 1];
    float s[KP], within[2][z::chunk], before[2][z::chunk], mean[2][z::chunk], each[z::chunk];
    float gamma[z::chunk], part[z::across][z::chunk];
};

/* dq, and this warp's part of y.q for each of its rows. */
template <typename T, int KP>
__device__ inline void query_back(queries_smem<T, KP> &room, const mn_curvature_args &p,
                                  const mn_curve_place &at, int64_t t, int count) {
    using z = mn_curve_sizes<T, KP>;
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const int row0 = warp % z::down * 16, column0 = warp / z::down * z::columns;
    mn_smem_tile_sum<z::columns / 8> Y;
    float part[2] = { 0.0f, 0.0f };
    Y.clear();
    mn_curve_apply<T, KP>(Y, room.d, room.R, room.P, room.k, at.column0);
    if (room.is_narrow) {
        mn_curve_apply<T, KP>(Y, room.d, room.R_low, room.P_low, room.k, at.column0);
    }
    Y.each([&](float &y, int row, int column) {
        const int token = row0 + row, j = at.column0 + column0 + column;
        const float q = mn_float(room.q[token * z::pitch + j]);
        const float d = mn_float(room.d[token * z::pitch + j]);
        const float centred = fmaf(-room.mean[1][token], room.s[j], y);
        if (row < 8) part[0] = fmaf(q, centred, part[0]);
        else part[1] = fmaf(q, centred, part[1]);
        T *dq = mn_row<T>(p.grad.q, at.s.span.b, at.s.span.t0 + t + token, at.h);
        if (!dq || token >= count || j >= p.call.K) return;
        mn_put(dq + j, fmaf(-room.gamma[token] * room.each[token], centred, d));
    });
#pragma unroll
    for (int i = 0; i < 2; i++) {
        part[i] += __shfl_xor_sync(0xffffffffu, part[i], 1);
        part[i] += __shfl_xor_sync(0xffffffffu, part[i], 2);
        if (lane % 4 == 0) room.part[warp / z::down][row0 + lane / 4 + 8 * i] = part[i];
    }
}

/* The means of a chunk's tokens and the scores of d. */
template <typename T, int KP>
__device__ inline void queries_scores(queries_smem<T, KP> &room) {
    using z = mn_curve_sizes<T, KP>;
    const int warp = threadIdx.x / 32;
    mn_smem_tile_sum<z::chunk / 8> P;
    if (warp < z::down) mn_curve_scores<T, KP>(P, room.within[1], room.d, room.k, warp * 16);
    else if (warp < 2 * z::down) {
        mn_curve_scores<T, KP>(P, room.within[0], room.q, room.k, (warp - z::down) * 16);
    }
    mn_curve_dots<T, KP>(room.before[0], room.s, room.q, warp, MN_CURVE_WARPS);
    mn_curve_dots<T, KP>(room.before[1], room.s, room.d, warp, MN_CURVE_WARPS);
    __syncthreads();
    for (int i = threadIdx.x; i < 2 * z::chunk; i += MN_CURVE_THREADS) {
        const int which = i / z::chunk, t = i % z::chunk;
        room.mean[which][t] = (room.within[which][t] + room.before[which][t]) * room.each[t];
    }
    __syncthreads();
    if (warp < z::down) {
        mn_curve_put_scores<T, KP>(room.P, P, room.mean[1], warp * 16,
                                   room.is_narrow ? room.P_low : NULL);
    }
    __syncthreads();
}

template <typename T, int KP>
__global__ void __launch_bounds__(MN_CURVE_THREADS, KP == 256 ? 1 : 2)
curvature_queries_kernel(const __grid_constant__ mn_curvature_args p, mn_curve_work w,
                      mn_curve_cut cut) {
    using z = mn_curve_sizes<T, KP>;
    extern __shared__ __align__(128) unsigned char bytes[];
    queries_smem<T, KP> &room = *(queries_smem<T, KP> *)bytes;
    const mn_curve_place at = mn_curve_place_of(p.call, cut);
    if (!at.s.there) return;
    const int64_t K = p.call.K, h = at.h, rows = p.call.B * p.call.T * p.call.H;
    const int64_t b = at.s.span.b, t0 = at.s.span.t0;
    const double seen = mn_curve_before(p, at.s.n);
    const float *sums =
        at.s.first > 0 ? mn_curve_sums_for(w.there, p.call, at, at.s.slot - 1) : NULL;
    const float *vector = sums ? sums + K * K : mn_row<float>(p.ks0, at.s.n, 0, h);
    mn_curve_matrix<T, KP> R;
    R.load(mn_row<float>(p.kk0, at.s.n, 0, h), sums, 0.5f, K, at.column0);
    for (int i = threadIdx.x; i < KP; i += MN_CURVE_THREADS) {
        room.s[i] = i < K ? mn_get(vector, i) : 0.0f;
    }
    for (int start = 0; start < at.s.rows; start += z::chunk) {
        const int count = min(z::chunk, at.s.rows - start);
        const int64_t t = at.s.first + start;
        mn_smem_tile_load(room.q, z::pitch, z::chunk, KP, p.q, at.s.span, h, t, count, K,
                          cut.packs);
        mn_smem_tile_load(room.k, z::pitch, z::chunk, KP, p.k, at.s.span, h, t, count, K,
                          cut.packs);
        mn_smem_tile_load(room.d, z::pitch, z::chunk, KP, p.cot.qt, at.s.span, h, t, count, K,
                       cut.packs);
        R.put(room.R);
        if (room.is_narrow) R.put_rest(room.R_low);
        if (threadIdx.x < z::chunk) {
            const int i = threadIdx.x;
            room.each[i] = (float)(1.0 / (seen + (double)(t + i + 1)));
            room.gamma[i] = i < count ? mn_float(*mn_row<T>(p.gamma, b, t0 + t + i, h)) : 0.0f;
        }
        __syncthreads();
        queries_scores<T, KP>(room);
        query_back<T, KP>(room, p, at, t, count);
        R.add(room.k, room.k + at.column0);
        __syncthreads();
        if (threadIdx.x < count) {
            const int i = threadIdx.x;
            const int64_t row = mn_curve_row_of(p.call, at, t + i);
            float part = 0.0f;
            for (int a = 0; a < z::across; a++) part += room.part[a][i];
            w.parts[at.slice * rows + row] = part;
            if (at.slice == 0) w.means[2 * row] = room.mean[0][i];
            if (at.slice == 0) w.means[2 * row + 1] = room.mean[1][i];
        }
        for (int i = threadIdx.x; i < KP; i += MN_CURVE_THREADS) {
            room.s[i] += mn_curve_column_sum(room.k, z::pitch, z::chunk, i);
        }
        __syncthreads();
    }
}

template <typename T, int KP>
struct back_smem {
    using z = mn_curve_sizes<T, KP>;
    alignas(16) T q[z::chunk * z::pitch];
    alignas(16) T k[z::chunk * z::pitch];
    alignas(16) T z_[z::chunk * z::pitch];
    alignas(16) T G[KP * MN_CURVE_PITCH];
    alignas(16) T P[2][z::chunk * z::score_pitch];
    float e[MN_CURVE_SLICE], rows[z::chunk], mean[2][z::chunk];
};

/* dK of the warp's tile. */
template <typename T, int KP>
__device__ inline void key_back(back_smem<T, KP> &room, const mn_curvature_args &p,
                                const mn_curve_place &at, int64_t t, int count) {
    using z = mn_curve_sizes<T, KP>;
    const int warp = threadIdx.x / 32, row0 = warp % z::down * 16;
    const int column0 = warp / z::down * z::columns;
    mn_smem_tile_sum<z::columns / 8> dk;
    dk.clear();
    mn_curve_product<MN_PLAIN, MN_PLAIN>(dk, room.k + row0 * z::pitch, z::pitch, room.G + column0,
                                         MN_CURVE_PITCH, KP);
    const int first = row0 * z::score_pitch + row0;    // of tokens before row0 there is nothing
    const int from = row0 * z::pitch + at.column0 + column0;
    mn_curve_product<MN_TRANSPOSED, MN_PLAIN>(dk, room.P[0] + first, z::score_pitch, room.z_ + from,
                                          z::pitch, z::chunk - row0);
    mn_curve_product<MN_TRANSPOSED, MN_PLAIN>(dk, room.P[1] + first, z::score_pitch, room.q + from,
                                          z::pitch, z::chunk - row0);
    dk.each([&](float &x, int row, int column) {
        const int token = row0 + row;
        const int64_t j = at.column0 + column0 + column;
        T *to = mn_row<T>(p.grad.k, at.s.span.b, at.s.span.t0 + t + token, at.h);
        if (!to || token >= count || j >= p.call.K) return;
        const float sum = x + room.e[column0 + column];
        mn_put(to + j, p.adds_k ? sum + mn_float(to[j]) : sum);
    });
}

template <typename T, int KP>
__global__ void __launch_bounds__(MN_CURVE_THREADS, KP == 256 ? 1 : 2)
curvature_back_kernel(const __grid_constant__ mn_curvature_args p, mn_curve_work w,
                      mn_curve_cut cut) {
    using z = mn_curve_sizes<T, KP>;
    extern __shared__ __align__(128) unsigned char bytes[];
    back_smem<T, KP> &room = *(back_smem<T, KP> *)bytes;
    const mn_curve_place at = mn_curve_place_of(p.call, cut);
    if (!at.s.there) return;
    const int64_t K = p.call.K, h = at.h, rows = p.call.B * p.call.T * p.call.H;
    const int64_t b = at.s.span.b, t0 = at.s.span.t0;
    const int warp = threadIdx.x / 32;
    const double seen = mn_curve_before(p, at.s.n);
    const float *sums = at.s.last ? NULL : mn_curve_sums_for(w.back, p.call, at, at.s.slot + 1);
    const float *vector = sums ? sums + K * K : mn_row<float>(p.cot.ks, at.s.n, 0, h);
    const int64_t own = at.column0 + threadIdx.x;
    mn_curve_matrix<T, KP> G;
    G.load(mn_row<float>(p.cot.kk, at.s.n, 0, h), sums, 1.0f, K, at.column0);
    if (threadIdx.x < MN_CURVE_SLICE) room.e[threadIdx.x] = own < K ? mn_get(vector, own) : 0.0f;
    const int n_chunks = (at.s.rows + z::chunk - 1) / z::chunk;
    for (int c = n_chunks - 1; c >= 0; c--) {
        const int start = c * z::chunk, count = min(z::chunk, at.s.rows - start);
        const int64_t t = at.s.first + start;
        mn_smem_tile_load(room.q, z::pitch, z::chunk, KP, p.q, at.s.span, h, t, count, K,
                          cut.packs);
        mn_smem_tile_load(room.k, z::pitch, z::chunk, KP, p.k, at.s.span, h, t, count, K,
                          cut.packs);
        mn_smem_tile_load(room.z_, z::pitch, z::chunk, KP, p.cot.qt, at.s.span, h, t, count, K,
                       cut.packs);
        G.put(room.G);
        if (threadIdx.x < z::chunk) {
            const int i = threadIdx.x;
            float gamma = 0.0f, mean = 0.0f, mean_d = 0.0f;
            const float each = (float)(1.0 / (seen + (double)(t + i + 1)));
            if (i < count) {
                const int64_t row = mn_curve_row_of(p.call, at, t + i);
                gamma = mn_float(*mn_row<T>(p.gamma, b, t0 + t + i, h));
                mean = w.means[2 * row], mean_d = w.means[2 * row + 1];
                T *dgamma = mn_row<T>(p.grad.gamma, b, t0 + t + i, h);
                float part = 0.0f;
                for (int a = 0; a < cut.n_parts; a++) part += w.parts[a * rows + row];
                if (dgamma && at.slice == 0) mn_put(dgamma, -part * each);
            }
            room.mean[0][i] = mean, room.mean[1][i] = -gamma * each * mean_d;
        }
        __syncthreads();
        mn_curve_weigh<T, KP>(room.z_, p, at, t, count, seen);
        __syncthreads();
        mn_smem_tile_sum<z::chunk / 8> P;
        if (warp < z::down) {
            mn_curve_scores<T, KP>(P, room.rows, room.q, room.k, warp * 16);
            mn_curve_put_scores<T, KP>(room.P[0], P, room.mean[0], warp * 16);
        } else if (warp < 2 * z::down) {
            const int row0 = (warp - z::down) * 16;
            P.clear();
            mn_curve_product<MN_PLAIN, MN_TRANSPOSED>(P, room.z_ + row0 * z::pitch, z::pitch,
                                                      room.k,
                                                  z::pitch, KP);
            mn_curve_put_scores<T, KP>(room.P[1], P, room.mean[1], row0);
        }
        __syncthreads();
        key_back<T, KP>(room, p, at, t, count);
        G.add(room.z_, room.q + at.column0);
        G.add(room.q, room.z_ + at.column0);
        __syncthreads();
        if (threadIdx.x < MN_CURVE_SLICE) {
            room.e[threadIdx.x] = mn_curve_weighted(room.e[threadIdx.x], room.z_ + own,
                                                    room.q + own, z::pitch, room.mean[0],
                                                    room.mean[1], count);
        }
        __syncthreads();
    }
    if (at.s.first > 0) return;
    G.store(mn_row<float>(p.grad.kk0, at.s.n, 0, h), 0.5f, K, at.column0);
    float *ds = mn_row<float>(p.grad.ks0, at.s.n, 0, h);
    __syncthreads();
    if (ds && threadIdx.x < MN_CURVE_SLICE && own < K) ds[own] = room.e[threadIdx.x];
}

/* ---- launches -------------------------------------------------------------------------------- */

enum { MOST_PARTS = 4 };    // of y.q of a token

MN_CUDA_PLAN(curvature_backward) {
    const mn_call *c = (const mn_call *)args;
    size_t states, tokens, all;
    return mn_curve_states_size(&states, c) && mn_curve_tokens_size(&tokens, c) &&
           mn_mul_size(&tokens, tokens, 2 + MOST_PARTS) && mn_mul_size(&all, states, 2) &&
           mn_add_size(&all, all, tokens) && mn_mul_size(&plan->shared_bytes, all, sizeof(float));
}

template <typename T, int KP>
static int backward_of(const mn_curvature_args *p, const mn_curve_work &w, cudaStream_t on) {
    const mn_curve_cut cut = mn_curve_smem_tile_cut<T>(p);
    int code = mn_curve_add_up<T, KP, false>(p, w.there, NULL, cut, on);
    if (code != cudaSuccess) return code;
    code = mn_curve_start(curvature_queries_kernel<T, KP>, MN_CURVE_THREADS,
                          sizeof(queries_smem<T, KP>), p->call, cut, on, *p, w);
    if (code != cudaSuccess) return code;
    code = mn_curve_add_up<T, KP, true>(p, w.back, w.means, cut, on);
    if (code != cudaSuccess) return code;
    return mn_curve_start(curvature_back_kernel<T, KP>, MN_CURVE_THREADS, sizeof(back_smem<T, KP>),
                          p->call, cut, on, *p, w);
}

template <int KP>
static int group_of(const mn_curvature_args *p, const mn_curve_work &w, cudaStream_t on) {
    const mn_curve_cut cut = mn_curve_group_cut(p);
    int code = mn_curve_add_up<mn_bf16, KP, false>(p, w.there, NULL, cut, on);
    if (code == cudaSuccess) code = mn_curve_queries<KP>(p, w, cut, on);
    if (code == cudaSuccess) {
        code = mn_curve_add_up<mn_bf16, KP, true>(p, w.back, w.means, cut, on);
    }
    return code == cudaSuccess ? mn_curve_back<KP>(p, w, cut, on) : code;
}

MN_CUDA_LAUNCH(curvature_backward) {
    const mn_curvature_args *p = (const mn_curvature_args *)args;
    const mn_call &c = p->call;
    const cudaStream_t on = (cudaStream_t)stream;
    size_t states, tokens;
    if (mn_curve_slots(c, MN_CURVE_SEGMENT) * c.H == 0) return cudaSuccess;
    if (c.K > MN_CURVE_WIDEST || !mn_curve_states_size(&states, &c) ||
        !mn_curve_tokens_size(&tokens, &c)) {
        return cudaErrorNotSupported;
    }
    float *at = (float *)shared;
    const mn_curve_work w = { at, at + states, at + 2 * states, at + 2 * states + 2 * tokens };
    if (mn_curve_group_serves(p)) {
        return c.K <= 64 ? group_of<64>(p, w, on) : group_of<128>(p, w, on);
    }
    if (c.dtype == MN_BF16) MN_CURVE_BY_WIDTH(backward_of, mn_bf16, c.K, (p, w, on));
    MN_CURVE_BY_WIDTH(backward_of, float, c.K, (p, w, on));
}
