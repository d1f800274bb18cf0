/* trainer_cut.c - batches of which each rank has a part of every sequence (ranks/sequence.h). */
#include <stdlib.h>
#include <string.h>

#include "base/dtype.h"
#include "base/status.h"
#include "base/util.h"
#include "ranks/sequence.h"
#include "train/trainer_internal.h"

/* Initial states that came from another rank, on a GPU: they last until a part of the step has been
 * computed once more, and the next step has the same ones. */
typedef struct kept {
    int part, number;          // of the tape's parts; among the states of that
    size_t bytes;
    void *memory;
} kept;

struct mn_trainer_cut {
    int rank, ranks;           // among those that share a sequence
    mn_comm *group;
    mn_sequence cut;
    mn_tape_runner runner;
    mn_tape *tape;             // of the pass, which keeps what goes back
    mn_token_batch part;
    int64_t *before;           // (ranks + 1, rows), of packed rows: see ranks/sequence.h
    kept *states;
    int n_states, room;
    int at, number;            // the part that the last state was of, and how many it has had
    bool again;                // and whether that was going back
    int number_outside;        // states that are of no part
};

/* ---- memory ---------------------------------------------------------------------------------- */

static void *kept_of(mn_trainer_cut *k, int part, int number, size_t bytes) {
    for (int i = 0; i < k->n_states; i++) {
        const kept *of = &k->states[i];
        if (of->part == part && of->number == number && of->bytes == bytes) return of->memory;
    }
    if (k->n_states == k->room) {
        const int room = k->room ? 2 * k->room : 64;
        kept *states = realloc(k->states, (size_t)room * sizeof *states);
        if (!states) {
            mn_fail(MN_ERR_MEMORY, "no memory for %d states", room);
            return NULL;
        }
        k->states = states;
        k->room = room;
    }
    kept *made = &k->states[k->n_states];
    *made = (kept){ part, number, bytes, NULL };
    if (mn_device_allocate(k->cut.context->device, &made->memory, bytes) != MN_OK) return NULL;
    k->n_states++;
    return made->memory;
}

static void *keep(void *owner, size_t bytes, bool plan) {
    mn_trainer_cut *k = owner;
    if (!k->cut.context->device) {
        const size_t item = mn_dtype_bytes(mn_tape_dtype(k->tape));
        return mn_tape_memory(k->tape, (int64_t)((bytes + item - 1) / item));
    }
    if (plan) return k;    // an address that nobody touches
    bool again;
    const int part = mn_tape_checkpoint_at(k->tape, &again);
    if (part == 0) return kept_of(k, 0, k->number_outside++, bytes);
    if (part != k->at || again != k->again) k->number = 0;
    k->at = part;
    k->again = again;
    return kept_of(k, part, k->number++, bytes);
}

/* ---- a pass ---------------------------------------------------------------------------------- */

static mn_status run_forward(void *context, mn_op_id op, void *args, bool plan) {
    mn_trainer_cut *k = context;
    bool again;
    mn_tape_checkpoint_at(k->tape, &again);
    k->cut.again = again && k->cut.context->device;
    return mn_sequence_forward(&k->cut, op, args, plan);
}

static mn_status run_backward(void *context, mn_op_id op, void *args, bool plan) {
    const mn_trainer_cut *k = context;
    return mn_sequence_backward(&k->cut, op, args, plan);
}

/* Sequences of the whole batch that have tokens here, and those that cross borders of ranks. */
static void cut_sequences(mn_trainer_cut *k, const mn_token_batch *whole) {
    const int64_t n = k->part.length, rows = whole->rows;
    int64_t used = 0, s = 0;
    for (int64_t b = 0; b < rows; b++) {
        const int64_t row = b * whole->length, first = row + n * k->rank;
        for (int r = 0; r < k->ranks; r++) {
            const int64_t at = row + r * n;
            while (whole->starts[s + 1] <= at) s++;    // the sequence that holds token `at`
            k->before[r * rows + b] = at - whole->starts[s];
            if (r == k->rank) k->part.starts[used++] = b * n;
            while (r == k->rank && whole->starts[s + 1] < first + n) {
                k->part.starts[used++] = b * n + whole->starts[++s] - first;
            }
        }
    }
    k->part.starts[used] = rows * n;
    k->part.n_sequences = used;
}

void mn_trainer_cut_pass(mn_trainer *t, mn_tape *tape, const mn_token_batch **batch,
                         double *share) {
    mn_trainer_cut *k = t->cut;
    *share = 1.0;
    if (!k) return;
    const mn_token_batch *whole = *batch;
    const int64_t n = k->part.length, first = n * k->rank;
    int64_t own = 0, all = 0;
    for (int64_t b = 0; b < whole->rows; b++) {
        const int64_t from = b * whole->length;
        memcpy(k->part.tokens + b * n, whole->tokens + from + first, (size_t)n * sizeof(int32_t));
        memcpy(k->part.targets + b * n, whole->targets + from + first, (size_t)n * sizeof(int32_t));
        for (int64_t i = 0; i < whole->length; i++) {
            const bool counts = whole->targets[from + i] >= 0;
            all += counts;
            own += counts && i >= first && i < first + n;
        }
    }
    if (whole->packed) cut_sequences(k, whole);
    k->tape = tape;
    k->at = k->number_outside = 0;
    mn_tape_run_by(tape, &k->runner);
    *batch = &k->part;
    if (own > 0) *share = (double)own / (double)all;
}

