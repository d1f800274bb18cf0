/* curvature.cu - the query contracted along the directions in which the keys so far vary, by chunks
 * on tensor cores. Definition and gradients in ref/curvature.c, chunk form in vec/curvature.c:
 *
 *   Y = Q R + tril(Q K' - m) K - m s'     m_t = s_t.q_t / n_t     qt_t = q_t - gamma_t / n_t y_t
 *
 * s_t.q_t is s.q_t and row t of tril(Q K') summed up, so the mean costs no product of its own.
 * Backward goes there with dQt in place of Q, and back with Z = diag(-gamma / n) dQt and the
 * symmetric G = D + D':
 *
 *   dK = K G + tril(Q K' - m)'Z + tril(Z K' - mz)'Q + e        G <- G + Z'Q + Q'Z
 *
 * Sequences are cut into segments, so that long ones fill the GPU: one kernel sums what each adds
 * to R and s (or G and e), a second one adds these up in their order, and the main kernels start
 * every segment from there. A block has 64 columns of R; the first segment starts from the caller's
 * state. */
#include "kernels/cuda/panel.cuh"

enum { THREADS = 256, WARPS = 8, SEGMENT = 512, SLICE = 64, WIDEST = 256 };
enum { SLICE_PITCH = SLICE + MN_PANEL_PAD };

/* Chunks and who has which tile of a product, for keys of up to KP numbers. */
template <typename T, int KP>
struct sizes {
    static constexpr int chunk = (sizeof(T) == 2 ? 64 : 32) / (KP == 256 ? 2 : 1);
    static constexpr int pitch = KP + MN_PANEL_PAD, score_pitch = chunk + MN_PANEL_PAD;
    static constexpr int down = chunk / 16, across = WARPS / down;    // tiles of a chunk's rows
    static constexpr int columns = SLICE / across;
    static constexpr int state_n = KP == 64 ? 4 : 8;                  // tiles of R that a warp has
    static constexpr int state_across = SLICE / 8 / state_n;
    static constexpr int state_tiles = KP / 16 * state_across / WARPS;
};

/* Part of a sequence. */
struct segment {
    int64_t n, first, slot;
    int rows;
    mn_span span;
    bool there, last;    // a packed call has slots without a segment
};

__host__ __device__ static inline int64_t slots_of(const mn_call &call) {
    if (call.cu_seqlens) return call.T / SEGMENT + call.n_seqs;
    return call.B * max((call.T + SEGMENT - 1) / SEGMENT, (int64_t)1);
}

__device__ static segment segment_at(const mn_call &call, int64_t slot) {
    segment s;
    s.slot = slot;
    if (call.cu_seqlens || call.T > 0) {
        const mn_tile_span tile = mn_tile_at(call, SEGMENT, slot);
        s.n = tile.n, s.first = tile.first, s.rows = (int)tile.n_rows, s.span = tile.span;
    } else {
        s.n = slot, s.first = 0, s.rows = 0, s.span = mn_span_at(call, slot);
    }
    s.there = s.rows > 0 || s.first == 0;
    s.last = s.there && s.first + s.rows == s.span.length;
    return s;
}

/* A block's work: columns [column0, column0 + SLICE) of head h of a segment. */
struct place {
    segment s;
    int64_t h;
    int slice, column0;
};

__device__ static place place_of(const mn_call &call, int slices) {
    place at;
    at.slice = (int)(blockIdx.x % slices);
    at.column0 = at.slice * SLICE;
    at.h = blockIdx.x / slices % call.H;
    at.s = segment_at(call, blockIdx.x / slices / call.H);
    return at;
}

/* Where a segment's sums lie: K rows and one more for the vector. */
__host__ __device__ static inline int64_t state_size(int64_t K) {
    return (K + 1) * K;
}

__device__ static double count_before(const mn_curvature_args &p, int64_t n) {
    return (double)(p.counts0 ? p.counts0[n] : p.n0);
}

/* What storing x as T rounds away. */
template <typename T>
__device__ static float rest(float x) {
    T stored;
    mn_put(&stored, x);
    return x - mn_float(stored);
}

/* ---- the part of a state that a warp holds --------------------------------------------------- */

template <typename T, int KP>
struct matrix {
    using z = sizes<T, KP>;
    mn_panel_sum<z::state_n> tile[z::state_tiles];

    __device__ static int row0(int i) {
        return (threadIdx.x / 32 / z::state_across + i * (WARPS / z::state_across)) * 16;
    }

    __device__ static int column0() {
        return threadIdx.x / 32 % z::state_across * z::state_n * 8;
    }

    template <typename F>
    __device__ void each(F use) {
#pragma unroll
        for (int i = 0; i < z::state_tiles; i++) {
            tile[i].each([&](float &x, int row, int column) {
                use(x, row0(i) + row, column0() + column);
            });
        }
    }

    /* += A'B over a chunk; B starts at the slice */
    __device__ void add(const T *a, const T *b) {
#pragma unroll
        for (int i = 0; i < z::state_tiles; i++) {
            mn_panel_product<MN_TURNED, MN_PLAIN>(tile[i], a + row0(i), z::pitch, b + column0(),
                                                  z::pitch, z::chunk);
        }
    }

