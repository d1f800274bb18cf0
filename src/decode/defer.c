/* defer.c - forward on few rows, such as one token: works wait until something is read, and
 * are then done in few launches (kernels/decode.h).
 *
 * A work depends on an earlier one if one of the two writes what the other touches. From those that
 * nothing holds back a launch is made of, in this order of preference:
 *
 *   products of the same input, with the small work that makes it in front of them (a norm, a
 *   gate), and sums with what is there already behind them (a residual)
 *   the recurrence of a memory, with the norms that make its queries and keys, in programs
 *   small works, and what follows from them alone: what depends on each other is a part, parts
 *   are done side by side
 *   whatever else it is, alone
 *
 * On a tape of MN_TAPE_REPEATS the first two become stages of a program where they can, products
 * with whatever else follows from their columns alone (epilogue.c); any other launch ends the
 * program in front of it. Results lie where they would without delay. */
#include "decode/defer.h"

#include <stdlib.h>
#include <string.h>

#include "base/dtype.h"
#include "base/util.h"
#include "ops/run.h"

/* ---- what waits ------------------------------------------------------------------------------ */

static bool collide(const mn_touch *a, const mn_touch *b) {
    return (a->writes || b->writes) && a->begin < b->end && b->begin < a->end;
}

static bool depends(const mn_delayed *later, const mn_delayed *earlier) {
    for (int i = 0; i < later->n_touched; i++) {
        for (int k = 0; k < earlier->n_touched; k++) {
            if (collide(&later->touched[i], &earlier->touched[k])) return true;
        }
    }
    return false;
}

static bool delays(const mn_tape *tape) {
    return tape->device && (tape->modes & MN_TAPE_DELAY) && mn_tape_runs(tape) &&
           !tape->cu_seqlens;
}

/* Room for one more; NULL where nothing waits on this tape. */
static mn_delayed *next(mn_tape *tape) {
    if (!delays(tape)) return NULL;
    if (!tape->delay) tape->delay = calloc(1, sizeof *tape->delay);
    if (tape->delay && tape->delay->n == MN_DELAYED) mn_delay_stage(tape);
    if (tape->delay && tape->delay->n == MN_DELAYED) mn_tape_flush(tape);
    return tape->delay ? &tape->delay->list[tape->delay->n] : NULL;
}

static void add(mn_tape *tape, mn_delayed *d) {
    mn_delay *all = tape->delay;
    d->after = 0;
    for (int i = 0; i < all->n; i++) {
        if (depends(d, &all->list[i])) d->after |= mn_bit(i);
    }
    all->n++;
}

bool mn_delay_work(mn_tape *tape, mn_work_id id, const void *work) {
    mn_delayed *d = next(tape);
    if (!d) return false;
    const bool repeats = tape->modes & MN_TAPE_REPEATS;    // then logits end a stage
    if (mn_few_of_work(d, id, work, repeats ? MN_FEW_MOVED : 0)) {
        add(tape, d);
        return true;
    }
    mn_tape_flush(tape);
    return false;
}

bool mn_delay_product(mn_tape *tape, const mn_matmul_args *p) {
    mn_delayed *d = next(tape);
    if (!d) return false;
    *d = (mn_delayed){ .kind = MN_DELAYED_PRODUCT };
    d->of.product.work = mn_matmul_work_of(p);
    d->of.product.work.step = true;
    d->of.product.fits = mn_few_multiplies(&d->of.product.work);
    mn_touch_product(d, &d->of.product.work);
    add(tape, d);
    return true;
}

bool mn_delay_op(mn_tape *tape, mn_op_id op, const void *args) {
    mn_delayed *d = next(tape);
    if (!d) return false;
    if (mn_few_of_op(d, op, args)) {
        add(tape, d);
        return true;
    }
    *d = (mn_delayed){ .kind = MN_DELAYED_OP };
    const size_t bytes = mn_op_describe(op)->args_bytes;
    void *copy = mn_touch_op(d, op, args) ? mn_tape_note(tape, bytes) : NULL;
    if (copy) {
        d->of.op.id = op;
        d->of.op.args = memcpy(copy, args, bytes);
        add(tape, d);
        return true;
    }
    mn_tape_flush(tape);
    return false;
}

void mn_delay_forget(mn_tape *tape) {
    if (!tape->delay) return;
    tape->delay->n = 0;
    if (tape->delay->program) mn_few_program_clear(tape->delay->program);
}

void mn_delay_destroy(mn_delay *delay) {
    if (!delay) return;
    mn_few_program_destroy(delay->program);
    free(delay);
}

