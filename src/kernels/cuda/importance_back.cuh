/* importance_back.cuh - Palimpsa in bf16 backward, on tensor cores (see importance_mma.cuh).
 *
 * With D and C the adjoints of M and I times A,
 *
 *   pull_s = scale q do' / I'_s
 *   D_t = D + sum_{s >= t} pull_s    C_t = C - sum_{s >= t} pull_s mu_s
 *
 * where D and C are those behind a chunk of 8 tokens. Tokens of a chunk are therefore visited in
 * their order, each with the state behind it, and what s says goes to every t <= s at once: with X
 * for pull_s and Y for X mu_s as pairs of bf16,
 *
 *   dq_s = scale mu_s do_s    dk_t = sum (X v_t - 2 k_t . Y b_t) / A    dv_t = sum k_t X / A
 *   db_t = -sum k_t^2 Y / A
 *
 * are products whose result has a column for each t, the factors of t > s being zeros. D and C get
 * the sums of X and -Y by products with ones. A head between t and s is a factor for all that s
 * says to t.
 *
 * For dg,
 *
 *   S_t = a sum(D_t . M_{t-1} + C_t . I_{t-1})     dg = S_t - a ip sum C_t
 *   S_{t+1} = S_t + v'dv + b'db + (1 - a) ip sum C_t
 *
 * where S at the start of each tile is formed from its definition, and sum C_t, a number that
 * decays and gets -sum pull_s mu_s, in float32 throughout. It is also what ip in I adds to S. */
#ifndef MN_KERNELS_CUDA_IMPORTANCE_BACK_CUH
#define MN_KERNELS_CUDA_IMPORTANCE_BACK_CUH

#include "kernels/cuda/importance_mma.cuh"

namespace importance::by_mma {

/* Rows of parts or gradients of a head's tokens, from the block's first slot or column on. */
template <typename T>
struct alignas(16) target {
    T *first;         // at the sequence's first token; nullptr: not wanted
    int64_t apart;    // its tokens
    int left;         // how many there are
    bool packs;       // whether two may be stored at once

    __device__ void open(T *row, int64_t base, int64_t count, int64_t stride) {
        first = row ? row + base : nullptr;
        apart = stride;
        left = (int)min(count - base, (int64_t)1 << 30);
        packs = ((uintptr_t)first | (uintptr_t)(apart * (int64_t)sizeof(T))) % (2 * sizeof(T)) == 0;
    }

    /* A lane's neighbours at token t. */
    template <int EACH>
    __device__ __forceinline__ void put(const float (&x)[EACH], int64_t t) const {
        static_assert(EACH <= 2, "one pack");
        const int i = thread_again() % 32 * EACH;
        T *to = first + t * apart + i;
        if (!first) return;
        if (EACH == 2 && packs && i + EACH <= left) {
            mn_store<EACH>(to, 0, x);
            return;
        }
#pragma unroll
        for (int n = 0; n < EACH; n++) {
            if (i + n < left) mn_put(to + n, x[n]);
        }
    }
};

/* Where a block's gradients go: dk and dq as parts, dv and db too where blocks share the slots. */
struct targets {
    target<float> dk, dq, dv_part, db_part;
    target<mn_bf16> dv, db;
    float scale, ip;    // scale: of dq

    /* By the first thread. */
    template <typename Block>
    __device__ void open(const mn_importance_args &p, const room &to, const place &at,
                         int64_t n_rows) {
        const int64_t K = p.call.K, V = p.call.V, H = p.call.H, token = at.span.t0;
        const int64_t row = (at.span.b * p.call.T + token) * H + at.h;
        float *keys = to.at[KEY_PARTS] + (blockIdx.x * n_rows + row) * 2 * K;
        float *lines = to.at[SUMS] + (blockIdx.z * n_rows + row) * 2 * V;
        if (threadIdx.x != 0) return;
        scale = (float)p.scale, ip = at.ip;
        dk.open(keys, Block::slot0(), K, H * 2 * K);
        dq.open(keys + K, Block::slot0(), K, H * 2 * K);
        if (gridDim.z > 1) {
            dv_part.open(lines, Block::column0(), V, H * 2 * V);
            db_part.open(lines + V, Block::column0(), V, H * 2 * V);
        } else {
            dv.open(mn_row<mn_bf16>(p.grad.v, at.span.b, token, at.h), Block::column0(), V,
                    p.grad.v.stride[1]);
            db.open(mn_row<mn_bf16>(p.grad.b, at.span.b, token, at.h), Block::column0(), V,
                    p.grad.b.stride[1]);
        }
    }
};

/* The two tiles that are at hand, and what warps tell each other of a chunk. */
template <typename Block>
struct backward_room {
    static constexpr int ACROSS = WARPS / Block::GROUPS;
    tile<Block, BACKWARD_PASS> in;
    arrivals<Block, BACKWARD_PASS> came[2];
    float4 states[2][SETS][Block::THREADS];                             // in front of them
    alignas(16) float keys[ACROSS][2][HALF][Block::SLOTS + PAD];        // dq, dk
    alignas(16) float lines[Block::GROUPS][2][HALF][Block::COLUMNS + PAD];    // dv, -db
    float spread[2][WARPS][HALF][32];              // sums of pull mu over a lane's cells
    float falls[TOKENS], spreads[TOKENS];          // of each token: v'dv + b'db, sum of pull mu
    float along[WARPS], team[32];
    sources from;
    targets to;
};

/* The factors of a chunk's tokens, of which a lane has row_lane(), for products that sum over
 * columns (v, b) and slots (k and its square). */
struct chunk_factors {
    uint2 v, b, k, square;

