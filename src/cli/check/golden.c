/* golden.c - a golden file as a sample of its operator, and the comparison.
 *
 * Names: an input x, its gradient dx, a result y, its cotangent dy; dots in names are underscores
 * in the argument structs. Sizes follow from the shapes and the axes in ops.def. */
#include "cli/check/golden.h"

#include <inttypes.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/deviation.h"
#include "base/status.h"
#include "base/util.h"

enum { MAX_NAME = 128 };

/* c_proj.weight -> c_proj_weight */
static void plain_name(char out[MAX_NAME], const char *name) {
    snprintf(out, MAX_NAME, "%s", name);
    for (char *at = out; *at; at++) {
        if (*at == '.') *at = '_';
    }
}

static bool plain_equal(const char *stored, const char *field) {
    char plain[MAX_NAME];
    plain_name(plain, stored);
    return strcmp(plain, field) == 0;
}

/* The stored tensor called prefix + field name, dots aside; NULL if there is none. */
static const mn_stored_tensor *stored(const mn_safetensors *file, const char *prefix,
                                      const char *field) {
    const size_t skip = strlen(prefix);
    for (int64_t i = 0; i < mn_safetensors_count(file); i++) {
        const mn_stored_tensor *tensor = mn_safetensors_at(file, i);
        if (strncmp(tensor->name, prefix, skip) == 0 && plain_equal(tensor->name + skip, field)) {
            return tensor;
        }
    }
    return NULL;
}

static int64_t rows_of(const mn_stored_tensor *tensor, int from, int to) {
    int64_t rows = 1;
    for (int i = from; i < to; i++) rows *= tensor->shape[i];
    return rows;
}

static mn_status set_size(mn_call *call, const char *name, char letter, int64_t size) {
    if (letter == 'M' && call->W == 0) call->W = size + 1;
    if (letter == 'N' || letter == 'M' || letter == '1') return MN_OK;
    int64_t *slot = mn_axis_slot(call, letter);
    if (!slot || (*slot != 0 && *slot != size)) {
        return mn_fail(MN_ERR_FORMAT, "%s: axis %c is %" PRId64 " here and %" PRId64 " elsewhere",
                       name, letter, size, slot ? *slot : 0);
    }
    *slot = size;
    return MN_OK;
}

/* Sizes of one tensor with axes such as "BTHK" or "S*". */
static mn_status take_sizes(mn_call *call, const mn_stored_tensor *tensor, const char *axes) {
    const int rank = (int)strlen(axes);
    const char *star = strchr(axes, '*');
    if (!star && tensor->rank == rank + 1) star = strchr(axes, 'Q');    // (n,H) as rows of one axis
    if (star ? tensor->rank < rank - 1 : tensor->rank != rank) {
        return mn_fail(MN_ERR_FORMAT, "%s has %d axes, expected %s", tensor->name, tensor->rank,
                       axes);
    }
    mn_status st = MN_OK;
    for (int i = 0, at = 0; i < rank && st == MN_OK; i++) {
        const int span = axes + i == star ? tensor->rank - (rank - 1) : 1;
        st = set_size(call, tensor->name, axes[i], rows_of(tensor, at, at + span));
        at += span;
    }
    return st;
}

/* The form of a log decay follows from its rank. */
static int decay_of_rank(int rank) {
    return rank == 1 ? MN_DECAY_HEAD : rank == 3 ? MN_DECAY_TOKEN : MN_DECAY_CHANNEL;
}

/* Sizes, the form of the decay, and which optional fields are there. */
static mn_status infer_sizes(mn_sample *sample, const mn_safetensors *file, uint64_t *present) {
    mn_call *call = (mn_call *)sample->args;
    int count;
    const mn_field *fields = mn_op_fields(sample->op, &count);
    mn_status st = MN_OK;
    *present = 0;
    for (int i = 0; i < count && st == MN_OK; i++) {
        const mn_stored_tensor *tensor = stored(file, "", fields[i].name);
        if (!tensor) continue;
        *present |= (uint64_t)1 << i;
        if (strchr(fields[i].axes, '|')) {
            *mn_args_decay_slot(sample->op, sample->args) = decay_of_rank(tensor->rank);
        }
        char axes[MN_MAX_RANK + 1];
        const int decay = mn_args_decay(sample->op, sample->args);
        if (mn_field_axes(&fields[i], decay, axes)) st = take_sizes(call, tensor, axes);
    }
    return st;
}

