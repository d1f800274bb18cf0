/* test_cuda_bits.c - packed sequences and the same one by one have the same bits on a GPU, in
 * float32 and in bf16, forward and back: how kernels share work out must not depend on the
 * sequences beside. Packings lie on both sides of where kernels choose: a call of many sequences
 * fills the GPU and one of them does not, a long call is made of short sequences. The same holds
 * for the rows of a batch. Skipped without a GPU.
 *
 * test_cuda_bits [OPERATOR [PACKING | I/N]] runs one operator, and of its packings the one of this
 * number, from 0, or the Ith share of N of all; without I/N, as processes (shares.h). */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/util.h"
#include "ops/run.h"
#include "ops/sample_device.h"
#include "support/op_bits.h"
#include "support/op_device.h"
#include "support/op_walk.h"
#include "support/shares.h"

static mn_context *gpu;    // NULL: none here

enum { MOST_SEQUENCES = 48 };

/* `n` sequences whose lengths go through a list, or without one rows of a batch, as long as the
 * first. */
typedef struct packing {
    const char *about;
    int n, H, K, V;
    int64_t lengths[8];
    int n_lengths;
    bool cut;    // for operators that cut long sequences as delta does
} packing;

static const packing packings[] = {
    { "none, one, a few tokens", 9, 3, 16, 40, { 0, 1, 2, 0, 32, 33, 1, 65 }, 8, false },
    { "many short ones", 40, 4, 64, 64, { 17, 64, 130, 65, 3 }, 5, false },
    { "many, wide", 24, 4, 128, 128, { 96, 200, 64 }, 3, false },
    { "wide memories", 8, 4, 256, 256, { 130, 70 }, 2, false },
    { "a long call of short ones", 10, 1, 8, 32, { 900, 1, 500 }, 3, false },
    { "a long one among short ones", 3, 1, 8, 32, { 300, 4200, 1 }, 3, false },
    { "many heads", 3, 16, 128, 128, { 70, 5, 129 }, 3, false },
    { "many heads, wide memories", 3, 8, 256, 256, { 66, 1, 0 }, 3, false },
    { "rows that fill no packs", 24, 3, 44, 76, { 70, 33, 1, 64 }, 4, false },
    { "a batch", 20, 2, 128, 128, { 130 }, 0, false },
    { "ones that fill a GPU, wide", 40, 2, 128, 128, { 1, 0, 64, 65, 130 }, 5, false },
    { "a batch that fills a GPU", 36, 2, 128, 128, { 130 }, 0, false },
    { "a batch, wide memories", 8, 2, 256, 256, { 67 }, 0, false },
    { "long ones that are cut", 4, 1, 64, 64, { 8200, 70, 9000, 0 }, 4, true },
};

static int chosen = -1;    // packing; -1: all

/* ---- calls ----------------------------------------------------------------------------------- */

static void run_on_gpu(void *dtype, mn_sample *sample, const op_case *c) {
    op_run_device(gpu, sample, c, *(mn_dtype *)dtype);
}

/* Numbers for `to` from a sample of the same sizes that has all of its tensors; false if not. */
static bool take_numbers(mn_sample *to, mn_sample *from) {
    for (int i = 0; i < to->n_tensors; i++) {
        const mn_sample_tensor *t = &to->tensors[i];
        void *out = op_memory(t, OP_GIVEN);
        if (!out) continue;
        const mn_sample_tensor *other = mn_sample_find(from, t->field->name);
        const void *in = other ? op_memory(other, OP_GIVEN) : NULL;
        if (!in || other->count != t->count) return false;
        memcpy(out, in, (size_t)t->count * sizeof(double));
    }
    return true;
}

/* Numbers drawn for one form serve the next ones that need no others. Samples of float32 are held
 * in float32, those of bf16 in float64, rounded. */
static void check_case(op_case c, mn_sample *drawn) {
    mn_sample packed, rounded;
    mn_dtype dtype = MN_F32;
    op_case plain = c;
    c.dtype = MN_F64, plain.dtype = MN_F32;
    op_allocate(&rounded, &c);
    if (!take_numbers(&rounded, drawn)) {
        mn_sample_free(drawn);
        op_open(drawn, &c);
        if (!take_numbers(&rounded, drawn)) check_fatal("%s: no numbers", op_case_text(&c));
    }
    op_allocate(&packed, &plain);
    op_convert(&packed, &rounded);
    op_check_packed("cuda f32", &packed, &plain, run_on_gpu, &dtype);
    mn_sample_free(&packed);
    dtype = MN_BF16;
    mn_sample_round(&rounded, MN_BF16);
    op_check_packed("cuda bf16", &rounded, &c, run_on_gpu, &dtype);
    mn_sample_free(&rounded);
}

static void check_packing(op_case c, const packing *p, mn_sample *drawn) {
    int64_t cu_seqlens[MOST_SEQUENCES + 1] = { 0 };
    c.H = p->H, c.K = p->K, c.V = p->V, c.seed = (uint64_t)(p - packings) + 1;
    if (p->n_lengths == 0) {
        c.B = p->n, c.T = p->lengths[0];
    } else {
        for (int i = 0; i < p->n; i++) {
            cu_seqlens[i + 1] = cu_seqlens[i] + p->lengths[i % p->n_lengths];
        }
        c.B = 1, c.T = cu_seqlens[p->n], c.block = c.T;
        c.cu_seqlens = cu_seqlens, c.n_seqs = p->n;
    }
    check_case(c, drawn);
}

/* ---- the walk -------------------------------------------------------------------------------- */

static void packed_is_separate(mn_op_id op) {
    op_case forms[OP_MAX_FORMS];
    if (!gpu) {
        skip();
        return;
    }
    if (!mn_op_has_cuda(op, MN_FORWARD) || !op_has_time(op)) return;
    bool refused[OP_MAX_FORMS];
    const int n_forms = op_forms(op, forms);
    shares_restart();
    for (int f = 0; f < n_forms; f++) refused[f] = op_is_refused(gpu, forms[f]);
    for (int i = 0; i < (int)MN_COUNTOF(packings); i++) {
        mn_sample drawn = { 0 };
        if (chosen >= 0 && i != chosen) continue;
        if (packings[i].cut && op != MN_OP_delta && op != MN_OP_delta_net) continue;
        for (int f = 0; f < n_forms; f++) {
            if (!refused[f] && shares_next()) check_packing(forms[f], &packings[i], &drawn);
            op_case form = forms[f];
            form.window = 40;
            if (op == MN_OP_attention && shares_next()) check_packing(form, &packings[i], &drawn);
        }
        mn_sample_free(&drawn);
    }
}

static int run_operators(int argc, char **argv) {
    return op_visit_device(&gpu, "packed is separate on a GPU", packed_is_separate, argc, argv);
}

int main(int argc, char **argv) {
    if (argc > 2 && !shares_given(argc, argv)) chosen = atoi(argv[2]);
    return shares_run(argc, argv, run_operators);
}
