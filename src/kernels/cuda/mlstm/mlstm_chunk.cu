/* mlstm_chunk.cu - mLSTM over chunks in bf16: scans on the engine of additive_state_scan.cuh, and
 * what is computed between them.
 *
 * Forward: the gates of all tokens (mlstm.cu), one scan. Backward: the same scan without an output,
 * which stores a = n.q and o.do of every token; e and the denominators; scans of dq, dv and dk; and
 *
 *   dipre = k.dk      dfpre = dlf sigmoid(-fpre)      dlf as a decay's in additive_decay_grad.cuh
 * A block has 64 columns of the state of one head and sequence. */
#include "kernels/cuda/additive/additive_state_scan.cuh"
#include "kernels/cuda/additive/additive.cuh"
#include "kernels/cuda/additive/additive_decay_grad.cuh"
#include "kernels/cuda/mlstm/mlstm.cuh"

#include <math.h>

namespace mneme::mlstm {

using namespace additive;

/* The four scans, of row r and column c of a chunk's scores x.y; x, y, z are (B,T,H,K or V), the
 * state is sum y z'.
 *
 * In units of exp(m) every gate is at most 1: f = exp(lf + m_{t-1} - m_t) is a decay per token, and
 * w = exp(ipre - m_t) and 1 / den are factors of a token, which join the exponents:
 *
 *   o    x = q    y = k    z = v     2^(l_r - l_c) w_c, rows over den_r
 *   dq   x = do   y = v    z = k     2^(l_r - l_c) w_c / den_r      x.y + e_r
 *   dv   x = k    y = q    z = do    2^(l_r - l_c) w_r / den_c                  in reverse
 *   dk   x = v    y = do   z = q     2^(l_r - l_c) w_r / den_c      x.y + e_c   in reverse
 *
 * with e = -sign(a) o.do where |a| is the denominator and 0 elsewhere. What this adds to a plain
 * scan is one more column of the state, the normaliser n, which makes a (o), or one more row of it,
 * n and its adjoint (dq, dk). Both are kept in float32, and in products with tensor cores they are
 * two bf16 numbers, so that quotients of small a are no worse than their terms. */

/* Numbers of tokens by head, (H, B T): of f and w the log2. */
struct mn_mlstm_tokens {
    float *decay, *write, *m;    // f, w, and the stabiliser
    float *a;                    // what the denominator is made of, with the scale
    float *share, *e;            // -log2 den, and e
};

/* Which factors a scan has, besides its decays. */
enum mn_mlstm_mode { MN_MLSTM_O, MN_MLSTM_DQ, MN_MLSTM_DV, MN_MLSTM_DK };

struct mn_mlstm_scans {
    mn_chunk_scans all;
    mn_mlstm_mode mode[MN_SCAN_MAX];
    const float *first[MN_SCAN_MAX];    // (N,H,K): n, or its adjoint at the end; or NULL
    float *last[MN_SCAN_MAX];           // what becomes of it; or NULL
    // n in front of chunks, as mn_chunk_scan's kept has the state
    float *kept_n;
    mn_mlstm_tokens tokens;
};

/* Exponents of rows and columns, as two floats; weights of columns at the chunk's end. */
template <int CHUNK>
struct mn_mlstm_log_decays {
    alignas(16) float2 row[CHUNK];
    alignas(16) float2 column[CHUNK];
    alignas(16) float to_end[CHUNK];
    alignas(16) float row_extra[CHUNK];      // their product is added to x.y
    alignas(16) float column_extra[CHUNK];
    alignas(16) float added[CHUNK];          // to_end column_extra
    float whole;
};

template <int DEPTH, int CHUNK>
struct mn_mlstm_smem {
    mn_scan_stage<DEPTH, CHUNK> stage[2];
    alignas(16) mn_bf16 state[2][DEPTH * MN_SCAN_PITCH];
    alignas(16) float n[2][DEPTH];
    mn_mlstm_log_decays<CHUNK> log_decays[2];
};

/* A pair of floats as operand for the first two rows (or columns) of a tile: what bf16 holds of
 * them, and what it leaves. */
__device__ inline uint32_t mn_mlstm_split_bf16(float x, float y) {
    const int line = threadIdx.x % 32 / 4;
    const uint32_t high = mn_bf16x2(x, y);
    if (line == 0) return high;
    return line == 1 ? mn_bf16x2(x - mn_bf16_lo(high), y - mn_bf16_hi(high)) : 0;
}

/* ---- numbers of tokens ----------------------------------------------------------------------- */

/* What a lane holds of a chunk until its log decays are made. */
template <int CHUNK>
struct mn_mlstm_lane_gates {
    float decay[CHUNK / 32], row[CHUNK / 32], column[CHUNK / 32], e[CHUNK / 32];
};

template <int CHUNK>
__device__ inline void mn_mlstm_load_gates(mn_mlstm_lane_gates<CHUNK> &to, const mn_mlstm_scans &p,
                                    mn_mlstm_mode mode, const mn_scan_coord &at, int64_t t,
                                    int count, bool reverse) {
    const int64_t tokens = p.all.call.B * p.all.call.T;
    const int64_t from = at.h * tokens + at.span.b * p.all.call.T + at.span.t0 + t;
    const float *rows = reverse ? p.tokens.write : p.tokens.share;
    const float *columns = reverse ? p.tokens.share : p.tokens.write;
#pragma unroll
    for (int i = 0; i < CHUNK / 32; i++) {
        const int row = threadIdx.x % 32 * (CHUNK / 32) + i;
        const int token = reverse ? CHUNK - 1 - row : row;
        to.decay[i] = to.row[i] = to.column[i] = to.e[i] = 0.0f;
        if (token >= count) continue;
        to.decay[i] = p.tokens.decay[from + token];
        to.column[i] = columns[from + token];
        if (mode != MN_MLSTM_O) to.row[i] = rows[from + token];
        if (mode == MN_MLSTM_DQ || mode == MN_MLSTM_DK) to.e[i] = p.tokens.e[from + token];
    }
}

__device__ inline float2 mn_mlstm_hi_lo(double x) {
    return make_float2((float)x, (float)(x - (double)(float)x));
}

/* A warp calls. */
template <int CHUNK>
__device__ inline void mn_mlstm_make_log_decays(mn_mlstm_log_decays<CHUNK> &to,
                                            const mn_mlstm_lane_gates<CHUNK> &in,
                                                mn_mlstm_mode mode,
                                            bool reverse) {
    const int lane = threadIdx.x % 32;
    double own = 0.0;
#pragma unroll
    for (int i = 0; i < CHUNK / 32; i++) own += (double)in.decay[i];
    double log_decay, whole;
    mn_scan_warp_cumsum(log_decay, whole, own);
#pragma unroll
    for (int i = 0; i < CHUNK / 32; i++) {
        const int row = lane * (CHUNK / 32) + i;
        const double before = log_decay;
        log_decay += (double)in.decay[i];
        const double l = reverse ? before : log_decay;
        const float to_end = mn_exp2((float)(whole - l + (double)in.column[i]));
        float column_extra = mode == MN_MLSTM_DQ ? 1.0f : 0.0f;
        if (mode == MN_MLSTM_DK) column_extra = in.e[i];
        to.row[row] = mn_mlstm_hi_lo(l + (double)in.row[i]);
        to.column[row] = mn_mlstm_hi_lo(l - (double)in.column[i]);
        to.to_end[row] = to_end;
        to.row_extra[row] = mode == MN_MLSTM_DQ ? in.e[i] : mode == MN_MLSTM_DK ? 1.0f : 0.0f;
        to.column_extra[row] = column_extra;
        to.added[row] = to_end * column_extra;
    }
    if (lane == 0) to.whole = (float)whole;
}

/* ---- weights --------------------------------------------------------------------------------- */

/* What the weights of all four scans have in common (see mn_scan_weights). */
template <int CHUNK>
struct mn_mlstm_base_weights {
    static constexpr bool decays = true;
    const mn_mlstm_log_decays<CHUNK> &log_decays;
    const float *n;    // in shared memory: of the state that is read

