/* bayes_bwd_chunk.cu - the Bayesian Layer and its covariances alone, backward. Hats are left out:
 * all is in the frame of a span (bayes_span.cuh) or, on the narrow way, of a chunk (bayes.cuh).
 *
 * With rows for the 16 tokens of a chunk, w = z / sigma, L = lower(K W', unit diagonal)^-1, whose
 * transpose is L', A = upper(W Q'), a = scale^2 dqvar, y = scale do, x = Phi'dgainvec, and D and E
 * the adjoints of P and M behind the chunk:
 *
 *   de = L'(W E + A Y)         dv = de           E <- E + Q'Y - K'de
 *   dw_t = E e_t + sum_{s>=t} q_s (y_s.e_t) - sum_{s>t} k_s (de_s.e_t) + x_t
 *   b = dw / sigma - 2 A a Q                     Psi_ts = -w_t.b_s (t < s, and symmetric)
 *   Psi_tt = 2 (dkvar + dgain r2 / sigma^2 - sum_{s>=t} a_s A_ts^2 - w_t.b_t)
 *
 * where b and Psi are those without D, so that they come first. With D behind the chunk,
 *
 *   Y = W D - b / 2            H = L'Y                     O = L'(W D W' + Psi / 2) L
 *   D <- D - K'H - (H - O K)'K + Q'a Q                     du = -2 H + (diag O + 2 upper O) K
 *
 * where below the diagonal W D W' + Psi / 2 is Y W', and c_t = O_tt is the adjoint of k'u: D goes
 * to F'D F with F = (I - w_1 k_1') ... (I - w_16 k_16'), and du follows the same products.
 * With P and M the states in front of the span, sums over its earlier tokens,
 *
 *   dk_t = c_t z_t + (P + n_t) du_t - M de_t - sum_{s<t} w_s (z_s.du_t + e_s.de_t)
 *   dq_t = M y_t + 2 a_t (P + n_t) q_t + sum_{s<=t} w_s (e_s.y_t - 2 a_t z_s.q_t)
 *   dr2_t = c_t - dkvar_t - dgain_t / sigma_t
 *
 * dla and dtheta follow without a product: with C = 2 D P + E M, of which only the sums and
 * differences inside channels count, the same in every frame,
 *
 *   C_{t-1} = C_t + q dq' + k dk' + x w' - 2 D_{t-1} n_t     dla_t, dtheta_t: its trace, its turn
 *
 * So one kernel scans the covariance forward and the mean behind it, one E back and D behind it, on
 * different processors; before and after them kernels do all spans at once. The states of more
 * than 128 rows, and heads that decay steeply, go the narrow way: one block for each, chunk by
 * chunk, after a walk that leaves states in front of spans of 128 tokens; there
 *
 *   du_t = b_t + c_t k_t - sum_{s>t} (du_s (k_s.w_t) + k_s (du_s.w_t))
 *
 * and groups leave float32 parts of what they share, added in their order. */
#include "kernels/cuda/bayes/bayes_grad.cuh"
#include "kernels/cuda/bayes/bayes_span_reduce.cuh"
#include "kernels/cuda/bayes/bayes_span_gemm.cuh"
#include "kernels/cuda/bayes/bayes_bwd_scans.cuh"
#include "kernels/riccati_args.h"

/* ---- scans ----------------------------------------------------------------------------------- */

/* Where a state lies: P's tiles, then the mean's. */
__device__ static double *mean_of(double *state, const mn_bayes_shape &s) {
    return state + (int64_t)s.nb * s.nb * 64;
}

/* From the state in front of a chunk to the one behind it; the frame is at rest on both sides. */
template <typename T>
__device__ __noinline__ static void walk(tiles &P, const mn_bayes_smem &room,
                                         const mn_bayes_args &p, mn_bayes_shape s, int64_t t,
                                         int limit) {
    const int all = (int)min((int64_t)MN_BAYES_CHUNK, s.span.length - t);
    s.reads = false;
    __syncthreads();
    mn_bayes_load_tile<T>(room, p, s, t, all);
    __syncthreads();
    const bool steep = mn_bayes_is_steep(room, s, false);
    const int count = steep ? 1 : all;
    for (int first = 0; first < all && first < limit; first += count) {
        if (steep) {
            mn_bayes_step_frame(room, s, first);
            mn_bayes_rebase(P, room, s);
        }
        mn_bayes_chunk<T>(P, room, p, s, t, first, count, steep, false);
        mn_bayes_write(P, room, s);
        __syncthreads();
    }
    if (steep) return;
    mn_bayes_advance_frame(room, s);
    __syncthreads();
    mn_bayes_rebase(P, room, s);
}

