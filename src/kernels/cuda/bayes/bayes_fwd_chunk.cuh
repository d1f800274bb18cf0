/* bayes_fwd_chunk.cuh - the Bayesian Layer forward in four kernels, for states of up to 256 rows.
 * Definition in ref/bayes.c.
 *
 * A chunk of 16 tokens has a frame of its own: with Phi_t the product of A over its tokens so far,
 * P = Phi (Ph + N) Phi' and M = Phi Mh, where Ph and Mh change by what tokens write alone. With
 * kh_t = Phi_t'k_t, qh_t = Phi_t'q_t, n_t = sums of l2 Phi^-1 N Phi^-T, rows being tokens:
 *
 *   B_t = Ph kh_t + n_t kh_t     S_st = B_s.kh_t (s <= t)     S + diag r2 = L diag(sigma) L'
 *   z = L^-1 B                   e = L^-1 (v - kh Mh)         u_t = Phi_t z_t
 *   o_t = Mh'qh_t + sum_{s<=t} e_s (z_s.qh_t) / sigma_s
 *   qvar_t = qh_t'(Ph + n_t) qh_t - sum_{s<=t} (z_s.qh_t)^2 / sigma_s
 *   P <- Phi (Ph + n - sum z_s z_s' / sigma_s) Phi'    M <- Phi (Mh + sum z_s e_s' / sigma_s)
 *
 * sigma_t = r2_t + k'u. Everything is double: float32 loses P once exact writes have shrunk it, and
 * these GPUs multiply doubles at half its rate. Scaling rows and columns costs no digits. A chunk
 * in which a channel decays by more than e^-150 is called steep. Its tokens in front of the first
 * one by which that is so are gone through as a chunk, with zeros behind them, so that no decay
 * moves what is before it; from that one on every token has a frame of its own, which begins behind
 * its A, and goes alone.
 *
 *   prepare      kh, qh, n_t kh_t, and Phi and n at the end: all chunks at once
 *   covariance   z, L^-1, sigma: a scan over chunks for each group, head and sequence
 *   mean         e, o, M: the same for slices of value columns
 *   results      gains and variances: all chunks at once
 *
 * The mean begins as soon as all blocks of the covariance run, on processors that have room beside
 * these, and follows them: a counter of each block says how many chunks it has left in memory.
 *
 * A chunk's products and its factorisation take in all of its tokens, and 0 times a number that is
 * not finite is NaN: with such a number rows in front of it, of its chunk, are lost too. The four
 * kernels are launched once more: prepare looks at each head's last results, where they are not
 * finite finds the first token whose inputs are not, and leaves in work.cuts where the sequence
 * ends for this head; the others go as far as that, and store nothing behind it and no states.
 * Without such numbers they end at once.
 *
 * P lies in tiles of 8 x 8, two numbers for each lane: row l / 4, columns 2 (l % 4) and the next,
 * as products leave it. The same numbers are the right factor of the next product, rows read as
 * columns, if the left one's columns are taken in the order 0 2 4 6 1 3 5 7. Mh' lies alike, value
 * columns being its rows. */
#ifndef MN_KERNELS_CUDA_BAYES_BAYES_FWD_CHUNK_CUH
#define MN_KERNELS_CUDA_BAYES_BAYES_FWD_CHUNK_CUH

#include "kernels/cuda/prim/tma.cuh"
#include "kernels/cuda/prim/common.cuh"
#include "kernels/cuda/prim/mma_f64.cuh"
#include "kernels/cuda/prim/sync.cuh"

