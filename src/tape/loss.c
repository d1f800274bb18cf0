/* loss.c - cross entropy of x head', a few rows of logits at a time.
 *
 *   z = cap tanh(x W' / cap)      lse = logsumexp(z)      nll = lse - z[target]
 *   loss = mean over the kept of nll + z_loss lse^2
 *   dz = (softmax(z) (1 + 2 z_loss lse) - onehot) weight / kept
 *
 * Going forward the gradients are made as well, while the logits are in the cache: dx and dW.
 *
 * Where targets are ignored, a CPU gathers, multiplies and scatters back the other rows only: tasks
 * that ask for a few tokens of a sequence pay for those. A device goes through all rows, or as many
 * as the caller has put in front: a step is the same launches then whatever the targets are.
 *
 * In a mixture of n, sample s has a share in each row's gradient: softmax_s(-nll_s). */
#include <string.h>

#include "base/dtype.h"
#include "base/util.h"
#include "ops/matmul.h"
#include "tape/tape_internal.h"

/* Logits at one time: about this many numbers, and at least some rows for the matrix products, in
 * whole tiles of them where it is more. */
typedef struct piece_size {
    int64_t numbers, least_rows, most_rows, tile_rows;
} piece_size;

static const piece_size cpu_piece = { 1 << 20, 32, 1024, 1 };
static const piece_size device_piece = { 1 << 27, 128, 1 << 16, 256 };

typedef struct loss {
    mn_tensor *x, *head;
    int64_t rows, D, V;
    void *dx;               // NULL where not wanted
    mn_view dhead;
    bool add_head;
    int64_t n_kept;
} loss;

/* What the pieces of all samples have in common: the work on their rows, and scratch. On a CPU a
 * row of logits has room for as many numbers behind it; on a device the gradient of logits is in
 * the tape's type, and has memory of its own where that is narrower. */
typedef struct pieces {
    mn_loss_params work;
    int64_t most, row;         // rows of a piece; numbers from row to row
    void *gradients;           // of logits
    int32_t *places;           // a CPU's list of kept rows
    const int32_t *order;      // a device's, of which it takes `n_ordered`
    int64_t n_ordered;
    mn_view few, dfew;         // kept rows side by side, and their gradient
} pieces;

/* Copies the kept rows [first, first + n) of `table` side by side, or adds them where they were. */
static void move_kept(mn_tape *tape, const pieces *p, const loss *l, mn_view table, mn_view few,
                      int64_t first, int64_t n, bool back) {
    mn_rows_params work = { .table = table, .rows = few, .index = p->work.kept + first, .n = n,
                          .scatters = back };
    memcpy(work.shape, l->x->shape, sizeof work.shape);
    mn_tape_do(tape, MN_ELEMENTWISE_ROWS, &work);
}

static void *row_of(const mn_tape *tape, void *data, int64_t elements) {
    return (char *)data + (size_t)elements * tape->item;
}

/* Logits of kept rows [first, first + n), their losses and, if recorded, what they add to dx and
 * dW. */
static void run_piece(mn_tape *tape, pieces *p, const loss *l, int64_t first, int64_t n) {
    const bool some = p->work.kept;
    const int64_t step = some ? l->D : mn_row_step(l->x);
    const void *x = some ? p->few.data : row_of(tape, l->x->data, first * step);
    void *dx = l->dx && some ? p->dfew.data : l->dx ? row_of(tape, l->dx, first * l->D) : NULL;
    if (some) move_kept(tape, p, l, mn_value(l->x), p->few, first, n, false);
    mn_tape_product(tape, &(mn_matmul_args){
        .dtype = tape->dtype, .c = p->work.logits.data, .c_row = p->row, .a = x, .a_row = step,
        .b = l->head->data, .b_transposed = true, .quant = l->head->quant, .M = n, .N = l->V,
        .K = l->D });
    p->work.first = first;
    p->work.n = n;
    mn_tape_do(tape, MN_ELEMENTWISE_LOSS, &p->work);
    if (dx) {
        mn_tape_product(tape, &(mn_matmul_args){
            .dtype = tape->dtype, .c_dtype = tape->dtype, .c = dx, .a = p->gradients,
            .a_row = p->row, .b = l->head->data, .M = n, .N = l->D, .K = l->V });
        const mn_view to = mn_flat_view(l->dx, tape->dtype, l->x->shape);
        if (some) move_kept(tape, p, l, to, p->dfew, first, n, true);
    }
    if (l->dhead.data) {
        mn_tape_product(tape, &(mn_matmul_args){
            .dtype = tape->dtype, .c_dtype = l->dhead.dtype, .c = l->dhead.data,
            .a = p->gradients, .a_row = p->row, .a_transposed = true, .b = x, .b_row = step,
            .M = l->V, .N = l->D, .K = n, .accumulate = l->add_head || first > 0 });
    }
}

