/* tape_loss.c - cross entropy of x head', a few rows of logits at a time.
 *
 *   z = cap tanh(x W' / cap)      lse = logsumexp(z)      nll = lse - z[target]
 *   loss = mean over the kept of nll + z_loss lse^2
 *   dz = (softmax(z) (1 + 2 z_loss lse) - onehot) weight / kept
 *
 * Going forward the gradients are made as well, while the logits are in the cache: dx and dW.
 *
 * Where targets are ignored, only the other rows are gathered, multiplied and scattered back: tasks
 * that ask for a few tokens of a sequence pay for those.
 *
 * In a mixture of n, sample s has a share in each row's gradient: softmax_s(-nll_s). */
#include <math.h>
#include <string.h>

#include "base/util.h"
#include "ops/matmul.h"
#include "ops/tape_node.h"

#if MN_HAVE_X86_TARGETS
#define MN_TARGET avx2
#include "kernels/vec/map.h"
#undef MN_TARGET
#define MN_TARGET avx512
#include "kernels/vec/map.h"
#undef MN_TARGET
#endif

/* Logits at one time: about this many numbers, and at least some rows for the matrix products. */
enum { LOGITS = 1 << 20, LEAST_ROWS = 32, MOST_ROWS = 1024 };

typedef struct row_math {
    void (*exp)(float *y, const float *x, int64_t n);
    void (*tanh)(float *y, const float *x, int64_t n);
    float (*sum)(const float *x, int64_t n);
    float (*max)(const float *x, int64_t n);
} row_math;

static void plain_exp(float *y, const float *x, int64_t n) {
    for (int64_t i = 0; i < n; i++) y[i] = expf(x[i]);
}

static void plain_tanh(float *y, const float *x, int64_t n) {
    for (int64_t i = 0; i < n; i++) y[i] = tanhf(x[i]);
}

static float plain_sum(const float *x, int64_t n) {
    double sum = 0.0;
    for (int64_t i = 0; i < n; i++) sum += x[i];
    return (float)sum;
}

static float plain_max(const float *x, int64_t n) {
    float top = -INFINITY;
    for (int64_t i = 0; i < n; i++) top = x[i] > top ? x[i] : top;
    return top;
}

static row_math math_of(const mn_context *context) {
#if MN_HAVE_X86_TARGETS
    if (context->target == MN_TARGET_AVX512) {
        return (row_math){ mn_map_exp_avx512, mn_map_tanh_avx512, mn_map_sum_avx512,
                           mn_map_max_avx512 };
    }
    if (context->target == MN_TARGET_AVX2) {
        return (row_math){ mn_map_exp_avx2, mn_map_tanh_avx2, mn_map_sum_avx2, mn_map_max_avx2 };
    }
#endif
    (void)context;
    return (row_math){ plain_exp, plain_tanh, plain_sum, plain_max };
}

typedef struct loss_job {
    row_math math;
    bool f64, records;
    int64_t V, first;             // classes; first kept row of this piece
    const int32_t *kept;          // row of the batch by kept row; NULL: all are kept
    int32_t *places;              // memory for that list
    char *few;                    // memory for kept rows side by side, and for their gradient
    void *logits;
    const int32_t *targets;
    double *nll, *lse2;           // per row of the batch
    const double *share;          // of each row's gradient; NULL: 1
    double scale, z_loss, cap;    // scale: weight / kept
} loss_job;

/* One row of logits becomes its gradient in place. */
static void row_f32(const loss_job *j, float *z, int64_t row) {
    const int32_t target = j->targets[row];
    const float cap = (float)j->cap;
    if (cap > 0.0f) {
        for (int64_t i = 0; i < j->V; i++) z[i] /= cap;
        j->math.tanh(z, z, j->V);
        for (int64_t i = 0; i < j->V; i++) z[i] *= cap;
    }
    float *e = z + j->V;    // second half of the row's memory
    const float top = j->math.max(z, j->V), at = z[target];
    for (int64_t i = 0; i < j->V; i++) e[i] = z[i] - top;
    j->math.exp(e, e, j->V);
    const float sum = j->math.sum(e, j->V);
    const double lse = log((double)sum) + top;
    j->nll[row] = lse - at;
    j->lse2[row] = lse * lse;
    if (!j->records) return;
    const double scale = j->share ? j->scale * j->share[row] : j->scale;
    const float to_p = (float)(scale * (1.0 + 2.0 * j->z_loss * lse) / sum);
    for (int64_t i = 0; i < j->V; i++) e[i] *= to_p;
    e[target] -= (float)scale;
    for (int64_t i = 0; i < j->V; i++) {
        const float bend = cap > 0.0f ? 1.0f - (z[i] / cap) * (z[i] / cap) : 1.0f;
        z[i] = e[i] * bend;
    }
}

