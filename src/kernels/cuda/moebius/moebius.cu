/* moebius.cu - Kalman Linear Attention: a scalar Kalman filter per channel and slot (see
 * ref/moebius.c for the equations).
 *
 *   den = a^2 + p lam      lam <- lam / den + prec k^2      eta <- a / den eta + prec v k
 *   y = sum_s q eta / lam  yvar = sum_s q^2 / lam
 *
 * A block has 32 channels and 16 slots of one chunk of a sequence; a thread keeps lam and eta of 4
 * slots of a channel. With more slots, blocks leave parts of the sums over slots, added up
 * afterwards. Backward, a scan leaves the states in front of each tile of 16 tokens; the second
 * pass goes through the tiles from the last one on, makes the states of four tokens again in
 * registers, and leaves dk and dq of its 32 channels as parts. */
#include "kernels/cuda/moebius/moebius.cuh"
#include "kernels/cuda/moebius/moebius_state_scan.cuh"

namespace mneme::moebius {

/* ---- forward --------------------------------------------------------------------------------- */

enum { RAY_TOKENS = 8 };    // of a ray; those of a tile begin at its multiples

/* Four tokens of a tile. They are read before the sums of the four before them are written: the
 * compiler keeps the order of reads and writes of shared memory, and sums come late. */
struct token_quad {
    float k[4][SLOTS], q[4][SLOTS], v[1][4], prec[1][4];

