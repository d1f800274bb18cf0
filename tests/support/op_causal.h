/* op_causal.h - what one wild number in one token may move, and what it may not: everything before
 * the token, other heads and other sequences keep their bits; of gradients, by a cotangent,
 * everything after it. */
#ifndef TESTS_SUPPORT_OP_CAUSAL_H
#define TESTS_SUPPORT_OP_CAUSAL_H

#include "support/op_case.h"

enum { OP_WILD_VALUES = 7 };
extern const float op_wild_values[OP_WILD_VALUES];    // NaN, infinities, large ones, a denormal
const char *op_wild_text(float x);

/* Where an element lies: -1 where its tensor has no such axis. `query` is the first token that may
 * see it, [head, heads) the heads of axis H that it belongs to. */
typedef struct op_spot {
    int64_t sequence, query, head, heads;
} op_spot;
op_spot op_spot_at(const mn_sample *s, const mn_sample_tensor *t, int64_t at);

typedef enum op_effect { OP_ON_RESULTS, OP_ON_GRADIENTS_OF_INPUT, OP_ON_GRADIENTS } op_effect;

/* One poisoned run against the run without it. Returns how many numbers moved that must not. */
int64_t op_check_kept(const char *target, const mn_sample *clean, const mn_sample *got,
                      const mn_sample_tensor *poisoned, const op_spot *poison, float value,
                      op_effect what, const op_case *c);

/* First token of each sequence and head at which a result is NaN, one row for each result. */
enum { OP_MOST_SEQUENCES = 4, OP_MOST_HEADS = 4, OP_NEVER = 1 << 20 };
typedef int64_t op_beginnings[MN_MAX_FIELDS][OP_MOST_SEQUENCES][OP_MOST_HEADS];
void op_find_nan(op_beginnings out, const mn_sample *s);

/* NaN begins where it does in the reference. Returns at how many places it does not. */
int64_t op_check_beginnings(const char *target, op_beginnings want, op_beginnings have,
                            const mn_sample *s, const mn_sample_tensor *poisoned, float value,
                            const op_case *c);

/* Whether an input may hold the number at all: a log decay is at most 0, and the number's sign is
 * changed to that. */
bool op_allows(const mn_field *field, float *value);

/* The element to poison: of a token in the middle of a chunk, of the last head of the second
 * sequence where there is one. */
int64_t op_choose_element(const mn_sample *s, const mn_sample_tensor *t, int round);

/* Whether a tensor has numbers of single tokens or sequences. */
bool op_has_rows(const mn_sample_tensor *t);

#endif
