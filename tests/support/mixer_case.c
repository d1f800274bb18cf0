/* mixer_case.c - one layer on random inputs, by definition and by operator. */
#include "support/mixer_case.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/dtype.h"
#include "base/rng.h"
#include "base/status.h"
#include "ops/validate.h"

static mn_call *call_of(mixer_case *c) {
    return (mn_call *)c->sample.args;
}

static size_t item_bytes(const mixer_case *c) {
    return mn_dtype_bytes(((const mn_call *)c->sample.args)->dtype);
}

static bool over_time(const char *axes) {
    return axes[0] == 'B' && (axes[1] == 'T' || axes[1] == 'L');
}

/* Numbers per token, or in all for what does not change with time. */
static int64_t row_count(const mixer_case *c, const mn_sample_tensor *tensor) {
    return over_time(tensor->axes) ? tensor->count / (c->B * c->T) : tensor->count;
}

static int find_field(const mixer_case *c, const char *name) {
    for (int i = 0; i < c->sample.n_tensors; i++) {
        if (strcmp(c->sample.tensors[i].field->name, name) == 0) return i;
    }
    return -1;
}

/* The result that belongs to an initial state: M for M0, state for state0. */
static int result_of_state(const mixer_case *c, int field) {
    char name[32];
    snprintf(name, sizeof name, "%s", c->sample.tensors[field].field->name);
    name[strlen(name) - 1] = '\0';
    return find_field(c, name);
}

static bool is_state(const mn_field *field) {
    return field->role == MN_ROLE_OPT && field->axes[0] == 'N';
}

/* ---- set up ---------------------------------------------------------------------------------- */

/* Small sizes that are no multiple of a vector, several heads, and what only some rows have. */
static void set_sizes(mixer_case *c, mn_dtype dtype) {
    mn_call *call = call_of(c);
    const bool hyper = c->info.op == MN_OP_hyper;
    const bool attends = c->info.op == MN_OP_attention || c->info.op == MN_OP_relu_attention;
    call->dtype = dtype;
    call->B = c->B;
    call->T = c->T;
    call->H = 2;
    call->K = 8;
    call->V = 12;
    if (c->info.op == MN_OP_bayes) call->G = 2;
    if (attends) call->J = 1;
    if (hyper) {
        const bool glu = strcmp(c->info.name, "hyperglu") == 0;
        call->Q = glu ? 4 : 2;
        call->P = c->T + 5;
        call->R = 3;
        call->W = 2;
    }
    if (c->info.op == MN_OP_scan) ((mn_scan_args *)c->sample.args)->softplus = 1;
    if (c->info.op == MN_OP_attention) ((mn_attention_args *)c->sample.args)->rope_kind = 1;
    c->heads = c->info.op == MN_OP_scan || c->info.op == MN_OP_moebius ? 1 : call->H;
    c->width = c->heads * call->V;
    if (c->cu) {
        call->cu_seqlens = c->cu;
        call->n_seqs = 3;
    }
}

/* All optional inputs but initial states and an angle that the row does not turn by. */
static uint64_t wanted_fields(const mixer_case *c) {
    int count;
    uint64_t wanted = 0;
    const mn_field *fields = mn_op_fields(c->info.op, &count);
    const bool rotates = strcmp(c->info.name, "bayes_rotation") == 0;
    for (int i = 0; i < count; i++) {
        const bool angle = strcmp(fields[i].name, "theta") == 0;
        if (!is_state(&fields[i]) && (!angle || rotates)) wanted |= (uint64_t)1 << i;
    }
    return wanted;
}

/* The mixer's sizes and parameters are those of the operator. */
static void set_config(mixer_case *c) {
    int count;
    const mn_param *params = mn_op_params(c->info.op, &count);
    c->config.size = *call_of(c);
    for (int i = 0; i < count; i++) {
        const void *at = c->sample.args + params[i].offset;
        const char *name = params[i].name;
        if (strcmp(name, "scale") == 0) c->config.scale = *(const double *)at;
        if (strcmp(name, "eps") == 0) c->config.eps = *(const double *)at;
        if (strcmp(name, "rope_base") == 0) c->config.rope_base = *(const double *)at;
        if (strcmp(name, "rope_kind") == 0) c->config.rope_kind = *(const int *)at;
        if (strcmp(name, "norm") == 0) c->config.norm = *(const int *)at;
        if (strcmp(name, "layout") == 0) c->config.layout = *(const int *)at;
        if (strcmp(name, "from_prior") == 0) c->config.from_prior = *(const int *)at;
        if (strcmp(name, "softplus") == 0) c->config.softplus = *(const int *)at;
    }
}

