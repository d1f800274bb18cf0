/* ceiling.c - work that this machine cannot do faster, measured next to the operators. */
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "base/clock.h"
#include "base/status.h"
#include "base/util.h"
#include "cli/bench/bench.h"
#include "cli/bench/openblas.h"
#include "kernels/cpu/simd/vector_targets.h"

#define MN_PER_TARGET "kernels/cpu/ceiling/ceiling_divide.h"
#include "kernels/cpu/simd/per_target.h"
#define MN_PER_TARGET "kernels/cpu/ceiling/ceiling_moebius.h"
#include "kernels/cpu/simd/per_target.h"

/* sgemm's n; floats that one thread takes at a time; parts into which cells are cut */
enum { SGEMM_N = 1024, PIECE = 1 << 16, CELL_PARTS = 64 };

/* ---- memory ------------------------------------------------------------------------------------
 */

/* Flips every sign bit: a read and a write of the same place, and values that stay as they are. */
static void flip_piece(void *context, int64_t item, int worker) {
    (void)worker;
    const mn_ceiling *c = context;
    uint32_t *at = (uint32_t *)c->a + item * PIECE;
    const int64_t n = mn_min(PIECE, c->count - item * PIECE);
    for (int64_t i = 0; i < n; i++) at[i] ^= 0x80000000u;
}

static void copy_piece(void *context, int64_t item, int worker) {
    (void)worker;
    const mn_ceiling *c = context;
    const int64_t n = mn_min(PIECE, c->count - item * PIECE);
    memcpy(c->b + item * PIECE, c->a + item * PIECE, (size_t)n * sizeof *c->a);
}

/* One exclusive or over the piece, kept where the compiler cannot drop it. */
static void read_piece(void *context, int64_t item, int worker) {
    (void)worker;
    const mn_ceiling *c = context;
    const uint32_t *at = (const uint32_t *)c->a + item * PIECE;
    const int64_t n = mn_min(PIECE, c->count - item * PIECE);
    uint32_t all = 0;
    for (int64_t i = 0; i < n; i++) all ^= at[i];
    ((uint32_t *)c->b)[item] = all;
}

/* ---- divisions ------------------------------------------------------------------------------- */

/* Rounds of arithmetic on registers, and the cells that one of them computes. */
struct mn_cell_loop {
    float (*run)(int64_t rounds);
    int64_t (*cells)(void);
};

/* NULL where the target has no loop of its own. */
static const mn_cell_loop *cell_loop(mn_op_id op, mn_target_id target) {
#define LOOPS(id, name)                                                                            \
    static const mn_cell_loop name[2] = {                                                          \
        { mn_ceiling_divide_##name, mn_ceiling_divide_cells_##name },                              \
        { mn_ceiling_moebius_##name, mn_ceiling_moebius_cells_##name },                            \
    };                                                                                             \
    if (target == MN_TARGET_##id) return &name[op == MN_OP_moebius];
    MN_VECTOR_TARGETS(LOOPS)
#undef LOOPS
    (void)op;
    (void)target;
    return NULL;
}

static void compute_cells(void *context, int64_t item, int worker) {
    (void)worker;
    const mn_ceiling *c = context;
    const double part = c->cells / CELL_PARTS / (double)c->loop->cells();
    c->b[item] = c->loop->run((int64_t)ceil(part));
}

/* ---- open and close ----------------------------------------------------------------------------
 */

/* `count` floats that are there: untouched memory would all be one page of zeros. */
static float *filled(int64_t count) {
    float *memory = aligned_alloc(64, mn_ceil_div(count * (int64_t)sizeof(float), 64) * 64);
    for (int64_t i = 0; memory && i < count; i++) memory[i] = 0.1f * (float)(i % 7) - 0.3f;
    return memory;
}

mn_status mn_ceiling_open(mn_ceiling *ceiling, const mn_bench_case *which, const mn_sample *sample,
                          mn_context *context) {
    *ceiling = (mn_ceiling){ .id = which->ceiling,
                             .context = context,
                             .flop = mn_bench_work(which, sample),
                             .bytes = mn_bench_bytes(which, sample, MN_F32),
                             .cells = mn_bench_cells(which, sample) };
    const int64_t floats = mn_max((int64_t)(ceiling->bytes / sizeof(float)), 1);
    int64_t need_b = 0, need_c = 0;
    switch (which->ceiling) {
    case MN_CEILING_SGEMM: ceiling->count = need_b = need_c = SGEMM_N * SGEMM_N; break;
    case MN_CEILING_STREAM: ceiling->count = mn_ceil_div(floats, 2); break;
    case MN_CEILING_COPY: ceiling->count = need_b = mn_ceil_div(floats, 2); break;
    case MN_CEILING_READ:
        ceiling->count = floats;
        need_b = mn_ceil_div(floats, PIECE);
        break;
    case MN_CEILING_DIVIDE:
        ceiling->loop = cell_loop(which->op, context->target);
        need_b = CELL_PARTS;
        break;
    default: return MN_OK;
    }
    ceiling->a = filled(ceiling->count);
    if (need_b) ceiling->b = filled(need_b);
    if (need_c) ceiling->c = filled(need_c);
    if (ceiling->a && (ceiling->b || !need_b) && (ceiling->c || !need_c)) return MN_OK;
    mn_ceiling_close(ceiling);
    return mn_fail(MN_ERR_MEMORY, "no memory for a ceiling of %.0f bytes", ceiling->bytes);
}

void mn_ceiling_close(mn_ceiling *ceiling) {
    free(ceiling->a);
    free(ceiling->b);
    free(ceiling->c);
    ceiling->a = ceiling->b = ceiling->c = NULL;
}

/* ---- running -----------------------------------------------------------------------------------
 */

static double sgemm_seconds(const mn_ceiling *c) {
    const int n = SGEMM_N, n_threads = mn_context_threads(c->context);
    const double start = mn_seconds();
    if (!mn_openblas_sgemm(n_threads, n, c->a, c->b, c->c)) return NAN;
    return (mn_seconds() - start) * c->flop / (2.0 * n * (double)n * n);
}

static double seconds_of(mn_ceiling *c, int64_t n_items, mn_item_fn fn) {
    const double start = mn_seconds();
    mn_threads_run(c->context->threads, n_items, fn, c);
    return mn_seconds() - start;
}

double mn_ceiling_seconds(mn_ceiling *ceiling) {
    const int64_t n_pieces = mn_ceil_div(ceiling->count, PIECE);
    switch (ceiling->id) {
    case MN_CEILING_SGEMM: return sgemm_seconds(ceiling);
    case MN_CEILING_STREAM: return seconds_of(ceiling, n_pieces, flip_piece);
    case MN_CEILING_COPY: return seconds_of(ceiling, n_pieces, copy_piece);
    case MN_CEILING_READ: return seconds_of(ceiling, n_pieces, read_piece);
    case MN_CEILING_DIVIDE:
        return ceiling->loop ? seconds_of(ceiling, CELL_PARTS, compute_cells) : NAN;
    default: return NAN;
    }
}
