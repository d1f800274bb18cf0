/* operator.c - any operator of mneme.h on the tape, bound by the names of its fields.
 *
 * Each field has the type that the operator wants (mn_field_dtype): tensors of another are
 * converted first. Going back, an operator writes the gradients of its inputs, in the types of the
 * fields. Where one has arrived before, where a tensor is bound twice or its gradient has another
 * type, it writes beside and the tape adds. */
#include <string.h>

#include "base/dtype.h"
#include "base/util.h"
#include "kernels/norm_adds.h"
#include "ops/run.h"
#include "decode/defer.h"

void *mn_run_start(mn_run *run, mn_tape *tape, mn_op_id op) {
    memset(run, 0, offsetof(mn_run, args) + mn_op_describe(op)->args_bytes);
    run->tape = tape;
    run->op = op;
    run->call = (mn_call *)run->args;
    run->call->dtype = tape->dtype;
    run->fields = mn_op_fields(op, &run->n_fields);
    int n_params;
    const mn_param *params = mn_op_params(op, &n_params);
    for (int i = 0; i < n_params; i++) {
        void *at = run->args + params[i].offset;
        if (params[i].kind == MN_PARAM_REAL) *(double *)at = params[i].value;
        if (params[i].kind == MN_PARAM_INT) *(int64_t *)at = (int64_t)params[i].value;
    }
    return run->args;
}

static void fail(mn_run *run, const char *what, const char *field) {
    mn_tape_fail(run->tape, mn_fail(MN_ERR_INTERNAL, "%s: %s of %s %s", run->tape->scope, field,
                                    mn_op_describe(run->op)->name, what));
}

/* Index of the field, -1 (and a failure) if there is none. */
static int find(mn_run *run, const char *name) {
    for (int i = 0; i < run->n_fields; i++) {
        if (strcmp(run->fields[i].name, name) == 0) return i;
    }
    fail(run, "does not exist", name);
    return -1;
}

static const char *axes_of(const mn_run *run, int field, char buffer[MN_MAX_RANK + 1]) {
    return mn_field_axes(&run->fields[field], mn_args_decay(run->op, run->args), buffer);
}

static void size(mn_run *run, const char *field, char letter, int64_t value) {
    int64_t *slot = mn_axis_slot(run->call, letter);
    if (!slot) return;
    if (*slot != 0 && *slot != value) fail(run, "has another size than the other tensors", field);
    *slot = value;
}

static bool is_activation(const char *axes) {
    return axes[0] == '*' || (axes[0] == 'B' && (axes[1] == 'T' || axes[1] == 'L'));
}

/* Sizes that an activation bound to these axes tells. */
static void take_sizes(mn_run *run, const char *field, const char *axes, const mn_tensor *x) {
    const int64_t *n = x->shape;
    const size_t rank = strlen(axes);
    if (axes[0] == '*') {
        if (rank == 2) size(run, field, axes[1], n[3]);
        size(run, field, 'B', n[0] * n[1] * n[2] * (rank == 1 ? n[3] : 1));
        return;
    }
    size(run, field, 'B', n[0]);
    size(run, field, axes[1], n[1]);
    if (rank == 3) size(run, field, axes[2], n[2] * n[3]);
    if (rank == 4) {
        size(run, field, axes[2], n[2]);
        size(run, field, axes[3], n[3]);
    }
}

/* A view of x's strides at `data`: zeros where the operator takes contiguous tensors only. */
static mn_in view_at(const char *axes, const mn_tensor *x, const void *data) {
    mn_in view = { data, { 0, 0, 0 } };
    if (axes[0] != 'B' || !is_activation(axes)) return view;
    view.stride[0] = x->stride[0];
    view.stride[1] = x->stride[1];
    if (strlen(axes) > 3) view.stride[2] = x->stride[2];
    else if (strchr("HJQ", axes[2])) view.stride[2] = x->shape[3] == 1 ? x->stride[2] : 1;
    return view;
}

static bool strided(const char *axes) {
    return axes[0] == 'B' && is_activation(axes);
}

/* ---- sequence by sequence -------------------------------------------------------------------- */

enum { MOST_ROW_FIELDS = 8 };

