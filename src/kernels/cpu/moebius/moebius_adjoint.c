/* moebius_adjoint.c - what a stretch of tokens does to the gradient of KLA's state: (om, mu) of its
 * end to those of its start (kernels/moebius_span.h), in one pass from its first token to its last.
 *
 * With s = n / n' and m = e / n' of a token (moebius_backward.c), c = prec k (v - k m), what
 * gradients behind the token become at the start is
 *
 *   delta <- a s delta + gamma a^2 s c      gamma <- gamma a^2 s^2      alpha <- alpha a s
 *   beta += alpha dy q                      eps += gamma dyvar q^2 + delta dy q
 *
 * so that no state is kept and nothing is done twice. Where a stretch forgets, alpha, gamma and
 * delta run to zero and the rest of it does not count: what has fallen below 2^-100 of where it
 * began is no number of float32 beside the others, and a tile ends there. */
#include <string.h>

#include "kernels/cpu/moebius/moebius_span_tiles.h"

/* Cells of a tile, [K][MN_VW] each, and the block's cotangents, [BLOCK][MN_VW]. */
typedef struct passage {
    float *x[MN_ADJOINT_ENTRIES];
    float *gy, *gw;
    bool good, ended;
} passage;

static int64_t passage_floats(int64_t K) {
    return (MN_ADJOINT_ENTRIES * K + 2 * MOEBIUS_BLOCK) * MN_VW;
}

/* Lanes beyond the last channel are 0, so that they are forgotten from the start. */
static float *open_passage(passage *to, float *memory, int64_t K, int lanes) {
    const vf one = vf_keep_first(vf_set1(1.0f), lanes);
    for (int i = 0; i < MN_ADJOINT_ENTRIES; i++, memory += K * MN_VW) {
        const bool factor = i == MN_ADJOINT_GAMMA || i == MN_ADJOINT_ALPHA;
        to->x[i] = memory;
        for (int64_t s = 0; s < K; s++) vf_store(memory + s * MN_VW, factor ? one : vf_zero());
    }
    to->gy = memory;
    to->gw = memory + MOEBIUS_BLOCK * MN_VW;
    to->good = true;
    to->ended = false;
    return memory + 2 * MOEBIUS_BLOCK * MN_VW;
}

/* ---- a block --------------------------------------------------------------------------------- */

