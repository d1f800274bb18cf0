/* attention_backward.cuh - attention and relu_attention backward by Hopper's products, in bf16, for
 * heads of up to 128 columns.
 *
 * First kernel, a block for 128 queries: one walk over the keys finds two numbers of each row,
 *
 *   softmax   a = log2 sum 2^(c z)              b = sum w g                g = do.v
 *   relu      a = 1 / n, n = max(|z|, eps)      b = scale a^2 sum relu(z) g a, 0 where eps holds
 *
 * a second walk sums dq = scale sum dz k with dz = w (g - b), or [z > 0] g a - b z / scale. Second
 * kernel, a block for 128 keys: with keys as rows, weights and dz are made again for each tile of
 * queries, and dv = sum w do, dk = scale sum dz q. Nothing is added across blocks. */
#ifndef MN_KERNELS_CUDA_ATTENTION_BACKWARD_CUH
#define MN_KERNELS_CUDA_ATTENTION_BACKWARD_CUH

#include "kernels/cuda/attention_forward.cuh"

enum { MN_BACK_ROWS = 128, MN_BACK_STEP = 64, MN_BACK_STAGES = 4 };

/* The rows of a block stay (queries and do, or keys and values), those of the other side come in
 * stages of 64, with two numbers a row where they are queries. */
template <int D>
struct alignas(1024) mn_back_room {
    static constexpr int wide = MN_BACK_ROWS * D * 2, narrow = MN_BACK_STEP * D * 2;
    unsigned char a[wide], b[wide], x[MN_BACK_STAGES][narrow], y[MN_BACK_STAGES][narrow];
    float rows[MN_BACK_STAGES][2][MN_BACK_STEP];
    uint64_t there, stage_there[MN_BACK_STAGES], stage_free[MN_BACK_STAGES];
};

struct mn_back {
    mn_flash f;
    float *rows;    // (2, B, H, T) numbers
};

template <int D>
__device__ inline void mn_back_open(mn_back_room<D> &room) {
    if (threadIdx.x == 0) {
        mn_barrier_open(&room.there, MN_GROUP);
        for (int i = 0; i < MN_BACK_STAGES; i++) {
            mn_barrier_open(&room.stage_there[i], MN_GROUP);
            mn_barrier_open(&room.stage_free[i], 8);
        }
    }
    __syncthreads();
}

/* Where row t (of batch row b) of head h has its numbers. */
__device__ inline float *mn_back_row(const mn_back &k, int64_t b, int64_t h, int64_t t) {
    return k.rows + (b * k.f.p.call.H + h) * k.f.p.call.T + t;
}

__device__ inline int64_t mn_back_plane(const mn_back &k) {
    return k.f.p.call.B * k.f.p.call.H * k.f.p.call.T;
}

#if MN_HAS_WGMMA

/* 64 rows of sums leave through shared memory at `room` (of 128 rows, these from 64 half on), times
 * `by`; row r of the block is row t + r of head h. */
template <int D>
__device__ inline void mn_back_put(unsigned char *room, const float (&d)[D / 2], float by,
                                   const mn_out &to, int64_t b, int64_t t, int64_t h, int n_rows,
                                   int width) {
    const int half = threadIdx.x / MN_GROUP - 1, thread = threadIdx.x % MN_GROUP;
    const int row = half * 64 + thread / 32 * 16 + thread % 32 / 4;
    if (!to.data) return;
#pragma unroll
    for (int i = 0; i < D / 2; i += 2) {
        const int column = i / 4 * 8 + thread % 4 * 2;
        *(uint32_t *)(room + mn_tile_byte(128, row + i % 4 / 2 * 8, column)) =
            mn_pair(d[i] * by, d[i + 1] * by);
    }
    asm volatile("bar.sync %0, 128;" ::"r"(half + 1) : "memory");
    for (int i = thread; i < 64 * D / 8; i += MN_GROUP) {
        const int r = half * 64 + i / (D / 8), column = i % (D / 8) * 8;
        if (r >= n_rows || column >= width) continue;
        *(uint4 *)(mn_row<mn_bf16>(to, b, t + r, h) + column) =
            *(const uint4 *)(room + mn_tile_byte(128, r, column));
    }
}

