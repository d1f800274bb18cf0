/* bayes_span_reduce.cuh - gradients of the Bayesian Layer from dk and dq in the frame, all spans at
 * once. Formulas are in bayes_bwd_chunk.cu. */
#ifndef MN_KERNELS_CUDA_BAYES_BAYES_SPAN_REDUCE_CUH
#define MN_KERNELS_CUDA_BAYES_BAYES_SPAN_REDUCE_CUH

#include "kernels/cuda/bayes/bayes_span.cuh"

enum { CHANNELS_LD = 129, CHANNEL_THREADS = 128 };

/* ---- channels -------------------------------------------------------------------------------- */

/* x_t w_t inside channel i, of all groups: its trace and its turn. */
template <typename T, int R>
__device__ static void gain_inside(double &trace, double &turning, const mn_bayes_args &p,
                                   const span_work &w, const mn_tile_span &tile, int64_t head,
                                   int t, int i, const double *phi) {
    const int64_t G = p.call.G, H = p.call.H;
    const bool turns = p.theta.data != NULL;
    const int step = turns ? 2 : 1, r = i * step, rows = (int)p.call.K * step;
    for (int64_t g = 0; g < G; g++) {
        const span_group s = { tile.n, head % H, g, 0, 0 };
        const double *z = w.w + ((head * G + g) * SPAN_TOKENS + t) * R + r;
        const double x0 = transposed_gain<T>(p, tile, s, phi, t, r, rows, turns);
        trace += x0 * z[0];
        if (!turns) continue;
        const double x1 = transposed_gain<T>(p, tile, s, phi, t, r + 1, rows, turns);
        trace += x1 * z[1];
        turning += x1 * z[0] - x0 * z[1];
    }
}

/* What a thread has of a token: its channel's rows, in complex numbers where channels turn. */
struct channel_token {
    double2 phi, du, dk, dq;
    float k, q;
};

template <bool TURNS>
__device__ static double2 pair_at(const double *x) {
    if (TURNS) return *(const double2 *)x;
    return make_double2(*x, 0.0);
}

/* Phi' of a real number */
template <bool TURNS>
__device__ static double2 in_frame(double2 phi, double x) {
    return make_double2(phi.x * x, TURNS ? -phi.y * x : 0.0);
}

/* What a token has to do with its channel: n du and 2 a n q join dk and dq, and D inside the
 * channel, its trace and its turn grow. */
template <bool TURNS>
struct channel_sums {
    double rr, ri, ii;          // D
    double trace, turning;      // C's growth

    __device__ double add(double2 &dk, double2 &dq, double2 k, double2 q, double2 du, double a,
                          const noise_sums &n, double2 own, double l2) {
        const double twice = 2.0 * a;
        dk.x += n.rr * du.x, dq.x += twice * n.rr * q.x;
        rr += a * q.x * q.x + du.x * k.x;
        if (!TURNS) {
            const double by_noise = rr * own.x * own.x;
            trace += q.x * dq.x + k.x * dk.x - 2.0 * l2 * by_noise;
            return by_noise;
        }
        dk.x += n.ri * du.y, dk.y += n.ri * du.x + n.ii * du.y;
        dq.x += twice * n.ri * q.y, dq.y += twice * (n.ri * q.x + n.ii * q.y);
        ri += a * q.x * q.y + 0.5 * (du.x * k.y + du.y * k.x);
        ii += a * q.y * q.y + du.y * k.y;
        const double along = rr * own.x + ri * own.y, across = ri * own.x + ii * own.y;
        const double by_noise = along * own.x + across * own.y;
        trace += q.x * dq.x + q.y * dq.y + k.x * dk.x + k.y * dk.y - 2.0 * l2 * by_noise;
        turning += q.y * dq.x - q.x * dq.y + k.y * dk.x - k.x * dk.y;
        turning -= 2.0 * l2 * (across * own.x - along * own.y);
        return by_noise;
    }
};