struct mn_run_rows {
    int64_t n;
    const int64_t *starts;
    int n_fields;
    size_t offset[MOST_ROW_FIELDS];
    void **data[MOST_ROW_FIELDS];
    size_t number;                   // offset of what `numbers` are for
    const int64_t *numbers, *lengths;
    int n_saves;
    struct {
        const void *from;
        void *to;
        size_t bytes;
    } saves[MOST_ROW_FIELDS];
};

mn_tensor_rows *mn_tape_rows(mn_tape *tape, int64_t n) {
    mn_tensor_rows *rows = mn_tape_note(tape, sizeof *rows);
    if (!rows) return NULL;
    rows->n = n;
    rows->data = mn_tape_note(tape, (size_t)n * sizeof *rows->data);
    rows->length = mn_tape_note(tape, (size_t)n * sizeof *rows->length);
    return rows->data && rows->length ? rows : NULL;
}

void mn_run_by_rows(mn_run *run, int64_t n, const int64_t *starts) {
    if (!run->rows) run->rows = mn_tape_note(run->tape, sizeof *run->rows);
    if (!run->rows) return;
    run->rows->n = n;
    run->rows->starts = starts;
}

/* Where the memory of each sequence for the field at `offset` is written down. */
static void **row_data(mn_run *run, size_t offset) {
    mn_run_rows *rows = run->rows;
    for (int i = 0; rows && i < rows->n_fields; i++) {
        if (rows->offset[i] == offset) return rows->data[i];
    }
    void **data = rows ? mn_tape_note(run->tape, (size_t)rows->n * sizeof *data) : NULL;
    if (!data) return NULL;
    if (rows->n_fields == MOST_ROW_FIELDS) {
        fail(run, "is one field too many that differ by sequence", "a state");
        return NULL;
    }
    rows->offset[rows->n_fields] = offset;
    rows->data[rows->n_fields++] = data;
    return data;
}

void mn_run_row_at(mn_run *run, const char *field, int64_t b, void *memory) {
    if (mn_tape_dead(run->tape)) return;
    const int i = find(run, field);
    void **data = i >= 0 ? row_data(run, run->fields[i].offset) : NULL;
    if (data) data[b] = memory;
}

void mn_run_row_save(mn_run *run, const void *from, void *to, size_t bytes) {
    mn_run_rows *rows = run->rows;
    if (!rows || rows->n_saves == MOST_ROW_FIELDS) {
        fail(run, "has no place to be kept", "a state");
        return;
    }
    rows->saves[rows->n_saves].from = from;
    rows->saves[rows->n_saves].to = to;
    rows->saves[rows->n_saves++].bytes = bytes;
}

void mn_run_row_numbers(mn_run *run, int64_t *slot, const int64_t *values) {
    if (!run->rows) return;
    run->rows->number = (size_t)((unsigned char *)slot - run->args);
    run->rows->numbers = values;
}

/* A cache of a batch: its field and its length differ by sequence. */
static void take_rows(mn_run *run, int field, const mn_tensor *x) {
    void **data = row_data(run, run->fields[field].offset);
    if (!data) return;
    memcpy(data, x->rows->data, (size_t)x->rows->n * sizeof *data);
    run->rows->lengths = x->rows->length;
}

/* Elements between neighbours along axis `axis` of the field, whose stride may be 0 for
 * contiguous. */
static int64_t axis_step(const mn_run *run, const char *axes, int axis, int64_t stride) {
    bool ok = true;
    int64_t step = 1;
    for (int i = axis + 1; axes[i] && !stride; i++) step *= mn_axis_size(run->call, axes[i], &ok);
    return stride ? stride : step;
}

/* The argument struct of sequence b. */
static void fill_row(const mn_run *run, unsigned char *args, int64_t b) {
    const mn_run_rows *rows = run->rows;
    char buffer[MN_MAX_RANK + 1];
    const int axis = rows->starts ? 1 : 0;
    const int64_t at = rows->starts ? rows->starts[b] : b;
    for (int i = 0; i < run->n_fields; i++) {
        mn_in *view = (mn_in *)(args + run->fields[i].offset);
        const char *axes = axes_of(run, i, buffer);
        if (!view->data || !axes || axes[0] != 'B' || (axis == 1 && axes[1] != 'T')) continue;
        const size_t item = mn_dtype_bytes(mn_field_dtype(&run->fields[i], run->tape->dtype));
        const int64_t step = axis_step(run, axes, axis, view->stride[axis]);
        view->data = (const char *)view->data + (size_t)(at * step) * item;
    }
    for (int i = 0; i < rows->n_fields; i++) {
        ((mn_in *)(args + rows->offset[i]))->data = rows->data[i][b];
    }
    mn_call *call = (mn_call *)args;
    call->B = 1;
    if (rows->starts) call->T = rows->starts[b + 1] - at;
    if (rows->lengths) call->L = rows->lengths[b];
    if (rows->numbers) *(int64_t *)(args + rows->number) = rows->numbers[b];
}

