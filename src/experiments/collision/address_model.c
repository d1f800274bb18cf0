/* address_model.c - parameters and forward pass of the small network. */
#include "experiments/collision/address_model.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "base/checked.h"
#include "base/rng.h"
#include "base/status.h"
#include "base/util.h"

enum { WIDTH = MN_ADDRESS_WIDTH, HEADS = MN_ADDRESS_HEADS, KEY = MN_ADDRESS_KEY, MLP = 128 };

static const double noise = 0.05, prior = 3.0, least_noise = 1e-6;

static const char *const memory_names[] = {
#define MEMORY(id, name, about) name,
#include "experiments/collision/address_memories.def"
#undef MEMORY
};

bool mn_address_find(mn_address_memory *out, const char *name) {
    for (int i = 0; i < MN_ADDRESS_MEMORIES; i++) {
        if (strcmp(memory_names[i], name) != 0) continue;
        *out = (mn_address_memory)i;
        return true;
    }
    return false;
}

/* ---- parameters ------------------------------------------------------------------------------ */

/* How a parameter begins: evenly within 1 / sqrt(columns), or everywhere at one value. */
typedef struct law {
    bool even;
    double value;
} law;

static const law even = { true, 0.0 };

static void declare(mn_address_model *m, law *laws, const char *name, int64_t rows, int64_t columns,
                    law start) {
    const int64_t i = m->n_params++;
    m->params[i] = (mn_optim_param){ .name = name, .count = rows * columns, .lr_scale = 1.0,
                                     .decays = true };
    m->rows[i] = rows;
    laws[i] = start;
}

static void declare_memory(mn_address_model *m, law *laws) {
    const law zero = { false, 0.0 }, first_noise = { false, log(expm1(noise)) };
    switch (m->memory) {
    case MN_ADDRESS_GLA:
        declare(m, laws, "gate", WIDTH, WIDTH, even);
        declare(m, laws, "gate_bias", 1, WIDTH, zero);
        break;
    case MN_ADDRESS_DELTA:
        declare(m, laws, "beta", HEADS, WIDTH, even);
        declare(m, laws, "beta_bias", 1, HEADS, zero);
        break;
    case MN_ADDRESS_BAYES:
        declare(m, laws, "noise", HEADS, WIDTH, zero);
        declare(m, laws, "noise_bias", 1, HEADS, first_noise);
        break;
    default: break;
    }
}

/* In the order in which the forward pass takes them. */
static void declare_all(mn_address_model *m, law *laws) {
    const law one = { false, 1.0 }, zero = { false, 0.0 };
    declare(m, laws, "in", WIDTH, m->features, even);
    declare(m, laws, "in_bias", 1, WIDTH, zero);
    for (int block = 0; block < 2; block++) {
        declare(m, laws, "norm", 1, WIDTH, one);
        declare(m, laws, "value", HEADS * KEY, WIDTH, even);
        declare_memory(m, laws);
        declare(m, laws, "out", WIDTH, HEADS * KEY, even);
        declare(m, laws, "mlp_norm", 1, WIDTH, one);
        declare(m, laws, "mlp_gate", MLP, WIDTH, even);
        declare(m, laws, "mlp_up", MLP, WIDTH, even);
        declare(m, laws, "mlp_down", WIDTH, MLP, even);
    }
    declare(m, laws, "head", m->classes, WIDTH, even);
}

mn_status mn_address_model_create(mn_address_model *m, mn_address_memory memory, int64_t features,
                                  int64_t classes, uint64_t seed) {
    law laws[MN_ADDRESS_PARAMS];
    int64_t all = 0, at = 0;
    *m = (mn_address_model){ .memory = memory, .features = features, .classes = classes };
    declare_all(m, laws);
    for (int64_t i = 0; i < m->n_params; i++) all += m->params[i].count;
    m->numbers = calloc((size_t)all, 2 * sizeof *m->numbers);
    if (!m->numbers) return mn_fail(MN_ERR_MEMORY, "no memory for a model");
    for (int64_t i = 0; i < m->n_params; i++) {
        mn_optim_param *p = &m->params[i];
        const double bound = 1.0 / sqrt((double)(p->count / m->rows[i]));
        p->value = m->numbers + at;
        p->grad = m->numbers + all + at;
        for (int64_t k = 0; k < p->count; k++) {
            const double u = 2.0 * mn_rng_uniform(seed, (uint64_t)i + 1, (uint64_t)k) - 1.0;
            p->value[k] = (float)(laws[i].even ? bound * u : laws[i].value);
        }
        at += p->count;
    }
    return MN_OK;
}

