/* importance_tile.cuh - Palimpsa on tensor cores (see importance_mma.cuh): products, cells as their
 * results, and the numbers of a tile as their factors. */
#ifndef MN_KERNELS_CUDA_IMPORTANCE_TILE_CUH
#define MN_KERNELS_CUDA_IMPORTANCE_TILE_CUH

#include "kernels/cuda/importance.cuh"

namespace importance::by_mma {

enum {
    GROUP = MN_CELL_GROUP,
    PAD = 8,
    LEAST_GATE = -104,    // of which exp is 0
    DEEPEST = 20,         // -log of the smallest A
};

__device__ inline int row_lane() {
    return threadIdx.x % 32 / 4;
}

__device__ inline int column_lane() {
    return threadIdx.x % 4;
}

/* Number of this warp along the columns of its block. */
template <typename Block>
__device__ int across() {
    return threadIdx.x / 32 / Block::GROUPS;
}

/* ---- products -------------------------------------------------------------------------------- */

/* sum += A B of depth 8 */
__device__ __forceinline__ void add_shallow(float (&sum)[4], uint2 a, unsigned b) {
    asm("mma.sync.aligned.m16n8k8.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5}, {%6}, "
        "{%0, %1, %2, %3};"
        : "+f"(sum[0]), "+f"(sum[1]), "+f"(sum[2]), "+f"(sum[3])
        : "r"(a.x), "r"(a.y), "r"(b));
}

/* = A B of depth 8 */
__device__ __forceinline__ void put_shallow(float (&to)[4], uint2 a, unsigned b) {
    asm("mma.sync.aligned.m16n8k8.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5}, {%6}, "
        "{%7, %7, %7, %7};"
        : "=f"(to[0]), "=f"(to[1]), "=f"(to[2]), "=f"(to[3])
        : "r"(a.x), "r"(a.y), "r"(b), "f"(0.0f));
}

/* sum += A B of depth 16 */
__device__ __forceinline__ void add_product(float (&sum)[4], const unsigned (&a)[4], uint2 b) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, "
        "{%8, %9}, {%0, %1, %2, %3};"
        : "+f"(sum[0]), "+f"(sum[1]), "+f"(sum[2]), "+f"(sum[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b.x), "r"(b.y));
}

/* = A B of depth 16 */
__device__ __forceinline__ void put_product(float (&to)[4], const unsigned (&a)[4], uint2 b) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, "
        "{%8, %9}, {%10, %10, %10, %10};"
        : "=f"(to[0]), "=f"(to[1]), "=f"(to[2]), "=f"(to[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b.x), "r"(b.y), "f"(0.0f));
}

__device__ __forceinline__ unsigned pair_of(float first, float second) {
    unsigned pair;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(second), "f"(first));
    return pair;
}

__device__ __forceinline__ unsigned both(mn_bf16 x) {
    return __bfloat16_as_ushort(x) * 0x10001u;
}

/* Two numbers of bf16 whose sum is x. */
__device__ __forceinline__ unsigned split(float x) {
    const float high = __uint_as_float(pair_of(0.0f, x));
    return pair_of(high, x - high);
}

/* Two products' results as a factor of depth 16. */
__device__ __forceinline__ void factor_of(unsigned (&to)[4], const float (&x)[2][4]) {
#pragma unroll
    for (int i = 0; i < 4; i++) to[i] = pair_of(x[i / 2][i % 2 * 2], x[i / 2][i % 2 * 2 + 1]);
}

__device__ __forceinline__ unsigned turned(unsigned x) {
    unsigned y;
    asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(y) : "r"(x));
    return y;
}

/* The factor with its axes exchanged. */
__device__ __forceinline__ void turn(unsigned (&to)[4], const unsigned (&x)[4]) {
    to[0] = turned(x[0]), to[1] = turned(x[2]), to[2] = turned(x[1]), to[3] = turned(x[3]);
}

__device__ __forceinline__ uint2 only(bool wanted, uint2 x) {
    return wanted ? x : make_uint2(0, 0);
}

/* ---- cells ----------------------------------------------------------------------------------- */

/* M' and I' of a lane's cells, or their adjoints. */
struct cells {
    float M[2][4], I[2][4];

    __device__ __forceinline__ void times(float by) {
#pragma unroll
        for (int i = 0; i < 8; i++) M[i / 4][i % 4] *= by, I[i / 4][i % 4] *= by;
    }

