/* defer.c - forward on few rows, such as one token: works wait until something is read, and
 * are then done in few launches (kernels/decode.h).
 *
 * A work depends on an earlier one if one of the two writes what the other touches, of a tensor
 * that both name (values.h). From those that nothing holds back a launch is made of, in this order
 * of preference:
 *
 *   products of the same input, with the small work that makes it in front of them (a norm, a
 *   gate), and sums with what is there already behind them (a residual)
 *   the recurrence of a matrix state, with the norms that make its queries and keys, in megakernels
 *   Palimpsa's and KLA's memories, with the small works around them, in megakernels
 *   attention or HyperMLP over a cache, in megakernels
 *   small works, and what follows from them alone: what depends on each other is a part, parts
 *   are done side by side
 *   whatever else it is, alone
 *
 * On a tape of MN_TAPE_REPEATS all of these become stages of a megakernel where they can: products
 * with whatever else follows from their columns alone (epilogue.c), small works together with
 * operators that are ready (works.c). Any other launch ends the megakernel in front of it. Results
 * lie where they would without delay. */
#include "decode/defer.h"

#include <stdlib.h>
#include <string.h>

#include "base/dtype.h"
#include "base/util.h"
#include "decode/cells.h"
#include "decode/plan.h"
#include "ops/run.h"

/* ---- what waits ------------------------------------------------------------------------------ */

static bool conflict(const mn_mem_range *a, const mn_mem_range *b) {
    return (a->writes || b->writes) && mn_ranges_meet(a, b);
}

static bool depends(const mn_deferred *later, const mn_deferred *earlier) {
    for (int i = 0; i < later->n_ranges; i++) {
        for (int k = 0; k < earlier->n_ranges; k++) {
            if (conflict(&later->ranges[i], &earlier->ranges[k])) return true;
        }
    }
    return false;
}

static bool defers(const mn_tape *tape) {
    return tape->device && (tape->modes & MN_TAPE_DEFER) && mn_tape_runs(tape) &&
           !tape->cu_seqlens;
}

/* What waits on this tape; NULL where nothing does. */
static mn_defer *delay_of(mn_tape *tape) {
    if (!defers(tape)) return NULL;
    if (!tape->delay) tape->delay = calloc(1, sizeof *tape->delay);
    return tape->delay;
}

/* Room for one more; NULL where nothing waits on this tape. */
static mn_deferred *next(mn_tape *tape) {
    mn_defer *all = delay_of(tape);
    if (all) all->counts = mn_tape_counts(tape);
    if (all && all->n == MN_DEFERRED) mn_defer_lower(tape);
    if (all && all->n == MN_DEFERRED) mn_tape_flush(tape);
    if (!all) return NULL;
    all->list[all->n] = (mn_deferred){ .values = &all->values };
    return &all->list[all->n];
}

/* Whether something that waits accesses a tensor. */
static bool is_waited_for(const void *context, int number) {
    const mn_defer *all = context;
    for (int i = 0; i < all->n; i++) {
        for (int k = 0; k < all->list[i].n_ranges; k++) {
            if (all->list[i].ranges[k].value == number) return true;
        }
    }
    return false;
}

static void declare(mn_tape *tape, mn_defer *all, const void *data, size_t bytes) {
    const bool declared = mn_values_declare(&all->values, data, bytes);
    if (!declared) mn_tape_fail(tape, mn_fail(MN_ERR_MEMORY, "no memory for a list of tensors"));
}

/* Memory that was part of other tensors, as scratch that is given back, becomes another one's once
 * nothing waits for those any more: neither works nor stages of a megakernel. */
void mn_defer_declare(mn_tape *tape, const void *data, size_t bytes) {
    mn_defer *all = data && bytes > 0 ? delay_of(tape) : NULL;
    if (!all) return;
    if (!mn_values_fits(&all->values, data, bytes)) {
        mn_tape_flush(tape);
        mn_values_remove(&all->values, data, bytes);
    }
    declare(tape, all, data, bytes);
}

/* Steps of one sequence are recorded by the hundred on the same memory, and stages of a megakernel
 * know tensors by their numbers: there memory stays the tensor that it was where it can. */
void mn_defer_renew(mn_tape *tape, const void *data, size_t bytes) {
    mn_defer *all = data && bytes > 0 && tape->sequences ? delay_of(tape) : NULL;
    if (!all) {
        mn_defer_declare(tape, data, bytes);
        return;
    }
    if (mn_values_any(&all->values, data, bytes, is_waited_for, all)) mn_tape_flush(tape);
    mn_values_remove(&all->values, data, bytes);
    declare(tape, all, data, bytes);
}

static void add(mn_tape *tape, mn_deferred *d) {
    mn_defer *all = tape->delay;
    d->after = 0;
    for (int i = 0; i < all->n; i++) {
        if (depends(d, &all->list[i])) d->after |= mn_bit(i);
    }
    all->n++;
}

