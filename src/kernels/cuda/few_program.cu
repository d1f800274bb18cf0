/* few_program.cu - a program (kernels/few.h): one kernel goes through all stages, a block for each
 * processor.
 *
 * Between two stages all blocks meet: each adds one to a number in memory and waits until all have.
 * In between a block looks ahead: it asks for the first weights of the next stage, asks the second
 * cache for those of the stage after that, looks which strips of the third are its own, and fetches
 * the fourth. The launch is cooperative, so that all blocks are there at once. */
#include "kernels/cuda/few_recall.cuh"
#include "kernels/cuda/few_weights.cuh"

#include <stdlib.h>

/* In front of the stages: blocks that have come to a barrier so far, and that have left. */
struct few_head {
    alignas(128) unsigned come;
    alignas(128) unsigned left;
};
static_assert(sizeof(few_head) == MN_FEW_HEAD_BYTES, "the head of a program");

/* ---- between stages -------------------------------------------------------------------------- */

/* What the block has written is there for those who meet it. */
__device__ static void come(few_head *head) {
    __syncthreads();
    if (threadIdx.x > 0) return;
#if __CUDA_ARCH__ >= 700
    asm volatile("red.release.gpu.global.add.u32 [%0], 1;" :: "l"(&head->come) : "memory");
#endif
}

__device__ static void meet(few_head *head, unsigned all) {
    if (threadIdx.x == 0) {
        unsigned now;
        do {
            asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(now) : "l"(&head->come)
                         : "memory");
        } while (now < all);
    }
    __syncthreads();
}

/* The last block to leave makes the head new. */
__device__ static void leave(few_head *head) {
    __syncthreads();
    if (threadIdx.x > 0) return;
    __threadfence();
    if (atomicAdd(&head->left, 1u) + 1 < gridDim.x) return;
    head->come = 0;
    head->left = 0;
}

__device__ static void fetch_stage(mn_few_stage_at &to, const mn_few_stage *from) {
    for (int i = threadIdx.x; i < MN_FEW_STAGE_BYTES / 16; i += MN_FEW_THREADS) {
        mn_few_bring(to.bytes.at + 16 * i, from->at + 16 * i, true);
    }
}

/* Three stages ahead: which strips are this block's. */
__device__ __noinline__ static void tabulate(mn_few_table &table, const mn_few_stage_at &stage) {
    if (stage.kind == MN_FEW_PRODUCTS_STAGE) mn_few_tabulate(table, stage.products);
}

/* Two stages ahead: bytes from memory to the second cache. */
__device__ __noinline__ static void ask(const mn_few_table &table, const mn_few_stage_at &stage) {
    if (stage.kind == MN_FEW_PRODUCTS_STAGE) mn_few_ask_weights(table, stage.products);
    else if (stage.kind == MN_FEW_MEMORY_STAGE) mn_few_ask_state(stage.memory);
}

/* One stage ahead: bytes that are older than the program, to shared memory. As many groups of
 * copies as there are slots. */
__device__ __noinline__ static void begin(mn_few_block &room, const mn_few_stage_at &stage,
                             const mn_few_table &table) {
    const bool products = stage.kind == MN_FEW_PRODUCTS_STAGE && stage.products.settled;
    if (products && stage.products.wide) {
        mn_few_begin<float>(room, stage.products, table);
    } else if (products) {
        mn_few_begin<mn_bf16>(room, stage.products, table);
    } else {
        if (stage.kind == MN_FEW_MEMORY_STAGE && stage.memory.settled) {
            mn_few_begin_state(room, stage.memory);
        }
        for (int i = 0; i < MN_FEW_SLOTS; i++) mn_few_commit();
    }
}

__device__ __noinline__ static void run_parts(mn_few_block &room, const mn_few_parts_at &p) {
    for (int part = blockIdx.x; part < p.n_parts; part += gridDim.x) {
        for (int i = p.first[part]; i < p.first[part + 1]; i++) {
            mn_few_do(p.job[i], mn_few_rows{}, room.room);
            __syncthreads();
        }
    }
}

