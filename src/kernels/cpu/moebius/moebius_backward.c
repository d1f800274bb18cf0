/* moebius_backward.c - gradients of Kalman Linear Attention.
 *
 * In variance w = 1 / lam and mean m = eta / lam, one token is the textbook filter
 *
 *   P = a^2 W + p      s = 1 / (1 + prec k^2 P)      w = P s      m = (a M + prec v k P) s
 *
 * with W, M from the token before. Its adjoint, om of w and mu of m, needs w, m, s and no division:
 *
 *   om += dyvar q^2    mu += dy q                    dq = sum_m dy m + 2 q dyvar w
 *   dphi = -(om w + mu m) w                          (phi = prec k^2)
 *   dprec = sum_s k (dphi k + mu w v)                dv = prec sum_s mu w k
 *   dk = sum_m prec (2 dphi k + mu w v)              dP = om s^2 + mu s prec k (v - k m)
 *   da = sum_t mu s M + 2 a W dP    dp = sum_t dP    mu <- a s mu      om <- a^2 dP
 *
 * w, m and s come from the projective state (moebius_tile.h) as d/n, e/n and n/n', one reciprocal
 * for the three. States are kept at the start of each block and recomputed inside. A tile whose
 * precision falls below the floor, or whose inputs allow no projective form, goes back on lam and
 * eta instead, as in ref/moebius.c.
 *
 * An item is a run of sequences and a group of tiles, with a share of dk and dq, sums over
 * channels, and one of da and dp, sums over sequences; phase 1 adds the shares (shares.h). */
#include "kernels/cpu/moebius/moebius_tile.h"

#include "base/checked.h"
#include "kernels/cpu/chunk/shares.h"

#include <string.h>

enum { BLOCK = MOEBIUS_BLOCK };

/* What a tile carries backward. */
typedef struct adjoint {
    moebius_tile tile;
    float *first, *second;    // [K][MN_VW] om and mu, or those of lam and eta
    float *a, *a2, *p;        // [K][MN_VW] sums over tokens and sequences
    float *gy, *gw;           // [BLOCK][MN_VW] cotangents
    float *dv, *dprec;        // [BLOCK][MN_VW]; dv still without its factor prec
    float *kept;              // [blocks][2][K][MN_VW]: w and m, or lam and eta
    bool floored;             // on lam and eta
} adjoint;

/* One slot inside a block; entry 0 of the states belongs to the token before the block. */
typedef struct slot {
    float *w, *m, *s;         // [BLOCK + 1][MN_VW]; floored: lam, eta
    float *dk, *dq;           // [BLOCK][MN_VW]
} slot;

typedef struct work {
    moebius_rows rows;
    slot slot;
    float *dk, *dq;           // [K][BLOCK] sums over the group's channels
    adjoint *adjoints;
    moebius_tile **tiles;     // those of the adjoints
    int64_t n_tiles;
} work;

/* ---- plan ------------------------------------------------------------------------------------ */

static bool scratch_floats(int64_t *floats, const mn_call *call) {
    const int64_t blocks = mn_ceil_div(mn_longest_sequence(call), BLOCK), K = call->K;
    int64_t rows, kept;
    return moebius_rows_floats(&rows, K) && moebius_tile_floats(floats, K) &&
           mn_mul_i64(&kept, blocks, 2 * MN_VW) && mn_mul_i64(&kept, kept, K) &&
           mn_add_i64(floats, *floats, kept) &&
           mn_add_i64(floats, *floats, (5 * K + 4 * BLOCK) * MN_VW) &&
           mn_mul_i64(floats, *floats, shares_tiles(call)) && mn_add_i64(floats, *floats, rows) &&
           mn_add_i64(floats, *floats, 2 * K * BLOCK + (5 * BLOCK + 3) * MN_VW);
}

