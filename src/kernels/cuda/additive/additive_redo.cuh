/* additive_redo.cuh - numbers that are not finite, in additive forward by chunks
 * (docs/internals/causality.md). */
#ifndef MN_KERNELS_CUDA_ADDITIVE_ADDITIVE_REDO_CUH
#define MN_KERNELS_CUDA_ADDITIVE_ADDITIVE_REDO_CUH

#include "kernels/cuda/additive/additive_mma.cuh"
#include "kernels/cuda/prim/first_wild.cuh"

namespace mneme::additive {

/* A number that is not finite stays in the state, and shows in the last token's o. Then rows in
 * front of the first such number are made again, as if the sequence ended there: by the block of
 * the segment that holds it. Without rows to make the place becomes idle. The block calls. */
__device__ inline void mn_additive_cut(mn_scan_coord &place, const mn_chunk_scan &p, int chunk) {
    const mn_scan_coord at = place;
    const int64_t b = at.span.b, t0 = at.span.t0, length = at.span.length;
    const int64_t columns = min((int64_t)MN_SCAN_WIDTH, p.width - at.column0);
    const mn_bf16 *last = mn_row<mn_bf16>(p.out, b, t0 + length - 1, at.h) + at.column0;
    int64_t cut = 0;
    mn_pdl_wait();
    if (length > 0 && mn_redo_row_is_wild(last, columns)) {
        cut = mn_redo_first_token(length, [&](int64_t t, float most) {
            const mn_bf16 *v = mn_row<mn_bf16>(p.z, b, t0 + t, at.h) + at.column0;
            return mn_redo_has_wild(v, columns, most) ||
                   mn_redo_has_wild(mn_row<mn_bf16>(p.y, b, t0 + t, at.key), p.depth, most);
        });
    }
    __syncthreads();
    if (threadIdx.x == 0) {
        place.span.length = cut, place.last = false;
        place.n_chunks = (cut + chunk - 1) / chunk;
        place.idle = cut <= at.iter * chunk || cut >= at.end * chunk;
        place.end = min(at.end, place.n_chunks);
    }
    __syncthreads();
}

}    // namespace mneme::additive

#endif
