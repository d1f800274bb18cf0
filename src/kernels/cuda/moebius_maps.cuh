/* moebius_maps.cuh - Kalman Linear Attention by chunks: what a chunk does to the state in front of
 * it and to the adjoint behind it, and with that the states and adjoints at all borders.
 *
 * With lam = n / d and eta = e / d, a token is linear (see vec/moebius_tile.h),
 *
 *   d <- a^2 d + p n      n <- n + prec k^2 d      e <- a e + prec v k d      (new d on the right)
 *
 * so a chunk is the matrix of (n, d) -> (n, d) with entries A, B, C, D >= 0 and the row X, Y, E of
 * e, known up to a common factor:
 *
 *   lam <- (A lam + B) / (C lam + D)      eta <- (X lam + Y + E eta) / (C lam + D)
 *
 * That needs lam, prec >= 0 and finite entries; where a thread's four cells lack that, they go
 * through the chunk token by token instead. Adjoints are linear anyway once the states are known:
 * (lam, eta) <- (G lam + H eta + lam', E eta + eta'), where lam', eta' start from nothing behind
 * the chunk. */
#ifndef MN_KERNELS_CUDA_MOEBIUS_MAPS_CUH
#define MN_KERNELS_CUDA_MOEBIUS_MAPS_CUH

#include "kernels/cuda/moebius.cuh"

namespace moebius {

enum { MAP_A, MAP_B, MAP_C, MAP_D, MAP_X, MAP_Y, MAP_E, MAP_SETS };
enum { BACK_LAM, BACK_ETA, BACK_G, BACK_H, BACK_E, BACK_SETS };

/* Images of (n, d) = (1, 0) and (0, 1) for one cell, and of e. */
struct cell_map {
    float n1, d1, e1, n2, d2, e2, e;

    __device__ void advance(float a, float a2, float p, float pk, float k, float v) {
        const float c = pk * k, h = pk * v;
        d1 = fmaf(p, n1, a2 * d1);
        d2 = fmaf(p, n2, a2 * d2);
        n1 = fmaf(c, d1, n1);
        n2 = fmaf(c, d2, n2);
        e1 = fmaf(h, d1, a * e1);
        e2 = fmaf(h, d2, a * e2);
        e *= a;
    }

