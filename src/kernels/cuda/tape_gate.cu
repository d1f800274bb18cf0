/* tape_gate.cu - both gradients of a row's gate in one pass (each_gate.cuh): a team of lanes goes
 * along a row, a pack of numbers each, and adds its sums up at the end. Teams take AHEAD rows at
 * once, whose numbers are all on their way before the first are used. */
#include "kernels/cuda/each_forward.cuh"
#include "kernels/cuda/each_gate.cuh"

enum { THREADS = 256, LANES = 32, AHEAD = 2 };

struct gates {
    mn_walk rows;    // a pack is a row
    mn_side x, b, dy, dx, db;
    int64_t width;
    int lanes;
    bool add_x, add_b;
    mn_unary f;
};

template <int N, mn_types TYPES>
__device__ static mn_raw fetch(const mn_side &side, int64_t at) {
    if (N == MN_PACK) return mn_fetch<TYPES>(side, at);
    mn_raw raw = {};
    raw.low.x = __float_as_uint(mn_side_get(side, at));
    return raw;
}

template <int N, mn_types TYPES>
__device__ static void unpack(float (&x)[N], const mn_side &side, const mn_raw &raw) {
    if constexpr (N == MN_PACK) mn_unpack<TYPES>(x, side, raw);
    else x[0] = __uint_as_float(raw.low.x);
}

template <int N, mn_types TYPES>
__device__ static void store(const mn_side &side, int64_t at, const float (&x)[N]) {
    if constexpr (N == MN_PACK) mn_store_pack<TYPES>(side, at, x);
    else mn_side_put(side, at, x[0]);
}

/* f'(x) and f(x), of x itself 1 and x. */
template <bool SHAPED, bool NARROW, int N>
__device__ static void shape(const gates &g, const float (&x)[N], float (&slope)[N],
                             float (&value)[N]) {
    if constexpr (SHAPED) {
        mn_fn_both<NARROW>(g.f, x, slope, value);
    } else {
#pragma unroll
        for (int j = 0; j < N; j++) slope[j] = 1.0f, value[j] = x[j];
    }
}

template <int N, mn_types TYPES, bool SHAPED>
__global__ void __launch_bounds__(THREADS, TYPES == MN_NARROW ? 3 : 2)
gate_kernel(const __grid_constant__ gates g) {
    const int lane = threadIdx.x % g.lanes, teams = THREADS / g.lanes;
    const uint32_t first = blockIdx.x * (uint32_t)(teams * AHEAD) + threadIdx.x / g.lanes;
    mn_spot spot[AHEAD];
    bool there[AHEAD];
    float b[AHEAD], sum[AHEAD] = {};
#pragma unroll
    for (int k = 0; k < AHEAD; k++) {
        const uint32_t row = first + k * teams;
        there[k] = row < g.rows.n_packs;
        spot[k] = mn_spot_of<1>(g.rows, there[k] ? row : 0);
        b[k] = mn_side_get(g.b, mn_offset(g.b, spot[k]));
    }
    for (int64_t s = lane * N; s < g.width; s += g.lanes * N) {
        mn_raw x[AHEAD], dy[AHEAD], old[AHEAD] = {};
#pragma unroll
        for (int k = 0; k < AHEAD; k++) {
            x[k] = fetch<N, TYPES>(g.x, mn_offset(g.x, spot[k]) + s);
            dy[k] = fetch<N, TYPES>(g.dy, mn_offset(g.dy, spot[k]) + s);
            if (g.add_x) old[k] = fetch<N, TYPES>(g.dx, mn_offset(g.dx, spot[k]) + s);
        }
#pragma unroll
        for (int k = 0; k < AHEAD; k++) {
            float at[N], d[N], slope[N], value[N], y[N];
            unpack<N, TYPES>(at, g.x, x[k]);
            unpack<N, TYPES>(d, g.dy, dy[k]);
            unpack<N, TYPES>(y, g.dx, old[k]);
            shape<SHAPED, TYPES == MN_NARROW>(g, at, slope, value);
#pragma unroll
            for (int j = 0; j < N; j++) {
                sum[k] = fmaf(d[j], value[j], sum[k]);
                slope[j] *= d[j] * b[k];
                y[j] = g.add_x ? slope[j] + y[j] : slope[j];
            }
            if (!there[k] || !g.dx.data) continue;
            store<N, TYPES>(g.dx, mn_offset(g.dx, spot[k]) + s, y);
        }
    }
#pragma unroll
    for (int k = 0; k < AHEAD; k++) {
        float all = sum[k];
        for (int other = g.lanes / 2; other > 0; other /= 2) {
            all += __shfl_xor_sync(0xffffffffu, all, other);
        }
        if (lane > 0 || !there[k]) continue;
        const int64_t at = mn_offset(g.db, spot[k]);
        mn_side_put(g.db, at, g.add_b ? mn_side_get(g.db, at) + all : all);
    }
}

/* Whether rows of a side can be taken in packs. */
static bool packs(const mn_side &side, const mn_axes &axes) {
    return !side.data || (side.stride[3] == 1 && mn_side_packs(side, axes));
}

template <int N, mn_types TYPES>
static int launch(gates &g, bool shaped, cudaStream_t on) {
    for (g.lanes = 1; g.lanes < LANES && g.lanes * N < g.width;) g.lanes *= 2;
    const unsigned blocks = mn_blocks(g.rows.n_packs, THREADS / g.lanes * AHEAD);
    if (shaped) gate_kernel<N, TYPES, true><<<blocks, THREADS, 0, on>>>(g);
    else gate_kernel<N, TYPES, false><<<blocks, THREADS, 0, on>>>(g);
    return mn_launched();
}

int mn_gate_back_cuda(const mn_gate_back &w, void *stream) {
    const cudaStream_t on = (cudaStream_t)stream;
    gates g = { {}, mn_side_of(*w.x), mn_side_of(*w.b), mn_side_of(*w.dy), mn_side_of(*w.dx),
                mn_side_of(*w.db), w.shape[3], 1, w.add_x, w.add_b, w.f ? *w.f : MN_UNARY_SILU };
    const mn_axes each = { { w.shape[0], w.shape[1], w.shape[2], 1 } };
    const mn_axes all = { { w.shape[0], w.shape[1], w.shape[2], w.shape[3] } };
    if (!mn_walk_over(&g.rows, each, 1)) return cudaErrorInvalidConfiguration;
    if (g.rows.n_packs == 0) return cudaSuccess;
    const bool in_packs = g.width % MN_PACK == 0 && packs(g.x, all) && packs(g.dy, all) &&
                          packs(g.dx, all);
    if (!in_packs) return launch<1, MN_MIXED>(g, w.f, on);
    const mn_side sides[3] = { g.x, g.dy, g.dx };
    switch (mn_types_of(sides)) {
    case MN_NARROW: return launch<MN_PACK, MN_NARROW>(g, w.f, on);
    case MN_WIDE: return launch<MN_PACK, MN_WIDE>(g, w.f, on);
    default: return launch<MN_PACK, MN_MIXED>(g, w.f, on);
    }
}
