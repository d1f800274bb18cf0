/* scan_tile.c - a tile of selective-scan channels: parameters, state and a block of tokens. */
#include "kernels/cpu/scan/scan_tile.h"

float *MN_T(mn_scan_rows_open)(scan_rows *rows, float *memory, int64_t K) {
    *rows = (scan_rows){ .K = K, .B = memory, .C = memory + SCAN_BLOCK * K };
    return memory + 2 * SCAN_BLOCK * K;
}

float *MN_T(mn_scan_tile_open)(scan_tile *tile, const scan_rows *rows, float *memory,
                               const mn_scan_args *args, int64_t v0) {
    const int64_t K = args->call.K, cells = K * MN_VW, block = SCAN_BLOCK * MN_VW;
    *tile = (scan_tile){ .args = args, .rows = rows, .K = K, .v0 = v0,
                         .lanes = vf_lanes(args->call.V - v0) };
    float **of_cells[] = { &tile->rate, &tile->h };
    float **of_tokens[] = { &tile->x, &tile->u, &tile->d, &tile->du };
    float **of_channels[] = { &tile->D, &tile->bias };
    for (size_t i = 0; i < MN_COUNTOF(of_cells); i++, memory += cells) *of_cells[i] = memory;
    for (size_t i = 0; i < MN_COUNTOF(of_tokens); i++, memory += block) *of_tokens[i] = memory;
    for (size_t i = 0; i < MN_COUNTOF(of_channels); i++, memory += MN_VW) *of_channels[i] = memory;
    const float *D = args->D.data, *bias = args->dt_bias.data;
    lanes_load(tile->D, D ? D + v0 : NULL, 0, 1, tile->lanes);
    lanes_load(tile->bias, bias ? bias + v0 : NULL, 0, 1, tile->lanes);
    lanes_load_cells(tile->rate, (const float *)args->A.data + v0 * K, K, tile->lanes, 0.0f);
    for (int64_t s = 0; s < cells; s += MN_VW) {
        vf_store(tile->rate + s, vf_mul(vf_load(tile->rate + s), vf_set1(MN_LOG2_E)));
    }
    return memory;
}

void MN_T(mn_scan_tile_start)(scan_tile *tile, int64_t n) {
    const float *h0 = MN_ROW(float, tile->args->h0, n, 0, 0);
    const float *from = h0 ? h0 + tile->v0 * tile->K : NULL;
    lanes_load_cells(tile->h, from, tile->K, tile->lanes, 0.0f);
}

void MN_T(mn_scan_load)(scan_rows *rows, scan_tile *const *tiles, int64_t n_tiles, int64_t b,
                        int64_t t, int64_t count) {
    const mn_scan_args *args = tiles[0]->args;
    for (int64_t i = 0; i < count; i++) {
        const float *u_row = MN_ROW(float, args->u, b, t + i, 0);
        const float *dt_row = MN_ROW(float, args->dt, b, t + i, 0);
        for (int64_t j = 0; j < n_tiles; j++) {
            const scan_tile *tile = tiles[j];
            lanes_load(tile->u + i * MN_VW, u_row + tile->v0, 0, 1, tile->lanes);
            lanes_load(tile->x + i * MN_VW, dt_row + tile->v0, 0, 1, tile->lanes);
        }
    }
    for (int64_t j = 0; j < n_tiles; j++) {
        const scan_tile *tile = tiles[j];
        for (int64_t i = 0; i < count * MN_VW; i += MN_VW) {
            const vf x = vf_add(vf_load(tile->x + i), vf_load(tile->bias));
            const vf d = args->softplus ? vf_softplus(x) : x;
            vf_store(tile->x + i, x);
            vf_store(tile->d + i, d);
            vf_store(tile->du + i, vf_mul(d, vf_load(tile->u + i)));
        }
    }
    lanes_copy_rows(rows->B, NULL, MN_ROW(float, args->Bm, b, t, 0), args->Bm.stride[1], count,
                    rows->K);
    lanes_copy_rows(rows->C, NULL, MN_ROW(float, args->Cm, b, t, 0), args->Cm.stride[1], count,
                    rows->K);
    rows->count = count;
}