    /* Divides by the trace, more or less, which no result depends on; one that is no positive
     * number leaves entries that no check lets pass. */
    __device__ void normalise() {
        const float by = mn_inverse(n1 + d2);
        n1 *= by, d1 *= by, e1 *= by, n2 *= by, d2 *= by, e2 *= by, e *= by;
    }
};

/* One tile of chunk maps. Returns false where prec is negative or no number. */
__device__ __forceinline__ bool map_tile(cell_map (&map)[SLOTS], const dynamics &dyn,
                                         const stage<1, 2> &in) {
    bool sound = true;
#pragma unroll 1
    for (int t = 0; t < TOKENS; t += 4) {
        float v[1][4], prec[1][4];
        in.lines[VALUES].get(v, t);
        in.lines[PRECISIONS].get(prec, t);
#pragma unroll
        for (int i = 0; i < 4; i++) {
            float k[SLOTS];
            in.keys[KEYS].get(k, t + i);
            sound = sound && prec[0][i] >= 0.0f;
#pragma unroll
            for (int j = 0; j < SLOTS; j++) {
                map[j].advance(dyn.a[j], dyn.a2[j], dyn.p[j], prec[0][i] * k[j], k[j], v[0][i]);
            }
        }
#pragma unroll
        for (int j = 0; j < SLOTS; j++) map[j].normalise();
    }
    return sound;
}

/* Maps of all chunks that have a chunk behind them; A is no number where there is no map. */
template <typename T>
__global__ void __launch_bounds__(block::THREADS, 4)
maps_kernel(const __grid_constant__ mn_moebius_args p, room to, int64_t count) {
    __shared__ stage<1, 2> in[2];
    const dynamics dyn(p);
    for (int64_t slot = blockIdx.y; slot < count; slot += gridDim.y) {
        const chunk at(p.call, slot);
        if (!at.exists || at.last()) continue;
        cell_map map[SLOTS];
        bool sound = true;
#pragma unroll
        for (int j = 0; j < SLOTS; j++) map[j] = { 1.0f, 0.0f, 0.0f, 0.0f, 1.0f, 0.0f, 1.0f };
        each_tile<T>(in, p, at, [&](int64_t, const mn_cell_tile &, const stage<1, 2> &now) {
            sound = map_tile(map, dyn, now) && sound;
        });
        float out[MAP_SETS][SLOTS];
#pragma unroll
        for (int j = 0; j < SLOTS; j++) {
            const cell_map &m = map[j];
            out[MAP_A][j] = sound ? m.n1 : NAN;
            out[MAP_B][j] = m.n2, out[MAP_C][j] = m.d1, out[MAP_D][j] = m.d2;
            out[MAP_X][j] = m.e1, out[MAP_Y][j] = m.e2, out[MAP_E][j] = m.e;
        }
        for (int i = 0; i < MAP_SETS; i++) {
            store_four(to.maps + block::own(slot * MAP_SETS + i), out[i]);
        }
    }
}

/* The chunk's map on `c`; false, and nothing done, where the four cells have none. */
__device__ inline bool apply_map(state &c, const float *maps, int64_t slot) {
    float m[MAP_SETS][SLOTS];
    bool sound = true;
    for (int i = 0; i < MAP_SETS; i++) load_four(m[i], maps + block::own(slot * MAP_SETS + i));
    state next;
#pragma unroll
    for (int j = 0; j < SLOTS; j++) {
        const float lam = c.lam[j], by = 1.0f / fmaf(m[MAP_C][j], lam, m[MAP_D][j]);
        next.lam[j] = fmaf(m[MAP_A][j], lam, m[MAP_B][j]) * by;
        next.eta[j] = fmaf(m[MAP_E][j], c.eta[j], fmaf(m[MAP_X][j], lam, m[MAP_Y][j])) * by;
        sound = sound && lam >= 0.0f && isfinite(next.lam[j]) && isfinite(next.eta[j]);
    }
    if (sound) c = next;
    return sound;
}

/* Through a chunk token by token, from memory. */
template <typename T>
__device__ inline void walk_chunk(state &c, const mn_moebius_args &p, const dynamics &dyn,
                                  const mn_span &span, int64_t first, int64_t end) {
    const int64_t m = block::column0() + block::column(0), s0 = block::slot0();
    if (m >= p.call.V) return;
    for (int64_t t = first; t < end; t++) {
        const T *row = mn_row<T>(p.k, span.b, span.t0 + t, 0);
        const float v = mn_float(mn_row<T>(p.v, span.b, span.t0 + t, 0)[m]);
        const float prec = mn_float(mn_row<T>(p.prec, span.b, span.t0 + t, 0)[m]);
        float k[SLOTS];
#pragma unroll
        for (int j = 0; j < SLOTS; j++) {
            const int64_t s = s0 + block::slot(j);
            k[j] = s < p.call.K ? mn_float(row[s]) : 0.0f;
        }
        dyn.advance(c, k, v, prec);
    }
}

/* The state in front of each chunk but the first, sequence by sequence. */
template <typename T>
__global__ void __launch_bounds__(block::THREADS)
starts_kernel(const __grid_constant__ mn_moebius_args p, room to) {
    const dynamics dyn(p);
    for (int64_t n = blockIdx.y; n < mn_n_spans(p.call); n += gridDim.y) {
        const mn_span span = mn_span_at(p.call, n);
        const int64_t slot = mn_cell_first_slot(p.call, n, CHUNK);
        state c;
        load_cells(c, p.lam0, p.eta0, p.call, n, 1.0f);
        for (int64_t i = 0; (i + 1) * CHUNK < span.length; i++) {
            if (!apply_map(c, to.maps, slot + i)) {
                walk_chunk<T>(c, p, dyn, span, i * CHUNK, (i + 1) * CHUNK);
            }
            c.store(to.starts, slot + i + 1);
        }
    }
}

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

/* Four tokens of a tile from t on. WHOLE: all of them are there. */
template <bool WHOLE>
__device__ __forceinline__ void map_four(back_map &map, const fours &states, const dynamics &dyn,
                                         const stage<2, 4> &in, int t, int n_rows, bool prior) {
    state c[5];
    float gy[1][4], gw[1][4];
    states.get(c[0], t);
    in.lines[MEAN_COTS].get(gy, t);
    in.lines[SPREAD_COTS].get(gw, t);
#pragma unroll
    for (int i = 0; i < 4; i++) {
        c[i + 1] = c[i];
        if (WHOLE || t + i < n_rows) advance_token(c[i + 1], dyn, in, t + i);
    }
#pragma unroll
    for (int i = 3; i >= 0; i--) {
        float q[SLOTS];
        in.keys[QUERIES].get(q, t + i);
        if (!WHOLE && t + i >= n_rows) continue;
        map_token(map, dyn, c[i], c[i + 1], q, gy[0][i], gw[0][i], prior);
    }
}

/* Maps of all chunks that have a chunk in front of them. */
template <typename T>
__global__ void __launch_bounds__(block::THREADS, 3)
back_maps_kernel(const __grid_constant__ mn_moebius_args p, room to, int64_t count) {
    __shared__ stage<2, 4> in;
    __shared__ fours states;
    const dynamics dyn(p);
    for (int64_t slot = blockIdx.y; slot < count; slot += gridDim.y) {
        const chunk at(p.call, slot);
        if (!at.exists || at.first == 0) continue;
        const int64_t set = mn_cell_first_slot(p.call, at.n, TOKENS);
        const int64_t last = at.end_tile() - 1;
        back_map map = {};
        fetched<T, 2, 4> next;
#pragma unroll
        for (int j = 0; j < SLOTS; j++) map.g[j] = map.e[j] = 1.0f;
        next.open(p, at.span);
        next.fetch(p, mn_cell_tile_at(at.span, last));
        for (int64_t i = last; i >= at.first_tile(); i--) {
            const int n_rows = mn_cell_tile_at(at.span, i).n_rows;
            state first;
            next.put(in);
            first.load(to.states, set + i);
            __syncthreads();
            if (i > at.first_tile()) next.fetch(p, mn_cell_tile_at(at.span, i - 1));
            states.fill(first, dyn, in, n_rows);
#pragma unroll 1
            for (int t = TOKENS - 4; t >= 0; t -= 4) {
                if (t + 4 <= n_rows) map_four<true>(map, states, dyn, in, t, n_rows, p.from_prior);
                else map_four<false>(map, states, dyn, in, t, n_rows, p.from_prior);
            }
            __syncthreads();
        }
        const float(*const all[BACK_SETS])[SLOTS] = { &map.d.lam, &map.d.eta, &map.g, &map.h,
                                                      &map.e };
#pragma unroll
        for (int i = 0; i < BACK_SETS; i++) {
            store_four(to.back_maps + block::own(slot * BACK_SETS + i), *all[i]);
        }
    }
}

/* The adjoint behind each chunk but the last, sequence by sequence. */
__global__ void __launch_bounds__(block::THREADS)
ends_kernel(const __grid_constant__ mn_moebius_args p, room to) {
    for (int64_t n = blockIdx.y; n < mn_n_spans(p.call); n += gridDim.y) {
        const mn_span span = mn_span_at(p.call, n);
        const int64_t slot = mn_cell_first_slot(p.call, n, CHUNK);
        state d;
        load_cells(d, p.cot.lam, p.cot.eta, p.call, n, 0.0f);
        for (int64_t i = (span.length - 1) / CHUNK; i > 0; i--) {
            float m[BACK_SETS][SLOTS];
            for (int s = 0; s < BACK_SETS; s++) {
                load_four(m[s], to.back_maps + block::own((slot + i) * BACK_SETS + s));
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
