/* importance.cu - Palimpsa: every cell keeps a mean and how much it matters (see ref/importance.c
 * for the equations).
 *
 *   I <- a I + (1 - a) ip + k^2 b      M <- a M + k v      mu = M / I
 *   o = scale sum_i q mu               ovar = scale^2 sum_i q^2 / I
 *
 * Calls in bf16 go over tensor cores (importance_mma.cuh, importance_bwd_mma.cuh) where a block
 * gets
 * the shared memory for it, others and those with ovar cell by cell (importance_recurrent.cuh). */
#include "kernels/cuda/importance/importance_recurrent.cuh"
#include "kernels/cuda/importance/importance_decay_grad.cuh"

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
/* Blocks that read: of keys up to SLOTS and of longer ones, each with half of the columns where
 * there are few blocks. A number of o is the same sum in both. */
typedef by_mma::block<4, 16> read_block;
typedef by_mma::block<4, 8> slim_read_block;
typedef by_mma::block<8, 16> tall_block;
typedef by_mma::block<8, 8> slim_tall_block;
typedef by_mma::block<4, 16> back_block;

/* How a call is cut into blocks, and how many tokens lie between the states that are kept for going
 * back. `slices`: blocks along the columns go back one after the other, each adding to what those
 * before it have of dk and dq; `crossed`: of dv and db, too (see launched). The same sums. */
struct cuts {
    int64_t slots, columns, span;
    bool by_mma, slices, crossed;
};

template <typename Block>
static cuts cuts_into(int64_t span, bool by_mma) {
    return { Block::SLOTS, Block::COLUMNS, span, by_mma, false, false };
}

/* Whether a block may have so much shared memory. */
static bool has_shared(size_t bytes) {
    int device = 0, limit = 0;
    (void)cudaGetDevice(&device);
    (void)cudaDeviceGetAttribute(&limit, cudaDevAttrMaxSharedMemoryPerBlockOptin, device);
    return bytes <= (size_t)limit;
}

static int64_t count_processors(void) {
    int device = 0, processors = 0;
    (void)cudaGetDevice(&device);
    (void)cudaDeviceGetAttribute(&processors, cudaDevAttrMultiProcessorCount, device);
    return processors > 0 ? processors : 1;
}

/* Blocks that share the columns of all heads, and those along the columns. */
static int64_t count_down(const mn_call *call, const cuts &by) {
    return mn_ceil_div(call->K, by.slots) * mn_n_spans(*call) * call->H;
}

static int64_t count_across(const mn_call *call, const cuts &by) {
    return mn_ceil_div(call->V, by.columns);
}

/* Whether blocks would leave half of the processors without one. */
static bool are_few(const mn_call *call, const cuts &by) {
    return 2 * count_across(call, by) * count_down(call, by) <= count_processors();
}

/* Whether slices, a block on each processor, take no longer than all blocks at once. */
static bool may_slice(const mn_call *call, const cuts &by) {
    const int64_t processors = count_processors(), down = count_down(call, by);
    const int64_t across = count_across(call, by);
    return across * mn_ceil_div(down, processors) == mn_ceil_div(across * down, processors);
}

static cuts cuts_of(const mn_importance_args *p, bool backward) {
    const bool spread = backward ? p->cot.ovar.data != NULL : p->ovar.data != NULL;
    const size_t room = backward ? sizeof(by_mma::backward_smem<back_block>) :
                                   sizeof(by_mma::forward_smem<tall_block>);
    if (p->call.dtype == MN_BF16 && !spread && has_shared(room)) {
        if (backward) {
            cuts by = cuts_into<back_block>(TOKENS, true);
            by.slices = may_slice(&p->call, by);
            by.crossed = by.slices && count_across(&p->call, by) == 2 &&
                         mn_ceil_div(p->call.K, by.slots) == 2;
            return by;
        }
        const bool tall = p->call.K > read_block::SLOTS;
        const cuts wide = tall ? cuts_into<tall_block>(TOKENS, true) :
                                 cuts_into<read_block>(TOKENS, true);
        if (!are_few(&p->call, wide)) return wide;
        return tall ? cuts_into<slim_tall_block>(TOKENS, true) :
                      cuts_into<slim_read_block>(TOKENS, true);
    }
    if (p->call.K <= SHORT_KEY) return cuts_into<short_block>(by_cell::SPAN, false);
    return cuts_into<long_block>(by_cell::SPAN, false);
}

