/* additive_mma.cuh - what both chunk forms of additive stand on: products of tensor cores by
 * warps, tiles of tokens brought to shared memory, and the description of a scan.
 *
 * Fragments are those of mma.m16n8k16 in bf16 with float32 sums: lane l of a warp holds rows l / 4
 * and l / 4 + 8 of a tile of 16 rows, and columns 2 (l % 4) and the next of each 8. Rows in shared
 * memory are 16 bytes longer than their numbers, so that eight of them lie in different banks. */
#ifndef MN_KERNELS_CUDA_ADDITIVE_ADDITIVE_MMA_CUH
#define MN_KERNELS_CUDA_ADDITIVE_ADDITIVE_MMA_CUH

#include "kernels/cuda/prim/exp2.cuh"
#include "kernels/cuda/prim/first_wild.cuh"
#include "kernels/cuda/prim/common.cuh"
#include "kernels/cuda/prim/wild.cuh"

namespace mneme::additive {

enum {
    MN_SCAN_WIDTH = 64,                   // value columns of a block
    MN_SCAN_PITCH = MN_SCAN_WIDTH + 8,    // and their length in shared memory
    MN_SCAN_MAX = 3,                     // scans of one launch
    MN_SCAN_SEGMENTS = 16,                // of a sequence
    MN_SCAN_SEG_ALIGN = 128,                  // tokens that segments have a multiple of
    MN_SCAN_DECAYS = 256,                  // decays of a segment's state
    MN_SCAN_BY_WARPGROUPS = 64,            // tokens of a chunk of additive_token_chunk_sm90.cu
};

/* What a scan leaves for the gradient of the decay, or meets: products with what lies beside the
 * output, and with them states in front of chunks, or state_dots with those. */
enum mn_scan_mode { MN_SCAN_PLAIN, MN_SCAN_DOT_OUT, MN_SCAN_SAVE_STATE, MN_SCAN_DOT_STATE };

/* One scan over every sequence: out_r = scale sum over c <= r of L_rc (x_r.y_c) z_c and what the
 * state adds, in the order of time or against it. The output and three gradients are four of these:
 *
 *   o   x = q    y = k    z = v     dq  x = do   y = v    z = k      forward
 *   dv  x = k    y = q    z = do    dk  x = v    y = do   z = q      in reverse
 *
 * The state is sum y z', depth x width. `beside` has the rows that belong to those of the output:
 * their products are what the gradient of the decay is made of. */
struct mn_chunk_scan {
    mn_in x, y, z, paired, state0;
    mn_out out, state;
    int64_t depth, width;              // of x and y; of z and out
    int64_t state_row, state_column;   // strides of a state in memory
    float scale, into, from;           // of out, of the first state, of the last
    int transposed;                    // z and paired, not x and y, are queries and keys
    int reverse;                       // scans from the last token to the first
    enum mn_scan_mode mode;
    float *products;                   // out . beside
    mn_bf16 *kept;                     // states in front of chunks, as threads hold them
    float *state_dots;                 // of the kept states with those behind the chunks
    float *inside;                     // products with what is read from the states they meet
    int by_warpgroups;                 // these are as additive_token_chunk_sm90.cu leaves them
    int64_t segment;                   // least tokens of a segment
    // leaves what segments add to the state, and their decays
    int reduce_pass;
    float *sums, *cum_decays;
};

struct mn_chunk_scans {
    mn_call call;
    mn_in g;
    mn_out dg;
    mn_chunk_scan scan[MN_SCAN_MAX];
};

__host__ __device__ inline int64_t mn_scan_slices(const mn_chunk_scan &scan) {
    return (scan.width + MN_SCAN_WIDTH - 1) / MN_SCAN_WIDTH;
}

/* Which slice of which head of which sequence a block has, and which chunks [iter, end) of
 * its scan, counted in the order of the scan. `index` counts the segment among those of all. */
struct mn_scan_coord {
    int64_t n, h, slice, n_slices, column0;
    int64_t key;    // head of the queries and keys
    mn_span span;
    int64_t n_chunks, iter, end, index, stride;    // stride: between the indices of segments
    int64_t from;    // of a redo in reverse: the first token that is made again
    bool idle, last;
};

/* The first chunk of sequence n in the numbering of mn_tile_slots. */
__device__ inline int64_t mn_scan_first_slot(const mn_call &call, int64_t n, int64_t chunk) {
    if (call.cu_seqlens) return call.cu_seqlens[n] / chunk + n;
    return n * ((call.T + chunk - 1) / chunk);
}

/* A sequence is cut by its own length alone, so that its results do not depend on the batch. A
 * block has `groups` slices, of which this is the one of number `group`. */
__device__ inline mn_scan_coord mn_scan_block_coord(const mn_call &call, const mn_chunk_scan &scan,
                                                    int chunk, int group = 0, int groups = 1) {
    mn_scan_coord at;
    at.n_slices = mn_scan_slices(scan);
    const int64_t of_head = at.n_slices / groups;    // blocks
    at.slice = blockIdx.x % of_head * groups + group;
    at.column0 = at.slice * MN_SCAN_WIDTH;
    at.h = blockIdx.x / of_head % call.H;
    at.key = mn_key_head(call, at.h);
    at.n = blockIdx.x / of_head / call.H;
    at.span = mn_span_at(call, at.n);
    const int64_t share = (at.span.length + MN_SCAN_SEGMENTS - 1) / MN_SCAN_SEGMENTS;
    const int64_t grains = (share + MN_SCAN_SEG_ALIGN - 1) / MN_SCAN_SEG_ALIGN;
    const int64_t iters = max(scan.segment, grains * MN_SCAN_SEG_ALIGN) / chunk;
    at.n_chunks = (at.span.length + chunk - 1) / chunk;
    at.from = 0;
    at.iter = blockIdx.z * iters;
    at.end = min(at.iter + iters, at.n_chunks);
    at.last = at.end == at.n_chunks;
    at.idle = (blockIdx.z > 0 && at.iter >= at.n_chunks) || (scan.reduce_pass && at.last);
    at.stride = call.H * at.n_slices;
    at.index = (mn_scan_first_slot(call, at.n, scan.segment) + blockIdx.z) * at.stride +
               at.h * at.n_slices + at.slice;
    return at;
}

/* ---- products -------------------------------------------------------------------------------- */

__device__ inline uint32_t mn_bf16x2(float low, float high) {
    uint32_t pair;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
    return pair;
}

__device__ inline float mn_bf16_lo(uint32_t pair) {
    return __uint_as_float(pair << 16);
}

__device__ inline float mn_bf16_hi(uint32_t pair) {
    return __uint_as_float(pair & 0xffff0000u);
}

__device__ inline uint32_t mn_bf16x2_mul(uint32_t pair, float low, float high) {
    return mn_bf16x2(mn_bf16_lo(pair) * low, mn_bf16_hi(pair) * high);
}

/* c += a b for a tile of 16 x 8 over a depth of 16 */
__device__ inline void mn_mma(float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, "
                 "{%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
                 : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

__device__ inline uint32_t mn_shared_address(const void *at) {
    return (uint32_t)__cvta_generic_to_shared(at);
}

template <bool TRANS>
__device__ inline void mn_ldmatrix(uint32_t (&r)[4], const mn_bf16 *at) {
    if (TRANS) {
        asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
                     : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                     : "r"(mn_shared_address(at)));
    } else {
        asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
                     : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                     : "r"(mn_shared_address(at)));
    }
}