/* Everything of tokens [first, first + count) of the chunk at t, whose frame starts from `state`: D
 * and E go from behind them to in front of them. */
template <typename T>
__device__ __noinline__ static void chunk_back(tiles &D, double *E, double *state,
                                  mn_bayes_smem room, const back_smem &r, const mn_bayes_args &p,
                                  const mn_bayes_shape &s, float *parts, int64_t t, int first,
                                  int count, bool still) {
    const bool weighs = p.cot.qvar.data && p.q.data;
    tiles P;
    P.memory = state;
    room.M = mean_of(state, s);
    mn_bayes_chunk<T>(P, room, p, s, t, first, count, still, false);
    __syncthreads();
    each_pair([&](int i, int row, int) {
        room.read[i] = mn_bayes_whole(room.parts, i) * room.inverse[row];
    });
    fetch_cotangents<T>(room, r, p, s, t + first, count);
    __syncthreads();
    value_back<T>(room, r, E, p, s, t + first, count);
    value_grams(room, r, s);
    gain_back(room, r, E, s);
    take_diagonal(D, r, s);
    __syncthreads();
    covariance_start(D, room, r, s);
    mn_bayes_gram(room.parts, r.dw, s.pitch(), room.z, s.pitch_z(), s.nb);
    __syncthreads();
    if (threadIdx.x < 16) {
        r.x[threadIdx.x] = mn_bayes_whole(room.parts, 17 * (int)threadIdx.x) *
                           room.inverse[threadIdx.x];
    }
    __syncthreads();
    mn_bayes_gram(room.parts, r.du, s.pitch(), room.z, s.pitch_z(), s.nb);
    __syncthreads();
    each_pair([&](int i, int, int column) {
        r.mix[4][i] = mn_bayes_whole(room.parts, i) * room.inverse[column];
    });
    __syncthreads();
    if (threadIdx.x < 32) adjoint_scalars<T>(room, r, p, s, t + first, count);
    __syncthreads();
    covariance_solve(room, r, s);
    write_back(D, E, room, r, s, weighs);
    mn_bayes_gram(room.parts, room.z, s.pitch_z(), r.du, s.pitch(), s.nb);
    each_pair([&](int i, int row, int column) {
        const int turned = column * 16 + row;
        const double inverse = room.inverse[column];
        r.mix[2][i] = column <= row ? inverse * r.mix[0][turned] : 0.0;
        r.mix[3][i] = column < row ? inverse * r.mix[1][turned] : 0.0;
    });
    __syncthreads();
    each_pair([&](int i, int row, int column) {
        const int turned = column * 16 + row;
        const double inverse = room.inverse[column];
        r.mix[0][i] = column < row ? -inverse * mn_bayes_whole(room.parts, turned) : 0.0;
        r.mix[1][i] = column <= row ? -room.read[turned] : 0.0;
    });
    __syncthreads();
    read_back(state, room, r, s, weighs);
    channels_back<T>(room, r, p, s, parts, t + first, first, count);
}

