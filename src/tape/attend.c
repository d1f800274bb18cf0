/* attend.c - attention of one token whose position is read when the step runs, so that a step that
 * was recorded goes on by it. */
#include "base/dtype.h"
#include "base/util.h"
#include "decode/defer.h"
#include "runtime/device.h"

void mn_tape_set_position(mn_tape *tape, const int64_t *host) {
    tape->position = mn_tape_lend(tape, host, sizeof *host);
    tape->position_host = tape->position ? host : NULL;
    mn_tape_declare(tape, tape->position, sizeof *host);
}

bool mn_tape_goes_by_position(const mn_tape *tape) {
    return tape->position != NULL;
}

const int64_t *mn_tape_position(const mn_tape *tape) {
    return tape->position_host;
}

mn_borders mn_tape_counts(const mn_tape *tape) {
    return (mn_borders){ tape->position_host, tape->position };
}

bool mn_tape_attends(const mn_tape *tape, int64_t K, int64_t V) {
    return tape->position && mn_max(K, V) <= MN_DECODE_ATTEND_WIDEST;
}

/* The frequencies to where the device reads them; NULL where nothing turns, or after a failure. */
static const double *lend_frequencies(mn_tape *tape, const mn_attend *how) {
    const size_t bytes = (size_t)(how->turns / 2) * sizeof *how->inv_freq;
    if (bytes == 0) return NULL;
    const double *there = mn_tape_lend_fixed(tape, how->inv_freq, bytes);
    mn_tape_declare(tape, there, bytes);
    return there;
}

mn_tensor *mn_tape_attend(mn_tape *tape, const mn_attend *how, mn_tensor *q, mn_tensor *k,
                          mn_tensor *v) {
    if (!q || !k || !v || mn_tape_dead(tape)) return NULL;
    const int64_t H = q->shape[2], J = k->shape[2], K = q->shape[3], V = v->shape[3];
    const int64_t n_parts = mn_ceil_div(how->capacity, MN_DECODE_ATTEND_KEYS);
    mn_decode_attention work = { .dtype = tape->dtype, .H = H, .J = J, .K = K, .V = V,
        .capacity = how->capacity, .window = how->window, .turns = how->turns, .n_parts = n_parts,
        .relu = how->relu, .scale = how->scale, .turned_scale = how->turned_scale,
        .eps = how->eps,
        .inv_freq = lend_frequencies(tape, how), .position = tape->position, .q = q->data,
        .k = k->data, .v = v->data, .q_step = q->stride[2], .k_step = k->stride[2],
        .v_step = v->stride[2], .keys = how->keys, .values = how->values };
    mn_tensor *parts = mn_tape_new_of(tape, MN_F32, (int64_t[]){ 1, H, n_parts, V + 2 });
    mn_tensor *o = mn_tape_new(tape, (int64_t[]){ 1, 1, H, V });
    if (!parts || !o) return NULL;
    work.parts = parts->data;
    work.o = o->data;
    if (!mn_tape_runs(tape) || mn_defer_attention(tape, &work)) return o;
    const int code = mn_decode_run_attention(&work, tape->where);
    const mn_status st = code == 0 ? MN_OK : mn_device_check(tape->device, code, "attention");
    return st == MN_OK ? o : mn_tape_fail(tape, st);
}
