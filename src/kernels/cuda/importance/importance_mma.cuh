/* importance_mma.cuh - Palimpsa in bf16: tensor cores do whatever is not one cell's own.
 *
 * Within a tile of 16 tokens, M and I are kept divided by A, the product of the decays so far, so
 * that nothing decays:
 *
 *   M' <- M' + (k / A) v        I' <- I' + (k^2 / A) b + ((1 - a) ip / A) 1        mu = M' / I'
 *
 * A token is then one product of depth 8 onto M' and I', whose factors are split into two numbers
 * of bf16. Where A would get smaller than exp(-20), a token is a head: what is there is multiplied
 * by A, which begins anew. o = q mu takes mu rounded to bf16, eight tokens to a product's result.
 *
 * Here: forward, and the states in front of tiles, from which importance_bwd_mma.cuh goes back. */
#ifndef MN_KERNELS_CUDA_IMPORTANCE_IMPORTANCE_MMA_CUH
#define MN_KERNELS_CUDA_IMPORTANCE_IMPORTANCE_MMA_CUH

#include "kernels/cuda/importance/importance.cuh"
#include "kernels/cuda/prim/mbarrier.cuh"
#include "kernels/cuda/prim/mma_bf16.cuh"
#include "kernels/cuda/prim/sync.cuh"
#include "kernels/cuda/prim/tma.cuh"

namespace mneme::importance::mma_path {

/* Palimpsa on tensor cores (see importance_mma.cuh): products, cells as their
 * results, and the numbers of a tile as their factors.
 *
 * A warp has a group of 16 slots by a group of 16 columns. Row r of the lower or upper half of a
 * product is neighbour 4 (r / 2) + r % 2 of its group, 2 more in the upper half; column n of the
 * two tiles of a product likewise. What a lane has of a row is thus 4 neighbours, 2 of them a pair
 * that is also a pair in memory. */

enum {
    GROUP = MN_CELL_GROUP,
    PAD = 8,
    MIN_LOG_GATE = -104,    // of which exp is 0
    MAX_LOG_DECAY = 20,         // -log of the smallest A
    COPY_VEC = 8,            // numbers that one copy brings
};

__device__ inline int row_lane() {
    return threadIdx.x % 32 / 4;
}

__device__ inline int column_lane() {
    return threadIdx.x % 4;
}

/* Which neighbour of its group row_lane() is, in the lower (0) or upper (1) half. */
__device__ inline int interleaved_row(int half) {
    return row_lane() / 2 * 4 + 2 * half + row_lane() % 2;
}

/* x where what follows from it is not worth a register from one tile to the next: the compiler
 * cannot tell that it stays the same. */
__device__ __forceinline__ unsigned again(unsigned x) {
    asm volatile("" : "+r"(x));
    return x;
}

__device__ __forceinline__ unsigned thread_rematerialized() {
    return again(threadIdx.x);
}

/* A block: GROUPS of its warps lie along the slots, the others along the columns. KEYS_READY:
 * forward it takes the factors of keys from memory, where a kernel has put them for all of its
 * kind: blocks of few columns would each make the same ones, which took most of the time where
 * tiles are only passed. */
template <int GROUPS_, int WARPS_, bool KEYS_READY_ = false>
struct block {
    static constexpr int GROUPS = GROUPS_, WARPS = WARPS_, ACROSS = WARPS / GROUPS;
    static constexpr bool KEYS_READY = KEYS_READY_;
    static constexpr int THREADS = 32 * WARPS, SLOTS = GROUP * GROUPS, COLUMNS = GROUP * ACROSS;
    static constexpr int PER_PROCESSOR = 16 / WARPS;    // as registers go forward and back

    /* Its first slot and column. */
    __device__ static int64_t slot0() {
        return blockIdx.z * (int64_t)SLOTS;
    }

    __device__ static int64_t column0() {
        return blockIdx.x * (int64_t)COLUMNS;
    }

    /* Number of this warp along the slots and the columns, and the first it has of them. */
    __device__ static int group() {
        return threadIdx.x / 32 % GROUPS;
    }

    __device__ static int across() {
        return threadIdx.x / 32 / GROUPS;
    }

    __device__ static int slot() {
        return group() * GROUP;
    }

    __device__ static int column() {
        return across() * GROUP;
    }
};

/* Which threads of a block load its tiles: all, or those HELPERS behind its warps. */
template <typename Block>
struct all_warps {
    static constexpr int THREADS = Block::THREADS;

    __device__ static unsigned own() {
        return thread_rematerialized() % THREADS;
    }
};

template <typename Block>
struct producer_warps {    // beside eight warps there is room for as many
    static constexpr int THREADS = Block::WARPS < 16 ? 256 : 128;

    __device__ static unsigned own() {    // masked: the compiler then knows how large it gets
        static_assert(Block::THREADS % THREADS == 0, "they begin at a multiple of their number");
        return thread_rematerialized() % THREADS;
    }
};

/* ---- products -------------------------------------------------------------------------------- */

/* sum += A B of depth 16 */
__device__ __forceinline__ void mma_k16(float (&sum)[4], const unsigned (&a)[4], uint2 b) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, "
        "{%8, %9}, {%0, %1, %2, %3};"
        : "+f"(sum[0]), "+f"(sum[1]), "+f"(sum[2]), "+f"(sum[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b.x), "r"(b.y));
}

/* Column t of A B of depth 16, to those lanes of `to` that have it: a product that adds to nothing
 * reads fewer registers than one onto a sum, of which B would have zeros in all other columns. */
__device__ __forceinline__ void mma_k16_column(float (&to)[4], const unsigned (&a)[4], uint2 b,
                                               int t) {
    float all[4];
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, "
        "{%8, %9}, {%10, %10, %10, %10};"
        : "=f"(all[0]), "=f"(all[1]), "=f"(all[2]), "=f"(all[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b.x), "r"(b.y), "f"(0.0f));
    if (column_lane() != t / 2) return;
    to[t % 2] = all[t % 2], to[2 + t % 2] = all[2 + t % 2];
}

__device__ __forceinline__ float low_half(unsigned pair) {
    return __uint_as_float(pair << 16);
}

__device__ __forceinline__ float high_half(unsigned pair) {
    return __uint_as_float(pair & 0xffff0000u);
}

/* x y for both numbers of a pair */
__device__ __forceinline__ unsigned bf16x2_mul(unsigned x, unsigned y) {
    unsigned z;
    asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(z) : "r"(x), "r"(y), "r"(0x80008000u));
    return z;
}

__device__ __forceinline__ uint2 bf16x2_mul(uint2 x, unsigned y) {
    return make_uint2(bf16x2_mul(x.x, y), bf16x2_mul(x.y, y));
}

/* The first, and the second, number of a pair twice. */
__device__ __forceinline__ unsigned broadcast_low(unsigned pair) {
    return __byte_perm(pair, 0, 0x1010);
}

__device__ __forceinline__ unsigned broadcast_high(unsigned pair) {
    return __byte_perm(pair, 0, 0x3232);
}

