/* moebius.cuh - Kalman Linear Attention on GPUs, the parts that its kernels share: cells, the
 * numbers of a tile, chunks.
 *
 * Cells go by rays (projective coordinates), eight tokens at a time or, going back, four; a warp
 * for which one of its rays does not hold does the tile again by lam and eta, as it does tiles that
 * are not whole.
 *
 * A sequence longer than MIN_CHUNKED tokens goes by chunks of CHUNK, so that time too fills the
 * GPU: moebius_state_scan.cuh finds the state in front of each chunk first and, going back, the
 * adjoint behind it. How a sequence is cut depends on its own length alone. */
#ifndef MN_KERNELS_CUDA_MOEBIUS_MOEBIUS_CUH
#define MN_KERNELS_CUDA_MOEBIUS_MOEBIUS_CUH

#include "kernels/cuda/prim/fmax.cuh"
#include "kernels/cuda/prim/vec_load.cuh"
#include "kernels/cuda/recurrent/cell_state.cuh"

namespace mneme::moebius {

using namespace recurrent;

/* Kalman Linear Attention without a division per token: cells by rays.
 *
 * A state is kept up to a factor, lam = n / d and eta = e / d. A token is linear then,
 *
 *   d <- a^2 d + p n      g = prec k d      n <- n + k g      e <- a e + v g
 *
 * and reads e / n. With lam, prec >= 0 all of n and d are sums of positive numbers. A ray starts
 * from d = 1 and is used for a few tokens, so that nothing leaves float's range; callers fall back
 * on lam and eta where ray_sound says no. Adjoints of (n, d, e) follow by the chain rule; that the
 * factor has no meaning, n n' + d d' + e e' = 0, makes one of them from two at a ray's end. */

struct proj {
    float n, d, e;
};

__device__ __forceinline__ proj proj_step(const proj &x, float a, float a2, float p, float pk,
                                          float k, float v) {
    proj y;
    y.d = fmaf(p, x.n, a2 * x.d);
    const float gain = pk * y.d;
    y.n = fmaf(k, gain, x.n);
    y.e = fmaf(v, gain, a * x.e);
    return y;
}

/* How far down lam may be in front of 4 or 8 tokens for none of their n to lie below 1e-12 d, where
 * a floor would bind: n never falls, and d is at most the larger of 1 and (a^2)^tokens times 1 +
 * tokens p n. */
struct proj_bound {
    float by_n, least;

    __device__ static proj_bound of(float a2, float p, int tokens) {
        const float grown = fmaxf(a2, 1.0f), four = grown * grown * grown * grown;
        const float most = tokens == 4 ? four : four * four;
        return { fmaxf(2e-12f * (float)tokens * most * p, 1e-20f), 2e-12f * most };
    }

    /* Of two cells at once. */
    __device__ proj_bound with(const proj_bound &other) const {
        return { fmaxf(by_n, other.by_n), fmaxf(least, other.least) };
    }

