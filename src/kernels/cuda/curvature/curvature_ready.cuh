/* curvature_ready.cuh - curvature beside a state scan that reads with its queries: both are on the
 * GPU at once, and the scan follows a chunk or two behind.
 *
 * Blocks of curvature count, for each slice of columns of a segment, how many of its chunks are in
 * memory. The scan is launched when all blocks of curvature have begun (pdl.cuh), so that what it
 * waits for is always under way. What was launched in front of curvature has ended when the first
 * chunk has been counted. */
#ifndef MN_KERNELS_CUDA_CURVATURE_CURVATURE_READY_CUH
#define MN_KERNELS_CUDA_CURVATURE_CURVATURE_READY_CUH

#include "kernels/cuda/prim/pdl.cuh"
#include "kernels/cuda/prim/sync.cuh"
#include "kernels/cuda/prim/tma.cuh"

namespace mneme::curvature {

struct mn_curve_maps {
    CUtensorMap q, k, qt;
};

/* chunks[(slot H + h) slices + i]: how many chunks of 64 tokens of slice i of head h of a segment
 * are in memory. */
struct mn_curve_ready {
    int *chunks;        // NULL: all queries are older than the scan
    int64_t segment;    // tokens; slots of segments are numbered as in curvature.cuh
    int slices;
};

/* ---- on the device --------------------------------------------------------------------------- */

/* One thread calls, when its stores by TMA are done: these are in memory then, so that
 * no fence, which takes a thousand clocks, has to follow. Stores by threads need one in front. */
__device__ inline void mn_curve_arrive(int *chunks, int count) {
    if (count == 1) mn_pdl_wait();
    mn_store_relaxed(chunks, count);
}

__device__ inline int mn_curve_arrived(const int *chunks) {
    int count;
    count = mn_load_acquire(chunks);
    return count;
}

/* How many queries of one head of a sequence a scan knows to be there; it waits for chunks in
 * order. */
struct mn_curve_waiting {
    const int *chunks;    // of the segment that holds the chunk asked for last
    int known, first;     // chunks of it that are there; its first

    __device__ void begin(const mn_curve_ready &ready, const mn_call &call, int64_t n, int64_t h) {
        const mn_span span = mn_span_at(call, n);
        const int64_t count = (span.length + ready.segment - 1) / ready.segment;
        const int64_t slot = call.cu_seqlens ? span.t0 / ready.segment + n
                                             : n * max(count, (int64_t)1);
        chunks = ready.chunks + (slot * call.H + h) * ready.slices;
        known = first = 0;
    }

    /* Returns when chunk `chunk` of the queries is in device memory, visible to this thread and to
     * the TMA loads that it issues afterwards. */
    __device__ void wait(const mn_curve_ready &ready, int64_t H, int chunk) {
        const int length = (int)(ready.segment / 64);
        while (chunk - first >= length) {
            chunks += H * ready.slices;
            first += length;
            known = 0;
        }
        if (chunk - first < known) return;
        while (chunk - first >= known) {
            known = mn_curve_arrived(chunks);
            if (ready.slices > 1) known = min(known, mn_curve_arrived(chunks + 1));
        }
#if __CUDA_ARCH__ >= 900
        cuda::ptx::fence_proxy_async();
#endif
    }
};

/* ---- on the host ----------------------------------------------------------------------------- */

MN_CUDA_PLAN(curvature_forward);
MN_CUDA_LAUNCH(curvature_forward);

/* A call of curvature, its maps and its work space. */
struct mn_curve_beside {
    mn_curvature_args p;
    mn_curve_maps maps;
    mn_curve_ready ready;
    float *states;
};

/* Bytes of work space of a call, whether it goes beside another or not. */
bool mn_curve_beside_plan(size_t *bytes, const mn_curvature_args *p);

/* Whether a call can go beside a state scan; if so, fills in `to`. */
bool mn_curve_beside_of(mn_curve_beside *to, const mn_curvature_args *p, void *shared);

/* What segments of long sequences start from; before what is launched in front of curvature. */
int mn_curve_beside_sums(const mn_curve_beside &job, cudaStream_t on);

/* Curvature itself, as soon as blocks of the launch in front leave room. */
int mn_curve_beside_launch(const mn_curve_beside &job, cudaStream_t on);

/* The blocks that this takes. */
int64_t mn_curve_beside_blocks(const mn_curve_beside &job);

}    // namespace mneme::curvature

#endif
