/* sample_device.h - a sample's call on a device: the same tensors in the device's memory, each in
 * the type that a call of `dtype` holds it in.
 *
 *   mn_device_sample_create(&there, context, sample, MN_BF16); mn_op_run(context, op, pass,
 *   mn_device_sample_args(there)); mn_device_sample_fetch(there, sample) */
#ifndef MN_OPS_SAMPLE_DEVICE_H
#define MN_OPS_SAMPLE_DEVICE_H

#include "ops/context.h"
#include "ops/sample.h"

typedef struct mn_device_sample mn_device_sample;

/* Rounds inputs and cotangents of a host sample to what a call of `dtype` can hold, so that the
 * reference sees the numbers that the device sees. */
void mn_sample_round(mn_sample *sample, mn_dtype dtype);

/* Copies inputs and cotangents of `sample`, f32 or f64, to the context's device, rounded; results
 * and gradients there hold a NaN pattern, and all tensors lie between guards. Needs `sample` no
 * more, but its cu_seqlens and counts0 stay in use. `dtype` is MN_F32 or MN_BF16. */
mn_status mn_device_sample_create(mn_device_sample **out, mn_context *context,
                                  const mn_sample *sample, mn_dtype dtype);

/* The same call once more, with the same numbers in memory of its own. */
mn_status mn_device_sample_clone(mn_device_sample **out, const mn_device_sample *sample);
void mn_device_sample_free(mn_device_sample *sample);    // NULL accepted

/* The argument struct of the call, for mn_op_run. */
const void *mn_device_sample_args(const mn_device_sample *sample);

/* Waits for the call and copies results and gradients into `into`, a sample of the same call. Where
 * a result is an input in place, the input's memory receives it. Fails when a guard was
 * overwritten. */
mn_status mn_device_sample_fetch(const mn_device_sample *sample, mn_sample *into);

/* Bytes of all its tensors, once each. */
size_t mn_device_sample_bytes(const mn_device_sample *sample);

#endif
