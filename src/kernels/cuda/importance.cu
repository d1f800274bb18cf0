/* importance.cu - Palimpsa: every cell keeps a mean and how much it matters (see ref/importance.c
 * for the equations).
 *
 *   I <- a I + (1 - a) ip + k^2 b      M <- a M + k v      mu = M / I
 *   o = scale sum_i q mu               ovar = scale^2 sum_i q^2 / I
 *
 * A block has 16 columns of values (its lines) and 16 S slots of one head of one sequence; a thread
 * keeps S slots of one value column in registers. With more slots, blocks leave parts of the sums
 * over slots. Backward as in moebius.cu: states in front of each tile first, then the tiles from
 * the last one on, each made again in registers slot by slot. */
#include "kernels/cuda/cells16.cuh"
#include "kernels/cuda/parts.cuh"

static __device__ const float least_importance = 1.17549435e-38f;    // that is not denormal

enum { SIDE = MN_CELL_SIDE, TOKENS = MN_CELL_TOKENS, MOST_HEADS = 65535, S = 4 };

/* The work space of a call, each part behind the other. */
enum { SUMS, STATES, SLOTS, GATES, PRIORS, N_ROOMS };

struct room {
    float *at[N_ROOMS];
};

/* One head of one sequence, and this block's place in it. */
struct place {
    int64_t n, h, j0, i0, n_rows;
    mn_span span;
    float ip;

    template <typename T>
    __device__ static place of(const mn_importance_args &p, int64_t item, int64_t n_rows) {
        place at;
        at.n = item / p.call.H, at.h = item % p.call.H;
        at.j0 = blockIdx.x * (int64_t)SIDE, at.i0 = blockIdx.z * (int64_t)(S * SIDE);
        at.n_rows = n_rows;
        at.span = mn_span_at(p.call, at.n);
        at.ip = mn_float(*mn_row<T>(p.ip, 0, 0, at.h));
        return at;
    }

    /* Number of a token's row among those of all tokens and heads. */
    __device__ int64_t row(const mn_call &call, int64_t t) const {
        return (span.b * call.T + span.t0 + t) * call.H + h;
    }

    /* Where slot s of this thread lies in (K,V); -1 outside. */
    __device__ int64_t cell(const mn_call &call, int s) const {
        const int64_t i = i0 + s * SIDE + threadIdx.x % SIDE, j = j0 + threadIdx.x / SIDE;
        return i < call.K && j < call.V ? i * call.V + j : -1;
    }
};

struct cell {
    float M, I;

    __device__ void advance(float k, float v, float b, float a, float fresh) {
        M = fmaf(a, M, k * v);
        I = fmaf(a, I, fmaf(k * k, b, fresh));
    }
};

/* 1 / I; finite near 0, where cells outside of (K,V) may end, whose numbers are all zero. */
__device__ static float inverse_importance(float I) {
    return mn_inverse(fabsf(I) < least_importance ? least_importance : I);
}

__device__ static float first_importance(const mn_importance_args &p, const place &at, int64_t i) {
    const float *imp0 = mn_row<float>(p.imp0, at.n, 0, at.h);
    return imp0 && i >= 0 ? imp0[i] : at.ip;
}

__device__ static void load_state(cell (&c)[S], const mn_importance_args &p, const place &at) {
    const float *mu0 = mn_row<float>(p.mu0, at.n, 0, at.h);
#pragma unroll
    for (int s = 0; s < S; s++) {
        const int64_t i = at.cell(p.call, s);
        c[s].I = first_importance(p, at, i);
        c[s].M = mu0 && i >= 0 ? mu0[i] * c[s].I : 0.0f;
    }
}

/* A tile's numbers: S arrays of keys, S of queries, and those of the value columns. */
enum { KEYS = 0, QUERIES = S, VALUES = 2 * S, WRITES, MEAN_COTS, SPREAD_COTS, N_ARRAYS };