/* Two products' results as a factor of depth 16. */
__device__ __forceinline__ void frag_of_acc(unsigned (&to)[4], const float (&x)[4],
                                          const float (&y)[4]) {
    to[0] = mn_bf16x2_of(x[0], x[1]), to[1] = mn_bf16x2_of(x[2], x[3]);
    to[2] = mn_bf16x2_of(y[0], y[1]), to[3] = mn_bf16x2_of(y[2], y[3]);
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

__device__ __forceinline__ uint2 select_or_zero(bool wanted, uint2 x) {
    return wanted ? x : make_uint2(0, 0);
}

/* ---- cells ----------------------------------------------------------------------------------- */

/* M' and I' of a lane's cells, or their adjoints. */
struct state_frag {
    float M[2][4], I[2][4];

    __device__ __forceinline__ void times(float by) {
#pragma unroll
        for (int i = 0; i < 8; i++) M[i / 4][i % 4] *= by, I[i / 4][i % 4] *= by;
    }

    /* Four numbers for each thread of a block, SETS times. */
    __device__ void load(const float *from, int stride) {
#pragma unroll
        for (int set = 0; set < SETS; set++) {
            const float4 four = *(const float4 *)(from + set * stride);
            float(&x)[4] = set < 2 ? M[set % 2] : I[set % 2];
            x[0] = four.x, x[1] = four.y, x[2] = four.z, x[3] = four.w;
        }
    }

    __device__ void store(float *to, int stride) const {
#pragma unroll
        for (int set = 0; set < SETS; set++) {
            const float(&x)[4] = set < 2 ? M[set % 2] : I[set % 2];
            *(float4 *)(to + set * stride) = make_float4(x[0], x[1], x[2], x[3]);
        }
    }
};

/* Where this block's state number `item` begins among those of all blocks: sets of four numbers for
 * each thread, SET_STRIDE<Block> apart. */
template <typename Block>
constexpr int SET_STRIDE = 4 * Block::THREADS;

template <typename Block>
__device__ int64_t state_at(int64_t item) {
    const int64_t blocks = gridDim.x * (int64_t)gridDim.z;
    const int64_t block = blockIdx.z * (int64_t)gridDim.x + blockIdx.x;
    return (item * blocks + block) * SETS * SET_STRIDE<Block>;
}

/* Where number i of tile n of this lane lies in (K,V); -1 outside. TRANS: rows are columns. */
template <typename Block, bool TRANS>
__device__ int64_t cell_at(const mn_call &call, int n, int i) {
    const int row = interleaved_row(i / 2), column = 4 * column_lane() + 2 * n + i % 2;
    const int64_t s = Block::slot0() + Block::slot() + (TRANS ? column : row);
    const int64_t v = Block::column0() + Block::column() + (TRANS ? row : column);
    return s < call.K && v < call.V ? s * call.V + v : -1;
}

template <typename Block, bool TRANS>
__device__ void load_first(state_frag &c, const mn_importance_args &p, const place &at) {
    const float *mu0 = mn_row<float>(p.mu0, at.n, 0, at.h);
#pragma unroll
    for (int n = 0; n < 2; n++) {
#pragma unroll
        for (int i = 0; i < 4; i++) {
            const int64_t cell = cell_at<Block, TRANS>(p.call, n, i);
            c.I[n][i] = cell >= 0 ? first_importance(p, at, cell) : 1.0f;
            c.M[n][i] = cell >= 0 && mu0 ? mu0[cell] * c.I[n][i] : 0.0f;
        }
    }
}

/* ---- decays of a tile ------------------------------------------------------------------------ */

/* What decays make of a tile: for each token a, what it leaves of the prior, 1 / A, the logarithm
 * of what heads up to it have taken out of A, by what a head multiplies all there is, and what is
 * fresh in two parts; A behind the last token. They lie in work space for all tiles of a head. */
struct alignas(16) gates {
    float a[TOKENS], forget[TOKENS], over[TOKENS], base[TOKENS], step[TOKENS];
    unsigned fresh[TOKENS];
    float rest;
    unsigned heads;        // bit t: token t is one
    float early, whole;    // sums of what is fresh, of the first half and of all
};

enum { GATES_PER_BLOCK = 8 };    // half a warp for each

/* Heads among the tokens of half a warp, from the sums of their logarithms; base is the last head's
 * sum or 0, `before` that of the token before. */
__device__ __forceinline__ unsigned find_rescales(float &base, float &before, float sum) {
    const int t = threadIdx.x % TOKENS;
    const int level = (int)(sum * (-1.0f / MAX_LOG_DECAY));
    const int level_before = __shfl_up_sync(0xffffffffu, level, 1, TOKENS);
    unsigned heads = __ballot_sync(0xffffffffu, level != (t > 0 ? level_before : 0));
    heads = heads >> (threadIdx.x % 32 / TOKENS * TOKENS) & ((1u << TOKENS) - 1);
    const unsigned past = heads & ((2u << t) - 1);
    const float head = __shfl_sync(0xffffffffu, sum, past ? 31 - __clz(past) : 0, TOKENS);
    base = past ? head : 0.0f;
    before = __shfl_up_sync(0xffffffffu, base, 1, TOKENS);
    if (t == 0) before = 0.0f;
    return heads;
}

/* The gates of a tile of head h by half a warp, where M' and I' are counted in 1 / unit; `to`:
 * nullptr if it has none. */
__device__ inline void make_gates(gates *to, const mn_importance_args &p, const mn_tile_span &tile,
                                  int64_t h, float unit) {
    const int t = threadIdx.x % TOKENS;
    const bool exists = t < tile.n_rows;
    float log = 0.0f, before;
    if (exists) log = *mn_row<float>(p.g, tile.span.b, tile.span.t0 + tile.first + t, h);
    log = log < MIN_LOG_GATE ? MIN_LOG_GATE : log;
    float sum = log, base;
#pragma unroll
    for (int by = 1; by < TOKENS; by *= 2) {
        const float earlier = __shfl_up_sync(0xffffffffu, sum, by, TOKENS);
        if (t >= by) sum += earlier;
    }
    const unsigned heads = find_rescales(base, before, sum);
    const float forget = -expm1f(log), over = expf(base - sum);
    const float fresh = exists ? over * fmaf(forget * unit, *mn_row<float>(p.ip, 0, 0, h),
                                             min_importance) :
                                 0.0f;
    float so_far = fresh;
#pragma unroll
    for (int by = 1; by < TOKENS; by *= 2) {
        const float earlier = __shfl_up_sync(0xffffffffu, so_far, by, TOKENS);
        if (t >= by) so_far += earlier;
    }
    if (!to) return;
    to->a[t] = expf(log), to->forget[t] = forget, to->over[t] = over * unit;
    to->base[t] = base, to->step[t] = expf(sum - before);
    to->fresh[t] = mn_bf16_split(fresh);
    if (t == HALF - 1) to->early = so_far;
    if (t == TOKENS - 1) to->rest = expf(sum - base), to->heads = heads, to->whole = so_far;
}

/* Those of all tiles: head h's in tile slot i are number i H + h. */
static __global__ void __launch_bounds__(GATES_PER_BLOCK *TOKENS)
importance_gates_kernel(const __grid_constant__ mn_importance_args p, gates *all, float unit) {
    const int64_t count = mn_tile_slots(p.call, TOKENS) * p.call.H;
    const int64_t item = blockIdx.x * (int64_t)GATES_PER_BLOCK + threadIdx.x / TOKENS;
    mn_tile_span tile = {};
    if (item < count) tile = mn_tile_at(p.call, TOKENS, item / p.call.H);
    make_gates(item < count ? all + item : nullptr, p, tile, item % p.call.H, unit);
}

/* ---- numbers of a tile ----------------------------------------------------------------------- */

enum pass { STATES_PASS, FORWARD_PASS, BACKWARD_PASS };
enum { KEY_FACTOR, WEIGHT_FACTOR, QUERY_FACTOR };    // of slots
enum { VALUE_FACTOR, WRITE_FACTOR, COT_FACTOR };     // of columns

/* Factors of depth 8 for each token: rows of a word for each of COUNT slots or columns, then a word
 * for all of them, then zeros. Depths 0 and 1 take the first row, 2 and 3 the second, 4 and 5 the
 * last word, 6 and 7 the third row, which only going back has:
 *
 *   slots     k / A    k^2 / A    (1 - a) ip / A    scale q    in two parts
 *   columns   v        b          1                 do         twice
 *
 * Words of four neighbours lie in the order 0, 2, 1, 3, so that a lane's two rows are together.
 *
 * Half a warp reads eight words of each row at a time, rows being 8 banks apart. The last word and
 * zeros have copies, of which one lies in banks that these reads leave free. */
template <int COUNT, int N_ROWS>
struct alignas(16) factors {
    static constexpr int PITCH = COUNT + PAD, LAST = N_ROWS * PITCH;
    static constexpr int COPIES = N_ROWS == 3 ? 4 : 2, BETWEEN = 32 / COPIES;
    struct alignas(16) {
        unsigned at[LAST + (N_ROWS == 3 ? 32 : 24)];    // tokens are 8 or 24 banks apart
    } tokens[TOKENS];

    __device__ const unsigned *row(int number, int base) const {
        return tokens[0].at + number * PITCH + base + 2 * row_lane();
    }

    /* The copy for a lane whose rows begin at `base`. */
    __device__ const unsigned *last(int base) const {
        const int bank = base + row_lane() / 4 * 8;
        return tokens[0].at + LAST + (N_ROWS == 3 ? bank % 32 : (bank + 8) % 32 / 16 * 16);
    }

    /* A lane's share of the rows of a product, of 16 neighbours from `base` on. */
    __device__ const unsigned *rows(int base) const {
        if (column_lane() < 2) return row(column_lane(), base);
        return N_ROWS == 3 && column_lane() == 3 ? row(2, base) : last(base);
    }

    /* Of its columns, for M', for I' and for what is read. */
    __device__ const unsigned *mean(int base) const {
        return column_lane() == 0 ? row(0, base) : last(base) + 2;
    }

    __device__ const unsigned *weight(int base) const {
        return column_lane() == 1 ? row(1, base) : last(base) + (column_lane() & 1) * 2 +
                                                       (column_lane() == 0) * 2;
    }

    __device__ const unsigned *read(int base) const {
        return column_lane() == 3 ? row(2, base) : last(base) + 2;
    }

    /* Of four tokens, one for each depth. */
    __device__ const unsigned *four(int number, int base) const {
        return row(number, base) + column_lane() * (int)(sizeof(tokens[0]) / sizeof(unsigned));
    }

    __device__ static uint2 get(const unsigned *mine, int t) {
        constexpr int record = sizeof(tokens[0]) / sizeof(unsigned);
        return *(const uint2 *)(mine + t * record);
    }

    /* Four neighbours from `first` on. */
    __device__ void put(int t, int number, int first, const unsigned (&x)[4]) {
        *(uint4 *)(tokens[t].at + number * PITCH + first) = make_uint4(x[0], x[2], x[1], x[3]);
    }

    __device__ void store_last(int t, unsigned x) {
#pragma unroll
        for (int i = 0; i < COPIES; i++) {
            *(uint2 *)(tokens[t].at + LAST + i * BETWEEN) = make_uint2(x, x);
        }
    }

    __device__ void clear() {
        if (threadIdx.x < TOKENS) {
#pragma unroll
            for (int i = 0; i < COPIES; i++) {
                *(uint2 *)(tokens[threadIdx.x].at + LAST + i * BETWEEN + 2) = make_uint2(0, 0);
            }
        }
    }
};

__device__ __forceinline__ void unpack_bf16(float (&x)[4], uint2 pairs) {
    x[0] = low_half(pairs.x), x[1] = high_half(pairs.x);
    x[2] = low_half(pairs.y), x[3] = high_half(pairs.y);
}

/* Factors of four neighbours among token t's keys; `over`: 1 / A. */
template <typename Factors>
__device__ __forceinline__ void put_keys(Factors &to, uint2 keys, float over, int t, int slot) {
    float x[4];
    unpack_bf16(x, keys);
    unsigned key[4], weight[4];
#pragma unroll
    for (int i = 0; i < 4; i++) {
        const float scaled = x[i] * over;
        key[i] = mn_bf16_split(scaled);
        weight[i] = mn_bf16_split(x[i] * scaled);
    }
    to.put(t, KEY_FACTOR, slot, key);
    to.put(t, WEIGHT_FACTOR, slot, weight);
}

/* Whether a pass finds the factors of slots made. */
template <typename Block, pass PASS>
constexpr bool TAKES_KEYS = Block::KEYS_READY && PASS == FORWARD_PASS;

template <typename Block, pass PASS>
struct tile {
    factors<Block::SLOTS, PASS == BACKWARD_PASS ? 3 : 2> slots;
    factors<Block::COLUMNS, PASS == BACKWARD_PASS ? 3 : 2> columns;
    float step[TOKENS], rest, early, whole;    // of its gates
    unsigned heads;

    /* What does not change from tile to tile. */
    __device__ void open() {
        if (!TAKES_KEYS<Block, PASS>) slots.clear();
        columns.clear();
        if (threadIdx.x < TOKENS) columns.store_last(threadIdx.x, 0x3f803f80u);
    }
};

/* COUNT numbers of each token of a tile as they come from memory. Where products read eight rows of
 * 32 bytes, rows are PADDED, so that these meet no bank twice. */
template <int COUNT, bool PADDED>
struct alignas(16) rows_of {
    static constexpr int PITCH = PADDED ? COUNT + 16 : COUNT;
    mn_bf16 at[TOKENS][PITCH];

    /* Four neighbours. */
    __device__ __forceinline__ uint2 get(int t, int i) const {
        return *(const uint2 *)&at[t][i];
    }
};

template <typename Block, pass PASS>
struct tile_stage {
    static constexpr bool READS = PASS != STATES_PASS, BACK = PASS == BACKWARD_PASS;
    static constexpr bool KEYS = !TAKES_KEYS<Block, PASS>;
    gates g;
    rows_of<Block::SLOTS, READS> slots[KEYS && READS ? 2 : 1];    // k, q
    rows_of<Block::COLUMNS, READS> columns[BACK ? 3 : 2];        // v, b, do

    __device__ __forceinline__ const rows_of<Block::SLOTS, READS> &queries() const {
        return slots[KEYS && READS ? 1 : 0];
    }
};

__device__ __forceinline__ void cp_async_16(void *to, const void *from) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(
                     (unsigned)__cvta_generic_to_shared(to)),
                 "l"(from) : "memory");
}

