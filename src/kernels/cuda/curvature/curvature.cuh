/* curvature.cuh - how calls of curvature are cut, for all of its kernels. Definition and gradients
 * in ref/curvature.c, chunk form in cpu/curvature/curvature.c:
 *
 *   Y = Q R + tril(Q K' - m) K - m s'     m_t = s_t.q_t / n_t     qt_t = q_t - gamma_t / n_t y_t
 *
 * s_t.q_t is s.q_t and row t of tril(Q K') summed up, so the mean costs no product of its own.
 * Backward goes there with dQt in place of Q, and back with Z = diag(-gamma / n) dQt and the
 * symmetric G = D + D':
 *
 *   dK = K G + tril(Q K' - m)'Z + tril(Z K' - mz)'Q + e      G <- G + Z'Q + Q'Z
 *
 * A block has 64 columns of R of one head. Long sequences are cut into segments, so that few of
 * them fill the GPU too: one kernel sums what each adds to R and s (or G and e), a second one adds
 * these up in their order, and the main kernels start every segment from there. The first segment
 * starts from the caller's state.
 *
 * curvature_smem.cuh has the products of blocks for any type and machine, curvature_sm90.cuh
 * those of Hopper for bf16 and keys of up to 128. */
#ifndef MN_KERNELS_CUDA_CURVATURE_CURVATURE_CUH
#define MN_KERNELS_CUDA_CURVATURE_CURVATURE_CUH

#include "kernels/cuda/prim/common.cuh"
#include "kernels/cuda/prim/sync.cuh"
#include "kernels/cuda/prim/wild.cuh"

namespace mneme::curvature {

/* Products of tiles in shared memory by warps: bf16 on tensor cores, float32 in fused
 * multiply-adds, with sums in float32 that lie in registers alike in both.
 *
 * A warp has tiles of 16 rows and 8 columns: lane l holds rows l / 4 and l / 4 + 8, columns 2 (l
 * % 4) and its neighbour. Tiles have a row pitch of MN_SMEM_TILE_PAD more elements than columns,
 * so that what a warp reads together lies in different banks. */

enum { MN_SMEM_TILE_PAD = 8 };

/* How the factor A (16, depth) or B (depth, columns) lies: as it is, or with its axes exchanged. */
enum mn_mma_trans { MN_NO_TRANS, MN_TRANS };

/* N tiles side by side */
template <int N>
struct mn_tile_acc {
    float at[N][4];

    __device__ void clear() {
#pragma unroll
        for (int n = 0; n < N; n++) {
#pragma unroll
            for (int i = 0; i < 4; i++) at[n][i] = 0.0f;
        }
    }

    /* use(number, row, column) for what this lane holds */
    template <typename F>
    __device__ void each(F use) {
        const int lane = threadIdx.x % 32;
#pragma unroll
        for (int n = 0; n < N; n++) {
#pragma unroll
            for (int i = 0; i < 4; i++) {
                use(at[n][i], lane / 4 + i / 2 * 8, 8 * n + 2 * (lane % 4) + i % 2);
            }
        }
    }

    /* use(pair of neighbours, row, column of the first) */
    template <typename F>
    __device__ void pairs(F use) {
        const int lane = threadIdx.x % 32;
#pragma unroll
        for (int n = 0; n < N; n++) {
#pragma unroll
            for (int i = 0; i < 2; i++) {
                use(at[n] + 2 * i, lane / 4 + 8 * i, 8 * n + 2 * (lane % 4));
            }
        }
    }
};

/* Four matrices of 8 x 8, of which each lane gives a row; TURNS exchanges their axes. */
template <bool TURNS>
__device__ inline void mn_ldmatrix_x4(unsigned (&to)[4], const mn_bf16 *at) {
    const unsigned address = (unsigned)__cvta_generic_to_shared(at);
    if (!TURNS) {
        asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                     : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3])
                     : "r"(address) : "memory");
    } else {
        asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                     : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3])
                     : "r"(address) : "memory");
    }
}

