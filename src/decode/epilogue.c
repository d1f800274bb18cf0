/* epilogue.c - small works that products end with (kernels/decode.h): those that follow, number
 * by number, from the columns of products of one stage.
 *
 * A work is an epilogue if all that it waits for are such products, earlier epilogues of one of
 * them and small works that nothing holds back and that go by the same elements, which become
 * epilogues as well. It may not write what others of the stage still read: blocks are at
 * different places. */
#include <string.h>

#include "base/dtype.h"
#include "decode/defer.h"

bool mn_is_row(const mn_view *view, const int64_t shape[4], int64_t count) {
    mn_tensor x = { .stride = { view->stride[0], view->stride[1], view->stride[2] } };
    memcpy(x.shape, shape, sizeof x.shape);
    return mn_count4(shape) == count && (shape[3] == 1 || view->stride[3] == 1) &&
           mn_is_contiguous(&x);
}

bool mn_only_reads(const mn_deferred *later, const mn_deferred *earlier) {
    for (int i = 0; i < later->n_ranges; i++) {
        for (int k = 0; k < earlier->n_ranges; k++) {
            const mn_mem_range *now = &later->ranges[i], *before = &earlier->ranges[k];
            const bool reads = !now->writes && before->writes;
            const bool writes = now->writes || before->writes;
            if (writes && !reads && mn_ranges_meet(now, before)) return false;
        }
    }
    return true;
}

/* One number for all. */
static bool is_single(const mn_view *view, const int64_t shape[4]) {
    for (int i = 0; i < 4; i++) {
        if (shape[i] > 1 && view->stride[i] != 0) return false;
    }
    return true;
}

/* Numbers of a product that one number of a view serves, whole column tiles of them; 0: another
 * view. */
static int64_t serves(const mn_view *view, const int64_t shape[4]) {
    const bool heads = shape[0] * shape[1] == 1 && view->stride[3] == 0 &&
                       (shape[2] == 1 || view->stride[2] == 1);
    return heads && shape[3] % MN_DECODE_COL_TILE == 0 ? shape[3] : 0;
}

/* Whether a work goes number by number over `count` of them, or over one number for each of as many
 * groups of them. */
static bool goes_by(const mn_decode_op *f, int64_t count) {
    if (f->kind == MN_DECODE_CONV) return f->shape[2] == 1 && f->shape[3] == count;
    const bool each = f->kind == MN_DECODE_UNARY || f->kind == MN_DECODE_PAIR
        || f->kind == MN_DECODE_MOVE;
    const int64_t own = mn_count4(f->shape);
    if (own < count && (own == 0 || count % (own * MN_DECODE_COL_TILE) != 0)) return false;
    bool rows = each && own <= count && mn_is_row(mn_decode_result(f), f->shape, own);
    for (int i = 0; rows && i < mn_decode_inputs_of(f->kind); i++) {
        rows = !f->at[i].data || mn_is_row(&f->at[i], f->shape, own) ||
               is_single(&f->at[i], f->shape) || (own == count && serves(&f->at[i], f->shape) > 0);
    }
    return rows;
}

typedef struct fusion {
    mn_defer *all;
    mn_decode_gemms *launch;
    uint64_t multiplied, ended;    // works that are products of the stage, and epilogues
} fusion;

/* The product that work i goes by, from what it reads; -1: none, -2: it cannot be an epilogue. */
static int product_of(const fusion *g, int i) {
    const mn_decode_op *f = &g->all->list[i].of.few;
    const mn_decode_gemms *launch = g->launch;
    int by_ending = -1, by_product = -1;
    for (int k = 0; k < mn_decode_inputs_of(f->kind); k++) {
        const void *from = f->at[k].data;
        const bool all_of_it = mn_is_row(&f->at[k], f->shape, mn_count4(f->shape)) ||
                               f->kind == MN_DECODE_CONV;
        const bool repeated = serves(&f->at[k], f->shape) > 0;
        for (int p = 0; from && p < launch->n; p++) {
            if (launch->of[p].c != from) continue;
            if (!all_of_it) return -2;
            if (by_product < 0 || p < by_product) by_product = p;
        }
        for (int e = 0; from && e < launch->n_epilogues; e++) {
            if (mn_decode_result(&launch->epilogue[e].work)->data != from) continue;
            const int product = launch->epilogue[e].product;
            if (!all_of_it && !repeated) return -2;
            if (by_ending >= 0 && by_ending != product) return -2;
            by_ending = product;
        }
    }
    return by_ending >= 0 ? by_ending : by_product;
}

/* Whether the launch has a convolution of that product, which is then the only epilogue. */
static bool convolves(const mn_decode_gemms *launch, int product) {
    for (int i = 0; i < launch->n_epilogues; i++) {
        const mn_decode_epilogue_op *e = &launch->epilogue[i];
        if (e->product == product && e->work.kind == MN_DECODE_CONV) return true;
    }
    return false;
}

static bool has_epilogue(const mn_decode_gemms *launch, int product) {
    bool any = false;
    for (int i = 0; i < launch->n_epilogues; i++) any |= launch->epilogue[i].product == product;
    return any;
}

