/* curvature_bwd_chunk.cu - curvature backward: products of tiles, and which calls go to
 * those of Hopper (curvature_bwd_sm90.cu). */
#include "kernels/cuda/curvature/curvature_mma_sm80.cuh"
#include "kernels/cuda/curvature/curvature_sm90.cuh"
#include "kernels/cuda/curvature/curvature_smem.cuh"

namespace mneme::curvature {

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
__device__ inline void query_back(queries_smem<T, KP> &smem, const mn_curvature_args &p,
                                  const mn_curve_place &at, int64_t t, int count) {
    using z = mn_curve_sizes<T, KP>;
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const int row0 = warp % z::down * 16, column0 = warp / z::down * z::columns;
    mn_tile_acc<z::columns / 8> Y;
    float part[2] = { 0.0f, 0.0f };
    Y.clear();
    mn_curve_apply<T, KP>(Y, smem.d, smem.R, smem.P, smem.k, at.column0);
    if (smem.is_narrow) {
        mn_curve_apply<T, KP>(Y, smem.d, smem.R_low, smem.P_low, smem.k, at.column0);
    }
    Y.pairs([&](const float *y, int row, int column) {
        const int token = row0 + row, j = at.column0 + column0 + column;
        const float2 q = mn_load2(smem.q + token * z::pitch + j);
        const float2 d = mn_load2(smem.d + token * z::pitch + j);
        const float left = fmaf(-smem.mean[1][token], smem.s[j], y[0]);
        const float right = fmaf(-smem.mean[1][token], smem.s[j + 1], y[1]);
        float &sum = part[row < 8 ? 0 : 1];
        sum = fmaf(q.y, right, fmaf(q.x, left, sum));
        T *dq = mn_row<T>(p.grad.q, at.s.span.b, at.s.span.t0 + t + token, at.h);
        if (!dq || token >= count) return;
        const float weight = -smem.gamma[token] * smem.each[token];
        mn_row_store2(dq, j, p.call.K, fmaf(weight, left, d.x), fmaf(weight, right, d.y));
    });
#pragma unroll
    for (int i = 0; i < 2; i++) {
        part[i] += __shfl_xor_sync(0xffffffffu, part[i], 1);
        part[i] += __shfl_xor_sync(0xffffffffu, part[i], 2);
        if (lane % 4 == 0) smem.part[warp / z::down][row0 + lane / 4 + 8 * i] = part[i];
    }
}

/* The means of a chunk's tokens and the scores of d. */
template <typename T, int KP>
__device__ inline void queries_scores(queries_smem<T, KP> &smem) {
    using z = mn_curve_sizes<T, KP>;
    const int warp = threadIdx.x / 32;
    mn_tile_acc<z::chunk / 8> P;
    if (warp < z::down) mn_curve_scores<T, KP>(P, smem.within[1], smem.d, smem.k, warp * 16);
    else if (warp < 2 * z::down) {
        mn_curve_scores<T, KP>(P, smem.within[0], smem.q, smem.k, (warp - z::down) * 16);
    }
    mn_curve_dots<T, KP>(smem.before[0], smem.s, smem.q, warp, MN_CURVE_WARPS);
    mn_curve_dots<T, KP>(smem.before[1], smem.s, smem.d, warp, MN_CURVE_WARPS);
    __syncthreads();
    for (int i = threadIdx.x; i < 2 * z::chunk; i += MN_CURVE_THREADS) {
        const int which = i / z::chunk, t = i % z::chunk;
        smem.mean[which][t] = (smem.within[which][t] + smem.before[which][t]) * smem.each[t];
    }
    __syncthreads();
    if (warp < z::down) {
        mn_curve_put_scores<T, KP>(smem.P, P, smem.mean[1], warp * 16,
                                   smem.is_narrow ? smem.P_low : NULL);
    }
    __syncthreads();
}

template <typename T, int KP>
__global__ void __launch_bounds__(MN_CURVE_THREADS, KP == 256 ? 1 : 2)
curvature_queries_kernel(const __grid_constant__ mn_curvature_args p, mn_curve_work w,
                      mn_curve_cut cut) {
    using z = mn_curve_sizes<T, KP>;
    extern __shared__ __align__(128) unsigned char bytes[];
    queries_smem<T, KP> &smem = *(queries_smem<T, KP> *)bytes;
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
        smem.s[i] = i < K ? mn_get(vector, i) : 0.0f;
    }
    for (int start = 0; start < at.s.rows; start += z::chunk) {
        const int count = min(z::chunk, at.s.rows - start);
        const int64_t t = at.s.first + start;
        mn_smem_tile_load(smem.q, z::pitch, z::chunk, KP, p.q, at.s.span, h, t, count, K,
                          cut.packs);
        mn_smem_tile_load(smem.k, z::pitch, z::chunk, KP, p.k, at.s.span, h, t, count, K,
                          cut.packs);
        mn_smem_tile_load(smem.d, z::pitch, z::chunk, KP, p.cot.qt, at.s.span, h, t, count, K,
                       cut.packs);
        const int next = min(z::chunk, at.s.rows - start - z::chunk);
        mn_smem_tile_prefetch<T>(p.q, at.s.span, h, t + z::chunk, next, K);
        mn_smem_tile_prefetch<T>(p.k, at.s.span, h, t + z::chunk, next, K);
        mn_smem_tile_prefetch<T>(p.cot.qt, at.s.span, h, t + z::chunk, next, K);
        R.put(smem.R);
        if (smem.is_narrow) R.put_rest(smem.R_low);
        if (threadIdx.x < z::chunk) {
            const int i = threadIdx.x;
            smem.each[i] = (float)(1.0 / (seen + (double)(t + i + 1)));
            smem.gamma[i] = i < count ? mn_float(*mn_row<T>(p.gamma, b, t0 + t + i, h)) : 0.0f;
        }
        __syncthreads();
        queries_scores<T, KP>(smem);
        query_back<T, KP>(smem, p, at, t, count);
        R.add(smem.k, smem.k + at.column0);
        __syncthreads();
        if (threadIdx.x < count) {
            const int i = threadIdx.x;
            const int64_t row = mn_curve_row_of(p.call, at, t + i);
            float part = 0.0f;
            for (int a = 0; a < z::across; a++) part += smem.part[a][i];
            w.parts[at.slice * rows + row] = part;
            if (at.slice == 0) w.means[2 * row] = smem.mean[0][i];
            if (at.slice == 0) w.means[2 * row + 1] = smem.mean[1][i];
        }
        for (int i = threadIdx.x; i < KP; i += MN_CURVE_THREADS) {
            smem.s[i] += mn_curve_column_sum(smem.k, z::pitch, z::chunk, i);
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
    float e[MN_CURVE_SLICE], rows[z::chunk], mean[2][z::chunk], weight[z::chunk];
};

/* dK of the warp's tile. */
template <typename T, int KP>
__device__ inline void key_back(back_smem<T, KP> &smem, const mn_curvature_args &p,
                                const mn_curve_place &at, int64_t t, int count) {
    using z = mn_curve_sizes<T, KP>;
    const int warp = threadIdx.x / 32, row0 = warp % z::down * 16;
    const int column0 = warp / z::down * z::columns;
    mn_tile_acc<z::columns / 8> dk;
    dk.clear();
    mn_curve_product<MN_NO_TRANS, MN_NO_TRANS>(dk, smem.k + row0 * z::pitch, z::pitch,
                                               smem.G + column0,
                                         MN_CURVE_PITCH, KP);
    const int first = row0 * z::score_pitch + row0;    // of tokens before row0 there is nothing
    const int from = row0 * z::pitch + at.column0 + column0;
    mn_curve_product_later(dk, smem.P[0] + first, z::score_pitch, smem.z_ + from, z::pitch,
                           z::chunk - row0);
    mn_curve_product_later(dk, smem.P[1] + first, z::score_pitch, smem.q + from, z::pitch,
                           z::chunk - row0);
    dk.pairs([&](const float *x, int row, int column) {
        const int token = row0 + row;
        const int64_t j = at.column0 + column0 + column, K = p.call.K;
        T *to = mn_row<T>(p.grad.k, at.s.span.b, at.s.span.t0 + t + token, at.h);
        if (!to || token >= count) return;
        float left = x[0] + smem.e[column0 + column], right = x[1] + smem.e[column0 + column + 1];
        if (p.adds_k && j < K) left += mn_float(to[j]);
        if (p.adds_k && j + 1 < K) right += mn_float(to[j + 1]);
        mn_row_store2(to, j, K, left, right);
    });
}

template <typename T, int KP>
__global__ void __launch_bounds__(MN_CURVE_THREADS, KP == 256 ? 1 : 2)
curvature_back_kernel(const __grid_constant__ mn_curvature_args p, mn_curve_work w,
                      mn_curve_cut cut) {
    using z = mn_curve_sizes<T, KP>;
    extern __shared__ __align__(128) unsigned char bytes[];
    back_smem<T, KP> &smem = *(back_smem<T, KP> *)bytes;
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
    if (threadIdx.x < MN_CURVE_SLICE) smem.e[threadIdx.x] = own < K ? mn_get(vector, own) : 0.0f;
    const int n_chunks = (at.s.rows + z::chunk - 1) / z::chunk;
    for (int c = n_chunks - 1; c >= 0; c--) {
        const int start = c * z::chunk, count = min(z::chunk, at.s.rows - start);
        const int64_t t = at.s.first + start;
        mn_smem_tile_load(smem.q, z::pitch, z::chunk, KP, p.q, at.s.span, h, t, count, K,
                          cut.packs);
        mn_smem_tile_load(smem.k, z::pitch, z::chunk, KP, p.k, at.s.span, h, t, count, K,
                          cut.packs);
        mn_smem_tile_load(smem.z_, z::pitch, z::chunk, KP, p.cot.qt, at.s.span, h, t, count, K,
                       cut.packs);
        G.put(smem.G);
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
            smem.mean[0][i] = mean, smem.mean[1][i] = -gamma * each * mean_d;
            smem.weight[i] = mn_curve_weight(gamma, seen + (double)(t + i));
        }
        const int before = start > 0 ? z::chunk : 0;    // tokens of the chunk that comes next
        mn_smem_tile_prefetch<T>(p.q, at.s.span, h, t - before, before, K);
        mn_smem_tile_prefetch<T>(p.k, at.s.span, h, t - before, before, K);
        mn_smem_tile_prefetch<T>(p.cot.qt, at.s.span, h, t - before, before, K);
        __syncthreads();
        mn_curve_weigh<T, KP>(smem.z_, smem.weight, count);
        __syncthreads();
        mn_tile_acc<z::chunk / 8> P;
        if (warp < z::down) {
            mn_curve_scores<T, KP>(P, smem.rows, smem.q, smem.k, warp * 16);
            mn_curve_put_scores<T, KP>(smem.P[0], P, smem.mean[0], warp * 16);
        } else if (warp < 2 * z::down) {
            const int row0 = (warp - z::down) * 16;
            P.clear();
            mn_curve_product<MN_NO_TRANS, MN_TRANS>(P, smem.z_ + row0 * z::pitch, z::pitch,
                                                      smem.k,
                                                  z::pitch, KP);
            mn_curve_put_scores<T, KP>(smem.P[1], P, smem.mean[1], row0);
        }
        __syncthreads();
        key_back<T, KP>(smem, p, at, t, count);
        G.add(smem.z_, smem.q + at.column0);
        G.add(smem.q, smem.z_ + at.column0);
        __syncthreads();
        if (threadIdx.x < MN_CURVE_SLICE) {
            smem.e[threadIdx.x] = mn_curve_weighted(smem.e[threadIdx.x], smem.z_ + own,
                                                    smem.q + own, z::pitch, smem.mean[0],
                                                    smem.mean[1], count);
        }
        __syncthreads();
    }
    if (at.s.first > 0) return;
    G.store(mn_row<float>(p.grad.kk0, at.s.n, 0, h), 0.5f, K, at.column0);
    float *ds = mn_row<float>(p.grad.ks0, at.s.n, 0, h);
    __syncthreads();
    if (ds && threadIdx.x < MN_CURVE_SLICE && own < K) ds[own] = smem.e[threadIdx.x];
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

/* By groups of warps on Hopper (curvature_bwd_sm90.cu), if TMA can bring the tensors. */
template <int KP>
static int group_of(const mn_curvature_args *p, const mn_curve_work &w, cudaStream_t on) {
    const mn_curve_cut cut = mn_curve_group_cut(p);
    mn_curve_back_maps maps;
    if (!mn_curve_back_map(&maps, p)) return backward_of<mn_bf16, KP>(p, w, on);
    int code = mn_curve_group_sums(p, maps, w.there, cut, on);
    if (code == cudaSuccess) code = mn_curve_back_queries(p, maps, w, cut, on);
    if (code == cudaSuccess) code = mn_curve_group_sums_back(p, maps, w, cut, on);
    return code == cudaSuccess ? mn_curve_back_keys(p, maps, w, cut, on) : code;
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
    int code;
    if (mn_curve_backward_sm80(&code, p, w, on)) return code;
    if (c.dtype == MN_BF16) MN_CURVE_BY_WIDTH(backward_of, mn_bf16, c.K, (p, w, on));
    MN_CURVE_BY_WIDTH(backward_of, float, c.K, (p, w, on));
}

}    // namespace mneme::curvature
