/* test_cuda_causal.c - test_ops_causal.c on a GPU, in float32 and bf16: one wild number in one
 * token of an input leaves everything before it, other heads and other sequences their bits; one in
 * a cotangent everything after it; NaN begins where it begins in the reference. Skipped without a
 * GPU.
 *
 * test_cuda_causal [OPERATOR [I/N]] runs one operator, and of its calls every Nth from the Ith on;
 * without I/N there is a process for each core (shares.h). What breaks is listed at the end of each
 * operator: target, tensor, what moves, the values that do it. */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/util.h"
#include "ops/run.h"
#include "ops/sample_device.h"
#include "runtime/device.h"
#include "support/check.h"
#include "support/op_causal.h"
#include "support/op_device.h"
#include "support/op_walk.h"
#include "support/shares.h"

static mn_context *gpu;    // NULL: none here

/* How often something moved, for the list. */
enum { N_DTYPES = 2, N_KINDS = 4 };
static const mn_dtype dtypes[N_DTYPES] = { MN_F32, MN_BF16 };
static const char *const dtype_names[N_DTYPES] = { "cuda f32", "cuda bf16" };
static const char *const kinds[N_KINDS] = { "results", "gradients elsewhere",
                                            "gradients by its cotangent", "where NaN begins" };
enum { NAN_BEGINS = 3 };
static int broken[N_DTYPES][MN_MAX_FIELDS][N_KINDS][OP_WILD_VALUES];

/* A call with the numbers of its seed in what a device holds of them: float32, or float64 rounded
 * to bf16. */
static void open_rounded(mn_sample *s, op_case c, int d) {
    c.dtype = dtypes[d] == MN_F32 ? MN_F32 : MN_F64;
    op_open(s, &c);
    if (dtypes[d] == MN_BF16) mn_sample_round(s, MN_BF16);
}

static void check_nan_begins(const mn_sample *got, int which, int64_t at, int d, const op_case *c) {
    static op_beginnings want, have;
    mn_sample ref;
    open_rounded(&ref, *c, d);
    const mn_sample_tensor *t = &ref.tensors[which];
    mn_sample_set(&ref, t->data, at, (double)NAN);
    if (mn_op_run(op_context("ref", 1), c->op, MN_FORWARD, ref.args) == MN_OK) {
        op_find_nan(want, &ref);
        op_find_nan(have, got);
        const int64_t n = op_check_beginnings(dtype_names[d], want, have, got, t, NAN, c);
        broken[d][which][NAN_BEGINS][0] += n > 0;
    }
    mn_sample_free(&ref);
}

static void poison(const mn_sample *clean, const op_case *c, int d, int which, int v, int round) {
    mn_sample got;
    float value = op_wild_values[v];
    open_rounded(&got, *c, d);
    const mn_sample_tensor *t = &got.tensors[which];
    const bool input = t->field->role <= MN_ROLE_RAW;
    const int64_t at = op_choose_element(&got, t, round);
    const op_spot spot = op_spot_at(&got, t, at);
    if (input ? !op_allows(t->field, &value) : !t->partner) {
        mn_sample_free(&got);
        return;
    }
    mn_sample_set(&got, input ? t->data : t->partner, at, (double)value);
    op_run_device(gpu, &got, c, dtypes[d]);
    for (int kind = OP_ON_RESULTS; kind <= OP_ON_GRADIENTS; kind++) {
        if (input == (kind == OP_ON_GRADIENTS)) continue;
        broken[d][which][kind][v] += op_check_kept(dtype_names[d], clean, &got, t, &spot, value,
                                                   (op_effect)kind, c) > 0;
    }
    if (input && isnan(value)) check_nan_begins(&got, which, at, d, c);
    mn_sample_free(&got);
}

/* What chunks make of a decay depends on where in its sixteen tokens it is: all places are tried,
 * from one of which on scores are counted. */
static void check_decay(const mn_sample *clean, const op_case *c, int d, int which) {
    enum { LARGE = 5, PLACES = 7 };    // op_wild_values[LARGE] is 1e25
    for (int round = 0; round < PLACES; round++) poison(clean, c, d, which, LARGE, round);
}

/* Every value in every input and cotangent, or NaN and another that takes turns. */
static void check_call(const op_case *c, int d, bool every) {
    mn_sample clean;
    int round = (int)c->seed;
    open_rounded(&clean, *c, d);
    op_run_device(gpu, &clean, c, dtypes[d]);
    for (int i = 0; i < clean.n_tensors; i++) {
        const mn_sample_tensor *t = &clean.tensors[i];
        if (!op_has_rows(t) || t->field->law == MN_LAW_CLASS) continue;
        for (int v = 0; v < OP_WILD_VALUES; v++, round++) {
            const int turn = 1 + (int)((c->seed + (uint64_t)i) % (OP_WILD_VALUES - 1));
            if (every || v == 0 || v == turn) poison(&clean, c, d, i, v, round);
        }
        if (t->field->law == MN_LAW_DECAY) check_decay(&clean, c, d, i);
    }
    mn_sample_free(&clean);
}

