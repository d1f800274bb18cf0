/* megakernel.h - between a megakernel's kernel (megakernel.cu) and who writes it
 * (megakernel_build.cu). */
#ifndef MN_KERNELS_CUDA_DECODE_MEGAKERNEL_H
#define MN_KERNELS_CUDA_DECODE_MEGAKERNEL_H

namespace mneme::decode {

/* Blocks of a megakernel on the machine in use; 0: it runs none. */
int mn_megakernel_blocks(void);

/* What a launch of a megakernel is told. */
typedef struct mn_decode_launch_args {
    int n_stages;
    int handoff_at, words;    // where words begin, and how many bytes of them a run has
    int ragged;             // a row's last chunk is not whole
} mn_decode_launch_args;

int mn_megakernel_start(const mn_decode_launch_args *given, void *megakernel, void *stream);

}    // namespace mneme::decode

#endif
