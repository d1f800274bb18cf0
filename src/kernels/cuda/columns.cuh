/* columns.cuh - matrix memories whose value columns go their own way: the recurrence of mlstm and
 * of both forms of Longhorn. Forward is in columns_forward.cuh, backward here.
 *
 *   SUM     S_ij <- f S_ij + w k_i v_j                         w, f numbers of a token
 *   CELL    S_ij <- (u_j + w_j x_i) S_ij + w_j k_i v_j       x_i = |k|^2 - k_i^2, u = 1 - w |k|^2
 *   COLUMN  S_ij <- S_ij + w_j k_i (v_j - k'S_:j)              o_j = scale S_:j'q
 *
 * Backward, D the adjoint of S_t, B that of the memory before the write, y_j the gradient of w_j:
 *
 *   D += scale q do'          dq = scale S do        SUM     y = k'D v, dv = w D'k, dk = w D v,
 *   df = f D.S, D <- f D      CELL    y_j = sum D k (v - k S), dk = sum w D (v - 2 k S), D <- c D
 *   COLUMN  y_j = (D'k)_j (v_j - k'S), dk = D (w (v - k'S)) - S (w D'k), D <- D - k (w D'k)'
 *
 * A warp has four columns; its lane l holds rows l, l + 32, ... of them in registers. It
 * keeps the state of every 64 tokens, and inside such a span that of every token, in memory; a
 * thread reads back only what it wrote. dq and dk leave parts, one for each tile of columns. */
#ifndef MN_KERNELS_CUDA_COLUMNS_CUH
#define MN_KERNELS_CUDA_COLUMNS_CUH

#include "kernels/cuda/common.cuh"

enum { MN_COLUMNS_SPAN = 64, MN_COLUMNS_OF_WARP = 4, MN_COLUMNS_WARPS = 8 };
enum { MN_COLUMNS_TILE = MN_COLUMNS_OF_WARP * MN_COLUMNS_WARPS, MN_COLUMNS_WIDEST = 256 };

enum mn_columns_kind { MN_COLUMNS_SUM, MN_COLUMNS_CELL, MN_COLUMNS_COLUMN };

/* Tensors of tokens are views; what is made in work space has rows of all heads of all tokens. */
struct mn_columns {
    mn_call call;
    float scale;
    int64_t columns;             // V, or V + 1 where a last column of ones is added
    mn_in q, k, v;
    mn_in beta;                  // forward, for CELL and COLUMN: makes w and u there
    const float *w, *u, *f;      // (rows, V) for CELL and COLUMN, backward; (rows) for SUM
    const float *state0, *ones0; // (N,H,K,V) and the added column's (N,H,K), or NULL
    float *state, *ones;
    bool reads;                  // whether o or out is wanted
    float *o;                    // (rows, columns): S'q scale
    mn_out out;                  // the same as a tensor
    const float *cot;            // (rows, columns)
    const float *cot_state, *cot_ones;
    float *y;                    // (rows, columns): gradient of w
    float *parts;                // (tiles, rows, 2, K): dq, dk
    float *fparts;               // (tiles, rows): df
    mn_out dv;
    float *dstate0, *dones0;
    float *spans, *tokens;       // states
};

struct mn_columns_place {
    int64_t n, h, tile, block;
    mn_span span;
};

__device__ inline mn_columns_place mn_columns_here(const mn_columns &p, int64_t tiles) {
    mn_columns_place at;
    at.block = blockIdx.x, at.tile = at.block % tiles;
    at.h = at.block / tiles % p.call.H, at.n = at.block / tiles / p.call.H;
    at.span = mn_span_at(p.call, at.n);
    return at;
}

__device__ inline int64_t mn_columns_row(const mn_columns &p, const mn_columns_place &at,
                                         int64_t t) {
    return (at.span.b * p.call.T + at.span.t0 + t) * p.call.H + at.h;
}

