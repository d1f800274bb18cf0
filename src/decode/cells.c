/* cells.c - which works are a stage of the memory of Palimpsa, KLA or the Bayesian Layer. */
#include "decode/cells.h"

#include <string.h>

#include "base/util.h"
#include "ops/validate.h"

/* ---- what waits ------------------------------------------------------------------------------ */

static const mn_decode_op *small_at(const mn_defer *all, int i) {
    return i >= 0 ? &all->list[i].of.few : NULL;
}

/* All that must be done before work i and is not. */
static uint64_t before(const mn_defer *all, int i) {
    uint64_t bits = all->list[i].after & ~all->done;
    for (int k = i - 1; k >= 0; k--) {
        if (bits & mn_bit(k)) bits |= all->list[k].after & ~all->done;
    }
    return bits;
}

/* The small work of `among` that makes what lies at `data`; -1: none does. */
static int maker_of(const mn_defer *all, uint64_t among, const void *data) {
    for (int k = 0; k < all->n && data; k++) {
        const mn_deferred *d = &all->list[k];
        const bool small = among & mn_bit(k) && d->kind == MN_DEFERRED_SMALL;
        if (small && mn_decode_result(&d->of.few)->data == data) return k;
    }
    return -1;
}

static uint64_t bit_of(int i) {
    return i >= 0 ? mn_bit(i) : 0;
}

/* Whether works of a stage that depend on each other do so by reading what others made. */
static bool only_read(const mn_defer *all, uint64_t taken) {
    for (int i = 0; i < all->n; i++) {
        for (int k = 0; k < i && (taken & mn_bit(i)); k++) {
            if (!(taken & all->list[i].after & mn_bit(k))) continue;
            if (!mn_only_reads(&all->list[i], &all->list[k])) return false;
        }
    }
    return true;
}

/* ---- views ----------------------------------------------------------------------------------- */

static bool is_row(const mn_decode_op *f, int view, int64_t count, mn_dtype dtype) {
    const mn_view *at = &f->at[view];
    return at->data && at->dtype == dtype && mn_is_row(at, f->shape, count);
}

/* A number for each head, alike for its V elements. */
static bool is_of_heads(const mn_decode_op *f, int view, int64_t H, int64_t V) {
    const mn_view *at = &f->at[view];
    return at->data && at->dtype == MN_BF16 && f->shape[0] * f->shape[1] == 1 &&
           f->shape[2] == H && f->shape[3] == V && (V == 1 || at->stride[3] == 0) &&
           (H == 1 || at->stride[2] == 1);
}

static bool is_pair(const mn_decode_op *f, mn_pair_kind kind) {
    return f->kind == MN_DECODE_PAIR && f->f == (int)kind;
}

/* Rows of `width`, normalised; NULL: there is no work, and that is well. */
static bool is_norm(const mn_decode_op *f, int64_t rows, int64_t width) {
    if (!f) return true;
    return f->kind == MN_DECODE_L2_NORM && f->shape[2] == rows && f->shape[3] == width &&
           f->at[0].dtype == MN_BF16 && f->at[1].dtype == MN_BF16;
}

/* A token of one sequence; strides of `to` are filled in. */
static bool copy_args(void *to, const mn_defer *all, int i, mn_op_id op) {
    const mn_deferred *d = &all->list[i];
    if (d->kind != MN_DEFERRED_OP || d->of.op.id != op) return false;
    memcpy(to, d->of.op.args, mn_op_describe(op)->args_bytes);
    const mn_call *call = to;
    return call->dtype == MN_BF16 && call->T <= 1 && call->B <= 1 && !call->cu_seqlens &&
           mn_validate_sizes(op, to, false) == MN_OK;
}

/* The sum of what lies at `data` and another work's result, among what waits behind work i; the
 * other one is small work *other. -1: there is none. */
static int sum_of(const mn_defer *all, int i, const void *data, int *other) {
    for (int k = i + 1; k < all->n; k++) {
        const mn_deferred *d = &all->list[k];
        if (d->kind != MN_DEFERRED_SMALL || all->done & mn_bit(k)) continue;
        const mn_decode_op *f = &d->of.few;
        if (!is_pair(f, MN_PAIR_ADD) || !(d->after & mn_bit(i))) continue;
        const int own = f->at[0].data == data ? 0 : 1;
        if (f->at[own].data != data) continue;
        *other = maker_of(all, d->after & ~all->done & ~mn_bit(i), f->at[!own].data);
        const uint64_t missing = d->after & ~all->done & ~mn_bit(i) & ~bit_of(*other);
        if (*other >= 0 && missing == 0) return k;
    }
    return -1;
}