void mn_address_model_free(mn_address_model *m) {
    free(m->numbers);
    *m = (mn_address_model){ 0 };
}

/* ---- forward --------------------------------------------------------------------------------- */

typedef struct pass {
    mn_address_model *model;
    mn_tape *tape;
    const mn_address_batch *batch;
    int64_t next;                // parameter to take
} pass;

static mn_tensor *take(pass *p) {
    const int64_t i = p->next++;
    mn_optim_param *param = &p->model->params[i];
    return mn_tape_leaf(p->tape, param->value, param->grad, p->model->rows[i],
                        param->count / p->model->rows[i], false);
}

static mn_tensor *constant(pass *p, float *data, int64_t heads, int64_t width) {
    const int64_t shape[4] = { p->batch->rows, p->batch->length, heads, width };
    return mn_tape_input(p->tape, data, NULL, shape);
}

static mn_tensor *norm(pass *p, mn_tensor *x) {
    mn_run run;
    mn_rms_norm_args *args = mn_run_start(&run, p->tape, MN_OP_rms_norm);
    args->eps = 1e-5;
    mn_run_in(&run, "x", x);
    mn_run_in(&run, "w", take(p));
    mn_tensor *y = mn_run_out(&run, "y");
    mn_run_now(&run);
    return y;
}

static mn_tensor *project(pass *p, mn_tensor *x, bool biased) {
    mn_tensor *weight = take(p), *bias = biased ? take(p) : NULL;
    return mn_tape_linear(p->tape, x, weight, bias);
}

/* o = M'q of a sum, with a decay of each key channel or none. */
static mn_tensor *add_up(pass *p, mn_tensor *q, mn_tensor *k, mn_tensor *v, mn_tensor *decay) {
    mn_run run;
    mn_additive_args *args = mn_run_start(&run, p->tape, MN_OP_additive);
    args->scale = 1.0;
    mn_run_in(&run, "q", q);
    mn_run_in(&run, "k", k);
    mn_run_in(&run, "v", v);
    if (decay) mn_run_in(&run, "g", decay);
    mn_tensor *o = mn_run_out(&run, "o");
    mn_run_now(&run);
    return o;
}

static mn_tensor *correct(pass *p, mn_tensor *q, mn_tensor *k, mn_tensor *v, mn_tensor *beta) {
    mn_run run;
    mn_delta_net_args *args = mn_run_start(&run, p->tape, MN_OP_delta_net);
    args->scale = 1.0;
    mn_run_in(&run, "q", q);
    mn_run_in(&run, "k", k);
    mn_run_in(&run, "v", v);
    mn_run_in(&run, "beta", beta);
    mn_tensor *o = mn_run_out(&run, "o");
    mn_run_now(&run);
    return o;
}

static mn_tensor *filter(pass *p, mn_tensor *q, mn_tensor *k, mn_tensor *v, mn_tensor *l2) {
    mn_run run;
    float *ones = p->batch->constants + p->batch->rows * p->batch->length * HEADS * KEY;
    mn_tensor *one = constant(p, ones, HEADS, 1);
    mn_tensor *many = mn_tape_leaf(p->tape, ones, NULL, 1, HEADS, false);
    mn_bayes_args *args = mn_run_start(&run, p->tape, MN_OP_bayes);
    args->scale = 1.0;
    mn_run_in(&run, "q", q);
    mn_run_in(&run, "k", k);
    mn_run_in(&run, "v", v);
    mn_run_in(&run, "la", constant(p, p->batch->constants, HEADS, KEY));
    mn_run_in(&run, "l2", l2);
    mn_run_in(&run, "r2", mn_tape_affine(p->tape, one, noise, 0.0));
    mn_run_in(&run, "p0", mn_tape_affine(p->tape, many, prior, 0.0));
    mn_tensor *o = mn_run_out(&run, "o");
    mn_run_now(&run);
    return o;
}