/* ---- queries --------------------------------------------------------------------------------- */

template <int D>
__device__ inline void mn_back_copy_keys(mn_back_room<D> &room, const mn_flash_place &at,
                                         const mn_reads &p, int n_tiles) {
    const int i = threadIdx.x % MN_GROUP, K = (int)p.call.K, V = (int)p.call.V;
    const int64_t b = at.tile.span.b, t0 = at.tile.span.t0, t = t0 + at.tile.first;
    const int64_t j = at.h / (p.call.H / p.call.J);
    const mn_bf16 *k = mn_row<mn_bf16>(p.k, b, t0, j), *v = mn_row<mn_bf16>(p.v, b, t0, j);
    const int n_rows = (int)at.tile.n_rows;
    const int n_keys = (int)(at.before + at.tile.first) + n_rows;
    mn_copy_tile<128, D>(mn_shared_at(room.a), mn_row<mn_bf16>(p.q, b, t, at.h), p.q.stride[1],
                         n_rows, K, i);
    mn_copy_tile<128, D>(mn_shared_at(room.b), mn_row<mn_bf16>(p.d_o, b, t, at.h),
                         p.d_o.stride[1], n_rows, V, i);
    for (int n = 0; n < 2 * n_tiles; n++) {
        const int stage = n % MN_BACK_STAGES, phase = (n / MN_BACK_STAGES & 1) ^ 1;
        const int first = (n < n_tiles ? n : n - n_tiles) * MN_BACK_STEP;
        mn_barrier_wait(&room.stage_free[stage], phase);
        mn_copy_tile<64, D>(mn_shared_at(room.x[stage]), k + first * p.k.stride[1],
                            p.k.stride[1], n_keys - first, K, i);
        mn_copy_tile<64, D>(mn_shared_at(room.y[stage]), v + first * p.v.stride[1],
                            p.v.stride[1], n_keys - first, V, i);
        mn_copies_done();
        if (n == 0) mn_barrier_arrive(&room.there);
        mn_barrier_arrive(&room.stage_there[stage]);
    }
}

/* What the first walk gathers of a thread's two rows. */
struct mn_back_state {
    float most[2], sum[2], mean[2];
};

template <bool softmax>
__device__ inline void mn_back_gather(mn_back_state &s, float (&z)[32], const float (&g)[32],
                                      float scale) {
#pragma unroll
    for (int r = 0; r < 2; r++) {
        float sum = 0.0f, mean = 0.0f;
        if (!softmax) {
#pragma unroll
            for (int i = 2 * r; i < 32; i += i % 2 ? 3 : 1) {
                sum = fmaf(z[i], z[i], sum);
                mean = fmaf(fmaxf(z[i], 0.0f), g[i], mean);
            }
            s.sum[r] += sum, s.mean[r] += mean;
            continue;
        }
        float most = s.most[r];
#pragma unroll
        for (int i = 2 * r; i < 32; i += i % 2 ? 3 : 1) most = fmaxf(most, z[i]);
        most = mn_quad_max(most);
        const float by = mn_exp2((s.most[r] - most) * scale), shift = -most * scale;
        s.most[r] = most;
#pragma unroll
        for (int i = 2 * r; i < 32; i += i % 2 ? 3 : 1) {
            const float w = mn_exp2(fmaf(z[i], scale, shift));
            sum += w;
            mean = fmaf(w, g[i], mean);
        }
        s.sum[r] = fmaf(s.sum[r], by, sum);
        s.mean[r] = fmaf(s.mean[r], by, mean);
    }
}

/* Scores that rows do not see: `left` keys of the tile are seen by the first row. */
template <bool softmax>
__device__ inline void mn_back_mask(float (&z)[32], int left) {
    const int column = threadIdx.x % 4 * 2;
    const float none = softmax ? -INFINITY : 0.0f;
#pragma unroll
    for (int i = 0; i < 32; i++) {
        if (i / 4 * 8 + column + i % 2 >= left + i % 4 / 2 * 8) z[i] = none;
    }
}

