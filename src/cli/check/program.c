/* program.c - golden files of what layers make of several operators (programs.def), on a tape.
 *
 * On a processor results are held to the file. In bf16 on a GPU they are held to the same program
 * in float64 on inputs rounded to bf16, as golden.h says of operators that round between their
 * parts. */
#include "cli/check/program.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/bf16.h"
#include "base/dtype.h"
#include "base/rng.h"
#include "base/status.h"
#include "cli/check/check.h"

/* ---- numbers here and in the file ------------------------------------------------------------ */

/* Place here of number i of the file, for copy `copy` of its head; -1: none. */
static int64_t place_of(const mn_program_layout *l, int64_t i, int64_t copy) {
    if (l->lags) return i / l->b < l->lags ? i % l->b * l->lags + l->lags - 1 - i / l->b : -1;
    if (l->times == 1 && !l->turned) return i;
    const int64_t each = l->a * l->b, inner = i % each, head = i / each * l->times + copy;
    return head * each + (l->turned ? inner % l->b * l->a + inner / l->b : inner);
}

static double number_at(mn_dtype dtype, const void *data, int64_t i) {
    if (dtype == MN_F64) return ((const double *)data)[i];
    if (dtype == MN_F32) return (double)((const float *)data)[i];
    return (double)mn_bf16_to_float(((const uint16_t *)data)[i]);
}

static void set_number(mn_dtype dtype, void *data, int64_t i, double x) {
    if (dtype == MN_F64) ((double *)data)[i] = x;
    else if (dtype == MN_F32) ((float *)data)[i] = (float)x;
    else ((uint16_t *)data)[i] = mn_bf16_from_float((float)x);
}

static void *allocate(mn_program *p, const void *from, size_t bytes) {
    void *data = NULL;
    if (!p->device) {
        data = calloc(1, bytes + 1);
        if (data && from) memcpy(data, from, bytes);
        return data;
    }
    if (mn_device_allocate(p->device, &data, bytes + 1) != MN_OK) return NULL;
    const mn_status st = from ? mn_device_upload(p->device, data, from, bytes)
                              : mn_device_fill(p->device, data, 0, bytes);
    return st == MN_OK ? data : NULL;
}

static void release(mn_program *p, void *data) {
    if (p->device) mn_device_free(p->device, data);
    else free(data);
}

/* Numbers `prefix` + `name` of the file; NULL where it has none. */
static double *stored(const mn_program *p, const char *prefix, const char *name, int64_t *count) {
    char full[64];
    snprintf(full, sizeof full, "%s%s", prefix, name);
    const mn_stored_tensor *t = mn_safetensors_find(p->file, full);
    if (!t) return NULL;
    *count = mn_stored_elements(t);
    double *x = malloc((size_t)(*count + 1) * sizeof *x);
    if (x && mn_safetensors_read_f64(x, t) == MN_OK) return x;
    free(x);
    return NULL;
}

/* As the type of a call rounds it, and moved by the program's nudge. */
static double taken(const mn_program *p, int which, int64_t i, double x) {
    if (p->rounded) x = (double)mn_bf16_round(x);
    if (p->nudge == 0.0) return x;
    return x * (mn_rng_uniform(1, (uint64_t)which, (uint64_t)i) < 0.5 ? 1.0 + p->nudge
                                                                      : 1.0 - p->nudge);
}

/* ---- inputs ---------------------------------------------------------------------------------- */