static dim3 blocks_of(const mn_call *call, const cuts &by) {
    return dim3(mn_blocks(call->V, by.columns),
                mn_blocks(mn_n_spans(*call) * call->H, 1, MOST_HEADS),
                mn_blocks(call->K, by.slots));
}

/* Numbers of each part of the work space. */
static bool measure(int64_t (&counts)[N_ROOMS], const mn_importance_args *p, const cuts &by,
                    bool backward) {
    const mn_call *call = &p->call;
    const int64_t groups = mn_ceil_div(call->K, by.slots);
    const int64_t across = mn_ceil_div(call->V, by.columns);
    int64_t rows, blocks, heads;
    for (int64_t &count : counts) count = 0;
    if (by.by_mma &&
        (!mn_mul_i64(&counts[DECAYS], mn_tile_slots(*call, TOKENS), call->H) ||
         !mn_mul_i64(&counts[DECAYS], counts[DECAYS], sizeof(by_mma::gates) / sizeof(float)))) {
        return false;
    }
    bool ok = mn_mul_i64(&rows, mn_cell_rows_of(call), 2 * call->H) &&
              mn_mul_i64(&blocks, groups, across);
    if (ok && groups > 1) {
        ok = mn_mul_i64(&counts[SUMS], rows, call->V) &&
             mn_mul_i64(&counts[SUMS], counts[SUMS], by.crossed ? 1 : groups);
    }
    if (!backward || !ok) return ok;
    if (by.by_mma) {
        ok = mn_mul_i64(&heads, blocks, call->H) &&
             mn_mul_i64(&counts[ALONG], heads, back_block::WARPS) &&
             mn_mul_i64(&counts[ALONG], counts[ALONG], mn_tile_slots(*call, TOKENS)) &&
             mn_mul_i64(&counts[EDGES], heads, 2 * mn_n_spans(*call));
    }
    if (!ok) return false;
    return mn_mul_i64(&heads, blocks, call->H) &&
           mn_mul_i64(&counts[STATES], heads, 2 * by.slots * by.columns) &&
           mn_mul_i64(&counts[STATES], counts[STATES], mn_tile_slots(*call, by.span)) &&
           mn_mul_i64(&counts[KEY_PARTS], rows, call->K) &&
           mn_mul_i64(&counts[KEY_PARTS], counts[KEY_PARTS], by.slices ? 1 : across) &&
           mn_mul_i64(&counts[GATES], rows, blocks) &&
           mn_mul_i64(&counts[PRIORS], heads, mn_n_spans(*call));
}

static bool plan_smem(mn_plan *plan, const mn_importance_args *p, bool backward) {
    int64_t counts[N_ROOMS];
    return measure(counts, p, cuts_of(p, backward), backward) && mn_cell_plan(plan, counts);
}

template <typename T>
static int sum_groups(const mn_out &first, const mn_out &second, const float *sums,
                      const mn_call *call, const cuts &by, cudaStream_t stream) {
    const int64_t groups = mn_ceil_div(call->K, by.slots);
    if (groups == 1 || by.crossed) return cudaSuccess;
    return mn_cell_add_rows<T>(first, second, sums, groups, call, call->H, call->V, stream);
}

template <typename Room, typename Block, typename Kernel, typename... Given>
static int launch(Kernel kernel, const mn_importance_args *p, const cuts &by, cudaStream_t stream,
                  const Given &...given) {
    const int64_t n_rows = mn_cell_rows_of(&p->call) * p->call.H;
    return mn_launch_smem(kernel, blocks_of(&p->call, by), Block::THREADS, sizeof(Room),
                               stream, *p, given..., n_rows);
}

