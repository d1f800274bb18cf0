/* mesa.cu - what ridge regression on all pairs so far predicts for a query (see ref/mesa.c).
 *
 * Forward: sums of chunks (mesa.cuh), then every token's M x = scale q and o = Hkv'x, a block for
 * 16 tokens of a head, which walks there from the chunk's front. Backward: the same with a second
 * right side, Hkv do, for y; sums of the adjoints (A, B); then chunks from behind, token by token.
 * The gradient of a decay is a running sum: what tokens from t on read of writes before t is
 *
 *   dg_t = dg_{t+1} + r_t - beta_t dbeta_t       r_t = x'Hkv do - x'Hkk y = sum of lam x y
 *
 * counted from the pair and the adjoint at the chunk's end, whose product dg is there. */
#include "kernels/cuda/mesa.cuh"

/* Vectors of a block, and its pair. */
struct room {
    float *pair, *kv, *b[2], *cot, *out, *parts;
};

__device__ static room room_at(unsigned char *bytes, const mn_call &c, float *rooms) {
    const int64_t K = c.K, V = c.V;
    float *at = (float *)(bytes + sizeof(mn_mesa_room));
    const auto take = [&](int64_t count) { float *from = at; at += count; return from; };
    room r;
    r.kv = take(K + V), r.b[0] = take(K), r.b[1] = take(K), r.cot = take(V);
    r.out = take(2 * K + V), r.parts = take(MN_MESA_THREADS);
    r.pair = rooms ? rooms + blockIdx.x * K * (K + V) : at;
    return r;
}

static size_t vectors_of(int64_t K, int64_t V) {
    return (size_t)(5 * K + 3 * V + MN_MESA_THREADS) * sizeof(float);
}

template <typename T>
__device__ static void load_token(const room &r, const mn_mesa_args &p, int64_t b, int64_t t,
                                  int64_t h) {
    const T *k = mn_row<T>(p.k, b, t, h), *v = mn_row<T>(p.v, b, t, h);
    for (int64_t i = threadIdx.x; i < p.call.K; i += MN_MESA_THREADS) r.kv[i] = mn_float(k[i]);
    for (int64_t j = threadIdx.x; j < p.call.V; j += MN_MESA_THREADS) {
        r.kv[p.call.K + j] = mn_float(v[j]);
    }
}

__device__ static void load_pair(float *to, const float *from, int64_t count) {
    for (int64_t i = threadIdx.x; i < count; i += MN_MESA_THREADS) to[i] = from[i];
}

/* ---- solving --------------------------------------------------------------------------------- */

template <int CELLS, typename T>
__device__ static void solve(const room &r, const mn_mesa_args &p, const mn_mesa_place &at,
                             mn_mesa_room &memory, const mn_mesa_work &w) {
    const int64_t K = p.call.K, pitch = K + p.call.V;
    const T *lam = mn_row<T>(p.lam, 0, 0, at.h);
    float *const b[2] = { r.b[0], r.b[1] };
    if constexpr (CELLS == 0) {
        mn_mesa_solve_wide<T>(b, r.pair, pitch, lam, K, memory, w.matrices + blockIdx.x * K * K);
    } else {
        mn_mesa_solve<CELLS, T>(b, r.pair, pitch, lam, K, memory);
    }
}

/* x and y of the token, from the pair at it; o or dq. Returns this thread's part of x y. */
template <int CELLS, typename T>
__device__ static float read_token(const room &r, const mn_mesa_args &p, const mn_mesa_place &at,
                                   mn_mesa_room &memory, const mn_mesa_work &w, int64_t t,
                                   bool backward) {
    const int64_t K = p.call.K, V = p.call.V, b = at.tile.span.b, thread = threadIdx.x;
    const T *q = mn_row<T>(p.q, b, t, at.h), *cot = mn_row<T>(p.cot.o, b, t, at.h);
    if (thread < K) {
        r.b[0][thread] = (float)p.scale * mn_float(q[thread]);
        r.b[1][thread] = 0.0f;
    }
    if (backward) {
        for (int64_t j = thread; j < V; j += MN_MESA_THREADS) r.cot[j] = mn_get(cot, j);
        __syncthreads();
        mn_mesa_rows(r.b[1], r.pair + K, K + V, V, r.cot, K);
    }
    __syncthreads();
    solve<CELLS, T>(r, p, at, memory, w);
    if (!backward) {
        T *o = mn_row<T>(p.o, b, t, at.h);
        mn_mesa_columns(r.out, r.pair + K, K + V, V, r.b[0], K, r.parts);
        for (int64_t j = thread; j < V; j += MN_MESA_THREADS) mn_put(o + j, r.out[j]);
        return 0.0f;
    }
    T *dq = mn_row<T>(p.grad.q, b, t, at.h);
    const int64_t row = ((b * p.call.T + t) * p.call.H + at.h) * K;
    if (thread >= K) return 0.0f;
    w.x[row + thread] = r.b[0][thread], w.y[row + thread] = r.b[1][thread];
    if (dq) mn_put(dq + thread, (float)p.scale * r.b[1][thread]);
    return r.b[0][thread] * r.b[1][thread];
}