struct stage {
    mn_cell_rows rows[N_ARRAYS];
    alignas(16) float a[TOKENS], forget[TOKENS];
};

template <typename T, bool COTS>
__device__ static void fill(stage &to, const mn_importance_args &p, const place &at,
                            const mn_cell_tile &tile) {
    const int64_t K = p.call.K, V = p.call.V;
#pragma unroll
    for (int s = 0; s < S; s++) {
        to.rows[KEYS + s].put(mn_cell_fetch<T>(p.k, tile, at.h, at.i0 + s * SIDE, K));
        to.rows[QUERIES + s].put(mn_cell_fetch<T>(p.q, tile, at.h, at.i0 + s * SIDE, K));
    }
    to.rows[VALUES].put(mn_cell_fetch<T>(p.v, tile, at.h, at.j0, V));
    to.rows[WRITES].put(mn_cell_fetch<T>(p.b, tile, at.h, at.j0, V));
    if (COTS) {
        to.rows[MEAN_COTS].put(mn_cell_fetch<T>(p.cot.o, tile, at.h, at.j0, V));
        to.rows[SPREAD_COTS].put(mn_cell_fetch<T>(p.cot.ovar, tile, at.h, at.j0, V));
    }
    const int t = threadIdx.x;
    if (t >= tile.n_rows) return;
    const float g = mn_float(*mn_row<T>(p.g, tile.span.b, tile.span.t0 + tile.first + t, at.h));
    to.a[t] = expf(g);
    to.forget[t] = -expm1f(g);
}

/* Two sums per value column and token, to the tensors or to this group's parts. */
template <typename T>
__device__ static void put_sums(const mn_out &first, const mn_out &second, float *sums,
                                const mn_call &call, const place &at, const mn_cell_tile &tile,
                                const float (&from)[2][TOKENS][SIDE + 1]) {
    const int t = threadIdx.x / SIDE, i = threadIdx.x % SIDE;
    const int64_t j = at.j0 + i, token = tile.span.t0 + tile.first + t;
    if (t >= tile.n_rows || j >= call.V) return;
    if (gridDim.z > 1) {
        float *to = sums + (blockIdx.z * at.n_rows + at.row(call, tile.first + t)) * 2 * call.V;
        to[j] = from[0][t][i];
        to[call.V + j] = from[1][t][i];
        return;
    }
    if (first.data) mn_put(mn_row<T>(first, tile.span.b, token, at.h) + j, from[0][t][i]);
    if (second.data) mn_put(mn_row<T>(second, tile.span.b, token, at.h) + j, from[1][t][i]);
}

/* ---- forward --------------------------------------------------------------------------------- */

/* WHOLE: the tile has all of its tokens, and nothing asks. */
template <bool WHOLE>
__device__ static void tile_forward(cell (&c)[S], float (&o)[TOKENS], float (&ovar)[TOKENS],
                                    const stage &in, int n_rows, float scale, float ip) {
    const int line = threadIdx.x / SIDE, column = threadIdx.x % SIDE;
#pragma unroll
    for (int t = 0; t < TOKENS; t += 4) {
        float v[4], b[4];
        in.rows[VALUES].get(v, line, t);
        in.rows[WRITES].get(b, line, t);
#pragma unroll
        for (int i = 0; i < 4; i++) o[t + i] = ovar[t + i] = 0.0f;
#pragma unroll
        for (int s = 0; s < S; s++) {
            float k[4], q[4];
            in.rows[KEYS + s].get(k, column, t);
            in.rows[QUERIES + s].get(q, column, t);
#pragma unroll
            for (int i = 0; i < 4; i++) {
                if (!WHOLE && t + i >= n_rows) continue;
                c[s].advance(k[i], v[i], b[i], in.a[t + i], in.forget[t + i] * ip);
                const float r = q[i] * inverse_importance(c[s].I);
                o[t + i] = fmaf(c[s].M, r, o[t + i]);
                ovar[t + i] = fmaf(q[i], r, ovar[t + i]);
            }
        }
#pragma unroll
        for (int i = 0; i < 4; i++) o[t + i] *= scale, ovar[t + i] *= scale * scale;
    }
}

