/* overlay.c - puts the vector kernels of this target over the references. */
#include "kernels/overlay.h"
#include "kernels/cpu/simd/target.h"

#define VEC(kernel, pass, name)                                                                    \
    bool MN_T(mn_##name##_plan)(const void *args, mn_plan *plan);                                  \
    void MN_T(mn_##name##_run)(const void *args, int phase, int64_t item, void *shared,            \
                               void *scratch);
#include "kernels/cpu/cpu_kernels.def"
#undef VEC
#define SPAN(name)                                                                                 \
    bool MN_T(mn_##name##_plan)(const void *args, mn_plan *plan);                                  \
    void MN_T(mn_##name##_run)(const void *args, int phase, int64_t item, void *shared,            \
                               void *scratch);
#include "kernels/spans.def"
#undef SPAN

#define MN_QUOTE(name) #name
#define MN_QUOTE_EXPANDED(name) MN_QUOTE(name)

void MN_T(mn_overlay)(mn_kernel_table *table) {
    (void)table;
#define VEC(id, pass, name)                                                                        \
    table->kernel[MN_KERNEL_##id][MN_##pass] =                                                     \
        (mn_kernel){ MN_T(mn_##name##_plan), MN_T(mn_##name##_run),                                \
                     MN_QUOTE_EXPANDED(MN_TARGET), NULL };
#include "kernels/cpu/cpu_kernels.def"
#undef VEC
}

const mn_kernel MN_T(mn_spans)[MN_SPAN_COUNT] = {
#define SPAN(name)                                                                                 \
    [MN_SPAN_##name] = { MN_T(mn_##name##_plan), MN_T(mn_##name##_run),                            \
                         MN_QUOTE_EXPANDED(MN_TARGET), NULL },
#include "kernels/spans.def"
#undef SPAN
};