static void save_step(const mn_run_rows *rows, int64_t b) {
    for (int i = 0; i < rows->n_saves; i++) {
        const size_t bytes = rows->saves[i].bytes;
        memcpy((char *)rows->saves[i].to + (size_t)b * bytes, rows->saves[i].from, bytes);
    }
}

static void execute_rows(mn_run *run) {
    mn_tape *tape = run->tape;
    const int64_t n = run->rows->n;
    const size_t bytes = mn_op_describe(run->op)->args_bytes, step = (bytes + 15) / 16 * 16;
    unsigned char *all = mn_tape_runs(tape) ? mn_tape_note(tape, (size_t)n * step) : NULL;
    for (int64_t b = 0; all && b < n; b++) {
        memcpy(all + (size_t)b * step, run->args, bytes);
        fill_row(run, all + (size_t)b * step, b);
    }
    mn_status st = MN_OK;
    if (all && run->rows->n_saves == 0) {
        st = mn_op_run_rows(tape->context, run->op, all, step, n);
    }
    for (int64_t b = 0; all && run->rows->n_saves > 0 && b < n && st == MN_OK; b++) {
        st = mn_op_run(tape->context, run->op, MN_FORWARD, all + (size_t)b * step);
        save_step(run->rows, b);
    }
    if (st != MN_OK) mn_tape_fail(tape, st);
}

/* ---- inputs and results ---------------------------------------------------------------------- */

void mn_run_in(mn_run *run, const char *field, mn_tensor *x) {
    if (mn_tape_dead(run->tape)) return;
    const int i = find(run, field);
    if (i < 0) return;
    char buffer[MN_MAX_RANK + 1];
    const char *axes = axes_of(run, i, buffer);
    if (!x || !axes) {
        if (run->fields[i].role == MN_ROLE_IN) fail(run, "is missing", field);
        return;
    }
    x = mn_tape_cast(run->tape, x, mn_field_dtype(&run->fields[i], run->tape->dtype));
    if (!x) return;
    const bool flat = strlen(axes) == 3 && strided(axes) && x->shape[2] != 1;
    if ((!strided(axes) || flat) && !mn_is_contiguous(x)) {
        fail(run, "has to be contiguous", field);
        return;
    }
    if (is_activation(axes)) take_sizes(run, field, axes, x);
    run->bound[i] = x;
    *(mn_in *)(run->args + run->fields[i].offset) = view_at(axes, x, x->data);
    if (x->rows) take_rows(run, i, x);
}

void mn_run_in_at(mn_run *run, const char *field, const void *data) {
    if (mn_tape_dead(run->tape)) return;
    const int i = find(run, field);
    if (i >= 0) *(mn_in *)(run->args + run->fields[i].offset) = (mn_in){ data, { 0, 0, 0 } };
}

void mn_run_out_at(mn_run *run, const char *field, void *data) {
    if (mn_tape_dead(run->tape)) return;
    const int i = find(run, field);
    if (i >= 0) *(mn_out *)(run->args + run->fields[i].offset) = (mn_out){ data, { 0, 0, 0 } };
}

/* Sizes by the axes of a result; those of an operator's derived letters are set by then. */
static bool shape_of(mn_run *run, const char *field, const char *axes, int64_t shape[4]) {
    if (run->tape->cu_seqlens && run->call->T > 0) {    // operators without time know no sequences
        run->call->cu_seqlens = run->tape->cu_seqlens;
        run->call->n_seqs = run->tape->n_seqs;
    }
    int64_t n[MN_MAX_RANK];
    bool ok = true;
    const int rank = (int)strlen(axes);
    for (int i = 0; i < rank; i++) {
        n[i] = mn_axis_size(run->call, axes[i], &ok);
        if (ok && n[i] > 0) continue;
        fail(run, "has a size that nothing tells", field);
        return false;
    }
    shape[0] = shape[1] = shape[2] = shape[3] = 1;
    if (axes[0] == 'B' && rank >= 3) {
        shape[0] = n[0];
        shape[1] = n[1];
        if (rank == 4) shape[2] = n[2];
        shape[3] = n[rank - 1];
        if (rank > 4) {
            shape[2] = n[2];
            shape[3] = n[3] * n[4];
        }
        return true;
    }
    for (int i = 0; i < rank; i++) shape[3] *= n[i];
    return true;
}

