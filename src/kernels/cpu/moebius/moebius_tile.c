/* moebius_tile.c - a tile of KLA channels: dynamics, state and a block of tokens. */
#include "kernels/cpu/moebius/moebius_tile.h"

#include "base/checked.h"
#include "kernels/cpu/simd/map.h"

static void load_dynamics(moebius_tile *tile) {
    const mn_moebius_args *args = tile->args;
    const int64_t at = tile->v0 * tile->K;
    lanes_load_cells(tile->a, (const float *)args->a.data + at, tile->K, tile->lanes, 1.0f);
    lanes_load_cells(tile->p, (const float *)args->p.data + at, tile->K, tile->lanes, 0.0f);
    vf reach = vf_zero();
    for (int64_t s = 0; s < tile->K * MN_VW; s += MN_VW) {
        const vf a = vf_load(tile->a + s), least = vf_set1(MOEBIUS_FLOOR);
        const vf a2 = vf_max(least, vf_mul(a, a)), p = vf_max(least, vf_load(tile->p + s));
        vf_store(tile->a2 + s, a2);
        vf_store(tile->p + s, p);
        reach = vf_max(reach, vf_add(a2, p));
    }
    tile->reach = vf_max_lanes(reach);
}

float *MN_T(mn_moebius_rows_open)(moebius_rows *rows, float *memory, int64_t K) {
    const int64_t size = MOEBIUS_BLOCK * K;
    *rows = (moebius_rows){ .K = K, .k = memory, .k2 = memory + size, .q = memory + 2 * size,
                            .q2 = memory + 3 * size };
    return memory + 4 * size;
}

float *MN_T(mn_moebius_tile_open)(moebius_tile *tile, const moebius_rows *rows, float *memory,
                                  const mn_moebius_args *args, int64_t v0) {
    const int64_t K = args->call.K, cells = K * MN_VW, block = MOEBIUS_BLOCK * MN_VW;
    *tile = (moebius_tile){ .args = args, .rows = rows, .K = K, .v0 = v0,
                            .lanes = vf_lanes(args->call.V - v0) };
    float **cell_arrays[] = { &tile->a, &tile->a2, &tile->p, &tile->n, &tile->d, &tile->e };
    float **lane_arrays[] = { &tile->v, &tile->prec, &tile->pv };
    for (size_t i = 0; i < MN_COUNTOF(cell_arrays); i++, memory += cells) *cell_arrays[i] = memory;
    for (size_t i = 0; i < MN_COUNTOF(lane_arrays); i++, memory += block) *lane_arrays[i] = memory;
    load_dynamics(tile);
    return memory;
}

void MN_T(mn_moebius_tile_start)(moebius_tile *tile, int64_t n) {
    const mn_moebius_args *args = tile->args;
    const float *lam0 = MN_ROW(float, args->lam0, n, 0, 0),
                *eta0 = MN_ROW(float, args->eta0, n, 0, 0);
    const int64_t at = tile->v0 * tile->K;
    lanes_load_cells(tile->n, lam0 ? lam0 + at : NULL, tile->K, tile->lanes, 1.0f);
    lanes_load_cells(tile->e, eta0 ? eta0 + at : NULL, tile->K, tile->lanes, 0.0f);
    for (int64_t s = 0; s < tile->K; s++) vf_store(tile->d + s * MN_VW, vf_set1(1.0f));
    tile->checked = false;
    tile->plain = true;
}

void MN_T(mn_moebius_tile_moments)(float *lam, float *eta, const moebius_tile *tile) {
    for (int64_t s = 0; s < tile->K * MN_VW; s += MN_VW) {
        const vf d = vf_load(tile->d + s);
        vf_store(lam + s, vf_div(vf_load(tile->n + s), d));
        vf_store(eta + s, vf_div(vf_load(tile->e + s), d));
    }
}

bool MN_T(mn_moebius_tile_in_range)(const moebius_tile *tile) {
    vm outside = vm_first(0);
    for (int64_t s = 0; s < tile->K * MN_VW; s += MN_VW) {
        const vf n = vf_load(tile->n + s);
        const vm inside = vm_and(vf_ge(n, vf_zero()), vf_le(n, vf_set1(MOEBIUS_TOP)));
        outside = vm_or(outside, vm_not(inside));
    }
    return !vm_any(outside);
}

/* pv, and how long the tile may go without renormalising: what accumulates in between stays below
 * MOEBIUS_GROWTH, which leaves means up to 2^80. The largest prec, k^2 and a^2 + p of the block
 * bound those of every cell. */
