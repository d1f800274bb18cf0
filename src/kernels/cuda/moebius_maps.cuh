/* moebius_maps.cuh - Kalman Linear Attention by chunks, going back: what a chunk does to the
 * adjoint behind it, and with that the adjoints at all borders.
 *
 * Adjoints are linear once the states are known, so that a chunk is
 *
 *   (lam, eta) <- (G lam + H eta + lam', E eta + eta')
 *
 * where lam', eta' start from nothing behind it and H, E from an eta of 1 alone. */
#ifndef MN_KERNELS_CUDA_MOEBIUS_MAPS_CUH
#define MN_KERNELS_CUDA_MOEBIUS_MAPS_CUH

#include "kernels/cuda/moebius.cuh"

namespace moebius {

enum { BACK_LAM, BACK_ETA, BACK_G, BACK_H, BACK_E, BACK_SETS };

/* The adjoint in front of a chunk that has none behind it, and what becomes of one there. */
struct back_map {
    state d;
    float g[SLOTS], h[SLOTS], e[SLOTS];
};

/* One token back, from the states before and after it. */
__device__ __forceinline__ void map_token(back_map &map, const dynamics &dyn, const state &before,
                                          const state &after, const float (&q)[SLOTS], float gy,
                                          float gw, bool prior) {
#pragma unroll
    for (int j = 0; j < SLOTS; j++) {
        const float a = dyn.a[j], a2 = dyn.a2[j], p = dyn.p[j];
        const float var = mn_inverse(fmaxf(after.lam[j], floor_at)), mean = after.eta[j] * var;
        const float gm = gy * q[j] * (prior ? a : 1.0f);
        const float gv = gw * q[j] * q[j] * (prior ? a2 : 1.0f);
        const float ne = fmaf(gm, var, map.d.eta[j]);
        const float pull = after.lam[j] >= floor_at ? fmaf(gm, mean, gv * var) : 0.0f;
        const float nl = fmaf(-var, pull, map.d.lam[j]);
        const float eta = before.eta[j], den = fmaf(p, before.lam[j], a2);
        const float g = mn_inverse(fmaxf(den, floor_at)), ag = a * g, pull_eta = p * eta;
        const bool bent = den >= floor_at;
        map.d.eta[j] = ne * ag;
        map.e[j] *= ag;
        map.d.lam[j] = bent ? g * fmaf(nl * g, a2, -(pull_eta * map.d.eta[j])) : nl * g;
        map.h[j] = bent ? g * fmaf(map.h[j] * g, a2, -(pull_eta * map.e[j])) : map.h[j] * g;
        map.g[j] *= bent ? g * g * a2 : g;
    }
}

/* Four tokens of a tile from t on, by lam and eta. */
template <bool FULL>
__device__ __forceinline__ void map_four(back_map &map, const fours &states, const dynamics &dyn,
                                         const lines_of<FULL> &in, int t, int n_rows, bool prior) {
    state c[5];
    float gy[1][4], gw[1][4] = {};
    states.get(c[0], t);
    in.lines[MEAN_COTS].get(gy, t);
    if (FULL) in.lines[FULL ? SPREAD_COTS : 0].get(gw, t);
#pragma unroll
    for (int i = 0; i < 4; i++) {
        c[i + 1] = c[i];
        if (t + i < n_rows) advance_token(c[i + 1], dyn, in, t + i);
    }
#pragma unroll
    for (int i = 3; i >= 0; i--) {
        float q[SLOTS];
        in.keys[QUERIES].get(q, t + i);
        if (t + i >= n_rows) continue;
        map_token(map, dyn, c[i], c[i + 1], q, gy[0][i], gw[0][i], prior);
    }
}

/* A tile by lam and eta, from the state in front of it. */
template <bool FULL>
__device__ __forceinline__ void map_rows(back_map &map, fours &states, const state &first,
                                         const dynamics &dyn, const lines_of<FULL> &in, int n_rows,
                                         bool prior) {
    states.fill(first, dyn, in, n_rows);
#pragma unroll 1
    for (int t = TOKENS - 4; t >= 0; t -= 4) map_four<FULL>(map, states, dyn, in, t, n_rows, prior);
}

/* An adjoint of rays in which those of eta and lam meet: one token back. */
__device__ __forceinline__ void pull_token(ray &w, float a, float a2, float p, float pk, float k,
                                           float v) {
    w.d = fmaf(pk, fmaf(k, w.n, v * w.e), w.d);
    w.n = fmaf(p, w.d, w.n);
    w.d *= a2;
    w.e *= a;
}

/* Four tokens of a tile from t on, by rays; false where they do not hold. */
template <bool FULL>
__device__ __forceinline__ bool map_rays(back_map &map, const fours &states, const dynamics &dyn,
                                         const ray_edge &edge, const lines_of<FULL> &in, int t,
                                         bool prior) {
    state c;
    rays x;
    float k[4][SLOTS], v[1][4], prec[1][4], gy[1][4], gw[1][4] = {};
    states.get(c, t);
    in.lines[VALUES].get(v, t);
    in.lines[PRECISIONS].get(prec, t);
    in.lines[MEAN_COTS].get(gy, t);
    if (FULL) in.lines[FULL ? SPREAD_COTS : 0].get(gw, t);
#pragma unroll
    for (int i = 0; i < 4; i++) in.keys[KEYS].get(k[i], t + i);
    const bool sound = x.walk(c, dyn, edge, k, v[0], prec[0]);
    ray w[SLOTS], h[SLOTS];
#pragma unroll
    for (int j = 0; j < SLOTS; j++) {
        const float by = x.by[j], lam = x.last.lam[j], eta = x.last.eta[j];
        const float a2 = dyn.a2[j], through = a2 * by;
        w[j] = pull_behind(lam, eta, by, map.d.lam[j], map.d.eta[j]);
        h[j] = pull_behind(lam, eta, by, map.h[j], map.e[j]);
        map.g[j] *= through * through * (a2 * a2);
    }
#pragma unroll
    for (int i = 3; i >= 0; i--) {
        float q[SLOTS];
        in.keys[QUERIES].get(q, t + i);
#pragma unroll
        for (int j = 0; j < SLOTS; j++) {
            const float a = dyn.a[j], a2 = dyn.a2[j], p = dyn.p[j], pk = prec[0][i] * k[i][j];
            read_back<FULL>(w[j], x.at[i + 1][j], dyn, j, q[j], gy[0][i], gw[0][i], prior);
            pull_token(w[j], a, a2, p, pk, k[i][j], v[0][i]);
            pull_token(h[j], a, a2, p, pk, k[i][j], v[0][i]);
        }
    }
#pragma unroll
    for (int j = 0; j < SLOTS; j++) {
        map.d.lam[j] = w[j].n, map.d.eta[j] = w[j].e;
        map.h[j] = h[j].n, map.e[j] = h[j].e;
    }
    return sound;
}

/* A whole tile by rays. */
template <bool FULL>
__device__ __forceinline__ bool map_tile(back_map &map, fours &states, const state &first,
                                         const dynamics &dyn, const ray_edge &edge,
                                         const lines_of<FULL> &in, bool prior) {
    back_map next = map;
    bool sound = true;
    states.fill(first, dyn, in);
#pragma unroll 1
    for (int t = TOKENS - 4; t >= 0; t -= 4) {
        sound = map_rays<FULL>(next, states, dyn, edge, in, t, prior) && sound;
    }
    if (!all_sound(sound)) return false;
    map = next;
    return true;
}

/* Maps of all chunks that have a chunk in front of them. */
template <typename T, bool FULL>
__global__ void __launch_bounds__(block::THREADS, BLOCKS)
back_maps_kernel(const __grid_constant__ mn_moebius_args p, room to, int64_t count) {
    __shared__ lines_of<FULL> both[2];
    __shared__ fours states;
    const dynamics dyn(p);
    const ray_edge edge = dyn.edge();
    for (int64_t slot = blockIdx.y; slot < count; slot += gridDim.y) {
        const chunk at(p.call, slot);
        if (!at.exists || at.first == 0) continue;
        const int64_t set = mn_cell_first_slot(p.call, at.n, TOKENS);
        const int64_t last = at.end_tile() - 1;
        back_map map = {};
        fetched<T, 2, FULL ? 4 : 3> next;
#pragma unroll
        for (int j = 0; j < SLOTS; j++) map.g[j] = map.e[j] = 1.0f;
        next.open(p, at.span);
        next.move(p, last * TOKENS);
        next.begin(both[last % 2], mn_cell_tile_at(at.span, last).n_rows);
        state ahead;
        ahead.load(to.states, set + last);
        for (int64_t i = last; i >= at.first_tile(); i--) {
            const int n_rows = mn_cell_tile_at(at.span, i).n_rows;
            const state first = ahead;
            lines_of<FULL> &in = both[i % 2];
            next.finish(in);
            __syncthreads();
            next.move(p, -(int64_t)TOKENS);
            if (i > at.first_tile()) {
                next.begin(both[(i - 1) % 2], TOKENS);
                ahead.load(to.states, set + i - 1);
            }
            if (n_rows < TOKENS ||
                !map_tile<FULL>(map, states, first, dyn, edge, in, p.from_prior)) {
                map_rows<FULL>(map, states, first, dyn, in, n_rows, p.from_prior);
            }
            __syncthreads();
        }
        const float(*const all[BACK_SETS])[SLOTS] = { &map.d.lam, &map.d.eta, &map.g, &map.h,
                                                      &map.e };
#pragma unroll
        for (int i = 0; i < BACK_SETS; i++) {
            mn_store<SLOTS>(to.back_maps, block::own(slot * BACK_SETS + i), *all[i]);
        }
    }
}

/* The adjoint behind each chunk but the last, sequence by sequence. */
__global__ void __launch_bounds__(block::THREADS)
ends_kernel(const __grid_constant__ mn_moebius_args p, room to) {
    for (int64_t n = blockIdx.y; n < mn_n_spans(p.call); n += gridDim.y) {
        const mn_span span = mn_span_at(p.call, n);
        if (span.length <= LONG) continue;
        const int64_t slot = mn_cell_first_slot(p.call, n, CHUNK);
        state d;
        load_cells(d, p.cot.lam, p.cot.eta, p.call, n, 0.0f);
        for (int64_t i = (span.length - 1) / CHUNK; i > 0; i--) {
            float m[BACK_SETS][SLOTS];
            for (int s = 0; s < BACK_SETS; s++) {
                mn_cell_read(m[s], to.back_maps + block::own((slot + i) * BACK_SETS + s));
            }
#pragma unroll
            for (int j = 0; j < SLOTS; j++) {
                d.lam[j] = fmaf(m[BACK_G][j], d.lam[j],
                                fmaf(m[BACK_H][j], d.eta[j], m[BACK_LAM][j]));
                d.eta[j] = fmaf(m[BACK_E][j], d.eta[j], m[BACK_ETA][j]);
            }
            d.store(to.ends, slot + i - 1);
        }
    }
}

}    // namespace moebius

#endif
