/* curvature_fwd_chunk.cu - curvature forward: the products of smem_tiles, and which calls go to
 * those
 * of
 * Hopper. */
#include "kernels/cuda/curvature/curvature_fwd_sm90.cuh"
#include "kernels/cuda/curvature/curvature_smem.cuh"

template <typename T, int KP>
struct forward_smem {
    using z = mn_curve_sizes<T, KP>;
    alignas(16) T q[z::chunk * z::pitch];
    alignas(16) T k[z::chunk * z::pitch];
    alignas(16) T R[KP * MN_CURVE_PITCH];
    alignas(16) T P[z::chunk * z::score_pitch];
    float s[KP], within[z::chunk], before[z::chunk], mean[z::chunk], each[z::chunk];
};

template <typename T, int KP>
__global__ void __launch_bounds__(MN_CURVE_THREADS, KP == 256 ? 1 : 2)
curvature_forward_kernel(const __grid_constant__ mn_curvature_args p, const float *states,
                         mn_curve_cut cut) {
    using z = mn_curve_sizes<T, KP>;
    extern __shared__ __align__(128) unsigned char bytes[];
    forward_smem<T, KP> &room = *(forward_smem<T, KP> *)bytes;
    const mn_curve_place at = mn_curve_place_of(p.call, cut);
    if (!at.s.there) return;
    const int64_t K = p.call.K, h = at.h;
    const int warp = threadIdx.x / 32;
    const double seen = mn_curve_before(p, at.s.n);
    const float *sums =
        at.s.first > 0 ? mn_curve_sums_for(states, p.call, at, at.s.slot - 1) : NULL;
    const float *vector = sums ? sums + K * K : mn_row<float>(p.ks0, at.s.n, 0, h);
    mn_curve_matrix<T, KP> R;
    R.load(mn_row<float>(p.kk0, at.s.n, 0, h), sums, 0.5f, K, at.column0);
    for (int i = threadIdx.x; i < KP; i += MN_CURVE_THREADS) {
        room.s[i] = i < K ? mn_get(vector, i) : 0.0f;
    }
    for (int start = 0; start < at.s.rows; start += z::chunk) {
        const int count = min(z::chunk, at.s.rows - start);
        const int64_t t = at.s.first + start;
        mn_smem_tile_load(room.q, z::pitch, z::chunk, KP, p.q, at.s.span, h, t, count, K,
                          cut.packs);
        mn_smem_tile_load(room.k, z::pitch, z::chunk, KP, p.k, at.s.span, h, t, count, K,
                          cut.packs);
        R.put(room.R);
        if (threadIdx.x < z::chunk) {
            room.each[threadIdx.x] = (float)(1.0 / (seen + (double)(t + threadIdx.x + 1)));
        }
        __syncthreads();
        mn_smem_tile_sum<z::chunk / 8> P;
        if (warp < z::down) {
            mn_curve_scores<T, KP>(P, room.within, room.q, room.k, warp * 16);
        } else {
            mn_curve_dots<T, KP>(room.before, room.s, room.q, warp - z::down,
                                 MN_CURVE_WARPS - z::down);
        }
        __syncthreads();
        if (threadIdx.x < z::chunk) {
            const int i = threadIdx.x;
            room.mean[i] = (room.within[i] + room.before[i]) * room.each[i];
        }
        __syncthreads();
        if (warp < z::down) mn_curve_put_scores<T, KP>(room.P, P, room.mean, warp * 16);
        __syncthreads();
        mn_smem_tile_sum<z::columns / 8> Y;
        Y.clear();
        mn_curve_apply<T, KP>(Y, room.q, room.R, room.P, room.k, at.column0);
        Y.each([&](float &y, int row, int column) {
            const int token = warp % z::down * 16 + row;
            const int64_t j = at.column0 + warp / z::down * z::columns + column;
            T *qt = mn_row<T>(p.qt, at.s.span.b, at.s.span.t0 + t + token, h);
            if (token >= count || j >= K || !qt) return;
            const float gamma = mn_float(
                *mn_row<T>(p.gamma, at.s.span.b, at.s.span.t0 + t + token, h));
            const float q = mn_float(room.q[token * z::pitch + j]);
            const float centred = fmaf(-room.mean[token], room.s[j], y);
            mn_put(qt + j, fmaf(-gamma * room.each[token], centred, q));
        });
        R.add(room.k, room.k + at.column0);
        __syncthreads();
        for (int i = threadIdx.x; i < KP; i += MN_CURVE_THREADS) {
            room.s[i] += mn_curve_column_sum(room.k, z::pitch, z::chunk, i);
        }
        __syncthreads();
    }
    if (!at.s.last) return;
    R.store(mn_row<float>(p.kk, at.s.n, 0, h), 1.0f, K, at.column0);
    float *last = mn_row<float>(p.ks, at.s.n, 0, h);
    const int64_t column = at.column0 + threadIdx.x;
    __syncthreads();
    if (last && threadIdx.x < MN_CURVE_SLICE && column < K) last[column] = room.s[column];
}

/* ---- launches -------------------------------------------------------------------------------- */

MN_CUDA_PLAN(curvature_forward) {
    const mn_call *c = (const mn_call *)args;
    size_t count = 0;
    return (c->T <= MN_CURVE_SEGMENT || mn_curve_states_size(&count, c)) &&
           mn_mul_size(&plan->shared_bytes, count, sizeof(float));
}

