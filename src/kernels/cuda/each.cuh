/* each.cuh - views of a tape's works (kernels/tape_work.h) as kernels walk them.
 *
 * Axes along which all views of a work go on evenly are one axis, so that contiguous tensors are a
 * single row. A thread takes a pack of N = 8 neighbours of a row where every view's rows begin at
 * 16 bytes, else one number. Types are known at run time only: a pack of float32 is two accesses of
 * 16 bytes, one of bf16 is one. */
#ifndef MN_KERNELS_CUDA_EACH_CUH
#define MN_KERNELS_CUDA_EACH_CUH

#include <string.h>

#include "kernels/cuda/common.cuh"
#include "kernels/tape_work.h"

#define MN_CUDA_WORK(name)                                                                         \
    extern "C" int mn_work_##name##_cuda(void *where, const void *work, void *space)

enum { MN_EACH_THREADS = 256, MN_PACK = 8 };

/* ---- division by a number that a whole kernel shares ----------------------------------------- */

/* n / d for n < 2^31 by a product: n (2^32 + factor) / 2^(32 + shift). */
struct mn_divisor {
    uint32_t d, factor, shift;
};

inline mn_divisor mn_divide_by(int64_t d) {
    uint32_t shift = 0;
    while (((int64_t)1 << shift) < d) shift++;
    const uint64_t over = ((uint64_t)1 << shift) - (uint64_t)d;
    return { (uint32_t)d, (uint32_t)(((over << 32) / (uint64_t)d) + 1), shift };
}

__device__ inline uint32_t mn_quotient(uint32_t n, const mn_divisor &by) {
    return (__umulhi(n, by.factor) + n) >> by.shift;
}

/* ---- views ----------------------------------------------------------------------------------- */

/* What a kernel knows of a view: elements along each axis, float32 or bf16. data NULL: absent. */
struct mn_side {
    char *data;
    int64_t stride[4];
    bool wide;
};

/* Axes merged: n[3] is the last one. */
struct mn_axes {
    int64_t n[4];
};

inline mn_side mn_side_of(const mn_view &view) {
    mn_side side = { (char *)view.data, {}, view.dtype == MN_F32 };
    memcpy(side.stride, view.stride, sizeof side.stride);
    return side;
}

/* Merges axes from the last on wherever all sides allow it; axes of 1 vanish. */
template <int COUNT>
inline mn_axes mn_merge(const int64_t shape[4], mn_side (&sides)[COUNT]) {
    mn_axes axes = { { 1, 1, 1, shape[3] } };
    for (int k = 0; k < COUNT && shape[3] == 1; k++) sides[k].stride[3] = 1;
    int last = 3;
    bool empty = shape[3] == 1;    // no axis is in place `last` yet
    for (int i = 2; i >= 0; i--) {
        if (shape[i] == 1) continue;
        bool even = true;
        for (int k = 0; k < COUNT && !empty; k++) {
            const mn_side &side = sides[k];
            even &= !side.data || side.stride[i] == side.stride[last] * axes.n[last];
        }
        if (!even) last--;
        for (int k = 0; k < COUNT && (!even || empty); k++) {
            sides[k].stride[last] = sides[k].stride[i];
        }
        axes.n[last] = even && !empty ? axes.n[last] * shape[i] : shape[i];
        empty = false;
    }
    return axes;
}

/* Whether a side can be taken in packs: one number for all of a row, or neighbours, and rows that
 * begin at 16 bytes. */
inline bool mn_side_packs(const mn_side &side, const mn_axes &axes) {
    if (!side.data || side.stride[3] == 0) return true;
    bool even = side.stride[3] == 1 && (uintptr_t)side.data % 16 == 0;
    for (int i = 0; i < 3; i++) {
        if (axes.n[i] > 1) even &= side.stride[i] % MN_PACK == 0;
    }
    return even;
}

/* Packs of a walk over rows, and how a pack's number tells its place. */
struct mn_walk {
    uint32_t n_packs;
    mn_divisor per_row, n1, n2;
    int64_t width;
};

/* False when there are too many to count in 31 bits. */
inline bool mn_walk_over(mn_walk *walk, const mn_axes &axes, int pack) {
    const int64_t per_row = mn_ceil_div(axes.n[3], (int64_t)pack);
    const int64_t packs = per_row * axes.n[0] * axes.n[1] * axes.n[2];
    *walk = { (uint32_t)packs, mn_divide_by(mn_max(per_row, 1)), mn_divide_by(axes.n[1]),
              mn_divide_by(axes.n[2]), axes.n[3] };
    return packs < ((int64_t)1 << 31);
}