/* Rows of a tensor of which a block takes some columns. */
struct alignas(16) stream {
    const char *first;    // at the sequence's first token
    unsigned pitch;       // bytes between its tokens, where any are copied
    int copied;           // how many columns may be copied, COPY_VEC of them at once
    int64_t stride;       // its tokens
    int left;             // how many columns there are from the block's first on

    __device__ void open(const mn_in &view, const place &at, int64_t base, int64_t count) {
        const mn_bf16 *row = mn_row<mn_bf16>(view, at.span.b, at.span.t0, at.h);
        first = (const char *)(row ? row + base : nullptr);
        stride = view.stride[1];
        left = row ? (int)min(count - base, (int64_t)1 << 30) : 0;
        const uint64_t bytes = (uint64_t)stride * sizeof(mn_bf16);
        const bool packs = ((uintptr_t)first | bytes) % 16 == 0 && bytes <= UINT32_MAX;
        copied = packs ? left / COPY_VEC * COPY_VEC : 0;
        pitch = (unsigned)bytes;
    }

    /* What is copied, in one read of shared memory. */
    struct alignas(16) head {
        const char *first;
        unsigned pitch;
        int copied;
    };

    __device__ __forceinline__ head copies() const {
        return *(const head *)this;
    }

    /* COPY_VEC numbers of `token` from `column` on, of those that there are; zeros in place of
     * others, and of all where `token` is none. */
    __device__ void put(mn_bf16 *to, int token, bool exists, int column) const {
        const mn_bf16 *row = (const mn_bf16 *)first + token * stride + column;
#pragma unroll 1
        for (int n = 0; n < COPY_VEC; n++) {
            to[n] = exists && column + n < left ? row[n] : mn_bf16(0.0f);
        }
    }
};

/* Where tiles come from, in shared memory. */
template <int KINDS>
struct sources {
    stream of[KINDS];
    const gates *decays;    // of the sequence's first tile
    const float *states;    // in front of it, of the block's first thread
    unsigned heads, between;    // between tiles of gates, and of states (states of blocks)
};

/* Loads tiles, and makes their factors once copies have been waited for by the whole block. What
 * a thread brings and makes is a place among its fellows that is the same in each tile, plus
 * constants: tiles are whole multiples of the threads. */