/* The cotangent of a score, before its scale, and in w the weight. */
template <bool softmax>
__device__ inline float mn_back_score(float &w, float z, float g, float a, float b, float scale) {
    if (softmax) {
        w = mn_exp2(fmaf(z, scale, -a));
        return w * (g - b);
    }
    w = fmaxf(z, 0.0f) * (scale * a);
    return fmaf(-b, z, z > 0.0f ? g * a : 0.0f);
}

/* The two numbers of a row from its sums. */
template <bool softmax>
__device__ inline void mn_back_close(mn_back_state &s, float (&a)[2], float (&b)[2],
                                     const mn_reads &p, float scale) {
#pragma unroll
    for (int r = 0; r < 2; r++) {
        const float sum = mn_quad_sum(s.sum[r]), mean = mn_quad_sum(s.mean[r]);
        if (softmax) {
            a[r] = fmaf(s.most[r], scale, log2f(sum));
            b[r] = mean / sum;
            continue;
        }
        const float norm = p.scale * sqrtf(sum), by = 1.0f / fmaxf(norm, p.eps);
        a[r] = by;
        b[r] = norm > p.eps ? p.scale * by * by * (p.scale * by * mean) : 0.0f;
    }
}

template <int D, bool softmax>
__device__ inline void mn_back_queries(mn_back_room<D> &room, const mn_flash_place &at,
                                       const mn_back &k, int n_tiles) {
    const mn_reads &p = k.f.p;
    const int half = threadIdx.x / MN_GROUP - 1, thread = threadIdx.x % MN_GROUP;
    const int row = half * 64 + thread / 32 * 16 + thread % 32 / 4;
    const int seen = (int)(at.before + at.tile.first) + row + 1;
    const float scale = softmax ? p.scale * 1.4426950408889634f : p.scale;
    const uint32_t q = mn_shared_at(room.a) + half * 8192, d_o = mn_shared_at(room.b) + half * 8192;
    float z[32], g[32], a[2], b[2];
    mn_back_state s = { { -INFINITY, -INFINITY }, { 0.0f, 0.0f }, { 0.0f, 0.0f } };
    const auto start = [&](int n) {
        const int stage = n % MN_BACK_STAGES;
        mn_barrier_wait(&room.stage_there[stage], n / MN_BACK_STAGES & 1);
        mn_products_start();
        mn_scores_start<D, 128, 64>(z, q, mn_shared_at(room.x[stage]));
        mn_scores_start<D, 128, 64>(g, d_o, mn_shared_at(room.y[stage]));
        mn_products_end();
    };
    const auto mask = [&](int tile) {
        const int left = seen - tile * MN_BACK_STEP;
        if (left < MN_BACK_STEP) mn_back_mask<softmax>(z, left);
    };
    mn_barrier_wait(&room.there, 0);
    for (int n = 0; n < n_tiles; n++) {
        start(n);
        mn_products_wait<0>();
        if (thread % 32 == 0) mn_barrier_arrive(&room.stage_free[n % MN_BACK_STAGES]);
        mask(n);
        mn_back_gather<softmax>(s, z, g, scale);
    }
    mn_back_close<softmax>(s, a, b, p, scale);
    const int64_t batch = at.tile.span.b, t = at.tile.span.t0 + at.tile.first;
    for (int r = 0; r < 2 && thread % 4 == 0; r++) {
        if (row + 8 * r >= at.tile.n_rows) continue;
        float *to = mn_back_row(k, batch, at.h, t + row + 8 * r);
        to[0] = a[r];
        to[mn_back_plane(k)] = b[r];
    }
    if (!p.dq.data) {
        for (int n = n_tiles; n < 2 * n_tiles; n++) {
            if (thread % 32 == 0) mn_barrier_arrive(&room.stage_free[n % MN_BACK_STAGES]);
        }
        return;
    }
    float dq[D / 2] = {};
    uint32_t dz[16];
    const auto score = [&](int n) {
        mask(n - n_tiles);
#pragma unroll
        for (int i = 0; i < 32; i += 2) {
            const int r = i % 4 / 2;
            float w;
            const float x = mn_back_score<softmax>(w, z[i], g[i], a[r], b[r], scale);
            const float y = mn_back_score<softmax>(w, z[i + 1], g[i + 1], a[r], b[r], scale);
            dz[i / 2] = mn_pair(x, y);
        }
    };
    const auto add = [&](int n) {
        mn_products_start();
        mn_read_start<64, D>(dq, dz, mn_shared_at(room.x[n % MN_BACK_STAGES]), true);
        mn_products_end();
    };
    start(n_tiles);
    mn_products_wait<0>();
    score(n_tiles);
    for (int n = n_tiles + 1; n < 2 * n_tiles; n++) {
        add(n - 1);
        start(n);
        mn_products_wait<0>();
        if (thread % 32 == 0) mn_barrier_arrive(&room.stage_free[(n - 1) % MN_BACK_STAGES]);
        score(n);
    }
    add(2 * n_tiles - 1);
    mn_products_wait<0>();
    mn_back_put<D>(room.a, dq, p.scale, p.dq, batch, t, at.h, (int)at.tile.n_rows,
                   (int)p.call.K);
}