/* ---- the program ----------------------------------------------------------------------------- */

/* The program that stages are for; NULL where none is made. */
static mn_few_program *program_of(mn_tape *tape) {
    mn_delay *all = tape->delay;
    if (!(tape->modes & MN_TAPE_REPEATS) || !mn_few_programs_serve()) return NULL;
    if (!all->program) all->program = mn_few_program_create();
    return all->program;
}

static void check(mn_tape *tape, int code) {
    mn_status st = code == 0 ? MN_OK : mn_device_check(tape->device, code, tape->scope);
    if (st != MN_OK) mn_tape_fail(tape, st);
}

static void launch_program(mn_tape *tape) {
    mn_few_program *program = tape->delay->program;
    const size_t bytes = program && mn_tape_runs(tape) ? mn_few_program_bytes(program) : 0;
    void *notes = bytes > 0 ? mn_tape_note(tape, bytes) : NULL;
    if (notes) {
        mn_few_program_write(program, notes);
        void *there = (void *)mn_tape_lend_once(tape, notes, bytes);
        if (there) check(tape, mn_few_program_launch(program, there, tape->where));
    }
    if (program) mn_few_program_clear(program);
}

/* Adds products or a memory, the other being NULL; ends the program where that has to be. */
static bool add_stage(mn_tape *tape, const mn_few_products *products, const mn_few_memory *memory) {
    mn_few_program *program = program_of(tape);
    for (int i = 0; program && i < 2; i++) {
        if (products ? mn_few_program_multiply(program, products)
                     : mn_few_program_remember(program, memory)) {
            return true;
        }
        if (mn_few_program_bytes(program) == 0) break;
        launch_program(tape);
    }
    return false;
}

/* ---- launches -------------------------------------------------------------------------------- */

static bool waits(const mn_delay *all, int i) {
    return !(all->done & mn_bit(i));
}

/* Whether all that must come before work i is in `done`. */
static bool ready(const mn_delay *all, int i, uint64_t done) {
    return waits(all, i) && (all->list[i].after & ~done) == 0;
}

static const mn_delayed *few_at(const mn_delay *all, int i) {
    return all->list[i].kind == MN_DELAYED_FEW ? &all->list[i] : NULL;
}

static bool is_product(const mn_delay *all, int i) {
    return all->list[i].kind == MN_DELAYED_PRODUCT && all->list[i].of.product.fits;
}

/* The same of a type. */
static bool is_row(const mn_view *view, const int64_t shape[4], int64_t count, mn_dtype dtype) {
    return view->dtype == dtype && mn_is_row(view, shape, count);
}

/* Whether small work f makes the input of product p. */
static bool makes_input(const mn_few *f, const mn_product_work *p) {
    const mn_view *y = mn_few_result(f);
    if (f->kind == MN_FEW_CONV || y->data != p->a) return false;
    if (p->M > 1 && p->a_row != p->K) return false;
    if (f->kind > MN_FEW_FILL) return y->dtype == p->dtype && mn_count4(f->shape) % p->K == 0;
    return is_row(y, f->shape, p->M * p->K, p->dtype);
}

/* The small work that product i may make its input by: the only thing that holds it back. -1: none
 * is needed. -2: something else holds it back. */
static int maker_of(const mn_delay *all, int i) {
    const uint64_t missing = all->list[i].after & ~all->done;
    if (missing == 0) return -1;
    for (int k = 0; k < i; k++) {
        if (missing != mn_bit(k) || all->list[k].kind != MN_DELAYED_FEW) continue;
        const bool makes = makes_input(&all->list[k].of.few, &all->list[i].of.product.work);
        const bool after = mn_only_reads(&all->list[i], &all->list[k]);
        if (makes && after && ready(all, k, all->done)) return k;
    }
    return -2;
}

static bool same_input(const mn_product_work *x, const mn_product_work *y) {
    return x->a == y->a && x->M == y->M && x->K == y->K && x->a_row == y->a_row &&
           x->dtype == y->dtype;
}

/* Whether what waits goes on number by number from work i: then it is an ending among others. */
static bool goes_on(const mn_delay *all, int i) {
    for (int k = i + 1; k < all->n; k++) {
        const mn_delayed *d = few_at(all, k);
        if (d && waits(all, k) && d->of.few.kind <= MN_FEW_FILL && (d->after & mn_bit(i))) {
            return true;
        }
    }
    return false;
}