    __device__ void put(T *to) {
#pragma unroll
        for (int i = 0; i < z::state_tiles; i++) {
            tile[i].pairs([&](const float *x, int row, int column) {
                T *at = to + (row0(i) + row) * SLICE_PITCH + column0() + column;
                mn_put_pair(at, x[0], x[1]);
            });
        }
    }

    /* What `put` rounds away. */
    __device__ void put_rest(T *to) {
#pragma unroll
        for (int i = 0; i < z::state_tiles; i++) {
            tile[i].pairs([&](const float *x, int row, int column) {
                T *at = to + (row0(i) + row) * SLICE_PITCH + column0() + column;
                mn_put_pair(at, rest<T>(x[0]), rest<T>(x[1]));
            });
        }
    }

    /* From a state of the caller (its symmetric part, `times` over) or from the sums in front. */
    __device__ void load(const float *given, const float *sums, float times, int64_t K, int first) {
        each([&](float &x, int i, int j) {
            const int64_t column = first + j;
            x = 0.0f;
            if (i >= K || column >= K) return;
            if (sums) x = sums[i * K + column];
            else if (given) x = times * (given[i * K + column] + given[column * K + i]);
        });
    }

    __device__ void store(float *to, float times, int64_t K, int first) {
        each([&](float &x, int i, int j) {
            if (to && i < K && first + j < K) to[i * K + first + j] = times * x;
        });
    }
};

/* sum over a chunk's tokens of column i of a panel */
template <typename T>
__device__ static float column_sum(const T *panel, int pitch, int chunk, int i) {
    float sum = 0.0f;
#pragma unroll 8
    for (int t = 0; t < chunk; t++) sum += mn_float(panel[t * pitch + i]);
    return sum;
}

/* tril(X K') of 16 rows, in registers; the sums of its rows go to `sums`. */
template <typename T, int KP>
__device__ static void scores(mn_panel_sum<sizes<T, KP>::chunk / 8> &sum, float *sums, const T *x,
                              const T *k, int row0) {
    using z = sizes<T, KP>;
    float part[2] = { 0.0f, 0.0f };
    sum.clear();
    mn_panel_product<MN_PLAIN, MN_TURNED>(sum, x + row0 * z::pitch, z::pitch, k, z::pitch, KP);
    sum.each([&](float &p, int row, int column) {
        if (column > row0 + row) p = 0.0f;
        if (row < 8) part[0] += p;
        else part[1] += p;
    });
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int i = 0; i < 2; i++) {
        part[i] += __shfl_xor_sync(0xffffffffu, part[i], 1);
        part[i] += __shfl_xor_sync(0xffffffffu, part[i], 2);
        if (lane % 4 == 0) sums[row0 + lane / 4 + 8 * i] = part[i];
    }
}

/* Scores less their row's mean, still lower triangular; and in `low` what rounding leaves. */
template <typename T, int KP>
__device__ static void put_scores(T *to, mn_panel_sum<sizes<T, KP>::chunk / 8> &sum,
                                  const float *mean, int row0, T *low = NULL) {
    using z = sizes<T, KP>;
    sum.pairs([&](const float *x, int row, int column) {
        const int t = row0 + row, at = t * z::score_pitch + column;
        const float left = column > t ? 0.0f : x[0] - mean[t];
        const float right = column + 1 > t ? 0.0f : x[1] - mean[t];
        mn_put_pair(to + at, left, right);
        if (low) mn_put_pair(low + at, rest<T>(left), rest<T>(right));
    });
}

/* s.x of tokens first, first + step, ... by one warp each */
template <typename T, int KP>
__device__ static void dots(float *to, const float *s, const T *x, int first, int step) {
    using z = sizes<T, KP>;
    const int lane = threadIdx.x % 32;
    for (int t = first; t < z::chunk; t += step) {
        float sum = 0.0f;
#pragma unroll
        for (int i = 0; i < KP; i += 32) {
            sum = fmaf(s[i + lane], mn_float(x[t * z::pitch + i + lane]), sum);
        }
        sum = mn_warp_sum(sum);
        if (lane == 0) to[t] = sum;
    }
}

/* ---- what segments add ----------------------------------------------------------------------- */

template <typename T, int KP>
struct moment_room {
    using z = sizes<T, KP>;
    alignas(16) T a[z::chunk * z::pitch];
    alignas(16) T b[z::chunk * z::pitch];
};

/* d becomes z = -gamma / n d */
template <typename T, int KP>
__device__ static void weigh(T *d, const mn_curvature_args &p, const place &at, int64_t t,
                             int count, double before) {
    using z = sizes<T, KP>;
    for (int i = threadIdx.x; i < count * KP; i += THREADS) {
        const int token = i / KP;
        T *x = d + token * z::pitch + i % KP;
        const float gamma = mn_float(
            *mn_row<T>(p.gamma, at.s.span.b, at.s.span.t0 + t + token, at.h));
        const float a = -gamma / (float)(before + (double)(t + token + 1));
        mn_put(x, a * mn_float(*x));
    }
}

