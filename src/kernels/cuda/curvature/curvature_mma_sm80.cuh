/* curvature_mma_sm80.cuh - curvature by mma.sync for bf16 and keys of up to 128 (compute capability
 * 8.0, or newer without wgmma): what its kernels in the order of time (curvature_fwd_sm80.cu, and
 * for gradients of queries curvature_bwd_sm80.cu) and against it share, and which calls they serve.
 *
 * A block has all of R (or G) of one head of a segment, 16 rows in the registers of each warp; two
 * chunks of 64 tokens are in shared memory, the next one on its way. What a warp computes is
 * transposed, as in curvature_sm90.cuh: its rows are columns of the result, so that R is the left
 * operand and never leaves the registers. Four of the warps make scores besides, or four each of
 * two kinds. */
#ifndef MN_KERNELS_CUDA_CURVATURE_CURVATURE_MMA_SM80_CUH
#define MN_KERNELS_CUDA_CURVATURE_CURVATURE_MMA_SM80_CUH

#include <type_traits>

#include "kernels/cuda/attention/attention_mma_sm80.cuh"
#include "kernels/cuda/curvature/curvature_sm90.cuh"
#include "kernels/cuda/curvature/curvature_smem.cuh"

namespace mneme::curvature {

/* Whether calls go by these kernels where Hopper's do not serve. */
static const bool mn_curve80_taken = true;

/* Whether sums of segments of keys do too, or go by tiles in shared memory. */
static const bool mn_curve80_sums_taken = true;

/* ---- tiles ----------------------------------------------------------------------------------- */

template <int KP>
constexpr int mn_curve80_threads = 2 * KP;

/* Rows of a view of a block's head, from its segment's first on; none where it is absent. In shared
 * memory, as registers are short; taken from there once, or each copy would wait for it again. */
struct mn_curve80_rows {
    mn_bf16 *at;
    int64_t stride;
};

template <typename View>
__device__ inline mn_curve80_rows mn_curve80_rows_of(const View &view, const mn_curve_place &at) {
    const mn_bf16 *first = mn_row<mn_bf16>(view, at.s.span.b, at.s.span.t0 + at.s.first, at.h);
    return { (mn_bf16 *)first, view.stride[1] };
}

/* A block's place and its rows: of keys, of what is read through R or G, of what goes with that,
 * and of results. */
struct mn_curve80_views {
    mn_curve_place place;
    mn_curve80_rows k, x, q, gamma, to;
};

/* Those of a block; all threads call. */
__device__ inline const mn_curve80_views &mn_curve80_find(mn_curve80_views &views,
                                                          const mn_curvature_args &p,
                                                          const mn_curve_cut &cut, const mn_in &x,
                                                          const mn_in &q, const mn_out &to) {
    if (threadIdx.x == 0) {
        const mn_curve_place at = mn_curve_place_of(p.call, cut);
        views = { at, mn_curve80_rows_of(p.k, at), mn_curve80_rows_of(x, at),
                  mn_curve80_rows_of(q, at), mn_curve80_rows_of(p.gamma, at),
                  mn_curve80_rows_of(to, at) };
    }
    __syncthreads();
    return views;
}

/* Chunk `start` of rows, of which `count` and K columns are there, the others become zeros from
 * where nothing is read of `any`, to the top of a tile of ROWS; the block calls. A thread has one
 * vec16 of every 16th row. */
template <int KP, int ROWS>
__device__ inline void mn_curve80_load(unsigned char *tile, mn_curve80_rows from, const void *any,
                                       int start, int count, int K) {
    constexpr int vecs = KP / 8, step = mn_curve80_threads<KP> / vecs;
    static_assert(step % 8 == 0, "a thread's rows are swizzled alike");
    const int vec = threadIdx.x % vecs, row = threadIdx.x / vecs;
    const int left = from.at && vec * 8 < K ? count - row : 0;
    const mn_bf16 *at = from.at + (int64_t)(start + row) * from.stride + vec * 8;
    const uint32_t to = (uint32_t)__cvta_generic_to_shared(tile) +
                        mn_swizzle_byte(ROWS, row, vec * 8);
#pragma unroll
    for (int i = 0; i < MN_CURVE_CHUNK / step; i++, at += step * from.stride) {
        const bool inside = i * step < left;
        mn_cp_async_16(to + i * step * 128, inside ? at : any, inside);
    }
}

/* ---- products -------------------------------------------------------------------------------- */

__device__ inline uint32_t mn_curve80_address(const void *memory) {
    return (uint32_t)__cvta_generic_to_shared(memory);
}

/* Two neighbours of 16 columns and of 16 rows as a left operand of depth 16, rounded; or, LOW, what
 * rounding them leaves. */
template <bool LOW>
__device__ inline uint32_t mn_curve80_pair(float x, float y) {
    const uint32_t pair = mn_bf16x2(x, y);
    return LOW ? mn_bf16x2(x - mn_curve_low(pair), y - mn_curve_high(pair)) : pair;
}

template <int N>
using mn_number = std::integral_constant<int, N>;

/* A left operand of 16 columns of a tile, from `column` on, by 16 of its rows (mn_curve_left). */
template <int ROWS>
__device__ inline void mn_curve80_left(uint32_t (&a)[4], const unsigned char *tile, int column,
                                       int step) {
    const int lane = threadIdx.x % 32;
    attention::mn_ldmatrix_x4<true>(
        a, mn_curve80_address(tile) + mn_swizzle_byte(ROWS, 16 * step + lane % 8 + lane / 16 * 8,
                                                      column + lane / 8 % 2 * 8));
}

/* sum[0], sum[2] += the sums of a left operand's rows. */
__device__ inline void mn_curve80_add_ones(float (&sum)[4], const uint32_t (&x)[4]) {
    const uint32_t ones = 0x3f803f80u;
    attention::mn_mma_m16n8k16(sum, x, ones, ones);
}

/* Y (a warp's rows of R by 64 tokens) += R X' over KP columns of a tile of ROWS rows. */
template <int KP, int ROWS, bool LOW>
__device__ inline void mn_curve80_through(float (&Y)[32], const float (&R)[KP / 2],
                                          const unsigned char *x) {
#pragma unroll
    for (int k = 0; k < KP; k += 16) {
        uint32_t a[4];
#pragma unroll
        for (int i = 0; i < 4; i++) {
            a[i] = mn_curve80_pair<LOW>(R[k / 2 + 2 * i], R[k / 2 + 2 * i + 1]);
        }
        mn_warp_mma_abt<ROWS, MN_CURVE_CHUNK>(Y, a, mn_curve80_address(x), 0, k);
    }
}

/* Y += x P' of a left operand of 16 tokens from 16 `step` on, for scores of tokens (rows of P) with
 * earlier ones. */
__device__ inline void mn_curve80_see_earlier(float (&Y)[32], const uint32_t *x,
                                              const unsigned char *P, int step) {
    const int lane = threadIdx.x % 32;
    const uint32_t at = mn_curve80_address(P);
#pragma unroll
    for (int n = 16 * step; n < MN_CURVE_CHUNK; n += 16) {
        uint32_t b[4];
        attention::mn_ldmatrix_x4<false>(b, at + mn_swizzle_byte(64, n + lane % 8 + lane / 16 * 8,
                                                                 16 * step + lane / 8 % 2 * 8));
        attention::mn_mma_m16n8k16(Y + n / 2, x, b[0], b[1]);
        attention::mn_mma_m16n8k16(Y + n / 2 + 4, x, b[2], b[3]);
    }
}

/* Y += x P: the same for tokens that later ones see. */
__device__ inline void mn_curve80_see_later(float (&Y)[32], const uint32_t (&x)[16],
                                            const unsigned char *P) {
    const int lane = threadIdx.x % 32;
    const uint32_t at = mn_curve80_address(P);
#pragma unroll
    for (int step = 0; step < 4; step++) {
#pragma unroll
        for (int n = 0; n <= 16 * step; n += 16) {
            uint32_t b[4];
            attention::mn_ldmatrix_x4<true>(
                b, at + mn_swizzle_byte(64, 16 * step + lane % 16, n + lane / 16 * 8));
            attention::mn_mma_m16n8k16(Y + n / 2, x + 4 * step, b[0], b[1]);
            attention::mn_mma_m16n8k16(Y + n / 2 + 4, x + 4 * step, b[2], b[3]);
        }
    }
}

/* d = X K' of rows 16 BLOCK on of tile x, for tokens up to their own block's, `d` zero behind them;
 * where a tile of keys has MN_CURVE_ROWS rows also for the eight behind them. */
template <int KP, int ROWS, int BLOCK>
__device__ inline void mn_curve80_scores(float (&d)[36], const unsigned char *x,
                                         const unsigned char *k) {
    const int lane = threadIdx.x % 32;
    const uint32_t at = mn_curve80_address(k);
    uint32_t more[4] = {};
#pragma unroll
    for (int i = 0; i < 36; i++) d[i] = 0.0f;
#pragma unroll
    for (int i = 0; i < KP; i += 16) {
        uint32_t a[4], b[4];
        mn_warp_frag_a<64>(a, mn_curve80_address(x), 16 * BLOCK, i);
#pragma unroll
        for (int n = 0; n <= 16 * BLOCK; n += 16) {
            attention::mn_ldmatrix_x4<false>(
                b, at + mn_swizzle_byte(ROWS, n + lane % 8 + lane / 16 * 8,
                                        i + lane / 8 % 2 * 8));
            attention::mn_mma_m16n8k16(d + n / 2, a, b[0], b[1]);
            attention::mn_mma_m16n8k16(d + n / 2 + 4, a, b[2], b[3]);
        }
        if (ROWS == MN_CURVE_CHUNK) continue;
        if (i % 32 == 0) {    // of this depth and the next
            attention::mn_ldmatrix_x4<false>(
                more, at + mn_swizzle_byte(ROWS, 64 + lane % 8, i + lane / 8 * 8));
        }
        attention::mn_mma_m16n8k16(d + 32, a, more[i % 32 / 8], more[i % 32 / 8 + 1]);
    }
}

/* use(number), a constant, for the block of 16 tokens whose scores a warp makes. */
template <typename F>
__device__ __forceinline__ void mn_curve80_by_block(F use) {
    switch (threadIdx.x / 32 % 4) {
    case 0: use(mn_number<0>()); break;
    case 1: use(mn_number<1>()); break;
    case 2: use(mn_number<2>()); break;
    default: use(mn_number<3>());
    }
}

/* Sums of the rows of tril(X K'), with s.x, times 1 / n, which is `each`, of block BLOCK. */
template <int BLOCK>
__device__ inline void mn_curve80_means(float (&mean)[2], const float (&d)[36],
                                        const float (&each)[2]) {
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int r = 0; r < 2; r++) {
        const int last = 16 * BLOCK + lane / 4 + 8 * r - lane % 4 * 2;    // as mn_curve_means
        float even = d[32 + 2 * r], odd = d[33 + 2 * r];
#pragma unroll
        for (int vec16 = 0; vec16 < 2 * BLOCK + 2; vec16++) {
            if (vec16 < 2 * BLOCK || 8 * vec16 <= last) even += d[4 * vec16 + 2 * r];
            if (vec16 < 2 * BLOCK || 8 * vec16 + 1 <= last) odd += d[4 * vec16 + 2 * r + 1];
        }
        mean[r] = mn_quad_sum(even + odd) * each[r];
    }
}

