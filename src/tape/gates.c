/* gates.c - the gates of heads on the tape, and their work on the CPU's threads.
 *
 *   write = sigmoid(u)    strength = write softplus(scale)    decay = -softplus(z) e^rate
 *   z = w + bias
 *
 *   du = (dwrite + dstrength softplus(scale)) write (1 - write)     dz = -ddecay e^rate sigmoid(z)
 *   dscale = sigmoid(scale) sum dstrength write    dbias = sum dz    drate = sum ddecay decay
 *
 * They are few numbers next to those of heads: apart, each of these steps takes as long as all of
 * them. */
#include <math.h>

#include "base/dtype.h"
#include "tape/cpu.h"
#include "tape/tape_internal.h"

typedef struct gates {
    mn_tensor *u, *w, *param[3];
    mn_head_gates outputs;
} gates;

/* Rows at equal distance. */
static mn_view rows_of(mn_view view, const mn_tensor *x) {
    view.stride[1] = mn_row_step(x);
    return view;
}

static mn_gates_params work_of(const gates *g) {
    mn_gates_params work = { .rows = g->u->shape[0] * g->u->shape[1], .n = g->u->shape[3] };
    work.u = rows_of(mn_value(g->u), g->u);
    work.w = rows_of(mn_value(g->w), g->w);
    for (int i = 0; i < 3; i++) work.param[i] = mn_value(g->param[i]);
    return work;
}

static void back_gates(mn_tape *tape, void *payload) {
    const gates *g = payload;
    mn_gates_params work = work_of(g);
    work.back = true;
    work.cot[0] = mn_grad_read(g->outputs.write);
    work.cot[1] = mn_grad_read(g->outputs.strength);
    work.cot[2] = mn_grad_read(g->outputs.decay);
    if (!work.cot[0].data && !work.cot[1].data && !work.cot[2].data) return;
    if (mn_wants(g->u)) work.du = rows_of(mn_grad_write(tape, g->u, &work.add_u), g->u);
    if (mn_wants(g->w)) work.dw = rows_of(mn_grad_write(tape, g->w, &work.add_w), g->w);
    for (int i = 0; i < 3; i++) {
        if (!mn_wants(g->param[i])) continue;
        work.dparam[i] = mn_grad_write(tape, g->param[i], &work.add_param[i]);
    }
    mn_tape_do(tape, MN_ELEMENTWISE_GATES, &work);
}

mn_head_gates mn_tape_head_gates(mn_tape *tape, mn_tensor *u, mn_tensor *w, mn_tensor *scale,
                                 mn_tensor *bias, mn_tensor *rate) {
    mn_head_gates outputs = { 0 };
    if (!u || !w || !scale || !bias || !rate || mn_tape_dead(tape)) return outputs;
    gates *g = mn_tape_note(tape, sizeof *g);
    const int64_t *n = u->shape, heads[4] = { n[0], n[1], n[3], 1 };
    const mn_dtype wide = tape->dtype == MN_BF16 ? MN_F32 : tape->dtype;
    outputs.write = mn_tape_new(tape, heads);
    outputs.strength = mn_tape_new(tape, heads);
    outputs.decay = mn_tape_new_of(tape, wide, (int64_t[]){ n[0], n[1], 1, n[3] });
    if (!g || !outputs.write || !outputs.strength || !outputs.decay) return (mn_head_gates){ 0 };
    *g = (gates){ u, w, { scale, bias, rate }, outputs };
    mn_gates_params work = work_of(g);
    work.outputs[0] = mn_value(outputs.write);
    work.outputs[1] = mn_value(outputs.strength);
    work.outputs[2] = mn_value(outputs.decay);
    mn_tape_do(tape, MN_ELEMENTWISE_GATES, &work);
    bool wanted = mn_wants(u) || mn_wants(w);
    for (int i = 0; i < 3; i++) wanted |= mn_wants(g->param[i]);
    mn_tape_record(tape, "the gates of heads", back_gates, g, wanted,
                   (mn_tensor *[]){ outputs.write, outputs.strength, outputs.decay }, 3);
    return outputs;
}

/* ---- on the CPU ------------------------------------------------------------------------------ */

static double get(const mn_view *v, int64_t i) {
    if (!v->data) return 0.0;
    return v->dtype == MN_F64 ? ((const double *)v->data)[i] : (double)((const float *)v->data)[i];
}

static void put(const mn_view *v, int64_t i, double x, bool add) {
    if (!v->data) return;
    if (add) x += get(v, i);
    if (v->dtype == MN_F64) ((double *)v->data)[i] = x;
    else ((float *)v->data)[i] = (float)x;
}

static double sigmoid(double x) {
    return 1.0 / (1.0 + exp(-x));
}

static double softplus(double x) {
    return fmax(x, 0.0) + log1p(exp(-fabs(x)));
}

/* One item is one head, whose rows are added in their order. */
static void run_head(void *context, int64_t h, int worker) {
    (void)worker;
    const mn_gates_params *p = context;
    const double scale = get(&p->param[0], h), bias = get(&p->param[1], h);
    const double size = softplus(scale), rate = exp(get(&p->param[2], h));
    double sums[3] = { 0.0 };
    for (int64_t row = 0; row < p->rows; row++) {
        const int64_t at = row * p->n + h;
        const double s = sigmoid(get(&p->u, row * p->u.stride[1] + h));
        const double z = get(&p->w, row * p->w.stride[1] + h) + bias;
        if (!p->back) {
            put(&p->outputs[0], at, s, false);
            put(&p->outputs[1], at, s * size, false);
            put(&p->outputs[2], at, -softplus(z) * rate, false);
            continue;
        }
        const double strength = get(&p->cot[1], at), decay = get(&p->cot[2], at);
        const double ds = get(&p->cot[0], at) + strength * size;
        const double dz = -decay * rate * sigmoid(z);
        put(&p->du, row * p->du.stride[1] + h, ds * s * (1.0 - s), p->add_u);
        put(&p->dw, row * p->dw.stride[1] + h, dz, p->add_w);
        sums[0] += strength * s;
        sums[1] += dz;
        sums[2] -= decay * softplus(z) * rate;
    }
    if (!p->back) return;
    put(&p->dparam[0], h, sums[0] * sigmoid(scale), p->add_param[0]);
    put(&p->dparam[1], h, sums[1], p->add_param[1]);
    put(&p->dparam[2], h, sums[2], p->add_param[2]);
}

int mn_elementwise_gates_cpu(void *where, const void *work, void *space) {
    (void)space;
    const mn_gates_params *w = work;
    return mn_elementwise_items(where, w->n, run_head, w);
}