void case_set(mixer_case *c, const char *wanted, double value) {
    int count;
    const mn_param *params = mn_op_params(c->info.op, &count);
    for (int i = 0; i < count; i++) {
        if (strcmp(params[i].name, wanted) != 0) continue;
        void *at = c->sample.args + params[i].offset;
        if (params[i].kind == MN_PARAM_REAL) *(double *)at = value;
        if (params[i].kind == MN_PARAM_CHOICE) *(int *)at = (int)value;
    }
    set_config(c);
}

void case_drop(mixer_case *c, const char *name) {
    const int i = find_field(c, name);
    if (i < 0) return;
    free(c->input[i]);
    c->input[i] = NULL;
    c->sample.tensors[i].count = 0;
    ((mn_in *)(c->sample.args + c->sample.tensors[i].field->offset))->data = NULL;
}

static mn_status take_ccq_memory(mixer_case *c) {
    const int64_t rows = c->B * c->T * c->heads, K = call_of(c)->K;
    const int64_t N = c->cu ? 3 : c->B;
    c->gamma = calloc((size_t)rows, item_bytes(c));
    c->gamma_f64 = calloc((size_t)rows, sizeof(double));
    c->unit_keys = calloc((size_t)(rows * K), item_bytes(c));
    c->query = calloc((size_t)(rows * K), item_bytes(c));
    bool ok = c->gamma && c->gamma_f64 && c->unit_keys && c->query;
    for (int i = 0; i < 2; i++) {
        c->kk[i] = calloc((size_t)(N * c->heads * K * K), item_bytes(c));
        c->ks[i] = calloc((size_t)(N * c->heads * K), item_bytes(c));
        ok = ok && c->kk[i] && c->ks[i];
    }
    return ok ? MN_OK : mn_fail(MN_ERR_MEMORY, "no memory for a test");
}

static mn_status take_memory(mixer_case *c) {
    bool ok = true;
    c->o = calloc((size_t)(c->B * c->T * c->width), sizeof(double));
    c->variance = calloc((size_t)(c->B * c->T * c->width), sizeof(double));
    for (int i = 0; i < c->sample.n_tensors; i++) {
        const mn_sample_tensor *tensor = &c->sample.tensors[i];
        if (tensor->field->role <= MN_ROLE_RAW && tensor->count > 0) {
            c->input[i] = calloc((size_t)tensor->count, sizeof(double));
            ok = ok && c->input[i];
        }
        if (!is_state(tensor->field)) continue;
        const int64_t count = c->sample.tensors[result_of_state(c, i)].count;
        c->before[i] = calloc((size_t)count, item_bytes(c));
        c->state[i] = calloc((size_t)count, sizeof(double));
        ok = ok && c->before[i] && c->state[i];
    }
    if (!ok || !c->o || !c->variance) return mn_fail(MN_ERR_MEMORY, "no memory for a test");
    return c->info.ccq ? take_ccq_memory(c) : MN_OK;
}

static void copy_inputs(mixer_case *c) {
    for (int i = 0; i < c->sample.n_tensors; i++) {
        const mn_sample_tensor *tensor = &c->sample.tensors[i];
        for (int64_t n = 0; c->input[i] && n < tensor->count; n++) {
            c->input[i][n] = mn_sample_get(&c->sample, tensor->data, n);
        }
    }
}

static void draw_gamma(mixer_case *c, int64_t first, uint64_t seed) {
    for (int64_t i = 0; c->info.ccq && i < c->B * c->T * c->heads; i++) {
        if (i / c->heads % c->T < first) continue;
        mn_sample_set(&c->sample, c->gamma, i, mn_rng_uniform(seed, 999, (uint64_t)i));
        c->gamma_f64[i] = mn_sample_get(&c->sample, c->gamma, i);
    }
}