static mn_tensor *remember(pass *p, mn_tensor *x, mn_tensor *v) {
    mn_tape *tape = p->tape;
    mn_tensor *q = constant(p, p->batch->query, HEADS, KEY);
    mn_tensor *k = constant(p, p->batch->key, HEADS, KEY);
    float *ones = p->batch->constants + p->batch->rows * p->batch->length * HEADS * KEY;
    switch (p->model->memory) {
    case MN_ADDRESS_GLA: {
        mn_tensor *g = mn_tape_unary(tape, MN_UNARY_LOGSIGMOID, project(p, x, true));
        return add_up(p, q, k, v, mn_tape_heads(tape, g, HEADS));
    }
    case MN_ADDRESS_DELTA:
        return correct(p, q, k, v, mn_tape_unary(tape, MN_UNARY_SIGMOID, project(p, x, true)));
    case MN_ADDRESS_RESET:    // u = 0.05 k, beta = 1 / (0.05 + 0.05): half of the error
        return correct(p, q, k, v, mn_tape_affine(tape, constant(p, ones, 1, HEADS), 0.5, 0.0));
    case MN_ADDRESS_BAYES: {
        mn_tensor *l2 = mn_tape_unary(tape, MN_UNARY_SOFTPLUS, project(p, x, true));
        return filter(p, q, k, v, mn_tape_affine(tape, l2, 1.0, least_noise));
    }
    default: return add_up(p, q, k, v, NULL);
    }
}

mn_tensor *mn_address_forward(mn_address_model *model, mn_tape *tape, const mn_address_batch *batch,
                              mn_tensor **head) {
    pass p = { .model = model, .tape = tape, .batch = batch };
    mn_tensor *h = project(&p, constant(&p, batch->features, 1, model->features), true);
    for (int block = 0; block < 2; block++) {
        mn_tensor *x = norm(&p, h);
        mn_tensor *v = mn_tape_heads(tape, project(&p, x, false), HEADS);
        mn_tensor *o = remember(&p, x, v);
        h = mn_tape_add(tape, h, project(&p, mn_tape_flat(tape, o), false));
        x = norm(&p, h);
        mn_tensor *gate = project(&p, x, false), *up = project(&p, x, false);
        mn_tensor *wide = mn_tape_gate(tape, MN_UNARY_SILU, gate, up);
        h = mn_tape_add(tape, h, project(&p, wide, false));
    }
    *head = take(&p);
    return h;
}

/* ---- batches --------------------------------------------------------------------------------- */

/* Orthonormal rows, drawn once for an experiment. */
static void draw_frozen(float *frozen, int64_t width, uint64_t seed) {
    for (int64_t r = 0; r < KEY; r++) {
        float *row = frozen + r * width;
        for (int64_t i = 0; i < width; i++) {
            row[i] = (float)mn_rng_normal(seed, UINT64_C(0x61646472), (uint64_t)(r * width + i));
        }
        for (int64_t done = 0; done <= r; done++) {
            const float *other = frozen + done * width;
            double dot = 0.0;
            for (int64_t i = 0; i < width; i++) dot += (double)row[i] * other[i];
            for (int64_t i = 0; i < width; i++) {
                if (done < r) row[i] -= (float)(dot * other[i]);
                else row[i] = (float)(row[i] / sqrt(dot));
            }
        }
    }
}

/* The task's tokens are [asks, key, value], value one-hot of the classes. */
static int64_t key_width(const mn_task_shape *shape) {
    return shape->features - 1 - shape->classes;
}

