/* mesa_fwd_single_launch.cu - mesa forward by one kernel: few short sequences, for keys of at most
 * 64 channels, and single tokens that decode, of at most 128. Results are those of mesa.cu to the
 * last bit.
 *
 * Short sequences, up to four chunks: a head of a sequence has two blocks for each chunk. Each
 * sums a few rows of the pair over all chunks and leaves them in work space; when all have, each
 * reads its half of a chunk from there, for which inputs have come meanwhile. As blocks wait for
 * each other the launch is cooperative: it begins when all of them fit, whatever else
 * is on the GPU, and so there may be no more than processors, each of which has room for one.
 * (Clusters of eight would do, but the sixteen of as many heads do not run at a time on an H200:
 * 0.073 ms instead of 0.0375.)
 *
 * Single tokens: a block has a head of a sequence (mesa_step.cuh, mesa_step_wide.cuh). */
#include <cooperative_groups.h>

#include "kernels/cuda/prim/device_props.h"
#include "kernels/cuda/mesa/mesa_step.cuh"
#include "kernels/cuda/mesa/mesa_step_wide.cuh"

namespace mneme::mesa {

enum { SHORT_CHUNKS = 4, SHORT_SPLITS = MN_MESA_CHUNK / MN_MESA_TOKENS, SHORT_MAX_K = 64 };
// threads
enum { CHUNK_THREADS = MN_MESA_READ_THREADS / SHORT_CHUNKS, COLUMN_TILE = 2 * CHUNK_THREADS };

/* ---- short sequences ------------------------------------------------------------------------- */

enum { SHORT_TOKENS = SHORT_CHUNKS * MN_MESA_CHUNK, SHORT_MAX_V = 128 };    // most value columns

/* Smem to sum a few rows of all chunks: keys and values of all tokens, side by side. */
template <int N, typename T>
struct sums_smem {
    static constexpr int pitch = 8 * N + SHORT_MAX_V + 8;
    alignas(16) T tokens[SHORT_TOKENS][pitch];
    alignas(16) float sums[SHORT_CHUNKS][MN_MESA_ROWS][COLUMN_TILE];
    float weight[SHORT_CHUNKS][MN_MESA_CHUNK], decay[SHORT_CHUNKS];
};

template <int N, typename T>
struct short_smem {
    mn_mesa_read_smem<N> tokens;
    sums_smem<N, T> sums;
};

/* 64 columns, or COLUMNS, of all tokens to rows of `to`, on their way: zeros outside. */
template <int COLUMNS, typename T>
__device__ static void load_columns(T *to, int pitch, const mn_in &view, const mn_span &span,
                                     int64_t h, int64_t first, int64_t width) {
    constexpr int each = 16 / (int)sizeof(T), vecs = COLUMNS / each;
    bool vec_aligned = (uintptr_t)view.data % 16 == 0 && width % each == 0;
    for (int axis = 0; axis < 3; axis++) vec_aligned = vec_aligned && view.stride[axis] % each == 0;
#pragma unroll 4
    for (int i = threadIdx.x; i < SHORT_TOKENS * vecs; i += MN_MESA_READ_THREADS) {
        const int t = i / vecs, j = i % vecs * each;
        const bool inside = t < span.length && first + j < width;
        const T *from = inside ? mn_row<T>(view, span.b, span.t0 + t, h) + first + j
                               : (const T *)view.data;
        T *dst = to + t * pitch + j;
        if (vec_aligned) {
            asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;"
                         ::"r"((unsigned)__cvta_generic_to_shared(dst)), "l"(from),
                         "r"(inside ? 16 : 0) : "memory");
            continue;
        }
        for (int n = 0; n < each; n++) {
            dst[n] = inside && first + j + n < width ? from[n] : (T)0.0f;
        }
    }
}

/* What mesa_chunk_scan_short_kernel does, of all chunks at once: a group of threads has a chunk,
 * a thread two columns of it, then a few numbers over all chunks. Few instructions, as all of
 * them are new to the processor. */