    __device__ const float *to_end(void) const { return log_decays.to_end; }
    __device__ float whole(void) const { return mn_exp2(log_decays.whole); }
};

/* The scan of o: n has a number for each row of the state. The engine calls the functions; a lane
 * with column 0 of the tiles holds the sums: n.q of its two rows, and what is added to n. */
template <int DEPTH, int CHUNK>
struct mn_mlstm_out_weights : mn_mlstm_base_weights<CHUNK> {
    static constexpr int row_tiles = mn_scan_sizes<DEPTH, CHUNK>::row_tiles;
    float of_n[4], a[2], added[row_tiles][4];

    __device__ mn_mlstm_out_weights(const mn_mlstm_log_decays<CHUNK> &log_decays, const float *n)
        : mn_mlstm_base_weights<CHUNK>{ log_decays, n }, of_n{}, a{}, added{} {}

    __device__ void reads(const uint32_t (&x)[4], int k) {
        const float *at = this->n + 16 * k + threadIdx.x % 4 * 2;
        mn_mma(of_n, x, mn_mlstm_split_bf16(at[0], at[1]), mn_mlstm_split_bf16(at[8], at[9]));
    }

    template <int TILES>
    __device__ void state_read(float (&o)[TILES][4], int row0, int) {
        const int row = row0 + threadIdx.x % 32 / 4;
        const float low = mn_exp2(this->log_decays.row[row].x);
        const float high = mn_exp2(this->log_decays.row[row + 8].x);
#pragma unroll
        for (int tile = 0; tile < TILES; tile++) {
            o[tile][0] *= low, o[tile][1] *= low, o[tile][2] *= high, o[tile][3] *= high;
        }
        if (threadIdx.x % 4 != 0) return;
        a[0] = low * (of_n[0] + of_n[1]), a[1] = high * (of_n[2] + of_n[3]);
    }

    __device__ void weigh(float (&p)[4][4], int row0, int left) {
        mn_scan_weigh_scores<true>(p, this->log_decays.row, this->log_decays.column, row0, left,
                            [](float x, int, int) { return x; });
#pragma unroll
        for (int tile = 0; tile < 4; tile++) {
            a[0] += p[tile][0] + p[tile][1], a[1] += p[tile][2] + p[tile][3];
        }
    }

    __device__ void writes(const uint32_t (&y)[4], int tile, int t) {
        const float *at = this->log_decays.to_end + t + threadIdx.x % 4 * 2;
        mn_mma(added[tile], y, mn_mlstm_split_bf16(at[0], at[1]),
               mn_mlstm_split_bf16(at[8], at[9]));
    }

