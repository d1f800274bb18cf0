/* few_program.h - between a program's kernel (few_program.cu) and who writes it (few_build.cu). */
#ifndef MN_KERNELS_CUDA_FEW_PROGRAM_H
#define MN_KERNELS_CUDA_FEW_PROGRAM_H

/* Blocks of a program on the machine in use; 0: it runs none. */
int mn_few_blocks(void);

/* `apart`: bytes from one place of a word to the next; `ragged`: a row's last numbers are fewer than
 * what a warp has. */
int mn_few_start_program(void *program, int n_stages, int apart, bool ragged, void *stream);

#endif