bool mn_defer_elementwise(mn_tape *tape, mn_elementwise_id id, const void *work) {
    mn_deferred *d = next(tape);
    if (!d) return false;
    const bool repeats = tape->modes & MN_TAPE_REPEATS;    // then logits end a stage
    const int64_t most = repeats && !tape->sequences ? MN_DECODE_MAX_MOVE : 0;
    if (mn_decode_of_elementwise(d, id, work, most, tape->sequences) && !d->unnamed) {
        add(tape, d);
        return true;
    }
    mn_tape_flush(tape);
    return false;
}

bool mn_defer_gemm(mn_tape *tape, const mn_matmul_args *p) {
    mn_deferred *d = next(tape);
    if (!d) return false;
    d->kind = MN_DEFERRED_GEMM;
    d->of.product.work = mn_matmul_work_of(p);
    d->of.product.work.step = !tape->sequences;
    d->of.product.fits = !tape->sequences && mn_decode_gemms_supported(&d->of.product.work);
    mn_ranges_of_gemm(d, &d->of.product.work);
    if (!d->unnamed) add(tape, d);
    else mn_tape_flush(tape);
    return !d->unnamed;
}

bool mn_defer_op(mn_tape *tape, mn_op_id op, const void *args) {
    mn_deferred *d = next(tape);
    if (!d) return false;
    if (mn_decode_of_op(d, op, args, tape->sequences) && !d->unnamed) {
        add(tape, d);
        return true;
    }
    *d = (mn_deferred){ .kind = MN_DEFERRED_OP, .values = d->values };
    const size_t bytes = mn_op_describe(op)->args_bytes;
    const bool named = mn_ranges_of_op(d, op, args) && !d->unnamed;
    void *copy = named ? mn_tape_note(tape, bytes) : NULL;
    if (copy) {
        d->of.op.id = op;
        d->of.op.args = memcpy(copy, args, bytes);
        add(tape, d);
        return true;
    }
    mn_tape_flush(tape);
    return false;
}

/* A copy of a token's work over a cache; NULL where it is not put off. */
static void *keep_cached(mn_tape *tape, const mn_deferred *d, const void *work, size_t bytes) {
    const bool fits = !d->unnamed && d->n_ranges <= MN_DEFERRED_RANGES;
    void *copy = fits ? mn_tape_note(tape, bytes) : NULL;
    if (copy) memcpy(copy, work, bytes);
    else mn_tape_flush(tape);
    return copy;
}

bool mn_defer_attention(mn_tape *tape, const mn_decode_attention *p) {
    mn_deferred *d = next(tape);
    if (!d) return false;
    *d = (mn_deferred){ .kind = MN_DEFERRED_ATTENTION, .values = d->values };
    mn_ranges_of_attention(d, p);
    d->of.attention = keep_cached(tape, d, p, sizeof *p);
    if (d->of.attention) add(tape, d);
    return d->of.attention != NULL;
}

bool mn_defer_hyper(mn_tape *tape, const mn_decode_hyper *p) {
    mn_deferred *d = next(tape);
    if (!d) return false;
    *d = (mn_deferred){ .kind = MN_DEFERRED_HYPER, .values = d->values };
    mn_ranges_of_hyper(d, p);
    d->of.hyper = keep_cached(tape, d, p, sizeof *p);
    if (d->of.hyper) add(tape, d);
    return d->of.hyper != NULL;
}

void mn_defer_discard(mn_tape *tape) {
    if (!tape->delay) return;
    tape->delay->n = 0;
    mn_values_forget(&tape->delay->values);
    if (tape->delay->megakernel) mn_megakernel_clear(tape->delay->megakernel);
}

void mn_defer_destroy(mn_defer *delay) {
    if (!delay) return;
    mn_megakernel_destroy(delay->megakernel);
    mn_values_free(&delay->values);
    free(delay);
}

/* ---- the megakernel -------------------------------------------------------------------------- */

/* The megakernel that stages are for; NULL where none is made. */
static mn_megakernel *megakernel_of(mn_tape *tape) {
    mn_defer *all = tape->delay;
    if (!(tape->modes & MN_TAPE_REPEATS) || tape->sequences) return NULL;
    if (!mn_megakernel_supported()) return NULL;
    if (!all->megakernel) all->megakernel = mn_megakernel_create();
    if (all->megakernel) all->megakernel->values = &all->values;
    return all->megakernel;
}

static void check(mn_tape *tape, int code) {
    mn_status st = code == 0 ? MN_OK : mn_device_check(tape->device, code, tape->scope);
    if (st != MN_OK) mn_tape_fail(tape, st);
}

