/* case.c - rows of bench.def as samples, and what they count. */
#include <stdlib.h>
#include <string.h>

#include "base/dtype.h"
#include "base/status.h"
#include "base/util.h"
#include "cli/bench/bench.h"

static const mn_bench_case cases[] = {
#define CASE(name, op, pass, ceiling, asked, with, ...)                                            \
    { name, MN_OP_##op, MN_BENCH_##pass, MN_CEILING_##ceiling, asked, with, { __VA_ARGS__ } },
#include "cli/bench/bench.def"
#undef CASE
};

static const mn_bench_case device_cases[] = {
#define CASE(name, op, pass, ceiling, asked, with, ...)                                            \
    { name, MN_OP_##op, MN_BENCH_##pass, MN_CEILING_##ceiling, asked, with, { __VA_ARGS__ } },
#include "cli/bench/cuda.def"
#undef CASE
};

static const mn_ceiling_info ceilings[MN_CEILING_COUNT] = {
#define CEILING(id, name, unit, about) { name, unit, about },
#include "cli/bench/ceilings.def"
#undef CEILING
};

const mn_bench_case *mn_bench_cases(int *count, bool device) {
    *count = (int)(device ? MN_COUNTOF(device_cases) : MN_COUNTOF(cases));
    return device ? device_cases : cases;
}

bool mn_ceiling_of_device(mn_ceiling_id id) {
    return id >= MN_CEILING_GPU_COPY;
}

const mn_ceiling_info *mn_ceiling_describe(mn_ceiling_id id) {
    return &ceilings[id];
}

const char *mn_bench_pass_name(mn_bench_pass pass) {
    static const char *const names[] = { "forward", "forward+backward", "step" };
    return names[pass];
}

/* Cuts the sizes that carry no shape of the work: length, batch, heads. */
static void cut_sizes(mn_call *call, const mn_bench_case *which, mn_bench_scale scale) {
    if (scale == MN_BENCH_FULL) return;
    const bool check = scale == MN_BENCH_CHECK,
               rows = call->T == 0;    // rows: B counts no sequences
    const int64_t longest = check ? 131 : 256, keys = call->T > 1 ? longest : check ? 300 : 1024;
    const int64_t heads = check ? 2 : 4;
    call->T = mn_min(call->T, longest);
    call->L = mn_min(call->L, keys);
    call->P = mn_min(call->P, keys);
    if (rows) call->B = check ? mn_min(call->B, 67) : mn_max(call->B / 16, 1);
    if (which->pass == MN_BENCH_STEP)
        call->B = check ? mn_min(call->B, 3) : mn_max(call->B / 32, 1);
    if (call->H <= heads) return;
    call->Q = call->Q / call->H * heads;
    call->J = mn_min(call->J, heads / 2);
    call->H = heads;
}

static int choice_index(const char *choices, const char *value, size_t length) {
    int index = 0;
    for (const char *at = choices; *at; index++) {
        const size_t n = strcspn(at, ",");
        if (n == length && strncmp(at, value, n) == 0) return index;
        at += n + (at[n] == ',');
    }
    return -1;
}

static bool set_param(mn_sample *sample, const char *name, size_t name_length, const char *value,
                      size_t length) {
    int count;
    const mn_param *params = mn_op_params(sample->op, &count);
    for (int i = 0; i < count; i++) {
        const char *known = params[i].name;
        if (strlen(known) != name_length || strncmp(known, name, name_length) != 0) continue;
        void *at = sample->args + params[i].offset;
        if (params[i].kind == MN_PARAM_CHOICE) {
            *(int *)at = choice_index(params[i].choices, value, length);
        }
        if (params[i].kind == MN_PARAM_REAL) *(double *)at = strtod(value, NULL);
        if (params[i].kind == MN_PARAM_INT) *(int64_t *)at = strtoll(value, NULL, 10);
        return params[i].kind != MN_PARAM_CHOICE || *(int *)at >= 0;
    }
    return false;
}

static bool set_decay(mn_sample *sample, const char *form, size_t length) {
    int *slot = mn_args_decay_slot(sample->op, sample->args);
    const int index = choice_index("none,head,token,channel", form, length);
    if (!slot || index < 0) return false;
    *slot = index;
    return true;
}

static bool mark_field(const mn_sample *sample, const char *name, size_t length, uint64_t *fields) {
    int count;
    const mn_field *known = mn_op_fields(sample->op, &count);
    for (int i = 0; i < count; i++) {
        if (strlen(known[i].name) != length || strncmp(known[i].name, name, length) != 0) continue;
        *fields |= (uint64_t)1 << i;
        return true;
    }
    return false;
}

/* Marks the optional input or the unwanted result, or sets the parameter of a name=value. */
static bool take_item(mn_sample *sample, const char *item, size_t length, uint64_t *fields,
                      uint64_t *unwanted) {
    if (item[0] == '-') return mark_field(sample, item + 1, length - 1, unwanted);
    const char *equals = memchr(item, '=', length);
    if (!equals) return mark_field(sample, item, length, fields);
    const size_t name_length = (size_t)(equals - item), value_length = length - name_length - 1;
    if (name_length != 1 || item[0] != 'g') {
        return set_param(sample, item, name_length, equals + 1, value_length);
    }
    return set_decay(sample, equals + 1, value_length) && mark_field(sample, "g", 1, fields);
}

/* "state0" -> "state": a state that a step updates. */
static bool is_state_pair(const mn_field *input, const mn_field *result) {
    const size_t length = strlen(result->name);
    return input->axes[0] == 'N' && result->axes[0] == 'N' && strlen(input->name) == length + 1 &&
           input->name[length] == '0' && strncmp(input->name, result->name, length) == 0;
}

/* States that come in go out to the same memory; results of their size that do not, such as a state
 * in other units, are not wanted. */
static void states_in_place(mn_sample *sample) {
    for (int i = 0; i < sample->n_tensors; i++) {
        const mn_field *result = sample->tensors[i].field;
        if (result->role < MN_ROLE_OUT || result->axes[0] != 'N') continue;
        bool shared = false;
        for (int j = 0; j < sample->n_tensors && !shared; j++) {
            const mn_field *input = sample->tensors[j].field;
            shared = is_state_pair(input, result) &&
                     mn_sample_in_place(sample, input->name, result->name);
        }
        if (!shared) ((mn_out *)(sample->args + result->offset))->data = NULL;
    }
}

mn_status mn_bench_open(mn_sample *sample, const mn_bench_case *which, mn_bench_scale scale,
                        mn_dtype dtype, bool repeated) {
    mn_sample_init(sample, which->op);
    sample->repeated = repeated;
    sample->forward_only = which->pass != MN_BENCH_TRAIN;
    mn_call *call = (mn_call *)sample->args;
    *call = which->call;
    call->dtype = dtype;
    cut_sizes(call, which, scale);
    uint64_t fields = 0, unwanted = 0;
    for (const char *item = which->with; *item;) {
        const size_t length = strcspn(item, ",");
        if (!take_item(sample, item, length, &fields, &unwanted)) {
            return mn_fail(MN_ERR_INTERNAL, "bench case %s: %s has no \"%.*s\"", which->name,
                           mn_op_describe(which->op)->name, (int)length, item);
        }
        item += length + (item[length] == ',');
    }
    const mn_status st = mn_sample_allocate(sample, fields);
    if (st == MN_OK && which->pass == MN_BENCH_STEP) states_in_place(sample);
    for (int i = 0; st == MN_OK && i < sample->n_tensors; i++) {
        const mn_field *result = sample->tensors[i].field;
        if (!(unwanted >> i & 1)) continue;
        ((mn_out *)(sample->args + result->offset))->data = NULL;
        if (sample->tensors[i].partner) ((mn_in *)(sample->args + result->partner))->data = NULL;
    }
    return st;
}

static double pairs_of(const mn_call *call) {
    const double T = (double)call->T, L = call->L ? (double)call->L : T;
    return (double)call->B * (T * (L - T) + 0.5 * T * (T + 1.0));
}

double mn_bench_work(const mn_bench_case *which, const mn_sample *sample) {
    const mn_call *c = (const mn_call *)sample->args;
    const double B = c->B, H = c->H, K = c->K, V = c->V, G = c->G, Q = c->Q, R = c->R, W = c->W;
    const double D = c->D, S = c->S, T = c->T, BT = B * T, BTH = BT * H, PAIRS = pairs_of(c);
    double flop = 0.0;
    switch (which->op) {
#define WORK(op, formula)                                                                          \
    case MN_OP_##op:                                                                               \
        flop = formula;                                                                            \
        break;
#include "cli/bench/work.def"
#undef WORK
    default: break;
    }
    return which->pass == MN_BENCH_TRAIN ? 3.0 * flop : flop;
}

double mn_bench_cells(const mn_bench_case *which, const mn_sample *sample) {
    const mn_call *c = (const mn_call *)sample->args;
    const double rows = (double)c->B * (double)c->T * (double)mn_max(c->H, 1);
    return rows * (double)c->K * (double)c->V * (which->pass == MN_BENCH_TRAIN ? 3.0 : 1.0);
}

static double tensor_bytes(const mn_sample_tensor *tensor, mn_dtype dtype) {
    return (double)tensor->count * (double)mn_dtype_bytes(mn_field_dtype(tensor->field, dtype));
}

/* Whether the call has the tensor, or its gradient or cotangent. */
static bool exists(const mn_sample *sample, const mn_sample_tensor *tensor, bool partner) {
    if (!(partner ? tensor->partner : tensor->data)) return false;
    const size_t offset = partner ? tensor->field->partner : tensor->field->offset;
    return ((const mn_in *)(sample->args + offset))->data != NULL;
}

/* Bytes of the tensors with these roles, or of their gradients and cotangents. */
static double bytes_of(const mn_sample *sample, mn_role first, mn_role last, bool partners,
                       mn_dtype dtype) {
    double bytes = 0.0;
    for (int i = 0; i < sample->n_tensors; i++) {
        const mn_sample_tensor *tensor = &sample->tensors[i];
        const mn_role role = tensor->field->role;
        if (role < first || role > last || !exists(sample, tensor, partners)) continue;
        bytes += tensor_bytes(tensor, dtype);
    }
    return bytes;
}

static double state_bytes(const mn_sample *sample, mn_dtype dtype) {
    double bytes = 0.0;
    for (int i = 0; i < sample->n_tensors; i++) {
        const mn_sample_tensor *tensor = &sample->tensors[i];
        const bool input = tensor->field->role <= MN_ROLE_RAW;
        if (input && tensor->axes[0] == 'N') bytes += tensor_bytes(tensor, dtype);
    }
    return bytes;
}

double mn_bench_bytes(const mn_bench_case *which, const mn_sample *sample, mn_dtype dtype) {
    const double inputs = bytes_of(sample, MN_ROLE_IN, MN_ROLE_RAW, false, dtype);
    const double results = bytes_of(sample, MN_ROLE_OUT, MN_ROLE_AUX, false, dtype);
    if (which->ceiling == MN_CEILING_STREAM) return 2.0 * state_bytes(sample, dtype);
    if (which->ceiling == MN_CEILING_READ) return inputs;
    if (which->pass == MN_BENCH_STEP) return inputs + results + state_bytes(sample, dtype);
    if (which->pass == MN_BENCH_FORWARD) return inputs + results;
    const double times = which->op == MN_OP_rope ? 1.0 : 2.0;    // rope goes back without them
    return times * inputs + results + bytes_of(sample, MN_ROLE_IN, MN_ROLE_AUX, true, dtype);
}