    __device__ void writes_of(const mn_bf16 *, int) const {}

    /* The sum over all columns of this thread's rows. */
    __device__ float whole_a(int half) const {
        float sum = a[half];
        sum += __shfl_xor_sync(0xffffffffu, sum, 1);
        return sum + __shfl_xor_sync(0xffffffffu, sum, 2);
    }
};

/* Scans of gradients: n has a number for each of the block's columns. A warp adds up eight of them:
 * its first four lanes have two each. */
template <int DEPTH, int CHUNK>
struct mn_mlstm_grad_weights : mn_mlstm_base_weights<CHUNK> {
    float added[4];

    __device__ mn_mlstm_grad_weights(const mn_mlstm_log_decays<CHUNK> &log_decays, const float *n)
        : mn_mlstm_base_weights<CHUNK>{ log_decays, n }, added{} {}

    __device__ void reads(const uint32_t (&)[4], int) const {}

    template <int TILES>
    __device__ void state_read(float (&o)[TILES][4], int row0, int column0) const {
        const int row = row0 + threadIdx.x % 32 / 4;
        const float low = mn_exp2(this->log_decays.row[row].x);
        const float high = mn_exp2(this->log_decays.row[row + 8].x);
        const float e_low = this->log_decays.row_extra[row],
            e_high = this->log_decays.row_extra[row + 8];
#pragma unroll
        for (int tile = 0; tile < TILES; tile++) {
            const float2 x = *(const float2 *)(this->n + column0 + 8 * tile + threadIdx.x % 4 * 2);
            o[tile][0] = low * fmaf(e_low, x.x, o[tile][0]);
            o[tile][1] = low * fmaf(e_low, x.y, o[tile][1]);
            o[tile][2] = high * fmaf(e_high, x.x, o[tile][2]);
            o[tile][3] = high * fmaf(e_high, x.y, o[tile][3]);
        }
    }

    __device__ void weigh(float (&p)[4][4], int row0, int left) const {
        const float *rows = this->log_decays.row_extra, *columns = this->log_decays.column_extra;
        mn_scan_weigh_scores<true>(p, this->log_decays.row, this->log_decays.column, row0, left,
                            [&](float x, int r, int c) { return fmaf(rows[r], columns[c], x); });
    }

    __device__ void writes(const uint32_t (&)[4], int, int) const {}

    __device__ void writes_of(const mn_bf16 *z, int t) {
        if (t % 32 != 0) return;
        uint32_t b[4];
        mn_ldmatrix<true>(b, z + (t + threadIdx.x % 32) * MN_SCAN_PITCH + threadIdx.x / 32 * 8);
#pragma unroll
        for (int half = 0; half < 2; half++) {
            const float *at = this->log_decays.added + t + 16 * half + threadIdx.x % 4 * 2;
            const uint32_t a[4] = { mn_mlstm_split_bf16(at[0], at[1]), 0,
                                    mn_mlstm_split_bf16(at[8], at[9]), 0 };
            mn_mma(added, a, b[2 * half], b[2 * half + 1]);
        }
    }
};

/* ---- the column or row n --------------------------------------------------------------------- */

/* What a thread has of n: where it is a column, of the rows of its state's tiles (lanes with column
 * 0 of the tiles), where it is a row, two columns (the first four lanes of a warp). */
template <int DEPTH, int CHUNK>
struct mn_mlstm_n_column {
    using sizes = mn_scan_sizes<DEPTH, CHUNK>;
    using weights = mn_mlstm_out_weights<DEPTH, CHUNK>;
    float at[sizes::row_tiles][2];

    template <typename F>
    __device__ void each(F use) {
        if (threadIdx.x % 4 != 0) return;
#pragma unroll
        for (int r = 0; r < sizes::row_tiles; r++) {
#pragma unroll
            for (int i = 0; i < 2; i++) {
                use(at[r][i], mn_scan_state_of<DEPTH, CHUNK>::row(r) + 8 * i);
            }
        }
    }

    __device__ void share(float *n) {
        if ((int)threadIdx.x / 32 / sizes::row_groups != 0) return;    // others have the same
        each([&](float &x, int i) { n[i] = x; });
    }

    __device__ static bool owns(const mn_scan_coord &place) {
        return place.slice == 0 && (int)threadIdx.x / 32 / sizes::row_groups == 0;
    }

    __device__ static int64_t place_of(const mn_chunk_scan &, const mn_scan_coord &,
                                       int i) { return i; }

    __device__ static int64_t count(const mn_chunk_scan &p) { return p.depth; }

    __device__ void advance(const weights &w) {
        const float whole = w.whole();
#pragma unroll
        for (int r = 0; r < sizes::row_tiles; r++) {
            at[r][0] = fmaf(whole, at[r][0], w.added[r][0] + w.added[r][1]);
            at[r][1] = fmaf(whole, at[r][1], w.added[r][2] + w.added[r][3]);
        }
    }
};

template <int DEPTH, int CHUNK>
struct mn_mlstm_n_row {
    using weights = mn_mlstm_grad_weights<DEPTH, CHUNK>;
    float at[2];

