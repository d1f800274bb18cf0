/* importance_mma.cuh - Palimpsa in bf16: tensor cores do whatever is not one cell's own.
 *
 * Within a tile of 16 tokens, M and I are kept divided by A, the product of the decays so far, and
 * the adjoints times A, so that nothing decays:
 *
 *   M' <- M' + (k / A) v        I' <- I' + (k^2 / A) b + ((1 - a) ip / A) 1        mu = M' / I'
 *   pull = scale q do' / I'     D' <- D' + pull      C' <- C' - pull mu
 *
 * A token is then one product of depth 8 onto M' and I', whose factors are split into two numbers
 * of bf16; scale q do' is another. Where A would get smaller than exp(-20), a token is a head: what
 * is there is multiplied by A, which begins anew. The sums take mu, D' and C' rounded to bf16:
 *
 *   o = q mu     dq = mu do     dk = (D' v + 2 k C' b) / A     dv = k D' / A     db = k^2 C' / A
 *
 * For dg,
 *
 *   X_t = a sum(D . M_{t-1} + C . I_{t-1}) = X_{t+1} - v'dv - b'db - (1 - a) ip sum C
 *   dg = X_t - a ip sum C
 *
 * where X at the end of each tile is formed from its definition.
 *
 * A warp has 16 slots of 16 columns. Rows g and g + 8 of a product are slots (forward: columns) 2 g
 * and 2 g + 1 of them, columns n of its two tiles are columns (slots) 2 n and 2 n + 1; a lane thus
 * has 2 neighbours by 4 neighbours. */
#ifndef MN_KERNELS_CUDA_IMPORTANCE_MMA_CUH
#define MN_KERNELS_CUDA_IMPORTANCE_MMA_CUH

#include "kernels/cuda/importance_tile.cuh"

