/* importance_bwd_mma.cuh - Palimpsa in bf16 backward, on tensor cores (see importance_mma.cuh).
 *
 * Sixteen warps of a block go through the tokens and exchange sums of a chunk; in the middle of
 * the next one they add that up. Four others help them: they bring tiles and make their factors. So
 * nothing waits for the whole block.
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
 * What dg and dip are made of is left to importance.cu. */
#ifndef MN_KERNELS_CUDA_IMPORTANCE_IMPORTANCE_BWD_MMA_CUH
#define MN_KERNELS_CUDA_IMPORTANCE_IMPORTANCE_BWD_MMA_CUH

#include "kernels/cuda/prim/mbarrier.cuh"
#include "kernels/cuda/importance/importance_mma.cuh"
#include "kernels/cuda/prim/sync.cuh"
#include "kernels/cuda/prim/tma.cuh"

namespace mneme::importance::mma_path {

/* Rows of parts or gradients of a head's tokens, from the block's first slot or column on; `i`: the
 * first of four neighbours. */
template <typename T>
struct alignas(16) grad_view {
    T *first;          // at the sequence's first token; nullptr: not wanted
    unsigned row_stride;    // its tokens, where packs are stored
    int packed;        // how many numbers may be read or stored as packs of four
    int left;          // how many there are
    int64_t stride;    // its tokens

    __device__ void open(T *row, int64_t base, int64_t count, int64_t between) {
        first = row ? row + base : nullptr;
        row_stride = (unsigned)between, stride = between;
        left = row ? (int)min(count - base, (int64_t)1 << 30) : 0;
        const bool packs = ((uintptr_t)first | (uintptr_t)(between * (int64_t)sizeof(T))) %
                               (4 * sizeof(T)) == 0;
        packed = packs && between == row_stride ? left & ~3 : 0;
    }

    /* What packs need, in one read of shared memory. */
    struct alignas(16) head {
        T *first;
        unsigned row_stride;
        int packed;
    };

    __device__ __forceinline__ head packs() const {
        return *(const head *)this;
    }

    /* Token t's; zeros where there are none. */
    __device__ __forceinline__ void get(float (&x)[4], unsigned t, int i) const {
        const head rows = packs();
        if (i < rows.packed) {
            mn_cell_load(x, rows.first + (uint64_t)t * rows.row_stride + i);
            return;
        }
#pragma unroll
        for (int n = 0; n < 4; n++) x[n] = i + n < left ? first[t * stride + i + n] : 0.0f;
    }

    /* Soon to be asked for. */
    __device__ __forceinline__ void prefetch_l2(unsigned t, int i) const {
        if (i < left) mn_prefetch_l2(first + t * stride + i);
    }

    /* Those of them that there are. */
    __device__ __forceinline__ void put(const float (&x)[4], unsigned t, int i) const {
        const head rows = packs();
        if (i < rows.packed) {
            mn_store<4>(rows.first + (uint64_t)t * rows.row_stride + i, 0, x);
            return;
        }
#pragma unroll
        for (int n = 0; n < 4; n++) {
            if (i + n < left) mn_put(first + t * stride + i + n, x[n]);
        }
    }
};

/* What a block of a head leaves for dg and dip (importance.cu): for each token, one head's behind
 * another's, v'dv + b'db and the sum of pull mu, for each tile what its warps have of S in front of
 * it, and sums of C behind the last token and of what goes to the prior from the first state. */
template <typename Block>
struct partials_of {
    float2 *gates, *edge;
    float *along;
    int64_t tile_stride;

    __device__ partials_of(const mn_importance_args &p, const workspace &to, const place &at,
                        int64_t n_rows, int64_t n_blocks, int64_t block) {
        const int64_t H = p.call.H, slot = mn_cell_first_slot(p.call, at.n, TOKENS);
        const int64_t row = at.h * (n_rows / H) + at.span.b * p.call.T + at.span.t0;
        tile_stride = H * n_blocks * Block::WARPS;
        gates = (float2 *)to.at[GATES] + block * n_rows + row;
        along = to.at[ALONG] + ((slot * H + at.h) * n_blocks + block) * Block::WARPS;
        edge = (float2 *)to.at[EDGES] + (at.n * H + at.h) * n_blocks + block;
    }
};

/* Which blocks go in a launch: all (ALL), those of columns `slice`, or, where there are two along
 * the columns and two along the slots (CROSSED), one of each, then the other two. */
struct launch_slice {
    enum { ALL = -1 };
    int slice;
    bool diagonal;

    __device__ bool is_active() const {
        return slice == ALL || (int)(diagonal ? blockIdx.x ^ blockIdx.z : blockIdx.x) == slice;
    }

    /* Whether dk and dq are added to those of the blocks before, and whether these are the last
     * ones; dv and db. An argument of the kernel answers at once, shared memory would not. */
    __device__ bool accumulates() const { return slice > 0; }
    __device__ bool is_last() const { return slice == (int)gridDim.x - 1; }
    __device__ bool accumulates_lines() const { return diagonal && accumulates(); }
    __device__ bool is_last_lines() const {
        return gridDim.z == 1 || (diagonal && is_last());
    }
};

/* Where a block's gradients go: dk and dq as parts, dv and db too where blocks share the slots.
 *
 * Where blocks go one after the other, there is one part of dk and dq, the sum of those so far, and
 * the last one puts the gradients; if crossed, one of dv and db, too. */
struct grad_targets {
    grad_view<float> key_partials[2], line_partials[2];    // of dq and dk; of dv and db
    grad_view<mn_bf16> keys[2], lines[2];
    float2 *gates;       // of the sequence's first token
    float *along;        // of its first tile
    unsigned tile_stride;
    float scale, ip;     // scale: of dq

