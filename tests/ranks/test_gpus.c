// labels: sanitize
/* test_gpus.c - ranks on GPUs, without one: NCCL's calls are those of support/programs/fake_nccl.c,
 * and the device is memory of the host, whose backend and kernels are in this file. What a step
 * does with gradients is the same code as on a GPU. */
#define _GNU_SOURCE    // memfd_create
#include <math.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "base/clock.h"
#include "base/rng.h"
#include "base/status.h"
#include "io/json.h"
#include "kernels/adamw_all.h"
#include "ops/run.h"
#include "optim/optimizer_device.h"
#include "ranks/sequence.h"
#include "runtime/device_backend.h"
#include "support/check.h"
#include "support/op_case.h"
#include "support/ranks.h"
#include "train/reduce_device.h"

/* ---- a device in the host's memory ----------------------------------------------------------- */

bool mn_backend_built(void) {
    return true;
}

mn_status mn_backend_count(int *count) {
    *count = 1;
    return MN_OK;
}

mn_status mn_backend_describe(mn_device_info *info, int index) {
    *info = (mn_device_info){ .index = index, .name = "memory", .major = 9, .bytes = 1 << 30,
                              .free_bytes = 1 << 30 };
    return MN_OK;
}

mn_status mn_backend_use(int index) {
    return index == 0 ? MN_OK : mn_fail(MN_ERR_ARGUMENT, "no device %d", index);
}

mn_status mn_backend_check(int code, const char *what) {
    return code == 0 ? MN_OK : mn_fail(MN_ERR_INTERNAL, "%s: %d", what, code);
}

mn_status mn_backend_stream_create(void **stream) {
    static char one;
    *stream = &one;
    return MN_OK;
}

void mn_backend_stream_destroy(void *stream) {
    (void)stream;
}

mn_status mn_backend_synchronize(void *stream) {
    (void)stream;
    return MN_OK;
}

mn_status mn_backend_done(void *stream, bool *done) {
    (void)stream;
    *done = true;
    return MN_OK;
}

mn_status mn_backend_allocate(void **out, size_t bytes) {
    *out = aligned_alloc(256, (bytes + 255) / 256 * 256);
    return *out ? MN_OK : mn_fail(MN_ERR_MEMORY, "no memory");
}

void mn_backend_free(void *data) {
    free(data);
}

mn_status mn_backend_pool_allocate(void **out, size_t bytes, void *stream) {
    (void)stream;
    return mn_backend_allocate(out, bytes);
}

void mn_backend_pool_free(void *data, void *stream) {
    (void)stream;
    free(data);
}

mn_status mn_backend_host_allocate(void **out, size_t bytes) {
    return mn_backend_allocate(out, bytes);
}

void mn_backend_host_free(void *data) {
    free(data);
}

mn_status mn_backend_copy(void *to, const void *from, size_t bytes, mn_backend_way way,
                          void *stream) {
    (void)way, (void)stream;
    memmove(to, from, bytes);
    return MN_OK;
}

mn_status mn_backend_copy_rows(void *to, size_t to_step, const void *from, size_t from_step,
                               size_t bytes, int64_t rows, void *stream) {
    (void)stream;
    for (int64_t i = 0; i < rows; i++) {
        memmove((char *)to + i * (int64_t)to_step, (const char *)from + i * (int64_t)from_step,
                bytes);
    }
    return MN_OK;
}

mn_status mn_backend_fill(void *to, unsigned char value, size_t bytes, void *stream) {
    (void)stream;
    memset(to, value, bytes);
    return MN_OK;
}

/* Pages are files in memory, so that several addresses may lead to one; what no page is behind may
 * not be touched. */
enum { PAGE = 4096 };

mn_status mn_backend_page_bytes(size_t *bytes) {
    *bytes = PAGE;
    return MN_OK;
}

static mn_status put_behind(void *at, size_t bytes, int file, int flags) {
    const int access = file < 0 ? PROT_NONE : PROT_READ | PROT_WRITE;
    return mmap(at, bytes, access, flags, file, 0) == at ? MN_OK : mn_fail(MN_ERR_MEMORY, "map");
}

