/* reduce_device.c - sums of gradients between GPUs, and values back.
 *
 * Values and gradients of a model on a GPU lie in one piece of memory each, in the same layout
 * (model/place.c), so that what a rank owns is one range of both.
 *
 * Parameters on request: these pieces lie in pages. What blocks have beside the rank's own numbers
 * shares the memory of one block, so that addresses stay and what is on the stream needs no word of
 * it: values come, a block works, its gradients leave, and the next block's come to the same
 * memory. */
#include "train/reduce_device.h"

#include <stdlib.h>

#include "base/dtype.h"
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
    int64_t batches, rounds, round;
    bool shards;
    bool on_request, whole;    // parameters are sharded, too; all values are there
    const int64_t *optimizer_pieces;    // lent
    float *values, *grads;
    int64_t *bounds;           // (world + 1): which range of values and gradients is whose
    int64_t all, piece, pieces;
    int64_t low, high;         // the range that is summed: [0, all), or that of a block
    int32_t *windows[MN_MODEL_PIECES];    // which pages share memory between steps
    size_t paged;              // bytes of all pages then
    mn_status status;          // of what blocks asked for

    mn_tree own;               // of this rank's batches so far: the last node is in the gradients
    float *slots, *scratch;    // the nodes before it, each (all); rows of a piece
    int64_t n_slots, n_scratch;

    /* of shards: the nodes of all batches so far, of own numbers only */
    mn_tree sum;
    float *kept;
    int64_t n_kept;

    mn_tree *nodes;            // (world), in the order of items
    int *owner;                // (world): whose
    mn_tree_sum *sums;
    float **rows;              // (n_rows)
    int n_rows, n_sums, last;
    mn_transfer *transfers;
};

/* ---- who has what ---------------------------------------------------------------------------- */

int64_t mn_device_reduce_rounds(const mn_device_reduce *r) {
    return r->rounds;
}

static void batches_of(const mn_device_reduce *r, int rank, int64_t *first, int64_t *end) {
    const int data_rank = rank / r->sequence;
    *first = r->batches * data_rank / r->data_world;
    *end = r->batches * (data_rank + 1) / r->data_world;
}

int64_t mn_device_reduce_batch(const mn_device_reduce *r, int rank, int64_t round) {
    int64_t first, end;
    batches_of(r, rank, &first, &end);
    if (r->shards) {
        first = round * r->data_world + rank / r->sequence;
        return first < r->batches ? first : -1;
    }
    return first + round < end ? first + round : -1;
}

/* Items of a rank: with sequences in parts, all batches of part 0, then all of part 1 .. */
static void items_of(const mn_device_reduce *r, int rank, int64_t *first, int64_t *end) {
    batches_of(r, rank, first, end);
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
    r->rows = calloc((size_t)(r->n_rows + r->world), sizeof *r->rows);
    const int64_t told = 2 * r->world * (r->rounds + 1);
    r->transfers = calloc((size_t)(r->n_rows + r->world * MN_TREE_DEPTH + told),
                          sizeof *r->transfers);
    if (!r->sums || !r->rows || !r->transfers) {
        return mn_fail(MN_ERR_MEMORY, "no memory for %d ranks", r->world);
    }
    r->n_sums = mn_tree_plan(r->sums, r->nodes, r->world, r->last);
    return MN_OK;
}

/* ---- parameters by blocks -------------------------------------------------------------------- */

/* Where the numbers of a parameter begin in the pieces of memory. */
static int64_t start_of(const mn_device_reduce *r, int param) {
    if (param == mn_model_params(r->model)) return r->all;
    return (const float *)mn_model_param_at(r->model, param)->grad - r->grads;
}

/* Parameters of no block: [0, *first) and [*end, n). */
static void outside(const mn_device_reduce *r, int *first, int *end) {
    int from, to;
    *first = mn_model_params(r->model);
    *end = 0;
    for (int i = 0; i < mn_model_describe(r->model)->n_layers; i++) {
        mn_model_block_params(r->model, i, &from, &to);
        *first = (int)mn_min(*first, from);
        *end = (int)mn_max(*end, to);
    }
    *end = (int)mn_max(*end, *first);
}

enum { OWN = -1, NOTHING = -2 };

/* Pages with bytes [low, high) belong to `what`, and those that another has bytes of to nobody. */
static void mark(int32_t *of, size_t page, size_t low, size_t high, int32_t what) {
    for (size_t i = low / page; i * page < high; i++) {
        of[i] = of[i] == NOTHING || of[i] == what ? what : OWN;
    }
}