    /* By the producer_warps' first thread. */
    template <typename Block>
    __device__ void open(const mn_importance_args &p, const workspace &to, const place &at,
                         launch_slice now,
                         int64_t n_rows) {
        const int64_t K = p.call.K, V = p.call.V, H = p.call.H, token = at.span.t0;
        const int64_t row = (at.span.b * p.call.T + token) * H + at.h;
        const int64_t key_partial = now.slice == launch_slice::ALL ? blockIdx.x : 0;
        const int64_t line_partial = now.diagonal ? 0 : blockIdx.z;
        float *key = to.at[KEY_PARTS] + (key_partial * n_rows + row) * 2 * K;
        float *line = to.at[SUMS] + (line_partial * n_rows + row) * 2 * V;
        const mn_out *of_keys[2] = { &p.grad.q, &p.grad.k };
        const mn_out *of_lines[2] = { &p.grad.v, &p.grad.b };
        if (producer_warps<Block>::own() != 0) return;
        const partials_of<Block> parts(p, to, at, n_rows, gridDim.x * gridDim.z,
                                    blockIdx.z * gridDim.x + blockIdx.x);
        gates = parts.gates;
        along = parts.along, tile_stride = (unsigned)parts.tile_stride;
        scale = (float)p.scale, ip = at.ip;
        for (int i = 0; i < 2; i++) {
            // dk comes first
            key_partials[i].open(key + (1 - i) * K, Block::slot0(), K, H * 2 * K);
            line_partials[i].open(line + i * V, Block::column0(), V, H * 2 * V);
            keys[i].open(mn_row<mn_bf16>(*of_keys[i], at.span.b, token, at.h), Block::slot0(), K,
                         of_keys[i]->stride[1]);
            lines[i].open(mn_row<mn_bf16>(*of_lines[i], at.span.b, token, at.h), Block::column0(),
                          V, of_lines[i]->stride[1]);
        }
    }
};

/* What warps exchange of a chunk: sums over their slots or columns of dq and dk, of dv and
 * -db, and lanes' sums of pull mu over cells, of token t those whose number is t more than a
 * multiple of 4 (warps are a bank apart). */
template <typename Block>
struct alignas(16) chunk_smem {
    static constexpr int KEY_PITCH = Block::SLOTS + PAD, LINE_PITCH = Block::COLUMNS + PAD;
    float keys[Block::ACROSS][2][HALF][KEY_PITCH];
    float lines[Block::GROUPS][2][HALF][LINE_PITCH];
    float spread[Block::WARPS][HALF / 4 * 32 + 1];
};

/* The lane's share of a product with ones: depths 2 c and 2 c + 1 of column g. */
__device__ __forceinline__ unsigned identity() {
    if (row_lane() / 2 != column_lane()) return 0;
    return row_lane() % 2 ? 0x3f800000u : 0x00003f80u;
}

/* What a thread has to know of where things lie, in words, which is the same for all tiles: working
 * it out takes more than a read. `rows` and `columns`, by the group of slots or columns: what
 * token_scan reads. */
template <typename Block>
struct alignas(16) lane_table {
    typedef chunk_smem<Block> sums;
    typedef token_scan<Block, BACKWARD_PASS> scan;

    /* Where its sums of a chunk go, two neighbours' of its first token: tokens of a lane lie 4
     * slots or columns wide of each other's banks, those of the upper half in what the lower leaves
     * free. Which of loaded numbers its factors are; its identity(). */
    struct alignas(16) lane_share {
        unsigned sums[2], factor, one;
    };

    /* What the warp adds to these, of slots and of columns. */
    struct alignas(16) warp_share {
        unsigned keys, lines, slot, column;
    };

    typename scan::column_places columns[Block::ACROSS][32];
    typename scan::row_places rows[Block::GROUPS][32];
    lane_share lanes[32];
    warp_share warps[Block::WARPS];