mn_status mn_backend_reserve(void **out, size_t bytes) {
    *out = mmap(NULL, bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    return *out != MAP_FAILED ? MN_OK : mn_fail(MN_ERR_MEMORY, "no addresses");
}

void mn_backend_unreserve(void *at, size_t bytes) {
    munmap(at, bytes);
}

mn_status mn_backend_page_create(uint64_t *page, size_t bytes) {
    const int file = memfd_create("page", 0);
    if (file < 0 || ftruncate(file, (off_t)bytes) != 0) return mn_fail(MN_ERR_MEMORY, "no page");
    *page = (uint64_t)file;
    return MN_OK;
}

void mn_backend_page_destroy(uint64_t page) {
    close((int)page);
}

mn_status mn_backend_page_map(void *at, uint64_t page, size_t bytes) {
    return put_behind(at, bytes, (int)page, MAP_SHARED | MAP_FIXED);
}

void mn_backend_page_unmap(void *at, size_t bytes) {
    (void)put_behind(at, bytes, -1, MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED);
}

mn_status mn_backend_event_create(void **event) {
    *event = NULL;
    return MN_OK;
}

void mn_backend_event_destroy(void *event) {
    (void)event;
}

mn_status mn_backend_event_record(void *event, void *stream) {
    (void)event, (void)stream;
    return MN_OK;
}

mn_status mn_backend_event_wait(void *event, void *stream) {
    (void)event, (void)stream;
    return MN_OK;
}

mn_status mn_backend_event_seconds(double *seconds, void *from, void *to) {
    (void)from, (void)to;
    *seconds = 0.0;
    return MN_OK;
}

mn_status mn_backend_capture_begin(void *stream) {
    (void)stream;
    return mn_fail(MN_ERR_UNSUPPORTED, "no graphs here");
}

mn_status mn_backend_capture_end(void **graph, void *stream) {
    *graph = NULL;
    return mn_backend_capture_begin(stream);
}

mn_status mn_backend_graph_launch(void *graph, void *stream) {
    (void)graph;
    return mn_backend_capture_begin(stream);
}

void mn_backend_graph_destroy(void *graph) {
    (void)graph;
}

int mn_add_cuda(float *out, const float *a, const float *b, int64_t n, void *stream) {
    (void)stream;
    for (int64_t i = 0; i < n; i++) out[i] = a[i] + b[i];
    return 0;
}

/* The optimiser of this device: who measures what, who decides from what and who updates what are
 * as on a GPU (kernels/adamw_all.h); the update itself is a plain step along the gradient. */
int mn_adamw_squares_cuda(const mn_adamw_all *all, void *stream) {
    (void)stream;
    for (int64_t c = all->first; c < all->first + all->own; c++) {
        const mn_adamw_chunk *chunk = &all->chunks[c];
        const float *g = all->params[chunk->param].g + chunk->first;
        all->squares[c] = 0.0;
        for (int32_t i = 0; i < chunk->count; i++) all->squares[c] += (double)g[i] * (double)g[i];
    }
    return 0;
}

int mn_adamw_decide_cuda(const mn_adamw_all *all, void *stream) {
    (void)stream;
    double sum = 0.0;
    mn_adamw_result r = { .scale = 1.0f };
    for (int64_t c = 0; c < all->n_chunks; c++) sum += all->squares[c];
    for (int64_t i = 0; i < all->n_losses; i++) {
        r.loss += all->losses[i].loss / (double)all->n_losses;
        r.counted += all->losses[i].counted;
    }
    r.norm = sqrt(sum);
    if (all->hparams->clip > 0.0 && r.norm > all->hparams->clip) {
        r.scale = (float)(all->hparams->clip / r.norm);
    }
    r.update = isfinite(r.norm) && isfinite(r.loss) && !(r.loss > all->hparams->loss_limit);
    *all->result = r;
    return 0;
}

int mn_adamw_update_cuda(const mn_adamw_all *all, void *stream) {
    (void)stream;
    for (int64_t c = all->first; c < all->first + all->own && all->result->update; c++) {
        const mn_adamw_chunk *chunk = &all->chunks[c];
        const mn_adamw_param *p = &all->params[chunk->param];
        for (int64_t i = chunk->first; i < chunk->first + chunk->count; i++) {
            p->p[i] -= all->hparams->lr * all->result->scale * p->g[i];
        }
    }
    return 0;
}

int mn_adamw_shadows_cuda(const mn_adamw_all *all, void *stream) {
    (void)all, (void)stream;
    return 0;
}

int mn_cast_bf16_cuda(void *to, const float *from, int64_t n, void *stream) {
    (void)to, (void)from, (void)n, (void)stream;
    return 1;
}

/* ---- a model there --------------------------------------------------------------------------- */

typedef struct host {
    mn_context context;
    mn_model *model;
    int64_t elements[32], pieces[32];
} host;

static bool open_host(host *h, int world, bool pages) {
    static const char text[] = "{\"layers\": \"gdn\", \"num_hidden_layers\": 3, "
                               "\"hidden_size\": 96, \"num_heads\": 3, \"vocab_size\": 211}";
    mn_json root = { 0 };
    mn_model_config config = { 0 };
    memset(h, 0, sizeof *h);
    mn_status st = mn_json_parse(&root, text, strlen(text), "test", MN_JSON_STANDARD);
    if (st == MN_OK) st = mn_model_config_read(&config, &root);
    if (st == MN_OK) st = mn_model_create(&h->model, &config, MN_F32);
    if (st == MN_OK) st = mn_device_open(&h->context.device, "cuda", NULL);
    if (st == MN_OK) mn_model_start(h->model, NULL, 1);
    if (st == MN_OK && pages) mn_model_want_pages(h->model);
    if (st == MN_OK) st = mn_model_place(h->model, &h->context, MN_F32);
    if (st == MN_OK) st = mn_model_want_gradients(h->model);
    mn_model_config_free(&config);
    mn_json_free(&root);
    const int n = st == MN_OK ? mn_model_params(h->model) : 0;
    mn_optim_param *params = calloc((size_t)n + 1, sizeof *params);
    for (int i = 0; i < n; i++) params[i].count = mn_model_param_at(h->model, i)->info.count;
    if (st == MN_OK) mn_optim_shares(params, n, world, h->elements, h->pieces);
    free(params);
    return st == MN_OK && n > 0;
}

static void close_host(host *h) {
    mn_model_destroy(h->model);
    mn_device_close(h->context.device);
}

static float item(int64_t batch, int64_t i) {
    return (float)(mn_rng_uniform(11, (uint64_t)batch, (uint64_t)i) * 3.0 - 1.0);
}

/* The sum over items [first, end) in the order of the tree, by its recursion. */
static float tree_sum(int64_t first, int64_t end, int64_t i) {
    if (end - first == 1) return item(first, i);
    int64_t half = 1;
    while (2 * half < end - first) half *= 2;
    return tree_sum(first, first + half, i) + tree_sum(first + half, end, i);
}

/* Number i of all parameters one after the other, of their gradients or values. */
static void each(host *h, int64_t low, int64_t high, bool grads,
                 bool (*fn)(float *at, int64_t i, int64_t job), int64_t job, bool *ok) {
    int64_t start = 0;
    for (int p = 0; p < mn_model_params(h->model); p++) {
        const mn_model_param *of = mn_model_param_at(h->model, p);
        float *numbers = grads ? of->grad : of->value;
        for (int64_t k = 0; k < of->info.count; k++) {
            const int64_t i = start + k;
            if (i >= low && i < high && !fn(&numbers[k], i, job)) *ok = false;
        }
        start += of->info.count;
    }
}

static bool set_item(float *at, int64_t i, int64_t batch) {
    *at = item(batch, i);
    return true;
}

static bool is_sum(float *at, int64_t i, int64_t items) {
    return *at == tree_sum(0, items, i);
}

static bool set_value(float *at, int64_t i, int64_t rank) {
    (void)rank;
    *at = item(1000, i);
    return true;
}

static bool is_value(float *at, int64_t i, int64_t rank) {
    (void)rank;
    return *at == item(1000, i);
}

/* ---- sums ------------------------------------------------------------------------------------ */

enum { NO_SHARDS, GRADIENTS, PARAMETERS };

typedef struct job {
    int64_t batches;
    int sequence, shards;
} job;

/* The item that a rank's batch is in the tree. */
static int64_t item_number(const job *j, int rank, int64_t batch) {
    return j->shards ? batch * j->sequence + rank % j->sequence
                     : rank % j->sequence * j->batches + batch;
}

/* Numbers of the parameters before parameter `end`. */
static int64_t before(host *h, int end) {
    int64_t n = 0;
    for (int p = 0; p < end; p++) n += mn_model_param_at(h->model, p)->info.count;
    return n;
}

/* What a pass does with parameters that come by blocks: it reads values going forward and back, and
 * leaves gradients going back. */
static bool pass_by_blocks(host *h, mn_device_reduce *r, int64_t item_of_batch) {
    const int n = mn_model_describe(h->model)->n_layers;
    int first, end;
    bool ok = true;
    for (int b = 0; b < n; b++) {
        mn_device_reduce_enter(r, b);
        mn_model_block_params(h->model, b, &first, &end);
        each(h, before(h, first), before(h, end), false, is_value, 0, &ok);
    }
    for (int b = n - 1; b >= 0; b--) {
        mn_model_block_params(h->model, b, &first, &end);
        each(h, before(h, first), before(h, end), false, is_value, 0, &ok);
        each(h, before(h, first), before(h, end), true, set_item, item_of_batch, &ok);
        mn_device_reduce_ready(r, b);
    }
    mn_model_block_params(h->model, 0, &first, &end);
    each(h, 0, before(h, first), true, set_item, item_of_batch, &ok);
    mn_model_block_params(h->model, n - 1, &first, &end);
    each(h, before(h, end), h->elements[0] + mn_model_count(h->model), true, set_item,
         item_of_batch, &ok);
    return ok;
}

static mn_status run_step(host *h, mn_device_reduce *r, const job *j, int rank, int64_t all) {
    bool ok = true;
    mn_status st = MN_OK;
    mn_device_reduce_begin(r);
    st = mn_device_reduce_open(r);
    for (int64_t k = 0; st == MN_OK && k < mn_device_reduce_rounds(r); k++) {
        const int64_t batch = mn_device_reduce_batch(r, rank, k);
        const int64_t number = item_number(j, rank, batch);
        if (batch < 0) mn_device_reduce_idle(r);
        else if (mn_device_reduce_on_request(r)) ok &= pass_by_blocks(h, r, number);
        else each(h, 0, all, true, set_item, number, &ok);
        st = mn_device_reduce_put(r, k);
    }
    if (!ok) return mn_fail(MN_ERR_INTERNAL, "a block had other values");
    return st == MN_OK ? mn_device_reduce_sum(r) : st;
}

static mn_status open_reduce(mn_device_reduce **r, mn_nccl **nccl, const host *h, mn_comm *comm,
                             const job *j) {
    const int rank = mn_comm_rank(comm), world = mn_comm_world(comm);
    const mn_status st = mn_nccl_create(nccl, comm, true);
    if (st != MN_OK) return st;
    const mn_device_reduce_options how = {
        .device = h->context.device, .nccl = *nccl, .model = h->model, .rank = rank,
        .world = world, .sequence = j->sequence, .batches = j->batches,
        .shards_gradients = j->shards == GRADIENTS, .shards_parameters = j->shards == PARAMETERS,
        .elements = h->elements, .pieces = h->pieces };
    return mn_device_reduce_create(r, &how);
}

/* Between steps the pages take what was foretold, and that is less than for all numbers. */
static bool shares_memory(const host *h, const mn_device_reduce *r) {
    const size_t all = 2 * (size_t)mn_model_count(h->model) * sizeof(float);
    const size_t held = mn_model_device_bytes(h->model);
    return held == mn_device_reduce_paged(r) && held < all;
}

static int sum(mn_comm *comm, void *context) {
    const job *j = context;
    const int rank = mn_comm_rank(comm), world = mn_comm_world(comm);
    host h;
    mn_nccl *nccl = NULL;
    mn_device_reduce *r = NULL;
    bool ok = true;
    if (!open_host(&h, world, j->shards == PARAMETERS)) return 2;
    const int64_t all = h.elements[world];
    if (open_reduce(&r, &nccl, &h, comm, j) != MN_OK) return 3;
    each(&h, h.elements[rank], h.elements[rank + 1], false, set_value, rank, &ok);
    for (int step = 0; step < 2; step++) {
        if (run_step(&h, r, j, rank, all) != MN_OK) return 5;
        each(&h, h.elements[rank], h.elements[rank + 1], true, is_sum, j->batches * j->sequence,
             &ok);
        if (!ok) return 6;
        if (mn_device_reduce_on_request(r) && !shares_memory(&h, r)) return 9;
        if (step == 0 && mn_device_reduce_whole(r) != MN_OK) return 10;
        if (step == 0) each(&h, 0, all, false, is_value, rank, &ok);
        if (step == 0 && mn_device_reduce_on_request(r) && !ok) return 11;
        ok = true;
    }
    if (mn_device_reduce_values(r) != MN_OK || mn_device_reduce_whole(r) != MN_OK) return 7;
    each(&h, 0, all, false, is_value, rank, &ok);
    if (!ok) return 8;
    mn_device_reduce_destroy(r);
    mn_nccl_destroy(nccl);
    close_host(&h);
    return 0;
}

static void sums_are_those_of_the_tree_on_any_number_of_gpus(void **state) {
    (void)state;
    static const struct {
        int world;
        job j;
    } cases[] = {
        { 1, { 1, 1, NO_SHARDS } },  { 1, { 7, 1, NO_SHARDS } },   { 2, { 2, 1, NO_SHARDS } },
        { 2, { 7, 1, NO_SHARDS } },  { 3, { 5, 1, NO_SHARDS } },   { 4, { 8, 1, NO_SHARDS } },
        { 2, { 1, 2, NO_SHARDS } },  { 4, { 3, 2, NO_SHARDS } },   { 1, { 7, 1, GRADIENTS } },
        { 2, { 2, 1, GRADIENTS } },  { 2, { 7, 1, GRADIENTS } },   { 3, { 5, 1, GRADIENTS } },
        { 4, { 13, 1, GRADIENTS } }, { 2, { 1, 2, GRADIENTS } },   { 4, { 3, 2, GRADIENTS } },
        { 1, { 3, 1, PARAMETERS } }, { 2, { 2, 1, PARAMETERS } },  { 2, { 7, 1, PARAMETERS } },
        { 3, { 5, 1, PARAMETERS } }, { 4, { 13, 1, PARAMETERS } }, { 4, { 3, 2, PARAMETERS } }
    };
    for (size_t i = 0; i < MN_COUNTOF(cases); i++) {
        int codes[16];
        job j = cases[i].j;
        run_ranks(sum, &j, cases[i].world, codes);
        for (int r = 0; r < cases[i].world; r++) {
            CHECK(codes[r] == 0, "%d ranks, %d batches, %d parts, shards %d: rank %d ends with %d",
                  cases[i].world, (int)j.batches, j.sequence, j.shards, r, codes[r]);
        }
    }
    check_done();
}

/* Where gradients are sharded less is kept beside them: rows of a rank's own numbers and not of
 * all. */
static int count_bytes(mn_comm *comm, void *context) {
    const job *j = context;
    host h;
    mn_nccl *nccl = NULL;
    mn_device_reduce *r[2] = { NULL };
    if (!open_host(&h, mn_comm_world(comm), false)) return 2;
    for (int shards = 0; shards < 2; shards++) {
        job of = *j;
        of.shards = shards;
        if (open_reduce(&r[shards], &nccl, &h, comm, &of) != MN_OK) return 3;
        mn_nccl_destroy(nccl);
    }
    return mn_device_reduce_bytes(r[1]) < mn_device_reduce_bytes(r[0]) ? 0 : 4;
}

static void shards_of_gradients_take_less_memory(void **state) {
    (void)state;
    int codes[16];
    job j = { 16, 1, false };
    run_ranks(count_bytes, &j, 2, codes);
    assert_int_equal(codes[0], 0);
    assert_int_equal(codes[1], 0);
}

/* ---- decisions ------------------------------------------------------------------------------- */

/* A step of all ranks to its decision, with a loss of i for batch i but `odd`, which has 5000. */
static mn_status decide(host *h, mn_device_reduce *r, mn_device_optimizer *o, const job *j,
                        int rank, int64_t odd, mn_optim_outcome *outcome) {
    const int64_t all = mn_model_count(h->model);
    mn_status st = mn_device_optimizer_tell(o, 0, 0.125, 1.0, 20.0);
    if (st == MN_OK) st = run_step(h, r, j, rank, all);
    for (int64_t k = 0; st == MN_OK && k < mn_device_reduce_rounds(r); k++) {
        const int64_t i = mn_device_reduce_batch(r, rank, k);
        const mn_adamw_loss loss = { i == odd ? 5000.0 : (double)i, 32 + i };
        if (i >= 0) st = mn_device_optimizer_loss(o, i, &loss);
    }
    if (st == MN_OK) st = mn_device_optimizer_measure(o);
    if (st == MN_OK) st = mn_device_reduce_tell(r, o);
    if (st == MN_OK) st = mn_device_optimizer_decide(o, j->batches, j->sequence);
    if (st == MN_OK) st = mn_device_reduce_values(r);
    if (st == MN_OK) st = mn_device_optimizer_shadows(o);
    return st == MN_OK ? mn_device_optimizer_ask(o, outcome) : st;
}

static mn_status open_optimizer(mn_device_optimizer **o, host *h, int rank, int world) {
    static const mn_adamw_options how = { .beta1 = 0.9, .beta2 = 0.99, .eps = 1e-8 };
    const int n = mn_model_params(h->model);
    mn_optim_param *params = calloc((size_t)n, sizeof *params);
    if (!params) return MN_ERR_MEMORY;
    for (int i = 0; i < n; i++) {
        const mn_model_param *p = mn_model_param_at(h->model, i);
        params[i] = (mn_optim_param){ .value = p->value, .grad = p->grad, .count = p->info.count,
                                      .lr_scale = 1.0 };
    }
    const mn_status st = mn_device_optimizer_create_part(o, &h->context, params, n, &how, rank,
                                                         world);
    free(params);
    return st;
}

static bool is_number(float *at, int64_t i, int64_t rank) {
    (void)i, (void)rank;
    return isfinite(*at);
}

/* The bytes of all values, so that ranks can be compared. */
static uint64_t values_of(host *h) {
    uint64_t hash = 14695981039346656037u;
    for (int p = 0; p < mn_model_params(h->model); p++) {
        const mn_model_param *of = mn_model_param_at(h->model, p);
        const unsigned char *bytes = of->value;
        for (size_t i = 0; i < (size_t)of->info.count * sizeof(float); i++) {
            hash = (hash ^ bytes[i]) * 1099511628211u;
        }
    }
    return hash;
}

/* Losses of 0 to 6 are no spike; one of 5000 on one rank is, for all of them. */
static int skip_spike(mn_comm *comm, void *context) {
    const job *j = context;
    const int rank = mn_comm_rank(comm), world = mn_comm_world(comm);
    host h;
    mn_nccl *nccl = NULL;
    mn_device_reduce *r = NULL;
    mn_device_optimizer *o = NULL;
    mn_optim_outcome outcome[2];
    uint64_t values[3];
    bool ok = true;
    if (!open_host(&h, world, false) || open_optimizer(&o, &h, rank, world) != MN_OK) return 2;
    if (open_reduce(&r, &nccl, &h, comm, j) != MN_OK) return 3;
    values[0] = values_of(&h);
    for (int step = 0; step < 2; step++) {
        if (decide(&h, r, o, j, rank, step == 0 ? 5 : -1, &outcome[step]) != MN_OK) return 4;
        values[step + 1] = values_of(&h);
        each(&h, 0, h.elements[world], false, is_number, rank, &ok);
    }
    if (!ok || outcome[0].updated || !outcome[1].updated) return 5;
    if (values[0] != values[1] || values[1] == values[2]) return 6;
    if (mn_comm_same(comm, "values", values[2]) != MN_OK) return 7;
    uint64_t bits[2];
    memcpy(&bits[0], &outcome[1].norm, sizeof bits[0]);
    memcpy(&bits[1], &outcome[1].loss, sizeof bits[1]);
    if (mn_comm_same(comm, "norms", bits[0]) != MN_OK) return 8;
    if (mn_comm_same(comm, "losses", bits[1]) != MN_OK) return 9;
    if (outcome[1].loss != 3.0 || outcome[1].counted != 7 * 32 + 21) return 10;
    mn_device_optimizer_destroy(o);
    mn_device_reduce_destroy(r);
    mn_nccl_destroy(nccl);
    close_host(&h);
    return 0;
}

static void a_spike_on_one_gpu_is_skipped_by_all(void **state) {
    (void)state;
    for (int shards = 0; shards < 2; shards++) {
        job j = { 7, 1, shards };
        int codes[16];
        run_ranks(skip_spike, &j, 3, codes);
        for (int r = 0; r < 3; r++) {
            CHECK(codes[r] == 0, "shards %d: rank %d ends with %d", shards, r, codes[r]);
        }
    }
    check_done();
}

/* ---- sequences in parts ---------------------------------------------------------------------- */

enum { TOKENS = 24, KEPT = 8 };

static mn_context *host_context;    // whose kernels the device has

/* A kernel of the device is the host's. */
#define HOST_KERNELS(name)                                                                     \
    static int name##_forward(const void *args, void *shared, void *stream) {                  \
        (void)shared, (void)stream;                                                            \
        return mn_op_run(host_context, MN_OP_##name, MN_FORWARD, (void *)args) != MN_OK;       \
    }                                                                                          \
    static int name##_backward(const void *args, void *shared, void *stream) {                 \
        (void)shared, (void)stream;                                                            \
        return mn_op_run(host_context, MN_OP_##name, MN_BACKWARD, (void *)args) != MN_OK;      \
    }
HOST_KERNELS(conv)
HOST_KERNELS(moebius)
HOST_KERNELS(scan)
HOST_KERNELS(attention)
HOST_KERNELS(relu_attention)
HOST_KERNELS(hyper)

static bool plan_nothing(const void *args, mn_plan *plan) {
    (void)args, (void)plan;
    return true;
}

static void lend_kernels(mn_kernel_table *table) {
    const struct {
        int kernel;
        mn_launch_fn forward, backward;
    } rows[] = { { MN_KERNEL_conv, conv_forward, conv_backward },
                 { MN_KERNEL_moebius, moebius_forward, moebius_backward },
                 { MN_KERNEL_scan, scan_forward, scan_backward },
                 { MN_KERNEL_attention, attention_forward, attention_backward },
                 { MN_KERNEL_relu_attention, relu_attention_forward, relu_attention_backward },
                 { MN_KERNEL_hyper, hyper_forward, hyper_backward } };
    for (size_t i = 0; i < MN_COUNTOF(rows); i++) {
        mn_kernel *of = table->kernel[rows[i].kernel];
        of[MN_FORWARD] = (mn_kernel){ plan_nothing, NULL, "host", rows[i].forward };
        of[MN_BACKWARD] = (mn_kernel){ plan_nothing, NULL, "host", rows[i].backward };
    }
}

typedef struct owner {
    void *kept[KEPT];
    int n;
} owner;

static void *keep(void *context, size_t bytes, bool plan) {
    owner *o = context;
    if (plan) return o;
    return o->n < KEPT ? o->kept[o->n++] = calloc(1, bytes) : NULL;
}

typedef struct cut_job {
    op_case c;
    mn_sample whole;
} cut_job;

/* Numbers of tokens and of states on the ranks that have them: within 1e-4 of the largest number,
 * beside which the roundings of sums over 24 tokens in float32 are 3e-6. */
static bool same_numbers(const cut_job *j, mn_sample *part, int i, int rank, int world) {
    mn_sample_tensor *w = (mn_sample_tensor *)&j->whole.tensors[i], *p = &part->tensors[i];
    const void *want = op_memory(w, OP_COMPUTED), *got = op_memory(p, OP_COMPUTED);
    op_tokens a, b;
    double most = 0.0;
    if (!want || !got) return true;
    for (int64_t k = 0; k < w->count; k++) most = fmax(most, fabs(mn_sample_get(part, want, k)));
    const bool tokens = op_token_layout(&a, &j->whole, w) && op_token_layout(&b, part, p);
    if (!tokens && w->axes[0] != 'N') return true;
    if (!tokens && rank != (w->field->role == MN_ROLE_OPT ? 0 : world - 1)) return true;
    for (int64_t k = 0; k < p->count; k++) {
        const int64_t row = tokens ? b.length * b.inner : p->count;
        const int64_t at = tokens ? k / row * a.length * a.inner + k % row +
                                        rank * b.length * b.inner : k;
        const double x = mn_sample_get(part, got, k), y = mn_sample_get(part, want, at);
        if (fabs(x - y) <= 1e-4 * (most + 1e-3)) continue;
        fprintf(stderr, "%s: rank %d: %s[%lld] is %.9g, in one piece %.9g\n", op_case_text(&j->c),
                rank, w->field->name, (long long)k, x, y);
        return false;
    }
    return true;
}

static int run_cut(mn_comm *comm, void *context) {
    cut_job *j = context;
    const int world = mn_comm_world(comm), rank = mn_comm_rank(comm);
    op_case c = j->c;
    mn_sample part;
    owner own = { .n = 0 };
    mn_context gpu = *host_context;
    mn_nccl *nccl;
    c.T = TOKENS / world;
    op_allocate(&part, &c);
    op_copy_shared(&part, &j->whole, OP_GIVEN);
    op_copy_states(&part, 0, &j->whole, 0, c.B, OP_GIVEN);
    op_copy_tokens(&part, 0, &j->whole, rank * c.T, c.T, OP_GIVEN);
    if (mn_device_open(&gpu.device, "cuda", NULL) != MN_OK) return 2;
    lend_kernels(&gpu.cuda);
    if (mn_nccl_create(&nccl, comm, true) != MN_OK) return 3;
    mn_sequence s = { .comm = comm, .nccl = nccl, .context = &gpu, .keep = keep, .owner = &own };
    mn_status st = mn_sequence_forward(&s, c.op, part.args, false);
    if (st == MN_OK) st = mn_sequence_backward(&s, c.op, part.args, false);
    if (st != MN_OK) {
        fprintf(stderr, "%s: %s\n", op_case_text(&c), mn_last_error());
        return 4;
    }
    bool same = mn_sample_guards_intact(&part);
    for (int i = 0; i < part.n_tensors; i++) same = same_numbers(j, &part, i, rank, world) && same;
    mn_nccl_destroy(nccl);
    mn_device_close(gpu.device);
    mn_sample_free(&part);
    for (int i = 0; i < own.n; i++) free(own.kept[i]);
    return same ? 0 : 5;
}

static void sequences_cross_gpus(void **state) {
    (void)state;
    static const mn_op_id ops[] = { MN_OP_conv,      MN_OP_moebius,        MN_OP_scan,
                                    MN_OP_attention, MN_OP_relu_attention, MN_OP_hyper };
    const mn_context_options how = { .n_threads = 1 };
    assert_int_equal(mn_context_create(&host_context, &how), MN_OK);
    for (size_t i = 0; i < MN_COUNTOF(ops); i++) {
        op_case forms[OP_MAX_FORMS];
        const int n = op_forms(ops[i], forms);
        for (int f = 0; f < n; f++) {
            cut_job j = { .c = forms[f] };
            int codes[16];
            j.c.dtype = MN_F32;
            j.c.B = 2;
            j.c.T = TOKENS;
            j.c.seed = 5;
            j.c.block = op_is_keyed(j.c.op) ? TOKENS + 3 : 0;
            op_open(&j.whole, &j.c);
            assert_int_equal(mn_op_run(host_context, j.c.op, MN_FORWARD, j.whole.args), MN_OK);
            assert_int_equal(mn_op_run(host_context, j.c.op, MN_BACKWARD, j.whole.args), MN_OK);
            run_ranks(run_cut, &j, 3, codes);
            for (int r = 0; r < 3; r++) {
                CHECK(codes[r] == 0, "%s: rank %d ends with %d", op_case_text(&j.c), r, codes[r]);
            }
            mn_sample_free(&j.whole);
        }
    }
    mn_context_destroy(host_context);
    check_done();
}

/* ---- failures -------------------------------------------------------------------------------- */

/* Rank 1 dies; rank 0 waits for its message, which never comes. */
static int lose_one(mn_comm *comm, void *context) {
    (void)context;
    mn_nccl *nccl;
    float number = 0.0f;
    if (mn_nccl_create(&nccl, comm, true) != MN_OK) return 2;
    if (mn_nccl_check(nccl) != MN_OK || mn_comm_barrier(comm) != MN_OK) return 3;
    if (mn_comm_rank(comm) == 1) {
        kill(getpid(), SIGKILL);
    }
    const mn_transfer t = { 1, false, &number, sizeof number };
    const double started = mn_seconds();
    if (mn_nccl_exchange(nccl, &t, 1, 0, NULL) == MN_OK) return 4;
    if (!strstr(mn_last_error(), "rank 1 of 2 is gone") || mn_seconds() - started > 5.0) return 5;
    mn_nccl_abort(nccl);
    if (mn_nccl_check(nccl) == MN_OK) return 6;
    mn_nccl_destroy(nccl);
    return 0;
}

static void a_rank_that_dies_is_named(void **state) {
    (void)state;
    int codes[16];
    run_ranks(lose_one, NULL, 2, codes);
    assert_int_equal(codes[0], 0);
    assert_int_equal(codes[1], -1);
}

/* Rank 1 gives up by the host while rank 0 looks after it. */
static int give_up(mn_comm *comm, void *context) {
    (void)context;
    if (mn_comm_rank(comm) == 1) {
        mn_comm_abort(comm, "no paper left");
        return 0;
    }
    const double started = mn_seconds();
    while (mn_comm_check(comm) == MN_OK) {
        if (mn_seconds() - started > 20.0) return 2;
    }
    if (!strstr(mn_last_error(), "rank 1 gave up: no paper left")) return 3;
    return mn_comm_failed(comm) ? 0 : 4;
}

static void a_rank_that_gives_up_is_heard_without_a_message(void **state) {
    (void)state;
    int codes[16];
    run_ranks(give_up, NULL, 2, codes);
    assert_int_equal(codes[0], 0);
    assert_int_equal(codes[1], 0);
}

/* In a process of its own, as a library that was found stays. */
static int miss(mn_comm *comm, void *context) {
    (void)comm, (void)context;
    int version;
    setenv("MNEME_NCCL", "/nowhere/libnccl.so.2", 1);
    if (mn_nccl_find(&version) == MN_OK) return 2;
    return strstr(mn_last_error(), "MNEME_NCCL: /nowhere/libnccl.so.2 does not open") ? 0 : 3;
}

static void a_missing_library_is_a_sentence(void **state) {
    (void)state;
    int codes[16];
    run_ranks(miss, NULL, 1, codes);
    assert_int_equal(codes[0], 0);
}

int main(void) {
    setenv("MNEME_NCCL", MN_FAKE_NCCL, 1);
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(sums_are_those_of_the_tree_on_any_number_of_gpus),
        cmocka_unit_test(shards_of_gradients_take_less_memory),
        cmocka_unit_test(a_spike_on_one_gpu_is_skipped_by_all),
        cmocka_unit_test(sequences_cross_gpus),
        cmocka_unit_test(a_rank_that_dies_is_named),
        cmocka_unit_test(a_rank_that_gives_up_is_heard_without_a_message),
        cmocka_unit_test(a_missing_library_is_a_sentence),
    };
    return cmocka_run_group_tests_name("gpus", tests, NULL, NULL);
}
