/* moebius.cu - Kalman Linear Attention: a scalar Kalman filter per channel and slot (see
 * ref/moebius.c for the equations).
 *
 *   den = a^2 + p lam      lam <- lam / den + prec k^2      eta <- a / den eta + prec v k
 *   y = sum_s q eta / lam  yvar = sum_s q^2 / lam
 *
 * A block has 16 channels (lines) and 16 slots (columns) of one sequence, with lam and eta in
 * registers. With more slots, blocks leave parts of the sums over slots, added up afterwards.
 * Backward, a first pass leaves the states in front of each tile; the second goes through the tiles
 * from the last one on, makes a tile's states again in registers, and leaves dk and dq of its 16
 * channels as parts. */
#include "kernels/cuda/cells.cuh"
#include "kernels/cuda/parts.cuh"

enum { SIDE = MN_CELL_SIDE, TOKENS = MN_CELL_TOKENS, MOST_SEQUENCES = 65535 };

static __device__ const float floor_at = 1e-12f;

/* The work space of a call, each part behind the other. */
struct room {
    float *sums;      // groups of slots x tokens x 2 x V: parts of y, yvar or dv, dprec
    float *states;    // tiles x 2 x V x K: lam and eta in front of each
    float *keys;      // groups of channels x tokens x 2 x K: parts of dk, dq
    float *dynamics;  // sequences x 2 x V x K: parts of da, dp
};

/* One thread's cell: its place, its dynamics with their floors, its state. */
struct cell {
    int64_t m, s, at;    // at: in (V,K)
    bool inside;
    float a, a2, p, lam, eta;

    __device__ cell(const mn_moebius_args &args) {
        m = blockIdx.x * (int64_t)SIDE + threadIdx.x / SIDE;
        s = blockIdx.z * (int64_t)SIDE + threadIdx.x % SIDE;
        at = m * args.call.K + s;
        inside = m < args.call.V && s < args.call.K;
        a = inside ? ((const float *)args.a.data)[at] : 1.0f;
        a2 = fmaxf(a * a, floor_at);
        p = inside ? fmaxf(((const float *)args.p.data)[at], floor_at) : floor_at;
    }

    __device__ void load(const mn_moebius_args &args, int64_t n) {
        const float *lam0 = mn_row<float>(args.lam0, n, 0, 0);
        const float *eta0 = mn_row<float>(args.eta0, n, 0, 0);
        lam = inside && lam0 ? lam0[at] : 1.0f;
        eta = inside && eta0 ? eta0[at] : 0.0f;
    }

    __device__ void advance(float k, float v, float prec) {
        const float g = mn_inverse(fmaxf(fmaf(p, lam, a2), floor_at)), pk = prec * k;
        lam = fmaf(lam, g, pk * k);
        eta = fmaf(a * g, eta, pk * v);
    }
};

/* The numbers of a tile, in shared memory: two sets, so that one is filled while the other is
 * read. */
enum { KEYS, VALUES, PRECISIONS, QUERIES, MEAN_COTS, SPREAD_COTS };

template <typename T, int N>
struct fetched {
    float x[N];

    __device__ void fetch(const mn_moebius_args &p, const mn_cell_tile &tile) {
        const int64_t m0 = blockIdx.x * (int64_t)SIDE, s0 = blockIdx.z * (int64_t)SIDE;
        const int64_t V = p.call.V, K = p.call.K;
        x[KEYS] = mn_cell_fetch<T>(p.k, tile, 0, s0, K);
        x[VALUES] = mn_cell_fetch<T>(p.v, tile, 0, m0, V);
        x[PRECISIONS] = mn_cell_fetch<T>(p.prec, tile, 0, m0, V);
        if (N > QUERIES) x[QUERIES] = mn_cell_fetch<T>(p.q, tile, 0, s0, K);
        if (N > MEAN_COTS) {
            x[N - 2] = mn_cell_fetch<T>(p.cot.y, tile, 0, m0, V);
            x[N - 1] = mn_cell_fetch<T>(p.cot.yvar, tile, 0, m0, V);
        }
    }

