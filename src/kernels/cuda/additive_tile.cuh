/* additive_tile.cuh - what both chunk forms of additive stand on: products of tensor cores by
 * warps, tiles of tokens brought to shared memory, and the description of a walk.
 *
 * Fragments are those of mma.m16n8k16 in bf16 with float32 sums: lane l of a warp holds rows l / 4
 * and l / 4 + 8 of a tile of 16 rows, and columns 2 (l % 4) and the next of each 8. Rows in shared
 * memory are 16 bytes longer than their numbers, so that eight of them lie in different banks. */
#ifndef MN_KERNELS_CUDA_ADDITIVE_TILE_CUH
#define MN_KERNELS_CUDA_ADDITIVE_TILE_CUH

#include "kernels/cuda/common.cuh"

enum {
    MN_WALK_WIDTH = 64,                   // value columns of a block
    MN_WALK_PITCH = MN_WALK_WIDTH + 8,    // and their length in shared memory
    MN_WALK_MOST = 3,                     // walks of one launch
};

/* What a walk leaves for the gradient of the decay, or meets. */
enum mn_walk_duty { MN_WALK_PLAIN, MN_WALK_KEEPS, MN_WALK_MEETS };

/* One walk over every sequence: out_r = scale sum over c <= r of L_rc (x_r.y_c) z_c and what the
 * state adds, in the order of time or against it. The output and three gradients are four of these:
 *
 *   o   x = q    y = k    z = v     dq  x = do   y = v    z = k      forward
 *   dv  x = k    y = q    z = do    dk  x = v    y = do   z = q      in reverse
 *
 * The state is sum y z', depth x width. `beside` has the rows that belong to those of the output:
 * their products are what the gradient of the decay is made of. */
struct mn_walk {
    mn_in x, y, z, beside, state0;
    mn_out out, state;
    int64_t depth, width;              // of x and y; of z and out
    int64_t state_row, state_column;   // strides of a state in memory
    float scale, into, from;           // of out, of the first state, of the last
    int reverse;                       // walks from the last token to the first
    enum mn_walk_duty duty;
    float *products;                   // out . beside
    mn_bf16 *kept;                     // states in front of chunks, as threads hold them
    float *meetings;                   // of the kept states with those of this walk
};

struct mn_walks {
    mn_call call;
    mn_in g;
    mn_out dg;
    mn_walk walk[MN_WALK_MOST];
};

__host__ __device__ inline int64_t mn_walk_slices(const mn_walk &walk) {
    return (walk.width + MN_WALK_WIDTH - 1) / MN_WALK_WIDTH;
}

/* Which slice of which head of which sequence a block has. */
struct mn_walk_place {
    int64_t n, h, slice, n_slices, column0;
    mn_span span;
};

__device__ inline mn_walk_place mn_walk_here(const mn_call &call, const mn_walk &walk) {
    mn_walk_place at;
    at.n_slices = mn_walk_slices(walk);
    at.slice = blockIdx.x % at.n_slices;
    at.column0 = at.slice * MN_WALK_WIDTH;
    at.h = blockIdx.x / at.n_slices % call.H;
    at.n = blockIdx.x / at.n_slices / call.H;
    at.span = mn_span_at(call, at.n);
    return at;
}

/* The first chunk of sequence n in the numbering of mn_tile_slots. */
__device__ inline int64_t mn_walk_first_slot(const mn_call &call, int64_t n, int chunk) {
    if (call.cu_seqlens) return call.cu_seqlens[n] / chunk + n;
    return n * ((call.T + chunk - 1) / chunk);
}

/* ---- products -------------------------------------------------------------------------------- */

