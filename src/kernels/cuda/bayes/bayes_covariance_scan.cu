/* bayes_covariance_scan.cu - the covariance scan of bayes_fwd_chunk.cuh.
 *
 * A covariance has a cluster of CL blocks, each with RP / CL of its rows. A worker is a warp that
 * has 16 rows, two row blocks, and half of the columns, all in registers. Three more warps of each
 * block: the pivot factorises S, one warp asks for inputs, one leaves results in memory. All blocks
 * factorise alike. Sums over rows and columns are added by four workers, by eight, and so on, so
 * that results do not depend on CL.
 *
 * **Ahead.** With up to 64 rows the next chunk's S does not wait for this one's writes. With its
 * keys kh, rows being tokens, Q = Phi (P + n) Phi' of this chunk, which is P without its writes,
 * and zt = Phi z,
 *
 *   B0 = Q kh + n kh    S0 = B0.kh    C = (Phi B).kh    W = zt kh = L^-1 C
 *   S = S0 - W' W / sigma             B = B0 - zt W / sigma
 *
 * B0, S0 and C are made by the workers while the pivot factorises this chunk's S; then the pivot
 * goes on to the next one at once, with products of 16 x 16, while workers write P. So a chunk
 * takes the pivot's time or the workers', not both. Warps that multiply tiles keep a single sum
 * of their quarter of a processor waiting: no worker is in the pivot's quarter (`role_of`). With
 * more rows the workers' time is the longer one, in three quarters all the more.
 *
 * What a block sends to the others is counted by a barrier of theirs, so that nobody waits for
 * stores that nobody reads soon. Where it goes is never in use still: a block sends sums only after
 * it has received the tile of the block they go to, which that one sends after it has used the last
 * sums; and sends its tile only after it has received that one's sums, which were sent after it had
 * used the last tile. */
#include "kernels/cuda/prim/mma_f64.cuh"
#include "kernels/cuda/prim/pdl.cuh"
#include "kernels/cuda/bayes/bayes_fwd_chunk.cuh"
#include "kernels/cuda/prim/sync.cuh"

