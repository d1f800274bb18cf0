/* op_case.c - calls of operators for tests, made from the operator table. */
#include "support/op_case.h"

#include <inttypes.h>
#include <stdio.h>
#include <string.h>

#include "base/dtype.h"
#include "base/util.h"
#include "support/check.h"

/* Optional inputs that only make sense together. */
static const struct {
    mn_op_id op;
    const char *names;
} tied[] = {
    { MN_OP_hyper, ",c1,U1,Vt1,d1," }, { MN_OP_hyper, ",c2,U2,Vt2,d2," },
    { MN_OP_mlstm, ",C0,n0,m0," },     { MN_OP_curvature, ",kk0,ks0," },
    { MN_OP_ccq_read, ",kk0,ks0," },
};

static bool lists(const char *names, const char *name) {
    char key[64];
    snprintf(key, sizeof key, ",%s,", name);
    return strstr(names, key) != NULL;
}

/* Bits of the optional fields that come and go with field i. */
static uint64_t tie_of(mn_op_id op, const mn_field *fields, int count, int i) {
    for (size_t t = 0; t < MN_COUNTOF(tied); t++) {
        if (tied[t].op != op || !lists(tied[t].names, fields[i].name)) continue;
        uint64_t bits = 0;
        for (int j = 0; j < count; j++) {
            if (lists(tied[t].names, fields[j].name)) bits |= (uint64_t)1 << j;
        }
        return bits;
    }
    return (uint64_t)1 << i;
}

/* Groups of optional fields, and in *rest the bits of everything else. A log decay is there or not
 * by its own enum. */
static int optional_groups(mn_op_id op, uint64_t groups[MN_MAX_FIELDS], uint64_t *rest) {
    int count, n_groups = 0;
    const mn_field *fields = mn_op_fields(op, &count);
    *rest = MN_ALL_FIELDS;
    for (int i = 0; i < count; i++) {
        const bool optional = fields[i].role == MN_ROLE_OPT && !strchr(fields[i].axes, '|');
        if (!optional || !(*rest >> i & 1)) continue;
        groups[n_groups] = tie_of(op, fields, count, i);
        *rest &= ~groups[n_groups++];
    }
    return n_groups;
}

static int choice_count(const mn_param *param) {
    int count = 1;
    for (const char *at = param->choices; *at; at++) count += *at == ',';
    return count;
}

/* Next combination of choices, counting like a number; false after the last. */
static bool next_choice(mn_op_id op, int choice[OP_MAX_CHOICES]) {
    int count, digit = 0;
    const mn_param *params = mn_op_params(op, &count);
    for (int i = 0; i < count; i++) {
        if (params[i].kind != MN_PARAM_CHOICE) continue;
        if (++choice[digit] < choice_count(&params[i])) return true;
        choice[digit++] = 0;
    }
    return false;
}

static int add_presences(op_case *out, const op_case *form, bool thorough) {
    uint64_t groups[MN_MAX_FIELDS], rest;
    const int n_groups = optional_groups(form->op, groups, &rest);
    int n = 0;
    out[n] = *form;
    out[n++].fields = MN_ALL_FIELDS;
    if (n_groups == 0) return n;
    out[n] = *form;
    out[n++].fields = rest;
    for (int i = 0; thorough && n_groups > 1 && i < n_groups; i++) {
        out[n] = *form;
        out[n++].fields = ~groups[i];
    }
    return n;
}

int op_forms(mn_op_id op, op_case out[OP_MAX_FORMS]) {
    static unsigned char unused[MN_MAX_ARGS_BYTES];
    const bool has_decay = mn_args_decay_slot(op, unused) != NULL;
    op_case form = { .op = op, .dtype = MN_F32, .B = 2, .T = 5, .H = 2, .K = 4, .V = 3, .seed = 1 };
    int n = 0;
    do {
        const int last = has_decay ? MN_DECAY_CHANNEL : MN_DECAY_NONE;
        for (form.decay = MN_DECAY_NONE; form.decay <= last; form.decay++) {
            n += add_presences(out + n, &form, n == 0);
        }
    } while (next_choice(op, form.choice));
    return n;
}

bool op_is_keyed(mn_op_id op) {
    return op == MN_OP_attention || op == MN_OP_relu_attention || op == MN_OP_hyper;
}

static bool any_axis(mn_op_id op, char letter, mn_role role) {
    int count;
    const mn_field *fields = mn_op_fields(op, &count);
    for (int i = 0; i < count; i++) {
        if (fields[i].role == role && strchr(fields[i].axes, letter)) return true;
    }
    return false;
}

bool op_has_time(mn_op_id op) {
    return any_axis(op, 'T', MN_ROLE_IN);
}