static mn_program_tensor *add_input(mn_program *p, const char *name, mn_program_layout layout) {
    int64_t count = 0;
    if (p->n_inputs == MN_PROGRAM_TENSORS) return NULL;
    double *x = stored(p, "", name, &count);
    if (!x) return NULL;
    mn_program_tensor *in = &p->inputs[p->n_inputs++];
    snprintf(in->name, sizeof in->name, "%s", name);
    in->layout = layout, in->stored = count;
    in->count = layout.lags ? layout.lags * layout.b : count * layout.times;
    in->value = x;
    void *here = calloc((size_t)in->count + 1, sizeof(double));
    for (int64_t i = 0; here && i < count; i++) {
        // of odds the call takes the logarithm: that is rounded, as 0.999 itself would be 1
        const double given = layout.odds ? log(x[i]) - log1p(-x[i]) : x[i];
        const double y = taken(p, p->n_inputs, i, given);
        if (y != given) x[i] = layout.odds ? 1.0 / (1.0 + exp(-y)) : y;
        for (int64_t copy = 0; copy < layout.times; copy++) {
            const int64_t at = place_of(&layout, i, copy);
            if (at >= 0) set_number(p->dtype, here, at, y);
        }
    }
    if (here) in->data = allocate(p, here, (size_t)in->count * mn_dtype_bytes(p->dtype));
    in->grad = allocate(p, NULL, (size_t)in->count * sizeof(double));
    free(here);
    if (!in->data || !in->grad) mn_tape_fail(p->tape, mn_fail(MN_ERR_MEMORY, "no memory"));
    return in->data && in->grad ? in : NULL;
}

static const mn_program_layout as_is = { 1, 1, 1, 1, false, false, 0 };

static mn_tensor *input(mn_program *p, const char *name, bool heads, bool odds) {
    mn_program_layout layout = as_is;
    layout.odds = odds;
    mn_program_tensor *in = add_input(p, name, layout);
    if (!in) return NULL;
    const mn_stored_tensor *t = mn_safetensors_find(p->file, name);
    const int64_t *n = t->shape;
    if (t->rank <= 2) {
        in->x = mn_tape_leaf(p->tape, in->data, in->grad, t->rank == 2 ? n[0] : 1, n[t->rank - 1],
                             false);
    } else {
        const int64_t shape[4] = { n[0], n[1], t->rank == 4 || heads ? n[2] : 1,
                                   t->rank == 4 ? n[3] : heads ? 1 : n[2] };
        in->x = mn_tape_input(p->tape, in->data, in->grad, shape);
    }
    return in->x;
}

mn_tensor *mn_program_in(mn_program *p, const char *name) {
    return input(p, name, false, false);
}

mn_tensor *mn_program_in_heads(mn_program *p, const char *name) {
    return input(p, name, true, false);
}

mn_tensor *mn_program_odds_in(mn_program *p, const char *name) {
    return input(p, name, false, true);
}

mn_tensor *mn_program_param_in(mn_program *p, const char *name, int64_t rows, int64_t cols,
                               mn_program_layout layout) {
    mn_program_tensor *in = add_input(p, name, layout);
    if (!in) return NULL;
    if (in->count != rows * cols) {
        return mn_tape_fail(p->tape, mn_fail(MN_ERR_FORMAT, "%s holds %lld numbers, not %lld x "
                                             "%lld", name, (long long)in->count, (long long)rows,
                                             (long long)cols));
    }
    return in->x = mn_tape_leaf(p->tape, in->data, in->grad, rows, cols, false);
}

mn_tensor *mn_program_state_in(mn_program *p, const char *name, mn_program_layout layout) {
    mn_program_tensor *in = add_input(p, name, layout);
    if (!in) return NULL;
    const int64_t shape[4] = { 1, 1, 1, in->count };
    return in->x = mn_tape_input(p->tape, in->data, in->grad, shape);
}

double mn_program_number(const mn_program *p, const char *key, double otherwise) {
    const char *text = mn_safetensors_metadata(p->file, key);
    return text ? strtod(text, NULL) : otherwise;
}

int64_t mn_program_size(const mn_program *p, const char *name, int axis) {
    const mn_stored_tensor *t = mn_safetensors_find(p->file, name);
    return t && axis < t->rank ? mn_max(t->shape[axis], 1) : 1;
}

/* ---- results --------------------------------------------------------------------------------- */

/* All numbers of x in the order of its axes. */
static double *numbers_of(mn_program *p, const mn_tensor *x, int64_t count) {
    double *out = malloc((size_t)(count + 1) * sizeof *out);
    float *fetched = p->device ? malloc((size_t)(count + 1) * sizeof *fetched) : NULL;
    mn_status st = out && (fetched || !p->device) ? MN_OK : mn_fail(MN_ERR_MEMORY, "no memory");
    if (st == MN_OK && p->device) st = mn_tape_read(p->tape, x, fetched);
    for (int64_t i = 0; st == MN_OK && i < count; i++) {
        const int64_t *n = x->shape;
        const int64_t at = i / (n[3] * n[2] * n[1]) * x->stride[0] +
                           i / (n[3] * n[2]) % n[1] * x->stride[1] +
                           i / n[3] % n[2] * x->stride[2] + i % n[3];
        out[i] = fetched ? (double)fetched[i] : number_at(x->dtype, x->data, at);
    }
    free(fetched);
    if (st == MN_OK) return out;
    mn_tape_fail(p->tape, st);
    free(out);
    return NULL;
}