namespace mneme::bayes {

/* S + diag r2 = L diag(sigma) L' and L^-1 for the 16 tokens of a chunk, by one
 * warp: the chain that the covariance scan waits for; bayes_covariance_scan.cu.
 *
 * Lane t has column t of S, lane 16 + t column t of what becomes L^-1. The first eight tokens and
 * then the others are a square that every lane eliminates alike in registers, so that no lane waits
 * for another; between the two squares the rows of the first go through shared memory once. */

enum {
    MN_PIVOT_HALF = 8,
    MN_PIVOT_SUM = 192,     // doubles of S that are handed over
    MN_PIVOT_PITCH = 18,    // of a row of S
};

/* What an elimination finds: k'u, 1 / sigma, L^-1. */
struct alignas(16) mn_pivot_found {
    double variance[16], inverse[16], undo[16][20];
};

/* Shared memory of a chunk's elimination. */
struct alignas(16) mn_pivot_smem {
    double r2[16];
    double sum[MN_PIVOT_SUM];                     // S by fragments
    double rows[MN_PIVOT_HALF][MN_PIVOT_HALF];    // [i - 8][k]: L_ik of the lower left square
    double square[16][MN_PIVOT_PITCH];            // S, then what is left of its lower right part
};

/* max(x, 0) by its sign bit. */
__device__ inline double mn_pivot_positive(double x) {
    return __double2hiint(x) < 0 ? 0.0 : x;
}

/* Tokens [first, first + 8), whose part of S is the upper triangle `a`; x, rows of this lane's
 * column, becomes L^-1 x, and of the first eight x / sigma the rows of lanes 8 to 15. Two tokens
 * at a time, so that both reciprocals of
 *
 *   1 / sigma_j    and    1 / sigma_{j+1} = sigma_j / (sigma_j (S_{j+1,j+1} + r2) - S_{j,j+1}^2)
 *
 * are on their way together; where that difference keeps few digits, one after the other. From
 * what the next two tokens wait for, both writes are taken off at once,
 *
 *   S_ik - (S_ji S_jk + (d_i d_k) / that difference) / sigma_j    d_i = sigma_j S_{j+1,i} - b S_ji
 *
 * with b = S_{j,j+1}, so that reciprocals are the last thing needed. Says whether the differences
 * keep enough digits; only if CAREFUL it looks at each one by itself. */
template <bool CAREFUL>
__device__ inline bool mn_pivot_eight(double (&a)[MN_PIVOT_HALF][MN_PIVOT_HALF],
                                      double (&x)[MN_PIVOT_HALF], mn_pivot_smem &smem,
                                      mn_pivot_found &found, int first_token) {
    const int lane = (int)threadIdx.x % 32;
    bool all_kept = true;
#pragma unroll
    for (int j = 0; j < MN_PIVOT_HALF; j += 2) {
        const double2 noise = *(const double2 *)&smem.r2[first_token + j];
        const double one = mn_pivot_positive(a[j][j]), sigma = one + noise.x;
        const double b = a[j][j + 1], c = a[j + 1][j + 1], square = b * b;
        const double least = fma(sigma, c + noise.y, -square);
        const bool kept = fma(sigma, c, -square) > 0x1p-30 * (sigma * c);
        const double first = mn_rcp_f64(sigma), ratio = b * first;
        double quick = mn_rcp_f64(least), left = fma(-ratio, b, c), second = sigma * quick;
        all_kept = all_kept && kept;
        if (CAREFUL && !kept) {
            left = mn_pivot_positive(left), second = mn_rcp_f64(left + noise.y);
            quick = first * second;
        }
        double f[MN_PIVOT_HALF], g[MN_PIVOT_HALF], y[MN_PIVOT_HALF], d[MN_PIVOT_HALF];
#pragma unroll
        for (int i = j + 2; i < MN_PIVOT_HALF; i++) {
            d[i] = fma(sigma, a[j + 1][i], -(b * a[j][i]));
            y[i] = fma(-ratio, a[j][i], a[j + 1][i]);
            f[i] = a[j][i] * first, g[i] = y[i] * second;
        }
#pragma unroll
        for (int i = j + 2; i < MN_PIVOT_HALF; i++) {
#pragma unroll
            for (int k = i; k < MN_PIVOT_HALF; k++) {
                const double both = fma(d[i] * d[k], quick, a[j][i] * a[j][k]);
                a[i][k] = k < j + 4 ? fma(-first, both, a[i][k])
                                    : fma(-g[i], y[k], fma(-f[i], a[j][k], a[i][k]));
            }
        }
        x[j + 1] = fma(-ratio, x[j], x[j + 1]);
        if (lane == 0) {
            *(double2 *)&found.variance[first_token + j] = make_double2(one, left);
            *(double2 *)&found.inverse[first_token + j] = make_double2(first, second);
        }
        if (first_token == 0 && lane >= MN_PIVOT_HALF && lane < 2 * MN_PIVOT_HALF) {
            *(double2 *)&smem.rows[lane - MN_PIVOT_HALF][j] = make_double2(x[j] * first,
                                                                           x[j + 1] * second);
        }
#pragma unroll
        for (int i = j + 2; i < MN_PIVOT_HALF; i++) {
            x[i] = fma(-g[i], x[j + 1], fma(-f[i], x[j], x[i]));
        }
    }
    return all_kept;
}

/* Two numbers of the sum of PARTS matrices that lie PITCH doubles apart. */
template <int PARTS, int PITCH> __device__ inline double2 mn_pivot_pair(const double *from) {
    if (PARTS == 1) return *(const double2 *)from;
    const double2 low = mn_pivot_pair<(PARTS + 1) / 2, PITCH>(from);
    const double2 high = mn_pivot_pair<(PARTS + 1) / 2, PITCH>(from + PITCH * (PARTS / 2));
    return make_double2(low.x + high.x, low.y + high.y);
}

/* The upper triangle of a symmetric matrix of eight rows of 16, from its lower one. */
__device__ inline void mn_pivot_load(double (&a)[MN_PIVOT_HALF][MN_PIVOT_HALF],
                                     const double *from) {
#pragma unroll
    for (int k = 0; k < MN_PIVOT_HALF; k++) {
#pragma unroll
        for (int i = 0; i <= k; i += 2) {
            const double2 pair = *(const double2 *)(from + MN_PIVOT_PITCH * k + i);
            a[i][k] = pair.x;
            if (i < k) a[i + 1][k] = pair.y;
        }
    }
}

/* x: rows [first, first + 8) of this lane's column. */
__device__ inline void mn_pivot_column(double (&x)[MN_PIVOT_HALF], const mn_pivot_smem &smem,
                                       int first) {
    const int lane = (int)threadIdx.x % 32, t = lane % 16;
#pragma unroll
    for (int i = 0; i < MN_PIVOT_HALF; i++) {
        x[i] = lane < 16 ? smem.square[first + i][t] : first + i == t ? 1.0 : 0.0;
    }
}

/* S by one warp from its fragments in `sum`: rows [0, 8) by columns [0, 8) and [8, 16), and rows
 * [8, 16) by columns [8, 16). The second goes where it belongs, the upper triangles of the others
 * below the diagonal: nobody looks at the rest. Each lane reads what it has written itself. */
__device__ inline void mn_pivot_place(mn_pivot_smem &smem) {
    const int lane = (int)threadIdx.x % 32, row = lane / 4, column = 2 * (lane % 4);
    double2 sum[3];
#pragma unroll
    for (int f = 0; f < 3; f++) sum[f] = *(const double2 *)&smem.sum[64 * f + 2 * lane];
    *(double2 *)&smem.square[row][MN_PIVOT_HALF + column] = sum[1];
#pragma unroll
    for (int f = 0; f < 3; f += 2) {
        double(*to)[MN_PIVOT_PITCH] = smem.square + 4 * f;
        if (row <= column) to[column][4 * f + row] = sum[f].x;
        if (row <= column + 1) to[column + 1][4 * f + row] = sum[f].y;
    }
    __syncwarp();
}

/* S and r2 are in shared memory. Leaves L^-1, variances and 1 / sigma in `found`, for after a
 * barrier. Both halves run the same instructions. If not CAREFUL, what it leaves is right only if
 * it says so; then it is the same. */
template <bool CAREFUL>
__device__ inline bool mn_pivot(mn_pivot_smem &smem, mn_pivot_found &found) {
    const int lane = (int)threadIdx.x % 32, t = lane % 16;
    double a[MN_PIVOT_HALF][MN_PIVOT_HALF], x[MN_PIVOT_HALF], y[MN_PIVOT_HALF];
    mn_pivot_column(x, smem, 0);
    bool kept = true;
#pragma unroll 1
    for (int first = 0;; first = MN_PIVOT_HALF) {
        mn_pivot_load(a, &smem.square[first][first]);
        kept = mn_pivot_eight<CAREFUL>(a, x, smem, found, first) && kept;
#pragma unroll
        for (int i = 0; i < MN_PIVOT_HALF; i++) {
            if (lane >= 16) found.undo[first + i][t] = x[i];
        }
        if (first > 0) return kept;
        __syncwarp();
        mn_pivot_column(y, smem, MN_PIVOT_HALF);    // not before: it would not stay in registers
#pragma unroll
        for (int k = 0; k < MN_PIVOT_HALF; k += 2) {    // eight sums abreast, written behind them
#pragma unroll
            for (int i = 0; i < MN_PIVOT_HALF; i++) {
                const double2 row = *(const double2 *)&smem.rows[i][k];
                y[i] = fma(-row.y, x[k + 1], fma(-row.x, x[k], y[i]));
            }
        }
#pragma unroll
        for (int i = 0; i < MN_PIVOT_HALF; i++) {
            if (lane >= MN_PIVOT_HALF && lane < 16) smem.square[MN_PIVOT_HALF + i][t] = y[i];
            x[i] = y[i];
        }
        __syncwarp();
    }
}

/* What a warp does. */
enum role { WORKS, PIVOTS, LOADS, LEAVES };

template <int RP, int CL> struct sizes {
    static constexpr int ALL = RP / 8;    // workers of the cluster
    static constexpr int WORKERS = ALL / CL;
    /* Whether workers make sums of the next chunk while the pivot factorises; one block. */
    static constexpr bool AHEAD = RP <= 64;
    static constexpr int THREADS = 32 * (WORKERS + 3);
    static constexpr int OWN = RP / CL;      // rows of a block
    static constexpr int TILES = RP / 16;    // column blocks of a worker
    /* Whether the pivot has registers for a first attempt without branches. */
    static constexpr bool TWICE = RP < 128 || (RP == 128 && CL > 1);
    /* Two blocks: a worker's half of the columns is one block's. */
    static constexpr bool HALVES = CL == 2;
    static constexpr int FOURS = WORKERS / 4;
    static constexpr int GROUP = WORKERS < 8 ? WORKERS : 8;
    static constexpr int GROUPS = WORKERS / GROUP;    // of a block
    static constexpr int PARTS = CL * GROUPS;         // of a sum, in the end
    /* Numbers of a worker's part of sums: fragments, three of S and four of C. */
    static constexpr int PART = MN_PIVOT_SUM + (AHEAD ? 256 : 0);
    static constexpr int SUMS_BYTES = (CL - 1) * GROUPS * MN_PIVOT_SUM * (int)sizeof(double);
    static constexpr int SMEM_TILE_BYTES = MN_SCAN_CHUNK * (RP - OWN) * (int)sizeof(double);
    /* Of the 16384 in a quarter of a processor, which has up to three warps of a small block; those
     * of 128 rows leave the mean's some. */
    static constexpr int REGISTERS = WORKERS == 16          ? 96
                                     : RP == 128 && CL == 2 ? 120
                                     : WORKERS == 8         ? 168
                                                            : 232;
};

/* Warps 0, 4, 8 of a block have the first quarter of a processor: the pivot's, where workers
 * multiply beside it. */
template <int RP, int CL>
__device__ inline role role_of(int warp) {
    using of = sizes<RP, CL>;
    const int pivot = of::AHEAD ? 0 : of::WORKERS, leaves = of::AHEAD ? 4 : of::WORKERS + 2;
    const int loads = !of::AHEAD ? of::WORKERS + 1 : of::WORKERS == 8 ? 8 : 6;
    return warp == pivot ? PIVOTS : warp == leaves ? LEAVES : warp == loads ? LOADS : WORKS;
}

/* The worker that a warp is. */
template <int RP, int CL>
__device__ inline int worker_of(int warp) {
    return sizes<RP, CL>::AHEAD ? warp - 1 - warp / 4 : warp;
}

/* Sums over rows, of which S alone is wanted where the step before has not worked ahead; W comes
 * where then nobody writes. */
template <int RP, int CL> union alignas(16) lone_sums {
    double sums[sizes<RP, CL>::PARTS][MN_PIVOT_SUM];
    double weights[MN_SCAN_CHUNK][MN_PIVOT_PITCH];    // W
};

template <int RP, int CL> struct alignas(16) smem {
    using of = sizes<RP, CL>;
    double keys[8][2 * RP + 2];
    double noised[of::OWN / 32][MN_SCAN_CHUNK][40];
    double ends[2][3][RP];                           // of chunks in turn
    double before[2][MN_SCAN_CHUNK][of::OWN + 4];    // B by halves of the columns
    double smem_tile[MN_SCAN_CHUNK][RP + 4];         // Phi z
    double parts[of::WORKERS][of::PART];             // of S and C, by fragments
    double spread[of::WORKERS][MN_SCAN_CHUNK];       // of qh'Ph qh
    lone_sums<RP, CL> lone;
    double ahead[of::PART];                          // S0 and C
    double raise[of::WORKERS][2], raises[of::ALL / 4][2];
    mn_pivot_found found[2];    // of steps in turn
    mn_pivot_smem token;
    double noise[2][MN_SCAN_CHUNK];               // r2
    uint64_t full[3];                                // barriers: sums, tile of other blocks; passed
    uint64_t arrived[4];                          // keys and the like, queries, ends by chunks
    int length, first;                            // tokens, place of the first chunk
    int how[2];                                   // chunks in turn: 0, or 1 + `begin` if steep
    alignas(16) double queries[8][2 * RP + 2];    // last: only where they are wanted
};

/* ---- blocks of a cluster --------------------------------------------------------------------- */

template <int CL> __device__ inline unsigned rank_of_block(void) {
    unsigned rank = 0;
#if __CUDA_ARCH__ >= 900
    if (CL > 1) rank = cuda::ptx::get_sreg_cluster_ctarank();
#endif
    return rank;
}

/* The same, asked anew: a number to be kept would be one of those that local memory keeps. */
template <int CL>
__device__ inline unsigned rank_again(void) {
    unsigned rank = 0;
#if __CUDA_ARCH__ >= 900
    if (CL > 1) asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
#endif
    return rank;
}

/* What this block has left is to be seen by the others. */
template <int CL> __device__ inline void cluster_arrive(void) {
#if __CUDA_ARCH__ >= 900
    if (CL > 1) mn_cluster_arrive();
#endif
}

/* Waits for all blocks to have arrived. */
template <int CL> __device__ inline void cluster_wait(void) {
#if __CUDA_ARCH__ >= 900
    if (CL > 1) mn_cluster_wait();
#endif
}

/* *place = x in all blocks of the cluster, seen after the next cluster arrive and wait. */
template <int CL> __device__ inline void cluster_store(double *place, double x) {
    if (CL == 1) *place = x;
#if __CUDA_ARCH__ >= 900
    const unsigned here = (unsigned)__cvta_generic_to_shared(place);
#pragma unroll
    for (int rank = 0; rank < (CL > 1 ? CL : 0); rank++) {
        const uint32_t there = mn_cluster_address(here, (unsigned)rank);
        asm volatile("st.shared::cluster.f64 [%0], %1;" ::"r"(there), "d"(x) : "memory");
    }
#endif
}

/* visit(place, full) with the addresses of both in each other block of the cluster. */
template <int CL, typename F>
__device__ inline void for_others(const double *place, const uint64_t *full, unsigned rank,
                                  F visit) {
#if __CUDA_ARCH__ >= 900
    const unsigned here = (unsigned)__cvta_generic_to_shared(place);
    const unsigned barrier = (unsigned)__cvta_generic_to_shared(full);
#pragma unroll
    for (int i = 1; i < CL; i++) {
        const unsigned other = (rank + i) % CL;
        visit(mn_cluster_address(here, other), mn_cluster_address(barrier, other));
    }
#endif
}

/* A pair of neighbours to all blocks; the others' barriers `full` count its bytes. */
template <int CL>
__device__ inline void store_async_pair(double *place, uint64_t *full, unsigned rank, double2 x) {
    *(double2 *)place = x;
    for_others<CL>(place, full, rank, [=](unsigned there, unsigned count) {
#if __CUDA_ARCH__ >= 900
        mn_cluster_store(there, x, count);
#endif
    });
}

/* Bytes that other blocks are to send, and their being there. */
template <int CL> __device__ inline void expect(uint64_t *full, int bytes) {
    if (CL > 1) mn_state_scan_expect(full, bytes / 8);
}

template <int CL> __device__ inline void await_full(uint64_t *full, unsigned turn) {
    if (CL > 1) mn_state_scan_await(full, turn);
}

/* A barrier of all threads of a block that two roles come to at different places. */
template <int ID, int COUNT> __device__ inline void named_barrier(void) {
    __syncwarp();
    mn_named_barrier_sync(ID, COUNT);
}

/* ---- the work of a worker -------------------------------------------------------------------- */

/* Where a block is, and which tokens [low, high) of the chunk at `place` it works on. `turns`
 * counts the uses of the barriers: sums of other blocks, steps. */
struct ctx {
    int64_t scan, place, group, n, h, g;    // group: place * G + g
    unsigned rank, chunk;
    int buffer, low, high;
    unsigned turns[2];
    bool first;     // the first tokens behind a P_0 that was handed in
    bool primed;    // the step before has made this one's S and B
    bool there;     // or its B alone
    bool last;      // step of its chunk, behind which `rest` follow
    bool ahead;     // it makes the next one's S and B
    int rest;

