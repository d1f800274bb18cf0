/* table.c - every row of kernels.def and spans.def has a reference. */
#include "kernels/overlay.h"
#include "kernels/ref/ref.h"

#define DECLARE(name)                                                                              \
    bool MN_REF(mn_##name##_plan)(const void *args, mn_plan *plan);                                \
    void MN_REF(mn_##name##_run)(const void *args, int phase, int64_t item, void *shared,          \
                                 void *scratch);

#define KERNEL(name) DECLARE(name##_forward) DECLARE(name##_backward)
#include "kernels/kernels.def"
#undef KERNEL
#define SPAN(name) DECLARE(name)
#include "kernels/spans.def"
#undef SPAN

void MN_REF(mn_fill_ref)(mn_kernel_table *table) {
#define PAIR(name) { MN_REF(mn_##name##_plan), MN_REF(mn_##name##_run), "ref", NULL }
#define KERNEL(name)                                                                               \
    table->kernel[MN_KERNEL_##name][MN_FORWARD] = (mn_kernel)PAIR(name##_forward);                 \
    table->kernel[MN_KERNEL_##name][MN_BACKWARD] = (mn_kernel)PAIR(name##_backward);
#include "kernels/kernels.def"
#undef KERNEL
#undef PAIR
}

const mn_kernel MN_REF(mn_spans_ref)[MN_SPAN_COUNT] = {
#define SPAN(name)                                                                                 \
    [MN_SPAN_##name] = { MN_REF(mn_##name##_plan), MN_REF(mn_##name##_run), "ref", NULL },
#include "kernels/spans.def"
#undef SPAN
};