    /* From lam in front of the tokens and n after them; false for what is no number. */
    __device__ bool holds(float lam, float n) const {
        return fmaf(by_n, n, least) <= lam;
    }
};

/* The adjoint of a ray (n, d, e) behind which lam and eta have the adjoints dlam and deta; by =
 * 1 / d, lam and eta as they are there. */
__device__ __forceinline__ proj proj_init_adjoint(float lam, float eta, float by, float dlam,
                                                  float deta) {
    proj w;
    w.n = dlam * by;
    w.e = deta * by;
    w.d = -fmaf(w.n, lam, w.e * eta);
    return w;
}

/* What one token of one cell adds to the gradients of its inputs and of the dynamics. */
struct proj_grads {
    float k, v, prec, a, a2, p;
};

/* The adjoint w from behind the token that leads from x to y to in front of it. `to` adds up but
 * for k. */
__device__ __forceinline__ void proj_token_bwd(proj &w, proj_grads &to, const proj &x,
                                               const proj &y, float a, float a2, float p,
                                               float prec, float k, float v) {
    const float pk = prec * k, gain = pk * y.d, to_gain = fmaf(k, w.n, v * w.e);
    const float to_pk = y.d * to_gain;
    to.v = fmaf(gain, w.e, to.v);
    to.prec = fmaf(k, to_pk, to.prec);
    to.k = fmaf(prec, to_pk, gain * w.n);
    w.d = fmaf(pk, to_gain, w.d);
    w.n = fmaf(p, w.d, w.n);
    to.a = fmaf(x.e, w.e, to.a);
    to.a2 = fmaf(x.d, w.d, to.a2);
    to.p = fmaf(x.n, w.d, to.p);
    w.d *= a2;
    w.e *= a;
}

/* The same of the adjoint alone. */
__device__ __forceinline__ void proj_adjoint_bwd(proj &w, float a, float a2, float p, float prec,
                                                 float k, float v) {
    w.d = fmaf(prec * k, fmaf(k, w.n, v * w.e), w.d);
    w.n = fmaf(p, w.d, w.n);
    w.d *= a2;
    w.e *= a;
}

enum {
    TOKENS = MN_CELL_TOKENS,
    SLOTS = MN_CELL_SLOTS,
    MIN_CHUNKED = 4096,
    CHUNK = 1024,
    MAX_CHUNKS = 65535
};

typedef mn_cell_block<1, 4, 1> block;

static __device__ const float min_precision = 1e-12f;

/* The work space of a call, each part behind the other. Sets of SLOTS numbers per thread lie
 * as block::own() says. */
struct workspace {
    float *sums;        // groups of slots x tokens x 2 x V: parts of y, yvar or dv, dprec
    float *starts;      // chunks x 2: the state in front of each, forward
    float *ends;        // chunks x 2: the adjoint behind each, going back
    float *states;      // tiles x 2: the state in front of each
    float *keys;        // blocks of channels x tokens x 2 x K: parts of dk, dq
    float *dynamics;    // chunks x 2 x V x K: parts of da, dp
    float *maps;        // chunks x 5: what each says of adjoints (moebius_state_scan.cuh)
};

/* ---- cells ----------------------------------------------------------------------------------- */

/* lam and eta of a thread's cells, or their adjoints. */
struct state {
    float lam[SLOTS], eta[SLOTS];

    __device__ void load(const float *sets, int64_t set) {
        mn_cell_load(lam, sets + block::own(2 * set));
        mn_cell_load(eta, sets + block::own(2 * set + 1));
    }

    __device__ void store(float *sets, int64_t set) const {
        mn_store<SLOTS>(sets, block::own(2 * set), lam);
        mn_store<SLOTS>(sets, block::own(2 * set + 1), eta);
    }
};

/* Where cell j of this thread lies in (V,K); -1 outside. */
__device__ inline int64_t state_index(const mn_call &call, int j) {
    const int64_t m = block::column0() + block::column(0), s = block::slot0() + block::slot(j);
    return m < call.V && s < call.K ? m * call.K + s : -1;
}

/* A thread's cells of states (N,V,K): given ones, or `lam` and 0. */
__device__ inline void load_cells(state &to, const mn_in &lam, const mn_in &eta,
                                  const mn_call &call, int64_t n, float init_value) {
    const float *from_lam = mn_row<float>(lam, n, 0, 0), *from_eta = mn_row<float>(eta, n, 0, 0);
#pragma unroll
    for (int j = 0; j < SLOTS; j++) {
        const int64_t at = state_index(call, j);
        to.lam[j] = at >= 0 && from_lam ? from_lam[at] : init_value;
        to.eta[j] = at >= 0 && from_eta ? from_eta[at] : 0.0f;
    }
}

__device__ inline void store_cells(const mn_out &lam, const mn_out &eta, const state &from,
                                   const mn_call &call, int64_t n) {
    float *to_lam = mn_row<float>(lam, n, 0, 0), *to_eta = mn_row<float>(eta, n, 0, 0);
#pragma unroll
    for (int j = 0; j < SLOTS; j++) {
        const int64_t at = state_index(call, j);
        if (at >= 0 && to_lam) to_lam[at] = from.lam[j];
        if (at >= 0 && to_eta) to_eta[at] = from.eta[j];
    }
}

/* The dynamics of a thread's cells with their floors. */
struct dynamics {
    float a[SLOTS], a2[SLOTS], p[SLOTS];

