/* shares.h - sums that cross items: over channels, and over sequences.
 *
 * A backward kernel whose items are (run of sequences, group of channel tiles) meets two kinds of
 * gradients that no item can finish: those of rows (B,T,K) shared by all channels, to which every
 * group has a share, and those of parameters of a channel, to which every run of sequences has one.
 * Shares lie in the call's shared memory,
 *
 *   rows: (group, which of two, B, T, K)      cells: (run, `cells` numbers)
 *
 * and a last phase adds them in order. How channels are grouped depends on V and K alone, so that
 * the gradients of one sequence's rows do not depend on the others. */
#ifndef MN_KERNELS_CPU_CHUNK_SHARES_H
#define MN_KERNELS_CPU_CHUNK_SHARES_H

#include "base/checked.h"
#include "kernels/access.h"
#include "kernels/cpu/simd/lanes.h"

enum { SHARES_GROUPS = 16, SHARES_RUNS = 32, SHARES_TOKENS = 64, SHARES_CELLS = 1024 };

/* Tiles of a group. At least K / 4 channels: shares stay in proportion to the channels' own
 * rows. */
static inline int64_t shares_tiles(const mn_call *call) {
    const int64_t wish = mn_max(mn_ceil_div(call->V, SHARES_GROUPS), mn_max(16, call->K / 4));
    return mn_ceil_div(mn_min(wish, call->V), MN_VW);
}

static inline int64_t shares_groups(const mn_call *call) {
    return mn_ceil_div(mn_ceil_div(call->V, MN_VW), shares_tiles(call));
}

static inline int64_t shares_runs(const mn_call *call) {
    return mn_min(mn_n_sequences(call), SHARES_RUNS);
}

/* Sequences of a run: [*first, return value) */
static inline int64_t shares_run(int64_t *first, const mn_call *call, int64_t run) {
    const int64_t n = mn_n_sequences(call), runs = shares_runs(call);
    *first = n / runs * run + mn_min(run, n % runs);
    return *first + n / runs + (run < n % runs);
}

static inline bool shares_floats(int64_t *floats, const mn_call *call, int64_t cells) {
    int64_t of_runs;
    return mn_mul_i64(floats, call->B, call->T) && mn_mul_i64(floats, *floats, call->K) &&
           mn_mul_i64(floats, *floats, 2 * shares_groups(call)) &&
           mn_mul_i64(&of_runs, cells, shares_runs(call)) && mn_add_i64(floats, *floats, of_runs);
}

static inline float *shares_rows(const mn_call *call, float *shared, int64_t group, int which) {
    return shared + (2 * group + which) * call->B * call->T * call->K;
}

static inline float *shares_cells(const mn_call *call, float *shared, int64_t cells, int64_t run) {
    return shares_rows(call, shared, shares_groups(call), 0) + run * cells;
}

/* Items of the adding phase, rows first, then cells. */
static inline int64_t shares_row_items(const mn_call *call) {
    return mn_ceil_div(call->B * call->T, SHARES_TOKENS);
}

static inline int64_t shares_cell_items(int64_t cells) {
    return mn_ceil_div(cells, SHARES_CELLS);
}

/* to[i] = sum of `count` numbers that lie `step` apart from from[i] on */
static inline void shares_add(float *to, const float *from, int64_t step, int64_t count,
                              int64_t n) {
    for (int64_t i = 0; i < n; i += MN_VW) {
        const int lanes = vf_lanes(n - i);
        vf sum = vf_zero();
        for (int64_t j = 0; j < count; j++) {
            sum = vf_add(sum, vf_load_n(from + j * step + i, lanes));
        }
        vf_store_n(to + i, sum, lanes);
    }
}

/* Item `item` of the rows, into the two gradients that are wanted. */
static inline void shares_add_rows(const mn_call *call, float *shared, int64_t item,
                                   const mn_out *first, const mn_out *second) {
    const int64_t K = call->K, tokens = call->B * call->T;
    for (int which = 0; which < 2; which++) {
        const mn_out *to = which == 0 ? first : second;
        const float *from = shares_rows(call, shared, 0, which);
        for (int64_t i = item * SHARES_TOKENS; i < mn_min((item + 1) * SHARES_TOKENS, tokens);
             i++) {
            float *row = MN_ROW_OUT(float, *to, i / call->T, i % call->T, 0);
            if (row) shares_add(row, from + i * K, 2 * tokens * K, shares_groups(call), K);
        }
    }
}

/* Item `item` of the cells [at, at + count) of a run's share, into `to` if wanted. */
static inline void shares_add_cells(const mn_call *call, float *shared, int64_t cells, int64_t item,
                                    float *to, int64_t at, int64_t count) {
    const int64_t first = item * SHARES_CELLS, n = mn_min(SHARES_CELLS, count - first);
    const float *from = shares_cells(call, shared, cells, 0) + at + first;
    if (to && n > 0) shares_add(to + first, from, cells, shares_runs(call), n);
}

#endif
