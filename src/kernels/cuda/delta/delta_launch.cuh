/* delta_launch.cuh - a call of delta over chunks: its workspace, which views are read 16 bytes at a
 * time, and how the kernels that both passes use are launched. */
#ifndef MN_KERNELS_CUDA_DELTA_DELTA_LAUNCH_CUH
#define MN_KERNELS_CUDA_DELTA_DELTA_LAUNCH_CUH

#include "kernels/cuda/delta/delta_chunk.h"
#include "kernels/cuda/delta/delta_intra_chunk.cuh"
#include "kernels/cuda/delta/delta_intra_chunk_channel.cuh"
#include "kernels/cuda/delta/delta_segments.cuh"
#include "kernels/cuda/delta/delta_state_scan_warp.cuh"

namespace mneme::delta {

inline int64_t mn_delta_padded_k(int64_t K) {
    return K <= 64 ? 64 : K <= 128 ? 128 : 256;
}

/* Takes `count` records of `bytes` each from workspace that starts at `base` (NULL: only counts
 * them); records begin at multiples of 256 bytes. */
struct mn_delta_workspace_arena {
    char *base;
    size_t used;
    bool ok;

    template <typename X>
    void take(X *&to, int64_t count, int64_t each) {
        size_t bytes;
        ok = ok && mn_mul_size(&bytes, (size_t)count, (size_t)each) &&
             mn_mul_size(&bytes, bytes, sizeof(X)) && mn_add_size(&bytes, bytes, 255);
        if (!ok) return;
        to = base ? (X *)(base + used) : nullptr;
        ok = mn_add_size(&used, used, bytes / 256 * 256);
    }
};

/* How long sequences of a call are cut; scans of the way back run beside those that save states
 * where channels share decays and w = e (delta_bwd_chunk.cu). */
inline mn_delta_segments mn_delta_segments_of(const mn_delta_args *p, bool back, bool pairs) {
    const bool beside = back && p->decay != MN_DECAY_CHANNEL && !p->w.data;
    return mn_delta_segments_of(p->call, pairs, beside);
}

/* Lays out the workspace; false when sizes overflow. */
inline bool mn_delta_workspace_layout(mn_delta_workspace *workspace, size_t *bytes,
                                      const mn_delta_args *p, void *base, bool back,
                                      bool pairs = false) {
    const mn_call &call = p->call;
    const int64_t records = mn_tile_slots(call, mn_delta_chunk_tokens(pairs)) * call.H;
    const int64_t K = mn_delta_padded_k(call.K), V = mn_ceil_div(call.V, 64) * 64;
    const bool channel = p->decay == MN_DECAY_CHANNEL;
    mn_delta_workspace_arena arena = { (char *)base, 0, true };
    *workspace = {};
    arena.take(workspace->log_decays, records, 1);
    arena.take(workspace->T, records, MN_DELTA_MATRIX);
    arena.take(workspace->P, records, MN_DELTA_MATRIX);
    arena.take(workspace->cuts, mn_n_spans(call), call.H);
    if (channel) {
        const bool joined = pairs && mn_rows_joined<MN_DELTA_PAIRS>;    // q is in e
        if (!joined) arena.take(workspace->q, records, MN_DELTA_CHUNK * K);
        arena.take(workspace->e, records, MN_DELTA_CHUNK * K);
        arena.take(workspace->w, records, MN_DELTA_CHUNK * K);
        arena.take(workspace->cum_decay, records, K);
    }
    if (back) {
        arena.take(workspace->A, records, MN_DELTA_MATRIX);
        arena.take(workspace->S, records, V * K);
        arena.take(workspace->D, records, V * K);
        arena.take(workspace->R, records, V * MN_DELTA_CHUNK);
        arena.take(workspace->dX, records, V * MN_DELTA_CHUNK);
        arena.take(workspace->parts, records, mn_max(K / 64, 2) * (2 * MN_DELTA_CHUNK + 4));
        arena.take(workspace->whole, records, 1);
    }
    const mn_delta_segments segments = mn_delta_segments_of(p, back, pairs);
    if (segments.count > 1) {
        const int64_t heads = mn_scan_cut_sequences(call, segments) * call.H;
        arena.take(workspace->segment_maps, heads * (segments.count - 2), K * (V + K));
        arena.take(workspace->segment_states, heads * segments.count, call.K * call.V);
        workspace->segment_matrices = workspace->segment_maps;
        if (back) {
            arena.take(workspace->back_maps, heads * (segments.count - 2), K * (V + K));
            arena.take(workspace->back_states, heads * segments.count, call.K * call.V);
        }
    }
    *bytes = arena.used;
    return arena.ok;
}

/* Whether rows of a view can be read in 16-byte vectors of eight numbers. */
template <typename View>
inline bool mn_delta_vec_aligned(const View &view, int64_t width) {
    bool whole = (uintptr_t)view.data % 16 == 0 && width % 8 == 0;
    for (int axis = 0; axis < 3; axis++) whole = whole && view.stride[axis] % 8 == 0;
    return whole;
}

inline bool mn_delta_make_params(mn_delta_params *job, const mn_delta_args *p, void *shared,
                                 bool back) {
    const int64_t K = p->call.K, V = p->call.V;
    size_t bytes;
    *job = {};
    job->p = *p;
    job->scale = (float)p->scale;
    job->padded_v = mn_ceil_div(V, 64) * 64;
    job->segments = mn_delta_segments_of(p, back, false);
    job->packed[MN_DELTA_Q] = mn_delta_vec_aligned(p->q, K);
    job->packed[MN_DELTA_E] = mn_delta_vec_aligned(p->e, K);
    job->packed[MN_DELTA_W] = mn_delta_vec_aligned(p->w.data ? p->w : p->e, K);
    job->packed[MN_DELTA_V] = mn_delta_vec_aligned(p->v, V);
    job->packed[MN_DELTA_O] = mn_delta_vec_aligned(p->o, V);
    job->packed[MN_DELTA_COT] = mn_delta_vec_aligned(p->cot.o, V);
    job->packed[MN_DELTA_DQ] = mn_delta_vec_aligned(p->grad.q, K);
    job->packed[MN_DELTA_DE] = mn_delta_vec_aligned(p->grad.e, K);
    job->packed[MN_DELTA_DW] = mn_delta_vec_aligned(p->grad.w, K);
    job->packed[MN_DELTA_DV] = mn_delta_vec_aligned(p->grad.v, V);
    job->packed[MN_DELTA_G] = mn_delta_vec_aligned(p->g, K);
    return mn_delta_workspace_layout(&job->workspace, &bytes, p, shared, back);
}

/* Shared memory that a GPU has to have for keys of up to so many numbers: of the scans with one
 * column tile a block, and of gradients by 64 channels. Of 8.0, which has 163 KiB, all of it where
 * scans hold less of the next chunk (mn_delta_tight_taken). */
enum {
    MN_DELTA_LEAST_SMEM_64 = 146 * 1024,
    MN_DELTA_LEAST_SMEM_128 = 157 * 1024,
    MN_DELTA_LEAST_SMEM_256 = 163 * 1024,
    MN_DELTA_LEAST_SMEM_256_LOOSE = 226 * 1024
};

/* Whether scans may do with less shared memory where a block of four column tiles does not get what
 * it would take: blocks of four in place of many of one. */
static const bool mn_delta_tight_taken = true;

/* Shared memory of a scan with so many column tiles. */
template <int KP>
inline size_t mn_delta_scan_bytes(int col_tiles, bool tight) {
    static_assert(mn_scan_smem<KP>::bytes(false) + sizeof(mn_scan_warp_exchange<KP>) <=
                      (KP <= 64    ? MN_DELTA_LEAST_SMEM_64
                       : KP <= 128 ? MN_DELTA_LEAST_SMEM_128
                                   : MN_DELTA_LEAST_SMEM_256_LOOSE), "what the GPU has to have");
    const bool group = col_tiles == MN_DELTA_COL_TILES;
    return mn_scan_smem<KP>::bytes(tight) +
           (size_t)col_tiles * (group ? sizeof(mn_scan_exchange<mn_scan_splits<KP>>)
                                      : sizeof(mn_scan_warp_exchange<KP>));
}

/* By the GPU alone. */
template <int KP>
inline bool mn_delta_scan_is_tight(void) {
    static_assert(mn_scan_smem<256>::bytes(true) +
                      MN_DELTA_COL_TILES * sizeof(mn_scan_exchange<mn_scan_splits<256>>) <=
                      MN_DELTA_LEAST_SMEM_256, "what the GPU has to have");
    const size_t most = (size_t)mn_device_props_current().shared_bytes;
    return mn_delta_tight_taken && KP > 64 &&
           mn_delta_scan_bytes<KP>(MN_DELTA_COL_TILES, false) > most;
}

/* Column tiles of a block of a scan: fewer than four where there are few columns to spread over the
 * processors, or little shared memory. Four are scanned by warpgroups, fewer by warps, with the
 * same bits. */
template <int KP>
inline int mn_delta_col_tiles(int64_t columns, int64_t heads, bool tight) {
    const size_t most = (size_t)mn_device_props_current().shared_bytes;
    int col_tiles = MN_DELTA_COL_TILES;
    while (col_tiles > 1 && (mn_ceil_div(columns, 16 * col_tiles) * heads < 64 ||
                             mn_delta_scan_bytes<KP>(col_tiles, tight) > most)) {
        col_tiles /= 2;
    }
    return col_tiles;
}

/* The intra-chunk stage where no kernel of Hopper serves. */
template <int KP>
inline int mn_delta_intra_chunk(const mn_delta_params &job, cudaStream_t stream) {
    const bool channel = job.p.decay == MN_DECAY_CHANNEL;
    auto kernel = channel ? delta_intra_chunk_channel_kernel<KP, true>
                          : delta_intra_chunk_kernel<KP>;
    size_t smem = channel ? sizeof(mn_channel_intra_smem<KP>)
                          : mn_delta_intra_smem<KP>::bytes(job.p.w.data);
    if constexpr (KP > 128) {    // by the GPU alone
        if (channel && smem > (size_t)mn_device_props_current().shared_bytes) {
            kernel = delta_intra_chunk_channel_kernel<KP, true, 128>;
            smem = sizeof(mn_channel_intra_smem<128>);
        }
    }
    const int64_t blocks = mn_delta_chunk_blocks(job, MN_DELTA_CHUNK);
    if (blocks == 0) return cudaSuccess;
    if (blocks > INT32_MAX) return cudaErrorNotSupported;
    return mn_launch_smem_behind(job.cuts, kernel, dim3((unsigned)blocks), MN_DELTA_INTRA_THREADS,
                                 smem, stream, job);
}

/* Maps `rows` rows of `width` numbers of the workspace for TMA. */
inline bool mn_delta_tma_map_rows(CUtensorMap *map, const mn_bf16 *from, int64_t rows,
                                  int64_t width) {
    mn_call all = {};
    all.B = all.H = 1, all.T = rows;
    const mn_in view = { from, { rows * width, width, width } };
    return rows <= INT32_MAX && mn_tma_map(map, view, all, width, MN_DELTA_CHUNK);
}

/* Maps rows of keys for TMA: decayed ones of workspace, or the tensor's own. */
inline bool mn_delta_tma_map_keys(CUtensorMap *map, const mn_delta_params &job, const mn_in &view,
                              mn_delta_tensor tensor, const mn_bf16 *decayed, int64_t width) {
    if (!decayed) {
        return job.packed[tensor] &&
               mn_tma_map(map, view, job.p.call, job.p.call.K, MN_DELTA_CHUNK);
    }
    const int64_t slots = mn_tile_slots(job.p.call, mn_delta_chunk_tokens(job.pairs));
    return mn_delta_tma_map_rows(map, decayed, slots * job.p.call.H * MN_DELTA_CHUNK, width);
}

/* Maps for the scan forward, or the one back. */
inline void mn_delta_tma_maps(mn_scan_tma_maps *maps, const mn_delta_params &job, bool back) {
    const mn_delta_args &p = job.p;
    const mn_delta_workspace &workspace = job.workspace;
    const int64_t K = mn_delta_padded_k(p.call.K);
    const mn_in &w = p.w.data ? p.w : p.e, &values = back ? p.cot.o : p.v;
    const bool packed = job.packed[back ? MN_DELTA_COT : MN_DELTA_V];
    const auto key = [&](CUtensorMap *map, mn_delta_tensor tensor) {
        return tensor == MN_DELTA_Q ? mn_delta_tma_map_keys(map, job, p.q, tensor, workspace.q, K)
               : tensor == MN_DELTA_E ? mn_delta_tma_map_keys(map, job, p.e, tensor, workspace.e, K)
                                      : mn_delta_tma_map_keys(map, job, w, tensor, workspace.w, K);
    };
    *maps = {};
    maps->serve =
        mn_device_is_sm90() && packed &&
        (job.pairs ? mn_tma_map_pairs(&maps->values, values, p.call, p.call.V,
                                      mn_delta_chunk_tokens(true))
                   : mn_tma_map(&maps->values, values, p.call, p.call.V, MN_DELTA_CHUNK)) &&
        mn_delta_tma_map_keys(&maps->T, job, p.e, MN_DELTA_E, workspace.T, MN_DELTA_CHUNK) &&
        mn_delta_tma_map_keys(&maps->P, job, p.e, MN_DELTA_E, workspace.P, MN_DELTA_CHUNK) &&
        key(&maps->keys, back ? MN_DELTA_W : MN_DELTA_E) &&
        ((job.pairs && mn_rows_joined<MN_DELTA_PAIRS>) || key(&maps->first, MN_DELTA_Q)) &&
        key(&maps->second, back ? MN_DELTA_E : MN_DELTA_W);
}

typedef void (*mn_delta_scan_kernel)(mn_delta_params, mn_scan_tma_maps, int64_t);

/* Launches the scan over `columns` value columns of all heads of all sequences, by warpgroups or by
 * warps: block = (n * H + h) * n_slices + slice, a slice being col_tiles * 16 value columns, with
 * `segments` of those that are cut (mn_delta_scan_units). `two_kernel`, where not NULL: the
 * scan back with w = e by warpgroups, of whose blocks a processor holds two. `beside`, for scans
 * back: the launch in front makes nothing that this one reads. */
template <int KP>
inline int mn_delta_state_scan(mn_delta_scan_kernel warpgroup_kernel,
                               mn_delta_scan_kernel warp_kernel, const mn_delta_params &job,
                               bool back, int64_t columns, cudaStream_t stream, int segments = 0,
                               mn_delta_scan_kernel two_kernel = nullptr, bool beside = false) {
    constexpr int splits = mn_scan_splits<KP>, warps = mn_scan_sizes<KP>::splits;
    const int64_t heads =
        job.p.call.H * mn_delta_scan_units(job.p.call, job.segments, segments);
    const bool whole = job.segments.part == MN_DELTA_WHOLE;
    mn_delta_params scan = job;
    scan.tight = mn_delta_scan_is_tight<KP>();
    const int col_tiles =
        whole ? mn_delta_col_tiles<KP>(columns, heads, scan.tight) : (int)MN_DELTA_COL_TILES;
    const int64_t n_slices = mn_ceil_div(columns, 16 * col_tiles), blocks = n_slices * heads;
    const bool group = col_tiles == MN_DELTA_COL_TILES;
    mn_scan_tma_maps maps;
    if (blocks == 0) return cudaSuccess;
    if (blocks > INT32_MAX) return cudaErrorNotSupported;
    mn_delta_tma_maps(&maps, job, back);
    if (two_kernel && group && !job.cuts && maps.serve && !job.p.w.data &&
        (beside || blocks > mn_device_props_current().processors)) {
        return mn_launch_smem_behind(beside, two_kernel, dim3((unsigned)blocks),
                                     mn_scan_threads(1),
                                     mn_scan_bytes_of_two<KP>() +
                                         MN_DELTA_COL_TILES * MN_SCAN_SCRATCH_OF_TWO,
                                     stream, job, maps, n_slices);
    }
    return mn_launch_smem_behind(beside || job.cuts, group ? warpgroup_kernel : warp_kernel,
                                 dim3((unsigned)blocks),
                                 32 * col_tiles * (group ? splits : warps) + MN_DELTA_PRODUCERS,
                                 mn_delta_scan_bytes<KP>(col_tiles, scan.tight), stream, scan,
                                 maps, n_slices);
}

/* ---- segments -------------------------------------------------------------------------------- */

/* Whether long sequences of a call go by segments: where TMA brings their tiles. */
inline bool mn_delta_has_segments(const mn_delta_params &job) {
    mn_scan_tma_maps maps;
    if (job.segments.count < 2 || !mn_device_is_sm90()) return false;
    mn_delta_tma_maps(&maps, job, false);
    return maps.serve;
}

/* A call with the segments of a launch: `part`, from segment `first` on. */
inline mn_delta_params mn_delta_part_of(const mn_delta_params &job, int part, int first) {
    mn_delta_params of = job;
    of.segments.part = part, of.segments.first = first;
    return of;
}

/* The maps of all segments between first and last, beside the launch in front. */
template <int KP, bool CHANNEL>
inline int mn_delta_segment_maps(const mn_delta_params &job, cudaStream_t stream) {
    const auto kernel = delta_state_scan_kernel<KP, CHANNEL, MN_SCAN_MAP>;
    const mn_delta_params part = mn_delta_part_of(job, MN_DELTA_SEGMENT_MAPS, 1);
    const bool same_keys = !CHANNEL && !job.p.w.data;
    const size_t smem = same_keys ? offsetof(mn_scan_smem<KP>, behind) : sizeof(mn_scan_smem<KP>);
    const int64_t n_slices = (job.padded_v + KP) / 64;
    const int64_t blocks = n_slices * job.p.call.H *
                           mn_delta_scan_units(job.p.call, part.segments, job.segments.count - 2);
    mn_scan_tma_maps maps;
    if (blocks > INT32_MAX) return cudaErrorNotSupported;
    cudaError_t code = cudaFuncSetAttribute(
        kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, (int)smem);
    if (code != cudaSuccess) return code;
    // a processor is shared with blocks that take more
    code = cudaFuncSetAttribute(kernel, cudaFuncAttributePreferredSharedMemoryCarveout,
                                (int)cudaSharedmemCarveoutMaxShared);
    if (code != cudaSuccess) return code;
    mn_delta_tma_maps(&maps, job, false);
    return mn_launch_pdl(kernel, dim3((unsigned)blocks), mn_scan_threads(1), smem, stream, part,
                         maps, n_slices);
}

/* A scan forward by segments: scan(job, n) launches what job.segments says, with n segments. */
template <int KP, bool CHANNEL, typename Scan>
inline int mn_delta_scan_segments(const mn_delta_params &job, cudaStream_t stream, Scan scan) {
    const int n = job.segments.count, first = MN_DELTA_SEGMENT_FIRST, rest = MN_DELTA_SEGMENT_REST;
    // a redo finds states in front of segments
    if (job.cuts) return scan(mn_delta_part_of(job, first | rest, 1), n - 1);
    int code = scan(mn_delta_part_of(job, first, 0), 0);
    if (code == cudaSuccess) code = mn_delta_segment_maps<KP, CHANNEL>(job, stream);
    if (code == cudaSuccess) code = mn_delta_segment_states<KP, false>(job, stream);
    return code == cudaSuccess ? scan(mn_delta_part_of(job, rest, 1), n - 1) : code;
}

/* What the scan back leaves apart from what that forward does: what maps add, and states. */
inline mn_delta_params mn_delta_back_apart(const mn_delta_params &job) {
    mn_delta_params of = job;
    of.workspace.segment_maps = job.workspace.back_maps;
    of.workspace.segment_states = job.workspace.back_states;
    return of;
}

/* Back, where the maps are there already but for what they add. */
template <int KP, typename Scan>
inline int mn_delta_scan_segments_back(const mn_delta_params &job, cudaStream_t stream, Scan scan) {
    const int n = job.segments.count, first = MN_DELTA_SEGMENT_FIRST, rest = MN_DELTA_SEGMENT_REST;
    if (job.cuts) return scan(mn_delta_part_of(job, first | rest, 0), n - 1);
    int code = scan(mn_delta_part_of(job, first | MN_DELTA_SEGMENT_MAPS, 1), n - 2);
    if (code == cudaSuccess) code = mn_delta_segment_states<KP, true>(job, stream);
    return code == cudaSuccess ? scan(mn_delta_part_of(job, rest, 0), n - 1) : code;
}

/* Both at once, neither of which needs the other: each launch of the scan back, for which `behind`
 * is mn_delta_back_apart, runs beside one of the scan that saves states. */
template <int KP, bool CHANNEL, typename Save, typename Back>
inline int mn_delta_scan_segments_beside(const mn_delta_params &job, const mn_delta_params &behind,
                                         cudaStream_t stream, Save save, Back back) {
    const int first = MN_DELTA_SEGMENT_FIRST, maps = MN_DELTA_SEGMENT_MAPS;
    const int n = job.segments.count;
    int code = save(mn_delta_part_of(job, first, 0), 0);
    if (code == cudaSuccess) code = back(mn_delta_part_of(behind, first | maps, 1), n - 2);
    if (code == cudaSuccess) code = mn_delta_segment_maps<KP, CHANNEL>(job, stream);
    if (code == cudaSuccess) code = mn_delta_segment_states<KP, false>(job, stream);
    if (code == cudaSuccess) code = mn_delta_segment_states<KP, true>(behind, stream, true);
    if (code == cudaSuccess) code = save(mn_delta_part_of(job, MN_DELTA_SEGMENT_REST, 1), n - 1);
    if (code != cudaSuccess) return code;
    return back(mn_delta_part_of(behind, MN_DELTA_SEGMENT_REST, 0), n - 1);
}

/* Returns function<KP> arguments for a key width. */
#define MN_DELTA_DISPATCH_K(function, K, arguments)                                                \
    do {                                                                                           \
        if ((K) <= 64) return function<64> arguments;                                              \
        if ((K) <= 128) return function<128> arguments;                                            \
        return function<256> arguments;                                                            \
    } while (0)

}    // namespace mneme::delta

#endif