    template <int N_LINES>
    __device__ __forceinline__ void load(const stage<2, N_LINES> &in, int t) {
        in.lines[VALUES].get(v, t);
        in.lines[PRECISIONS].get(prec, t);
#pragma unroll
        for (int i = 0; i < 4; i++) {
            in.keys[KEYS].get(k[i], t + i);
            in.keys[QUERIES].get(q[i], t + i);
        }
    }
};

/* What a read of a cell adds to y and yvar. FULL: with yvar, or read from the prior. */
template <bool FULL>
__device__ __forceinline__ static void read_cell(float &y, float &yvar, const dynamics &dyn, int j,
                                                 float q, float e, float by, float var,
                                                 bool prior) {
    y = fmaf((FULL && prior ? q * dyn.a[j] : q) * e, by, y);
    if (!FULL) return;
    yvar = fmaf(q * q, prior ? fmaf(dyn.a2[j], var, dyn.p[j]) : var, yvar);
}

/* Cell j goes on by a token and is read: by its ray x from lam on as long as that holds, with the
 * bits of forward_proj, so that no later token matters to it; then by lam and eta. */
template <bool FULL>
__device__ __forceinline__ static void
forward_cell(float &y, float &yvar, state &c, proj &x, bool &by_ray, const dynamics &dyn,
             const proj_bound &edge, const token_quad &in, int i, int j, float lam, bool prior) {
    const float k = in.k[i][j], v = in.v[0][i], prec = in.prec[0][i], q = in.q[i][j];
    if (by_ray) {
        const proj next = dyn.after(x, j, prec, k, v);
        if (__float_as_int(prec) >= 0 && edge.holds(lam, next.n) && isfinite(next.e)) {
            const float by = mn_rcp_ftz(next.n);
            x = next;
            read_cell<FULL>(y, yvar, dyn, j, q, x.e, by, x.d * by, prior);
            return;
        }
        const float by = mn_rcp_ftz(x.d);
        by_ray = false;
        c.lam[j] = x.n * by, c.eta[j] = x.e * by;
    }
    dyn.advance(c, j, k, v, prec);
    const float var = mn_rcp_ftz(mn_fmax(c.lam[j], min_precision));
    read_cell<FULL>(y, yvar, dyn, j, q, c.eta[j], var, var, prior);
}

/* The rays of a thread's cells that begin in state c. */
__device__ __forceinline__ static void begin_rays(proj (&x)[SLOTS], const state &c) {
#pragma unroll
    for (int j = 0; j < SLOTS; j++) x[j] = { c.lam[j], 1.0f, c.eta[j] };
}

/* Cell j's state where its ray ends. */
__device__ __forceinline__ static void end_ray(state &c, int j, const proj &x) {
    const float by = mn_rcp_ftz(x.d);
    c.lam[j] = x.n * by, c.eta[j] = x.e * by;
}

/* A tile that is not whole, by lam and eta, or one with a ray that does not hold. */
template <bool FULL>
__device__ __forceinline__ static void
forward_rows(state &c, const dynamics &dyn, const proj_bound &edge, slot_sums<FULL ? 2 : 1> &out,
             const stage<2, 2> &in, int n_rows, bool prior) {
    state first;
    proj x[SLOTS];
    bool by_ray[SLOTS];
#pragma unroll 1
    for (int t = 0; t < TOKENS; t += 4) {
        float y[4] = {}, yvar[4] = {};
        token_quad now;
        now.load(in, t);
        if (t % RAY_TOKENS == 0) {
            first = c;
            begin_rays(x, c);
#pragma unroll
            for (int j = 0; j < SLOTS; j++) by_ray[j] = n_rows == TOKENS;
        }
#pragma unroll
        for (int i = 0; i < 4; i++) {
            if (t + i >= n_rows) continue;
#pragma unroll
            for (int j = 0; j < SLOTS; j++) {
                forward_cell<FULL>(y[i], yvar[i], c, x[j], by_ray[j], dyn, edge, now, i, j,
                                   first.lam[j], prior);
            }
        }
#pragma unroll
        for (int j = 0; j < SLOTS; j++) {
            if (by_ray[j] && (t + 4) % RAY_TOKENS == 0) end_ray(c, j, x[j]);
        }
        out.put(0, t, y);
        if (FULL) out.put(FULL, t, yvar);
    }
}

/* Four tokens by rays. */
template <bool FULL>
__device__ __forceinline__ static void forward_proj(proj (&x)[SLOTS], float (&y)[4],
                                                    float (&yvar)[4], const dynamics &dyn,
                                                    const token_quad &in, bool prior) {
#pragma unroll
    for (int i = 0; i < 4; i++) {
        y[i] = yvar[i] = 0.0f;
#pragma unroll
        for (int j = 0; j < SLOTS; j++) {
            const float q = in.q[i][j];
            x[j] = dyn.after(x[j], j, in.prec[0][i], in.k[i][j], in.v[0][i]);
            const float by = mn_rcp_ftz(x[j].n);
            read_cell<FULL>(y[i], yvar[i], dyn, j, q, x[j].e, by, x[j].d * by, prior);
        }
    }
}

/* A whole tile by rays; false, and nothing done, where one of the warp's does not hold. */
template <bool FULL>
__device__ __forceinline__ static bool
forward_tile(state &c, const dynamics &dyn, const proj_bound &edge, slot_sums<FULL ? 2 : 1> &out,
             const stage<2, 2> &in, bool prior) {
    state at = c;
    proj x[SLOTS];
    token_quad now, next;
    bool sound = true;
    now.load(in, 0);
#pragma unroll
    for (int t = 0; t < TOKENS; t += 4) {
        float y[4], yvar[4];
        if (t + 4 < TOKENS) next.load(in, t + 4);
        if (t % RAY_TOKENS == 0) begin_rays(x, at);
        forward_proj<FULL>(x, y, yvar, dyn, now, prior);
        sound = all_positive(now.prec[0]) && sound;
#pragma unroll
        for (int j = 0; j < SLOTS && (t + 4) % RAY_TOKENS == 0; j++) {
            sound = sound && edge.holds(at.lam[j], x[j].n);
            end_ray(at, j, x[j]);
        }
        out.put(0, t, y);
        if (FULL) out.put(FULL, t, yvar);
        now = next;
    }
#pragma unroll
    for (int j = 0; j < SLOTS; j++) sound = sound && isfinite(at.eta[j]);
    if (!all_hold(sound)) return false;
    c = at;
    return true;
}

template <typename T, bool FULL>
__global__ void __launch_bounds__(block::THREADS, 3)
    moebius_fwd_kernel(const __grid_constant__ mn_moebius_args p, workspace to, int64_t n_rows,
                       int64_t count) {
    __shared__ stage<2, 2> in[2];
    __shared__ slot_sums<FULL ? 2 : 1> out;
    const dynamics dyn(p);
    const proj_bound edge = dyn.edge(RAY_TOKENS);
    for (int64_t slot = blockIdx.y; slot < count; slot += gridDim.y) {
        const chunk at(p.call, slot);
        if (!at.exists) continue;
        state c;
        if (at.first == 0) load_cells(c, p.lam0, p.eta0, p.call, at.n, 1.0f);
        else c.load(to.starts, slot);
        output_writer<T> y, yvar;
        y.open(p.y, to.sums, 0, p.call, at.span, at.first, n_rows);
        if (FULL) yvar.open(p.yvar, to.sums, 1, p.call, at.span, at.first, n_rows);
        const auto put = [&](int count) {    // a tile's, behind a barrier
            y.put(out, 0, count, TOKENS);
            if (FULL) yvar.put(out, FULL, count, TOKENS);
            __syncwarp();
        };
        for_each_tile<T>(in, p, at, [&](int i, int rows, const stage<2, 2> &now) {
            if (i > 0) put(TOKENS);
            if (rows < TOKENS || !forward_tile<FULL>(c, dyn, edge, out, now, p.from_prior)) {
                forward_rows<FULL>(c, dyn, edge, out, now, rows, p.from_prior);
            }
        });
        if (at.n_tiles() > 0) put(at.last_rows());
        __syncthreads();
        if (at.last()) store_cells(p.lam, p.eta, c, p.call, at.n);
    }
}

/* ---- backward -------------------------------------------------------------------------------- */

/* Adjoints of a thread's states and the sums over time. */
struct adjoint {
    state d;
    float a[SLOTS], a2[SLOTS], p[SLOTS];
};

/* Adds a tile's sums over time to those of the chunk. */
__device__ __forceinline__ static void accumulate_sums(adjoint &to, const adjoint &from) {
    to.d = from.d;
#pragma unroll
    for (int j = 0; j < SLOTS; j++) {
        to.a[j] += from.a[j];
        to.a2[j] += from.a2[j];
        to.p[j] += from.p[j];
    }
}

/* What one token says to its channel and its slots. */
struct token_cots {
    float v, prec, k[SLOTS], q[SLOTS];
};

/* From `before` to `after` one token. FULL: with cotangents of yvar or a read from the prior. */
template <bool FULL>
__device__ __forceinline__ static void
token_backward(token_cots &to, adjoint &sum, const dynamics &dyn, const state &before,
               const state &after, const token_quad &in, int at, float gy, float gw, bool prior) {
    const float v = in.v[0][at], prec = in.prec[0][at];
    to.v = to.prec = 0.0f;
#pragma unroll
    for (int j = 0; j < SLOTS; j++) {
        const float var = mn_rcp_ftz(fmaxf(after.lam[j], min_precision)), mean = after.eta[j] * var;
        const float q = in.q[at][j], k = in.k[at][j];
        const float a = dyn.a[j], a2 = dyn.a2[j], p = dyn.p[j];
        float gm = gy * q, pull = gm * mean;
        to.q[j] = gy * mean;
        if (FULL) {
            float gv = gw * q * q;
            if (prior) {
                to.q[j] = fmaf(gy * a, mean, 2.0f * q * gw * fmaf(a2, var, p));
                sum.a[j] += pull;
                sum.a2[j] = fmaf(gv, var, sum.a2[j]);
                sum.p[j] += gv;
                gm *= a;
                gv *= a2;
            } else {
                to.q[j] = fmaf(gy, mean, 2.0f * q * gw * var);
            }
            pull = fmaf(gm, mean, gv * var);
        }
        const float ne = fmaf(gm, var, sum.d.eta[j]);
        const float nl = after.lam[j] >= min_precision ? fmaf(-var, pull, sum.d.lam[j])
                                                       : sum.d.lam[j];
        const float u = fmaf(nl, k, ne * v);
        to.k[j] = prec * fmaf(nl, k, u);
        to.prec = fmaf(k, u, to.prec);
        to.v = fmaf(ne, k, to.v);
        const float lam = before.lam[j], eta = before.eta[j], den = fmaf(p, lam, a2);
        const float g = mn_rcp_ftz(fmaxf(den, min_precision)), ng = nl * g, de = ne * (a * g);
        sum.a[j] = fmaf(ne, eta * g, sum.a[j]);
        sum.d.eta[j] = de;
        const float through = de * eta;
        const float pulled = den >= min_precision ? fmaf(ng, lam, through) * g : 0.0f;
        sum.a2[j] -= pulled;
        sum.p[j] = fmaf(-pulled, lam, sum.p[j]);
        sum.d.lam[j] = den >= min_precision ? g * fmaf(ng, a2, -(p * through)) : ng;
    }
    to.v *= prec;
}

/* The states in front of a tile on their way. */
struct state_prefetch {
    alignas(16) float at[2][block::THREADS][SLOTS];