/* ---- keys ------------------------------------------------------------------------------------ */

/* Query tiles that see a tile of keys: `n` of each of `heads` query heads, from row `first` on. */
struct mn_back_range {
    int first, n, heads;
    int64_t head0, length;    // queries of the sequence
};

__device__ inline mn_back_range mn_back_range_of(const mn_flash_place &at, const mn_call &call) {
    mn_back_range r;
    r.length = call.cu_seqlens ? at.tile.span.length : call.T;
    r.heads = (int)(call.H / call.J);
    r.head0 = at.h * r.heads;
    r.first = (int)max(at.tile.first - at.before, (int64_t)0) / MN_BACK_STEP * MN_BACK_STEP;
    r.n = (int)((r.length - r.first + MN_BACK_STEP - 1) / MN_BACK_STEP);
    return r;
}

template <int D>
__device__ inline void mn_back_copy_queries(mn_back_room<D> &room, const mn_flash_place &at,
                                            const mn_back &k, const mn_back_range &range) {
    const mn_reads &p = k.f.p;
    const int i = threadIdx.x % MN_GROUP, K = (int)p.call.K, V = (int)p.call.V;
    const int64_t b = at.tile.span.b, t0 = at.tile.span.t0, first = t0 + at.tile.first;
    const int n_rows = (int)at.tile.n_rows;
    if (range.n == 0) return;    // no queries
    mn_copy_tile<128, D>(mn_shared_at(room.a), mn_row<mn_bf16>(p.k, b, first, at.h),
                         p.k.stride[1], n_rows, K, i);
    mn_copy_tile<128, D>(mn_shared_at(room.b), mn_row<mn_bf16>(p.v, b, first, at.h),
                         p.v.stride[1], n_rows, V, i);
    for (int n = 0; n < range.n * range.heads; n++) {
        const int stage = n % MN_BACK_STAGES, phase = (n / MN_BACK_STAGES & 1) ^ 1;
        const int t = range.first + n % range.n * MN_BACK_STEP, left = (int)range.length - t;
        const int64_t h = range.head0 + n / range.n;
        mn_barrier_wait(&room.stage_free[stage], phase);
        mn_copy_tile<64, D>(mn_shared_at(room.x[stage]), mn_row<mn_bf16>(p.q, b, t0 + t, h),
                            p.q.stride[1], left, K, i);
        mn_copy_tile<64, D>(mn_shared_at(room.y[stage]), mn_row<mn_bf16>(p.d_o, b, t0 + t, h),
                            p.d_o.stride[1], left, V, i);
        const int r = i % MN_BACK_STEP;
        const float *from = mn_back_row(k, b, h, t0 + t + r) +
                            i / MN_BACK_STEP * mn_back_plane(k);
        room.rows[stage][i / MN_BACK_STEP][r] = r < left ? *from : 0.0f;
        mn_copies_done();
        if (n == 0) mn_barrier_arrive(&room.there);
        mn_barrier_arrive(&room.stage_there[stage]);
    }
}

