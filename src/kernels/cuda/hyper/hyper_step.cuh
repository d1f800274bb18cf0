/* hyper_step.cuh - one token of HyperMLP and HyperGLU against a cache of keys (equations in
 * ref/hyper.c), in parts of 256 keys.
 *
 *   scores   z_i = q.k_i of a branch;                     sums of z_i U1_i over a part
 *   mix      x = z (1 + d1) + sum_a c1_a h_a Vt1_a,  h the sums of all parts;
 *            base = relu(x1), times softplus(x2);         sums of x1^2 and base_i U2_i over a part
 *   values   w = base (1 + d2) + sum_a c2_a h_a Vt2_a;    sums of w_i v_i over a part
 *   output   o = gv / max(|x1|, eps) times the sums of all parts
 *
 * Each reads what all blocks made of the one before. A part, and the order of all sums, goes by the
 * number of keys alone. Of U and Vt the entry of key i is i, or counts from the token's own key
 * back. The calls are those of the operator's step (hyper_step.cu), and stages of a megakernel. */
#ifndef MN_KERNELS_CUDA_HYPER_HYPER_STEP_CUH
#define MN_KERNELS_CUDA_HYPER_HYPER_STEP_CUH

#include "kernels/cuda/attention/attention_step.cuh"

namespace mneme::hyper {

using namespace attention;

enum {
    STEP_RANKS = 16,     // at once
    STEP_AT_ONCE = 8,    // keys or values of a thread group
};
static_assert(MN_STEP_KEYS == MN_STEP_THREADS, "a thread has a key");

__device__ inline float mn_hyper_softplus(float x) {
    return mn_fmax(x, 0.0f) + log1pf(expf(-fabsf(x)));
}

/* Shared memory: step.w[0] has a number of each key; behind it, in step.q, the query, or the
 * ranks of two branches. */
template <int N>
struct step_smem {
    mn_step_smem<N> step;

    __host__ __device__ static constexpr size_t bytes(int64_t K, int64_t R, int64_t W) {
        const int64_t most = 2 * R > W ? 2 * R : W;
        return sizeof(step_smem) + (size_t)(K > most ? K : most) * sizeof(float);
    }
};

/* The token's keys, and entries of mixing parameters. */
struct step_keys {
    int64_t n, n_parts, shift;    // entry of key i: i + shift

    __device__ explicit step_keys(const mn_decode_hyper &p) {
        n = p.position ? *(const volatile int64_t *)p.position + 1 : p.n_keys;
        n_parts = (n + MN_STEP_KEYS - 1) / MN_STEP_KEYS;
        shift = p.by_place ? 0 : p.P - n;
    }