/* Scores of block BLOCK less their row's mean into a tile, of which blocks right of the diagonal
 * are never read; what rounding leaves into `low`. */
template <int BLOCK>
__device__ inline void mn_curve80_put_scores(unsigned char *to, unsigned char *low,
                                             const float (&d)[36], const float (&mean)[2]) {
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int i = 0; i < 8 * BLOCK + 8; i += 2) {
        const int r = i % 4 / 2, t = 16 * BLOCK + lane / 4 + 8 * r;
        const int column = i / 4 * 8 + lane % 4 * 2;
        const bool inside = i < 8 * BLOCK;    // of the triangle, whichever the lane
        const float x = inside || column <= t ? d[i] - mean[r] : 0.0f;
        const float y = inside || column + 1 <= t ? d[i + 1] - mean[r] : 0.0f;
        const uint32_t pair = mn_bf16x2(x, y), byte = mn_swizzle_byte(64, t, column);
        *(uint32_t *)(to + byte) = pair;
        if (low) {
            *(uint32_t *)(low + byte) = mn_bf16x2(x - mn_curve_low(pair), y - mn_curve_high(pair));
        }
    }
}

/* ---- results --------------------------------------------------------------------------------- */

/* An 8 x 8 matrix spread over the warp, transposed. */
__device__ inline uint32_t mn_curve80_movmatrix(uint32_t pair) {
    uint32_t turned;
    asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(turned) : "r"(pair));
    return turned;
}