    __device__ void open(const tile<Block, BACKWARD_PASS> &in, unsigned thread) {
        constexpr unsigned PITCH = sums::KEY_PITCH, PART = 2 * HALF * PITCH;
        constexpr unsigned LOADED = rows_of<Block::SLOTS, true>::PITCH;
        static_assert(Block::SLOTS == Block::COLUMNS, "one place of a lane for both");
        const unsigned warp = thread / 32, lane = thread % 32;
        const unsigned group = warp % Block::GROUPS, across = warp / Block::GROUPS;
        if (across == 0) rows[group][lane] = scan::places_of_rows(in, group * GROUP);
        if (group == 0) columns[across][lane] = scan::places_of_columns(in, across * GROUP);
        if (lane == 0) {
            warps[warp] = { across * PART + group * GROUP, group * PART + across * GROUP,
                            group * GROUP, across * GROUP };
        }
        if (warp > 0) return;
        const unsigned own = lane / 8 * 4 + lane / 4 % 2, flip = lane & 2;
        const unsigned token = lane % 4 * 2 * PITCH;
        lanes[lane] = { { token + own + flip, token + own + (2 ^ flip) },
                        lane / 4 * LOADED + lane % 4 * 4, identity() };
    }
};

/* Tiles take turns: a tile's factors have two stages, what was loaded for it three, as it is still
 * read when its sums are stored. `full`: a tile can be scanned; `left`: it has been, and its
 * gradients are stored; `sums_full`: all warps have stored their sums of a chunk; `sums_empty`:
 * half of them have read them, twice a tile. */
template <typename Block>
struct bwd_smem {
    tile<Block, BACKWARD_PASS> in[2];
    tile_stage<Block, BACKWARD_PASS> staged[3];
    float4 states[2][SETS][Block::THREADS];    // in front of the tile and the next one
    chunk_smem<Block> chunk;
    lane_table<Block> table;
    float2 gate_parts[2][TOKENS][32];    // lanes' shares of what `gates` gets of tiles' tokens,
    float starts[2][Block::WARPS][32];   // and of S in front of tiles
    float reduce[32];
    typename tile_loader<Block, BACKWARD_PASS, producer_warps<Block>>::sources from;
    grad_targets to;
    uint64_t full[2], left, sums_full, sums_empty;

    /* By the first threads. */
    __device__ void open() {
        in[0].open();
        in[1].open();
        if (threadIdx.x < Block::THREADS) table.open(in[0], threadIdx.x);
        if (threadIdx.x != 0) return;
        mn_mbarrier_init(&full[0], producer_warps<Block>::THREADS + 1);    // and the state
        mn_mbarrier_init(&full[1], producer_warps<Block>::THREADS + 1);
        mn_mbarrier_init(&sums_full, Block::THREADS);
        mn_mbarrier_init(&sums_empty, Block::THREADS / 2);
        mn_mbarrier_init(&left, Block::THREADS / 2);
#if __CUDA_ARCH__ >= 900
        mn_mbarrier_init_fence();
#endif
    }
};

/* Until all of `threads` have come to barrier `id`, which is not that of the whole block. */
__device__ __forceinline__ void meet(int id, int threads) {
    mn_named_barrier_sync(id, threads);
}

enum { BAR_ALL = 1, BAR_PRODUCERS, BAR_CONSUMERS };

/* ---- chunks ---------------------------------------------------------------------------------- */

/* The factors of a chunk's tokens, of which a lane has row_lane(), for products that sum over
 * columns (v, b) and slots (k and its square). */
struct chunk_frags {
    uint2 v, b, k, square;

    __device__ __forceinline__ chunk_frags times(unsigned by) const {
        return { bf16x2_mul(v, by), bf16x2_mul(b, by), bf16x2_mul(k, by), bf16x2_mul(square, by) };
    }

    __device__ __forceinline__ chunk_frags where(bool wanted) const {
        const uint2 key = select_or_zero(wanted, k);    // its square again: no more choices
        return { select_or_zero(wanted, v), select_or_zero(wanted, b), key,
                 make_uint2(bf16x2_mul(key.x, key.x), bf16x2_mul(key.y, key.y)) };
    }
};

/* What a warp knows of a chunk: columns are tokens, rows slots or, of dv and db, columns. */
struct chunk_acc {
    float dq[4], value[4], write[4], dv[4], db[4];
    float spread[HALF / 4];    // sums of pull mu: of four tokens, lanes taking turns
    unsigned k[2];             // pairs of what dq, value and write are for

    __device__ __forceinline__ void clear() {
#pragma unroll
        for (int i = 0; i < 4; i++) {
            value[i] = write[i] = dv[i] = db[i] = 0.0f;
        }
    }

    /* k as sums have it, from the factor whose columns are tokens. */
    __device__ __forceinline__ void set_keys(uint2 keys) {
        k[0] = turned(keys.x), k[1] = turned(keys.y);
    }

    __device__ __forceinline__ float key(int i) const {
        return i % 2 == 0 ? low_half(k[i / 2]) : high_half(k[i / 2]);
    }

    /* The adjoints behind the chunk to all of its tokens. */
    __device__ __forceinline__ void add(const state_frag &adj, const chunk_frags &f) {
        unsigned D[4], C[4], other[4];
        frag_of_acc(D, adj.M[0], adj.M[1]);
        frag_of_acc(C, adj.I[0], adj.I[1]);
        mma_k16(value, D, f.v);
        mma_k16(write, C, f.b);
        turn(other, D);
        mma_k16(dv, other, f.k);
        turn(other, C);
        mma_k16(db, other, f.square);
    }
};

/* X of a token, number t of its chunk, then Y: factors whose depth is columns. All that X is for
 * comes first, so that Y takes its registers. */
struct token_adjoint {
    unsigned X[4], means[4];

