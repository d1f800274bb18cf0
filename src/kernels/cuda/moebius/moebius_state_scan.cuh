/* moebius_state_scan.cuh - Kalman Linear Attention's states alone, in front of every so many
 * tokens, and with them maps of chunks: what each does to adjoints.
 *
 * By rays a state is four products and three multiply-adds a token, and its chain three of them:
 * one scan through the whole sequence, with a thread for two cells, costs less than states of
 * chunks from maps, which are twice the numbers, and finds the states that a scan without chunks
 * would find. Maps of adjoints take eleven instructions and a reciprocal more, none of them on that
 * chain.
 *
 * A block has 16 channels and 16 slots and brings 64 or 128 tokens at a time to shared memory; a
 * thread goes through them by rays, 16 without a look back, and does them again by lam and eta
 * where rays did not hold. */
#ifndef MN_KERNELS_CUDA_MOEBIUS_MOEBIUS_STATE_SCAN_CUH
#define MN_KERNELS_CUDA_MOEBIUS_MOEBIUS_STATE_SCAN_CUH

#include "kernels/cuda/moebius/moebius.cuh"
#include "kernels/cuda/prim/vec_load.cuh"

namespace mneme::moebius {

/* Kalman Linear Attention's chunks as maps of adjoints.
 *
 * The adjoint (dlam0, deta0) of a cell's state in front of a chunk is linear in the one behind it.
 * With lam, eta and the reads' means and variances as functions of lam0 and eta0,
 *
 *   dlam0 = dlam lam' + deta eta' + sum_t gm_t mean'_t + gv_t var'_t       ' for d / d lam0
 *   deta0 =             deta eta* + sum_t gm_t mean*_t                     * for d / d eta0
 *
 * are five numbers, which the scan through the states finds as it goes (moebius_state_scan.cuh):
 * no scan against time is needed. By rays eta0 adds f to e, with f <- a f, and the determinant of
 * a token's step of (n, d) is a^2, so that derivatives need no differences of large numbers:
 *
 *   mean* = f / n =: s        var' = -s^2        mean' = s r
 *   r <- r - (v - k mean) prec k a s_before,     r = -mean in front of the first token */

/* What a token reads and says: cotangents of its mean and its variance. */
struct read_grads {
    float mean, var;

    /* FULL: with cotangents gw of yvar, or a read from the prior. */
    template <bool FULL>
    __device__ __forceinline__ static read_grads of(float q, float gy, float gw, float a, float a2,
                                                    bool prior) {
        if (!FULL) return { gy * q, 0.0f };
        const float of_var = gw * q * q;
        return prior ? read_grads{ gy * q * a, of_var * a2 } : read_grads{ gy * q, of_var };
    }
};

/* Some tokens as a map of adjoints. */
struct cell_map {
    float lam, cross, eta;    // d lam / d lam0, d eta / d lam0, d eta / d eta0
    float to_lam, to_eta;     // what the reads say to lam0 and eta0

    __device__ static cell_map none() {
        return { 1.0f, 0.0f, 1.0f, 0.0f, 0.0f };
    }

    /* With the tokens of `next` behind them. */
    __device__ __forceinline__ void append(const cell_map &next) {
        to_lam = fmaf(lam, next.to_lam, fmaf(cross, next.to_eta, to_lam));
        to_eta = fmaf(eta, next.to_eta, to_eta);
        cross = fmaf(next.eta, cross, next.cross * lam);
        lam *= next.lam;
        eta *= next.eta;
    }

    /* The adjoint from behind to in front. */
    __device__ __forceinline__ void pull(float &dlam, float &deta) const {
        dlam = fmaf(lam, dlam, fmaf(cross, deta, to_lam));
        deta = fmaf(eta, deta, to_eta);
    }

    __device__ __forceinline__ void store(float *to, int64_t set) const {
        to[0] = lam, to[set] = cross, to[2 * set] = eta;
        to[3 * set] = to_lam, to[4 * set] = to_eta;
    }

    __device__ __forceinline__ static cell_map load(const float *from, int64_t set) {
        return { from[0], from[set], from[2 * set], from[3 * set], from[4 * set] };
    }
};

enum { MAP_NUMBERS = 5 };

/* The same of a few tokens as rays give it: the names of the equations above. */
struct proj_map {
    float f, s, r, mean;
    float to_lam, to_eta;

