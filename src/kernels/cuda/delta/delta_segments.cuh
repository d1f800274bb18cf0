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

namespace mneme::delta {

/* A segmented scan lasts as long as 1 + 1 of `count` segments, instead of as long as all, and takes
 * `count` + (count - 2) (1 + K / V) segments' work. So the blocks of a sequence in the launches
 * `first` and `rest` are to fill a GPU once, and a sequence is to be so long that a call hardly has
 * as many of them. */
enum {
    MN_DELTA_SEGMENT_BLOCKS = 128,         // of all segments behind the first
    MN_DELTA_SEGMENT_BESIDE = 264,         // of the launches `first` of both scans at once
    MN_DELTA_MOST_SEGMENTS = 17,
    MN_DELTA_SEGMENT_LEAST = 8192,         // tokens of a sequence that is cut
    MN_DELTA_SEGMENT_TOKENS = 512,         // and for each block that it has without segments
    MN_DELTA_STATES_COLUMNS = 16,          // value columns of a block
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

template <int KP>
struct mn_segment_states_smem {
    alignas(16) float M[KP][KP + 4];
    alignas(16) float S[KP][MN_DELTA_STATES_COLUMNS];
};

/* The map of a segment whose M the states take; the scan back takes that of the scan forward. */
template <int KP>
__device__ inline const float *mn_segment_matrix_of(const mn_delta_params &job, int64_t n,
                                                    int64_t h, int segment) {
    return job.workspace.segment_matrices +
           (mn_scan_segment_map<KP>(job, n, h, segment) - job.workspace.segment_maps);
}

/* This thread's share of M (KP,KP) of a map, 16 bytes of every few rows, to registers, and from
 * there to shared memory. */
template <int KP>
struct mn_segment_matrix {
    static constexpr int packs = KP / 4, rows = MN_DELTA_STATES_THREADS / packs;
    float4 at[KP / rows];

    __device__ void load(const float *map, int64_t pitch) {
        const float *from = map + pitch - KP + threadIdx.x / packs * pitch +
                            threadIdx.x % packs * 4;
#pragma unroll
        for (int i = 0; i < KP / rows; i++) at[i] = *(const float4 *)(from + i * rows * pitch);
    }

    __device__ void store(float (&M)[KP][KP + 4]) const {
#pragma unroll
        for (int i = 0; i < KP / rows; i++) {
            *(float4 *)&M[threadIdx.x / packs + i * rows][threadIdx.x % packs * 4] = at[i];
        }
    }
};

/* sums += M S, or M'S, for row k and N columns from column0 on. */
template <int KP, bool BACK, int N>
__device__ inline void mn_segment_apply(float (&sums)[N], const mn_segment_states_smem<KP> &smem,
                                        int k, int column0) {
#pragma unroll 4
    for (int j = 0; j < KP; j += 4) {
        float row[4];
        if (BACK) {
#pragma unroll
            for (int i = 0; i < 4; i++) row[i] = smem.M[j + i][k];
        } else {
            mn_load<4>(row, &smem.M[k][j], 0);
        }
#pragma unroll
        for (int i = 0; i < 4; i++) {
            float S[N];
#pragma unroll
            for (int c = 0; c < N; c += 4) {
                *(float4 *)&S[c] = *(const float4 *)&smem.S[j + i][column0 + c];
            }
#pragma unroll
            for (int c = 0; c < N; c++) sums[c] = fmaf(row[i], S[c], sums[c]);
        }
    }
}

/* What a block of delta_segment_states does. */
template <int KP, bool BACK>
__device__ inline void mn_segment_make_states(const mn_delta_params &job, int64_t n_slices) {
    extern __shared__ __align__(16) unsigned char states_smem_bytes[];
    constexpr int N = KP * MN_DELTA_STATES_COLUMNS / MN_DELTA_STATES_THREADS;
    constexpr int step = BACK ? -1 : 1;
    mn_segment_states_smem<KP> &smem = *(mn_segment_states_smem<KP> *)states_smem_bytes;
    const mn_call &call = job.p.call;
    const int64_t h = blockIdx.x / n_slices % call.H;
    const int64_t n = mn_scan_cut_sequence(job, blockIdx.x / n_slices / call.H);
    if (n < 0) return;
    const int64_t pitch = job.padded_v + KP;
    const int k = threadIdx.x % KP, local = threadIdx.x / KP * N;
    const int64_t column0 = blockIdx.x % n_slices * MN_DELTA_STATES_COLUMNS + local;
    const mn_scan_cut cut = mn_scan_cut_of(job.segments, mn_span_at(call, n).length);
    const int tail = BACK ? 0 : cut.n - 1;
    int segment = BACK ? cut.n - 2 : 1;
    if (cut.n < 3) return;
    mn_segment_matrix<KP> M;
    M.load(mn_segment_matrix_of<KP>(job, n, h, segment), pitch);
    const float *from = mn_scan_segment_state(job, n, h, segment) + k * call.V + column0;
#pragma unroll
    for (int c = 0; c < N; c++) {
        smem.S[k][local + c] = k < call.K && column0 + c < call.V ? from[c] : 0.0f;
    }
    for (; segment != tail; segment += step) {
        const float *map = mn_scan_segment_map<KP>(job, n, h, segment) + k * pitch + column0;
        float sums[N];
#pragma unroll
        for (int c = 0; c < N; c++) sums[c] = map[c];
        M.store(smem.M);
        __syncthreads();
        if (segment + step != tail) {
            M.load(mn_segment_matrix_of<KP>(job, n, h, segment + step), pitch);
        }
        mn_segment_apply<KP, BACK>(sums, smem, k, local);
        __syncthreads();
        float *to = mn_scan_segment_state(job, n, h, segment + step) + k * call.V + column0;
#pragma unroll
        for (int c = 0; c < N; c++) {
            smem.S[k][local + c] = sums[c];
            if (k < call.K && column0 + c < call.V) to[c] = sums[c];
        }
    }
}

/* The states in front of segments, from that in front of the second in the scan's order.
 *
 * Grid: block = (i * H + h) * n_slices + slice, for the i-th sequence that may be cut, a slice
 * being 16 value columns of (K,V) states; a thread has a row and KP / 16 columns.
 * Loads   the state in front of the second segment (K, 16 columns), and of each segment between the
 *         first and the last N (K, 16 columns) and M (K,K).
 * Stores  the state in front of each later segment. All in float32, products in the order of j.
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
    const int64_t blocks =
        n_slices * job.p.call.H * mn_scan_cut_sequences(job.p.call, job.segments);
    if (blocks > INT32_MAX) return cudaErrorNotSupported;
    return mn_launch_smem_behind(beside, delta_segment_states<KP, BACK>, dim3((unsigned)blocks),
                                 MN_DELTA_STATES_THREADS, sizeof(mn_segment_states_smem<KP>),
                                 stream, job, n_slices);
}

}    // namespace mneme::delta

#endif