static void row_f64(const loss_job *j, double *z, int64_t row) {
    const int32_t target = j->targets[row];
    for (int64_t i = 0; j->cap > 0.0 && i < j->V; i++) z[i] = j->cap * tanh(z[i] / j->cap);
    double top = z[0], sum = 0.0;
    for (int64_t i = 1; i < j->V; i++) top = fmax(top, z[i]);
    for (int64_t i = 0; i < j->V; i++) sum += exp(z[i] - top);
    const double lse = log(sum) + top;
    j->nll[row] = lse - z[target];
    j->lse2[row] = lse * lse;
    const double scale = j->share ? j->scale * j->share[row] : j->scale;
    const double to_p = scale * (1.0 + 2.0 * j->z_loss * lse);
    for (int64_t i = 0; j->records && i < j->V; i++) {
        const double bend = j->cap > 0.0 ? 1.0 - (z[i] / j->cap) * (z[i] / j->cap) : 1.0;
        const double hit = i == target ? scale : 0.0;
        z[i] = (exp(z[i] - lse) * to_p - hit) * bend;
    }
}

static void run_row(void *context, int64_t item, int worker) {
    (void)worker;
    const loss_job *j = context;
    const int64_t row = j->kept ? j->kept[j->first + item] : j->first + item;
    if (j->f64) row_f64(j, (double *)j->logits + item * 2 * j->V, row);
    else row_f32(j, (float *)j->logits + item * 2 * j->V, row);
}

typedef struct loss {
    mn_tensor *x, *head;
    int64_t rows, D, V;
    void *dx, *dhead;    // NULL where not wanted
    bool add_head;
    const int32_t *kept;    // rows with a target, when some have none
    int64_t n_kept;
    char *few, *dfew;       // a piece of them side by side, and their gradient
} loss;

/* Copies the kept rows [first, first + n) of `from` (rows `step` apart) side by side, or back. */
static void gather(const mn_tape *tape, const loss *l, int64_t first, int64_t n) {
    const int64_t step = mn_row_step(l->x);
    const size_t bytes = (size_t)l->D * tape->item;
    for (int64_t i = 0; i < n; i++) {
        memcpy(l->few + (size_t)i * bytes,
               (const char *)l->x->data + (size_t)(l->kept[first + i] * step) * tape->item, bytes);
    }
}

static void scatter(const mn_tape *tape, const loss *l, int64_t first, int64_t n) {
    const size_t bytes = (size_t)l->D * tape->item;
    for (int64_t i = 0; i < n; i++) {
        memcpy((char *)l->dx + (size_t)l->kept[first + i] * bytes, l->dfew + (size_t)i * bytes,
               bytes);
    }
}

/* Logits of kept rows [first, first + n), their losses and, if recorded, what they add to dx and
 * dW. */
static void run_piece(mn_tape *tape, const loss *l, loss_job *job, int64_t first, int64_t n) {
    const int64_t step = l->kept ? l->D : mn_row_step(l->x);
    const char *x = (const char *)l->x->data + (size_t)(first * step) * tape->item;
    char *dx = l->dx ? (char *)l->dx + (size_t)(first * l->D) * tape->item : NULL;
    if (l->kept) {
        gather(tape, l, first, n);
        x = l->few;
        if (dx) dx = l->dfew;
    }
    mn_tape_product(tape, &(mn_matmul_args){
        .dtype = tape->dtype, .c = job->logits, .c_row = 2 * l->V, .a = x, .a_row = step,
        .b = l->head->data, .b_transposed = true, .M = n, .N = l->V, .K = l->D });
    job->first = first;
    if (mn_tape_runs(tape)) mn_tape_items(tape, n, run_row, job);
    if (dx) {
        mn_tape_product(tape, &(mn_matmul_args){
            .dtype = tape->dtype, .c = dx, .a = job->logits, .a_row = 2 * l->V,
            .b = l->head->data, .M = n, .N = l->D, .K = l->V });
        if (l->kept) scatter(tape, l, first, n);
    }
    if (l->dhead) {
        mn_tape_product(tape, &(mn_matmul_args){
            .dtype = tape->dtype, .c = l->dhead, .a = job->logits, .a_row = 2 * l->V,
            .a_transposed = true, .b = x, .b_row = step, .M = l->V, .N = l->D, .K = n,
            .accumulate = l->add_head || first > 0 });
    }
}