    /* In front of the first token, where the ray is x. */
    __device__ __forceinline__ static proj_map from(const proj &x) {
        const float by = mn_rcp_ftz(x.n), mean = x.e * by;
        return { x.d, x.d * by, -mean, mean, 0.0f, 0.0f };
    }

    /* Of no tokens, whatever x may be. */
    __device__ __forceinline__ static proj_map none(const proj &x) {
        return { x.d, 0.0f, 0.0f, 0.0f, 0.0f, 0.0f };
    }

    /* One token more, behind which the ray is x; g is what its read says. */
    template <bool FULL>
    __device__ __forceinline__ void advance(const proj &x, float a, float pk, float k, float v,
                                            const read_grads &g) {
        const float by = mn_rcp_ftz(x.n), push = pk * (a * s);
        mean = x.e * by;
        f *= a;
        s = f * by;
        r = fmaf(-fmaf(-mean, k, v), push, r);
        const float pull = g.mean * s;
        to_eta += pull;
        to_lam = fmaf(pull, r, to_lam);
        if (FULL) to_lam = fmaf(-(g.var * s), s, to_lam);
    }

    /* Behind the last one, by = 1 / d there. */
    __device__ __forceinline__ cell_map map(float by) const {
        const float eta = f * by;
        return { eta * eta, eta * fmaf(mean, eta, r), eta, to_lam, to_eta };
    }
};

enum { SCAN_SIDE = 16 };    // channels and slots of a block
static_assert(2 * SCAN_SIDE == block::COLUMNS && SCAN_SIDE == block::SLOTS, "blocks of cells");

/* How many of scan_input a scan needs: for states, for maps, for maps with cotangents of yvar or
 * reads from the prior. */
enum { STATE_KINDS = 3, MAP_KINDS = 5, FULL_MAP_KINDS = 6 };

/* A block of a scan: a thread has CELLS slots, LANES apart, of one channel. Two share loads of
 * their channel's numbers; maps have no registers for that. */
template <int KINDS> struct scan_block {
    static constexpr int CELLS = KINDS == STATE_KINDS ? 2 : 1, LANES = SCAN_SIDE / CELLS;
    static constexpr int THREADS = SCAN_SIDE * LANES;
    static constexpr int TILE = THREADS / 2;    // tokens at a time in shared memory

    __device__ static int channel() {
        return threadIdx.x / LANES;
    }

    __device__ static int slot(int i) {
        return threadIdx.x % LANES + i * LANES;
    }
};

/* ---- the numbers of a tile ------------------------------------------------------------------- */

enum scan_input { SCAN_K, SCAN_V, SCAN_PREC, SCAN_Q, SCAN_MEAN_COT, SCAN_SPREAD_COT };

/* at[i][t]: number of channel or slot i at token t; rows 16 bytes aligned, in different banks. Four
 * numbers behind a row are read ahead, and not used. */
template <int TILE> struct alignas(16) scan_tile_smem { float at[SCAN_SIDE][TILE + 4]; };

template <int KINDS> struct scan_stage {
    typedef scan_block<KINDS> shape;
    scan_tile_smem<shape::TILE> kinds[KINDS];

    __device__ static constexpr bool of_slot(int kind) {
        return kind == SCAN_K || kind == SCAN_Q;
    }

    /* The line of this thread's channel, or of its slot i. */
    __device__ __forceinline__ const float *line(int kind, int i = 0) const {
        return kinds[kind].at[of_slot(kind) ? shape::slot(i) : shape::channel()];
    }
};

/* A thread's part of one kind of number of a tile: EACH neighbours of one token. A warp has the
 * same neighbours of 32 tokens, which it stores to different banks. */
template <typename T, int TILE> struct scan_vec_loader {
    static constexpr int EACH = SCAN_SIDE / 2;
    static_assert(TILE % 32 == 0, "a warp's tokens");
    typename mn_vec_bits<T, EACH>::type x;
    const T *from;    // those of the next tile
    int64_t row_stride;
    int inside;    // how many of them there are
    bool packs;    // all or none of them, and aligned as one pack

    __device__ static int token() {
        return threadIdx.x % TILE;
    }

    __device__ static int place() {
        return threadIdx.x / TILE * EACH;
    }

    /* Of a sequence's numbers base, base + 1, ... of `count`. */
    __device__ void open(const mn_in &view, const mn_span &span, int64_t base, int64_t count) {
        const int64_t i = base + place(), t = span.t0 + token();
        const int64_t first = span.b * view.stride[0] + t * view.stride[1] + i;
        const int64_t bytes = (first | view.stride[1]) * (int64_t)sizeof(T);
        from = (const T *)view.data + first;
        row_stride = TILE * view.stride[1];
        inside = view.data ? (int)max(min(count - i, (int64_t)EACH), (int64_t)0) : 0;
        packs = inside == 0 ||
                (inside == EACH && ((uintptr_t)view.data | bytes) % alignof(mn_vec<T, EACH>) == 0);
    }

    /* The next tile's; zeros where the sequence, whose next token is `left` from its end, has
     * none. PACK: all loaders have packs. */
    template <bool PACK> __device__ __forceinline__ void fetch(int64_t left) {
        x = {};
        if constexpr (PACK) {
            if (token() < left && inside > 0) x = *(decltype(&x))from;
        } else {
            mn_vec<T, EACH> numbers = {};
#pragma unroll
            for (int n = 0; n < EACH; n++) {
                if (token() < left && n < inside) numbers.at[n] = from[n];
            }
            memcpy(&x, &numbers, sizeof x);
        }
        from += row_stride;
    }

    __device__ __forceinline__ void put(scan_tile_smem<TILE> &to) const {
        float numbers[EACH];
        mn_unpack_to(numbers, x);
#pragma unroll
        for (int n = 0; n < EACH; n++) to.at[place() + n][token()] = numbers[n];
    }
};

/* All kinds. */
template <typename T, int KINDS> struct scan_tile_loader {
    scan_vec_loader<T, scan_block<KINDS>::TILE> kinds[KINDS];
    bool packs;    // of all kinds

    __device__ void open(const mn_moebius_args &p, const mn_span &span) {
        const int64_t m = blockIdx.x * (int64_t)SCAN_SIDE, s = blockIdx.z * (int64_t)SCAN_SIDE;
        kinds[SCAN_K].open(p.k, span, s, p.call.K);
        kinds[SCAN_V].open(p.v, span, m, p.call.V);
        kinds[SCAN_PREC].open(p.prec, span, m, p.call.V);
        if constexpr (KINDS > STATE_KINDS) {
            kinds[SCAN_Q].open(p.q, span, s, p.call.K);
            kinds[SCAN_MEAN_COT].open(p.cot.y, span, m, p.call.V);
        }
        if constexpr (KINDS > MAP_KINDS) {
            kinds[SCAN_SPREAD_COT].open(p.cot.yvar, span, m, p.call.V);
        }
        packs = true;
#pragma unroll
        for (const auto &kind : kinds) packs = packs && kind.packs;
    }

    __device__ __forceinline__ void fetch(int64_t left) {
        if (packs) {
#pragma unroll
            for (auto &kind : kinds) kind.template fetch<true>(left);
        } else {
#pragma unroll
            for (auto &kind : kinds) kind.template fetch<false>(left);
        }
    }

    __device__ __forceinline__ void put(scan_stage<KINDS> &to) const {
#pragma unroll
        for (int i = 0; i < KINDS; i++) kinds[i].put(to.kinds[i]);
    }
};

/* What a thread needs of four tokens: numbers of slots for each cell, others once. */
template <int KINDS> struct scan_four {
    static constexpr int CELLS = scan_block<KINDS>::CELLS;
    float x[KINDS][CELLS][4];

    __device__ __forceinline__ void load(const scan_stage<KINDS> &in, int t) {
#pragma unroll
        for (int kind = 0; kind < KINDS; kind++) {
#pragma unroll
            for (int i = 0; i < (in.of_slot(kind) ? CELLS : 1); i++) {
                mn_cell_load(x[kind][i], in.line(kind, i) + t);
            }
        }
    }
};

/* ---- cells ----------------------------------------------------------------------------------- */

/* Where a cell lies. */
struct scan_coord {
    int64_t own;    // in (V,K); -1 outside
    int64_t at;     // among SLOTS numbers per thread of the other kernels' blocks
    int64_t set;    // how many those are

