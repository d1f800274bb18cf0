/* shadow.h - a device without arithmetic, for tests of what a decoded token is lowered to.
 *
 * Its memory is the host's, and each element of it has a tag instead of a value: 64 bits that
 * name how it was computed from what lay there before. Operations write tags of what they read.
 * The same operations are done twice, on two sets of tags: `asked`, one after the other as the tape
 * is asked for them, and `done`, as launches and instructions of megakernels do them, blocks in an
 * order that the test chooses. A step is lowered well when both sets are equal at its end. */
#ifndef TESTS_SUPPORT_DECODE_SHADOW_H
#define TESTS_SUPPORT_DECODE_SHADOW_H

#include "kernels/decode_image.h"
#include "ops/describe.h"

typedef enum shadow_set { SHADOW_ASKED, SHADOW_DONE, SHADOW_SETS } shadow_set;

/* The order of blocks: always the first that can go on, the last, or any. */
typedef enum shadow_order { SHADOW_FIRST, SHADOW_LAST, SHADOW_ANY, SHADOW_ORDERS } shadow_order;

/* What the launches of a test were, added up; `apart`: of operators and works over caches that were
 * launched by themselves; `trace` is of all instructions of all megakernels:
 * what they read and write, words and barriers, whatever the order of blocks. */
typedef struct shadow_counts {
    int launches, megakernels, stages, barriers, steps, apart;
    uint64_t trace;
} shadow_counts;

/* Forgets everything; `blocks` is how many a megakernel has. */
void shadow_start(int blocks, shadow_order order, uint64_t seed);
shadow_counts shadow_counted(void);

/* Whether both sets are equal; says where they are not. */
bool shadow_agrees(void);

/* Failures found while instructions were done: races, words that nobody writes, deadlocks. */
int shadow_failures(void);

/* ---- tags ------------------------------------------------------------------------------------ */

uint64_t shadow_mix(uint64_t tag, uint64_t more);

/* The tag of an element in the set at work, and a new one for it. */
void shadow_use(shadow_set set);
uint64_t shadow_get(const void *at);
void shadow_put(void *at, uint64_t tag);

/* What shadow_image.c sees of both, while a block does an instruction; NULL: nobody looks. */
typedef struct shadow_watch {
    void (*reads)(size_t slot);
    bool (*writes)(size_t slot, uint64_t tag);    // true: it keeps the tag for later
    bool (*kept)(size_t slot, uint64_t *tag);
} shadow_watch;
void shadow_watch_by(const shadow_watch *watch);

size_t shadow_slot(const void *at);
size_t shadow_slots(void);    // there are so many
void *shadow_reserve(size_t bytes);    // zeros that take no memory until they are used
uint64_t shadow_at(shadow_set set, size_t slot);
void shadow_set_at(shadow_set set, size_t slot, uint64_t tag);
void shadow_fail(const char *format, ...) __attribute__((format(printf, 1, 2)));

/* A device without any memory in use yet; pieces of it, aligned to 256; and both sets follow a
 * copy, or forget. */
void shadow_clear(void);
void *shadow_allocate(size_t bytes);
void shadow_copied(void *to, const void *from, size_t bytes);
void shadow_forget(void *at, size_t bytes);

/* ---- shadow_ops.c: operations ---------------------------------------------------------------- */

/* One number of a small work from its inputs, 0 where one is absent, and as it is stored. */
uint64_t shadow_cell(int kind, int f, double scale, double shift, uint64_t a, uint64_t b);
uint64_t shadow_stored(int kind, uint64_t tag, mn_dtype from, mn_dtype to);

/* Elements of rows that norms make. `of_row`: shadow_row of what the norm is over. */
uint64_t shadow_row(const uint64_t *tags, int64_t n);
uint64_t shadow_rms(double eps, uint64_t of_row, uint64_t x, uint64_t w);
uint64_t shadow_gated(double eps, int sigmoid, int order, uint64_t of_row, uint64_t x, uint64_t z,
                      uint64_t w);
uint64_t shadow_l2(float plus, float most, uint64_t of_row, uint64_t x);

/* A column of a product, and an element of a row of a table. */
uint64_t shadow_column(uint64_t of_row, const void *weights, int64_t K, uint64_t bias);
uint64_t shadow_table(const int32_t *index, const void *first_row, int64_t row);

/* A channel of a convolution of one token: y, and tail[i] for W - 1 of them. */
uint64_t shadow_conv(uint64_t *tail, int act, uint64_t x, const uint64_t *tail0, int64_t W,
                     const void *taps, uint64_t bias);

/* A column of a matrix state: what it reads, the state's K elements in place, and the output. */
typedef struct shadow_column_of_state {
    int64_t K;
    uint64_t q, key, other, v, beta, g;    // rows as shadow_row
    float scale;
    bool delta_rule;
} shadow_column_of_state;
uint64_t shadow_recurrence(uint64_t *state, const shadow_column_of_state *c);

/* [begin, end) of a small work: elements, channels or rows, as mn_megakernel_fill_job has it. */
void shadow_small(const mn_decode_op *work, int64_t begin, int64_t end);
int64_t shadow_small_units(const mn_decode_op *work);

/* What an operator reads of one of its fields, for a column; and the tag of what it makes of them,
 * to be followed by a field and the place of an element in it. `args`: its numbers are used. */
typedef struct shadow_input {
    int64_t count;
    const uint64_t *tags;
} shadow_input;
uint64_t shadow_made(mn_op_id op, const void *args, const shadow_input *inputs, int n);
uint64_t shadow_made_at(uint64_t made, mn_op_id op, const char *field, int64_t place);

/* A piece of a step of an operator, by the number of its row of kernels/decode_steps.def. */
void shadow_step(int step, const void *args, int64_t head, int64_t column);

/* A token's attention (kernels/decode.h): the parts of a key-value head that a piece makes, with
 * the rows of the caches that these are made of; and the sum of a query head's parts. Where the
 * token stands is not known: any row may be the token's, and is then something else. */
void shadow_attend(const mn_decode_attention *p, int64_t head, int64_t slot, int64_t n_slots);
void shadow_combine(const mn_decode_attention *p, int64_t head);

/* Where keys are cut into splits (mn_decode_stream_instr): number i of a split's result, and the
 * sum of (n_splits, V + 2) of them. Here a split has every so many-th part. */
uint64_t shadow_split(const mn_decode_attention *p, int64_t head, int64_t split, int64_t i);
void shadow_combine_splits(const mn_decode_attention *p, int64_t head, const uint64_t *splits);
void shadow_attention(const mn_decode_attention *p);    // all of it

/* A piece of a phase of HyperMLP in the same way; and all of it. */
void shadow_hyper_piece(const mn_decode_hyper *p, int phase, int64_t head, int64_t slot,
                        int64_t n_slots);
void shadow_hyper(const mn_decode_hyper *p);

/* All of a work of a tape, of a product, of an operator. */
void shadow_elementwise(int id, const void *work);
void shadow_gemm(const mn_gemm_problem *work);
void shadow_op(mn_op_id op, const void *args);

/* ---- shadow_image.c -------------------------------------------------------------------------- */

/* Does all instructions of a megakernel. */
void shadow_megakernel(const mn_decode_launch_args *given, const void *image, int blocks,
                       shadow_order order, uint64_t *seed, shadow_counts *counts);

/* Small works that jobs of instructions are: a job has a place in this list. */
int shadow_job_note(const mn_decode_op *work);
const mn_decode_op *shadow_job_at(int i);

typedef struct shadow_job {
    int of, waits;
    int64_t begin, end;
} shadow_job;

#endif
