/* logits_loss.cu - losses and gradients of rows of logits (equations in tape/loss.c), and what is
 * told of a loss.
 *
 * A block takes row after row. A thread finds its largest logit, z log2 e of it is `from`, and
 * makes e = 2^(z log2 e - from) of each of its logits, once: their sum is brought to those of the
 * others, and the gradient is e by a factor that makes it a share of the whole row. Rows of up to
 * 32768 logits, or their e, stay in registers between the two; longer rows are read again from the
 * second cache. Only one block fits a processor that keeps its rows, so the next row is on its way
 * to shared memory meanwhile: as soon as a thread has taken a pack it requests for the next row's
 * in
 * its place. What a block does once per row is short, as all of its warps wait for it: logarithms
 * in double come after the last row, many at a time.
 *
 * Logits are float32 and rows begin at 16 bytes; gradients are float32 in their place, or bf16
 * elsewhere. e is off by about |z - top| 2^-24 of itself, most where it counts least. */
#include "kernels/cuda/prim/tma.cuh"
#include "kernels/cuda/elementwise/elementwise.cuh"

enum {
    THREADS = 1024,
    WARPS = THREADS / 32,
    KEPT = 4,            // packs of a row that a thread keeps
    PROCESSORS = 132,    // of an H200
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
    float hit[2];
};

__device__ static float capped(float z, float cap) {
    return cap > 0.0f ? cap * tanhf(z / cap) : z;
}