/* K'K and the sum of k; or, going back, Z'Q + Q'Z. */
template <typename T, int KP, bool BACK>
__global__ void __launch_bounds__(THREADS, KP == 256 ? 1 : 2)
curvature_moments_kernel(const __grid_constant__ mn_curvature_args p, float *states, int slices,
                         bool packs) {
    using z = sizes<T, KP>;
    extern __shared__ __align__(128) unsigned char bytes[];
    moment_room<T, KP> &room = *(moment_room<T, KP> *)bytes;
    const place at = place_of(p.call, slices);
    const int64_t K = p.call.K;
    if (!at.s.there || (BACK ? at.s.first == 0 : at.s.last)) return;
    float *state = states + (at.s.slot * p.call.H + at.h) * state_size(K), sum = 0.0f;
    const double before = count_before(p, at.s.n);
    matrix<T, KP> R;
#pragma unroll
    for (int i = 0; i < z::state_tiles; i++) R.tile[i].clear();
    for (int start = 0; start < at.s.rows; start += z::chunk) {
        const int count = min(z::chunk, at.s.rows - start);
        const int64_t t = at.s.first + start;
        __syncthreads();
        mn_panel_fetch(room.a, z::pitch, z::chunk, KP, BACK ? p.cot.qt : p.k, at.s.span, at.h, t,
                       count, K, packs);
        if (BACK) {
            mn_panel_fetch(room.b, z::pitch, z::chunk, KP, p.q, at.s.span, at.h, t, count, K,
                           packs);
            __syncthreads();
            weigh<T, KP>(room.a, p, at, t, count, before);
        }
        __syncthreads();
        if (BACK) {
            R.add(room.a, room.b + at.column0);
            R.add(room.b, room.a + at.column0);
        } else {
            R.add(room.a, room.a + at.column0);
            if (threadIdx.x < SLICE) {
                sum += column_sum(room.a, z::pitch, z::chunk, at.column0 + (int)threadIdx.x);
            }
        }
    }
    R.store(state, 1.0f, K, at.column0);
    const int64_t column = at.column0 + threadIdx.x;
    if (!BACK && threadIdx.x < SLICE && column < K) state[K * K + column] = sum;
}

/* Sums up to and with each segment but the last, in place, from the caller's state on; going back,
 * down to and with each but the first. One thread has one number of one head. */
template <bool BACK>
__global__ void __launch_bounds__(THREADS)
curvature_scan_kernel(const __grid_constant__ mn_curvature_args p, float *states) {
    const int64_t K = p.call.K, size = state_size(K);
    const int64_t at = blockIdx.x * (int64_t)THREADS + threadIdx.x;
    if (at >= size * p.call.H * mn_n_spans(p.call)) return;
    const int64_t element = at % size, h = at / size % p.call.H, n = at / size / p.call.H;
    const mn_span span = mn_span_at(p.call, n);
    const int64_t i = element / K, j = element % K, count = (span.length + SEGMENT - 1) / SEGMENT;
    const int64_t slot0 = p.call.cu_seqlens ? span.t0 / SEGMENT + n
                                            : n * max(count, (int64_t)1);
    const float *matrix = mn_row<float>(BACK ? p.cot.kk : p.kk0, n, 0, h);
    const float *vector = mn_row<float>(BACK ? p.cot.ks : p.ks0, n, 0, h);
    float sum = mn_get(vector, j);
    if (i < K) {
        sum = (BACK ? 1.0f : 0.5f) * (mn_get(matrix, i * K + j) + mn_get(matrix, j * K + i));
    }
    for (int64_t s = 0; s + 1 < count; s++) {
        float *own = states + ((slot0 + (BACK ? count - 1 - s : s)) * p.call.H + h) * size;
        sum += own[element];
        own[element] = sum;
    }
}

/* ---- forward --------------------------------------------------------------------------------- */

template <typename T, int KP>
struct forward_room {
    using z = sizes<T, KP>;
    alignas(16) T q[z::chunk * z::pitch];
    alignas(16) T k[z::chunk * z::pitch];
    alignas(16) T R[KP * SLICE_PITCH];
    alignas(16) T P[z::chunk * z::score_pitch];
    float s[KP], within[z::chunk], before[z::chunk], mean[z::chunk], each[z::chunk];
};

/* The sums that the scan left for a segment: behind the one before it. */
__device__ static const float *sums_for(const float *states, const mn_call &call, const place &at,
                                        int64_t slot) {
    return states + (slot * call.H + at.h) * state_size(call.K);
}

/* Y of the warp's tile: += X R + scores K */
template <typename T, int KP>
__device__ static void apply_moment(mn_panel_sum<sizes<T, KP>::columns / 8> &Y, const T *x,
                                    const T *R, const T *P, const T *k, int column0) {
    using z = sizes<T, KP>;
    const int row0 = threadIdx.x / 32 % z::down * 16;
    const int column = threadIdx.x / 32 / z::down * z::columns;
    mn_panel_product<MN_PLAIN, MN_PLAIN>(Y, x + row0 * z::pitch, z::pitch, R + column, SLICE_PITCH,
                                         KP);
    mn_panel_product<MN_PLAIN, MN_PLAIN>(Y, P + row0 * z::score_pitch, z::score_pitch,
                                         k + column0 + column, z::pitch, row0 + 16);
}