/* c + plus, where that can be done at once: `plus` is there and of the same shape. Returns the bit
 * of that work, or 0. */
static uint64_t add_sum(const mn_delay *all, mn_few_product *to, int product) {
    const mn_product_work *p = &all->list[product].of.product.work;
    for (int i = product + 1; i < all->n; i++) {
        const mn_delayed *d = few_at(all, i);
        if (!d || d->of.few.kind != MN_FEW_PAIR || d->of.few.f != MN_PAIR_ADD) continue;
        const mn_few *f = &d->of.few;
        if (!(d->after & mn_bit(product)) || !ready(all, i, all->done | mn_bit(product))) continue;
        const int other = f->at[0].data == p->c ? 1 : 0;
        bool rows = f->at[0].data == p->c || f->at[1].data == p->c;
        for (int k = 0; k < 3; k++) {
            rows = rows && is_row(&f->at[k], f->shape, p->M * p->N, p->c_dtype);
        }
        if (!rows || !mn_only_reads(d, &all->list[product]) || goes_on(all, i)) continue;
        to->plus = f->at[other].data;
        to->sum = f->at[2].data;
        return mn_bit(i);
    }
    return 0;
}

/* Product `first` and those that wait for nothing but the same input. */
static void multiply(mn_tape *tape, mn_delay *all, int first, int maker) {
    const mn_product_work *lead = &all->list[first].of.product.work;
    mn_few_products launch = { .dtype = lead->dtype, .M = lead->M, .K = lead->K, .a = lead->a,
                               .a_row = lead->a_row, .settled = true };
    int products[MN_FEW_PRODUCTS];
    uint64_t done = maker >= 0 ? mn_bit(maker) : 0;
    if (maker >= 0) launch.first = &all->list[maker].of.few;
    for (int i = first; i < all->n && launch.n < MN_FEW_PRODUCTS; i++) {
        if (!waits(all, i) || !is_product(all, i) || maker_of(all, i) != maker) continue;
        const mn_product_work *p = &all->list[i].of.product.work;
        if (!same_input(lead, p)) continue;
        products[launch.n] = i;
        launch.of[launch.n++] = (mn_few_product){ .b = p->b, .bias = p->bias, .c = p->c, .N = p->N,
                                                  .b_row = p->b_row };
        launch.settled = launch.settled && !mn_arena_holds(tape->data, p->b);
        done |= mn_bit(i);
    }
    for (int k = 0; k < launch.n; k++) done |= add_sum(all, &launch.of[k], products[k]);
    const uint64_t ended = program_of(tape) ? mn_few_gather_endings(all, &launch, products, done)
                                            : 0;
    if (add_stage(tape, &launch, NULL)) {
        all->done |= done | ended;
        return;
    }
    launch_program(tape);
    launch.n_endings = 0;
    all->done |= done;
    check(tape, mn_few_multiply(&launch, tape->where));
}

/* The memory that operator i is, as a stage of a program; false where it is none, or something else
 * than norms of its queries and keys holds it back. */
static bool remember(mn_tape *tape, mn_delay *all, int i) {
    const mn_delayed *d = &all->list[i];
    mn_few_memory memory;
    if (d->kind != MN_DELAYED_OP || !mn_few_memory_of(&memory, d->of.op.id, d->of.op.args)) {
        return false;
    }
    const uint64_t missing = d->after & ~all->done;
    for (int k = 0; k < i; k++) {
        if (!(missing & mn_bit(k))) continue;
        const mn_delayed *front = few_at(all, k);
        if (!front || !ready(all, k, all->done) || !mn_only_reads(d, front)) return false;
        if (front->of.few.kind != MN_FEW_L2_NORM && front->of.few.kind != MN_FEW_RMS_NORM) {
            return false;
        }
        const void *makes = mn_few_result(&front->of.few)->data;
        if (makes != memory.q.data && makes != memory.e.data) return false;
        memory.first[makes == memory.e.data] = &front->of.few;
    }
    if (!add_stage(tape, NULL, &memory)) return false;
    all->done |= missing | mn_bit(i);
    return true;
}

/* Small work i as a row of a table that the program begins with; false where it is something else,
 * or the program has begun. */
static bool pick(mn_tape *tape, mn_delay *all, int i) {
    const mn_delayed *d = few_at(all, i);
    mn_few_program *program = program_of(tape);
    if (!d || d->of.few.kind != MN_FEW_ROWS || !program || !ready(all, i, all->done)) return false;
    if (mn_few_program_bytes(program) > 0) return false;
    if (!mn_few_program_pick(program, &d->of.few)) return false;
    all->done |= mn_bit(i);
    return true;
}

