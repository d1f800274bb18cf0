/* elementwise.cuh - views of elementwise jobs (kernels/elementwise.h) as kernels iterate over them.
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

namespace mneme::elementwise {

#define MN_CUDA_ELEMENTWISE(name)                                                                  \
    extern "C" int mn_elementwise_##name##_cuda(void *backend, const void *args, void *workspace)

enum { MN_ELEMENTWISE_THREADS = 256, MN_VEC = 8 };

/* ---- division by a number that a whole kernel shares ----------------------------------------- */

/* n / d for n < 2^31 by a product: n (2^32 + factor) / 2^(32 + shift). An axis without elements, by
 * which nothing is divided, counts as one. */
struct mn_fast_divisor {
    uint32_t d, factor, shift;
};

inline mn_fast_divisor mn_fast_divisor_of(int64_t d) {
    d = mn_max(d, (int64_t)1);
    uint32_t shift = 0;
    while (((int64_t)1 << shift) < d) shift++;
    const uint64_t over = ((uint64_t)1 << shift) - (uint64_t)d;
    return { (uint32_t)d, (uint32_t)(((over << 32) / (uint64_t)d) + 1), shift };
}

__device__ inline uint32_t mn_fast_div(uint32_t n, const mn_fast_divisor &by) {
    return (__umulhi(n, by.factor) + n) >> by.shift;
}

/* ---- views ----------------------------------------------------------------------------------- */

/* What a kernel knows of a view: elements along each axis, float32 or bf16. data NULL: absent. */
struct mn_operand {
    char *data;
    int64_t stride[4];
    bool is_f32;
};

/* Axes merged: n[3] is the last one. */
struct mn_axes {
    int64_t n[4];
};

inline mn_operand mn_operand_of(const mn_view &view) {
    mn_operand operand = { (char *)view.data, {}, view.dtype == MN_F32 };
    memcpy(operand.stride, view.stride, sizeof operand.stride);
    return operand;
}

/* Merges axes from the last on wherever all sides allow it; axes of 1 vanish. */
template <int COUNT>
inline mn_axes mn_coalesce_axes(const int64_t shape[4], mn_operand (&operands)[COUNT]) {
    mn_axes axes = { { 1, 1, 1, shape[3] } };
    for (int k = 0; k < COUNT && shape[3] == 1; k++) operands[k].stride[3] = 1;
    int last = 3;
    bool empty = shape[3] == 1;    // no axis is in place `last` yet
    for (int i = 2; i >= 0; i--) {
        if (shape[i] == 1) continue;
        bool even = true;
        for (int k = 0; k < COUNT && !empty; k++) {
            const mn_operand &operand = operands[k];
            even &= !operand.data || operand.stride[i] == operand.stride[last] * axes.n[last];
        }
        if (!even) last--;
        for (int k = 0; k < COUNT && (!even || empty); k++) {
            operands[k].stride[last] = operands[k].stride[i];
        }
        axes.n[last] = even && !empty ? axes.n[last] * shape[i] : shape[i];
        empty = false;
    }
    return axes;
}

/* Whether a side can be taken in packs: one number for all of a row, or neighbours, and rows that
 * begin at 16 bytes. */
inline bool mn_operand_vec_ok(const mn_operand &operand, const mn_axes &axes) {
    if (!operand.data || operand.stride[3] == 0) return true;
    bool even = operand.stride[3] == 1 && (uintptr_t)operand.data % 16 == 0;
    for (int i = 0; i < 3; i++) {
        if (axes.n[i] > 1) even &= operand.stride[i] % MN_VEC == 0;
    }
    return even;
}

/* Vectors of an iteration over rows, and the place of vector number i. */
struct mn_offset_calc {
    uint32_t n_vecs;
    mn_fast_divisor per_row, n1, n2;
    int64_t width;
};

/* False when there are too many to count in 31 bits. */
inline bool mn_offset_calc_init(mn_offset_calc *calc, const mn_axes &axes, int pack) {
    const int64_t per_row = mn_ceil_div(axes.n[3], (int64_t)pack);
    const int64_t packs = per_row * axes.n[0] * axes.n[1] * axes.n[2];
    *calc = { (uint32_t)packs, mn_fast_divisor_of(mn_max(per_row, 1)),
        mn_fast_divisor_of(axes.n[1]),
              mn_fast_divisor_of(axes.n[2]), axes.n[3] };
    return packs < ((int64_t)1 << 31) && axes.n[3] < ((int64_t)1 << 32);
}

/* A pack's indices: merged axes 0 to 2, and its first column. */
struct mn_coord {
    uint32_t at[3], x;
};