template <typename T, int KP>
__global__ void __launch_bounds__(THREADS, KP == 256 ? 1 : 2)
curvature_forward_kernel(const __grid_constant__ mn_curvature_args p, const float *states,
                         int slices, bool packs) {
    using z = sizes<T, KP>;
    extern __shared__ __align__(128) unsigned char bytes[];
    forward_room<T, KP> &room = *(forward_room<T, KP> *)bytes;
    const place at = place_of(p.call, slices);
    if (!at.s.there) return;
    const int64_t K = p.call.K, h = at.h;
    const int warp = threadIdx.x / 32;
    const double seen = count_before(p, at.s.n);
    const float *sums = at.s.first > 0 ? sums_for(states, p.call, at, at.s.slot - 1) : NULL;
    const float *vector = sums ? sums + K * K : mn_row<float>(p.ks0, at.s.n, 0, h);
    matrix<T, KP> R;
    R.load(mn_row<float>(p.kk0, at.s.n, 0, h), sums, 0.5f, K, at.column0);
    for (int i = threadIdx.x; i < KP; i += THREADS) room.s[i] = i < K ? mn_get(vector, i) : 0.0f;
    for (int start = 0; start < at.s.rows; start += z::chunk) {
        const int count = min(z::chunk, at.s.rows - start);
        const int64_t t = at.s.first + start;
        mn_panel_fetch(room.q, z::pitch, z::chunk, KP, p.q, at.s.span, h, t, count, K, packs);
        mn_panel_fetch(room.k, z::pitch, z::chunk, KP, p.k, at.s.span, h, t, count, K, packs);
        R.put(room.R);
        if (threadIdx.x < z::chunk) {
            room.each[threadIdx.x] = (float)(1.0 / (seen + (double)(t + threadIdx.x + 1)));
        }
        __syncthreads();
        mn_panel_sum<z::chunk / 8> P;
        if (warp < z::down) scores<T, KP>(P, room.within, room.q, room.k, warp * 16);
        else dots<T, KP>(room.before, room.s, room.q, warp - z::down, WARPS - z::down);
        __syncthreads();
        if (threadIdx.x < z::chunk) {
            const int i = threadIdx.x;
            room.mean[i] = (room.within[i] + room.before[i]) * room.each[i];
        }
        __syncthreads();
        if (warp < z::down) put_scores<T, KP>(room.P, P, room.mean, warp * 16);
        __syncthreads();
        mn_panel_sum<z::columns / 8> Y;
        Y.clear();
        apply_moment<T, KP>(Y, room.q, room.R, room.P, room.k, at.column0);
        Y.each([&](float &y, int row, int column) {
            const int token = warp % z::down * 16 + row;
            const int64_t j = at.column0 + warp / z::down * z::columns + column;
            T *qt = mn_row<T>(p.qt, at.s.span.b, at.s.span.t0 + t + token, h);
            if (token >= count || j >= K || !qt) return;
            const float gamma = mn_float(
                *mn_row<T>(p.gamma, at.s.span.b, at.s.span.t0 + t + token, h));
            const float q = mn_float(room.q[token * z::pitch + j]);
            const float centred = fmaf(-room.mean[token], room.s[j], y);
            mn_put(qt + j, fmaf(-gamma * room.each[token], centred, q));
        });
        R.add(room.k, room.k + at.column0);
        __syncthreads();
        for (int i = threadIdx.x; i < KP; i += THREADS) {
            room.s[i] += column_sum(room.k, z::pitch, z::chunk, i);
        }
        __syncthreads();
    }
    if (!at.s.last) return;
    R.store(mn_row<float>(p.kk, at.s.n, 0, h), 1.0f, K, at.column0);
    float *last = mn_row<float>(p.ks, at.s.n, 0, h);
    const int64_t column = at.column0 + threadIdx.x;
    __syncthreads();
    if (last && threadIdx.x < SLICE && column < K) last[column] = room.s[column];
}

/* ---- backward -------------------------------------------------------------------------------- */

/* Work space: sums of segments there and back; s_t.q_t / n_t and s_t.d_t / n_t of every token; the
 * parts of -n dgamma that slices have. */
struct work {
    float *there, *back, *means, *parts;
};

template <typename T, int KP>
struct there_room {
    using z = sizes<T, KP>;
    alignas(16) T q[z::chunk * z::pitch];
    alignas(16) T k[z::chunk * z::pitch];
    alignas(16) T d[z::chunk * z::pitch];
    alignas(16) T R[KP * SLICE_PITCH];
    alignas(16) T P[z::chunk * z::score_pitch];
    /* What bf16 rounds away of R and P: y.q, which dgamma is, would show it. */
    static constexpr bool is_narrow = sizeof(T) == 2;
    alignas(16) T R_low[is_narrow ? KP * SLICE_PITCH : 1];
    alignas(16) T P_low[is_narrow ? z::chunk * z::score_pitch : 1];
    float s[KP], within[2][z::chunk], before[2][z::chunk], mean[2][z::chunk], each[z::chunk];
    float gamma[z::chunk], part[z::across][z::chunk];
};