/* Turned pairs of 16 tokens from `first` on, 16 columns of a warp, to the warp's own columns of a
 * tile. */
__device__ inline void mn_curve80_put_turned(unsigned char *tile, const uint32_t (&x)[4],
                                             int first) {
    const int lane = threadIdx.x % 32, column0 = threadIdx.x / 32 * 16;
    __syncwarp();    // all of it have read these columns
#pragma unroll
    for (int i = 0; i < 4; i++) {
        *(uint32_t *)(tile + mn_swizzle_byte(64, first + i / 2 * 8 + lane / 4,
                                             column0 + i % 2 * 8 + lane % 4 * 2)) =
            mn_curve80_movmatrix(x[i]);
    }
}

/* The warp's own columns of a tile to rows of chunk `start`, of which `count` are there, if there
 * are any. */
__device__ inline void mn_curve80_store(const unsigned char *tile, mn_curve80_rows to, int start,
                                        int count, int K) {
    const int lane = threadIdx.x % 32, row = lane / 2;
    const int column = threadIdx.x / 32 * 16 + lane % 2 * 8;
    const int left = to.at && column < K ? count - row : 0;
    mn_bf16 *at = to.at + (int64_t)(start + row) * to.stride + column;
    const unsigned char *from = tile + mn_swizzle_byte(64, row, column);
    __syncwarp();
#pragma unroll
    for (int i = 0; i < MN_CURVE_CHUNK; i += 16, at += 16 * to.stride) {
        if (i < left) *(uint4 *)at = *(const uint4 *)(from + i * 128);
    }
}

