/* functions_double.h - what functions.h and sums over tokens (elementwise.def) compute in double on
 * every machine. The log decays of Palimpsa are rounded once: a decay close to 1 keeps all its
 * digits in its logarithm. */
#ifndef MN_KERNELS_FUNCTIONS_DOUBLE_H
#define MN_KERNELS_FUNCTIONS_DOUBLE_H

#include <math.h>

#ifdef __CUDACC__
#define IN_DOUBLE_PART __device__ static inline
#else
#define IN_DOUBLE_PART static inline
#endif
#define OF_DOUBLES(name, result)                                                                   \
    IN_DOUBLE_PART double mn_##name(double a, double b, double c) {                                \
        (void)a, (void)b, (void)c;                                                                 \
        return result;                                                                             \
    }

OF_DOUBLES(decay_paper, log1p(-a / b))
OF_DOUBLES(decay_paper_back, -c / (b - a))
OF_DOUBLES(decay_code, -a * b)

OF_DOUBLES(term_PLAIN, a)
OF_DOUBLES(term_DECAY_PAPER, c * a / (b * (b - a)))
OF_DOUBLES(term_DECAY_CODE, -c * a)

#undef OF_DOUBLES
#undef IN_DOUBLE_PART

#endif