    /* From the state behind it, `c`; of the products of its means with do of all tokens, its own
     * is dq. Returns the sum of pull mu. */
    __device__ __forceinline__ float read(chunk_acc &sums, int t, const state_frag &c,
                                          const float (&reads)[2][4], uint2 cot) {
        float pull[2][4], mu[2][4], sum = 0.0f;
#pragma unroll
        for (int n = 0; n < 8; n++) {
            const float over = mn_rcp_ftz(c.I[n / 4][n % 4]);
            pull[n / 4][n % 4] = reads[n / 4][n % 4] * over;
            mu[n / 4][n % 4] = c.M[n / 4][n % 4] * over;
            sum = fmaf(pull[n / 4][n % 4], mu[n / 4][n % 4], sum);
        }
        frag_of_acc(X, pull[0], pull[1]);
        frag_of_acc(means, mu[0], mu[1]);
        mma_k16_column(sums.dq, means, cot, t);
        return sum;
    }

    /* X becomes Y. */
    __device__ __forceinline__ void weigh() {
#pragma unroll
        for (int n = 0; n < 4; n++) X[n] = bf16x2_mul(X[n], means[n]);
    }

    /* To the adjoints in front of the chunk, and to those tokens whose factors, of columns and of
     * slots, are not zero. */
    __device__ __forceinline__ void put(float (&adj)[2][4], unsigned ones, float (&of_slots)[4],
                                        uint2 columns, float (&of_columns)[4],
                                        uint2 slots) const {
        unsigned other[4];
#pragma unroll
        for (int n = 0; n < 2; n++) {
            mn_mma_bf16_k8(adj[n], make_uint2(X[2 * n], X[2 * n + 1]), ones);
        }
        mma_k16(of_slots, X, columns);
        turn(other, X);
        mma_k16(of_columns, other, slots);
    }
};

/* Of lanes MASK apart the lower one has the sum of both `early`, the other that of both `late`.
 * Which it is, is asked anew: the compiler would keep it in local memory. */
template <unsigned MASK>
__device__ __forceinline__ float sum_by_halves(float early, float late) {
    const bool upper = thread_rematerialized() & MASK;
    return (upper ? late : early) + __shfl_xor_sync(0xffffffffu, upper ? early : late, MASK);
}

/* exp(x), twice. */
__device__ __forceinline__ unsigned exp_bf16x2(float x) {
    const float y = expf(x);
    return mn_bf16x2_of(y, y);
}

/* Tokens first .. first + HALF: their share of all gradients, and the adjoints in front of them
 * from those behind them. `adj` has D and -C, `c` the state in front; `slot_factor`,
 * `column_factor`: places among loaded numbers (lane_table), `one`: ones of a product;
 * midway(): what is done between two of them. */
template <typename Block, bool RESCALE, typename Midway>
__device__ __forceinline__ void chunk_bwd(chunk_acc &sums, state_frag &adj, state_frag &c,
                                           const tile_stage<Block, BACKWARD_PASS> &staged,
                                               int first, unsigned slot_factor,
                                           unsigned column_factor, unsigned one,
                                           const token_scan<Block, BACKWARD_PASS> &along,
                                           const Midway &midway) {
    const float *base = staged.g.base;
    const int own = first + row_lane();
    const uint2 k = *(const uint2 *)(staged.slots[0].at[first] + slot_factor);
    const auto column = [&](int kind) {
        return *(const uint2 *)(staged.columns[kind].at[first] + column_factor);
    };
    const chunk_frags all = { column(0), column(1), k,
                                make_uint2(bf16x2_mul(k.x, k.x), bf16x2_mul(k.y, k.y)) };
    const uint2 cot = column(2);
    const float behind = RESCALE ? base[first + HALF - 1] : 0.0f;
    const float before = RESCALE && first > 0 ? base[first - 1] : 0.0f;
    sums.clear();
    sums.add(adj, RESCALE ? all.times(exp_bf16x2(behind - base[own])) : all);
    if (RESCALE) adj.times(expf(behind - before));
    float sum[4];    // of pull mu, then of two tokens, lanes taking turns
#pragma unroll
    for (int t = 0; t < HALF; t++) {
        if (t == HALF / 2) midway();
        if (t + 1 == HALF) sums.set_keys(k);
        unsigned ones = one;
        token_adjoint now;
        float reads[2][4];
        along.template advance<RESCALE>(c, t, first);
        along.pull(reads, t);
        sum[t % 4] = now.read(sums, t, c, reads, cot);
        if (t % 2 == 1) {
            float two[2] = { sum[t % 4 - 1], sum[t % 4] };
            mn_cell_reduce_half<1>(two, 1);
            sum[t % 4 / 2] = two[0];
        }
        if (t % 4 == 3) sums.spread[t / 4] = sum_by_halves<2>(sum[0], sum[1]);
        if (RESCALE) ones = bf16x2_mul(ones, exp_bf16x2(base[first + t] - before));
        chunk_frags f = all.where(row_lane() <= t);
        if (RESCALE) f = f.times(row_lane() <= t ? exp_bf16x2(base[first + t] - base[own]) : 0);
        now.put(adj.M, ones, sums.value, f.v, sums.dv, f.k);
        now.weigh();
        now.put(adj.I, ones, sums.write, f.b, sums.db, f.square);
    }
}

/* A warp's sums to shared memory. */
template <typename Block>
__device__ __forceinline__ void store_sums(bwd_smem<Block> &r, const chunk_acc &sums) {
    typedef chunk_smem<Block> all;
    const unsigned thread = thread_rematerialized();
    const uint2 lane = *(const uint2 *)r.table.lanes[thread % 32].sums;
    const uint2 warp = *(const uint2 *)&r.table.warps[thread / 32].keys;
    float *const keys = &r.chunk.keys[0][0][0][0] + warp.x;
    float *const lines = &r.chunk.lines[0][0][0][0] + warp.y;
#pragma unroll
    for (int i = 0; i < 4; i++) {
        float *key = keys + (i < 2 ? lane.x : lane.y) + i % 2 * all::KEY_PITCH;
        float *line = lines + (i < 2 ? lane.x : lane.y) + i % 2 * all::LINE_PITCH;
        key[0] = sums.dq[i];
        key[HALF * all::KEY_PITCH] = fmaf(-2.0f * sums.key(i), sums.write[i], sums.value[i]);
        line[0] = sums.dv[i];
        line[HALF * all::LINE_PITCH] = sums.db[i];
    }
#pragma unroll
    for (int i = 0; i < HALF / 4; i++) {
        r.chunk.spread[thread / 32][i * 32 + thread % 32] = sums.spread[i];
    }
}

/* x here and no sooner: what has been asked for is not waited for before what comes first. */
__device__ __forceinline__ float not_before(float x) {
    asm volatile("" : "+f"(x));
    return x;
}

/* What a warp makes of a token from all warps' sums: half of the lanes have dq or dv, the others dk
 * or db. `row`: of its tile, `token`: of the sequence. */
template <typename Block>
struct token_sums {
    static_assert(Block::SLOTS == 64 && Block::COLUMNS == 64, "four for each of 16 lanes");
    float keys[4], lines[4], spread;    // sums over the warps; this lane's part of sum pull mu