/* D and E from the cotangents of the last states, of which P and room.M are the values; C. */
__device__ static void load_cotangents(tiles &P, double *E,
                                       const mn_bayes_smem &room, const back_smem &r,
                                       const mn_bayes_args &p, const mn_bayes_shape &s) {
    const float *dP = mn_row<float>(p.cot.P, s.n, 0, s.h);
    const float *dM = mn_row<float>(p.cot.M, s.n, 0, s.h);
    const int64_t R = s.R;
    double own = 0.0, cross = 0.0;
    if (dP) dP += s.g * R * R;
    P.each(s, [&](double (&x)[2], int a, int b) {
        const int64_t row = mn_tile_row(a);
        if (b == 0) own = cross = 0.0;
#pragma unroll
        for (int i = 0; i < 2; i++) {
            const int64_t column = mn_tile_column(b) + i;
            const bool inside = dP && row < R && column < R;
            const double d = inside ? 0.5 * ((double)dP[row * R + column] +
                                             (double)dP[column * R + row]) : 0.0;
            own += d * x[i];
            cross += d * __shfl_xor_sync(0xffffffffu, x[i], 4);
            x[i] = d;
        }
        if (b != s.nb - 1) return;
        for (int lanes = 1; lanes < 4; lanes <<= 1) {
            own += __shfl_xor_sync(0xffffffffu, own, lanes);
            cross += __shfl_xor_sync(0xffffffffu, cross, lanes);
        }
        if (threadIdx.x % 4 == 0) room.noise[row] = 2.0 * own, room.cross[row] = 2.0 * cross;
    });
    mn_bayes_each_mean(E, s, [&](double (&x)[2], int a, int b) {
#pragma unroll
        for (int i = 0; i < 2; i++) {
            const int j = mn_tile_row(a), row = mn_tile_column(b) + i;
            const bool inside = dM && j < s.columns && row < R;
            x[i] = inside ? (double)dM[(int64_t)row * p.call.V + s.first + j] : 0.0;
        }
    });
    __syncthreads();
    for (int i = threadIdx.x; i < s.K; i += MN_BAYES_THREADS) {
        const int row = i * s.step;
        double trace = room.noise[row], turn = 0.0;
        if (s.turns) trace += room.noise[row + 1], turn = room.cross[row + 1] - room.cross[row];
        for (int j = 0; j < s.columns; j++) {
            const int64_t at = ((int64_t)(j / 8) * s.nb + row / 8) * 64 + j % 8 * 8 + row % 8;
            trace += E[at] * room.M[at];
            if (!s.turns) continue;
            trace += E[at + 1] * room.M[at + 1];
            turn += E[at + 1] * room.M[at] - E[at] * room.M[at + 1];
        }
        r.C[2 * i] = trace, r.C[2 * i + 1] = turn;
    }
    __syncthreads();
}

/* The gradients of the states handed in, and D's trace. */
__device__ static void put_first(tiles &D, double *E, const mn_bayes_smem &room,
                                 const mn_bayes_args &p, const mn_bayes_shape &s, double *trace) {
    float *dP = mn_row<float>(p.grad.P0, s.n, 0, s.h), *dM = mn_row<float>(p.grad.M0, s.n, 0, s.h);
    const int64_t R = s.R;
    if (dP) dP += s.g * R * R;
    D.each(s, [&](double (&x)[2], int a, int b) {
#pragma unroll
        for (int i = 0; i < 2; i++) {
            const int64_t row = mn_tile_row(a), column = mn_tile_column(b) + i;
            if (row == column) room.noise[row] = row < R ? x[i] : 0.0;
            if (dP && row < R && column <= row) {
                dP[row * R + column] = dP[column * R + row] = (float)x[i];
            }
        }
    });
    mn_bayes_each_mean(E, s, [&](double (&x)[2], int a, int b) {
#pragma unroll
        for (int i = 0; i < 2; i++) {
            const int j = mn_tile_row(a), row = mn_tile_column(b) + i;
            if (dM && j < s.columns && row < R) {
                dM[(int64_t)row * p.call.V + s.first + j] = (float)x[i];
            }
        }
    });
    __syncthreads();
    if (threadIdx.x != 0) return;
    double sum = 0.0;
    for (int i = 0; i < s.R; i++) sum += room.noise[i];
    *trace = sum;
}

/* Copies a state; all threads call, and see it. */
__device__ static void copy_state(double *to, double *mean, const double *from,
                                  const double *from_mean, const mn_bayes_shape &s) {
    __syncthreads();
    copy_tiles(to, from, s);
    copy_mean(mean, from_mean, s);
    __syncthreads();
}

