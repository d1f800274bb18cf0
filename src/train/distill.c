/* distill.c - the objectives of distillation and their gradients, see distill.h.
 *
 * Objectives are computed without recording, in float32, and their gradients at what the student
 * made start the way back:
 *
 *   e = mean (y - t)^2 / v      dy = 2 (y - t) / (n v)         v = mean (t - mean t)^2 + 1e-6
 *   c = mean (1 - cos_i)        dy_i = -(t_i / (|y||t|) - cos_i y_i / |y|^2) / tokens
 *   k = mean_i sum_v p (z - x + log r_i)     dx = (softmax x - p) / tokens     p = softmax z
 *
 * z and x being the logits of teacher and student, r_i = sum_v p exp(x - z), so that
 * log p - log q = z - x + log r. */
#include "train/distill.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/status.h"
#include "base/util.h"
#include "kernels/elementwise.h"
#include "model/checkpoint.h"
#include "runtime/device.h"

static const double variance_floor = 1e-6, length_floor = 1e-24;

struct mn_distill {
    mn_model *teacher;
    mn_device *device;               // NULL: the CPU
    const mn_train_options *options; // the trainer's
    bool by_model;                   // the objective "model"
    bool of[MN_MAX_LAYERS];
    int n;
    mn_loss_result result;
    void *told;                      // the same on the device
};

/* ---- which layers ---------------------------------------------------------------------------- */

static mn_status read_list(bool *of, const char *list, int n_layers) {
    const char *at = list;
    while (*(at += strspn(at, ", "))) {
        char *end;
        const long i = strtol(at, &end, 10);
        if (end == at || i < 0 || i >= n_layers) {
            return mn_fail(MN_ERR_ARGUMENT, "train.distill_layers: \"%s\" is no list of layers "
                           "from 0 to %d", list, n_layers - 1);
        }
        of[i] = true;
        at = end;
    }
    return MN_OK;
}

mn_status mn_distill_layers(bool of[MN_MAX_LAYERS], const mn_train_options *o,
                            const mn_model_config *student, const mn_model_config *teacher) {
    memset(of, 0, MN_MAX_LAYERS * sizeof *of);
    if (o->distill_layers[0]) return read_list(of, o->distill_layers, student->n_layers);
    for (int i = 0; teacher && i < student->n_layers; i++) {
        of[i] = strcmp(student->names[i], teacher->names[i]) != 0;
    }
    return MN_OK;
}

/* Where streams of two models are the same thing. */
static mn_status check_pair(const mn_model_config *student, const mn_model_config *teacher,
                            const char *folder) {
    const struct {
        const char *name;
        int64_t own, theirs;
    } sizes[] = { { "vocab_size", student->vocab_size, teacher->vocab_size },
                  { "hidden_size", student->hidden_size, teacher->hidden_size },
                  { "num_hidden_layers", student->n_layers, teacher->n_layers } };
    for (size_t i = 0; i < MN_COUNTOF(sizes); i++) {
        if (sizes[i].own == sizes[i].theirs) continue;
        return mn_fail(MN_ERR_ARGUMENT, "train.teacher: %s has %s %lld, the model that learns "
                       "%lld; mneme graft makes a student of a teacher", folder, sizes[i].name,
                       (long long)sizes[i].theirs, (long long)sizes[i].own);
    }
    return MN_OK;
}

/* ---- create ---------------------------------------------------------------------------------- */