/* A token as a thread needs it: its rows' k, q and x, its columns' v, w, u. */
template <int R>
struct mn_columns_token {
    float k[R], q[R], x[R], f;
    float v[MN_COLUMNS_OF_WARP], w[MN_COLUMNS_OF_WARP], u[MN_COLUMNS_OF_WARP];
    float cot[MN_COLUMNS_OF_WARP];
    int64_t row;
};

template <typename T, int R, mn_columns_kind KIND>
__device__ inline mn_columns_token<R> mn_columns_read(const mn_columns &p,
                                                      const mn_columns_place &at, int64_t t,
                                                      int64_t j0) {
    mn_columns_token<R> in;
    const int64_t b = at.span.b, when = at.span.t0 + t, V = p.call.V;
    const T *k = mn_row<T>(p.k, b, when, at.h), *q = mn_row<T>(p.q, b, when, at.h);
    const T *v = mn_row<T>(p.v, b, when, at.h);
    double norm = 0.0;
    in.row = mn_columns_row(p, at, t);
#pragma unroll
    for (int r = 0; r < R; r++) {
        const int64_t i = threadIdx.x % 32 + 32 * r;
        in.k[r] = i < p.call.K ? mn_float(k[i]) : 0.0f;
        in.q[r] = i < p.call.K ? mn_float(q[i]) : 0.0f;
        norm += (double)in.k[r] * (double)in.k[r];
    }
    if (KIND == MN_COLUMNS_CELL) {
        for (int lanes = 16; lanes > 0; lanes >>= 1) {
            norm += __shfl_xor_sync(0xffffffffu, norm, lanes);
        }
#pragma unroll
        for (int r = 0; r < R; r++) {
            in.x[r] = (float)(norm - (double)in.k[r] * (double)in.k[r]);
        }
    }
    in.f = KIND == MN_COLUMNS_SUM ? p.f[in.row] : 1.0f;
#pragma unroll
    for (int c = 0; c < MN_COLUMNS_OF_WARP; c++) {
        const int64_t j = j0 + c;
        const bool inside = j < p.columns;
        in.v[c] = j < V ? mn_float(v[j]) : inside ? 1.0f : 0.0f;
        in.u[c] = 1.0f;
        if (KIND == MN_COLUMNS_SUM) {
            in.w[c] = p.w[in.row];
        } else {
            in.w[c] = inside ? p.w[in.row * V + j] : 0.0f;
            if (KIND == MN_COLUMNS_CELL && inside) in.u[c] = p.u[in.row * V + j];
        }
        in.cot[c] = p.cot && inside ? p.cot[in.row * p.columns + j] : 0.0f;
    }
    return in;
}

/* The part of a state that a thread holds. */
template <int R>
struct mn_columns_cells {
    float at[R][MN_COLUMNS_OF_WARP];

    template <typename F>
    __device__ void each(const mn_columns &p, int64_t j0, F use) {
#pragma unroll
        for (int r = 0; r < R; r++) {
            const int64_t i = threadIdx.x % 32 + 32 * r;
#pragma unroll
            for (int c = 0; c < MN_COLUMNS_OF_WARP; c++) {
                use(at[r][c], i, j0 + c, i < p.call.K && j0 + c < p.columns);
            }
        }
    }

    __device__ void load(const mn_columns &p, const mn_columns_place &at_, int64_t j0,
                         const float *state, const float *ones) {
        const int64_t head = at_.n * p.call.H + at_.h, K = p.call.K, V = p.call.V;
        each(p, j0, [&](float &x, int64_t i, int64_t j, bool inside) {
            x = 0.0f;
            if (inside && j < V && state) x = state[(head * K + i) * V + j];
            if (inside && j == V && ones) x = ones[head * K + i];
        });
    }

