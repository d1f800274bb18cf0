/* row_gate_bwd.cu - both gradients of a row's gate in one pass (row_gate.cuh): a team of lanes goes
 * along a row, a pack of numbers each, and adds its sums up at the end. Teams take AHEAD rows at
 * once, and all that is read for them is on its way before the first is used. */
#include "kernels/cuda/elementwise/elementwise_fwd.cuh"
#include "kernels/cuda/elementwise/row_gate.cuh"

enum { THREADS = 256, LANES = 32, AHEAD = 2 };

struct gates {
    mn_scan rows;    // a pack is a row
    mn_side x, b, dy, dx, db, e, c, dc;
    int64_t width;
    int shift;       // of a team's lanes
    bool add_x, add_b;
    mn_unary f;
};

/* A gate of x itself, two of them, one of f(x). */
enum kind { PLAIN, TWICE, SHAPED };

/* ---- rows ------------------------------------------------------------------------------------ */

struct place {
    uint32_t row;
    mn_spot spot;
    bool there;
};

/* Where a side has a row. EVEN: rows of all sides but c lie at equal distances. */
template <bool EVEN>
__device__ static int64_t row_of(const mn_side &side, const place &at) {
    if (EVEN) return (int64_t)((uint64_t)at.row * (uint32_t)side.stride[2]);
    return mn_offset(side, at.spot);
}

/* One number as it is stored. */
__device__ static uint32_t load_one(const mn_side &side, int64_t at) {
    return side.wide ? ((const uint32_t *)side.data)[at] : ((const uint16_t *)side.data)[at];
}

__device__ static float unpack_one(const mn_side &side, uint32_t bits) {
    return __uint_as_float(side.wide ? bits : bits << 16);
}

template <int N, mn_types TYPES>
__device__ static mn_raw fetch(const mn_side &side, int64_t at) {
    if (N == MN_PACK) return mn_load_tile<TYPES, false>(side, at);
    mn_raw raw = {};
    raw.low.x = load_one(side, at);
    return raw;
}

template <int N, mn_types TYPES>
__device__ static void unpack(float (&x)[N], const mn_side &side, const mn_raw &raw) {
    if constexpr (N == MN_PACK) mn_unpack<TYPES, false>(x, side, raw);
    else x[0] = unpack_one(side, raw.low.x);
}

template <int N, mn_types TYPES>
__device__ static void store(const mn_side &side, int64_t at, const float (&x)[N]) {
    if constexpr (N == MN_PACK) mn_store_pack<TYPES>(side, at, x);
    else mn_side_put(side, at, x[0]);
}

/* The sum over a row to its place, by the first of the row's lanes. */
template <bool EVEN>
__device__ static void put_sum(const gates &g, const mn_side &side, const place &at, float sum,
                               bool add) {
    const int lanes = 1 << g.shift;
    for (int other = lanes / 2; other > 0; other /= 2) {
        sum += __shfl_xor_sync(0xffffffffu, sum, other);
    }
    if ((threadIdx.x & (lanes - 1)) > 0 || !at.there || !side.data) return;
    const int64_t to = row_of<EVEN>(side, at);
    mn_side_put(side, to, add ? mn_side_get(side, to) + sum : sum);
}

/* ---- gradients ------------------------------------------------------------------------------- */

/* What a team has of a row: packs of x, dy, e and what dx had, and the row's gates. */
struct taken {
    mn_raw x, dy, e, old;
    uint32_t b, c;
};

/* f'(x) and f(x), of x itself 1 and x. */
template <kind KIND, bool NARROW, int N>
__device__ static void shape(const gates &g, const float (&x)[N], float (&slope)[N],
                             float (&value)[N]) {
    if constexpr (KIND == SHAPED) {
        mn_fn_both<NARROW>(g.f, x, slope, value);
    } else {
#pragma unroll
        for (int j = 0; j < N; j++) slope[j] = 1.0f, value[j] = x[j];
    }
}

