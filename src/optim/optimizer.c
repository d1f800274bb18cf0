/* optimizer.c - AdamW over all parameters of a model in one pass over memory.
 *
 *   g = grad_scale grad;  m += (1 - b1)(g - m);  v += (1 - b2)(g^2 - v)
 *   p -= lr (m / (1 - b1^s) / (sqrt(v / (1 - b2^s)) + eps) + weight_decay p)
 *
 * with lr times the parameter's lr_scale and weight_decay 0 where it does not decay. Parameters are
 * cut into pieces of fixed length once; a step hands all pieces of all parameters to the threads
 * together, so that a model of many small parameters keeps them as busy as one of few large ones.
 * The arithmetic is kernels/cpu/optim/adamw.c, or its equation in double where there is no vector
 * target. */
#include "optim/optim.h"

#include <inttypes.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "base/checked.h"
#include "base/status.h"
#include "base/util.h"

#define MN_TARGET avx2
#include "kernels/cpu/optim/optim.h"
#undef MN_TARGET
#define MN_TARGET avx512
#include "kernels/cpu/optim/optim.h"
#undef MN_TARGET

/* Numbers of a piece: its four arrays, 256 KiB, pass through a second cache. */
enum { PIECE = 1 << 14, ROW = MN_ALIGN / sizeof(float) };

typedef struct piece {
    int64_t param, first, count;
} piece;

typedef struct moments {
    float *first, *second;
} moments;

struct mn_optimizer {
    mn_adamw_options options;
    mn_optim_param *params;
    moments *moments;        // (n_params), into `memory`
    int64_t n_params;
    float *memory;           // all moments, each parameter's on a fresh line
    piece *pieces;
    double *squares;         // (n_pieces), of the last norm
    int64_t n_pieces;
};

/* ---- create -----------------------------------------------------------------------------------
 */

static mn_status check_options(const mn_adamw_options *o) {
    const double beta[2] = { o->beta1, o->beta2 };
    for (int i = 0; i < 2; i++) {
        if (beta[i] > 0.0 && beta[i] < 1.0) continue;
        return mn_fail(MN_ERR_ARGUMENT, "adamw: beta%d is %g, not between 0 and 1", i + 1, beta[i]);
    }
    if (!(o->eps > 0.0) || isinf(o->eps)) {
        return mn_fail(MN_ERR_ARGUMENT, "adamw: eps is %g, not a positive number", o->eps);
    }
    if (!(o->weight_decay >= 0.0) || isinf(o->weight_decay)) {
        return mn_fail(MN_ERR_ARGUMENT, "adamw: weight_decay is %g, not a number from 0 on",
                       o->weight_decay);
    }
    return MN_OK;
}

static mn_status check_param(const mn_optim_param *p, int64_t i) {
    const char *name = p->name ? p->name : "without a name";
    if (p->count < 0 || (p->count > 0 && (!p->value || !p->grad))) {
        return mn_fail(MN_ERR_ARGUMENT,
                       "adamw: parameter %" PRId64 " (%s) has no values or no gradients", i, name);
    }
    if (!(p->lr_scale >= 0.0) || isinf(p->lr_scale)) {
        return mn_fail(MN_ERR_ARGUMENT, "adamw: parameter %" PRId64 " (%s): lr_scale is %g", i,
                       name, p->lr_scale);
    }
    return MN_OK;
}

mn_status mn_optim_check(const mn_optim_param *params, int64_t n_params,
                         const mn_adamw_options *options) {
    mn_status st = check_options(options);
    for (int64_t i = 0; st == MN_OK && i < n_params; i++) st = check_param(&params[i], i);
    return st;
}

/* Numbers of one kind of moment over all parameters, each rounded up to whole lines; pieces. */
static bool count_all(int64_t *floats, int64_t *pieces, const mn_optim_param *params, int64_t n) {
    *floats = *pieces = 0;
    for (int64_t i = 0; i < n; i++) {
        int64_t padded;
        if (!mn_add_i64(&padded, params[i].count, ROW - 1)) return false;
        if (!mn_add_i64(floats, *floats, padded / ROW * ROW)) return false;
        *pieces += mn_ceil_div(params[i].count, PIECE);
    }
    return true;
}

/* count * size bytes of zeros on a fresh line, or NULL; never no bytes at all. */
static void *zeros(int64_t count, size_t size) {
    size_t bytes;
    if (!mn_mul_size(&bytes, (size_t)count, size)) return NULL;
    if (bytes > PTRDIFF_MAX - MN_ALIGN) return NULL;
    bytes = (bytes / MN_ALIGN + 1) * MN_ALIGN;
    void *memory = aligned_alloc(MN_ALIGN, bytes);
    if (memory) memset(memory, 0, bytes);
    return memory;
}

static void lay_out(mn_optimizer *o, int64_t floats) {
    float *at = o->memory;
    piece *next = o->pieces;
    for (int64_t i = 0; i < o->n_params; i++) {
        const int64_t count = o->params[i].count;
        o->moments[i] = (moments){ at, at + floats };
        at += (count + ROW - 1) / ROW * ROW;
        for (int64_t first = 0; first < count; first += PIECE) {
            *next++ = (piece){ i, first, mn_min(PIECE, count - first) };
        }
    }
}

