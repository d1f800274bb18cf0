/* moebius_walk.cuh - Kalman Linear Attention's states alone, in front of every so many tokens, and
 * with them maps of chunks (moebius_map.cuh).
 *
 * By rays a state is four products and three multiply-adds a token, and its chain three of them:
 * one walk through the whole sequence, with a thread for each cell, costs less than states of
 * chunks from maps, which are twice the numbers, and finds the states that a walk without chunks
 * would find. Maps of adjoints take eleven instructions and a reciprocal more, none of them on that
 * chain.
 *
 * A block has 16 channels and 16 slots and brings 64 or 32 tokens at a time to shared memory; a
 * thread goes through 16 of them by rays. */
#ifndef MN_KERNELS_CUDA_MOEBIUS_WALK_CUH
#define MN_KERNELS_CUDA_MOEBIUS_WALK_CUH

#include "kernels/cuda/moebius_map.cuh"
#include "kernels/cuda/unpack.cuh"

namespace moebius {

enum {
    WALK_SIDE = 16,                               // channels and slots of a block
    WALK_THREADS = WALK_SIDE * WALK_SIDE,
};
static_assert(2 * WALK_SIDE == block::COLUMNS && WALK_SIDE == block::SLOTS, "blocks of cells");

/* ---- the numbers of a tile ------------------------------------------------------------------- */

enum walk_kind { WALK_K, WALK_V, WALK_PREC, WALK_Q, WALK_MEAN_COT, WALK_SPREAD_COT };

/* How many of these a walk needs: for states, for maps, for maps with cotangents of yvar or reads
 * from the prior. */
enum { OF_STATES = 3, OF_MAPS = 5, OF_FULL_MAPS = 6 };

/* at[i][t]: number of channel or slot i at token t of N; rows 16 bytes aligned, in different
 * banks */
template <int N>
struct alignas(16) walk_lines {
    float at[WALK_SIDE][N + 4];
};

template <int KINDS>
struct walk_stage {
    static constexpr int LENGTH = KINDS == OF_FULL_MAPS ? 32 : 64;
    walk_lines<LENGTH> kinds[KINDS];

    /* The line of this thread's slot or channel. */
    __device__ __forceinline__ const float *line(walk_kind kind) const {
        const bool of_slot = kind == WALK_K || kind == WALK_Q;
        return kinds[kind].at[of_slot ? threadIdx.x % WALK_SIDE : threadIdx.x / WALK_SIDE];
    }
};

/* A thread's part of one kind of number in N tokens: EACH neighbours of one of them. */
template <typename T, int N>
struct walk_fetched {
    static constexpr int EACH = N * WALK_SIDE / WALK_THREADS, ACROSS = WALK_SIDE / EACH;
    typename mn_stored<T, EACH>::type x;
    const T *from;    // those of the next tile
    int64_t apart;
    int inside;       // how many of them there are; EACH + 1: EACH, as one pack

    /* Of a sequence's numbers base, base + 1, ... of `count`. */
    __device__ void open(const mn_in &view, const mn_span &span, int64_t base, int64_t count) {
        const int64_t i = base + threadIdx.x % ACROSS * EACH, t = span.t0 + threadIdx.x / ACROSS;
        const int64_t first = span.b * view.stride[0] + t * view.stride[1] + i;
        const int64_t bytes = (first | view.stride[1]) * (int64_t)sizeof(T);
        from = (const T *)view.data + first;
        apart = N * view.stride[1];
        inside = view.data ? (int)max(min(count - i, (int64_t)EACH), (int64_t)0) : 0;
        const bool packs = ((uintptr_t)view.data | bytes) % alignof(mn_pack<T, EACH>) == 0;
        if (inside == EACH && packs) inside++;
    }