static void mark_params(const mn_device_reduce *r, mn_model_piece piece, int32_t *of, int first,
                        int end, int32_t what) {
    const mn_device_pages *pages = mn_model_pages(r->model, piece);
    const char *base = mn_device_pages_at(pages);
    for (int i = first; i < end; i++) {
        const mn_model_param *p = mn_model_param_at(r->model, i);
        const void *const at[] = { p->value, p->grad, p->shadow };
        const size_t item = mn_dtype_bytes(piece == MN_MODEL_SHADOWS ? MN_BF16 : MN_F32);
        const size_t low = (size_t)((const char *)at[piece] - base);
        mark(of, mn_device_page_bytes(pages), low, low + (size_t)p->info.count * item, what);
    }
}

/* Pages of the rank's own numbers, of no block, and of several blocks have memory of their own; the
 * others that of the block at work. */
static mn_status plan_window(mn_device_reduce *r, mn_model_piece piece) {
    const mn_device_pages *pages = mn_model_pages(r->model, piece);
    const int n_blocks = mn_model_describe(r->model)->n_layers;
    if (!pages) return MN_OK;
    const int64_t n = mn_device_pages_count(pages);
    const size_t page = mn_device_page_bytes(pages);
    int32_t *of = malloc((size_t)n * sizeof *of + 1), next = 0, widest = 0;
    if (!of) return mn_fail(MN_ERR_MEMORY, "no memory for a table of pages");
    r->windows[piece] = of;
    for (int64_t i = 0; i < n; i++) of[i] = NOTHING;
    int first, end;
    outside(r, &first, &end);
    mark_params(r, piece, of, 0, first, OWN);
    mark_params(r, piece, of, end, mn_model_params(r->model), OWN);
    for (int b = 0; b < n_blocks; b++) {
        mn_model_block_params(r->model, b, &first, &end);
        mark_params(r, piece, of, first, end, b);
    }
    const size_t low = (size_t)r->bounds[r->rank] * sizeof(float);
    const size_t high = (size_t)r->bounds[r->rank + 1] * sizeof(float);
    if (piece != MN_MODEL_SHADOWS && high > low) mark(of, page, low, high, OWN);
    int64_t own = 0;
    for (int64_t i = 0, block = OWN; i < n; i++) {
        if (of[i] != block && of[i] >= 0) next = 0, block = of[i];
        own += of[i] < 0;
        of[i] = of[i] < 0 ? OWN : next++;
        widest = (int32_t)mn_max(widest, next);
    }
    r->paged += (size_t)(own + widest) * page;
    return MN_OK;
}

/* All pages have memory of their own, or only those that keep something between blocks. */
static mn_status map_pages(mn_device_reduce *r, bool whole) {
    mn_status st = mn_device_synchronize(r->device);    // the model's is another stream
    for (int i = 0; st == MN_OK && i < MN_MODEL_PIECES; i++) {
        mn_device_pages *pages = mn_model_pages(r->model, i);
        if (!pages || (whole && i == MN_MODEL_GRADIENTS)) continue;
        st = mn_device_pages_map(pages, whole ? NULL : r->windows[i]);
    }
    return st;
}

/* ---- batches --------------------------------------------------------------------------------- */

static mn_status add(mn_device_reduce *r, float *out, const float *a, const float *b, int64_t n) {
    const mn_status st = mn_device_use(r->device);
    if (st != MN_OK) return st;
    const int code = mn_add_cuda(out, a, b, n, mn_device_stream(r->device));
    return mn_device_check(r->device, code, "sums of gradients");
}

void mn_device_reduce_begin(mn_device_reduce *r) {
    r->own.n = r->sum.n = 0;
    r->round = 0;
}

/* A batch that others of this rank's follow joins those before, or is put aside; the last one stays
 * in the gradients with what joins it. */