    /* Of the block's channels and slots. */
    __device__ scan_coord(const mn_call &call, int block_channel, int block_slot) {
        const int64_t m = blockIdx.x * (int64_t)SCAN_SIDE + block_channel;
        const int64_t s = blockIdx.z * (int64_t)SCAN_SIDE + block_slot;
        own = m < call.V && s < call.K ? m * call.K + s : -1;
        const int64_t across = (call.V + block::COLUMNS - 1) / block::COLUMNS;
        const int column = (int)(m % block::COLUMNS), slot = (int)(s % block::SLOTS);
        set = across * gridDim.z * block::THREADS * SLOTS;
        at = (blockIdx.z * across + m / block::COLUMNS) * block::THREADS * SLOTS +
             column * block::SLOTS + slot / SLOTS * SLOTS + (slot % SLOTS ^ column % SLOTS);
    }

    /* This cell's number of states (N,V,K), or `usual`. */
    __device__ float read(const mn_in &view, int64_t n, float init_value) const {
        const float *from = mn_row<float>(view, n, 0, 0);
        return own >= 0 && from ? from[own] : init_value;
    }
};

struct scan_cell {
    float a, a2, p;
    proj x;                  // in front of the next tokens
    float lam, eta;          // the same, or in front of the last 16 by rays until someone looks
    proj_map segment_map;    // of those 16
    float least;             // of lam in front of 16 tokens, where no floor binds in them

