/* op_case.h - calls of operators for tests, made from the operator table: which forms an operator
 * has, how big its tensors are, and how parts of one call correspond to parts of another.
 *
 *   op_case cases[OP_MAX_FORMS];
 *   for (int i = 0; i < op_forms(op, cases); i++) { set sizes; op_open(&s, &cases[i]); run; free }
 */
#ifndef TESTS_SUPPORT_OP_CASE_H
#define TESTS_SUPPORT_OP_CASE_H

#include "ops/sample.h"

enum { OP_MAX_FORMS = 96, OP_MAX_CHOICES = 4 };

/* One call. Sizes not listed follow from these (op_case.c); B rows of operators without a T axis
 * are B T. */
typedef struct op_case {
    mn_op_id op;
    mn_dtype dtype;
    int decay;
    int choice[OP_MAX_CHOICES];    // of its CHOICE parameters, in order
    uint64_t fields;               // optional fields that are there
    int64_t B, T, H, K, V;
    int64_t more_keys;             // keys before the first query, for attention and hyper
    int64_t groups;                // heads that share one of queries and keys, where they may; 0: 1
    int64_t window;                // of attention; 0: none
    int64_t block;                 // mixing parameters of hyper; 0: three more than the keys
    const int64_t *cu_seqlens;     // B must be 1
    int64_t n_seqs;
    uint64_t seed;
} op_case;

/* Every form of `op`: decays x choices, each with all optional inputs and with none, and the first
 * of them also with each optional input (or inputs that only make sense together) alone missing.
 * Sizes are left at small defaults. Returns how many. */
int op_forms(mn_op_id op, op_case out[OP_MAX_FORMS]);

/* Sets sizes and parameters and allocates; inputs are left NaN. Fails the running test when memory
 * is out. */
void op_allocate(mn_sample *sample, const op_case *c);

/* The same, and draws inputs and cotangents. */
void op_open(mn_sample *sample, const op_case *c);

/* What a failure message needs to repeat the case. */
const char *op_case_text(const op_case *c);

bool op_has_time(mn_op_id op);       // some tensor has an axis T
bool op_has_state(mn_op_id op);      // an initial state goes in and the final one comes out
bool op_is_keyed(mn_op_id op);       // L keys for T queries

/* Where the tokens of a tensor lie: `outer` blocks of `length` tokens of `inner` numbers. False for
 * a tensor without such an axis. */
typedef struct op_tokens {
    int64_t outer, length, inner;
} op_tokens;
bool op_token_layout(op_tokens *out, const mn_sample *sample, const mn_sample_tensor *tensor);

typedef enum op_side { OP_GIVEN, OP_COMPUTED } op_side;

/* The memory of a tensor that is given (an input's data, a result's cotangent) or computed (a
 * result's data, an input's gradient); NULL if there is none. */
void *op_memory(const mn_sample_tensor *tensor, op_side side);

/* Copies `count` tokens from `from` on, of every input and cotangent (what == OP_GIVEN) or result
 * and gradient (OP_COMPUTED) that has them, to token `to` of `dst`, a sample of the same form. */
void op_copy_tokens(mn_sample *dst, int64_t to, const mn_sample *src, int64_t from, int64_t count,
                    op_side side);

/* The same for all tokens of row `from` of a batch, which become row `to`. */
void op_copy_rows(mn_sample *dst, int64_t to, const mn_sample *src, int64_t from, op_side side);

/* The same for tensors with one row per sequence (axis N), and for all that have neither axis. */
void op_copy_states(mn_sample *dst, int64_t to, const mn_sample *src, int64_t from, int64_t count,
                    op_side side);
void op_copy_shared(mn_sample *dst, const mn_sample *src, op_side side);

/* The final state of `src` becomes the initial state of `dst`. */
void op_carry_state(mn_sample *dst, const mn_sample *src);

/* Lays every final state over the initial one, which it keeps, as decoding does; false where there
 * is none. */
bool op_stay_in_place(mn_sample *sample);

/* The result that continues initial state `field` (state0 -> state); NULL if it is no state. */
mn_sample_tensor *op_final_state(mn_sample *sample, const mn_field *field);

/* Numbers of `dst` from those of `src`, converted: same form, other dtype. */
void op_convert(mn_sample *dst, const mn_sample *src);

/* Whether a tensor's last two axes are a symmetric matrix, and its size. */
bool op_is_symmetric(const mn_sample *sample, const mn_sample_tensor *tensor, int64_t *size);

#endif
