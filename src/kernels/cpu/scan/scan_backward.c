/* scan_backward.c - gradients of the selective scan; equations in ref/scan.c.
 *
 * States are kept at the start of each block of tokens and recomputed inside. An item is a run of
 * sequences and a group of tiles, with a share of dB and dC, sums over channels, and one of dA, dD
 * and the gradient of the bias, sums over sequences; phase 1 adds the shares (shares.h). */
#include "kernels/cpu/scan/scan_tile.h"

#include "kernels/cpu/chunk/shares.h"

#include <string.h>

enum { BLOCK = SCAN_BLOCK };

/* What a tile carries backward. */
typedef struct adjoint {
    scan_tile tile;
    float *g, *A, *toA;               // [K][MN_VW]: adjoint of h; A; its gradient
    float *toD, *tobias;              // [MN_VW]
    float *dy, *z, *gr; // [BLOCK][MN_VW]: cotangent, gate input, gradient before the gate
    float *read;                      // [BLOCK][MN_VW]: sum_s C h + D u
    float *gB, *Ax; // [BLOCK][MN_VW]: sums over slots of g B and of A g exp(d A) h
    float *du, *ddt, *dz;             // [BLOCK][MN_VW] results
    float *kept;                      // [blocks][K][MN_VW]
} adjoint;

typedef struct work {
    scan_rows rows;
    float *h, *decay, *dB, *dC;       // one slot: [BLOCK + 1], [BLOCK] x 3, of MN_VW
    float *sum_B, *sum_C;             // [K][BLOCK]
    adjoint *adjoints;
    scan_tile **tiles;
    int64_t n_tiles;
} work;

static bool scratch_floats(int64_t *floats, const mn_call *call) {
    const int64_t blocks = mn_ceil_div(mn_longest_sequence(call), BLOCK), K = call->K;
    int64_t rows, kept;
    return scan_rows_floats(&rows, K) && scan_tile_floats(floats, K) &&
           mn_mul_i64(&kept, blocks, MN_VW) && mn_mul_i64(&kept, kept, K) &&
           mn_add_i64(floats, *floats, kept) &&
           mn_add_i64(floats, *floats, (3 * K + 9 * BLOCK + 2) * MN_VW) &&
           mn_mul_i64(floats, *floats, shares_tiles(call)) && mn_add_i64(floats, *floats, rows) &&
           mn_add_i64(floats, *floats, 2 * K * BLOCK + (4 * BLOCK + 1) * MN_VW);
}

/* Shares of a run: dA (V,K), dD (V), gradient of the bias (V). */
static bool cells_of_run(int64_t *cells, const mn_call *call) {
    return mn_add_i64(cells, call->K, 2) && mn_mul_i64(cells, *cells, call->V);
}

