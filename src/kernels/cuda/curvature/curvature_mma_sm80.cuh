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

/* 64 rows of a view from token t on, of which `count` and K columns are there, the others become
 * zeros from where nothing is read of `any`, to the top of a tile of ROWS; the block calls. A
 * thread has one vec16 of every 16th row. */
template <int KP, int ROWS>
__device__ inline void mn_curve80_load(unsigned char *tile, const mn_in &view, const mn_in &any,
                                       const mn_span &span, int64_t h, int64_t t, int count,
                                       int64_t K) {
    constexpr int vecs = KP / 8, step = mn_curve80_threads<KP> / vecs;
    const int vec = threadIdx.x % vecs, row0 = threadIdx.x / vecs;
    const mn_bf16 *from = mn_row<mn_bf16>(view, span.b, span.t0 + t, h);
    const uint32_t to = (uint32_t)__cvta_generic_to_shared(tile);
#pragma unroll
    for (int row = row0, i = 0; i < MN_CURVE_CHUNK / step; i++, row += step) {
        const bool inside = from && row < count && vec * 8 < K;
        const void *at = inside ? (const void *)(from + row * view.stride[1] + vec * 8) : any.data;
        mn_cp_async_16(to + mn_swizzle_byte(ROWS, row, vec * 8), at, inside);
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

/* Y += x P' of a left operand of 64 tokens, for scores of tokens (rows of P) with earlier ones. */
__device__ inline void mn_curve80_see_earlier(float (&Y)[32], const uint32_t (&x)[16],
                                              const unsigned char *P) {
    const int lane = threadIdx.x % 32;
    const uint32_t at = mn_curve80_address(P);
#pragma unroll
    for (int step = 0; step < 4; step++) {
#pragma unroll
        for (int n = 16 * step; n < MN_CURVE_CHUNK; n += 16) {
            uint32_t b[4];
            attention::mn_ldmatrix_x4<false>(
                b, at + mn_swizzle_byte(64, n + lane % 8 + lane / 16 * 8,
                                        16 * step + lane / 8 % 2 * 8));
            attention::mn_mma_m16n8k16(Y + n / 2, x + 4 * step, b[0], b[1]);
            attention::mn_mma_m16n8k16(Y + n / 2 + 4, x + 4 * step, b[2], b[3]);
        }
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

/* d = X K' of rows 16 `block` on of tile x, for tokens up to their own block's; where a tile of
 * keys has MN_CURVE_ROWS rows also for the eight behind them. */
template <int KP, int ROWS>
__device__ inline void mn_curve80_scores(float (&d)[36], const unsigned char *x,
                                         const unsigned char *k, int block) {
    const int lane = threadIdx.x % 32;
    const uint32_t at = mn_curve80_address(k);
    uint32_t more[4] = {};
#pragma unroll
    for (int i = 0; i < 36; i++) d[i] = 0.0f;
#pragma unroll
    for (int i = 0; i < KP; i += 16) {
        uint32_t a[4], b[4];
        mn_warp_frag_a<64>(a, mn_curve80_address(x), 16 * block, i);
#pragma unroll
        for (int n = 0; n < MN_CURVE_CHUNK; n += 16) {
            if (n > 16 * block) break;
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

/* ---- results --------------------------------------------------------------------------------- */

/* An 8 x 8 matrix spread over the warp, transposed. */
__device__ inline uint32_t mn_curve80_movmatrix(uint32_t pair) {
    uint32_t turned;
    asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(turned) : "r"(pair));
    return turned;
}

/* Turned pairs of tokens, 16 columns of a warp by 64 tokens, to the warp's own columns of a tile,
 * and from there to `count` rows of a view, if it is there. */
__device__ inline void mn_curve80_store(unsigned char *tile, const uint32_t (&x)[16],
                                        const mn_out &to, const mn_span &span, int64_t h,
                                        int64_t t, int count, int64_t K) {
    const int lane = threadIdx.x % 32, column0 = threadIdx.x / 32 * 16;
    mn_bf16 *rows = mn_row<mn_bf16>(to, span.b, span.t0 + t, h);
    if (!rows) return;
    __syncwarp();    // all of it have read these columns
#pragma unroll
    for (int i = 0; i < 16; i++) {
        *(uint32_t *)(tile + mn_swizzle_byte(64, i / 2 * 8 + lane / 4,
                                             column0 + i % 2 * 8 + lane % 4 * 2)) =
            mn_curve80_movmatrix(x[i]);
    }
    __syncwarp();
    const int column = column0 + lane % 2 * 8;
#pragma unroll
    for (int token = lane / 2; token < MN_CURVE_CHUNK; token += 16) {
        if (token >= count || column >= K) continue;
        *(uint4 *)(rows + token * to.stride[1] + column) =
            *(const uint4 *)(tile + mn_swizzle_byte(64, token, column));
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
    mn_curve_place place;             // here, as registers are short
};

/* And q, what rounding leaves of P, and y.q of tokens by warps. */
template <int KP>
struct mn_curve80_queries_smem : mn_curve80_smem<KP> {
    alignas(128) unsigned char q[2][KP / 64 * MN_CURVE_SQUARE];
    unsigned char low[MN_CURVE_SQUARE];
    float parts[KP / 16][MN_CURVE_CHUNK], mean[MN_CURVE_CHUNK];    // mean: of q
};

/* The block's place; all threads call. */
__device__ inline const mn_curve_place &mn_curve80_place(mn_curve_place &place,
                                                         const mn_call &call,
                                                         const mn_curve_cut &cut) {
    if (threadIdx.x == 0) place = mn_curve_place_of(call, cut);
    __syncthreads();
    return place;
}

/* What a lane keeps of the tokens whose scores it makes: rows l / 4 of its warp's block, and that
 * plus 8. */
struct mn_curve80_tokens {
    float gamma[2];    // of the chunk that comes next
    int row;

    __device__ void ask(const mn_curvature_args &p, const mn_curve_place &at, int start) {
        const int64_t t = at.s.span.t0 + at.s.first + start;
        const mn_bf16 *from = mn_row<mn_bf16>(p.gamma, at.s.span.b, t, at.h);
        row = threadIdx.x % MN_WARPGROUP / 32 * 16 + threadIdx.x % 32 / 4;
#pragma unroll
        for (int r = 0; r < 2; r++) {
            const int token = row + 8 * r;
            gamma[r] = start + token < at.s.rows ? mn_float(from[token * p.gamma.stride[1]]) : 0.0f;
        }
    }

    /* 1 / n of both, the first row of the chunk behind `seen` others */
    __device__ void each_of(float (&each)[2], int64_t seen) const {
#pragma unroll
        for (int r = 0; r < 2; r++) each[r] = 1.0f / (float)(seen + row + 8 * r + 1);
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

/* s += the keys of a chunk, which are a left operand. */
__device__ inline void mn_curve80_add_vector(float (&s)[2], const uint32_t (&k)[16]) {
    const uint32_t ones = 0x3f803f80u;
    float sum[4] = {};
#pragma unroll
    for (int step = 0; step < 4; step++) {
        attention::mn_mma_m16n8k16(sum, k + 4 * step, ones, ones);
    }
    s[0] += sum[0], s[1] += sum[2];
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

/* R and s behind a chunk, of whose keys `k` are the warp's columns, tamed if they were `wild`. */
template <int KP>
__device__ inline void mn_curve80_add(float (&R)[KP / 2], float (&s)[2], uint32_t (&k)[16],
                                      const unsigned char *keys, bool wild) {
    mn_warp_ab<MN_CURVE_CHUNK, KP, MN_CURVE_ROWS>(R, k, mn_curve80_address(keys), 0);
    if (wild) {
        mn_curve_left<MN_CURVE_ROWS>(k, keys, threadIdx.x / 32 * 16);
        mn_curve_wild_rows(R, k);
    }
    mn_curve80_add_vector(s, k);
}

/* Y += what tokens see of keys of their own chunk, by scores P and, if given, their rest. */
__device__ inline bool mn_curve80_see_keys(float (&Y)[32], uint32_t (&k)[16],
                                           const unsigned char *keys, const unsigned char *P,
                                           const unsigned char *low) {
    mn_curve_left<MN_CURVE_ROWS>(k, keys, threadIdx.x / 32 * 16);
    const bool wild = mn_curve_tame(k);
    mn_curve80_see_earlier(Y, k, P);
    if (low) mn_curve80_see_earlier(Y, k, low);
    if (wild) {
        mn_curve_left<MN_CURVE_ROWS>(k, keys, threadIdx.x / 32 * 16);
        mn_curve_add_wild<MN_SEES_EARLIER>(Y, k, P);
        mn_curve_tame(k);
    }
    return wild;
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

/* R and s in front of all segments (mn_curve_add_up), if there can be more than one of a sequence. */
int mn_curve_sums_sm80(const mn_curvature_args *p, float *states, cudaStream_t on);

/* Each returns whether it serves a call, and what the launch returned in `code`. */
bool mn_curve_forward_sm80(int *code, const mn_curvature_args *p, float *states, cudaStream_t on);
bool mn_curve_backward_sm80(int *code, const mn_curvature_args *p, const mn_curve_work &w,
                            cudaStream_t on);

}    // namespace mneme::curvature

#endif
