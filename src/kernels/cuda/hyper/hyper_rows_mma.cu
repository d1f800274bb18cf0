/* hyper_rows_mma.cu - rows of strips by tensor cores, for up to 16 ranks of bf16 calls (equations
 * in hyper.cu).
 *
 * A block has 16 rows of a head, a warp every eighth piece of 16 lags, and products are those of
 * mma.m16n8k16: mixing parameters are bf16 as they are, numbers of rows go in as the sum of two of
 * bf16, what rounding leaves of the first being the second.
 *
 *   down (rows, ranks) += z (rows, lags) U (lags, ranks)
 *   up   (rows, lags)  += h c (rows, ranks) Vt' (ranks, lags)
 *
 * A thread has rows lane / 4 and that plus 8, and of a piece places q, q + 4, q + 8, q + 12 with
 * q = lane % 4: lanes of a row read neighbours, and what a product leaves is, place for place, a
 * left operand of the next, so that a row is gone over once for x and the ranks of what x becomes.
 * Places go the way of the keys: in lag order from the piece's last lag on. Parameters lie as right
 * operands (`hyper_pieces_kernel`), those of a lane side by side. */
#include "kernels/cuda/hyper/hyper_rows.cuh"

namespace mneme::hyper {

enum {
    PIECE_WARPS = 8,
    PIECE_THREADS = 32 * PIECE_WARPS,
    PIECE_PITCH = 20,    // of ranks of a row in shared memory
};
static_assert(PIECE_THREADS == PIECE_ROWS * MN_HYPER_RANKS, "a thread has one rank of one row");

__device__ inline int mn_piece_lag(const mn_hyper_params &k, int piece, int place) {
    return piece * PIECE_LAGS + (mn_hyper_by_position(k) ? place : PIECE_LAGS - 1 - place);
}

/* Parameters of a mix as right operands. Depth or column `i` of eight in half t of a piece is place
 * 4 (2 t + i % 2) + i / 2. */
__global__ static void hyper_pieces_kernel(const __grid_constant__ mn_hyper_params k) {
    const mn_call &c = k.p.call;
    const int64_t mix = blockIdx.y, at = blockIdx.x * (int64_t)blockDim.x + threadIdx.x;
    const int piece = (int)(at / 32), lane = (int)(at % 32), kind = (int)blockIdx.z;
    const bool second = mix >= c.Q, up = kind >= PIECE_UP_U, turned = kind % 2 == 1;
    if (piece >= k.n_pieces || !k.has_params[second]) return;
    const int64_t which = second ? mix - c.Q : mix, R = second ? c.W : c.R;
    const mn_bf16 *U = mn_row<mn_bf16>(second ? k.p.U2 : k.p.U1, 0, 0, which);
    const mn_bf16 *Vt = mn_row<mn_bf16>(second ? k.p.Vt2 : k.p.Vt1, 0, 0, which);
    const mn_bf16 *d = mn_row<mn_bf16>(second ? k.p.d2 : k.p.d1, 0, 0, which);
    const auto entry = [&](int place, int64_t rank) {
        const int64_t lag = mn_piece_lag(k, piece, place), e = mn_hyper_entry(k, lag);
        if (lag >= c.P || rank >= R) return __float2bfloat16_rn(0.0f);
        return turned ? Vt[rank * c.P + e] : U[e * R + rank];
    };
    union {
        mn_bf16 each[8];
        uint4 all;
    } to;
    const int n = lane / 4, q = lane % 4;
#pragma unroll
    for (int i = 0; i < 8; i++) {
        const int e = i % 2, low = i / 2 % 2, high = i / 4;
        to.each[i] = up ? entry(4 * (2 * high + n % 2) + n / 2, 8 * low + 2 * q + e)
                        : entry(4 * (2 * low + e) + q, 8 * high + n);
    }
    k.pieces[((mix * PIECE_KINDS + kind) * k.n_pieces + piece) * 32 + lane] = to.all;
    if (kind != 0 || lane >= PIECE_LAGS) return;
    const int64_t lag = mn_piece_lag(k, piece, lane % 4 * 4 + lane / 4);
    const float by = lag < c.P ? 1.0f + mn_float(d[mn_hyper_entry(k, lag)]) : 1.0f;
    k.diagonal[(mix * k.n_pieces + piece) * PIECE_LAGS + lane] = by;
}

/* A mix's parameters for a lane. */
struct mn_piece_mix {
    const uint4 *operands;
    const float4 *diagonal;
    int n;
    bool there;