    /* The next tile's; zeros where the sequence, whose next token is `left` from its end, has
     * none. */
    __device__ __forceinline__ void fetch(int64_t left) {
        x = {};
        if ((int64_t)(threadIdx.x / ACROSS) < left) {
            if (inside > EACH) {
                x = *(decltype(&x))from;
            } else {
                mn_pack<T, EACH> numbers = {};
#pragma unroll
                for (int n = 0; n < EACH; n++) {
                    if (n < inside) numbers.at[n] = from[n];
                }
                memcpy(&x, &numbers, sizeof x);
            }
        }
        from += apart;
    }

    __device__ __forceinline__ void put(walk_lines<N> &to) const {
        float numbers[EACH];
        mn_unpack_to(numbers, x);
#pragma unroll
        for (int n = 0; n < EACH; n++) {
            to.at[threadIdx.x % ACROSS * EACH + n][threadIdx.x / ACROSS] = numbers[n];
        }
    }
};

/* All kinds. */
template <typename T, int KINDS>
struct walk_tile {
    static constexpr int LENGTH = walk_stage<KINDS>::LENGTH;
    walk_fetched<T, LENGTH> kinds[KINDS];

    __device__ void open(const mn_moebius_args &p, const mn_span &span) {
        const int64_t m = blockIdx.x * (int64_t)WALK_SIDE, s = blockIdx.z * (int64_t)WALK_SIDE;
        kinds[WALK_K].open(p.k, span, s, p.call.K);
        kinds[WALK_V].open(p.v, span, m, p.call.V);
        kinds[WALK_PREC].open(p.prec, span, m, p.call.V);
        if constexpr (KINDS > OF_STATES) {
            kinds[WALK_Q].open(p.q, span, s, p.call.K);
            kinds[WALK_MEAN_COT].open(p.cot.y, span, m, p.call.V);
        }
        if constexpr (KINDS > OF_MAPS) {
            kinds[WALK_SPREAD_COT].open(p.cot.yvar, span, m, p.call.V);
        }
    }

    __device__ __forceinline__ void fetch(int64_t left) {
#pragma unroll
        for (auto &kind : kinds) kind.fetch(left);
    }

    __device__ __forceinline__ void put(walk_stage<KINDS> &to) const {
#pragma unroll
        for (int i = 0; i < KINDS; i++) kinds[i].put(to.kinds[i]);
    }
};

/* What a thread needs of four tokens. */
template <int KINDS>
struct walk_four {
    float x[KINDS][4];

    __device__ __forceinline__ void load(const walk_stage<KINDS> &in, int t) {
#pragma unroll
        for (int i = 0; i < KINDS; i++) mn_cell_read(x[i], in.line((walk_kind)i) + t);
    }
};

/* ---- cells ----------------------------------------------------------------------------------- */

/* Where the cell of a thread is, channel m and slot s. */
struct walk_place {
    int64_t m, s;
    int64_t own;    // in (V,K); -1 outside
    int64_t at;     // among SLOTS numbers per thread of the other kernels' blocks
    int64_t set;    // how many those are

    __device__ walk_place(const mn_call &call) {
        m = blockIdx.x * (int64_t)WALK_SIDE + threadIdx.x / WALK_SIDE;
        s = blockIdx.z * (int64_t)WALK_SIDE + threadIdx.x % WALK_SIDE;
        own = m < call.V && s < call.K ? m * call.K + s : -1;
        const int64_t across = (call.V + block::COLUMNS - 1) / block::COLUMNS;
        const int column = (int)(m % block::COLUMNS), slot = (int)(s % block::SLOTS);
        set = across * gridDim.z * block::THREADS * SLOTS;
        at = (blockIdx.z * across + m / block::COLUMNS) * block::THREADS * SLOTS +
             column * block::SLOTS + slot / SLOTS * SLOTS + (slot % SLOTS ^ column % SLOTS);
    }

