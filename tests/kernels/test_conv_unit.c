/* test_conv_unit.c - conv_unit on the CPU has the bits of conv and then l2_norm, forward and back,
 * at once and packed; and which calls a GPU's own kernel takes. */
#include <string.h>

#include "base/util.h"
#include "kernels/conv_unit.h"
#include "support/check.h"
#include "support/op_walk.h"

/* ---- the bits of its parts ------------------------------------------------------------------- */

static const mn_conv_unit_args *given(const mn_sample *s) {
    return (const mn_conv_unit_args *)s->args;
}

/* Views as they are in memory: contiguous. */
static mn_in in(const void *data) {
    return (mn_in){ .data = data };
}

static mn_out out(void *data) {
    return (mn_out){ .data = data };
}

static mn_conv_args convolution(const mn_conv_unit_args *p) {
    mn_conv_args conv = { .call = p->call, .act = 1, .x = in(p->x.data), .w = in(p->w.data),
                          .bias = in(p->bias.data), .tail0 = in(p->tail0.data) };
    conv.call.V = p->call.H * p->call.K;
    return conv;
}

static mn_l2_norm_args norm(const mn_conv_unit_args *p, const float *a) {
    mn_l2_norm_args unit = { .call = { .dtype = MN_F32 }, .eps = p->eps, .kind = p->kind,
                             .x = in(a) };
    unit.call.B = p->call.B * p->call.T * p->call.H;
    unit.call.V = p->call.K;
    return unit;
}

/* The same call by its parts. */
static void run_parts(mn_context *context, mn_sample *sample, const op_case *c) {
    const mn_conv_unit_args *p = given(sample);
    const size_t count = (size_t)(p->call.B * p->call.T * p->call.H * p->call.K);
    float *a = test_calloc(count, sizeof *a), *da = test_calloc(count, sizeof *da);
    mn_conv_args conv = convolution(p), back = convolution(p);
    mn_l2_norm_args unit = norm(p, a), unit_back = norm(p, a);
    conv.y = out(a), conv.tail = out(p->tail.data);
    unit.y = out(p->y.data);
    unit_back.cot.y = in(p->cot.y.data), unit_back.grad.x = out(da);
    back.cot.y = in(da), back.cot.tail = in(p->cot.tail.data);
    back.grad.x = out(p->grad.x.data), back.grad.w = out(p->grad.w.data);
    back.grad.bias = out(p->grad.bias.data), back.grad.tail0 = out(p->grad.tail0.data);
    mn_status st = mn_op_conv(context, &conv);
    if (st == MN_OK) st = mn_op_l2_norm(context, &unit);
    if (st == MN_OK) st = mn_op_l2_norm_backward(context, &unit_back);
    if (st == MN_OK) st = mn_op_conv_backward(context, &back);
    if (st != MN_OK) check_fatal("%s: %s", op_case_text(c), mn_last_error());
    test_free(a);
    test_free(da);
}

static void check_same_bits(const op_case *c, const char *target) {
    mn_sample got, want;
    op_open(&got, c);
    op_open(&want, c);
    op_run_both(op_context(target, 2), &got, c);
    run_parts(op_context(target, 1), &want, c);
    for (int i = 0; i < want.n_tensors; i++) {
        const void *x = op_memory(&got.tensors[i], OP_COMPUTED);
        const void *y = op_memory(&want.tensors[i], OP_COMPUTED);
        if (!x || !y) continue;
        CHECK(memcmp(x, y, (size_t)want.tensors[i].count * sizeof(float)) == 0,
              "%s %s: %s has other bits than conv and l2_norm", target, op_case_text(c),
              want.tensors[i].field->name);
    }
    mn_sample_free(&got);
    mn_sample_free(&want);
}

static void bits_of_the_parts(void **state) {
    (void)state;
    static const int64_t packing[] = { 0, 1, 3, 3, 70, 260 };
    static const int64_t widths[] = { 3, 8, 64, 72 };
    op_case forms[OP_MAX_FORMS];
    op_target targets[MN_TARGET_COUNT + 1];
    const int n_forms = op_forms(MN_OP_conv_unit, forms), n_targets = op_targets(targets);
    for (int f = 0; f < n_forms; f++) {
        for (size_t w = 0; w < MN_COUNTOF(widths); w++) {
            op_case c = forms[f];
            c.dtype = MN_F32, c.B = 2, c.T = 37, c.H = 3, c.K = widths[w], c.seed = 5 + w;
            if (w % 2) {
                c.B = 1, c.cu_seqlens = packing, c.n_seqs = MN_COUNTOF(packing) - 1;
                c.T = packing[c.n_seqs];
            }
            for (int i = 0; i < n_targets; i++) {
                if (targets[i].dtype == MN_F32) check_same_bits(&c, targets[i].name);
            }
        }
    }
    check_done();
}

/* ---- what the kernel of a GPU takes ---------------------------------------------------------- */

/* A call of heads of K channels whose rows are `row` numbers apart, the first `offset` numbers into
 * memory. */
static mn_conv_unit_args call_of(mn_dtype dtype, int64_t K, int64_t row, int64_t offset) {
    static _Alignas(16) char memory[64];
    const size_t size = dtype == MN_BF16 ? 2 : 4;
    mn_conv_unit_args p = { .call = { .dtype = dtype, .B = 1, .T = 2, .H = 2, .K = K, .W = 4 } };
    p.x = (mn_in){ memory + (size_t)offset * size, { 2 * row, row, K } };
    p.y = (mn_out){ memory, { 4 * K, 2 * K, K } };
    p.w.data = memory;
    return p;
}

static void kernel_takes_whole_packs(void **state) {
    (void)state;
    static const struct {
        mn_dtype dtype;
        int64_t K, row, offset;
        bool takes;
    } cases[] = {
        { MN_BF16, 256, 512, 0, true },   { MN_BF16, 256, 1032, 8, true },
        { MN_BF16, 48, 96, 0, true },     { MN_BF16, 8, 16, 0, true },
        { MN_BF16, 264, 528, 0, false },  { MN_BF16, 44, 96, 0, false },
        { MN_BF16, 256, 516, 0, false },  { MN_BF16, 256, 1024, 4, false },
        { MN_F32, 128, 256, 0, true },    { MN_F32, 44, 88, 4, true },
        { MN_F32, 132, 264, 0, false },   { MN_F32, 128, 256, 2, false },
    };
    if (!mn_device_built()) skip();
    for (size_t i = 0; i < MN_COUNTOF(cases); i++) {
        mn_conv_unit_args p = call_of(cases[i].dtype, cases[i].K, cases[i].row, cases[i].offset);
        for (int pass = MN_FORWARD; pass <= MN_BACKWARD; pass++) {
            CHECK((mn_conv_unit_kernel((mn_pass)pass, &p) != NULL) == cases[i].takes,
                  "case %zu, pass %d", i, pass);
        }
        p.call.W = 3;
        CHECK(!mn_conv_unit_kernel(MN_FORWARD, &p), "case %zu with three taps", i);
        p.call.W = 4, p.x.stride[2] += 8;
        CHECK(!mn_conv_unit_kernel(MN_FORWARD, &p), "case %zu with heads apart", i);
    }
    check_done();
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(bits_of_the_parts),
        cmocka_unit_test(kernel_takes_whole_packs),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
