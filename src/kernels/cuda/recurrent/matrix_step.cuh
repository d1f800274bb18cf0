/* matrix_step.cuh - one token of a matrix state, in place.
 *
 *   ADD      S = diag(exp g) S + w v'                            o = scale S'q
 *   DELTA    S' = diag(exp g) S;  r = v - S'^T e;  S = S' + w r'; o = scale S'^T q + scale (q.w) r
 *   DPLR     u = S'a;  S = diag(exp g) S + b u' + w v'           o = scale S'q
 *
 * All that needs a sum over rows of the state is summed at once, over the state before it is
 * written: S'^T q, S'^T e or S^T a, and products of q with what is written. A block has 32
 * columns of one memory, a thread four neighbours of them in up to eight rows, which it loads
 * before it needs any; while it waits for the launch in front it prefetches them into L2. Rows of
 * the token, strengths and decays included, go through shared memory once.
 *
 * A token may be several rows that are written one after the other (delta_product): the first one's
 * decay and the last one's query are the token's.
 *
 * Bits. A sum over rows has one order, whatever the sizes of a block: rows i, i + 64, i + 128 .. in
 * turn, eight neighbours as a tree (those four apart first, then two, then one), and these groups
 * in turn. */
#ifndef MN_KERNELS_CUDA_RECURRENT_MATRIX_STEP_CUH
#define MN_KERNELS_CUDA_RECURRENT_MATRIX_STEP_CUH

#include "kernels/cuda/prim/common.cuh"
#include "kernels/cuda/prim/pdl.cuh"
#include "kernels/cuda/prim/sync.cuh"

namespace mneme::recurrent {

enum { MN_STEP_ADD, MN_STEP_DELTA, MN_STEP_DPLR };
enum { MN_STEP_GROUPS = 8, MN_STEP_PERIOD = 64, MN_STEP_QUADS = 8, MN_STEP_MOST_ROWS = 4 };
enum { MN_STEP_COLUMNS = 4 * MN_STEP_QUADS, MN_STEP_MOST_K = 8 * MN_STEP_PERIOD };

/* Where the rows of sequence n and head h are. */
struct mn_step_view {
    const void *data;
    int n, h;