template <int N, typename T>
__device__ static void scan_rows_short(sums_smem<N, T> &smem, const mn_mesa_args &p,
                                  const mn_mesa_workspace &w, int64_t n, int64_t h, int64_t row0) {
    constexpr int row_step = MN_MESA_READ_THREADS / COLUMN_TILE, each = MN_MESA_ROWS / row_step;
    const int group = threadIdx.x / CHUNK_THREADS, thread = threadIdx.x % CHUNK_THREADS;
    const int64_t head = n * p.call.H + h;
    const mn_mesa_layout layout = mn_mesa_layout::of(p.call);
    const mn_span span = mn_span_at(p.call, n);
    const int chunks = (int)((span.length + MN_MESA_CHUNK - 1) / MN_MESA_CHUNK);
    const float *kk = (const float *)p.hkk0.data, *kv = (const float *)p.hkv0.data;
    const int64_t index0 = mn_mesa_slot(p.call, span, n) * p.call.H + h;
    const T(*tokens)[sums_smem<N, T>::pitch] = smem.tokens + group * MN_MESA_CHUNK;
#pragma unroll 1
    for (int64_t j0 = 0; j0 < layout.pitch; j0 += COLUMN_TILE) {
        const int64_t own_index = j0 + threadIdx.x % COLUMN_TILE;
        const int column = (int)j0 + 2 * thread;
        float x[each] = {}, sum[MN_MESA_ROWS][2] = {};
        for (int i = 0; i < each && (kk || kv) && own_index < layout.pitch; i++) {
            const int64_t row = row0 + threadIdx.x / COLUMN_TILE + i * row_step;
            x[i] = mn_mesa_load_state(kk, kv, head,
                                      mn_mesa_cell_at(p.call, row * layout.pitch + own_index),
                                 p.call.K, p.call.V);
        }
#pragma unroll 4
        for (int u = 0; u < MN_MESA_CHUNK; u++) {
            float left[MN_MESA_ROWS];
            const float by = smem.weight[group][u];
            mn_load<MN_MESA_ROWS>(left, tokens[u], row0);
            const float right[2] = { mn_float(tokens[u][column]), mn_float(tokens[u][column + 1]) };
#pragma unroll
            for (int r = 0; r < 2 * MN_MESA_ROWS; r++) {    // as mn_mesa_add_tokens
                const float product = left[r / 2] * right[r % 2];
                sum[r / 2][r % 2] = fmaf(by, product, sum[r / 2][r % 2]);
            }
        }
#pragma unroll
        for (int r = 0; r < MN_MESA_ROWS; r++) {
            *(float2 *)&smem.sums[group][r][2 * thread] = make_float2(sum[r][0], sum[r][1]);
        }
        __syncthreads();
#pragma unroll
        for (int i = 0; i < each && own_index < layout.pitch; i++) {
            const int row = (int)threadIdx.x / COLUMN_TILE + i * row_step;
            const int64_t cell = (row0 + row) * layout.pitch + own_index;
#pragma unroll 1
            for (int c = 0; c < chunks; c++) {
                w.pairs[(index0 + c * p.call.H) * layout.size + cell] = x[i];
                x[i] = fmaf(smem.decay[c], x[i], smem.sums[c][row][threadIdx.x % COLUMN_TILE]);
            }
            w.last[head * layout.size + cell] = x[i];
        }
        __syncthreads();
    }
}

/* Tokens and their weights for scan_rows_short. A barrier at the end. */
template <int N, typename T>
__device__ static void load_tokens(sums_smem<N, T> &smem, const mn_mesa_args &p, int64_t n,
                                    int64_t h) {
    const int group = threadIdx.x / CHUNK_THREADS, thread = threadIdx.x % CHUNK_THREADS;
    const mn_span span = mn_span_at(p.call, n);
    mn_mesa_coord at;
    at.h = h, at.tile.n = n, at.tile.span = span, at.tile.first = group * MN_MESA_CHUNK;
    at.tile.n_rows = max(min((int64_t)MN_MESA_CHUNK, span.length - at.tile.first), (int64_t)0);
    const float2 token = mn_mesa_token<T>(p, at, thread);
    load_columns<8 * N>(smem.tokens[0], smem.pitch, p.k, span, h, 0, p.call.K);
    for (int64_t v0 = 0; v0 < p.call.V; v0 += 64) {
        load_columns<64>(smem.tokens[0] + 8 * N + v0, smem.pitch, p.v, span, h, v0, p.call.V);
    }
    asm volatile("cp.async.commit_group;" ::: "memory");
    mn_mesa_token_weights(smem.weight[group], &smem.decay[group], token, thread, false);
    asm volatile("cp.async.wait_group 0;" ::: "memory");
    __syncthreads();
}