    __device__ dynamics(const mn_moebius_args &args) {
#pragma unroll
        for (int j = 0; j < SLOTS; j++) {
            const int64_t at = state_index(args.call, j);
            a[j] = at >= 0 ? ((const float *)args.a.data)[at] : 1.0f;
            a2[j] = fmaxf(a[j] * a[j], min_precision);
            p[j] = at >= 0 ? fmaxf(((const float *)args.p.data)[at], min_precision) : min_precision;
        }
    }

    /* One cell by a token. */
    __device__ __forceinline__ void advance(state &c, int j, float k, float v, float prec) const {
        const float g = mn_rcp_ftz(fmaxf(fmaf(p[j], c.lam[j], a2[j]), min_precision));
        const float pk = prec * k;
        c.lam[j] = fmaf(c.lam[j], g, pk * k);
        c.eta[j] = fmaf(a[j] * g, c.eta[j], pk * v);
    }

    __device__ void advance(state &c, const float (&k)[SLOTS], float v, float prec) const {
#pragma unroll
        for (int j = 0; j < SLOTS; j++) advance(c, j, k[j], v, prec);
    }

    __device__ __forceinline__ proj after(const proj &x, int j, float prec, float k,
                                          float v) const {
        return proj_step(x, a[j], a2[j], p[j], prec * k, k, v);
    }