/* A result over rows has the shape of the input over rows. */
static const mn_tensor *rows_like(const mn_run *run, const char *axes) {
    char buffer[MN_MAX_RANK + 1];
    for (int i = 0; i < run->n_fields && axes[0] == '*'; i++) {
        const char *at = axes_of(run, i, buffer);
        if (run->bound[i] && run->fields[i].role <= MN_ROLE_OPT && at && strcmp(at, axes) == 0) {
            return run->bound[i];
        }
    }
    return NULL;
}

/* Whether results of the operator are light here. */
static bool is_light(const mn_tape *tape, mn_op_id op) {
    if (!tape->part) return false;
    switch (op) {
#define LIGHT(name, more) case MN_OP_##name: return tape->lighter || !(more);
#include "tape/recompute.def"
#undef LIGHT
    default: return false;
    }
}

mn_tensor *mn_run_out(mn_run *run, const char *field) {
    if (mn_tape_dead(run->tape)) return NULL;
    const int i = find(run, field);
    if (i < 0) return NULL;
    char buffer[MN_MAX_RANK + 1];
    const char *axes = axes_of(run, i, buffer);
    int64_t shape[4];
    const mn_tensor *like = rows_like(run, axes);
    if (like) memcpy(shape, like->shape, sizeof shape);
    else if (!shape_of(run, field, axes, shape)) return NULL;
    const mn_dtype dtype = mn_field_dtype(&run->fields[i], run->tape->dtype);
    mn_tensor *y = mn_tape_result_of(run->tape, dtype, shape, is_light(run->tape, run->op));
    if (!y) return NULL;
    if (run->fields[i].role == MN_ROLE_AUX) y->slot = NULL;
    run->bound[i] = y;
    *(mn_out *)(run->args + run->fields[i].offset) = (mn_out){ y->data, { 0, 0, 0 } };
    return y;
}

/* ---- now, and back --------------------------------------------------------------------------- */

static void execute(mn_tape *tape, mn_op_id op, mn_pass pass, const void *args) {
    if (pass == MN_FORWARD && mn_defer_op(tape, op, args)) return;
    if (mn_tape_runs(tape)) {
        tape->context->borders = (mn_borders){ tape->cu_seqlens, tape->borders };
        tape->context->counts = mn_tape_counts(tape);
        const mn_status st = mn_op_run(tape->context, op, pass, args);
        tape->context->borders = tape->context->counts = (mn_borders){ 0 };
        if (st != MN_OK) mn_tape_fail(tape, st);
        return;
    }
    size_t bytes;
    if (mn_tape_dead(tape)) return;
    const mn_status st = mn_op_workspace(tape->context, op, pass, args, &bytes);
    if (st != MN_OK) mn_tape_fail(tape, st);
    else if (bytes > tape->work) tape->work = bytes;
}

/* By the tape's runner where it has one: whether it did all there is to do. */
static bool run_elsewhere(mn_tape *tape, mn_op_id op, mn_pass pass, void *args) {
    const mn_tape_runner *runner = tape->runner;
    if (!runner || ((mn_call *)args)->T <= 0 || mn_tape_dead(tape)) return false;
    const bool plan = !mn_tape_runs(tape);
    const mn_status st = pass == MN_FORWARD ? runner->forward(runner->context, op, args, plan)
                                            : runner->backward(runner->context, op, args, plan);
    if (st != MN_OK) mn_tape_fail(tape, st);
    return st != MN_OK || !plan;
}

static bool is_result(const mn_field *field) {
    return field->role == MN_ROLE_OUT || field->role == MN_ROLE_AUX;
}

/* The tensor at field i if it is an input that wants a gradient. */
static mn_tensor *wanting(const mn_run *run, int i) {
    const mn_field *field = &run->fields[i];
    const bool takes = run->bound[i] && !is_result(field) && field->partner != MN_NO_OFFSET;
    return takes && mn_wants(run->bound[i]) ? run->bound[i] : NULL;
}