template <typename Block, pass PASS, typename Threads = all_warps<Block>>
struct tile_loader {
    typedef tile_stage<Block, PASS> smems;
    static constexpr bool READS = PASS != STATES_PASS, BACK = PASS == BACKWARD_PASS;
    static constexpr int SLOT_COPIES = Block::SLOTS * TOKENS / COPY_VEC;
    static constexpr int COLUMN_COPIES = Block::COLUMNS * TOKENS / COPY_VEC;
    static constexpr bool KEYS = smems::KEYS;
    static constexpr int SLOT_KINDS = KEYS && READS ? 2 : 1, COLUMN_KINDS = BACK ? 3 : 2;
    static constexpr int SLOT_KINDS_SPLIT = BACK ? 2 : KEYS ? 1 : 0;    // into factors
    static constexpr int N_COPIES = SLOT_KINDS * SLOT_COPIES + COLUMN_KINDS * COLUMN_COPIES;
    static constexpr int THREADS = Threads::THREADS, EACH = (N_COPIES + THREADS - 1) / THREADS;
    typedef sources<SLOT_KINDS + COLUMN_KINDS> sources;

    __device__ static bool is_first() {
        return Threads::own() == 0;
    }

    /* By the first thread; the others see it behind the next barrier. */
    __device__ static void open(sources &from, const mn_importance_args &p, const place &at,
                                const gates *all) {
        const int64_t s0 = Block::slot0(), v0 = Block::column0(), K = p.call.K, V = p.call.V;
        if (!is_first()) return;
        if (KEYS) from.of[0].open(p.k, at, s0, K);
        if (READS) from.of[SLOT_KINDS - 1].open(p.q, at, s0, K);
        from.of[SLOT_KINDS].open(p.v, at, v0, V);
        from.of[SLOT_KINDS + 1].open(p.b, at, v0, V);
        if (BACK) from.of[SLOT_KINDS + 2].open(p.cot.o, at, v0, V);
        from.heads = (unsigned)p.call.H;
        from.decays = all + mn_cell_first_slot(p.call, at.n, TOKENS) * p.call.H + at.h;
    }

    /* COPY_VEC numbers of a row, and where they go. */
    struct piece {
        mn_bf16 *to;
        const stream *of;
        int row, column;

        __device__ __forceinline__ static piece at(smems &to, const sources &from, unsigned i) {
            constexpr unsigned OF_SLOTS = SLOT_KINDS * SLOT_COPIES;
            constexpr unsigned WIDE = SLOT_COPIES / TOKENS, NARROW = COLUMN_COPIES / TOKENS;
            if (i < OF_SLOTS) {
                const unsigned kind = i / SLOT_COPIES, row = i % SLOT_COPIES / WIDE;
                const unsigned column = i % WIDE * COPY_VEC;
                return { &to.slots[kind].at[row][column], &from.of[kind], (int)row, (int)column };
            }
            const unsigned own = i - OF_SLOTS, kind = own / COLUMN_COPIES;
            const unsigned row = own % COLUMN_COPIES / NARROW, column = own % NARROW * COPY_VEC;
            return { &to.columns[kind].at[row][column], &from.of[SLOT_KINDS + kind], (int)row,
                     (int)column };
        }
    };

    /* Tile `index` of a sequence of `length` tokens; nothing behind its end. `passed`: of a tile
     * that is not read, queries are left out where keys are not loaded either. */
    __device__ __forceinline__ static void fetch(smems &to, const sources &from, int index,
                                                 int length, bool passed = false) {
        const int t0 = index * TOKENS, n_rows = min(length - t0, (int)TOKENS);
        const unsigned thread = Threads::own();
        if (n_rows <= 0) return;
        const unsigned part = thread - (THREADS - 32);    // the last warp has less to load
        if (part < sizeof(gates) / 16) {
            const gates *g = from.decays + (unsigned)index * from.heads;
            cp_async_16((char *)&to.g + part * 16, (const char *)g + part * 16);
        }
        bool all = true;
#pragma unroll
        for (int n = 0; n < EACH; n++) {
            const unsigned i = n * THREADS + thread;
            if ((n + 1) * THREADS > N_COPIES && i >= N_COPIES) continue;
            if (!KEYS && n * THREADS < SLOT_COPIES && passed && i < SLOT_COPIES) continue;
            const piece own = piece::at(to, from, i);
            const stream::head rows = own.of->copies();
            const bool copies = own.row < n_rows && own.column < rows.copied;
            const uint64_t row = (uint64_t)(unsigned)(t0 + own.row) * rows.pitch;
            const char *at = rows.first + row + own.column * sizeof(mn_bf16);
            if (copies) cp_async_16(own.to, at);
            all = all && copies;
        }
        if (!all) put_others(to, from, t0, n_rows);
    }

    /* What cannot be copied as packs. */
    __device__ __noinline__ static void put_others(smems &to, const sources &from, int t0,
                                                   int n_rows) {
#pragma unroll 1
        for (unsigned i = Threads::own(); i < N_COPIES; i += THREADS) {
            const piece own = piece::at(to, from, i);
            const bool exists = own.row < n_rows;
            if (exists && own.column < own.of->copied) continue;
            own.of->put(own.to, t0 + own.row, exists, own.column);
        }
    }

    __device__ static void wait() {
        asm volatile("cp.async.wait_all;" ::: "memory");
    }

    /* What this thread has asked for since the last one is a group. */
    __device__ static void commit() {
        asm volatile("cp.async.commit_group;" ::: "memory");
    }

    /* For all groups but the last `LEFT`. */
    template <int LEFT>
    __device__ static void wait_but() {
        asm volatile("cp.async.wait_group %0;" ::"n"(LEFT) : "memory");
    }

    /* The factors of a tile that has come: a thread has 4 neighbours of a kind. */
    __device__ static void put(tile<Block, PASS> &to, const smems &staged, float scale) {
        constexpr int SLOT_QUADS = Block::SLOTS / 4 * TOKENS, QUADS = Block::COLUMNS / 4 * TOKENS;
        static_assert(SLOT_QUADS % THREADS == 0, "no rest");
        const unsigned thread = Threads::own();
        constexpr int SLOT_SHARES = SLOT_KINDS_SPLIT * SLOT_QUADS / THREADS;
        constexpr int ALL = COLUMN_KINDS * QUADS, SHARES = (ALL + THREADS - 1) / THREADS;
        constexpr int PER_SLOT = Block::SLOTS / 4, PER_COLUMN = Block::COLUMNS / 4;
        uint2 of_slots[SLOT_SHARES + 1], of_columns[SHARES];  // reads pass no writes by themselves
#pragma unroll
        for (int n = 0; n < SLOT_SHARES; n++) {
            const unsigned i = n * THREADS % SLOT_QUADS + thread, kind = n * THREADS / SLOT_QUADS;
            of_slots[n] = staged.slots[kind].get(i / PER_SLOT, i % PER_SLOT * 4);
        }
#pragma unroll
        for (int n = 0; n < SLOT_SHARES; n++) {
            const unsigned i = n * THREADS % SLOT_QUADS + thread;
            const unsigned row = i / PER_SLOT, slot = i % PER_SLOT * 4;
            if (n * THREADS < SLOT_QUADS) {
                put_keys(to.slots, of_slots[n], staged.g.over[row], row, slot);
            }
            else if constexpr (BACK) store_queries(to, of_slots[n], row, slot, scale);
        }
#pragma unroll
        for (int n = 0; n < SHARES; n++) {
            const unsigned i = n * THREADS + thread, own = i % QUADS;
            if ((n + 1) * THREADS > ALL && i >= ALL) continue;
            of_columns[n] = staged.columns[i / QUADS].get(own / PER_COLUMN, own % PER_COLUMN * 4);
        }
#pragma unroll
        for (int n = 0; n < SHARES; n++) {
            const unsigned i = n * THREADS + thread, own = i % QUADS;
            if ((n + 1) * THREADS > ALL && i >= ALL) continue;
            store_columns(to, of_columns[n], i / QUADS, own / PER_COLUMN, own % PER_COLUMN * 4);
        }
        if (thread < TOKENS) {
            if (KEYS) to.slots.store_last(thread, staged.g.fresh[thread]);
            to.step[thread] = staged.g.step[thread];
            to.rest = staged.g.rest, to.heads = staged.g.heads;
            to.early = staged.g.early, to.whole = staged.g.whole;
        }
    }

private:
    __device__ __forceinline__ static void store_queries(tile<Block, PASS> &to, uint2 queries,
                                                         int t, int slot, float scale) {
        float x[4];
        unsigned query[4];
        unpack_bf16(x, queries);
#pragma unroll
        for (int i = 0; i < 4; i++) query[i] = mn_bf16_split(scale * x[i]);
        to.slots.put(t, QUERY_FACTOR, slot, query);
    }

