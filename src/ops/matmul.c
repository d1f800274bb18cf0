/* matmul.c - C = A B on the context's threads.
 *
 * float32 on a vector target goes one of three ways (kernels/cpu/gemm/matmul.h):
 *
 *   few rows, B transposed     columns shared out, B read once as it lies: decoding
 *   some rows, or small        blocks of C through mn_gemm, which packs a little at a time
 *   else                       chunk after chunk of B: the threads pack its panels, then take
 *                              blocks of rows
 *
 * and an element gets the same bits on each of them. Quantised weights go the first way or the
 * third, become float32 in registers or where they are packed, and give the bits of such weights.
 * float64, and float32 where there is no vector target, take plain loops with sums in double. */
#include "ops/matmul.h"

#include <sched.h>
#include <stdatomic.h>

#include "base/checked.h"
#include "base/dtype.h"
#include "base/status.h"
#include "base/util.h"
#include "kernels/cpu/simd/vector_targets.h"
#include "ops/workspace.h"

#define MN_PER_TARGET "kernels/cpu/gemm/gemm.h"
#include "kernels/cpu/simd/per_target.h"
#define MN_PER_TARGET "kernels/cpu/gemm/matmul.h"
#include "kernels/cpu/simd/per_target.h"
#define MN_PER_TARGET "kernels/cpu/quant/quant.h"
#include "kernels/cpu/simd/per_target.h"

/* ---- plain loops -----------------------------------------------------------------------------
 */

/* A block of C is one item; so many sums go side by side where each is a dot product. */
enum { M_BLOCK = 64, N_BLOCK = 256, SIDE = 8 };

typedef struct plain_job {
    mn_matmul_args p;
    int64_t n_across;    // blocks of C side by side
} plain_job;

/* Elements between neighbours down a column and along a row of a factor. */
typedef struct steps {
    int64_t row, col;
} steps;

static steps steps_of(int64_t stored_row, bool transposed) {
    return transposed ? (steps){ 1, stored_row } : (steps){ stored_row, 1 };
}

/* One row of a block at a time, its sums in double; the innermost loop runs along whichever axis of
 * B is contiguous. */
#define PLAIN(name, TYPE)                                                                          \
    static void name(void *context, int64_t item, int worker) {                                    \
        (void)worker;                                                                              \
        const plain_job *job = context;                                                            \
        const mn_matmul_args *p = &job->p;                                                         \
        const steps a = steps_of(p->a_row, p->a_transposed);                                       \
        const steps b = steps_of(p->b_row, p->b_transposed);                                       \
        const int64_t i0 = item / job->n_across * M_BLOCK, j0 = item % job->n_across * N_BLOCK;    \
        const int64_t i1 = mn_min(i0 + M_BLOCK, p->M), N = mn_min(N_BLOCK, p->N - j0);             \
        for (int64_t i = i0; i < i1; i++) {                                                        \
            const TYPE *a_i = (const TYPE *)p->a + i * a.row;                                      \
            const TYPE *b_0 = (const TYPE *)p->b + j0 * b.col;                                     \
            TYPE *c_i = (TYPE *)p->c + i * p->c_row + j0;                                          \
            double sum[N_BLOCK] = { 0.0 };                                                         \
            for (int64_t j = 0; p->b_transposed && j < N; j += SIDE) {                             \
                const int64_t n = mn_min(SIDE, N - j);                                             \
                for (int64_t k = 0; k < p->K; k++) {                                               \
                    const double a_ik = a_i[k * a.col];                                            \
                    for (int64_t s = 0; s < n; s++) sum[j + s] += a_ik * b_0[(j + s) * b.col + k]; \
                }                                                                                  \
            }                                                                                      \
            for (int64_t k = 0; !p->b_transposed && k < p->K; k++) {                               \
                const double a_ik = a_i[k * a.col];                                                \
                for (int64_t j = 0; j < N; j++) sum[j] += a_ik * b_0[k * b.row + j];               \
            }                                                                                      \
            for (int64_t j = 0; j < N; j++) {                                                      \
                c_i[j] = (TYPE)(p->accumulate ? c_i[j] + sum[j] : sum[j]);                         \
            }                                                                                      \
        }                                                                                          \
    }
PLAIN(plain_f32, float)
PLAIN(plain_f64, double)
#undef PLAIN