mn_status case_create(mixer_case *c, const char *name, mn_dtype dtype, int64_t B, int64_t T,
                      const int64_t *cu, uint64_t seed) {
    memset(c, 0, sizeof *c);
    c->B = B;
    c->T = T;
    snprintf(c->name, sizeof c->name, "%s", name);
    mn_status st = mn_mixer_find(&c->info, name);
    if (st != MN_OK) return st;
    if (cu) {
        c->cu = calloc(4, sizeof *c->cu);
        if (!c->cu) return mn_fail(MN_ERR_MEMORY, "no memory for a test");
        memcpy(c->cu, cu, 4 * sizeof *cu);
    }
    mn_sample_init(&c->sample, c->info.op);
    set_sizes(c, dtype);
    case_set(c, "scale", 0.5);
    mn_mixer_set_args(&c->info, c->sample.args);
    st = mn_sample_allocate(&c->sample, wanted_fields(c));
    set_config(c);
    if (st == MN_OK) st = take_memory(c);
    if (st != MN_OK) return st;
    mn_sample_draw(&c->sample, seed);
    copy_inputs(c);
    draw_gamma(c, 0, seed);
    return MN_OK;
}

void case_destroy(mixer_case *c) {
    mn_sample_free(&c->sample);
    for (int i = 0; i < MN_MAX_FIELDS; i++) {
        free(c->input[i]);
        free(c->before[i]);
        free(c->state[i]);
    }
    for (int i = 0; i < 2; i++) {
        free(c->kk[i]);
        free(c->ks[i]);
    }
    free(c->gamma);
    free(c->gamma_f64);
    free(c->unit_keys);
    free(c->query);
    free(c->o);
    free(c->variance);
    free(c->cu);
    memset(c, 0, sizeof *c);
}

void case_redraw(mixer_case *c, int64_t first, uint64_t seed) {
    const size_t bytes = item_bytes(c);
    void *kept[MN_MAX_FIELDS] = { 0 };
    for (int i = 0; i < c->sample.n_tensors; i++) {
        const mn_sample_tensor *tensor = &c->sample.tensors[i];
        if (!c->input[i]) continue;
        kept[i] = malloc((size_t)tensor->count * bytes);
        if (kept[i]) memcpy(kept[i], tensor->data, (size_t)tensor->count * bytes);
    }
    mn_sample_draw(&c->sample, seed);
    for (int i = 0; i < c->sample.n_tensors; i++) {
        const mn_sample_tensor *tensor = &c->sample.tensors[i];
        if (!kept[i]) continue;
        const int64_t row = row_count(c, tensor);
        const int64_t same = over_time(tensor->axes) ? first * row : row;
        const int64_t pieces = over_time(tensor->axes) ? c->B : 1;
        for (int64_t b = 0; b < pieces; b++) {
            const size_t at = (size_t)(b * c->T * row) * bytes;
            memcpy((char *)tensor->data + at, (char *)kept[i] + at, (size_t)same * bytes);
        }
        free(kept[i]);
    }
    copy_inputs(c);
    draw_gamma(c, first, seed);
}

/* ---- by definition --------------------------------------------------------------------------- */

mn_token case_token(const mixer_case *c, int64_t b, int64_t t) {
    mn_token token = { 0 };
    for (int i = 0; i < c->sample.n_tensors; i++) {
        const mn_sample_tensor *tensor = &c->sample.tensors[i];
        if (!c->input[i] || is_state(tensor->field)) continue;
        const int64_t at = over_time(tensor->axes) ? (b * c->T + t) * row_count(c, tensor) : 0;
        *mn_token_slot(&token, tensor->field->name) = c->input[i] + at;
    }
    if (c->info.ccq) token.ccq_gamma = c->gamma_f64 + (b * c->T + t) * c->heads;
    return token;
}

static void keep_state(mixer_case *c, mn_mixer *m, int64_t n) {
    for (int i = 0; i < c->sample.n_tensors; i++) {
        if (!c->state[i]) continue;
        int64_t count = 0;
        const char *name = c->sample.tensors[result_of_state(c, i)].field->name;
        const double *part = mn_mixer_part(m, name, &count);
        memcpy(c->state[i] + n * count, part, (size_t)count * sizeof *part);
    }
}

static mn_status define_sequence(mixer_case *c, mn_mixer *m, int64_t n, int64_t b, int64_t t0,
                                 int64_t t1) {
    mn_status st = MN_OK;
    for (int64_t t = t0; t < t1 && st == MN_OK; t++) {
        const mn_token token = case_token(c, b, t);
        const int64_t at = (b * c->T + t) * c->width;
        st = mn_mixer_step(m, &token, c->o + at,
                           mn_mixer_has_variance(&c->info) ? c->variance + at : NULL);
    }
    if (st == MN_OK) keep_state(c, m, n);
    return st;
}