template <typename T, int KP>
static int forward_of(const mn_curvature_args *p, float *states, cudaStream_t on) {
    const mn_curve_cut cut = mn_curve_smem_tile_cut<T>(p);
    const int code = mn_curve_add_up<T, KP, false>(p, states, NULL, cut, on);
    if (code != cudaSuccess) return code;
    return mn_curve_start(curvature_forward_kernel<T, KP>, MN_CURVE_THREADS,
                          sizeof(forward_smem<T, KP>), p->call, cut, on, *p, states);
}

/* `early`: blocks of the launch in front may still be at work. */
template <int KP>
static int start_group(const mn_curve_beside &job, bool early, cudaStream_t on) {
    const mn_curvature_args &p = job.p;
    const auto kernel = mn_curve_forward_kernel<KP>;
    const size_t room = sizeof(mn_curve_forward_smem<KP>);
    const mn_curve_cut cut = mn_curve_group_cut(&p);
    const cudaError_t code = cudaFuncSetAttribute(    // so that what is next finds room beside it
        kernel, cudaFuncAttributePreferredSharedMemoryCarveout, cudaSharedmemCarveoutMaxShared);
    if (code != cudaSuccess) return code;
    if (!early) {
        return mn_curve_start(kernel, MN_CURVE_FORWARD_THREADS, room, p.call, cut, on, p, job.maps,
                              (const float *)job.states, job.ready);
    }
    const cudaError_t limit = cudaFuncSetAttribute(
        kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, (int)room);
    if (limit != cudaSuccess) return limit;
    return mn_launch_pdl(kernel, dim3((unsigned)mn_curve_beside_blocks(job)),
                           MN_CURVE_FORWARD_THREADS, room, on, p, job.maps,
                           (const float *)job.states, job.ready, cut);
}

template <int KP>
static int group_of(const mn_curvature_args *p, float *states, cudaStream_t on) {
    mn_curve_beside job = {};
    job.p = *p, job.states = states;
    if (!mn_curve_forward_map(&job.maps, p)) return forward_of<mn_bf16, KP>(p, states, on);
    const int code = mn_curve_beside_sums(job, on);
    return code == cudaSuccess ? start_group<KP>(job, false, on) : code;
}

MN_CUDA_LAUNCH(curvature_forward) {
    const mn_curvature_args *p = (const mn_curvature_args *)args;
    const mn_call &c = p->call;
    const cudaStream_t on = (cudaStream_t)stream;
    if (mn_curve_slots(c, MN_CURVE_SEGMENT) * c.H == 0) return cudaSuccess;
    if (c.K > MN_CURVE_WIDEST) return cudaErrorNotSupported;
    float *states = (float *)shared;
    if (mn_curve_group_serves(p)) {
        return c.K <= 64 ? group_of<64>(p, states, on) : group_of<128>(p, states, on);
    }
    if (c.dtype == MN_BF16) MN_CURVE_BY_WIDTH(forward_of, mn_bf16, c.K, (p, states, on));
    MN_CURVE_BY_WIDTH(forward_of, float, c.K, (p, states, on));
}

/* ---- beside a walk --------------------------------------------------------------------------- */

/* Numbers that tell how far segments are: one for each block. */
static int64_t count_arrived(const mn_curvature_args *p) {
    const mn_curve_cut cut = mn_curve_group_cut(p);
    return mn_curve_slots(p->call, cut.segment) * p->call.H * cut.slices;
}

static bool beside_layout(size_t *states, size_t *all, const mn_curvature_args *p) {
    mn_plan plan = {};
    size_t told;
    if (!mn_curvature_forward_cuda_plan(p, &plan) ||
        !mn_add_size(states, plan.shared_bytes, 255) ||
        !mn_mul_size(&told, (size_t)count_arrived(p), sizeof(int)) ||
        !mn_add_size(&told, told, 255)) {
        return false;
    }
    *states = *states / 256 * 256;
    return mn_add_size(all, *states, told / 256 * 256);
}

bool mn_curve_beside_plan(size_t *bytes, const mn_curvature_args *p) {
    size_t states;
    return beside_layout(&states, bytes, p);
}

bool mn_curve_beside_of(mn_curve_beside *to, const mn_curvature_args *p, void *shared) {
    size_t states, all;
    *to = {};
    if (p->call.T == 0 || !p->qt.data || !mn_curve_group_serves(p) ||
        !mn_curve_forward_map(&to->maps, p) || !beside_layout(&states, &all, p)) {
        return false;
    }
    const mn_curve_cut cut = mn_curve_group_cut(p);
    to->p = *p;
    to->states = (float *)shared;
    to->ready = { (int *)((char *)shared + states), cut.segment, cut.slices };
    return true;
}

int mn_curve_beside_sums(const mn_curve_beside &job, cudaStream_t on) {
    const mn_curve_cut cut = mn_curve_group_cut(&job.p);
    return job.p.call.K <= 64
               ? mn_curve_add_up<mn_bf16, 64, false>(&job.p, job.states, NULL, cut, on)
               : mn_curve_add_up<mn_bf16, 128, false>(&job.p, job.states, NULL, cut, on);
}

int mn_curve_beside_launch(const mn_curve_beside &job, cudaStream_t on) {
    return job.p.call.K <= 64 ? start_group<64>(job, true, on) : start_group<128>(job, true, on);
}

int64_t mn_curve_beside_blocks(const mn_curve_beside &job) {
    return count_arrived(&job.p);
}