/* The pack of dx, and the pack's share of both sums. */
template <int N, mn_types TYPES, kind KIND>
__device__ static void gradients(float (&y)[N], float &sum, float &second, const gates &g,
                                 const taken &from) {
    const float b = unpack_one(g.b, from.b), c = unpack_one(g.c, from.c);
    float x[N], dy[N], slope[N], value[N];
    unpack<N, TYPES>(x, g.x, from.x);
    unpack<N, TYPES>(dy, g.dy, from.dy);
    unpack<N, TYPES>(y, g.dx, from.old);
    shape<KIND, TYPES == MN_NARROW>(g, x, slope, value);
#pragma unroll
    for (int j = 0; j < N; j++) {
        sum = fmaf(dy[j], value[j], sum);
        const float gradient = KIND == SHAPED ? slope[j] * (dy[j] * b) : dy[j] * b;
        y[j] = g.add_x ? gradient + y[j] : gradient;
    }
    if constexpr (KIND == TWICE) {
        float e[N];
        unpack<N, TYPES>(e, g.e, from.e);
#pragma unroll
        for (int j = 0; j < N; j++) {
            second = fmaf(e[j], value[j], second);
            y[j] = fmaf(e[j], c, y[j]);
        }
    }
}

template <int N, mn_types TYPES, kind KIND, bool EVEN>
__global__ void __launch_bounds__(THREADS, TYPES == MN_NARROW ? 4 : 2)
gate_kernel(const __grid_constant__ gates g) {
    const int lanes = 1 << g.shift, lane = threadIdx.x & (lanes - 1), groups = THREADS >> g.shift;
    place at[AHEAD];
    float sum[AHEAD] = {}, second[AHEAD] = {};
#pragma unroll
    for (int k = 0; k < AHEAD; k++) {
        const uint32_t row = (blockIdx.x * AHEAD + k) * groups + (threadIdx.x >> g.shift);
        at[k].there = row < g.rows.n_packs;
        at[k].row = at[k].there ? row : 0;
        at[k].spot = mn_spot_of<1>(g.rows, at[k].row);
    }
    for (int64_t s = lane * N; s < g.width; s += lanes * N) {
        taken from[AHEAD] = {};    // all of it asked for in each turn: none is to wait for another
        if (g.add_x) {
#pragma unroll
            for (int k = 0; k < AHEAD; k++) {
                from[k].old = fetch<N, TYPES>(g.dx, row_of<EVEN>(g.dx, at[k]) + s);
            }
        }
#pragma unroll
        for (int k = 0; k < AHEAD; k++) {
            from[k].b = load_one(g.b, row_of<EVEN>(g.b, at[k]));
            if (KIND == TWICE) from[k].c = load_one(g.c, row_of<false>(g.c, at[k]));
            from[k].x = fetch<N, TYPES>(g.x, row_of<EVEN>(g.x, at[k]) + s);
            from[k].dy = fetch<N, TYPES>(g.dy, row_of<EVEN>(g.dy, at[k]) + s);
            if (KIND == TWICE) from[k].e = fetch<N, TYPES>(g.e, row_of<EVEN>(g.e, at[k]) + s);
        }
#pragma unroll
        for (int k = 0; k < AHEAD; k++) {
            float y[N];
            gradients<N, TYPES, KIND>(y, sum[k], second[k], g, from[k]);
            if (!at[k].there || !g.dx.data) continue;
            store<N, TYPES>(g.dx, row_of<EVEN>(g.dx, at[k]) + s, y);
        }
    }
#pragma unroll
    for (int k = 0; k < AHEAD; k++) {
        put_sum<EVEN>(g, g.db, at[k], sum[k], g.add_b);
        if (KIND == TWICE) put_sum<EVEN>(g, g.dc, at[k], second[k], false);
    }
}

/* ---- launches -------------------------------------------------------------------------------- */

