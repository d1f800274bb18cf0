/* moebius_forward.c - Kalman Linear Attention forward: state, means and variances.
 *
 * An item is a tile of channels of one sequence. Up to MOEBIUS_FEW channels, a sequence of at least
 * MOEBIUS_LONG tokens is cut into segments that run side by side: phase 0 finds what each segment
 * does to a state (moebius_map.h), phase 1 strings these maps together from the initial state,
 * phase 2 runs every segment from its own start. Which form serves depends on V and on the
 * sequence's own length, never on the other sequences or the threads. */
#include "kernels/cpu/moebius/moebius_map.h"
#include "kernels/cpu/moebius/moebius_tile.h"

#include "base/checked.h"

enum { MOEBIUS_FEW = 16, MOEBIUS_LONG = 2048, MOEBIUS_SEGMENT = 512, MOEBIUS_TILES = 16 };

/* ---- one block of tokens --------------------------------------------------------------------- */

/* Means and variances of a block of one tile, [BLOCK][MN_VW] each. */
typedef struct sums {
    float *y, *yvar;
} sums;

/* Whether lam of these slots may fall below the floor inside the block. With a^2 + p <= 2 a token
 * at most halves a lam up to 1 and leaves a larger one above 1/2: 0.01 / 2^32 is above 1e-12. */
static bool near_floor(const moebius_tile *tile, int64_t s, int slots) {
    vm near = vm_first(0);
    for (int64_t at = s * MN_VW; at < (s + slots) * MN_VW; at += MN_VW) {
        const vf n = vf_load(tile->n + at), d = vf_load(tile->d + at);
        near = vm_or(near, vm_not(vf_ge(n, vf_mul(d, vf_set1(0.01f)))));
    }
    return !(tile->reach <= 2.0f) || vm_any(near);
}

/* Adds `slots` slots from s on to y, and to yvar if `var`. Without `floored` no lam meets the
 * floor. Everything but the pointers is known when this is compiled; the state lives in registers.
 *  */
MN_ALWAYS_INLINE void run_slots(moebius_tile *tile, const sums *out, int64_t s, int slots, bool var,
                                bool prior, bool floored) {
    const int64_t K = tile->K, count = tile->rows->count, period = tile->period;
    const float *restrict prec_at = tile->prec, *restrict pv_at = tile->pv;
    const float *restrict k_at = tile->rows->k + s, *restrict k2_at = tile->rows->k2 + s;
    const float *restrict q_at = tile->rows->q + s, *restrict q2_at = tile->rows->q2 + s;
    float *restrict y_at = out->y, *restrict yvar_at = out->yvar;
    vf a[2], a2[2], p[2], n[2], d[2], e[2];
    MN_UNROLL
    for (int i = 0; i < slots; i++) {
        const int64_t at = (s + i) * MN_VW;
        a[i] = vf_load(tile->a + at), a2[i] = vf_load(tile->a2 + at), p[i] = vf_load(tile->p + at);
        n[i] = vf_load(tile->n + at), d[i] = vf_load(tile->d + at), e[i] = vf_load(tile->e + at);
        moebius_renormalise(&n[i], &d[i], &e[i]);
    }
    for (int64_t t = 0; t < count;) {
        const int64_t end = mn_min(count, t + period);
        for (; t < end; t++) {
            const vf prec = vf_load(prec_at + t * MN_VW), pv = vf_load(pv_at + t * MN_VW);
            vf y = vf_load(y_at + t * MN_VW), yvar = y;
            if (var) yvar = vf_load(yvar_at + t * MN_VW);
            MN_UNROLL
            for (int i = 0; i < slots; i++) {
                const int64_t at = t * K + i;
                d[i] = vf_fma(p[i], n[i], vf_mul(a2[i], d[i]));
                n[i] = vf_fma(vf_mul(prec, vf_set1(k2_at[at])), d[i], n[i]);
                e[i] = vf_fma(vf_mul(pv, vf_set1(k_at[at])), d[i], vf_mul(a[i], e[i]));
                /* mean = eta / max(lam, floor), all over d */
                vf base = n[i];
                if (floored) base = vf_max(vf_mul(d[i], vf_set1(MOEBIUS_FLOOR)), base);
                const vf r = vf_div(vf_set1(1.0f), base);
                vf mean = vf_mul(e[i], r);
                if (prior) mean = vf_mul(a[i], mean);
                y = vf_fma(vf_set1(q_at[at]), mean, y);
                if (!var) continue;
                vf variance = vf_mul(d[i], r);
                if (prior) variance = vf_fma(a2[i], variance, p[i]);
                yvar = vf_fma(vf_set1(q2_at[at]), variance, yvar);
            }
            vf_store(y_at + t * MN_VW, y);
            if (var) vf_store(yvar_at + t * MN_VW, yvar);
        }
        MN_UNROLL
        for (int i = 0; i < slots; i++) moebius_renormalise(&n[i], &d[i], &e[i]);
    }
    MN_UNROLL
    for (int i = 0; i < slots; i++) {
        const int64_t at = (s + i) * MN_VW;
        vf_store(tile->n + at, n[i]), vf_store(tile->d + at, d[i]), vf_store(tile->e + at, e[i]);
    }
}