/* Shares of a run: da, then dp. */
bool MN_T(mn_moebius_backward_plan)(const void *args, mn_plan *plan) {
    const mn_call *c = args;
    int64_t scratch, shared, cells;
    size_t bytes, adjoints;
    const bool ok =
        scratch_floats(&scratch, c) && mn_mul_i64(&cells, c->V, c->K) &&
        mn_mul_i64(&cells, cells, 2) && shares_floats(&shared, c, cells) &&
        mn_mul_i64(&plan->items[0], shares_runs(c), shares_groups(c)) &&
        mn_mul_size(&plan->shared_bytes, (size_t)shared, sizeof(float)) &&
        mn_mul_size(&bytes, (size_t)scratch, sizeof(float)) &&
        mn_mul_size(&adjoints, (size_t)shares_tiles(c), sizeof(adjoint) + sizeof(void *)) &&
        mn_add_size(&plan->scratch_bytes, bytes, adjoints);
    plan->n_phases = 2;
    plan->items[1] = shares_row_items(c) + shares_cell_items(c->V * c->K);
    return ok;
}

/* ---- one slot of one block ------------------------------------------------------------------- */

/* w, m, s of the block from those before it */
static void recompute(const slot *out, const adjoint *d, int64_t s) {
    const moebius_tile *tile = &d->tile;
    const moebius_rows *rows = tile->rows;
    const int64_t at = s * MN_VW, K = tile->K, count = rows->count, period = tile->period;
    const float *restrict prec_at = tile->prec, *restrict pv_at = tile->pv;
    const float *restrict k_at = rows->k + s, *restrict k2_at = rows->k2 + s;
    float *restrict w_at = out->w, *restrict m_at = out->m, *restrict s_at = out->s;
    const vf a = vf_load(tile->a + at), a2 = vf_load(tile->a2 + at), p = vf_load(tile->p + at);
    vf n = vf_set1(1.0f), w = vf_load(w_at), e = vf_load(m_at);
    moebius_renormalise(&n, &w, &e);
    for (int64_t t = 0; t < count;) {
        const int64_t end = mn_min(count, t + period);
        for (; t < end; t++) {
            const vf before = n;
            w = vf_fma(p, n, vf_mul(a2, w));
            n = vf_fma(vf_mul(vf_load(prec_at + t * MN_VW), vf_set1(k2_at[t * K])), w, n);
            e = vf_fma(vf_mul(vf_load(pv_at + t * MN_VW), vf_set1(k_at[t * K])), w, vf_mul(a, e));
            const vf r = vf_div(vf_set1(1.0f), n);
            vf_store(w_at + (t + 1) * MN_VW, vf_mul(w, r));
            vf_store(m_at + (t + 1) * MN_VW, vf_mul(e, r));
            vf_store(s_at + (t + 1) * MN_VW, vf_mul(before, r));
        }
        moebius_renormalise(&n, &w, &e);
    }
}