    /* This thread's lam from `from` on, and eta `set` numbers behind it. */
    __device__ __forceinline__ void issue(const float *from, int64_t set) {
        cp_async_zfill<SLOTS>(at[0][threadIdx.x], from, true);
        cp_async_zfill<SLOTS>(at[1][threadIdx.x], from + set, true);
    }

    __device__ __forceinline__ void get(state &c) const {
        mn_cell_load(c.lam, at[0][threadIdx.x]);
        mn_cell_load(c.eta, at[1][threadIdx.x]);
    }
};

/* What the tokens of a tile leave: sums over slots, and each warp's over its channels, which wait
 * for a barrier and lie in one of two buffers. */
struct tile_sums {
    slot_sums<2> lines;
    mn_cell_key_partials<block> keys[2];
};

/* Sums over the block's channels for dk and dq on their way to its part of `partials`, tile by
 * tile: EACH neighbours of a token for each thread. */
struct key_writer {
    typedef mn_cell_thread_map<2 * block::SLOTS, block::THREADS> share;
    static_assert(block::GROUPS == 1 && share::EACH == 4, "a place's numbers of all warps");
    float *to;      // the thread's first number
    int64_t row;    // numbers of a token
    int left;       // how many of its numbers exist; EACH + 1: EACH, aligned for one store