/* The same with a quantised B, a column of which is as long as a row of A. */
static void plain_quant(void *context, int64_t item, int worker) {
    (void)worker;
    const plain_job *job = context;
    const mn_matmul_args *p = &job->p;
    const int64_t i0 = item / job->n_across * M_BLOCK, j0 = item % job->n_across * N_BLOCK;
    const int64_t i1 = mn_min(i0 + M_BLOCK, p->M), j1 = mn_min(j0 + N_BLOCK, p->N);
    for (int64_t j = j0; j < j1; j++) {
        double sum[M_BLOCK] = { 0.0 };
        for (int64_t k = 0; k < p->K; k++) {
            const double w = mn_quant_weight(p->quant, j, k);
            for (int64_t i = i0; i < i1; i++) {
                sum[i - i0] += w * ((const float *)p->a)[i * p->a_row + k];
            }
        }
        for (int64_t i = i0; i < i1; i++) {
            float *c = (float *)p->c + i * p->c_row + j;
            *c = (float)(p->accumulate ? *c + sum[i - i0] : sum[i - i0]);
        }
    }
}

static void run_plain(mn_context *context, const mn_matmul_args *p) {
    plain_job job = { *p, mn_ceil_div(p->N, N_BLOCK) };
    mn_threads_run(context->threads, mn_ceil_div(p->M, M_BLOCK) * job.n_across,
                   p->quant ? plain_quant : p->dtype == MN_F64 ? plain_f64 : plain_f32, &job);
}

/* ---- vector targets ----------------------------------------------------------------------------
 */

typedef struct functions {
    void (*gemm)(const mn_gemm_args *p);
    void (*gemm_nt)(const mn_gemm_args *p);
    int64_t (*panel)(void);
    void (*pack)(const mn_product *p, const mn_chunk *chunk, int64_t panel);
    void (*rows)(const mn_product *p, const mn_chunk *chunk, int64_t i0, int64_t i1, int64_t first,
                 int64_t last, float *scratch);
    void (*few)(const mn_product *p, int64_t j0, int64_t j1);
    void (*quant_few)(const mn_product *p, int64_t j0, int64_t j1);
    void (*quant_pack)(const mn_product *p, const mn_chunk *chunk, int64_t panel);
} functions;

