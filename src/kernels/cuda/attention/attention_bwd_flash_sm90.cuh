/* attention_bwd_flash_sm90.cuh - attention and relu_attention backward by Hopper's products, in
 * bf16, for heads of up to 128 columns.
 *
 * Two numbers of each row make its weights w and the cotangents dz of its scores again:
 *
 *   softmax   a = log2 sum 2^(c z)              b = sum w g                g = do.v
 *             w = 2^(c z - a)                   dz = w (g - b)
 *   relu      a = 1 / n, n = max(|z|, eps)      b = scale a^2 sum relu(z) g a, 0 where eps holds
 *             w = scale relu(z) a               dz = [z > 0] g a - b z
 *
 * First kernel, a block for 128 queries: scans over the keys and sums dq = scale sum dz k. Where
 * forward left its sums and o, they give a and b = o.do; otherwise a walk before finds them. o was
 * rounded to bf16, and where a row has nearly all its weight on one key g - b has to cancel better
 * than that: the walk sums w (g - b), which is what b lacks, and where that counts beside the sum
 * of |w (g - b)| the block scans once more. Second kernel, a block for 128 keys: with keys as rows,
 * dv = sum w do and dk = scale sum dz q. Nothing is added across blocks. */
#ifndef MN_KERNELS_CUDA_ATTENTION_ATTENTION_BWD_FLASH_SM90_CUH
#define MN_KERNELS_CUDA_ATTENTION_ATTENTION_BWD_FLASH_SM90_CUH

#include "kernels/cuda/attention/attention_fwd_flash_sm90.cuh"

