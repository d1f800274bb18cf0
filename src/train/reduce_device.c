/* reduce_device.c - sums of gradients between GPUs, and values back.
 *
 * Values and gradients of a model on a GPU lie in one piece of memory each, in the same layout
 * (model/place.c), so that what a rank owns is one range of both. */
#include "train/reduce_device.h"

#include <stdlib.h>

#include "base/status.h"
#include "base/util.h"
#include "kernels/adamw_all.h"
#include "ranks/tree.h"

/* Numbers that come at once from all ranks together, and from one at least; whole lines. */
enum { AT_ONCE = 1 << 25, LEAST = 1 << 20, LINE = 64 };

struct mn_device_reduce {
    mn_device *device;
    mn_nccl *nccl;
    mn_model *model;
    int rank, world, sequence, data_world;
    int64_t batches;
    float *values, *grads;
    int64_t *bounds;           // (world + 1): which range of values and gradients is whose
    int64_t all, piece, pieces;

    mn_tree own;               // of this rank's batches so far: the last node is in the gradients
    float *slots, *scratch;    // the nodes before it, each (all); rows of a piece
    int64_t n_slots, n_scratch;

    mn_tree *nodes;            // (world), in the order of items
    int *owner;                // (world): whose
    mn_tree_sum *sums;
    float **rows;              // (n_rows)
    int n_rows, n_sums, last;
    mn_transfer *transfers;
};

/* ---- who has what ---------------------------------------------------------------------------- */

void mn_device_reduce_batches(const mn_device_reduce *r, int rank, int64_t *first, int64_t *end) {
    const int data_rank = rank / r->sequence;
    *first = r->batches * data_rank / r->data_world;
    *end = r->batches * (data_rank + 1) / r->data_world;
}

/* Items of a rank: with sequences in parts, all batches of part 0, then all of part 1 .. */
static void items_of(const mn_device_reduce *r, int rank, int64_t *first, int64_t *end) {
    mn_device_reduce_batches(r, rank, first, end);
    *first += r->batches * (rank % r->sequence);
    *end += r->batches * (rank % r->sequence);
}

/* The sums of a step, the same in every step. */
static mn_status plan_sums(mn_device_reduce *r) {
    r->nodes = calloc((size_t)r->world, sizeof *r->nodes);
    r->owner = calloc((size_t)r->world, sizeof *r->owner);
    if (!r->nodes || !r->owner) return mn_fail(MN_ERR_MEMORY, "no memory for %d ranks", r->world);
    for (int k = 0; k < r->world; k++) {
        int64_t first, end;
        r->owner[k] = k % r->data_world * r->sequence + k / r->data_world;
        items_of(r, r->owner[k], &first, &end);
        mn_tree_of(&r->nodes[k], first, end);
        r->n_rows += r->nodes[k].n;
        if (r->owner[k] == r->rank) r->last = r->n_rows - 1;
    }
    r->sums = calloc((size_t)r->n_rows, sizeof *r->sums);
    r->rows = calloc((size_t)r->n_rows, sizeof *r->rows);
    r->transfers = calloc((size_t)(r->n_rows + r->world * MN_TREE_DEPTH), sizeof *r->transfers);
    if (!r->sums || !r->rows || !r->transfers) {
        return mn_fail(MN_ERR_MEMORY, "no memory for %d ranks", r->world);
    }
    r->n_sums = mn_tree_plan(r->sums, r->nodes, r->world, r->last);
    return MN_OK;
}

/* ---- batches --------------------------------------------------------------------------------- */

static mn_status add(mn_device_reduce *r, float *out, const float *a, const float *b, int64_t n) {
    const mn_status st = mn_device_use(r->device);
    if (st != MN_OK) return st;
    const int code = mn_add_cuda(out, a, b, n, mn_device_stream(r->device));
    return mn_device_check(r->device, code, "sums of gradients");
}

void mn_device_reduce_begin(mn_device_reduce *r) {
    r->own.n = 0;
}

/* A batch that others of this rank's follow joins those before, or is put aside; the last one stays
 * in the gradients with what joins it. */
