/* layer_case.c - see layer_case.h. */
#include "support/layer_case.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "base/dtype.h"
#include "base/rng.h"
#include "base/status.h"

double layer_case_get(const layer_case *c, const void *data, int64_t i) {
    return c->dtype == MN_F64 ? ((const double *)data)[i] : (double)((const float *)data)[i];
}

void layer_case_set(const layer_case *c, void *data, int64_t i, double value) {
    if (c->dtype == MN_F64) ((double *)data)[i] = value;
    else ((float *)data)[i] = (float)value;
}

static void *drawn(const layer_case *c, int64_t n, double scale, uint64_t seed, uint64_t stream) {
    void *memory = calloc((size_t)n, mn_dtype_bytes(c->dtype));
    for (int64_t i = 0; memory && i < n; i++) {
        layer_case_set(c, memory, i, scale * mn_rng_normal(seed, stream, (uint64_t)i));
    }
    return memory;
}

/* Initial values, moved: so that zeros and ones take part as well. */
static void draw_param(layer_case *c, int i, uint64_t seed) {
    const mn_param_info *info = &c->layer.params[i];
    c->params[i] = calloc((size_t)info->count, mn_dtype_bytes(c->dtype));
    c->grads[i] = calloc((size_t)info->count, mn_dtype_bytes(c->dtype));
    mn_param_start(c->params[i], c->dtype, info, 0.3, seed, 100 + (uint64_t)i, 0,
                   info->count);
    for (int64_t k = 0; k < info->count; k++) {
        const double moved = 0.1 * mn_rng_normal(seed, 200 + (uint64_t)i, (uint64_t)k);
        /* process noise and similar positive numbers stay positive */
        const double scale = info->init == MN_INIT_HUNDREDTH ? 0.01 : 1.0;
        layer_case_set(c, c->params[i], k,
                       layer_case_get(c, c->params[i], k) + scale * moved);
    }
}

mn_status layer_case_create(layer_case *c, const char *name, const char *json, mn_dtype dtype,
                            int64_t B, int64_t T, int64_t D, uint64_t seed) {
    memset(c, 0, sizeof *c);
    c->dtype = dtype;
    c->B = B;
    c->T = T;
    c->D = D;
    mn_layer_kind kind;
    bool ccq;
    mn_layer_config config;
    mn_json options = { 0 };
    mn_status st = mn_layer_kind_find(&kind, &ccq, name);
    if (st == MN_OK) {
        mn_layer_defaults(&config, kind);
        st = mn_json_parse(&options, json, strlen(json), "options", MN_JSON_STANDARD);
    }
    if (st == MN_OK) st = mn_layer_config_read(&config, kind, &options);
    mn_json_free(&options);
    if (st == MN_OK) st = mn_layer_create(&c->layer, name, &config, D, T, 1e-5);
    if (st == MN_OK) st = mn_context_create(&c->context, NULL);
    if (st == MN_OK) st = mn_tape_create(&c->tape, c->context, dtype);
    if (st != MN_OK) return st;
    const int64_t n = B * T * D;
    c->x = drawn(c, n, 1.0, seed, 1);
    c->dy = drawn(c, n, 1.0, seed, 2);
    c->dx = drawn(c, n, 0.0, seed, 3);
    c->y = calloc((size_t)n, sizeof *c->y);
    c->variance = calloc((size_t)(B * T), sizeof *c->variance);
    for (int i = 0; i < c->layer.n_params; i++) draw_param(c, i, seed);
    return c->x && c->dy && c->dx && c->y && c->variance ? MN_OK : mn_fail(MN_ERR_MEMORY, "case");
}

void layer_case_destroy(layer_case *c) {
    for (int i = 0; i < c->layer.n_params; i++) {
        free(c->params[i]);
        free(c->grads[i]);
    }
    free(c->x);
    free(c->dx);
    free(c->dy);
    free(c->y);
    free(c->variance);
    mn_tape_destroy(c->tape);
    mn_context_destroy(c->context);
}

/* Tokens [first, first + T) of every row. */
static mn_tensor *pass(layer_case *c, mn_layer_state *state, int64_t first, int64_t T, bool back) {
    static mn_tensor *leaves[MN_LAYER_PARAMS];
    const size_t item = mn_dtype_bytes(c->dtype);
    for (int i = 0; i < c->layer.n_params; i++) {
        const mn_param_info *info = &c->layer.params[i];
        const int64_t cols = info->count / info->shape[0];
        leaves[i] = mn_tape_leaf(c->tape, c->params[i], back ? c->grads[i] : NULL,
                                 info->rank == 1 ? 1 : info->shape[0],
                                 info->rank == 1 ? info->count : cols, false);
    }
    void *x = mn_tape_memory(c->tape, c->B * T * c->D);
    for (int64_t b = 0; x && b < c->B; b++) {
        memcpy((char *)x + (size_t)(b * T * c->D) * item,
               (char *)c->x + (size_t)((b * c->T + first) * c->D) * item,
               (size_t)(T * c->D) * item);
    }
    float *variance = malloc((size_t)(c->B * T) * sizeof *variance);
    if (c->starts) mn_tape_pack(c->tape, c->starts, c->n_starts);
    mn_forward f = { .tape = c->tape, .layer = &c->layer, .params = leaves, .state = state,
                     .position = first, .variance = variance };
    const int64_t shape[4] = { c->B, T, 1, c->D };
    mn_tensor *y = mn_layer_forward(&f, mn_tape_input(c->tape, x, back ? c->dx : NULL, shape));
    for (int64_t b = 0; y && b < c->B; b++) {
        for (int64_t t = 0; t < T; t++) {
            c->variance[b * c->T + first + t] = variance[b * T + t];
            for (int64_t i = 0; i < c->D; i++) {
                c->y[(b * c->T + first + t) * c->D + i] =
                    layer_case_get(c, y->data, (b * T + t) * c->D + i);
            }
        }
    }
    free(variance);
    return y;
}

mn_status layer_case_forward(layer_case *c) {
    mn_tape_start(c->tape, MN_TAPE_FORWARD);
    pass(c, NULL, 0, c->T, false);
    return mn_tape_status(c->tape);
}

mn_status layer_case_backward(layer_case *c, double *value) {
    mn_tape_start(c->tape, MN_TAPE_RECORD);
    mn_tensor *y = pass(c, NULL, 0, c->T, true);
    mn_tape_seed(c->tape, y, c->dy);
    mn_status st = mn_tape_status(c->tape);
    if (st == MN_OK) st = mn_tape_backward(c->tape);
    *value = 0.0;
    for (int64_t i = 0; i < c->B * c->T * c->D; i++) {
        *value += c->y[i] * layer_case_get(c, c->dy, i);
    }
    return st;
}

mn_status layer_case_pieces(layer_case *c, const int64_t *lengths, int n) {
    mn_layer_state state = { 0 };
    mn_status st = MN_OK;
    int64_t at = 0;
    for (int i = 0; i < n && st == MN_OK; i++) {
        mn_tape_start(c->tape, MN_TAPE_FORWARD);
        pass(c, &state, at, lengths[i], false);
        st = mn_tape_status(c->tape);
        at += lengths[i];
    }
    mn_layer_state_free(&state);
    return st;
}