    __device__ void open(float *partials, const mn_call &call, const mn_span &span, int64_t first,
                         int64_t n_rows) {
        const int kind = share::place() / block::SLOTS, slot = share::place() % block::SLOTS;
        const int64_t s = block::slot0() + slot;
        const int64_t token = span.b * call.T + span.t0 + first + share::row();
        row = 2 * call.K;
        to = partials + (blockIdx.x * n_rows + token) * row + kind * call.K + s;
        left = (int)max(min(call.K - s, (int64_t)share::EACH), (int64_t)0);
        if (left == share::EACH && call.K % share::EACH == 0) left++;
    }

    /* A tile's, and on by so many tokens. */
    __device__ __forceinline__ void put(const mn_cell_key_partials<block> &sums, int n_rows,
                                        int n_tokens) {
        if (share::row() < n_rows && left > 0) {
            float x[share::EACH], more[share::EACH];
            mn_cell_load(x, &sums.at[0][0][share::row()][share::place()]);
#pragma unroll
            for (int warp = 1; warp < mn_cell_key_partials<block>::ACROSS; warp++) {
                mn_cell_load(more, &sums.at[warp][0][share::row()][share::place()]);
#pragma unroll
                for (int i = 0; i < share::EACH; i++) x[i] += more[i];
            }
            if (left > share::EACH) {
                mn_store<share::EACH>(to, 0, x);
            } else {
#pragma unroll
                for (int i = 0; i < share::EACH; i++) {
                    if (i < left) to[i] = x[i];
                }
            }
        }
        to += n_tokens * row;
    }
};

/* All that a tile leaves. */
template <typename T> struct grad_writer {
    key_writer keys;
    output_writer<T> dv, dprec;

    /* Tokens of a sequence from `first` on. */
    __device__ void open(const mn_moebius_args &p, const workspace &to, const mn_span &span,
                         int64_t first, int64_t n_rows) {
        keys.open(to.keys, p.call, span, first, n_rows);
        dv.open(p.grad.v, to.sums, 0, p.call, span, first, n_rows);
        dprec.open(p.grad.prec, to.sums, 1, p.call, span, first, n_rows);
    }

    /* And on to the tile in front of it. */
    __device__ __forceinline__ void put(const tile_sums &sums, int buffer, int n_rows) {
        keys.put(sums.keys[buffer], n_rows, -TOKENS);
        dv.put(sums.lines, 0, n_rows, -TOKENS);
        dprec.put(sums.lines, 1, n_rows, -TOKENS);
        __syncwarp();
    }
};

template <bool FULL> struct bwd_smem {
    lines_of<FULL> in[2];
    state_prefetch first[2];
    tile_sums out;
    quad_states states;
};

/* Four tokens of a tile from t on, by lam and eta. */
template <bool FULL>
__device__ __forceinline__ static void
backward_four(adjoint &sum, tile_sums &out, int buffer, const dynamics &dyn,
              const quad_states &states, const lines_of<FULL> &in, int t, int n_rows, bool prior) {
    state c[5];
    float gy[1][4], gw[1][4] = {}, dv[4], dprec[4];
    token_quad now;
    now.load(in, t);
    states.get(c[0], t);
    in.lines[MEAN_COTS].get(gy, t);
    if (FULL) in.lines[FULL ? SPREAD_COTS : 0].get(gw, t);
#pragma unroll
    for (int i = 0; i < 4; i++) {
        c[i + 1] = c[i];
        if (t + i < n_rows) dyn.advance(c[i + 1], now.k[i], now.v[0][i], now.prec[0][i]);
    }
#pragma unroll
    for (int i = 3; i >= 0; i--) {
        token_cots to = {};
        if (t + i < n_rows) {
            token_backward<FULL>(to, sum, dyn, c[i], c[i + 1], now, i, gy[0][i], gw[0][i], prior);
        }
        dv[i] = to.v, dprec[i] = to.prec;
        out.keys[buffer].put(t + i, mn_cell_key_sums(to.k, to.q));
    }
    out.lines.put(0, t, dv);
    out.lines.put(1, t, dprec);
}

/* A tile by lam and eta, from the state in front of it. */
template <bool FULL>
__device__ __forceinline__ static void
backward_rows(adjoint &sum, tile_sums &out, int buffer, const dynamics &dyn, quad_states &states,
              const lines_of<FULL> &in, const state &first, int n_rows, bool prior) {
    states.fill(first, dyn, in, n_rows);
#pragma unroll 1
    for (int t = TOKENS - 4; t >= 0; t -= 4) {
        backward_four<FULL>(sum, out, buffer, dyn, states, in, t, n_rows, prior);
    }
}

/* What a read of the ray x from the prior says to q and the dynamics; to_q as output_bwd returns
 * it. */
__device__ __forceinline__ static float prior_grads(proj_grads &to, const proj &x, float to_q,
                                                    float a, float a2, float p, float q, float gw) {
    const float var = x.d * mn_rcp_ftz(x.n), gv = gw * q * q;
    to.a = fmaf(q, to_q, to.a);
    to.a2 = fmaf(gv, var, to.a2);
    to.p += gv;
    return fmaf(a, to_q, 2.0f * q * gw * fmaf(a2, var, p));
}

/* What four tokens of a tile begin with going back: what makes their states again. */
struct quad_inputs {
    four_keys keys;
    state first;