/* What decays make of all tiles. */
static int find_gates(by_mma::gates **gates, const mn_importance_args *p, const room &to,
                      float unit, cudaStream_t stream) {
    const int64_t count = mn_tile_slots(p->call, TOKENS) * p->call.H;
    *gates = (by_mma::gates *)to.at[DECAYS];
    if (count == 0) return cudaSuccess;
    by_mma::gates_kernel<<<mn_blocks(count, by_mma::GATES_PER_BLOCK),
                           by_mma::GATES_PER_BLOCK * TOKENS, 0, stream>>>(*p, *gates, unit);
    return mn_launch_status();
}

template <typename Block>
static int read_into(const mn_importance_args *p, const room &to, const cuts &by,
                     cudaStream_t stream) {
    by_mma::gates *gates;
    const int code = find_gates(&gates, p, to, by_mma::FORWARD_UNIT, stream);
    if (code != cudaSuccess) return code;
    return launch<by_mma::forward_smem<Block>, Block>(by_mma::forward_kernel<Block>, p, by, stream,
                                                      gates, to.at[SUMS]);
}

static int read_by_mma(const mn_importance_args *p, const room &to, const cuts &by,
                       cudaStream_t stream) {
    if (by.slots == read_block::SLOTS) {
        if (by.columns == read_block::COLUMNS) return read_into<read_block>(p, to, by, stream);
        return read_into<slim_read_block>(p, to, by, stream);
    }
    if (by.columns == tall_block::COLUMNS) return read_into<tall_block>(p, to, by, stream);
    return read_into<slim_tall_block>(p, to, by, stream);
}

template <typename T, typename Block>
static int read_by_cell(const mn_importance_args *p, const room &to, const cuts &by,
                        cudaStream_t stream) {
    if (p->ovar.data) {
        return launch<by_cell::forward_smem<Block>, Block>(by_cell::forward_kernel<T, Block, true>,
                                                           p, by, stream, to.at[SUMS]);
    }
    return launch<by_cell::forward_smem<Block>, Block>(by_cell::forward_kernel<T, Block, false>, p,
                                                       by, stream, to.at[SUMS]);
}

/* The parts of the work space. */
static room smems_of(const mn_importance_args *p, const cuts &by, float *shared, bool backward) {
    int64_t counts[N_ROOMS];
    room to;
    (void)measure(counts, p, by, backward);    // went well when it was planned
    mn_cell_smems(to.at, shared, counts);
    return to;
}

template <typename T>
static int forward(const mn_importance_args *p, float *shared, cudaStream_t stream) {
    const cuts by = cuts_of(p, false);
    const room to = smems_of(p, by, shared, false);
    int code;
    if (by.by_mma) code = read_by_mma(p, to, by, stream);
    else if (p->call.K <= SHORT_KEY) code = read_by_cell<T, short_block>(p, to, by, stream);
    else code = read_by_cell<T, long_block>(p, to, by, stream);
    if (code != cudaSuccess) return code;
    return sum_groups<T>(p->o, p->ovar, to.at[SUMS], &p->call, by, stream);
}

/* The states first, then the way back from them. */
static int back_by_mma(const mn_importance_args *p, const room &to, const cuts &by,
                       cudaStream_t stream) {
    by_mma::gates *gates;
    int code = find_gates(&gates, p, to, 1.0f, stream);
    if (code == cudaSuccess) {
        code = mn_launch_smem(by_mma::states_kernel<back_block>, blocks_of(&p->call, by),
                                   back_block::THREADS, sizeof(by_mma::states_smem<back_block>),
                                   stream, *p, gates, to.at[STATES]);
    }
    const dim3 blocks = blocks_of(&p->call, by);
    by_mma::launched now = { by.slices ? 0 : by_mma::launched::ALL, by.crossed };
    do {
        if (code != cudaSuccess) return code;
        code = mn_launch_smem(by_mma::backward_kernel<back_block>, blocks,
                                   back_block::THREADS + by_mma::helpers<back_block>::THREADS,
                                   sizeof(by_mma::backward_smem<back_block>), stream, *p, gates, to,
                                   now, mn_cell_rows_of(&p->call) * p->call.H);
        now.slice++;
    } while (by.slices && now.slice < (int)blocks.x);
    const int64_t items = mn_n_spans(p->call) * p->call.H;
    if (code != cudaSuccess || items == 0) return code;
    by_mma::scan_gates_kernel<back_block><<<(unsigned)items, by_mma::WALKERS, 0, stream>>>(
        *p, gates, to, to.at[PRIORS], blocks.x * blocks.z, mn_cell_rows_of(&p->call) * p->call.H);
    return mn_launch_status();
}