static void launch_megakernel(mn_tape *tape) {
    mn_megakernel *megakernel = tape->delay->megakernel;
    const size_t bytes = megakernel && mn_tape_runs(tape) ? mn_megakernel_bytes(megakernel) : 0;
    void *instrs = bytes > 0 ? mn_tape_note(tape, bytes) : NULL;
    if (instrs) {
        mn_megakernel_encode(megakernel, instrs);
        void *there = (void *)mn_tape_lend_once(tape, instrs, bytes);
        if (there) check(tape, mn_megakernel_launch(megakernel, there, tape->where));
    }
    if (megakernel) mn_megakernel_clear(megakernel);
}

/* Adds products or a recurrence, the other being NULL; where it does not fit, the megakernel so
 * far is launched first. */
static bool add_stage(mn_tape *tape, const mn_decode_gemms *gemms,
                      const mn_decode_recurrence *memory) {
    mn_megakernel *megakernel = megakernel_of(tape);
    for (int i = 0; megakernel && i < 2; i++) {
        if (gemms ? mn_megakernel_add_gemms(megakernel, gemms)
                     : mn_megakernel_add_recurrence(megakernel, memory)) {
            return true;
        }
        if (mn_megakernel_bytes(megakernel) == 0) break;
        launch_megakernel(tape);
    }
    return false;
}

/* ---- launches -------------------------------------------------------------------------------- */

static bool waits(const mn_defer *all, int i) {
    return !(all->done & mn_bit(i));
}

/* Whether all that must come before work i is in `done`. */
static bool ready(const mn_defer *all, int i, uint64_t done) {
    return waits(all, i) && (all->list[i].after & ~done) == 0;
}

static const mn_deferred *small_op_at(const mn_defer *all, int i) {
    return all->list[i].kind == MN_DEFERRED_SMALL ? &all->list[i] : NULL;
}

static bool is_product(const mn_defer *all, int i) {
    return all->list[i].kind == MN_DEFERRED_GEMM && all->list[i].of.product.fits;
}

/* The same of a type. */
static bool is_row(const mn_view *view, const int64_t shape[4], int64_t count, mn_dtype dtype) {
    return view->dtype == dtype && mn_is_row(view, shape, count);
}

/* Whether small work f makes the input of product p. */
static bool makes_input(const mn_decode_op *f, const mn_gemm_problem *p) {
    const mn_view *y = mn_decode_result(f);
    if (f->kind == MN_DECODE_CONV || y->data != p->a) return false;
    if (p->M > 1 && p->a_row != p->K) return false;
    if (f->kind > MN_DECODE_FILL) return y->dtype == p->dtype && mn_count4(f->shape) % p->K == 0;
    return is_row(y, f->shape, p->M * p->K, p->dtype);
}

/* Whether small work k makes the bias of product i of a parameter in float32, which a stage does
 * by itself. */
static bool makes_bias(const mn_defer *all, int k, int i) {
    const mn_gemm_problem *p = &all->list[i].of.product.work;
    const mn_decode_op *f = &all->list[k].of.few;
    if (!all->fuses || !is_product(all, i) || p->quant || p->M > 1 || p->dtype != MN_BF16) {
        return false;
    }
    return small_op_at(all, k) && f->kind == MN_DECODE_MOVE && ready(all, k, all->done) &&
           p->bias && f->at[1].data == p->bias && is_row(&f->at[1], f->shape, p->N, MN_BF16) &&
           is_row(&f->at[0], f->shape, p->N, MN_F32) &&
           mn_only_reads(&all->list[i], &all->list[k]);
}

/* The bit of the work that makes product i's bias so, or 0. */
static uint64_t bias_of(const mn_defer *all, int i) {
    for (int k = 0; k < i; k++) {
        if ((all->list[i].after & mn_bit(k)) && makes_bias(all, k, i)) return mn_bit(k);
    }
    return 0;
}

/* The small work that product i may make its input by: the only thing that holds it back. -1: none
 * is needed. -2: something else holds it back. */
static int prologue_of(const mn_defer *all, int i) {
    const uint64_t missing = all->list[i].after & ~all->done & ~bias_of(all, i);
    if (missing == 0) return -1;
    for (int k = 0; k < i; k++) {
        if (missing != mn_bit(k) || all->list[k].kind != MN_DEFERRED_SMALL) continue;
        const bool makes = makes_input(&all->list[k].of.few, &all->list[i].of.product.work);
        const bool after = mn_only_reads(&all->list[i], &all->list[k]);
        if (makes && after && ready(all, k, all->done)) return k;
    }
    return -2;
}

/* Whether a megakernel makes the input of product i by small work k, but not in the product's
 * stage. */
static bool is_stage_of_its_own(mn_tape *tape, const mn_defer *all, int k, int i) {
    const mn_gemm_problem *p = &all->list[i].of.product.work;
    return !p->quant && p->M == 1 && p->dtype == MN_BF16 && megakernel_of(tape) &&
           !mn_megakernel_takes_row(&all->list[k].of.few, p->K);
}

static bool same_input(const mn_gemm_problem *x, const mn_gemm_problem *y) {
    return x->a == y->a && x->M == y->M && x->K == y->K && x->a_row == y->a_row &&
           x->dtype == y->dtype;
}