    /* One token: `rows` has this lane's share of the factor along the rows of the product,
     * `columns` that along the columns, as `tile` below keeps them. */
    __device__ __forceinline__ void advance(uint2 rows, uint2 columns) {
        const int kind = column_lane();
        const uint2 mean = only(kind == 0, columns), weight = only(kind == 1 || kind == 2, columns);
        add_shallow(M[0], rows, mean.x);
        add_shallow(M[1], rows, mean.y);
        add_shallow(I[0], rows, weight.x);
        add_shallow(I[1], rows, weight.y);
    }

    /* Four numbers for each thread of a block, SETS times. */
    __device__ void load(const float *from, int64_t stride) {
#pragma unroll
        for (int set = 0; set < SETS; set++) {
            const float4 four = *(const float4 *)(from + set * stride);
            float(&x)[4] = set < 2 ? M[set % 2] : I[set % 2];
            x[0] = four.x, x[1] = four.y, x[2] = four.z, x[3] = four.w;
        }
    }

    __device__ void store(float *to, int64_t stride) const {
#pragma unroll
        for (int set = 0; set < SETS; set++) {
            const float(&x)[4] = set < 2 ? M[set % 2] : I[set % 2];
            *(float4 *)(to + set * stride) = make_float4(x[0], x[1], x[2], x[3]);
        }
    }
};

/* Where number i of tile n of this lane lies in (K,V); -1 outside. TURNED: rows are columns. */
template <typename Block, bool TURNED>
__device__ int64_t cell_at(const mn_call &call, int n, int i) {
    const int row = 2 * row_lane() + i / 2, column = 4 * column_lane() + i % 2 * 2 + n;
    const int64_t slot = Block::group() * GROUP + (TURNED ? column : row);
    const int64_t s = Block::slot0() + slot;
    const int64_t v = Block::column0() + across<Block>() * GROUP + (TURNED ? row : column);
    return s < call.K && v < call.V ? s * call.V + v : -1;
}

template <typename Block, bool TURNED>
__device__ void load_first(cells &c, const mn_importance_args &p, const place &at) {
    const float *mu0 = mn_row<float>(p.mu0, at.n, 0, at.h);
#pragma unroll
    for (int n = 0; n < 2; n++) {
#pragma unroll
        for (int i = 0; i < 4; i++) {
            const int64_t cell = cell_at<Block, TURNED>(p.call, n, i);
            c.I[n][i] = cell >= 0 ? first_importance(p, at, cell) : 1.0f;
            c.M[n][i] = cell >= 0 && mu0 ? mu0[cell] * c.I[n][i] : 0.0f;
        }
    }
}

/* ---- the numbers of a tile ------------------------------------------------------------------- */

/* What decays make of a tile: for each token a, what it leaves of the prior, 1 / A, and by what a
 * head multiplies all there is; A behind the last token. */
struct gates {
    float a[TOKENS], forget[TOKENS], over[TOKENS], step[TOKENS], rest;
    unsigned heads;    // bit t: token t is one
};

/* The same on its way there, by every warp for itself: a lane has token lane % TOKENS. */
struct gate {
    float g, sum, base, base_before, over;
    unsigned heads;

    __device__ explicit gate(float log) {
        const int t = threadIdx.x % TOKENS;
        g = sum = log < LEAST_GATE ? LEAST_GATE : log;
#pragma unroll
        for (int by = 1; by < TOKENS; by *= 2) {
            const float before = __shfl_up_sync(0xffffffffu, sum, by, TOKENS);
            if (t >= by) sum += before;
        }
        const int level = (int)(sum * (-1.0f / DEEPEST));
        const int level_before = __shfl_up_sync(0xffffffffu, level, 1, TOKENS);
        heads = __ballot_sync(0xffffffffu, level != (t > 0 ? level_before : 0));
        heads &= (1u << TOKENS) - 1;
        const unsigned past = heads & ((2u << t) - 1);
        const float head = __shfl_sync(0xffffffffu, sum, past ? 31 - __clz(past) : 0, TOKENS);
        base = past ? head : 0.0f;
        base_before = __shfl_up_sync(0xffffffffu, base, 1, TOKENS);
        over = expf(base - sum);
    }

    /* Four warps share the work. Returns whether this lane is to put what is fresh in its token. */
    __device__ bool put(gates &to) const {
        const int t = threadIdx.x % 32, warp = threadIdx.x / 32;
        if (t >= TOKENS) return false;
        if (warp == 0) to.a[t] = expf(g), to.over[t] = over;
        if (warp == 1) to.forget[t] = -expm1f(g);
        if (warp == 2) to.step[t] = expf(sum - (t > 0 ? base_before : 0.0f));
        if (warp == 2 && t == TOKENS - 1) to.rest = expf(sum - base), to.heads = heads;
        return warp == 3;
    }
};