template <int D, bool softmax>
__device__ inline void mn_back_keys(mn_back_room<D> &room, const mn_flash_place &at,
                                    const mn_back &k, const mn_back_range &range) {
    const mn_reads &p = k.f.p;
    const int half = threadIdx.x / MN_GROUP - 1, thread = threadIdx.x % MN_GROUP;
    const int row = half * 64 + thread / 32 * 16 + thread % 32 / 4, column = thread % 4 * 2;
    const int key = (int)(at.tile.first - at.before) + row;    // the first query that sees it
    const float scale = softmax ? p.scale * 1.4426950408889634f : p.scale;
    const uint32_t keys = mn_shared_at(room.a) + half * 8192;
    const uint32_t values = mn_shared_at(room.b) + half * 8192;
    float z[32], g[32], dk[D / 2] = {}, dv[D / 2] = {};
    uint32_t w[16], dz[16];
    if (range.n > 0) mn_barrier_wait(&room.there, 0);
    for (int n = 0; n < range.n * range.heads; n++) {
        const int stage = n % MN_BACK_STAGES, t = range.first + n % range.n * MN_BACK_STEP;
        mn_barrier_wait(&room.stage_there[stage], n / MN_BACK_STAGES & 1);
        mn_products_start();
        mn_scores_start<D, 128, 64>(z, keys, mn_shared_at(room.x[stage]));
        mn_scores_start<D, 128, 64>(g, values, mn_shared_at(room.y[stage]));
        mn_products_end();
        mn_products_wait<0>();
        if (t < key + 8) {
#pragma unroll
            for (int i = 0; i < 32; i++) {
                if (t + i / 4 * 8 + column + i % 2 < key + i % 4 / 2 * 8) {
                    z[i] = softmax ? -INFINITY : 0.0f;
                }
            }
        }
#pragma unroll
        for (int i = 0; i < 32; i += 4) {
            const float2 a = *(const float2 *)&room.rows[stage][0][i / 4 * 8 + column];
            const float2 b = *(const float2 *)&room.rows[stage][1][i / 4 * 8 + column];
#pragma unroll
            for (int j = i; j < i + 4; j += 2) {
                float w0, w1;
                const float x = mn_back_score<softmax>(w0, z[j], g[j], a.x, b.x, scale);
                const float y = mn_back_score<softmax>(w1, z[j + 1], g[j + 1], a.y, b.y, scale);
                w[j / 2] = mn_pair(w0, w1);
                dz[j / 2] = mn_pair(x, y);
            }
        }
        mn_products_start();
        mn_read_start<64, D>(dv, w, mn_shared_at(room.y[stage]), true);
        mn_read_start<64, D>(dk, dz, mn_shared_at(room.x[stage]), true);
        mn_products_end();
        mn_products_wait<0>();
        if (thread % 32 == 0) mn_barrier_arrive(&room.stage_free[stage]);
    }
    const int64_t b = at.tile.span.b, first = at.tile.span.t0 + at.tile.first;
    const int n_rows = (int)at.tile.n_rows;
    mn_back_put<D>(room.a, dk, p.scale, p.dk, b, first, at.h, n_rows, (int)p.call.K);
    mn_back_put<D>(room.b, dv, 1.0f, p.dv, b, first, at.h, n_rows, (int)p.call.V);
}

#endif

