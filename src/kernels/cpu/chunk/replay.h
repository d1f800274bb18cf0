/* replay.h - walks a recurrence backwards without keeping every state.
 *
 * Tokens go in blocks. Forward, the state is saved at the start of every stretch of about
 * sqrt(blocks) blocks; backward, a stretch is replayed from there, saving the state at the start of
 * each of its blocks, and its blocks are handed out from the last to the first. So about
 * 2 sqrt(T / block) states are held at a time, and each token is computed forward twice here. A
 * replay computes the very bits of the first run. */
#ifndef MN_KERNELS_CPU_CHUNK_REPLAY_H
#define MN_KERNELS_CPU_CHUNK_REPLAY_H

#include <stdbool.h>
#include <stdint.h>
#include <string.h>

#include "base/checked.h"
#include "base/util.h"

typedef struct mn_replay {
    int64_t T, block;         // tokens, tokens of a block
    int64_t floats;           // of a state, a multiple of the vector width
    void *context;            // handed to the three:
    /* takes `state` through tokens [t, t + n) of one block */
    void (*advance)(void *context, float *state, int64_t t, int64_t n);
    /* called once between the two directions, with the final state */
    void (*turn)(void *context, const float *state);
    /* tokens [t, t + n) of one block, backwards; `state` is that before token t */
    void (*reverse)(void *context, const float *state, int64_t t, int64_t n);
} mn_replay;

/* blocks of a stretch */
static inline int64_t mn_replay_stretch(int64_t T, int64_t block) {
    const int64_t blocks = mn_ceil_div(T, block);
    int64_t stretch = 1;
    while (stretch * stretch < blocks) stretch++;
    return stretch;
}

/* Floats of memory that mn_replay_run needs; false when they overflow. */
static inline bool mn_replay_floats(int64_t *out, int64_t T, int64_t block, int64_t floats) {
    const int64_t stretch = mn_replay_stretch(T, block);
    const int64_t states = 1 + stretch + mn_ceil_div(mn_ceil_div(T, block), stretch);
    return mn_mul_i64(out, states, floats);
}

/* `memory` starts with the first state. */
static inline void mn_replay_run(const mn_replay *r, float *memory) {
    const int64_t stretch = mn_replay_stretch(r->T, r->block) * r->block;
    const size_t bytes = (size_t)r->floats * sizeof(float);
    float *state = memory, *inner = state + r->floats;
    float *outer = inner + mn_replay_stretch(r->T, r->block) * r->floats;
    for (int64_t t = 0; t < r->T; t += r->block) {
        if (t % stretch == 0) memcpy(outer + t / stretch * r->floats, state, bytes);
        r->advance(r->context, state, t, mn_min(r->block, r->T - t));
    }
    r->turn(r->context, state);
    for (int64_t first = (r->T - 1) / stretch * stretch; first >= 0 && r->T > 0; first -= stretch) {
        const int64_t end = mn_min(first + stretch, r->T);
        memcpy(inner, outer + first / stretch * r->floats, bytes);
        for (int64_t t = first; t + r->block < end; t += r->block) {
            float *here = inner + (t - first) / r->block * r->floats;
            memcpy(here + r->floats, here, bytes);
            r->advance(r->context, here + r->floats, t, r->block);
        }
        for (int64_t t = first + (end - first - 1) / r->block * r->block; t >= first;
             t -= r->block) {
            r->reverse(r->context, inner + (t - first) / r->block * r->floats, t,
                       mn_min(r->block, end - t));
        }
    }
}

#endif