    /* This cell's number of states (N,V,K), or `usual`. */
    __device__ float read(const mn_in &view, int64_t n, float usual) const {
        const float *from = mn_row<float>(view, n, 0, 0);
        return own >= 0 && from ? from[own] : usual;
    }
};

struct walk_cell {
    float a, a2, p;
    float lam, eta;    // in front of the next 16 tokens
    ray x;             // there
    float least;       // of lam in front of 16 tokens, where no floor binds in them

    /* lam' is at least lam / (a^2 + p lam), which grows with lam: after 16 tokens at least lam /
     * (most (1 + 16 p lam)). */
    __device__ walk_cell(const mn_moebius_args &args, const walk_place &place) {
        const int64_t i = place.own;
        a = i >= 0 ? ((const float *)args.a.data)[i] : 1.0f;
        a2 = fmaxf(a * a, floor_at);
        p = i >= 0 ? fmaxf(((const float *)args.p.data)[i], floor_at) : floor_at;
        const float grown = fmaxf(a2, 1.0f), two = grown * grown, four = two * two;
        const float eight = four * four, most = eight * eight;
        const bool may = a * a >= floor_at && 16.0f * most * p < 0.1f / floor_at;
        least = may ? 4.0f * floor_at * most : INFINITY;
    }

    __device__ void open(const mn_moebius_args &args, const walk_place &place, int64_t n) {
        lam = place.read(args.lam0, n, 1.0f);
        eta = place.read(args.eta0, n, 0.0f);
        x = { lam, 1.0f, eta };
    }

    /* To the first of two sets at `to`. */
    __device__ __forceinline__ void store(float *to, int64_t set) const {
        to[0] = lam;
        to[set] = eta;
    }