/* Whether nothing holds work i back but those of `taken`. */
static bool is_free(const mn_defer *all, int i, uint64_t taken) {
    return (all->list[i].after & ~all->done & ~taken) == 0;
}

/* ---- Palimpsa -------------------------------------------------------------------------------- */

static bool fits_palimpsa(const mn_importance_args *p) {
    const mn_call *c = &p->call;
    const bool in_place = p->mu.data && p->mu.data == p->mu0.data && p->imp.data &&
                          p->imp.data == p->imp0.data;
    const bool rows = c->H <= 1 || (p->q.stride[2] == c->K && p->k.stride[2] == c->K &&
                                    p->v.stride[2] == c->V && p->b.stride[2] == c->V &&
                                    p->g.stride[2] == 1 && p->o.stride[2] == c->V &&
                                    p->mu.stride[2] == c->K * c->V &&
                                    p->imp.stride[2] == c->K * c->V);
    return in_place && rows && p->o.data && !p->ovar.data && c->H > 0 && c->K > 0 &&
           c->K % 8 == 0 && c->K <= MN_DECODE_STATE_ROWS && c->V > 0 &&
           c->V % MN_DECODE_TILE_V == 0;
}

/* o plus a part of raw v, where that waits. */
static void find_skip(mn_palimpsa_works *to, const mn_defer *all, int i, const void *raw) {
    const int64_t H = to->args.call.H, V = to->args.call.V;
    int skip;
    const int sum = sum_of(all, i, to->args.o.data, &skip);
    if (sum < 0) return;
    const mn_decode_op *f = small_at(all, skip), *g = small_at(all, sum);
    bool fits = is_pair(f, MN_PAIR_MULTIPLY) && f->at[0].data == raw &&
                is_row(f, 0, H * V, MN_BF16) && is_of_heads(f, 1, H, V) &&
                is_row(f, 2, H * V, MN_BF16) && is_free(all, skip, 0);
    for (int k = 0; k < 3; k++) fits = fits && is_row(g, k, H * V, MN_BF16);
    const uint64_t more = bit_of(skip) | bit_of(sum);
    if (!fits || !only_read(all, to->taken | more)) return;
    to->skip = f;
    to->sum = g;
    to->taken |= more;
}

bool mn_palimpsa_find(mn_palimpsa_works *to, const mn_defer *all, int i) {
    *to = (mn_palimpsa_works){ 0 };
    if (!copy_args(&to->args, all, i, MN_OP_importance) || !fits_palimpsa(&to->args)) return false;
    const mn_importance_args *p = &to->args;
    const int64_t H = p->call.H, V = p->call.V;
    const uint64_t missing = before(all, i);
    const int q = maker_of(all, missing, p->q.data), k = maker_of(all, missing, p->k.data);
    const int gate = maker_of(all, missing, p->v.data), wide = maker_of(all, missing, p->ip.data);
    if (wide < 0) return false;
    to->wide = small_at(all, wide);
    const int exp = maker_of(all, missing, to->wide->at[0].data);
    if (exp < 0) return false;
    to->exp = small_at(all, exp);
    to->norm[0] = small_at(all, q), to->norm[1] = small_at(all, k), to->gate = small_at(all, gate);
    to->taken = bit_of(q) | bit_of(k) | bit_of(gate) | bit_of(wide) | bit_of(exp);
    const mn_dtype prior = to->exp->at[0].dtype;
    bool fits = missing == to->taken && is_norm(to->norm[0], H, p->call.K) &&
                is_norm(to->norm[1], H, p->call.K) && to->wide->kind == MN_DECODE_MOVE &&
                is_row(to->wide, 0, H, MN_BF16) && is_row(to->wide, 1, H, MN_F32) &&
                to->exp->kind == MN_DECODE_UNARY && to->exp->f == MN_UNARY_EXP &&
                !to->exp->at[1].data && is_row(to->exp, 0, H, prior) &&
                is_row(to->exp, 2, H, MN_BF16);
    if (to->gate) {
        fits = fits && is_pair(to->gate, MN_PAIR_MULTIPLY) && is_row(to->gate, 0, H * V, MN_BF16) &&
               is_of_heads(to->gate, 1, H, V) && is_row(to->gate, 2, H * V, MN_BF16);
    }
    to->taken |= mn_bit(i);
    if (!fits || !only_read(all, to->taken)) return false;
    find_skip(to, all, i, to->gate ? to->gate->at[0].data : p->v.data);
    return true;
}