namespace mneme::bayes {

enum {
    MN_SCAN_CHUNK = 16, MN_SCAN_WIDEST = 256,
    MN_SCAN_SUMS = 8,       // parts of a sum over rows, 32 rows each, at most
    MN_SCAN_BLOCKS = 4,     // blocks of a covariance, at most
    MN_SCAN_UNDO = 16 * 20, // doubles of L^-1
    MN_SCAN_SLICE = 32,     // value columns of a block
};

/* What the kernels leave to each other, in doubles; a chunk's place is its slot (mn_tile_slots)
 * times H plus the head. `rows` is R rounded up, with zeros beyond it. A tile is 16 tokens
 * of so many numbers, those of tokens t and t + 8 side by side, as the registers of a left factor
 * want them. Rows are as far apart as in shared memory, where lanes then meet in no bank; the
 * number behind the keys' first row is `steep`. */
struct mn_state_scan_work {
    double *keys, *queries;             // (place) tiles: kh, qh
    double *noised;                     // (place, rows / 32, 16, 40): n kh; if steep
                                        // (16, rows): n kh, from `begin` on A; l2 (16)
    double *ends;                       // (place, 3, rows): Phi, n, n inside pairs
    double *z;                          // (place, G) tiles
    double *undo;                       // (place, G, 16, 20): L^-1
    double *inverse, *variance;         // (place, G, 16): 1 / sigma, k'u
    double *spread;                     // (place, G, MN_SCAN_SUMS, 16): qh'Ph qh in parts
    double *r2;                         // (place, G, 16), 1 behind the last token
    int *steep;                         // (place): 0, or 1 + `begin`: tokens that go together
    int *done;                          // (scan, MN_SCAN_BLOCKS): chunks that the means may have
    int *cuts;                          // (n, H): where a redo ends
};

struct mn_state_scan_job {
    mn_bayes_args p;
    mn_state_scan_work work;
    int rows, step, blocks;             // rows of a channel; blocks of a covariance
    bool reads, spreads;                // qh is wanted; qh'Ph qh is
    bool redo;                          // of rows in front of numbers that are not finite
};

/* The four kernels, each in the file of its name: 0 or a cudaError_t. */
int mn_state_scan_prepare(const mn_state_scan_job *job, cudaStream_t stream);
int mn_state_scan_covariance(const mn_state_scan_job *job, cudaStream_t stream);
int mn_state_scan_mean(const mn_state_scan_job *job, cudaStream_t stream);
int mn_state_scan_results(const mn_state_scan_job *job, cudaStream_t stream);

/* Whether the covariance scan finds its room on the device in use. */
bool mn_state_scan_covariance_fits(const mn_state_scan_job *job);
int mn_state_scan_blocks(const mn_state_scan_job *job);

/* ---- places ---------------------------------------------------------------------------------- */

/* The slot of the first chunk of sequence n. */
__device__ inline int64_t mn_state_scan_slot(const mn_call &call, int64_t n) {
    if (call.cu_seqlens) return call.cu_seqlens[n] / MN_SCAN_CHUNK + n;
    return n * ((call.T + MN_SCAN_CHUNK - 1) / MN_SCAN_CHUNK);
}

/* Tokens of sequence n for head h: in a redo those in front of where it is cut, none where it is
 * not. */
__device__ inline int64_t mn_state_scan_length(const mn_state_scan_job &job, int64_t n, int64_t h) {
    if (job.redo) return job.work.cuts[n * job.p.call.H + h];
    return mn_span_at(job.p.call, n).length;
}

/* The chunk of block = slot * H + h, at `place` of the work space; in a redo that of block
 * n * H + h in which the sequence is cut, with its rows in front of that. */
template <bool REDO>
__device__ inline mn_tile_span mn_state_scan_tile(const mn_state_scan_job &job, int64_t &place) {
    const mn_call &call = job.p.call;
    const unsigned heads = (unsigned)call.H;
    place = blockIdx.x;
    if (!REDO) return mn_tile_at(call, MN_SCAN_CHUNK, blockIdx.x / heads);
    const int cut = job.work.cuts[blockIdx.x];
    mn_tile_span tile = {};
    tile.n = blockIdx.x / heads, tile.span = mn_span_at(call, tile.n);
    tile.first = cut / MN_SCAN_CHUNK * MN_SCAN_CHUNK, tile.n_rows = cut - tile.first;
    place = (mn_state_scan_slot(call, tile.n) + cut / MN_SCAN_CHUNK) * heads + blockIdx.x % heads;
    return tile;
}

/* Blocks of kernels that have all chunks at once. */
inline int64_t mn_state_scan_chunks(const mn_state_scan_job *job) {
    const mn_call &call = job->p.call;
    return (job->redo ? mn_n_spans(call) : mn_tile_slots(call, MN_SCAN_CHUNK)) * call.H;
}

/* Doubles of a tile and of n kh, and where number r of token t lies in them. */
__host__ __device__ constexpr int mn_state_scan_smem_tile(int rows) {
    return 8 * (2 * rows + 2);
}

__device__ inline int mn_state_scan_smem_tile_at(int t, int r, int rows) {
    return t % 8 * (2 * rows + 2) + 2 * r + t / 8;
}

__host__ __device__ constexpr int mn_state_scan_noised(int rows) {
    return rows / 32 * 16 * 40;
}

__device__ inline int mn_state_scan_noised_at(int t, int r) {
    return (r / 32 * 16 + t) * 40 + r % 32;
}

/* Whether the chunk whose keys lie at `keys` is steep, by bits: a comparison of doubles would wait
 * for the products of all warps beside it. */
__device__ inline bool mn_state_scan_is_steep(const double *keys, int rows) {
    return __double2hiint(keys[2 * rows]) != 0;
}

/* Tokens at the front of a steep chunk that go together. */
__device__ inline int mn_state_scan_steep_begin(const double *keys, int rows) {
    return (int)keys[2 * rows] - 1;
}

/* Columns c and c + 1 of a tile as a left factor, `at` being c in row lane / 4; as a right one
 * with tokens [8 half, 8 half + 8) as its columns. */
__device__ inline void mn_state_scan_left(double (&a)[4], const double *at) {
    const double2 x = *(const double2 *)at, y = *(const double2 *)(at + 2);
    a[0] = x.x, a[1] = x.y, a[2] = y.x, a[3] = y.y;
}

__device__ inline void mn_state_scan_right(double (&b)[2], const double *at, int half) {
    b[0] = at[half], b[1] = at[2 + half];
}

/* Columns [first, first + count) are those j with floor(j G / V) = g. */
struct mn_state_scan_columns {
    int first, count;
};

__device__ inline mn_state_scan_columns mn_state_scan_columns_of(const mn_call &call, int64_t g) {
    const int first = (int)((g * call.V + call.G - 1) / call.G);
    return { first, (int)(((g + 1) * call.V + call.G - 1) / call.G) - first };
}

/* ---- copies ---------------------------------------------------------------------------------- */

/* Numbers on their way from memory to shared memory, asked for by one warp. From 9.0 on a barrier
 * counts their bytes, for all who wait for its turn; before it only the warp that asked knows when
 * they are there, and a barrier of the block has to follow. */
__device__ inline void mn_state_scan_open(uint64_t *arrived) {
#if __CUDA_ARCH__ >= 900
    mn_mbarrier_init(arrived, 1);
    cuda::ptx::fence_mbarrier_init(cuda::ptx::sem_release, cuda::ptx::scope_cluster);
#endif
}

/* `count` doubles are to come, by one thread. */
__device__ inline void mn_state_scan_expect(uint64_t *arrived, int count) {
#if __CUDA_ARCH__ >= 900
    mn_mbarrier_arrive_expect_tx(arrived, 8 * count);
#endif
}

/* What others have written lies in front of copies that follow. */
__device__ inline void mn_state_scan_before_copies(void) {
#if __CUDA_ARCH__ >= 900
    cuda::ptx::fence_proxy_async();
#endif
}

/* COUNT neighbours, an even number. */
template <int COUNT>
__device__ inline void mn_state_scan_load(double *to, const double *from, uint64_t *arrived) {
    const int lane = (int)threadIdx.x % 32;
#if __CUDA_ARCH__ >= 900
    if (lane == 0) mn_tma_load_1d(to, from, 8 * COUNT, arrived);
#else
    const uint32_t there = mn_smem_addr(to);
    for (int at = 2 * lane; at < COUNT; at += 64) {
        asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(there + 8 * at),
                     "l"(from + at)
                     : "memory");
    }
#endif
}