static int choice_index(const char *choices, const char *value) {
    int index = 0;
    for (const char *at = choices;; index++) {
        const size_t length = strcspn(at, ",");
        if (strlen(value) == length && strncmp(at, value, length) == 0) return index;
        if (!at[length]) return -1;
        at += length + 1;
    }
}

static mn_status bind_params(mn_sample *sample, const mn_safetensors *file) {
    int count;
    const mn_param *params = mn_op_params(sample->op, &count);
    for (int i = 0; i < count; i++) {
        const char *text = mn_safetensors_metadata(file, params[i].name);
        if (!text) continue;
        void *at = sample->args + params[i].offset;
        char *end = NULL;
        if (params[i].kind == MN_PARAM_CHOICE) {
            *(int *)at = choice_index(params[i].choices, text);
            if (*(int *)at < 0) {
                return mn_fail(MN_ERR_FORMAT, "%s is \"%s\", not one of %s", params[i].name, text,
                               params[i].choices);
            }
            continue;
        }
        if (params[i].kind == MN_PARAM_REAL) *(double *)at = strtod(text, &end);
        if (params[i].kind == MN_PARAM_INT) *(int64_t *)at = strtoll(text, &end, 10);
        if (end == text || *end) {
            return mn_fail(MN_ERR_FORMAT, "%s is \"%s\", not a number", params[i].name, text);
        }
    }
    return MN_OK;
}

/* Offsets are stored as a tensor of whole numbers. */
static mn_status bind_packing(mn_call *call, int64_t **cu, const mn_safetensors *file) {
    *cu = NULL;
    const mn_stored_tensor *tensor = stored(file, "", "cu_seqlens");
    if (!tensor) return MN_OK;
    const int64_t count = mn_stored_elements(tensor);
    if (count < 2) return mn_fail(MN_ERR_FORMAT, "cu_seqlens holds %" PRId64 " offsets", count);
    double *values = malloc((size_t)count * sizeof *values);
    *cu = malloc((size_t)count * sizeof **cu);
    mn_status st = values && *cu ? mn_safetensors_read_f64(values, tensor)
                                 : mn_fail(MN_ERR_MEMORY, "no memory for cu_seqlens");
    for (int64_t i = 0; st == MN_OK && i < count; i++) {
        if (!(fabs(values[i]) < 1e15))
            st = mn_fail(MN_ERR_FORMAT, "cu_seqlens is not whole numbers");
        else (*cu)[i] = (int64_t)values[i];
    }
    free(values);
    call->cu_seqlens = *cu;
    call->n_seqs = count - 1;
    return st;
}

static mn_status read_into(const mn_sample *sample, void *data, int64_t count,
                           const mn_stored_tensor *tensor) {
    if (mn_stored_elements(tensor) != count) {
        return mn_fail(MN_ERR_FORMAT, "%s holds %" PRId64 " numbers, expected %" PRId64,
                       tensor->name, mn_stored_elements(tensor), count);
    }
    const bool f64 = ((const mn_call *)sample->args)->dtype == MN_F64;
    return f64 ? mn_safetensors_read_f64(data, tensor) : mn_safetensors_read_f32(data, tensor);
}

/* Inputs from the file; cotangents from the file, zero where it has none. */
static mn_status fill(mn_sample *sample, const mn_safetensors *file) {
    mn_status st = MN_OK;
    for (int i = 0; i < sample->n_tensors && st == MN_OK; i++) {
        mn_sample_tensor *tensor = &sample->tensors[i];
        const bool input = tensor->field->role <= MN_ROLE_RAW;
        void *data = input ? tensor->data : tensor->partner;
        if (!data) continue;
        const mn_stored_tensor *from = stored(file, input ? "" : "d", tensor->field->name);
        if (from) {
            st = read_into(sample, data, tensor->count, from);
        } else if (input) {
            st = mn_fail(MN_ERR_FORMAT, "the file has no tensor %s", tensor->field->name);
        } else {
            for (int64_t at = 0; at < tensor->count; at++) mn_sample_set(sample, data, at, 0.0);
        }
    }
    return st;
}

mn_status mn_golden_bind(mn_sample *sample, int64_t **cu, const mn_safetensors *file,
                         mn_dtype dtype) {
    const char *name = mn_safetensors_metadata(file, "op");
    mn_op_id op;
    uint64_t present;
    *cu = NULL;
    if (!name) return mn_fail(MN_ERR_FORMAT, "no metadata \"op\": not a golden file");
    if (!mn_op_find(&op, name))
        return mn_fail(MN_ERR_UNSUPPORTED, "no operator is called %s", name);
    mn_sample_init(sample, op);
    mn_call *call = (mn_call *)sample->args;
    call->dtype = dtype;
    mn_status st = bind_packing(call, cu, file);
    if (st == MN_OK) st = infer_sizes(sample, file, &present);
    if (st == MN_OK) st = bind_params(sample, file);
    if (st == MN_OK) st = mn_sample_allocate(sample, present);
    if (st == MN_OK) st = fill(sample, file);
    return st;
}