/* 2^x, to the last bit or two; 0 where it is no normal number */
__device__ inline float mn_exp2(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

__device__ inline uint32_t mn_pair(float low, float high) {
    uint32_t pair;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
    return pair;
}

__device__ inline float mn_low(uint32_t pair) {
    return __uint_as_float(pair << 16);
}

__device__ inline float mn_high(uint32_t pair) {
    return __uint_as_float(pair & 0xffff0000u);
}

__device__ inline uint32_t mn_pair_times(uint32_t pair, float low, float high) {
    return mn_pair(mn_low(pair) * low, mn_high(pair) * high);
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

template <bool TURNED>
__device__ inline void mn_ldmatrix(uint32_t (&r)[4], const mn_bf16 *at) {
    if (TURNED) {
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
__device__ inline void mn_left(uint32_t (&a)[4], const mn_bf16 *at, int pitch) {
    const int lane = threadIdx.x % 32;
    mn_ldmatrix<false>(a, at + lane % 16 * pitch + lane / 16 * 8);
}

/* The same where memory has its columns as rows. */
__device__ inline void mn_left_turned(uint32_t (&a)[4], const mn_bf16 *at, int pitch) {
    const int lane = threadIdx.x % 32;
    mn_ldmatrix<true>(a, at + (lane % 8 + lane / 16 * 8) * pitch + lane / 8 % 2 * 8);
}

/* Right operand: two tiles of 8 columns, 16 deep, where rows in memory are columns; b[0], b[1] are
 * of the first tile. */
__device__ inline void mn_right(uint32_t (&b)[4], const mn_bf16 *at, int pitch) {
    const int lane = threadIdx.x % 32;
    mn_ldmatrix<false>(b, at + (lane % 8 + lane / 16 * 8) * pitch + lane / 8 % 2 * 8);
}

/* The same where rows in memory are the depth. */
__device__ inline void mn_right_turned(uint32_t (&b)[4], const mn_bf16 *at, int pitch) {
    const int lane = threadIdx.x % 32;
    mn_ldmatrix<true>(b, at + lane % 16 * pitch + lane / 16 * 8);
}

/* Sums of 16 rows by 16 columns as a left operand. */
__device__ inline void mn_left_of(uint32_t (&a)[4], const float (&low)[4], const float (&high)[4]) {
    a[0] = mn_pair(low[0], low[1]), a[1] = mn_pair(low[2], low[3]);
    a[2] = mn_pair(high[0], high[1]), a[3] = mn_pair(high[2], high[3]);
}

/* ---- tokens ---------------------------------------------------------------------------------- */

/* Columns of the rows (b, t0 ..., h) of a view; at most `width` of them. */
template <typename T>
struct mn_strip {
    T *at;          // NULL: zeros, or not wanted
    int64_t step;
    int width;
    bool packs;     // rows may be moved by 16 bytes
};

template <typename T, typename V>
__device__ inline mn_strip<T> mn_strip_of(const V &view, const mn_span &span, int64_t h,
                                          int64_t column0, int64_t columns, int most) {
    mn_strip<T> strip = {};
    T *at = mn_row<mn_bf16>(view, span.b, span.t0, h);
    if (!at || column0 >= columns) return strip;
    strip.at = at + column0;
    strip.step = view.stride[1];
    strip.width = (int)min((int64_t)most, columns - column0);
    strip.packs = (uintptr_t)strip.at % 16 == 0 && strip.step % 8 == 0;
    return strip;
}

__device__ inline void mn_copy_async(mn_bf16 *to, const mn_bf16 *from, int bytes) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(mn_shared_address(to)),
                 "l"(from), "r"(bytes)
                 : "memory");
}

__device__ inline void mn_copies_end(void) {
    asm volatile("cp.async.commit_group;" ::: "memory");
}

__device__ inline void mn_copies_wait(void) {
    asm volatile("cp.async.wait_group 0;" ::: "memory");
}

/* Tokens [t, t + count) of a strip as rows of COLUMNS + 8, zeros beyond; against time, token t is
 * the last of ROWS rows. Arrives behind mn_copies_wait and a barrier. */
template <int ROWS, int COLUMNS, int THREADS>
__device__ inline void mn_fetch_tokens(mn_bf16 *to, const mn_strip<const mn_bf16> &from, int64_t t,
                                       int count, bool reverse) {
    constexpr int packs = COLUMNS / 8;
#pragma unroll 4
    for (int k = threadIdx.x; k < ROWS * packs; k += THREADS) {
        const int row = k / packs, j = k % packs * 8, token = reverse ? ROWS - 1 - row : row;
        const int left = token < count ? max(min(from.width - j, 8), 0) : 0;
        const mn_bf16 *at = left ? from.at + (t + token) * from.step + j : from.at;
        mn_bf16 *there = to + row * (COLUMNS + 8) + j;
        if (from.packs) {
            mn_copy_async(there, at, 2 * left);
            continue;
        }
        mn_pack<mn_bf16, 8> pack = {};
#pragma unroll
        for (int i = 0; i < 8; i++) {
            if (i < left) pack.at[i] = at[i];
        }
        *(mn_pack<mn_bf16, 8> *)there = pack;
    }
}

/* Four tiles of 8 columns of which a quad's lane holds a pair each: afterwards lane i of the quad
 * holds the whole row of tile i. */
__device__ inline void mn_quad_turn(uint32_t (&r)[4]) {
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

/* Rows of four tiles of 8 columns to a strip, from its column j0 on: `pair[i]` is this lane's pair
 * of tile i in its row, which is `token`; a warp calls together. */
__device__ inline void mn_put_tokens(const mn_strip<mn_bf16> &to, uint32_t (&pair)[4],
                                     int64_t token, bool inside, int j0) {
    mn_quad_turn(pair);
    const int j = j0 + threadIdx.x % 4 * 8;
    if (!inside || !to.at || j >= to.width) return;
    mn_bf16 *at = to.at + token * to.step + j;
    if (to.packs && j + 8 <= to.width) {
        *(uint4 *)at = make_uint4(pair[0], pair[1], pair[2], pair[3]);
        return;
    }
#pragma unroll
    for (int i = 0; i < 8; i++) {
        const uint32_t two = pair[i / 2];
        if (j + i < to.width) mn_put(at + i, i % 2 ? mn_high(two) : mn_low(two));
    }
}

/* Columns j and j + 1 of row `token` of a strip, j even; zeros outside. */
__device__ inline float2 mn_pair_at(const mn_strip<const mn_bf16> &from, int64_t token, bool inside,
                                    int j) {
    if (!inside || j >= from.width) return make_float2(0.0f, 0.0f);
    const mn_bf16 *at = from.at + token * from.step + j;
    if (from.packs && j + 2 <= from.width) {
        const uint32_t pair = *(const uint32_t *)at;
        return make_float2(mn_low(pair), mn_high(pair));
    }
    return make_float2(mn_float(at[0]), j + 1 < from.width ? mn_float(at[1]) : 0.0f);
}

#endif
