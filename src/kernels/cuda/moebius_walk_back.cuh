/* moebius_walk_back.cuh - Kalman Linear Attention's adjoints of states alone, behind every chunk of
 * long sequences.
 *
 * As moebius_walk.cuh forward: a thread for each cell walks from the end of its sequence to the end
 * of the first chunk. Of 16 tokens at a time it makes the rays again from the state in front of
 * them, which that walk has left, and keeps them in registers. */
#ifndef MN_KERNELS_CUDA_MOEBIUS_WALK_BACK_CUH
#define MN_KERNELS_CUDA_MOEBIUS_WALK_BACK_CUH

#include "kernels/cuda/moebius_walk.cuh"

namespace moebius {

enum { BACK_TOKENS = 32, BACK_RAY = 8 };    // of a tile; of a ray
enum { BACK_K, BACK_Q, BACK_V, BACK_PREC, BACK_MEAN_COT, BACK_SPREAD_COT };

/* The numbers of a tile. FULL: with cotangents of yvar, or reads from the prior. */
template <bool FULL>
struct back_stage {
    static constexpr int KINDS = FULL ? BACK_SPREAD_COT + 1 : BACK_SPREAD_COT;
    walk_lines<BACK_TOKENS> kinds[KINDS];

    /* Those of four tokens from t on of this thread's slot and channel. */
    __device__ __forceinline__ void get(float (&x)[4], int kind, int t) const {
        const bool of_slot = kind == BACK_K || kind == BACK_Q;
        const int i = of_slot ? threadIdx.x % WALK_SIDE : threadIdx.x / WALK_SIDE;
        mn_cell_read(x, kinds[kind].at[i] + t);
    }

    __device__ __forceinline__ float one(int kind, int t) const {
        const bool of_slot = kind == BACK_K || kind == BACK_Q;
        return kinds[kind].at[of_slot ? threadIdx.x % WALK_SIDE : threadIdx.x / WALK_SIDE][t];
    }
};

template <typename T, bool FULL>
struct back_fetched {
    walk_fetched<T, BACK_TOKENS> kinds[back_stage<FULL>::KINDS];

    __device__ void open(const mn_moebius_args &p, const mn_span &span, int64_t m, int64_t s) {
        kinds[BACK_K].open(p.k, span, s, p.call.K);
        kinds[BACK_Q].open(p.q, span, s, p.call.K);
        kinds[BACK_V].open(p.v, span, m, p.call.V);
        kinds[BACK_PREC].open(p.prec, span, m, p.call.V);
        kinds[BACK_MEAN_COT].open(p.cot.y, span, m, p.call.V);
        if (FULL) kinds[FULL ? BACK_SPREAD_COT : 0].open(p.cot.yvar, span, m, p.call.V);
    }

    __device__ __forceinline__ void fetch(int64_t tile, int64_t left) {
#pragma unroll
        for (auto &kind : kinds) {
            kind.move(tile);
            kind.fetch(left);
        }
    }