/* READ: results and last states. Otherwise, the states in front of every tile. */
template <typename T, bool READ>
__global__ void __launch_bounds__(MN_CELLS, 2)
forward_kernel(const __grid_constant__ mn_importance_args p, float *sums, float *states,
               int64_t n_rows) {
    __shared__ stage in;
    __shared__ float out[2][TOKENS][SIDE + 1];
    const int line = threadIdx.x / SIDE, column = threadIdx.x % SIDE;
    const int64_t step = 2 * S * MN_CELLS, blocks = gridDim.x * gridDim.z;
    for (int64_t item = blockIdx.y; item < mn_n_spans(p.call) * p.call.H; item += gridDim.y) {
        const place at = place::of<T>(p, item, n_rows);
        const int64_t n_tiles = mn_cell_tiles(at.span), slot = mn_cell_first_slot(p.call, at.n);
        cell c[S];
        load_state(c, p, at);
        for (int64_t i = 0; i < n_tiles; i++) {
            const mn_cell_tile tile = mn_cell_tile_at(at.span, i);
            fill<T, false>(in, p, at, tile);
            const int64_t block = ((slot + i) * p.call.H + at.h) * blocks +
                                  blockIdx.z * gridDim.x + blockIdx.x;
#pragma unroll
            for (int s = 0; !READ && s < S; s++) {
                states[block * step + 2 * s * MN_CELLS + threadIdx.x] = c[s].M;
                states[block * step + (2 * s + 1) * MN_CELLS + threadIdx.x] = c[s].I;
            }
            __syncthreads();
            float o[TOKENS], ovar[TOKENS];
            const float scale = (float)p.scale;
            if (tile.n_rows == TOKENS) tile_forward<true>(c, o, ovar, in, TOKENS, scale, at.ip);
            else tile_forward<false>(c, o, ovar, in, tile.n_rows, scale, at.ip);
            if (READ) {
                out[0][column][line] = mn_cell_line_sums(o);
                out[1][column][line] = mn_cell_line_sums(ovar);
            }
            __syncthreads();
            if (READ) put_sums<T>(p.o, p.ovar, sums, p.call, at, tile, out);
        }
        float *mu = mn_row<float>(p.mu, at.n, 0, at.h), *imp = mn_row<float>(p.imp, at.n, 0, at.h);
#pragma unroll
        for (int s = 0; READ && s < S; s++) {
            const int64_t i = at.cell(p.call, s);
            if (i >= 0 && mu) mu[i] = c[s].M / c[s].I;
            if (i >= 0 && imp) imp[i] = c[s].I;
        }
        __syncthreads();
    }
}

/* ---- backward -------------------------------------------------------------------------------- */

/* Sums of a thread over its slots, token by token. */
struct line_sums {
    float v[TOKENS], b[TOKENS], g[TOKENS];
};

/* Slot s of this thread through one tile; `adj` has the adjoints of M and I. `last`: their first
 * values come from the cotangents of the last state. Returns the part of dip. */