bool MN_T(mn_scan_backward_plan)(const void *args, mn_plan *plan) {
    const mn_call *c = args;
    int64_t scratch, shared, cells;
    size_t bytes, adjoints;
    const bool ok =
        scratch_floats(&scratch, c) && cells_of_run(&cells, c) &&
        shares_floats(&shared, c, cells) &&
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

/* Decays and states of the block from the state before it, h[0]; the read-out if `read`. */
static vf recompute(const work *w, const adjoint *d, int64_t s, bool read) {
    const scan_tile *tile = &d->tile;
    const int64_t K = tile->K, count = w->rows.count;
    const float *restrict B_at = w->rows.B + s, *restrict C_at = w->rows.C + s;
    const float *restrict d_at = tile->d, *restrict du_at = tile->du;
    float *restrict h_at = w->h, *restrict decay_at = w->decay, *restrict read_at = d->read;
    const vf rate = vf_load(tile->rate + s * MN_VW);
    vf h = vf_load(h_at);
    for (int64_t t = 0; t < count; t++) {
        const vf decay = scan_exp2(vf_mul(vf_load(d_at + t * MN_VW), rate));
        h = vf_fma(decay, h, vf_mul(vf_load(du_at + t * MN_VW), vf_set1(B_at[t * K])));
        vf_store(decay_at + t * MN_VW, decay);
        vf_store(h_at + (t + 1) * MN_VW, h);
        if (!read) continue;
        vf_store(read_at + t * MN_VW,
                 vf_fma(vf_set1(C_at[t * K]), h, vf_load(read_at + t * MN_VW)));
    }
    return h;
}

static void reverse(const work *w, const adjoint *d, int64_t s) {
    const scan_tile *tile = &d->tile;
    const int64_t at = s * MN_VW, K = tile->K;
    const float *restrict B_at = w->rows.B + s, *restrict C_at = w->rows.C + s;
    const float *restrict d_at = tile->d, *restrict du_at = tile->du, *restrict gr_at = d->gr;
    const float *restrict h_at = w->h, *restrict decay_at = w->decay;
    float *restrict dB_at = w->dB, *restrict dC_at = w->dC;
    float *restrict gB_at = d->gB, *restrict Ax_at = d->Ax;
    const vf A = vf_load(d->A + at);
    vf g = vf_load(d->g + at), toA = vf_load(d->toA + at);
    for (int64_t t = w->rows.count - 1; t >= 0; t--) {
        const int64_t i = t * MN_VW;
        const vf gr = vf_load(gr_at + i);
        g = vf_fma(gr, vf_set1(C_at[t * K]), g);
        vf_store(dC_at + i, vf_mul(gr, vf_load(h_at + i + MN_VW)));
        vf_store(dB_at + i, vf_mul(g, vf_load(du_at + i)));
        vf_store(gB_at + i, vf_fma(g, vf_set1(B_at[t * K]), vf_load(gB_at + i)));
        g = vf_mul(g, vf_load(decay_at + i));
        const vf x = vf_mul(g, vf_load(h_at + i));
        toA = vf_fma(vf_load(d_at + i), x, toA);
        vf_store(Ax_at + i, vf_fma(A, x, vf_load(Ax_at + i)));
    }
    vf_store(d->g + at, g);
    vf_store(d->toA + at, toA);
}

/* ---- one block ------------------------------------------------------------------------------- */

/* gr from dy and z; the sums over slots start at zero, the read-out at D u. */
static void open_block(const work *w, adjoint *d) {
    const bool gated = d->tile.args->z.data != NULL;
    for (int64_t i = 0; i < w->rows.count * MN_VW; i += MN_VW) {
        const vf dy = vf_load(d->dy + i), z = vf_load(d->z + i);
        vf_store(d->gr + i, gated ? vf_mul(dy, vf_mul(z, vf_sigmoid(z))) : dy);
        vf_store(d->read + i, vf_mul(vf_load(d->tile.D), vf_load(d->tile.u + i)));
        vf_store(d->gB + i, vf_zero());
        vf_store(d->Ax + i, vf_zero());
    }
}

static void close_block(const work *w, adjoint *d) {
    const mn_scan_args *args = d->tile.args;
    const vf D = vf_load(d->tile.D), one = vf_set1(1.0f);
    vf toD = vf_load(d->toD), tobias = vf_load(d->tobias);
    for (int64_t i = (w->rows.count - 1) * MN_VW; i >= 0; i -= MN_VW) {
        const vf gr = vf_load(d->gr + i), u = vf_load(d->tile.u + i), gB = vf_load(d->gB + i);
        vf ddt = vf_fma(u, gB, vf_load(d->Ax + i));
        if (args->softplus) ddt = vf_mul(ddt, vf_sigmoid(vf_load(d->tile.x + i)));
        vf_store(d->ddt + i, ddt);
        vf_store(d->du + i, vf_fma(gr, D, vf_mul(vf_load(d->tile.d + i), gB)));
        tobias = vf_add(tobias, ddt);
        toD = vf_fma(gr, u, toD);
        if (!args->grad.z.data) continue;
        const vf z = vf_load(d->z + i), gate = vf_sigmoid(z);
        const vf slope = vf_mul(gate, vf_fma(z, vf_sub(one, gate), one));
        vf_store(d->dz + i, vf_mul(vf_mul(vf_load(d->dy + i), slope), vf_load(d->read + i)));
    }
    vf_store(d->toD, toD);
    vf_store(d->tobias, tobias);
}

static void tile_backward(const work *w, adjoint *d, int64_t block) {
    const int64_t K = d->tile.K, count = w->rows.count;
    const bool read = d->tile.args->grad.z.data != NULL;
    open_block(w, d);
    for (int64_t s = 0; s < K; s++) {
        vf_store(w->h, vf_load(d->kept + (block * K + s) * MN_VW));
        if (read) recompute(w, d, s, true);
        else recompute(w, d, s, false);
        reverse(w, d, s);
        lanes_sum(w->sum_B + s * BLOCK, w->dB, count, true);
        lanes_sum(w->sum_C + s * BLOCK, w->dC, count, true);
    }
    close_block(w, d);
}

static void load_cotangents(const work *w, const mn_scan_args *args, int64_t b, int64_t t) {
    for (int64_t i = 0; i < w->rows.count; i++) {
        const float *dy = MN_ROW(float, args->cot.y, b, t + i, 0);
        const float *z = MN_ROW(float, args->z, b, t + i, 0);
        for (int64_t j = 0; j < w->n_tiles; j++) {
            const adjoint *d = &w->adjoints[j];
            lanes_load(d->dy + i * MN_VW, dy ? dy + d->tile.v0 : NULL, 0, 1, d->tile.lanes);
            lanes_load(d->z + i * MN_VW, z ? z + d->tile.v0 : NULL, 0, 1, d->tile.lanes);
        }
    }
}

static void store_gradients(const work *w, const mn_scan_args *args, int64_t b, int64_t t) {
    for (int64_t i = 0; i < w->rows.count; i++) {
        float *du = MN_ROW_OUT(float, args->grad.u, b, t + i, 0);
        float *ddt = MN_ROW_OUT(float, args->grad.dt, b, t + i, 0);
        float *dz = MN_ROW_OUT(float, args->grad.z, b, t + i, 0);
        for (int64_t j = 0; j < w->n_tiles; j++) {
            const adjoint *d = &w->adjoints[j];
            const int64_t v0 = d->tile.v0;
            lanes_store(du ? du + v0 : NULL, 0, d->du + i * MN_VW, 1, d->tile.lanes);
            lanes_store(ddt ? ddt + v0 : NULL, 0, d->ddt + i * MN_VW, 1, d->tile.lanes);
            lanes_store(dz ? dz + v0 : NULL, 0, d->dz + i * MN_VW, 1, d->tile.lanes);
        }
    }
}

/* ---- one sequence ---------------------------------------------------------------------------- */

/* States at the start of all blocks. */
static void run_forward(work *w, const mn_sequence *seq, int64_t n) {
    for (int64_t j = 0; j < w->n_tiles; j++) MN_T(mn_scan_tile_start)(w->tiles[j], n);
    for (int64_t t = 0; t < seq->length; t += BLOCK) {
        const int64_t count = mn_min(BLOCK, seq->length - t);
        MN_T(mn_scan_load)(&w->rows, w->tiles, w->n_tiles, seq->b, seq->t0 + t, count);
        for (int64_t j = 0; j < w->n_tiles; j++) {
            adjoint *d = &w->adjoints[j];
            const int64_t cells = d->tile.K * MN_VW;
            memcpy(d->kept + t / BLOCK * cells, d->tile.h, (size_t)cells * sizeof *d->kept);
            for (int64_t s = 0; s < cells; s += MN_VW) {
                vf_store(w->h, vf_load(d->tile.h + s));
                vf_store(d->tile.h + s, recompute(w, d, s / MN_VW, false));
            }
        }
    }
}

static void sequence_backward(work *w, const mn_scan_args *args, int64_t n, float *share_B,
                              float *share_C) {
    const mn_sequence seq = mn_sequence_at(&args->call, n);
    const int64_t K = args->call.K;
    const float *last = MN_ROW(float, args->cot.h, n, 0, 0);
    float *first = MN_ROW_OUT(float, args->grad.h0, n, 0, 0);
    run_forward(w, &seq, n);
    for (int64_t j = 0; j < w->n_tiles; j++) {
        const scan_tile *tile = w->tiles[j];
        lanes_load_cells(w->adjoints[j].g, last ? last + tile->v0 * K : NULL, K, tile->lanes, 0.0f);
    }
    for (int64_t block = mn_ceil_div(seq.length, BLOCK) - 1; block >= 0; block--) {
        const int64_t t = seq.t0 + block * BLOCK, row = (seq.b * args->call.T + t) * K;
        const int64_t count = mn_min(BLOCK, seq.length - block * BLOCK);
        MN_T(mn_scan_load)(&w->rows, w->tiles, w->n_tiles, seq.b, t, count);
        load_cotangents(w, args, seq.b, t);
        memset(w->sum_B, 0, (size_t)(K * BLOCK) * sizeof *w->sum_B);
        memset(w->sum_C, 0, (size_t)(K * BLOCK) * sizeof *w->sum_C);
        for (int64_t j = 0; j < w->n_tiles; j++) tile_backward(w, &w->adjoints[j], block);
        store_gradients(w, args, seq.b, t);
        MN_T(mn_transpose)(share_B + row, K, w->sum_B, BLOCK, K, count);
        MN_T(mn_transpose)(share_C + row, K, w->sum_C, BLOCK, K, count);
    }
    for (int64_t j = 0; first && j < w->n_tiles; j++) {
        const scan_tile *tile = w->tiles[j];
        lanes_store_cells(first + tile->v0 * K, w->adjoints[j].g, K, tile->lanes);
    }
}

/* ---- the kernel ------------------------------------------------------------------------------ */

static float *open_adjoint(adjoint *d, const scan_rows *rows, float *memory,
                           const mn_scan_args *args, int64_t v0) {
    const int64_t K = args->call.K, cells = K * MN_VW, block = BLOCK * MN_VW;
    memory = MN_T(mn_scan_tile_open)(&d->tile, rows, memory, args, v0);
    float **of_cells[] = { &d->g, &d->A, &d->toA };
    float **of_tokens[] = {
        &d->dy, &d->z, &d->gr, &d->read, &d->gB, &d->Ax, &d->du, &d->ddt, &d->dz
    };
    for (size_t i = 0; i < MN_COUNTOF(of_cells); i++, memory += cells) *of_cells[i] = memory;
    for (size_t i = 0; i < MN_COUNTOF(of_tokens); i++, memory += block) *of_tokens[i] = memory;
    d->toD = memory;
    d->tobias = memory + MN_VW;
    d->kept = memory + 2 * MN_VW;
    lanes_load_cells(d->A, (const float *)args->A.data + v0 * K, K, d->tile.lanes, 0.0f);
    memset(d->toA, 0, (size_t)cells * sizeof *d->toA);
    memset(d->toD, 0, 2 * MN_VW * sizeof *d->toD);
    return d->kept + cells * mn_ceil_div(mn_longest_sequence(&args->call), BLOCK);
}

static void open_work(work *w, void *scratch, const mn_scan_args *args, int64_t group) {
    const int64_t K = args->call.K, tiles = mn_ceil_div(args->call.V, MN_VW);
    const int64_t together = shares_tiles(&args->call);
    w->n_tiles = mn_min(together, tiles - group * together);
    float *memory = MN_T(mn_scan_rows_open)(&w->rows, scratch, K);
    w->h = memory;
    memory += (BLOCK + 1) * MN_VW;
    float **of_slot[] = { &w->decay, &w->dB, &w->dC }, **sums[] = { &w->sum_B, &w->sum_C };
    for (size_t i = 0; i < MN_COUNTOF(of_slot); i++, memory += BLOCK * MN_VW) *of_slot[i] = memory;
    for (size_t i = 0; i < MN_COUNTOF(sums); i++, memory += K * BLOCK) *sums[i] = memory;
    int64_t floats;
    scratch_floats(&floats, &args->call);
    w->adjoints = (adjoint *)((float *)scratch + floats);
    w->tiles = (scan_tile **)(w->adjoints + together);
    for (int64_t j = 0; j < w->n_tiles; j++) {
        const int64_t v0 = (group * together + j) * MN_VW;
        memory = open_adjoint(&w->adjoints[j], &w->rows, memory, args, v0);
        w->tiles[j] = &w->adjoints[j].tile;
    }
}

static void add_all(const mn_scan_args *args, int64_t item, float *shared) {
    const mn_call *call = &args->call;
    const int64_t V = call->V, cells = V * call->K, cell_item = item - shares_row_items(call);
    if (cell_item < 0) {
        shares_add_rows(call, shared, item, &args->grad.Bm, &args->grad.Cm);
        return;
    }
    const int64_t all = cells + 2 * V;
    shares_add_cells(call, shared, all, cell_item, args->grad.A.data, 0, cells);
    shares_add_cells(call, shared, all, cell_item, args->grad.D.data, cells, V);
    shares_add_cells(call, shared, all, cell_item, args->grad.dt_bias.data, cells + V, V);
}

void MN_T(mn_scan_backward_run)(const void *args, int phase, int64_t item, void *shared,
                                void *scratch) {
    const mn_scan_args *p = args;
    const mn_call *call = args;
    if (phase == 1) {
        add_all(p, item, shared);
        return;
    }
    const int64_t run = item / shares_groups(call), group = item % shares_groups(call);
    const int64_t V = call->V, K = call->K;
    work w;
    open_work(&w, scratch, p, group);
    float *dB = shares_rows(call, shared, group, 0), *dC = shares_rows(call, shared, group, 1);
    int64_t n;
    const int64_t end = shares_run(&n, call, run);
    for (; n < end; n++) sequence_backward(&w, p, n, dB, dC);
    float *dA = shares_cells(call, shared, V * (K + 2), run), *dD = dA + V * K, *dbias = dD + V;
    for (int64_t j = 0; j < w.n_tiles; j++) {
        const adjoint *d = &w.adjoints[j];
        lanes_store_cells(dA + d->tile.v0 * K, d->toA, K, d->tile.lanes);
        lanes_store(dD + d->tile.v0, 0, d->toD, 1, d->tile.lanes);
        lanes_store(dbias + d->tile.v0, 0, d->tobias, 1, d->tile.lanes);
    }
}