    /* Of all cells, for so many tokens. */
    __device__ proj_bound edge(int tokens) const {
        proj_bound e = proj_bound::of(a2[0], p[0], tokens);
#pragma unroll
        for (int j = 1; j < SLOTS; j++) e = e.with(proj_bound::of(a2[j], p[j], tokens));
        return e;
    }
};

/* Whether four precisions are all positive, by their signs. */
__device__ __forceinline__ bool all_positive(const float (&prec)[4]) {
    return (__float_as_int(prec[0]) | __float_as_int(prec[1]) | __float_as_int(prec[2]) |
            __float_as_int(prec[3])) >= 0;
}

/* ---- the numbers of a tile ------------------------------------------------------------------- */

enum { KEYS, QUERIES };
enum { VALUES, PRECISIONS, MEAN_COTS, SPREAD_COTS };

template <int N_KEYS, int N_LINES> struct stage {
    mn_cell_keys<block> keys[N_KEYS];
    mn_cell_columns<block> lines[N_LINES];
};

/* Those going back. FULL: with cotangents of yvar, or reads from the prior. */
template <bool FULL> using lines_of = stage<2, FULL ? 4 : 3>;

/* n numbers from memory to shared memory, or zeros, while the thread goes on. */
template <int n>
__device__ __forceinline__ void cp_async_zfill(float *to, const float *from, bool valid) {
    const unsigned at = (unsigned)__cvta_generic_to_shared(to);
    asm volatile("cp.async.ca.shared.global [%0], [%1], %2, %3;" ::"r"(at), "l"(from),
                 "n"(n * sizeof(float)), "r"(valid ? n * (int)sizeof(float) : 0)
                 : "memory");
}

/* WIDTH numbers of each token on their way to shared memory, where they go by themselves: numbers
 * place, place + ACROSS, ... of a token for each thread. */
template <typename T, int WIDTH> struct channel_loader {
    typedef mn_cell_thread_map<WIDTH, block::THREADS> share;
    static_assert(sizeof(T) == sizeof(float), "what needs no conversion");
    const T *from;    // the thread's first number
    int left;         // how many there are from it on

    __device__ static int place() {
        return threadIdx.x % share::ACROSS;
    }

    __device__ void open(const mn_in &view, const mn_span &span, int64_t base, int64_t count) {
        left = view.data ? (int)max(min(count - base, (int64_t)WIDTH) - place(), (int64_t)0) : 0;
        from = (const T *)view.data + span.b * view.stride[0] +
               (span.t0 + share::row()) * view.stride[1] + base + place();
    }

    /* On by so many tokens. */
    __device__ __forceinline__ void move(const mn_in &view, int64_t n_tokens) {
        from += n_tokens * view.stride[1];
    }

    template <typename Smem> __device__ __forceinline__ void issue(Smem &to, int n_rows) {
#pragma unroll
        for (int n = 0; n < share::EACH; n++) {
            const bool valid = share::row() < n_rows && n * share::ACROSS < left;
            const T *at = from + n * share::ACROSS;
            to.for_each_slot(share::row(), place() + n * share::ACROSS,
                             [&](float *workspace) { cp_async_zfill<1>(workspace, at, valid); });
        }
    }

    template <typename Smem> __device__ __forceinline__ void complete(Smem &) const {
    }
};

/* The same in bf16: EACH neighbours of one token for each thread wait in registers to be converted,
 * one load where tensors are aligned for it. A warp stores numbers of slots of every other of four
 * tokens at a time, and numbers of channels of two times EACH channels and all tokens: in different
 * banks as mn_cell_keys and mn_cell_columns have them. */
template <int WIDTH> struct channel_loader<mn_bf16, WIDTH> {
    static constexpr int EACH = WIDTH * TOKENS / block::THREADS;
    static constexpr bool OF_SLOTS = WIDTH == block::SLOTS;
    static_assert(OF_SLOTS || (WIDTH == block::COLUMNS && 16 * WIDTH == block::THREADS * EACH),
                  "slots or channels");
    static_assert(OF_SLOTS ? EACH == 2 : EACH == 4, "what is stored together");
    typedef typename mn_vec_bits<mn_bf16, EACH>::type pack;
    pack x;
    const mn_bf16 *from;    // the thread's first number
    int left;               // how many of its numbers exist
    bool packs;             // all or none of them, and aligned for one load

    __device__ static int place() {
        const int warp = threadIdx.x / 32;
        return EACH * (OF_SLOTS ? threadIdx.x % 8 : 2 * warp + threadIdx.x % 2);
    }

    __device__ static int row() {
        const int eighth = threadIdx.x / 8;
        return OF_SLOTS ? (eighth & ~3) + eighth % 2 * 2 + eighth / 2 % 2 : threadIdx.x % 32 / 2;
    }

    __device__ void open(const mn_in &view, const mn_span &span, int64_t base, int64_t count) {
        const int64_t i = base + place();
        left = view.data ? (int)max(min(count - i, (int64_t)EACH), (int64_t)0) : 0;
        from = (const mn_bf16 *)view.data + span.b * view.stride[0] +
               (span.t0 + row()) * view.stride[1] + i;
        const int64_t bytes = view.stride[1] * (int64_t)sizeof(mn_bf16);
        packs = left == 0 || (left == EACH && ((uintptr_t)from | bytes) % sizeof(pack) == 0);
    }

    /* On by so many tokens. */
    __device__ __forceinline__ void move(const mn_in &view, int64_t n_tokens) {
        from += n_tokens * view.stride[1];
    }

    __device__ __forceinline__ void fetch_pack(int n_rows) {
        x = {};
        if (row() < n_rows && left > 0) x = *(const pack *)from;
    }

    __device__ __forceinline__ void fetch_each(int n_rows) {
        mn_vec<mn_bf16, EACH> numbers = {};
#pragma unroll
        for (int n = 0; n < EACH; n++) {
            if (row() < n_rows && n < left) numbers.at[n] = from[n];
        }
        memcpy(&x, &numbers, sizeof x);
    }

    template <typename Smem> __device__ __forceinline__ void complete(Smem &to) const {
        float numbers[EACH];
        mn_unpack_to(numbers, x);
        to.put(row(), place(), numbers);
    }
};

template <typename T, int N_KEYS, int N_LINES> struct tile_prefetch {
    channel_loader<T, block::SLOTS> keys[N_KEYS];
    channel_loader<T, block::COLUMNS> lines[N_LINES];
    bool packs;    // of bf16: all loaders

    __device__ void open(const mn_moebius_args &p, const mn_span &span) {
        const int64_t s0 = block::slot0(), m0 = block::column0(), K = p.call.K, V = p.call.V;
        keys[KEYS].open(p.k, span, s0, K);
        if (N_KEYS > QUERIES) keys[N_KEYS - 1].open(p.q, span, s0, K);
        lines[VALUES].open(p.v, span, m0, V);
        lines[PRECISIONS].open(p.prec, span, m0, V);
        if (N_LINES > MEAN_COTS) lines[N_LINES > MEAN_COTS ? 2 : 0].open(p.cot.y, span, m0, V);
        if (N_LINES > SPREAD_COTS) lines[N_LINES - 1].open(p.cot.yvar, span, m0, V);
        if constexpr (sizeof(T) < sizeof(float)) {
            packs = true;
            for_each_loader([&](const auto &loader) { packs = packs && loader.packs; });
        }
    }

    /* On by so many tokens. */
    __device__ __forceinline__ void move(const mn_moebius_args &p, int64_t n_tokens) {
        keys[KEYS].move(p.k, n_tokens);
        if (N_KEYS > QUERIES) keys[N_KEYS - 1].move(p.q, n_tokens);
        lines[VALUES].move(p.v, n_tokens);
        lines[PRECISIONS].move(p.prec, n_tokens);
        if (N_LINES > MEAN_COTS) lines[N_LINES > MEAN_COTS ? 2 : 0].move(p.cot.y, n_tokens);
        if (N_LINES > SPREAD_COTS) lines[N_LINES - 1].move(p.cot.yvar, n_tokens);
    }

    /* use(channel_loader) for all of them. */
    template <typename F> __device__ __forceinline__ void for_each_loader(F use) {
#pragma unroll
        for (auto &loader : keys) use(loader);
#pragma unroll
        for (auto &loader : lines) use(loader);
    }

    /* The tile of n_rows tokens from here on sets out for `to`, which no one uses. */
    __device__ __forceinline__ void issue(stage<N_KEYS, N_LINES> &to, int n_rows) {
        if constexpr (sizeof(T) == sizeof(float)) {
#pragma unroll
            for (int i = 0; i < N_KEYS; i++) keys[i].issue(to.keys[i], n_rows);
#pragma unroll
            for (int i = 0; i < N_LINES; i++) lines[i].issue(to.lines[i], n_rows);
        } else if (packs) {
            for_each_loader([&](auto &loader) { loader.fetch_pack(n_rows); });
        } else {
            for_each_loader([&](auto &loader) { loader.fetch_each(n_rows); });
        }
    }

    /* And has arrived, behind a barrier. */
    __device__ __forceinline__ void complete(stage<N_KEYS, N_LINES> &to) const {
        asm volatile("cp.async.wait_all;" ::: "memory");
#pragma unroll
        for (int i = 0; i < N_KEYS; i++) keys[i].complete(to.keys[i]);
#pragma unroll
        for (int i = 0; i < N_LINES; i++) lines[i].complete(to.lines[i]);
    }
};

/* KINDS of sums over slots at the tokens of a tile: of each channel the part of each lane along the
 * slots, as four tokens at a time leave it. A warp has all slots of its channels and so adds up
 * what it left itself. Packs of four tokens change places by channel, and lanes lie four numbers
 * further apart than their channels' tokens: eight lanes of a warp meet different banks, those of a
 * put as those of a sum. */
template <int KINDS> struct slot_sums {
    static_assert(block::GROUPS == 1 && block::C == 1 && TOKENS == 16, "a warp's sums");
    alignas(16) float at[KINDS][4][block::COLUMNS * TOKENS + 4];

    __device__ __forceinline__ static int place(int column, int t) {
        return column * TOKENS + (t ^ column / 2 % 4 * 4);
    }

    /* This thread's part at tokens t, t + 1, t + 2, t + 3; t is a multiple of 4. */
    __device__ __forceinline__ void put(int kind, int t, const float (&x)[4]) {
        mn_store<4>(at[kind][block::slot_lane()], place(block::column(0), t), x);
    }

    __device__ __forceinline__ void get(float (&x)[4], int kind, int column, int t) const {
        mn_cell_load(x, at[kind][0] + place(column, t));
#pragma unroll
        for (int lane = 1; lane < 4; lane++) {
            float more[4];
            mn_cell_load(more, at[kind][lane] + place(column, t));
#pragma unroll
            for (int i = 0; i < 4; i++) x[i] += more[i];
        }
    }
};

/* One kind of them on its way to memory, tile by tile: to its tensor or, where blockIdx.z counts
 * blocks of slots, to this block's part of `parts`. A thread has four tokens of a channel of its
 * warp. */
template <typename T> struct output_writer {
    char *to;    // the thread's first number
    int64_t row_bytes;
    int first;    // its token in the tile; TOKENS if the channel has no place

    __device__ static int column() {
        return threadIdx.x / 32 * MN_CELL_LANES + threadIdx.x % MN_CELL_LANES;
    }

    __device__ static int row() {
        return threadIdx.x % 32 / MN_CELL_LANES * 4;
    }

    __device__ void open(const mn_out &view, float *partials, int kind, const mn_call &call,
                         const mn_span &span, int64_t t0, int64_t n_rows) {
        const int64_t m = block::column0() + column(), t = span.t0 + t0 + row();
        const bool split = gridDim.z > 1;
        const int64_t at = split ? (blockIdx.z * n_rows + span.b * call.T + t) * 2 + kind : 0;
        first = m < call.V && (split || view.data) ? row() : TOKENS;
        to = split ? (char *)(partials + at * call.V + m)
                   : (char *)((T *)view.data + span.b * view.stride[0] + t * view.stride[1] + m);
        row_bytes = split ? 2 * call.V * (int64_t)sizeof(float)
                          : view.stride[1] * (int64_t)sizeof(T);
        /* Hidden from the compiler, which would find them anew for every tile. */
        asm volatile("" : "+r"(first), "+l"(row_bytes));
    }

    template <typename U>
    __device__ __forceinline__ void store(const float (&x)[4], int n_rows) const {
#pragma unroll
        for (int i = 0; i < 4; i++) {
            if (first < n_rows - i) mn_put((U *)(to + i * row_bytes), x[i]);
        }
    }

    /* A tile's, and on by so many tokens. All lanes of the warp have left theirs. */
    template <int KINDS>
    __device__ __forceinline__ void put(const slot_sums<KINDS> &sums, int kind, int n_rows,
                                        int n_tokens) {
        float x[4];
        sums.get(x, kind, column(), row());
        if (gridDim.z > 1) store<float>(x, n_rows);
        else store<T>(x, n_rows);
        to += n_tokens * row_bytes;
    }
};

/* One token of the tile, or four from t on, which is a multiple of 4. */
template <int N_KEYS, int N_LINES>
__device__ __forceinline__ void advance_token(state &c, const dynamics &dyn,
                                              const stage<N_KEYS, N_LINES> &in, int t) {
    float k[SLOTS];
    in.keys[KEYS].get(k, t);
    const int column = block::column(0);
    dyn.advance(c, k, in.lines[VALUES].at[column][t], in.lines[PRECISIONS].at[column][t]);
}

template <int N_KEYS, int N_LINES>
__device__ __forceinline__ void advance_four(state &c, const dynamics &dyn,
                                             const stage<N_KEYS, N_LINES> &in, int t) {
    float v[1][4], prec[1][4];
    in.lines[VALUES].get(v, t);
    in.lines[PRECISIONS].get(prec, t);
#pragma unroll
    for (int i = 0; i < 4; i++) {
        float k[SLOTS];
        in.keys[KEYS].get(k, t + i);
        dyn.advance(c, k, v[0][i], prec[0][i]);
    }
}

/* Through the tokens [t, end) of a tile, 4 or all of them, as far as there are any. */
template <int N_KEYS, int N_LINES>
__device__ __forceinline__ void advance_tile(state &c, const dynamics &dyn,
                                             const stage<N_KEYS, N_LINES> &in, int n_rows,
                                             int t = 0, int end = TOKENS) {
    if (n_rows >= end) {
#pragma unroll 1
        for (; t < end; t += 4) advance_four(c, dyn, in, t);
    } else {
        for (; t < n_rows; t++) advance_token(c, dyn, in, t);
    }
}

/* What the states need of four tokens. */
struct four_keys {
    float k[4][SLOTS], v[1][4], prec[1][4];

