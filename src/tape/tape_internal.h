/* tape_internal.h - what operations of the tape share: memory, slots, nodes. Private to
 * ops/tape*.c. */
#ifndef MN_TAPE_TAPE_INTERNAL_H
#define MN_TAPE_TAPE_INTERNAL_H

#include "base/status.h"
#include "kernels/elementwise.h"
#include "ops/matmul.h"
#include "tape/tape.h"

enum {
    MN_TAPE_SCOPE = 96,
    MN_TAPE_PARTS = 8,    // parts of a join or split at most
    MN_TAPE_FEW = 4,      // rows of a decoding step at most
};

/* Where the token stands, for operators that count tokens; nowhere: both NULL. */
mn_borders mn_tape_counts(const mn_tape *tape);

/* Goes back over one operation. Runs in reverse order; never after a failure. */
typedef void (*mn_back_fn)(mn_tape *tape, void *payload);

typedef struct mn_part mn_part;      // see recompute.c
typedef struct mn_light mn_light;

typedef struct mn_node {
    struct mn_node *before;
    mn_part *part;         // whose light results it reads; NULL: none
    mn_back_fn back;
    void *payload;
    mn_slot *made[8];      // slots whose memory is free once this node has gone back
    int n_made;
    char scope[MN_TAPE_SCOPE];
} mn_node;

/* Memory for a result: of its own or, for a light one, what parts share. */
mn_tensor *mn_tape_result_of(mn_tape *tape, mn_dtype dtype, const int64_t shape[4], bool light);

/* `make` makes light results of the part at hand once more, from its payload; called in the order
 * of the results. */
void mn_tape_make_again(mn_tape *tape, mn_back_fn make, void *payload);

/* Makes the light results of a part unless they are there. */
void mn_part_present(mn_tape *tape, mn_part *part);

/* Goes back over the nodes up to now, which are then forgotten. */
void mn_tape_go_back(mn_tape *tape);

/* Gradient memory that is free again. */
typedef struct mn_spare {
    struct mn_spare *next;
    void *memory;
    size_t bytes;
} mn_spare;

/* Host memory that a device reads: the k-th that a step lends is uploaded to the k-th place. */
typedef struct mn_lent {
    const void *host;
    void *there;
    size_t bytes, capacity;
    const char *what;        // "token", "target": ids within [least, below); NULL: any bytes
    int64_t least, below;
    bool fixed;              // a constant: the same whenever this step runs
    bool once, there_already;    // the same whenever this recorded step runs, and uploaded
} mn_lent;

/* What a loss tells, and where the caller wants it. */
typedef struct mn_told {
    struct mn_told *next;
    const mn_loss_result *result;    // on the side of the backend, as `nll`
    double *loss;
    int64_t *counted;
    float *nll, *nll_to;             // NULL: not wanted
    int64_t rows;
} mn_told;

typedef struct mn_defer mn_defer;

struct mn_tape {
    mn_context *context;
    mn_device *device;           // NULL: the CPU
    const mn_elementwise_fn *works;     // of that device or CPU, and what they run on
    void *where;
    mn_dtype dtype;
    size_t item;                 // bytes of one number
    unsigned modes;
    bool pauses;                 // recording, by mn_tape_no_gradient
    mn_status status;
    mn_arena *data, *notes;      // tensors' numbers; nodes and tensors themselves
    mn_node *last;
    mn_spare *spare, *unused;    // free gradient memory; list cells without memory
    mn_part *part, *present;     // at hand; whose light results are in the shared memory
    mn_light *light;             // that memory
    bool lighter;                // whether more results than usual are light
    size_t used, peak, work;     // bytes of data now and at most, and of operators' work space
    const int64_t *cu_seqlens;   // NULL: not packed
    const int64_t *borders;      // the same for kernels
    int64_t n_seqs;
    mn_lent *lent;               // lasting
    int64_t n_lent, most_lent;
    size_t lent_bytes;           // of this step
    mn_told *told;               // losses of this step
    mn_defer *delay;             // NULL until something is put off
    const int64_t *position;     // of the token of a step that repeats, as the device reads it
    const int64_t *position_host;
    int64_t sequences;           // of a step of MN_TAPE_ALIKE that gathers; 0: others
    mn_tape_observer observer;       // NULL: nobody hears of products
    void *observer_context;
    const mn_tape_runner *runner;    // NULL: operators run here
    int n_checkpoints, checkpoint;   // parts of this step; the one at hand, 0: none
    bool again;                      // it is computed going back
    mn_tensor *kept;                 // what is kept of the part at hand; NULL: none, or again
    bool ends_part;                  // the next product onto a tensor is the part's result
    char scope[MN_TAPE_SCOPE];
};

typedef struct mn_tape_mark {
    mn_mark mark;
    size_t used;
} mn_tape_mark;

/* Whether to compute: no failure and not planning. */
static inline bool mn_tape_runs(const mn_tape *tape) {
    return tape->status == MN_OK && !(tape->modes & MN_TAPE_PLAN);
}

