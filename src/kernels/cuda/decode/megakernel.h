/* megakernel.h - between a program's kernel (megakernel.cu) and who writes it
 * (megakernel_build.cu). */
#ifndef MN_KERNELS_CUDA_DECODE_MEGAKERNEL_H
#define MN_KERNELS_CUDA_DECODE_MEGAKERNEL_H

/* Blocks of a program on the machine in use; 0: it runs none. */
int mn_few_blocks(void);

/* What a launch of a program is told. */
typedef struct mn_few_started {
    int n_stages;
    int words_at, words;    // where words begin, and how many bytes of them a run has
    int ragged;             // a row's last chunk is not whole
} mn_few_started;

int mn_few_start_program(const mn_few_started *given, void *program, void *stream);

#endif