bool op_has_state(mn_op_id op) {
    return any_axis(op, 'N', MN_ROLE_OUT);
}

static int64_t longest(const op_case *c) {
    int64_t most = c->cu_seqlens ? 0 : c->T;
    for (int64_t n = 0; c->cu_seqlens && n < c->n_seqs; n++) {
        most = mn_max(most, c->cu_seqlens[n + 1] - c->cu_seqlens[n]);
    }
    return most;
}

/* hyper: branches, a block longer than any row of lags, small ranks */
static void set_hyper_sizes(mn_call *call, const op_case *c, int kind) {
    call->Q = kind == 1 ? 2 * c->H : c->H;
    call->P = c->block ? c->block : longest(c) + c->more_keys + 3;
    call->R = 3;
    call->W = 2;
}

/* hyper_layer: widths are those of all heads together */
static void set_layer_sizes(mn_call *call, const op_case *c, int kind) {
    set_hyper_sizes(call, c, kind);
    call->K = c->K * call->Q;
    call->V = c->V * c->H;
    call->S = 2;
    call->J = call->Q * call->R;
    call->L = call->H * call->S;
    call->W = 3;
}

static void set_sizes(mn_sample *sample, const op_case *c) {
    mn_call *call = (mn_call *)sample->args;
    *call = (mn_call){ .dtype = c->dtype, .B = c->B, .T = c->T, .H = c->H, .K = c->K, .V = c->V,
                       .cu_seqlens = c->cu_seqlens, .n_seqs = c->n_seqs };
    call->G = c->V < 2 ? 1 : 2;
    call->D = c->K + 3;
    call->S = c->op == MN_OP_adamw ? 2 : 3;
    call->W = c->K < 6 ? c->K : 4;
    if (op_is_keyed(c->op)) {
        call->L = c->T + c->more_keys;
        call->J = c->H % 2 == 0 ? c->H / 2 : c->H;
    }
    if (c->op == MN_OP_hyper) set_hyper_sizes(call, c, c->choice[0]);
    if (c->op == MN_OP_delta_product) call->Q = 3 * c->H;
    if (c->groups > 1) call->J = c->H / c->groups;
    else if (c->op == MN_OP_delta_gva) call->J = c->H % 2 == 0 ? c->H / 2 : c->H;
    if (c->op == MN_OP_hyper_layer) set_layer_sizes(call, c, c->choice[0]);
    const bool turned = c->op == MN_OP_rope || (c->op == MN_OP_attention && c->choice[0] != 0);
    if (turned) call->K += call->K % 2;
    if (!op_has_time(c->op)) call->B = mn_max(1, c->B * c->T);
}

static void set_params(mn_sample *sample, const op_case *c) {
    int count, digit = 0;
    const mn_param *params = mn_op_params(c->op, &count);
    for (int i = 0; i < count; i++) {
        void *at = sample->args + params[i].offset;
        if (params[i].kind == MN_PARAM_CHOICE) *(int *)at = c->choice[digit++];
        if (strcmp(params[i].name, "scale") == 0) *(double *)at = 0.7;
        if (strcmp(params[i].name, "weight_decay") == 0) *(double *)at = 0.1;
        if (strcmp(params[i].name, "lr") == 0) *(double *)at = 0.01;
        if (strcmp(params[i].name, "groups") == 0)
            *(int64_t *)at = c->V % 2 == 0 && c->V > 2 ? 2 : 1;
        if (strcmp(params[i].name, "window") == 0) *(int64_t *)at = c->window;
        if (strcmp(params[i].name, "pos0") == 0) *(int64_t *)at = 3;
    }
    int *decay = mn_args_decay_slot(c->op, sample->args);
    if (decay) *decay = c->decay;
}

/* A running covariance that goes on has seen tokens. */
static void set_counts(mn_sample *sample) {
    const mn_sample_tensor *before = mn_sample_find(sample, "kk0");
    const int64_t n0 = before && before->data ? 5 : 0;
    if (sample->op == MN_OP_curvature) ((mn_curvature_args *)sample->args)->n0 = n0;
    if (sample->op == MN_OP_ccq_read) ((mn_ccq_read_args *)sample->args)->n0 = n0;
}

void op_allocate(mn_sample *sample, const op_case *c) {
    mn_sample_init(sample, c->op);
    set_sizes(sample, c);
    set_params(sample, c);
    if (mn_sample_allocate(sample, c->fields) != MN_OK) {
        check_fatal("%s: %s", op_case_text(c), mn_last_error());
    }
    set_counts(sample);
}