/* Factors of depth 8 for each token: N_KINDS rows of a number for each of COUNT slots or columns,
 * then two numbers for all of them. Lane kinds 0, 1, 3 take a row, 2 the last; forward has no third
 * row. Every word is a pair of bf16:
 *
 *   slots     k / A    k^2 / A    scale q    (1 - a) ip / A    in two parts
 *   columns   v        b          do         1                 twice */
template <int COUNT, int N_KINDS>
struct alignas(16) factors {
    static constexpr int PITCH = COUNT + PAD;
    struct alignas(16) {
        unsigned at[N_KINDS * PITCH + PAD];
    } tokens[TOKENS];

    /* Of 16 neighbours from `base` on, those of this lane: row_lane(), kind column_lane(). */
    __device__ const unsigned *mine(int base) const {
        const int kind = column_lane();
        if (kind == 2) return tokens[0].at + N_KINDS * PITCH;
        return tokens[0].at + (kind == 3 ? N_KINDS == 3 ? 2 : 0 : kind) * PITCH + base +
               2 * row_lane();
    }

    __device__ static uint2 get(const unsigned *mine, int t) {
        constexpr int record = sizeof(tokens[0]) / sizeof(unsigned);
        return *(const uint2 *)(mine + t * record);
    }

    template <int n>
    __device__ void put(int t, int kind, int at, const unsigned (&x)[n]) {
        mn_pack<unsigned, n> pack;
#pragma unroll
        for (int i = 0; i < n; i++) pack.at[i] = x[i];
        *(mn_pack<unsigned, n> *)(tokens[t].at + kind * PITCH + at) = pack;
    }

    __device__ void put_last(int t, unsigned x) {
        *(uint2 *)(tokens[t].at + N_KINDS * PITCH) = make_uint2(x, x);
    }
};

/* Factors of depth 16, N_KINDS vectors for each token. Of four neighbours, numbers 0 and 2 share
 * a word, and 1 and 3. */
template <int COUNT, int N_KINDS>
struct alignas(16) vectors {
    static constexpr int PITCH = COUNT + 2 * PAD;
    mn_bf16 at[TOKENS][N_KINDS][PITCH];

    __device__ static int place_of(int i) {
        return i / 4 * 4 + i % 2 * 2 + i / 2 % 2;
    }

    /* What this lane needs of 16 neighbours from `base` on at token t + first. */
    __device__ const mn_bf16 *mine(int base, int first, int kind) const {
        return at[first][kind] + base + 4 * column_lane();
    }

    __device__ static uint2 get(const mn_bf16 *mine, int t) {
        return *(const uint2 *)(mine + t * N_KINDS * PITCH);
    }

    template <int n>
    __device__ void put(int t, int kind, int first, const mn_bf16 (&x)[n]) {
        if constexpr (n == 4) {
            const mn_pack<mn_bf16, 4> pack = { { x[0], x[2], x[1], x[3] } };
            *(mn_pack<mn_bf16, 4> *)(at[t][kind] + first) = pack;
        } else {
#pragma unroll
            for (int i = 0; i < n; i++) at[t][kind][place_of(first + i)] = x[i];
        }
    }

    __device__ float number(int t, int kind, int i) const {
        return mn_float(at[t][kind][place_of(i)]);
    }
};

enum pass { STATES_PASS, FORWARD_PASS, BACKWARD_PASS };
enum { K_FACTOR, WEIGHT_FACTOR, Q_FACTOR };
enum { V_FACTOR, B_FACTOR, COT_FACTOR };
enum { Q_VECTOR = 0, K_VECTOR = 0, SQUARE_VECTOR };
enum { COT_VECTOR, V_VECTOR, B_VECTOR, ONES_VECTOR };

/* COUNT numbers of each token of a tile on their way to shared memory, which they reach as they are
 * stored: each thread has neighbours of one token, and reads what it has copied itself. */
template <int COUNT, int THREADS>
struct copied {
    typedef mn_cell_share<COUNT, THREADS> share;
    static constexpr int EACH = share::EACH;
    typedef mn_pack<mn_bf16, EACH> pack;
    const mn_bf16 *from;    // this thread's first number in the sequence
    int inside;             // how many there are from it on; EACH + 1: EACH, as one pack