    __device__ mn_piece_mix(const mn_hyper_params &k, const mn_hyper_rows4 &f, int branch) {
        const int64_t mix = mn_hyper_mix_index(k, f.head, branch);
        n = (int)k.n_pieces * 32, there = k.has_params[branch == 2];
        operands = k.pieces + mix * PIECE_KINDS * n + threadIdx.x % 32;
        diagonal = (const float4 *)k.diagonal + mix * k.n_pieces * 4 + threadIdx.x % 4;
    }

    __device__ uint4 operand(int kind, int piece) const {
        return there ? __ldg(operands + (kind * n + piece * 32)) : make_uint4(0, 0, 0, 0);
    }

    __device__ float4 by(int piece) const {
        return there ? __ldg(diagonal + piece * 4) : make_float4(1.0f, 1.0f, 1.0f, 1.0f);
    }
};

/* Where a thread's numbers of a piece are, counted from number 0 of the block's first row. */
struct mn_piece_place {
    int at, far, lag, turn;    // first; eight rows on; lag of place q; from place to place
    int seen[2];               // lags that its rows see
    bool all;                  // whether all rows see the whole piece

    __device__ mn_piece_place(const mn_hyper_params &k, const mn_hyper_rows4 &f, int piece) {
        const bool by_position = mn_hyper_by_position(k);
        const int step = (int)k.s.row + !by_position, row = threadIdx.x % 32 / 4;
        const int q = threadIdx.x % 4, lag0 = piece * PIECE_LAGS;
        at = row * step + q + (by_position ? lag0 : 1 - PIECE_LAGS - lag0);
        far = 8 * step;
        lag = lag0 + (by_position ? q : PIECE_LAGS - 1 - q), turn = by_position ? 4 : -4;
        seen[0] = f.keys(row), seen[1] = f.keys(row + 8);
        all = f.n == PIECE_ROWS && lag0 + PIECE_LAGS <= f.seen + 1;
    }

    __device__ bool sees(int i, int j) const {
        return lag + j * turn < seen[i];
    }
};

/* A thread's numbers of a piece: two rows, four places. */
struct mn_piece {
    float at[2][4];

    __device__ void load(const float *from, const mn_piece_place &p) {
        if (p.all) {
#pragma unroll
            for (int e = 0; e < 8; e++) at[e / 4][e % 4] = from[p.at + e / 4 * p.far + e % 4 * 4];
            return;
        }
#pragma unroll
        for (int e = 0; e < 8; e++) {
            const bool sees = p.sees(e / 4, e % 4);
            at[e / 4][e % 4] = sees ? from[p.at + e / 4 * p.far + e % 4 * 4] : 0.0f;
        }
    }

    /* Zeros where rows do not see. */
    __device__ void mask(const mn_piece_place &p) {
        if (p.all) return;
#pragma unroll
        for (int e = 0; e < 8; e++) {
            if (!p.sees(e / 4, e % 4)) at[e / 4][e % 4] = 0.0f;
        }
    }

    __device__ void store(float *to, const mn_piece_place &p) const {
#pragma unroll
        for (int e = 0; e < 8; e++) {
            if (p.all || p.sees(e / 4, e % 4)) {
                to[p.at + e / 4 * p.far + e % 4 * 4] = at[e / 4][e % 4];
            }
        }
    }

    __device__ void scale(const float4 &by) {
#pragma unroll
        for (int i = 0; i < 2; i++) {
            at[i][0] *= by.x, at[i][1] *= by.y, at[i][2] *= by.z, at[i][3] *= by.w;
        }
    }
};

/* d += a b, depth 16 */
__device__ inline void mn_piece_mma(float &d0, float &d1, float &d2, float &d3,
                                    const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
#if __CUDA_ARCH__ >= 800
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, "
                 "{%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
                 : "+f"(d0), "+f"(d1), "+f"(d2), "+f"(d3)
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
#endif
}

/* 16 x 16 numbers as a left operand, in two halves. */
struct mn_piece_left {
    uint32_t high[4], low[4];

