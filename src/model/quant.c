/* quant.c - from a float32 model to one in 8 or 4 bits. */
#include "model/quant.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/dtype.h"
#include "base/status.h"
#include "base/util.h"
#include "model/checkpoint.h"
#include "model/model_internal.h"
#include "ops/matmul.h"

enum { LEAST_ROWS = 16, LEAST_COLS = 32, DEFAULT_8 = 128, DEFAULT_4 = 64 };

int mn_model_quant_bits(const mn_model *model) {
    return model->config.quant_bits;
}

size_t mn_model_param_bytes(const mn_model *model) {
    size_t bytes = 0;
    for (int i = 0; i < model->n_params; i++) {
        const mn_model_param *p = &model->params[i];
        if (!p->quant) bytes += (size_t)p->info.count * mn_dtype_bytes(model->dtype);
        else if (model->device) {
            bytes += mn_quant_device_codes_bytes(p->quant) + mn_quant_device_scales_bytes(p->quant);
        } else bytes += mn_quant_codes_bytes(p->quant) + mn_quant_scales_bytes(p->quant);
    }
    return bytes;
}

/* ---- which parameters ------------------------------------------------------------------------ */

/* Which expert a token goes to is a choice that small errors turn. */
static bool chooses(const mn_model *model, int i) {
    for (int k = 0; k < model->config.n_layers; k++) {
        const bool sparse = model->config.halves[k] == MN_MLP_SPARSE;
        if (sparse && model->blocks[k].router == i) return true;
    }
    return false;
}

/* Bits that parameter i is to have where its numbers serve products alone; 0: it stays. */
static int bits_of(const mn_model *model, int i, int bits) {
    const mn_param_info *info = &model->params[i].info;
    if (info->rank != 2 || info->shape[0] < LEAST_ROWS || info->shape[1] < LEAST_COLS) return 0;
    if (i == model->embed || i == model->head) return 8;
    return info->group == MN_GROUP_MATRIX && !chooses(model, i) ? bits : 0;
}

/* A pass that only plans: whatever asks for numbers of a quantised leaf says so there. */
static mn_status plan_pass(mn_model *model, mn_tape *tape, int64_t n_tokens,
                           mn_model_state *state) {
    static const int32_t tokens[8];
    const mn_model_input in = { .tokens = tokens, .B = 1, .T = n_tokens, .state = state };
    mn_tape_start(tape, MN_TAPE_PLAN);
    mn_model_logits(model, tape, mn_model_hidden(model, tape, &in));
    return mn_tape_status(tape);
}

/* Whole inputs, and tokens of a state one by one, which layers may compute in other ways. */
static mn_status plan_passes(mn_model *model, mn_context *context) {
    mn_tape *tape = NULL;
    mn_model_state state = { 0 };
    mn_status st = mn_tape_create(&tape, context, model->dtype);
    if (st == MN_OK) st = plan_pass(model, tape, 8, NULL);
    if (st == MN_OK) st = mn_model_state_create(&state, model);
    if (st == MN_OK) st = plan_pass(model, tape, 4, &state);
    if (st == MN_OK) st = plan_pass(model, tape, 1, &state);
    mn_model_state_free(&state);
    mn_tape_destroy(tape);
    return st;
}

/* bits[i] of each parameter: those whose numbers something asks for stay as they are. */
static mn_status choose(unsigned char *bits, mn_model *model, mn_context *context,
                        const mn_quant_options *options) {
    mn_quant *trial = calloc((size_t)model->n_params, sizeof *trial);
    if (!trial) return mn_fail(MN_ERR_MEMORY, "no memory to quantise a model");
    for (int i = 0; i < model->n_params; i++) {
        const mn_param_info *info = &model->params[i].info;
        bits[i] = (unsigned char)bits_of(model, i, options->bits);
        if (bits[i] == 0) continue;
        trial[i] = (mn_quant){ .bits = bits[i], .rows = info->shape[0], .cols = info->shape[1],
                               .group = options->group };
        model->params[i].quant = &trial[i];
    }
    const mn_status st = plan_passes(model, context);
    for (int i = 0; i < model->n_params; i++) {
        if (trial[i].misused) bits[i] = 0;
        model->params[i].quant = NULL;
    }
    free(trial);
    return st;
}