mn_status mn_optimizer_create(mn_optimizer **out, const mn_optim_param *params, int64_t n_params,
                              const mn_adamw_options *options) {
    const mn_status st = mn_optim_check(params, n_params, options);
    if (st != MN_OK) return st;
    int64_t floats, n_pieces, both;
    mn_optimizer *o = calloc(1, sizeof *o);
    if (o && count_all(&floats, &n_pieces, params, n_params) && mn_mul_i64(&both, floats, 2)) {
        o->params = zeros(n_params, sizeof *o->params);
        o->moments = zeros(n_params, sizeof *o->moments);
        o->memory = zeros(both, sizeof *o->memory);
        o->pieces = zeros(n_pieces, sizeof *o->pieces);
        o->squares = zeros(n_pieces, sizeof *o->squares);
    }
    if (!o || !o->params || !o->moments || !o->memory || !o->pieces || !o->squares) {
        mn_optimizer_destroy(o);
        return mn_fail(MN_ERR_MEMORY, "no memory for the moments of %" PRId64 " parameters",
                       n_params);
    }
    o->options = *options;
    o->n_params = n_params;
    o->n_pieces = n_pieces;
    if (n_params > 0) memcpy(o->params, params, (size_t)n_params * sizeof *params);
    lay_out(o, floats);
    *out = o;
    return MN_OK;
}

void mn_optimizer_destroy(mn_optimizer *optimizer) {
    if (!optimizer) return;
    free(optimizer->params);
    free(optimizer->moments);
    free(optimizer->memory);
    free(optimizer->pieces);
    free(optimizer->squares);
    free(optimizer);
}

/* ---- arithmetic -------------------------------------------------------------------------------
 */

static void update_plain(const mn_adamw_piece *a) {
    const double rate = a->lr / -expm1((double)a->step * log(a->beta1));
    const double spread = 1.0 / -expm1((double)a->step * log(a->beta2));
    for (int64_t i = 0; i < a->count; i++) {
        const double g = a->grad_scale * a->g[i], p = a->p[i];
        a->m[i] = (float)(a->m[i] + (1.0 - a->beta1) * (g - a->m[i]));
        a->v[i] = (float)(a->v[i] + (1.0 - a->beta2) * (g * g - a->v[i]));
        const double ratio = a->m[i] / (sqrt(a->v[i] * spread) + a->eps);
        a->p[i] = (float)(p - a->lr * a->weight_decay * p - rate * ratio);
    }
}

static double squares_plain(const float *x, int64_t count) {
    double sum = 0.0;
    for (int64_t i = 0; i < count; i++) sum += (double)x[i] * x[i];
    return sum;
}

typedef struct functions {
    void (*update)(const mn_adamw_piece *a);
    double (*squares)(const float *x, int64_t count);
} functions;

static functions functions_of(mn_target_id target) {
#if MN_HAVE_X86_TARGETS
    if (target == MN_TARGET_AVX2) return (functions){ mn_adamw_update_avx2, mn_sum_squares_avx2 };
    if (target == MN_TARGET_AVX512) {
        return (functions){ mn_adamw_update_avx512, mn_sum_squares_avx512 };
    }
#endif
    (void)target;
    return (functions){ update_plain, squares_plain };
}

typedef struct job {
    mn_optimizer *o;
    functions f;
    int64_t step;
    double lr, grad_scale;
} job;

static void square_piece(void *context, int64_t item, int worker) {
    (void)worker;
    const job *j = context;
    const piece *at = &j->o->pieces[item];
    j->o->squares[item] = j->f.squares(j->o->params[at->param].grad + at->first, at->count);
}

static void update_piece(void *context, int64_t item, int worker) {
    (void)worker;
    const job *j = context;
    const piece *at = &j->o->pieces[item];
    const mn_optim_param *p = &j->o->params[at->param];
    const mn_adamw_options *options = &j->o->options;
    const mn_adamw_piece a = {
        .p = p->value + at->first, .g = p->grad + at->first,
        .m = j->o->moments[at->param].first + at->first,
        .v = j->o->moments[at->param].second + at->first,
        .count = at->count, .step = j->step + 1, .lr = j->lr * p->lr_scale,
        .beta1 = options->beta1, .beta2 = options->beta2, .eps = options->eps,
        .weight_decay = p->decays ? options->weight_decay : 0.0, .grad_scale = j->grad_scale,
    };
    j->f.update(&a);
}

/* ---- use ------------------------------------------------------------------------------------- */

double mn_optimizer_grad_norm(mn_optimizer *optimizer, mn_context *context) {
    job j = { .o = optimizer, .f = functions_of(context->target) };
    mn_threads_run(context->threads, optimizer->n_pieces, square_piece, &j);
    double sum = 0.0;
    for (int64_t i = 0; i < optimizer->n_pieces; i++) sum += optimizer->squares[i];
    return sqrt(sum);
}

mn_status mn_optimizer_step(mn_optimizer *optimizer, mn_context *context, int64_t step, double lr,
                            double grad_scale) {
    if (step < 0 || step == INT64_MAX) {
        return mn_fail(MN_ERR_ARGUMENT, "adamw: step %" PRId64 ", counted from 0", step);
    }
    if (!isfinite(lr) || lr < 0.0 || !isfinite(grad_scale)) {
        return mn_fail(MN_ERR_ARGUMENT,
                       "adamw: learning rate %g, gradient scale %g at step %" PRId64
                       ": a lower learning rate may keep gradients finite",
                       lr, grad_scale, step);
    }
    job j = { optimizer, functions_of(context->target), step, lr, grad_scale };
    mn_threads_run(context->threads, optimizer->n_pieces, update_piece, &j);
    return MN_OK;
}

float *mn_optimizer_first(mn_optimizer *optimizer, int64_t i) {
    return optimizer->moments[i].first;
}

float *mn_optimizer_second(mn_optimizer *optimizer, int64_t i) {
    return optimizer->moments[i].second;
}
