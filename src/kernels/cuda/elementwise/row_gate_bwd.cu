/* row_gate_bwd.cu - both gradients of a row's gate in one pass (row_gate.cuh): a row_group of
 * lanes goes along a row, a pack of numbers each, and adds its sums up at the end. Teams take
 * PREFETCH rows at once, and all that is read for them is on its way before the first is used. */
#include "kernels/cuda/elementwise/elementwise_fwd.cuh"
#include "kernels/cuda/elementwise/row_gate.cuh"

namespace mneme::elementwise {

enum { THREADS = 256, LANES = 32, PREFETCH = 2 };

struct gates {
    mn_offset_calc rows;    // a pack is a row
    mn_operand x, b, dy, dx, db, e, c, dc;
    int64_t width;
    int shift;       // of a row_group's lanes
    bool add_x, add_b;
    mn_unary f;
};

/* A gate of x itself, two of them, one of f(x). */
enum kind { PLAIN, TWO_GATES, ACTIVATED };

/* ---- rows ------------------------------------------------------------------------------------ */

struct row_pos {
    uint32_t row;
    mn_coord coord;
    bool in_range;
};

/* Where a side has a row. EVEN: rows of all sides but c lie at equal distances. */
template <bool EVEN>
__device__ static int64_t row_of(const mn_operand &operand, const row_pos &at) {
    if (EVEN) return (int64_t)((uint64_t)at.row * (uint32_t)operand.stride[2]);
    return mn_offset(operand, at.coord);
}

/* One number as it is stored. */
__device__ static uint32_t load_one(const mn_operand &operand, int64_t at) {
    return operand.is_f32 ? ((const uint32_t *)operand.data)[at]
        : ((const uint16_t *)operand.data)[at];
}

__device__ static float unpack_one(const mn_operand &operand, uint32_t bits) {
    return __uint_as_float(operand.is_f32 ? bits : bits << 16);
}

template <int N, mn_operand_types TYPES>
__device__ static mn_raw_vec fetch(const mn_operand &operand, int64_t at) {
    if (N == MN_VEC) return mn_load_raw<TYPES, false>(operand, at);
    mn_raw_vec raw = {};
    raw.low.x = load_one(operand, at);
    return raw;
}

template <int N, mn_operand_types TYPES>
__device__ static void unpack(float (&x)[N], const mn_operand &operand, const mn_raw_vec &raw) {
    if constexpr (N == MN_VEC) mn_unpack<TYPES, false>(x, operand, raw);
    else x[0] = unpack_one(operand, raw.low.x);
}

template <int N, mn_operand_types TYPES>
__device__ static void store(const mn_operand &operand, int64_t at, const float (&x)[N]) {
    if constexpr (N == MN_VEC) mn_store_vec<TYPES>(operand, at, x);
    else mn_operand_store(operand, at, x[0]);
}

/* The sum over a row to its place, by the first of the row's lanes. */
template <bool EVEN>
__device__ static void store_sum(const gates &g, const mn_operand &operand, const row_pos &at,
                                 float sum,
                               bool add) {
    const int lanes = 1 << g.shift;
    for (int other = lanes / 2; other > 0; other /= 2) {
        sum += __shfl_xor_sync(0xffffffffu, sum, other);
    }
    if ((threadIdx.x & (lanes - 1)) > 0 || !at.in_range || !operand.data) return;
    const int64_t to = row_of<EVEN>(operand, at);
    mn_operand_store(operand, to, add ? mn_operand_load(operand, to) + sum : sum);
}

/* ---- gradients ------------------------------------------------------------------------------- */

/* What a row_group has of a row: packs of x, dy, e and what dx had, and the row's gates. */
struct row_frags {
    mn_raw_vec x, dy, e, old;
    uint32_t b, c;
};

/* f'(x) and f(x), of x itself 1 and x. */
template <kind KIND, bool BF16, int N>
__device__ static void shape(const gates &g, const float (&x)[N], float (&slope)[N],
                             float (&value)[N]) {
    if constexpr (KIND == ACTIVATED) {
        mn_fn_value_slope<BF16>(g.f, x, slope, value);
    } else {
#pragma unroll
        for (int j = 0; j < N; j++) slope[j] = 1.0f, value[j] = x[j];
    }
}

/* The pack of dx, and the pack's share of both sums. */
template <int N, mn_operand_types TYPES, kind KIND>
__device__ static void gradients(float (&y)[N], float &sum, float &second, const gates &g,
                                 const row_frags &from) {
    const float b = unpack_one(g.b, from.b), c = unpack_one(g.c, from.c);
    float x[N], dy[N], slope[N], value[N];
    unpack<N, TYPES>(x, g.x, from.x);
    unpack<N, TYPES>(dy, g.dy, from.dy);
    unpack<N, TYPES>(y, g.dx, from.old);
    shape<KIND, TYPES == MN_ALL_BF16>(g, x, slope, value);
#pragma unroll
    for (int j = 0; j < N; j++) {
        sum = fmaf(dy[j], value[j], sum);
        const float gradient = KIND == ACTIVATED ? slope[j] * (dy[j] * b) : dy[j] * b;
        y[j] = g.add_x ? gradient + y[j] : gradient;
    }
    if constexpr (KIND == TWO_GATES) {
        float e[N];
        unpack<N, TYPES>(e, g.e, from.e);
#pragma unroll
        for (int j = 0; j < N; j++) {
            second = fmaf(e[j], value[j], second);
            y[j] = fmaf(e[j], c, y[j]);
        }
    }
}

template <int N, mn_operand_types TYPES, kind KIND, bool EVEN>
__global__ void __launch_bounds__(THREADS, TYPES == MN_ALL_BF16 ? 4 : 2)
row_gate_bwd_kernel(const __grid_constant__ gates g) {
    const int lanes = 1 << g.shift, lane = threadIdx.x & (lanes - 1),
        row_groups = THREADS >> g.shift;
    row_pos at[PREFETCH];
    float sum[PREFETCH] = {}, second[PREFETCH] = {};
#pragma unroll
    for (int k = 0; k < PREFETCH; k++) {
        const uint32_t row = (blockIdx.x * PREFETCH + k) * row_groups + (threadIdx.x >> g.shift);
        at[k].in_range = row < g.rows.n_vecs;
        at[k].row = at[k].in_range ? row : 0;
        at[k].coord = mn_coord_of<1>(g.rows, at[k].row);
    }
    for (int64_t s = lane * N; s < g.width; s += lanes * N) {
        // all of it asked for in each turn: none is to wait for another
        row_frags from[PREFETCH] = {};
        if (g.add_x) {
#pragma unroll
            for (int k = 0; k < PREFETCH; k++) {
                from[k].old = fetch<N, TYPES>(g.dx, row_of<EVEN>(g.dx, at[k]) + s);
            }
        }
#pragma unroll
        for (int k = 0; k < PREFETCH; k++) {
            from[k].b = load_one(g.b, row_of<EVEN>(g.b, at[k]));
            if (KIND == TWO_GATES) from[k].c = load_one(g.c, row_of<false>(g.c, at[k]));
            from[k].x = fetch<N, TYPES>(g.x, row_of<EVEN>(g.x, at[k]) + s);
            from[k].dy = fetch<N, TYPES>(g.dy, row_of<EVEN>(g.dy, at[k]) + s);
            if (KIND == TWO_GATES) from[k].e = fetch<N, TYPES>(g.e, row_of<EVEN>(g.e, at[k]) + s);
        }
#pragma unroll
        for (int k = 0; k < PREFETCH; k++) {
            float y[N];
            gradients<N, TYPES, KIND>(y, sum[k], second[k], g, from[k]);
            if (!at[k].in_range || !g.dx.data) continue;
            store<N, TYPES>(g.dx, row_of<EVEN>(g.dx, at[k]) + s, y);
        }
    }
#pragma unroll
    for (int k = 0; k < PREFETCH; k++) {
        store_sum<EVEN>(g, g.db, at[k], sum[k], g.add_b);
        if (KIND == TWO_GATES) store_sum<EVEN>(g, g.dc, at[k], second[k], false);
    }
}

/* ---- launches -------------------------------------------------------------------------------- */

/* Whether rows of a side can be taken in packs. */
static bool operand_vec_ok(const mn_operand &operand, const mn_axes &axes) {
    return !operand.data || (operand.stride[3] == 1 && mn_operand_vec_ok(operand, axes));
}

/* Whether rows of a side lie at equal distances, which 32 bits hold. */
static bool is_even(mn_operand &operand, const int64_t n[4]) {
    if (n[2] == 1) operand.stride[2] = n[1] == 1 ? operand.stride[0] : operand.stride[1];
    const bool even = (n[1] == 1 || operand.stride[1] == operand.stride[2] * n[2]) &&
                      (n[0] == 1 || operand.stride[0] == operand.stride[2] * n[2] * n[1]);
    return !operand.data || (even && operand.stride[2] < (int64_t)1 << 32);
}

template <int N, mn_operand_types TYPES, kind KIND>
static void launch_kind(const gates &g, bool even, cudaStream_t on) {
    const unsigned blocks = mn_blocks(g.rows.n_vecs, (THREADS >> g.shift) * PREFETCH);
    if (even) row_gate_bwd_kernel<N, TYPES, KIND, true><<<blocks, THREADS, 0, on>>>(g);
    else row_gate_bwd_kernel<N, TYPES, KIND, false><<<blocks, THREADS, 0, on>>>(g);
}

template <int N, mn_operand_types TYPES>
static int launch(gates &g, kind how, bool even, cudaStream_t on) {
    for (g.shift = 0; 1 << g.shift < LANES && (N << g.shift) < g.width;) g.shift++;
    switch (how) {
    case PLAIN: launch_kind<N, TYPES, PLAIN>(g, even, on); break;
    case TWO_GATES: launch_kind<N, TYPES, TWO_GATES>(g, even, on); break;
    default: launch_kind<N, TYPES, ACTIVATED>(g, even, on); break;
    }
    return mn_launch_status();
}

int mn_row_gate_bwd_cuda(const mn_row_gate_bwd &w, void *stream) {
    const cudaStream_t on = (cudaStream_t)stream;
    const mn_view none = {};
    const kind how = w.f ? ACTIVATED : w.e && w.e->data ? TWO_GATES : PLAIN;
    const bool twice = how == TWO_GATES;
    gates g = { {}, mn_operand_of(*w.x), mn_operand_of(*w.b), mn_operand_of(*w.dy),
        mn_operand_of(*w.dx),
                mn_operand_of(*w.db), mn_operand_of(twice ? *w.e : none),
                mn_operand_of(twice ? *w.c : none), mn_operand_of(twice ? *w.dc : none),
                    w.shape[3], 0,
                w.add_x, w.add_b, w.f ? *w.f : MN_UNARY_SILU };
    const mn_axes each = { { w.shape[0], w.shape[1], w.shape[2], 1 } };
    const mn_axes all = { { w.shape[0], w.shape[1], w.shape[2], w.shape[3] } };
    if (!mn_offset_calc_init(&g.rows, each, 1)) return cudaErrorInvalidConfiguration;
    if (g.rows.n_vecs == 0) return cudaSuccess;
    mn_operand *const rows[] = { &g.x, &g.dy, &g.dx, &g.e, &g.b, &g.db, &g.dc };
    bool vectorized = g.width % MN_VEC == 0, even = true;
    for (int i = 0; i < 4; i++) vectorized &= operand_vec_ok(*rows[i], all);
    for (mn_operand *operand : rows) {
        mn_operand tried = *operand;
        even &= is_even(tried, w.shape);
    }
    for (int i = 0; i < 7 && even; i++) is_even(*rows[i], w.shape);
    const mn_operand operands[4] = { g.x, g.dy, g.dx, g.e };
    if (!vectorized) return launch<1, MN_MIXED>(g, how, even, on);
    switch (mn_operand_types_of(operands)) {
    case MN_ALL_BF16: return launch<MN_VEC, MN_ALL_BF16>(g, how, even, on);
    case MN_ALL_F32: return launch<MN_VEC, MN_ALL_F32>(g, how, even, on);
    default: return launch<MN_VEC, MN_MIXED>(g, how, even, on);
    }
}

}    // namespace mneme::elementwise