static bool add(fusion *g, int i, int product) {
    mn_decode_gemms *launch = g->launch;
    const mn_deferred *d = &g->all->list[i];
    if (launch->n_epilogues == MN_DECODE_EPILOGUES || product < 0) return false;
    if (!goes_by(&d->of.few, launch->of[product].N)) return false;
    const bool first = d->of.few.kind != MN_DECODE_CONV || !has_epilogue(launch, product);
    if (convolves(launch, product) || !first) {
        return false;
    }
    launch->epilogue[launch->n_epilogues++] = (mn_decode_epilogue_op){ product, d->of.few };
    g->ended |= mn_bit(i);
    return true;
}

/* Whether work k, which waits for nothing, only reads what was there before the stage. */
static bool is_free(const fusion *g, int k) {
    const mn_deferred *d = &g->all->list[k];
    return d->kind == MN_DEFERRED_SMALL && d->of.few.kind == MN_DECODE_UNARY &&
           (d->after & ~g->all->done) == 0;
}

/* Work i as an epilogue, with what it needs beside; false, and nothing changed, where it is
 * none. */
static bool fuse(fusion *g, int i) {
    const mn_deferred *d = &g->all->list[i];
    const uint64_t of_stage = g->multiplied | g->ended, known = g->all->done | of_stage;
    const uint64_t beside = d->after & ~known;
    if (d->kind != MN_DEFERRED_SMALL || !(d->after & of_stage)) return false;
    for (int k = 0; k < i; k++) {
        const uint64_t one = mn_bit(k);
        if ((one & beside) && !is_free(g, k)) return false;
        if ((one & d->after & (of_stage | beside)) && !mn_only_reads(d, &g->all->list[k])) {
            return false;
        }
    }
    const fusion before = *g;
    const int n = g->launch->n_epilogues, product = product_of(g, i);
    bool fits = product >= 0;
    for (int k = 0; k < i && fits; k++) {
        if (mn_bit(k) & beside) fits = add(g, k, product);
    }
    if (fits && product_of(g, i) == product && add(g, i, product)) return true;
    *g = before;
    g->launch->n_epilogues = n;
    return false;
}

uint64_t mn_decode_fuse_epilogues(mn_defer *all, mn_decode_gemms *launch, const int *gemms,
                               uint64_t taken) {
    fusion g = { .all = all, .launch = launch };
    if (launch->M != 1) return 0;
    for (int p = 0; p < launch->n; p++) g.multiplied |= mn_bit(gemms[p]);
    for (int i = 0; i < all->n; i++) {
        if (!((all->done | taken | g.ended) & mn_bit(i))) fuse(&g, i);
    }
    return g.ended;
}

/* As if they were epilogues of columns that nobody multiplies. */
uint64_t mn_decode_fuse_map(mn_defer *all, mn_decode_gemms *launch, uint64_t small) {
    fusion g = { .all = all, .launch = launch };
    launch->n = 1;
    for (int i = 0; i < all->n; i++) {
        const mn_deferred *d = &all->list[i];
        if (!(small & mn_bit(i)) || d->kind != MN_DEFERRED_SMALL) continue;
        if (launch->n_epilogues == 0) launch->of[0].N = mn_count4(d->of.few.shape);
        if (d->after & g.ended) fuse(&g, i);
        else if (!(d->after & ~all->done) && d->of.few.kind != MN_DECODE_CONV) add(&g, i, 0);
    }
    return g.ended;
}

/* ---- rows of several sequences --------------------------------------------------------------- */

/* Whether small work f is a gate over the halves of rows of c, the product's. */
static bool is_gate(const mn_decode_op *f, const mn_gemm_problem *p) {
    const int64_t half = p->N / 2, item = (int64_t)mn_dtype_bytes(p->c_dtype);
    if (f->kind != MN_DECODE_UNARY || !f->at[1].data || p->N % 64 != 0) return false;
    bool fits = f->at[0].data == p->c && f->at[1].data == (char *)p->c + half * item;
    for (int i = 0; i < 3; i++) {
        fits = fits && f->at[i].dtype == MN_BF16 && p->c_dtype == MN_BF16 &&
               mn_is_row(&f->at[i], f->shape, half);
    }
    return fits && f->advance[0] == p->c_row * item && f->advance[1] == p->c_row * item &&
           f->advance[2] >= half * item && f->advance[2] % item == 0;
}

uint64_t mn_decode_fuse_gate(const mn_defer *all, mn_gemm_problem *p, int product) {
    for (int i = product + 1; i < all->n; i++) {
        const mn_deferred *d = &all->list[i];
        const bool next = d->kind == MN_DEFERRED_SMALL && (d->after & mn_bit(product)) &&
                          ((d->after & ~all->done) == 0) && !(all->done & mn_bit(i));
        if (!next || !mn_only_reads(d, &all->list[product]) || !is_gate(&d->of.few, p)) continue;
        p->gated = d->of.few.at[2].data;
        p->gated_row = d->of.few.advance[2] / (int64_t)mn_dtype_bytes(p->c_dtype);
        p->gate = d->of.few.f;
        return mn_bit(i);
    }
    return 0;
}