__device__ static void run(mn_few_block &room, const mn_few_stage_at &stage,
                           const mn_few_table &table) {
    if (stage.kind == MN_FEW_PRODUCTS_STAGE) {
        mn_few_products_run(room, stage.products, table);
    } else if (stage.kind == MN_FEW_MEMORY_STAGE) {
        mn_few_arrived<0>();
        if (stage.memory.wide) mn_few_memory_run<float>(room, stage.memory);
        else mn_few_memory_run<mn_bf16>(room, stage.memory);
    } else {
        run_parts(room, stage.parts);
    }
}

__global__ void __launch_bounds__(MN_FEW_THREADS, 1)
few_program_kernel(few_head *head, const mn_few_stage *stages, int n_stages) {
    extern __shared__ __align__(128) unsigned char bytes[];
    enum { STAGES = MN_FEW_KNOWN, TABLES = MN_FEW_KNOWN - 1 };
    mn_few_block &room = *(mn_few_block *)bytes;
    for (int i = 0; i < 4 && i < n_stages; i++) fetch_stage(room.stage[i], stages + i);
    mn_few_commit();
    mn_few_arrived<0>();
    __syncthreads();
    for (int i = 0; i < 3 && i < n_stages; i++) tabulate(room.table[i], room.stage[i]);
    __syncthreads();
    begin(room, room.stage[0], room.table[0]);
    if (n_stages > 1) ask(room.table[1], room.stage[1]);
#pragma unroll 1
    for (int i = 0; i < n_stages; i++) {
        if (i > 0) meet(head, (unsigned)i * gridDim.x);
        run(room, room.stage[i % STAGES], room.table[i % TABLES]);
        if (i + 1 == n_stages) break;
        mn_few_arrived<0>();
        come(head);
        begin(room, room.stage[(i + 1) % STAGES], room.table[(i + 1) % TABLES]);
        if (i + 2 < n_stages) ask(room.table[(i + 2) % TABLES], room.stage[(i + 2) % STAGES]);
        if (i + 3 < n_stages) tabulate(room.table[(i + 3) % TABLES], room.stage[(i + 3) % STAGES]);
        if (i + 4 < n_stages) fetch_stage(room.stage[(i + 4) % STAGES], stages + i + 4);
        mn_few_commit();
    }
    mn_few_arrived<0>();
    leave(head);
}

/* ---- the machine ----------------------------------------------------------------------------- */

/* Blocks of a program on a machine; 0: it runs none. */
static int ask_blocks(int device) {
    int bytes = 0, cooperates = 0, processors = 0;
    const bool known =
        cudaDeviceGetAttribute(&bytes, cudaDevAttrMaxSharedMemoryPerBlockOptin, device) ==
            cudaSuccess &&
        cudaDeviceGetAttribute(&cooperates, cudaDevAttrCooperativeLaunch, device) == cudaSuccess &&
        cudaDeviceGetAttribute(&processors, cudaDevAttrMultiProcessorCount, device) == cudaSuccess;
    if (!known) (void)cudaGetLastError();
    return known && cooperates && bytes >= (int)sizeof(mn_few_block) ? processors : 0;
}

/* Of the machine in use, which is asked once: each token comes by often. */
static int blocks_here(void) {
    enum { KNOWN = 64 };
    static int known[KNOWN];    // one more than the answer
    int device = 0;
    if (cudaGetDevice(&device) != cudaSuccess) {
        (void)cudaGetLastError();
        return 0;
    }
    if (device >= KNOWN) return ask_blocks(device);
    int blocks = __atomic_load_n(&known[device], __ATOMIC_RELAXED);
    if (blocks == 0) {
        blocks = ask_blocks(device) + 1;
        __atomic_store_n(&known[device], blocks, __ATOMIC_RELAXED);
    }
    return blocks - 1;
}

extern "C" bool mn_few_serves(void) {
    return blocks_here() > 0;
}

extern "C" int mn_few_launch(void *program, int n_stages, void *stream) {
    cudaError_t code = cudaFuncSetAttribute(few_program_kernel,
                                            cudaFuncAttributeMaxDynamicSharedMemorySize,
                                            (int)sizeof(mn_few_block));
    if (code != cudaSuccess) return (int)code;
    cudaLaunchAttribute together = {};
    together.id = cudaLaunchAttributeCooperative;
    together.val.cooperative = 1;
    cudaLaunchConfig_t how = {};
    how.gridDim = dim3((unsigned)blocks_here()), how.blockDim = dim3(MN_FEW_THREADS);
    how.dynamicSmemBytes = sizeof(mn_few_block), how.stream = (cudaStream_t)stream;
    how.attrs = &together, how.numAttrs = 1;
    few_head *head = (few_head *)program;
    const mn_few_stage *stages = (const mn_few_stage *)(head + 1);
    return (int)cudaLaunchKernelEx(&how, few_program_kernel, head, stages, n_stages);
}

