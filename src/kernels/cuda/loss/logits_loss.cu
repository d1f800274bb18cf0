/* logits_loss.cu - losses and gradients of rows of logits (equations in tape/loss.c), and what is
 * reported of a loss.
 *
 * A block takes row after row. A thread finds its largest logit, z log2 e of it is `from`, and
 * makes e = 2^(z log2 e - from) of each of its logits, once: their sum is brought to those of the
 * others, and the gradient is e by a factor that makes it a share of the whole row. Rows of up to
 * 32768 logits, or their e, stay in registers between the two; longer rows are read again from
 * the second cache. Only one block fits a processor that keeps its rows, so the next row is on
 * its way to shared memory meanwhile: as soon as a thread has taken a pack it asks for that of
 * the next row in its place. What a block does once per row is short, as all of its warps wait for
 * it: logarithms in double come after the last row, many at a time.
 *
 * Logits are float32 and rows begin at 16 bytes; gradients are float32 in their place, or bf16
 * elsewhere. e is off by about |z - top| 2^-24 of itself, most where it counts least. */
#include "kernels/cuda/prim/tma.cuh"
#include "kernels/cuda/elementwise/elementwise.cuh"
#include "kernels/cuda/prim/sync.cuh"

namespace mneme::loss {

using namespace elementwise;

enum {
    THREADS = 1024,
    WARPS = THREADS / 32,
    KEPT = 4,            // packs of a row that a thread keeps
    SM_COUNT = 132,    // of an H200
};

#define LOG2_E 1.44269504f

/* Rows are read twice, or kept as e. */
enum kept_as { REREAD, KEPT_E };

/* Sums of 2^(z log2 e - from); `from` is -infinity where there is no logit above that. */
struct row_sums {
    float from, sum;
};

/* Of the block: sums of its warps, and the target's logit, whose place a gradient may take. Rows
 * take turns, so that one may be made while another is still read. */
struct row_smem {
    row_sums warps[2][WARPS];
    float target_logit[2];
};

__device__ static float softcap(float z, float cap) {
    return cap > 0.0f ? cap * tanhf(z / cap) : z;
}

/* 2^x, 0 where that is below the smallest normal float */
__device__ static float exp2_approx(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

/* Column of a thread's pack k. */
__device__ static int column_of(int k) {
    return ((int)threadIdx.x + k * THREADS) * MN_VEC;
}

/* The numbers [i, i + 8) of a row; -infinity behind its end. */
__device__ static void load_logits(float (&z)[MN_VEC], const float *row, int64_t i, int64_t V,
                                   float cap) {
    const float4 low = *(const float4 *)(row + i), high = *(const float4 *)(row + i + 4);
    const float raw[MN_VEC] = { low.x, low.y, low.z, low.w, high.x, high.y, high.z, high.w };
#pragma unroll
    for (int j = 0; j < MN_VEC; j++) z[j] = i + j < V ? softcap(raw[j], cap) : -INFINITY;
}

/* ---- rows on their way to shared memory ------------------------------------------------------
 *
 * On machines from 9.0 on TMA brings a row in KEPT chunks, a pack for each thread: when
 * threads ask for their own, loads that have to wait hold up what else goes the same way, such as
 * exponentials. Elsewhere they do. */
struct row_prefetch {
    float *row;
    uint64_t *full;    // a barrier for each chunk

    __device__ row_prefetch(uint64_t *mbars) : full(mbars) {
        extern __shared__ float4 workspace[];
        row = (float *)workspace;
#if __CUDA_ARCH__ >= 900
        if (threadIdx.x == 0) {
            for (int k = 0; k < KEPT; k++) mn_mbarrier_init(full + k, 1);
            mn_mbarrier_init_fence();
        }
        __syncthreads();
#endif
    }

    /* Asks for a row of V logits, whose end may be as far as the next 16 bytes. */
    __device__ void issue(const float *from, int V) const {
#if __CUDA_ARCH__ >= 900
        constexpr int CHUNK = THREADS * MN_VEC;
        for (int k = 0; threadIdx.x == 0 && k * CHUNK < V; k++) {
            const int bytes = (min(V - k * CHUNK, CHUNK) + 3) / 4 * 16;
            mn_mbarrier_arrive_expect_tx(full + k, bytes);
            mn_tma_load_1d(row + k * CHUNK, from + k * CHUNK, bytes, full + k);
        }
#else
        for (int k = 0; k < 2 * KEPT; k++) {
            const int i = column_of(k / 2) + k % 2 * 4;
            if (i < V) {
                asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(
                                 (uint32_t)__cvta_generic_to_shared(row + i)),
                             "l"(from + i) : "memory");
            }
        }
        asm volatile("cp.async.commit_group;" ::: "memory");
#endif
    }

    /* Pack k. Lanes whose banks would meet read their halves in opposite orders. */
    __device__ void consume(float (&z)[MN_VEC], int k, int phase) const {
#if __CUDA_ARCH__ >= 900
        mn_mbarrier_wait(full + k, phase);
#else
        asm volatile("cp.async.wait_group 0;" ::: "memory");
#endif
        const bool swaps = threadIdx.x & 4;
        const float4 *at = (const float4 *)(row + column_of(k));
        const float4 one = at[swaps], other = at[!swaps];
        const float4 low = swaps ? other : one, high = swaps ? one : other;
        z[0] = low.x, z[1] = low.y, z[2] = low.z, z[3] = low.w;
        z[4] = high.x, z[5] = high.y, z[6] = high.z, z[7] = high.w;
    }

    /* This thread has taken its packs; the one that asks TMA waits for all. */
    __device__ void release() const {
#if __CUDA_ARCH__ >= 900
        if (threadIdx.x < 32) mn_named_barrier_sync(1, (int)THREADS);
        else mn_named_barrier_arrive(1, (int)THREADS);
#endif
    }
};

/* ---- sums over a row ------------------------------------------------------------------------- */

__device__ static row_sums warp_sums(row_sums x) {
    const float from = mn_warp_max(x.from);
    if (x.from != -INFINITY) x.sum *= exp2_approx(x.from - from);
    return { from, mn_warp_sum(x.sum) };
}

/* The sums of all threads, warps in their order, in all of them. */
__device__ static row_sums block_sums(row_sums x, row_sums *smem) {
    x = warp_sums(x);
    if (threadIdx.x % 32 == 0) smem[threadIdx.x / 32] = x;
    __syncthreads();
    return warp_sums(smem[threadIdx.x % WARPS]);
}

/* The sums of logits that are kept, which become e. Packs behind the end of the row are -infinity
 * here, and the last one is where the row ends within it. */
__device__ static row_sums sumexp_regs(float (&kept)[KEPT][MN_VEC], int V) {
    if (V % MN_VEC != 0) {
#pragma unroll
        for (int k = 0; k < KEPT; k++) {
#pragma unroll
            for (int j = 0; j < MN_VEC; j++) {
                if (column_of(k) + j >= V) kept[k][j] = -INFINITY;
            }
        }
    }
    float most = -INFINITY, sum = 0.0f;
#pragma unroll
    for (int k = 0; k < KEPT; k++) {
#pragma unroll
        for (int j = 0; j < MN_VEC; j++) most = fmaxf(most, kept[k][j]);
    }
    const float from = most * LOG2_E, less = most == -INFINITY ? 0.0f : -from;
#pragma unroll
    for (int k = 0; k < KEPT; k++) {
        float part = 0.0f;
#pragma unroll
        for (int j = 0; j < MN_VEC; j++) {
            kept[k][j] = exp2_approx(fmaf(kept[k][j], LOG2_E, less));
            part += kept[k][j];
        }
        sum += part;
    }
    return { from, sum };
}

__device__ static row_sums sumexp_reread(const mn_loss_params &w, const float *row) {
    float from = -INFINITY, sum = 0.0f, z[MN_VEC];
    for (int64_t i = threadIdx.x * MN_VEC; i < w.V; i += THREADS * MN_VEC) {
        load_logits(z, row, i, w.V, (float)w.cap);
        float most = from;
#pragma unroll
        for (int j = 0; j < MN_VEC; j++) most = fmaxf(most, LOG2_E * z[j]);
        if (from != -INFINITY) sum *= exp2_approx(from - most);
        from = most;
#pragma unroll
        for (int j = 0; j < MN_VEC; j++) {
            sum += exp2_approx(fmaf(z[j], LOG2_E, from == -INFINITY ? 0.0f : -from));
        }
    }
    return { from, sum };
}

/* log of the sum over the row of e^z: log2 e of a float makes `from` what it is. */
template <typename REAL>
__device__ static REAL logsumexp(const row_sums &sums) {
    return log((REAL)sums.sum) + (REAL)sums.from / (REAL)LOG2_E;
}

/* ---- gradients ------------------------------------------------------------------------------- */

/* What the gradients of a row are made with: e = 2^(z log2 e - from). */
struct row_scale {
    float from, to_p, target_logit;
    int target;
};

/* dz = (softmax(z) to_p - target_logit) (1 - (z / cap)^2) */
__device__ static void store_grad_reread(const mn_loss_params &w, const float *row, mn_operand to,
                                const row_scale &by) {
    const float part = w.cap > 0.0 ? 1.0f / (float)w.cap : 0.0f;
    for (int64_t i = threadIdx.x * MN_VEC; i < w.V; i += THREADS * MN_VEC) {
        float z[MN_VEC], d[MN_VEC];
        load_logits(z, row, i, w.V, (float)w.cap);
#pragma unroll
        for (int j = 0; j < MN_VEC; j++) {
            const float bent = i + j < w.V ? z[j] * part : 0.0f;
            d[j] = exp2_approx(fmaf(z[j], LOG2_E, -by.from)) * by.to_p;
            d[j] = (i + j == by.target ? d[j] - by.target_logit : d[j]) * (1.0f - bent * bent);
        }
        mn_store_vec(to, i, d);
    }
}

/* The same from e. The target's is put once more, by its own thread: `there` is its e. */
template <mn_operand_types TYPES>
__device__ static void store_grad_regs(const float (&kept)[KEPT][MN_VEC], mn_operand to, int V,
                                const row_scale &by, float target_e) {
#pragma unroll
    for (int k = 0; k < KEPT; k++) {
        if (column_of(k) >= V) continue;
        float d[MN_VEC];
#pragma unroll
        for (int j = 0; j < MN_VEC; j++) d[j] = kept[k][j] * by.to_p;
        mn_store_vec<TYPES>(to, column_of(k), d);
    }
    const bool own = by.target / MN_VEC % THREADS == (int)threadIdx.x;
    if (own && by.target < V) mn_operand_store<TYPES>(to, by.target,
                                                      target_e * by.to_p - by.target_logit);
}

__device__ static void store_grad_zeros(const mn_loss_params &w, mn_operand to) {
    const float zeros[MN_VEC] = {};
    for (int64_t i = threadIdx.x * MN_VEC; i < w.V; i += THREADS * MN_VEC) {
        mn_store_vec(to, i, zeros);
    }
}

/* Where the gradients of row `item` of the chunk go. */
__device__ static mn_operand grad_operand(const mn_loss_params &w, int item) {
    const bool is_f32 = w.dlogits.dtype == MN_F32;
    const int64_t bytes = item * w.dlogits.stride[1] * (is_f32 ? sizeof(float) : sizeof(mn_bf16));
    return { (char *)w.dlogits.data + bytes, { 0, 0, 0, 1 }, is_f32 };
}

/* ---- rows ------------------------------------------------------------------------------------ */

/* A row of the chunk: its place there and in the batch. */
struct row_at {
    int item, row, target;
};

__device__ static row_at row_of(const mn_loss_params &w, int item) {
    if (item >= w.n) return { item, 0, -1 };
    const int row = w.kept ? w.kept[w.first + item] : (int)w.first + item;
    return { item, row, w.targets[row] };
}

__device__ static const float *row_logits(const mn_loss_params &w, int item) {
    return (const float *)w.logits.data + item * w.logits.stride[1];
}

/* What waits in a row's positions for its loss. */
__device__ static void store_row_sums(const mn_loss_params &w, const row_at &at,
                                      const row_sums &sums,
                                float target_logit) {
    *(row_sums *)(w.nll + at.row) = sums;
    *(float *)(w.lse2 + at.row) = target_logit;
}

/* The losses of the block's rows, a thread each. */
__device__ static void finish_losses(const mn_loss_params &w) {
    __syncthreads();
    const int64_t step = (int64_t)gridDim.x * THREADS;
    for (int64_t item = blockIdx.x + threadIdx.x * (int64_t)gridDim.x; item < w.n; item += step) {
        const row_at at = row_of(w, (int)item);
        const row_sums sums = *(const row_sums *)(w.nll + at.row);
        const float target_logit = *(const float *)(w.lse2 + at.row);
        const double lse = at.target < 0 ? 0.0 : logsumexp<double>(sums);
        const double target_e = at.target < w.V ? softcap(target_logit, (float)w.cap) : NAN;
        w.nll[at.row] = at.target < 0 ? 0.0 : lse - target_e;
        w.lse2[at.row] = lse * lse;
    }
}

/* What `to_p` is for e as the whole row makes them; `scale` is what all its gradients have. */
__device__ static float prob_scale(const mn_loss_params &w, const row_sums &all, float scale) {
    const float to_p = scale / all.sum;
    if (w.z_loss == 0.0) return to_p;
    return to_p * (1.0f + 2.0f * (float)w.z_loss * logsumexp<float>(all));
}

__device__ static float grad_scale(const mn_loss_params &w) {
    return (float)(w.weight / (double)max(w.result->counted, (int64_t)1));
}

/* Blocks of a processor: 8.6, 8.9 and 12.x have room for 1,536 threads, others for 2,048. */
#if defined(__CUDA_ARCH__) && \
    (__CUDA_ARCH__ >= 1200 || (__CUDA_ARCH__ > 800 && __CUDA_ARCH__ < 900))
#define MN_REREAD_BLOCKS 1
#else
#define MN_REREAD_BLOCKS 2
#endif

__global__ void __launch_bounds__(THREADS, MN_REREAD_BLOCKS)
loss_reread_kernel(const __grid_constant__ mn_loss_params w) {
    __shared__ row_smem smem;
    const float scale = grad_scale(w);
    int phase = 0;
    for (int item = (int)blockIdx.x; item < w.n; item += (int)gridDim.x, phase ^= 1) {
        const row_at at = row_of(w, item);
        const float *z = row_logits(w, item);
        const bool owns_target = threadIdx.x == 0 && at.target >= 0 && at.target < w.V;
        const float target_logit = owns_target ? z[at.target] : 0.0f;
        const row_sums all = block_sums(sumexp_reread(w, z), smem.warps[phase]);
        if (threadIdx.x == 0) store_row_sums(w, at, all, target_logit);
        __syncthreads();    // the target's logit has been read before its place is written
        if (!w.dlogits.data) continue;
        const float own = w.share && at.target >= 0 ? scale * (float)w.share[at.row] : scale;
        if (at.target < 0) store_grad_zeros(w, grad_operand(w, item));
        else store_grad_reread(w, z, grad_operand(w, item),
                      { all.from, prob_scale(w, all, own), own, at.target });
    }
    finish_losses(w);
}

template <mn_operand_types TYPES>
__global__ void __launch_bounds__(THREADS)
    loss_regs_kernel(const __grid_constant__ mn_loss_params w) {
    __shared__ row_smem smem;
    __shared__ uint64_t full[KEPT];
    const row_prefetch prefetch(full);
    const int V = (int)w.V, stride = (int)gridDim.x;
    const float scale = grad_scale(w);
    float kept[KEPT][MN_VEC];
    row_at at = row_of(w, (int)blockIdx.x);
    const float *z = row_logits(w, at.item);
    prefetch.issue(z, V);
    for (int phase = 0; at.item < w.n; phase ^= 1) {
        const row_at next = row_of(w, at.item + stride);
        const float *next_row = z + stride * w.logits.stride[1];
        const float own = w.share && at.target >= 0 ? scale * (float)w.share[at.row] : scale;
        const bool owns_target = threadIdx.x == 0 && at.target >= 0 && at.target < V;
        const float target_logit = owns_target ? z[at.target] : 0.0f;
#pragma unroll
        for (int k = 0; k < KEPT; k++) {
            if (column_of(k) < V) {
                prefetch.consume(kept[k], k, phase);
            } else {
#pragma unroll
                for (int j = 0; j < MN_VEC; j++) kept[k][j] = -INFINITY;
            }
        }
        prefetch.release();
        if (next.item < w.n) prefetch.issue(next_row, V);
        const row_sums local = sumexp_regs(kept, V);
        if (threadIdx.x == 0) smem.target_logit[phase] = target_logit;
        const row_sums all = block_sums(local, smem.warps[phase]);
        if (threadIdx.x == 0) store_row_sums(w, at, all, target_logit);
        if (w.dlogits.data && at.target < 0) {
            store_grad_zeros(w, grad_operand(w, at.item));
        } else if (w.dlogits.data) {
            const float part = local.from == -INFINITY ? 1.0f : exp2_approx(local.from - all.from);
            const float target_e = exp2_approx(fmaf(smem.target_logit[phase], LOG2_E, -local.from));
            store_grad_regs<TYPES>(kept, grad_operand(w, at.item), V,
                            { 0.0f, prob_scale(w, all, own) * part, own, at.target }, target_e);
        }
        at = next;
        z = next_row;
    }
    finish_losses(w);
}

MN_CUDA_ELEMENTWISE(loss) {
    const mn_loss_params *w = (const mn_loss_params *)args;
    const cudaStream_t on = (cudaStream_t)backend;
    (void)workspace;
    if (w->n == 0) return cudaSuccess;
    if (w->V > THREADS * KEPT * MN_VEC || w->cap > 0.0) {
        loss_reread_kernel<<<mn_blocks(w->n, 1, 2 * SM_COUNT), THREADS, 0, on>>>(*w);
        return mn_launch_status();
    }
    const size_t smem = (size_t)THREADS * KEPT * MN_VEC * sizeof(float);
    const bool is_f32 = w->dlogits.dtype == MN_F32;
    return mn_launch_smem(is_f32 ? loss_regs_kernel<MN_ALL_F32> : loss_regs_kernel<MN_ALL_BF16>,
                               dim3(mn_blocks(w->n, 1, SM_COUNT)), THREADS, smem, on, *w);
}

/* ---- what is reported ------------------------------------------------------------------------ */

/* The sum over the block, in one thread: threads' sums added in their order. */
__device__ static double block_sum(double x, double *smem) {
    smem[threadIdx.x] = x;
    __syncthreads();
    for (int half = THREADS / 2; half > 0; half /= 2) {
        if (threadIdx.x < half) smem[threadIdx.x] += smem[threadIdx.x + half];
        __syncthreads();
    }
    const double all = smem[0];
    __syncthreads();
    return all;
}

__global__ void __launch_bounds__(THREADS)
    count_targets_kernel(const __grid_constant__ mn_count_params w) {
    __shared__ double smem[THREADS];
    int64_t n = 0;
    for (int64_t i = threadIdx.x; i < w.n; i += THREADS) n += w.targets[i] >= 0;
    const double all = block_sum((double)n, smem);
    if (threadIdx.x == 0) *w.result = { 0.0, (int64_t)all };
}

MN_CUDA_ELEMENTWISE(count) {
    (void)workspace;
    count_targets_kernel<<<1, THREADS, 0, (cudaStream_t)backend>>>(*(const mn_count_params *)args);
    return mn_launch_status();
}

__global__ void __launch_bounds__(THREADS)
    loss_total_kernel(const __grid_constant__ mn_total_params w) {
    __shared__ double smem[THREADS];
    double nll = 0.0, lse2 = 0.0;
    for (int64_t row = threadIdx.x; row < w.rows; row += THREADS) {
        nll += w.nll[row];
        if (w.lse2) lse2 += w.lse2[row];
        if (w.given) w.given[row] = (float)w.nll[row];
    }
    nll = block_sum(nll, smem);
    lse2 = block_sum(lse2, smem);
    const int64_t counted = w.result->counted;
    if (threadIdx.x != 0) return;
    w.result->loss = counted ? (nll + w.z_loss * lse2) / (double)counted : 0.0;
}

MN_CUDA_ELEMENTWISE(total) {
    (void)workspace;
    loss_total_kernel<<<1, THREADS, 0, (cudaStream_t)backend>>>(*(const mn_total_params *)args);
    return mn_launch_status();
}

__global__ void __launch_bounds__(THREADS)
    loss_mix_kernel(const __grid_constant__ mn_mix_params w) {
    const int64_t row = blockIdx.x * (int64_t)THREADS + threadIdx.x;
    if (row >= w.rows) return;
    double *nll = w.nll + row, least = *nll, sum = 0.0;
    for (int s = 1; s < w.n; s++) least = fmin(least, nll[s * w.rows]);
    for (int s = 0; s < w.n; s++) sum += exp(least - nll[s * w.rows]);
    for (int s = 0; s < w.n; s++) nll[s * w.rows] = exp(least - nll[s * w.rows]) / sum;
    w.mixed[row] = w.targets[row] < 0 ? 0.0 : least - log(sum) + log((double)w.n);
}

MN_CUDA_ELEMENTWISE(mix) {
    const mn_mix_params *w = (const mn_mix_params *)args;
    (void)workspace;
    if (w->rows == 0) return cudaSuccess;
    loss_mix_kernel<<<mn_blocks(w->rows, THREADS), THREADS, 0, (cudaStream_t)backend>>>(*w);
    return mn_launch_status();
}

/* ---- finite ---------------------------------------------------------------------------------- */

__global__ void finite_init_kernel(int64_t *first, int64_t n) {
    *first = n;
}

/* The least index: whichever thread is first, the result is the same. */
__global__ void __launch_bounds__(THREADS) finite_kernel(mn_operand x, int64_t n, int64_t *first) {
    const int64_t step = gridDim.x * (int64_t)THREADS;
    for (int64_t i = blockIdx.x * (int64_t)THREADS + threadIdx.x; i < n; i += step) {
        if (!isfinite(mn_operand_load(x, i))) {
            atomicMin((unsigned long long *)first, (unsigned long long)i);
            return;
        }
    }
}

MN_CUDA_ELEMENTWISE(finite) {
    const mn_finite_params *w = (const mn_finite_params *)args;
    const cudaStream_t on = (cudaStream_t)backend;
    (void)workspace;
    finite_init_kernel<<<1, 1, 0, on>>>(w->first, w->n);
    finite_kernel<<<mn_blocks(w->n, THREADS, 4096), THREADS, 0, on>>>(mn_operand_of(w->x), w->n,
                                                                     w->first);
    return mn_launch_status();
}

}    // namespace mneme::loss