    template <int N_LINES>
    __device__ __forceinline__ void load(const quad_states &states, const stage<2, N_LINES> &in,
                                         int t) {
        keys.load(in, t);
        states.get(first, t);
    }
};

/* Four tokens of a tile from t on, by rays; false where they do not hold. Those that come next are
 * read in front of the last token's products, for which there is no wait then. */
template <bool FULL>
__device__ __forceinline__ static bool
backward_proj(adjoint &sum, tile_sums &out, int buffer, quad_inputs &now, const dynamics &dyn,
              const proj_bound &edge, const quad_states &states, const lines_of<FULL> &in, int t,
              bool prior) {
    proj_trace x;
    proj w[SLOTS];
    float q[4][SLOTS], gy[1][4], gw[1][4] = {}, dv[4], dprec[4], keys[4];
    quad_inputs next = {};
#pragma unroll
    for (int i = 0; i < 4; i++) in.keys[QUERIES].get(q[i], t + i);
    in.lines[MEAN_COTS].get(gy, t);
    if (FULL) in.lines[FULL ? SPREAD_COTS : 0].get(gw, t);
    const four_keys &at = now.keys;
    const bool sound = x.scan(now.first, dyn, edge, at.k, at.v[0], at.prec[0]);
#pragma unroll
    for (int j = 0; j < SLOTS; j++) {
        w[j] = proj_init_adjoint(x.last.lam[j], x.last.eta[j], x.by[j], sum.d.lam[j], sum.d.eta[j]);
    }
#pragma unroll
    for (int i = 3; i >= 0; i--) {
        const float v = at.v[0][i], prec = at.prec[0][i];
        float to_k[SLOTS], to_q[SLOTS];
        proj_grads to = {};
#pragma unroll
        for (int j = 0; j < SLOTS; j++) {
            const proj &y = x.at[i + 1][j];
            const float g = gw[0][i];
            to.a = sum.a[j], to.a2 = sum.a2[j], to.p = sum.p[j];
            to_q[j] = output_bwd<FULL>(w[j], mn_rcp_ftz(y.n), y.d, y.e, dyn.a[j], dyn.a2[j],
                                       q[i][j], gy[0][i], g, prior);
            if (FULL && prior) {
                to_q[j] = prior_grads(to, y, to_q[j], dyn.a[j], dyn.a2[j], dyn.p[j], q[i][j], g);
            } else if (FULL) {
                to_q[j] = fmaf(2.0f * q[i][j] * g, y.d * mn_rcp_ftz(y.n), to_q[j]);
            }
            proj_token_bwd(w[j], to, x.at[i][j], y, dyn.a[j], dyn.a2[j], dyn.p[j], prec, at.k[i][j],
                           v);
            sum.a[j] = to.a, sum.a2[j] = to.a2, sum.p[j] = to.p;
            to_k[j] = to.k;
        }
        dv[i] = to.v, dprec[i] = to.prec;
        if (i == 1) next.load(states, in, (t - 4) & (TOKENS - 1));
        keys[i] = mn_cell_key_sums(to_k, to_q);
    }
    /* Stores behind all loads: the compiler keeps their order, and sums come late. */
#pragma unroll
    for (int i = 0; i < 4; i++) out.keys[buffer].put(t + i, keys[i]);
    out.lines.put(0, t, dv);
    out.lines.put(1, t, dprec);
#pragma unroll
    for (int j = 0; j < SLOTS; j++) sum.d.lam[j] = w[j].n, sum.d.eta[j] = w[j].e;
    now = next;
    return sound;
}

/* A whole tile by rays; false, and nothing done, where one of the warp's does not hold. */
template <bool FULL>
__device__ __forceinline__ static bool
backward_tile(adjoint &sum, tile_sums &out, int buffer, const dynamics &dyn, const proj_bound &edge,
              quad_states &states, const lines_of<FULL> &in, const state &first, bool prior) {
    adjoint tile_adjoint = { sum.d, {}, {}, {} };
    bool sound = true;
    quad_inputs now;
    now.first = first;
    states.fill(now.first, now.keys, dyn, in);
#pragma unroll 1
    for (int t = TOKENS - 4; t >= 0; t -= 4) {
        sound &= backward_proj<FULL>(tile_adjoint, out, buffer, now, dyn, edge, states, in, t,
                                     prior);
    }
    if (!all_hold(sound)) return false;
    accumulate_sums(sum, tile_adjoint);
    return true;
}

/* What is left of a chunk after its first token. */
__device__ static void store_state0_grads(const mn_moebius_args &p, float *to, const adjoint &sum,
                                          const dynamics &dyn, const chunk &at, int64_t slot) {
    if (at.first == 0) store_cells(p.grad.lam0, p.grad.eta0, sum.d, p.call, at.n);
    const int64_t cells = p.call.V * p.call.K;
#pragma unroll
    for (int j = 0; j < SLOTS; j++) {
        const int64_t i = state_index(p.call, j);
        if (i < 0) continue;
        const float a = dyn.a[j];
        const bool kept = ((const float *)p.p.data)[i] >= min_precision;
        to[2 * slot * cells + i] = sum.a[j] +
                                   (a * a >= min_precision ? 2.0f * a * sum.a2[j] : 0.0f);
        to[(2 * slot + 1) * cells + i] = kept ? sum.p[j] : 0.0f;
    }
}

/* A slot that is no chunk has a part of da and dp all the same. */
__device__ static void store_zeros(const mn_moebius_args &p, float *to, int64_t slot) {
    const int64_t cells = p.call.V * p.call.K;
#pragma unroll
    for (int j = 0; j < SLOTS; j++) {
        const int64_t i = state_index(p.call, j);
        if (i >= 0) to[2 * slot * cells + i] = to[(2 * slot + 1) * cells + i] = 0.0f;
    }
}

template <typename T, bool FULL>
__global__ void __launch_bounds__(block::THREADS, 2)
    moebius_bwd_kernel(const __grid_constant__ mn_moebius_args p, workspace to, int64_t n_rows,
                       int64_t count) {
    extern __shared__ float4 smem_bytes_here[];
    bwd_smem<FULL> &r = *(bwd_smem<FULL> *)smem_bytes_here;
    const dynamics dyn(p);
    const proj_bound edge = dyn.edge(4);
    for (int64_t slot = blockIdx.y; slot < count; slot += gridDim.y) {
        const chunk at(p.call, slot);
        if (!at.exists) {
            store_zeros(p, to.dynamics, slot);
            continue;
        }
        adjoint sum = {};
        if (at.last()) load_cells(sum.d, p.cot.lam, p.cot.eta, p.call, at.n, 0.0f);
        else sum.d.load(to.ends, slot);
        const int n_tiles = at.n_tiles(), last_rows = at.last_rows();
        const int64_t last = at.first + (n_tiles - 1) * (int64_t)TOKENS;
        const int64_t set = block::own(1) - block::own(0);
        const float *states = to.states + block::own(2 * (mn_cell_first_slot(p.call, at.n, TOKENS) +
                                                          last / TOKENS));
        tile_prefetch<T, 2, FULL ? 4 : 3> next;
        grad_writer<T> grads;
        grads.open(p, to, at.span, last, n_rows);
        next.open(p, at.span);
        next.move(p, last);
        if (n_tiles > 0) {
            next.issue(r.in[(n_tiles - 1) % 2], last_rows);
            r.first[(n_tiles - 1) % 2].issue(states, set);
        }
        for (int i = n_tiles - 1; i >= 0; i--) {
            const int rows = i == n_tiles - 1 ? last_rows : TOKENS;
            const lines_of<FULL> &in = r.in[i % 2];
            const int buffer = i % 2;
            state first;
            next.complete(r.in[i % 2]);
            r.first[i % 2].get(first);
            __syncthreads();
            next.move(p, -(int64_t)TOKENS);
            states -= 2 * set;
            if (i > 0) {
                next.issue(r.in[(i - 1) % 2], TOKENS);
                r.first[(i - 1) % 2].issue(states, set);
            }
            if (i < n_tiles - 1) grads.put(r.out, !buffer, i < n_tiles - 2 ? TOKENS : last_rows);
            if (rows < TOKENS || !backward_tile<FULL>(sum, r.out, buffer, dyn, edge, r.states, in,
                                                      first, p.from_prior)) {
                adjoint tile_adjoint = { sum.d, {}, {}, {} };
                backward_rows<FULL>(tile_adjoint, r.out, buffer, dyn, r.states, in, first, rows,
                                    p.from_prior);
                accumulate_sums(sum, tile_adjoint);
            }
        }
        __syncthreads();
        if (n_tiles > 0) grads.put(r.out, 0, n_tiles > 1 ? TOKENS : last_rows);
        store_state0_grads(p, to.dynamics, sum, dyn, at, slot);
        __syncthreads();
    }
}

/* ---- launches -------------------------------------------------------------------------------- */

struct store_dynamics {
    float *da, *dp;
    int64_t cells;