/* ---- in the order of time -------------------------------------------------------------------- */

/* `x` is what is read through R: q, or going back the cotangents of results. Rows 64 and 65 of
 * a tile of keys are s in front of the chunk, rounded, and what that leaves, so that scores bring
 * s.x with them. */
template <int KP>
struct alignas(128) mn_curve80_smem {
    unsigned char k[2][KP / 64 * MN_CURVE_ROWS * 128];
    unsigned char x[2][KP / 64 * MN_CURVE_SQUARE];
    unsigned char P[MN_CURVE_SQUARE];
    float2 weight[MN_CURVE_CHUNK];    // -gamma / n and the mean
    mn_curve80_views views;
};

/* And q, what rounding leaves of P, and y.q of tokens by warps. */
template <int KP>
struct mn_curve80_queries_smem : mn_curve80_smem<KP> {
    alignas(128) unsigned char q[2][KP / 64 * MN_CURVE_SQUARE];
    unsigned char low[MN_CURVE_SQUARE];
    float parts[KP / 16][MN_CURVE_CHUNK], mean[MN_CURVE_CHUNK];    // mean: of q
};

/* 1 / n of the two tokens whose scores a lane makes, rows l / 4 of its warp's block and that plus
 * 8; the chunk's first is behind `seen` others. */