MN_ALWAYS_INLINE void reverse(const slot *x, const adjoint *d, int64_t s, bool var, bool prior) {
    const moebius_tile *tile = &d->tile;
    const moebius_rows *rows = tile->rows;
    const int64_t at = s * MN_VW, K = tile->K;
    const float *restrict prec_at = tile->prec, *restrict v_at = tile->v;
    const float *restrict gy_at = d->gy, *restrict gw_at = d->gw;
    const float *restrict k_at = rows->k + s, *restrict q_at = rows->q + s;
    const float *restrict w_at = x->w, *restrict m_at = x->m, *restrict s_at = x->s;
    float *restrict dk_at = x->dk, *restrict dq_at = x->dq;
    float *restrict dv_at = d->dv, *restrict dprec_at = d->dprec;
    const vf a = vf_load(tile->a + at), a2 = vf_load(tile->a2 + at), p = vf_load(tile->p + at);
    vf om = vf_load(d->first + at), mu = vf_load(d->second + at);
    vf to_a = vf_load(d->a + at), to_a2 = vf_load(d->a2 + at), to_p = vf_load(d->p + at);
    for (int64_t t = rows->count - 1; t >= 0; t--) {
        const vf k = vf_set1(k_at[t * K]), q = vf_set1(q_at[t * K]);
        const vf w = vf_load(w_at + (t + 1) * MN_VW), m = vf_load(m_at + (t + 1) * MN_VW);
        const vf keep = vf_load(s_at + (t + 1) * MN_VW);
        const vf gy = vf_load(gy_at + t * MN_VW), to_mean = vf_mul(gy, q);
        vf dq;
        if (prior) {
            dq = vf_mul(gy, vf_mul(a, m));
            mu = vf_fma(a, to_mean, mu);
            to_a = vf_fma(to_mean, m, to_a);
        } else {
            dq = vf_mul(gy, m);
            mu = vf_add(to_mean, mu);
        }
        if (var) {
            const vf qg = vf_mul(q, vf_load(gw_at + t * MN_VW)), to_var = vf_mul(qg, q);
            const vf read = prior ? vf_fma(a2, w, p) : w;
            dq = vf_fma(vf_add(qg, qg), read, dq);
            om = prior ? vf_fma(a2, to_var, om) : vf_add(om, to_var);
            if (prior) to_a2 = vf_fma(to_var, w, to_a2), to_p = vf_add(to_p, to_var);
        }
        const vf v = vf_load(v_at + t * MN_VW), prec = vf_load(prec_at + t * MN_VW);
        const vf muw = vf_mul(mu, w), dphi = vf_neg(vf_fma(vf_mul(om, w), w, vf_mul(muw, m)));
        const vf sum = vf_fma(dphi, k, vf_mul(muw, v));
        vf_store(dprec_at + t * MN_VW, vf_fma(k, sum, vf_load(dprec_at + t * MN_VW)));
        vf_store(dv_at + t * MN_VW, vf_fma(muw, k, vf_load(dv_at + t * MN_VW)));
        vf_store(dk_at + t * MN_VW, vf_mul(prec, vf_fma(dphi, k, sum)));
        vf_store(dq_at + t * MN_VW, dq);

        const vf mus = vf_mul(mu, keep), surprise = vf_mul(vf_mul(prec, k), vf_fnma(k, m, v));
        const vf dP = vf_fma(mus, surprise, vf_mul(vf_mul(om, keep), keep));
        to_a = vf_fma(mus, vf_load(m_at + t * MN_VW), to_a);
        to_a2 = vf_fma(dP, vf_load(w_at + t * MN_VW), to_a2);
        to_p = vf_add(to_p, dP);
        mu = vf_mul(a, mus);
        om = vf_mul(a2, dP);
    }
    vf_store(d->first + at, om), vf_store(d->second + at, mu);
    vf_store(d->a + at, to_a), vf_store(d->a2 + at, to_a2), vf_store(d->p + at, to_p);
}

/* lam and eta of the block from those before it */
static void recompute_floored(const slot *out, const adjoint *d, int64_t s) {
    const moebius_tile *tile = &d->tile;
    const moebius_rows *rows = tile->rows;
    const int64_t at = s * MN_VW;
    const vf a = vf_load(tile->a + at), a2 = vf_load(tile->a2 + at), p = vf_load(tile->p + at);
    vf lam = vf_load(out->w), eta = vf_load(out->m);
    for (int64_t t = 0; t < rows->count; t++) {
        const vf den = vf_max(vf_set1(MOEBIUS_FLOOR), vf_fma(p, lam, a2));
        const vf g = vf_div(vf_set1(1.0f), den);
        lam = vf_fma(vf_load(tile->prec + t * MN_VW), vf_set1(rows->k2[t * tile->K + s]),
                     vf_mul(lam, g));
        eta = vf_fma(vf_load(tile->pv + t * MN_VW), vf_set1(rows->k[t * tile->K + s]),
                     vf_mul(vf_mul(a, g), eta));
        vf_store(out->w + (t + 1) * MN_VW, lam);
        vf_store(out->m + (t + 1) * MN_VW, eta);
    }
}