/* Left operand: 16 rows by 16 deep, from rows of `pitch`. */
__device__ inline void mn_frag_a(uint32_t (&a)[4], const mn_bf16 *at, int pitch) {
    const int lane = threadIdx.x % 32;
    mn_ldmatrix<false>(a, at + lane % 16 * pitch + lane / 16 * 8);
}

/* The same where memory has its columns as rows. */
__device__ inline void mn_frag_a_trans(uint32_t (&a)[4], const mn_bf16 *at, int pitch) {
    const int lane = threadIdx.x % 32;
    mn_ldmatrix<true>(a, at + (lane % 8 + lane / 16 * 8) * pitch + lane / 8 % 2 * 8);
}

/* Right operand: two tiles of 8 columns, 16 deep, where rows in memory are columns; b[0], b[1] are
 * of the first tile. */
__device__ inline void mn_frag_b(uint32_t (&b)[4], const mn_bf16 *at, int pitch) {
    const int lane = threadIdx.x % 32;
    mn_ldmatrix<false>(b, at + (lane % 8 + lane / 16 * 8) * pitch + lane / 8 % 2 * 8);
}

/* The same where rows in memory are the depth. */
__device__ inline void mn_frag_b_trans(uint32_t (&b)[4], const mn_bf16 *at, int pitch) {
    const int lane = threadIdx.x % 32;
    mn_ldmatrix<true>(b, at + lane % 16 * pitch + lane / 16 * 8);
}