namespace importance::by_mma {

/* ---- forward --------------------------------------------------------------------------------- */

template <typename Block>
struct forward_room {
    static constexpr int PITCH = Block::COLUMNS + 4;
    tile<Block, FORWARD_PASS> in;
    arrivals<Block, FORWARD_PASS> came;
    alignas(16) float out[Block::GROUPS][TOKENS][PITCH];
};

/* o of a tile, the sums over 16 slots of it. */
template <typename Block, bool HEADS>
__device__ __forceinline__ void tile_forward(cells &c, forward_room<Block> &r, float scale) {
    const walk<Block, FORWARD_PASS, HEADS> along(r.in);
#pragma unroll 1
    for (int first = 0; first < TOKENS; first += HALF) {
        const uint2 q = r.in.slot_vectors.get(
            r.in.slot_vectors.mine(Block::group() * GROUP, row_lane(), Q_VECTOR), first);
        float sums[4] = {};
        along.advance(c, first);
#pragma unroll
        for (int t = 0; t < HALF; t++) {    // the next token before this one is read
            const cells now = c;
            if (t + 1 < HALF) along.advance(c, first + t + 1);
            float mu[2][4];
            unsigned factor[4];
#pragma unroll
            for (int i = 0; i < 8; i++) {
                mu[i / 4][i % 4] = now.M[i / 4][i % 4] * mn_inverse(now.I[i / 4][i % 4]);
            }
            factor_of(factor, mu);
            add_product(sums, factor, only(row_lane() == t, q));
        }
        const int t = first + 2 * column_lane(), column = across<Block>() * GROUP + 2 * row_lane();
        float *to = &r.out[Block::group()][t][column];
        *(float2 *)to = make_float2(scale * sums[0], scale * sums[2]);
        *(float2 *)(to + forward_room<Block>::PITCH) = make_float2(scale * sums[1],
                                                                   scale * sums[3]);
    }
    c.times(r.in.g.rest);
}

/* To o or, where blocks share the slots, to its part. */
template <typename Block>
__device__ __forceinline__ void put_read(const mn_importance_args &p, float *parts,
                                         const mn_cell_tile &tile, int64_t h, int64_t n_rows,
                                         const forward_room<Block> &r) {
    typedef mn_cell_share<Block::COLUMNS, Block::THREADS> share;
    const int t = share::row(), column = share::place();
    if (t >= tile.n_rows) return;
    float x[share::EACH] = {};
#pragma unroll
    for (int group = 0; group < Block::GROUPS; group++) mn_cell_add(x, &r.out[group][t][column]);
    const int64_t v = Block::column0() + column, inside = p.call.V - v;
    if (gridDim.z > 1) {
        const int64_t row = blockIdx.z * n_rows + tile.row(p.call, t) * p.call.H + h;
        mn_cell_store(parts + row * 2 * p.call.V + v, inside, x);
        return;
    }
    mn_bf16 *to = mn_row<mn_bf16>(p.o, tile.span.b, tile.span.t0 + tile.first + t, h);
    if (to) mn_cell_store(to + v, inside, x);
}

template <typename Block>
__global__ void __launch_bounds__(Block::THREADS, 2)
forward_kernel(const __grid_constant__ mn_importance_args p, float *sums, int64_t n_rows) {
    extern __shared__ float4 shared[];
    forward_room<Block> &r = *(forward_room<Block> *)shared;
    r.in.open();
    for (int64_t item = blockIdx.y; item < mn_n_spans(p.call) * p.call.H; item += gridDim.y) {
        const place at = place::of(p, item);
        const int64_t n_tiles = mn_cell_tiles(at.span.length);
        fetched<Block, FORWARD_PASS> next;
        next.open(p, at);
        cells c;
        load_first<Block, true>(c, p, at);
        if (n_tiles > 0) next.fetch(r.came, p, at, mn_cell_tile_at(at.span, 0));
        for (int64_t i = 0; i < n_tiles; i++) {
            next.put(r.in, r.came, at.ip, 1.0f);
            __syncthreads();
            if (i + 1 < n_tiles) next.fetch(r.came, p, at, mn_cell_tile_at(at.span, i + 1));
            if (r.in.g.heads == 0) tile_forward<Block, false>(c, r, (float)p.scale);
            else tile_forward<Block, true>(c, r, (float)p.scale);
            __syncthreads();
            put_read<Block>(p, sums, mn_cell_tile_at(at.span, i), at.h, n_rows, r);
        }
        float *mu = mn_row<float>(p.mu, at.n, 0, at.h), *imp = mn_row<float>(p.imp, at.n, 0, at.h);
#pragma unroll
        for (int n = 0; n < 8; n++) {
            const int64_t cell = cell_at<Block, true>(p.call, n / 4, n % 4);
            const float M = c.M[n / 4][n % 4], I = c.I[n / 4][n % 4];
            if (cell >= 0 && mu) mu[cell] = M / I;
            if (cell >= 0 && imp) imp[cell] = I;
        }
        __syncthreads();
    }
}

/* ---- backward -------------------------------------------------------------------------------- */

template <typename Block, bool HEADS>
__device__ __forceinline__ void advance_tile(cells &c, const tile<Block, STATES_PASS> &in) {
    const walk<Block, STATES_PASS, HEADS> along(in);
#pragma unroll
    for (int t = 0; t < TOKENS; t++) along.advance(c, t);
    c.times(in.g.rest);
}

/* States in front of every tile, of which there are SETS sets for each head. */
template <typename Block>
__global__ void __launch_bounds__(Block::THREADS, 3)
states_kernel(const __grid_constant__ mn_importance_args p, float *states) {
    __shared__ tile<Block, STATES_PASS> in[2];
    __shared__ arrivals<Block, STATES_PASS> came;
    in[0].open();
    in[1].open();
    for (int64_t item = blockIdx.y; item < mn_n_spans(p.call) * p.call.H; item += gridDim.y) {
        const place at = place::of(p, item);
        const int64_t n_tiles = mn_cell_tiles(at.span.length);
        const int64_t slot = mn_cell_first_slot(p.call, at.n, TOKENS);
        fetched<Block, STATES_PASS> next;
        next.open(p, at);
        cells c;
        load_first<Block, false>(c, p, at);
        if (n_tiles > 0) next.fetch(came, p, at, mn_cell_tile_at(at.span, 0));
        for (int64_t i = 0; i < n_tiles; i++) {
            tile<Block, STATES_PASS> &now = in[i % 2];
            next.put(now, came, at.ip, 1.0f);
            c.store(states + Block::own(((slot + i) * p.call.H + at.h) * SETS),
                    Block::own(1) - Block::own(0));
            __syncthreads();
            if (i + 1 == n_tiles) break;
            next.fetch(came, p, at, mn_cell_tile_at(at.span, i + 1));
            if (now.g.heads == 0) advance_tile<Block, false>(c, now);
            else advance_tile<Block, true>(c, now);
        }
        __syncthreads();
    }
}

template <typename Block>
struct backward_room {
    tile<Block, BACKWARD_PASS> in;
    arrivals<Block, BACKWARD_PASS> came;
    float4 states[3][SETS][Block::THREADS];    // before a tile, twice, and before its second half
    float4 keys[WARPS][HALF][2][GROUP / 2];    // of two slots: dq, D'v; then C'b, sum C
    float4 lines[WARPS][HALF][GROUP / 2];      // of two columns: dv, db
    float falls[TOKENS];                       // X_{t+1} - X_t
    float pulls[TOKENS], priors[TOKENS];       // sum C times a ip, and times 1 - a
    float along[WARPS], team[32];
};

/* What four tokens leave on the way to them, in the scale of A. */
struct reads {
    float r[4][2][4], mu[4][2][4];
};

/* A token back: adjoints, and sums over 16 slots and columns to shared memory. */
template <typename Block, bool HEADS>
__device__ __forceinline__ void token_backward(cells &adj, const float (&r)[2][4],
                                               const float (&mu)[2][4], backward_room<Block> &to,
                                               const walk<Block, BACKWARD_PASS, HEADS> &along,
                                               const mn_bf16 *by_column, const mn_bf16 *by_slot,
                                               int t) {
    const int row = row_lane(), lane = column_lane(), warp = threadIdx.x / 32;
    const uint2 q = along.slot(t), cot = only(lane == 3, along.column(t));
    float pull[2][4];
    put_shallow(pull[0], q, cot.x);
    put_shallow(pull[1], q, cot.y);
#pragma unroll
    for (int i = 0; i < 8; i++) {
        const float x = pull[i / 4][i % 4] * r[i / 4][i % 4];
        adj.M[i / 4][i % 4] += x;
        adj.I[i / 4][i % 4] = fmaf(-x, mu[i / 4][i % 4], adj.I[i / 4][i % 4]);
    }
    unsigned mean[4], D[4], C[4], other[4];
    factor_of(mean, mu);
    factor_of(D, adj.M);
    factor_of(C, adj.I);
    const uint2 columns = decltype(to.in.column_vectors)::get(by_column, t);
    const uint2 slots = decltype(to.in.slot_vectors)::get(by_slot, t);
    float keys[4], lines[4];
    put_product(keys, mean, only(row == COT_VECTOR, columns));
    add_product(keys, D, only(row == V_VECTOR, columns));
    add_product(keys, C, only(row == B_VECTOR || row == ONES_VECTOR, columns));
    turn(other, D);
    put_product(lines, other, only(row == K_VECTOR, slots));
    turn(other, C);
    add_product(lines, other, only(row == SQUARE_VECTOR, slots));
    if (lane < 2) {
        to.keys[warp][t % HALF][lane][row] = make_float4(keys[0], keys[1], keys[2], keys[3]);
    }
    if (lane == 0) {
        to.lines[warp][t % HALF][row] = make_float4(lines[0], lines[1], lines[2], lines[3]);
    }
}

/* Adjoints of the last state, `c`. */
template <typename Block>
__device__ void start_back(cells &adj, const cells &c, const mn_importance_args &p,
                           const place &at) {
    const float *dmu = mn_row<float>(p.cot.mu, at.n, 0, at.h);
    const float *dimp = mn_row<float>(p.cot.imp, at.n, 0, at.h);
#pragma unroll
    for (int i = 0; i < 8; i++) {
        const int64_t cell = cell_at<Block, false>(p.call, i / 4, i % 4);
        const float by = 1.0f / c.I[i / 4][i % 4];
        float &D = adj.M[i / 4][i % 4], &C = adj.I[i / 4][i % 4];
        D = cell >= 0 && dmu ? dmu[cell] * by : 0.0f;
        C = cell >= 0 && dimp ? dimp[cell] : 0.0f;
        C -= D * (c.M[i / 4][i % 4] * by);
    }
}

/* Gradients of the first state; returns the part of dip of one that starts at the prior. */
template <typename Block>
__device__ float put_first(const cells &adj, const mn_importance_args &p, const place &at) {
    const float *mu0 = mn_row<float>(p.mu0, at.n, 0, at.h);
    float *dmu0 = mn_row<float>(p.grad.mu0, at.n, 0, at.h), sum = 0.0f;
    float *dimp0 = mn_row<float>(p.grad.imp0, at.n, 0, at.h);
#pragma unroll
    for (int i = 0; i < 8; i++) {
        const int64_t cell = cell_at<Block, false>(p.call, i / 4, i % 4);
        if (cell < 0) continue;
        const float D = adj.M[i / 4][i % 4];
        const float to_imp = fmaf(D, mn_get(mu0, cell), adj.I[i / 4][i % 4]);
        if (dmu0) dmu0[cell] = D * first_importance(p, at, cell);
        if (dimp0) dimp0[cell] = to_imp;
        sum += to_imp;
    }
    return p.imp0.data ? 0.0f : sum;
}

/* X behind the tile, from the state there and its adjoint: each warp's part of it. */
template <typename Block>
__device__ __forceinline__ void put_along(backward_room<Block> &r, const cells &adj,
                                          const cells &c) {
    float sum = 0.0f;
#pragma unroll
    for (int i = 0; i < 8; i++) {
        sum = fmaf(adj.M[i / 4][i % 4], c.M[i / 4][i % 4], sum);
        sum = fmaf(adj.I[i / 4][i % 4], c.I[i / 4][i % 4], sum);
    }
    sum = mn_warp_sum(sum);
    if (threadIdx.x % 32 == 0) r.along[threadIdx.x / 32] = sum;
}

/* dk and dq of a warp's token t: its share of this block's sums over columns, as parts. Returns the
 * lane's share of sum C. */
template <typename Block>
__device__ __forceinline__ float put_keys(const backward_room<Block> &r,
                                          const mn_importance_args &p, float *parts, int t,
                                          int64_t row, bool exists) {
    constexpr int EACH = Block::SLOTS / 32;
    const int lane = threadIdx.x % 32;
    float dk[EACH], dq[EACH], fresh = 0.0f;
#pragma unroll
    for (int i = 0; i < EACH; i++) {
        const int slot = lane * EACH + i, group = slot / GROUP, at = slot % GROUP;
        float2 reads = make_float2(0.0f, 0.0f), writes = reads;
#pragma unroll
        for (int warp = group; warp < WARPS; warp += Block::GROUPS) {
            const float2 x = ((const float2 *)r.keys[warp][t % HALF][0])[at];
            const float2 y = ((const float2 *)r.keys[warp][t % HALF][1])[at];
            reads.x += x.x, reads.y += x.y, writes.x += y.x, writes.y += y.y;
        }
        const float k = r.in.slot_vectors.number(t, K_VECTOR, slot);
        dk[i] = r.in.g.over[t] * fmaf(2.0f * k, writes.x, reads.y);
        dq[i] = (float)p.scale * reads.x;
        fresh += writes.y;
    }
    if (exists) {
        const int64_t s = Block::slot0() + lane * EACH;
        mn_cell_store(parts + 2 * row * p.call.K + s, p.call.K - s, dk);
        mn_cell_store(parts + (2 * row + 1) * p.call.K + s, p.call.K - s, dq);
    }
    return fresh;
}

/* dv and db likewise, sums over this block's slots, and the lane's share of v'dv + b'db. */
template <typename Block>
__device__ __forceinline__ float put_lines(const backward_room<Block> &r,
                                           const mn_importance_args &p, float *parts,
                                           const mn_cell_tile &tile, int t, int64_t h,
                                           int64_t n_rows) {
    constexpr int EACH = Block::COLUMNS / 32;
    const int lane = threadIdx.x % 32;
    float dv[EACH], db[EACH], fall = 0.0f;
#pragma unroll
    for (int i = 0; i < EACH; i++) {
        const int column = lane * EACH + i, at = column % GROUP;
        float2 sum = make_float2(0.0f, 0.0f);
#pragma unroll
        for (int group = 0; group < Block::GROUPS; group++) {
            const int warp = column / GROUP * Block::GROUPS + group;
            const float2 x = ((const float2 *)r.lines[warp][t % HALF])[at];
            sum.x += x.x, sum.y += x.y;
        }
        dv[i] = r.in.g.over[t] * sum.x;
        db[i] = r.in.g.over[t] * sum.y;
        fall = fmaf(r.in.column_vectors.number(t, V_VECTOR, column), dv[i], fall);
        fall = fmaf(r.in.column_vectors.number(t, B_VECTOR, column), db[i], fall);
    }
    if (t >= tile.n_rows) return fall;
    const int64_t v = Block::column0() + lane * EACH, inside = p.call.V - v;
    if (gridDim.z > 1) {
        const int64_t row = blockIdx.z * n_rows + tile.row(p.call, t) * p.call.H + h;
        mn_cell_store(parts + row * 2 * p.call.V + v, inside, dv);
        mn_cell_store(parts + (row * 2 + 1) * p.call.V + v, inside, db);
        return fall;
    }
    const int64_t token = tile.span.t0 + tile.first + t;
    mn_bf16 *to_v = mn_row<mn_bf16>(p.grad.v, tile.span.b, token, h);
    mn_bf16 *to_b = mn_row<mn_bf16>(p.grad.b, tile.span.b, token, h);
    if (to_v) mn_cell_store(to_v + v, inside, dv);
    if (to_b) mn_cell_store(to_b + v, inside, db);
    return fall;
}

/* Sums of half a tile, tokens from t0 on, one for each warp. */
template <typename Block>
__device__ __forceinline__ void put_half(backward_room<Block> &r, const mn_importance_args &p,
                                         const room &to, const mn_cell_tile &tile, int t0,
                                         const place &at, int64_t n_rows) {
    static_assert(WARPS == HALF, "a warp for each token");
    const int t = t0 + threadIdx.x / 32;
    const int64_t row = blockIdx.x * n_rows + tile.row(p.call, t) * p.call.H + at.h;
    float fresh = put_keys(r, p, to.at[KEY_PARTS], t, row, t < tile.n_rows);
    float fall = put_lines(r, p, to.at[SUMS], tile, t, at.h, n_rows);
    fresh = r.in.g.over[t] * mn_warp_sum(fresh);
    fall = mn_warp_sum(fall);
    if (threadIdx.x % 32 != 0) return;
    r.pulls[t] = r.in.g.a[t] * at.ip * fresh;
    r.priors[t] = r.in.g.forget[t] * fresh;
    r.falls[t] = fmaf(r.in.g.forget[t] * at.ip, fresh, fall);
}

/* dg of a tile as this block's part, by the first warp; returns a lane's share of dip. */
template <typename Block>
__device__ __forceinline__ float put_gates(const backward_room<Block> &r, float *parts,
                                           const mn_call &call, const mn_cell_tile &tile,
                                           const place &at, int64_t n_rows) {
    const int t = threadIdx.x % TOKENS;
    const int64_t block = blockIdx.z * (int64_t)gridDim.x + blockIdx.x;
    float sum = r.falls[t], end = 0.0f;
#pragma unroll
    for (int by = 1; by < TOKENS; by *= 2) {
        const float after = __shfl_down_sync(0xffffffffu, sum, by, TOKENS);
        if (t + by < TOKENS) sum += after;
    }
#pragma unroll
    for (int warp = 0; warp < WARPS; warp++) end += r.along[warp];
    if (threadIdx.x >= tile.n_rows) return 0.0f;
    const int64_t row = tile.row(call, t) * call.H + at.h;
    parts[block * n_rows + row] = end - sum - r.pulls[t];
    return r.priors[t];
}

/* Four numbers of each thread, SETS times, from memory to shared memory: a thread reads what it has
 * fetched itself. */
template <typename Block>
__device__ __forceinline__ void fetch_state(float4 (&to)[SETS][Block::THREADS],
                                            const float *states, int64_t set) {
#pragma unroll
    for (int i = 0; i < SETS; i++) {
        const unsigned at = (unsigned)__cvta_generic_to_shared(&to[i][threadIdx.x]);
        asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(at),
                     "l"(states + Block::own(set + i)) : "memory");
    }
}

