/* overlay.h - each target replaces the rows it does better. */
#ifndef MN_KERNELS_OVERLAY_H
#define MN_KERNELS_OVERLAY_H

#include "kernels/kernel.h"

void mn_fill_ref_f32(mn_kernel_table *table);    // float storage, computed in double
void mn_fill_ref_f64(mn_kernel_table *table);
void mn_overlay_avx2(mn_kernel_table *table);
void mn_overlay_avx512(mn_kernel_table *table);
void mn_overlay_neon(mn_kernel_table *table);
extern const mn_kernel mn_spans_ref_f32[MN_SPAN_COUNT], mn_spans_ref_f64[MN_SPAN_COUNT];
extern const mn_kernel mn_spans_avx2[MN_SPAN_COUNT], mn_spans_avx512[MN_SPAN_COUNT],
    mn_spans_neon[MN_SPAN_COUNT];
void mn_overlay_cuda(mn_kernel_table *table);

#endif