static mn_dtype type_of(const mn_run *run, int i) {
    return mn_field_dtype(&run->fields[i], run->tape->dtype);
}

/* Gradients that are the first to arrive are written in place. Returns the others as bits. */
static uint64_t place_first(mn_tape *tape, mn_run *run) {
    char buffer[MN_MAX_RANK + 1];
    uint64_t others = 0;
    for (int i = 0; i < run->n_fields; i++) {
        mn_tensor *x = wanting(run, i);
        if (!x) continue;
        if (mn_grad_read(x).data || x->slot->dtype != type_of(run, i)) {
            others |= UINT64_C(1) << i;
            continue;
        }
        bool add;
        const mn_view to = mn_grad_write(tape, x, &add);
        const mn_in view = view_at(axes_of(run, i, buffer), x, to.data);
        *(mn_out *)(run->args + run->fields[i].partner) =
            (mn_out){ (void *)view.data, { view.stride[0], view.stride[1], view.stride[2] } };
    }
    return others;
}

/* Hands the operator the cotangents that have arrived; false when none has. */
static bool take_cotangents(mn_run *run) {
    bool any = false;
    for (int i = 0; i < run->n_fields; i++) {
        const mn_field *field = &run->fields[i];
        if (!is_result(field) || field->partner == MN_NO_OFFSET || !run->bound[i]) continue;
        const void *cotangent = mn_grad_read(run->bound[i]).data;
        *(mn_in *)(run->args + field->partner) = (mn_in){ cotangent, { 0, 0, 0 } };
        any |= cotangent != NULL;
    }
    return any;
}

/* Memory of its own for the gradient of field i, contiguous and in the field's type. */
static mn_view take_beside(mn_tape *tape, mn_run *run, int i) {
    const int64_t *shape = run->bound[i]->shape;
    const mn_dtype dtype = type_of(run, i);
    void *memory = mn_tape_bytes_of(tape, (size_t)mn_count4(shape) * mn_dtype_bytes(dtype));
    *(mn_out *)(run->args + run->fields[i].partner) = (mn_out){ memory, { 0, 0, 0 } };
    return mn_flat_view(memory, dtype, shape);
}

static int launch_norm(const void *args, mn_norm_accumulate to, void *workspace, void *stream) {
    return mn_norm_accumulate_cuda(args, to, workspace, stream);
}

static int launch_gated_norm(const void *args, mn_norm_accumulate to, void *workspace,
                             void *stream) {
    return mn_norm_gated_accumulate_cuda(args, to, workspace, stream);
}

/* Norms whose GPU kernel adds to gradients: where x may be of a residual stream (0: it may not),
 * the weight, and the launch. */
static const struct norm_row {
    mn_op_id op;
    int kernel;
    size_t stream, weight;
    int (*launch)(const void *args, mn_norm_accumulate to, void *workspace, void *stream);
} norm_rows[] = {
    { MN_OP_rms_norm, MN_KERNEL_rms_norm, offsetof(mn_rms_norm_args, x),
      offsetof(mn_rms_norm_args, w), launch_norm },
    { MN_OP_rms_norm_gated, MN_KERNEL_rms_norm_gated, 0, offsetof(mn_rms_norm_gated_args, w),
      launch_gated_norm },
};

static const struct norm_row *norm_row_of(const mn_run *run) {
    for (size_t i = 0; i < MN_COUNTOF(norm_rows); i++) {
        if (norm_rows[i].op == run->op) return &norm_rows[i];
    }
    return NULL;
}

/* Norms on a GPU add to the gradient of a residual stream by themselves, and to a weight's in
 * float32: these fields are no more among the others then. False where there is no such field. */
static bool norm_adds(mn_tape *tape, mn_run *run, uint64_t *others, mn_norm_accumulate *to) {
    const struct norm_row *row = norm_row_of(run);
    *to = (mn_norm_accumulate){ 0 };
    if (!tape->device || !row) return false;
    bool any = false;
    for (int i = 0; i < run->n_fields; i++) {
        const size_t at = run->fields[i].offset;
        if (!(*others >> i & 1) || !mn_is_contiguous(run->bound[i])) continue;
        const mn_dtype dtype = run->bound[i]->slot->dtype;
        const bool stream = at == row->stream && dtype == type_of(run, i);
        const bool weight = at == row->weight && dtype == MN_F32;
        if (!stream && !weight) continue;
        bool add;
        void *data = mn_grad_write(tape, run->bound[i], &add).data;
        *(mn_out *)(run->args + run->fields[i].partner) = (mn_out){ data, { 0, 0, 0 } };
        if (stream) to->accumulate_x = add;
        if (weight) to->dw = data, to->accumulate_w = add;
        *others &= ~(UINT64_C(1) << i);
        any = true;
    }
    return any;
}

