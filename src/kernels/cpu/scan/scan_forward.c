/* scan_forward.c - Mamba-1's selective scan forward.
 *
 * An item is a few neighbouring tiles of channels of one sequence, which go through the tokens
 * block by block; inside a block a tile takes its slots two at a time, their state in registers. */
#include "kernels/cpu/scan/scan_tile.h"

enum { SCAN_TILES = 16 };

/* Adds C h of `slots` slots from s on to y and advances them over the block. */
MN_ALWAYS_INLINE void run_slots(scan_tile *tile, float *restrict y_at, int64_t s, int slots) {
    const int64_t K = tile->K, count = tile->rows->count;
    const float *restrict d_at = tile->d, *restrict du_at = tile->du;
    const float *restrict B_at = tile->rows->B + s, *restrict C_at = tile->rows->C + s;
    vf rate[2], h[2];
    MN_UNROLL
    for (int i = 0; i < slots; i++) {
        rate[i] = vf_load(tile->rate + (s + i) * MN_VW);
        h[i] = vf_load(tile->h + (s + i) * MN_VW);
    }
    for (int64_t t = 0; t < count; t++) {
        const vf d = vf_load(d_at + t * MN_VW), du = vf_load(du_at + t * MN_VW);
        vf y = vf_load(y_at + t * MN_VW);
        MN_UNROLL
        for (int i = 0; i < slots; i++) {
            const vf decay = scan_exp2(vf_mul(d, rate[i]));
            h[i] = vf_fma(decay, h[i], vf_mul(du, vf_set1(B_at[t * K + i])));
            y = vf_fma(vf_set1(C_at[t * K + i]), h[i], y);
        }
        vf_store(y_at + t * MN_VW, y);
    }
    MN_UNROLL
    for (int i = 0; i < slots; i++) vf_store(tile->h + (s + i) * MN_VW, h[i]);
}

static void run_block(scan_tile *tile, float *y) {
    for (int64_t i = 0; i < tile->rows->count * MN_VW; i += MN_VW) {
        vf_store(y + i, vf_mul(vf_load(tile->D), vf_load(tile->u + i)));
    }
    int64_t s = 0;
    for (; s + 2 <= tile->K; s += 2) run_slots(tile, y, s, 2);
    for (; s < tile->K; s++) run_slots(tile, y, s, 1);
}

/* Neighbouring tiles, and [BLOCK][MN_VW] results of each. */
typedef struct group {
    scan_rows rows;
    scan_tile tiles[SCAN_TILES], *all[SCAN_TILES];
    float *y[SCAN_TILES];
    int64_t n_tiles;
} group;

/* y silu(z), token by token */
static void store_block(const group *g, const mn_scan_args *args, int64_t b, int64_t t) {
    for (int64_t i = 0; i < g->rows.count; i++) {
        float *row = MN_ROW_OUT(float, args->y, b, t + i, 0);
        const float *z_row = MN_ROW(float, args->z, b, t + i, 0);
        for (int64_t j = 0; row && j < g->n_tiles; j++) {
            const scan_tile *tile = &g->tiles[j];
            vf y = vf_load(g->y[j] + i * MN_VW);
            if (z_row) {
                const vf z = vf_load_n(z_row + tile->v0, tile->lanes);
                y = vf_mul(y, vf_mul(z, vf_sigmoid(z)));
            }
            vf_store_n(row + tile->v0, y, tile->lanes);
        }
    }
}

/* Tiles that go together: as many as memory streams like and the second cache holds, if that leaves
 * enough items. No bit depends on it. */
static int64_t tiles_together(const mn_call *call) {
    const int64_t tiles = mn_ceil_div(call->V, MN_VW), n = mn_n_sequences(call);
    const int64_t spare = n < 16 ? n * tiles / 16 : tiles;
    return mn_max(1, mn_min(mn_min(spare, SCAN_TILES), mn_min(4096 / (2 * call->K), tiles)));
}

bool MN_T(mn_scan_forward_plan)(const void *args, mn_plan *plan) {
    const mn_call *c = args;
    const int64_t together = tiles_together(c);
    int64_t rows, floats;
    plan->n_phases = 1;
    return mn_mul_i64(&plan->items[0], mn_n_sequences(c),
                      mn_ceil_div(mn_ceil_div(c->V, MN_VW), together)) &&
           scan_rows_floats(&rows, c->K) && scan_tile_floats(&floats, c->K) &&
           mn_add_i64(&floats, floats, SCAN_BLOCK * MN_VW) &&
           mn_mul_i64(&floats, floats, together) && mn_add_i64(&floats, floats, rows) &&
           mn_mul_size(&plan->scratch_bytes, (size_t)floats, sizeof(float));
}

static void open_group(group *g, float *memory, const mn_scan_args *args, int64_t index) {
    const int64_t tiles = mn_ceil_div(args->call.V, MN_VW), together = tiles_together(&args->call);
    memory = MN_T(mn_scan_rows_open)(&g->rows, memory, args->call.K);
    g->n_tiles = mn_min(together, tiles - index * together);
    for (int64_t j = 0; j < g->n_tiles; j++) {
        const int64_t v0 = (index * together + j) * MN_VW;
        g->all[j] = &g->tiles[j];
        g->y[j] = MN_T(mn_scan_tile_open)(&g->tiles[j], &g->rows, memory, args, v0);
        memory = g->y[j] + SCAN_BLOCK * MN_VW;
    }
}

void MN_T(mn_scan_forward_run)(const void *args, int phase, int64_t item, void *shared,
                               void *scratch) {
    (void)phase, (void)shared;
    const mn_scan_args *p = args;
    const int64_t K = p->call.K;
    const int64_t n_groups = mn_ceil_div(mn_ceil_div(p->call.V, MN_VW), tiles_together(&p->call));
    const int64_t n = item / n_groups;
    const mn_sequence seq = mn_sequence_at(&p->call, n);
    group g;
    open_group(&g, scratch, p, item % n_groups);
    for (int64_t j = 0; j < g.n_tiles; j++) MN_T(mn_scan_tile_start)(&g.tiles[j], n);
    for (int64_t t = 0; t < seq.length; t += SCAN_BLOCK) {
        const int64_t count = mn_min(SCAN_BLOCK, seq.length - t);
        MN_T(mn_scan_load)(&g.rows, g.all, g.n_tiles, seq.b, seq.t0 + t, count);
        for (int64_t j = 0; j < g.n_tiles; j++) run_block(&g.tiles[j], g.y[j]);
        store_block(&g, p, seq.b, seq.t0 + t);
    }
    float *last = MN_ROW_OUT(float, p->h, n, 0, 0);
    for (int64_t j = 0; last && j < g.n_tiles; j++) {
        lanes_store_cells(last + g.tiles[j].v0 * K, g.tiles[j].h, K, g.tiles[j].lanes);
    }
}