/* On both sides of the sizes at which kernels by chunks, and those of tensor cores, take over. */
enum {
    ALL,
    DPLR,       // which has two such kernels
    TURNING,    // where channels may turn: two rows of a state for each
    FILLING     // a GPU with blocks, for delta in bf16, which looks at that
};
static const struct {
    int64_t B, H, T, K, V;
    bool packed;
    int whose;
} sizes[] = {
    { 2, 2, 75, 19, 18, false, ALL },      { 1, 3, 103, 32, 40, true, ALL },
    { 1, 1, 97, 64, 96, false, ALL },      { 2, 2, 150, 64, 64, false, ALL },
    { 1, 2, 140, 128, 128, false, ALL },   { 1, 2, 103, 128, 128, true, ALL },
    { 2, 1, 90, 48, 48, false, DPLR },     { 1, 2, 103, 96, 96, true, DPLR },
    { 1, 2, 75, 140, 24, false, TURNING }, { 1, 67, 80, 72, 72, false, FILLING },
};

static bool has_input(mn_op_id op, const char *name) {
    int count;
    const mn_field *fields = mn_op_fields(op, &count);
    for (int i = 0; i < count; i++) {
        if (strcmp(fields[i].name, name) == 0) return true;
    }
    return false;
}

/* Whether a size is one for this call. */
static bool concerns(int whose, const op_case *c, mn_dtype dtype) {
    switch (whose) {
    case DPLR: return c->op == MN_OP_dplr;
    case TURNING: return has_input(c->op, "theta");
    case FILLING: return c->op == MN_OP_delta && c->decay == MN_DECAY_TOKEN && dtype == MN_BF16;
    default: return true;
    }
}

/* ---- attention ------------------------------------------------------------------------------- */

/* A column of all heads, of even and odd tokens. */
static void set_column(const mn_sample *s, const mn_sample_tensor *t, void *data, int64_t column,
                       double even, double odd) {
    const mn_call *call = (const mn_call *)s->args;
    const int64_t width = call->V, row = t->count / call->T;
    for (int64_t i = column; i < t->count; i += width) {
        mn_sample_set(s, data, i, i / row % 2 ? odd : even);
    }
}

/* A call whose values are the same for all tokens but for one column, of which the cotangent is 0:
 * o = v to the last bit, and b = o.do needs no second scan. With a cotangent in that column, where
 * o is rounded by as much as values differ, its row does. */
static void open_evenly(mn_sample *s, const op_case *c, int64_t column) {
    open_rounded(s, *c, 1);    // as bf16 holds them
    const mn_sample_tensor *v = mn_sample_find(s, "v"), *o = mn_sample_find(s, "o");
    const mn_sample_tensor *q = mn_sample_find(s, "q");
    for (int64_t i = 0; i < q->count; i++) mn_sample_set(s, q->data, i, 0);
    for (int64_t j = 0; j < c->V; j++) {
        const double x = mn_sample_get(s, v->data, j);
        set_column(s, v, v->data, j, x, x);
    }
    set_column(s, v, v->data, column, 1, 1.0078125);
    set_column(s, o, o->partner, column, 0, 0);
}

/* A row of dq that needs a second scan for its cotangent moves none of the rows behind it that are
 * scanned with it. */
static void check_second_scan(int64_t window) {
    enum { COLUMN = 9, TOKEN = 37 };
    static const float values[] = { 100.0f, 1e25f };
    op_case forms[OP_MAX_FORMS];
    mn_sample clean;
    op_forms(MN_OP_attention, forms);
    op_case c = forms[0];
    c.B = 1, c.H = 2, c.T = 150, c.K = c.V = 64, c.window = window;
    open_evenly(&clean, &c, COLUMN);
    op_run_device(gpu, &clean, &c, MN_BF16);
    for (int i = 0; i < (int)MN_COUNTOF(values); i++) {
        mn_sample got;
        open_evenly(&got, &c, COLUMN);
        const mn_sample_tensor *o = mn_sample_find(&got, "o");
        const int64_t at = (TOKEN * c.H + 1) * c.V + COLUMN;
        const op_spot spot = op_spot_at(&got, o, at);
        mn_sample_set(&got, o->partner, at, (double)values[i]);
        op_run_device(gpu, &got, &c, MN_BF16);
        op_check_kept("cuda bf16, second scan", &clean, &got, o, &spot, values[i], OP_ON_GRADIENTS,
                      &c);
        mn_sample_free(&got);
    }
    mn_sample_free(&clean);
}

/* With a window, rows that see none of several values that are not finite keep their bits, those
 * between them and those behind as well. */