/* Starts the gradient of a result at the file's cotangent. */
static void seed(mn_program *p, mn_program_tensor *out) {
    int64_t n = 0;
    double *d = stored(p, "d", out->name, &n);
    void *here = d ? calloc((size_t)out->count + 1, sizeof(double)) : NULL;
    for (int64_t i = 0; here && i < n; i++) {
        set_number(out->x->dtype, here, place_of(&out->layout, i, 0), taken(p, 99, i, d[i]));
    }
    if (here) out->data = allocate(p, here, (size_t)out->count * mn_dtype_bytes(out->x->dtype));
    if (out->data) mn_tape_seed(p->tape, out->x, out->data);
    free(here);
    free(d);
}

void mn_program_state_out(mn_program *p, const char *name, mn_tensor *x,
                          mn_program_layout layout) {
    const mn_stored_tensor *t = mn_safetensors_find(p->file, name);
    if (!x || !t || p->n_outputs == MN_PROGRAM_TENSORS) return;
    mn_program_tensor *out = &p->outputs[p->n_outputs++];
    snprintf(out->name, sizeof out->name, "%s", name);
    out->layout = layout, out->x = x, out->stored = mn_stored_elements(t);
    out->count = x->shape[0] * x->shape[1] * x->shape[2] * x->shape[3];
    if (out->count != out->stored * layout.times) {
        mn_tape_fail(p->tape, mn_fail(MN_ERR_FORMAT, "%s holds %lld numbers, not %lld", name,
                                      (long long)out->stored, (long long)out->count));
        return;
    }
    double *all = numbers_of(p, x, out->count);
    out->value = calloc((size_t)out->stored + 1, sizeof *out->value);
    for (int64_t i = 0; all && out->value && i < out->stored; i++) {
        out->value[i] = all[place_of(&layout, i, 0)];
    }
    free(all);
    seed(p, out);
}

void mn_program_out(mn_program *p, const char *name, mn_tensor *x) {
    mn_program_state_out(p, name, x, as_is);
}

/* Gradients of the inputs as the file has them. */
static mn_status fetch_gradients(mn_program *p) {
    mn_status st = MN_OK;
    for (int k = 0; k < p->n_inputs && st == MN_OK; k++) {
        mn_program_tensor *in = &p->inputs[k];
        const mn_dtype dtype = in->x && in->x->slot ? in->x->slot->dtype : p->dtype;
        const size_t bytes = (size_t)in->count * mn_dtype_bytes(dtype);
        void *here = malloc(bytes + 1);
        in->gradient = calloc((size_t)in->stored + 1, sizeof *in->gradient);
        if (!here || !in->gradient) st = mn_fail(MN_ERR_MEMORY, "no memory");
        else if (p->device) st = mn_device_download(p->device, here, in->grad, bytes);
        else memcpy(here, in->grad, bytes);
        for (int64_t i = 0; st == MN_OK && i < in->stored; i++) {
            double sum = 0.0;
            for (int64_t copy = 0; copy < in->layout.times; copy++) {
                const int64_t at = place_of(&in->layout, i, copy);
                if (at >= 0) sum += number_at(dtype, here, at);
            }
            if (in->layout.odds) sum /= in->value[i] * (1.0 - in->value[i]);
            in->gradient[i] = sum;
        }
        free(here);
    }
    return st;
}

static void free_program(mn_program *p) {
    mn_tape_destroy(p->tape);
    for (int k = 0; k < p->n_inputs; k++) {
        release(p, p->inputs[k].data);
        release(p, p->inputs[k].grad);
        free(p->inputs[k].value);
        free(p->inputs[k].gradient);
    }
    for (int k = 0; k < p->n_outputs; k++) {
        release(p, p->outputs[k].data);
        free(p->outputs[k].value);
    }
    free(p);
}