/* A tile back. Before it, `states[i % 2]` has the state in front of it. */
template <typename Block, bool HEADS>
__device__ __forceinline__ void tile_backward(cells &adj, backward_room<Block> &r,
                                              const mn_importance_args &p, const room &to,
                                              const place &at, const mn_cell_tile &tile, int64_t i,
                                              bool last, int64_t n_rows) {
    const walk<Block, BACKWARD_PASS, HEADS> along(r.in);
    const mn_bf16 *by_column = r.in.column_vectors.mine(across<Block>() * GROUP, 0,
                                                        row_lane() % 4);
    const mn_bf16 *by_slot = r.in.slot_vectors.mine(Block::group() * GROUP, 0, row_lane() % 2);
    float *front = (float *)&r.states[i % 2][0][threadIdx.x];
    float *middle = (float *)&r.states[2][0][threadIdx.x];
    cells c;
    c.load(front, 4 * Block::THREADS);
#pragma unroll
    for (int t = 0; t < HALF; t++) along.advance(c, t);
    c.store(middle, 4 * Block::THREADS);
#pragma unroll 1
    for (int first = TOKENS - 4; first >= 0; first -= 4) {
        c.load(first < HALF ? front : middle, 4 * Block::THREADS);
        if (first % HALF != 0) {
#pragma unroll
            for (int t = -4; t < 0; t++) along.advance(c, first + t);
        }
        reads four;
#pragma unroll
        for (int t = 0; t < 4; t++) {
            along.advance(c, first + t);
#pragma unroll
            for (int n = 0; n < 8; n++) {
                four.r[t][n / 4][n % 4] = mn_inverse(c.I[n / 4][n % 4]);
                four.mu[t][n / 4][n % 4] = c.M[n / 4][n % 4] * four.r[t][n / 4][n % 4];
            }
        }
        if (first == TOKENS - 4) {
            const float rest = r.in.g.rest;
            if (last) {
                cells end = c;
                end.times(rest);
                start_back<Block>(adj, end, p, at);
            }
            adj.times(rest);
            put_along(r, adj, c);
        }
#pragma unroll
        for (int t = 3; t >= 0; t--) {
            token_backward(adj, four.r[t], four.mu[t], r, along, by_column, by_slot, first + t);
            along.head(adj, first + t);
        }
        if (first % HALF != 0) continue;
        __syncthreads();
        put_half(r, p, to, tile, first, at, n_rows);
        __syncthreads();
    }
}