/* Number of token (t, h) of a segment among all rows. */
__device__ static int64_t row_of(const mn_call &call, const place &at, int64_t t) {
    return (at.s.span.b * call.T + at.s.span.t0 + t) * call.H + at.h;
}

/* dq, and this warp's part of y.q for each of its rows. */
template <typename T, int KP>
__device__ static void query_back(there_room<T, KP> &room, const mn_curvature_args &p,
                                  const place &at, int64_t t, int count) {
    using z = sizes<T, KP>;
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const int row0 = warp % z::down * 16, column0 = warp / z::down * z::columns;
    mn_panel_sum<z::columns / 8> Y;
    float part[2] = { 0.0f, 0.0f };
    Y.clear();
    apply_moment<T, KP>(Y, room.d, room.R, room.P, room.k, at.column0);
    if (room.is_narrow) {
        apply_moment<T, KP>(Y, room.d, room.R_low, room.P_low, room.k, at.column0);
    }
    Y.each([&](float &y, int row, int column) {
        const int token = row0 + row, j = at.column0 + column0 + column;
        const float q = mn_float(room.q[token * z::pitch + j]);
        const float d = mn_float(room.d[token * z::pitch + j]);
        const float centred = fmaf(-room.mean[1][token], room.s[j], y);
        if (row < 8) part[0] = fmaf(q, centred, part[0]);
        else part[1] = fmaf(q, centred, part[1]);
        T *dq = mn_row<T>(p.grad.q, at.s.span.b, at.s.span.t0 + t + token, at.h);
        if (!dq || token >= count || j >= p.call.K) return;
        mn_put(dq + j, fmaf(-room.gamma[token] * room.each[token], centred, d));
    });
#pragma unroll
    for (int i = 0; i < 2; i++) {
        part[i] += __shfl_xor_sync(0xffffffffu, part[i], 1);
        part[i] += __shfl_xor_sync(0xffffffffu, part[i], 2);
        if (lane % 4 == 0) room.part[warp / z::down][row0 + lane / 4 + 8 * i] = part[i];
    }
}

/* The means of a chunk's tokens and the scores of d. */
template <typename T, int KP>
__device__ static void there_scores(there_room<T, KP> &room) {
    using z = sizes<T, KP>;
    const int warp = threadIdx.x / 32;
    mn_panel_sum<z::chunk / 8> P;
    if (warp < z::down) scores<T, KP>(P, room.within[1], room.d, room.k, warp * 16);
    else if (warp < 2 * z::down) {
        scores<T, KP>(P, room.within[0], room.q, room.k, (warp - z::down) * 16);
    }
    dots<T, KP>(room.before[0], room.s, room.q, warp, WARPS);
    dots<T, KP>(room.before[1], room.s, room.d, warp, WARPS);
    __syncthreads();
    for (int i = threadIdx.x; i < 2 * z::chunk; i += THREADS) {
        const int which = i / z::chunk, t = i % z::chunk;
        room.mean[which][t] = (room.within[which][t] + room.before[which][t]) * room.each[t];
    }
    __syncthreads();
    if (warp < z::down) {
        put_scores<T, KP>(room.P, P, room.mean[1], warp * 16, room.is_narrow ? room.P_low : NULL);
    }
    __syncthreads();
}

