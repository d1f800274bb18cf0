/* tape_loss.cu - losses and gradients of rows of logits (equations in ops/tape_loss.c), and what is
 * told of a loss.
 *
 * A block takes row after row: one pass makes its largest logit and the sum of exp(z - largest), a
 * second one the gradient. Rows of up to 32768 logits stay in registers between the two, and the
 * block's next row is on its way to shared memory meanwhile: only one such block fits a processor,
 * so that nothing else would hide the time a row takes to come. Longer rows are read again from the
 * second cache. Logits are float32 and rows begin at 16 bytes; gradients are float32 in their
 * place, or bf16 elsewhere. __expf(z - top) is off by about |z -
 * top| 2^-24 of itself, most where it counts least. */
#include "kernels/cuda/each.cuh"

enum {
    THREADS = 1024,
    KEPT = 4,            // packs of a row that a thread keeps
    PROCESSORS = 132,    // of an H200
};

struct row_sums {
    float top, sum;
};

__device__ static float capped(float z, float cap) {
    return cap > 0.0f ? cap * tanhf(z / cap) : z;
}

/* The numbers [i, i + 8) of a row; -infinity behind its end. */
__device__ static void load_logits(float (&z)[MN_PACK], const float *row, int64_t i, int64_t V,
                                   float cap) {
    const float4 low = *(const float4 *)(row + i), high = *(const float4 *)(row + i + 4);
    const float raw[MN_PACK] = { low.x, low.y, low.z, low.w, high.x, high.y, high.z, high.w };
#pragma unroll
    for (int j = 0; j < MN_PACK; j++) z[j] = i + j < V ? capped(raw[j], cap) : -INFINITY;
}

/* Column of a thread's pack k. */
__device__ static int64_t column_of(int k) {
    return (threadIdx.x + k * (int64_t)THREADS) * MN_PACK;
}

/* A row on its way to shared memory: each thread asks for its own packs and takes no others, so
 * that nobody waits for anybody. Half a pack lies THREADS * 16 bytes from the other. */
struct next_row {
    uint32_t at;    // shared address of the thread's first half pack

    __device__ next_row() {
        extern __shared__ float4 space[];
        at = (uint32_t)__cvta_generic_to_shared(space + threadIdx.x);
    }

    __device__ uint32_t half(int k, int which) const {
        return at + (2 * k + which) * THREADS * 16;
    }

    __device__ void ask(const float *row, int64_t V) const {
#pragma unroll
        for (int k = 0; k < KEPT; k++) {
            const int64_t i = column_of(k);
#pragma unroll
            for (int which = 0; which < 2 && i < V; which++) {
                asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(half(k, which)),
                             "l"(row + i + 4 * which) : "memory");
            }
        }
        asm volatile("cp.async.commit_group;" ::: "memory");
    }

    __device__ void take(float (&kept)[KEPT][MN_PACK], int64_t V, float cap) const {
        asm volatile("cp.async.wait_group 0;" ::: "memory");
#pragma unroll
        for (int k = 0; k < KEPT; k++) {
            float z[MN_PACK] = {};
#pragma unroll
            for (int which = 0; which < 2; which++) {
                float *to = z + 4 * which;
                asm volatile("ld.shared.v4.f32 {%0, %1, %2, %3}, [%4];"
                             : "=f"(to[0]), "=f"(to[1]), "=f"(to[2]), "=f"(to[3])
                             : "r"(half(k, which)) : "memory");
            }
#pragma unroll
            for (int j = 0; j < MN_PACK; j++) {
                kept[k][j] = column_of(k) + j < V ? capped(z[j], cap) : -INFINITY;
            }
        }
    }
};

/* Visits the packs of a thread, those kept or else read once more: use(i, z) with their first
 * column and their logits. */
template <bool KEEPS, typename F>
__device__ static void each_pack(const mn_loss_work &w, const float *row,
                                 float (&kept)[KEEPS ? KEPT : 1][MN_PACK], F use) {
    if constexpr (KEEPS) {
#pragma unroll
        for (int k = 0; k < KEPT; k++) {
            if (column_of(k) < w.V) use(column_of(k), kept[k]);
        }
    } else {
        for (int64_t i = threadIdx.x * MN_PACK; i < w.V; i += THREADS * MN_PACK) {
            load_logits(kept[0], row, i, w.V, (float)w.cap);
            use(i, kept[0]);
        }
    }
}

template <bool KEEPS>
__device__ static row_sums sum_row(const mn_loss_work &w, const float *row,
                                   float (&kept)[KEEPS ? KEPT : 1][MN_PACK], float *room) {
    float top = -INFINITY, sum = 0.0f;
    each_pack<KEEPS>(w, row, kept, [&](int64_t, const float (&z)[MN_PACK]) {
        float most = top;
#pragma unroll
        for (int j = 0; j < MN_PACK; j++) most = fmaxf(most, z[j]);
        if (most > top) {
            sum *= expf(top - most);
            top = most;
        }
#pragma unroll
        for (int j = 0; j < MN_PACK; j++) sum += z[j] == -INFINITY ? 0.0f : __expf(z[j] - top);
    });
    const float all = mn_team_max<THREADS>(top, room);
    if (top != -INFINITY) sum *= expf(top - all);
    return { all, mn_team_sum<THREADS>(sum, room) };
}