    __device__ void put(mn_cell_rows (&to)[N]) const {
#pragma unroll
        for (int i = 0; i < N; i++) to[i].put(x[i]);
    }
};

/* Two sums per channel and token of a tile, from column t of a line to the tensors, or to this
 * group's parts where there are several groups of slots. */
template <typename T>
__device__ static void put_sums(const mn_out &first, const mn_out &second, float *sums,
                                const mn_call &call, const mn_cell_tile &tile,
                                const float (&from)[2][TOKENS][SIDE + 1], int64_t n_rows) {
    const int t = threadIdx.x / SIDE, i = threadIdx.x % SIDE;
    const int64_t m = blockIdx.x * (int64_t)SIDE + i, at = tile.span.t0 + tile.first + t;
    if (t >= tile.n_rows || m >= call.V) return;
    if (gridDim.z > 1) {
        float *row = sums + ((blockIdx.z * n_rows + tile.span.b * call.T + at) * 2) * call.V;
        row[m] = from[0][t][i];
        row[call.V + m] = from[1][t][i];
        return;
    }
    if (first.data) mn_put(mn_row<T>(first, tile.span.b, at, 0) + m, from[0][t][i]);
    if (second.data) mn_put(mn_row<T>(second, tile.span.b, at, 0) + m, from[1][t][i]);
}

/* ---- forward --------------------------------------------------------------------------------- */

template <bool VARIANCE>
__device__ static void tile_forward(cell &c, float (&y)[TOKENS], float (&yvar)[TOKENS],
                                    const mn_cell_rows *rows, int n_rows, bool from_prior) {
    const int line = threadIdx.x / SIDE, column = threadIdx.x % SIDE;
    float k[TOKENS], q[TOKENS], v[TOKENS], prec[TOKENS];
    rows[KEYS].get(k, column);
    rows[QUERIES].get(q, column);
    rows[VALUES].get(v, line);
    rows[PRECISIONS].get(prec, line);
    const float by = from_prior ? c.a : 1.0f, by2 = from_prior ? c.a2 : 1.0f;
    const float more = from_prior ? c.p : 0.0f;
#pragma unroll
    for (int t = 0; t < TOKENS; t++) {
        y[t] = yvar[t] = 0.0f;
        if (t >= n_rows) continue;
        c.advance(k[t], v[t], prec[t]);
        const float var = mn_inverse(fmaxf(c.lam, floor_at));
        y[t] = q[t] * by * (c.eta * var);
        if (VARIANCE) yvar[t] = q[t] * q[t] * fmaf(by2, var, more);
    }
}

template <typename T, bool VARIANCE>
__global__ void __launch_bounds__(MN_CELLS)
forward_kernel(const __grid_constant__ mn_moebius_args p, float *sums, int64_t n_rows) {
    __shared__ mn_cell_rows rows[2][QUERIES + 1];
    __shared__ float out[2][2][TOKENS][SIDE + 1];
    const int line = threadIdx.x / SIDE, column = threadIdx.x % SIDE;
    cell c(p);
    for (int64_t n = blockIdx.y; n < mn_n_spans(p.call); n += gridDim.y) {
        const mn_span span = mn_span_at(p.call, n);
        const int64_t n_tiles = mn_cell_tiles(span);
        fetched<T, QUERIES + 1> next;
        c.load(p, n);
        if (n_tiles > 0) next.fetch(p, mn_cell_tile_at(span, 0));
        for (int64_t i = 0; i < n_tiles; i++) {
            const mn_cell_tile tile = mn_cell_tile_at(span, i);
            const int side = i % 2;
            next.put(rows[side]);
            __syncthreads();
            if (i > 0) {
                put_sums<T>(p.y, p.yvar, sums, p.call, mn_cell_tile_at(span, i - 1), out[!side],
                            n_rows);
            }
            if (i + 1 < n_tiles) next.fetch(p, mn_cell_tile_at(span, i + 1));
            float y[TOKENS], yvar[TOKENS];
            tile_forward<VARIANCE>(c, y, yvar, rows[side], tile.n_rows, p.from_prior);
            out[side][0][column][line] = mn_cell_line_sums(y);
            if (VARIANCE) out[side][1][column][line] = mn_cell_line_sums(yvar);
        }
        __syncthreads();
        if (n_tiles > 0) {
            const int64_t last = n_tiles - 1;
            put_sums<T>(p.y, p.yvar, sums, p.call, mn_cell_tile_at(span, last), out[last % 2],
                        n_rows);
        }
        __syncthreads();
        float *lam = mn_row<float>(p.lam, n, 0, 0), *eta = mn_row<float>(p.eta, n, 0, 0);
        if (c.inside && lam) lam[c.at] = c.lam;
        if (c.inside && eta) eta[c.at] = c.eta;
    }
}

