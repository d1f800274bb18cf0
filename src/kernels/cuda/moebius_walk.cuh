/* moebius_walk.cuh - Kalman Linear Attention's states alone, in front of every so many tokens.
 *
 * By rays a state is four products and three multiply-adds a token, and its chain three of them:
 * one walk through the whole sequence, with a thread for each cell, costs less than maps of chunks,
 * which are twice the numbers, and finds the states that a walk without chunks would find.
 *
 * A block has 16 channels and 16 slots and brings 64 tokens at a time to shared memory; a thread
 * goes through 16 of them by rays. */
#ifndef MN_KERNELS_CUDA_MOEBIUS_WALK_CUH
#define MN_KERNELS_CUDA_MOEBIUS_WALK_CUH

#include "kernels/cuda/moebius.cuh"

namespace moebius {

enum {
    WALK_SIDE = 16,                               // channels and slots of a block
    WALK_THREADS = WALK_SIDE * WALK_SIDE,
    WALK_TOKENS = 64,
};
static_assert(2 * WALK_SIDE == block::COLUMNS && WALK_SIDE == block::SLOTS, "blocks of cells");

/* at[i][t]: number of channel or slot i at token t of N; rows 16 bytes aligned, in different
 * banks */
template <int N>
struct alignas(16) walk_lines {
    float at[WALK_SIDE][N + 4];
};

struct walk_stage {
    walk_lines<WALK_TOKENS> k, v, prec;
};

/* A thread's part of one kind of number in N tokens: those of row i at each 16th token. */
template <typename T, int N>
struct walk_fetched {
    static constexpr int EACH = N / WALK_SIDE;
    const T *from;    // those of the next tile
    int64_t apart;
    bool inside;
    float x[EACH];

    __device__ void open(const mn_in &view, const mn_span &span, int64_t i, int64_t count) {
        from = mn_row<T>(view, span.b, span.t0 + threadIdx.x / WALK_SIDE, 0) + i;
        apart = WALK_SIDE * view.stride[1];
        inside = view.data && i < count;
    }

    /* On by so many tiles. */
    __device__ __forceinline__ void move(int64_t n_tiles) {
        from += n_tiles * EACH * apart;
    }

    /* Zeros where the sequence, whose next token is `left` from its end, has none. */
    __device__ __forceinline__ void fetch(int64_t left) {
        const int n_rows = (int)min(left, (int64_t)N) - (int)(threadIdx.x / WALK_SIDE);
#pragma unroll
        for (int n = 0; n < EACH; n++, from += apart) {
            x[n] = inside && n * WALK_SIDE < n_rows ? mn_float(*from) : 0.0f;
        }
    }

    __device__ __forceinline__ void put(walk_lines<N> &to) const {
        float *at = &to.at[threadIdx.x % WALK_SIDE][threadIdx.x / WALK_SIDE];
#pragma unroll
        for (int n = 0; n < EACH; n++) at[n * WALK_SIDE] = x[n];
    }
};

/* The cell of a thread. */
struct walk_cell {
    float a, a2, p;
    float lam, eta;    // in front of the next 16 tokens
    ray x;             // there
    int64_t at;        // where it is among SLOTS numbers per thread of the other kernels' blocks
    int64_t set;       // how many those are

    __device__ walk_cell(const mn_moebius_args &args, int64_t m, int64_t s) {
        const mn_call &call = args.call;
        const int64_t i = m < call.V && s < call.K ? m * call.K + s : -1;
        const int64_t across = (call.V + block::COLUMNS - 1) / block::COLUMNS;
        const int column = (int)(m % block::COLUMNS), slot = (int)(s % block::SLOTS);
        a = i >= 0 ? ((const float *)args.a.data)[i] : 1.0f;
        a2 = fmaxf(a * a, floor_at);
        p = i >= 0 ? fmaxf(((const float *)args.p.data)[i], floor_at) : floor_at;
        set = across * gridDim.z * block::THREADS * SLOTS;
        at = (blockIdx.z * across + m / block::COLUMNS) * block::THREADS * SLOTS +
             column * block::SLOTS + slot / SLOTS * SLOTS + (slot % SLOTS ^ column % SLOTS);
    }

    __device__ void open(const mn_moebius_args &args, int64_t n, int64_t m, int64_t s) {
        const float *lam0 = mn_row<float>(args.lam0, n, 0, 0);
        const float *eta0 = mn_row<float>(args.eta0, n, 0, 0);
        const bool inside = m < args.call.V && s < args.call.K;
        lam = inside && lam0 ? lam0[m * args.call.K + s] : 1.0f;
        eta = inside && eta0 ? eta0[m * args.call.K + s] : 0.0f;
        x = { lam, 1.0f, eta };
    }

    /* To the first of two sets at `to`. */
    __device__ __forceinline__ void store(float *to) const {
        to[0] = lam;
        to[set] = eta;
    }

    __device__ __forceinline__ void advance(float k, float v, float prec) {
        const float g = mn_inverse(fmaxf(fmaf(p, lam, a2), floor_at)), pk = prec * k;
        lam = fmaf(lam, g, pk * k);
        eta = fmaf(a * g, eta, pk * v);
    }
};

/* What a thread needs of four tokens. */
struct walk_four {
    float k[4], v[4], prec[4];