static void back_loss(mn_tape *tape, void *payload) {
    const loss *l = payload;
    mn_grad_give(tape, l->x, l->dx);
}

static double finish(const loss_job *job, int64_t rows, const mn_loss_options *how, int64_t kept) {
    double nll = 0.0, lse2 = 0.0;
    for (int64_t row = 0; row < rows; row++) {
        nll += job->nll[row];
        lse2 += job->lse2[row];
        if (how->nll) how->nll[row] = (float)job->nll[row];
    }
    return kept ? (nll + job->z_loss * lse2) / (double)kept : 0.0;
}

static bool targets_fit(mn_tape *tape, const int32_t *targets, int64_t rows, int64_t V,
                        int64_t *kept) {
    *kept = 0;
    for (int64_t i = 0; mn_tape_runs(tape) && i < rows; i++) {
        *kept += targets[i] >= 0;
        if (targets[i] < V) continue;
        mn_tape_fail(tape, mn_fail(MN_ERR_ARGUMENT, "target %d at place %lld of the batch is "
                                   "outside the model's vocabulary of %lld", (int)targets[i],
                                   (long long)i, (long long)V));
        return false;
    }
    return true;
}

static loss_job job_of(const mn_tape *tape, const mn_tensor *head, const int32_t *targets,
                       const mn_loss_options *how, int64_t kept) {
    const double weight = how->weight > 0 ? how->weight : 1.0;
    return (loss_job){ .math = math_of(tape->context), .f64 = tape->dtype == MN_F64,
                       .V = head->shape[2], .targets = targets, .z_loss = how->z_loss,
                       .cap = how->softcap, .scale = weight / (double)mn_max(kept, 1) };
}

/* What one tensor's loss needs to go back; NULL after a failure. */
static loss *open_loss(mn_tape *tape, mn_tensor *x, mn_tensor *head) {
    loss *l = mn_tape_note(tape, sizeof *l);
    if (!l) return NULL;
    *l = (loss){ .x = x, .head = head, .rows = x->shape[0] * x->shape[1], .D = head->shape[3],
                 .V = head->shape[2] };
    const bool records = mn_tape_records(tape);
    if (records && mn_wants(x)) l->dx = mn_tape_memory(tape, l->rows * l->D);
    return mn_tape_dead(tape) ? NULL : l;
}

/* Rows a piece of logits has; and the pieces, one after the other. */
static int64_t piece_rows(const loss *l) {
    return mn_min(mn_min(mn_max(LOGITS / l->V, LEAST_ROWS), MOST_ROWS), l->rows);
}

/* Scratch of a loss, the same whether rows are left out or not: a plan does not know. */
static void take_scratch(mn_tape *tape, const loss *l, loss_job *job) {
    const int64_t most = piece_rows(l);
    job->logits = mn_tape_memory(tape, most * l->V * 2);
    job->few = mn_tape_memory(tape, most * l->D * 2);
    job->places = mn_tape_bytes_of(tape, (size_t)l->rows * sizeof *job->places);
}

/* Lists the rows that have a target, unless all have. */
static void keep_rows(const mn_tape *tape, loss *l, loss_job *job) {
    l->n_kept = 0;
    for (int64_t row = 0; row < l->rows; row++) {
        if (job->targets[row] >= 0) job->places[l->n_kept++] = (int32_t)row;
    }
    l->kept = l->n_kept < l->rows ? job->places : NULL;
    job->kept = l->kept;
    l->few = job->few;
    l->dfew = job->few + (size_t)(piece_rows(l) * l->D) * tape->item;
}

static void run_pieces(mn_tape *tape, loss *l, loss_job *job) {
    const int64_t most = piece_rows(l);
    if (job->records && mn_wants(l->head)) l->dhead = mn_grad_write(tape, l->head, &l->add_head);
    l->n_kept = l->rows;
    if (mn_tape_runs(tape)) keep_rows(tape, l, job);
    const size_t numbers = (size_t)l->D * tape->item;
    if (l->dx && l->kept) memset(l->dx, 0, (size_t)l->rows * numbers);
    if (l->dhead && l->n_kept == 0 && !l->add_head) memset(l->dhead, 0, (size_t)l->V * numbers);
    /* the first piece is the largest */
    const int64_t rows = mn_tape_plans(tape) ? most : l->n_kept;
    for (int64_t row = 0; !mn_tape_dead(tape) && row < rows; row += most) {
        run_piece(tape, l, job, row, mn_min(most, rows - row));
    }
    l->dhead = NULL;
}