static void reverse_floored(const slot *x, const adjoint *d, int64_t s) {
    const moebius_tile *tile = &d->tile;
    const moebius_rows *rows = tile->rows;
    const int64_t at = s * MN_VW;
    const bool prior = tile->args->from_prior;
    const vf one = vf_set1(1.0f), least = vf_set1(MOEBIUS_FLOOR);
    const vf a = vf_load(tile->a + at), a2 = vf_load(tile->a2 + at), p = vf_load(tile->p + at);
    vf nl = vf_load(d->first + at), ne = vf_load(d->second + at);
    vf to_a = vf_load(d->a + at), to_a2 = vf_load(d->a2 + at), to_p = vf_load(d->p + at);
    for (int64_t i = (rows->count - 1) * MN_VW; i >= 0; i -= MN_VW) {
        const vf k = vf_set1(rows->k[i / MN_VW * tile->K + s]);
        const vf q = vf_set1(rows->q[i / MN_VW * tile->K + s]);
        const vf lam_now = vf_load(x->w + MN_VW + i), eta_now = vf_load(x->m + MN_VW + i);
        const vf var = vf_div(one, vf_max(least, lam_now)), mean = vf_mul(eta_now, var);
        const vf gy = vf_load(d->gy + i), qg = vf_mul(q, vf_load(d->gw + i));
        vf gm = vf_mul(gy, q), gv = vf_mul(qg, q), read_mean = mean, read_var = var;
        if (prior) {
            to_a = vf_fma(gm, mean, to_a);
            to_a2 = vf_fma(gv, var, to_a2);
            to_p = vf_add(to_p, gv);
            gm = vf_mul(a, gm), gv = vf_mul(a2, gv);
            read_mean = vf_mul(a, mean), read_var = vf_fma(a2, var, p);
        }
        ne = vf_fma(gm, var, ne);
        const vf fall = vf_mul(vf_fma(gm, mean, vf_mul(gv, var)), var);
        nl = vf_select(vf_ge(lam_now, least), vf_sub(nl, fall), nl);
        const vf v = vf_load(tile->v + i), sum = vf_fma(nl, k, vf_mul(ne, v));
        vf_store(x->dq + i, vf_fma(vf_add(qg, qg), read_var, vf_mul(gy, read_mean)));
        vf_store(x->dk + i, vf_mul(vf_load(tile->prec + i), vf_fma(nl, k, sum)));
        vf_store(d->dprec + i, vf_fma(k, sum, vf_load(d->dprec + i)));
        vf_store(d->dv + i, vf_fma(ne, k, vf_load(d->dv + i)));

        const vf lam = vf_load(x->w + i), eta = vf_load(x->m + i), den = vf_fma(p, lam, a2);
        const vm live = vf_ge(den, least);
        const vf g = vf_div(one, vf_max(least, den)), ge = vf_mul(g, eta), ga = vf_mul(g, a);
        const vf J = vf_mul(g, lam), pull = vf_mul(vf_mul(ne, a), ge);
        const vf dden = vf_select(live, vf_neg(vf_mul(g, vf_fma(nl, J, pull))), vf_zero());
        to_a = vf_fma(ne, ge, to_a);
        to_a2 = vf_add(to_a2, dden);
        to_p = vf_fma(dden, lam, to_p);
        const vf kept = vf_mul(g, vf_fnma(p, pull, vf_mul(vf_mul(nl, a2), g)));
        nl = vf_select(live, kept, vf_mul(nl, g));
        ne = vf_mul(ne, ga);
    }
    vf_store(d->first + at, nl), vf_store(d->second + at, ne);
    vf_store(d->a + at, to_a), vf_store(d->a2 + at, to_a2), vf_store(d->p + at, to_p);
}

/* ---- one block ------------------------------------------------------------------------------- */

/* All slots of a tile in the block number `block` of its sequence. */
static void tile_backward(const work *w, adjoint *d, int64_t block) {
    const int64_t K = d->tile.K, cells = K * MN_VW, count = w->rows.count;
    const bool var = d->tile.args->cot.yvar.data != NULL, prior = d->tile.args->from_prior;
    memset(d->dv, 0, (size_t)(BLOCK * MN_VW) * sizeof *d->dv);
    memset(d->dprec, 0, (size_t)(BLOCK * MN_VW) * sizeof *d->dprec);
    for (int64_t s = 0; s < K; s++) {
        const float *kept = d->kept + 2 * block * cells + s * MN_VW;
        vf_store(w->slot.w, vf_load(kept));
        vf_store(w->slot.m, vf_load(kept + cells));
        if (d->floored) {
            recompute_floored(&w->slot, d, s);
            reverse_floored(&w->slot, d, s);
        } else {
            recompute(&w->slot, d, s);
            if (prior) reverse(&w->slot, d, s, true, true);
            else if (var) reverse(&w->slot, d, s, true, false);
            else reverse(&w->slot, d, s, false, false);
        }
        lanes_sum(w->dk + s * BLOCK, w->slot.dk, count, true);
        lanes_sum(w->dq + s * BLOCK, w->slot.dq, count, true);
    }
    for (int64_t i = 0; i < count * MN_VW; i += MN_VW) {
        vf_store(d->dv + i, vf_mul(vf_load(d->tile.prec + i), vf_load(d->dv + i)));
    }
}