static void back_loss(mn_tape *tape, void *payload) {
    const loss *l = payload;
    const mn_view dx = mn_flat_view(l->dx, tape->dtype, l->x->shape);
    mn_grad_hand(tape, l->x, &dx);
}

/* What one tensor's loss needs to go back; NULL after a failure. */
static loss *open_loss(mn_tape *tape, mn_tensor *x, mn_tensor *head) {
    loss *l = mn_tape_note(tape, sizeof *l);
    x = mn_tape_cast(tape, x, tape->dtype);
    if (!l || !x) return NULL;
    *l = (loss){ .x = x, .head = head, .rows = x->shape[0] * x->shape[1], .D = head->shape[3],
                 .V = head->shape[2] };
    const bool records = mn_tape_records(tape);
    if (records && mn_wants(x)) l->dx = mn_tape_memory(tape, l->rows * l->D);
    return mn_tape_dead(tape) ? NULL : l;
}

/* The rows of one piece, and how its logits lie. */
static pieces size_pieces(const mn_tape *tape, const loss *l) {
    const piece_size size = tape->device ? device_piece : cpu_piece;
    int64_t rows = mn_min(mn_max(size.numbers / l->V, size.least_rows), size.most_rows);
    if (rows > size.tile_rows) rows = rows / size.tile_rows * size.tile_rows;
    return (pieces){ .most = mn_min(rows, l->rows),
                     .row = tape->device ? mn_ceil_div(l->V, 8) * 8 : 2 * l->V };
}

/* Scratch of a loss, the same whether rows are left out or not: a plan does not know. */
static void take_scratch(mn_tape *tape, const loss *l, pieces *p) {
    const mn_dtype sums = tape->dtype == MN_BF16 ? MN_F32 : tape->dtype;
    const size_t numbers = (size_t)(p->most * p->row);
    void *logits = mn_tape_bytes_of(tape, numbers * mn_dtype_bytes(sums));
    p->work.logits = (mn_view){ logits, sums, { 0, p->row, 0, 1 } };
    p->gradients = sums == tape->dtype ? logits : mn_tape_bytes_of(tape, numbers * tape->item);
    if (tape->device && !p->order) return;
    const int64_t few[4] = { 1, p->most, 1, l->D };
    p->few = mn_flat_view(mn_tape_memory(tape, p->most * l->D), tape->dtype, few);
    p->dfew = mn_flat_view(mn_tape_memory(tape, p->most * l->D), tape->dtype, few);
    if (tape->device) return;
    p->places = mn_tape_bytes_of(tape, (size_t)l->rows * sizeof *p->places);
}

/* Lists the rows that have a target, unless all have; on a device the caller has. */
static void keep_rows(pieces *p, loss *l) {
    if (p->order) {
        l->n_kept = p->n_ordered;
        p->work.kept = l->n_kept < l->rows ? p->order : NULL;
        return;
    }
    l->n_kept = 0;
    for (int64_t row = 0; row < l->rows; row++) {
        if (p->work.targets[row] >= 0) p->places[l->n_kept++] = (int32_t)row;
    }
    p->work.kept = l->n_kept < l->rows ? p->places : NULL;
}

/* Gradients of which no piece has a part. */
static void zero_left_out(mn_tape *tape, const loss *l, const pieces *p) {
    if (l->dx && p->work.kept) {
        mn_tape_do(tape, MN_ELEMENTWISE_FILL, &(mn_fill_params){
            .shape = { 1, 1, l->rows, l->D },
            .to = { l->dx, tape->dtype, { 0, 0, l->D, 1 } } });
    }
    if (l->dhead.data && l->n_kept == 0 && !l->add_head) {
        mn_tape_do(tape, MN_ELEMENTWISE_FILL, &(mn_fill_params){ .shape = { 1, 1, l->V, l->D },
                                                        .to = l->dhead });
    }
}