/* Whether what waits goes on number by number from work i: then it is an epilogue among others. */
static bool is_continued(const mn_defer *all, int i) {
    for (int k = i + 1; k < all->n; k++) {
        const mn_deferred *d = small_op_at(all, k);
        if (d && waits(all, k) && d->of.few.kind <= MN_DECODE_FILL && (d->after & mn_bit(i))) {
            return true;
        }
    }
    return false;
}

/* c + plus, where that can be done at once: `plus` is there and of the same shape. Returns the bit
 * of that work, or 0. */
static uint64_t add_sum(const mn_defer *all, mn_decode_gemm *to, int product) {
    const mn_gemm_problem *p = &all->list[product].of.product.work;
    for (int i = product + 1; i < all->n; i++) {
        const mn_deferred *d = small_op_at(all, i);
        if (!d || d->of.few.kind != MN_DECODE_PAIR || d->of.few.f != MN_PAIR_ADD) continue;
        const mn_decode_op *f = &d->of.few;
        if (!(d->after & mn_bit(product)) || !ready(all, i, all->done | mn_bit(product))) continue;
        const int other = f->at[0].data == p->c ? 1 : 0;
        bool rows = (f->at[0].data == p->c) != (f->at[1].data == p->c);    // c + c is another one
        for (int k = 0; k < 3; k++) {
            rows = rows && is_row(&f->at[k], f->shape, p->M * p->N, p->c_dtype);
        }
        if (!rows || !mn_only_reads(d, &all->list[product]) || is_continued(all, i)) continue;
        to->plus = f->at[other].data;
        to->sum = f->at[2].data;
        return mn_bit(i);
    }
    return 0;
}

static int quant_bits(const mn_gemm_problem *p) {
    return p->quant ? p->quant->bits : 0;
}

/* Numbers [begin, end) of a product that a work accesses. */
typedef struct columns {
    int64_t begin, end;
} columns;

enum { MOST_ACCESSES = 64 };

/* What later works access of product i; more than MOST_ACCESSES: that is too much. */
static int accesses_of(columns *list, const mn_defer *all, int i) {
    const mn_gemm_problem *p = &all->list[i].of.product.work;
    const mn_mem_range c = mn_values_range(&all->values, p->c, (size_t)p->N * 2);
    int n = 0;
    for (int k = i + 1; k < all->n; k++) {
        for (int m = 0; m < all->list[k].n_ranges && waits(all, k); m++) {
            const mn_mem_range *range = &all->list[k].ranges[m];
            if (!mn_ranges_meet(&c, range)) continue;
            if (n == MOST_ACCESSES) return n + 1;
            list[n++] = (columns){ (range->begin - c.begin) / 2, (range->end - c.begin) / 2 };
        }
    }
    return n;
}

/* Where columns of product i begin and end that works read for themselves, in their order, from 0
 * to N: [at[k], at[k + 1]) begin with column tiles, and nobody reads some of one and some of
 * another. Returns how many parts that makes. */
static int parts_of_columns(int64_t at[MN_DECODE_GEMMS + 1], const mn_defer *all, int i) {
    columns list[MOST_ACCESSES];
    const int64_t N = all->list[i].of.product.work.N;
    const int n = accesses_of(list, all, i);
    int parts = 0;
    bool apart = n <= MOST_ACCESSES;
    while (at[parts] < N && apart && parts < MN_DECODE_GEMMS) {
        int64_t end = N;
        for (int k = 0; k < n; k++) {
            if (list[k].begin > at[parts]) end = mn_min(end, list[k].begin);
            else if (list[k].end > at[parts]) end = mn_min(end, list[k].end);
        }
        for (int k = 0; k < n; k++) apart = apart && !(list[k].begin < end && end < list[k].end);
        apart = apart && (end % MN_DECODE_COL_TILE == 0 || end == N);
        at[++parts] = end;
    }
    if (apart && at[parts] == N) return parts;
    at[1] = N;
    return 1;
}

/* Product i, in parts that each have columns for themselves where `cuts` and there is room for
 * `most` of them. */
static void add_product(mn_decode_gemms *launch, int *gemms, const mn_defer *all, int i, bool cuts,
                        int most) {
    const mn_gemm_problem *p = &all->list[i].of.product.work;
    int64_t at[MN_DECODE_GEMMS + 1] = { 0, p->N };
    int n = cuts ? parts_of_columns(at, all, i) : 1;
    if (n > most) at[1] = p->N, n = 1;
    const uint64_t cast = bias_of(all, i);
    const float *wide = NULL;
    for (int k = 0; k < i; k++) {
        if (cast & mn_bit(k)) wide = all->list[k].of.few.at[0].data;
    }
    const int64_t item = (int64_t)mn_dtype_bytes(p->dtype);
    const int64_t to = (int64_t)mn_dtype_bytes(p->c_dtype);
    for (int k = 0; k < n; k++) {
        const int64_t from = at[k];
        gemms[launch->n] = i;
        launch->of[launch->n++] = (mn_decode_gemm){
            .b = (const char *)p->b + from * p->b_row * item,
            .bias = p->bias ? (const char *)p->bias + from * to : NULL,
            .wide_bias = wide ? wide + from : NULL,
            .c = (char *)p->c + from * to, .N = at[k + 1] - from, .b_row = p->b_row,
            .quant = p->quant
        };
    }
}