/* ---- what inputs are like -------------------------------------------------------------------- */

/* Second moments of what one or several matrices multiply. */
typedef struct moments {
    float *sum;              // (cols, cols)
    int64_t cols, n;
    bool done;               // `sum` has become U of mn_quantize_how
} moments;

typedef struct quantizing {
    mn_model *model;
    mn_context *context;
    const mn_quant_options *options;
    unsigned char *bits;
    moments **of;            // by parameter; NULL: nothing is known
    moments *all;
    int n_all;
    const void *last_x;      // whose moments `last` are, of the product before
    moments *last;
    mn_status status;
} quantizing;

static int param_of(const quantizing *q, const void *value) {
    for (int i = 0; i < q->model->n_params; i++) {
        if (q->model->params[i].value == value) return i;
    }
    return -1;
}

static moments *moments_of(quantizing *q, int i, const mn_tensor *weight) {
    if (q->of[i]) return q->of[i];
    const int64_t cols = weight->shape[3];
    moments *m = &q->all[q->n_all];
    m->sum = calloc((size_t)cols * (size_t)cols, sizeof *m->sum);
    if (!m->sum) {
        q->status = mn_fail(MN_ERR_MEMORY, "no memory for the second moments of %lld inputs; leave "
                            "out --calibrate", (long long)cols);
        return NULL;
    }
    m->cols = cols;
    q->n_all++;
    return m;
}

/* Products of one x that follow each other share its moments. */
static void observe(void *context, const mn_tensor *weight, const void *x, int64_t rows,
                    int64_t step) {
    quantizing *q = context;
    const int i = param_of(q, weight->data);
    if (i < 0 || q->bits[i] != 4 || q->status != MN_OK) return;
    if (x == q->last_x && q->last && q->last->cols == weight->shape[3] &&
        (!q->of[i] || q->of[i] == q->last)) {
        q->of[i] = q->last;
        return;
    }
    moments *m = moments_of(q, i, weight);
    q->last_x = x;
    q->last = m;
    q->of[i] = m;
    if (!m) return;
    m->n += rows;
    q->status = mn_matmul(q->context, &(mn_matmul_args){
        .dtype = MN_F32, .c = m->sum, .a = x, .a_row = step, .a_transposed = true, .b = x,
        .b_row = step, .M = m->cols, .N = m->cols, .K = rows, .accumulate = true });
}

static mn_status read_text(quantizing *q) {
    const mn_quant_options *o = q->options;
    mn_tape *tape = NULL;
    q->of = calloc((size_t)q->model->n_params, sizeof *q->of);
    q->all = calloc((size_t)q->model->n_params, sizeof *q->all);
    if (!q->of || !q->all) return mn_fail(MN_ERR_MEMORY, "no memory to quantise a model");
    mn_status st = mn_tape_create(&tape, q->context, MN_F32);
    for (int64_t at = 0; st == MN_OK && at < o->n_tokens; at += o->length) {
        const mn_model_input in = { .tokens = o->tokens + at, .B = 1,
                                    .T = mn_min(o->length, o->n_tokens - at) };
        mn_tape_start(tape, MN_TAPE_FORWARD);
        mn_tape_observe(tape, observe, q);
        q->last_x = NULL;
        mn_model_hidden(q->model, tape, &in);
        st = mn_tape_status(tape);
        if (st == MN_OK) st = q->status;
    }
    if (tape) mn_tape_observe(tape, NULL, NULL);
    mn_tape_destroy(tape);
    return st;
}

/* H = R R' with R upper triangular, from the last column on, in the upper triangle of h; false
 * where H is not positive definite. */
