/* reduce.c - sums of gradients in buckets, beside the backward pass. */
#include "train/reduce.h"

#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "base/status.h"
#include "base/util.h"
#include "ranks/tree.h"

/* Parameters [first, end), numbers [low, high) of all parameters one after the other. */
typedef struct bucket {
    int first, end;
    int64_t low, high;
} bucket;

enum { BUCKET = 1 << 20, WHY = 512 };    // numbers that a bucket has at least

/* Transfers of one exchange, grown as needed. */
typedef struct list {
    mn_transfer *items;
    int n, room;
} list;

struct mn_reduce {
    mn_comm *comm;
    mn_model *model;
    int rank, world, sequence, data_world;
    int64_t batches, rounds;
    bool shards;
    bool on_request, whole;    // parameters are sharded, too; all values are there
    int64_t *starts;           // (n_params + 1): where a parameter begins among all numbers
    int64_t *elements;         // (world + 1)
    bucket *buckets;
    int n_buckets, n_blocks;
    int *last_of;              // (n_blocks): buckets complete when block i is

    /* sums of this rank's own batches: node i of `own` is in slots[i], the last one in the
     * gradients; and, where gradients are sharded, of all ranks' batches for its own numbers */
    mn_tree own, sum;
    float *slots, *kept, *scratch;
    int64_t n_slots, n_kept, n_scratch, scratch_row;

    int64_t round;
    bool exchanges, ends;      // in this round: with others; the last one of the step
    list transfers;

    /* the thread: `ready` buckets may be reduced, `done` have been */
    pthread_t thread;
    pthread_mutex_t mutex;
    pthread_cond_t changed;
    bool started, stop;
    int ready, done;
    mn_status status;
    char why[WHY];
};

/* ---- who has what ---------------------------------------------------------------------------- */

int64_t mn_reduce_rounds(const mn_reduce *r) {
    return r->rounds;
}

static int64_t first_batch(const mn_reduce *r, int data_rank) {
    return r->batches * data_rank / r->data_world;
}

int64_t mn_reduce_batch_of(const mn_reduce *r, int rank, int64_t round) {
    const int data_rank = rank / r->sequence;
    if (r->shards) {
        const int64_t batch = round * r->data_world + data_rank;
        return batch < r->batches ? batch : -1;
    }
    const int64_t batch = first_batch(r, data_rank) + round;
    return batch < first_batch(r, data_rank + 1) ? batch : -1;
}

int64_t mn_reduce_batch(const mn_reduce *r, int64_t round) {
    return mn_reduce_batch_of(r, r->rank, round);
}

/* The nodes that a rank sends when ranks talk in this round. */
static void nodes_of(const mn_reduce *r, mn_tree *tree, int rank) {
    const int part = rank % r->sequence, data_rank = rank / r->sequence;
    tree->n = 0;
    if (!r->shards) {
        const int64_t base = r->batches * part;
        mn_tree_of(tree, base + first_batch(r, data_rank), base + first_batch(r, data_rank + 1));
        return;
    }
    const int64_t batch = mn_reduce_batch_of(r, rank, r->round);
    if (batch >= 0) mn_tree_push(tree, batch * r->sequence + part, 0);
}

/* The k-th rank in the order of items. */
static int in_order(const mn_reduce *r, int k) {
    if (r->shards) return k;
    return k % r->data_world * r->sequence + k / r->data_world;
}

/* ---- segments -------------------------------------------------------------------------------- */

/* Walks numbers [low, high) by parameters: false at the end; *p must begin at 0 or before. */
static bool next_segment(const mn_reduce *r, int *p, int64_t *low, int64_t high, int64_t *offset,
                         int64_t *count) {
    if (*low >= high) return false;
    while (r->starts[*p + 1] <= *low) (*p)++;
    *offset = *low - r->starts[*p];
    *count = mn_min(high, r->starts[*p + 1]) - *low;
    *low += *count;
    return true;
}

static float *grad_of(const mn_reduce *r, int p) {
    return mn_model_param_at(r->model, p)->grad;
}

/* What of the bucket is a rank's. */
static void overlap(const mn_reduce *r, const bucket *b, int rank, int64_t *low, int64_t *high) {
    *low = mn_max(b->low, r->elements[rank]);
    *high = mn_max(*low, mn_min(b->high, r->elements[rank + 1]));
}