template <int N>
__device__ inline mn_coord mn_coord_of(const mn_offset_calc &calc, uint32_t pack) {
    const uint32_t row = mn_fast_div(pack, calc.per_row);
    const uint32_t up = mn_fast_div(row, calc.n2), top = mn_fast_div(up, calc.n1);
    return { { top, up - top * calc.n1.d, row - up * calc.n2.d },
             (pack - row * calc.per_row.d) * N };
}

__device__ inline int64_t mn_offset(const mn_operand &operand, const mn_coord &coord) {
    return coord.at[0] * operand.stride[0] + coord.at[1] * operand.stride[1] +
           coord.at[2] * operand.stride[2] + coord.x * operand.stride[3];
}

/* ---- packs ----------------------------------------------------------------------------------- */

/* What a kernel knows of the types of its views when it is compiled: nothing, or that all are bf16
 * or float32. Nothing takes twice the instructions. */
enum mn_operand_types { MN_MIXED, MN_ALL_BF16, MN_ALL_F32 };

template <mn_operand_types TYPES>
__device__ inline bool mn_is_f32(const mn_operand &operand) {
    return TYPES == MN_MIXED ? operand.is_f32 : TYPES == MN_ALL_F32;
}

template <int COUNT>
inline mn_operand_types mn_operand_types_of(const mn_operand (&operands)[COUNT]) {
    bool is_bf16 = true, is_f32 = true;
    for (const mn_operand &operand : operands) {
        is_bf16 &= !operand.data || !operand.is_f32;
        is_f32 &= !operand.data || operand.is_f32;
    }
    return is_bf16 ? MN_ALL_BF16 : is_f32 ? MN_ALL_F32 : MN_MIXED;
}

template <mn_operand_types TYPES = MN_MIXED>
__device__ inline float mn_operand_load(const mn_operand &operand, int64_t i) {
    return mn_is_f32<TYPES>(operand) ? ((const float *)operand.data)[i]
                                   : mn_float(((const mn_bf16 *)operand.data)[i]);
}

template <mn_operand_types TYPES = MN_MIXED>
__device__ inline void mn_operand_store(const mn_operand &operand, int64_t i, float x) {
    if (mn_is_f32<TYPES>(operand)) ((float *)operand.data)[i] = x;
    else mn_put((mn_bf16 *)operand.data + i, x);
}

/* A pack as it is stored: nothing is converted until all packs of a thread are on their way. */
struct mn_raw_vec {
    uint4 low, high;
};

/* REPEATS: of a side whose one number may stand for a row. */
template <mn_operand_types TYPES = MN_MIXED, bool REPEATS = true>
__device__ inline mn_raw_vec mn_load_raw(const mn_operand &operand, int64_t at) {
    mn_raw_vec raw;
    if (REPEATS && operand.stride[3] == 0) {    // unpacking repeats it
        raw.low.x = mn_is_f32<TYPES>(operand) ? ((const uint32_t *)operand.data)[at]
                                            : (uint32_t)((const uint16_t *)operand.data)[at];
    } else if (mn_is_f32<TYPES>(operand)) {
        const uint4 *from = (const uint4 *)((const float *)operand.data + at);
        raw.low = from[0];
        raw.high = from[1];
    } else {
        raw.low = *(const uint4 *)((const mn_bf16 *)operand.data + at);
    }
    return raw;
}

template <mn_operand_types TYPES = MN_MIXED, bool REPEATS = true>
__device__ inline void mn_unpack(float (&out)[MN_VEC], const mn_operand &operand,
                                 const mn_raw_vec &raw) {
    const uint32_t words[8] = { raw.low.x,  raw.low.y,  raw.low.z,  raw.low.w,
                                raw.high.x, raw.high.y, raw.high.z, raw.high.w };
    const bool repeats = REPEATS && operand.stride[3] == 0;
    const float one = __uint_as_float(mn_is_f32<TYPES>(operand) ? raw.low.x : raw.low.x << 16);
#pragma unroll
    for (int j = 0; j < MN_VEC; j++) {
        const uint32_t half = j % 2 ? words[j / 2] & 0xffff0000u : words[j / 2] << 16;
        const float its = __uint_as_float(mn_is_f32<TYPES>(operand) ? words[j] : half);
        out[j] = repeats ? one : its;
    }
}

template <mn_operand_types TYPES = MN_MIXED>
__device__ inline void mn_store_vec(const mn_operand &operand, int64_t at,
                                    const float (&x)[MN_VEC]) {
    if (mn_is_f32<TYPES>(operand)) {
        float4 *to = (float4 *)((float *)operand.data + at);
        to[0] = make_float4(x[0], x[1], x[2], x[3]);
        to[1] = make_float4(x[4], x[5], x[6], x[7]);
    } else {
        mn_store<MN_VEC>((mn_bf16 *)operand.data, at, x);
    }
}