template <bool WHOLE>
__device__ __forceinline__ static float
slot_backward(cell &adj, line_sums &sums, float (&keys)[TOKENS][32], cell c, const stage &in, int s,
              int n_rows, const place &at, float scale, bool last, float dmu, float dimp) {
    const int line = threadIdx.x / SIDE, column = threadIdx.x % SIDE;
    float M[TOKENS + 1], I[TOKENS + 1], prior = 0.0f;
    M[0] = c.M, I[0] = c.I;
#pragma unroll
    for (int t = 0; t < TOKENS; t += 4) {
        float k[4], v[4], b[4];
        in.rows[KEYS + s].get(k, column, t);
        in.rows[VALUES].get(v, line, t);
        in.rows[WRITES].get(b, line, t);
#pragma unroll
        for (int i = 0; i < 4; i++) {
            if (WHOLE || t + i < n_rows) {
                c.advance(k[i], v[i], b[i], in.a[t + i], in.forget[t + i] * at.ip);
            }
            M[t + i + 1] = c.M, I[t + i + 1] = c.I;
        }
    }
    if (last) adj.M = dmu / c.I, adj.I = dimp - adj.M * (c.M / c.I);
#pragma unroll
    for (int t = TOKENS - 4; t >= 0; t -= 4) {
        float k[4], q[4], v[4], b[4], means[4], spreads[4];
        in.rows[KEYS + s].get(k, column, t);
        in.rows[QUERIES + s].get(q, column, t);
        in.rows[VALUES].get(v, line, t);
        in.rows[WRITES].get(b, line, t);
        in.rows[MEAN_COTS].get(means, line, t);
        in.rows[SPREAD_COTS].get(spreads, line, t);
#pragma unroll
        for (int i = 3; i >= 0; i--) {
            float to_k = 0.0f, to_q = 0.0f;
            if (WHOLE || t + i < n_rows) {
                const float mean = scale * means[i], spread = scale * scale * spreads[i];
                const float a = in.a[t + i], r = inverse_importance(I[t + i + 1]);
                const float mu = M[t + i + 1] * r, qr = q[i] * r;
                adj.M = fmaf(qr, mean, adj.M);
                adj.I -= qr * fmaf(mean, mu, qr * spread);
                to_q = fmaf(mean, mu, 2.0f * qr * spread);
                to_k = fmaf(adj.M, v[i], 2.0f * k[i] * adj.I * b[i]);
                sums.v[t + i] = fmaf(adj.M, k[i], sums.v[t + i]);
                sums.b[t + i] = fmaf(adj.I, k[i] * k[i], sums.b[t + i]);
                sums.g[t + i] += a * fmaf(adj.M, M[t + i], adj.I * (I[t + i] - at.ip));
                prior = fmaf(in.forget[t + i], adj.I, prior);
                adj.M *= a;
                adj.I *= a;
            }
            keys[t + i][threadIdx.x % 32] = mn_cell_pair_sums(to_k, to_q);
        }
    }
    return prior;
}

/* dk and dq of 16 slots over this block's value columns: the warps' sums in their order. */
__device__ static void put_keys(float *to, const mn_call &call, const place &at,
                                const mn_cell_tile &tile, int s,
                                const float (&from)[MN_CELLS / 32][TOKENS][32]) {
    const int64_t i = at.i0 + s * SIDE + threadIdx.x % SIDE;
    const int half = threadIdx.x % 32 / SIDE;
    for (int t = threadIdx.x / 32; t < tile.n_rows; t += MN_CELLS / 32) {
        float sum = 0.0f;
#pragma unroll
        for (int warp = 0; warp < MN_CELLS / 32; warp++) sum += from[warp][t][threadIdx.x % 32];
        const int64_t row = blockIdx.x * at.n_rows + at.row(call, tile.first + t);
        if (i < call.K) to[(row * 2 + half) * call.K + i] = sum;
    }
}

/* Gradients of the first state; returns the part of dip of one that starts at the prior. */
__device__ static float put_first(const cell (&adjoints)[S][MN_CELLS], const mn_importance_args &p,
                                  const place &at) {
    const float *mu0 = mn_row<float>(p.mu0, at.n, 0, at.h);
    float *dmu0 = mn_row<float>(p.grad.mu0, at.n, 0, at.h), sum = 0.0f;
    float *dimp0 = mn_row<float>(p.grad.imp0, at.n, 0, at.h);
#pragma unroll
    for (int s = 0; s < S; s++) {
        const int64_t i = at.cell(p.call, s);
        if (i < 0) continue;
        const cell adj = adjoints[s][threadIdx.x];
        const float to_imp = fmaf(adj.M, mn_get(mu0, i), adj.I);
        if (dmu0) dmu0[i] = adj.M * first_importance(p, at, i);
        if (dimp0) dimp0[i] = to_imp;
        sum += to_imp;
    }
    return p.imp0.data ? 0.0f : sum;
}