template <typename T, int KP>
__global__ void __launch_bounds__(THREADS, KP == 256 ? 1 : 2)
curvature_there_kernel(const __grid_constant__ mn_curvature_args p, work w, int slices,
                       bool packs) {
    using z = sizes<T, KP>;
    extern __shared__ __align__(128) unsigned char bytes[];
    there_room<T, KP> &room = *(there_room<T, KP> *)bytes;
    const place at = place_of(p.call, slices);
    if (!at.s.there) return;
    const int64_t K = p.call.K, h = at.h, rows = p.call.B * p.call.T * p.call.H;
    const int64_t b = at.s.span.b, t0 = at.s.span.t0;
    const double seen = count_before(p, at.s.n);
    const float *sums = at.s.first > 0 ? sums_for(w.there, p.call, at, at.s.slot - 1) : NULL;
    const float *vector = sums ? sums + K * K : mn_row<float>(p.ks0, at.s.n, 0, h);
    float e = 0.0f;
    matrix<T, KP> R;
    R.load(mn_row<float>(p.kk0, at.s.n, 0, h), sums, 0.5f, K, at.column0);
    for (int i = threadIdx.x; i < KP; i += THREADS) room.s[i] = i < K ? mn_get(vector, i) : 0.0f;
    for (int start = 0; start < at.s.rows; start += z::chunk) {
        const int count = min(z::chunk, at.s.rows - start);
        const int64_t t = at.s.first + start;
        mn_panel_fetch(room.q, z::pitch, z::chunk, KP, p.q, at.s.span, h, t, count, K, packs);
        mn_panel_fetch(room.k, z::pitch, z::chunk, KP, p.k, at.s.span, h, t, count, K, packs);
        mn_panel_fetch(room.d, z::pitch, z::chunk, KP, p.cot.qt, at.s.span, h, t, count, K, packs);
        R.put(room.R);
        if (room.is_narrow) R.put_rest(room.R_low);
        if (threadIdx.x < z::chunk) {
            const int i = threadIdx.x;
            room.each[i] = (float)(1.0 / (seen + (double)(t + i + 1)));
            room.gamma[i] = i < count ? mn_float(*mn_row<T>(p.gamma, b, t0 + t + i, h)) : 0.0f;
        }
        __syncthreads();
        there_scores<T, KP>(room);
        query_back<T, KP>(room, p, at, t, count);
        R.add(room.k, room.k + at.column0);
        __syncthreads();
        if (threadIdx.x < count) {
            const int i = threadIdx.x;
            const int64_t row = row_of(p.call, at, t + i);
            float part = 0.0f;
            for (int a = 0; a < z::across; a++) part += room.part[a][i];
            w.parts[at.slice * rows + row] = part;
            if (at.slice == 0) w.means[2 * row] = room.mean[0][i];
            if (at.slice == 0) w.means[2 * row + 1] = room.mean[1][i];
        }
        if (threadIdx.x < SLICE) {
            for (int i = 0; i < count; i++) {
                const int j = i * z::pitch + at.column0 + threadIdx.x;
                const float both = fmaf(room.mean[0][i], mn_float(room.d[j]),
                                        room.mean[1][i] * mn_float(room.q[j]));
                e = fmaf(room.gamma[i] * room.each[i], both, e);
            }
        }
        for (int i = threadIdx.x; i < KP; i += THREADS) {
            room.s[i] += column_sum(room.k, z::pitch, z::chunk, i);
        }
        __syncthreads();
    }
    const int64_t column = at.column0 + threadIdx.x;
    float *state = w.back + (at.s.slot * p.call.H + h) * state_size(K);
    if (threadIdx.x < SLICE && column < K) state[K * K + column] = e;
}

template <typename T, int KP>
struct back_room {
    using z = sizes<T, KP>;
    alignas(16) T q[z::chunk * z::pitch];
    alignas(16) T k[z::chunk * z::pitch];
    alignas(16) T z_[z::chunk * z::pitch];
    alignas(16) T G[KP * SLICE_PITCH];
    alignas(16) T P[2][z::chunk * z::score_pitch];
    float e[SLICE], rows[z::chunk], mean[2][z::chunk];
};

/* dK of the warp's tile. */
template <typename T, int KP>
__device__ static void key_back(back_room<T, KP> &room, const mn_curvature_args &p, const place &at,
                                int64_t t, int count) {
    using z = sizes<T, KP>;
    const int warp = threadIdx.x / 32, row0 = warp % z::down * 16;
    const int column0 = warp / z::down * z::columns;
    mn_panel_sum<z::columns / 8> dk;
    dk.clear();
    mn_panel_product<MN_PLAIN, MN_PLAIN>(dk, room.k + row0 * z::pitch, z::pitch, room.G + column0,
                                         SLICE_PITCH, KP);
    const int first = row0 * z::score_pitch + row0;    // of tokens before row0 there is nothing
    const int from = row0 * z::pitch + at.column0 + column0;
    mn_panel_product<MN_TURNED, MN_PLAIN>(dk, room.P[0] + first, z::score_pitch, room.z_ + from,
                                          z::pitch, z::chunk - row0);
    mn_panel_product<MN_TURNED, MN_PLAIN>(dk, room.P[1] + first, z::score_pitch, room.q + from,
                                          z::pitch, z::chunk - row0);
    dk.each([&](float &x, int row, int column) {
        const int token = row0 + row;
        const int64_t j = at.column0 + column0 + column;
        T *to = mn_row<T>(p.grad.k, at.s.span.b, at.s.span.t0 + t + token, at.h);
        if (to && token < count && j < p.call.K) mn_put(to + j, x + room.e[column0 + column]);
    });
}