/* ---- one result per number ------------------------------------------------------------------- */

/* F computes OUTS numbers from INS numbers: f(in, out) over arrays of N. Absent inputs are 0,
 * absent results are dropped. */
template <typename F>
struct mn_elementwise {
    F f;
    mn_offset_calc calc;
    mn_operand operand[F::INS + F::OUTS];    // inputs, then results
    bool add[F::OUTS];                 // to what is there
    bool flat, even;                   // a single row; rows at equal distances below 2^32
};

/* Where a pack is that is not short. */
template <int N, typename F>
__device__ inline mn_coord mn_elementwise_coord(const mn_elementwise<F> &e, uint32_t pack) {
    if (e.flat) return { { 0, 0, 0 }, pack * N };
    if (!e.even) return mn_coord_of<N>(e.calc, pack);
    const uint32_t row = mn_fast_div(pack, e.calc.per_row);
    return { { 0, 0, row }, (pack - row * e.calc.per_row.d) * N };
}

template <typename F>
__device__ inline int64_t mn_elementwise_offset(const mn_elementwise<F> &e,
                                                const mn_operand &operand,
                                         const mn_coord &coord) {
    if (!e.even) return mn_offset(operand, coord);
    return (int64_t)((uint64_t)coord.at[2] * (uint32_t)operand.stride[2]) +
           (operand.stride[3] ? coord.x : 0);
}

/* Whether side i is read: inputs that are there, and results that are added to. */
template <typename F>
__device__ inline bool mn_operand_is_read(const mn_elementwise<F> &e, int i) {
    return e.operand[i].data && (i < F::INS || e.add[i < F::INS ? 0 : i - F::INS]);
}

/* The last pack of a row may be short, and is then taken number by number; so is everything that
 * cannot be taken in packs. */
template <typename F>
__device__ inline void mn_elementwise_scalar(const mn_elementwise<F> &e, mn_coord coord,
                                             int count) {
    constexpr int INS = F::INS, OUTS = F::OUTS;
    for (int j = 0; j < count; j++, coord.x++) {
        float x[INS + OUTS][1], y[OUTS][1];
#pragma unroll
        for (int i = 0; i < INS + OUTS; i++) {
            x[i][0] = mn_operand_is_read(e, i)
                ? mn_operand_load(e.operand[i], mn_offset(e.operand[i], coord)) : 0.0f;
        }
        e.f.template run<false>(x, y);
#pragma unroll
        for (int i = 0; i < OUTS; i++) {
            const mn_operand &operand = e.operand[INS + i];
            if (!operand.data) continue;
            if (e.add[i]) y[i][0] += x[INS + i][0];    // -0 + 0 has another sign than a pack's -0
            mn_operand_store(operand, mn_offset(operand, coord), y[i][0]);
        }
    }
}

/* Packs that a thread has on their way at once: 32 bytes of each view, but 16 of many views, whose
 * registers would leave few threads. */
template <mn_operand_types TYPES, typename F>
__host__ __device__ constexpr int mn_vecs_in_flight() {
    return TYPES == MN_ALL_BF16 && F::INS + F::OUTS < 6 ? 2 : 1;
}

/* Blocks that a processor is to hold, least. */
template <mn_operand_types TYPES, typename F>
__host__ __device__ constexpr int mn_min_blocks_per_sm() {
    return TYPES == MN_ALL_BF16 && mn_vecs_in_flight<TYPES, F>() == 1 ? 4 : 1;
}