/* Waits for the barrier's turn number `turn`; warps as a whole. */
__device__ inline void mn_state_scan_await(uint64_t *arrived, unsigned turn) {
#if __CUDA_ARCH__ >= 900
    const unsigned at = (unsigned)__cvta_generic_to_shared(arrived);
    unsigned there = 0;
    while (!there) {
        asm volatile("{\n\t.reg .pred there;\n\t"
                     "mbarrier.try_wait.parity.shared::cta.b64 there, [%1], %2;\n\t"
                     "selp.u32 %0, 1, 0, there;\n\t}" : "=r"(there) : "r"(at), "r"(turn & 1)
                     : "memory");
    }
    __syncwarp();
#else
    asm volatile("cp.async.wait_all;" ::: "memory");
#endif
}

/* ---- frames ---------------------------------------------------------------------------------- */

/* e^x for |x| <= 150, to a rounding or two and without a branch, so that those of many tokens
 * overlap: x = n log 2 + r, and the series of e^r, |r| <= 0.35, up to r^13 / 13!. */
__device__ inline double mn_state_scan_exp(double x) {
    const double whole = 0x1.8p52, shifted = fma(x, 0x1.71547652b82fep0, whole);
    const double n = shifted - whole;
    const double r = fma(n, -0x1.fdf473de6af28p-22, fma(n, -0x1.62e42p-1, x));
    double sum = 1.0 / 6227020800.0;
    const double terms[13] = { 1.0 / 479001600.0, 1.0 / 39916800.0, 1.0 / 3628800.0, 1.0 / 362880.0,
                               1.0 / 40320.0, 1.0 / 5040.0, 1.0 / 720.0, 1.0 / 120.0, 1.0 / 24.0,
                               1.0 / 6.0, 0.5, 1.0, 1.0 };
#pragma unroll
    for (int i = 0; i < 13; i++) sum = fma(sum, r, terms[i]);
    return __hiloint2double(__double2hiint(sum) + __double2loint(shifted) * (1 << 20),
                            __double2loint(sum));
}