template <typename T>
__global__ void __launch_bounds__(MN_BAYES_THREADS, 1)
bayes_backward_kernel(const __grid_constant__ mn_bayes_args p, const __grid_constant__ work w) {
    extern __shared__ __align__(16) double doubles[];
    mn_bayes_shape s = mn_bayes_shape_at(p, blockIdx.x);
    if (w.steep && !w.steep[s.n * p.call.H + s.h]) return;
    s.reads = true;
    const int64_t covariance = (int64_t)s.nb * s.nb * 64, mean = (int64_t)s.nm * s.nb * 64;
    double *own = w.each + blockIdx.x * w.size, *E = own + covariance, *M = E + mean;
    double *chunks = M + mean, *spare = chunks + CHUNKS * w.state;
    double *base = w.inside ? doubles : spare + w.state + covariance;
    tiles P, D;
    D.memory = own;
    P.memory = spare + w.state;
    const mn_bayes_smem room = mn_bayes_smem_in(base, s, M);
    const back_smem r = back_smem_in(room, base + mn_bayes_doubles(s.nb, s.nm, s.K, false), s);
    const int64_t length = s.span.length, n_spans = (length + SPAN - 1) / SPAN;
    const int64_t slot0 = p.call.cu_seqlens ? s.span.t0 / SPAN + s.n
                                            : s.n * ((p.call.T + SPAN - 1) / SPAN);
    const auto span_at = [&](int64_t i) {
        return w.spans + (((slot0 + i) * p.call.H + s.h) * p.call.G + s.g) * w.state;
    };
    mn_bayes_clear(room, s);
    mn_bayes_load(P, room, p, s, sizeof(T) == 2);
    for (int64_t t = 0; t < length; t += MN_BAYES_CHUNK) {
        if (t % SPAN == 0) {
            double *span = span_at(t / SPAN);
            copy_state(span, mean_of(span, s), P.memory, M, s);
        }
        walk<T>(P, room, p, s, t, MN_BAYES_CHUNK);
    }
    __syncthreads();
    copy_tiles(D.memory, P.memory, s);
    __syncthreads();
    load_cotangents(D, E, room, r, p, s);
    for (int64_t i = n_spans - 1; i >= 0; i--) {
        const int n_chunks = (int)min((int64_t)CHUNKS, (length - i * SPAN + MN_BAYES_CHUNK - 1) /
                                                           MN_BAYES_CHUNK);
        double *span = span_at(i);
        copy_state(P.memory, M, span, mean_of(span, s), s);
        for (int c = 0; c < n_chunks; c++) {
            double *state = chunks + c * w.state;
            copy_state(state, mean_of(state, s), P.memory, M, s);
            if (c + 1 < n_chunks) {
                walk<T>(P, room, p, s, i * SPAN + c * MN_BAYES_CHUNK, MN_BAYES_CHUNK);
            }
        }
        for (int c = n_chunks - 1; c >= 0; c--) {
            const int64_t t = i * SPAN + c * MN_BAYES_CHUNK;
            const int all = (int)min((int64_t)MN_BAYES_CHUNK, length - t);
            double *state = chunks + c * w.state;
            __syncthreads();
            mn_bayes_load_tile<T>(room, p, s, t, all);
            __syncthreads();
            const bool steep = mn_bayes_is_steep(room, s, false);
            if (!steep) {
                mn_bayes_advance_frame(room, s);
                __syncthreads();
                move_back(D, E, room, s);
            }
            /* Where a channel decays by more than e^-40 tokens go one by one, each from a walk of
             * its own up to it. */
            for (int token = steep ? all - 1 : 0; token >= 0; token--) {
                if (steep) {
                    copy_state(P.memory, M, state, mean_of(state, s), s);
                    if (token > 0) walk<T>(P, room, p, s, t, token);
                    __syncthreads();
                    mn_bayes_load_tile<T>(room, p, s, t, all);
                    __syncthreads();
                    mn_bayes_step_frame(room, s, token);
                    mn_bayes_rebase(P, room, s);
                    copy_state(spare, mean_of(spare, s), P.memory, M, s);
                }
                chunk_back<T>(D, E, steep ? spare : state, room, r, p, s, w.parts, t,
                              steep ? token : 0, steep ? 1 : all, steep);
                if (!steep) continue;
                mn_bayes_load_tile<T>(room, p, s, t, all);
                __syncthreads();
                mn_bayes_step_frame(room, s, token);
                move_back(D, E, room, s);
            }
        }
    }
    __syncthreads();
    put_first(D, E, room, p, s, w.traces + blockIdx.x);
}

/* ---- what groups share ----------------------------------------------------------------------- */