static mn_status add(list *l, int peer, bool send, void *data, int64_t count) {
    if (count == 0) return MN_OK;
    if (l->n == l->room) {
        const int room = l->room ? 2 * l->room : 64;
        mn_transfer *items = realloc(l->items, (size_t)room * sizeof *items);
        if (!items) return mn_fail(MN_ERR_MEMORY, "no memory for %d messages", room);
        l->items = items;
        l->room = room;
    }
    l->items[l->n++] = (mn_transfer){ peer, send, data, (size_t)count * sizeof(float) };
    return MN_OK;
}

/* ---- one bucket ------------------------------------------------------------------------------ */

/* The nodes of this rank in the bucket that are pairs of the tree become one, in the gradients. */
static void join_own(mn_reduce *r, const bucket *b) {
    mn_tree tree = r->own;
    while (mn_tree_join(&tree, r->world == 1 && r->ends)) {
        const float *left = r->slots + (tree.n - 1) * r->starts[mn_model_params(r->model)];
        int64_t low = b->low, offset, count;
        for (int p = b->first; next_segment(r, &p, &low, b->high, &offset, &count);) {
            mn_tree_add(grad_of(r, p) + offset, left + r->starts[p] + offset, count);
        }
    }
}

static mn_status list_sends(mn_reduce *r, const bucket *b, const mn_tree *own, int to) {
    int64_t low, high, offset, count;
    mn_status st = MN_OK;
    overlap(r, b, to, &low, &high);
    const int64_t all = r->starts[mn_model_params(r->model)];
    for (int k = 0; st == MN_OK && k + 1 < own->n; k++) {
        st = add(&r->transfers, to, true, r->slots + k * all + low, high - low);
    }
    int p = b->first;
    while (st == MN_OK && own->n > 0 && next_segment(r, &p, &low, high, &offset, &count)) {
        st = add(&r->transfers, to, true, grad_of(r, p) + offset, count);
    }
    return st;
}

/* Into rows of the scratch memory from *row on. */
static mn_status list_receives(mn_reduce *r, const bucket *b, int from, int64_t *row) {
    mn_tree nodes;
    int64_t low, high, offset, count;
    mn_status st = MN_OK;
    nodes_of(r, &nodes, from);
    overlap(r, b, r->rank, &low, &high);
    const int64_t length = high - low, start = low;
    for (int k = 0; st == MN_OK && k + 1 < nodes.n; k++) {
        st = add(&r->transfers, from, false, r->scratch + (*row)++ * length, length);
    }
    float *last = r->scratch + *row * length;
    int p = b->first;
    while (st == MN_OK && nodes.n > 0 && next_segment(r, &p, &low, high, &offset, &count)) {
        st = add(&r->transfers, from, false, last + (low - count - start), count);
    }
    *row += nodes.n > 0;
    return st;
}

/* The rows received, in the order of items, onto what was there of earlier rounds. */
static void sum_rows(mn_reduce *r, const bucket *b, int64_t low, int64_t high) {
    const int64_t length = high - low, own = r->elements[r->rank];
    const int64_t owned = r->elements[r->rank + 1] - own;
    float *at[MN_TREE_DEPTH];
    mn_tree tree = r->sum;
    int64_t row = 0;
    for (int k = 0; k < tree.n; k++) at[k] = r->kept + k * owned + (low - own);
    for (int k = 0; k < r->world; k++) {
        mn_tree nodes;
        nodes_of(r, &nodes, in_order(r, k));
        for (int i = 0; i < nodes.n; i++) {
            mn_tree_push(&tree, nodes.first[i], nodes.level[i]);
            at[tree.n - 1] = r->scratch + row++ * length;
            while (mn_tree_join(&tree, false)) mn_tree_add(at[tree.n - 1], at[tree.n], length);
        }
    }
    while (r->ends && mn_tree_join(&tree, true)) mn_tree_add(at[tree.n - 1], at[tree.n], length);
    if (r->ends) {
        int64_t from = low, offset, count;
        for (int p = b->first; next_segment(r, &p, &from, high, &offset, &count);) {
            memcpy(grad_of(r, p) + offset, at[0] + (from - count - low),
                   (size_t)count * sizeof(float));
        }
        return;
    }
    for (int k = 0; k < tree.n; k++) {
        float *to = r->kept + k * owned + (low - own);
        if (to != at[k]) memcpy(to, at[k], (size_t)length * sizeof *to);
    }
}