static mn_status open_teacher(mn_distill *d, const mn_model *student, mn_context *context,
                              mn_dtype dtype) {
    const mn_train_options *o = d->options;
    mn_status st = mn_checkpoint_load(&d->teacher, o->teacher, mn_model_dtype(student));
    const mn_model_config *own = mn_model_describe(student);
    if (st == MN_OK) st = check_pair(own, mn_model_describe(d->teacher), o->teacher);
    if (st == MN_OK) st = mn_distill_layers(d->of, o, own, mn_model_describe(d->teacher));
    for (int i = 0; i < MN_MAX_LAYERS; i++) d->n += d->of[i];
    if (st == MN_OK && d->n == 0 && !d->by_model) {
        st = mn_fail(MN_ERR_ARGUMENT, "train.teacher: %s has the layers of the model that learns; "
                     "name those to learn as train.distill_layers", o->teacher);
    }
    if (st == MN_OK) st = mn_model_place(d->teacher, context, dtype);
    d->device = context->device;
    if (st == MN_OK && d->device) {
        st = mn_device_allocate(d->device, &d->told, sizeof d->result);
    }
    return st;
}

mn_status mn_distill_create(mn_distill **out, bool of[MN_MAX_LAYERS], const mn_train_options *o,
                            const mn_model *student, mn_context *context, mn_dtype dtype) {
    *out = NULL;
    if (!o->teacher[0]) return mn_distill_layers(of, o, mn_model_describe(student), NULL);
    const bool by_model = strcmp(o->distill, "model") == 0;
    if (!by_model && strcmp(o->distill, "layers") != 0) {
        return mn_fail(MN_ERR_ARGUMENT, "train.distill: \"%s\" is none of layers, model",
                       o->distill);
    }
    if (o->mc_samples > 0 || o->sequence_ranks > 1) {
        return mn_fail(MN_ERR_UNSUPPORTED, "train.teacher goes with neither train.mc_samples nor "
                       "train.sequence_ranks");
    }
    mn_distill *d = calloc(1, sizeof *d);
    if (!d) return mn_fail(MN_ERR_MEMORY, "no memory to learn from a teacher");
    d->options = o;
    d->by_model = by_model;
    const mn_status st = open_teacher(d, student, context, dtype);
    if (st != MN_OK) {
        mn_distill_destroy(d);
        return st;
    }
    memcpy(of, d->of, sizeof d->of);
    *out = d;
    return MN_OK;
}

void mn_distill_destroy(mn_distill *d) {
    if (!d) return;
    if (d->device) mn_device_free(d->device, d->told);
    mn_model_destroy(d->teacher);
    free(d);
}

const void *mn_distill_told(const mn_distill *d) {
    return d->told;
}

size_t mn_distill_bytes(const mn_distill *d) {
    return d->device ? mn_model_device_bytes(d->teacher)
                     : (size_t)mn_model_count(d->teacher) * sizeof(float);
}

/* ---- weights --------------------------------------------------------------------------------- */

void mn_distill_weights(double *kl, double *boundary, const mn_train_options *o, int64_t step) {
    const int64_t into = step - o->distill_turn;
    double part = o->distill_turn > 0 && into >= 0 ? 1.0 : 0.0;
    if (part > 0.0 && into < o->distill_ramp) part = (double)(into + 1) / (double)o->distill_ramp;
    *kl = o->distill_kl + part * (o->distill_kl_late - o->distill_kl);
    *boundary = o->distill_boundary + part * (o->distill_boundary_late - o->distill_boundary);
}

/* ---- terms ----------------------------------------------------------------------------------- */

static const int64_t one_number[4] = { 1, 1, 1, 1 };

/* x over the tokens and numbers of a batch, added up to (1,1,1,1) in two steps. */
static mn_tensor *total(mn_tape *tape, mn_tensor *x) {
    if (!x) return NULL;
    mn_tensor *rows = mn_tape_sum(tape, x, (int64_t[]){ x->shape[0], x->shape[1], 1, 1 });
    return mn_tape_sum(tape, rows, one_number);
}

static mn_tensor *less(mn_tape *tape, mn_tensor *a, mn_tensor *b) {
    return mn_tape_add(tape, a, mn_tape_affine(tape, b, -1.0, 0.0));
}