/* ---- what stages can do ---------------------------------------------------------------------- */

extern "C" int64_t mn_few_most_columns(void) {
    return (int64_t)(MN_FEW_STRIPS - MN_FEW_PRODUCTS) * MN_FEW_COLUMNS * blocks_here();
}

extern "C" bool mn_few_multiplies(const mn_product_work *w) {
    const int64_t item = w->dtype == MN_F32 ? 4 : 2, pack = 16 / item;
    return w->M > 0 && w->M <= MN_FEW_DEEPEST && w->N > 0 && w->N < (1 << 30) &&
           w->b_transposed && !w->a_transposed && !w->accumulate && w->c_dtype == w->dtype &&
           w->c_row == w->N && w->K > 0 && w->K % pack == 0 && w->a_row % pack == 0 &&
           w->b_row % pack == 0 && (uintptr_t)w->a % 16 == 0 && (uintptr_t)w->b % 16 == 0 &&
           w->M * (w->K + MN_FEW_ROW_PAD) * item <= MN_FEW_ROWS_BYTES &&
           w->N <= mn_few_most_columns();
}

/* Numbers i of rows of eight begin at 16 bytes. */
static bool packs(const mn_in &x, int64_t item) {
    bool even = (uintptr_t)x.data % 16 == 0;
    for (int i = 0; i < 3; i++) even = even && x.stride[i] * item % 16 == 0;
    return even;
}

static mn_in as_in(const mn_out &x) {
    return { x.data, { x.stride[0], x.stride[1], x.stride[2] } };
}

extern "C" bool mn_few_remembers(const mn_few_memory *m) {
    const mn_call &c = m->call;
    const int64_t item = c.dtype == MN_F32 ? 4 : 2;
    const int64_t rows = MN_FEW_FRONTS * c.B * c.H * c.K * item;
    bool serves = blocks_here() > 0 && c.T == 1 && !c.cu_seqlens && c.B > 0 && c.H > 0 &&
                  c.K > 0 && c.K <= MN_FEW_DEEP * (MN_FEW_THREADS / 2) && c.K % 8 == 0 &&
                  c.V > 0 && c.V % MN_FEW_TILE == 0 && c.B * c.H * c.V < (1 << 24) &&
                  packs(m->q, item) && packs(m->v, item) && packs(as_in(m->o), item) &&
                  packs(m->state0, 4) && packs(as_in(m->state), 4);
    for (int i = 0; i < MN_FEW_FRONTS; i++) {
        const mn_few *front = m->first[i];
        if (!front) continue;
        const bool norm = front->kind == MN_FEW_L2_NORM || front->kind == MN_FEW_RMS_NORM;
        const mn_in &made = i == 0 ? m->q : m->e;
        const mn_view &to = front->at[front->kind == MN_FEW_L2_NORM ? 1 : 2];
        serves = serves && norm && to.data == made.data && front->shape[3] == c.K &&
                 front->shape[2] == c.B * c.H && rows <= MN_FEW_ROWS_BYTES &&
                 (c.H == 1 || made.stride[2] == c.K) &&
                 (c.B == 1 || made.stride[0] == c.H * c.K) && to.dtype == c.dtype;
        for (int k = 0; k < 3; k++) {
            serves = serves && (uintptr_t)front->at[k].data % 16 == 0 &&
                     (!front->at[k].data || front->at[k].dtype == c.dtype);
        }
    }
    return serves;
}

/* ---- making stages --------------------------------------------------------------------------- */

template <typename X>
static X *make(mn_few_stage *to, int kind) {
    memset(to, 0, sizeof *to);
    X *stage = (X *)to;
    stage->kind = kind;
    return stage;
}

