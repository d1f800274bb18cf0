/* delta_redo_back.cuh - cotangents that are not finite, in delta's way back
 * (docs/internals/causality.md).
 *
 * What comes into D that is not finite stays there: it shows in the first token's dv, or dk. Five
 * launches behind the others look at that and end at once where all is well. Else they find the
 * last token with such a cotangent and make the rows behind it again: the scan as if cotangents up
 * to it were zeros, as far as its chunk, and the gradients of that chunk. Rows up to it are NaN
 * there. */
#ifndef MN_KERNELS_CUDA_DELTA_DELTA_REDO_BACK_CUH
#define MN_KERNELS_CUDA_DELTA_DELTA_REDO_BACK_CUH

#include "kernels/cuda/delta/delta_redo.cuh"

namespace mneme::delta {

enum { MN_DELTA_REDO_THREADS = 128 };

/* Leaves in job.cuts the first row to make again, 0: none.
 *
 * Grid: n * H + h. Loads the first row of dv, or where `dv` is absent of grad.e; where that is not
 * finite cot.o (T,V). */
__global__ void __launch_bounds__(MN_DELTA_REDO_THREADS)
delta_find_redo_back(const __grid_constant__ mn_delta_params job, const mn_out dv) {
    const mn_delta_args &p = job.p;
    const mn_call &call = p.call;
    const int64_t h = blockIdx.x % call.H, width = dv.data ? call.V : call.K;
    const int64_t head = dv.data ? h : mn_key_head(call, h);
    const mn_span span = mn_span_at(call, blockIdx.x / call.H);
    const int64_t end = span.t0 + span.length;
    int64_t cut = 0;
    mn_pdl_wait();
    if (span.length > 0 && mn_redo_row_is_wild(mn_row<mn_bf16>(dv.data ? dv : p.grad.e, span.b,
                                                               span.t0, head), width)) {
        const int behind = mn_redo_first_token(span.length, [&](int64_t t, float most) {
            return mn_redo_has_wild(mn_row<mn_bf16>(p.cot.o, span.b, end - 1 - t, h), call.V, most);
        });
        cut = behind > 0 ? span.length - behind : 0;
    }
    if (threadIdx.x == 0) job.cuts[blockIdx.x] = cut % MN_DELTA_CHUNK == 0 ? 0 : (int)cut;
}

/* dv of the rows behind the cut, from dX, and NaN in dX in front of it. Grid as above. */
__global__ void __launch_bounds__(MN_DELTA_REDO_THREADS)
delta_redo_values(const __grid_constant__ mn_delta_params job, const mn_out dv) {
    const mn_call &call = job.p.call;
    mn_pdl_wait();
    const int64_t record = mn_delta_record_of(job, blockIdx.x), h = blockIdx.x % call.H;
    if (record < 0) return;
    const int cut = job.cuts[blockIdx.x], from = cut % MN_DELTA_CHUNK, first = cut - from;
    const mn_span span = mn_span_at(call, blockIdx.x / call.H);
    const int count = (int)min((int64_t)MN_DELTA_CHUNK, span.length - first);
    mn_bf16 *dX = job.workspace.dX + record * job.padded_v * MN_DELTA_CHUNK;
    for (int64_t j = threadIdx.x; j < call.V; j += MN_DELTA_REDO_THREADS) {
        for (int t = 0; t < count; t++) {
            mn_bf16 &x = dX[j * MN_DELTA_CHUNK + t];
            if (t < from) mn_put(&x, __int_as_float(0x7fc00000));
            else if (dv.data) mn_row<mn_bf16>(dv, span.b, span.t0 + first + t, h)[j] = x;
        }
    }
}

inline int redo_values(const mn_delta_params &job, const mn_out &dv, cudaStream_t stream) {
    return mn_launch_smem_behind(true, delta_redo_values,
                                 dim3((unsigned)mn_delta_grad_blocks(job, 0)),
                                 MN_DELTA_REDO_THREADS, 0, stream, job, dv);
}

}    // namespace mneme::delta

#endif