/* With gradients where `records`. */
static void run_pieces(mn_tape *tape, loss *l, pieces *p, bool records) {
    p->work.dlogits = (mn_view){ records ? p->gradients : NULL, tape->dtype, { 0, p->row, 0, 1 } };
    if (records && mn_wants(l->head)) l->dhead = mn_grad_write(tape, l->head, &l->add_head);
    l->n_kept = l->rows;
    if (mn_tape_runs(tape) && (p->places || p->order)) keep_rows(p, l);
    zero_left_out(tape, l, p);
    /* the first piece is the largest */
    const int64_t rows = mn_tape_plans(tape) ? p->most : l->n_kept;
    for (int64_t row = 0; !mn_tape_dead(tape) && row < rows; row += p->most) {
        run_piece(tape, p, l, row, mn_min(p->most, rows - row));
    }
    l->dhead.data = NULL;
}

/* ---- what is told ---------------------------------------------------------------------------- */

/* Where a loss tells its results. A device writes to its own memory, from where mn_tape_results
 * brings them. */
typedef struct teller {
    mn_loss_result *result;
    float *nll;
} teller;

static teller open_teller(mn_tape *tape, const mn_loss_options *how, int64_t rows) {
    teller t = { .result = mn_tape_bytes_of(tape, sizeof *t.result), .nll = how->nll };
    if (tape->device && how->nll) t.nll = mn_tape_bytes_of(tape, (size_t)rows * sizeof *t.nll);
    return t;
}

static void tell(mn_tape *tape, const teller *t, const mn_loss_options *how, int64_t rows,
                 double *loss_out, int64_t *counted) {
    if (!mn_tape_runs(tape)) return;
    if (!tape->device) {
        *loss_out = t->result->loss;
        *counted = t->result->counted;
        return;
    }
    mn_told *told = mn_tape_note(tape, sizeof *told);
    if (!told) return;
    *told = (mn_told){ tape->told, t->result, loss_out, counted, t->nll, how->nll, rows };
    tape->told = told;
}

/* ---- one tensor ------------------------------------------------------------------------------ */

static void fill_work(mn_loss_params *work, const loss *l, const int32_t *targets,
                      const mn_loss_options *how, const mn_loss_result *result) {
    work->V = l->V;
    work->targets = targets;
    work->result = result;
    work->weight = how->weight > 0 ? how->weight : 1.0;
    work->z_loss = how->z_loss;
    work->cap = how->softcap;
}

/* Numbers per row of the batch, 0 at rows that may be left out. */
static double *row_numbers(mn_tape *tape, const pieces *p, int64_t n) {
    double *numbers = mn_tape_bytes_of(tape, (size_t)n * sizeof *numbers);
    if (!numbers || !mn_tape_runs(tape)) return numbers;
    if (!tape->device) {
        memset(numbers, 0, (size_t)n * sizeof *numbers);
    } else if (p->order) {    // zeros of a double are those of two floats
        mn_tape_do(tape, MN_ELEMENTWISE_FILL, &(mn_fill_params){
            .shape = { 1, 1, n, 2 }, .to = { numbers, MN_F32, { 0, 0, 2, 1 } } });
    }
    return numbers;
}

/* What a device goes through; false after a failure. */
static bool lend_order(mn_tape *tape, pieces *p, const mn_loss_options *how, int64_t rows) {
    if (!tape->device || !how->order) return true;
    p->order = mn_tape_lend_ids(tape, how->order, rows, "row", 0, rows);
    p->n_ordered = how->n_ordered;
    return p->order != NULL;
}

static void record_loss(mn_tape *tape, loss *l) {
    if (l->dx) mn_tape_record(tape, "the loss", back_loss, l, true, NULL, 0);
}

