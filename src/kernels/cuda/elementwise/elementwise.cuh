/* elementwise.cuh - views of a tape's works (kernels/elementwise.h) as kernels walk them.
 *
 * Axes along which all views of a work go on evenly are one axis, so that contiguous tensors are a
 * single row. A thread takes a pack of N = 8 neighbours of a row where every view's rows begin at
 * 16 bytes, else one number. A pack of float32 is two accesses of 16 bytes, one of bf16 is one;
 * kernels are compiled for views that are all bf16, all float32, or anything. */
#ifndef MN_KERNELS_CUDA_ELEMENTWISE_ELEMENTWISE_CUH
#define MN_KERNELS_CUDA_ELEMENTWISE_ELEMENTWISE_CUH

#include <string.h>

#include "kernels/cuda/prim/common.cuh"
#include "kernels/elementwise.h"

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
struct mn_scan {
    uint32_t n_packs;
    mn_divisor per_row, n1, n2;
    int64_t width;
};

/* False when there are too many to count in 31 bits. */
inline bool mn_iterate_over(mn_scan *walk, const mn_axes &axes, int pack) {
    const int64_t per_row = mn_ceil_div(axes.n[3], (int64_t)pack);
    const int64_t packs = per_row * axes.n[0] * axes.n[1] * axes.n[2];
    *walk = { (uint32_t)packs, mn_divide_by(mn_max(per_row, 1)), mn_divide_by(axes.n[1]),
              mn_divide_by(axes.n[2]), axes.n[3] };
    return packs < ((int64_t)1 << 31) && axes.n[3] < ((int64_t)1 << 32);
}

/* A pack's indices: merged axes 0 to 2, and its first column. */
struct mn_spot {
    uint32_t at[3], x;
};