/* Shared memory of span_channels_kernel. */
struct channels_smem {
    double weights[CHUNK], l2[CHUNK], dl2[CHUNK * CHANNELS_LD];
};

/* What channel i leaves of a chunk's tokens: the raw inputs' gradients but for what later chunks
 * say of la and theta; parts of dl2 by channels into the room. n_t grows from the first token on,
 * all else from the last. */
template <typename T, int R, bool TURNS>
__device__ static void gather_channel(channels_smem &room, const mn_bayes_args &p,
                                      const span_work &w, const mn_tile_span &tile, int64_t head,
                                      int c, int i) {
    constexpr int AHEAD = 4, STEP = TURNS ? 2 : 1;
    const int64_t G = p.call.G, h = head % p.call.H;
    const int r = i * STEP, K = (int)p.call.K;
    const int count = (int)min((int64_t)CHUNK, tile.n_rows - c * CHUNK);    // 0 or less: no token
    const int64_t b = tile.span.b, t0 = tile.span.t0 + tile.first + c * CHUNK;
    const int64_t smem_tile = (head * SPAN_TOKENS + c * CHUNK) * R + r;
    const double *phi = w.phi + smem_tile;
    const double *dk = w.P + head * G * w.P_each + c * CHUNK * R + r, *dq = dk + SPAN_TOKENS * R;
    const double *du = w.h + (head * G * SPAN_TOKENS + c * CHUNK) * R + r;
    const double *noise = w.noise + (head * (SPAN_CHUNKS + 1) + c) * 2 * R;
    const bool requests = p.q.data != NULL;
    const T *keys = mn_row<T>(p.k, b, t0, h) + i;
    const T *queries = requests ? mn_row<T>(p.q, b, t0, h) + i : keys;
    const int64_t next_key = p.k.stride[1], next_query = requests ? p.q.stride[1] : next_key;
    T *to_q = mn_row<T>(p.grad.q, b, t0, h), *to_k = mn_row<T>(p.grad.k, b, t0, h);
    float *local = w.local + (head * SPAN_TOKENS + c * CHUNK) * 2 * K + i;
    noise_sums n[CHUNK], sum = { noise[r], noise[R + r], TURNS ? noise[r + 1] : 0.0 };
#pragma unroll
    for (int t = 0; t < CHUNK; t++) {
        sum.add<TURNS>(noise_row<TURNS>(pair_at<TURNS>(phi + t * R)), room.l2[t]);
        n[t] = sum;
    }
    channel_sums<TURNS> sums = { 0.0, 0.0, 0.0, 0.0, 0.0 };
    for (int64_t g = 0; g < G; g++) {
        const double *inside = w.inside + ((head * G + g) * SPAN_CHUNKS + c) * 2 * R;
        sums.rr += inside[r];
        if (TURNS) sums.ri += inside[R + r], sums.ii += inside[r + 1];
    }
#pragma unroll
    for (int last = CHUNK - 1; last >= 0 && count > 0; last -= AHEAD) {
        channel_token x[AHEAD];
#pragma unroll
        for (int j = 0; j < AHEAD; j++) {
            const int t = last - j, there = min(t, count - 1);
            x[j].phi = pair_at<TURNS>(phi + t * R), x[j].du = pair_at<TURNS>(du + t * R);
            x[j].dk = pair_at<TURNS>(dk + t * R), x[j].dq = pair_at<TURNS>(dq + t * R);
            x[j].k = mn_float(keys[there * next_key]);
            x[j].q = mn_float(queries[there * next_query]);
        }
        for (int64_t g = 1; g < G; g++) {
#pragma unroll
            for (int j = 0; j < AHEAD; j++) {
                const double2 more = pair_at<TURNS>(du + (g * SPAN_TOKENS + last - j) * R);
                x[j].du.x += more.x, x[j].du.y += more.y;
            }
        }
#pragma unroll
        for (int j = 0; j < AHEAD; j++) {
            const int t = last - j;
            if (t >= count) continue;
            const double2 own = noise_row<TURNS>(x[j].phi);
            const double2 k = in_frame<TURNS>(x[j].phi, (double)x[j].k);
            const double2 q = in_frame<TURNS>(x[j].phi, requests ? (double)x[j].q : 0.0);
            const double by_noise = sums.add(x[j].dk, x[j].dq, k, q, x[j].du, room.weights[t],
                                             n[t], own, room.l2[t]);
            if (p.cot.gainvec.data) {
                gain_inside<T, R>(sums.trace, sums.turning, p, w, tile, head, c * CHUNK + t, i,
                                  phi + t * R - r);
            }
            const double2 by = x[j].phi;
            if (to_q) {
                const double d = by.x * x[j].dq.x - (TURNS ? by.y * x[j].dq.y : 0.0);
                mn_put(to_q + t * p.grad.q.stride[1] + i, (float)d);
            }
            if (to_k) {
                const double d = by.x * x[j].dk.x - (TURNS ? by.y * x[j].dk.y : 0.0);
                mn_put(to_k + t * p.grad.k.stride[1] + i, (float)d);
            }
            local[t * 2 * K] = (float)sums.trace;
            if (TURNS) local[t * 2 * K + K] = (float)sums.turning;
            room.dl2[t * CHANNELS_LD + i] = by_noise;
        }
    }
    double *total = w.totals + (head * SPAN_CHUNKS + c) * 2 * K;
    total[i] = sums.trace, total[K + i] = sums.turning;
}