    __device__ void store(const mn_columns &p, const mn_columns_place &at_, int64_t j0,
                          float *state, float *ones) {
        const int64_t head = at_.n * p.call.H + at_.h, K = p.call.K, V = p.call.V;
        each(p, j0, [&](float &x, int64_t i, int64_t j, bool inside) {
            if (inside && j < V && state) state[(head * K + i) * V + j] = x;
            if (inside && j == V && ones) ones[head * K + i] = x;
        });
    }

    __device__ void keep(float *room) const {
#pragma unroll
        for (int r = 0; r < R; r++) mn_store<4>(room, (r * 256 + (int)threadIdx.x) * 4, at[r]);
    }

    __device__ void recall(const float *room) {
#pragma unroll
        for (int r = 0; r < R; r++) mn_load<4>(at[r], room, (r * 256 + (int)threadIdx.x) * 4);
    }

    /* sums over rows of x_i S_ij */
    __device__ void dot(float (&sums)[MN_COLUMNS_OF_WARP], const float (&x)[R]) const {
#pragma unroll
        for (int c = 0; c < MN_COLUMNS_OF_WARP; c++) {
            sums[c] = 0.0f;
#pragma unroll
            for (int r = 0; r < R; r++) sums[c] = fmaf(x[r], at[r][c], sums[c]);
            sums[c] = mn_warp_sum(sums[c]);
        }
    }

    /* One token; `residual` is what COLUMN writes. */
    template <mn_columns_kind KIND>
    __device__ void advance(float (&residual)[MN_COLUMNS_OF_WARP], const mn_columns_token<R> &in) {
        if (KIND == MN_COLUMNS_COLUMN) dot(residual, in.k);
#pragma unroll
        for (int c = 0; c < MN_COLUMNS_OF_WARP; c++) {
            residual[c] = KIND == MN_COLUMNS_COLUMN ? in.v[c] - residual[c] : in.v[c];
            const float write = in.w[c] * residual[c];
#pragma unroll
            for (int r = 0; r < R; r++) {
                float x = at[r][c];
                if (KIND == MN_COLUMNS_SUM) x *= in.f;
                if (KIND == MN_COLUMNS_CELL) x *= fmaf(in.w[c], in.x[r], in.u[c]);
                at[r][c] = fmaf(in.k[r], write, x);
            }
        }
    }
};

/* Gradients of one token, from D behind it and S, `before` around it; this warp's sums over its
 * columns go to the room. */
template <typename T, int R, mn_columns_kind KIND>
__device__ void mn_columns_token_back(mn_columns_cells<R> &D, const mn_columns_cells<R> &before,
                                      float (&sums)[2][32 * R], float &f_sum, const mn_columns &p,
                                      const mn_columns_place &at, int64_t t, int64_t j0) {
    constexpr int C = MN_COLUMNS_OF_WARP;
    const mn_columns_token<R> in = mn_columns_read<T, R, KIND>(p, at, t, j0);
    const int lane = threadIdx.x % 32;
    mn_columns_cells<R> S = before;
    float residual[C], Dk[C], y[C], to_f = 0.0f;
    S.template advance<KIND>(residual, in);
#pragma unroll
    for (int r = 0; r < R; r++) {
        float to_q = 0.0f;
#pragma unroll
        for (int c = 0; c < C; c++) {
            D.at[r][c] = fmaf(p.scale * in.q[r], in.cot[c], D.at[r][c]);
            to_q = fmaf(S.at[r][c], in.cot[c], to_q);
        }
        sums[0][lane + 32 * r] = p.scale * to_q;
    }
    D.dot(Dk, in.k);
#pragma unroll
    for (int c = 0; c < C; c++) {
        y[c] = Dk[c] * residual[c];
        if (KIND != MN_COLUMNS_CELL) continue;
        float sum = 0.0f;
#pragma unroll
        for (int r = 0; r < R; r++) {
            sum = fmaf(D.at[r][c] * in.k[r], fmaf(-in.k[r], before.at[r][c], in.v[c]), sum);
        }
        y[c] = mn_warp_sum(sum);
    }
#pragma unroll
    for (int r = 0; r < R; r++) {
        float to_k = 0.0f;
#pragma unroll
        for (int c = 0; c < C; c++) {
            const float old = before.at[r][c], write = in.w[c] * Dk[c];
            if (KIND == MN_COLUMNS_SUM) {
                to_k = fmaf(in.w[c] * in.v[c], D.at[r][c], to_k);
                D.at[r][c] *= in.f;
                to_f = fmaf(D.at[r][c], old, to_f);
            }
            if (KIND == MN_COLUMNS_CELL) {
                to_k = fmaf(in.w[c] * D.at[r][c], fmaf(-2.0f * in.k[r], old, in.v[c]), to_k);
                D.at[r][c] *= fmaf(in.w[c], in.x[r], in.u[c]);
            }
            if (KIND == MN_COLUMNS_COLUMN) {
                to_k = fmaf(in.w[c] * residual[c], D.at[r][c], to_k);
                to_k = fmaf(-write, old, to_k);
                D.at[r][c] = fmaf(-in.k[r], write, D.at[r][c]);
            }
        }
        sums[1][lane + 32 * r] = to_k;
    }
    T *dv = mn_row<T>(p.dv, at.span.b, at.span.t0 + t, at.h);
#pragma unroll
    for (int c = 0; c < C; c++) {
        if (lane != c || j0 + c >= p.columns) continue;
        p.y[in.row * p.columns + j0 + c] = y[c];
        if (dv && j0 + c < p.call.V) mn_put(dv + j0 + c, in.w[c] * Dk[c]);
    }
    f_sum = KIND == MN_COLUMNS_SUM ? mn_warp_sum(to_f) : 0.0f;
}