static bool factor(double *h, int64_t n) {
    for (int64_t j = n - 1; j >= 0; j--) {
        if (!(h[j * n + j] > 0.0)) return false;
        const double root = sqrt(h[j * n + j]);
        for (int64_t i = 0; i <= j; i++) h[i * n + j] /= root;
        for (int64_t i = 0; i < j; i++) {
            const double by = h[i * n + j];
            for (int64_t k = i; k < j; k++) h[i * n + k] -= by * h[k * n + j];
        }
    }
    return true;
}

/* U = R^-1, row after row from the last: u_i = (e_i - sum_{k>i} r_ik u_k) / r_ii. */
static void invert(float *u, const double *r, double *row, int64_t n) {
    for (int64_t i = n - 1; i >= 0; i--) {
        memset(row, 0, (size_t)n * sizeof *row);
        row[i] = 1.0;
        for (int64_t k = i + 1; k < n; k++) {
            for (int64_t j = k; j < n; j++) row[j] -= r[i * n + k] * u[k * n + j];
        }
        for (int64_t j = 0; j < n; j++) u[i * n + j] = (float)(row[j] / r[i * n + i]);
    }
}

/* Moments to U, with a hundredth of the mean square added to the diagonal. */
static mn_status invert_moments(moments *m) {
    const int64_t n = m->cols;
    double *h = malloc((size_t)n * (size_t)(n + 1) * sizeof *h), mean = 0.0;
    if (!h) return mn_fail(MN_ERR_MEMORY, "no memory to invert the moments of inputs");
    for (int64_t i = 0; i < n; i++) mean += m->sum[i * n + i] / (double)n;
    for (int64_t i = 0; i < n * n; i++) h[i] = m->sum[i];
    for (int64_t i = 0; i < n; i++) h[i * n + i] += 0.01 * mean + 1e-30;
    const bool fine = factor(h, n);
    if (fine) invert(m->sum, h, h + n * n, n);
    free(h);
    m->done = true;
    return fine ? MN_OK : mn_fail(MN_ERR_ARGUMENT, "the inputs of a matrix have no second moments; "
                                  "give other text to --calibrate");
}

/* ---- parameters ------------------------------------------------------------------------------ */

static mn_status take_stored(mn_quant_stored *s) {
    const mn_quant_sizes sizes = mn_quant_stored_sizes(s);
    s->codes = malloc(sizes.codes);
    s->scales = malloc(sizes.scales);
    if (sizes.least > 0) s->least = malloc(sizes.least);
    if (s->codes && s->scales && (s->least || sizes.least == 0)) return MN_OK;
    return mn_fail(MN_ERR_MEMORY, "no memory to quantise a matrix");
}

static void free_stored(mn_quant_stored *s) {
    free(s->codes);
    free(s->scales);
    free(s->least);
}

static mn_status quantize_matrix(quantizing *q, int i, mn_quant_report *report) {
    mn_model_param *p = &q->model->params[i];
    mn_quant_stored s = { .bits = q->bits[i], .rows = p->info.shape[0], .cols = p->info.shape[1],
                          .group = q->options->group };
    moments *m = q->of && q->bits[i] == 4 ? q->of[i] : NULL;
    double error = 0.0, all = 0.0;
    mn_status st = take_stored(&s);
    if (st == MN_OK && m && !m->done) st = invert_moments(m);
    const mn_quantize_how how = { .inverse = m ? m->sum : NULL };
    if (st == MN_OK) st = mn_quantize(&s, p->value, &how, q->context->threads, &error, &all);
    if (st == MN_OK) st = mn_quant_load(&p->quant, &s);
    if (st == MN_OK) {
        mn_model_drop_value(q->model, p);
        const mn_quant_sizes sizes = mn_quant_stored_sizes(&s);
        report->bits = s.bits;
        report->bytes_after = sizes.codes + sizes.scales + sizes.least;
        report->error = all > 0.0 ? sqrt(error / all) : 0.0;
    }
    free_stored(&s);
    return st;
}

