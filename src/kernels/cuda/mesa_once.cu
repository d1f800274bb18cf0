/* mesa_once.cu - mesa forward by one kernel, for keys of at most 64 channels: few short sequences,
 * and single tokens that decode. Results are those of mesa.cu to the last bit.
 *
 * Short sequences, up to four chunks: a head of a sequence has two blocks for each chunk. Each
 * sums a few rows of the pair over all chunks, leaves them in work space and says so; when all
 * have, each reads its half of a chunk from there. Inputs are on their way meanwhile, and no block
 * waits for a launch to end. As blocks wait for each other, there are no more of them than
 * processors, each of which has room for one. (Clusters of eight would need no counters, but
 * fourteen of them at most fit on an H200, where sixteen heads want sixteen: 0.073 ms instead of
 * half of that.)
 *
 * Single tokens: a block has a head of a sequence. One warp solves, the others write the pair. */
#include "kernels/cuda/mesa_read.cuh"

enum { ONCE_CHUNKS = 4, ONCE_PARTS = MN_MESA_CHUNK / MN_MESA_PART, ONCE_WIDEST = 64 };
enum { ONCE_GROUPS = MN_MESA_READERS / MN_MESA_ADDERS };    // chunks that a block sums at a time

/* ---- short sequences ------------------------------------------------------------------------- */

template <int N>
struct short_room {
    mn_mesa_tokens<N> tokens;
    mn_mesa_short_room<ONCE_GROUPS> sums;
};

/* Nobody has said anything yet. */
__global__ void __launch_bounds__(256) hush_kernel(unsigned *told, int64_t count) {
    mn_wait_for_before();
    mn_let_next_begin();
    for (int64_t i = threadIdx.x; i < count; i += 256) told[i] = 0;
}

/* Says that this block has left its rows, and waits until `all` blocks have. */
__device__ static void meet_blocks(unsigned *told, unsigned all) {
    __syncthreads();
    if (threadIdx.x == 0) {
        unsigned count;
        __threadfence();
        atomicAdd(told, 1u);
        do {
            asm volatile("ld.relaxed.gpu.global.u32 %0, [%1];"
                         : "=r"(count) : "l"(told) : "memory");
        } while (count < all);
        __threadfence();
    }
    __syncthreads();
}

/* The pair at the end, of the rows that this block summed. All first ones have been read. */
__device__ static void put_last(const mn_mesa_args &p, const float *last, int64_t head,
                                const mn_mesa_layout &lie, int rank, int n_ranks) {
    if (!p.hkk.data && !p.hkv.data) return;
    for (int64_t row0 = rank * MN_MESA_ROWS; row0 < lie.rows; row0 += n_ranks * MN_MESA_ROWS) {
        for (int64_t i = threadIdx.x; i < MN_MESA_ROWS * lie.pitch; i += MN_MESA_READERS) {
            const int64_t cell = row0 * lie.pitch + i;
            mn_mesa_put((float *)p.hkk.data, (float *)p.hkv.data, head,
                        mn_mesa_cell_at(p.call, cell), p.call.K, p.call.V,
                        last[head * lie.size + cell]);
        }
    }
}