/* ---- create ---------------------------------------------------------------------------------- */

/* Layers of a pass in which ranks may work at different ones: none where a layer is made once more
 * going back, which is waited for, or where kinds are mixed, some of which gather from all. */
static int depth_of(const mn_trainer *t) {
    const mn_model_config *config = mn_model_describe(t->model);
    if (t->recompute == MN_RECOMPUTE_LAYER || t->recompute == MN_RECOMPUTE_LIGHT) return 0;
    for (int i = 1; i < config->n_layers; i++) {
        if (strcmp(config->names[i], config->names[0]) != 0) return 0;
    }
    return config->n_layers;
}

static mn_status find_states(mn_sequence_states *states, const mn_trainer *t) {
    if (mn_sequence_states_find(states, t->options.sequence_states)) return MN_OK;
    return mn_fail(MN_ERR_ARGUMENT, "train.sequence_states: \"%s\" is none of auto, maps, "
                   "pipeline", t->options.sequence_states);
}

/* Operators of a plan, as they come. */
typedef struct heard {
    bool of[MN_OP_COUNT];
} heard;

static mn_status hear_op(void *context, mn_op_id op, void *args, bool plan) {
    (void)args, (void)plan;
    ((heard *)context)->of[op] = true;
    return MN_OK;
}

mn_status mn_trainer_sequence_ways(mn_trainer *t, mn_way_fn tell, void *context) {
    mn_sequence_states states;
    heard ops = { .of = { false } };
    const mn_tape_runner runner = { hear_op, hear_op, &ops };
    double loss;
    int64_t counted;
    const int ranks = (int)t->options.sequence_ranks;
    mn_status st = find_states(&states, t);
    if (st != MN_OK || ranks == 1) return st;
    mn_tape_run_by(t->tape, &runner);
    st = mn_trainer_pass(t, t->tape, &t->batch, MN_TAPE_RECORD | MN_TAPE_PLAN, false, 1.0, &loss,
                         &counted);
    for (int op = 0; st == MN_OK && op < MN_OP_COUNT; op++) {
        const char *way = mn_sequence_way((mn_op_id)op, states, depth_of(t), ranks,
                                          t->context->device != NULL);
        if (ops.of[op] && way) tell(context, mn_op_describe((mn_op_id)op)->name, way);
    }
    return st;
}

static mn_status make_part(mn_trainer_cut *k, const mn_token_batch *whole) {
    k->part = (mn_token_batch){ .rows = whole->rows, .length = whole->length / k->ranks,
                                .packed = whole->packed };
    const size_t rows = (size_t)k->part.rows, tokens = rows * (size_t)k->part.length;
    k->part.tokens = calloc(tokens, sizeof *k->part.tokens);
    k->part.targets = calloc(tokens, sizeof *k->part.targets);
    k->part.starts = calloc(tokens + rows + 1, sizeof *k->part.starts);
    k->before = calloc((size_t)(k->ranks + 1) * rows, sizeof *k->before);
    if (k->part.tokens && k->part.targets && k->part.starts && k->before) return MN_OK;
    return mn_fail(MN_ERR_MEMORY, "no memory for a batch");
}

mn_status mn_trainer_cut_create(mn_trainer *t, mn_nccl *nccl) {
    const int ranks = (int)t->options.sequence_ranks;
    if (ranks == 1) return MN_OK;
    if (t->options.mc_samples > 0 || (t->batch.packed && t->context->device)) {
        return mn_fail(MN_ERR_UNSUPPORTED, "train.sequence_ranks: sequences are cut over ranks "
                       "without train.mc_samples, and on GPUs with data.cutting=windows");
    }
    mn_sequence_states states;
    mn_status st = find_states(&states, t);
    if (st != MN_OK) return st;
    mn_trainer_cut *k = calloc(1, sizeof *k);
    if (!k) return mn_fail(MN_ERR_MEMORY, "no memory for a batch");
    t->cut = k;
    const int first = mn_comm_rank(t->comm) / ranks * ranks;
    k->ranks = ranks;
    k->rank = mn_comm_rank(t->comm) - first;
    st = make_part(k, &t->batch);
    if (st == MN_OK) st = mn_comm_part(&k->group, t->comm, first, ranks);
    k->cut = (mn_sequence){ .comm = k->group, .nccl = nccl, .first = first, .states = states,
                            .depth = depth_of(t), .context = t->context, .keep = keep, .owner = k,
                            .rows = k->part.rows, .before = k->before };
    k->runner = (mn_tape_runner){ run_forward, run_backward, k };
    return st;
}

void mn_trainer_cut_destroy(mn_trainer_cut *k) {
    if (!k) return;
    for (int i = 0; i < k->n_states; i++) {
        mn_device_free(k->cut.context->device, k->states[i].memory);
    }
    free(k->states);
    mn_comm_destroy(k->group);
    mn_token_batch_free(&k->part);
    free(k->before);
    free(k);
}
