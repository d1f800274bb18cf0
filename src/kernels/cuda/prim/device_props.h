/* device_props.h - what launches ask about the GPU in use (device_props.cu). */
#ifndef MN_KERNELS_CUDA_PRIM_DEVICE_PROPS_H
#define MN_KERNELS_CUDA_PRIM_DEVICE_PROPS_H

#include <stdbool.h>

namespace mneme {

typedef struct mn_device_props {
    int processors;
    int shared_bytes;    // the most that a block may have
    int major, minor;    // its compute capability, or the code's where that is less
    bool coop_launch;     // launches whose blocks are all there at once
} mn_device_props;

/* Of the device that the calling thread uses; zeros where there is none. The driver is asked once
 * for each device, as every token that is decoded comes by many times. */
mn_device_props mn_device_props_current(void);

}    // namespace mneme

#endif