mn_status case_define(mixer_case *c) {
    mn_mixer *m = NULL;
    mn_status st = mn_mixer_create(&m, c->name, &c->config);
    for (int64_t n = 0; st == MN_OK && n < (c->cu ? 3 : c->B); n++) {
        mn_mixer_reset(m);
        if (c->cu) st = define_sequence(c, m, n, 0, c->cu[n], c->cu[n + 1]);
        else st = define_sequence(c, m, n, n, 0, c->T);
    }
    mn_mixer_destroy(m);
    return st;
}

/* ---- fused ----------------------------------------------------------------------------------- */

/* `view` covers tokens from t0 on of a tensor over time. */
static void slice(mixer_case *c, mn_in *view, const mn_sample_tensor *tensor, void *data,
                  int64_t t0) {
    const int64_t row = row_count(c, tensor);
    bool ok = true;
    view->data = (char *)data + (size_t)(t0 * row) * item_bytes(c);
    view->stride[0] = c->T * row;
    view->stride[1] = row;
    view->stride[2] = tensor->axes[2] && strchr("HJQ", tensor->axes[2])
                          ? row / mn_axis_size(&c->config.size, tensor->axes[2], &ok)
                          : 0;
}

/* l2_norm of all keys, then curvature over [t0, t1): fills rows of c->query. */
static mn_status contract(mixer_case *c, mn_context *context, const mn_call *piece, int64_t t0,
                          bool fresh) {
    const int64_t K = piece->K, H = c->heads, row = H * K;
    const bool scan = c->info.op == MN_OP_scan;
    const size_t bytes = item_bytes(c);
    mn_l2_norm_args norm = { .call = { .dtype = piece->dtype, .B = c->B * c->T * H, .V = K },
                             .eps = 1e-12 };
    norm.x.data = mn_sample_find(&c->sample, scan ? "Bm" : "k")->data;
    norm.y.data = c->unit_keys;
    mn_status st = mn_op_run(context, MN_OP_l2_norm, MN_FORWARD, &norm);
    mn_curvature_args p = { .call = *piece, .n0 = fresh ? 0 : t0 };
    const int64_t stride[3] = { c->T * row, row, K };
    p.call.H = H;
    p.q.data =
        (char *)mn_sample_find(&c->sample, scan ? "Cm" : "q")->data + (size_t)(t0 * row) * bytes;
    p.k.data = (char *)c->unit_keys + (size_t)(t0 * row) * bytes;
    p.qt.data = (char *)c->query + (size_t)(t0 * row) * bytes;
    p.gamma = (mn_in) { (char *)c->gamma + (size_t)(t0 * H) * bytes, { c->T * H, H, 1 } };
    memcpy(p.q.stride, stride, sizeof stride);
    memcpy(p.k.stride, stride, sizeof stride);
    memcpy(p.qt.stride, stride, sizeof stride);
    p.kk0.data = fresh ? NULL : c->kk[0];
    p.ks0.data = fresh ? NULL : c->ks[0];
    p.kk.data = c->kk[1];
    p.ks.data = c->ks[1];
    if (st == MN_OK) st = mn_op_run(context, MN_OP_curvature, MN_FORWARD, &p);
    const int64_t N = piece->cu_seqlens ? piece->n_seqs : piece->B;
    memcpy(c->kk[0], c->kk[1], (size_t)(N * row * K) * bytes);
    memcpy(c->ks[0], c->ks[1], (size_t)(N * row) * bytes);
    return st;
}

mn_status case_fuse(mixer_case *c, mn_context *context, int64_t t0, int64_t t1, bool fresh) {
    _Alignas(16) unsigned char args[MN_MAX_ARGS_BYTES];
    memcpy(args, c->sample.args, sizeof args);
    mn_call *piece = (mn_call *)args;
    const int64_t key0 = fresh ? t0 : 0;
    piece->T = t1 - t0;
    if (piece->L > 0) piece->L = t1 - key0;
    const int64_t lone[2] = { 0, t1 - t0 };
    if (c->cu && t1 - t0 != c->T) {
        piece->cu_seqlens = c->lone_packs ? lone : NULL;
        piece->n_seqs = 1;
    }
    mn_status st = c->info.ccq ? contract(c, context, piece, t0, fresh) : MN_OK;
    for (int i = 0; i < c->sample.n_tensors; i++) {
        const mn_sample_tensor *tensor = &c->sample.tensors[i];
        mn_in *view = (mn_in *)(args + tensor->field->offset);
        const char *name = tensor->field->name;
        if (c->before[i]) {
            const mn_sample_tensor *after = &c->sample.tensors[result_of_state(c, i)];
            memcpy(c->before[i], after->data, (size_t)after->count * item_bytes(c));
            view->data = fresh ? NULL : c->before[i];
        }
        if (tensor->count == 0 || !over_time(tensor->axes)) continue;
        const bool query = strcmp(name, "q") == 0 || strcmp(name, "Cm") == 0;
        void *data = c->info.ccq && query ? c->query : tensor->data;
        slice(c, view, tensor, data, tensor->axes[1] == 'L' ? key0 : t0);
    }
    return st == MN_OK ? mn_op_run(context, c->info.op, MN_FORWARD, args) : st;
}