/* Every fourth row of a loss is one to be ignored. */
static void ignore_rows(mn_sample *sample) {
    const mn_sample_tensor *target = mn_sample_find(sample, "target");
    if (sample->op != MN_OP_cross_entropy) return;
    const int64_t ignore = ((mn_cross_entropy_args *)sample->args)->ignore;
    for (int64_t i = 1; i < target->count; i += 4) {
        mn_sample_set(sample, target->data, i, (double)ignore);
    }
}

/* What was drawn lately. A test opens one case for every target, count of threads or changed
 * number, and drawing takes longer than most kernels on it: those after the first are copies. */
enum { KEPT = 4 };
static struct {
    op_case of;
    mn_sample drawn;
} kept[KEPT];
static int n_drawn;

static void copy_given(mn_sample *to, const mn_sample *from) {
    const size_t bytes = mn_dtype_bytes(((const mn_call *)from->args)->dtype);
    for (int i = 0; i < from->n_tensors; i++) {
        void *out = op_memory(&to->tensors[i], OP_GIVEN);
        const void *in = op_memory(&from->tensors[i], OP_GIVEN);
        if (in && out) memcpy(out, in, (size_t)from->tensors[i].count * bytes);
    }
}

void op_open(mn_sample *sample, const op_case *c) {
    op_allocate(sample, c);
    for (int i = 0; i < KEPT && i < n_drawn; i++) {
        if (memcmp(&kept[i].of, c, sizeof *c) != 0) continue;
        copy_given(sample, &kept[i].drawn);
        return;
    }
    mn_sample_draw(sample, c->seed);
    ignore_rows(sample);
    const int place = n_drawn++ % KEPT;
    mn_sample_free(&kept[place].drawn);
    kept[place].of = *c;
    op_allocate(&kept[place].drawn, c);
    copy_given(&kept[place].drawn, sample);
}

const char *op_case_text(const op_case *c) {
    static char text[512];
    int at = snprintf(text, sizeof text,
                      "%s %s B=%" PRId64 " T=%" PRId64 " H=%" PRId64 " K=%" PRId64 " V=%" PRId64
                      " decay=%d choices=%d,%d,%d fields=%" PRIx64 " keys+%" PRId64
                      " window=%" PRId64 " groups=%" PRId64 " seed=%" PRIu64,
                      mn_op_describe(c->op)->name, mn_dtype_name(c->dtype), c->B, c->T, c->H, c->K,
                      c->V, c->decay, c->choice[0], c->choice[1], c->choice[2],
                      c->fields & 0xffffffffu, c->more_keys, c->window, c->groups,
                      c->seed);
    for (int64_t n = 0; c->cu_seqlens && n <= c->n_seqs && at < (int)sizeof text; n++) {
        at += snprintf(text + at, sizeof text - (size_t)at, "%s%" PRId64, n ? "," : " cu=",
                       c->cu_seqlens[n]);
    }
    return text;
}

bool op_token_layout(op_tokens *out, const mn_sample *sample, const mn_sample_tensor *tensor) {
    const mn_call *call = (const mn_call *)sample->args;
    const char *at = strchr(tensor->axes, 'T');
    if (!at && op_is_keyed(sample->op)) at = strchr(tensor->axes, 'L');
    if (!at || !tensor->data) return false;
    bool ok = true;
    *out = (op_tokens){ 1, mn_axis_size(call, *at, &ok), 1 };
    for (const char *c = tensor->axes; c < at; c++) out->outer *= mn_axis_size(call, *c, &ok);
    for (const char *c = at + 1; *c; c++) out->inner *= mn_axis_size(call, *c, &ok);
    return true;
}

static size_t element_bytes(const mn_sample *sample) {
    return mn_dtype_bytes(((const mn_call *)sample->args)->dtype);
}

void *op_memory(const mn_sample_tensor *tensor, op_side side) {
    const bool input = tensor->field->role <= MN_ROLE_RAW;
    return input == (side == OP_GIVEN) ? tensor->data : tensor->partner;
}

void op_copy_tokens(mn_sample *dst, int64_t to, const mn_sample *src, int64_t from, int64_t count,
                    op_side side) {
    const size_t bytes = element_bytes(src);
    for (int i = 0; i < src->n_tensors; i++) {
        op_tokens d, s;
        if (!op_token_layout(&s, src, &src->tensors[i])) continue;
        char *out = op_memory(&dst->tensors[i], side);
        const char *in = op_memory(&src->tensors[i], side);
        if (!in || !out || !op_token_layout(&d, dst, &dst->tensors[i])) continue;
        for (int64_t o = 0; o < s.outer; o++) {
            memcpy(out + (size_t)((o * d.length + to) * d.inner) * bytes,
                   in + (size_t)((o * s.length + from) * s.inner) * bytes,
                   (size_t)(count * s.inner) * bytes);
        }
    }
}