void mn_tape_loss(mn_tape *tape, mn_tensor *x, mn_tensor *head, const int32_t *targets,
                  const mn_loss_options *how, double *loss_out, int64_t *counted) {
    *loss_out = 0.0;
    *counted = 0;
    if (!x || !head || mn_tape_dead(tape)) return;
    if (!head->quant) head = mn_tape_cast(tape, head, tape->dtype);
    loss *l = head ? open_loss(tape, x, head) : NULL;
    if (l) targets = mn_tape_lend_ids(tape, targets, l->rows, "target", INT32_MIN, l->V);
    if (!l || !targets) return;
    if (mn_tape_records(tape) && mn_wants(head)) mn_grad_place(tape, head);
    const teller t = open_teller(tape, how, l->rows);
    const mn_tape_mark mark = mn_tape_hold(tape);
    pieces p = size_pieces(tape, l);
    if (!lend_order(tape, &p, how, l->rows)) return;
    fill_work(&p.work, l, targets, how, t.result);
    take_scratch(tape, l, &p);
    p.work.nll = row_numbers(tape, &p, l->rows);
    p.work.lse2 = row_numbers(tape, &p, l->rows);
    mn_tape_do(tape, MN_ELEMENTWISE_COUNT, &(mn_count_params){ targets, l->rows, t.result });
    run_pieces(tape, l, &p, mn_tape_records(tape));
    mn_tape_do(tape, MN_ELEMENTWISE_TOTAL, &(mn_total_params){ l->rows, p.work.nll, p.work.lse2,
                                                      how->z_loss, t.result, t.nll });
    mn_tape_let_go(tape, mark);
    tell(tape, &t, how, l->rows, loss_out, counted);
    record_loss(tape, l);
}

/* ---- mixtures -------------------------------------------------------------------------------- */

/* The first pass makes losses, which become shares; the second one gradients. nll[s * rows + row],
 * those of the mixture behind them, and a row of numbers nobody needs behind those. */
static void run_mixture(mn_tape *tape, loss **parts, int n, pieces *p, double *nll,
                        const mn_total_params *total) {
    const int64_t rows = total->rows;
    double *mixed = nll + n * rows, *spare = mixed + rows;
    p->work.lse2 = spare;
    for (int s = 0; s < n; s++) {
        loss forward_only = *parts[s];
        forward_only.dx = NULL;
        p->work.nll = nll + s * rows;
        run_pieces(tape, &forward_only, p, false);
    }
    mn_tape_do(tape, MN_ELEMENTWISE_MIX, &(mn_mix_params){ rows, n, nll, mixed, p->work.targets });
    mn_tape_do(tape, MN_ELEMENTWISE_TOTAL, total);
    p->work.nll = spare;
    for (int s = 0; s < n && mn_tape_records(tape); s++) {
        p->work.share = nll + s * rows;
        run_pieces(tape, parts[s], p, true);
    }
}

void mn_tape_mixture_loss(mn_tape *tape, mn_tensor *const *x, int n, mn_tensor *head,
                          const int32_t *targets, const mn_loss_options *how, double *loss_out,
                          int64_t *counted) {
    *loss_out = 0.0;
    *counted = 0;
    if (head && !head->quant) head = mn_tape_cast(tape, head, tape->dtype);
    loss **parts = head ? mn_tape_note(tape, (size_t)n * sizeof(loss *)) : NULL;
    for (int s = 0; parts && s < n; s++) {
        if (!x[s] || !(parts[s] = open_loss(tape, x[s], head))) return;
    }
    if (!parts || mn_tape_dead(tape)) return;
    const int64_t rows = parts[0]->rows;
    targets = mn_tape_lend_ids(tape, targets, rows, "target", INT32_MIN, parts[0]->V);
    if (!targets) return;
    if (mn_tape_records(tape) && mn_wants(head)) mn_grad_place(tape, head);
    const teller t = open_teller(tape, how, rows);
    const mn_tape_mark mark = mn_tape_hold(tape);
    pieces p = size_pieces(tape, parts[0]);
    fill_work(&p.work, parts[0], targets, how, t.result);
    p.work.z_loss = 0.0;
    take_scratch(tape, parts[0], &p);
    double *nll = row_numbers(tape, &p, rows * (n + 2));
    mn_tape_do(tape, MN_ELEMENTWISE_COUNT, &(mn_count_params){ targets, rows, t.result });
    run_mixture(tape, parts, n, &p, nll,
                &(mn_total_params){ rows, nll + n * rows, NULL, 0.0, t.result, t.nll });
    mn_tape_let_go(tape, mark);
    tell(tape, &t, how, rows, loss_out, counted);
    for (int s = 0; s < n; s++) record_loss(tape, parts[s]);
}
