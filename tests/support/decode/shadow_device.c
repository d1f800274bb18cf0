/* shadow_device.c - the device whose memory has tags: its backend, and what takes the place of
 * kernels and of the tape's calls of src/decode. Launches of a recorded step are done when the
 * recording is launched. The linker turns calls of what is called __wrap_NAME here from NAME to it
 * (cmake/Tests.cmake). */
#include <stdlib.h>
#include <string.h>

#include "base/status.h"
#include "base/util.h"
#include "decode/defer.h"
#include "ops/run.h"
#include "runtime/device_backend.h"
#include "support/decode/shadow.h"

/* ---- launches -------------------------------------------------------------------------------- */

typedef enum launch_kind {
    ELEMENTWISE,
    CHAINS,
    GEMMS,
    GEMM,
    OP,
    ATTENTION,
    HYPER,
    MEGAKERNEL,
    COPY
} launch_kind;

typedef struct launch {
    launch_kind kind;
    int id;
    void *to;
    const void *from;
    size_t bytes;
    mn_decode_op first;
    union {
        mn_decode_chains chains;
        mn_decode_gemms gemms;
        mn_gemm_problem gemm;
        mn_decode_attention attention;
        mn_decode_hyper hyper;
        mn_decode_launch_args megakernel;
        _Alignas(16) unsigned char args[MN_MAX_ARGS_BYTES];
    } of;
} launch;

static launch *recorded;
static int n_recorded, most_recorded, n_blocks;
static bool captures;
static shadow_order order;
static uint64_t seed;
static shadow_counts counts;
static mn_decode_op *jobs;
static int n_jobs, most_jobs;

void shadow_start(int blocks, shadow_order how, uint64_t from) {
    shadow_clear();
    n_blocks = blocks;
    order = how;
    seed = from;
    n_recorded = n_jobs = 0;
    captures = false;
    counts = (shadow_counts){ .trace = 1 };
}

shadow_counts shadow_counted(void) {
    return counts;
}

int shadow_job_note(const mn_decode_op *work) {
    if (n_jobs == most_jobs) {
        most_jobs = 2 * most_jobs + 256;
        jobs = realloc(jobs, (size_t)most_jobs * sizeof *jobs);
        if (!jobs) abort();
    }
    jobs[n_jobs] = *work;
    return n_jobs++;
}

const mn_decode_op *shadow_job_at(int i) {
    return &jobs[i];
}

static void run_chains(const mn_decode_chains *p) {
    for (int i = 0; i < p->first[p->n_chains]; i++) {
        shadow_small(&p->work[i], 0, shadow_small_units(&p->work[i]));
    }
}

static void run_gemms(const launch *l) {
    const mn_decode_gemms *p = &l->of.gemms;
    if (p->first) shadow_small(&l->first, 0, shadow_small_units(&l->first));
    for (int i = 0; i < p->n; i++) {
        const mn_decode_gemm *g = &p->of[i];
        shadow_gemm(&(mn_gemm_problem){ .dtype = p->dtype, .c_dtype = p->dtype, .a = p->a,
            .b = g->b, .bias = g->bias, .c = g->c, .M = p->M, .N = g->N, .K = p->K,
            .a_row = p->a_row, .b_row = g->b_row, .c_row = g->N, .b_transposed = true,
            .quant = g->quant });
        if (!g->sum) continue;
        const int64_t shape[4] = { 1, 1, p->M, g->N };
        mn_pair_params sum = { .kind = MN_PAIR_ADD, .a = mn_flat_view(g->c, p->dtype, shape),
                               .b = mn_flat_view((void *)(uintptr_t)g->plus, p->dtype, shape),
                               .y = mn_flat_view(g->sum, p->dtype, shape) };
        memcpy(sum.shape, shape, sizeof shape);
        shadow_elementwise(MN_ELEMENTWISE_PAIR, &sum);
    }
}

static void run(const launch *l) {
    shadow_use(SHADOW_DONE);
    counts.launches++;
    counts.apart += l->kind == OP || l->kind == ATTENTION || l->kind == HYPER;
    switch (l->kind) {
    case ELEMENTWISE: shadow_elementwise(l->id, l->of.args); break;
    case CHAINS: run_chains(&l->of.chains); break;
    case GEMMS: run_gemms(l); break;
    case GEMM: shadow_gemm(&l->of.gemm); break;
    case OP: shadow_op((mn_op_id)l->id, l->of.args); break;
    case ATTENTION: shadow_attention(&l->of.attention); break;
    case HYPER: shadow_hyper(&l->of.hyper); break;
    case MEGAKERNEL:
        shadow_megakernel(&l->of.megakernel, l->to, n_blocks, order, &seed, &counts);
        break;
    case COPY: shadow_copied(l->to, l->from, l->bytes); break;
    }
}

