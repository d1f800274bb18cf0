/* importance.cu - Palimpsa: every cell keeps a mean and how much it matters (see ref/importance.c
 * for the equations).
 *
 *   I <- a I + (1 - a) ip + k^2 b      M <- a M + k v      mu = M / I
 *   o = scale sum_i q mu               ovar = scale^2 sum_i q^2 / I
 *
 * Calls in bf16 go over tensor cores (importance_mma.cuh, importance_back.cuh), others and those
 * with ovar cell by cell (importance_cells.cuh). */
#include "kernels/cuda/importance_back.cuh"
#include "kernels/cuda/importance_cells.cuh"

using namespace importance;

/* ---- launches -------------------------------------------------------------------------------- */

/* dg: rows are (b, t, h) */
struct put_gates {
    mn_out g;
    int64_t tokens, heads;

    __device__ void operator()(int64_t i, float sum) const {
        const int64_t token = i / heads;
        *mn_row<float>(g, token / tokens, token % tokens, i % heads) = sum;
    }
};

struct put_priors {
    mn_out ip;

    __device__ void operator()(int64_t h, float sum) const {
        *mn_row<float>(ip, 0, 0, h) = sum;
    }
};

typedef mn_cell_block<4, WARPS, C> long_block;
typedef mn_cell_block<2, WARPS, C> short_block;

/* Slots and columns of a block. */
static int64_t slots_of(const mn_call *call) {
    return call->K <= SHORT_KEY ? short_block::SLOTS : long_block::SLOTS;
}

static int64_t columns_of(const mn_call *call) {
    return call->K <= SHORT_KEY ? short_block::COLUMNS : long_block::COLUMNS;
}

static dim3 blocks_of(const mn_call *call) {
    return dim3(mn_blocks(call->V, columns_of(call)),
                mn_blocks(mn_n_spans(*call) * call->H, 1, MOST_HEADS),
                mn_blocks(call->K, slots_of(call)));
}

/* Numbers of each part of the work space. */
static bool measure(int64_t (&counts)[N_ROOMS], const mn_call *call, bool backward) {
    const int64_t groups = mn_ceil_div(call->K, slots_of(call));
    const int64_t across = mn_ceil_div(call->V, columns_of(call));
    const int64_t span = call->dtype == MN_BF16 ? (int64_t)TOKENS : (int64_t)by_cell::SPAN;
    int64_t rows, blocks, heads;
    for (int64_t &count : counts) count = 0;
    if (call->dtype == MN_BF16 &&
        (!mn_mul_i64(&counts[DECAYS], mn_tile_slots(*call, TOKENS), call->H) ||
         !mn_mul_i64(&counts[DECAYS], counts[DECAYS], sizeof(by_mma::gates) / sizeof(float)))) {
        return false;
    }
    bool ok = mn_mul_i64(&rows, mn_cell_rows_of(call), 2 * call->H) &&
              mn_mul_i64(&blocks, groups, across);
    if (ok && groups > 1) {
        ok = mn_mul_i64(&counts[SUMS], rows, call->V) &&
             mn_mul_i64(&counts[SUMS], counts[SUMS], groups);
    }
    if (!backward || !ok) return ok;
    return mn_mul_i64(&heads, blocks, call->H) &&
           mn_mul_i64(&counts[STATES], heads, SETS * SLOTS * long_block::THREADS) &&
           mn_mul_i64(&counts[STATES], counts[STATES], mn_tile_slots(*call, span)) &&
           mn_mul_i64(&counts[KEY_PARTS], rows, call->K) &&
           mn_mul_i64(&counts[KEY_PARTS], counts[KEY_PARTS], across) &&
           mn_mul_i64(&counts[GATES], rows, blocks) &&
           mn_mul_i64(&counts[PRIORS], heads, mn_n_spans(*call));
}

static bool plan_room(mn_plan *plan, const mn_call *call, bool backward) {
    int64_t counts[N_ROOMS];
    return measure(counts, call, backward) && mn_cell_plan(plan, counts);
}

template <typename T>
static int sum_groups(const mn_out &first, const mn_out &second, const float *sums,
                      const mn_call *call, cudaStream_t stream) {
    const int64_t groups = mn_ceil_div(call->K, slots_of(call));
    if (groups == 1) return cudaSuccess;
    return mn_cell_add_rows<T>(first, second, sums, groups, call, call->H, call->V, stream);
}

template <typename Room, typename Kernel, typename... Given>
static int launch(Kernel kernel, const mn_importance_args *p, cudaStream_t stream,
                  const Given &...given) {
    const int64_t n_rows = mn_cell_rows_of(&p->call) * p->call.H;
    return mn_launch_with_room(kernel, blocks_of(&p->call), long_block::THREADS, sizeof(Room),
                               stream, *p, given..., n_rows);
}

/* What decays make of all tiles. */
static int find_gates(by_mma::gates **gates, const mn_importance_args *p, const room &to,
                      cudaStream_t stream) {
    const int64_t count = mn_tile_slots(p->call, TOKENS) * p->call.H;
    *gates = (by_mma::gates *)to.at[DECAYS];
    if (count == 0) return cudaSuccess;
    by_mma::gates_kernel<<<mn_blocks(count, by_mma::GATES_PER_BLOCK),
                           by_mma::GATES_PER_BLOCK * TOKENS, 0, stream>>>(*p, *gates);
    return mn_launched();
}