template <typename T>
__global__ void __launch_bounds__(MN_CELLS, 2)
backward_kernel(const __grid_constant__ mn_importance_args p, room to, int64_t n_rows) {
    __shared__ stage in;
    __shared__ float keys[MN_CELLS / 32][TOKENS][32], out[2][TOKENS][SIDE + 1];
    __shared__ float gates[TOKENS][SIDE + 1], team[32];
    __shared__ cell adjoints[S][MN_CELLS];    // each thread's own; M and I of adjoints
    const int line = threadIdx.x / SIDE, column = threadIdx.x % SIDE;
    const int64_t step = 2 * S * MN_CELLS, blocks = gridDim.x * gridDim.z;
    const int64_t block = blockIdx.z * gridDim.x + blockIdx.x;
    for (int64_t item = blockIdx.y; item < mn_n_spans(p.call) * p.call.H; item += gridDim.y) {
        const place at = place::of<T>(p, item, n_rows);
        const int64_t n_tiles = mn_cell_tiles(at.span), slot = mn_cell_first_slot(p.call, at.n);
        const float *dmu = mn_row<float>(p.cot.mu, at.n, 0, at.h);
        const float *dimp = mn_row<float>(p.cot.imp, at.n, 0, at.h);
        cell c[S];
        float prior = 0.0f;
        load_state(c, p, at);
#pragma unroll
        for (int s = 0; s < S; s++) {
            const int64_t i = n_tiles == 0 ? at.cell(p.call, s) : -1;
            const float to_mu = i >= 0 ? mn_get(dmu, i) / c[s].I : 0.0f;
            const float to_imp = i >= 0 ? mn_get(dimp, i) - to_mu * (c[s].M / c[s].I) : 0.0f;
            adjoints[s][threadIdx.x] = { to_mu, to_imp };
        }
        for (int64_t i = n_tiles - 1; i >= 0; i--) {
            const mn_cell_tile tile = mn_cell_tile_at(at.span, i);
            fill<T, true>(in, p, at, tile);
            const float *from = to.at[STATES] +
                                (((slot + i) * p.call.H + at.h) * blocks + block) * step;
            line_sums sums = {};
            __syncthreads();
#pragma unroll 1
            for (int s = 0; s < S; s++) {
                const int64_t place_of = at.cell(p.call, s);
                const bool cots = i == n_tiles - 1 && place_of >= 0;
                const cell first = { from[2 * s * MN_CELLS + threadIdx.x],
                                     from[(2 * s + 1) * MN_CELLS + threadIdx.x] };
                cell mine = adjoints[s][threadIdx.x];
                const float to_mu = cots ? mn_get(dmu, place_of) : 0.0f;
                const float to_imp = cots ? mn_get(dimp, place_of) : 0.0f;
                float(&to_keys)[TOKENS][32] = keys[threadIdx.x / 32];
                const float scale = (float)p.scale;
                if (tile.n_rows == TOKENS) {
                    prior += slot_backward<true>(mine, sums, to_keys, first, in, s, TOKENS, at,
                                                 scale, cots, to_mu, to_imp);
                } else {
                    prior += slot_backward<false>(mine, sums, to_keys, first, in, s, tile.n_rows,
                                                  at, scale, cots, to_mu, to_imp);
                }
                adjoints[s][threadIdx.x] = mine;
                __syncthreads();
                put_keys(to.at[SLOTS], p.call, at, tile, s, keys);
                __syncthreads();
            }
            out[0][column][line] = mn_cell_line_sums(sums.v);
            out[1][column][line] = mn_cell_line_sums(sums.b);
            gates[column][line] = mn_cell_line_sums(sums.g);
            __syncthreads();
            put_sums<T>(p.grad.v, p.grad.b, to.at[SUMS], p.call, at, tile, out);
            if (threadIdx.x < tile.n_rows) {
                float sum = 0.0f;
                for (int j = 0; j < SIDE; j++) sum += gates[threadIdx.x][j];
                to.at[GATES][block * n_rows + at.row(p.call, tile.first + threadIdx.x)] = sum;
            }
            __syncthreads();
        }
        bool any = false;
#pragma unroll
        for (int s = 0; s < S; s++) any = any || at.cell(p.call, s) >= 0;
        prior = any ? prior + put_first(adjoints, p, at) : 0.0f;
        prior = mn_team_sum<MN_CELLS>(prior, team);
        if (threadIdx.x == 0) to.at[PRIORS][(at.n * blocks + block) * p.call.H + at.h] = prior;
        __syncthreads();
    }
}