/* A block takes parts of chunks in turn. CELLS 0: wide ones. */
template <int CELLS, typename T>
__global__ void __launch_bounds__(MN_MESA_THREADS)
solve_kernel(const __grid_constant__ mn_mesa_args p, mn_mesa_work w, int64_t items, bool backward) {
    extern __shared__ __align__(128) unsigned char bytes[];
    constexpr int parts = MN_MESA_CHUNK / MN_MESA_PART;
    mn_mesa_room &memory = *(mn_mesa_room *)bytes;
    const room r = room_at(bytes, p.call, w.rooms);
    const int64_t K = p.call.K, width = K + p.call.V;
    for (int64_t item = blockIdx.x; item < items; item += gridDim.x) {
        const mn_mesa_place at = mn_mesa_here(p.call, item / parts);
        const int first = (int)(item % parts) * MN_MESA_PART;
        const int last = (int)min((int64_t)first + MN_MESA_PART, at.tile.n_rows);
        const int64_t b = at.tile.span.b, t0 = at.tile.span.t0 + at.tile.first;
        float lam = 0.0f;
        if (first >= at.tile.n_rows) continue;
        __syncthreads();
        load_pair(r.pair, w.pairs + at.index * K * width, K * width);
        for (int u = 0; u < last; u++) {
            __syncthreads();
            load_token<T>(r, p, b, t0 + u, at.h);
            __syncthreads();
            const float fall = expf(mn_mesa_log<T>(p, b, t0 + u, at.h));
            const float beta = mn_float(*mn_row<T>(p.beta, b, t0 + u, at.h));
            for (int64_t i = threadIdx.x / 32; i < K; i += MN_MESA_THREADS / 32) {
                const float write = beta * r.kv[i];
                for (int64_t j = threadIdx.x % 32; j < width; j += 32) {
                    float &cell = r.pair[i * width + j];
                    cell = fmaf(write, r.kv[j], fall * cell);
                }
            }
            __syncthreads();
            if (u >= first) lam -= read_token<CELLS, T>(r, p, at, memory, w, t0 + u, backward);
        }
        if (backward && threadIdx.x < K) w.lam[item * K + threadIdx.x] = lam;
    }
}

/* The gradient of lam: parts in their order. */
template <typename T>
__global__ void __launch_bounds__(MN_MESA_THREADS)
lam_kernel(const __grid_constant__ mn_mesa_args p, mn_mesa_work w, int64_t slots) {
    constexpr int parts = MN_MESA_CHUNK / MN_MESA_PART;
    const int64_t h = blockIdx.x, i = threadIdx.x, K = p.call.K;
    T *to = mn_row<T>(p.grad.lam, 0, 0, h);
    float sum = 0.0f;
    if (i >= K) return;
    for (int64_t slot = 0; slot < slots; slot++) {
        const int64_t rows = mn_tile_at(p.call, MN_MESA_CHUNK, slot).n_rows;
        for (int part = 0; part < parts && part * MN_MESA_PART < rows; part++) {
            sum += w.lam[((slot * p.call.H + h) * parts + part) * K + i];
        }
    }
    mn_put(to + i, sum);
}

/* ---- adjoints -------------------------------------------------------------------------------- */