template <typename T, int KP>
__global__ void __launch_bounds__(THREADS, KP == 256 ? 1 : 2)
curvature_back_kernel(const __grid_constant__ mn_curvature_args p, work w, int slices, bool packs) {
    using z = sizes<T, KP>;
    extern __shared__ __align__(128) unsigned char bytes[];
    back_room<T, KP> &room = *(back_room<T, KP> *)bytes;
    const place at = place_of(p.call, slices);
    if (!at.s.there) return;
    const int64_t K = p.call.K, h = at.h, rows = p.call.B * p.call.T * p.call.H;
    const int64_t b = at.s.span.b, t0 = at.s.span.t0;
    const int warp = threadIdx.x / 32;
    const double seen = count_before(p, at.s.n);
    const float *sums = at.s.last ? NULL : sums_for(w.back, p.call, at, at.s.slot + 1);
    const float *vector = sums ? sums + K * K : mn_row<float>(p.cot.ks, at.s.n, 0, h);
    const int64_t own = at.column0 + threadIdx.x;
    matrix<T, KP> G;
    G.load(mn_row<float>(p.cot.kk, at.s.n, 0, h), sums, 1.0f, K, at.column0);
    if (threadIdx.x < SLICE) room.e[threadIdx.x] = own < K ? mn_get(vector, own) : 0.0f;
    const int n_chunks = (at.s.rows + z::chunk - 1) / z::chunk;
    for (int c = n_chunks - 1; c >= 0; c--) {
        const int start = c * z::chunk, count = min(z::chunk, at.s.rows - start);
        const int64_t t = at.s.first + start;
        mn_panel_fetch(room.q, z::pitch, z::chunk, KP, p.q, at.s.span, h, t, count, K, packs);
        mn_panel_fetch(room.k, z::pitch, z::chunk, KP, p.k, at.s.span, h, t, count, K, packs);
        mn_panel_fetch(room.z_, z::pitch, z::chunk, KP, p.cot.qt, at.s.span, h, t, count, K, packs);
        G.put(room.G);
        if (threadIdx.x < z::chunk) {
            const int i = threadIdx.x;
            float gamma = 0.0f, mean = 0.0f, mean_d = 0.0f;
            const float each = (float)(1.0 / (seen + (double)(t + i + 1)));
            if (i < count) {
                const int64_t row = row_of(p.call, at, t + i);
                gamma = mn_float(*mn_row<T>(p.gamma, b, t0 + t + i, h));
                mean = w.means[2 * row], mean_d = w.means[2 * row + 1];
                T *dgamma = mn_row<T>(p.grad.gamma, b, t0 + t + i, h);
                float part = 0.0f;
                for (int a = 0; a < slices; a++) part += w.parts[a * rows + row];
                if (dgamma && at.slice == 0) mn_put(dgamma, -part * each);
            }
            room.mean[0][i] = mean, room.mean[1][i] = -gamma * each * mean_d;
        }
        __syncthreads();
        weigh<T, KP>(room.z_, p, at, t, count, seen);
        __syncthreads();
        mn_panel_sum<z::chunk / 8> P;
        if (warp < z::down) {
            scores<T, KP>(P, room.rows, room.q, room.k, warp * 16);
            put_scores<T, KP>(room.P[0], P, room.mean[0], warp * 16);
        } else if (warp < 2 * z::down) {
            const int row0 = (warp - z::down) * 16;
            P.clear();
            mn_panel_product<MN_PLAIN, MN_TURNED>(P, room.z_ + row0 * z::pitch, z::pitch, room.k,
                                                  z::pitch, KP);
            put_scores<T, KP>(room.P[1], P, room.mean[1], row0);
        }
        __syncthreads();
        key_back<T, KP>(room, p, at, t, count);
        G.add(room.z_, room.q + at.column0);
        G.add(room.q, room.z_ + at.column0);
        __syncthreads();
        if (threadIdx.x < SLICE) {
            float e = room.e[threadIdx.x];
            for (int i = 0; i < count; i++) {
                const int j = i * z::pitch + at.column0 + threadIdx.x;
                e = fmaf(-room.mean[0][i], mn_float(room.z_[j]), e);
                e = fmaf(-room.mean[1][i], mn_float(room.q[j]), e);
            }
            room.e[threadIdx.x] = e;
        }
        __syncthreads();
    }
    if (at.s.first > 0) return;
    G.store(mn_row<float>(p.grad.kk0, at.s.n, 0, h), 0.5f, K, at.column0);
    float *ds = mn_row<float>(p.grad.ks0, at.s.n, 0, h);
    __syncthreads();
    if (ds && threadIdx.x < SLICE && own < K) ds[own] = room.e[threadIdx.x];
}

/* ---- launches -------------------------------------------------------------------------------- */

static size_t slices_of(int64_t K) {
    return K <= 64 ? 1 : K <= 128 ? 2 : 4;
}

/* Floats of the sums of all segments. */
static bool states_size(size_t *count, const mn_call *c) {
    size_t heads;
    return mn_mul_size(&heads, (size_t)slots_of(*c), (size_t)c->H) &&
           mn_mul_size(count, (size_t)c->K + 1, (size_t)c->K) && mn_mul_size(count, *count, heads);
}

static bool tokens_size(size_t *count, const mn_call *c) {
    return mn_mul_size(count, (size_t)c->B, (size_t)c->T) &&
           mn_mul_size(count, *count, (size_t)c->H);
}

MN_CUDA_PLAN(curvature_forward) {
    const mn_call *c = (const mn_call *)args;
    size_t count = 0;
    return (c->T <= SEGMENT || states_size(&count, c)) &&
           mn_mul_size(&plan->shared_bytes, count, sizeof(float));
}