/* What the sample computed under `name`: a result, or the gradient of an input for a leading d. */
static const void *computed(const mn_sample *sample, const char *name, int64_t *count,
                            const mn_field **field) {
    for (int i = 0; i < sample->n_tensors; i++) {
        const mn_sample_tensor *tensor = &sample->tensors[i];
        const bool input = tensor->field->role <= MN_ROLE_RAW;
        const bool match = input ? name[0] == 'd' && plain_equal(name + 1, tensor->field->name)
                                 : plain_equal(name, tensor->field->name);
        if (!match) continue;
        *count = tensor->count;
        *field = tensor->field;
        return input ? tensor->partner : tensor->data;
    }
    return NULL;
}

/* Whether metadata `symmetric` lists the tensor: then its gradient counts up to antisymmetry. */
static bool listed(const char *list, const char *name) {
    const size_t length = strlen(name);
    for (const char *at = list; at && *at; at = strchr(at, ',') ? strchr(at, ',') + 1 : NULL) {
        if (strncmp(at, name, length) == 0 && (at[length] == ',' || !at[length])) return true;
    }
    return false;
}

static double value_at(const mn_sample *sample, const void *data, int64_t i, int64_t square) {
    if (square == 0) return mn_sample_get(sample, data, i);
    const int64_t block = i / (square * square) * square * square;
    const int64_t row = (i - block) / square, col = (i - block) % square;
    return 0.5 * (mn_sample_get(sample, data, i) +
                  mn_sample_get(sample, data, block + col * square + row));
}

static mn_status tolerance_of(double *out, const mn_safetensors *file, const char *name, bool f64) {
    char key[MAX_NAME];
    snprintf(key, sizeof key, "tol%d.%s", f64 ? 64 : 32, name);
    const char *text = mn_safetensors_metadata(file, key);
    if (!text) return mn_fail(MN_ERR_FORMAT, "no metadata \"%s\"", key);
    *out = strtod(text, NULL);
    return *out > 0 ? MN_OK : mn_fail(MN_ERR_FORMAT, "%s is \"%s\", not a tolerance", key, text);
}

/* Values with the stored ones, by result->tolerance. */
static mn_status compare_with_file(mn_golden_result *result, const double *values, int64_t count,
                                   const mn_stored_tensor *want) {
    double *reference = malloc(((size_t)count + 1) * sizeof *reference);
    if (!reference) return mn_fail(MN_ERR_MEMORY, "no memory for %s", want->name);
    const mn_status st = mn_safetensors_read_f64(reference, want);
    double error2 = 0.0, norm2 = 0.0, worst = 0.0, largest = 0.0;
    for (int64_t i = 0; st == MN_OK && i < count; i++) {
        const double d = fabs(values[i] - reference[i]);
        error2 += d * d;
        norm2 += reference[i] * reference[i];
        worst = d > worst || isnan(d) ? d : worst;
        largest = fmax(largest, fabs(reference[i]));
    }
    free(reference);
    result->rms = norm2 > 0 ? sqrt(error2 / norm2) : sqrt(error2);
    result->worst = largest > 0 ? worst / largest : worst;
    result->passed = sqrt(error2) <= result->tolerance * sqrt(norm2) &&
                     worst <= 16 * result->tolerance * largest;
    return st;
}

mn_status mn_golden_compare(mn_golden_result *result, const mn_sample *sample,
                            const mn_safetensors *file, const char *name) {
    int64_t count = 0;
    const mn_field *field = NULL;
    const mn_stored_tensor *want;
    const void *got = computed(sample, name, &count, &field);
    const bool f64 = ((const mn_call *)sample->args)->dtype == MN_F64;
    mn_status st = mn_safetensors_get(&want, file, name);
    if (st == MN_OK) st = tolerance_of(&result->tolerance, file, name, f64);
    if (st != MN_OK) return st;
    if (!got || mn_stored_elements(want) != count) {
        return mn_fail(MN_ERR_FORMAT, "nothing comparable was computed for %s", name);
    }
    const bool input = field->role <= MN_ROLE_RAW;
    const char *symmetric = mn_safetensors_metadata(file, "symmetric");
    const int64_t square = input && symmetric && listed(symmetric, field->name)
                               ? want->shape[want->rank - 1] : 0;
    double *values = malloc(((size_t)count + 1) * sizeof *values);
    if (!values) return mn_fail(MN_ERR_MEMORY, "no memory for %s", name);
    for (int64_t i = 0; i < count; i++) values[i] = value_at(sample, got, i, square);
    st = compare_with_file(result, values, count, want);
    free(values);
    return st;
}