static inline bool mn_tape_dead(const mn_tape *tape) {
    return tape->status != MN_OK;
}

/* Does one work (kernels/elementwise.h); a plan counts the memory it takes. */
void mn_tape_do(mn_tape *tape, mn_elementwise_id id, const void *work);

/* A matrix product; a plan counts its work space. */
void mn_tape_product(mn_tape *tape, const mn_matmul_args *p);

/* Copies from the backend's memory to the host's, and waits. */
mn_status mn_tape_fetch(mn_tape *tape, void *to, const void *from, size_t bytes);

/* mn_tape_lend for a constant, whose host memory need not outlive the call. */
const void *mn_tape_lend_fixed(mn_tape *tape, const void *host, size_t bytes);

/* mn_tape_lend for what differs from step to step, but not from launch to launch of a recorded one:
 * mn_tape_feed uploads it the first time. `host` is a note of the step. */
const void *mn_tape_lend_once(mn_tape *tape, const void *host, size_t bytes);

/* mn_tape_lend for n ids, which are checked to lie within [least, below). `what` names one. On a
 * tape of MN_TAPE_REPEATS the device reads them where they are, whenever the step runs. */
const int32_t *mn_tape_lend_ids(mn_tape *tape, const int32_t *ids, int64_t n, const char *what,
                                int64_t least, int64_t below);

/* Memory of the step: for numbers (planned or real), for notes (always real, zeroed). Failing sets
 * the status and returns NULL. */
void *mn_tape_bytes_of(mn_tape *tape, size_t bytes);
void *mn_tape_note(mn_tape *tape, size_t bytes);

/* Scratch between a mark and its release. */
mn_tape_mark mn_tape_hold(const mn_tape *tape);
void mn_tape_let_go(mn_tape *tape, mn_tape_mark mark);

int64_t mn_count4(const int64_t shape[4]);

/* Elements from row to row when all rows of X numbers, heads included, lie at equal distance; 0
 * when they do not. */
int64_t mn_row_step(const mn_tensor *x);

/* A tensor over given memory, contiguous; with a slot of its own if the tape records. */
mn_tensor *mn_tape_over(mn_tape *tape, void *data, mn_dtype dtype, const int64_t shape[4],
                        bool wants_grad);

/* Something asks a quantised leaf for its numbers; nothing for other tensors. */
void mn_quant_misuse(const mn_tensor *x);

/* The numbers of x as works name them. data is NULL for NULL. */
mn_view mn_value(const mn_tensor *x);

/* Contiguous numbers of that shape. */
mn_view mn_flat_view(void *data, mn_dtype dtype, const int64_t shape[4]);

/* Whether a gradient flows to x; false for NULL. */
bool mn_wants(const mn_tensor *x);

/* Adds a node that goes back through `back` from what `made` holds, when the tape records and any
 * of its inputs wants a gradient (`wanted`). Checks the results when the tape checks. */
void mn_tape_record(mn_tape *tape, const char *what, mn_back_fn back, void *payload, bool wanted,
                    mn_tensor *const *made, int n_made);

/* A slot that is another one altogether (a residual's) stands for it: whole, at offset 0, of the
 * same size. */
mn_slot *mn_slot_standing_for(mn_slot *slot);

/* Nothing will read the gradient in a slot that was held. */
void mn_slot_release(mn_tape *tape, mn_slot *slot);

/* The gradient of what x views; data is NULL when nothing has arrived. */
mn_view mn_grad_read(const mn_tensor *x);

/* Where to put the gradient of x, and whether to add to what is there. Marks it as written. */
mn_view mn_grad_write(mn_tape *tape, mn_tensor *x, bool *add);

/* Makes sure that memory for the gradient of x is there before scratch is taken. */
bool mn_grad_place(mn_tape *tape, mn_tensor *x);

/* The numbers of b, which may be NULL, over `shape`: an axis of 1 is repeated. False when shapes do
 * not fit. */
bool mn_repeated(mn_tape *tape, mn_view *view, const mn_tensor *b, const int64_t shape[4]);

/* Whether the tape's backend makes the gradient of b, one number for each row of a, in the pass
 * that makes the gradient of a: where its view has a stride of 0 along X. */
bool mn_gates_rows(const mn_tape *tape, const mn_tensor *a, const mn_tensor *b);

/* What a repeated b gets: the sum over what it was repeated along of dy, dy a or, given f, dy f(a),
 * a and f not given being NULL. */
void mn_sum_to(mn_tape *tape, const mn_unary *f, const mn_tensor *a, mn_tensor *b,
               const mn_view *dy, const int64_t shape[4]);

/* Adds `gradient`, in the shape of x, to the gradient of x, or makes it that. */
void mn_grad_give(mn_tape *tape, mn_tensor *x, const mn_view *gradient);

/* The same where `gradient` is contiguous step memory that nothing else uses any more: it becomes
 * that of the gradient where there is none yet. */
void mn_grad_hand(mn_tape *tape, mn_tensor *x, const mn_view *gradient);

#endif