/* NULL where the target has none. */
static const functions *functions_of(mn_target_id target) {
#define FUNCTIONS(id, name)                                                                        \
    static const functions name = {                                                                \
        mn_gemm_##name,        mn_gemm_nt_##name,    mn_matmul_panel_##name,                       \
        mn_matmul_pack_##name, mn_matmul_rows_##name, mn_matmul_few_##name,                        \
        mn_quant_few_##name,   mn_quant_pack_##name,                                               \
    };                                                                                             \
    if (target == MN_TARGET_##id) return &name;
    MN_VECTOR_TARGETS(FUNCTIONS)
#undef FUNCTIONS
    (void)target;
    return NULL;
}

/* A product and how it is shared out. */
typedef struct job {
    mn_product p;
    const functions *f;
    mn_chunk chunk;
    int64_t n_panels;                // of the chunk: the first items pack one each
    int64_t item_rows, item_cols;    // of C; in the packed way columns are panels
    int64_t n_across;                // items side by side
    float *scratch;                  // scratch_floats for each worker
    _Atomic int64_t n_packed;
} job;

enum { SCRATCH_FLOATS = MN_MATMUL_ROWS * MN_MATMUL_K };

/* 4 MiB of packed B: in the last cache beside a worker's rows, and few enough chunks that their
 * beginnings do not show. */
static const int64_t chunk_floats = INT64_C(1) << 20;

/* Up to so many rows, or so many multiply-adds, packing all of B costs more than it gains. */
enum { SOME_ROWS = 64 };
static const int64_t small_product = INT64_C(1) << 16;

static void gemm_item(void *context, int64_t item, int worker) {
    (void)worker;
    const job *j = context;
    const mn_product *p = &j->p;
    const int64_t i0 = item / j->n_across * j->item_rows, j0 = item % j->n_across * j->item_cols;
    const bool transposed = p->b_col != 1;
    const int64_t block = mn_matmul_block(p->K);
    mn_gemm_args g = {
        .c = p->c + i0 * p->c_row + j0, .c_row = p->c_row,
        .a = p->a + i0 * p->a_row, .a_row = p->a_row, .a_col = p->a_col,
        .b = p->b + j0 * p->b_col, .b_row = transposed ? p->b_col : p->b_row,
        .M = mn_min(j->item_rows, p->M - i0), .N = mn_min(j->item_cols, p->N - j0), .alpha = 1.0f,
        .base = p->accumulate ? MN_GEMM_ADD : MN_GEMM_SET,
    };
    int64_t k = 0;
    do {
        g.K = mn_min(p->K - k, block);
        (transposed ? j->f->gemm_nt : j->f->gemm)(&g);
        g.base = MN_GEMM_ADD;
        g.a += g.K * p->a_col;
        g.b += g.K * p->b_row;
        k += g.K;
    } while (k < p->K);
}

static void run_gemm(mn_context *context, job *j) {
    j->item_rows = M_BLOCK;
    const int64_t blocks = mn_ceil_div(j->p.M, M_BLOCK) * mn_ceil_div(j->p.N, N_BLOCK);
    j->item_cols = blocks < 4 * mn_threads_count(context->threads) ? N_BLOCK / 4 : N_BLOCK;
    j->n_across = mn_ceil_div(j->p.N, j->item_cols);
    mn_threads_run(context->threads, mn_ceil_div(j->p.M, M_BLOCK) * j->n_across, gemm_item, j);
}

static void few_item(void *context, int64_t item, int worker) {
    (void)worker;
    const job *j = context;
    const int64_t j0 = item * j->item_cols;
    j->f->few(&j->p, j0, mn_min(j0 + j->item_cols, j->p.N));
}

/* An item streams some 64 KiB of weights, in whole vectors of columns. */
static void run_few(mn_context *context, job *j) {
    enum { VECTORS = 32, ITEM_FLOATS = 1 << 14 };
    const int64_t vectors = mn_max(1, ITEM_FLOATS / (VECTORS * mn_max(1, j->p.K)));
    j->item_cols = VECTORS * vectors;
    mn_threads_run(context->threads, mn_ceil_div(j->p.N, j->item_cols), few_item, j);
}

static void quant_item(void *context, int64_t item, int worker) {
    (void)worker;
    const job *j = context;
    const int64_t j0 = item * j->item_cols;
    j->f->quant_few(&j->p, j0, mn_min(j0 + j->item_cols, j->p.N));
}

/* The same for quantised weights. */
static void run_quant_few(mn_context *context, job *j) {
    enum { ITEM_WEIGHTS = 1 << 16 };
    j->item_cols = MN_QUANT_COLS * mn_max(1, ITEM_WEIGHTS / (MN_QUANT_COLS * mn_max(1, j->p.K)));
    mn_threads_run(context->threads, mn_ceil_div(j->p.N, j->item_cols), quant_item, j);
}

/* Items begin in order, so whoever packs the missing panels is at work. */
static void wait_for_panels(job *j) {
    for (int looks = 0; atomic_load(&j->n_packed) < j->n_panels; looks++) {
        if (looks > 1000) sched_yield();
    }
}

static void packed_item(void *context, int64_t item, int worker) {
    job *j = context;
    if (item < j->n_panels) {
        (j->p.quant ? j->f->quant_pack : j->f->pack)(&j->p, &j->chunk, item);
        atomic_fetch_add(&j->n_packed, 1);
        return;
    }
    wait_for_panels(j);
    item -= j->n_panels;
    const int64_t i0 = item / j->n_across * j->item_rows;
    const int64_t first = item % j->n_across * j->item_cols;
    j->f->rows(&j->p, &j->chunk, i0, mn_min(i0 + j->item_rows, j->p.M), first,
               mn_min(first + j->item_cols, j->n_panels), j->scratch + worker * SCRATCH_FLOATS);
}

/* Blocks of rows that a worker's scratch holds, at least two for each thread, and columns cut too
 * where there are too few rows for that. */
static void share_out(job *j, int n_threads) {
    const int64_t wanted = 2 * n_threads, least = 24;
    int64_t rows = mn_max(mn_ceil_div(j->p.M, wanted), least);
    rows = mn_min(mn_ceil_div(rows, 24) * 24, MN_MATMUL_ROWS);
    const int64_t down = mn_ceil_div(j->p.M, rows);
    const int64_t across = mn_min(mn_ceil_div(wanted, down), j->n_panels);
    j->item_rows = rows;
    j->item_cols = mn_ceil_div(j->n_panels, across);
    j->n_across = mn_ceil_div(j->n_panels, j->item_cols);
}

static void run_chunk(mn_context *context, job *j) {
    j->n_panels = mn_ceil_div(j->chunk.j1 - j->chunk.j0, j->f->panel());
    share_out(j, mn_threads_count(context->threads));
    atomic_store(&j->n_packed, 0);
    const int64_t n_items = mn_ceil_div(j->p.M, j->item_rows) * j->n_across;
    mn_threads_run(context->threads, j->n_panels + n_items, packed_item, j);
}

/* Rows and panels of a packed chunk: as many rows of K as there are first, then panels as
 * fit. */
static void chunk_of(int64_t *rows, int64_t *panels, const functions *f, int64_t N, int64_t K) {
    const int64_t block = mn_matmul_block(K), panel = f->panel();
    *rows = mn_min(K, mn_max(1, chunk_floats / (4 * panel * block)) * block);
    *panels = mn_min(mn_ceil_div(N, panel),
                         mn_max(1, chunk_floats / (mn_max(*rows, 1) * panel)));
}

/* False, and nothing done, when there is no memory. */
static bool run_packed(mn_context *context, job *j) {
    const int64_t panel = j->f->panel();
    int64_t K, panels;
    chunk_of(&K, &panels, j->f, j->p.N, j->p.K);
    const mn_mark mark = mn_arena_mark(context->arena);
    float *packed = mn_arena_array(context->arena, K, panels * panel, sizeof *packed);
    j->chunk.packed = packed;
    j->scratch = mn_arena_array(context->arena, mn_threads_count(context->threads), SCRATCH_FLOATS,
                                sizeof *j->scratch);
    const bool fits = packed && j->scratch;
    for (int64_t j0 = 0; fits && j0 < j->p.N; j0 += panels * panel) {
        for (int64_t k0 = 0; k0 < j->p.K; k0 += K) {
            j->chunk = (mn_chunk){ k0, mn_min(k0 + K, j->p.K), j0,
                                   mn_min(j0 + panels * panel, j->p.N), packed };
            run_chunk(context, j);
        }
    }
    mn_arena_release(context->arena, mark);
    return fits;
}

static bool is_small(const mn_product *p) {
    int64_t size;
    return mn_mul_i64(&size, p->M, p->N) && mn_mul_i64(&size, size, p->K) && size <= small_product;
}

/* Factors whose rows lie near each other are read as fast where they lie. */
static bool is_near(const mn_product *p) {
    enum { B_STEP = 511, A_ROW = 2048, A_COL = 768 };
    return p->b_col == 1 && p->b_row <= B_STEP && p->K <= chunk_floats / (B_STEP + 1) &&
           p->a_row <= A_ROW && p->a_col <= A_COL;
}

static void run_vector(mn_context *context, const functions *f, const mn_matmul_args *args) {
    const steps a = steps_of(args->a_row, args->a_transposed);
    const steps b = steps_of(args->b_row, args->b_transposed);
    job j = { .f = f,
              .p = { .c = args->c, .c_row = args->c_row, .a = args->a, .a_row = a.row,
                     .a_col = a.col, .b = args->b, .b_row = b.row, .b_col = b.col, .M = args->M,
                     .N = args->N, .K = args->K, .accumulate = args->accumulate,
                     .quant = args->quant } };
    if (args->quant) {
        if (args->M <= MN_QUANT_FEW || !run_packed(context, &j)) run_quant_few(context, &j);
        return;
    }
    const bool small = args->M <= SOME_ROWS || is_small(&j.p) || is_near(&j.p);
    if (args->M <= MN_MATMUL_FEW && args->b_transposed && args->K > 0) run_few(context, &j);
    else if (small || !run_packed(context, &j)) run_gemm(context, &j);
}

/* ---- on a device ----------------------------------------------------------------------------- */

mn_gemm_problem mn_matmul_work_of(const mn_matmul_args *p) {
    return (mn_gemm_problem){
        .dtype = p->dtype, .c_dtype = p->dtype == MN_BF16 ? p->c_dtype : p->dtype,
        .a = p->a, .b = p->b, .c = p->c, .bias = p->bias, .M = p->M, .N = p->N, .K = p->K,
        .a_row = p->a_row ? p->a_row : p->a_transposed ? p->M : p->K,
        .b_row = p->b_row ? p->b_row : p->b_transposed ? p->K : p->N,
        .c_row = p->c_row ? p->c_row : p->N,
        .a_transposed = p->a_transposed, .b_transposed = p->b_transposed,
        .accumulate = p->accumulate, .onto = p->onto, .quant = p->quant, .alike = p->alike,
        .b_is_old = p->b_is_old };
}

mn_status mn_matmul_run(mn_context *context, const mn_gemm_problem *work) {
    mn_device *device = context->device;
    const mn_mark mark = mn_device_mark(device);
    mn_status st = mn_device_use(device);
    if (st == MN_OK && !context->products) {
        context->products = mn_gemm_create();
        if (!context->products) st = mn_fail(MN_ERR_MEMORY, "no memory for matrix products");
    }
    void *space = st == MN_OK ? mn_device_bytes(device, mn_gemm_workspace(work)) : NULL;
    if (st == MN_OK && !space) {
        st = mn_fail(MN_ERR_MEMORY, "the GPU has no memory for the work space of a product");
    }
    if (st == MN_OK) {
        const int code = mn_gemm_run(context->products, work, space,
                                         mn_device_stream(device));
        st = mn_device_check(device, code, "a matrix product");
    }
    mn_device_release(device, mark);
    return st;
}

/* ---- all ------------------------------------------------------------------------------------- */

/* c += more, n numbers of a row; nothing where `more` is NULL. */
static void add_row(mn_dtype dtype, void *c, const void *more, int64_t n) {
    if (!more) return;
    if (dtype == MN_F64) {
        for (int64_t i = 0; i < n; i++) ((double *)c)[i] += ((const double *)more)[i];
    } else {
        for (int64_t i = 0; i < n; i++) ((float *)c)[i] += ((const float *)more)[i];
    }
}

/* The bias, and what the product is put onto. */
static void add_rows(void *context, int64_t item, int worker) {
    (void)worker;
    const mn_matmul_args *p = context;
    const size_t row_bytes = (size_t)p->c_row * mn_dtype_bytes(p->dtype);
    for (int64_t row = item * M_BLOCK; row < mn_min((item + 1) * M_BLOCK, p->M); row++) {
        char *c = (char *)p->c + (size_t)row * row_bytes;
        add_row(p->dtype, c, p->bias, p->N);
        add_row(p->dtype, c, p->onto ? (const char *)p->onto + (size_t)row * row_bytes : NULL,
                p->N);
    }
}

size_t mn_matmul_work(const mn_context *context, const mn_matmul_args *p) {
    if (context->device) return mn_gemm_workspace(&(mn_gemm_problem){ .quant = p->quant });
    const functions *f = functions_of(context->target);
    if (p->dtype == MN_F32 && f && p->N > 0 && p->K > 0) {
        int64_t rows, panels;
        chunk_of(&rows, &panels, f, p->N, p->K);
        return (size_t)(rows * panels * f->panel() +
                        mn_threads_count(context->threads) * (int64_t)SCRATCH_FLOATS) *
                   sizeof(float) + 2 * MN_ALIGN;
    }
    return 0;
}

static void run_on_cpu(mn_context *context, const mn_matmul_args *p) {
    const functions *f = functions_of(context->target);
    if (p->dtype == MN_F32 && f) run_vector(context, f, p);
    else run_plain(context, p);
}

static mn_status count_work(mn_context *context, const mn_matmul_args *p) {
    const mn_mark mark = mn_workspace_mark(context);
    mn_workspace_bytes(context, mn_matmul_work(context, p));
    mn_workspace_release(context, mark);
    return MN_OK;
}

mn_status mn_matmul(mn_context *context, const mn_matmul_args *args) {
    mn_matmul_args p = *args;
    if (p.a_row == 0) p.a_row = p.a_transposed ? p.M : p.K;
    if (p.b_row == 0) p.b_row = p.b_transposed ? p.K : p.N;
    if (p.c_row == 0) p.c_row = p.N;
    if (p.M == 0 || p.N == 0) return MN_OK;
    if (context->plans) return count_work(context, &p);
    if (context->device) {
        mn_gemm_problem work = mn_matmul_work_of(&p);
        work.step = context->steps;
        return mn_matmul_run(context, &work);
    }
    run_on_cpu(context, &p);
    if (p.bias || p.onto) {
        mn_threads_run(context->threads, mn_ceil_div(p.M, M_BLOCK), add_rows, &p);
    }
    return MN_OK;
}