static mn_status put_own(mn_device_reduce *r) {
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

/* What of [low, high) is a rank's: [*from, *to). */
static void overlap(const mn_device_reduce *r, int rank, int64_t low, int64_t high, int64_t *from,
                    int64_t *to) {
    *from = mn_min(mn_max(low, r->bounds[rank]), high);
    *to = mn_max(*from, mn_min(high, r->bounds[rank + 1]));
}

/* Piece k of what of the range that is summed is a rank's: [*low, *high). */
static void piece_of(const mn_device_reduce *r, int rank, int64_t k, int64_t *low, int64_t *high) {
    int64_t from, to;
    overlap(r, rank, r->low, r->high, &from, &to);
    *low = mn_min(from + k * r->piece, to);
    *high = mn_min(*low + r->piece, to);
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

/* ---- the sum of shards ----------------------------------------------------------------------- */

/* A round's batches lie in the order of ranks: the item of a rank, -1: none. With sequences in
 * parts the parts of a batch are neighbours. */
static int64_t item_of(const mn_device_reduce *r, int rank, int64_t round) {
    return mn_device_reduce_batch(r, rank, round) < 0 ? -1 : round * r->world + rank;
}

/* Sends piece k of each rank's numbers there, and gets those of its own: rows[i] is of the i-th
 * rank that has a batch. */
static mn_status exchange_piece(mn_device_reduce *r, int64_t k, int64_t round) {
    int64_t low, high, from, to;
    int n = 0, row = 0, got = 0;
    piece_of(r, r->rank, k, &low, &high);
    for (int step = 1; step < r->world && item_of(r, r->rank, round) >= 0; step++) {
        const int peer = (r->rank + step) % r->world;
        piece_of(r, peer, k, &from, &to);
        r->transfers[n++] = (mn_transfer){ peer, true, r->grads + from,
                                           (size_t)(to - from) * sizeof(float) };
    }
    for (int h = 0; h < r->world; h++) {
        if (item_of(r, h, round) < 0) continue;
        r->rows[row] = h == r->rank ? r->grads + low : r->scratch + got++ * r->piece;
        if (h != r->rank) {
            r->transfers[n++] = (mn_transfer){ h, false, r->rows[row],
                                               (size_t)(high - low) * sizeof(float) };
        }
        row++;
    }
    return mn_nccl_exchange(r->nccl, r->transfers, n, 0, mn_device_stream(r->device));
}

static mn_status join_rows(mn_device_reduce *r, mn_tree *tree, float **at, int64_t n, bool all) {
    mn_status st = MN_OK;
    while (st == MN_OK && mn_tree_join(tree, all)) {
        st = add(r, at[tree->n - 1], at[tree->n - 1], at[tree->n], n);
    }
    return st;
}

static mn_status copy_row(mn_device_reduce *r, float *to, const float *from, int64_t n) {
    if (to == from) return MN_OK;
    return mn_device_copy(r->device, to, from, (size_t)n * sizeof *to);
}

/* The rows of a round onto those of the rounds before; after the last one the gradients hold their
 * sum. */
static mn_status join_piece(mn_device_reduce *r, int64_t k, int64_t round) {
    const int64_t owned = r->bounds[r->rank + 1] - r->bounds[r->rank];
    int64_t low, high;
    float *at[MN_TREE_DEPTH];
    mn_tree tree = r->sum;
    mn_status st = MN_OK;
    int row = 0;
    piece_of(r, r->rank, k, &low, &high);
    const int64_t n = high - low, offset = low - r->bounds[r->rank];
    for (int i = 0; i < tree.n; i++) at[i] = r->kept + i * owned + offset;
    for (int h = 0; st == MN_OK && h < r->world && n > 0; h++) {
        if (item_of(r, h, round) < 0) continue;
        mn_tree_push(&tree, item_of(r, h, round), 0);
        at[tree.n - 1] = r->rows[row++];
        st = join_rows(r, &tree, at, n, false);
    }
    if (st != MN_OK || n == 0) return st;
    if (round + 1 == r->rounds) {
        st = join_rows(r, &tree, at, n, true);
        return st == MN_OK ? copy_row(r, r->grads + low, at[0], n) : st;
    }
    for (int i = 0; st == MN_OK && i < tree.n; i++) {
        st = copy_row(r, r->kept + i * owned + offset, at[i], n);
    }
    return st;
}

/* Gradients [low, high) of the round to who owns them. */
static mn_status put_range(mn_device_reduce *r, int64_t low, int64_t high, int64_t round) {
    int64_t widest = 0, from, to;
    mn_status st = mn_device_use(r->device);
    for (int rank = 0; rank < r->world; rank++) {
        overlap(r, rank, low, high, &from, &to);
        widest = mn_max(widest, to - from);
    }
    r->low = low;
    r->high = high;
    for (int64_t k = 0; st == MN_OK && k * r->piece < widest; k++) {
        st = exchange_piece(r, k, round);
        if (st == MN_OK) st = join_piece(r, k, round);
    }
    r->low = 0;
    r->high = r->all;
    return st;
}

/* Blocks of parameters on request have put theirs as soon as they had them. */
static mn_status put_shards(mn_device_reduce *r, int64_t round) {
    int first = mn_model_params(r->model), end = first;
    mn_status st = r->status;
    if (r->on_request) outside(r, &first, &end);
    if (st == MN_OK) st = put_range(r, 0, start_of(r, first), round);
    if (st == MN_OK) st = put_range(r, start_of(r, end), r->all, round);
    for (int h = 0; h < r->world; h++) {
        if (item_of(r, h, round) < 0) continue;
        mn_tree_push(&r->sum, item_of(r, h, round), 0);
        while (mn_tree_join(&r->sum, false)) continue;
    }
    r->round = round + 1;
    return st;
}

/* ---- parameters on request ------------------------------------------------------------------- */

/* The bf16 of parameters [first, end), for passes in it. */
static mn_status cast(mn_device_reduce *r, int first, int end) {
    mn_status st = MN_OK;
    for (int i = first; st == MN_OK && i < end; i++) {
        const mn_model_param *p = mn_model_param_at(r->model, i);
        if (!p->shadow) continue;
        const int code = mn_cast_bf16_cuda(p->shadow, p->value, p->info.count,
                                           mn_device_stream(r->device));
        st = mn_device_check(r->device, code, p->name);
    }
    return st;
}

/* All ranks get the values of parameters [first, end), each from who owns them. */
static mn_status fetch(mn_device_reduce *r, int first, int end) {
    const int64_t low = start_of(r, first), high = start_of(r, end);
    int64_t from, to;
    int n = 0;
    for (int step = 1; step < r->world; step++) {
        const int peers[2] = { (r->rank + step) % r->world,
                               (r->rank + r->world - step) % r->world };
        for (int k = 0; k < 2; k++) {    // own values to one, those of the other from it
            overlap(r, k == 0 ? r->rank : peers[1], low, high, &from, &to);
            if (from == to) continue;
            r->transfers[n++] = (mn_transfer){ peers[k], k == 0, r->values + from,
                                               (size_t)(to - from) * sizeof(float) };
        }
    }
    mn_status st = mn_device_use(r->device);
    if (st != MN_OK || first == end) return st;
    st = mn_nccl_exchange(r->nccl, r->transfers, n, 0, mn_device_stream(r->device));
    return st == MN_OK ? cast(r, first, end) : st;
}

static void fetch_block(mn_device_reduce *r, int block) {
    int first, end;
    mn_model_block_params(r->model, block, &first, &end);
    if (r->status == MN_OK) r->status = fetch(r, first, end);
}

/* The gradients of a block go to who owns them, the values of the block before come. */
static void leave(mn_device_reduce *r, int block) {
    int first, end;
    mn_model_block_params(r->model, block, &first, &end);
    if (r->status == MN_OK) {
        r->status = put_range(r, start_of(r, first), start_of(r, end), r->round);
    }
    if (block > 0) fetch_block(r, block - 1);
}

void mn_device_reduce_enter(mn_device_reduce *r, int block) {
    fetch_block(r, block);
}

void mn_device_reduce_ready(mn_device_reduce *r, int block) {
    int first, end;
    mn_model_block_params(r->model, block, &first, &end);
    mn_model_settle_some(r->model, first, end);
    leave(r, block);
}

void mn_device_reduce_idle(mn_device_reduce *r) {
    const int n = mn_model_describe(r->model)->n_layers;
    for (int i = 0; r->on_request && i < n; i++) fetch_block(r, i);
    for (int i = n - 1; r->on_request && i >= 0; i--) leave(r, i);
}

bool mn_device_reduce_on_request(const mn_device_reduce *r) {
    return r->on_request;
}

mn_status mn_device_reduce_open(mn_device_reduce *r) {
    int first, end;
    mn_status st = MN_OK;
    if (!r->on_request) return st;
    r->status = MN_OK;
    if (r->whole) st = map_pages(r, false);
    if (st == MN_OK) r->whole = false;
    outside(r, &first, &end);
    if (st == MN_OK) st = fetch(r, 0, first);
    return st == MN_OK ? fetch(r, end, mn_model_params(r->model)) : st;
}

mn_status mn_device_reduce_whole(mn_device_reduce *r) {
    if (!r->on_request || r->whole) return MN_OK;
    const mn_status st = map_pages(r, true);
    if (st != MN_OK) return st;
    r->whole = true;
    return fetch(r, 0, mn_model_params(r->model));
}

/* ---- a step ---------------------------------------------------------------------------------- */

mn_status mn_device_reduce_put(mn_device_reduce *r, int64_t round) {
    if (r->shards) return put_shards(r, round);
    return mn_device_reduce_batch(r, r->rank, round) < 0 ? MN_OK : put_own(r);
}

mn_status mn_device_reduce_sum(mn_device_reduce *r) {
    mn_status st = mn_device_use(r->device);
    for (int64_t k = 0; st == MN_OK && !r->shards && k < r->pieces; k++) st = sum_piece(r, k);
    return st;
}

/* Items [first, end) of `rank` in an array that every rank gets whole. */
static void list_part(mn_device_reduce *r, int *n, void *all, size_t size, int rank, int64_t first,
                      int64_t end) {
    char *at = (char *)all + (size_t)first * size;
    const size_t bytes = (size_t)(end - first) * size;
    for (int step = 1; step < r->world && rank == r->rank; step++) {
        r->transfers[(*n)++] = (mn_transfer){ (rank + step) % r->world, true, at, bytes };
    }
    if (rank != r->rank) r->transfers[(*n)++] = (mn_transfer){ rank, false, at, bytes };
}

/* Losses of ZeRO-1 are neighbours; those of batches that are dealt out go one by one. */
mn_status mn_device_reduce_tell(mn_device_reduce *r, mn_device_optimizer *o) {
    int n = 0;
    for (int k = 0; k < r->world; k++) {
        const int64_t before = k % r->sequence * r->batches;
        void *losses = mn_device_optimizer_losses(o);
        int64_t first, end;
        list_part(r, &n, mn_device_optimizer_squares(o), sizeof(double), k, r->optimizer_pieces[k],
                  r->optimizer_pieces[k + 1]);
        batches_of(r, k, &first, &end);
        if (!r->shards) {
            list_part(r, &n, losses, sizeof(mn_adamw_loss), k, before + first, before + end);
        }
        for (int64_t round = 0; r->shards && round < r->rounds; round++) {
            const int64_t i = mn_device_reduce_batch(r, k, round);
            if (i < 0) continue;
            list_part(r, &n, losses, sizeof(mn_adamw_loss), k, before + i, before + i + 1);
        }
    }
    return mn_nccl_exchange(r->nccl, r->transfers, n, 0, mn_device_stream(r->device));
}

mn_status mn_device_reduce_values(mn_device_reduce *r) {
    int n = 0;
    if (r->on_request) return MN_OK;
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
    r->high = r->all;
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
    if (r->shards) r->n_slots = 0;
    if (r->shards && r->rounds > 1) {
        r->n_kept = (mn_tree_slots(0, r->batches * r->sequence) + 1) *
                    (r->bounds[r->rank + 1] - r->bounds[r->rank]);
    }
    int own = 0;
    for (int k = 0; k < r->world; k++) own += r->owner[k] == r->rank ? r->nodes[k].n : 0;
    r->n_scratch = (r->shards ? r->world - 1 : r->n_rows - own) * r->piece;
    mn_status st = mn_device_allocate(r->device, &memory, mn_device_reduce_bytes(r));
    if (st == MN_ERR_MEMORY) {
        return mn_fail(st, "the GPU has no memory for sums of gradients, %.1f MiB; a smaller "
                       "train.accumulate or more ranks need less",
                       (double)mn_device_reduce_bytes(r) / 1048576.0);
    }
    r->slots = memory;
    r->kept = r->slots + r->n_slots;
    r->scratch = r->kept + r->n_kept;
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
    r->rounds = mn_ceil_div(r->batches, r->data_world);
    r->on_request = how->shards_parameters && r->world > 1;
    r->shards = (how->shards_gradients || how->shards_parameters) && r->world > 1;
    r->whole = true;
    r->optimizer_pieces = how->pieces;
    r->bounds = calloc((size_t)r->world + 1, sizeof *r->bounds);
    mn_status st = r->bounds ? lay_out(r, how->elements)
                             : mn_fail(MN_ERR_MEMORY, "no memory for %d ranks", r->world);
    if (st == MN_OK) st = plan_sums(r);
    for (int i = 0; st == MN_OK && r->on_request && i < MN_MODEL_PIECES; i++) {
        st = plan_window(r, i);
    }
    mn_device_pages *grads = mn_model_pages(r->model, MN_MODEL_GRADIENTS);
    if (st == MN_OK && r->on_request && grads) {
        st = mn_device_pages_map(grads, r->windows[MN_MODEL_GRADIENTS]);
    }
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
    for (int i = 0; i < MN_MODEL_PIECES; i++) free(r->windows[i]);
    free(r);
}

size_t mn_device_reduce_paged(const mn_device_reduce *r) {
    return r->paged;
}

size_t mn_device_reduce_bytes(const mn_device_reduce *r) {
    return (size_t)(r->n_slots + r->n_kept + r->n_scratch) * sizeof(float);
}