static int submit(const launch *l) {
    if (captures && l->kind == COPY) shadow_fail("a copy is recorded");
    if (!captures) {
        run(l);
        return 0;
    }
    if (n_recorded == most_recorded) {
        most_recorded = 2 * most_recorded + 64;
        recorded = realloc(recorded, (size_t)most_recorded * sizeof *recorded);
        if (!recorded) abort();
    }
    recorded[n_recorded++] = *l;
    return 0;
}

/* ---- what the tape asks for ------------------------------------------------------------------ */

bool __real_mn_defer_elementwise(mn_tape *tape, mn_elementwise_id id, const void *work);
bool __wrap_mn_defer_elementwise(mn_tape *tape, mn_elementwise_id id, const void *work);
bool __real_mn_defer_gemm(mn_tape *tape, const mn_matmul_args *p);
bool __wrap_mn_defer_gemm(mn_tape *tape, const mn_matmul_args *p);
bool __real_mn_defer_op(mn_tape *tape, mn_op_id op, const void *args);
bool __wrap_mn_defer_op(mn_tape *tape, mn_op_id op, const void *args);
bool __real_mn_defer_attention(mn_tape *tape, const mn_decode_attention *p);
bool __wrap_mn_defer_attention(mn_tape *tape, const mn_decode_attention *p);
bool __real_mn_defer_hyper(mn_tape *tape, const mn_decode_hyper *p);
bool __wrap_mn_defer_hyper(mn_tape *tape, const mn_decode_hyper *p);

bool __wrap_mn_defer_elementwise(mn_tape *tape, mn_elementwise_id id, const void *work) {
    shadow_use(SHADOW_ASKED);
    if (mn_tape_runs(tape)) shadow_elementwise(id, work);
    return __real_mn_defer_elementwise(tape, id, work);
}

bool __wrap_mn_defer_gemm(mn_tape *tape, const mn_matmul_args *p) {
    const mn_gemm_problem work = mn_matmul_work_of(p);
    shadow_use(SHADOW_ASKED);
    if (mn_tape_runs(tape)) shadow_gemm(&work);
    return __real_mn_defer_gemm(tape, p);
}

bool __wrap_mn_defer_op(mn_tape *tape, mn_op_id op, const void *args) {
    shadow_use(SHADOW_ASKED);
    if (mn_tape_runs(tape)) shadow_op(op, args);
    return __real_mn_defer_op(tape, op, args);
}

bool __wrap_mn_defer_attention(mn_tape *tape, const mn_decode_attention *p) {
    shadow_use(SHADOW_ASKED);
    if (mn_tape_runs(tape)) shadow_attention(p);
    return __real_mn_defer_attention(tape, p);
}

bool __wrap_mn_defer_hyper(mn_tape *tape, const mn_decode_hyper *p) {
    shadow_use(SHADOW_ASKED);
    if (mn_tape_runs(tape)) shadow_hyper(p);
    return __real_mn_defer_hyper(tape, p);
}

/* ---- kernels --------------------------------------------------------------------------------- */

mn_status __wrap_mn_op_run(mn_context *context, mn_op_id op, mn_pass pass, const void *args);

mn_status __wrap_mn_op_run(mn_context *context, mn_op_id op, mn_pass pass, const void *args) {
    launch l = { .kind = OP, .id = op };
    (void)context;
    if (pass != MN_FORWARD) return mn_fail(MN_ERR_UNSUPPORTED, "no gradients here");
    memcpy(l.of.args, args, mn_op_describe(op)->args_bytes);
    submit(&l);
    return MN_OK;
}

static int submit_work(int id, const void *work, size_t bytes) {
    launch l = { .kind = ELEMENTWISE, .id = id };
    memcpy(l.of.args, work, bytes);
    return submit(&l);
}

/* The works that steps of these models are made of; a test that comes to another one ends. */
#define WORKS(DO)                                                                                  \
    DO(MN_ELEMENTWISE_MOVE, move)                                                                  \
    DO(MN_ELEMENTWISE_FILL, fill)                                                                  \
    DO(MN_ELEMENTWISE_UNARY, unary)                                                                \
    DO(MN_ELEMENTWISE_PAIR, pair)                                                                  \
    DO(MN_ELEMENTWISE_ROWS, rows)