    /* Keys of a part. */
    __device__ int of(int64_t part) const {
        return (int)min((int64_t)MN_STEP_KEYS, n - part * MN_STEP_KEYS);
    }
};

/* Numbers of a part: 256 of keys, then the sums of ranks, then, of mixed ones, that of squares. */
__device__ inline float *step_scores(const mn_decode_hyper &p, int64_t branch, int64_t part) {
    return p.scores + (branch * p.n_parts + part) * (MN_STEP_KEYS + p.mix[0].R);
}

__device__ inline float *step_mixed(const mn_decode_hyper &p, int64_t h, int64_t part) {
    return p.mixed + (h * p.n_parts + part) * (MN_STEP_KEYS + p.mix[1].R + 1);
}

__device__ inline float *step_values(const mn_decode_hyper &p, int64_t h, int64_t part) {
    return p.parts + (h * p.n_parts + part) * p.V;
}

/* to[a] = sum over the part's keys of x_i U_ia, x in shared memory and `sums` of as many numbers as
 * there are threads. All threads call, and meet before x is read. */
template <typename T, typename Block>
__device__ inline void step_rank_sums(float *to, const float *x, float *sums,
                                      const mn_decode_mix &m, int64_t which, int64_t entry,
                                      int n_keys) {
    const int a0 = threadIdx.x % STEP_RANKS, group = threadIdx.x / STEP_RANKS;
    const T *U = (const T *)m.U + which * m.U_step + entry * m.R;
    for (int64_t first = 0; m.U && first < m.R; first += STEP_RANKS) {
        const int64_t a = first + a0;
        float sum = 0.0f;
        Block::sync();
#pragma unroll 8
        for (int i = group; i < n_keys; i += MN_STEP_THREADS / STEP_RANKS) {
            if (a < m.R) sum = fmaf(x[i], mn_float(U[i * m.R + a]), sum);
        }
        sums[threadIdx.x] = sum;
        Block::sync();
        if (group == 0 && a < m.R) {
            float all = 0.0f;
#pragma unroll
            for (int i = 0; i < MN_STEP_THREADS / STEP_RANKS; i++) all += sums[i * STEP_RANKS + a0];
            to[a] = all;
        }
    }
}

/* ranks[a] = c_a times the sum of number a behind the keys' of all parts, `step` apart. */
template <typename T>
__device__ inline void step_ranks(float *ranks, const mn_decode_mix &m, int64_t which,
                                  const float *from, int64_t step, int64_t n_parts) {
    const T *c = (const T *)m.c + which * m.c_step;
    for (int64_t a = threadIdx.x; m.U && a < m.R; a += MN_STEP_THREADS) {
        float sum = 0.0f;
#pragma unroll 8
        for (int64_t part = 0; part < n_parts; part++) sum += from[part * step + a];
        ranks[a] = m.c ? mn_float(c[a]) * sum : sum;
    }
}

/* d at an entry. */
template <typename T>
__device__ inline float step_diagonal(const mn_decode_mix &m, int64_t which, int64_t entry) {
    const int64_t at = which * m.d_step + entry;
    T rounded;
    if (!m.wide) return mn_float(((const T *)m.d)[at]);
    mn_put(&rounded, ((const float *)m.d)[at]);
    return mn_float(rounded);
}

/* The mix of x at an entry: x (1 + d) + sum_a ranks_a Vt_a. */
template <typename T>
__device__ inline float step_mix(const mn_decode_mix &m, int64_t which, const float *ranks, float x,
                                 int64_t P, int64_t entry) {
    if (!m.U) return x;
    const T *Vt = (const T *)m.Vt + which * m.Vt_step + entry;
    float y = x * (1.0f + step_diagonal<T>(m, which, entry));
#pragma unroll 8
    for (int64_t a = 0; a < m.R; a++) y = fmaf(ranks[a], mn_float(Vt[a * P]), y);
    return y;
}

/* The token's key of a branch and value of a head behind those that are there. */
template <typename T>
__device__ inline void step_append(const mn_decode_hyper &p, int64_t branch, int64_t position) {
    T *key = (T *)p.keys + position * p.key_row + branch * p.key_step;
    const T *k = (const T *)p.k + branch * p.k_step;
    for (int64_t i = threadIdx.x; i < p.K; i += MN_STEP_THREADS) key[i] = k[i];
    if (branch >= p.H) return;
    T *value = (T *)p.values + position * p.value_row + branch * p.value_step;
    const T *v = (const T *)p.v + branch * p.v_step;
    for (int64_t i = threadIdx.x; i < p.V; i += MN_STEP_THREADS) value[i] = v[i];
}

/* Parts slot, slot + n_slots, ... of a branch. Who has the last part puts the token's key and value
 * there first, where they are not yet. */
template <typename T, int N, typename Block>
__device__ inline void step_piece_scores(const mn_decode_hyper &p, int64_t branch, int64_t slot,
                                         int64_t n_slots, unsigned char *bytes) {
    mn_step_smem<N> &smem = ((step_smem<N> *)bytes)->step;
    const step_keys keys(p);
    if (slot >= keys.n_parts) return;
    if (p.position && (keys.n_parts - 1) % n_slots == slot) step_append<T>(p, branch, keys.n - 1);
    for (int64_t i = threadIdx.x; i < p.K; i += MN_STEP_THREADS) {
        smem.q[i] = mn_float(((const T *)p.q)[branch * p.q_step + i]);
    }
    for (int64_t part = slot; part < keys.n_parts; part += n_slots) {
        const int64_t first = part * MN_STEP_KEYS;
        const mn_step_rows<T> rows = { (const T *)p.keys + first * p.key_row + branch * p.key_step,
                                       p.key_row };
        const mn_step_sizes sizes = { (int)p.K, (int)p.V, 1, keys.of(part), 1.0f, false };
        float *to = step_scores(p, branch, part);
        Block::sync();
        mn_step_scores<T, N, STEP_AT_ONCE, 1>(smem.w, smem.q, rows, sizes);
        Block::sync();
        to[threadIdx.x] = smem.w[0][threadIdx.x];
        step_rank_sums<T, Block>(to + MN_STEP_KEYS, smem.w[0], smem.sums, p.mix[0], branch,
                                 first + keys.shift, sizes.n_keys);
    }
}

/* Parts of a head, from the scores of its branches. */
template <typename T, int N, typename Block>
__device__ inline void step_piece_mix(const mn_decode_hyper &p, int64_t h, int64_t slot,
                                      int64_t n_slots, unsigned char *bytes) {
    mn_step_smem<N> &smem = ((step_smem<N> *)bytes)->step;
    const step_keys keys(p);
    const int64_t R = p.mix[0].R, step = MN_STEP_KEYS + R;
    const bool two = p.Q > p.H;
    if (slot >= keys.n_parts) return;
    for (int branch = 0; branch <= (int)two; branch++) {
        const int64_t which = h + branch * p.H;
        step_ranks<T>(smem.q + branch * R, p.mix[0], which,
                      step_scores(p, which, 0) + MN_STEP_KEYS, step, keys.n_parts);
    }
    Block::sync();
    for (int64_t part = slot; part < keys.n_parts; part += n_slots) {
        const int64_t first = part * MN_STEP_KEYS, entry = first + keys.shift + threadIdx.x;
        const int n_keys = keys.of(part);
        float *to = step_mixed(p, h, part), base = 0.0f, square = 0.0f;
        if ((int)threadIdx.x < n_keys) {
            const float z = step_scores(p, h, part)[threadIdx.x];
            const float x = step_mix<T>(p.mix[0], h, smem.q, z, p.P, entry);
            square = x * x, base = mn_fmax(x, 0.0f);
            if (two) {
                const float other = step_scores(p, h + p.H, part)[threadIdx.x];
                base *= mn_hyper_softplus(step_mix<T>(p.mix[0], h + p.H, smem.q + R, other, p.P,
                                                      entry));
            }
        }
        const float squares = mn_step_sum<Block>(square, smem.warps);    // all have read w before
        smem.w[0][threadIdx.x] = base, to[threadIdx.x] = base;
        if (threadIdx.x == 0) to[MN_STEP_KEYS + p.mix[1].R] = squares;
        step_rank_sums<T, Block>(to + MN_STEP_KEYS, smem.w[0], smem.sums, p.mix[1], h,
                                 first + keys.shift, n_keys);
    }
}

template <typename T, int N, typename Block>
__device__ inline void step_piece_values(const mn_decode_hyper &p, int64_t h, int64_t slot,
                                         int64_t n_slots, unsigned char *bytes) {
    mn_step_smem<N> &smem = ((step_smem<N> *)bytes)->step;
    const step_keys keys(p);
    if (slot >= keys.n_parts) return;
    step_ranks<T>(smem.q, p.mix[1], h, step_mixed(p, h, 0) + MN_STEP_KEYS,
                  MN_STEP_KEYS + p.mix[1].R + 1, keys.n_parts);
    for (int64_t part = slot; part < keys.n_parts; part += n_slots) {
        const int64_t first = part * MN_STEP_KEYS, entry = first + keys.shift + threadIdx.x;
        const mn_step_rows<T> rows = { (const T *)p.values + first * p.value_row + h * p.value_step,
                                       p.value_row };
        const mn_step_sizes sizes = { (int)p.K, (int)p.V, 1, keys.of(part), 1.0f, false };
        float *to = step_values(p, h, part);
        Block::sync();
        float w = 0.0f;
        if ((int)threadIdx.x < sizes.n_keys) {
            w = step_mix<T>(p.mix[1], h, smem.q, step_mixed(p, h, part)[threadIdx.x], p.P, entry);
        }
        smem.w[0][threadIdx.x] = w;
        Block::sync();
        for (int column0 = 0; column0 < sizes.V; column0 += MN_STEP_ROW_THREADS * N) {
            float out[1][N];
            mn_step_pv<T, N, STEP_AT_ONCE, 1, Block>(out, smem, rows, sizes, column0);
            const int column = column0 + (int)threadIdx.x * N;
            if (threadIdx.x >= MN_STEP_ROW_THREADS || column >= sizes.V) continue;
#pragma unroll
            for (int e = 0; e < N; e++) to[column + e] = out[0][e];
        }
    }
}

/* o of a head. `bytes`: of MN_STEP_WARPS floats. */
template <typename T, typename Block>
__device__ inline void step_piece_output(const mn_decode_hyper &p, int64_t h,
                                         unsigned char *bytes) {
    const step_keys keys(p);
    const float *squares = step_mixed(p, h, 0) + MN_STEP_KEYS + p.mix[1].R;
    const T *gv = (const T *)p.gv + h * p.gv_step;
    float sum = 0.0f;
    for (int64_t part = threadIdx.x; part < keys.n_parts; part += MN_STEP_THREADS) {
        sum += squares[part * (MN_STEP_KEYS + p.mix[1].R + 1)];
    }
    const float norm = sqrtf(mn_step_sum<Block>(sum, (float *)bytes));
    const float scale = p.normed ? 1.0f / mn_fmax(norm, (float)p.eps) : 1.0f;
    const float *from = step_values(p, h, 0);
    for (int64_t a = threadIdx.x; a < p.V; a += MN_STEP_THREADS) {
        float y = 0.0f;
#pragma unroll 4
        for (int64_t part = 0; part < keys.n_parts; part++) y += from[part * p.V + a];
        mn_put((T *)p.o + h * p.o_step + a, y * scale * (p.gv ? mn_float(gv[a]) : 1.0f));
    }
}

/* A piece of a phase (kernels/decode.h). */
template <typename T, int N, typename Block>
__device__ inline void step_piece(const mn_decode_hyper &p, int phase, int64_t head, int64_t slot,
                                  int64_t n_slots, unsigned char *bytes) {
    switch (phase) {
    case MN_HYPER_SCORES: step_piece_scores<T, N, Block>(p, head, slot, n_slots, bytes); break;
    case MN_HYPER_MIX: step_piece_mix<T, N, Block>(p, head, slot, n_slots, bytes); break;
    case MN_HYPER_VALUES: step_piece_values<T, N, Block>(p, head, slot, n_slots, bytes); break;
    default: step_piece_output<T, Block>(p, head, bytes);
    }
}

}    // namespace mneme::hyper

#endif