static void check_wild_values(int64_t width, int64_t window, float value) {
    static const int64_t tokens[] = { 5, 70, 140, 141, 290 };
    op_case forms[OP_MAX_FORMS];
    mn_sample clean, got;
    op_forms(MN_OP_attention, forms);
    op_case c = forms[0];
    c.B = 1, c.H = 2, c.T = 300, c.K = c.V = width, c.window = window;
    open_rounded(&clean, c, 1);
    open_rounded(&got, c, 1);
    const mn_sample_tensor *v = mn_sample_find(&got, "v"), *o = mn_sample_find(&got, "o");
    for (int i = 0; i < (int)MN_COUNTOF(tokens); i++) {    // of the heads' one key head
        mn_sample_set(&got, v->data, tokens[i] * width + 7 * i, (double)value);
    }
    op_run_device(gpu, &clean, &c, MN_BF16);
    op_run_device(gpu, &got, &c, MN_BF16);
    const void *want = mn_sample_find(&clean, "o")->data;
    int64_t moved = 0, first = -1;
    for (int64_t at = 0; at < o->count; at++) {
        const int64_t t = at / width / c.H;
        bool sees = false;
        for (int i = 0; i < (int)MN_COUNTOF(tokens); i++) {
            sees = sees || (t >= tokens[i] && t < tokens[i] + window);
        }
        const double x = mn_sample_get(&got, o->data, at), y = mn_sample_get(&clean, want, at);
        if (sees || memcmp(&x, &y, sizeof x) == 0) continue;
        if (moved++ == 0) first = at;
    }
    CHECK(moved == 0,
          "cuda bf16: %g in v at several tokens moves %lld of o, first of token %lld; %s",
          (double)value, (long long)moved, (long long)(first / width / c.H), op_case_text(&c));
    mn_sample_free(&clean);
    mn_sample_free(&got);
}

/* Whether Hopper's kernels run, which keep that; those of other machines keep rows in front of the
 * first such value. */
static bool runs_as_hopper(void) {
    mn_device_info info;
    const char *machine = getenv("MN_CUDA_MACHINE");
    return !machine && mn_device_describe(&info, 0) == MN_OK && info.major == 9 && info.minor == 0;
}

static void check_attention(void) {
    static const int64_t widths[] = { 32, 64, 128 }, windows[] = { 1, 20, 60, 128 };
    if (shares_next()) check_second_scan(0);
    if (shares_next()) check_second_scan(90);
    const int n = runs_as_hopper() ? (int)(MN_COUNTOF(widths) * MN_COUNTOF(windows)) : 0;
    for (int i = 0; i < n; i++) {
        const int64_t width = widths[i % 3], window = windows[i / 3];
        if (!shares_next()) continue;
        check_wild_values(width, window, NAN);
        check_wild_values(width, window, -INFINITY);
    }
}

static void list_broken(mn_op_id op) {
    int count;
    const mn_field *fields = mn_op_fields(op, &count);
    for (int at = 0; at < N_DTYPES * MN_MAX_FIELDS * N_KINDS; at++) {
        const int kind = at % N_KINDS, i = at / N_KINDS % MN_MAX_FIELDS;
        const int d = at / N_KINDS / MN_MAX_FIELDS;
        int all = 0;
        for (int v = 0; v < OP_WILD_VALUES; v++) all += broken[d][i][kind][v];
        if (all == 0 || i >= count) continue;
        fprintf(stderr, "broken: %s %s, %s, %s:", mn_op_describe(op)->name, dtype_names[d],
                fields[i].name, kinds[kind]);
        for (int v = 0; v < OP_WILD_VALUES; v++) {
            if (broken[d][i][kind][v] == 0) continue;
            fprintf(stderr, " %s x%d", op_wild_text(op_wild_values[v]), broken[d][i][kind][v]);
        }
        fputc('\n', stderr);
    }
    memset(broken, 0, sizeof broken);
}

static void keeps_to_itself(mn_op_id op) {
    static const int64_t borders[] = { 0, 1, 70, 70, 103 };
    op_case forms[OP_MAX_FORMS];
    if (!gpu) {
        skip();
        return;
    }
    if (!mn_op_has_cuda(op, MN_FORWARD)) return;
    const int n_forms = op_forms(op, forms);
    shares_restart();
    for (int f = 0; f < n_forms; f++) {
        if (op_is_refused(gpu, forms[f])) continue;
        for (int i = 0; i < (int)MN_COUNTOF(sizes); i++) {
            op_case c = forms[f];
            c.B = sizes[i].B, c.H = sizes[i].H, c.T = sizes[i].T;
            c.K = sizes[i].K, c.V = sizes[i].V, c.seed = 1 + (uint64_t)f;
            if (sizes[i].packed) c.cu_seqlens = borders, c.n_seqs = 4;
            if (sizes[i].packed && !op_has_time(op)) continue;
            for (int d = 0; d < N_DTYPES; d++) {
                if (!concerns(sizes[i].whose, &c, dtypes[d])) continue;
                if (shares_next()) check_call(&c, d, f == 0);
            }
        }
    }
    if (op == MN_OP_attention) check_attention();
    list_broken(op);
}

static int run_operators(int argc, char **argv) {
    return op_visit_device(&gpu, "a wild number stays where it can be seen, on a GPU",
                           keeps_to_itself, argc, argv);
}

int main(int argc, char **argv) {
    return shares_run(argc, argv, run_operators);
}