    __device__ __forceinline__ void load(const walk_stage &in, int t) {
        mn_cell_read(k, in.k.at[threadIdx.x % WALK_SIDE] + t);
        mn_cell_read(v, in.v.at[threadIdx.x / WALK_SIDE] + t);
        mn_cell_read(prec, in.prec.at[threadIdx.x / WALK_SIDE] + t);
    }
};

/* 16 tokens from t on, by rays where they hold. A ray's factor changes every eighth token by what d
 * was four tokens before, for which no one waits. */
__device__ __forceinline__ void walk_sixteen(walk_cell &c, const walk_stage &in, int t) {
    ray x = c.x;
    float by = 1.0f;
    bool sound = c.lam >= floor_at;
    walk_four now, next;
    now.load(in, t);
#pragma unroll
    for (int at = 0; at < TOKENS; at += 4) {
        if (at + 4 < TOKENS) next.load(in, t + at + 4);
        sound = all_positive(now.prec) && sound;
#pragma unroll
        for (int i = 0; i < 4; i++) {
            x = ray_after(x, c.a, c.a2, c.p, now.prec[i] * now.k[i], now.k[i], now.v[i]);
        }
        now = next;
        if (at % 8 == 0) by = mn_inverse(x.d);
        else x = { x.n * by, x.d * by, x.e * by };
    }
    by = mn_inverse(x.d);
    const float lam = x.n * by, eta = x.e * by;
    if (sound && isfinite(lam) && isfinite(eta)) {
        c.lam = lam, c.eta = eta, c.x = x;
        return;
    }
    const float *keys = in.k.at[threadIdx.x % WALK_SIDE] + t;
    const float *values = in.v.at[threadIdx.x / WALK_SIDE] + t;
    const float *precisions = in.prec.at[threadIdx.x / WALK_SIDE] + t;
#pragma unroll 1
    for (int i = 0; i < TOKENS; i++) c.advance(keys[i], values[i], precisions[i]);
    c.x = { c.lam, 1.0f, c.eta };
}

/* The states in front of the tokens 0, every, 2 every, ... of each sequence longer than `beyond`;
 * `every` is a multiple of 16. */
template <typename T>
__global__ void __launch_bounds__(WALK_THREADS, 2)
walk_kernel(const __grid_constant__ mn_moebius_args p, float *states, int64_t every,
            int64_t beyond) {
    __shared__ walk_stage in[2];
    const int64_t m0 = blockIdx.x * (int64_t)WALK_SIDE, s0 = blockIdx.z * (int64_t)WALK_SIDE;
    const int64_t m = m0 + threadIdx.x / WALK_SIDE, s = s0 + threadIdx.x % WALK_SIDE;
    const int steps = (int)(every / TOKENS);
    walk_cell c(p, m, s);
    for (int64_t n = blockIdx.y; n < mn_n_spans(p.call); n += gridDim.y) {
        const mn_span span = mn_span_at(p.call, n);
        if (span.length <= beyond) continue;
        const int64_t end = (span.length - 1) / every * every;
        float *to = states + 2 * c.set * mn_cell_first_slot(p.call, n, every) + c.at;
        int until = 0;    // sixteens to the next state to be left
        walk_fetched<T, WALK_TOKENS> k, v, prec;
        k.open(p.k, span, s, p.call.K);
        v.open(p.v, span, m0 + threadIdx.x % WALK_SIDE, p.call.V);
        prec.open(p.prec, span, m0 + threadIdx.x % WALK_SIDE, p.call.V);
        c.open(p, n, m, s);
        k.fetch(end), v.fetch(end), prec.fetch(end);
        for (int64_t first = 0; first < end; first += WALK_TOKENS) {
            walk_stage &now = in[first / WALK_TOKENS % 2];
            k.put(now.k), v.put(now.v), prec.put(now.prec);
            __syncthreads();
            const int64_t left = end - first - WALK_TOKENS;
            if (left > 0) k.fetch(left), v.fetch(left), prec.fetch(left);
            const int n_rows = (int)min((int64_t)WALK_TOKENS, end - first);
#pragma unroll 1
            for (int t = 0; t < n_rows; t += TOKENS) {
                if (until == 0) c.store(to), to += 2 * c.set, until = steps;
                until--;
                walk_sixteen(c, now, t);
            }
        }
        c.store(to);
        __syncthreads();
    }
}

template <typename T>
inline int walk_states(const mn_moebius_args *p, float *states, int64_t every, int64_t beyond,
                       cudaStream_t stream) {
    const dim3 blocks(2 * mn_blocks(p->call.V, block::COLUMNS),
                      mn_blocks(mn_n_spans(p->call), 1, MOST_CHUNKS),
                      mn_blocks(p->call.K, block::SLOTS));
    walk_kernel<T><<<blocks, WALK_THREADS, 0, stream>>>(*p, states, every, beyond);
    return mn_launched();
}

}    // namespace moebius

#endif