    __device__ __forceinline__ void advance(float k, float v, float prec) {
        const float g = mn_inverse(fmaxf(fmaf(p, lam, a2), floor_at)), pk = prec * k;
        lam = fmaf(lam, g, pk * k);
        eta = fmaf(a * g, eta, pk * v);
    }
};

/* ---- sixteen tokens -------------------------------------------------------------------------- */

/* The state behind 16 tokens from t on by lam and eta. */
template <int KINDS>
__device__ __forceinline__ void state_rows(walk_cell &c, const walk_stage<KINDS> &in, int t) {
#pragma unroll 1
    for (int i = t; i < t + TOKENS; i++) {
        c.advance(in.line(WALK_K)[i], in.line(WALK_V)[i], in.line(WALK_PREC)[i]);
    }
    c.x = { c.lam, 1.0f, c.eta };
}

/* The map with n_rows tokens from t on, in front of which c is, behind it, by lam and eta. */
template <int KINDS>
__device__ __forceinline__ void map_rows(cell_map &map, walk_cell c, const walk_stage<KINDS> &in,
                                         int t, int n_rows, bool prior) {
    constexpr bool FULL = KINDS == OF_FULL_MAPS;
#pragma unroll 1
    for (int i = t; i < t + n_rows; i++) {
        const float q = in.line(WALK_Q)[i], gy = in.line(WALK_MEAN_COT)[i];
        const float gw = FULL ? in.line(FULL ? WALK_SPREAD_COT : WALK_K)[i] : 0.0f;
        const float den = fmaf(c.p, c.lam, c.a2), by_den = mn_inverse(fmaxf(den, floor_at));
        const bool free = den >= floor_at;
        cell_map next = { by_den, 0.0f, c.a * by_den, 0.0f, 0.0f };
        if (free) next.lam *= by_den * c.a2, next.cross = -by_den * c.p * next.eta * c.eta;
        c.advance(in.line(WALK_K)[i], in.line(WALK_V)[i], in.line(WALK_PREC)[i]);
        const read_cots g = read_cots::of<FULL>(q, gy, gw, c.a, c.a2, prior);
        const float var = mn_inverse(fmaxf(c.lam, floor_at)), mean = c.eta * var;
        const float to_eta = g.mean * var;
        const float to_lam = c.lam >= floor_at ? -var * fmaf(g.mean, mean, g.var * var) : 0.0f;
        next.to_eta = next.eta * to_eta;
        next.to_lam = fmaf(next.lam, to_lam, next.cross * to_eta);
        map.append(next);
    }
}

/* 16 tokens from t on, by rays where they hold; the map gets them too if there are KINDS for it. A
 * ray's factor changes every eighth token by what d was four tokens before, for which no one
 * waits. */
template <int KINDS>
__device__ __forceinline__ void walk_sixteen(walk_cell &c, cell_map &map,
                                             const walk_stage<KINDS> &in, int t, bool prior) {
    constexpr bool MAPS = KINDS > OF_STATES, FULL = KINDS > OF_MAPS;
    const walk_cell before = c;
    ray x = c.x;
    float by = 1.0f;
    bool sound = c.lam >= floor_at;
    ray_map here;
    if (MAPS) here = ray_map::from(x, c.lam, c.eta);
    walk_four<KINDS> now, next;
    now.load(in, t);
#pragma unroll
    for (int at = 0; at < TOKENS; at += 4) {
        if (at + 4 < TOKENS) next.load(in, t + at + 4);
        sound = all_positive(now.x[WALK_PREC]) && sound;
#pragma unroll
        for (int i = 0; i < 4; i++) {
            const float k = now.x[WALK_K][i], v = now.x[WALK_V][i], pk = now.x[WALK_PREC][i] * k;
            x = ray_after(x, c.a, c.a2, c.p, pk, k, v);
            if constexpr (MAPS) {
                const float gw = FULL ? now.x[KINDS - 1][i] : 0.0f;
                here.advance<FULL>(x, c.a, pk, k, v,
                                   read_cots::of<FULL>(now.x[WALK_Q][i], now.x[WALK_MEAN_COT][i],
                                                       gw, c.a, c.a2, prior));
            }
        }
        now = next;
        if (at % 8 == 0) {
            by = mn_inverse(x.d);
            continue;
        }
        x = { x.n * by, x.d * by, x.e * by };
        if (MAPS) here.f *= by;
    }
    by = mn_inverse(x.d);
    c.lam = x.n * by, c.eta = x.e * by, c.x = x;
    sound = sound && isfinite(c.lam) && isfinite(c.eta);
    if (MAPS && sound && before.lam >= c.least) map.append(here.map(by));
    else if constexpr (MAPS) map_rows(map, before, in, t, TOKENS, prior);
    if (sound) return;
    c = before;
    state_rows(c, in, t);
}

/* ---- kernels --------------------------------------------------------------------------------- */

/* The states in front of the tokens 0, every, 2 every, ... of each sequence longer than `beyond`;
 * `every` is a multiple of 16. Maps, if asked for, of the chunks of those longer than LONG, MAPS
 * sets each. */
template <typename T, int KINDS>
__global__ void __launch_bounds__(WALK_THREADS, KINDS == OF_STATES ? 2 : 1)
walk_kernel(const __grid_constant__ mn_moebius_args p, float *states, float *maps, int64_t every,
            int64_t beyond) {
    constexpr int LENGTH = walk_stage<KINDS>::LENGTH;
    constexpr bool MAPS = KINDS > OF_STATES;
    __shared__ walk_stage<KINDS> in[2];
    const walk_place place(p.call);
    const int steps = (int)(every / TOKENS);
    walk_cell c(p, place);
    for (int64_t n = blockIdx.y; n < mn_n_spans(p.call); n += gridDim.y) {
        const mn_span span = mn_span_at(p.call, n);
        if (span.length <= beyond) continue;
        const bool mapped = MAPS && span.length > LONG;
        const int64_t end = mapped ? span.length : (span.length - 1) / every * every;
        float *to = states + 2 * place.set * mn_cell_first_slot(p.call, n, every) + place.at;
        float *to_map = maps + MAP_NUMBERS * place.set * mn_cell_first_slot(p.call, n, CHUNK) +
                        place.at;
        int until = 0;    // sixteens to the next state to be left
        cell_map map = cell_map::none();
        walk_tile<T, KINDS> tile;
        tile.open(p, span);
        c.open(p, place, n);
        tile.fetch(end);
        for (int64_t first = 0; first < end; first += LENGTH) {
            walk_stage<KINDS> &now = in[first / LENGTH % 2];
            tile.put(now);
            __syncthreads();
            const int64_t left = end - first;
            if (left > LENGTH) tile.fetch(left - LENGTH);
            if (mapped && first % CHUNK == 0 && first > 0) {
                map.store(to_map, place.set), to_map += MAP_NUMBERS * place.set;
                map = cell_map::none();
            }
            const int n_rows = (int)min((int64_t)LENGTH, left);
#pragma unroll 1
            for (int t = 0; t < n_rows; t += TOKENS) {
                if (until == 0) c.store(to, place.set), to += 2 * place.set, until = steps;
                until--;
                if (!MAPS || t + TOKENS <= n_rows) walk_sixteen(c, map, now, t, p.from_prior);
                else if constexpr (MAPS) map_rows(map, c, now, t, n_rows - t, p.from_prior);
            }
        }
        if (mapped) map.store(to_map, place.set);
        else c.store(to, place.set);
        __syncthreads();
    }
}

/* The adjoint behind each chunk but the last of each sequence longer than LONG, from the chunks'
 * maps. */
__global__ static void __launch_bounds__(WALK_THREADS)
ends_kernel(const __grid_constant__ mn_moebius_args p, const float *__restrict__ maps,
            float *__restrict__ ends) {
    const walk_place place(p.call);
    for (int64_t n = blockIdx.y; n < mn_n_spans(p.call); n += gridDim.y) {
        const mn_span span = mn_span_at(p.call, n);
        if (span.length <= LONG) continue;
        const int64_t slot = mn_cell_first_slot(p.call, n, CHUNK);
        const float *from = maps + MAP_NUMBERS * place.set * slot + place.at;
        float *to = ends + 2 * place.set * slot + place.at;
        float dlam = place.read(p.cot.lam, n, 0.0f), deta = place.read(p.cot.eta, n, 0.0f);
#pragma unroll 4
        for (int64_t i = (span.length - 1) / CHUNK; i > 0; i--) {
            cell_map::load(from + MAP_NUMBERS * place.set * i, place.set).pull(dlam, deta);
            float *end = to + 2 * place.set * (i - 1);
            end[0] = dlam, end[place.set] = deta;
        }
    }
}

inline dim3 walk_blocks(const mn_call &call) {
    return dim3(2 * mn_blocks(call.V, block::COLUMNS), mn_blocks(mn_n_spans(call), 1, MOST_CHUNKS),
                mn_blocks(call.K, block::SLOTS));
}

template <typename T>
inline int walk_states(const mn_moebius_args *p, float *states, int64_t every, int64_t beyond,
                       cudaStream_t stream) {
    walk_kernel<T, OF_STATES><<<walk_blocks(p->call), WALK_THREADS, 0, stream>>>(
        *p, states, nullptr, every, beyond);
    return mn_launched();
}

/* The states in front of all tiles and the adjoints behind all chunks. */
template <typename T, int KINDS>
inline int walk_maps(const mn_moebius_args *p, float *states, float *maps, float *ends,
                     cudaStream_t stream) {
    const dim3 blocks = walk_blocks(p->call);
    walk_kernel<T, KINDS><<<blocks, WALK_THREADS, 0, stream>>>(*p, states, maps, TOKENS, 0);
    const int code = mn_launched();
    if (code != cudaSuccess) return code;
    ends_kernel<<<blocks, WALK_THREADS, 0, stream>>>(*p, maps, ends);
    return mn_launched();
}

}    // namespace moebius

#endif