/* A pack's indices: merged axes 0 to 2, and its first column. */
struct mn_spot {
    uint32_t at[3], x;
};

template <int N>
__device__ inline mn_spot mn_spot_of(const mn_walk &walk, uint32_t pack) {
    const uint32_t row = mn_quotient(pack, walk.per_row);
    const uint32_t up = mn_quotient(row, walk.n2), top = mn_quotient(up, walk.n1);
    return { { top, up - top * walk.n1.d, row - up * walk.n2.d },
             (pack - row * walk.per_row.d) * N };
}

__device__ inline int64_t mn_offset(const mn_side &side, const mn_spot &spot) {
    return spot.at[0] * side.stride[0] + spot.at[1] * side.stride[1] +
           spot.at[2] * side.stride[2] + spot.x * side.stride[3];
}

/* ---- packs ----------------------------------------------------------------------------------- */

__device__ inline float mn_side_get(const mn_side &side, int64_t i) {
    return side.wide ? ((const float *)side.data)[i] : mn_float(((const mn_bf16 *)side.data)[i]);
}

__device__ inline void mn_side_put(const mn_side &side, int64_t i, float x) {
    if (side.wide) ((float *)side.data)[i] = x;
    else mn_put((mn_bf16 *)side.data + i, x);
}

/* A pack as it is stored: nothing is converted until all packs of a thread are on their way. */
struct mn_raw {
    uint4 low, high;
};

__device__ inline mn_raw mn_fetch(const mn_side &side, int64_t at) {
    mn_raw raw;
    if (side.stride[3] == 0) {
        raw.low.x = __float_as_uint(mn_side_get(side, at));
    } else if (side.wide) {
        const uint4 *from = (const uint4 *)((const float *)side.data + at);
        raw.low = from[0];
        raw.high = from[1];
    } else {
        raw.low = *(const uint4 *)((const mn_bf16 *)side.data + at);
    }
    return raw;
}

__device__ inline void mn_unpack(float (&out)[MN_PACK], const mn_side &side, const mn_raw &raw) {
    const uint32_t words[8] = { raw.low.x,  raw.low.y,  raw.low.z,  raw.low.w,
                                raw.high.x, raw.high.y, raw.high.z, raw.high.w };
#pragma unroll
    for (int j = 0; j < MN_PACK; j++) {
        const uint32_t half = j % 2 ? words[j / 2] & 0xffff0000u : words[j / 2] << 16;
        const uint32_t bits = side.stride[3] == 0 ? words[0] : side.wide ? words[j] : half;
        out[j] = __uint_as_float(bits);
    }
}

__device__ inline void mn_store_pack(const mn_side &side, int64_t at, const float (&x)[MN_PACK]) {
    if (side.wide) {
        float4 *to = (float4 *)((float *)side.data + at);
        to[0] = make_float4(x[0], x[1], x[2], x[3]);
        to[1] = make_float4(x[4], x[5], x[6], x[7]);
    } else {
        mn_store<MN_PACK>((mn_bf16 *)side.data, at, x);
    }
}

/* ---- one result per number ------------------------------------------------------------------- */

/* F computes OUTS numbers from INS numbers: f(in, out) over arrays of N. Absent inputs are 0,
 * absent results are dropped. */
template <typename F>
struct mn_each {
    F f;
    mn_walk walk;
    mn_side side[F::INS + F::OUTS];    // inputs, then results
    bool add[F::OUTS];                 // to what is there
};