static mn_status reduce_bucket(mn_reduce *r, const bucket *b) {
    if (!r->shards) join_own(r, b);
    if (r->world == 1) return MN_OK;
    mn_tree own;
    int64_t row = 0, low, high;
    mn_status st = MN_OK;
    nodes_of(r, &own, r->rank);
    r->transfers.n = 0;
    for (int step = 0; st == MN_OK && step < r->world; step++) {
        st = list_sends(r, b, &own, (r->rank + step) % r->world);
    }
    for (int k = 0; st == MN_OK && k < r->world; k++) {
        st = list_receives(r, b, in_order(r, k), &row);
    }
    if (st == MN_OK) st = mn_comm_exchange(r->comm, r->transfers.items, r->transfers.n);
    if (st != MN_OK) return st;
    overlap(r, b, r->rank, &low, &high);
    if (high > low) sum_rows(r, b, low, high);
    return MN_OK;
}

/* ---- parameters on request ------------------------------------------------------------------- */

/* Whole pages of numbers that nobody needs go back to the system; what is left of pages at both
 * ends becomes no number, so that a read without a request shows in the loss. */
static void forget(float *from, int64_t count) {
    const uintptr_t page = (uintptr_t)sysconf(_SC_PAGESIZE), begin = (uintptr_t)from;
    const uintptr_t end = begin + (uintptr_t)count * sizeof *from;
    const uintptr_t low = (begin + page - 1) / page * page, high = end / page * page;
    if (count <= 0) return;
    if (low >= high) {
        memset(from, 0xff, (size_t)(end - begin));
        return;
    }
    memset((void *)begin, 0xff, (size_t)(low - begin));
    memset((void *)high, 0xff, (size_t)(end - high));
    if (madvise((void *)low, (size_t)(high - low), MADV_DONTNEED) != 0) {
        memset((void *)low, 0xff, (size_t)(high - low));
    }
}

/* Values or gradients of parameters [first, end) that are other ranks'. */
static void let_go(mn_reduce *r, int first, int end, bool gradients) {
    const int64_t own = r->elements[r->rank], behind = r->elements[r->rank + 1];
    for (int p = first; p < end; p++) {
        const mn_model_param *param = mn_model_param_at(r->model, p);
        float *at = gradients ? param->grad : param->value;
        const int64_t low = r->starts[p], high = r->starts[p + 1];
        const int64_t before = mn_min(mn_max(own, low), high);
        const int64_t after = mn_min(mn_max(behind, before), high);
        if (!at) continue;
        forget(at, before - low);
        forget(at + (after - low), high - after);
    }
}

/* All ranks get the values of parameters [first, end), each from their owner. */
static mn_status fetch(mn_reduce *r, int first, int end) {
    mn_status st = MN_OK;
    r->transfers.n = 0;
    for (int step = 1; st == MN_OK && first < end && step < r->world; step++) {
        const int peers[2] = { (r->rank + step) % r->world,
                               (r->rank + r->world - step) % r->world };
        for (int k = 0; k < 2; k++) {    // own values to one, those of the other from it
            const int owner = k == 0 ? r->rank : peers[1];
            int64_t low = mn_max(r->elements[owner], r->starts[first]), offset, count;
            const int64_t high = mn_min(r->elements[owner + 1], r->starts[end]);
            for (int p = 0; st == MN_OK && next_segment(r, &p, &low, high, &offset, &count);) {
                float *values = mn_model_param_at(r->model, p)->value;
                st = add(&r->transfers, peers[k], k == 0, values + offset, count);
            }
        }
    }
    return st == MN_OK ? mn_comm_exchange(r->comm, r->transfers.items, r->transfers.n) : st;
}

static void note_failure(mn_reduce *r, mn_status st) {
    if (st == MN_OK || r->status != MN_OK) return;
    r->status = st;
    snprintf(r->why, WHY, "%s", mn_last_error());
}

/* Parameters of no block: [0, *first) and [*end, n). */
static void outside(const mn_reduce *r, int *first, int *end) {
    int from, to;
    *first = mn_model_params(r->model);
    *end = 0;
    for (int i = 0; i < r->n_blocks; i++) {
        mn_model_block_params(r->model, i, &from, &to);
        *first = (int)mn_min(*first, from);
        *end = (int)mn_max(*end, to);
    }
    *end = (int)mn_max(*end, *first);
}