/* All gradients of a chunk of a head but dv, dr2, dla and dtheta. */
template <typename T, int R, bool TURNS>
__global__ void __launch_bounds__(CHANNEL_THREADS, TURNS ? 2 : 4)
span_channels_kernel(const __grid_constant__ mn_bayes_args p,
                     const __grid_constant__ span_work w) {
    __shared__ channels_smem room;
    const int64_t H = p.call.H, G = p.call.G, head = blockIdx.x / SPAN_CHUNKS, h = head % H;
    const int c = (int)(blockIdx.x % SPAN_CHUNKS), i = (int)threadIdx.x, K = (int)p.call.K;
    const mn_tile_span tile = mn_tile_at(p.call, SPAN_TOKENS, head / H);
    if (tile.n_rows == 0 || w.steep[tile.n * H + h]) return;
    const int64_t b = tile.span.b, t0 = tile.span.t0 + tile.first;
    if (i < CHUNK) {
        const int t = c * CHUNK + i;
        double sum = 0.0;
        for (int64_t g = 0; g < G; g++) {
            const span_group s = { tile.n, h, g, 0, 0 };
            sum += weight_of<T>(p, tile, s, t);
        }
        room.weights[i] = sum;
        room.l2[i] = t < tile.n_rows ? (double)mn_float(*mn_row<T>(p.l2, b, t0 + t, h)) : 0.0;
    }
    __syncthreads();
    if (i < K) gather_channel<T, R, TURNS>(room, p, w, tile, head, c, i);
    __syncthreads();
    for (int j = i / 32; j < CHUNK && p.grad.l2.data; j += CHANNEL_THREADS / 32) {
        if (c * CHUNK + j >= tile.n_rows) break;
        double sum = 0.0;
        for (int k = i % 32; k < K; k += 32) sum += room.dl2[j * CHANNELS_LD + k];
        for (int lanes = 16; lanes > 0; lanes >>= 1) {
            sum += __shfl_xor_sync(0xffffffffu, sum, lanes);
        }
        T *to = mn_row<T>(p.grad.l2, b, t0 + c * CHUNK + j, h);
        if (i % 32 == 0) mn_put(to, (float)sum);
    }
}

/* C behind each chunk in place of its growth there, one thread for each channel of a head of a
 * sequence, from its last chunk on. */