template <typename T, int R, mn_columns_kind KIND>
__global__ void __launch_bounds__(256)
mn_columns_backward_kernel(const __grid_constant__ mn_columns p, int64_t tiles) {
    __shared__ float sums[MN_COLUMNS_WARPS][2][32 * R], f_sums[MN_COLUMNS_WARPS];
    constexpr int64_t size = R * 256 * 4;
    const mn_columns_place at = mn_columns_here(p, tiles);
    const int warp = threadIdx.x / 32;
    const int64_t j0 = at.tile * MN_COLUMNS_TILE + warp * MN_COLUMNS_OF_WARP, K = p.call.K;
    const int64_t length = at.span.length, rows = p.call.B * p.call.T * p.call.H;
    const int64_t slot0 = p.call.cu_seqlens
                              ? at.span.t0 / MN_COLUMNS_SPAN + at.n
                              : at.n * ((p.call.T + MN_COLUMNS_SPAN - 1) / MN_COLUMNS_SPAN);
    float *tokens = p.tokens + at.block * MN_COLUMNS_SPAN * size;
    const auto span_at = [&](int64_t i) {
        return p.spans + (((slot0 + i) * p.call.H + at.h) * tiles + at.tile) * size;
    };
    mn_columns_cells<R> S, D;
    float residual[MN_COLUMNS_OF_WARP];
    S.load(p, at, j0, p.state0, p.ones0);
    for (int64_t t = 0; t < length; t++) {
        if (t % MN_COLUMNS_SPAN == 0) S.keep(span_at(t / MN_COLUMNS_SPAN));
        S.template advance<KIND>(residual, mn_columns_read<T, R, KIND>(p, at, t, j0));
    }
    D.load(p, at, j0, p.cot_state, p.cot_ones);
    for (int64_t i = (length + MN_COLUMNS_SPAN - 1) / MN_COLUMNS_SPAN - 1; i >= 0; i--) {
        const int64_t first = i * MN_COLUMNS_SPAN, last = min(first + MN_COLUMNS_SPAN, length);
        S.recall(span_at(i));
        for (int64_t t = first; t < last; t++) {
            S.keep(tokens + (t - first) * size);
            S.template advance<KIND>(residual, mn_columns_read<T, R, KIND>(p, at, t, j0));
        }
        for (int64_t t = last - 1; t >= first; t--) {
            float f_sum;
            S.recall(tokens + (t - first) * size);
            mn_columns_token_back<T, R, KIND>(D, S, sums[warp], f_sum, p, at, t, j0);
            if (threadIdx.x % 32 == 0) f_sums[warp] = f_sum;
            __syncthreads();
            const int64_t row = mn_columns_row(p, at, t);
            float *part = p.parts + (at.tile * rows + row) * 2 * K;
            for (int k = threadIdx.x; k < 2 * 32 * R; k += 256) {
                const int which = k / (32 * R), r = k % (32 * R);
                float sum = 0.0f;
#pragma unroll
                for (int w = 0; w < MN_COLUMNS_WARPS; w++) sum += sums[w][which][r];
                if (r < K) part[which * K + r] = sum;
            }
            if (KIND == MN_COLUMNS_SUM && threadIdx.x == 0) {
                float sum = 0.0f;
                for (int w = 0; w < MN_COLUMNS_WARPS; w++) sum += f_sums[w];
                p.fparts[at.tile * rows + row] = sum;
            }
            __syncthreads();
        }
    }
    D.store(p, at, j0, p.dstate0, p.dones0);
}