    /* Numbers base, base + 1, ... of head h of a sequence, of which the tensor has `count`. */
    __device__ void open(const mn_in &view, const mn_span &span, int64_t h, int64_t base,
                         int64_t count) {
        const int64_t i = base + share::place();
        inside = view.data ? (int)max(min(count - i, (int64_t)EACH), (int64_t)0) : 0;
        from = (const mn_bf16 *)view.data + span.b * view.stride[0] +
               (span.t0 + share::row()) * view.stride[1] + h * view.stride[2] + i;
        const int64_t apart = view.stride[1] * (int64_t)sizeof(mn_bf16);
        if (inside == EACH && ((uintptr_t)from | apart) % sizeof(pack) == 0) inside++;
    }

    __device__ __forceinline__ void copy(pack (&to)[THREADS], const mn_in &view,
                                         const mn_cell_tile &tile) const {
        pack &own = to[threadIdx.x];
        const mn_bf16 *at = from + tile.first * view.stride[1];
        if (inside > EACH && share::row() < tile.n_rows) {
            asm volatile("cp.async.ca.shared.global [%0], [%1], %2;" ::"r"(
                             (unsigned)__cvta_generic_to_shared(&own)),
                         "l"(at), "n"((int)sizeof(pack)) : "memory");
            return;
        }
#pragma unroll
        for (int n = 0; n < EACH; n++) {
            own.at[n] = n < inside && share::row() < tile.n_rows ? at[n] : mn_bf16(0.0f);
        }
    }
};

template <typename Block, pass PASS>
struct tile {
    static constexpr bool BACK = PASS == BACKWARD_PASS;
    factors<Block::SLOTS, BACK ? 3 : 2> slots;
    factors<Block::COLUMNS, BACK ? 3 : 2> columns;
    vectors<Block::SLOTS, BACK ? 2 : 1> slot_vectors;
    vectors<BACK ? Block::COLUMNS : 16, BACK ? 4 : 1> column_vectors;
    gates g;

    /* What does not change from tile to tile. */
    __device__ void open() {
        const mn_bf16 one = __ushort_as_bfloat16(0x3f80);
        if (threadIdx.x < TOKENS) columns.put_last(threadIdx.x, both(one));
        if constexpr (BACK) {
            for (int i = threadIdx.x; i < TOKENS * Block::COLUMNS; i += Block::THREADS) {
                column_vectors.at[i / Block::COLUMNS][ONES_VECTOR][i % Block::COLUMNS] = one;
            }
        }
    }
};

/* A tile as it comes from memory. */
template <typename Block, pass PASS>
struct arrivals {
    typedef typename copied<Block::SLOTS, Block::THREADS>::pack slots;
    typedef typename copied<Block::COLUMNS, Block::THREADS>::pack columns;
    slots k[Block::THREADS], q[PASS == STATES_PASS ? 1 : Block::THREADS];
    columns v[Block::THREADS], b[Block::THREADS];
    columns cot[PASS == BACKWARD_PASS ? Block::THREADS : 1];
};

/* Fetches tiles. */
template <typename Block, pass PASS>
struct fetched {
    static constexpr bool BACK = PASS == BACKWARD_PASS;
    typedef copied<Block::SLOTS, Block::THREADS> slots;
    typedef copied<Block::COLUMNS, Block::THREADS> columns;
    slots k, q;
    columns v, b, cot;
    float g;
    int n_rows;

    __device__ void open(const mn_importance_args &p, const place &at) {
        const int64_t s0 = Block::slot0(), v0 = Block::column0(), K = p.call.K, V = p.call.V;
        k.open(p.k, at.span, at.h, s0, K);
        if (PASS != STATES_PASS) q.open(p.q, at.span, at.h, s0, K);
        v.open(p.v, at.span, at.h, v0, V);
        b.open(p.b, at.span, at.h, v0, V);
        if (BACK) cot.open(p.cot.o, at.span, at.h, v0, V);
    }

    __device__ __forceinline__ void fetch(arrivals<Block, PASS> &to, const mn_importance_args &p,
                                          const place &at, const mn_cell_tile &from) {
        k.copy(to.k, p.k, from);
        if constexpr (PASS != STATES_PASS) q.copy(to.q, p.q, from);
        v.copy(to.v, p.v, from);
        b.copy(to.b, p.b, from);
        if constexpr (BACK) cot.copy(to.cot, p.cot.o, from);
        const int t = threadIdx.x % TOKENS;
        n_rows = from.n_rows;
        g = 0.0f;
        if (t >= n_rows) return;
        g = *mn_row<float>(p.g, from.span.b, from.span.t0 + from.first + t, at.h);
    }