mn_status mn_reduce_open(mn_reduce *r) {
    int first, end;
    const int n = mn_model_params(r->model);
    if (!r->on_request) return MN_OK;
    r->whole = false;
    r->status = MN_OK;
    outside(r, &first, &end);
    let_go(r, 0, n, false);
    let_go(r, 0, n, true);
    const mn_status st = fetch(r, 0, first);
    return st == MN_OK ? fetch(r, end, n) : st;
}

void mn_reduce_enter(void *context, int block) {
    mn_reduce *r = context;
    int first, end;
    if (!r->on_request) return;
    if (block > 0) {
        mn_model_block_params(r->model, block - 1, &first, &end);
        let_go(r, first, end, false);
    }
    mn_model_block_params(r->model, block, &first, &end);
    if (r->status == MN_OK) note_failure(r, fetch(r, first, end));
}

/* The gradients of a block go to who owns them, its values are let go, those of the block before
 * come. */
static void leave(mn_reduce *r, int block) {
    int first, end;
    while (r->done < r->last_of[block]) {
        const bucket *b = &r->buckets[r->done++];
        if (r->status == MN_OK) note_failure(r, reduce_bucket(r, b));
        let_go(r, b->first, b->end, true);
    }
    mn_model_block_params(r->model, block, &first, &end);
    let_go(r, first, end, false);
    if (block == 0) return;
    mn_model_block_params(r->model, block - 1, &first, &end);
    if (r->status == MN_OK) note_failure(r, fetch(r, first, end));
}

void mn_reduce_idle(mn_reduce *r) {
    if (!r->on_request) return;
    for (int i = 0; i < r->n_blocks; i++) mn_reduce_enter(r, i);
    for (int i = r->n_blocks - 1; i >= 0; i--) leave(r, i);
}

mn_status mn_reduce_whole(mn_reduce *r) {
    if (!r->on_request || r->whole) return MN_OK;
    r->whole = true;
    return fetch(r, 0, mn_model_params(r->model));
}

/* ---- the thread ------------------------------------------------------------------------------ */

static void *work(void *context) {
    mn_reduce *r = context;
    pthread_mutex_lock(&r->mutex);
    for (;;) {
        while (!r->stop && r->done >= r->ready) pthread_cond_wait(&r->changed, &r->mutex);
        if (r->stop) break;
        const bucket *b = &r->buckets[r->done];
        mn_status st = r->status;
        pthread_mutex_unlock(&r->mutex);
        if (st == MN_OK) st = reduce_bucket(r, b);
        pthread_mutex_lock(&r->mutex);
        if (st != MN_OK && r->status == MN_OK) {
            r->status = st;
            snprintf(r->why, WHY, "%s", mn_last_error());
        }
        r->done++;
        pthread_cond_broadcast(&r->changed);
    }
    pthread_mutex_unlock(&r->mutex);
    return NULL;
}

static void set_ready(mn_reduce *r, int n) {
    pthread_mutex_lock(&r->mutex);
    if (n > r->ready) r->ready = n;
    pthread_cond_broadcast(&r->changed);
    pthread_mutex_unlock(&r->mutex);
}

void mn_reduce_ready(void *context, int block) {
    mn_reduce *r = context;
    int first, end;
    mn_model_block_params(r->model, block, &first, &end);
    mn_model_settle_some(r->model, first, end);
    if (r->on_request) leave(r, block);
    else if (r->exchanges && r->started && r->last_of[block] > 0) set_ready(r, r->last_of[block]);
}

/* ---- rounds ---------------------------------------------------------------------------------- */

void mn_reduce_begin(mn_reduce *r, int64_t round) {
    const int data_rank = r->rank / r->sequence;
    r->round = round;
    if (r->shards) {
        r->ends = round + 1 == r->rounds;
        r->exchanges = true;
        if (round == 0) r->sum.n = 0;
    } else {
        const int64_t mine = first_batch(r, data_rank + 1) - first_batch(r, data_rank);
        if (round == 0) r->own.n = r->sum.n = 0;
        if (round < mine) {
            const int64_t base = r->batches * (r->rank % r->sequence);
            mn_tree_push(&r->own, base + first_batch(r, data_rank) + round, 0);
        }
        r->ends = r->exchanges = round + 1 == mine;
    }
    pthread_mutex_lock(&r->mutex);
    r->ready = r->done = 0;
    pthread_mutex_unlock(&r->mutex);
}

