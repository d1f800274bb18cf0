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

#include "kernels/cuda/prim/smem_gemm.cuh"

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
inline int mn_curve_start(void (*kernel)(Arguments...), int threads, size_t room, const mn_call &c,
                          const mn_curve_cut &cut, cudaStream_t on, const Given &...given) {
    const int64_t blocks = mn_curve_slots(c, cut.segment) * c.H * cut.slices;
    if (blocks > INT32_MAX) return cudaErrorNotSupported;
    return mn_launch_smem(kernel, dim3((unsigned)blocks), threads, room, on, given..., cut);
}

#endif