    __device__ void operator()(int64_t i, float sum) const {
        if (i < cells && da) da[i] = sum;
        if (i >= cells && dp) dp[i - cells] = sum;
    }
};

static dim3 blocks_of(const mn_call *call) {
    return dim3(mn_blocks(call->V, block::COLUMNS), mn_blocks(n_chunks(*call), 1, MAX_CHUNKS),
                mn_blocks(call->K, block::SLOTS));
}

enum { N_BUFFERS = 7 };

/* Numbers of each part of the work space, in the order of `room`. */
static bool workspace_sizes(int64_t (&counts)[N_BUFFERS], const mn_call *call, bool backward) {
    const int64_t thread_groups = mn_ceil_div(call->K, block::SLOTS);
    const int64_t across = mn_ceil_div(call->V, block::COLUMNS), chunks = n_chunks(*call);
    int64_t rows, cells, set;    // set: four numbers of each thread
    for (int64_t &count : counts) count = 0;
    bool ok = mn_mul_i64(&rows, mn_cell_rows_of(call), 2) &&
              mn_mul_i64(&set, thread_groups, across) &&
              mn_mul_i64(&set, set, block::THREADS * SLOTS);
    if (ok && thread_groups > 1) {
        ok = mn_mul_i64(&counts[0], rows, call->V) &&
             mn_mul_i64(&counts[0], counts[0], thread_groups);
    }
    int64_t chunk_floats = 0;
    if (ok && chunked(*call))
        ok = mn_mul_i64(&chunk_floats, set, chunks) && chunk_floats <= INT64_MAX / 32;
    if (!backward || !ok) {
        counts[1] = 2 * chunk_floats;
        return ok;
    }
    counts[2] = 2 * chunk_floats;
    counts[6] = MAP_NUMBERS * chunk_floats;
    return mn_mul_i64(&counts[3], set, 2) &&
           mn_mul_i64(&counts[3], counts[3], mn_tile_slots(*call, TOKENS)) &&
           mn_mul_i64(&counts[4], rows, call->K) && mn_mul_i64(&counts[4], counts[4], across) &&
           mn_mul_i64(&cells, call->V, 2 * call->K) && mn_mul_i64(&counts[5], cells, chunks);
}

static bool plan_workspace(mn_plan *plan, const mn_call *call, bool backward) {
    int64_t counts[N_BUFFERS];
    return workspace_sizes(counts, call, backward) && mn_cell_plan_workspace(plan, counts);
}

static workspace smem_at(float *shared, const mn_call *call, bool backward) {
    int64_t counts[N_BUFFERS];
    float *at[N_BUFFERS];
    (void)workspace_sizes(counts, call, backward);    // went well when it was planned
    mn_cell_carve_workspace(at, shared, counts);
    return { at[0], at[1], at[2], at[3], at[4], at[5], at[6] };
}

/* Sums over groups of slots, where there are several. */
template <typename T>
static int reduce_groups(const mn_out &first, const mn_out &second, const float *sums,
                         const mn_call *call, cudaStream_t stream) {
    const int64_t thread_groups = mn_ceil_div(call->K, block::SLOTS);
    if (thread_groups == 1) return cudaSuccess;
    return mn_cell_reduce_partials<T>(first, second, sums, thread_groups, call, 1, call->V, stream);
}

template <typename T>
static int forward(const mn_moebius_args *p, float *shared, cudaStream_t stream) {
    const dim3 blocks = blocks_of(&p->call);
    const int64_t n_rows = mn_cell_rows_of(&p->call), count = n_chunks(p->call);
    const workspace to = smem_at(shared, &p->call, false);
    int code = cudaSuccess;
    if (chunked(p->call)) code = scan_states<T>(p, to.starts, CHUNK, MIN_CHUNKED, stream);
    if (code != cudaSuccess) return code;
    if (p->yvar.data || p->from_prior) {
        moebius_fwd_kernel<T, true><<<blocks, block::THREADS, 0, stream>>>(*p, to, n_rows, count);
    } else {
        moebius_fwd_kernel<T, false><<<blocks, block::THREADS, 0, stream>>>(*p, to, n_rows, count);
    }
    code = mn_launch_status();
    return code != cudaSuccess ? code : reduce_groups<T>(p->y, p->yvar, to.sums, &p->call, stream);
}

template <typename T>
static int backward(const mn_moebius_args *p, float *shared, cudaStream_t stream) {
    const mn_call *call = &p->call;
    const dim3 blocks = blocks_of(call);
    const int64_t n_rows = mn_cell_rows_of(call), count = n_chunks(*call);
    const workspace to = smem_at(shared, call, true);
    const bool full = p->from_prior || p->cot.yvar.data;
    int code = !chunked(*call) ? scan_states<T>(p, to.states, TOKENS, 0, stream)
               : full ? scan_maps<T, FULL_MAP_KINDS>(p, to.states, to.maps, to.ends, stream)
                      : scan_maps<T, MAP_KINDS>(p, to.states, to.maps, to.ends, stream);
    if (code != cudaSuccess) return code;
    code = full ? mn_launch_smem(moebius_bwd_kernel<T, true>, blocks, block::THREADS,
                                 sizeof(bwd_smem<true>), stream, *p, to, n_rows, count)
                : mn_launch_smem(moebius_bwd_kernel<T, false>, blocks, block::THREADS,
                                 sizeof(bwd_smem<false>), stream, *p, to, n_rows, count);
    if (code == cudaSuccess) {
        code = reduce_groups<T>(p->grad.v, p->grad.prec, to.sums, call, stream);
    }
    if (code == cudaSuccess) {
        code = mn_cell_reduce_partials<T>(p->grad.k, p->grad.q, to.keys, blocks.x, call, 1, call->K,
                                          stream);
    }
    if (code != cudaSuccess || (!p->grad.a.data && !p->grad.p.data)) return code;
    const int64_t cells = call->V * call->K;
    const store_dynamics put = { (float *)p->grad.a.data, (float *)p->grad.p.data, cells };
    return mn_reduce_partials_to(put, to.dynamics, count, 2 * cells, stream);
}

MN_CUDA_PLAN(moebius_forward) {
    return plan_workspace(plan, (const mn_call *)args, false);
}

MN_CUDA_LAUNCH(moebius_forward) {
    const mn_moebius_args *p = (const mn_moebius_args *)args;
    if (p->call.dtype == MN_BF16) {
        return forward<mn_bf16>(p, (float *)shared, (cudaStream_t)stream);
    }
    return forward<float>(p, (float *)shared, (cudaStream_t)stream);
}

MN_CUDA_PLAN(moebius_backward) {
    return plan_workspace(plan, (const mn_call *)args, true);
}

MN_CUDA_LAUNCH(moebius_backward) {
    const mn_moebius_args *p = (const mn_moebius_args *)args;
    if (p->call.dtype == MN_BF16) {
        return backward<mn_bf16>(p, (float *)shared, (cudaStream_t)stream);
    }
    return backward<float>(p, (float *)shared, (cudaStream_t)stream);
}

}    // namespace mneme::moebius