/* Whether rows of a side can be taken in packs. */
static bool packs(const mn_side &side, const mn_axes &axes) {
    return !side.data || (side.stride[3] == 1 && mn_side_packs(side, axes));
}

/* Whether rows of a side lie at equal distances, which 32 bits hold. */
static bool is_even(mn_side &side, const int64_t n[4]) {
    if (n[2] == 1) side.stride[2] = n[1] == 1 ? side.stride[0] : side.stride[1];
    const bool even = (n[1] == 1 || side.stride[1] == side.stride[2] * n[2]) &&
                      (n[0] == 1 || side.stride[0] == side.stride[2] * n[2] * n[1]);
    return !side.data || (even && side.stride[2] < (int64_t)1 << 32);
}

template <int N, mn_types TYPES, kind KIND>
static void launch_kind(const gates &g, bool even, cudaStream_t on) {
    const unsigned blocks = mn_blocks(g.rows.n_packs, (THREADS >> g.shift) * AHEAD);
    if (even) gate_kernel<N, TYPES, KIND, true><<<blocks, THREADS, 0, on>>>(g);
    else gate_kernel<N, TYPES, KIND, false><<<blocks, THREADS, 0, on>>>(g);
}

template <int N, mn_types TYPES>
static int launch(gates &g, kind how, bool even, cudaStream_t on) {
    for (g.shift = 0; 1 << g.shift < LANES && (N << g.shift) < g.width;) g.shift++;
    switch (how) {
    case PLAIN: launch_kind<N, TYPES, PLAIN>(g, even, on); break;
    case TWICE: launch_kind<N, TYPES, TWICE>(g, even, on); break;
    default: launch_kind<N, TYPES, SHAPED>(g, even, on); break;
    }
    return mn_launch_status();
}

int mn_gate_back_cuda(const mn_gate_back &w, void *stream) {
    const cudaStream_t on = (cudaStream_t)stream;
    const mn_view none = {};
    const kind how = w.f ? SHAPED : w.e && w.e->data ? TWICE : PLAIN;
    const bool twice = how == TWICE;
    gates g = { {}, mn_side_of(*w.x), mn_side_of(*w.b), mn_side_of(*w.dy), mn_side_of(*w.dx),
                mn_side_of(*w.db), mn_side_of(twice ? *w.e : none),
                mn_side_of(twice ? *w.c : none), mn_side_of(twice ? *w.dc : none), w.shape[3], 0,
                w.add_x, w.add_b, w.f ? *w.f : MN_UNARY_SILU };
    const mn_axes each = { { w.shape[0], w.shape[1], w.shape[2], 1 } };
    const mn_axes all = { { w.shape[0], w.shape[1], w.shape[2], w.shape[3] } };
    if (!mn_iterate_over(&g.rows, each, 1)) return cudaErrorInvalidConfiguration;
    if (g.rows.n_packs == 0) return cudaSuccess;
    mn_side *const rows[] = { &g.x, &g.dy, &g.dx, &g.e, &g.b, &g.db, &g.dc };
    bool in_packs = g.width % MN_PACK == 0, even = true;
    for (int i = 0; i < 4; i++) in_packs &= packs(*rows[i], all);
    for (mn_side *side : rows) {
        mn_side tried = *side;
        even &= is_even(tried, w.shape);
    }
    for (int i = 0; i < 7 && even; i++) is_even(*rows[i], w.shape);
    const mn_side sides[4] = { g.x, g.dy, g.dx, g.e };
    if (!in_packs) return launch<1, MN_MIXED>(g, how, even, on);
    switch (mn_types_of(sides)) {
    case MN_NARROW: return launch<MN_PACK, MN_NARROW>(g, how, even, on);
    case MN_WIDE: return launch<MN_PACK, MN_WIDE>(g, how, even, on);
    default: return launch<MN_PACK, MN_MIXED>(g, how, even, on);
    }
}