template <mn_operand_types TYPES, typename F>
__global__ void __launch_bounds__(MN_ELEMENTWISE_THREADS, mn_min_blocks_per_sm<TYPES, F>())
elementwise_vec_kernel(const __grid_constant__ mn_elementwise<F> e) {
    constexpr int INS = F::INS, OUTS = F::OUTS, N = MN_VEC, PREFETCH = mn_vecs_in_flight<TYPES,
        F>();
    const uint32_t first = blockIdx.x * (MN_ELEMENTWISE_THREADS * PREFETCH) + threadIdx.x;
    int64_t at[PREFETCH][INS + OUTS];
    mn_raw_vec raw[PREFETCH][INS + OUTS];
    bool full[PREFETCH];
#pragma unroll
    for (int k = 0; k < PREFETCH; k++) {
        const uint32_t pack = first + k * MN_ELEMENTWISE_THREADS;
        full[k] = false;
        if (pack >= e.calc.n_vecs) continue;
        const mn_coord coord = mn_elementwise_coord<N>(e, pack);
        full[k] = (int64_t)coord.x + N <= e.calc.width;
        if (!full[k]) {
            mn_elementwise_scalar(e, coord, (int)(e.calc.width - coord.x));
            continue;
        }
#pragma unroll
        for (int i = 0; i < INS + OUTS; i++) {
            at[k][i] = mn_elementwise_offset(e, e.operand[i], coord);
            raw[k][i] = { { 0, 0, 0, 0 }, { 0, 0, 0, 0 } };
            if (mn_operand_is_read(e, i)) raw[k][i] = mn_load_raw<TYPES>(e.operand[i], at[k][i]);
        }
    }
#pragma unroll
    for (int k = 0; k < PREFETCH; k++) {
        if (!full[k]) continue;
        float x[INS + OUTS][N], y[OUTS][N];
#pragma unroll
        for (int i = 0; i < INS + OUTS; i++) mn_unpack<TYPES>(x[i], e.operand[i], raw[k][i]);
        e.f.template run<TYPES == MN_ALL_BF16>(x, y);
#pragma unroll
        for (int i = 0; i < OUTS; i++) {
            if (!e.operand[INS + i].data) continue;
            if (e.add[i]) {
#pragma unroll
                for (int j = 0; j < N; j++) y[i][j] += x[INS + i][j];
            }
            mn_store_vec<TYPES>(e.operand[INS + i], at[k][INS + i], y[i]);
        }
    }
}

template <typename F>
__global__ void __launch_bounds__(MN_ELEMENTWISE_THREADS)
elementwise_scalar_kernel(const __grid_constant__ mn_elementwise<F> e) {
    const uint32_t i = blockIdx.x * MN_ELEMENTWISE_THREADS + threadIdx.x;
    if (i < e.calc.n_vecs) mn_elementwise_scalar(e, mn_coord_of<1>(e.calc, i), 1);
}

template <mn_operand_types TYPES, typename F>
inline void mn_launch_vec(const mn_elementwise<F> &e, cudaStream_t stream) {
    const unsigned blocks = mn_blocks(e.calc.n_vecs,
                                      MN_ELEMENTWISE_THREADS * mn_vecs_in_flight<TYPES, F>());
    elementwise_vec_kernel<TYPES, F><<<blocks, MN_ELEMENTWISE_THREADS, 0, stream>>>(e);
}

/* Runs over `shape`; f, sides and add are set. */
template <typename F>
inline int mn_launch_elementwise(mn_elementwise<F> &e, const int64_t shape[4],
                                 cudaStream_t stream) {
    const mn_axes axes = mn_coalesce_axes(shape, e.operand);
    bool packs = true;
    for (const mn_operand &operand : e.operand) packs &= mn_operand_vec_ok(operand, axes);
    e.flat = axes.n[0] * axes.n[1] * axes.n[2] == 1;
    e.even = axes.n[0] * axes.n[1] == 1;
    for (const mn_operand &operand : e.operand) {
        e.even &= operand.stride[2] >= 0 && operand.stride[2] < (int64_t)1 << 32;
    }
    if (!mn_offset_calc_init(&e.calc, axes,
                             packs ? MN_VEC : 1)) return cudaErrorInvalidConfiguration;
    if (e.calc.n_vecs == 0) return cudaSuccess;
    const mn_operand_types types = mn_operand_types_of(e.operand);
    if (!packs) {
        const unsigned blocks = mn_blocks(e.calc.n_vecs, MN_ELEMENTWISE_THREADS);
        elementwise_scalar_kernel<F><<<blocks, MN_ELEMENTWISE_THREADS, 0, stream>>>(e);
    } else if (types == MN_ALL_BF16) {
        mn_launch_vec<MN_ALL_BF16>(e, stream);
    } else if (types == MN_ALL_F32) {
        mn_launch_vec<MN_ALL_F32>(e, stream);
    } else {
        mn_launch_vec<MN_MIXED>(e, stream);
    }
    return mn_launch_status();
}

/* Runs f over `shape`. */
template <typename F>
inline int mn_run_elementwise(const F &f, const int64_t shape[4],
                              const mn_view *const (&in)[F::INS],
                       const mn_view *const (&out)[F::OUTS], const bool (&add)[F::OUTS],
                       void *stream) {
    mn_elementwise<F> e = {};
    e.f = f;
    for (int i = 0; i < F::INS; i++) e.operand[i] = mn_operand_of(*in[i]);
    for (int i = 0; i < F::OUTS; i++) {
        e.operand[F::INS + i] = mn_operand_of(*out[i]);
        e.add[i] = add[i];
    }
    return mn_launch_elementwise(e, shape, (cudaStream_t)stream);
}

}    // namespace mneme::elementwise

#endif