/* Cotangents in, or gradients out, token by token over neighbouring tiles. */
static void load_cotangents(const work *w, const mn_moebius_args *args, int64_t b, int64_t t) {
    for (int64_t i = 0; i < w->rows.count; i++) {
        const float *gy = MN_ROW(float, args->cot.y, b, t + i, 0);
        const float *gw = MN_ROW(float, args->cot.yvar, b, t + i, 0);
        for (int64_t j = 0; j < w->n_tiles; j++) {
            const adjoint *d = &w->adjoints[j];
            lanes_load(d->gy + i * MN_VW, gy ? gy + d->tile.v0 : NULL, 0, 1, d->tile.lanes);
            lanes_load(d->gw + i * MN_VW, gw ? gw + d->tile.v0 : NULL, 0, 1, d->tile.lanes);
        }
    }
}

static void store_gradients(const work *w, const mn_moebius_args *args, int64_t b, int64_t t) {
    for (int64_t i = 0; i < w->rows.count; i++) {
        float *dv = MN_ROW_OUT(float, args->grad.v, b, t + i, 0);
        float *dprec = MN_ROW_OUT(float, args->grad.prec, b, t + i, 0);
        for (int64_t j = 0; j < w->n_tiles; j++) {
            const adjoint *d = &w->adjoints[j];
            lanes_store(dv ? dv + d->tile.v0 : NULL, 0, d->dv + i * MN_VW, 1, d->tile.lanes);
            lanes_store(dprec ? dprec + d->tile.v0 : NULL, 0, d->dprec + i * MN_VW, 1,
                        d->tile.lanes);
        }
    }
}

/* ---- one sequence ---------------------------------------------------------------------------- */

/* Keeps the state before a block: w and m, or lam and eta. */
static void keep_state(adjoint *d, int64_t block) {
    const int64_t cells = d->tile.K * MN_VW;
    float *kept = d->kept + 2 * block * cells;
    for (int64_t s = 0; s < cells; s += MN_VW) {
        const vf n = vf_load(d->tile.n + s), e = vf_load(d->tile.e + s), c = vf_load(d->tile.d + s);
        const vf by = d->floored ? c : n;
        vf_store(kept + s, vf_div(d->floored ? n : c, by));
        vf_store(kept + cells + s, vf_div(e, by));
    }
}

/* States at the start of all blocks, and the last one. A tile that turns out to need its floors is
 * run again on lam and eta. */
static void run_forward(work *w, const mn_sequence *seq, int64_t n, bool again) {
    for (int64_t j = 0; j < w->n_tiles; j++) {
        MN_T(mn_moebius_tile_start)(&w->adjoints[j].tile, n);
        if (!again) w->adjoints[j].floored = seq->length == 0;
    }
    for (int64_t t = 0; t < seq->length; t += BLOCK) {
        const int64_t count = mn_min(BLOCK, seq->length - t);
        MN_T(mn_moebius_load)(&w->rows, w->tiles, w->n_tiles, seq->b, seq->t0 + t, count, false);
        for (int64_t j = 0; j < w->n_tiles; j++) {
            adjoint *d = &w->adjoints[j];
            if (again && d->floored) d->tile.period = 0;
            keep_state(d, t / BLOCK);
            MN_T(mn_moebius_tile_advance)(&d->tile);
        }
    }
    bool some = false;
    for (int64_t j = 0; j < w->n_tiles && !again; j++) {
        adjoint *d = &w->adjoints[j];
        if (!d->tile.plain) d->floored = some = true;
    }
    if (some) run_forward(w, seq, n, true);
}