template <typename T, typename Block, bool VARIANCE>
static int read_cells(const mn_importance_args *p, const room &to, cudaStream_t stream) {
    if constexpr (sizeof(T) == sizeof(mn_bf16) && !VARIANCE) {
        by_mma::gates *gates;
        const int code = find_gates(&gates, p, to, stream);
        if (code != cudaSuccess) return code;
        return launch<by_mma::forward_room<Block>>(by_mma::forward_kernel<Block>, p, stream, gates,
                                                   to.at[SUMS]);
    } else {
        return launch<by_cell::forward_room<Block>>(by_cell::forward_kernel<T, Block, VARIANCE>, p,
                                                    stream, to.at[SUMS]);
    }
}

/* The parts of the work space. */
static room rooms_of(const mn_importance_args *p, float *shared, bool backward) {
    int64_t counts[N_ROOMS];
    room to;
    (void)measure(counts, &p->call, backward);    // went well when it was planned
    mn_cell_rooms(to.at, shared, counts);
    return to;
}

template <typename T, typename Block>
static int forward(const mn_importance_args *p, float *shared, cudaStream_t stream) {
    const room to = rooms_of(p, shared, false);
    const int code = p->ovar.data ? read_cells<T, Block, true>(p, to, stream) :
                                    read_cells<T, Block, false>(p, to, stream);
    return code != cudaSuccess ? code : sum_groups<T>(p->o, p->ovar, to.at[SUMS], &p->call, stream);
}

/* The states first, then the way back from them. */
template <typename T, typename Block, bool SPREAD>
static int go_back(const mn_importance_args *p, const room &to, cudaStream_t stream) {
    const dim3 blocks = blocks_of(&p->call);
    if constexpr (sizeof(T) == sizeof(mn_bf16) && !SPREAD) {
        by_mma::gates *gates;
        int code = find_gates(&gates, p, to, stream);
        if (code == cudaSuccess) {
            code = mn_launch_with_room(by_mma::states_kernel<Block>, blocks, Block::THREADS,
                                       sizeof(by_mma::states_room<Block>), stream, *p, gates,
                                       to.at[STATES]);
        }
        if (code != cudaSuccess) return code;
        return launch<by_mma::backward_room<Block>>(by_mma::backward_kernel<Block>, p, stream,
                                                    gates, to);
    } else {
        by_cell::states_kernel<T, Block>
            <<<blocks, Block::THREADS, 0, stream>>>(*p, to.at[STATES]);
        const int code = mn_launched();
        if (code != cudaSuccess) return code;
        return launch<by_cell::backward_room<Block, SPREAD>>(
            by_cell::backward_kernel<T, Block, SPREAD>, p, stream, to);
    }
}

/* Adds the parts of all gradients. */
template <typename T>
static int add_parts(const mn_importance_args *p, const room &at, cudaStream_t stream) {
    const mn_call *call = &p->call;
    const int64_t n_rows = mn_cell_rows_of(call) * call->H;
    const dim3 blocks = blocks_of(call);
    int code = sum_groups<T>(p->grad.v, p->grad.b, at.at[SUMS], call, stream);
    if (code == cudaSuccess) {
        code = mn_cell_add_rows<T>(p->grad.k, p->grad.q, at.at[KEY_PARTS], blocks.x, call, call->H,
                                   call->K, stream);
    }
    if (code == cudaSuccess && n_rows > 0 && p->grad.g.data) {
        const put_gates put = { p->grad.g, call->T, call->H };
        code = mn_sum_parts_into(put, at.at[GATES], blocks.x * blocks.z, n_rows, stream);
    }
    if (code != cudaSuccess || !p->grad.ip.data) return code;
    const int64_t n_parts = mn_n_spans(*call) * blocks.x * blocks.z;
    return mn_sum_parts_into(put_priors{ p->grad.ip }, at.at[PRIORS], n_parts, call->H, stream);
}

template <typename T, typename Block>
static int backward(const mn_importance_args *p, float *shared, cudaStream_t stream) {
    const room at = rooms_of(p, shared, true);
    const int code = p->cot.ovar.data ? go_back<T, Block, true>(p, at, stream) :
                                        go_back<T, Block, false>(p, at, stream);
    return code != cudaSuccess ? code : add_parts<T>(p, at, stream);
}

template <typename Block>
static int forward_of(const mn_importance_args *p, float *shared, cudaStream_t stream) {
    if (p->call.dtype == MN_BF16) return forward<mn_bf16, Block>(p, shared, stream);
    return forward<float, Block>(p, shared, stream);
}

template <typename Block>
static int backward_of(const mn_importance_args *p, float *shared, cudaStream_t stream) {
    if (p->call.dtype == MN_BF16) return backward<mn_bf16, Block>(p, shared, stream);
    return backward<float, Block>(p, shared, stream);
}

MN_CUDA_PLAN(importance_forward) {
    return plan_room(plan, (const mn_call *)args, false);
}

MN_CUDA_LAUNCH(importance_forward) {
    const mn_importance_args *p = (const mn_importance_args *)args;
    float *room = (float *)shared;
    if (p->call.K <= SHORT_KEY) return forward_of<short_block>(p, room, (cudaStream_t)stream);
    return forward_of<long_block>(p, room, (cudaStream_t)stream);
}

MN_CUDA_PLAN(importance_backward) {
    return plan_room(plan, (const mn_call *)args, true);
}

MN_CUDA_LAUNCH(importance_backward) {
    const mn_importance_args *p = (const mn_importance_args *)args;
    float *room = (float *)shared;
    if (p->call.K <= SHORT_KEY) return backward_of<short_block>(p, room, (cudaStream_t)stream);
    return backward_of<long_block>(p, room, (cudaStream_t)stream);
}