static void run_norm_adds(mn_tape *tape, const mn_run *run, mn_norm_accumulate to) {
    const struct norm_row *row = norm_row_of(run);
    const mn_kernel *kernel = &tape->context->cuda.kernel[row->kernel][MN_BACKWARD];
    mn_plan plan = { 0 };
    if (!kernel->plan || !kernel->plan(run->args, &plan)) {
        mn_tape_fail(tape, mn_fail(MN_ERR_UNSUPPORTED, "this build has no CUDA kernels"));
        return;
    }
    const mn_tape_mark mark = mn_tape_hold(tape);
    void *parts = mn_tape_bytes_of(tape, plan.shared_bytes);
    if (mn_tape_runs(tape)) {
        mn_status st = mn_device_use(tape->device);
        if (st == MN_OK) {
            const int code = row->launch(run->args, to, parts, mn_device_stream(tape->device));
            st = mn_device_check(tape->device, code, tape->scope);
        }
        if (st != MN_OK) mn_tape_fail(tape, st);
    }
    mn_tape_let_go(tape, mark);
}

/* Gradients that are given get their place before scratch is taken: it outlasts the scratch. */
static void back_run(mn_tape *tape, void *payload) {
    mn_run *run = payload;
    run->tape = tape;
    if (!take_cotangents(run)) return;
    mn_view beside[MN_RUN_FIELDS];
    uint64_t others = place_first(tape, run);
    mn_norm_accumulate to;
    const bool adds = norm_adds(tape, run, &others, &to);
    for (int i = 0; i < run->n_fields; i++) {
        if (others >> i & 1) mn_grad_place(tape, run->bound[i]);
    }
    const mn_tape_mark mark = mn_tape_hold(tape);
    for (int i = 0; i < run->n_fields; i++) {
        if (others >> i & 1) beside[i] = take_beside(tape, run, i);
    }
    if (adds) run_norm_adds(tape, run, to);
    else if (!run_elsewhere(tape, run->op, MN_BACKWARD, run->args)) {
        execute(tape, run->op, MN_BACKWARD, run->args);
    }
    for (int i = 0; i < run->n_fields && !mn_tape_dead(tape); i++) {
        if (others >> i & 1) mn_grad_give(tape, run->bound[i], &beside[i]);
    }
    mn_tape_let_go(tape, mark);
}

static void run_again(mn_tape *tape, void *payload) {
    const mn_run *run = payload;
    execute(tape, run->op, MN_FORWARD, run->args);
}

void mn_run_now(mn_run *run) {
    mn_tape *tape = run->tape;
    if (mn_tape_dead(tape)) return;
    if (tape->cu_seqlens && run->call->T > 0) {
        run->call->cu_seqlens = tape->cu_seqlens;
        run->call->n_seqs = tape->n_seqs;
    }
    if (run->rows) execute_rows(run);
    else if (!run_elsewhere(tape, run->op, MN_FORWARD, run->args)) {
        execute(tape, run->op, MN_FORWARD, run->args);
    }
    mn_tensor *made[8];
    int n_made = 0;
    bool wanted = false;
    for (int i = 0; i < run->n_fields; i++) {
        if (!run->bound[i]) continue;
        if (!is_result(&run->fields[i])) wanted |= mn_wants(run->bound[i]);
        else if (n_made < 8) made[n_made++] = run->bound[i];
    }
    mn_run *kept = NULL;
    if (wanted && mn_tape_records(tape)) {
        const size_t bytes = offsetof(mn_run, args) + mn_op_describe(run->op)->args_bytes;
        kept = mn_tape_note(tape, bytes);
        if (!kept) return;
        memcpy(kept, run, bytes);
        kept->call = (mn_call *)kept->args;
        if (is_light(tape, run->op)) mn_tape_make_again(tape, run_again, kept);
    }
    mn_tape_record(tape, mn_op_describe(run->op)->name, back_run, kept, wanted, made, n_made);
}