/* One slot of a block that may hold cells of any kind; the same bits where run_slots would do. */
static void run_slot_carefully(moebius_tile *tile, const sums *out, int64_t s) {
    const int64_t at = s * MN_VW, K = tile->K;
    const moebius_rows *rows = tile->rows;
    const vf a = vf_load(tile->a + at), a2 = vf_load(tile->a2 + at), p = vf_load(tile->p + at);
    const bool prior = tile->args->from_prior;
    vf n = vf_load(tile->n + at), d = vf_load(tile->d + at), e = vf_load(tile->e + at);
    for (int64_t t = 0; t < rows->count; t++) {
        const vf prec = vf_load(tile->prec + t * MN_VW), pv = vf_load(tile->pv + t * MN_VW);
        const vf k = vf_set1(rows->k[t * K + s]), k2 = vf_set1(rows->k2[t * K + s]);
        moebius_careful(&n, &d, &e, a, a2, p, prec, pv, k, k2);
        const vf r = vf_div(vf_set1(1.0f), vf_max(vf_mul(d, vf_set1(MOEBIUS_FLOOR)), n));
        vf mean = vf_mul(e, r), variance = vf_mul(d, r);
        if (prior) mean = vf_mul(a, mean), variance = vf_fma(a2, variance, p);
        float *y = out->y + t * MN_VW, *yvar = out->yvar + t * MN_VW;
        vf_store(y, vf_fma(vf_set1(rows->q[t * K + s]), mean, vf_load(y)));
        vf_store(yvar, vf_fma(vf_set1(rows->q2[t * K + s]), variance, vf_load(yvar)));
    }
    vf_store(tile->n + at, n), vf_store(tile->d + at, d), vf_store(tile->e + at, e);
}

MN_ALWAYS_INLINE void run_block_as(moebius_tile *tile, const sums *out, bool var, bool prior) {
    for (int64_t s = 0; s < tile->K; s += 2) {
        if (s + 1 == tile->K) run_slots(tile, out, s, 1, var, prior, true);
        else if (near_floor(tile, s, 2)) run_slots(tile, out, s, 2, var, prior, true);
        else run_slots(tile, out, s, 2, var, prior, false);
    }
}

static void run_block(moebius_tile *tile, const sums *out) {
    const bool var = tile->args->yvar.data != NULL, prior = tile->args->from_prior;
    for (int64_t t = 0; t < tile->rows->count; t++) {
        vf_store(out->y + t * MN_VW, vf_zero());
        vf_store(out->yvar + t * MN_VW, vf_zero());
    }
    if (tile->period == 0) {
        for (int64_t s = 0; s < tile->K; s++) run_slot_carefully(tile, out, s);
        tile->checked = false;
    } else if (prior) {
        if (var) run_block_as(tile, out, true, true);
        else run_block_as(tile, out, false, true);
    } else {
        if (var) run_block_as(tile, out, true, false);
        else run_block_as(tile, out, false, false);
    }
}

/* Tiles side by side that go through the tokens together. */
typedef struct group {
    moebius_rows rows;
    moebius_tile tiles[MOEBIUS_TILES], *all[MOEBIUS_TILES];
    sums out[MOEBIUS_TILES];
    int64_t n_tiles;
} group;