/* Sums over the groups of a head of 64 tokens that went the narrow way. */
template <typename T>
__global__ void __launch_bounds__(256)
bayes_groups_kernel(const __grid_constant__ mn_bayes_args p, const float *parts,
                    const int *steep) {
    const int64_t K = p.call.K, H = p.call.H, width = 4 * K + 1, h = blockIdx.x % H;
    const int64_t rows = p.call.B * p.call.T * H;
    const mn_tile_span tile = mn_tile_at(p.call, SPAN_TOKENS, blockIdx.x / H);
    if (tile.n_rows == 0 || (steep && !steep[tile.n * H + h])) return;
    const mn_out to[] = { p.grad.q, p.grad.k, p.grad.la, p.grad.theta, p.grad.l2 };
    for (int64_t at = threadIdx.x; at < tile.n_rows * width; at += 256) {
        const int64_t t = tile.span.t0 + tile.first + at / width, i = at % width, which = i / K;
        const int64_t row = ((tile.span.b * p.call.T + t) * H + h) * width + i;
        if (!to[which].data) continue;
        float sum = 0.0f;
        for (int64_t g = 0; g < p.call.G; g++) sum += parts[g * rows * width + row];
        mn_put(mn_row<T>(to[which], tile.span.b, t, h) + i % K, sum);
    }
}

/* dp0 of a head: the traces of its sequences and groups; none where P_0 was given. */
template <typename T>
__global__ void bayes_first_kernel(const __grid_constant__ mn_bayes_args p, const double *traces) {
    const int64_t h = threadIdx.x + blockIdx.x * (int64_t)blockDim.x, G = p.call.G;
    if (h >= p.call.H) return;
    double sum = 0.0;
    for (int64_t n = 0; n < mn_n_spans(p.call) && !p.P0.data; n++) {
        for (int64_t g = 0; g < G; g++) sum += traces[(n * p.call.H + h) * G + g];
    }
    mn_put(mn_row<T>(p.grad.p0, 0, 0, h), (float)sum);
}

/* ---- work space ------------------------------------------------------------------------------ */

/* Hands out room one piece after the other, from `base` or, where that is NULL, to count bytes. */
struct piecework {
    char *base;
    size_t used;
    bool ok;

    template <typename X>
    void take(X **to, int64_t a, int64_t b, int64_t c) {
        size_t count, bytes, room;
        ok = ok && mn_mul_size(&count, (size_t)a, (size_t)b) &&
             mn_mul_size(&count, count, (size_t)c) && mn_mul_size(&bytes, count, sizeof(X)) &&
             mn_add_size(&room, bytes, 15) && mn_add_size(&room, room / 16 * 16, used);
        *to = ok && base ? (X *)(base + used) : NULL;
        if (ok) used = room;
    }
};

/* How a call goes: R is 64 or 128, or 0 where all goes the narrow way, whose room overlays that of
 * spans, for it comes after them. */
struct layout {
    int R;
    size_t narrow_bytes, total_bytes;
    int64_t blocks, heads;    // groups of heads of sequences; heads of slots
    span_work spans;
    work narrow;
};

/* What all scans look at before anything else: zeros at first. */
static void take_counts(layout *l, const mn_call &c, piecework *at) {
    span_work *w = &l->spans;
    w->columns = (int)(mn_ceil_div(mn_ceil_div(c.V, mn_max(c.G, 1)), SLICE) * SLICE);
    w->slices = (int)mn_max(mn_ceil_div(w->columns, SLICE * SLICES), 1);
    at->take(&w->steep, l->blocks, 2 + w->slices, 1);
    if (!w->steep) return;
    w->left = w->steep + l->blocks, w->back = w->left + l->blocks;
}

