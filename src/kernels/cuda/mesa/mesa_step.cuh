/* mesa_step.cuh - a head through one token of MesaNet (see ref/mesa.c); results are those of
 * mesa.cu to the last bit. Keys have at most 64 channels, or up to 128 in mesa_step_wide.cuh.
 *
 *   Hkk = e^g Hkk + beta k k'    Hkv = e^g Hkv + beta k v'    o = Hkv' (Hkk + diag lam)^-1 scale q
 *
 * Loads the pair and the token into shared memory; one warp solves, the others store the pair. */
#ifndef MN_KERNELS_CUDA_MESA_MESA_STEP_CUH
#define MN_KERNELS_CUDA_MESA_MESA_STEP_CUH

#include "kernels/cuda/prim/block.cuh"
#include "kernels/cuda/mesa/mesa_output.cuh"
#include "kernels/cuda/mesa/mesa_step_wide.cuh"
#include "kernels/decode_image.h"

namespace mneme::mesa {

/* Keys of a warp that solves in registers; and the widest whose token is a single launch, or a
 * stage: with 64 wider ones go by the launches of mesa.cu. */
enum { STEP_MAX_K = 64, STEP_WIDEST = WIDE_MAX_K, STEP_MAX_V = 4096 };

/* Hkk and Hkv as they were given lie behind it, the former in rows that are longer by one. */
template <int N>
struct step_smem {
    mn_mesa_read_smem<N> tokens;
    float given[8 * N][8 * N + 1];