static void store_block(const group *g, int64_t b, int64_t t) {
    const mn_moebius_args *args = g->tiles->args;
    for (int64_t i = 0; i < g->rows.count; i++) {
        float *y = MN_ROW_OUT(float, args->y, b, t + i, 0);
        float *yvar = MN_ROW_OUT(float, args->yvar, b, t + i, 0);
        for (int64_t j = 0; j < g->n_tiles; j++) {
            const int64_t v0 = g->tiles[j].v0;
            const int lanes = g->tiles[j].lanes;
            lanes_store(y ? y + v0 : NULL, 0, g->out[j].y + i * MN_VW, 1, lanes);
            lanes_store(yvar ? yvar + v0 : NULL, 0, g->out[j].yvar + i * MN_VW, 1, lanes);
        }
    }
}

/* Tokens [t0, t1) of batch row b, from the tiles' states. */
static void run_tokens(group *g, int64_t b, int64_t t0, int64_t t1) {
    for (int64_t t = t0; t < t1; t += MOEBIUS_BLOCK) {
        const int64_t count = mn_min(MOEBIUS_BLOCK, t1 - t);
        MN_T(mn_moebius_load)(&g->rows, g->all, g->n_tiles, b, t, count, true);
        for (int64_t j = 0; j < g->n_tiles; j++) run_block(&g->tiles[j], &g->out[j]);
        store_block(g, b, t);
    }
}

static void store_state(moebius_tile *tile, int64_t n) {
    const mn_moebius_args *args = tile->args;
    const int64_t at = tile->v0 * tile->K;
    float *lam = MN_ROW_OUT(float, args->lam, n, 0, 0);
    float *eta = MN_ROW_OUT(float, args->eta, n, 0, 0);
    MN_T(mn_moebius_tile_moments)(tile->n, tile->e, tile);
    lanes_store_cells(lam ? lam + at : NULL, tile->n, tile->K, tile->lanes);
    lanes_store_cells(eta ? eta + at : NULL, tile->e, tile->K, tile->lanes);
}

/* ---- segments -------------------------------------------------------------------------------- */

static int64_t segments_of(const mn_call *call, int64_t length) {
    const bool cut = call->V <= MOEBIUS_FEW && length >= MOEBIUS_LONG;
    return cut ? mn_ceil_div(length, MOEBIUS_SEGMENT) : 1;
}

/* One item of phases 0 and 2: a segment of a tile of a sequence. */
typedef struct part {
    int64_t n, segment, n_segments, t0, t1;
    mn_sequence seq;
    float *map, *start;    // in shared memory, NULL where sequences are whole
} part;

/* Floats of shared memory per segment: the map, whether it can be trusted, and the starting
 * state. */
static int64_t map_floats(const mn_call *call) {
    return (MOEBIUS_ENTRIES * call->K + 1) * MN_VW;
}

static int64_t segment_floats(const mn_call *call) {
    return map_floats(call) + 3 * call->K * MN_VW;
}

static part part_at(const mn_call *call, int64_t n, int64_t tile, int64_t segment, float *shared) {
    const mn_sequence seq = mn_sequence_at(call, n);
    const int64_t n_tiles = mn_ceil_div(call->V, MN_VW);
    const int64_t most = segments_of(call, mn_longest_sequence(call));
    part w = { .n = n, .segment = segment, .seq = seq };
    w.n_segments = segments_of(call, seq.length);
    w.t0 = w.n_segments > 1 ? segment * MOEBIUS_SEGMENT : 0;
    w.t1 = w.n_segments > 1 ? mn_min(seq.length, w.t0 + MOEBIUS_SEGMENT) : seq.length;
    if (most > 1) {
        w.map = shared + ((n * n_tiles + tile) * most + segment) * segment_floats(call);
        w.start = w.map + map_floats(call);
    }
    return w;
}

static void copy_cells(float *to, const float *from, int64_t count) {
    for (int64_t i = 0; i < count; i++) to[i] = from[i];
}

/* Phase 0. A map that met a block without a bound is marked: it is no good. */
static void find_map(group *g, const part *w) {
    moebius_tile *tile = g->tiles;
    const int64_t K = tile->K;
    float *good = w->map + MOEBIUS_ENTRIES * K * MN_VW;
    *good = 1.0f;
    tile->checked = true;                 // maps know nothing of the state
    MN_T(mn_moebius_identity)(w->map, K);
    for (int64_t t = w->t0; t < w->t1; t += MOEBIUS_BLOCK) {
        const int64_t count = mn_min(MOEBIUS_BLOCK, w->t1 - t);
        MN_T(mn_moebius_load)(&g->rows, g->all, 1, w->seq.b, w->seq.t0 + t, count, false);
        if (tile->period == 0) {
            *good = 0.0f;
            return;
        }
        MN_T(mn_moebius_extend)(w->map, tile);
    }
}