/* blockIdx.x / `ranks` is the sequence, .y the head. */
template <int N, typename T>
__global__ void __launch_bounds__(MN_MESA_READERS, 1)
short_kernel(const __grid_constant__ mn_mesa_args p, mn_mesa_work w, unsigned *told, int ranks) {
    extern __shared__ __align__(16) unsigned char short_bytes[];
    short_room<N> &room = *(short_room<N> *)short_bytes;
    const int rank = (int)(blockIdx.x % ranks);
    const int64_t n = blockIdx.x / ranks, h = blockIdx.y;
    mn_mesa_reader<N> me;
    mn_mesa_place at;
    at.tile.n = n, at.tile.span = mn_span_at(p.call, n), at.h = h;
    at.tile.first = rank / ONCE_PARTS * MN_MESA_CHUNK;
    at.tile.n_rows = max(min((int64_t)MN_MESA_CHUNK, at.tile.span.length - at.tile.first),
                         (int64_t)0);
    at.slot = mn_mesa_slot(p.call, at.tile.span, n) + rank / ONCE_PARTS;
    at.index = at.slot * p.call.H + h;
    me.take(p, at, rank % ONCE_PARTS);
    const bool some = me.token(0) < me.count;
    mn_mesa_brought<N, T> brought;
    float2 token = {};
    if (some) {
        token = mn_mesa_token<T>(p, at, me.lane);
        brought.fetch(p, me);
    }
    for (int64_t row0 = rank * MN_MESA_ROWS; row0 < me.lie.rows; row0 += ranks * MN_MESA_ROWS) {
        mn_mesa_carry_rows<T>(room.sums, p, w, n, h, row0);
    }
    if (some) brought.put(room.tokens, p);
    mn_let_next_begin();
    mn_wait_for_before();    // counters are clear; what is older was there before they were
    meet_blocks(told + mn_mesa_slot(p.call, at.tile.span, n) * p.call.H + h, (unsigned)ranks);
    put_last(p, w.last, n * p.call.H + h, me.lie, rank, ranks);
    if (!some) return;
    me.beta = token.x, me.level = mn_mesa_levels(token.y, me.lane);
    me.front = w.pairs + at.index * me.lie.size;
    mn_mesa_stage_front<N>(room.tokens, me);
    mn_mesa_announce<N, T>(p, me);
    __syncthreads();
    mn_mesa_read_part<N, T, false>(room.tokens, p, w, me);
}

/* ---- single tokens --------------------------------------------------------------------------- */

/* Hkk and Hkv as they were given lie behind it, the former in rows that are longer by one. */
template <int N>
struct step_room {
    mn_mesa_tokens<N> tokens;
    float given[8 * N][8 * N + 1];

    __device__ float *values() { return (float *)(this + 1); }
};

/* What was given of the head, zeros outside. */
template <int N>
__device__ static void bring_pair(step_room<N> &room, const mn_mesa_args &p, int64_t head,
                                  int width) {
    const int K = (int)p.call.K, V = (int)p.call.V;
    const float *kk = (const float *)p.hkk0.data, *kv = (const float *)p.hkv0.data;
    float *values = room.values();
#pragma unroll 8
    for (int i = threadIdx.x; i < 64 * N * N; i += MN_MESA_READERS) {
        const int row = i / (8 * N), j = i % (8 * N);
        const bool inside = kk && row < K && j < K;
        room.given[row][j] = inside ? kk[(head * K + row) * K + j] : 0.0f;
    }
    for (int row = threadIdx.x / 32; row < 8 * N; row += MN_MESA_READERS / 32) {
#pragma unroll 4
        for (int j = threadIdx.x % 32; j < width; j += 32) {
            const bool inside = kv && row < K && j < V;
            values[row * width + j] = inside ? kv[(head * K + row) * V + j] : 0.0f;
        }
    }
}

/* The pair with the token, or as it was where there is none, by threads from `first` on. */
template <int N, typename T>
__device__ static void leave_pair(step_room<N> &room, const mn_mesa_args &p, int64_t head,
                                  int width, const T *v, float2 token, bool some, int first) {
    const int K = (int)p.call.K, V = (int)p.call.V, warps = (MN_MESA_READERS - first) / 32;
    float *kk = (float *)p.hkk.data, *kv = (float *)p.hkv.data;
    const float *k = room.tokens.keys[0], *values = room.values();
    const float fall = expf(token.y);
    for (int i = ((int)threadIdx.x - first) / 32; i < K; i += warps) {
        for (int j = threadIdx.x % 32; j < K && kk; j += 32) {
            const float x = room.tokens.front[i][j];
            const float write = fmaf(token.x, k[i] * k[j], 0.0f);
            kk[(head * K + i) * K + j] = some ? fmaf(fall, x, write) : x;
        }
        for (int j = threadIdx.x % 32; j < V && kv; j += 32) {
            const float x = values[i * width + j];
            const float write = some ? fmaf(token.x, k[i] * mn_float(v[j]), 0.0f) : 0.0f;
            kv[(head * K + i) * V + j] = some ? fmaf(fall, x, write) : x;
        }
    }
}