    template <typename X>
    __device__ const X *row(int64_t sequence, int64_t head) const {
        return data ? (const X *)data + sequence * n + head * h : nullptr;
    }
};

/* Arguments of a step in as few lines of constant memory as they take: each first look at one waits
 * for L2. */
struct mn_step_params {
    mn_step_view state0, state, q, e, w, v, beta, g, b, o;    // e of DPLR is its a
    int K, V, H, share, n_rows;    // share: value heads of a key head
    int by_channel;                // decays
    float scale;
};

/* Rows of the view can be read four numbers at a time. */
template <typename T, typename View>
static bool mn_step_vec_aligned(const View &view) {
    bool even = (uintptr_t)view.data % (4 * sizeof(T)) == 0;
    for (int i = 0; i < 3; i++) even = even && view.stride[i] % 4 == 0;
    return even;
}

/* false where strides do not fit. */
template <typename View>
static bool mn_step_view_of(mn_step_view *to, const View &view) {
    *to = { view.data, (int)view.stride[0], (int)view.stride[2] };
    return !view.data || (to->n == view.stride[0] && to->h == view.stride[2]);
}

/* Channel i of a row of the token: query, what reads the state, what is written, decay; zeros
 * beyond K. */
template <typename T>
__device__ inline float4 mn_step_row(const mn_step_params &p, int64_t n, int64_t h, int row,
                                     int i) {
    const bool first = row == 0, last = row + 1 == p.n_rows;
    const int64_t head = (int64_t)row * p.H + h / p.share;
    const T *e = p.e.row<T>(n, head), *w = p.w.data ? p.w.row<T>(n, head) : e;
    const T *beta = p.beta.row<T>(n, (int64_t)row * p.H + h), *g = p.g.row<T>(n, h);
    if (i >= p.K) return make_float4(0.0f, 0.0f, 0.0f, 1.0f);
    const float strength = beta ? mn_float(*beta) : 1.0f;
    const float query = last ? mn_float(p.q.row<T>(n, h / p.share)[i]) : 0.0f;
    const float decay = first && g ? expf(mn_float(g[p.by_channel ? i : 0])) : 1.0f;
    return make_float4(query, mn_get(e, i), strength * mn_float(w[i]), decay);
}

/* Sums of a thread's rows, those SUB apart among eight neighbours, and over the lanes that have the
 * others: N = 8 / SUB of them here. */
template <int N>
__device__ inline float mn_step_tree(const float (&x)[N]) {
    float sum = N == 4 ? (x[0] + x[N / 2]) + (x[1] + x[N - 1]) : x[0] + x[N - 1];
#pragma unroll
    for (int lanes = 4 * MN_STEP_QUADS / N; lanes >= MN_STEP_QUADS; lanes >>= 1) {
        sum += __shfl_xor_sync(0xffffffffu, sum, lanes);
    }
    return sum;
}

/* Sums over all rows, in all threads of the block: of columns, and of the rows by themselves. */
template <int N, int SUMS, int DOTS>
__device__ inline void mn_step_gather(float (&sum)[SUMS], float (&all)[DOTS],
                                      const float (&columns)[SUMS][N], const float (&rows)[DOTS][N],
                                      float (*parts)[MN_STEP_QUADS][SUMS], float (*dots)[DOTS]) {
    const int quad = threadIdx.x % MN_STEP_QUADS, lane = threadIdx.x / MN_STEP_QUADS % (8 / N);
    const int group = threadIdx.x * N / (8 * MN_STEP_QUADS);
#pragma unroll
    for (int i = 0; i < SUMS; i++) sum[i] = mn_step_tree<N>(columns[i]);
    if (lane == 0) mn_store<SUMS>(parts[group][quad], 0, sum);
#pragma unroll
    for (int i = 0; i < DOTS; i++) {
        const float part = mn_step_tree<N>(rows[i]);
        if (lane == 0 && quad == 0) dots[group][i] = part;
        all[i] = 0.0f;
    }
    __syncthreads();
#pragma unroll
    for (int i = 0; i < SUMS; i++) sum[i] = 0.0f;
#pragma unroll
    for (int k = 0; k < MN_STEP_GROUPS; k++) {
        float part[SUMS];
        mn_load<SUMS>(part, parts[k][quad], 0);
#pragma unroll
        for (int i = 0; i < SUMS; i++) sum[i] += part[i];
#pragma unroll
        for (int i = 0; i < DOTS; i++) all[i] += dots[k][i];
    }
}

/* R N rows of a thread: K <= 64 R. N is 4 or 2 of eight neighbours. */
template <typename T, int R, int N, int RULE, int ROWS>
__global__ void __launch_bounds__(512 / N)
matrix_step_recurrent_kernel(const __grid_constant__ mn_step_params p) {
    constexpr int SUB = 8 / N, THREADS = MN_STEP_GROUPS * MN_STEP_QUADS * SUB;
    constexpr int SUMS = RULE == MN_STEP_ADD ? 4 : 8, DOTS = RULE == MN_STEP_DPLR ? 2 : 1;
    constexpr int TURNS = ROWS > 1 ? 2 : 1, HEIGHT = MN_STEP_PERIOD * R;
    __shared__ float4 rows[ROWS][HEIGHT];
    __shared__ float enter[RULE == MN_STEP_DPLR ? HEIGHT : 1];
    __shared__ __align__(16) float parts[TURNS][MN_STEP_GROUPS][MN_STEP_QUADS][SUMS];
    __shared__ float dots[TURNS][MN_STEP_GROUPS][DOTS];
    const int quad = threadIdx.x % MN_STEP_QUADS, lane = threadIdx.x / MN_STEP_QUADS % SUB;
    const int group = threadIdx.x / (MN_STEP_QUADS * SUB);
    const int j = blockIdx.x * MN_STEP_COLUMNS + 4 * quad, first = 8 * group + lane;
    const int64_t h = blockIdx.y, n = blockIdx.z;
    const float *from = p.state0.row<float>(n, h);
    float *to = (float *)p.state.row<float>(n, h);
    const auto row_at = [&](int r, int m) { return MN_STEP_PERIOD * r + first + SUB * m; };
    mn_pdl_launch_dependents();
#pragma unroll
    for (int x = 0; x < R * N; x++) {
        const int i = row_at(x / N, x % N);
        if (from && i < p.K && j < p.V) mn_prefetch_l2(from + (int64_t)i * p.V + j);
    }
    mn_pdl_wait();    // the launch in front may be this one's last token
    float S[R][N][4], value[ROWS][4];
#pragma unroll
    for (int x = 0; x < R * N; x++) {
        const int i = row_at(x / N, x % N);
        mn_load<4>(S[x / N][x % N], i < p.K && j < p.V ? from : nullptr, (int64_t)i * p.V + j);
    }
#pragma unroll
    for (int s = 0; s < ROWS; s++) {
        const bool there = s < p.n_rows && j < p.V;
        mn_load<4>(value[s], there ? p.v.row<T>(n, (int64_t)s * p.H + h) : nullptr, j);
        for (int i = threadIdx.x; s < p.n_rows && i < HEIGHT; i += THREADS) {
            rows[s][i] = mn_step_row<T>(p, n, h, s, i);
            if (RULE == MN_STEP_DPLR) enter[i] = i < p.K ? mn_float(p.b.row<T>(n, h)[i]) : 0.0f;
        }
    }
    __syncthreads();
#pragma unroll
    for (int s = 0; s < ROWS; s++) {
        if (s >= p.n_rows) break;
        float sums[SUMS][N] = {}, dot[DOTS][N] = {};
#pragma unroll
        for (int m = 0; m < N; m++) {
#pragma unroll
            for (int r = 0; r < R; r++) {
                const float4 row = rows[s][row_at(r, m)];
                float (&cells)[4] = S[r][m];
                dot[0][m] = fmaf(row.x, row.z, dot[0][m]);
                if (RULE == MN_STEP_DPLR) {
                    dot[DOTS - 1][m] = fmaf(row.x, enter[row_at(r, m)], dot[DOTS - 1][m]);
                }
#pragma unroll
                for (int c = 0; c < 4; c++) {
                    float &read = sums[SUMS - 4 + c][m];
                    if (RULE == MN_STEP_DPLR) read = fmaf(row.y, cells[c], read);
                    cells[c] *= row.w;
                    if (RULE == MN_STEP_DELTA) read = fmaf(row.y, cells[c], read);
                    sums[c][m] = fmaf(row.x, cells[c], sums[c][m]);
                }
            }
        }
        float sum[SUMS], all[DOTS];
        mn_step_gather<N>(sum, all, sums, dot, parts[s % TURNS], dots[s % TURNS]);
        const bool last = s + 1 == p.n_rows;
        float residual[4];
#pragma unroll
        for (int c = 0; c < 4; c++) {
            residual[c] = value[s][c] - (RULE == MN_STEP_DELTA ? sum[SUMS - 4 + c] : 0.0f);
        }
#pragma unroll
        for (int x = 0; x < R * N; x++) {
            const int i = row_at(x / N, x % N);
            const float write = rows[s][i].z;
            float (&cells)[4] = S[x / N][x % N];
#pragma unroll
            for (int c = 0; c < 4; c++) {
                cells[c] = fmaf(write, residual[c], cells[c]);
                if (RULE == MN_STEP_DPLR) {
                    cells[c] = fmaf(enter[i], sum[SUMS - 4 + c], cells[c]);
                }
            }
            if (last && to && i < p.K && j < p.V) mn_store<4>(to, (int64_t)i * p.V + j, cells);
        }
        T *o = (T *)p.o.row<T>(n, h);
        if (!last || first > 0 || j >= p.V || !o) continue;
        float out[4];
#pragma unroll
        for (int c = 0; c < 4; c++) {
            out[c] = fmaf(all[0], residual[c], sum[c]);
            if (RULE == MN_STEP_DPLR) out[c] = fmaf(all[DOTS - 1], sum[SUMS - 4 + c], out[c]);
            out[c] *= p.scale;
        }
        mn_store<4>(o, j, out);
    }
}

/* For memories of B sequences and H heads; the caller has seen to it that it is supported. */
template <typename T, int RULE, int ROWS>
static int mn_step_launch(const mn_step_params &p, int64_t B, cudaStream_t stream) {
    const dim3 blocks((unsigned)mn_ceil_div(p.V, MN_STEP_COLUMNS), (unsigned)p.H, (unsigned)B);
    if (p.V == 0 || p.H == 0 || B == 0) return cudaSuccess;
    const auto kernel = p.K <= MN_STEP_PERIOD ? matrix_step_recurrent_kernel<T, 1, 4, RULE, ROWS>
        : p.K <= 2 * MN_STEP_PERIOD ? matrix_step_recurrent_kernel<T, 2, 4, RULE, ROWS>
        : p.K <= 4 * MN_STEP_PERIOD ? matrix_step_recurrent_kernel<T, 4, 2, RULE, ROWS>
                                    : matrix_step_recurrent_kernel<T, 8, 2, RULE, ROWS>;
    const int threads = p.K <= 2 * MN_STEP_PERIOD ? 128 : 256;
    return mn_launch_pdl(kernel, blocks, threads, 0, stream, p);
}

/* Sizes that the kernel takes, of rows of whole vectors. */
static inline bool mn_step_fits(const mn_call &call) {
    return call.V % 4 == 0 && call.K <= MN_STEP_MOST_K && call.B < 65536 && call.H < 65536 &&
           call.V < INT32_MAX / 2;
}

}    // namespace mneme::recurrent

#endif
