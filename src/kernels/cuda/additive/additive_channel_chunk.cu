/* additive_channel_chunk.cu - launches of additive_channel_state_scan.cuh. */
#include "kernels/cuda/additive/additive.cuh"
#include "kernels/cuda/additive/additive_channel_state_scan.cuh"

template <int DEPTH>
static bool fits(void) {
    const size_t limit = (size_t)mn_additive_smem_limit();
    return sizeof(mn_keys_smem<DEPTH>) <= limit && sizeof(mn_values_smem<DEPTH>) <= limit;
}

int mn_additive_channel_chunk(int depth) {
    const bool has = depth == 64 ? fits<64>() : depth == 128 ? fits<128>() : fits<256>();
    return has ? MN_SUBCHUNK_CHUNK : 0;
}

static int launch_kernel(void (*kernel)(mn_chunk_scans), size_t bytes, const mn_chunk_scans *scans,
                         int64_t segments, cudaStream_t stream) {
    const int64_t slices = mn_scan_slices(scans->scan[0]);
    const int64_t blocks = slices * scans->call.H * mn_n_spans(scans->call);
    if (blocks == 0) return cudaSuccess;
    if (blocks > INT32_MAX) return cudaErrorNotSupported;
    const dim3 grid((unsigned)blocks, 1, (unsigned)segments);
    return mn_launch_smem(kernel, grid, MN_CHANNEL_THREADS, bytes, stream, *scans);
}

template <int DEPTH>
static int launch_of(const mn_chunk_scans *scans, int64_t segments, bool of_values,
                     cudaStream_t stream) {
    if (of_values) {
        return launch_kernel(additive_channel_scan_values<DEPTH>, sizeof(mn_values_smem<DEPTH>),
                             scans,
                             segments, stream);
    }
    return launch_kernel(additive_channel_scan_keys<DEPTH>, sizeof(mn_keys_smem<DEPTH>), scans,
                         segments,
                         stream);
}

int mn_additive_channel_launch(const mn_chunk_scans *scans, int64_t segments, bool of_values,
                               cudaStream_t stream) {
    const int depth = mn_additive_padded_depth(scans->scan[0].depth);
    if (!of_values) {
        const int code = mn_additive_gated_launch(scans, segments, stream);
        if (code != cudaErrorNotSupported) return code;
    }
    if (depth == 64) return launch_of<64>(scans, segments, of_values, stream);
    if (depth == 128) return launch_of<128>(scans, segments, of_values, stream);
    return launch_of<256>(scans, segments, of_values, stream);
}
