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
 * What dg and dip are made of is left to importance_gates.cuh. */
#ifndef MN_KERNELS_CUDA_IMPORTANCE_BACK_CUH
#define MN_KERNELS_CUDA_IMPORTANCE_BACK_CUH

#include "kernels/cuda/hopper.cuh"
#include "kernels/cuda/importance_mma.cuh"

namespace importance::by_mma {

/* Rows of parts or gradients of a head's tokens, from the block's first slot or column on. */
template <typename T>
struct alignas(16) target {
    T *first;          // at the sequence's first token; nullptr: not wanted
    unsigned apart;    // its tokens, where packs are stored
    int packed;        // how many numbers may be stored as packs of two
    int left;          // how many there are
    int64_t stride;    // its tokens

    __device__ void open(T *row, int64_t base, int64_t count, int64_t between) {
        first = row ? row + base : nullptr;
        apart = (unsigned)between, stride = between;
        left = row ? (int)min(count - base, (int64_t)1 << 30) : 0;
        const bool even = ((uintptr_t)first | (uintptr_t)(between * (int64_t)sizeof(T))) %
                              (2 * sizeof(T)) == 0;
        packed = even && between == apart ? left & ~1 : 0;
    }

    /* A lane's neighbours at token t; zeros where there are none. */
    template <int EACH>
    __device__ __forceinline__ void get(float (&x)[EACH], unsigned t) const {
        const int i = thread_again() % 32 * EACH;
#pragma unroll
        for (int n = 0; n < EACH; n++) {
            x[n] = i + n < left ? mn_float(first[t * stride + i + n]) : 0.0f;
        }
    }

    /* The same, of those that there are. */
    template <int EACH>
    __device__ __forceinline__ void put(const float (&x)[EACH], unsigned t) const {
        static_assert(EACH <= 2, "one pack");
        const int i = thread_again() % 32 * EACH;
        if (EACH == 2 && i < packed) {
            mn_store<EACH>(first + (uint64_t)t * apart + i, 0, x);
            return;
        }
#pragma unroll
        for (int n = 0; n < EACH; n++) {
            if (i + n < left) mn_put(first + t * stride + i + n, x[n]);
        }
    }
};

/* What a block of a head leaves for dg and dip (importance_gates.cuh): for each token v'dv + b'db
 * and the sum of pull mu, for each tile what its warps have of S in front of it, and sums of C
 * behind the last token and of what goes to the prior from the first state. */
template <typename Block>
struct parts_of {
    float2 *gates, *edge;
    float *along;
    int64_t tiles_apart;

    __device__ parts_of(const mn_importance_args &p, const room &to, const place &at,
                        int64_t n_rows, int64_t n_blocks, int64_t block) {
        const int64_t H = p.call.H, slot = mn_cell_first_slot(p.call, at.n, TOKENS);
        const int64_t row = (at.span.b * p.call.T + at.span.t0) * H + at.h;
        tiles_apart = H * n_blocks * Block::WARPS;
        gates = (float2 *)to.at[GATES] + block * n_rows + row;
        along = to.at[ALONG] + ((slot * H + at.h) * n_blocks + block) * Block::WARPS;
        edge = (float2 *)to.at[EDGES] + (at.n * H + at.h) * n_blocks + block;
    }
};

/* Which blocks go in a launch: all (ALL), those of columns `slice`, or, where there are two along
 * the columns and two along the slots (CROSSED), one of each, then the other two. */
struct launched {
    enum { ALL = -1 };
    int slice;
    bool crossed;