/* ---- backward -------------------------------------------------------------------------------- */

/* States in front of every tile. */
template <typename T>
__global__ void __launch_bounds__(MN_CELLS)
states_kernel(const __grid_constant__ mn_moebius_args p, float *states) {
    __shared__ mn_cell_rows rows[2][PRECISIONS + 1];
    const int line = threadIdx.x / SIDE, column = threadIdx.x % SIDE;
    const int64_t cells = p.call.V * p.call.K;
    cell c(p);
    for (int64_t n = blockIdx.y; n < mn_n_spans(p.call); n += gridDim.y) {
        const mn_span span = mn_span_at(p.call, n);
        const int64_t n_tiles = mn_cell_tiles(span);
        float *to = states + mn_cell_first_slot(p.call, n) * 2 * cells + c.at;
        fetched<T, PRECISIONS + 1> next;
        c.load(p, n);
        if (n_tiles > 0) next.fetch(p, mn_cell_tile_at(span, 0));
        for (int64_t i = 0; i < n_tiles; i++) {
            const mn_cell_tile tile = mn_cell_tile_at(span, i);
            next.put(rows[i % 2]);
            if (c.inside) to[2 * i * cells] = c.lam, to[(2 * i + 1) * cells] = c.eta;
            __syncthreads();
            if (i + 1 < n_tiles) next.fetch(p, mn_cell_tile_at(span, i + 1));
            float k[TOKENS], v[TOKENS], prec[TOKENS];
            rows[i % 2][KEYS].get(k, column);
            rows[i % 2][VALUES].get(v, line);
            rows[i % 2][PRECISIONS].get(prec, line);
#pragma unroll
            for (int t = 0; t < TOKENS; t++) {
                if (t < tile.n_rows) c.advance(k[t], v[t], prec[t]);
            }
        }
        __syncthreads();
    }
}

/* Adjoints of a cell's state and its sums over time. */
struct adjoint {
    float lam, eta, a, a2, p;
};

/* What one token passes on. */
struct token_cots {
    float k, q, v, prec;
};

/* Token t of the tile: (lam0, eta0) is the cell's state before it, `c` the state after. */
template <bool PRIOR>
__device__ static token_cots token_backward(adjoint &d, const cell &c, float lam0, float eta0,
                                            float k, float q, float v, float prec, float gy,
                                            float gw) {
    const float var = mn_inverse(fmaxf(c.lam, floor_at)), mean = c.eta * var;
    float gm = gy * q, gv = gw * q * q;
    token_cots to;
    if (PRIOR) {
        to.q = gy * c.a * mean + 2.0f * q * gw * fmaf(c.a2, var, c.p);
        d.a = fmaf(gm, mean, d.a);
        d.a2 = fmaf(gv, var, d.a2);
        d.p += gv;
        gm *= c.a;
        gv *= c.a2;
    } else {
        to.q = fmaf(gy, mean, 2.0f * q * gw * var);
    }
    d.eta = fmaf(gm, var, d.eta);
    if (c.lam >= floor_at) d.lam = fmaf(-var, fmaf(gm, mean, gv * var), d.lam);
    const float nl = d.lam, ne = d.eta;
    to.k = prec * fmaf(2.0f * nl, k, ne * v);
    to.prec = k * fmaf(nl, k, ne * v);
    to.v = ne * prec * k;
    const float sum = fmaf(c.p, lam0, c.a2), g = mn_inverse(fmaxf(sum, floor_at));
    d.a = fmaf(ne * eta0, g, d.a);
    d.eta = ne * c.a * g;
    d.lam = nl * g;
    if (sum >= floor_at) {
        const float dden = -fmaf(nl, lam0, ne * c.a * eta0) * g * g;
        d.a2 += dden;
        d.p = fmaf(dden, lam0, d.p);
        d.lam = fmaf(nl, c.a2, -ne * c.a * c.p * eta0) * g * g;
    }
    return to;
}

