/* few_program.h - between a program's kernel (few_program.cu) and who writes it (few_build.cu). */
#ifndef MN_KERNELS_CUDA_FEW_PROGRAM_H
#define MN_KERNELS_CUDA_FEW_PROGRAM_H

/* Blocks of a program on the machine in use; 0: it runs none. */
int mn_few_blocks(void);

/* What a launch of a program is told. */
typedef struct mn_few_started {
    int n_stages;
    int words_at, words;    // where words begin, and how many bytes of them a run has
    int ragged;             // a row's last numbers are fewer than what a warp has
} mn_few_started;

int mn_few_start_program(const mn_few_started *given, void *program, void *stream);

#endif
