/* sequence.h - operators over sequences that are cut over ranks: rank r of S has tokens
 * [r T, (r + 1) T) of each of B sequences, and every rank makes the same calls in the same order.
 *
 *   keys          attention and its relatives: keys and values of the tokens before are gathered;
 *                 going back, their gradients are summed where the tokens are
 *   affine maps   every rank runs from a state of zeros and finds the map of its tokens, a gather
 *                 of (A, b) gives each its initial state, and it runs once more from there; going
 *                 back the same with A transposed
 *   Moebius maps  of kla: the same with the map of every channel and slot, and going back that of
 *                 their gradients; a state or a gradient is not run twice
 *   diagonal      of Palimpsa: affine with one decay of each head; two numbers of a cell are
 *                 gathered
 *   tails         of convolutions: the last W - 1 tokens, from neighbour to neighbour at once
 *   others        states go from rank to rank, and their gradients back: a pipeline, which those
 *                 with maps take, too, where it is asked for or is faster
 *
 * A pipeline costs a pass what S - 1 ranks take for one operator, as the ranks of a model of many
 * layers work at different ones of them; maps cost a part of it in every layer. Where each operator
 * is waited for by itself (layers made once more going back) a pipeline has no others to work at.
 *
 * What an operator counts (positions, tokens seen) begins where the rank's tokens begin. Results
 * are those of one rank within rounding.
 *
 * Packed: rows of a batch that hold several sequences are cut as rows, so that a rank has of each
 * the end of one sequence and some that begin there. What sequences that cross a border need goes
 * the same ways, row by row; one that begins anew has no part in a map. In the host's memory only.
 *
 * On GPUs all states and tails go from rank to rank, on the stream: a rank is behind the one
 * before by the time of one operator, not of one in each layer, as no rank waits for those behind
 * it before it goes back. Keys are gathered into scratch memory, and once more going back. */
#ifndef MN_RANKS_SEQUENCE_H
#define MN_RANKS_SEQUENCE_H

#include "ops/context.h"
#include "ops/describe.h"
#include "ranks/comm.h"
#include "ranks/nccl.h"

/* Memory that lasts until the backward pass of this call; NULL after a failure of its own. */
typedef void *(*mn_keep_fn)(void *owner, size_t bytes, bool plan);

/* How states with maps cross ranks. */
typedef enum mn_sequence_states {
#define STATES(id, name, about) MN_SEQUENCE_##id,
#include "ranks/sequence_states.def"
#undef STATES
    MN_SEQUENCE_COUNT
} mn_sequence_states;

bool mn_sequence_states_find(mn_sequence_states *out, const char *name);

/* How an operator crosses `ranks` ranks of a sequence: "maps", "tails", "keys", "pipeline"; NULL:
 * it looks at one token at a time. `depth` is as below, `device`: on GPUs. */
const char *mn_sequence_way(mn_op_id op, mn_sequence_states states, int depth, int ranks,
                            bool device);

typedef struct mn_sequence {
    mn_comm *comm;             // the ranks that share sequences
    mn_nccl *nccl;             // the same of their GPUs, where the context has one
    int first;                 // the first of them among those of `nccl`
    bool again;                // calls are made once more going back, `keep` gives the memory of
                               // the first time, and what came from other ranks is in it still
    mn_sequence_states states;
    int depth;                 // layers of a pass that states cross in; 0: one is waited for
    /* of packed calls, whose T tokens are the rank's parts of `rows` rows: before[r * rows + b] is
     * how many tokens the sequence of row b that crosses the border in front of rank r has before
     * it, 0 where none crosses; r from 0 to the number of ranks */
    int64_t rows;
    const int64_t *before;
    mn_context *context;
    mn_keep_fn keep;
    void *owner;
} mn_sequence;

/* Runs forward on the rank's tokens. `args` is the operator's argument struct as for them alone; it
 * is changed to what the backward pass needs (states, all keys). With `plan` only memory is taken.
 * Initial states that are given count on rank 0. */
mn_status mn_sequence_forward(const mn_sequence *s, mn_op_id op, void *args, bool plan);

/* The same backward, over the args that forward left, with cotangents and gradients filled in as
 * for the rank's tokens alone. */
mn_status mn_sequence_backward(const mn_sequence *s, mn_op_id op, void *args, bool plan);

#endif