void mn_tape_loss(mn_tape *tape, mn_tensor *x, mn_tensor *head, const int32_t *targets,
                  const mn_loss_options *how, double *loss_out, int64_t *counted) {
    *loss_out = 0.0;
    *counted = 0;
    if (!x || !head || mn_tape_dead(tape)) return;
    loss *l = open_loss(tape, x, head);
    if (!l || !targets_fit(tape, targets, l->rows, l->V, counted)) return;
    if (mn_tape_records(tape) && mn_wants(head)) mn_grad_place(tape, head);
    const mn_tape_mark mark = mn_tape_hold(tape);
    loss_job job = job_of(tape, head, targets, how, *counted);
    job.records = mn_tape_records(tape);
    take_scratch(tape, l, &job);
    job.nll = mn_tape_bytes_of(tape, (size_t)l->rows * 2 * sizeof *job.nll);
    if (!mn_tape_dead(tape)) {
        job.lse2 = job.nll + l->rows;
        if (mn_tape_runs(tape)) memset(job.nll, 0, (size_t)l->rows * 2 * sizeof *job.nll);
        run_pieces(tape, l, &job);
        if (mn_tape_runs(tape)) *loss_out = finish(&job, l->rows, how, *counted);
    }
    mn_tape_let_go(tape, mark);
    if (l->dx) mn_tape_record(tape, "the loss", back_loss, l, true, NULL, 0);
}

/* ---- mixtures -------------------------------------------------------------------------------- */

/* Losses of each sample become those of the mixture in nll[0 .. rows), and each sample's share. */
static void mix(double *nll, int64_t rows, int n) {
    for (int64_t row = 0; row < rows; row++) {
        double least = nll[row], sum = 0.0;
        for (int s = 1; s < n; s++) least = fmin(least, nll[s * rows + row]);
        for (int s = 0; s < n; s++) sum += exp(least - nll[s * rows + row]);
        for (int s = 0; s < n; s++) {
            nll[s * rows + row] = exp(least - nll[s * rows + row]) / sum;
        }
        nll[n * rows + row] = least - log(sum) + log((double)n);
    }
}

void mn_tape_mixture_loss(mn_tape *tape, mn_tensor *const *x, int n, mn_tensor *head,
                          const int32_t *targets, const mn_loss_options *how, double *loss_out,
                          int64_t *counted) {
    *loss_out = 0.0;
    *counted = 0;
    loss **parts = mn_tape_note(tape, (size_t)n * sizeof(loss *));
    for (int s = 0; parts && s < n; s++) {
        if (!x[s] || !(parts[s] = open_loss(tape, x[s], head))) return;
    }
    if (mn_tape_dead(tape)) return;
    const int64_t rows = parts[0]->rows;
    if (!targets_fit(tape, targets, rows, parts[0]->V, counted)) return;
    if (mn_tape_records(tape) && mn_wants(head)) mn_grad_place(tape, head);
    const mn_tape_mark mark = mn_tape_hold(tape);
    loss_job job = job_of(tape, head, targets, how, *counted);
    job.z_loss = 0.0;
    take_scratch(tape, parts[0], &job);
    double *nll = mn_tape_bytes_of(tape, (size_t)(rows * (n + 2)) * sizeof *nll);
    for (int pass = 0; !mn_tape_dead(tape) && pass <= mn_tape_records(tape); pass++) {
        job.records = pass;
        for (int s = 0; s < n; s++) {
            double *own = nll + s * rows, *spare = nll + (n + 1) * rows;
            job.share = pass ? own : NULL;
            job.nll = pass ? spare : own;
            job.lse2 = spare;
            if (!pass && mn_tape_runs(tape)) memset(own, 0, (size_t)rows * sizeof *own);
            loss forward_only = *parts[s];
            forward_only.dx = NULL;
            run_pieces(tape, pass ? parts[s] : &forward_only, &job);
        }
        if (pass || !mn_tape_runs(tape)) continue;
        mix(nll, rows, n);
        job.nll = nll + n * rows;
        for (int64_t row = 0; row < rows; row++) {
            if (targets[row] < 0) job.nll[row] = 0.0;
            job.lse2[row] = 0.0;
        }
        *loss_out = finish(&job, rows, how, *counted);
    }
    mn_tape_let_go(tape, mark);
    for (int s = 0; s < n; s++) {
        if (parts[s]->dx) mn_tape_record(tape, "the loss", back_loss, parts[s], true, NULL, 0);
    }
}
