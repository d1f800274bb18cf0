/* matmul.c - C = A B cut into blocks of C, one item each.
 *
 * float32 goes to the small products of the vector targets; float64, and float32 where there is no
 * vector target, to plain loops with sums in double. */
#include "ops/matmul.h"

#include <string.h>

#include "base/util.h"

#if MN_HAVE_X86_TARGETS
#define MN_TARGET avx2
#include "kernels/vec/gemm.h"
#undef MN_TARGET
#define MN_TARGET avx512
#include "kernels/vec/gemm.h"
#undef MN_TARGET
#endif

/* A block of C is one item. K_BLOCK terms are summed in a row before they join C: short chains
 * round less, and a weight gradient over 65,536 tokens is a sum of 65,536 terms. */
enum { M_BLOCK = 64, N_BLOCK = 256, K_BLOCK = 512 };

typedef struct block {
    int64_t i0, j0, M, N;
} block;

typedef struct job {
    mn_matmul_args p;
    void (*run)(const mn_matmul_args *p, const block *at);
    int64_t n_across;    // blocks of C side by side
} job;

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
    static void name(const mn_matmul_args *p, const block *at) {                                   \
        const steps a = steps_of(p->a_row, p->a_transposed);                                       \
        const steps b = steps_of(p->b_row, p->b_transposed);                                       \
        for (int64_t i = at->i0; i < at->i0 + at->M; i++) {                                        \
            const TYPE *a_i = (const TYPE *)p->a + i * a.row;                                      \
            const TYPE *b_0 = (const TYPE *)p->b + at->j0 * b.col;                                 \
            TYPE *c_i = (TYPE *)p->c + i * p->c_row + at->j0;                                      \
            double sum[N_BLOCK] = { 0.0 };                                                         \
            for (int64_t j = 0; p->b_transposed && j < at->N; j++) {                               \
                const TYPE *b_j = b_0 + j * b.col;                                                 \
                for (int64_t k = 0; k < p->K; k++) sum[j] += (double)a_i[k * a.col] * b_j[k];      \
            }                                                                                      \
            for (int64_t k = 0; !p->b_transposed && k < p->K; k++) {                               \
                const double a_ik = a_i[k * a.col];                                                \
                for (int64_t j = 0; j < at->N; j++) sum[j] += a_ik * b_0[k * b.row + j];           \
            }                                                                                      \
            for (int64_t j = 0; j < at->N; j++) {                                                  \
                c_i[j] = (TYPE)(p->accumulate ? c_i[j] + sum[j] : sum[j]);                         \
            }                                                                                      \
        }                                                                                          \
    }
PLAIN(plain_f32, float)
PLAIN(plain_f64, double)
#undef PLAIN

#if MN_HAVE_X86_TARGETS
typedef void gemm_function(const mn_gemm_args *p);

static void run_gemm(const mn_matmul_args *p, const block *at, gemm_function *plain,
                     gemm_function *transposed) {
    const steps a = steps_of(p->a_row, p->a_transposed), b = steps_of(p->b_row, p->b_transposed);
    mn_gemm_args g = {
        .c = (float *)p->c + at->i0 * p->c_row + at->j0, .c_row = p->c_row,
        .a = (const float *)p->a + at->i0 * a.row, .a_row = a.row, .a_col = a.col,
        .b = (const float *)p->b + at->j0 * b.col, .b_row = p->b_row,
        .M = at->M, .N = at->N, .alpha = 1.0f,
        .base = p->accumulate ? MN_GEMM_ADD : MN_GEMM_SET,
    };
    int64_t k = 0;
    do {
        g.K = mn_min(p->K - k, K_BLOCK);
        (p->b_transposed ? transposed : plain)(&g);
        g.base = MN_GEMM_ADD;
        g.a += g.K * a.col;
        g.b += g.K * b.row;
        k += g.K;
    } while (k < p->K);
}

static void run_avx2(const mn_matmul_args *p, const block *at) {
    run_gemm(p, at, mn_gemm_avx2, mn_gemm_nt_avx2);
}

static void run_avx512(const mn_matmul_args *p, const block *at) {
    run_gemm(p, at, mn_gemm_avx512, mn_gemm_nt_avx512);
}
#endif

static void run_item(void *context, int64_t item, int worker) {
    (void)worker;
    const job *j = context;
    const int64_t i0 = item / j->n_across * M_BLOCK, j0 = item % j->n_across * N_BLOCK;
    const block at = { i0, j0, mn_min(M_BLOCK, j->p.M - i0), mn_min(N_BLOCK, j->p.N - j0) };
    j->run(&j->p, &at);
}

void mn_matmul(mn_context *context, const mn_matmul_args *args) {
    job j = { .p = *args, .n_across = mn_ceil_div(args->N, N_BLOCK) };
    if (j.p.a_row == 0) j.p.a_row = j.p.a_transposed ? j.p.M : j.p.K;
    if (j.p.b_row == 0) j.p.b_row = j.p.b_transposed ? j.p.K : j.p.N;
    if (j.p.c_row == 0) j.p.c_row = j.p.N;
    j.run = j.p.dtype == MN_F64 ? plain_f64 : plain_f32;
#if MN_HAVE_X86_TARGETS
    if (j.p.dtype == MN_F32 && context->target == MN_TARGET_AVX2) j.run = run_avx2;
    if (j.p.dtype == MN_F32 && context->target == MN_TARGET_AVX512) j.run = run_avx512;
#endif
    mn_threads_run(context->threads, mn_ceil_div(args->M, M_BLOCK) * j.n_across, run_item, &j);
}