static void take_spans(layout *l, const mn_bayes_args *p, piecework *at) {
    const mn_call &c = p->call;
    span_work *w = &l->spans;
    const int64_t R = l->R, heads = l->heads, groups = heads * c.G, tokens = SPAN_TOKENS;
    at->take(&w->k, heads, tokens, R), at->take(&w->q, heads, tokens, R);
    at->take(&w->phi, heads, tokens, R), at->take(&w->noise, heads, 2 * (SPAN_CHUNKS + 1), R);
    at->take(&w->h, groups, tokens, R), at->take(&w->w, groups, tokens, R);
    w->nk = w->h;
    at->take(&w->r2, groups, tokens, 1), at->take(&w->sigma, groups, tokens, 1);
    at->take(&w->own, groups, tokens, 1);
    at->take(&w->eliminate, groups, SPAN_CHUNKS, SMALL);
    at->take(&w->reads, groups, SPAN_CHUNKS, SMALL);
    at->take(&w->theta, groups, SPAN_CHUNKS, SMALL);
    w->P_each = mn_max(R, 2 * tokens) * R;
    w->dw_each = (w->slices - 1) * tokens * R;
    at->take(&w->P, groups, w->P_each, 1), at->take(&w->dw, groups, w->dw_each, 1);
    at->take(&w->M, groups, R, w->columns);
    at->take(&w->e, groups, tokens, w->columns), at->take(&w->de, groups, tokens, w->columns);
    at->take(&w->inside, groups, SPAN_CHUNKS, 2 * R);
    at->take(&w->totals, heads, SPAN_CHUNKS, 2 * c.K);
    at->take(&w->last, l->blocks, w->slices * SLICES + 1, 2 * R);
    at->take(&w->local, heads, tokens, 2 * c.K);
}

static void take_narrow(layout *l, const mn_bayes_args *p, int nb, int nm, piecework *at) {
    const mn_call &c = p->call;
    const int64_t room = back_doubles(nb, nm, (int)c.K);
    const int64_t square = (int64_t)nb * nb * 64, mean = (int64_t)nm * nb * 64;
    work *w = &l->narrow;
    l->narrow_bytes = (size_t)room * sizeof(double);
    w->inside = l->narrow_bytes <= mn_bayes_most_shared();
    w->state = square + mean;
    w->size = 2 * square + 2 * mean + (CHUNKS + 1) * (square + mean) + (w->inside ? 0 : room);
    if (!w->inside) l->narrow_bytes = 0;
    at->take(&w->each, l->blocks, w->size, 1);
    at->take(&w->spans, mn_tile_slots(c, SPAN), c.H * c.G, w->state);
    at->take(&w->parts, c.B * c.T, c.H * c.G, 4 * c.K + 1);
}

/* The most shared memory that a kernel of spans takes. */
template <int R>
constexpr size_t widest_smem() {
    const size_t each[] = { sizeof(covariance_smem<R>), sizeof(mean_smem<R>),
                            sizeof(mean_back_smem<R>), sizeof(adjoint_smem<R>),
                            sizeof(product_smem<R>) };
    size_t most = 0;
    for (size_t bytes : each) most = bytes > most ? bytes : most;
    return most;
}

/* The rows that kernels of spans are made for, or 0. */
static int span_rows(int64_t rows) {
    const size_t most = mn_bayes_most_shared();
    if (rows <= 64 && widest_smem<64>() <= most) return 64;
    return rows <= 128 && widest_smem<128>() <= most ? 128 : 0;
}

static bool layout_of(layout *l, const mn_bayes_args *p, void *base) {
    const mn_call &c = p->call;
    const int64_t rows = c.K * (p->theta.data ? 2 : 1);
    if (rows > MN_BAYES_WIDEST) return false;
    memset(l, 0, sizeof *l);
    l->R = span_rows(rows);
    l->blocks = mn_n_spans(c) * c.H * c.G;
    l->heads = mn_tile_slots(c, SPAN_TOKENS) * c.H;
    piecework both = { (char *)base, 0, true };
    both.take(&l->narrow.traces, l->blocks, 1, 1);
    if (l->R) take_counts(l, c, &both);
    l->spans.traces = l->narrow.traces, l->narrow.steep = l->spans.steep;
    piecework one = both, other = both;
    if (l->R) take_spans(l, p, &one);
    const int nm = (int)mn_ceil_div(mn_ceil_div(c.V, mn_max(c.G, 1)), 8);
    take_narrow(l, p, (int)((rows + 7) / 8), nm, &other);
    l->total_bytes = one.used > other.used ? one.used : other.used;
    return one.ok && other.ok;
}

/* ---- launches -------------------------------------------------------------------------------- */