    /* lam' is at least lam / (a^2 + p lam), which grows with lam: after 16 tokens at least lam /
     * (most (1 + 16 p lam)). */
    __device__ void open(const mn_moebius_args &args, const scan_coord &coord) {
        const int64_t i = coord.own;
        a = i >= 0 ? ((const float *)args.a.data)[i] : 1.0f;
        a2 = fmaxf(a * a, min_precision);
        p = i >= 0 ? fmaxf(((const float *)args.p.data)[i], min_precision) : min_precision;
        const float grown = fmaxf(a2, 1.0f), two = grown * grown, four = two * two;
        const float eight = four * four, most = eight * eight;
        const bool may = a * a >= min_precision && 16.0f * most * p < 0.1f / min_precision;
        least = may ? 4.0f * min_precision * most : INFINITY;
    }

    __device__ void begin(const mn_moebius_args &args, const scan_coord &coord, int64_t n) {
        lam = coord.read(args.lam0, n, 1.0f);
        eta = coord.read(args.eta0, n, 0.0f);
        restart();
    }

    /* The ray from lam and eta. */
    __device__ __forceinline__ void restart() {
        x = { lam, 1.0f, eta };
        segment_map = proj_map::none(x);
    }

    /* lam and eta from the ray. Returns 1 / d. */
    __device__ __forceinline__ float normalize() {
        const float by = mn_rcp_ftz(x.d);
        lam = x.n * by;
        eta = x.e * by;
        return by;
    }

    /* The same, and the map gets the tokens in front of here. */
    __device__ __forceinline__ void normalize(cell_map &map) {
        map.append(segment_map.map(normalize()));
        segment_map = proj_map::none(x);
    }