/* The tile's state becomes map (anchor), all n, d, e being [K][MN_VW]. */
static void apply_map(moebius_tile *tile, const float *map, const float *anchor) {
    const int64_t cells = tile->K * MN_VW;
    for (int64_t s = 0; s < cells; s += MN_VW) {
        const float *m = map + s * MOEBIUS_ENTRIES;
        const vf n = vf_load(anchor + s), d = vf_load(anchor + cells + s);
        const vf e = vf_load(anchor + 2 * cells + s);
#define ENTRY(name) vf_load(m + MOEBIUS_##name * MN_VW)
        vf to_n = vf_fma(ENTRY(A), n, vf_mul(ENTRY(B), d));
        vf to_d = vf_fma(ENTRY(C), n, vf_mul(ENTRY(D), d));
        vf to_e = vf_fma(ENTRY(E), e, vf_fma(ENTRY(X), n, vf_mul(ENTRY(Y), d)));
#undef ENTRY
        moebius_renormalise(&to_n, &to_d, &to_e);
        vf_store(tile->n + s, to_n), vf_store(tile->d + s, to_d), vf_store(tile->e + s, to_e);
    }
    tile->checked = false;
}

/* Takes the common factors out of the tile's state and keeps it. */
static void keep_state(float *to, moebius_tile *tile) {
    const int64_t cells = tile->K * MN_VW;
    for (int64_t s = 0; s < cells; s += MN_VW) {
        vf n = vf_load(tile->n + s), d = vf_load(tile->d + s), e = vf_load(tile->e + s);
        if (tile->checked) moebius_renormalise(&n, &d, &e);
        vf_store(to + s, n), vf_store(to + cells + s, d), vf_store(to + 2 * cells + s, e);
    }
}

static void take_state(moebius_tile *tile, const float *from) {
    const int64_t cells = tile->K * MN_VW;
    copy_cells(tile->n, from, cells);
    copy_cells(tile->d, from + cells, cells);
    copy_cells(tile->e, from + 2 * cells, cells);
    tile->checked = false;
}

/* Runs a segment for its last state only. */
static void step_over(group *g, const part *w) {
    for (int64_t t = w->t0; t < w->t1; t += MOEBIUS_BLOCK) {
        const int64_t count = mn_min(MOEBIUS_BLOCK, w->t1 - t);
        MN_T(mn_moebius_load)(&g->rows, g->all, 1, w->seq.b, w->seq.t0 + t, count, false);
        MN_T(mn_moebius_tile_advance)(g->tiles);
    }
}

/* Phase 1: starts of all segments. `prefix` is the map from the anchor, the last state that did not
 * come from a map, to the end of the segment. */
static void string_segments(group *g, int64_t n, int64_t tile_index, float *shared, float *prefix,
                            float *anchor) {
    moebius_tile *tile = g->tiles;
    const mn_call *call = &tile->args->call;
    const int64_t cells = 3 * tile->K * MN_VW;
    const int64_t n_segments = segments_of(call, mn_sequence_at(call, n).length);
    bool fresh = true;                               // prefix is the identity
    MN_T(mn_moebius_tile_start)(tile, n);
    keep_state(anchor, tile);
    for (int64_t i = 0; i < n_segments; i++) {
        const part w = part_at(call, n, tile_index, i, shared);
        copy_cells(w.start, tile->n, cells);         // n, d, e lie in a row
        if (i + 1 == n_segments) break;
        if (w.map[MOEBIUS_ENTRIES * tile->K * MN_VW] != 1.0f ||
            !MN_T(mn_moebius_tile_in_range)(tile)) {
            step_over(g, &w);
            keep_state(anchor, tile);
            fresh = true;
            continue;
        }
        if (fresh) copy_cells(prefix, w.map, MOEBIUS_ENTRIES * tile->K * MN_VW);
        else MN_T(mn_moebius_compose)(prefix, w.map, prefix, tile->K);
        fresh = false;
        apply_map(tile, prefix, anchor);
    }
}

/* ---- the kernel ------------------------------------------------------------------------------ */

/* Tiles that go together: as many as memory streams like and the second cache holds, if that leaves
 * enough items; one where sequences may be cut. No bit depends on it. */