/* Adjoints of the last state from the cotangents of lam and eta. */
static void start_adjoint(adjoint *d, int64_t n) {
    const moebius_tile *tile = &d->tile;
    const mn_moebius_args *args = tile->args;
    const float *dlam = MN_ROW(float, args->cot.lam, n, 0, 0);
    const float *deta = MN_ROW(float, args->cot.eta, n, 0, 0);
    const int64_t at = tile->v0 * tile->K;
    lanes_load_cells(d->first, dlam ? dlam + at : NULL, tile->K, tile->lanes, 0.0f);
    lanes_load_cells(d->second, deta ? deta + at : NULL, tile->K, tile->lanes, 0.0f);
    for (int64_t s = 0; s < tile->K * MN_VW && !d->floored; s += MN_VW) {
        const vf nl = vf_load(d->first + s), ne = vf_load(d->second + s), c = vf_load(tile->d + s);
        const vf lam = vf_div(vf_load(tile->n + s), c), eta = vf_div(vf_load(tile->e + s), c);
        vf_store(d->first + s, vf_neg(vf_mul(lam, vf_fma(nl, lam, vf_mul(ne, eta)))));
        vf_store(d->second + s, vf_mul(ne, lam));
    }
}

/* Gradients of lam0 and eta0. */
static void finish_adjoint(adjoint *d, int64_t n) {
    const moebius_tile *tile = &d->tile;
    const mn_moebius_args *args = tile->args;
    const int64_t at = tile->v0 * tile->K, cells = tile->K * MN_VW;
    for (int64_t s = 0; s < cells && !d->floored; s += MN_VW) {
        const vf w = vf_load(d->kept + s), m = vf_load(d->kept + cells + s);
        const vf om = vf_load(d->first + s), mu = vf_load(d->second + s);
        vf_store(d->first + s, vf_neg(vf_mul(w, vf_fma(om, w, vf_mul(mu, m)))));
        vf_store(d->second + s, vf_mul(mu, w));
    }
    float *lam0 = MN_ROW_OUT(float, args->grad.lam0, n, 0, 0);
    float *eta0 = MN_ROW_OUT(float, args->grad.eta0, n, 0, 0);
    lanes_store_cells(lam0 ? lam0 + at : NULL, d->first, tile->K, tile->lanes);
    lanes_store_cells(eta0 ? eta0 + at : NULL, d->second, tile->K, tile->lanes);
}

static void sequence_backward(work *w, const mn_moebius_args *args, int64_t n, float *share_dk,
                              float *share_dq) {
    const mn_sequence seq = mn_sequence_at(&args->call, n);
    const int64_t K = args->call.K, rows = K * BLOCK;
    run_forward(w, &seq, n, false);
    for (int64_t j = 0; j < w->n_tiles; j++) start_adjoint(&w->adjoints[j], n);
    for (int64_t block = mn_ceil_div(seq.length, BLOCK) - 1; block >= 0; block--) {
        const int64_t t = seq.t0 + block * BLOCK, first = (seq.b * args->call.T + t) * K;
        const int64_t count = mn_min(BLOCK, seq.length - block * BLOCK);
        MN_T(mn_moebius_load)(&w->rows, w->tiles, w->n_tiles, seq.b, t, count, true);
        load_cotangents(w, args, seq.b, t);
        memset(w->dk, 0, (size_t)rows * sizeof *w->dk);
        memset(w->dq, 0, (size_t)rows * sizeof *w->dq);
        for (int64_t j = 0; j < w->n_tiles; j++) tile_backward(w, &w->adjoints[j], block);
        store_gradients(w, args, seq.b, t);
        MN_T(mn_transpose)(share_dk + first, K, w->dk, BLOCK, K, count);
        MN_T(mn_transpose)(share_dq + first, K, w->dq, BLOCK, K, count);
    }
    for (int64_t j = 0; j < w->n_tiles; j++) finish_adjoint(&w->adjoints[j], n);
}

/* ---- the kernel ------------------------------------------------------------------------------ */

static float *open_adjoint(adjoint *d, const moebius_rows *rows, float *memory,
                           const mn_moebius_args *args, int64_t v0) {
    const int64_t cells = args->call.K * MN_VW, block = BLOCK * MN_VW;
    memory = MN_T(mn_moebius_tile_open)(&d->tile, rows, memory, args, v0);
    float **of_cells[] = { &d->first, &d->second, &d->a, &d->a2, &d->p };
    float **of_tokens[] = { &d->gy, &d->gw, &d->dv, &d->dprec };
    for (size_t i = 0; i < MN_COUNTOF(of_cells); i++, memory += cells) *of_cells[i] = memory;
    for (size_t i = 0; i < MN_COUNTOF(of_tokens); i++, memory += block) *of_tokens[i] = memory;
    d->kept = memory;
    memset(d->a, 0, (size_t)(3 * cells) * sizeof *d->a);    // a, a2, p lie in a row
    return memory + 2 * cells * mn_ceil_div(mn_longest_sequence(&args->call), BLOCK);
}