    __device__ __forceinline__ void advance(float k, float v, float prec) {
        const float g = mn_rcp_ftz(fmaxf(fmaf(p, lam, a2), min_precision)), pk = prec * k;
        lam = fmaf(lam, g, pk * k);
        eta = fmaf(a * g, eta, pk * v);
    }
};

/* Where the states of a thread's cells go, one for each so many sixteens of tokens. */
template <int KINDS> struct scan_state_writer {
    typedef scan_block<KINDS> shape;
    float *to;    // the next one's lam, of the first cell
    int until;    // sixteens to it
    int steps;

    /* Of cells [first, last). */
    __device__ __forceinline__ void put(const scan_cell (&c)[shape::CELLS], int64_t set,
                                        int first = 0, int last = shape::CELLS) {
        if (until == 0) {
#pragma unroll
            for (int i = 0; i < shape::CELLS; i++) {
                if (i < first || i >= last) continue;
                to[i * shape::LANES] = c[i].lam, to[set + i * shape::LANES] = c[i].eta;
            }
            to += 2 * set, until = steps;
        }
        until--;
    }
};

/* ---- tokens of a tile ------------------------------------------------------------------------ */

/* Whether rays hold: as states, and as maps too. */
struct scan_holds {
    bool states, maps;
};

/* Four tokens of cell i by its ray x; the map of the last 16 gets them too if there are KINDS for
 * it. */
template <int KINDS>
__device__ __forceinline__ void scan_quad(proj &x, scan_cell &c, const scan_four<KINDS> &now, int i,
                                          bool prior) {
    constexpr bool FULL = KINDS > MAP_KINDS;
#pragma unroll
    for (int t = 0; t < 4; t++) {
        const float k = now.x[SCAN_K][i][t], v = now.x[SCAN_V][0][t];
        const float pk = now.x[SCAN_PREC][0][t] * k;
        x = proj_step(x, c.a, c.a2, c.p, pk, k, v);
        if constexpr (KINDS > STATE_KINDS) {
            const float gw = FULL ? now.x[KINDS - 1][0][t] : 0.0f;
            c.segment_map.advance<FULL>(x, c.a, pk, k, v,
                                        read_grads::of<FULL>(now.x[SCAN_Q][i][t],
                                                             now.x[SCAN_MEAN_COT][0][t], gw, c.a,
                                                             c.a2, prior));
        }
    }
}

/* 16 tokens from t on by rays. A ray's factor changes every eighth token by what d was four tokens
 * before, and nothing here waits for what the 16 tokens in front left last. `now` has the first
 * four tokens, then the next ones'. */
template <int KINDS>
__device__ __forceinline__ void
scan_sixteen(scan_cell (&c)[scan_block<KINDS>::CELLS], cell_map &map,
             scan_state_writer<KINDS> &writer, scan_holds (&sound)[scan_block<KINDS>::CELLS],
             scan_four<KINDS> &now, const scan_stage<KINDS> &in, int t, int64_t set, bool prior) {
    constexpr bool MAPS = KINDS > STATE_KINDS;
    constexpr int CELLS = scan_block<KINDS>::CELLS;
    proj x[CELLS];
    float by[CELLS];
#pragma unroll
    for (int i = 0; i < CELLS; i++) {
        x[i] = c[i].x;
        if constexpr (MAPS) {
            c[i].normalize(map);
            c[i].segment_map = proj_map::from(x[i]);
        } else {
            c[i].normalize();
        }
    }
#pragma unroll
    for (int at = 0; at < TOKENS; at += 4) {
        scan_four<KINDS> next;
        next.load(in, t + at + 4);
        const bool positive = all_positive(now.x[SCAN_PREC][0]);
        if (at == 4) writer.put(c, set);
#pragma unroll
        for (int i = 0; i < CELLS; i++) {
            sound[i].states = positive && sound[i].states;
            scan_quad(x[i], c[i], now, i, prior);
            if (at == 4) {
                sound[i].states = sound[i].states && c[i].lam >= min_precision &&
                                  c[i].lam < INFINITY && isfinite(c[i].eta);
                sound[i].maps = sound[i].maps && c[i].lam >= c[i].least;
            }
            if (at % 8 == 0) {
                by[i] = mn_rcp_ftz(x[i].d);
            } else {
                x[i] = { x[i].n * by[i], x[i].d * by[i], x[i].e * by[i] };
                if (MAPS) c[i].segment_map.f *= by[i];
            }
        }
        now = next;
    }
#pragma unroll
    for (int i = 0; i < CELLS; i++) c[i].x = x[i];
}

/* n_rows tokens of a tile, sixteens, by lam and eta: cell i. */
template <int KINDS>
__device__ __forceinline__ void
scan_rows_exact(scan_cell (&c)[scan_block<KINDS>::CELLS], int i, scan_state_writer<KINDS> writer,
                const scan_stage<KINDS> &in, int n_rows, int64_t set) {
#pragma unroll 1
    for (int t = 0; t < n_rows; t++) {
        if (t % TOKENS == 0) writer.put(c, set, i, i + 1);
        c[i].advance(in.line(SCAN_K, i)[t], in.line(SCAN_V)[t], in.line(SCAN_PREC)[t]);
    }
    c[i].restart();
}

/* The map with the tokens [t, end) of a tile, in front of which c is, behind it, by lam and eta. */
template <int KINDS>
__device__ __forceinline__ void map_rows_exact(cell_map &map, scan_cell c,
                                               const scan_stage<KINDS> &in, int t, int end,
                                               bool prior) {
    constexpr bool FULL = KINDS == FULL_MAP_KINDS;
#pragma unroll 1
    for (; t < end; t++) {
        const float q = in.line(SCAN_Q)[t], gy = in.line(SCAN_MEAN_COT)[t];
        const float gw = FULL ? in.line(FULL ? SCAN_SPREAD_COT : SCAN_K)[t] : 0.0f;
        const float den = fmaf(c.p, c.lam, c.a2), by_den = mn_rcp_ftz(fmaxf(den, min_precision));
        const bool free = den >= min_precision;
        cell_map next = { by_den, 0.0f, c.a * by_den, 0.0f, 0.0f };
        if (free) next.lam *= by_den * c.a2, next.cross = -by_den * c.p * next.eta * c.eta;
        c.advance(in.line(SCAN_K)[t], in.line(SCAN_V)[t], in.line(SCAN_PREC)[t]);
        const read_grads g = read_grads::of<FULL>(q, gy, gw, c.a, c.a2, prior);
        const float var = mn_rcp_ftz(fmaxf(c.lam, min_precision)), mean = c.eta * var;
        const float to_eta = g.mean * var;
        const float to_lam = c.lam >= min_precision ? -var * fmaf(g.mean, mean, g.var * var) : 0.0f;
        next.to_eta = next.eta * to_eta;
        next.to_lam = fmaf(next.lam, to_lam, next.cross * to_eta);
        map.append(next);
    }
}

/* n_rows tokens, by rays where they hold for all of them. Without maps they are sixteens. */
template <int KINDS>
__device__ __forceinline__ void scan_tokens(scan_cell (&c)[scan_block<KINDS>::CELLS], cell_map &map,
                                            scan_state_writer<KINDS> &writer,
                                            const scan_stage<KINDS> &in, int n_rows, int64_t set,
                                            bool prior) {
    constexpr bool MAPS = KINDS > STATE_KINDS;
    constexpr int CELLS = scan_block<KINDS>::CELLS;
    scan_cell before[CELLS];
    scan_holds sound[CELLS];
    const cell_map map_before = map;
    const scan_state_writer<KINDS> writer_before = writer;
    const int n_full = n_rows / TOKENS * TOKENS;
    scan_four<KINDS> now;
    now.load(in, 0);
#pragma unroll
    for (int i = 0; i < CELLS; i++) before[i] = c[i], sound[i] = { true, true };
#pragma unroll 1
    for (int t = 0; t < n_full; t += TOKENS) {
        scan_sixteen(c, map, writer, sound, now, in, t, set, prior);
    }
#pragma unroll
    for (int i = 0; i < CELLS; i++) {
        c[i].normalize();
        if (sound[i].states && isfinite(c[i].lam) && isfinite(c[i].eta)) continue;
        sound[i].maps = false;
        c[i] = before[i];
        c[i].normalize();
        scan_rows_exact(c, i, writer_before, in, n_full, set);
    }
    if constexpr (MAPS) {
        if (!sound[0].maps) {
            map = map_before;
            before[0].normalize(map);
            map_rows_exact(map, before[0], in, 0, n_full, prior);
            c[0].segment_map = proj_map::none(c[0].x);
        }
        if (n_full == n_rows) return;
        writer.put(c, set);
        c[0].normalize(map);
        map_rows_exact(map, c[0], in, n_full, n_rows, prior);
    }
}

/* ---- kernels --------------------------------------------------------------------------------- */

/* The states in front of the tokens 0, every, 2 every, ... of each sequence longer than `beyond`;
 * `every` is a multiple of 16. Maps, if there are KINDS for them, of the chunks of those longer
 * than MIN_CHUNKED. */
template <typename T, int KINDS>
__global__ void __launch_bounds__(scan_block<KINDS>::THREADS, KINDS == STATE_KINDS ? 4 : 1)
    moebius_state_scan_kernel(const __grid_constant__ mn_moebius_args p, float *states, float *maps,
                              int64_t every, int64_t beyond) {
    typedef scan_block<KINDS> shape;
    extern __shared__ float4 smem_bytes_here[];
    scan_stage<KINDS> *in = (scan_stage<KINDS> *)smem_bytes_here;
    const scan_coord coord(p.call, shape::channel(), shape::slot(0));
    const int64_t set = coord.set;
    scan_cell c[shape::CELLS];
#pragma unroll
    for (int i = 0; i < shape::CELLS; i++) {
        c[i].open(p, scan_coord(p.call, shape::channel(), shape::slot(i)));
    }
    for (int64_t n = blockIdx.y; n < mn_n_spans(p.call); n += gridDim.y) {
        const mn_span span = mn_span_at(p.call, n);
        if (span.length <= beyond) continue;
        const bool mapped = KINDS > STATE_KINDS && span.length > MIN_CHUNKED;
        const int64_t end = mapped ? span.length : (span.length - 1) / every * every;
        scan_state_writer<KINDS> writer = {
            states + 2 * set * mn_cell_first_slot(p.call, n, every) + coord.at, 0,
            (int)(every / TOKENS)
        };
        float *to_map = maps + MAP_NUMBERS * set * mn_cell_first_slot(p.call, n, CHUNK) + coord.at;
        cell_map map = cell_map::none();
        scan_tile_loader<T, KINDS> tile;
        tile.open(p, span);
#pragma unroll
        for (int i = 0; i < shape::CELLS; i++) {
            c[i].begin(p, scan_coord(p.call, shape::channel(), shape::slot(i)), n);
        }
        tile.fetch(end);
        for (int64_t first = 0; first < end; first += shape::TILE) {
            scan_stage<KINDS> &now = in[first / shape::TILE % 2];
            const int64_t left = end - first;
            tile.put(now);
            __syncthreads();
            if (left > shape::TILE) tile.fetch(left - shape::TILE);
            if (mapped && first % CHUNK == 0 && first > 0) {
                c[0].normalize(map);
                map.store(to_map, set), to_map += MAP_NUMBERS * set;
                map = cell_map::none();
            }
            scan_tokens(c, map, writer, now, (int)min((int64_t)shape::TILE, left), set,
                        p.from_prior);
        }
        if (!mapped) writer.put(c, set);
        if (mapped) c[0].normalize(map), map.store(to_map, set);
        __syncthreads();
    }
}

/* The adjoint behind each chunk but the last of each sequence longer than MIN_CHUNKED, from the
 * chunks' maps. */
__global__ static void __launch_bounds__(scan_block<MAP_KINDS>::THREADS)
    moebius_adjoint_ends_kernel(const __grid_constant__ mn_moebius_args p,
                                const float *__restrict__ maps, float *__restrict__ ends) {
    typedef scan_block<MAP_KINDS> shape;
    const scan_coord coord(p.call, shape::channel(), shape::slot(0));
    for (int64_t n = blockIdx.y; n < mn_n_spans(p.call); n += gridDim.y) {
        const mn_span span = mn_span_at(p.call, n);
        if (span.length <= MIN_CHUNKED) continue;
        const int64_t slot = mn_cell_first_slot(p.call, n, CHUNK);
        const float *from = maps + MAP_NUMBERS * coord.set * slot + coord.at;
        float *to = ends + 2 * coord.set * slot + coord.at;
        float dlam = coord.read(p.cot.lam, n, 0.0f), deta = coord.read(p.cot.eta, n, 0.0f);
#pragma unroll 4
        for (int64_t i = (span.length - 1) / CHUNK; i > 0; i--) {
            cell_map::load(from + MAP_NUMBERS * coord.set * i, coord.set).pull(dlam, deta);
            float *end = to + 2 * coord.set * (i - 1);
            end[0] = dlam, end[coord.set] = deta;
        }
    }
}

inline dim3 scan_grid(const mn_call &call) {
    return dim3(2 * mn_blocks(call.V, block::COLUMNS), mn_blocks(mn_n_spans(call), 1, MAX_CHUNKS),
                mn_blocks(call.K, block::SLOTS));
}

template <typename T>
inline int scan_states(const mn_moebius_args *p, float *states, int64_t every, int64_t beyond,
                       cudaStream_t stream) {
    return mn_launch_smem(moebius_state_scan_kernel<T, STATE_KINDS>, scan_grid(p->call),
                          scan_block<STATE_KINDS>::THREADS, 2 * sizeof(scan_stage<STATE_KINDS>),
                          stream, *p, states, (float *)nullptr, every, beyond);
}

/* The states in front of all tiles and the adjoints behind all chunks. */
template <typename T, int KINDS>
inline int scan_maps(const mn_moebius_args *p, float *states, float *maps, float *ends,
                     cudaStream_t stream) {
    const dim3 blocks = scan_grid(p->call);
    const int code = mn_launch_smem(moebius_state_scan_kernel<T, KINDS>, blocks,
                                    scan_block<KINDS>::THREADS, 2 * sizeof(scan_stage<KINDS>),
                                    stream, *p, states, maps, (int64_t)TOKENS, (int64_t)0);
    if (code != cudaSuccess) return code;
    moebius_adjoint_ends_kernel<<<blocks, scan_block<KINDS>::THREADS, 0, stream>>>(*p, maps, ends);
    return mn_launch_status();
}

}    // namespace mneme::moebius

#endif
