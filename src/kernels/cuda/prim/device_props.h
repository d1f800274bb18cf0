/* machine.h - what launches ask about the GPU in use (device_props.cu). */
#ifndef MN_KERNELS_CUDA_PRIM_DEVICE_PROPS_H
#define MN_KERNELS_CUDA_PRIM_DEVICE_PROPS_H

#include <stdbool.h>

typedef struct mn_machine {
    int processors;
    int shared_bytes;    // the most that a block may have
    int major, minor;    // its compute capability
    bool cooperates;     // launches whose blocks are all there at once
} mn_machine;

/* Of the device that the calling thread uses; zeros where there is none. The driver is asked once
 * for each device, as every token that is decoded comes by many times. */
mn_machine mn_machine_in_use(void);

#endif