/* ---- launches -------------------------------------------------------------------------------- */

/* dg: rows are (b, t, h) */
template <typename T>
struct put_gates {
    mn_out g;
    int64_t tokens, heads;

    __device__ void operator()(int64_t i, float sum) const {
        const int64_t token = i / heads;
        mn_put(mn_row<T>(g, token / tokens, token % tokens, i % heads), sum);
    }
};

template <typename T>
struct put_priors {
    mn_out ip;

    __device__ void operator()(int64_t h, float sum) const {
        mn_put(mn_row<T>(ip, 0, 0, h), sum);
    }
};

static dim3 blocks_of(const mn_call *call) {
    return dim3(mn_blocks(call->V, SIDE), mn_blocks(mn_n_spans(*call) * call->H, 1, MOST_HEADS),
                mn_blocks(call->K, S * SIDE));
}

/* Numbers of each part of the work space. */
static bool measure(int64_t (&counts)[N_ROOMS], const mn_call *call, bool backward) {
    const int64_t groups = mn_ceil_div(call->K, S * SIDE), columns = mn_ceil_div(call->V, SIDE);
    int64_t rows, blocks, heads;
    for (int64_t &count : counts) count = 0;
    bool ok = mn_mul_i64(&rows, mn_cell_rows_of(call), 2 * call->H) &&
              mn_mul_i64(&blocks, groups, columns);
    if (ok && groups > 1) {
        ok = mn_mul_i64(&counts[SUMS], rows, call->V) &&
             mn_mul_i64(&counts[SUMS], counts[SUMS], groups);
    }
    if (!backward || !ok) return ok;
    return mn_mul_i64(&heads, blocks, call->H) &&
           mn_mul_i64(&counts[STATES], heads, 2 * S * MN_CELLS) &&
           mn_mul_i64(&counts[STATES], counts[STATES], mn_tile_slots(*call, TOKENS)) &&
           mn_mul_i64(&counts[SLOTS], rows, call->K) &&
           mn_mul_i64(&counts[SLOTS], counts[SLOTS], columns) &&
           mn_mul_i64(&counts[GATES], rows, blocks) &&
           mn_mul_i64(&counts[PRIORS], heads, mn_n_spans(*call));
}

static bool plan_room(mn_plan *plan, const mn_call *call, bool backward) {
    int64_t counts[N_ROOMS];
    if (!measure(counts, call, backward)) return false;
    for (int64_t count : counts) {
        size_t bytes;
        if (!mn_mul_size(&bytes, (size_t)count, sizeof(float)) ||
            bytes > SIZE_MAX - plan->shared_bytes) {
            return false;
        }
        plan->shared_bytes += bytes;
    }
    return true;
}