    __device__ __forceinline__ chunk_factors times(unsigned by) const {
        return { pair_times(v, by), pair_times(b, by), pair_times(k, by), pair_times(square, by) };
    }

    __device__ __forceinline__ chunk_factors where(bool wanted) const {
        const uint2 key = only(wanted, k);    // its square again: no more choices
        return { only(wanted, v), only(wanted, b), key,
                 make_uint2(pair_times(key.x, key.x), pair_times(key.y, key.y)) };
    }
};

/* What a warp knows of a chunk: columns are tokens, rows slots or, of dv and db, columns. */
struct chunk_sums {
    float dq[4], value[4], write[4], dv[4], db[4];

    __device__ __forceinline__ void clear() {
#pragma unroll
        for (int i = 0; i < 4; i++) {
            dq[i] = value[i] = write[i] = dv[i] = db[i] = 0.0f;
        }
    }

    /* The adjoints behind the chunk, as factors, to all of its tokens. */
    __device__ __forceinline__ void add(const unsigned (&D)[4], const unsigned (&C)[4],
                                        const chunk_factors &f) {
        unsigned other[4];
        add_product(value, D, f.v);
        add_product(write, C, f.b);
        turn(other, D);
        add_product(dv, other, f.k);
        turn(other, C);
        add_product(db, other, f.square);
    }
};

/* X and Y of two tokens: of tile n of a product, the lower and upper half of the first token and
 * those of the second are a factor whose depth is columns of both. */
struct token_pair {
    unsigned X[2][4], Y[2][4];

    /* Token i, whose state is `c`; its dq, where `cot` is not zero. Returns the sum of pull mu. */
    __device__ __forceinline__ float read(chunk_sums &sums, int i, const cells &c,
                                          const float (&reads)[2][4], uint2 cot) {
        float pull[2][4], mu[2][4], sum = 0.0f;
        unsigned pulls[4], means[4];
#pragma unroll
        for (int n = 0; n < 8; n++) {
            const float over = mn_inverse(c.I[n / 4][n % 4]);
            pull[n / 4][n % 4] = reads[n / 4][n % 4] * over;
            mu[n / 4][n % 4] = c.M[n / 4][n % 4] * over;
            sum = fmaf(pull[n / 4][n % 4], mu[n / 4][n % 4], sum);
        }
        factor_of(pulls, pull);
        factor_of(means, mu);
#pragma unroll
        for (int n = 0; n < 4; n++) {
            X[n / 2][2 * i + n % 2] = pulls[n];
            Y[n / 2][2 * i + n % 2] = pair_times(pulls[n], means[n]);
        }
        add_product(sums.dq, means, cot);
        return sum;
    }

    /* To those tokens whose factors f[i] are not zero. */
    __device__ __forceinline__ void put(chunk_sums &sums, const chunk_factors (&f)[2]) const {
        add_product(sums.value, X[0], make_uint2(f[0].v.x, f[1].v.x));
        add_product(sums.value, X[1], make_uint2(f[0].v.y, f[1].v.y));
        add_product(sums.write, Y[0], make_uint2(f[0].b.x, f[1].b.x));
        add_product(sums.write, Y[1], make_uint2(f[0].b.y, f[1].b.y));
#pragma unroll
        for (int i = 0; i < 2; i++) {
            const unsigned x[4] = { turned(X[0][2 * i]), turned(X[1][2 * i]),
                                    turned(X[0][2 * i + 1]), turned(X[1][2 * i + 1]) };
            const unsigned y[4] = { turned(Y[0][2 * i]), turned(Y[1][2 * i]),
                                    turned(Y[0][2 * i + 1]), turned(Y[1][2 * i + 1]) };
            add_product(sums.dv, x, f[i].k);
            add_product(sums.db, y, f[i].square);
        }
    }

