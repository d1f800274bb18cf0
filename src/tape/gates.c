/* gates.c - the gates of heads on the tape.
 *
 *   write = sigmoid(u)    strength = write softplus(scale)    decay = -softplus(z) e^rate
 *   z = w + bias
 *
 *   du = (dwrite + dstrength softplus(scale)) write (1 - write)     dz = -ddecay e^rate sigmoid(z)
 *   dscale = sigmoid(scale) sum dstrength write    dbias = sum dz    drate = sum ddecay decay
 *
 * They are few numbers next to those of heads: apart, each of these steps takes as long as all of
 * them. */
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
