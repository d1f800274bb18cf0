/* parts.h - gradients that are sums over the value columns of a head, where these are several items
 * (tiles.h).
 *
 * The item of a tile runs on arguments whose gradients are views of shared memory, a part of its
 * own; a later phase adds the parts of 64 tokens an item, tile after tile. With one tile nothing is
 * redirected and there is no such phase. */
#ifndef MN_KERNELS_CPU_CHUNK_PARTS_H
#define MN_KERNELS_CPU_CHUNK_PARTS_H

#include <string.h>

#include "base/checked.h"
#include "base/util.h"
#include "kernels/access.h"
#include "kernels/kernel.h"

enum { MN_MOST_PARTS = 8, MN_PART_TOKENS = 64 };

/* One gradient: rows of `width` for each token, or for each sequence, and head. */
typedef struct mn_part {
    mn_out *to;
    int64_t width;
    bool of_sequence;
} mn_part;

typedef struct mn_parts {
    const mn_call *call;
    int64_t tiles;
    int n;
    mn_part part[MN_MOST_PARTS];
} mn_parts;

static inline int64_t mn_part_rows(const mn_parts *p, int i) {
    const mn_call *c = p->call;
    return (p->part[i].of_sequence ? mn_n_sequences(c) : c->B * c->T) * c->H;
}

/* Floats of shared memory, 0 with one tile; false when they overflow. */
static inline bool mn_parts_floats(int64_t *floats, const mn_parts *p) {
    *floats = 0;
    for (int i = 0; i < p->n && p->tiles > 1; i++) {
        int64_t all;
        if (!mn_mul_i64(&all, mn_part_rows(p, i), p->part[i].width) ||
            !mn_add_i64(floats, *floats, all)) {
            return false;
        }
    }
    return mn_mul_i64(floats, *floats, p->tiles);
}

static inline int64_t mn_parts_items(const mn_parts *p) {
    return p->tiles > 1 ? p->call->B * mn_ceil_div(p->call->T, MN_PART_TOKENS) + 1 : 0;
}

/* Gradient i of a tile. */
static inline float *mn_part_at(const mn_parts *p, float *shared, int64_t tile, int i) {
    int64_t before = 0, all = 0;
    for (int k = 0; k < p->n; k++) {
        if (k == i) before = all;
        all += mn_part_rows(p, k) * p->part[k].width;
    }
    return shared + tile * all + before;
}

/* The gradients that are wanted become views of the tile's part. */
static inline void mn_parts_redirect(const mn_parts *p, float *shared, int64_t tile) {
    const mn_call *c = p->call;
    for (int i = 0; i < p->n && p->tiles > 1; i++) {
        const mn_part *part = &p->part[i];
        if (!part->to->data) continue;
        const int64_t row = c->H * part->width, rows = part->of_sequence ? row : c->T * row;
        *part->to = (mn_out){ mn_part_at(p, shared, tile, i),
                              { rows, part->of_sequence ? 0 : row, part->width } };
    }
}

static inline void mn_part_add(const mn_parts *p, float *shared, int i, int64_t b, int64_t t,
                               int64_t h) {
    const mn_part *part = &p->part[i];
    float *to = MN_ROW_OUT(float, *part->to, b, t, h);
    const int64_t row = part->of_sequence ? b : b * p->call->T + t;
    for (int64_t tile = 0; to && tile < p->tiles; tile++) {
        const float *from = mn_part_at(p, shared, tile, i) + (row * p->call->H + h) * part->width;
        for (int64_t k = 0; k < part->width; k++) to[k] = tile ? to[k] + from[k] : from[k];
    }
}

/* One item of the adding phase: some tokens, or, the last one, the rows of all sequences. */
static inline void mn_parts_add(const mn_parts *p, float *shared, int64_t item) {
    const mn_call *c = p->call;
    const int64_t blocks = mn_ceil_div(c->T, MN_PART_TOKENS);
    const bool sequences = item == mn_parts_items(p) - 1;
    const int64_t b0 = sequences ? 0 : item / blocks, b1 = sequences ? mn_n_sequences(c) : b0 + 1;
    const int64_t t0 = sequences ? 0 : item % blocks * MN_PART_TOKENS;
    const int64_t t1 = sequences ? 1 : mn_min(t0 + MN_PART_TOKENS, c->T);
    for (int i = 0; i < p->n; i++) {
        if (p->part[i].of_sequence != sequences) continue;
        for (int64_t b = b0; b < b1; b++) {
            for (int64_t t = t0; t < t1; t++) {
                for (int64_t h = 0; h < c->H; h++) mn_part_add(p, shared, i, b, t, h);
            }
        }
    }
}

#endif