    /* To the adjoints in front of the chunk. */
    __device__ __forceinline__ void put(cells &adj, uint2 ones) const {
#pragma unroll
        for (int n = 0; n < 2; n++) {
            add_product(adj.M[n], X[n], ones);
            add_product(adj.I[n], Y[n], ones);
        }
    }
};

/* exp(x), twice. */
__device__ __forceinline__ unsigned twice_exp(float x) {
    const float y = expf(x);
    return pair_of(y, y);
}

/* The lane's share of a product with ones: depths 2 c and 2 c + 1 of column g. */
__device__ __forceinline__ unsigned identity() {
    if (row_lane() / 2 != column_lane()) return 0;
    return row_lane() % 2 ? 0x3f800000u : 0x00003f80u;
}

/* Tokens first .. first + HALF: their share of all gradients, and the adjoints in front of them
 * from those behind them. `adj` has D and -C, `c` the state in front. */
template <typename Block, bool HEADS>
__device__ __forceinline__ void chunk_back(chunk_sums &sums, cells &adj, cells &c,
                                           backward_room<Block> &r, int turn, int first,
                                           const walk<Block, BACKWARD_PASS, HEADS> &along) {
    const arrivals<Block, BACKWARD_PASS> &came = r.came[turn];
    const float *base = came.g.base;
    const int warp = thread_again() / 32;
    const int slot = warp % Block::GROUPS * GROUP;
    const int column = warp / Block::GROUPS * GROUP + 4 * column_lane();
    const int own = first + row_lane();
    const uint2 k = came.k.get(own, slot + 4 * column_lane());
    const chunk_factors all = { came.v.get(own, column), came.b.get(own, column), k,
                                make_uint2(pair_times(k.x, k.x), pair_times(k.y, k.y)) };
    const uint2 cot = came.cot.get(own, column);
    float *spread = &r.spread[first / HALF][threadIdx.x / 32][0][threadIdx.x % 32];
    const float behind = HEADS ? base[first + HALF - 1] : 0.0f;
    const float before = HEADS && first > 0 ? base[first - 1] : 0.0f;
    unsigned D[4], C[4];
    factor_of(D, adj.M);
    factor_of(C, adj.I);
    sums.clear();
    sums.add(D, C, HEADS ? all.times(twice_exp(behind - base[own])) : all);
    if (HEADS) adj.times(expf(behind - before));
#pragma unroll
    for (int t = 0; t < HALF; t += 2) {
        uint2 ones = make_uint2(identity(), identity());
        chunk_factors f[2];
        token_pair two;
#pragma unroll
        for (int i = 0; i < 2; i++) {
            const int s = t + i, at = first + s;
            float reads[2][4];
            along.advance(c, at);
            along.pull(reads, at);
            spread[32 * s] = two.read(sums, i, c, reads, only(row_lane() == s, cot));
            f[i] = all.where(row_lane() <= s);
            if (HEADS) f[i] = f[i].times(row_lane() <= s ? twice_exp(base[at] - base[own]) : 0);
        }
        if (HEADS) {
            ones.x = pair_times(ones.x, twice_exp(base[first + t] - before));
            ones.y = pair_times(ones.y, twice_exp(base[first + t + 1] - before));
        }
        two.put(sums, f);
        two.put(adj, ones);
    }
}

/* A warp's sums to shared memory. Tokens of a lane lie 4 slots or columns wide of each other's
 * banks, those of the upper half in what the lower leaves free. */
template <typename Block>
__device__ __forceinline__ void put_sums(backward_room<Block> &r, chunk_sums &sums, int turn,
                                         int first) {
    const int slot = warp_slot<Block>(), column = warp_column<Block>();
    const int flip = column_lane() & 2;
#pragma unroll
    for (int i = 0; i < 4; i++) {
        const int t = 2 * column_lane() + i % 2, at = neighbour(i / 2);
        const float k = mn_float(r.came[turn].k.at[first + t][slot + at]);
        r.keys[across<Block>()][0][t][slot + (at ^ flip)] = sums.dq[i];
        r.keys[across<Block>()][1][t][slot + (at ^ flip)] = fmaf(-2.0f * k, sums.write[i],
                                                                 sums.value[i]);
        r.lines[Block::group()][0][t][column + (at ^ flip)] = sums.dv[i];
        r.lines[Block::group()][1][t][column + (at ^ flip)] = sums.db[i];
    }
}

/* dk and dq of a warp's token: its share of this block's sums over columns, as parts. */
template <typename Block>
__device__ __forceinline__ void put_keys(const backward_room<Block> &r, float over,
                                         int64_t token) {
    constexpr int EACH = Block::SLOTS / 32;
    const int t = threadIdx.x / 32, flip = t / 2 & 2;
    const int slot = threadIdx.x % 32 * EACH ^ flip;
    float dk[EACH] = {}, dq[EACH] = {};
#pragma unroll
    for (int warp = 0; warp < backward_room<Block>::ACROSS; warp++) {
        mn_cell_add(dq, &r.keys[warp][0][t][slot]);
        mn_cell_add(dk, &r.keys[warp][1][t][slot]);
    }
#pragma unroll
    for (int i = 0; i < EACH; i++) dk[i] *= over, dq[i] *= r.to.scale;
    r.to.dk.put(dk, token);
    r.to.dq.put(dq, token);
}

/* dv and db likewise, sums over this block's slots; returns the lane's share of v'dv + b'db. */
template <typename Block>
__device__ __forceinline__ float put_lines(const backward_room<Block> &r, float over, int turn,
                                           int row, int64_t token) {
    constexpr int EACH = Block::COLUMNS / 32;
    const int t = threadIdx.x / 32, flip = t / 2 & 2;
    const int column = threadIdx.x % 32 * EACH;
    float dv[EACH] = {}, db[EACH] = {}, fall = 0.0f;
#pragma unroll
    for (int group = 0; group < Block::GROUPS; group++) {
        mn_cell_add(dv, &r.lines[group][0][t][column ^ flip]);
        mn_cell_add(db, &r.lines[group][1][t][column ^ flip]);
    }
#pragma unroll
    for (int i = 0; i < EACH; i++) {
        dv[i] *= over, db[i] *= -over;
        fall = fmaf(mn_float(r.came[turn].v.at[row][column + i]), dv[i], fall);
        fall = fmaf(mn_float(r.came[turn].b.at[row][column + i]), db[i], fall);
    }
    if (gridDim.z > 1) {
        r.to.dv_part.put(dv, token);
        r.to.db_part.put(db, token);
    } else {
        r.to.dv.put(dv, token);
        r.to.db.put(db, token);
    }
    return fall;
}

/* The gradients of a chunk, a token for each warp, from all warps' sums. */
template <typename Block>
__device__ __forceinline__ void put_chunk(backward_room<Block> &r, int length, int tile, int turn,
                                          int first) {
    static_assert(WARPS == HALF, "a warp for each token");
    const int t = thread_again() / 32, lane = threadIdx.x % 32, row = first + t;
    const int token = tile * TOKENS + row;
    const float over = r.came[turn].g.over[row];
    float spread = 0.0f, fall = 0.0f;
    if (token < length) {
#pragma unroll
        for (int n = 0; n < WARPS; n += 2) {    // two lanes of every other warp
            const float *from = r.spread[first / HALF][n + lane / 16][t];
            const float2 two = ((const float2 *)from)[lane % 16];
            spread += two.x + two.y;
        }
        put_keys(r, over, token);
        fall = mn_warp_sum(put_lines(r, over, turn, row, token));
        spread = mn_warp_sum(spread);
    }
    if (lane == 0) r.falls[row] = fall, r.spreads[row] = over * spread;
}

/* What the last warp keeps from tile to tile: sum C in front of the last one, times the decay of
 * its first token, and a lane's share of dip. */
struct priors {
    float behind, sum;
};

/* dg of a tile as this block's part, by the last warp. */
template <typename Block>
__device__ __forceinline__ void put_gates(priors &prior, const backward_room<Block> &r,
                                          const gates &g, float *parts, const mn_call &call,
                                          const mn_cell_tile &tile, const place &at,
                                          int64_t n_rows) {
    const int t = threadIdx.x % TOKENS;
    const int64_t block = blockIdx.z * (int64_t)gridDim.x + blockIdx.x;
    /* sum C_t = -spread + a_{t+1} sum C_{t+1}: C is that sum, from t on, of C behind and of 1 */
    float C = -r.spreads[t], keeps = t + 1 < TOKENS ? g.a[t + 1] : 1.0f;
#pragma unroll
    for (int by = 1; by < TOKENS; by *= 2) {
        const float later = __shfl_down_sync(0xffffffffu, C, by, TOKENS);
        const float more = __shfl_down_sync(0xffffffffu, keeps, by, TOKENS);
        if (t + by < TOKENS) C = fmaf(keeps, later, C), keeps *= more;
    }
    C = fmaf(keeps, prior.behind, C);
    prior.behind = __shfl_sync(0xffffffffu, g.a[0] * C, 0, TOKENS);
    const float fall = fmaf(g.forget[t] * at.ip, C, r.falls[t]);
    float sum = fall, start = at.ip * prior.behind;
#pragma unroll
    for (int by = 1; by < TOKENS; by *= 2) {
        const float before = __shfl_up_sync(0xffffffffu, sum, by, TOKENS);
        if (t >= by) sum += before;
    }
#pragma unroll
    for (int warp = 0; warp < WARPS; warp++) start += r.along[warp];
    if ((int)(threadIdx.x % 32) >= tile.n_rows) return;
    const int64_t row = tile.row(call, t) * call.H + at.h;
    parts[block * n_rows + row] = start + (sum - fall) - g.a[t] * at.ip * C;
    prior.sum = fmaf(g.forget[t], C, prior.sum);
}

/* Adjoints of the last state, `c`: D and -C. */
template <typename Block>
__device__ void start_back(cells &adj, const cells &c, const mn_importance_args &p,
                           const place &at) {
    const float *dmu = mn_row<float>(p.cot.mu, at.n, 0, at.h);
    const float *dimp = mn_row<float>(p.cot.imp, at.n, 0, at.h);
#pragma unroll
    for (int i = 0; i < 8; i++) {
        const int64_t cell = cell_at<Block, false>(p.call, i / 4, i % 4);
        const float by = 1.0f / c.I[i / 4][i % 4];
        const float D = cell >= 0 && dmu ? dmu[cell] * by : 0.0f;
        const float C = (cell >= 0 && dimp ? dimp[cell] : 0.0f) - D * (c.M[i / 4][i % 4] * by);
        adj.M[i / 4][i % 4] = D;
        adj.I[i / 4][i % 4] = -C;
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
        const float to_imp = fmaf(D, mn_get(mu0, cell), -adj.I[i / 4][i % 4]);
        if (dmu0) dmu0[cell] = D * first_importance(p, at, cell);
        if (dimp0) dimp0[cell] = to_imp;
        sum += to_imp;
    }
    return p.imp0.data ? 0.0f : sum;
}

/* S in front of the tile, from the state there and its adjoint, without sum C times ip: each warp's
 * part of it. */
template <typename Block>
__device__ __forceinline__ void put_along(backward_room<Block> &r, const cells &adj, const cells &c,
                                          float ip) {
    float sum = 0.0f;
#pragma unroll
    for (int i = 0; i < 8; i++) {
        sum = fmaf(adj.M[i / 4][i % 4], c.M[i / 4][i % 4], sum);
        sum = fmaf(-adj.I[i / 4][i % 4], c.I[i / 4][i % 4] - ip, sum);
    }
    sum = mn_warp_sum(sum);
    if (threadIdx.x % 32 == 0) r.along[threadIdx.x / 32] = sum;
}

/* Four numbers of each thread, SETS times, from memory to shared memory: a thread reads what it has
 * fetched itself. */
template <typename Block>
__device__ __forceinline__ void fetch_state(float4 (&to)[SETS][Block::THREADS],
                                            const sources &from, int tile) {
    const int thread = thread_again();
    const float *at = from.states + tile * from.between + thread * 4;
#pragma unroll
    for (int i = 0; i < SETS; i++) copy_sixteen(&to[i][thread], at + i * SET_STRIDE<Block>);
}

/* A tile back: `adj` from behind it to in front of it. The sums of its first chunk are left for the
 * next barrier to show. */
template <typename Block, bool HEADS>
__device__ __forceinline__ void tile_back(cells &adj, backward_room<Block> &r,
                                          const mn_importance_args &p, const place &at,
                                          priors &prior, int tile, bool last) {
    const int turn = again(tile) & 1;
    const walk<Block, BACKWARD_PASS, HEADS> along(r.in);
    const float *front = (const float *)&r.states[turn][0][threadIdx.x];
    cells c;
    c.load(front, SET_STRIDE<Block>);
    if (last) {
        cells end = c;
        advance_tile<Block, BACKWARD_PASS, HEADS>(end, r.in);
        start_back<Block>(adj, end, p, at);
        float sum = 0.0f;
#pragma unroll
        for (int i = 0; i < 8; i++) sum -= adj.I[i / 4][i % 4];
        prior.behind = mn_team_sum<Block::THREADS>(sum, r.team);
    }
    adj.times(r.in.rest);
    along.pass(c, 0, HALF);
    chunk_sums sums;
#pragma unroll 1
    for (int first = HALF; first >= 0; first -= HALF) {
        if (first == 0) c.load(front, SET_STRIDE<Block>);
        chunk_back<Block, HEADS>(sums, adj, c, r, turn, first, along);
        if (first == 0) __syncthreads();    // the other chunk's sums have been read
        put_sums(r, sums, turn, first);
        if (first == 0) break;
        __syncthreads();
        put_chunk(r, (int)at.span.length, tile, turn, first);
    }
    c.load(front, SET_STRIDE<Block>);
    put_along(r, adj, c, r.to.ip);
}

template <typename Block>
__global__ void __launch_bounds__(Block::THREADS, 2)
backward_kernel(const __grid_constant__ mn_importance_args p, const gates *decays, room to,
                int64_t n_rows) {
    extern __shared__ float4 shared[];
    backward_room<Block> &r = *(backward_room<Block> *)shared;
    const int64_t blocks = gridDim.x * gridDim.z, block = blockIdx.z * gridDim.x + blockIdx.x;
    r.in.open();
    for (int64_t item = blockIdx.y; item < mn_n_spans(p.call) * p.call.H; item += gridDim.y) {
        const place at = place::of(p, item);
        const int length = (int)at.span.length, n_tiles = (int)mn_cell_tiles(length);
        typedef fetcher<Block, BACKWARD_PASS> next;
        next::open(r.from, p, at, decays);
        if (threadIdx.x == 0) {
            const int64_t slot = mn_cell_first_slot(p.call, at.n, TOKENS);
            r.from.states = to.at[STATES] + state_at<Block>(slot * p.call.H + at.h);
            r.from.between = state_at<Block>(p.call.H) - state_at<Block>(0);
        }
        r.to.template open<Block>(p, to, at, n_rows);
        __syncthreads();
        cells adj;
        priors prior = { 0.0f, 0.0f };
        if (n_tiles > 0) {
            const int i = n_tiles - 1;
            next::fetch(r.came[i % 2], r.from, i, length);
            fetch_state<Block>(r.states[i % 2], r.from, i);
        } else {
            load_first<Block, false>(adj, p, at);
            start_back<Block>(adj, cells(adj), p, at);
        }
        next::wait();
        __syncthreads();
        for (int i = n_tiles - 1; i >= 0; i--) {
            const int turn = i & 1;
            const bool last = i == n_tiles - 1;
            next::put(r.in, r.came[turn], r.to.scale);
            __syncthreads();
            if (!last && threadIdx.x / 32 == WARPS - 1) {
                put_gates(prior, r, r.came[!turn].g, to.at[GATES], p.call,
                          mn_cell_tile_at(at.span, i + 1), at, n_rows);
                __syncwarp();
            }
            if (i > 0) {
                next::fetch(r.came[!turn], r.from, i - 1, length);
                fetch_state<Block>(r.states[!turn], r.from, i - 1);
            }
            if (r.in.heads == 0) tile_back<Block, false>(adj, r, p, at, prior, i, last);
            else tile_back<Block, true>(adj, r, p, at, prior, i, last);
            next::wait();
            __syncthreads();
            put_chunk(r, length, i, again(i) & 1, 0);
        }
        __syncthreads();
        if (n_tiles > 0 && threadIdx.x / 32 == WARPS - 1) {
            put_gates(prior, r, r.came[0].g, to.at[GATES], p.call, mn_cell_tile_at(at.span, 0), at,
                      n_rows);
        }
        float sum = prior.sum + put_first<Block>(adj, p, at);
        sum = mn_team_sum<Block::THREADS>(sum, r.team);
        if (threadIdx.x == 0) to.at[PRIORS][(at.n * blocks + block) * p.call.H + at.h] = sum;
        __syncthreads();
    }
}

}    // namespace importance::by_mma

#endif