    __device__ __forceinline__ static int kind() {
        return (int)(thread_rematerialized() % 32 / 16);
    }

    __device__ __forceinline__ static int first() {
        return (int)(thread_rematerialized() % 16 * 4);
    }

    /* What the blocks before have of it, asked for before it is waited for what is added to it. */
    struct earlier {
        float keys[4], lines[4];

        __device__ __forceinline__ earlier(const grad_targets &to, launch_slice now, bool exists,
                                           unsigned token) {
#pragma unroll
            for (int i = 0; i < 4; i++) keys[i] = lines[i] = 0.0f;
            if (!now.accumulates() || !exists) return;
            to.key_partials[kind()].get(keys, token, first());
            if (now.accumulates_lines()) to.line_partials[kind()].get(lines, token, first());
        }
    };

    /* Token t of the chunk: all that is read of what warps have told each other. */
    __device__ __forceinline__ void read(const chunk_smem<Block> &r, int t) {
        add(keys, r.keys, t);
        add(lines, r.lines, t);
        const unsigned lane = thread_rematerialized() % 32, four = (unsigned)t / 4;
        spread = 0.0f;
#pragma unroll
        for (int warp = 0; warp < Block::WARPS; warp += 4) {    // eight lanes of each have it
            spread += r.spread[warp + lane / 8][four * 32 + lane % 8 * 4 + (unsigned)t % 4];
        }
    }

    /* Sums over the parts of one kind at token t of the chunk, of four neighbours. */
    template <int PARTS, int PITCH>
    __device__ __forceinline__ static void add(float (&x)[4],
                                               const float (&parts)[PARTS][2][HALF][PITCH], int t) {
        const float *from = &parts[0][kind()][t][first()];
        mn_load<4>(x, from, 0);
#pragma unroll
        for (int part = 1; part < PARTS; part++) mn_cell_add(x, from + part * 2 * HALF * PITCH);
        if (t < HALF / 2) return;
        const float low[2] = { x[0], x[1] };    // as lane_table has turned them
        x[0] = x[2], x[1] = x[3], x[2] = low[0], x[3] = low[1];
    }

    /* dq or dk. */
    __device__ __forceinline__ void put_keys(const bwd_smem<Block> &r, launch_slice now,
                                             const float (&before)[4], float over,
                                             unsigned token) const {
        float x[4];
        const float by = kind() == 0 ? r.to.scale : over;
#pragma unroll
        for (int i = 0; i < 4; i++) x[i] = 0.0f + not_before(before[i]) + keys[i] * by;
        if (now.is_last()) r.to.keys[kind()].put(x, token, first());
        else r.to.key_partials[kind()].put(x, token, first());
    }

    /* dv or db; returns this lane's part of v'dv + b'db. */
    __device__ __forceinline__ float put_lines(const bwd_smem<Block> &r, launch_slice now,
                                               const tile_stage<Block, BACKWARD_PASS> &staged,
                                               const float (&before)[4], float over, int row,
                                               unsigned token) const {
        float x[4], gate_grad = 0.0f;
        const uint2 own = staged.columns[kind()].get(row, first());
        const float inputs[4] = { low_half(own.x), high_half(own.x), low_half(own.y),
                                 high_half(own.y) };
        const float by = kind() == 0 ? over : -over;
#pragma unroll
        for (int i = 0; i < 4; i++) {
            x[i] = lines[i] * by;
            gate_grad = fmaf(inputs[i], x[i], gate_grad);
            x[i] = 0.0f + not_before(before[i]) + x[i];
        }
        if (now.is_last_lines()) r.to.lines[kind()].put(x, token, first());
        else r.to.line_partials[kind()].put(x, token, first());
        return gate_grad;
    }