    __device__ bool mine() const {
        return slice == ALL || (int)(crossed ? blockIdx.x ^ blockIdx.z : blockIdx.x) == slice;
    }
};

/* Where a block's gradients go: dk and dq as parts, dv and db too where blocks share the slots.
 *
 * Where blocks go one after the other, there is one part of dk and dq, the sum of those so far, and
 * the last one puts the gradients; if crossed, one of dv and db, too. */
struct targets {
    target<float> dk_part, dq_part, dv_part, db_part;
    target<mn_bf16> dk, dq, dv, db;
    bool adds, ends;                // keys: to the blocks before it; is the last one
    bool adds_lines, ends_lines;    // dv and db
    float2 *gates;       // of the sequence's first token
    float *along;        // of its first tile
    unsigned tokens_apart, tiles_apart;
    float scale, ip;     // scale: of dq

    /* By the first thread. */
    template <typename Block>
    __device__ void open(const mn_importance_args &p, const room &to, const place &at, launched now,
                         int64_t n_rows) {
        const int64_t K = p.call.K, V = p.call.V, H = p.call.H, token = at.span.t0;
        const int64_t row = (at.span.b * p.call.T + token) * H + at.h;
        const int64_t key_part = now.slice == launched::ALL ? blockIdx.x : 0;
        const int64_t line_part = now.crossed ? 0 : blockIdx.z;
        float *keys = to.at[KEY_PARTS] + (key_part * n_rows + row) * 2 * K;
        float *lines = to.at[SUMS] + (line_part * n_rows + row) * 2 * V;
        if (threadIdx.x != 0) return;
        const parts_of<Block> parts(p, to, at, n_rows, gridDim.x * gridDim.z,
                                    blockIdx.z * gridDim.x + blockIdx.x);
        gates = parts.gates, tokens_apart = (unsigned)H;
        along = parts.along, tiles_apart = (unsigned)parts.tiles_apart;
        scale = (float)p.scale, ip = at.ip;
        adds = now.slice > 0, ends = now.slice == (int)gridDim.x - 1;
        adds_lines = now.crossed && adds, ends_lines = gridDim.z == 1 || (now.crossed && ends);
        dk_part.open(keys, Block::slot0(), K, H * 2 * K);
        dq_part.open(keys + K, Block::slot0(), K, H * 2 * K);
        dk.open(mn_row<mn_bf16>(p.grad.k, at.span.b, token, at.h), Block::slot0(), K,
                p.grad.k.stride[1]);
        dq.open(mn_row<mn_bf16>(p.grad.q, at.span.b, token, at.h), Block::slot0(), K,
                p.grad.q.stride[1]);
        dv_part.open(lines, Block::column0(), V, H * 2 * V);
        db_part.open(lines + V, Block::column0(), V, H * 2 * V);
        dv.open(mn_row<mn_bf16>(p.grad.v, at.span.b, token, at.h), Block::column0(), V,
                p.grad.v.stride[1]);
        db.open(mn_row<mn_bf16>(p.grad.b, at.span.b, token, at.h), Block::column0(), V,
                p.grad.b.stride[1]);
    }
};

/* What warps tell each other of a chunk: sums over their slots or columns of dq and dk, of dv and
 * -db, and lanes' sums of pull mu over cells, of token t those whose number is t more than a
 * multiple of 4. */
template <typename Block>
struct alignas(16) chunk_room {
    float keys[Block::ACROSS][2][HALF][Block::SLOTS + PAD];
    float lines[Block::GROUPS][2][HALF][Block::COLUMNS + PAD];
    float spread[Block::WARPS][HALF / 4][32];
};

/* Tile i, what has come for it and i - 1, and what warps told of it, or still of i + 1: that is
 * added up at the beginning of tile i, and `added` counts the threads that have. */
template <typename Block>
struct backward_room {
    tile<Block, BACKWARD_PASS> in;
    arrivals<Block, BACKWARD_PASS> came[2];
    float4 states[2][SETS][Block::THREADS];     // in front of them
    chunk_room<Block> chunk[2];
    float team[32];
    uint2 ones[32];    // a lane's identity() twice, in two registers
    typename fetcher<Block, BACKWARD_PASS>::sources from;
    targets to;
    uint64_t added;
};

/* ---- a barrier that warps pass before others have come --------------------------------------- */

__device__ __forceinline__ unsigned shared_at(const void *at) {
    return (unsigned)__cvta_generic_to_shared(at);
}

/* Until all threads have arrived (each does, so that tools see what is ordered), for the phase'th
 * time (0, 1, 0, ...); on machines before 9.0, too, which mn_barrier_wait does not serve. */
__device__ __forceinline__ void wait_at(uint64_t *barrier, int phase) {
    const unsigned at = shared_at(barrier);
    unsigned done;
    do {
        asm volatile("{\n\t.reg .pred done;\n\t"
                     "mbarrier.test_wait.parity.shared.b64 done, [%1], %2;\n\t"
                     "selp.u32 %0, 1, 0, done;\n\t}"
                     : "=r"(done) : "r"(at), "r"(phase) : "memory");
    } while (!done);
}

/* ---- chunks ---------------------------------------------------------------------------------- */

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
    float spread[HALF / 4];    // sums of pull mu: of four tokens, lanes taking turns
    mn_bf16 k[4];              // of what dq, value and write are for