template <int D, bool softmax>
__global__ void __launch_bounds__(MN_FLASH_THREADS, 1)
mn_back_queries_kernel(const __grid_constant__ mn_back k) {
#if MN_HAS_WGMMA
    extern __shared__ __align__(1024) unsigned char bytes[];
    mn_back_room<D> &room = *(mn_back_room<D> *)bytes;
    const mn_call &call = k.f.p.call;
    const mn_flash_place at = mn_flash_find(k.f, call, call.H, MN_BACK_ROWS, true);
    if (at.tile.n_rows == 0) return;
    const int n_keys = (int)(at.before + at.tile.first + at.tile.n_rows);
    const int n_tiles = (n_keys + MN_BACK_STEP - 1) / MN_BACK_STEP;
    mn_back_open(room);
    if (threadIdx.x < MN_GROUP) {
        asm volatile("setmaxnreg.dec.sync.aligned.u32 40;");
        mn_back_copy_keys<D>(room, at, k.f.p, n_tiles);
    } else {
        asm volatile("setmaxnreg.inc.sync.aligned.u32 232;");
        mn_back_queries<D, softmax>(room, at, k, n_tiles);
    }
#endif
}

template <int D, bool softmax>
__global__ void __launch_bounds__(MN_FLASH_THREADS, 1)
mn_back_keys_kernel(const __grid_constant__ mn_back k) {
#if MN_HAS_WGMMA
    extern __shared__ __align__(1024) unsigned char bytes[];
    mn_back_room<D> &room = *(mn_back_room<D> *)bytes;
    mn_call keys = k.f.p.call;
    keys.T = keys.L;
    const mn_flash_place at = [&] {
        mn_flash_place place = mn_flash_find(k.f, keys, keys.J, MN_BACK_ROWS, false);
        place.before = mn_keys_before(k.f.p.call);
        return place;
    }();
    if (at.tile.n_rows == 0) return;
    const mn_back_range range = mn_back_range_of(at, k.f.p.call);
    mn_back_open(room);
    if (threadIdx.x < MN_GROUP) {
        asm volatile("setmaxnreg.dec.sync.aligned.u32 40;");
        mn_back_copy_queries<D>(room, at, k, range);
    } else {
        asm volatile("setmaxnreg.inc.sync.aligned.u32 232;");
        mn_back_keys<D, softmax>(room, at, k, range);
    }
#endif
}

/* ---- launches -------------------------------------------------------------------------------- */

inline bool mn_flash_serves_back(const mn_reads &p) {
    return mn_flash_serves(p) && p.d_o.data && mn_flash_packable(p.dq.data, p.dq.stride) &&
           mn_flash_packable(p.dk.data, p.dk.stride) && mn_flash_packable(p.dv.data, p.dv.stride);
}

inline bool mn_flash_plan_back(mn_plan *plan, const mn_reads &p) {
    int64_t rows;
    return mn_mul_i64(&rows, p.call.B * p.call.T, p.call.H) &&
           mn_mul_size(&plan->shared_bytes, (size_t)rows, 2 * sizeof(float));
}

template <int D, bool softmax>
inline int mn_flash_backward_of(const mn_reads &p, float *rows, cudaStream_t stream) {
    const size_t bytes = sizeof(mn_back_room<D>);
    const int64_t group = p.call.H / p.call.J;
    mn_call keys = p.call;
    keys.T = keys.L;
    int64_t blocks;
    mn_back k = { mn_flash_of(p, p.call, p.call.H, MN_BACK_ROWS, group, &blocks), rows };
    const int code = mn_flash_start(mn_back_queries_kernel<D, softmax>, k, blocks, bytes, stream);
    if (code != cudaSuccess || (!p.dk.data && !p.dv.data)) return code;
    k.f = mn_flash_of(p, keys, p.call.J, MN_BACK_ROWS, 1, &blocks);
    return mn_flash_start(mn_back_keys_kernel<D, softmax>, k, blocks, bytes, stream);
}

inline int mn_flash_backward(const mn_reads &p, float *rows, cudaStream_t stream) {
    const bool wide = mn_max(p.call.K, p.call.V) > 64;
    if (p.softmax && wide) return mn_flash_backward_of<128, true>(p, rows, stream);
    if (p.softmax) return mn_flash_backward_of<64, true>(p, rows, stream);
    if (wide) return mn_flash_backward_of<128, false>(p, rows, stream);
    return mn_flash_backward_of<64, false>(p, rows, stream);
}

#endif