static void run_chains(mn_tape *tape, mn_defer *all, uint64_t taken);

/* Product `first` and those that wait for nothing but the same input. */
static void multiply(mn_tape *tape, mn_defer *all, int first, int prologue) {
    const mn_gemm_problem *lead = &all->list[first].of.product.work;
    mn_decode_gemms launch = { .dtype = lead->dtype, .M = lead->M, .K = lead->K, .a = lead->a,
                               .a_row = lead->a_row, .b_is_const = true };
    const bool stage = !lead->quant && megakernel_of(tape);    // which has no quantised weights
    int gemms[MN_DECODE_GEMMS], product[MN_DECODE_GEMMS], n = 0;
    uint64_t done = prologue >= 0 ? mn_bit(prologue) : 0, casts = 0;
    if (prologue >= 0) launch.first = &all->list[prologue].of.few;
    for (int i = first; i < all->n && n < MN_DECODE_GEMMS; i++) {
        if (!waits(all, i) || !is_product(all, i) || prologue_of(all, i) != prologue) continue;
        const mn_gemm_problem *p = &all->list[i].of.product.work;
        if (same_input(lead, p) && quant_bits(lead) == quant_bits(p)) product[n++] = i;
    }
    for (int k = 0; k < n; k++) {
        const mn_gemm_problem *p = &all->list[product[k]].of.product.work;
        const bool cuts = stage && p->M == 1 && p->c_dtype == MN_BF16;
        launch.b_is_const = launch.b_is_const && !mn_arena_holds(tape->data, p->b);
        done |= mn_bit(product[k]);
        casts |= bias_of(all, product[k]);
        add_product(&launch, gemms, all, product[k], cuts,
                    MN_DECODE_GEMMS - launch.n - (n - k - 1));
    }
    for (int i = 0; i < all->n && prologue >= 0; i++) {
        const bool other = waits(all, i) && !(done & mn_bit(i));
        launch.shares_a |= other && (all->list[i].after & mn_bit(prologue));
    }
    for (int k = 0; k < launch.n; k++) done |= add_sum(all, &launch.of[k], gemms[k]);
    const uint64_t ended = stage ? mn_decode_fuse_epilogues(all, &launch, gemms, done) : 0;
    all->stages = stage && add_stage(tape, &launch, NULL);
    if (all->stages) {
        all->done |= done | ended | casts;
        return;
    }
    launch_megakernel(tape);
    if (casts) run_chains(tape, all, casts);
    launch.n_epilogues = 0;
    all->done |= done;
    check(tape, mn_decode_run_gemms(&launch, tape->where));
}

/* o + plus behind the memory that operator i is, where the other one is there: its bit, or 0.
 * `missing`: norms that the stage makes, too. */
static uint64_t add_plus(const mn_defer *all, mn_decode_recurrence *memory, int i,
                         uint64_t missing) {
    const int64_t count = memory->call.H * memory->call.V;
    for (int k = i + 1; k < all->n; k++) {
        const mn_deferred *d = small_op_at(all, k);
        if (!d || !waits(all, k) || !(d->after & mn_bit(i))) continue;
        const mn_decode_op *f = &d->of.few;
        if (f->kind != MN_DECODE_PAIR || f->f != MN_PAIR_ADD) continue;
        const int own = f->at[0].data == memory->o.data ? 0 : 1;
        bool fits = f->at[own].data == memory->o.data && f->at[!own].data != memory->o.data &&
                    ready(all, k, all->done | missing | mn_bit(i)) && !is_continued(all, k) &&
                    mn_only_reads(d, &all->list[i]);
        for (int v = 0; v < 3; v++) fits = fits && is_row(&f->at[v], f->shape, count, MN_BF16);
        for (int n = 0; n < i && fits; n++) {
            if (d->after & missing & mn_bit(n)) fits = mn_only_reads(d, &all->list[n]);
        }
        if (!fits) continue;
        memory->plus = f->at[!own].data;
        memory->sum = f->at[2].data;
        return mn_bit(k);
    }
    return 0;
}

/* The memory that operator i is, as a stage of a megakernel; false where it is none, or something
 * else than norms of its queries and keys holds it back. */