template <typename T, typename Block, bool SPREAD>
static int back_by_cell(const mn_importance_args *p, const room &to, const cuts &by,
                        cudaStream_t stream) {
    by_cell::states_kernel<T, Block>
        <<<blocks_of(&p->call, by), Block::THREADS, 0, stream>>>(*p, to.at[STATES]);
    const int code = mn_launch_status();
    if (code != cudaSuccess) return code;
    return launch<by_cell::backward_smem<Block, SPREAD>, Block>(
        by_cell::backward_kernel<T, Block, SPREAD>, p, by, stream, to);
}

template <typename T, bool SPREAD>
static int back_by_cells(const mn_importance_args *p, const room &to, const cuts &by,
                         cudaStream_t stream) {
    if (p->call.K <= SHORT_KEY) return back_by_cell<T, short_block, SPREAD>(p, to, by, stream);
    return back_by_cell<T, long_block, SPREAD>(p, to, by, stream);
}

/* Adds the parts of all gradients. */
template <typename T>
static int add_parts(const mn_importance_args *p, const room &at, const cuts &by,
                     cudaStream_t stream) {
    const mn_call *call = &p->call;
    const int64_t n_rows = mn_cell_rows_of(call) * call->H;
    const dim3 blocks = blocks_of(call, by);
    int code = sum_groups<T>(p->grad.v, p->grad.b, at.at[SUMS], call, by, stream);
    if (code == cudaSuccess && !by.slices) {
        code = mn_cell_add_rows<T>(p->grad.k, p->grad.q, at.at[KEY_PARTS], blocks.x, call, call->H,
                                   call->K, stream);
    }
    if (code == cudaSuccess && n_rows > 0 && p->grad.g.data && !by.by_mma) {
        const put_gates put = { p->grad.g, call->T, call->H };
        code = mn_sum_partials_into(put, at.at[GATES], blocks.x * blocks.z, n_rows, stream);
    }
    if (code != cudaSuccess || !p->grad.ip.data) return code;
    const int64_t n_parts = mn_n_spans(*call) * (by.by_mma ? 1 : blocks.x * blocks.z);
    return mn_sum_partials_into(put_priors{ p->grad.ip }, at.at[PRIORS], n_parts, call->H, stream);
}

template <typename T>
static int backward(const mn_importance_args *p, float *shared, cudaStream_t stream) {
    const cuts by = cuts_of(p, true);
    const room at = smems_of(p, by, shared, true);
    int code;
    if (by.by_mma) code = back_by_mma(p, at, by, stream);
    else if (p->cot.ovar.data) code = back_by_cells<T, true>(p, at, by, stream);
    else code = back_by_cells<T, false>(p, at, by, stream);
    return code != cudaSuccess ? code : add_parts<T>(p, at, by, stream);
}

MN_CUDA_PLAN(importance_forward) {
    return plan_smem(plan, (const mn_importance_args *)args, false);
}

MN_CUDA_LAUNCH(importance_forward) {
    const mn_importance_args *p = (const mn_importance_args *)args;
    float *room = (float *)shared;
    if (p->call.dtype == MN_BF16) return forward<mn_bf16>(p, room, (cudaStream_t)stream);
    return forward<float>(p, room, (cudaStream_t)stream);
}

MN_CUDA_PLAN(importance_backward) {
    return plan_smem(plan, (const mn_importance_args *)args, true);
}

MN_CUDA_LAUNCH(importance_backward) {
    const mn_importance_args *p = (const mn_importance_args *)args;
    float *room = (float *)shared;
    if (p->call.dtype == MN_BF16) return backward<mn_bf16>(p, room, (cudaStream_t)stream);
    return backward<float>(p, room, (cudaStream_t)stream);
}