    __device__ __forceinline__ static void store_columns(tile<Block, PASS> &to, uint2 x, int number,
                                                         int t, int column) {
        const unsigned pairs[4] = { broadcast_low(x.x), broadcast_high(x.x), broadcast_low(x.y),
                                    broadcast_high(x.y) };
        to.columns.put(t, number, column, pairs);
    }
};

/* A lane's way through the tokens of a tile. RESCALE: some of them may be heads; tiles without any
 * have a way of their own, in which the compiler may mix tokens. */
template <typename Block, pass PASS>
struct token_scan {
    typedef decltype(tile<Block, PASS>::slots) slot_factors;
    typedef decltype(tile<Block, PASS>::columns) column_factors;
    static constexpr bool TRANS = PASS == FORWARD_PASS;
    const tile<Block, PASS> &in;
    const unsigned *rows, *mean, *weight, *read;
    const unsigned *row_fours, *column_fours;    // for pass()

    /* Words from a tile's beginning to what a lane reads of it: places that the compiler keeps and
     * does not make again for each tile. */
    struct lane_places {
        unsigned rows, mean, weight;
    };

    __device__ __forceinline__ lane_places places() const {
        const unsigned *front = (const unsigned *)&in;
        return { again((unsigned)(rows - front)), again((unsigned)(mean - front)),
                 again((unsigned)(weight - front)) };
    }

    __device__ __forceinline__ token_scan(const tile<Block, PASS> &of, const lane_places &at)
        : in(of) {
        const unsigned *front = (const unsigned *)&in;
        rows = front + at.rows, mean = front + at.mean, weight = front + at.weight;
    }

    /* Words from a tile's beginning to what a lane of a warp reads of slots, and of columns, when
     * it goes back; `four`: of four tokens. */
    struct alignas(8) row_places {
        unsigned rows, four;
    };

    struct alignas(16) column_places {
        unsigned mean, weight, read, four;
    };

    __device__ static row_places places_of_rows(const tile<Block, PASS> &in, int slot) {
        const unsigned *front = (const unsigned *)&in;
        return { (unsigned)(in.slots.rows(slot) - front),
                 (unsigned)(in.slots.four(KEY_FACTOR, slot) - front) };
    }

    __device__ static column_places places_of_columns(const tile<Block, PASS> &in, int column) {
        const unsigned *front = (const unsigned *)&in;
        return { (unsigned)(in.columns.mean(column) - front),
                 (unsigned)(in.columns.weight(column) - front),
                 (unsigned)(in.columns.read(column) - front),
                 (unsigned)(in.columns.four(VALUE_FACTOR, column) - front) };
    }

    __device__ __forceinline__ token_scan(const tile<Block, PASS> &of, row_places of_rows,
                                          column_places of_columns)
        : in(of) {
        const unsigned *front = (const unsigned *)&in;
        rows = front + of_rows.rows, row_fours = front + of_rows.four;
        mean = front + of_columns.mean, weight = front + of_columns.weight;
        read = front + of_columns.read, column_fours = front + of_columns.four;
    }

    __device__ explicit token_scan(const tile<Block, PASS> &of) : in(of) {
        const unsigned warp = thread_rematerialized() / 32;
        const unsigned slot = warp % Block::GROUPS * GROUP, column = warp / Block::GROUPS * GROUP;
        rows = TRANS ? in.columns.rows(column) : in.slots.rows(slot);
        mean = TRANS ? in.slots.mean(slot) : in.columns.mean(column);
        weight = TRANS ? in.slots.weight(slot) : in.columns.weight(column);
        if constexpr (PASS == BACKWARD_PASS) read = in.columns.read(column);
        row_fours = in.slots.four(KEY_FACTOR, slot);
        column_fours = in.columns.four(VALUE_FACTOR, column);
    }

    /* Tokens are counted from `by` more on. */
    __device__ __forceinline__ void move(int by) {
        constexpr int SLOT_WORDS = sizeof(in.slots) / TOKENS / sizeof(unsigned);
        constexpr int COLUMN_WORDS = sizeof(in.columns) / TOKENS / sizeof(unsigned);
        static_assert(!TRANS, "rows are slots");
        rows += by * SLOT_WORDS;
        mean += by * COLUMN_WORDS, weight += by * COLUMN_WORDS, read += by * COLUMN_WORDS;
    }

    /* Token t, or that one behind `front`. */
    template <bool RESCALE>
    __device__ __forceinline__ void advance(state_frag &c, int t, int front = 0) const {
        if (RESCALE && in.heads >> (front + t) & 1) c.times(in.step[front + t]);
        const uint2 of_rows = TRANS ? column_factors::get(rows, t) : slot_factors::get(rows, t);
        const uint2 to_mean = TRANS ? slot_factors::get(mean, t) : column_factors::get(mean, t);
        const uint2 to_weight = TRANS ? slot_factors::get(weight, t) :
                                         column_factors::get(weight, t);
        mn_mma_bf16_k8(c.M[0], of_rows, to_mean.x);
        mn_mma_bf16_k8(c.M[1], of_rows, to_mean.y);
        mn_mma_bf16_k8(c.I[0], of_rows, to_weight.x);
        mn_mma_bf16_k8(c.I[1], of_rows, to_weight.y);
    }

    /* Tokens first .. first + count, none of which is to be read, by fours. */
    __device__ __forceinline__ void pass(state_frag &c, int first, int count) const {
        if (in.heads != 0) {
#pragma unroll 1
            for (int t = first; t < first + count; t++) advance<true>(c, t);
            return;
        }
        const unsigned *keys = row_fours, *weights = keys + slot_factors::PITCH;
        const unsigned *values = column_fours, *writes = values + column_factors::PITCH;
#pragma unroll
        for (int t = first; t < first + count; t += 4) {
            const uint2 key = slot_factors::get(keys, t), weight = slot_factors::get(weights, t);
            const uint2 v = column_factors::get(values, t), b = column_factors::get(writes, t);
            mn_mma_bf16_k8(c.M[0], key, v.x);
            mn_mma_bf16_k8(c.M[1], key, v.y);
            mn_mma_bf16_k8(c.I[0], weight, b.x);
            mn_mma_bf16_k8(c.I[1], weight, b.y);
        }
        const float fresh = count == HALF ? in.early : in.whole;
#pragma unroll
        for (int i = 0; i < 8; i++) c.I[i / 4][i % 4] += fresh;
    }

    /* scale q do' of token t. */
    __device__ __forceinline__ void pull(float (&to)[2][4], int t) const {
        const uint2 of_rows = slot_factors::get(rows, t), cot = column_factors::get(read, t);
        mn_mma_bf16_k8_zero(to[0], of_rows, cot.x);
        mn_mma_bf16_k8_zero(to[1], of_rows, cot.y);
    }
};

/* ---- keys' factors made before --------------------------------------------------------------- */

template <typename Block>
using key_factors = decltype(tile<Block, FORWARD_PASS>::slots);

/* Four neighbours of token `t` of a tile from slot s on; zeros where there are none. */
__device__ inline uint2 keys_at(const mn_importance_args &p, const mn_tile_span &tile, int64_t h,
                                int t, int64_t s) {
    mn_bf16 x[4];
    const int64_t left = t < tile.n_rows ? p.call.K - s : 0;
    if (left <= 0) return make_uint2(0, 0);
    const mn_bf16 *k =
        mn_row<mn_bf16>(p.k, tile.span.b, tile.span.t0 + tile.first + t, h) + s;
    if (left >= 4 && (uintptr_t)k % sizeof(uint2) == 0) return *(const uint2 *)k;
#pragma unroll
    for (int i = 0; i < 4; i++) x[i] = i < left ? k[i] : mn_bf16(0.0f);
    return make_uint2(mn_bf16x2_of(mn_float(x[0]), mn_float(x[1])),
                      mn_bf16x2_of(mn_float(x[2]), mn_float(x[3])));
}

enum { KEY_THREADS = 256 };