/* The number in a tensor of one, 0 of a plan. */
static double number_of(mn_tape *tape, mn_tensor *x) {
    float value = 0.0f;
    if (mn_tape_status(tape) == MN_OK && !mn_tape_plans(tape)) mn_tape_read(tape, x, &value);
    return value;
}

/* The gradient at y, in the type of y. */
static void start_back(mn_tape *tape, mn_tensor *y, mn_tensor *dy) {
    dy = y && dy ? mn_tape_cast(tape, dy, y->dtype) : NULL;
    mn_tape_no_gradient(tape, false);
    if (dy) mn_tape_seed(tape, y, dy->data);
    mn_tape_no_gradient(tape, true);
}

static mn_dtype wide(const mn_tape *tape) {
    return mn_tape_dtype(tape) == MN_F64 ? MN_F64 : MN_F32;
}

/* e: *dy is `weight` of its gradient. */
static double error_term(mn_tape *tape, mn_tensor *y, mn_tensor *t, double weight, mn_tensor **dy) {
    *dy = NULL;
    if (!y || !t) return 0.0;
    const double n = (double)y->shape[0] * (double)y->shape[1] * (double)y->shape[3];
    mn_tensor *mean = mn_tape_affine(tape, total(tape, t), -1.0 / n, 0.0);
    mn_tensor *off = mn_tape_unary(tape, MN_UNARY_SQUARE, mn_tape_add(tape, t, mean));
    mn_tensor *v = mn_tape_affine(tape, total(tape, off), 1.0 / n, variance_floor);
    mn_tensor *over = mn_tape_unary(tape, MN_UNARY_RECIPROCAL, v);
    mn_tensor *d = less(tape, y, t);
    mn_tensor *squares = total(tape, mn_tape_unary(tape, MN_UNARY_SQUARE, d));
    mn_tensor *e = mn_tape_multiply(tape, mn_tape_affine(tape, squares, 1.0 / n, 0.0), over);
    *dy = mn_tape_multiply(tape, d, mn_tape_affine(tape, over, 2.0 * weight / n, 0.0));
    return number_of(tape, e);
}

/* c: `weight` of its gradient is added to *dy. */
static double cosine_term(mn_tape *tape, mn_tensor *y, mn_tensor *t, double weight,
                          mn_tensor **dy) {
    if (!y || !t || !*dy) return 0.0;
    const int64_t rows[4] = { y->shape[0], y->shape[1], 1, 1 };
    const double tokens = (double)rows[0] * (double)rows[1];
    mn_tensor *dot = mn_tape_sum(tape, mn_tape_multiply(tape, y, t), rows);
    mn_tensor *yy = mn_tape_sum(tape, mn_tape_unary(tape, MN_UNARY_SQUARE, y), rows);
    mn_tensor *tt = mn_tape_sum(tape, mn_tape_unary(tape, MN_UNARY_SQUARE, t), rows);
    yy = mn_tape_affine(tape, yy, 1.0, length_floor);
    tt = mn_tape_affine(tape, tt, 1.0, length_floor);
    mn_tensor *length = mn_tape_multiply(tape, mn_tape_unary(tape, MN_UNARY_SQRT, yy),
                                         mn_tape_unary(tape, MN_UNARY_SQRT, tt));
    mn_tensor *over = mn_tape_unary(tape, MN_UNARY_RECIPROCAL, length);
    mn_tensor *cosine = mn_tape_multiply(tape, dot, over);
    mn_tensor *per = mn_tape_multiply(tape, cosine, mn_tape_unary(tape, MN_UNARY_RECIPROCAL, yy));
    const double by = weight / tokens;
    *dy = mn_tape_add(tape, *dy,
                      mn_tape_multiply(tape, t, mn_tape_affine(tape, over, -by, 0.0)));
    *dy = mn_tape_add(tape, *dy, mn_tape_multiply(tape, y, mn_tape_affine(tape, per, by, 0.0)));
    return 1.0 - number_of(tape, mn_tape_sum(tape, cosine, one_number)) / tokens;
}