    __device__ float *values() { return (float *)(this + 1); }
};

/* What was given of the head, zeros outside. */
template <int N, typename Block>
__device__ inline void load_state_pair(step_smem<N> &smem, const mn_mesa_args &p, int64_t head,
                                  int width) {
    const int K = (int)p.call.K, V = (int)p.call.V;
    const float *kk = (const float *)p.hkk0.data, *kv = (const float *)p.hkv0.data;
    float *values = smem.values();
#pragma unroll 8
    for (int i = threadIdx.x; i < 64 * N * N; i += Block::size) {
        const int row = i / (8 * N), j = i % (8 * N);
        const bool inside = kk && row < K && j < K;
        smem.given[row][j] = inside ? kk[(head * K + row) * K + j] : 0.0f;
    }
    for (int row = threadIdx.x / 32; row < 8 * N; row += Block::size / 32) {
#pragma unroll 4
        for (int j = threadIdx.x % 32; j < width; j += 32) {
            const bool inside = kv && row < K && j < V;
            values[row * width + j] = inside ? kv[(head * K + row) * V + j] : 0.0f;
        }
    }
}

/* The pair with the token, or as it was where there is none, by threads from `first` on. */
template <int N, typename T, typename Block>
__device__ inline void store_state_pair(step_smem<N> &smem, const mn_mesa_args &p, int64_t head,
                                  int width, const T *v, float2 token, bool some, int first) {
    const int K = (int)p.call.K, V = (int)p.call.V, warps = (Block::size - first) / 32;
    float *kk = (float *)p.hkk.data, *kv = (float *)p.hkv.data;
    const float *k = smem.tokens.keys[0], *values = smem.values();
    const float decay = expf(token.y);
    for (int i = ((int)threadIdx.x - first) / 32; i < K; i += warps) {
        for (int j = threadIdx.x % 32; j < K && kk; j += 32) {
            const float x = smem.tokens.front[i][j];
            const float write = fmaf(token.x, k[i] * k[j], 0.0f);
            kk[(head * K + i) * K + j] = some ? fmaf(decay, x, write) : x;
        }
        for (int j = threadIdx.x % 32; j < V && kv; j += 32) {
            const float x = values[i * width + j];
            const float write = some ? fmaf(token.x, k[i] * mn_float(v[j]), 0.0f) : 0.0f;
            kv[(head * K + i) * V + j] = some ? fmaf(decay, x, write) : x;
        }
    }
}

/* o of the only token, added in the order of mn_mesa_output. */
template <int N, typename T, typename Block>
__device__ inline void store_only(mn_mesa_read_smem<N> &smem, const mn_mesa_args &p,
                                const mn_mesa_read_ctx<N> &ctx) {
    T *o = mn_row<T>(p.o, ctx.b, ctx.t0, ctx.at.h);
    const int warp = threadIdx.x / 32;
    for (int64_t j0 = 0; j0 < p.call.V && o; j0 += 64) {
        const int64_t j = j0 + 2 * ctx.lane;
        float sum[1][2] = {};
        if (j < p.call.V && warp < 4) mn_mesa_add_values<N, 1, T>(sum, smem, p, ctx, 0, j);
        if (warp < 4) smem.parts[warp][0][ctx.lane] = make_float2(sum[0][0], sum[0][1]);
        Block::sync();
        if (warp == 0) {
            float2 all = smem.parts[0][0][ctx.lane];
#pragma unroll
            for (int i = 1; i < 4; i++) {
                all.x += smem.parts[i][0][ctx.lane].x, all.y += smem.parts[i][0][ctx.lane].y;
            }
            if (j < p.call.V) mn_put(o + j, all.x);
            if (j + 1 < p.call.V) mn_put(o + j + 1, all.y);
        }
        Block::sync();
    }
}

/* Head h of sequence n; all threads call. */
template <int N, typename T, typename Block>
__device__ inline void step_head(step_smem<N> &smem, const mn_mesa_args &p, int64_t n, int64_t h) {
    static_assert(Block::size == MN_MESA_READ_THREADS, "a step's threads");
    const int64_t head = n * p.call.H + h, K = p.call.K;
    const int width = (int)(p.call.V + 3) / 4 * 4, thread = (int)threadIdx.x;
    mn_mesa_read_ctx<N> ctx;
    mn_mesa_coord at = {};
    at.tile.span = mn_span_at(p.call, n), at.h = h;
    at.tile.n_rows = at.tile.span.length;
    ctx.init(p, at, 0);
    ctx.layout.rows = 0, ctx.layout.pitch = width, ctx.front = smem.values();    // Hkv by itself
    const bool some = ctx.count > 0;
    const float2 token = mn_mesa_token<T>(p, at, ctx.lane);
    const float2 only = make_float2(mn_mesa_shfl(token.x, 0), mn_mesa_shfl(token.y, 0));
    if (thread < 8 * N) {
        const T *k = mn_row<T>(p.k, ctx.b, ctx.t0, h), *q = mn_row<T>(p.q, ctx.b, ctx.t0, h);
        const bool valid = thread < K && some;
        smem.tokens.put(0, thread, valid ? mn_float(k[thread]) : 0.0f);
        smem.tokens.put(MN_MESA_CHUNK, thread, 0.0f);
        smem.tokens.sides[0][0][thread] = valid ? (float)p.scale * mn_float(q[thread]) : 0.0f;
        smem.tokens.ridge[thread] =
            thread < K ? mn_float(mn_row<T>(p.lam, 0, 0, h)[thread]) : 1.0f;
    }
    load_state_pair<N, Block>(smem, p, head, width);
    Block::sync();
    for (int i = thread; i < 64 * N * N; i += Block::size) {
        const int row = i / (8 * N), j = i % (8 * N);
        smem.tokens.front[row][j] = 0.5f * (smem.given[row][j] + smem.given[j][row]);
    }
    Block::sync();
    const T *v = mn_row<T>(p.v, ctx.b, ctx.t0, h);
    if (thread >= 32) store_state_pair<N, T, Block>(smem, p, head, width, v, only, some, 32);
    else if (some) {
        const mn_mesa_workspace none = {};
        ctx.beta = token.x, ctx.level = mn_mesa_log_decay_cumsum(token.y, ctx.lane);
        ctx.own_index = 0, ctx.u = 0, ctx.n_reachable = 1, ctx.active = true;
        mn_mesa_read_token<N, T, false>(smem.tokens, p, none, ctx);
    }
    Block::sync();
    if (some) store_only<N, T, Block>(smem.tokens, p, ctx);
}

template <int N>
inline size_t step_bytes_of(const mn_call &c) {
    return sizeof(step_smem<N>) + (size_t)(8 * N * ((c.V + 3) / 4 * 4)) * sizeof(float);
}

/* A call of its own: registers of one way do not depend on the other. */
template <typename T, typename Block>
__device__ __noinline__ void step_head_narrow(const mn_mesa_args &p, int64_t n, int64_t h,
                                              unsigned char *bytes) {
    if (p.call.K <= 16) step_head<2, T, Block>(*(step_smem<2> *)bytes, p, n, h);
    else if (p.call.K <= 32) step_head<4, T, Block>(*(step_smem<4> *)bytes, p, n, h);
    else step_head<8, T, Block>(*(step_smem<8> *)bytes, p, n, h);
}

/* The stage of a megakernel: a head. */
template <typename T, typename Block>
__device__ inline void mesa_step(const mn_mesa_args &p, int64_t n, int64_t h, int64_t,
                                 unsigned char *bytes) {
    if (p.call.K <= STEP_MAX_K) step_head_narrow<T, Block>(p, n, h, bytes);
    else step_head_wide<T, Block>(*(wide_smem *)bytes, p, n, h);
}

/* Shared memory of a step. */
inline size_t step_room(const mn_call &c) {
    return c.K > STEP_MAX_K ? sizeof(wide_smem) : step_bytes_of<STEP_MAX_K / 8>(c);
}

inline bool mesa_step_supported(const mn_mesa_args *p) {
    return p->o.data && p->steps == 0 && p->call.K <= STEP_WIDEST && p->call.V <= STEP_MAX_V &&
           step_room(p->call) <= MN_DECODE_ROOM;
}

}    // namespace mneme::mesa

#endif
