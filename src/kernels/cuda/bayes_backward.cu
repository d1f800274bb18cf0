/* bayes_backward.cu - the Bayesian Layer and its covariances alone, backward over the chunks of
 * bayes.cuh. With D and E the adjoints of Ph and Mh behind a chunk, a_t = scale^2 dqvar_t, y_t =
 * scale do_t, w_t = z_t / sigma_t, x_t = Phi_t'dgainvec_t:
 *
 *   de_t = E'w_t + sum_{s>=t} (q_s.w_t) y_s - sum_{s>t} (k_s.w_t) de_s            dv_t = de_t
 *   dw_t = E e_t + sum_{s>=t} q_s (y_s.e_t) - sum_{s>t} k_s (de_s.e_t) + x_t
 *   b_t  = dw_t / sigma_t - 2 (D w_t + sum_{s>=t} a_s q_s (q_s.w_t))
 *   du_t = b_t + c_t k_t - sum_{s>t} (du_s (k_s.w_t) + k_s (du_s.w_t))
 *   dk_t = c_t z_t + Pbar_t du_t - M_{t-1} de_t          dq_t = M_t y_t + 2 a_t P_t q_t
 *   D <- D + sum a q q' + (du k' + k du') / 2            E <- E + sum q y' - k de'
 *
 * (hats left out). c_t, the adjoint of k'u, needs du_s.w_t for s > t alone, numbers that follow
 * from b_s.w_t: one warp finds them, and then all rows of du at once. dla and dtheta follow without
 * a product: with C = 2 D P + E M, of which only the sums and differences inside channels count,
 *
 *   C_{t-1} = C_t + q dq' + k dk' + x w' - 2 D_{t-1} n_t     dla_t, dtheta_t: its trace, its turn
 *
 * and C is the same in every frame. States in front of spans of 128 tokens come from a first walk,
 * those in front of a span's chunks from a second one, last span first; each chunk has a frame of
 * its own there. Groups leave float32 parts of what they share, added in their order. */
#include "kernels/cuda/bayes_back.cuh"
#include "kernels/cuda/parts.cuh"
#include "kernels/riccati_args.h"

/* ---- walks ----------------------------------------------------------------------------------- */

/* Where a state lies: P's tiles, then the mean's. */
__device__ static double *mean_of(double *state, const mn_bayes_shape &s) {
    return state + (int64_t)s.nb * s.nb * 64;
}