static void open_work(work *w, void *scratch, const mn_moebius_args *args, int64_t group) {
    const int64_t K = args->call.K, tiles = mn_ceil_div(args->call.V, MN_VW);
    const int64_t together = shares_tiles(&args->call);
    w->n_tiles = mn_min(together, tiles - group * together);
    float *memory = MN_T(mn_moebius_rows_open)(&w->rows, scratch, K);
    float **states[] = { &w->slot.w, &w->slot.m, &w->slot.s };
    for (size_t i = 0; i < MN_COUNTOF(states); i++, memory += (BLOCK + 1) * MN_VW) {
        *states[i] = memory;
    }
    float **sums[] = { &w->slot.dk, &w->slot.dq };
    for (size_t i = 0; i < MN_COUNTOF(sums); i++, memory += BLOCK * MN_VW) *sums[i] = memory;
    float **rows[] = { &w->dk, &w->dq };
    for (size_t i = 0; i < MN_COUNTOF(rows); i++, memory += K * BLOCK) *rows[i] = memory;
    int64_t floats;
    scratch_floats(&floats, &args->call);
    w->adjoints = (adjoint *)((float *)scratch + floats);
    w->tiles = (moebius_tile **)(w->adjoints + together);
    for (int64_t j = 0; j < w->n_tiles; j++) {
        const int64_t v0 = (group * together + j) * MN_VW;
        memory = open_adjoint(&w->adjoints[j], &w->rows, memory, args, v0);
        w->tiles[j] = &w->adjoints[j].tile;
    }
}

/* da = direct part + 2 a da2 and dp, both without gradient where their floor binds */
static void store_dynamics(adjoint *d, float *da, float *dp) {
    const moebius_tile *tile = &d->tile;
    const int64_t at = tile->v0 * tile->K;
    const vf least = vf_set1(MOEBIUS_FLOOR);
    for (int64_t s = 0; s < tile->K * MN_VW; s += MN_VW) {
        const vf a = vf_load(tile->a + s), to_a2 = vf_load(d->a2 + s);
        const vf through = vf_select(vf_gt(vf_load(tile->a2 + s), least), vf_add(a, a), vf_zero());
        const vm bound = vf_le(vf_load(tile->p + s), least);
        vf_store(d->a + s, vf_fma(through, to_a2, vf_load(d->a + s)));
        vf_store(d->p + s, vf_select(bound, vf_zero(), vf_load(d->p + s)));
    }
    lanes_store_cells(da + at, d->a, tile->K, tile->lanes);
    lanes_store_cells(dp + at, d->p, tile->K, tile->lanes);
}

static void add_all(const mn_moebius_args *args, int64_t item, float *shared) {
    const mn_call *call = &args->call;
    const int64_t cells = call->V * call->K, cell_item = item - shares_row_items(call);
    if (cell_item < 0) {
        shares_add_rows(call, shared, item, &args->grad.k, &args->grad.q);
        return;
    }
    shares_add_cells(call, shared, 2 * cells, cell_item, args->grad.a.data, 0, cells);
    shares_add_cells(call, shared, 2 * cells, cell_item, args->grad.p.data, cells, cells);
}

void MN_T(mn_moebius_backward_run)(const void *args, int phase, int64_t item, void *shared,
                                   void *scratch) {
    const mn_moebius_args *p = args;
    const mn_call *call = args;
    if (phase == 1) {
        add_all(p, item, shared);
        return;
    }
    const int64_t run = item / shares_groups(call), group = item % shares_groups(call);
    const int64_t cells = call->V * call->K;
    work w;
    open_work(&w, scratch, p, group);
    float *dk = shares_rows(call, shared, group, 0), *dq = shares_rows(call, shared, group, 1);
    int64_t n;
    const int64_t end = shares_run(&n, call, run);
    for (; n < end; n++) sequence_backward(&w, p, n, dk, dq);
    float *da = shares_cells(call, shared, 2 * cells, run), *dp = da + cells;
    for (int64_t j = 0; j < w.n_tiles; j++) store_dynamics(&w.adjoints[j], da, dp);
}