static void compare_bf16(mn_golden_result *result, const mn_golden_numbers *n, int64_t width) {
    const mn_deviation off = mn_deviation_of(n->got, n->want, n->count, width);
    double rms = 2.0 * MN_BF16_UNIT / sqrt(3.0), share = 2.0 * MN_BF16_UNIT;
    if (n->moved) {
        const mn_deviation by = mn_deviation_of(n->moved, n->want, n->count, width);
        rms = fmax(rms, 2.0 * by.of_rms), share = fmax(share, 2.0 * by.share);
    }
    result->rms = off.of_rms;
    result->worst = off.share;
    result->tolerance = rms;
    result->passed = off.of_rms <= rms && (off.share <= share || off.of_law <= 1.0);
}

static int64_t row_width(const mn_stored_tensor *tensor) {
    return tensor->rank > 0 ? mn_max(tensor->shape[tensor->rank - 1], 1) : 1;
}

mn_status mn_golden_compare_numbers(mn_golden_result *result, const mn_golden_numbers *numbers,
                                    const mn_safetensors *file, const char *name, bool f64) {
    const mn_stored_tensor *want;
    mn_status st = mn_safetensors_get(&want, file, name);
    if (st != MN_OK) return st;
    if (mn_stored_elements(want) != numbers->count) {
        return mn_fail(MN_ERR_FORMAT, "nothing comparable was computed for %s", name);
    }
    if (numbers->want) {
        compare_bf16(result, numbers, row_width(want));
        return MN_OK;
    }
    st = tolerance_of(&result->tolerance, file, name, f64);
    return st == MN_OK ? compare_with_file(result, numbers->got, numbers->count, want) : st;
}

/* What the sample computed, as numbers of which antisymmetry does not count in `square`s. */
static double *values_of(const mn_sample *sample, const void *data, int64_t count, int64_t square) {
    double *values = malloc(((size_t)count + 1) * sizeof *values);
    for (int64_t i = 0; values && i < count; i++) values[i] = value_at(sample, data, i, square);
    return values;
}

mn_status mn_golden_compare_bf16(mn_golden_result *result, const mn_sample *got,
                                 const mn_sample *want, const mn_sample *moved,
                                 const mn_safetensors *file, const char *name) {
    int64_t count = 0, n_want = 0;
    const mn_field *field = NULL;
    const mn_stored_tensor *shape;
    const void *x = computed(got, name, &count, &field), *y = computed(want, name, &n_want, &field);
    mn_status st = mn_safetensors_get(&shape, file, name);
    if (st != MN_OK) return st;
    if (!x || !y || count != n_want || mn_stored_elements(shape) != count) {
        return mn_fail(MN_ERR_FORMAT, "nothing comparable was computed for %s", name);
    }
    const char *symmetric = mn_safetensors_metadata(file, "symmetric");
    const bool input = field->role <= MN_ROLE_RAW;
    const int64_t square = input && symmetric && listed(symmetric, field->name) ? row_width(shape)
                                                                                : 0;
    double *a = values_of(got, x, count, square), *b = values_of(want, y, count, square), *c = NULL;
    if (moved) c = values_of(moved, computed(moved, name, &n_want, &field), count, square);
    if (!a || !b || (moved && !c)) st = mn_fail(MN_ERR_MEMORY, "no memory for %s", name);
    else compare_bf16(result, &(mn_golden_numbers){ a, b, c, count }, row_width(shape));
    free(a);
    free(b);
    free(c);
    return st;
}

mn_status mn_golden_each(const mn_safetensors *file, const char *key,
                         mn_status (*use)(void *context, const char *name), void *context) {
    const char *list = mn_safetensors_metadata(file, key);
    mn_status st = MN_OK;
    while (list && *list && st == MN_OK) {
        char name[MAX_NAME];
        const size_t length = strcspn(list, ",");
        if (length >= sizeof name) return mn_fail(MN_ERR_FORMAT, "%s: a name is too long", key);
        memcpy(name, list, length);
        name[length] = '\0';
        st = use(context, name);
        list += length + (list[length] == ',');
    }
    return st;
}