static int64_t tiles_together(const mn_call *call) {
    const int64_t tiles = mn_ceil_div(call->V, MN_VW), cached = 4096 / (6 * call->K);
    if (segments_of(call, mn_longest_sequence(call)) > 1) return 1;
    const int64_t spare = mn_n_sequences(call) < 16 ? mn_n_sequences(call) * tiles / 16 : tiles;
    return mn_max(1, mn_min(mn_min(spare, MOEBIUS_TILES), mn_min(cached, tiles)));
}

/* Scratch: rows, tiles with two sums each; a map and a state more where sequences may be cut. */
bool MN_T(mn_moebius_forward_plan)(const void *args, mn_plan *plan) {
    const mn_call *c = args;
    const int64_t most = segments_of(c, mn_longest_sequence(c)), together = tiles_together(c);
    int64_t rows, floats, extra, shared;
    bool ok = mn_mul_i64(&plan->items[1], mn_n_sequences(c),
                         mn_ceil_div(mn_ceil_div(c->V, MN_VW), together)) &&
              moebius_rows_floats(&rows, c->K) && moebius_tile_floats(&floats, c->K) &&
              mn_mul_i64(&extra, (MOEBIUS_ENTRIES + 3) * MN_VW, most > 1 ? c->K : 0) &&
              mn_add_i64(&floats, floats, 2 * MOEBIUS_BLOCK * MN_VW + extra) &&
              mn_mul_i64(&floats, floats, together) && mn_add_i64(&floats, floats, rows) &&
              mn_mul_i64(&plan->items[0], plan->items[1], most) &&
              mn_mul_i64(&shared, plan->items[0], most > 1 ? segment_floats(c) : 0) &&
              mn_mul_size(&plan->shared_bytes, (size_t)shared, sizeof(float)) &&
              mn_mul_size(&plan->scratch_bytes, (size_t)floats, sizeof(float));
    plan->n_phases = most > 1 ? 3 : 1;
    plan->items[2] = plan->items[0];
    return ok;
}

/* Opens the tiles of group `index`; returns the scratch memory that is left. */
static float *open_group(group *g, float *memory, const mn_moebius_args *args, int64_t index) {
    const int64_t tiles = mn_ceil_div(args->call.V, MN_VW), together = tiles_together(&args->call);
    memory = MN_T(mn_moebius_rows_open)(&g->rows, memory, args->call.K);
    g->n_tiles = mn_min(together, tiles - index * together);
    for (int64_t j = 0; j < g->n_tiles; j++) {
        const int64_t v0 = (index * together + j) * MN_VW;
        g->all[j] = &g->tiles[j];
        memory = MN_T(mn_moebius_tile_open)(&g->tiles[j], &g->rows, memory, args, v0);
        g->out[j] = (sums){ memory, memory + MOEBIUS_BLOCK * MN_VW };
        memory += 2 * MOEBIUS_BLOCK * MN_VW;
    }
    return memory;
}

void MN_T(mn_moebius_forward_run)(const void *args, int phase, int64_t item, void *shared,
                                  void *scratch) {
    const mn_moebius_args *p = args;
    const mn_call *call = args;
    const int64_t n_groups = mn_ceil_div(mn_ceil_div(call->V, MN_VW), tiles_together(call));
    const int64_t most = segments_of(call, mn_longest_sequence(call));
    const int64_t segment = phase == 1 ? 0 : item % most;
    const int64_t of_group = phase == 1 ? item : item / most;
    const int64_t n = of_group / n_groups, index = of_group % n_groups;
    const part w = part_at(call, n, index, segment, shared);
    const bool prepares = most > 1 && phase < 2;
    if (segment >= w.n_segments || (prepares && w.n_segments == 1)) return;
    if (prepares && phase == 0 && segment + 1 == w.n_segments) return;    // its map is not needed

    group g;
    float *rest = open_group(&g, scratch, p, index);
    if (prepares) {
        if (phase == 0) find_map(&g, &w);
        else string_segments(&g, n, index, shared, rest, rest + MOEBIUS_ENTRIES * call->K * MN_VW);
        return;
    }
    for (int64_t j = 0; j < g.n_tiles; j++) {
        if (w.n_segments > 1) take_state(&g.tiles[j], w.start);
        else MN_T(mn_moebius_tile_start)(&g.tiles[j], n);
    }
    run_tokens(&g, w.seq.b, w.seq.t0 + w.t0, w.seq.t0 + w.t1);
    for (int64_t j = 0; j < g.n_tiles && segment + 1 == w.n_segments; j++) {
        store_state(&g.tiles[j], n);
    }
}