template <int R>
__global__ void __launch_bounds__(128)
span_totals_kernel(const __grid_constant__ mn_bayes_args p, const __grid_constant__ span_work w) {
    constexpr int AHEAD = 4;    // spans whose sums are loaded together
    const int64_t H = p.call.H, G = p.call.G, n = blockIdx.x / H, h = blockIdx.x % H;
    const int i = threadIdx.x, K = (int)p.call.K;
    if (i >= K || w.steep[n * H + h]) return;
    const mn_span span = mn_span_at(p.call, n);
    const bool turns = p.theta.data != NULL;
    const int64_t slot0 = first_slot(p.call, span, n), parts = w.slices * SLICES + 1;
    double trace = 0.0, turning = 0.0;
    for (int64_t part = 0; part < G * parts; part++) {
        const double *last = w.last + (blockIdx.x * G * parts + part) * 2 * R;
        if (turns) {
            trace += last[2 * i] + last[2 * i + 1];
            turning += last[R + 2 * i + 1] - last[R + 2 * i];
        } else {
            trace += last[i];
        }
    }
    double *totals = w.totals + i, grows[AHEAD][SPAN_CHUNKS][2];
    const int64_t last = slot0 + n_spans_of(span) - 1;
    for (int64_t slot = last; slot >= slot0; slot -= AHEAD) {
        const auto place = [&](int j) {
            return totals + (max(slot - j, slot0) * H + h) * SPAN_CHUNKS * 2 * K;
        };
#pragma unroll
        for (int j = 0; j < AHEAD; j++) {
#pragma unroll
            for (int c = 0; c < SPAN_CHUNKS; c++) {
                grows[j][c][0] = place(j)[c * 2 * K], grows[j][c][1] = place(j)[c * 2 * K + K];
            }
        }
#pragma unroll
        for (int j = 0; j < AHEAD; j++) {
            if (slot - j < slot0) break;
#pragma unroll
            for (int c = SPAN_CHUNKS - 1; c >= 0; c--) {
                place(j)[c * 2 * K] = trace, place(j)[c * 2 * K + K] = turning;
                trace += grows[j][c][0], turning += grows[j][c][1];
            }
        }
    }
}

/* dla and dtheta of a head of a span. */
template <typename T>
__global__ void __launch_bounds__(256)
span_decay_kernel(const __grid_constant__ mn_bayes_args p, const __grid_constant__ span_work w) {
    constexpr int AHEAD = 8;    // numbers of a thread that are loaded together
    const int64_t H = p.call.H, slot = blockIdx.x / H, h = blockIdx.x % H;
    const mn_tile_span tile = mn_tile_at(p.call, SPAN_TOKENS, slot);
    if (tile.n_rows == 0 || w.steep[tile.n * H + h]) return;
    const int K = (int)p.call.K, count = (int)tile.n_rows * K;
    const mn_out to[] = { p.grad.la, p.grad.theta };
    const double *totals = w.totals + blockIdx.x * (int64_t)SPAN_CHUNKS * 2 * K;
    const float *locals = w.local + blockIdx.x * (int64_t)SPAN_TOKENS * 2 * K;
#pragma unroll
    for (int which = 0; which < 2; which++) {
        T *first = mn_row<T>(to[which], tile.span.b, tile.span.t0 + tile.first, h);
        for (int base = threadIdx.x; first && base < count; base += AHEAD * 256) {
            double behind[AHEAD];
            float local[AHEAD];
#pragma unroll
            for (int j = 0; j < AHEAD; j++) {
                const int at = min(base + 256 * j, count - 1), t = at / K, i = at % K + which * K;
                behind[j] = totals[t / CHUNK * 2 * K + i], local[j] = locals[t * 2 * K + i];
            }
#pragma unroll
            for (int j = 0; j < AHEAD; j++) {
                const int at = base + 256 * j, t = at / K, i = at % K;
                if (at >= count) break;
                mn_put(first + t * to[which].stride[1] + i, (float)(behind[j] + (double)local[j]));
            }
        }
    }
}

#endif