static bool add_recurrence(mn_tape *tape, mn_defer *all, int i) {
    const mn_deferred *d = &all->list[i];
    mn_decode_recurrence memory;
    if (d->kind != MN_DEFERRED_OP || !mn_decode_recurrence_of(&memory, d->of.op.id,
                                                              d->of.op.args)) {
        return false;
    }
    const uint64_t missing = d->after & ~all->done;
    for (int k = 0; k < i; k++) {
        if (!(missing & mn_bit(k))) continue;
        const mn_deferred *front = small_op_at(all, k);
        if (!front || !ready(all, k, all->done) || !mn_only_reads(d, front)) return false;
        if (front->of.few.kind != MN_DECODE_L2_NORM && front->of.few.kind != MN_DECODE_RMS_NORM) {
            return false;
        }
        const void *makes = mn_decode_result(&front->of.few)->data;
        if (makes != memory.q.data && makes != memory.e.data) return false;
        memory.first[makes == memory.e.data] = &front->of.few;
    }
    mn_decode_recurrence more = memory;
    const uint64_t plus = add_plus(all, &more, i, missing);
    mn_megakernel *megakernel = plus ? megakernel_of(tape) : NULL;
    if (megakernel && mn_megakernel_add_recurrence(megakernel, &more)) {
        all->done |= missing | mn_bit(i) | plus;
        return true;
    }
    if (!add_stage(tape, NULL, &memory)) return false;
    all->done |= missing | mn_bit(i);
    return true;
}

/* Operator i as a stage of Palimpsa or KLA together with the small works around it; false where it
 * is none of these, or other works hold it back. */
static bool add_cells(mn_tape *tape, mn_defer *all, int i) {
    const bool op = waits(all, i) && all->list[i].kind == MN_DEFERRED_OP && all->stages;
    mn_megakernel *megakernel = op ? megakernel_of(tape) : NULL;
    if (!megakernel || mn_megakernel_bytes(megakernel) == 0) return false;
    const uint64_t taken = mn_megakernel_add_cells(megakernel, all, i);
    all->done |= taken;
    return taken != 0;
}

/* Work i over a cache as stages of a megakernel; false where it is something else, or is not
 * ready, or no megakernel takes it. Alone it is better off as launches of its own. */
static bool add_cached(mn_tape *tape, mn_defer *all, int i) {
    const mn_deferred *d = &all->list[i];
    const bool attends = d->kind == MN_DEFERRED_ATTENTION;
    if (!attends && d->kind != MN_DEFERRED_HYPER) return false;
    if (!all->stages || !ready(all, i, all->done)) return false;
    mn_megakernel *megakernel = megakernel_of(tape);
    for (int k = 0; megakernel && k < 2; k++) {
        if (attends ? mn_megakernel_add_attention(megakernel, d->of.attention)
                    : mn_megakernel_add_hyper(megakernel, d->of.hyper)) {
            all->done |= mn_bit(i);
            return true;
        }
        if (mn_megakernel_bytes(megakernel) == 0) break;
        launch_megakernel(tape);
    }
    return false;
}

/* Small work i as a row of a table that the megakernel begins with; false where it is something
 * else, or the megakernel has begun. */
static bool add_gather(mn_tape *tape, mn_defer *all, int i) {
    const mn_deferred *d = small_op_at(all, i);
    mn_megakernel *megakernel = megakernel_of(tape);
    if (!d || d->of.few.kind != MN_DECODE_ROWS || !megakernel
        || !ready(all, i, all->done)) return false;
    if (mn_megakernel_bytes(megakernel) > 0) return false;
    if (!mn_megakernel_add_gather(megakernel, &d->of.few)) return false;
    all->done |= mn_bit(i);
    return true;
}

/* Whether small work i is left to the product whose input it makes. */
static bool is_left(mn_tape *tape, const mn_defer *all, int i) {
    for (int k = i + 1; k < all->n; k++) {
        if (!waits(all, k) || !is_product(all, k) || !(all->list[k].after & mn_bit(i))) continue;
        if (makes_bias(all, i, k)) return true;
        if (makes_input(&all->list[i].of.few, &all->list[k].of.product.work) &&
            !is_stage_of_its_own(tape, all, i, k)) {
            return true;
        }
    }
    return false;
}

/* Whether small work i may be in one launch with those of `taken` that it is after: blocks of
 * another sequence are at different places. */
static bool joins(const mn_defer *all, int i, uint64_t taken, int64_t sequences) {
    for (int k = 0; k < i && sequences > 1; k++) {
        if (!(taken & all->list[i].after & mn_bit(k))) continue;
        if (!mn_decode_follows(&all->values, &all->list[i].of.few, &all->list[k].of.few,
                               sequences)) {
            return false;
        }
    }
    return true;
}

/* Small works that are ready, or are after others of the launch; `all_of_them`: also those that
 * gemms would make. Returns their bits. */