/* What the gradients of a row are made with. */
struct row_scale {
    float top, to_p, hit;
    int64_t target;
};

/* dz = (softmax(z) to_p - hit) (1 - (z / cap)^2) */
template <bool KEEPS>
__device__ static void put_gradients(const mn_loss_work &w, const float *row,
                                     float (&kept)[KEEPS ? KEPT : 1][MN_PACK], mn_side to,
                                     row_scale by) {
    const float cap = (float)w.cap;
    each_pack<KEEPS>(w, row, kept, [&](int64_t i, const float (&z)[MN_PACK]) {
        float d[MN_PACK];
#pragma unroll
        for (int j = 0; j < MN_PACK; j++) {
            const float bend = cap > 0.0f ? 1.0f - z[j] / cap * (z[j] / cap) : 1.0f;
            const float p = i + j < w.V ? __expf(z[j] - by.top) * by.to_p : 0.0f;
            d[j] = (p - (i + j == by.target ? by.hit : 0.0f)) * (i + j < w.V ? bend : 0.0f);
        }
        mn_store_pack(to, i, d);
    });
}

/* Row `item` of the piece. */
template <bool KEEPS>
__device__ static void run_row(const mn_loss_work &w, int64_t item,
                               float (&kept)[KEEPS ? KEPT : 1][MN_PACK], float *room) {
    const int64_t row = w.kept ? w.kept[w.first + item] : w.first + item;
    const int64_t target = w.targets[row];
    const float *z = (const float *)w.logits.data + item * w.logits.stride[1];
    row_sums sums = { 0.0f, 1.0f };
    double lse = 0.0, nll = 0.0;
    if (target >= 0) {
        sums = sum_row<KEEPS>(w, z, kept, room);
        lse = log((double)sums.sum) + sums.top;
        nll = lse - (target < w.V ? capped(z[target], (float)w.cap) : NAN);
    }
    if (threadIdx.x == 0) {
        w.nll[row] = nll;
        w.lse2[row] = lse * lse;
    }
    if (!w.dlogits.data) return;
    const int64_t counted = max(w.result->counted, (int64_t)1);
    const double share = target < 0 ? 0.0 : w.share ? w.share[row] : 1.0;
    const double scale = w.weight / (double)counted * share;
    const float to_p = (float)(scale * (1.0 + 2.0 * w.z_loss * lse) / sums.sum);
    const bool wide = w.dlogits.dtype == MN_F32;
    const int64_t bytes = item * w.dlogits.stride[1] * (wide ? sizeof(float) : sizeof(mn_bf16));
    const mn_side to = { (char *)w.dlogits.data + bytes, { 0, 0, 0, 1 }, wide };
    __syncthreads();    // the target's logit has been read before its place is written
    if (target >= 0) {
        put_gradients<KEEPS>(w, z, kept, to, { sums.top, to_p, (float)scale, target });
        return;
    }
    const float zeros[MN_PACK] = {};
    for (int64_t i = threadIdx.x * MN_PACK; i < w.V; i += THREADS * MN_PACK) {
        mn_store_pack(to, i, zeros);
    }
}

template <bool KEEPS>
__global__ void __launch_bounds__(THREADS) loss_kernel(const __grid_constant__ mn_loss_work w) {
    __shared__ float room[32];
    float kept[KEEPS ? KEPT : 1][MN_PACK];
    const int64_t step = w.logits.stride[1];
    const float *z = (const float *)w.logits.data;
    if constexpr (KEEPS) {
        const next_row next;
        next.ask(z + blockIdx.x * step, w.V);
        for (int64_t item = blockIdx.x; item < w.n; item += gridDim.x) {
            next.take(kept, w.V, (float)w.cap);
            if (item + gridDim.x < w.n) next.ask(z + (item + gridDim.x) * step, w.V);
            run_row<true>(w, item, kept, room);
        }
    } else {
        for (int64_t item = blockIdx.x; item < w.n; item += gridDim.x) {
            run_row<false>(w, item, kept, room);
        }
    }
}

MN_CUDA_WORK(loss) {
    const mn_loss_work *w = (const mn_loss_work *)work;
    (void)space;
    if (w->n == 0) return cudaSuccess;
    const cudaStream_t on = (cudaStream_t)where;
    if (w->V > THREADS * KEPT * MN_PACK) {
        loss_kernel<false><<<mn_blocks(w->n, 1), THREADS, 0, on>>>(*w);
        return mn_launched();
    }
    const size_t room = (size_t)THREADS * KEPT * MN_PACK * sizeof(float);
    return mn_launch_with_room(loss_kernel<true>, dim3(mn_blocks(w->n, 1, PROCESSORS)), THREADS,
                               room, on, *w);
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
    return mn_launched();
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
    return mn_launched();
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
    return mn_launched();
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
    return mn_launched();
}