/* What rows of KL are: m - log r negated, from the host's copies; rows without target count 0. */
static double kl_of(mn_tape *tape, mn_tensor *m, mn_tensor *r, const int32_t *targets, int64_t n,
                    int64_t counted) {
    if (mn_tape_status(tape) != MN_OK || mn_tape_plans(tape)) return 0.0;
    float *host = mn_tape_host(tape, (size_t)(2 * n) * sizeof *host);
    if (!host || mn_tape_read(tape, m, host) != MN_OK) return 0.0;
    if (mn_tape_read(tape, r, host + n) != MN_OK) return 0.0;
    double sum = 0.0;
    for (int64_t i = 0; i < n; i++) {
        if (targets[i] >= 0) sum += (double)host[i] + log((double)host[n + i]);
    }
    return sum / (double)mn_max(counted, 1);
}

/* 1 / counted at tokens with a target, 0 at others, times `by`. */
static mn_tensor *shares_of(mn_tape *tape, const int32_t *targets, const int64_t shape[4],
                            double by, int64_t counted) {
    const int64_t n = shape[0] * shape[1];
    double *share = mn_tape_host(tape, (size_t)n * sizeof *share);
    for (int64_t i = 0; share && i < n; i++) {
        share[i] = targets[i] >= 0 ? by / (double)mn_max(counted, 1) : 0.0;
    }
    const int64_t rows[4] = { shape[0], shape[1], 1, 1 };
    mn_tensor *x = share ? mn_tape_constant(tape, rows, share) : NULL;
    return x ? mn_tape_cast(tape, x, wide(tape)) : NULL;
}

/* k, with `weight` of its gradient started at the student's logits. */
static double kl_term(mn_tape *tape, mn_tensor *logits, mn_tensor *teachers,
                      const int32_t *targets, double weight, int64_t counted) {
    if (!logits || !teachers) return 0.0;
    mn_tensor *x = mn_tape_cast(tape, logits, wide(tape));
    mn_tensor *z = mn_tape_cast(tape, teachers, wide(tape));
    mn_tensor *p = mn_tape_softmax(tape, z), *q = mn_tape_softmax(tape, x);
    mn_tensor *share = shares_of(tape, targets, logits->shape, weight, counted);
    mn_tensor *dx = mn_tape_multiply(tape, less(tape, q, p), share);
    const int64_t rows[4] = { logits->shape[0], logits->shape[1], 1, 1 };
    mn_tensor *gap = less(tape, x, z);
    mn_tensor *r = mn_tape_multiply(tape, p, mn_tape_unary(tape, MN_UNARY_EXP, gap));
    mn_tensor *m = mn_tape_multiply(tape, p, mn_tape_affine(tape, gap, -1.0, 0.0));
    const double k = kl_of(tape, mn_tape_sum(tape, m, rows), mn_tape_sum(tape, r, rows), targets,
                           rows[0] * rows[1], counted);
    start_back(tape, logits, dx);
    return k;
}

/* ---- passes ---------------------------------------------------------------------------------- */

/* The error terms of all layers, each with `weight` of the gradient, and cosines where wanted. */
static double layer_terms(const mn_distill *d, mn_tape *tape, const mn_model_branches *own,
                          const mn_model_branches *teachers, double weight, double cosine) {
    double sum = 0.0;
    for (int i = 0; i < MN_MAX_LAYERS; i++) {
        mn_tensor *dy;
        if (!d->of[i] || mn_tape_status(tape) != MN_OK) continue;
        if (!own->added[i] || !teachers->added[i]) {
            mn_tape_fail(tape, mn_fail(MN_ERR_UNSUPPORTED, "layer %d does not end with a "
                                       "projection onto the stream", i));
            return sum;
        }
        mn_tensor *y = mn_tape_cast(tape, own->added[i], wide(tape));
        mn_tensor *t = mn_tape_cast(tape, teachers->added[i], wide(tape));
        const double share = weight / (double)d->n;
        sum += error_term(tape, y, t, share, &dy) / (double)d->n;
        if (cosine > 0.0) {
            sum += cosine * cosine_term(tape, y, t, share * cosine, &dy) / (double)d->n;
        }
        start_back(tape, own->added[i], dy);
    }
    return sum;
}