/* o of the only token, added in the order of mn_mesa_output. */
template <int N, typename T>
__device__ static void put_only(mn_mesa_tokens<N> &room, const mn_mesa_args &p,
                                const mn_mesa_reader<N> &me) {
    T *o = mn_row<T>(p.o, me.b, me.t0, me.at.h);
    const int warp = threadIdx.x / 32;
    for (int64_t j0 = 0; j0 < p.call.V && o; j0 += 64) {
        const int64_t j = j0 + 2 * me.lane;
        float sum[1][2] = {};
        if (j < p.call.V && warp < 4) mn_mesa_add_values<N, 1, T>(sum, room, p, me, 0, j);
        if (warp < 4) room.parts[warp][0][me.lane] = make_float2(sum[0][0], sum[0][1]);
        __syncthreads();
        if (warp == 0) {
            float2 all = room.parts[0][0][me.lane];
#pragma unroll
            for (int i = 1; i < 4; i++) {
                all.x += room.parts[i][0][me.lane].x, all.y += room.parts[i][0][me.lane].y;
            }
            if (j < p.call.V) mn_put(o + j, all.x);
            if (j + 1 < p.call.V) mn_put(o + j + 1, all.y);
        }
        __syncthreads();
    }
}

template <int N, typename T>
__global__ void __launch_bounds__(MN_MESA_READERS, 1)
step_kernel(const __grid_constant__ mn_mesa_args p) {
    extern __shared__ __align__(16) unsigned char step_bytes[];
    step_room<N> &room = *(step_room<N> *)step_bytes;
    const int64_t head = blockIdx.x, h = head % p.call.H, K = p.call.K;
    const int width = (int)(p.call.V + 3) / 4 * 4, thread = (int)threadIdx.x;
    mn_mesa_reader<N> me;
    mn_mesa_place at = {};
    at.tile.span = mn_span_at(p.call, head / p.call.H), at.h = h;
    at.tile.n_rows = at.tile.span.length;
    me.take(p, at, 0);
    me.lie.rows = 0, me.lie.pitch = width, me.front = room.values();    // Hkv by itself
    mn_let_next_begin();
    mn_wait_for_before();
    const bool some = me.count > 0;
    const float2 token = mn_mesa_token<T>(p, at, me.lane);
    const float2 only = make_float2(mn_mesa_from(token.x, 0), mn_mesa_from(token.y, 0));
    if (thread < 8 * N) {
        const T *k = mn_row<T>(p.k, me.b, me.t0, h), *q = mn_row<T>(p.q, me.b, me.t0, h);
        const bool there = thread < K && some;
        room.tokens.put(0, thread, there ? mn_float(k[thread]) : 0.0f);
        room.tokens.put(MN_MESA_CHUNK, thread, 0.0f);
        room.tokens.sides[0][0][thread] = there ? (float)p.scale * mn_float(q[thread]) : 0.0f;
        room.tokens.ridge[thread] =
            thread < K ? mn_float(mn_row<T>(p.lam, 0, 0, h)[thread]) : 1.0f;
    }
    bring_pair<N>(room, p, head, width);
    __syncthreads();
    for (int i = thread; i < 64 * N * N; i += MN_MESA_READERS) {
        const int row = i / (8 * N), j = i % (8 * N);
        room.tokens.front[row][j] = 0.5f * (room.given[row][j] + room.given[j][row]);
    }
    __syncthreads();
    const T *v = mn_row<T>(p.v, me.b, me.t0, h);
    if (thread >= 32) leave_pair<N, T>(room, p, head, width, v, only, some, 32);
    else if (some) {
        const mn_mesa_work none = {};
        me.beta = token.x, me.level = mn_mesa_levels(token.y, me.lane);
        me.mine = 0, me.u = 0, me.reach = 1, me.real = true;
        mn_mesa_read<N, T, false>(room.tokens, p, none, me);
    }
    __syncthreads();
    if (some) put_only<N, T>(room.tokens, p, me);
}

