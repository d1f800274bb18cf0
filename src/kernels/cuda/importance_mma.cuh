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
 * is there is multiplied by A, which begins anew. The sums o = q'mu, dq = mu do, dk = (D' v + 2 k C'
 * b) / A, dv = D''k / A and db = C''k^2 / A take mu, D' and C' rounded to bf16. For dg,
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

#include "kernels/cuda/importance.cuh"

namespace importance::by_mma {

enum { GROUP = MN_CELL_GROUP, PAD = 8, LEAST_GATE = -104 };    // exp(-104) is 0

static __device__ const float deepest = 20.0f;    // -log of the smallest A

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

    /* One token: `rows` has this lane's share of the factor along the rows of the product, `columns`
     * that along the columns, as `tile` below keeps them. */
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

/* The same for the token of a lane, which is lane % TOKENS. */
struct gate {
    float a, forget, over, step, rest;
    unsigned heads;

    __device__ explicit gate(float g) {
        const int t = threadIdx.x % TOKENS;
        g = g < LEAST_GATE ? LEAST_GATE : g;
        a = expf(g);
        forget = -expm1f(g);
        float sum = g;
#pragma unroll
        for (int by = 1; by < TOKENS; by *= 2) {
            const float before = __shfl_up_sync(0xffffffffu, sum, by, TOKENS);
            if (t >= by) sum += before;
        }
        const int level = (int)(sum / -deepest);
        const int level_before = __shfl_up_sync(0xffffffffu, level, 1, TOKENS);
        heads = __ballot_sync(0xffffffffu, level != (t > 0 ? level_before : 0));
        heads &= (1u << TOKENS) - 1;
        const unsigned past = heads & ((2u << t) - 1);
        const float head = __shfl_sync(0xffffffffu, sum, past ? 31 - __clz(past) : 0, TOKENS);
        const float base = past ? head : 0.0f;
        const float base_before = __shfl_up_sync(0xffffffffu, base, 1, TOKENS);
        over = expf(base - sum);
        step = expf(sum - (t > 0 ? base_before : 0.0f));
        rest = expf(__shfl_sync(0xffffffffu, sum - base, TOKENS - 1, TOKENS));
    }

    __device__ void put(gates &to) const {
        const int t = threadIdx.x;
        if (t >= TOKENS) return;
        to.a[t] = a, to.forget[t] = forget, to.over[t] = over, to.step[t] = step;
        if (t == 0) to.rest = rest, to.heads = heads;
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
        own.put(to.g);
        const int lane = slots::share::row() % TOKENS;
        put_slots(to, came, __shfl_sync(0xffffffffu, own.over, lane, TOKENS), scale);
        put_columns(to, came);
        const int t = threadIdx.x;
        if (t >= TOKENS) return;
        const float fresh = t < n_rows ? fmaf(own.forget, ip, least_importance) : 0.0f;
        to.slots.put_last(t, split(fresh * own.over));
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

/* A lane's way through the tokens of a tile. HEADS: some of them may be heads; tiles without any have
 * a way of their own, in which the compiler may mix tokens. */
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
#pragma unroll
        for (int t = 0; t < HALF; t++) {
            along.advance(c, first + t);
            float mu[2][4];
            unsigned factor[4];
#pragma unroll
            for (int i = 0; i < 8; i++) {
                mu[i / 4][i % 4] = c.M[i / 4][i % 4] * mn_inverse(c.I[i / 4][i % 4]);
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
__global__ void __launch_bounds__(Block::THREADS, 3)
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
    float falls[TOKENS], fresh[TOKENS];        // X_{t+1} - X_t, sum C
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
    r.fresh[t] = fresh;
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
    parts[block * n_rows + row] = end - sum - r.in.g.a[t] * at.ip * r.fresh[t];
    return r.in.g.forget[t] * r.fresh[t];
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
