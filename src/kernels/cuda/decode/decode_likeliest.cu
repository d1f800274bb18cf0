/* decode_likeliest.cu - the largest of each row of logits: the next tokens of sequences that
 * decode together, where nothing but the largest counts. Equal logits: the first of them, as on the
 * host. */
#include "kernels/cuda/prim/pdl.cuh"
#include "kernels/decode.h"

namespace mneme::decode {

enum { LIKELIEST_THREADS = 512 };

/* A logit and its place. */
struct candidate {
    float value;
    int place;

    __device__ void meet(float other, int at) {
        if (other > value || (other == value && at < place)) value = other, place = at;
    }
};

/* A block has a row; -1 where a logit is no number or infinite: the host has the words for that. */
__global__ void __launch_bounds__(LIKELIEST_THREADS)
likeliest(const float *logits, int64_t width, int n, int32_t *out) {
    __shared__ candidate smem[LIKELIEST_THREADS / 32];
    const float *row = logits + blockIdx.x * width;
    candidate best = { -INFINITY, n };
    bool spoilt = false;
    mn_pdl_launch_dependents();
    mn_pdl_wait();
    for (int i = threadIdx.x; i < n; i += LIKELIEST_THREADS) {
        const float x = row[i];
        spoilt |= !(x < INFINITY);
        best.meet(x, i);
    }
    spoilt = __syncthreads_or(spoilt);
    for (int lanes = 16; lanes > 0; lanes >>= 1) {
        const float value = __shfl_xor_sync(0xffffffffu, best.value, lanes);
        best.meet(value, __shfl_xor_sync(0xffffffffu, best.place, lanes));
    }
    if (threadIdx.x % 32 == 0) smem[threadIdx.x / 32] = best;
    __syncthreads();
    if (threadIdx.x > 0) return;
    for (int i = 1; i < LIKELIEST_THREADS / 32; i++) best.meet(smem[i].value, smem[i].place);
    out[blockIdx.x] = spoilt || best.value == -INFINITY ? -1 : best.place;
}

extern "C" int mn_decode_likeliest(const float *logits, int64_t rows, int64_t width, int64_t n,
                                   int32_t *out, void *stream) {
    return mn_launch_pdl(likeliest, dim3((unsigned)rows), LIKELIEST_THREADS, 0,
                         (cudaStream_t)stream, logits, width, (int)n, out);
}

}    // namespace mneme::decode