/* One tile from its first state in `c`; dk and dq of each warp go to `keys`, lower and upper half
 * of its lanes. */
template <bool PRIOR>
__device__ static void tile_backward(adjoint &total, cell c, float (&dv)[TOKENS],
                                     float (&dprec)[TOKENS], float (&keys)[TOKENS][32],
                                     const mn_cell_rows *rows, int n_rows) {
    const int line = threadIdx.x / SIDE, column = threadIdx.x % SIDE;
    float lam[TOKENS + 1], eta[TOKENS + 1];
    lam[0] = c.lam, eta[0] = c.eta;
#pragma unroll
    for (int t = 0; t < TOKENS; t++) {
        if (t < n_rows) {
            c.advance(rows[KEYS].at[column][t], rows[VALUES].at[line][t],
                      rows[PRECISIONS].at[line][t]);
        }
        lam[t + 1] = c.lam, eta[t + 1] = c.eta;
    }
    adjoint d = { total.lam, total.eta, 0.0f, 0.0f, 0.0f };
#pragma unroll
    for (int t = TOKENS - 1; t >= 0; t--) {
        token_cots to = { 0.0f, 0.0f, 0.0f, 0.0f };
        if (t < n_rows) {
            c.lam = lam[t + 1], c.eta = eta[t + 1];
            to = token_backward<PRIOR>(d, c, lam[t], eta[t], rows[KEYS].at[column][t],
                                       rows[QUERIES].at[column][t], rows[VALUES].at[line][t],
                                       rows[PRECISIONS].at[line][t], rows[MEAN_COTS].at[line][t],
                                       rows[SPREAD_COTS].at[line][t]);
        }
        dv[t] = to.v, dprec[t] = to.prec;
        keys[t][threadIdx.x % 32] = mn_cell_pair_sums(to.k, to.q);
    }
    total = { d.lam, d.eta, total.a + d.a, total.a2 + d.a2, total.p + d.p };
}

/* dk and dq of this block's channels: the warps' sums, added in their order. */
__device__ static void put_keys(float *keys, const mn_call &call, const mn_cell_tile &tile,
                                const float (&from)[MN_CELLS / 32][TOKENS][32], int64_t n_rows) {
    const int64_t s = blockIdx.z * (int64_t)SIDE + threadIdx.x % SIDE;
    const int half = threadIdx.x % 32 / SIDE;
    for (int t = threadIdx.x / 32; t < tile.n_rows; t += MN_CELLS / 32) {
        float sum = 0.0f;
#pragma unroll
        for (int warp = 0; warp < MN_CELLS / 32; warp++) sum += from[warp][t][threadIdx.x % 32];
        const int64_t row = tile.span.b * call.T + tile.span.t0 + tile.first + t;
        if (s < call.K) keys[((blockIdx.x * n_rows + row) * 2 + half) * call.K + s] = sum;
    }
}

/* What is left of a sequence after its first token. */
__device__ static void put_first(const mn_moebius_args &p, float *dynamics, const cell &c,
                                 const adjoint &d, int64_t n) {
    if (!c.inside) return;
    float *lam0 = mn_row<float>(p.grad.lam0, n, 0, 0), *eta0 = mn_row<float>(p.grad.eta0, n, 0, 0);
    if (lam0) lam0[c.at] = d.lam;
    if (eta0) eta0[c.at] = d.eta;
    const int64_t cells = p.call.V * p.call.K;
    const bool kept = ((const float *)p.p.data)[c.at] >= floor_at;
    float *to = dynamics + 2 * n * cells + c.at;
    to[0] = d.a + (c.a * c.a >= floor_at ? 2.0f * c.a * d.a2 : 0.0f);
    to[cells] = kept ? d.p : 0.0f;
}