/* (A, B) takes what token t reads, after its decay by `fall` from behind. */
template <typename T>
__device__ static void move_adjoint(const room &r, const mn_mesa_args &p, const mn_mesa_place &at,
                                    const mn_mesa_work &w, int64_t t, float fall) {
    const int64_t K = p.call.K, V = p.call.V, width = K + V, b = at.tile.span.b;
    const int64_t row = ((b * p.call.T + t) * p.call.H + at.h) * K;
    const T *cot = mn_row<T>(p.cot.o, b, t, at.h);
    for (int64_t i = threadIdx.x; i < K; i += MN_MESA_THREADS) {
        r.b[0][i] = w.x[row + i], r.b[1][i] = w.y[row + i];
    }
    for (int64_t j = threadIdx.x; j < V; j += MN_MESA_THREADS) r.cot[j] = mn_get(cot, j);
    load_token<T>(r, p, b, t, at.h);
    __syncthreads();
    for (int64_t i = threadIdx.x / 32; i < K; i += MN_MESA_THREADS / 32) {
        const float x = r.b[0][i], y = r.b[1][i];
        for (int64_t j = threadIdx.x % 32; j < width; j += 32) {
            float &cell = r.pair[i * width + j];
            const float read = j < K ? -0.5f * fmaf(x, r.b[1][j], y * r.b[0][j])
                                     : x * r.cot[j - K];
            cell = fmaf(fall, cell, read);
        }
    }
    __syncthreads();
}

/* Gradients of one token's k, v and beta; returns, in all threads, what its dg adds. */
template <typename T>
__device__ static float put_token(const room &r, const mn_mesa_args &p, const mn_mesa_place &at,
                                  int64_t t) {
    const int64_t K = p.call.K, V = p.call.V, width = K + V, b = at.tile.span.b;
    const float beta = mn_float(*mn_row<T>(p.beta, b, t, at.h));
    const T *lam = mn_row<T>(p.lam, 0, 0, at.h);
    T *dk = mn_row<T>(p.grad.k, b, t, at.h), *dv = mn_row<T>(p.grad.v, b, t, at.h);
    T *dbeta = mn_row<T>(p.grad.beta, b, t, at.h);
    float *Ak = r.out, *Bv = r.out + K, *Bk = r.out + 2 * K;
    float to_beta = 0.0f, read = 0.0f;
    mn_mesa_rows(Ak, r.pair, width, K, r.kv, K);
    mn_mesa_rows(Bv, r.pair + K, width, V, r.kv + K, K);
    mn_mesa_columns(Bk, r.pair + K, width, V, r.kv, K, r.parts);
    for (int64_t i = threadIdx.x; i < K; i += MN_MESA_THREADS) {
        to_beta = fmaf(r.kv[i], Ak[i] + Bv[i], to_beta);
        read = fmaf(mn_float(lam[i]) * r.b[0][i], r.b[1][i], read);
        if (dk) mn_put(dk + i, beta * fmaf(2.0f, Ak[i], Bv[i]));
    }
    for (int64_t j = threadIdx.x; dv && j < V; j += MN_MESA_THREADS) mn_put(dv + j, beta * Bk[j]);
    to_beta = mn_team_sum<MN_MESA_THREADS>(to_beta, r.parts);
    read = mn_team_sum<MN_MESA_THREADS>(read, r.parts);
    if (dbeta && threadIdx.x == 0) mn_put(dbeta, to_beta);
    return fmaf(-beta, to_beta, read);
}

template <typename T>
__global__ void __launch_bounds__(MN_MESA_THREADS)
adjoint_kernel(const __grid_constant__ mn_mesa_args p, mn_mesa_work w, int64_t items) {
    extern __shared__ __align__(128) unsigned char bytes[];
    const room r = room_at(bytes, p.call, w.rooms);
    const int64_t K = p.call.K, size = K * (K + p.call.V);
    for (int64_t item = blockIdx.x; item < items; item += gridDim.x) {
        const mn_mesa_place at = mn_mesa_here(p.call, item);
        const int64_t b = at.tile.span.b, t0 = at.tile.span.t0 + at.tile.first;
        const bool last = at.tile.first + at.tile.n_rows == at.tile.span.length;
        const float *behind = last ? w.last + (at.tile.n * p.call.H + at.h) * size
                                   : w.pairs + (at.index + p.call.H) * size;
        float met = 0.0f, fall = 1.0f;
        if (at.tile.n_rows == 0) continue;
        __syncthreads();
        load_pair(r.pair, w.adjoints + at.index * size, size);
        for (int64_t i = threadIdx.x; i < size; i += MN_MESA_THREADS) {
            met = fmaf(r.pair[i], behind[i], met);
        }
        double dg = (double)mn_team_sum<MN_MESA_THREADS>(met, r.parts);
        for (int64_t t = t0 + at.tile.n_rows - 1; t >= t0; t--) {
            T *to = mn_row<T>(p.grad.g, b, t, at.h);
            __syncthreads();
            move_adjoint<T>(r, p, at, w, t, fall);
            dg += (double)put_token<T>(r, p, at, t);
            fall = expf(mn_mesa_log<T>(p, b, t, at.h));
            if (to && threadIdx.x == 0) mn_put(to, (float)dg);
        }
    }
}