static uint64_t gather(mn_tape *tape, const mn_defer *all, bool all_of_them) {
    uint64_t taken = 0;
    int n = 0;
    for (int i = 0; i < all->n && n < MN_DECODE_OPS; i++) {
        if (!small_op_at(all, i) || !ready(all, i, all->done | taken)) continue;
        if (!joins(all, i, taken, tape->sequences)) continue;
        if (!all_of_them && is_left(tape, all, i)) continue;
        taken |= mn_bit(i);
        n++;
    }
    return taken;
}

void mn_defer_parts(int part[MN_DEFERRED], const mn_defer *all, uint64_t taken) {
    for (int i = 0; i < all->n; i++) part[i] = i;
    for (int i = 0; i < all->n; i++) {
        for (int k = 0; k < i && (taken & mn_bit(i)); k++) {
            if (!(taken & mn_bit(k) & all->list[i].after)) continue;
            const int from = part[k], to = part[i];
            for (int j = 0; j <= i; j++) {
                if (part[j] == from) part[j] = to;
            }
        }
    }
}

static void run_chains(mn_tape *tape, mn_defer *all, uint64_t taken) {
    int part[MN_DEFERRED];
    mn_defer_parts(part, all, taken);
    mn_decode_chains launch = { .sequences = tape->sequences };
    int n = 0;
    for (int p = 0; p < all->n; p++) {
        const int first = n;
        for (int i = 0; i < all->n; i++) {
            if ((taken & mn_bit(i)) && part[i] == p) launch.work[n++] = all->list[i].of.few;
        }
        if (n > first) launch.first[++launch.n_chains] = n;
    }
    all->done |= taken;
    launch_megakernel(tape);
    if (mn_tape_runs(tape)) check(tape, mn_decode_run_chains(&launch, tape->where));
}

/* Product i, of quantised weights, and those of its input that are ready as well. */
static void run_quants(mn_tape *tape, mn_defer *all, int i) {
    mn_gemm_problem work[MN_GEMM_QUANTS];
    const uint64_t done = all->done;
    int n = 0;
    for (int k = i; k < all->n && n < MN_GEMM_QUANTS; k++) {
        const mn_deferred *d = &all->list[k];
        const mn_gemm_problem *p = &d->of.product.work;
        if (d->kind != MN_DEFERRED_GEMM || !p->quant || !ready(all, k, done)) continue;
        if (n > 0 && (!same_input(p, &work[0]) || p->c_dtype != work[0].c_dtype ||
                      quant_bits(p) != quant_bits(&work[0]))) {
            continue;
        }
        work[n++] = *p;
        all->done |= mn_bit(k);
    }
    launch_megakernel(tape);
    if (!mn_tape_runs(tape)) return;
    if (n > 1) {
        check(tape, mn_gemm_quant_several(work, n, tape->where));
        return;
    }
    const mn_status st = mn_matmul_run(tape->context, &work[0]);
    if (st != MN_OK) mn_tape_fail(tape, st);
}

/* Product i of several sequences, and those of its input that are ready as well. */
static void run_rows(mn_tape *tape, mn_defer *all, int i) {
    mn_gemm_problem work[MN_GEMM_ROWS];
    const uint64_t done = all->done;
    int n = 0;
    for (int k = i; k < all->n && n < MN_GEMM_ROWS; k++) {
        const mn_gemm_problem *p = &all->list[k].of.product.work;
        if (all->list[k].kind != MN_DEFERRED_GEMM || !ready(all, k, done)) continue;
        if (!mn_gemm_rows_supported(p)) continue;
        if (n > 0 && (!same_input(p, &work[0]) || p->c_dtype != work[0].c_dtype)) continue;
        work[n] = *p;
        all->done |= mn_bit(k);
        all->done |= mn_decode_fuse_gate(all, &work[n++], k);
    }
    if (mn_tape_runs(tape)) check(tape, mn_gemm_rows(work, n, tape->where));
}

static void run_alone(mn_tape *tape, mn_defer *all, int i) {
    const mn_deferred *d = &all->list[i];
    if (d->kind == MN_DEFERRED_GEMM && mn_gemm_rows_supported(&d->of.product.work)) {
        run_rows(tape, all, i);
        return;
    }
    if (d->kind == MN_DEFERRED_GEMM && d->of.product.work.quant &&
        d->of.product.work.M <= MN_DECODE_MAX_M) {
        run_quants(tape, all, i);
        return;
    }
    all->done |= mn_bit(i);
    launch_megakernel(tape);
    if (!mn_tape_runs(tape)) return;
    if (d->kind == MN_DEFERRED_ATTENTION) {
        check(tape, mn_decode_run_attention(d->of.attention, tape->where));
        return;
    }
    if (d->kind == MN_DEFERRED_HYPER) {
        check(tape, mn_decode_run_hyper(d->of.hyper, tape->where));
        return;
    }
    if (d->kind == MN_DEFERRED_OP) {
        tape->context->steps = !tape->sequences;
        tape->context->counts = mn_tape_counts(tape);
        const mn_status st = mn_op_run(tape->context, d->of.op.id, MN_FORWARD, d->of.op.args);
        tape->context->counts = (mn_borders){ 0 };
        tape->context->steps = false;
        if (st != MN_OK) mn_tape_fail(tape, st);
        return;
    }
    const mn_status st = mn_matmul_run(tape->context, &d->of.product.work);
    if (st != MN_OK) mn_tape_fail(tape, st);
}