    template <int N_KEYS, int N_LINES>
    __device__ __forceinline__ void load(const stage<N_KEYS, N_LINES> &in, int t) {
        in.lines[VALUES].get(v, t);
        in.lines[PRECISIONS].get(prec, t);
#pragma unroll
        for (int i = 0; i < 4; i++) in.keys[KEYS].get(k[i], t + i);
    }
};

/* Four tokens by rays; whether that holds is not asked. */
__device__ __forceinline__ void proj_four(state &c, const dynamics &dyn, const four_keys &in) {
#pragma unroll
    for (int j = 0; j < SLOTS; j++) {
        proj x = { c.lam[j], 1.0f, c.eta[j] };
#pragma unroll
        for (int i = 0; i < 4; i++) x = dyn.after(x, j, in.prec[0][i], in.k[i][j], in.v[0][i]);
        const float by = mn_rcp_ftz(x.d);
        c.lam[j] = x.n * by;
        c.eta[j] = x.e * by;
    }
}

/* States in front of each four tokens of a tile, in shared memory. */
struct quad_states {
    alignas(16) float at[TOKENS / 4][2][block::THREADS][SLOTS];

    __device__ void put(int t, const state &c) {
        mn_store<SLOTS>(at[t / 4][0][threadIdx.x], 0, c.lam);
        mn_store<SLOTS>(at[t / 4][1][threadIdx.x], 0, c.eta);
    }