/* Gates and factors of keys of all tiles: those of slots from z Block::SLOTS on, of head h in tile
 * slot i, are number (i H + h) gridDim.y + z. */
template <typename Block>
__global__ void __launch_bounds__(KEY_THREADS)
importance_keys_kernel(const __grid_constant__ mn_importance_args p, gates *all,
                       key_factors<Block> *keys, float unit) {
    __shared__ gates own;
    const int64_t h = blockIdx.x % p.call.H;
    const mn_tile_span tile = mn_tile_at(p.call, TOKENS, blockIdx.x / p.call.H);
    const int thread = threadIdx.x;
    constexpr int QUADS = Block::SLOTS / 4, EACH = QUADS * TOKENS / KEY_THREADS;
    static_assert(EACH * KEY_THREADS == QUADS * TOKENS, "no rest");
    uint2 loaded[EACH];    // on their way while gates are made
#pragma unroll
    for (int n = 0; n < EACH; n++) {
        const int i = n * KEY_THREADS + thread, slot = i % QUADS * 4;
        loaded[n] = keys_at(p, tile, h, i / QUADS, blockIdx.y * (int64_t)Block::SLOTS + slot);
    }
    if (thread < 32) make_gates(thread < TOKENS ? &own : nullptr, p, tile, h, unit);
    __syncthreads();
    key_factors<Block> &to = keys[blockIdx.x * (int64_t)gridDim.y + blockIdx.y];
    if (blockIdx.y == 0 && thread < (int)(sizeof(gates) / sizeof(uint4))) {
        ((uint4 *)(all + blockIdx.x))[thread] = ((const uint4 *)&own)[thread];
    }
    to.clear();
    if (thread < TOKENS) to.store_last(thread, own.fresh[thread]);
#pragma unroll
    for (int n = 0; n < EACH; n++) {
        const int i = n * KEY_THREADS + thread, t = i / QUADS;
        put_keys(to, loaded[n], own.over[t], t, i % QUADS * 4);
    }
}

/* ---- forward --------------------------------------------------------------------------------- */

/* Loads tiles, makes their factors and stores o beside the warps that scan. */
template <typename Block>
using fwd_loader = tile_loader<Block, FORWARD_PASS, producer_warps<Block>>;

/* Tiles take turns: while one is scanned, the next one's factors are made and the one behind that
 * is on its way. Queries are read where they came to. `full`: a tile can be scanned, and the sums
 * of the one that had its place before have left; `left`: each warp has scanned it. Warps do not
 * wait for each other, so that those of a scheduler are in different places of a tile.
 *
 * Factors of keys that were made before come by one bulk copy, as far ahead as what is loaded;
 * `came`: they have. */
template <typename Block>
struct fwd_smem {
    static constexpr int PITCH = Block::COLUMNS + 4;
    static constexpr bool KEYS_READY = Block::KEYS_READY;
    /* Tiles asked for ahead: passing one takes less time than memory does. A tile is read from
     * where it came to until it has been left, two behind the one that is made ready. */
    static constexpr int AHEAD = Block::WARPS < 16 ? 4 : 1, STAGES = AHEAD + 2;
    static constexpr int TILES = KEYS_READY ? STAGES : 2;
    tile<Block, FORWARD_PASS> in[TILES];
    tile_stage<Block, FORWARD_PASS> staged[STAGES];
    typename fwd_loader<Block>::sources from;
    alignas(16) float out[2][Block::GROUPS][TOKENS][PITCH];
    uint64_t full[2], left[2], came[KEYS_READY ? STAGES : 1];

    /* By the first threads. */
    __device__ void open() {
        for (int i = 0; i < TILES; i++) in[i].open();
        if (threadIdx.x != 0) return;
        for (int i = 0; i < 2; i++) {
            mn_mbarrier_init(&full[i], producer_warps<Block>::THREADS);
            mn_mbarrier_init(&left[i], Block::WARPS);
        }
        for (int i = 0; KEYS_READY && i < STAGES; i++) mn_mbarrier_init(&came[i], 1);
#if __CUDA_ARCH__ >= 900
        mn_mbarrier_init_fence();
#endif
    }

    /* Where the factors of a tile lie that has `stage` among what is loaded. */
    __device__ __forceinline__ tile<Block, FORWARD_PASS> &factors_of(int stage, int turn) {
        return in[KEYS_READY ? stage : turn];
    }
};

/* What roles know of a block's tiles so far: how many there were, and of each stage whether an odd
 * number of copies of keys' factors have come. */
struct fwd_progress {
    unsigned done, came;
};

/* mn_mbarrier_wait on machines before 9.0, too, where a wait is a question asked over and over. */
__device__ __forceinline__ void wait_for_phase(const uint64_t *mbar, int phase) {
#if __CUDA_ARCH__ >= 900
    mn_mbarrier_wait(mbar, phase);
#elif __CUDA_ARCH__ >= 800
    asm volatile("{\n\t.reg .pred done;\n"
                 "again:\n\t"
                 "mbarrier.test_wait.parity.shared.b64 done, [%0], %1;\n\t"
                 "@!done bra again;\n\t}" ::"r"(mn_smem_addr(mbar)), "r"(phase) : "memory");
#endif
}

/* Which place a block's tile number n has among two, and which phase of it that is. */
__device__ __forceinline__ int tile_turn(unsigned n) {
    return n % 2;
}

__device__ __forceinline__ int tile_phase(unsigned n) {
    return n / 2 % 2;
}

/* Forward, M' and I' are counted in 1 / FORWARD_UNIT, so that A is as far from overflow
 * as from underflow.
 * The product of two I' is a float32 of which there is an inverse where both lie within these
 * bounds at the beginning of a tile: in it they grow, by no more than 1e18 unless k^2 b is above
 * some 1e13. */
static constexpr float FORWARD_UNIT = 1.0f / 16384, MIN_PAIRED = 1e-18f, MAX_PAIRED = 1e18f;

/* mu of a group of cells. PAIRS: each reciprocal is that of a product of two, as they take longer
 * than the products that gives back. */
template <bool PAIRS>
__device__ __forceinline__ void means_of(float (&mu)[4], const float (&M)[4], const float (&I)[4]) {
#pragma unroll
    for (int i = 0; i < 4; i += PAIRS ? 2 : 1) {
        if (PAIRS) {
            const float over = mn_rcp_ftz(I[i] * I[i + 1]);
            mu[i] = M[i] * I[i + 1] * over;
            mu[i + 1] = M[i + 1] * I[i] * over;
        } else {
            mu[i] = M[i] * mn_rcp_ftz(I[i]);
        }
    }
}

/* Whether reciprocals may be shared in a tile without heads. */
__device__ __forceinline__ bool can_share_rcp(const state_frag &c) {
    float least = c.I[0][0], most = c.I[0][0];
#pragma unroll
    for (int i = 1; i < 8; i++) {
        least = fminf(least, c.I[i / 4][i % 4]);
        most = fmaxf(most, c.I[i / 4][i % 4]);
    }
    return __all_sync(0xffffffffu, least >= MIN_PAIRED && most <= MAX_PAIRED);
}

/* o of a tile, the sums over a warp's 16 slots of it, to `out`. PLAIN: it has no heads, and
 * can_share_rcp. */
template <typename Block, bool PLAIN>
__device__ __forceinline__ void tile_forward(state_frag &c, float *out,
                                             const token_scan<Block, FORWARD_PASS> &along,
                                             const uint2 (&queries)[2]) {
    constexpr int PITCH = fwd_smem<Block>::PITCH;
    const float rest = along.in.rest;
#pragma unroll(PLAIN ? 2 : 1)
    for (int first = 0; first < TOKENS; first += HALF) {
        const uint2 q = first == 0 ? queries[0] : queries[1];
        float sums[4];
        along.template advance<!PLAIN>(c, first);
#pragma unroll
        for (int t = 0; t < HALF; t++) {    // the next token before this one is read
            const state_frag now = c;
            if (t + 1 < HALF) along.template advance<!PLAIN>(c, first + t + 1);
            float mu[2][4];
            unsigned factor[4];
#pragma unroll
            for (int i = 0; i < 2; i++) means_of<PLAIN>(mu[i], now.M[i], now.I[i]);
            frag_of_acc(factor, mu[0], mu[1]);
            mma_k16_column(sums, factor, q, t);
        }
#pragma unroll
        for (int i = 0; i < 4; i++) out[(first + i % 2) * PITCH + i / 2 * 2] = sums[i];
    }
    c.times(rest);
}