static void prepare(moebius_tile *tile) {
    vf least = vf_zero(), most = vf_zero();
    for (int64_t t = 0; t < tile->rows->count * MN_VW; t += MN_VW) {
        const vf prec = vf_load(tile->prec + t);
        vf_store(tile->pv + t, vf_mul(prec, vf_load(tile->v + t)));
        least = vf_min(prec, least);
        most = vf_max(most, prec);               // NaN stays
    }
    const vf top = vf_set1(vf_max_lanes(most)), top_k2 = vf_set1(tile->rows->top_k2);
    const float growth = vf_max_lanes(moebius_growth(top, top_k2, vf_set1(tile->reach)));
    if (!tile->checked) tile->checked = MN_T(mn_moebius_tile_in_range)(tile);
    tile->period = growth <= 0x1.6p2f ? 16 : growth <= 0x1p5f ? 8 : growth <= 0x1p10f ? 4 :
                   growth <= 0x1p20f ? 2 : growth <= MOEBIUS_GROWTH ? 1 : 0;
    if (!tile->checked || vm_any(vf_lt(least, vf_zero()))) tile->period = 0;
}

/* Tokens outside, tiles inside: neighbouring tiles share pages and memory streams. */
void MN_T(mn_moebius_load)(moebius_rows *rows, moebius_tile *const *tiles, int64_t n_tiles,
                           int64_t b, int64_t t, int64_t count, bool read) {
    const mn_moebius_args *args = tiles[0]->args;
    const int64_t K = rows->K;
    for (int64_t i = 0; i < count; i++) {
        const float *v = MN_ROW(float, args->v, b, t + i, 0);
        const float *prec = MN_ROW(float, args->prec, b, t + i, 0);
        for (int64_t j = 0; j < n_tiles; j++) {
            const moebius_tile *tile = tiles[j];
            lanes_load(tile->v + i * MN_VW, v + tile->v0, 0, 1, tile->lanes);
            lanes_load(tile->prec + i * MN_VW, prec + tile->v0, 0, 1, tile->lanes);
        }
    }
    const float *k = MN_ROW(float, args->k, b, t, 0), *q = MN_ROW(float, args->q, b, t, 0);
    lanes_copy_rows(rows->k, rows->k2, k, args->k.stride[1], count, K);
    if (read) lanes_copy_rows(rows->q, rows->q2, q, args->q.stride[1], count, K);
    rows->count = count;
    rows->top_k2 = MN_T(mn_map_max)(rows->k2, count * K);
    for (int64_t j = 0; j < n_tiles; j++) prepare(tiles[j]);
}

static void advance_slot_carefully(moebius_tile *tile, int64_t s) {
    const int64_t at = s * MN_VW;
    const vf a = vf_load(tile->a + at), a2 = vf_load(tile->a2 + at), p = vf_load(tile->p + at);
    vf n = vf_load(tile->n + at), d = vf_load(tile->d + at), e = vf_load(tile->e + at);
    for (int64_t t = 0; t < tile->rows->count; t++) {
        const vf prec = vf_load(tile->prec + t * MN_VW), pv = vf_load(tile->pv + t * MN_VW);
        const vf k = vf_set1(tile->rows->k[t * tile->K + s]);
        moebius_careful(&n, &d, &e, a, a2, p, prec, pv, k,
                        vf_set1(tile->rows->k2[t * tile->K + s]));
    }
    vf_store(tile->n + at, n), vf_store(tile->d + at, d), vf_store(tile->e + at, e);
}

/* Returns lanes whose lam fell below the floor. */
static vm advance_slot(moebius_tile *tile, int64_t s) {
    const int64_t at = s * MN_VW, K = tile->K;
    const vf a = vf_load(tile->a + at), a2 = vf_load(tile->a2 + at), p = vf_load(tile->p + at);
    vf n = vf_load(tile->n + at), d = vf_load(tile->d + at), e = vf_load(tile->e + at);
    vm low = vf_lt(n, vf_mul(d, vf_set1(MOEBIUS_FLOOR)));
    moebius_renormalise(&n, &d, &e);
    for (int64_t t = 0; t < tile->rows->count;) {
        const int64_t end = mn_min(tile->rows->count, t + tile->period);
        for (; t < end; t++) {
            const vf prec = vf_load(tile->prec + t * MN_VW), pv = vf_load(tile->pv + t * MN_VW);
            d = vf_fma(p, n, vf_mul(a2, d));
            n = vf_fma(vf_mul(prec, vf_set1(tile->rows->k2[t * K + s])), d, n);
            e = vf_fma(vf_mul(pv, vf_set1(tile->rows->k[t * K + s])), d, vf_mul(a, e));
            low = vm_or(low, vf_lt(n, vf_mul(d, vf_set1(MOEBIUS_FLOOR))));
        }
        moebius_renormalise(&n, &d, &e);
    }
    vf_store(tile->n + at, n);
    vf_store(tile->d + at, d);
    vf_store(tile->e + at, e);
    return low;
}

void MN_T(mn_moebius_tile_advance)(moebius_tile *tile) {
    vm low = vm_first(0);
    for (int64_t s = 0; s < tile->K; s++) {
        if (tile->period == 0) advance_slot_carefully(tile, s);
        else low = vm_or(low, advance_slot(tile, s));
    }
    if (tile->period == 0) tile->checked = tile->plain = false;
    if (vm_any(low)) tile->plain = false;
}