template <typename T, int R>
static int start_spans(const mn_bayes_args *p, const layout &l, cudaStream_t on) {
    const span_work &w = l.spans;
    const unsigned blocks = (unsigned)l.blocks, heads = (unsigned)l.heads;
    const size_t counts = (size_t)l.blocks * (2 + (size_t)w.slices) * sizeof *w.steep;
    int code = (int)cudaMemsetAsync(w.steep, heads == 0, counts, on);
    if (code != cudaSuccess || heads == 0) return code;
    const unsigned parts = heads * (unsigned)prepare_parts(p->call);
    if (p->theta.data) span_prepare_kernel<T, true><<<parts, PREPARE_THREADS, 0, on>>>(*p, w, R);
    else span_prepare_kernel<T, false><<<parts, PREPARE_THREADS, 0, on>>>(*p, w, R);
    code = mn_launch_smem(scans_forward_kernel<T, R>, blocks * (1 + (unsigned)w.slices),
                               SCAN_THREADS, widest_smem<R>(), on, *p, w);
    if (code == cudaSuccess) {
        code = mn_launch_smem(scans_back_kernel<T, R>, blocks * (1 + (unsigned)w.slices),
                                   SCAN_THREADS, widest_smem<R>(), on, *p, w);
    }
    if (code == cudaSuccess) {
        code = mn_launch_smem(span_products_kernel<T, R>, heads, PRODUCT_THREADS,
                                   sizeof(product_smem<R>), on, *p, w);
    }
    if (code != cudaSuccess) return code;
    const unsigned chunks = heads * SPAN_CHUNKS;
    if (p->theta.data) span_channels_kernel<T, R, true><<<chunks, CHANNEL_THREADS, 0, on>>>(*p, w);
    else span_channels_kernel<T, R, false><<<chunks, CHANNEL_THREADS, 0, on>>>(*p, w);
    const unsigned n_heads = (unsigned)(mn_n_spans(p->call) * p->call.H);
    span_totals_kernel<R><<<n_heads, 128, 0, on>>>(*p, w);
    span_decay_kernel<T><<<heads, 256, 0, on>>>(*p, w);
    return mn_launch_status();
}

template <typename T>
static int start(const mn_bayes_args *p, const layout &l, cudaStream_t on) {
    int code = cudaSuccess;
    if (l.R == 64) code = start_spans<T, 64>(p, l, on);
    if (l.R == 128) code = start_spans<T, 128>(p, l, on);
    if (code != cudaSuccess) return code;
    code = mn_launch_smem(bayes_backward_kernel<T>, dim3((unsigned)l.blocks),
                               MN_BAYES_THREADS, l.narrow_bytes, on, *p, l.narrow);
    if (code != cudaSuccess) return code;
    if (l.heads > 0) {
        bayes_groups_kernel<T><<<(unsigned)l.heads, 256, 0, on>>>(*p, l.narrow.parts,
                                                                  l.narrow.steep);
    }
    if (p->grad.p0.data) {
        bayes_first_kernel<T><<<mn_blocks(p->call.H, 64), 64, 0, on>>>(*p, l.narrow.traces);
    }
    return mn_launch_status();
}

static bool backward_plan(const mn_bayes_args *p, mn_plan *plan) {
    layout l;
    if (p->call.K * (p->theta.data ? 2 : 1) > MN_BAYES_WIDEST) return true;    // refused later
    if (!layout_of(&l, p, NULL)) return false;
    plan->shared_bytes = l.total_bytes;
    return true;
}

static int backward(const mn_bayes_args *p, void *shared, void *stream) {
    layout l;
    const cudaStream_t on = (cudaStream_t)stream;
    if (!layout_of(&l, p, shared) || l.blocks > INT32_MAX || l.heads * p->call.G > INT32_MAX) {
        return cudaErrorNotSupported;
    }
    if (l.blocks == 0) return cudaSuccess;
    return p->call.dtype == MN_BF16 ? start<mn_bf16>(p, l, on) : start<float>(p, l, on);
}

MN_CUDA_PLAN(bayes_backward) {
    return backward_plan((const mn_bayes_args *)args, plan);
}

MN_CUDA_LAUNCH(bayes_backward) {
    return backward((const mn_bayes_args *)args, shared, stream);
}

MN_CUDA_PLAN(riccati_backward) {
    const mn_bayes_args p = mn_riccati_as_bayes((const mn_riccati_args *)args);
    return backward_plan(&p, plan);
}

MN_CUDA_LAUNCH(riccati_backward) {
    const mn_bayes_args p = mn_riccati_as_bayes((const mn_riccati_args *)args);
    return backward(&p, shared, stream);
}