/* ---- launches -------------------------------------------------------------------------------- */

inline int64_t mn_columns_tiles(int64_t columns) {
    return mn_ceil_div(columns, MN_COLUMNS_TILE);
}

inline int mn_columns_lanes(int64_t K) {
    return K <= 32 ? 1 : K <= 64 ? 2 : K <= 128 ? 4 : 8;
}

/* Floats of the work space of a way back: spans, tokens, parts and fparts. */
struct mn_columns_extent {
    size_t spans, tokens, parts, fparts;
};

inline bool mn_columns_measure(mn_columns_extent *to, const mn_call &c, int64_t columns) {
    const size_t tiles = (size_t)mn_columns_tiles(columns), size = mn_columns_lanes(c.K) * 1024;
    size_t heads;
    bool ok = mn_mul_size(&heads, tiles, (size_t)c.H);
    ok = ok && mn_mul_size(&to->spans, heads, (size_t)mn_tile_slots(c, MN_COLUMNS_SPAN)) &&
         mn_mul_size(&to->spans, to->spans, size);
    ok = ok && mn_mul_size(&to->tokens, heads, (size_t)mn_n_spans(c)) &&
         mn_mul_size(&to->tokens, to->tokens, size * MN_COLUMNS_SPAN);
    ok = ok && mn_mul_size(&to->fparts, heads, (size_t)c.B) &&
         mn_mul_size(&to->fparts, to->fparts, (size_t)c.T);
    return ok && mn_mul_size(&to->parts, to->fparts, 2 * (size_t)c.K);
}

template <typename T, int R, mn_columns_kind KIND>
static int mn_columns_start(const mn_columns &p, cudaStream_t on) {
    const int64_t tiles = mn_columns_tiles(p.columns);
    const int64_t blocks = tiles * p.call.H * mn_n_spans(p.call);
    if (blocks == 0) return cudaSuccess;
    if (blocks > INT32_MAX) return cudaErrorNotSupported;
    mn_columns_backward_kernel<T, R, KIND><<<(unsigned)blocks, 256, 0, on>>>(p, tiles);
    return mn_launched();
}

template <typename T, mn_columns_kind KIND>
static int mn_columns_backward(const mn_columns &p, cudaStream_t on) {
    const int64_t K = p.call.K;
    if (K <= 32) return mn_columns_start<T, 1, KIND>(p, on);
    if (K <= 64) return mn_columns_start<T, 2, KIND>(p, on);
    if (K <= 128) return mn_columns_start<T, 4, KIND>(p, on);
    if (K <= MN_COLUMNS_WIDEST) return mn_columns_start<T, 8, KIND>(p, on);
    return cudaErrorNotSupported;
}

#endif