/* The pair at the end, of the rows that this block summed. All first ones have been read. */
__device__ static void store_last(const mn_mesa_args &p, const float *last, int64_t head,
                                const mn_mesa_layout &layout, int rank, int n_ranks) {
    if (!p.hkk.data && !p.hkv.data) return;
    for (int64_t row0 = rank * MN_MESA_ROWS; row0 < layout.rows; row0 += n_ranks * MN_MESA_ROWS) {
        for (int64_t i = threadIdx.x; i < MN_MESA_ROWS * layout.pitch; i += MN_MESA_READ_THREADS) {
            const int64_t cell = row0 * layout.pitch + i;
            mn_mesa_store_state((float *)p.hkk.data, (float *)p.hkv.data, head,
                        mn_mesa_cell_at(p.call, cell), p.call.K, p.call.V,
                        last[head * layout.size + cell]);
        }
    }
}

/* blockIdx.x / `ranks` is the sequence, .y the head. */
template <int N, typename T>
__global__ void __launch_bounds__(MN_MESA_READ_THREADS, 1)
mesa_short_kernel(const __grid_constant__ mn_mesa_args p, mn_mesa_workspace w, int ranks) {
    extern __shared__ __align__(16) unsigned char short_bytes[];
    short_smem<N, T> &smem = *(short_smem<N, T> *)short_bytes;
    const int rank = (int)(blockIdx.x % ranks);
    const int64_t n = blockIdx.x / ranks, h = blockIdx.y;
    mn_mesa_read_ctx<N> ctx;
    mn_mesa_coord at;
    at.tile.n = n, at.tile.span = mn_span_at(p.call, n), at.h = h;
    at.tile.first = rank / SHORT_SPLITS * MN_MESA_CHUNK;
    at.tile.n_rows = max(min((int64_t)MN_MESA_CHUNK, at.tile.span.length - at.tile.first),
                         (int64_t)0);
    at.slot = mn_mesa_slot(p.call, at.tile.span, n) + rank / SHORT_SPLITS;
    at.index = at.slot * p.call.H + h;
    ctx.init(p, at, rank % SHORT_SPLITS);
    const bool some = ctx.token(0) < ctx.count;
    mn_mesa_prefetch<N, T> prefetch;
    float2 token = {};
    if (some) {
        token = mn_mesa_token<T>(p, at, ctx.lane);
        prefetch.fetch(p, ctx);
    }
    load_tokens<N, T>(smem.sums, p, n, h);
    for (int64_t row0 = rank * MN_MESA_ROWS; row0 < ctx.layout.rows; row0 += ranks * MN_MESA_ROWS) {
        scan_rows_short<N, T>(smem.sums, p, w, n, h, row0);
    }
    if (some) prefetch.put(smem.tokens, p);
    mn_pdl_launch_dependents();
    cooperative_groups::this_grid().sync();
    store_last(p, w.last, n * p.call.H + h, ctx.layout, rank, ranks);
    if (!some) return;
    ctx.beta = token.x, ctx.level = mn_mesa_log_decay_cumsum(token.y, ctx.lane);
    ctx.front = w.pairs + at.index * ctx.layout.size;
    mn_mesa_load_front<N>(smem.tokens, ctx);
    mn_mesa_prefetch_l1<N, T>(p, ctx);
    __syncthreads();
    mn_mesa_read_tokens<N, T, false>(smem.tokens, p, w, ctx);
}

/* ---- single tokens --------------------------------------------------------------------------- */

template <int N, typename T>
__global__ void __launch_bounds__(MN_MESA_READ_THREADS, 1)
mesa_step_kernel(const __grid_constant__ mn_mesa_args p) {
    extern __shared__ __align__(16) unsigned char step_bytes[];
    mn_pdl_launch_dependents();
    mn_pdl_wait();
    step_head<N, T, mn_cta<MN_MESA_READ_THREADS>>(*(step_smem<N> *)step_bytes, p,
                                                  blockIdx.x / p.call.H, blockIdx.x % p.call.H);
}

