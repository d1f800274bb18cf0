/* bayes_covariance_scan.cu - the covariance scan of bayes_fwd_chunk.cuh.
 *
 * A covariance has a cluster of CL blocks, each with RP / CL of its rows. A worker is a warp that
 * has 16 rows, two row blocks, and half of the columns, all in registers. One more warp of each
 * block, the pivot, factorises S while workers move P to the next frame, and brings the next
 * chunk's inputs. All blocks factorise alike. Sums over rows and columns are added by four
 * workers, by eight, and so on, so that results do not depend on CL.
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

/* Shared memory of a chunk's elimination. */
struct alignas(16) mn_pivot_smem {
    double r2[16], variance[16], inverse[16];
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
                                      int first_token) {
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
            *(double2 *)&smem.variance[first_token + j] = make_double2(one, left);
            *(double2 *)&smem.inverse[first_token + j] = make_double2(first, second);
        }
        if (first_token == 0 && lane >= MN_PIVOT_HALF && lane < 2 * MN_PIVOT_HALF) {
            *(double2 *)&smem.rows[lane - MN_PIVOT_HALF][j] =
                make_double2(x[j] * first, x[j + 1] * second);
        }
#pragma unroll
        for (int i = j + 2; i < MN_PIVOT_HALF; i++) {
            x[i] = fma(-g[i], x[j + 1], fma(-f[i], x[j], x[i]));
        }
    }
    return all_kept;
}

/* A number, or two, of the sum of PARTS squares that follow each other at `from`. */
template <int PARTS>
__device__ inline double mn_pivot_sum(const double *from) {
    if (PARTS == 1) return *from;
    const double low = mn_pivot_sum<(PARTS + 1) / 2>(from);
    return low + mn_pivot_sum<(PARTS + 1) / 2>(from + MN_PIVOT_SUM * (PARTS / 2));
}