extern "C" void mn_few_parts_stage(mn_few_stage *to, const mn_few_parts *parts) {
    mn_few_parts_at *p = make<mn_few_parts_at>(to, MN_FEW_PARTS_STAGE);
    p->n_parts = parts->n_parts;
    for (int i = 0; i <= parts->n_parts; i++) p->first[i] = parts->first[i];
    for (int i = 0; i < parts->first[parts->n_parts]; i++) {
        p->job[i] = mn_few_job_of(parts->work[i]);
    }
}

/* A source of an ending: a result of the stage, or memory, one number for all or one for each. */
static mn_few_source source_of(const mn_few_products *given, int ending, int k) {
    const mn_few &of = given->ending[ending].work;
    const mn_view &view = of.at[k];
    mn_few_source from = { (char *)view.data, -1, of.kind == MN_FEW_CONV, view.dtype == MN_F32 };
    for (int i = 0; i < 4; i++) from.step |= of.shape[i] > 1 && view.stride[i] != 0;
    for (int i = 0; i < given->n && view.data; i++) {
        if (given->of[i].c == view.data) from.from = i;
    }
    for (int i = 0; i < ending && view.data; i++) {
        const mn_few &work = given->ending[i].work;
        if (work.at[mn_few_inputs(work.kind)].data == view.data) {
            from.from = MN_FEW_PRODUCTS + i;
        }
    }
    return from;
}

static mn_few_end end_of(const mn_few_products *given, int i) {
    const mn_few &work = given->ending[i].work;
    const int inputs = mn_few_inputs(work.kind);
    mn_few_end end = {};
    end.kind = work.kind, end.f = work.f, end.product = given->ending[i].product;
    end.taps = (int)work.shape[1], end.value = MN_FEW_PRODUCTS + i;
    end.scale = (float)work.scale, end.shift = (float)work.shift;
    end.narrow = true;
    for (int k = 0; k <= inputs; k++) {
        end.narrow = end.narrow && (!work.at[k].data || work.at[k].dtype == MN_BF16);
    }
    for (int k = 0; k < 4; k++) {
        end.in[k] = { NULL, -1, 0, false };
        if (k < inputs) end.in[k] = source_of(given, i, k);
    }
    end.out = { (char *)work.at[inputs].data, -1, 1, work.at[inputs].dtype == MN_F32 };
    if (work.kind == MN_FEW_CONV) end.tail = { (char *)work.at[inputs + 1].data, -1, 1, true };
    return end;
}

/* Whether ending `end` is about product i. */
static bool is_about(const mn_few_end &end, int i) {
    bool about = end.product == i;
    for (const mn_few_source &from : end.in) about = about || from.from == i;
    return about;
}

/* Strips of products that endings join fall to the same blocks; the others follow each other. False
 * where a product would have to be in two places. */
static bool place_strips(mn_few_products_at *p, int blocks) {
    int64_t all = 0;
    bool fits = true;
    for (int i = 0; i < p->n; i++) {
        p->of[i].begin = (int)(all % blocks);
        all += mn_ceil_div((int64_t)p->of[i].N, MN_FEW_COLUMNS);
        for (int k = 0; k < p->n_ends; k++) {
            for (int j = 0; j < i && is_about(p->end[k], i); j++) {
                if (is_about(p->end[k], j)) p->of[i].begin = p->of[j].begin;
            }
        }
    }
    for (int k = 0; k < p->n_ends; k++) {
        for (int i = 0; i < p->n; i++) {
            fits = fits && (!is_about(p->end[k], i) ||
                            p->of[i].begin == p->of[p->end[k].product].begin);
        }
    }
    return fits;
}

/* What endings of a product read from memory, in front of its sums. */
static void list_operands(mn_few_products_at *p) {
    int n = 0;
    for (int i = 0; i < p->n; i++) {
        mn_few_weight &w = p->of[i];
        w.first_operand = n, w.n_operands = 0, w.conv = -1;
        for (int k = 0; k < p->n_ends; k++) {
            mn_few_end &end = p->end[k];
            if (end.product != i) continue;
            if (end.kind == MN_FEW_CONV) w.conv = k;
            for (int j = 0; j < 2 && end.kind != MN_FEW_CONV; j++) {
                mn_few_source &from = end.in[j];
                const bool room = w.n_operands < MN_FEW_EARLY && n < MN_FEW_OPERANDS;
                if (!from.data || from.from != -1 || !room) continue;
                p->operand[n++] = { from.data, from.step, from.wide };
                from.from = -2 - w.n_operands++;
            }
        }
    }
}

