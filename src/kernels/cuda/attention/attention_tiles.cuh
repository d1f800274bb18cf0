/* attention_tiles.cuh - what attention and relu_attention by tiles share on every machine that has
 * kernels for them (attention_fwd_flash_sm90.cuh, attention_bwd_flash_sm90.cuh and those of sm80):
 * which rows a block has, which keys they see, and the arithmetic of a thread's two rows. Of a
 * product of 16 rows a thread holds, of each eight columns, two in each row: z[4 j + 0, 1] in the
 * first, z[4 j + 2, 3] in the second, eight further down.
 *
 * Backward, two numbers of each row make its weights w and the cotangents dz of its scores again:
 *
 *   softmax   a = log2 sum 2^(c z)              b = sum w g                g = do.v
 *             w = 2^(c z - a)                   dz = w (g - b)
 *   relu      a = 1 / n, n = max(|z|, eps)      b = scale a^2 sum relu(z) g a, 0 where eps holds
 *             w = scale relu(z) a               dz = [z > 0] g a - b z */
#ifndef MN_KERNELS_CUDA_ATTENTION_ATTENTION_TILES_CUH
#define MN_KERNELS_CUDA_ATTENTION_ATTENTION_TILES_CUH

#include "kernels/cuda/attention/attention_strip_mma.cuh"
#include "kernels/cuda/attention/attention_wgmma_sm90.cuh"
#include "kernels/cuda/prim/first_wild.cuh"
#include "kernels/cuda/prim/fmax.cuh"