/* Packs of 8: the last one of a row may be short, and is then taken number by number. */
template <typename F>
__device__ inline void mn_each_pack(const mn_each<F> &e, const mn_spot &spot) {
    constexpr int INS = F::INS, OUTS = F::OUTS, N = MN_PACK;
    const bool full = spot.x + N <= e.walk.width;
    const int count = full ? N : (int)(e.walk.width - spot.x);
    int64_t at[INS + OUTS];
    float x[INS + OUTS][N], y[OUTS][N];
#pragma unroll
    for (int i = 0; i < INS + OUTS; i++) at[i] = mn_offset(e.side[i], spot);
    if (full) {
        mn_raw raw[INS + OUTS];
#pragma unroll
        for (int i = 0; i < INS + OUTS; i++) {
            const bool read = e.side[i].data && (i < INS || e.add[i < INS ? 0 : i - INS]);
            raw[i] = { { 0, 0, 0, 0 }, { 0, 0, 0, 0 } };
            if (read) raw[i] = mn_fetch(e.side[i], at[i]);
        }
#pragma unroll
        for (int i = 0; i < INS + OUTS; i++) mn_unpack(x[i], e.side[i], raw[i]);
    } else {
#pragma unroll
        for (int i = 0; i < INS + OUTS; i++) {
            const bool read = e.side[i].data && (i < INS || e.add[i < INS ? 0 : i - INS]);
#pragma unroll
            for (int j = 0; j < N; j++) {
                const bool there = read && j < count;
                x[i][j] = there ? mn_side_get(e.side[i], at[i] + j * e.side[i].stride[3]) : 0.0f;
            }
        }
    }
    e.f(x, y);
#pragma unroll
    for (int i = 0; i < OUTS; i++) {
        if (!e.side[INS + i].data) continue;
#pragma unroll
        for (int j = 0; j < N; j++) y[i][j] += e.add[i] ? x[INS + i][j] : 0.0f;
        if (full) mn_store_pack(e.side[INS + i], at[INS + i], y[i]);
#pragma unroll
        for (int j = 0; j < N; j++) {
            if (!full && j < count) mn_side_put(e.side[INS + i], at[INS + i] + j, y[i][j]);
        }
    }
}

template <typename F>
__device__ inline void mn_each_number(const mn_each<F> &e, const mn_spot &spot) {
    constexpr int INS = F::INS, OUTS = F::OUTS;
    float x[INS + OUTS][1], y[OUTS][1];
#pragma unroll
    for (int i = 0; i < INS + OUTS; i++) {
        const bool read = e.side[i].data && (i < INS || e.add[i < INS ? 0 : i - INS]);
        x[i][0] = read ? mn_side_get(e.side[i], mn_offset(e.side[i], spot)) : 0.0f;
    }
    e.f(x, y);
#pragma unroll
    for (int i = 0; i < OUTS; i++) {
        const mn_side &side = e.side[INS + i];
        if (side.data) mn_side_put(side, mn_offset(side, spot), y[i][0] + x[INS + i][0]);
    }
}

template <int N, typename F>
__global__ void __launch_bounds__(MN_EACH_THREADS)
mn_each_kernel(const __grid_constant__ mn_each<F> e) {
    const uint32_t step = gridDim.x * MN_EACH_THREADS;
    uint32_t pack = blockIdx.x * MN_EACH_THREADS + threadIdx.x;
    for (; pack < e.walk.n_packs; pack += step) {
        const mn_spot spot = mn_spot_of<N>(e.walk, pack);
        if (N == 1) mn_each_number(e, spot);
        else mn_each_pack(e, spot);
    }
}

/* Runs f over `shape`. */
template <typename F>
inline int mn_run_each(const F &f, const int64_t shape[4], const mn_view *const (&in)[F::INS],
                       const mn_view *const (&out)[F::OUTS], const bool (&add)[F::OUTS],
                       void *stream) {
    mn_each<F> e = {};
    e.f = f;
    for (int i = 0; i < F::INS; i++) e.side[i] = mn_side_of(*in[i]);
    for (int i = 0; i < F::OUTS; i++) {
        e.side[F::INS + i] = mn_side_of(*out[i]);
        e.add[i] = add[i];
    }
    const mn_axes axes = mn_merge(shape, e.side);
    bool packs = true;
    for (const mn_side &side : e.side) packs &= mn_side_packs(side, axes);
    if (!mn_walk_over(&e.walk, axes, packs ? MN_PACK : 1)) return cudaErrorInvalidConfiguration;
    if (e.walk.n_packs == 0) return cudaSuccess;
    const unsigned blocks = mn_blocks(e.walk.n_packs, MN_EACH_THREADS, 1 << 20);
    if (packs) mn_each_kernel<MN_PACK, F><<<blocks, MN_EACH_THREADS, 0, (cudaStream_t)stream>>>(e);
    else mn_each_kernel<1, F><<<blocks, MN_EACH_THREADS, 0, (cudaStream_t)stream>>>(e);
    return mn_launched();
}

#endif
