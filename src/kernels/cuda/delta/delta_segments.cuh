/* delta_segments.cuh - long sequences with few heads: delta's scans over segments at once.
 *
 * What a segment makes of a state is an affine map, S <- M S + N, and of the gradient of its last
 * state D <- M'D + N'. Three launches make a scan of `count` segments:
 *
 *   first     the scan itself of the segment with which it begins, whose state is known; beside it
 *             the maps of those between it and the last: N is a scan from zeros, M of the unit
 *             matrix without values
 *   states    delta_segment_states: the state in front of each segment, one after the other
 *   rest      the scan itself of all other segments
 *
 * This is the composition of ranks/sequence.h, with segments for ranks. M is made once, going back
 * too, where launches of the scan back may run beside those of the scan that saves states. Whether
 * a sequence is cut, and where, depends on its own length and the widths alone, so that its results
 * have the same bits beside others; whoever has many long sequences in a call pays for maps that
 * one sequence needs to fill a GPU. */
#ifndef MN_KERNELS_CUDA_DELTA_DELTA_SEGMENTS_CUH
#define MN_KERNELS_CUDA_DELTA_DELTA_SEGMENTS_CUH

#include "kernels/cuda/delta/delta_state_scan.cuh"
#include "kernels/cuda/prim/first_wild.cuh"
#include "kernels/cuda/prim/mma_tf32.cuh"