template <typename T>
static int sum_groups(const mn_out &first, const mn_out &second, const float *sums,
                      const mn_call *call, int64_t n_rows, cudaStream_t stream) {
    const int64_t groups = mn_ceil_div(call->K, S * SIDE);
    if (groups == 1 || n_rows == 0) return cudaSuccess;
    const mn_put_rows<T> put = { first, second, call->T, call->H, call->V };
    return mn_sum_parts_into(put, sums, groups, n_rows * 2 * call->V, stream);
}

template <typename T>
static int forward(const mn_importance_args *p, float *sums, cudaStream_t stream) {
    const int64_t n_rows = mn_cell_rows_of(&p->call) * p->call.H;
    const dim3 blocks = blocks_of(&p->call);
    forward_kernel<T, true><<<blocks, MN_CELLS, 0, stream>>>(*p, sums, nullptr, n_rows);
    const int code = mn_launched();
    if (code != cudaSuccess) return code;
    return sum_groups<T>(p->o, p->ovar, sums, &p->call, n_rows, stream);
}

template <typename T>
static int backward(const mn_importance_args *p, float *shared, cudaStream_t stream) {
    const mn_call *call = &p->call;
    const int64_t n_rows = mn_cell_rows_of(call) * call->H;
    const dim3 blocks = blocks_of(call);
    int64_t counts[N_ROOMS];
    room at;
    (void)measure(counts, call, true);    // went well when it was planned
    for (int i = 0; i < N_ROOMS; i++) at.at[i] = i == 0 ? shared : at.at[i - 1] + counts[i - 1];
    forward_kernel<T, false><<<blocks, MN_CELLS, 0, stream>>>(*p, nullptr, at.at[STATES], n_rows);
    int code = mn_launched();
    if (code != cudaSuccess) return code;
    backward_kernel<T><<<blocks, MN_CELLS, 0, stream>>>(*p, at, n_rows);
    code = mn_launched();
    if (code == cudaSuccess) {
        code = sum_groups<T>(p->grad.v, p->grad.b, at.at[SUMS], call, n_rows, stream);
    }
    if (code == cudaSuccess && n_rows > 0 && (p->grad.k.data || p->grad.q.data)) {
        const mn_put_rows<T> put = { p->grad.k, p->grad.q, call->T, call->H, call->K };
        code = mn_sum_parts_into(put, at.at[SLOTS], blocks.x, n_rows * 2 * call->K, stream);
    }
    if (code == cudaSuccess && n_rows > 0 && p->grad.g.data) {
        const put_gates<T> put = { p->grad.g, call->T, call->H };
        code = mn_sum_parts_into(put, at.at[GATES], blocks.x * blocks.z, n_rows, stream);
    }
    if (code != cudaSuccess || !p->grad.ip.data) return code;
    const int64_t n_parts = mn_n_spans(*call) * blocks.x * blocks.z;
    return mn_sum_parts_into(put_priors<T>{ p->grad.ip }, at.at[PRIORS], n_parts, call->H, stream);
}

MN_CUDA_PLAN(importance_forward) {
    return plan_room(plan, (const mn_call *)args, false);
}

MN_CUDA_LAUNCH(importance_forward) {
    const mn_importance_args *p = (const mn_importance_args *)args;
    if (p->call.dtype == MN_BF16) {
        return forward<mn_bf16>(p, (float *)shared, (cudaStream_t)stream);
    }
    return forward<float>(p, (float *)shared, (cudaStream_t)stream);
}

MN_CUDA_PLAN(importance_backward) {
    return plan_room(plan, (const mn_call *)args, true);
}

MN_CUDA_LAUNCH(importance_backward) {
    const mn_importance_args *p = (const mn_importance_args *)args;
    if (p->call.dtype == MN_BF16) {
        return backward<mn_bf16>(p, (float *)shared, (cudaStream_t)stream);
    }
    return backward<float>(p, (float *)shared, (cudaStream_t)stream);
}