/* ---- launches -------------------------------------------------------------------------------- */

static size_t shared_limit(void) {
    int device = 0, limit = 0;
    if (cudaGetDevice(&device) != cudaSuccess) return 0;
    (void)cudaDeviceGetAttribute(&limit, cudaDevAttrMaxSharedMemoryPerBlockOptin, device);
    return (size_t)limit;
}

static bool measure(mn_mesa_extent *to, const mn_call *c, bool backward) {
    const size_t parts = MN_MESA_CHUNK / MN_MESA_PART, limit = shared_limit();
    size_t size, heads, chunks, bytes;
    *to = {};
    to->slots = mn_tile_slots(*c, MN_MESA_CHUNK);
    bool ok = mn_mul_size(&size, (size_t)c->K, (size_t)(c->K + c->V)) &&
              mn_mul_size(&bytes, size, sizeof(float)) &&
              mn_mul_size(&heads, (size_t)mn_n_spans(*c), (size_t)c->H) &&
              mn_mul_size(&chunks, (size_t)to->slots, (size_t)c->H) &&
              mn_mul_size(&to->pairs, chunks, size) && mn_mul_size(&to->last, heads, size) &&
              mn_mul_size(&to->matrices, MN_MESA_BLOCKS, (size_t)(c->K * c->K));
    if (!ok) return false;
    to->falls = chunks;
    to->room_bytes = sizeof(mn_mesa_room) + vectors_of(c->K, c->V);
    if (bytes < limit && to->room_bytes + bytes <= limit) to->room_bytes += bytes;
    else ok = mn_mul_size(&to->rooms, MN_MESA_BLOCKS, size);
    if (c->K <= 128) to->matrices = 0;
    if (!ok || !backward) return ok;
    return mn_mul_size(&to->tokens, (size_t)c->B, (size_t)c->T) &&
           mn_mul_size(&to->tokens, to->tokens, (size_t)c->H) &&
           mn_mul_size(&to->tokens, to->tokens, (size_t)c->K) &&
           mn_mul_size(&to->lam, chunks * parts, (size_t)c->K);
}

static bool plan_of(const mn_call *c, bool backward, mn_plan *plan) {
    mn_mesa_extent e;
    size_t floats, bytes;
    return measure(&e, c, backward) && mn_mul_size(&floats, e.pairs, backward ? 2 : 1) &&
           mn_add_size(&floats, floats, e.falls) && mn_add_size(&floats, floats, e.last) &&
           mn_add_size(&floats, floats, e.tokens) && mn_add_size(&floats, floats, e.tokens) &&
           mn_add_size(&floats, floats, e.lam) && mn_add_size(&floats, floats, e.rooms) &&
           mn_mul_size(&floats, floats, sizeof(float)) &&
           mn_mul_size(&bytes, e.matrices, sizeof(double)) &&
           mn_add_size(&plan->shared_bytes, floats, bytes);
}

static mn_mesa_work work_in(void *shared, const mn_mesa_extent &e, bool backward) {
    mn_mesa_work w = {};
    w.matrices = (double *)shared;
    float *at = (float *)(w.matrices + e.matrices);
    const auto take = [&](size_t count) { float *from = at; at += count; return from; };
    w.pairs = take(e.pairs), w.falls = take(e.falls), w.last = take(e.last);
    if (e.rooms > 0) w.rooms = take(e.rooms);
    if (!backward) return w;
    w.adjoints = take(e.pairs), w.x = take(e.tokens), w.y = take(e.tokens), w.lam = take(e.lam);
    return w;
}