    __device__ void get(state &c, int t) const {
        mn_cell_load(c.lam, at[t / 4][0][threadIdx.x]);
        mn_cell_load(c.eta, at[t / 4][1][threadIdx.x]);
    }

    /* From the state in front of the tile. */
    template <int N_KEYS, int N_LINES>
    __device__ void fill(state c, const dynamics &dyn, const stage<N_KEYS, N_LINES> &in,
                         int n_rows) {
        put(0, c);
#pragma unroll 1
        for (int t = 4; t < TOKENS; t += 4) {
            advance_tile(c, dyn, in, n_rows, t - 4, t);
            put(t, c);
        }
    }

    /* By rays, of a whole tile, but for the last four tokens: from c in front of the tile on, which
     * goes on to them, as do their numbers in `now`. */
    template <int N_KEYS, int N_LINES>
    __device__ __forceinline__ void fill(state &c, four_keys &now, const dynamics &dyn,
                                         const stage<N_KEYS, N_LINES> &in) {
        four_keys next;
        now.load(in, 0);
#pragma unroll
        for (int t = 0; t < TOKENS - 4; t += 4) {
            next.load(in, t + 4);
            put(t, c);
            proj_four(c, dyn, now);
            now = next;
        }
    }
};

/* A thread's four tokens by rays: the rays in front of and behind each, and the states behind the
 * last. */
struct proj_trace {
    proj at[5][SLOTS];
    state last;
    float by[SLOTS];