/* Where a producer thread puts its shares of o, four columns of a token each: into o or, where
 * blocks share the slots, into its part. */
template <typename Block>
struct output_writer {
    enum { ACROSS = Block::COLUMNS / 4, ROWS = producer_warps<Block>::THREADS / ACROSS };
    enum { APART = ROWS < TOKENS ? ROWS : TOKENS };
    char *to;         // its first token of the tile; nullptr: not wanted, or there is none
    int64_t between;    // bytes between its tokens
    int inside;
    float scale;

    /* Counted from the last thread: where not all have a share, the first make factors of v. */
    __device__ static unsigned own() {
        return producer_warps<Block>::THREADS - 1 - producer_warps<Block>::own();
    }

    __device__ static int column() { return (int)(own() % ACROSS * 4); }
    __device__ static int row() { return (int)(own() / ACROSS); }

    /* `first`: the token that its first tile begins with. */
    __device__ output_writer(const mn_importance_args &p, float *parts, const place &at,
                             int64_t n_rows, int first) {
        const int64_t v = Block::column0() + column(), token = at.span.t0 + first + row();
        const int64_t row_of_heads = at.span.b * p.call.T + token;
        const int64_t place = blockIdx.z * n_rows + row_of_heads * p.call.H + at.h;
        mn_bf16 *o = mn_row<mn_bf16>(p.o, at.span.b, token, at.h);
        inside = (int)min(p.call.V - v, (int64_t)4);
        scale = (float)p.scale;
        if (row() >= TOKENS) {
            to = nullptr, between = 0;
        } else if (gridDim.z > 1) {
            to = (char *)(parts + place * 2 * p.call.V + v);
            between = APART * p.call.H * 2 * p.call.V * (int64_t)sizeof(float);
        } else {
            to = (char *)(o ? o + v : o);
            between = APART * p.o.stride[1] * (int64_t)sizeof(mn_bf16);
        }
    }

    /* A tile's, of which there are n_rows, and on by a tile. */
    __device__ __forceinline__ void put(const fwd_smem<Block> &r, int n_rows, int turn) {
        if (!to) return;
#pragma unroll
        for (int n = 0; n < TOKENS; n += APART) {
            const int t = n + row();
            float x[4] = {};
#pragma unroll
            for (int group = 0; group < Block::GROUPS; group++) {
                mn_cell_add(x, &r.out[turn][group][t][column()]);
            }
#pragma unroll
            for (int i = 0; i < 4; i++) x[i] *= scale;
            if (t < n_rows) {
                if (gridDim.z > 1) mn_cell_store((float *)to, inside, x);
                else mn_cell_store((mn_bf16 *)to, inside, x);
            }
            to += between;
        }
    }
};

template <typename Block>
__device__ void store_final_state(const state_frag &c, const mn_importance_args &p,
                               const place &at) {
    float *mu = mn_row<float>(p.mu, at.n, 0, at.h), *imp = mn_row<float>(p.imp, at.n, 0, at.h);
#pragma unroll
    for (int n = 0; n < 8; n++) {
        const int64_t cell = cell_at<Block, true>(p.call, n / 4, n % 4);
        const float M = c.M[n / 4][n % 4], I = c.I[n / 4][n % 4];
        if (cell >= 0 && mu) mu[cell] = M / I;
        if (cell >= 0 && imp) imp[cell] = I * (1.0f / FORWARD_UNIT);
    }
}

enum { BAR_FWD_PRODUCERS = 1 };

/* Part `index` of `count`, one or two, of a sequence: its tiles first .. end are read, those in
 * front are only passed, by the same products, which takes less than half the time. So two blocks
 * get through it in two thirds of one's, and no bit depends on their number. */
struct sequence_part {
    int first, end, length;    // length: tokens up to the end of its tiles
    bool last;

    __device__ sequence_part(const place &at, int index, int count) {
        const int tokens = (int)at.span.length, n_tiles = (int)mn_cell_tiles(tokens);
        const int middle = count == 2 ? n_tiles * 13 / 20 : n_tiles;
        first = index == 0 ? 0 : middle, end = index == 0 ? middle : n_tiles;
        last = index + 1 == count;
        length = min(tokens, end * (int)TOKENS);
    }
};

/* Factors of keys of a head's tiles, which one thread asks for: one of a warp that has nothing to
 * do for columns. */
template <typename Block>
struct ready_keys {
    const key_factors<Block> *first;    // of the sequence's first tile; nullptr: for other threads
    int64_t between;
    static constexpr unsigned ASKS = producer_warps<Block>::THREADS / 2;

    __device__ ready_keys(const mn_importance_args &p, const place &at, const void *all) {
        const int64_t item = mn_cell_first_slot(p.call, at.n, TOKENS) * p.call.H + at.h;
        between = p.call.H * gridDim.z, first = nullptr;
        if (!Block::KEYS_READY || producer_warps<Block>::own() != ASKS) return;
        first = (const key_factors<Block> *)all + item * gridDim.z + blockIdx.z;
    }

    __device__ __forceinline__ void fetch(fwd_smem<Block> &r, int stage, int tile,
                                          int n_tiles) const {
#if __CUDA_ARCH__ >= 900
        if (!first || tile >= n_tiles) return;
        uint64_t *came = &r.came[Block::KEYS_READY ? stage : 0];
        auto &to = r.factors_of(stage, 0).slots;
        mn_mbarrier_arrive_expect_tx(came, sizeof(to));
        mn_tma_load_1d(&to, first + tile * between, sizeof(to), came);
#endif
    }
};

/* The producers' way through a part; `so_far`: what the block has had before. */
template <typename Block>
__device__ __forceinline__ void fwd_produce(fwd_smem<Block> &r, const mn_importance_args &p,
                                            const place &at, const sequence_part &part,
                                            const gates *decays, const void *keys, float *sums,
                                            int64_t n_rows, fwd_progress &so_far) {
    typedef fwd_loader<Block> next;
    const unsigned done = so_far.done;
    const ready_keys<Block> ready(p, at, keys);
    const int length = part.length, n_tiles = part.end;
    output_writer<Block> to(p, sums, at, n_rows, part.first * TOKENS);
    const auto meet = []() { mn_named_barrier_sync(BAR_FWD_PRODUCERS, next::THREADS); };
    constexpr int AHEAD = fwd_smem<Block>::AHEAD, STAGES = fwd_smem<Block>::STAGES;
    next::open(r.from, p, at, decays);
    meet();
#pragma unroll
    for (int i = 0; i < AHEAD; i++) {
        next::fetch(r.staged[i], r.from, i, length, i < part.first);
        next::commit();
        ready.fetch(r, i, i, n_tiles);
    }
    for (int i = 0, stage = 0, asked = AHEAD; i < n_tiles; i++) {
        const unsigned n = done + i;
        const int turn = tile_turn(n);
        next::template wait_but<AHEAD - 1>();
        meet();
        if (n >= 2) wait_for_phase(&r.left[turn], tile_phase(n - 2));
        next::fetch(r.staged[asked], r.from, i + AHEAD, length, i + AHEAD < part.first);
        next::commit();
        ready.fetch(r, asked, i + AHEAD, n_tiles);
        next::put(r.factors_of(stage, turn), r.staged[stage], 1.0f);
        if (i >= part.first + 2) to.put(r, TOKENS, turn);
        mn_mbarrier_arrive(&r.full[turn]);
        stage = stage == STAGES - 1 ? 0 : stage + 1, asked = asked == STAGES - 1 ? 0 : asked + 1;
    }
    for (int i = max(n_tiles - 2, part.first); i < n_tiles; i++) {
        const unsigned n = done + i;
        wait_for_phase(&r.left[tile_turn(n)], tile_phase(n));
        to.put(r, min(length - i * TOKENS, (int)TOKENS), tile_turn(n));
    }
    so_far.done += n_tiles;
}

