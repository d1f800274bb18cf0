/* model_case.c - small models made for tests. */
#include "support/model_case.h"

#include <string.h>

#include "base/rng.h"

mn_status model_case_create(mn_model **out, const char *json, mn_dtype dtype, double scale,
                            uint64_t seed) {
    mn_json root = { 0 };
    mn_model_config config = { 0 };
    *out = NULL;
    mn_status st = mn_json_parse(&root, json, strlen(json), "config.json", MN_JSON_STANDARD);
    if (st == MN_OK) st = mn_model_config_read(&config, &root);
    mn_json_free(&root);
    if (st == MN_OK) st = mn_model_create(out, &config, dtype);
    mn_model_config_free(&config);
    if (st != MN_OK) return st;
    mn_model_start(*out, NULL, seed);
    for (int i = 0; i < mn_model_params(*out); i++) {
        const mn_model_param *p = mn_model_param_at(*out, i);
        const double width = p->info.init == MN_INIT_HUNDREDTH ? 0.01 * scale : scale;
        for (int64_t k = 0; k < p->info.count; k++) {
            const double move = width * mn_rng_normal(seed + 1, (uint64_t)i, (uint64_t)k);
            if (dtype == MN_F64) ((double *)p->value)[k] += move;
            else ((float *)p->value)[k] += (float)move;
        }
    }
    return MN_OK;
}

void model_case_tokens(int32_t *tokens, int64_t count, int64_t vocabulary, uint64_t seed) {
    for (int64_t i = 0; i < count; i++) {
        tokens[i] = (int32_t)(mn_rng_bits(seed, 77, (uint64_t)i) % (uint64_t)vocabulary);
    }
}