mn_status mn_address_batch_create(mn_address_batch *out, const mn_task *task, int64_t rows,
                                  uint64_t seed) {
    const mn_task_shape s = mn_task_shape_of(task);
    const int64_t width = key_width(&s);
    int64_t places, numbers;
    *out = (mn_address_batch){ .rows = rows, .most = s.length };
    if (s.features == 0 || width < KEY || rows < 1 || !mn_mul_i64(&places, rows, s.length) ||
        !mn_mul_i64(&numbers, places, mn_max(s.features, HEADS * KEY)) || numbers > INT32_MAX) {
        return mn_fail(MN_ERR_ARGUMENT, "an addressed task has tokens [asks, key, value] with keys "
                       "of %d numbers or more, and batches below 2^31 numbers", KEY);
    }
    const size_t n = (size_t)places, heads = (size_t)(HEADS * KEY);
    const size_t length = (size_t)s.length, features = (size_t)s.features;
    out->features = calloc(n * features, sizeof(float));
    out->query = calloc(n * heads, sizeof(float));
    out->key = calloc(n * heads, sizeof(float));
    out->constants = calloc(2 * n * heads, sizeof(float));
    out->targets = calloc(n, sizeof(int32_t));
    out->rivals = calloc(n, sizeof(int32_t));
    out->sample = calloc(length * features, sizeof(float));
    out->sample_targets = calloc(length, sizeof(int32_t));
    out->sample_rivals = calloc(length, sizeof(int32_t));
    out->frozen = width > KEY ? calloc((size_t)width * KEY, sizeof(float)) : NULL;
    if (!out->features || !out->query || !out->key || !out->constants || !out->targets ||
        !out->rivals || !out->sample || !out->sample_targets || !out->sample_rivals ||
        (width > KEY && !out->frozen)) {
        mn_address_batch_free(out);
        return mn_fail(MN_ERR_MEMORY, "no memory for a batch of %lld samples", (long long)rows);
    }
    if (out->frozen) draw_frozen(out->frozen, width, seed);
    return MN_OK;
}

void mn_address_batch_free(mn_address_batch *b) {
    free(b->features);
    free(b->query);
    free(b->key);
    free(b->constants);
    free(b->targets);
    free(b->rivals);
    free(b->sample);
    free(b->sample_targets);
    free(b->sample_rivals);
    free(b->frozen);
    *b = (mn_address_batch){ 0 };
}

/* The address of a token: its key, or the key's frozen projection of length 1. */
static void address_of(float address[KEY], const mn_address_batch *b, const float *key,
                       int64_t width) {
    double square = 0.0;
    for (int64_t i = 0; i < KEY; i++) {
        double sum = b->frozen ? 0.0 : key[i];
        for (int64_t k = 0; b->frozen && k < width; k++) {
            sum += (double)b->frozen[i * width + k] * key[k];
        }
        address[i] = (float)sum;
        square += sum * sum;
    }
    for (int64_t i = 0; b->frozen && i < KEY; i++) address[i] = (float)(address[i] / sqrt(square));
}

static void take_sample(mn_address_batch *b, const mn_task_shape *s, int64_t row) {
    const int64_t width = key_width(s);
    for (int64_t t = 0; t < b->length; t++) {
        const int64_t at = row * b->length + t;
        const float *token = b->sample + t * s->features;
        float address[KEY];
        address_of(address, b, token + 1, width);
        memcpy(b->features + at * s->features, token, (size_t)s->features * sizeof *token);
        for (int64_t head = 0; head < HEADS; head++) {
            float *query = b->query + (at * HEADS + head) * KEY;
            float *key = b->key + (at * HEADS + head) * KEY;
            for (int64_t i = 0; i < KEY; i++) {
                query[i] = address[i];
                key[i] = token[0] != 0.0f ? 0.0f : address[i];
            }
        }
        b->targets[at] = b->sample_targets[t];
        b->rivals[at] = b->sample_rivals[t];
    }
}

mn_status mn_address_batch_fill(mn_address_batch *b, mn_task *task, uint64_t seed, mn_split split,
                                int64_t first) {
    const mn_task_shape s = mn_task_shape_of(task);
    for (int64_t row = 0; row < b->rows; row++) {
        const mn_status st = mn_task_vectors(task, seed, split, first + row, b->sample,
                                             b->sample_targets);
        if (st != MN_OK) return st;
        if (row > 0 && mn_task_used(task) != b->length) {
            return mn_fail(MN_ERR_ARGUMENT, "samples of a batch have different lengths; the task's "
                           "option batch has to be the batch of the job");
        }
        b->length = mn_task_used(task);
        for (int64_t t = 0; t < s.length; t++) b->sample_rivals[t] = MN_NO_TARGET;
        mn_task_rival(task, b->sample, b->sample_targets, b->sample_rivals);
        take_sample(b, &s, row);
    }
    float *ones = b->constants + b->rows * b->length * HEADS * KEY;
    for (int64_t i = 0; i < b->rows * b->length * HEADS * KEY; i++) {
        b->constants[i] = 0.0f;
        ones[i] = 1.0f;
    }
    return MN_OK;
}