#define DEFINE(which, name)                                                                        \
    static int name##_work(void *where, const void *work, void *memory) {                          \
        (void)where, (void)memory;                                                                 \
        return submit_work(which, work, sizeof(mn_##name##_params));                               \
    }
WORKS(DEFINE)

const mn_elementwise_fn *__wrap_mn_elementwise_cuda(void);

const mn_elementwise_fn *__wrap_mn_elementwise_cuda(void) {
#define ENTRY(which, name) [which] = { name##_work, NULL },
    static const mn_elementwise_fn works[MN_N_ELEMENTWISE] = { WORKS(ENTRY) };
    return works;
}

int __wrap_mn_cast_bf16_cuda(void *to, const float *from, int64_t n, void *stream);
mn_gemm_handle *__wrap_mn_gemm_create(void);
void __wrap_mn_gemm_destroy(mn_gemm_handle *gemms);
int __wrap_mn_gemm_run(mn_gemm_handle *gemms, const mn_gemm_problem *work, void *space,
                       void *stream);
bool __wrap_mn_gemm_rows_supported(const mn_gemm_problem *work);
bool __wrap_mn_decode_gemms_supported(const mn_gemm_problem *work);
int __wrap_mn_decode_run_chains(const mn_decode_chains *parts, void *stream);
int __wrap_mn_decode_run_gemms(const mn_decode_gemms *gemms, void *stream);
int __wrap_mn_decode_run_attention(const mn_decode_attention *attention, void *stream);
int __wrap_mn_decode_run_hyper(const mn_decode_hyper *hyper, void *stream);
int __wrap_mn_megakernel_blocks(void);
bool __wrap_mn_megakernel_takes_step(mn_decode_step_kind step, const void *args);
void __wrap_mn_megakernel_fill_job(void *to, const mn_decode_op *work, int64_t begin, int64_t end,
                                   int turn, bool waits);
int __wrap_mn_megakernel_start(const mn_decode_launch_args *given, void *image, void *stream);

/* Parameters are what they are. */
int __wrap_mn_cast_bf16_cuda(void *to, const float *from, int64_t n, void *stream) {
    (void)to, (void)from, (void)n, (void)stream;
    return 0;
}

mn_gemm_handle *__wrap_mn_gemm_create(void) {
    static char one;
    return (mn_gemm_handle *)&one;
}

void __wrap_mn_gemm_destroy(mn_gemm_handle *gemms) {
    (void)gemms;
}

int __wrap_mn_gemm_run(mn_gemm_handle *gemms, const mn_gemm_problem *work, void *space,
                       void *stream) {
    (void)gemms, (void)space, (void)stream;
    return submit(&(launch){ .kind = GEMM, .of.gemm = *work });
}

bool __wrap_mn_gemm_rows_supported(const mn_gemm_problem *work) {
    (void)work;
    return false;
}

/* As decode_gemv.cu has it, for bf16. */
bool __wrap_mn_decode_gemms_supported(const mn_gemm_problem *w) {
    return !w->quant && w->dtype == MN_BF16 && w->M <= MN_DECODE_MAX_M && w->b_transposed &&
           !w->a_transposed && !w->accumulate && w->c_dtype == w->dtype && w->K > 0 &&
           w->K % 8 == 0 && w->a_row % 8 == 0 && w->b_row % 8 == 0 && (uintptr_t)w->a % 16 == 0 &&
           (uintptr_t)w->b % 16 == 0 && w->M * w->K < 64 * 1024 && w->c_row == w->N;
}

int __wrap_mn_decode_run_chains(const mn_decode_chains *parts, void *stream) {
    (void)stream;
    return submit(&(launch){ .kind = CHAINS, .of.chains = *parts });
}

int __wrap_mn_decode_run_gemms(const mn_decode_gemms *gemms, void *stream) {
    (void)stream;
    launch *l = calloc(1, sizeof *l);
    if (!l) return 2;
    l->kind = GEMMS;
    l->of.gemms = *gemms;
    if (gemms->first) l->first = *gemms->first;
    submit(l);
    free(l);
    return 0;
}

int __wrap_mn_decode_run_attention(const mn_decode_attention *attention, void *stream) {
    (void)stream;
    return submit(&(launch){ .kind = ATTENTION, .of.attention = *attention });
}

int __wrap_mn_decode_run_hyper(const mn_decode_hyper *hyper, void *stream) {
    (void)stream;
    return submit(&(launch){ .kind = HYPER, .of.hyper = *hyper });
}

int __wrap_mn_megakernel_blocks(void) {
    return n_blocks;
}

static bool is_even(const mn_in *view, uintptr_t bytes) {
    bool even = (uintptr_t)view->data % bytes == 0;
    for (int i = 0; i < 3; i++) even = even && view->stride[i] % 4 == 0;
    return even;
}

/* What headers of the operators say (OP_step_supported), for bf16. */
bool __wrap_mn_megakernel_takes_step(mn_decode_step_kind step, const void *args) {
    if (step == MN_DECODE_STEP_importance) {
        const mn_importance_args *p = args;
        const mn_in *wide[] = { &p->mu0, &p->imp0, (const mn_in *)&p->mu, (const mn_in *)&p->imp };
        bool even = p->call.V % 4 == 0 && is_even(&p->v, 8) && is_even(&p->b, 8) &&
                    is_even((const mn_in *)&p->o, 8) && is_even((const mn_in *)&p->ovar, 8);
        for (size_t i = 0; i < MN_COUNTOF(wide); i++) even = even && is_even(wide[i], 16);
        return even;
    }
    if (step == MN_DECODE_STEP_moebius) {
        const mn_moebius_args *p = args;
        return p->a.data && p->p.data;
    }
    if (step == MN_DECODE_STEP_bayes) {
        const mn_bayes_args *p = args;
        return p->call.K % 4 == 0 && p->call.K <= 128 && p->P0.data && is_even(&p->P0, 16) &&
               is_even((const mn_in *)&p->P, 16) && !p->theta.data;
    }
    if (step == MN_DECODE_STEP_mesa) {
        const mn_mesa_args *p = args;
        return p->o.data && p->steps == 0 && p->call.K <= 128;
    }
    return true;
}

/* Packed elements come four at a time. */
void __wrap_mn_megakernel_fill_job(void *to, const mn_decode_op *work, int64_t begin, int64_t end,
                                   int turn, bool waits) {
    const shadow_job job = { shadow_job_note(work), waits, begin, end };
    (void)turn;
    memcpy(to, &job, sizeof job);
}

int __wrap_mn_megakernel_start(const mn_decode_launch_args *given, void *image, void *stream) {
    (void)stream;
    return submit(&(launch){ .kind = MEGAKERNEL, .to = image, .of.megakernel = *given });
}

/* ---- the backend ----------------------------------------------------------------------------- */

bool mn_backend_built(void) {
    return true;
}

mn_status mn_backend_count(int *count) {
    *count = 1;
    return MN_OK;
}

mn_status mn_backend_describe(mn_device_info *info, int index) {
    *info = (mn_device_info){ .index = index, .name = "shadow", .major = 9,
                              .n_processors = n_blocks, .bytes = (size_t)1 << 30,
                              .free_bytes = (size_t)1 << 30 };
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
    *out = shadow_allocate(bytes);
    return *out ? MN_OK : mn_fail(MN_ERR_MEMORY, "the device has no %zu bytes", bytes);
}

void mn_backend_free(void *data) {
    (void)data;
}

mn_status mn_backend_pool_allocate(void **out, size_t bytes, void *stream) {
    (void)stream;
    return mn_backend_allocate(out, bytes);
}

void mn_backend_pool_free(void *data, void *stream) {
    (void)data, (void)stream;
}

mn_status mn_backend_host_allocate(void **out, size_t bytes) {
    return mn_backend_allocate(out, bytes);
}

void mn_backend_host_free(void *data) {
    (void)data;
}

mn_status mn_backend_copy(void *to, const void *from, size_t bytes, mn_backend_way way,
                          void *stream) {
    (void)stream;
    if (way == MN_ON_DEVICE) {
        submit(&(launch){ .kind = COPY, .to = to, .from = from, .bytes = bytes });
        return MN_OK;
    }
    memmove(to, from, bytes);
    if (way == MN_TO_DEVICE) shadow_forget(to, bytes);
    return MN_OK;
}

mn_status mn_backend_copy_rows(void *to, size_t to_step, const void *from, size_t from_step,
                               size_t bytes, int64_t rows, void *stream) {
    mn_status st = MN_OK;
    for (int64_t i = 0; i < rows && st == MN_OK; i++) {
        st = mn_backend_copy((char *)to + i * (int64_t)to_step,
                             (const char *)from + i * (int64_t)from_step, bytes, MN_ON_DEVICE,
                             stream);
    }
    return st;
}

mn_status mn_backend_fill(void *to, unsigned char value, size_t bytes, void *stream) {
    (void)stream;
    memset(to, value, bytes);
    shadow_forget(to, bytes);
    return MN_OK;
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
    captures = true;
    n_recorded = 0;
    return MN_OK;
}

mn_status mn_backend_capture_end(void **graph, void *stream) {
    *graph = stream;
    captures = false;
    return MN_OK;
}

mn_status mn_backend_graph_launch(void *graph, void *stream) {
    (void)graph, (void)stream;
    for (int i = 0; i < n_recorded; i++) run(&recorded[i]);
    return MN_OK;
}

void mn_backend_graph_destroy(void *graph) {
    (void)graph;
}