/* Phi_t and n_t of one channel: a number, or with STEP 2 a pair. */
template <int STEP>
struct mn_state_scan_frame {
    double level, angle, re, im, rr, ri, ii;

    __device__ mn_state_scan_frame(void) {
        level = angle = im = rr = ri = ii = 0.0, re = 1.0;
    }

    __device__ void step(float la, float theta, float l2) {
        level += (double)la;
        re = mn_state_scan_exp(level);
        const double back = mn_rcp_f64(re), weight = (double)l2 * back * back;
        if (STEP == 1) {
            rr += weight;
            return;
        }
        double sine, cosine;
        angle += (double)theta;
        sincos(angle, &sine, &cosine);
        rr += weight * cosine * cosine, ri -= weight * cosine * sine, ii += weight * sine * sine;
        im = re * sine, re *= cosine;
    }
};

/* One channel of a chunk's tokens as they lie, those behind the tile being its last one. */
template <typename T>
__device__ inline void mn_state_scan_column_raw(T (&raw)[MN_SCAN_CHUNK], const mn_in &view,
                                          const mn_tile_span &tile, int64_t h, int i) {
    const T *at = mn_row<T>(view, tile.span.b, tile.span.t0 + tile.first, h) + i;
#pragma unroll
    for (int t = 0; t < MN_SCAN_CHUNK; t++) {
        raw[t] = *at;
        at += t + 1 < (int)tile.n_rows ? view.stride[1] : 0;
    }
}

/* The same as numbers, zeros beyond the tile and the real channels. Loads do not wait for the
 * question whether they are wanted. */
template <typename T>
__device__ inline void mn_state_scan_column(float (&x)[MN_SCAN_CHUNK], const mn_in &view,
                                      const mn_call &call, const mn_tile_span &tile, int64_t h,
                                      int i) {
    const int most = (int)call.K - 1;
    T raw[MN_SCAN_CHUNK];
    mn_state_scan_column_raw<T>(raw, view, tile, h, min(i, most));
#pragma unroll
    for (int t = 0; t < MN_SCAN_CHUNK; t++) {
        x[t] = t < tile.n_rows && i <= most ? mn_float(raw[t]) : 0.0f;
    }
}

/* ---- steep chunks ---------------------------------------------------------------------------- */

/* One of the steps through a steep chunk: token `token`, or with `front` all up to it, of which
 * there may be none (-1). */
struct mn_state_scan_steep_step {
    int token, step;    // rows of a channel
    bool front;

    __device__ bool has(int t) const { return front ? t <= token : t == token; }
};

/* Phi behind a step, the next token's A being part of the frame's end. `ends` and `steps` are those
 * of the work space. By COUNT threads. */
template <int ROWS, int COUNT>
__device__ inline void mn_state_scan_steep_phi(double (&to)[ROWS], const double *ends,
                                               const double *steps,
                                               const mn_state_scan_steep_step &at, int i) {
    const bool last = at.token == MN_SCAN_CHUNK - 1;    // never with `front`
    const double *next = steps + (at.token + 1) * ROWS;
    for (int r = i; r < ROWS; r += COUNT) {
        to[r] = !last ? next[r] : r % at.step == 0 ? 1.0 : 0.0;
        if (!at.front) continue;
        const double re = ends[r / at.step * at.step], im = ends[r | 1];
        if (at.step == 1) to[r] *= ends[r];
        else if (r % 2 == 0) to[r] = re * next[r] - im * next[r + 1];
        else to[r] = im * next[r - 1] + re * next[r];
    }
}

/* Phi and n. */
template <int ROWS, int COUNT>
__device__ inline void mn_state_scan_steep_end(double (&to)[3][ROWS], const double *ends,
                                               const double *steps,
                                               const mn_state_scan_steep_step &at, int i) {
    mn_state_scan_steep_phi<ROWS, COUNT>(to[0], ends, steps, at, i);
    for (int r = i; r < ROWS; r += COUNT) {
        const double l2 = at.front ? 0.0 : steps[MN_SCAN_CHUNK * ROWS + at.token];
        to[1][r] = at.front ? ends[ROWS + r] : r % at.step == 0 ? l2 : 0.0;
        to[2][r] = at.front ? ends[2 * ROWS + r] : 0.0;
    }
}

}    // namespace mneme::bayes

#endif