static mn_status quantize_param(void *context, int i) {
    quantizing *q = context;
    const mn_model_param *p = &q->model->params[i];
    const size_t bytes = (size_t)p->info.count * sizeof(float);
    mn_quant_report report = { .param = p, .bits = 32, .bytes_before = bytes,
                               .bytes_after = bytes };
    mn_status st = q->bits[i] ? quantize_matrix(q, i, &report) : MN_OK;
    if (st != MN_OK) {
        char why[256];
        snprintf(why, sizeof why, "%s", mn_last_error());
        return mn_fail(st, "%s: %s", p->name, why);
    }
    const mn_quant_progress tell = q->options->progress;
    return tell ? tell(q->options->progress_context, &report) : MN_OK;
}

static mn_status settle(mn_quant_options *own, const mn_quant_options *options,
                        const mn_model *model) {
    *own = *options;
    if (own->bits != 8 && own->bits != 4) {
        return mn_fail(MN_ERR_ARGUMENT, "weights of %d bits are not known; take 8 or 4", own->bits);
    }
    if (own->group == 0) own->group = own->bits == 8 ? DEFAULT_8 : DEFAULT_4;
    if (own->group != 32 && own->group != 64 && own->group != 128 && own->group != 256) {
        return mn_fail(MN_ERR_ARGUMENT, "groups of %lld inputs are not known; take 32, 64, 128 or "
                       "256", (long long)own->group);
    }
    if (model->config.quant_bits) {
        return mn_fail(MN_ERR_ARGUMENT, "the model has weights of %d bits already; take the one it "
                       "was made from", model->config.quant_bits);
    }
    if (model->dtype == MN_F32 && !model->device) return MN_OK;
    return mn_fail(MN_ERR_UNSUPPORTED, "a float32 model of the CPU can be quantised");
}

/* Everything but the parameters themselves; `from` NULL: they are there. */
static mn_status quantize(mn_model *model, const char *from, mn_context *context,
                          const mn_quant_options *options) {
    mn_quant_options own;
    mn_status st = settle(&own, options, model);
    if (st == MN_OK) st = mn_context_needs_cpu(context, "quantising a model");
    if (st != MN_OK) return st;
    quantizing q = { .model = model, .context = context, .options = &own };
    q.bits = calloc((size_t)model->n_params, 1);
    st = q.bits ? choose(q.bits, model, context, &own)
                : mn_fail(MN_ERR_MEMORY, "no memory to quantise a model");
    const bool reads = own.n_tokens > 0;
    if (st == MN_OK && from && reads) st = mn_checkpoint_read_weights(model, from);
    if (st == MN_OK && reads) st = read_text(&q);
    if (st == MN_OK && from && !reads) {
        st = mn_checkpoint_read_each(model, from, quantize_param, &q);
    } else {
        for (int i = 0; st == MN_OK && i < model->n_params; i++) st = quantize_param(&q, i);
    }
    if (st == MN_OK) {
        model->config.quant_bits = own.bits;
        model->config.quant_group = own.group;
    }
    for (int i = 0; i < q.n_all; i++) free(q.all[i].sum);
    free(q.all);
    free(q.of);
    free(q.bits);
    return st;
}

mn_status mn_model_quantize(mn_model *model, mn_context *context, const mn_quant_options *options) {
    return quantize(model, NULL, context, options);
}

mn_status mn_model_quantize_folder(const char *to, const char *from, mn_context *context,
                                   const mn_quant_options *options) {
    mn_model *model = NULL;
    mn_status st = mn_checkpoint_create(&model, from, MN_F32);
    if (st == MN_OK) st = quantize(model, from, context, options);
    if (st == MN_OK) st = mn_checkpoint_save(model, to);
    mn_model_destroy(model);
    return st;
}
