/* layer_case.h - one layer with random parameters on random input: its output, its gradients, and
 * the same tokens in pieces through a state. */
#ifndef MN_TESTS_LAYER_CASE_H
#define MN_TESTS_LAYER_CASE_H

#include "layers/layer.h"

typedef struct layer_case {
    mn_layer layer;
    mn_dtype dtype;
    mn_context *context;
    mn_tape *tape;
    int64_t B, T, D;
    void *x, *dx, *dy;                       // (B,T,D)
    void *params[MN_LAYER_PARAMS], *grads[MN_LAYER_PARAMS];
    double *y;                               // (B,T,D) of the last run
    float *variance;                         // (B,T) of the last run
    const int64_t *starts;                   // packed: n_starts + 1 offsets; NULL: not
    int64_t n_starts;
} layer_case;

/* Layer `name` with the options in `json` ("{}": defaults), parameters and input drawn from `seed`
 * wider than a model would start them, so that every gradient is visible. */
mn_status layer_case_create(layer_case *c, const char *name, const char *json, mn_dtype dtype,
                            int64_t B, int64_t T, int64_t D, uint64_t seed);
void layer_case_destroy(layer_case *c);

/* Forward over all tokens; y and variance are filled. */
mn_status layer_case_forward(layer_case *c);

/* Forward and backward from dy; dx and grads are filled. Returns sum(y dy) through `value`. */
mn_status layer_case_backward(layer_case *c, double *value);

/* Forward through a state: pieces of the given lengths, one after the other. */
mn_status layer_case_pieces(layer_case *c, const int64_t *lengths, int n);

double layer_case_get(const layer_case *c, const void *data, int64_t i);
void layer_case_set(const layer_case *c, void *data, int64_t i, double value);

#endif