/* ---- launches -------------------------------------------------------------------------------- */

/* Blocks of a head of a sequence: two for each chunk. */
static int ranks_of(const mn_call &c) {
    return ONCE_PARTS * (int)mn_ceil_div(c.T, MN_MESA_CHUNK);
}

static int attribute(cudaDeviceAttr which) {
    int device = 0, value = 0;
    (void)cudaGetDevice(&device);
    (void)cudaDeviceGetAttribute(&value, which, device);
    return value;
}

template <int N>
static size_t step_bytes_of(const mn_call &c) {
    return sizeof(step_room<N>) + (size_t)(8 * N * ((c.V + 3) / 4 * 4)) * sizeof(float);
}

bool mn_mesa_once_serves(const mn_mesa_args *p) {
    const mn_call &c = p->call;
    const int64_t n = mn_n_spans(c), room = attribute(cudaDevAttrMaxSharedMemoryPerBlockOptin);
    if (!p->o.data || c.K > ONCE_WIDEST || c.T < 1 || n * c.H > INT32_MAX) return false;
    if (c.T == 1) return c.V <= 4096 && (int64_t)step_bytes_of<ONCE_WIDEST / 8>(c) <= room;
    return c.T <= ONCE_CHUNKS * MN_MESA_CHUNK && (int64_t)sizeof(short_room<8>) <= room &&
           n * c.H * ranks_of(c) <= attribute(cudaDevAttrMultiProcessorCount);
}

template <int N, typename T>
static int start_short(const mn_mesa_args *p, const mn_mesa_work &w, cudaStream_t on) {
    const mn_call &c = p->call;
    const int ranks = ranks_of(c);
    const auto kernel = short_kernel<N, T>;
    unsigned *told = (unsigned *)w.falls;    // of no use else here
    int code = (int)cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                         (int)sizeof(short_room<N>));
    if (code == cudaSuccess) {
        code = mn_launch_early(hush_kernel, dim3(1), 256, 0, on, told,
                               mn_tile_slots(c, MN_MESA_CHUNK) * c.H);
    }
    if (code != cudaSuccess) return code;
    return mn_launch_early(kernel, dim3((unsigned)(mn_n_spans(c) * ranks), (unsigned)c.H),
                           MN_MESA_READERS, sizeof(short_room<N>), on, *p, w, told, ranks);
}

template <int N, typename T>
static int start_step(const mn_mesa_args *p, cudaStream_t on) {
    const size_t bytes = step_bytes_of<N>(p->call);
    const auto kernel = step_kernel<N, T>;
    const cudaError_t code = cudaFuncSetAttribute(
        kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, (int)bytes);
    if (code != cudaSuccess) return code;
    const unsigned blocks = (unsigned)(mn_n_spans(p->call) * p->call.H);
    return mn_launch_early(kernel, dim3(blocks), MN_MESA_READERS, bytes, on, *p);
}

template <int N, typename T>
static int start(const mn_mesa_args *p, const mn_mesa_work &w, cudaStream_t on) {
    return p->call.T == 1 ? start_step<N, T>(p, on) : start_short<N, T>(p, w, on);
}

template <typename T>
static int start_any(const mn_mesa_args *p, const mn_mesa_work &w, cudaStream_t on) {
    if (p->call.K <= 16) return start<2, T>(p, w, on);
    if (p->call.K <= 32) return start<4, T>(p, w, on);
    return start<8, T>(p, w, on);
}

int mn_mesa_once(const mn_mesa_args *p, const mn_mesa_work &w, cudaStream_t on) {
    return p->call.dtype == MN_BF16 ? start_any<mn_bf16>(p, w, on) : start_any<float>(p, w, on);
}