template <typename Block>
__global__ void __launch_bounds__(Block::THREADS, 2)
backward_kernel(const __grid_constant__ mn_importance_args p, room to, int64_t n_rows) {
    extern __shared__ float4 shared[];
    backward_room<Block> &r = *(backward_room<Block> *)shared;
    const int64_t blocks = gridDim.x * gridDim.z, block = blockIdx.z * gridDim.x + blockIdx.x;
    r.in.open();
    for (int64_t item = blockIdx.y; item < mn_n_spans(p.call) * p.call.H; item += gridDim.y) {
        const place at = place::of(p, item);
        const int64_t n_tiles = mn_cell_tiles(at.span.length);
        const int64_t slot = mn_cell_first_slot(p.call, at.n, TOKENS);
        const auto set_of = [&](int64_t i) { return ((slot + i) * p.call.H + at.h) * SETS; };
        fetched<Block, BACKWARD_PASS> next;
        next.open(p, at);
        cells adj;
        float prior = 0.0f;
        if (n_tiles > 0) {
            next.fetch(r.came, p, at, mn_cell_tile_at(at.span, n_tiles - 1));
            fetch_state<Block>(r.states[(n_tiles - 1) % 2], to.at[STATES], set_of(n_tiles - 1));
        } else {
            load_first<Block, false>(adj, p, at);
            start_back<Block>(adj, cells(adj), p, at);
        }
        for (int64_t i = n_tiles - 1; i >= 0; i--) {
            const mn_cell_tile tile = mn_cell_tile_at(at.span, i);
            next.put(r.in, r.came, at.ip, (float)p.scale);
            __syncthreads();
            if (i > 0) {
                next.fetch(r.came, p, at, mn_cell_tile_at(at.span, i - 1));
                fetch_state<Block>(r.states[(i - 1) % 2], to.at[STATES], set_of(i - 1));
            }
            const bool last = i == n_tiles - 1;
            if (r.in.g.heads == 0) {
                tile_backward<Block, false>(adj, r, p, to, at, tile, i, last, n_rows);
            } else {
                tile_backward<Block, true>(adj, r, p, to, at, tile, i, last, n_rows);
            }
            if (threadIdx.x < 32) {
                prior += put_gates(r, to.at[GATES], p.call, tile, at, n_rows);
            }
        }
        prior += put_first<Block>(adj, p, at);
        prior = mn_team_sum<Block::THREADS>(prior, r.team);
        if (threadIdx.x == 0) to.at[PRIORS][(at.n * blocks + block) * p.call.H + at.h] = prior;
        __syncthreads();
    }
}

}    // namespace importance::by_mma

#endif