/* Small works and operators that are ready, as a stage; false where a megakernel takes none.
 * Alone they are better off as launches of their own. */
static bool add_works(mn_tape *tape, mn_defer *all) {
    mn_megakernel *megakernel = all->stages ? megakernel_of(tape) : NULL;
    const uint64_t small = megakernel ? gather(tape, all, false) : 0;
    for (int i = 0; megakernel && i < 2; i++) {
        const uint64_t taken = mn_megakernel_add_works(megakernel, all, small, false);
        all->done |= taken;
        if (taken) return true;
        if (mn_megakernel_bytes(megakernel) == 0) break;
        launch_megakernel(tape);
    }
    return false;
}

/* Operators that go by nothing of this token, as dynamics made of parameters: in front of the
 * products, whose row others are still making. */
static bool add_early(mn_tape *tape, mn_defer *all) {
    bool any = false;
    for (int i = 0; i < all->n; i++) any |= waits(all, i) && all->list[i].kind == MN_DEFERRED_OP;
    mn_megakernel *megakernel = any && all->stages ? megakernel_of(tape) : NULL;
    if (!megakernel || mn_megakernel_bytes(megakernel) == 0) return false;
    const uint64_t small = gather(tape, all, false);
    const uint64_t taken = mn_megakernel_add_works(megakernel, all, small, true);
    all->done |= taken;
    return taken != 0;
}

/* One launch, or one stage. */
static void step(mn_tape *tape, mn_defer *all) {
    if (add_early(tape, all)) return;
    for (int i = 0; i < all->n; i++) {
        if (!waits(all, i) || !is_product(all, i)) continue;
        const int prologue = prologue_of(all, i);
        if (prologue >= 0 && is_stage_of_its_own(tape, all, prologue, i)) continue;
        if (prologue != -2) {
            multiply(tape, all, i, prologue);
            return;
        }
    }
    for (int i = 0; i < all->n; i++) {
        if (waits(all, i) && megakernel_of(tape) && add_recurrence(tape, all, i)) return;
        if (add_cells(tape, all, i)) return;
    }
    for (int i = 0; i < all->n; i++) {
        if (add_cached(tape, all, i) || add_gather(tape, all, i)) return;
    }
    if (add_works(tape, all)) return;
    uint64_t taken = gather(tape, all, false);
    for (int i = 0; taken == 0 && i < all->n; i++) {
        if (small_op_at(all, i) || !ready(all, i, all->done)) continue;
        run_alone(tape, all, i);
        return;
    }
    if (taken == 0) taken = gather(tape, all, true);
    run_chains(tape, all, taken);
}

/* Whether nothing but small works waits. */
static bool small_wait(const mn_defer *all) {
    for (int i = 0; i < all->n; i++) {
        if (waits(all, i) && !small_op_at(all, i)) return false;
    }
    return true;
}

/* Those that wait move to the front. */
static void keep_waiting(mn_defer *all) {
    int to[MN_DEFERRED], n = 0;
    for (int i = 0; i < all->n; i++) {
        if (waits(all, i)) to[i] = n++;
    }
    for (int i = 0; i < all->n; i++) {
        if (!waits(all, i)) continue;
        uint64_t after = 0;
        for (int k = 0; k < i; k++) {
            if (waits(all, k) && (all->list[i].after & mn_bit(k))) after |= mn_bit(to[k]);
        }
        if (to[i] != i) all->list[to[i]] = all->list[i];
        all->list[to[i]].after = after;
    }
    all->n = n;
    all->done = 0;
}

/* `all_of_them`: also small works at the end, which something may make its input by. */
static void stage(mn_tape *tape, bool all_of_them) {
    mn_defer *all = tape->delay;
    if (!all || all->n == 0) return;
    const mn_status st = mn_device_use(tape->device);
    if (st != MN_OK) mn_tape_fail(tape, st);
    const uint64_t every = all->n == MN_DEFERRED ? ~UINT64_C(0) : mn_bit(all->n) - 1;
    all->done = 0;
    all->fuses = megakernel_of(tape) != NULL;
    while (all->done != every && mn_tape_runs(tape) && (all_of_them || !small_wait(all))) {
        step(tape, all);
    }
    if (mn_tape_runs(tape)) keep_waiting(all);
    else all->n = 0;
}

void mn_defer_lower(mn_tape *tape) {
    stage(tape, false);
}

void mn_tape_flush(mn_tape *tape) {
    stage(tape, true);
    if (tape->delay) launch_megakernel(tape);
}
