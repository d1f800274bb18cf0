/* plan.h - a megakernel while it is written: the instructions of all blocks so far, and what its
 * stages read and write of the step's tensors (values.h). Private to src/decode.
 *
 * Numbers that a later stage reads have hand-off words behind all instructions. Since no barrier
 * stands between most stages, nothing may be written that an earlier stage reads from memory or
 * writes itself. */
#ifndef MN_DECODE_PLAN_H
#define MN_DECODE_PLAN_H

#include "decode/values.h"
#include "kernels/decode_image.h"

/* Bytes of a tensor that stages read or write. Those that are `flagged` have words: results, or
 * what is older than the megakernel and copied to words first. */
typedef struct mn_decode_range {
    mn_mem_range of;
    bool flagged, read;
    int words;                  // bytes from the first word
} mn_decode_range;

/* A block's instructions. */
typedef struct mn_decode_instr_list {
    unsigned char *bytes;
    int64_t n, most, last;      // where the last instruction begins
    int64_t first;              // bytes of the first
    unsigned sync;              // the barrier in front of the next
} mn_decode_instr_list;

struct mn_megakernel {
    const mn_values *values;          // the step's tensors
    int n_stages, n_blocks, phase;    // phase: the block that has the next tile
    int64_t words;                    // bytes of all words
    int64_t n_copies, max_copies;
    mn_decode_copy *copy;             // what is copied to words first
    mn_decode_instr_list *list;
    mn_decode_range *range;
    int64_t n_ranges, max_ranges;
    bool failed;                      // memory was out
    bool ragged;                      // a row's last chunk is not whole
    bool works;                       // there are stages of plan_works.c, or barriers
    bool attends, hyper, streams;     // there are stages of plan_caches.c: of which kind
    bool small;                       // there are small works that are no epilogues
    unsigned steps;                   // bits of the steps of operators that there are
    unsigned n_syncs;                 // barriers of the whole grid
};

/* Room for n items in a list that grows; false when memory is out. */
bool mn_plan_grow(void **list, int64_t *most, int64_t n, size_t item);

/* A zeroed instruction at the end of a block's list, NULL when memory is out; and its bytes,
 * once it is complete. */
mn_decode_instr *mn_plan_add_instr(mn_megakernel *p, int block);
void mn_plan_end_instr(mn_megakernel *p, int block, size_t bytes);

/* A barrier of the whole grid in front of what all blocks do next. */
void mn_plan_sync(mn_megakernel *p);

/* What a norm of a head's queries or keys divides by, and where its rows go; none where `front` is
 * NULL. */
void mn_plan_fill_norm(mn_decode_qk_norm *to, const mn_decode_op *front);

/* A stage in which the block does nothing. */
void mn_plan_rest(mn_megakernel *p, int block);

/* ---- ranges.c: what a stage reads and writes ------------------------------------------------- */

enum { MN_STAGE_RANGES = 512 };

/* Of one stage, gathered before it is added. `fits`: whether it can be; `behind`: it reads what
 * earlier stages wrote, so that a barrier stands in front of it. */
typedef struct mn_stage_ranges {
    mn_megakernel *p;
    mn_decode_range list[MN_STAGE_RANGES];
    int n;
    int64_t n_copies;    // of the megakernel, with those of the stage
    bool fits, behind;
} mn_stage_ranges;

void mn_stage_open(mn_stage_ranges *r, mn_megakernel *p);

/* Memory that the producer warp loads ahead: it must be older than the megakernel. */
void mn_stage_loads(mn_stage_ranges *r, const void *data, int64_t count, size_t item);

/* Memory that consumers read, whenever it was written. */
void mn_stage_reads(mn_stage_ranges *r, const void *data, int64_t count, size_t item);

/* Results; others may read them as words where they are `flagged`. */
void mn_stage_writes(mn_stage_ranges *r, const void *data, int64_t count, size_t item,
                     bool flagged);

/* The same of an interval that an operation has named; `flagged` where it writes. */
void mn_stage_touches(mn_stage_ranges *r, const mn_mem_range *range, bool flagged);

/* Whether an earlier stage writes some of it. */
bool mn_stage_is_written(const mn_stage_ranges *r, const void *data, int64_t bytes);

/* The words of `count` elements of bf16, wherever those come from; `even`: how many are loaded at
 * once. */
mn_decode_source mn_stage_source(mn_stage_ranges *r, const void *data, int64_t count, int even);

/* Hand-off words for a range. What is not added at last leaves a gap. */
void mn_stage_add_words(mn_stage_ranges *r, mn_decode_range *range);

/* Copies to words and memory before anything else, cut into what a block copies at once. */
void mn_stage_copies(mn_stage_ranges *r, mn_decode_copy all);

/* Words of something written, or MN_DECODE_NO_WORDS, before it is known whether any are read. */
int mn_stage_words(const mn_stage_ranges *r, const void *data);

/* Makes what was gathered the megakernel's, with the barrier that it needs; false, and nothing
 * added, where it does not fit. */
bool mn_stage_close(mn_stage_ranges *r);

/* Element i from a source on, which may be the upper one of its word. */
mn_decode_source mn_source_from(mn_decode_source source, int64_t i);

#endif
