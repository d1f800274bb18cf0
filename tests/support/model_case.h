/* model_case.h - small models made for tests: their parameters moved away from where training would
 * start them, so that none is special. */
#ifndef MN_TESTS_MODEL_CASE_H
#define MN_TESTS_MODEL_CASE_H

#include "model/model.h"

/* A model from the JSON of its config.json. Each parameter is moved by `scale` times a normal
 * number, a function of (seed, parameter, index). */
mn_status model_case_create(mn_model **out, const char *json, mn_dtype dtype, double scale,
                            uint64_t seed);

/* `count` tokens below `vocabulary`. */
void model_case_tokens(int32_t *tokens, int64_t count, int64_t vocabulary, uint64_t seed);

#endif