    /* Whether they hold. */
    __device__ __forceinline__ bool scan(const state &c, const dynamics &dyn,
                                         const proj_bound &edge, const float (&k)[4][SLOTS],
                                         const float (&v)[4], const float (&prec)[4]) {
        bool sound = all_positive(prec);
#pragma unroll
        for (int j = 0; j < SLOTS; j++) {
            at[0][j] = { c.lam[j], 1.0f, c.eta[j] };
#pragma unroll
            for (int i = 0; i < 4; i++) {
                at[i + 1][j] = dyn.after(at[i][j], j, prec[i], k[i][j], v[i]);
            }
            by[j] = mn_rcp_ftz(at[4][j].d);
            last.lam[j] = at[4][j].n * by[j];
            last.eta[j] = at[4][j].e * by[j];
            sound = sound & edge.holds(c.lam[j], at[4][j].n) &
                    isfinite(last.eta[j]);    // no branch
        }
        return sound;
    }
};

/* Adds to the adjoint w of a ray (n, d, e) what a read of it with q gives back, with cotangents gy
 * and gw of y and yvar; by = 1 / n. FULL: with gw, or a read from the prior. Returns gy e / n. */
template <bool FULL>
__device__ __forceinline__ float output_bwd(proj &w, float by, float d, float e, float a, float a2,
                                            float q, float gy, float gw, bool prior) {
    const float gy_by = gy * by, to_q = gy_by * e;
    const float read = FULL && prior ? q * a : q;
    w.e = fmaf(read, gy_by, w.e);
    w.n = fmaf(-(read * by), to_q, w.n);
    if (FULL) {
        const float gv = gw * q * q * (prior ? a2 : 1.0f) * by;
        w.d += gv;
        w.n = fmaf(-gv, d * by, w.n);
    }
    return to_q;
}

/* For all lanes of the warp. */
__device__ __forceinline__ bool all_hold(bool sound) {
    return __all_sync(0xffffffffu, sound);
}

/* ---- chunks ---------------------------------------------------------------------------------- */

/* Whether there may be a sequence of several chunks. */
__host__ __device__ inline bool chunked(const mn_call &call) {
    return call.T > MIN_CHUNKED;
}

inline int64_t n_chunks(const mn_call &call) {
    return chunked(call) ? mn_tile_slots(call, CHUNK) : mn_n_spans(call);
}

/* Chunk number `slot`, tokens [first, end) of sequence n. A sequence without tokens has one; slots
 * that are no chunk at all do not exist. */
struct chunk {
    int64_t n, first, end;
    mn_span span;
    bool exists;

