/* ahead.h - asks for the inputs of coming tokens, a line of memory at a time.
 *
 * With many heads the rows of one head lie pages apart, where the hardware foresees nothing and a
 * burst of requests stalls. A kernel that walks many small blocks over the same few tokens asks, on
 * walk number `index`, for line `index` of each token that comes next: one request per token. */
#ifndef MN_KERNELS_CPU_SIMD_AHEAD_H
#define MN_KERNELS_CPU_SIMD_AHEAD_H

#include "base/util.h"
#include "kernels/access.h"

enum { MN_LINE = 16, MN_MOST_AHEAD = 5 };    // floats of a line; views

/* Rows that will be wanted: floats [first, end) of each. */
typedef struct mn_ahead {
    int n;
    struct {
        mn_in view;
        int64_t first, end;
    } rows[MN_MOST_AHEAD];
} mn_ahead;

/* One line of each token. */
typedef struct mn_line {
    const float *at;
    int64_t step;
} mn_line;

static inline void mn_ahead_add(mn_ahead *a, mn_in view, int64_t first, int64_t end) {
    if (!view.data || a->n == MN_MOST_AHEAD) return;
    a->rows[a->n].view = view;
    a->rows[a->n].first = first;
    a->rows[a->n++].end = end;
}

/* Line number `index` of token (b, t, h) and those after it; past the last line, `none` for all. */
static inline mn_line mn_line_ahead(const mn_ahead *a, int64_t b, int64_t t, int64_t h,
                                    int64_t index, const float *none) {
    for (int i = 0; i < a->n; i++) {
        const int64_t lines = mn_ceil_div(a->rows[i].end - a->rows[i].first, MN_LINE);
        if (index < lines) {
            const float *row = MN_ROW(float, a->rows[i].view, b, t, h);
            return (mn_line){ row + a->rows[i].first + index * MN_LINE, a->rows[i].view.stride[1] };
        }
        index -= lines;
    }
    return (mn_line){ none, 0 };
}

#endif