/* A tile of which nothing is read: the states as tile_forward leaves them. */
template <typename Block>
__device__ __forceinline__ void tile_passed(state_frag &c,
                                            const token_scan<Block, FORWARD_PASS> &along) {
    const bool has_heads = along.in.heads != 0;
    if (has_heads) {
#pragma unroll 1
        for (int t = 0; t < TOKENS; t++) along.template advance<true>(c, t);
    } else {
#pragma unroll
        for (int t = 0; t < TOKENS; t++) along.template advance<false>(c, t);
    }
    c.times(along.in.rest);
}

/* That of the others. */
template <typename Block>
__device__ __forceinline__ void fwd_scan(fwd_smem<Block> &r, const mn_importance_args &p,
                                         const place &at, const sequence_part &part,
                                         fwd_progress &so_far) {
    const int n_tiles = part.end;
    const int slot = Block::slot() + 4 * column_lane();
    const auto places = token_scan<Block, FORWARD_PASS>(r.in[0]).places();
    const unsigned sums = again((unsigned)(
        &r.out[0][Block::group()][2 * column_lane()][Block::column() + interleaved_row(0)] -
        &r.out[0][0][0][0]));
    const auto &queries_at = r.staged[0].queries().at;
    const unsigned queries =
        again((unsigned)(&queries_at[row_lane()][slot] - &queries_at[0][0]));
    state_frag c;
    load_first<Block, true>(c, p, at);
    c.times(FORWARD_UNIT);
    constexpr int STAGES = fwd_smem<Block>::STAGES;
    for (int i = 0, stage = 0; i < n_tiles; i++, stage = stage == STAGES - 1 ? 0 : stage + 1) {
        const unsigned n = so_far.done + i;
        const int turn = tile_turn(n);
        const auto &in = r.factors_of(stage, turn);
        const token_scan<Block, FORWARD_PASS> along(in, places);
        float *const to = &r.out[turn][0][0][0] + sums;
        wait_for_phase(&r.full[turn], tile_phase(n));
        if (Block::KEYS_READY) {
            wait_for_phase(&r.came[stage], so_far.came >> stage & 1);
            so_far.came ^= 1u << stage;
        }
        if (i < part.first) {
            tile_passed<Block>(c, along);
            mn_mbarrier_arrive_warp(&r.left[turn]);
            continue;
        }
        const auto &keys = r.staged[stage].queries();
        const mn_bf16 *const own = &keys.at[0][0] + queries;
        const uint2 q[2] = { *(const uint2 *)own, *(const uint2 *)(own + HALF * keys.PITCH) };
        if (in.heads == 0 && can_share_rcp(c)) tile_forward<Block, true>(c, to, along, q);
        else tile_forward<Block, false>(c, to, along, q);
        mn_mbarrier_arrive_warp(&r.left[turn]);
    }
    so_far.done += n_tiles;
    if (part.last) store_final_state<Block>(c, p, at);
}

/* `n_parts`: of each sequence, for blocks of eight warps. */
template <typename Block>
__global__ void __launch_bounds__(Block::THREADS + producer_warps<Block>::THREADS, 1)
importance_fwd_kernel(const __grid_constant__ mn_importance_args p, const gates *decays,
                      const void *keys, float *sums, int64_t n_rows, int n_parts) {
    const int parts = Block::WARPS == 16 ? 1 : n_parts;
    extern __shared__ float4 shared[];
    fwd_smem<Block> &r = *(fwd_smem<Block> *)shared;
    r.open();
    __syncthreads();
    fwd_progress so_far = {};
    /* Each role is a branch that begins with setmaxnreg: only then ptxas gives it its registers.
     * Blocks of eight warps have 128 for each thread. */
    const int64_t n_items = mn_n_spans(p.call) * p.call.H * parts;
    if (threadIdx.x >= Block::THREADS) {    // of 96 registers that each thread has
#if MN_HAS_WGMMA
        if constexpr (Block::WARPS == 16) mn_setmaxnreg_dec<64>();
#endif
        for (int64_t item = blockIdx.y; item < n_items; item += gridDim.y) {
            const place at = place::of(p, item / parts);
            const sequence_part part(at, (int)(item % parts), parts);
            fwd_produce<Block>(r, p, at, part, decays, keys, sums, n_rows, so_far);
        }
    } else {
#if MN_HAS_WGMMA
        if constexpr (Block::WARPS == 16) mn_setmaxnreg_inc<104>();
#endif
        for (int64_t item = blockIdx.y; item < n_items; item += gridDim.y) {
            const place at = place::of(p, item / parts);
            const sequence_part part(at, (int)(item % parts), parts);
            fwd_scan<Block>(r, p, at, part, so_far);
        }
    }
}

/* ---- states ---------------------------------------------------------------------------------- */

template <typename Block, pass PASS>
__device__ __forceinline__ void advance_tile(state_frag &c, const tile<Block, PASS> &in) {
    const token_scan<Block, PASS> along(in);
    along.pass(c, 0, TOKENS);
    c.times(in.rest);
}

/* Tiles are asked for three ahead: beside the states that are written, memory takes its time. An SM
 * has room for four blocks of half the columns: all of 128 slots, 128 columns and 64 heads go at
 * once. */
template <typename Block>
struct states_smem {
    static constexpr int STAGES = 4;
    tile<Block, STATES_PASS> in[2];
    tile_stage<Block, STATES_PASS> staged[STAGES];
    typename tile_loader<Block, STATES_PASS>::sources from;
};

/* States in front of every tile, of which there are SETS sets for each head, as threads of Whole
 * have them: two blocks with half of its columns each, so that an SM has several, whose waits for
 * tiles are not the same. */
template <typename Block, typename Whole>
__global__ void __launch_bounds__(Block::THREADS, 2 * Block::PER_PROCESSOR)
importance_states_kernel(const __grid_constant__ mn_importance_args p, const gates *decays,
                         float *states) {
    static_assert(2 * Block::WARPS == Whole::WARPS && Block::GROUPS == Whole::GROUPS, "halves");
    const int64_t n_blocks = gridDim.x / 2 * (int64_t)gridDim.z;
    const int64_t whole = blockIdx.z * (int64_t)(gridDim.x / 2) + blockIdx.x / 2;
    const int thread = (int)(blockIdx.x % 2 * Block::THREADS + threadIdx.x);
    extern __shared__ float4 shared[];
    states_smem<Block> &r = *(states_smem<Block> *)shared;
    r.in[0].open();
    r.in[1].open();
    for (int64_t item = blockIdx.y; item < mn_n_spans(p.call) * p.call.H; item += gridDim.y) {
        const place at = place::of(p, item);
        const int length = (int)at.span.length, n_tiles = (int)mn_cell_tiles(length);
        const int64_t slot = mn_cell_first_slot(p.call, at.n, TOKENS);
        const int64_t first = (slot * p.call.H + at.h) * n_blocks + whole;
        const int64_t between = p.call.H * n_blocks * SETS * SET_STRIDE<Whole>;
        float *to = states + first * SETS * SET_STRIDE<Whole> + thread * 4;
        typedef tile_loader<Block, STATES_PASS> next;
        next::open(r.from, p, at, decays);
        state_frag c;
        load_first<Block, false>(c, p, at);
        __syncthreads();
        constexpr int STAGES = states_smem<Block>::STAGES;
        for (int i = 0; i < STAGES - 1; i++) {
            next::fetch(r.staged[i], r.from, i, length);
            next::commit();
        }
        next::template wait_but<STAGES - 2>();
        __syncthreads();
        for (int i = 0; i < n_tiles; i++) {
            const int turn = i % 2;
            c.store(to, SET_STRIDE<Whole>);
            to += between;
            if (i + 1 == n_tiles) break;
            next::put(r.in[turn], r.staged[i % STAGES], 1.0f);
            next::template wait_but<STAGES - 3>();
            __syncthreads();
            next::fetch(r.staged[(i + STAGES - 1) % STAGES], r.from, i + STAGES - 1, length);
            next::commit();
            advance_tile<Block, STATES_PASS>(c, r.in[turn]);
        }
        next::wait();
        __syncthreads();
    }
}

}    // namespace mneme::importance::mma_path

#endif