/* Slot s of a block; returns lanes whose precision fell below the floor. */
MN_ALWAYS_INLINE vm pass_slot(passage *to, moebius_tile *tile, int64_t s, bool var) {
    const int64_t at = s * MN_VW, K = tile->K, count = tile->rows->count;
    const bool prior = tile->args->from_prior;
    const vf one = vf_set1(1.0f);
    const vf a = vf_load(tile->a + at), a2 = vf_load(tile->a2 + at), p = vf_load(tile->p + at);
    const vf by_mean = prior ? a : one, by_var = prior ? a2 : one;
    vf n = vf_load(tile->n + at), d = vf_load(tile->d + at), e = vf_load(tile->e + at);
    vf gamma = vf_load(to->x[MN_ADJOINT_GAMMA] + at), alpha = vf_load(to->x[MN_ADJOINT_ALPHA] + at);
    vf delta = vf_load(to->x[MN_ADJOINT_DELTA] + at), beta = vf_load(to->x[MN_ADJOINT_BETA] + at);
    vf eps = vf_load(to->x[MN_ADJOINT_EPS] + at);
    vm low = vf_lt(n, vf_mul(d, vf_set1(MOEBIUS_FLOOR)));
    moebius_renormalise(&n, &d, &e);
    for (int64_t t = 0; t < count;) {
        const int64_t end = mn_min(count, t + tile->period);
        for (; t < end; t++) {
            const vf k = vf_set1(tile->rows->k[t * K + s]), q = vf_set1(tile->rows->q[t * K + s]);
            const vf prec = vf_load(tile->prec + t * MN_VW), v = vf_load(tile->v + t * MN_VW);
            const vf before = n, pk = vf_mul(prec, k);
            d = vf_fma(p, n, vf_mul(a2, d));
            n = vf_fma(vf_mul(prec, vf_set1(tile->rows->k2[t * K + s])), d, n);
            e = vf_fma(vf_mul(vf_load(tile->pv + t * MN_VW), k), d, vf_mul(a, e));
            low = vm_or(low, vf_lt(n, vf_mul(d, vf_set1(MOEBIUS_FLOOR))));
            const vf r = vf_div(one, n), keep = vf_mul(before, r), mean = vf_mul(e, r);
            const vf kept = vf_mul(a, keep), kept2 = vf_mul(vf_mul(gamma, a2), keep);
            delta = vf_fma(kept, delta, vf_mul(kept2, vf_mul(pk, vf_fnma(k, mean, v))));
            gamma = vf_mul(kept2, keep);
            alpha = vf_mul(alpha, kept);
            const vf mu = vf_mul(vf_mul(by_mean, q), vf_load(to->gy + t * MN_VW));
            beta = vf_fma(alpha, mu, beta);
            eps = vf_fma(delta, mu, eps);
            if (!var) continue;
            const vf om = vf_mul(vf_mul(by_var, vf_set1(tile->rows->q2[t * K + s])),
                                 vf_load(to->gw + t * MN_VW));
            eps = vf_fma(gamma, om, eps);
        }
        moebius_renormalise(&n, &d, &e);
    }
    vf_store(tile->n + at, n), vf_store(tile->d + at, d), vf_store(tile->e + at, e);
    vf_store(to->x[MN_ADJOINT_GAMMA] + at, gamma), vf_store(to->x[MN_ADJOINT_ALPHA] + at, alpha);
    vf_store(to->x[MN_ADJOINT_DELTA] + at, delta), vf_store(to->x[MN_ADJOINT_BETA] + at, beta);
    vf_store(to->x[MN_ADJOINT_EPS] + at, eps);
    return low;
}

/* alpha, gamma and delta of all cells have fallen below what counts. */
static bool is_forgotten(const passage *to, int64_t K) {
    const vf least = vf_set1(0x1p-100f);
    for (int64_t s = 0; s < K * MN_VW; s += MN_VW) {
        const vf alpha = vf_load(to->x[MN_ADJOINT_ALPHA] + s);
        const vf gamma = vf_load(to->x[MN_ADJOINT_GAMMA] + s);
        const vf delta = vf_load(to->x[MN_ADJOINT_DELTA] + s);
        const vf top = vf_max(vf_max(vf_abs(alpha), vf_abs(delta)), gamma);
        if (vm_any(vm_not(vf_lt(top, least)))) return false;
    }
    return true;
}

static void pass_block(passage *to, moebius_tile *tile) {
    const bool var = tile->args->cot.yvar.data != NULL;
    vm low = vm_first(0);
    if (tile->period == 0) {
        to->good = false;
        return;
    }
    for (int64_t s = 0; s < tile->K; s++) {
        low = vm_or(low, var ? pass_slot(to, tile, s, true) : pass_slot(to, tile, s, false));
    }
    if (vm_any(low)) to->good = false;
}

/* ---- a stretch ------------------------------------------------------------------------------- */

static void load_cotangents(const span_tiles *w, const passage *to, const mn_moebius_args *args,
                            int64_t t) {
    for (int64_t i = 0; i < w->rows.count; i++) {
        const float *gy = MN_ROW(float, args->cot.y, w->seq.b, t + i, 0);
        const float *gw = MN_ROW(float, args->cot.yvar, w->seq.b, t + i, 0);
        for (int64_t j = 0; j < w->n_tiles; j++) {
            const int64_t v0 = w->tiles[j].v0;
            lanes_load(to[j].gy + i * MN_VW, gy ? gy + v0 : NULL, 0, 1, w->tiles[j].lanes);
            lanes_load(to[j].gw + i * MN_VW, gw ? gw + v0 : NULL, 0, 1, w->tiles[j].lanes);
        }
    }
}