/* A batch that others of this rank's follow: its gradient joins those before, or is put aside. */
static void keep_own(mn_reduce *r) {
    const int n_params = mn_model_params(r->model);
    const int64_t all = r->starts[n_params];
    const int at = r->own.n - 1;
    const bool joins = mn_tree_join(&r->own, false);
    for (int p = 0; p < n_params; p++) {
        const int64_t count = r->starts[p + 1] - r->starts[p];
        float *to = r->slots + (joins ? at - 1 : at) * all + r->starts[p];
        if (joins) mn_tree_add(to, grad_of(r, p), count);
        else memcpy(to, grad_of(r, p), (size_t)count * sizeof *to);
    }
    if (!joins) return;
    while (mn_tree_join(&r->own, false)) {
        float *left = r->slots + (r->own.n - 1) * all;
        mn_tree_add(left, left + all, all);
    }
}

mn_status mn_reduce_end(mn_reduce *r) {
    if (!r->exchanges) {
        if (!r->shards && mn_reduce_batch(r, r->round) >= 0) keep_own(r);
        return MN_OK;
    }
    mn_status st = MN_OK;
    if (!r->started) {
        st = r->status == MN_OK ? MN_OK : mn_fail(r->status, "%s", r->why);
        for (; st == MN_OK && r->done < r->n_buckets; r->done++) {
            const bucket *b = &r->buckets[r->done];
            st = reduce_bucket(r, b);
            if (r->on_request) let_go(r, b->first, b->end, true);
        }
    } else {
        set_ready(r, r->n_buckets);
        pthread_mutex_lock(&r->mutex);
        while (r->done < r->n_buckets) pthread_cond_wait(&r->changed, &r->mutex);
        st = r->status;
        pthread_mutex_unlock(&r->mutex);
        if (st != MN_OK) st = mn_fail(st, "%s", r->why);
    }
    for (int k = 0; r->shards && k < r->world; k++) {
        mn_tree nodes;
        nodes_of(r, &nodes, k);
        for (int i = 0; i < nodes.n; i++) {
            mn_tree_push(&r->sum, nodes.first[i], nodes.level[i]);
            while (mn_tree_join(&r->sum, false)) continue;
        }
    }
    return st;
}

mn_status mn_reduce_share_values(mn_reduce *r) {
    if (r->world == 1 || r->on_request) return MN_OK;
    return fetch(r, 0, mn_model_params(r->model));
}

/* ---- create ---------------------------------------------------------------------------------- */

static void put_bucket(mn_reduce *r, int first, int end) {
    if (end <= first) return;
    r->buckets[r->n_buckets++] = (bucket){ first, end, r->starts[first], r->starts[end] };
}

/* Blocks from the last to the first, some together, then what is before and behind them. */
static void make_buckets(mn_reduce *r) {
    int first, end, low = -1, high = -1;
    const int n = mn_model_params(r->model);
    int begin = n, finish = 0;
    for (int i = r->n_blocks - 1; i >= 0; i--) {
        mn_model_block_params(r->model, i, &first, &end);
        if (high < 0) high = end;
        low = first;
        begin = (int)mn_min(begin, first);
        finish = (int)mn_max(finish, end);
        if (i > 0 && r->starts[high] - r->starts[low] < BUCKET) continue;
        put_bucket(r, low, high);
        r->last_of[i] = r->n_buckets;
        high = -1;
    }
    put_bucket(r, 0, (int)mn_min(begin, n));
    put_bucket(r, (int)mn_max(finish, begin), n);
}