MN_CUDA_PLAN(curvature_backward) {
    const mn_call *c = (const mn_call *)args;
    size_t states, tokens, all;
    return states_size(&states, c) && tokens_size(&tokens, c) &&
           mn_mul_size(&tokens, tokens, 2 + slices_of(c->K)) && mn_mul_size(&all, states, 2) &&
           mn_add_size(&all, all, tokens) && mn_mul_size(&plan->shared_bytes, all, sizeof(float));
}

/* Sets the room of a kernel and starts it on `on` with the blocks of `c`. */
#define START(kernel, room, c, slices, on, ...)                                                    \
    do {                                                                                           \
        const int64_t blocks = slots_of(c) * (c).H * (int64_t)(slices);                            \
        if (blocks > INT32_MAX) return cudaErrorNotSupported;                                      \
        const int code_of_launch = mn_launch_with_room(                                            \
            kernel, dim3((unsigned)blocks), THREADS, sizeof(room), on, __VA_ARGS__);               \
        if (code_of_launch != cudaSuccess) return code_of_launch;                                  \
    } while (0)

static unsigned scan_blocks(const mn_call &c) {
    return mn_blocks(state_size(c.K) * c.H * mn_n_spans(c), THREADS);
}

template <typename T>
static bool packs_of(const mn_curvature_args *p) {
    return mn_panel_packs<T>(p->q, p->call.K) && mn_panel_packs<T>(p->k, p->call.K) &&
           mn_panel_packs<T>(p->cot.qt, p->call.K);
}

template <typename T, int KP>
static int forward_of(const mn_curvature_args *p, float *states, cudaStream_t on) {
    const mn_call &c = p->call;
    const int slices = (int)slices_of(c.K);
    const bool packs = packs_of<T>(p);
    using moments = moment_room<T, KP>;
    using room = forward_room<T, KP>;
    if (c.T > SEGMENT) {
        START((curvature_moments_kernel<T, KP, false>), moments, c, slices, on, *p, states, slices,
              packs);
        curvature_scan_kernel<false><<<scan_blocks(c), THREADS, 0, on>>>(*p, states);
    }
    START((curvature_forward_kernel<T, KP>), room, c, slices, on, *p, states, slices, packs);
    return cudaSuccess;
}

template <typename T, int KP>
static int backward_of(const mn_curvature_args *p, const work &w, cudaStream_t on) {
    const mn_call &c = p->call;
    const int slices = (int)slices_of(c.K);
    const bool packs = packs_of<T>(p);
    using moments = moment_room<T, KP>;
    using there = there_room<T, KP>;
    using back = back_room<T, KP>;
    if (c.T > SEGMENT) {
        START((curvature_moments_kernel<T, KP, false>), moments, c, slices, on, *p, w.there,
              slices, packs);
        curvature_scan_kernel<false><<<scan_blocks(c), THREADS, 0, on>>>(*p, w.there);
        START((curvature_moments_kernel<T, KP, true>), moments, c, slices, on, *p, w.back, slices,
              packs);
    }
    START((curvature_there_kernel<T, KP>), there, c, slices, on, *p, w, slices, packs);
    if (c.T > SEGMENT) {
        curvature_scan_kernel<true><<<scan_blocks(c), THREADS, 0, on>>>(*p, w.back);
    }
    START((curvature_back_kernel<T, KP>), back, c, slices, on, *p, w, slices, packs);
    return cudaSuccess;
}

/* Calls function<T, KP> for a call's type and keys; `arguments` in parentheses. */
#define BY_WIDTH(function, T, K, arguments)                                                        \
    do {                                                                                           \
        if ((K) <= 64) return function<T, 64> arguments;                                           \
        if ((K) <= 128) return function<T, 128> arguments;                                         \
        return function<T, 256> arguments;                                                         \
    } while (0)

MN_CUDA_LAUNCH(curvature_forward) {
    const mn_curvature_args *p = (const mn_curvature_args *)args;
    const mn_call &c = p->call;
    const cudaStream_t on = (cudaStream_t)stream;
    if (slots_of(c) * c.H == 0) return cudaSuccess;
    if (c.K > WIDEST) return cudaErrorNotSupported;
    float *states = (float *)shared;
    if (c.dtype == MN_BF16) BY_WIDTH(forward_of, mn_bf16, c.K, (p, states, on));
    BY_WIDTH(forward_of, float, c.K, (p, states, on));
}

MN_CUDA_LAUNCH(curvature_backward) {
    const mn_curvature_args *p = (const mn_curvature_args *)args;
    const mn_call &c = p->call;
    const cudaStream_t on = (cudaStream_t)stream;
    size_t states, tokens;
    if (slots_of(c) * c.H == 0) return cudaSuccess;
    if (c.K > WIDEST || !states_size(&states, &c) || !tokens_size(&tokens, &c)) {
        return cudaErrorNotSupported;
    }
    float *at = (float *)shared;
    const work w = { at, at + states, at + 2 * states, at + 2 * states + 2 * tokens };
    if (c.dtype == MN_BF16) BY_WIDTH(backward_of, mn_bf16, c.K, (p, w, on));
    BY_WIDTH(backward_of, float, c.K, (p, w, on));
}