    __device__ __forceinline__ void put(back_stage<FULL> &to) const {
#pragma unroll
        for (int i = 0; i < back_stage<FULL>::KINDS; i++) kinds[i].put(to.kinds[i]);
    }
};

/* The adjoint (dlam, deta) from behind 16 tokens from t on to in front of them, by rays; false, and
 * nothing done, where they do not hold. c has the state in front. */
template <bool FULL>
__device__ __forceinline__ bool back_sixteen(float &dlam, float &deta, const walk_cell &c,
                                             const ray_edge &edge, const back_stage<FULL> &in,
                                             int t, bool prior) {
    constexpr int RAYS = TOKENS / BACK_RAY, FOURS = TOKENS / 4;
    float by_n[TOKENS], e[TOKENS], d[TOKENS];    // 1 / n, e and d behind each token
    float by[RAYS], lam[RAYS + 1], eta[RAYS + 1];
    float k[FOURS][4], v[FOURS][4], prec[FOURS][4], q[FOURS][4], gy[FOURS][4];
    bool sound = true;
    lam[0] = c.lam, eta[0] = c.eta;
#pragma unroll
    for (int f = 0; f < FOURS; f++) {
        in.get(k[f], BACK_K, t + 4 * f), in.get(v[f], BACK_V, t + 4 * f);
        in.get(prec[f], BACK_PREC, t + 4 * f);
        sound = all_positive(prec[f]) && sound;
    }
#pragma unroll
    for (int r = 0; r < RAYS; r++) {
        ray x = { lam[r], 1.0f, eta[r] };
#pragma unroll
        for (int i = r * BACK_RAY; i < (r + 1) * BACK_RAY; i++) {
            const float now = k[i / 4][i % 4];
            x = ray_after(x, c.a, c.a2, c.p, prec[i / 4][i % 4] * now, now, v[i / 4][i % 4]);
            by_n[i] = mn_inverse(x.n), e[i] = x.e, d[i] = x.d;
        }
        by[r] = mn_inverse(x.d);
        lam[r + 1] = x.n * by[r];
        eta[r + 1] = x.e * by[r];
        sound = sound && edge.holds(lam[r], x.n) && isfinite(eta[r + 1]);
    }
    float to_lam = dlam, to_eta = deta;
#pragma unroll
    for (int f = FOURS - 1; f >= 0; f--) {
        in.get(q[f], BACK_Q, t + 4 * f), in.get(gy[f], BACK_MEAN_COT, t + 4 * f);
    }
#pragma unroll
    for (int r = RAYS - 1; r >= 0; r--) {
        ray w = pull_behind(lam[r + 1], eta[r + 1], by[r], to_lam, to_eta);
#pragma unroll
        for (int i = (r + 1) * BACK_RAY - 1; i >= r * BACK_RAY; i--) {
            const int f = i / 4, n = i % 4;
            const float gw = FULL ? in.one(FULL ? BACK_SPREAD_COT : 0, t + i) : 0.0f;
            read_back<FULL>(w, by_n[i], d[i], e[i], c.a, c.a2, q[f][n], gy[f][n], gw, prior);
            pull_back(w, c.a, c.a2, c.p, prec[f][n], k[f][n], v[f][n]);
        }
        to_lam = w.n, to_eta = w.e;
    }
    if (sound) dlam = to_lam, deta = to_eta;
    return sound;
}

/* The same by lam and eta for n_rows tokens; each token's state is made from the first one's. */
template <bool FULL>
__device__ __forceinline__ void back_rows(float &dlam, float &deta, const walk_cell &c,
                                          const back_stage<FULL> &in, int t, int n_rows,
                                          bool prior) {
#pragma unroll 1
    for (int at = t + n_rows - 1; at >= t; at--) {
        walk_cell before = c;
        const float k = in.one(BACK_K, at), q = in.one(BACK_Q, at);
#pragma unroll 1
        for (int i = t; i < at; i++) {
            before.advance(in.one(BACK_K, i), in.one(BACK_V, i), in.one(BACK_PREC, i));
        }
        walk_cell after = before;
        after.advance(k, in.one(BACK_V, at), in.one(BACK_PREC, at));
        const float gy = in.one(BACK_MEAN_COT, at);
        const float gw = FULL ? in.one(FULL ? BACK_SPREAD_COT : 0, at) : 0.0f;
        const float var = mn_inverse(fmaxf(after.lam, floor_at)), mean = after.eta * var;
        const float gm = gy * q * (prior ? c.a : 1.0f), gv = gw * q * q * (prior ? c.a2 : 1.0f);
        const float pull = after.lam >= floor_at ? fmaf(gm, mean, gv * var) : 0.0f;
        const float ne = fmaf(gm, var, deta), nl = fmaf(-var, pull, dlam);
        const float den = fmaf(c.p, before.lam, c.a2), g = mn_inverse(fmaxf(den, floor_at));
        deta = ne * (c.a * g);
        dlam = den >= floor_at ? g * fmaf(nl * g, c.a2, -(c.p * before.eta * deta)) : nl * g;
    }
}

/* The adjoint behind each chunk but the last of each sequence longer than LONG, from the states in
 * front of all 16 tokens. */
template <typename T, bool FULL>
__global__ void __launch_bounds__(WALK_THREADS, 1)
walk_back_kernel(const __grid_constant__ mn_moebius_args p, const float *states, float *ends) {
    __shared__ back_stage<FULL> in[2];
    const int64_t m0 = blockIdx.x * (int64_t)WALK_SIDE, s0 = blockIdx.z * (int64_t)WALK_SIDE;
    const int64_t m = m0 + threadIdx.x / WALK_SIDE, s = s0 + threadIdx.x % WALK_SIDE;
    const bool inside = m < p.call.V && s < p.call.K;
    walk_cell c(p, m, s);
    const ray_edge edge = ray_edge::of(c.a2, c.p, BACK_RAY);
    for (int64_t n = blockIdx.y; n < mn_n_spans(p.call); n += gridDim.y) {
        const mn_span span = mn_span_at(p.call, n);
        const int64_t length = span.length, last = (length - 1) / BACK_TOKENS;
        if (length <= LONG) continue;
        const float *cot_lam = mn_row<float>(p.cot.lam, n, 0, 0);
        const float *cot_eta = mn_row<float>(p.cot.eta, n, 0, 0);
        float dlam = inside && cot_lam ? cot_lam[m * p.call.K + s] : 0.0f;
        float deta = inside && cot_eta ? cot_eta[m * p.call.K + s] : 0.0f;
        float *to = ends + 2 * c.set * mn_cell_first_slot(p.call, n, CHUNK) + c.at;
        const float *from = states + c.at +
                            2 * c.set * (mn_cell_first_slot(p.call, n, TOKENS) +
                                         (length - 1) / TOKENS);
        float lam = from[0], eta = from[c.set];
        back_fetched<T, FULL> next;
        next.open(p, span, m0 + threadIdx.x % WALK_SIDE, s);
        next.fetch(last, length - last * BACK_TOKENS);
        for (int64_t i = last; i >= CHUNK / BACK_TOKENS; i--) {
            const back_stage<FULL> &now = in[i % 2];
            next.put(in[i % 2]);
            __syncthreads();
            if (i > CHUNK / BACK_TOKENS) next.fetch(-2, BACK_TOKENS);
#pragma unroll 1
            for (int t = BACK_TOKENS - TOKENS; t >= 0; t -= TOKENS) {
                const int64_t first = i * BACK_TOKENS + t;
                if (first >= length) continue;
                c.lam = lam, c.eta = eta;
                from -= 2 * c.set;
                lam = from[0], eta = from[c.set];    // in front of the 16 tokens before
                const int n_rows = (int)min((int64_t)TOKENS, length - first);
                if (n_rows < TOKENS ||
                    !back_sixteen<FULL>(dlam, deta, c, edge, now, t, p.from_prior)) {
                    back_rows<FULL>(dlam, deta, c, now, t, n_rows, p.from_prior);
                }
                if (first % CHUNK != 0) continue;
                float *end = to + 2 * c.set * (first / CHUNK - 1);
                end[0] = dlam, end[c.set] = deta;
            }
        }
        __syncthreads();
    }
}

template <typename T, bool FULL>
inline int walk_ends(const mn_moebius_args *p, const float *states, float *ends,
                     cudaStream_t stream) {
    const dim3 blocks(2 * mn_blocks(p->call.V, block::COLUMNS),
                      mn_blocks(mn_n_spans(p->call), 1, MOST_CHUNKS),
                      mn_blocks(p->call.K, block::SLOTS));
    walk_back_kernel<T, FULL><<<blocks, WALK_THREADS, 0, stream>>>(*p, states, ends);
    return mn_launched();
}

}    // namespace moebius

#endif