/* From the state in front of a chunk to the one behind it; the frame is at rest on both sides. */
template <typename T>
__device__ __noinline__ static void walk(tiles &P, const mn_bayes_room &room,
                                         const mn_bayes_args &p, mn_bayes_shape s, int64_t t,
                                         int limit) {
    const int all = (int)min((int64_t)MN_BAYES_CHUNK, s.span.length - t);
    s.reads = false;
    __syncthreads();
    mn_bayes_fetch<T>(room, p, s, t, all);
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
                                  mn_bayes_room room, const back_room &r, const mn_bayes_args &p,
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
                                       const mn_bayes_room &room, const back_room &r,
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
__device__ static void put_first(tiles &D, double *E, const mn_bayes_room &room,
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
    s.reads = true;
    const int64_t covariance = (int64_t)s.nb * s.nb * 64, mean = (int64_t)s.nm * s.nb * 64;
    double *own = w.each + blockIdx.x * w.size, *E = own + covariance, *M = E + mean;
    double *chunks = M + mean, *spare = chunks + CHUNKS * w.state;
    double *base = w.inside ? doubles : spare + w.state + covariance;
    tiles P, D;
    D.memory = own;
    P.memory = spare + w.state;
    const mn_bayes_room room = mn_bayes_room_in(base, s, M);
    const back_room r = back_room_in(room, base + mn_bayes_doubles(s.nb, s.nm, s.K, false), s);
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
            mn_bayes_fetch<T>(room, p, s, t, all);
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
                    mn_bayes_fetch<T>(room, p, s, t, all);
                    __syncthreads();
                    mn_bayes_step_frame(room, s, token);
                    mn_bayes_rebase(P, room, s);
                    copy_state(spare, mean_of(spare, s), P.memory, M, s);
                }
                chunk_back<T>(D, E, steep ? spare : state, room, r, p, s, w.parts, t,
                              steep ? token : 0, steep ? 1 : all, steep);
                if (!steep) continue;
                mn_bayes_fetch<T>(room, p, s, t, all);
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

/* Sums over groups, one thread for each number of a token. */
template <typename T>
__global__ void __launch_bounds__(256)
bayes_groups_kernel(const __grid_constant__ mn_bayes_args p, const float *parts) {
    const int64_t K = p.call.K, width = 4 * K + 1, rows = p.call.B * p.call.T * p.call.H;
    const int64_t at = blockIdx.x * (int64_t)256 + threadIdx.x;
    if (at >= rows * width) return;
    const int64_t row = at / width, i = at % width, which = i / K, channel = i % K;
    const int64_t h = row % p.call.H, t = row / p.call.H % p.call.T, b = row / p.call.H / p.call.T;
    const mn_out to[] = { p.grad.q, p.grad.k, p.grad.la, p.grad.theta, p.grad.l2 };
    if (!to[which].data) return;
    float sum = 0.0f;
    for (int64_t g = 0; g < p.call.G; g++) sum += parts[g * rows * width + at];
    mn_put(mn_row<T>(to[which], b, t, h) + channel, sum);
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

/* ---- launches -------------------------------------------------------------------------------- */

struct layout {
    int nb, nm;
    size_t room_bytes, spans, each, blocks, parts;    // doubles; parts in floats
    work w;
};

static bool layout_of(layout *l, const mn_bayes_args *p) {
    const mn_call &c = p->call;
    const int64_t R = c.K * (p->theta.data ? 2 : 1);
    if (c.K > MN_BAYES_WIDEST) return false;
    l->nb = (int)((R + 7) / 8);
    l->nm = (int)mn_ceil_div(mn_ceil_div(c.V, mn_max(c.G, 1)), 8);
    const size_t room = (size_t)back_doubles(l->nb, l->nm, (int)c.K);
    const size_t square = (size_t)l->nb * l->nb * 64, mean = (size_t)l->nm * l->nb * 64;
    l->room_bytes = room * sizeof(double);
    l->w.inside = l->room_bytes <= mn_bayes_most_shared();
    l->w.state = (int64_t)(square + mean);
    size_t size = 2 * square + 2 * mean + (CHUNKS + 1) * (square + mean);
    if (!l->w.inside) size += room;
    l->w.size = (int64_t)size;
    size_t heads, rows;
    bool ok = mn_mul_size(&heads, (size_t)c.H, (size_t)c.G) &&
              mn_mul_size(&l->blocks, heads, (size_t)mn_n_spans(c)) &&
              mn_mul_size(&l->each, l->blocks, size);
    ok = ok && mn_mul_size(&l->spans, (size_t)mn_tile_slots(c, SPAN), heads) &&
         mn_mul_size(&l->spans, l->spans, square + mean);
    ok = ok && mn_mul_size(&rows, (size_t)c.B, (size_t)c.T) && mn_mul_size(&rows, rows, heads);
    return ok && mn_mul_size(&l->parts, rows, 4 * (size_t)c.K + 1);
}

static bool backward_plan(const mn_bayes_args *p, mn_plan *plan) {
    layout l;
    size_t count, floats;
    if (p->call.K > MN_BAYES_WIDEST) return true;    // refused at the launch
    return layout_of(&l, p) && mn_add_size(&count, l.spans, l.each) &&
           mn_add_size(&count, count, l.blocks) &&
           mn_mul_size(&count, count, sizeof(double)) &&
           mn_mul_size(&floats, l.parts, sizeof(float)) &&
           mn_add_size(&plan->shared_bytes, count, floats);
}

template <typename T>
static int start(const mn_bayes_args *p, const layout &l, cudaStream_t on) {
    const int launched = mn_launch_with_room(bayes_backward_kernel<T>, dim3((unsigned)l.blocks),
                                             MN_BAYES_THREADS, l.w.inside ? l.room_bytes : 0, on,
                                             *p, l.w);
    if (launched != cudaSuccess) return launched;
    const int64_t numbers = p->call.B * p->call.T * p->call.H * (4 * p->call.K + 1);
    if (numbers > 0) {
        bayes_groups_kernel<T><<<mn_blocks(numbers, 256), 256, 0, on>>>(*p, l.w.parts);
    }
    if (p->grad.p0.data) {
        bayes_first_kernel<T><<<mn_blocks(p->call.H, 64), 64, 0, on>>>(*p, l.w.traces);
    }
    return mn_launched();
}

static int backward(const mn_bayes_args *p, void *shared, void *stream) {
    layout l;
    const cudaStream_t on = (cudaStream_t)stream;
    if (!layout_of(&l, p) || l.nb * 8 > MN_BAYES_WIDEST || l.blocks > INT32_MAX) {
        return cudaErrorNotSupported;
    }
    if (l.blocks == 0) return cudaSuccess;
    double *at = (double *)shared;
    l.w.each = at, l.w.spans = at + l.each, l.w.traces = at + l.each + l.spans;
    l.w.parts = (float *)(l.w.traces + l.blocks);
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
