/* test_cuda_ccq.c - on a GPU ccq_read over a delta-rule memory, whose walk follows curvature while
 * that is at work, gives the bits of curvature and then delta_net, again and again. Sizes lie where
 * kernels choose: blocks that all find a processor and more of them, sequences of several segments,
 * packed ones. Each is tried with a few forms of the operator. Skipped without a GPU. */
#include <stdio.h>
#include <string.h>

#include "base/dtype.h"
#include "base/util.h"
#include "ops/run.h"
#include "ops/sample_device.h"
#include "support/op_device.h"
#include "support/op_walk.h"

static mn_context *gpu;    // NULL: none here

enum { MOST_SEQUENCES = 9, TIMES = 2 };

/* `n` packed sequences whose lengths go through a list, or without one a batch of B. */
static const struct {
    int64_t B, T, H, K, V;
    int n_seqs, n_lengths;
    int64_t lengths[9];
} sizes[] = {
    { 4, 70, 16, 128, 128, 0, 0, { 0 } },
    { 1, 330, 32, 128, 128, 0, 0, { 0 } },
    { 4, 200, 16, 64, 64, 0, 0, { 0 } },
    { 2, 131, 8, 72, 136, 0, 0, { 0 } },
    { 1, 2200, 4, 128, 128, 0, 0, { 0 } },
    { 2, 2, 8, 96, 256, 0, 0, { 0 } },
    { 2, 300, 8, 40, 96, 0, 0, { 0 } },
    { 1, 0, 2, 128, 128, 9, 9, { 1100, 1, 64, 530, 0, 128, 100, 63, 1024 } },
    { 1, 0, 4, 48, 64, 9, 4, { 65, 130, 3, 192 } },
    { 1, 0, 3, 64, 128, 9, 4, { 65, 130, 3, 192 } },
};

/* Curvature and the memory one after the other, results to where those of `args` go. */
static mn_status run_parts(const mn_ccq_read_args *args, mn_out qt) {
    const mn_curvature_args curvature = {
        .call = args->call, .n0 = args->n0, .q = args->q, .k = args->k, .gamma = args->gamma,
        .kk0 = args->kk0, .ks0 = args->ks0, .qt = qt, .kk = args->kk, .ks = args->ks,
    };
    const mn_delta_net_args memory = {
        .call = args->call, .scale = args->scale, .decay = args->decay,
        .q = { qt.data, { qt.stride[0], qt.stride[1], qt.stride[2] } },
        .k = args->k, .v = args->v, .beta = args->beta, .g = args->g, .state0 = args->state0,
        .o = args->o, .state = args->state,
    };
    const mn_status st = mn_op_run(gpu, MN_OP_curvature, MN_FORWARD, &curvature);
    return st == MN_OK ? mn_op_run(gpu, MN_OP_delta_net, MN_FORWARD, &memory) : st;
}

static void compare(const mn_sample *got, const mn_sample *want, const op_case *c, int time) {
    for (int i = 0; i < got->n_tensors; i++) {
        const mn_sample_tensor *t = &got->tensors[i];
        if (t->field->role < MN_ROLE_OUT || !t->data) continue;
        const size_t bytes = (size_t)t->count * mn_dtype_bytes(c->dtype);
        CHECK(memcmp(t->data, want->tensors[i].data, bytes) == 0, "%s: %s differs, time %d",
              op_case_text(c), t->field->name, time);
    }
}

/* The memory of `spare`, a call of curvature, is where the queries go between the parts. */
static void check_case(op_case c) {
    mn_sample got, want, spare;
    mn_device_sample *there = NULL, *apart = NULL, *between = NULL;
    op_case curvature = c;
    curvature.op = MN_OP_curvature, curvature.fields = 0, curvature.decay = 0;
    op_allocate(&got, &c);
    mn_sample_draw_repeated(&got, c.seed);
    op_allocate(&want, &c);
    op_allocate(&spare, &curvature);
    mn_status st = mn_device_sample_create(&there, gpu, &got, MN_BF16);
    if (st == MN_OK) st = mn_device_sample_clone(&apart, there);
    if (st == MN_OK) st = mn_device_sample_create(&between, gpu, &spare, MN_BF16);
    if (st == MN_OK) {
        const mn_curvature_args *q = mn_device_sample_args(between);
        st = run_parts(mn_device_sample_args(apart), q->qt);
    }
    if (st == MN_OK) st = mn_device_sample_fetch(apart, &want);
    for (int time = 0; time < TIMES && st == MN_OK; time++) {
        st = mn_op_run(gpu, MN_OP_ccq_read, MN_FORWARD, mn_device_sample_args(there));
        if (st == MN_OK) st = mn_device_sample_fetch(there, &got);
        if (st == MN_OK) compare(&got, &want, &c, time);
    }
    mn_device_sample_free(there);
    mn_device_sample_free(apart);
    mn_device_sample_free(between);
    mn_sample_free(&got);
    mn_sample_free(&want);
    mn_sample_free(&spare);
    if (st != MN_OK) check_fatal("%s: %s", op_case_text(&c), mn_last_error());
}

static bool has_field(const op_case *c, const char *name) {
    int count;
    const mn_field *fields = mn_op_fields(c->op, &count);
    for (int i = 0; i < count; i++) {
        if (strcmp(fields[i].name, name) == 0) return c->fields >> i & 1;
    }
    return false;
}

static void is_its_parts(mn_op_id op) {
    op_case forms[OP_MAX_FORMS];
    if (op != MN_OP_ccq_read) return;
    if (!gpu) {
        skip();
        return;
    }
    const int n_forms = op_forms(op, forms);
    for (int i = 0; i < (int)MN_COUNTOF(sizes); i++) {
        int64_t cu_seqlens[MOST_SEQUENCES + 1] = { 0 };
        op_case c = forms[i % n_forms];
        c.B = sizes[i].B, c.T = sizes[i].T, c.H = sizes[i].H, c.K = sizes[i].K, c.V = sizes[i].V;
        c.dtype = MN_F32, c.seed = (uint64_t)i + 1;
        for (int n = 0; n < sizes[i].n_seqs; n++) {
            cu_seqlens[n + 1] = cu_seqlens[n] + sizes[i].lengths[n % sizes[i].n_lengths];
        }
        if (sizes[i].n_seqs > 0) {
            c.cu_seqlens = cu_seqlens, c.n_seqs = sizes[i].n_seqs, c.T = cu_seqlens[c.n_seqs];
        }
        for (int f = 0, which = i; f < n_forms; f++) {
            c.decay = forms[f].decay, c.fields = forms[f].fields;
            if (has_field(&c, "beta") && which++ % 2 == 0) check_case(c);
        }
    }
}

int main(int argc, char **argv) {
    return op_visit_device(&gpu, "ccq_read on a GPU is its parts", is_its_parts, argc, argv);
}