template <typename T, bool PRIOR>
__global__ void __launch_bounds__(MN_CELLS, 2)
backward_kernel(const __grid_constant__ mn_moebius_args p, room at, int64_t n_rows) {
    __shared__ mn_cell_rows rows[SPREAD_COTS + 1];
    __shared__ float keys[MN_CELLS / 32][TOKENS][32], out[2][TOKENS][SIDE + 1];
    const int line = threadIdx.x / SIDE, column = threadIdx.x % SIDE;
    const int64_t cells = p.call.V * p.call.K;
    cell c(p);
    for (int64_t n = blockIdx.y; n < mn_n_spans(p.call); n += gridDim.y) {
        const mn_span span = mn_span_at(p.call, n);
        const int64_t n_tiles = mn_cell_tiles(span);
        const float *states = at.states + mn_cell_first_slot(p.call, n) * 2 * cells + c.at;
        const float *dlam = mn_row<float>(p.cot.lam, n, 0, 0);
        const float *deta = mn_row<float>(p.cot.eta, n, 0, 0);
        adjoint d = { c.inside && dlam ? dlam[c.at] : 0.0f, c.inside && deta ? deta[c.at] : 0.0f,
                      0.0f, 0.0f, 0.0f };
        fetched<T, SPREAD_COTS + 1> next;
        if (n_tiles > 0) next.fetch(p, mn_cell_tile_at(span, n_tiles - 1));
        for (int64_t i = n_tiles - 1; i >= 0; i--) {
            const mn_cell_tile tile = mn_cell_tile_at(span, i);
            next.put(rows);
            c.lam = c.inside ? states[2 * i * cells] : 1.0f;
            c.eta = c.inside ? states[(2 * i + 1) * cells] : 0.0f;
            __syncthreads();
            if (i > 0) next.fetch(p, mn_cell_tile_at(span, i - 1));
            float dv[TOKENS], dprec[TOKENS];
            tile_backward<PRIOR>(d, c, dv, dprec, keys[threadIdx.x / 32], rows, tile.n_rows);
            out[0][column][line] = mn_cell_line_sums(dv);
            out[1][column][line] = mn_cell_line_sums(dprec);
            __syncthreads();
            put_keys(at.keys, p.call, tile, keys, n_rows);
            put_sums<T>(p.grad.v, p.grad.prec, at.sums, p.call, tile, out, n_rows);
            __syncthreads();
        }
        put_first(p, at.dynamics, c, d, n);
    }
}

/* ---- launches -------------------------------------------------------------------------------- */

struct put_dynamics {
    float *da, *dp;
    int64_t cells;

    __device__ void operator()(int64_t i, float sum) const {
        if (i < cells && da) da[i] = sum;
        if (i >= cells && dp) dp[i - cells] = sum;
    }
};

static dim3 blocks_of(const mn_call *call) {
    return dim3(mn_blocks(call->V, SIDE), mn_blocks(mn_n_spans(*call), 1, MOST_SEQUENCES),
                mn_blocks(call->K, SIDE));
}

/* Sums over groups of slots, where there are several. */
template <typename T>
static int sum_groups(const mn_out &first, const mn_out &second, const float *sums,
                      const mn_call *call, cudaStream_t stream) {
    const int64_t groups = mn_ceil_div(call->K, SIDE), width = mn_cell_rows_of(call) * 2 * call->V;
    if (groups == 1 || width == 0) return cudaSuccess;
    const mn_put_rows<T> put = { first, second, mn_max(call->T, 1), call->V };
    return mn_sum_parts_into(put, sums, groups, width, stream);
}

template <typename T>
static int forward(const mn_moebius_args *p, float *sums, cudaStream_t stream) {
    const dim3 blocks = blocks_of(&p->call);
    const int64_t n_rows = mn_cell_rows_of(&p->call);
    if (p->yvar.data) forward_kernel<T, true><<<blocks, MN_CELLS, 0, stream>>>(*p, sums, n_rows);
    else forward_kernel<T, false><<<blocks, MN_CELLS, 0, stream>>>(*p, sums, n_rows);
    const int code = mn_launched();
    return code != cudaSuccess ? code : sum_groups<T>(p->y, p->yvar, sums, &p->call, stream);
}