/* ---- products with what rows may not see ----------------------------------------------------- */

/* o += a z for the finite numbers of z; then token by token, into the rows that see it, for the
 * others. load(b, tile): right operands of two tiles of z. */
template <int TILES, typename LOAD>
__device__ inline void mn_mma_causal_wild(float (&o)[TILES][4], const uint32_t (&a)[4],
                                          LOAD load) {
    const int lane = threadIdx.x % 32, row = lane / 4;
#pragma unroll
    for (int tile = 0; tile < TILES; tile += 2) {
        uint32_t b[4];
        load(b, tile);
#pragma unroll
        for (int i = 0; i < 4; i++) b[i] &= ~mn_bf16x2_wild(b[i]);
        mn_mma(o[tile], a, b[0], b[1]);
        mn_mma(o[tile + 1], a, b[2], b[3]);
    }
#pragma unroll 1
    for (int token = 0; token < 16; token++) {
#pragma unroll
        for (int tile = 0; tile < TILES; tile += 2) {
            uint32_t b[4];
            float own[2][4] = {};
            load(b, tile);
#pragma unroll
            for (int i = 0; i < 4; i++) {
                const int at = i % 2 * 8 + lane % 4 * 2;    // of the lower half
                const uint32_t half = at == token ? 0xffffu : at + 1 == token ? 0xffff0000u : 0u;
                b[i] &= mn_bf16x2_wild(b[i]) & half;
            }
            if (!__any_sync(0xffffffffu, b[0] | b[1] | b[2] | b[3])) continue;
            mn_mma(own[0], a, b[0], b[1]);
            mn_mma(own[1], a, b[2], b[3]);
#pragma unroll
            for (int i = 0; i < 8; i++) {
                if (row + i % 4 / 2 * 8 >= token) o[tile + i / 4][i % 4] += own[i / 4][i % 4];
            }
        }
    }
}

/* o += a z where z are the tokens of the 16 rows themselves and a is 0 where a row is before a
 * token. 0 times an infinity or NaN is NaN, so that such numbers go in by themselves; with others,
 * whatever they are, a row's sums have the same bits. */
template <int TILES, typename LOAD>
__device__ inline void mn_mma_causal_by(float (&o)[TILES][4], const uint32_t (&a)[4], LOAD load) {
    uint32_t watch = 0;
#pragma unroll
    for (int tile = 0; tile < TILES; tile += 2) {
        uint32_t b[4];
        load(b, tile);
#pragma unroll
        for (int i = 0; i < 4; i++) watch = mn_bf16x2_watch(b[i], watch);
    }
    if (__any_sync(0xffffffffu, watch & 0x7fff7fffu)) {
        mn_mma_causal_wild(o, a, load);
        return;
    }
#pragma unroll
    for (int tile = 0; tile < TILES; tile += 2) {
        uint32_t b[4];
        load(b, tile);
        mn_mma(o[tile], a, b[0], b[1]);
        mn_mma(o[tile + 1], a, b[2], b[3]);
    }
}

/* The same of rows in shared memory, `pitch` apart. */
template <int TILES>
__device__ inline void mn_mma_causal(float (&o)[TILES][4], const uint32_t (&a)[4],
                                     const mn_bf16 *z, int pitch) {
    mn_mma_causal_by(o, a, [&](uint32_t (&b)[4], int tile) {
        mn_frag_b_trans(b, z + 8 * tile, pitch);
    });
}

/* Sums of 16 rows by 16 columns as a left operand. */
__device__ inline void mn_frag_a_of(uint32_t (&a)[4], const float (&low)[4],
                                    const float (&high)[4]) {
    a[0] = mn_bf16x2(low[0], low[1]), a[1] = mn_bf16x2(low[2], low[3]);
    a[2] = mn_bf16x2(high[0], high[1]), a[3] = mn_bf16x2(high[2], high[3]);
}

/* ---- tokens ---------------------------------------------------------------------------------- */

/* Columns of the rows (b, t0 ..., h) of a view; at most `width` of them. */
template <typename T>
struct mn_col_tile {
    T *at;          // NULL: zeros, or not wanted
    int64_t step;
    int width;
    bool packs;     // rows may be moved by 16 bytes
};