    __device__ __forceinline__ void clear() {
#pragma unroll
        for (int i = 0; i < 4; i++) {
            value[i] = write[i] = dv[i] = db[i] = 0.0f;
        }
    }

    /* k, before it is waited for; `first`: token, `slot`: of the warp. */
    template <typename Keys>
    __device__ __forceinline__ void fetch(const Keys &keys, int slot, int first) {
#pragma unroll
        for (int i = 0; i < 4; i++) {
            k[i] = keys.at[first + 2 * column_lane() + i % 2][slot + neighbour(i / 2)];
        }
    }

    /* The adjoints behind the chunk to all of its tokens. */
    __device__ __forceinline__ void add(const cells &adj, const chunk_factors &f) {
        unsigned D[4], C[4], other[4];
        factor_of(D, adj.M[0], adj.M[1]);
        factor_of(C, adj.I[0], adj.I[1]);
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

    /* Token i, number t of its chunk, whose state is `c`; of the products of its means with do of
     * all tokens, its own is dq. Returns the sum of pull mu. */
    __device__ __forceinline__ float read(chunk_sums &sums, int i, int t, const cells &c,
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
        factor_of(pulls, pull[0], pull[1]);
        factor_of(means, mu[0], mu[1]);
#pragma unroll
        for (int n = 0; n < 4; n++) {
            X[n / 2][2 * i + n % 2] = pulls[n];
            Y[n / 2][2 * i + n % 2] = pair_times(pulls[n], means[n]);
        }
        put_column(sums.dq, means, cot, t);
        return sum;
    }

    /* To those tokens whose factors f[i] are not zero. Products onto one sum, which wait for each
     * other, have others between them. */
    __device__ __forceinline__ void put(chunk_sums &sums, const chunk_factors (&f)[2]) const {
        add_product(sums.value, X[0], make_uint2(f[0].v.x, f[1].v.x));
        add_product(sums.write, Y[0], make_uint2(f[0].b.x, f[1].b.x));
#pragma unroll
        for (int i = 0; i < 2; i++) {
            const unsigned x[4] = { turned(X[0][2 * i]), turned(X[1][2 * i]),
                                    turned(X[0][2 * i + 1]), turned(X[1][2 * i + 1]) };
            const unsigned y[4] = { turned(Y[0][2 * i]), turned(Y[1][2 * i]),
                                    turned(Y[0][2 * i + 1]), turned(Y[1][2 * i + 1]) };
            add_product(sums.dv, x, f[i].k);
            add_product(sums.db, y, f[i].square);
            if (i == 0) {
                add_product(sums.value, X[1], make_uint2(f[0].v.y, f[1].v.y));
                add_product(sums.write, Y[1], make_uint2(f[0].b.y, f[1].b.y));
            }
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
 * from those behind them. `adj` has D and -C, `c` the state in front; `one`: ones of a product. */
template <typename Block, bool HEADS>
__device__ __forceinline__ void chunk_back(chunk_sums &sums, cells &adj, cells &c,
                                           const arrivals<Block, BACKWARD_PASS> &came, int first,
                                           uint2 one, const walk<Block, BACKWARD_PASS> &along) {
    const float *base = came.g.base;
    const unsigned warp = thread_again() / 32;
    const int slot = warp % Block::GROUPS * GROUP + 4 * column_lane();
    const int column = warp / Block::GROUPS * GROUP + 4 * column_lane();
    const int own = first + row_lane();
    const uint2 k = came.slots[0].get(own, slot), v = came.columns[0].get(own, column);
    const chunk_factors all = { v, came.columns[1].get(own, column), k,
                                make_uint2(pair_times(k.x, k.x), pair_times(k.y, k.y)) };
    const uint2 cot = came.columns[2].get(own, column);
    const float behind = HEADS ? base[first + HALF - 1] : 0.0f;
    const float before = HEADS && first > 0 ? base[first - 1] : 0.0f;
    sums.clear();
    sums.add(adj, HEADS ? all.times(twice_exp(behind - base[own])) : all);
    if (HEADS) adj.times(expf(behind - before));
    float spread[2];
#pragma unroll
    for (int t = 0; t < HALF; t += 2) {
        if (t + 2 == HALF) sums.fetch(came.slots[0], slot - 4 * column_lane(), first);
        uint2 ones = one;
        chunk_factors f[2];
        token_pair two;
        float sum[2];
#pragma unroll
        for (int i = 0; i < 2; i++) {
            const int s = t + i, at = first + s;
            float reads[2][4];
            along.template advance<HEADS>(c, at);
            along.pull(reads, at);
            sum[i] = two.read(sums, i, t + i, c, reads, cot);
        }
        mn_cell_halve<1>(sum, 1);
        spread[t / 2 % 2] = sum[0];
        if (t % 4 == 2) {
            mn_cell_halve<1>(spread, 2);
            sums.spread[t / 4] = spread[0];
        }
        if (HEADS) {
            ones.x = pair_times(ones.x, twice_exp(base[first + t] - before));
            ones.y = pair_times(ones.y, twice_exp(base[first + t + 1] - before));
        }
        two.put(adj, ones);
#pragma unroll
        for (int i = 0; i < 2; i++) {
            const int s = t + i, at = first + s;
            f[i] = all.where(row_lane() <= s);
            if (HEADS) f[i] = f[i].times(row_lane() <= s ? twice_exp(base[at] - base[own]) : 0);
        }
        two.put(sums, f);
    }
}

/* A warp's sums to shared memory. Tokens of a lane lie 4 slots or columns wide of each other's
 * banks, those of the upper half in what the lower leaves free. */
template <typename Block>
__device__ __forceinline__ void put_sums(chunk_room<Block> &r, const chunk_sums &sums) {
    const unsigned thread = thread_again(), group = thread / 32 % Block::GROUPS;
    const unsigned across = thread / 32 / Block::GROUPS, lane = thread % 32;
    const unsigned flip = lane & 2, own = lane / 8 * 4 + lane / 4 % 2;
#pragma unroll
    for (int i = 0; i < 4; i++) {
        const unsigned t = lane % 4 * 2 + i % 2, at = own + (2 * (i / 2) ^ flip);
        r.keys[across][0][t][group * GROUP + at] = sums.dq[i];
        r.keys[across][1][t][group * GROUP + at] = fmaf(-2.0f * mn_float(sums.k[i]),
                                                        sums.write[i], sums.value[i]);
        r.lines[group][0][t][across * GROUP + at] = sums.dv[i];
        r.lines[group][1][t][across * GROUP + at] = sums.db[i];
    }
#pragma unroll
    for (int i = 0; i < HALF / 4; i++) r.spread[thread / 32][i][lane] = sums.spread[i];
}

/* A lane's share of the gradients of one of its warp's tokens. */
template <typename Block>
struct token_sums {
    static constexpr int SLOTS = Block::SLOTS / 32, COLUMNS = Block::COLUMNS / 32;
    float dk[SLOTS], dq[SLOTS], dv[COLUMNS], db[COLUMNS], fall, spread;

    /* From all warps' sums; `row`: of its tile. */
    __device__ __forceinline__ void add(const chunk_room<Block> &r,
                                        const arrivals<Block, BACKWARD_PASS> &came, int row,
                                        float scale) {
        const int t = row % HALF, lane = threadIdx.x % 32, flip = t / 2 & 2;
        const int slot = lane * SLOTS ^ flip, column = lane * COLUMNS;
        const float over = came.g.over[row];
        *this = {};
#pragma unroll
        for (int warp = 0; warp < Block::ACROSS; warp++) {
            mn_cell_add(dq, &r.keys[warp][0][t][slot]);
            mn_cell_add(dk, &r.keys[warp][1][t][slot]);
        }
#pragma unroll
        for (int group = 0; group < Block::GROUPS; group++) {
            mn_cell_add(dv, &r.lines[group][0][t][column ^ flip]);
            mn_cell_add(db, &r.lines[group][1][t][column ^ flip]);
        }
#pragma unroll
        for (int warp = 0; warp < Block::WARPS; warp += 4) {    // eight lanes of each have it
            spread += r.spread[warp + lane / 8][t / 4][lane % 8 * 4 + t % 4];
        }
#pragma unroll
        for (int i = 0; i < SLOTS; i++) dk[i] *= over, dq[i] *= scale;
#pragma unroll
        for (int i = 0; i < COLUMNS; i++) {
            dv[i] *= over, db[i] *= -over;
            fall = fmaf(mn_float(came.columns[0].at[row][column + i]), dv[i], fall);
            fall = fmaf(mn_float(came.columns[1].at[row][column + i]), db[i], fall);
        }
        spread *= over;
    }

    __device__ __forceinline__ void put(const targets &to, unsigned token) const {
        if (to.ends) {
            to.dk.put(dk, token);
            to.dq.put(dq, token);
        } else {
            to.dk_part.put(dk, token);
            to.dq_part.put(dq, token);
        }
        if (to.ends_lines) {
            to.dv.put(dv, token);
            to.db.put(db, token);
        } else {
            to.dv_part.put(dv, token);
            to.db_part.put(db, token);
        }
    }
};

/* The gradients of a tile from all warps' sums, a token for each warp. */
template <typename Block>
__device__ __forceinline__ void put_tile(backward_room<Block> &r,
                                         const arrivals<Block, BACKWARD_PASS> &came, int n_rows,
                                         int first) {
    static_assert(Block::WARPS == TOKENS, "a warp for each token");
    const int row = thread_again() / 32;
    token_sums<Block> sums;
    float dk[sums.SLOTS] = {}, dq[sums.SLOTS] = {};    // of the blocks before
    float dv[sums.COLUMNS] = {}, db[sums.COLUMNS] = {};
    if (r.to.adds && row < n_rows) {
        r.to.dk_part.get(dk, first + row);
        r.to.dq_part.get(dq, first + row);
    }
    if (r.to.adds_lines && row < n_rows) {
        r.to.dv_part.get(dv, first + row);
        r.to.db_part.get(db, first + row);
    }
    sums.add(r.chunk[row / HALF], came, row, r.to.scale);
    float both[2] = { sums.fall, sums.spread };    // lanes of the lower half, and of the upper one
    mn_cell_halve<1>(both, 16);
#pragma unroll
    for (int by = 8; by > 0; by /= 2) both[0] += __shfl_xor_sync(0xffffffffu, both[0], by);
    if (row >= n_rows) return;
#pragma unroll
    for (int i = 0; i < sums.SLOTS; i++) {
        sums.dk[i] = 0.0f + dk[i] + sums.dk[i];
        sums.dq[i] = 0.0f + dq[i] + sums.dq[i];
    }
    if (r.to.adds_lines) {
#pragma unroll
        for (int i = 0; i < sums.COLUMNS; i++) {
            sums.dv[i] = 0.0f + dv[i] + sums.dv[i];
            sums.db[i] = 0.0f + db[i] + sums.db[i];
        }
    }
    if (threadIdx.x % 16 == 0) {
        float2 *to = r.to.gates + (uint64_t)(unsigned)(first + row) * r.to.tokens_apart;
        ((float *)to)[threadIdx.x / 16 % 2] = both[0];
    }
    sums.put(r.to, first + row);
}

/* Adjoints of the last state, `c`: D and -C. */
template <typename Block>
__device__ void start_back(cells &adj, const cells &c,
                           const mn_importance_args &p, const place &at) {
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
__device__ float put_first(const cells &adj, const mn_importance_args &p,
                           const place &at) {
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
__device__ __forceinline__ void put_along(const targets &to, const cells &adj, const cells &c,
                                          int tile) {
    float sum = 0.0f;
#pragma unroll
    for (int i = 0; i < 8; i++) {
        sum = fmaf(adj.M[i / 4][i % 4], c.M[i / 4][i % 4], sum);
        sum = fmaf(-adj.I[i / 4][i % 4], c.I[i / 4][i % 4] - to.ip, sum);
    }
    sum = mn_warp_sum(sum);
    if (threadIdx.x % 32 != 0) return;
    to.along[(uint64_t)(unsigned)tile * to.tiles_apart + threadIdx.x / 32] = sum;
}

/* Four numbers of each thread, SETS times, from memory to shared memory: a thread reads what
 * it has fetched itself. */
template <typename Block>
__device__ __forceinline__ void fetch_state(float4 (&to)[SETS][Block::THREADS],
                                            const typename fetcher<Block, BACKWARD_PASS>::sources
                                                &from, int tile) {
    const unsigned thread = thread_again();
    const uint64_t states = (uint64_t)(unsigned)tile * from.between;
    const float *at = from.states + states * (SETS * SET_STRIDE<Block>) + thread * 4;
#pragma unroll
    for (int i = 0; i < SETS; i++) copy_sixteen(&to[i][thread], at + i * SET_STRIDE<Block>);
}

/* The adjoints behind the last tile, from the state in front of it; returns this thread's part of
 * sum C there. */
template <typename Block>
__device__ __forceinline__ float start_tile(cells &adj, cells end,
                                            const tile<Block, BACKWARD_PASS> &in,
                                            const mn_importance_args &p, const place &at) {
    advance_tile<Block, BACKWARD_PASS>(end, in);
    start_back<Block>(adj, end, p, at);
    float sum = 0.0f;
#pragma unroll
    for (int i = 0; i < 8; i++) sum -= adj.I[i / 4][i % 4];
    return sum;
}

/* A tile back: `adj` from behind it to in front of it. */
template <typename Block>
__device__ __forceinline__ void tile_back(cells &adj, backward_room<Block> &r, int tile, int length,
                                          int phase, const float *front,
                                          const walk<Block, BACKWARD_PASS> &along) {
    const arrivals<Block, BACKWARD_PASS> &came = r.came[tile & 1];
    cells c;
    c.load(front, SET_STRIDE<Block>);
    adj.times(r.in.rest);
    along.pass(c, 0, HALF);
#pragma unroll 1
    for (int chunk = 1; chunk >= 0; chunk--) {
        chunk_sums sums;
        const uint2 one = r.ones[threadIdx.x % 32];
        if (chunk == 0) c.load(front, SET_STRIDE<Block>);
        if (r.in.heads == 0) {
            chunk_back<Block, false>(sums, adj, c, came, chunk * HALF, one, along);
        } else {
            chunk_back<Block, true>(sums, adj, c, came, chunk * HALF, one, along);
        }
        if (chunk == 1) wait_at(&r.added, phase);
        put_sums<Block>(r.chunk[chunk], sums);
        if (chunk == 1 && tile > 0) {
            fetcher<Block, BACKWARD_PASS>::fetch(r.came[~tile & 1], r.from, tile - 1, length);
        }
    }
    c.load(front, SET_STRIDE<Block>);
    put_along(r.to, adj, c, tile);
}

template <typename Block>
__global__ void __launch_bounds__(Block::THREADS, Block::PER_PROCESSOR)
backward_kernel(const __grid_constant__ mn_importance_args p, const gates *decays, room to,
                launched now, int64_t n_rows) {
    typedef fetcher<Block, BACKWARD_PASS> next;
    if (!now.mine()) return;
    extern __shared__ float4 shared[];
    backward_room<Block> &r = *(backward_room<Block> *)shared;
    int phase = 0;    // of r.added
    r.in.open();
    if (threadIdx.x == 0) mn_barrier_open(&r.added, Block::THREADS);
    if (threadIdx.x < 32) r.ones[threadIdx.x] = make_uint2(identity(), identity());
    for (int64_t item = blockIdx.y; item < mn_n_spans(p.call) * p.call.H; item += gridDim.y) {
        const place at = place::of(p, item);
        const int length = (int)at.span.length, n_tiles = (int)mn_cell_tiles(length);
        next::open(r.from, p, at, decays);
        if (threadIdx.x == 0) {
            const int64_t slot = mn_cell_first_slot(p.call, at.n, TOKENS);
            r.from.states = to.at[STATES] + state_at<Block>(slot * p.call.H + at.h);
            r.from.between = (unsigned)(p.call.H * gridDim.x * gridDim.z);
        }
        r.to.template open<Block>(p, to, at, now, n_rows);
        __syncthreads();
        next::share(r.from, r.came[0]);
        cells adj;
        float behind = 0.0f;    // this thread's part of sum C behind the last token
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
        if (n_tiles > 0) next::put(r.in, r.came[(n_tiles - 1) % 2], r.to.scale);
        for (int i = n_tiles - 1; i >= 0; i--) {
            __syncthreads();
            if (i > 0) fetch_state<Block>(r.states[~i & 1], r.from, i - 1);
            if (i + 1 < n_tiles) {
                const int first = (i + 1) * TOKENS;
                put_tile(r, r.came[~i & 1], length - first, first);
            }
            mn_barrier_arrive(&r.added);
            const float *front = (const float *)&r.states[again(i) & 1][0][thread_again()];
            const walk<Block, BACKWARD_PASS> along(r.in);
            if (i == n_tiles - 1) {
                cells end;
                end.load(front, SET_STRIDE<Block>);
                behind = start_tile<Block>(adj, end, r.in, p, at);
            }
            tile_back<Block>(adj, r, i, length, phase, front, along);
            phase ^= 1;
            next::wait();
            __syncthreads();
            if (i > 0) next::put(r.in, r.came[~again(i) & 1], r.to.scale);
        }
        if (n_tiles > 0) put_tile(r, r.came[0], length, 0);
        __syncthreads();
        const float first = mn_team_sum<Block::THREADS>(put_first<Block>(adj, p, at), r.team);
        behind = mn_team_sum<Block::THREADS>(behind, r.team);
        if (threadIdx.x == 0) {
            const parts_of<Block> parts(p, to, at, n_rows, gridDim.x * gridDim.z,
                                        blockIdx.z * gridDim.x + blockIdx.x);
            *parts.edge = make_float2(behind, first);
        }
        __syncthreads();
    }
}

}    // namespace importance::by_mma

#endif