mn_status mn_device_reduce_put(mn_device_reduce *r) {
    int64_t first, end;
    items_of(r, r->rank, &first, &end);
    const int64_t done = r->own.n == 0 ? 0 : r->own.first[r->own.n - 1] +
                         (INT64_C(1) << r->own.level[r->own.n - 1]) - first;
    const bool last = first + done + 1 == end;
    mn_tree_push(&r->own, first + done, 0);
    const int at = r->own.n - 1;
    float *to = last ? r->grads : r->slots + at * r->all;
    bool moved = last;
    mn_status st = MN_OK;
    while (st == MN_OK && mn_tree_join(&r->own, false)) {
        float *left = r->slots + (r->own.n - 1) * r->all;
        st = add(r, last ? to : left, left, moved && !last ? left + r->all : r->grads, r->all);
        moved = true;
    }
    if (st != MN_OK || moved) return st;
    return mn_device_copy(r->device, to, r->grads, (size_t)r->all * sizeof *to);
}

/* ---- the sum --------------------------------------------------------------------------------- */

/* Piece k of what is a rank's: [*low, *high). */
static void piece_of(const mn_device_reduce *r, int rank, int64_t k, int64_t *low, int64_t *high) {
    *low = mn_min(r->bounds[rank] + k * r->piece, r->bounds[rank + 1]);
    *high = mn_min(*low + r->piece, r->bounds[rank + 1]);
}

/* Node i of this rank's. */
static float *node_at(const mn_device_reduce *r, int i) {
    return i + 1 == r->own.n ? r->grads : r->slots + i * r->all;
}

static mn_status sum_piece(mn_device_reduce *r, int64_t k) {
    int64_t low, high, from, to, got = 0;
    int n = 0, row = 0;
    piece_of(r, r->rank, k, &low, &high);
    for (int step = 1; step < r->world; step++) {
        const int peer = (r->rank + step) % r->world;
        piece_of(r, peer, k, &from, &to);
        for (int i = 0; i < r->own.n; i++) {
            r->transfers[n++] = (mn_transfer){ peer, true, node_at(r, i) + from,
                                               (size_t)(to - from) * sizeof(float) };
        }
    }
    for (int h = 0; h < r->world; h++) {
        for (int i = 0; i < r->nodes[h].n; i++, row++) {
            if (r->owner[h] == r->rank) {
                r->rows[row] = node_at(r, i) + low;
                continue;
            }
            r->rows[row] = r->scratch + got++ * r->piece;
            r->transfers[n++] = (mn_transfer){ r->owner[h], false, r->rows[row],
                                               (size_t)(high - low) * sizeof(float) };
        }
    }
    mn_status st = mn_nccl_exchange(r->nccl, r->transfers, n, 0, mn_device_stream(r->device));
    for (int i = 0; st == MN_OK && i < r->n_sums && high > low; i++) {
        const mn_tree_sum *s = &r->sums[i];
        st = add(r, r->rows[s->to], r->rows[s->a], r->rows[s->b], high - low);
    }
    return st;
}

mn_status mn_device_reduce_sum(mn_device_reduce *r) {
    mn_status st = mn_device_use(r->device);
    for (int64_t k = 0; st == MN_OK && k < r->pieces; k++) st = sum_piece(r, k);
    return st;
}

mn_status mn_device_reduce_values(mn_device_reduce *r) {
    int n = 0;
    for (int step = 1; step < r->world; step++) {
        const int to = (r->rank + step) % r->world, from = (r->rank + r->world - step) % r->world;
        r->transfers[n++] = (mn_transfer){ to, true, r->values + r->bounds[r->rank],
            (size_t)(r->bounds[r->rank + 1] - r->bounds[r->rank]) * sizeof(float) };
        r->transfers[n++] = (mn_transfer){ from, false, r->values + r->bounds[from],
            (size_t)(r->bounds[from + 1] - r->bounds[from]) * sizeof(float) };
    }
    const mn_status st = mn_device_use(r->device);
    if (st != MN_OK) return st;
    return mn_nccl_exchange(r->nccl, r->transfers, n, 0, mn_device_stream(r->device));
}

/* ---- create ---------------------------------------------------------------------------------- */

