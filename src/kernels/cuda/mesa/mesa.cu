/* mesa.cu - what ridge regression on all pairs so far predicts for a query (see ref/mesa.c).
 *
 * Forward: sums of chunks (mesa.cuh), then every token's M x = scale q and o = Hkv'x: a warp for a
 * token (mesa_output.cuh), or for wider keys a block for four tokens of a head, which scans there
 * from the chunk's front. Backward: the same with a second right side, Hkv do, for y; sums of the
 * adjoints (A, B); then what they give keys and values, a chunk at a time (mesa_grad.cuh).
 * The gradient of a decay is a running sum: what tokens from t on read of writes before t is
 *
 *   dg_t = dg_{t+1} + r_t - beta_t dbeta_t       r_t = x'Hkv do - x'Hkk y = sum of lam x y
 *
 * counted from the pair and the adjoint at the chunk's end, whose product dg is there. */
#include "kernels/cuda/prim/device_props.h"
#include "kernels/cuda/mesa/mesa_grad.cuh"
#include "kernels/cuda/mesa/mesa_output.cuh"

/* Vectors of a block, and its pair. */
struct room {
    float *pair, *kv, *b[2], *cot, *out, *parts;
};

__device__ static room smem_at(unsigned char *bytes, const mn_call &c, float *smems) {
    const int64_t K = c.K, V = c.V;
    float *at = (float *)(bytes + sizeof(mn_mesa_smem));
    const auto take = [&](int64_t count) { float *from = at; at += count; return from; };
    room r;
    r.kv = take(K + V), r.b[0] = take(K), r.b[1] = take(K), r.cot = take(V);
    r.out = take(V), r.parts = take(MN_MESA_THREADS);
    r.pair = smems ? smems + blockIdx.x * mn_mesa_layout::of(c).size : at;
    return r;
}