template <typename T, typename V>
__device__ inline mn_col_tile<T> mn_col_tile_of(const V &view, const mn_span &span, int64_t h,
                                          int64_t column0, int64_t columns, int most) {
    mn_col_tile<T> col_tile = {};
    T *at = mn_row<mn_bf16>(view, span.b, span.t0, h);
    if (!at || column0 >= columns) return col_tile;
    col_tile.at = at + column0;
    col_tile.step = view.stride[1];
    col_tile.width = (int)min((int64_t)most, columns - column0);
    col_tile.packs = (uintptr_t)col_tile.at % 16 == 0 && col_tile.step % 8 == 0;
    return col_tile;
}

__device__ inline void mn_cp_async(mn_bf16 *to, const mn_bf16 *from, int bytes) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(mn_shared_address(to)),
                 "l"(from), "r"(bytes)
                 : "memory");
}

__device__ inline void mn_cp_async_commit(void) {
    asm volatile("cp.async.commit_group;" ::: "memory");
}

__device__ inline void mn_cp_async_wait_all(void) {
    asm volatile("cp.async.wait_group 0;" ::: "memory");
}

/* Eight numbers of which `left` are there, where a column tile cannot be moved by packs. */
static __device__ __noinline__ void mn_copy_scalar(mn_bf16 *to, const mn_bf16 *from, int left) {
    mn_vec<mn_bf16, 8> pack = {};
    for (int i = 0; i < left; i++) pack.at[i] = from[i];
    *(mn_vec<mn_bf16, 8> *)to = pack;
}

/* Tokens [t, t + count) of a column tile as rows of COLUMNS + 8, zeros beyond; against time,
 * token t is the last of ROWS rows. Arrives behind mn_cp_async_wait_all and a barrier. */
template <int ROWS, int COLUMNS, int THREADS>
__device__ inline void mn_load_tokens(mn_bf16 *to, const mn_col_tile<const mn_bf16> &from,
                                      int64_t t,
                                       int count, bool reverse) {
    constexpr int packs = COLUMNS / 8, rows = THREADS / packs;
    const int row = threadIdx.x / packs, j = threadIdx.x % packs * 8;
    const int left = max(min(from.width - j, 8), 0), step = reverse ? -rows : rows;
    int token = reverse ? ROWS - 1 - row : row;
    mn_bf16 *dst = to + row * (COLUMNS + 8) + j;
    const mn_bf16 *at = from.at + (t + token) * from.step + j;
    const int64_t further = step * from.step;
    if (from.packs) {
#pragma unroll
        for (int i = 0; i < ROWS / rows; i++) {
            mn_cp_async(dst + i * rows * (COLUMNS + 8), at, token < count ? 2 * left : 0);
            token += step, at += further;
        }
        return;
    }
    for (int i = 0; i < ROWS / rows; i++) {
        mn_copy_scalar(dst + i * rows * (COLUMNS + 8), at, token < count ? left : 0);
        token += step, at += further;
    }
}

/* Four tiles of 8 columns of which a quad's lane holds a pair each: afterwards lane i of the quad
 * holds the whole row of tile i. */
__device__ inline void mn_quad_transpose(uint32_t (&r)[4]) {
    const int lane = threadIdx.x % 4;
    const bool odd = lane & 1, upper = lane & 2;
    uint32_t give0 = odd ? r[0] : r[1], give1 = odd ? r[2] : r[3];
    uint32_t got0 = __shfl_xor_sync(0xffffffffu, give0, 1);
    uint32_t got1 = __shfl_xor_sync(0xffffffffu, give1, 1);
    const uint32_t a0 = odd ? got0 : r[0], a1 = odd ? r[1] : got0;
    const uint32_t b0 = odd ? got1 : r[2], b1 = odd ? r[3] : got1;
    give0 = upper ? a0 : b0, give1 = upper ? a1 : b1;
    got0 = __shfl_xor_sync(0xffffffffu, give0, 2);
    got1 = __shfl_xor_sync(0xffffffffu, give1, 2);
    r[0] = upper ? got0 : a0, r[1] = upper ? got1 : a1;
    r[2] = upper ? b0 : got0, r[3] = upper ? b1 : got1;
}

static __device__ __noinline__ void mn_store_scalar(mn_bf16 *to, uint32_t pair0, uint32_t pair1,
                                           uint32_t pair2, uint32_t pair3, int count) {
    const uint32_t pairs[4] = { pair0, pair1, pair2, pair3 };
    for (int i = 0; i < 8 && i < count; i++) {
        mn_put(to + i, i % 2 ? mn_bf16_hi(pairs[i / 2]) : mn_bf16_lo(pairs[i / 2]));
    }
}