/* ---- Kalman Linear Attention ----------------------------------------------------------------- */

static bool fits_kla(const mn_moebius_args *p) {
    const mn_call *c = &p->call;
    return p->lam.data && p->lam.data == p->lam0.data && p->eta.data &&
           p->eta.data == p->eta0.data && p->y.data && !p->yvar.data && c->K > 0 &&
           c->K <= MN_DECODE_KLA_LANES * MN_DECODE_KLA_SLOTS && c->V > 0 &&
           c->V % MN_DECODE_KLA_COLUMNS == 0;
}

/* The dynamics that waits, made of parameters in float32; false where it is another. Adds the bits
 * of what it takes. */
static bool find_dynamics(mn_kla_works *to, const mn_defer *all, uint64_t missing) {
    const int64_t count = to->args.call.V * to->args.call.K;
    int at = -1;
    for (int k = 0; k < all->n; k++) {
        const mn_deferred *d = &all->list[k];
        if (missing & mn_bit(k) && d->kind == MN_DEFERRED_OP &&
            d->of.op.id == MN_OP_kla_discretise) {
            at = k;
        }
    }
    if (at < 0 || !copy_args(&to->dynamics, all, at, MN_OP_kla_discretise)) return false;
    const mn_kla_discretise_args *p = &to->dynamics;
    const void *inputs[] = { p->delta.data, p->lambda_log.data, p->process_noise.data };
    to->taken |= mn_bit(at);
    for (int k = 0; k < MN_DECODE_KLA_DYNAMICS; k++) {
        const int move = maker_of(all, missing, inputs[k]);
        if (move < 0) return false;
        const mn_decode_op *f = to->rounded[k] = small_at(all, move);
        if (f->kind != MN_DECODE_MOVE || !is_row(f, 0, count, MN_F32) ||
            !is_row(f, 1, count, MN_BF16)) {
            return false;
        }
        to->taken |= mn_bit(move);
    }
    return p->abar.data == to->args.a.data && p->pbar.data == to->args.p.data &&
           p->call.V == to->args.call.V && p->call.K == to->args.call.K;
}

/* y plus a weighted row, by a gate, as far as they wait. */
static void find_behind(mn_kla_works *to, const mn_defer *all, int i) {
    const int64_t V = to->args.call.V;
    const void *from = to->args.y.data;
    uint64_t more = 0;
    int weighted;
    const int sum = sum_of(all, i, from, &weighted);
    if (sum >= 0) {
        const mn_decode_op *f = small_at(all, weighted), *g = small_at(all, sum);
        const bool one = !f->at[1].stride[3] && mn_count4(f->shape) == f->shape[3];
        bool fits = is_pair(f, MN_PAIR_MULTIPLY) && is_row(f, 0, V, MN_BF16) && f->at[1].data &&
                    (one || is_row(f, 1, V, f->at[1].dtype)) && is_row(f, 2, V, MN_BF16) &&
                    is_free(all, weighted, 0);
        for (int k = 0; k < 3; k++) fits = fits && is_row(g, k, V, MN_BF16);
        more = bit_of(weighted) | bit_of(sum);
        if (!fits || !only_read(all, to->taken | more)) return;
        to->weighted = f;
        to->sum = g;
        to->taken |= more;
        from = g->at[2].data;
    }
    for (int k = i + 1; k < all->n; k++) {
        const mn_decode_op *f = &all->list[k].of.few;
        if (all->list[k].kind != MN_DEFERRED_SMALL || all->done & mn_bit(k)) continue;
        if (!is_pair(f, MN_PAIR_MULTIPLY) || f->at[0].data != from) continue;
        bool fits = is_free(all, k, to->taken);
        for (int v = 0; v < 3; v++) fits = fits && is_row(f, v, V, MN_BF16);
        if (!fits || f->at[1].data == from || !only_read(all, to->taken | mn_bit(k))) return;
        to->gate = f;
        to->taken |= mn_bit(k);
        return;
    }
}

