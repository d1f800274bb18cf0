/* test_device.c - opening devices, on machines with and without a GPU. What runs on one is checked
 * by `mneme check --target cuda` and tests/cli/cuda.sh. */
#include <string.h>

#include "ops/context.h"
#include "ops/describe.h"
#include "ops/run.h"
#include "runtime/device.h"
#include "support/check.h"

/* Whether a GPU can be used; if not, mn_last_error says why. */
static bool gpu_is_here(void) {
    int count = 0;
    return mn_device_count(&count) == MN_OK && count > 0;
}

static bool says(const char *text) {
    return strstr(mn_last_error(), text) != NULL;
}

static void a_missing_gpu_is_named(void **state) {
    (void)state;
    mn_context *context = NULL;
    const mn_context_options options = { .n_threads = 1, .device = "cuda" };
    const mn_status st = mn_context_create(&context, &options);
    if (gpu_is_here()) {
        assert_int_equal(st, MN_OK);
        assert_string_equal(mn_context_target(context), "cuda");
        assert_int_equal(mn_context_synchronize(context), MN_OK);
        mn_context_destroy(context);
        return;
    }
    assert_int_equal(st, MN_ERR_UNSUPPORTED);
    assert_null(context);
    if (!mn_device_built()) assert_true(says("this build has no CUDA"));
    else assert_true(says("NVIDIA driver") || says("no GPU is visible"));
}

static void names_of_devices(void **state) {
    (void)state;
    static const char *const wrong[] = { "cuda:", "cuda:x", "cuda:1x", "cuda:-1", "gpu", "cuda1",
                                         "cuda:99999999999999999999" };
    for (size_t i = 0; i < sizeof wrong / sizeof *wrong; i++) {
        mn_device *device = NULL;
        assert_int_equal(mn_device_open(&device, wrong[i], NULL), MN_ERR_ARGUMENT);
        assert_null(device);
        assert_true(says(wrong[i]));
    }
    mn_device *device = NULL;
    assert_int_equal(mn_device_open(&device, "cuda:4000", NULL), MN_ERR_UNSUPPORTED);
    assert_null(device);
}

static void options_that_contradict(void **state) {
    (void)state;
    mn_context *context = NULL;
    int there;
    const mn_context_options cpu_kernels = { .target = "ref", .device = "cuda" };
    assert_int_equal(mn_context_create(&context, &cpu_kernels), MN_ERR_ARGUMENT);
    assert_true(says("ref"));
    const mn_context_options stream = { .device = "cpu", .stream = &there };
    assert_int_equal(mn_context_create(&context, &stream), MN_ERR_ARGUMENT);
    assert_true(says("stream"));
    const mn_context_options unknown = { .device = "abacus" };
    assert_int_equal(mn_context_create(&context, &unknown), MN_ERR_ARGUMENT);
    assert_null(context);
}

static void cpu_is_a_device(void **state) {
    (void)state;
    mn_context *context = NULL;
    const mn_context_options options = { .n_threads = 1, .target = "ref", .device = "cpu" };
    assert_int_equal(mn_context_create(&context, &options), MN_OK);
    assert_string_equal(mn_context_target(context), "ref");
    assert_null(context->device);
    assert_int_equal(mn_context_synchronize(context), MN_OK);
    assert_int_equal(mn_context_needs_cpu(context, "this"), MN_OK);
    mn_context_destroy(context);
    assert_int_equal(mn_context_synchronize(NULL), MN_ERR_ARGUMENT);
}

/* The types of a bf16 call: states and WIDE tensors of ops.def are float32, the rest bf16. */
static void types_of_a_bf16_call(void **state) {
    (void)state;
    int count, n_wide = 0;
    for (int op = 0; op < MN_OP_COUNT; op++) {
        const mn_field *fields = mn_op_fields((mn_op_id)op, &count);
        for (int i = 0; i < count; i++) {
            const mn_dtype type = mn_field_dtype(&fields[i], MN_BF16);
            assert_true(type == MN_BF16 || type == MN_F32);
            assert_int_equal(mn_field_dtype(&fields[i], MN_F32), MN_F32);
            assert_int_equal(mn_field_dtype(&fields[i], MN_F64), MN_F64);
            const bool state_row = fields[i].axes[0] == 'N';
            if (state_row || fields[i].law == MN_LAW_CLASS) assert_int_equal(type, MN_F32);
            n_wide += type == MN_F32 && !state_row;
        }
    }
    int n_rows = 0;
#define WIDE(op, name) n_rows++;
#include "ops/ops.def"
    assert_int_equal(n_wide, n_rows);    // each row of the table found its tensor
}

/* Kernels have the way of their target: run on the CPU, launch on a GPU, and a plan. */
static void kernels_have_one_way(void **state) {
    (void)state;
    mn_kernel_table cuda, ref;
    mn_kernel_table_fill_cuda(&cuda);
    assert_int_equal(mn_kernel_table_fill(&ref, MN_TARGET_REF, MN_F32), MN_OK);
    int n_launches = 0;
    for (int id = 0; id < MN_KERNEL_COUNT; id++) {
        for (int pass = 0; pass < MN_PASS_COUNT; pass++) {
            const mn_kernel *kernel = &cuda.kernel[id][pass];
            assert_null(kernel->run);
            assert_int_equal(kernel->launch != NULL, kernel->plan != NULL);
            assert_null(ref.kernel[id][pass].launch);
            n_launches += kernel->launch != NULL;
        }
    }
    assert_int_equal(n_launches > 0, mn_device_built());
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(a_missing_gpu_is_named), cmocka_unit_test(names_of_devices),
        cmocka_unit_test(options_that_contradict), cmocka_unit_test(cpu_is_a_device),
        cmocka_unit_test(types_of_a_bf16_call),    cmocka_unit_test(kernels_have_one_way),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