namespace mneme::attention {

enum { MN_BACK_ROWS = 128 };

/* The rows of a block stay (queries and do, or keys and values), those of the other side come in
 * stages of STEP, with two numbers a row where they are queries. Products of less than 128 columns
 * wait for shared memory, so steps are as wide as registers allow. */
template <int D, int STEP, int STAGES>
struct alignas(1024) mn_back_smem {
    static constexpr int step = STEP, stages = STAGES;
    static constexpr int wide = MN_BACK_ROWS * D * 2, narrow = STEP * D * 2;
    unsigned char a[wide], b[wide], x[STAGES][narrow], y[STAGES][narrow];
    float rows[STAGES][2][STEP];
    uint64_t there, stage_device[STAGES], stage_free[STAGES];
};

template <int D>
using mn_queries_smem = mn_back_smem<D, 128, D == 64 ? 4 : 2>;
template <int D>
using mn_keys_smem = mn_back_smem<D, D == 64 ? 128 : 64, 4>;

struct mn_back {
    mn_flash f;
    float *rows;    // (2, B, H, T) numbers
};

template <typename Room>
__device__ inline void mn_back_open(Room &room) {
    if (threadIdx.x == 0) {
        mn_mbarrier_init(&room.there, MN_GROUP);
        for (int i = 0; i < Room::stages; i++) {
            mn_mbarrier_init(&room.stage_device[i], MN_GROUP);
            mn_mbarrier_init(&room.stage_free[i], 8);
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

/* Waits for stage n to be there; says that the calling warp is done with it. */
template <typename Room>
__device__ inline void mn_back_wait(Room &room, int n) {
    mn_mbarrier_wait(&room.stage_device[n % Room::stages], n / Room::stages & 1);
}

template <typename Room>
__device__ inline void mn_back_done(Room &room, int n) {
    if (threadIdx.x % 32 == 0) mn_mbarrier_arrive(&room.stage_free[n % Room::stages]);
}

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

/* A weight from its score. */
template <bool softmax>
__device__ inline float mn_back_weight(float z, float a, float scale) {
    return softmax ? mn_exp2(fmaf(z, scale, -a)) : fmaxf(z, 0.0f) * (scale * a);
}

/* Scores become weights where that is all that is needed of them, as for softmax. */
template <bool softmax, int N>
__device__ inline void mn_back_weigh(float (&z)[N], const float (&a)[2], float scale) {
#pragma unroll
    for (int i = 0; softmax && i < N; i++) {
        z[i] = mn_back_weight<softmax>(z[i], a[i % 4 / 2], scale);
    }
}

/* The cotangent of a score, before its scale; of softmax z is the weight. */
template <bool softmax>
__device__ inline float mn_back_score(float z, float g, float a, float b) {
    return softmax ? z * (g - b) : fmaf(-b, z, z > 0.0f ? g * a : 0.0f);
}

/* ---- queries --------------------------------------------------------------------------------- */

template <int D, bool known>
__device__ inline void mn_back_copy_keys(mn_queries_smem<D> &room, const mn_flash_place &at,
                                         const mn_reads &p, int n_tiles) {
    using Room = mn_queries_smem<D>;
    const int i = threadIdx.x % MN_GROUP, K = (int)p.call.K, V = (int)p.call.V;
    const int64_t b = at.tile.span.b, t0 = at.tile.span.t0, t = t0 + at.tile.first;
    const int64_t j = at.h / (p.call.H / p.call.J);
    const mn_bf16 *k = mn_row<mn_bf16>(p.k, b, t0, j), *v = mn_row<mn_bf16>(p.v, b, t0, j);
    const int n_rows = (int)at.tile.n_rows;
    const int n_keys = (int)(at.before + at.tile.first) + n_rows;
    mn_copy_tile<128, D>(mn_smem_addr(room.a), mn_row<mn_bf16>(p.q, b, t, at.h), p.q.stride[1],
                         n_rows, K, i);
    mn_copy_tile<128, D>(mn_smem_addr(room.b), mn_row<mn_bf16>(p.d_o, b, t, at.h),
                         p.d_o.stride[1], n_rows, V, i);
    int end = known ? n_tiles : 2 * n_tiles;
    for (int n = 0; n < end; n++) {
        const int stage = n % Room::stages, phase = (n / Room::stages & 1) ^ 1;
        const int first = (n < n_tiles ? n : n - n_tiles) * Room::step;
        mn_mbarrier_wait(&room.stage_free[stage], phase);
        mn_copy_tile<Room::step, D>(mn_smem_addr(room.x[stage]), k + first * p.k.stride[1],
                                    p.k.stride[1], n_keys - first, K, i);
        mn_copy_tile<Room::step, D>(mn_smem_addr(room.y[stage]), v + first * p.v.stride[1],
                                    p.v.stride[1], n_keys - first, V, i);
        mn_copies_done();
        if (n == 0) mn_mbarrier_arrive(&room.there);
        mn_mbarrier_arrive(&room.stage_device[stage]);
        if (known && n == n_tiles - 1 && __syncthreads_or(0)) end = 2 * n_tiles;
    }
}

/* What a walk gathers of a thread's two rows. */
struct mn_back_state {
    float most[2], sum[2], mean[2];
};

template <bool softmax, int N>
__device__ inline void mn_back_gather(mn_back_state &s, float (&z)[N], const float (&g)[N],
                                      float scale) {
#pragma unroll
    for (int r = 0; r < 2; r++) {
        float sum = 0.0f, mean = 0.0f;
        if (!softmax) {
#pragma unroll
            for (int i = 2 * r; i < N; i += i % 2 ? 3 : 1) {
                sum = fmaf(z[i], z[i], sum);
                mean = fmaf(fmaxf(z[i], 0.0f), g[i], mean);
            }
            s.sum[r] += sum, s.mean[r] += mean;
            continue;
        }
        float most = s.most[r];
#pragma unroll
        for (int i = 2 * r; i < N; i += i % 2 ? 3 : 1) most = fmaxf(most, z[i]);
        most = mn_quad_max(most);
        const float by = mn_exp2((s.most[r] - most) * scale), shift = -most * scale;
        s.most[r] = most;
#pragma unroll
        for (int i = 2 * r; i < N; i += i % 2 ? 3 : 1) {
            const float w = mn_exp2(fmaf(z[i], scale, shift));
            sum += w;
            mean = fmaf(w, g[i], mean);
        }
        s.sum[r] = fmaf(s.sum[r], by, sum);
        s.mean[r] = fmaf(s.mean[r], by, mean);
    }
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

/* The two numbers from what forward left, of rows `row` and row + 8 of a tile; *least: what adding
 * them up in float32 may leave of b anyway. */
__device__ inline void mn_back_given(float (&a)[2], float (&b)[2], float (&least)[2],
                                     const mn_reads &p, const mn_flash_place &at, int row) {
#pragma unroll
    for (int r = 0; r < 2; r++) {
        const int64_t t = at.tile.span.t0 + at.tile.first + row + 8 * r;
        const bool inside = row + 8 * r < at.tile.n_rows;
        float sum = 0.0f, size = 0.0f;
        a[r] = 0.0f;
        if (inside) {
            const mn_bf16 *o = mn_row<mn_bf16>(p.o, at.tile.span.b, t, at.h);
            const mn_bf16 *d_o = mn_row<mn_bf16>(p.d_o, at.tile.span.b, t, at.h);
            for (int j = threadIdx.x % 4 * 8; j < p.call.V; j += 32) {
                float x[8], y[8];
                mn_load<8>(x, o, j);
                mn_load<8>(y, d_o, j);
#pragma unroll
                for (int i = 0; i < 8; i++) {
                    sum = fmaf(x[i], y[i], sum);
                    size = fmaf(fabsf(x[i]), fabsf(y[i]), size);
                }
            }
            a[r] = *mn_row<float>(p.lse, at.tile.span.b, t, at.h) * 1.4426950408889634f;
        }
        b[r] = mn_quad_sum(sum);
        least[r] = mn_quad_sum(size) * 0x1p-18f;
    }
}

/* Where b is short of sum w g by more than can be let pass it grows by that; `size` is the sum of
 * |w (g - b)|. True if any was. */
__device__ inline bool mn_back_mend(float (&b)[2], const float (&least)[2], const float (&off)[2],
                                    const float (&size)[2]) {
    bool any = false;
#pragma unroll
    for (int r = 0; r < 2; r++) {
        const float lacks = mn_quad_sum(off[r]), all = mn_quad_sum(size[r]);
        any = any || fabsf(lacks) > fmaf(all, 0x1p-7f, least[r]);
        b[r] += lacks;
    }
    return any;
}

/* Multiplies a group's 64 queries. */
template <int D, bool softmax, bool known>
__device__ inline void mn_back_queries(mn_queries_smem<D> &room, const mn_flash_place &at,
                                       const mn_back &k, int n_tiles) {
    using Room = mn_queries_smem<D>;
    constexpr int step = Room::step;
    constexpr bool ahead = D == 64;    // registers for a product to go on during the next scores
    const mn_reads &p = k.f.p;
    const int half = threadIdx.x / MN_GROUP - 1, thread = threadIdx.x % MN_GROUP;
    const int row = half * 64 + thread / 32 * 16 + thread % 32 / 4;
    const int seen = (int)(at.before + at.tile.first) + row + 1;
    const float scale = softmax ? p.scale * 1.4426950408889634f : p.scale;
    const uint32_t q = mn_smem_addr(room.a) + half * 8192,
        d_o = mn_smem_addr(room.b) + half * 8192;
    float z[step / 2], g[step / 2], a[2], b[2], least[2];
    const auto start = [&](int n) {
        const int stage = n % Room::stages;
        mn_back_wait(room, n);
        mn_products_start();
        mn_scores_start<D, 128, step>(z, q, mn_smem_addr(room.x[stage]));
        mn_products_end();
        mn_scores_start<D, 128, step>(g, d_o, mn_smem_addr(room.y[stage]));
        mn_products_end();
    };
    const auto mask = [&](int tile) {
        const int left = seen - tile * step;
        if (left < step) mn_flash_mask<softmax>(z, left);
    };
    const auto keep = [&] {
        for (int r = 0; r < 2 && thread % 4 == 0; r++) {
            if (row + 8 * r >= at.tile.n_rows) continue;
            float *to = mn_back_row(k, at.tile.span.b, at.h,
                                    at.tile.span.t0 + at.tile.first + row + 8 * r);
            to[0] = a[r];
            to[mn_back_plane(k)] = b[r];
        }
    };
    if (known) mn_back_given(a, b, least, p, at, row);
    mn_mbarrier_wait(&room.there, 0);
    int n = 0;
    if (!known) {
        mn_back_state s = { { -INFINITY, -INFINITY }, { 0.0f, 0.0f }, { 0.0f, 0.0f } };
        for (; n < n_tiles; n++) {
            start(n);
            mn_products_wait<0>();
            mn_keep(z), mn_keep(g);
            mn_back_done(room, n);
            mask(n);
            mn_back_gather<softmax>(s, z, g, scale);
        }
        mn_back_close<softmax>(s, a, b, p, scale);
        keep();
    }
    float dq[D / 2];
    uint32_t dz[step / 4];
    const auto add = [&](int n, bool more) {
        mn_products_start();
        mn_read_start<step, D>(dq, dz, mn_smem_addr(room.x[n % Room::stages]), more);
        mn_products_end();
    };
    for (;;) {
        float off[2] = { 0.0f, 0.0f }, size[2] = { 0.0f, 0.0f };
        for (int tile = 0; tile < n_tiles; tile++, n++) {
            if (ahead && tile > 0) add(n - 1, tile > 1);
            start(n);
            mn_products_wait<1>();
            mn_keep(z);
            if (ahead && tile > 0) mn_back_done(room, n - 1);
            mask(tile);
            mn_back_weigh<softmax>(z, a, scale);
            mn_products_wait<0>();
            mn_keep(g);
#pragma unroll
            for (int i = 0; i < step / 2; i += 2) {
                const int r = i % 4 / 2;
                const float x = mn_back_score<softmax>(z[i], g[i], a[r], b[r]);
                const float y = mn_back_score<softmax>(z[i + 1], g[i + 1], a[r], b[r]);
                if (known) off[r] += x + y, size[r] += fabsf(x) + fabsf(y);
                dz[i / 2] = mn_pair(x, y);
            }
            if (ahead) continue;
            add(n, tile > 0);
            mn_products_wait<0>();
            mn_back_done(room, n);
        }
        if (ahead) {
            add(n - 1, n_tiles > 1);
            mn_products_wait<0>();
            mn_back_done(room, n - 1);
        }
        if (!known || n > n_tiles) break;
        const bool wrong = mn_back_mend(b, least, off, size);
        keep();
        if (!__syncthreads_or(wrong)) break;
    }
    mn_keep(dq);
    mn_back_put<D>(room.a, dq, p.scale, p.dq, at.tile.span.b, at.tile.span.t0 + at.tile.first, at.h,
                   (int)at.tile.n_rows, (int)p.call.K);
}

/* ---- keys ------------------------------------------------------------------------------------ */

/* Query tiles that see a tile of keys: `n` of each of `heads` query heads, from row `first` on. */
struct mn_back_range {
    int first, n, heads;
    int64_t head0, length;    // queries of the sequence
};

__device__ inline mn_back_range mn_back_range_of(const mn_flash_place &at, const mn_call &call,
                                                 int step) {
    mn_back_range r;
    r.length = call.cu_seqlens ? at.tile.span.length : call.T;
    r.heads = (int)(call.H / call.J);
    r.head0 = at.h * r.heads;
    r.first = (int)max(at.tile.first - at.before, (int64_t)0) / 64 * 64;
    r.n = (int)((r.length - r.first + step - 1) / step);
    return r;
}

template <int D>
__device__ inline void mn_back_copy_queries(mn_keys_smem<D> &room, const mn_flash_place &at,
                                            const mn_back &k, const mn_back_range &range) {
    using Room = mn_keys_smem<D>;
    const mn_reads &p = k.f.p;
    const int i = threadIdx.x % MN_GROUP, K = (int)p.call.K, V = (int)p.call.V;
    const int64_t b = at.tile.span.b, t0 = at.tile.span.t0, first = t0 + at.tile.first;
    const int n_rows = (int)at.tile.n_rows;
    if (range.n == 0) return;    // no queries
    mn_copy_tile<128, D>(mn_smem_addr(room.a), mn_row<mn_bf16>(p.k, b, first, at.h),
                         p.k.stride[1], n_rows, K, i);
    mn_copy_tile<128, D>(mn_smem_addr(room.b), mn_row<mn_bf16>(p.v, b, first, at.h),
                         p.v.stride[1], n_rows, V, i);
    for (int n = 0; n < range.n * range.heads; n++) {
        const int stage = n % Room::stages, phase = (n / Room::stages & 1) ^ 1;
        const int t = range.first + n % range.n * Room::step, left = (int)range.length - t;
        const int64_t h = range.head0 + n / range.n;
        mn_mbarrier_wait(&room.stage_free[stage], phase);
        mn_copy_tile<Room::step, D>(mn_smem_addr(room.x[stage]),
                                    mn_row<mn_bf16>(p.q, b, t0 + t, h), p.q.stride[1], left, K, i);
        mn_copy_tile<Room::step, D>(mn_smem_addr(room.y[stage]),
                                    mn_row<mn_bf16>(p.d_o, b, t0 + t, h), p.d_o.stride[1], left, V,
                                    i);
        for (int e = i; e < 2 * Room::step; e += MN_GROUP) {
            const int r = e % Room::step, which = e / Room::step;
            const float *from = mn_back_row(k, b, h, t0 + t + r) + which * mn_back_plane(k);
            room.rows[stage][which][r] = r < left ? *from : 0.0f;
        }
        mn_copies_done();
        if (n == 0) mn_mbarrier_arrive(&room.there);
        mn_mbarrier_arrive(&room.stage_device[stage]);
    }
}

template <int D, bool softmax>
__device__ inline void mn_back_keys(mn_keys_smem<D> &room, const mn_flash_place &at,
                                    const mn_back &k, const mn_back_range &range) {
    using Room = mn_keys_smem<D>;
    constexpr int step = Room::step;
    const mn_reads &p = k.f.p;
    const int half = threadIdx.x / MN_GROUP - 1, thread = threadIdx.x % MN_GROUP;
    const int row = half * 64 + thread / 32 * 16 + thread % 32 / 4, column = thread % 4 * 2;
    const int key = (int)(at.tile.first - at.before) + row;    // the first query that sees it
    const float scale = softmax ? p.scale * 1.4426950408889634f : p.scale;
    const uint32_t keys = mn_smem_addr(room.a) + half * 8192;
    const uint32_t values = mn_smem_addr(room.b) + half * 8192;
    float z[step / 2], g[step / 2], dk[D / 2] = {}, dv[D / 2] = {};
    uint32_t w[step / 4], dz[step / 4];
    if (range.n > 0) mn_mbarrier_wait(&room.there, 0);
    for (int n = 0; n < range.n * range.heads; n++) {
        const int stage = n % Room::stages, t = range.first + n % range.n * step;
        mn_back_wait(room, n);
        mn_products_start();
        mn_scores_start<D, 128, step>(z, keys, mn_smem_addr(room.x[stage]));
        mn_products_end();
        mn_scores_start<D, 128, step>(g, values, mn_smem_addr(room.y[stage]));
        mn_products_end();
        mn_products_wait<1>();
        mn_keep(z);
        if (t < key + 8) {
#pragma unroll
            for (int i = 0; i < step / 2; i++) {
                if (t + i / 4 * 8 + column + i % 2 < key + i % 4 / 2 * 8) {
                    z[i] = softmax ? -INFINITY : 0.0f;
                }
            }
        }
#pragma unroll
        for (int i = 0; softmax && i < step / 2; i += 4) {
            const float2 a = *(const float2 *)&room.rows[stage][0][i / 4 * 8 + column];
            z[i] = mn_back_weight<softmax>(z[i], a.x, scale);
            z[i + 1] = mn_back_weight<softmax>(z[i + 1], a.y, scale);
            z[i + 2] = mn_back_weight<softmax>(z[i + 2], a.x, scale);
            z[i + 3] = mn_back_weight<softmax>(z[i + 3], a.y, scale);
        }
        mn_products_wait<0>();
        mn_keep(g);
#pragma unroll
        for (int i = 0; i < step / 2; i += 4) {
            float2 a = {};
            if (!softmax) a = *(const float2 *)&room.rows[stage][0][i / 4 * 8 + column];
            const float2 b = *(const float2 *)&room.rows[stage][1][i / 4 * 8 + column];
#pragma unroll
            for (int j = i; j < i + 4; j += 2) {
                const float x = softmax ? z[j] : mn_back_weight<softmax>(z[j], a.x, scale);
                const float y = softmax ? z[j + 1] : mn_back_weight<softmax>(z[j + 1], a.y, scale);
                w[j / 2] = mn_pair(x, y);
                dz[j / 2] = mn_pair(mn_back_score<softmax>(z[j], g[j], a.x, b.x),
                                    mn_back_score<softmax>(z[j + 1], g[j + 1], a.y, b.y));
            }
        }
        mn_products_start();
        mn_read_start<step, D>(dv, w, mn_smem_addr(room.y[stage]), true);
        mn_read_start<step, D>(dk, dz, mn_smem_addr(room.x[stage]), true);
        mn_products_end();
        mn_products_wait<0>();
        mn_back_done(room, n);
    }
    mn_keep(dk), mn_keep(dv);
    const int64_t b = at.tile.span.b, first = at.tile.span.t0 + at.tile.first;
    const int n_rows = (int)at.tile.n_rows;
    mn_back_put<D>(room.a, dk, p.scale, p.dk, b, first, at.h, n_rows, (int)p.call.K);
    mn_back_put<D>(room.b, dv, 1.0f, p.dv, b, first, at.h, n_rows, (int)p.call.V);
}

#endif

template <int D, bool softmax, bool known>
__global__ void __launch_bounds__(MN_FLASH_THREADS, 1)
mn_back_queries_kernel(const __grid_constant__ mn_back k) {
#if MN_HAS_WGMMA
    extern __shared__ __align__(1024) unsigned char bytes[];
    mn_queries_smem<D> &room = *(mn_queries_smem<D> *)bytes;
    const mn_call &call = k.f.p.call;
    const mn_flash_place at = mn_flash_find(k.f, blockIdx.x, call, call.H, MN_BACK_ROWS, true);
    if (at.tile.n_rows == 0) return;
    const int n_keys = (int)(at.before + at.tile.first + at.tile.n_rows);
    const int n_tiles = (n_keys + room.step - 1) / room.step;
    mn_back_open(room);
    if (threadIdx.x < MN_GROUP) {
        asm volatile("setmaxnreg.dec.sync.aligned.u32 40;");
        mn_back_copy_keys<D, known>(room, at, k.f.p, n_tiles);
    } else {
        asm volatile("setmaxnreg.inc.sync.aligned.u32 232;");
        mn_back_queries<D, softmax, known>(room, at, k, n_tiles);
    }
#endif
}

template <int D, bool softmax>
__global__ void __launch_bounds__(MN_FLASH_THREADS, 1)
mn_back_keys_kernel(const __grid_constant__ mn_back k) {
#if MN_HAS_WGMMA
    extern __shared__ __align__(1024) unsigned char bytes[];
    mn_keys_smem<D> &room = *(mn_keys_smem<D> *)bytes;
    mn_call keys = k.f.p.call;
    keys.T = keys.L;
    const mn_flash_place at = [&] {
        mn_flash_place place = mn_flash_find(k.f, blockIdx.x, keys, keys.J, MN_BACK_ROWS, false);
        place.before = mn_keys_before(k.f.p.call);
        return place;
    }();
    if (at.tile.n_rows == 0) return;
    const mn_back_range range = mn_back_range_of(at, k.f.p.call, room.step);
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

template <int D, bool softmax, bool known>
inline int mn_flash_backward_of(const mn_reads &p, float *rows, cudaStream_t stream) {
    const int64_t group = p.call.H / p.call.J;
    mn_call keys = p.call;
    keys.T = keys.L;
    int64_t blocks;
    mn_back k = { mn_flash_of(p, p.call, p.call.H, MN_BACK_ROWS, group, &blocks), rows };
    const int code = mn_flash_start(mn_back_queries_kernel<D, softmax, known>, k, blocks,
                                    sizeof(mn_queries_smem<D>), stream);
    if (code != cudaSuccess || (!p.dk.data && !p.dv.data)) return code;
    k.f = mn_flash_of(p, keys, p.call.J, MN_BACK_ROWS, 1, &blocks);
    return mn_flash_start(mn_back_keys_kernel<D, softmax>, k, blocks, sizeof(mn_keys_smem<D>),
                          stream);
}

template <int D>
inline int mn_flash_backward_by(const mn_reads &p, float *rows, cudaStream_t stream) {
    if (!p.softmax) return mn_flash_backward_of<D, false, false>(p, rows, stream);
    const bool known = p.lse.data && p.o.data;
    return known ? mn_flash_backward_of<D, true, true>(p, rows, stream)
                 : mn_flash_backward_of<D, true, false>(p, rows, stream);
}

inline int mn_flash_backward(const mn_reads &p, float *rows, cudaStream_t stream) {
    const bool wide = mn_max(p.call.K, p.call.V) > 64;
    return wide ? mn_flash_backward_by<128>(p, rows, stream)
                : mn_flash_backward_by<64>(p, rows, stream);
}

}    // namespace mneme::attention

#endif