    __device__ void put(tile<Block, PASS> &to, const arrivals<Block, PASS> &came, float ip,
                        float scale) const {
        asm volatile("cp.async.wait_all;" ::: "memory");
        const gate own(g);
        const int t = threadIdx.x % TOKENS, lane = slots::share::row() % TOKENS;
        if (own.put(to.g)) {
            const float fresh = t < n_rows ? fmaf(-expm1f(own.g), ip, least_importance) : 0.0f;
            to.slots.put_last(t, split(fresh * own.over));
        }
        put_slots(to, came, __shfl_sync(0xffffffffu, own.over, lane, TOKENS), scale);
        put_columns(to, came);
    }

private:
    __device__ void put_slots(tile<Block, PASS> &to, const arrivals<Block, PASS> &came, float over,
                              float scale) const {
        constexpr int n = slots::EACH;
        const int t = slots::share::row(), first = slots::share::place();
        const typename slots::pack keys = came.k[threadIdx.x];
        const typename slots::pack queries = came.q[PASS == STATES_PASS ? 0 : threadIdx.x];
        unsigned key[n], weight[n], query[n];
        mn_bf16 squares[n];
#pragma unroll
        for (int i = 0; i < n; i++) {
            const float x = mn_float(keys.at[i]);
            key[i] = split(x * over);
            weight[i] = split(x * x * over);
            squares[i] = __float2bfloat16_rn(x * x);
            if (BACK) query[i] = split(scale * mn_float(queries.at[i]));
        }
        to.slots.put(t, K_FACTOR, first, key);
        to.slots.put(t, WEIGHT_FACTOR, first, weight);
        if (PASS == FORWARD_PASS) to.slot_vectors.put(t, Q_VECTOR, first, queries.at);
        if (!BACK) return;
        to.slots.put(t, Q_FACTOR, first, query);
        to.slot_vectors.put(t, K_VECTOR, first, keys.at);
        to.slot_vectors.put(t, SQUARE_VECTOR, first, squares);
    }

    __device__ void put_columns(tile<Block, PASS> &to, const arrivals<Block, PASS> &came) const {
        constexpr int n = columns::EACH;
        const int t = columns::share::row(), first = columns::share::place();
        const typename columns::pack values = came.v[threadIdx.x], writes = came.b[threadIdx.x];
        const typename columns::pack cots = came.cot[BACK ? threadIdx.x : 0];
        unsigned value[n], write[n], read[n];
#pragma unroll
        for (int i = 0; i < n; i++) {
            value[i] = both(values.at[i]), write[i] = both(writes.at[i]);
            if (BACK) read[i] = both(cots.at[i]);
        }
        to.columns.put(t, V_FACTOR, first, value);
        to.columns.put(t, B_FACTOR, first, write);
        if (!BACK) return;
        to.columns.put(t, COT_FACTOR, first, read);
        to.column_vectors.put(t, COT_VECTOR, first, cots.at);
        to.column_vectors.put(t, V_VECTOR, first, values.at);
        to.column_vectors.put(t, B_VECTOR, first, writes.at);
    }
};

/* A lane's way through the tokens of a tile. HEADS: some of them may be heads; tiles without any
 * have a way of their own, in which the compiler may mix tokens. */
template <typename Block, pass PASS, bool HEADS>
struct walk {
    typedef decltype(tile<Block, PASS>::slots) slot_factors;
    typedef decltype(tile<Block, PASS>::columns) column_factors;
    const gates &g;
    const unsigned *slots, *columns;

    __device__ explicit walk(const tile<Block, PASS> &in) :
        g(in.g), slots(in.slots.mine(Block::group() * GROUP)),
        columns(in.columns.mine(across<Block>() * GROUP)) {}

    /* At token t, going either way. */
    __device__ __forceinline__ void head(cells &c, int t) const {
        if (HEADS && g.heads >> t & 1) c.times(g.step[t]);
    }

    __device__ __forceinline__ uint2 slot(int t) const {
        return slot_factors::get(slots, t);
    }

    __device__ __forceinline__ uint2 column(int t) const {
        return column_factors::get(columns, t);
    }

    __device__ __forceinline__ void advance(cells &c, int t) const {
        head(c, t);
        if (PASS == FORWARD_PASS) c.advance(column(t), slot(t));
        else c.advance(slot(t), column(t));
    }
};

}    // namespace importance::by_mma

#endif