__device__ inline void mn_curve80_each(float (&each)[2], int64_t seen) {
    const int row = threadIdx.x % MN_WARPGROUP / 32 * 16 + threadIdx.x % 32 / 4;
#pragma unroll
    for (int r = 0; r < 2; r++) each[r] = 1.0f / (float)(seen + row + 8 * r + 1);
}

/* gamma of a chunk's tokens, by the thread that has each: of warps without scores if there are
 * such. As it comes until it is used, so that nobody waits for it. */
template <int KP>
struct mn_curve80_gamma {
    mn_bf16 raw;

    __device__ static int token() { return (int)threadIdx.x - (KP > 64 ? MN_WARPGROUP : 0); }
    __device__ static bool has() { return token() >= 0 && token() < MN_CURVE_CHUNK; }

    __device__ void ask(mn_curve80_rows from, int start, int count) {
        raw = __float2bfloat16_rn(0.0f);
        if (has() && token() < count) raw = from.at[(int64_t)(start + token()) * from.stride];
    }

    /* -gamma / n */
    __device__ float factor(int64_t seen) const {
        return -mn_float(raw) * (1.0f / (float)(seen + token() + 1));
    }
};

/* The warp's part of s to rows 64 and 65 of a tile of keys. */
__device__ inline void mn_curve80_put_vector(unsigned char *k, const float (&s)[2]) {
    const int lane = threadIdx.x % 32, row = threadIdx.x / 32 * 16 + lane / 4;
    if (lane % 4 > 1) return;
#pragma unroll
    for (int r = 0; r < 2; r++) {
        const mn_bf16 high = __float2bfloat16_rn(s[r]);
        *(mn_bf16 *)(k + mn_swizzle_byte(MN_CURVE_ROWS, 64 + lane % 4, row + 8 * r)) =
            lane % 4 == 0 ? high : __float2bfloat16_rn(s[r] - __bfloat162float(high));
    }
}

/* The first loads of a block: R and s in front of the segment, zeros behind s. */
template <int KP>
__device__ inline void mn_curve80_begin(mn_curve80_smem<KP> &smem, float (&R)[KP / 2],
                                        float (&s)[2], const mn_curvature_args &p,
                                        const mn_curve_place &at, const float *states) {
    const int64_t K = p.call.K;
    const float *sums =
        at.s.first > 0 ? mn_curve_sums_for(states, p.call, at, at.s.slot - 1) : NULL;
    const float *vector = sums ? sums + K * K : mn_row<float>(p.ks0, at.s.n, 0, at.h);
    mn_curve_load(R, mn_row<float>(p.kk0, at.s.n, 0, at.h), sums, 0.5f, K,
                  threadIdx.x / MN_WARPGROUP * 64);
#pragma unroll
    for (int r = 0; r < 2; r++) {
        const int j = threadIdx.x / 32 * 16 + threadIdx.x % 32 / 4 + 8 * r;
        s[r] = j < K ? mn_get(vector, j) : 0.0f;
    }
    for (int n = threadIdx.x; n < 2 * (KP / 64) * 48; n += mn_curve80_threads<KP>) {
        const int tile = n / 48 % (KP / 64);
        *(uint4 *)(smem.k[n / 48 / (KP / 64)] + (tile * MN_CURVE_ROWS + 66) * 128 + n % 48 * 16) =
            make_uint4(0, 0, 0, 0);
    }
}

/* What mn_curve80_take_keys left out of Y and R. A call of its own, on copies, so that it does not
 * ask for registers of what comes here without it. */
template <int KP>
__device__ __noinline__ void mn_curve80_see_wild_call(float (&Y)[32], float (&R)[KP / 2],
                                                      const unsigned char *keys,
                                                      const unsigned char *P) {
    uint32_t all[16];
    mn_curve_left<MN_CURVE_ROWS>(all, keys, threadIdx.x / 32 * 16);
    mn_curve_add_wild<MN_SEES_EARLIER>(Y, all, P);
    mn_curve_wild_rows(R, all);
}