/* ---- a file ---------------------------------------------------------------------------------- */

static mn_status packing(mn_program *p, int64_t **borders) {
    int64_t n = 0;
    double *x = stored(p, "", "cu_seqlens", &n);
    *borders = x ? calloc((size_t)n + 1, sizeof **borders) : NULL;
    for (int64_t i = 0; *borders && i < n; i++) (*borders)[i] = (int64_t)x[i];
    if (*borders) mn_tape_pack(p->tape, *borders, n - 1);
    free(x);
    return MN_OK;
}

/* Runs the file's program forward and back. `out` is there on success: free_program. */
static mn_status run(mn_program **out, const mn_safetensors *file, mn_context *context,
                     mn_dtype dtype, bool rounded, double nudge) {
    mn_program *p = calloc(1, sizeof *p);
    int64_t *borders = NULL;
    if (!p) return mn_fail(MN_ERR_MEMORY, "no memory");
    p->file = file, p->dtype = dtype, p->rounded = rounded, p->nudge = nudge;
    p->device = context->device;
    mn_status st = mn_tape_create(&p->tape, context, dtype);
    if (st == MN_OK) {
        mn_tape_start(p->tape, MN_TAPE_RECORD);
        st = packing(p, &borders);
    }
    if (st == MN_OK) {
        mn_program_find(mn_safetensors_metadata(file, "op"))(p);
        st = mn_tape_status(p->tape);
    }
    if (st == MN_OK) st = mn_tape_backward(p->tape);
    if (st == MN_OK) st = mn_tape_results(p->tape);
    if (st == MN_OK) st = fetch_gradients(p);
    free(borders);
    *out = p;
    if (st == MN_OK) return st;
    free_program(p);
    *out = NULL;
    return st;
}

static const double *found(const mn_program *p, const char *name, int64_t *count) {
    for (int k = 0; k < p->n_outputs; k++) {
        if (strcmp(p->outputs[k].name, name) != 0) continue;
        *count = p->outputs[k].stored;
        return p->outputs[k].value;
    }
    for (int k = 0; name[0] == 'd' && k < p->n_inputs; k++) {
        if (strcmp(p->inputs[k].name, name + 1) != 0) continue;
        *count = p->inputs[k].stored;
        return p->inputs[k].gradient;
    }
    return NULL;
}

/* A file's programs and where their results are counted. */
typedef struct hearing {
    mn_check *check;
    const mn_program *got, *want, *moved;    // the last two for bf16
} hearing;

static mn_status visit_tensor(void *context, const char *name) {
    const hearing *h = context;
    mn_golden_numbers n = { 0 };
    n.got = found(h->got, name, &n.count);
    n.want = h->want ? found(h->want, name, &n.count) : NULL;
    n.moved = h->moved ? found(h->moved, name, &n.count) : NULL;
    if (!n.got) return mn_fail(MN_ERR_FORMAT, "nothing comparable was computed for %s", name);
    mn_golden_result result = { 0 };
    const mn_status st = mn_golden_compare_numbers(&result, &n, h->check->file, name,
                                                   h->got->dtype == MN_F64);
    if (st == MN_OK) mn_check_report(h->check, name, &result);
    return st;
}

mn_status mn_check_program(mn_check *check, const mn_safetensors *file, mn_context *context,
                           mn_context *reference, mn_dtype dtype) {
    mn_program *got = NULL, *want = NULL, *moved = NULL;
    const bool bf16 = dtype == MN_BF16;
    mn_status st = run(&got, file, context, dtype, bf16, 0.0);
    if (st == MN_OK && bf16) st = run(&want, file, reference, MN_F64, true, 0.0);
    if (st == MN_OK && bf16) st = run(&moved, file, reference, MN_F64, true, 1.0 / 256.0);
    hearing h = { check, got, want, moved };
    if (st == MN_OK) st = mn_golden_each(file, "outputs", visit_tensor, &h);
    if (st == MN_OK) st = mn_golden_each(file, "grads", visit_tensor, &h);
    if (got) free_program(got);
    if (want) free_program(want);
    if (moved) free_program(moved);
    return st;
}