namespace mneme::attention {

/* Both operators. */
struct mn_attn_params {
    mn_call call;
    int64_t window;        // 0: none
    float scale, eps;
    double base;
    int rope;              // attention's rope_kind
    bool softmax;
    mn_in q, k, v, d_o;
    mn_out o, lse, dq, dk, dv;
};

enum { MN_FLASH_QUERIES = 128 };    // of a block
// bytes of keys and values of a section
static const int64_t mn_flash_l2_bytes = (int64_t)24 << 20;

/* What blocks need to find their work: tiles of a head, heads of a section. */
struct mn_flash_params {
    mn_attn_params p;
    int64_t tiles, section;
};

struct mn_flash_coord {
    mn_tile_span tile;    // queries
    int64_t h, before;
};

/* `last_first` for queries, of which late ones see many keys; not for keys, which early ones are
 * seen by most. */
__device__ inline mn_flash_coord mn_flash_coord_of(const mn_flash_params &f, int64_t block_id,
                                               const mn_call &call, int64_t heads, int64_t rows,
                                               bool last_first) {
    /* In 32 bits, as there are no more blocks: a division of 64 takes hundreds of clocks. */
    const uint32_t block = (uint32_t)block_id, tiles = (uint32_t)f.tiles, n_heads = (uint32_t)heads;
    const uint32_t section = (uint32_t)f.section;
    const uint32_t all = n_heads * (call.cu_seqlens ? 1u : (uint32_t)call.B);
    const uint32_t first = block / (section * tiles) * section;
    const uint32_t in = block - first * tiles, count = min(section, all - first);
    const uint32_t turn = in / count, head = first + in - turn * count, b = head / n_heads;
    const int64_t tile = last_first ? tiles - 1 - turn : turn;
    mn_flash_coord coord;
    coord.h = head - b * n_heads;
    if (call.cu_seqlens) coord.tile = mn_tile_at(call, rows, tile);
    else {
        coord.tile.n = b, coord.tile.span = { (int64_t)b, 0, call.T };
        coord.tile.first = tile * rows, coord.tile.n_rows = min(rows, call.T - tile * rows);
    }
    coord.before = mn_keys_before(call);
    return coord;
}

/* What a block makes again: the last row of a head sees all values, or with a window every so many
 * rows together do, so that one that is not finite shows in their o. The tile that holds the first
 * such value has rows in front of it, for which 0 times that was not 0; the tile ends there. No
 * rows where there is nothing to do. All threads of block n * H + h call. */
__device__ inline mn_flash_coord mn_flash_redo_coord(const mn_attn_params &p) {
    const mn_call &call = p.call;
    mn_flash_coord coord = {};
    mn_tile_span &tile = coord.tile;
    mn_pdl_wait();
    tile.n = blockIdx.x / call.H, coord.h = blockIdx.x % call.H;
    tile.span = mn_span_at(call, tile.n), coord.before = mn_keys_before(call);
    const int64_t b = tile.span.b, t0 = tile.span.t0, length = tile.span.length;
    const int64_t step = p.window ? p.window : length;
    bool wild = false;
    for (int64_t t = length - 1; t >= 0; t -= step) {
        wild = mn_redo_row_is_wild(mn_row<mn_bf16>(p.o, b, t0 + t, coord.h), call.V) || wild;
    }
    const mn_bf16 *v = mn_row<mn_bf16>(p.v, b, t0, coord.h / (call.H / call.J));
    if (!wild) return coord;
    const int64_t cut = mn_redo_first_token(coord.before + length, [&](int64_t t, float most) {
        return mn_redo_has_wild(v + t * p.v.stride[1], call.V, most);
    }) - coord.before;
    if (cut <= 0) return coord;
    tile.first = cut / MN_FLASH_QUERIES * MN_FLASH_QUERIES, tile.n_rows = cut - tile.first;
    return coord;
}

/* Tiles of `keys` keys that lie in front of the windows of all rows of a block. */
__device__ inline int mn_flash_skipped(const mn_flash_coord &at, const mn_attn_params &p,
                                       int keys) {
    return (int)(mn_window_first(at.before + at.tile.first + 1, p.window) / keys);
}

/* ---- weights --------------------------------------------------------------------------------- */

/* What a thread knows of its two rows: the largest score and the sum of weights, or (relu) the sum
 * of squared scores. */
struct mn_flash_row_state {
    float row_max[2], sum[2];
};

/* Scores beyond what rows see become -inf, or 0 for relu; `left` keys of the tile are seen by the
 * thread's first row, eight more by its second. */
template <bool softmax, int N>
__device__ inline void mn_flash_causal_mask(float (&z)[N], int left) {
    const int column = threadIdx.x % 4 * 2;
    const float none = softmax ? -INFINITY : 0.0f;
#pragma unroll
    for (int i = 0; i < N; i++) {
        if (i / 4 * 8 + column + i % 2 >= left + i % 4 / 2 * 8) z[i] = none;
    }
}

/* The same of what lies in front of a window: the first `out` keys of the tile for the thread's
 * first row, eight more for its second. */
template <int N>
__device__ inline void mn_flash_window_mask(float (&z)[N], int64_t out) {
    const int column = threadIdx.x % 4 * 2;
#pragma unroll
    for (int i = 0; i < N; i++) {
        if (i / 4 * 8 + column + i % 2 < out + i % 4 / 2 * 8) z[i] = -INFINITY;
    }
}

/* z becomes weights; `by` is what earlier sums are multiplied with. A row may see no key of a tile
 * where there is a window. */
template <bool softmax, bool has_window, int N>
__device__ inline void mn_flash_online_softmax(float (&z)[N], mn_flash_row_state &s,
                                               float (&by)[2], float scale) {
#pragma unroll
    for (int r = 0; r < 2; r++) {
        float sum = 0.0f;
        if (!softmax) {
#pragma unroll
            for (int i = 2 * r; i < N; i += i % 2 ? 3 : 1) {
                sum = fmaf(z[i], z[i], sum);
                z[i] = mn_fmax(z[i], 0.0f);
            }
            s.sum[r] += sum;
            continue;
        }
        float row_max = s.row_max[r];
#pragma unroll
        for (int i = 2 * r; i < N; i += i % 2 ? 3 : 1) row_max = fmaxf(row_max, z[i]);
        row_max = mn_quad_max(row_max);
        const float top = has_window && row_max == -INFINITY ? 0.0f : row_max;
        by[r] = mn_exp2((s.row_max[r] - top) * scale);
        s.row_max[r] = row_max;
        const float shift = -top * scale;
#pragma unroll
        for (int i = 2 * r; i < N; i += i % 2 ? 3 : 1) {
            z[i] = mn_exp2(fmaf(z[i], scale, shift));
            sum += z[i];
        }
        s.sum[r] = fmaf(s.sum[r], by[r], sum);
    }
}

template <int N>
__device__ inline void mn_flash_pack_bf16(uint32_t (&p)[N / 2], const float (&z)[N]) {
#pragma unroll
    for (int i = 0; i < N / 2; i++) p[i] = mn_bf16x2(z[2 * i], z[2 * i + 1]);
}

/* ---- back: rows ------------------------------------------------------------------------------ */

struct mn_bwd_params {
    mn_flash_params f;
    float *rows;    // (2, B, H, T): a and b of every row
};

/* The address of a of row t (of batch row b) of head h; b is mn_bwd_stats_stride further on. */
__device__ inline float *mn_bwd_row_stats(const mn_bwd_params &k, int64_t b, int64_t h, int64_t t) {
    return k.rows + (b * k.f.p.call.H + h) * k.f.p.call.T + t;
}

__device__ inline int64_t mn_bwd_stats_stride(const mn_bwd_params &k) {
    return k.f.p.call.B * k.f.p.call.H * k.f.p.call.T;
}

/* A weight from its score. */
template <bool softmax>
__device__ inline float mn_bwd_weight(float z, float a, float scale) {
    return softmax ? mn_exp2(fmaf(z, scale, -a)) : mn_fmax(z, 0.0f) * (scale * a);
}

/* Scores become weights where that is all that is needed of them, as for softmax. */
template <bool softmax, int N>
__device__ inline void mn_bwd_weights(float (&z)[N], const float (&a)[2], float scale) {
#pragma unroll
    for (int i = 0; softmax && i < N; i++) {
        z[i] = mn_bwd_weight<softmax>(z[i], a[i % 4 / 2], scale);
    }
}

/* The cotangent of a score, before its scale; of softmax z is the weight. */
template <bool softmax>
__device__ inline float mn_bwd_dscore(float z, float g, float a, float b) {
    return softmax ? z * (g - b) : fmaf(-b, z, z > 0.0f ? g * a : 0.0f);
}

/* What a scan gathers of a thread's two rows. */
struct mn_bwd_row_state {
    float row_max[2], sum[2], mean[2];
};

template <bool softmax, int N>
__device__ inline void mn_bwd_accumulate_stats(mn_bwd_row_state &s, float (&z)[N],
                                               const float (&g)[N],
                                      float scale) {
#pragma unroll
    for (int r = 0; r < 2; r++) {
        float sum = 0.0f, mean = 0.0f;
        if (!softmax) {
#pragma unroll
            for (int i = 2 * r; i < N; i += i % 2 ? 3 : 1) {
                sum = fmaf(z[i], z[i], sum);
                mean = fmaf(mn_fmax(z[i], 0.0f), g[i], mean);
            }
            s.sum[r] += sum, s.mean[r] += mean;
            continue;
        }
        float row_max = s.row_max[r];
#pragma unroll
        for (int i = 2 * r; i < N; i += i % 2 ? 3 : 1) row_max = fmaxf(row_max, z[i]);
        row_max = mn_quad_max(row_max);
        const float by = mn_exp2((s.row_max[r] - row_max) * scale), shift = -row_max * scale;
        s.row_max[r] = row_max;
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
__device__ inline void mn_bwd_finish_stats(mn_bwd_row_state &s, float (&a)[2], float (&b)[2],
                                     const mn_attn_params &p, float scale) {
#pragma unroll
    for (int r = 0; r < 2; r++) {
        const float sum = mn_quad_sum(s.sum[r]), mean = mn_quad_sum(s.mean[r]);
        if (softmax) {
            a[r] = fmaf(s.row_max[r], scale, log2f(sum));
            b[r] = mean / sum;
            continue;
        }
        const float norm = p.scale * sqrtf(sum), by = 1.0f / mn_fmax(norm, p.eps);
        a[r] = by;
        b[r] = norm > p.eps ? p.scale * by * by * (p.scale * by * mean) : 0.0f;
    }
}

/* The two numbers from what forward left, of rows `row` and row + 8 of a tile; *least: what adding
 * them up in float32 may leave of b anyway. */
__device__ inline void mn_bwd_load_stats(float (&a)[2], float (&b)[2], float (&tolerance)[2],
                                     const mn_attn_params &p, const mn_flash_coord &at, int row) {
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
        tolerance[r] = mn_quad_sum(size) * 0x1p-18f;
    }
}

/* `whole` becomes b and what it is short of sum w g; `size` is the sum of |w (g - b)|. Where that
 * is more than can be let pass b becomes `whole`, in such rows alone: what another row's cotangent
 * asks for moves no bit of this one. True if any did. */
__device__ inline bool mn_bwd_correct_delta(float (&whole)[2], float (&b)[2],
                                            const float (&tolerance)[2],
                                            const float (&residual_sum)[2],
                                            const float (&size)[2]) {
    bool any = false;
#pragma unroll
    for (int r = 0; r < 2; r++) {
        const float residual = mn_quad_sum(residual_sum[r]), all = mn_quad_sum(size[r]);
        const bool inexact = fabsf(residual) > fmaf(all, 0x1p-7f, tolerance[r]);
        whole[r] = b[r] + residual;
        b[r] = inexact ? whole[r] : b[r];
        any = any || inexact;
    }
    return any;
}

/* Query tiles that see a tile of keys: `n` of each of `heads` query heads, from row `first` on. A
 * window leaves out those behind the last query that sees the tile's last key. */
struct mn_bwd_q_range {
    int first, n, heads;
    int64_t head0, length;    // queries of the sequence
};

template <bool has_window>
__device__ inline mn_bwd_q_range mn_bwd_q_range_of(const mn_flash_coord &at,
                                                   const mn_attn_params &p, int step) {
    const mn_call &call = p.call;
    mn_bwd_q_range r;
    r.length = call.cu_seqlens ? at.tile.span.length : call.T;
    r.heads = (int)(call.H / call.J);
    r.head0 = at.h * r.heads;
    r.first = (int)max(at.tile.first - at.before, (int64_t)0) / 64 * 64;
    int64_t end = r.length;
    if (has_window) {
        end = min(end, at.tile.first - at.before + at.tile.n_rows - 1 + p.window);
    }
    r.n = (int)max((end - r.first + step - 1) / step, (int64_t)0);
    return r;
}

/* ---- calls ----------------------------------------------------------------------------------- */

/* Whether rows can be copied in packs of eight. */
inline bool mn_flash_vec_aligned(const void *data, const int64_t *stride) {
    bool vec_aligned = (uintptr_t)data % 16 == 0;
    for (int axis = 0; axis < 3; axis++) vec_aligned = vec_aligned && stride[axis] % 8 == 0;
    return vec_aligned;
}

/* Whether kernels by tiles serve a call on any machine that has one: by its kind and sizes, never
 * by its length. */
inline bool mn_flash_serves(const mn_attn_params &p) {
    const mn_call &c = p.call;
    return c.dtype == MN_BF16 && p.rope == 0 && p.scale > 0.0f &&
           c.K % 8 == 0 && c.K <= 128 &&
           c.V % 8 == 0 && c.V <= 128 && mn_flash_vec_aligned(p.q.data, p.q.stride) &&
           mn_flash_vec_aligned(p.k.data, p.k.stride)
               && mn_flash_vec_aligned(p.v.data, p.v.stride) &&
           mn_flash_vec_aligned(p.o.data, p.o.stride) &&
           mn_flash_vec_aligned(p.d_o.data, p.d_o.stride) && c.L < INT32_MAX / 2;
}

inline bool mn_flash_bwd_serves(const mn_attn_params &p) {
    const bool has_stats = p.lse.data && p.o.data;
    return mn_flash_serves(p) && p.d_o.data && (p.window == 0 || has_stats) &&
           mn_flash_vec_aligned(p.dq.data, p.dq.stride) &&
           mn_flash_vec_aligned(p.dk.data, p.dk.stride)
               && mn_flash_vec_aligned(p.dv.data, p.dv.stride);
}

/* Work of tiles of `rows` rows of `heads` heads, `shared_by` of which share keys and values; in
 * *blocks how many there are. */
inline mn_flash_params mn_flash_params_of(const mn_attn_params &p, const mn_call &call,
                                          int64_t heads, int64_t rows,
                            int64_t shared_by, int64_t *blocks) {
    const int64_t each = call.L * (p.call.K + p.call.V) * 2 + 1;
    const int64_t all = call.cu_seqlens ? heads : heads * call.B;
    mn_flash_params f = { p, mn_tile_slots(call, rows),
        mn_max(mn_flash_l2_bytes / each, 1) * shared_by };
    if (!call.cu_seqlens) f.tiles = mn_ceil_div(call.T, rows);
    f.section = mn_min(f.section, all);
    *blocks = f.tiles * all;
    return f;
}

inline bool mn_flash_bwd_plan(mn_plan *plan, const mn_attn_params &p) {
    int64_t rows;
    return mn_mul_i64(&rows, p.call.B * p.call.T, p.call.H) &&
           mn_mul_size(&plan->shared_bytes, (size_t)rows, 2 * sizeof(float));
}

}    // namespace mneme::attention

#endif