__device__ inline void mn_mma_m16n8k16(float (&sum)[4], const unsigned (&a)[4], unsigned b0,
                                       unsigned b1) {
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, "
                 "{%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
                 : "+f"(sum[0]), "+f"(sum[1]), "+f"(sum[2]), "+f"(sum[3])
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

/* sum += A B. A plain is a[row * lda + i], turned a[i * lda + row]; B plain is b[i * ldb + column],
 * turned b[column * ldb + i]. `depth` is a multiple of 16, N even; rows start at 16 bytes. */
template <mn_mma_trans A, mn_mma_trans B, int N>
__device__ inline void mn_smem_tile_mma(mn_tile_acc<N> &sum, const mn_bf16 *a, int lda,
                                        const mn_bf16 *b, int ldb, int depth) {
    static_assert(N % 2 == 0, "columns come in pairs of tiles");
    const int lane = threadIdx.x % 32, low = lane % 8, middle = lane / 8 % 2 * 8;
    const int high = lane / 16 * 8;
    a += A == MN_NO_TRANS ? (low + middle) * lda + high : (low + high) * lda + middle;
    b += B == MN_NO_TRANS ? (low + middle) * ldb + high : (low + high) * ldb + middle;
    for (int i = 0; i < depth; i += 16) {
        unsigned from_a[4];
        mn_ldmatrix_x4<A == MN_TRANS>(from_a, a + (A == MN_NO_TRANS ? i : i * lda));
#pragma unroll
        for (int n = 0; n < N; n += 2) {
            unsigned from_b[4];
            mn_ldmatrix_x4<B == MN_NO_TRANS>(from_b, b + (B == MN_NO_TRANS ? i * ldb + 8 * n
                                                                  : 8 * n * ldb + i));
            mn_mma_m16n8k16(sum.at[n], from_a, from_b[0], from_b[1]);
            mn_mma_m16n8k16(sum.at[n + 1], from_a, from_b[2], from_b[3]);
        }
    }
}

template <mn_mma_trans A, mn_mma_trans B, int N>
__device__ inline void mn_smem_tile_mma(mn_tile_acc<N> &sum, const float *a, int lda,
                                        const float *b, int ldb, int depth) {
    const int row = threadIdx.x % 32 / 4, column = 2 * (threadIdx.x % 4);
    a += A == MN_NO_TRANS ? row * lda : row;
    b += B == MN_NO_TRANS ? column : column * ldb;
    const int step_a = A == MN_NO_TRANS ? 1 : lda, step_b = B == MN_NO_TRANS ? 1 : ldb;
    const int next_a = A == MN_NO_TRANS ? lda : 1, next_b = B == MN_NO_TRANS ? ldb : 1;
#pragma unroll 4
    for (int i = 0; i < depth; i++) {
        const float upper = a[i * step_a], lower = a[i * step_a + 8 * next_a];
#pragma unroll
        for (int n = 0; n < N; n++) {
            const float *at = b + i * next_b + 8 * n * step_b;
            const float left = at[0], right = at[step_b];
            sum.at[n][0] = fmaf(upper, left, sum.at[n][0]);
            sum.at[n][1] = fmaf(upper, right, sum.at[n][1]);
            sum.at[n][2] = fmaf(lower, left, sum.at[n][2]);
            sum.at[n][3] = fmaf(lower, right, sum.at[n][3]);
        }
    }
}

/* Of a product of 16 tokens with as many, which rows take part in which depth: those that are not
 * before it, or not behind it. */
enum mn_tile_sees { MN_SEES_EARLIER, MN_SEES_LATER };

template <mn_tile_sees SEES>
__device__ inline bool mn_tile_row_sees(int row, int depth) {
    return SEES == MN_SEES_EARLIER ? depth <= row : depth >= row;
}

/* sum += A B over the 16 rows' own depth, where A is 0 beyond what SEES: numbers of B that are not
 * finite go into rows that see them only. B plain, columns in pairs of tiles. */
template <mn_mma_trans A, mn_tile_sees SEES, int N>
__device__ inline void mn_smem_tile_mma_causal(mn_tile_acc<N> &sum, const mn_bf16 *a, int lda,
                                               const mn_bf16 *b, int ldb) {
    const int lane = threadIdx.x % 32, low = lane % 8, middle = lane / 8 % 2 * 8;
    const int high = lane / 16 * 8;
    unsigned from_a[4], from_b[N / 2][4], watch = 0;
    mn_ldmatrix_x4<A == MN_TRANS>(from_a, a + (A == MN_NO_TRANS ? (low + middle) * lda + high
                                                                : (low + high) * lda + middle));
#pragma unroll
    for (int n = 0; n < N; n += 2) {
        mn_ldmatrix_x4<true>(from_b[n / 2], b + (low + middle) * ldb + high + 8 * n);
#pragma unroll
        for (int i = 0; i < 4; i++) watch = mn_bf16x2_watch(from_b[n / 2][i], watch);
    }
    const bool wild = __any_sync(0xffffffffu, watch & 0x7fff7fffu);
#pragma unroll
    for (int n = 0; n < N; n += 2) {
        unsigned(&x)[4] = from_b[n / 2];
#pragma unroll
        for (int i = 0; i < 4 && wild; i++) x[i] &= ~mn_bf16x2_wild(x[i]);
        mn_mma_m16n8k16(sum.at[n], from_a, x[0], x[1]);
        mn_mma_m16n8k16(sum.at[n + 1], from_a, x[2], x[3]);
    }
#pragma unroll 1
    for (int depth = 0; wild && depth < 16; depth++) {
#pragma unroll
        for (int n = 0; n < N; n += 2) {
            unsigned x[4];
            float own[2][4] = {};
            mn_ldmatrix_x4<true>(x, b + (low + middle) * ldb + high + 8 * n);
#pragma unroll
            for (int i = 0; i < 4; i++) {
                const int at = i % 2 * 8 + lane % 4 * 2;    // of the lower half
                const unsigned half = at == depth ? 0xffffu : at + 1 == depth ? 0xffff0000u : 0u;
                x[i] &= mn_bf16x2_wild(x[i]) & half;
            }
            mn_mma_m16n8k16(own[0], from_a, x[0], x[1]);
            mn_mma_m16n8k16(own[1], from_a, x[2], x[3]);
#pragma unroll
            for (int i = 0; i < 8; i++) {
                const bool sees = mn_tile_row_sees<SEES>(lane / 4 + i % 4 / 2 * 8, depth);
                if (sees && mn_is_wild(own[i / 4][i % 4])) {
                    sum.at[n + i / 4][i % 4] += own[i / 4][i % 4];
                }
            }
        }
    }
}

template <mn_mma_trans A, mn_tile_sees SEES, int N>
__device__ inline void mn_smem_tile_mma_causal(mn_tile_acc<N> &sum, const float *a, int lda,
                                               const float *b, int ldb) {
    const int row = threadIdx.x % 32 / 4, column = 2 * (threadIdx.x % 4);
    const int step_a = A == MN_NO_TRANS ? 1 : lda, next_a = A == MN_NO_TRANS ? lda : 1;
#pragma unroll 4
    for (int i = 0; i < 16; i++) {
        const float upper = a[row * next_a + i * step_a];
        const float lower = a[(row + 8) * next_a + i * step_a];
#pragma unroll
        for (int n = 0; n < N; n++) {
            const float *at = b + i * ldb + column + 8 * n;
            if (mn_tile_row_sees<SEES>(row, i)) {
                sum.at[n][0] = fmaf(upper, at[0], sum.at[n][0]);
                sum.at[n][1] = fmaf(upper, at[1], sum.at[n][1]);
            }
            if (mn_tile_row_sees<SEES>(row + 8, i)) {
                sum.at[n][2] = fmaf(lower, at[0], sum.at[n][2]);
                sum.at[n][3] = fmaf(lower, at[1], sum.at[n][3]);
            }
        }
    }
}

/* Two neighbours at once; `to` is even. */
__device__ inline void mn_store2(mn_bf16 *to, float x, float y) {
    *(__nv_bfloat162 *)to = __floats2bfloat162_rn(x, y);
}

__device__ inline void mn_store2(float *to, float x, float y) {
    *(float2 *)to = make_float2(x, y);
}

__device__ inline float2 mn_load2(const mn_bf16 *from) {
    return __bfloat1622float2(*(const __nv_bfloat162 *)from);
}

__device__ inline float2 mn_load2(const float *from) {
    return *(const float2 *)from;
}

/* Columns j, which is even, and the next of a row of `width` numbers in memory. */
template <typename T>
__device__ inline void mn_row_store2(T *row, int64_t j, int64_t width, float x, float y) {
    T *to = row + j;
    if (j + 1 < width && (uintptr_t)to % (2 * sizeof(T)) == 0) {
        mn_store2(to, x, y);
        return;
    }
    if (j < width) mn_put(to, x);
    if (j + 1 < width) mn_put(to + 1, y);
}

/* Asks for rows [0, count) of a view from token t on, which are loaded later. */
template <typename T>
__device__ inline void mn_smem_tile_prefetch(const mn_in &view, const mn_span &span, int64_t h,
                                             int64_t t, int count, int64_t width) {
    constexpr int line = 128 / (int)sizeof(T);
    const int lines = ((int)width + line - 1) / line;
    const T *from = mn_row<T>(view, span.b, span.t0 + t, h);
    for (int at = threadIdx.x; from && at < count * lines; at += blockDim.x) {
        mn_prefetch_l1(from + at / lines * view.stride[1] + at % lines * line);
    }
}

/* Rows [0, count) of a view from token t on into rows of `ld`, `width` numbers and zeros up to
 * `padded`, zeros in rows up to `rows`. `packs` where mn_smem_tile_vec_ok allows them. */
template <typename T>
__device__ inline void mn_smem_tile_load(T *to, int ld, int rows, int padded, const mn_in &view,
                                      const mn_span &span, int64_t h, int64_t t, int count,
                                      int64_t width, bool vec_ok) {
    constexpr int N = 16 / (int)sizeof(T);
    const T *from = mn_row<T>(view, span.b, span.t0 + t, h);
    const int64_t step = view.stride[1];
    if (vec_ok) {
        for (int at = threadIdx.x; at < rows * (padded / N); at += blockDim.x) {
            const int token = at / (padded / N), i = at % (padded / N) * N;
            mn_vec<T, N> vec = {};
            if (from && token < count && i < width) {
                vec = *(const mn_vec<T, N> *)(from + token * step + i);
            }
            *(mn_vec<T, N> *)(to + token * ld + i) = vec;
        }
        return;
    }
    for (int at = threadIdx.x; at < rows * padded; at += blockDim.x) {
        const int token = at / padded, i = at % padded;
        T x = (T)0.0f;
        if (from && token < count && i < width) x = from[token * step + i];
        to[token * ld + i] = x;
    }
}

/* Whether all rows of a view start at 16 bytes and are whole packs. */
template <typename T>
inline bool mn_smem_tile_vec_ok(const mn_in &view, int64_t width) {
    bool aligned = mn_vec_aligned<T>(view.data, 0) && width % mn_vec_width<T>() == 0;
    for (int i = 0; i < 3; i++) aligned = aligned && mn_vec_aligned<T>(NULL, view.stride[i]);
    return !view.data || aligned;
}

enum { MN_CURVE_SEGMENT = 512, MN_CURVE_SLICE = 64, MN_CURVE_WIDEST = 256 };

/* Tokens of a segment, slices of R; whether rows come in packs; parts of y.q for each token. */
struct mn_curve_cut {
    int64_t segment;
    int slices, n_parts;
    bool packs;
};

/* Work space: sums of segments there and back; s_t.q_t / n_t and s_t.d_t / n_t of every token; the
 * parts of -n dgamma that slices have. */
struct mn_curve_work {
    float *there, *back, *means, *parts;
};

/* Part of a sequence. */
struct mn_curve_segment {
    int64_t n, first, slot;
    int rows;
    mn_span span;
    bool there, last;    // a packed call has slots without a segment
};

/* A block's work: columns [column0, column0 + MN_CURVE_SLICE) of head h of a segment. */
struct mn_curve_place {
    mn_curve_segment s;
    int64_t h;
    int slice, column0;
};

__host__ __device__ inline int64_t mn_curve_slots(const mn_call &call, int64_t segment) {
    if (call.cu_seqlens) return call.T / segment + call.n_seqs;
    return call.B * max((call.T + segment - 1) / segment, (int64_t)1);
}

__device__ inline mn_curve_segment mn_curve_segment_at(const mn_call &call, int64_t segment,
                                                       int64_t slot) {
    mn_curve_segment s;
    s.slot = slot;
    if (call.cu_seqlens || call.T > 0) {
        const mn_tile_span tile = mn_tile_at(call, segment, slot);
        s.n = tile.n, s.first = tile.first, s.rows = (int)tile.n_rows, s.span = tile.span;
    } else {
        s.n = slot, s.first = 0, s.rows = 0, s.span = mn_span_at(call, slot);
    }
    s.there = s.rows > 0 || s.first == 0;
    s.last = s.there && s.first + s.rows == s.span.length;
    return s;
}

__device__ inline mn_curve_place mn_curve_place_of(const mn_call &call, const mn_curve_cut &cut) {
    mn_curve_place at;
    at.slice = (int)(blockIdx.x % cut.slices);
    at.column0 = at.slice * MN_CURVE_SLICE;
    at.h = blockIdx.x / cut.slices % call.H;
    at.s = mn_curve_segment_at(call, cut.segment, blockIdx.x / cut.slices / call.H);
    return at;
}

/* Where a segment's sums lie: K rows and one more for the vector. */
__host__ __device__ inline int64_t mn_curve_state_size(int64_t K) {
    return (K + 1) * K;
}

/* The sums that the scan left for a segment: behind the one before it. */
__device__ inline const float *mn_curve_sums_for(const float *states, const mn_call &call,
                                                 const mn_curve_place &at, int64_t slot) {
    return states + (slot * call.H + at.h) * mn_curve_state_size(call.K);
}

__device__ inline double mn_curve_before(const mn_curvature_args &p, int64_t n) {
    return (double)(p.counts0 ? p.counts0[n] : p.n0);
}

/* Number of token t of a segment's sequence among all rows, those of a head together. */
__device__ inline int64_t mn_curve_row_of(const mn_call &call, const mn_curve_place &at,
                                          int64_t t) {
    return (at.h * call.B + at.s.span.b) * call.T + at.s.span.t0 + t;
}

/* What storing x as T rounds away. */
template <typename T>
__device__ inline float mn_curve_rest(float x) {
    T stored;
    mn_put(&stored, x);
    return x - mn_float(stored);
}

/* ---- launches -------------------------------------------------------------------------------- */

inline int mn_curve_slices(int64_t K) {
    return K <= 64 ? 1 : K <= 128 ? 2 : 4;
}

/* Floats of the sums of all segments, however long these are. */
inline bool mn_curve_states_size(size_t *count, const mn_call *c) {
    const size_t slots = (size_t)mn_curve_slots(*c, MN_CURVE_SEGMENT);
    size_t heads;
    return mn_mul_size(&heads, slots, (size_t)c->H) &&
           mn_mul_size(count, (size_t)c->K + 1, (size_t)c->K) && mn_mul_size(count, *count, heads);
}

inline bool mn_curve_tokens_size(size_t *count, const mn_call *c) {
    return mn_mul_size(count, (size_t)c->B, (size_t)c->T) &&
           mn_mul_size(count, *count, (size_t)c->H);
}

/* Starts a kernel that takes `cut` last, with a block for each slice of each head of a segment. */
template <typename... Arguments, typename... Given>
inline int mn_curve_start(void (*kernel)(Arguments...), int threads, size_t smem, const mn_call &c,
                          const mn_curve_cut &cut, cudaStream_t on, const Given &...given) {
    const int64_t blocks = mn_curve_slots(c, cut.segment) * c.H * cut.slices;
    if (blocks > INT32_MAX) return cudaErrorNotSupported;
    return mn_launch_smem(kernel, dim3((unsigned)blocks), threads, smem, on, given..., cut);
}

}    // namespace mneme::curvature

#endif