template <int PARTS>
__device__ inline double2 mn_pivot_pair(const double *from) {
    if (PARTS == 1) return *(const double2 *)from;
    const double2 low = mn_pivot_pair<(PARTS + 1) / 2>(from);
    const double2 high = mn_pivot_pair<(PARTS + 1) / 2>(from + MN_PIVOT_SUM * (PARTS / 2));
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

/* S as the sum of PARTS at `sums`, 1, 2 or 4 of them, by one warp. Of each there are the fragments
 * of a product that hold rows [0, 8) by columns [0, 8) and [8, 16), and rows [8, 16) by columns
 * [8, 16). The second goes where it belongs, the upper triangles of the others below the diagonal:
 * nobody looks at the rest. All is read before any is written, or each read would wait for the
 * write in front of it. */
template <int PARTS>
__device__ inline void mn_pivot_add(mn_pivot_smem &smem, const double (*sums)[MN_PIVOT_SUM]) {
    const int lane = (int)threadIdx.x % 32, row = lane / 4, column = 2 * (lane % 4);
    double2 sum[3];
#pragma unroll
    for (int f = 0; f < 3; f++) sum[f] = mn_pivot_pair<PARTS>(&sums[0][64 * f + 2 * lane]);
    *(double2 *)&smem.square[row][MN_PIVOT_HALF + column] = sum[1];
#pragma unroll
    for (int f = 0; f < 3; f += 2) {
        double (*to)[MN_PIVOT_PITCH] = smem.square + 4 * f;
        if (row <= column) to[column][4 * f + row] = sum[f].x;
        if (row <= column + 1) to[column + 1][4 * f + row] = sum[f].y;
    }
    __syncwarp();
}

/* S and r2 are in shared memory. Leaves L^-1 in `undo`, rows of PITCH doubles, and variances and
 * 1 / sigma in shared memory, for after a barrier. Both halves run the same instructions. If not
 * CAREFUL, what it leaves is right only if it says so; then it is the same. */
template <bool CAREFUL, int PITCH>
__device__ inline bool mn_pivot(mn_pivot_smem &smem, double (*undo)[PITCH]) {
    const int lane = (int)threadIdx.x % 32, t = lane % 16;
    double a[MN_PIVOT_HALF][MN_PIVOT_HALF], x[MN_PIVOT_HALF], y[MN_PIVOT_HALF];
    mn_pivot_column(x, smem, 0);
    bool kept = true;
#pragma unroll 1
    for (int first = 0;; first = MN_PIVOT_HALF) {
        mn_pivot_load(a, &smem.square[first][first]);
        kept = mn_pivot_eight<CAREFUL>(a, x, smem, first) && kept;
#pragma unroll
        for (int i = 0; i < MN_PIVOT_HALF; i++) {
            if (lane >= 16) undo[first + i][t] = x[i];
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

template <int RP, int CL>
struct sizes {
    static constexpr int ALL = RP / 8;              // workers of the cluster
    static constexpr int WORKERS = ALL / CL;
    static constexpr int THREADS = 32 * (WORKERS + 1);
    static constexpr int OWN = RP / CL;             // rows of a block
    static constexpr int TILES = RP / 16;           // column blocks of a worker
    /* Whether the pivot has registers for a first attempt without branches. */
    static constexpr bool TWICE = RP < 128 || (RP == 128 && CL > 1);
    /* Two blocks: a worker's half of the columns is one block's. */
    static constexpr bool HALVES = CL == 2;
    static constexpr int FOURS = WORKERS / 4;
    static constexpr int GROUP = WORKERS < 8 ? WORKERS : 8;
    static constexpr int GROUPS = WORKERS / GROUP;  // of a block
    static constexpr int SUMS_BYTES = (CL - 1) * GROUPS * MN_PIVOT_SUM * (int)sizeof(double);
    static constexpr int SMEM_TILE_BYTES = MN_SCAN_CHUNK * (RP - OWN) * (int)sizeof(double);
    /* Of the 16384 in a quarter of a processor, which has up to three warps of a small block; those
     * of 128 rows leave the mean's some. */
    static constexpr int REGISTERS = WORKERS == 16 ? 96 : RP == 128 && CL == 2 ? 120
                                     : WORKERS == 8 ? 168 : 232;
};

template <int RP, int CL>
struct alignas(16) smem {
    using of = sizes<RP, CL>;
    double keys[8][2 * RP + 2];
    double noised[of::OWN / 32][MN_SCAN_CHUNK][40];
    double ends[2][3][RP];
    double before[2][MN_SCAN_CHUNK][of::OWN + 4];    // B by halves of the columns
    double smem_tile[MN_SCAN_CHUNK][RP + 4];             // Phi z
    double parts[of::WORKERS][256];                  // of S, by fragments
    double spread[of::WORKERS][MN_SCAN_CHUNK];       // of qh'Ph qh
    double sums[CL * of::GROUPS][MN_PIVOT_SUM];
    double raise[of::WORKERS][2], raises[of::ALL / 4][2];
    double undo[MN_SCAN_CHUNK][MN_SCAN_CHUNK + 4];
    mn_pivot_smem token;
    double noise[2][MN_SCAN_CHUNK];                  // r2
    uint64_t full[3];                                // barriers: sums, tile of other blocks; passed
    uint64_t arrived[2];                             // keys and the like, queries
    int length, first;                               // tokens, place of the first chunk
    alignas(16) double queries[8][2 * RP + 2];       // last: only where they are wanted
};

/* ---- blocks of a cluster --------------------------------------------------------------------- */

template <int CL>
__device__ inline unsigned rank_of_block(void) {
    unsigned rank = 0;
#if __CUDA_ARCH__ >= 900
    if (CL > 1) rank = cuda::ptx::get_sreg_cluster_ctarank();
#endif
    return rank;
}

/* What this block has left is to be seen by the others. */
template <int CL>
__device__ inline void cluster_arrive(void) {
#if __CUDA_ARCH__ >= 900
    if (CL > 1) mn_cluster_arrive();
#endif
}

/* Waits for all blocks to have arrived. */
template <int CL>
__device__ inline void cluster_wait(void) {
#if __CUDA_ARCH__ >= 900
    if (CL > 1) mn_cluster_wait();
#endif
}

/* *place = x in all blocks of the cluster, seen after the next cluster arrive and wait. */
template <int CL>
__device__ inline void cluster_store(double *place, double x) {
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
        asm volatile("st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.v2.f64 "
                     "[%0], {%1, %2}, [%3];" ::"r"(there), "d"(x.x), "d"(x.y), "r"(count)
                     : "memory");
#endif
    });
}

/* Bytes that other blocks are to send, and their being there. */
template <int CL>
__device__ inline void expect(uint64_t *full, int bytes) {
    if (CL > 1) mn_state_scan_expect(full, bytes / 8);
}

template <int CL>
__device__ inline void await_full(uint64_t *full, unsigned turn) {
    if (CL > 1) mn_state_scan_await(full, turn);
}

/* A barrier of all threads of a block that two roles come to at different places. */
template <int ID, int COUNT>
__device__ inline void named_barrier(void) {
    __syncwarp();
    mn_named_barrier_sync(ID, COUNT);
}

/* ---- the work of a worker -------------------------------------------------------------------- */

/* Where a block is, and which tokens [low, high) of the chunk at `place` it works on. `turns`
 * counts the uses of the barriers. */
struct ctx {
    int64_t scan, place, group, n, h, g;    // group: place * G + g
    unsigned rank, chunk;
    int buffer, low, high;
    unsigned turns[2];
};

template <int RP, int CL>
struct worker {
    using of = sizes<RP, CL>;
    double P[of::TILES][2][2];
    double B[2][2][2];                  // of these rows, over half of the columns
    int index, lane, row, own, part;    // own warp; first row, in the block too; half of columns
    int place;                          // of its parts of sums, by rows and halves

    /* What follows from the thread's number, for each stage anew: kept from one to the next it
     * would be in local memory, of which L1 holds little beside so much shared memory, and each
     * look would wait for L2. A shuffle's result is not known to be the same as the last one. */
    __device__ void sit(unsigned rank) {
        const unsigned thread = __shfl_sync(0xffffffffu, threadIdx.x, (int)threadIdx.x % 32);
        index = (int)thread / 32, lane = (int)thread % 32;
        own = index / 2 * 16, row = (int)rank * of::OWN + own;
        part = (index ^ (of::HALVES ? index / 4 : 0)) % 2, place = index / 2 * 2 + part;
    }

    __device__ int column(int b) const { return part * (RP / 2) + 8 * b; }

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

    /* B of these rows and half of the columns, unless it is there, and their part of S. */
    __device__ void read(smem<RP, CL> &m, bool there) {
        const int token = lane / 4, pair = 2 * (lane % 4);
        double s[2][2][2] = {};
        if (!there) {
            begin(m);
#pragma unroll
            for (int b = 0; b < of::TILES; b++) add(m.keys, b);
        }
#pragma unroll
        for (int r = 0; r < 2; r++) {
            const double a[4] = { B[r][0][0], B[r][1][0], B[r][0][1], B[r][1][1] };
#pragma unroll
            for (int half = 0; half < 2; half++) {
                double b[2];
                mn_state_scan_right(b, &m.keys[token][2 * (row + 8 * r + pair)], half);
                mn_mma_f64_k8(s[half], a, b);
                *(double2 *)&m.before[part][8 * half + token][own + 8 * r + pair] =
                    make_double2(B[r][half][0], B[r][half][1]);
            }
        }
#pragma unroll
        for (int f = 0; f < 4; f++) {
            *(double2 *)&m.parts[place][64 * f + 2 * lane] =
                make_double2(s[f / 2][f % 2][0], s[f / 2][f % 2][1]);
        }
    }

    /* Parts of S added up by groups, to all blocks: of the four fragments the three that the pivot
     * looks at, by a warp each. */
    __device__ void gather(smem<RP, CL> &m, unsigned rank) const {
        const int group = index / 3, f = index % 3;
        if (group >= of::GROUPS) return;
        const int at = f > 0 ? 64 * (f + 1) : 0;
        double2 sum[of::GROUP / 4];
#pragma unroll
        for (int four = 0; four < of::GROUP / 4; four++) {
            const double (*from)[256] = m.parts + group * of::GROUP + 4 * four;
            double2 x[4];
#pragma unroll
            for (int i = 0; i < 4; i++) x[i] = *(const double2 *)&from[i][at + 2 * lane];
            sum[four] = make_double2((x[0].x + x[1].x) + (x[2].x + x[3].x),
                                     (x[0].y + x[1].y) + (x[2].y + x[3].y));
        }
        if (of::GROUP == 8) sum[0].x += sum[of::GROUP / 8].x, sum[0].y += sum[of::GROUP / 8].y;
        store_async_pair<CL>(&m.sums[rank * of::GROUPS + group][64 * f + 2 * lane], &m.full[0],
                             rank, sum[0]);
    }

    /* This worker's part of qh'Ph qh. */
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
                double (&x)[2] = P[b][m];
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
        double a[8], b[4], z[2][2] = {};
#pragma unroll
        for (int k = 0; k < 4; k++) {
            a[2 * k] = m.undo[j][4 * k + i], a[2 * k + 1] = m.undo[8 + j][4 * k + i];
            b[k] = m.before[0][4 * k + i][own + 8 * part + j] +
                   m.before[1][4 * k + i][own + 8 * part + j];
        }
        mn_mma_f64_k16(z, a, b);
        const double2 phi = *(double2 *)&m.ends[s.buffer][0][first + 2 * i];
        put_z(z, first, s, job);    // in front of what others wait for: it has registers of its own
#pragma unroll
        for (int half = 0; half < 2; half++) {
            const int token = 8 * half + j;
            const double x = z[half][0], y = z[half][1];
            double2 moved = make_double2(phi.x * x, phi.y * y);
            if (job.step == 2) moved = make_double2(phi.x * x - phi.y * y, phi.y * x + phi.x * y);
            store_async_pair<CL>(&m.smem_tile[token][first + 2 * i], &m.full[1], s.rank, moved);
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
        const bool own = of::HALVES && part == (int)s.rank;
        await_full<CL>(&m.full[own ? 2 : 1], own ? 0 : s.turns[1]);
        const unsigned waits = of::HALVES ? 32 * (1 - s.rank) : 0;    // a thread that has waited
        if (threadIdx.x == waits) expect<CL>(&m.full[1], of::SMEM_TILE_BYTES);
    }

    /* P - Phi z (1 / sigma) z'Phi', and B of the next keys if these are there. */
    template <bool READS>
    __device__ void write(const smem<RP, CL> &m) {
        const int i = lane % 4, j = lane / 4;
        if (READS) begin(m);
        double a[8];
#pragma unroll
        for (int k = 0; k < 4; k++) {
            const double scale = -m.token.inverse[4 * k + i];
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
                const double (&x)[2] = P[b][half];
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

/* ---- the pivot ------------------------------------------------------------------------------- */

/* What the means need besides z, and the word that `chunks` of them are there. */
template <int RP, int CL>
__device__ static void leave(const smem<RP, CL> &m, const ctx &s, const mn_state_scan_job &job,
                             int chunks) {
    const int lane = (int)threadIdx.x % 32;
    double *undo = job.work.undo + s.group * MN_SCAN_UNDO;
    const int high = chunks > 0 ? MN_SCAN_CHUNK : s.high;    // rows that the means multiply by 0
    for (int e = 2 * lane; e < MN_SCAN_UNDO && s.rank == 0; e += 64) {
        const int t = e / (MN_SCAN_CHUNK + 4);
        if (t < s.low || t >= high) continue;
        *(double2 *)(undo + e) = *(const double2 *)&m.undo[0][e];
    }
    if (s.rank == 0 && lane >= s.low && lane < s.high) {
        job.work.inverse[s.group * 16 + lane] = m.token.inverse[lane];
        job.work.variance[s.group * 16 + lane] = m.token.variance[lane];
    }
    __syncwarp();
    if (lane == 0 && chunks > 0) {
        mn_store_release(job.work.done + s.scan * MN_SCAN_BLOCKS + s.rank, (int)chunks);
    }
    __syncwarp();
}

/* Asks for what the chunk at `place` needs (-1: there is none): queries, or the rest. */
template <int RP, int CL>
__device__ static void request_queries(smem<RP, CL> &m, const mn_state_scan_job &job,
                                       int64_t place) {
    if (!job.spreads || place < 0) return;
    constexpr int SIZE = mn_state_scan_smem_tile(RP);
    if (threadIdx.x % 32 == 0) mn_state_scan_expect(&m.arrived[1], SIZE);
    __syncwarp();
    mn_state_scan_load<SIZE>(m.queries[0], job.work.queries + place * SIZE, &m.arrived[1]);
}

template <int RP, int CL>
__device__ static void ask(smem<RP, CL> &m, const mn_state_scan_job &job, int64_t place, int buffer,
                           const ctx &s) {
    constexpr int SIZE = mn_state_scan_smem_tile(RP), ALL = mn_state_scan_noised(RP),
        OWN = ALL / CL;
    constexpr int CHUNK = MN_SCAN_CHUNK;
    if (place < 0) return;
    const double *r2 = job.work.r2 + (place * job.p.call.G + s.g) * CHUNK;
    if (threadIdx.x % 32 == 0) mn_state_scan_expect(&m.arrived[0], SIZE + OWN + 3 * RP + CHUNK);
    __syncwarp();
    mn_state_scan_load<SIZE>(m.keys[0], job.work.keys + place * SIZE, &m.arrived[0]);
    mn_state_scan_load<OWN>(m.noised[0][0], job.work.noised + place * ALL + s.rank * OWN,
                      &m.arrived[0]);
    mn_state_scan_load<3 * RP>(m.ends[buffer][0], job.work.ends + place * 3 * RP, &m.arrived[0]);
    mn_state_scan_load<CHUNK>(m.noise[buffer], r2, &m.arrived[0]);
}

/* ---- a chunk --------------------------------------------------------------------------------- */

/* One step of a steep chunk in shared memory. */
template <int RP, int CL>
__device__ static void fill_steep(smem<RP, CL> &m, const mn_state_scan_job &job, const ctx &s,
                                  const mn_state_scan_steep_step &step) {
    using of = sizes<RP, CL>;
    const double *keys = job.work.keys + s.place * mn_state_scan_smem_tile(RP);
    const double *queries = job.work.queries + s.place * mn_state_scan_smem_tile(RP);
    const double *steps = job.work.noised + s.place * mn_state_scan_noised(RP);
    const double *ends = job.work.ends + s.place * 3 * RP;
    const double l2 = step.front ? 0.0 : steps[MN_SCAN_CHUNK * RP + step.token];
#pragma unroll 1
    for (int e = threadIdx.x; e < MN_SCAN_CHUNK * RP; e += of::THREADS) {
        const int t = e / RP, r = e % RP, own = r - (int)s.rank * of::OWN;
        const int at = mn_state_scan_smem_tile_at(t, r, RP);
        const double k = step.has(t) ? keys[at] : 0.0;
        m.keys[0][at] = k;
        if (own >= 0 && own < of::OWN) {
            double nk = l2 * k;
            if (step.front) nk = step.has(t) ? steps[t * RP + r] : 0.0;
            m.noised[own / 32][t][own % 32] = nk;
        }
        if (job.spreads) m.queries[0][at] = step.has(t) ? queries[at] : 0.0;
    }
    mn_state_scan_steep_end<RP, of::THREADS>(m.ends[s.buffer], ends, steps, step, threadIdx.x);
    mn_state_scan_before_copies();
    __syncthreads();
}

/* A P that was handed in, rounded to float32, may be indefinite by as much; where the first key or
 * the noise of its write shows that, the diagonal is raised by a few roundings (see ref/bayes.c).
 * All threads of the cluster call, once S is summed up; says whether it has been. */
template <bool PIVOT, int RP, int CL>
__device__ static bool raised(worker<RP, CL> &mine, smem<RP, CL> &m, const ctx &s,
                              const mn_state_scan_job &job) {
    using of = sizes<RP, CL>;
    const double few = 8.0 * 0x1p-24;
    if (!PIVOT) mine.weigh(m, job.step == 2);
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
    const double variance = mn_pivot_sum<CL * of::GROUPS>(m.sums[0]);
    const double scale = few * (seen + hidden), r2 = m.noise[s.buffer][0];
    cluster_arrive<CL>(), cluster_wait<CL>();
    if (fmin(variance, r2) >= scale || hidden >= scale) return false;
    if (!PIVOT) mine.raise(few);
    return true;
}

/* Tokens [s.low, s.high) of the chunk in shared memory, after which `chunks` are done (0: not yet),
 * and the one at `next` (-1: none) asked for. `first`: the first ones behind a P_0 that was handed
 * in. `there`: workers have B; they go on to that of the chunk at `next` unless it is steep. `r2`
 * is the pivot's, of lane's token. */
template <bool PIVOT, int RP, int CL>
__device__ static void advance(worker<RP, CL> &mine, smem<RP, CL> &m, ctx &s,
                               const mn_state_scan_job &job, double r2, int64_t next, int chunks,
                               bool first, bool there) {
    using of = sizes<RP, CL>;
    for (bool again = false;; again = true) {
        if (PIVOT) {
            if (mine.lane < MN_SCAN_CHUNK) m.token.r2[mine.lane] = r2;
            if (job.spreads) mn_state_scan_await(&m.arrived[1], s.chunk);
            named_barrier<1, of::THREADS>();
            if (!first) ask(m, job, next, 1 - s.buffer, s);
            named_barrier<2, of::THREADS>();
            await_full<CL>(&m.full[0], s.turns[0]);
            if (mine.lane == 0) expect<CL>(&m.full[0], of::SUMS_BYTES);
        } else {
            mine.sit(s.rank);
            mine.read(m, there && !again);
            mine.sit(s.rank);
            named_barrier<1, of::THREADS>();
            mine.gather(m, s.rank);
            named_barrier<2, of::THREADS>();
            if (first) await_full<CL>(&m.full[0], s.turns[0]);
        }
        s.turns[0]++;
        if (!first || again || !raised<PIVOT>(mine, m, s, job)) break;
    }
    if (PIVOT) {
        if (first) ask(m, job, next, 1 - s.buffer, s);
        __syncwarp();
        mn_pivot_add<CL * of::GROUPS>(m.token, m.sums);
        if (!of::TWICE || !mn_pivot<false>(m.token, m.undo)) {
            __syncwarp();
            if (of::TWICE) mn_pivot_add<CL * of::GROUPS>(m.token, m.sums);
            mn_pivot<true>(m.token, m.undo);
        }
        named_barrier<1, of::THREADS>();
        request_queries(m, job, next);
        if (next >= 0) mn_state_scan_await(&m.arrived[0], s.chunk + 1);
        named_barrier<2, of::THREADS>();
        leave(m, s, job, chunks);
    } else {
        mine.sit(s.rank);
        if (job.spreads) mine.spread(m);
        mine.move(m.ends[s.buffer], job.step == 2);
        mine.sit(s.rank);
        named_barrier<1, of::THREADS>();
        mine.solve(m, s, job);
        mine.sit(s.rank);
        named_barrier<2, of::THREADS>();
        mine.await_tile(m, s);
        const bool ahead = next >= 0 && !mn_state_scan_is_steep(m.keys[0], RP);
        if (ahead) mine.template write<true>(m);
        else mine.template write<false>(m);
    }
    s.turns[1]++;
}

/* Parts of qh'Ph qh, by four workers each: 32 rows. */
template <int RP, int CL>
__device__ static void put_spread(const smem<RP, CL> &m, const ctx &s,
                                  const mn_state_scan_job &job) {
    using of = sizes<RP, CL>;
    const int t = (int)threadIdx.x;
    if (!job.spreads || t < s.low || t >= s.high) return;
    for (int four = 0; four < of::FOURS; four++) {
        double sum = 0.0;
        for (int w = 0; w < 4; w++) sum += m.spread[4 * four + w][t];
        const int64_t part = s.group * MN_SCAN_SUMS + s.rank * of::FOURS + four;
        job.work.spread[part * MN_SCAN_CHUNK + t] = sum;
    }
}

/* The chunks of a sequence, by the pivot or by workers. */
template <bool PIVOT, int RP, int CL>
__device__ static void state_scan(smem<RP, CL> &m, ctx s, const mn_state_scan_job &job) {
    using of = sizes<RP, CL>;
    const mn_call &call = job.p.call;
    if (job.redo) mn_pdl_wait();
    const int64_t all = mn_state_scan_length(job, s.n, s.h);
    worker<RP, CL> mine;
    mine.sit(s.rank);
    s.place = mn_state_scan_slot(call, s.n) * call.H + s.h;
    if (!PIVOT) mine.load(job, s);
    if (PIVOT && mine.lane == 0) {
        m.length = (int)all, m.first = (int)s.place;
        mn_state_scan_open(&m.full[0]), mn_state_scan_open(&m.full[1]);
        mn_state_scan_open(&m.arrived[0]), mn_state_scan_open(&m.arrived[1]);
        expect<CL>(&m.full[0], of::SUMS_BYTES), expect<CL>(&m.full[1], of::SMEM_TILE_BYTES);
        if (of::HALVES) mn_state_scan_open(&m.full[2]), expect<CL>(&m.full[2], 0);
    }
    s.turns[0] = s.turns[1] = 0;
    mn_pdl_wait();
    mn_pdl_launch_dependents();
    if (PIVOT && all > 0) {
        mn_state_scan_before_copies();
        ask(m, job, s.place, 0, s), request_queries(m, job, s.place);
        mn_state_scan_await(&m.arrived[0], 0);
    }
    __syncthreads();
    cluster_arrive<CL>(), cluster_wait<CL>();
    for (int chunk = 0;; chunk++) {
        const volatile int *length = &m.length, *front = &m.first;    // anew, as `sit` says
        const int left = *length - chunk * MN_SCAN_CHUNK;
        if (left <= 0) break;
        const bool steep = mn_state_scan_is_steep(m.keys[0], RP), last = left <= MN_SCAN_CHUNK;
        s.place = *front + chunk * call.H;
        const int64_t next = last ? -1 : s.place + call.H;
        const int count = min((int)MN_SCAN_CHUNK, left);
        const int begin = steep ? mn_state_scan_steep_begin(m.keys[0], RP) : 1;
        const int end = steep ? count : 1;
        s.group = s.place * call.G + s.g;
        s.chunk = (unsigned)chunk, s.buffer = chunk % 2;
        for (int token = begin - 1; token < end; token++) {
            const mn_state_scan_steep_step step = { token, job.step, token < begin };
            const bool ends = token + 1 == end;
            s.low = 0, s.high = MN_SCAN_CHUNK;    // zeros behind the last token
            if (steep) {
                s.low = step.front ? 0 : token, s.high = token + 1;
                if (PIVOT && job.spreads) mn_state_scan_await(&m.arrived[1], s.chunk);
                __syncthreads();
                fill_steep(m, job, s, step);
            }
            const bool first = job.p.P0.data && chunk == 0 && s.low == 0 && s.high > 0;
            const bool writes = PIVOT && (!steep || step.has(mine.lane % 16));
            const double r2 = writes ? m.noise[s.buffer][mine.lane % 16] : 1.0;
            advance<PIVOT>(mine, m, s, job, r2, ends ? next : -1, ends ? chunk + 1 : 0, first,
                           !steep && chunk > 0);
            if (!PIVOT) put_spread(m, s, job);
        }
    }
    if (!PIVOT) mine.store(job, s);
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
    if (threadIdx.x / 32 == sizes<RP, CL>::WORKERS) state_scan<true>(m, s, job);
    else state_scan<false>(m, s, job);
}

/* ---- launches -------------------------------------------------------------------------------- */

template <int RP, int CL>
static size_t smem_of(bool spreads) {
    typedef smem<RP, CL> all;
    return spreads ? sizeof(all) : offsetof(all, queries);
}

template <int RP, int CL>
static int start(const mn_state_scan_job *job, cudaStream_t stream) {
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