    template <typename F>
    __device__ void each(F use) {
        if (threadIdx.x % 32 >= 4) return;
        use(at[0], (int)(threadIdx.x / 32 * 8 + threadIdx.x % 4 * 2));
        use(at[1], (int)(threadIdx.x / 32 * 8 + threadIdx.x % 4 * 2 + 1));
    }

    __device__ void share(float *n) {
        each([&](float &x, int i) { n[i] = x; });
    }

    __device__ static bool owns(const mn_scan_coord &) { return true; }

    __device__ static int64_t place_of(const mn_chunk_scan &, const mn_scan_coord &place, int i) {
        return place.column0 + i;
    }

    __device__ static int64_t count(const mn_chunk_scan &p) { return p.width; }

    __device__ void advance(const weights &w) {
        const float whole = w.whole();
        at[0] = fmaf(whole, at[0], w.added[0] + __shfl_xor_sync(0xffffffffu, w.added[0], 4));
        at[1] = fmaf(whole, at[1], w.added[1] + __shfl_xor_sync(0xffffffffu, w.added[1], 4));
    }
};

template <typename N>
__device__ inline void mn_mlstm_load_n(N &n, const mn_mlstm_scans &p,
                                      const mn_scan_coord &place) {
    const mn_chunk_scan &scan = p.all.scan[blockIdx.y];
    const int64_t count = N::count(scan);
    const float *first = p.first[blockIdx.y];
    n.each([&](float &x, int i) {
        const int64_t j = N::place_of(scan, place, i);
        const int64_t from = (place.n * p.all.call.H + place.h) * count + j;
        x = first && j < count ? scan.into * first[from] : 0.0f;
    });
}

template <typename N>
__device__ inline void mn_mlstm_store_n(N &n, const mn_mlstm_scans &p,
                                    const mn_scan_coord &place) {
    const mn_chunk_scan &scan = p.all.scan[blockIdx.y];
    const int64_t count = N::count(scan);
    float *last = p.last[blockIdx.y];
    if (!last || !N::owns(place)) return;
    n.each([&](float &x, int i) {
        const int64_t j = N::place_of(scan, place, i);
        const int64_t to = (place.n * p.all.call.H + place.h) * count + j;
        if (j < count) last[to] = scan.from * x;
    });
}

/* ---- the scan -------------------------------------------------------------------------------- */

/* Reads and moves one chunk, as mn_scan_chunk; o leaves over its denominators. */
template <int DEPTH, int CHUNK>
__device__ inline void mn_mlstm_chunk(mn_scan_state_of<DEPTH, CHUNK> &M,
                                     mn_mlstm_n_column<DEPTH, CHUNK> &n, const mn_mlstm_scans &p,
                                     const mn_scan_coord &at,
                                         const mn_scan_col_tiles &col_tiles,
                                     const mn_mlstm_smem<DEPTH, CHUNK> &smem, int now, int64_t t) {
    const mn_chunk_scan &scan = p.all.scan[blockIdx.y];
    const int count = (int)min((int64_t)CHUNK, at.span.length - t);
    const int64_t tokens = p.all.call.B * p.all.call.T;
    const int64_t from = at.h * tokens + at.span.b * p.all.call.T + at.span.t0 + t;
    float o[mn_scan_n_tiles<CHUNK>][4] = {}, m[2], factor[2];
    uint32_t paired[2][mn_scan_n_tiles<CHUNK>];
    if (scan.mode != MN_SCAN_PLAIN) mn_scan_load_paired<CHUNK>(paired, scan, col_tiles, t,
                                                                     count);
#pragma unroll
    for (int half = 0; half < 2; half++) {
        const int token = mn_scan_token<CHUNK>(half, false);
        m[half] = token < count ? p.tokens.m[from + token] : 0.0f;
    }
    mn_mlstm_out_weights<DEPTH, CHUNK> weights(smem.log_decays[now], smem.n[now]);
    mn_scan_output<DEPTH, CHUNK>(o, smem.stage[now], smem.state[now], weights, paired, nullptr);
#pragma unroll
    for (int half = 0; half < 2; half++) {
        const int token = mn_scan_token<CHUNK>(half, false);
        const float a = scan.scale * weights.whole_a(half), den = mn_fmax(fabsf(a), expf(-m[half]));
        factor[half] = den == 0.0f ? 0.0f : scan.scale / den;    // NaN stays
        const bool local = token < count && threadIdx.x % 4 == 0
            && mn_scan_column0<CHUNK>() == 0;
        if (p.tokens.a && at.slice == 0 && local) p.tokens.a[from + token] = a;
    }
    mn_scan_update_state<DEPTH, CHUNK>(M, smem.stage[now], weights);
    n.advance(weights);
    mn_scan_store_out<CHUNK>(o, paired, scan.mode, p.all, scan, at, col_tiles, t, count, factor);
}

/* The same for a gradient. What the gradients of f take is kept and met by the row n, too. */
template <int DEPTH, int CHUNK>
__device__ inline void mn_mlstm_chunk(mn_scan_state_of<DEPTH, CHUNK> &M,
                                     mn_mlstm_n_row<DEPTH, CHUNK> &n, const mn_mlstm_scans &p,
                                     const mn_scan_coord &at,
                                         const mn_scan_col_tiles &col_tiles,
                                     const mn_mlstm_smem<DEPTH, CHUNK> &smem, int now, int64_t t) {
    using sizes = mn_scan_sizes<DEPTH, CHUNK>;
    const mn_chunk_scan &scan = p.all.scan[blockIdx.y];
    const int count = (int)min((int64_t)CHUNK, at.span.length - t);
    const int64_t kept_at = mn_scan_saved_at<DEPTH, CHUNK>(p.all, at, t / CHUNK);
    float *kept_n = p.kept_n + kept_at * MN_SCAN_WIDTH;
    const bool of_n = threadIdx.x < MN_SCAN_WIDTH;
    float o[mn_scan_n_tiles<CHUNK>][4] = {}, product = 0.0f, met = 0.0f;
    uint32_t paired[2][mn_scan_n_tiles<CHUNK>];
    typename mn_scan_state_of<DEPTH, CHUNK>::kept kept;
    if (scan.mode != MN_SCAN_PLAIN) mn_scan_load_paired<CHUNK>(paired, scan, col_tiles, t,
                                                                     count);
    if (scan.mode == MN_SCAN_DOT_STATE) {
        M.recall(kept, scan.kept + kept_at * sizes::kept);
        if (of_n) met = smem.n[now][threadIdx.x] * kept_n[threadIdx.x];
    }
    mn_mlstm_grad_weights<DEPTH, CHUNK> weights(smem.log_decays[now], smem.n[now]);
    mn_scan_output<DEPTH, CHUNK>(o, smem.stage[now], smem.state[now], weights, paired,
                               scan.mode == MN_SCAN_DOT_STATE ? &product : nullptr);
    if (scan.mode == MN_SCAN_DOT_STATE) {
        mn_scan_dot_saved<DEPTH, CHUNK>(M, kept, scan, kept_at, weights.whole(), met, product);
    }
    if (scan.mode == MN_SCAN_SAVE_STATE) {
        M.keep(scan.kept + kept_at * sizes::kept);
        if (of_n) kept_n[threadIdx.x] = smem.n[now][threadIdx.x];
    }
    mn_scan_update_state<DEPTH, CHUNK>(M, smem.stage[now], weights);
    n.advance(weights);
    mn_scan_store_out<CHUNK>(o, paired, scan.mode, p.all, scan, at, col_tiles, t, count,
                       { scan.scale, scan.scale });
}

/* N: mn_mlstm_n_column for o, mn_mlstm_n_row for gradients. */
template <int DEPTH, int CHUNK, typename N>
__global__ void __launch_bounds__(mn_scan_sizes<DEPTH, CHUNK>::threads, 1)
mlstm_state_scan_kernel(const __grid_constant__ mn_mlstm_scans p) {
    extern __shared__ __align__(128) unsigned char bytes[];
    mn_mlstm_smem<DEPTH, CHUNK> &smem = *(mn_mlstm_smem<DEPTH, CHUNK> *)bytes;
    const mn_chunk_scan &scan = p.all.scan[blockIdx.y];
    if (blockIdx.x >= mn_scan_slices(scan) * p.all.call.H * mn_n_spans(p.all.call)) return;
    const mn_scan_coord at = mn_scan_block_coord(p.all.call, scan, CHUNK);
    const mn_scan_col_tiles col_tiles(scan, at, DEPTH);
    const mn_mlstm_mode mode = p.mode[blockIdx.y];
    const bool reverse = scan.reverse, sums = threadIdx.x < 32;
    const int64_t length = at.span.length;
    mn_mlstm_lane_gates<CHUNK> load;
    mn_scan_state_of<DEPTH, CHUNK> M;
    N n;
    M.load(scan, at);
    mn_mlstm_load_n(n, p, at);
    M.share(smem.state[0]);
    n.share(smem.n[0]);
    for (int64_t i = 0; i <= at.n_chunks; i++) {
        const bool computes = i > 0, prefetches = i < at.n_chunks;
        const int next = i % 2, now = 1 - next;
        const int64_t t = (reverse ? at.n_chunks - i : i - 1) * CHUNK;    // of what it computes
        const int64_t t_next = reverse ? t - CHUNK : t + CHUNK;
        if (computes) mn_cp_async_wait_all();
        __syncthreads();
        if (prefetches) {
            mn_scan_load_chunks<DEPTH, CHUNK>(smem.stage[next], col_tiles, t_next, length, reverse);
            const int count = (int)min((int64_t)CHUNK, length - t_next);
            if (sums) mn_mlstm_load_gates<CHUNK>(load, p, mode, at, t_next, count, reverse);
        }
        if (computes) {
            mn_mlstm_chunk<DEPTH, CHUNK>(M, n, p, at, col_tiles, smem, now, t);
            M.share(smem.state[next]);
            n.share(smem.n[next]);
        }
        if (sums && prefetches) mn_mlstm_make_log_decays<CHUNK>(smem.log_decays[next], load, mode,
                                                                reverse);
    }
    M.store(scan, at);
    mn_mlstm_store_n(n, p, at);
}

enum { MAX_CHUNK = 128 };

static int chunk_size(int64_t width) {
    const size_t limit = (size_t)mn_additive_smem_limit();
    const int depth = mn_additive_padded_depth(width);
    if (depth == 64) return sizeof(mn_mlstm_smem<64, 128>) <= limit ? 128 : 64;
    if (depth == 128 && sizeof(mn_mlstm_smem<128, 128>) <= limit) return 128;
    if (depth == 128) return sizeof(mn_mlstm_smem<128, 64>) <= limit ? 64 : 0;
    return depth == 256 && sizeof(mn_mlstm_smem<256, 64>) <= limit ? 64 : 0;
}

/* In narrow memories tiles would be mostly padding, and few columns average roundings less. */
bool mn_mlstm_uses_chunks(const mn_mlstm_args *p, bool backward) {
    const int64_t K = p->call.K, V = p->call.V;
    if (p->call.dtype != MN_BF16 || K < 16 || K > 256 || V < 32) return false;
    if (backward && (V > 256 || !(fabs(p->scale) > 1e-20) || fabs(p->scale) > 1e20)) return false;
    return chunk_size(K) > 0 && (!backward || chunk_size(V) > 0);
}

/* ---- between the scans ----------------------------------------------------------------------- */

/* Denominators and e of all tokens, from a and o.do in parts. */
__global__ void __launch_bounds__(256)
mlstm_denominators(const __grid_constant__ mn_mlstm_args p, mn_mlstm_tokens s,
                   mn_decay_partials inner) {
    const int64_t tokens = p.call.B * p.call.T, at = blockIdx.x * (int64_t)256 + threadIdx.x;
    if (at >= tokens * p.call.H) return;
    const int64_t h = at / tokens, b = at % tokens / p.call.T, t = at % tokens % p.call.T;
    const float a = s.a[at], least = expf(-s.m[at]), den = mn_fmax(fabsf(a), least);
    const float product = mn_decay_sum_partials(inner, inner.query, p.call, b, t, h);
    s.share[at] = den == 0.0f ? -1000.0f : mn_fmax(-log2f(den), -1000.0f);
    s.e[at] = !(fabsf(a) > least) ? 0.0f : a > 0.0f ? -product : product;
}

/* One block per chunk and head, one thread per token. */
__global__ void __launch_bounds__(MAX_CHUNK)
mlstm_gate_grads(const __grid_constant__ mn_mlstm_args p, mn_decay_partials parts) {
    __shared__ float smem[32];
    const int64_t h = blockIdx.x % p.call.H, slot = blockIdx.x / p.call.H;
    const mn_tile_span tile = mn_tile_at(p.call, blockDim.x, slot);
    const int64_t t = tile.span.t0 + tile.first + threadIdx.x, b = tile.span.b;
    const float to_f = mn_decay_grad(smem, parts, p.call, tile, slot, h);
    if (threadIdx.x >= tile.n_rows) return;
    mn_bf16 *dipre = mn_row<mn_bf16>(p.grad.ipre, b, t, h);
    mn_bf16 *dfpre = mn_row<mn_bf16>(p.grad.fpre, b, t, h);
    const float fpre = mn_float(*mn_row<mn_bf16>(p.fpre, b, t, h));
    if (dipre) mn_put(dipre, mn_decay_sum_partials(parts, parts.key, p.call, b, t, h));
    if (dfpre) mn_put(dfpre, to_f * expf(mn_log_sigmoid(-fpre)));
}

/* ---- workspace ------------------------------------------------------------------------------- */

/* Counts of floats, of bf16 numbers for `kept`. */
struct extent {
    size_t heads, tokens;         // (N,H), (H, B T)
    size_t states, ones;
    size_t inner, products;       // o.do; q.dq, as many as k.dk
    int64_t slots, slices;        // chunks of the scans of dq and dk; slices of K
    int64_t inner_shares, shares;
    size_t met, kept_n, kept;
};

static bool get_sizes(extent *to, const mn_mlstm_args *p, bool backward) {
    const mn_call &c = p->call;
    *to = {};
    bool ok = mn_mul_size(&to->heads, (size_t)mn_n_spans(c), (size_t)c.H) &&
              mn_mul_size(&to->tokens, (size_t)c.B, (size_t)c.T) &&
              mn_mul_size(&to->tokens, to->tokens, (size_t)c.H) &&
              mn_mul_size(&to->ones, to->heads, (size_t)c.K) &&
              mn_mul_size(&to->states, to->ones, (size_t)c.V);
    if (!ok || !backward) return ok;
    size_t positions;
    const int chunk = chunk_size(c.V);
    to->slots = mn_tile_slots(c, chunk);
    to->slices = mn_ceil_div(c.K, MN_SCAN_WIDTH);
    to->shares = to->slices * (128 / chunk);
    to->inner_shares = mn_ceil_div(c.V, MN_SCAN_WIDTH) * (128 / chunk_size(c.K));
    return mn_mul_size(&to->inner, to->tokens, (size_t)to->inner_shares) &&
           mn_mul_size(&to->products, to->tokens, (size_t)to->shares) &&
           mn_mul_size(&positions, (size_t)to->slots, (size_t)c.H) &&
           mn_mul_size(&positions, positions, (size_t)to->slices) &&
           mn_mul_size(&to->met, positions, MN_SCAN_WARPS) &&
           mn_mul_size(&to->kept_n, positions, MN_SCAN_WIDTH) &&
           mn_mul_size(&to->kept, to->kept_n, (size_t)mn_additive_padded_depth(c.V));
}

struct workspace {
    mn_bf16 *kept;
    mn_mlstm_tokens tokens;
    mn_mlstm_states states;
    float *inner, *query, *key, *state_dots, *inside, *kept_n;
};

/* Parts of `at`, what is read by 16 bytes first; how many floats it took behind `kept`. */
static size_t carve_workspace(workspace *to, const extent &e, void *at, bool backward) {
    *to = {};
    to->kept = (mn_bf16 *)at;
    float *from = (float *)(to->kept + e.kept), *next = from;
    const auto take = [&](size_t count) { float *was = next; next += count; return was; };
    to->tokens.decay = take(e.tokens), to->tokens.write = take(e.tokens);
    to->tokens.m = take(e.tokens), to->states.last = take(e.heads);
    to->states.state = take(e.states), to->states.ones = take(e.ones);
    if (!backward) return (size_t)(next - from);
    to->tokens.a = take(e.tokens), to->tokens.share = take(e.tokens);
    to->tokens.e = take(e.tokens);
    to->states.dstate0 = take(e.states), to->states.dones0 = take(e.ones);
    to->inner = take(e.inner), to->query = take(e.products), to->key = take(e.products);
    to->state_dots = take(e.met), to->inside = take(e.met), to->kept_n = take(e.kept_n);
    return (size_t)(next - from);
}

bool mn_mlstm_chunk_plan(const mn_mlstm_args *p, bool backward, mn_plan *plan) {
    extent e;
    size_t floats = 0, bytes;
    if (!get_sizes(&e, p, backward)) return false;
    const size_t tokens = backward ? 6 : 3, states = backward ? 2 : 1;
    size_t part;
    bool ok = mn_mul_size(&floats, e.tokens, tokens) && mn_mul_size(&part, e.states, states) &&
              mn_add_size(&floats, floats, part) && mn_mul_size(&part, e.ones, states) &&
              mn_add_size(&floats, floats, part) && mn_add_size(&floats, floats, e.heads) &&
              mn_add_size(&floats, floats, e.inner) && mn_add_size(&floats, floats, e.kept_n);
    for (int twice = 0; twice < 2; twice++) {
        ok = ok && mn_add_size(&floats, floats, e.products) && mn_add_size(&floats, floats, e.met);
    }
    return ok && mn_mul_size(&floats, floats, sizeof(float)) &&
           mn_mul_size(&bytes, e.kept, sizeof(mn_bf16)) &&
           mn_add_size(&plan->shared_bytes, floats, bytes);
}

/* ---- scans ----------------------------------------------------------------------------------- */

static mn_in as_input(const float *data, const mn_call &c) {
    mn_in view = {};
    view.data = data;
    view.stride[0] = c.H * c.K * c.V, view.stride[2] = c.K * c.V;
    return view;
}

static mn_out as_output(float *data, const mn_call &c) {
    mn_out view = {};
    view.data = data;
    view.stride[0] = c.H * c.K * c.V, view.stride[2] = c.K * c.V;
    return view;
}

static mn_chunk_scan make_scan(const mn_mlstm_args *p, mn_mlstm_mode mode) {
    mn_chunk_scan scan = {};
    const int64_t K = p->call.K, V = p->call.V;
    const bool transposed = mode == MN_MLSTM_DQ || mode == MN_MLSTM_DK;
    scan.reverse = mode == MN_MLSTM_DV || mode == MN_MLSTM_DK;
    scan.depth = transposed ? V : K, scan.width = transposed ? K : V;
    scan.state_row = transposed ? 1 : V, scan.state_column = transposed ? V : 1;
    scan.scale = (float)p->scale;
    scan.into = scan.reverse ? 1.0f / (float)p->scale : 1.0f;
    scan.from = scan.reverse ? (float)p->scale : 1.0f;
    scan.segment = MN_SCAN_SEG_ALIGN;
    if (!scan.reverse) scan.state0 = p->C0;
    return scan;
}

static mn_chunk_scan make_grad_scan(const mn_mlstm_args *p, mn_mlstm_mode mode,
                                    const workspace &w) {
    mn_chunk_scan scan = make_scan(p, mode);
    if (mode == MN_MLSTM_DQ) {
        scan.x = p->cot.o, scan.y = p->v, scan.z = p->k, scan.paired = p->q;
        scan.out = p->grad.q, scan.mode = MN_SCAN_SAVE_STATE, scan.products = w.query;
    } else if (mode == MN_MLSTM_DV) {
        scan.x = p->k, scan.y = p->q, scan.z = p->cot.o, scan.out = p->grad.v;
        scan.state = as_output(w.states.dstate0, p->call);
    } else {
        scan.x = p->v, scan.y = p->cot.o, scan.z = p->q, scan.paired = p->k;
        scan.out = p->grad.k, scan.mode = MN_SCAN_DOT_STATE, scan.products = w.key;
    }
    scan.kept = w.kept, scan.inside = w.inside, scan.state_dots = w.state_dots;
    if (scan.reverse && mn_mlstm_wants_states(p, true)) {
        scan.state0 = as_input(w.states.state, p->call);
    }
    return scan;
}

template <int DEPTH, int CHUNK, typename N>
static int launch_of(const mn_mlstm_scans &scans, int count, cudaStream_t on) {
    int64_t blocks = 0;
    for (int i = 0; i < count; i++) blocks =
        mn_max(blocks, mn_scan_slices(scans.all.scan[i]));
    blocks *= scans.all.call.H * mn_n_spans(scans.all.call);
    if (blocks == 0) return cudaSuccess;
    if (blocks > INT32_MAX) return cudaErrorNotSupported;
    const dim3 grid((unsigned)blocks, (unsigned)count);
    return mn_launch_smem(mlstm_state_scan_kernel<DEPTH, CHUNK, N>, grid,
                               mn_scan_sizes<DEPTH, CHUNK>::threads,
                               sizeof(mn_mlstm_smem<DEPTH, CHUNK>), on, scans);
}

template <template <int, int> class N>
static int launch(const mn_mlstm_scans &scans, int count, cudaStream_t on) {
    const int64_t width = scans.all.scan[0].depth;
    const int depth = mn_additive_padded_depth(width);
    const bool wide = chunk_size(width) == 128;
    if (depth == 64 && wide) return launch_of<64, 128, N<64, 128>>(scans, count, on);
    if (depth == 64) return launch_of<64, 64, N<64, 64>>(scans, count, on);
    if (depth == 128 && wide) return launch_of<128, 128, N<128, 128>>(scans, count, on);
    if (depth == 128) return launch_of<128, 64, N<128, 64>>(scans, count, on);
    return launch_of<256, 64, N<256, 64>>(scans, count, on);
}

static int forward(const mn_mlstm_args *p, const extent &e, const workspace &w, bool backward,
                   cudaStream_t on) {
    mn_mlstm_scans scans = {};
    mn_chunk_scan scan = make_scan(p, MN_MLSTM_O);
    const bool states = !backward && mn_mlstm_wants_states(p, false);
    scan.x = p->q, scan.y = p->k, scan.z = p->v;
    if (backward) scan.paired = p->cot.o, scan.mode = MN_SCAN_DOT_OUT, scan.products = w.inner;
    else scan.out = p->o;
    if (states) scan.state = as_output(w.states.state, p->call), scans.last[0] = w.states.ones;
    scans.all.call = p->call, scans.all.scan[0] = scan, scans.mode[0] = MN_MLSTM_O;
    scans.first[0] = (const float *)p->n0.data;
    scans.tokens = w.tokens;
    mlstm_gates<mn_bf16, true><<<(unsigned)e.heads, MN_GATE_THREADS, 0, on>>>(
        *p, w.tokens.decay, w.tokens.write, w.tokens.m, w.states.last);
    int code = mn_launch_status();
    if (code == cudaSuccess && (backward || p->o.data || states)) {
        code = launch<mn_mlstm_n_column>(scans, 1, on);
    }
    if (code != cudaSuccess || !states) return code;
    return mn_mlstm_store_states(p, w.states, (int64_t)e.heads, false, on);
}

/* The three gradients; dk's scan meets what dq's kept. */
static int gradients(const mn_mlstm_args *p, const workspace &w, cudaStream_t on) {
    mn_mlstm_scans scans = {};
    scans.all.call = p->call, scans.tokens = w.tokens, scans.kept_n = w.kept_n;
    int code = cudaSuccess;
    for (int mode = MN_MLSTM_DQ; mode <= MN_MLSTM_DK && code == cudaSuccess; mode++) {
        const bool transposed = mode != MN_MLSTM_DV;
        scans.mode[0] = (mn_mlstm_mode)mode;
        scans.all.scan[0] = make_grad_scan(p, scans.mode[0], w);
        scans.first[0] = mode == MN_MLSTM_DQ ? (const float *)p->n0.data : NULL;
        scans.last[0] = mode == MN_MLSTM_DK ? w.states.dones0 : NULL;
        if (scans.all.scan[0].reverse && transposed && mn_mlstm_wants_states(p, true)) {
            scans.first[0] = w.states.ones;
        }
        code = launch<mn_mlstm_n_row>(scans, 1, on);
    }
    return code;
}

int mn_mlstm_chunk_run(const mn_mlstm_args *p, void *shared, bool backward, cudaStream_t on) {
    extent e;
    workspace w;
    if (!get_sizes(&e, p, backward)) return cudaErrorNotSupported;
    if (e.heads == 0) return cudaSuccess;
    carve_workspace(&w, e, shared, backward);
    const int64_t heads = (int64_t)e.heads, tokens = (int64_t)e.tokens;
    const int64_t blocks = e.slots * p->call.H;
    if (heads > INT32_MAX || blocks > INT32_MAX) return cudaErrorNotSupported;
    int code = forward(p, e, w, backward, on);
    if (code != cudaSuccess || !backward) return code;
    if (mn_mlstm_wants_states(p, true)) code = mn_mlstm_store_states(p, w.states, heads, true, on);
    if (code != cudaSuccess) return code;
    const mn_decay_partials inner = { w.inner, NULL, NULL, NULL, e.inner_shares, 0 };
    if (tokens > 0) {
        mlstm_denominators<<<mn_blocks(tokens, 256), 256, 0, on>>>(*p, w.tokens, inner);
    }
    code = gradients(p, w, on);
    if (code != cudaSuccess) return code;
    const mn_decay_partials parts = { w.query, w.key, w.state_dots, w.inside, e.shares,
                                   (int)e.slices * MN_SCAN_WARPS };
    if (blocks > 0) {
        mlstm_gate_grads<<<(unsigned)blocks, chunk_size(p->call.V), 0, on>>>(*p, parts);
    }
    return mn_mlstm_store_state0_grads(p, w.states, heads, on);
}

}    // namespace mneme::mlstm