/* beta and eps by the cotangents of the final lam and eta, if there are any. */
static void add_finals(passage *to, moebius_tile *tile, int64_t n) {
    const mn_moebius_args *args = tile->args;
    const float *dlam = MN_ROW(float, args->cot.lam, n, 0, 0);
    const float *deta = MN_ROW(float, args->cot.eta, n, 0, 0);
    const int64_t at = tile->v0 * tile->K;
    if ((!dlam && !deta) || to->ended) return;
    /* the tile's dynamics are done with */
    lanes_load_cells(tile->a, dlam ? dlam + at : NULL, tile->K, tile->lanes, 0.0f);
    lanes_load_cells(tile->p, deta ? deta + at : NULL, tile->K, tile->lanes, 0.0f);
    MN_T(mn_moebius_tile_moments)(tile->n, tile->e, tile);
    for (int64_t s = 0; s < tile->K * MN_VW; s += MN_VW) {
        const vf lam = vf_load(tile->n + s), eta = vf_load(tile->e + s);
        const vf nl = vf_load(tile->a + s), ne = vf_load(tile->p + s), mu = vf_mul(ne, lam);
        const vf om = vf_neg(vf_mul(lam, vf_fma(nl, lam, vf_mul(ne, eta))));
        float *beta = to->x[MN_ADJOINT_BETA] + s, *eps = to->x[MN_ADJOINT_EPS] + s;
        vf_store(beta, vf_fma(vf_load(to->x[MN_ADJOINT_ALPHA] + s), mu, vf_load(beta)));
        vf_store(eps, vf_fma(vf_load(to->x[MN_ADJOINT_DELTA] + s), mu, vf_load(eps)));
        vf_store(eps, vf_fma(vf_load(to->x[MN_ADJOINT_GAMMA] + s), om, vf_load(eps)));
    }
}

/* alpha, gamma and delta of a stretch that forgot are 0. */
static void store_passage(const mn_moebius_span_args *args, passage *to, moebius_tile *tile,
                          int64_t n) {
    for (int i = 0; i < MN_ADJOINT_ENTRIES; i++) {
        const bool sum = i == MN_ADJOINT_BETA || i == MN_ADJOINT_EPS;
        for (int64_t s = 0; to->ended && !sum && s < tile->K; s++) {
            vf_store(to->x[i] + s * MN_VW, vf_zero());
        }
        to->good &= span_store(args, tile, to->x[i], MN_ADJOINT_ENTRIES, i, n);
    }
    span_mark(args, tile, to->good, n);
}

bool MN_T(mn_moebius_adjoint_plan)(const void *args, mn_plan *plan) {
    return span_plan(args, plan, passage_floats(((const mn_call *)args)->K));
}

void MN_T(mn_moebius_adjoint_run)(const void *args, int phase, int64_t item, void *shared,
                                  void *scratch) {
    (void)phase, (void)shared;
    const mn_moebius_span_args *p = args;
    span_tiles w;
    passage to[SPAN_TILES];
    float *memory = span_open(&w, p, item, scratch);
    for (int64_t j = 0; j < w.n_tiles; j++) {
        memory = open_passage(&to[j], memory, p->op.call.K, w.tiles[j].lanes);
        MN_T(mn_moebius_tile_start)(&w.tiles[j], w.n);
    }
    bool all_ended = false;
    for (int64_t t = 0; t < w.seq.length && !all_ended; t += MOEBIUS_BLOCK) {
        const int64_t count = mn_min(MOEBIUS_BLOCK, w.seq.length - t);
        MN_T(mn_moebius_load)(&w.rows, w.all, w.n_tiles, w.seq.b, w.seq.t0 + t, count, true);
        load_cotangents(&w, to, &p->op, w.seq.t0 + t);
        all_ended = true;
        for (int64_t j = 0; j < w.n_tiles; j++) {
            if (to[j].good && !to[j].ended) {
                pass_block(&to[j], &w.tiles[j]);
                to[j].ended = is_forgotten(&to[j], p->op.call.K);
            }
            all_ended &= to[j].ended || !to[j].good;
        }
    }
    for (int64_t j = 0; j < w.n_tiles; j++) {
        add_finals(&to[j], &w.tiles[j], w.n);
        store_passage(p, &to[j], &w.tiles[j], w.n);
    }
}