/* Sums of chunks and over them. */
template <typename T>
static int carry(const mn_mesa_args *p, const mn_mesa_extent &e, const mn_mesa_work &w,
                 bool backward, cudaStream_t on) {
    const mn_call &c = p->call;
    const int64_t items = e.slots * c.H, heads = mn_n_spans(c) * c.H;
    if (items > INT32_MAX || heads > 65535) return cudaErrorNotSupported;
    if (items > 0) {
        mn_mesa_sums_kernel<T><<<(unsigned)items, MN_MESA_THREADS, 0, on>>>(*p, w, backward);
    }
    const dim3 grid(mn_blocks(c.K * (c.K + c.V), MN_MESA_THREADS), (unsigned)heads);
    mn_mesa_carry_kernel<<<grid, MN_MESA_THREADS, 0, on>>>(*p, w, backward);
    if (!backward && (p->hkk.data || p->hkv.data)) {
        mn_mesa_put_kernel<<<grid, MN_MESA_THREADS, 0, on>>>(*p, w.last);
    }
    return mn_launched();
}

template <int CELLS, typename T>
static int solve_of(const mn_mesa_args *p, const mn_mesa_extent &e, const mn_mesa_work &w,
                    bool backward, cudaStream_t on) {
    const int64_t items = e.slots * p->call.H * (MN_MESA_CHUNK / MN_MESA_PART);
    if (items == 0) return cudaSuccess;
    return mn_launch_with_room(solve_kernel<CELLS, T>, dim3(mn_blocks(items, 1, MN_MESA_BLOCKS)),
                               MN_MESA_THREADS, e.room_bytes, on, *p, w, items, backward);
}

template <typename T>
static int solve_any(const mn_mesa_args *p, const mn_mesa_extent &e, const mn_mesa_work &w,
                     bool backward, cudaStream_t on) {
    const int64_t K = p->call.K;
    if (K <= 16) return solve_of<1, T>(p, e, w, backward, on);
    if (K <= 32) return solve_of<2, T>(p, e, w, backward, on);
    if (K <= 64) return solve_of<4, T>(p, e, w, backward, on);
    if (K <= 128) return solve_of<8, T>(p, e, w, backward, on);
    return solve_of<0, T>(p, e, w, backward, on);
}

template <typename T>
static int run(const mn_mesa_args *p, void *shared, bool backward, cudaStream_t on) {
    mn_mesa_extent e;
    if (p->call.K > MN_MESA_WIDEST || !measure(&e, &p->call, backward)) {
        return cudaErrorNotSupported;
    }
    if (e.last == 0) return cudaSuccess;
    const mn_mesa_work w = work_in(shared, e, backward);
    int code = carry<T>(p, e, w, false, on);
    if (code == cudaSuccess && (backward || p->o.data)) {
        code = solve_any<T>(p, e, w, backward, on);
    }
    if (code != cudaSuccess || !backward) return code;
    if (p->grad.lam.data) {
        lam_kernel<T><<<(unsigned)p->call.H, MN_MESA_THREADS, 0, on>>>(*p, w, e.slots);
    }
    code = carry<T>(p, e, w, true, on);
    const int64_t items = e.slots * p->call.H;
    if (code != cudaSuccess || items == 0) return code;
    return mn_launch_with_room(adjoint_kernel<T>, dim3(mn_blocks(items, 1, MN_MESA_BLOCKS)),
                               MN_MESA_THREADS, e.room_bytes, on, *p, w, items);
}

static int run_any(const void *args, void *shared, bool backward, void *stream) {
    const mn_mesa_args *p = (const mn_mesa_args *)args;
    const cudaStream_t on = (cudaStream_t)stream;
    return p->call.dtype == MN_BF16 ? run<mn_bf16>(p, shared, backward, on)
                                    : run<float>(p, shared, backward, on);
}

MN_CUDA_PLAN(mesa_forward) {
    return plan_of((const mn_call *)args, false, plan);
}

MN_CUDA_PLAN(mesa_backward) {
    return plan_of((const mn_call *)args, true, plan);
}

MN_CUDA_LAUNCH(mesa_forward) {
    return run_any(args, shared, false, stream);
}

MN_CUDA_LAUNCH(mesa_backward) {
    return run_any(args, shared, true, stream);
}