    /* Two neighbours in depth. */
    __device__ void put(int i, float x0, float x1) {
        const __nv_bfloat162 near = __floats2bfloat162_rn(x0, x1);
        const float2 back = __bfloat1622float2(near);
        const __nv_bfloat162 rest = __floats2bfloat162_rn(x0 - back.x, x1 - back.y);
        high[i] = *(const uint32_t *)&near, low[i] = *(const uint32_t *)&rest;
    }

    __device__ explicit mn_piece_left(const mn_piece &x) {
#pragma unroll
        for (int i = 0; i < 4; i++) {
            put(i, x.at[i % 2][i / 2 * 2], x.at[i % 2][i / 2 * 2 + 1]);
        }
    }

    /* From ranks of 16 rows in shared memory. */
    __device__ explicit mn_piece_left(const float (&ranks)[PIECE_ROWS][PIECE_PITCH]) {
        const int row = threadIdx.x % 32 / 4, a = threadIdx.x % 4 * 2;
#pragma unroll
        for (int i = 0; i < 4; i++) {
            const float *from = &ranks[row + i % 2 * 8][a + i / 2 * 8];
            put(i, from[0], from[1]);
        }
    }

    /* x += this by the ranks of a piece's lags */
    __device__ void up(mn_piece &x, const uint4 &b) const {
        float(&y)[2][4] = x.at;
        mn_piece_mma(y[0][0], y[0][1], y[1][0], y[1][1], high, b.x, b.y);
        mn_piece_mma(y[0][2], y[0][3], y[1][2], y[1][3], high, b.z, b.w);
        mn_piece_mma(y[0][0], y[0][1], y[1][0], y[1][1], low, b.x, b.y);
        mn_piece_mma(y[0][2], y[0][3], y[1][2], y[1][3], low, b.z, b.w);
    }
};

/* A warp's sums over lags: of a row two neighbouring ranks of each eight. */
struct mn_piece_ranks {
    float at[2][4];

    __device__ void down(const mn_piece_left &x, const uint4 &b) {
        mn_piece_mma(at[0][0], at[0][1], at[0][2], at[0][3], x.high, b.x, b.y);
        mn_piece_mma(at[1][0], at[1][1], at[1][2], at[1][3], x.high, b.z, b.w);
        mn_piece_mma(at[0][0], at[0][1], at[0][2], at[0][3], x.low, b.x, b.y);
        mn_piece_mma(at[1][0], at[1][1], at[1][2], at[1][3], x.low, b.z, b.w);
    }
};

/* What warps of a block exchange: sums of ranks of two mixes, a number of each row; ranks of all
 * three mixes. */
struct mn_piece_smem {
    float sums[2][PIECE_WARPS][PIECE_THREADS], of_rows[PIECE_WARPS][PIECE_ROWS], pull[PIECE_ROWS];
    float ranks[3][PIECE_ROWS][PIECE_PITCH];

    __device__ void put(int i, const mn_piece_ranks &x) {
        const int row = threadIdx.x % 32 / 4, a = threadIdx.x % 4 * 2, warp = threadIdx.x / 32;
#pragma unroll
        for (int e = 0; e < 4; e++) {
            float *to = &sums[i][warp][(row + e % 2 * 8) * MN_HYPER_RANKS + e / 2 * 8 + a];
            to[0] = x.at[e / 2][e % 2 * 2], to[1] = x.at[e / 2][e % 2 * 2 + 1];
        }
    }

    /* Sums of a thread's two rows; four threads have numbers of each. */
    __device__ void put_rows(const float (&x)[2]) {
#pragma unroll
        for (int i = 0; i < 2; i++) {
            float sum = x[i] + __shfl_xor_sync(0xffffffffu, x[i], 1);
            sum += __shfl_xor_sync(0xffffffffu, sum, 2);
            if (threadIdx.x % 4 == 0) of_rows[threadIdx.x / 32][threadIdx.x % 32 / 4 + 8 * i] = sum;
        }
    }