/* Numbers of each part of the work space. */
static bool measure(int64_t (&counts)[4], const mn_call *call, bool backward) {
    const int64_t groups = mn_ceil_div(call->K, SIDE), channels = mn_ceil_div(call->V, SIDE);
    int64_t rows, cells;
    bool ok = mn_mul_i64(&rows, mn_cell_rows_of(call), 2) &&
              mn_mul_i64(&cells, call->V, 2 * call->K) && mn_mul_i64(&counts[0], rows, call->V) &&
              mn_mul_i64(&counts[0], counts[0], groups > 1 ? groups : 0);
    counts[1] = counts[2] = counts[3] = 0;
    if (!backward || !ok) return ok;
    return mn_mul_i64(&counts[1], cells, mn_tile_slots(*call, TOKENS)) &&
           mn_mul_i64(&counts[2], rows, call->K) && mn_mul_i64(&counts[2], counts[2], channels) &&
           mn_mul_i64(&counts[3], cells, mn_n_spans(*call));
}

static bool plan_room(mn_plan *plan, const mn_call *call, bool backward) {
    int64_t counts[4];
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
static int backward(const mn_moebius_args *p, float *shared, cudaStream_t stream) {
    const mn_call *call = &p->call;
    const dim3 blocks = blocks_of(call);
    const int64_t n_rows = mn_cell_rows_of(call), cells = call->V * call->K;
    int64_t counts[4];
    (void)measure(counts, call, true);    // went well when it was planned
    const room at = { shared, shared + counts[0], shared + counts[0] + counts[1],
                      shared + counts[0] + counts[1] + counts[2] };
    states_kernel<T><<<blocks, MN_CELLS, 0, stream>>>(*p, at.states);
    int code = mn_launched();
    if (code != cudaSuccess) return code;
    if (p->from_prior) {
        backward_kernel<T, true><<<blocks, MN_CELLS, 0, stream>>>(*p, at, n_rows);
    } else {
        backward_kernel<T, false><<<blocks, MN_CELLS, 0, stream>>>(*p, at, n_rows);
    }
    code = mn_launched();
    if (code == cudaSuccess) {
        code = sum_groups<T>(p->grad.v, p->grad.prec, at.sums, call, stream);
    }
    if (code == cudaSuccess && n_rows > 0 && (p->grad.k.data || p->grad.q.data)) {
        const mn_put_rows<T> put = { p->grad.k, p->grad.q, call->T, call->K };
        code = mn_sum_parts_into(put, at.keys, blocks.x, n_rows * 2 * call->K, stream);
    }
    if (code != cudaSuccess || (!p->grad.a.data && !p->grad.p.data)) return code;
    const put_dynamics put = { (float *)p->grad.a.data, (float *)p->grad.p.data, cells };
    return mn_sum_parts_into(put, at.dynamics, mn_n_spans(*call), 2 * cells, stream);
}

MN_CUDA_PLAN(moebius_forward) {
    return plan_room(plan, (const mn_call *)args, false);
}

MN_CUDA_LAUNCH(moebius_forward) {
    const mn_moebius_args *p = (const mn_moebius_args *)args;
    if (p->call.dtype == MN_BF16) {
        return forward<mn_bf16>(p, (float *)shared, (cudaStream_t)stream);
    }
    return forward<float>(p, (float *)shared, (cudaStream_t)stream);
}

MN_CUDA_PLAN(moebius_backward) {
    return plan_room(plan, (const mn_call *)args, true);
}

MN_CUDA_LAUNCH(moebius_backward) {
    const mn_moebius_args *p = (const mn_moebius_args *)args;
    if (p->call.dtype == MN_BF16) {
        return backward<mn_bf16>(p, (float *)shared, (cudaStream_t)stream);
    }
    return backward<float>(p, (float *)shared, (cudaStream_t)stream);
}