template <int N>
__device__ inline mn_spot mn_spot_of(const mn_scan &walk, uint32_t pack) {
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

/* What a kernel knows of the types of its views when it is compiled: nothing, or that all are bf16
 * or float32. Nothing takes twice the instructions. */
enum mn_types { MN_MIXED, MN_NARROW, MN_WIDE };

template <mn_types TYPES>
__device__ inline bool mn_is_wide(const mn_side &side) {
    return TYPES == MN_MIXED ? side.wide : TYPES == MN_WIDE;
}

template <int COUNT>
inline mn_types mn_types_of(const mn_side (&sides)[COUNT]) {
    bool narrow = true, wide = true;
    for (const mn_side &side : sides) {
        narrow &= !side.data || !side.wide;
        wide &= !side.data || side.wide;
    }
    return narrow ? MN_NARROW : wide ? MN_WIDE : MN_MIXED;
}

template <mn_types TYPES = MN_MIXED>
__device__ inline float mn_side_get(const mn_side &side, int64_t i) {
    return mn_is_wide<TYPES>(side) ? ((const float *)side.data)[i]
                                   : mn_float(((const mn_bf16 *)side.data)[i]);
}

template <mn_types TYPES = MN_MIXED>
__device__ inline void mn_side_put(const mn_side &side, int64_t i, float x) {
    if (mn_is_wide<TYPES>(side)) ((float *)side.data)[i] = x;
    else mn_put((mn_bf16 *)side.data + i, x);
}

/* A pack as it is stored: nothing is converted until all packs of a thread are on their way. */
struct mn_raw {
    uint4 low, high;
};

/* REPEATS: of a side whose one number may stand for a row. */
template <mn_types TYPES = MN_MIXED, bool REPEATS = true>
__device__ inline mn_raw mn_load_tile(const mn_side &side, int64_t at) {
    mn_raw raw;
    if (REPEATS && side.stride[3] == 0) {    // unpacking repeats it
        raw.low.x = mn_is_wide<TYPES>(side) ? ((const uint32_t *)side.data)[at]
                                            : (uint32_t)((const uint16_t *)side.data)[at];
    } else if (mn_is_wide<TYPES>(side)) {
        const uint4 *from = (const uint4 *)((const float *)side.data + at);
        raw.low = from[0];
        raw.high = from[1];
    } else {
        raw.low = *(const uint4 *)((const mn_bf16 *)side.data + at);
    }
    return raw;
}

template <mn_types TYPES = MN_MIXED, bool REPEATS = true>
__device__ inline void mn_unpack(float (&out)[MN_PACK], const mn_side &side, const mn_raw &raw) {
    const uint32_t words[8] = { raw.low.x,  raw.low.y,  raw.low.z,  raw.low.w,
                                raw.high.x, raw.high.y, raw.high.z, raw.high.w };
    const bool repeats = REPEATS && side.stride[3] == 0;
    const float one = __uint_as_float(mn_is_wide<TYPES>(side) ? raw.low.x : raw.low.x << 16);
#pragma unroll
    for (int j = 0; j < MN_PACK; j++) {
        const uint32_t half = j % 2 ? words[j / 2] & 0xffff0000u : words[j / 2] << 16;
        const float its = __uint_as_float(mn_is_wide<TYPES>(side) ? words[j] : half);
        out[j] = repeats ? one : its;
    }
}

template <mn_types TYPES = MN_MIXED>
__device__ inline void mn_store_pack(const mn_side &side, int64_t at, const float (&x)[MN_PACK]) {
    if (mn_is_wide<TYPES>(side)) {
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
    mn_scan walk;
    mn_side side[F::INS + F::OUTS];    // inputs, then results
    bool add[F::OUTS];                 // to what is there
    bool flat, even;                   // a single row; rows at equal distances below 2^32
};

/* Where a pack is that is not short. */
template <int N, typename F>
__device__ inline mn_spot mn_each_spot(const mn_each<F> &e, uint32_t pack) {
    if (e.flat) return { { 0, 0, 0 }, pack * N };
    if (!e.even) return mn_spot_of<N>(e.walk, pack);
    const uint32_t row = mn_quotient(pack, e.walk.per_row);
    return { { 0, 0, row }, (pack - row * e.walk.per_row.d) * N };
}

template <typename F>
__device__ inline int64_t mn_each_offset(const mn_each<F> &e, const mn_side &side,
                                         const mn_spot &spot) {
    if (!e.even) return mn_offset(side, spot);
    return (int64_t)((uint64_t)spot.at[2] * (uint32_t)side.stride[2]) +
           (side.stride[3] ? spot.x : 0);
}

/* Whether side i is read: inputs that are there, and results that are added to. */
template <typename F>
__device__ inline bool mn_reads(const mn_each<F> &e, int i) {
    return e.side[i].data && (i < F::INS || e.add[i < F::INS ? 0 : i - F::INS]);
}

/* The last pack of a row may be short, and is then taken number by number; so is everything that
 * cannot be taken in packs. */
template <typename F>
__device__ inline void mn_each_number(const mn_each<F> &e, mn_spot spot, int count) {
    constexpr int INS = F::INS, OUTS = F::OUTS;
    for (int j = 0; j < count; j++, spot.x++) {
        float x[INS + OUTS][1], y[OUTS][1];
#pragma unroll
        for (int i = 0; i < INS + OUTS; i++) {
            x[i][0] = mn_reads(e, i) ? mn_side_get(e.side[i], mn_offset(e.side[i], spot)) : 0.0f;
        }
        e.f.template run<false>(x, y);
#pragma unroll
        for (int i = 0; i < OUTS; i++) {
            const mn_side &side = e.side[INS + i];
            if (side.data) mn_side_put(side, mn_offset(side, spot), y[i][0] + x[INS + i][0]);
        }
    }
}

/* Packs that a thread has on their way at once: 32 bytes of each view, but 16 of many views, whose
 * registers would leave few threads. */
template <mn_types TYPES, typename F>
__host__ __device__ constexpr int mn_packs_ahead() {
    return TYPES == MN_NARROW && F::INS + F::OUTS < 6 ? 2 : 1;
}

/* Blocks that a processor is to hold, least. */
template <mn_types TYPES, typename F>
__host__ __device__ constexpr int mn_blocks_beside() {
    return TYPES == MN_NARROW && mn_packs_ahead<TYPES, F>() == 1 ? 4 : 1;
}

template <mn_types TYPES, typename F>
__global__ void __launch_bounds__(MN_EACH_THREADS, mn_blocks_beside<TYPES, F>())
mn_each_pack_kernel(const __grid_constant__ mn_each<F> e) {
    constexpr int INS = F::INS, OUTS = F::OUTS, N = MN_PACK, AHEAD = mn_packs_ahead<TYPES, F>();
    const uint32_t first = blockIdx.x * (MN_EACH_THREADS * AHEAD) + threadIdx.x;
    int64_t at[AHEAD][INS + OUTS];
    mn_raw raw[AHEAD][INS + OUTS];
    bool full[AHEAD];
#pragma unroll
    for (int k = 0; k < AHEAD; k++) {
        const uint32_t pack = first + k * MN_EACH_THREADS;
        full[k] = false;
        if (pack >= e.walk.n_packs) continue;
        const mn_spot spot = mn_each_spot<N>(e, pack);
        full[k] = (int64_t)spot.x + N <= e.walk.width;
        if (!full[k]) {
            mn_each_number(e, spot, (int)(e.walk.width - spot.x));
            continue;
        }
#pragma unroll
        for (int i = 0; i < INS + OUTS; i++) {
            at[k][i] = mn_each_offset(e, e.side[i], spot);
            raw[k][i] = { { 0, 0, 0, 0 }, { 0, 0, 0, 0 } };
            if (mn_reads(e, i)) raw[k][i] = mn_load_tile<TYPES>(e.side[i], at[k][i]);
        }
    }
#pragma unroll
    for (int k = 0; k < AHEAD; k++) {
        if (!full[k]) continue;
        float x[INS + OUTS][N], y[OUTS][N];
#pragma unroll
        for (int i = 0; i < INS + OUTS; i++) mn_unpack<TYPES>(x[i], e.side[i], raw[k][i]);
        e.f.template run<TYPES == MN_NARROW>(x, y);
#pragma unroll
        for (int i = 0; i < OUTS; i++) {
            if (!e.side[INS + i].data) continue;
            if (e.add[i]) {
#pragma unroll
                for (int j = 0; j < N; j++) y[i][j] += x[INS + i][j];
            }
            mn_store_pack<TYPES>(e.side[INS + i], at[k][INS + i], y[i]);
        }
    }
}

template <typename F>
__global__ void __launch_bounds__(MN_EACH_THREADS)
mn_each_number_kernel(const __grid_constant__ mn_each<F> e) {
    const uint32_t i = blockIdx.x * MN_EACH_THREADS + threadIdx.x;
    if (i < e.walk.n_packs) mn_each_number(e, mn_spot_of<1>(e.walk, i), 1);
}

template <mn_types TYPES, typename F>
inline void mn_launch_packs(const mn_each<F> &e, cudaStream_t stream) {
    const unsigned blocks = mn_blocks(e.walk.n_packs, MN_EACH_THREADS * mn_packs_ahead<TYPES, F>());
    mn_each_pack_kernel<TYPES, F><<<blocks, MN_EACH_THREADS, 0, stream>>>(e);
}

/* Runs over `shape`; f, sides and add are set. */
template <typename F>
inline int mn_launch_each(mn_each<F> &e, const int64_t shape[4], cudaStream_t stream) {
    const mn_axes axes = mn_merge(shape, e.side);
    bool packs = true;
    for (const mn_side &side : e.side) packs &= mn_side_packs(side, axes);
    e.flat = axes.n[0] * axes.n[1] * axes.n[2] == 1;
    e.even = axes.n[0] * axes.n[1] == 1;
    for (const mn_side &side : e.side) {
        e.even &= side.stride[2] >= 0 && side.stride[2] < (int64_t)1 << 32;
    }
    if (!mn_iterate_over(&e.walk, axes, packs ? MN_PACK : 1)) return cudaErrorInvalidConfiguration;
    if (e.walk.n_packs == 0) return cudaSuccess;
    const mn_types types = mn_types_of(e.side);
    if (!packs) {
        const unsigned blocks = mn_blocks(e.walk.n_packs, MN_EACH_THREADS);
        mn_each_number_kernel<F><<<blocks, MN_EACH_THREADS, 0, stream>>>(e);
    } else if (types == MN_NARROW) {
        mn_launch_packs<MN_NARROW>(e, stream);
    } else if (types == MN_WIDE) {
        mn_launch_packs<MN_WIDE>(e, stream);
    } else {
        mn_launch_packs<MN_MIXED>(e, stream);
    }
    return mn_launch_status();
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
    return mn_launch_each(e, shape, (cudaStream_t)stream);
}

#endif