void op_copy_rows(mn_sample *dst, int64_t to, const mn_sample *src, int64_t from, op_side side) {
    const mn_call *call = (const mn_call *)src->args, *dst_call = (const mn_call *)dst->args;
    for (int i = 0; i < src->n_tensors; i++) {
        op_tokens tokens;
        const mn_sample_tensor *t = &src->tensors[i];
        if (!op_token_layout(&tokens, src, t)) continue;
        char *out = op_memory(&dst->tensors[i], side);
        const char *in = op_memory(t, side);
        bool ok = true;
        int64_t outer = 1;
        if (!in || !out) continue;
        for (const char *c = t->axes; *c != 'B'; c++) outer *= mn_axis_size(call, *c, &ok);
        const size_t row = (size_t)(t->count / outer / call->B) * element_bytes(src);
        for (int64_t o = 0; o < outer; o++) {
            memcpy(out + (size_t)(o * dst_call->B + to) * row,
                   in + (size_t)(o * call->B + from) * row, row);
        }
    }
}

static int64_t state_rows(const mn_sample *sample) {
    const mn_call *call = (const mn_call *)sample->args;
    return call->cu_seqlens ? call->n_seqs : call->B;
}

void op_copy_states(mn_sample *dst, int64_t to, const mn_sample *src, int64_t from, int64_t count,
                    op_side side) {
    const size_t bytes = element_bytes(src);
    for (int i = 0; i < src->n_tensors; i++) {
        if (src->tensors[i].axes[0] != 'N') continue;
        char *out = op_memory(&dst->tensors[i], side);
        const char *in = op_memory(&src->tensors[i], side);
        if (!in || !out) continue;
        const size_t row = (size_t)(src->tensors[i].count / state_rows(src)) * bytes;
        memcpy(out + (size_t)to * row, in + (size_t)from * row, (size_t)count * row);
    }
}

void op_copy_shared(mn_sample *dst, const mn_sample *src, op_side side) {
    for (int i = 0; i < src->n_tensors; i++) {
        op_tokens tokens;
        const mn_sample_tensor *from = &src->tensors[i];
        if (from->axes[0] == 'N' || op_token_layout(&tokens, src, from)) continue;
        void *out = op_memory(&dst->tensors[i], side);
        const void *in = op_memory(from, side);
        const size_t bytes = (size_t)mn_min(from->count, dst->tensors[i].count) *
                             element_bytes(src);
        if (in && out) memcpy(out, in, bytes);
    }
}

mn_sample_tensor *op_final_state(mn_sample *sample, const mn_field *field) {
    char name[64];
    snprintf(name, sizeof name, "%s", field->name);
    const size_t length = strlen(name);
    if (field->axes[0] != 'N' || field->role != MN_ROLE_OPT || length < 2) return NULL;
    name[length - 1] = '\0';    // state0 -> state
    mn_sample_tensor *last = mn_sample_find(sample, name);
    return last && last->field->axes[0] == 'N' ? last : NULL;
}

void op_carry_state(mn_sample *dst, const mn_sample *src) {
    for (int i = 0; i < dst->n_tensors; i++) {
        mn_sample_tensor *first = &dst->tensors[i];
        const mn_sample_tensor *last = op_final_state((mn_sample *)src, first->field);
        if (!last || !first->data) continue;
        memcpy(first->data, last->data, (size_t)first->count * element_bytes(dst));
    }
}

bool op_stay_in_place(mn_sample *sample) {
    bool some = false;
    for (int i = 0; i < sample->n_tensors; i++) {
        const mn_sample_tensor *first = &sample->tensors[i];
        const mn_sample_tensor *last = op_final_state(sample, first->field);
        if (!last || !first->data) continue;
        memcpy(last->data, first->data, (size_t)first->count * element_bytes(sample));
        ((mn_in *)(sample->args + first->field->offset))->data = last->data;
        some = true;
    }
    return some;
}

void op_convert(mn_sample *dst, const mn_sample *src) {
    for (int i = 0; i < src->n_tensors; i++) {
        void *out = op_memory(&dst->tensors[i], OP_GIVEN);
        const void *in = op_memory(&src->tensors[i], OP_GIVEN);
        for (int64_t at = 0; in && out && at < src->tensors[i].count; at++) {
            mn_sample_set(dst, out, at, mn_sample_get(src, in, at));
        }
    }
}

bool op_is_symmetric(const mn_sample *sample, const mn_sample_tensor *tensor, int64_t *size) {
    bool ok = true;
    const size_t rank = strlen(tensor->axes);
    if (rank < 2 || tensor->axes[rank - 1] != tensor->axes[rank - 2]) return false;
    *size = mn_axis_size((const mn_call *)sample->args, tensor->axes[rank - 1], &ok);
    return true;
}