bool mn_kla_find(mn_kla_works *to, const mn_defer *all, int i, bool whole) {
    *to = (mn_kla_works){ 0 };
    if (!copy_args(&to->args, all, i, MN_OP_moebius) || !fits_kla(&to->args)) return false;
    const mn_moebius_args *p = &to->args;
    const uint64_t missing = before(all, i);
    if (!find_dynamics(to, all, missing)) return false;
    const int q = maker_of(all, missing, p->q.data), k = maker_of(all, missing, p->k.data);
    to->norm[0] = small_at(all, q), to->norm[1] = small_at(all, k);
    to->taken |= bit_of(q) | bit_of(k);
    if (!is_norm(to->norm[0], 1, p->call.K) || !is_norm(to->norm[1], 1, p->call.K)) return false;
    if (whole && missing != to->taken) return false;
    to->taken |= mn_bit(i);
    if (!only_read(all, to->taken)) return false;
    if (whole) find_behind(to, all, i);
    return true;
}

bool mn_kla_makes(const mn_defer *all, int i) {
    mn_kla_works works;
    const mn_deferred *d = &all->list[i];
    if (d->kind != MN_DEFERRED_OP || d->of.op.id != MN_OP_kla_discretise) return false;
    for (int k = i + 1; k < all->n; k++) {
        if (all->done & mn_bit(k) || !(all->list[k].after & mn_bit(i))) continue;
        if (mn_kla_find(&works, all, k, false)) return true;
    }
    return false;
}

/* ---- the Bayesian Layer ---------------------------------------------------------------------- */

static bool fits_bayes(const mn_bayes_args *p) {
    const mn_call *c = &p->call;
    const int64_t G = mn_max(c->G, 1), V = c->V / G;
    const bool in_place = p->M.data && p->M.data == p->M0.data && p->P.data &&
                          p->P.data == p->P0.data;
    const bool rows = c->H <= 1 || (p->q.stride[2] == c->K && p->k.stride[2] == c->K &&
                                    p->la.stride[2] == c->K && p->v.stride[2] == c->V &&
                                    p->l2.stride[2] == 1 && p->r2.stride[2] == G &&
                                    p->o.stride[2] == c->V);
    return in_place && rows && p->q.data && p->o.data && !p->gain.data && !p->gainvec.data &&
           !p->kvar.data && !p->qvar.data && c->K % 8 == 0 && c->K <= MN_DECODE_BAYES_WIDEST &&
           c->V % G == 0 && V % 8 == 0 && V <= MN_DECODE_BAYES_WIDEST &&
           mn_megakernel_takes_step(MN_DECODE_STEP_bayes, p);
}

bool mn_bayes_find(mn_bayes_works *to, const mn_defer *all, int i) {
    *to = (mn_bayes_works){ 0 };
    if (!copy_args(&to->args, all, i, MN_OP_bayes) || !fits_bayes(&to->args)) return false;
    const mn_bayes_args *p = &to->args;
    const int64_t H = p->call.H, K = p->call.K;
    const uint64_t missing = before(all, i);
    const int q = maker_of(all, missing, p->q.data), k = maker_of(all, missing, p->k.data);
    const int decay = maker_of(all, missing, p->la.data);
    const int prior = maker_of(all, missing, p->p0.data);
    if (decay < 0 || prior < 0) return false;
    to->norm[0] = small_at(all, q), to->norm[1] = small_at(all, k);
    to->decay = small_at(all, decay), to->prior = small_at(all, prior);
    to->taken = bit_of(q) | bit_of(k) | bit_of(decay) | bit_of(prior);
    const bool fits = missing == to->taken && is_norm(to->norm[0], H, K) &&
                      is_norm(to->norm[1], H, K) && to->decay->kind == MN_DECODE_MOVE &&
                      is_of_heads(to->decay, 0, H, K) && is_row(to->decay, 1, H * K, MN_BF16) &&
                      to->prior->kind == MN_DECODE_FILL && is_row(to->prior, 0, H, MN_BF16);
    to->taken |= mn_bit(i);
    return fits && only_read(all, to->taken);
}