/* Memory of sums: this rank's own, those of its numbers, and what one exchange brings. */
static mn_status make_room(mn_reduce *r) {
    const int data_rank = r->rank / r->sequence;
    const int64_t all = r->starts[mn_model_params(r->model)];
    const int64_t owned = r->elements[r->rank + 1] - r->elements[r->rank];
    int64_t widest = 0, rows = 0;
    for (int b = 0; b < r->n_buckets; b++) {
        int64_t low, high;
        overlap(r, &r->buckets[b], r->rank, &low, &high);
        widest = mn_max(widest, high - low);
    }
    for (int k = 0; r->world > 1 && k < r->world; k++) {
        mn_tree nodes;
        nodes_of(r, &nodes, k);
        rows += nodes.n;
    }
    if (!r->shards) {
        const int64_t base = r->batches * (r->rank % r->sequence);
        r->n_slots = mn_tree_slots(base + first_batch(r, data_rank),
                                   base + first_batch(r, data_rank + 1)) * all;
    } else if (r->rounds > 1) {
        r->n_kept = (mn_tree_slots(0, r->batches * r->sequence) + 1) * owned;
    }
    r->n_scratch = rows * widest;
    r->slots = malloc((size_t)r->n_slots * sizeof *r->slots + 1);
    r->kept = malloc((size_t)r->n_kept * sizeof *r->kept + 1);
    r->scratch = malloc((size_t)r->n_scratch * sizeof *r->scratch + 1);
    if (r->slots && r->kept && r->scratch) return MN_OK;
    return mn_fail(MN_ERR_MEMORY, "no memory for sums of gradients, %.1f MiB; a smaller "
                   "train.accumulate or train.shard=gradients needs less",
                   (double)mn_reduce_bytes(r) / 1048576.0);
}

static mn_status start_thread(mn_reduce *r) {
    /* where sequences are cut or parameters are sharded, the pass itself talks to other ranks */
    if (r->world == 1 || r->sequence > 1 || r->on_request) return MN_OK;
    if (pthread_create(&r->thread, NULL, work, r) != 0) {
        return mn_fail(MN_ERR_MEMORY, "no thread for messages between ranks");
    }
    r->started = true;
    return MN_OK;
}

mn_status mn_reduce_create(mn_reduce **out, const mn_reduce_options *how) {
    *out = NULL;
    mn_reduce *r = calloc(1, sizeof *r);
    if (!r) return mn_fail(MN_ERR_MEMORY, "no memory for sums of gradients");
    pthread_mutex_init(&r->mutex, NULL);
    pthread_cond_init(&r->changed, NULL);
    const int n = mn_model_params(how->model);
    r->comm = how->comm;
    r->model = how->model;
    r->rank = mn_comm_rank(how->comm);
    r->world = mn_comm_world(how->comm);
    r->sequence = how->sequence;
    r->data_world = r->world / how->sequence;
    r->batches = how->batches;
    r->on_request = how->shards_parameters && r->world > 1;
    r->shards = (how->shards_gradients || how->shards_parameters) && r->world > 1;
    r->whole = true;
    r->rounds = mn_ceil_div(r->batches, r->data_world);
    r->n_blocks = mn_model_describe(how->model)->n_layers;
    r->starts = calloc((size_t)n + 1, sizeof *r->starts);
    r->elements = calloc((size_t)r->world + 1, sizeof *r->elements);
    r->buckets = calloc((size_t)r->n_blocks + 2, sizeof *r->buckets);
    r->last_of = calloc((size_t)r->n_blocks, sizeof *r->last_of);
    mn_status st = r->starts && r->elements && r->buckets && r->last_of
                       ? MN_OK : mn_fail(MN_ERR_MEMORY, "no memory for sums of gradients");
    if (st == MN_OK) {
        for (int i = 0; i < n; i++) {
            r->starts[i + 1] = r->starts[i] + mn_model_param_at(how->model, i)->info.count;
        }
        memcpy(r->elements, how->elements, ((size_t)r->world + 1) * sizeof *r->elements);
        make_buckets(r);
        st = make_room(r);
    }
    if (st == MN_OK) st = start_thread(r);
    if (st != MN_OK) {
        mn_reduce_destroy(r);
        return st;
    }
    *out = r;
    return MN_OK;
}

void mn_reduce_destroy(mn_reduce *r) {
    if (!r) return;
    if (r->started) {
        pthread_mutex_lock(&r->mutex);
        r->stop = true;
        pthread_cond_broadcast(&r->changed);
        pthread_mutex_unlock(&r->mutex);
        pthread_join(r->thread, NULL);
    }
    free(r->transfers.items);
    free(r->slots);
    free(r->kept);
    free(r->scratch);
    free(r->starts);
    free(r->elements);
    free(r->buckets);
    free(r->last_of);
    free(r);
}

size_t mn_reduce_bytes(const mn_reduce *r) {
    return (size_t)(r->n_slots + r->n_kept + r->n_scratch) * sizeof(float);
}