    __device__ bool follows(void) const {    // the next chunk's inputs are asked for
        return last && rest > 0;
    }
};

/* Barriers of a block that roles come to at different places. */
enum {
    PARTS_THERE = 1,    // workers, the warp that loads: what they have multiplied is not read again
    FOUND = 2,          // all: S is factorised
    SOLVED = 3,         // all, ahead without waiting the pivot: z and W are there
    SUMS_THERE = 4,     // workers, pivot
    WORKERS_ALONE = 5,
};

template <int RP, int CL> struct worker {
    using of = sizes<RP, CL>;
    double P[of::TILES][2][2];
    double B[2][2][2];                  // of these rows, over half of the columns
    int index, lane, row, own, part;    // own warp; first row, in the block too; half of columns
    int place;                          // of its parts of sums, by rows and halves
    unsigned rank;                      // of the block

    /* What follows from the thread's number, for each stage anew: kept from one to the next it
     * would be in local memory, of which L1 holds little beside so much shared memory, and each
     * look would wait for L2. A shuffle's result is not known to be the same as the last one. */
    __device__ void sit(void) {
        rank = rank_again<CL>();
        const unsigned thread = __shfl_sync(0xffffffffu, threadIdx.x, (int)threadIdx.x % 32);
        index = worker_of<RP, CL>((int)thread / 32), lane = (int)thread % 32;
        own = index / 2 * 16, row = (int)rank * of::OWN + own;
        part = (index ^ (of::HALVES ? index / 4 : 0)) % 2, place = index / 2 * 2 + part;
    }

    __device__ int column(int b) const {
        return part * (RP / 2) + 8 * b;
    }

    /* B of the keys in shared memory, or one column block's part in it. */
    __device__ void begin(const smem<RP, CL> &m) {
        const int token = lane / 4, pair = 2 * (lane % 4);
#pragma unroll
        for (int r = 0; r < 2; r++) {
#pragma unroll
            for (int half = 0; half < 2; half++) {
                const int c = own + 8 * r + pair;
                const double2 start = *(double2 *)&m.noised[c / 32][8 * half + token][c % 32];
                B[r][half][0] = part ? 0.0 : start.x, B[r][half][1] = part ? 0.0 : start.y;
            }
        }
    }

    __device__ void add(const double (&left)[8][2 * RP + 2], int b) {
        double a[4];
        mn_state_scan_left(a, &left[lane / 4][2 * column(b) + 4 * (lane % 4)]);
        mn_mma_f64_k8(B[0], a, P[b][0]);
        mn_mma_f64_k8(B[1], a, P[b][1]);
    }

    /* B to shared memory, for `solve`. */
    __device__ void put_before(smem<RP, CL> &m) const {
        const int token = lane / 4, pair = 2 * (lane % 4);
#pragma unroll
        for (int r = 0; r < 2; r++) {
#pragma unroll
            for (int half = 0; half < 2; half++) {
                *(double2 *)&m.before[part][8 * half + token][own + 8 * r + pair] = make_double2(
                    B[r][half][0], B[r][half][1]);
            }
        }
    }

    /* B is not read before it is made again: no register has to keep it. */
    __device__ void forget(void) {
#pragma unroll
        for (int x = 0; x < 8; x++) B[x / 4][x / 2 % 2][x % 2] = 0.0;
    }

    /* B of these rows and half of the columns: of the keys that are there. */
    __device__ void multiply(const smem<RP, CL> &m) {
        begin(m);
#pragma unroll
        for (int b = 0; b < of::TILES; b++) add(m.keys, b);
    }

    /* Its part of S. */
    __device__ void measure(smem<RP, CL> &m) const {
        const int token = lane / 4, pair = 2 * (lane % 4);
        double s[2][2][2] = {};
#pragma unroll
        for (int r = 0; r < 2; r++) {
            const double a[4] = { B[r][0][0], B[r][1][0], B[r][0][1], B[r][1][1] };
#pragma unroll
            for (int half = 0; half < 2; half++) {
                double b[2];
                mn_state_scan_right(b, &m.keys[token][2 * (row + 8 * r + pair)], half);
                mn_mma_f64_k8(s[half], a, b);
            }
        }
        double *to = &m.parts[place][2 * lane];
        *(double2 *)to = make_double2(s[0][0][0], s[0][0][1]);
        *(double2 *)(to + 64) = make_double2(s[1][0][0], s[1][0][1]);
        *(double2 *)(to + 128) = make_double2(s[1][1][0], s[1][1][1]);
    }

    /* Its part of C, rows being the next chunk's tokens, whose keys are there: B is still this
     * one's. */
    __device__ void compare(smem<RP, CL> &m, const double (&phi)[RP], bool turns) const {
        const int pair = 2 * (lane % 4);
        double c[2][2][2] = {};
#pragma unroll
        for (int r = 0; r < 2; r++) {
            double a[4];
            mn_state_scan_left(a, &m.keys[lane / 4][2 * (row + 8 * r + pair)]);
            const double2 f = *(const double2 *)&phi[row + 8 * r + pair];
#pragma unroll
            for (int half = 0; half < 2; half++) {
                const double x = B[r][half][0], y = B[r][half][1];
                double b[2] = { f.x * x, f.y * y };
                if (turns) b[0] = f.x * x - f.y * y, b[1] = f.y * x + f.x * y;
                mn_mma_f64_k8(c[half], a, b);
            }
        }
#pragma unroll
        for (int f = 0; f < 4; f++) {
            *(double2 *)&m.parts[place][MN_PIVOT_SUM + 64 * f + 2 * lane] = make_double2(
                c[f / 2][f % 2][0], c[f / 2][f % 2][1]);
        }
    }

    /* COUNT fragments of the workers' parts added up by groups, a warp each at a time, to all
     * blocks; a block's sum has COUNT fragments at `sums`. */
    template <int COUNT>
    __device__ void gather(smem<RP, CL> &m, double *sums) const {
#pragma unroll
        for (int x = 0; x < COUNT * of::GROUPS; x += of::WORKERS) {
            const int group = (x + index) / COUNT, f = (x + index) % COUNT;
            if (group >= of::GROUPS) return;
            double2 sum[of::GROUP / 4];
#pragma unroll
            for (int four = 0; four < of::GROUP / 4; four++) {
                const double(*from)[of::PART] = m.parts + group * of::GROUP + 4 * four;
                double2 x[4];
#pragma unroll
                for (int i = 0; i < 4; i++) {
                    x[i] = *(const double2 *)&from[i][64 * f + 2 * lane];
                }
                sum[four] = make_double2((x[0].x + x[1].x) + (x[2].x + x[3].x),
                                         (x[0].y + x[1].y) + (x[2].y + x[3].y));
            }
            if (of::GROUP == 8) sum[0].x += sum[of::GROUP / 8].x, sum[0].y += sum[of::GROUP / 8].y;
            double *to = sums + (rank * of::GROUPS + group) * 64 * COUNT;
            store_async_pair<CL>(to + 64 * f + 2 * lane, &m.full[0], rank, sum[0]);
        }
    }

    /* This worker's part of qh'Ph qh, in the place of B. */
    __device__ void spread(smem<RP, CL> &m) {
        double sums[2] = { 0.0, 0.0 };
        const int token = lane / 4, pair = 2 * (lane % 4);
#pragma unroll
        for (int x = 0; x < 8; x++) B[x / 4][x / 2 % 2][x % 2] = 0.0;
#pragma unroll
        for (int b = 0; b < of::TILES; b++) add(m.queries, b);
#pragma unroll
        for (int half = 0; half < 2; half++) {
#pragma unroll
            for (int r = 0; r < 2; r++) {
                double q[2];
                mn_state_scan_right(q, &m.queries[token][2 * (row + 8 * r + pair)], half);
                sums[half] = fma(B[r][half][0], q[0], fma(B[r][half][1], q[1], sums[half]));
            }
            sums[half] += __shfl_xor_sync(0xffffffffu, sums[half], 1);
            sums[half] += __shfl_xor_sync(0xffffffffu, sums[half], 2);
            if (lane % 4 == 0) m.spread[place][8 * half + token] = sums[half];
        }
    }

    /* P <- Phi (P + n) Phi' */
    __device__ void move(const double (&ends)[3][RP], bool turns) {
        const int r = lane / 4, c = 2 * (lane % 4);
#pragma unroll
        for (int m = 0; m < 2; m++) {
            const double n = ends[1][row + 8 * m + r], cross = ends[2][row + 8 * m + r];
            const double x = r == c ? n : r == c + 1 ? cross : 0.0;
            const double y = r == c ? cross : r == c + 1 ? n : 0.0;
#pragma unroll
            for (int b = 0; b < of::TILES; b++) {
                if (column(b) == row + 8 * m) P[b][m][0] += x, P[b][m][1] += y;
            }
        }
        if (turns) turn(ends[0]);
        else scale(ends[0]);
    }

    /* P <- Phi P Phi', Phi being of numbers, or of pairs. */
    __device__ void scale(const double (&phi)[RP]) {
        const double mine[2] = { phi[row + lane / 4], phi[row + 8 + lane / 4] };
#pragma unroll
        for (int b = 0; b < of::TILES; b++) {
            const double2 f = *(const double2 *)&phi[column(b) + 2 * (lane % 4)];
#pragma unroll
            for (int m = 0; m < 2; m++) P[b][m][0] *= mine[m] * f.x, P[b][m][1] *= mine[m] * f.y;
        }
    }

    __device__ void turn(const double (&phi)[RP]) {
        const int r = lane / 4;
        double2 mine[2];
#pragma unroll
        for (int m = 0; m < 2; m++) {
            mine[m] = *(const double2 *)&phi[row + 8 * m + r / 2 * 2];
            if (r % 2 == 0) mine[m].y = -mine[m].y;
        }
#pragma unroll
        for (int b = 0; b < of::TILES; b++) {
            const double2 f = *(const double2 *)&phi[column(b) + 2 * (lane % 4)];
#pragma unroll
            for (int m = 0; m < 2; m++) {
                double(&x)[2] = P[b][m];
                const double y[2] = { f.x * x[0] - f.y * x[1], f.y * x[0] + f.x * x[1] };
#pragma unroll
                for (int i = 0; i < 2; i++) {
                    const double other = __shfl_xor_sync(0xffffffffu, y[i], 4);
                    x[i] = mine[m].x * y[i] + mine[m].y * other;
                }
            }
        }
    }

    /* z = L^-1 B of eight rows, to memory and, as Phi z, to all blocks. */
    __device__ void solve(smem<RP, CL> &m, const ctx &s, const mn_state_scan_job &job) const {
        const int i = lane % 4, j = lane / 4, first = row + 8 * part;
        const mn_pivot_found &found = m.found[s.turns[1] % 2];
        double z[2][2] = {};
#pragma unroll
        for (int from = 0; from < MN_SCAN_CHUNK; from += 8) {    // few registers: B waits beside P
            double a[4], b[2];
#pragma unroll
            for (int k = 0; k < 2; k++) {
                const int t = from + 4 * k + i;
                a[2 * k] = found.undo[j][t], a[2 * k + 1] = found.undo[8 + j][t];
                b[k] = m.before[0][t][own + 8 * part + j] + m.before[1][t][own + 8 * part + j];
            }
            mn_mma_f64_k8(z, a, b);
        }
        const double2 phi = *(double2 *)&m.ends[s.buffer][0][first + 2 * i];
        put_z(z, first, s, job);    // in front of what others wait for: it has registers of its own
#pragma unroll
        for (int half = 0; half < 2; half++) {
            const int token = 8 * half + j;
            const double x = z[half][0], y = z[half][1];
            double2 moved = make_double2(phi.x * x, phi.y * y);
            if (job.step == 2) moved = make_double2(phi.x * x - phi.y * y, phi.y * x + phi.x * y);
            store_async_pair<CL>(&m.smem_tile[token][first + 2 * i], &m.full[1], rank, moved);
        }
    }

    /* z of eight rows to memory. */
    __device__ void put_z(const double (&z)[2][2], int first, const ctx &s,
                          const mn_state_scan_job &job) const {
        const int i = lane % 4, j = lane / 4;
        double *out = job.work.z + s.group * mn_state_scan_smem_tile(RP) +
                      mn_state_scan_smem_tile_at(j, first + 2 * i, RP);
        if (s.high - s.low == MN_SCAN_CHUNK) {
            *(double2 *)out = make_double2(z[0][0], z[1][0]);
            *(double2 *)(out + 2) = make_double2(z[0][1], z[1][1]);
            return;
        }
#pragma unroll
        for (int half = 0; half < 2; half++) {
            const bool own = 8 * half + j >= s.low && 8 * half + j < s.high;
            if (own) out[half] = z[half][0], out[2 + half] = z[half][1];
        }
    }

    /* Waits for z of the other blocks. With two blocks one of a quarter's two workers has its
     * columns in this one: it multiplies while the other one waits. What it looks at instead is a
     * barrier that was passed at the start and has no other turn: a branch would cost all that
     * follows its uniform registers, and others' turns may be two ahead of a late worker. */
    __device__ void await_tile(smem<RP, CL> &m, const ctx &s) const {
        const bool own = of::HALVES && part == (int)rank;
        await_full<CL>(&m.full[own ? 2 : 1], own ? 0 : s.turns[1]);
        const int waits = of::HALVES ? 1 - (int)rank : 0;    // a worker that has waited
        if (index == waits && lane == 0) expect<CL>(&m.full[1], of::SMEM_TILE_BYTES);
    }

    /* P - Phi z (1 / sigma) z'Phi', and B of the next keys if these are there. */
    template <bool READS>
    __device__ void write(const smem<RP, CL> &m, const mn_pivot_found &found) {
        const int i = lane % 4, j = lane / 4;
        if (READS) begin(m);
        double a[8];
#pragma unroll
        for (int k = 0; k < 4; k++) {
            const double scale = -found.inverse[4 * k + i];
            a[2 * k] = m.smem_tile[4 * k + i][row + j] * scale;
            a[2 * k + 1] = m.smem_tile[4 * k + i][row + 8 + j] * scale;
        }
#pragma unroll
        for (int tile = 0; tile < of::TILES; tile++) {
            double b[4];
#pragma unroll
            for (int k = 0; k < 4; k++) b[k] = m.smem_tile[4 * k + i][column(tile) + j];
            mn_mma_f64_k16(P[tile], a, b);
            if (READS && tile > 0) add(m.keys, tile - 1);
        }
        if (READS) add(m.keys, of::TILES - 1);
    }

    /* B - W'(1 / sigma) Phi z, by one half of the tokens that write for each half of columns. */
    __device__ void correct(const smem<RP, CL> &m, const mn_pivot_found &found) {
        const int i = lane % 4, j = lane / 4;
        double a[4];
#pragma unroll
        for (int k = 0; k < 2; k++) {
            const int from = 8 * part + 4 * k + i;
            const double scale = -found.inverse[from];
            a[2 * k] = m.lone.weights[from][j] * scale;
            a[2 * k + 1] = m.lone.weights[from][8 + j] * scale;
        }
#pragma unroll
        for (int r = 0; r < 2; r++) {
            double b[2];
#pragma unroll
            for (int k = 0; k < 2; k++) b[k] = m.smem_tile[8 * part + 4 * k + i][row + 8 * r + j];
            mn_mma_f64_k8(B[r], a, b);
        }
    }

    /* Parts of the sums that decide whether P_0 is to be raised: k'(diagonal of P)k, k'n k */
    __device__ void weigh(smem<RP, CL> &m, bool turns) const {
        const double *k = m.keys[0];    // every other number
        double seen = 0.0, hidden = 0.0;
        const int r = lane / 4, c = 2 * (lane % 4);
#pragma unroll
        for (int b = 0; b < of::TILES; b++) {
#pragma unroll
            for (int half = 0; half < 2; half++) {
                if (column(b) != row + 8 * half || (r != c && r != c + 1)) continue;
                const double mine = k[2 * (column(b) + r)];
                const double other = k[2 * (column(b) + (r ^ 1))];
                const double(&x)[2] = P[b][half];
                seen += mine * mine * (r == c ? x[0] : x[1]);
                if (turns) seen += mine * other * (r == c ? x[1] : x[0]);
            }
        }
        if (part == 0 && lane < 16) {
            hidden = k[2 * (row + lane)] * m.noised[(own + lane) / 32][0][(own + lane) % 32];
        }
#pragma unroll
        for (int lanes = 16; lanes > 0; lanes >>= 1) {
            seen += __shfl_xor_sync(0xffffffffu, seen, lanes);
            hidden += __shfl_xor_sync(0xffffffffu, hidden, lanes);
        }
        if (lane == 0) m.raise[place][0] = seen, m.raise[place][1] = hidden;
    }

    __device__ void raise(double few) {
        const int r = lane / 4, c = 2 * (lane % 4);
#pragma unroll
        for (int b = 0; b < of::TILES; b++) {
#pragma unroll
            for (int half = 0; half < 2; half++) {
                if (column(b) != row + 8 * half) continue;
                if (r == c) P[b][half][0] *= 1.0 + few;
                if (r == c + 1) P[b][half][1] *= 1.0 + few;
            }
        }
    }

    /* P_0: given, or p0 on the diagonal. */
    __device__ void load(const mn_state_scan_job &job, const ctx &s) {
        const mn_bayes_args &p = job.p;
        const int64_t R = p.call.R;
        const float *given = mn_row<float>(p.P0, s.n, 0, s.h);
        double size = 1.0;
        if (p.p0.data) {
            size = p.call.dtype == MN_BF16 ? (double)mn_float(*mn_row<mn_bf16>(p.p0, 0, 0, s.h))
                                           : (double)*mn_row<float>(p.p0, 0, 0, s.h);
        }
        if (given) given += s.g * R * R;
#pragma unroll
        for (int e = 0; e < of::TILES * 4; e++) {
            const int r = row + 8 * (e / 2 % 2) + lane / 4;
            const int c = column(e / 4) + 2 * (lane % 4) + e % 2;
            const bool inside = r < R && c < R;
            double x = r == c && inside ? size : 0.0;
            if (given && inside) x = (double)given[r * R + c];
            P[e / 4][e / 2 % 2][e % 2] = x;
        }
    }

    /* One triangle, twice: the same bits on both sides. */
    __device__ void store(const mn_state_scan_job &job, const ctx &s) const {
        const int64_t R = job.p.call.R;
        float *last = mn_row<float>(job.p.P, s.n, 0, s.h);
        if (!last) return;
        last += s.g * R * R;
#pragma unroll
        for (int e = 0; e < of::TILES * 4; e++) {
            const int r = row + 8 * (e / 2 % 2) + lane / 4;
            const int c = column(e / 4) + 2 * (lane % 4) + e % 2;
            if (r >= R || c > r) continue;
            last[r * R + c] = last[c * R + r] = (float)P[e / 4][e / 2 % 2][e % 2];
        }
    }
};

/* ---- a step ---------------------------------------------------------------------------------- */

template <int ID, int RP, int CL> __device__ inline void barrier_of(void) {
    constexpr int WARPS = ID == WORKERS_ALONE           ? sizes<RP, CL>::WORKERS
                          : ID == FOUND || ID == SOLVED ? sizes<RP, CL>::WORKERS + 3
                                                        : sizes<RP, CL>::WORKERS + 1;
    named_barrier<ID, 32 * WARPS>();
}

/* Without waiting. */
template <int ID, int RP, int CL> __device__ inline void arrive_at(void) {
    __syncwarp();
    mn_named_barrier_arrive(ID, 32 * (sizes<RP, CL>::WORKERS + (ID == SOLVED ? 3 : 1)));
}

/* A P that was handed in, rounded to float32, may be indefinite by as much; where the first key or
 * the noise of its write shows that, the diagonal is raised by a few roundings (see ref/bayes.c).
 * All threads of the cluster call, once S is summed up; says whether it has been. */
template <role ROLE, int RP, int CL>
__device__ static bool raised(worker<RP, CL> &mine, smem<RP, CL> &m, const ctx &s,
                              const mn_state_scan_job &job) {
    using of = sizes<RP, CL>;
    const double few = 8.0 * 0x1p-24;
    if (ROLE == WORKS) mine.weigh(m, job.step == 2);
    __syncthreads();
    if (threadIdx.x < 2 * of::FOURS) {
        const int four = (int)threadIdx.x / 2, which = (int)threadIdx.x % 2;
        double sum = 0.0;
        for (int w = 0; w < 4; w++) sum += m.raise[4 * four + w][which];
        cluster_store<CL>(&m.raises[s.rank * of::FOURS + four][which], sum);
    }
    __syncthreads();
    cluster_arrive<CL>(), cluster_wait<CL>();
    double seen = 0.0, hidden = 0.0;
    for (int four = 0; four < of::ALL / 4; four++) {
        seen += m.raises[four][0], hidden += m.raises[four][1];
    }
    const double variance = mn_pivot_pair<of::PARTS, MN_PIVOT_SUM>(m.lone.sums[0]).x;
    const double scale = few * (seen + hidden), r2 = m.noise[s.buffer][0];
    cluster_arrive<CL>(), cluster_wait<CL>();
    if (fmin(variance, r2) >= scale || hidden >= scale) return false;
    if (ROLE == WORKS) mine.raise(few);
    return true;
}

/* A part of a step that is done once more if P_0 has been raised. */
template <role ROLE, int RP, int CL, typename F>
__device__ static void until_raised(worker<RP, CL> &mine, smem<RP, CL> &m, ctx &s,
                                    const mn_state_scan_job &job, F part) {
    for (bool again = false;; again = true) {
        part();
        s.turns[0]++;
        if (!s.first || again || !raised<ROLE>(mine, m, s, job)) return;
    }
}

/* One step of a steep chunk in shared memory, by workers: a chunk's place, and its buffer. */
template <int RP, int CL>
__device__ static void fill_steep(smem<RP, CL> &m, const mn_state_scan_job &job,
                                  const worker<RP, CL> &mine, unsigned rank, int64_t place,
                                  int buffer, const mn_state_scan_steep_step &step) {
    using of = sizes<RP, CL>;
    constexpr int THREADS = 32 * of::WORKERS;
    const double *keys = job.work.keys + place * mn_state_scan_smem_tile(RP);
    const double *steps = job.work.noised + place * mn_state_scan_noised(RP);
    const double *ends = job.work.ends + place * 3 * RP;
    const double l2 = step.front ? 0.0 : steps[MN_SCAN_CHUNK * RP + step.token];
    const int thread = 32 * mine.index + mine.lane;
#pragma unroll 1
    for (int e = thread; e < MN_SCAN_CHUNK * RP; e += THREADS) {
        const int t = e / RP, r = e % RP, own = r - (int)rank * of::OWN;
        const int at = mn_state_scan_smem_tile_at(t, r, RP);
        const double k = step.has(t) ? keys[at] : 0.0;
        m.keys[0][at] = k;
        if (own >= 0 && own < of::OWN) {
            double nk = l2 * k;
            if (step.front) nk = step.has(t) ? steps[t * RP + r] : 0.0;
            m.noised[own / 32][t][own % 32] = nk;
        }
    }
    mn_state_scan_steep_end<RP, THREADS>(m.ends[buffer], ends, steps, step, thread);
    mn_state_scan_before_copies();
    barrier_of<WORKERS_ALONE, RP, CL>();
}

/* ---- the workers' part ----------------------------------------------------------------------- */

/* B, unless it is there, and S, by themselves. */
template <int RP, int CL>
__device__ static void work_alone(worker<RP, CL> &mine, smem<RP, CL> &m, ctx &s,
                                  const mn_state_scan_job &job) {
    bool there = s.there;
    until_raised<WORKS>(mine, m, s, job, [&] {
        mine.sit();
        if (!there) mine.multiply(m);
        mine.put_before(m), mine.measure(m);
        mine.sit();
        barrier_of<PARTS_THERE, RP, CL>();
        mine.template gather<3>(m, m.lone.sums[0]);
        barrier_of<SUMS_THERE, RP, CL>();
        if (s.first) await_full<CL>(&m.full[0], s.turns[0]);
        there = false;
    });
}

/* Waits for the next chunk's keys, with nothing behind a steep token. */
template <int RP, int CL>
__device__ static void await_next(const worker<RP, CL> &mine, smem<RP, CL> &m, const ctx &s,
                                  const mn_state_scan_job &job) {
    mn_state_scan_await(&m.arrived[0], s.chunk + 1);
#if __CUDA_ARCH__ < 900
    if (!s.primed) barrier_of<PARTS_THERE, RP, CL>();
#endif
    if (!mn_state_scan_is_steep(m.keys[0], RP)) return;
    const int begin = mn_state_scan_steep_begin(m.keys[0], RP);
    const mn_state_scan_steep_step front = { begin - 1, job.step, true };
    mn_state_scan_await(&m.arrived[2 + 1 - s.buffer], (s.chunk + 1) / 2);
    fill_steep(m, job, mine, s.rank, s.place + job.p.call.H, 1 - s.buffer, front);
}

/* What of the next chunk's B and S does not wait for this one's writes, P being Q. */
template <int RP, int CL>
__device__ static void work_ahead(worker<RP, CL> &mine, smem<RP, CL> &m, const ctx &s) {
    mine.sit();
    mine.multiply(m), mine.measure(m);
    mine.sit();
    barrier_of<PARTS_THERE, RP, CL>();
    mine.template gather<7>(m, m.ahead);
    arrive_at<SUMS_THERE, RP, CL>();
}

/* Writes P, and B of the next chunk where it is not steep. */
template <int RP, int CL>
__device__ static void write_reading(worker<RP, CL> &mine, smem<RP, CL> &m, const ctx &s) {
    const mn_pivot_found &found = m.found[s.turns[1] % 2];
    bool reads = s.follows();
    if (reads) {
        mn_state_scan_await(&m.arrived[0], s.chunk + 1);
        reads = !mn_state_scan_is_steep(m.keys[0], RP);
    }
    if (reads) mine.template write<true>(m, found);
    else mine.template write<false>(m, found), mine.forget();
}

template <int RP, int CL>
__device__ static void work(worker<RP, CL> &mine, smem<RP, CL> &m, ctx &s,
                            const mn_state_scan_job &job) {
    using of = sizes<RP, CL>;
    if (!s.primed) work_alone(mine, m, s, job);
    mine.sit();
    mn_state_scan_await(&m.arrived[2 + s.buffer], s.chunk / 2);
    if constexpr (of::AHEAD) {
        if (s.ahead) {
            await_next(mine, m, s, job);
            mine.compare(m, m.ends[s.buffer][0], job.step == 2);
        }
    }
    if (job.spreads) mn_state_scan_await(&m.arrived[1], s.chunk), mine.spread(m);
    mine.sit();
    mine.move(m.ends[s.buffer], job.step == 2);
    if constexpr (of::AHEAD) {
        if (s.ahead) work_ahead(mine, m, s);
    }
    mine.sit();
    barrier_of<FOUND, RP, CL>();
    mine.solve(m, s, job);
    mine.sit();
    barrier_of<SOLVED, RP, CL>();
    mine.await_tile(m, s);
    if constexpr (!of::AHEAD) {
        write_reading(mine, m, s);
        return;
    }
    const mn_pivot_found &found = m.found[s.turns[1] % 2];
    mine.template write<false>(m, found);
    if (s.ahead) mine.sit(), mine.correct(m, found), mine.put_before(m);
}

/* ---- the pivot's part ------------------------------------------------------------------------ */

/* W = L^-1 C and S = S0 - W'W / sigma of the next chunk. C lies with that one's tokens as rows, so
 * that a lane has its numbers of the right factor in the order 0 2 4 6 1 3 5 7 of the rows. */
template <int RP, int CL>
__device__ static void couple(smem<RP, CL> &m, const mn_pivot_found &found) {
    const int lane = (int)threadIdx.x % 32, i = lane % 4, j = lane / 4;
    double2 sums[7];
#pragma unroll
    for (int f = 0; f < 7; f++) sums[f] = *(const double2 *)&m.ahead[64 * f + 2 * lane];
    double a[8], w[2][2][2] = {};
#pragma unroll
    for (int f = 0; f < 4; f++) {
        const double2 x = *(const double2 *)&found.undo[8 * (f % 2) + j][8 * (f / 2) + 2 * i];
        a[4 * (f / 2) + f % 2] = x.x, a[4 * (f / 2) + 2 + f % 2] = x.y;
    }
#pragma unroll
    for (int half = 0; half < 2; half++) {
        const double2 low = sums[3 + half], high = sums[5 + half];
        const double c[4] = { low.x, low.y, high.x, high.y };
        mn_mma_f64_k16(w[half], a, c);
#pragma unroll
        for (int n = 0; n < 2; n++) {
            *(double2 *)&m.lone.weights[8 * n + j][8 * half + 2 * i] = make_double2(w[half][n][0],
                                                                                    w[half][n][1]);
        }
    }
    __syncwarp();
    double s[2][2][2] = { { { sums[0].x, sums[0].y }, { 0.0, 0.0 } },
                          { { sums[1].x, sums[1].y }, { sums[2].x, sums[2].y } } };
#pragma unroll
    for (int k = 0; k < 4; k++) {
        a[2 * k] = m.lone.weights[4 * k + i][j], a[2 * k + 1] = m.lone.weights[4 * k + i][8 + j];
    }
#pragma unroll
    for (int half = 0; half < 2; half++) {
        double b[4];
#pragma unroll
        for (int k = 0; k < 4; k++) b[k] = -found.inverse[4 * k + i] * a[2 * k + half];
        mn_mma_f64_k16(s[half], a, b);
    }
    *(double2 *)&m.token.sum[2 * lane] = make_double2(s[0][0][0], s[0][0][1]);
    *(double2 *)&m.token.sum[64 + 2 * lane] = make_double2(s[1][0][0], s[1][0][1]);
    *(double2 *)&m.token.sum[128 + 2 * lane] = make_double2(s[1][1][0], s[1][1][1]);
}

/* S by itself. */
template <int RP, int CL>
__device__ static void pivot_alone(worker<RP, CL> &mine, smem<RP, CL> &m, ctx &s,
                                   const mn_state_scan_job &job) {
    using of = sizes<RP, CL>;
    const int lane = (int)threadIdx.x % 32;
    const bool writes = lane >= s.low && lane < s.high;
    if (lane < MN_SCAN_CHUNK) m.token.r2[lane] = writes ? m.noise[s.buffer][lane] : 1.0;
    until_raised<PIVOTS>(mine, m, s, job, [&] {
        barrier_of<SUMS_THERE, RP, CL>();
        await_full<CL>(&m.full[0], s.turns[0]);
        if (lane == 0) expect<CL>(&m.full[0], of::SUMS_BYTES);
    });
#pragma unroll
    for (int f = 0; f < 3; f++) {
        *(double2 *)&m.token.sum[64 * f + 2 * lane] = mn_pivot_pair<of::PARTS, MN_PIVOT_SUM>(
            &m.lone.sums[0][64 * f + 2 * lane]);
    }
}

template <int RP, int CL>
__device__ static void pivot(worker<RP, CL> &mine, smem<RP, CL> &m, ctx &s,
                             const mn_state_scan_job &job) {
    using of = sizes<RP, CL>;
    const int lane = (int)threadIdx.x % 32;
    mn_pivot_found &found = m.found[s.turns[1] % 2];
    if (!s.primed) pivot_alone(mine, m, s, job);
    __syncwarp();
    mn_pivot_place(m.token);
    if (!of::TWICE || !mn_pivot<false>(m.token, found)) {
        __syncwarp();
        if (of::TWICE) mn_pivot_place(m.token);
        mn_pivot<true>(m.token, found);
    }
    if (s.ahead) barrier_of<SUMS_THERE, RP, CL>();
    barrier_of<FOUND, RP, CL>();
    if constexpr (!of::AHEAD) {
        barrier_of<SOLVED, RP, CL>();
        return;
    }
    if (s.ahead) {
        couple(m, found);
        const int how = m.how[1 - s.buffer];
        const bool writes = how == 0 || lane < how - 1;
        if (lane < MN_SCAN_CHUNK) m.token.r2[lane] = writes ? m.noise[1 - s.buffer][lane] : 1.0;
    }
    arrive_at<SOLVED, RP, CL>();
}

/* ---- copies, by a warp ----------------------------------------------------------------------- */

/* Asks for a chunk's keys, noise of states and of values. */
template <int RP, int CL>
__device__ static void request_keys(smem<RP, CL> &m, const mn_state_scan_job &job, const ctx &s,
                                    int64_t place, int buffer) {
    constexpr int SIZE = mn_state_scan_smem_tile(RP), ALL = mn_state_scan_noised(RP),
                  OWN = ALL / CL;
    constexpr int CHUNK = MN_SCAN_CHUNK;
    const double *r2 = job.work.r2 + (place * job.p.call.G + s.g) * CHUNK;
    if (threadIdx.x % 32 == 0) mn_state_scan_expect(&m.arrived[0], SIZE + OWN + CHUNK);
    __syncwarp();
    mn_state_scan_load<SIZE>(m.keys[0], job.work.keys + place * SIZE, &m.arrived[0]);
    mn_state_scan_load<OWN>(m.noised[0][0], job.work.noised + place * ALL + s.rank * OWN,
                            &m.arrived[0]);
    mn_state_scan_load<CHUNK>(m.noise[buffer], r2, &m.arrived[0]);
}

/* Asks for what moves P behind a chunk. */
template <int RP, int CL>
__device__ static void request_ends(smem<RP, CL> &m, const mn_state_scan_job &job, int64_t place,
                                    int buffer) {
    uint64_t *arrived = &m.arrived[2 + buffer];
    if (threadIdx.x % 32 == 0) mn_state_scan_expect(arrived, 3 * RP);
    __syncwarp();
    mn_state_scan_load<3 * RP>(m.ends[buffer][0], job.work.ends + place * 3 * RP, arrived);
}

template <int RP, int CL>
__device__ static void request_queries(smem<RP, CL> &m, const mn_state_scan_job &job,
                                       int64_t place) {
    if (!job.spreads) return;
    constexpr int SIZE = mn_state_scan_smem_tile(RP);
    if (threadIdx.x % 32 == 0) mn_state_scan_expect(&m.arrived[1], SIZE);
    __syncwarp();
    mn_state_scan_load<SIZE>(m.queries[0], job.work.queries + place * SIZE, &m.arrived[1]);
}

/* What the first chunks need; of the first one all but queries are there behind it. */
template <int RP, int CL>
__device__ static void load_first(smem<RP, CL> &m, const mn_state_scan_job &job, const ctx &s,
                                  int64_t length) {
    mn_state_scan_before_copies();
    request_keys(m, job, s, s.place, 0), request_queries(m, job, s.place);
    request_ends(m, job, s.place, 0);
    if (length > MN_SCAN_CHUNK) request_ends(m, job, s.place + job.p.call.H, 1);
    mn_state_scan_await(&m.arrived[0], 0);
    if (threadIdx.x % 32 == 0) m.how[0] = (int)m.keys[0][2 * RP];
}

/* Workers have read the next chunk's keys, and the place is the one's behind it: unless steps go
 * through a steep one there. */
template <int RP, int CL>
__device__ static void load_behind(smem<RP, CL> &m, const ctx &s, const mn_state_scan_job &job) {
    const int how = m.how[1 - s.buffer];
    barrier_of<PARTS_THERE, RP, CL>();
    if (how == 0 && s.rest > 1) {
        request_keys(m, job, s, s.place + 2 * job.p.call.H, s.buffer);
    }
}

/* Waits for the next chunk's keys and says what it is. */
template <int RP, int CL>
__device__ static void load_next(smem<RP, CL> &m, const ctx &s) {
    mn_state_scan_await(&m.arrived[0], s.chunk + 1);
#if __CUDA_ARCH__ < 900
    if (s.ahead && !s.primed) barrier_of<PARTS_THERE, RP, CL>();
#endif
    if (threadIdx.x % 32 == 0) m.how[1 - s.buffer] = (int)m.keys[0][2 * RP];
    __syncwarp();
}

template <int RP, int CL>
__device__ static void load(worker<RP, CL> &mine, smem<RP, CL> &m, ctx &s,
                            const mn_state_scan_job &job) {
    const int64_t next = s.place + job.p.call.H;
    if (!s.primed) {
        until_raised<LOADS>(mine, m, s, job, [] { barrier_of<PARTS_THERE, RP, CL>(); });
        if (s.follows()) request_keys(m, job, s, next, 1 - s.buffer);
    }
    if (s.ahead) load_next(m, s), load_behind(m, s, job);
    barrier_of<FOUND, RP, CL>();
    if (s.follows()) request_queries(m, job, next);
    if (s.follows() && !s.ahead) load_next(m, s);
#if __CUDA_ARCH__ < 900
    mn_state_scan_await(NULL, 0);
#endif
    barrier_of<SOLVED, RP, CL>();
    if (s.last && s.rest > 1) request_ends(m, job, s.place + 2 * job.p.call.H, s.buffer);
}

/* ---- results, by a warp ---------------------------------------------------------------------- */

/* What the means need besides z, and the word that the chunk is there. */
template <int RP, int CL>
__device__ static void leave(const mn_pivot_found &found, const ctx &s,
                             const mn_state_scan_job &job) {
    const int lane = (int)threadIdx.x % 32;
    double *undo = job.work.undo + s.group * MN_SCAN_UNDO;
    const int high = s.last ? MN_SCAN_CHUNK : s.high;    // rows that the means multiply by 0
    for (int e = 2 * lane; e < MN_SCAN_UNDO && s.rank == 0; e += 64) {
        const int t = e / (MN_SCAN_CHUNK + 4);
        if (t < s.low || t >= high) continue;
        *(double2 *)(undo + e) = *(const double2 *)&found.undo[0][e];
    }
    if (s.rank == 0 && lane >= s.low && lane < s.high) {
        job.work.inverse[s.group * 16 + lane] = found.inverse[lane];
        job.work.variance[s.group * 16 + lane] = found.variance[lane];
    }
    __syncwarp();
    if (lane == 0 && s.last) {
        mn_store_release(job.work.done + s.scan * MN_SCAN_BLOCKS + s.rank, (int)s.chunk + 1);
    }
    __syncwarp();
}

/* Parts of qh'Ph qh, by four workers each: 32 rows. */
template <int RP, int CL>
__device__ static void put_spread(const smem<RP, CL> &m, const ctx &s,
                                  const mn_state_scan_job &job) {
    using of = sizes<RP, CL>;
    const int t = (int)threadIdx.x % 32;
    if (!job.spreads || t < s.low || t >= s.high) return;
    for (int four = 0; four < of::FOURS; four++) {
        double sum = 0.0;
        for (int w = 0; w < 4; w++) sum += m.spread[4 * four + w][t];
        const int64_t part = s.group * MN_SCAN_SUMS + s.rank * of::FOURS + four;
        job.work.spread[part * MN_SCAN_CHUNK + t] = sum;
    }
}

template <int RP, int CL>
__device__ static void put(worker<RP, CL> &mine, smem<RP, CL> &m, ctx &s,
                           const mn_state_scan_job &job) {
    if (!s.primed) until_raised<LEAVES>(mine, m, s, job, [] {});
    barrier_of<FOUND, RP, CL>();
    put_spread(m, s, job);
    barrier_of<SOLVED, RP, CL>();
    leave<RP, CL>(m.found[s.turns[1] % 2], s, job);
}

/* ---- the scan -------------------------------------------------------------------------------- */

/* A step: tokens [s.low, s.high) of the chunk at s.place. */
template <role ROLE, int RP, int CL>
__device__ static void advance(worker<RP, CL> &mine, smem<RP, CL> &m, ctx &s,
                               const mn_state_scan_job &job) {
        if (ROLE == WORKS) work(mine, m, s, job);
    if (ROLE == PIVOTS) pivot(mine, m, s, job);
    if (ROLE == LOADS) load(mine, m, s, job);
    if (ROLE == LEAVES) put(mine, m, s, job);
    s.turns[1]++;
}

/* Barriers, by one thread. */
template <int RP, int CL>
__device__ static void open(smem<RP, CL> &m) {
    using of = sizes<RP, CL>;
    for (int i = 0; i < 3; i++) mn_state_scan_open(&m.full[i]);
    for (int i = 0; i < 4; i++) mn_state_scan_open(&m.arrived[i]);
    expect<CL>(&m.full[0], of::SUMS_BYTES), expect<CL>(&m.full[1], of::SMEM_TILE_BYTES);
    if (of::HALVES) expect<CL>(&m.full[2], 0);
    }

/* The chunks of a sequence, by warps of one role. */
template <role ROLE, int RP, int CL>
__device__ static void state_scan(smem<RP, CL> &m, ctx s, const mn_state_scan_job &job) {
    const mn_call &call = job.p.call;
    const int64_t all = mn_state_scan_length(job, s.n, s.h);
    worker<RP, CL> mine;
    mine.sit();
    s.place = mn_state_scan_slot(call, s.n) * call.H + s.h;
    if (ROLE == WORKS) mine.load(job, s);
    if (ROLE == LOADS && mine.lane == 0) {
        m.length = (int)all, m.first = (int)s.place;
        open(m);
    }
    s.turns[0] = s.turns[1] = 0;
    mn_pdl_wait();
    mn_pdl_launch_dependents();
    if (ROLE == LOADS && all > 0) load_first(m, job, s, all);
    __syncthreads();
    cluster_arrive<CL>(), cluster_wait<CL>();
    for (int chunk = 0;; chunk++) {
        const volatile int *length = &m.length, *front = &m.first;    // anew, as `sit` says
        const volatile int *hows = m.how;
        const int left = *length - chunk * MN_SCAN_CHUNK, how = hows[chunk % 2];
        if (left <= 0) break;
        s.place = *front + chunk * call.H;
        s.rest = (left - 1) / MN_SCAN_CHUNK;
        const bool steep = how != 0;
        const int begin = steep ? how - 1 : 1;
        const int end = steep ? min((int)MN_SCAN_CHUNK, left) : 1;
        s.group = s.place * call.G + s.g;
        s.chunk = (unsigned)chunk, s.buffer = chunk % 2;
        for (int token = begin - 1; token < end; token++) {
            const mn_state_scan_steep_step step = { token, job.step, token < begin };
            s.low = 0, s.high = MN_SCAN_CHUNK;    // zeros behind the last token
            s.last = token + 1 == end;
            s.primed = sizes<RP, CL>::AHEAD && chunk > 0 && step.front;
            s.ahead = sizes<RP, CL>::AHEAD && s.follows();
            s.there = !sizes<RP, CL>::AHEAD && chunk > 0 && !steep;
            if (steep) s.low = step.front ? 0 : token, s.high = token + 1;
            if (ROLE == WORKS && steep && !s.primed) {
                mn_state_scan_await(&m.arrived[2 + s.buffer], s.chunk / 2);
                fill_steep(m, job, mine, s.rank, s.place, s.buffer, step);
            }
            s.first = job.p.P0.data && chunk == 0 && s.low == 0 && s.high > 0;
            advance<ROLE>(mine, m, s, job);
        }
    }
    if (ROLE == WORKS) mine.store(job, s);
}

template <int RP, int CL>
__global__ void __maxnreg__((sizes<RP, CL>::REGISTERS))
    covariance_kernel(const __grid_constant__ mn_state_scan_job job) {
    extern __shared__ __align__(16) unsigned char memory[];
    smem<RP, CL> &m = *(smem<RP, CL> *)memory;
    const mn_call &call = job.p.call;
    ctx s;
    s.rank = rank_of_block<CL>();
    s.scan = blockIdx.x / CL;
    s.g = s.scan % call.G, s.h = s.scan / call.G % call.H, s.n = s.scan / call.G / call.H;
    if (job.redo) {    // nearly always nothing is to be done again
        mn_pdl_wait();
        if (mn_state_scan_length(job, s.n, s.h) == 0) return;
    }
    switch (role_of<RP, CL>((int)threadIdx.x / 32)) {
    case WORKS: state_scan<WORKS>(m, s, job); break;
    case PIVOTS: state_scan<PIVOTS>(m, s, job); break;
    case LOADS: state_scan<LOADS>(m, s, job); break;
    case LEAVES: state_scan<LEAVES>(m, s, job); break;
    }
}

/* ---- launches -------------------------------------------------------------------------------- */

template <int RP, int CL> static size_t smem_of(bool spreads) {
    typedef smem<RP, CL> all;
    return spreads ? sizeof(all) : offsetof(all, queries);
}

template <int RP, int CL> static int start(const mn_state_scan_job *job, cudaStream_t stream) {
    const mn_call &call = job->p.call;
    const size_t bytes = smem_of<RP, CL>(job->spreads);
    cudaError_t code = cudaFuncSetAttribute(
        covariance_kernel<RP, CL>, cudaFuncAttributeMaxDynamicSharedMemorySize, (int)bytes);
    if (code == cudaSuccess) {    // so that the mean finds room beside it
        code = cudaFuncSetAttribute(covariance_kernel<RP, CL>,
                                    cudaFuncAttributePreferredSharedMemoryCarveout,
                                    cudaSharedmemCarveoutMaxShared);
    }
    if (code != cudaSuccess) return code;
    cudaLaunchAttribute how[2] = {};
    how[0].id = cudaLaunchAttributeProgrammaticStreamSerialization;
    how[0].val.programmaticStreamSerializationAllowed = call.T > 0;    // behind `prepare`
    how[1].id = cudaLaunchAttributeClusterDimension;
    how[1].val.clusterDim.x = CL, how[1].val.clusterDim.y = how[1].val.clusterDim.z = 1;
    cudaLaunchConfig_t config = {};
    config.gridDim = dim3((unsigned)(mn_n_spans(call) * call.H * call.G * CL));
    config.blockDim = dim3(sizes<RP, CL>::THREADS);
    config.dynamicSmemBytes = bytes, config.stream = stream;
    config.attrs = how, config.numAttrs = CL > 1 ? 2 : 1;
    return cudaLaunchKernelEx(&config, covariance_kernel<RP, CL>, *job);
}

bool mn_state_scan_covariance_fits(const mn_state_scan_job *job) {
    const size_t most = (size_t)mn_device_props_current().shared_bytes;
    if (job->rows == 256) return mn_device_is_sm90() && smem_of<256, 4>(job->spreads) <= most;
    if (job->rows == 128) return smem_of<128, 1>(job->spreads) <= most;
    return smem_of<64, 1>(job->spreads) <= most;
}

/* A covariance of 128 rows has two or four processors where there are enough: the bits are the
 * same. */
int mn_state_scan_blocks(const mn_state_scan_job *job) {
    const int64_t processors = mn_device_props_current().processors;
    const int64_t scans = mn_n_spans(job->p.call) * job->p.call.H * job->p.call.G;
    if (job->rows == 256) return 4;
    if (job->rows < 128 || !mn_device_is_sm90() || 2 * scans > processors) return 1;
    return 4 * scans <= processors ? 4 : 2;
}

int mn_state_scan_covariance(const mn_state_scan_job *job, cudaStream_t stream) {
    if (job->rows == 32) return start<32, 1>(job, stream);
    if (job->rows == 64) return start<64, 1>(job, stream);
    if (job->rows == 256) return start<256, 4>(job, stream);
    if (job->blocks == 4) return start<128, 4>(job, stream);
    return job->blocks == 2 ? start<128, 2>(job, stream) : start<128, 1>(job, stream);
}

}    // namespace mneme::bayes