template <typename T>
__global__ void __launch_bounds__(MN_MESA_READ_THREADS, 1)
mesa_step_wide_kernel(const __grid_constant__ mn_mesa_args p) {
    extern __shared__ __align__(16) unsigned char wide_bytes[];
    mn_pdl_launch_dependents();
    mn_pdl_wait();
    step_head_wide<T, mn_cta<MN_MESA_READ_THREADS>>(*(wide_smem *)wide_bytes, p,
                                                    blockIdx.x / p.call.H, blockIdx.x % p.call.H);
}

/* ---- launches -------------------------------------------------------------------------------- */

/* Blocks of a head of a sequence: two for each chunk. */
static int blocks_per_head(const mn_call &c) {
    return SHORT_SPLITS * (int)mn_ceil_div(c.T, MN_MESA_CHUNK);
}

bool mn_mesa_single_launch_supported(const mn_mesa_args *p) {
    const mn_call &c = p->call;
    const mn_device_props machine = mn_device_props_current();
    const int64_t n = mn_n_spans(c), smem = machine.shared_bytes;
    if (!p->o.data || c.T < 1 || n * c.H > INT32_MAX) return false;
    if (c.T == 1) {
        return c.K <= STEP_WIDEST && c.V <= STEP_MAX_V && (int64_t)step_room(c) <= smem;
    }
    return c.K <= SHORT_MAX_K && c.T <= SHORT_TOKENS && c.V <= SHORT_MAX_V &&
           (int64_t)sizeof(short_smem<8, float>) <= smem && machine.coop_launch &&
           n * c.H * blocks_per_head(c) <= machine.processors;
}

template <int N, typename T>
static int launch_short(const mn_mesa_args *p, const mn_mesa_workspace &w, cudaStream_t on) {
    const mn_call &c = p->call;
    const int ranks = blocks_per_head(c);
    const auto kernel = mesa_short_kernel<N, T>;
    const cudaError_t code = cudaFuncSetAttribute(
        kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, (int)sizeof(short_smem<N, T>));
    if (code != cudaSuccess) return code;
    cudaLaunchAttribute coop_attr = {};
    coop_attr.id = cudaLaunchAttributeCooperative;
    coop_attr.val.cooperative = 1;
    cudaLaunchConfig_t config = {};
    config.gridDim = dim3((unsigned)(mn_n_spans(c) * ranks), (unsigned)c.H);
    config.blockDim = dim3(MN_MESA_READ_THREADS),
        config.dynamicSmemBytes = sizeof(short_smem<N, T>);
    config.stream = on, config.attrs = &coop_attr, config.numAttrs = 1;
    return (int)cudaLaunchKernelEx(&config, kernel, *p, w, ranks);
}

static int launch_step_of(void (*kernel)(mn_mesa_args), size_t bytes, const mn_mesa_args *p,
                          cudaStream_t on) {
    const cudaError_t code = cudaFuncSetAttribute(
        kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, (int)bytes);
    if (code != cudaSuccess) return code;
    const unsigned blocks = (unsigned)(mn_n_spans(p->call) * p->call.H);
    return mn_launch_pdl(kernel, dim3(blocks), MN_MESA_READ_THREADS, bytes, on, *p);
}

template <int N, typename T>
static int start(const mn_mesa_args *p, const mn_mesa_workspace &w, cudaStream_t on) {
    if (p->call.T > 1) return launch_short<N, T>(p, w, on);
    return launch_step_of(mesa_step_kernel<N, T>, step_bytes_of<N>(p->call), p, on);
}

template <typename T>
static int launch_dispatch(const mn_mesa_args *p, const mn_mesa_workspace &w, cudaStream_t on) {
    if (p->call.K <= 16) return start<2, T>(p, w, on);
    if (p->call.K <= 32) return start<4, T>(p, w, on);
    if (p->call.K <= SHORT_MAX_K) return start<8, T>(p, w, on);
    return launch_step_of(mesa_step_wide_kernel<T>, sizeof(wide_smem), p, on);
}

int mn_mesa_single_launch(const mn_mesa_args *p, const mn_mesa_workspace &w, cudaStream_t on) {
    return p->call.dtype == MN_BF16 ? launch_dispatch<mn_bf16>(p, w, on)
        : launch_dispatch<float>(p, w, on);
}

}    // namespace mneme::mesa