/* The blocks of a student that runs no stream of its own have their gradients at the end. */
static void notify_all(mn_tape *tape, const mn_model *student, const mn_model_input *in) {
    for (int i = 0; in->ready && i < mn_model_describe(student)->n_layers; i++) {
        mn_tape_notify(tape, in->ready, in->ready_context, i);
    }
}

static double by_layers(mn_distill *d, mn_tape *tape, mn_model *student, const mn_model_input *in,
                        mn_model_branches *teachers, double weight) {
    mn_model_branches own = { 0 };
    memcpy(own.of, d->of, sizeof own.of);
    memcpy(own.read, teachers->read, sizeof own.read);
    mn_tape_no_gradient(tape, false);
    notify_all(tape, student, in);
    mn_model_run_branches(student, tape, &own, in->add_gradients);
    mn_tape_no_gradient(tape, true);
    return layer_terms(d, tape, &own, teachers, weight, d->options->distill_cosine);
}

static double by_model(mn_distill *d, mn_tape *tape, mn_model *student, const mn_model_input *in,
                       const mn_model_branches *teachers, mn_tensor *logits,
                       const int32_t *targets, int64_t counted, int64_t step, double weight) {
    mn_model_branches own = { 0 };
    mn_model_input with = *in;
    double kl, boundary;
    mn_distill_weights(&kl, &boundary, d->options, step);
    memcpy(own.of, d->of, sizeof own.of);
    with.branches = &own;
    mn_tape_no_gradient(tape, false);
    mn_tensor *hidden = mn_model_hidden(student, tape, &with);
    mn_tensor *x = mn_model_logits(student, tape, hidden);
    mn_tape_no_gradient(tape, true);
    double loss = boundary * layer_terms(d, tape, &own, teachers, weight * boundary, 0.0);
    if (kl > 0.0) loss += kl * kl_term(tape, x, logits, targets, weight * kl, counted);
    return loss;
}

void mn_distill_forward(mn_distill *d, mn_tape *tape, mn_model *student, const mn_model_input *in,
                        const int32_t *targets, int64_t step, double weight, double *loss,
                        int64_t *counted) {
    mn_model_branches teachers = { 0 };
    mn_model_input asked = { .tokens = in->tokens, .B = in->B, .T = in->T, .starts = in->starts,
                             .n_sequences = in->n_sequences, .branches = &teachers,
                             .recompute = MN_RECOMPUTE_LAYER };
    memcpy(teachers.of, d->of, sizeof teachers.of);
    *counted = 0;
    for (int64_t i = 0; i < in->B * in->T; i++) *counted += targets[i] >= 0;
    mn_tape_no_gradient(tape, true);
    mn_tensor *hidden = mn_model_hidden(d->teacher, tape, &asked);
    if (d->by_model) {
        mn_tensor *logits = mn_model_logits(d->teacher, tape, hidden);
        *loss = by_model(d, tape, student, in, &teachers, logits, targets, *counted, step, weight);
    } else {
        *loss = by_layers(d, tape, student, in, &teachers, weight);
    }
    mn_tape_no_gradient(tape, false);
    d->result = (mn_loss_result){ *loss, *counted };
    if (!d->device || mn_tape_plans(tape) || mn_tape_status(tape) != MN_OK) return;
    const mn_status st = mn_device_upload(d->device, d->told, &d->result, sizeof d->result);
    if (st != MN_OK) mn_tape_fail(tape, st);
}