/* Rows of four tiles of 8 columns to a column tile, from its column j0 on: `pair[i]` is this
 * lane's pair of tile i in its row, which is `token`; a warp calls together. */
__device__ inline void mn_store_tokens(const mn_col_tile<mn_bf16> &to, uint32_t (&pair)[4],
                                     int64_t token, bool inside, int j0) {
    mn_quad_transpose(pair);
    const int j = j0 + threadIdx.x % 4 * 8;
    if (!inside || !to.at || j >= to.width) return;
    mn_bf16 *at = to.at + token * to.step + j;
    if (to.packs && j + 8 <= to.width) {
        *(uint4 *)at = make_uint4(pair[0], pair[1], pair[2], pair[3]);
        return;
    }
    mn_store_scalar(at, pair[0], pair[1], pair[2], pair[3], to.width - j);
}

static __device__ __noinline__ uint32_t mn_load_bf16x2_scalar(const mn_bf16 *from, int count) {
    return mn_bf16x2(count > 0 ? mn_float(from[0]) : 0.0f, count > 1 ? mn_float(from[1]) : 0.0f);
}

/* Pairs of columns of row `token` of a column tile as this lane has them in TILES tiles from
 * column j0 on; zeros outside. */
template <int TILES>
__device__ inline void mn_load_bf16x2(uint32_t (&pair)[TILES],
                                      const mn_col_tile<const mn_bf16> &from,
                                   int64_t token, bool inside, int j0) {
    const int j = j0 + threadIdx.x % 4 * 2;
    const mn_bf16 *at = from.at + token * from.step + j;
    const bool whole = from.packs && j0 + 8 * TILES <= from.width;
#pragma unroll
    for (int i = 0; i < TILES; i++) {
        pair[i] = 0;
        if (inside && whole) pair[i] = *(const uint32_t *)(at + 8 * i);
        else if (inside) pair[i] = mn_load_bf16x2_scalar(at + 8 * i, from.width - j - 8 * i);
    }
}

/* ---- numbers that are not finite (docs/internals/causality.md) ------------------------------- */

/* A number that is not finite stays in the state, and shows in the row that the scan comes to last.
 * Then rows in front of the first such number are made again, as if the sequence ended there: by
 * the block of the segment that holds it. In reverse these are the tokens from place.from on, and
 * cotangents in front of it are left out. Without rows to make the place becomes idle. The block
 * calls. */
__device__ inline void mn_additive_cut(mn_scan_coord &place, const mn_chunk_scan &p, int chunk) {
    const mn_scan_coord at = place;
    const int64_t b = at.span.b, t0 = at.span.t0, length = at.span.length;
    const int64_t columns = min((int64_t)MN_SCAN_WIDTH, p.width - at.column0);
    const int64_t last = t0 + (p.reverse ? 0 : length - 1);
    int64_t cut = 0;    // rows in the order of the scan
    mn_pdl_wait();
    if (length > 0 && mn_redo_row_is_wild(mn_row<mn_bf16>(p.out, b, last, at.h) + at.column0,
                                          columns)) {
        cut = mn_redo_first_token(length, [&](int64_t i, float most) {
            const int64_t t = t0 + (p.reverse ? length - 1 - i : i);
            const mn_bf16 *v = mn_row<mn_bf16>(p.z, b, t, at.h) + at.column0;
            const mn_bf16 *k = p.reverse ? nullptr : mn_row<mn_bf16>(p.y, b, t, at.key);
            return mn_redo_has_wild(v, columns, most) || mn_redo_has_wild(k, p.depth, most);
        });
    }
    __syncthreads();
    if (threadIdx.x == 0) {
        place.last = false;
        if (p.reverse) {
            place.from = length - cut;
            const int64_t ends = at.n_chunks - place.from / chunk;    // behind the cut chunk
            place.idle = cut == 0 || place.from % chunk == 0 || ends <= at.iter || ends > at.end;
            place.end = min(at.end, ends);
        } else {
            place.span.length = cut;
            place.n_chunks = (cut + chunk - 1) / chunk;
            place.idle = cut <= at.iter * chunk || cut >= at.end * chunk;
            place.end = min(at.end, place.n_chunks);
        }
    }
    __syncthreads();
}

}    // namespace mneme::additive

#endif
