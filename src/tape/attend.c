/* attend.c - attention and HyperMLP of one token whose position is read when the step runs, so that
 * a step that was recorded goes on by it. */
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

/* A mix, in the tape's type; d, which goes number by number, stays what it is. False where a factor
 * is absent. */
static bool mix_of(mn_decode_mix *to, mn_tape *tape, const mn_hyper_mix *m, int64_t P) {
    *to = (mn_decode_mix){ 0 };
    if (!m->c && !m->U && !m->Vt && !m->d) return true;
    const mn_tensor *c = m->c ? mn_tape_cast(tape, m->c, tape->dtype) : NULL;
    const mn_tensor *U = m->U ? mn_tape_cast(tape, m->U, tape->dtype) : NULL;
    const mn_tensor *Vt = m->Vt ? mn_tape_cast(tape, m->Vt, tape->dtype) : NULL;
    if (!c || !U || !Vt || !m->d) return false;
    *to = (mn_decode_mix){ .c = c->data, .U = U->data, .Vt = Vt->data, .d = m->d->data, .R = m->R,
                           .c_step = c->stride[2], .U_step = P * m->R, .Vt_step = m->R * P,
                           .d_step = P, .wide = m->d->dtype != tape->dtype };
    return true;
}

mn_tensor *mn_tape_hyper(mn_tape *tape, const mn_hyper *how, mn_tensor *q, mn_tensor *k,
                         mn_tensor *v, mn_tensor *gv) {
    if (!q || !k || !v || mn_tape_dead(tape)) return NULL;
    const int64_t H = v->shape[2], Q = q->shape[2], K = q->shape[3], V = v->shape[3];
    const int64_t n_parts = mn_ceil_div(how->capacity, MN_DECODE_ATTEND_KEYS);
    mn_decode_hyper work = { .dtype = tape->dtype, .H = H, .Q = Q, .K = K, .V = V, .P = how->P,
        .capacity = how->capacity, .n_parts = n_parts, .by_place = how->by_place,
        .normed = how->normed, .eps = how->eps, .position = tape->position, .q = q->data,
        .k = k->data, .v = v->data, .gv = gv ? gv->data : NULL, .q_step = q->stride[2],
        .k_step = k->stride[2], .v_step = v->stride[2], .gv_step = gv ? gv->stride[2] : 0,
        .o_step = V, .keys = how->keys, .values = how->values, .key_row = Q * K, .key_step = K,
        .value_row = H * V, .value_step = V };
    for (int i = 0; i < 2; i++) {
        if (mix_of(&work.mix[i], tape, &how->mix[i], how->P)) continue;
        return mn_tape_fail(tape, mn_fail(MN_ERR_ARGUMENT, "a mix of lags has no parameters"));
    }
    const int64_t keys = MN_DECODE_ATTEND_KEYS;
    mn_tensor *scores = mn_tape_new_of(tape, MN_F32,
                                       (int64_t[]){ 1, Q, n_parts, keys + work.mix[0].R });
    mn_tensor *mixed = mn_tape_new_of(tape, MN_F32,
                                      (int64_t[]){ 1, H, n_parts, keys + work.mix[1].R + 1 });
    mn_tensor *parts = mn_tape_new_of(tape, MN_F32, (int64_t[]){ 1, H, n_parts, V });
    mn_tensor *o = mn_tape_new(tape, (int64_t[]){ 1, 1, H, V });
    if (!scores || !mixed || !parts || !o) return NULL;
    work.scores = scores->data;
    work.mixed = mixed->data;
    work.parts = parts->data;
    work.o = o->data;
    if (!mn_tape_runs(tape) || mn_defer_hyper(tape, &work)) return o;
    const int code = mn_decode_run_hyper(&work, tape->where);
    const mn_status st = code == 0 ? MN_OK : mn_device_check(tape->device, code, "hyper");
    return st == MN_OK ? o : mn_tape_fail(tape, st);
}