/* Whether small work i is left to the product whose input it makes. */
static bool is_left(const mn_delay *all, int i) {
    for (int k = i + 1; k < all->n; k++) {
        if (!waits(all, k) || !is_product(all, k) || !(all->list[k].after & mn_bit(i))) continue;
        if (makes_input(&all->list[i].of.few, &all->list[k].of.product.work)) return true;
    }
    return false;
}

/* Small works that are ready, or are after others of the launch; `all_of_them`: also those that
 * products would make. Returns their bits. */
static uint64_t gather(mn_delay *all, bool all_of_them) {
    uint64_t taken = 0;
    int n = 0;
    for (int i = 0; i < all->n && n < MN_FEW_WORKS; i++) {
        if (!few_at(all, i) || !ready(all, i, all->done | taken)) continue;
        if (!all_of_them && is_left(all, i)) continue;
        taken |= mn_bit(i);
        n++;
    }
    return taken;
}

/* Parts of a launch are works that depend on each other, however indirectly. */
static void run_parts(mn_tape *tape, mn_delay *all, uint64_t taken) {
    int part[MN_DELAYED];
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
    mn_few_parts launch = { 0 };
    int n = 0;
    for (int p = 0; p < all->n; p++) {
        const int first = n;
        for (int i = 0; i < all->n; i++) {
            if ((taken & mn_bit(i)) && part[i] == p) launch.work[n++] = all->list[i].of.few;
        }
        if (n > first) launch.first[++launch.n_parts] = n;
    }
    all->done |= taken;
    launch_program(tape);
    if (mn_tape_runs(tape)) check(tape, mn_few_run(&launch, tape->where));
}

static void run_alone(mn_tape *tape, mn_delay *all, int i) {
    const mn_delayed *d = &all->list[i];
    all->done |= mn_bit(i);
    launch_program(tape);
    if (!mn_tape_runs(tape)) return;
    if (d->kind == MN_DELAYED_OP) {
        tape->context->steps = true;
        const mn_status st = mn_op_run(tape->context, d->of.op.id, MN_FORWARD, d->of.op.args);
        tape->context->steps = false;
        if (st != MN_OK) mn_tape_fail(tape, st);
        return;
    }
    const mn_status st = mn_matmul_run(tape->context, &d->of.product.work);
    if (st != MN_OK) mn_tape_fail(tape, st);
}

/* One launch, or one stage. */
static void step(mn_tape *tape, mn_delay *all) {
    for (int i = 0; i < all->n; i++) {
        if (!waits(all, i) || !is_product(all, i)) continue;
        const int maker = maker_of(all, i);
        if (maker != -2) {
            multiply(tape, all, i, maker);
            return;
        }
    }
    for (int i = 0; i < all->n; i++) {
        if (waits(all, i) && program_of(tape) && remember(tape, all, i)) return;
    }
    for (int i = 0; i < all->n; i++) {
        if (pick(tape, all, i)) return;
    }
    uint64_t taken = gather(all, false);
    for (int i = 0; taken == 0 && i < all->n; i++) {
        if (few_at(all, i) || !ready(all, i, all->done)) continue;
        run_alone(tape, all, i);
        return;
    }
    if (taken == 0) taken = gather(all, true);
    run_parts(tape, all, taken);
}

/* Whether nothing but small works waits. */
static bool small_wait(const mn_delay *all) {
    for (int i = 0; i < all->n; i++) {
        if (waits(all, i) && !few_at(all, i)) return false;
    }
    return true;
}

/* Those that wait move to the front. */
static void keep_waiting(mn_delay *all) {
    int to[MN_DELAYED], n = 0;
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
    mn_delay *all = tape->delay;
    if (!all || all->n == 0) return;
    const mn_status st = mn_device_use(tape->device);
    if (st != MN_OK) mn_tape_fail(tape, st);
    const uint64_t every = all->n == MN_DELAYED ? ~UINT64_C(0) : mn_bit(all->n) - 1;
    all->done = 0;
    while (all->done != every && mn_tape_runs(tape) && (all_of_them || !small_wait(all))) {
        step(tape, all);
    }
    if (mn_tape_runs(tape)) keep_waiting(all);
    else all->n = 0;
}

void mn_delay_stage(mn_tape *tape) {
    stage(tape, false);
}

void mn_tape_flush(mn_tape *tape) {
    stage(tape, true);
    if (tape->delay) launch_program(tape);
}