namespace mneme::delta {

/* A segmented scan lasts as long as 1 + 1 of `count` segments, instead of as long as all, and takes
 * `count` + (count - 2) (1 + K / V) segments' work. So the blocks of a sequence in the launches
 * `first` and `rest` are to fill a GPU once, and a sequence is to be so long that a call hardly has
 * as many of them. */
enum {
    MN_DELTA_SEGMENT_BLOCKS = 128,    // of all segments behind the first
    MN_DELTA_SEGMENT_BESIDE = 264,    // of the launches `first` of both scans at once
    MN_DELTA_MOST_SEGMENTS = 17,
    MN_DELTA_SEGMENT_LEAST = 8192,    // tokens of a sequence that is cut
    MN_DELTA_SEGMENT_TOKENS = 512,    // and for each block that it has without segments
    MN_DELTA_STATES_COLUMNS = 16,     // value columns of a block
    MN_DELTA_STATES_THREADS = 256,
};

/* `beside`: both scans run at once, two blocks a processor, and the launches with which they begin
 * have for each block of a sequence 1 + 1 of first segments and 1 + 1 + 1 of maps of each other
 * one: what each adds, and M. Where these are more than a GPU holds at once, segments between are
 * half as long, so that two of them take as long as an end. Sequences of 64 blocks are left whole:
 * without maps each block of both scans has a processor of its own, where a chunk takes less than
 * four fifths of the time. */
inline mn_delta_segments mn_delta_segments_of(const mn_call &call, bool pairs, bool beside) {
    const int64_t blocks = call.H * mn_ceil_div(call.V, 64);
    mn_delta_segments segments = {};
    segments.count = segments.ends = 1;
    segments.least = mn_max(MN_DELTA_SEGMENT_LEAST, blocks * MN_DELTA_SEGMENT_TOKENS);
    const int64_t fill = beside ? 2 * blocks + 1 : 2 * blocks;
    if (pairs || blocks == 0 || call.K > 128 || fill > MN_DELTA_SEGMENT_BLOCKS ||
        call.T < segments.least) {
        return segments;
    }
    int64_t count = 1 + MN_DELTA_SEGMENT_BLOCKS / blocks;
    if (beside) count = mn_max(3, 2 + (MN_DELTA_SEGMENT_BESIDE / blocks - 2) / 3);
    if (beside && blocks * (3 * count - 4) > MN_DELTA_SEGMENT_BESIDE) segments.ends = 2;
    segments.count = (int)mn_min(count, MN_DELTA_MOST_SEGMENTS);
    return segments;
}

/* What a launch of a scan has blocks for, in the place of sequences: each sequence, as a whole or
 * where the scan of it begins; then `n` segments of all that may be cut, segment by segment. */
inline int64_t mn_delta_scan_units(const mn_call &call, const mn_delta_segments &segments, int n) {
    const bool all = segments.part == MN_DELTA_WHOLE || segments.part & MN_DELTA_SEGMENT_FIRST;
    const int64_t units = all ? mn_n_spans(call) : 0;
    if (segments.part == MN_DELTA_WHOLE) return units;
    return units + n * mn_scan_cut_sequences(call, segments);
}

/* States in front of a segment, transposed, those of the next in the other half; rows so long that
 * 16 bytes of eight lanes that have four rows of two columns each meet in no bank. */
template <int KP> struct mn_segment_states_smem {
    alignas(16) float S[2][MN_DELTA_STATES_COLUMNS][KP + 16];
};

/* The map of a segment whose M the states take; the scan back takes that of the scan forward. */
template <int KP>
__device__ inline const float *mn_segment_matrix_of(const mn_delta_params &job, int64_t n,
                                                    int64_t h, int segment) {
    return job.workspace.segment_matrices +
           (mn_scan_segment_map<KP>(job, n, h, segment) - job.workspace.segment_maps);
}

/* Numbers of float32 in two parts of tf32, of whose products all but that of the second parts are
 * added up: what is left out is a 2^-22 of a product. */
template <int N> struct mn_tf32_parts {
    unsigned high[N], low[N];

    __device__ void take(int i, float x) {
        high[i] = mn_tf32(x);
        low[i] = mn_tf32(x - __uint_as_float(high[i]));
    }
};

/* Of M (KP,KP) of a segment's map, or of M' where the states go BACK, a warp's 16 rows, and N of as
 * many states. Lane (g, t) has two rows, and of 16 columns those from 4 t on, which a product takes
 * two at a time. */
template <int KP, bool BACK> struct mn_segment_map_rows {
    static constexpr int steps = KP / 16;      // of 16 columns of M
    static constexpr int n_tiles = KP / 64;    // of 8 states a warp
    float M[steps][2][4], N[n_tiles][4];

    /* Row `half` of this lane's, the first of its states in tile n. */
    __device__ static int row(int half) {
        const int first = threadIdx.x / 32 % steps * 16, g = threadIdx.x % 32 / 4;
        return first + (BACK ? 2 * g + half : g + 8 * half);
    }

    __device__ static int column(int n) {
        return (threadIdx.x / 32 / steps * n_tiles + n) * 8 + threadIdx.x % 4 * 2;
    }

    __device__ void load_M(const float *matrix, int64_t pitch, int step) {
        const int j = 16 * step + threadIdx.x % 4 * 4;
        if (BACK) {
#pragma unroll
            for (int i = 0; i < 4; i++) {
                const float2 x = *(const float2 *)(matrix + (j + i) * pitch + row(0));
                M[step][0][i] = x.x, M[step][1][i] = x.y;
            }
        } else {
#pragma unroll
            for (int half = 0; half < 2; half++) {
                *(float4 *)M[step][half] = *(const float4 *)(matrix + row(half) * pitch + j);
            }
        }
    }

    __device__ void load_N(const float *map, int64_t pitch, int64_t column0) {
#pragma unroll
        for (int i = 0; i < 2 * n_tiles; i++) {
            *(float2 *)&N[i / 2][i % 2 * 2] = *(const float2 *)(map + row(i % 2) * pitch + column0 +
                                                                column(i / 2));
        }
    }

    /* sums += M S for 16 columns of M. */
    __device__ void add(float (&sums)[n_tiles][4], const mn_segment_states_smem<KP> &smem, int from,
                        int step) const {
        mn_tf32_parts<4> a[2];    // two products, 8 deep
#pragma unroll
        for (int i = 0; i < 8; i++) a[i % 4 / 2].take(i % 2 * 2 + i / 4, M[step][i / 4][i % 4]);
#pragma unroll
        for (int n = 0; n < n_tiles; n++) {
            const float4 S = *(const float4 *)&smem
                                  .S[from][column(n) - threadIdx.x % 4 * 2 + threadIdx.x % 32 / 4]
                                    [16 * step + threadIdx.x % 4 * 4];
            mn_tf32_parts<4> b;
            b.take(0, S.x), b.take(1, S.y), b.take(2, S.z), b.take(3, S.w);
#pragma unroll
            for (int k = 0; k < 2; k++) {
                mn_mma_tf32_k8(sums[n], a[k].low, b.high[2 * k], b.high[2 * k + 1]);
                mn_mma_tf32_k8(sums[n], a[k].high, b.low[2 * k], b.low[2 * k + 1]);
                mn_mma_tf32_k8(sums[n], a[k].high, b.high[2 * k], b.high[2 * k + 1]);
            }
        }
    }
};

/* What a block of delta_segment_states does. M and N of the next segment are asked for as those of
 * one have been taken. */
template <int KP, bool BACK>
__device__ inline void mn_segment_make_states(const mn_delta_params &job, int64_t n_slices) {
    extern __shared__ __align__(16) unsigned char states_smem_bytes[];
    using rows = mn_segment_map_rows<KP, BACK>;
    static_assert(KP == 64 || KP == 128, "rows of a warp");
    constexpr int step = BACK ? -1 : 1;
    mn_segment_states_smem<KP> &smem = *(mn_segment_states_smem<KP> *)states_smem_bytes;
    const mn_call &call = job.p.call;
    const int64_t h = blockIdx.x / n_slices % call.H;
    const int64_t n = mn_scan_cut_sequence(job, blockIdx.x / n_slices / call.H);
    if (n < 0) return;
    const int64_t pitch = job.padded_v + KP;
    const int64_t column0 = blockIdx.x % n_slices * MN_DELTA_STATES_COLUMNS;
    const mn_scan_cut cut = mn_scan_cut_of(job.segments, mn_span_at(call, n).length);
    const int tail = BACK ? 0 : cut.n - 1;
    int segment = BACK ? cut.n - 2 : 1, now = 0;
    if (cut.n < 3) return;
    const auto matrix = [&](int of) {
        return mn_segment_matrix_of<KP>(job, n, h, of) + pitch - KP;
    };
    /* use(number, place in shared memory, place in a state) for those of this lane that exist */
    const auto each = [&](float(&x)[rows::n_tiles][4], int to, float *state, auto use) {
#pragma unroll
        for (int i = 0; i < 4 * rows::n_tiles; i++) {
            const int k = rows::row(i % 4 / 2), c = rows::column(i / 4) + i % 2;
            const bool inside = k < call.K && column0 + c < call.V;
            use(x[i / 4][i % 4], smem.S[to][c][k],
                inside ? state + k * call.V + column0 + c : nullptr);
        }
    };
    rows map;
    float sums[rows::n_tiles][4];
#pragma unroll
    for (int i = 0; i < rows::steps; i++) map.load_M(matrix(segment), pitch, i);
    map.load_N(mn_scan_segment_map<KP>(job, n, h, segment), pitch, column0);
    each(sums, 0, mn_scan_segment_state(job, n, h, segment),
         [](float &, float &place, const float *state) { place = state ? *state : 0.0f; });
    __syncthreads();
    for (; segment != tail; segment += step, now ^= 1) {
        const bool more = segment + step != tail;
        const float *next = more ? matrix(segment + step) : nullptr;
#pragma unroll
        for (int i = 0; i < 4 * rows::n_tiles; i++) sums[i / 4][i % 4] = map.N[i / 4][i % 4];
#pragma unroll
        for (int i = 0; i < rows::steps; i++) {
            map.add(sums, smem, now, i);
            if (more) map.load_M(next, pitch, i);
        }
        if (more) {
            map.load_N(mn_scan_segment_map<KP>(job, n, h, segment + step), pitch, column0);
        }
        each(sums, now ^ 1, mn_scan_segment_state(job, n, h, segment + step),
             [](float &x, float &place, float *state) {
                 place = x;
                 if (state) *state = x;
             });
        __syncthreads();
    }
}

/* The states in front of segments, from that in front of the second in the scan's order.
 *
 * Grid: block = (i * H + h) * n_slices + slice, for the i-th sequence that may be cut, a slice
 * being 16 value columns of (K,V) states; a warp has 16 rows of all or half of them.
 * Loads   the state in front of the second segment (K, 16 columns), and of each segment between the
 *         first and the last N (K, 16 columns) and M (K,K).
 * Stores  the state in front of each later segment. Sums in float32, of products in tf32 in two
 *         parts.
 * May run beside the launch in front, for which the first block waits at its end. */
template <int KP, bool BACK>
__global__ void __launch_bounds__(MN_DELTA_STATES_THREADS)
    delta_segment_states(const __grid_constant__ mn_delta_params job, int64_t n_slices) {
    mn_pdl_launch_dependents();
    mn_segment_make_states<KP, BACK>(job, n_slices);
    if (blockIdx.x == 0) mn_pdl_wait();
}

/* `beside`: the launch in front makes nothing that this one reads. */
template <int KP, bool BACK>
inline int mn_delta_segment_states(const mn_delta_params &job, cudaStream_t stream,
                                   bool beside = false) {
    const int64_t n_slices = job.padded_v / MN_DELTA_STATES_COLUMNS;
    const int64_t blocks = n_slices * job.p.call.H *
                           mn_scan_cut_sequences(job.p.call, job.segments);
    if (blocks > INT32_MAX) return cudaErrorNotSupported;
    return mn_launch_smem_behind(beside, delta_segment_states<KP, BACK>, dim3((unsigned)blocks),
                                 MN_DELTA_STATES_THREADS, sizeof(mn_segment_states_smem<KP>),
                                 stream, job, n_slices);
}

}    // namespace mneme::delta

#endif