    __device__ __forceinline__ void put(bwd_smem<Block> &r, launch_slice now,
                                        const tile_stage<Block, BACKWARD_PASS> &staged,
                                        const earlier &before, int row, int turn,
                                        unsigned token) const {
        const float over = staged.g.over[row];
        put_keys(r, now, before.keys, over, token);
        const float gate_grad = put_lines(r, now, staged, before.lines, over, row, token);
        r.gate_parts[turn][row][thread_rematerialized() % 32] = make_float2(gate_grad,
                                                                           spread * over);
    }
};

/* Whether this warp is one of those that put a chunk's gradients, and its token of the tile. */
template <typename Block>
__device__ __forceinline__ bool has_row(int &row, int chunk) {
    static_assert(Block::WARPS == TOKENS, "a warp for each token");
    row = (int)(thread_rematerialized() / 32);
    return row / HALF == chunk;
}

/* The gradients of a chunk's tokens from all warps' sums, once they have stored them. Others may
 * store their next ones as soon as these have been read. `first`: the tile's first token, `n_rows`:
 * of those from there on, `turn`: its place of two. */
template <typename Block>
__device__ __forceinline__ void store_chunk(bwd_smem<Block> &r, launch_slice now,
                                          const tile_stage<Block, BACKWARD_PASS> &staged, int chunk,
                                          int turn, int first, int n_rows) {
    int row;
    if (!has_row<Block>(row, chunk)) return;
    const unsigned token = (unsigned)(first + row);
    const bool exists = token < (unsigned)(first + n_rows);    // and not kept until it is put
    const typename token_sums<Block>::earlier before(r.to, now, exists, token);
    mn_mbarrier_wait(&r.sums_full, chunk ^ 1);
    token_sums<Block> own;
    own.read(r.chunk, row % HALF);
    mn_mbarrier_arrive(&r.sums_empty);
    if (row < n_rows) own.put(r, now, staged, before, row, turn, token);
    if (chunk == 0) mn_mbarrier_arrive(&r.left);
}

/* Adjoints of the last state, `c`: D and -C. */
template <typename Block>
__device__ void init_adjoint(state_frag &adj, const state_frag &c,
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
__device__ float store_state0_grads(const state_frag &adj, const mn_importance_args &p,
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

/* S in front of the tile, from the state there and its adjoint, without sum C times ip: each lane's
 * share of it. */
__device__ __forceinline__ float gate_start_share(float ip, const state_frag &adj,
                                                  const state_frag &c) {
    float sums[4] = {};
#pragma unroll
    for (int i = 0; i < 8; i++) {
        float &sum = sums[i % 4];
        sum = fmaf(adj.M[i / 4][i % 4], c.M[i / 4][i % 4], sum);
        sum = fmaf(-adj.I[i / 4][i % 4], c.I[i / 4][i % 4] - ip, sum);
    }
    return (sums[0] + sums[1]) + (sums[2] + sums[3]);
}

/* Asks for the state in front of a tile, by one thread: it is there when the tile is. */
template <typename Block>
__device__ __forceinline__ void load_state(bwd_smem<Block> &r, int turn, int tile) {
#if __CUDA_ARCH__ >= 900
    const uint64_t states = (uint64_t)(unsigned)tile * r.from.between;
    mn_mbarrier_arrive_expect_tx(&r.full[turn], sizeof(r.states[turn]));
    mn_tma_load_1d(r.states[turn], r.from.states + states * (SETS * SET_STRIDE<Block>),
                   sizeof(r.states[turn]), &r.full[turn]);
#endif
}

/* The adjoints behind the last tile, from the state in front of it; returns this thread's part of
 * sum C there. */
template <typename Block>
__device__ __forceinline__ float init_last_tile(state_frag &adj, state_frag end,
                                            const tile<Block, BACKWARD_PASS> &in,
                                            const mn_importance_args &p, const place &at) {
    advance_tile<Block, BACKWARD_PASS>(end, in);
    init_adjoint<Block>(adj, end, p, at);
    float sum = 0.0f;
#pragma unroll
    for (int i = 0; i < 8; i++) sum -= adj.I[i / 4][i % 4];
    return sum;
}

/* x of shared memory where a register from one chunk to the next is worth more than a read. */
__device__ __forceinline__ unsigned read_again(const unsigned &x) {
    return *(const volatile unsigned *)&x;
}

/* A tile back: `adj` from behind it to in front of it. `third`: its room of what came; the one
 * before was that of the tile behind. */
template <typename Block>
__device__ __forceinline__ void tile_bwd(state_frag &adj, bwd_smem<Block> &r, launch_slice now,
                                         int third, int turn, int tile, int length,
                                         const float *front) {
    const unsigned thread = thread_rematerialized();
    const auto &table = r.table;
    token_scan<Block, BACKWARD_PASS> along(
        r.in[turn], table.rows[thread / 32 % Block::GROUPS][thread % 32],
        table.columns[thread / 32 / Block::GROUPS][thread % 32]);
    const tile_stage<Block, BACKWARD_PASS> &staged = r.staged[third];
    state_frag c;
    c.load(front, SET_STRIDE<Block>);
    adj.times(r.in[turn].rest);
    along.pass(c, 0, HALF);
    along.move(HALF);
    unsigned passed = 0;    // chunks: the compiler would keep a choice by `chunk` in local memory
#pragma unroll 1
    for (int chunk = 1; chunk >= 0; chunk--, passed = again(passed), along.move(-HALF)) {
        chunk_acc sums;
        const auto lane = r.table.lanes[threadIdx.x % 32];
        const auto warp = r.table.warps[threadIdx.x / 32];
        const unsigned slot = lane.factor + warp.slot, column = lane.factor + warp.column;
        const int from = third - chunk, first = (tile + chunk) * TOKENS;    // of the chunk behind
        const auto midway = [&]() {
            if (first >= length) return;
            store_chunk<Block>(r, now, r.staged[from < 0 ? 2 : from], chunk ^ 1, turn ^ chunk,
                               first, length - first);
        };
        if (chunk == 0) c.load(front, SET_STRIDE<Block>);
        if (read_again(r.in[turn].heads) == 0) {
            chunk_bwd<Block, false>(sums, adj, c, staged, chunk * HALF, slot, column, lane.one,
                                    along, midway);
        } else {
            chunk_bwd<Block, true>(sums, adj, c, staged, chunk * HALF, slot, column, lane.one,
                                   along, midway);
        }
        if (passed++ > 0) {
            const unsigned thread = thread_rematerialized();
            c.load(front, SET_STRIDE<Block>);
            (&r.starts[turn][0][0])[thread] = gate_start_share(r.to.ip, adj, c);
        }
        mn_mbarrier_wait(&r.sums_empty, chunk);
        store_sums<Block>(r, sums);
        mn_mbarrier_arrive(&r.sums_full);
    }
}

/* The sixteen warps' way. `turn`, `third`: which shared memory the next tile has; `phase`: of its
 * being ready. */
template <typename Block>
__device__ __forceinline__ void consumer_loop(bwd_smem<Block> &r, const mn_importance_args &p,
                                          const workspace &to, launch_slice now,
                                          int64_t n_rows) {
    int turn = 0, third = 0, phase = 0;
    for (int64_t item = blockIdx.y; item < mn_n_spans(p.call) * p.call.H; item += gridDim.y) {
        const place at = place::of(p, item);
        const int length = (int)at.span.length, n_tiles = (int)mn_cell_tiles(length);
        state_frag adj;
        float behind = 0.0f;    // this thread's part of sum C behind the last token
        meet(BAR_ALL, Block::THREADS + producer_warps<Block>::THREADS);
        if (n_tiles == 0) {
            load_first<Block, false>(adj, p, at);
            init_adjoint<Block>(adj, state_frag(adj), p, at);
        }
        for (int i = n_tiles - 1; i >= 0; i--) {
            const float *front = (const float *)&r.states[turn][0][thread_rematerialized()];
            mn_mbarrier_wait(&r.full[turn], phase);
            if (i == n_tiles - 1) {
                state_frag end;
                end.load(front, SET_STRIDE<Block>);
                behind = init_last_tile<Block>(adj, end, r.in[turn], p, at);
            }
            tile_bwd<Block>(adj, r, now, third, turn, i, length, front);
            phase ^= turn, turn ^= 1;
            third = third == 2 ? 0 : third + 1;
        }
        if (n_tiles > 0) {
            store_chunk<Block>(r, now, r.staged[third == 0 ? 2 : third - 1], 0, turn ^ 1, 0,
                               length);
        }
        float first = mn_warp_sum(store_state0_grads<Block>(adj, p, at));
        behind = mn_warp_sum(behind);
        if (threadIdx.x % 32 == 0) r.reduce[threadIdx.x / 32] = first;
        meet(BAR_CONSUMERS, Block::THREADS);
        if (threadIdx.x == 0) {
            first = 0.0f;
            for (int warp = 0; warp < Block::WARPS; warp++) first += r.reduce[warp];
        }
        meet(BAR_CONSUMERS, Block::THREADS);
        if (threadIdx.x % 32 == 0) r.reduce[threadIdx.x / 32] = behind;
        meet(BAR_CONSUMERS, Block::THREADS);
        if (threadIdx.x == 0) {
            behind = 0.0f;
            for (int warp = 0; warp < Block::WARPS; warp++) behind += r.reduce[warp];
            const partials_of<Block> parts(p, to, at, n_rows, gridDim.x * gridDim.z,
                                        blockIdx.z * gridDim.x + blockIdx.x);
            *parts.edge = make_float2(behind, first);
        }
        meet(BAR_ALL, Block::THREADS + producer_warps<Block>::THREADS);
    }
}

/* Asks for what the blocks before have of a tile's gradients: each thread for 128 bytes of a token,
 * rows of 64 numbers of dq or dk and, where they are added up here, of dv or db. */
template <typename Block>
__device__ __forceinline__ void prefetch_earlier(const grad_targets &to, launch_slice now, int tile,
                                                 int length) {
    static_assert(producer_warps<Block>::THREADS == 8 * TOKENS, "a thread for each 128 bytes");
    const unsigned own = producer_warps<Block>::own(), token = tile * TOKENS + own / 8;
    const unsigned kind = own / 2 % 2, first = own % 2 * 32;
    if (!now.accumulates() || token >= (unsigned)length) return;
    if (own / 4 % 2 == 0) to.key_partials[kind].prefetch_l2(token, (int)first);
    else if (now.accumulates_lines()) to.line_partials[kind].prefetch_l2(token, (int)first);
}

/* Sums over lanes of what warps have left of a tile whose gradients are stored: for the scan of
 * gates, of four tokens by each of the producer_warps, and S in front of it, of which that has a
 * place for each warp of the block: four of them here, three zeros. */
template <typename Block>
__device__ __forceinline__ void store_gate_parts(const bwd_smem<Block> &r, int turn, int tile,
                                                 int length) {
    static_assert(producer_warps<Block>::THREADS == 8 * TOKENS, "a warp for four tokens");
    const unsigned own = producer_warps<Block>::own(), four = own / 32 * 4, lane = own % 32;
    float x[8], share[4];
#pragma unroll
    for (int i = 0; i < 4; i++) {
        const float2 part = r.gate_parts[turn][four + i][lane];
        x[i] = part.x, x[4 + i] = part.y;
    }
    mn_load<4>(share, &r.starts[turn][0][0] + own * 4, 0);
    mn_cell_reduce_half<4>(x, 16);    // lanes of the lower half, and of the upper one
    mn_cell_reduce_half<2>(x, 8);
    mn_cell_reduce_half<1>(x, 4);
    float start = (share[0] + share[1]) + (share[2] + share[3]);
#pragma unroll
    for (int by = 16; by > 0; by /= 2) {
        if (by < 4) x[0] += __shfl_xor_sync(0xffffffffu, x[0], by);
        start += __shfl_xor_sync(0xffffffffu, start, by);
    }
    if (lane < 4) {
        float *to = r.to.along + (uint64_t)(unsigned)tile * r.to.tile_stride;
        to[four + lane] = lane == 0 ? start : 0.0f;
    }
    const unsigned token = (unsigned)tile * TOKENS + four + lane / 4 % 4;
    if (lane % 4 != 0 || token >= (unsigned)length) return;
    ((float *)(r.to.gates + token))[lane / 16] = x[0];
}

/* The producer_warps' way: while a tile is scanned, the one in front of it is made ready and the
 * next one is on its way. Both have the shared memory of tiles that have been left. */
template <typename Block>
__device__ __forceinline__ void producer_loop(bwd_smem<Block> &r, const mn_importance_args &p,
                                          const gates *decays, const workspace &to,
                                              launch_slice now,
                                          int64_t n_rows) {
    typedef tile_loader<Block, BACKWARD_PASS, producer_warps<Block>> next;
    int turn = 0, third = 0;
    for (int64_t item = blockIdx.y; item < mn_n_spans(p.call) * p.call.H; item += gridDim.y) {
        const place at = place::of(p, item);
        const int length = (int)at.span.length, n_tiles = (int)mn_cell_tiles(length);
        next::open(r.from, p, at, decays);
        if (next::is_first()) {
            const int64_t slot = mn_cell_first_slot(p.call, at.n, TOKENS);
            r.from.states = to.at[STATES] + state_at<Block>(slot * p.call.H + at.h);
            r.from.between = (unsigned)(p.call.H * gridDim.x * gridDim.z);
        }
        r.to.template open<Block>(p, to, at, now, n_rows);
        meet(BAR_ALL, Block::THREADS + producer_warps<Block>::THREADS);
        if (n_tiles > 0) next::fetch(r.staged[third], r.from, n_tiles - 1, length);
        for (int i = n_tiles - 1; i >= 0; i--) {
            const int after = third == 2 ? 0 : third + 1;
            next::wait();
            meet(BAR_PRODUCERS, next::THREADS);
            if (i + 2 < n_tiles) {
                mn_mbarrier_wait(&r.left, turn);
                store_gate_parts(r, turn, i + 2, length);
            }
            if (next::is_first()) load_state(r, turn, i);
            prefetch_earlier<Block>(r.to, now, i, length);
            if (i > 0) next::fetch(r.staged[after], r.from, i - 1, length);
            next::put(r.in[turn], r.staged[third], r.to.scale);
            mn_mbarrier_arrive(&r.full[turn]);
            turn ^= 1, third = after;
        }
        for (int i = min(n_tiles, 2) - 1; i >= 0; i--) {
            mn_mbarrier_wait(&r.left, turn ^ (i == 0));
            store_gate_parts(r, turn ^ (i == 0), i, length);
        }
        meet(BAR_ALL, Block::THREADS + producer_warps<Block>::THREADS);
    }
}

template <typename Block>
__global__ void __launch_bounds__(Block::THREADS + producer_warps<Block>::THREADS, 1)
importance_bwd_kernel(const __grid_constant__ mn_importance_args p, const gates *decays,
                      workspace to,
                launch_slice now, int64_t n_rows) {
    if (!now.is_active()) return;
    extern __shared__ float4 shared[];
    bwd_smem<Block> &r = *(bwd_smem<Block> *)shared;
    r.open();
    __syncthreads();
    if (threadIdx.x >= Block::THREADS) {    // of 96 registers that each thread has, for the others
#if MN_HAS_WGMMA
        mn_setmaxnreg_dec<32>();
#endif
        producer_loop<Block>(r, p, decays, to, now, n_rows);
    } else {
#if MN_HAS_WGMMA
        mn_setmaxnreg_inc<112>();
#endif
        consumer_loop<Block>(r, p, to, now, n_rows);
    }
}

}    // namespace mneme::importance::mma_path

#endif