/* How a single row of bf16 comes: see few_weights.cuh. */
static int way_of(const mn_few_products_at &p) {
    if (p.wide || p.M != 1 || p.K > MN_FEW_LONGEST) return MN_FEW_BY_BLOCK;
    if (!p.has_first) return MN_FEW_OWN_COPY;
    const mn_few_job &job = p.first;
    const bool gated = job.kind == MN_FEW_GATED_NORM;
    const bool norm = gated || job.kind == MN_FEW_RMS_NORM;
    const bool whole = job.width % 128 == 0 && job.rows * job.width == p.K;
    const bool late = !gated || job.order != MN_FEW_GATE_FIRST;
    return norm && whole && late && job.packs && job.narrow && job.width % 8 == 0 &&
                   (gated || job.rows == 1)
               ? MN_FEW_OWN_NORM
               : MN_FEW_BY_BLOCK;
}

static bool fill_products(mn_few_products_at *p, const mn_few_products *given) {
    p->wide = given->dtype == MN_F32, p->M = (int)given->M, p->K = (int)given->K;
    p->step = p->K + MN_FEW_ROW_PAD, p->n = given->n, p->n_ends = given->n_endings;
    p->settled = given->settled, p->a_row = given->a_row, p->a = given->a;
    p->has_first = given->first != NULL;
    if (given->first) p->first = mn_few_job_of(*given->first);
    p->by_width = mn_divide_by(mn_max(p->first.width, 1));
    p->inverse_width = 1.0f / (float)mn_max(p->first.width, 1);
    for (int i = 0; i < given->n; i++) {
        const mn_few_product &g = given->of[i];
        const int strips = (int)mn_ceil_div(g.N, MN_FEW_COLUMNS), blocks = blocks_here();
        p->of[i] = { g.b,  g.bias, g.plus, g.c,           g.sum,         g.b_row, (int)g.N,
                     0,    0,      0,      -1,            strips / blocks, strips % blocks };
    }
    for (int i = 0; i < given->n_endings; i++) p->end[i] = end_of(given, i);
    const bool fits = place_strips(p, blocks_here());
    list_operands(p);
    p->way = way_of(*p);
    return fits;
}

extern "C" void mn_few_products_stage(mn_few_stage *to, const mn_few_products *given) {
    (void)fill_products(make<mn_few_products_at>(to, MN_FEW_PRODUCTS_STAGE), given);
}

/* Whether all strips of a block are one batch. */
extern "C" bool mn_few_ends(const mn_few_products *given) {
    mn_few_stage stage;
    mn_few_products_at *p = make<mn_few_products_at>(&stage, MN_FEW_PRODUCTS_STAGE);
    bool fits = fill_products(p, given) && given->M == 1;
    for (int i = 0; i < p->n_ends; i++) {
        fits = fits && (p->end[i].kind != MN_FEW_CONV || (uintptr_t)p->end[i].in[1].data % 16 == 0);
    }
    int all = 0;    // strips of the block that has most
    for (int i = 0; i < p->n; i++) {
        const int count = p->of[i].turns + (p->of[i].rest > 0);
        fits = fits && count <= MN_FEW_TURNS;
        all += count;
    }
    fits = fits && all <= MN_FEW_BATCH;
    return fits;
}

extern "C" void mn_few_memory_stage(mn_few_stage *to, const mn_few_memory *m) {
    mn_few_memory_at *p = make<mn_few_memory_at>(to, MN_FEW_MEMORY_STAGE);
    const mn_call &c = m->call;
    p->wide = c.dtype == MN_F32, p->B = (int)c.B, p->H = (int)c.H, p->K = (int)c.K;
    p->V = (int)c.V, p->decay = m->decay, p->settled = m->settled;
    p->erases = m->e.data != NULL, p->scale = (float)m->scale;
    p->q = m->q, p->e = m->e, p->w = m->w, p->v = m->v, p->beta = m->beta, p->g = m->g;
    p->state0 = m->state0, p->o = m->o, p->state = m->state;
    for (int i = 0; i < MN_FEW_FRONTS; i++) {
        if (!m->first[i]) continue;
        p->front[i] = mn_few_job_of(*m->first[i]);
        p->fronts |= 1 << i;
    }
}