/* Where the numbers of all parameters that come before `element` end in the pieces of memory. */
static int64_t place_of(const mn_device_reduce *r, int64_t element) {
    int64_t before = 0;
    const int n = mn_model_params(r->model);
    for (int i = 0; i < n; i++) {
        const mn_model_param *p = mn_model_param_at(r->model, i);
        const int64_t at = (const float *)p->grad - r->grads;
        if (element < before + p->info.count) return at + (element - before);
        before += p->info.count;
    }
    return r->all;
}

/* Checks that values and gradients lie alike, one parameter after the other. */
static mn_status lay_out(mn_device_reduce *r, const int64_t *elements) {
    const int n = mn_model_params(r->model);
    r->values = mn_model_param_at(r->model, 0)->value;
    r->grads = mn_model_param_at(r->model, 0)->grad;
    for (int i = 0; i < n; i++) {
        const mn_model_param *p = mn_model_param_at(r->model, i);
        const int64_t at = (const float *)p->grad - r->grads;
        if ((const float *)p->value - r->values != at || at < r->all || at % LINE != 0) {
            return mn_fail(MN_ERR_INTERNAL, "%s does not lie behind the parameters before it",
                           p->name);
        }
        r->all = at + mn_ceil_div(p->info.count, LINE) * LINE;
    }
    for (int k = 0; k <= r->world; k++) r->bounds[k] = place_of(r, elements[k]);
    return MN_OK;
}

static mn_status take_memory(mn_device_reduce *r) {
    int64_t first, end, widest = 0;
    void *memory;
    items_of(r, r->rank, &first, &end);
    r->n_slots = mn_tree_slots(first, end) * r->all;
    for (int k = 0; k < r->world; k++) {
        widest = mn_max(widest, r->bounds[k + 1] - r->bounds[k]);
    }
    r->piece = mn_max(AT_ONCE / r->n_rows / LINE * LINE, LEAST);
    r->piece = mn_min(r->piece, mn_ceil_div(mn_max(widest, 1), LINE) * LINE);
    r->pieces = r->world > 1 || r->n_sums > 0 ? mn_ceil_div(widest, r->piece) : 0;
    int own = 0;
    for (int k = 0; k < r->world; k++) own += r->owner[k] == r->rank ? r->nodes[k].n : 0;
    r->n_scratch = (r->n_rows - own) * r->piece;
    mn_status st = mn_device_allocate(r->device, &memory, mn_device_reduce_bytes(r));
    if (st == MN_ERR_MEMORY) {
        return mn_fail(st, "the GPU has no memory for sums of gradients, %.1f MiB; a smaller "
                       "train.accumulate or more ranks need less",
                       (double)mn_device_reduce_bytes(r) / 1048576.0);
    }
    r->slots = memory;
    r->scratch = r->slots + r->n_slots;
    return st;
}

mn_status mn_device_reduce_create(mn_device_reduce **out, const mn_device_reduce_options *how) {
    *out = NULL;
    mn_device_reduce *r = calloc(1, sizeof *r);
    if (!r) return mn_fail(MN_ERR_MEMORY, "no memory for sums of gradients");
    r->device = how->device;
    r->nccl = how->nccl;
    r->model = how->model;
    r->rank = how->rank;
    r->world = how->world;
    r->sequence = how->sequence;
    r->data_world = how->world / how->sequence;
    r->batches = how->batches;
    r->bounds = calloc((size_t)r->world + 1, sizeof *r->bounds);
    mn_status st = r->bounds ? lay_out(r, how->elements)
                             : mn_fail(MN_ERR_MEMORY, "no memory for %d ranks", r->world);
    if (st == MN_OK) st = plan_sums(r);
    if (st == MN_OK) st = take_memory(r);
    if (st != MN_OK) {
        mn_device_reduce_destroy(r);
        return st;
    }
    *out = r;
    return MN_OK;
}

void mn_device_reduce_destroy(mn_device_reduce *r) {
    if (!r) return;
    mn_device_free(r->device, r->slots);
    free(r->bounds);
    free(r->nodes);
    free(r->owner);
    free(r->sums);
    free(r->rows);
    free(r->transfers);
    free(r);
}

size_t mn_device_reduce_bytes(const mn_device_reduce *r) {
    return (size_t)(r->n_slots + r->n_scratch) * sizeof(float);
}