/* ---- compare --------------------------------------------------------------------------------- */

const mn_sample_tensor *case_result(const mixer_case *c, const char *name) {
    const int i = find_field(c, name);
    return i < 0 ? NULL : &c->sample.tensors[i];
}

const mn_sample_tensor *case_output(const mixer_case *c) {
    const mn_sample_tensor *o = case_result(c, "o");
    return o ? o : case_result(c, "y");
}

const mn_sample_tensor *case_variance(const mixer_case *c) {
    static const char *const names[] = { "ovar", "yvar", "qvar" };
    const mn_sample_tensor *found = NULL;
    for (int i = 0; i < 3 && !found; i++) found = case_result(c, names[i]);
    return found;
}

double case_error(const double *x, const double *reference, int64_t count) {
    double error2 = 0.0, norm2 = 0.0;
    for (int64_t i = 0; i < count; i++) {
        error2 += (x[i] - reference[i]) * (x[i] - reference[i]);
        norm2 += reference[i] * reference[i];
    }
    return norm2 > 0.0 ? sqrt(error2 / norm2) : sqrt(error2);
}

static double *as_doubles(const mixer_case *c, const mn_sample_tensor *tensor) {
    double *x = malloc((size_t)tensor->count * sizeof *x);
    for (int64_t i = 0; x && i < tensor->count; i++) {
        x[i] = mn_sample_get(&c->sample, tensor->data, i);
    }
    return x;
}

double case_output_error(const mixer_case *c) {
    double *x = as_doubles(c, case_output(c));
    const double error = x ? case_error(x, c->o, c->B * c->T * c->width) : NAN;
    free(x);
    return error;
}

/* A variance per noise group stands for all columns of the group. */
double case_variance_error(const mixer_case *c) {
    const mn_sample_tensor *tensor = case_variance(c);
    const int64_t V = c->config.size.V, rows = c->B * c->T * c->heads;
    const int64_t G = tensor->count / rows;
    double *x = as_doubles(c, tensor), *all = malloc((size_t)(rows * V) * sizeof *all);
    for (int64_t i = 0; x && all && i < rows * V; i++) all[i] = x[i / V * G + i % V * G / V];
    const double error = x && all ? case_error(all, c->variance, rows * V) : NAN;
    free(x);
    free(all);
    return error;
}

/* Multiplies parts kept in units of exp(m) into plain units. */
static void to_plain_units(double *x, int64_t count, const double *m, int64_t n_scales) {
    for (int64_t i = 0; i < count; i++) x[i] *= exp(m[i / (count / n_scales)]);
}

double case_state_error(const mixer_case *c) {
    const int m0 = find_field(c, "m0");
    double worst = 0.0;
    for (int i = 0; i < c->sample.n_tensors; i++) {
        if (!c->state[i] || i == m0) continue;
        const mn_sample_tensor *tensor = &c->sample.tensors[result_of_state(c, i)];
        double *x = as_doubles(c, tensor), *want = malloc((size_t)tensor->count * sizeof *want);
        if (!x || !want) return NAN;
        memcpy(want, c->state[i], (size_t)tensor->count * sizeof *want);
        if (m0 >= 0) {
            const mn_sample_tensor *m = &c->sample.tensors[result_of_state(c, m0)];
            double *scales = as_doubles(c, m);
            to_plain_units(x, tensor->count, scales, m->count);
            to_plain_units(want, tensor->count, c->state[m0], m->count);
            free(scales);
        }
        const double error = case_error(x, want, tensor->count);
        worst = error > worst || isnan(error) ? error : worst;
        free(x);
        free(want);
    }
    return worst;
}
