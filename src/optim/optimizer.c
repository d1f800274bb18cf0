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
#include "kernels/adamw_all.h"
#include "kernels/cpu/simd/vector_targets.h"

#define MN_PER_TARGET "kernels/cpu/optim/optim.h"
#include "kernels/cpu/simd/per_target.h"

/* Numbers of a piece: its four arrays, 256 KiB, pass through a second cache. */
enum { PIECE = MN_ADAMW_CHUNK, ROW = MN_ALIGN / sizeof(float) };

typedef struct piece {
    int64_t param, first, count;
} piece;

/* Of numbers [begin, begin + count) of a parameter: those that this optimiser owns. */
typedef struct moments {
    float *first, *second;
    int64_t begin, count;
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
    int64_t own, end;        // pieces [own, end) are this optimiser's
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

/* Pieces of all parameters; false where numbers of moments would not count. */
static bool count_all(int64_t *pieces, const mn_optim_param *params, int64_t n) {
    int64_t floats = *pieces = 0;
    for (int64_t i = 0; i < n; i++) {
        int64_t padded;
        if (!mn_add_i64(&padded, params[i].count, ROW - 1)) return false;
        if (!mn_add_i64(&floats, floats, padded / ROW * ROW)) return false;
        *pieces += mn_ceil_div(params[i].count, PIECE);
    }
    return mn_add_i64(&floats, floats, floats);
}

void mn_optim_shares(const mn_optim_param *params, int64_t n_params, int parts, int64_t *elements,
                     int64_t *pieces) {
    int64_t total = 0, at = 0, piece_at = 0;
    int part = 0;
    for (int64_t i = 0; i < n_params; i++) total += params[i].count;
    for (int64_t i = 0; i < n_params; i++) {
        for (int64_t first = 0; first < params[i].count; first += PIECE, piece_at++) {
            for (; part <= parts && at + first >= (double)total * part / parts; part++) {
                elements[part] = at + first;
                pieces[part] = piece_at;
            }
        }
        at += params[i].count;
    }
    for (; part <= parts; part++) {
        elements[part] = total;
        pieces[part] = piece_at;
    }
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

static void cut_pieces(mn_optimizer *o) {
    piece *next = o->pieces;
    for (int64_t i = 0; i < o->n_params; i++) {
        const int64_t count = o->params[i].count;
        for (int64_t first = 0; first < count; first += PIECE) {
            *next++ = (piece){ i, first, mn_min(PIECE, count - first) };
        }
    }
}

/* Numbers of one kind of moment over the pieces owned, each parameter's rounded up to whole
 * lines; with memory, where they are. */
static int64_t lay_out(mn_optimizer *o, float *memory, int64_t floats) {
    int64_t used = 0;
    for (int64_t k = o->own; k < o->end; k++) {
        const piece *at = &o->pieces[k];
        moments *m = &o->moments[at->param];
        if (k == o->own || at[-1].param != at->param) {
            m->begin = at->first;
            m->count = 0;
            if (memory) m->first = memory + used;
            if (memory) m->second = memory + floats + used;
        }
        m->count += at->count;
        used += (at->count + ROW - 1) / ROW * ROW;
    }
    return used;
}

mn_status mn_optimizer_create_part(mn_optimizer **out, const mn_optim_param *params,
                                   int64_t n_params, const mn_adamw_options *options, int part,
                                   int parts) {
    const mn_status st = mn_optim_check(params, n_params, options);
    if (st != MN_OK) return st;
    int64_t n_pieces = 0, floats = 0;
    mn_optimizer *o = calloc(1, sizeof *o);
    int64_t *bounds = calloc(2 * ((size_t)parts + 1), sizeof *bounds);
    if (o && bounds && count_all(&n_pieces, params, n_params)) {
        o->params = zeros(n_params, sizeof *o->params);
        o->moments = zeros(n_params, sizeof *o->moments);
        o->pieces = zeros(n_pieces, sizeof *o->pieces);
        o->squares = zeros(n_pieces, sizeof *o->squares);
    }
    if (o && o->params && o->moments && o->pieces && o->squares) {
        o->options = *options;
        o->n_params = n_params;
        o->n_pieces = n_pieces;
        if (n_params > 0) memcpy(o->params, params, (size_t)n_params * sizeof *params);
        mn_optim_shares(params, n_params, parts, bounds, bounds + parts + 1);
        o->own = bounds[parts + 1 + part];
        o->end = bounds[parts + 1 + part + 1];
        cut_pieces(o);
        floats = lay_out(o, NULL, 0);
        o->memory = zeros(2 * floats, sizeof *o->memory);
    }
    free(bounds);
    if (!o || !o->memory) {
        mn_optimizer_destroy(o);
        return mn_fail(MN_ERR_MEMORY, "no memory for the moments of %" PRId64 " parameters",
                       n_params);
    }
    lay_out(o, o->memory, floats);
    *out = o;
    return MN_OK;
}

mn_status mn_optimizer_create(mn_optimizer **out, const mn_optim_param *params, int64_t n_params,
                              const mn_adamw_options *options) {
    return mn_optimizer_create_part(out, params, n_params, options, 0, 1);
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
#define FUNCTIONS(id, name)                                                                        \
    if (target == MN_TARGET_##id) {                                                                \
        return (functions){ mn_adamw_update_##name, mn_sum_squares_##name };                       \
    }
    MN_VECTOR_TARGETS(FUNCTIONS)
#undef FUNCTIONS
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
    item += j->o->own;
    const piece *at = &j->o->pieces[item];
    j->o->squares[item] = j->f.squares(j->o->params[at->param].grad + at->first, at->count);
}

static void update_piece(void *context, int64_t item, int worker) {
    (void)worker;
    const job *j = context;
    const piece *at = &j->o->pieces[j->o->own + item];
    const mn_optim_param *p = &j->o->params[at->param];
    const moments *m = &j->o->moments[at->param];
    const mn_adamw_options *options = &j->o->options;
    const mn_adamw_piece a = {
        .p = p->value + at->first, .g = p->grad + at->first,
        .m = m->first + (at->first - m->begin), .v = m->second + (at->first - m->begin),
        .count = at->count, .step = j->step + 1, .lr = j->lr * p->lr_scale,
        .beta1 = options->beta1, .beta2 = options->beta2, .eps = options->eps,
        .weight_decay = p->decays ? options->weight_decay : 0.0, .grad_scale = j->grad_scale,
    };
    j->f.update(&a);
}

/* ---- use ------------------------------------------------------------------------------------- */

int64_t mn_optimizer_squares(const double **squares, mn_optimizer *optimizer, mn_context *context) {
    job j = { .o = optimizer, .f = functions_of(context->target) };
    mn_threads_run(context->threads, optimizer->end - optimizer->own, square_piece, &j);
    *squares = optimizer->squares + optimizer->own;
    return optimizer->end - optimizer->own;
}

double mn_optimizer_grad_norm(mn_optimizer *optimizer, mn_context *context) {
    const double *squares;
    const int64_t n = mn_optimizer_squares(&squares, optimizer, context);
    double sum = 0.0;
    for (int64_t i = 0; i < n; i++) sum += squares[i];
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
    mn_threads_run(context->threads, optimizer->end - optimizer->own, update_piece, &j);
    return MN_OK;
}

float *mn_optimizer_first(mn_optimizer *optimizer, int64_t i) {
    return optimizer->moments[i].first;
}

float *mn_optimizer_second(mn_optimizer *optimizer, int64_t i) {
    return optimizer->moments[i].second;
}

void mn_optimizer_owned(const mn_optimizer *optimizer, int64_t i, int64_t *begin, int64_t *count) {
    *begin = optimizer->moments[i].begin;
    *count = optimizer->moments[i].count;
}