template <int KP>
__device__ __forceinline__ void mn_curve80_see_wild(float (&Y)[32], float (&R)[KP / 2],
                                                    const unsigned char *keys,
                                                    const unsigned char *P) {
    float own_Y[32], own_R[KP / 2];
#pragma unroll
    for (int i = 0; i < 32; i++) own_Y[i] = Y[i];
#pragma unroll
    for (int i = 0; i < KP / 2; i++) own_R[i] = R[i];
    mn_curve80_see_wild_call<KP>(own_Y, own_R, keys, P);
#pragma unroll
    for (int i = 0; i < 32; i++) Y[i] = own_Y[i];
#pragma unroll
    for (int i = 0; i < KP / 2; i++) R[i] = own_R[i];
}

/* Y += what tokens see of keys of their own chunk, by scores P and, if given, their rest; R and s
 * behind the chunk. Keys pass 16 tokens at a time, as registers are short, and are looked at first:
 * of numbers that are not finite see mn_curve_tame. */
template <int KP>
__device__ inline void mn_curve80_take_keys(float (&Y)[32], float (&R)[KP / 2], float (&s)[2],
                                            const unsigned char *keys, const unsigned char *P,
                                            const unsigned char *low) {
    const int column = threadIdx.x / 32 * 16;
    float sum[4] = {};
    uint32_t watch = 0, x[4];
#pragma unroll
    for (int step = 0; step < 4; step++) {
        mn_curve80_left<MN_CURVE_ROWS>(x, keys, column, step);
        mn_curve80_add_ones(sum, x);
#pragma unroll
        for (int i = 0; i < 4; i++) watch = mn_bf16x2_watch(x[i], watch);
    }
    const bool wild = __any_sync(0xffffffffu, watch & 0x7fff7fffu);
#pragma unroll
    for (int step = 0; step < 4; step++) {
        mn_curve80_left<MN_CURVE_ROWS>(x, keys, column, step);
#pragma unroll
        for (int i = 0; i < 4 && wild; i++) x[i] &= ~mn_bf16x2_wild(x[i]);
        mn_curve80_see_earlier(Y, x, P, step);
        mn_warp_ab<16, KP, MN_CURVE_ROWS>(R, x, mn_curve80_address(keys), 16 * step);
    }
#pragma unroll
    for (int step = 0; step < 4 && low; step++) {
        mn_curve80_left<MN_CURVE_ROWS>(x, keys, column, step);
#pragma unroll
        for (int i = 0; i < 4 && wild; i++) x[i] &= ~mn_bf16x2_wild(x[i]);
        mn_curve80_see_earlier(Y, x, low, step);
    }
    if (wild) mn_curve80_see_wild<KP>(Y, R, keys, P);
    s[0] += sum[0], s[1] += sum[2];
}

/* ---- calls ----------------------------------------------------------------------------------- */

inline bool mn_curve80_serves(const mn_curvature_args *p, size_t smem) {
    const mn_device_props props = mn_device_props_current();
    return mn_curve80_taken && mn_curve_group_takes(p) && props.major >= 8 &&
           smem <= (size_t)props.shared_bytes && !mn_device_is_sm90();
}

/* Segments as the tiles' of any machine, with all columns in one block. */
inline mn_curve_cut mn_curve80_cut(const mn_curvature_args *p) {
    mn_curve_cut cut = mn_curve_smem_tile_cut<mn_bf16>(p);
    cut.slices = cut.n_parts = 1;
    return cut;
}

/* R and s in front of all segments (mn_curve_add_up), if a sequence can have more than one. */
int mn_curve_sums_sm80(const mn_curvature_args *p, float *states, cudaStream_t on);

/* Each returns whether it serves a call, and what the launch returned in `code`. */
bool mn_curve_forward_sm80(int *code, const mn_curvature_args *p, float *states, cudaStream_t on);
bool mn_curve_backward_sm80(int *code, const mn_curvature_args *p, const mn_curve_work &w,
                            cudaStream_t on);

}    // namespace mneme::curvature

#endif
