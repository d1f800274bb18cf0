/* past.h - reads of the whole past, attention and relu_attention, as one problem for their passes.
 *
 * The T queries of a sequence are the last of its n_keys positions. Query heads that read the same
 * key-value head are worked on together: a block of queries is a matrix whose rows are (token, head
 * of the group), so keys and values are streamed once for the group, in decoding too. */
#ifndef MN_KERNELS_CPU_ATTENTION_PAST_H
#define MN_KERNELS_CPU_ATTENTION_PAST_H

#include "base/checked.h"
#include "kernels/kernel.h"
#include "kernels/tiles.h"
#include "kernels/cpu/simd/target.h"
#include "kernels/cpu/rope/turn.h"

enum { PAST_ROWS = 64 };     // query rows of a block; more only where a group has more heads

typedef struct past {
    const mn_call *call;
    float scale, eps;
    bool softmax;
    int64_t window;          // keys that a query sees, all of them without one
    int64_t group;           // query heads of a key-value head
    int64_t n_tokens;        // of a block of queries
    int rope;                // attention's rope_kind
    double base;
    mn_in q, k, v, d_o;
    mn_out o, lse, dq, dk, dv;
    /* Rotated positions: the table and all keys turned, (J, all keys, K), in shared memory. */
    turn_table table;
    float *turned;
} past;

/* One key-value head of one sequence. */
typedef struct past_head {
    mn_sequence seq;
    int64_t j, n_keys, before;    // before: keys older than the first query
    const float *k, *v;           // first key, turned if asked, and first value
    int64_t k_row, v_row;         // floats from one key to the next
} past_head;

/* The problem of an argument struct, yet without shared memory. */
past MN_T(mn_past_softmax)(const mn_attention_args *p);
past MN_T(mn_past_relu)(const mn_relu_attention_args *p);

/* With rotated positions two phases come first, which fill the table and turn the keys. plan
 * appends them to a plan and counts their shared bytes, false when sizes overflow; place finds
 * their memory and returns what lies behind it; run does an item of phase 0 or 1. */
enum { PAST_PHASES = 2 };
bool MN_T(mn_past_plan)(const past *p, mn_plan *plan);
void *MN_T(mn_past_place)(past *p, void *shared);
void MN_T(mn_past_run)(const past *p, int phase, int64_t item);

past_head MN_T(mn_past_head)(const past *p, int64_t n, int64_t j);

/* Rows (token, head) of queries first .. first + n_tokens - 1 into `to`, turned if asked. Rows of
 * `from` that are absent become 0. */
void MN_T(mn_past_gather)(float *to, const past *p, const past_head *head, const mn_in *from,
                          int64_t width, int64_t first, int64_t n_tokens, bool turn);

/* s[r,i] = alpha x_r.y_i for contiguous rows x of `width` and rows y `y_row` floats apart. Few rows
 * of x are dot products that read y once; more are a matrix product. */
void MN_T(mn_past_scores)(float *s, int64_t s_row, const float *x, int64_t n_rows, const float *y,
                          int64_t y_row, int64_t n, int64_t width, float alpha);

/* Whether forward has anything to write. */
static inline bool wants_any(const past *p) {
    return p->o.data || p->lse.data;
}

/* The first key that token `t` of the pass sees. */
static inline int64_t past_oldest(const past *p, const past_head *head, int64_t t) {
    return mn_max(head->before + t + 1 - p->window, 0);
}

static inline int64_t past_longest(const mn_call *call) {
    return call->cu_seqlens ? mn_longest_sequence(call) : call->L;
}

#endif