/* 2^x, 0 where that is below the smallest normal float */
__device__ static float power(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

/* Column of a thread's pack k. */
__device__ static int column_of(int k) {
    return ((int)threadIdx.x + k * THREADS) * MN_PACK;
}

/* The numbers [i, i + 8) of a row; -infinity behind its end. */
__device__ static void load_logits(float (&z)[MN_PACK], const float *row, int64_t i, int64_t V,
                                   float cap) {
    const float4 low = *(const float4 *)(row + i), high = *(const float4 *)(row + i + 4);
    const float raw[MN_PACK] = { low.x, low.y, low.z, low.w, high.x, high.y, high.z, high.w };
#pragma unroll
    for (int j = 0; j < MN_PACK; j++) z[j] = i + j < V ? capped(raw[j], cap) : -INFINITY;
}

/* ---- rows on their way to shared memory ------------------------------------------------------
 *
 * On machines from 9.0 on the copy engine brings a row in KEPT pieces, a pack for each thread: when
 * threads ask for their own, loads that have to wait hold up what else goes the same way, such as
 * exponentials. Elsewhere they do. */
struct coming_row {
    float *row;
    uint64_t *come;    // a barrier for each piece

    __device__ coming_row(uint64_t *barriers) : come(barriers) {
        extern __shared__ float4 space[];
        row = (float *)space;
#if __CUDA_ARCH__ >= 900
        if (threadIdx.x == 0) {
            for (int k = 0; k < KEPT; k++) mn_mbarrier_init(come + k, 1);
            mn_mbarrier_init_fence();
        }
        __syncthreads();
#endif
    }

    /* Asks for a row of V logits, whose end may be as far as the next 16 bytes. */
    __device__ void ask(const float *from, int V) const {
#if __CUDA_ARCH__ >= 900
        constexpr int PIECE = THREADS * MN_PACK;
        for (int k = 0; threadIdx.x == 0 && k * PIECE < V; k++) {
            const int bytes = (min(V - k * PIECE, PIECE) + 3) / 4 * 16;
            mn_mbarrier_arrive_expect_tx(come + k, bytes);
            mn_tma_load_bulk(row + k * PIECE, from + k * PIECE, bytes, come + k);
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
    __device__ void take(float (&z)[MN_PACK], int k, int turn) const {
#if __CUDA_ARCH__ >= 900
        mn_mbarrier_wait(come + k, turn);
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

    /* This thread has taken its packs; the one that requests waits for all. */
    __device__ void taken() const {
#if __CUDA_ARCH__ >= 900
        if (threadIdx.x < 32) asm volatile("bar.sync 1, %0;" ::"r"((int)THREADS) : "memory");
        else asm volatile("bar.arrive 1, %0;" ::"r"((int)THREADS) : "memory");
#endif
    }
};

/* ---- sums over a row ------------------------------------------------------------------------- */

__device__ static row_sums warp_sums(row_sums x) {
    const float from = mn_warp_max(x.from);
    if (x.from != -INFINITY) x.sum *= power(x.from - from);
    return { from, mn_warp_sum(x.sum) };
}

/* The sums of all threads, warps in their order, in all of them. */
__device__ static row_sums block_sums(row_sums x, row_sums *room) {
    x = warp_sums(x);
    if (threadIdx.x % 32 == 0) room[threadIdx.x / 32] = x;
    __syncthreads();
    return warp_sums(room[threadIdx.x % WARPS]);
}

/* The sums of logits that are kept, which become e. Packs behind the end of the row are -infinity
 * here, and the last one is where the row ends within it. */
__device__ static row_sums sum_kept(float (&kept)[KEPT][MN_PACK], int V) {
    if (V % MN_PACK != 0) {
#pragma unroll
        for (int k = 0; k < KEPT; k++) {
#pragma unroll
            for (int j = 0; j < MN_PACK; j++) {
                if (column_of(k) + j >= V) kept[k][j] = -INFINITY;
            }
        }
    }
    float most = -INFINITY, sum = 0.0f;
#pragma unroll
    for (int k = 0; k < KEPT; k++) {
#pragma unroll
        for (int j = 0; j < MN_PACK; j++) most = fmaxf(most, kept[k][j]);
    }
    const float from = most * LOG2_E, less = most == -INFINITY ? 0.0f : -from;
#pragma unroll
    for (int k = 0; k < KEPT; k++) {
        float part = 0.0f;
#pragma unroll
        for (int j = 0; j < MN_PACK; j++) {
            kept[k][j] = power(fmaf(kept[k][j], LOG2_E, less));
            part += kept[k][j];
        }
        sum += part;
    }
    return { from, sum };
}

__device__ static row_sums sum_read(const mn_loss_work &w, const float *row) {
    float from = -INFINITY, sum = 0.0f, z[MN_PACK];
    for (int64_t i = threadIdx.x * MN_PACK; i < w.V; i += THREADS * MN_PACK) {
        load_logits(z, row, i, w.V, (float)w.cap);
        float most = from;
#pragma unroll
        for (int j = 0; j < MN_PACK; j++) most = fmaxf(most, LOG2_E * z[j]);
        if (from != -INFINITY) sum *= power(from - most);
        from = most;
#pragma unroll
        for (int j = 0; j < MN_PACK; j++) {
            sum += power(fmaf(z[j], LOG2_E, from == -INFINITY ? 0.0f : -from));
        }
    }
    return { from, sum };
}

/* log of the sum over the row of e^z: log2 e of a float makes `from` what it is. */
template <typename REAL>
__device__ static REAL log_sum(const row_sums &sums) {
    return log((REAL)sums.sum) + (REAL)sums.from / (REAL)LOG2_E;
}

/* ---- gradients ------------------------------------------------------------------------------- */

/* What the gradients of a row are made with: e = 2^(z log2 e - from). */
struct row_scale {
    float from, to_p, hit;
    int target;
};

/* dz = (softmax(z) to_p - hit) (1 - (z / cap)^2) */
__device__ static void put_read(const mn_loss_work &w, const float *row, mn_side to,
                                const row_scale &by) {
    const float part = w.cap > 0.0 ? 1.0f / (float)w.cap : 0.0f;
    for (int64_t i = threadIdx.x * MN_PACK; i < w.V; i += THREADS * MN_PACK) {
        float z[MN_PACK], d[MN_PACK];
        load_logits(z, row, i, w.V, (float)w.cap);
#pragma unroll
        for (int j = 0; j < MN_PACK; j++) {
            const float bent = i + j < w.V ? z[j] * part : 0.0f;
            d[j] = power(fmaf(z[j], LOG2_E, -by.from)) * by.to_p;
            d[j] = (i + j == by.target ? d[j] - by.hit : d[j]) * (1.0f - bent * bent);
        }
        mn_store_pack(to, i, d);
    }
}

/* The same from e. The target's is put once more, by its own thread: `there` is its e. */
template <mn_types TYPES>
__device__ static void put_kept(const float (&kept)[KEPT][MN_PACK], mn_side to, int V,
                                const row_scale &by, float there) {
#pragma unroll
    for (int k = 0; k < KEPT; k++) {
        if (column_of(k) >= V) continue;
        float d[MN_PACK];
#pragma unroll
        for (int j = 0; j < MN_PACK; j++) d[j] = kept[k][j] * by.to_p;
        mn_store_pack<TYPES>(to, column_of(k), d);
    }
    const bool own = by.target / MN_PACK % THREADS == (int)threadIdx.x;
    if (own && by.target < V) mn_side_put<TYPES>(to, by.target, there * by.to_p - by.hit);
}

__device__ static void put_zeros(const mn_loss_work &w, mn_side to) {
    const float zeros[MN_PACK] = {};
    for (int64_t i = threadIdx.x * MN_PACK; i < w.V; i += THREADS * MN_PACK) {
        mn_store_pack(to, i, zeros);
    }
}

/* Where the gradients of row `item` of the piece go. */
__device__ static mn_side gradients_of(const mn_loss_work &w, int item) {
    const bool wide = w.dlogits.dtype == MN_F32;
    const int64_t bytes = item * w.dlogits.stride[1] * (wide ? sizeof(float) : sizeof(mn_bf16));
    return { (char *)w.dlogits.data + bytes, { 0, 0, 0, 1 }, wide };
}

/* ---- rows ------------------------------------------------------------------------------------ */

/* A row of the piece: its place there and in the batch. */
struct row_at {
    int item, row, target;
};

__device__ static row_at row_of(const mn_loss_work &w, int item) {
    if (item >= w.n) return { item, 0, -1 };
    const int row = w.kept ? w.kept[w.first + item] : (int)w.first + item;
    return { item, row, w.targets[row] };
}

__device__ static const float *logits_of(const mn_loss_work &w, int item) {
    return (const float *)w.logits.data + item * w.logits.stride[1];
}

/* What waits in a row's places for its loss. */
__device__ static void note_row(const mn_loss_work &w, const row_at &at, const row_sums &sums,
                                float hit) {
    *(row_sums *)(w.nll + at.row) = sums;
    *(float *)(w.lse2 + at.row) = hit;
}

/* The losses of the block's rows, a thread each. */
__device__ static void finish_rows(const mn_loss_work &w) {
    __syncthreads();
    const int64_t step = (int64_t)gridDim.x * THREADS;
    for (int64_t item = blockIdx.x + threadIdx.x * (int64_t)gridDim.x; item < w.n; item += step) {
        const row_at at = row_of(w, (int)item);
        const row_sums sums = *(const row_sums *)(w.nll + at.row);
        const float hit = *(const float *)(w.lse2 + at.row);
        const double lse = at.target < 0 ? 0.0 : log_sum<double>(sums);
        const double there = at.target < w.V ? capped(hit, (float)w.cap) : NAN;
        w.nll[at.row] = at.target < 0 ? 0.0 : lse - there;
        w.lse2[at.row] = lse * lse;
    }
}

/* What `to_p` is for e as the whole row makes them; `scale` is what all its gradients have. */
__device__ static float share_of(const mn_loss_work &w, const row_sums &all, float scale) {
    const float to_p = scale / all.sum;
    if (w.z_loss == 0.0) return to_p;
    return to_p * (1.0f + 2.0f * (float)w.z_loss * log_sum<float>(all));
}

__device__ static float scale_of(const mn_loss_work &w) {
    return (float)(w.weight / (double)max(w.result->counted, (int64_t)1));
}

__global__ void __launch_bounds__(THREADS, 2)
reread_kernel(const __grid_constant__ mn_loss_work w) {
    __shared__ row_smem room;
    const float scale = scale_of(w);
    int turn = 0;
    for (int item = (int)blockIdx.x; item < w.n; item += (int)gridDim.x, turn ^= 1) {
        const row_at at = row_of(w, item);
        const float *z = logits_of(w, item);
        const bool hits = threadIdx.x == 0 && at.target >= 0 && at.target < w.V;
        const float hit = hits ? z[at.target] : 0.0f;
        const row_sums all = block_sums(sum_read(w, z), room.warps[turn]);
        if (threadIdx.x == 0) note_row(w, at, all, hit);
        __syncthreads();    // the target's logit has been read before its place is written
        if (!w.dlogits.data) continue;
        const float own = w.share && at.target >= 0 ? scale * (float)w.share[at.row] : scale;
        if (at.target < 0) put_zeros(w, gradients_of(w, item));
        else put_read(w, z, gradients_of(w, item),
                      { all.from, share_of(w, all, own), own, at.target });
    }
    finish_rows(w);
}

template <mn_types TYPES>
__global__ void __launch_bounds__(THREADS) kept_kernel(const __grid_constant__ mn_loss_work w) {
    __shared__ row_smem room;
    __shared__ uint64_t come[KEPT];
    const coming_row coming(come);
    const int V = (int)w.V, stride = (int)gridDim.x;
    const float scale = scale_of(w);
    float kept[KEPT][MN_PACK];
    row_at at = row_of(w, (int)blockIdx.x);
    const float *z = logits_of(w, at.item);
    coming.ask(z, V);
    for (int turn = 0; at.item < w.n; turn ^= 1) {
        const row_at next = row_of(w, at.item + stride);
        const float *behind = z + stride * w.logits.stride[1];
        const float own = w.share && at.target >= 0 ? scale * (float)w.share[at.row] : scale;
        const bool hits = threadIdx.x == 0 && at.target >= 0 && at.target < V;
        const float hit = hits ? z[at.target] : 0.0f;
#pragma unroll
        for (int k = 0; k < KEPT; k++) {
            if (column_of(k) < V) {
                coming.take(kept[k], k, turn);
            } else {
#pragma unroll
                for (int j = 0; j < MN_PACK; j++) kept[k][j] = -INFINITY;
            }
        }
        coming.taken();
        if (next.item < w.n) coming.ask(behind, V);
        const row_sums mine = sum_kept(kept, V);
        if (threadIdx.x == 0) room.hit[turn] = hit;
        const row_sums all = block_sums(mine, room.warps[turn]);
        if (threadIdx.x == 0) note_row(w, at, all, hit);
        if (w.dlogits.data && at.target < 0) {
            put_zeros(w, gradients_of(w, at.item));
        } else if (w.dlogits.data) {
            const float part = mine.from == -INFINITY ? 1.0f : power(mine.from - all.from);
            const float there = power(fmaf(room.hit[turn], LOG2_E, -mine.from));
            put_kept<TYPES>(kept, gradients_of(w, at.item), V,
                            { 0.0f, share_of(w, all, own) * part, own, at.target }, there);
        }
        at = next;
        z = behind;
    }
    finish_rows(w);
}

MN_CUDA_WORK(loss) {
    const mn_loss_work *w = (const mn_loss_work *)work;
    const cudaStream_t on = (cudaStream_t)where;
    (void)space;
    if (w->n == 0) return cudaSuccess;
    if (w->V > THREADS * KEPT * MN_PACK || w->cap > 0.0) {
        reread_kernel<<<mn_blocks(w->n, 1, 2 * PROCESSORS), THREADS, 0, on>>>(*w);
        return mn_launch_status();
    }
    const size_t room = (size_t)THREADS * KEPT * MN_PACK * sizeof(float);
    const bool wide = w->dlogits.dtype == MN_F32;
    return mn_launch_smem(wide ? kept_kernel<MN_WIDE> : kept_kernel<MN_NARROW>,
                               dim3(mn_blocks(w->n, 1, PROCESSORS)), THREADS, room, on, *w);
}

/* ---- what is told ---------------------------------------------------------------------------- */

/* The sum over the block, in one thread: threads' sums added in their order. */
__device__ static double block_sum(double x, double *room) {
    room[threadIdx.x] = x;
    __syncthreads();
    for (int half = THREADS / 2; half > 0; half /= 2) {
        if (threadIdx.x < half) room[threadIdx.x] += room[threadIdx.x + half];
        __syncthreads();
    }
    const double all = room[0];
    __syncthreads();
    return all;
}

__global__ void __launch_bounds__(THREADS) count_kernel(const __grid_constant__ mn_count_work w) {
    __shared__ double room[THREADS];
    int64_t n = 0;
    for (int64_t i = threadIdx.x; i < w.n; i += THREADS) n += w.targets[i] >= 0;
    const double all = block_sum((double)n, room);
    if (threadIdx.x == 0) *w.result = { 0.0, (int64_t)all };
}

MN_CUDA_WORK(count) {
    (void)space;
    count_kernel<<<1, THREADS, 0, (cudaStream_t)where>>>(*(const mn_count_work *)work);
    return mn_launch_status();
}

__global__ void __launch_bounds__(THREADS) total_kernel(const __grid_constant__ mn_total_work w) {
    __shared__ double room[THREADS];
    double nll = 0.0, lse2 = 0.0;
    for (int64_t row = threadIdx.x; row < w.rows; row += THREADS) {
        nll += w.nll[row];
        if (w.lse2) lse2 += w.lse2[row];
        if (w.given) w.given[row] = (float)w.nll[row];
    }
    nll = block_sum(nll, room);
    lse2 = block_sum(lse2, room);
    const int64_t counted = w.result->counted;
    if (threadIdx.x != 0) return;
    w.result->loss = counted ? (nll + w.z_loss * lse2) / (double)counted : 0.0;
}

MN_CUDA_WORK(total) {
    (void)space;
    total_kernel<<<1, THREADS, 0, (cudaStream_t)where>>>(*(const mn_total_work *)work);
    return mn_launch_status();
}

__global__ void __launch_bounds__(THREADS) mix_kernel(const __grid_constant__ mn_mix_work w) {
    const int64_t row = blockIdx.x * (int64_t)THREADS + threadIdx.x;
    if (row >= w.rows) return;
    double *nll = w.nll + row, least = *nll, sum = 0.0;
    for (int s = 1; s < w.n; s++) least = fmin(least, nll[s * w.rows]);
    for (int s = 0; s < w.n; s++) sum += exp(least - nll[s * w.rows]);
    for (int s = 0; s < w.n; s++) nll[s * w.rows] = exp(least - nll[s * w.rows]) / sum;
    w.mixed[row] = w.targets[row] < 0 ? 0.0 : least - log(sum) + log((double)w.n);
}

MN_CUDA_WORK(mix) {
    const mn_mix_work *w = (const mn_mix_work *)work;
    (void)space;
    if (w->rows == 0) return cudaSuccess;
    mix_kernel<<<mn_blocks(w->rows, THREADS), THREADS, 0, (cudaStream_t)where>>>(*w);
    return mn_launch_status();
}

/* ---- finite ---------------------------------------------------------------------------------- */

__global__ void all_finite_kernel(int64_t *first, int64_t n) {
    *first = n;
}

/* The least index: whichever thread is first, the result is the same. */
__global__ void __launch_bounds__(THREADS) finite_kernel(mn_side x, int64_t n, int64_t *first) {
    const int64_t step = gridDim.x * (int64_t)THREADS;
    for (int64_t i = blockIdx.x * (int64_t)THREADS + threadIdx.x; i < n; i += step) {
        if (!isfinite(mn_side_get(x, i))) {
            atomicMin((unsigned long long *)first, (unsigned long long)i);
            return;
        }
    }
}

MN_CUDA_WORK(finite) {
    const mn_finite_work *w = (const mn_finite_work *)work;
    const cudaStream_t on = (cudaStream_t)where;
    (void)space;
    all_finite_kernel<<<1, 1, 0, on>>>(w->first, w->n);
    finite_kernel<<<mn_blocks(w->n, THREADS, 4096), THREADS, 0, on>>>(mn_side_of(w->x), w->n,
                                                                     w->first);
    return mn_launch_status();
}