    /* The block's sum of rank threadIdx.x % 16 of row threadIdx.x / 16, after all have met. */
    __device__ float sum(int i) const {
        float all = 0.0f;
#pragma unroll
        for (int warp = 0; warp < PIECE_WARPS; warp++) all += sums[i][warp][threadIdx.x];
        return all;
    }

    __device__ float sum_of_row(int row) const {
        float all = 0.0f;
#pragma unroll
        for (int warp = 0; warp < PIECE_WARPS; warp++) all += of_rows[warp][row];
        return all;
    }
};

/* h and h c of a thread's rank from h. */
__device__ inline void mn_piece_ranks_in(const mn_hyper_params &k, const mn_hyper_rows4 &f,
                                         mn_piece_smem &smem, int branch, float h) {
    const int r = threadIdx.x / MN_HYPER_RANKS, a = threadIdx.x % MN_HYPER_RANKS;
    float by = 0.0f;
    if (r < f.n) {
        by = mn_hyper_rank_gate<mn_bf16>(k, f, branch, r, a) * h;
        float *saved_row = mn_hyper_saved_row(k, f.which, f.head, f.first + r);
        mn_hyper_saved_ranks(k, saved_row, branch, MN_HYPER_H)[a] = h;
        mn_hyper_saved_ranks(k, saved_row, branch, MN_HYPER_HC)[a] = by;
    }
    smem.ranks[branch][r][a] = by;
}

/* y c and dc of a thread's rank from y; h y c. */
__device__ inline float mn_piece_ranks_back(const mn_hyper_params &k, const mn_hyper_rows4 &f,
                                            mn_piece_smem &smem, int branch, float y) {
    const int r = threadIdx.x / MN_HYPER_RANKS, a = threadIdx.x % MN_HYPER_RANKS;
    const bool second = branch == 2;
    float by = 0.0f, h = 0.0f;
    if (r < f.n) {
        by = mn_hyper_rank_gate<mn_bf16>(k, f, branch, r, a) * y;
        float *saved_row = mn_hyper_saved_row(k, f.which, f.head, f.first + r);
        mn_hyper_saved_ranks(k, saved_row, branch, MN_HYPER_YC)[a] = by;
        h = mn_hyper_saved_ranks(k, saved_row, branch, MN_HYPER_H)[a];
        mn_bf16 *dc = mn_row<mn_bf16>(second ? k.p.grad.c2 : k.p.grad.c1, f.tile.span.b, f.token(r),
                                      second ? f.head : f.head + branch * k.p.call.H);
        if (dc && a < (second ? k.p.call.W : k.p.call.R)) mn_put(dc + a, h * y);
    }
    smem.ranks[branch][r][a] = by;
    return h * by;
}

/* softplus and its derivative. For small e the series: 1 + e would leave too little of it. */
__device__ inline float2 mn_piece_softplus(float x) {
    const float e = __expf(-fabsf(x)), u = 1.0f + e;
    const float log1p = e < 0.03125f ? e * fmaf(e, fmaf(e, 0.33333333f, -0.5f), 1.0f) : __logf(u);
    return make_float2(mn_fmax(x, 0.0f) + log1p, __fdividef(x >= 0.0f ? 1.0f : e, u));
}

/* h c of first mixes. */
template <int branches>
__device__ inline void mn_piece_first_ranks(const mn_hyper_params &k, const mn_hyper_rows4 &f,
                                            mn_piece_smem &smem, const float *const (&z)[branches],
                                            int n_pieces) {
    const mn_piece_mix first(k, f, 0), second(k, f, branches - 1);
    mn_piece_ranks h[branches] = {};
    mn_piece next[branches];
    const auto fetch = [&](int piece) {
        const mn_piece_place place(k, f, piece);
#pragma unroll
        for (int b = 0; b < branches; b++) next[b].load(z[b], place);
    };
    int piece = threadIdx.x / 32;
    if (piece < n_pieces) fetch(piece);
#pragma unroll 1
    for (; piece < n_pieces; piece += PIECE_WARPS) {
        const uint4 U[2] = { first.operand(PIECE_DOWN_U, piece),
                             branches == 2 ? second.operand(PIECE_DOWN_U, piece)
                                           : make_uint4(0, 0, 0, 0) };
        mn_piece x[branches];
#pragma unroll
        for (int b = 0; b < branches; b++) x[b] = next[b];
        if (piece + PIECE_WARPS < n_pieces) fetch(piece + PIECE_WARPS);
#pragma unroll
        for (int b = 0; b < branches; b++) h[b].down(mn_piece_left(x[b]), U[b]);
    }
#pragma unroll
    for (int b = 0; b < branches; b++) smem.put(b, h[b]);
    __syncthreads();
#pragma unroll
    for (int b = 0; b < branches; b++) mn_piece_ranks_in(k, f, smem, b, smem.sum(b));
    __syncthreads();
}

/* base from z, its ranks, and the scale of the output. */
template <int branches>
__device__ inline void mn_piece_base(const mn_hyper_params &k, const mn_hyper_rows4 &f,
                                     mn_piece_smem &smem, const float *const (&z)[branches],
                                     float *base, int n_pieces) {
    const mn_piece_mix first(k, f, 0), second(k, f, branches - 1), last(k, f, 2);
    const mn_piece_left hc1(smem.ranks[0]), hc2(smem.ranks[branches - 1]);
    mn_piece_ranks h = {};
    float square[2] = {};
#pragma unroll 1
    for (int piece = threadIdx.x / 32; piece < n_pieces; piece += PIECE_WARPS) {
        const mn_piece_place place(k, f, piece);
        mn_piece x, y;
        x.load(z[0], place);
        if (branches == 2) y.load(z[branches - 1], place);
        x.scale(first.by(piece));
        hc1.up(x, first.operand(PIECE_UP_VT, piece));
        x.mask(place);
        if (branches == 2) {
            y.scale(second.by(piece));
            hc2.up(y, second.operand(PIECE_UP_VT, piece));
        }
#pragma unroll
        for (int e = 0; e < 8; e++) {
            const int i = e / 4, j = e % 4;
            square[i] = fmaf(x.at[i][j], x.at[i][j], square[i]);
            x.at[i][j] = mn_fmax(x.at[i][j], 0.0f);
            if (branches == 2) x.at[i][j] *= mn_piece_softplus(y.at[i][j]).x;
        }
        x.mask(place);
        x.store(base, place);
        if (last.there) h.down(mn_piece_left(x), last.operand(PIECE_DOWN_U, piece));
    }
    smem.put(0, h), smem.put_rows(square);
    __syncthreads();
    if (last.there) mn_piece_ranks_in(k, f, smem, 2, smem.sum(0));
    if (threadIdx.x < f.n) {
        float *saved_row = mn_hyper_saved_row(k, f.which, f.head, f.first + threadIdx.x);
        const float norm = sqrtf(smem.sum_of_row(threadIdx.x));
        saved_row[MN_HYPER_NORM] = norm;
        saved_row[MN_HYPER_SCALE] = k.p.norm == 2 ? 1.0f : 1.0f / mn_fmax(norm, (float)k.p.eps);
    }
    __syncthreads();
}

template <int branches>
__global__ static void __launch_bounds__(PIECE_THREADS, 2)
hyper_rows_fwd_mma_kernel(const __grid_constant__ mn_hyper_params k) {
    __shared__ mn_piece_smem smem;
    mn_hyper_rows4 f;
    if (!mn_hyper_rows4_of(&f, k, PIECE_ROWS)) return;
    const int n_pieces = (f.max_tiles + PIECE_LAGS - 1) / PIECE_LAGS;
    const float *z[branches];
#pragma unroll
    for (int b = 0; b < branches; b++) z[b] = mn_hyper_lag0(k, k.z[b], f);
    float *base = mn_hyper_lag0(k, k.base, f), *w = mn_hyper_lag0(k, k.w, f);
    for (int i = threadIdx.x; i < 3 * PIECE_ROWS * PIECE_PITCH; i += PIECE_THREADS) {
        smem.ranks[0][0][i] = 0.0f;
    }
    __syncthreads();
    if (k.has_params[0]) mn_piece_first_ranks<branches>(k, f, smem, z, n_pieces);
    mn_piece_base<branches>(k, f, smem, z, base, n_pieces);
    const mn_piece_mix last(k, f, 2);
    const mn_piece_left hc(smem.ranks[2]);
    mn_piece next;
    int piece = threadIdx.x / 32;
    if (piece < n_pieces) next.load(base, mn_piece_place(k, f, piece));
#pragma unroll 1
    for (; piece < n_pieces; piece += PIECE_WARPS) {
        const uint4 Vt = last.operand(PIECE_UP_VT, piece);
        const float4 by = last.by(piece);
        mn_piece x = next;
        if (piece + PIECE_WARPS < n_pieces) {
            next.load(base, mn_piece_place(k, f, piece + PIECE_WARPS));
        }
        x.scale(by);
        hc.up(x, Vt);
        x.store(w, mn_piece_place(k, f, piece));
    }
    if (k.w != k.base) mn_hyper_zero_tail(k, f, k.w);
}

/* y c of the second mix, and what of x1 is taken from its cotangent (mn_hyper_norm_grad). */
__device__ inline void mn_piece_last_ranks(const mn_hyper_params &k, const mn_hyper_rows4 &f,
                                           mn_piece_smem &smem, const float *w, const float *base,
                                           int n_pieces) {
    const mn_piece_mix last(k, f, 2);
    mn_piece_ranks y = {};
    mn_piece next[2];
    float along[2] = {};
    const auto fetch = [&](int piece) {
        const mn_piece_place place(k, f, piece);
        next[0].load(w, place), next[1].load(base, place);
    };
    int piece = threadIdx.x / 32;
    if (piece < n_pieces) fetch(piece);
#pragma unroll 1
    for (; piece < n_pieces; piece += PIECE_WARPS) {
        const uint4 Vt = last.operand(PIECE_DOWN_VT, piece);
        const float4 by = last.by(piece);
        mn_piece g = next[0];
        const mn_piece x = next[1];
        if (piece + PIECE_WARPS < n_pieces) fetch(piece + PIECE_WARPS);
        if (last.there) y.down(mn_piece_left(g), Vt);
        g.scale(by);
#pragma unroll
        for (int e = 0; e < 8; e++) {
            along[e / 4] = fmaf(g.at[e / 4][e % 4], x.at[e / 4][e % 4], along[e / 4]);
        }
    }
    smem.put(0, y), smem.put_rows(along);
    __syncthreads();
    float sum = last.there ? mn_piece_ranks_back(k, f, smem, 2, smem.sum(0)) : 0.0f;
#pragma unroll
    for (int half = MN_HYPER_RANKS / 2; half > 0; half /= 2) {
        sum += __shfl_xor_sync(0xffffffffu, sum, half);
    }
    const int r = threadIdx.x / MN_HYPER_RANKS;
    if (threadIdx.x % MN_HYPER_RANKS == 0 && r < f.n) {
        const float *saved_row = mn_hyper_saved_row(k, f.which, f.head, f.first + r);
        const float by = saved_row[MN_HYPER_SCALE];
        const bool normed = k.p.norm != 2 && saved_row[MN_HYPER_NORM] > (float)k.p.eps;
        smem.pull[r] = normed ? (sum + smem.sum_of_row(r)) * by * by : 0.0f;
    }
    __syncthreads();
}

template <int branches>
__global__ static void __launch_bounds__(PIECE_THREADS, 2)
hyper_rows_bwd_mma_kernel(const __grid_constant__ mn_hyper_params k) {
    __shared__ mn_piece_smem smem;
    mn_hyper_rows4 f;
    if (!mn_hyper_rows4_of(&f, k, PIECE_ROWS)) return;
    const int n_pieces = (f.max_tiles + PIECE_LAGS - 1) / PIECE_LAGS;
    const float *w = mn_hyper_lag0(k, k.w, f);
    const int r = threadIdx.x / MN_HYPER_RANKS, a = threadIdx.x % MN_HYPER_RANKS;
    if (threadIdx.x < PIECE_ROWS) smem.pull[threadIdx.x] = 0.0f;
    smem.ranks[2][r][a] = 0.0f;
#pragma unroll
    for (int b = 0; b < branches; b++) {
        float *saved_row = mn_hyper_saved_row(k, f.which, f.head, f.first + (r < f.n ? r : 0));
        const float hc = mn_hyper_saved_ranks(k, saved_row, b, MN_HYPER_HC)[a];
        smem.ranks[b][r][a] = r < f.n && k.has_params[0] ? hc : 0.0f;
    }
    __syncthreads();
    mn_piece_last_ranks(k, f, smem, w, mn_hyper_lag0(k, k.base, f), n_pieces);
    const mn_piece_mix first(k, f, 0), second(k, f, branches - 1), last(k, f, 2);
    const mn_piece_left hc1(smem.ranks[0]), hc2(smem.ranks[branches - 1]), yc(smem.ranks[2]);
    const float *z1 = mn_hyper_lag0(k, k.z[0], f);
    const float *z2 = mn_hyper_lag0(k, k.z[branches - 1], f);
    float *g1 = mn_hyper_lag0(k, k.g[0], f), *g2 = mn_hyper_lag0(k, k.g[branches - 1], f);
    const float pull[2] = { smem.pull[threadIdx.x % 32 / 4], smem.pull[threadIdx.x % 32 / 4 + 8] };
    mn_piece_ranks y[2] = {};
#pragma unroll 1
    for (int piece = threadIdx.x / 32; piece < n_pieces; piece += PIECE_WARPS) {
        const mn_piece_place place(k, f, piece);
        mn_piece g, x, gate, to_gate;
        g.load(w, place), x.load(z1, place);
        if (branches == 2) gate.load(z2, place);
        g.scale(last.by(piece));
        yc.up(g, last.operand(PIECE_UP_U, piece));
        x.scale(first.by(piece));
        hc1.up(x, first.operand(PIECE_UP_VT, piece));
        if (branches == 2) {
            gate.scale(second.by(piece));
            hc2.up(gate, second.operand(PIECE_UP_VT, piece));
        }
#pragma unroll
        for (int e = 0; e < 8; e++) {
            const int i = e / 4, j = e % 4;
            const float open = x.at[i][j] > 0.0f ? g.at[i][j] : 0.0f;
            float to_first = open;
            if (branches == 2) {
                const float2 s = mn_piece_softplus(gate.at[i][j]);
                to_first = open * s.x;
                to_gate.at[i][j] = open * x.at[i][j] * s.y;
            }
            g.at[i][j] = fmaf(-pull[i], x.at[i][j], to_first);
        }
        g.mask(place);
        g.store(g1, place);
        if (first.there) y[0].down(mn_piece_left(g), first.operand(PIECE_DOWN_VT, piece));
        if (branches == 1) continue;
        to_gate.mask(place);
        to_gate.store(g2, place);
        if (first.there) y[1].down(mn_piece_left(to_gate), second.operand(PIECE_DOWN_VT, piece));
    }
    mn_hyper_zero_tail(k, f, k.g[0]);
    if (branches == 2) mn_hyper_zero_tail(k, f, k.g[1]);
    if (!first.there) return;
#pragma unroll
    for (int b = 0; b < branches; b++) smem.put(b, y[b]);
    __syncthreads();
#pragma unroll
    for (int b = 0; b < branches; b++) mn_piece_ranks_back(k, f, smem, b, smem.sum(b));
}

/* ---- launches -------------------------------------------------------------------------------- */

void mn_hyper_make_pieces(const mn_hyper_params &k, cudaStream_t stream) {
    const mn_call &c = k.p.call;
    if (k.n_pieces == 0) return;
    const dim3 blocks((unsigned)mn_ceil_div(k.n_pieces * 32, 128), (unsigned)(c.Q + c.H),
                      PIECE_KINDS);
    hyper_pieces_kernel<<<blocks, 128, 0, stream>>>(k);
}

void mn_hyper_rows_by_mma(const mn_hyper_params &k, bool backward, cudaStream_t stream) {
    const dim3 blocks((unsigned)mn_ceil_div(k.s.rows, (int64_t)PIECE_ROWS), (unsigned)k.p.call.H,
                      (unsigned)k.s.n_tiles);
    const auto forward = k.branches == 2 ? hyper_rows_fwd_mma_kernel<2>
                                         : hyper_rows_fwd_mma_kernel<1>;
    const auto back = k.branches == 2 ? hyper_rows_bwd_mma_kernel<2> : hyper_rows_bwd_mma_kernel<1>;
    (backward ? back : forward)<<<blocks, PIECE_THREADS, 0, stream>>>(k);
}

}    // namespace mneme::hyper
