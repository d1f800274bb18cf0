/* quantize.h - from float32 weights to those of 8 or 4 bits (kernels/quant.h), and between files
 * and memory.
 *
 * In files a row's codes lie one after the other, int8, or two a byte with the first in the lower 4
 * bits; scales (rows, groups) are float32 in 8 bits, float16 in 4, where least values of the same
 * shape go with them. */
#ifndef MN_OPS_QUANTIZE_H
#define MN_OPS_QUANTIZE_H

#include "kernels/quant.h"
#include "mneme.h"
#include "runtime/threads.h"

typedef struct mn_quant_stored {
    int bits;
    int64_t rows, cols, group;
    void *codes;        // int8 (rows, cols), or bytes (rows, (cols + 1) / 2)
    void *scales;       // float (rows, groups), or float16
    void *least;        // float16 (rows, groups); NULL in 8 bits
} mn_quant_stored;

/* Bytes of the three. */
typedef struct mn_quant_sizes {
    size_t codes, scales, least;
} mn_quant_sizes;

mn_quant_sizes mn_quant_stored_sizes(const mn_quant_stored *s);

/* How rows become codes. */
typedef struct mn_quantize_how {
    /* How much an error of each of `cols` inputs counts: the mean of its square; NULL: alike. */
    const float *importance;
    /* (cols, cols), upper triangle: U of H^-1 = U'U, H being the second moments of inputs with
     * something added to the diagonal. An input's error is made good by those that come after it
     * (GPTQ). NULL: not. */
    const float *inverse;
} mn_quantize_how;

/* Quantises w (rows, cols) into `out`, whose memory is there; rows are shared out over `threads`
 * (NULL: one). Fails where a weight is not finite, or too large for 4 bits. Square sums of errors
 * and weights, weighted by importance, go to *error and *all. */
mn_status mn_quantize(mn_quant_stored *out, const float *w, const mn_quantize_how *how,
                      mn_threads *threads, double *error, double *all);

/* Whether scales are finite and codes in range; `name` opens the sentence. */
mn_status mn_quant_check(const mn_quant_stored *s, const char *name);

/* To memory of the host as its kernels read it, taken here, and back; `out` of the second has
 * memory. */
mn_status mn_quant_load(mn_quant **out, const mn_quant_stored *s);
void mn_quant_store(mn_quant_stored *out, const mn_quant *q);
void mn_quant_free(mn_quant *q);    // NULL accepted

size_t mn_quant_codes_bytes(const mn_quant *q);
size_t mn_quant_scales_bytes(const mn_quant *q);

/* As a GPU reads it: bytes of codes and scales there, and filling host memory of so many. */
size_t mn_quant_device_codes_bytes(const mn_quant *q);
size_t mn_quant_device_scales_bytes(const mn_quant *q);
void mn_quant_to_device_form(unsigned char *codes, unsigned char *scales, const mn_quant *q);

/* All weights as float32 (rows, cols), from a host's memory. */
void mn_quant_unpack(float *out, const mn_quant *q);

#endif