    __device__ chunk(const mn_call &call, int64_t slot) {
        if (chunked(call)) {
            const mn_tile_span tile = mn_tile_at(call, CHUNK, slot);
            n = tile.n, first = tile.first, end = first + tile.n_rows, span = tile.span;
        } else {
            n = slot, first = 0, span = mn_span_at(call, slot), end = span.length;
        }
        exists = end > first || first == 0;
        if (span.length > MIN_CHUNKED) return;
        exists = first == 0, end = span.length;
    }

    __device__ bool last() const {
        return end == span.length;
    }

    /* Tiles: a chunk has MIN_CHUNKED tokens or less. */
    __device__ int n_tiles() const {
        return ((int)(end - first) + TOKENS - 1) / TOKENS;
    }

    /* Tokens of its last tile. */
    __device__ int last_rows() const {
        return (int)(end - first) - (n_tiles() - 1) * TOKENS;
    }
};

/* scan(i, n_rows, numbers) over the tiles of a chunk, one after the other. */
template <typename T, int N_KEYS, int N_LINES, typename F>
__device__ __forceinline__ void for_each_tile(stage<N_KEYS, N_LINES> (&in)[2],
                                              const mn_moebius_args &p, const chunk &at, F scan) {
    tile_prefetch<T, N_KEYS, N_LINES> next;
    const int n_tiles = at.n_tiles(), last_rows = at.last_rows();
    next.open(p, at.span);
    next.move(p, at.first);
    if (n_tiles > 0) next.issue(in[0], n_tiles > 1 ? TOKENS : last_rows);
    for (int i = 0; i < n_tiles; i++) {
        next.complete(in[i % 2]);
        __syncthreads();
        next.move(p, TOKENS);
        if (i + 1 < n_tiles) next.issue(in[(i + 1) % 2], i + 2 < n_tiles ? TOKENS : last_rows);
        scan(i, i + 1 < n_tiles ? TOKENS : last_rows, in[i % 2]);
    }
    __syncthreads();
}

}    // namespace mneme::moebius

#endif