static size_t vectors_of(int64_t K, int64_t V) {
    return (size_t)(3 * K + 3 * V + MN_MESA_THREADS) * sizeof(float);
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

/* x and y of the token, from the pair at it; o or dq. Returns this thread's part of x y. */
template <typename T>
__device__ static float read_token(const room &r, const mn_mesa_args &p, const mn_mesa_place &at,
                                   mn_mesa_smem &memory, const mn_mesa_work &w, int64_t t,
                                   bool backward) {
    const int64_t K = p.call.K, V = p.call.V, b = at.tile.span.b, thread = threadIdx.x;
    const mn_mesa_layout lie = mn_mesa_layout::of(p.call);
    const float *values = r.pair + lie.rows;
    const T *q = mn_row<T>(p.q, b, t, at.h), *cot = mn_row<T>(p.cot.o, b, t, at.h);
    if (thread < K) {
        r.b[0][thread] = (float)p.scale * mn_float(q[thread]);
        r.b[1][thread] = 0.0f;
    }
    if (backward) {
        for (int64_t j = thread; j < V; j += MN_MESA_THREADS) r.cot[j] = mn_get(cot, j);
        __syncthreads();
        mn_mesa_rows(r.b[1], values, lie.pitch, V, r.cot, K);
    }
    __syncthreads();
    mn_mesa_solve<T>({ r.b[0], r.b[1] }, r.pair, lie.pitch, mn_row<T>(p.lam, 0, 0, at.h), K, memory,
                     w.matrices + blockIdx.x * mn_mesa_matrix_size(K));
    if (!backward) {
        T *o = mn_row<T>(p.o, b, t, at.h);
        mn_mesa_columns(r.out, values, lie.pitch, V, r.b[0], K, r.parts);
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

/* One row of a matrix of the pair, by a warp: several numbers at once, as it lies far away. */
__device__ static void write_row(float *row, const float *x, int64_t width, float write,
                                 float fall) {
    constexpr int AT_ONCE = 8;
    for (int64_t j0 = threadIdx.x % 32; j0 < width; j0 += 32 * AT_ONCE) {
        float cell[AT_ONCE];
#pragma unroll
        for (int i = 0; i < AT_ONCE; i++) {
            cell[i] = j0 + 32 * i < width ? row[j0 + 32 * i] : 0.0f;
        }
#pragma unroll
        for (int i = 0; i < AT_ONCE; i++) {
            const int64_t j = j0 + 32 * i;
            if (j < width) row[j] = fmaf(write, x[j], fall * cell[i]);
        }
    }
}

/* A block takes parts of chunks in turn. */
template <typename T>
__global__ void __launch_bounds__(MN_MESA_THREADS)
solve_kernel(const __grid_constant__ mn_mesa_args p, mn_mesa_work w, int64_t items, bool backward) {
    extern __shared__ __align__(128) unsigned char bytes[];
    constexpr int parts = MN_MESA_CHUNK / MN_MESA_SCAN;
    mn_mesa_smem &memory = *(mn_mesa_smem *)bytes;
    const room r = smem_at(bytes, p.call, w.smems);
    const int64_t K = p.call.K;
    const mn_mesa_layout lie = mn_mesa_layout::of(p.call);
    for (int64_t item = blockIdx.x; item < items; item += gridDim.x) {
        const int64_t chunk = item / parts;
        const mn_mesa_place at = mn_mesa_here(p.call, chunk / p.call.H, chunk % p.call.H);
        const int first = (int)(item % parts) * MN_MESA_SCAN;
        const int last = (int)min((int64_t)first + MN_MESA_SCAN, at.tile.n_rows);
        const int64_t b = at.tile.span.b, t0 = at.tile.span.t0 + at.tile.first;
        float lam = 0.0f;
        if (first >= at.tile.n_rows) continue;
        __syncthreads();
        load_pair(r.pair, w.pairs + at.index * lie.size, lie.size);
        for (int u = 0; u < last; u++) {
            __syncthreads();
            load_token<T>(r, p, b, t0 + u, at.h);
            __syncthreads();
            const float fall = expf(mn_mesa_log<T>(p, b, t0 + u, at.h));
            const float beta = mn_float(*mn_row<T>(p.beta, b, t0 + u, at.h));
            for (int64_t i = threadIdx.x / 32; i < K; i += MN_MESA_THREADS / 32) {
                float *row = r.pair + i * lie.pitch;
                write_row(row, r.kv, K, beta * r.kv[i], fall);
                write_row(row + lie.rows, r.kv + K, p.call.V, beta * r.kv[i], fall);
            }
            __syncthreads();
            if (u >= first) lam -= read_token<T>(r, p, at, memory, w, t0 + u, backward);
        }
        if (backward && threadIdx.x < K) w.lam[item * K + threadIdx.x] = lam;
    }
}

/* The gradient of lam: parts in their order. */
template <typename T>
__global__ void __launch_bounds__(MN_MESA_THREADS)
lam_kernel(const __grid_constant__ mn_mesa_args p, mn_mesa_work w, int64_t slots) {
    const int parts = mn_mesa_parts(p.call);
    const int each = p.call.K <= MN_MESA_NARROW ? MN_MESA_PART / 2 : MN_MESA_SCAN;    // begins at
    const int64_t h = blockIdx.x, i = threadIdx.x, K = p.call.K;
    T *to = mn_row<T>(p.grad.lam, 0, 0, h);
    float sum = 0.0f;
    if (i >= K) return;
    for (int64_t slot = 0; slot < slots; slot++) {
        const int64_t rows = mn_tile_at(p.call, MN_MESA_CHUNK, slot).n_rows;
        for (int part = 0; part < parts && part * each < rows; part++) {
            sum += w.lam[((slot * p.call.H + h) * parts + part) * K + i];
        }
    }
    mn_put(to + i, sum);
}

/* ---- launches -------------------------------------------------------------------------------- */

/* What blocks that walk need: a matrix to eliminate in, and room for a pair. */
static bool measure_scan(mn_mesa_extent *to, const mn_call *c, size_t size) {
    const size_t limit = (size_t)mn_device_props_current().shared_bytes;
    size_t bytes;
    if (!mn_mul_size(&bytes, size, sizeof(float)) ||
        !mn_mul_size(&to->matrices, MN_MESA_BLOCKS, (size_t)mn_mesa_matrix_size(c->K))) {
        return false;
    }
    to->smem_bytes = sizeof(mn_mesa_smem) + vectors_of(c->K, c->V);
    if (bytes >= limit || to->smem_bytes + bytes > limit) {
        return mn_mul_size(&to->smems, MN_MESA_BLOCKS, size);
    }
    to->smem_bytes += bytes;
    return true;
}

/* Numbers of a pair as it lies in work space; false where they are too many. */
static bool size_of(size_t *size, const mn_call &c) {
    const mn_mesa_layout lie = mn_mesa_layout::of(c);
    return mn_mul_size(size, (size_t)lie.rows, (size_t)lie.pitch) && *size <= INT32_MAX;
}

static bool measure(mn_mesa_extent *to, const mn_call *c, bool backward) {
    const size_t parts = (size_t)mn_mesa_parts(*c);
    size_t size, heads, chunks;
    *to = {};
    to->slots = mn_tile_slots(*c, MN_MESA_CHUNK);
    const bool ok = size_of(&size, *c) &&
                    mn_mul_size(&heads, (size_t)mn_n_spans(*c), (size_t)c->H) &&
                    mn_mul_size(&chunks, (size_t)to->slots, (size_t)c->H) &&
                    mn_mul_size(&to->pairs, chunks, size) && mn_mul_size(&to->last, heads, size);
    if (!ok || (c->K > MN_MESA_NARROW && !measure_scan(to, c, size))) return false;
    to->falls = chunks;
    if (!backward) return true;
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
           mn_add_size(&floats, floats, e.lam) && mn_add_size(&floats, floats, e.smems) &&
           mn_mul_size(&floats, floats, sizeof(float)) &&
           mn_mul_size(&bytes, e.matrices, sizeof(double)) &&
           mn_add_size(&plan->shared_bytes, floats, bytes);
}

static mn_mesa_work work_in(void *shared, const mn_mesa_extent &e, bool backward) {
    mn_mesa_work w = {};
    w.matrices = (double *)shared;
    float *at = (float *)(w.matrices + e.matrices);
    const auto take = [&](size_t count) { float *from = at; at += count; return from; };
    w.pairs = take(e.pairs), w.last = take(e.last);    // first what is taken in packs
    if (backward) w.adjoints = take(e.pairs);
    if (e.smems > 0) w.smems = take(e.smems);
    w.falls = take(e.falls);
    if (!backward) return w;
    w.x = take(e.tokens), w.y = take(e.tokens), w.lam = take(e.lam);
    return w;
}

/* Sums of chunks, then over them. */
template <typename T>
static int carry_long(const mn_mesa_args *p, const mn_mesa_extent &e, const mn_mesa_work &w,
                      bool backward, cudaStream_t on) {
    const mn_call &c = p->call;
    const mn_mesa_layout lie = mn_mesa_layout::of(c);
    if (e.slots > 0) {
        const dim3 blocks((unsigned)e.slots, mn_blocks(lie.rows, MN_MESA_ROWS), (unsigned)c.H);
        if (backward) mn_mesa_sums_kernel<T, true><<<blocks, MN_MESA_ADDERS, 0, on>>>(*p, w);
        else mn_mesa_sums_kernel<T, false><<<blocks, MN_MESA_ADDERS, 0, on>>>(*p, w);
    }
    const dim3 packs(mn_blocks(lie.size, MN_MESA_PACK * MN_MESA_CARRIERS),
                     (unsigned)(mn_n_spans(c) * c.H));
    return mn_launch_pdl(mn_mesa_carry_kernel, packs, MN_MESA_CARRIERS, 0, on, *p, w, backward);
}

/* Both, and what is wanted of the pairs at the end. */
template <typename T>
static int carry(const mn_mesa_args *p, const mn_mesa_extent &e, const mn_mesa_work &w,
                 bool backward, cudaStream_t on) {
    const mn_call &c = p->call;
    const mn_mesa_layout lie = mn_mesa_layout::of(c);
    const int64_t n = mn_n_spans(c);
    int code = cudaSuccess;
    if (e.slots * c.H > INT32_MAX || n * c.H > 65535) return cudaErrorNotSupported;
    if (backward || c.T > MN_MESA_SHORT || lie.rows % MN_MESA_ROWS != 0) {
        code = carry_long<T>(p, e, w, backward, on);
    } else {
        const dim3 blocks((unsigned)n, mn_blocks(lie.rows, MN_MESA_ROWS), (unsigned)c.H);
        mn_mesa_short_kernel<T><<<blocks, MN_MESA_AT_ONCE * MN_MESA_ADDERS, 0, on>>>(*p, w);
        code = mn_launch_status();
    }
    if (code == cudaSuccess && !backward && (p->hkk.data || p->hkv.data)) {
        const dim3 grid(mn_blocks(lie.size, MN_MESA_THREADS), (unsigned)(n * c.H));
        mn_mesa_put_kernel<<<grid, MN_MESA_THREADS, 0, on>>>(*p, w.last);
        return mn_launch_status();
    }
    return code;
}

template <typename T>
static int scan_of(const mn_mesa_args *p, const mn_mesa_extent &e, const mn_mesa_work &w,
                   bool backward, int64_t items, cudaStream_t on) {
    return mn_launch_smem(solve_kernel<T>, dim3(mn_blocks(items, 1, MN_MESA_BLOCKS)),
                               MN_MESA_THREADS, e.smem_bytes, on, *p, w, items, backward);
}

template <int N, typename T>
static int read_of(const mn_mesa_args *p, const mn_mesa_work &w, bool backward, int64_t parts,
                   cudaStream_t on) {
    const auto kernel = backward ? mn_mesa_read_kernel<N, T, true>
                                 : mn_mesa_read_kernel<N, T, false>;
    const cudaError_t code = cudaFuncSetAttribute(
        kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, (int)sizeof(mn_mesa_tokens<N>));
    if (code != cudaSuccess) return code;
    return mn_launch_pdl(kernel, dim3((unsigned)parts, (unsigned)p->call.H), MN_MESA_READERS,
                           sizeof(mn_mesa_tokens<N>), on, *p, w);
}

/* What tokens read. */
template <typename T>
static int read_any(const mn_mesa_args *p, const mn_mesa_extent &e, const mn_mesa_work &w,
                    bool backward, cudaStream_t on) {
    const int64_t K = p->call.K, parts = e.slots * mn_mesa_parts(p->call);
    const int64_t items = parts * p->call.H;
    if (items == 0) return cudaSuccess;
    if (items > INT32_MAX || p->call.H > 65535) return cudaErrorNotSupported;
    if (K <= 16) return read_of<2, T>(p, w, backward, parts, on);
    if (K <= 32) return read_of<4, T>(p, w, backward, parts, on);
    if (K <= 64) return read_of<8, T>(p, w, backward, parts, on);
    if (K <= MN_MESA_NARROW) return read_of<16, T>(p, w, backward, parts, on);
    return scan_of<T>(p, e, w, backward, items, on);
}

template <int N, typename T>
static int adjoint_of(const mn_mesa_args *p, const mn_mesa_work &w, int64_t items,
                      cudaStream_t on) {
    return mn_launch_smem(mn_mesa_adjoint_kernel<N, T>, dim3((unsigned)items), MN_MESA_THREADS,
                               sizeof(mn_mesa_graders<N>), on, *p, w);
}

/* Gradients of keys, values, beta and decays. */
template <typename T>
static int adjoint_any(const mn_mesa_args *p, const mn_mesa_extent &e, const mn_mesa_work &w,
                       cudaStream_t on) {
    const int64_t K = p->call.K, items = e.slots * p->call.H;
    if (items == 0) return cudaSuccess;
    if (K <= 32) return adjoint_of<1, T>(p, w, items, on);
    if (K <= 64) return adjoint_of<2, T>(p, w, items, on);
    if (K <= 128) return adjoint_of<4, T>(p, w, items, on);
    return adjoint_of<8, T>(p, w, items, on);
}

template <typename T>
static int run(const mn_mesa_args *p, void *shared, bool backward, cudaStream_t on) {
    mn_mesa_extent e;
    if (p->call.K > MN_MESA_WIDEST || !measure(&e, &p->call, backward)) {
        return cudaErrorNotSupported;
    }
    if (e.last == 0) return cudaSuccess;
    const mn_mesa_work w = work_in(shared, e, backward);
    if (!backward && mn_mesa_once_serves(p)) return mn_mesa_once(p, w, on);
    int code = carry<T>(p, e, w, false, on);
    if (code == cudaSuccess && (backward || p->o.data)) {
        code = read_any<T>(p, e, w, backward, on);
    }
    if (code != cudaSuccess || !backward) return code;
    if (p->grad.lam.data) {
        lam_kernel<T><<<(unsigned)p->call.H, MN_MESA_THREADS, 0, on>>>(*p, w, e.slots);
    }
    code = carry<T>(p, e, w, true, on);
    return code == cudaSuccess ? adjoint_any<T>(p, e, w, on) : code;
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
